/* SPDX-License-Identifier: Apache-2.0
 *
 * outer_avx512.c - blocks of a weight gradient, from two packed panels to memory: the 6 x 64 register tile of
 * gemm_avx512.c, whose sums leave the registers in the gradient's type and past the cache. An expert has few rows: at
 * 64 of them a detour of the sums through L1 and a second loop costs a quarter of the time.
 *
 * Compiled twice: level avx512 multiplies f32, level avx512_bf16 pairs of bf16. */
#include <immintrin.h>

#include "cpu/kernels.h"
#include "util.h"

#if defined(__AVX512BF16__)
#define OUTER fmoe_outer_bf16_avx512_bf16
enum { UNIT = 2 }; /* k of a 32-bit unit */
static inline __m512 multiply_add(__m512 acc, const void *a, __m512 b)
{
    int pair;
    memcpy(&pair, a, 4);
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
}
static inline __m512i to_bf16(__m512 lower, __m512 upper) { return (__m512i)_mm512_cvtne2ps_pbh(upper, lower); }
#else
#define OUTER fmoe_outer_f32_avx512
enum { UNIT = 1 };
static inline __m512 multiply_add(__m512 acc, const void *a, __m512 b)
{
    return _mm512_fmadd_ps(_mm512_set1_ps(*(const float *)a), b, acc);
}

/* fmoe_float_to_bf16, sixteen at a time. */
static inline __m256i half_to_bf16(__m512 x)
{
    const __m512i u = _mm512_castps_si512(x), upper = _mm512_srli_epi32(u, 16);
    const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, upper, _mm512_set1_epi32(0x40)));
}
static inline __m512i to_bf16(__m512 lower, __m512 upper)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(half_to_bf16(lower)), half_to_bf16(upper), 1);
}
#endif

static inline __m512i to_f16(__m512 lower, __m512 upper)
{
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(lower, NEAREST)), _mm512_cvtps_ph(upper, NEAREST),
                              1);
}

static inline __attribute__((always_inline)) void store_row(const __m512 x[4], char *to, const int dtype)
{
    if (dtype == FMOE_F32) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) _mm512_stream_ps((float *)(void *)(to + 64 * j), x[j]);
    } else {
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++)
            _mm512_stream_si512((void *)(to + 64 * j),
                                dtype == FMOE_BF16 ? to_bf16(x[2 * j], x[2 * j + 1]) : to_f16(x[2 * j], x[2 * j + 1]));
    }
}

/* What a tile fetches: lines [at, end), one with each of its steps. */
typedef struct lines {
    const fmoe_ahead *of;
    int64_t at, end;
} lines;

static inline __attribute__((always_inline)) void fetch_line(const lines *l, int64_t i)
{
    enum { LINES = FMOE_NB * 4 / UNIT / 64 }; /* of a row's 64 columns */
    if (l->at + i >= l->end) return;
    const char *row = l->of->rows[(l->at + i) / LINES];
    _mm_prefetch(row + l->of->offset + (l->at + i) % LINES * 64, _MM_HINT_T1);
}

static inline __attribute__((always_inline)) void tile(const int dtype, const int mr, int64_t units, const char *a,
                                                       const char *b, const float *c, char *to, int64_t bytes,
                                                       const lines *fetch)
{
    enum { STEP = FMOE_NB * 4 };
    __m512 acc[FMOE_MR][4];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) acc[i][j] = _mm512_setzero_ps();
    for (int64_t k = 0; k < units; k++, a += STEP, b += STEP) {
        fetch_line(fetch, k);
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
        store_row(acc[i], to, dtype);
    }
}

/* Columns of the left operand by panels of 64, each split evenly. */
static inline __attribute__((always_inline)) void blocks(const int dtype, int64_t m, int64_t kc, const char *left,
                                                         const char *panel, const float *c, char *to, int64_t bytes,
                                                         const fmoe_ahead *ahead)
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

void OUTER(int64_t m, int64_t kc, const void *left, const void *panel, const float *c, void *dst, int64_t stride,
           int dtype, const fmoe_ahead *ahead)
{
    if (dtype == FMOE_F32) blocks(FMOE_F32, m, kc, left, panel, c, dst, 4 * stride, ahead);
    else if (dtype == FMOE_BF16) blocks(FMOE_BF16, m, kc, left, panel, c, dst, 2 * stride, ahead);
    else blocks(FMOE_F16, m, kc, left, panel, c, dst, 2 * stride, ahead);
}
