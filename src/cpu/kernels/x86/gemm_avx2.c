/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_avx2.c - f32 products on AVX2 + FMA: 6 x 16 register tiles (12 accumulators, 2 B, 1 A), and the packing of
 * panels.
 *
 * A panel is four strips of 16 columns; a strip of a chunk is 32 KiB and stays in L1 while all rows pass. */
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/x86/avx2.h"

enum { NR = 16, PACKED = 0 }; /* a strip's columns; where B is: in a panel, or in memory as a dtype */

/* B comes from a strip, b_step bytes a k, or from memory: then it is left in the strip `keep`, if there is one. */
static inline __attribute__((always_inline)) void strip_tile(const int source, const int mr, int64_t kc,
                                                             const void *const *a, int64_t a_step, const char *b,
                                                             int64_t b_step, float *keep, float *c, int64_t ldc,
                                                             int first, fmoe_overlap *overlap, int64_t tiles)
{
    const int dtype = source == PACKED ? FMOE_F32 : source;
    __m256 acc[FMOE_MR][2];
    const char *row[FMOE_MR];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        row[i] = a[i];
        acc[i][0] = acc[i][1] = _mm256_setzero_ps();
    }
    const uint32_t rate = prefetch_carry_rate(&overlap->prefetch, tiles * kc);
    uint32_t due = 0;
    int64_t offset = 0;
    for (int64_t k = 0; k < kc; k++, b += source == PACKED ? 4 * NR : b_step, offset += a_step) {
        prefetch_carry(&overlap->prefetch, &due, rate);
        const __m256 b0 = load8(dtype, b), b1 = load8(dtype, b + 8 * bytes_of(dtype));
        if (source != PACKED && keep) {
            _mm256_storeu_ps(keep, b0);
            _mm256_storeu_ps(keep + 8, b1);
            keep += NR;
        }
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

static inline __attribute__((always_inline)) void tile(const int form, const int mr, int64_t kc, const void *const *a,
                                                       int64_t a_step, const float *b, float *c, int64_t ldc, int first,
                                                       fmoe_overlap *overlap, int64_t tiles)
{
    strip_tile(form, mr, kc, a, a_step, (const char *)b, 0, NULL, c, ldc, first, overlap, tiles);
}

#define PANEL float
#include "cpu/kernels/tiles.h"

void fmoe_gemm_f32_avx2(int64_t rows, int64_t kc, const void *const *a, int64_t a_step, const void *panel, float *c,
                        int64_t ldc, int first, fmoe_overlap *overlap)
{
    for (int strip = 0; strip < FMOE_NB / NR; strip++)
        run_tiles(PACKED, rows, kc, a, a_step, (const float *)panel + strip * kc * NR, c + strip * NR, ldc, first,
                  overlap, FMOE_NB / NR - strip);
}

/* ---- n-major weights in place ---- */

static inline __attribute__((always_inline)) void first_tile(const int dtype, int64_t mr, int64_t kc,
                                                             const void *const *a, const char *w, int64_t step,
                                                             float *keep, float *c, int64_t ldc, int first,
                                                             fmoe_overlap *overlap, int64_t tiles)
{
    switch (mr) {
    case 1: strip_tile(dtype, 1, kc, a, 4, w, step, keep, c, ldc, first, overlap, tiles); break;
    case 2: strip_tile(dtype, 2, kc, a, 4, w, step, keep, c, ldc, first, overlap, tiles); break;
    case 3: strip_tile(dtype, 3, kc, a, 4, w, step, keep, c, ldc, first, overlap, tiles); break;
    case 4: strip_tile(dtype, 4, kc, a, 4, w, step, keep, c, ldc, first, overlap, tiles); break;
    case 5: strip_tile(dtype, 5, kc, a, 4, w, step, keep, c, ldc, first, overlap, tiles); break;
    default: strip_tile(dtype, 6, kc, a, 4, w, step, keep, c, ldc, first, overlap, tiles); break;
    }
}

/* Strip by strip: what the first tile leaves of one is in L1 for the others. */
static inline __attribute__((always_inline)) void nmajor_inplace(const int dtype, int64_t rows, int64_t kc,
                                                                 const void *const *a, const char *w, int64_t step,
                                                                 float *panel, float *c, int64_t ldc, int first,
                                                                 fmoe_overlap *overlap)
{
    const int64_t tiles = fmoe_ceil_div(rows, FMOE_MR), mr = tiles ? fmoe_ceil_div(rows, tiles) : 0;
    for (int64_t left = FMOE_NB / NR; left > 0 && tiles; left--, w += NR * bytes_of(dtype), c += NR) {
        first_tile(dtype, mr, kc, a, w, step, tiles > 1 ? panel : NULL, c, ldc, first, overlap, left * tiles);
        run_tiles(PACKED, rows - mr, kc, a + mr, 4, panel, c + mr * ldc, ldc, first, overlap, left);
        panel += kc * NR;
    }
}

#define DEFINE_NMAJOR_INPLACE(field, dtype)                                                                            \
    void fmoe_gemm_nmajor_inplace_##field##_avx2(int64_t rows, int64_t kc, const void *const *a, const void *w,        \
                                                 int64_t w_step, void *panel, float *c, int64_t ldc, int first,        \
                                                 fmoe_overlap *overlap)                                                \
    {                                                                                                                  \
        nmajor_inplace(dtype, rows, kc, a, w, w_step, panel, c, ldc, first, overlap);                                  \
    }

DEFINE_NMAJOR_INPLACE(f32, FMOE_F32)
DEFINE_NMAJOR_INPLACE(widen_bf16, FMOE_BF16)
DEFINE_NMAJOR_INPLACE(widen_f16, FMOE_F16)

/* ---- packing ---- */

enum { LANES = 8 };
typedef __m256 lanes;
static inline lanes lanes_load(const int dtype, const char *p) { return load8(dtype, p); }
static inline void lanes_store(float *to, lanes x) { _mm256_storeu_ps(to, x); }

static inline __attribute__((always_inline)) void lanes_transpose(lanes r[LANES])
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

#include "cpu/kernels/pack_strips.h"

DEFINE_PACKS(avx2)

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
