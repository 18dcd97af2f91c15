/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_avx512_bf16.c - bf16 products with vdpbf16ps: the 6 x 64 tile of tile_avx512.h on pairs of k, twice the rate of
 * f32.
 *
 * The instruction treats denormals as zero and rounds to nearest even whatever MXCSR says; see docs/numerics.md. */
#include <immintrin.h>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/x86/pack_avx512.h"
#include "util.h"

#define DOT_UNITS(acc, a, b) _mm512_dpbf16_ps(acc, (__m512bh)(a), (__m512bh)(b))
#include "cpu/kernels/x86/kmajor_avx512.h"
#include "cpu/kernels/x86/kmajor_few_rows_avx512.h"

enum { PAIRS, KMAJOR }; /* forms of a tile */
enum { UNIT = 2 };

static inline __attribute__((always_inline)) void tile_piece(const int form, fmoe_overlap *overlap)
{
    (void)form;
    piece_pairs(overlap);
}

static inline __m512 tile_unit(const char *a, bool whole)
{
    uint32_t unit = 0;
    memcpy(&unit, a, whole ? 4 : 2);
    return _mm512_castsi512_ps(_mm512_set1_epi32((int)unit));
}

#include "cpu/kernels/x86/tile_avx512.h"

static inline __attribute__((always_inline)) void nmajor_load(const char *w, int64_t step, bool whole, __m512 b[4])
{
    const __m512i lower = _mm512_loadu_si512(lower_words), upper = _mm512_loadu_si512(upper_words);
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
        const __m512i even = _mm512_loadu_si512(w + 64 * j),
                      odd = whole ? _mm512_loadu_si512(w + step + 64 * j) : _mm512_setzero_si512();
        b[2 * j] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(even, lower, odd));
        b[2 * j + 1] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(even, upper, odd));
    }
}

#include "cpu/kernels/x86/nmajor_inplace_avx512.h"

void fmoe_gemm_nmajor_inplace_bf16_avx512_bf16(int64_t rows, int64_t kc, const void *const *a, const void *w,
                                               int64_t w_step, void *panel, float *c, int64_t ldc, int first,
                                               fmoe_overlap *overlap)
{
    const int64_t done = NAME(nmajor_first_tile)(rows, kc, a, w, w_step, panel, c, ldc, first, overlap);
    run_tiles(PAIRS, rows - done, kc, a + done, 4, panel, c + done * ldc, ldc, first, overlap, 1);
}

void fmoe_gemm_bf16_avx512_bf16(int64_t rows, int64_t kc, const void *const *a, int64_t a_step, const void *panel,
                                float *c, int64_t ldc, int first, fmoe_overlap *overlap)
{
    run_tiles(PAIRS, rows, kc, a, a_step, panel, c, ldc, first, overlap, 1);
    while (overlap->pack.left > 0) piece_pairs(overlap);
}

void fmoe_gemm_kmajor_bf16_avx512_bf16(int64_t rows, int64_t kc, const void *const *a, int64_t a_step,
                                       const void *panel, float *c, int64_t ldc, int first, fmoe_overlap *overlap)
{
    (void)a_step;
    run_tiles(KMAJOR, rows, kc * 2, a, 4, panel, c, ldc, first, overlap, 1);
    while (overlap->pack.left > 0) kmajor_piece(0, overlap);
}

void fmoe_gemm_kmajor_few_rows_bf16_avx512_bf16(int64_t rows, int64_t kc, int64_t chunk, const void *const *a,
                                                const char *w, int64_t step, float *c, int64_t ldc, int first,
                                                fmoe_walk *prefetch)
{
    NAME(few_rows_multiply)(rows, kc * 2, chunk * 2, a, w, step, c, ldc, first, prefetch);
}

void fmoe_pack_kmajor_bf16_avx512_bf16(void *panel, int64_t kc, int64_t col, const void *const *cols, int64_t n)
{
    kmajor_pack(panel, kc * 2, col, cols, n);
}

/* Rows k and k+1 side by side: word 2j from row k, word 2j+1 from row k+1. A row of the panel is two or three cache
 * lines, and the next row of a weight matrix a page away: no hardware prefetcher follows that, so fetch ahead by hand.
 */
void fmoe_pack_nmajor_pairs_avx512_bf16(void *panel, int64_t kc, int64_t col, const void *const *rows, int64_t n)
{
    const __m512i lower = _mm512_loadu_si512(lower_words), upper = _mm512_loadu_si512(upper_words);
    for (int64_t k = 0; k < kc; k += 2) {
        uint32_t *dst = (uint32_t *)panel + k / 2 * FMOE_NB + col;
        const uint16_t *even = rows[k], *odd = k + 1 < kc ? rows[k + 1] : NULL;
        for (int64_t ahead = k + PACK_AHEAD; ahead < fmoe_min(kc, k + PACK_AHEAD + 2); ahead++)
            prefetch_row(rows[ahead], 2 * n);
        prefetch_right(even, 2 * n);
        if (odd) prefetch_right(odd, 2 * n);
        if (n == FMOE_NB && odd) { /* as a rule; with masks it takes twice as long */
            interleave(even, odd, (char *)dst);
            interleave(even + 32, odd + 32, (char *)(dst + 32));
            continue;
        }
        for (int64_t j = 0; j < n; j += 32) {
            const int64_t nj = fmoe_min(32, n - j);
            const __mmask32 m = nj == 32 ? 0xffffffffu : (1u << nj) - 1u;
            const __m512i lo = _mm512_maskz_loadu_epi16(m, even + j);
            const __m512i hi = odd ? _mm512_maskz_loadu_epi16(m, odd + j) : _mm512_setzero_si512();
            _mm512_mask_storeu_epi32(dst + j, first_n(nj), _mm512_permutex2var_epi16(lo, lower, hi));
            if (nj > 16)
                _mm512_mask_storeu_epi32(dst + j + 16, first_n(nj - 16), _mm512_permutex2var_epi16(lo, upper, hi));
        }
    }
}

/* Pairs of k are contiguous in memory already: a transposition of 32-bit units. */
void fmoe_pack_transposed_pairs_avx512_bf16(void *panel, int64_t kc, int64_t col, const void *const *cols, int64_t n)
{
    for (int64_t j0 = 0; j0 < n; j0 += 16) {
        const int64_t nj = fmoe_min(16, n - j0);
        const __mmask16 mj = first_n(nj);
        for (int64_t k0 = 0; k0 < kc; k0 += 32) {
            const int64_t nk = fmoe_min(32, kc - k0), units = (nk + 1) / 2;
            const __mmask32 m = nk == 32 ? 0xffffffffu : (1u << nk) - 1u;
            __m512 r[16];
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++)
                r[j] = j < nj ? _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(m, (const uint16_t *)cols[j0 + j] + k0))
                              : _mm512_setzero_ps();
            prefetch_cols(cols, j0, n, k0 * 2, kc * 2);
            transpose16(r);
            uint32_t *dst = (uint32_t *)panel + k0 / 2 * FMOE_NB + col + j0;
            if (units == 16) {
#pragma GCC unroll 16
                for (int k = 0; k < 16; k++) _mm512_mask_storeu_ps(dst + k * FMOE_NB, mj, r[k]);
            } else {
                for (int64_t k = 0; k < units; k++) _mm512_mask_storeu_ps(dst + k * FMOE_NB, mj, r[k]);
            }
        }
    }
}

double fmoe_peak_bf16_avx512_bf16(int64_t rounds)
{
    __m512 acc[24];
    for (int i = 0; i < 24; i++) acc[i] = _mm512_set1_ps((float)i);
    __m512i x = _mm512_set1_epi32(0x3c003c00), y = _mm512_set1_epi32(0x3c003c00);
    for (int64_t r = 0; r < rounds; r++) {
        __asm__ volatile("" : "+v"(x), "+v"(y));
#pragma GCC unroll 24
        for (int i = 0; i < 24; i++) acc[i] = _mm512_dpbf16_ps(acc[i], (__m512bh)x, (__m512bh)y);
    }
    for (int i = 1; i < 24; i++) acc[0] = _mm512_add_ps(acc[0], acc[i]);
    volatile float sink = _mm512_reduce_add_ps(acc[0]);
    (void)sink;
    return (double)rounds * 24 * 32 * 2;
}
