/* SPDX-License-Identifier: Apache-2.0
 *
 * tensors.h - tensors for tests: made on the heap (freed when the test ends), filled, viewed, read and written as
 * double whatever their dtype and layout are. Element i is the i-th in row-major order of the shape, wherever it lies
 * in memory. */
#ifndef FMOE_TENSORS_H
#define FMOE_TENSORS_H

#include <math.h>

#include "test.h"
#include "util.h"

#ifndef TEST_DEVICE
#define TEST_DEVICE FMOE_CPU
#endif

enum { I32 = -32, I64 = -64 }; /* dtypes beside fmoe_dtype, as fmoe_tensor_dtype() has them */

#define SHAPE(...)                                                                                                     \
    (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (const int64_t[]) { __VA_ARGS__ }

static inline int64_t tensor_count(const fmoe_tensor *t)
{
    int64_t n = 1;
    for (int d = 0; d < t->ndim; d++) n *= t->shape[d];
    return n;
}

/* A tensor header over memory that exists; strides may be NULL. */
static inline fmoe_tensor *tensor_over(void *data, int dtype, int ndim, const int64_t *shape, const int64_t *strides)
{
    fmoe_tensor *t = test_alloc(sizeof *t);
    const uint8_t code = dtype < 0 ? 0 : dtype == FMOE_BF16 ? 4 : 2;
    *t = (fmoe_tensor){.data = data, .device = {TEST_DEVICE, 0}, .ndim = ndim};
    t->dtype = (fmoe_datatype){code, (uint8_t)(8 * fmoe_dtype_size(dtype)), 1};
    t->shape = memcpy(test_alloc((size_t)ndim * 8), shape, (size_t)ndim * 8);
    if (strides) t->strides = memcpy(test_alloc((size_t)ndim * 8), strides, (size_t)ndim * 8);
    return t;
}

/* tensor_new(FMOE_F64, SHAPE(T, H)): compact, zero. tensor_strided: as the strides say; gaps are zero. */
static inline fmoe_tensor *tensor_strided(int dtype, int ndim, const int64_t *shape, const int64_t *strides)
{
    fmoe_tensor *t = tensor_over(NULL, dtype, ndim, shape, strides);
    int64_t last = tensor_count(t) ? 1 : 0;
    for (int d = 0; last && d < ndim; d++) last += (shape[d] - 1) * fmoe_stride(t, d);
    t->data = test_alloc((size_t)last * fmoe_dtype_size(dtype));
    return t;
}

static inline fmoe_tensor *tensor_new(int dtype, int ndim, const int64_t *shape)
{
    return tensor_strided(dtype, ndim, shape, NULL);
}

/* Shape [E,rows,cols] stored as [E,cols,rows]; shape [rows,cols] with `gap` unused elements after each row. */
static inline fmoe_tensor *tensor_transposed(int dtype, int64_t E, int64_t rows, int64_t cols)
{
    return tensor_strided(dtype, SHAPE(E, rows, cols), (const int64_t[]){rows * cols, 1, rows});
}

static inline fmoe_tensor *tensor_padded(int dtype, int64_t rows, int64_t cols, int64_t gap)
{
    return tensor_strided(dtype, SHAPE(rows, cols), (const int64_t[]){cols + gap, 1});
}

static inline void *tensor_at(const fmoe_tensor *t, int64_t i)
{
    int64_t at = 0;
    for (int d = t->ndim - 1; d >= 0; d--) {
        at += i % t->shape[d] * fmoe_stride(t, d);
        i /= t->shape[d];
    }
    return (char *)fmoe_data(t) + at * (int64_t)fmoe_dtype_size(fmoe_tensor_dtype(t));
}

static inline double tensor_get(const fmoe_tensor *t, int64_t i)
{
    const void *p = tensor_at(t, i);
    switch (fmoe_tensor_dtype(t)) {
    case FMOE_F64: return *(const double *)p;
    case FMOE_F32: return (double)*(const float *)p;
    case FMOE_BF16: return (double)fmoe_bf16_to_float(*(const uint16_t *)p);
    case FMOE_F16: return (double)fmoe_f16_to_float(*(const uint16_t *)p);
    case I32: return *(const int32_t *)p;
    default: return (double)*(const int64_t *)p;
    }
}

static inline void tensor_set(const fmoe_tensor *t, int64_t i, double v)
{
    void *p = tensor_at(t, i);
    switch (fmoe_tensor_dtype(t)) {
    case FMOE_F64: *(double *)p = v; break;
    case FMOE_F32: *(float *)p = (float)v; break;
    case FMOE_BF16: *(uint16_t *)p = fmoe_float_to_bf16((float)v); break;
    case FMOE_F16: *(uint16_t *)p = fmoe_float_to_f16((float)v); break;
    case I32: *(int32_t *)p = (int32_t)v; break;
    default: *(int64_t *)p = (int64_t)v;
    }
}

/* Fill and return t: a constant, a list in row-major order, uniform in [-scale, scale), or integers in [0, n). */
static inline fmoe_tensor *tensor_fill(fmoe_tensor *t, double v)
{
    for (int64_t i = 0; i < tensor_count(t); i++) tensor_set(t, i, v);
    return t;
}

static inline fmoe_tensor *tensor_list(fmoe_tensor *t, const double *v)
{
    for (int64_t i = 0; i < tensor_count(t); i++) tensor_set(t, i, v[i]);
    return t;
}

static inline fmoe_tensor *tensor_random(fmoe_tensor *t, double scale)
{
    for (int64_t i = 0; i < tensor_count(t); i++) tensor_set(t, i, (2 * test_uniform() - 1) * scale);
    return t;
}

static inline fmoe_tensor *tensor_random_int(fmoe_tensor *t, int64_t n)
{
    for (int64_t i = 0; i < tensor_count(t); i++) tensor_set(t, i, (double)test_below(n));
    return t;
}

#define VALUES(...)                                                                                                    \
    (const double[]) { __VA_ARGS__ }

/* Compact copy in any dtype; this is the conversion to and from double as well. */
static inline fmoe_tensor *tensor_copy(const fmoe_tensor *t, int dtype)
{
    fmoe_tensor *c = tensor_new(dtype, t->ndim, t->shape);
    for (int64_t i = 0; i < tensor_count(t); i++) tensor_set(c, i, tensor_get(t, i));
    return c;
}

/* Views: rows [from, from+n) of dimension d, every `step`-th one; and t[0], t[1], ... as an array of tensors of one
 * rank less (the list form of a stack, in the same memory). */
static inline fmoe_tensor *tensor_view(const fmoe_tensor *t, int d, int64_t from, int64_t n, int64_t step)
{
    int64_t shape[4], strides[4];
    for (int i = 0; i < t->ndim; i++) {
        shape[i] = t->shape[i];
        strides[i] = fmoe_stride(t, i);
    }
    shape[d] = n;
    fmoe_tensor *v = tensor_over(t->data, fmoe_tensor_dtype(t), t->ndim, shape, strides);
    v->strides[d] *= step;
    v->byte_offset = t->byte_offset + (uint64_t)(from * strides[d]) * fmoe_dtype_size(fmoe_tensor_dtype(t));
    return v;
}

static inline fmoe_tensor *tensor_slices(const fmoe_tensor *t)
{
    fmoe_tensor *array = test_alloc((size_t)t->shape[0] * sizeof *array);
    for (int64_t e = 0; e < t->shape[0]; e++) {
        array[e] = *tensor_view(t, 0, e, 1, 1);
        array[e].ndim--;
        array[e].shape++;
        array[e].strides++;
    }
    return array;
}

/* Same values in the same shape, NaN equal to NaN; and the largest |a - b| (Inf when only one is NaN). */
static inline double tensor_distance(const fmoe_tensor *a, const fmoe_tensor *b)
{
    double most = tensor_count(a) == tensor_count(b) ? 0 : INFINITY;
    for (int64_t i = 0; i < tensor_count(a) && most < INFINITY; i++) {
        const double x = tensor_get(a, i), y = tensor_get(b, i);
        const double d = x == y || (isnan(x) && isnan(y)) ? 0 : fabs(x - y);
        if (!(d <= most)) most = isnan(d) ? INFINITY : d;
    }
    return most;
}

static inline int tensor_same(const fmoe_tensor *a, const fmoe_tensor *b) { return tensor_distance(a, b) == 0; }

#define CHECK_SAME(a, b) CHECK(tensor_same(a, b))

/* CHECK_VALUES(t, tolerance, 1, 2, 3): the elements of t in row-major order. */
#define CHECK_VALUES(t, tol, ...) test_check_values(__FILE__, __LINE__, #t, t, tol, SHAPE_OF_VALUES(__VA_ARGS__))
#define SHAPE_OF_VALUES(...) (int64_t)(sizeof(VALUES(__VA_ARGS__)) / sizeof(double)), VALUES(__VA_ARGS__)

static inline void test_check_values(const char *file, int line, const char *name, const fmoe_tensor *t, double tol,
                                     int64_t n, const double *want)
{
    if (n != tensor_count(t)) {
        test_check_eq(file, line, name, "number of values", tensor_count(t), n);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        const double got = tensor_get(t, i);
        if ((isnan(want[i]) && isnan(got)) || got == want[i] || fabs(got - want[i]) <= tol) continue;
        test_failures++;
        printf("  %s:%d: %s[%" PRId64 "] is %.17g, not %.17g\n", file, line, name, i, got, want[i]);
    }
}

#endif
