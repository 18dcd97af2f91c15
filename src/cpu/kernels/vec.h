/* SPDX-License-Identifier: Apache-2.0
 *
 * vec.h - floats of one register, as wide as the level that a file is compiled for, and two of them as they come from
 * memory and go there in any storage type. Arithmetic and shifts are the compiler's own on vector types (multiply-adds
 * by contraction); written out is what compilers do not find by themselves. */
#ifndef FMOE_CPU_VEC_H
#define FMOE_CPU_VEC_H

#include "cpu/kernels/load.h"

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
enum { STEP = 2 * LANES }; /* values at a time: 16 bits of each are a register */

#if defined(FMOE_SANITIZED) /* checks inlined everywhere take ten times as long to compile */
#define INLINE static inline
#else
#define INLINE static inline __attribute__((always_inline))
#endif
typedef float vec __attribute__((vector_size(LANES * 4)));
typedef uint32_t bits __attribute__((vector_size(LANES * 4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4)));
typedef struct vec2 { /* gcc 9 initializes it with vec alone: what intrinsics return is cast */
    vec v[2];
} vec2;

INLINE vec splat(float x) { return x - (vec){0}; }
INLINE vec absolute(vec x) { return (vec)((bits)x & 0x7fffffffu); }
INLINE vec choose(ints mask, vec yes, vec no) { return (vec)(((ints)yes & mask) | ((ints)no & ~mask)); }
INLINE vec above(vec x, float limit, vec yes, vec no) { return choose(x > limit, yes, no); }

INLINE vec load(const void *p)
{
    vec x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* Of each level: at_most, at_least (NaN stays), the sum of the lanes, put (to memory, or nontemporally to whole lines),
 * bf16_rounded (in the upper halves), and conversions between two vectors and one of 16-bit numbers; all to nearest
 * even, and NaN stays. */
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
INLINE vec at_most(vec x, float top) { return _mm512_min_ps(_mm512_set1_ps(top), x); }
INLINE vec at_least(vec x, float bottom) { return _mm512_max_ps(_mm512_set1_ps(bottom), x); }
INLINE float sum_of(vec x) { return _mm512_reduce_add_ps(x); }
INLINE void put(void *p, vec x, const bool nontemporal)
{
    if (nontemporal) _mm512_stream_ps(p, x);
    else _mm512_storeu_ps(p, x);
}

INLINE vec2 f16_widen(vec x)
{
    const __m512i h = (__m512i)x;
    return (vec2){
        {(vec)_mm512_cvtph_ps(_mm512_castsi512_si256(h)), (vec)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(h, 1))}};
}
INLINE vec f16_of(vec2 x)
{
    const __m512i lower = _mm512_castsi256_si512(_mm512_cvtps_ph(x.v[0], NEAREST));
    return (vec)_mm512_inserti64x4(lower, _mm512_cvtps_ph(x.v[1], NEAREST), 1);
}

/* Sixteen of 32 numbers to the upper halves of 32 bits in one shuffle. */
INLINE vec2 bf16_widen(vec x)
{
    const __m512i at = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0, 7, 0, 6, 0, 5, 0, 4, 0, 3,
                                        0, 2, 0, 1, 0, 0, 0);
    const __m512i upper = _mm512_add_epi16(at, _mm512_set1_epi16(16));
    return (vec2){{(vec)_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, at, (__m512i)x),
                   (vec)_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, upper, (__m512i)x)}};
}
INLINE bits bf16_rounded(vec x)
{
    const bits u = (bits)x, rounded = u + (((u >> 16) & 1u) + 0x7fffu);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return (bits)_mm512_mask_or_epi32((__m512i)rounded, nan, (__m512i)u, _mm512_set1_epi32(0x400000));
}
#if defined(__AVX512BF16__) /* denormals become zeros, which is what the products of this level take them for */
INLINE vec bf16_of(vec2 x) { return (vec)_mm512_cvtne2ps_pbh(x.v[1], x.v[0]); }
#else
INLINE vec bf16_of(vec2 x)
{
    const __m512i at = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                        23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return (vec)_mm512_permutex2var_epi16((__m512i)bf16_rounded(x.v[0]), at, (__m512i)bf16_rounded(x.v[1]));
}
#endif

#else
INLINE bits bf16_rounded(vec x)
{
    const bits u = (bits)x, rounded = u + (((u >> 16) & 1u) + 0x7fffu);
    return (bits)choose(x == x, (vec)rounded, (vec)(u | 0x400000u));
}
INLINE float sum_of(vec x)
{
    float part[LANES];
    memcpy(part, &x, sizeof part);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int j = 0; j < half; j++) part[j] += part[j + half];
    return part[0];
}
#if defined(__AVX2__)
INLINE vec at_most(vec x, float top) { return _mm256_min_ps(_mm256_set1_ps(top), x); }
INLINE vec at_least(vec x, float bottom) { return _mm256_max_ps(_mm256_set1_ps(bottom), x); }
INLINE void put(void *p, vec x, const bool nontemporal)
{
    if (nontemporal) _mm256_stream_ps(p, x);
    else _mm256_storeu_ps(p, x);
}
INLINE vec2 f16_widen(vec x)
{
    const __m256i h = (__m256i)x;
    return (vec2){
        {(vec)_mm256_cvtph_ps(_mm256_castsi256_si128(h)), (vec)_mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))}};
}
INLINE vec f16_of(vec2 x)
{
    return (vec)_mm256_setr_m128i(_mm256_cvtps_ph(x.v[0], NEAREST), _mm256_cvtps_ph(x.v[1], NEAREST));
}
INLINE vec2 bf16_widen(vec x) /* what follows works on lanes of 128 bits */
{
    const __m256i h = _mm256_permute4x64_epi64((__m256i)x, 0xd8), zero = _mm256_setzero_si256();
    return (vec2){{(vec)_mm256_unpacklo_epi16(zero, h), (vec)_mm256_unpackhi_epi16(zero, h)}};
}
INLINE vec bf16_of(vec2 x)
{
    const __m256i a = (__m256i)(bf16_rounded(x.v[0]) >> 16), b = (__m256i)(bf16_rounded(x.v[1]) >> 16);
    return (vec)_mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
}
#else
typedef uint16_t shorts __attribute__((vector_size(LANES * 2)));
typedef struct shorts2 {
    shorts s[2];
} shorts2;
INLINE vec at_most(vec x, float top) { return above(x, top, splat(top), x); }
INLINE vec at_least(vec x, float bottom) { return choose(x < bottom, splat(bottom), x); }
INLINE void put(void *p, vec x, const bool nontemporal)
{
    (void)nontemporal;
    memcpy(p, &x, sizeof x);
}
INLINE vec2 bf16_widen(vec x)
{
    shorts2 h;
    memcpy(&h, &x, sizeof h);
    const bits a = __builtin_convertvector(h.s[0], bits), b = __builtin_convertvector(h.s[1], bits);
    return (vec2){{(vec)(a << 16), (vec)(b << 16)}};
}
INLINE vec bf16_of(vec2 x)
{
    const shorts2 h = {{__builtin_convertvector(bf16_rounded(x.v[0]) >> 16, shorts),
                        __builtin_convertvector(bf16_rounded(x.v[1]) >> 16, shorts)}};
    return load(&h);
}
#if defined(__aarch64__)
INLINE vec2 f16_widen(vec x)
{
    const float16x8_t h = (float16x8_t)x;
    return (vec2){{(vec)vcvt_f32_f16(vget_low_f16(h)), (vec)vcvt_high_f32_f16(h)}};
}
INLINE vec f16_of(vec2 x) { return (vec)vcvt_high_f16_f32(vcvt_f16_f32(x.v[0]), x.v[1]); }
#else
static __attribute__((noinline, unused)) vec2 f16_widen(vec x)
{
    uint16_t h[STEP];
    float f[STEP];
    memcpy(h, &x, sizeof h);
    for (int i = 0; i < STEP; i++) f[i] = fmoe_f16_to_float(h[i]);
    return (vec2){{load(f), load(f + LANES)}};
}
static __attribute__((noinline, unused)) vec f16_of(vec2 x)
{
    uint16_t h[STEP];
    for (int i = 0; i < STEP; i++) h[i] = fmoe_float_to_f16(x.v[i / LANES][i % LANES]);
    return load(h);
}
#endif
#endif
#endif

/* STEP values at p. The type is a constant or the same throughout a loop, so that its branches are foreseen. */
INLINE vec2 load2(int type, const void *p)
{
    if (type == FMOE_BF16) return bf16_widen(load(p));
    if (type == FMOE_F16) return f16_widen(load(p));
    return (vec2){{load(p), load((const float *)p + LANES)}};
}

INLINE void store2(int type, void *p, vec2 x, const bool nontemporal)
{
    if (type == FMOE_BF16) {
        put(p, bf16_of(x), nontemporal);
    } else if (type == FMOE_F16) {
        put(p, f16_of(x), nontemporal);
    } else {
        put(p, x.v[0], nontemporal);
        put((float *)p + LANES, x.v[1], nontemporal);
    }
}

/* To the nearest number of the type, bf16 or f16. */
INLINE vec rounded(int type, vec x)
{
    return type == FMOE_BF16 ? (vec)(bf16_rounded(x) & 0xffff0000u) : f16_widen(f16_of((vec2){{x, x}})).v[0];
}

/* The same at the end of a row, where n may be less than STEP: the rest is zero, or not stored. */
INLINE vec2 load_upto(int64_t n, int type, const void *p)
{
    if (n >= STEP) return load2(type, p);
    char room[STEP * 4] = {0};
    memcpy(room, p, (size_t)(n * bytes_of(type)));
    return load2(type, room);
}

INLINE void store_upto(int64_t n, int type, void *p, vec2 x)
{
    char room[STEP * 4];
    store2(type, n >= STEP ? p : room, x, false);
    if (n < STEP) memcpy(p, room, (size_t)(n * bytes_of(type)));
}

INLINE void convert(const int to, void *dst, const int from, const void *src, int64_t n)
{
    for (int64_t i = 0; i < n; i += STEP) {
        const vec2 x = load_upto(n - i, from, (const char *)src + i * bytes_of(from));
        store_upto(n - i, to, (char *)dst + i * bytes_of(to), x);
    }
}

#endif
