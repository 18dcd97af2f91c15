/* SPDX-License-Identifier: Apache-2.0
 * parallel.h - work on the threads of a plan, and tasks that workers claim from a common counter. */
#ifndef FMOE_CPU_PARALLEL_H
#define FMOE_CPU_PARALLEL_H

#include <stdatomic.h>

#include "cpu/plan.h"

void fmoe_pool_run(int n, void (*fn)(void *arg, int worker), void *arg);
void fmoe_run_worker(void (*fn)(void *arg, int worker), void *arg, int worker); /* in the default FP environment */
int fmoe_cpu_count(void);

/* On the plan's threads: the pool's or the caller's. */
void fmoe_parallel(const fmoe_plan_impl *p, void (*fn)(void *arg, int worker), void *arg);

/* Work that does not wait for one another, as one pool of tasks: every worker goes through the parts in order, and what
 * one part leaves idle at its end the next one takes. Every second worker begins with the second part: where one reads
 * weights while another writes gradients, memory does more than both after one another (a quarter of the time at 2 rows
 * an expert). */
typedef struct fmoe_part {
    void (*fn)(void *arg, int worker);
    void *arg;
    bool never_first; /* nobody begins with it: whoever did would come late to a part of few long tasks */
} fmoe_part;

void fmoe_parallel_parts(const fmoe_plan_impl *p, const fmoe_part *parts, int n);

/* for_rows: fn(ctx, begin, end) over [0,n) in pieces of `grain`. For work that is independent row by row. */
void fmoe_for_rows(const fmoe_plan_impl *p, int64_t n, int64_t grain, void (*fn)(void *ctx, int64_t begin, int64_t end),
                   void *ctx);

/* ---- tasks ---- */

/* Claim tasks 0..n-1, one after another, from any worker. */
typedef struct fmoe_tasks {
    _Atomic int64_t next;
    int64_t n;
} fmoe_tasks;

static inline bool fmoe_claim(fmoe_tasks *t, int64_t *task)
{
    *task = atomic_fetch_add_explicit(&t->next, 1, memory_order_relaxed);
    return *task < t->n;
}

/* A range of them, long at first and down to one task at the end: tasks that follow one another read the same rows and
 * write the same cache lines and pages, and no worker is left with much when the others are done. */
static inline bool fmoe_claim_some(fmoe_tasks *t, int threads, int64_t *begin, int64_t *end)
{
    int64_t at = atomic_load_explicit(&t->next, memory_order_relaxed), n;
    do {
        if (at >= t->n) return false;
        n = fmoe_max(1, (t->n - at) / (2 * threads));
    } while (!atomic_compare_exchange_weak_explicit(&t->next, &at, at + n, memory_order_relaxed, memory_order_relaxed));
    *begin = at;
    *end = at + n;
    return true;
}

#endif
