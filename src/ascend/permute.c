/* SPDX-License-Identifier: Apache-2.0
 *
 * permute.c - permute and unpermute as operations of their own. Without skip marks each is one or two launches. With
 * them the caller's map holds -1, which CANN's operators are not documented for: the map is completed to a permutation
 * (skipped slots get the unused rows at the end) and the rows past the last routed one are zeroed where they would be
 * read. */
#include "ascend.h"
#include "ops.h"

static void sort_rows(asc_call *c, asc_view keys, asc_view values, asc_view order)
{
    if (keys.dims[0] == 1) { /* it would run on the AI CPU */
        asc_copy(c, values, keys);
        asc_zero(c, order);
        return;
    }
    const aclTensor *tk = asc_t(c, keys), *tv = asc_t(c, values), *to = asc_t(c, order);
    ASC_LAUNCH(c, Sort, tk, true, 0, false, tv, to); /* stable, ascending */
}

static asc_view compare(asc_call *c, asc_view v, bool less, double with)
{
    asc_view mask = v;
    mask.dtype = ACL_BOOL;
    mask = asc_like(c, mask);
    const aclTensor *tv = asc_t(c, v), *tm = asc_t(c, mask);
    const aclScalar *s = asc_s(c, with);
    if (less) ASC_LAUNCH(c, LtScalar, tv, s, tm);
    else ASC_LAUNCH(c, GeScalar, tv, s, tm);
    return mask;
}

typedef struct {
    asc_view map;   /* int32 [R], a permutation */
    asc_view slots; /* bool [R]: skipped slots; .data NULL without skip marks */
    asc_view rows;  /* bool [R,1]: rows nobody maps to */
} whole_map;

/* Indices are sorted as f32, exact below 2^24, which is also the limit of the operators. */
static whole_map complete(asc_call *c, const fmoe_tensor *map)
{
    whole_map w = {.map = asc_of(map)};
    const int64_t R = w.map.dims[0];
    if (!c->plan->skip) {
        w.map = asc_packed_as(c, w.map, ACL_INT32);
        return w;
    }
    const asc_view keys = asc_packed_as(c, w.map, ACL_FLOAT), sorted = asc_new1(c, ACL_FLOAT, R),
                   order = asc_new1(c, ACL_INT64, R);
    w.slots = compare(c, keys, true, 0);
    asc_fill_where(c, keys, w.slots, (double)R);
    sort_rows(c, keys, sorted, order);
    w.rows = asc_shape(compare(c, sorted, false, (double)R), 2, R, 1, 0);
    const asc_view back = asc_packed_as(c, order, ACL_FLOAT), inverse = asc_new1(c, ACL_INT64, R);
    sort_rows(c, back, sorted, inverse);
    w.map = asc_packed_as(c, inverse, ACL_INT32);
    return w;
}

/* Rows to be read: zero where nobody maps to them. */
static asc_view readable(asc_call *c, const fmoe_tensor *rows, const whole_map *w)
{
    const asc_view from = asc_of(rows);
    if (!w->rows.data) return asc_packed_as(c, from, from.dtype);
    const asc_view v = asc_new2(c, from.dtype, from.dims[0], from.dims[1]);
    asc_copy(c, v, from);
    asc_fill_where(c, v, w->rows, 0);
    return v;
}

static void sum_rows(asc_call *c, asc_view rows, asc_view map, int64_t k, const fmoe_tensor *out)
{
    const asc_view to = asc_target(c, out, rows.dtype, false);
    const aclTensor *tr = asc_t(c, rows), *tm = asc_t(c, map), *tt = asc_t(c, to);
    ASC_LAUNCH(c, MoeTokenPermuteGrad, tr, tm, k, false, tt);
    asc_deliver(c, out, to, false);
}

static void permute_forward(asc_call *c, const fmoe_permute_args *a)
{
    const int64_t R = a->map->shape[0], E = c->p->d.E;
    const asc_view xp = asc_target(c, a->xp, asc_plan_dtype(c->p), false);
    const bool skip = c->plan->skip;
    asc_routing r = {.map = skip ? asc_new1(c, ACL_INT32, R) : asc_target(c, a->map, ACL_INT32, false),
                     .counts = asc_new1(c, ACL_INT64, E + 1)};
    r.counts.dims[0] = E;
    asc_route_rows(c, asc_of(a->x), a->ids, xp, &r);
    if (skip) {
        /* Ids in sorted order tell which rows belong to skipped slots. */
        const asc_view ids = asc_packed_as(c, asc_of(a->ids), ACL_FLOAT);
        asc_fill_where(c, ids, r.mask, (double)E);
        const asc_view sorted = asc_new1(c, ACL_FLOAT, R), order = asc_new1(c, ACL_INT64, R);
        sort_rows(c, asc_shape(ids, 1, R, 0, 0), sorted, order);
        asc_fill_where(c, xp, asc_shape(compare(c, sorted, false, (double)E), 2, R, 1, 0), 0);
        asc_fill_where(c, r.map, asc_shape(r.mask, 1, R, 0, 0), -1);
    }
    asc_deliver(c, a->map, r.map, false);
    asc_deliver(c, a->xp, xp, false);
    if (a->counts) asc_deliver(c, a->counts, r.counts, false);
}

void asc_permute(asc_call *c, fmoe_pass pass, const fmoe_permute_args *a)
{
    if (a->map->shape[0] == 0) {
        if (pass == FMOE_FORWARD && a->counts) asc_zero(c, asc_of(a->counts));
        return;
    }
    if (pass == FMOE_FORWARD) {
        permute_forward(c, a);
        return;
    }
    const whole_map w = complete(c, a->map);
    sum_rows(c, readable(c, a->xp, &w), w.map, c->p->d.k, a->x);
}

static asc_view slot_probs(asc_call *c, const fmoe_unpermute_args *a, const whole_map *w, aclDataType dtype, int64_t T)
{
    const int64_t k = c->p->d.k;
    if (a->weights && !w->slots.data) return asc_packed_as(c, asc_of(a->weights), dtype);
    const asc_view p = asc_new2(c, dtype, T, k);
    if (a->weights) {
        asc_copy(c, p, asc_of(a->weights));
    } else {
        const aclTensor *tp = asc_t(c, p);
        const aclScalar *one = asc_s(c, 1);
        ASC_LAUNCH(c, InplaceFillScalar, tp, one);
    }
    if (w->slots.data) asc_fill_where(c, p, asc_shape(w->slots, 2, T, k, 0), 0);
    return p;
}

static void unpermute_backward(asc_call *c, const fmoe_unpermute_args *a, const whole_map *w)
{
    const int64_t k = c->p->d.k, T = a->map->shape[0] / k, R = a->map->shape[0], H = c->p->d.H;
    const aclDataType dtype = asc_plan_dtype(c->p), own = a->weights ? asc_of(a->weights).dtype : dtype;
    const asc_view p = slot_probs(c, a, w, c->acl->mixed_probs ? own : dtype, T), dout = asc_packed(c, a->dout);
    const asc_view dy = a->dy ? asc_target(c, a->dy, dtype, false) : asc_new2(c, dtype, R, H);
    const asc_view y = a->y && a->dweights ? readable(c, a->y, w) : asc_new2(c, dtype, R, H);
    const asc_view dp = a->dweights ? asc_target(c, a->dweights, p.dtype, false) : asc_new2(c, p.dtype, T, k);
    const aclTensor *ty = asc_t(c, y), *td = asc_t(c, dout), *tm = asc_t(c, w->map), *tp = asc_t(c, p),
                    *to = asc_t(c, dy), *tq = asc_t(c, dp);
    ASC_LAUNCH(c, MoeTokenUnpermuteGrad, ty, td, tm, tp, false, NULL, to, tq);
    if (a->dy) {
        if (w->rows.data) asc_fill_where(c, dy, w->rows, 0);
        asc_deliver(c, a->dy, dy, false);
    }
    if (a->dweights) {
        if (w->slots.data) asc_fill_where(c, dp, asc_shape(w->slots, 2, T, k, 0), 0);
        asc_deliver(c, a->dweights, dp, false);
    }
}

void asc_unpermute(asc_call *c, fmoe_pass pass, const fmoe_unpermute_args *a)
{
    if (a->map->shape[0] == 0) return;
    const whole_map w = complete(c, a->map);
    if (pass == FMOE_BACKWARD) {
        unpermute_backward(c, a, &w);
        return;
    }
    const asc_view y = readable(c, a->y, &w);
    if (!a->weights) { /* a plain sum is what the gradient of permute computes */
        sum_rows(c, y, w.map, c->p->d.k, a->out);
        return;
    }
    const asc_view p = slot_probs(c, a, &w, asc_of(a->weights).dtype, a->out->shape[0]);
    const asc_view out = asc_target(c, a->out, y.dtype, false);
    const aclTensor *ty = asc_t(c, y), *tm = asc_t(c, w.map), *tp = asc_t(c, p), *to = asc_t(c, out);
    ASC_LAUNCH(c, MoeTokenUnpermute, ty, tm, tp, false, NULL, to);
    asc_deliver(c, a->out, out, false);
}
