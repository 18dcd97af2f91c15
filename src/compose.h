/* SPDX-License-Identifier: Apache-2.0
 * compose.h - for operations made of other operations of the backend table (block.c, lora.c): tensors over their
 * buffers. */
#ifndef FMOE_COMPOSE_H
#define FMOE_COMPOSE_H

#include "plan.h"
#include "util.h"

#define FMOE_PART_ALIGN 256 /* pieces handed to the parts: enough for every backend */

typedef struct fmoe_piece {
    fmoe_tensor t;
    int64_t shape[3], strides[3];
} fmoe_piece;

/* A compact matrix; dtype: fmoe_dtype, or -32, -64 for ints. The result points into *v, which must not move. */
static inline const fmoe_tensor *fmoe_piece_of(fmoe_piece *v, const fmoe_plan_impl *p, void *data, int dtype,
                                               int64_t rows, int64_t cols)
{
    static const fmoe_datatype types[] = {
        [FMOE_F32] = {2, 32, 1}, [FMOE_BF16] = {4, 16, 1}, [FMOE_F16] = {2, 16, 1}, [FMOE_F64] = {2, 64, 1}};
    v->shape[0] = rows;
    v->shape[1] = cols;
    v->strides[0] = cols;
    v->strides[1] = 1;
    v->t = (fmoe_tensor){.data = data, .device = p->d.device, .ndim = 2, .shape = v->shape, .strides = v->strides};
    v->t.dtype = dtype < 0 ? (fmoe_datatype){0, (uint8_t)-dtype, 1} : types[dtype];
    return &v->t;
}

/* The same tensor with dimensions i and j exchanged; NULL stays NULL. */
static inline const fmoe_tensor *fmoe_turned(fmoe_piece *v, const fmoe_tensor *t, int i, int j)
{
    if (!t) return NULL;
    v->t = *t;
    v->t.shape = v->shape;
    v->t.strides = v->strides;
    for (int d = 0; d < t->ndim; d++) {
        const int from = d == i ? j : d == j ? i : d;
        v->shape[d] = t->shape[from];
        v->strides[d] = fmoe_stride(t, from);
    }
    return &v->t;
}

#endif
