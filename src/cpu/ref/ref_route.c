/* SPDX-License-Identifier: Apache-2.0
 *
 * ref_route.c - the specification of routing: logits [T,E] -> ids [T,k], weights [T,k], and back to dlogits.
 *
 * For one token, with l[e] its logits, b the selection bias and the ids i_1 .. i_k:
 *
 *   score    s[e] = softmax(l)[e] | sigmoid(l[e]) | sqrt(softplus(l[e])) | l[e] itself (TOPK_SOFTMAX)
 *   select   c[e] = s[e] + b[e] competes; in groups, first the best groups, then the best experts of those
 *   weigh    q_j  = s[i_j]; TOPK_SOFTMAX: softmax of (l[i_1], .., l[i_k])[j]
 *            w_j  = scale * q_j, or with renormalize scale * q_j / (q_1 + .. + q_k + eps)
 *
 * The bias moves the choice and never the weight. Selection has no gradient: the backward takes the ids as given.
 *
 * Order of selection: repeated argmax. Among equals the lowest index wins, and NaN ranks below everything, -Inf
 * included. That is a total order on any input, so any row whatever gives k distinct ids in range. Note what follows
 * for softmax: one NaN or +Inf in a row makes every s of that row NaN, all equal, and the ids are 0 .. k-1.
 */
#include <math.h>

#include "ref.h"

typedef struct route_scratch {
    double *score;  /* s [E] */
    double *choice; /* c [E]; backward: the gradient of s */
    double *group;  /* score of each group [groups] */
    double *q, *dq; /* [k] */
} route_scratch;

static route_scratch carve_route(const fmoe_plan_impl *p, fmoe_carve *c)
{
    route_scratch s;
    s.score = fmoe_carve_take(c, p->d.E, sizeof(double));
    s.choice = fmoe_carve_take(c, p->d.E, sizeof(double));
    s.group = fmoe_carve_take(c, p->d.route.groups, sizeof(double));
    s.q = fmoe_carve_take(c, p->d.k, sizeof(double));
    s.dq = fmoe_carve_take(c, p->d.k, sizeof(double));
    return s;
}

void fmoe_ref_route_carve(const fmoe_plan_impl *p, fmoe_carve *c) { carve_route(p, c); }

/* log(1 + e^x), without overflow on the right and without losing e^x on the left. */
static double softplus(double x) { return (x > 0 ? x : 0) + log1p(exp(-fabs(x))); }

/* y = softmax(x), shifted by the maximum so that no finite x overflows. NaN, +Inf, or nothing but -Inf: every y is NaN,
 * by the arithmetic of the formula. x and y may be the same. */
static void ref_softmax(const double *x, double *y, int64_t n)
{
    double max = -INFINITY, sum = 0;
    for (int64_t i = 0; i < n; i++) max = x[i] > max ? x[i] : max;
    for (int64_t i = 0; i < n; i++) sum += y[i] = exp(x[i] - max);
    for (int64_t i = 0; i < n; i++) y[i] /= sum;
}

static void score_all(const fmoe_plan_impl *p, ref_vec logits, double *s)
{
    for (int64_t e = 0; e < p->d.E; e++) {
        const double l = ref_get(logits, e);
        switch (p->d.route.score) {
        case FMOE_SCORE_SIGMOID: s[e] = ref_sigmoid(l); break;
        case FMOE_SCORE_SQRT_SOFTPLUS: s[e] = sqrt(softplus(l)); break;
        default: s[e] = l;
        }
    }
    if (p->d.route.score == FMOE_SCORE_SOFTMAX) ref_softmax(s, s, p->d.E);
}

/* a ranks before b: larger, or b is NaN and a is not. Equal (or both NaN): neither, and the one met first stays. */
static bool ref_before(double a, double b) { return a > b || (isnan(b) && !isnan(a)); }

/* The lowest index of the best of x[0..n) that is not among the first m ids of token t; the core has seen to m < n. */
static int64_t best(const double *x, int64_t n, const fmoe_tensor *ids, int64_t t, int64_t m)
{
    int64_t found = -1;
    for (int64_t i = 0; i < n; i++) {
        bool taken = false;
        for (int64_t j = 0; j < m; j++) taken |= ref_int2(ids, t, j) == i;
        if (!taken && (found < 0 || ref_before(x[i], x[found]))) found = i;
    }
    return found;
}

/* Group g is the experts [g*n, (g+1)*n), n = E / groups. Its score is the largest c of its members, or the sum of the
 * two largest (the one there is, when n = 1). */
static double ref_group_score(const fmoe_plan_impl *p, const double *c, int64_t n)
{
    int64_t first = 0, second = -1;
    for (int64_t i = 1; i < n; i++) first = ref_before(c[i], c[first]) ? i : first;
    for (int64_t i = 0; i < n; i++) {
        if (i != first && (second < 0 || ref_before(c[i], c[second]))) second = i;
    }
    return p->d.route.group_score == FMOE_GROUP_MAX || second < 0 ? c[first] : c[first] + c[second];
}

/* Experts outside the topk_groups best groups get c = -Inf, or 0 with excluded_zero. A group is among the best when
 * fewer than topk_groups others rank before it; an equal one does if its index is lower. */
static void ref_limit_to_groups(const fmoe_plan_impl *p, double *c, double *group)
{
    const int64_t groups = p->d.route.groups;
    if (groups <= 1) return;
    const int64_t n = p->d.E / groups;
    for (int64_t g = 0; g < groups; g++) group[g] = ref_group_score(p, c + g * n, n);
    for (int64_t g = 0; g < groups; g++) {
        int64_t rank = 0;
        for (int64_t o = 0; o < groups; o++) {
            rank += ref_before(group[o], group[g]) || (o < g && !ref_before(group[g], group[o]));
        }
        if (rank < p->d.route.topk_groups) continue;
        for (int64_t i = g * n; i < (g + 1) * n; i++) c[i] = p->d.route.excluded_zero ? 0 : -INFINITY;
    }
}

/* q_j of the token's ids; a skip mark (in replayed ids) has weight 0 and takes no part in softmax or sum. */
static void ref_selected_scores(const fmoe_plan_impl *p, const fmoe_tensor *ids, int64_t t, const double *s, double *q)
{
    for (int64_t j = 0; j < p->d.k; j++) {
        const int64_t e = ref_int2(ids, t, j);
        q[j] = !ref_skipped(p, e) ? s[e] : p->d.route.score == FMOE_SCORE_TOPK_SOFTMAX ? -INFINITY : 0;
    }
    if (p->d.route.score == FMOE_SCORE_TOPK_SOFTMAX) ref_softmax(q, q, p->d.k);
}

/* NaN or +Inf anywhere, or nothing but -Inf: no finite softmax exists. */
static bool is_bad(const fmoe_plan_impl *p, ref_vec logits)
{
    bool finite = false, bad = false;
    for (int64_t e = 0; e < p->d.E; e++) {
        const double l = ref_get(logits, e);
        bad |= isnan(l) || l == INFINITY;
        finite |= isfinite(l);
    }
    return bad || !finite;
}

/* With FMOE_REPLAY the ids are an input and only weights (and bad_rows) are written. */
fmoe_status fmoe_ref_route_forward(const fmoe_plan_impl *p, const fmoe_route_args *a, const fmoe_run *run)
{
    const int64_t T = a->logits->shape[0], E = p->d.E, k = p->d.k;
    const bool replay = run->flags & FMOE_REPLAY;
    if (replay) FMOE_TRY(fmoe_ref_check_ids(p, a->ids));
    fmoe_carve carve = fmoe_carve_begin(run->workspace, sizeof(int64_t));
    const route_scratch s = carve_route(p, &carve);

    int64_t bad_rows = 0;
    for (int64_t t = 0; t < T; t++) {
        const ref_vec logits = ref_row(ref_matrix(a->logits), t), weights = ref_row(ref_matrix(a->weights), t);
        bad_rows += is_bad(p, logits);
        score_all(p, logits, s.score);
        if (!replay) {
            for (int64_t e = 0; e < E; e++) {
                s.choice[e] = s.score[e] + (a->select_bias ? ref_get(ref_vector(a->select_bias), e) : 0);
            }
            ref_limit_to_groups(p, s.choice, s.group);
            for (int64_t j = 0; j < k; j++) {
                const int64_t at = t * fmoe_stride(a->ids, 0) + j * fmoe_stride(a->ids, 1);
                fmoe_set_int(fmoe_data(a->ids), fmoe_tensor_dtype(a->ids), at, best(s.choice, E, a->ids, t, j));
            }
        }
        ref_selected_scores(p, a->ids, t, s.score, s.q);
        double sum = p->d.route.eps;
        for (int64_t j = 0; j < k; j++) sum += s.q[j];
        for (int64_t j = 0; j < k; j++) {
            const bool skip = ref_skipped(p, ref_int2(a->ids, t, j));
            const double q = p->d.route.renormalize ? s.q[j] / sum : s.q[j];
            ref_set(weights, j, skip ? 0 : p->d.route.scale * q);
        }
    }
    if (a->bad_rows) fmoe_set_int(fmoe_data(a->bad_rows), fmoe_tensor_dtype(a->bad_rows), 0, bad_rows);
    return FMOE_OK;
}

/* With S = q_1 + .. + q_k + eps and d_j = dweights[t,j]:
 *   dq_j = scale * d_j                                               without renormalize
 *   dq_j = scale * (d_j - sum_i d_i q_i / S) / S                     with it
 * then, to the logits (G[e] = the sum of dq_j over the slots j with i_j = e, so duplicates add):
 *   softmax         dl[e]   = s[e] * (G[e] - sum_f G[f] s[f])         every expert gets a gradient
 *   TOPK_SOFTMAX    dl[i_j] = q_j * (dq_j - sum_i dq_i q_i), added over j, 0 elsewhere
 *   sigmoid         dl[e]   = G[e] * s[e] * (1 - s[e])
 *   sqrt(softplus)  dl[e]   = G[e] * sigmoid(l[e]) / (2 s[e]); far left both are 0 and the quotient's limit is 0 too
 * Experts without a slot get exactly 0 in the elementwise rules, even where the slope of their score is NaN. */
fmoe_status fmoe_ref_route_backward(const fmoe_plan_impl *p, const fmoe_route_args *a, const fmoe_run *run)
{
    FMOE_TRY(fmoe_ref_check_ids(p, a->ids));
    const int64_t T = a->logits->shape[0], E = p->d.E, k = p->d.k;
    fmoe_carve carve = fmoe_carve_begin(run->workspace, sizeof(int64_t));
    const route_scratch s = carve_route(p, &carve);
    double *const G = s.choice;

    for (int64_t t = 0; t < T; t++) {
        const ref_vec logits = ref_row(ref_matrix(a->logits), t), dlogits = ref_row(ref_matrix(a->dlogits), t);
        score_all(p, logits, s.score);
        ref_selected_scores(p, a->ids, t, s.score, s.q);
        double sum = p->d.route.eps, dot = 0;
        for (int64_t j = 0; j < k; j++) {
            const bool skip = ref_skipped(p, ref_int2(a->ids, t, j));
            s.dq[j] = skip ? 0 : p->d.route.scale * ref_get(ref_row(ref_matrix(a->dweights), t), j);
            sum += s.q[j];
            dot += s.dq[j] * s.q[j];
        }
        if (p->d.route.renormalize) {
            for (int64_t j = 0; j < k; j++) s.dq[j] = (s.dq[j] - dot / sum) / sum;
        }
        if (p->d.route.score == FMOE_SCORE_TOPK_SOFTMAX) {
            dot = 0;
            for (int64_t j = 0; j < k; j++) dot += s.dq[j] * s.q[j];
            for (int64_t j = 0; j < k; j++) s.dq[j] = s.q[j] * (s.dq[j] - dot);
        }
        for (int64_t e = 0; e < E; e++) G[e] = 0;
        for (int64_t j = 0; j < k; j++) {
            const int64_t e = ref_int2(a->ids, t, j);
            if (!ref_skipped(p, e)) G[e] += s.dq[j];
        }
        dot = 0;
        for (int64_t e = 0; e < E; e++) dot += G[e] * s.score[e];
        for (int64_t e = 0; e < E; e++) {
            const double l = ref_get(logits, e), score = s.score[e];
            double slope = 1;
            if (p->d.route.score == FMOE_SCORE_SIGMOID) slope = score * ref_sigmoid(-l);
            if (p->d.route.score == FMOE_SCORE_SQRT_SOFTPLUS) slope = score == 0 ? 0 : ref_sigmoid(l) / (2 * score);
            if (p->d.route.score == FMOE_SCORE_SOFTMAX) ref_set(dlogits, e, score * (G[e] - dot));
            else ref_set(dlogits, e, G[e] == 0 ? 0 : G[e] * slope);
        }
    }
    return FMOE_OK;
}
