/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_avx512_bf16.c - bf16 products with vdpbf16ps: the 6 x 64 tile of gemm_avx512.c on pairs of k, twice its rate.
 *
 * The instruction treats denormals as zero and rounds to nearest even whatever MXCSR says; see docs/numerics.md. */
#include <immintrin.h>

#include "cpu/transpose_avx512.h"
#include "cpu/kernels.h"
#include "util.h"

static inline __m512 dot_pairs(__m512 acc, uint32_t pair, __m512i b)
{
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32((int)pair), (__m512bh)b);
}

static inline uint32_t load_pair(const char *p)
{
    uint32_t u;
    memcpy(&u, p, 4);
    return u;
}

static inline uint32_t load_single(const char *p)
{
    uint16_t u;
    memcpy(&u, p, 2);
    return u;
}

static inline __attribute__((always_inline)) void tile(const int mr, int64_t kc, const void *const *a, int64_t a_step,
                                                       const uint32_t *b, float *c, int64_t ldc, int first)
{
    __m512 acc[FMOE_MR][4];
    const char *row[FMOE_MR];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        row[i] = a[i];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) acc[i][j] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(c + i * ldc + 16 * j);
    }
    int64_t offset = 0;
    for (int64_t k = 0; k < kc / 2; k++, b += FMOE_NB, offset += a_step) {
        const __m512i b0 = _mm512_loadu_si512(b), b1 = _mm512_loadu_si512(b + 16), b2 = _mm512_loadu_si512(b + 32),
                      b3 = _mm512_loadu_si512(b + 48);
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            const uint32_t ai = load_pair(row[i] + offset);
            acc[i][0] = dot_pairs(acc[i][0], ai, b0);
            acc[i][1] = dot_pairs(acc[i][1], ai, b1);
            acc[i][2] = dot_pairs(acc[i][2], ai, b2);
            acc[i][3] = dot_pairs(acc[i][3], ai, b3);
        }
    }
    if (kc & 1) {
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            const uint32_t ai = load_single(row[i] + offset);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) acc[i][j] = dot_pairs(acc[i][j], ai, _mm512_loadu_si512(b + 16 * j));
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) _mm512_storeu_ps(c + i * ldc + 16 * j, acc[i][j]);
}

void fmoe_gemm_bf16_avx512_bf16(int64_t rows, int64_t kc, const void *const *a, int64_t a_step, const void *panel, float *c,
                                int64_t ldc, int first)
{
    for (int64_t done = 0, tiles = fmoe_ceil_div(rows, FMOE_MR); tiles > 0; tiles--) {
        const int64_t mr = fmoe_ceil_div(rows - done, tiles);
        switch (mr) {
        case 1: tile(1, kc, a + done, a_step, panel, c + done * ldc, ldc, first); break;
        case 2: tile(2, kc, a + done, a_step, panel, c + done * ldc, ldc, first); break;
        case 3: tile(3, kc, a + done, a_step, panel, c + done * ldc, ldc, first); break;
        case 4: tile(4, kc, a + done, a_step, panel, c + done * ldc, ldc, first); break;
        case 5: tile(5, kc, a + done, a_step, panel, c + done * ldc, ldc, first); break;
        default: tile(6, kc, a + done, a_step, panel, c + done * ldc, ldc, first); break;
        }
        done += mr;
    }
}

/* Rows k and k+1 side by side: word 2j from row k, word 2j+1 from row k+1. */
void fmoe_pack_rows_pairs_avx512_bf16(void *panel, int64_t kc, int64_t col, const void *const *rows, int64_t n)
{
    for (int64_t k = 0; k < kc; k += 2) {
        uint32_t *dst = (uint32_t *)panel + k / 2 * FMOE_NB + col;
        const uint16_t *even = rows[k], *odd = k + 1 < kc ? rows[k + 1] : NULL;
        for (int64_t j = 0; j < n; j += 16) {
            const int64_t nj = fmoe_min(16, n - j);
            const __mmask16 m = (__mmask16)((1u << nj) - 1u);
            const __m512i lo = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, even + j));
            const __m512i hi = odd ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, odd + j)) : _mm512_setzero_si512();
            _mm512_mask_storeu_epi32(dst + j, m, _mm512_or_si512(lo, _mm512_slli_epi32(hi, 16)));
        }
    }
}

/* Pairs of k are neighbours in memory already: a transposition of 32-bit units. */
void fmoe_pack_cols_pairs_avx512_bf16(void *panel, int64_t kc, int64_t col, const void *const *cols, int64_t n)
{
    for (int64_t j0 = 0; j0 < n; j0 += 16) {
        const int64_t nj = fmoe_min(16, n - j0);
        const __mmask16 mj = (__mmask16)((1u << nj) - 1u);
        for (int64_t k0 = 0; k0 < kc; k0 += 32) {
            const int64_t nk = fmoe_min(32, kc - k0), units = (nk + 1) / 2;
            const __mmask32 m = nk == 32 ? 0xffffffffu : (1u << nk) - 1u;
            __m512 r[16];
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++)
                r[j] = j < nj ? _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(m, (const uint16_t *)cols[j0 + j] + k0))
                              : _mm512_setzero_ps();
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
