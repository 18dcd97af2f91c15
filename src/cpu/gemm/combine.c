/* SPDX-License-Identifier: Apache-2.0
 *
 * combine.c - a grouped product whose rows are weighted and added up by token (jobs.h: what it computes). A task owns
 * columns of a range of tokens and takes the experts of these tokens one after another. */
#include "cpu/gemm/pipeline.h"

/* First row of group e whose token is not below t. */
int64_t fmoe_first_row(const fmoe_groups *g, int64_t e, int64_t t)
{
    int64_t lo = g->off[e], hi = g->off[e + 1];
    while (lo < hi) {
        const int64_t mid = lo + (hi - lo) / 2;
        if (g->token[mid] < t) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

/* The first expert from e on that has rows of tokens [t0, t1). */
int64_t fmoe_next_expert(const fmoe_groups *g, int64_t e, int64_t t0, int64_t t1)
{
    while (e < g->E && fmoe_first_row(g, e, t0) == fmoe_first_row(g, e, t1)) e++;
    return e;
}

typedef struct combine_walk {
    fmoe_combine_run *run;
    fmoe_step at;       /* the last one handed out */
    int half;           /* stack it is of */
    int64_t n0, n1;     /* columns of its task */
    int64_t begin, end; /* rows of its expert */
    int64_t e;          /* the expert after it */
    int64_t block;      /* rows of its expert's steps */
} combine_walk;

/* Claim the next task that has rows, and stand before its first expert. Tasks without any are zeros. */
static bool combine_claim(combine_walk *w)
{
    const fmoe_combine_job *job = w->run->job;
    const int64_t T = job->out->shape[0], N = job->out->shape[1];
    int64_t task;
    if (!fmoe_claim(&w->run->tasks, &task)) return false;
    w->at = (fmoe_step){.n_v = 1, .opens = true};
    w->n0 = task % w->run->blocks * w->run->width;
    w->n1 = fmoe_min(N, w->n0 + w->run->width);
    w->at.t0 = task / w->run->blocks * w->run->tokens;
    w->at.t1 = fmoe_min(T, w->at.t0 + w->run->tokens);
    w->e = fmoe_next_expert(job->g, 0, w->at.t0, w->at.t1);
    return true;
}

/* The next expert of the task, or of the next task. */
static bool combine_expert(combine_walk *w)
{
    const fmoe_groups *g = w->run->job->g;
    fmoe_step *at = &w->at;
    const bool same = at->rows && w->e < g->E;
    if (!same && !combine_claim(w)) return false;
    at->opens = !same;
    at->e = w->e;
    w->begin = w->end = 0;
    if (at->e < g->E) {
        w->begin = fmoe_first_row(g, at->e, at->t0);
        w->end = fmoe_first_row(g, at->e, at->t1);
        w->block = fmoe_rows_of_task(w->end - w->begin);
        w->e = fmoe_next_expert(g, at->e + 1, at->t0, at->t1);
    }
    at->row = w->begin;
    at->n0 = w->n0;
    return true;
}

static bool combine_next(void *state, fmoe_step *s)
{
    combine_walk *w = state;
    const fmoe_combine_job *job = w->run->job;
    const fmoe_groups *g = job->g;
    const bool has_lora = job->lora.b[0].t;
    fmoe_step *at = &w->at;
    at->k0 += at->kc;
    at->opens = false;
    if (at->rows && at->k0 < at->v[0].K) {           /* the next chunk */
    } else if (at->rows && w->half + 1 < job->n_w) { /* the next matrix: k goes on in it */
        at->a_column += at->v[0].K;
        at->v[0] = fmoe_stack_at(&job->w[++w->half], at->e);
        at->k0 = 0;
    } else if (at->rows && has_lora && at->a == &job->a) { /* the LoRA term */
        at->v[0] = fmoe_stack_at(&job->lora.b[0], at->e);
        at->dtype = job->lora.b[0].dtype;
        at->a = &job->lora.l;
        at->a_column = at->k0 = 0;
    } else {
        if (at->rows && at->row + at->rows < w->end) { /* the next rows of the expert */
            at->row += at->rows;
        } else if (at->rows && at->n0 + at->n < w->n1) { /* the next panels of the task */
            at->n0 += at->n;
            at->row = w->begin;
        } else if (!combine_expert(w)) {
            return false;
        }
        at->rows = fmoe_min(w->block, w->end - at->row);
        at->a_column = at->k0 = w->half = 0;
        at->a = &job->a;
        at->dtype = job->w[0].dtype;
        at->v[0] = fmoe_stack_at(&job->w[0], at->e < g->E ? at->e : 0);
        at->n = fmoe_min(FMOE_NB * w->run->panels, w->n1 - at->n0);
    }
    const int64_t K = at->v[0].K;
    fmoe_take_k(job->cpu, g, at, at->a != &job->a);
    at->first = at->k0 == 0 && w->half == 0 && at->a == &job->a;
    at->last = at->k0 + at->kc == K && w->half + 1 == job->n_w && (!has_lora || at->a == &job->lora.l);
    at->closes = !at->rows || (at->last && at->row + at->rows == w->end && at->n0 + at->n == w->n1 && w->e == g->E);
    at->first_column = w->n0;
    at->columns = w->n1 - w->n0;
    *s = *at;
    return true;
}

void fmoe_combine_rows(const fmoe_combine_job *job, const fmoe_scratch *s, float *c, int64_t e, int64_t row,
                       int64_t rows, int64_t n0, int64_t n, int64_t t0)
{
    const fmoe_cpu_plan *cpu = job->cpu;
    const fmoe_groups *g = job->g;
    const int p_type = job->weights ? fmoe_tensor_dtype(job->weights) : 0;
    float bias[FMOE_NB], p[FMOE_ROW_BLOCK];
    if (job->bias) {
        const int dtype = fmoe_tensor_dtype(job->bias);
        const int64_t at = e * fmoe_stride(job->bias, 0) + n0;
        fmoe_load_row(&cpu->k, dtype, bias, (const char *)fmoe_data(job->bias) + at * (int64_t)fmoe_dtype_size(dtype),
                      n);
    }
    for (int64_t i = 0; i < rows; i++) {
        float *const y = c + i * FMOE_NB;
        p[i] = job->weights ? fmoe_get_float(fmoe_data(job->weights), p_type, g->slot[row + i]) : 1.0f;
        if (job->steps) fmoe_round_row(&cpu->k, job->steps, y, job->bias ? bias : NULL, n);
        else if (job->bias) cpu->k.axpy(y, 1.0f, bias, n);
        if (!job->steps || job->steps != p_type) continue;
        for (int64_t j = 0; j < n; j++) y[j] *= p[i]; /* an operation of its own */
        fmoe_round_row(&cpu->k, job->steps, y, NULL, n);
        p[i] = 1.0f;
    }
    cpu->k.add_rows(s->sums, g->token + row, t0, p, c, rows, n);
}

void fmoe_combine_store(const fmoe_combine_job *job, const fmoe_scratch *s, int64_t t0, int64_t t1, int64_t n0,
                        int64_t n)
{
    const fmoe_kernels *k = &job->cpu->k;
    const int dtype = fmoe_tensor_dtype(job->out);
    const int64_t element = (int64_t)fmoe_dtype_size(dtype), stride = fmoe_stride(job->out, 0);
    char *const dst = (char *)fmoe_data(job->out) + (t0 * stride + n0) * element;
    for (int64_t t = 0; t < t1 - t0 && job->add; t++) {
        float old[FMOE_NB];
        fmoe_load_row(k, dtype, old, dst + t * stride * element, n);
        k->axpy(s->sums + t * FMOE_NB, 1.0f, old, n);
    }
    fmoe_store_block(k, dtype)(dst, stride, s->sums, t1 - t0, n, false);
}

static void combine_worker(void *arg, int worker)
{
    combine_walk walk = {.run = arg};
    const fmoe_combine_job *job = walk.run->job;
    fmoe_scratch *scratch = &job->scratch[worker];
    fmoe_pipeline pipe = fmoe_pipeline_start(job->cpu, job->g, scratch, combine_next, &walk);
    for (const fmoe_step *s; (s = fmoe_pipeline_next(&pipe));) {
        /* The sums of one panel after another, [tokens][64] each. */
        const int64_t tokens = s->t1 - s->t0;
        fmoe_scratch panel = *scratch;
        if (s->opens)
            memset(panel.sums, 0, (size_t)(fmoe_ceil_div(s->columns, FMOE_NB) * tokens * FMOE_NB) * sizeof *panel.sums);
        for (int64_t j = 0; s->last && j < s->n; j += FMOE_NB) {
            panel.sums = scratch->sums + (s->n0 - s->first_column + j) * tokens;
            fmoe_combine_rows(job, &panel, panel.c + j * s->rows, s->e, s->row, s->rows, s->n0 + j,
                              fmoe_min(FMOE_NB, s->n - j), s->t0);
        }
        for (int64_t j = 0; s->closes && j < s->columns; j += FMOE_NB) {
            panel.sums = scratch->sums + j * tokens;
            fmoe_combine_store(job, &panel, s->t0, s->t1, s->first_column + j, fmoe_min(FMOE_NB, s->columns - j));
        }
    }
}

/* Columns of a task where they are contiguous in memory: all that are a thread's, so that a page that holds them is
 * looked up once for all of them (7 % of dx at 64 rows); half of that for many threads, of which one may come late. */
int64_t fmoe_combine_columns(const fmoe_cpu_plan *cpu, int64_t N)
{
    const int64_t tasks = cpu->threads <= 4 ? cpu->threads : 2 * cpu->threads;
    return cpu->gather ? FMOE_NB : FMOE_NB * fmoe_max(1, N / (FMOE_NB * tasks));
}

void fmoe_combine_prepare(fmoe_combine_run *run, const fmoe_combine_job *job)
{
    const int64_t T = job->out->shape[0], N = job->out->shape[1], blocks = fmoe_ceil_div(N, FMOE_NB);
    *run = (fmoe_combine_run){.job = job, .fn = combine_worker, .blocks = blocks, .width = FMOE_NB};
    if (T == 0 || fmoe_inplace_combine_prepare(run, job)) return;
    /* Few column blocks for the threads: split the tokens too (each split packs the weights again). */
    const int64_t splits = fmoe_max(1, 2 * job->cpu->threads / fmoe_max(blocks, 1));
    run->tokens = fmoe_min(FMOE_TOKEN_BLOCK, fmoe_max(FMOE_TOKENS_LEAST, fmoe_ceil_div(T, splits)));
    run->panels = fmoe_panels_of(job->cpu, job->w, job->n_w, job->g->E, FMOE_PANELS, 1);
    if (run->panels > 1) {
        const int64_t room = job->scratch[0].room / fmoe_min(T, run->tokens);
        run->width = fmoe_max(FMOE_NB, fmoe_min(room, fmoe_combine_columns(job->cpu, N)) / FMOE_NB * FMOE_NB);
        run->blocks = fmoe_ceil_div(N, run->width);
    }
    run->tasks.n = run->blocks * fmoe_ceil_div(T, run->tokens);
}

void fmoe_grouped_gemm_combine(const fmoe_combine_job *job)
{
    fmoe_combine_run run;
    fmoe_combine_prepare(&run, job);
    if (run.tasks.n) fmoe_parallel(job->p, run.fn, &run);
}
