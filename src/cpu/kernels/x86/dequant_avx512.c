/* SPDX-License-Identifier: Apache-2.0
 *
 * dequant_avx512.c - quantised weights to the plan's dtype (kernels.h: dequant). 4 bits: the sixteen weights of a group
 * are scaled and rounded once, and codes are looked up in registers, 32 with four instructions. 8 bits: converted,
 * scaled and rounded sixteen at a time. */
#include <immintrin.h>

#include "cpu/kernels/kernels.h"

/* To nearest even, as fmoe_float_to_bf16: also denormals, which the instruction of avx512_bf16 flushes. */
static inline __m256i to_bf16(__m512 v)
{
    const __m512i u = _mm512_castps_si512(v), one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), one);
    const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i bits = _mm512_mask_or_epi32(rounded, nan, u, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
}

static inline __m256i to_16bit(int dtype, __m512 v)
{
    return dtype == FMOE_BF16 ? to_bf16(v) : _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline void put(void *dst, int dtype, __mmask16 m, __m512 v)
{
    if (dtype == FMOE_F32) _mm512_mask_storeu_ps(dst, m, v);
    else _mm256_mask_storeu_epi16(dst, m, to_16bit(dtype, v));
}

/* Codes [begin, end) of a row, begin even, by the weights t of their group. Of an index only the lowest bits are looked
 * at: five of a word, so the table is there twice, and four of f32. */
static void lookup_nibbles(char *dst, int dtype, const uint8_t *row, bool high_first, int64_t begin, int64_t end, __m512 t)
{
    const __m512i words = _mm512_broadcast_i64x4(dtype == FMOE_F32 ? _mm256_setzero_si256() : to_16bit(dtype, t));
    for (int64_t k = begin; k < end; k += 32) {
        const int64_t n = fmoe_min(32, end - k);
        const __mmask16 bytes = (__mmask16)((1u << (n + 1) / 2) - 1u);
        const __m512i x = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(bytes, row + k / 2));
        const __m512i index = high_first ? _mm512_or_si512(_mm512_srli_epi32(x, 4), _mm512_slli_epi32(x, 16))
                                         : _mm512_or_si512(x, _mm512_slli_epi32(x, 12));
        const __mmask32 m = n == 32 ? 0xffffffffu : (1u << n) - 1u;
        if (dtype != FMOE_F32) {
            _mm512_mask_storeu_epi16(dst + (k - begin) * 2, m, _mm512_permutexvar_epi16(index, words));
            continue;
        }
        const __m512i lower = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(index)),
                      upper = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(index, 1));
        _mm512_mask_storeu_ps(dst + (k - begin) * 4, (__mmask16)m, _mm512_permutexvar_ps(lower, t));
        _mm512_mask_storeu_ps(dst + (k - begin) * 4 + 64, (__mmask16)(m >> 16), _mm512_permutexvar_ps(upper, t));
    }
}

/* float8_e4m3fn: as fmoe_e4m3_to_float. */
static inline __m512 from_e4m3(__m128i b)
{
    const __m512i x = _mm512_cvtepu8_epi32(b), magnitude = _mm512_and_si512(x, _mm512_set1_epi32(0x7f));
    const __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(magnitude, 20)), _mm512_set1_ps(0x1p120f));
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
    const __m512i bits = _mm512_mask_mov_epi32(_mm512_castps_si512(value), nan, _mm512_set1_epi32(0x7fc00000));
    const __m512i sign = _mm512_slli_epi32(_mm512_xor_si512(x, magnitude), 24);
    return _mm512_castsi512_ps(_mm512_or_si512(bits, sign));
}

static void convert_bytes(char *dst, int dtype, int32_t code, const uint8_t *row, int64_t n, __m512 zero, __m512 scale, __m512 scale2)
{
    const int64_t element = (int64_t)fmoe_dtype_size(dtype);
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 m = (__mmask16)(n - i >= 16 ? 0xffffu : (1u << (n - i)) - 1u);
        const __m128i b = _mm_maskz_loadu_epi8(m, row + i);
        const __m512 v = code == FMOE_CODE_S8 ? _mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b)), zero)
                                              : from_e4m3(b);
        put(dst + i * element, dtype, m, _mm512_mul_ps(_mm512_mul_ps(v, scale), scale2));
    }
}

void fmoe_dequant_avx512(void *dst, int dtype, const fmoe_coded *m, int64_t row, int64_t k0, int64_t n)
{
    const uint8_t *codes = m->codes + row * m->step;
    const int64_t group_row = fmoe_coded_group(m, row), element = (int64_t)fmoe_dtype_size(dtype);
    const __m512 table = m->table ? _mm512_loadu_ps(m->table) : _mm512_setzero_ps(), scale2 = _mm512_set1_ps(m->scale2);
    char *to = dst;
    for (int64_t k = k0, end; k < k0 + n; to += (end - k) * element, k = end) {
        const int64_t group = k / m->group_cols;
        end = fmoe_min(k0 + n, (group + 1) * m->group_cols);
        const __m512 scale = _mm512_set1_ps(fmoe_coded_scale(m, group_row, group)),
                     zero = _mm512_set1_ps(fmoe_coded_zero(m, group_row, group));
        if (!m->table) {
            convert_bytes(to, dtype, m->code, codes + k, end - k, zero, scale, scale2);
            continue;
        }
        if (k & 1) { /* groups of an odd size: one code alone, so that the others begin with a byte */
            const float one = (m->table[fmoe_nibble(codes, k, m->high_first)] - _mm512_cvtss_f32(zero)) *
                              _mm512_cvtss_f32(scale) * m->scale2;
            put(to, dtype, 1, _mm512_set1_ps(one));
            end = k + 1;
            continue;
        }
        const __m512 t = _mm512_mul_ps(_mm512_mul_ps(_mm512_sub_ps(table, zero), scale), scale2);
        lookup_nibbles(to, dtype, codes, m->high_first, k, end, t);
    }
}
