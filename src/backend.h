/* SPDX-License-Identifier: Apache-2.0
 *
 * backend.h - what the core and a backend know of each other, and nothing else.
 *
 * The core (api*.c, plan.c) checks every argument a host can check: sizes, dtypes, strides, overlap, workspace. A
 * backend may rely on that, and gets structs of this version whatever the caller has (abi.h). What only the data can
 * tell (expert ids, group sizes, map entries) is the backend's to check.
 *
 * A backend is one table of functions. CPU, reference and Ascend are compiled in; CUDA is a shared object that exports
 * fmoe_cuda_backend() and is loaded when a CUDA device is first asked for.
 */
#ifndef FMOE_BACKEND_H
#define FMOE_BACKEND_H

#include <stdbool.h>

#include "error.h"
#include "fusedmoe.h"

#define FMOE_BACKEND_VERSION 12u /* changes with any struct in this file, device.h or fusedmoe.h */

typedef struct fmoe_plan_impl fmoe_plan_impl;

typedef struct fmoe_backend {
    uint32_t version; /* FMOE_BACKEND_VERSION */
    const char *name; /* "cpu", "reference", "cuda", "ascend" */

    /* Fill p->priv, or say why the description cannot be served. plan_fini is called only after success. */
    fmoe_status (*plan_init)(fmoe_plan_impl *p);
    void (*plan_fini)(fmoe_plan_impl *p);

    /* Workspace of one pass on T tokens (rows), and what the forward keeps. workspace is NULL when only the latter is
     * asked. */
    fmoe_status (*bytes)(const fmoe_plan_impl *p, fmoe_pass pass, int64_t T, size_t *workspace, size_t *saved);

    /* snprintf-like: which kernels and why, lines ending in \n. */
    size_t (*describe)(const fmoe_plan_impl *p, char *text, size_t n);

    /* [FMOE_FORWARD], [FMOE_BACKWARD] */
    fmoe_status (*route[2])(const fmoe_plan_impl *, const fmoe_route_args *, const fmoe_run *);
    fmoe_status (*permute[2])(const fmoe_plan_impl *, const fmoe_permute_args *, const fmoe_run *);
    fmoe_status (*unpermute[2])(const fmoe_plan_impl *, const fmoe_unpermute_args *, const fmoe_run *);
    fmoe_status (*gmm[2])(const fmoe_plan_impl *, const fmoe_gmm_args *, const fmoe_run *);
    fmoe_status (*activation[2])(const fmoe_plan_impl *, const fmoe_activation_args *, const fmoe_run *);
    fmoe_status (*experts[2])(const fmoe_plan_impl *, const fmoe_experts_args *, const fmoe_run *);
    /* block has no entry: block.c composes it from the above, on every backend. */

    bool wide_factors; /* adapters in f32 beside 16 bits */
    bool quant;        /* plans of experts with FMOE_QUANT, */
    bool quant_gmm;    /* and of the grouped matmul */

    /* Packed weights of experts plans; NULL, all three: none. bytes 0: this plan reads weights as they are stored. The
     * check: is this buffer one of the plan's (name: the argument's)? */
    fmoe_status (*packed_bytes)(const fmoe_plan_impl *p, size_t *bytes);
    fmoe_status (*pack)(const fmoe_plan_impl *p, const fmoe_pack_args *, const fmoe_run *);
    fmoe_status (*packed_check)(const fmoe_plan_impl *p, const char *name, const void *packed, size_t bytes);

    const struct fmoe_device_ops *device; /* of expert parallelism (device.h), or NULL */

    /* fmoe_quantize and fmoe_dequantize, whose arguments are checked, on the device of a->w; NULL: none. */
    fmoe_status (*quantize)(const fmoe_quant_args *a);
    fmoe_status (*dequantize)(const fmoe_quant_args *a);
} fmoe_backend;

/* A plan inside the library. d is the caller's description with defaults filled in (device.type is never 0,
 * act_alpha, act_limit and route.scale are set). */
struct fmoe_plan_impl {
    fmoe_desc d;
    const fmoe_backend *backend;
    void *priv;              /* the backend's */
    int gated;               /* h has 2I columns */
    int64_t h_cols;          /* 2I or I */
    fmoe_plan_impl *part[8]; /* the plans that a block is composed of (block.c) */
};

/* What a backend in a shared object of its own gets from the core. */
typedef struct fmoe_core {
    uint32_t version; /* FMOE_BACKEND_VERSION */
    /* Set fmoe_last_error() of this thread and return `status`. */
    fmoe_status (*fail)(fmoe_status status, const char *format, ...);
} fmoe_core;

typedef const fmoe_backend *(*fmoe_backend_entry)(const fmoe_core *core); /* "fmoe_cuda_backend"; NULL: refused */

/* backend.c: the table for a device and dtype, loading what must be loaded. */
fmoe_status fmoe_backend_find(fmoe_device device, int32_t dtype, const fmoe_backend **backend);

extern const fmoe_backend fmoe_backend_cpu;       /* cpu/backend.c: f32, bf16, f16 */
extern const fmoe_backend fmoe_backend_reference; /* cpu/ref/ref.c: f64, the specification */
extern const fmoe_backend fmoe_backend_ascend;    /* ascend/ascend.c */

/* One-line text on each backend for fmoe_info(): what was found, or what is missing. */
size_t fmoe_cpu_info(char *text, size_t n);
size_t fmoe_cuda_info(char *text, size_t n);
size_t fmoe_ascend_info(char *text, size_t n);

#endif
