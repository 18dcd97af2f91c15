/* SPDX-License-Identifier: Apache-2.0
 *
 * check_layer.c - the experts layer against a computation in double that carries a bound with every number.
 *
 * Each quantity is a value v and an error e. A sum of products adds |a| e(b) + |b| e(a), plus c(n) u times the sum of
 * magnitudes for the f32 arithmetic; an activation moves its inputs inside their errors (check_act_bound), so that a
 * value near a kink of relu or a clamp gets the bound of both sides; storing adds the unit roundoff of what is stored.
 * The values are checked against the f64 plan as well: three opinions. */
#include "check_layer.h"

const char *const layer_output_names[LAYER_OUTPUTS] = {"out", "dx",       "dweights", "dw1",      "dw2",     "db1",
                                                       "db2", "dlora_a1", "dlora_b1", "dlora_a2", "dlora_b2"};

/* Rank, rows and columns of factor i of a1, b1, a2, b2. */
static int64_t layer_rank(const check_layer *l, int i) { return i < 2 ? l->d.rank1 : l->d.rank2; }
static int64_t lora_rows(const check_layer *l, int i) { return i == 1 ? l->C : i == 3 ? l->d.H : layer_rank(l, i); }
static int64_t lora_cols(const check_layer *l, int i) { return i == 0 ? l->d.H : i == 2 ? l->d.I : layer_rank(l, i); }

static fmoe_weights with_lora(const check_layer *l, fmoe_weights w, fmoe_tensor *const lora[4])
{
    if (l->d.rank1) w.lora_a1 = lora[0], w.lora_b1 = lora[1];
    if (l->d.rank2) w.lora_a2 = lora[2], w.lora_b2 = lora[3];
    w.lora_scale1 = lora == l->lora ? l->scale[0] : NAN; /* in gradients they are not read */
    w.lora_scale2 = lora == l->lora ? l->scale[1] : NAN;
    return w;
}

void layer_outputs(const check_layer *l, const fmoe_tensor *out[LAYER_OUTPUTS])
{
    const bool bias = l->d.flags & FMOE_BIAS;
    const fmoe_tensor *all[LAYER_OUTPUTS] = {
        l->out, l->dx, l->dp, l->dw1, l->dw2, bias ? l->db1 : NULL, bias ? l->db2 : NULL};
    for (int i = 0; i < 4; i++)
        if (layer_rank(l, i)) all[7 + i] = l->dlora[i];
    memcpy(out, all, sizeof all);
}

static fmoe_weights as_list(const check_layer *l, const fmoe_tensor *w1, const fmoe_tensor *w2)
{
    const int64_t I = l->d.I;
    fmoe_weights w = {.down = check_slices(w2), .up = check_slices(l->gated ? check_part(w1, 1, I, I, 1) : w1)};
    if (l->gated) w.gate = check_slices(check_part(w1, 1, 0, I, 1));
    return w;
}

/* Every second matrix of a list in the other orientation. */
static const fmoe_tensor *mixed(const check_layer *l, const fmoe_tensor *list, int first)
{
    fmoe_tensor *all = check_alloc((size_t)l->d.E * sizeof *all);
    for (int64_t e = 0; list && e < l->d.E; e++) {
        all[e] = list[e];
        if ((e + first) % 2 == 0) continue;
        const int64_t N = list[e].shape[0], K = list[e].shape[1];
        const bool along = fmoe_stride(&list[e], 1) == 1;
        const fmoe_tensor *turned = check_stack(fmoe_tensor_dtype(&list[e]), 1, N, K, along);
        all[e] = *check_slices(turned);
        for (int64_t i = 0; i < N * K; i++) check_set(&all[e], i, check_get(&list[e], i));
    }
    return list ? all : NULL;
}

fmoe_desc layer_draw(void)
{
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_EXPERTS;
    d.dtype = (int32_t)CHECK_PICK(FMOE_F32, FMOE_BF16, FMOE_F16);
    d.act = check_acts[check_below(CHECK_ACTS)];
    d.E = CHECK_PICK(1, 3, 8, 17);
    d.k = CHECK_PICK(1, 2, 4);
    d.flags = (uint32_t)(CHECK_PICK(0, FMOE_BIAS) | CHECK_PICK(0, FMOE_INTERLEAVED) | CHECK_PICK(0, FMOE_SKIP_NEG1));
    d.rank1 = CHECK_PICK(0, 0, 5, 16);
    d.rank2 = CHECK_PICK(0, 0, 3, 65);
    return d;
}

void layer_note(const check_layer *l)
{
    check_note("T=%" PRId64 " H=%" PRId64 " I=%" PRId64 " E=%" PRId64 " k=%" PRId64 " rank=%" PRId64 ",%" PRId64
               " dtype=%d act=%d flags=%u layout=%d",
               l->T, l->d.H, l->d.I, l->d.E, l->d.k, l->d.rank1, l->d.rank2, l->d.dtype, l->d.act, l->d.flags,
               l->layout);
}

static void make_outputs(check_layer *l)
{
    const fmoe_desc *d = &l->d;
    const int dtype = d->dtype, wide = dtype == FMOE_F64 ? FMOE_F64 : FMOE_F32;
    const int grad = l->layout & LAYER_WIDE_GRAD ? wide : dtype, p_type = l->layout & LAYER_WIDE_P ? wide : dtype;
    const int64_t T = l->T, H = d->H, I = d->I, E = d->E, gap = l->layout & LAYER_PADDED ? 3 : 0;
    /* The halves of a turned stack interleave in memory: as outputs the library takes them for overlapping. */
    const bool turned = !(l->layout & LAYER_GRAD_TURNED) == !!(l->layout & LAYER_TRANSPOSED) && !l->grad_list;
    l->out = check_rows(dtype, T, H, gap);
    l->dx = check_rows(dtype, T, H, gap);
    l->dp = check_tensor(p_type, CHECK_SHAPE(T, d->k), NULL);
    l->dw1 = check_stack(grad, E, l->C, H, turned);
    l->dw2 = check_stack(grad, E, H, I, turned);
    l->db1 = check_rows(grad, E, l->C, gap);
    l->db2 = check_rows(grad, E, H, gap);
    for (int i = 0; i < 4; i++)
        l->dlora[i] = check_stack(grad, E, lora_rows(l, i), lora_cols(l, i), l->layout >> i & 2);
    l->plan = check_plan(d);

    l->forward = (fmoe_experts_args){.size = sizeof l->forward, .x = l->x, .ids = l->ids, .weights = l->p};
    l->forward.w = (fmoe_weights){.w1 = l->w1, .w2 = l->w2};
    l->backward = l->forward;
    l->forward.out = l->out;
    l->backward.dout = l->dout;
    l->backward.dx = l->dx;
    l->backward.dweights = l->dp;
    l->backward.dw = (fmoe_weights){.w1 = l->dw1, .w2 = l->dw2};
    if (d->flags & FMOE_BIAS) {
        l->forward.w.b1 = l->backward.w.b1 = l->b1, l->forward.w.b2 = l->backward.w.b2 = l->b2;
        l->backward.dw.b1 = l->db1, l->backward.dw.b2 = l->db2;
    }
    if (l->list) l->forward.w = as_list(l, l->w1, l->w2);
    if (l->list && l->layout & LAYER_MIXED) {
        fmoe_weights *w = &l->forward.w;
        w->gate = mixed(l, w->gate, 0), w->up = mixed(l, w->up, 1), w->down = mixed(l, w->down, 1);
    }
    if (l->list) l->backward.w = l->forward.w;
    if (l->grad_list) l->backward.dw = as_list(l, l->dw1, l->dw2);
    l->forward.w = l->backward.w = with_lora(l, l->forward.w, l->lora);
    l->backward.dw = with_lora(l, l->backward.dw, l->dlora);
    size_t bytes;
    CHECK_OK(fmoe_saved_bytes(l->plan, T, &bytes));
    void *saved = bytes ? check_guarded(bytes, 16) : NULL;
    l->forward.saved = l->backward.saved = saved;
    l->forward.saved_bytes = l->backward.saved_bytes = bytes;
}

check_layer layer_make(const fmoe_desc *d, int64_t T, int layout)
{
    check_layer l = {.d = *d, .T = T, .layout = layout, .gated = d->act < FMOE_ACT_SILU};
    l.list = layout & LAYER_LIST;
    l.grad_list = l.list != !!(layout & LAYER_GRAD_LIST);
    if (l.list || l.grad_list) l.d.flags &= ~(uint32_t)FMOE_BIAS;        /* lists have none */
    if (l.list != l.grad_list) l.d.flags &= ~(uint32_t)FMOE_INTERLEAVED; /* refused: test_api.c */
    l.C = l.gated ? 2 * d->I : d->I;
    const int dtype = d->dtype, p_type = layout & LAYER_WIDE_P ? FMOE_F32 : dtype,
              b_type = layout & LAYER_WIDE_BIAS ? FMOE_F32 : dtype;
    const int64_t H = d->H, I = d->I, E = d->E, gap = layout & LAYER_PADDED ? 2 : 0;
    l.x = check_fill(check_rows(dtype, T, H, gap), 1);
    l.dout = check_fill(check_rows(dtype, T, H, gap), 1);
    l.p = check_fill(check_tensor(p_type, CHECK_SHAPE(T, d->k), NULL), 1);
    l.ids =
        check_ids(check_tensor(layout & LAYER_I64 ? CHECK_I64 : CHECK_I32, CHECK_SHAPE(T, d->k), NULL), E, d->flags);
    l.w1 = check_fill(check_stack(dtype, E, l.C, H, layout & LAYER_TRANSPOSED), 2.5 / sqrt((double)H));
    l.w2 = check_fill(check_stack(dtype, E, H, I, layout & LAYER_TRANSPOSED), 2.5 / sqrt((double)I));
    l.b1 = check_fill(check_rows(b_type, E, l.C, gap), 1);
    l.b2 = check_fill(check_rows(b_type, E, H, gap), 1);
    for (int i = 0; i < 4; i++) {
        const int64_t rows = lora_rows(&l, i), cols = lora_cols(&l, i);
        l.lora[i] = check_stack(dtype, E, rows, cols, layout >> i & 1);
        if (!layer_rank(&l, i)) continue;
        const fmoe_tensor *narrow = check_fill(l.lora[i], 2.5 / sqrt((double)cols));
        if (!(layout & LAYER_WIDE_FACTOR) || (i ^ layout) & 1) continue;
        l.lora[i] = check_stack(FMOE_F32, E, rows, cols, layout >> i & 2);
        for (int64_t j = 0; j < E * rows * cols; j++) check_set(l.lora[i], j, check_get(narrow, j));
    }
    static const float scales[] = {0, 1, 2, 0.3f, -1.7f};
    for (int i = 0; i < 2; i++) l.scale[i] = scales[check_below(5)];
    make_outputs(&l);
    return l;
}

check_layer layer_again(const check_layer *l, const fmoe_desc *d)
{
    check_layer again = *l;
    again.d = *d;
    if (d->dtype == FMOE_F64 && l->d.dtype != FMOE_F64) {
        fmoe_tensor **all[] = {&again.x,  &again.dout,    &again.p,       &again.w1,      &again.w2,     &again.b1,
                               &again.b2, &again.lora[0], &again.lora[1], &again.lora[2], &again.lora[3]};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) *all[i] = check_f64(*all[i]);
    }
    make_outputs(&again);
    return again;
}

void layer_run(check_layer *l, uint32_t forward_flags, uint32_t backward_flags)
{
    const fmoe_run f = check_run(l->plan, FMOE_FORWARD, l->T, forward_flags);
    const fmoe_run b = check_run(l->plan, FMOE_BACKWARD, l->T, backward_flags);
    CHECK_OK(fmoe_experts_forward(l->plan, &l->forward, &f));
    CHECK_OK(fmoe_experts_backward(l->plan, &l->backward, &b));
}

void layer_equal(const char *what, const check_layer *a, const check_layer *b)
{
    const fmoe_tensor *x[LAYER_OUTPUTS], *y[LAYER_OUTPUTS];
    layer_outputs(a, x);
    layer_outputs(b, y);
    for (int i = 0; i < LAYER_OUTPUTS; i++) {
        char name[80];
        snprintf(name, sizeof name, "%s: %s", what, layer_output_names[i]);
        if (x[i]) check_equal(name, x[i], y[i]);
    }
}

/* ---- values with bounds ---- */

typedef struct bounded { /* arrays of one tensor: value, error carried in, sum of magnitudes */
    double *v, *e, *m;
    int64_t n;
} bounded;

static bounded bounded_new(int64_t n)
{
    return (bounded){check_alloc((size_t)n * 8 + 8), check_alloc((size_t)n * 8 + 8), check_alloc((size_t)n * 8 + 8), n};
}

static bounded bounded_like(const fmoe_tensor *t, bool add) /* starts at what is added to */
{
    bounded b = bounded_new(check_count(t));
    for (int64_t i = 0; add && i < b.n; i++) {
        b.v[i] = check_get(t, i);
        b.m[i] = fabs(b.v[i]);
    }
    return b;
}

static void plus(bounded *b, int64_t i, double x, double ex, double y, double ey) /* += x * y */
{
    b->v[i] += x * y;
    b->m[i] += fabs(x * y);
    b->e[i] += fabs(x) * ey + fabs(y) * ex + ex * ey;
}

/* n additions in f32, then stored as dtype. */
static double bound_of(const bounded *b, int64_t i, int64_t n, int dtype)
{
    const double e = b->e[i] + check_c(n) * U32 * b->m[i];
    return e + 1.01 * check_u(dtype) * (fabs(b->v[i]) + e) + check_tiny(dtype);
}

static void compare(const char *what, const fmoe_tensor *got, const bounded *want, int64_t n)
{
    const int dtype = fmoe_tensor_dtype(got);
    for (int64_t i = 0; i < want->n && !check_failed(); i++)
        check_near(what, i, check_get(got, i), want->v[i], bound_of(want, i, n, dtype));
    check_gaps(what, got);
}

typedef struct layer_bounds {
    const check_layer *l;
    const double *x, *dout, *p, *w1, *w2, *b1, *b2, *lora[4];
    bounded out, dx, dp, dw1, dw2, db1, db2, dlora[4];
    bounded h, a, y, dA, dh, pa; /* of one row */
    bounded l1, l2, pl2, m1, m2; /* of one row, between the factors of an adapter; pl2: of p * a */
} layer_bounds;

static void settle(bounded *b, int64_t n, double u) /* from sums to numbers with one error, stored with u */
{
    for (int64_t i = 0; i < b->n; i++) {
        b->e[i] += check_c(n) * U32 * b->m[i];
        b->e[i] += u * (fabs(b->v[i]) + b->e[i]);
    }
}

static void clear(bounded *b)
{
    memset(b->v, 0, (size_t)b->n * 8);
    memset(b->e, 0, (size_t)b->n * 8);
    memset(b->m, 0, (size_t)b->n * 8);
}

/* to[i] += sum over j of v[j] * m[i, j], or m[j, i] when turned; ev: the errors of v, NULL: none. */
static void through(bounded *to, const double *v, const double *ev, int64_t n, const double *m, bool turned)
{
    for (int64_t i = 0; i < to->n; i++)
        for (int64_t j = 0; j < n; j++) plus(to, i, v[j], ev ? ev[j] : 0, turned ? m[j * to->n + i] : m[i * n + j], 0);
}

/* The same into an adapter: times its scale, settled and stored with u. */
static void into(bounded *to, const double *v, const double *ev, int64_t n, const double *m, bool turned, float scale,
                 double u)
{
    const double s = scale == 0 ? 1 : (double)scale;
    through(to, v, ev, n, m, turned);
    for (int64_t i = 0; i < to->n; i++) to->v[i] *= s, to->e[i] *= fabs(s), to->m[i] *= fabs(s);
    settle(to, n + 1, u);
}

/* grad[i, j] += v[i] * w[j] */
static void outer(bounded *grad, int64_t at, const double *v, const double *ev, int64_t n, const double *w,
                  const double *ew, int64_t m)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < m; j++) plus(grad, at + i * m + j, v[i], ev ? ev[i] : 0, w[j], ew ? ew[j] : 0);
}

static void bound_row(layer_bounds *b, int64_t t, int64_t j, int64_t e)
{
    const check_layer *l = b->l;
    const int64_t H = l->d.H, I = l->d.I, C = l->C, slot = t * l->d.k + j;
    const bool flag = l->d.flags & FMOE_INTERLEAVED, bias = l->d.flags & FMOE_BIAS;
    const bool interleaved = flag && !l->list, grad_interleaved = flag && !l->grad_list;
    const double p = b->p[slot], us = l->d.dtype == FMOE_F32 ? 0 : 1.01 * check_u(l->d.dtype);
    const double *x = b->x + t * H, *dout = b->dout + t * H, *w1 = b->w1 + e * C * H, *w2 = b->w2 + e * H * I;
    const fmoe_act_params act = {l->d.act, l->d.act_alpha == 0 ? 1.702f : l->d.act_alpha,
                                 l->d.act_limit == 0 ? 7 : l->d.act_limit, 0};
    const int64_t r1 = l->d.rank1, r2 = l->d.rank2;
    const double *a1 = b->lora[0] + e * r1 * H, *b1 = b->lora[1] + e * C * r1, *a2 = b->lora[2] + e * r2 * I,
                 *b2 = b->lora[3] + e * H * r2;
    bounded *all[] = {&b->h, &b->a, &b->y, &b->dA, &b->dh, &b->pa, &b->l1, &b->l2, &b->pl2, &b->m1, &b->m2};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) clear(all[i]);

    for (int64_t c = 0; c < C; c++) {
        for (int64_t n = 0; n < H; n++) plus(&b->h, c, x[n], 0, w1[c * H + n], 0);
        if (bias) plus(&b->h, c, 1, 0, b->b1[e * C + c], 0);
    }
    into(&b->l1, x, NULL, H, a1, false, l->scale[0], us);
    through(&b->h, b->l1.v, b->l1.e, r1, b1, false);
    settle(&b->h, H + r1, us);
    into(&b->m2, dout, NULL, H, b2, true, l->scale[1], us);
    for (int64_t i = 0; i < I; i++)
        for (int64_t n = 0; n < H; n++) plus(&b->dA, i, dout[n], 0, w2[n * I + i], 0);
    through(&b->dA, b->m2.v, b->m2.e, r2, a2, true);
    settle(&b->dA, H + r2, 0);
    bounded *dp = &b->dp;
    for (int64_t i = 0; i < I; i++) {
        const int64_t gc = l->gated && interleaved ? 2 * i : i, uc = !l->gated ? i : interleaved ? 2 * i + 1 : I + i;
        const double g = l->gated ? b->h.v[gc] : 0, u = b->h.v[uc], eg = l->gated ? b->h.e[gc] : 0, eu = b->h.e[uc];
        const check_act_value v = check_act(act.act, (double)act.alpha, (double)act.limit, g, u);
        b->a.v[i] = v.a;
        b->a.e[i] = check_act_bound(&act, g, u, eg, eu, 0);
        plus(dp, slot, b->dA.v[i], b->dA.e[i], b->a.v[i], b->a.e[i]);
        b->pa.v[i] = p * v.a;
        b->pa.e[i] = fabs(p) * b->a.e[i] + (2 * U32 + us) * (fabs(p * v.a) + fabs(p) * b->a.e[i]);
        b->a.e[i] += us * (fabs(v.a) + b->a.e[i]);
        const double pd = p * b->dA.v[i], epd = fabs(p) * b->dA.e[i] + U32 * fabs(pd);
        if (l->gated) plus(&b->dh, gc, pd, epd, v.dg, check_act_bound(&act, g, u, eg, eu, 1));
        plus(&b->dh, uc, pd, epd, v.du, check_act_bound(&act, g, u, eg, eu, 2));
    }
    settle(&b->dh, 2, us);
    into(&b->l2, b->a.v, b->a.e, I, a2, false, l->scale[1], us);
    into(&b->pl2, b->pa.v, b->pa.e, I, a2, false, l->scale[1], us);
    into(&b->m1, b->dh.v, b->dh.e, C, b1, true, l->scale[0], us);
    for (int64_t n = 0; n < H; n++) {
        for (int64_t i = 0; i < I; i++) plus(&b->y, n, b->a.v[i], b->a.e[i], w2[n * I + i], 0);
        if (bias) plus(&b->y, n, 1, 0, b->b2[e * H + n], 0);
        if (bias) plus(dp, slot, dout[n], 0, b->b2[e * H + n], 0);
    }
    through(&b->y, b->l2.v, b->l2.e, r2, b2, false);
    settle(&b->y, I + r2, 0);
    outer(&b->dlora[0], e * r1 * H, b->m1.v, b->m1.e, r1, x, NULL, H);
    outer(&b->dlora[1], e * C * r1, b->dh.v, b->dh.e, C, b->l1.v, b->l1.e, r1);
    outer(&b->dlora[2], e * r2 * I, b->m2.v, b->m2.e, r2, b->pa.v, b->pa.e, I);
    outer(&b->dlora[3], e * H * r2, dout, NULL, H, b->pl2.v, b->pl2.e, r2);
    for (int64_t i = 0; i < r1; i++)
        for (int64_t n = 0; n < H; n++) plus(&b->dx, t * H + n, b->m1.v[i], b->m1.e[i], a1[i * H + n], 0);
    for (int64_t n = 0; n < H; n++) {
        plus(&b->out, t * H + n, p, 0, b->y.v[n], b->y.e[n]);
        plus(&b->db2, e * H + n, p, 0, dout[n], 0);
        for (int64_t i = 0; i < I; i++) plus(&b->dw2, (e * H + n) * I + i, dout[n], 0, b->pa.v[i], b->pa.e[i]);
    }
    for (int64_t c = 0; c < C; c++) {
        const int64_t i = interleaved ? c / 2 : c % I,
                      up = interleaved ? c % 2 : c / I; /* row c of W1 in the gradient's order */
        const int64_t dc = l->gated ? (grad_interleaved ? 2 * i + up : up * I + i) : c;
        plus(&b->db1, e * C + c, 1, 0, b->dh.v[c], b->dh.e[c]);
        for (int64_t n = 0; n < H; n++) {
            plus(&b->dx, t * H + n, b->dh.v[c], b->dh.e[c], w1[c * H + n], 0);
            plus(&b->dw1, (e * C + dc) * H + n, b->dh.v[c], b->dh.e[c], x[n], 0);
        }
    }
}

static const double *doubles(const fmoe_tensor *t) { return check_f64(t)->data; }

/* ---- draws ---- */

/* Every fourth draw: one expert with more rows than any block of rows has. */
static bool many_rows(int64_t index) { return index % 4 == 2; }

static fmoe_desc draw_desc(int64_t index)
{
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_EXPERTS;
    d.dtype = (int32_t)CHECK_PICK(FMOE_F32, FMOE_BF16, FMOE_F16);
    d.act = check_acts[index % CHECK_ACTS];
    d.act_limit = check_below(2) ? 0.5f : 0;
    d.threads = (int32_t)CHECK_PICK(1, 2, 3);
    d.E = CHECK_PICK(1, 1, 2, 3, 5, 8);
    d.k = CHECK_PICK(1, 2, 3, 5);
    d.H = check_size(140);
    d.I = check_size(140);
    if (many_rows(index)) {
        d.E = d.k = 1;
        d.H = check_size(20), d.I = check_size(20);
    }
    d.flags = (uint32_t)(CHECK_PICK(0, FMOE_BIAS) | CHECK_PICK(0, FMOE_RECOMPUTE, FMOE_REUSE_SAVED) |
                         CHECK_PICK(0, FMOE_INTERLEAVED) |
                         CHECK_PICK(0, 0, FMOE_SKIP_NEG1, FMOE_SKIP_E, FMOE_SKIP_NEG1 | FMOE_SKIP_E));
    return d;
}

static int64_t draw_T(const fmoe_desc *d, int64_t index)
{
    const int64_t T = index < 2 ? index : CHECK_PICK(1, 2, 5, 6, 7, 13, 64, 65), room = 3000000 / (d->k * d->H * d->I);
    return many_rows(index) ? 530 : fmoe_min(T, fmoe_max(room, 1)); /* the double loops are slow */
}

static void check_experts(const fmoe_desc d, int64_t T)
{
    check_layer l = layer_make(&d, T,
                               (int)(check_below(256) | (check_below(4) ? 0 : LAYER_GRAD_LIST) |
                                     (check_below(4) ? 0 : LAYER_MIXED) | (check_below(2) ? 0 : LAYER_WIDE_FACTOR)));
    const bool add_out = check_below(4) == 0, accumulate = check_below(3) == 0, add_dx = check_below(4) == 0;
    check_note("T=%" PRId64 " H=%" PRId64 " I=%" PRId64 " E=%" PRId64 " k=%" PRId64 " rank=%" PRId64 ",%" PRId64
               " dtype=%d act=%d flags=%u layout=%d add=%d%d%d",
               T, d.H, d.I, d.E, d.k, d.rank1, d.rank2, d.dtype, d.act, l.d.flags, l.layout, add_out, accumulate,
               add_dx);
    if (add_out) check_fill(l.out, 1);
    if (add_dx) check_fill(l.dx, 1);
    fmoe_tensor *grads[] = {l.dw1, l.dw2, l.db1, l.db2};
    for (int i = 0; i < 4 && accumulate; i++) {
        check_fill(grads[i], 1);
        if (layer_rank(&l, i)) check_fill(l.dlora[i], 1);
    }

    layer_bounds b = {.l = &l,
                      .x = doubles(l.x),
                      .dout = doubles(l.dout),
                      .p = doubles(l.p),
                      .w1 = doubles(l.w1),
                      .w2 = doubles(l.w2),
                      .b1 = doubles(l.b1),
                      .b2 = doubles(l.b2)};
    b.out = bounded_like(l.out, add_out), b.dx = bounded_like(l.dx, add_dx), b.dp = bounded_like(l.dp, false);
    b.dw1 = bounded_like(l.dw1, accumulate), b.dw2 = bounded_like(l.dw2, accumulate);
    b.db1 = bounded_like(l.db1, accumulate), b.db2 = bounded_like(l.db2, accumulate);
    b.h = bounded_new(l.C), b.dh = bounded_new(l.C), b.y = bounded_new(d.H);
    b.a = bounded_new(d.I), b.dA = bounded_new(d.I), b.pa = bounded_new(d.I);
    b.l1 = bounded_new(d.rank1), b.m1 = bounded_new(d.rank1);
    b.l2 = bounded_new(d.rank2), b.pl2 = bounded_new(d.rank2), b.m2 = bounded_new(d.rank2);
    for (int i = 0; i < 4; i++) {
        b.lora[i] = doubles(l.lora[i]);
        b.dlora[i] = bounded_like(l.dlora[i], accumulate);
    }
    int64_t rows[9] = {0}, most = 1;
    for (int64_t t = 0; t < T; t++)
        for (int64_t j = 0; j < d.k; j++) {
            const int64_t e = (int64_t)check_get(l.ids, t * d.k + j);
            if (e < 0 || e >= d.E) continue;
            most = fmoe_max(most, ++rows[e]);
            bound_row(&b, t, j, e);
        }
    layer_run(&l, add_out ? FMOE_ADD_OUT : 0, (accumulate ? FMOE_ACCUMULATE : 0) | (add_dx ? FMOE_ADD_DX : 0));
    compare("out", l.out, &b.out, d.k + 1);
    compare("dx", l.dx, &b.dx, d.k * (l.C + d.rank1) + 1);
    compare("dweights", l.dp, &b.dp, d.I + d.H + d.rank2);
    compare("dw1", l.dw1, &b.dw1, most + 1);
    compare("dw2", l.dw2, &b.dw2, most + 1);
    if (l.d.flags & FMOE_BIAS) {
        compare("db1", l.db1, &b.db1, most + 1);
        compare("db2", l.db2, &b.db2, most + 1);
    }
    for (int i = 0; i < 4; i++)
        if (layer_rank(&l, i)) compare(layer_output_names[7 + i], l.dlora[i], &b.dlora[i], most + 1);

    /* The reference agrees with the double computation above, so that the two cannot share a mistake unseen. */
    if (add_out || accumulate || add_dx || check_failed()) return;
    fmoe_desc f64 = l.d;
    f64.dtype = FMOE_F64;
    check_layer ref = layer_again(&l, &f64);
    layer_run(&ref, 0, 0);
    const fmoe_tensor *outputs[LAYER_OUTPUTS];
    const bounded *mine[LAYER_OUTPUTS] = {&b.out, &b.dx,       &b.dp,       &b.dw1,      &b.dw2,     &b.db1,
                                          &b.db2, &b.dlora[0], &b.dlora[1], &b.dlora[2], &b.dlora[3]};
    layer_outputs(&ref, outputs);
    for (int o = 0; o < LAYER_OUTPUTS; o++)
        for (int64_t i = 0; outputs[o] && i < mine[o]->n && !check_failed(); i++)
            if (!(fabs(check_get(outputs[o], i) - mine[o]->v[i]) <= 1e-11 * (1 + mine[o]->m[i])))
                check_fail("reference %s[%" PRId64 "] is %.15g, the check's own %.15g", layer_output_names[o], i,
                           check_get(outputs[o], i), mine[o]->v[i]);
}

static void draw_experts(int64_t index)
{
    const fmoe_desc d = draw_desc(index);
    check_experts(d, draw_T(&d, index));
}

static void draw_lora(int64_t index)
{
    fmoe_desc d = draw_desc(index);
    d.rank1 = CHECK_PICK(0, 1, 3, 16, 33, 64);
    d.rank2 = d.rank1 ? CHECK_PICK(0, 1, 4, 16, 17, 64) : CHECK_PICK(1, 8, 64);
    check_experts(d, draw_T(&d, index));
}

/* ---- relative errors of whole layers ---- */

/* The table of docs/numerics.md: f32 2e-6 everywhere; bf16 4e-3 forward, 6e-3 for gradients; f16 6e-4 and 1e-3. */
static void layer_error(const fmoe_desc *d, int64_t T, int layout, double forward, double backward)
{
    check_layer l = layer_make(d, T, layout | LAYER_WIDE_P | LAYER_WIDE_GRAD);
    fmoe_desc f64 = *d;
    f64.dtype = FMOE_F64;
    check_layer ref = layer_again(&l, &f64);
    layer_run(&l, 0, 0);
    layer_run(&ref, 0, 0);
    const fmoe_tensor *got[LAYER_OUTPUTS], *want[LAYER_OUTPUTS];
    layer_outputs(&l, got);
    layer_outputs(&ref, want);
    check_info("H=%" PRId64 " I=%" PRId64 ":", d->H, d->I);
    for (int i = 0; i < LAYER_OUTPUTS; i++) {
        if (!got[i]) continue;
        const double error = check_rel_l2(got[i], want[i]), limit = i == 0 ? forward : backward;
        check_info(" %s %.1e", layer_output_names[i], error);
        if (!(error <= limit))
            check_fail("relative error of %s is %.3g, allowed %.3g", layer_output_names[i], error, limit);
    }
}

static void error_case(int dtype, int64_t H, int64_t I, int64_t T, double forward, double backward)
{
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_EXPERTS;
    d.dtype = dtype;
    d.H = H, d.I = I, d.E = H < 4096 ? 3 : 1, d.k = H < 4096 ? 2 : 1;
    d.threads = 2;
    check_note("T=%" PRId64 " H=%" PRId64 " I=%" PRId64 " dtype=%d", T, H, I, dtype);
    layer_error(&d, T, 0, forward, backward);
}

/* Lists whose matrices lie in either orientation, in turns, and are longer than a chunk. */
static void error_mixed(int64_t index)
{
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_EXPERTS;
    d.dtype = FMOE_F32;
    d.H = 700, d.I = 900, d.E = 3, d.k = 2, d.threads = 2;
    d.act = index ? FMOE_ACT_SWIGLU : FMOE_ACT_RELU;
    check_note("act=%d", d.act);
    layer_error(&d, 4, LAYER_LIST | LAYER_MIXED, 2e-6, 2e-6);
}

static void error_f32(int64_t index) { error_case(FMOE_F32, index ? 256 : 1024, index ? 1000 : 768, 16, 2e-6, 2e-6); }
static void error_bf16(int64_t index) { error_case(FMOE_BF16, index ? 256 : 1024, index ? 1000 : 768, 16, 4e-3, 6e-3); }
static void error_f16(int64_t index) { error_case(FMOE_F16, index ? 256 : 1024, index ? 1000 : 768, 16, 6e-4, 1e-3); }
static void error_f32_large(int64_t index) { error_case(FMOE_F32, index ? 4000 : 4096, 4096, 8, 2e-6, 2e-6); }

const check_case check_layer_cases[] = {
    {"experts", draw_experts, 36, 6, 0},
    {"lora", draw_lora, 24, 3, 0},
    {"error_f32", error_f32, 1, 0, 1},
    {"error_mixed", error_mixed, 2, 0, 1},
    {"error_bf16", error_bf16, 1, 0, 1},
    {"error_f16", error_f16, 1, 0, 1},
    {"error_f32_4096", error_f32_large, 1, 0, 2},
    {NULL, NULL, 0, 0, 0},
};
