/* SPDX-License-Identifier: Apache-2.0
 * activation.c - the activation as an operation of its own, in blocks of 64 columns through f32. */
#include "cpu/ops/ops.h"

enum { GRAIN = 16 };

typedef struct act_ctx {
    const fmoe_plan_impl *p;
    const fmoe_activation_args *a;
    fmoe_act_params act;
    bool backward;
} act_ctx;

static char *at(const fmoe_tensor *t, int64_t r, int64_t column)
{
    return (char *)fmoe_data(t) + (r * fmoe_stride(t, 0) + column) * (int64_t)fmoe_dtype_size(fmoe_tensor_dtype(t));
}

/* Gate and up of columns [n0, n0+n) of row r, whichever way h stores them. */
static void load_h(const act_ctx *x, int64_t r, int64_t n0, int64_t n, float *g, float *u)
{
    const fmoe_kernels *k = &fmoe_cpu(x->p)->k;
    const int dtype = x->p->d.dtype;
    if (!x->p->gated) {
        fmoe_load_row(k, dtype, u, at(x->a->h, r, n0), n);
    } else if (x->p->d.flags & FMOE_INTERLEAVED) {
        float both[2 * FMOE_NB];
        fmoe_load_row(k, dtype, both, at(x->a->h, r, 2 * n0), 2 * n);
        for (int64_t i = 0; i < n; i++) {
            g[i] = both[2 * i];
            u[i] = both[2 * i + 1];
        }
    } else {
        fmoe_load_row(k, dtype, g, at(x->a->h, r, n0), n);
        fmoe_load_row(k, dtype, u, at(x->a->h, r, x->p->d.I + n0), n);
    }
}

static void store_dh(const act_ctx *x, int64_t r, int64_t n0, int64_t n, const float *dg, const float *du)
{
    const fmoe_kernels *k = &fmoe_cpu(x->p)->k;
    const int dtype = x->p->d.dtype;
    if (!x->p->gated) {
        fmoe_store_row(k, dtype, at(x->a->dh, r, n0), du, n);
    } else if (x->p->d.flags & FMOE_INTERLEAVED) {
        float both[2 * FMOE_NB];
        for (int64_t i = 0; i < n; i++) {
            both[2 * i] = dg[i];
            both[2 * i + 1] = du[i];
        }
        fmoe_store_row(k, dtype, at(x->a->dh, r, 2 * n0), both, 2 * n);
    } else {
        fmoe_store_row(k, dtype, at(x->a->dh, r, n0), dg, n);
        fmoe_store_row(k, dtype, at(x->a->dh, r, x->p->d.I + n0), du, n);
    }
}

/* Columns [n0, n0+n) of rows [r, r+m). */
static void act_block(const act_ctx *x, int64_t r, int64_t m, int64_t n0, int64_t n)
{
    const fmoe_kernels *k = &fmoe_cpu(x->p)->k;
    const int dtype = x->p->d.dtype;
    float g[GRAIN][FMOE_NB], u[GRAIN][FMOE_NB], a[GRAIN][FMOE_NB], da[GRAIN][FMOE_NB], p[GRAIN], dot[GRAIN];
    for (int64_t i = 0; i < m; i++) {
        load_h(x, r + i, n0, n, g[i], u[i]);
        if (x->backward) fmoe_load_row(k, dtype, da[i], at(x->a->da, r + i, n0), n);
        p[i] = 1;
    }
    if (x->backward) { /* dh over h, and nobody reads a */
        fmoe_act_rows rows = {
            .m = m, .n = n, .g = g, .u = u, .dg = g, .du = u, .pa = a, .da = da[0], .p = p, .dot = dot};
        rows.h_stride = rows.dh_stride = FMOE_NB;
        rows.h_type = rows.type = FMOE_F32;
        k->act_backward(&x->act, &rows);
    } else {
        k->act_block(&x->act, g[0], u[0], m, n, a, FMOE_NB, FMOE_F32);
    }
    for (int64_t i = 0; i < m; i++) {
        if (x->backward) store_dh(x, r + i, n0, n, g[i], u[i]);
        else fmoe_store_row(k, dtype, at(x->a->a, r + i, n0), a[i], n);
    }
}

static void act_rows(void *arg, int64_t begin, int64_t end)
{
    const act_ctx *x = arg;
    const int64_t I = x->p->d.I;
    for (int64_t r = begin; r < end; r += GRAIN)
        for (int64_t n0 = 0; n0 < I; n0 += FMOE_NB)
            act_block(x, r, fmoe_min(GRAIN, end - r), n0, fmoe_min(FMOE_NB, I - n0));
}

static fmoe_status run_activation(const fmoe_plan_impl *p, const fmoe_activation_args *a, bool backward)
{
    act_ctx ctx = {p, a, fmoe_act_of(p), backward};
    fmoe_for_rows(p, a->h->shape[0], GRAIN, act_rows, &ctx);
    return FMOE_OK;
}

fmoe_status fmoe_cpu_activation_forward(const fmoe_plan_impl *p, const fmoe_activation_args *a, const fmoe_run *run)
{
    (void)run;
    return run_activation(p, a, false);
}

fmoe_status fmoe_cpu_activation_backward(const fmoe_plan_impl *p, const fmoe_activation_args *a, const fmoe_run *run)
{
    (void)run;
    return run_activation(p, a, true);
}
