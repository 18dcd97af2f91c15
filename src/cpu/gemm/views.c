/* SPDX-License-Identifier: Apache-2.0
 *
 * views.c - what products are made of: matrices of weights, rows, and the scratch of a worker. */
#include "cpu/gemm/views.h"

fmoe_view fmoe_stack_at(const fmoe_stack *s, int64_t e)
{
    if (s->prepacked.block) {
        fmoe_view packed = s->prepacked;
        packed.p += e * s->expert;
        return packed;
    }
    const fmoe_tensor *t = s->list ? s->t + e : s->t;
    const int d = s->list ? 0 : 1; /* the N dimension */
    const int64_t element = (int64_t)fmoe_dtype_size(s->dtype);
    if (s->quant) {
        const int64_t N = s->rows ? s->rows : t->shape[d], K = s->like ? s->like[e].shape[1] : s->K;
        const fmoe_view k_major = {.N = N, .K = K, .sn = K, .sk = 1, .coded = s, .e = e},
                        n_major = {.N = K, .K = N, .sn = 1, .sk = K, .coded = s, .e = e};
        return s->swap ? n_major : k_major;
    }
    fmoe_view v = {.p = fmoe_data(t),
                   .N = t->shape[d],
                   .K = t->shape[d + 1],
                   .sn = fmoe_stride(t, d),
                   .sk = fmoe_stride(t, d + 1)};
    if (!s->list) v.p += e * fmoe_stride(t, 0) * element;
    if (s->rows) {
        v.p += s->row * v.sn * element;
        v.N = s->rows;
    }
    if (s->swap) v = (fmoe_view){.p = v.p, .N = v.K, .K = v.N, .sn = v.sk, .sk = v.sn};
    return v;
}

fmoe_rows fmoe_rows_of(const fmoe_tensor *t, const int64_t *index)
{
    const int dtype = fmoe_tensor_dtype(t);
    return (fmoe_rows){.base = fmoe_data(t),
                       .stride = fmoe_stride(t, 0) * (int64_t)fmoe_dtype_size(dtype),
                       .index = index,
                       .dtype = dtype};
}

fmoe_rows fmoe_rows_buffer(const void *base, int64_t columns, int dtype)
{
    return (fmoe_rows){.base = base, .stride = columns * (int64_t)fmoe_dtype_size(dtype), .dtype = dtype};
}

void fmoe_point(const fmoe_rows *a, const fmoe_groups *g, int64_t e, int64_t row, int64_t n, int64_t offset,
                const void **to)
{
    const fmoe_rows rows = *a; /* which `to` cannot be part of */
    if (rows.index && !rows.list)
        for (int64_t i = 0; i < n; i++) to[i] = rows.base + offset + rows.index[row + i] * rows.stride;
    else
        for (int64_t i = 0; i < n; i++) to[i] = (const char *)fmoe_row(&rows, g, e, row + i) + offset;
}

void fmoe_load_row(const fmoe_kernels *k, int dtype, float *dst, const void *src, int64_t n)
{
    if (dtype == FMOE_BF16) k->load_bf16(dst, src, n);
    else if (dtype == FMOE_F16) k->load_f16(dst, src, n);
    else memcpy(dst, src, (size_t)n * sizeof *dst);
}

void fmoe_store_row(const fmoe_kernels *k, int dtype, void *dst, const float *src, int64_t n)
{
    if (dtype == FMOE_BF16) k->store_bf16(dst, src, n);
    else if (dtype == FMOE_F16) k->store_f16(dst, src, n);
    else memcpy(dst, src, (size_t)n * sizeof *src);
}

void fmoe_round_row(const fmoe_kernels *k, int dtype, float *row, const float *bias, int64_t n)
{
    if (dtype == FMOE_BF16) k->round_bf16(row, bias, n);
    else k->round_f16(row, bias, n);
}

void fmoe_scratch_carve(fmoe_scratch *s, fmoe_carve *c, const fmoe_plan_impl *p, int64_t sums)
{
    for (int w = 0; w < fmoe_cpu(p)->threads; w++) {
        fmoe_scratch one;
        one.panel = fmoe_carve_take(c, 2 * FMOE_PANEL_BYTES, 1);
        one.c = fmoe_carve_take(c, FMOE_PANELS * FMOE_TASK_ROWS * FMOE_NB, sizeof(float)); /* >= FMOE_ROW_BLOCK rows */
        one.pointers = fmoe_carve_take(c, FMOE_KC_PAIRS, sizeof(void *));
        /* A weight gradient needs `left`, the other two products `sums` and `widened`: one memory for both. */
        const int64_t widened = FMOE_WIDEN_ROWS * FMOE_KC;
        const int64_t left = FMOE_LEFT_PANELS * FMOE_PANEL_BYTES / (int64_t)sizeof(float);
        float *shared = fmoe_carve_take(c, fmoe_max(sums + widened, left), sizeof(float));
        one.left = shared;
        one.sums = shared;
        one.room = sums;
        one.widened = shared ? shared + sums : NULL;
        one.decoded = NULL;
        if (p->d.flags & FMOE_QUANT) {
            const int64_t columns = fmoe_cpu(p)->gather ? FMOE_NB * 2 * (fmoe_max(p->d.H, p->d.I) + 32) : 0;
            one.decoded = fmoe_carve_take(c, fmoe_max(FMOE_DECODED_BYTES, columns), 1);
        }
        if (s) s[w] = one;
    }
}
