/* SPDX-License-Identifier: Apache-2.0
 *
 * coded_few_rows_avx512_bf16.c - products of few rows by quantised weights, which are decoded in registers as they
 * stream: the bytes that come from memory are the codes. The same bits as by kmajor panels of decoded weights
 * (kmajor_few_rows_avx512.h): the same four columns at a time, the same lanes, the same chunks.
 *
 * A sum waits six cycles for the one before it, and its order is given: of one or two rows, sixteen columns at a time
 * fill that time (eight took 13 cycles for 64 bytes of 4-bit codes on Zen 5, which decodes them in 7).
 *
 * 4 bits: a group has sixteen possible weights, scaled and rounded once (a multiply and a conversion for 32 to 128
 * weights) and looked up, 32 with one vpermt2w. float8_e4m3fn: the same with the 128 magnitudes of a block whose
 * columns share a scale. int8: converted, scaled, rounded. The conversion to bf16 flushes denormals, which vdpbf16ps
 * takes for zeros anyway. */
#include <immintrin.h>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/x86/pack_avx512.h"
#include "cpu/kernels/x86/quant/scales_avx512.h"
#include "util.h"

#define DOT_UNITS(acc, a, b) _mm512_dpbf16_ps(acc, (__m512bh)(a), (__m512bh)(b))
#include "cpu/kernels/x86/kmajor_avx512.h"
#include "cpu/kernels/x86/kmajor_few_rows_avx512.h"

#define INLINE static inline __attribute__((always_inline))

enum { EVEN_FIRST, HIGH_FIRST, BYTES, BYTES_FROM_ZERO, FLOATS }; /* how weights are decoded */
enum { STEP = 32, MOST = 16 };                                   /* at a time: k, a register of bf16; columns */

/* What all columns are decoded with. */
typedef struct coded_by {
    __m512 table, scale2, zero;
    const float *values; /* FLOATS: all magnitudes */
    bool plain;          /* scale2 is 1 */
    __m512i columns;     /* 4 bits: of each lane, above its codes */
} coded_by;

/* What depends on the scales of four columns. 4 bits: the weights of columns 0 and 1, 2 and 3; FLOATS: the magnitudes;
 * BYTES: the scales of columns 0 and 1, 2 and 3. */
typedef struct coded_four {
    __m512i words[4];
} coded_four;

INLINE __m512 scaled(const coded_by *by, __m512 v, __m512 scale)
{
    const __m512 once = _mm512_mul_ps(v, scale);
    return by->plain ? once : _mm512_mul_ps(once, by->scale2);
}

INLINE void next_group(const int how, const coded_by *by, coded_four *f, const float *const *scales, int64_t group)
{
    if (how == BYTES || how == BYTES_FROM_ZERO) {
        for (int i = 0; i < 2; i++)
            f->words[i] = _mm512_castps_si512(_mm512_mask_blend_ps(0xff00, _mm512_set1_ps(scales[2 * i][group]),
                                                                   _mm512_set1_ps(scales[2 * i + 1][group])));
    } else if (how == FLOATS) {
        const __m512 scale = _mm512_set1_ps(scales[0][group]);
        for (int i = 0; i < 4; i++)
            f->words[i] = (__m512i)_mm512_cvtne2ps_pbh(scaled(by, _mm512_loadu_ps(by->values + 32 * i + 16), scale),
                                                       scaled(by, _mm512_loadu_ps(by->values + 32 * i), scale));
    } else {
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++)
            f->words[i] = (__m512i)_mm512_cvtne2ps_pbh(scaled(by, by->table, _mm512_set1_ps(scales[2 * i + 1][group])),
                                                       scaled(by, by->table, _mm512_set1_ps(scales[2 * i][group])));
    }
}

/* 4 bits: the codes of four columns side by side, one in each lane of 128 bits. Their low and their high nibbles,
 * interleaved, are indices in the order of k, and each of them twice fills a word, of which six bits count: the upper
 * two are the column. No shuffle leaves its lane but the lookups. */
INLINE void load_nibbles(const bool high_first, const coded_by *by, const coded_four *f, const uint8_t *p, int64_t step,
                         __m512 b[4])
{
    __m512i codes = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)p));
    codes = _mm512_inserti32x4(codes, _mm_loadu_si128((const __m128i *)(const void *)(p + step)), 1);
    codes = _mm512_inserti32x4(codes, _mm_loadu_si128((const __m128i *)(const void *)(p + 2 * step)), 2);
    codes = _mm512_inserti32x4(codes, _mm_loadu_si128((const __m128i *)(const void *)(p + 3 * step)), 3);
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i lo = _mm512_ternarylogic_epi32(codes, nibble, by->columns, 0xea), /* (a & b) | c */
        high = _mm512_ternarylogic_epi32(_mm512_srli_epi16(codes, 4), nibble, by->columns, 0xea);
    const __m512i even = high_first ? high : lo, odd = high_first ? lo : high;
    const __m512i half[2] = {_mm512_unpacklo_epi8(even, odd), _mm512_unpackhi_epi8(even, odd)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i index =
            i % 2 ? _mm512_unpackhi_epi8(half[i / 2], half[i / 2]) : _mm512_unpacklo_epi8(half[i / 2], half[i / 2]);
        b[i] = _mm512_castsi512_ps(_mm512_permutex2var_epi16(f->words[0], index, f->words[1]));
    }
}

/* int8: 8 k of two columns are 16 numbers, and those of two pairs of columns, converted, are a register of B. */
INLINE __m512 from_bytes(const int how, const coded_by *by, const coded_four *f, int i, __m128i two)
{
    const __m512 v = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(two));
    const __m512 from_zero = how == BYTES ? v : _mm512_sub_ps(v, by->zero);
    return _mm512_mul_ps(_mm512_mul_ps(from_zero, _mm512_castsi512_ps(f->words[i])), by->scale2);
}

INLINE void load_bytes(const int how, const coded_by *by, const coded_four *f, const uint8_t *p, int64_t step,
                       __m512 b[4])
{
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        __m128i x[4];
        for (int j = 0; j < 4; j++) x[j] = _mm_loadu_si128((const __m128i *)(const void *)(p + j * step + 16 * i));
        b[2 * i] = (__m512)_mm512_cvtne2ps_pbh(from_bytes(how, by, f, 1, _mm_unpacklo_epi64(x[2], x[3])),
                                               from_bytes(how, by, f, 0, _mm_unpacklo_epi64(x[0], x[1])));
        b[2 * i + 1] = (__m512)_mm512_cvtne2ps_pbh(from_bytes(how, by, f, 1, _mm_unpackhi_epi64(x[2], x[3])),
                                                   from_bytes(how, by, f, 0, _mm_unpackhi_epi64(x[0], x[1])));
    }
}

/* float8_e4m3fn: 8 k of four columns are 32 words that begin with their code. */
INLINE void load_floats(const coded_four *f, const uint8_t *p, int64_t step, __m512 b[4])
{
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++, p += 16) {
        __m512i codes = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)p));
        codes = _mm512_inserti32x4(codes, _mm_loadu_si128((const __m128i *)(const void *)(p + step)), 1);
        codes = _mm512_inserti32x4(codes, _mm_loadu_si128((const __m128i *)(const void *)(p + 2 * step)), 2);
        codes = _mm512_inserti32x4(codes, _mm_loadu_si128((const __m128i *)(const void *)(p + 3 * step)), 3);
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            const __m512i x = j ? _mm512_unpackhi_epi8(codes, codes) : _mm512_unpacklo_epi8(codes, codes);
            const __m512i below = _mm512_permutex2var_epi16(f->words[0], x, f->words[1]),
                          above = _mm512_permutex2var_epi16(f->words[2], x, f->words[3]);
            const __m512i magnitude =
                _mm512_mask_mov_epi16(below, _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x40)), above);
            /* with the sign of the code and of the scale: a ^ (b & c) */
            b[2 * i + j] =
                _mm512_castsi512_ps(_mm512_ternarylogic_epi32(magnitude, x, _mm512_set1_epi16((short)0x8000), 0x78));
        }
    }
}

/* Four registers of B: 32 k of four columns. */
INLINE void load_four(const int how, const coded_by *by, const coded_four *f, const uint8_t *p, int64_t step,
                      __m512 b[4])
{
    if (how == BYTES || how == BYTES_FROM_ZERO) load_bytes(how, by, f, p, step, b);
    else if (how == FLOATS) load_floats(f, p, step, b);
    else load_nibbles(how == HIGH_FIRST, by, f, p, step, b);
}

/* Where a tile's codes are, what comes `ahead` bytes after them, and their scales from the first group on. */
typedef struct coded_columns {
    const uint8_t *codes;
    int64_t step, ahead;
    const float *scales[MOST];
    int64_t left, group_cols; /* k of the first group; of the others */
} coded_columns;

/* n of k by mr rows and `fours` times four columns; a: the rows, from that k on. */
INLINE void coded_tile(const int how, const int mr, const int fours, const coded_by *by, const coded_columns *t,
                       int64_t n, int64_t offset, const void *const *a, float *c, int64_t ldc, int first)
{
    const int64_t code_bytes = how <= HIGH_FIRST ? STEP / 2 : STEP, step = t->step, ahead = t->ahead;
    const uint8_t *p = t->codes;
    coded_four f[MOST / 4];
    __m512 acc[FEW_ROWS_MR][MOST / 4], b[4];
    const char *rows[FEW_ROWS_MR];
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) {
        rows[i] = (const char *)a[i] + offset;
#pragma GCC unroll 4
        for (int g = 0; g < fours; g++) acc[i][g] = _mm512_setzero_ps();
    }
    int64_t group = 0, k = 0;
    for (int64_t left = fmoe_min(t->left, n); k < n; group++, left = fmoe_min(t->group_cols, n - k)) {
#pragma GCC unroll 4
        for (int g = 0; g < fours; g++)
            if (how != FLOATS || g == 0) next_group(how, by, &f[g], t->scales + 4 * g, group);
        for (const int64_t end = k + left; k < end; k += STEP, p += code_bytes) {
            if (((uintptr_t)p & 63) < (uintptr_t)code_bytes) {
#pragma GCC unroll 16
                for (int j = 0; j < 4 * fours; j++) __builtin_prefetch(p + ahead + j * step, 0, 2);
            }
#pragma GCC unroll 4
            for (int g = 0; g < fours; g++) {
                load_four(how, by, &f[how == FLOATS ? 0 : g], p + 4 * g * step, step, b);
#pragma GCC unroll 8
                for (int i = 0; i < mr; i++) {
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++) {
                        const __m128 four = _mm_loadu_ps((const float *)(const void *)(rows[i] + 2 * k + j * KBLOCK));
                        acc[i][g] = DOT_UNITS(acc[i][g], _mm512_broadcast_f32x4(four), b[j]);
                    }
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 2
        for (int g = 0; g < fours; g += 2) few_rows_store(fours < 2 ? 1 : 2, &acc[i][g], c + i * ldc + 4 * g, first);
}

/* `fours` times four columns of a tile's sixteen, from column j on. */
INLINE void coded_some(const int how, const int mr, const int fours, int64_t j, const coded_by *by,
                       const coded_columns *all, int64_t n, int64_t offset, const void *const *a, float *c, int64_t ldc,
                       int first)
{
    coded_columns t = *all;
    t.codes += j * t.step;
    for (int i = 0; i < 4 * fours; i++) t.scales[i] = all->scales[j + i];
    coded_tile(how, mr, fours, by, &t, n, offset, a, c + j, ldc, first);
}

/* Sixteen columns, by as many rows at a time as their sums leave registers for. */
INLINE void coded_rows(const int how, int64_t mr, const coded_by *by, const coded_columns *t, int64_t n, int64_t offset,
                       const void *const *a, float *c, int64_t ldc, int first)
{
    switch (mr) {
    case 1: coded_tile(how, 1, 4, by, t, n, offset, a, c, ldc, first); return;
    case 2: coded_tile(how, 2, 4, by, t, n, offset, a, c, ldc, first); return;
    default: break;
    }
    for (int64_t j = 0; j < MOST; j += 8) switch (mr) {
        case 3: coded_some(how, 3, 2, j, by, t, n, offset, a, c, ldc, first); break;
        case 4: coded_some(how, 4, 2, j, by, t, n, offset, a, c, ldc, first); break;
        case 5: coded_some(how, 5, 2, j, by, t, n, offset, a, c, ldc, first); break;
        case 6: coded_some(how, 6, 2, j, by, t, n, offset, a, c, ldc, first); break;
        case 7: coded_some(how, 7, 2, j, by, t, n, offset, a, c, ldc, first); break;
        default: coded_some(how, 8, 2, j, by, t, n, offset, a, c, ldc, first); break;
        }
}

/* The same by a row and four columns at a time: where only four share a scale that all of a tile must share. */
INLINE void coded_rows_apart(const int how, int64_t mr, const coded_by *by, const coded_columns *t, int64_t n,
                             int64_t offset, const void *const *a, float *c, int64_t ldc, int first)
{
    for (int64_t j = 0; j < MOST; j += 4)
        for (int64_t i = 0; i < mr; i++) coded_some(how, 1, 1, j, by, t, n, offset, a + i, c + i * ldc, ldc, first);
}

/* The scales of the next sixteen columns, as those of the first of these from `group` on. */
INLINE void prefetch_scales(const fmoe_coded *m, int64_t row, int64_t group, int64_t groups)
{
    const int64_t size = (int64_t)fmoe_dtype_size(m->scale_dtype), step = m->scale_step * size;
    const char *at = m->scale + (fmoe_coded_group(m, row) + MOST) * step + group * size;
    for (int j = 0; j < MOST; j++, at += step)
        for (int64_t line = 0; line < groups * size; line += LINE) __builtin_prefetch(at + line, 0, 2);
}

/* 32 columns, sixteen at a time to their end, chunk by chunk. */
INLINE void coded_half(const int how, int64_t rows, int64_t k0, int64_t kc, int64_t chunk, const void *const *a,
                       const fmoe_coded *m, int64_t row, float *c, int64_t ldc, int first)
{
    static const int32_t columns[4] = {0, 0x10101010, 0x20202020, 0x30303030};
    float room[MOST][SCALES_MOST];
    coded_by by = {.plain = m->scale2 == 1, .scale2 = _mm512_set1_ps(m->scale2), .values = fmoe_e4m3_magnitudes()};
    by.zero = _mm512_set1_ps(m->zero);
    if (m->table) by.table = _mm512_sub_ps(_mm512_loadu_ps(m->table), by.zero);
    by.columns = _mm512_setzero_si512();
    for (int j = 1; j < 4; j++) by.columns = _mm512_mask_set1_epi32(by.columns, (__mmask16)(15u << 4 * j), columns[j]);
    const int64_t tiles = fmoe_ceil_div(rows, FEW_ROWS_MR);
    for (int64_t n = 0; n < FMOE_NB / 2; n += MOST)
        for (int64_t k = 0; k < kc; k += chunk) {
            const int64_t at = k0 + k, group = at / m->group_cols, length = fmoe_min(chunk, kc - k);
            const int64_t groups = (at + length - 1) / m->group_cols - group + 1;
            coded_columns t = {.step = m->step, .left = (group + 1) * m->group_cols - at, .group_cols = m->group_cols};
            t.codes = m->codes + (row + n) * m->step + (how <= HIGH_FIRST ? at / 2 : at);
            t.ahead = MOST * m->step;
            if (m->group_rows == 1) prefetch_scales(m, row + n, group, groups);
            for (int j = 0; j < MOST; j++)
                t.scales[j] = scales_in_f32(m, fmoe_coded_group(m, row + n + j), group, groups, room[j]);
            for (int64_t r = 0, left = tiles, mr; left > 0; left--, r += mr) {
                mr = fmoe_ceil_div(rows - r, left);
                if (how == FLOATS && fmoe_coded_group(m, row + n) != fmoe_coded_group(m, row + n + MOST - 1))
                    coded_rows_apart(how, mr, &by, &t, length, 2 * k, a + r, c + r * ldc + n, ldc, first && k == 0);
                else coded_rows(how, mr, &by, &t, length, 2 * k, a + r, c + r * ldc + n, ldc, first && k == 0);
            }
        }
}

void fmoe_gemm_coded_few_rows_bf16_avx512_bf16(int64_t rows, int64_t k0, int64_t kc, int64_t chunk,
                                               const void *const *a, const fmoe_coded *m, int64_t row, float *c,
                                               int64_t ldc, int first)
{
    if (m->code == FMOE_CODE_S8 && m->zero != 0)
        coded_half(BYTES_FROM_ZERO, rows, k0, kc, chunk, a, m, row, c, ldc, first);
    else if (m->code == FMOE_CODE_S8) coded_half(BYTES, rows, k0, kc, chunk, a, m, row, c, ldc, first);
    else if (m->code == FMOE_CODE_E4M3) coded_half(FLOATS, rows, k0, kc, chunk, a, m, row, c, ldc, first);
    else if (m->high_first) coded_half(HIGH_FIRST, rows, k0, kc, chunk, a, m, row, c, ldc, first);
    else coded_half(EVEN_FIRST, rows, k0, kc, chunk, a, m, row, c, ldc, first);
}
