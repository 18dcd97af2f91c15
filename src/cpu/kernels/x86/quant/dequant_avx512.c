/* SPDX-License-Identifier: Apache-2.0
 *
 * dequant_avx512.c - quantised weights to the plan's dtype (kernels.h: dequant). 4 bits: the sixteen weights of a group
 * are scaled and rounded once, and codes are looked up in registers, 32 with four instructions. 8 bits: converted,
 * scaled and rounded sixteen at a time. Compiled for both levels; that of avx512_bf16 rounds with its instruction where
 * nothing is denormal, which it would flush. */
#include <immintrin.h>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/load.h"

#define INLINE static inline __attribute__((always_inline))

/* To nearest even, as fmoe_float_to_bf16. */
static inline __m256i to_bf16(__m512 v)
{
    const __m512i u = _mm512_castps_si512(v), one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), one);
    const __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i bits = _mm512_mask_or_epi32(rounded, nan, u, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
}

/* regular: neither denormal nor NaN. */
INLINE __m256i to_16bit(const int dtype, const bool regular, __m512 v)
{
#ifdef __AVX512BF16__
    if (dtype == FMOE_BF16 && regular) return (__m256i)_mm512_cvtneps_pbh(v);
#endif
    (void)regular;
    return dtype == FMOE_BF16 ? to_bf16(v) : _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* Sixteen weights, or the first n of them. */
INLINE void put(const int dtype, const bool regular, char *dst, int64_t n, __m512 v)
{
    const __mmask16 m = (__mmask16)(n >= 16 ? 0xffffu : (1u << n) - 1u);
    if (dtype == FMOE_F32) _mm512_mask_storeu_ps(dst, m, v);
    else if (n >= 16) _mm256_storeu_si256((__m256i *)(void *)dst, to_16bit(dtype, regular, v)); /* masked, it is slow */
    else _mm256_mask_storeu_epi16(dst, m, to_16bit(dtype, regular, v));
}

/* Of 16 bytes of codes the indices of 32 words. Of an index only the lowest bits are looked at: five of a word, for
 * which a table is there twice, and four of f32. */
INLINE __m512i indices(const bool high_first, __m128i codes)
{
    const __m512i x = _mm512_cvtepu8_epi32(codes);
    return high_first ? _mm512_or_si512(_mm512_srli_epi32(x, 4), _mm512_slli_epi32(x, 16))
                      : _mm512_or_si512(x, _mm512_slli_epi32(x, 12));
}

/* n codes of a group from p on, by its weights t. */
INLINE void lookup_nibbles(const int dtype, const bool high_first, const bool regular, char *dst, const uint8_t *p,
                           int64_t n, __m512 t)
{
    const __m512i words =
        _mm512_broadcast_i64x4(dtype == FMOE_F32 ? _mm256_setzero_si256() : to_16bit(dtype, regular, t));
    for (; n >= 32 && dtype != FMOE_F32; n -= 32, p += 16, dst += 64)
        _mm512_storeu_si512(dst, _mm512_permutexvar_epi16(
                                     indices(high_first, _mm_loadu_si128((const __m128i *)(const void *)p)), words));
    for (; n > 0; n -= 32, p += 16, dst += 32 * bytes_of(dtype)) {
        const __mmask16 bytes = (__mmask16)(n >= 32 ? 0xffffu : (1u << (n + 1) / 2) - 1u);
        const __m512i index = indices(high_first, _mm_maskz_loadu_epi8(bytes, p));
        const __mmask32 m = n >= 32 ? 0xffffffffu : (1u << n) - 1u;
        if (dtype != FMOE_F32) {
            _mm512_mask_storeu_epi16(dst, m, _mm512_permutexvar_epi16(index, words));
            continue;
        }
        const __m512i lower = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(index)),
                      upper = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(index, 1));
        _mm512_mask_storeu_ps(dst, (__mmask16)m, _mm512_permutexvar_ps(lower, t));
        _mm512_mask_storeu_ps(dst + 64, (__mmask16)(m >> 16), _mm512_permutexvar_ps(upper, t));
    }
}

/* float8_e4m3fn: as fmoe_e4m3_to_float, by way of f16, whose exponent is one bit longer: the conversion of denormals
 * costs nothing there. */
static inline __m512 from_e4m3(__m128i b)
{
    const __m256i x = _mm256_cvtepi8_epi16(b);
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16((short)0xbfff));
    const __m512 v = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(0x1p8f));
    const __mmask16 nan =
        _mm256_cmpeq_epi16_mask(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), _mm256_set1_epi16(0x7f));
    return _mm512_mask_mov_ps(v, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
}

/* What one group's codes are decoded by. */
typedef struct group_scale {
    __m512 scale, zero, scale2;
    bool plain; /* scale2 is 1 */
} group_scale;

INLINE __m512 scaled(const group_scale *g, __m512 v)
{
    const __m512 once = _mm512_mul_ps(v, g->scale);
    return g->plain ? once : _mm512_mul_ps(once, g->scale2);
}

INLINE __m512 value_of(const int32_t code, const group_scale *g, __m128i b)
{
    return code == FMOE_CODE_S8 ? _mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b)), g->zero) : from_e4m3(b);
}

INLINE void convert_bytes(const int dtype, const int32_t code, const bool regular, char *dst, const uint8_t *p,
                          int64_t n, const group_scale *g)
{
    for (; n >= 16; n -= 16, p += 16, dst += 16 * bytes_of(dtype))
        put(dtype, regular, dst, 16, scaled(g, value_of(code, g, _mm_loadu_si128((const __m128i *)(const void *)p))));
    if (n > 0)
        put(dtype, regular, dst, n, scaled(g, value_of(code, g, _mm_maskz_loadu_epi8((__mmask16)((1u << n) - 1u), p))));
}

/* n codes of a group, from code k on. */
INLINE void decode_group(const int dtype, const int32_t code, const bool regular, char *to, const fmoe_coded *m,
                         const uint8_t *codes, int64_t k, int64_t n, const group_scale *g, __m512 table)
{
    if (code == FMOE_CODE_S8 || code == FMOE_CODE_E4M3) {
        convert_bytes(dtype, code, regular, to, codes + k, n, g);
        return;
    }
    const __m512 t = scaled(g, _mm512_sub_ps(table, g->zero));
    if (k & 1) { /* groups of an odd size: one code alone, so that the others begin with a byte */
        put(dtype, false, to, 1, _mm512_permutexvar_ps(_mm512_set1_epi32(fmoe_nibble(codes, k, m->high_first)), t));
        to += bytes_of(dtype);
        k++;
        n--;
    }
    if (m->high_first) lookup_nibbles(dtype, true, regular, to, codes + k / 2, n, t);
    else lookup_nibbles(dtype, false, regular, to, codes + k / 2, n, t);
}

INLINE void decode_row(const int dtype, const int32_t code, char *to, const fmoe_coded *m, int64_t row, int64_t k,
                       int64_t n)
{
    const uint8_t *codes = m->codes + row * m->step;
    const int64_t group_row = fmoe_coded_group(m, row), last = k + n;
    int64_t group = k / m->group_cols, end = (group + 1) * m->group_cols;
    const __m512 table = m->table ? _mm512_loadu_ps(m->table) : _mm512_setzero_ps();
    group_scale g = {.zero = _mm512_set1_ps(m->zero), .scale2 = _mm512_set1_ps(m->scale2), .plain = m->scale2 == 1};
    for (; k < last; group++, end += m->group_cols) {
        const int64_t length = fmoe_min(last, end) - k;
        const float s = fmoe_coded_scale(m, group_row, group), a = s < 0 ? -s : s;
        g.scale = _mm512_set1_ps(s);
        if (m->zeros) g.zero = _mm512_set1_ps(fmoe_coded_zero(m, group_row, group));
        if (m->regular && a > 0x1p-60f && a < 0x1p60f)
            decode_group(dtype, code, true, to, m, codes, k, length, &g, table);
        else decode_group(dtype, code, false, to, m, codes, k, length, &g, table);
        to += length * bytes_of(dtype);
        k += length;
    }
}

#ifdef __AVX512BF16__
#include "cpu/kernels/x86/quant/dequant_pairs_avx512.h"
#endif

INLINE void decode_code(const int dtype, char *to, const fmoe_coded *m, int64_t row, int64_t k0, int64_t n)
{
    if (m->code == FMOE_CODE_S8) decode_row(dtype, FMOE_CODE_S8, to, m, row, k0, n);
    else if (m->code == FMOE_CODE_E4M3) decode_row(dtype, FMOE_CODE_E4M3, to, m, row, k0, n);
    else decode_row(dtype, FMOE_CODE_LUT4, to, m, row, k0, n);
}

void NAME(fmoe_dequant)(void *dst, int64_t apart, int dtype, const fmoe_coded *m, int64_t row, int64_t rows, int64_t k0,
                        int64_t n)
{
#ifdef __AVX512BF16__
    if (dtype == FMOE_BF16 && are_pairs(m, k0, n)) {
        if (m->scale2 == 1) decode_pairs_of(true, dst, apart, m, row, rows, k0, n);
        else decode_pairs_of(false, dst, apart, m, row, rows, k0, n);
        return;
    }
#endif
    for (int64_t i = 0; i < rows; i++) {
        char *to = (char *)dst + i * apart;
        if (dtype == FMOE_BF16) decode_code(FMOE_BF16, to, m, row + i, k0, n);
        else if (dtype == FMOE_F16) decode_code(FMOE_F16, to, m, row + i, k0, n);
        else decode_code(FMOE_F32, to, m, row + i, k0, n);
    }
}
