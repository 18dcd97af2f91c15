/* SPDX-License-Identifier: Apache-2.0
 *
 * views.h - what products are made of: matrices of weights, rows of activations, and the scratch memory of a worker. */
#ifndef FMOE_CPU_VIEWS_H
#define FMOE_CPU_VIEWS_H

#include "cpu/gemm/forms.h"
#include "cpu/groups.h"

/* One expert's matrix: element (n,k) at p + (n*sn + k*sk) elements, N x K. Prepacked (block > 0): p is its first panel,
 * the panels of a block of columns follow one another, those of the next block `block` bytes on, and sk says which
 * matrix they were made of (1: k-major). */
typedef struct fmoe_view {
    char *p;
    int64_t N, K, sn, sk;
    int64_t block;
    const struct fmoe_stack *coded; /* quantised, not yet decoded (decode.c): p is NULL, and the strides are those of a
                                       matrix of the same layout. Of expert e */
    int64_t e;
} fmoe_view;

/* The matrices of all experts: a stack [E,N,K], a list of E tensors [N,K], or packed ones. */
typedef struct fmoe_stack {
    const fmoe_tensor *t;
    bool list;
    bool swap;         /* exchange the roles of N and K */
    int64_t row, rows; /* only rows [row, row+rows) of the stored N dimension: one half of W1. rows 0: all */
    int dtype;
    const fmoe_quant *quant; /* t holds codes of K columns, dtype is what they are decoded to; NULL: t holds weights */
    int64_t K;
    const fmoe_tensor *like; /* of a list: tensors with as many columns as each has codes in a row; NULL: K of all */
    fmoe_view prepacked;     /* of expert 0, where its block is not 0; each of the others `expert` bytes on */
    int64_t expert;
} fmoe_stack;

fmoe_view fmoe_stack_at(const fmoe_stack *s, int64_t e);

/* Rows of an activation: row r of group e, gathered through an index, or one tensor a group. */
typedef struct fmoe_rows {
    const char *base;
    int64_t stride;          /* bytes */
    const int64_t *index;    /* row -> row of base; NULL: itself */
    const fmoe_tensor *list; /* [E]: row r of group e is row r - off[e] of list[e] */
    int dtype;
} fmoe_rows;

fmoe_rows fmoe_rows_of(const fmoe_tensor *t, const int64_t *index);
fmoe_rows fmoe_rows_buffer(const void *base, int64_t columns, int dtype);

/* decode.c: matrix e of a quantised stack as kernels read it; columns [n0, n0+n) and k [k0, k0+kc) of a view of it, as
 * they lie in memory, and decoded to `to`, k-major with `apart` elements from column to column, or n-major, n apart (of
 * swapped stacks). */
fmoe_coded fmoe_coded_of(const fmoe_tensor *t, const fmoe_quant *q, bool list, int64_t e);
typedef struct fmoe_code_block {
    const fmoe_view *v;
    int64_t n0, n, k0, kc;
} fmoe_code_block;
typedef struct fmoe_code_lines {
    const char *at;
    int64_t step, rows, bytes; /* from row to row; of a row */
} fmoe_code_lines;
fmoe_code_lines fmoe_codes_at(const fmoe_code_block *b);
void fmoe_decode(const fmoe_cpu_plan *cpu, const fmoe_code_block *b, void *to, int64_t apart);

/* ---- single rows and elements ---- */

/* Values in f32 to the nearest of dtype, bf16 or f16; with a bias: and their sum with it again. */
void fmoe_round_row(const fmoe_kernels *k, int dtype, float *row, const float *bias, int64_t n);

/* One row between its storage type and f32. */
void fmoe_load_row(const fmoe_kernels *k, int dtype, float *dst, const void *src, int64_t n);
void fmoe_store_row(const fmoe_kernels *k, int dtype, void *dst, const float *src, int64_t n);

static inline fmoe_store_block_fn *fmoe_store_block(const fmoe_kernels *k, int dtype)
{
    return dtype == FMOE_BF16 ? k->store_block_bf16 : dtype == FMOE_F16 ? k->store_block_f16 : k->store_block_f32;
}

static inline float fmoe_get_float(const void *p, int dtype, int64_t i)
{
    switch (dtype) {
    case FMOE_BF16: return fmoe_bf16_to_float(((const uint16_t *)p)[i]);
    case FMOE_F16: return fmoe_f16_to_float(((const uint16_t *)p)[i]);
    default: return ((const float *)p)[i];
    }
}

static inline void fmoe_set_float(void *p, int dtype, int64_t i, float v)
{
    switch (dtype) {
    case FMOE_BF16: ((uint16_t *)p)[i] = fmoe_float_to_bf16(v); return;
    case FMOE_F16: ((uint16_t *)p)[i] = fmoe_float_to_f16(v); return;
    default: ((float *)p)[i] = v;
    }
}

static inline const void *fmoe_row(const fmoe_rows *a, const fmoe_groups *g, int64_t e, int64_t r)
{
    if (a->list) {
        const fmoe_tensor *t = a->list + e;
        return (const char *)fmoe_data(t) + (r - g->off[e]) * fmoe_stride(t, 0) * (int64_t)fmoe_dtype_size(a->dtype);
    }
    return a->base + (a->index ? a->index[r] : r) * a->stride;
}

/* `offset` bytes into each of n rows, from `row` on. */
void fmoe_point(const fmoe_rows *a, const fmoe_groups *g, int64_t e, int64_t row, int64_t n, int64_t offset,
                const void **to);

/* ---- scratch of one worker ---- */

typedef struct fmoe_scratch {
    void *panel;           /* two of FMOE_PANEL_BYTES: one multiplied, one packed */
    void *left;            /* FMOE_LEFT_PANELS of them: the other operand of a weight gradient */
    float *c;              /* [FMOE_PANELS * FMOE_TASK_ROWS][FMOE_NB], at least FMOE_ROW_BLOCK rows */
    float *sums;           /* [panels][tokens][FMOE_NB]: output columns owned by a task */
    int64_t room;          /* for sums */
    float *widened;        /* [FMOE_WIDEN_ROWS][FMOE_KC]: rows of A brought to f32 */
    const void **pointers; /* [FMOE_KC_PAIRS] */
    char *decoded;         /* FMOE_DECODED_BYTES: a chunk of quantised weights; gathering plans: 64 columns of all k */
} fmoe_scratch;

/* s: one per worker, threads of them, with room for so many sums. */
void fmoe_scratch_carve(fmoe_scratch *s, fmoe_carve *c, const fmoe_plan_impl *p, int64_t sums);

#endif
