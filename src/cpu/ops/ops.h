/* SPDX-License-Identifier: Apache-2.0
 * ops.h - the operations, one file each, and what those of the experts share. */
#ifndef FMOE_CPU_OPS_H
#define FMOE_CPU_OPS_H

#include "cpu/gemm/jobs.h"

fmoe_status fmoe_cpu_route_forward(const fmoe_plan_impl *, const fmoe_route_args *, const fmoe_run *);
fmoe_status fmoe_cpu_route_backward(const fmoe_plan_impl *, const fmoe_route_args *, const fmoe_run *);
fmoe_status fmoe_cpu_permute_forward(const fmoe_plan_impl *, const fmoe_permute_args *, const fmoe_run *);
fmoe_status fmoe_cpu_permute_backward(const fmoe_plan_impl *, const fmoe_permute_args *, const fmoe_run *);
fmoe_status fmoe_cpu_unpermute_forward(const fmoe_plan_impl *, const fmoe_unpermute_args *, const fmoe_run *);
fmoe_status fmoe_cpu_unpermute_backward(const fmoe_plan_impl *, const fmoe_unpermute_args *, const fmoe_run *);
fmoe_status fmoe_cpu_gmm_forward(const fmoe_plan_impl *, const fmoe_gmm_args *, const fmoe_run *);
fmoe_status fmoe_cpu_gmm_backward(const fmoe_plan_impl *, const fmoe_gmm_args *, const fmoe_run *);
fmoe_status fmoe_cpu_activation_forward(const fmoe_plan_impl *, const fmoe_activation_args *, const fmoe_run *);
fmoe_status fmoe_cpu_activation_backward(const fmoe_plan_impl *, const fmoe_activation_args *, const fmoe_run *);
fmoe_status fmoe_cpu_experts_forward(const fmoe_plan_impl *, const fmoe_experts_args *, const fmoe_run *);
fmoe_status fmoe_cpu_experts_backward(const fmoe_plan_impl *, const fmoe_experts_args *, const fmoe_run *);
fmoe_status fmoe_cpu_quantize(const fmoe_quant_args *a);
fmoe_status fmoe_cpu_dequantize(const fmoe_quant_args *a);

/* Their workspaces: the same carve walks, measured. */
void fmoe_cpu_route_carve(const fmoe_plan_impl *p, fmoe_carve *c);
void fmoe_cpu_permute_carve(const fmoe_plan_impl *p, int64_t T, fmoe_carve *c);
void fmoe_cpu_gmm_carve(const fmoe_plan_impl *p, fmoe_carve *c);
void fmoe_cpu_experts_forward_carve(const fmoe_plan_impl *p, int64_t T, fmoe_carve *c);
void fmoe_cpu_experts_backward_carve(const fmoe_plan_impl *p, int64_t T, fmoe_carve *c);

/* experts_fwd.c: shared by both passes. The first product with its activation: h (plan's dtype) and a (work type),
 * either may be NULL; l1: room for [R, rank1]. */
void fmoe_experts_up(const fmoe_plan_impl *p, const fmoe_experts_args *args, const fmoe_groups *g,
                     fmoe_scratch *scratch, void *l1, void *h, void *a);
fmoe_stack fmoe_w1_stack(const fmoe_plan_impl *p, const fmoe_weights *w, int half); /* 0 gate, 1 up */
fmoe_stack fmoe_w2_stack(const fmoe_plan_impl *p, const fmoe_weights *w);

/* lora.c: rows of A by one factor of an adapter, times its scale, into l [R, rank] of the work type; swap: by its
 * transpose. */
fmoe_rows fmoe_lora_project(const fmoe_plan_impl *p, const fmoe_groups *g, fmoe_scratch *scratch, fmoe_rows a,
                            const fmoe_tensor *factor, bool swap, float scale, void *l);
fmoe_stack fmoe_lora_factor(const fmoe_tensor *factor, bool swap);

/* Factors a1, b1, a2, b2 in f32 of a plan in 16 bits: w with those in the plan's dtype, of experts that have rows. */
typedef struct fmoe_lora_factors {
    void *room[4];
    fmoe_tensor t[4];
    int64_t strides[4][3];
} fmoe_lora_factors;
void fmoe_lora_factors_carve(fmoe_lora_factors *f, fmoe_carve *c, const fmoe_plan_impl *p);
fmoe_weights fmoe_lora_narrow_factors(const fmoe_plan_impl *p, const fmoe_groups *g, fmoe_lora_factors *f,
                                      const fmoe_weights *w);

/* describe.c: lines on the kernels that the plan's products and rows call; as snprintf. */
size_t fmoe_cpu_describe(const fmoe_plan_impl *p, char *text, size_t n);

/* prepacked.c: the weights of a layer as a packed buffer. Its bytes, 0 where the plan reads weights in place; whether a
 * buffer is one of this plan's; and its stacks, W1's two halves as one where they are not whole. */
fmoe_status fmoe_cpu_packed_bytes(const fmoe_plan_impl *p, size_t *bytes);
fmoe_status fmoe_cpu_pack(const fmoe_plan_impl *p, const fmoe_pack_args *args, const fmoe_run *run);
fmoe_status fmoe_cpu_packed_check(const fmoe_plan_impl *p, const char *name, const void *packed, size_t bytes);
fmoe_stack fmoe_prepacked_w1(const fmoe_plan_impl *p, const void *packed, bool *whole);
fmoe_stack fmoe_prepacked_w2(const fmoe_plan_impl *p, const void *packed);
bool fmoe_w1_whole(const fmoe_plan_impl *p,
                   const fmoe_weights *w); /* one stack in stored order: interleaved or ungated */

#endif
