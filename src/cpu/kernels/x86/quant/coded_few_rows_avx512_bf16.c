/* SPDX-License-Identifier: Apache-2.0
 *
 * coded_few_rows_avx512_bf16.c - products of few rows by quantised weights, which are decoded in registers as they
 * stream: the bytes that come from memory are the codes. The same bits as by kmajor panels of decoded weights
 * (kmajor_few_rows_avx512.h): the same four columns at a time, the same lanes, the same chunks.
 *
 * A sum waits six cycles for the one before it, and its order is given: sixteen columns at a time fill that time. 64
 * bytes of codes and one row take 6 (float8_e4m3fn) to 9 cycles on Zen 5 with codes in L2, of which it has 10 where two
 * cores read 70 GB/s; most of the rest is two shuffles and lookups a cycle.
 *
 * 4 bits: a group has sixteen possible weights, scaled and rounded once (a multiply and a conversion for 32 to 128
 * weights) and looked up, 32 with one vpermi2w. float8_e4m3fn: the same with the 128 magnitudes of a block whose
 * columns share a scale. int8: converted, scaled, rounded. vdpbf16ps takes denormals for zeros. */
#include <immintrin.h>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/x86/pack_avx512.h"
#include "cpu/kernels/x86/quant/scales_avx512.h"
#include "util.h"

#define DOT_UNITS(acc, a, b) _mm512_dpbf16_ps(acc, (__m512bh)(a), (__m512bh)(b))
#include "cpu/kernels/x86/kmajor_avx512.h"
#include "cpu/kernels/x86/kmajor_few_rows_avx512.h"

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

enum { EVEN_FIRST, HIGH_FIRST, POWERS, BYTES, BYTES_FROM_ZERO, FLOATS }; /* how weights are decoded */
enum { MOST = 16, QUARTER = 16 }; /* columns at a time; a quarter of a line of codes */

/* A sum in the order of from_bytes, in the usual one. */
static const int32_t bytes_order[16] = {0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15};

/* What all columns are decoded with. */
typedef struct coded_by {
    __m512 table, scale2, zero;
    __m512 scale2_24;     /* BYTES: 2^-24 times scale2 */
    const float *values;  /* FLOATS: all magnitudes */
    bool plain;           /* scale2 is 1 */
    __m512i columns;      /* 4 bits: of each lane, above its codes */
    __m512i words, pairs; /* POWERS: sixteen weights, each for two columns; of each lane, around its codes */
    __mmask32 not_zero;
} coded_by;

/* What a group's scales decide. 4 bits: the weights of 0 and 1, of 2 and 3 of every four columns; FLOATS: the
 * magnitudes; BYTES: the scales of every four columns. */
typedef struct coded_group {
    __m512i words[MOST / 2];
} coded_group;

/* What comes later: as many bytes of it for each line of codes. */
typedef struct coded_later {
    const char *codes, *scales;
    int64_t line, scales_line; /* 64 bytes of each column, 1024 in all; 0: it was prefetched */
} coded_later;

/* Where a tile's codes are, and their groups. */
typedef struct coded_columns {
    const uint8_t *codes;
    int64_t step;
    const char *groups;       /* of the first of these columns */
    int64_t next_group;       /* bytes from one to the next */
    int64_t left, group_cols; /* k of the first group; of the others */
    coded_later later;
} coded_columns;

INLINE __m512 scaled(const coded_by *by, __m512 v, __m512 scale)
{
    const __m512 once = _mm512_mul_ps(v, scale);
    return by->plain ? once : _mm512_mul_ps(once, by->scale2);
}

/* The conversion to bf16 takes denormals for zeros: those that round to 2^-126 shall not be any. */
INLINE __m512 no_denormals(__m512 v)
{
    const __m512i x = _mm512_castps_si512(v);
    const __mmask16 denormal = _mm512_fpclass_ps_mask(v, 0x20);
    return _mm512_castsi512_ps(_mm512_mask_add_epi32(x, denormal, x, _mm512_set1_epi32(0x8000)));
}

INLINE __m512i scaled_words(const coded_by *by, __m512 above, __m512 scale_above, __m512 below, __m512 scale_below)
{
    return (__m512i)_mm512_cvtne2ps_pbh(no_denormals(scaled(by, above, scale_above)),
                                        no_denormals(scaled(by, below, scale_below)));
}

/* n groups of `fours` times four columns, all before the products: one by one, between them, they cost half as much
 * again. 16 KiB at the most, in L1. */
static NOINLINE void make_groups(int how, int fours, bool regular, const coded_by *by, const float *const *scales,
                                 int64_t n, coded_group *to)
{
    if (how == FLOATS) {
        for (int64_t k = 0; k < n; k++)
            for (int i = 0; i < 4; i++) {
                const __m512 scale = _mm512_set1_ps(scales[0][k]);
                const float *const values = by->values + 32 * i;
                to[k].words[i] = scaled_words(by, _mm512_loadu_ps(values + 16), scale, _mm512_loadu_ps(values), scale);
            }
    } else if (how == BYTES || how == BYTES_FROM_ZERO) {
        for (int64_t k = 0; k < n; k++)
            for (int g = 0; g < fours; g++) {
                __m512 all = _mm512_set1_ps(scales[4 * g][k]);
                for (int i = 1; i < 4; i++)
                    all = _mm512_mask_blend_ps((__mmask16)(15u << 4 * i), all, _mm512_set1_ps(scales[4 * g + i][k]));
                to[k].words[g] = _mm512_castps_si512(all);
            }
    } else {
        const __m512 table = by->table;
        for (int i = 0; i < 2 * fours; i++) {
            const float *const x = scales[2 * i], *const y = scales[2 * i + 1];
            if (regular && by->plain) {
#pragma GCC unroll 4
                for (int64_t k = 0; k < n; k++)
                    to[k].words[i] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(table, _mm512_set1_ps(y[k])),
                                                                  _mm512_mul_ps(table, _mm512_set1_ps(x[k])));
            } else {
                for (int64_t k = 0; k < n; k++)
                    to[k].words[i] = scaled_words(by, table, _mm512_set1_ps(y[k]), table, _mm512_set1_ps(x[k]));
            }
        }
    }
}

/* 32 k of four columns, whose indices in `words` are the bytes of `even` and `odd` (six bits count). */
INLINE void look_up(const __m512i *words, __m512i even, __m512i odd, __m512 b[4])
{
    const __m512i half[2] = {_mm512_unpacklo_epi8(even, odd), _mm512_unpackhi_epi8(even, odd)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i index =
            i % 2 ? _mm512_unpackhi_epi8(half[i / 2], half[i / 2]) : _mm512_unpacklo_epi8(half[i / 2], half[i / 2]);
        __m512i w = index; /* written out: a compiler moves a table to overwrite it */
        __asm__("vpermi2w %2, %1, %0" : "+v"(w) : "v"(words[0]), "v"(words[1]));
        b[i] = _mm512_castsi512_ps(w);
    }
}

/* 4 bits: the codes of four columns side by side, one in each lane of 128 bits. Their low and their high nibbles,
 * interleaved, are indices in the order of k, and each of them twice fills a word, of which six bits count: the upper
 * two are the column. No shuffle leaves its lane but the lookups. */
INLINE void from_nibbles(const bool high_first, const coded_by *by, const __m512i *words, __m512i codes, __m512 b[4])
{
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i lo = _mm512_ternarylogic_epi32(codes, nibble, by->columns, 0xea), /* (a & b) | c */
        high = _mm512_ternarylogic_epi32(_mm512_srli_epi16(codes, 4), nibble, by->columns, 0xea);
    look_up(words, high_first ? high : lo, high_first ? lo : high, b);
}

/* The same of E2M1 by powers of two: integers are added to exponents, and nothing is rounded. In a table two columns
 * take turns, so that one word for each of them is broadcast as one. */
INLINE void from_powers(const coded_by *by, const uint32_t *power, __m512i codes, __m512 b[4])
{
    const __m512i nibble = _mm512_set1_epi8(15 << 1);
    const __m512i even = _mm512_ternarylogic_epi32(_mm512_slli_epi16(codes, 1), nibble, by->pairs, 0xea),
                  odd = _mm512_ternarylogic_epi32(_mm512_srli_epi16(codes, 3), nibble, by->pairs, 0xea);
    __m512i words[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        words[i] = _mm512_mask_add_epi16(by->words, by->not_zero, by->words, _mm512_set1_epi32((int32_t)power[i]));
    look_up(words, even, odd, b);
}

/* 16 bytes of each of four columns. */
INLINE __m512i load_lanes(const char *p, int64_t step)
{
    __m512i codes = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(const void *)p));
    codes = _mm512_inserti32x4(codes, _mm_loadu_si128((const __m128i *)(const void *)(p + step)), 1);
    codes = _mm512_inserti32x4(codes, _mm_loadu_si128((const __m128i *)(const void *)(p + 2 * step)), 2);
    return _mm512_inserti32x4(codes, _mm_loadu_si128((const __m128i *)(const void *)(p + 3 * step)), 3);
}

/* float8_e4m3fn: 8 k of four columns are 32 words that begin with their code; 16 bytes of each are two of them. */
INLINE void from_floats(const __m512i *words, __m512i codes, __m512 b[2])
{
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
        const __m512i x = j ? _mm512_unpackhi_epi8(codes, codes) : _mm512_unpacklo_epi8(codes, codes);
        const __m512i below = _mm512_permutex2var_epi16(words[0], x, words[1]),
                      above = _mm512_permutex2var_epi16(words[2], x, words[3]);
        const __m512i magnitude =
            _mm512_mask_mov_epi16(below, _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x40)), above);
        /* with the sign of the code and of the scale: a ^ (b & c) */
        b[j] = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(magnitude, x, _mm512_set1_epi16((short)0x8000), 0x78));
    }
}

/* int8: 8 k of four columns, and as many f32 of k 0 to 3 as of k 4 to 7: the sums of a column are not side by side. */
INLINE void from_bytes(const int how, const coded_by *by, __m512i words, __m512i codes, __m512 b[2])
{
    const __m512i zero = _mm512_setzero_si512();
    const __m512 scale = _mm512_castsi512_ps(words);
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
        const __m512i x = j ? _mm512_unpackhi_epi8(zero, codes) : _mm512_unpacklo_epi8(zero, codes);
        __m512 half[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) { /* 2^24 times the number */
            const __m512i y = i ? _mm512_unpackhi_epi16(zero, x) : _mm512_unpacklo_epi16(zero, x);
            if (how == BYTES) half[i] = _mm512_mul_ps(_mm512_cvtepi32_ps(y), scale);
            else half[i] = _mm512_mul_ps(_mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32(y, 24)), by->zero), scale);
            half[i] = _mm512_mul_ps(half[i], how == BYTES ? by->scale2_24 : by->scale2);
            if (how != BYTES) half[i] = no_denormals(half[i]);
        }
        b[j] = (__m512)_mm512_cvtne2ps_pbh(half[1], half[0]);
    }
}

INLINE void decode(const int how, const coded_by *by, const char *group, int four, __m512i codes, __m512 b[4])
{
    const __m512i *words = (const __m512i *)(const void *)group;
    if (how == BYTES || how == BYTES_FROM_ZERO) from_bytes(how, by, words[four], codes, b);
    else if (how == FLOATS) from_floats(words, codes, b);
    else if (how == POWERS) from_powers(by, (const uint32_t *)(const void *)group + 2 * four, codes, b);
    else from_nibbles(how == HIGH_FIRST, by, words + 2 * four, codes, b);
}

/* 8 k of a row as what they are multiplied with lies in B. */
INLINE __m512 load_a(const int how, const char *at)
{
    if (how != BYTES && how != BYTES_FROM_ZERO)
        return _mm512_broadcast_f32x4(_mm_loadu_ps((const float *)(const void *)at));
    double pairs[2];
    memcpy(pairs, at, sizeof pairs);
    return _mm512_castpd_ps(_mm512_mask_blend_pd(0xf0, _mm512_set1_pd(pairs[0]), _mm512_set1_pd(pairs[1])));
}

/* An address that a compiler shall not know more about: it makes sixteen of one, and keeps them in vector registers. */
INLINE const char *opaque(const char *p)
{
    __asm__("" : "+r"(p));
    return p;
}

/* A quarter of a line of codes of each column by mr rows. */
INLINE void coded_quarter(const int how, const int mr, const int fours, const coded_by *by, const char *group,
                          __m512i codes[MOST / 4][4], int s, const char *const *rows, int64_t offset,
                          __m512 acc[FEW_ROWS_MR][MOST / 4], coded_later *later)
{
    const int n = how <= POWERS ? 4 : 2, at_once = mr <= 2 ? 1 : 2;
    __m512 a[2][4], b[2][4];
#pragma GCC unroll 2
    for (int i = 0; mr <= 2 && i < mr; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) a[i][j] = load_a(how, rows[i] + offset + j * KBLOCK);
    }
#pragma GCC unroll 4
    for (int g = 0; g < fours; g += at_once) {
#pragma GCC unroll 2
        for (int h = 0; h < at_once; h++) {
            __builtin_prefetch(later->codes, 0, 3);
            later->codes = opaque(later->codes + later->line);
            decode(how, by, group, g + h, codes[g + h][s], b[h]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) {
                const __m512 x = mr <= 2 ? a[i & 1][j] : load_a(how, rows[i] + offset + j * KBLOCK);
#pragma GCC unroll 2
                for (int h = 0; h < at_once; h++) acc[i][g + h] = DOT_UNITS(acc[i][g + h], x, b[h][j]);
            }
        }
    }
}

/* n of k by mr rows and `fours` times four columns; a: the rows, from that k on. A line of each of four columns becomes
 * four registers of codes: two shuffles for 64 bytes, where loads of 16 bytes take three inserts. */
INLINE void coded_tile(const int how, const int mr, const int fours, const coded_by *by, const coded_columns *t,
                       int64_t n, int64_t offset, const void *const *a, float *c, int64_t ldc, int first)
{
    const int64_t quarter = how <= POWERS ? 2 * QUARTER : QUARTER, step = t->step;
    const char *p = (const char *)t->codes;
    coded_later later = t->later;
    const char *group = t->groups;
    int64_t left = t->left; /* of the group */
    __m512i codes[MOST / 4][4];
    __m512 acc[FEW_ROWS_MR][MOST / 4];
    const char *rows[FEW_ROWS_MR];
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) {
        rows[i] = (const char *)a[i] + offset;
#pragma GCC unroll 4
        for (int g = 0; g < fours; g++) acc[i][g] = _mm512_setzero_ps();
    }
    int64_t k = 0;
#define CODED_QUARTER(s)                                                                                               \
    do {                                                                                                               \
        if (left == 0) {                                                                                               \
            left = t->group_cols;                                                                                      \
            group += t->next_group;                                                                                    \
        }                                                                                                              \
        coded_quarter(how, mr, fours, by, group, codes, s, rows, 2 * k, acc, &later);                                  \
        left -= quarter;                                                                                               \
        k += quarter;                                                                                                  \
    } while (0)
    for (; k + 4 * quarter <= n; p += LINE) {
        for (int64_t at = 0; at < later.scales_line; at += LINE) __builtin_prefetch(later.scales + at, 0, 3);
        later.scales += later.scales_line;
        const char *q = p;
#pragma GCC unroll 4
        for (int g = 0; g < fours; g++) {
            __m512 lines[4];
            few_rows_load_b(q, step, lines);
            q = opaque(q + 4 * step);
#pragma GCC unroll 4
            for (int s = 0; s < 4; s++) codes[g][s] = _mm512_castps_si512(lines[s]);
        }
        if (mr <= 2) {
            CODED_QUARTER(0);
            CODED_QUARTER(1);
            CODED_QUARTER(2);
            CODED_QUARTER(3);
        } else {
#pragma GCC unroll 1
            for (int s = 0; s < 4; s++) CODED_QUARTER(s);
        }
    }
#pragma GCC unroll 1
    for (; k < n; p += QUARTER) {
        const char *q = p;
#pragma GCC unroll 4
        for (int g = 0; g < fours; g++) {
            codes[g][0] = load_lanes(q, step);
            q = opaque(q + 4 * step);
        }
        CODED_QUARTER(0);
    }
#undef CODED_QUARTER
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) {
        if (how == BYTES || how == BYTES_FROM_ZERO) {
#pragma GCC unroll 4
            for (int g = 0; g < fours; g++)
                acc[i][g] = _mm512_permutexvar_ps(_mm512_loadu_si512(bytes_order), acc[i][g]);
        }
#pragma GCC unroll 2
        for (int g = 0; g < fours; g += 2) few_rows_store(fours < 2 ? 1 : 2, &acc[i][g], c + i * ldc + 4 * g, first);
    }
}

/* `fours` times four columns of a tile's sixteen, from column j on. */
INLINE void coded_some(const int how, const int mr, const int fours, int64_t j, const coded_by *by,
                       const coded_columns *all, int64_t n, int64_t offset, const void *const *a, float *c, int64_t ldc,
                       int first)
{
    coded_columns t = *all;
    t.codes += j * t.step;
    t.later.codes += j * (how <= POWERS ? n / 2 : n);
    if (j) t.later.scales_line = 0;
    if (how == POWERS) t.groups += j * (int64_t)sizeof(uint16_t);
    else if (how != FLOATS) t.groups += j / (how <= POWERS ? 2 : 4) * (int64_t)sizeof(__m512i);
    coded_tile(how, mr, fours, by, &t, n, offset, a, c + j, ldc, first);
}

/* Sixteen columns, by as many rows at a time as their sums leave registers for. */
INLINE void coded_rows(const int how, int64_t mr, const coded_by *by, const coded_columns *t, int64_t n, int64_t offset,
                       const void *const *a, float *c, int64_t ldc, int first)
{
    switch (mr) {
    case 1: coded_tile(how, 1, 4, by, t, n, offset, a, c, ldc, first); return;
    case 2: coded_tile(how, 2, 4, by, t, n, offset, a, c, ldc, first); return;
    case 3: coded_tile(how, 3, 4, by, t, n, offset, a, c, ldc, first); return;
    case 4: coded_tile(how, 4, 4, by, t, n, offset, a, c, ldc, first); return;
    default: break;
    }
    for (int64_t j = 0; j < MOST; j += 8) switch (mr) {
        case 5: coded_some(how, 5, 2, j, by, t, n, offset, a, c, ldc, first); break;
        case 6: coded_some(how, 6, 2, j, by, t, n, offset, a, c, ldc, first); break;
        case 7: coded_some(how, 7, 2, j, by, t, n, offset, a, c, ldc, first); break;
        default: coded_some(how, 8, 2, j, by, t, n, offset, a, c, ldc, first); break;
        }
}

/* Groups [group, group+groups) of sixteen columns in f32: where they are, or in `room`. */
INLINE void point_at_scales(const fmoe_coded *m, int64_t row, int64_t group, int64_t groups, const float **scales,
                            float room[MOST][SCALES_MOST])
{
    if (m->group_rows == 1 && m->scale_dtype == FMOE_F32) {
        const float *at = (const float *)(const void *)m->scale + row * m->scale_step + group;
        for (int j = 0; j < MOST; j++, at += m->scale_step) scales[j] = at;
        return;
    }
    for (int j = 0; j < MOST; j++) scales[j] = scales_in_f32(m, fmoe_coded_group(m, row + j), group, groups, room[j]);
}

/* Powers of two, of groups [group, group+groups) of sixteen columns, as what is added to a bf16; false: they are
 * something else, or a weight may be too large or too small. */
INLINE bool point_at_powers(const fmoe_coded *m, int64_t row, int64_t group, int64_t groups,
                            uint16_t power[SCALES_MOST][MOST])
{
    enum { ONE = 127, LEAST = 2, MOST_OF_ALL = 252 }; /* times 0.5; times 6 */
    if (m->code != FMOE_CODE_E2M1 || m->high_first || m->scale2 != 1 || m->zero != 0 || groups > 2 * MOST) return false;
    if (m->scale_dtype != FMOE_BYTE || m->scale_type != FMOE_SCALE_E8M0) return false;
    const __mmask32 there = groups == 2 * MOST ? 0xffffffffu : (1u << groups) - 1u;
    __m256i x[MOST], y[MOST];
    __mmask32 outside = 0;
    for (int j = 0; j < MOST; j++) {
        const char *const at = m->scale + fmoe_coded_group(m, row + j) * m->scale_step + group;
        x[j] = _mm256_mask_loadu_epi8(_mm256_set1_epi8(ONE), there, at);
        outside |= _mm256_cmpgt_epu8_mask(_mm256_sub_epi8(x[j], _mm256_set1_epi8(LEAST)),
                                          _mm256_set1_epi8((char)(MOST_OF_ALL - LEAST)));
    }
    if (outside) return false;
#pragma GCC unroll 4
    for (int round = 0; round < 4; round++) { /* a transposition of 16 x 16 bytes, twice */
#pragma GCC unroll 8
        for (int j = 0; j < MOST / 2; j++) {
            y[2 * j] = _mm256_unpacklo_epi8(x[j], x[j + MOST / 2]);
            y[2 * j + 1] = _mm256_unpackhi_epi8(x[j], x[j + MOST / 2]);
        }
#pragma GCC unroll 16
        for (int j = 0; j < MOST; j++) x[j] = y[j];
    }
#pragma GCC unroll 16
    for (int j = 0; j < MOST; j++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const __m256i e =
                _mm256_cvtepu8_epi16(i ? _mm256_extracti128_si256(x[j], 1) : _mm256_castsi256_si128(x[j]));
            _mm256_storeu_si256((__m256i *)(void *)power[MOST * i + j],
                                _mm256_slli_epi16(_mm256_sub_epi16(e, _mm256_set1_epi16(ONE)), 7));
        }
    return true;
}

/* 2^-60 to 2^60, all of them (of zeros it says no): see fmoe_coded.regular. */
INLINE bool scales_are_regular(const float *const *scales, int64_t groups)
{
    const __m512i least = _mm512_set1_epi32((int32_t)0x43000000), range = _mm512_set1_epi32(120 << 24);
    __mmask16 outside = 0;
    for (int64_t i = 0; i < groups; i += 16) {
        const __mmask16 there = (__mmask16)(groups - i >= 16 ? 0xffffu : (1u << (groups - i)) - 1u);
        for (int j = 0; j < MOST; j++) {
            const __m512i x = _mm512_maskz_loadu_epi32(there, scales[j] + i);
            outside |= _mm512_mask_cmpgt_epu32_mask(there, _mm512_sub_epi32(_mm512_slli_epi32(x, 1), least), range);
        }
    }
    return !outside;
}

/* The scales of sixteen columns: of each from the first group on; POWERS: of each group. `apart`: of float8_e4m3fn,
 * only four columns share theirs. */
typedef struct coded_scales {
    int64_t groups;
    bool apart, regular;
    const float *at[MOST];
    float room[MOST][SCALES_MOST];
    uint16_t power[SCALES_MOST][MOST];
} coded_scales;

/* What is to be multiplied by sixteen columns, and where the sums go. */
typedef struct coded_rows_of {
    int64_t rows, n, offset; /* k from `offset` bytes on */
    const void *const *a;
    float *c;
    int64_t ldc;
    int first;
} coded_rows_of;

/* Sixteen columns; float8_e4m3fn whose scale only four columns share: four columns and one row at a time. */
INLINE void coded_sixteen(const int how, const coded_by *by, const coded_columns *columns, const coded_scales *scales,
                          const coded_rows_of *r)
{
    coded_group made[SCALES_MOST];
    coded_columns t = *columns;
    t.groups = how == POWERS ? (const char *)scales->power : (const char *)made;
    t.next_group = how == POWERS ? sizeof *scales->power : sizeof *made;
    for (int64_t j = 0; scales->apart && j < MOST; j += 4) {
        make_groups(how, 1, false, by, scales->at + j, scales->groups, made);
        for (int64_t i = 0; i < r->rows; i++)
            coded_some(how, 1, 1, j, by, &t, r->n, r->offset, r->a + i, r->c + i * r->ldc, r->ldc, r->first);
    }
    if (scales->apart) return;
    if (how != POWERS) make_groups(how, MOST / 4, scales->regular, by, scales->at, scales->groups, made);
    for (int64_t i = 0, left = fmoe_ceil_div(r->rows, FEW_ROWS_MR), mr; left > 0; left--, i += mr) {
        mr = fmoe_ceil_div(r->rows - i, left);
        coded_rows(how, mr, by, &t, r->n, r->offset, r->a + i, r->c + i * r->ldc, r->ldc, r->first);
        t.later.line = t.later.scales_line = 0;
    }
}

#define CODED_SIXTEEN(name, how)                                                                                       \
    static NOINLINE void sixteen_##name(const coded_by *by, const coded_columns *t, const coded_scales *scales,        \
                                        const coded_rows_of *r)                                                        \
    {                                                                                                                  \
        coded_sixteen(how, by, t, scales, r);                                                                          \
    }
CODED_SIXTEEN(even_first, EVEN_FIRST)
CODED_SIXTEEN(high_first, HIGH_FIRST)
CODED_SIXTEEN(powers, POWERS)
CODED_SIXTEEN(bytes, BYTES)
CODED_SIXTEEN(bytes_from_zero, BYTES_FROM_ZERO)
CODED_SIXTEEN(floats, FLOATS)

/* 32 columns, sixteen at a time to their end, chunk by chunk. What comes sixteen columns later is prefetched, one line
 * after another as it lies in memory, a line for every line that is decoded: into L1, where it has room. */
void fmoe_gemm_coded_few_rows_bf16_avx512_bf16(int64_t rows, int64_t k0, int64_t kc, int64_t chunk,
                                               const void *const *a, const fmoe_coded *m, int64_t row, float *c,
                                               int64_t ldc, int first, const fmoe_coded *then, int64_t then_row)
{
    static const int32_t columns[4] = {0, 0x10101010, 0x20202020, 0x30303030},
                         pairs[4] = {0, 0x01010101, 0x20202020, 0x21212121};
    static const uint16_t twice[32] = {0, 0, 1, 1, 2,  2,  3,  3,  4,  4,  5,  5,  6,  6,  7,  7,
                                       8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15};
    const bool nibbles = fmoe_code_is_4bit(m->code), floats = m->code == FMOE_CODE_E4M3;
    coded_scales scales;
    coded_by by; /* all of it is set below: zeros for it all would take as long as a line of products */
    by.plain = m->scale2 == 1;
    by.values = fmoe_e4m3_magnitudes();
    by.zero = _mm512_set1_ps(m->zero);
    by.scale2 = _mm512_set1_ps(m->scale2);
    by.scale2_24 = _mm512_set1_ps(m->scale2 * 0x1p-24f);
    by.table = m->table ? _mm512_sub_ps(_mm512_loadu_ps(m->table), by.zero) : _mm512_setzero_ps();
    by.columns = by.pairs = _mm512_setzero_si512();
    for (int j = 1; j < 4; j++) {
        by.columns = _mm512_mask_set1_epi32(by.columns, (__mmask16)(15u << 4 * j), columns[j]);
        by.pairs = _mm512_mask_set1_epi32(by.pairs, (__mmask16)(15u << 4 * j), pairs[j]);
    }
    const __m512i words = (__m512i)_mm512_cvtne2ps_pbh(by.table, by.table);
    by.words = _mm512_permutexvar_epi16(_mm512_loadu_si512(twice), words);
    by.not_zero = _mm512_test_epi16_mask(by.words, _mm512_set1_epi16(0x7fff));
    const int64_t scale_bytes = (int64_t)fmoe_dtype_size(m->scale_dtype) * m->scale_step;
    for (int64_t n = 0; n < FMOE_NB / 2; n += MOST) {
        const bool more = n + MOST < FMOE_NB / 2;
        const fmoe_coded *const ahead = more ? m : then;
        const int64_t ahead_row = more ? row + n + MOST : then_row;
        for (int64_t k = 0; k < kc; k += chunk) {
            const int64_t at = k0 + k, group = at / m->group_cols, length = fmoe_min(chunk, kc - k);
            const int64_t bytes = nibbles ? k / 2 : k; /* before these codes */
            coded_columns t = {.step = m->step, .left = (group + 1) * m->group_cols - at, .group_cols = m->group_cols};
            t.codes = m->codes + (row + n) * m->step + (nibbles ? at / 2 : at);
            t.later.codes = (const char *)ahead->codes + ahead_row * ahead->step + MOST * bytes;
            t.later.line = LINE;
            if (m->group_rows == 1 && m->step > 0) {
                t.later.scales_line = fmoe_min(MOST * scale_bytes * LINE / m->step, 4 * LINE);
                t.later.scales = ahead->scale + ahead_row * scale_bytes + t.later.scales_line * (bytes / LINE);
            }
            scales.groups = (at + length - 1) / m->group_cols - group + 1;
            const bool powers = point_at_powers(m, row + n, group, scales.groups, scales.power);
            if (!powers) point_at_scales(m, row + n, group, scales.groups, scales.at, scales.room);
            scales.apart = floats && fmoe_coded_group(m, row + n) != fmoe_coded_group(m, row + n + MOST - 1);
            const coded_rows_of r = {rows, length, 2 * k, a, c + n, ldc, first && k == 0};
            scales.regular = !powers && !floats && m->regular && scales_are_regular(scales.at, scales.groups);
            if (powers) sixteen_powers(&by, &t, &scales, &r);
            else if (nibbles && m->high_first) sixteen_high_first(&by, &t, &scales, &r);
            else if (nibbles) sixteen_even_first(&by, &t, &scales, &r);
            else if (floats) sixteen_floats(&by, &t, &scales, &r);
            else if (m->zero == 0 && scales.regular) sixteen_bytes(&by, &t, &scales, &r);
            else sixteen_bytes_from_zero(&by, &t, &scales, &r);
        }
    }
}
