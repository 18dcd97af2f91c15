/* SPDX-License-Identifier: Apache-2.0
 *
 * fetch_avx2.h - fetching on the side (side.h) in two instructions a step: a sum whose carry is a line. It is kept in a
 * register: through memory, as fmoe_fetch has it, a step of 12 multiply-adds would wait for the store of the step
 * before (9 % of the forward at 64 rows). */
#ifndef FMOE_FETCH_AVX2_H
#define FMOE_FETCH_AVX2_H

#include "cpu/kernels/overlap.h"

/* Lines a step, in 1/2^32: one at most. */
static inline uint32_t carry_rate(const fmoe_walk *w, int64_t steps)
{
    const int64_t lines = 8 * w->left - w->row;
    return lines <= 0 || steps <= 0 ? 0 : lines >= steps ? UINT32_MAX : (uint32_t)((lines << 32) / steps);
}

static inline __attribute__((always_inline)) void fetch_carry(fmoe_walk *w, uint32_t *due, uint32_t rate)
{
    if (__builtin_expect(__builtin_add_overflow(*due, rate, due), 0)) fmoe_fetch_line(w);
}

#endif
