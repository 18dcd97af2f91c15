/* SPDX-License-Identifier: Apache-2.0
 * check_ops.c - route, permute, unpermute and activation through the public API, against an f64 plan (the reference).
 */
#include "check.h"

static int draw_dtype(void) { return (int)CHECK_PICK(FMOE_F32, FMOE_BF16, FMOE_F16); }
static int draw_int(void) { return (int)CHECK_PICK(CHECK_I32, CHECK_I64); }
static int plan_or_f32(int dtype) { return check_below(2) ? dtype : FMOE_F32; }
static int64_t draw_T(int64_t index) { return index < 3 ? index : CHECK_PICK(1, 2, 3, 5, 15, 16, 17, 33, 70); }

static fmoe_desc describe(int op, int dtype)
{
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = op;
    d.dtype = dtype;
    d.threads = (int32_t)CHECK_PICK(1, 2, 3);
    return d;
}

/* The same in double. */
static fmoe_plan reference(const fmoe_desc *d)
{
    fmoe_desc f64 = *d;
    f64.dtype = FMOE_F64;
    return check_plan(&f64);
}

static fmoe_tensor *f64_rows(int64_t rows, int64_t cols)
{
    return check_tensor(FMOE_F64, CHECK_SHAPE(rows, cols), NULL);
}

static void compare_ints(const char *what, const fmoe_tensor *got, const fmoe_tensor *want)
{
    for (int64_t i = 0; i < check_count(want); i++)
        if (check_get(got, i) != check_get(want, i)) {
            check_fail("%s[%" PRId64 "] is %g, not %g", what, i, check_get(got, i), check_get(want, i));
            return;
        }
    check_gaps(what, got);
}

/* ---- route ---- */

static void draw_rule(fmoe_desc *d)
{
    static const int64_t experts[] = {1, 2, 3, 7, 8, 16, 60, 64, 128, 257, 300};
    fmoe_route_rule *r = &d->route;
    d->E = experts[check_below(11)];
    d->k = 1 + check_below(fmoe_min(d->E, 12));
    r->score = (int32_t)check_below(4);
    r->renormalize = (int32_t)check_below(2);
    r->eps = check_below(2) ? 0 : check_below(2) ? 1e-20 : 0.25;
    r->scale = CHECK_PICK(0, 1) ? 2.5 : 0;
    if (d->E % 4 || check_below(2)) return;
    r->groups = (int32_t)CHECK_PICK(2, 4);
    r->topk_groups = (int32_t)(1 + check_below(r->groups));
    r->group_score = (int32_t)check_below(2);
    r->excluded_zero = (int32_t)check_below(2);
    d->k = fmoe_min(d->k, d->E / r->groups * r->topk_groups);
}

/* Most rows plain; some with ties, with numbers whose scores are neighbours in double, or lie far apart; some with NaN
 * and infinities. */
static void draw_logits(fmoe_tensor *logits, bool bad)
{
    const int64_t T = logits->shape[0], E = logits->shape[1];
    check_fill(logits, 4);
    for (int64_t t = 0; t < T; t++) {
        const int64_t kind = check_below(bad ? 10 : 5);
        const double special[] = {0, 0, 1, 0, 0, NAN, INFINITY, -INFINITY, NAN, INFINITY};
        for (int64_t e = 0; e < E; e++) {
            if (kind == 1) check_set(logits, t * E + e, (double)check_below(3)); /* ties */
            if (kind == 2 && check_below(2)) check_set(logits, t * E + e, 1);
            if (kind == 3) check_set(logits, t * E + e, e == 0 ? 1 : 1e-16 * (double)check_below(40));
            if (kind == 4) check_set(logits, t * E + e, 1600 * (check_uniform() - 0.5));
            if (kind >= 5 && kind < 8 && check_below(3) == 0) check_set(logits, t * E + e, special[kind]);
            if (kind >= 8) check_set(logits, t * E + e, check_below(2) ? special[kind] : -INFINITY);
        }
    }
}

static void check_distinct(const fmoe_tensor *ids, int64_t E)
{
    const int64_t T = ids->shape[0], k = ids->shape[1];
    char *seen = check_alloc((size_t)E);
    for (int64_t t = 0; t < T; t++) {
        memset(seen, 0, (size_t)E);
        for (int64_t j = 0; j < k; j++) {
            const int64_t e = (int64_t)check_get(ids, t * k + j);
            if (e < 0 || e >= E || seen[e]++) {
                check_fail("ids[%" PRId64 ",%" PRId64 "] is %" PRId64 ": out of range or twice, E=%" PRId64, t, j, e,
                           E);
                return;
            }
        }
    }
}

static void draw_route(int64_t index)
{
    fmoe_desc d = describe(FMOE_OP_ROUTE, draw_dtype());
    draw_rule(&d);
    const int64_t T = draw_T(index), E = d.E, k = d.k;
    const bool bad = check_below(2), biased = check_below(2), replay = check_below(3) == 0;
    if (replay) d.flags = (uint32_t)CHECK_PICK(0, FMOE_SKIP_NEG1, FMOE_SKIP_E);
    check_note("T=%" PRId64 " E=%" PRId64 " k=%" PRId64 " dtype=%d score=%d renorm=%d groups=%d/%d bad=%d replay=%d", T,
               E, k, d.dtype, d.route.score, d.route.renormalize, d.route.topk_groups, d.route.groups, bad, replay);
    fmoe_tensor *logits = check_rows(plan_or_f32(d.dtype), T, E, check_below(3));
    draw_logits(logits, bad);
    fmoe_tensor *bias = biased ? check_fill(check_tensor(FMOE_F32, CHECK_SHAPE(E), NULL), 1) : NULL;
    fmoe_tensor *ids = check_tensor(draw_int(), CHECK_SHAPE(T, k), NULL);
    fmoe_tensor *weights = check_tensor(plan_or_f32(d.dtype), CHECK_SHAPE(T, k), NULL);
    fmoe_tensor *bad_rows = check_tensor(CHECK_I64, CHECK_SHAPE(1), NULL),
                *bad_want = check_tensor(CHECK_I64, CHECK_SHAPE(1), NULL);
    fmoe_tensor *ids_want = check_tensor(CHECK_I64, CHECK_SHAPE(T, k), NULL), *weights_want = f64_rows(T, k);
    if (replay) {
        check_ids(ids, E, d.flags);
        for (int64_t i = 0; i < T * k; i++) check_set(ids_want, i, check_get(ids, i));
    }
    const uint32_t flags = replay ? FMOE_REPLAY : 0;
    const fmoe_plan plan = check_plan(&d), ref = reference(&d);
    fmoe_route_args a = {
        .size = sizeof a, .logits = logits, .select_bias = bias, .ids = ids, .weights = weights, .bad_rows = bad_rows};
    fmoe_route_args r = {.size = sizeof r,
                         .logits = check_f64(logits),
                         .select_bias = check_f64(bias),
                         .ids = ids_want,
                         .weights = weights_want,
                         .bad_rows = bad_want};
    fmoe_run run = check_run(plan, FMOE_FORWARD, T, flags), run_ref = check_run(ref, FMOE_FORWARD, T, flags);
    CHECK_OK(fmoe_route_forward(plan, &a, &run));
    CHECK_OK(fmoe_route_forward(ref, &r, &run_ref));
    if (!replay) check_distinct(ids, E);
    compare_ints("ids", ids, ids_want);
    compare_ints("bad_rows", bad_rows, bad_want);
    check_sums("weights", weights, weights_want, weights_want, 0.01); /* in double until stored */
    if (bad || check_failed()) return;

    a.dweights = check_fill(check_tensor(plan_or_f32(d.dtype), CHECK_SHAPE(T, k), NULL), 1);
    a.dlogits = check_rows(plan_or_f32(d.dtype), T, E, check_below(3));
    r.dweights = check_f64(a.dweights);
    r.dlogits = f64_rows(T, E);
    run = check_run(plan, FMOE_BACKWARD, T, 0);
    run_ref = check_run(ref, FMOE_BACKWARD, T, 0);
    CHECK_OK(fmoe_route_backward(plan, &a, &run));
    CHECK_OK(fmoe_route_backward(ref, &r, &run_ref));
    fmoe_tensor *ones = f64_rows(T, E); /* of order 1 before cancelling, in double */
    for (int64_t i = 0; i < T * E; i++) check_set(ones, i, 1);
    check_sums("dlogits", a.dlogits, r.dlogits, ones, 1e-4);
}

/* ---- permute and unpermute ---- */

static void draw_permute(int64_t index)
{
    fmoe_desc d = describe(FMOE_OP_PERMUTE, draw_dtype());
    d.H = check_size(200);
    d.E = CHECK_PICK(1, 2, 5, 8, 64, 300);
    d.k = CHECK_PICK(1, 2, 3, 8);
    d.flags = (uint32_t)CHECK_PICK(0, FMOE_SKIP_NEG1, FMOE_SKIP_E, FMOE_SKIP_NEG1 | FMOE_SKIP_E);
    const int64_t T = draw_T(index), R = T * d.k + (T ? check_below(3) : 0), H = d.H, k = d.k;
    check_note("T=%" PRId64 " H=%" PRId64 " E=%" PRId64 " k=%" PRId64 " R=%" PRId64 " dtype=%d flags=%u", T, H, d.E, k,
               R, d.dtype, d.flags);
    const fmoe_plan plan = check_plan(&d), ref = reference(&d);
    fmoe_tensor *x = check_fill(check_rows(d.dtype, T, H, check_below(3)), 1),
                *xp = check_rows(d.dtype, R, H, check_below(3));
    fmoe_tensor *ids = check_ids(check_tensor(draw_int(), CHECK_SHAPE(T, k), NULL), d.E, d.flags);
    fmoe_tensor *map = check_tensor(draw_int(), CHECK_SHAPE(T * k), NULL),
                *map_want = check_tensor(CHECK_I64, CHECK_SHAPE(T * k), NULL);
    fmoe_tensor *counts = check_below(2) ? check_tensor(draw_int(), CHECK_SHAPE(d.E), NULL) : NULL;
    fmoe_tensor *counts_want = check_tensor(CHECK_I64, CHECK_SHAPE(d.E), NULL), *xp_want = f64_rows(R, H);
    fmoe_permute_args a = {.size = sizeof a, .x = x, .ids = ids, .xp = xp, .map = map, .counts = counts};
    fmoe_permute_args r = {
        .size = sizeof r, .x = check_f64(x), .ids = ids, .xp = xp_want, .map = map_want, .counts = counts_want};
    fmoe_run run = check_run(plan, FMOE_FORWARD, T, 0), run_ref = check_run(ref, FMOE_FORWARD, T, 0);
    CHECK_OK(fmoe_permute_forward(plan, &a, &run));
    CHECK_OK(fmoe_permute_forward(ref, &r, &run_ref));
    compare_ints("map", map, map_want);
    if (counts) compare_ints("counts", counts, counts_want);
    check_sums("xp", xp, xp_want, xp_want, 0); /* a copy: the bound is met with zero error */
    for (int64_t i = 0; i < R * H && !check_failed(); i++)
        if (check_get(xp, i) != check_get(xp_want, i)) check_fail("xp[%" PRId64 "] is not a copy", i);

    /* Backward: dx[t] = sum of k rows. */
    check_fill(xp, 1);
    a.x = check_rows(d.dtype, T, H, check_below(3));
    r.x = f64_rows(T, H);
    r.xp = check_f64(xp);
    run = check_run(plan, FMOE_BACKWARD, T, 0);
    run_ref = check_run(ref, FMOE_BACKWARD, T, 0);
    CHECK_OK(fmoe_permute_backward(plan, &a, &run));
    CHECK_OK(fmoe_permute_backward(ref, &r, &run_ref));
    fmoe_permute_args m = r;
    m.x = f64_rows(T, H);
    m.xp = check_magnitudes(xp);
    CHECK_OK(fmoe_permute_backward(ref, &m, &run_ref));
    check_sums("dx", a.x, r.x, m.x, check_c(k));
}

/* A map as permute makes it. */
static fmoe_tensor *draw_map(const fmoe_desc *d, int64_t T)
{
    const fmoe_plan plan = reference(d);
    fmoe_tensor *ids = check_ids(check_tensor(CHECK_I32, CHECK_SHAPE(T, d->k), NULL), d->E, d->flags);
    fmoe_tensor *map = check_tensor(draw_int(), CHECK_SHAPE(T * d->k), NULL);
    const fmoe_permute_args a = {.size = sizeof a,
                                 .x = check_fill(f64_rows(T, d->H), 1),
                                 .ids = ids,
                                 .xp = f64_rows(T * d->k, d->H),
                                 .map = map};
    const fmoe_run run = check_run(plan, FMOE_FORWARD, T, 0);
    CHECK_OK(fmoe_permute_forward(plan, &a, &run));
    return map;
}

static void draw_unpermute(int64_t index)
{
    fmoe_desc d = describe(FMOE_OP_PERMUTE, draw_dtype());
    d.H = check_size(200);
    d.E = CHECK_PICK(1, 2, 5, 8, 64);
    d.k = CHECK_PICK(1, 2, 3, 8);
    d.flags = (uint32_t)CHECK_PICK(0, FMOE_SKIP_NEG1, FMOE_SKIP_E);
    const int64_t T = draw_T(index), R = T * d.k + (T ? check_below(3) : 0), H = d.H, k = d.k;
    const bool weighted = check_below(2);
    check_note("T=%" PRId64 " H=%" PRId64 " E=%" PRId64 " k=%" PRId64 " R=%" PRId64 " dtype=%d weighted=%d", T, H, d.E,
               k, R, d.dtype, weighted);
    const fmoe_plan plan = check_plan(&d), ref = reference(&d);
    fmoe_tensor *map = draw_map(&d, T), *y = check_fill(check_rows(d.dtype, R, H, check_below(3)), 1);
    fmoe_tensor *p = weighted ? check_fill(check_tensor(plan_or_f32(d.dtype), CHECK_SHAPE(T, k), NULL), 1) : NULL;
    fmoe_unpermute_args a = {
        .size = sizeof a, .y = y, .map = map, .weights = p, .out = check_rows(d.dtype, T, H, check_below(3))};
    fmoe_unpermute_args r = {
        .size = sizeof r, .y = check_f64(y), .map = map, .weights = check_f64(p), .out = f64_rows(T, H)};
    fmoe_unpermute_args m = {
        .size = sizeof m, .y = check_magnitudes(y), .map = map, .weights = check_magnitudes(p), .out = f64_rows(T, H)};
    fmoe_run run = check_run(plan, FMOE_FORWARD, T, 0), run_ref = check_run(ref, FMOE_FORWARD, T, 0);
    CHECK_OK(fmoe_unpermute_forward(plan, &a, &run));
    CHECK_OK(fmoe_unpermute_forward(ref, &r, &run_ref));
    CHECK_OK(fmoe_unpermute_forward(ref, &m, &run_ref));
    check_sums("out", a.out, r.out, m.out, check_c(k));

    fmoe_tensor *dout = check_fill(check_rows(d.dtype, T, H, check_below(3)), 1);
    a.dout = dout;
    r.dout = check_f64(dout);
    m.dout = check_magnitudes(dout);
    a.dy = check_below(4) ? check_rows(d.dtype, R, H, check_below(3)) : NULL;
    a.dweights = check_below(4) ? check_tensor(plan_or_f32(d.dtype), CHECK_SHAPE(T, k), NULL) : NULL;
    if (!a.dweights && check_below(2)) a.y = NULL; /* not needed then */
    r.dy = f64_rows(R, H);
    m.dy = f64_rows(R, H);
    r.dweights = f64_rows(T, k);
    m.dweights = f64_rows(T, k);
    run = check_run(plan, FMOE_BACKWARD, T, 0);
    run_ref = check_run(ref, FMOE_BACKWARD, T, 0);
    CHECK_OK(fmoe_unpermute_backward(plan, &a, &run));
    CHECK_OK(fmoe_unpermute_backward(ref, &r, &run_ref));
    CHECK_OK(fmoe_unpermute_backward(ref, &m, &run_ref));
    if (a.dy) check_sums("dy", a.dy, r.dy, m.dy, 1);
    if (a.dweights) check_sums("dweights", a.dweights, r.dweights, m.dweights, check_c(H));
}

/* ---- activation ---- */

static void draw_activation(int64_t index)
{
    fmoe_desc d = describe(FMOE_OP_ACTIVATION, draw_dtype());
    d.act = check_acts[index % CHECK_ACTS];
    const bool gated = d.act < FMOE_ACT_SILU;
    d.flags = gated && check_below(2) ? FMOE_INTERLEAVED : 0;
    d.I = check_size(200);
    if (check_below(2)) d.act_limit = 0.5f;
    const int64_t R = draw_T(index), I = d.I, C = gated ? 2 * I : I;
    check_note("R=%" PRId64 " I=%" PRId64 " act=%d dtype=%d flags=%u", R, I, d.act, d.dtype, d.flags);
    const fmoe_plan plan = check_plan(&d), ref = reference(&d);
    fmoe_tensor *h = check_fill(check_rows(d.dtype, R, C, check_below(3)), 3);
    fmoe_activation_args a = {.size = sizeof a, .h = h, .a = check_rows(d.dtype, R, I, check_below(3))};
    fmoe_activation_args r = {.size = sizeof r, .h = check_f64(h), .a = f64_rows(R, I)};
    fmoe_run run = check_run(plan, FMOE_FORWARD, R, 0), run_ref = check_run(ref, FMOE_FORWARD, R, 0);
    CHECK_OK(fmoe_activation_forward(plan, &a, &run));
    CHECK_OK(fmoe_activation_forward(ref, &r, &run_ref));
    a.da = check_fill(check_rows(d.dtype, R, I, check_below(3)), 1);
    a.dh = check_rows(d.dtype, R, C, check_below(3));
    r.da = check_f64(a.da);
    r.dh = f64_rows(R, C);
    run = check_run(plan, FMOE_BACKWARD, R, 0);
    run_ref = check_run(ref, FMOE_BACKWARD, R, 0);
    CHECK_OK(fmoe_activation_backward(plan, &a, &run));
    CHECK_OK(fmoe_activation_backward(ref, &r, &run_ref));

    const fmoe_act_params act = {d.act, 1.702f, d.act_limit == 0 ? 7 : d.act_limit, 0};
    const double us = 1.01 * check_u(d.dtype), tiny = check_tiny(d.dtype);
    for (int64_t i = 0; i < R * I && !check_failed(); i++) {
        const int64_t row = i / I, j = i % I;
        const int64_t gc = row * C + (d.flags ? 2 * j : j), uc = gated ? row * C + (d.flags ? 2 * j + 1 : I + j) : gc;
        const double g = gated ? check_get(h, gc) : 0, u = check_get(h, uc), da = fabs(check_get(a.da, i));
        const double want = check_get(r.a, i), du = check_get(r.dh, uc);
        check_near("a", i, check_get(a.a, i), want, check_act_bound(&act, g, u, 0, 0, 0) + us * fabs(want) + tiny);
        check_near("dh", uc, check_get(a.dh, uc), du, da * check_act_bound(&act, g, u, 0, 0, 2) + us * fabs(du) + tiny);
        if (!gated) continue;
        const double dg = check_get(r.dh, gc);
        check_near("dh", gc, check_get(a.dh, gc), dg, da * check_act_bound(&act, g, u, 0, 0, 1) + us * fabs(dg) + tiny);
    }
    check_gaps("a", a.a);
    check_gaps("dh", a.dh);
}

const check_case check_op_cases[] = {
    {"route", draw_route, 40, 1, 0},
    {"permute", draw_permute, 30, 1, 0},
    {"unpermute", draw_unpermute, 30, 1, 0},
    {"activation", draw_activation, 24, 1, 0},
    {NULL, NULL, 0, 0, 0},
};
