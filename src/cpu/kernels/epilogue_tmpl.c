/* SPDX-License-Identifier: Apache-2.0
 *
 * epilogue_tmpl.c - what epilogues do with blocks of sums, up to 64 columns wide: activations and their gradients,
 * storing, adding to the sums of tokens. Compiled once per ISA level, by vectors of that level (vec.h).
 *
 * Rows that are not whole steps pass through the same loops, in rows that are: an element's bits do not depend on where
 * it stands. */
#include "cpu/kernels/activations.h"
#include "cpu/kernels/kernels.h"

/* ---- forward ---- */

static int64_t whole_steps(int64_t n) { return (n + STEP - 1) / STEP * STEP; }

/* Rows are pages apart, and no core's own prefetcher follows that. */
enum { AHEAD = 6 };
INLINE void prefetch_step(const char *p, int64_t element)
{
    for (int64_t b = 0; b < STEP * element; b += 64) __builtin_prefetch(p + b, 1, 3);
}

typedef struct act_block {
    const float *g, *u;
    int64_t m, n;
    char *a;
    int64_t stride; /* bytes */
    int type;
} act_block;

INLINE void forward(act_fn *fn, const bool gated, const params p, const act_block *x)
{
    const int64_t element = bytes_of(x->type);
    for (int64_t i = 0; i < x->m; i++) {
        char *const a = x->a + i * x->stride;
        const float *const u = x->u + i * FMOE_NB, *const g = gated ? x->g + i * FMOE_NB : u;
        const int64_t ahead = i + AHEAD < x->m ? AHEAD * x->stride : 0;
        for (int64_t j = 0; j < x->n; j += STEP) {
            prefetch_step(a + ahead + j * element, element);
            const vec2 gj = load2(FMOE_F32, g + j), uj = load2(FMOE_F32, u + j);
            store2(x->type, a + j * element, (vec2){{fn(gj.v[0], uj.v[0], &p).a, fn(gj.v[1], uj.v[1], &p).a}}, false);
        }
    }
}

INLINE void forward_any(const int act, const params p, const act_block *x)
{
#define FORWARD(id, gated, fn)                                                                                         \
    case id: forward(fn, gated, p, x); return;
    switch (act) {
        ACTS(FORWARD)
    default: return;
    }
}

static __attribute__((noinline)) void NAME(forward_rows)(const fmoe_act_params *act, const act_block *x)
{
    forward_any(act->act, (params){act->alpha, act->limit, 0}, x);
}

static __attribute__((noinline)) void NAME(forward_in_steps)(const fmoe_act_params *act, const act_block *x)
{
    forward_any(act->act, (params){act->alpha, rounded(act->steps, splat(act->limit))[0], act->steps}, x);
}

void NAME(fmoe_act_block)(const fmoe_act_params *act, const float *g, const float *u, int64_t m, int64_t n, void *a,
                          int64_t stride, int type)
{
    void (*const rows)(const fmoe_act_params *, const act_block *) =
        act->steps ? NAME(forward_in_steps) : NAME(forward_rows);
    const act_block x = {g, u, m, n, a, stride * bytes_of(type), type};
    if (n % STEP == 0) {
        rows(act, &x);
        return;
    }
    float gate[FMOE_NB] = {0}, up[FMOE_NB] = {0}, out[FMOE_NB];
    const act_block row = {gate, up, 1, whole_steps(n), (char *)out, 0, type};
    for (int64_t i = 0; i < m; i++) {
        if (act->act < FMOE_ACT_SILU) memcpy(gate, g + i * FMOE_NB, (size_t)n * sizeof *g);
        memcpy(up, u + i * FMOE_NB, (size_t)n * sizeof *u);
        rows(act, &row);
        memcpy(x.a + i * x.stride, out, (size_t)(n * bytes_of(type)));
    }
}

/* ---- backward ---- */

INLINE void backward(act_fn *fn, const bool gated, const fmoe_act_params *act, const fmoe_act_rows *x)
{
    const params p = {act->alpha, act->limit, 0};
    const int h_type = x->h_type, type = x->type;
    const int64_t n = x->n, he = bytes_of(h_type), e = bytes_of(type);
    const int64_t h_stride = x->h_stride * he, dh_stride = x->dh_stride * e, pa_stride = x->pa_stride * e;
    const char *g = x->g, *u = x->u;
    char *dg = x->dg, *du = x->du, *pa = x->pa;
    for (int64_t r = 0; r < x->m; r++, u += h_stride, du += dh_stride, pa += pa_stride) {
        const int64_t ahead = r + AHEAD < x->m ? AHEAD : 0;
        vec2 dot = {{{0}, {0}}};
        for (int64_t j = 0; j < n; j += STEP) {
            if (gated) prefetch_step(g + ahead * h_stride + j * he, he);
            if (gated && dg != g) prefetch_step(dg + ahead * dh_stride + j * e, e);
            prefetch_step(u + ahead * h_stride + j * he, he);
            if (du != u) prefetch_step(du + ahead * dh_stride + j * e, e);
            prefetch_step(pa + ahead * pa_stride + j * e, e);
            const vec2 uj = load2(h_type, u + j * he), gj = gated ? load2(h_type, g + j * he) : uj;
            const vec2 da = load2(FMOE_F32, x->da + r * FMOE_NB + j);
            vec2 to_g, to_u, a;
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                const value2 v = fn(gj.v[i], uj.v[i], &p);
                const vec scaled = x->p[r] * da.v[i];
                dot.v[i] += da.v[i] * v.a;
                a.v[i] = x->p[r] * v.a;
                to_g.v[i] = scaled * v.dg;
                to_u.v[i] = scaled * v.du;
            }
            if (gated) store2(type, dg + j * e, to_g, false);
            store2(type, du + j * e, to_u, false);
            store2(type, pa + j * e, a, false);
        }
        x->dot[r] = sum_of(dot.v[0] + dot.v[1]);
        if (!gated) continue;
        g += h_stride;
        dg += dh_stride;
    }
}

static __attribute__((noinline)) void NAME(backward_rows)(const fmoe_act_params *act, const fmoe_act_rows *x)
{
#define BACKWARD(id, gated, fn)                                                                                        \
    case id: backward(fn, gated, act, x); return;
    switch (act->act) {
        ACTS(BACKWARD)
    default: return;
    }
}

void NAME(fmoe_act_backward)(const fmoe_act_params *act, const fmoe_act_rows *x)
{
    if (x->n % STEP == 0) {
        NAME(backward_rows)(act, x);
        return;
    }
    const bool gated = act->act < FMOE_ACT_SILU;
    const int64_t he = bytes_of(x->h_type), e = bytes_of(x->type);
    const size_t h_bytes = (size_t)(x->n * he), bytes = (size_t)(x->n * e);
    float g[FMOE_NB] = {0}, u[FMOE_NB] = {0}, da[FMOE_NB] = {0}, dg[FMOE_NB], du[FMOE_NB], pa[FMOE_NB];
    for (int64_t r = 0; r < x->m; r++) {
        const int64_t h_at = r * x->h_stride * he, dh_at = r * x->dh_stride * e;
        if (gated) memcpy(g, (const char *)x->g + h_at, h_bytes);
        memcpy(u, (const char *)x->u + h_at, h_bytes);
        memcpy(da, x->da + r * FMOE_NB, (size_t)x->n * sizeof *da);
        const fmoe_act_rows row = {1, whole_steps(x->n), g,       u,  dg,       du,        pa, 0, 0,
                                   0, x->h_type,         x->type, da, x->p + r, x->dot + r};
        NAME(backward_rows)(act, &row);
        if (gated) memcpy((char *)x->dg + dh_at, dg, bytes);
        memcpy((char *)x->du + dh_at, du, bytes);
        memcpy((char *)x->pa + r * x->pa_stride * e, pa, bytes);
    }
}

/* ---- blocks of sums to memory ---- */

/* Nontemporal only where whole lines are written. A worker puts a fence after all of its stores (parallel.c). */
INLINE void store_block(const int type, char *to, int64_t stride, const float *c, int64_t m, int64_t n,
                        bool nontemporal)
{
    const int64_t bytes = bytes_of(type);
    nontemporal =
        nontemporal && n % STEP == 0 && n * bytes % 64 == 0 && (uintptr_t)to % 64 == 0 && stride * bytes % 64 == 0;
    for (; m > 0; m--, to += stride * bytes, c += FMOE_NB)
        if (nontemporal)
            for (int64_t j = 0; j < n; j += STEP) store2(type, to + j * bytes, load2(FMOE_F32, c + j), true);
        else convert(type, to, FMOE_F32, c, n);
}

#define STORE_BLOCK(name, type)                                                                                        \
    void NAME(name)(void *dst, int64_t stride, const float *c, int64_t m, int64_t n, bool nontemporal)                 \
    {                                                                                                                  \
        store_block(type, dst, stride, c, m, n, nontemporal);                                                          \
    }
STORE_BLOCK(fmoe_store_block_f32, FMOE_F32)
STORE_BLOCK(fmoe_store_block_bf16, FMOE_BF16)
STORE_BLOCK(fmoe_store_block_f16, FMOE_F16)

/* ---- sums of tokens ---- */

void NAME(fmoe_add_rows)(float *sums, const int64_t *token, int64_t first, const float *p, const float *c, int64_t rows,
                         int64_t n)
{
    for (int64_t r = 0; r < rows; r++, c += FMOE_NB) {
        float *const to = sums + (token[r] - first) * FMOE_NB;
        const float *const next = sums + (token[fmoe_min(r + AHEAD, rows - 1)] - first) * FMOE_NB;
        int64_t j = 0;
        for (; j + LANES <= n; j += LANES) {
            __builtin_prefetch(next + j, 1, 3); /* sums of many columns do not stay in L2 */
            put(to + j, load(to + j) + p[r] * load(c + j), false);
        }
        for (; j < n; j++) to[j] += p[r] * c[j];
    }
}
