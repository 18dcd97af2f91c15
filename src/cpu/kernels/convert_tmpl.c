/* SPDX-License-Identifier: Apache-2.0
 *
 * convert_tmpl.c - elementwise work on single rows: conversions and sums. Compiled once per ISA level (FMOE_ISA and the
 * level's flags come from the build), by vectors of that level (vec.h): the same bits every time, and an element's do
 * not depend on where it stands. */
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vec.h"

/* ---- conversions ---- */

void NAME(fmoe_load_bf16)(float *dst, const void *src, int64_t n) { convert(FMOE_F32, dst, FMOE_BF16, src, n); }
void NAME(fmoe_load_f16)(float *dst, const void *src, int64_t n) { convert(FMOE_F32, dst, FMOE_F16, src, n); }
void NAME(fmoe_store_bf16)(void *dst, const float *src, int64_t n) { convert(FMOE_BF16, dst, FMOE_F32, src, n); }
void NAME(fmoe_store_f16)(void *dst, const float *src, int64_t n) { convert(FMOE_F16, dst, FMOE_F32, src, n); }

INLINE void round_row(const int type, float *x, const float *bias, int64_t n)
{
    for (int64_t i = 0; i < n; i += STEP) {
        vec2 y = load_upto(n - i, FMOE_F32, x + i), b = {{{0}, {0}}};
        if (bias) b = load_upto(n - i, FMOE_F32, bias + i);
        for (int j = 0; j < 2; j++) {
            y.v[j] = rounded(type, y.v[j]);
            if (bias) y.v[j] = rounded(type, y.v[j] + b.v[j]);
        }
        store_upto(n - i, FMOE_F32, x + i, y);
    }
}

void NAME(fmoe_round_bf16)(float *x, const float *bias, int64_t n) { round_row(FMOE_BF16, x, bias, n); }
void NAME(fmoe_round_f16)(float *x, const float *bias, int64_t n) { round_row(FMOE_F16, x, bias, n); }

/* ---- sums ---- */

void NAME(fmoe_axpy)(float *y, float s, const float *x, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) put(y + i, load(y + i) + s * load(x + i), false);
    for (; i < n; i++) y[i] += s * x[i];
}

float NAME(fmoe_dot)(const float *x, const float *y, int64_t n)
{
    vec2 sum = {{{0}, {0}}};
    for (int64_t i = 0; i < n; i += STEP) {
        const vec2 a = load_upto(n - i, FMOE_F32, x + i), b = load_upto(n - i, FMOE_F32, y + i);
        sum.v[0] += a.v[0] * b.v[0];
        sum.v[1] += a.v[1] * b.v[1];
    }
    return sum_of(sum.v[0] + sum.v[1]);
}
