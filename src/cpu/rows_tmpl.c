/* SPDX-License-Identifier: Apache-2.0
 *
 * rows_tmpl.c - elementwise work on rows: conversions, activations and their gradients, weighted sums.
 *
 * Compiled once per ISA level (FMOE_ISA and the level's flags come from the build): plain loops that the compiler
 * vectorises. Loops have no branches that depend on data, sums have a fixed order of 16 partial sums, so a level always
 * gives the same bits. */
#include "cpu/kernels.h"
#include "util.h"

#define CAT_(a, b) a##_##b
#define CAT(a, b) CAT_(a, b)
#define NAME(base) CAT(base, FMOE_ISA)

/* For kernels whose loops call functions: a loop with a call in it is not vectorised, and a compiler stops inlining at
 * some size of the file (the f32 forward at 64 rows an expert: 7 % slower, for the sake of SwiGLU alone). */
#define ALL_INLINE __attribute__((flatten))

/* ---- conversions ---- */

void NAME(fmoe_load_bf16)(float *restrict dst, const void *restrict src, int64_t n)
{
    const uint16_t *s = src;
    for (int64_t i = 0; i < n; i++) dst[i] = fmoe_bf16_to_float(s[i]);
}

void NAME(fmoe_load_f16)(float *restrict dst, const void *restrict src, int64_t n)
{
    const uint16_t *s = src;
    for (int64_t i = 0; i < n; i++) dst[i] = fmoe_f16_to_float(s[i]);
}

void NAME(fmoe_store_bf16)(void *restrict dst, const float *restrict src, int64_t n)
{
    uint16_t *d = dst;
    for (int64_t i = 0; i < n; i++) d[i] = fmoe_float_to_bf16(src[i]);
}

void NAME(fmoe_store_f16)(void *restrict dst, const float *restrict src, int64_t n)
{
    uint16_t *d = dst;
    for (int64_t i = 0; i < n; i++) d[i] = fmoe_float_to_f16(src[i]);
}

/* Inlined with a type that is known. */
static inline __attribute__((always_inline)) float round_to(int type, float x)
{
    return type == FMOE_BF16 ? fmoe_bf16_to_float(fmoe_float_to_bf16(x)) : fmoe_f16_to_float(fmoe_float_to_f16(x));
}

static inline __attribute__((always_inline)) void round_row(int type, float *restrict x, const float *restrict bias,
                                                            int64_t n)
{
    if (bias)
        for (int64_t i = 0; i < n; i++) x[i] = round_to(type, round_to(type, x[i]) + bias[i]);
    else
        for (int64_t i = 0; i < n; i++) x[i] = round_to(type, x[i]);
}

void NAME(fmoe_round_bf16)(float *x, const float *bias, int64_t n) { round_row(FMOE_BF16, x, bias, n); }
void NAME(fmoe_round_f16)(float *x, const float *bias, int64_t n) { round_row(FMOE_F16, x, bias, n); }

/* ---- blocks of a weight gradient ---- */

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
/* n bytes from a staging row to memory, past the cache; dst is 64-byte aligned and n a multiple of 64. A worker puts a
 * fence after all of its stores (pool.c). */
static inline void stream_out(void *dst, const void *src, size_t n)
{
#if defined(__AVX512F__)
    for (size_t i = 0; i < n; i += 64)
        _mm512_stream_si512((void *)((char *)dst + i), _mm512_loadu_si512((const char *)src + i));
#else
    for (size_t i = 0; i < n; i += 32)
        _mm256_stream_si256((void *)((char *)dst + i), _mm256_loadu_si256((const void *)((const char *)src + i)));
#endif
}
#else
static inline void stream_out(void *dst, const void *src, size_t n) { memcpy(dst, src, n); }
#endif

static inline void to_f32(void *dst, const float *src, int64_t n) { memcpy(dst, src, (size_t)n * sizeof *src); }

/* Blocks are 64 or 32 columns wide but for the last: lengths that the compiler may know. */
#define STORE_BLOCK(type, convert, bytes)                                                                              \
    static inline __attribute__((always_inline)) void store_##type(char *to, int64_t stride, const float *c,           \
                                                                   int64_t m, const int64_t n, const bool past)        \
    {                                                                                                                  \
        for (int64_t i = 0; i < m; i++, to += stride * bytes, c += FMOE_NB)                                            \
            if (past) {                                                                                                \
                _Alignas(64) char row[FMOE_NB * bytes];                                                                \
                convert(row, c, n);                                                                                    \
                stream_out(to, row, (size_t)n *bytes);                                                                 \
            } else {                                                                                                   \
                convert(to, c, n);                                                                                     \
            }                                                                                                          \
    }                                                                                                                  \
    void NAME(fmoe_store_block_##type)(void *dst, int64_t stride, const float *c, int64_t m, int64_t n, bool past)     \
    {                                                                                                                  \
        const bool whole = n * bytes % 64 == 0 && (uintptr_t)dst % 64 == 0 && stride * bytes % 64 == 0;                \
        if (n == FMOE_NB) store_##type(dst, stride, c, m, FMOE_NB, past &&whole);                                      \
        else if (n == FMOE_NB / 2) store_##type(dst, stride, c, m, FMOE_NB / 2, past && whole);                        \
        else store_##type(dst, stride, c, m, n, past &&whole);                                                         \
    }
STORE_BLOCK(f32, to_f32, 4)
STORE_BLOCK(bf16, NAME(fmoe_store_bf16), 2)
STORE_BLOCK(f16, NAME(fmoe_store_f16), 2)

/* ---- sums ---- */

void NAME(fmoe_axpy)(float *restrict y, float s, const float *restrict x, int64_t n)
{
    if (n == FMOE_NB)
        for (int64_t i = 0; i < FMOE_NB; i++) y[i] += s * x[i];
    else
        for (int64_t i = 0; i < n; i++) y[i] += s * x[i];
}

static inline float add_parts(float part[16])
{
    for (int half = 8; half > 0; half /= 2)
        for (int j = 0; j < half; j++) part[j] += part[j + half];
    return part[0];
}

float NAME(fmoe_dot)(const float *x, const float *y, int64_t n)
{
    float part[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++) part[j] += x[i + j] * y[i + j];
    for (int j = 0; i + j < n; j++) part[j] += x[i + j] * y[i + j];
    return add_parts(part);
}

/* ---- functions; NaN in gives NaN out ---- */

/* exp(x) = p * 2^n to 3 ulp (2.9 measured): x = n ln2 + r, |r| <= ln2/2, a polynomial of degree 6 in r. */
typedef struct power {
    float p;
    uint32_t n; /* more than n by 0x4b400000, whose lowest bit is 2^22 */
} power;

static inline power exp_parts(float x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    const float shifted = x * 1.44269504f + magic;
    const float n = shifted - magic;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return (power){p, fmoe_float_to_bits(shifted)};
}

/* 2^n by the exponent bits in two halves, so that results down to the smallest denormal and up to the largest number
 * come out. */
static inline float exp_f(float x)
{
    x = x > 89.0f ? 89.0f : x;
    x = x < -104.0f ? -104.0f : x;
    const power e = exp_parts(x);
    const int32_t n = (int32_t)(e.n - 0x4b400000u), half = n >> 1;
    return e.p * fmoe_bits_to_float((uint32_t)(half + 127) << 23) *
           fmoe_bits_to_float((uint32_t)(n - half + 127) << 23);
}

typedef struct logistic {
    float s, c; /* sigmoid(x), and 1 - sigmoid(x) without cancellation */
} logistic;

static inline logistic sigmoid_f(float x)
{
    float y = -x; /* to where 2^n is a normal number: beyond, s is 0 or 1 to the last bit, and c next to nothing */
    y = 88.0f < y ? 88.0f : y;
    y = -87.0f > y ? -87.0f : y;
    const power parts = exp_parts(y);
    const float e = parts.p * fmoe_bits_to_float((parts.n << 23) + 0x3f800000u), s = 1.0f / (1.0f + e);
    return (logistic){s, e * s};
}

/* erfc(z) = t exp(-z^2 + P(t)), t = 1 / (1 + z/2), z >= 0: a Chebyshev fit with relative error 1.2e-7 (Numerical
 * Recipes, 6.2). Used as the normal distribution function: relative accuracy in the far tail too. */
static inline float erfc_positive(float z)
{
    const float t = 1.0f / (1.0f + 0.5f * z);
    float p = 0.17087277f;
    p = p * t - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    p = p * t - 1.26551223f;
    return t * exp_f(p - z * z);
}

static inline float normal_cdf(float x) /* P(X <= x), X standard normal */
{
    const float z = x * 0.707106781f, tail = 0.5f * erfc_positive(z < 0 ? -z : z);
    return z < 0 ? tail : 1.0f - tail;
}

static inline float normal_pdf(float x) { return 0.398942280f * exp_f(-0.5f * x * x); }

typedef struct value { /* f(x) and f'(x) */
    float f, df;
} value;

static inline value silu(float x)
{
    const logistic l = sigmoid_f(x);
    return (value){x * l.s, l.s * (1.0f + x * l.c)};
}

static inline value gelu(float x)
{
    const float cdf = normal_cdf(x);
    return (value){x * cdf, cdf + x * normal_pdf(x)};
}

static inline value gelu_tanh(float x) /* 0.5 x (1 + tanh z) = x sigmoid(2z) */
{
    const float x2 = x * x, z = 1.59576912f * x * (1.0f + 0.044715f * x2);
    const logistic l = sigmoid_f(z);
    return (value){x * l.s, l.s + x * l.s * l.c * 1.59576912f * (1.0f + 0.134145f * x2)};
}

static inline value relu(float x) { return (value){x < 0 ? 0 : x, x > 0 ? 1.0f : 0.0f}; }
static inline value relu2(float x)
{
    const float r = x < 0 ? 0 : x;
    return (value){r * r, 2.0f * r};
}

/* A gated activation's value and its two partial derivatives. */
typedef struct value2 {
    float a, dg, du;
} value2;

#define GATED(name)                                                                                                    \
    static inline value2 gated_##name(float g, float u, float alpha, float limit)                                      \
    {                                                                                                                  \
        (void)alpha;                                                                                                   \
        (void)limit;                                                                                                   \
        const value v = name(g);                                                                                       \
        return (value2){v.f * u, v.df * u, v.f};                                                                       \
    }
GATED(silu)
GATED(gelu)
GATED(gelu_tanh)
GATED(relu)

/* Clamps pass the gradient inside and at their borders, as torch.clamp does. */
static inline float clamp_max(float x, float limit) { return x > limit ? limit : x; }
static inline float clamp(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

static inline value2 gated_clamp(float g, float u, float alpha, float limit)
{
    (void)alpha;
    const value v = silu(clamp_max(g, limit));
    const float uc = clamp(u, limit);
    return (value2){v.f * uc, g > limit ? 0.0f : v.df * uc, u > limit || u < -limit ? 0.0f : v.f};
}

static inline value2 gated_oai(float g, float u, float alpha, float limit)
{
    const float gc = clamp_max(g, limit), uc = clamp(u, limit);
    const logistic l = sigmoid_f(alpha * gc);
    const float glu = gc * l.s, dglu = l.s * (1.0f + alpha * gc * l.c);
    return (value2){(uc + 1.0f) * glu, g > limit ? 0.0f : (uc + 1.0f) * dglu, u > limit || u < -limit ? 0.0f : glu};
}

static inline value2 gated_clamp_out(float g, float u, float alpha, float limit)
{
    (void)alpha;
    const value v = silu(g);
    const float fc = clamp_max(v.f, limit), uc = clamp(u, limit);
    return (value2){fc * uc, v.f > limit ? 0.0f : v.df * uc, u > limit || u < -limit ? 0.0f : fc};
}

/* ---- activations ---- */

/* Operation by operation, every result rounded (FMOE_ROUND_STEPS). */
static inline float oai_steps(int type, float g, float u, float alpha)
{
    const float s = round_to(type, sigmoid_f(round_to(type, alpha * g)).s), glu = round_to(type, g * s);
    return round_to(type, u + 1.0f) * glu;
}

#define STEPS(id, value)                                                                                               \
    case id:                                                                                                           \
        for (int64_t i = 0; i < n; i++) a[i] = round_to(type, value);                                                  \
        return;
#define STEPS_GATED(id, gate, up) STEPS(id, round_to(type, gate) * (up))

static inline __attribute__((always_inline)) void steps_row(int type, const fmoe_act_params *act,
                                                            const float *restrict g, const float *restrict u,
                                                            float *restrict a, int64_t n)
{
    const float alpha = act->alpha, limit = round_to(type, act->limit);
    switch (act->act) {
        STEPS_GATED(FMOE_ACT_SWIGLU, silu(g[i]).f, u[i])
        STEPS_GATED(FMOE_ACT_GEGLU, gelu(g[i]).f, u[i])
        STEPS_GATED(FMOE_ACT_GEGLU_TANH, gelu_tanh(g[i]).f, u[i])
        STEPS_GATED(FMOE_ACT_REGLU, relu(g[i]).f, u[i])
        STEPS_GATED(FMOE_ACT_SWIGLU_CLAMP, silu(clamp_max(g[i], limit)).f, clamp(u[i], limit))
        STEPS_GATED(FMOE_ACT_SWIGLU_CLAMP_OUT, clamp_max(silu(g[i]).f, limit), clamp(u[i], limit))
        STEPS(FMOE_ACT_SWIGLU_OAI, oai_steps(type, clamp_max(g[i], limit), clamp(u[i], limit), alpha))
        STEPS(FMOE_ACT_SILU, silu(u[i]).f)
        STEPS(FMOE_ACT_GELU, gelu(u[i]).f)
        STEPS(FMOE_ACT_GELU_TANH, gelu_tanh(u[i]).f)
        STEPS(FMOE_ACT_RELU, relu(u[i]).f)
        STEPS(FMOE_ACT_RELU2, relu2(u[i]).f)
    default: return;
    }
}

/* m rows, FMOE_NB apart in g and u and `bytes` in a; rows of a may lie pages apart, so those to come are fetched. */
#define FORWARD(id, value)                                                                                             \
    case id:                                                                                                           \
        for (int64_t i = 0; i < m; i++, to += bytes, g += FMOE_NB, u += FMOE_NB) {                                     \
            float wide[FMOE_NB], *const restrict a = bf16 ? wide : (float *)(void *)to;                                \
            if (i + AHEAD < m) __builtin_prefetch(to + AHEAD * bytes, 1, 3);                                           \
            for (int64_t j = 0; j < n; j++) a[j] = value;                                                              \
            if (bf16) NAME(fmoe_store_bf16)(to, wide, n);                                                              \
        }                                                                                                              \
        return;
#define FORWARD_GATED(id, fn) FORWARD(id, fn(g[j], u[j], alpha, limit).a)
#define FORWARD_PLAIN(id, fn) FORWARD(id, fn(u[j]).f)

static inline __attribute__((always_inline)) void act_rows(const fmoe_act_params *act, const float *restrict g,
                                                           const float *restrict u, int64_t m, const int64_t n,
                                                           char *restrict to, int64_t bytes, const bool bf16)
{
    enum { AHEAD = 6 };
    const float alpha = act->alpha, limit = act->limit;
    switch (act->act) {
        FORWARD_GATED(FMOE_ACT_SWIGLU, gated_silu)
        FORWARD_GATED(FMOE_ACT_GEGLU, gated_gelu)
        FORWARD_GATED(FMOE_ACT_GEGLU_TANH, gated_gelu_tanh)
        FORWARD_GATED(FMOE_ACT_REGLU, gated_relu)
        FORWARD_GATED(FMOE_ACT_SWIGLU_CLAMP, gated_clamp)
        FORWARD_GATED(FMOE_ACT_SWIGLU_OAI, gated_oai)
        FORWARD_GATED(FMOE_ACT_SWIGLU_CLAMP_OUT, gated_clamp_out)
        FORWARD_PLAIN(FMOE_ACT_SILU, silu)
        FORWARD_PLAIN(FMOE_ACT_GELU, gelu)
        FORWARD_PLAIN(FMOE_ACT_GELU_TANH, gelu_tanh)
        FORWARD_PLAIN(FMOE_ACT_RELU, relu)
        FORWARD_PLAIN(FMOE_ACT_RELU2, relu2)
    default: return;
    }
}

__attribute__((noinline)) ALL_INLINE void NAME(fmoe_act_forward)(const fmoe_act_params *act, const float *restrict g,
                                                                 const float *restrict u, float *restrict a, int64_t n)
{
    if (act->steps == FMOE_BF16) steps_row(FMOE_BF16, act, g, u, a, n);
    else if (act->steps == FMOE_F16) steps_row(FMOE_F16, act, g, u, a, n);
    else act_rows(act, g, u, 1, n, (char *)a, 0, false);
}

/* Blocks of gate and up are 32 columns wide but for the last, a length the compiler may know; others row by row. */
ALL_INLINE void NAME(fmoe_act_block)(const fmoe_act_params *act, const float *g, const float *u, int64_t m, int64_t n,
                                     void *a, int64_t stride, int dtype)
{
    enum { HALF = FMOE_NB / 2 };
    const bool bf16 = dtype == FMOE_BF16, usual = n == HALF && !act->steps;
    if (usual && bf16) act_rows(act, g, u, m, HALF, a, 2 * stride, true);
    else if (usual) act_rows(act, g, u, m, HALF, a, 4 * stride, false);
    for (int64_t i = 0; i < m && !usual; i++) {
        char *const to = (char *)a + i * stride * (bf16 ? 2 : 4);
        float wide[FMOE_NB];
        NAME(fmoe_act_forward)(act, g + i * FMOE_NB, u + i * FMOE_NB, bf16 ? wide : (float *)(void *)to, n);
        if (bf16) NAME(fmoe_store_bf16)(to, wide, n);
    }
}

/* ---- their gradients ---- */

#define PLAIN(name)                                                                                                    \
    static inline value2 plain_##name(float g, float u, float alpha, float limit)                                      \
    {                                                                                                                  \
        (void)g;                                                                                                       \
        (void)alpha;                                                                                                   \
        (void)limit;                                                                                                   \
        const value v = name(u);                                                                                       \
        return (value2){v.f, 0, v.df};                                                                                 \
    }
PLAIN(silu)
PLAIN(gelu)
PLAIN(gelu_tanh)
PLAIN(relu)
PLAIN(relu2)

/* A row from where it lies, widened into `room` if it is bf16, copied there if it is written over; and room for one, or
 * where an f32 row goes at once. */
static inline const float *row_in(const void *rows, int64_t i, int64_t stride, int64_t n, bool bf16, bool over,
                                  float *room)
{
    if (!bf16 && !over) return (const float *)rows + i * stride;
    if (bf16) NAME(fmoe_load_bf16)(room, (const uint16_t *)rows + i * stride, n);
    else memcpy(room, (const float *)rows + i * stride, (size_t)n * sizeof *room);
    return room;
}

static inline float *row_out(void *rows, int64_t i, int64_t stride, bool bf16, float *room)
{
    return bf16 ? room : (float *)rows + i * stride;
}

static inline void row_done(void *rows, int64_t i, int64_t stride, int64_t n, bool bf16, const float *row)
{
    if (bf16) NAME(fmoe_store_bf16)((uint16_t *)rows + i * stride, row, n);
}

/* Rows lie pages apart, and no core's own prefetcher follows that. */
static inline void fetch_to_come(const void *rows, int64_t i, int64_t stride, int64_t n, bool bf16)
{
    const char *at = (const char *)rows + i * stride * (bf16 ? 2 : 4);
    for (int64_t b = 0; b < n * (bf16 ? 2 : 4); b += 64) __builtin_prefetch(at + b, 1, 3);
}

typedef value2 value2_fn(float g, float u, float alpha, float limit);

#define ONE(i, j)                                                                                                      \
    do {                                                                                                               \
        const value2 v = fn(gated ? g[i] : 0, u[i], alpha, limit);                                                     \
        part[j] += da[i] * v.a;                                                                                        \
        pa[i] = p * v.a;                                                                                               \
        if (gated) dg[i] = p * da[i] * v.dg;                                                                           \
        du[i] = p * da[i] * v.du;                                                                                      \
    } while (0)

static inline __attribute__((always_inline)) float
gradient_row(value2_fn *fn, const bool gated, const fmoe_act_params *act, const int64_t n, const float *restrict g,
             const float *restrict u, const float *restrict da, const float p, float *restrict dg, float *restrict du,
             float *restrict pa)
{
    const float alpha = act->alpha, limit = act->limit;
    float part[16] = {0};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++) ONE(i + j, j);
    for (int j = 0; i + j < n; j++) ONE(i + j, j);
    return add_parts(part);
}

#define GRADIENT(id, gated, fn)                                                                                        \
    case id: return gradient_row(fn, gated, act, n, g, u, da, p, dg, du, pa);

static inline __attribute__((always_inline)) float gradient(const fmoe_act_params *act, const int64_t n, const float *g,
                                                            const float *u, const float *da, float p, float *dg,
                                                            float *du, float *pa)
{
    switch (act->act) {
        GRADIENT(FMOE_ACT_SWIGLU, true, gated_silu)
        GRADIENT(FMOE_ACT_GEGLU, true, gated_gelu)
        GRADIENT(FMOE_ACT_GEGLU_TANH, true, gated_gelu_tanh)
        GRADIENT(FMOE_ACT_REGLU, true, gated_relu)
        GRADIENT(FMOE_ACT_SWIGLU_CLAMP, true, gated_clamp)
        GRADIENT(FMOE_ACT_SWIGLU_OAI, true, gated_oai)
        GRADIENT(FMOE_ACT_SWIGLU_CLAMP_OUT, true, gated_clamp_out)
        GRADIENT(FMOE_ACT_SILU, false, plain_silu)
        GRADIENT(FMOE_ACT_GELU, false, plain_gelu)
        GRADIENT(FMOE_ACT_GELU_TANH, false, plain_gelu_tanh)
        GRADIENT(FMOE_ACT_RELU, false, plain_relu)
        GRADIENT(FMOE_ACT_RELU2, false, plain_relu2)
    default: return 0;
    }
}

/* Blocks are 64 columns wide but for the last, a length the compiler may know. Once for rows of all types: inlined in
 * each of their loops this takes most of the time of compiling the library. */
static __attribute__((noinline)) ALL_INLINE float any_gradient(const fmoe_act_params *act, int64_t n, const float *g,
                                                               const float *u, const float *da, float p, float *dg,
                                                               float *du, float *pa)
{
    return n == FMOE_NB ? gradient(act, FMOE_NB, g, u, da, p, dg, du, pa) : gradient(act, n, g, u, da, p, dg, du, pa);
}

static inline __attribute__((always_inline)) void gradients(const fmoe_act_params *act, const fmoe_act_rows *x,
                                                            const int64_t n, const bool h_bf16, const bool bf16)
{
    enum { AHEAD = 6 };
    const bool gated = act->act < FMOE_ACT_SILU, over = x->du == x->u;
    for (int64_t r = 0; r < x->m; r++) {
        float room[5][FMOE_NB];
        if (r + AHEAD < x->m) {
            if (gated) fetch_to_come(x->g, r + AHEAD, x->h_stride, n, h_bf16);
            if (gated && !over) fetch_to_come(x->dg, r + AHEAD, x->dh_stride, n, bf16);
            fetch_to_come(x->u, r + AHEAD, x->h_stride, n, h_bf16);
            if (!over) fetch_to_come(x->du, r + AHEAD, x->dh_stride, n, bf16);
            fetch_to_come(x->pa, r + AHEAD, x->pa_stride, n, bf16);
        }
        const float *g = gated ? row_in(x->g, r, x->h_stride, n, h_bf16, over, room[0]) : NULL;
        const float *u = row_in(x->u, r, x->h_stride, n, h_bf16, over, room[1]);
        float *dg = gated ? row_out(x->dg, r, x->dh_stride, bf16, room[2]) : NULL;
        float *du = row_out(x->du, r, x->dh_stride, bf16, room[3]),
              *pa = row_out(x->pa, r, x->pa_stride, bf16, room[4]);
        x->dot[r] = any_gradient(act, n, g, u, x->da + r * FMOE_NB, x->p[r], dg, du, pa);
        if (gated) row_done(x->dg, r, x->dh_stride, n, bf16, dg);
        row_done(x->du, r, x->dh_stride, n, bf16, du);
        row_done(x->pa, r, x->pa_stride, n, bf16, pa);
    }
}

ALL_INLINE void NAME(fmoe_act_backward)(const fmoe_act_params *act, const fmoe_act_rows *x)
{
    const bool h_bf16 = x->h_type == FMOE_BF16, bf16 = x->type == FMOE_BF16;
    if (x->n != FMOE_NB || (bf16 && !h_bf16)) gradients(act, x, x->n, h_bf16, bf16);
    else if (bf16) gradients(act, x, FMOE_NB, true, true);
    else if (h_bf16) gradients(act, x, FMOE_NB, true, false);
    else gradients(act, x, FMOE_NB, false, false);
}
