/* SPDX-License-Identifier: Apache-2.0
 *
 * route.c - scores to ids and weights, in f32. Plain softmax routing is MoeGatingTopKSoftmaxV2, one launch; every other
 * rule (and any call that wants bad rows counted) is composed: score, select by a stable sort, gather, normalise. */
#include <float.h>
#include <math.h>

#include "ascend.h"
#include "ops.h"

static asc_view softmax(asc_call *c, asc_view x)
{
    const asc_view r = asc_like(c, x);
    const aclTensor *tx = asc_t(c, x), *tr = asc_t(c, r);
    ASC_LAUNCH(c, Softmax, tx, 1, tr);
    return r;
}

static asc_view softmax_gradient(asc_call *c, asc_view d, asc_view y)
{
    const asc_view r = asc_like(c, y);
    const aclTensor *td = asc_t(c, d), *ty = asc_t(c, y), *tr = asc_t(c, r);
    ASC_LAUNCH(c, SoftmaxBackward, td, ty, 1, tr);
    return r;
}

static asc_view softplus(asc_call *c, asc_view x)
{
    const asc_view r = asc_like(c, x);
    const aclTensor *tx = asc_t(c, x), *tr = asc_t(c, r);
    const aclScalar *beta = asc_s(c, 1), *threshold = asc_s(c, 20);
    ASC_LAUNCH(c, Softplus, tx, beta, threshold, tr);
    return r;
}

static asc_view gather(asc_call *c, asc_view x, asc_view index)
{
    const asc_view r = asc_new2(c, x.dtype, index.dims[0], index.dims[1]);
    const aclTensor *tx = asc_t(c, x), *ti = asc_t(c, index), *tr = asc_t(c, r);
    ASC_LAUNCH(c, Gather, tx, 1, ti, tr);
    return r;
}

/* Sum over the last dimension, kept as one column (2-D) or dropped (3-D). */
static asc_view sum_last(asc_call *c, asc_view x)
{
    const int64_t last = x.ndim - 1;
    const asc_view r = asc_new2(c, x.dtype, x.dims[0], x.ndim == 3 ? x.dims[1] : 1);
    const aclTensor *tx = asc_t(c, x), *tr = asc_t(c, r);
    const aclIntArray *dims = asc_ints(c, &last, 1);
    ASC_LAUNCH(c, ReduceSum, tx, dims, x.ndim == 2, x.dtype, tr);
    return r;
}

static asc_view max_last(asc_call *c, asc_view x)
{
    const int64_t last = x.ndim - 1;
    const asc_view r = asc_new2(c, x.dtype, x.dims[0], x.dims[1]);
    const aclTensor *tx = asc_t(c, x), *tr = asc_t(c, r);
    const aclIntArray *dims = asc_ints(c, &last, 1);
    ASC_LAUNCH(c, Amax, tx, dims, false, tr);
    return r;
}

static asc_view sort_down(asc_call *c, asc_view x, asc_view *index)
{
    const asc_view values = asc_like(c, x);
    *index = x;
    index->dtype = ACL_INT64;
    *index = asc_like(c, *index);
    if (x.dims[x.ndim - 1] == 1) { /* it would run on the AI CPU */
        asc_copy(c, values, x);
        asc_zero(c, *index);
        return values;
    }
    const aclTensor *tx = asc_t(c, x), *tv = asc_t(c, values), *ti = asc_t(c, *index);
    ASC_LAUNCH(c, Sort, tx, true, x.ndim - 1, true, tv, ti); /* stable: the lowest index first among equals */
    return values;
}

static asc_view is_nan(asc_call *c, asc_view x)
{
    asc_view mask = x;
    mask.dtype = ACL_BOOL;
    mask = asc_like(c, mask);
    const aclTensor *a = asc_t(c, x), *b = asc_t(c, x), *tm = asc_t(c, mask);
    ASC_LAUNCH(c, NeTensor, a, b, tm);
    return mask;
}

static asc_view score(asc_call *c, asc_view logits)
{
    switch (c->p->d.route.score) {
    case FMOE_SCORE_SIGMOID: return asc_do_Sigmoid(c, logits);
    case FMOE_SCORE_SQRT_SOFTPLUS: return asc_do_Sqrt(c, softplus(c, logits));
    case FMOE_SCORE_TOPK_SOFTMAX: return logits;
    default: return softmax(c, logits);
    }
}

/* Experts outside the best groups: -inf, or 0 where they compete with that. */
static void limit_groups(asc_call *c, asc_view key)
{
    const fmoe_route_rule *rule = &c->p->d.route;
    const int64_t T = key.dims[0], G = rule->groups, n = key.dims[1] / G;
    const asc_view by_group = asc_shape(key, 3, T, G, n);
    asc_view best, index;
    if (rule->group_score == FMOE_GROUP_MAX || n == 1) {
        best = max_last(c, by_group);
    } else {
        const asc_view sorted = sort_down(c, by_group, &index);
        best = sum_last(c, asc_part(sorted, 2, 0, 1, 2));
    }
    sort_down(c, best, &index);
    const asc_view chosen = asc_packed_as(c, asc_part(index, 1, 0, 1, rule->topk_groups), ACL_INT64);
    const asc_view out = asc_new2(c, ACL_FLOAT, T, G), zeros = asc_new2(c, ACL_FLOAT, T, rule->topk_groups);
    asc_zero(c, zeros);
    const aclTensor *fill = asc_t(c, out);
    const aclScalar *one = asc_s(c, 1);
    ASC_LAUNCH(c, InplaceFillScalar, fill, one);
    const aclTensor *to = asc_t(c, out), *ti = asc_t(c, chosen), *tz = asc_t(c, zeros);
    ASC_LAUNCH(c, InplaceScatter, to, 1, ti, tz, 0);
    const asc_view mask = asc_new3(c, ACL_BOOL, T, G, 1);
    const aclTensor *tv = asc_t(c, out), *tm = asc_t(c, asc_shape(mask, 2, T, G, 0));
    const aclScalar *half = asc_s(c, 0.5);
    ASC_LAUNCH(c, GtScalar, tv, half, tm);
    asc_fill_where(c, by_group, mask, rule->excluded_zero ? 0 : -INFINITY);
}

/* The k best of every row, as int64 [T,k]. NaN ranks below everything but the experts of other groups. */
static asc_view select_ids(asc_call *c, const fmoe_route_args *a, asc_view s)
{
    const fmoe_desc *d = &c->p->d;
    const double low = -3.3e38, nan_key = -FLT_MAX;
    asc_view key = s, index;
    if (a->select_bias) {
        const asc_view bias = asc_packed_as(c, asc_of(a->select_bias), ACL_FLOAT);
        key = asc_do_Add(c, s, asc_shape(bias, 2, 1, d->E, 0));
    }
    const asc_view mask = is_nan(c, key);
    key = asc_do_Clamp(c, key, &low, NULL);
    asc_fill_where(c, key, mask, nan_key);
    if (d->route.groups > 1) limit_groups(c, key);
    sort_down(c, key, &index);
    return asc_packed_as(c, asc_part(index, 1, 0, 1, d->k), ACL_INT64);
}

/* A row is bad (NaN, +Inf, nothing but -Inf) exactly when its softmax is NaN. */
static void count_bad(asc_call *c, const fmoe_route_args *a, asc_view logits, asc_view s)
{
    const int64_t T = logits.dims[0], first = 0;
    const asc_view all = c->p->d.route.score == FMOE_SCORE_SOFTMAX ? s : softmax(c, logits);
    const asc_view mask = is_nan(c, asc_packed_as(c, asc_part(all, 1, 0, 1, 1), ACL_FLOAT));
    const asc_view ones = asc_shape(asc_packed_as(c, mask, ACL_FLOAT), 1, T, 0, 0), total = asc_new1(c, ACL_FLOAT, 1);
    const aclTensor *tx = asc_t(c, ones), *tr = asc_t(c, total);
    const aclIntArray *dims = asc_ints(c, &first, 1);
    ASC_LAUNCH(c, ReduceSum, tx, dims, true, ACL_FLOAT, tr);
    asc_deliver(c, a->bad_rows, total, false);
}

static bool one_launch(const asc_call *c, const fmoe_route_args *a, uint32_t flags)
{
    const fmoe_route_rule *r = &c->p->d.route;
    return c->acl->aclnnMoeGatingTopKSoftmaxV2 && !a->select_bias && !a->bad_rows && r->groups <= 1 &&
           !(flags & FMOE_REPLAY) && (r->score == FMOE_SCORE_SOFTMAX || r->score == FMOE_SCORE_TOPK_SOFTMAX) &&
           (!r->renormalize || r->eps == 0) && c->p->d.k <= 1024;
}

static asc_view scaled(asc_call *c, asc_view w)
{
    const double scale = c->p->d.route.scale;
    return scale != 1 ? asc_do_Muls(c, w, scale) : w;
}

static void forward(asc_call *c, const fmoe_route_args *a, uint32_t flags)
{
    const fmoe_route_rule *rule = &c->p->d.route;
    const int64_t T = a->logits->shape[0], k = c->p->d.k;
    const asc_view logits = asc_packed_as(c, asc_of(a->logits), ACL_FLOAT);
    if (one_launch(c, a, flags)) {
        const bool over_k = rule->renormalize || rule->score == FMOE_SCORE_TOPK_SOFTMAX;
        const asc_view ids = asc_target(c, a->ids, ACL_INT32, false);
        const asc_view w =
            rule->scale == 1 ? asc_target(c, a->weights, ACL_FLOAT, false) : asc_new2(c, ACL_FLOAT, T, k);
        /* An output nobody asked for: empty, as torch_npu passes it. */
        const aclTensor *tx = asc_t(c, logits), *tw = asc_t(c, w), *ti = asc_t(c, ids),
                        *none = asc_t(c, asc_1d(NULL, ACL_FLOAT, 0));
        ASC_LAUNCH(c, MoeGatingTopKSoftmaxV2, tx, NULL, k, over_k ? 1 : 0, false, tw, ti, none);
        asc_deliver(c, a->ids, ids, false);
        asc_deliver(c, a->weights, scaled(c, w), false);
        return;
    }
    const asc_view s = score(c, logits);
    asc_view ids;
    if (flags & FMOE_REPLAY) {
        ids = asc_packed_as(c, asc_of(a->ids), ACL_INT64);
    } else {
        ids = select_ids(c, a, s);
        asc_deliver(c, a->ids, ids, false);
    }
    asc_view w = gather(c, s, ids);
    if (rule->score == FMOE_SCORE_TOPK_SOFTMAX) w = softmax(c, w);
    if (rule->renormalize) {
        asc_view sum = sum_last(c, w);
        if (rule->eps != 0) sum = asc_do_Adds(c, sum, rule->eps);
        w = asc_do_Div(c, w, sum);
    }
    asc_deliver(c, a->weights, scaled(c, w), false);
    if (a->bad_rows) count_bad(c, a, logits, s);
}

/* Sigmoid scores that were normalised over the chosen ones: MoeGatingTopKBackward, on 910B and 910_93. */
static bool one_launch_back(const asc_call *c)
{
    const fmoe_route_rule *r = &c->p->d.route;
    return c->acl->aclnnMoeGatingTopKBackward && r->score == FMOE_SCORE_SIGMOID && r->renormalize && c->p->d.E >= 2 &&
           c->p->d.E <= 2048 && c->p->d.k <= c->p->d.E && !c->acl->is_950;
}

static void backward_in_one(asc_call *c, const fmoe_route_args *a)
{
    const fmoe_route_rule *rule = &c->p->d.route;
    const asc_view s = asc_do_Sigmoid(c, asc_packed_as(c, asc_of(a->logits), ACL_FLOAT)),
                   d = asc_packed_as(c, asc_of(a->dweights), ACL_FLOAT),
                   ids = asc_packed_as(c, asc_of(a->ids), ACL_INT32), to = asc_target(c, a->dlogits, ACL_FLOAT, false);
    const aclTensor *ts = asc_t(c, s), *td = asc_t(c, d), *ti = asc_t(c, ids), *tt = asc_t(c, to);
    ASC_LAUNCH(c, MoeGatingTopKBackward, ts, td, ti, 1, 1, rule->scale, rule->eps, tt);
    asc_deliver(c, a->dlogits, to, false);
}

static void backward(asc_call *c, const fmoe_route_args *a)
{
    const fmoe_route_rule *rule = &c->p->d.route;
    if (one_launch_back(c)) {
        backward_in_one(c, a);
        return;
    }
    const asc_view logits = asc_packed_as(c, asc_of(a->logits), ACL_FLOAT),
                   ids = asc_packed_as(c, asc_of(a->ids), ACL_INT64);
    const asc_view s = score(c, logits);
    asc_view w = gather(c, s, ids), d = scaled(c, asc_packed_as(c, asc_of(a->dweights), ACL_FLOAT));
    if (rule->score == FMOE_SCORE_TOPK_SOFTMAX) w = softmax(c, w);
    if (rule->renormalize) { /* (dw - <dw, w/sum>) / sum */
        asc_view sum = sum_last(c, w);
        if (rule->eps != 0) sum = asc_do_Adds(c, sum, rule->eps);
        const asc_view dot = sum_last(c, asc_do_Mul(c, d, asc_do_Div(c, w, sum)));
        d = asc_do_Div(c, asc_do_Sub(c, d, dot), sum);
    }
    if (rule->score == FMOE_SCORE_TOPK_SOFTMAX) d = softmax_gradient(c, d, w);
    if (rule->score == FMOE_SCORE_SIGMOID) d = asc_do_SigmoidBackward(c, d, w);
    if (rule->score == FMOE_SCORE_SQRT_SOFTPLUS) /* sigmoid(l) / (2 s), at the chosen ones only: s may be 0 elsewhere */
        d = asc_do_Muls(c, asc_do_Div(c, asc_do_Mul(c, d, asc_do_Sigmoid(c, gather(c, logits, ids))), w), 0.5);
    const asc_view zeros = asc_like(c, logits);
    asc_zero(c, zeros);
    asc_view all = asc_like(c, logits);
    const aclTensor *tz = asc_t(c, zeros), *ti = asc_t(c, ids), *td = asc_t(c, d), *to = asc_t(c, all);
    ASC_LAUNCH(c, ScatterAdd, tz, 1, ti, td, to);
    if (rule->score == FMOE_SCORE_SOFTMAX) all = softmax_gradient(c, all, s);
    asc_deliver(c, a->dlogits, all, false);
}

void asc_route(asc_call *c, fmoe_pass pass, const fmoe_route_args *a, uint32_t flags)
{
    if (a->logits->shape[0] == 0) {
        if (pass == FMOE_FORWARD && a->bad_rows) asc_zero(c, asc_of(a->bad_rows));
        return;
    }
    if (pass == FMOE_FORWARD) forward(c, a, flags);
    else backward(c, a);
}
