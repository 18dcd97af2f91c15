/* SPDX-License-Identifier: Apache-2.0
 *
 * block.c - the whole MoE block, composed from the other operations of the backend table.
 *
 *   logits = x . w_router^T (+ b_router)                a grouped matmul with one group
 *   ids, p = route(logits)
 *   out    = experts(x, ids, p)
 *   out   += p' * shared(x)                             experts again, with E = 1 and k = 1
 *
 * The shared expert's weight p' is a routing weight over one expert: sigmoid routing of x . shared_gate gives
 * sigmoid(x . shared_gate), softmax routing of any one number gives 1. So nothing here computes: every backend that has
 * the five operations has the block, and host code never touches device memory. */
#include <stdlib.h>

#include "plan.h"
#include "util.h"

#define ALIGN 256 /* pieces handed to the parts: enough for every backend */

typedef struct piece {
    fmoe_tensor t;
    int64_t shape[3], strides[3];
} piece;

/* A compact matrix; dtype: fmoe_dtype, or -32, -64 for ints. The result points into *v, which must not move. */
static const fmoe_tensor *piece_of(piece *v, const fmoe_plan_impl *p, void *data, int dtype, int64_t rows, int64_t cols)
{
    static const fmoe_datatype types[] = {
        [FMOE_F32] = {2, 32, 1}, [FMOE_BF16] = {4, 16, 1}, [FMOE_F16] = {2, 16, 1}, [FMOE_F64] = {2, 64, 1}};
    v->shape[0] = rows;
    v->shape[1] = cols;
    v->strides[0] = cols;
    v->strides[1] = 1;
    v->t = (fmoe_tensor){.data = data, .device = p->d.device, .ndim = 2, .shape = v->shape, .strides = v->strides};
    v->t.dtype = dtype < 0 ? (fmoe_datatype){0, (uint8_t)-dtype, 1} : types[dtype];
    return &v->t;
}

static fmoe_status build_part(fmoe_plan_impl *p, int part, const fmoe_desc *d)
{
    return fmoe_plan_build(d, &p->part[part]);
}

fmoe_status fmoe_block_build(fmoe_plan_impl *p)
{
    const fmoe_desc *d = &p->d;
    const bool shared = d->shared_I > 0, gate = (d->flags & FMOE_SHARED_GATE) != 0;

    fmoe_desc router = *d, route = *d, experts = *d, gate_matmul = *d, shared_route = *d, shared_expert = *d;
    router.op = gate_matmul.op = FMOE_OP_GROUPED_MATMUL;
    router.flags = gate_matmul.flags = route.flags = shared_route.flags = d->flags & ~(uint32_t)FMOE_QUANT;
    router.E = gate_matmul.E = 1;
    router.K = gate_matmul.K = d->H;
    router.N = d->E;
    gate_matmul.N = 1;
    route.op = shared_route.op = FMOE_OP_ROUTE;
    shared_route.E = shared_route.k = 1;
    shared_route.route = (fmoe_route_rule){.score = gate ? FMOE_SCORE_SIGMOID : FMOE_SCORE_SOFTMAX, .scale = 1};
    experts.op = shared_expert.op = FMOE_OP_EXPERTS;
    experts.flags &= ~(uint32_t)FMOE_SHARED_GATE;
    shared_expert.flags = d->flags & (FMOE_RECOMPUTE | FMOE_REUSE_SAVED | FMOE_INTERLEAVED | FMOE_BIAS |
                                      FMOE_ROUND_STEPS | FMOE_KEEP_ALL | FMOE_KEEP_LEAN | FMOE_QUANT | FMOE_SAME_BITS);
    shared_expert.E = shared_expert.k = 1;
    shared_expert.rank1 = shared_expert.rank2 = 0;
    shared_expert.I = d->shared_I;

    fmoe_status status = build_part(p, PART_ROUTER, &router);
    if (status == FMOE_OK) status = build_part(p, PART_ROUTE, &route);
    if (status == FMOE_OK) status = build_part(p, PART_EXPERTS, &experts);
    if (status == FMOE_OK && gate) status = build_part(p, PART_GATE, &gate_matmul);
    if (status == FMOE_OK && shared) status = build_part(p, PART_SHARED_ROUTE, &shared_route);
    if (status == FMOE_OK && shared) status = build_part(p, PART_SHARED, &shared_expert);
    if (status != FMOE_OK)
        for (int i = 0; i < PART_COUNT; i++) fmoe_plan_free(p->part[i]);
    return status;
}

/* What the block itself keeps beside the parts' own buffers. */
typedef struct block_state { /* saved from forward to backward; in the workspace when nothing is saved */
    void *experts, *shared;  /* saved state of the two expert parts */
    void *gate_logits;       /* [T,1] */
    void *shared_ids;        /* [T,1] int32 */
    void *shared_p;          /* [T,1] */
} block_state;

typedef struct block_scratch {
    void *part;         /* one buffer, large enough for each part in turn */
    void *dweights;     /* [T,k] */
    void *dlogits;      /* [T,E] */
    void *dshared_p;    /* [T,1] */
    void *dgate_logits; /* [T,1] */
    size_t part_bytes;
} block_scratch;

static int wide_dtype(const fmoe_plan_impl *p) { return p->d.dtype == FMOE_F64 ? FMOE_F64 : FMOE_F32; }

static fmoe_status carve_state(const fmoe_plan_impl *p, int64_t T, bool keep, fmoe_carve *c, block_state *s)
{
    size_t bytes = 0;
    if (keep) {
        FMOE_TRY(fmoe_plan_bytes(p->part[PART_EXPERTS], FMOE_FORWARD, T, NULL, &bytes));
        s->experts = fmoe_carve_take(c, (int64_t)bytes, 1);
    }
    if (!p->part[PART_SHARED]) return FMOE_OK;
    if (keep) {
        FMOE_TRY(fmoe_plan_bytes(p->part[PART_SHARED], FMOE_FORWARD, T, NULL, &bytes));
        s->shared = fmoe_carve_take(c, (int64_t)bytes, 1);
    }
    const size_t wide = fmoe_dtype_size(wide_dtype(p));
    s->shared_ids = fmoe_carve_take(c, T, sizeof(int32_t));
    s->shared_p = fmoe_carve_take(c, T, wide);
    if (p->part[PART_GATE]) s->gate_logits = fmoe_carve_take(c, T, wide);
    return FMOE_OK;
}

static fmoe_status carve_scratch(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, fmoe_carve *c, block_scratch *s)
{
    s->part_bytes = 0;
    for (int i = 0; i < PART_COUNT; i++) {
        size_t bytes = 0, ignored;
        if (p->part[i]) FMOE_TRY(fmoe_plan_bytes(p->part[i], pass, T, &bytes, &ignored));
        if (bytes > s->part_bytes) s->part_bytes = bytes;
    }
    s->part = fmoe_carve_take(c, (int64_t)s->part_bytes, 1);
    if (pass == FMOE_FORWARD) return FMOE_OK;
    const size_t wide = fmoe_dtype_size(wide_dtype(p));
    size_t slots, scores;
    if (fmoe_mul_overflow((size_t)T, (size_t)p->d.k, &slots) || fmoe_mul_overflow((size_t)T, (size_t)p->d.E, &scores) ||
        slots > (size_t)INT64_MAX || scores > (size_t)INT64_MAX)
        c->overflow = true;
    else {
        s->dweights = fmoe_carve_take(c, (int64_t)slots, wide);
        s->dlogits = fmoe_carve_take(c, (int64_t)scores, wide);
    }
    if (p->part[PART_SHARED]) s->dshared_p = fmoe_carve_take(c, T, wide);
    if (p->part[PART_GATE]) s->dgate_logits = fmoe_carve_take(c, T, wide);
    return FMOE_OK;
}

fmoe_status fmoe_block_bytes(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, size_t *workspace, size_t *saved)
{
    block_state state = {0};
    block_scratch scratch = {0};
    fmoe_carve c = fmoe_carve_begin(NULL, ALIGN);
    if (workspace) FMOE_TRY(carve_scratch(p, pass, T, &c, &scratch));
    /* Inference keeps its state in the workspace: always leave room for it, it is small. */
    if (pass == FMOE_FORWARD) FMOE_TRY(carve_state(p, T, false, &c, &state));
    fmoe_carve kept = {.align = ALIGN};
    FMOE_TRY(carve_state(p, T, true, &kept, &state));
    if (c.overflow || kept.overflow)
        return fmoe_fail(FMOE_ERR_OVERFLOW, "the block's workspace for T = %lld does not fit 64 bits", (long long)T);
    if (workspace) *workspace = fmoe_carve_bytes(&c);
    *saved = kept.used;
    return FMOE_OK;
}

/* ---- views ---- */

/* A router matrix [E,H] as the weight of a one-group matmul: [1,H,E], transposed by strides. */
static const fmoe_tensor *as_group(piece *v, const fmoe_tensor *m)
{
    if (!m) return NULL;
    v->t = *m;
    v->t.ndim = 3;
    v->t.shape = v->shape;
    v->t.strides = v->strides;
    v->shape[0] = 1;
    v->shape[1] = m->shape[1];
    v->shape[2] = m->shape[0];
    v->strides[0] = m->shape[0] * m->shape[1];
    v->strides[1] = fmoe_stride(m, 1);
    v->strides[2] = fmoe_stride(m, 0);
    return &v->t;
}

/* A bias [E] as [1,E]. */
static const fmoe_tensor *as_row(piece *v, const fmoe_tensor *b)
{
    if (!b) return NULL;
    v->t = *b;
    v->t.ndim = 2;
    v->t.shape = v->shape;
    v->t.strides = v->strides;
    v->shape[0] = 1;
    v->shape[1] = b->shape[0];
    v->strides[0] = b->shape[0];
    v->strides[1] = 1;
    return &v->t;
}

/* The first column of a matrix, [T,1]. */
static const fmoe_tensor *first_column(piece *v, const fmoe_tensor *m)
{
    v->t = *m;
    v->t.shape = v->shape;
    v->t.strides = v->strides;
    v->shape[0] = m->shape[0];
    v->shape[1] = 1;
    v->strides[0] = fmoe_stride(m, 0);
    v->strides[1] = 1;
    return &v->t;
}

static fmoe_run part_run(const fmoe_run *run, const block_scratch *s, uint32_t flags)
{
    return (fmoe_run){.size = sizeof(fmoe_run),
                      .workspace = s->part,
                      .workspace_bytes = s->part_bytes,
                      .stream = run->stream,
                      .submit = run->submit,
                      .submit_ctx = run->submit_ctx,
                      .flags = flags};
}

/* ---- forward ---- */

static fmoe_status forward(const fmoe_plan_impl *p, const fmoe_block_args *a, const fmoe_run *run, const block_state *s,
                           const block_scratch *scratch)
{
    const fmoe_backend *b = p->backend;
    const int64_t T = a->x->shape[0];
    const fmoe_run plain = part_run(run, scratch, 0);
    piece w, bias, gate_logits, ids, p1;

    const fmoe_gmm_args router = {.size = sizeof router,
                                  .x = a->x,
                                  .w = as_group(&w, a->w_router),
                                  .bias = as_row(&bias, a->b_router),
                                  .y = a->logits};
    FMOE_TRY(b->gmm[FMOE_FORWARD](p->part[PART_ROUTER], &router, &plain));
    const fmoe_route_args route = {
        .size = sizeof route, .logits = a->logits, .select_bias = a->select_bias, .ids = a->ids, .weights = a->weights};
    FMOE_TRY(b->route[FMOE_FORWARD](p->part[PART_ROUTE], &route, &plain));
    const fmoe_experts_args experts = {.size = sizeof experts,
                                       .x = a->x,
                                       .ids = a->ids,
                                       .weights = a->weights,
                                       .w = a->w,
                                       .out = a->out,
                                       .saved = s->experts};
    FMOE_TRY(p->backend->experts[FMOE_FORWARD](p->part[PART_EXPERTS], &experts, &plain));
    if (!p->part[PART_SHARED]) return FMOE_OK;

    if (p->part[PART_GATE]) {
        const fmoe_gmm_args gate = {.size = sizeof gate,
                                    .x = a->x,
                                    .w = as_group(&w, a->shared_gate),
                                    .y = piece_of(&gate_logits, p, s->gate_logits, wide_dtype(p), T, 1)};
        FMOE_TRY(b->gmm[FMOE_FORWARD](p->part[PART_GATE], &gate, &plain));
    } else {
        first_column(&gate_logits, a->weights); /* softmax over one: 1; a logit may be -Inf, and then NaN */
    }
    const fmoe_route_args one = {.size = sizeof one,
                                 .logits = &gate_logits.t,
                                 .ids = piece_of(&ids, p, s->shared_ids, -32, T, 1),
                                 .weights = piece_of(&p1, p, s->shared_p, wide_dtype(p), T, 1)};
    FMOE_TRY(b->route[FMOE_FORWARD](p->part[PART_SHARED_ROUTE], &one, &plain));
    const fmoe_experts_args shared = {.size = sizeof shared,
                                      .x = a->x,
                                      .ids = &ids.t,
                                      .weights = &p1.t,
                                      .w = a->shared,
                                      .out = a->out,
                                      .saved = s->shared};
    const fmoe_run add = part_run(run, scratch, FMOE_ADD_OUT);
    return b->experts[FMOE_FORWARD](p->part[PART_SHARED], &shared, &add);
}

/* ---- backward ---- */

/* dx, dw and dbias of one router-like matmul; dx is always added to: the experts wrote it first. */
static fmoe_status matmul_backward(const fmoe_plan_impl *p, int part, const fmoe_block_args *a, const fmoe_tensor *w,
                                   const fmoe_tensor *dy, const fmoe_tensor *dw, const fmoe_tensor *dbias,
                                   const fmoe_run *run, const block_scratch *scratch, uint32_t flags)
{
    if (!a->dx && !dw && !dbias) return FMOE_OK;
    piece wv, dwv, dbv;
    const fmoe_gmm_args args = {.size = sizeof args,
                                .x = a->x,
                                .w = as_group(&wv, w),
                                .dy = dy,
                                .dx = a->dx,
                                .dw = as_group(&dwv, dw),
                                .dbias = as_row(&dbv, dbias)};
    const fmoe_run add = part_run(run, scratch, FMOE_ADD_DX | flags);
    return p->backend->gmm[FMOE_BACKWARD](p->part[part], &args, &add);
}

static fmoe_status backward(const fmoe_plan_impl *p, const fmoe_block_args *a, const fmoe_run *run,
                            const block_state *s, const block_scratch *scratch)
{
    const fmoe_backend *b = p->backend;
    const int64_t T = a->x->shape[0];
    const int wide = wide_dtype(p);
    const uint32_t accumulate = run->flags & FMOE_ACCUMULATE;
    const bool router = a->dx || a->dw_router || a->db_router;
    piece dweights, dlogits, ids, p1, dp1, gate_logits, dgate;

    const fmoe_experts_args experts = {.size = sizeof experts,
                                       .x = a->x,
                                       .ids = a->ids,
                                       .weights = a->weights,
                                       .w = a->w,
                                       .saved = s->experts,
                                       .dout = a->dout,
                                       .dx = a->dx,
                                       .dw = a->dw,
                                       .dweights =
                                           router ? piece_of(&dweights, p, scratch->dweights, wide, T, p->d.k) : NULL};
    const fmoe_run first = part_run(run, scratch, run->flags & (FMOE_ACCUMULATE | FMOE_ADD_DX));
    FMOE_TRY(p->backend->experts[FMOE_BACKWARD](p->part[PART_EXPERTS], &experts, &first));
    if (router) {
        const fmoe_route_args route = {.size = sizeof route,
                                       .logits = a->logits,
                                       .select_bias = a->select_bias,
                                       .ids = a->ids,
                                       .dweights = &dweights.t,
                                       .dlogits = piece_of(&dlogits, p, scratch->dlogits, wide, T, p->d.E)};
        const fmoe_run plain = part_run(run, scratch, 0);
        FMOE_TRY(b->route[FMOE_BACKWARD](p->part[PART_ROUTE], &route, &plain));
        FMOE_TRY(matmul_backward(p, PART_ROUTER, a, a->w_router, &dlogits.t, a->dw_router, a->db_router, run, scratch,
                                 accumulate));
        if (a->dlogits) /* what came to the logits from elsewhere goes the same way, added */
            FMOE_TRY(matmul_backward(p, PART_ROUTER, a, a->w_router, a->dlogits, a->dw_router, a->db_router, run,
                                     scratch, FMOE_ACCUMULATE));
    }
    if (!p->part[PART_SHARED]) return FMOE_OK;

    const bool gate = p->part[PART_GATE] && (a->dx || a->dshared_gate);
    piece_of(&ids, p, s->shared_ids, -32, T, 1);
    const fmoe_experts_args shared = {.size = sizeof shared,
                                      .x = a->x,
                                      .ids = &ids.t,
                                      .weights = piece_of(&p1, p, s->shared_p, wide, T, 1),
                                      .w = a->shared,
                                      .saved = s->shared,
                                      .dout = a->dout,
                                      .dx = a->dx,
                                      .dw = a->dshared,
                                      .dweights = gate ? piece_of(&dp1, p, scratch->dshared_p, wide, T, 1) : NULL};
    const fmoe_run add = part_run(run, scratch, FMOE_ADD_DX | accumulate);
    FMOE_TRY(b->experts[FMOE_BACKWARD](p->part[PART_SHARED], &shared, &add));
    if (!gate) return FMOE_OK;
    const fmoe_route_args one = {.size = sizeof one,
                                 .logits = piece_of(&gate_logits, p, s->gate_logits, wide, T, 1),
                                 .ids = &ids.t,
                                 .dweights = &dp1.t,
                                 .dlogits = piece_of(&dgate, p, scratch->dgate_logits, wide, T, 1)};
    const fmoe_run plain = part_run(run, scratch, 0);
    FMOE_TRY(b->route[FMOE_BACKWARD](p->part[PART_SHARED_ROUTE], &one, &plain));
    return matmul_backward(p, PART_GATE, a, a->shared_gate, &dgate.t, a->dshared_gate, NULL, run, scratch, accumulate);
}

fmoe_status fmoe_block_run(const fmoe_plan_impl *p, fmoe_pass pass, const fmoe_block_args *a, const fmoe_run *run)
{
    const int64_t T = a->x->shape[0];
    block_state state = {0};
    block_scratch scratch = {0};
    fmoe_carve c = fmoe_carve_begin(run->workspace, ALIGN);
    FMOE_TRY(carve_scratch(p, pass, T, &c, &scratch));
    /* Offsets in the saved state do not depend on its address, so that a caller may move it. */
    fmoe_carve kept = a->saved ? (fmoe_carve){.base = a->saved, .align = ALIGN} : c;
    FMOE_TRY(carve_state(p, T, a->saved != NULL, &kept, &state));
    return pass == FMOE_FORWARD ? forward(p, a, run, &state, &scratch) : backward(p, a, run, &state, &scratch);
}
