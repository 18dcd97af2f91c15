/* SPDX-License-Identifier: Apache-2.0
 * cpu/plan.h - a plan of the CPU backend: its kernels, its threads, and the types its buffers have. */
#ifndef FMOE_CPU_PLAN_H
#define FMOE_CPU_PLAN_H

#include "backend.h"
#include "cpu/kernels/kernels.h"
#include "util.h"

/* What plan_init settles. */
typedef struct fmoe_cpu_plan {
    fmoe_kernels k;
    uint64_t has; /* its kernels, as bits (fmoe_kernels_has) */
    int threads;
    bool pairs;    /* products in bf16 pairs: buffers between products are bf16; else they are f32 */
    bool gather;   /* rows are gathered before a product instead of by pointers: AMX wants them equally far apart */
    int work_type; /* fmoe_dtype of those buffers */
    bool intel;    /* Intel's cores want to be fed in other ways (intel_avx512.h, pipeline.c) */
} fmoe_cpu_plan;

static inline const fmoe_cpu_plan *fmoe_cpu(const fmoe_plan_impl *p) { return p->priv; }

/* The same in f32, whatever the plan's: for the few products whose operands are of two types. */
static inline fmoe_cpu_plan fmoe_cpu_f32(const fmoe_cpu_plan *cpu)
{
    fmoe_cpu_plan f32 = *cpu;
    f32.pairs = false;
    f32.work_type = FMOE_F32;
    return f32;
}

/* Bytes of a panel of kc rows. */
static inline size_t fmoe_panel_bytes(const fmoe_cpu_plan *cpu, int64_t kc)
{
    return (size_t)(cpu->pairs ? (kc + 1) / 2 : kc) * FMOE_NB * 4;
}

/* What FMOE_ROUND_STEPS rounds to, 0 without it (and in f32, where there is nothing to round). */
static inline int fmoe_steps(const fmoe_plan_impl *p)
{
    return (p->d.flags & FMOE_ROUND_STEPS) && p->d.dtype != FMOE_F32 ? p->d.dtype : 0;
}

static inline fmoe_act_params fmoe_act_of(const fmoe_plan_impl *p)
{
    return (fmoe_act_params){p->d.act, p->d.act_alpha, p->d.act_limit, fmoe_steps(p)};
}

#endif
