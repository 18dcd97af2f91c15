/* SPDX-License-Identifier: Apache-2.0
 *
 * dequant_avx2.c - quantised weights to the plan's dtype (kernels.h: dequant) on AVX2. 4 bits: the sixteen weights of a
 * group are scaled and rounded once. Of 16 bits they are two tables of bytes, the lower and the upper ones, in which
 * vpshufb looks up 32 codes; of f32 two registers, of which vpermps takes. float8_e4m3fn to bf16 is looked up too, see
 * lookup_e4m3. Other bytes are converted, scaled and rounded eight at a time. What is left of a group, and a first code
 * in the middle of a byte, one by one. */
#include <immintrin.h>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/load.h"

#define INLINE static inline __attribute__((always_inline))

/* What the codes of a group are decoded by. */
typedef struct group {
    float scale, zero, scale2;
    bool plain; /* scale2 is 1 */
} group;

INLINE __m256 scaled(const group *g, __m256 from_zero)
{
    const __m256 once = _mm256_mul_ps(from_zero, _mm256_set1_ps(g->scale));
    return g->plain ? once : _mm256_mul_ps(once, _mm256_set1_ps(g->scale2));
}

/* ---- stores ---- */

/* Eight numbers to the nearest of 16 bits, in the upper halves of dwords; the lower ones are of no account. bf16 as
 * fmoe_float_to_bf16. regular: none is a NaN. */
INLINE __m256i to_16bit(const int dtype, const bool regular, __m256 v)
{
    if (dtype == FMOE_F16)
        return _mm256_slli_epi32(
            _mm256_cvtepu16_epi32(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)), 16);
    const __m256i u = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    if (regular) return rounded;
    const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q),
                 quiet = _mm256_castsi256_ps(_mm256_or_si256(u, _mm256_set1_epi32(0x400000)));
    return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), quiet, nan));
}

/* Sixteen numbers. */
INLINE void put16(const int dtype, const bool regular, char *to, __m256 a, __m256 b)
{
    if (dtype == FMOE_F32) {
        _mm256_storeu_ps((float *)(void *)to, a);
        _mm256_storeu_ps((float *)(void *)(to + 32), b);
        return;
    }
    const __m256i x = _mm256_srli_epi32(to_16bit(dtype, regular, a), 16),
                  y = _mm256_srli_epi32(to_16bit(dtype, regular, b), 16);
    _mm256_storeu_si256((__m256i *)(void *)to, _mm256_permute4x64_epi64(_mm256_packus_epi32(x, y), 0xd8));
}

INLINE void put1(const int dtype, char *to, float v)
{
    if (dtype == FMOE_F32) *(float *)(void *)to = v;
    else *(uint16_t *)(void *)to = dtype == FMOE_BF16 ? fmoe_float_to_bf16(v) : fmoe_float_to_f16(v);
}

/* ---- tables ---- */

/* The lower and the upper bytes of sixteen weights, both twice. */
typedef struct tables {
    __m256i lower, upper;
} tables;

INLINE tables tables_of(const int dtype, const bool regular, __m256 a, __m256 b)
{
    const __m256i take_a = _mm256_broadcastsi128_si256(
                      _mm_setr_epi8(2, 6, 10, 14, 3, 7, 11, 15, -1, -1, -1, -1, -1, -1, -1, -1)),
                  take_b = _mm256_broadcastsi128_si256(
                      _mm_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m256i x = _mm256_shuffle_epi8(to_16bit(dtype, regular, a), take_a),
                  y = _mm256_shuffle_epi8(to_16bit(dtype, regular, b), take_b), fours = _mm256_or_si256(x, y);
    const __m256i lower = _mm256_setr_epi32(0, 4, 2, 6, 0, 4, 2, 6), upper = _mm256_setr_epi32(1, 5, 3, 7, 1, 5, 3, 7);
    return (tables){_mm256_permutevar8x32_epi32(fours, lower), _mm256_permutevar8x32_epi32(fours, upper)};
}

/* ---- 4 bits ---- */

/* Codes as indices, in the order of k: of 16 bytes 32, of 8 bytes 16 and others. */
INLINE __m256i nibbles(const bool high_first, __m128i codes)
{
    const __m128i nibble = _mm_set1_epi8(15);
    const __m128i lo = _mm_and_si128(codes, nibble), high = _mm_and_si128(_mm_srli_epi16(codes, 4), nibble);
    const __m128i even = high_first ? high : lo, odd = high_first ? lo : high;
    return _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
}

INLINE __m256i nibbles_at(const bool high_first, const uint8_t *p, bool half)
{
    const __m128i *const at = (const __m128i *)(const void *)p;
    return nibbles(high_first, half ? _mm_loadl_epi64(at) : _mm_loadu_si128(at));
}

/* Sixteen codes. */
INLINE void lookup_floats(char *to, __m128i index, __m256 t0, __m256 t1)
{
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const __m256i x = _mm256_cvtepu8_epi32(i ? _mm_srli_si128(index, 8) : index);
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(x, 28)); /* bit 3 as a sign */
        _mm256_storeu_ps((float *)(void *)(to + 32 * i),
                         _mm256_blendv_ps(_mm256_permutevar8x32_ps(t0, x), _mm256_permutevar8x32_ps(t1, x), upper));
    }
}

/* 32 codes, or the first 16. */
INLINE void lookup_words(char *to, __m256i index, const tables *t, bool half)
{
    const __m256i lo = _mm256_shuffle_epi8(t->lower, index), high = _mm256_shuffle_epi8(t->upper, index);
    const __m256i a = _mm256_unpacklo_epi8(lo, high), b = _mm256_unpackhi_epi8(lo, high);
    _mm256_storeu_si256((__m256i *)(void *)to, _mm256_permute2x128_si256(a, b, 0x20));
    if (!half) _mm256_storeu_si256((__m256i *)(void *)(to + 32), _mm256_permute2x128_si256(a, b, 0x31));
}

/* n codes from the beginning of a byte on, as many sixteens as there are. */
INLINE void lookup_nibbles(const int dtype, const bool regular, const bool high_first, char *to, const uint8_t *p,
                           int64_t n, __m256 t0, __m256 t1)
{
    if (dtype == FMOE_F32) {
        for (; n >= 32; n -= 32, p += 16, to += 128) {
            const __m256i index = nibbles_at(high_first, p, false);
            lookup_floats(to, _mm256_castsi256_si128(index), t0, t1);
            lookup_floats(to + 64, _mm256_extracti128_si256(index, 1), t0, t1);
        }
        if (n >= 16) lookup_floats(to, _mm256_castsi256_si128(nibbles_at(high_first, p, true)), t0, t1);
        return;
    }
    const tables t = tables_of(dtype, regular, t0, t1);
    for (; n >= 32; n -= 32, p += 16, to += 64) lookup_words(to, nibbles_at(high_first, p, false), &t, false);
    if (n >= 16) lookup_words(to, nibbles_at(high_first, p, true), &t, true);
}

/* Codes [k, k+n) of a row, all of one group; t0, t1: the sixteen values, less the zero. */
INLINE void decode_nibbles(const int dtype, const bool regular, const fmoe_coded *m, char *to, const uint8_t *codes,
                           int64_t k, int64_t n, const group *g, __m256 t0, __m256 t1)
{
    const __m256 w0 = scaled(g, t0), w1 = scaled(g, t1);
    float singly[16];
    if (k & 1 || n % 16) {
        _mm256_storeu_ps(singly, w0);
        _mm256_storeu_ps(singly + 8, w1);
    }
    if (k & 1) {
        put1(dtype, to, singly[fmoe_nibble(codes, k, m->high_first)]);
        to += bytes_of(dtype), k++, n--;
    }
    if (m->high_first) lookup_nibbles(dtype, regular, true, to, codes + k / 2, n, w0, w1);
    else lookup_nibbles(dtype, regular, false, to, codes + k / 2, n, w0, w1);
    const int64_t whole = n & ~INT64_C(15);
    to += whole * bytes_of(dtype);
    for (int64_t i = whole; i < n; i++, to += bytes_of(dtype))
        put1(dtype, to, singly[fmoe_nibble(codes, k + i, m->high_first)]);
}

/* ---- 8 bits ---- */

/* Eight float8_e4m3fn by way of f16, whose exponent is one bit longer: the conversion of denormals costs nothing there.
 * As fmoe_e4m3_to_float. */
INLINE __m256 from_e4m3(__m128i b)
{
    const __m128i x = _mm_cvtepi8_epi16(b), most = _mm_set1_epi16(0x7f);
    const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(x, most), most);
    const __m128i half = _mm_and_si128(_mm_slli_epi16(x, 7), _mm_set1_epi16((short)0xbfff));
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(half, nan)), _mm256_set1_ps(0x1p8f));
}

INLINE __m256 from_s8(__m128i b) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)); }

/* 32 codes of e4m3 to bf16 by a regular group: those below 16 by a table; above, a weight is that of the same three
 * bits of mantissa among 8 to 15, as scaling and rounding do not see a power of two, and the exponent is added. */
INLINE void lookup_e4m3(char *to, const uint8_t *p, const tables *t)
{
    const __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)p), most = _mm256_set1_epi8(0x7f);
    const __m256i magnitude = _mm256_and_si256(x, most), sign = _mm256_andnot_si256(most, x);
    const __m256i mantissa = _mm256_or_si256(_mm256_and_si256(x, _mm256_set1_epi8(7)), _mm256_set1_epi8(8));
    const __m256i index = _mm256_min_epu8(magnitude, mantissa), nan = _mm256_cmpeq_epi8(magnitude, most);
    const __m256i exponent = _mm256_andnot_si256(nan, _mm256_sub_epi8(magnitude, index)); /* in eighths */
    const __m256i lo = _mm256_or_si256(_mm256_shuffle_epi8(t->lower, index), nan);
    const __m256i high = _mm256_xor_si256(_mm256_or_si256(_mm256_shuffle_epi8(t->upper, index), nan), sign);
    const __m256i none = _mm256_setzero_si256();
    const __m256i a = _mm256_add_epi16(_mm256_unpacklo_epi8(lo, high),
                                       _mm256_slli_epi16(_mm256_unpacklo_epi8(exponent, none), 4)),
                  b = _mm256_add_epi16(_mm256_unpackhi_epi8(lo, high),
                                       _mm256_slli_epi16(_mm256_unpackhi_epi8(exponent, none), 4));
    _mm256_storeu_si256((__m256i *)(void *)to, _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_storeu_si256((__m256i *)(void *)(to + 32), _mm256_permute2x128_si256(a, b, 0x31));
}

/* n codes of a group from p on. The zero of e4m3 is 0. */
INLINE void decode_bytes(const int dtype, const bool regular, const int32_t code, char *to, const uint8_t *p, int64_t n,
                         const group *g)
{
    if (code == FMOE_CODE_E4M3 && dtype == FMOE_BF16 && regular && n >= 32) {
        const float *const values = fmoe_e4m3_magnitudes();
        const tables t =
            tables_of(dtype, true, scaled(g, _mm256_loadu_ps(values)), scaled(g, _mm256_loadu_ps(values + 8)));
        for (; n >= 32; n -= 32, p += 32, to += 64) lookup_e4m3(to, p, &t);
    }
    const __m256 zero = _mm256_set1_ps(g->zero);
    for (; n >= 16; n -= 16, p += 16, to += 16 * bytes_of(dtype)) {
        const __m128i x = _mm_loadu_si128((const __m128i *)(const void *)p), y = _mm_srli_si128(x, 8);
        if (code == FMOE_CODE_E4M3) put16(dtype, false, to, scaled(g, from_e4m3(x)), scaled(g, from_e4m3(y)));
        else
            put16(dtype, regular, to, scaled(g, _mm256_sub_ps(from_s8(x), zero)),
                  scaled(g, _mm256_sub_ps(from_s8(y), zero)));
    }
    for (; n > 0; n--, p++, to += bytes_of(dtype)) {
        const float v = code == FMOE_CODE_S8 ? (float)(int8_t)*p : fmoe_e4m3_to_float(*p);
        put1(dtype, to, (v - g->zero) * g->scale * g->scale2);
    }
}

/* ---- rows ---- */

INLINE void decode_row(const int dtype, const int32_t code, char *to, const fmoe_coded *m, int64_t row, int64_t k,
                       int64_t n)
{
    const uint8_t *codes = m->codes + row * m->step;
    const int64_t group_row = fmoe_coded_group(m, row), last = k + n;
    const bool four = code == FMOE_CODE_LUT4;
    int64_t column = k / m->group_cols, end = (column + 1) * m->group_cols;
    group g = {.zero = m->zero, .scale2 = m->scale2, .plain = m->scale2 == 1};
    const __m256 v0 = four ? _mm256_loadu_ps(m->table) : _mm256_setzero_ps(),
                 v1 = four ? _mm256_loadu_ps(m->table + 8) : _mm256_setzero_ps();
    __m256 t0 = _mm256_sub_ps(v0, _mm256_set1_ps(m->zero)), t1 = _mm256_sub_ps(v1, _mm256_set1_ps(m->zero));
    for (; k < last; column++, end += m->group_cols) {
        const int64_t length = fmoe_min(last, end) - k;
        g.scale = fmoe_coded_scale(m, group_row, column);
        const float size = g.scale < 0 ? -g.scale : g.scale;
        if (m->zeros) {
            g.zero = fmoe_coded_zero(m, group_row, column);
            t0 = _mm256_sub_ps(v0, _mm256_set1_ps(g.zero));
            t1 = _mm256_sub_ps(v1, _mm256_set1_ps(g.zero));
        }
        const bool regular = dtype == FMOE_BF16 && m->regular && size > 0x1p-60f && size < 0x1p60f;
        if (four && regular) decode_nibbles(dtype, true, m, to, codes, k, length, &g, t0, t1);
        else if (four) decode_nibbles(dtype, false, m, to, codes, k, length, &g, t0, t1);
        else if (regular) decode_bytes(dtype, true, code, to, codes + k, length, &g);
        else decode_bytes(dtype, false, code, to, codes + k, length, &g);
        to += length * bytes_of(dtype);
        k += length;
    }
}

INLINE void decode_code(const int dtype, char *to, const fmoe_coded *m, int64_t row, int64_t k0, int64_t n)
{
    if (m->code == FMOE_CODE_S8) decode_row(dtype, FMOE_CODE_S8, to, m, row, k0, n);
    else if (m->code == FMOE_CODE_E4M3) decode_row(dtype, FMOE_CODE_E4M3, to, m, row, k0, n);
    else decode_row(dtype, FMOE_CODE_LUT4, to, m, row, k0, n);
}

void NAME(fmoe_dequant)(void *dst, int64_t apart, int dtype, const fmoe_coded *m, int64_t row, int64_t rows, int64_t k0,
                        int64_t n)
{
    for (int64_t i = 0; i < rows; i++) {
        char *to = (char *)dst + i * apart;
        if (dtype == FMOE_BF16) decode_code(FMOE_BF16, to, m, row + i, k0, n);
        else if (dtype == FMOE_F16) decode_code(FMOE_F16, to, m, row + i, k0, n);
        else decode_code(FMOE_F32, to, m, row + i, k0, n);
    }
}
