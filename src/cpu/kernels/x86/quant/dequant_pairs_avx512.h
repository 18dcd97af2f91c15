/* SPDX-License-Identifier: Apache-2.0
 *
 * dequant_pairs_avx512.h - what most quantised weights of products are, decoded fast: bf16 for products of pairs, which
 * take denormals for zeros, so that the conversion may flush them; whole steps of 32 in whole groups, no tensor of
 * zeros. Scales are brought to f32 beforehand, and rows that share theirs are decoded together.
 *
 * 4 bits: sixteen weights of a group, looked up 32 at a time. float8_e4m3fn: 128 magnitudes of a group, the same. int8:
 * converted, scaled, rounded. Included by dequant_avx512.c, after INLINE and indices(). */
#include "cpu/kernels/x86/quant/scales_avx512.h"

enum { PAIRS_STEP = 32, PAIRS_K = 1024 }; /* k of a register; k at a time */

INLINE bool are_pairs(const fmoe_coded *m, int64_t k, int64_t n)
{
    return m->for_pairs && !m->zeros && !(k % PAIRS_STEP || n % PAIRS_STEP) &&
           (m->group_cols % PAIRS_STEP == 0 || m->group_cols >= k + n);
}

INLINE __m512 times(const bool plain, __m512 v, float scale, __m512 scale2)
{
    const __m512 once = _mm512_mul_ps(v, _mm512_set1_ps(scale));
    return plain ? once : _mm512_mul_ps(once, scale2);
}

/* 32 codes by the table in the lower or upper half of `words`: of an index five bits count, and a 1 or a 0 in the fifth
 * takes the place of what the shifts leave there. */
INLINE void pairs_lookup(const bool high_first, const bool upper, char *to, const uint8_t *p, __m512i words)
{
    const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    const __m512i y = high_first ? _mm512_srli_epi32(x, 4) : x, z = _mm512_slli_epi32(x, high_first ? 16 : 12);
    const __m512i index = upper ? _mm512_ternarylogic_epi32(y, z, _mm512_set1_epi16(16), 0xfe)  /* a | b | c */
                                : _mm512_ternarylogic_epi32(y, z, _mm512_set1_epi16(15), 0xa8); /* (a | b) & c */
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(index, words));
}

/* n codes of a group from p on. */
INLINE void pairs_group(const bool high_first, char *to, const uint8_t *p, int64_t n, __m512 t)
{
    const __m512i words = (__m512i)_mm512_cvtne2ps_pbh(t, t);
    for (; n > 0; n -= PAIRS_STEP, p += 16, to += 64) pairs_lookup(high_first, false, to, p, words);
}

/* n codes of a row, whole groups of one, two or four steps. */
INLINE void pairs_groups(const bool plain, const bool high_first, const int steps, char *to, const uint8_t *p,
                         int64_t n, __m512 table, const float *scales, __m512 scale2)
{
    for (; steps == 1 && n >= 2 * PAIRS_STEP; n -= 2 * PAIRS_STEP, p += 32, to += 128, scales += 2) {
        const __m512i words = (__m512i)_mm512_cvtne2ps_pbh(times(plain, table, scales[1], scale2),
                                                           times(plain, table, scales[0], scale2));
        pairs_lookup(high_first, false, to, p, words);
        pairs_lookup(high_first, true, to + 64, p + 16, words);
    }
    for (; n > 0; n -= steps * PAIRS_STEP, scales++) {
        const __m512 t = times(plain, table, scales[0], scale2);
        const __m512i words = (__m512i)_mm512_cvtne2ps_pbh(t, t);
#pragma GCC unroll 4
        for (int i = 0; i < steps; i++, p += 16, to += 64) pairs_lookup(high_first, false, to, p, words);
    }
}

INLINE __m512 from_s8(const bool plain, const uint8_t *p, __m512 zero, float scale, __m512 scale2)
{
    const __m512i x = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    return times(plain, _mm512_sub_ps(_mm512_cvtepi32_ps(x), zero), scale, scale2);
}

INLINE void pairs_bytes(const bool plain, char *to, const uint8_t *p, int64_t n, __m512 zero, float scale,
                        __m512 scale2)
{
    for (; n > 0; n -= PAIRS_STEP, p += PAIRS_STEP, to += 64)
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(from_s8(plain, p + 16, zero, scale, scale2),
                                                             from_s8(plain, p, zero, scale, scale2)));
}

/* The magnitudes of a group, and n codes by them: bit 6 says in which half, bit 7 is the sign. */
INLINE void pairs_magnitudes(const bool plain, float scale, __m512 scale2, __m512i words[4])
{
    const float *values = fmoe_e4m3_magnitudes();
    for (int i = 0; i < 4; i++)
        words[i] = (__m512i)_mm512_cvtne2ps_pbh(times(plain, _mm512_loadu_ps(values + 32 * i + 16), scale, scale2),
                                                times(plain, _mm512_loadu_ps(values + 32 * i), scale, scale2));
}

INLINE void pairs_floats(char *to, const uint8_t *p, int64_t n, const __m512i words[4])
{
    for (; n > 0; n -= PAIRS_STEP, p += PAIRS_STEP, to += 64) {
        const __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(const void *)p));
        const __m512i below = _mm512_permutex2var_epi16(words[0], x, words[1]),
                      above = _mm512_permutex2var_epi16(words[2], x, words[3]);
        const __m512i magnitude =
            _mm512_mask_mov_epi16(below, _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x40)), above);
        _mm512_storeu_si512(to, _mm512_ternarylogic_epi32(magnitude, _mm512_slli_epi16(x, 8),
                                                          _mm512_set1_epi16((short)0x8000), 0x78)); /* a ^ (b & c) */
    }
}

/* What is the same for all rows of a block: n codes, of which `first` are in the first group. */
typedef struct pairs_block {
    const fmoe_coded *m;
    int64_t n, first, apart;
    __m512 table, zero, scale2;
    bool regular; /* whole groups of one, two or four steps */
} pairs_block;

/* `rows` rows that share their scales. */
INLINE void decode_pairs(const bool plain, const int32_t code, const bool high_first, const pairs_block *b, char *to,
                         const uint8_t *codes, int64_t rows, const float *scales)
{
    const fmoe_coded *m = b->m;
    for (int64_t i = 0; code == FMOE_CODE_LUT4 && b->regular && i < rows; i++, to += b->apart, codes += m->step) {
        const int64_t steps = m->group_cols / PAIRS_STEP;
        if (steps == 1) pairs_groups(plain, high_first, 1, to, codes, b->n, b->table, scales, b->scale2);
        else if (steps == 2) pairs_groups(plain, high_first, 2, to, codes, b->n, b->table, scales, b->scale2);
        else pairs_groups(plain, high_first, 4, to, codes, b->n, b->table, scales, b->scale2);
    }
    if (code == FMOE_CODE_LUT4 && b->regular) return;
    const bool bytes = code != FMOE_CODE_LUT4;
    for (int64_t n = b->n, length = b->first; n > 0; scales++, n -= length, length = fmoe_min(n, m->group_cols)) {
        __m512i words[4];
        if (code == FMOE_CODE_E4M3) pairs_magnitudes(plain, *scales, b->scale2, words);
        for (int64_t i = 0; i < rows; i++) {
            const uint8_t *p = codes + i * m->step;
            char *dst = to + i * b->apart;
            if (code == FMOE_CODE_E4M3) pairs_floats(dst, p, length, words);
            else if (code == FMOE_CODE_S8) pairs_bytes(plain, dst, p, length, b->zero, *scales, b->scale2);
            else pairs_group(high_first, dst, p, length, times(plain, b->table, *scales, b->scale2));
        }
        codes += bytes ? length : length / 2;
        to += 2 * length;
    }
}

INLINE void decode_pairs_of(const bool plain, char *to, int64_t apart, const fmoe_coded *m, int64_t row, int64_t rows,
                            int64_t k0, int64_t n)
{
    const bool bytes = m->code == FMOE_CODE_S8 || m->code == FMOE_CODE_E4M3;
    pairs_block b = {.m = m, .apart = apart, .zero = _mm512_set1_ps(m->zero), .scale2 = _mm512_set1_ps(m->scale2)};
    b.table = m->table ? _mm512_sub_ps(_mm512_loadu_ps(m->table), b.zero) : b.zero;
    for (int64_t k = k0; k < k0 + n; k += PAIRS_K) {
        const int64_t group = k / m->group_cols, left = (group + 1) * m->group_cols - k;
        b.n = fmoe_min(PAIRS_K, k0 + n - k);
        b.first = fmoe_min(b.n, left);
        const int64_t groups = 1 + (left < b.n ? fmoe_ceil_div(b.n - left, m->group_cols) : 0);
        b.regular = (m->group_cols == 32 || m->group_cols == 64 || m->group_cols == 128) && left == m->group_cols &&
                    b.n % m->group_cols == 0;
        for (int64_t i = 0, run, group_row; i < rows; i += run) {
            run = rows_of_group(m, row + i, rows - i, &group_row);
            float room[SCALES_MOST];
            const float *scales = scales_in_f32(m, group_row, group, groups, room);
            const uint8_t *codes = m->codes + (row + i) * m->step + (bytes ? k : k / 2);
            char *dst = to + i * apart + 2 * (k - k0);
            if (m->code == FMOE_CODE_E4M3) decode_pairs(plain, FMOE_CODE_E4M3, false, &b, dst, codes, run, scales);
            else if (m->code == FMOE_CODE_S8) decode_pairs(plain, FMOE_CODE_S8, false, &b, dst, codes, run, scales);
            else if (m->high_first) decode_pairs(plain, FMOE_CODE_LUT4, true, &b, dst, codes, run, scales);
            else decode_pairs(plain, FMOE_CODE_LUT4, false, &b, dst, codes, run, scales);
        }
    }
}
