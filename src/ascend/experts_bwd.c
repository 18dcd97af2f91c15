/* SPDX-License-Identifier: Apache-2.0
 *
 * experts_bwd.c - the layer, backward. With everything kept it is seven launches for stacked SwiGLU weights:
 *   B1 UnpermuteGrad  dY, dp        B2 dA = dY . W2         B3 dW2 = dY^T . a       B4 SwiGluGrad  dH
 *   B5 dXp = dH . W1                B6 dW1 = dH^T . xp      B7 PermuteGrad  dx
 * A lean plan makes xp, a and y again first: at most four launches more, three without int64 ids. */
#include "ascend.h"
#include "ops.h"

typedef struct { /* what is needed of the forward, kept or made again */
    asc_routing r;
    asc_groups g;
    asc_view xp, h, a, y;
} state;

static bool wants_w1(const fmoe_weights *dw) { return dw->w1 || dw->gate || dw->up; }
static bool wants_w2(const fmoe_weights *dw) { return dw->w2 || dw->down; }
static bool wants_first(const fmoe_weights *dw) { return wants_w1(dw) || dw->lora_a1 || dw->lora_b1; }  /* reads xp */
static bool wants_second(const fmoe_weights *dw) { return wants_w2(dw) || dw->lora_a2 || dw->lora_b2; } /* reads a */

static bool is_wide(const fmoe_tensor *t) { return t && fmoe_tensor_dtype(t) == FMOE_F32; }

/* Running sums are needed for f32 gradients of 16-bit plans, unless counts will do, and for long lists. */
static bool needs_running(const asc_call *c, const fmoe_experts_args *a, const asc_groups *g)
{
    const fmoe_desc *d = &c->p->d;
    if (d->E > 128 && (a->w.up || a->w.down)) return true;
    return asc_sums_needed(c, g) && d->dtype != FMOE_F32 &&
           (is_wide(a->dw.w1) || is_wide(a->dw.w2) || is_wide(a->dw.b1) || is_wide(a->dw.b2) ||
            is_wide(a->dw.lora_a1) || is_wide(a->dw.lora_b1) || is_wide(a->dw.lora_a2) || is_wide(a->dw.lora_b2) ||
            is_wide(a->dw.gate) || is_wide(a->dw.up) || is_wide(a->dw.down));
}

static void recall(asc_call *c, const fmoe_experts_args *a, int64_t R, state *s)
{
    const fmoe_desc *d = &c->p->d;
    const aclDataType dtype = asc_plan_dtype(c->p);
    const bool w1 = wants_first(&a->dw) || a->dw.b1, w2 = wants_second(&a->dw) || a->dw.b2, below = w1 || a->dx;
    asc_saved kept = {.map = {.data = NULL}};
    if (c->plan->keep != KEEP_NOTHING) asc_saved_layout(c->p, R, a->saved, &kept);
    s->r = (asc_routing){.map = kept.map, .counts = kept.counts};
    s->xp = kept.xp;
    s->h = kept.h;
    s->a = kept.a;
    s->y = kept.y;
    if (c->plan->keep != KEEP_NOTHING) s->r.mask = asc_skip_mask(c, a->ids);
    if (!s->xp.data && (wants_first(&a->dw) || !s->h.data)) {
        asc_routing again = {.map = asc_new1(c, ACL_INT32, R), .counts = asc_new1(c, ACL_INT64, d->E + 1)};
        again.counts.dims[0] = d->E;
        s->xp = asc_new2(c, dtype, R, d->H);
        asc_route_rows(c, asc_of(a->x), a->ids, s->xp, &again);
        if (!s->r.map.data) s->r = again;
    }
    s->g = (asc_groups){.n = d->E, .list = s->r.counts};
    if (needs_running(c, a, &s->g)) asc_running(c, &s->g);
    if (a->dw.b1 && a->dw.b2) s->g.ones = asc_ones(c, R, dtype); /* for both */
    if (!s->h.data && (below || w2 || a->dweights)) {
        s->h = asc_new2(c, dtype, R, c->p->h_cols);
        asc_up(c, &a->w, s->xp, &s->g, s->h);
    }
    if (!s->a.data && (wants_second(&a->dw) || a->dweights)) {
        s->a = asc_new2(c, dtype, R, d->I);
        asc_act(c, s->h, s->a);
    }
    if (!s->y.data) {
        s->y = asc_new2(c, dtype, R, d->H);
        if (a->dweights) asc_down(c, &a->w, s->a, &s->g, s->y);
        else if (!c->measure) asc_zero(c, asc_part(s->y, 0, 0, 1, 1)); /* an operand whose result nobody wants */
    }
}

/* B1: dY and dp. */
static asc_view combine_gradient(asc_call *c, const fmoe_experts_args *a, const state *s, asc_view dY)
{
    const aclDataType own = asc_of(a->weights).dtype, dtype = asc_plan_dtype(c->p);
    const asc_view p = asc_probs(c, a->weights, &s->r, c->acl->mixed_probs ? own : dtype);
    const asc_view dout = asc_packed(c, a->dout);
    const asc_view dp =
        a->dweights ? asc_target(c, a->dweights, p.dtype, false) : asc_new2(c, p.dtype, p.dims[0], p.dims[1]);
    const aclTensor *ty = asc_t(c, s->y), *td = asc_t(c, dout), *tm = asc_t(c, s->r.map), *tp = asc_t(c, p);
    const aclTensor *to = asc_t(c, dY), *tq = asc_t(c, dp);
    ASC_LAUNCH(c, MoeTokenUnpermuteGrad, ty, td, tm, tp, false, NULL, to, tq);
    if (a->dweights) {
        if (s->r.mask.data) asc_fill_where(c, dp, s->r.mask, 0);
        asc_deliver(c, a->dweights, dp, false);
    }
    return dY;
}

static void both_halves(asc_call *c, asc_view dh, asc_view part[2])
{
    const int64_t I = dh.dims[1] / 2;
    for (int i = 0; i < 2; i++) {
        part[i] = asc_new2(c, dh.dtype, dh.dims[0], I);
        asc_copy(c, part[i], asc_part(dh, 1, i * I, 1, I));
    }
}

/* B5 and B6, B7: from dH to dW1, db1 and dx. dXp takes the place of dY. */
static void below_activation(asc_call *c, const fmoe_experts_args *a, state *s, asc_view dH, asc_view dXp,
                             uint32_t flags)
{
    const fmoe_desc *d = &c->p->d;
    const bool add = flags & FMOE_ACCUMULATE;
    asc_view part[2] = {dH, dH};
    const bool pairs = a->w.gate != NULL;
    if (pairs) both_halves(c, dH, part);
    const asc_adapter_of low = asc_adapter1(&a->w), dlow = asc_adapter1(&a->dw);
    if (a->dx) {
        const bool add_dx = flags & FMOE_ADD_DX;
        const size_t mark = c->used;
        if (c->plan->skip) asc_zero(c, dXp); /* PermuteGrad reads the rows of skipped slots */
        if (pairs) {
            const asc_view other = asc_new2(c, dXp.dtype, dXp.dims[0], dXp.dims[1]);
            if (c->plan->skip) asc_zero(c, other);
            asc_product(c, part[0], &a->w, asc_gate, false, NULL, &s->g, dXp);
            asc_product(c, part[1], &a->w, asc_w1, false, NULL, &s->g, other);
            asc_add_to(c, dXp, other);
        } else {
            asc_product(c, dH, &a->w, asc_w1, false, NULL, &s->g, dXp);
        }
        asc_adapter_gradient(c, low, dlow, s->xp, dH, &s->g, &dXp, add);
        const asc_view dx = asc_target(c, a->dx, dXp.dtype, add_dx);
        const aclTensor *tg = asc_t(c, dXp), *tm = asc_t(c, s->r.map), *to = asc_t(c, dx);
        ASC_LAUNCH(c, MoeTokenPermuteGrad, tg, tm, d->k, false, to);
        asc_deliver(c, a->dx, dx, add_dx);
        asc_release(c, mark);
    }
    if (!a->dx) asc_adapter_gradient(c, low, dlow, s->xp, dH, &s->g, NULL, add);
    if (a->dw.w1) asc_outer_product(c, dH, s->xp, &s->g, asc_weights_of(c, "dw1", a->dw.w1, NULL, d->E), add);
    if (a->dw.gate)
        asc_outer_product(c, part[0], s->xp, &s->g, asc_weights_of(c, "dgate", NULL, a->dw.gate, d->E), add);
    if (a->dw.up) asc_outer_product(c, part[1], s->xp, &s->g, asc_weights_of(c, "dup", NULL, a->dw.up, d->E), add);
    if (a->dw.b1) asc_bias_gradient(c, dH, &s->g, a->dw.b1, add);
}

/* No tokens: gradients of weights that are not added to become zero. */
static void nothing_routed(asc_call *c, const fmoe_experts_args *a, bool add)
{
    const fmoe_tensor *stack[] = {a->dw.w1,      a->dw.w2,      a->dw.lora_a1, a->dw.lora_b1,
                                  a->dw.lora_a2, a->dw.lora_b2, a->dw.b1,      a->dw.b2},
                      *list[] = {a->dw.gate, a->dw.up, a->dw.down};
    if (add) return;
    static const char *const name[] = {"dw1", "dw2", "dlora_a1", "dlora_b1", "dlora_a2", "dlora_b2"};
    for (int i = 0; i < 8; i++) {
        if (!stack[i]) continue;
        asc_weights w = {.stack = asc_of(stack[i])};
        if (i < 6) w = asc_weights_of(c, name[i], stack[i], NULL, c->p->d.E);
        asc_zero(c, w.stack);
    }
    for (int i = 0; i < 3; i++)
        for (int64_t e = 0; list[i] && e < c->p->d.E; e++) asc_zero(c, asc_of(&list[i][e]));
}

void asc_experts_backward(asc_call *c, const fmoe_experts_args *a, uint32_t flags)
{
    const fmoe_desc *d = &c->p->d;
    const int64_t T = a->x->shape[0], R = T * d->k;
    const aclDataType dtype = asc_plan_dtype(c->p);
    const bool add = flags & FMOE_ACCUMULATE;
    if (T == 0) {
        nothing_routed(c, a, add);
        return;
    }
    state s;
    recall(c, a, R, &s);
    const asc_view dY = combine_gradient(c, a, &s, asc_new2(c, dtype, R, d->H));
    const bool below = wants_first(&a->dw) || a->dw.b1 || a->dx;
    asc_view dA = {.data = NULL}, dH = {.data = NULL};
    if (below) {
        dA = asc_new2(c, dtype, R, d->I);
        dH = asc_new2(c, dtype, R, c->p->h_cols);
        asc_product(c, dY, &a->w, asc_w2, false, NULL, &s.g, dA);
    }
    asc_adapter_gradient(c, asc_adapter2(&a->w), asc_adapter2(&a->dw), s.a, dY, &s.g, below ? &dA : NULL, add);
    if (wants_w2(&a->dw))
        asc_outer_product(c, dY, s.a, &s.g, asc_weights_of(c, "dw2", a->dw.w2, a->dw.down, d->E), add);
    if (a->dw.b2) asc_bias_gradient(c, dY, &s.g, a->dw.b2, add);
    if (below) {
        asc_act_gradient(c, dA, s.h, dH);
        below_activation(c, a, &s, dH, dY, flags);
    }
}
