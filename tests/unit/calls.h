/* SPDX-License-Identifier: Apache-2.0
 *
 * calls.h - every run call of the API, ready to be made: a plan, valid arguments, a workspace of the right size, and a
 * list of its tensors by name, so that tests can break one thing at a time and see that no output byte has changed. */
#ifndef FMOE_CALLS_H
#define FMOE_CALLS_H

#include "test.h"
#include "tensors.h"

typedef enum call_kind {
    CALL_ROUTE,
    CALL_PERMUTE,
    CALL_UNPERMUTE,
    CALL_GMM,
    CALL_GMM_LIST,
    CALL_ACTIVATION,
    CALL_EXPERTS,
    CALL_EXPERTS_LIST,
    CALL_BLOCK,
    CALL_KINDS
} call_kind;

static const char *const call_names[CALL_KINDS] = {
    "route",      "permute", "unpermute",    "grouped_matmul", "grouped_matmul list",
    "activation", "experts", "experts list", "block"};

enum { SLOT_IN = 0, SLOT_OUT = 1, SLOT_OPTIONAL = 2 };

typedef struct call_slot {
    const char *name;
    const fmoe_tensor **at; /* in the arguments */
    int role;
    int64_t list; /* 0: one tensor, else an array of that many */
} call_slot;

typedef struct api_call {
    call_kind kind;
    fmoe_pass pass;
    fmoe_desc d;
    fmoe_plan plan;
    union {
        size_t size;
        fmoe_route_args route;
        fmoe_permute_args permute;
        fmoe_unpermute_args unpermute;
        fmoe_gmm_args gmm;
        fmoe_activation_args activation;
        fmoe_experts_args experts;
        fmoe_block_args block;
    } a;
    fmoe_run run;
    call_slot slots[32];
    int n_slots;
    int64_t T; /* what the workspace is for: tokens or rows */
} api_call;

enum {
    N_T = 5,
    N_H = 6,
    N_I = 3,
    N_E = 4,
    N_K = 2,
    N_S = 2,
    N_R = N_T * N_K,
    N_RANK1 = 2,
    N_RANK2 = 7
}; /* sizes of the calls */

static inline fmoe_status call_make(const api_call *c)
{
    const bool back = c->pass == FMOE_BACKWARD;
    switch (c->kind) {
    case CALL_ROUTE: return (back ? fmoe_route_backward : fmoe_route_forward)(c->plan, &c->a.route, &c->run);
    case CALL_PERMUTE: return (back ? fmoe_permute_backward : fmoe_permute_forward)(c->plan, &c->a.permute, &c->run);
    case CALL_UNPERMUTE:
        return (back ? fmoe_unpermute_backward : fmoe_unpermute_forward)(c->plan, &c->a.unpermute, &c->run);
    case CALL_GMM:
    case CALL_GMM_LIST:
        return (back ? fmoe_grouped_matmul_backward : fmoe_grouped_matmul_forward)(c->plan, &c->a.gmm, &c->run);
    case CALL_ACTIVATION:
        return (back ? fmoe_activation_backward : fmoe_activation_forward)(c->plan, &c->a.activation, &c->run);
    case CALL_EXPERTS:
    case CALL_EXPERTS_LIST:
        return (back ? fmoe_experts_backward : fmoe_experts_forward)(c->plan, &c->a.experts, &c->run);
    default: return (back ? fmoe_block_backward : fmoe_block_forward)(c->plan, &c->a.block, &c->run);
    }
}

/* ---- tensors of a call ---- */

static inline const fmoe_tensor *call_tensor(api_call *c, const char *name, const fmoe_tensor **at, int role,
                                             fmoe_tensor *t)
{
    if (role & SLOT_OUT) memset(t->data, 0xa5, (size_t)tensor_count(t) * fmoe_dtype_size(fmoe_tensor_dtype(t)));
    else if (fmoe_tensor_dtype(t) > 0) tensor_random(t, 1);
    c->slots[c->n_slots++] = (call_slot){name, at, role, 0};
    return *at = t;
}

/* A stack, or its slices as a list. */
static inline void call_list(api_call *c, const char *name, const fmoe_tensor **at, int role, fmoe_tensor *stack)
{
    call_tensor(c, name, at, role, stack);
    *at = tensor_slices(stack);
    c->slots[c->n_slots - 1].list = stack->shape[0];
}

#define T_(name_, field, role_, dtype_, ...)                                                                           \
    call_tensor(c, name_, &c->a.field, role_, tensor_new(dtype_, SHAPE(__VA_ARGS__)))

static inline void call_route(api_call *c)
{
    const int f = c->d.dtype;
    const bool back = c->pass == FMOE_BACKWARD;
    T_("logits", route.logits, SLOT_IN, f, N_T, N_E);
    T_("select_bias", route.select_bias, SLOT_IN | SLOT_OPTIONAL, FMOE_F32, N_E);
    T_("ids", route.ids, back ? SLOT_IN : SLOT_OUT, I32, N_T, N_K);
    if (back) {
        for (int64_t i = 0; i < N_T * N_K; i++) tensor_set(c->a.route.ids, i, (double)(i % N_E));
        T_("dweights", route.dweights, SLOT_IN, f, N_T, N_K);
        T_("dlogits", route.dlogits, SLOT_OUT, f, N_T, N_E);
    } else {
        T_("weights", route.weights, SLOT_OUT, f, N_T, N_K);
        T_("bad_rows", route.bad_rows, SLOT_OUT | SLOT_OPTIONAL, I64, 1);
    }
}

static inline void call_permute(api_call *c)
{
    const int f = c->d.dtype;
    const bool back = c->pass == FMOE_BACKWARD;
    T_("x", permute.x, back ? SLOT_OUT : SLOT_IN, f, N_T, N_H);
    if (!back) tensor_random_int((fmoe_tensor *)(uintptr_t)T_("ids", permute.ids, SLOT_IN, I32, N_T, N_K), N_E);
    T_("xp", permute.xp, back ? SLOT_IN : SLOT_OUT, f, N_R, N_H);
    T_("map", permute.map, back ? SLOT_IN : SLOT_OUT, I32, N_R);
    for (int64_t i = 0; back && i < N_R; i++) tensor_set(c->a.permute.map, i, (double)((i * 3) % N_R));
    if (!back) T_("counts", permute.counts, SLOT_OUT | SLOT_OPTIONAL, I64, N_E);
}

static inline void call_unpermute(api_call *c)
{
    const int f = c->d.dtype;
    const bool back = c->pass == FMOE_BACKWARD;
    if (back) T_("dout", unpermute.dout, SLOT_IN, f, N_T, N_H);
    else T_("out", unpermute.out, SLOT_OUT, f, N_T, N_H);
    T_("y", unpermute.y, SLOT_IN, f, N_R, N_H);
    T_("map", unpermute.map, SLOT_IN, I32, N_R);
    for (int64_t i = 0; i < N_R; i++) tensor_set(c->a.unpermute.map, i, (double)((i * 3) % N_R));
    T_("weights", unpermute.weights, SLOT_IN | SLOT_OPTIONAL, f, N_T, N_K);
    if (!back) return;
    T_("dy", unpermute.dy, SLOT_OUT | SLOT_OPTIONAL, f, N_R, N_H);
    T_("dweights", unpermute.dweights, SLOT_OUT | SLOT_OPTIONAL, f, N_T, N_K);
}

static inline void call_gmm(api_call *c) /* x [R,I] . w [E,I,H] */
{
    const int f = c->d.dtype;
    const bool back = c->pass == FMOE_BACKWARD;
    c->T = N_R;
    if (c->kind == CALL_GMM_LIST) {
        const int64_t m = N_R / 2; /* two groups of five rows */
        c->a.gmm.list = 1;
        call_list(c, "x", &c->a.gmm.x, SLOT_IN, tensor_new(f, SHAPE(2, m, N_I)));
        call_list(c, "w", &c->a.gmm.w, SLOT_IN, tensor_new(f, SHAPE(2, N_I, N_H)));
        if (!back) {
            call_list(c, "y", &c->a.gmm.y, SLOT_OUT, tensor_new(f, SHAPE(2, m, N_H)));
            call_list(c, "bias", &c->a.gmm.bias, SLOT_IN | SLOT_OPTIONAL, tensor_new(f, SHAPE(2, N_H)));
            return;
        }
        call_list(c, "dy", &c->a.gmm.dy, SLOT_IN, tensor_new(f, SHAPE(2, m, N_H)));
        call_list(c, "dx", &c->a.gmm.dx, SLOT_OUT | SLOT_OPTIONAL, tensor_new(f, SHAPE(2, m, N_I)));
        call_list(c, "dw", &c->a.gmm.dw, SLOT_OUT | SLOT_OPTIONAL, tensor_new(f, SHAPE(2, N_I, N_H)));
        call_list(c, "dbias", &c->a.gmm.dbias, SLOT_OUT | SLOT_OPTIONAL, tensor_new(f, SHAPE(2, N_H)));
        return;
    }
    T_("x", gmm.x, SLOT_IN, f, N_R, N_I);
    T_("w", gmm.w, SLOT_IN, f, N_E, N_I, N_H);
    T_("sizes", gmm.sizes, SLOT_IN, I64, N_E);
    for (int64_t e = 0; e < N_E; e++) tensor_set(c->a.gmm.sizes, e, (double)e); /* 0 + 1 + 2 + 3 of 10 rows */
    if (!back) {
        T_("y", gmm.y, SLOT_OUT, f, N_R, N_H);
        T_("bias", gmm.bias, SLOT_IN | SLOT_OPTIONAL, f, N_E, N_H);
        return;
    }
    T_("dy", gmm.dy, SLOT_IN, f, N_R, N_H);
    T_("dx", gmm.dx, SLOT_OUT | SLOT_OPTIONAL, f, N_R, N_I);
    T_("dw", gmm.dw, SLOT_OUT | SLOT_OPTIONAL, f, N_E, N_I, N_H);
    T_("dbias", gmm.dbias, SLOT_OUT | SLOT_OPTIONAL, f, N_E, N_H);
}

static inline void call_activation(api_call *c)
{
    const int f = c->d.dtype;
    c->T = N_R;
    T_("h", activation.h, SLOT_IN, f, N_R, 2 * N_I);
    if (c->pass == FMOE_FORWARD) {
        T_("a", activation.a, SLOT_OUT, f, N_R, N_I);
        return;
    }
    T_("da", activation.da, SLOT_IN, f, N_R, N_I);
    T_("dh", activation.dh, SLOT_OUT, f, N_R, 2 * N_I);
}

static inline void call_saved(api_call *c, void **saved, size_t *bytes)
{
    REQUIRE(fmoe_saved_bytes(c->plan, c->T, bytes) == FMOE_OK);
    *saved = memset(test_alloc(*bytes), c->pass == FMOE_FORWARD ? 0xa5 : 0, *bytes);
}

static inline void call_experts(api_call *c)
{
    const int f = c->d.dtype;
    const bool back = c->pass == FMOE_BACKWARD;
    fmoe_experts_args *a = &c->a.experts;
    T_("x", experts.x, SLOT_IN, f, N_T, N_H);
    tensor_random_int((fmoe_tensor *)(uintptr_t)T_("ids", experts.ids, SLOT_IN, I64, N_T, N_K), N_E);
    T_("weights", experts.weights, SLOT_IN, FMOE_F32, N_T, N_K);
    if (c->kind == CALL_EXPERTS_LIST) {
        call_list(c, "gate", &a->w.gate, SLOT_IN, tensor_new(f, SHAPE(N_E, N_I, N_H)));
        call_list(c, "up", &a->w.up, SLOT_IN, tensor_new(f, SHAPE(N_E, N_I, N_H)));
        call_list(c, "down", &a->w.down, SLOT_IN, tensor_new(f, SHAPE(N_E, N_H, N_I)));
    } else {
        T_("w1", experts.w.w1, SLOT_IN, f, N_E, 2 * N_I, N_H);
        T_("w2", experts.w.w2, SLOT_IN, f, N_E, N_H, N_I);
        T_("b1", experts.w.b1, SLOT_IN, f, N_E, 2 * N_I);
        T_("b2", experts.w.b2, SLOT_IN, f, N_E, N_H);
    }
    T_("lora_a1", experts.w.lora_a1, SLOT_IN, f, N_E, N_RANK1, N_H);
    T_("lora_b1", experts.w.lora_b1, SLOT_IN, f, N_E, 2 * N_I, N_RANK1);
    T_("lora_a2", experts.w.lora_a2, SLOT_IN, f, N_E, N_RANK2, N_I);
    T_("lora_b2", experts.w.lora_b2, SLOT_IN, f, N_E, N_H, N_RANK2);
    call_saved(c, &a->saved, &a->saved_bytes);
    if (!back) {
        T_("out", experts.out, SLOT_OUT, f, N_T, N_H);
        return;
    }
    T_("dout", experts.dout, SLOT_IN, f, N_T, N_H);
    T_("dx", experts.dx, SLOT_OUT | SLOT_OPTIONAL, f, N_T, N_H);
    T_("dweights", experts.dweights, SLOT_OUT | SLOT_OPTIONAL, FMOE_F32, N_T, N_K);
    T_("dlora_a1", experts.dw.lora_a1, SLOT_OUT | SLOT_OPTIONAL, f, N_E, N_RANK1, N_H);
    T_("dlora_b1", experts.dw.lora_b1, SLOT_OUT | SLOT_OPTIONAL, f, N_E, 2 * N_I, N_RANK1);
    T_("dlora_a2", experts.dw.lora_a2, SLOT_OUT | SLOT_OPTIONAL, f, N_E, N_RANK2, N_I);
    T_("dlora_b2", experts.dw.lora_b2, SLOT_OUT | SLOT_OPTIONAL, f, N_E, N_H, N_RANK2);
    if (c->kind == CALL_EXPERTS_LIST) {
        call_list(c, "dgate", &a->dw.gate, SLOT_OUT | SLOT_OPTIONAL, tensor_new(f, SHAPE(N_E, N_I, N_H)));
        call_list(c, "dup", &a->dw.up, SLOT_OUT | SLOT_OPTIONAL, tensor_new(f, SHAPE(N_E, N_I, N_H)));
        call_list(c, "ddown", &a->dw.down, SLOT_OUT | SLOT_OPTIONAL, tensor_new(f, SHAPE(N_E, N_H, N_I)));
        return;
    }
    T_("dw1", experts.dw.w1, SLOT_OUT | SLOT_OPTIONAL, f, N_E, 2 * N_I, N_H);
    T_("dw2", experts.dw.w2, SLOT_OUT | SLOT_OPTIONAL, f, N_E, N_H, N_I);
    T_("db1", experts.dw.b1, SLOT_OUT | SLOT_OPTIONAL, f, N_E, 2 * N_I);
    T_("db2", experts.dw.b2, SLOT_OUT | SLOT_OPTIONAL, f, N_E, N_H);
}

static inline void call_block(api_call *c)
{
    const int f = c->d.dtype;
    const bool back = c->pass == FMOE_BACKWARD;
    const int routed = back ? SLOT_IN : SLOT_OUT;
    T_("x", block.x, SLOT_IN, f, N_T, N_H);
    T_("w_router", block.w_router, SLOT_IN, f, N_E, N_H);
    T_("b_router", block.b_router, SLOT_IN | SLOT_OPTIONAL, f, N_E);
    T_("select_bias", block.select_bias, SLOT_IN | SLOT_OPTIONAL, FMOE_F32, N_E);
    T_("w1", block.w.w1, SLOT_IN, f, N_E, 2 * N_I, N_H);
    T_("w2", block.w.w2, SLOT_IN, f, N_E, N_H, N_I);
    T_("shared w1", block.shared.w1, SLOT_IN, f, 1, 2 * N_S, N_H);
    T_("shared w2", block.shared.w2, SLOT_IN, f, 1, N_H, N_S);
    T_("shared_gate", block.shared_gate, SLOT_IN, f, 1, N_H);
    T_("logits", block.logits, routed, f, N_T, N_E);
    T_("ids", block.ids, routed, I32, N_T, N_K);
    for (int64_t i = 0; back && i < N_T * N_K; i++) tensor_set(c->a.block.ids, i, (double)(i % N_E));
    T_("weights", block.weights, routed, FMOE_F32, N_T, N_K);
    call_saved(c, &c->a.block.saved, &c->a.block.saved_bytes);
    if (!back) {
        T_("out", block.out, SLOT_OUT, f, N_T, N_H);
        return;
    }
    T_("dout", block.dout, SLOT_IN, f, N_T, N_H);
    T_("dlogits", block.dlogits, SLOT_IN | SLOT_OPTIONAL, f, N_T, N_E);
    T_("dx", block.dx, SLOT_OUT | SLOT_OPTIONAL, f, N_T, N_H);
    T_("dw_router", block.dw_router, SLOT_OUT | SLOT_OPTIONAL, f, N_E, N_H);
    T_("db_router", block.db_router, SLOT_OUT | SLOT_OPTIONAL, f, N_E);
    T_("dw1", block.dw.w1, SLOT_OUT | SLOT_OPTIONAL, f, N_E, 2 * N_I, N_H);
    T_("dw2", block.dw.w2, SLOT_OUT | SLOT_OPTIONAL, f, N_E, N_H, N_I);
    T_("dshared w1", block.dshared.w1, SLOT_OUT | SLOT_OPTIONAL, f, 1, 2 * N_S, N_H);
    T_("dshared w2", block.dshared.w2, SLOT_OUT | SLOT_OPTIONAL, f, 1, N_H, N_S);
    T_("dshared_gate", block.dshared_gate, SLOT_OUT | SLOT_OPTIONAL, f, 1, N_H);
}

#undef T_

/* ---- plans and calls ---- */

static inline fmoe_desc call_desc(call_kind kind, int dtype)
{
    static const int ops[CALL_KINDS] = {FMOE_OP_ROUTE,          FMOE_OP_PERMUTE,        FMOE_OP_PERMUTE,
                                        FMOE_OP_GROUPED_MATMUL, FMOE_OP_GROUPED_MATMUL, FMOE_OP_ACTIVATION,
                                        FMOE_OP_EXPERTS,        FMOE_OP_EXPERTS,        FMOE_OP_BLOCK};
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = ops[kind];
    d.dtype = dtype;
    d.H = N_H, d.I = N_I, d.E = kind == CALL_GMM_LIST ? 2 : N_E, d.k = N_K;
    d.threads = 2;
    if (kind == CALL_GMM) d.K = N_I, d.N = N_H;
    if (kind == CALL_BLOCK) d.shared_I = N_S, d.flags = FMOE_SHARED_GATE;
    if (kind == CALL_EXPERTS) d.flags = FMOE_BIAS;
    if (d.op == FMOE_OP_EXPERTS) d.rank1 = N_RANK1, d.rank2 = N_RANK2;
    return d;
}

/* The arguments of a call for a plan that exists. */
static inline void call_fill(api_call *c)
{
    static void (*const fill[CALL_KINDS])(api_call *) = {call_route,   call_permute, call_unpermute,
                                                         call_gmm,     call_gmm,     call_activation,
                                                         call_experts, call_experts, call_block};
    static const size_t sizes[CALL_KINDS] = {sizeof c->a.route,   sizeof c->a.permute, sizeof c->a.unpermute,
                                             sizeof c->a.gmm,     sizeof c->a.gmm,     sizeof c->a.activation,
                                             sizeof c->a.experts, sizeof c->a.experts, sizeof c->a.block};
    c->a.size = sizes[c->kind];
    c->T = N_T;
    c->run = FMOE_RUN_INIT;
    fill[c->kind](c);
    REQUIRE(fmoe_workspace_bytes(c->plan, c->pass, c->T, &c->run.workspace_bytes) == FMOE_OK);
    c->run.workspace = test_alloc(c->run.workspace_bytes);
}

/* A call that works. The plan is the caller's to destroy; *c must not move. */
static inline void call_begin(api_call *c, call_kind kind, fmoe_pass pass, int dtype)
{
    memset(c, 0, sizeof *c);
    c->kind = kind;
    c->pass = pass;
    c->d = call_desc(kind, dtype);
    REQUIRE(fmoe_plan_create(&c->plan, &c->d) == FMOE_OK);
    call_fill(c);
}

static inline void call_end(api_call *c) { CHECK_STATUS(fmoe_plan_destroy(&c->plan), FMOE_OK); }

/* Outputs (and the saved state of a forward) still hold the poison they were made with. Slots may point to broken
 * headers, so the tensors are taken from a copy of the call that was made when they were whole. */
static inline int call_untouched(const api_call *c)
{
    for (int i = 0; i < c->n_slots; i++) {
        if (!(c->slots[i].role & SLOT_OUT) || !*c->slots[i].at) continue;
        const fmoe_tensor *t = *c->slots[i].at;
        size_t n = (size_t)tensor_count(t) * fmoe_dtype_size(fmoe_tensor_dtype(t)) *
                   (size_t)(c->slots[i].list ? c->slots[i].list : 1);
        const unsigned char *p = fmoe_data(t);
        while (n--)
            if (*p++ != 0xa5) return 0;
    }
    const bool experts = c->kind == CALL_EXPERTS || c->kind == CALL_EXPERTS_LIST, block = c->kind == CALL_BLOCK;
    if (c->pass == FMOE_BACKWARD || (!experts && !block)) return 1;
    const unsigned char *saved = block ? c->a.block.saved : c->a.experts.saved;
    for (size_t n = saved ? (block ? c->a.block.saved_bytes : c->a.experts.saved_bytes) : 0; n--;)
        if (*saved++ != 0xa5) return 0;
    return 1;
}

/* A number in words of an error. */
static inline const char *number(int64_t v)
{
    static char text[2][32];
    static int which;
    which = !which;
    snprintf(text[which], sizeof text[which], "%" PRId64, v);
    return text[which];
}

/* The call must fail with one of two statuses, its sentence must have the words, and nothing may be written. */
static inline void expect(api_call *c, const char *what, fmoe_status want, fmoe_status or_else, const char *word,
                          const char *word2)
{
    const fmoe_status got = call_make(c);
    if (got != want && got != or_else)
        TEST_FAIL("%s %s, %s: %s (%s), not %s", call_names[c->kind], c->pass ? "backward" : "forward", what,
                  fmoe_status_string(got), got ? fmoe_last_error() : "", fmoe_status_string(want));
    else if (!strstr(fmoe_last_error(), word) || (word2 && !strstr(fmoe_last_error(), word2)))
        TEST_FAIL("%s %s, %s: \"%s\" lacks \"%s\" or \"%s\"", call_names[c->kind], c->pass ? "backward" : "forward",
                  what, fmoe_last_error(), word, word2 ? word2 : "");
}

#endif
