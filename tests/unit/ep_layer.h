/* SPDX-License-Identifier: Apache-2.0
 *
 * ep_layer.h - drawn layers over ranks: what one process computes with the tokens of all ranks, the share of each rank,
 * and the comparison. Every tensor is made before ranks run, so that they may be threads; ranks that are processes draw
 * the same layer from the same seed. */
#ifndef FMOE_EP_LAYER_H
#define FMOE_EP_LAYER_H

#include "fusedmoe_ep.h"
#include "tensors.h"

enum { EP_RANKS = 8 };
static int ep_multiple_h = 1, ep_multiple_i = 1; /* of H and I: kernels of a device want them */

typedef struct ep_layer {
    fmoe_desc d;
    int ranks, p_type, list, mode, chunks, phases;
    int64_t T[EP_RANKS], at[EP_RANKS + 1];
    int32_t expert[64], rank[64];
    int64_t placements; /* 0: the default map */
    fmoe_tensor *x, *ids, *p, *dout, *out, *dx, *dp;
    fmoe_tensor *w[8], *dw[8]; /* w1, w2, b1, b2, lora_a1, lora_b1, lora_a2, lora_b2, or NULL */
} ep_layer;

typedef struct ep_rank {
    fmoe_ep_desc desc;
    fmoe_ep_args args;
    fmoe_tensor *out, *dx, *dp, *dw[8];
    int phases;
    fmoe_status status;
    char error[512];
    int64_t n_local;
    int32_t local[64];
    fmoe_ep_stats stats;
} ep_rank;

static inline void ep_set_weights(fmoe_weights *w, fmoe_tensor *const *t, int list, int gated, int64_t I)
{
    if (list) {
        const int64_t n = t[0]->shape[0];
        if (gated) w->gate = tensor_slices(tensor_view(t[0], 1, 0, I, 1));
        w->up = tensor_slices(tensor_view(t[0], 1, gated ? I : 0, I, 1));
        w->down = tensor_slices(t[1]);
        if (!n) w->gate = w->up = w->down = NULL;
    } else {
        w->w1 = t[0], w->w2 = t[1], w->b1 = t[2], w->b2 = t[3];
    }
    w->lora_a1 = t[4], w->lora_b1 = t[5], w->lora_a2 = t[6], w->lora_b2 = t[7];
}

/* The shapes of w1, w2, b1, b2 and the factors of n experts; NULL where the layer has none. */
static inline void ep_weights(const ep_layer *l, int64_t n, int dtype, fmoe_tensor **t)
{
    const fmoe_desc *d = &l->d;
    const int64_t hc = d->act < FMOE_ACT_SILU ? 2 * d->I : d->I;
    const int bias = (d->flags & FMOE_BIAS) != 0;
    t[0] = tensor_new(dtype, SHAPE(n, hc, d->H));
    t[1] = tensor_new(dtype, SHAPE(n, d->H, d->I));
    t[2] = bias ? tensor_new(dtype, SHAPE(n, hc)) : NULL;
    t[3] = bias ? tensor_new(dtype, SHAPE(n, d->H)) : NULL;
    t[4] = d->rank1 ? tensor_new(dtype, SHAPE(n, d->rank1, d->H)) : NULL;
    t[5] = d->rank1 ? tensor_new(dtype, SHAPE(n, hc, d->rank1)) : NULL;
    t[6] = d->rank2 ? tensor_new(dtype, SHAPE(n, d->rank2, d->I)) : NULL;
    t[7] = d->rank2 ? tensor_new(dtype, SHAPE(n, d->H, d->rank2)) : NULL;
}

static inline void ep_one_process(ep_layer *l)
{
    const fmoe_desc *d = &l->d;
    const int64_t T = l->at[l->ranks];
    fmoe_plan plan = 0;
    fmoe_run run = FMOE_RUN_INIT;
    fmoe_experts_args a = {.size = sizeof a, .x = l->x, .ids = l->ids, .weights = l->p, .out = l->out, .dout = l->dout};
    size_t back = 0;
    CHECK_STATUS(fmoe_plan_create(&plan, d), FMOE_OK);
    REQUIRE(plan);
    CHECK_STATUS(fmoe_workspace_bytes(plan, FMOE_FORWARD, T, &run.workspace_bytes), FMOE_OK);
    CHECK_STATUS(fmoe_workspace_bytes(plan, FMOE_BACKWARD, T, &back), FMOE_OK);
    CHECK_STATUS(fmoe_saved_bytes(plan, T, &a.saved_bytes), FMOE_OK);
    if (back > run.workspace_bytes) run.workspace_bytes = back;
    run.workspace = test_alloc(run.workspace_bytes);
    a.saved = test_alloc(a.saved_bytes + 256); /* aligned as a device wants it */
    a.saved = (char *)a.saved + (256 - (uintptr_t)a.saved % 256) % 256;
    ep_set_weights(&a.w, l->w, l->list, d->act < FMOE_ACT_SILU, d->I);
    CHECK_STATUS(fmoe_experts_forward(plan, &a, &run), FMOE_OK);
    a.dx = l->dx;
    a.dweights = l->dp;
    ep_set_weights(&a.dw, l->dw, l->list, d->act < FMOE_ACT_SILU, d->I);
    CHECK_STATUS(fmoe_experts_backward(plan, &a, &run), FMOE_OK);
    fmoe_plan_destroy(&plan);
}

/* Sizes as a caller may have them: odd ones, ranks without tokens or experts, all tokens to one expert, duplicates,
 * marks. */
static inline ep_layer *ep_draw(int ranks, int dtype, int mode)
{
    static const int acts[] = {FMOE_ACT_SWIGLU, FMOE_ACT_SWIGLU, FMOE_ACT_GEGLU, FMOE_ACT_SWIGLU_OAI, FMOE_ACT_RELU2};
    ep_layer *l = test_alloc(sizeof *l);
    fmoe_desc *d = &l->d;
    *d = FMOE_DESC_INIT;
    d->op = FMOE_OP_EXPERTS;
    d->dtype = dtype;
    d->H = ep_multiple_h * (1 + test_below(90 / fmoe_min(ep_multiple_h, 30)));
    d->I = ep_multiple_i * (1 + test_below(70 / ep_multiple_i));
    d->device.type = TEST_DEVICE;
    d->E = 1 + test_below(9);
    d->k = 1 + test_below(4);
    d->act = acts[test_below(5)];
    d->threads = 1;
    d->flags = FMOE_SKIP_NEG1;
    l->list = test_below(4) == 0;
    if (!l->list && test_below(3) == 0) d->flags |= FMOE_BIAS;
    if (!l->list && test_below(4) == 0 && d->act < FMOE_ACT_SILU) d->flags |= FMOE_INTERLEAVED;
    if (test_below(4) == 0) d->flags |= FMOE_RECOMPUTE;
    if (test_below(4) == 0 && TEST_DEVICE == FMOE_CPU) d->flags |= FMOE_ROUND_STEPS;
    if (test_below(4) == 0) d->flags |= FMOE_REUSE_SAVED;
    if (test_below(3) == 0) {
        d->rank1 = test_below(4);
        d->rank2 = 1 + test_below(4);
    }
    l->ranks = ranks;
    l->mode = mode;
    l->chunks = test_below(2) ? 1 : 1 + (int)test_below(4);
    l->phases = test_below(2) == 0;
    l->p_type = test_below(2) ? FMOE_F32 : dtype;
    for (int r = 0; r < ranks; r++) {
        l->T[r] = test_below(5) == 0 ? 0 : test_below(40);
        l->at[r + 1] = l->at[r] + l->T[r];
    }
    if (test_below(2)) /* any rank may have any experts, or none */
        for (int64_t e = 0; e < d->E; e++) {
            l->expert[l->placements] = (int32_t)(d->E - 1 - e);
            l->rank[l->placements++] = (int32_t)test_below(ranks);
        }
    const int64_t T = l->at[ranks];
    l->x = tensor_random(tensor_new(dtype, SHAPE(T, d->H)), 1);
    l->dout = tensor_random(tensor_new(dtype, SHAPE(T, d->H)), 1);
    l->p = tensor_random(tensor_new(l->p_type, SHAPE(T, d->k)), 1);
    l->ids = tensor_random_int(tensor_new(test_below(2) ? I32 : I64, SHAPE(T, d->k)), test_below(4) == 0 ? 1 : d->E);
    for (int64_t i = 0; i < T * d->k; i++)
        if (test_below(10) == 0) tensor_set(l->ids, i, -1);
    l->out = tensor_new(dtype, SHAPE(T, d->H));
    l->dx = tensor_new(dtype, SHAPE(T, d->H));
    l->dp = tensor_new(l->p_type, SHAPE(T, d->k));
    ep_weights(l, d->E, dtype, l->w);
    ep_weights(l, d->E, dtype, l->dw);
    for (int i = 0; i < 8; i++)
        if (l->w[i]) tensor_random(l->w[i], 0.3);
    return l;
}

static inline int32_t ep_owner(const ep_layer *l, int64_t e) /* without replicas */
{
    for (int64_t i = 0; i < l->placements; i++)
        if (l->expert[i] == e) return l->rank[i];
    for (int32_t r = 0; r < l->ranks; r++)
        if (e < (r + 1) * l->d.E / l->ranks) return r;
    return -1;
}

static inline void ep_copy_expert(fmoe_tensor *to, int64_t i, const fmoe_tensor *from, int64_t e)
{
    const int64_t n = tensor_count(from) / from->shape[0];
    for (int64_t j = 0; j < n; j++) tensor_set(to, i * n + j, tensor_get(from, e * n + j));
}

/* The share of rank r; exchange and desc.layer are set by the caller. */
static inline ep_rank *ep_share(const ep_layer *l, int r, const fmoe_exchange *exchange)
{
    const fmoe_desc *d = &l->d;
    const int64_t T = l->T[r], at = l->at[r];
    ep_rank *s = test_alloc(sizeof *s);
    s->desc =
        (fmoe_ep_desc){.size = sizeof s->desc, .layer = d, .exchange = exchange, .mode = l->mode, .chunks = l->chunks};
    s->desc.timeout_ms = 20000;
    if (l->placements) {
        s->desc.expert = l->expert;
        s->desc.rank = l->rank;
        s->desc.placements = l->placements;
    }
    for (int64_t i = 0; i < (l->placements ? l->placements : d->E); i++) {
        const int64_t e = l->placements ? l->expert[i] : i;
        if ((l->placements ? l->rank[i] : ep_owner(l, e)) == r) s->local[s->n_local++] = (int32_t)e;
    }
    fmoe_tensor *w[8];
    ep_weights(l, s->n_local, d->dtype, w);
    ep_weights(l, s->n_local, d->dtype, s->dw);
    for (int i = 0; i < 8; i++)
        for (int64_t j = 0; w[i] && j < s->n_local; j++) ep_copy_expert(w[i], j, l->w[i], s->local[j]);
    s->phases = l->phases;
    s->args = FMOE_EP_ARGS_INIT;
    s->args.x = tensor_view(l->x, 0, at, T, 1);
    s->args.ids = tensor_view(l->ids, 0, at, T, 1);
    s->args.weights = tensor_view(l->p, 0, at, T, 1);
    s->args.dout = tensor_view(l->dout, 0, at, T, 1);
    s->args.out = s->out = tensor_padded(d->dtype, T, d->H, test_below(3));
    s->args.dx = s->dx = tensor_new(d->dtype, SHAPE(T, d->H));
    s->args.dweights = s->dp = tensor_new(l->p_type, SHAPE(T, d->k));
    ep_set_weights(&s->args.w, w, l->list, d->act < FMOE_ACT_SILU, d->I);
    ep_set_weights(&s->args.dw, s->dw, l->list, d->act < FMOE_ACT_SILU, d->I);
    return s;
}

/* Forward and backward of a rank, at once or phase by phase. */
static inline fmoe_status ep_run_rank(ep_rank *s)
{
    fmoe_ep *ep = NULL;
    fmoe_ep_call *call = NULL;
    fmoe_status status = fmoe_ep_create(&ep, &s->desc);
    if (!status && s->phases) {
        status = fmoe_ep_count(ep, &s->args, &call);
        for (int pass = 0; pass < 2; pass++) {
            if (!status) status = fmoe_ep_dispatch(call, (fmoe_pass)pass, &s->args);
            if (!status) status = fmoe_ep_compute(call, (fmoe_pass)pass, &s->args);
            if (!status) status = fmoe_ep_combine(call, (fmoe_pass)pass, &s->args);
        }
    } else if (!status) {
        status = fmoe_ep_forward(ep, &s->args, &call);
        if (!status) status = fmoe_ep_backward(call, &s->args);
    }
    if (status) snprintf(s->error, sizeof s->error, "%s", fmoe_last_error());
    s->stats.size = sizeof s->stats;
    if (call) fmoe_ep_call_stats(call, &s->stats);
    fmoe_ep_call_free(&call);
    fmoe_ep_destroy(&ep);
    return s->status = status;
}

static inline int64_t ep_differ(const fmoe_tensor *got, const fmoe_tensor *want, int64_t from)
{
    int64_t n = 0;
    for (int64_t i = 0; i < tensor_count(got); i++)
        n += memcmp(tensor_at(got, i), tensor_at(want, from + i), fmoe_dtype_size(fmoe_tensor_dtype(got))) != 0;
    return n;
}

/* |lean - exact| of out, element by element: fusedmoe_ep.h has the bound. mag [T,H]: sum |p y|, by the layer on |.|
 * values of its parts, is replaced by what it is at most: partial sums are bounded by it too. */
static inline double ep_unit(int dtype) { return dtype == FMOE_BF16 ? 0x1p-8 : dtype == FMOE_F16 ? 0x1p-11 : 0x1p-24; }

static inline void ep_compare(const ep_layer *l, const ep_rank *s, int r)
{
    const fmoe_desc *d = &l->d;
    const int64_t at = l->at[r];
    if (s->status) {
        TEST_FAIL("rank %d of %d: %s", r, l->ranks, s->error);
        return;
    }
    if (l->mode == FMOE_EP_EXACT) {
        CHECK_EQ(ep_differ(s->out, l->out, at * d->H), 0);
        CHECK_EQ(ep_differ(s->dx, l->dx, at * d->H), 0);
    }
    CHECK_EQ(ep_differ(s->dp, l->dp, at * d->k), 0);
    for (int i = 0; i < 8; i++)
        for (int64_t j = 0; s->dw[i] && j < s->n_local; j++) {
            const int64_t n = tensor_count(l->dw[i]) / d->E;
            const fmoe_tensor *one = tensor_view(s->dw[i], 0, j, 1, 1);
            const int64_t wrong = ep_differ(one, l->dw[i], s->local[j] * n);
            if (wrong)
                TEST_FAIL("rank %d: %" PRId64 " of %" PRId64 " gradients of weight %d of expert %d differ", r, wrong, n,
                          i, s->local[j]);
        }
}

#endif
