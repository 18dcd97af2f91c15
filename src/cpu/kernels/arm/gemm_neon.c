/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_neon.c - f32 products on 64-bit Arm: 6 x 16 register tiles (24 accumulators, 4 B, 3 A), and packing.
 *
 * A is loaded as a scalar and multiplied by element: the broadcasting load (LD1R) would take a slot of the multipliers.
 * A panel is four strips of 16 columns; a strip of a chunk is 32 KiB and stays in L1 while all rows pass. */
#include "cpu/kernels/arm/neon.h"

#include "cpu/kernels/kernels.h"
#include "util.h"

enum { NR = 16 };

static inline __attribute__((always_inline)) void tile(const int form, const int mr, int64_t kc, const void *const *a,
                                                       int64_t a_step, const float *b, float *c, int64_t ldc, int first,
                                                       fmoe_overlap *overlap, int64_t tiles)
{
    (void)form;
    float32x4_t acc[FMOE_MR][4];
    const char *row[FMOE_MR];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        row[i] = a[i];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) acc[i][j] = vdupq_n_f32(0);
    }
    int64_t offset = 0;
    const int64_t rate = fmoe_prefetch_rate(&overlap->prefetch, tiles * kc);
    for (int64_t k = 0; k < kc; k++, b += NR, offset += a_step) {
        fmoe_prefetch(&overlap->prefetch, rate);
        const float32x4_t b0 = vld1q_f32(b), b1 = vld1q_f32(b + 4), b2 = vld1q_f32(b + 8), b3 = vld1q_f32(b + 12);
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            if (i == 3) KEEP_ORDER();
            const float ai = *(const float *)(const void *)(row[i] + offset);
            acc[i][0] = vfmaq_n_f32(acc[i][0], b0, ai);
            acc[i][1] = vfmaq_n_f32(acc[i][1], b1, ai);
            acc[i][2] = vfmaq_n_f32(acc[i][2], b2, ai);
            acc[i][3] = vfmaq_n_f32(acc[i][3], b3, ai);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            float *to = c + i * ldc + 4 * j;
            vst1q_f32(to, first ? acc[i][j] : vaddq_f32(vld1q_f32(to), acc[i][j]));
        }
}

#define PANEL float
#include "cpu/kernels/tiles.h"

void fmoe_gemm_f32_neon(int64_t rows, int64_t kc, const void *const *a, int64_t a_step, const void *panel, float *c,
                        int64_t ldc, int first, fmoe_overlap *overlap)
{
    for (int strip = 0; strip < FMOE_NB / NR; strip++)
        run_tiles(0, rows, kc, a, a_step, (const float *)panel + strip * kc * NR, c + strip * NR, ldc, first, overlap,
                  FMOE_NB / NR - strip);
}

/* ---- packing ---- */

enum { LANES = 4 };
typedef uint32x4_t lanes; /* the bits of floats */

static inline __attribute__((always_inline)) lanes lanes_load(const int dtype, const char *p)
{
    if (dtype == FMOE_F32) return vreinterpretq_u32_f32(vld1q_f32((const float *)(const void *)p));
    const uint16x4_t bits = vld1_u16((const uint16_t *)(const void *)p);
    return dtype == FMOE_BF16 ? vshll_n_u16(bits, 16) : vreinterpretq_u32_f32(vcvt_f32_f16(vreinterpret_f16_u16(bits)));
}

static inline void lanes_store(float *to, lanes x) { vst1q_f32(to, vreinterpretq_f32_u32(x)); }
static inline __attribute__((always_inline)) void lanes_transpose(lanes x[LANES]) { transpose4(x); }

#include "cpu/kernels/pack_strips.h"

DEFINE_PACKS(neon)

double fmoe_peak_f32_neon(int64_t rounds)
{
    float32x4_t acc[24];
#pragma GCC unroll 24
    for (int i = 0; i < 24; i++) acc[i] = vdupq_n_f32((float)i);
    float32x4_t x = vdupq_n_f32(1e-4f), y = vdupq_n_f32(1e-4f);
    for (int64_t r = 0; r < rounds; r++) {
        __asm__ volatile("" : "+w"(x), "+w"(y));
#pragma GCC unroll 24
        for (int i = 0; i < 24; i++) acc[i] = vfmaq_f32(acc[i], x, y);
    }
#pragma GCC unroll 24
    for (int i = 1; i < 24; i++) acc[0] = vaddq_f32(acc[0], acc[i]);
    volatile float sink = vaddvq_f32(acc[0]);
    (void)sink;
    return (double)rounds * 24 * 4 * 2;
}
