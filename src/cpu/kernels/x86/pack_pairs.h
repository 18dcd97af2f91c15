/* SPDX-License-Identifier: Apache-2.0
 * pack_pairs.h - pieces of a panel of bf16 pairs, packed between the products of AVX512_BF16 or of AMX (side.h). */
#ifndef FMOE_PACK_PAIRS_H
#define FMOE_PACK_PAIRS_H

#include "cpu/kernels/x86/pack_avx512.h"

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

static inline __attribute__((always_inline)) void piece_pairs(fmoe_side *side)
{
    if (side->kind == FMOE_SIDE_COLS) {
        piece_cols_units(side);
    } else {
        const char *p = side->pack.at, *q = piece_other(side);
        const int64_t step = side->pack.step;
        char *to = piece_at(side);
        interleave(p, p + step, to);
        interleave(q, q + step, to + PANEL_ROW / 2);
        interleave(p + 2 * step, p + 3 * step, to + PANEL_ROW);
        interleave(q + 2 * step, q + 3 * step, to + PANEL_ROW * 3 / 2);
    }
    fmoe_walk_on(&side->pack);
}

#endif
