/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm.c - the three products of the layer as pools of tasks over all experts (see cpu.h for what each computes).
 *
 * No barrier per expert: a product is one list of tasks (expert x column block x row block), claimed by an atomic
 * counter, large experts first. A task packs its 64 columns of weights chunk by chunk, each weight byte read once, and
 * passes all rows of the expert by it while the chunk is in L2. */
#include "cpu/cpu.h"

/* ---- operands ---- */

fmoe_view fmoe_stack_at(const fmoe_stack *s, int64_t e)
{
    const fmoe_tensor *t = s->list ? s->t + e : s->t;
    const int d = s->list ? 0 : 1; /* the N dimension */
    const int64_t element = (int64_t)fmoe_dtype_size(s->dtype);
    fmoe_view v = {.p = fmoe_data(t),
                   .N = t->shape[d],
                   .K = t->shape[d + 1],
                   .sn = fmoe_stride(t, d),
                   .sk = fmoe_stride(t, d + 1)};
    if (!s->list) v.p += e * fmoe_stride(t, 0) * element;
    if (s->rows) {
        v.p += s->row * v.sn * element;
        v.N = s->rows;
    }
    if (s->swap) v = (fmoe_view){.p = v.p, .N = v.K, .K = v.N, .sn = v.sk, .sk = v.sn};
    return v;
}

fmoe_rows fmoe_rows_of(const fmoe_tensor *t, const int64_t *index)
{
    const int dtype = fmoe_tensor_dtype(t);
    return (fmoe_rows){.base = fmoe_data(t),
                       .stride = fmoe_stride(t, 0) * (int64_t)fmoe_dtype_size(dtype),
                       .index = index,
                       .dtype = dtype};
}

fmoe_rows fmoe_rows_buffer(const void *base, int64_t columns, int dtype)
{
    return (fmoe_rows){.base = base, .stride = columns * (int64_t)fmoe_dtype_size(dtype), .dtype = dtype};
}

void fmoe_load_row(const fmoe_kernels *k, int dtype, float *dst, const void *src, int64_t n)
{
    if (dtype == FMOE_BF16) k->load_bf16(dst, src, n);
    else if (dtype == FMOE_F16) k->load_f16(dst, src, n);
    else memcpy(dst, src, (size_t)n * sizeof *dst);
}

void fmoe_store_row(const fmoe_kernels *k, int dtype, void *dst, const float *src, int64_t n)
{
    if (dtype == FMOE_BF16) k->store_bf16(dst, src, n);
    else if (dtype == FMOE_F16) k->store_f16(dst, src, n);
    else memcpy(dst, src, (size_t)n * sizeof *src);
}

void fmoe_scratch_carve(fmoe_scratch *s, fmoe_carve *c, const fmoe_plan_impl *p)
{
    for (int w = 0; w < fmoe_cpu(p)->threads; w++) {
        fmoe_scratch one;
        one.panel = fmoe_carve_take(c, FMOE_PANEL_BYTES, 1);
        one.c = fmoe_carve_take(c, FMOE_ROW_BLOCK * FMOE_NB, sizeof(float));
        one.pointers = fmoe_carve_take(c, FMOE_ROW_BLOCK + FMOE_KC_PAIRS, sizeof(void *));
        one.lines = fmoe_carve_take(c, FMOE_LINES, sizeof(void *));
        /* A weight gradient needs `left`, the other two products `sums` and `widened`: one memory for both. */
        const int64_t sums = FMOE_TOKEN_BLOCK * FMOE_NB, widened = FMOE_WIDEN_ROWS * FMOE_KC;
        const int64_t left = FMOE_LEFT_PANELS * FMOE_PANEL_BYTES / (int64_t)sizeof(float);
        float *shared = fmoe_carve_take(c, fmoe_max(sums + widened, left), sizeof(float));
        one.left = shared;
        one.sums = shared;
        one.widened = shared ? shared + sums : NULL;
        if (s) s[w] = one;
    }
}

/* ---- packing one chunk of one expert's columns ---- */

static fmoe_pack_fn *packer(const fmoe_cpu_plan *cpu, int dtype, bool cols)
{
    const fmoe_kernels *k = &cpu->k;
    if (cpu->pairs) return cols ? k->pack_cols_pairs : k->pack_rows_pairs;
    if (dtype == FMOE_BF16) return cols ? k->pack_cols_bf16 : k->pack_rows_bf16;
    if (dtype == FMOE_F16) return cols ? k->pack_cols_f16 : k->pack_rows_f16;
    return cols ? k->pack_cols_f32 : k->pack_rows_f32;
}

/* Columns [n0, n0+n) and k [k0, k0+kc) of a matrix, to columns [col, col+n) of the panel. */
static void pack_view(const fmoe_cpu_plan *cpu, fmoe_scratch *s, const fmoe_view *v, int dtype, int64_t n0, int64_t n,
                      int64_t k0, int64_t kc, int64_t col)
{
    const int64_t element = (int64_t)fmoe_dtype_size(dtype);
    const void **pointers = s->pointers + FMOE_ROW_BLOCK;
    const char *base = v->p + (n0 * v->sn + k0 * v->sk) * element;
    const bool cols = v->sk == 1 || kc == 1;
    if (cols)
        for (int64_t j = 0; j < n; j++) pointers[j] = base + j * v->sn * element;
    else
        for (int64_t k = 0; k < kc; k++) pointers[k] = base + k * v->sk * element;
    packer(cpu, dtype, cols)(s->panel, kc, col, pointers, n);
}

static int64_t chunk_of(const fmoe_cpu_plan *cpu) { return cpu->pairs ? FMOE_KC_PAIRS : FMOE_KC; }

/* One block of columns of one or two matrices, which share N and K: what a task multiplies by. */
typedef struct columns {
    fmoe_view v[2];
    int n_v, dtype;
    int64_t n0, n; /* columns [n0, n0+n) of each */
} columns;

/* The cache lines that chunk k0 of these columns lies in, for the product before it to fetch. */
static fmoe_fetch chunk_lines(const fmoe_cpu_plan *cpu, const fmoe_scratch *s, const columns *w, int64_t k0)
{
    const int64_t element = (int64_t)fmoe_dtype_size(w->dtype);
    int64_t n_lines = 0;
    for (int i = 0; i < w->n_v && k0 < w->v[i].K; i++) {
        const fmoe_view *v = &w->v[i];
        const int64_t kc = fmoe_min(chunk_of(cpu), v->K - k0);
        const bool cols = v->sk == 1;
        const int64_t runs = cols ? w->n : kc, bytes = (cols ? kc : w->n) * element,
                      step = (cols ? v->sn : v->sk) * element;
        const char *base = v->p + (w->n0 * v->sn + k0 * v->sk) * element;
        for (int64_t r = 0; r < runs; r++)
            for (int64_t b = 0; b < bytes && n_lines < FMOE_LINES; b += 64) s->lines[n_lines++] = base + r * step + b;
    }
    return (fmoe_fetch){s->lines, s->lines + n_lines};
}

/* s->c[rows][64] (+)= A . W^T for the rows whose pointers stand in s->pointers; A starts a_column elements into each
 * row. Meanwhile the next chunk is fetched: of these columns, or, with the last one, the first of `after` (NULL: none).
 */
static void multiply(const fmoe_cpu_plan *cpu, fmoe_scratch *s, int a_dtype, int64_t a_column, int64_t rows,
                     const columns *w, bool first, const columns *after)
{
    const int64_t K = w->v[0].K, chunk = chunk_of(cpu), element = (int64_t)fmoe_dtype_size(a_dtype),
                  width = FMOE_NB / w->n_v;
    fmoe_gemm_fn *gemm = cpu->pairs ? cpu->k.gemm_bf16 : cpu->k.gemm_f32;
    const void *a[FMOE_ROW_BLOCK];
    for (int64_t k0 = 0; k0 < K; k0 += chunk) {
        const int64_t kc = fmoe_min(chunk, K - k0), offset = (a_column + k0) * element;
        const int start = first && k0 == 0;
        if (w->n < width) memset(s->panel, 0, fmoe_panel_bytes(cpu, kc));
        for (int i = 0; i < w->n_v; i++) pack_view(cpu, s, &w->v[i], w->dtype, w->n0, w->n, k0, kc, i * width);
        fmoe_fetch next = {0};
        if (k0 + chunk < K) next = chunk_lines(cpu, s, w, k0 + chunk);
        else if (after) next = chunk_lines(cpu, s, after, 0);
        if (a_dtype == cpu->work_type) {
            for (int64_t i = 0; i < rows; i++) a[i] = (const char *)s->pointers[i] + offset;
            gemm(rows, kc, a, 4, s->panel, s->c, FMOE_NB, start, &next);
            continue;
        }
        for (int64_t r = 0; r < rows; r += FMOE_WIDEN_ROWS) {
            const int64_t nr = fmoe_min(FMOE_WIDEN_ROWS, rows - r);
            for (int64_t i = 0; i < nr; i++) {
                float *wide = s->widened + i * FMOE_KC;
                fmoe_load_row(&cpu->k, a_dtype, wide, (const char *)s->pointers[r + i] + offset, kc);
                a[i] = wide;
            }
            gemm(nr, kc, a, 4, s->panel, s->c + r * FMOE_NB, FMOE_NB, start, &next);
        }
    }
    if (K == 0 && first) memset(s->c, 0, (size_t)(rows * FMOE_NB) * sizeof *s->c);
}

/* ---- into the experts ---- */

typedef struct in_run {
    const fmoe_in_job *job;
    fmoe_tasks tasks;
    int64_t *ends; /* running number of tasks, by position in the order of groups */
} in_run;

static int64_t in_columns(const fmoe_in_job *job, int64_t e) { return fmoe_stack_at(&job->w[0], e).N; }

/* What a task number stands for; *position moves along the order of groups with the claims, which only grow. */
typedef struct in_task {
    int64_t e, row, rows;
    columns w, low;
} in_task;

static in_task in_task_of(const in_run *run, int64_t task, int64_t *position)
{
    const fmoe_in_job *job = run->job;
    const fmoe_groups *g = job->g;
    while (task >= run->ends[*position]) ++*position;
    in_task t = {.e = g->order[*position]};
    const int64_t index = task - (*position ? run->ends[*position - 1] : 0), width = FMOE_NB / job->n_w;
    const int64_t blocks = fmoe_ceil_div(in_columns(job, t.e), width);
    t.row = g->off[t.e] + index / blocks * FMOE_ROW_BLOCK;
    t.rows = fmoe_min(FMOE_ROW_BLOCK, g->off[t.e + 1] - t.row);
    t.w = (columns){.n_v = job->n_w, .dtype = job->w[0].dtype, .n0 = index % blocks * width};
    for (int i = 0; i < job->n_w; i++) t.w.v[i] = fmoe_stack_at(&job->w[i], t.e);
    t.w.n = fmoe_min(width, t.w.v[0].N - t.w.n0);
    if (job->low.b[0].t) {
        t.low = t.w;
        for (int i = 0; i < job->n_w; i++) t.low.v[i] = fmoe_stack_at(&job->low.b[i], t.e);
    }
    return t;
}

static void in_worker(void *arg, int worker)
{
    in_run *run = arg;
    const fmoe_in_job *job = run->job;
    fmoe_scratch *s = &job->scratch[worker];
    int64_t task, position = 0;
    if (!fmoe_claim(&run->tasks, &task)) return;
    in_task t = in_task_of(run, task, &position);
    for (bool more = true; more;) { /* one task is claimed ahead, so that its weights can be fetched */
        more = fmoe_claim(&run->tasks, &task);
        const in_task next = more ? in_task_of(run, task, &position) : t;
        const columns *after = more ? &next.w : NULL;
        const bool low = job->low.b[0].t;
        for (int64_t i = 0; i < t.rows; i++) s->pointers[i] = fmoe_row(&job->a, job->g, t.e, t.row + i);
        multiply(job->cpu, s, job->a.dtype, 0, t.rows, &t.w, true, low ? &t.low : after);
        for (int64_t i = 0; low && i < t.rows; i++) s->pointers[i] = fmoe_row(&job->low.l, job->g, t.e, t.row + i);
        if (low) multiply(job->cpu, s, job->low.l.dtype, 0, t.rows, &t.low, false, after);
        job->finish(job->ctx, t.e, t.row, t.rows, t.w.n0, t.w.n, s->c);
        t = next;
    }
}

void fmoe_multiply_in(const fmoe_in_job *job)
{
    if (fmoe_direct_in(job)) return;
    const fmoe_groups *g = job->g;
    fmoe_in_job gathered = *job;
    gathered.a = fmoe_gather(job->p, g, &job->a, fmoe_stack_at(&job->w[0], 0).K);
    in_run run = {.job = &gathered, .ends = g->ends};
    int64_t n = 0;
    for (int64_t i = 0; i < g->E; i++) {
        const int64_t e = g->order[i], rows = g->off[e + 1] - g->off[e];
        if (rows) n += fmoe_ceil_div(in_columns(job, e), FMOE_NB / job->n_w) * fmoe_ceil_div(rows, FMOE_ROW_BLOCK);
        run.ends[i] = n;
    }
    run.tasks.n = n;
    if (n) fmoe_parallel(job->p, in_worker, &run);
}

/* ---- out of the experts ---- */

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
static int64_t next_expert(const fmoe_groups *g, int64_t e, int64_t t0, int64_t t1)
{
    while (e < g->E && fmoe_first_row(g, e, t0) == fmoe_first_row(g, e, t1)) e++;
    return e;
}

static columns out_columns(const fmoe_stack *w, int64_t e, int64_t n0, int64_t n)
{
    return (columns){.v = {fmoe_stack_at(w, e)}, .n_v = 1, .dtype = w->dtype, .n0 = n0, .n = n};
}

/* The rows [row, row+rows) of expert e, added to the sums of their tokens; `after` is what comes next, to be fetched.
 */
static void out_rows(const fmoe_out_job *job, fmoe_scratch *s, int64_t e, int64_t row, int64_t rows, int64_t n0,
                     int64_t n, int64_t t0, const columns *after)
{
    const fmoe_cpu_plan *cpu = job->cpu;
    const fmoe_groups *g = job->g;
    int64_t column = 0;
    for (int64_t i = 0; i < rows; i++) s->pointers[i] = fmoe_row(&job->a, g, e, row + i);
    const bool has_low = job->low.b[0].t;
    const columns low = has_low ? out_columns(&job->low.b[0], e, n0, n) : (columns){0};
    for (int i = 0; i < job->n_w; i++) {
        const columns w = out_columns(&job->w[i], e, n0, n);
        columns half;
        const bool last = i == job->n_w - 1;
        if (!last) half = out_columns(&job->w[i + 1], e, n0, n);
        multiply(cpu, s, job->a.dtype, column, rows, &w, i == 0, !last ? &half : has_low ? &low : after);
        column += w.v[0].K;
    }
    for (int64_t i = 0; has_low && i < rows; i++) s->pointers[i] = fmoe_row(&job->low.l, g, e, row + i);
    if (has_low) multiply(cpu, s, job->low.l.dtype, 0, rows, &low, false, after);
    fmoe_out_rows(job, s, s->c, e, row, rows, n0, n, t0);
}

void fmoe_out_rows(const fmoe_out_job *job, const fmoe_scratch *s, float *c, int64_t e, int64_t row, int64_t rows,
                   int64_t n0, int64_t n, int64_t t0)
{
    const fmoe_cpu_plan *cpu = job->cpu;
    const fmoe_groups *g = job->g;
    float bias[FMOE_NB];
    if (job->bias) {
        const int dtype = fmoe_tensor_dtype(job->bias);
        const int64_t at = e * fmoe_stride(job->bias, 0) + n0;
        fmoe_load_row(&cpu->k, dtype, bias, (const char *)fmoe_data(job->bias) + at * (int64_t)fmoe_dtype_size(dtype),
                      n);
    }
    for (int64_t i = 0; i < rows; i++, c += FMOE_NB) {
        const int64_t r = row + i;
        if (job->bias) cpu->k.axpy(c, 1.0f, bias, n);
        const float p =
            job->weights ? fmoe_get_float(fmoe_data(job->weights), fmoe_tensor_dtype(job->weights), g->slot[r]) : 1.0f;
        cpu->k.axpy(s->sums + (g->token[r] - t0) * FMOE_NB, p, c, n);
    }
}

void fmoe_out_store(const fmoe_out_job *job, const fmoe_scratch *s, int64_t t0, int64_t t1, int64_t n0, int64_t n)
{
    const fmoe_kernels *k = &job->cpu->k;
    const fmoe_tensor *out = job->out;
    const int dtype = fmoe_tensor_dtype(out);
    const int64_t element = (int64_t)fmoe_dtype_size(dtype), stride = fmoe_stride(out, 0);
    for (int64_t t = t0; t < t1; t++) {
        char *dst = (char *)fmoe_data(out) + (t * stride + n0) * element;
        float *sum = s->sums + (t - t0) * FMOE_NB, old[FMOE_NB];
        if (job->add) {
            fmoe_load_row(k, dtype, old, dst, n);
            k->axpy(sum, 1.0f, old, n);
        }
        fmoe_store_row(k, dtype, dst, sum, n);
    }
}

static void out_worker(void *arg, int worker)
{
    fmoe_out_run *run = arg;
    const fmoe_out_job *job = run->job;
    const fmoe_groups *g = job->g;
    fmoe_scratch *s = &job->scratch[worker];
    const int64_t T = job->out->shape[0], N = job->out->shape[1];
    int64_t task;
    while (fmoe_claim(&run->tasks, &task)) {
        const int64_t n0 = task % run->blocks * FMOE_NB, n = fmoe_min(FMOE_NB, N - n0);
        const int64_t t0 = task / run->blocks * run->tokens, t1 = fmoe_min(T, t0 + run->tokens);
        memset(s->sums, 0, (size_t)((t1 - t0) * FMOE_NB) * sizeof *s->sums);
        for (int64_t e = next_expert(g, 0, t0, t1); e < g->E;) {
            const int64_t end = fmoe_first_row(g, e, t1), e_next = next_expert(g, e + 1, t0, t1);
            columns after;
            if (e_next < g->E) after = out_columns(&job->w[0], e_next, n0, n);
            for (int64_t row = fmoe_first_row(g, e, t0); row < end; row += FMOE_ROW_BLOCK)
                out_rows(job, s, e, row, fmoe_min(FMOE_ROW_BLOCK, end - row), n0, n, t0, e_next < g->E ? &after : NULL);
            e = e_next;
        }
        fmoe_out_store(job, s, t0, t1, n0, n);
    }
}

void fmoe_out_prepare(fmoe_out_run *run, const fmoe_out_job *job)
{
    const int64_t T = job->out->shape[0], blocks = fmoe_ceil_div(job->out->shape[1], FMOE_NB);
    *run = (fmoe_out_run){.job = job, .fn = out_worker, .blocks = blocks, .width = FMOE_NB};
    if (T == 0 || fmoe_direct_out(run, job)) return;
    /* Few column blocks for the threads: split the tokens too (each split packs the weights again). */
    const int64_t splits = fmoe_max(1, 2 * job->cpu->threads / fmoe_max(blocks, 1));
    run->tokens = fmoe_min(FMOE_TOKEN_BLOCK, fmoe_max(64, fmoe_ceil_div(T, splits)));
    run->tasks.n = blocks * fmoe_ceil_div(T, run->tokens);
}

void fmoe_multiply_out(const fmoe_out_job *job)
{
    fmoe_out_run run;
    fmoe_out_prepare(&run, job);
    if (run.tasks.n) fmoe_parallel(job->p, run.fn, &run);
}
