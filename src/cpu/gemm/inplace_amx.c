/* SPDX-License-Identifier: Apache-2.0
 *
 * inplace_amx.c - both grouped products on AMX, with k-major weights multiplied in place (kernels.h: gemm_inplace).
 *
 * First the activations are packed into tiles, 16 rows of an expert at a time, once for all columns. Then tasks as in
 * grouped_gemm.c and combine.c: expert x 64 columns x rows, or columns x tokens; a task streams its weights from
 * memory, 32 of them at a time, and multiplies the rows by them. */
#include "cpu/gemm/jobs.h"

/* ---- gathered activations: in tiles, or in rows for products by packed panels ---- */

static int64_t steps_of(int64_t K) { return fmoe_ceil_div(K, 32); }

/* Enough for R rows in groups that start a block each: every non-empty group may leave one block incomplete. */
static int64_t most_blocks(int64_t E, int64_t R) { return R / 16 + fmoe_min(E, R); }

void fmoe_gather_carve(fmoe_groups *g, fmoe_carve *c, const fmoe_plan_impl *p, int64_t slots, int64_t K)
{
    if (!fmoe_cpu(p)->gather) return;
    int64_t tiles = 0;
    if (__builtin_mul_overflow(most_blocks(p->d.E, slots), steps_of(K), &tiles)) c->overflow = true;
    g->gathered_k = K;
    g->block = fmoe_carve_take(c, p->d.E + 1, sizeof *g->block);
    g->gathered = fmoe_carve_take(c, tiles, 1024);
}

typedef struct tiles_run {
    const fmoe_kernels *k;
    const fmoe_groups *g;
    const fmoe_rows *a;
    int64_t K;
    fmoe_tasks tasks;
} tiles_run;

static void tiles_worker(void *arg, int worker)
{
    (void)worker;
    tiles_run *run = arg;
    const fmoe_groups *g = run->g;
    int64_t block, e = 0;
    while (fmoe_claim(&run->tasks, &block)) {
        while (block >= g->block[e + 1]) e++;
        const int64_t row = g->off[e] + (block - g->block[e]) * 16, n = fmoe_min(16, g->off[e + 1] - row);
        const void *rows[16];
        for (int64_t i = 0; i < n; i++) rows[i] = fmoe_row(run->a, g, e, row + i);
        run->k->pack_tiles((char *)g->gathered + block * steps_of(run->K) * 1024, run->K, rows, n);
    }
}

static void make_tiles(const fmoe_plan_impl *p, const fmoe_cpu_plan *cpu, const fmoe_groups *g, const fmoe_rows *a,
                       int64_t K)
{
    g->block[0] = 0;
    for (int64_t e = 0; e < g->E; e++) g->block[e + 1] = g->block[e] + fmoe_ceil_div(g->off[e + 1] - g->off[e], 16);
    tiles_run run = {.k = &cpu->k, .g = g, .a = a, .K = K, .tasks.n = g->block[g->E]};
    if (run.tasks.n) fmoe_parallel(p, tiles_worker, &run);
}

/* The tiles from the block on that row is in; *lead: how many rows before it, *blocks: rows of the blocks that `rows`
 * from there are in. */
static const void *tiles_at(const fmoe_groups *g, int64_t e, int64_t row, int64_t rows, int64_t K, int64_t *lead,
                            int64_t *blocks)
{
    const int64_t at = row - g->off[e];
    *lead = at % 16;
    *blocks = fmoe_min(fmoe_ceil_div(*lead + rows, 16) * 16, g->off[e + 1] - row + *lead);
    return (const char *)g->gathered + (g->block[e] + at / 16) * steps_of(K) * 1024;
}

typedef struct gather_run {
    const fmoe_groups *g;
    const fmoe_rows *a;
    size_t bytes;
} gather_run;

static void copy_gathered_rows(void *ctx, int64_t begin, int64_t end)
{
    const gather_run *run = ctx;
    for (int64_t r = begin; r < end; r++)
        memcpy((char *)run->g->gathered + (size_t)r * run->bytes, fmoe_row(run->a, run->g, 0, r), run->bytes);
}

fmoe_rows fmoe_gather(const fmoe_plan_impl *p, const fmoe_groups *g, const fmoe_rows *a, int64_t K)
{
    if (!g->gathered || !a->index || K > g->gathered_k) return *a;
    gather_run run = {g, a, (size_t)K * fmoe_dtype_size(a->dtype)};
    fmoe_for_rows(p, g->R, 16, copy_gathered_rows, &run);
    return fmoe_rows_buffer(g->gathered, K, a->dtype);
}

/* ---- which weights ---- */

/* Every expert's matrix is k-major, and there is room for rows of that many k. LoRA terms are not done in place. */
static bool can_run_inplace(const fmoe_groups *g, const fmoe_cpu_plan *cpu, const fmoe_stack *w,
                            const fmoe_lora_term *lora)
{
    fmoe_form_input in = {.has = cpu->has, .pairs = cpu->pairs, .gather = cpu->gather, .rows = 1, .matrices = 1};
    if (!g->gathered) return false;
    for (int64_t e = 0; e < (w->list ? g->E : 1); e++) {
        const fmoe_view v = fmoe_stack_at(w, e);
        in.kmajor = v.sk == 1 && v.K > 1;
        in.room_for_tiles = !lora->b[0].t && v.K <= g->gathered_k;
        if (fmoe_choose_form(&in) != FMOE_FORM_TILES) return false;
    }
    return true;
}

static const char *weights_at(const fmoe_view *v, int64_t n0) { return v->coded ? NULL : v->p + n0 * v->sn * 2; }

/* c[rows][64]: up to 64 columns of v; `next`: the weights after them. */
static void inplace_multiply(const fmoe_cpu_plan *cpu, const fmoe_scratch *s, const fmoe_view *v, const void *tiles,
                             int64_t rows, int64_t n0, int64_t n, float *c, const char *next)
{
    if (v->coded) {
        const int64_t apart = fmoe_ceil_div(v->K, 32) * 32;
        const fmoe_code_block now = {v, n0, n, 0, v->K};
        /* A swapped stack is k-major where its rows have one code each: these are one column, one after another. */
        fmoe_decode(cpu, &now, s->decoded, v->coded->swap ? 1 : apart);
        cpu->k.gemm_inplace(rows, v->K, tiles, s->decoded, apart * 2, n, c, FMOE_NB, NULL);
        return;
    }
    cpu->k.gemm_inplace(rows, v->K, tiles, weights_at(v, n0), v->sn * 2, n, c, FMOE_NB, next);
}

/* ---- grouped_gemm ---- */

typedef struct inplace_run {
    const fmoe_gemm_job *job;
    fmoe_tasks tasks;
    int64_t *ends;
    int64_t rows; /* of a task, at most: their tiles stay in half of a 2 MiB L2 */
} inplace_run;

typedef struct inplace_task {
    fmoe_view v[2];
    int64_t e, row, rows, n0, n;
} inplace_task;

typedef struct inplace_walk {
    inplace_run *run;
    int64_t at, end, position;
} inplace_walk;

static bool inplace_next(inplace_walk *w, inplace_task *t)
{
    inplace_run *run = w->run;
    const fmoe_gemm_job *job = run->job;
    const fmoe_groups *g = job->g;
    if (w->at == w->end && !fmoe_claim_some(&run->tasks, job->cpu->threads, &w->at, &w->end)) return false;
    while (w->at >= run->ends[w->position]) w->position++;
    const int64_t e = g->order[w->position], index = w->at++ - (w->position ? run->ends[w->position - 1] : 0);
    *t = (inplace_task){.v = {fmoe_stack_at(&job->w[0], e), fmoe_stack_at(&job->w[job->n_w - 1], e)}, .e = e};
    const int64_t width = FMOE_NB / job->n_w, blocks = fmoe_ceil_div(t->v[0].N, width);
    t->n0 = index % blocks * width;
    t->n = fmoe_min(width, t->v[0].N - t->n0);
    t->row = g->off[e] + index / blocks * run->rows;
    t->rows = fmoe_min(run->rows, g->off[e + 1] - t->row);
    return true;
}

static void inplace_worker(void *arg, int worker)
{
    inplace_walk walk = {.run = arg};
    const fmoe_gemm_job *job = walk.run->job;
    const int64_t width = FMOE_NB / job->n_w;
    float *c = job->scratch[worker].c;
    inplace_task now, next = {0};
    for (bool more = inplace_next(&walk, &now); more; now = next) {
        more = inplace_next(&walk, &next);
        int64_t lead, blocks; /* none, and all of now.rows: tasks begin and end with a block */
        const void *tiles = tiles_at(job->g, now.e, now.row, now.rows, now.v[0].K, &lead, &blocks);
        if (now.n < width) memset(c, 0, (size_t)(now.rows * FMOE_NB) * sizeof *c);
        for (int i = 0; i < job->n_w; i++) {
            const bool last = i + 1 == job->n_w;
            const fmoe_view *then = last ? &next.v[0] : &now.v[1];
            const char *prefetch = last && !more ? NULL : weights_at(then, last ? next.n0 : now.n0);
            inplace_multiply(job->cpu, &job->scratch[worker], &now.v[i], tiles, now.rows, now.n0, now.n, c + i * width,
                             prefetch && then->sn == now.v[i].sn ? prefetch : NULL);
        }
        job->epilogue(job->ctx, now.e, now.row, now.rows, now.n0, now.n, c);
    }
}

bool fmoe_inplace_gemm(const fmoe_gemm_job *job)
{
    const fmoe_groups *g = job->g;
    if (!can_run_inplace(g, job->cpu, &job->w[0], &job->lora) ||
        !can_run_inplace(g, job->cpu, &job->w[job->n_w - 1], &job->lora))
        return false;
    const int64_t K = fmoe_stack_at(&job->w[0], 0).K;
    make_tiles(job->p, job->cpu, g, &job->a, K);
    inplace_run run = {.job = job, .ends = g->ends};
    run.rows = fmoe_min(FMOE_ROW_BLOCK, fmoe_max(1, FMOE_TILES_L2 / (64 * steps_of(K)) / 32) * 32);
    int64_t n = 0;
    for (int64_t i = 0; i < g->E; i++) {
        const int64_t e = g->order[i], rows = g->off[e + 1] - g->off[e];
        n += fmoe_ceil_div(fmoe_stack_at(&job->w[0], e).N, FMOE_NB / job->n_w) * fmoe_ceil_div(rows, run.rows);
        run.ends[i] = n;
    }
    run.tasks.n = n;
    if (n) fmoe_parallel(job->p, inplace_worker, &run);
    return true;
}

/* ---- combine ---- */

/* Tokens [t0, t1) and columns [n0, n0+n) of a task. */
typedef struct inplace_columns {
    int64_t t0, t1, n0, n;
} inplace_columns;

/* The rows of expert e, added to the sums of their tokens, 256 at a time; `after`: the expert that comes next, or E. */
static void inplace_combine_expert(const fmoe_combine_job *job, fmoe_scratch *s, const inplace_columns *t, int64_t e,
                                   int64_t after)
{
    const fmoe_groups *g = job->g;
    const fmoe_view v = fmoe_stack_at(&job->w[0], e), next = fmoe_stack_at(&job->w[0], after < g->E ? after : e);
    const char *prefetch = after < g->E && next.sn == v.sn ? weights_at(&next, t->n0) : NULL;
    const int64_t end = fmoe_first_row(g, e, t->t1);
    for (int64_t row = fmoe_first_row(g, e, t->t0), rows; row < end; row += rows) {
        int64_t lead, blocks;
        rows = fmoe_min(FMOE_ROW_BLOCK / 2, end - row);
        const void *tiles = tiles_at(g, e, row, rows, v.K, &lead, &blocks);
        inplace_multiply(job->cpu, s, &v, tiles, blocks, t->n0, t->n, s->c,
                         row + rows < end ? weights_at(&v, t->n0) : prefetch);
        fmoe_combine_rows(job, s, s->c + lead * FMOE_NB, e, row, rows, t->n0, t->n, t->t0);
    }
}

static void inplace_combine_worker(void *arg, int worker)
{
    fmoe_combine_run *run = arg;
    const fmoe_combine_job *job = run->job;
    const fmoe_groups *g = job->g;
    fmoe_scratch *s = &job->scratch[worker];
    const int64_t T = job->out->shape[0], N = job->out->shape[1];
    int64_t task;
    while (fmoe_claim(&run->tasks, &task)) {
        const int64_t n0 = task % run->blocks * run->width, t0 = task / run->blocks * run->tokens;
        const inplace_columns t = {t0, fmoe_min(T, t0 + run->tokens), n0, fmoe_min(run->width, N - n0)};
        memset(s->sums, 0, (size_t)((t.t1 - t0) * FMOE_NB) * sizeof *s->sums);
        for (int64_t e = fmoe_next_expert(g, 0, t0, t.t1), after; e < g->E; e = after) {
            after = fmoe_next_expert(g, e + 1, t0, t.t1);
            inplace_combine_expert(job, s, &t, e, after);
        }
        fmoe_combine_store(job, s, t0, t.t1, n0, t.n);
    }
}

bool fmoe_inplace_combine_prepare(fmoe_combine_run *run, const fmoe_combine_job *job)
{
    const fmoe_groups *g = job->g;
    if (job->n_w != 1 || !can_run_inplace(g, job->cpu, &job->w[0], &job->lora)) return false;
    const int64_t T = job->out->shape[0], N = job->out->shape[1], threads = job->cpu->threads;
    make_tiles(job->p, job->cpu, g, &job->a, fmoe_stack_at(&job->w[0], 0).K);
    /* Few tasks for the threads: narrower ones, which cost no weight a second reading; then fewer tokens, which do. */
    const int64_t parts = fmoe_ceil_div(T, FMOE_TOKEN_BLOCK);
    *run = (fmoe_combine_run){.job = job, .fn = inplace_combine_worker};
    run->width = fmoe_ceil_div(N, FMOE_NB) * parts >= 2 * threads ? FMOE_NB : FMOE_NB / 2;
    run->blocks = fmoe_ceil_div(N, run->width);
    const int64_t splits = fmoe_max(parts, 2 * threads / fmoe_max(run->blocks, 1));
    run->tokens = fmoe_max(FMOE_TOKENS_LEAST, fmoe_ceil_div(T, splits));
    run->tasks.n = run->blocks * fmoe_ceil_div(T, run->tokens);
    return true;
}
