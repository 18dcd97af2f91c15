/* SPDX-License-Identifier: Apache-2.0
 *
 * wgrad_avx512.c - blocks of a weight gradient, from two packed panels to memory: the 6 x 64 register tile of
 * gemm_avx512.c, whose sums leave the registers in the gradient's type, by nontemporal stores. An expert has few rows:
 * at 64 of them, sums that go to L1 first and are stored by a second loop cost a quarter of the time.
 *
 * Compiled twice: level avx512 multiplies f32, level avx512_bf16 pairs of bf16. */
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vec.h"

#if defined(__AVX512BF16__)
#define WGRAD fmoe_wgrad_bf16_avx512_bf16
enum { UNIT = 2 }; /* k of a 32-bit unit */
static inline __m512 multiply_add(__m512 acc, const void *a, __m512 b)
{
    int pair;
    memcpy(&pair, a, 4);
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
}
#else
#define WGRAD fmoe_wgrad_f32_avx512
enum { UNIT = 1 };
static inline __m512 multiply_add(__m512 acc, const void *a, __m512 b)
{
    return _mm512_fmadd_ps(_mm512_set1_ps(*(const float *)a), b, acc);
}
#endif

/* What a tile prefetches: lines [at, end), one with each of its steps. */
typedef struct lines {
    const fmoe_prefetch_rows *of;
    int64_t at, end;
} lines;

static inline __attribute__((always_inline)) void prefetch_line(const lines *l, int64_t i)
{
    enum { LINES = FMOE_NB * 4 / UNIT / 64 }; /* of a row's 64 columns */
    if (l->at + i >= l->end) return;
    const char *row = l->of->rows[(l->at + i) / LINES];
    _mm_prefetch(row + l->of->offset + (l->at + i) % LINES * 64, _MM_HINT_T1);
}

static inline __attribute__((always_inline)) void tile(const int dtype, const int mr, int64_t units, const char *a,
                                                       const char *b, const float *c, char *to, int64_t bytes,
                                                       const lines *prefetch)
{
    enum { ROW = FMOE_NB * 4 };
    __m512 acc[FMOE_MR][4];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) acc[i][j] = _mm512_setzero_ps();
    for (int64_t k = 0; k < units; k++, a += ROW, b += ROW) {
        prefetch_line(prefetch, k);
        const __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + 64), b2 = _mm512_loadu_ps(b + 128),
                     b3 = _mm512_loadu_ps(b + 192);
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            acc[i][0] = multiply_add(acc[i][0], a + 4 * i, b0);
            acc[i][1] = multiply_add(acc[i][1], a + 4 * i, b1);
            acc[i][2] = multiply_add(acc[i][2], a + 4 * i, b2);
            acc[i][3] = multiply_add(acc[i][3], a + 4 * i, b3);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++, to += bytes) {
        if (c) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) acc[i][j] = _mm512_add_ps(_mm512_loadu_ps(c + i * FMOE_NB + 16 * j), acc[i][j]);
        }
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++)
            store2(dtype, to + j * STEP * bytes_of(dtype), (vec2){{(vec)acc[i][2 * j], (vec)acc[i][2 * j + 1]}}, true);
    }
}

/* Columns of the left operand by panels of 64, each split evenly. */
static inline __attribute__((always_inline)) void blocks(const int dtype, int64_t m, int64_t kc, const char *left,
                                                         const char *panel, const float *c, char *to, int64_t bytes,
                                                         const fmoe_prefetch_rows *ahead)
{
    const int64_t units = (kc + UNIT - 1) / UNIT, of_panel = fmoe_ceil_div(FMOE_NB, FMOE_MR);
    const int64_t all = ahead ? ahead->n * (FMOE_NB * 4 / UNIT / 64) : 0;
    const int64_t share = fmoe_ceil_div(all, fmoe_ceil_div(m, FMOE_NB) * of_panel); /* of a tile */
    lines l = {ahead, 0, fmoe_min(share, all)};
    for (int64_t i = 0; i < m; i += FMOE_NB, left += units * FMOE_NB * 4) {
        int64_t rows = fmoe_min(FMOE_NB, m - i);
        const char *a = left;
        for (int64_t tiles = fmoe_ceil_div(rows, FMOE_MR); tiles > 0; tiles--) {
            const int64_t mr = fmoe_ceil_div(rows, tiles);
            switch (mr) {
            case 1: tile(dtype, 1, units, a, panel, c, to, bytes, &l); break;
            case 2: tile(dtype, 2, units, a, panel, c, to, bytes, &l); break;
            case 3: tile(dtype, 3, units, a, panel, c, to, bytes, &l); break;
            case 4: tile(dtype, 4, units, a, panel, c, to, bytes, &l); break;
            case 5: tile(dtype, 5, units, a, panel, c, to, bytes, &l); break;
            default: tile(dtype, 6, units, a, panel, c, to, bytes, &l); break;
            }
            rows -= mr;
            a += 4 * mr;
            to += bytes * mr;
            if (c) c += FMOE_NB * mr;
            l.at = l.end;
            l.end = fmoe_min(l.end + share, all);
        }
    }
}

void WGRAD(int64_t m, int64_t kc, const void *left, const void *panel, const float *c, void *dst, int64_t stride,
           int dtype, const fmoe_prefetch_rows *ahead)
{
    if (dtype == FMOE_F32) blocks(FMOE_F32, m, kc, left, panel, c, dst, 4 * stride, ahead);
    else if (dtype == FMOE_BF16) blocks(FMOE_BF16, m, kc, left, panel, c, dst, 2 * stride, ahead);
    else blocks(FMOE_F16, m, kc, left, panel, c, dst, 2 * stride, ahead);
}
