/* SPDX-License-Identifier: Apache-2.0
 *
 * coded.h - one expert's matrix of quantised weights, as kernels read it. */
#ifndef FMOE_CPU_CODED_H
#define FMOE_CPU_CODED_H

#include "codes.h"

typedef struct fmoe_coded {
    int32_t code; /* fmoe_code */
    bool high_first;
    const uint8_t *codes;
    int64_t step; /* bytes from one row of codes to the next */
    int64_t group_rows, group_cols;
    int64_t half,
        half_groups; /* rows before the groups begin anew, and rows of groups of those; INT64_MAX: they do not */
    const char *scale, *zeros;      /* zeros NULL: the constant */
    int64_t scale_step, zeros_step; /* elements from one row of groups to the next */
    int scale_dtype, scale_type, zeros_dtype;
    float zero, scale2;
    const float *table; /* of a code of 4 bits: sixteen values */
    bool for_pairs; /* decoded for products of bf16 pairs alone, which take denormals for zeros: as they may be decoded
                     */
    bool regular;   /* values and scale2 are such that no weight is denormal or NaN where scales are in 2^-60 .. 2^60 */
} fmoe_coded;

/* The row of groups that a row of codes is in. */
static inline int64_t fmoe_coded_group(const fmoe_coded *m, int64_t row)
{
    const int64_t before = row < m->half ? 0 : m->half_groups, at = row < m->half ? row : row - m->half;
    return before + (m->group_rows == 1 ? at : at / m->group_rows); /* one each is the rule, and a division is slow */
}

/* The scale and zero of a group. */
static inline float fmoe_coded_scale(const fmoe_coded *m, int64_t group_row, int64_t group)
{
    return fmoe_scale_at(m->scale, m->scale_dtype, m->scale_type, group_row * m->scale_step + group);
}

static inline float fmoe_coded_zero(const fmoe_coded *m, int64_t group_row, int64_t group)
{
    return m->zeros ? fmoe_scale_at(m->zeros, m->zeros_dtype, 0, group_row * m->zeros_step + group) : m->zero;
}

static inline uint8_t fmoe_nibble(const uint8_t *row, int64_t k, bool high_first)
{
    return (uint8_t)(row[k / 2] >> (((k & 1) != 0) != high_first ? 4 : 0) & 15);
}

#endif
