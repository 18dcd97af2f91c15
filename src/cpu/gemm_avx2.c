/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_avx2.c - f32 products on AVX2 + FMA: 6 x 16 register tiles (12 accumulators, 2 B, 1 A), and the packing of
 * panels.
 *
 * A panel is four strips of 16 columns; a strip of a chunk is 32 KiB and stays in L1 while all rows pass. */
#include <immintrin.h>

#include "cpu/kernels.h"
#include "util.h"

enum { NR = 16 };

static inline __attribute__((always_inline)) void tile(const int form, const int mr, int64_t kc, const void *const *a,
                                                       int64_t a_step, const float *b, float *c, int64_t ldc, int first,
                                                       fmoe_side *side, int64_t tiles)
{
    (void)form;
    __m256 acc[FMOE_MR][2];
    const char *row[FMOE_MR];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        row[i] = a[i];
        acc[i][0] = acc[i][1] = _mm256_setzero_ps();
    }
    int64_t offset = 0;
    const int64_t rate = fmoe_fetch_rate(&side->fetch, tiles * kc);
    for (int64_t k = 0; k < kc; k++, b += NR, offset += a_step) {
        fmoe_fetch(&side->fetch, rate);
        const __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            const __m256 ai = _mm256_broadcast_ss((const float *)(const void *)(row[i] + offset));
            acc[i][0] = _mm256_fmadd_ps(ai, b0, acc[i][0]);
            acc[i][1] = _mm256_fmadd_ps(ai, b1, acc[i][1]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            float *to = c + i * ldc + 8 * j;
            _mm256_storeu_ps(to, first ? acc[i][j] : _mm256_add_ps(_mm256_loadu_ps(to), acc[i][j]));
        }
}

#define PANEL float
#include "cpu/tiles.h"

void fmoe_gemm_f32_avx2(int64_t rows, int64_t kc, const void *const *a, int64_t a_step, const void *panel, float *c,
                        int64_t ldc, int first, fmoe_side *side)
{
    for (int strip = 0; strip < FMOE_NB / NR; strip++)
        run_tiles(0, rows, kc, a, a_step, (const float *)panel + strip * kc * NR, c + strip * NR, ldc, first, side,
                  FMOE_NB / NR - strip);
}

/* ---- packing: a loader per storage type, 8 elements ---- */

static inline __m256 load8_f32(const void *p) { return _mm256_loadu_ps(p); }

static inline __m256 load8_bf16(const void *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}

static inline __m256 load8_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }

static inline float load1_f32(const void *p) { return *(const float *)p; }
static inline float load1_bf16(const void *p) { return fmoe_bf16_to_float(*(const uint16_t *)p); }
static inline float load1_f16(const void *p) { return fmoe_f16_to_float(*(const uint16_t *)p); }

/* 8 x 8 block of f32. */
static inline __attribute__((always_inline)) void transpose8(__m256 r[8])
{
    __m256 t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
        t[q] = _mm256_permute2f128_ps(r[q], r[q + 4], 0x20);
        t[q + 4] = _mm256_permute2f128_ps(r[q], r[q + 4], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) r[i] = t[i];
}

#define DEFINE_PACK(type, element_bytes)                                                                               \
    void fmoe_pack_rows_##type##_avx2(void *panel, int64_t kc, int64_t col, const void *const *rows, int64_t n)        \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j += 8) {                                                                           \
            float *dst = (float *)panel + (col + j) / NR * kc * NR + (col + j) % NR;                                   \
            const int64_t nj = fmoe_min(8, n - j);                                                                     \
            for (int64_t k = 0; k < kc; k++, dst += NR) {                                                              \
                const char *src = (const char *)rows[k] + j * element_bytes;                                           \
                if (nj == 8) _mm256_storeu_ps(dst, load8_##type(src));                                                 \
                else                                                                                                   \
                    for (int64_t i = 0; i < nj; i++) dst[i] = load1_##type(src + i * element_bytes);                   \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    void fmoe_pack_cols_##type##_avx2(void *panel, int64_t kc, int64_t col, const void *const *cols, int64_t n)        \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j += 8) {                                                                           \
            float *dst = (float *)panel + (col + j) / NR * kc * NR + (col + j) % NR;                                   \
            const int64_t nj = fmoe_min(8, n - j);                                                                     \
            int64_t k = 0;                                                                                             \
            if (nj == 8)                                                                                               \
                for (; k + 8 <= kc; k += 8) {                                                                          \
                    __m256 r[8];                                                                                       \
                    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) r[i] =                                         \
                        load8_##type((const char *)cols[j + i] + k * element_bytes);                                   \
                    transpose8(r);                                                                                     \
                    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) _mm256_storeu_ps(dst + (k + i) * NR, r[i]);    \
                }                                                                                                      \
            for (; k < kc; k++)                                                                                        \
                for (int64_t i = 0; i < nj; i++)                                                                       \
                    dst[k * NR + i] = load1_##type((const char *)cols[j + i] + k * element_bytes);                     \
        }                                                                                                              \
    }

DEFINE_PACK(f32, 4)
DEFINE_PACK(bf16, 2)
DEFINE_PACK(f16, 2)

double fmoe_peak_f32_avx2(int64_t rounds)
{
    __m256 acc[12];
    for (int i = 0; i < 12; i++) acc[i] = _mm256_set1_ps((float)i);
    __m256 x = _mm256_set1_ps(0.9999f), y = _mm256_set1_ps(1e-4f);
    for (int64_t r = 0; r < rounds; r++) {
        __asm__ volatile("" : "+x"(x), "+x"(y));
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) acc[i] = _mm256_fmadd_ps(acc[i], x, y);
    }
    for (int i = 1; i < 12; i++) acc[0] = _mm256_add_ps(acc[0], acc[i]);
    float out[8];
    _mm256_storeu_ps(out, acc[0]);
    volatile float sink = out[0];
    (void)sink;
    return (double)rounds * 12 * 8 * 2;
}
