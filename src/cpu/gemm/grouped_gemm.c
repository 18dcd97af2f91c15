/* SPDX-License-Identifier: Apache-2.0
 *
 * grouped_gemm.c - rows of all experts by their weights, as one pool of tasks (jobs.h: what it computes).
 *
 * No barrier per expert: a product is one list of tasks (expert x column block x row block), claimed by an atomic
 * counter, large experts first. A task takes its 64 columns of weights chunk by chunk (pipeline.h), each weight byte
 * read once, and multiplies all rows of the expert by a chunk while it is in L2. */
#include "cpu/gemm/pipeline.h"

typedef struct gemm_run {
    const fmoe_gemm_job *job;
    fmoe_tasks tasks;
    int64_t *ends; /* running number of tasks, by position in the order of groups */
    int64_t width; /* columns of a task */
} gemm_run;

static int64_t gemm_columns(const fmoe_gemm_job *job, int64_t e) { return fmoe_stack_at(&job->w[0], e).N; }

typedef struct gemm_walk {
    gemm_run *run;
    fmoe_step at; /* the last one handed out */
    int64_t position;
    int64_t task, end; /* claimed, and not yet handed out */
} gemm_walk;

/* The position in the order of groups moves on with the claims, which only grow. */
static bool gemm_next(void *state, fmoe_step *next)
{
    gemm_walk *w = state;
    fmoe_step *const s = &w->at;
    const fmoe_gemm_job *job = w->run->job;
    const fmoe_groups *g = job->g;
    const bool has_lora = job->lora.b[0].t;
    s->k0 += s->kc;
    if (s->rows && s->k0 >= s->v[0].K && has_lora && s->a == &job->a) { /* the LoRA term */
        for (int i = 0; i < job->n_w; i++) s->v[i] = fmoe_stack_at(&job->lora.b[i], s->e);
        s->dtype = job->lora.b[0].dtype;
        s->a = &job->lora.l;
        s->k0 = 0;
    } else if (s->k0 >= s->v[0].K) {
        if (w->task == w->end && !fmoe_claim_some(&w->run->tasks, job->cpu->threads, &w->task, &w->end)) return false;
        const int64_t task = w->task++;
        while (task >= w->run->ends[w->position]) w->position++;
        *s = (fmoe_step){.e = g->order[w->position], .n_v = job->n_w, .dtype = job->w[0].dtype, .a = &job->a};
        const int64_t index = task - (w->position ? w->run->ends[w->position - 1] : 0), width = w->run->width;
        const int64_t blocks = fmoe_ceil_div(gemm_columns(job, s->e), width);
        const int64_t rows = g->off[s->e + 1] - g->off[s->e], at = index / blocks * fmoe_rows_of_task(rows);
        s->row = g->off[s->e] + at;
        s->rows = fmoe_min(fmoe_rows_of_task(rows), rows - at);
        for (int i = 0; i < job->n_w; i++) s->v[i] = fmoe_stack_at(&job->w[i], s->e);
        s->n0 = index % blocks * width;
        s->n = fmoe_min(width, s->v[0].N - s->n0);
    }
    const int64_t K = s->v[0].K;
    fmoe_take_k(job->cpu, g, s, s->a != &job->a);
    s->first = s->k0 == 0 && s->a == &job->a;
    s->last = s->k0 + s->kc == K && (!has_lora || s->a == &job->lora.l);
    *next = *s;
    return true;
}

static void gemm_worker(void *arg, int worker)
{
    gemm_walk walk = {.run = arg};
    const fmoe_gemm_job *job = walk.run->job;
    fmoe_scratch *scratch = &job->scratch[worker];
    fmoe_pipeline pipe = fmoe_pipeline_start(job->cpu, job->g, scratch, gemm_next, &walk);
    pipe.operands = job->operands;
    for (const fmoe_step *s; (s = fmoe_pipeline_next(&pipe));)
        for (int64_t j = 0; s->last && j < s->n; j += FMOE_NB)
            job->epilogue(job->ctx, s->e, s->row, s->rows, s->n0 + j, fmoe_min(FMOE_NB / job->n_w, s->n - j),
                          scratch->c + j * s->rows);
}

void fmoe_grouped_gemm(const fmoe_gemm_job *job)
{
    if (fmoe_inplace_gemm(job)) return;
    const fmoe_groups *g = job->g;
    fmoe_gemm_job gathered = *job;
    const int64_t K = fmoe_stack_at(&job->w[0], 0).K;
    gathered.a = fmoe_gather(job->p, g, &job->a, K);
    gathered.a = fmoe_widen_rows(job->p, g, &gathered.a, K);
    gemm_run run = {.job = &gathered, .ends = g->ends, .width = FMOE_NB / job->n_w};
    if (job->n_w == 1)
        run.width *= fmoe_panels_of(job->cpu, job->w, 1, g->E, g->E * fmoe_ceil_div(gemm_columns(job, 0), FMOE_NB),
                                    4 * job->cpu->threads);
    int64_t n = 0;
    for (int64_t i = 0; i < g->E; i++) {
        const int64_t e = g->order[i], rows = g->off[e + 1] - g->off[e];
        if (rows) n += fmoe_ceil_div(gemm_columns(job, e), run.width) * fmoe_ceil_div(rows, fmoe_rows_of_task(rows));
        run.ends[i] = n;
    }
    run.tasks.n = n;
    if (n) fmoe_parallel(job->p, gemm_worker, &run);
}
