/* SPDX-License-Identifier: Apache-2.0
 * avx2.h - what kernels of 256-bit vectors share: loads of any storage type, prefetching, and the widening of 16 bits.
 */
#ifndef FMOE_AVX2_H
#define FMOE_AVX2_H

#include <immintrin.h>

#include "cpu/kernels/load.h"
#include "cpu/kernels/overlap.h"

/* Eight elements of any storage type as f32. */
static inline __attribute__((always_inline)) __m256 load8(const int dtype, const void *p)
{
    if (dtype == FMOE_F16) return _mm256_cvtph_ps(_mm_loadu_si128(p));
    if (dtype == FMOE_BF16)
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
    return _mm256_loadu_ps(p);
}

/* ---- prefetching ---- */

/* Prefetching (overlap.h) in two instructions a step: a sum whose carry is a line. It is kept in a register: through
 * memory, as fmoe_prefetch has it, a step of 12 multiply-adds would wait for the store of the step before (9 % of the
 * forward at 64 rows). */

/* Lines a step, in 1/2^32: one at most. */
static inline uint32_t prefetch_carry_rate(const fmoe_walk *w, int64_t steps)
{
    const int64_t lines = 8 * w->left - w->row;
    return lines <= 0 || steps <= 0 ? 0 : lines >= steps ? UINT32_MAX : (uint32_t)((lines << 32) / steps);
}

static inline __attribute__((always_inline)) void prefetch_carry(fmoe_walk *w, uint32_t *due, uint32_t rate)
{
    if (__builtin_expect(__builtin_add_overflow(*due, rate, due), 0)) fmoe_prefetch_line(w);
}

/* ---- four columns x 8 k of 16-bit elements as blocks of four f32, for AVX2 and AVX-512 ---- */

static inline __m128i load_kblock(const char *p) { return _mm_loadu_si128((const __m128i *)(const void *)p); }

static inline __m256i two_columns(const char *p, int64_t step)
{
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load_kblock(p)), load_kblock(p + step), 1);
}

/* The first four k of columns 0 and 1, of 2 and 3; the second four of both. A bf16 is the upper half of its f32. */
static inline __attribute__((always_inline)) void widen_kblocks(const int dtype, const char *p, int64_t step,
                                                                __m256 out[4])
{
    if (dtype == FMOE_BF16) {
        const __m256i x = two_columns(p, step), y = two_columns(p + 2 * step, step), zero = _mm256_setzero_si256();
        out[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, x));
        out[1] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, y));
        out[2] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, x));
        out[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, y));
    } else {
        const __m128i a = load_kblock(p), b = load_kblock(p + step), c = load_kblock(p + 2 * step),
                      d = load_kblock(p + 3 * step);
        out[0] = _mm256_cvtph_ps(_mm_unpacklo_epi64(a, b));
        out[1] = _mm256_cvtph_ps(_mm_unpacklo_epi64(c, d));
        out[2] = _mm256_cvtph_ps(_mm_unpackhi_epi64(a, b));
        out[3] = _mm256_cvtph_ps(_mm_unpackhi_epi64(c, d));
    }
}

#endif
