/* SPDX-License-Identifier: Apache-2.0
 *
 * ref.h - what the files of the reference share: how it reads a tensor, and the two things more than one operation
 * needs (sorting the slots by expert, the activation of one row).
 *
 * A tensor is read through a matrix (base and two strides) or a vector (one row of it). Whatever the layout is,
 * transposed weights, padded rows, one tensor an expert, the formulas in ref*.c see W(row, col) and nothing else.
 */
#ifndef FMOE_REF_H
#define FMOE_REF_H

#include <inttypes.h>
#include <math.h>

#include "backend.h"
#include "util.h"

typedef struct ref_vec {
    void *p;
    int64_t stride;
    int dtype; /* FMOE_F64, or FMOE_F32 where the contract lets the caller choose (p, logits, gradients of weights) */
    const fmoe_quant *quant; /* p points to a row of codes, row n of expert e; NULL: to numbers */
    int64_t e, n, N;
    bool list;
} ref_vec;

/* ref_quant.c: the weight that code k of such a row stands for. */
double fmoe_ref_weight(const ref_vec *codes, int64_t k);

typedef struct ref_mat {
    void *p;
    int64_t s0, s1;
    int dtype;
} ref_mat;

static inline double ref_sigmoid(double x) { return 1 / (1 + exp(-x)); }

static inline void *ref_at(void *p, int dtype, int64_t i) { return (char *)p + i * (int64_t)fmoe_dtype_size(dtype); }

static inline double ref_get(ref_vec v, int64_t i)
{
    if (v.quant) return fmoe_ref_weight(&v, i);
    return v.dtype == FMOE_F32 ? (double)((const float *)v.p)[i * v.stride] : ((const double *)v.p)[i * v.stride];
}

static inline void ref_set(ref_vec v, int64_t i, double x)
{
    if (v.dtype == FMOE_F32) ((float *)v.p)[i * v.stride] = (float)x;
    else ((double *)v.p)[i * v.stride] = x;
}

static inline ref_vec ref_row(ref_mat m, int64_t i)
{
    return (ref_vec){.p = ref_at(m.p, m.dtype, i * m.s0), .stride = m.s1, .dtype = m.dtype};
}
static inline ref_vec ref_buffer(double *p) { return (ref_vec){.p = p, .stride = 1, .dtype = FMOE_F64}; }

/* A tensor of rank 1 or 2, and matrix e of a stack [E,.,.]. */
static inline ref_vec ref_vector(const fmoe_tensor *t)
{
    return (ref_vec){.p = fmoe_data(t), .stride = fmoe_stride(t, 0), .dtype = fmoe_tensor_dtype(t)};
}

static inline ref_mat ref_matrix(const fmoe_tensor *t)
{
    return (ref_mat){fmoe_data(t), fmoe_stride(t, 0), fmoe_stride(t, 1), fmoe_tensor_dtype(t)};
}

static inline ref_mat ref_slice(const fmoe_tensor *t, int64_t e)
{
    const int dtype = fmoe_tensor_dtype(t);
    return (ref_mat){ref_at(fmoe_data(t), dtype, e * fmoe_stride(t, 0)), fmoe_stride(t, 1), fmoe_stride(t, 2), dtype};
}

/* <a, b> over n elements, and y += s * x. */
static inline double ref_dot(ref_vec a, ref_vec b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += ref_get(a, i) * ref_get(b, i);
    return sum;
}

static inline void ref_axpy(double *y, double s, ref_vec x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) y[i] += s * ref_get(x, i);
}

/* Integer tensors: element i of rank 1, element (i,j) of rank 2. */
static inline int64_t ref_int1(const fmoe_tensor *t, int64_t i)
{
    return fmoe_get_int(fmoe_data(t), fmoe_tensor_dtype(t), i * fmoe_stride(t, 0));
}

static inline int64_t ref_int2(const fmoe_tensor *t, int64_t i, int64_t j)
{
    return fmoe_get_int(fmoe_data(t), fmoe_tensor_dtype(t), i * fmoe_stride(t, 0) + j * fmoe_stride(t, 1));
}

/* An id is an expert, or a mark that the plan declares to mean "skip this slot". */
static inline bool ref_skipped(const fmoe_plan_impl *p, int64_t id)
{
    return ((p->d.flags & FMOE_SKIP_NEG1) && id == -1) || ((p->d.flags & FMOE_SKIP_E) && id == p->d.E);
}

/* Every id is an expert or a declared skip mark, or FMOE_ERR_INDEX. Called before the first write. */
fmoe_status fmoe_ref_check_ids(const fmoe_plan_impl *p, const fmoe_tensor *ids);

/* Stable counting sort of the T*k slots by expert. start [E+1]: the rows of expert e are [start[e], start[e+1]), so
 * start[E] is the number of routed rows. map [T*k]: the row of slot t*k+j, or -1 where it is skipped. */
void fmoe_ref_sort(const fmoe_plan_impl *p, const fmoe_tensor *ids, int64_t *start, int64_t *map);

/* a[i] = act(h) and dh = da[i] * act'(h) for i in [0, I); h and dh have the plan's 2I or I columns in the plan's order.
 * */
void fmoe_ref_activate(const fmoe_plan_impl *p, ref_vec h, ref_vec a);
void fmoe_ref_activate_backward(const fmoe_plan_impl *p, ref_vec h, ref_vec da, ref_vec dh);

/* Columns of h that hold the gate and up values of element i. Ungated, h[i] is what the gate would be. */
static inline int64_t ref_gate_col(const fmoe_plan_impl *p, int64_t i)
{
    return p->gated && (p->d.flags & FMOE_INTERLEAVED) ? 2 * i : i;
}

static inline int64_t ref_up_col(const fmoe_plan_impl *p, int64_t i)
{
    return p->d.flags & FMOE_INTERLEAVED ? 2 * i + 1 : p->d.I + i;
}

/* ref_route.c and ref_experts.c. The carve functions make the walk that run calls make, on a base of NULL. */
void fmoe_ref_route_carve(const fmoe_plan_impl *p, fmoe_carve *c);
fmoe_status fmoe_ref_route_forward(const fmoe_plan_impl *p, const fmoe_route_args *a, const fmoe_run *run);
fmoe_status fmoe_ref_route_backward(const fmoe_plan_impl *p, const fmoe_route_args *a, const fmoe_run *run);
void fmoe_ref_experts_carve(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, fmoe_carve *c);
fmoe_status fmoe_ref_experts_forward(const fmoe_plan_impl *p, const fmoe_experts_args *a, const fmoe_run *run);
fmoe_status fmoe_ref_experts_backward(const fmoe_plan_impl *p, const fmoe_experts_args *a, const fmoe_run *run);

#endif
