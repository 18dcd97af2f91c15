/* SPDX-License-Identifier: Apache-2.0
 * load_avx2.h - elements of any storage type as f32, eight or one at a time. */
#ifndef FMOE_LOAD_AVX2_H
#define FMOE_LOAD_AVX2_H

#include <immintrin.h>

#include "util.h"

static inline __m256 load8_f32(const void *p) { return _mm256_loadu_ps(p); }

static inline __m256 load8_bf16(const void *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}

static inline __m256 load8_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }

static inline float load1_f32(const void *p) { return *(const float *)p; }
static inline float load1_bf16(const void *p) { return fmoe_bf16_to_float(*(const uint16_t *)p); }
static inline float load1_f16(const void *p) { return fmoe_f16_to_float(*(const uint16_t *)p); }

/* The type is a constant where these are inlined. */
static inline __attribute__((always_inline)) __m256 load8(const int dtype, const void *p)
{
    return dtype == FMOE_BF16 ? load8_bf16(p) : dtype == FMOE_F16 ? load8_f16(p) : load8_f32(p);
}

static inline __attribute__((always_inline)) float load1(const int dtype, const void *p)
{
    return dtype == FMOE_BF16 ? load1_bf16(p) : dtype == FMOE_F16 ? load1_f16(p) : load1_f32(p);
}

static inline __attribute__((always_inline)) int64_t bytes_of(const int dtype) { return dtype == FMOE_F32 ? 4 : 2; }

#endif
