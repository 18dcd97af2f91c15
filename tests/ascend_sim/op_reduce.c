/* SPDX-License-Identifier: Apache-2.0
 * op_reduce.c - along a dimension: sums, softmax, sorting, running sums, histograms, the loss. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#define LOOP(a, o, q)                                                                                                  \
    for (int64_t o = 0; o < (a).outer; o++)                                                                            \
        for (int64_t q = 0; q < (a).inner; q++)
#define AT(a, o, i, q) (((o) * (a).n + (i)) * (a).inner + (q))

/* ---- Reduction over a set of dimensions ---- */

enum { SUM, MEAN, MAX, ALL, ANY };

static void reduce(sim_exec *e) /* in, out; i[0] kind, i[1] bit mask of dimensions */
{
    const sim_tensor *t = &e->t[0];
    const int64_t n = sim_numel(t), m = sim_numel(&e->t[1]);
    const double *v = sim_load(e, 0);
    double *r = sim_buffer(e, (size_t)(m + 1) * sizeof *r);
    const int kind = (int)e->i[0];
    for (int64_t i = 0; i < m; i++) r[i] = kind == MAX ? -INFINITY : kind == ALL ? 1 : 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t rest = i, to = 0, step = 1;
        for (int d = t->ndim - 1; d >= 0; d--) {
            const int64_t at = rest % t->dims[d];
            rest /= t->dims[d];
            if (e->i[1] >> d & 1) continue;
            to += at * step;
            step *= t->dims[d];
        }
        if (kind == SUM || kind == MEAN) r[to] += v[i];
        else if (kind == MAX) r[to] = isnan(v[i]) ? v[i] : v[i] > r[to] ? v[i] : r[to];
        else if (kind == ALL) r[to] = r[to] != 0 && v[i] != 0;
        else r[to] = r[to] != 0 || v[i] != 0;
    }
    if (kind == MEAN)
        for (int64_t i = 0; i < m; i++) r[i] /= (double)n / (double)m;
    sim_store(e, 1, r);
}

static aclnnStatus reduction(const char *name, int kind, const aclTensor *self, const aclIntArray *dims, aclTensor *out,
                             SIM_WS)
{
    sim_exec *e = sim_begin(name, reduce);
    sim_in(e, self);
    sim_out(e, out);
    int64_t list[SIM_MAX_DIMS];
    const int64_t n = sim_int_array(dims, list, SIM_MAX_DIMS);
    e->i[0] = kind;
    int64_t left = 1;
    for (int64_t i = 0; i < n; i++) e->i[1] |= (int64_t)1 << (list[i] < 0 ? list[i] + e->t[0].ndim : list[i]);
    if (n <= 0) e->i[1] = ((int64_t)1 << e->t[0].ndim) - 1;
    for (int d = 0; d < e->t[0].ndim; d++)
        if (!(e->i[1] >> d & 1)) left *= e->t[0].dims[d];
    sim_check(e, e->status || left == sim_numel(&e->t[1]), "out has the wrong size");
    return sim_end(e, 0, workspaceSize, executor);
}

aclnnStatus aclnnReduceSumGetWorkspaceSize(const aclTensor *self, const aclIntArray *dims, bool keep, aclDataType dtype,
                                           aclTensor *out, SIM_WS)
{
    (void)keep, (void)dtype;
    return reduction("ReduceSum", SUM, self, dims, out, workspaceSize, executor);
}

aclnnStatus aclnnMeanGetWorkspaceSize(const aclTensor *self, const aclIntArray *dims, bool keep, aclDataType dtype,
                                      aclTensor *out, SIM_WS)
{
    (void)keep, (void)dtype;
    return reduction("Mean", MEAN, self, dims, out, workspaceSize, executor);
}

aclnnStatus aclnnMeanV2GetWorkspaceSize(const aclTensor *self, const aclIntArray *dims, bool keep, bool noop,
                                        aclTensor *out, SIM_WS)
{
    (void)keep, (void)noop;
    return reduction("MeanV2", MEAN, self, dims, out, workspaceSize, executor);
}

aclnnStatus aclnnAmaxGetWorkspaceSize(const aclTensor *self, const aclIntArray *dims, bool keep, aclTensor *out, SIM_WS)
{
    (void)keep;
    return reduction("Amax", MAX, self, dims, out, workspaceSize, executor);
}

aclnnStatus aclnnMaxGetWorkspaceSize(const aclTensor *self, aclTensor *out, SIM_WS)
{
    return reduction("Max", MAX, self, NULL, out, workspaceSize, executor);
}

aclnnStatus aclnnAllGetWorkspaceSize(const aclTensor *self, const aclIntArray *dims, bool keep, aclTensor *out, SIM_WS)
{
    (void)keep;
    return reduction("All", ALL, self, dims, out, workspaceSize, executor);
}

aclnnStatus aclnnAnyGetWorkspaceSize(const aclTensor *self, const aclIntArray *dims, bool keep, aclTensor *out, SIM_WS)
{
    (void)keep;
    return reduction("Any", ANY, self, dims, out, workspaceSize, executor);
}

SIM_PHASE2(ReduceSum)
SIM_PHASE2(Mean)
SIM_PHASE2(MeanV2)
SIM_PHASE2(Amax)
SIM_PHASE2(Max)
SIM_PHASE2(All)
SIM_PHASE2(Any)

/* ---- Softmax and its logarithm ---- */

static void softmax(sim_exec *e) /* in, out; i[0] dim, i[1] log */
{
    const sim_around a = sim_split(&e->t[0], e->i[0]);
    double *v = sim_load(e, 0);
    LOOP(a, o, q)
    {
        double top = -INFINITY, sum = 0;
        for (int64_t i = 0; i < a.n; i++) top = fmax(top, v[AT(a, o, i, q)]);
        for (int64_t i = 0; i < a.n; i++) sum += exp(v[AT(a, o, i, q)] - top);
        for (int64_t i = 0; i < a.n; i++) {
            double *x = &v[AT(a, o, i, q)];
            *x = e->i[1] ? *x - top - log(sum) : exp(*x - top) / sum;
        }
    }
    sim_store(e, 1, v);
}

static void softmax_grad(sim_exec *e) /* dy, y, dx */
{
    const sim_around a = sim_split(&e->t[1], e->i[0]);
    const double *g = sim_load(e, 0);
    double *y = sim_load(e, 1);
    LOOP(a, o, q)
    {
        double sum = 0;
        for (int64_t i = 0; i < a.n; i++) sum += g[AT(a, o, i, q)] * (e->i[1] ? 1 : y[AT(a, o, i, q)]);
        for (int64_t i = 0; i < a.n; i++) {
            double *x = &y[AT(a, o, i, q)];
            *x = e->i[1] ? g[AT(a, o, i, q)] - exp(*x) * sum : *x * (g[AT(a, o, i, q)] - sum);
        }
    }
    sim_store(e, 2, y);
}

#define SOFTMAX(Name, log_)                                                                                            \
    aclnnStatus aclnn##Name##GetWorkspaceSize(const aclTensor *self, int64_t dim, aclTensor *out, SIM_WS)              \
    {                                                                                                                  \
        sim_exec *e = sim_begin(#Name, softmax);                                                                       \
        sim_in(e, self);                                                                                               \
        sim_out(e, out);                                                                                               \
        e->i[0] = dim;                                                                                                 \
        e->i[1] = log_;                                                                                                \
        sim_check(e, sim_same_shape(&e->t[0], &e->t[1]), "out must have self's shape");                                \
        return sim_end(e, 0, workspaceSize, executor);                                                                 \
    }                                                                                                                  \
    SIM_PHASE2(Name)                                                                                                   \
    aclnnStatus aclnn##Name##BackwardGetWorkspaceSize(const aclTensor *grad, const aclTensor *output, int64_t dim,     \
                                                      aclTensor *out, SIM_WS)                                          \
    {                                                                                                                  \
        sim_exec *e = sim_begin(#Name "Backward", softmax_grad);                                                       \
        sim_in(e, grad);                                                                                               \
        sim_in(e, output);                                                                                             \
        sim_out(e, out);                                                                                               \
        e->i[0] = dim;                                                                                                 \
        e->i[1] = log_;                                                                                                \
        sim_check(e, sim_same_shape(&e->t[0], &e->t[1]) && sim_same_shape(&e->t[0], &e->t[2]), "shapes disagree");     \
        return sim_end(e, 0, workspaceSize, executor);                                                                 \
    }                                                                                                                  \
    SIM_PHASE2(Name##Backward)

SOFTMAX(Softmax, 0)
SOFTMAX(LogSoftmax, 1)

/* ---- Sort and top-k: NaN is the largest, as in torch ---- */

typedef struct {
    double v;
    int64_t i;
} item;

static int larger(double a, double b) { return isnan(a) ? !isnan(b) : a > b; }

static int descending(const void *x, const void *y)
{
    const item *a = x, *b = y;
    if (larger(a->v, b->v)) return -1;
    if (larger(b->v, a->v)) return 1;
    return a->i < b->i ? -1 : 1;
}

static int ascending(const void *x, const void *y)
{
    const item *a = x, *b = y;
    if (larger(b->v, a->v)) return -1;
    if (larger(a->v, b->v)) return 1;
    return a->i < b->i ? -1 : 1;
}

static void sort(sim_exec *e) /* in, values, indices; i: dim, largest first, how many */
{
    const sim_around a = sim_split(&e->t[0], e->i[0]);
    sim_around b = a;
    b.n = e->i[2];
    const double *v = sim_load(e, 0);
    const int64_t m = b.outer * b.n * b.inner;
    double *values = sim_buffer(e, (size_t)m * sizeof *values);
    int64_t *index = sim_buffer(e, (size_t)m * sizeof *index);
    item *line = sim_buffer(e, (size_t)a.n * sizeof *line);
    LOOP(a, o, q)
    {
        for (int64_t i = 0; i < a.n; i++) line[i] = (item){v[AT(a, o, i, q)], i};
        qsort(line, (size_t)a.n, sizeof *line, e->i[1] ? descending : ascending);
        for (int64_t i = 0; i < b.n; i++) {
            values[AT(b, o, i, q)] = line[i].v;
            index[AT(b, o, i, q)] = line[i].i;
        }
    }
    sim_store(e, 1, values);
    sim_store_int(e, 2, index);
}

static aclnnStatus order(const char *name, const aclTensor *self, int64_t dim, bool large, int64_t k, aclTensor *values,
                         aclTensor *indices, SIM_WS)
{
    sim_exec *e = sim_begin(name, sort);
    sim_in(e, self);
    sim_out(e, values);
    sim_out(e, indices);
    const sim_around a = sim_split(&e->t[0], dim);
    e->i[0] = dim;
    e->i[1] = large;
    e->i[2] = k < 0 ? a.n : k;
    sim_check(e, e->t[2].dtype == ACL_INT64, "indices must be int64");
    sim_check(
        e, e->i[2] <= a.n && sim_numel(&e->t[1]) == a.outer * e->i[2] * a.inner && sim_same_shape(&e->t[1], &e->t[2]),
        "shapes disagree");
    sim_on_aicpu(e, k < 0 && a.n == 1); /* a sort along one element */
    return sim_end(e, 0, workspaceSize, executor);
}

aclnnStatus aclnnTopkGetWorkspaceSize(const aclTensor *self, int64_t k, int64_t dim, bool largest, bool sorted,
                                      aclTensor *values, aclTensor *indices, SIM_WS)
{
    (void)sorted;
    return order("Topk", self, dim, largest, k, values, indices, workspaceSize, executor);
}

aclnnStatus aclnnSortGetWorkspaceSize(const aclTensor *self, bool stable, int64_t dim, bool desc, aclTensor *values,
                                      aclTensor *indices, SIM_WS)
{
    (void)stable;
    return order("Sort", self, dim, desc, -1, values, indices, workspaceSize, executor);
}

SIM_PHASE2(Topk)
SIM_PHASE2(Sort)

/* ---- Cumsum, Histc ---- */

static void cumsum(sim_exec *e)
{
    const sim_around a = sim_split(&e->t[0], e->i[0]);
    double *v = sim_load(e, 0);
    LOOP(a, o, q) for (int64_t i = 1; i < a.n; i++) v[AT(a, o, i, q)] += v[AT(a, o, i - 1, q)];
    sim_store(e, 1, v);
}

aclnnStatus aclnnCumsumGetWorkspaceSize(const aclTensor *self, int64_t dim, aclDataType dtype, aclTensor *out, SIM_WS)
{
    sim_exec *e = sim_begin("Cumsum", cumsum);
    sim_in(e, self);
    sim_out(e, out);
    e->i[0] = dim;
    sim_check(e, sim_same_shape(&e->t[0], &e->t[1]) && e->t[1].dtype == dtype,
              "out must have self's shape and dtype %d", dtype);
    sim_on_aicpu(e, dtype == ACL_INT64);
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(Cumsum)

static void histc(sim_exec *e)
{
    const int64_t n = sim_numel(&e->t[0]), bins = e->i[0];
    const double *v = sim_load(e, 0), lo = e->d[0], hi = e->d[1];
    double *count = sim_buffer(e, (size_t)bins * sizeof *count);
    for (int64_t i = 0; i < bins; i++) count[i] = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!(v[i] >= lo && v[i] <= hi)) continue;
        const int64_t b = (int64_t)((v[i] - lo) / (hi - lo) * (double)bins);
        count[b < bins ? b : bins - 1]++;
    }
    sim_store(e, 1, count);
}

aclnnStatus aclnnHistcGetWorkspaceSize(const aclTensor *self, int64_t bins, const aclScalar *min, const aclScalar *max,
                                       aclTensor *out, SIM_WS)
{
    sim_exec *e = sim_begin("Histc", histc);
    sim_in(e, self);
    sim_out(e, out);
    e->i[0] = bins;
    e->d[0] = sim_scalar(min);
    e->d[1] = sim_scalar(max);
    sim_check(e, sim_numel(&e->t[1]) == bins, "out must be [bins]");
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(Histc)

/* ---- Negative log likelihood, mean (1) or sum (2) ---- */

static void nll(sim_exec *e) /* logp, target, out, total */
{
    const int64_t n = e->t[0].dims[0], c = e->t[0].dims[1], *y = sim_load_int(e, 1);
    const double *p = sim_load(e, 0);
    double sum = 0, total = 0;
    for (int64_t i = 0; i < n; i++) {
        if (y[i] == e->i[1]) continue;
        if (y[i] < 0 || y[i] >= c) {
            sim_abort(e, "target %lld", (long long)y[i]);
            return;
        }
        sum -= p[i * c + y[i]];
        total++;
    }
    if (e->i[0] == 1) sum /= total;
    sim_store(e, 2, &sum);
    sim_store(e, 3, &total);
}

static void nll_grad(sim_exec *e) /* dout, logp, target, total, dlogp */
{
    const int64_t n = e->t[1].dims[0], c = e->t[1].dims[1], *y = sim_load_int(e, 2);
    const double g = *sim_load(e, 0), total = *sim_load(e, 3);
    double *d = sim_buffer(e, (size_t)(n * c) * sizeof *d);
    memset(d, 0, (size_t)(n * c) * sizeof *d);
    for (int64_t i = 0; i < n; i++)
        if (y[i] != e->i[1] && y[i] >= 0 && y[i] < c) d[i * c + y[i]] = -g / (e->i[0] == 1 ? total : 1);
    sim_store(e, 4, d);
}

aclnnStatus aclnnNLLLossGetWorkspaceSize(const aclTensor *self, const aclTensor *target, const aclTensor *weight,
                                         int64_t reduction_, int64_t ignore, aclTensor *out, aclTensor *total, SIM_WS)
{
    (void)weight;
    sim_exec *e = sim_begin("NLLLoss", nll);
    sim_in(e, self);
    sim_in(e, target);
    sim_out(e, out);
    sim_out(e, total);
    e->i[0] = reduction_;
    e->i[1] = ignore;
    sim_check(e, reduction_ != 0 && e->t[0].ndim == 2, "only 2-D with a reduction is simulated");
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(NLLLoss)

aclnnStatus aclnnNLLLossBackwardGetWorkspaceSize(const aclTensor *grad, const aclTensor *self, const aclTensor *target,
                                                 const aclTensor *weight, int64_t reduction_, int64_t ignore,
                                                 const aclTensor *total, aclTensor *out, SIM_WS)
{
    (void)weight;
    sim_exec *e = sim_begin("NLLLossBackward", nll_grad);
    sim_in(e, grad);
    sim_in(e, self);
    sim_in(e, target);
    sim_in(e, total);
    sim_out(e, out);
    e->i[0] = reduction_;
    e->i[1] = ignore;
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(NLLLossBackward)

/* ---- LinalgVectorNorm: the L2 norm of everything ---- */

static void norm(sim_exec *e) /* self, out */
{
    const double *v = sim_load(e, 0);
    double sum = 0, r;
    for (int64_t i = 0; i < sim_numel(&e->t[0]); i++) sum += v[i] * v[i];
    r = sqrt(sum);
    sim_store(e, 1, &r);
}

aclnnStatus aclnnLinalgVectorNormGetWorkspaceSize(const aclTensor *self, const aclScalar *p, const aclIntArray *dims,
                                                  bool keep, aclDataType dtype, aclTensor *out, SIM_WS)
{
    (void)dims, (void)keep, (void)dtype;
    sim_exec *e = sim_begin("LinalgVectorNorm", norm);
    sim_in(e, self);
    sim_out(e, out);
    sim_check(e, sim_scalar(p) == 2 && sim_numel(&e->t[1]) == 1, "only the L2 norm of a whole tensor is simulated");
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(LinalgVectorNorm)
