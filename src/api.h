/* SPDX-License-Identifier: Apache-2.0
 *
 * api.h - what the exported run calls (api.c, api_layer.c) have in common.
 *
 * Each operation has one function that lists its tensors (tensor.h) for both passes. Nothing is written before all
 * checks have passed. */
#ifndef FMOE_API_H
#define FMOE_API_H

#include "abi.h"
#include "plan.h"
#include "tensor.h"
#include "util.h"

#define FMOE_N_ARGS(args) ((int)(sizeof(args) / sizeof *(args)))

/* A run call between acquiring and releasing its plan. */
typedef struct fmoe_call {
    const fmoe_plan_impl *p;
    const fmoe_run *run;
    fmoe_run run_copy; /* where the caller's struct is of another version */
    fmoe_pass pass;
    fmoe_checker check;
    fmoe_span packed[2]; /* weights given so: inputs that are no tensors */
} fmoe_call;

/* The operation and the run's flags. */
fmoe_status fmoe_call_begin(fmoe_call *c, const fmoe_plan_impl *p, fmoe_op op, fmoe_pass pass, const fmoe_run *run,
                            uint32_t known_flags);

/* Tensors, then workspace and saved state for as many rows as the tensors gave that axis. */
fmoe_status fmoe_call_finish(fmoe_call *c, const fmoe_arg *args, int n, fmoe_axis_id rows, void *saved,
                             size_t saved_bytes);

/* The exported pair of an operation: acquire the plan, check, run, release. */
#define FMOE_RUN_CALL(name, op, args_type, fwd_flags, bwd_flags)                                                       \
    static fmoe_status name##_call(fmoe_plan plan, fmoe_pass pass, const args_type *given, const fmoe_run *run)        \
    {                                                                                                                  \
        fmoe_plan_impl *p;                                                                                             \
        if (!given) return fmoe_fail(FMOE_ERR_NULL, #args_type " is NULL");                                            \
        if (!run) return fmoe_fail(FMOE_ERR_NULL, "fmoe_run is NULL");                                                 \
        FMOE_TRY(fmoe_plan_acquire(plan, &p));                                                                         \
        fmoe_call c;                                                                                                   \
        args_type copy;                                                                                                \
        const void *a;                                                                                                 \
        fmoe_status status = fmoe_struct_read(&args_type##_form, given, &copy, &a);                                    \
        if (status == FMOE_OK) status = fmoe_call_begin(&c, p, op, pass, run, pass ? bwd_flags : fwd_flags);           \
        if (status == FMOE_OK) status = name##_check(&c, a);                                                           \
        if (status == FMOE_OK) status = name##_run(&c, a);                                                             \
        fmoe_plan_release(plan);                                                                                       \
        return status;                                                                                                 \
    }                                                                                                                  \
    fmoe_status fmoe_##name##_forward(fmoe_plan plan, const args_type *a, const fmoe_run *run)                         \
    {                                                                                                                  \
        return name##_call(plan, FMOE_FORWARD, a, run);                                                                \
    }                                                                                                                  \
    fmoe_status fmoe_##name##_backward(fmoe_plan plan, const args_type *a, const fmoe_run *run)                        \
    {                                                                                                                  \
        return name##_call(plan, FMOE_BACKWARD, a, run);                                                               \
    }

#endif
