/* SPDX-License-Identifier: Apache-2.0
 *
 * tensor.h - checking the tensors of a call against one another and against the plan.
 *
 * A call lists its tensors once, as a table of fmoe_arg: name, role, dtypes, layout and axes. An axis is a letter with
 * a size that the plan or the first tensor that has it fixes; every later tensor must agree. */
#ifndef FMOE_TENSOR_H
#define FMOE_TENSOR_H

#include "backend.h"

typedef enum fmoe_axis_id {
    AXIS_NONE,
    AXIS_T,
    AXIS_R,
    AXIS_TK, /* free: fixed by the first tensor; TK is checked against T*k */
    AXIS_H,
    AXIS_I,
    AXIS_HC,
    AXIS_E,
    AXIS_K_SLOTS,
    AXIS_K,
    AXIS_N,
    AXIS_ONE,
    AXIS_SHARED_HC,
    AXIS_SHARED_I,
    AXIS_RANK1,
    AXIS_RANK2,
    AXIS_GRID, /* of quantised weights: columns of codes in bytes, rows and columns of groups, of each descriptor */
    AXIS_COUNT = AXIS_GRID + 3 * 6
} fmoe_axis_id;

typedef enum fmoe_layout {
    LAYOUT_ROWS,    /* unit stride in the last dimension, any row stride */
    LAYOUT_COMPACT, /* compact row-major */
    LAYOUT_MATRIX   /* unit stride in one of the last two dimensions */
} fmoe_layout;

enum {                /* accepted dtypes of an argument */
       TYPE_PLAN = 1, /* the plan's dtype */
       TYPE_WIDE = 2, /* f32 (f64 in an f64 plan) */
       TYPE_INT = 4,  /* int32, int64 */
       TYPE_INT64 = 8,
       TYPE_BYTE = 16,
       TYPE_F32 = 32,  /* whatever the plan's is */
       TYPE_16BIT = 64 /* bf16, f16 */
};

enum { ARG_IN = 0, ARG_OUT = 1, ARG_OPTIONAL = 2, ARG_OPTIONAL_OUT = 3 };

typedef struct fmoe_arg {
    const char *name;
    const fmoe_tensor *t; /* NULL: not given */
    int role;
    int types;
    fmoe_layout layout;
    fmoe_axis_id axes[3];
    int64_t list; /* 0: one tensor; else t is an array of that many, each with these axes */
} fmoe_arg;

typedef struct fmoe_span {
    const char *name;
    const void *data;
    size_t bytes;
} fmoe_span;

/* The state of one call's checks. */
typedef struct fmoe_checker {
    const fmoe_plan_impl *plan;
    int64_t size[AXIS_COUNT];      /* -1: not fixed yet */
    const char *owner[AXIS_COUNT]; /* who fixed it: "the plan", or a tensor's name */
} fmoe_checker;

fmoe_checker fmoe_checker_begin(const fmoe_plan_impl *plan);

/* Check every tensor of the table; then that no output overlaps anything else, the extra spans (workspace, saved state:
 * outputs too) included. */
fmoe_status fmoe_check_args(fmoe_checker *c, const fmoe_arg *args, int n, const fmoe_span *spans, int n_spans);

/* The two halves of it: for the list form of the grouped matmul, where sizes differ from group to group. */
fmoe_status fmoe_check_tensor(fmoe_checker *c, const fmoe_arg *arg, int64_t index);
fmoe_status fmoe_check_overlap(const fmoe_arg *args, int n, const fmoe_span *spans, int n_spans);

#endif
