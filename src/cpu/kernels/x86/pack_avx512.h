/* SPDX-License-Identifier: Apache-2.0
 * pack_avx512.h - what both AVX-512 levels pack panels with: a 16 x 16 transposition of 32-bit units, masks,
 * prefetching, and the pieces that are packed between multiply-adds (overlap.h). */
#ifndef FMOE_PACK_AVX512_H
#define FMOE_PACK_AVX512_H

#include <immintrin.h>
#include <stdint.h>

#include "cpu/kernels/kernels.h"

enum {
    PACK_AHEAD = 12,       /* rows to fetch ahead while packing rows */
    PACK_AHEAD_BYTES = 512 /* bytes to fetch ahead while packing columns */
};

static inline __mmask16 first_n(int64_t n)
{
    const unsigned m = n >= 16 ? 0xffffu : (1u << n) - 1u;
    return (__mmask16)m;
}

static inline void prefetch_row(const void *row, int64_t bytes)
{
    for (int64_t b = 0; b < bytes; b += 64) _mm_prefetch((const char *)row + b, _MM_HINT_T0);
}

/* What comes after n columns of a row is packed next, as a rule. */
static inline void prefetch_right(const void *row, int64_t bytes)
{
    for (int64_t b = bytes; b < 2 * bytes; b += 64) _mm_prefetch((const char *)row + b, _MM_HINT_T1);
}

/* Sixteen columns are read side by side, 64 bytes each at a time: fetch what comes PACK_AHEAD_BYTES later, which near
 * the end of the chunk is the start of the next sixteen. */
static inline __attribute__((always_inline)) void prefetch_cols(const void *const *cols, int64_t j0, int64_t n,
                                                                int64_t at, int64_t bytes)
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

/* Whether a step of a prepacked panel is prefetched once more: by the first tile of those that read it. */
static inline bool take_prefetch_again(fmoe_overlap *overlap)
{
    const bool prefetch_again = overlap->prefetch_again;
    overlap->prefetch_again = false;
    return prefetch_again;
}

static inline __attribute__((always_inline)) void prefetch_again_at(const void *b)
{
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) _mm_prefetch((const char *)b + FMOE_PREFETCH_AGAIN + 64 * i, _MM_HINT_T0);
}

/* ---- pieces: 8 cache lines, in at most 5 registers, for 24 are sums ---- */

enum { PANEL_ROW = FMOE_NB * 4 }; /* bytes */

static inline char *piece_at(const fmoe_overlap *s)
{
    return s->panel + s->pack.run * s->to_run + (s->pack.length - s->pack.in_run) * s->to_step;
}

/* The same in the other half, of n-major weights. */
static inline const char *piece_other(const fmoe_overlap *s)
{
    return s->pack.half[1] + (s->pack.at - s->pack.half[0]);
}

/* 8 columns x 8 units. z[i] holds in its lanes of four units: column i, column i+4, then the second four of each; loads
 * with a mask put them there, which leaves two rounds of shuffles, inside lanes. */
static inline __attribute__((always_inline)) void piece_transpose_store(const __m512 z[4], char *to)
{
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(z[0], z[1])),
                  c = _mm512_castps_pd(_mm512_unpacklo_ps(z[2], z[3]));
    const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(z[0], z[1])),
                  d = _mm512_castps_pd(_mm512_unpackhi_ps(z[2], z[3]));
    const __m512d u[4] = {_mm512_unpacklo_pd(a, c), _mm512_unpackhi_pd(a, c), _mm512_unpacklo_pd(b, d),
                          _mm512_unpackhi_pd(b, d)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_pd((double *)(void *)(to + i * PANEL_ROW), _mm512_castpd512_pd256(u[i]));
        _mm256_storeu_pd((double *)(void *)(to + (4 + i) * PANEL_ROW), _mm512_extractf64x4_pd(u[i], 1));
    }
}

/* A register that an instruction names by another width than its own (%x, %t): clang 19 and 22 (not 16) give registers
 * from 16 on a wrong name there. */
#if defined(__clang__)
#define OUT_IN_PARTS(z) "=&x"(z)
#else
#define OUT_IN_PARTS(z) "=&v"(z)
#endif

/* z[0..3] from rows p, p + step, ... of eight, from `offset` bytes on, 16 bytes from their first four units to the
 * second four. Written out, with few addresses: a compiler makes eight, and moves them to vector registers and back. */
#define PIECE_FOUR(move, offset, suffix, mask)                                                                         \
    move " " offset "(%[p]), %" suffix "[z0]" mask "\n\t" move " " offset "(%[p],%[s]), %" suffix "[z1]" mask          \
         "\n\t" move " " offset "(%[p],%[s],2), %" suffix "[z2]" mask "\n\t" move " " offset "(%[p],%[t]), %" suffix   \
         "[z3]" mask "\n\t"
#define PIECE_LOAD(offset, z, from, step)                                                                              \
    do {                                                                                                               \
        const char *p_ = (from);                                                                                       \
        __asm__(PIECE_FOUR("vmovups", offset, "x", "") PIECE_FOUR(                                                     \
                    "vbroadcastf32x4", offset "+16", "",                                                               \
                    "%{%[k2]%}") "lea (%[p],%[s],4), %[p]\n\t" PIECE_FOUR("vbroadcastf32x4", offset, "", "%{%[k1]%}")  \
                    PIECE_FOUR("vbroadcastf32x4", offset "+16", "", "%{%[k3]%}")                                       \
                : [z0] OUT_IN_PARTS((z)[0]), [z1] OUT_IN_PARTS((z)[1]), [z2] OUT_IN_PARTS((z)[2]),                     \
                  [z3] OUT_IN_PARTS((z)[3]), [p] "+&r"(p_)                                                             \
                : [s] "r"((int64_t)(step)), [t] "r"((int64_t)(3 * (step))), [k1] "Yk"((__mmask16)(15 << 4)),           \
                  [k2] "Yk"((__mmask16)(15 << 8)), [k3] "Yk"((__mmask16)(15 << 12))                                    \
                : "memory");                                                                                           \
    } while (0)

static inline __attribute__((always_inline)) void piece_transpose(const fmoe_overlap *s)
{
    __m512 z[4];
    PIECE_LOAD("0", z, s->pack.at, s->pack.step);
    piece_transpose_store(z, piece_at(s));
    PIECE_LOAD("32", z, s->pack.at, s->pack.step);
    piece_transpose_store(z, piece_at(s) + 8 * PANEL_ROW);
}

/* ---- pieces of a panel of bf16 pairs, packed between the products of AVX512_BF16 or of AMX ---- */

/* Rows k and k+1 side by side: word 2j from row k, word 2j+1 from row k+1. */
static const uint16_t lower_words[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
static const uint16_t upper_words[32] = {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
                                         24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};

static inline __attribute__((always_inline)) void interleave(const void *even, const void *odd, char *to)
{
    const __m512i lo = _mm512_loadu_si512(even), hi = _mm512_loadu_si512(odd);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(lo, _mm512_loadu_si512(lower_words), hi));
    _mm512_storeu_si512(to + 64, _mm512_permutex2var_epi16(lo, _mm512_loadu_si512(upper_words), hi));
}

static inline __attribute__((always_inline)) void piece_pairs(fmoe_overlap *overlap)
{
    if (overlap->kind == FMOE_OVERLAP_TRANSPOSE) {
        piece_transpose(overlap);
    } else {
        const char *p = overlap->pack.at, *q = piece_other(overlap);
        const int64_t step = overlap->pack.step;
        char *to = piece_at(overlap);
        interleave(p, p + step, to);
        interleave(q, q + step, to + PANEL_ROW / 2);
        interleave(p + 2 * step, p + 3 * step, to + PANEL_ROW);
        interleave(q + 2 * step, q + 3 * step, to + PANEL_ROW * 3 / 2);
    }
    fmoe_walk_on(&overlap->pack);
}

#endif
