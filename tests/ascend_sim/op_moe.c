/* SPDX-License-Identifier: Apache-2.0
 * op_moe.c - permute, unpermute, routing with counts, gating, SwiGLU. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

#define PERMUTE_WORKSPACE(n) (((uint64_t)16 << 20) + 24 * (uint64_t)(n) + 4096)

static bool is_float(int dtype) { return dtype == ACL_FLOAT || dtype == ACL_FLOAT16 || dtype == ACL_BF16; }

/* Stable order of n ids by value: map[i] = row of slot i. Ids outside [lo, hi) come last and get -1. Rows used. */
static int64_t sort_ids(const int64_t *ids, int64_t n, int64_t lo, int64_t hi, int64_t *map, int64_t *count)
{
    int64_t *start = calloc((size_t)(hi - lo + 1), sizeof *start), total = 0;
    for (int64_t i = 0; i < n; i++)
        if (ids[i] >= lo && ids[i] < hi) start[ids[i] - lo]++;
    for (int64_t v = 0; v < hi - lo; v++) {
        const int64_t c = start[v];
        if (count) count[v] = c;
        start[v] = total;
        total += c;
    }
    for (int64_t i = 0; i < n; i++) map[i] = ids[i] >= lo && ids[i] < hi ? start[ids[i] - lo]++ : -1;
    free(start);
    return total;
}

static bool copy_rows(sim_exec *e, int x, const int64_t *map, int64_t n, int64_t k, int out)
{
    const int64_t h = e->t[x].dims[1];
    const float *xf = sim_load_float(e, x);
    float *rows = sim_buffer(e, (size_t)(n * h) * sizeof *rows);
    memset(rows, 0xFF, (size_t)(n * h) * sizeof *rows);
    for (int64_t i = 0; i < n; i++)
        if (map[i] >= 0) memcpy(rows + map[i] * h, xf + i / k * h, (size_t)h * sizeof *rows);
    sim_store_float(e, out, rows);
    return true;
}

/* ---- MoeTokenPermute ---- */

static void permute(sim_exec *e) /* x, ids, xp, map */
{
    const int64_t n = sim_numel(&e->t[1]), k = e->t[1].ndim == 2 ? e->t[1].dims[1] : 1;
    if (n == 0) return;
    const int64_t *ids = sim_load_int(e, 1);
    int64_t top = 0, *map = sim_buffer(e, (size_t)n * sizeof *map);
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= 16777215) {
            sim_abort(e, "id %lld", (long long)ids[i]);
            return;
        }
        if (ids[i] > top) top = ids[i];
    }
    sort_ids(ids, n, 0, top + 1, map, NULL);
    copy_rows(e, 0, map, n, k, 2);
    sim_store_int(e, 3, map);
}

aclnnStatus aclnnMoeTokenPermuteGetWorkspaceSize(const aclTensor *tokens, const aclTensor *indices, int64_t numOut,
                                                 bool padded, const aclTensor *out, const aclTensor *sorted, SIM_WS)
{
    sim_exec *e = sim_begin("MoeTokenPermute", permute);
    sim_in(e, tokens);
    sim_in(e, indices);
    sim_out(e, out);
    sim_out(e, sorted);
    const sim_tensor *x = &e->t[0], *ids = &e->t[1], *xp = &e->t[2], *map = &e->t[3];
    const int64_t n = sim_numel(ids);
    sim_check(e, x->ndim == 2 && xp->ndim == 2 && is_float(x->dtype) && xp->dtype == x->dtype,
              "tokens must be 2-D floating point");
    sim_check(e, ids->dtype == ACL_INT32 || ids->dtype == ACL_INT64, "indices must be int32 or int64");
    sim_check(e, map->dtype == ACL_INT32 && sim_numel(map) == n, "sortedIndices must be int32 [%lld]", (long long)n);
    sim_check(e, !padded && (numOut == 0 || numOut == n), "only the whole permutation is simulated");
    sim_check(e, xp->dims[0] == n && xp->dims[1] == x->dims[1], "permuted tokens must be [n,H]");
    sim_check(e, n < 16777215, "%lld indices", (long long)n);
    sim_check(e, sim_contiguous(xp) && sim_contiguous(map), "outputs must be contiguous");
    return sim_end(e, n ? PERMUTE_WORKSPACE(n) : 0, workspaceSize, executor);
}

SIM_PHASE2(MoeTokenPermute)

static bool check_map(sim_exec *e, const int64_t *map, int64_t n, int64_t rows)
{
    for (int64_t i = 0; i < n; i++)
        if (map[i] < 0 || map[i] >= rows) {
            sim_abort(e, "sortedIndices[%d] = %lld of %lld rows", (int)i, (long long)map[i], (long long)rows);
            return false;
        }
    return true;
}

static void permute_grad(sim_exec *e) /* dxp, map, dx */
{
    const int64_t k = e->i[0], T = e->t[2].dims[0], h = e->t[2].dims[1];
    if (T == 0) return;
    const float *g = sim_load_float(e, 0);
    const int64_t *map = sim_load_int(e, 1);
    if (!check_map(e, map, T * k, e->t[0].dims[0])) return;
    float *dx = sim_buffer(e, (size_t)(T * h) * sizeof *dx);
    for (int64_t t = 0; t < T; t++)
        for (int64_t c = 0; c < h; c++) {
            float sum = 0;
            for (int64_t j = 0; j < k; j++) sum += g[map[t * k + j] * h + c];
            dx[t * h + c] = sum;
        }
    sim_store_float(e, 2, dx);
}

aclnnStatus aclnnMoeTokenPermuteGradGetWorkspaceSize(const aclTensor *grad, const aclTensor *sorted, int64_t topk,
                                                     bool padded, const aclTensor *out, SIM_WS)
{
    sim_exec *e = sim_begin("MoeTokenPermuteGrad", permute_grad);
    sim_in(e, grad);
    sim_in(e, sorted);
    sim_out(e, out);
    e->i[0] = topk;
    const sim_tensor *g = &e->t[0], *map = &e->t[1], *dx = &e->t[2];
    sim_check(e, !padded && topk > 0 && topk <= 512, "numTopk %lld", (long long)topk);
    sim_check(e,
              g->ndim == 2 && dx->ndim == 2 && g->dims[1] == dx->dims[1] && g->dtype == dx->dtype && is_float(g->dtype),
              "gradients must agree");
    sim_check(e, map->dtype == ACL_INT32 && sim_numel(map) == dx->dims[0] * topk, "sortedIndices must be int32 [T*k]");
    sim_check(e, sim_contiguous(dx), "outputs must be contiguous");
    return sim_end(e, 0, workspaceSize, executor);
}

SIM_PHASE2(MoeTokenPermuteGrad)

/* ---- MoeTokenUnpermute ---- */

static void unpermute(sim_exec *e) /* y, map, p, out */
{
    const int64_t T = e->t[3].dims[0], h = e->t[3].dims[1];
    if (T == 0) return;
    const int64_t k = sim_numel(&e->t[1]) / T;
    const float *y = sim_load_float(e, 0);
    const int64_t *map = sim_load_int(e, 1);
    const float *p = e->t[2].present ? sim_load_float(e, 2) : NULL;
    if (!check_map(e, map, T * k, e->t[0].dims[0])) return;
    float *out = sim_buffer(e, (size_t)(T * h) * sizeof *out);
    for (int64_t t = 0; t < T; t++)
        for (int64_t c = 0; c < h; c++) {
            float sum = 0;
            for (int64_t j = 0; j < k; j++) sum += (p ? p[t * k + j] : 1.0f) * y[map[t * k + j] * h + c];
            out[t * h + c] = sum;
        }
    sim_store_float(e, 3, out);
}

static void check_unpermute(sim_exec *e, const sim_tensor *y, const sim_tensor *map, const sim_tensor *p,
                            const sim_tensor *tokens)
{
    sim_check(e,
              y->ndim == 2 && tokens->ndim == 2 && y->dims[1] == tokens->dims[1] && y->dtype == tokens->dtype &&
                  is_float(y->dtype),
              "tokens must agree");
    sim_check(e, map->dtype == ACL_INT32 && map->ndim == 1, "sortedIndices must be int32 [T*k]");
    if (p->present) {
        sim_check(e,
                  p->ndim == 2 && p->dims[0] == tokens->dims[0] && sim_numel(p) == map->dims[0] && is_float(p->dtype),
                  "probs must be [T,k]");
        sim_check(e, !(y->dtype == ACL_BF16 && p->dtype == ACL_FLOAT16), "bf16 tokens with f16 probs");
        sim_check(e, p->dims[1] <= 512, "top-k %lld", (long long)p->dims[1]);
    } else {
        sim_check(e, map->dims[0] == tokens->dims[0], "without probs top-k is 1");
    }
}

aclnnStatus aclnnMoeTokenUnpermuteGetWorkspaceSize(const aclTensor *permuted, const aclTensor *sorted,
                                                   const aclTensor *probs, bool padded, const aclIntArray *restore,
                                                   const aclTensor *out, SIM_WS)
{
    (void)restore;
    sim_exec *e = sim_begin("MoeTokenUnpermute", unpermute);
    sim_in(e, permuted);
    sim_in(e, sorted);
    sim_in_optional(e, probs);
    sim_out(e, out);
    sim_check(e, !padded, "paddedMode");
    check_unpermute(e, &e->t[0], &e->t[1], &e->t[2], &e->t[3]);
    sim_check(e, sim_contiguous(&e->t[3]), "outputs must be contiguous");
    return sim_end(e, 0, workspaceSize, executor);
}

SIM_PHASE2(MoeTokenUnpermute)

static void unpermute_grad(sim_exec *e) /* y, dout, map, p, dy, dp */
{
    const int64_t T = e->t[1].dims[0], h = e->t[1].dims[1], rows = e->t[4].dims[0];
    if (T == 0) return;
    const int64_t k = sim_numel(&e->t[2]) / T;
    const float *y = sim_load_float(e, 0), *dout = sim_load_float(e, 1),
                *p = e->t[3].present ? sim_load_float(e, 3) : NULL;
    const int64_t *map = sim_load_int(e, 2);
    if (!check_map(e, map, T * k, rows)) return;
    float *dy = sim_buffer(e, (size_t)(rows * h) * sizeof *dy), *dp = sim_buffer(e, (size_t)(T * k) * sizeof *dp);
    memset(dy, 0xFF, (size_t)(rows * h) * sizeof *dy);
    for (int64_t i = 0; i < T * k; i++) {
        float dot = 0;
        const float w = p ? p[i] : 1.0f;
        for (int64_t c = 0; c < h; c++) {
            dot += y[map[i] * h + c] * dout[i / k * h + c];
            dy[map[i] * h + c] = w * dout[i / k * h + c];
        }
        dp[i] = dot;
    }
    sim_store_float(e, 4, dy);
    if (e->t[5].present) sim_store_float(e, 5, dp);
}

aclnnStatus aclnnMoeTokenUnpermuteGradGetWorkspaceSize(const aclTensor *permuted, const aclTensor *grad,
                                                       const aclTensor *sorted, const aclTensor *probs, bool padded,
                                                       const aclIntArray *restore, const aclTensor *permutedGrad,
                                                       const aclTensor *probsGrad, SIM_WS)
{
    (void)restore;
    sim_exec *e = sim_begin("MoeTokenUnpermuteGrad", unpermute_grad);
    sim_in(e, permuted);
    sim_in(e, grad);
    sim_in(e, sorted);
    sim_in_optional(e, probs);
    sim_out(e, permutedGrad);
    if (probs) sim_out(e, probsGrad);
    else sim_in_optional(e, NULL);
    sim_check(e, !padded, "paddedMode");
    check_unpermute(e, &e->t[0], &e->t[2], &e->t[3], &e->t[1]);
    sim_check(e, sim_same_shape(&e->t[0], &e->t[4]) && e->t[4].dtype == e->t[0].dtype,
              "the gradient of the tokens must be like them");
    if (probs)
        sim_check(e, sim_same_shape(&e->t[3], &e->t[5]) && e->t[5].dtype == e->t[3].dtype,
                  "the gradient of probs must be like probs");
    if (sim_before_85() && probs)
        sim_check(e, e->t[3].dtype == e->t[0].dtype, "before CANN 8.5 there is no kernel for probs of another dtype");
    sim_check(e, sim_contiguous(&e->t[4]) && (!e->t[5].present || sim_contiguous(&e->t[5])),
              "outputs must be contiguous");
    return sim_end(e, 0, workspaceSize, executor);
}

SIM_PHASE2(MoeTokenUnpermuteGrad)

/* ---- MoeInitRouting: permutation and counts ---- */

static void init_routing(sim_exec *e) /* x, ids, xp, map, counts; i: lo, hi, may leave slots out */
{
    const int64_t n = sim_numel(&e->t[1]), k = e->t[1].dims[1], lo = e->i[0], hi = e->i[1], experts = e->i[2];
    const int64_t *ids = sim_load_int(e, 1);
    int64_t *map = sim_buffer(e, (size_t)n * sizeof *map), *count = sim_buffer(e, (size_t)(hi - lo) * sizeof *count);
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= experts) {
            sim_abort(e, "expertIdx[%d] = %lld of %lld experts", (int)i, (long long)ids[i], (long long)experts);
            return;
        }
    sort_ids(ids, n, lo, hi, map, count);
    copy_rows(e, 0, map, n, k, 2);
    sim_store_int(e, 3, map);
    if (e->i[3])
        for (int64_t g = 1; g < hi - lo; g++) count[g] += count[g - 1];
    if (e->t[4].present) sim_store_int(e, 4, count);
}

static void check_routing(sim_exec *e, int64_t experts, int counts_dtype)
{
    const sim_tensor *x = &e->t[0], *ids = &e->t[1], *xp = &e->t[2], *map = &e->t[3], *counts = &e->t[4];
    const int64_t n = sim_numel(ids);
    sim_check(e, x->ndim == 2 && is_float(x->dtype) && xp->dtype == x->dtype, "x must be 2-D floating point");
    sim_check(e, ids->ndim == 2 && ids->dtype == ACL_INT32 && ids->dims[0] == x->dims[0],
              "expertIdx must be int32 [T,k]");
    sim_check(e, xp->ndim == 2 && xp->dims[0] == n && xp->dims[1] == x->dims[1], "expandedX must be [T*k,H]");
    sim_check(e, map->dtype == ACL_INT32 && sim_numel(map) == n, "expandedRowIdx must be int32 [T*k]");
    if (counts->present)
        sim_check(e, counts->dtype == counts_dtype && sim_numel(counts) == e->i[1] - e->i[0],
                  "counts must be of dtype %d [E]", counts_dtype);
    sim_check(e, experts > 0 && experts <= 10240, "expertNum %lld", (long long)experts);
    sim_check(e, n > 0, "empty tensors are not supported");
    for (int i = 0; i < e->nt; i++)
        sim_check(e, !e->t[i].present || sim_contiguous(&e->t[i]), "tensor %d must be contiguous", i);
}

aclnnStatus aclnnMoeInitRoutingV2GetWorkspaceSize(const aclTensor *x, const aclTensor *expertIdx, int64_t activeNum,
                                                  int64_t capacity, int64_t expertNum, int64_t dropPadMode,
                                                  int64_t countFlag, bool beforeFlag, const aclTensor *expandedX,
                                                  const aclTensor *rowIdx, const aclTensor *counts,
                                                  const aclTensor *before, SIM_WS)
{
    (void)capacity, (void)before;
    sim_exec *e = sim_begin("MoeInitRoutingV2", init_routing);
    sim_in(e, x);
    sim_in(e, expertIdx);
    sim_out(e, expandedX);
    sim_out(e, rowIdx);
    if (countFlag) sim_out(e, counts);
    else sim_in_optional(e, NULL);
    e->i[1] = e->i[2] = expertNum;
    e->i[3] = countFlag == 1;
    sim_check(e, activeNum == 0 && dropPadMode == 0 && !beforeFlag && countFlag >= 0 && countFlag <= 2,
              "only the dropless form is simulated");
    check_routing(e, expertNum, ACL_INT32);
    return sim_end(e, PERMUTE_WORKSPACE(sim_numel(&e->t[1])), workspaceSize, executor);
}

SIM_PHASE2(MoeInitRoutingV2)

aclnnStatus aclnnMoeInitRoutingV3GetWorkspaceSize(const aclTensor *x, const aclTensor *expertIdx,
                                                  const aclTensor *scale, const aclTensor *offset, int64_t activeNum,
                                                  int64_t capacity, int64_t expertNum, int64_t dropPadMode,
                                                  int64_t numType, bool numFlag, int64_t quantMode,
                                                  const aclIntArray *range, int64_t rowIdxType,
                                                  const aclTensor *expandedX, const aclTensor *rowIdx,
                                                  const aclTensor *counts, const aclTensor *expandedScale, SIM_WS)
{
    (void)capacity;
    sim_exec *e = sim_begin("MoeInitRoutingV3", init_routing);
    sim_in(e, x);
    sim_in(e, expertIdx);
    sim_out(e, expandedX);
    sim_out(e, rowIdx);
    sim_out(e, counts);
    int64_t span[2] = {0, 0};
    sim_check(e, sim_int_array(range, span, 2) == 2 && span[0] >= 0 && span[0] < span[1] && span[1] <= expertNum,
              "activeExpertRange");
    sim_check(e, expandedScale != NULL, "expandedScaleOut is NULL");
    sim_check(e, !scale && !offset && quantMode == -1, "quantised forms are not simulated");
    e->i[0] = span[0];
    e->i[1] = span[1];
    e->i[2] = expertNum;
    /* The tiling looks at these, and phase 1 ignores its answer. */
    sim_check_late(e, dropPadMode == 0 && numType == 1 && numFlag && rowIdxType == 0,
                   "only the dropless form with counts is simulated");
    sim_check_late(e, activeNum == sim_numel(&e->t[1]), "activeNum must be T*k");
    sim_check_late(e, e->t[1].dtype == ACL_INT32, "expertIdx must be int32");
    if (!e->status && !e->late) check_routing(e, expertNum, ACL_INT64);
    return sim_end(e, PERMUTE_WORKSPACE(sim_numel(&e->t[1])), workspaceSize, executor);
}

SIM_PHASE2(MoeInitRoutingV3)

/* ---- MoeGatingTopKSoftmaxV2 ---- */

/* What is not documented: the order of equal scores, and NaN. Usually the lowest index and NaN last; with the switch
 * gating_perverse the highest index, and NaN first. Nobody may depend on either. */
static bool better(double a, double b, bool perverse)
{
    if (!perverse) return a > b;
    return isnan(a) || a >= b;
}

static void gating(sim_exec *e) /* x, y, ids, softmax; i: k, renorm */
{
    const bool perverse = fmoe_sim_option("gating_perverse") != 0;
    const int64_t T = e->t[0].dims[0], E = e->t[0].dims[1], k = e->i[0];
    const double *x = sim_load(e, 0);
    double *y = sim_buffer(e, (size_t)(T * k) * sizeof *y), *s = sim_buffer(e, (size_t)(T * E) * sizeof *s);
    int64_t *ids = sim_buffer(e, (size_t)(T * k) * sizeof *ids);
    char *taken = sim_buffer(e, (size_t)E);
    for (int64_t t = 0; t < T; t++) {
        const double *row = x + t * E;
        double top = -INFINITY, sum = 0, part = 0;
        for (int64_t i = 0; i < E; i++) top = fmax(top, row[i]);
        for (int64_t i = 0; i < E; i++) sum += s[t * E + i] = exp(row[i] - top);
        for (int64_t i = 0; i < E; i++) s[t * E + i] /= sum;
        memset(taken, 0, (size_t)E);
        for (int64_t j = 0; j < k; j++) {
            int64_t best = -1;
            for (int64_t i = 0; i < E; i++)
                if (!taken[i] && (best < 0 || better(s[t * E + i], s[t * E + best], perverse))) best = i;
            taken[best] = 1;
            ids[t * k + j] = best;
            part += y[t * k + j] = s[t * E + best];
        }
        if (e->i[1])
            for (int64_t j = 0; j < k; j++) y[t * k + j] /= part;
    }
    sim_store(e, 1, y);
    sim_store_int(e, 2, ids);
    if (sim_numel(&e->t[3])) sim_store(e, 3, s);
}

aclnnStatus aclnnMoeGatingTopKSoftmaxV2GetWorkspaceSize(const aclTensor *x, const aclTensor *finished, int64_t k,
                                                        int64_t renorm, bool outFlag, const aclTensor *y,
                                                        const aclTensor *ids, const aclTensor *softmax, SIM_WS)
{
    sim_exec *e = sim_begin("MoeGatingTopKSoftmaxV2", gating);
    sim_in(e, x);
    sim_out(e, y);
    sim_out(e, ids);
    if (outFlag || fmoe_sim_option("no_null_outputs")) sim_out(e, softmax);
    else sim_in_optional(e, NULL);
    e->i[0] = k;
    e->i[1] = renorm;
    const sim_tensor *t = &e->t[0];
    sim_check(e, !finished, "finished is not simulated");
    sim_check(e, t->ndim == 2 && is_float(t->dtype) && e->t[1].dtype == t->dtype && e->t[2].dtype == ACL_INT32,
              "x, y of one dtype, ids int32");
    sim_check(e, k >= 1 && k <= 1024 && k <= t->dims[1] && e->t[1].dims[1] == k && e->t[2].dims[1] == k, "k %lld",
              (long long)k);
    sim_check(e, !outFlag || (renorm == 0 && e->t[3].dtype == ACL_FLOAT), "softmax output: float32, renorm 0");
    for (int i = 0; i < 3; i++) sim_check(e, sim_contiguous(&e->t[i]), "tensor %d must be contiguous", i);
    return sim_end(e, (uint64_t)16 << 20, workspaceSize, executor);
}

SIM_PHASE2(MoeGatingTopKSoftmaxV2)

/* ---- SwiGLU ---- */

static void swiglu(sim_exec *e)
{
    const int64_t c = e->t[1].dims[e->t[1].ndim - 1], rows = sim_numel(&e->t[1]) / (c ? c : 1);
    const float *h = sim_load_float(e, 0);
    float *a = sim_buffer(e, (size_t)(rows * c) * sizeof *a);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < c; i++) {
            const float g = h[r * 2 * c + i], u = h[r * 2 * c + c + i];
            a[r * c + i] = g / (1 + expf(-g)) * u;
        }
    sim_store_float(e, 1, a);
}

aclnnStatus aclnnSwiGluGetWorkspaceSize(const aclTensor *x, int64_t dim, const aclTensor *out, SIM_WS)
{
    sim_exec *e = sim_begin("SwiGlu", swiglu);
    sim_in(e, x);
    sim_out(e, out);
    const sim_tensor *h = &e->t[0], *a = &e->t[1];
    const int last = h->ndim - 1;
    sim_check(e, (dim == -1 || dim == last) && a->ndim == h->ndim && h->dtype == a->dtype && is_float(h->dtype),
              "last dimension, one dtype");
    sim_check(e, last >= 0 && h->dims[last] == 2 * a->dims[last] && sim_numel(h) == 2 * sim_numel(a),
              "out must be half of x");
    sim_check(e, sim_contiguous(h) && sim_contiguous(a), "contiguous only");
    return sim_end(e, 0, workspaceSize, executor);
}

SIM_PHASE2(SwiGlu)

static void swiglu_grad(sim_exec *e) /* da, h, dh */
{
    const int64_t c = e->t[0].dims[e->t[0].ndim - 1], rows = sim_numel(&e->t[0]) / (c ? c : 1);
    const float *da = sim_load_float(e, 0), *h = sim_load_float(e, 1);
    float *dh = sim_buffer(e, (size_t)(2 * rows * c) * sizeof *dh);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < c; i++) {
            const float g = h[r * 2 * c + i], u = h[r * 2 * c + c + i], d = da[r * c + i], s = 1 / (1 + expf(-g));
            dh[r * 2 * c + i] = d * u * s * (1 + g * (1 - s));
            dh[r * 2 * c + c + i] = d * g * s;
        }
    sim_store_float(e, 2, dh);
}

aclnnStatus aclnnSwiGluGradGetWorkspaceSize(const aclTensor *yGrad, const aclTensor *x, int64_t dim,
                                            const aclTensor *out, SIM_WS)
{
    sim_exec *e = sim_begin("SwiGluGrad", swiglu_grad);
    sim_in(e, yGrad);
    sim_in(e, x);
    sim_out(e, out);
    const sim_tensor *d = &e->t[0], *h = &e->t[1];
    const int last = h->ndim - 1;
    sim_check(e,
              (dim == -1 || dim == last) && d->ndim == h->ndim && h->dtype == d->dtype && is_float(h->dtype) &&
                  e->t[2].dtype == h->dtype,
              "last dimension, one dtype");
    sim_check(e, sim_same_shape(h, &e->t[2]) && sim_numel(h) == 2 * sim_numel(d), "shapes disagree");
    sim_check(e, sim_contiguous(d) && sim_contiguous(&e->t[2]), "contiguous only");
    sim_check(e, sim_numel(h) > 0 || fmoe_sim_option("lenient"), "empty tensors are not supported");
    return sim_end(e, 0, workspaceSize, executor);
}

SIM_PHASE2(SwiGluGrad)
