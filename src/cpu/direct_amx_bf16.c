/* SPDX-License-Identifier: Apache-2.0
 *
 * direct_amx_bf16.c - products by weights where they lie: 16 rows of a matrix stored along k are a tile of A, so
 * weights are read once, straight from memory, and never packed. What is packed is the activations, once, as tiles of
 * B. C comes out transposed and is turned in registers, 16 x 16 at a time: some 3 % of the time. Weights of the next
 * call are fetched on the side: 16 rows at a time are more streams than a core prefetches by itself.
 *
 * Also here: the transposed left operand of weight gradients. */
#include "cpu/amx.h"
#include "cpu/kernels.h"
#include "cpu/pack_avx512.h"
#include "util.h"

/* ---- packing ---- */

/* Pairs of k are neighbours in memory already: a transposition of 32-bit units. Missing rows and k are zeros. */
void fmoe_pack_tiles_amx_bf16(void *tiles, int64_t K, const void *const *rows, int64_t n)
{
    char *to = tiles;
    for (int64_t k0 = 0; k0 < K; k0 += TILE_K, to += TILE_BYTES) {
        const __mmask32 m = first_k(K - k0);
        __m512 r[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            r[i] = i < n ? _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(m, (const uint16_t *)rows[i] + k0))
                         : _mm512_setzero_ps();
        transpose16(r);
#pragma GCC unroll 16
        for (int p = 0; p < 16; p++) _mm512_storeu_ps(to + 64 * p, r[p]);
    }
}

/* 16 columns and 32 rows at a time: two rows make 16 units of 32 bits, and 16 such pairs are transposed in registers.
 */
void fmoe_pack_left_pairs_amx_bf16(void *dst, int64_t kc, const void *const *rows, int64_t n)
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

static inline void step_32x32(const char *w0, const char *w1, int64_t stride, const char *x0, const char *x1)
{
    tile_load(4, w0, stride);
    tile_load(6, x0, 64);
    tile_dot(0, 4, 6);
    tile_load(7, x1, 64);
    tile_dot(1, 4, 7);
    tile_load(5, w1, stride);
    tile_dot(2, 5, 6);
    tile_dot(3, 5, 7);
}

static inline void step_32x16(const char *w0, const char *w1, int64_t stride, const char *x)
{
    tile_load(6, x, 64);
    tile_load(4, w0, stride);
    tile_dot(0, 4, 6);
    tile_load(5, w1, stride);
    tile_dot(2, 5, 6);
}

/* The weights of one call: whole steps where they lie, the last, incomplete one copied and padded with zeros. */
typedef struct weights {
    const char *at[2];
    int64_t stride, full_steps, steps;
    tile last[2];
} weights;

/* A line of each of n rows. */
static inline void fetch_lines(const char *at, int64_t stride, int64_t n)
{
    for (int64_t j = 0; j < n; j++) _mm_prefetch(at + j * stride, _MM_HINT_T1);
}

/* Sums transposed, [32 weights][32 rows]; `both`: of 32 rows of x, else of 16. Of the next weights, n rows are fetched.
 */
static void block(const weights *w, const char *x, bool both, float *sums, const char *next, int64_t n)
{
    const char *x1 = x + w->steps * TILE_BYTES;
    const bool odd = w->full_steps < w->steps;
    tile_zero(0);
    tile_zero(2);
    if (both) {
        tile_zero(1);
        tile_zero(3);
        for (int64_t s = 0; s < w->full_steps; s++) {
            step_32x32(w->at[0] + 64 * s, w->at[1] + 64 * s, w->stride, x + s * TILE_BYTES, x1 + s * TILE_BYTES);
            fetch_lines(next + 64 * s, w->stride, n);
        }
        if (odd)
            step_32x32(w->last[0].bytes, w->last[1].bytes, 64, x + w->full_steps * TILE_BYTES,
                       x1 + w->full_steps * TILE_BYTES);
        tile_store(1, sums + 16, 128);
        tile_store(3, sums + 16 * 32 + 16, 128);
    } else {
        for (int64_t s = 0; s < w->full_steps; s++) {
            step_32x16(w->at[0] + 64 * s, w->at[1] + 64 * s, w->stride, x + s * TILE_BYTES);
            fetch_lines(next + 64 * s, w->stride, n);
        }
        if (odd) step_32x16(w->last[0].bytes, w->last[1].bytes, 64, x + w->full_steps * TILE_BYTES);
    }
    tile_store(0, sums, 128);
    tile_store(2, sums + 16 * 32, 128);
}

/* c[i][j] = sums[j][i], i < rows <= 16, j < n <= 16. */
static void turn(const float *sums, int64_t rows, int64_t n, float *c, int64_t ldc)
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

void fmoe_gemm_direct_amx_bf16(int64_t rows, int64_t K, const void *tiles, const void *w, int64_t w_stride, int64_t n,
                               float *c, int64_t ldc, const void *next)
{
    _Alignas(64) float sums[32 * 32] = {0};
    /* Fewer than 32 weights: tiles of as many rows as there are, and where there is no second tile, the first again. */
    const int64_t upper = fmoe_min(n, 16), lower = n > 16 ? n - 16 : upper;
    weights a = {.at = {w, n > 16 ? (const char *)w + 16 * w_stride : w},
                 .stride = w_stride,
                 .full_steps = K / TILE_K,
                 .steps = fmoe_ceil_div(K, TILE_K)};
    for (int h = 0; h < 2 && a.full_steps < a.steps; h++)
        for (int64_t j = 0; j < (h ? lower : upper); j++)
            _mm512_store_si512(
                a.last[h].bytes + 64 * j,
                _mm512_maskz_loadu_epi16(first_k(K % TILE_K), a.at[h] + j * w_stride + 64 * a.full_steps));
    const uint8_t u = (uint8_t)upper, l = (uint8_t)lower;
    tile_configure((const uint8_t[8]){u, u, l, l, u, l, 16, 16});
    const char *fetch = next ? next : w;
    int64_t left = next ? 32 : 0; /* rows of the next weights: each block of x fetches its share of them */
    for (const char *x = tiles; rows > 0; rows -= 32, c += 32 * ldc, x += 2 * a.steps * TILE_BYTES) {
        const int64_t share = fmoe_ceil_div(left, fmoe_ceil_div(rows, 32));
        block(&a, x, rows > 16, sums, fetch, share);
        fetch += share * w_stride;
        left -= share;
        for (int64_t i = 0; i < fmoe_min(rows, 32); i += 16)
            for (int64_t j = 0; j < n; j += 16)
                turn(sums + j * 32 + i, fmoe_min(16, rows - i), n - j, c + i * ldc + j, ldc);
    }
    tile_release();
}
