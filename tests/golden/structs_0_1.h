/* SPDX-License-Identifier: Apache-2.0
 *
 * structs_0_1.h - the structs of version 0.1.0 that begin with their size, as programs that were compiled with its
 * header pass them. They never change. */
#ifndef FMOE_STRUCTS_0_1_H
#define FMOE_STRUCTS_0_1_H

#include "fusedmoe.h"

typedef struct v01_desc {
    size_t size;
    int32_t op;
    int32_t dtype;
    fmoe_device device;
    int64_t H, I, E, k;
    int64_t K, N;
    int64_t shared_I;
    int64_t rank1;
    int64_t rank2;
    int32_t act;
    uint32_t flags;
    float act_alpha, act_limit;
    struct {
        int32_t score;
        int32_t renormalize;
        int32_t group_score;
        int32_t groups;
        int32_t topk_groups;
        int32_t excluded_zero;
        double eps;
        double scale;
    } route;
    int32_t threads;
    fmoe_parallel_fn parallel;
    void *parallel_ctx;
} v01_desc;

typedef struct v01_run {
    size_t size;
    void *workspace;
    size_t workspace_bytes;
    void *stream;
    uint32_t flags;
    fmoe_submit_fn submit;
    void *submit_ctx;
} v01_run;

typedef struct v01_route_args {
    size_t size;
    const fmoe_tensor *logits, *select_bias, *ids, *weights, *bad_rows, *dweights, *dlogits;
} v01_route_args;

typedef struct v01_permute_args {
    size_t size;
    const fmoe_tensor *x, *ids, *xp, *map, *counts;
} v01_permute_args;

typedef struct v01_unpermute_args {
    size_t size;
    const fmoe_tensor *y, *map, *weights, *out, *dout, *dy, *dweights;
} v01_unpermute_args;

typedef struct v01_gmm_args {
    size_t size;
    const fmoe_tensor *x, *w, *bias, *sizes, *y, *dy, *dx, *dw, *dbias;
    int32_t cumulative;
    int32_t list;
} v01_gmm_args;

typedef struct v01_activation_args {
    size_t size;
    const fmoe_tensor *h, *a, *da, *dh;
} v01_activation_args;

typedef struct v01_weights {
    const fmoe_tensor *w1, *b1, *w2, *b2, *gate, *up, *down, *lora_a1, *lora_b1, *lora_a2, *lora_b2;
    float lora_scale1, lora_scale2;
    const void *packed;
    size_t packed_bytes;
} v01_weights;

typedef struct v01_pack_args {
    size_t size;
    v01_weights w;
    void *packed;
    size_t packed_bytes;
} v01_pack_args;

typedef struct v01_experts_args {
    size_t size;
    const fmoe_tensor *x, *ids, *weights;
    v01_weights w;
    const fmoe_tensor *out;
    void *saved;
    size_t saved_bytes;
    const fmoe_tensor *dout, *dx, *dweights;
    v01_weights dw;
} v01_experts_args;

typedef struct v01_block_args {
    size_t size;
    const fmoe_tensor *x, *w_router, *b_router, *select_bias;
    v01_weights w, shared;
    const fmoe_tensor *shared_gate, *logits, *ids, *weights, *out;
    void *saved;
    size_t saved_bytes;
    const fmoe_tensor *dout, *dlogits, *dx, *dw_router, *db_router;
    v01_weights dw, dshared;
    const fmoe_tensor *dshared_gate;
} v01_block_args;

_Static_assert(sizeof(v01_desc) == 176 && sizeof(v01_run) == 56 && sizeof(v01_route_args) == 64 &&
                   sizeof(v01_permute_args) == 48 && sizeof(v01_unpermute_args) == 64 && sizeof(v01_gmm_args) == 88 &&
                   sizeof(v01_activation_args) == 40 && sizeof(v01_weights) == 112 && sizeof(v01_pack_args) == 136 &&
                   sizeof(v01_experts_args) == 304 && sizeof(v01_block_args) == 592,
               "as 0.1.0 had them");

#endif
