/* SPDX-License-Identifier: Apache-2.0
 *
 * jobs.h - the three products that everything is made of: grouped_gemm, rows by the weights of their experts with an
 * epilogue; combine, the same with rows added up by token; wgrad, weight gradients. */
#ifndef FMOE_CPU_JOBS_H
#define FMOE_CPU_JOBS_H

#include "cpu/gemm/views.h"
#include "cpu/parallel.h"

/* A LoRA term of a product: L[r, :] . B[e(r)][n, :] is added to column n of row r, as rank more steps of the sum over
 * k, while the sum is in registers. Stacks as the product's own. */
typedef struct fmoe_lora_term {
    fmoe_rows l; /* [R, rank] */
    fmoe_stack b[2];
} fmoe_lora_term;

/* A matrix that an epilogue reads or writes where its product has rows and columns; in bytes. */
typedef struct fmoe_epilogue_operand {
    const char *base; /* NULL: none */
    int64_t stride, element;
} fmoe_epilogue_operand;

enum { FMOE_EPILOGUE_OPERANDS = 5 };

/* C[r, n] = sum_k A[r,k] W[e(r)][n,k], handed to `epilogue` in blocks [rows][64]. With two stacks the block is 32
 * columns of the first and the same 32 of the second (gate and up). */
typedef struct fmoe_gemm_job {
    const fmoe_plan_impl *p;
    const fmoe_cpu_plan *cpu;
    const fmoe_groups *g;
    fmoe_scratch *scratch;
    fmoe_rows a;
    fmoe_stack w[2];
    int n_w;
    fmoe_lora_term lora; /* b[0].t NULL: none */
    void (*epilogue)(void *ctx, int64_t e, int64_t row, int64_t rows, int64_t n0, int64_t n, float *c);
    void *ctx;
    fmoe_epilogue_operand
        operands[FMOE_EPILOGUE_OPERANDS]; /* of `epilogue`, prefetched before it where there is time */
} fmoe_gemm_job;

void fmoe_grouped_gemm(const fmoe_gemm_job *job);

/* A block of 64 columns, packed as these products read it (prepacked.c): its bytes over all of K, and itself; columns
 * [n0, ...) of one matrix, or 32 of each of two. `pointers`: room for FMOE_KC_PAIRS. */
int64_t fmoe_prepacked_block_bytes(const fmoe_cpu_plan *cpu, const fmoe_view *v, int dtype);
void fmoe_prepack_block(const fmoe_cpu_plan *cpu, const fmoe_view v[2], int n_v, int dtype, int64_t n0, char *panels,
                        const void **pointers);

/* out[t, n] = sum over the rows r of token t, in order of their experts, of p[r] * sum_k A[r,k] W[e(r)][n,k]. Each task
 * owns 64 columns of a range of tokens and adds up in f32. With two stacks, k runs through the first, then through the
 * second. */
typedef struct fmoe_combine_job {
    const fmoe_plan_impl *p;
    const fmoe_cpu_plan *cpu;
    const fmoe_groups *g;
    fmoe_scratch *scratch;
    fmoe_rows a;
    fmoe_stack w[2];
    int n_w;
    fmoe_lora_term lora;        /* b[0].t NULL: none; b[0] alone, whatever n_w is */
    const fmoe_tensor *weights; /* p[t*k+j]; NULL: 1 */
    const fmoe_tensor *bias;    /* [E,N] added before p; NULL: none */
    const fmoe_tensor *out;     /* [T,N] */
    bool add;                   /* add to out instead of overwriting it */
    int steps;                  /* y, and p * y where p is of that type, are rounded to this dtype; 0: they are not */
} fmoe_combine_job;

/* Made ready, and done as part of a pool: `fn` with the run. T may be 0. */
typedef struct fmoe_combine_run {
    const fmoe_combine_job *job;
    void (*fn)(void *run, int worker);
    fmoe_tasks tasks;
    int64_t blocks, width, tokens; /* column blocks, their columns; tokens of a task */
    int64_t panels;                /* of 64 columns, at a time */
} fmoe_combine_run;

int64_t fmoe_combine_columns(const fmoe_cpu_plan *cpu, int64_t N); /* of a task, given room for its sums */
void fmoe_combine_prepare(fmoe_combine_run *run, const fmoe_combine_job *job);
void fmoe_grouped_gemm_combine(const fmoe_combine_job *job);

/* The same two by weights in place (inplace_amx.c); false: not for these weights, nothing was done. */
bool fmoe_inplace_gemm(const fmoe_gemm_job *job);
bool fmoe_inplace_combine_prepare(fmoe_combine_run *run, const fmoe_combine_job *job);
/* Room for gathered rows of up to K elements, where the plan gathers. */
void fmoe_gather_carve(fmoe_groups *g, fmoe_carve *c, const fmoe_plan_impl *p, int64_t slots, int64_t K);
/* Room for T rows of K elements in f32, where the plan's are not as products like them. */
void fmoe_widen_carve(fmoe_groups *g, fmoe_carve *c, const fmoe_plan_impl *p, int64_t T, int64_t K);
/* Rows of K elements, gathered now if they are taken by an index and the plan gathers. */
fmoe_rows fmoe_gather(const fmoe_plan_impl *p, const fmoe_groups *g, const fmoe_rows *a, int64_t K);

/* The same for rows that are wanted in f32, and not a multiple of a page apart. */
fmoe_rows fmoe_widen_rows(const fmoe_plan_impl *p, const fmoe_groups *g, const fmoe_rows *a, int64_t K);

/* Shared by both forms of combine: the first row of group e whose token is not below t; the first expert from e on that
 * has rows of tokens [t0, t1), or E; finished sums c of rows [row, row+rows), added to those of their tokens in the
 * scratch; those of tokens [t0, t1), written. */
int64_t fmoe_first_row(const fmoe_groups *g, int64_t e, int64_t t);
int64_t fmoe_next_expert(const fmoe_groups *g, int64_t e, int64_t t0, int64_t t1);
void fmoe_combine_rows(const fmoe_combine_job *job, const fmoe_scratch *s, float *c, int64_t e, int64_t row,
                       int64_t rows, int64_t n0, int64_t n, int64_t t0);
void fmoe_combine_store(const fmoe_combine_job *job, const fmoe_scratch *s, int64_t t0, int64_t t1, int64_t n0,
                        int64_t n);

/* dW[e][n,k] = sum over the rows of e of A[r,n] B[r,k]: weight gradients. A starts at column a_column of its rows. */
typedef struct fmoe_wgrad_job {
    const fmoe_plan_impl *p;
    const fmoe_cpu_plan *cpu;
    const fmoe_groups *g;
    fmoe_scratch *scratch;
    fmoe_rows a, b;
    int64_t a_column;
    fmoe_stack dw;
    bool accumulate;
} fmoe_wgrad_job;

typedef struct fmoe_wgrad_run {
    const fmoe_wgrad_job *job;
    fmoe_tasks tasks;
    int64_t *ends;
} fmoe_wgrad_run;

void fmoe_wgrad_prepare(fmoe_wgrad_run *run, const fmoe_wgrad_job *job, int i); /* i: which of the groups' ends */
void fmoe_wgrad_worker(void *run, int worker);
void fmoe_wgrad(const fmoe_wgrad_job *job);

/* dbias[e][n] = sum over the rows of e of s[r] * A[r,n]; s NULL: 1. */
void fmoe_column_sums(const fmoe_plan_impl *p, const fmoe_groups *g, const fmoe_rows *a, const fmoe_tensor *weights,
                      const fmoe_tensor *dbias, bool list, bool accumulate);

#endif
