/* SPDX-License-Identifier: Apache-2.0
 * tensor.c - argument checks: every sentence names the argument and both values. */
#include "tensor.h"

#include <inttypes.h>
#include <stdio.h>

#include "util.h"

#define MAX_DIM ((int64_t)1 << 48)
#define MAX_OUTPUTS 2048 /* sorted on the stack, 16 bytes each; beyond that (lists of > 680 experts) pair by pair */

static const char the_plan[] = "the plan";
static const char *const axis_letter[AXIS_GRID] = {
    "?",        "T",     "R",     "T*k", "H", "I", "h columns", "E", "k", "K", "N", "1", "shared h columns",
    "shared_I", "rank1", "rank2",
};

static const char *letter_of(fmoe_axis_id axis)
{
    static const char *const grid[3] = {"bytes of codes", "rows of groups", "columns of groups"};
    return axis < AXIS_GRID ? axis_letter[axis] : grid[(axis - AXIS_GRID) % 3];
}

fmoe_checker fmoe_checker_begin(const fmoe_plan_impl *plan)
{
    fmoe_checker c = {.plan = plan};
    const fmoe_desc *d = &plan->d;
    for (int i = 0; i < AXIS_COUNT; i++) {
        c.size[i] = -1;
        c.owner[i] = the_plan;
    }
    c.size[AXIS_H] = d->H;
    c.size[AXIS_I] = d->I;
    c.size[AXIS_HC] = plan->h_cols;
    c.size[AXIS_E] = d->E;
    c.size[AXIS_K_SLOTS] = d->k;
    c.size[AXIS_K] = d->K;
    c.size[AXIS_N] = d->N;
    c.size[AXIS_ONE] = 1;
    c.size[AXIS_SHARED_I] = d->shared_I;
    c.size[AXIS_RANK1] = d->rank1;
    c.size[AXIS_RANK2] = d->rank2;
    for (int i = AXIS_GRID; i < AXIS_COUNT; i++) c.owner[i] = "its descriptor";
    c.size[AXIS_SHARED_HC] = plan->gated ? 2 * d->shared_I : d->shared_I;
    return c;
}

static const char *dtype_name(int dtype)
{
    switch (dtype) {
    case FMOE_F32: return "f32";
    case FMOE_BF16: return "bf16";
    case FMOE_F16: return "f16";
    case FMOE_F64: return "f64";
    case -32: return "int32";
    case -64: return "int64";
    case FMOE_BYTE: return "of 8 bits";
    default: return "unknown";
    }
}

static bool dtype_accepted(const fmoe_plan_impl *plan, int types, int dtype)
{
    const int wide = plan->d.dtype == FMOE_F64 ? FMOE_F64 : FMOE_F32;
    return ((types & TYPE_PLAN) && dtype == plan->d.dtype) || ((types & TYPE_WIDE) && dtype == wide) ||
           ((types & TYPE_INT) && dtype < 0) || ((types & TYPE_INT64) && dtype == -64) ||
           ((types & TYPE_BYTE) && dtype == FMOE_BYTE) || ((types & TYPE_F32) && dtype == FMOE_F32) ||
           ((types & TYPE_16BIT) && (dtype == FMOE_BF16 || dtype == FMOE_F16));
}

static fmoe_status wrong_dtype(const fmoe_plan_impl *plan, const char *name, int types, const fmoe_tensor *t)
{
    char want[48] = "";
    if (types & TYPE_PLAN) strcat(want, dtype_name(plan->d.dtype));
    if (types & TYPE_WIDE) {
        const char *wide = plan->d.dtype == FMOE_F64 ? "f64" : "f32";
        if (!strstr(want, wide)) strcat(strcat(want, *want ? " or " : ""), wide);
    }
    if (types & TYPE_INT) strcat(want, "int32 or int64");
    if (types & TYPE_INT64) strcat(want, "int64");
    if (types & TYPE_F32) strcat(want, types & TYPE_16BIT ? "f32, bf16 or f16" : "f32");
    if (types & TYPE_BYTE) strcat(strcat(want, *want ? ", or " : ""), "8 bits");
    return fmoe_fail(FMOE_ERR_DTYPE, "%s has dtype %s (code %d, %d bits), expected %s", name,
                     dtype_name(fmoe_tensor_dtype(t)), t->dtype.code, t->dtype.bits, want);
}

/* Bytes from the first to past the last element; strides are known to be positive where they matter. */
static fmoe_status tensor_span(const char *name, const fmoe_tensor *t, size_t *bytes)
{
    size_t last = 0;
    *bytes = 0;
    for (int i = 0; i < t->ndim; i++) {
        size_t reach;
        if (t->shape[i] == 0) return FMOE_OK;
        if (t->shape[i] == 1) continue;
        if (fmoe_mul_overflow((size_t)(t->shape[i] - 1), (size_t)fmoe_stride(t, i), &reach) ||
            fmoe_add_overflow(last, reach, &last))
            return fmoe_fail(FMOE_ERR_OVERFLOW, "%s: the span of its elements does not fit 64 bits", name);
    }
    if (fmoe_add_overflow(last, 1, &last) || fmoe_mul_overflow(last, fmoe_dtype_size(fmoe_tensor_dtype(t)), bytes) ||
        *bytes > (size_t)INT64_MAX)
        return fmoe_fail(FMOE_ERR_OVERFLOW, "%s: its size in bytes does not fit 63 bits", name);
    return FMOE_OK;
}

static fmoe_status check_strides(const char *name, const fmoe_tensor *t, fmoe_layout layout)
{
    int64_t elements = 1;
    for (int i = 0; i < t->ndim; i++) elements = t->shape[i] == 0 ? 0 : elements;
    if (elements == 0) return FMOE_OK; /* nothing is read or written */
    /* A compact tensor's own strides must not wrap either. */
    if (!t->strides) {
        size_t s = 1;
        for (int i = 0; i < t->ndim; i++)
            if (fmoe_mul_overflow(s, (size_t)t->shape[i], &s) || s > (size_t)INT64_MAX)
                return fmoe_fail(FMOE_ERR_OVERFLOW, "%s: its number of elements does not fit 63 bits", name);
        return FMOE_OK;
    }
    /* No two elements may share memory: going from the smallest stride up, each must clear what lies below it. */
    int order[3] = {0, 1, 2};
    for (int i = 1; i < t->ndim; i++)
        for (int j = i; j > 0 && t->strides[order[j]] < t->strides[order[j - 1]]; j--) {
            const int swap = order[j];
            order[j] = order[j - 1];
            order[j - 1] = swap;
        }
    int64_t extent = 1;
    for (int i = 0; i < t->ndim; i++) {
        const int a = order[i];
        if (t->shape[a] == 1) continue;
        if (t->strides[a] < extent)
            return fmoe_fail(FMOE_ERR_STRIDE, "%s: stride of dimension %d is %" PRId64 ", needs at least %" PRId64,
                             name, a, t->strides[a], extent);
        if (__builtin_mul_overflow(t->strides[a], t->shape[a], &extent))
            return fmoe_fail(FMOE_ERR_OVERFLOW, "%s: stride %" PRId64 " times size %" PRId64 " does not fit 64 bits",
                             name, t->strides[a], t->shape[a]);
    }
    const int last = t->ndim - 1;
    const bool unit_last = t->shape[last] == 1 || t->strides[last] == 1;
    if (layout == LAYOUT_MATRIX) {
        const bool unit_row = t->shape[last - 1] == 1 || t->strides[last - 1] == 1;
        if (!unit_last && !unit_row)
            return fmoe_fail(FMOE_ERR_STRIDE,
                             "%s: its last two strides are %" PRId64 " and %" PRId64 ", one of them must be 1", name,
                             t->strides[last - 1], t->strides[last]);
        return FMOE_OK;
    }
    if (!unit_last)
        return fmoe_fail(FMOE_ERR_STRIDE, "%s: its last stride is %" PRId64 ", must be 1", name, t->strides[last]);
    if (layout == LAYOUT_COMPACT) {
        int64_t want = 1;
        for (int i = last; i >= 0; i--) {
            if (t->shape[i] != 1 && t->strides[i] != want)
                return fmoe_fail(FMOE_ERR_STRIDE,
                                 "%s: stride of dimension %d is %" PRId64 ", must be %" PRId64 " (compact)", name, i,
                                 t->strides[i], want);
            want *= t->shape[i];
        }
    }
    return FMOE_OK;
}

static fmoe_status check_axis(fmoe_checker *c, fmoe_axis_id axis, const char *name, int dim, int64_t size)
{
    if (axis == AXIS_TK && c->size[AXIS_TK] < 0 && c->size[AXIS_T] >= 0) {
        if (__builtin_mul_overflow(c->size[AXIS_T], c->plan->d.k, &c->size[AXIS_TK]))
            return fmoe_fail(FMOE_ERR_OVERFLOW, "T*k = %" PRId64 " * %" PRId64 " does not fit 64 bits", c->size[AXIS_T],
                             c->plan->d.k);
        c->owner[AXIS_TK] = c->owner[AXIS_T];
    }
    if (c->size[axis] < 0) {
        c->size[axis] = size;
        c->owner[axis] = name;
        return FMOE_OK;
    }
    if (size == c->size[axis]) return FMOE_OK;
    return fmoe_fail(c->owner[axis] == the_plan ? FMOE_ERR_PLAN : FMOE_ERR_SHAPE,
                     "%s has %s = %" PRId64 " (dimension %d), %s has %" PRId64, name, letter_of(axis), size, dim,
                     c->owner[axis], c->size[axis]);
}

fmoe_status fmoe_check_tensor(fmoe_checker *c, const fmoe_arg *arg, int64_t index)
{
    const fmoe_tensor *t = arg->t + index;
    char indexed[64];
    const char *name = arg->name;
    if (arg->list) {
        snprintf(indexed, sizeof indexed, "%s[%" PRId64 "]", arg->name, index);
        name = indexed;
    }
    int ndim = 0;
    while (ndim < 3 && arg->axes[ndim] != AXIS_NONE) ndim++;
    if (t->ndim != ndim)
        return fmoe_fail(FMOE_ERR_SHAPE, "%s has %d dimensions, expected %d", name, (int)t->ndim, ndim);
    if (!t->shape) return fmoe_fail(FMOE_ERR_NULL, "%s: its shape is NULL", name);
    if (t->device.type != c->plan->d.device.type || t->device.id != c->plan->d.device.id)
        return fmoe_fail(FMOE_ERR_DEVICE, "%s is on device type %d id %d, the plan on type %d id %d", name,
                         t->device.type, t->device.id, c->plan->d.device.type, c->plan->d.device.id);
    if (!dtype_accepted(c->plan, arg->types, fmoe_tensor_dtype(t))) return wrong_dtype(c->plan, name, arg->types, t);
    int64_t elements = 1;
    for (int i = 0; i < ndim; i++) {
        if (t->shape[i] < 0 || t->shape[i] > MAX_DIM)
            return fmoe_fail(FMOE_ERR_SHAPE, "%s: dimension %d is %" PRId64 ", must be between 0 and 2^48", name, i,
                             t->shape[i]);
        if (t->shape[i] == 0) elements = 0;
    }
    for (int i = 0; i < ndim; i++)
        FMOE_TRY(check_axis(c, arg->axes[i], name == indexed ? arg->name : name, i, t->shape[i]));
    FMOE_TRY(check_strides(name, t, arg->layout));
    size_t bytes;
    FMOE_TRY(tensor_span(name, t, &bytes));
    if (elements == 0) return FMOE_OK;
    if (!t->data) return fmoe_fail(FMOE_ERR_NULL, "%s: its data is NULL", name);
    const size_t element = fmoe_dtype_size(fmoe_tensor_dtype(t));
    if ((uintptr_t)fmoe_data(t) % element)
        return fmoe_fail(FMOE_ERR_ALIGN, "%s: data at %p is not aligned to its element size, %zu", name, fmoe_data(t),
                         element);
    return FMOE_OK;
}

/* ---- overlap ---- */

typedef struct range {
    uintptr_t begin, end;
} range;

/* What is said to reach past the end of memory reaches to it. */
static range range_of(const void *data, size_t bytes)
{
    const uintptr_t begin = (uintptr_t)data;
    return (range){begin, bytes < UINTPTR_MAX - begin ? begin + bytes : UINTPTR_MAX};
}

static range arg_range(const fmoe_arg *arg, int64_t i)
{
    size_t bytes = 0;
    tensor_span(arg->name, arg->t + i, &bytes); /* checked before: cannot fail */
    return range_of(fmoe_data(arg->t + i), bytes);
}

static range span_range(const fmoe_span *s) { return range_of(s->data, s->data ? s->bytes : 0); }

static bool begins_before(const void *ranges, int64_t i, int64_t j)
{
    const range *r = ranges;
    return r[i].begin < r[j].begin;
}

static void swap_ranges(void *ranges, int64_t i, int64_t j)
{
    range *r = ranges;
    const range swap = r[i];
    r[i] = r[j];
    r[j] = swap;
}

static bool hits(const range *sorted, int64_t n, range x)
{
    if (x.begin == x.end) return false;
    int64_t lo = 0, hi = n; /* first range that ends after x begins; sorted ranges do not overlap one another */
    while (lo < hi) {
        const int64_t mid = lo + (hi - lo) / 2;
        if (sorted[mid].end > x.begin) hi = mid;
        else lo = mid + 1;
    }
    return lo < n && sorted[lo].begin < x.end;
}

static bool is_output(const fmoe_arg *a) { return (a->role & ARG_OUT) != 0; }

/* Name a pair that overlaps: slow, only after an overlap was found or when there are too many outputs to sort. */
static fmoe_status find_overlap(const fmoe_arg *args, int n, const fmoe_span *spans, int n_spans)
{
    for (int i = 0; i < n + n_spans; i++) {
        if (i < n && (!args[i].t || !is_output(&args[i]))) continue;
        const int64_t count_i = i < n ? fmoe_max(args[i].list, 1) : 1;
        for (int64_t a = 0; a < count_i; a++) {
            const range x = i < n ? arg_range(&args[i], a) : span_range(&spans[i - n]);
            if (x.begin == x.end) continue;
            for (int j = 0; j < n + n_spans; j++) {
                if (j < n && !args[j].t) continue;
                const int64_t count_j = j < n ? fmoe_max(args[j].list, 1) : 1;
                for (int64_t b = 0; b < count_j; b++) {
                    if (i == j && a == b) continue;
                    const range y = j < n ? arg_range(&args[j], b) : span_range(&spans[j - n]);
                    if (y.begin < y.end && x.begin < y.end && y.begin < x.end)
                        return fmoe_fail(FMOE_ERR_ALIAS, "output %s (at %p, %zu bytes) overlaps %s (at %p, %zu bytes)",
                                         i < n ? args[i].name : spans[i - n].name, (void *)x.begin,
                                         (size_t)(x.end - x.begin), j < n ? args[j].name : spans[j - n].name,
                                         (void *)y.begin, (size_t)(y.end - y.begin));
                }
            }
        }
    }
    return FMOE_OK;
}

fmoe_status fmoe_check_overlap(const fmoe_arg *args, int n, const fmoe_span *spans, int n_spans)
{
    range out[MAX_OUTPUTS];
    int64_t n_out = 0;
    for (int i = 0; i < n_spans; i++) {
        const range r = span_range(&spans[i]);
        if (r.begin < r.end) out[n_out++] = r;
    }
    for (int i = 0; i < n; i++) {
        if (!args[i].t || !is_output(&args[i])) continue;
        const int64_t count = fmoe_max(args[i].list, 1);
        if (n_out + count > MAX_OUTPUTS) return find_overlap(args, n, spans, n_spans);
        for (int64_t a = 0; a < count; a++) {
            const range r = arg_range(&args[i], a);
            if (r.begin < r.end) out[n_out++] = r;
        }
    }
    fmoe_sort(out, n_out, begins_before, swap_ranges);
    for (int64_t i = 1; i < n_out; i++)
        if (out[i].begin < out[i - 1].end) return find_overlap(args, n, spans, n_spans);
    for (int i = 0; i < n; i++) {
        if (!args[i].t || is_output(&args[i])) continue;
        for (int64_t a = 0; a < fmoe_max(args[i].list, 1); a++)
            if (hits(out, n_out, arg_range(&args[i], a))) return find_overlap(args, n, spans, n_spans);
    }
    return FMOE_OK;
}

fmoe_status fmoe_check_args(fmoe_checker *c, const fmoe_arg *args, int n, const fmoe_span *spans, int n_spans)
{
    for (int i = 0; i < n; i++) {
        if (!args[i].t) {
            if (args[i].role & ARG_OPTIONAL) continue;
            return fmoe_fail(FMOE_ERR_NULL, "%s is NULL", args[i].name);
        }
        for (int64_t a = 0; a < fmoe_max(args[i].list, 1); a++) FMOE_TRY(fmoe_check_tensor(c, &args[i], a));
    }
    return fmoe_check_overlap(args, n, spans, n_spans);
}
