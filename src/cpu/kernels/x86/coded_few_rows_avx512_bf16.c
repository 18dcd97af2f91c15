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

enum { EVEN_FIRST, HIGH_FIRST, BYTES, FLOATS }; /* how weights are decoded */
enum { STEP = 32 };                             /* k at a time: a register of bf16 */

/* What four columns are decoded with: constants, and what depends on their scales. */
typedef struct coded_four {
    __m512 table, scale2;
    const float *values; /* FLOATS: all magnitudes */
    bool plain;          /* scale2 is 1 */
    __m512i select, parity, columns;
    __m512i words[4];      /* 4 bits: the weights of columns 0 and 1, 2 and 3; FLOATS: the magnitudes, of all four */
    __m512 scale[4];       /* BYTES */
    const char *scales[4]; /* of each column, the first of its groups */
} coded_four;

INLINE __m512 scaled(const coded_four *f, __m512 v, __m512 scale)
{
    const __m512 once = _mm512_mul_ps(v, scale);
    return f->plain ? once : _mm512_mul_ps(once, f->scale2);
}

INLINE void next_group(const int how, const fmoe_coded *m, coded_four *f, int64_t group)
{
    __m512 scale[4];
    const bool f32 = m->scale_dtype == FMOE_F32;
    for (int j = 0; j < (how == FLOATS ? 1 : 4); j++)
        scale[j] = _mm512_set1_ps(f32 ? ((const float *)(const void *)f->scales[j])[group]
                                      : fmoe_scale_at(f->scales[j], m->scale_dtype, m->scale_type, group));
    if (how == BYTES) {
        for (int j = 0; j < 4; j++) f->scale[j] = scale[j];
    } else if (how == FLOATS) {
        for (int i = 0; i < 4; i++)
            f->words[i] = (__m512i)_mm512_cvtne2ps_pbh(scaled(f, _mm512_loadu_ps(f->values + 32 * i + 16), scale[0]),
                                                       scaled(f, _mm512_loadu_ps(f->values + 32 * i), scale[0]));
    } else {
        for (int i = 0; i < 2; i++)
            f->words[i] =
                (__m512i)_mm512_cvtne2ps_pbh(scaled(f, f->table, scale[2 * i + 1]), scaled(f, f->table, scale[2 * i]));
    }
}

/* 4 bits: the codes of four columns side by side, one in each lane of 128 bits; of 8 k of them, four bytes a lane, the
 * indices of 32 weights: the column in the upper two of six bits. Nothing is shuffled across lanes but the weights
 * themselves. */
INLINE void load_nibbles(const coded_four *f, const uint8_t *p, int64_t step, __m512 b[4])
{
    __m512i codes = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)p));
    codes = _mm512_inserti32x4(codes, _mm_loadu_si128((const __m128i *)(const void *)(p + step)), 1);
    codes = _mm512_inserti32x4(codes, _mm_loadu_si128((const __m128i *)(const void *)(p + 2 * step)), 2);
    codes = _mm512_inserti32x4(codes, _mm_loadu_si128((const __m128i *)(const void *)(p + 3 * step)), 3);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i twice = _mm512_shuffle_epi8(codes, _mm512_add_epi8(f->select, _mm512_set1_epi8((char)(4 * i))));
        const __m512i index = _mm512_ternarylogic_epi32(_mm512_srlv_epi16(twice, f->parity), _mm512_set1_epi16(15),
                                                        f->columns, 0xea); /* (a & b) | c */
        b[i] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(f->words[0], index, f->words[1]));
    }
}

/* 8 bits: 32 weights of column j, from its codes at p. */
INLINE __m512 load_bytes(const int how, const fmoe_coded *m, const coded_four *f, int j, const uint8_t *p)
{
    if (how == BYTES) {
        const __m512 zero = _mm512_set1_ps(m->zero);
        const __m128i lower = _mm_loadu_si128((const __m128i *)(const void *)p),
                      upper = _mm_loadu_si128((const __m128i *)(const void *)(p + 16));
        const __m512 a = _mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(lower)), zero),
                     b = _mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(upper)), zero);
        return (__m512)_mm512_cvtne2ps_pbh(scaled(f, b, f->scale[j]), scaled(f, a, f->scale[j]));
    }
    const __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)p));
    const __m512i below = _mm512_permutex2var_epi16(f->words[0], x, f->words[1]),
                  above = _mm512_permutex2var_epi16(f->words[2], x, f->words[3]);
    const __m512i magnitude = _mm512_mask_mov_epi16(below, _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x40)), above);
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(x, 8), _mm512_set1_epi16((short)0x8000));
    return _mm512_castsi512_ps(_mm512_xor_si512(magnitude, sign)); /* of the code and of the scale */
}

/* Four registers of B: 32 k of four columns. */
INLINE void load_four(const int how, const fmoe_coded *m, const coded_four *f, const uint8_t *p, __m512 b[4])
{
    if (how <= HIGH_FIRST) {
        load_nibbles(f, p, m->step, b);
        return;
    }
    const __m512 w = load_bytes(how, m, f, 0, p), x = load_bytes(how, m, f, 1, p + m->step),
                 y = load_bytes(how, m, f, 2, p + 2 * m->step), z = load_bytes(how, m, f, 3, p + 3 * m->step);
    const __m512 wx = _mm512_shuffle_f32x4(w, x, 0x44), yz = _mm512_shuffle_f32x4(y, z, 0x44),
                 wx2 = _mm512_shuffle_f32x4(w, x, 0xee), yz2 = _mm512_shuffle_f32x4(y, z, 0xee);
    b[0] = _mm512_shuffle_f32x4(wx, yz, 0x88);
    b[1] = _mm512_shuffle_f32x4(wx, yz, 0xdd);
    b[2] = _mm512_shuffle_f32x4(wx2, yz2, 0x88);
    b[3] = _mm512_shuffle_f32x4(wx2, yz2, 0xdd);
}

/* n of k, from k0 on, of four or eight columns from `row` on, by mr rows. Eight: a sum waits for the one before it, and
 * two rows of four columns are too few to fill that time. */
INLINE void coded_tile(const int how, const int mr, const int fours, const fmoe_coded *m, const coded_four *constants,
                       int64_t row, int64_t k0, int64_t n, int64_t offset, const void *const *a, float *c, int64_t ldc,
                       int first)
{
    enum { AHEAD = 16 }; /* columns that are prefetched ahead: 16 to 32 KiB */
    const int64_t code_bytes = how <= HIGH_FIRST ? STEP / 2 : STEP;
    const uint8_t *p = m->codes + row * m->step + (how <= HIGH_FIRST ? k0 / 2 : k0);
    coded_four f[2] = {*constants, *constants};
    __m512 acc[FEW_ROWS_MR][2], b[2][4];
    const char *rows[FEW_ROWS_MR];
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) acc[i][0] = acc[i][1] = _mm512_setzero_ps(), rows[i] = (const char *)a[i] + offset;
    for (int j = 0; j < 4 * fours; j++)
        f[j / 4].scales[j % 4] =
            m->scale + fmoe_coded_group(m, row + j) * m->scale_step * (int64_t)fmoe_dtype_size(m->scale_dtype);
    int64_t group = k0 / m->group_cols, left = (group + 1) * m->group_cols - k0; /* k of this group */
#pragma GCC unroll 2
    for (int g = 0; g < fours; g++) next_group(how, m, &f[g], group);
    for (int64_t k = 0; k < n; k += STEP, p += code_bytes, left -= STEP) {
        if (left <= 0) {
            group++;
            left = m->group_cols;
#pragma GCC unroll 2
            for (int g = 0; g < fours; g++) next_group(how, m, &f[g], group);
        }
        if (((uintptr_t)p & 63) < (uintptr_t)code_bytes) {
#pragma GCC unroll 8
            for (int j = 0; j < 4 * fours; j++) __builtin_prefetch(p + (AHEAD + j) * m->step, 0, 2);
        }
#pragma GCC unroll 2
        for (int g = 0; g < fours; g++) load_four(how, m, &f[g], p + 4 * g * m->step, b[g]);
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const __m128 four = _mm_loadu_ps((const float *)(const void *)(rows[i] + 2 * k + j * KBLOCK));
                const __m512 ai = _mm512_broadcast_f32x4(four);
#pragma GCC unroll 2
                for (int g = 0; g < fours; g++) acc[i][g] = DOT_UNITS(acc[i][g], ai, b[g][j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) few_rows_store(fours, acc[i], c + i * ldc, first);
}

INLINE void coded_rows(const int how, int64_t mr, const fmoe_coded *m, const coded_four *f, int64_t row, int64_t k0,
                       int64_t n, int64_t offset, const void *const *a, float *c, int64_t ldc, int first)
{
    switch (mr) {
    case 1: coded_tile(how, 1, 2, m, f, row, k0, n, offset, a, c, ldc, first); return;
    case 2: coded_tile(how, 2, 2, m, f, row, k0, n, offset, a, c, ldc, first); return;
    case 3: coded_tile(how, 3, 2, m, f, row, k0, n, offset, a, c, ldc, first); return;
    case 4: coded_tile(how, 4, 2, m, f, row, k0, n, offset, a, c, ldc, first); return;
    default: break;
    }
    for (int64_t j = 0; j < 8; j += 4) switch (mr) {
        case 5: coded_tile(how, 5, 1, m, f, row + j, k0, n, offset, a, c + j, ldc, first); break;
        case 6: coded_tile(how, 6, 1, m, f, row + j, k0, n, offset, a, c + j, ldc, first); break;
        case 7: coded_tile(how, 7, 1, m, f, row + j, k0, n, offset, a, c + j, ldc, first); break;
        default: coded_tile(how, 8, 1, m, f, row + j, k0, n, offset, a, c + j, ldc, first); break;
        }
}

/* 32 columns, eight at a time to their end, chunk by chunk. */
INLINE void coded_columns(const int how, int64_t rows, int64_t k0, int64_t kc, int64_t chunk, const void *const *a,
                          const fmoe_coded *m, int64_t row, float *c, int64_t ldc, int first)
{
    static const int8_t select[16] = {0, -128, 0, -128, 1, -128, 1, -128, 2, -128, 2, -128, 3, -128, 3, -128};
    static const int32_t columns[4] = {0, 0x00100010, 0x00200020, 0x00300030};
    float values[128];
    coded_four f = {.plain = m->scale2 == 1, .scale2 = _mm512_set1_ps(m->scale2), .values = values};
    if (m->table) f.table = _mm512_sub_ps(_mm512_loadu_ps(m->table), _mm512_set1_ps(m->zero));
    f.select = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)select));
    f.parity = _mm512_set1_epi32(
        how == HIGH_FIRST ? 4 : 4 << 16); /* the even k of a byte, or the odd one, is in the upper nibble */
    for (int j = 0; j < 4; j++)
        f.columns =
            _mm512_mask_set1_epi32(j ? f.columns : _mm512_setzero_si512(), (__mmask16)(15u << 4 * j), columns[j]);
    for (int i = 0; i < 128 && how == FLOATS; i++) values[i] = fmoe_e4m3_to_float((uint8_t)i);
    const int64_t tiles = fmoe_ceil_div(rows, FEW_ROWS_MR);
    for (int64_t n = 0; n < FMOE_NB / 2; n += 8)
        for (int64_t k = 0; k < kc; k += chunk)
            for (int64_t r = 0, left = tiles, mr; left > 0; left--, r += mr) {
                mr = fmoe_ceil_div(rows - r, left);
                coded_rows(how, mr, m, &f, row + n, k0 + k, fmoe_min(chunk, kc - k), 2 * k, a + r, c + r * ldc + n, ldc,
                           first && k == 0);
            }
}

void fmoe_gemm_coded_few_rows_bf16_avx512_bf16(int64_t rows, int64_t k0, int64_t kc, int64_t chunk,
                                               const void *const *a, const fmoe_coded *m, int64_t row, float *c,
                                               int64_t ldc, int first)
{
    if (m->code == FMOE_CODE_S8) coded_columns(BYTES, rows, k0, kc, chunk, a, m, row, c, ldc, first);
    else if (m->code == FMOE_CODE_E4M3) coded_columns(FLOATS, rows, k0, kc, chunk, a, m, row, c, ldc, first);
    else if (m->high_first) coded_columns(HIGH_FIRST, rows, k0, kc, chunk, a, m, row, c, ldc, first);
    else coded_columns(EVEN_FIRST, rows, k0, kc, chunk, a, m, row, c, ldc, first);
}
