/* SPDX-License-Identifier: Apache-2.0
 *
 * ep_ranks.h - drawn layers of expert parallelism (unit/ep_layer.h) on the simulated NPU: ranks are threads with
 * streams of their own, over the engine of threads (rows pass through the host) or HCCL between threads (they do not).
 * Tensors are copied to the device before ranks run, and back afterwards. */
#ifndef FMOE_TEST_EP_RANKS_H
#define FMOE_TEST_EP_RANKS_H

#include <pthread.h>

#include "../unit/ep_layer.h"
#include "device.h"

static struct {
    void *(*group)(int), *(*comm)(void *, int);
    void (*fail)(void *, int), (*end)(void *), (*free)(void *);
} hccl;

static void hccl_load(void)
{
    setenv("FMOE_HCCL_LIBRARY", SIM_FOLDER "/libhccl_ranks.so", 1);
    void *lib = dlopen(SIM_FOLDER "/libhccl_ranks.so", RTLD_NOW | RTLD_LOCAL);
    REQUIRE(lib);
    *(void **)&hccl.group = dlsym(lib, "fmoe_sim_hccl_group");
    *(void **)&hccl.comm = dlsym(lib, "fmoe_sim_hccl_comm");
    *(void **)&hccl.fail = dlsym(lib, "fmoe_sim_hccl_break");
    *(void **)&hccl.end = dlsym(lib, "fmoe_sim_hccl_end");
    *(void **)&hccl.free = dlsym(lib, "fmoe_sim_hccl_free");
}

static ep_layer *npu_draw(int ranks, int dtype, int mode)
{
    ep_layer *l = ep_draw(ranks, dtype, mode);
    l->d.device = (fmoe_device){FMOE_ASCEND, 0};
    l->d.flags &= ~(uint32_t)FMOE_ROUND_STEPS;
    return l;
}

static void describe_draw(const ep_layer *l, int i)
{
    printf("  draw %d: ranks %d T %d H %d I %d E %d k %d act %d flags %u chunks %d list %d lora %d %d p %d\n", i,
           l->ranks, (int)l->at[l->ranks], (int)l->d.H, (int)l->d.I, (int)l->d.E, (int)l->d.k, l->d.act, l->d.flags,
           l->chunks, l->list, (int)l->d.rank1, (int)l->d.rank2, l->p_type);
}

/* ---- the tensors of a share, on the device ---- */

static void npu_weights(const ep_layer *l, fmoe_weights *to, fmoe_tensor *const *host, fmoe_tensor **stack)
{
    const int gated = l->d.act < FMOE_ACT_SILU;
    for (int i = 0; i < 8; i++) stack[i] = to_npu(host[i]);
    *to = (fmoe_weights){.w1 = NULL};
    ep_set_weights(to, stack, l->list, gated, l->d.I);
    const fmoe_tensor *const lists[] = {to->gate, to->up, to->down};
    for (int i = 0; i < 3; i++)
        for (int64_t e = 0; lists[i] && e < host[0]->shape[0]; e++)
            ((fmoe_tensor *)(uintptr_t)lists[i])[e].device = stack[0]->device;
}

static void npu_one_process(ep_layer *l)
{
    const int64_t T = l->at[l->ranks];
    fmoe_tensor *w[8], *dw[8];
    const fmoe_plan plan = make_plan(l->d, FMOE_ASCEND);
    const fmoe_run f = run_for(plan, FMOE_FORWARD, T, FMOE_ASCEND, 0),
                   b = run_for(plan, FMOE_BACKWARD, T, FMOE_ASCEND, 0);
    fmoe_experts_args a = {.size = sizeof a, .x = to_npu(l->x), .ids = to_npu(l->ids), .weights = to_npu(l->p)};
    CHECK_STATUS(fmoe_saved_bytes(plan, T, &a.saved_bytes), FMOE_OK);
    char *const at = npu_alloc(a.saved_bytes + 255);
    a.saved = at + (256 - (uintptr_t)at % 256) % 256;
    fmoe_tensor *const out = to_npu(l->out), *const dx = to_npu(l->dx), *const dp = to_npu(l->dp);
    npu_weights(l, &a.w, l->w, w);
    a.out = out;
    CHECK_STATUS(fmoe_experts_forward(plan, &a, &f), FMOE_OK);
    a.out = NULL;
    a.dout = to_npu(l->dout);
    a.dx = dx;
    a.dweights = dp;
    npu_weights(l, &a.dw, l->dw, dw);
    CHECK_STATUS(fmoe_experts_backward(plan, &a, &b), FMOE_OK);
    l->out = from_npu(out);
    l->dx = from_npu(dx);
    l->dp = from_npu(dp);
    for (int i = 0; i < 8; i++) l->dw[i] = dw[i] ? from_npu(dw[i]) : NULL;
    fmoe_plan p = plan;
    fmoe_plan_destroy(&p);
}

/* ---- ranks ---- */

typedef struct npu_rank {
    ep_rank *share;
    fmoe_exchange x;
    fmoe_ep_hccl *engine;
    fmoe_ep *ep;
    void *stream, *side;
    fmoe_ep_args args; /* on the device */
    fmoe_tensor *out, *dx, *dp, *dw[8];
    pthread_t thread;
} npu_rank;

typedef struct npu_group {
    const ep_layer *l;
    int on_device;
    fmoe_ep_threads *threads;
    void *hccl;
    npu_rank r[EP_RANKS];
} npu_group;

/* The share of rank r; its layer is made by npu_start. */
static void npu_share(npu_group *g, int r)
{
    npu_rank *const n = &g->r[r];
    ep_layer stacked = *g->l;
    fmoe_tensor *w[8];
    stacked.list = 0;
    ep_rank *const s = n->share = ep_share(&stacked, r, &n->x);
    s->desc.layer = &g->l->d;
    if (g->l->placements) s->desc.expert = g->l->expert, s->desc.rank = g->l->rank;
    const fmoe_weights *const h = &s->args.w;
    const fmoe_tensor *const host[] = {h->w1, h->w2, h->b1, h->b2, h->lora_a1, h->lora_b1, h->lora_a2, h->lora_b2};
    for (int i = 0; i < 8; i++) w[i] = (fmoe_tensor *)(uintptr_t)host[i];
    n->args = s->args;
    fmoe_tensor *stack[8];
    npu_weights(g->l, &n->args.w, w, stack);
    npu_weights(g->l, &n->args.dw, s->dw, n->dw);
    const fmoe_tensor *const x = s->args.x;
    fmoe_tensor *padded = tensor_padded(g->l->d.dtype, x->shape[0], x->shape[1], test_below(2) * 3);
    for (int64_t i = 0; i < tensor_count(x); i++) tensor_set(padded, i, tensor_get(x, i));
    n->args.x = to_npu(padded);
    n->args.ids = to_npu(s->args.ids);
    n->args.weights = to_npu(s->args.weights);
    n->args.dout = to_npu(s->args.dout);
    n->args.out = n->out = to_npu(s->out);
    n->args.dx = n->dx = to_npu(s->dx);
    n->args.dweights = n->dp = to_npu(s->dp);
    REQUIRE(npu.stream(&n->stream) == 0 && npu.stream(&n->side) == 0);
    n->args.stream = n->stream;
}

static void npu_connect(npu_group *g)
{
    const fmoe_device npu0 = {FMOE_ASCEND, 0};
    if (g->on_device) g->hccl = hccl.group(g->l->ranks);
    else CHECK_STATUS(fmoe_ep_threads_create(&g->threads, g->l->ranks), FMOE_OK);
    for (int r = 0; r < g->l->ranks; r++) {
        npu_rank *const n = &g->r[r];
        if (g->on_device) {
            CHECK_STATUS(fmoe_ep_hccl_create(&n->engine, hccl.comm(g->hccl, r), npu0, n->stream, n->side), FMOE_OK);
            REQUIRE(n->engine);
            CHECK_STATUS(fmoe_ep_hccl_exchange(n->engine, &n->x), FMOE_OK);
        } else CHECK_STATUS(fmoe_ep_threads_exchange(g->threads, r, &n->x), FMOE_OK);
    }
}

static npu_group *npu_start(const ep_layer *l, int on_device)
{
    npu_group *const g = test_alloc(sizeof *g);
    g->l = l;
    g->on_device = on_device;
    for (int r = 0; r < l->ranks; r++) npu_share(g, r);
    npu_connect(g);
    return g;
}

/* Forward and backward of a rank whose layer exists, at once or phase by phase. */
static void *npu_run_rank(void *arg)
{
    npu_rank *const n = arg;
    ep_rank *const s = n->share;
    fmoe_ep_call *call = NULL;
    fmoe_status status = FMOE_OK;
    if (s->phases) {
        status = fmoe_ep_count(n->ep, &n->args, &call);
        for (int pass = 0; pass < 2; pass++) {
            if (!status) status = fmoe_ep_dispatch(call, (fmoe_pass)pass, &n->args);
            if (!status) status = fmoe_ep_compute(call, (fmoe_pass)pass, &n->args);
            if (!status) status = fmoe_ep_combine(call, (fmoe_pass)pass, &n->args);
        }
    } else {
        status = fmoe_ep_forward(n->ep, &n->args, &call);
        if (!status) status = fmoe_ep_backward(call, &n->args);
    }
    if (status) snprintf(s->error, sizeof s->error, "%s", fmoe_last_error());
    s->stats.size = sizeof s->stats;
    if (call) fmoe_ep_call_stats(call, &s->stats);
    fmoe_ep_call_free(&call);
    s->status = status;
    return NULL;
}

static void *npu_infer_rank(void *arg)
{
    npu_rank *const n = arg;
    n->share->status = fmoe_ep_forward(n->ep, &n->args, NULL);
    if (n->share->status) snprintf(n->share->error, sizeof n->share->error, "%s", fmoe_last_error());
    return NULL;
}

static void npu_create(npu_group *g)
{
    for (int r = 0; r < g->l->ranks; r++) {
        CHECK_STATUS(fmoe_ep_create(&g->r[r].ep, &g->r[r].share->desc), FMOE_OK);
        REQUIRE(g->r[r].ep);
    }
}

static void npu_run(npu_group *g)
{
    for (int r = 0; r < g->l->ranks; r++) REQUIRE(!pthread_create(&g->r[r].thread, NULL, npu_run_rank, &g->r[r]));
    for (int r = 0; r < g->l->ranks; r++) pthread_join(g->r[r].thread, NULL);
}

/* What came of it, in the share's tensors. */
static void npu_fetch(npu_group *g)
{
    for (int r = 0; r < g->l->ranks; r++) /* the others would wait for one that failed */
        if (g->hccl && g->r[r].share->status) hccl.end(g->hccl);
    for (int r = 0; r < g->l->ranks; r++) {
        npu_rank *const n = &g->r[r];
        CHECK_EQ(npu.sync(n->stream), 0);
        CHECK_EQ(npu.sync(n->side), 0);
        n->share->out = from_npu(n->out);
        n->share->dx = from_npu(n->dx);
        n->share->dp = from_npu(n->dp);
        for (int i = 0; i < 8; i++) n->share->dw[i] = n->dw[i] ? from_npu(n->dw[i]) : NULL;
    }
}

/* Layers and engines; exchanges that wait for a rank that has left are ended. */
static void npu_part(npu_group *g)
{
    for (int r = 0; r < g->l->ranks; r++) fmoe_ep_destroy(&g->r[r].ep);
    for (int r = 0; r < g->l->ranks; r++) fmoe_ep_hccl_destroy(&g->r[r].engine);
    if (g->hccl) hccl.end(g->hccl);
    for (int r = 0; r < g->l->ranks; r++) npu.sync(g->r[r].stream), npu.sync(g->r[r].side);
    if (g->hccl) hccl.free(g->hccl);
    g->hccl = NULL;
    fmoe_ep_threads_destroy(&g->threads);
}

static void npu_stop(npu_group *g)
{
    npu_part(g);
    for (int r = 0; r < g->l->ranks; r++) npu.end_stream(g->r[r].stream), npu.end_stream(g->r[r].side);
}

/* What a layer may leave behind: nothing. */
static void npu_nothing_left(void)
{
    static const char *const live[] = {"live_tensors",   "live_lists",  "live_scalars", "live_arrays",
                                       "live_executors", "live_pinned", "live_events"};
    for (size_t i = 0; i < sizeof live / sizeof *live; i++)
        if (npu.get(live[i])) TEST_FAIL("%s is %" PRId64, live[i], npu.get(live[i]));
}

/* All of it; what the ranks have got is in their shares. */
static npu_group *npu_layer(const ep_layer *l, int on_device)
{
    npu_group *const g = npu_start(l, on_device);
    npu_create(g);
    npu_run(g);
    npu_fetch(g);
    npu_stop(g);
    npu_nothing_left();
    return g;
}

#endif
