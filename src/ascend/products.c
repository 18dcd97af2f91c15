/* SPDX-License-Identifier: Apache-2.0
 *
 * products.c - grouped matrix products. Only views are turned, never data:
 *   forward     weights stored [out,in] are passed as a transposed view, which GroupedMatmul reads in place
 *   dX          the same weights as they are stored
 *   dW          GroupedMatmul over the grouped rows (group type 2) takes its left operand as a transposed view and
 * writes [n,a,b]; which operand is left is chosen so that this is the stored layout GroupedMatmul takes lists of at
 * most 128 matrices. Longer ones go in pieces, from the last to the first: a piece's group list begins with the running
 * sum before it, so its first group is all earlier rows, which it fills with nonsense and which the pieces that follow
 * overwrite. */
#include "ops.h"

/* Scratch for weight gradients that cannot be written where they belong at once: this many bytes, or an eighth of them.
 */
enum { SCRATCH = 16 << 20, PIECES = 8 };

/* Cat and SplitTensor of more members are done in rounds on 910B, with a copy of the whole besides. */
enum { MEMBERS = 32 };

/* ---- Weights ---- */

/* Packed as [.., a, b], or the turned view of a packed [.., b, a]. Strides of length-1 dimensions are made regular. */
static bool regular(asc_view *v)
{
    asc_view turned = asc_turn(*v);
    if (asc_is_packed(v)) {
        *v = asc_shape(*v, v->ndim, v->dims[0], v->dims[1], v->dims[2]);
        return true;
    }
    if (!asc_is_packed(&turned)) return false;
    *v = asc_turn(asc_shape(turned, v->ndim, turned.dims[0], turned.dims[1], turned.dims[2]));
    return true;
}

static bool is_turned(const asc_view *v) { return !asc_is_packed(v); }

/* Matrices that follow one another in memory are a stack. */
static bool adjacent(const asc_view *first, const fmoe_tensor *list, int64_t n)
{
    const size_t bytes = (size_t)asc_count(first) * asc_size(first->dtype);
    for (int64_t i = 1; i < n; i++) {
        const asc_view v = asc_of(&list[i]);
        if ((char *)v.data != (char *)first->data + (size_t)i * bytes || v.strides[0] != first->strides[0] ||
            v.strides[1] != first->strides[1])
            return false;
    }
    return true;
}

asc_weights asc_weights_of(asc_call *c, const char *name, const fmoe_tensor *stack, const fmoe_tensor *list, int64_t n)
{
    asc_weights w = {.n = n};
    if (stack) {
        w.stack = asc_of(stack);
        if (!regular(&w.stack))
            asc_fail(c, FMOE_ERR_STRIDE,
                     "%s has strides {%lld,%lld,%lld}: packed matrices, in either orientation, are needed", name,
                     (long long)w.stack.strides[0], (long long)w.stack.strides[1], (long long)w.stack.strides[2]);
        return w;
    }
    asc_view first = asc_of(&list[0]);
    if (regular(&first) && adjacent(&first, list, n)) {
        const int64_t a = first.dims[0], b = first.dims[1];
        w.stack = is_turned(&first) ? asc_turn(asc_3d(first.data, first.dtype, n, b, a))
                                    : asc_3d(first.data, first.dtype, n, a, b);
        return w;
    }
    w.list = list;
    for (int64_t i = 0; i < n; i++) {
        asc_view v = asc_of(&list[i]);
        if (!regular(&v) || is_turned(&v) != is_turned(&first)) {
            asc_fail(c, FMOE_ERR_STRIDE,
                     "%s[%lld] has strides {%lld,%lld}: packed matrices, all in one orientation, are needed", name,
                     (long long)i, (long long)v.strides[0], (long long)v.strides[1]);
            break;
        }
    }
    return w;
}

asc_weights asc_weights_turn(asc_weights w)
{
    if (w.list) w.turned = !w.turned;
    else w.stack = asc_turn(w.stack);
    return w;
}

static asc_view member(const asc_weights *w, int64_t i)
{
    if (!w->list) return asc_at(w->stack, i);
    asc_view v = asc_of(&w->list[i]);
    regular(&v);
    return w->turned ? asc_turn(v) : v;
}

/* float32 lists: GroupedMatmul takes float32 only in one tensor. */
static asc_weights gather_list(asc_call *c, const asc_weights *w)
{
    asc_view some[MEMBERS];
    asc_view first = member(w, 0);
    const bool turned = is_turned(&first);
    if (turned) first = asc_turn(first);
    const asc_view stack = asc_new3(c, first.dtype, w->n, first.dims[0], first.dims[1]);
    for (int64_t at = 0; at < w->n; at += MEMBERS) {
        const int64_t n = fmoe_min(MEMBERS, w->n - at);
        for (int64_t i = 0; i < n; i++) {
            some[i] = member(w, at + i);
            if (turned) some[i] = asc_turn(some[i]);
        }
        const asc_view to = asc_part(stack, 0, at, 1, n);
        const aclTensorList *from = asc_list(c, some, n);
        const aclTensor *out = asc_t(c, asc_shape(to, 2, n * first.dims[0], first.dims[1], 0));
        ASC_LAUNCH(c, Cat, from, 0, out);
    }
    return (asc_weights){.n = w->n, .stack = turned ? asc_turn(stack) : stack};
}

/* ---- Launches ---- */

static void grouped(asc_call *c, const aclTensorList *x, const aclTensorList *w, const aclTensorList *bias,
                    const aclTensor *groups, int64_t split, int64_t type, bool cumulative, const aclTensorList *y)
{
    const int64_t kind = cumulative ? 0 : 1;
    if (c->acl->aclnnGroupedMatmulV5)
        ASC_LAUNCH(c, GroupedMatmulV5, x, w, bias, NULL, NULL, NULL, NULL, NULL, groups, NULL, NULL, NULL, split, type,
                   kind, 0, NULL, y, NULL, NULL);
    else
        ASC_LAUNCH(c, GroupedMatmulV4, x, w, bias, NULL, NULL, NULL, NULL, NULL, groups, NULL, NULL, NULL, split, type,
                   kind, 0, y, NULL, NULL);
}

void asc_mm(asc_call *c, asc_view a, asc_view b, asc_view out)
{
    const aclTensor *ta = asc_t(c, a), *tb = asc_t(c, b), *to = asc_t(c, out);
    ASC_LAUNCH(c, Mm, ta, tb, to, 0); /* 0: keep the dtype, no HF32 */
}

asc_view asc_running(asc_call *c, asc_groups *g)
{
    if (g->cumulative) return g->list;
    if (!g->running.data) { /* summed in int32: in int64 it would run on the AI CPU */
        g->running = asc_new1(c, ACL_INT64, g->n);
        const size_t mark = c->used;
        const asc_view counts = asc_packed_as(c, g->list, ACL_INT32), sums = asc_new1(c, ACL_INT32, g->n);
        const aclTensor *from = asc_t(c, counts), *to = asc_t(c, sums);
        ASC_LAUNCH(c, Cumsum, from, 0, ACL_INT32, to);
        asc_cast(c, g->running, sums);
        asc_release(c, mark);
    }
    return g->running;
}

/* GroupedMatmulAdd takes running sums, its V2 counts as well. */
bool asc_sums_needed(const asc_call *c, const asc_groups *g)
{
    return g->n > 1 && !g->cumulative && !c->acl->aclnnGroupedMatmulAddV2 && c->acl->aclnnGroupedMatmulAdd;
}

/* Bias as GroupedMatmul wants it: f32 beside bf16, else the plan's dtype. */
static asc_view bias_view(asc_call *c, const fmoe_tensor *bias, aclDataType dtype)
{
    return asc_packed_as(c, asc_of(bias), dtype == ACL_BF16 ? ACL_FLOAT : dtype);
}

static void list_product(asc_call *c, asc_view x, const asc_weights *w, const asc_view *bias, asc_groups *g, asc_view y)
{
    asc_view some[128], biases[128];
    const asc_view running = w->n > 128 ? asc_running(c, g) : g->list;
    /* The first piece holds 128 matrices, the others 127 and one that stands for all earlier rows. */
    int64_t end = w->n;
    while (end > 0) {
        const int64_t first = end <= 128 ? 0 : 128 + (end - 128 - 1) / 127 * 127, lead = first > 0;
        const int64_t n = end - first + lead;
        for (int64_t i = 0; i < n; i++) {
            const int64_t e = first + (i > lead ? i - lead : 0);
            some[i] = member(w, e);
            if (bias) biases[i] = asc_at(*bias, e);
        }
        const aclTensorList *tx = asc_list(c, &x, 1), *tw = asc_list(c, some, n),
                            *tb = bias ? asc_list(c, biases, n) : NULL;
        const aclTensor *groups = asc_t(c, asc_part(w->n > 128 ? running : g->list, 0, first - lead, 1, n));
        const aclTensorList *ty = asc_list(c, &y, 1);
        grouped(c, tx, tw, tb, groups, 2, 0, w->n > 128 || g->cumulative, ty);
        end = first;
    }
}

void asc_rows_product(asc_call *c, asc_view x, asc_weights w, const fmoe_tensor *bias, asc_groups *g, asc_view y)
{
    const size_t mark = c->used;
    if (x.dims[0] == 0 || c->status != FMOE_OK) return;
    if (g->n == 1) { /* GroupedMatmul wants two groups or more */
        asc_mm(c, x, member(&w, 0), y);
        if (bias) asc_add_to(c, y, asc_packed_as(c, asc_of(bias), y.dtype)); /* [1,N] */
        asc_release(c, mark);
        return;
    }
    asc_view b = {.data = NULL};
    if (bias) b = bias_view(c, bias, x.dtype);
    if (w.list && w.n > 128) asc_running(c, g); /* before anything that is released here */
    const size_t kept = g->running.data ? c->used : mark;
    if (w.list && x.dtype == ACL_FLOAT) w = gather_list(c, &w);
    if (w.list) {
        list_product(c, x, &w, bias ? &b : NULL, g, y);
    } else {
        const aclTensorList *tx = asc_list(c, &x, 1), *tw = asc_list(c, &w.stack, 1),
                            *tb = bias ? asc_list(c, &b, 1) : NULL;
        const aclTensor *groups = asc_t(c, g->list);
        const aclTensorList *ty = asc_list(c, &y, 1);
        grouped(c, tx, tw, tb, groups, 2, 0, g->cumulative, ty);
    }
    asc_release(c, kept);
}

/* ---- Weight gradients ---- */

/* out [n,a,b] packed = left^T . right by groups, in the dtype of the operands. */
static void outer(asc_call *c, asc_view left, asc_view right, const asc_groups *g, asc_view out)
{
    if (g->n == 1) {
        asc_mm(c, asc_turn(left), right, asc_at(out, 0));
        return;
    }
    asc_view turned = asc_turn(left);
    if (turned.dims[1] == 1) turned.strides[1] = turned.dims[0]; /* one row: CANN tells a transposed view by this */
    const aclTensorList *tx = asc_list(c, &turned, 1), *tw = asc_list(c, &right, 1);
    const aclTensor *groups = asc_t(c, g->list);
    const aclTensorList *ty = asc_list(c, &out, 1);
    grouped(c, tx, tw, NULL, groups, 3, 2, g->cumulative, ty);
}

/* f32 += 16-bit^T . 16-bit */
static void outer_add(asc_call *c, asc_view left, asc_view right, asc_groups *g, asc_view out)
{
    const asc_view list = asc_sums_needed(c, g) ? asc_running(c, g) : g->list;
    const aclTensor *tx = asc_t(c, left), *tw = asc_t(c, right), *groups = asc_t(c, list), *ty = asc_t(c, out);
    if (c->acl->aclnnGroupedMatmulAddV2)
        ASC_LAUNCH(c, GroupedMatmulAddV2, tx, tw, groups, ty, true, false, 2, g->cumulative ? 0 : 1);
    else ASC_LAUNCH(c, GroupedMatmulAdd, tx, tw, groups, ty, true, false, 2);
}

/* Rows [at, at+n) of every gradient in the list from a stack of such pieces: one launch for 32 of them where CANN can.
 */
static void deliver_list(asc_call *c, asc_view stack, const asc_weights *dw, int64_t at, bool add)
{
    asc_view to[MEMBERS];
    const int64_t rows = stack.dims[1];
    for (int64_t first = 0; first < dw->n && c->status == FMOE_OK; first += MEMBERS) {
        const int64_t n = fmoe_min(MEMBERS, dw->n - first);
        for (int64_t i = 0; i < n; i++) to[i] = asc_part(member(dw, first + i), 0, at, 1, rows);
        const asc_view from = asc_part(stack, 0, first, 1, n);
        if (!add && to[0].dtype == stack.dtype && c->acl->aclnnSplitTensor) {
            const aclTensor *src = asc_t(c, asc_shape(from, 2, n * rows, stack.dims[2], 0));
            const aclTensorList *dst = asc_list(c, to, n);
            ASC_LAUNCH(c, SplitTensor, src, (uint64_t)rows, 0, dst);
            continue;
        }
        for (int64_t i = 0; i < n; i++) {
            if (add) asc_add_to(c, to[i], asc_at(from, i));
            else asc_copy(c, to[i], asc_at(from, i));
        }
    }
}

/* Through scratch, a block of rows of every gradient at a time, so that the scratch stays small: gradients of the
 * plan's own dtype that are added to (CANN adds into f32 only), and lists whose matrices are not adjacent. */
static void outer_in_blocks(asc_call *c, asc_view left, asc_view right, asc_groups *g, const asc_weights *dw, bool wide,
                            bool add)
{
    const int64_t a = left.dims[1], b = right.dims[1];
    const aclDataType dtype = wide ? ACL_FLOAT : left.dtype;
    int64_t block = SCRATCH / (dw->n * b * (int64_t)asc_size(dtype));
    block = fmoe_max(block, fmoe_ceil_div(a, PIECES));
    block = block >= a ? a : fmoe_max(block / 16 * 16, 1);
    for (int64_t at = 0; at < a && c->status == FMOE_OK; at += block) {
        const int64_t rows = fmoe_min(block, a - at);
        const size_t mark = c->used;
        const asc_view part = rows == a ? left : asc_packed_as(c, asc_part(left, 1, at, 1, rows), left.dtype);
        const asc_view stack = asc_new3(c, dtype, dw->n, rows, b);
        if (wide) {
            asc_zero(c, stack);
            outer_add(c, part, right, g, stack);
        } else {
            outer(c, part, right, g, stack);
        }
        if (dw->list) deliver_list(c, stack, dw, at, add);
        else if (add) asc_add_to(c, asc_part(dw->stack, 1, at, 1, rows), stack);
        else asc_copy(c, asc_part(dw->stack, 1, at, 1, rows), stack);
        asc_release(c, mark);
    }
}

void asc_outer_product(asc_call *c, asc_view left, asc_view right, asc_groups *g, asc_weights dw, bool add)
{
    if (c->status != FMOE_OK) return;
    /* The stored layout: where dw is the turned view of a packed [n,b,a], compute that. */
    const asc_view first = dw.list ? member(&dw, 0) : dw.stack;
    if (is_turned(&first)) {
        const asc_view swap = left;
        left = right;
        right = swap;
        dw = asc_weights_turn(dw);
    }
    const aclDataType dtype = left.dtype;
    const bool wide = first.dtype == ACL_FLOAT && dtype != ACL_FLOAT;
    if (left.dims[0] == 0) { /* nothing to add, or nothing but zeros */
        if (!add)
            for (int64_t i = 0; i < (dw.list ? dw.n : 1); i++) asc_zero(c, dw.list ? member(&dw, i) : dw.stack);
        return;
    }
    if (g->n == 1 && wide) { /* one matrix in f32: multiply in f32 */
        const size_t mark = c->used;
        left = asc_packed_as(c, left, ACL_FLOAT);
        right = asc_packed_as(c, right, ACL_FLOAT);
        asc_outer_product(c, left, right, g, dw, add);
        asc_release(c, mark);
        return;
    }
    const bool into_f32 = wide && (c->acl->aclnnGroupedMatmulAddV2 || c->acl->aclnnGroupedMatmulAdd);
    if (into_f32 && asc_sums_needed(c, g)) asc_running(c, g); /* before anything that is released here */
    if (!dw.list && !wide && !add) {
        outer(c, left, right, g, dw.stack);
    } else if (!dw.list && into_f32) {
        if (!add) asc_zero(c, dw.stack);
        outer_add(c, left, right, g, dw.stack);
    } else {
        outer_in_blocks(c, left, right, g, &dw, into_f32, add);
    }
}

asc_view asc_ones(asc_call *c, int64_t rows, aclDataType dtype)
{
    const asc_view ones = asc_new2(c, dtype, rows, 1);
    if (rows == 0) return ones;
    const aclTensor *to = asc_t(c, ones);
    const aclScalar *one = asc_s(c, 1);
    ASC_LAUNCH(c, InplaceFillScalar, to, one);
    return ones;
}

/* Sums of rows as a product with a column of ones: f32 inside the cube. */
void asc_bias_gradient(asc_call *c, asc_view d, asc_groups *g, const fmoe_tensor *db, bool add)
{
    const asc_view v = asc_of(db);
    const int64_t R = d.dims[0], n = v.dims[0], N = v.dims[1];
    if (!asc_is_packed(&v)) {
        asc_fail(c, FMOE_ERR_STRIDE, "the gradient of a bias must be packed");
        return;
    }
    if (v.dtype == ACL_FLOAT && d.dtype != ACL_FLOAT && R > 0 && asc_sums_needed(c, g)) asc_running(c, g);
    const size_t mark = c->used;
    const asc_view ones = g->ones.data && g->ones.dtype == d.dtype ? g->ones : asc_ones(c, R, d.dtype);
    asc_outer_product(c, ones, d, g, (asc_weights){.n = n, .stack = asc_3d(v.data, v.dtype, n, 1, N)}, add);
    asc_release(c, mark);
}
