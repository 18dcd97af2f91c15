/* SPDX-License-Identifier: Apache-2.0
 * load_avx2.h - eight elements of any storage type as f32. */
#ifndef FMOE_LOAD_AVX2_H
#define FMOE_LOAD_AVX2_H

#include <immintrin.h>

#include "cpu/kernels/load.h"

static inline __attribute__((always_inline)) __m256 load8(const int dtype, const void *p)
{
    if (dtype == FMOE_F16) return _mm256_cvtph_ps(_mm_loadu_si128(p));
    if (dtype == FMOE_BF16)
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
    return _mm256_loadu_ps(p);
}

#endif
