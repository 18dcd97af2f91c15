/* SPDX-License-Identifier: Apache-2.0
 * quant.h - checking descriptors of quantised weights (fmoe_quant), and their tensors as arguments of a call. */
#ifndef FMOE_QUANT_H
#define FMOE_QUANT_H

#include "tensor.h"

/* A descriptor and its tensors, by name. */
typedef struct fmoe_quant_names {
    const char *quant, *scale, *zeros, *scale2;
} fmoe_quant_names;

#define FMOE_QUANT_NAMES(name) {name, name ".scale", name ".zeros", name ".scale2"}

/* The matrices N x K that a descriptor is for, and where it stands in the call. */
typedef struct fmoe_quant_matrix {
    const fmoe_quant *quant;
    const fmoe_quant_names *names;
    fmoe_axis_id axes; /* the first of its three axes */
    fmoe_axis_id E;
    fmoe_axis_id in; /* the rows of codes with FMOE_QUANT_IN_OUT; AXIS_NONE: that is an error */
    int64_t list;    /* as in fmoe_arg */
    int64_t N, K;
    bool halves; /* FMOE_QUANT_HALVES means something here */
    int role;    /* of codes, scales and zeros: ARG_IN or ARG_OUT */
} fmoe_quant_matrix;

/* Check every field, make `codes` an argument of bytes, and add the tensors of the descriptor at args[*n ...], three at
 * most. */
fmoe_status fmoe_quant_args_of(fmoe_checker *c, const fmoe_quant_matrix *m, fmoe_arg *codes, fmoe_arg *args, int *n);

/* The sizes of its three axes, of another N and K. */
void fmoe_quant_bind(fmoe_checker *c, const fmoe_quant_matrix *m);

#endif
