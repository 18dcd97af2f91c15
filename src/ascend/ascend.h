/* SPDX-License-Identifier: Apache-2.0
 * ascend.h - what a plan of this backend holds, and the operations behind its table. */
#ifndef FMOE_ASCEND_H
#define FMOE_ASCEND_H

#include <pthread.h>

#include "call.h"
#include "device.h"

enum { ASC_CACHE = 32 };

struct asc_plan {
    const fmoe_acl *acl;
    asc_keep keep;
    bool routing_v3; /* rows by MoeInitRoutingV3, else by V2 and a cast */
    bool skip;       /* ids may mark skipped slots */
    bool check;      /* FMOE_ASCEND_CHECK: ids are looked at before they are used */
    /* Sizes measured before, so that a training loop asks phase 1 once: the only thing in a plan that changes. */
    pthread_mutex_t lock;
    struct {
        int64_t rows;
        int pass;
        size_t workspace, saved;
    } cache[ASC_CACHE];
    int next;
};

/* Each operation: a walk, used for running and for measuring. */
void asc_route(asc_call *c, fmoe_pass pass, const fmoe_route_args *a, uint32_t flags);
void asc_permute(asc_call *c, fmoe_pass pass, const fmoe_permute_args *a);
void asc_unpermute(asc_call *c, fmoe_pass pass, const fmoe_unpermute_args *a);
void asc_gmm(asc_call *c, fmoe_pass pass, const fmoe_gmm_args *a, uint32_t flags);
void asc_activation(asc_call *c, fmoe_pass pass, const fmoe_activation_args *a);
void asc_experts_forward(asc_call *c, const fmoe_experts_args *a, uint32_t flags);
void asc_experts_backward(asc_call *c, const fmoe_experts_args *a, uint32_t flags);

/* measure.c: workspace of a pass on T tokens (rows). */
fmoe_status asc_measure(const fmoe_plan_impl *p, fmoe_pass pass, int64_t rows, size_t *workspace);

extern const fmoe_device_ops asc_device; /* device.c */

/* saved.c: the layout of the saved state; base NULL: its size only. */
typedef struct asc_saved {
    asc_view map, counts, xp, h, a, y; /* .data NULL: not kept */
} asc_saved;
size_t asc_saved_layout(const fmoe_plan_impl *p, int64_t rows, void *base, asc_saved *s);

#endif
