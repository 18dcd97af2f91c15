/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_neon.c - f32 products on 64-bit Arm: 6 x 16 register tiles (24 accumulators, 4 B, 3 A), and packing.
 *
 * A is loaded as a scalar and multiplied by element: the broadcasting load (LD1R) would take a slot of the multipliers.
 * A panel is four strips of 16 columns; a strip of a chunk is 32 KiB and stays in L1 while all rows pass. */
#include "cpu/neon.h"

#include "cpu/kernels.h"
#include "util.h"

enum { NR = 16 };

static inline __attribute__((always_inline)) void tile(const int form, const int mr, int64_t kc, const void *const *a,
                                                       int64_t a_step, const float *b, float *c, int64_t ldc, int first,
                                                       fmoe_side *side, int64_t tiles)
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
    const int64_t rate = fmoe_fetch_rate(&side->fetch, tiles * kc);
    for (int64_t k = 0; k < kc; k++, b += NR, offset += a_step) {
        fmoe_fetch(&side->fetch, rate);
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
#include "cpu/tiles.h"

void fmoe_gemm_f32_neon(int64_t rows, int64_t kc, const void *const *a, int64_t a_step, const void *panel, float *c,
                        int64_t ldc, int first, fmoe_side *side)
{
    for (int strip = 0; strip < FMOE_NB / NR; strip++)
        run_tiles(0, rows, kc, a, a_step, (const float *)panel + strip * kc * NR, c + strip * NR, ldc, first, side,
                  FMOE_NB / NR - strip);
}

/* ---- packing: a loader per storage type, the bits of 4 floats ---- */

static inline uint32x4_t load4_f32(const void *p) { return vreinterpretq_u32_f32(vld1q_f32(p)); }
static inline uint32x4_t load4_bf16(const void *p) { return vshll_n_u16(vld1_u16(p), 16); }
static inline uint32x4_t load4_f16(const void *p)
{
    return vreinterpretq_u32_f32(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))));
}

static inline float load1_f32(const void *p) { return *(const float *)p; }
static inline float load1_bf16(const void *p) { return fmoe_bf16_to_float(*(const uint16_t *)p); }
static inline float load1_f16(const void *p) { return fmoe_f16_to_float(*(const uint16_t *)p); }

static inline void store4(float *p, uint32x4_t bits) { vst1q_f32(p, vreinterpretq_f32_u32(bits)); }

#define DEFINE_PACK(type, element_bytes)                                                                               \
    void fmoe_pack_rows_##type##_neon(void *panel, int64_t kc, int64_t col, const void *const *rows, int64_t n)        \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j += 4) {                                                                           \
            float *dst = (float *)panel + (col + j) / NR * kc * NR + (col + j) % NR;                                   \
            const int64_t nj = fmoe_min(4, n - j);                                                                     \
            for (int64_t k = 0; k < kc; k++, dst += NR) {                                                              \
                const char *src = (const char *)rows[k] + j * element_bytes;                                           \
                if (nj == 4) store4(dst, load4_##type(src));                                                           \
                else                                                                                                   \
                    for (int64_t i = 0; i < nj; i++) dst[i] = load1_##type(src + i * element_bytes);                   \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    void fmoe_pack_cols_##type##_neon(void *panel, int64_t kc, int64_t col, const void *const *cols, int64_t n)        \
    {                                                                                                                  \
        for (int64_t j = 0; j < n; j += 4) {                                                                           \
            float *dst = (float *)panel + (col + j) / NR * kc * NR + (col + j) % NR;                                   \
            const int64_t nj = fmoe_min(4, n - j);                                                                     \
            int64_t k = 0;                                                                                             \
            if (nj == 4)                                                                                               \
                for (; k + 4 <= kc; k += 4) {                                                                          \
                    uint32x4_t r[4];                                                                                   \
                    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) r[i] =                                         \
                        load4_##type((const char *)cols[j + i] + k * element_bytes);                                   \
                    transpose4(r);                                                                                     \
                    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) store4(dst + (k + i) * NR, r[i]);              \
                }                                                                                                      \
            for (; k < kc; k++)                                                                                        \
                for (int64_t i = 0; i < nj; i++)                                                                       \
                    dst[k * NR + i] = load1_##type((const char *)cols[j + i] + k * element_bytes);                     \
        }                                                                                                              \
    }

DEFINE_PACK(f32, 4)
DEFINE_PACK(bf16, 2)
DEFINE_PACK(f16, 2)

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
