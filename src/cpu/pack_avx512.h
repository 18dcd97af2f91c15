/* SPDX-License-Identifier: Apache-2.0
 * pack_avx512.h - what both AVX-512 levels pack panels with: a 16 x 16 transposition of 32-bit units, masks,
 * prefetching. */
#ifndef FMOE_PACK_AVX512_H
#define FMOE_PACK_AVX512_H

#include <immintrin.h>
#include <stdint.h>

enum {
    PACK_AHEAD = 12,       /* rows to fetch ahead while packing rows */
    PACK_AHEAD_BYTES = 512 /* bytes to fetch ahead while packing columns */
};

static inline __mmask16 first_n(int64_t n)
{
    const unsigned m = n >= 16 ? 0xffffu : (1u << n) - 1u;
    return (__mmask16)m;
}

static inline void fetch_row(const void *row, int64_t bytes)
{
    for (int64_t b = 0; b < bytes; b += 64) _mm_prefetch((const char *)row + b, _MM_HINT_T0);
}

/* Sixteen columns are read side by side, 64 bytes each at a time: fetch what comes PACK_AHEAD_BYTES later, which near
 * the end of the chunk is the start of the next sixteen. */
static inline __attribute__((always_inline)) void fetch_cols(const void *const *cols, int64_t j0, int64_t n, int64_t at,
                                                             int64_t bytes)
{
    int64_t ahead = at + PACK_AHEAD_BYTES;
    if (ahead >= bytes) {
        ahead -= bytes;
        j0 += 16;
    }
    if (j0 + 16 > n || ahead >= bytes) return;
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) _mm_prefetch((const char *)cols[j0 + j] + ahead, _MM_HINT_T0);
}

/* Four rounds, exchanging 1, 2, 4 and 8 units between rows that far apart. */
static inline __attribute__((always_inline)) void transpose16(__m512 r[16])
{
    __m512 t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 1]);
        const __m512d c = _mm512_castps_pd(t[4 * i + 2]), d = _mm512_castps_pd(t[4 * i + 3]);
        r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
        r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
        r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
        r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
    /* Now r[4i+q] holds, in 128-bit lane l, column 4l+q of rows 4i..4i+3: a 4 x 4 transposition of lanes is left. */
#pragma GCC unroll 4
    for (int q = 0; q < 4; q++) {
        const __m512 ab0 = _mm512_shuffle_f32x4(r[q], r[q + 4], 0x88), ab1 = _mm512_shuffle_f32x4(r[q], r[q + 4], 0xdd);
        const __m512 cd0 = _mm512_shuffle_f32x4(r[q + 8], r[q + 12], 0x88),
                     cd1 = _mm512_shuffle_f32x4(r[q + 8], r[q + 12], 0xdd);
        t[q] = _mm512_shuffle_f32x4(ab0, cd0, 0x88);
        t[q + 4] = _mm512_shuffle_f32x4(ab1, cd1, 0x88);
        t[q + 8] = _mm512_shuffle_f32x4(ab0, cd0, 0xdd);
        t[q + 12] = _mm512_shuffle_f32x4(ab1, cd1, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

#endif
