/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_avx512.c - f32 products on AVX-512: 6 x 64 register tiles (24 accumulators, 4 B, 1 A), and the packing of
 * panels.
 *
 * Per k: 4 loads of B, 6 broadcasts, 24 multiply-adds: the loads fit beside the multiply-adds on every AVX-512 core,
 * with B streaming from L2. Rows are split evenly over tiles (8 rows: 4 + 4, not 6 + 2). */
#include <immintrin.h>

#include "cpu/pack_avx512.h"
#include "cpu/kernels.h"
#include "util.h"

static inline __attribute__((always_inline)) void tile(const int mr, int64_t kc, const void *const *a, int64_t a_step,
                                                       const float *b, float *c, int64_t ldc, int first,
                                                       fmoe_fetch *next, int64_t fetches)
{
    __m512 acc[FMOE_MR][4];
    const char *row[FMOE_MR];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        row[i] = a[i];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) acc[i][j] = _mm512_setzero_ps();
    }
    int64_t offset = 0;
    const void *const *line = next->line, *const *fetch_end = line + fetches;
    const int64_t apart = fetches ? fmoe_max(1, kc / fetches) : 0;
    int64_t wait = apart;
    for (int64_t k = 0; k < kc; k++, b += FMOE_NB, offset += a_step) {
        if (--wait == 0 && line < fetch_end) { /* spread evenly: bursts would hold up the loads of B */
            _mm_prefetch(*line++, _MM_HINT_T1);
            wait = apart;
        }
        const __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + 16), b2 = _mm512_loadu_ps(b + 32),
                     b3 = _mm512_loadu_ps(b + 48);
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            const __m512 ai = _mm512_set1_ps(*(const float *)(const void *)(row[i] + offset));
            acc[i][0] = _mm512_fmadd_ps(ai, b0, acc[i][0]);
            acc[i][1] = _mm512_fmadd_ps(ai, b1, acc[i][1]);
            acc[i][2] = _mm512_fmadd_ps(ai, b2, acc[i][2]);
            acc[i][3] = _mm512_fmadd_ps(ai, b3, acc[i][3]);
        }
    }
    next->line = line;
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            float *to = c + i * ldc + 16 * j;
            _mm512_storeu_ps(to, first ? acc[i][j] : _mm512_add_ps(_mm512_loadu_ps(to), acc[i][j]));
        }
}

#define PANEL float
#include "cpu/tiles.h"

void fmoe_gemm_f32_avx512(int64_t rows, int64_t kc, const void *const *a, int64_t a_step, const void *panel, float *c,
                          int64_t ldc, int first, fmoe_fetch *next)
{
    run_tiles(rows, kc, a, a_step, panel, c, ldc, first, next);
}

/* ---- packing: one loader per storage type, 16 elements or the first n of them ---- */

static inline __m512 load16_f32(const void *p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }

static inline __m512 load16_bf16(const void *p, __mmask16 m)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
}

static inline __m512 load16_f16(const void *p, __mmask16 m) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, p)); }

#define DEFINE_PACK(type, element_bytes)                                                                               \
    void fmoe_pack_rows_##type##_avx512(void *panel, int64_t kc, int64_t col, const void *const *rows, int64_t n)      \
    {                                                                                                                  \
        for (int64_t k = 0; k < kc; k++) {                                                                             \
            float *dst = (float *)panel + k * FMOE_NB + col;                                                           \
            if (k + PACK_AHEAD < kc) fetch_row(rows[k + PACK_AHEAD], n *element_bytes);                                \
            for (int64_t j = 0; j < n; j += 16) {                                                                      \
                const __mmask16 m = first_n(n - j);                                                                    \
                _mm512_mask_storeu_ps(dst + j, m, load16_##type((const char *)rows[k] + j * element_bytes, m));        \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    void fmoe_pack_cols_##type##_avx512(void *panel, int64_t kc, int64_t col, const void *const *cols, int64_t n)      \
    {                                                                                                                  \
        for (int64_t j0 = 0; j0 < n; j0 += 16) {                                                                       \
            const int64_t nj = fmoe_min(16, n - j0);                                                                   \
            for (int64_t k0 = 0; k0 < kc; k0 += 16) {                                                                  \
                const __mmask16 m = first_n(kc - k0);                                                                  \
                __m512 r[16];                                                                                          \
                _Pragma("GCC unroll 16") for (int j = 0; j < 16; j++) r[j] =                                           \
                    j < nj ? load16_##type((const char *)cols[j0 + j] + k0 * element_bytes, m) : _mm512_setzero_ps();  \
                fetch_cols(cols, j0, n, k0 *element_bytes, kc *element_bytes);                                         \
                transpose16(r);                                                                                        \
                float *dst = (float *)panel + k0 * FMOE_NB + col + j0;                                                 \
                const int64_t nk = fmoe_min(16, kc - k0);                                                              \
                const __mmask16 mj = first_n(nj);                                                                      \
                if (nk == 16) {                                                                                        \
                    _Pragma("GCC unroll 16") for (int k = 0; k < 16; k++)                                              \
                        _mm512_mask_storeu_ps(dst + k * FMOE_NB, mj, r[k]);                                            \
                } else {                                                                                               \
                    for (int64_t k = 0; k < nk; k++) _mm512_mask_storeu_ps(dst + k * FMOE_NB, mj, r[k]);               \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

DEFINE_PACK(f32, 4)
DEFINE_PACK(bf16, 2)
DEFINE_PACK(f16, 2)

/* 24 independent chains of multiply-adds: more than latency times ports on any AVX-512 core. */
double fmoe_peak_f32_avx512(int64_t rounds)
{
    __m512 acc[24];
    for (int i = 0; i < 24; i++) acc[i] = _mm512_set1_ps((float)i);
    __m512 x = _mm512_set1_ps(0.9999f), y = _mm512_set1_ps(1e-4f);
    for (int64_t r = 0; r < rounds; r++) {
        __asm__ volatile("" : "+v"(x), "+v"(y));
#pragma GCC unroll 24
        for (int i = 0; i < 24; i++) acc[i] = _mm512_fmadd_ps(acc[i], x, y);
    }
    for (int i = 1; i < 24; i++) acc[0] = _mm512_add_ps(acc[0], acc[i]);
    volatile float sink = _mm512_reduce_add_ps(acc[0]);
    (void)sink;
    return (double)rounds * 24 * 16 * 2;
}
