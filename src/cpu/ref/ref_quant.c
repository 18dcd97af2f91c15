/* SPDX-License-Identifier: Apache-2.0
 *
 * ref_quant.c - the specification of quantised weights:
 *
 *   W[n,k] = (code[n,k] - zero) * scale * scale2        from left to right, every result rounded to f32
 *
 * The scale (and zero) of code (n,k) is that of group (n / group_rows, k / group_cols). With FMOE_QUANT_HALVES rows of
 * groups are counted anew from the first row of the upper half, after those of the lower one. A plan of f64 takes the
 * f32 result as it is; one of 16 bits rounds it, once. */
#include "codes.h"
#include "ref.h"

/* Nibble k of a row: the even k in the lower one, or in the higher. */
static int nibble(const uint8_t *row, int64_t k, bool high_first)
{
    const bool odd = k % 2 == 1;
    return odd == high_first ? row[k / 2] & 15 : row[k / 2] >> 4;
}

static float value_of(const fmoe_quant *q, const uint8_t *row, int64_t k)
{
    switch (q->code) {
    case FMOE_CODE_E4M3: return fmoe_e4m3_to_float(row[k]);
    case FMOE_CODE_S8: return (float)(row[k] < 128 ? row[k] : row[k] - 256);
    default: return fmoe_code_table(q->code, q->lut)[nibble(row, k, q->flags & FMOE_QUANT_HIGH_FIRST)];
    }
}

/* Element (row, col) of a grid of scales or zeros of expert e. */
static float grid_at(const fmoe_tensor *grid, bool list, int64_t e, int64_t row, int64_t col, int scale_type)
{
    const fmoe_tensor *t = list ? grid + e : grid;
    const int d = list ? 0 : 1;
    const int64_t at = (list ? 0 : e * fmoe_stride(t, 0)) + row * fmoe_stride(t, d) + col * fmoe_stride(t, d + 1);
    return fmoe_scale_at(fmoe_data(t), fmoe_tensor_dtype(t), scale_type, at);
}

static int64_t group_row(const fmoe_quant *q, int64_t n, int64_t N)
{
    const int64_t rows = q->group_rows ? q->group_rows : N, half = N / 2;
    if (!(q->flags & FMOE_QUANT_HALVES) || n < half) return n / rows;
    return (q->group_rows ? fmoe_ceil_div(half, rows) : 1) + (n - half) / rows;
}

double fmoe_ref_weight(const ref_vec *codes, int64_t k)
{
    const fmoe_quant *q = codes->quant;
    const int64_t row = group_row(q, codes->n, codes->N), col = q->group_cols ? k / q->group_cols : 0;
    float w = value_of(q, codes->p, k);
    w = w - (q->zeros ? grid_at(q->zeros, codes->list, codes->e, row, col, 0) : q->zero);
    w = w * grid_at(q->scale, codes->list, codes->e, row, col, q->scale_type);
    if (!q->scale2) return w;
    const fmoe_tensor *scale2 = codes->list ? q->scale2 + codes->e : q->scale2;
    w = w * ((const float *)fmoe_data(scale2))[scale2->shape[0] > 1 ? codes->e : 0];
    return w;
}
