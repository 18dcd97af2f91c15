/* SPDX-License-Identifier: Apache-2.0
 *
 * gmm.c - the grouped matmul as an operation of its own: rows grouped by sizes on the device, or lists of tensors whose
 * sizes the host knows. GroupedMatmul has no 16-bit product with an f32 result: for one group both operands are cast to
 * f32 (the router), for several the 16-bit result is cast. */
#include "ascend.h"
#include "ops.h"

static asc_groups groups_of(asc_call *c, const fmoe_gmm_args *a)
{
    asc_groups g = {.n = a->w->shape[0], .cumulative = a->cumulative != 0};
    if (g.n > 1) g.list = asc_packed_as(c, asc_of(a->sizes), ACL_INT64);
    return g;
}

static bool is_wide(const asc_view *v, aclDataType dtype) { return v->dtype == ACL_FLOAT && dtype != ACL_FLOAT; }

/* One group in f32: the operands as f32. */
static asc_weights widen(asc_call *c, asc_weights w)
{
    const asc_view turned = asc_turn(w.stack);
    if (asc_is_packed(&w.stack)) w.stack = asc_packed_as(c, w.stack, ACL_FLOAT);
    else w.stack = asc_turn(asc_packed_as(c, turned, ACL_FLOAT));
    return w;
}

static void forward(asc_call *c, const fmoe_gmm_args *a)
{
    const aclDataType dtype = asc_plan_dtype(c->p);
    asc_groups g = groups_of(c, a);
    asc_view x = asc_packed(c, a->x);
    const asc_view y = asc_of(a->y);
    asc_weights w = asc_weights_of(c, "w", a->w, NULL, g.n);
    if (is_wide(&y, dtype) && g.n == 1) {
        x = asc_packed_as(c, x, ACL_FLOAT);
        w = widen(c, w);
    }
    asc_view to = asc_target(c, a->y, x.dtype, false);
    if (to.data != y.data && g.n > 1 && x.dims[0] > 0)
        asc_copy(c, to, y); /* rows past the total are left as they are */
    asc_rows_product(c, x, w, a->bias, &g, to);
    if (x.dims[0] > 0) asc_deliver(c, a->y, to, false);
}

static void backward(asc_call *c, const fmoe_gmm_args *a, uint32_t flags)
{
    const aclDataType dtype = asc_plan_dtype(c->p);
    asc_groups g = groups_of(c, a);
    asc_view dy = asc_of(a->dy);
    const bool wide = is_wide(&dy, dtype) && g.n == 1; /* then everything is done in f32 */
    dy = asc_packed_as(c, dy, wide ? ACL_FLOAT : dtype);
    const bool f32_grads =
        (a->dw && fmoe_tensor_dtype(a->dw) == FMOE_F32) || (a->dbias && fmoe_tensor_dtype(a->dbias) == FMOE_F32);
    if (dtype != ACL_FLOAT && f32_grads && asc_sums_needed(c, &g)) asc_running(c, &g);
    if (a->dx) {
        const size_t mark = c->used;
        const bool add = flags & FMOE_ADD_DX;
        asc_weights w = asc_weights_of(c, "w", a->w, NULL, g.n);
        if (wide) w = widen(c, w);
        const asc_view dx = asc_target(c, a->dx, dy.dtype, add);
        if (g.n > 1) asc_zero(c, dx); /* rows past the total */
        asc_rows_product(c, dy, asc_weights_turn(w), NULL, &g, dx);
        if (dy.dims[0] > 0) asc_deliver(c, a->dx, dx, add);
        asc_release(c, mark);
    }
    if (a->dw) {
        const size_t mark = c->used;
        asc_view x = asc_packed(c, a->x);
        if (wide) x = asc_packed_as(c, x, ACL_FLOAT);
        const asc_weights dw = asc_weights_of(c, "dw", a->dw, NULL, g.n);
        if (dw.stack.dtype == ACL_FLOAT || !wide) {
            asc_outer_product(c, x, dy, &g, dw, flags & FMOE_ACCUMULATE);
        } else { /* f32 dy, 16-bit dw: round it first */
            asc_outer_product(c, asc_packed_as(c, x, dtype), asc_packed_as(c, dy, dtype), &g, dw,
                              flags & FMOE_ACCUMULATE);
        }
        asc_release(c, mark);
    }
    if (a->dbias) {
        const size_t mark = c->used;
        asc_bias_gradient(c,
                          asc_packed_as(c, dy, fmoe_tensor_dtype(a->dbias) == FMOE_F32 && g.n == 1 ? ACL_FLOAT : dtype),
                          &g, a->dbias, flags & FMOE_ACCUMULATE);
        asc_release(c, mark);
    }
}

/* ---- One group with a size ---- */

typedef struct scratch_tensor {
    fmoe_tensor t;
    int64_t shape[3], strides[3];
} scratch_tensor;

static const fmoe_tensor *describe(scratch_tensor *s, asc_view v, const fmoe_tensor *like)
{
    s->t = *like; /* its dtype and device */
    s->t.data = v.data;
    s->t.byte_offset = 0;
    s->t.ndim = v.ndim;
    for (int i = 0; i < v.ndim; i++) s->shape[i] = v.dims[i];
    s->t.shape = s->shape;
    s->t.strides = NULL;
    return &s->t;
}

/* Room for two of a tensor [1,...], the first one copied where it is read. */
static const fmoe_tensor *two_of(asc_call *c, scratch_tensor *s, const fmoe_tensor *one, bool copy)
{
    asc_view v = asc_of(one);
    v.dims[0] = 2;
    const asc_view two = asc_like(c, v);
    if (copy) asc_copy(c, asc_part(two, 0, 0, 1, 1), asc_of(one));
    return describe(s, two, one);
}

static void deliver_first(asc_call *c, const fmoe_tensor *one, const fmoe_tensor *two, bool add)
{
    const asc_view from = asc_part(asc_of(two), 0, 0, 1, 1), to = asc_of(one);
    if (add) asc_add_to(c, to, from);
    else asc_copy(c, to, from);
}

/* GroupedMatmul wants two groups: the second one is empty. */
static void one_group(asc_call *c, fmoe_pass pass, const fmoe_gmm_args *a, uint32_t flags)
{
    scratch_tensor w, bias, sizes, dw, dbias;
    const asc_view ends = asc_new1(c, ACL_INT64, 2);
    asc_copy(c, ends, asc_of(a->sizes)); /* both end where the first does */
    fmoe_gmm_args two = *a;
    two.cumulative = 1;
    two.sizes = describe(&sizes, ends, a->sizes);
    sizes.t.dtype = (fmoe_datatype){0, 64, 1};
    two.w = two_of(c, &w, a->w, true);
    if (a->bias) two.bias = two_of(c, &bias, a->bias, true);
    if (pass == FMOE_FORWARD) {
        forward(c, &two);
        return;
    }
    if (a->dw) two.dw = two_of(c, &dw, a->dw, false);
    if (a->dbias) two.dbias = two_of(c, &dbias, a->dbias, false);
    backward(c, &two, flags & ~(uint32_t)FMOE_ACCUMULATE);
    if (a->dw) deliver_first(c, a->dw, two.dw, flags & FMOE_ACCUMULATE);
    if (a->dbias) deliver_first(c, a->dbias, two.dbias, flags & FMOE_ACCUMULATE);
}

/* ---- Lists ---- */

/* y[i] = x[i] . w[i] for up to 128 members whose x has rows. */
static void list_product(asc_call *c, const asc_view *x, const asc_view *w, const asc_view *bias, const asc_view *y,
                         int64_t n)
{
    if (n == 0) return;
    if (x[0].dtype == ACL_FLOAT) { /* lists of float32 are not in GroupedMatmul */
        for (int64_t i = 0; i < n; i++) {
            asc_mm(c, x[i], w[i], y[i]);
            if (bias) asc_add_to(c, y[i], bias[i]);
        }
        return;
    }
    const aclTensorList *tx = asc_list(c, x, n), *tw = asc_list(c, w, n), *tb = bias ? asc_list(c, bias, n) : NULL,
                        *ty = asc_list(c, y, n);
    if (c->acl->aclnnGroupedMatmulV5)
        ASC_LAUNCH(c, GroupedMatmulV5, tx, tw, tb, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, -1, 1, 0,
                   NULL, ty, NULL, NULL);
    else
        ASC_LAUNCH(c, GroupedMatmulV4, tx, tw, tb, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, -1, 1, 0,
                   ty, NULL, NULL);
}

/* CANN's test for a transposed matrix, which members of one call must agree on. 1x1 always passes for one. */
static bool looks_turned(const asc_view *v) { return v->strides[0] == 1 && v->strides[1] == v->dims[0]; }

/* A packed matrix, or the turned view of one, with regular strides; one row or column as `turned` says, for it is both.
 */
static asc_view regular(asc_call *c, asc_view v, bool turned)
{
    const asc_view back = asc_turn(v);
    const bool plain = asc_is_packed(&v);
    if (!plain && !asc_is_packed(&back)) v = asc_packed_as(c, v, v.dtype);
    else if (!plain || (turned && asc_is_packed(&back)))
        v = asc_turn(asc_shape(back, 2, back.dims[0], back.dims[1], 0));
    else v = asc_shape(v, 2, v.dims[0], v.dims[1], 0);
    return v;
}

static void products(asc_call *c, const fmoe_tensor *x, const fmoe_tensor *w, const fmoe_tensor *bias,
                     const fmoe_tensor *y, bool turn, bool add)
{
    asc_view vx[128], vw[128], vb[128], vy[128];
    const fmoe_tensor *to[128];
    const int64_t E = c->p->d.E;
    const aclDataType dtype = asc_plan_dtype(c->p);
    int64_t at = 0;
    while (at < E && c->status == FMOE_OK) {
        const size_t mark = c->used;
        int64_t n = 0;
        for (; at < E && n < 128; at++) {
            if (x[at].shape[0] == 0) continue;
            const asc_view stored = asc_of(&w[at]);
            const asc_view m = regular(c, turn ? asc_turn(stored) : stored, n > 0 && looks_turned(&vw[0]));
            if (n > 0 && looks_turned(&m) != looks_turned(&vw[0])) break; /* the next call */
            vx[n] = asc_packed_as(c, asc_of(&x[at]), dtype);
            vw[n] = m;
            vy[n] = asc_target(c, &y[at], dtype, add);
            if (bias) vb[n] = asc_packed_as(c, asc_of(&bias[at]), dtype == ACL_BF16 ? ACL_FLOAT : dtype);
            to[n++] = &y[at];
        }
        list_product(c, vx, vw, bias ? vb : NULL, vy, n);
        for (int64_t i = 0; i < n; i++) asc_deliver(c, to[i], vy[i], add);
        asc_release(c, mark);
    }
}

static void list_gradients(asc_call *c, const fmoe_gmm_args *a, bool add)
{
    for (int64_t e = 0; e < c->p->d.E && c->status == FMOE_OK; e++) {
        asc_groups one = {.n = 1};
        const size_t mark = c->used;
        const asc_view dy = asc_packed_as(c, asc_of(&a->dy[e]), asc_plan_dtype(c->p));
        if (a->dw) {
            const asc_weights dw = asc_weights_of(c, "dw", NULL, &a->dw[e], 1);
            asc_outer_product(c, asc_packed(c, &a->x[e]), dy, &one, dw, add);
        }
        if (a->dbias) {
            int64_t shape[2] = {1, a->dbias[e].shape[0]};
            fmoe_tensor row = a->dbias[e];
            row.ndim = 2;
            row.shape = shape;
            row.strides = NULL;
            asc_bias_gradient(c, dy, &one, &row, add);
        }
        asc_release(c, mark);
    }
}

/* Quantised weights are decoded, and the rest is the product with those. */
static void gmm_of_codes(asc_call *c, fmoe_pass pass, const fmoe_gmm_args *a, uint32_t flags)
{
    const fmoe_desc *d = &c->p->d;
    fmoe_gmm_args decoded = *a;
    scratch_tensor w;
    decoded.quant = NULL;
    if (a->list) {
        asc_fail(c, FMOE_ERR_UNSUPPORTED,
                 "Ascend: quant is given and list is 1: quantised weights are taken as a stack (list 0) here");
        return;
    }
    if (pass == FMOE_FORWARD || a->dx) {
        const bool in_out = a->quant->flags & FMOE_QUANT_IN_OUT;
        const asc_view v =
            asc_weights_decoded(c, a->w, NULL, a->quant, d->E, in_out ? d->K : d->N, in_out ? d->N : d->K).stack;
        const asc_view stored = in_out ? v : asc_turn(v);
        decoded.w = describe(&w, stored, a->w);
        for (int i = 0; i < 3; i++) w.strides[i] = stored.strides[i];
        w.t.strides = w.strides;
        w.t.dtype = (fmoe_datatype){d->dtype == FMOE_BF16 ? 4 : 2, d->dtype == FMOE_F32 ? 32 : 16, 1};
    }
    asc_gmm(c, pass, &decoded, flags);
}

void asc_gmm(asc_call *c, fmoe_pass pass, const fmoe_gmm_args *a, uint32_t flags)
{
    if (a->quant) {
        gmm_of_codes(c, pass, a, flags);
        return;
    }
    if (!a->list) {
        if (c->p->d.E == 1 && a->sizes) one_group(c, pass, a, flags);
        else if (pass == FMOE_FORWARD) forward(c, a);
        else backward(c, a, flags);
        return;
    }
    if (pass == FMOE_FORWARD) {
        products(c, a->x, a->w, a->bias, a->y, false, false);
        return;
    }
    if (a->dx) products(c, a->dy, a->w, NULL, a->dx, true, flags & FMOE_ADD_DX);
    if (a->dw || a->dbias) list_gradients(c, a, flags & FMOE_ACCUMULATE);
}
