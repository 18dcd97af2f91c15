/* SPDX-License-Identifier: Apache-2.0
 *
 * route.c - routing on the CPU: the formulas of ref_route.c, row by row on all threads, in double.
 *
 * Double costs under 1 % of a layer (E exponentials a token beside 6*k*H*I multiply-adds) and buys that the choice of
 * experts does not hang on how f32 rounded a score. Only a softmax over all E needs E exponentials in backward too: for
 * the other scores it computes the k chosen ones. */
#include <inttypes.h>
#include <math.h>

#include "cpu/ops/ops.h"

typedef struct route_scratch {
    double *score, *choice; /* [E] */
    double *group;          /* [groups] */
    double *q, *dq;         /* [k] */
    int64_t *ids;           /* [k] */
    int64_t bad_rows;
} route_scratch;

static route_scratch *route_carve(const fmoe_plan_impl *p, fmoe_carve *c)
{
    const int threads = fmoe_cpu(p)->threads;
    route_scratch *s = fmoe_carve_take(c, threads, sizeof *s);
    for (int w = 0; w < threads; w++) {
        route_scratch one = {0};
        one.score = fmoe_carve_take(c, p->d.E, sizeof(double));
        one.choice = fmoe_carve_take(c, p->d.E, sizeof(double));
        one.group = fmoe_carve_take(c, fmoe_max(p->d.route.groups, 1), sizeof(double));
        one.q = fmoe_carve_take(c, p->d.k, sizeof(double));
        one.dq = fmoe_carve_take(c, p->d.k, sizeof(double));
        one.ids = fmoe_carve_take(c, p->d.k, sizeof(int64_t));
        if (s) s[w] = one;
    }
    return s;
}

void fmoe_cpu_route_carve(const fmoe_plan_impl *p, fmoe_carve *c) { route_carve(p, c); }

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

/* With the exponential of the reference, bit for bit. */
static void softmax(double *x, int64_t n)
{
    double max = -INFINITY, sum = 0;
    for (int64_t i = 0; i < n; i++) max = x[i] > max ? x[i] : max;
    for (int64_t i = 0; i < n; i++) sum += x[i] = exp(x[i] - max);
    for (int64_t i = 0; i < n; i++) x[i] /= sum;
}

static double logit(const fmoe_tensor *logits, int64_t t, int64_t e)
{
    return fmoe_get_float(fmoe_data(logits), fmoe_tensor_dtype(logits), t * fmoe_stride(logits, 0) + e);
}

static void read_row(const fmoe_tensor *logits, int64_t t, int64_t E, double *out)
{
    const void *data = fmoe_data(logits);
    const int64_t at = t * fmoe_stride(logits, 0);
    switch (fmoe_tensor_dtype(logits)) { /* a loop each: the dtype is known in it */
    case FMOE_BF16:
        for (int64_t e = 0; e < E; e++) out[e] = fmoe_get_float(data, FMOE_BF16, at + e);
        break;
    case FMOE_F16:
        for (int64_t e = 0; e < E; e++) out[e] = fmoe_get_float(data, FMOE_F16, at + e);
        break;
    default:
        for (int64_t e = 0; e < E; e++) out[e] = fmoe_get_float(data, FMOE_F32, at + e);
    }
}

static double score_one(int score, double l)
{
    switch (score) {
    case FMOE_SCORE_SIGMOID: return sigmoid(l);
    case FMOE_SCORE_SQRT_SOFTPLUS: return sqrt((l > 0 ? l : 0) + log1p(exp(-fabs(l))));
    default: return l;
    }
}

/* Whether numbers of 24 bits that differ have scores that differ by 2^-43 at the least. */
static bool scores_differ(const double *x, int64_t n)
{
    int yes = 1;
    for (int64_t i = 0; i < n; i++)
        yes &= (x[i] == 0) | ((fabs(x[i]) >= 0x1p-20) & (fabs(x[i]) <= 300)) | (x[i] == -(double)INFINITY);
    return yes;
}

/* Scores of row t; returns whether the row is bad (header: route). The kernel's softmax is a few ulp from the
 * reference's, which must not change who is chosen: it is for rows whose experts are `chosen` already, and for plain
 * rules, which add nothing to a score, where scores are apart. */
static bool score_row(const fmoe_plan_impl *p, const fmoe_tensor *logits, int64_t t, bool chosen, bool plain, double *s)
{
    const int score = p->d.route.score;
    int bad = 0, finite = 0;
    read_row(logits, t, p->d.E, s);
    for (int64_t e = 0; e < p->d.E; e++) {
        bad |= !(s[e] < (double)INFINITY); /* NaN too */
        finite |= (s[e] > -(double)INFINITY) & (s[e] < (double)INFINITY);
    }
    for (int64_t e = 0; score >= FMOE_SCORE_SIGMOID && e < p->d.E; e++) s[e] = score_one(score, s[e]);
    if (score == FMOE_SCORE_SOFTMAX)
        (chosen || (plain && scores_differ(s, p->d.E)) ? fmoe_cpu(p)->k.softmax : softmax)(s, p->d.E);
    return bad || !finite;
}

/* Larger first; NaN last. */
static bool before(double a, double b) { return a > b || (isnan(b) && !isnan(a)); }

static double group_score(const fmoe_plan_impl *p, const double *c, int64_t n)
{
    int64_t first = 0, second = -1;
    for (int64_t i = 1; i < n; i++) first = before(c[i], c[first]) ? i : first;
    for (int64_t i = 0; i < n; i++)
        if (i != first && (second < 0 || before(c[i], c[second]))) second = i;
    return p->d.route.group_score == FMOE_GROUP_MAX || second < 0 ? c[first] : c[first] + c[second];
}

static void limit_to_groups(const fmoe_plan_impl *p, double *c, double *group)
{
    const int64_t groups = p->d.route.groups, n = groups > 1 ? p->d.E / groups : 0;
    if (groups <= 1) return;
    for (int64_t g = 0; g < groups; g++) group[g] = group_score(p, c + g * n, n);
    for (int64_t g = 0; g < groups; g++) {
        int64_t rank = 0;
        for (int64_t o = 0; o < groups; o++)
            rank += before(group[o], group[g]) || (o < g && !before(group[g], group[o]));
        for (int64_t i = g * n; rank >= p->d.route.topk_groups && i < (g + 1) * n; i++)
            c[i] = p->d.route.excluded_zero ? 0 : -INFINITY;
    }
}

/* The k best, kept sorted while the row is read once: most experts fail the first comparison. */
static void select_top(const double *c, int64_t E, int64_t k, int64_t *ids)
{
    int64_t n = 0;
    double worst = 0;
    for (int64_t e = 0; e < E; e++) {
        if (n == k && (c[e] <= worst || !before(c[e], worst))) continue;
        int64_t at = n < k ? n++ : k - 1;
        for (; at > 0 && before(c[e], c[ids[at - 1]]); at--) ids[at] = ids[at - 1];
        ids[at] = e;
        worst = c[ids[n - 1]];
    }
}

static bool skipped(const fmoe_plan_impl *p, int64_t id) { return id < 0 || id >= p->d.E; } /* ids were checked */

/* q of the chosen experts; a skip mark has weight 0 and takes no part in a softmax. */
static void selected_scores(const fmoe_plan_impl *p, const route_scratch *s)
{
    const bool over_k = p->d.route.score == FMOE_SCORE_TOPK_SOFTMAX;
    for (int64_t j = 0; j < p->d.k; j++)
        s->q[j] = !skipped(p, s->ids[j]) ? s->score[s->ids[j]] : over_k ? -INFINITY : 0;
    if (over_k) fmoe_cpu(p)->k.softmax(s->q, p->d.k);
}

typedef struct route_run {
    const fmoe_plan_impl *p;
    const fmoe_route_args *a;
    route_scratch *scratch;
    bool replay;
    fmoe_tasks tasks; /* of GRAIN rows */
} route_run;

enum { GRAIN = 16 };

static void read_ids(const route_run *run, int64_t t, int64_t *ids)
{
    const fmoe_tensor *from = run->a->ids;
    for (int64_t j = 0; j < run->p->d.k; j++)
        ids[j] = fmoe_get_int(fmoe_data(from), fmoe_tensor_dtype(from), t * run->p->d.k + j);
}

static void forward_row(const route_run *run, route_scratch *s, int64_t t)
{
    const fmoe_plan_impl *p = run->p;
    const fmoe_route_args *a = run->a;
    const int64_t E = p->d.E, k = p->d.k;
    const bool plain = !a->select_bias && p->d.route.groups <= 1;
    s->bad_rows += score_row(p, a->logits, t, run->replay, plain, s->score);
    if (run->replay) {
        read_ids(run, t, s->ids);
    } else {
        const float *bias = a->select_bias ? fmoe_data(a->select_bias) : NULL;
        const double *choice = s->score;
        if (bias || p->d.route.groups > 1) {
            for (int64_t e = 0; e < E; e++) s->choice[e] = s->score[e] + (bias ? (double)bias[e] : 0);
            limit_to_groups(p, s->choice, s->group);
            choice = s->choice;
        }
        select_top(choice, E, k, s->ids);
        for (int64_t j = 0; j < k; j++)
            fmoe_set_int(fmoe_data(a->ids), fmoe_tensor_dtype(a->ids), t * k + j, s->ids[j]);
    }
    selected_scores(p, s);
    double sum = p->d.route.eps;
    for (int64_t j = 0; j < k; j++) sum += s->q[j];
    for (int64_t j = 0; j < k; j++) {
        const double q = p->d.route.renormalize ? s->q[j] / sum : s->q[j];
        fmoe_set_float(fmoe_data(a->weights), fmoe_tensor_dtype(a->weights), t * k + j,
                       skipped(p, s->ids[j]) ? 0.0f : (float)(p->d.route.scale * q));
    }
}

static void backward_row(const route_run *run, route_scratch *s, int64_t t)
{
    const fmoe_plan_impl *p = run->p;
    const fmoe_route_args *a = run->a;
    const int64_t E = p->d.E, k = p->d.k;
    const int score = p->d.route.score;
    double *G = s->choice, sum = p->d.route.eps, dot = 0;
    read_ids(run, t, s->ids);
    if (score == FMOE_SCORE_SOFTMAX) score_row(p, a->logits, t, true, false, s->score);
    for (int64_t j = 0; score != FMOE_SCORE_SOFTMAX && j < k; j++)
        if (!skipped(p, s->ids[j])) s->score[s->ids[j]] = score_one(score, logit(a->logits, t, s->ids[j]));
    selected_scores(p, s);
    for (int64_t j = 0; j < k; j++) {
        const double d = fmoe_get_float(fmoe_data(a->dweights), fmoe_tensor_dtype(a->dweights), t * k + j);
        s->dq[j] = skipped(p, s->ids[j]) ? 0 : p->d.route.scale * d;
        sum += s->q[j];
        dot += s->dq[j] * s->q[j];
    }
    for (int64_t j = 0; p->d.route.renormalize && j < k; j++) s->dq[j] = (s->dq[j] - dot / sum) / sum;
    if (score == FMOE_SCORE_TOPK_SOFTMAX) {
        dot = 0;
        for (int64_t j = 0; j < k; j++) dot += s->dq[j] * s->q[j];
        for (int64_t j = 0; j < k; j++) s->dq[j] = s->q[j] * (s->dq[j] - dot);
    }
    memset(G, 0, (size_t)E * sizeof *G);
    for (int64_t j = 0; j < k; j++)
        if (!skipped(p, s->ids[j])) G[s->ids[j]] += s->dq[j];
    const int dtype = fmoe_tensor_dtype(a->dlogits);
    const int64_t at = t * fmoe_stride(a->dlogits, 0);
    if (score == FMOE_SCORE_SOFTMAX) {
        dot = 0;
        for (int64_t e = 0; e < E; e++) dot += G[e] * s->score[e];
        for (int64_t e = 0; e < E; e++)
            fmoe_set_float(fmoe_data(a->dlogits), dtype, at + e, (float)(s->score[e] * (G[e] - dot)));
        return;
    }
    memset((char *)fmoe_data(a->dlogits) + at * (int64_t)fmoe_dtype_size(dtype), 0, (size_t)E * fmoe_dtype_size(dtype));
    for (int64_t j = 0; j < k; j++) { /* twice the same for a duplicate id */
        const int64_t e = s->ids[j];
        if (skipped(p, e) || G[e] == 0) continue;
        double d = G[e];
        if (score == FMOE_SCORE_SIGMOID) d *= s->score[e] * sigmoid(-logit(a->logits, t, e));
        if (score == FMOE_SCORE_SQRT_SOFTPLUS)
            d *= s->score[e] == 0 ? 0 : sigmoid(logit(a->logits, t, e)) / (2 * s->score[e]);
        fmoe_set_float(fmoe_data(a->dlogits), dtype, at + e, (float)d);
    }
}

static void route_worker(void *arg, int worker)
{
    route_run *run = arg;
    route_scratch *s = &run->scratch[worker];
    const int64_t T = run->a->logits->shape[0];
    int64_t task;
    while (fmoe_claim(&run->tasks, &task))
        for (int64_t t = task * GRAIN; t < fmoe_min(T, (task + 1) * GRAIN); t++)
            if (run->a->dlogits) backward_row(run, s, t);
            else forward_row(run, s, t);
}

/* Given ids (replay, backward): experts or declared skip marks. */
static fmoe_status check_ids(const fmoe_plan_impl *p, const fmoe_tensor *ids)
{
    const bool neg1 = p->d.flags & FMOE_SKIP_NEG1, at_E = p->d.flags & FMOE_SKIP_E;
    for (int64_t i = 0; i < ids->shape[0] * p->d.k; i++) {
        const int64_t e = fmoe_get_int(fmoe_data(ids), fmoe_tensor_dtype(ids), i);
        if ((uint64_t)e >= (uint64_t)p->d.E && !(neg1 && e == -1) && !(at_E && e == p->d.E))
            return fmoe_fail(FMOE_ERR_INDEX, "ids[%" PRId64 ",%" PRId64 "] is %" PRId64 ", E is %" PRId64, i / p->d.k,
                             i % p->d.k, e, p->d.E);
    }
    return FMOE_OK;
}

fmoe_status fmoe_cpu_route_forward(const fmoe_plan_impl *p, const fmoe_route_args *a, const fmoe_run *run)
{
    route_run r = {.p = p, .a = a, .replay = (run->flags & FMOE_REPLAY) != 0};
    if (r.replay) FMOE_TRY(check_ids(p, a->ids));
    fmoe_carve c = fmoe_carve_begin(run->workspace, 64);
    r.scratch = route_carve(p, &c);
    r.tasks.n = fmoe_ceil_div(a->logits->shape[0], GRAIN);
    fmoe_parallel(p, route_worker, &r);
    if (a->bad_rows) {
        int64_t bad = 0;
        for (int w = 0; w < fmoe_cpu(p)->threads; w++) bad += r.scratch[w].bad_rows;
        fmoe_set_int(fmoe_data(a->bad_rows), -64, 0, bad);
    }
    return FMOE_OK;
}

fmoe_status fmoe_cpu_route_backward(const fmoe_plan_impl *p, const fmoe_route_args *a, const fmoe_run *run)
{
    route_run r = {.p = p, .a = a};
    FMOE_TRY(check_ids(p, a->ids));
    fmoe_carve c = fmoe_carve_begin(run->workspace, 64);
    r.scratch = route_carve(p, &c);
    r.tasks.n = fmoe_ceil_div(a->logits->shape[0], GRAIN);
    fmoe_parallel(p, route_worker, &r);
    return FMOE_OK;
}
