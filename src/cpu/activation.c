/* SPDX-License-Identifier: Apache-2.0
 * activation.c - the activation as an operation of its own, in pieces of 64 columns through f32. */
#include "cpu/cpu.h"

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

static void act_rows(void *arg, int64_t begin, int64_t end)
{
    const act_ctx *x = arg;
    const fmoe_kernels *k = &fmoe_cpu(x->p)->k;
    const int dtype = x->p->d.dtype;
    float g[FMOE_NB], u[FMOE_NB], a[FMOE_NB], da[FMOE_NB], dg[FMOE_NB], du[FMOE_NB], dot;
    const float one = 1;
    fmoe_act_rows row = {.m = 1, .g = g, .u = u, .dg = dg, .du = du, .pa = a, .da = da, .p = &one, .dot = &dot};
    row.h_type = row.type = FMOE_F32;
    for (int64_t r = begin; r < end; r++)
        for (int64_t n0 = 0; n0 < x->p->d.I; n0 += FMOE_NB) {
            const int64_t n = fmoe_min(FMOE_NB, x->p->d.I - n0);
            load_h(x, r, n0, n, g, u);
            if (!x->backward) {
                k->act_forward(&x->act, g, u, a, n);
                fmoe_store_row(k, dtype, at(x->a->a, r, n0), a, n);
                continue;
            }
            fmoe_load_row(k, dtype, da, at(x->a->da, r, n0), n);
            row.n = n;
            k->act_backward(&x->act, &row);
            store_dh(x, r, n0, n, dg, du);
        }
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
