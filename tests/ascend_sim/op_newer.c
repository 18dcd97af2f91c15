/* SPDX-License-Identifier: Apache-2.0
 * op_newer.c - operators that came after CANN 8.5: ClippedSwiglu and its gradient, MoeGatingTopKBackward. Computed in
 * double from the vendor's formulas, rounded once. */
#include <math.h>

#include "sim.h"

enum { INTERLEAVED, COLUMNS };      /* i[] */
enum { ALPHA, LIMIT, BIAS, SCALE }; /* d[] */

static bool is_float(int dtype) { return dtype == ACL_FLOAT || dtype == ACL_FLOAT16 || dtype == ACL_BF16; }

/* Where gate and up of element i of row r are. */
static int64_t gate_at(const sim_exec *e, int64_t r, int64_t i)
{
    const int64_t c = e->i[COLUMNS];
    return r * 2 * c + (e->i[INTERLEAVED] ? 2 * i : i);
}

static int64_t up_at(const sim_exec *e, int64_t r, int64_t i)
{
    const int64_t c = e->i[COLUMNS];
    return r * 2 * c + (e->i[INTERLEAVED] ? 2 * i + 1 : c + i);
}

static void clipped(sim_exec *e) /* x, out */
{
    const int64_t c = e->i[COLUMNS], rows = c ? sim_numel(&e->t[1]) / c : 0;
    const double *x = sim_load(e, 0), L = e->d[LIMIT];
    double *y = sim_buffer(e, (size_t)(rows * c) * sizeof *y);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < c; i++) {
            const double g = fmin(x[gate_at(e, r, i)], L), u = fmin(fmax(x[up_at(e, r, i)], -L), L);
            y[r * c + i] = g / (1 + exp(-e->d[ALPHA] * g)) * (u + e->d[BIAS]);
        }
    sim_store(e, 1, y);
}

static void clipped_grad(sim_exec *e) /* x, gradX, gradY */
{
    const int64_t c = e->i[COLUMNS], rows = c ? sim_numel(&e->t[2]) / c : 0;
    const double *x = sim_load(e, 0), *dy = sim_load(e, 2), L = e->d[LIMIT], alpha = e->d[ALPHA];
    double *dx = sim_buffer(e, (size_t)(2 * rows * c) * sizeof *dx);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < c; i++) {
            const double g_raw = x[gate_at(e, r, i)], u_raw = x[up_at(e, r, i)], d = dy[r * c + i];
            const double g = fmin(g_raw, L), u = fmin(fmax(u_raw, -L), L), s = 1 / (1 + exp(-alpha * g));
            dx[gate_at(e, r, i)] = g_raw <= L ? d * (u + e->d[BIAS]) * s * (1 + alpha * g * (1 - s)) : 0;
            dx[up_at(e, r, i)] = -L <= u_raw && u_raw <= L ? d * g * s : 0;
        }
    sim_store(e, 1, dx);
}

static aclnnStatus clip(const char *name, sim_kernel kernel, const aclTensor *x, const aclTensor *dy,
                        const aclTensor *group, int64_t dim, double alpha, double limit, double bias, bool interleaved,
                        const aclTensor *out, SIM_WS)
{
    sim_exec *e = sim_begin(name, kernel);
    sim_in(e, x);
    sim_out(e, out);
    if (dy) sim_in(e, dy);
    const sim_tensor *h = &e->t[0], *half = &e->t[dy ? 2 : 1];
    const int last = h->ndim - 1;
    e->i[INTERLEAVED] = interleaved;
    e->i[COLUMNS] = last >= 0 ? half->dims[last] : 0;
    e->d[ALPHA] = alpha;
    e->d[LIMIT] = limit;
    e->d[BIAS] = bias;
    sim_check(e, !group, "groupIndex is not simulated");
    sim_check(e, last >= 0 && (dim == -1 || dim == last) && half->ndim == h->ndim, "last dimension only");
    sim_check(e, h->dims[last] == 2 * half->dims[last] && sim_numel(h) == 2 * sim_numel(half), "half of x is needed");
    sim_check(e, !dy || sim_same_shape(h, &e->t[1]), "the gradient must be like x");
    for (int i = 0; i < e->nt; i++)
        sim_check(e, e->t[i].dtype == h->dtype && is_float(h->dtype) && sim_contiguous(&e->t[i]),
                  "tensor %d: one dtype, contiguous", i);
    sim_check_late(e, limit > 0, "limit %g must be positive", limit); /* its tiling looks at it */
    return sim_end(e, 0, workspaceSize, executor);
}

aclnnStatus aclnnClippedSwigluGetWorkspaceSize(const aclTensor *x, const aclTensor *group, int64_t dim, double alpha,
                                               double limit, double bias, bool interleaved, const aclTensor *out,
                                               SIM_WS)
{
    return clip("ClippedSwiglu", clipped, x, NULL, group, dim, alpha, limit, bias, interleaved, out, workspaceSize,
                executor);
}

aclnnStatus aclnnClippedSwigluGradGetWorkspaceSize(const aclTensor *dy, const aclTensor *x, const aclTensor *group,
                                                   int64_t dim, double alpha, double limit, double bias,
                                                   bool interleaved, const aclTensor *dx, SIM_WS)
{
    return clip("ClippedSwigluGrad", clipped_grad, x, dy, group, dim, alpha, limit, bias, interleaved, dx,
                workspaceSize, executor);
}

SIM_PHASE2(ClippedSwiglu)
SIM_PHASE2(ClippedSwigluGrad)

/* ---- MoeGatingTopKBackward: of sigmoid scores that were normalised over the chosen ones ---- */

static void gating_backward(sim_exec *e) /* xNorm, gradY, ids, out; d: scale, eps */
{
    const int64_t T = e->t[0].dims[0], E = e->t[0].dims[1], k = e->t[1].dims[1];
    const double *s = sim_load(e, 0), *dy = sim_load(e, 1), scale = e->d[SCALE], eps = e->d[0];
    const int64_t *ids = sim_load_int(e, 2);
    double *dx = sim_buffer(e, (size_t)(T * E) * sizeof *dx);
    for (int64_t i = 0; i < T * E; i++) dx[i] = 0;
    for (int64_t t = 0; t < T; t++) {
        double sum = eps, dot = 0;
        for (int64_t j = 0; j < k; j++) {
            const int64_t id = ids[t * k + j];
            if (id < 0 || id >= E) {
                sim_abort(e, "expertIdx %lld of %lld", (long long)id, (long long)E);
                return;
            }
            sum += s[t * E + id];
        }
        for (int64_t j = 0; j < k; j++) dot += s[t * E + ids[t * k + j]] / sum * scale * dy[t * k + j];
        for (int64_t j = 0; j < k; j++) dx[t * E + ids[t * k + j]] += (scale * dy[t * k + j] - dot) / sum;
        for (int64_t i = 0; i < E; i++) dx[t * E + i] *= s[t * E + i] * (1 - s[t * E + i]);
    }
    sim_store(e, 3, dx);
}

aclnnStatus aclnnMoeGatingTopKBackwardGetWorkspaceSize(const aclTensor *xNorm, const aclTensor *gradY,
                                                       const aclTensor *ids, int64_t renorm, int64_t normType,
                                                       double scale, double eps, const aclTensor *out, SIM_WS)
{
    sim_exec *e = sim_begin("MoeGatingTopKBackward", gating_backward);
    sim_in(e, xNorm);
    sim_in(e, gradY);
    sim_in(e, ids);
    sim_out(e, out);
    e->d[SCALE] = scale;
    e->d[0] = eps;
    const sim_tensor *s = &e->t[0], *d = &e->t[1], *x = &e->t[2], *r = &e->t[3];
    (void)renorm; /* reserved */
    sim_check(e, !sim_is_950(), "not on this chip");
    sim_check(e, normType == 1, "normType %lld: only 1, sigmoid", (long long)normType);
    sim_check(e, s->ndim == 2 && s->dtype == ACL_FLOAT && s->dims[1] >= 2 && s->dims[1] <= 2048, "xNorm: f32 [M,N]");
    sim_check(e, d->ndim == 2 && is_float(d->dtype) && d->dims[0] == s->dims[0] && sim_same_shape(d, x),
              "gradY: [M,K]");
    sim_check(e, x->dtype == ACL_INT32 && sim_contiguous(x), "expertIdx: int32, contiguous");
    sim_check(e, r->dtype == d->dtype && sim_same_shape(r, s) && sim_contiguous(r), "out: like xNorm, gradY's dtype");
    sim_check(e, sim_numel(d) > 0, "empty tensors are not supported");
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(MoeGatingTopKBackward)
