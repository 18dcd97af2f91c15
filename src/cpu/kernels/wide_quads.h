/* SPDX-License-Identifier: Apache-2.0
 * wide_quads.h - four columns x 8 k of 16-bit elements as quads of f32, for AVX2 and AVX-512. */
#ifndef FMOE_WIDE_QUADS_H
#define FMOE_WIDE_QUADS_H

#include <immintrin.h>
#include <stdint.h>

#include "fusedmoe.h"

static inline __m128i quad_at(const char *p) { return _mm_loadu_si128((const __m128i *)(const void *)p); }

static inline __m256i two_columns(const char *p, int64_t step)
{
    return _mm256_inserti128_si256(_mm256_castsi128_si256(quad_at(p)), quad_at(p + step), 1);
}

/* The first four k of columns 0 and 1, of 2 and 3; the second four of both. A bf16 is the upper half of its f32. */
static inline __attribute__((always_inline)) void wide_quads(const int dtype, const char *p, int64_t step,
                                                             __m256 out[4])
{
    if (dtype == FMOE_BF16) {
        const __m256i x = two_columns(p, step), y = two_columns(p + 2 * step, step), zero = _mm256_setzero_si256();
        out[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, x));
        out[1] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, y));
        out[2] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, x));
        out[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, y));
    } else {
        const __m128i a = quad_at(p), b = quad_at(p + step), c = quad_at(p + 2 * step), d = quad_at(p + 3 * step);
        out[0] = _mm256_cvtph_ps(_mm_unpacklo_epi64(a, b));
        out[1] = _mm256_cvtph_ps(_mm_unpacklo_epi64(c, d));
        out[2] = _mm256_cvtph_ps(_mm_unpackhi_epi64(a, b));
        out[3] = _mm256_cvtph_ps(_mm_unpackhi_epi64(c, d));
    }
}

#endif
