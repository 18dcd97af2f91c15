/* SPDX-License-Identifier: Apache-2.0
 *
 * coded_few_rows_avx512_bf16.c - products of few rows by quantised weights, which are decoded in registers as they
 * stream: the bytes that come from memory are the codes. The same bits as by kmajor panels of decoded weights
 * (kmajor_few_rows_avx512.h): the same four columns at a time, the same lanes, the same chunks.
 *
 * 4 bits: a group has sixteen possible weights, scaled and rounded once (a multiply and a conversion for 32 to 128
 * weights) and looked up, 32 with one vpermw. float8_e4m3fn: the same with the 128 magnitudes of a block whose columns
 * share a scale. int8: converted, scaled, rounded. The conversion to bf16 flushes denormals, which vdpbf16ps takes for
 * zeros anyway. */
#include <immintrin.h>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/x86/pack_avx512.h"
#include "util.h"

#define DOT_UNITS(acc, a, b) _mm512_dpbf16_ps(acc, (__m512bh)(a), (__m512bh)(b))
#include "cpu/kernels/x86/kmajor_avx512.h"
#include "cpu/kernels/x86/kmajor_few_rows_avx512.h"

#define INLINE static inline __attribute__((always_inline))

enum { LOW_FIRST, HIGH_FIRST, BYTES, FLOATS }; /* how weights are decoded */
enum { STEP = 32 };                            /* k at a time: a register of bf16 */

/* The scales of four columns now, as registers that weights are made with. */
typedef struct coded_four {
    __m512i words[4];  /* 4 bits: the weights of each column, twice; FLOATS: the magnitudes of all four */
    __m512 scale[4];   /* BYTES */
    int64_t group_row[4];
} coded_four;

INLINE __m256i to_words(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }

/* All magnitudes of e4m3 (127: NaN), exact. */
static inline void e4m3_magnitudes(float values[128])
{
    for (int i = 0; i < 128; i++) values[i] = fmoe_e4m3_to_float((uint8_t)i);
}

INLINE void next_group(const int how, const fmoe_coded *m, coded_four *f, int64_t group, __m512 table, const float *values)
{
    const __m512 scale2 = _mm512_set1_ps(m->scale2);
    for (int j = 0; j < (how == FLOATS ? 1 : 4); j++) {
        const __m512 scale = _mm512_set1_ps(fmoe_coded_scale(m, f->group_row[j], group));
        if (how == BYTES) {
            f->scale[j] = scale;
        } else if (how == FLOATS) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                const __m512 a = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(values + 32 * i), scale), scale2),
                             b = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(values + 32 * i + 16), scale), scale2);
                f->words[i] = (__m512i)_mm512_cvtne2ps_pbh(b, a);
            }
        } else {
            f->words[j] = _mm512_broadcast_i64x4(to_words(_mm512_mul_ps(_mm512_mul_ps(table, scale), scale2)));
        }
    }
}

/* 32 weights of column j, from its codes at p. */
INLINE __m512 coded_load(const int how, const fmoe_coded *m, const coded_four *f, int j, const uint8_t *p)
{
    if (how <= HIGH_FIRST) { /* of an index five bits are looked at */
        const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
        const __m512i index = how == HIGH_FIRST ? _mm512_or_si512(_mm512_srli_epi32(x, 4), _mm512_slli_epi32(x, 16))
                                                : _mm512_or_si512(x, _mm512_slli_epi32(x, 12));
        return _mm512_castsi512_ps(_mm512_permutexvar_epi16(index, f->words[j]));
    }
    if (how == BYTES) {
        const __m512 zero = _mm512_set1_ps(m->zero), scale2 = _mm512_set1_ps(m->scale2);
        const __m128i lower = _mm_loadu_si128((const __m128i *)(const void *)p), upper = _mm_loadu_si128((const __m128i *)(const void *)(p + 16));
        const __m512 a = _mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(lower)), zero),
                     b = _mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(upper)), zero);
        return (__m512)_mm512_cvtne2ps_pbh(_mm512_mul_ps(_mm512_mul_ps(b, f->scale[j]), scale2),
                                           _mm512_mul_ps(_mm512_mul_ps(a, f->scale[j]), scale2));
    }
    const __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)p));
    const __m512i below = _mm512_permutex2var_epi16(f->words[0], x, f->words[1]), above = _mm512_permutex2var_epi16(f->words[2], x, f->words[3]);
    const __m512i magnitude = _mm512_mask_mov_epi16(below, _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x40)), above);
    /* the sign of a weight is that of its code and its scale */
    return _mm512_castsi512_ps(_mm512_xor_si512(magnitude, _mm512_and_si512(_mm512_slli_epi16(x, 8), _mm512_set1_epi16((short)0x8000))));
}

INLINE void coded_tile(const int how, const int mr, const fmoe_coded *m, int64_t row, int64_t k0, int64_t n, int64_t offset, const void *const *a,
                       float *c, int64_t ldc, int first, __m512 table, const float *values)
{
    enum { LINES_AHEAD = 8 }; /* columns: 8 to 16 KiB */
    const int64_t code_bytes = how <= HIGH_FIRST ? STEP / 2 : STEP;
    const uint8_t *p = m->codes + row * m->step + (how <= HIGH_FIRST ? k0 / 2 : k0);
    __m512 acc[FEW_ROWS_MR][2];
    coded_four f;
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) acc[i][0] = _mm512_setzero_ps();
    for (int j = 0; j < 4; j++) f.group_row[j] = fmoe_coded_group(m, row + j);
    const char *rows[FEW_ROWS_MR];
    for (int i = 0; i < mr; i++) rows[i] = (const char *)a[i] + offset;
    int64_t group = k0 / m->group_cols, left = (group + 1) * m->group_cols - k0; /* k of this group */
    next_group(how, m, &f, group, table, values);
    for (int64_t k = 0; k < n; k += STEP, p += code_bytes, left -= STEP) {
        if (left <= 0) {
            next_group(how, m, &f, ++group, table, values);
            left = m->group_cols;
        }
        if ((((uintptr_t)p) & 63) < (uintptr_t)code_bytes) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) __builtin_prefetch(p + (LINES_AHEAD + j) * m->step, 0, 2);
        }
        const __m512 w = coded_load(how, m, &f, 0, p), x = coded_load(how, m, &f, 1, p + m->step), y = coded_load(how, m, &f, 2, p + 2 * m->step),
                     z = coded_load(how, m, &f, 3, p + 3 * m->step);
        const __m512 wx = _mm512_shuffle_f32x4(w, x, 0x44), yz = _mm512_shuffle_f32x4(y, z, 0x44), wx2 = _mm512_shuffle_f32x4(w, x, 0xee),
                     yz2 = _mm512_shuffle_f32x4(y, z, 0xee);
        const __m512 b[4] = {_mm512_shuffle_f32x4(wx, yz, 0x88), _mm512_shuffle_f32x4(wx, yz, 0xdd), _mm512_shuffle_f32x4(wx2, yz2, 0x88),
                             _mm512_shuffle_f32x4(wx2, yz2, 0xdd)};
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const __m128 four = _mm_loadu_ps((const float *)(const void *)(rows[i] + 2 * k + j * KBLOCK));
                acc[i][0] = DOT_UNITS(acc[i][0], _mm512_broadcast_f32x4(four), b[j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) few_rows_store(1, acc[i], c + i * ldc, first);
}

INLINE void coded_rows(const int how, int64_t mr, const fmoe_coded *m, int64_t row, int64_t k0, int64_t n, int64_t offset, const void *const *a,
                       float *c, int64_t ldc, int first, __m512 table, const float *values)
{
    switch (mr) {
    case 1: coded_tile(how, 1, m, row, k0, n, offset, a, c, ldc, first, table, values); break;
    case 2: coded_tile(how, 2, m, row, k0, n, offset, a, c, ldc, first, table, values); break;
    case 3: coded_tile(how, 3, m, row, k0, n, offset, a, c, ldc, first, table, values); break;
    case 4: coded_tile(how, 4, m, row, k0, n, offset, a, c, ldc, first, table, values); break;
    case 5: coded_tile(how, 5, m, row, k0, n, offset, a, c, ldc, first, table, values); break;
    case 6: coded_tile(how, 6, m, row, k0, n, offset, a, c, ldc, first, table, values); break;
    case 7: coded_tile(how, 7, m, row, k0, n, offset, a, c, ldc, first, table, values); break;
    default: coded_tile(how, 8, m, row, k0, n, offset, a, c, ldc, first, table, values); break;
    }
}

/* 32 columns, four at a time to their end, chunk by chunk. */
INLINE void coded_columns(const int how, int64_t rows, int64_t k0, int64_t kc, int64_t chunk, const void *const *a, const fmoe_coded *m, int64_t row,
                          float *c, int64_t ldc, int first)
{
    float values[128];
    const __m512 table = m->table ? _mm512_sub_ps(_mm512_loadu_ps(m->table), _mm512_set1_ps(m->zero)) : _mm512_setzero_ps();
    if (how == FLOATS) e4m3_magnitudes(values);
    const int64_t tiles = fmoe_ceil_div(rows, FEW_ROWS_MR);
    for (int64_t n = 0; n < FMOE_NB / 2; n += 4)
        for (int64_t k = 0; k < kc; k += chunk)
            for (int64_t r = 0, left = tiles, mr; left > 0; left--, r += mr) {
                mr = fmoe_ceil_div(rows - r, left);
                coded_rows(how, mr, m, row + n, k0 + k, fmoe_min(chunk, kc - k), 2 * k, a + r, c + r * ldc + n, ldc, first && k == 0, table, values);
            }
}

void fmoe_gemm_coded_few_rows_bf16_avx512_bf16(int64_t rows, int64_t k0, int64_t kc, int64_t chunk, const void *const *a, const fmoe_coded *m,
                                               int64_t row, float *c, int64_t ldc, int first)
{
    if (m->code == FMOE_CODE_S8) coded_columns(BYTES, rows, k0, kc, chunk, a, m, row, c, ldc, first);
    else if (m->code == FMOE_CODE_E4M3) coded_columns(FLOATS, rows, k0, kc, chunk, a, m, row, c, ldc, first);
    else if (m->high_first) coded_columns(HIGH_FIRST, rows, k0, kc, chunk, a, m, row, c, ldc, first);
    else coded_columns(LOW_FIRST, rows, k0, kc, chunk, a, m, row, c, ldc, first);
}
