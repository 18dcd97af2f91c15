/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_neon_bf16.c - bf16 products with BFMMLA: a 2 x 2 block of C += 2 x 4 of A times 4 x 2 of B, twice the work of
 * BFDOT and four times that of an f32 multiply-add. Register tiles are 6 x 16: 3 pairs of rows by 8 pairs of columns.
 *
 * The instruction wants four consecutive k from each of two columns, the panel has two: 16 columns at a time are
 * interleaved once more into a strip of 32 KiB, which stays in L1 while all rows are multiplied. Every number of rows
 * takes the same instruction, so a row's bits do not depend on the other rows. BFMMLA treats denormals as zero and
 * rounds sums to odd; see docs/numerics.md. */
#include "cpu/kernels/arm/neon.h"

#include "cpu/kernels/kernels.h"
#include "util.h"

enum { NR = 16 };

/* How two rows of A are stored: k contiguous in each (a_step 4), or down a panel, in which the two are adjacent columns
 * or are not. */
enum { KMAJOR, ADJACENT, APART };

static inline uint32x2_t load2(const char *p)
{
    return vreinterpret_u32_u16(vld1_u16((const uint16_t *)(const void *)p));
}

static inline uint32x2_t load_apart(const char *p, const char *q)
{
    return vld1_lane_u32((const uint32_t *)(const void *)q, vld1_dup_u32((const uint32_t *)(const void *)p), 1);
}

/* Two pairs of k of row p, then of row q. */
static inline __attribute__((always_inline)) uint32x4_t load_left(const int form, const char *p, const char *q,
                                                                  int64_t a_step)
{
    if (form == KMAJOR) return vcombine_u32(load2(p), load2(q));
    if (form == APART) return vcombine_u32(load_apart(p, p + a_step), load_apart(q, q + a_step));
    const uint32x2_t none = vdup_n_u32(0), even = load2(p), odd = load2(p + a_step);
    return vzip1q_u32(vcombine_u32(even, none), vcombine_u32(odd, none));
}

/* The last one to three k of a row, without a look at what follows them. */
static inline uint32x2_t load_last(const char *p, int64_t a_step, int64_t k)
{
    uint16_t last[4] = {0};
    memcpy(last, p, k == 1 ? 2 : 4);
    if (k == 3) memcpy(last + 2, p + a_step, 2);
    return vreinterpret_u32_u16(vld1_u16(last));
}

static inline float32x4_t multiply4(float32x4_t acc, uint32x4_t a, uint32x4_t b)
{
    return vbfmmlaq_f32(acc, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
}

/* Four k a step, as far as whole steps go. */
static inline __attribute__((always_inline)) void steps(const int form, const int pairs,
                                                        float32x4_t acc[FMOE_MR / 2][NR / 2], int64_t n,
                                                        const char *const *row, int64_t a_step, const uint32_t *b,
                                                        fmoe_walk *prefetch, int64_t rate)
{
    int64_t offset = 0;
    for (int64_t step = 0; step < n; step++, b += 2 * NR, offset += 2 * a_step) {
        fmoe_prefetch(prefetch, rate);
        uint32x4_t left[FMOE_MR / 2];
#pragma GCC unroll 3
        for (int p = 0; p < pairs; p++) left[p] = load_left(form, row[2 * p] + offset, row[2 * p + 1] + offset, a_step);
#pragma GCC unroll 8
        for (int j = 0; j < NR / 2; j++) {
            if (j == 4) KEEP_ORDER();
            const uint32x4_t right = vld1q_u32(b + 4 * j);
#pragma GCC unroll 3
            for (int p = 0; p < pairs; p++) acc[p][j] = multiply4(acc[p][j], left[p], right);
        }
    }
}

static inline void store_row(float *c, float64x2_t sum, int first)
{
    const float32x4_t s = vreinterpretq_f32_f64(sum);
    vst1q_f32(c, first ? s : vaddq_f32(vld1q_f32(c), s));
}

static inline __attribute__((always_inline)) void tile(const int form, const int mr, int64_t kc, const void *const *a,
                                                       int64_t a_step, const uint32_t *b, float *c, int64_t ldc,
                                                       int first, fmoe_overlap *overlap, int64_t tiles)
{
    (void)form;
    const int pairs = (mr + 1) / 2;
    const int64_t n = kc / 4, rate = fmoe_prefetch_rate(&overlap->prefetch, tiles * n);
    fmoe_walk *prefetch = &overlap->prefetch;
    float32x4_t acc[FMOE_MR / 2][NR / 2];
    const char *row[FMOE_MR];
    bool adjacent = mr % 2 == 0;
#pragma GCC unroll 3
    for (int p = 0; p < pairs; p++) {
        row[2 * p] = a[2 * p];
        row[2 * p + 1] = a[fmoe_min(2 * p + 1, mr - 1)]; /* an odd last row is its own neighbour */
        adjacent = adjacent && row[2 * p + 1] == row[2 * p] + 4;
#pragma GCC unroll 8
        for (int j = 0; j < NR / 2; j++) acc[p][j] = vdupq_n_f32(0);
    }
    if (a_step == 4) steps(KMAJOR, pairs, acc, n, row, a_step, b, prefetch, rate);
    else if (adjacent) steps(ADJACENT, pairs, acc, n, row, a_step, b, prefetch, rate);
    else steps(APART, pairs, acc, n, row, a_step, b, prefetch, rate);
    if (kc % 4) {
#pragma GCC unroll 3
        for (int p = 0; p < pairs; p++) {
            const int64_t at = 2 * n * a_step;
            const uint32x4_t left = vcombine_u32(load_last(row[2 * p] + at, a_step, kc % 4),
                                                 load_last(row[2 * p + 1] + at, a_step, kc % 4));
#pragma GCC unroll 8
            for (int j = 0; j < NR / 2; j++) acc[p][j] = multiply4(acc[p][j], left, vld1q_u32(b + 2 * n * NR + 4 * j));
        }
    }
#pragma GCC unroll 3
    for (int p = 0; p < pairs; p++)
#pragma GCC unroll 4
        for (int j = 0; j < NR / 4; j++) {
            const float64x2_t l = vreinterpretq_f64_f32(acc[p][2 * j]), r = vreinterpretq_f64_f32(acc[p][2 * j + 1]);
            float *to = c + 2 * p * ldc + 4 * j;
            store_row(to, vzip1q_f64(l, r), first);
            if (2 * p + 1 < mr) store_row(to + ldc, vzip2q_f64(l, r), first);
        }
}

#define PANEL uint32_t
#include "cpu/kernels/tiles.h"

/* 16 columns of a panel of pairs with four k of a column together: two rows of the panel become one, zeros where the
 * second is missing. */
static void make_strip(uint32_t *strip, const uint32_t *panel, int64_t kc)
{
    for (int64_t k = 0; k < kc; k += 4, panel += 2 * FMOE_NB, strip += 2 * NR)
#pragma GCC unroll 4
        for (int j = 0; j < NR; j += 4) {
            const uint32x4_t even = vld1q_u32(panel + j);
            const uint32x4_t odd = k + 2 < kc ? vld1q_u32(panel + FMOE_NB + j) : vdupq_n_u32(0);
            vst1q_u32(strip + 2 * j, vzip1q_u32(even, odd));
            vst1q_u32(strip + 2 * j + 4, vzip2q_u32(even, odd));
        }
}

void fmoe_gemm_bf16_neon_bf16(int64_t rows, int64_t kc, const void *const *a, int64_t a_step, const void *panel,
                              float *c, int64_t ldc, int first, fmoe_overlap *overlap)
{
    _Alignas(64) uint32_t strip[FMOE_KC_PAIRS / 2 * NR];
    for (int col = 0; col < FMOE_NB; col += NR) {
        make_strip(strip, (const uint32_t *)panel + col, kc);
        run_tiles(0, rows, kc, a, a_step, strip, c + col, ldc, first, overlap, (FMOE_NB - col) / NR);
    }
}

/* ---- packing ---- */

void fmoe_pack_nmajor_pairs_neon_bf16(void *panel, int64_t kc, int64_t col, const void *const *rows, int64_t n)
{
    for (int64_t k = 0; k < kc; k += 2) {
        uint32_t *dst = (uint32_t *)panel + k / 2 * FMOE_NB + col;
        const uint16_t *even = rows[k], *odd = k + 1 < kc ? rows[k + 1] : NULL;
        int64_t j = 0;
        for (; j + 8 <= n; j += 8) {
            const uint16x8_t lo = vld1q_u16(even + j), hi = odd ? vld1q_u16(odd + j) : vdupq_n_u16(0);
            vst1q_u32(dst + j, vreinterpretq_u32_u16(vzip1q_u16(lo, hi)));
            vst1q_u32(dst + j + 4, vreinterpretq_u32_u16(vzip2q_u16(lo, hi)));
        }
        for (; j < n; j++) dst[j] = even[j] | (odd ? (uint32_t)odd[j] << 16 : 0);
    }
}

/* Pairs of k are contiguous in memory already: a transposition of 32-bit units. */
void fmoe_pack_transposed_pairs_neon_bf16(void *panel, int64_t kc, int64_t col, const void *const *cols, int64_t n)
{
    for (int64_t j = 0; j < n; j += 4) {
        uint32_t *dst = (uint32_t *)panel + col + j;
        const int64_t nj = fmoe_min(4, n - j);
        int64_t k = 0;
        if (nj == 4)
            for (; k + 8 <= kc; k += 8) {
                uint32x4_t r[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) r[i] = vreinterpretq_u32_u16(vld1q_u16((const uint16_t *)cols[j + i] + k));
                transpose4(r);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) vst1q_u32(dst + (k / 2 + i) * FMOE_NB, r[i]);
            }
        for (; k < kc; k += 2)
            for (int64_t i = 0; i < nj; i++) {
                const uint16_t *src = (const uint16_t *)cols[j + i] + k;
                dst[k / 2 * FMOE_NB + i] = src[0] | (k + 1 < kc ? (uint32_t)src[1] << 16 : 0);
            }
    }
}

double fmoe_peak_bf16_neon_bf16(int64_t rounds)
{
    float32x4_t acc[24];
#pragma GCC unroll 24
    for (int i = 0; i < 24; i++) acc[i] = vdupq_n_f32((float)i);
    bfloat16x8_t x = vreinterpretq_bf16_u16(vdupq_n_u16(0x3c00)), y = x;
    for (int64_t r = 0; r < rounds; r++) {
        __asm__ volatile("" : "+w"(x), "+w"(y));
#pragma GCC unroll 24
        for (int i = 0; i < 24; i++) acc[i] = vbfmmlaq_f32(acc[i], x, y);
    }
#pragma GCC unroll 24
    for (int i = 1; i < 24; i++) acc[0] = vaddq_f32(acc[0], acc[i]);
    volatile float sink = vaddvq_f32(acc[0]);
    (void)sink;
    return (double)rounds * 24 * 16 * 2;
}
