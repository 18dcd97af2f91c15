// SPDX-License-Identifier: Apache-2.0
// maps.cuh - the operands of the layer as the maps that TMA reads and writes by.
#pragma once
#include "cuda/products.cuh"

// The matrices of a list lie at multiples of 2^shift bytes: those are the outermost dimension then, of which each
// expert has its place. (16 bytes is the least stride of a map.)
static inline bool place(const Mat &w, int64_t size, const Layer &l, Place *q, int64_t *count, int64_t *stride)
{
    *q = Place{w.list, (uintptr_t)w.p, w.shift};
    *count = w.list ? w.span + 1 : l.E;
    *stride = w.list ? ((int64_t)1 << w.shift) / size : w.g;
    return !w.list || (w.shift >= 4 && w.shift < 40 && w.span < INT32_MAX && !w.skip);
}

// Weights of one part: rows n, columns k. K-major {k, n, e}, N-major {n, k, e}, boxes of 64 x `box_rows` (N-major: 64 x
// 64); the names are those of the product in which rows are n. `swap`: rows are the contraction.
struct WeightMap {
    bool ok, n_major;
};
static inline WeightMap weight_map(CUtensorMap &map, Place &where, const Layer &l, const Mat &w, int64_t rows,
                                   int64_t cols, bool swap, int box_rows)
{
    const bool unit_cols = w.c == 1, unit_rows = w.r == 1;
    int64_t count, step;
    if ((!unit_cols && !unit_rows) || !place(w, 2, l, &where, &count, &step)) return {false, false};
    // The contiguous dimension is the inner one; whether that is k or n decides the product.
    const int64_t dim[3] = {unit_cols ? cols : rows, unit_cols ? rows : cols, count},
                  stride[3] = {1, unit_cols ? w.r : w.c, step};
    const bool n_major = unit_cols == swap;
    const int box[3] = {64, n_major ? 64 : box_rows, 1};
    return {sm90_map(&map, l.dtype, w.p, dim, stride, box), n_major};
}

// Rows of an activation: {column, row}, boxes of 64 columns x `box_rows` rows.
static inline bool rows_map2(CUtensorMap *m, const Layer &l, const Rows &x, int box_rows)
{
    return sm90_map2(m, l.dtype, x.p, x.cols, l.rows, x.ld, 64, box_rows);
}

// And with the column cut in parts: {column, part, row}.
static inline bool rows_map(CUtensorMap *m, const Layer &l, const Rows &x, int64_t parts, int box_rows)
{
    const int64_t dim[3] = {x.cols / parts, parts, l.rows}, stride[3] = {1, x.cols / parts, x.ld};
    const int box[3] = {64, 1, box_rows};
    return sm90_map(m, l.dtype, x.p, dim, stride, box);
}

// An adapter's rows, and its steps: 64 each, in the last of them only the 16s there are.
static inline bool lora_row_maps(Sm90Args &a, const Layer &l, const Rows &lora)
{
    a.lora_steps = (int)(lora.cols / 64);
    a.lora_tail = (int)(lora.cols % 64 + 15) / 16;
    if (a.lora_tail > (a.tokens ? 1 : 3)) a.lora_steps++, a.lora_tail = 0;
    return a.tokens ? rows_map(&a.lora, l, lora, 1, 64) && rows_map(&a.lora16, l, lora, 1, 16)
                    : rows_map2(&a.lora, l, lora, 64);
}

// And its factor, in as many parts as the weights and lying as they do.
static inline bool lora_maps(Sm90Args &a, const Layer &l, const Lora &lora, int parts, bool rows_k, bool n_major,
                             int box_rows)
{
    if (!lora.rows.cols) return true;
    for (int i = 0; i < parts; i++) {
        Place stack;
        const Weight &f = lora.factor;
        const WeightMap m = weight_map(a.lora_b[i], stack, l, parts == 1 ? f.whole : f.part[i], f.rows / parts, f.cols,
                                       rows_k, box_rows);
        if (!m.ok || m.n_major != n_major) return false;
    }
    return lora_row_maps(a, l, lora.rows);
}

// Results of the tokens kernel.
static inline bool token_maps(CUtensorMap (&m)[2], const Layer &l, const Rows &x, int64_t parts, int piece = SM90_PIECE)
{
    return rows_map(&m[0], l, x, parts, 16) && rows_map(&m[1], l, x, parts, 16 * piece);
}

// Gates and ups of one tensor, up after gate at one distance.
static inline bool glu_map(CUtensorMap *m, const Layer &l, const Weight &w)
{
    const Mat &g = w.part[0], &u = w.part[1];
    return !g.list && !u.list && g.r == u.r && (l.E == 1 || g.g == u.g) && (char *)u.p > (char *)g.p &&
           sm90_map_glu(m, l.dtype, g.p, w.cols, l.I, l.E, g.r, ((char *)u.p - (char *)g.p) / 2, g.g);
}

static inline bool gather_ok(const void *x, int64_t ldx) { return (uintptr_t)x % 16 == 0 && ldx % 8 == 0; }

static inline Sm90Args base_args(const Layer &l)
{
    Sm90Args a = {};
    a.off = l.map.off;
    a.tok = l.map.tok;
    a.prob = l.map.prob;
    a.E = (int)l.E;
    a.parts = 1;
    a.act = l.act;
    a.ragged = l.ragged;
    return a;
}

static inline void gather_from(Sm90Args &a, const void *x, int64_t ldx)
{
    a.x = x;
    a.ldx = (size_t)ldx;
}

static inline int steps(int64_t k) { return (int)((k + 63) / 64); }

// Of the fused backward, all but the weights.
static inline Sm90Args dh_args(const Layer &l, const void *dout, int64_t ldd, const void *h, void *dh, void *pa,
                               float *dp)
{
    Sm90Args a = base_args(l);
    gather_from(a, dout, ldd);
    a.N = (int)l.I;
    a.k_steps = steps(l.H);
    a.gated = l.HC == 2 * l.I;
    a.pairs = l.interleaved;
    a.h_in = h;
    a.dh = dh;
    a.pa = pa;
    a.dp = dp;
    a.dp_pitch = (size_t)l.rows;
    return a;
}
