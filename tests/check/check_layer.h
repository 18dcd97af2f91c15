/* SPDX-License-Identifier: Apache-2.0
 * check_layer.h - one experts layer with all its tensors, for check_layer.c, check_same.c and check_block.c. */
#ifndef FMOE_CHECK_LAYER_H
#define FMOE_CHECK_LAYER_H

#include "check.h"

enum {                       /* how the tensors lie */
       LAYER_TRANSPOSED = 1, /* W1 and W2 stored [E,in,out] */
       LAYER_LIST = 2,       /* one matrix an expert */
       LAYER_WIDE_P = 4,     /* p and dp in f32 */
       LAYER_WIDE_GRAD = 8,  /* dW in f32 */
       LAYER_PADDED = 16,    /* rows with gaps */
       LAYER_I64 = 32,
       LAYER_GRAD_TURNED = 64, /* gradients in the other orientation than the weights */
       LAYER_WIDE_BIAS = 128,
       LAYER_GRAD_LIST =
           256,           /* gradients in the other form than the weights: lists beside stacks or stacks beside lists */
       LAYER_MIXED = 512, /* in lists of weights: one matrix [out,in], the next [in,out] */
       LAYER_WIDE_FACTOR = 1024 /* every second factor of adapters in f32, of values that the plan's dtype has */
};

typedef struct check_layer {
    fmoe_desc d;
    fmoe_plan plan;
    int64_t T, C; /* C: columns of h */
    int layout;
    bool gated, list, grad_list; /* lists have no interleaving: gate and up are matrices of their own */
    fmoe_tensor *x, *ids, *p, *w1, *b1, *w2, *b2, *out, *dout, *dx, *dp, *dw1, *db1, *dw2, *db2;
    fmoe_tensor *lora[4], *dlora[4]; /* a1, b1, a2, b2; empty where the plan has no rank */
    float scale[2];                  /* of the adapters; 0 means 1 */
    fmoe_experts_args forward, backward;
} check_layer;

/* Experts of any kind, without sizes: dtype, activation, E, k, flags, ranks. */
fmoe_desc layer_draw(void);
/* Inputs drawn, outputs poisoned; nothing run yet. */
check_layer layer_make(const fmoe_desc *d, int64_t T, int layout);
/* check_note of all that was drawn. */
void layer_note(const check_layer *l);
/* The same numbers under another plan, in fresh outputs. */
check_layer layer_again(const check_layer *l, const fmoe_desc *d);
/* Forward (with saved state unless the plan recomputes) and backward. */
void layer_run(check_layer *l, uint32_t forward_flags, uint32_t backward_flags);
/* The outputs of two layers, bit for bit. */
void layer_equal(const char *what, const check_layer *a, const check_layer *b);
/* All outputs in one list. */
enum { LAYER_OUTPUTS = 11 };
void layer_outputs(const check_layer *l, const fmoe_tensor *out[LAYER_OUTPUTS]);
extern const char *const layer_output_names[LAYER_OUTPUTS];

#endif
