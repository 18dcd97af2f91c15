/* SPDX-License-Identifier: Apache-2.0
 *
 * adapters.c - low-rank adapters beside the two products of the layer, stacked or listed, W + B A never made:
 *   forward   to += l . B^T,  l = s x . A^T         three launches more each, four with a scale
 *   backward  m = s dy . B,   dx += m . A,   dA = m^T . x,   dB = dy^T . l, with l made again
 * Factors in f32 beside a 16-bit plan are cast in the workspace, E * rank rows of them; their gradients are added up in
 * f32 and never rounded. */
#include "ops.h"
#include "ascend.h"

/* A factor as products read it: packed in either orientation, in the plan's dtype. */
static asc_weights factor(asc_call *c, const fmoe_tensor *t)
{
    const aclDataType dtype = asc_plan_dtype(c->p);
    const asc_view v = asc_of(t), turned = asc_turn(v);
    const bool turn = !asc_is_packed(&v) && asc_is_packed(&turned);
    return (asc_weights){.n = v.dims[0],
                         .stack = turn ? asc_turn(asc_packed_as(c, turned, dtype)) : asc_packed_as(c, v, dtype)};
}

/* scale x . w[g]: [R, rank] in new scratch. */
static asc_view narrow(asc_call *c, asc_view x, const fmoe_tensor *w, bool turn, int64_t rank, float scale,
                       asc_groups *g)
{
    const asc_view l = asc_new2(c, x.dtype, x.dims[0], rank);
    const size_t mark = c->used;
    const asc_weights f = factor(c, w);
    asc_rows_product(c, x, turn ? asc_weights_turn(f) : f, NULL, g, l);
    if (scale != 1) asc_scale(c, l, (double)scale);
    asc_release(c, mark);
    return l;
}

/* to += l . w[g]. Rows no group covers are not written by the product, and must not be added as they are. */
static void widen_into(asc_call *c, asc_view l, const fmoe_tensor *w, bool turn, asc_groups *g, asc_view to)
{
    const size_t mark = c->used;
    const asc_weights f = factor(c, w);
    const asc_view part = asc_new2(c, to.dtype, to.dims[0], to.dims[1]);
    if (c->plan->skip) asc_zero(c, part);
    asc_rows_product(c, l, turn ? asc_weights_turn(f) : f, NULL, g, part);
    asc_add_to(c, to, part);
    asc_release(c, mark);
}

void asc_adapter(asc_call *c, asc_adapter_of w, asc_view x, asc_groups *g, asc_view to)
{
    if (!w.a || x.dims[0] == 0 || c->status != FMOE_OK) return;
    const size_t mark = c->used;
    const asc_view l = narrow(c, x, w.a, true, w.a->shape[1], w.scale, g);
    widen_into(c, l, w.b, true, g, to);
    asc_release(c, mark);
}

static void gradient(asc_call *c, const char *name, asc_view left, asc_view right, asc_groups *g, const fmoe_tensor *t,
                     bool add)
{
    asc_outer_product(c, left, right, g, asc_weights_of(c, name, t, NULL, g->n), add);
}

void asc_adapter_gradient(asc_call *c, asc_adapter_of w, asc_adapter_of d, asc_view x, asc_view dy, asc_groups *g,
                          const asc_view *dx, bool add)
{
    if (!w.a || dy.dims[0] == 0 || c->status != FMOE_OK) return;
    const int64_t rank = w.a->shape[1];
    const size_t mark = c->used;
    if (dx || d.a) {
        const asc_view m = narrow(c, dy, w.b, false, rank, w.scale, g);
        if (dx) widen_into(c, m, w.a, false, g, *dx);
        if (d.a) gradient(c, "dlora_a", m, x, g, d.a, add);
    }
    if (d.b) gradient(c, "dlora_b", dy, narrow(c, x, w.a, true, rank, w.scale, g), g, d.b, add);
    asc_release(c, mark);
}
