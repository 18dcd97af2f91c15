/* SPDX-License-Identifier: Apache-2.0
 *
 * scales_avx512.h - the scales of quantised weights as kernels want them: rows that share theirs, and those of a row in
 * f32, sixteen at a time. */
#include <immintrin.h>

#include "cpu/kernels/coded.h"
#include "util.h"

enum { SCALES_MOST = 48 }; /* that a kernel asks for at a time */

/* How many of `rows` rows of codes from `row` on are in its row of groups, and which that is. */
static inline int64_t rows_of_group(const fmoe_coded *m, int64_t row, int64_t rows, int64_t *group_row)
{
    const bool second = row >= m->half;
    const int64_t at = second ? row - m->half : row, before = second ? m->half_groups : 0;
    *group_row = fmoe_coded_group(m, row);
    const int64_t end = (*group_row - before + 1) * m->group_rows;
    return fmoe_min(rows, fmoe_min(end - at, second ? INT64_MAX : m->half - row));
}

/* Scales [group, group+n) of a row of groups: where they are, or in `room`. */
static inline const float *scales_in_f32(const fmoe_coded *m, int64_t group_row, int64_t group, int64_t n,
                                         float room[SCALES_MOST])
{
    const int64_t at = group_row * m->scale_step + group;
    if (m->scale_dtype == FMOE_F32) return (const float *)(const void *)m->scale + at;
    if (m->scale_dtype == FMOE_BYTE && m->scale_type != FMOE_SCALE_E8M0) {
        for (int64_t i = 0; i < n; i++) room[i] = fmoe_scale_at(m->scale, m->scale_dtype, m->scale_type, at + i);
        return room;
    }
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 there = (__mmask16)(n - i >= 16 ? 0xffffu : (1u << (n - i)) - 1u);
        __m512i bits;
        if (m->scale_dtype == FMOE_BYTE) { /* 2^(byte - 127): as fmoe_e8m0_to_float */
            const __m512i x = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, m->scale + at + i));
            bits = _mm512_slli_epi32(x, 23);
            bits = _mm512_mask_set1_epi32(bits, _mm512_testn_epi32_mask(x, x), 0x00400000);
            bits = _mm512_mask_set1_epi32(bits, _mm512_cmpeq_epi32_mask(x, _mm512_set1_epi32(255)), 0x7fc00000);
        } else {
            const __m256i x = _mm256_maskz_loadu_epi16(there, m->scale + 2 * (at + i));
            bits = m->scale_dtype == FMOE_BF16 ? _mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)
                                               : _mm512_castps_si512(_mm512_cvtph_ps(x));
        }
        _mm512_storeu_si512(room + i, bits);
    }
    return room;
}
