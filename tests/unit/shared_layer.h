/* SPDX-License-Identifier: Apache-2.0
 *
 * shared_layer.h - a layer that many threads and processes can run, and what one thread makes of it. */
#ifndef FMOE_SHARED_LAYER_H
#define FMOE_SHARED_LAYER_H

#include <pthread.h>
#include <stdatomic.h>

#include "calls.h"

enum { T = 24, H = 33, I = 20, E = 5, K = 2 };

typedef struct layer { /* shared, read only */
    fmoe_desc d;
    fmoe_plan plan;
    fmoe_tensor *x, *ids, *p, *w1, *w2, *dout;
} layer;

typedef struct results { /* each thread's own */
    fmoe_tensor *out, *dx, *dp, *dw1, *dw2;
    void *workspace, *saved;
    size_t workspace_bytes, saved_bytes;
} results;

static inline layer make_layer(int dtype, int threads)
{
    layer l = {.d = FMOE_DESC_INIT};
    l.d.op = FMOE_OP_EXPERTS;
    l.d.dtype = dtype;
    l.d.H = H, l.d.I = I, l.d.E = E, l.d.k = K;
    l.d.threads = threads;
    REQUIRE(fmoe_plan_create(&l.plan, &l.d) == FMOE_OK);
    l.x = tensor_random(tensor_new(dtype, SHAPE(T, H)), 1);
    l.dout = tensor_random(tensor_new(dtype, SHAPE(T, H)), 1);
    l.p = tensor_random(tensor_new(FMOE_F32, SHAPE(T, K)), 1);
    l.ids = tensor_random_int(tensor_new(I32, SHAPE(T, K)), E);
    l.w1 = tensor_random(tensor_new(dtype, SHAPE(E, 2 * I, H)), 0.5);
    l.w2 = tensor_random(tensor_new(dtype, SHAPE(E, H, I)), 0.5);
    return l;
}

static inline results make_results(const layer *l)
{
    const int f = l->d.dtype;
    results r = {.out = tensor_new(f, SHAPE(T, H)),
                 .dx = tensor_new(f, SHAPE(T, H)),
                 .dp = tensor_new(FMOE_F32, SHAPE(T, K)),
                 .dw1 = tensor_new(f, SHAPE(E, 2 * I, H)),
                 .dw2 = tensor_new(f, SHAPE(E, H, I))};
    size_t a, b;
    REQUIRE(fmoe_workspace_bytes(l->plan, FMOE_FORWARD, T, &a) == FMOE_OK &&
            fmoe_workspace_bytes(l->plan, FMOE_BACKWARD, T, &b) == FMOE_OK);
    REQUIRE(fmoe_saved_bytes(l->plan, T, &r.saved_bytes) == FMOE_OK);
    r.workspace_bytes = a > b ? a : b;
    r.workspace = test_alloc(r.workspace_bytes);
    r.saved = test_alloc(r.saved_bytes);
    return r;
}

static inline fmoe_status run_layer(const layer *l, fmoe_plan plan, const results *r)
{
    fmoe_experts_args a = {.size = sizeof a,
                           .x = l->x,
                           .ids = l->ids,
                           .weights = l->p,
                           .w = {.w1 = l->w1, .w2 = l->w2},
                           .out = r->out,
                           .saved = r->saved,
                           .saved_bytes = r->saved_bytes};
    fmoe_run run = FMOE_RUN_INIT;
    run.workspace = r->workspace;
    run.workspace_bytes = r->workspace_bytes;
    const fmoe_status status = fmoe_experts_forward(plan, &a, &run);
    if (status != FMOE_OK) return status;
    a.out = NULL;
    a.dout = l->dout, a.dx = r->dx, a.dweights = r->dp, a.dw = (fmoe_weights){.w1 = r->dw1, .w2 = r->dw2};
    return fmoe_experts_backward(plan, &a, &run);
}

static inline int same_bits(const fmoe_tensor *a, const fmoe_tensor *b)
{
    return !memcmp(a->data, b->data, (size_t)tensor_count(a) * fmoe_dtype_size(fmoe_tensor_dtype(a)));
}

static inline int same_results(const results *a, const results *b)
{
    return same_bits(a->out, b->out) && same_bits(a->dx, b->dx) && same_bits(a->dp, b->dp) &&
           same_bits(a->dw1, b->dw1) && same_bits(a->dw2, b->dw2);
}

static inline results alone(const layer *l) /* one thread */
{
    const results r = make_results(l);
    fmoe_desc d = l->d;
    d.threads = 1;
    d.parallel = NULL;
    fmoe_plan plan;
    REQUIRE(fmoe_plan_create(&plan, &d) == FMOE_OK);
    CHECK_STATUS(run_layer(l, plan, &r), FMOE_OK);
    fmoe_plan_destroy(&plan);
    return r;
}

/* ---- many threads ---- */

typedef struct worker {
    pthread_t thread;
    const layer *l;
    const results *want;
    results mine;
    fmoe_plan plan;
    _Atomic int *go;
    int runs, wrong, refused;
} worker;

static inline void *work(void *arg)
{
    worker *w = arg;
    for (int i = 0; i < w->runs; i++) {
        const fmoe_status status = run_layer(w->l, w->plan, &w->mine);
        if (status == FMOE_ERR_HANDLE) w->refused++;
        else if (status != FMOE_OK || !same_results(&w->mine, w->want)) w->wrong++;
        if (w->go) atomic_fetch_add(w->go, 1);
    }
    return NULL;
}

/* A table of handles with one slot free: creating looks through all of it, and every plan gets the slot of the last. */
static inline fmoe_plan *fill_table(const fmoe_desc *d, int *n)
{
    enum { MOST = 20000 };
    fmoe_plan *plans = test_alloc(MOST * sizeof *plans);
    for (*n = 0; *n < MOST && fmoe_plan_create(&plans[*n], d) == FMOE_OK;) ++*n;
    REQUIRE(*n > 0 && *n < MOST && fmoe_plan_destroy(&plans[--*n]) == FMOE_OK);
    return plans;
}

static inline void empty_table(fmoe_plan *plans, int n)
{
    for (int i = 0; i < n; i++) CHECK_STATUS(fmoe_plan_destroy(&plans[i]), FMOE_OK);
}

static inline void *fight_for_a_slot(void *arg)
{
    const fmoe_desc *d = arg;
    for (int i = 0; i < 4000; i++) {
        fmoe_plan plan;
        size_t bytes;
        const fmoe_status status = fmoe_plan_create(&plan, d);
        if (status == FMOE_ERR_NOMEM) continue; /* the other has it */
        if (status != FMOE_OK || fmoe_saved_bytes(plan, 3, &bytes) != FMOE_OK || fmoe_plan_destroy(&plan) != FMOE_OK)
            return arg;
    }
    return NULL;
}

#endif
