/* SPDX-License-Identifier: Apache-2.0
 * op_index.c - picking, placing and joining: gather, scatter, index, embedding, cat. */
#include <string.h>

#include "sim.h"

static bool in_range(sim_exec *e, int64_t v, int64_t n)
{
    if (v >= 0 && v < n) return true;
    sim_abort(e, "index %lld of %lld", (long long)v, (long long)n);
    return false;
}

/* ---- Gather, ScatterAdd, InplaceScatter: same rank, index along one dimension, other dimensions equal ---- */

static void gather(sim_exec *e) /* self, index, out */
{
    const sim_around a = sim_split(&e->t[0], e->i[0]), b = sim_split(&e->t[1], e->i[0]);
    const double *v = sim_load(e, 0);
    const int64_t *index = sim_load_int(e, 1);
    double *r = sim_buffer(e, (size_t)(b.outer * b.n * b.inner) * sizeof *r);
    for (int64_t i = 0; i < b.outer * b.n * b.inner; i++) {
        if (!in_range(e, index[i], a.n)) return;
        r[i] = v[(i / (b.n * b.inner) * a.n + index[i]) * a.inner + i % b.inner];
    }
    sim_store(e, 2, r);
}

static void scatter(sim_exec *e) /* self, index, src, out = self or t[3]; i[1]: add */
{
    const sim_around a = sim_split(&e->t[0], e->i[0]), b = sim_split(&e->t[1], e->i[0]);
    double *v = sim_load(e, 0);
    const double *src = sim_load(e, 2);
    const int64_t *index = sim_load_int(e, 1);
    for (int64_t i = 0; i < b.outer * b.n * b.inner; i++) {
        if (!in_range(e, index[i], a.n)) return;
        double *to = &v[(i / (b.n * b.inner) * a.n + index[i]) * a.inner + i % b.inner];
        *to = e->i[1] ? *to + src[i] : src[i];
    }
    sim_store(e, e->nt > 3 ? 3 : 0, v);
}

static void check_index(sim_exec *e, int64_t dim)
{
    const sim_tensor *t = &e->t[0], *x = &e->t[1];
    sim_check(e, x->dtype == ACL_INT64 || x->dtype == ACL_INT32, "index must be an integer");
    sim_check(e, t->ndim == x->ndim, "ranks disagree");
    for (int i = 0; i < t->ndim && !e->status; i++)
        sim_check(e, i == (dim < 0 ? dim + t->ndim : dim) || x->dims[i] == t->dims[i],
                  "only equal dimensions are simulated");
}

aclnnStatus aclnnGatherGetWorkspaceSize(const aclTensor *self, const int64_t dim, const aclTensor *index,
                                        aclTensor *out, SIM_WS)
{
    sim_exec *e = sim_begin("Gather", gather);
    sim_in(e, self);
    sim_in(e, index);
    sim_out(e, out);
    e->i[0] = dim;
    check_index(e, dim);
    sim_check(e, sim_same_shape(&e->t[1], &e->t[2]) && e->t[0].dtype == e->t[2].dtype,
              "out must be like index, of self's dtype");
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(Gather)

aclnnStatus aclnnScatterAddGetWorkspaceSize(const aclTensor *self, int64_t dim, const aclTensor *index,
                                            const aclTensor *src, aclTensor *out, SIM_WS)
{
    sim_exec *e = sim_begin("ScatterAdd", scatter);
    sim_in(e, self);
    sim_in(e, index);
    sim_in(e, src);
    sim_out(e, out);
    e->i[0] = dim;
    e->i[1] = 1;
    check_index(e, dim);
    sim_check(e, sim_same_shape(&e->t[1], &e->t[2]) && sim_same_shape(&e->t[0], &e->t[3]), "shapes disagree");
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(ScatterAdd)

aclnnStatus aclnnInplaceScatterGetWorkspaceSize(aclTensor *self, int64_t dim, const aclTensor *index,
                                                const aclTensor *src, int64_t how, SIM_WS)
{
    sim_exec *e = sim_begin("InplaceScatter", scatter);
    sim_inout(e, self);
    sim_in(e, index);
    sim_in(e, src);
    e->i[0] = dim;
    e->i[1] = how == 1;
    check_index(e, dim);
    sim_check(e, sim_same_shape(&e->t[1], &e->t[2]), "src must be like index");
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(InplaceScatter)

/* ---- Whole rows: IndexSelect, Embedding, Index with one list ---- */

static void select_rows(sim_exec *e) /* self, index, out; i[0] dim */
{
    const sim_around a = sim_split(&e->t[0], e->i[0]);
    const int64_t m = sim_numel(&e->t[1]);
    const double *v = sim_load(e, 0);
    const int64_t *index = sim_load_int(e, 1);
    double *r = sim_buffer(e, (size_t)(a.outer * m * a.inner) * sizeof *r);
    for (int64_t o = 0; o < a.outer; o++)
        for (int64_t i = 0; i < m; i++) {
            const int64_t at = index[i] < 0 && e->i[1] ? index[i] + a.n : index[i];
            if (!in_range(e, at, a.n)) return;
            memcpy(r + (o * m + i) * a.inner, v + (o * a.n + at) * a.inner, (size_t)a.inner * sizeof *r);
        }
    sim_store(e, 2, r);
}

static aclnnStatus rows(const char *name, const aclTensor *self, int64_t dim, const aclTensor *index, aclTensor *out,
                        SIM_WS)
{
    sim_exec *e = sim_begin(name, select_rows);
    sim_in(e, self);
    sim_in(e, index);
    sim_out(e, out);
    e->i[0] = dim;
    const sim_around a = sim_split(&e->t[0], dim);
    sim_check(e, e->t[1].dtype == ACL_INT64 || e->t[1].dtype == ACL_INT32, "index must be an integer");
    sim_check(e, sim_numel(&e->t[2]) == a.outer * sim_numel(&e->t[1]) * a.inner, "out has the wrong size");
    return sim_end(e, 0, workspaceSize, executor);
}

aclnnStatus aclnnIndexSelectGetWorkspaceSize(const aclTensor *self, int64_t dim, const aclTensor *index, aclTensor *out,
                                             SIM_WS)
{
    return rows("IndexSelect", self, dim, index, out, workspaceSize, executor);
}
SIM_PHASE2(IndexSelect)

aclnnStatus aclnnEmbeddingGetWorkspaceSize(const aclTensor *weight, const aclTensor *indices, const aclTensor *out,
                                           SIM_WS)
{
    return rows("Embedding", weight, 0, indices, (aclTensor *)out, workspaceSize, executor);
}
SIM_PHASE2(Embedding)

static void embedding_grad(sim_exec *e) /* grad, indices, out */
{
    const int64_t n = sim_numel(&e->t[1]), h = e->t[2].dims[1], *index = sim_load_int(e, 1);
    const double *g = sim_load(e, 0);
    double *r = sim_buffer(e, (size_t)sim_numel(&e->t[2]) * sizeof *r);
    memset(r, 0, (size_t)sim_numel(&e->t[2]) * sizeof *r);
    for (int64_t i = 0; i < n; i++) {
        if (index[i] == e->i[0]) continue;
        if (!in_range(e, index[i], e->t[2].dims[0])) return;
        for (int64_t c = 0; c < h; c++) r[index[i] * h + c] += g[i * h + c];
    }
    sim_store(e, 2, r);
}

aclnnStatus aclnnEmbeddingDenseBackwardGetWorkspaceSize(const aclTensor *grad, const aclTensor *indices,
                                                        uint64_t weights, uint64_t padding, bool scale, aclTensor *out,
                                                        SIM_WS)
{
    (void)weights, (void)scale;
    sim_exec *e = sim_begin("EmbeddingDenseBackward", embedding_grad);
    sim_in(e, grad);
    sim_in(e, indices);
    sim_out(e, out);
    e->i[0] = (int64_t)padding;
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(EmbeddingDenseBackward)

/* self[:, ..., i0, i1, ...]: neighbouring dimensions, with broadcast index tensors. A dimension that is kept whole
 * comes as an index tensor without elements. */
static void index_many(sim_exec *e) /* self, out, indices... */
{
    const sim_tensor *t = &e->t[0], *out = &e->t[1];
    const int all = e->nt - 2;
    int lead = 0;
    int64_t outer = 1, inner = 1, m = 1, span = 1;
    while (lead < all && sim_numel(&e->t[2 + lead]) == 0) outer *= t->dims[lead++];
    const int n = all - lead;
    for (int i = all; i < t->ndim; i++) inner *= t->dims[i];
    for (int i = lead; i < all; i++) span *= t->dims[i];
    sim_tensor like = *out;
    like.ndim = out->ndim - (t->ndim - n);
    for (int i = 0; i < like.ndim; i++) m *= like.dims[i] = out->dims[lead + i];
    const double *v = sim_load(e, 0), *index[SIM_MAX_DIMS];
    for (int i = 0; i < n; i++) index[i] = sim_load_as(e, 2 + lead + i, &like);
    double *r = sim_buffer(e, (size_t)(outer * m * inner + 1) * sizeof *r);
    for (int64_t j = 0; j < m; j++) {
        int64_t at = 0;
        for (int i = 0; i < n; i++) {
            int64_t x = (int64_t)index[i][j];
            if (x < 0) x += t->dims[lead + i];
            if (!in_range(e, x, t->dims[lead + i])) return;
            at = at * t->dims[lead + i] + x;
        }
        for (int64_t o = 0; o < outer; o++)
            memcpy(r + (o * m + j) * inner, v + (o * span + at) * inner, (size_t)inner * sizeof *r);
    }
    sim_store(e, 1, r);
}

aclnnStatus aclnnIndexGetWorkspaceSize(const aclTensor *self, const aclTensorList *indices, aclTensor *out, SIM_WS)
{
    sim_exec *e = sim_begin("Index", index_many);
    sim_in(e, self);
    sim_out(e, out);
    int n;
    sim_list(e, indices, false, &n);
    for (int i = 0; i < n; i++)
        sim_check(e, e->t[2 + i].dtype == ACL_INT64 || e->t[2 + i].dtype == ACL_INT32 || sim_numel(&e->t[2 + i]) == 0,
                  "only integer indices are simulated");
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(Index)

/* ---- What the experts' loop of transformers 4 needs ---- */

static void one_hot(sim_exec *e) /* self, on, off, out; classes last */
{
    const int64_t n = sim_numel(&e->t[0]), classes = e->i[0], *index = sim_load_int(e, 0);
    const double *on = sim_load(e, 1), *off = sim_load(e, 2);
    double *r = sim_buffer(e, (size_t)(n * classes) * sizeof *r);
    for (int64_t i = 0; i < n; i++) {
        if (!in_range(e, index[i], classes)) return;
        for (int64_t c = 0; c < classes; c++) r[i * classes + c] = c == index[i] ? *on : *off;
    }
    sim_store(e, 3, r);
}

aclnnStatus aclnnOneHotGetWorkspaceSize(const aclTensor *self, int classes, const aclTensor *on, const aclTensor *off,
                                        int64_t axis, aclTensor *out, SIM_WS)
{
    sim_exec *e = sim_begin("OneHot", one_hot);
    sim_in(e, self);
    sim_in(e, on);
    sim_in(e, off);
    sim_out(e, out);
    e->i[0] = classes;
    sim_check(e, axis == -1 || axis == e->t[0].ndim, "only the last axis is simulated");
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(OneHot)

static void nonzero(sim_exec *e) /* self, out [n, ndim]; the descriptor of out learns how many there are */
{
    const sim_tensor *t = &e->t[0];
    const int64_t n = sim_numel(t);
    const double *v = sim_load(e, 0);
    int64_t found = 0, *r = sim_buffer(e, (size_t)(n * t->ndim + 1) * sizeof *r);
    for (int64_t i = 0; i < n; i++) {
        if (v[i] == 0) continue;
        int64_t rest = i;
        for (int d = t->ndim - 1; d >= 0; d--) {
            r[found * t->ndim + d] = rest % t->dims[d];
            rest /= t->dims[d];
        }
        found++;
    }
    e->t[1].dims[0] = found;
    sim_store_int(e, 1, r);
    sim_set_rows((const aclTensor *)(uintptr_t)e->i[0], found);
}

aclnnStatus aclnnNonzeroGetWorkspaceSize(const aclTensor *self, aclTensor *out, SIM_WS)
{
    sim_exec *e = sim_begin("Nonzero", nonzero);
    sim_in(e, self);
    sim_out(e, out);
    e->i[0] = (int64_t)(uintptr_t)out;
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(Nonzero)

static void index_add(sim_exec *e) /* self, index, source, out; i[0] dim, d[0] alpha */
{
    const sim_around a = sim_split(&e->t[0], e->i[0]);
    const int64_t m = sim_numel(&e->t[1]), *index = sim_load_int(e, 1);
    const double *source = sim_load(e, 2);
    double *r = sim_load(e, 0);
    for (int64_t o = 0; o < a.outer; o++)
        for (int64_t i = 0; i < m; i++) {
            if (!in_range(e, index[i], a.n)) return;
            for (int64_t c = 0; c < a.inner; c++)
                r[(o * a.n + index[i]) * a.inner + c] += e->d[0] * source[(o * m + i) * a.inner + c];
        }
    sim_store(e, 3, r);
}

aclnnStatus aclnnIndexAddGetWorkspaceSize(const aclTensor *self, int64_t dim, const aclTensor *index,
                                          const aclTensor *source, const aclScalar *alpha, aclTensor *out, SIM_WS)
{
    sim_exec *e = sim_begin("IndexAdd", index_add);
    sim_in(e, self);
    sim_in(e, index);
    sim_in(e, source);
    sim_out(e, out);
    e->i[0] = dim;
    e->d[0] = sim_scalar(alpha);
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(IndexAdd)

static void repeat(sim_exec *e) /* self, out */
{
    const sim_tensor *t = &e->t[0], *out = &e->t[1];
    const int extra = out->ndim - t->ndim;
    const int64_t n = sim_numel(out);
    const double *v = sim_load(e, 0);
    double *r = sim_buffer(e, (size_t)n * sizeof *r);
    for (int64_t i = 0; i < n; i++) {
        int64_t rest = i, at = 0, step = 1;
        for (int d = out->ndim - 1; d >= extra; d--) {
            at += rest % out->dims[d] % t->dims[d - extra] * step;
            step *= t->dims[d - extra];
            rest /= out->dims[d];
        }
        r[i] = v[at];
    }
    sim_store(e, 1, r);
}

aclnnStatus aclnnRepeatGetWorkspaceSize(const aclTensor *self, const aclIntArray *repeats, aclTensor *out, SIM_WS)
{
    (void)repeats; /* out's shape says it */
    sim_exec *e = sim_begin("Repeat", repeat);
    sim_in(e, self);
    sim_out(e, out);
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(Repeat)

/* ---- Cat ---- */

static void cat(sim_exec *e) /* out is the last; i[0] dim */
{
    const int last = e->nt - 1;
    const sim_around a = sim_split(&e->t[last], e->i[0]);
    double *r = sim_buffer(e, (size_t)(a.outer * a.n * a.inner) * sizeof *r);
    int64_t at = 0;
    for (int i = 0; i < last; i++) {
        if (sim_numel(&e->t[i]) == 0) continue;
        const sim_around b = sim_split(&e->t[i], e->i[0]);
        const double *v = sim_load(e, i);
        for (int64_t o = 0; o < a.outer; o++)
            memcpy(r + (o * a.n + at) * a.inner, v + o * b.n * b.inner, (size_t)(b.n * b.inner) * sizeof *r);
        at += b.n;
    }
    sim_store(e, last, r);
}

aclnnStatus aclnnCatGetWorkspaceSize(const aclTensorList *tensors, int64_t dim, aclTensor *out, SIM_WS)
{
    sim_exec *e = sim_begin("Cat", cat);
    int n;
    sim_list(e, tensors, false, &n);
    sim_out(e, out);
    e->i[0] = dim;
    int64_t total = 0;
    for (int i = 0; i < n; i++) total += sim_numel(&e->t[i]);
    sim_check(e, n > 0 && total == sim_numel(&e->t[n]), "out has the wrong size");
    for (int i = 0; i < n && !e->status; i++) sim_check(e, e->t[i].dtype == e->t[n].dtype, "dtypes disagree");
    return sim_end(e, sim_in_rounds(e, n, total, e->t[n].dtype, 1), workspaceSize, executor);
}
SIM_PHASE2(Cat)

/* ---- ConstantPadNd: before and after each of the last dimensions, innermost first ---- */

static void pad(sim_exec *e) /* in, out; i[0] count, i[1...] the padding */
{
    const sim_tensor *t = &e->t[0], *out = &e->t[1];
    const int64_t n = sim_numel(out);
    const double *v = sim_load(e, 0);
    double *r = sim_buffer(e, (size_t)n * sizeof *r);
    for (int64_t i = 0; i < n; i++) {
        int64_t rest = i, at = 0, step = 1;
        bool inside = true;
        for (int d = out->ndim - 1; d >= 0; d--) {
            const int side = 2 * (out->ndim - 1 - d);
            const int64_t x = rest % out->dims[d] - (side < e->i[0] ? e->i[1 + side] : 0);
            rest /= out->dims[d];
            inside = inside && x >= 0 && x < t->dims[d];
            at += x * step;
            step *= t->dims[d];
        }
        r[i] = inside ? v[at] : e->d[0];
    }
    sim_store(e, 1, r);
}

aclnnStatus aclnnConstantPadNdGetWorkspaceSize(const aclTensor *self, const aclIntArray *padding,
                                               const aclScalar *value, aclTensor *out, SIM_WS)
{
    sim_exec *e = sim_begin("ConstantPadNd", pad);
    sim_in(e, self);
    sim_out(e, out);
    e->i[0] = sim_int_array(padding, &e->i[1], 16);
    e->d[0] = sim_scalar(value);
    sim_check(e, e->i[0] >= 0 && e->i[0] <= 16 && e->t[0].ndim == e->t[1].ndim, "padding");
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(ConstantPadNd)

/* ---- IndexPutImpl: self[i0, i1, ...] = values, or += ---- */

static void index_put(sim_exec *e) /* self, values, indices... */
{
    const sim_tensor *t = &e->t[0];
    const int n = e->nt - 2;
    int64_t inner = 1, m = 1;
    for (int i = n; i < t->ndim; i++) inner *= t->dims[i];
    for (int i = 0; i < n; i++)
        if (sim_numel(&e->t[2 + i]) > m) m = sim_numel(&e->t[2 + i]);
    sim_tensor like = {.present = true, .ndim = 1, .dims = {m * inner}};
    const int64_t have = sim_numel(&e->t[1]);
    double *v = sim_load(e, 0);
    const double *values = have == m * inner ? sim_load(e, 1) : sim_load_as(e, 1, &like);
    const double *index[SIM_MAX_DIMS];
    like.dims[0] = m;
    for (int i = 0; i < n; i++)
        index[i] = sim_numel(&e->t[2 + i]) == m ? sim_load(e, 2 + i) : sim_load_as(e, 2 + i, &like);
    for (int64_t j = 0; j < m; j++) {
        int64_t at = 0;
        for (int i = 0; i < n; i++) {
            int64_t x = (int64_t)index[i][j];
            if (x < 0) x += t->dims[i];
            if (!in_range(e, x, t->dims[i])) return;
            at = at * t->dims[i] + x;
        }
        for (int64_t q = 0; q < inner; q++) {
            double *to = &v[at * inner + q];
            *to = e->i[0] ? *to + values[j * inner + q] : values[j * inner + q];
        }
    }
    sim_store(e, 0, v);
}

aclnnStatus aclnnIndexPutImplGetWorkspaceSize(aclTensor *self, const aclTensorList *indices, const aclTensor *values,
                                              const bool add, const bool unsafe, SIM_WS)
{
    (void)unsafe;
    sim_exec *e = sim_begin("IndexPutImpl", index_put);
    sim_inout(e, self);
    sim_in(e, values);
    int n;
    sim_list(e, indices, false, &n);
    e->i[0] = add;
    for (int i = 0; i < n; i++)
        sim_check(e, e->t[2 + i].dtype == ACL_INT64 || e->t[2 + i].dtype == ACL_INT32,
                  "only integer indices are simulated");
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(IndexPutImpl)

/* ---- SplitTensor ---- */

static void split_tensor(sim_exec *e) /* self, outs...; i[0] dim */
{
    const sim_around a = sim_split(&e->t[0], e->i[0]);
    const double *v = sim_load(e, 0);
    int64_t at = 0;
    for (int i = 1; i < e->nt; i++) {
        const sim_around b = sim_split(&e->t[i], e->i[0]);
        double *r = sim_buffer(e, (size_t)(b.outer * b.n * b.inner) * sizeof *r);
        for (int64_t o = 0; o < b.outer; o++)
            memcpy(r + o * b.n * b.inner, v + (o * a.n + at) * a.inner, (size_t)(b.n * b.inner) * sizeof *r);
        sim_store(e, i, r);
        at += b.n;
    }
}

aclnnStatus aclnnSplitTensorGetWorkspaceSize(const aclTensor *self, uint64_t size, int64_t dim, aclTensorList *out,
                                             SIM_WS)
{
    sim_exec *e = sim_begin("SplitTensor", split_tensor);
    sim_in(e, self);
    int n;
    sim_list(e, out, true, &n);
    e->i[0] = dim;
    int64_t total = 0;
    for (int i = 1; i <= n; i++) {
        total += sim_numel(&e->t[i]);
        sim_check(e, e->t[i].dtype == e->t[0].dtype && (i == n || sim_split(&e->t[i], dim).n == (int64_t)size),
                  "piece %d has another size or dtype", i);
    }
    sim_check(e, total == sim_numel(&e->t[0]), "the pieces are not the whole");
    /* each round is a Slice and a SplitV */
    return sim_end(e, sim_in_rounds(e, n, total, e->t[0].dtype, 2), workspaceSize, executor);
}
SIM_PHASE2(SplitTensor)
