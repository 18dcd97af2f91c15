/* SPDX-License-Identifier: Apache-2.0
 *
 * softmax_tmpl.c - a router's softmax, in double. Compiled once per ISA level, by vectors of that level (vec.h). */
#include <math.h>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vec.h"

enum { HALF = LANES / 2 };
typedef double dvec __attribute__((vector_size(LANES * 4)));
typedef int64_t longs __attribute__((vector_size(LANES * 4)));

INLINE dvec dvec_choose(longs mask, dvec yes, dvec no) { return (dvec)(((longs)yes & mask) | ((longs)no & ~mask)); }

/* The end of a row is filled up with experts that nobody chooses. */
INLINE dvec dvec_upto(int64_t n, const double *p)
{
    dvec x = -(double)INFINITY - (dvec){0};
    if (n >= HALF) memcpy(&x, p, sizeof x);
    else memcpy(&x, p, (size_t)n * sizeof *p);
    return x;
}

INLINE void dvec_put(int64_t n, double *p, dvec x)
{
    if (n >= HALF) memcpy(p, &x, sizeof x);
    else memcpy(p, &x, (size_t)n * sizeof *p);
}

/* 2^n for whole n, of which the lowest bits of n + 1.5 * 2^52 are n itself. */
INLINE dvec power_of_two(dvec n) { return (dvec)(((longs)(n + 0x1.8p52) + 1023) << 52); }

/* e^x for x <= 0, within 2 ulp; NaN stays. Below -745 it is zero, down to there denormal where it has to be: 2^n in two
 * factors. Taylor's sum to r^12, |r| <= ln(2) / 2, leaves out 1.7e-16. */
INLINE dvec dvec_exp(dvec x)
{
    x = dvec_choose(x < -800.0, -800.0 - (dvec){0}, x);
    const dvec n = (x * 0x1.71547652b82fep0 + 0x1.8p52) - 0x1.8p52, half = (n * 0.5 + 0x1.8p52) - 0x1.8p52;
    const dvec r = (x - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33;
    dvec sum = r * (1.0 / 479001600) + 1.0 / 39916800;
    sum = sum * r + 1.0 / 3628800;
    sum = sum * r + 1.0 / 362880;
    sum = sum * r + 1.0 / 40320;
    sum = sum * r + 1.0 / 5040;
    sum = sum * r + 1.0 / 720;
    sum = sum * r + 1.0 / 120;
    sum = sum * r + 1.0 / 24;
    sum = sum * r + 1.0 / 6;
    sum = sum * r + 0.5;
    sum = sum * r + 1.0;
    sum = sum * r + 1.0;
    return sum * power_of_two(half) * power_of_two(n - half);
}

void NAME(fmoe_softmax)(double *x, int64_t n)
{
    dvec max = -(double)INFINITY - (dvec){0}, sum = {0};
    double top = -(double)INFINITY, all = 0;
    for (int64_t i = 0; i < n; i += HALF) {
        const dvec y = dvec_upto(n - i, x + i);
        max = dvec_choose(y > max, y, max);
    }
    for (int j = 0; j < HALF; j++) top = max[j] > top ? max[j] : top;
    for (int64_t i = 0; i < n; i += HALF) {
        const dvec y = dvec_exp(dvec_upto(n - i, x + i) - top);
        sum += y;
        dvec_put(n - i, x + i, y);
    }
    for (int j = 0; j < HALF; j++) all += sum[j];
    for (int64_t i = 0; i < n; i++) x[i] /= all;
}
