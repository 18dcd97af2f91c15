/* SPDX-License-Identifier: Apache-2.0
 *
 * experts.c - the layer, forward: route rows, up, activation, down, combine. Five launches for stacked SwiGLU weights
 * and int32 ids, six with int64 ids (MoeInitRouting wants int32). */
#include "ascend.h"
#include "ops.h"

asc_weights asc_w1(asc_call *c, const fmoe_weights *w)
{
    const fmoe_desc *d = &c->p->d;
    if (w->quant1) return asc_weights_decoded(c, w->w1, w->up, w->quant1, d->E, w->w1 ? c->p->h_cols : d->I, d->H);
    return asc_weights_of(c, w->w1 ? "w1" : "up", w->w1, w->up, d->E);
}

asc_weights asc_gate(asc_call *c, const fmoe_weights *w)
{
    const fmoe_desc *d = &c->p->d;
    if (w->quant_gate) return asc_weights_decoded(c, NULL, w->gate, w->quant_gate, d->E, d->I, d->H);
    return asc_weights_of(c, "gate", NULL, w->gate, d->E);
}

asc_weights asc_w2(asc_call *c, const fmoe_weights *w)
{
    const fmoe_desc *d = &c->p->d;
    if (w->quant2) return asc_weights_decoded(c, w->w2, w->down, w->quant2, d->E, d->H, d->I);
    return asc_weights_of(c, w->w2 ? "w2" : "down", w->w2, w->down, d->E);
}

void asc_product(asc_call *c, asc_view x, const fmoe_weights *w, asc_weights (*which)(asc_call *, const fmoe_weights *),
                 bool turned, const fmoe_tensor *bias, asc_groups *g, asc_view y)
{
    const size_t mark = c->used;
    const asc_weights m = which(c, w);
    asc_rows_product(c, x, turned ? asc_weights_turn(m) : m, bias, g, y);
    if (m.decoded) asc_release(c, mark); /* of others, running sums may have been made here, and stay */
}

/* h = xp . W1^T + b1. Lists hold gates and ups in matrices of their own: two products, joined. */
void asc_up(asc_call *c, const fmoe_weights *w, asc_view xp, asc_groups *g, asc_view h)
{
    if (w->w1 || !w->gate) {
        asc_product(c, xp, w, asc_w1, true, w->b1, g, h);
        asc_adapter(c, asc_adapter1(w), xp, g, h);
        return;
    }
    const int64_t R = xp.dims[0], I = c->p->d.I;
    const bool lists = (!w->quant_gate && asc_gate(c, w).list) || (!w->quant1 && asc_w1(c, w).list);
    if (lists && c->p->d.E > 128) asc_running(c, g);
    const size_t mark = c->used;
    const asc_view part[2] = {asc_new2(c, xp.dtype, R, I), asc_new2(c, xp.dtype, R, I)};
    asc_product(c, xp, w, asc_gate, true, NULL, g, part[0]);
    asc_product(c, xp, w, asc_w1, true, NULL, g, part[1]);
    const aclTensorList *from = asc_list(c, part, 2);
    const aclTensor *to = asc_t(c, h);
    ASC_LAUNCH(c, Cat, from, 1, to);
    asc_release(c, mark);
    asc_adapter(c, asc_adapter1(w), xp, g, h);
}

/* y = a . W2^T + b2. Rows no group covers are zero, for the combine reads them. */
void asc_down(asc_call *c, const fmoe_weights *w, asc_view a, asc_groups *g, asc_view y)
{
    if (c->plan->skip) asc_zero(c, y);
    asc_product(c, a, w, asc_w2, true, w->b2, g, y);
    asc_adapter(c, asc_adapter2(w), a, g, y);
}

static asc_view keep_or_take(asc_call *c, asc_view kept, int64_t rows, int64_t cols)
{
    return kept.data ? kept : asc_new2(c, asc_plan_dtype(c->p), rows, cols);
}

void asc_experts_forward(asc_call *c, const fmoe_experts_args *a, uint32_t flags)
{
    const fmoe_desc *d = &c->p->d;
    const int64_t T = a->x->shape[0], R = T * d->k;
    const aclDataType dtype = asc_plan_dtype(c->p);
    if (T == 0) return;
    asc_saved s = {.map = {.data = NULL}};
    if (a->saved) asc_saved_layout(c->p, R, a->saved, &s);
    asc_routing r = {.map = s.map, .counts = s.counts};
    if (!s.map.data) {
        r.map = asc_new1(c, ACL_INT32, R);
        r.counts = asc_new1(c, ACL_INT64, d->E + 1);
        r.counts.dims[0] = d->E;
    }
    const asc_view xp = keep_or_take(c, s.xp, R, d->H), h = keep_or_take(c, s.h, R, c->p->h_cols),
                   act = keep_or_take(c, s.a, R, d->I);
    const asc_view y = s.y.data ? s.y : xp; /* xp is dead by then, unless it is kept */
    asc_route_rows(c, asc_of(a->x), a->ids, xp, &r);
    asc_groups g = {.n = d->E, .list = r.counts};
    asc_up(c, &a->w, xp, &g, h);
    asc_act(c, h, act);
    asc_down(c, &a->w, act, &g, y);
    const asc_view p = asc_probs(c, a->weights, &r, asc_of(a->weights).dtype);
    const bool add = flags & FMOE_ADD_OUT;
    const asc_view out = asc_target(c, a->out, dtype, add);
    const aclTensor *ty = asc_t(c, y), *tm = asc_t(c, r.map), *tp = asc_t(c, p), *to = asc_t(c, out);
    ASC_LAUNCH(c, MoeTokenUnpermute, ty, tm, tp, false, NULL, to);
    asc_deliver(c, a->out, out, add);
}
