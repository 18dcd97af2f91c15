/* SPDX-License-Identifier: Apache-2.0
 *
 * dequant_pairs_avx512.h - what most quantised weights of products are, decoded fast: bf16 for products of pairs, which
 * take denormals for zeros, so that the conversion may flush them; whole steps of 32 in whole groups, no tensor of
 * zeros. Scales are brought to f32 beforehand, and rows that share theirs are decoded together.
 *
 * 4 bits: sixteen weights of a group, looked up 32 at a time. float8_e4m3fn: 128 magnitudes of a group, the same. int8:
 * converted, scaled, rounded. Included by dequant_avx512.c, after INLINE and indices(). */
#include "cpu/kernels/x86/scales_avx512.h"

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

/* One group of a row: n codes from p on. */
INLINE void pairs_nibbles(const bool plain, const bool high_first, char *to, const uint8_t *p, int64_t n, __m512 table,
                          float scale, __m512 scale2)
{
    const __m512i words = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(times(plain, table, scale, scale2)));
    for (; n > 0; n -= PAIRS_STEP, p += 16, to += 64)
        _mm512_storeu_si512(to, _mm512_permutexvar_epi16(
                                    indices(high_first, _mm_loadu_si128((const __m128i *)(const void *)p)), words));
}

INLINE __m512 from_s8(const bool plain, const uint8_t *p, __m512 zero, float scale, __m512 scale2)
{
    const __m512i x = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
    return times(plain, _mm512_sub_ps(_mm512_cvtepi32_ps(x), zero), scale, scale2);
}

INLINE void pairs_bytes(const bool plain, char *to, const uint8_t *p, int64_t n, __m512 zero, float scale, __m512 scale2)
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
        const __m512i magnitude = _mm512_mask_mov_epi16(below, _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x40)), above);
        _mm512_storeu_si512(to, _mm512_ternarylogic_epi32(magnitude, _mm512_slli_epi16(x, 8),
                                                          _mm512_set1_epi16((short)0x8000), 0x78)); /* a ^ (b & c) */
    }
}

/* `rows` rows of one row of groups; k, n: at most PAIRS_K of them. */
INLINE void decode_pairs(const bool plain, const int32_t code, const bool high_first, char *to, int64_t apart,
                         const fmoe_coded *m, int64_t row, int64_t rows, int64_t group_row, int64_t k, int64_t n)
{
    const __m512 scale2 = _mm512_set1_ps(m->scale2), zero = _mm512_set1_ps(m->zero);
    const __m512 table = m->table ? _mm512_sub_ps(_mm512_loadu_ps(m->table), zero) : zero;
    const int64_t first = k / m->group_cols, groups = (k + n - 1) / m->group_cols - first + 1;
    float room[SCALES_MOST];
    const float *scales = scales_in_f32(m, group_row, first, groups, room);
    const bool bytes = code == FMOE_CODE_S8 || code == FMOE_CODE_E4M3;
    const uint8_t *codes = m->codes + row * m->step + (bytes ? k : k / 2);
    int64_t length = fmoe_min(n, (first + 1) * m->group_cols - k);
    for (int64_t g = 0; n > 0; g++, n -= length, length = fmoe_min(n, m->group_cols)) {
        __m512i words[4];
        if (code == FMOE_CODE_E4M3) pairs_magnitudes(plain, scales[g], scale2, words);
        for (int64_t i = 0; i < rows; i++) {
            const uint8_t *p = codes + i * m->step;
            char *dst = to + i * apart;
            if (code == FMOE_CODE_E4M3) pairs_floats(dst, p, length, words);
            else if (code == FMOE_CODE_S8) pairs_bytes(plain, dst, p, length, zero, scales[g], scale2);
            else pairs_nibbles(plain, high_first, dst, p, length, table, scales[g], scale2);
        }
        codes += bytes ? length : length / 2;
        to += 2 * length;
    }
}

INLINE void decode_pairs_of(const bool plain, char *to, int64_t apart, const fmoe_coded *m, int64_t row, int64_t rows,
                            int64_t k0, int64_t n)
{
    for (int64_t i = 0, run, group_row; i < rows; i += run, to += run * apart) {
        run = rows_of_group(m, row + i, rows - i, &group_row);
        for (int64_t k = 0; k < n; k += PAIRS_K) {
            const int64_t length = fmoe_min(PAIRS_K, n - k), at = k0 + k, first = row + i;
            char *dst = to + 2 * k;
            if (m->code == FMOE_CODE_E4M3)
                decode_pairs(plain, FMOE_CODE_E4M3, false, dst, apart, m, first, run, group_row, at, length);
            else if (m->code == FMOE_CODE_S8)
                decode_pairs(plain, FMOE_CODE_S8, false, dst, apart, m, first, run, group_row, at, length);
            else if (m->high_first)
                decode_pairs(plain, FMOE_CODE_LUT4, true, dst, apart, m, first, run, group_row, at, length);
            else decode_pairs(plain, FMOE_CODE_LUT4, false, dst, apart, m, first, run, group_row, at, length);
        }
    }
}
