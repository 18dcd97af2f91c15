// SPDX-License-Identifier: Apache-2.0
// epilogue_mma.cuh - from the accumulators of a tile to memory. Four lanes hold the eight columns of a fragment's row,
// two each; they exchange four fragments, so that each has eight neighbours: 16 bytes, stored at once.
#pragma once
#include "tiles.cuh"

// Lane q of four gets word q of all four.
DEV void transpose4(uint32_t (&w)[4], int lane)
{
    const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t v = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
        if (odd) w[i] = v;
        else w[i + 1] = v;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t v = __shfl_xor_sync(~0u, upper ? w[i] : w[i + 2], 2);
        if (upper) w[i] = v;
        else w[i + 2] = v;
    }
}

// Eight neighbours at p, of which `left` are inside.
template <class T> DEV void store8(void *p, const uint32_t (&w)[4], int left, bool wide)
{
    if (wide && left >= 8) {
        store_global16(p, uint4{w[0], w[1], w[2], w[3]});
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < left) ((uint16_t *)p)[i] = (uint16_t)(w[i / 2] >> 16 * (i & 1));
}

// Rows of a lane in fragment i: these and eight further.
DEV int mma_row(int i, int wm, int lane) { return 32 * i + 16 * wm + lane / 4; }

// Before the steps of a tile: h on its way into the L2 cache.
template <class C> DEV void mma_prepare(const MmaArgs &p, const MmaTile &t)
{
    if constexpr (C::EPI == MMA_DGLU) {
        const int parts = p.gated ? 2 : 1, lines = t.rows * 4 * parts;
        for (int i = threadIdx.x; i < lines; i += MMA_THREADS) {
            const int r = i / (4 * parts), q = i % (4 * parts), n = t.n0 + q % 4 * 64;
            if (n >= p.N) continue;
            const int64_t at =
                (int64_t)(t.row0 + r) * parts * p.N + (p.pairs ? 2 * t.n0 + q * 64 : (int64_t)(q / 4) * p.N + n);
            if (p.pairs && 2 * t.n0 + q * 64 >= 2 * p.N) continue;
            asm volatile("prefetch.global.L2 [%0];" ::"l"((const typename C::T *)p.h_in + at));
        }
    }
}

template <class C> DEV void mma_bias(const MmaArgs &p, const MmaTile &t, int wn, int lane, float (&acc)[4][8][4])
{
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int q = 0; q < 2; q++) {
            const int c = lane % 4 * 2 + q, n = C::GLU ? t.n0 + 32 * wn + j / 2 * 8 + c : t.n0 + 64 * wn + 8 * j + c;
            if (n >= p.N) continue;
            const bool up = C::GLU ? j & 1 : n >= p.bias_split;
            const int64_t at = t.e * p.bias_g + (C::GLU || !up ? n : n - p.bias_split) * p.bias_n;
            const float v = load_float(p.bias, p.bias_dtype, at + (up ? p.bias_delta : 0));
#pragma unroll
            for (int i = 0; i < 4; i++) acc[i][j][q] += v, acc[i][j][q + 2] += v;
        }
}

// Rows of results with the words of eight fragments: D, or h.
template <class T> DEV void store_rows(char *row, int n, int N, const float (&f)[8][4], int half, int lane, bool wide)
{
#pragma unroll
    for (int c = 0; c < 2; c++) {
        uint32_t w[4];
#pragma unroll
        for (int j = 0; j < 4; j++) w[j] = pack2<T>(f[4 * c + j][2 * half], f[4 * c + j][2 * half + 1]);
        transpose4(w, lane);
        const int at = n + 32 * c + lane % 4 * 8;
        if (row && at < N) store8<T>(row + (int64_t)at * 2, w, N - at, wide);
    }
}

// What is long goes through the four fragments of rows in a loop, as unrolled it would be more than the instruction
// cache has: N further ones come to acc[0] and on.
template <int N> DEV void mma_next(float (&acc)[4][8][4])
{
#pragma unroll
    for (int i = 0; i < 4 - N; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int q = 0; q < 4; q++) acc[i][j][q] = acc[i + N][j][q];
}

template <class C>
DEV void epilogue_store(const MmaArgs &p, const MmaTile &t, int wm, int wn, int lane, float (&acc)[4][8][4])
{
    typedef typename C::T T;
    const MmaMatrix &d = p.d[t.part];
    char *const base = C::WGRAD ? (char *)mma_matrix(d, t.e) : (char *)d.p;
    const int size = p.d_f32 ? 4 : 2;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int m = mma_row(i, wm, lane) + 8 * half;
            char *row = m < t.m ? base + (int64_t)((C::WGRAD ? t.m0 : t.row0) + m) * d.pitch : nullptr;
            const int n0 = t.n0 + 64 * wn;
            if (p.add || p.d_f32) {
#pragma unroll
                for (int j = 0; j < 8; j++)
#pragma unroll
                    for (int q = 0; q < 2; q++) {
                        const int n = n0 + 8 * j + lane % 4 * 2 + q;
                        if (!row || n >= p.N) continue;
                        float &v = acc[i][j][2 * half + q];
                        char *const at = row + (int64_t)n * size;
                        if (p.add) v += p.d_f32 ? *(const float *)at : to_float(*(const T *)at);
                        if (p.d_f32) *(float *)at = v;
                    }
            }
            if (!p.d_f32) store_rows<T>(row, n0, p.N, acc[i], half, lane, p.wide);
        }
}

// The forward: h as it is, and a.
template <class C, int KIND>
DEV void epilogue_act(const MmaArgs &p, const MmaTile &t, int wm, int wn, int lane, float (&acc)[4][8][4])
{
    typedef typename C::T T;
    constexpr bool PAIRS = C::EPI == MMA_PAIRS, GATED = C::EPI != MMA_ACT;
    // Of a fused forward with pairs N counts both.
    const int features = PAIRS ? p.N / 2 : p.N, columns = C::GLU ? 2 * p.N : p.N;
    const char *const h = (const char *)p.h;
#pragma unroll 1
    for (int i = 0; i < 4 && 32 * i + 16 * wm < t.m; i += 2) {
        if (i) mma_next<2>(acc);
#pragma unroll
        for (int s = 0; s < 4; s++) {
            const int half = s % 2;
            float(&v8)[8][4] = acc[s / 2];
            const int m = mma_row(i + s / 2, wm, lane) + 8 * half;
            const bool there = m < t.m;
            const int64_t r = t.row0 + m;
            char *const a = there ? (char *)p.d[0].p + r * p.d[0].pitch : nullptr;
            char *const hr = there && h ? (char *)h + r * columns * 2 : nullptr;
            const int o = 2 * half;
            if constexpr (C::GLU) {
                uint32_t g[4], u[4], v[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float(&x)[4] = v8[2 * j], (&y)[4] = v8[2 * j + 1];
                    v[j] = pack2<T>(fast_value<KIND, true>(p.act, x[o], y[o]),
                                    fast_value<KIND, true>(p.act, x[o + 1], y[o + 1]));
                    g[j] = pack2<T>(x[o], x[o + 1]), u[j] = pack2<T>(y[o], y[o + 1]);
                }
                const int n = t.n0 + 32 * wn + lane % 4 * 8;
                transpose4(v, lane);
                if (a && n < p.N) store8<T>(a + n * 2, v, p.N - n, p.wide);
                if (!h) continue;
                transpose4(g, lane);
                transpose4(u, lane);
                if (hr && n < p.N)
                    store8<T>(hr + n * 2, g, p.N - n, p.wide), store8<T>(hr + (p.N + n) * 2, u, p.N - n, p.wide);
            } else if constexpr (PAIRS) {
                if (h) store_rows<T>(hr, t.n0 + 64 * wn, p.N, v8, half, lane, p.wide);
                uint32_t v[4];
#pragma unroll
                for (int j = 0; j < 4; j++) { // features 8 j + lane % 4, and four further
                    const float(&x)[4] = v8[2 * j], (&y)[4] = v8[2 * j + 1];
                    v[j] = pack2<T>(fast_value<KIND, true>(p.act, x[o], x[o + 1]),
                                    fast_value<KIND, true>(p.act, y[o], y[o + 1]));
                }
                transpose4(v, lane);
                const uint32_t w[4] = {__byte_perm(v[0], v[1], 0x5410), __byte_perm(v[2], v[3], 0x5410),
                                       __byte_perm(v[0], v[1], 0x7632), __byte_perm(v[2], v[3], 0x7632)};
                const int n = t.n0 / 2 + 32 * wn + lane % 4 * 8;
                if (a && n < features) store8<T>(a + n * 2, w, features - n, p.wide);
            } else {
                if (h) store_rows<T>(hr, t.n0 + 64 * wn, p.N, v8, half, lane, p.wide);
#pragma unroll
                for (int j = 0; j < 8; j++)
#pragma unroll
                    for (int q = 0; q < 2; q++) v8[j][o + q] = fast_value<KIND, GATED>(p.act, v8[j][o + q], 1.f);
                store_rows<T>(a, t.n0 + 64 * wn, p.N, v8, half, lane, p.wide);
            }
        }
    }
}

// The backward of the activation, from da in f32 and h. dh may lie where h is: a lane reads what it writes before, and
// half a fragment ahead of its use.
template <class T, bool PAIRS> struct MmaH {
    const T *h; // of a lane's first row and columns
    int64_t pitch, second;
    int rows, cols; // from there
    bool gated;
    DEV void load(int r, uint4 (&g)[2], uint4 (&u)[2]) const // row r from there
    {
        const uint32_t ones = pack2<T>(1.f, 1.f);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const bool there = r < rows && 32 * c < cols;
            const T *const q = h + r * pitch + 32 * c * (PAIRS ? 2 : 1);
            g[c] = there ? *(const uint4 *)q : uint4{0, 0, 0, 0};
            u[c] = there && gated ? *(const uint4 *)(q + second) : uint4{ones, ones, ones, ones};
        }
    }
};

template <class C, int KIND, bool PAIRS>
DEV void epilogue_dglu(const MmaArgs &p, const MmaTile &t, int wm, int wn, int lane, float (&acc)[4][8][4])
{
    typedef typename C::T T;
    const int64_t pitch = p.gated ? 2 * (int64_t)p.N : p.N, second = PAIRS ? 8 : p.N;
    const int n = t.n0 + 64 * wn + lane % 4 * 8, first = mma_row(0, wm, lane);
    const int64_t at = (t.row0 + first) * pitch + n * (PAIRS ? 2 : 1);
    const MmaH<T, PAIRS> h = {(const T *)p.h_in + at, pitch, second, t.m - first, p.N - n, p.gated != 0};
    T *const dh = (T *)p.dh + at;
    char *const pa = (char *)p.d[0].p + (t.row0 + first) * p.d[0].pitch + n * 2;
    const float *const prob = p.prob + t.row0 + first;
    float *const dp = p.dp + (t.n0 / 64 + wn) * p.dp_pitch + t.row0 + first;
    uint4 g4[2][2], u4[2][2];
    h.load(0, g4[0], u4[0]);
#pragma unroll 1
    for (int i = 0; i < 4 && 32 * i + 16 * wm < t.m; i++) {
        if (i) mma_next<1>(acc);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = 32 * i + 8 * half;
            h.load(half ? r + 24 : r + 8, g4[half ^ 1], u4[half ^ 1]);
            const float weight = r < h.rows ? __ldg(prob + r) : 0.f;
            float dot = 0;
#pragma unroll
            for (int c = 0; c < 2; c++) {
                uint32_t x[4], y[4];
#pragma unroll
                for (int j = 0; j < 4; j++)
                    x[j] = __float_as_uint(acc[0][4 * c + j][2 * half]),
                    y[j] = __float_as_uint(acc[0][4 * c + j][2 * half + 1]);
                transpose4(x, lane);
                transpose4(y, lane);
                const uint32_t *gp = &g4[half][c].x, *up = &u4[half][c].x;
                uint32_t og[4], ou[4], oa[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float2 g, u;
                    if (PAIRS) { // features 2 j and 2 j + 1 are words 2 j and 2 j + 1 of eight
                        const float2 v = unpack2<T>(j < 2 ? gp[2 * j % 4] : up[2 * j % 4]),
                                     w = unpack2<T>(j < 2 ? gp[2 * j % 4 + 1] : up[2 * j % 4 + 1]);
                        g = {v.x, w.x}, u = {v.y, w.y};
                    } else g = unpack2<T>(gp[j]), u = unpack2<T>(up[j]);
                    const Slopes v = slopes<KIND>(p.act, __uint_as_float(x[j]), weight, g.x, u.x),
                                 w = slopes<KIND>(p.act, __uint_as_float(y[j]), weight, g.y, u.y);
                    if (32 * c < h.cols) dot += v.dp + w.dp;
                    oa[j] = pack2<T>(v.pa, w.pa);
                    og[j] = PAIRS ? pack2<T>(v.gate, v.up) : pack2<T>(v.gate, w.gate);
                    ou[j] = PAIRS ? pack2<T>(w.gate, w.up) : pack2<T>(v.up, w.up);
                }
                if (r >= h.rows || 32 * c >= h.cols) continue;
                store_global16(pa + r * p.d[0].pitch + 64 * c, uint4{oa[0], oa[1], oa[2], oa[3]});
                T *const q = dh + r * pitch + 32 * c * (PAIRS ? 2 : 1);
                if (PAIRS) {
                    store_global16(q, uint4{og[0], ou[0], og[1], ou[1]});
                    store_global16(q + 8, uint4{og[2], ou[2], og[3], ou[3]});
                } else {
                    store_global16(q, uint4{og[0], og[1], og[2], og[3]});
                    if (h.gated) store_global16(q + second, uint4{ou[0], ou[1], ou[2], ou[3]});
                }
            }
            dot += __shfl_xor_sync(~0u, dot, 1);
            dot += __shfl_xor_sync(~0u, dot, 2);
            if (lane % 4 == 0 && r < h.rows) dp[r] = dot;
        }
    }
}

template <class C>
DEV void mma_epilogue(const MmaArgs &p, const MmaTile &t, int wm, int wn, int lane, bool live, float (&acc)[4][8][4])
{
    if (!live || (C::WGRAD && p.add && t.rows == 0)) return; // adding nothing
    if constexpr (C::EPI == MMA_DGLU) {
        with_kind(p.act, [&](auto kind) {
            if (p.pairs) epilogue_dglu<C, kind.value, true>(p, t, wm, wn, lane, acc);
            else epilogue_dglu<C, kind.value, false>(p, t, wm, wn, lane, acc);
        });
    } else {
        if (p.bias) mma_bias<C>(p, t, wn, lane, acc);
        if constexpr (C::EPI == MMA_STORE) epilogue_store<C>(p, t, wm, wn, lane, acc);
        else with_kind(p.act, [&](auto kind) { epilogue_act<C, kind.value>(p, t, wm, wn, lane, acc); });
    }
}
