/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm.c - the three products of the layer as pools of tasks over all experts (see cpu.h for what each computes).
 *
 * No barrier per expert: a product is one list of tasks (expert x column block x row block), claimed by an atomic counter, large
 * experts first. A task packs its 64 columns of weights chunk by chunk, each weight byte read once, and passes all rows of the
 * expert by it while the chunk is in L2. */
#include "cpu/cpu.h"

/* ---- operands ---- */

fmoe_view fmoe_stack_at(const fmoe_stack *s, int64_t e)
{
    const fmoe_tensor *t = s->list ? s->t + e : s->t;
    const int d = s->list ? 0 : 1; /* the N dimension */
    const int64_t element = (int64_t)fmoe_dtype_size(s->dtype);
    fmoe_view v = {.p = fmoe_data(t), .N = t->shape[d], .K = t->shape[d + 1], .sn = fmoe_stride(t, d), .sk = fmoe_stride(t, d + 1)};
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
    return (fmoe_rows){.base = fmoe_data(t), .stride = fmoe_stride(t, 0) * (int64_t)fmoe_dtype_size(dtype), .index = index,
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
static void pack_view(const fmoe_cpu_plan *cpu, fmoe_scratch *s, const fmoe_view *v, int dtype, int64_t n0, int64_t n, int64_t k0,
                      int64_t kc, int64_t col)
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

/* s->c[rows][64] (+)= A . W^T for the rows whose pointers stand in s->pointers; A starts a_column elements into each row. The
 * views share K. */
static void multiply(const fmoe_cpu_plan *cpu, fmoe_scratch *s, int a_dtype, int64_t a_column, int64_t rows, const fmoe_view *v,
                     int n_v, int w_dtype, int64_t n0, int64_t n, bool first)
{
    const int64_t K = v->K, chunk = chunk_of(cpu), element = (int64_t)fmoe_dtype_size(a_dtype);
    const int64_t width = FMOE_NB / n_v;
    fmoe_gemm_fn *gemm = cpu->pairs ? cpu->k.gemm_bf16 : cpu->k.gemm_f32;
    const void *a[FMOE_ROW_BLOCK];
    for (int64_t k0 = 0; k0 < K; k0 += chunk) {
        const int64_t kc = fmoe_min(chunk, K - k0), offset = (a_column + k0) * element;
        const int start = first && k0 == 0;
        if (n < width) memset(s->panel, 0, fmoe_panel_bytes(cpu, kc));
        for (int i = 0; i < n_v; i++) pack_view(cpu, s, &v[i], w_dtype, n0, n, k0, kc, i * width);
        if (a_dtype == cpu->work_type) {
            for (int64_t i = 0; i < rows; i++) a[i] = (const char *)s->pointers[i] + offset;
            gemm(rows, kc, a, 4, s->panel, s->c, FMOE_NB, start);
            continue;
        }
        for (int64_t r = 0; r < rows; r += FMOE_WIDEN_ROWS) {
            const int64_t nr = fmoe_min(FMOE_WIDEN_ROWS, rows - r);
            for (int64_t i = 0; i < nr; i++) {
                float *wide = s->widened + i * FMOE_KC;
                fmoe_load_row(&cpu->k, a_dtype, wide, (const char *)s->pointers[r + i] + offset, kc);
                a[i] = wide;
            }
            gemm(nr, kc, a, 4, s->panel, s->c + r * FMOE_NB, FMOE_NB, start);
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

static void in_worker(void *arg, int worker)
{
    in_run *run = arg;
    const fmoe_in_job *job = run->job;
    const fmoe_groups *g = job->g;
    const fmoe_cpu_plan *cpu = job->cpu;
    fmoe_scratch *s = &job->scratch[worker];
    const int64_t width = FMOE_NB / job->n_w;
    int64_t task, position = 0;
    while (fmoe_claim(&run->tasks, &task)) {
        while (task >= run->ends[position]) position++; /* claims only grow */
        const int64_t e = g->order[position], index = task - (position ? run->ends[position - 1] : 0);
        const int64_t blocks = fmoe_ceil_div(in_columns(job, e), width);
        const int64_t n0 = index % blocks * width, row = g->off[e] + index / blocks * FMOE_ROW_BLOCK;
        const int64_t rows = fmoe_min(FMOE_ROW_BLOCK, g->off[e + 1] - row);
        fmoe_view v[2];
        for (int i = 0; i < job->n_w; i++) v[i] = fmoe_stack_at(&job->w[i], e);
        const int64_t n = fmoe_min(width, v[0].N - n0);
        for (int64_t i = 0; i < rows; i++) s->pointers[i] = fmoe_row(&job->a, g, e, row + i);
        multiply(cpu, s, job->a.dtype, 0, rows, v, job->n_w, job->w[0].dtype, n0, n, true);
        job->finish(job->ctx, e, row, rows, n0, n, s->c);
    }
}

void fmoe_multiply_in(const fmoe_in_job *job)
{
    const fmoe_groups *g = job->g;
    in_run run = {.job = job, .ends = g->ends};
    int64_t n = 0;
    for (int64_t i = 0; i < g->E; i++) {
        const int64_t e = g->order[i], rows = g->off[e + 1] - g->off[e];
        if (rows)
            n += fmoe_ceil_div(in_columns(job, e), FMOE_NB / job->n_w) * fmoe_ceil_div(rows, FMOE_ROW_BLOCK);
        run.ends[i] = n;
    }
    run.tasks.n = n;
    if (n) fmoe_parallel(job->p, in_worker, &run);
}

/* ---- out of the experts ---- */

typedef struct out_run {
    const fmoe_out_job *job;
    fmoe_tasks tasks;
    int64_t blocks, tokens; /* column blocks; tokens of a task */
} out_run;

/* First row of group e whose token is not below t. */
static int64_t first_row(const fmoe_groups *g, int64_t e, int64_t t)
{
    int64_t lo = g->off[e], hi = g->off[e + 1];
    while (lo < hi) {
        const int64_t mid = lo + (hi - lo) / 2;
        if (g->token[mid] < t) lo = mid + 1;
        else hi = mid;
    }
    return lo;
}

static void out_rows(const fmoe_out_job *job, fmoe_scratch *s, int64_t e, int64_t row, int64_t rows, int64_t n0, int64_t n,
                     int64_t t0)
{
    const fmoe_cpu_plan *cpu = job->cpu;
    const fmoe_groups *g = job->g;
    int64_t column = 0;
    for (int64_t i = 0; i < rows; i++) s->pointers[i] = fmoe_row(&job->a, g, e, row + i);
    for (int i = 0; i < job->n_w; i++) {
        const fmoe_view v = fmoe_stack_at(&job->w[i], e);
        multiply(cpu, s, job->a.dtype, column, rows, &v, 1, job->w[i].dtype, n0, n, i == 0);
        column += v.K;
    }
    float bias[FMOE_NB];
    if (job->bias) {
        const int dtype = fmoe_tensor_dtype(job->bias);
        const int64_t at = e * fmoe_stride(job->bias, 0) + n0;
        fmoe_load_row(&cpu->k, dtype, bias, (const char *)fmoe_data(job->bias) + at * (int64_t)fmoe_dtype_size(dtype), n);
    }
    for (int64_t i = 0; i < rows; i++) {
        const int64_t r = row + i;
        float *c = s->c + i * FMOE_NB;
        if (job->bias) cpu->k.axpy(c, 1.0f, bias, n);
        const float p = job->weights ? fmoe_get_float(fmoe_data(job->weights), fmoe_tensor_dtype(job->weights), g->slot[r]) : 1.0f;
        cpu->k.axpy(s->sums + (g->token[r] - t0) * FMOE_NB, p, c, FMOE_NB);
    }
}

static void out_worker(void *arg, int worker)
{
    out_run *run = arg;
    const fmoe_out_job *job = run->job;
    const fmoe_groups *g = job->g;
    const fmoe_kernels *k = &job->cpu->k;
    fmoe_scratch *s = &job->scratch[worker];
    const fmoe_tensor *out = job->out;
    const int64_t T = out->shape[0], N = out->shape[1], stride = fmoe_stride(out, 0);
    const int dtype = fmoe_tensor_dtype(out);
    const int64_t element = (int64_t)fmoe_dtype_size(dtype);
    int64_t task;
    while (fmoe_claim(&run->tasks, &task)) {
        const int64_t n0 = task % run->blocks * FMOE_NB, n = fmoe_min(FMOE_NB, N - n0);
        const int64_t t0 = task / run->blocks * run->tokens, t1 = fmoe_min(T, t0 + run->tokens);
        memset(s->sums, 0, (size_t)((t1 - t0) * FMOE_NB) * sizeof *s->sums);
        for (int64_t e = 0; e < g->E; e++) {
            if (g->off[e] == g->off[e + 1]) continue;
            const int64_t end = first_row(g, e, t1);
            for (int64_t row = first_row(g, e, t0); row < end; row += FMOE_ROW_BLOCK)
                out_rows(job, s, e, row, fmoe_min(FMOE_ROW_BLOCK, end - row), n0, n, t0);
        }
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
}

void fmoe_multiply_out(const fmoe_out_job *job)
{
    const int64_t T = job->out->shape[0], blocks = fmoe_ceil_div(job->out->shape[1], FMOE_NB);
    if (T == 0) return;
    /* Few column blocks for the threads: split the tokens too (each split packs the weights again). */
    const int64_t splits = fmoe_max(1, 2 * job->cpu->threads / fmoe_max(blocks, 1));
    const int64_t tokens = fmoe_min(FMOE_TOKEN_BLOCK, fmoe_max(64, fmoe_ceil_div(T, splits)));
    out_run run = {.job = job, .blocks = blocks, .tokens = tokens};
    run.tasks.n = blocks * fmoe_ceil_div(T, tokens);
    fmoe_parallel(job->p, out_worker, &run);
}
