/* SPDX-License-Identifier: Apache-2.0
 *
 * activations.h - activations: each is one function of vectors for its value and both derivatives, and a compiler
 * leaves out what a caller does not use. Nothing branches on data; NaN in gives NaN out. */
#ifndef FMOE_CPU_ACTS_H
#define FMOE_CPU_ACTS_H

#include "cpu/kernels/vec.h"

/* ---- functions ---- */

/* exp(x) = p * 2^n to 3 ulp (2.0 measured, 2.3 without FMA): x = n ln2 + r, |r| <= ln2/2, a polynomial in r whose
 * relative error is 9.2e-8. */
typedef struct power {
    vec p;
    bits n; /* more than n by 0x4b400000, whose lowest bit is 2^22 */
} power;

INLINE power exp_parts(vec x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    const vec shifted = x * 1.44269504f + magic, n = shifted - magic;
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = r * 8.290272e-3f + 4.189816e-2f;
    p = p * r + 1.6667639e-1f;
    p = p * r + 4.9999148e-1f;
    p = p * r + 9.999997e-1f;
    p = p * r + 1.0f;
    return (power){p, (bits)shifted};
}

/* 2^n by the exponent bits in two halves, so that results down to the smallest denormal and up to the largest number
 * come out. */
INLINE vec exp_v(vec x)
{
    const power e = exp_parts(at_least(at_most(x, 89.0f), -104.0f));
    const ints n = (ints)(e.n - 0x4b400000u), half = n >> 1;
    return e.p * (vec)((half + 127) << 23) * (vec)((n - half + 127) << 23);
}

typedef struct logistic {
    vec s, e; /* sigmoid(x) = 1 / (1 + e), e = exp(-x); e s is 1 - sigmoid(x) without cancellation */
} logistic;

INLINE logistic sigmoid(vec x)
{
    /* To where 2^n is a normal number: beyond, s is 0 or 1 to the last bit, and 1 - s next to nothing. */
    const power parts = exp_parts(-at_least(at_most(x, 87.0f), -88.0f));
    const vec e = parts.p * (vec)((parts.n << 23) + 0x3f800000u), s = 1.0f / (1.0f + e);
    return (logistic){s, e};
}

/* erfc(z) = t exp(-z^2 + P(t)), t = 1 / (1 + z/2), z >= 0: a Chebyshev fit with relative error 1.2e-7 (Numerical
 * Recipes, 6.2). Used as the normal distribution function: relative accuracy in the far tail too. */
INLINE vec erfc_positive(vec z)
{
    const vec t = 1.0f / (1.0f + 0.5f * z);
    vec p = 0.17087277f * t - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    p = p * t - 1.26551223f;
    return t * exp_v(p - z * z);
}

INLINE vec normal_cdf(vec x) /* P(X <= x), X standard normal */
{
    const vec z = x * 0.707106781f, tail = 0.5f * erfc_positive(absolute(z));
    return above(-z, 0.0f, tail, 1.0f - tail);
}

INLINE vec normal_pdf(vec x) { return 0.398942280f * exp_v(-0.5f * x * x); }

typedef struct value { /* f(x) and f'(x) */
    vec f, df;
} value;

INLINE value silu(vec x)
{
    const logistic l = sigmoid(x);
    const vec f = x * l.s;
    return (value){f, l.s + l.s * (f * l.e)};
}

INLINE value gelu(vec x)
{
    const vec cdf = normal_cdf(x);
    return (value){x * cdf, cdf + x * normal_pdf(x)};
}

INLINE value gelu_tanh(vec x) /* 0.5 x (1 + tanh z) = x sigmoid(2z) */
{
    const vec x2 = x * x;
    const logistic l = sigmoid(1.59576912f * x * (1.0f + 0.044715f * x2));
    const vec f = x * l.s, c = l.e * l.s;
    return (value){f, l.s + f * c * 1.59576912f * (1.0f + 0.134145f * x2)};
}

INLINE value relu(vec x) { return (value){at_least(x, 0.0f), above(x, 0.0f, splat(1.0f), splat(0.0f))}; }
INLINE value relu2(vec x)
{
    const vec r = at_least(x, 0.0f);
    return (value){r * r, 2.0f * r};
}

/* ---- activations: value, and derivatives by gate and up ---- */

typedef struct value2 {
    vec a, dg, du;
} value2;

/* Parameters, and what FMOE_ROUND_STEPS rounds every operation's result to: 0 is nothing (then known in advance). */
typedef struct params {
    float alpha, limit;
    int steps;
} params;

typedef value2 act_fn(vec g, vec u, const params *p);

INLINE vec step(const params *p, vec x) { return p->steps ? rounded(p->steps, x) : x; }

INLINE value2 times(value v, vec u, const params *p)
{
    const vec f = step(p, v.f);
    return (value2){step(p, f * u), v.df * u, f};
}

#define GATED(name, fn)                                                                                                \
    INLINE value2 name(vec g, vec u, const params *p) { return times(fn(g), u, p); }
#define PLAIN(name, fn)                                                                                                \
    INLINE value2 name(vec g, vec u, const params *p)                                                                  \
    {                                                                                                                  \
        (void)g;                                                                                                       \
        const value v = fn(u);                                                                                         \
        return (value2){step(p, v.f), splat(0.0f), v.df};                                                              \
    }
GATED(swiglu, silu)
GATED(geglu, gelu)
GATED(geglu_tanh, gelu_tanh)
GATED(reglu, relu)
PLAIN(plain_silu, silu)
PLAIN(plain_gelu, gelu)
PLAIN(plain_gelu_tanh, gelu_tanh)
PLAIN(plain_relu, relu)
PLAIN(plain_relu2, relu2)

/* Clamps pass the gradient inside and at their borders (as torch.clamp does up to 2.13, but not in 2.15). */
INLINE vec clamp(vec x, float limit) { return at_least(at_most(x, limit), -limit); }
INLINE value2 clamped(value2 v, vec g, vec u, float limit)
{
    return (value2){v.a, above(g, limit, splat(0.0f), v.dg), above(absolute(u), limit, splat(0.0f), v.du)};
}

INLINE value2 swiglu_clamp(vec g, vec u, const params *p)
{
    return clamped(times(silu(at_most(g, p->limit)), clamp(u, p->limit), p), g, u, p->limit);
}

INLINE value2 swiglu_clamp_out(vec g, vec u, const params *p)
{
    const value v = silu(g), c = {at_most(v.f, p->limit), v.df};
    return clamped(times(c, clamp(u, p->limit), p), v.f, u, p->limit);
}

INLINE value2 swiglu_oai(vec g, vec u, const params *p)
{
    const vec gc = at_most(g, p->limit), u1 = step(p, clamp(u, p->limit) + 1.0f);
    const logistic l = sigmoid(step(p, p->alpha * gc));
    const vec glu = step(p, gc * step(p, l.s)), dglu = l.s + l.s * (p->alpha * glu * l.e);
    return clamped((value2){step(p, u1 * glu), u1 * dglu, glu}, g, u, p->limit);
}

#define ACTS(X)                                                                                                        \
    X(FMOE_ACT_SWIGLU, true, swiglu)                                                                                   \
    X(FMOE_ACT_GEGLU, true, geglu)                                                                                     \
    X(FMOE_ACT_GEGLU_TANH, true, geglu_tanh)                                                                           \
    X(FMOE_ACT_REGLU, true, reglu)                                                                                     \
    X(FMOE_ACT_SWIGLU_CLAMP, true, swiglu_clamp)                                                                       \
    X(FMOE_ACT_SWIGLU_OAI, true, swiglu_oai)                                                                           \
    X(FMOE_ACT_SWIGLU_CLAMP_OUT, true, swiglu_clamp_out)                                                               \
    X(FMOE_ACT_SILU, false, plain_silu)                                                                                \
    X(FMOE_ACT_GELU, false, plain_gelu)                                                                                \
    X(FMOE_ACT_GELU_TANH, false, plain_gelu_tanh)                                                                      \
    X(FMOE_ACT_RELU, false, plain_relu)                                                                                \
    X(FMOE_ACT_RELU2, false, plain_relu2)

#endif
