/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu.h - the inside of the CPU backend: its plans, groups of rows, and the three products everything is made of
 * (gemm.c). */
#ifndef FMOE_CPU_H
#define FMOE_CPU_H

#include <stdatomic.h>

#include "backend.h"
#include "cpu/kernels/kernels.h"
#include "util.h"

/* What plan_init settles. */
typedef struct fmoe_cpu_plan {
    fmoe_kernels k;
    int threads;
    bool pairs;    /* products in bf16 pairs: buffers between products are bf16; else they are f32 */
    bool gather;   /* rows are gathered before a product instead of by pointers: AMX wants them equally far apart */
    int work_type; /* fmoe_dtype of those buffers */
    bool intel;    /* whose cores want to be fed in other ways (turns_avx512.h, line.c) */
} fmoe_cpu_plan;

static inline const fmoe_cpu_plan *fmoe_cpu(const fmoe_plan_impl *p) { return p->priv; }

/* The same in f32, whatever the plan's: for the few products whose operands are of two types. */
static inline fmoe_cpu_plan fmoe_cpu_wide(const fmoe_cpu_plan *cpu)
{
    fmoe_cpu_plan wide = *cpu;
    wide.pairs = false;
    wide.work_type = FMOE_F32;
    return wide;
}

/* Bytes of a panel of kc rows. */
static inline size_t fmoe_panel_bytes(const fmoe_cpu_plan *cpu, int64_t kc)
{
    return (size_t)(cpu->pairs ? (kc + 1) / 2 : kc) * FMOE_NB * 4;
}

/* ---- threads (pool.c) ---- */

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
    bool brief; /* nobody begins with it: whoever did would come late to a part of few long tasks */
} fmoe_part;

void fmoe_parallel_parts(const fmoe_plan_impl *p, const fmoe_part *parts, int n);

/* for_rows: fn(ctx, begin, end) over [0,n) in pieces of `grain`. For work that is independent row by row. */
void fmoe_for_rows(const fmoe_plan_impl *p, int64_t n, int64_t grain, void (*fn)(void *ctx, int64_t begin, int64_t end),
                   void *ctx);

/* ---- rows grouped by expert (groups.c) ---- */

enum { FMOE_ENDS = 7 }; /* weight gradients at a time: of W1 in two halves, W2, and the factors of adapters */

typedef struct fmoe_groups {
    int64_t E, R;   /* R: rows in groups */
    int64_t active; /* groups that have any */
    int64_t *off;   /* [E+1] first row of each group */
    int64_t *order; /* [E] groups from large to small: the order tasks are handed out in */
    int64_t *ends;  /* [FMOE_ENDS][E] scratch: running numbers of tasks of a product, in that order */
    int64_t *slot;  /* [T*k] row -> t*k+j; in each group ascending */
    int64_t *token; /* [T*k] row -> t */
    /* Where the plan gathers rows (else NULL): room for them, of up to gathered_k elements, in rows or in tiles, and
     * the first block of tiles of each group [E+1]. */
    void *gathered;
    int64_t gathered_k, *block;
    float *wide; /* room for the rows of every token in f32, wide_rows of wide_k (wide.c); NULL: not wanted */
    int64_t wide_rows, wide_k;
} fmoe_groups;

void fmoe_groups_carve(fmoe_groups *g, fmoe_carve *c, int64_t E, int64_t slots);
/* Validate ids and sort slots by expert, stable. Skipped slots get no row. Writes only into g. */
fmoe_status fmoe_groups_from_ids(fmoe_groups *g, const fmoe_plan_impl *p, const fmoe_tensor *ids);
/* Room for gathered rows of up to K elements, where the plan gathers. */
void fmoe_gather_carve(fmoe_groups *g, fmoe_carve *c, const fmoe_plan_impl *p, int64_t slots, int64_t K);
/* Room for T rows of K elements in f32, where the plan's are not as products like them. */
void fmoe_wide_carve(fmoe_groups *g, fmoe_carve *c, const fmoe_plan_impl *p, int64_t T, int64_t K);
/* From group sizes; sizes NULL: one group of all rows. off and order only. */
fmoe_status fmoe_groups_from_sizes(fmoe_groups *g, const fmoe_tensor *sizes, int cumulative, int64_t rows);

/* ---- operands ---- */

/* One expert's matrix: element (n,k) at p + (n*sn + k*sk) elements, N x K. Packed (block > 0): p is its first panel,
 * the panels of a block of columns lie one after another, those of the next block `block` bytes on, and sk says how the
 * matrix lay that they were made of (1: along k). */
typedef struct fmoe_view {
    char *p;
    int64_t N, K, sn, sk;
    int64_t block;
} fmoe_view;

/* The matrices of all experts: a stack [E,N,K], a list of E tensors [N,K], or packed ones. */
typedef struct fmoe_stack {
    const fmoe_tensor *t;
    bool list;
    bool swap;         /* exchange the roles of N and K */
    int64_t row, rows; /* only rows [row, row+rows) of the stored N dimension: one half of W1. rows 0: all */
    int dtype;
    fmoe_view packed; /* of expert 0, where its block is not 0; the others `expert` bytes on, each */
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
/* ---- scratch of one worker ---- */

typedef struct fmoe_scratch {
    void *panel;           /* two of FMOE_PANEL_BYTES: one multiplied, one packed */
    void *left;            /* FMOE_LEFT_PANELS of them: the other operand of a weight gradient */
    float *c;              /* [FMOE_PANELS * FMOE_TASK_ROWS][FMOE_NB], at least FMOE_ROW_BLOCK rows */
    float *sums;           /* [panels][tokens][FMOE_NB]: output columns owned by a task */
    int64_t room;          /* for sums */
    float *widened;        /* [FMOE_WIDEN_ROWS][FMOE_KC]: rows of A brought to f32 */
    const void **pointers; /* [FMOE_KC_PAIRS] */
} fmoe_scratch;

enum {
    FMOE_ROW_BLOCK = 512,
    FMOE_TASK_ROWS = 144,
    FMOE_PANELS = 4, /* of 64 columns, at a time, where columns are neighbours in memory */
    FMOE_TOKEN_BLOCK = 2048,
    FMOE_WIDEN_ROWS = 48,
    FMOE_LEFT_PANELS = 8
};

/* s: one per worker, threads of them, with room for so many sums. */
void fmoe_scratch_carve(fmoe_scratch *s, fmoe_carve *c, const fmoe_plan_impl *p, int64_t sums);

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

/* A range of them, long at first and down to one task at the end: neighbours read the same rows and write the same
 * cache lines and pages, and no worker is left with much when the others are done. */
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

/* ---- the three products (gemm.c and line.c, outer.c) ---- */

/* A low-rank term of a product: L[r, :] . B[e(r)][n, :] is added to column n of row r, as rank more steps of the sum
 * over k, while the product is in registers. Stacks as the product's own. */
typedef struct fmoe_low {
    fmoe_rows l; /* [R, rank] */
    fmoe_stack b[2];
} fmoe_low;

/* A matrix that an epilogue reads or writes where its product has rows and columns; in bytes. */
typedef struct fmoe_touched {
    const char *base; /* NULL: none */
    int64_t stride, element;
} fmoe_touched;

enum { FMOE_TOUCHED = 5 };

/* C[r, n] = sum_k A[r,k] W[e(r)][n,k], handed to `finish` in blocks [rows][64]. With two stacks the block is 32 columns
 * of the first and the same 32 of the second (gate and up). */
typedef struct fmoe_in_job {
    const fmoe_plan_impl *p;
    const fmoe_cpu_plan *cpu;
    const fmoe_groups *g;
    fmoe_scratch *scratch;
    fmoe_rows a;
    fmoe_stack w[2];
    int n_w;
    fmoe_low low; /* b[0].t NULL: none */
    void (*finish)(void *ctx, int64_t e, int64_t row, int64_t rows, int64_t n0, int64_t n, float *c);
    void *ctx;
    fmoe_touched touched[FMOE_TOUCHED]; /* by `finish`, fetched before it where there is time */
} fmoe_in_job;

void fmoe_multiply_in(const fmoe_in_job *job);

/* A block of 64 columns, packed as these products read it (packed.c): its bytes over all of K, and itself; columns
 * [n0, ...) of one matrix, or 32 of each of two. `pointers`: room for FMOE_KC_PAIRS. */
int64_t fmoe_packed_block(const fmoe_cpu_plan *cpu, const fmoe_view *v, int dtype);
void fmoe_pack_block(const fmoe_cpu_plan *cpu, const fmoe_view v[2], int n_v, int dtype, int64_t n0, char *panels,
                     const void **pointers);

/* out[t, n] = sum over the rows r of token t, in order of their experts, of p[r] * sum_k A[r,k] W[e(r)][n,k]. Each task
 * owns 64 columns of a range of tokens and adds up in f32. With two stacks, k runs through the first, then through the
 * second. */
typedef struct fmoe_out_job {
    const fmoe_plan_impl *p;
    const fmoe_cpu_plan *cpu;
    const fmoe_groups *g;
    fmoe_scratch *scratch;
    fmoe_rows a;
    fmoe_stack w[2];
    int n_w;
    fmoe_low low;               /* b[0].t NULL: none; b[0] alone, whatever n_w is */
    const fmoe_tensor *weights; /* p[t*k+j]; NULL: 1 */
    const fmoe_tensor *bias;    /* [E,N] added before p; NULL: none */
    const fmoe_tensor *out;     /* [T,N] */
    bool add;                   /* add to out instead of overwriting it */
    int steps;                  /* y, and p * y where p is of that type, are rounded to this dtype; 0: they are not */
} fmoe_out_job;

/* Made ready, and done as part of a pool: `fn` with the run. T may be 0. */
typedef struct fmoe_out_run {
    const fmoe_out_job *job;
    void (*fn)(void *run, int worker);
    fmoe_tasks tasks;
    int64_t blocks, width, tokens; /* column blocks, their columns; tokens of a task */
    int64_t panels;                /* of 64 columns, at a time */
} fmoe_out_run;

int64_t fmoe_out_columns(const fmoe_cpu_plan *cpu, int64_t N); /* of a task, given room for its sums */
void fmoe_out_prepare(fmoe_out_run *run, const fmoe_out_job *job);
void fmoe_multiply_out(const fmoe_out_job *job);

/* The same two with weights where they lie (direct.c); false: not for these weights, nothing was done. */
bool fmoe_direct_in(const fmoe_in_job *job);
bool fmoe_direct_out(fmoe_out_run *run, const fmoe_out_job *job);
/* Rows of K elements, gathered now if they are taken by an index and the plan gathers. */
fmoe_rows fmoe_gather(const fmoe_plan_impl *p, const fmoe_groups *g, const fmoe_rows *a, int64_t K);

/* The same for rows that are to be in f32, and well apart. */
fmoe_rows fmoe_wide_rows(const fmoe_plan_impl *p, const fmoe_groups *g, const fmoe_rows *a, int64_t K);

/* Shared by both forms of `out`: the first row of group e whose token is not below t; the first expert from e on that
 * has rows of tokens [t0, t1), or E; finished sums c of rows [row, row+rows), added to their tokens' in the scratch;
 * those of tokens [t0, t1), written. */
int64_t fmoe_first_row(const fmoe_groups *g, int64_t e, int64_t t);
int64_t fmoe_next_expert(const fmoe_groups *g, int64_t e, int64_t t0, int64_t t1);
void fmoe_out_rows(const fmoe_out_job *job, const fmoe_scratch *s, float *c, int64_t e, int64_t row, int64_t rows,
                   int64_t n0, int64_t n, int64_t t0);
void fmoe_out_store(const fmoe_out_job *job, const fmoe_scratch *s, int64_t t0, int64_t t1, int64_t n0, int64_t n);

/* dW[e][n,k] = sum over the rows of e of A[r,n] B[r,k]: weight gradients. A starts at column a_column of its rows. */
typedef struct fmoe_outer_job {
    const fmoe_plan_impl *p;
    const fmoe_cpu_plan *cpu;
    const fmoe_groups *g;
    fmoe_scratch *scratch;
    fmoe_rows a, b;
    int64_t a_column;
    fmoe_stack dw;
    bool accumulate;
} fmoe_outer_job;

typedef struct fmoe_outer_run {
    const fmoe_outer_job *job;
    fmoe_tasks tasks;
    int64_t *ends;
} fmoe_outer_run;

void fmoe_outer_prepare(fmoe_outer_run *run, const fmoe_outer_job *job, int i); /* i: which of the groups' ends */
void fmoe_outer_worker(void *run, int worker);
void fmoe_multiply_outer(const fmoe_outer_job *job);

/* dbias[e][n] = sum over the rows of e of s[r] * A[r,n]; s NULL: 1. */
void fmoe_column_sums(const fmoe_plan_impl *p, const fmoe_groups *g, const fmoe_rows *a, const fmoe_tensor *weights,
                      const fmoe_tensor *dbias, bool list, bool accumulate);

/* ---- small helpers ---- */

/* What FMOE_ROUND_STEPS rounds to, 0 without it (and in f32, where there is nothing to round). */
static inline int fmoe_steps(const fmoe_plan_impl *p)
{
    return (p->d.flags & FMOE_ROUND_STEPS) && p->d.dtype != FMOE_F32 ? p->d.dtype : 0;
}

static inline fmoe_act_params fmoe_act_of(const fmoe_plan_impl *p)
{
    return (fmoe_act_params){p->d.act, p->d.act_alpha, p->d.act_limit, fmoe_steps(p)};
}

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

/* ---- the operations, one file each ---- */

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

/* Their workspaces: the same carve walks, measured. */
void fmoe_cpu_route_carve(const fmoe_plan_impl *p, fmoe_carve *c);
void fmoe_cpu_permute_carve(const fmoe_plan_impl *p, int64_t T, fmoe_carve *c);
void fmoe_cpu_gmm_carve(const fmoe_plan_impl *p, fmoe_carve *c);
void fmoe_cpu_experts_forward_carve(const fmoe_plan_impl *p, int64_t T, fmoe_carve *c);
void fmoe_cpu_experts_backward_carve(const fmoe_plan_impl *p, int64_t T, fmoe_carve *c);

/* experts.c: shared by both passes. The first product with its activation: h (plan's dtype) and a (work type), either
 * may be NULL; l1: room for [R, rank1]. */
void fmoe_experts_up(const fmoe_plan_impl *p, const fmoe_experts_args *args, const fmoe_groups *g,
                     fmoe_scratch *scratch, void *l1, void *h, void *a);
fmoe_stack fmoe_w1_stack(const fmoe_plan_impl *p, const fmoe_weights *w, int half); /* 0 gate, 1 up */
fmoe_stack fmoe_w2_stack(const fmoe_weights *w);

/* adapters.c: rows of A through one factor of an adapter, times its scale, into l [R, rank] of the work type; swap:
 * through its transpose. */
fmoe_rows fmoe_through(const fmoe_plan_impl *p, const fmoe_groups *g, fmoe_scratch *scratch, fmoe_rows a,
                       const fmoe_tensor *factor, bool swap, float scale, void *l);
fmoe_stack fmoe_factor(const fmoe_tensor *factor, bool swap);

/* Factors a1, b1, a2, b2 in f32 beside a plan of 16 bits: w with those in the plan's dtype, of experts that have rows.
 */
typedef struct fmoe_factors {
    void *room[4];
    fmoe_tensor t[4];
    int64_t strides[4][3];
} fmoe_factors;
void fmoe_factors_carve(fmoe_factors *f, fmoe_carve *c, const fmoe_plan_impl *p);
fmoe_weights fmoe_narrow_factors(const fmoe_plan_impl *p, const fmoe_groups *g, fmoe_factors *f, const fmoe_weights *w);

/* packed.c: the weights of a layer as a packed buffer. Its bytes, 0 where the plan reads weights as they are stored;
 * whether a buffer is one of this plan's; and its stacks, W1's two halves as one where they are not whole. */
fmoe_status fmoe_cpu_packed_bytes(const fmoe_plan_impl *p, size_t *bytes);
fmoe_status fmoe_cpu_pack(const fmoe_plan_impl *p, const fmoe_pack_args *args, const fmoe_run *run);
fmoe_status fmoe_cpu_packed_check(const fmoe_plan_impl *p, const char *name, const void *packed, size_t bytes);
fmoe_stack fmoe_packed_w1(const fmoe_plan_impl *p, const void *packed, bool *whole);
fmoe_stack fmoe_packed_w2(const fmoe_plan_impl *p, const void *packed);
bool fmoe_w1_whole(const fmoe_plan_impl *p,
                   const fmoe_weights *w); /* one stack in stored order: interleaved or ungated */

#endif
