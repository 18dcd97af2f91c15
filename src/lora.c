/* SPDX-License-Identifier: Apache-2.0
 *
 * lora.c - experts with low-rank adapters, composed from the other operations of the backend table, for backends whose
 * own experts knows nothing of them.
 *
 *   xp  = permute(x)
 *   h   = xp . W1 + l1 . B1     where l1 = s1 xp . A1
 *   a   = act(h)
 *   y   = a . W2 + l2 . B2      where l2 = s2 a . A2
 *   out = unpermute(y, p)
 *
 * "Add to what is there" is a grouped matmul's backward: dx += dy . w^T with w = B, dy = x . A, dx = h. So a factor B
 * is the weight [E, out, rank] of one plan, whose forward carries gradients back (m = dh . B) and whose backward adds
 * to h and makes dB; a factor A is the weight [E, in, rank] of another, whose backward adds to dx and makes dA. Nothing
 * here computes, and host code never touches device memory. Against a fused layer: x and y exist as rows, and dp costs
 * the product that makes y again. */
#include <inttypes.h>

#include "compose.h"

enum { PERMUTE, UP, UP_A, UP_B, ACT, DOWN, DOWN_A, DOWN_B };

const char *const fmoe_lora_part_names[PART_COUNT] = {
    "adapters composed: permute", "up", "up A", "up B", "activation", "down", "down A", "down B"};

bool fmoe_lora_composed(const fmoe_plan_impl *p)
{
    return p->d.op == FMOE_OP_EXPERTS && (p->d.rank1 || p->d.rank2) && !p->backend->lora;
}

static fmoe_status build_matmul(fmoe_plan_impl *p, int part, int64_t K, int64_t N)
{
    fmoe_desc d = p->d;
    d.op = FMOE_OP_GROUPED_MATMUL;
    d.K = K;
    d.N = N;
    d.flags = 0;
    return N ? fmoe_plan_build(&d, &p->part[part]) : FMOE_OK; /* rank 0: no adapter */
}

fmoe_status fmoe_lora_build(fmoe_plan_impl *p)
{
    fmoe_desc permute = p->d, act = p->d;
    permute.op = FMOE_OP_PERMUTE;
    permute.flags &= FMOE_SKIP_NEG1 | FMOE_SKIP_E;
    act.op = FMOE_OP_ACTIVATION;
    act.flags &= FMOE_INTERLEAVED;
    fmoe_status status = fmoe_plan_build(&permute, &p->part[PERMUTE]);
    if (status == FMOE_OK) status = fmoe_plan_build(&act, &p->part[ACT]);
    if (status == FMOE_OK) status = build_matmul(p, UP, p->d.H, p->h_cols);
    if (status == FMOE_OK) status = build_matmul(p, UP_A, p->d.H, p->d.rank1);
    if (status == FMOE_OK) status = build_matmul(p, UP_B, p->h_cols, p->d.rank1);
    if (status == FMOE_OK) status = build_matmul(p, DOWN, p->d.I, p->d.H);
    if (status == FMOE_OK) status = build_matmul(p, DOWN_A, p->d.I, p->d.rank2);
    if (status == FMOE_OK) status = build_matmul(p, DOWN_B, p->d.H, p->d.rank2);
    if (status != FMOE_OK)
        for (int i = 0; i < PART_COUNT; i++) fmoe_plan_free(p->part[i]);
    return status;
}

/* ---- buffers ---- */

typedef struct lora_buffers {
    void *part; /* one buffer, large enough for each part in turn */
    size_t part_bytes;
    void *counts, *map;   /* [E] int64, [R] int32 */
    void *xp, *h, *a, *y; /* [R,H], [R,2I or I], [R,I], [R,H] */
    void *l1, *l2;        /* [R,rank1], [R,rank2] */
    void *dy, *da, *dh;   /* backward: as y, a, h; dxp takes y's place */
    void *m1, *m2;        /* backward: as l1, l2 */
} lora_buffers;

static fmoe_status carve(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, fmoe_carve *c, lora_buffers *b)
{
    const int64_t element = (int64_t)fmoe_dtype_size(p->d.dtype);
    int64_t R;
    if (__builtin_mul_overflow(T, p->d.k, &R)) {
        c->overflow = true;
        return FMOE_OK;
    }
    b->part_bytes = 0; /* for no rows, room as for two: gradients are zeroed all the same */
    for (int i = 0; i < PART_COUNT; i++)
        for (int part_pass = FMOE_FORWARD; p->part[i] && part_pass <= FMOE_BACKWARD; part_pass++) {
            size_t bytes, ignored;
            FMOE_TRY(fmoe_plan_bytes(p->part[i], (fmoe_pass)part_pass,
                                     R == 0         ? 2
                                     : i == PERMUTE ? T
                                                    : R,
                                     &bytes, &ignored));
            if (bytes > b->part_bytes) b->part_bytes = bytes;
        }
    b->part = fmoe_carve_take(c, (int64_t)b->part_bytes, 1);
    b->counts = fmoe_carve_take(c, p->d.E, sizeof(int64_t));
    b->map = fmoe_carve_take(c, R, sizeof(int32_t));
    const struct {
        void **to;
        int64_t columns;
        bool backward;
    } all[] = {{&b->xp, p->d.H, false},    {&b->h, p->h_cols, false},   {&b->a, p->d.I, false},
               {&b->y, p->d.H, false},     {&b->l1, p->d.rank1, false}, {&b->l2, p->d.rank2, false},
               {&b->dy, p->d.H, true},     {&b->da, p->d.I, true},      {&b->dh, p->h_cols, true},
               {&b->m1, p->d.rank1, true}, {&b->m2, p->d.rank2, true}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!all[i].backward || pass == FMOE_BACKWARD)
            *all[i].to = fmoe_carve_take(c, R, (size_t)(all[i].columns * element));
    return FMOE_OK;
}

fmoe_status fmoe_lora_bytes(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, size_t *workspace, size_t *saved)
{
    lora_buffers b = {0};
    fmoe_carve c = fmoe_carve_begin(NULL, FMOE_PART_ALIGN), kept = {.align = FMOE_PART_ALIGN};
    FMOE_TRY(carve(p, pass, T, &c, &b));
    int64_t R;
    if (__builtin_mul_overflow(T, p->d.k, &R)) R = -1; /* overflow, as carve has found */
    if (!(p->d.flags & FMOE_RECOMPUTE)) fmoe_carve_take(&kept, R, (size_t)p->h_cols * fmoe_dtype_size(p->d.dtype));
    if (c.overflow || kept.overflow || kept.used > (size_t)INT64_MAX)
        return fmoe_fail(FMOE_ERR_OVERFLOW, "workspace for T = %" PRId64 " does not fit 63 bits", T);
    if (workspace) *workspace = fmoe_carve_bytes(&c);
    *saved = kept.used;
    return FMOE_OK;
}

/* ---- one run ---- */

typedef struct lora_run {
    const fmoe_plan_impl *p;
    const fmoe_experts_args *a;
    const fmoe_run *run;
    lora_buffers b;
    int64_t R;
    fmoe_piece counts, map, xp, h, act, y, l1, l2, dy, da, dh, m1, m2;
    fmoe_piece w1, w2, a1, a2, dw1, dw2, da1, da2; /* turned: [E, in, out] */
} lora_run;

static fmoe_run part_run(const lora_run *r, uint32_t flags)
{
    return (fmoe_run){.size = sizeof(fmoe_run),
                      .workspace = r->b.part,
                      .workspace_bytes = r->b.part_bytes,
                      .stream = r->run->stream,
                      .submit = r->run->submit,
                      .submit_ctx = r->run->submit_ctx,
                      .flags = flags};
}

/* y = x . w (+ bias) */
static fmoe_status multiply(const lora_run *r, int part, const fmoe_tensor *x, const fmoe_tensor *w,
                            const fmoe_tensor *bias, const fmoe_tensor *y)
{
    const fmoe_gmm_args args = {.size = sizeof args, .x = x, .w = w, .bias = bias, .sizes = &r->counts.t, .y = y};
    const fmoe_run run = part_run(r, 0);
    return r->p->backend->gmm[FMOE_FORWARD](r->p->part[part], &args, &run);
}

/* y = scale x . w, into an adapter of W1 (UP_A, UP_B) or W2. */
static fmoe_status multiply_low(const lora_run *r, int part, const fmoe_tensor *x, const fmoe_tensor *w,
                                const fmoe_tensor *y)
{
    const float scale = fmoe_lora_scale(part < DOWN ? r->a->w.lora_scale1 : r->a->w.lora_scale2);
    const fmoe_run run = part_run(r, 0);
    FMOE_TRY(multiply(r, part, x, w, NULL, y));
    return scale == 1 ? FMOE_OK : r->p->backend->scale(r->p->part[part], y, scale, &run);
}

/* dx (+)= dy . w^T, dw = x^T . dy, dbias; each or NULL. */
static fmoe_status multiply_back(const lora_run *r, int part, const fmoe_tensor *x, const fmoe_tensor *w,
                                 const fmoe_tensor *dy, const fmoe_tensor *dx, bool add, const fmoe_tensor *dw,
                                 const fmoe_tensor *dbias)
{
    if (!dx && !dw && !dbias) return FMOE_OK;
    const fmoe_gmm_args args = {
        .size = sizeof args, .x = x, .w = w, .sizes = &r->counts.t, .dy = dy, .dx = dx, .dw = dw, .dbias = dbias};
    const fmoe_run run = part_run(r, (r->run->flags & FMOE_ACCUMULATE) | (add ? FMOE_ADD_DX : 0));
    return r->p->backend->gmm[FMOE_BACKWARD](r->p->part[part], &args, &run);
}

/* h = xp . W1 + b1 + l1 . B1 */
static fmoe_status up(const lora_run *r)
{
    const fmoe_weights *w = &r->a->w;
    FMOE_TRY(multiply(r, UP, &r->xp.t, &r->w1.t, w->b1, &r->h.t));
    if (!r->p->d.rank1) return FMOE_OK;
    FMOE_TRY(multiply_low(r, UP_A, &r->xp.t, &r->a1.t, &r->l1.t));
    return multiply_back(r, UP_B, NULL, w->lora_b1, &r->l1.t, &r->h.t, true, NULL, NULL);
}

/* y = a . W2 + b2 + l2 . B2 */
static fmoe_status down(const lora_run *r)
{
    const fmoe_weights *w = &r->a->w;
    FMOE_TRY(multiply(r, DOWN, &r->act.t, &r->w2.t, w->b2, &r->y.t));
    if (!r->p->d.rank2) return FMOE_OK;
    FMOE_TRY(multiply_low(r, DOWN_A, &r->act.t, &r->a2.t, &r->l2.t));
    return multiply_back(r, DOWN_B, NULL, w->lora_b2, &r->l2.t, &r->y.t, true, NULL, NULL);
}

static fmoe_status permute_and_activate(const lora_run *r, bool need_h)
{
    const fmoe_backend *b = r->p->backend;
    const fmoe_run plain = part_run(r, 0);
    const fmoe_permute_args permute = {.size = sizeof permute,
                                       .x = r->a->x,
                                       .ids = r->a->ids,
                                       .xp = &r->xp.t,
                                       .map = &r->map.t,
                                       .counts = &r->counts.t};
    FMOE_TRY(b->permute[FMOE_FORWARD](r->p->part[PERMUTE], &permute, &plain));
    if (need_h) FMOE_TRY(up(r));
    const fmoe_activation_args act = {.size = sizeof act, .h = &r->h.t, .a = &r->act.t};
    return b->activation[FMOE_FORWARD](r->p->part[ACT], &act, &plain);
}

static fmoe_status forward(const lora_run *r)
{
    FMOE_TRY(permute_and_activate(r, true));
    FMOE_TRY(down(r));
    const fmoe_unpermute_args out = {
        .size = sizeof out, .y = &r->y.t, .map = &r->map.t, .weights = r->a->weights, .out = r->a->out};
    const fmoe_run plain = part_run(r, 0);
    return r->p->backend->unpermute[FMOE_FORWARD](r->p->part[PERMUTE], &out, &plain);
}

static fmoe_status backward(lora_run *r)
{
    const fmoe_backend *b = r->p->backend;
    const fmoe_experts_args *a = r->a;
    const fmoe_weights *w = &a->w, *dw = &a->dw;
    const bool need_dh = a->dx || dw->w1 || dw->b1 || dw->lora_a1 || dw->lora_b1;
    const fmoe_run plain = part_run(r, 0);
    FMOE_TRY(permute_and_activate(r, (r->p->d.flags & FMOE_RECOMPUTE) != 0));
    if (a->dweights) FMOE_TRY(down(r));
    const fmoe_unpermute_args out = {.size = sizeof out,
                                     .y = a->dweights ? &r->y.t : NULL,
                                     .map = &r->map.t,
                                     .weights = a->weights,
                                     .dout = a->dout,
                                     .dy = &r->dy.t,
                                     .dweights = a->dweights};
    FMOE_TRY(b->unpermute[FMOE_BACKWARD](r->p->part[PERMUTE], &out, &plain));

    const fmoe_tensor *da = need_dh ? &r->da.t : NULL;
    FMOE_TRY(
        multiply_back(r, DOWN, &r->act.t, &r->w2.t, &r->dy.t, da, false, fmoe_turned(&r->dw2, dw->w2, 1, 2), dw->b2));
    if (r->p->d.rank2 && (da || dw->lora_a2)) {
        FMOE_TRY(multiply_low(r, DOWN_B, &r->dy.t, w->lora_b2, &r->m2.t));
        FMOE_TRY(multiply_back(r, DOWN_A, &r->act.t, &r->a2.t, &r->m2.t, da, true,
                               fmoe_turned(&r->da2, dw->lora_a2, 1, 2), NULL));
    }
    if (dw->lora_b2) {
        if (!a->dweights) FMOE_TRY(multiply_low(r, DOWN_A, &r->act.t, &r->a2.t, &r->l2.t));
        FMOE_TRY(multiply_back(r, DOWN_B, &r->dy.t, w->lora_b2, &r->l2.t, NULL, false, dw->lora_b2, NULL));
    }
    if (!need_dh) return FMOE_OK;

    const fmoe_activation_args act = {.size = sizeof act, .h = &r->h.t, .da = da, .dh = &r->dh.t};
    FMOE_TRY(b->activation[FMOE_BACKWARD](r->p->part[ACT], &act, &plain));
    const fmoe_tensor *dxp = a->dx ? &r->y.t : NULL;
    FMOE_TRY(
        multiply_back(r, UP, &r->xp.t, &r->w1.t, &r->dh.t, dxp, false, fmoe_turned(&r->dw1, dw->w1, 1, 2), dw->b1));
    if (r->p->d.rank1 && (dxp || dw->lora_a1)) {
        FMOE_TRY(multiply_low(r, UP_B, &r->dh.t, w->lora_b1, &r->m1.t));
        FMOE_TRY(multiply_back(r, UP_A, &r->xp.t, &r->a1.t, &r->m1.t, dxp, true,
                               fmoe_turned(&r->da1, dw->lora_a1, 1, 2), NULL));
    }
    if (dw->lora_b1) {
        FMOE_TRY(multiply_low(r, UP_A, &r->xp.t, &r->a1.t, &r->l1.t));
        FMOE_TRY(multiply_back(r, UP_B, &r->dh.t, w->lora_b1, &r->l1.t, NULL, false, dw->lora_b1, NULL));
    }
    if (!a->dx) return FMOE_OK;
    const fmoe_permute_args back = {.size = sizeof back, .x = a->dx, .xp = dxp, .map = &r->map.t};
    return b->permute[FMOE_BACKWARD](r->p->part[PERMUTE], &back, &plain);
}

fmoe_status fmoe_lora_check(const fmoe_plan_impl *p, const fmoe_weights *w, const fmoe_weights *dw, uint32_t flags)
{
    if (!fmoe_lora_composed(p)) return FMOE_OK;
    if (!w->w1 || dw->gate || dw->up || dw->down)
        return fmoe_fail(FMOE_ERR_UNSUPPORTED,
                         "%s is given as a list: with adapters the %s backend takes stacked weights only",
                         w->w1 ? "a gradient" : "up", p->backend->name);
    if (flags & (FMOE_ADD_OUT | FMOE_ADD_DX))
        return fmoe_fail(FMOE_ERR_UNSUPPORTED,
                         "fmoe_run.flags 0x%x: with adapters the %s backend cannot add to out or dx", flags,
                         p->backend->name);
    return FMOE_OK;
}

static fmoe_status run_composed(const fmoe_plan_impl *p, fmoe_pass pass, const fmoe_experts_args *a,
                                const fmoe_run *run)
{
    lora_run r = {.p = p, .a = a, .run = run, .R = a->x->shape[0] * p->d.k};
    fmoe_carve c = fmoe_carve_begin(run->workspace, FMOE_PART_ALIGN);
    FMOE_TRY(carve(p, pass, a->x->shape[0], &c, &r.b));
    const fmoe_desc *d = &p->d;
    void *h = a->saved && !(d->flags & FMOE_RECOMPUTE) ? a->saved : r.b.h;
    fmoe_piece_of(&r.counts, p, r.b.counts, -64, d->E, 1);
    fmoe_piece_of(&r.map, p, r.b.map, -32, r.R, 1);
    r.counts.t.ndim = r.map.t.ndim = 1;
    fmoe_piece_of(&r.xp, p, r.b.xp, d->dtype, r.R, d->H);
    fmoe_piece_of(&r.h, p, h, d->dtype, r.R, p->h_cols);
    fmoe_piece_of(&r.act, p, r.b.a, d->dtype, r.R, d->I);
    fmoe_piece_of(&r.y, p, r.b.y, d->dtype, r.R, d->H);
    fmoe_piece_of(&r.l1, p, r.b.l1, d->dtype, r.R, d->rank1);
    fmoe_piece_of(&r.l2, p, r.b.l2, d->dtype, r.R, d->rank2);
    fmoe_piece_of(&r.dy, p, r.b.dy, d->dtype, r.R, d->H);
    fmoe_piece_of(&r.da, p, r.b.da, d->dtype, r.R, d->I);
    fmoe_piece_of(&r.dh, p, r.b.dh, d->dtype, r.R, p->h_cols);
    fmoe_piece_of(&r.m1, p, r.b.m1, d->dtype, r.R, d->rank1);
    fmoe_piece_of(&r.m2, p, r.b.m2, d->dtype, r.R, d->rank2);
    fmoe_turned(&r.w1, a->w.w1, 1, 2);
    fmoe_turned(&r.w2, a->w.w2, 1, 2);
    fmoe_turned(&r.a1, a->w.lora_a1, 1, 2);
    fmoe_turned(&r.a2, a->w.lora_a2, 1, 2);
    return pass == FMOE_FORWARD ? forward(&r) : backward(&r);
}

fmoe_status fmoe_experts_run(const fmoe_plan_impl *p, fmoe_pass pass, const fmoe_experts_args *a, const fmoe_run *run)
{
    return fmoe_lora_composed(p) ? run_composed(p, pass, a, run) : p->backend->experts[pass](p, a, run);
}
