/* SPDX-License-Identifier: Apache-2.0
 * op_gmm.c - GroupedMatmul in its versions, GroupedMatmulAdd, Mm, Matmul, BatchMatMul.
 *
 * The rules checked are those documented for A2/A3 (910B): one dtype, lists of at most 128, group lists of at most 1024
 * int64 values on the device, inner dimensions below 65536, transposition seen in the strides of the last two
 * dimensions. */
#include <string.h>

#include "sim.h"

#define GMM_WORKSPACE ((uint64_t)16 << 20)

/* x, weight, bias: first index and count; i[] of the executor carries them to the kernel. */
enum { X, NX, W, NW, B, NB, Y, NY, LIST, GROUP_TYPE, LIST_TYPE, W_SWAPPED };

/* The vendor's test for a transposed view: strides alone, so a single row with strides {1,1} passes for one. */
static bool swapped(const sim_tensor *t)
{
    const int n = t->ndim;
    if (n < 2 || t->strides[n - 2] != 1 || t->strides[n - 1] != t->dims[n - 2]) return false;
    return n == 2 || t->strides[0] == t->dims[n - 1] * t->dims[n - 2];
}

/* Where an operand must not be transposed, 1x1 is excused: it always looks so. */
static bool wrongly_swapped(const sim_tensor *t)
{
    return swapped(t) && t->dims[t->ndim - 1] * t->dims[t->ndim - 2] != 1;
}

/* Contiguous, or a transposed view; anything else costs the device a copy that the caller does not see. */
static void layout(sim_exec *e, const sim_tensor *t)
{
    if (sim_numel(t) == 0 || sim_contiguous(t) || swapped(t)) return;
    sim_add("hidden_copies", 1);
    const int64_t bytes = sim_numel(t) * (int64_t)sim_dtype_size(t->dtype);
    e->read += bytes;
    e->written += bytes;
}

/* Group sizes as counts; total, or -1 after an error. */
static int64_t group_sizes(sim_exec *e, int list, int64_t list_type, int64_t rows, int64_t *count)
{
    const int64_t n = e->t[list].dims[0], *v = sim_load_int(e, list);
    int64_t total = 0;
    for (int64_t g = 0; g < n; g++) {
        count[g] = list_type == 0 ? v[g] - (g ? v[g - 1] : 0) : v[g];
        if (count[g] < 0 || total + count[g] > rows) {
            sim_abort(e, "group %d has %lld rows after %lld of %lld", (int)g, (long long)count[g], (long long)total,
                      (long long)rows);
            return -1;
        }
        total += count[g];
    }
    return total;
}

static void product(sim_exec *e, const sim_tensor *w, int64_t we, int bias, int64_t be, const float *x, int64_t m,
                    int y, int64_t row)
{
    if (m == 0) return;
    void *mark = e->arena;
    const int nd = w->ndim;
    const int64_t k = w->dims[nd - 2], n = w->dims[nd - 1];
    sim_tensor one = *w;
    if (nd == 3) { /* expert we of a stack */
        one.offset += we * one.strides[0];
        memmove(one.dims, one.dims + 1, 2 * sizeof one.dims[0]);
        memmove(one.strides, one.strides + 1, 2 * sizeof one.strides[0]);
        one.ndim = 2;
    }
    const bool turn = one.strides[0] == 1 && one.strides[1] != 1;
    if (turn) { /* as it is stored */
        const int64_t d = one.dims[0], s = one.strides[0];
        one.dims[0] = one.dims[1];
        one.strides[0] = one.strides[1];
        one.dims[1] = d;
        one.strides[1] = s;
    }
    const float *wf = sim_to_float(e, &one, 0, one.dims[0]);
    float *out = sim_buffer(e, (size_t)(m * n) * sizeof *out);
    memset(out, 0, (size_t)(m * n) * sizeof *out);
    sim_sgemm(m, n, k, x, false, wf, turn, out);
    if (bias >= 0) {
        const float *b = e->t[bias].ndim == 2 ? sim_to_float(e, &e->t[bias], be, 1) : sim_load_float(e, bias);
        for (int64_t i = 0; i < m * n; i++) out[i] += b[i % n];
    }
    sim_store_part(e, y, row, m, out);
    sim_release(e, mark);
}

static void gmm_m(sim_exec *e) /* groups along the rows; x and y single, weight stacked or a list */
{
    const int x = (int)e->i[X], w = (int)e->i[W], y = (int)e->i[Y], nw = (int)e->i[NW];
    const int64_t rows = e->t[x].dims[0];
    if (rows == 0) return;
    const int64_t groups = nw == 1 ? e->t[w].dims[0] : nw;
    int64_t count[1024], row = 0;
    const int64_t total = group_sizes(e, (int)e->i[LIST], e->i[LIST_TYPE], rows, count);
    if (total < 0) return;
    for (int64_t g = 0; g < groups; g++) {
        void *mark = e->arena;
        const float *xf = sim_to_float(e, &e->t[x], row, count[g]);
        const int bias = e->i[NB] ? (int)e->i[B] + (nw == 1 ? 0 : (int)g) : -1;
        product(e, &e->t[nw == 1 ? w : w + (int)g], g, bias, g, xf, count[g], y, row);
        row += count[g];
        sim_release(e, mark);
    }
    /* Rows past the total are not written: what was there stays. */
}

static void gmm_none(sim_exec *e) /* one product for each member of the lists */
{
    for (int64_t g = 0; g < e->i[NX]; g++) {
        const sim_tensor *x = &e->t[e->i[X] + g];
        product(e, &e->t[e->i[W] + g], 0, e->i[NB] ? (int)(e->i[B] + g) : -1, 0, sim_load_float(e, (int)(e->i[X] + g)),
                x->dims[0], (int)(e->i[Y] + g), 0);
    }
}

/* y[g] (+)= x_g^T . w_g, x given [rows, m] */
static void contract(sim_exec *e, const float *x, int64_t m, int w, int y, const int64_t *count, int64_t groups,
                     bool add)
{
    const int64_t n = e->t[w].dims[1];
    int64_t row = 0;
    for (int64_t g = 0; g < groups; g++) {
        void *mark = e->arena;
        float *out = sim_buffer(e, (size_t)(m * n) * sizeof *out);
        if (add) memcpy(out, sim_to_float(e, &e->t[y], g, 1), (size_t)(m * n) * sizeof *out);
        else memset(out, 0, (size_t)(m * n) * sizeof *out);
        if (count[g])
            sim_sgemm(m, n, count[g], x + row * m, true, sim_to_float(e, &e->t[w], row, count[g]), false, out);
        sim_store_part(e, y, g, 1, out);
        row += count[g];
        sim_release(e, mark);
    }
}

static void gmm_k(sim_exec *e) /* groups along the contraction */
{
    const int x = (int)e->i[X], w = (int)e->i[W], y = (int)e->i[Y];
    sim_tensor stored = e->t[x];
    const int64_t m = stored.dims[0], rows = stored.dims[1];
    stored.dims[0] = rows;
    stored.dims[1] = m;
    stored.strides[0] = m;
    stored.strides[1] = 1;
    int64_t count[1024];
    if (group_sizes(e, (int)e->i[LIST], e->i[LIST_TYPE], rows, count) < 0) return;
    const float *xf = sim_to_float(e, &stored, 0, rows);
    contract(e, xf, m, w, y, count, e->t[y].dims[0], false);
}

static bool is_float(int dtype) { return dtype == ACL_FLOAT || dtype == ACL_FLOAT16 || dtype == ACL_BF16; }

static void check_list(sim_exec *e, int list, int64_t groups, int64_t max)
{
    const sim_tensor *t = &e->t[list];
    sim_check(e, t->present, "a group list is needed");
    sim_check(e, t->dtype == ACL_INT64 && t->ndim == 1, "the group list must be one row of int64");
    sim_check(e, sim_contiguous(t), "the group list must be contiguous");
    sim_check(e, t->dims[0] == groups, "the group list has %lld entries for %lld groups", (long long)t->dims[0],
              (long long)groups);
    sim_check(e, groups <= max && groups > 0, "%lld groups: at most %lld", (long long)groups, (long long)max);
    if (groups == 1) sim_add("undocumented", 1); /* taken by the host code; of the kernel nothing is known */
}

static void nothing(sim_exec *e) { (void)e; }

static aclnnStatus grouped(const char *name, const aclTensorList *x, const aclTensorList *weight,
                           const aclTensorList *bias, const aclTensorList *refused, const aclTensor *groupList,
                           int64_t splitItem, int64_t groupType, int64_t listType, int64_t actType,
                           const aclTensorList *y, SIM_WS)
{
    sim_exec *e = sim_begin(name, nothing);
    int nx, nw, nb, ny;
    const int ix = sim_list(e, x, false, &nx), iw = sim_list(e, weight, false, &nw), ib = sim_list(e, bias, false, &nb);
    const int list = sim_in_optional(e, groupList), iy = sim_list(e, y, true, &ny);
    const int64_t values[] = {ix, nx, iw, nw, ib, nb, iy, ny, list, groupType, listType, 0};
    memcpy(e->i, values, sizeof values);
    sim_check(e, !refused, "quantised forms are not simulated");
    sim_check(e, nx > 0 && nw > 0 && ny > 0, "x, weight and y need at least one tensor");
    sim_check(e, nx <= 128 && nw <= 128 && ny <= 128 && nb <= 128, "lists of %d, %d, %d: at most 128", nx, nw, ny);
    sim_check(e, actType == 0, "actType %lld: without quantisation only 0", (long long)actType);
    sim_check(e, listType == 0 || listType == 1, "groupListType %lld", (long long)listType);
    sim_check(e, splitItem >= 0 && splitItem <= 3, "splitItem %lld", (long long)splitItem);
    if (e->status) return sim_end(e, 0, workspaceSize, executor);
    const int dtype = e->t[ix].dtype;
    bool empty = true;
    for (int i = 0; i < e->nt; i++) {
        const sim_tensor *t = &e->t[i];
        if (i == list) continue;
        const bool is_bias = i >= ib && i < ib + nb;
        const int want = is_bias && dtype == ACL_BF16 ? ACL_FLOAT : dtype;
        sim_check(e, t->dtype == want && is_float(dtype), "tensor %d has dtype %d, not %d", i, t->dtype, want);
        if (t->is_out)
            sim_check(e, sim_contiguous(t), "y must be contiguous"); /* a strided y is copied by the device */
    }
    /* Documented for single tensors only; the host code takes lists too, of the kernel nothing is known. */
    if (dtype == ACL_FLOAT && (nx > 1 || nw > 1 || ny > 1)) sim_add("undocumented", 1);
    if (groupType == 0) {
        const sim_tensor *tx = &e->t[ix], *ty = &e->t[iy];
        e->kernel = gmm_m;
        sim_check(e, splitItem >= 2 && ny == 1 && nx == 1, "groupType 0: splitItem 2 or 3, one x, one y");
        const int64_t groups = nw == 1 ? e->t[iw].dims[0] : nw;
        sim_check(e, tx->ndim == 2 && ty->ndim == 2 && ty->dims[0] == tx->dims[0], "x and y must be [M,K] and [M,N]");
        check_list(e, list, groups, nw == 1 ? 1024 : 128);
        layout(e, tx);
        sim_check(e, !wrongly_swapped(tx), "x must not be transposed");
        for (int i = 0; i < nw; i++) {
            const sim_tensor *tw = &e->t[iw + i];
            const int nd = tw->ndim;
            sim_check(e, nd == (nw == 1 ? 3 : 2), "weight %d has %d dimensions", i, nd);
            if (e->status) break;
            sim_check(e, tw->dims[nd - 2] == tx->dims[1] && tw->dims[nd - 1] == ty->dims[1],
                      "weight %d is [%lld,%lld], x has K %lld, y has N %lld", i, (long long)tw->dims[nd - 2],
                      (long long)tw->dims[nd - 1], (long long)tx->dims[1], (long long)ty->dims[1]);
            const bool turned = swapped(tw);
            layout(e, tw);
            if (i == 0) e->i[W_SWAPPED] = turned;
            sim_check(e, turned == (e->i[W_SWAPPED] != 0), "weights must be transposed all or none");
            sim_check(e, tw->dims[turned ? nd - 2 : nd - 1] < 65536, "an inner dimension of weight is 65536 or more");
        }
        sim_check(e, tx->dims[1] < 65536, "the inner dimension of x is 65536 or more");
        sim_check(e, tx->dims[1] > 0 || tx->dims[0] == 0, "K is 0");
        sim_check(e, nb == 0 || nb == nw, "%d biases for %d weights", nb, nw);
        if (nb == 1 && !e->status)
            sim_check(e, e->t[ib].ndim == 2 && e->t[ib].dims[0] == groups && e->t[ib].dims[1] == ty->dims[1],
                      "bias must be [E,N]");
        empty = tx->dims[0] == 0;
    } else if (groupType == 2) {
        const sim_tensor *tx = &e->t[ix], *tw = &e->t[iw], *ty = &e->t[iy];
        e->kernel = gmm_k;
        sim_check(e, splitItem >= 2 && nx == 1 && nw == 1 && ny == 1 && nb == 0,
                  "groupType 2: splitItem 2 or 3, single tensors, no bias");
        sim_check(e, tx->ndim == 2 && tw->ndim == 2 && ty->ndim == 3, "groupType 2: x [M,K], weight [K,N], y [E,M,N]");
        if (!e->status) {
            check_list(e, list, ty->dims[0], 1024);
            sim_check(e, tx->dims[1] == tw->dims[0] && ty->dims[1] == tx->dims[0] && ty->dims[2] == tw->dims[1],
                      "groupType 2: shapes disagree");
            sim_check(e, swapped(tx), "groupType 2: x must be a transposed view");
            sim_check(e, !wrongly_swapped(tw) && (sim_contiguous(tw) || sim_numel(tw) == 0),
                      "groupType 2: weight must not be transposed");
            sim_check(e, tx->dims[0] < 65536 && tw->dims[1] < 65536, "an inner dimension is 65536 or more");
        }
        empty = false;
    } else if (groupType == -1) {
        e->kernel = gmm_none;
        sim_check(e, splitItem <= 1 && nx == nw && nw == ny, "groupType -1: lists of one length, splitItem 0 or 1");
        sim_check(e, !e->t[list].present, "groupType -1: no group list");
        sim_check(e, nb == 0 || nb == nw, "%d biases for %d weights", nb, nw);
        for (int i = 0; i < nx && !e->status; i++) {
            const sim_tensor *tx = &e->t[ix + i], *tw = &e->t[iw + i], *ty = &e->t[iy + i];
            sim_check(e,
                      tx->ndim == 2 && tw->ndim == 2 && ty->ndim == 2 && tx->dims[1] == tw->dims[0] &&
                          ty->dims[0] == tx->dims[0] && ty->dims[1] == tw->dims[1],
                      "member %d: shapes disagree", i);
            layout(e, tx);
            sim_check(e, !wrongly_swapped(tx), "x[%d] must not be transposed", i);
            const bool turned = swapped(tw);
            layout(e, tw);
            if (i == 0) e->i[W_SWAPPED] = turned;
            sim_check(e, turned == (e->i[W_SWAPPED] != 0), "weights must be transposed all or none");
            if (tx->dims[0]) empty = false;
        }
    } else {
        sim_check(e, false, "groupType %lld", (long long)groupType);
    }
    return sim_end(e, empty ? 0 : GMM_WORKSPACE, workspaceSize, executor);
}

aclnnStatus aclnnGroupedMatmulV4GetWorkspaceSize(const aclTensorList *x, const aclTensorList *weight,
                                                 const aclTensorList *bias, const aclTensorList *scale,
                                                 const aclTensorList *offset, const aclTensorList *antiScale,
                                                 const aclTensorList *antiOffset, const aclTensorList *perToken,
                                                 const aclTensor *groupList, const aclTensorList *actIn,
                                                 const aclTensorList *actScale, const aclTensorList *actOffset,
                                                 int64_t splitItem, int64_t groupType, int64_t listType,
                                                 int64_t actType, aclTensorList *out, aclTensorList *featureOut,
                                                 aclTensorList *dynScaleOut, SIM_WS)
{
    const void *extra[] = {scale, offset,   antiScale, antiOffset, perToken,
                           actIn, actScale, actOffset, featureOut, dynScaleOut};
    const aclTensorList *refused = NULL;
    for (int i = 0; i < 10; i++)
        if (extra[i]) refused = extra[i];
    return grouped("GroupedMatmulV4", x, weight, bias, refused, groupList, splitItem, groupType, listType, actType, out,
                   workspaceSize, executor);
}

aclnnStatus aclnnGroupedMatmulV5GetWorkspaceSize(const aclTensorList *x, const aclTensorList *weight,
                                                 const aclTensorList *bias, const aclTensorList *scale,
                                                 const aclTensorList *offset, const aclTensorList *antiScale,
                                                 const aclTensorList *antiOffset, const aclTensorList *perToken,
                                                 const aclTensor *groupList, const aclTensorList *actIn,
                                                 const aclTensorList *actScale, const aclTensorList *actOffset,
                                                 int64_t splitItem, int64_t groupType, int64_t listType,
                                                 int64_t actType, aclIntArray *tuning, aclTensorList *out,
                                                 aclTensorList *featureOut, aclTensorList *dynScaleOut, SIM_WS)
{
    (void)tuning;
    const void *extra[] = {scale, offset,   antiScale, antiOffset, perToken,
                           actIn, actScale, actOffset, featureOut, dynScaleOut};
    const aclTensorList *refused = NULL;
    for (int i = 0; i < 10; i++)
        if (extra[i]) refused = extra[i];
    return grouped("GroupedMatmulV5", x, weight, bias, refused, groupList, splitItem, groupType, listType, actType, out,
                   workspaceSize, executor);
}

SIM_PHASE2(GroupedMatmulV4)
SIM_PHASE2(GroupedMatmulV5)

/* ---- GroupedMatmulAdd: yRef[g] += x_g^T . w_g in float32; the group list is cumulative, or with V2 counts. ---- */

static void gmm_add(sim_exec *e)
{
    int64_t count[1024];
    sim_tensor *y = &e->t[3];
    const int64_t groups = e->t[2].dims[0], m = e->t[0].dims[1];
    if (group_sizes(e, 2, e->i[0], e->t[0].dims[0], count) < 0) return;
    if (y->ndim == 2) { /* [E*M,N] */
        y->ndim = 3;
        y->dims[2] = y->dims[1];
        y->dims[1] = m;
        y->dims[0] = groups;
        y->strides[2] = 1;
        y->strides[1] = y->dims[2];
        y->strides[0] = m * y->dims[2];
    }
    contract(e, sim_load_float(e, 0), m, 1, 3, count, groups, true);
}

static aclnnStatus add_into(const char *name, const aclTensor *x, const aclTensor *weight, const aclTensor *groupList,
                            aclTensor *yRef, bool transposeX, bool transposeWeight, int64_t groupType, int64_t listType,
                            SIM_WS)
{
    sim_exec *e = sim_begin(name, gmm_add);
    e->uncached = true; /* its copy onto itself */
    e->i[0] = listType;
    sim_in(e, x);
    sim_in(e, weight);
    sim_in(e, groupList);
    sim_inout(e, yRef);
    const sim_tensor *tx = &e->t[0], *tw = &e->t[1], *tl = &e->t[2], *ty = &e->t[3];
    (void)transposeX; /* the vendor's host code does not look at it */
    sim_check(e, !transposeWeight && groupType == 2 && (listType == 0 || listType == 1),
              "transposeWeight false, groupType 2, groupListType 0 or 1");
    sim_check(e,
              (tx->dtype == ACL_BF16 || tx->dtype == ACL_FLOAT16) && tw->dtype == tx->dtype && ty->dtype == ACL_FLOAT,
              "dtypes");
    sim_check(e, tx->ndim == 2 && tw->ndim == 2 && tx->dims[0] == tw->dims[0],
              "x and weight must be [tokens,M] and [tokens,N]");
    sim_check(e, tl->ndim == 1 && tl->dtype == ACL_INT64 && tl->dims[0] <= 1024,
              "the group list must be int64, at most 1024");
    sim_check(e, sim_contiguous(tx) && sim_contiguous(tw) && sim_contiguous(ty),
              "x, weight and yRef must be contiguous");
    sim_check(e, sim_numel(tx) > 0 && sim_numel(tw) > 0, "empty tensors are not supported");
    sim_check(e, sim_numel(ty) == tl->dims[0] * tx->dims[1] * tw->dims[1], "yRef must be [E,M,N]");
    sim_check(e, tx->dims[1] < 65536 && tw->dims[1] < 65536, "an inner dimension is 65536 or more");
    return sim_end(e, GMM_WORKSPACE, workspaceSize, executor);
}

aclnnStatus aclnnGroupedMatmulAddGetWorkspaceSize(const aclTensor *x, const aclTensor *weight,
                                                  const aclTensor *groupList, aclTensor *yRef, bool transposeX,
                                                  bool transposeWeight, int64_t groupType, SIM_WS)
{
    return add_into("GroupedMatmulAdd", x, weight, groupList, yRef, transposeX, transposeWeight, groupType, 0,
                    workspaceSize, executor);
}

aclnnStatus aclnnGroupedMatmulAddV2GetWorkspaceSize(const aclTensor *x, const aclTensor *weight,
                                                    const aclTensor *groupList, aclTensor *yRef, bool transposeX,
                                                    bool transposeWeight, int64_t groupType, int64_t listType, SIM_WS)
{
    return add_into("GroupedMatmulAddV2", x, weight, groupList, yRef, transposeX, transposeWeight, groupType, listType,
                    workspaceSize, executor);
}

SIM_PHASE2(GroupedMatmulAdd)
SIM_PHASE2(GroupedMatmulAddV2)

/* ---- Plain products ---- */

static void matmul(sim_exec *e) /* the last two dimensions; a leading one of both is a batch */
{
    const sim_tensor *ta = &e->t[0], *tb = &e->t[1], *tc = &e->t[2];
    const int64_t k = ta->dims[ta->ndim - 1], m = ta->ndim > 1 ? ta->dims[ta->ndim - 2] : 1, n = tb->dims[tb->ndim - 1];
    const float *a = sim_load_float(e, 0), *b = sim_load_float(e, 1);
    const int64_t batch = k && m ? sim_numel(ta) / (m * k) : 0, batch_b = k && n ? sim_numel(tb) / (k * n) : 0;
    float *c = sim_buffer(e, (size_t)sim_numel(tc) * sizeof *c);
    memset(c, 0, (size_t)sim_numel(tc) * sizeof *c);
    for (int64_t i = 0; i < batch; i++)
        sim_sgemm(m, n, k, a + i * m * k, false, b + (batch_b == 1 ? 0 : i) * k * n, false, c + i * m * n);
    sim_store_float(e, 2, c);
}

static aclnnStatus plain(const char *name, const aclTensor *self, const aclTensor *mat2, aclTensor *out, SIM_WS)
{
    sim_exec *e = sim_begin(name, matmul);
    sim_in(e, self);
    sim_in(e, mat2);
    sim_out(e, out);
    const sim_tensor *a = &e->t[0], *b = &e->t[1];
    sim_check(e, a->ndim >= 1 && b->ndim >= 2 && a->dims[a->ndim - 1] == b->dims[b->ndim - 2], "K disagrees");
    sim_check(e, a->dtype == b->dtype && a->dtype == e->t[2].dtype, "dtypes %d, %d, %d", a->dtype, b->dtype,
              e->t[2].dtype);
    return sim_end(e, 0, workspaceSize, executor);
}

aclnnStatus aclnnMmGetWorkspaceSize(const aclTensor *self, const aclTensor *mat2, aclTensor *out, int8_t mode, SIM_WS)
{
    (void)mode;
    return plain("Mm", self, mat2, out, workspaceSize, executor);
}

aclnnStatus aclnnMatmulGetWorkspaceSize(const aclTensor *self, const aclTensor *mat2, aclTensor *out, int8_t mode,
                                        SIM_WS)
{
    (void)mode;
    return plain("Matmul", self, mat2, out, workspaceSize, executor);
}

aclnnStatus aclnnBatchMatMulGetWorkspaceSize(const aclTensor *self, const aclTensor *mat2, aclTensor *out, int8_t mode,
                                             SIM_WS)
{
    (void)mode;
    return plain("BatchMatMul", self, mat2, out, workspaceSize, executor);
}

SIM_PHASE2(Mm)
SIM_PHASE2(Matmul)
SIM_PHASE2(BatchMatMul)
