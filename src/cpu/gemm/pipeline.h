/* SPDX-License-Identifier: Apache-2.0
 *
 * pipeline.h - weights chunk by chunk. All the chunks of a worker, over its tasks and experts, are one pipeline: while
 * one is multiplied, the next is packed and the one after prefetched. */
#ifndef FMOE_CPU_PIPELINE_H
#define FMOE_CPU_PIPELINE_H

#include "cpu/gemm/jobs.h"

/* What is multiplied at a time: kc of k of up to 64 columns, or several panels of them, by up to FMOE_TASK_ROWS rows of
 * an expert. The sums of panel i are c[i*rows ...]. */
typedef struct fmoe_step {
    fmoe_view v[2]; /* one or two matrices, which share N and K */
    int n_v, dtype;
    fmoe_form form;
    int64_t n0, n, k0, kc;         /* columns [n0, n0+n) of each, and k [k0, k0+kc) */
    int64_t chunk;                 /* k that are summed from zero: kc, or less where all of k is taken at once */
    int64_t e, row, rows;          /* rows of A */
    const fmoe_rows *a;            /* A itself, or the rows of a LoRA term */
    int64_t a_column;              /* where A's k starts in its rows */
    bool first, last;              /* of the sum over k */
    int64_t t0, t1;                /* combine: the tokens whose sums these columns are part of */
    int64_t first_column, columns; /* combine: the columns of the task, of which these are some */
    bool opens, closes;            /* combine: first and last of all steps of those sums */
} fmoe_step;

/* ---- chunking.c ---- */

int64_t fmoe_chunk_of(const fmoe_cpu_plan *cpu, const fmoe_view *v, bool lora); /* k of a chunk; lora: of a LoRA term */
int64_t fmoe_panels_of(const fmoe_cpu_plan *cpu, const fmoe_stack *w, int n_w, int64_t E, int64_t blocks,
                       int64_t tasks);
/* The form of a step, given its kc; g NULL: that of its panels, packed before. */
fmoe_form fmoe_form_of(const fmoe_cpu_plan *cpu, const fmoe_groups *g, const fmoe_step *s);

const char *fmoe_chunk_at(const fmoe_step *s, int i); /* where the chunk of matrix i begins */
bool fmoe_is_kmajor(const fmoe_step *s);              /* k is contiguous in memory */
int64_t fmoe_panels_in(const fmoe_step *s);
int64_t fmoe_chunk_bytes(const fmoe_cpu_plan *cpu, const fmoe_step *s); /* of one of its panels */
void fmoe_pack_chunk(const fmoe_cpu_plan *cpu, const fmoe_scratch *scratch, const fmoe_step *s, char *panel);
bool fmoe_is_prepacked(const fmoe_step *s); /* beforehand (prepacked.c) */
const char *fmoe_prepacked_at(const fmoe_cpu_plan *cpu, const fmoe_step *s);

/* ---- pipeline.c ---- */

typedef struct fmoe_pipeline {
    const fmoe_cpu_plan *cpu;
    const fmoe_groups *g;
    fmoe_scratch *scratch;
    bool (*next)(void *state, fmoe_step *s); /* false: no more */
    void *state;
    const fmoe_epilogue_operand *operands; /* of the epilogue; NULL: none */
    fmoe_step steps[3];                    /* multiplied, packed, prefetched: in a ring, from `first` on */
    int first;
    int n; /* how many of them there are; the first time, -1 */
    char *panel[2];
} fmoe_pipeline;

fmoe_pipeline fmoe_pipeline_start(const fmoe_cpu_plan *cpu, const fmoe_groups *g, fmoe_scratch *scratch,
                                  bool (*next)(void *, fmoe_step *), void *state);
void fmoe_take_k(const fmoe_cpu_plan *cpu, const fmoe_groups *g, fmoe_step *s,
                 bool lora);                              /* from k0 on: chunk, kc, form */
const fmoe_step *fmoe_pipeline_next(fmoe_pipeline *pipe); /* the next step, multiplied: NULL when there is none */

#endif
