/* SPDX-License-Identifier: Apache-2.0
 *
 * dequant_avx2.c - quantised weights to the plan's dtype (kernels.h: dequant) on AVX2. 4 bits: the sixteen weights of a
 * group are scaled and rounded once. Of 16 bits they are two tables of bytes, the lower and the upper ones, in which
 * vpshufb looks up 32 codes; of f32 two registers, of which vpermps takes. 8 bits: converted, scaled and rounded eight
 * at a time. What is left of a group, and a first code in the middle of a byte, one by one. */
#include <immintrin.h>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/load.h"

#define INLINE static inline __attribute__((always_inline))

/* Eight numbers to the nearest of 16 bits, in the lower halves of dwords; bf16 as fmoe_float_to_bf16. */
INLINE __m256i to_16bit(const int dtype, __m256 v)
{
    if (dtype == FMOE_F16)
        return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    const __m256i u = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q),
                 quiet = _mm256_castsi256_ps(_mm256_or_si256(u, _mm256_set1_epi32(0x400000)));
    return _mm256_srli_epi32(_mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), quiet, nan)), 16);
}

/* Sixteen numbers. */
INLINE void put16(const int dtype, char *to, __m256 a, __m256 b)
{
    if (dtype == FMOE_F32) {
        _mm256_storeu_ps((float *)(void *)to, a);
        _mm256_storeu_ps((float *)(void *)(to + 32), b);
        return;
    }
    const __m256i words = _mm256_packus_epi32(to_16bit(dtype, a), to_16bit(dtype, b));
    _mm256_storeu_si256((__m256i *)(void *)to, _mm256_permute4x64_epi64(words, 0xd8));
}

INLINE void put1(const int dtype, char *to, float v)
{
    if (dtype == FMOE_F32) *(float *)(void *)to = v;
    else *(uint16_t *)(void *)to = dtype == FMOE_BF16 ? fmoe_float_to_bf16(v) : fmoe_float_to_f16(v);
}

/* What the codes of a group are decoded by. */
typedef struct group {
    __m256 scale, scale2, zero;
} group;

INLINE __m256 scaled(const group *g, __m256 v)
{
    return _mm256_mul_ps(_mm256_mul_ps(_mm256_sub_ps(v, g->zero), g->scale), g->scale2);
}

/* ---- 4 bits ---- */

/* 32 codes as indices, in the order of k. */
INLINE __m256i nibbles(const bool high_first, const uint8_t *p)
{
    const __m128i codes = _mm_loadu_si128((const __m128i *)(const void *)p), nibble = _mm_set1_epi8(15);
    const __m128i lo = _mm_and_si128(codes, nibble), high = _mm_and_si128(_mm_srli_epi16(codes, 4), nibble);
    const __m128i even = high_first ? high : lo, odd = high_first ? lo : high;
    return _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
}

INLINE void lookup_floats(char *to, __m256i index, __m256 t0, __m256 t1)
{
    const __m128i half[2] = {_mm256_castsi256_si128(index), _mm256_extracti128_si256(index, 1)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m256i x = _mm256_cvtepu8_epi32(i % 2 ? _mm_srli_si128(half[i / 2], 8) : half[i / 2]);
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(x, 28)); /* bit 3 as a sign */
        _mm256_storeu_ps((float *)(void *)(to + 32 * i),
                         _mm256_blendv_ps(_mm256_permutevar8x32_ps(t0, x), _mm256_permutevar8x32_ps(t1, x), upper));
    }
}

INLINE void lookup_words(char *to, __m256i index, __m256i lower, __m256i upper)
{
    const __m256i lo = _mm256_shuffle_epi8(lower, index), high = _mm256_shuffle_epi8(upper, index);
    const __m256i a = _mm256_unpacklo_epi8(lo, high), b = _mm256_unpackhi_epi8(lo, high);
    _mm256_storeu_si256((__m256i *)(void *)to, _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_storeu_si256((__m256i *)(void *)(to + 32), _mm256_permute2x128_si256(a, b, 0x31));
}

/* Codes [k, k+n) of a row, all of one group. */
INLINE void decode_nibbles(const int dtype, const fmoe_coded *m, char *to, const uint8_t *codes, int64_t k, int64_t n,
                           const group *g)
{
    const __m256 t0 = scaled(g, _mm256_loadu_ps(m->table)), t1 = scaled(g, _mm256_loadu_ps(m->table + 8));
    float t[16];
    _mm256_storeu_ps(t, t0);
    _mm256_storeu_ps(t + 8, t1);
    const __m256i words =
        dtype == FMOE_F32
            ? _mm256_setzero_si256()
            : _mm256_permute4x64_epi64(_mm256_packus_epi32(to_16bit(dtype, t0), to_16bit(dtype, t1)), 0xd8);
    const __m256i lo = _mm256_and_si256(words, _mm256_set1_epi16(255)), high = _mm256_srli_epi16(words, 8);
    const __m256i lower = _mm256_permute4x64_epi64(_mm256_packus_epi16(lo, lo), 0x88),
                  upper = _mm256_permute4x64_epi64(_mm256_packus_epi16(high, high), 0x88);
    for (; n > 0 && (k & 1 || n < 32); n--, k++, to += bytes_of(dtype))
        put1(dtype, to, t[fmoe_nibble(codes, k, m->high_first)]);
    for (; n >= 32; n -= 32, k += 32, to += 32 * bytes_of(dtype)) {
        const __m256i index = m->high_first ? nibbles(true, codes + k / 2) : nibbles(false, codes + k / 2);
        if (dtype == FMOE_F32) lookup_floats(to, index, t0, t1);
        else lookup_words(to, index, lower, upper);
    }
    for (; n > 0; n--, k++, to += bytes_of(dtype)) put1(dtype, to, t[fmoe_nibble(codes, k, m->high_first)]);
}

/* ---- 8 bits ---- */

/* Eight codes. e4m3: exponent and mantissa in place, times 2^(127-7); as fmoe_e4m3_to_float. */
INLINE __m256 from_bytes(const int32_t code, const uint8_t *p)
{
    const __m128i b = _mm_loadl_epi64((const __m128i *)(const void *)p);
    if (code == FMOE_CODE_S8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b));
    const __m256i x = _mm256_cvtepu8_epi32(b), magnitude = _mm256_and_si256(x, _mm256_set1_epi32(0x7f));
    const __m256 v = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 20)), _mm256_set1_ps(0x1p120f));
    const __m256 nan = _mm256_castsi256_ps(_mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f)));
    const __m256i sign = _mm256_slli_epi32(_mm256_sub_epi32(x, magnitude), 24);
    const __m256 finite = _mm256_or_ps(v, _mm256_castsi256_ps(sign));
    return _mm256_blendv_ps(finite, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), nan);
}

INLINE void decode_bytes(const int dtype, const int32_t code, const fmoe_coded *m, char *to, const uint8_t *p,
                         int64_t n, const group *g, float scale, float zero)
{
    for (; n >= 16; n -= 16, p += 16, to += 16 * bytes_of(dtype))
        put16(dtype, to, scaled(g, from_bytes(code, p)), scaled(g, from_bytes(code, p + 8)));
    for (; n > 0; n--, p++, to += bytes_of(dtype)) {
        const float v = code == FMOE_CODE_S8 ? (float)(int8_t)*p : fmoe_e4m3_to_float(*p);
        put1(dtype, to, (v - zero) * scale * m->scale2);
    }
}

/* ---- rows ---- */

INLINE void decode_row(const int dtype, char *to, const fmoe_coded *m, int64_t row, int64_t k, int64_t n)
{
    const uint8_t *codes = m->codes + row * m->step;
    const int64_t group_row = fmoe_coded_group(m, row), last = k + n;
    int64_t column = k / m->group_cols, end = (column + 1) * m->group_cols;
    for (; k < last; column++, end += m->group_cols) {
        const int64_t length = fmoe_min(last, end) - k;
        const float scale = fmoe_coded_scale(m, group_row, column), zero = fmoe_coded_zero(m, group_row, column);
        const group g = {_mm256_set1_ps(scale), _mm256_set1_ps(m->scale2), _mm256_set1_ps(zero)};
        if (m->code == FMOE_CODE_S8) decode_bytes(dtype, FMOE_CODE_S8, m, to, codes + k, length, &g, scale, zero);
        else if (m->code == FMOE_CODE_E4M3)
            decode_bytes(dtype, FMOE_CODE_E4M3, m, to, codes + k, length, &g, scale, zero);
        else decode_nibbles(dtype, m, to, codes, k, length, &g);
        to += length * bytes_of(dtype);
        k += length;
    }
}

void NAME(fmoe_dequant)(void *dst, int64_t apart, int dtype, const fmoe_coded *m, int64_t row, int64_t rows, int64_t k0,
                        int64_t n)
{
    for (int64_t i = 0; i < rows; i++) {
        char *to = (char *)dst + i * apart;
        if (dtype == FMOE_BF16) decode_row(FMOE_BF16, to, m, row + i, k0, n);
        else if (dtype == FMOE_F16) decode_row(FMOE_F16, to, m, row + i, k0, n);
        else decode_row(FMOE_F32, to, m, row + i, k0, n);
    }
}
