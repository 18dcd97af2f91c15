/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_inplace_amx_bf16.c - products by k-major weights in place: 16 rows of a stored matrix are a tile of A, so
 * weights are read once, straight from memory, and never packed. What is packed is the activations, once, as tiles of
 * B. C comes out transposed and is transposed back in registers, 16 x 16 at a time: some 3 % of the time. Weights of
 * the next call are prefetched meanwhile: 16 rows at a time are more streams than a core prefetches by itself.
 *
 * Also here: the transposed left operand of weight gradients. */
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/x86/amx.h"
#include "cpu/kernels/x86/pack_avx512.h"
#include "util.h"

/* ---- packing ---- */

/* Pairs of k are contiguous in memory already: a transposition of 32-bit units, n of them in a row of a tile. A single
 * row needs none. Missing k are zeros. */
void fmoe_pack_tiles_amx_bf16(void *tiles, int64_t K, const void *const *rows, int64_t n)
{
    char *to = tiles;
    for (int64_t k0 = 0; k0 < K; k0 += TILE_K, to += 4 * TILE_ROWS * n) {
        const __mmask32 m = first_k(K - k0);
        if (n == 1) {
            _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(m, (const uint16_t *)rows[0] + k0));
            continue;
        }
        __m512 r[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            r[i] = i < n ? _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(m, (const uint16_t *)rows[i] + k0))
                         : _mm512_setzero_ps();
        transpose16(r);
        if (n == 16) {
#pragma GCC unroll 16
            for (int p = 0; p < 16; p++) _mm512_storeu_ps(to + 64 * p, r[p]);
        } else {
            for (int p = 0; p < 16; p++) _mm512_mask_storeu_ps(to + 4 * n * p, first_n(n), r[p]);
        }
    }
}

/* 16 columns and 32 rows at a time: two rows make 16 units of 32 bits, and 16 such pairs are transposed in registers.
 */
void fmoe_pack_wgrad_left_pairs_amx_bf16(void *dst, int64_t kc, const void *const *rows, int64_t n)
{
    const int64_t length = fmoe_ceil_div(kc, TILE_K) * TILE_K;
    for (int64_t k0 = 0; k0 < kc; k0 += TILE_K)
        for (int64_t j0 = 0; j0 < n; j0 += 16) {
            const int64_t nj = fmoe_min(16, n - j0);
            const __mmask16 m = first_n(nj);
            __m512 r[16];
#pragma GCC unroll 16
            for (int p = 0; p < 16; p++) {
                const int64_t k = k0 + 2 * p;
                const __m256i zero = _mm256_setzero_si256();
                const __m256i even = k < kc ? _mm256_maskz_loadu_epi16(m, (const uint16_t *)rows[k] + j0) : zero;
                const __m256i odd = k + 1 < kc ? _mm256_maskz_loadu_epi16(m, (const uint16_t *)rows[k + 1] + j0) : zero;
                r[p] = _mm512_castsi512_ps(
                    _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16)));
            }
            transpose16(r);
            uint16_t *to = (uint16_t *)dst + j0 * length + k0;
            if (nj == 16) {
#pragma GCC unroll 16
                for (int j = 0; j < 16; j++) _mm512_storeu_ps(to + j * length, r[j]);
            } else {
                for (int j = 0; j < nj; j++) _mm512_storeu_ps(to + j * length, r[j]);
            }
        }
}

/* ---- the product ---- */

/* x0, x1: two tiles of x, of 16 rows and of n1. */
static inline void inplace_step_32x32(const char *w0, const char *w1, int64_t stride, const char *x0, const char *x1,
                                      int64_t n1)
{
    tile_load(4, w0, stride);
    tile_load(6, x0, 64);
    tile_dot(0, 4, 6);
    tile_load(7, x1, 4 * n1);
    tile_dot(1, 4, 7);
    tile_load(5, w1, stride);
    tile_dot(2, 5, 6);
    tile_dot(3, 5, 7);
}

static inline void inplace_step_32x16(const char *w0, const char *w1, int64_t stride, const char *x, int64_t n)
{
    tile_load(6, x, 4 * n);
    tile_load(4, w0, stride);
    tile_dot(0, 4, 6);
    tile_load(5, w1, stride);
    tile_dot(2, 5, 6);
}

/* Up to 32 weights: whole steps in place, the last, incomplete one copied and padded with zeros. Where there is no
 * second tile of them, the first again. */
typedef struct weights {
    const char *at[2];
    int64_t n[2];
    int64_t stride, full_steps, steps;
    tile last[2];
} weights;

static void weights_of(weights *w, const char *at, int64_t stride, int64_t n, int64_t K)
{
    w->at[0] = at;
    w->at[1] = n > 16 ? at + 16 * stride : at;
    w->n[0] = fmoe_min(n, 16);
    w->n[1] = n > 16 ? n - 16 : n;
    w->stride = stride;
    w->full_steps = K / TILE_K;
    w->steps = fmoe_ceil_div(K, TILE_K);
    for (int h = 0; h < 2 && w->full_steps < w->steps; h++)
        for (int64_t j = 0; j < w->n[h]; j++)
            _mm512_store_si512(
                w->last[h].bytes + 64 * j,
                _mm512_maskz_loadu_epi16(first_k(K % TILE_K), w->at[h] + j * stride + 64 * w->full_steps));
}

/* Tiles as large as there are weights and rows; a change of size takes 0.1 us. */
typedef struct sizes {
    int64_t weights[2], rows;
} sizes;

static void configure(sizes *now, const weights *w, int64_t rows)
{
    const sizes want = {{w->n[0], w->n[1]}, rows};
    if (now->rows == want.rows && now->weights[0] == want.weights[0] && now->weights[1] == want.weights[1]) return;
    *now = want;
    const uint8_t u = (uint8_t)w->n[0], l = (uint8_t)w->n[1], r = (uint8_t)fmoe_min(rows, 16),
                  s = (uint8_t)(rows > 16 ? rows - 16 : rows);
    tile_configure((const uint8_t[8]){u, u, l, l, u, l, 16, 16}, (const uint8_t[8]){r, s, r, s, 16, 16, r, s});
}

/* A line of each of n rows. */
static inline void prefetch_lines(const char *at, int64_t stride, int64_t n)
{
    for (int64_t j = 0; j < n; j++) _mm_prefetch(at + j * stride, _MM_HINT_T1);
}

/* Sums transposed, [32 weights][32 rows], of up to 32 rows of x; one row alone: its 16 sums side by side. Of the next
 * weights, n rows are prefetched. */
static void inplace_block(const weights *w, const char *x, int64_t rows, float *sums, const char *next, int64_t n)
{
    const bool odd = w->full_steps < w->steps;
    tile_zero(0);
    tile_zero(2);
    if (rows > 16) {
        const char *x1 = x + w->steps * TILE_BYTES;
        const int64_t n1 = rows - 16, step1 = 4 * TILE_ROWS * n1;
        tile_zero(1);
        tile_zero(3);
        for (int64_t s = 0; s < w->full_steps; s++) {
            inplace_step_32x32(w->at[0] + 64 * s, w->at[1] + 64 * s, w->stride, x + s * TILE_BYTES, x1 + s * step1, n1);
            prefetch_lines(next + 64 * s, w->stride, n);
        }
        if (odd)
            inplace_step_32x32(w->last[0].bytes, w->last[1].bytes, 64, x + w->full_steps * TILE_BYTES,
                               x1 + w->full_steps * step1, n1);
        tile_store(1, sums + 16, 128);
        tile_store(3, sums + 16 * 32 + 16, 128);
    } else {
        const int64_t step = 4 * TILE_ROWS * rows;
        for (int64_t s = 0; s < w->full_steps; s++) {
            inplace_step_32x16(w->at[0] + 64 * s, w->at[1] + 64 * s, w->stride, x + s * step, rows);
            prefetch_lines(next + 64 * s, w->stride, n);
        }
        if (odd) inplace_step_32x16(w->last[0].bytes, w->last[1].bytes, 64, x + w->full_steps * step, rows);
    }
    tile_store(0, sums, rows == 1 ? 4 : 128);
    tile_store(2, sums + 16 * 32, rows == 1 ? 4 : 128);
}

/* c[i][j] = sums[j][i], i < rows <= 16, j < n <= 16. */
static void store_transposed(const float *sums, int64_t rows, int64_t n, float *c, int64_t ldc)
{
    __m512 r[16];
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) r[j] = _mm512_load_ps(sums + 32 * j);
    transpose16(r);
    const __mmask16 m = first_n(n);
    if (rows == 16) {
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) _mm512_mask_storeu_ps(c + i * ldc, m, r[i]);
    } else {
        for (int64_t i = 0; i < rows; i++) _mm512_mask_storeu_ps(c + i * ldc, m, r[i]);
    }
}

void fmoe_gemm_inplace_amx_bf16(int64_t rows, int64_t K, const void *tiles, const void *w, int64_t w_stride, int64_t n,
                                float *c, int64_t ldc, const void *next)
{
    _Alignas(64) float sums[32 * 32] = {0};
    weights a;
    sizes now = {0};
    for (const char *at = w; n > 0; n -= 32, at += 32 * w_stride, c += 32) {
        const int64_t columns = fmoe_min(n, 32);
        weights_of(&a, at, w_stride, columns, K);
        const char *x = tiles, *prefetch = n > 32 ? at + 32 * w_stride : next ? next : w;
        int64_t left =
            n > 32 || next ? 32 : 0; /* rows of the next weights: each block of x prefetches its share of them */
        for (int64_t i = 0; i < rows; i += 32, x += 2 * a.steps * TILE_BYTES) {
            const int64_t m = fmoe_min(32, rows - i), share = fmoe_ceil_div(left, fmoe_ceil_div(rows - i, 32));
            configure(&now, &a, m);
            inplace_block(&a, x, m, sums, prefetch, share);
            prefetch += share * w_stride;
            left -= share;
            float *const to = c + i * ldc;
            if (m == 1) {
                for (int64_t j = 0; j < columns; j += 16)
                    _mm512_mask_storeu_ps(to + j, first_n(columns - j), _mm512_load_ps(sums + j * 32));
            } else { /* rows outside: the other way around 64 rows and more take 2 to 5 % longer */
                for (int64_t q = 0; q < m; q += 16)
                    for (int64_t j = 0; j < columns; j += 16)
                        store_transposed(sums + j * 32 + q, fmoe_min(16, m - q), columns - j, to + q * ldc + j, ldc);
            }
        }
    }
    tile_release();
}
