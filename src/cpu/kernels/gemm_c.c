/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_c.c - the portable products: 2 x 16 tiles in plain C, which compilers turn into whatever vectors the baseline
 * has.
 *
 * Correct everywhere and the yardstick of every other level; panels are strips of 16 columns as on AVX2. */
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/load.h"

enum { NR = 16, MR = 2 };

static inline void tile(const int mr, int64_t kc, const void *const *a, int64_t a_step, const float *restrict b,
                        float *c, int64_t ldc, int first)
{
    float acc[MR][NR] = {{0}};
    for (int64_t k = 0; k < kc; k++, b += NR)
        for (int i = 0; i < mr; i++) {
            const float ai = *(const float *)(const void *)((const char *)a[i] + k * a_step);
            for (int j = 0; j < NR; j++) acc[i][j] += ai * b[j];
        }
    for (int i = 0; i < mr; i++)
        for (int j = 0; j < NR; j++) c[i * ldc + j] = first ? acc[i][j] : c[i * ldc + j] + acc[i][j];
}

void fmoe_gemm_f32_c(int64_t rows, int64_t kc, const void *const *a, int64_t a_step, const void *panel, float *c,
                     int64_t ldc, int first, fmoe_overlap *overlap)
{
    (void)overlap; /* prefetching by hand pays only with wide vectors */
    for (int strip = 0; strip < FMOE_NB / NR; strip++) {
        const float *b = (const float *)panel + strip * kc * NR;
        int64_t i = 0;
        for (; i + MR <= rows; i += MR) tile(MR, kc, a + i, a_step, b, c + i * ldc + strip * NR, ldc, first);
        if (i < rows) tile(1, kc, a + i, a_step, b, c + i * ldc + strip * NR, ldc, first);
    }
}

enum { LANES = 1 };
typedef float lanes;
static inline lanes lanes_load(const int dtype, const char *p) { return load1(dtype, p); }
static inline void lanes_store(float *to, lanes x) { *to = x; }
static inline void lanes_transpose(lanes x[LANES]) { (void)x; }

#include "cpu/kernels/pack_strips.h"

DEFINE_PACKS(c)

double fmoe_peak_f32_c(int64_t rounds)
{
    float acc[32];
    for (int i = 0; i < 32; i++) acc[i] = (float)i;
    volatile float vx = 0.9999f, vy = 1e-4f;
    const float x = vx, y = vy;
    for (int64_t r = 0; r < rounds; r++)
        for (int i = 0; i < 32; i++) acc[i] = acc[i] * x + y;
    volatile float sink = 0;
    for (int i = 0; i < 32; i++) sink = sink + acc[i];
    return (double)rounds * 32 * 2;
}
