/* SPDX-License-Identifier: Apache-2.0
 * check_block.c - the whole block: bit for bit what its parts give when they are called one by one, and within the
 * layer's bars of the f64 block where both choose the same experts. */
#include "check.h"

typedef struct block {
    fmoe_desc d;
    fmoe_plan plan;
    int64_t T;
    bool gated, shared, gate, biased_router, aux;
    fmoe_tensor *x, *w_router, *b_router, *select_bias, *w1, *w2, *b1, *b2, *s1, *s2, *t1, *t2, *shared_gate, *dout,
        *aux_dlogits, *a2, *lora_b2; /* in */
    fmoe_tensor *logits, *ids, *weights, *out, *dx, *dw_router, *db_router, *dw1, *dw2, *db1, *db2, *ds1, *ds2, *dt1,
        *dt2, *dgate, *da2, *dlora_b2;
    fmoe_block_args forward, backward;
} block;

static int wide(const fmoe_desc *d) { return d->dtype == FMOE_F64 ? FMOE_F64 : FMOE_F32; }

static fmoe_desc draw_desc(void)
{
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_BLOCK;
    d.dtype = (int32_t)CHECK_PICK(FMOE_F32, FMOE_BF16, FMOE_F16);
    d.act = check_acts[check_below(CHECK_ACTS)];
    d.E = CHECK_PICK(1, 4, 8, 13);
    d.k = 1 + check_below(fmoe_min(d.E, 4));
    d.H = check_size(140);
    d.I = check_size(140);
    d.shared_I = check_below(3) ? check_size(100) : 0;
    d.flags = (uint32_t)(CHECK_PICK(0, FMOE_BIAS) | CHECK_PICK(0, FMOE_RECOMPUTE, FMOE_REUSE_SAVED) |
                         CHECK_PICK(0, FMOE_INTERLEAVED) | (d.shared_I ? CHECK_PICK(0, FMOE_SHARED_GATE) : 0));
    d.rank2 = CHECK_PICK(0, 3); /* adapters reach the experts: one is enough to see that */
    d.threads = (int32_t)CHECK_PICK(1, 2, 3);
    d.route.score = (int32_t)check_below(4);
    d.route.renormalize = (int32_t)check_below(2);
    d.route.scale = check_below(2) ? 1.5 : 0;
    return d;
}

static void draw_inputs(block *b)
{
    const fmoe_desc *d = &b->d;
    const int dtype = d->dtype;
    const int64_t T = b->T, H = d->H, I = d->I, E = d->E, S = d->shared_I, C = b->gated ? 2 * I : I,
                  SC = b->gated ? 2 * S : S;
    b->x = check_fill(check_rows(dtype, T, H, 1), 1);
    b->dout = check_fill(check_rows(dtype, T, H, 0), 1);
    const int64_t turned[] = {1, E};
    b->w_router = check_fill(check_tensor(dtype, CHECK_SHAPE(E, H), check_below(2) ? turned : NULL), 2);
    b->b_router = check_below(2) ? check_fill(check_tensor(FMOE_F32, CHECK_SHAPE(E), NULL), 1) : NULL;
    b->select_bias = check_below(2) ? check_fill(check_tensor(FMOE_F32, CHECK_SHAPE(E), NULL), 0.2) : NULL;
    b->w1 = check_fill(check_stack(dtype, E, C, H, check_below(2)), 2.5 / sqrt((double)H));
    b->w2 = check_fill(check_stack(dtype, E, H, I, check_below(2)), 2.5 / sqrt((double)I));
    b->b1 = check_fill(check_rows(dtype, E, C, 0), 1);
    b->b2 = check_fill(check_rows(dtype, E, H, 0), 1);
    if (d->rank2) {
        b->a2 = check_fill(check_stack(dtype, E, d->rank2, I, check_below(2)), 1 / sqrt((double)I));
        b->lora_b2 = check_fill(check_stack(dtype, E, H, d->rank2, check_below(2)), 1);
    }
    if (b->shared) {
        b->s1 = check_fill(check_stack(dtype, 1, SC, H, check_below(2)), 2.5 / sqrt((double)H));
        b->s2 = check_fill(check_stack(dtype, 1, H, S, check_below(2)), 2.5 / sqrt((double)S));
        b->t1 = check_fill(check_rows(dtype, 1, SC, 0), 1);
        b->t2 = check_fill(check_rows(dtype, 1, H, 0), 1);
    }
    if (b->gate) b->shared_gate = check_fill(check_rows(dtype, 1, H, 0), 1);
    if (b->aux) b->aux_dlogits = check_fill(check_rows(FMOE_F32, T, E, 0), 1);
}

static void make_outputs(block *b)
{
    const fmoe_desc *d = &b->d;
    const int dtype = d->dtype, w = wide(d);
    const int64_t T = b->T, H = d->H, I = d->I, E = d->E, S = d->shared_I, C = b->gated ? 2 * I : I,
                  SC = b->gated ? 2 * S : S;
    const bool bias = d->flags & FMOE_BIAS;
    b->plan = check_plan(d);
    b->logits = check_rows(w, T, E, 1);
    b->ids = check_tensor(CHECK_I32, CHECK_SHAPE(T, d->k), NULL);
    b->weights = check_tensor(w, CHECK_SHAPE(T, d->k), NULL);
    b->out = check_rows(dtype, T, H, 2);
    b->dx = check_rows(dtype, T, H, 0);
    b->dw_router = check_rows(w, E, H, 0);
    b->db_router = b->b_router ? check_tensor(w, CHECK_SHAPE(E), NULL) : NULL;
    b->dw1 = check_stack(w, E, C, H, false);
    b->dw2 = check_stack(w, E, H, I, true);
    b->db1 = check_rows(w, E, C, 0);
    b->db2 = check_rows(w, E, H, 0);
    if (d->rank2) {
        b->da2 = check_stack(w, E, d->rank2, I, false);
        b->dlora_b2 = check_stack(w, E, H, d->rank2, false);
    }
    if (b->shared) {
        b->ds1 = check_stack(w, 1, SC, H, false);
        b->ds2 = check_stack(w, 1, H, S, false);
        b->dt1 = check_rows(w, 1, SC, 0);
        b->dt2 = check_rows(w, 1, H, 0);
    }
    if (b->gate) b->dgate = check_rows(w, 1, H, 0);
    fmoe_block_args a = {.size = sizeof a,
                         .x = b->x,
                         .w_router = b->w_router,
                         .b_router = b->b_router,
                         .select_bias = b->select_bias,
                         .w = {.w1 = b->w1, .w2 = b->w2, .lora_a2 = b->a2, .lora_b2 = b->lora_b2},
                         .shared_gate = b->shared_gate,
                         .logits = b->logits,
                         .ids = b->ids,
                         .weights = b->weights};
    if (b->shared) a.shared = (fmoe_weights){.w1 = b->s1, .w2 = b->s2};
    if (bias) a.w.b1 = b->b1, a.w.b2 = b->b2;
    if (bias && b->shared) a.shared.b1 = b->t1, a.shared.b2 = b->t2;
    CHECK_OK(fmoe_saved_bytes(b->plan, T, &a.saved_bytes));
    a.saved = a.saved_bytes ? check_guarded(a.saved_bytes, 16) : NULL;
    b->forward = b->backward = a;
    b->forward.out = b->out;
    b->backward.dout = b->dout;
    b->backward.dlogits = b->aux_dlogits;
    b->backward.dx = b->dx;
    b->backward.dw_router = b->dw_router;
    b->backward.db_router = b->db_router;
    b->backward.dw = (fmoe_weights){.w1 = b->dw1, .w2 = b->dw2, .lora_a2 = b->da2, .lora_b2 = b->dlora_b2};
    if (bias) b->backward.dw.b1 = b->db1, b->backward.dw.b2 = b->db2;
    if (b->shared) b->backward.dshared = (fmoe_weights){.w1 = b->ds1, .w2 = b->ds2};
    if (bias && b->shared) b->backward.dshared.b1 = b->dt1, b->backward.dshared.b2 = b->dt2;
    b->backward.dshared_gate = b->dgate;
}

static block draw_block(int64_t index)
{
    block b = {.d = draw_desc(), .T = index < 2 ? index : CHECK_PICK(1, 5, 17, 40), .aux = check_below(2)};
    b.gated = b.d.act < FMOE_ACT_SILU;
    b.shared = b.d.shared_I > 0;
    b.gate = b.d.flags & FMOE_SHARED_GATE;
    check_note("T=%" PRId64 " H=%" PRId64 " I=%" PRId64 " E=%" PRId64 " k=%" PRId64 " shared_I=%" PRId64
               " dtype=%d act=%d flags=%u score=%d aux=%d",
               b.T, b.d.H, b.d.I, b.d.E, b.d.k, b.d.shared_I, b.d.dtype, b.d.act, b.d.flags, b.d.route.score, b.aux);
    draw_inputs(&b);
    make_outputs(&b);
    return b;
}

static void run_block(block *b)
{
    const fmoe_run f = check_run(b->plan, FMOE_FORWARD, b->T, 0), r = check_run(b->plan, FMOE_BACKWARD, b->T, 0);
    CHECK_OK(fmoe_block_forward(b->plan, &b->forward, &f));
    CHECK_OK(fmoe_block_backward(b->plan, &b->backward, &r));
}

/* ---- the parts, one by one, through the public API ---- */

static fmoe_plan part_plan(const fmoe_desc *d) { return check_plan(d); }

/* [E,H] as the [1,H,E] weight of a one-group matmul. */
static fmoe_tensor *as_group(const fmoe_tensor *m)
{
    fmoe_tensor *t = check_alloc(sizeof *t + 6 * sizeof(int64_t));
    *t = *m;
    t->ndim = 3;
    t->shape = (int64_t *)(t + 1);
    t->strides = t->shape + 3;
    const int64_t shape[] = {1, m->shape[1], m->shape[0]},
                  strides[] = {m->shape[0] * m->shape[1], fmoe_stride(m, 1), fmoe_stride(m, 0)};
    memcpy(t->shape, shape, sizeof shape);
    memcpy(t->strides, strides, sizeof strides);
    return t;
}

static fmoe_tensor *as_row(const fmoe_tensor *v)
{
    if (!v) return NULL;
    fmoe_tensor *t = check_alloc(sizeof *t + 2 * sizeof(int64_t));
    *t = *v;
    t->ndim = 2;
    t->shape = (int64_t *)(t + 1);
    t->strides = NULL;
    t->shape[0] = 1;
    t->shape[1] = v->shape[0];
    return t;
}

static void check_forward_parts(const block *b)
{
    const int64_t T = b->T, E = b->d.E, H = b->d.H;
    fmoe_desc d = b->d;
    d.flags = 0;
    d.op = FMOE_OP_GROUPED_MATMUL;
    d.E = 1, d.K = H, d.N = E;
    const fmoe_plan router = part_plan(&d);
    d = b->d;
    d.flags = 0;
    d.op = FMOE_OP_ROUTE;
    const fmoe_plan route = part_plan(&d);
    d = b->d;
    d.op = FMOE_OP_EXPERTS;
    d.flags &= ~(uint32_t)FMOE_SHARED_GATE;
    const fmoe_plan experts = part_plan(&d);

    fmoe_tensor *logits = check_rows(wide(&b->d), T, E, 0),
                *ids = check_tensor(CHECK_I64, CHECK_SHAPE(T, b->d.k), NULL);
    fmoe_tensor *weights = check_tensor(wide(&b->d), CHECK_SHAPE(T, b->d.k), NULL),
                *out = check_rows(b->d.dtype, T, H, 0);
    const fmoe_gmm_args g = {
        .size = sizeof g, .x = b->x, .w = as_group(b->w_router), .bias = as_row(b->b_router), .y = logits};
    const fmoe_run g_run = check_run(router, FMOE_FORWARD, T, 0);
    CHECK_OK(fmoe_grouped_matmul_forward(router, &g, &g_run));
    const fmoe_route_args r = {
        .size = sizeof r, .logits = logits, .select_bias = b->select_bias, .ids = ids, .weights = weights};
    const fmoe_run r_run = check_run(route, FMOE_FORWARD, T, 0);
    CHECK_OK(fmoe_route_forward(route, &r, &r_run));
    const fmoe_experts_args e = {
        .size = sizeof e, .x = b->x, .ids = ids, .weights = weights, .w = b->forward.w, .out = out};
    const fmoe_run e_run = check_run(experts, FMOE_FORWARD, T, 0);
    CHECK_OK(fmoe_experts_forward(experts, &e, &e_run));
    check_equal("logits", b->logits, logits);
    for (int64_t i = 0; i < T * b->d.k; i++)
        if (check_get(ids, i) != check_get(b->ids, i))
            check_fail("ids[%" PRId64 "] is %g, not %g", i, check_get(b->ids, i), check_get(ids, i));
    check_equal("weights", b->weights, weights);
    if (!b->shared) check_equal("out", b->out, out);
}

/* ---- against the f64 block ---- */

/* The parts have exact bounds in checks of their own, and the forward parts are compared bit for bit above; the f64
 * block is composed as this one is, and test_ref_block.c proves how. What is left are buffers, dtypes and layouts,
 * whose mistakes are of order 1. Inputs are of order 1, so sums of n terms are off by about u sqrt(n) even where they
 * cancel.
 */
static void compare(const block *b, const char *what, const fmoe_tensor *got, const fmoe_tensor *want, double limit)
{
    if (!got || check_failed()) return;
    double most = 0, off = 0;
    for (int64_t i = 0; i < check_count(want); i++) {
        most = fmax(most, fabs(check_get(want, i)));
        off = fmax(off, fabs(check_get(got, i) - check_get(want, i)));
    }
    const double bound = limit * (most + 1) * sqrt((double)(b->d.H + b->d.I + b->d.shared_I));
    check_near(what, 0, off, 0, bound);
    check_gaps(what, got);
}

static void draw_block_parts(int64_t index)
{
    block b = draw_block(index);
    run_block(&b);
    check_forward_parts(&b);

    /* The f64 block on the same numbers, where it chooses the same experts (logits differ by their rounding only). */
    block ref = b;
    ref.d.dtype = FMOE_F64;
    fmoe_tensor **all[] = {&ref.x,           &ref.w_router, &ref.b_router,    &ref.select_bias, &ref.w1,     &ref.w2,
                           &ref.b1,          &ref.b2,       &ref.s1,          &ref.s2,          &ref.t1,     &ref.t2,
                           &ref.shared_gate, &ref.dout,     &ref.aux_dlogits, &ref.a2,          &ref.lora_b2};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) *all[i] = check_f64(*all[i]);
    make_outputs(&ref);
    run_block(&ref);
    for (int64_t i = 0; i < b.T * b.d.k; i++)
        if (check_get(b.ids, i) != check_get(ref.ids, i)) return;
    const bool kinks = b.d.act == FMOE_ACT_REGLU || b.d.act == FMOE_ACT_RELU || b.d.act == FMOE_ACT_SWIGLU_CLAMP ||
                       b.d.act == FMOE_ACT_SWIGLU_OAI || b.d.act == FMOE_ACT_SWIGLU_CLAMP_OUT;
    const double u = b.d.dtype == FMOE_F32 ? 0x1p-23 : b.d.dtype == FMOE_BF16 ? 0x1p-7 : 0x1p-10;
    compare(&b, "out", b.out, ref.out, u);
    compare(&b, "logits", b.logits, ref.logits, u);
    compare(&b, "weights", b.weights, ref.weights, u);
    if (kinks) return; /* a derivative that jumps: experts/ has the exact bound, here the sum of parts is at stake */
    compare(&b, "dx", b.dx, ref.dx, 4 * u);
    compare(&b, "dw_router", b.dw_router, ref.dw_router, 4 * u);
    compare(&b, "db_router", b.db_router, ref.db_router, 4 * u);
    compare(&b, "dw1", b.dw1, ref.dw1, 4 * u);
    compare(&b, "dw2", b.dw2, ref.dw2, 4 * u);
    compare(&b, "dlora_a2", b.da2, ref.da2, 4 * u);
    compare(&b, "dlora_b2", b.dlora_b2, ref.dlora_b2, 4 * u);
    compare(&b, "dshared w1", b.ds1, ref.ds1, 4 * u);
    compare(&b, "dshared w2", b.ds2, ref.ds2, 4 * u);
    compare(&b, "dshared_gate", b.dgate, ref.dgate, 4 * u);
    if (!(b.d.flags & FMOE_BIAS)) return;
    compare(&b, "db1", b.db1, ref.db1, 4 * u);
    compare(&b, "db2", b.db2, ref.db2, 4 * u);
    compare(&b, "dshared b1", b.dt1, ref.dt1, 4 * u);
    compare(&b, "dshared b2", b.dt2, ref.dt2, 4 * u);
}

/* Accumulating into zeros is overwriting; adding to dx likewise; twice is double. */
static void draw_block_accumulate(int64_t index)
{
    block b = draw_block(index + 2);
    run_block(&b);
    block again = b;
    make_outputs(&again);
    fmoe_tensor *grads[] = {again.dx,  again.dw_router, again.db_router, again.dw1, again.dw2, again.db1,
                            again.db2, again.ds1,       again.ds2,       again.dt1, again.dt2, again.dgate};
    fmoe_tensor *plain[] = {b.dx,  b.dw_router, b.db_router, b.dw1, b.dw2, b.db1,
                            b.db2, b.ds1,       b.ds2,       b.dt1, b.dt2, b.dgate};
    for (size_t i = 0; i < sizeof grads / sizeof *grads; i++)
        if (grads[i]) check_fill(grads[i], 0);
    const fmoe_run f = check_run(again.plan, FMOE_FORWARD, b.T, 0);
    const fmoe_run r = check_run(again.plan, FMOE_BACKWARD, b.T, FMOE_ACCUMULATE | FMOE_ADD_DX);
    CHECK_OK(fmoe_block_forward(again.plan, &again.forward, &f));
    CHECK_OK(fmoe_block_backward(again.plan, &again.backward, &r));
    const bool bias = b.d.flags & FMOE_BIAS;
    for (size_t i = 0; i < sizeof grads / sizeof *grads; i++) {
        const bool is_bias = i == 5 || i == 6 || i == 9 || i == 10;
        if (!grads[i] || (is_bias && !bias)) continue;
        for (int64_t j = 0; j < check_count(grads[i]) && !check_failed(); j++) {
            const double x = check_get(plain[i], j), y = check_get(grads[i], j);
            if (x != y) check_fail("gradient %zu[%" PRId64 "]: overwritten %.9g, added to zero %.9g", i, j, x, y);
        }
    }
}

const check_case check_block_cases[] = {
    {"block", draw_block_parts, 20, 2, 0},
    {"block_accumulate", draw_block_accumulate, 8, 1, 0},
    {NULL, NULL, 0, 0, 0},
};
