/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_kmajor_avx2.c - f32 products on AVX2 + FMA by k-major weights. A register of B is four k of two columns, one of
 * A the same four k of a row, twice: nothing is transposed. A tile is 6 rows x 4 columns, and its sums run in four
 * lanes that are added at the end of the chunk.
 *
 * Packing moves 16 bytes of a column at a time, and widens 16-bit elements, in pieces between the multiply-adds: all of
 * a panel in one of the tiles is more than can go between L1 and L2 meanwhile (7 % at 64 rows, 16 % at 16). */
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/x86/avx2.h"

enum {
    GROUP = 4,        /* columns of a tile */
    STEP = 4 * GROUP, /* floats of one step of them: four k */
    GROUPS = FMOE_NB / GROUP
};

/* ---- a piece of the next panel: 16 k of four columns, to four steps, line by line ---- */

static inline __attribute__((always_inline)) void piece(const int dtype, fmoe_overlap *overlap)
{
    fmoe_walk *const w = &overlap->pack;
    float *const to = (float *)(void *)overlap->to;
    if (dtype == FMOE_F32) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const char *const p = w->at + 16 * i;
            _mm256_storeu_ps(to + i * STEP, _mm256_castsi256_ps(two_columns(p, w->step)));
            _mm256_storeu_ps(to + i * STEP + 8, _mm256_castsi256_ps(two_columns(p + 2 * w->step, w->step)));
        }
    } else {
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            __m256 out[4];
            widen_kblocks(dtype, w->at + 16 * i, w->step, out);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) _mm256_storeu_ps(to + 2 * i * STEP + 8 * j, out[j]);
        }
    }
    overlap->to +=
        4 * STEP * sizeof(float); /* four columns to their end, then the next four: that is the order of the panel */
    fmoe_walk_on(w);
}

/* ---- products ---- */

static inline __attribute__((always_inline)) void multiply_step(const int mr, __m256 acc[FMOE_MR][2],
                                                                const char *const row[FMOE_MR], int64_t offset,
                                                                __m256 b0, __m256 b1)
{
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        const __m256 ai = _mm256_broadcast_ps((const __m128 *)(const void *)(row[i] + offset));
        acc[i][0] = _mm256_fmadd_ps(ai, b0, acc[i][0]);
        acc[i][1] = _mm256_fmadd_ps(ai, b1, acc[i][1]);
    }
}

/* Sums of four lanes, of two rows: c[0..3] of each. */
static inline __attribute__((always_inline)) void sum_lanes(const __m256 x[2], const __m256 y[2], __m128 *of_x,
                                                            __m128 *of_y)
{
    const __m256 h = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(y[0], y[1]));
    const __m128 even = _mm256_castps256_ps128(h), odd = _mm256_extractf128_ps(h, 1);
    *of_x = _mm_unpacklo_ps(even, odd);
    *of_y = _mm_unpackhi_ps(even, odd);
}

static inline __attribute__((always_inline)) void add_to(float *to, __m128 sum, int first)
{
    _mm_storeu_ps(to, first ? sum : _mm_add_ps(_mm_loadu_ps(to), sum));
}

/* `form`: the type of what is packed meanwhile. */
static inline __attribute__((always_inline)) void tile(const int form, const int mr, int64_t kc, const void *const *a,
                                                       int64_t a_step, const float *b, float *c, int64_t ldc, int first,
                                                       fmoe_overlap *overlap, int64_t tiles)
{
    (void)a_step;
    const char *row[FMOE_MR];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) row[i] = a[i];
    const void *const *below = a + (tiles > 1 ? mr : 0);
    const int64_t end = kc / 4 * 16, rest = kc % 4, steps = GROUPS * (kc / 4);
    const int64_t pieces = fmoe_ceil_div(overlap->pack.left, tiles),
                  apart = pieces > 0 ? fmoe_max(1, steps / pieces) : INT64_MAX;
    const uint32_t rate = prefetch_carry_rate(&overlap->prefetch, tiles * steps);
    uint32_t due = 0;
    int64_t until = apart;
    for (int64_t g = 0; g < GROUPS; g++, c += GROUP) {
        for (int64_t i = 0; i < overlap->next_rows; i++) /* A of the next tile, a sixteenth of it */
            for (int64_t at = g * kc / GROUPS * 4 / 64; at < (g + 1) * kc / GROUPS * 4 / 64; at++)
                _mm_prefetch((const char *)below[i] + 64 * at, _MM_HINT_T0);
        __m256 acc[FMOE_MR][2];
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) acc[i][0] = acc[i][1] = _mm256_setzero_ps();
        int64_t offset = 0;
        for (; offset < end; offset += 16, b += STEP) {
            prefetch_carry(&overlap->prefetch, &due, rate);
            multiply_step(mr, acc, row, offset, _mm256_loadu_ps(b), _mm256_loadu_ps(b + 8));
            if (__builtin_expect(--until == 0, 0)) {
                until = apart;
                if (overlap->pack.left > 0) piece(form, overlap);
            }
        }
        if (rest) {
            float rows[FMOE_MR][4] = {{0}};
            const char *padded_rows[FMOE_MR];
            for (int i = 0; i < mr; i++) {
                memcpy(rows[i], row[i] + offset, (size_t)rest * sizeof(float));
                padded_rows[i] = (const char *)rows[i];
            }
            multiply_step(mr, acc, padded_rows, 0, _mm256_loadu_ps(b), _mm256_loadu_ps(b + 8));
            b += STEP;
        }
#pragma GCC unroll 3
        for (int i = 0; i < mr; i += 2) {
            __m128 x, y;
            sum_lanes(acc[i], acc[i + 1 < mr ? i + 1 : i], &x, &y);
            add_to(c + i * ldc, x, first);
            if (i + 1 < mr) add_to(c + (i + 1) * ldc, y, first);
        }
    }
}

#define PANEL float
#include "cpu/kernels/tiles.h"

static inline __attribute__((always_inline)) void multiply(const int form, int64_t rows, int64_t kc,
                                                           const void *const *a, const float *panel, float *c,
                                                           int64_t ldc, int first, fmoe_overlap *overlap)
{
    run_tiles(form, rows, kc, a, 4, panel, c, ldc, first, overlap, 1);
    while (overlap->pack.left > 0) piece(form, overlap);
}

void fmoe_gemm_kmajor_f32_avx2(int64_t rows, int64_t kc, const void *const *a, int64_t a_step, const void *panel,
                               float *c, int64_t ldc, int first, fmoe_overlap *overlap)
{
    (void)a_step;
    if (overlap->pack.left == 0 || overlap->dtype == FMOE_F32)
        multiply(FMOE_F32, rows, kc, a, panel, c, ldc, first, overlap);
    else if (overlap->dtype == FMOE_BF16) multiply(FMOE_BF16, rows, kc, a, panel, c, ldc, first, overlap);
    else multiply(FMOE_F16, rows, kc, a, panel, c, ldc, first, overlap);
}

/* ---- packing: block s of column n at panel[(n/4*steps + s)*16 + n%4*4] ---- */

static inline __attribute__((always_inline)) void pack_kmajor(const int dtype, float *panel, int64_t kc, int64_t col,
                                                              const void *const *cols, int64_t n)
{
    const int64_t steps = fmoe_ceil_div(kc, 4);
    for (int64_t j = 0; j < n; j++) {
        const char *p = cols[j];
        float *to = panel + (col + j) / GROUP * steps * STEP + (col + j) % GROUP * 4;
        int64_t k = 0;
        for (; k + 8 <= kc; k += 8, to += 2 * STEP) {
            const __m256 x = load8(dtype, p + k * bytes_of(dtype));
            _mm_storeu_ps(to, _mm256_castps256_ps128(x));
            _mm_storeu_ps(to + STEP, _mm256_extractf128_ps(x, 1));
        }
        for (; k < 4 * steps; k++) to[k % 8 / 4 * STEP + k % 4] = k < kc ? load1(dtype, p + k * bytes_of(dtype)) : 0.0f;
    }
}

void fmoe_pack_kmajor_f32_avx2(void *panel, int64_t kc, int64_t col, const void *const *cols, int64_t n)
{
    pack_kmajor(FMOE_F32, panel, kc, col, cols, n);
}

void fmoe_pack_kmajor_widen_bf16_avx2(void *panel, int64_t kc, int64_t col, const void *const *cols, int64_t n)
{
    pack_kmajor(FMOE_BF16, panel, kc, col, cols, n);
}

void fmoe_pack_kmajor_widen_f16_avx2(void *panel, int64_t kc, int64_t col, const void *const *cols, int64_t n)
{
    pack_kmajor(FMOE_F16, panel, kc, col, cols, n);
}
