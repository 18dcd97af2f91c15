/* SPDX-License-Identifier: Apache-2.0
 * ops.h - what the chains are made of: small launches with names, and the grouped products. */
#ifndef FMOE_ASCEND_OPS_H
#define FMOE_ASCEND_OPS_H

#include "call.h"

/* ---- ops.c ---- */

void asc_cast(asc_call *c, asc_view to, asc_view from); /* same shape, another dtype */
void asc_copy(asc_call *c, asc_view to, asc_view from); /* any strides, any dtypes */
void asc_zero(asc_call *c, asc_view packed);
void asc_add_to(asc_call *c, asc_view to, asc_view from); /* to += from */
void asc_scale(asc_call *c, asc_view v, double by);       /* v *= by */
void asc_fill_where(asc_call *c, asc_view v, asc_view mask, double value);

/* asc_do_X(c, x), asc_do_X(c, x, y): the result of an element-wise operator in new scratch of x's shape and dtype. */
asc_view asc_like(asc_call *c, asc_view v);
asc_view asc_do_Silu(asc_call *c, asc_view x);
asc_view asc_do_Relu(asc_call *c, asc_view x);
asc_view asc_do_Sigmoid(asc_call *c, asc_view x);
asc_view asc_do_Sqrt(asc_call *c, asc_view x);
asc_view asc_do_Mul(asc_call *c, asc_view x, asc_view y);
asc_view asc_do_Div(asc_call *c, asc_view x, asc_view y);
asc_view asc_do_SiluBackward(asc_call *c, asc_view grad, asc_view x);
asc_view asc_do_SigmoidBackward(asc_call *c, asc_view grad, asc_view output);
asc_view asc_do_Add(asc_call *c, asc_view x, asc_view y);
asc_view asc_do_Sub(asc_call *c, asc_view x, asc_view y);
asc_view asc_do_Muls(asc_call *c, asc_view x, double by);
asc_view asc_do_Adds(asc_call *c, asc_view x, double plus);
asc_view asc_do_Clamp(asc_call *c, asc_view x, const double *low, const double *high);

/* The tensor itself when it is packed, else a packed copy; as another dtype where `dtype` says so. Strides are regular:
 * CANN tells a transposed view by its strides alone, and those of a dimension of length 1 may be anything. */
asc_view asc_packed_as(asc_call *c, asc_view v, aclDataType dtype);
asc_view asc_packed(asc_call *c, const fmoe_tensor *t);

/* Somewhere packed to write: the tensor itself, or scratch that asc_deliver copies (or adds) to it. */
asc_view asc_target(asc_call *c, const fmoe_tensor *t, aclDataType dtype, bool add);
void asc_deliver(asc_call *c, const fmoe_tensor *t, asc_view from, bool add);

/* ---- products.c ---- */

/* How the rows are divided: counts (or running sums) on the device. */
typedef struct asc_groups {
    int64_t n;
    asc_view list;    /* int64 [n]; not used when n is 1 */
    bool cumulative;  /* list holds running sums */
    asc_view running; /* running sums; .data NULL until somebody needs them */
    asc_view ones;    /* [R,1] in the plan's dtype for bias gradients; .data NULL: made where they are used */
} asc_groups;

/* Weights of every group, [n, a, b]: one stack, or a list of matrices. */
typedef struct asc_weights {
    asc_view stack;          /* stacked */
    const fmoe_tensor *list; /* else */
    int64_t n;
    bool turned;  /* list: to be read as [b, a] */
    bool decoded; /* in scratch, which a product gives back (asc_product) */
} asc_weights;

asc_weights asc_weights_of(asc_call *c, const char *name, const fmoe_tensor *stack, const fmoe_tensor *list, int64_t n);
asc_weights asc_weights_turn(asc_weights w);
asc_view asc_running(asc_call *c, asc_groups *g);
bool asc_sums_needed(const asc_call *c, const asc_groups *g); /* to add into f32 */

/* y[r] = x[r] . w[g(r)] + bias[g(r)]: x [R,K], w [n,K,N], bias NULL or [n,N]. */
void asc_rows_product(asc_call *c, asc_view x, asc_weights w, const fmoe_tensor *bias, asc_groups *g, asc_view y);

/* dw[g] (+)= left_g^T . right_g: left [R,a], right [R,b], dw [n,a,b] in the plan's dtype or f32. */
void asc_outer_product(asc_call *c, asc_view left, asc_view right, asc_groups *g, asc_weights dw, bool add);

/* db[g] (+)= sum of the rows of group g: d [R,N], db [n,N]. */
asc_view asc_ones(asc_call *c, int64_t rows, aclDataType dtype);
void asc_bias_gradient(asc_call *c, asc_view d, asc_groups *g, const fmoe_tensor *db, bool add);

void asc_mm(asc_call *c, asc_view a, asc_view b, asc_view out);

/* ---- quant.c ---- */

/* Weights [n,N,K] of codes, decoded into scratch. */
asc_weights asc_weights_decoded(asc_call *c, const fmoe_tensor *stack, const fmoe_tensor *list, const fmoe_quant *q,
                                int64_t n, int64_t N, int64_t K);

/* ---- experts.c: the two products of the layer ---- */

/* W1 (of lists: up), gate, and W2 as they are stored, [E,out,in]; those that are quantised in scratch. */
asc_weights asc_w1(asc_call *c, const fmoe_weights *w);
asc_weights asc_gate(asc_call *c, const fmoe_weights *w);
asc_weights asc_w2(asc_call *c, const fmoe_weights *w);

/* y = x . W^T + bias (turned), or x . W. */
void asc_product(asc_call *c, asc_view x, const fmoe_weights *w, asc_weights (*which)(asc_call *, const fmoe_weights *),
                 bool turned, const fmoe_tensor *bias, asc_groups *g, asc_view y);

void asc_up(asc_call *c, const fmoe_weights *w, asc_view xp, asc_groups *g, asc_view h);  /* h = xp . W1^T + b1 */
void asc_down(asc_call *c, const fmoe_weights *w, asc_view a, asc_groups *g, asc_view y); /* y = a . W2^T + b2 */

/* ---- adapters.c ---- */

typedef struct asc_adapter_of { /* factors a [n,rank,in] and b [n,out,rank], or their gradients; NULL: none */
    const fmoe_tensor *a, *b;
    float scale;
} asc_adapter_of;

static inline asc_adapter_of asc_adapter1(const fmoe_weights *w)
{
    return (asc_adapter_of){w->lora_a1, w->lora_b1, fmoe_lora_scale(w->lora_scale1)};
}

static inline asc_adapter_of asc_adapter2(const fmoe_weights *w)
{
    return (asc_adapter_of){w->lora_a2, w->lora_b2, fmoe_lora_scale(w->lora_scale2)};
}

void asc_adapter(asc_call *c, asc_adapter_of w, asc_view x, asc_groups *g, asc_view to); /* to += s x . a^T . b^T */
/* dx (NULL: not wanted) += s dy . b . a, and the gradients d asks for. */
void asc_adapter_gradient(asc_call *c, asc_adapter_of w, asc_adapter_of d, asc_view x, asc_view dy, asc_groups *g,
                          const asc_view *dx, bool add);

/* ---- act.c ---- */

bool asc_act_clipped(const fmoe_acl *acl, const fmoe_desc *d); /* one launch by ClippedSwiglu */
void asc_act(asc_call *c, asc_view h, asc_view a);
void asc_act_gradient(asc_call *c, asc_view da, asc_view h, asc_view dh);

/* ---- rows.c: routed rows ---- */

typedef struct asc_routing {
    asc_view map;    /* int32 [R]: row of each slot, a permutation even when slots are skipped */
    asc_view counts; /* int64 [E] */
    asc_view mask;   /* bool [T,k]: skipped; .data NULL when the plan has no skip marks */
} asc_routing;

/* xp, map and counts from ids; every view is given by the caller (mask excepted). x may be any row matrix. */
void asc_route_rows(asc_call *c, asc_view x, const fmoe_tensor *ids, asc_view xp, asc_routing *r);
asc_view asc_skip_mask(asc_call *c, const fmoe_tensor *ids);

/* p for the combine: packed, zero where skipped, in the dtype `dtype` or its own. */
asc_view asc_probs(asc_call *c, const fmoe_tensor *p, const asc_routing *r, aclDataType dtype);

#endif
