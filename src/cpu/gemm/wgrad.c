/* SPDX-License-Identifier: Apache-2.0
 *
 * wgrad.c - weight and bias gradients: products that contract over the rows of an expert.
 *
 * dW[n,k] = sum_r A[r,n] B[r,k]. Both operands are packed row by row ([r][columns]), so nothing is transposed: 64
 * columns of B make the panel, columns of A are broadcast. B is the operand whose columns are contiguous in dW. A task
 * owns a range of rows of dW, keeps the packed A for them, and goes through the columns; sums stay in registers over
 * all rows of the expert, up to a chunk, and go from there to memory where the level can (wgrad_f32, wgrad_bf16). */
#include "cpu/gemm/jobs.h"

static bool left_transposed(const fmoe_cpu_plan *cpu) { return fmoe_left_transposed(cpu->has, cpu->pairs); }

static int64_t padded_rows(const fmoe_cpu_plan *cpu, int64_t kc)
{
    return left_transposed(cpu) ? fmoe_ceil_div(kc, 32) * 32 : cpu->pairs ? kc + (kc & 1) : kc;
}

static int64_t chunk_rows(const fmoe_cpu_plan *cpu) { return fmoe_wgrad_chunk(cpu->has, cpu->pairs); }

/* Columns of A that can be kept, packed, for so many rows. */
static int64_t kept_columns(const fmoe_cpu_plan *cpu, int64_t rows)
{
    const int64_t panels = left_transposed(cpu) ? FMOE_LEFT_PANELS_AMX : FMOE_LEFT_PANELS,
                  padded = fmoe_ceil_div(fmoe_max(1, rows), 32) * 32;
    return panels * FMOE_PANEL_BYTES / (int64_t)fmoe_panel_bytes(cpu, padded) * FMOE_NB;
}

/* Of all rows of an expert, or of a chunk only: then they are packed again for each 64 columns of dW. */
static bool keeps_all(const fmoe_cpu_plan *cpu, int64_t rows)
{
    return rows <= chunk_rows(cpu) || (!left_transposed(cpu) && kept_columns(cpu, rows) >= 2 * FMOE_NB);
}

/* Rows of dW in one task: as many as A is kept for, and as the scratch has room for where sums pass through it. Each
 * task packs all of B again, so more is better, down to a few tasks a thread; but dW's rows may be a page each, and the
 * TLB shall hold them from panel to panel. The last experts' are small, so that no worker is left with much when the
 * others are done; but where those would be more than an eighth of all, packing costs more than that (5 % of the
 * backward on 16 threads). */
static int64_t task_rows(const fmoe_wgrad_job *job, int64_t position, int64_t N)
{
    const fmoe_groups *g = job->g;
    const bool streams = !job->accumulate && fmoe_has_wgrad(job->cpu->has, job->cpu->pairs);
    const bool at_end = position >= g->E - job->cpu->threads && g->E >= 8 * (int64_t)job->cpu->threads;
    const int64_t e = g->order[position], rows = g->off[e + 1] - g->off[e], chunk = chunk_rows(job->cpu);
    const int64_t kept = kept_columns(job->cpu, keeps_all(job->cpu, rows) ? rows : chunk);
    const int64_t most = rows > chunk || !streams ? FMOE_ROW_BLOCK : left_transposed(job->cpu) ? kept : FMOE_WGRAD_MOST;
    const int64_t share = at_end ? 0 : fmoe_ceil_div(N * g->E, 4 * job->cpu->threads); /* of all rows of all experts */
    const int64_t want = fmoe_min(fmoe_min(kept, most), fmoe_max(FMOE_WGRAD_LEAST, share));
    const int64_t tasks = fmoe_ceil_div(fmoe_max(N, 1), want); /* N is 0 in lists of groups that have no columns */
    return fmoe_max(fmoe_ceil_div(fmoe_ceil_div(N, tasks), FMOE_NB), 1) * FMOE_NB; /* equal tasks, whole panels */
}

/* The scratch's pointers, to a column of rows [row, row+kc) of expert e. */
static const void **point_at_columns(fmoe_scratch *s, const fmoe_rows *a, const fmoe_groups *g, int64_t e, int64_t row,
                                     int64_t kc, int64_t column)
{
    fmoe_point(a, g, e, row, kc, column * (int64_t)fmoe_dtype_size(a->dtype), s->pointers);
    return s->pointers;
}

/* Pack columns [n0, n0+n) of rows [row, row+kc) of expert e. */
static void pack_operand(const fmoe_cpu_plan *cpu, fmoe_scratch *s, const fmoe_rows *a, const fmoe_groups *g, int64_t e,
                         int64_t row, int64_t kc, int64_t column, int64_t n, void *panel)
{
    const void **pointers = point_at_columns(s, a, g, e, row, kc, column);
    if (n < FMOE_NB) memset(panel, 0, fmoe_panel_bytes(cpu, kc));
    const int slot = fmoe_wgrad_pack(cpu->has, cpu->pairs, a->dtype, false);
    ((fmoe_pack_fn *)fmoe_kernel_at(&cpu->k, slot))(panel, kc, 0, pointers, n);
}

static int64_t left_panel_bytes(const fmoe_cpu_plan *cpu, int64_t kc)
{
    return (int64_t)fmoe_panel_bytes(cpu, padded_rows(cpu, kc));
}

/* Columns [column, column+m) of the left operand. */
static void pack_left_operand(const fmoe_cpu_plan *cpu, fmoe_scratch *s, const fmoe_rows *left, const fmoe_groups *g,
                              int64_t e, int64_t row, int64_t kc, int64_t column, int64_t m, char *packed)
{
    for (int64_t i = 0; i < m; i += FMOE_NB) {
        const int64_t n = fmoe_min(FMOE_NB, m - i);
        char *to = packed + i / FMOE_NB * left_panel_bytes(cpu, kc);
        if (left_transposed(cpu))
            cpu->k.pack_wgrad_left_pairs(to, kc, point_at_columns(s, left, g, e, row, kc, column + i), n);
        else pack_operand(cpu, s, left, g, e, row, kc, column + i, n, to);
    }
}

/* Where column i of the packed left operand begins. */
static const char *left_at(const fmoe_cpu_plan *cpu, const char *packed, int64_t kc, int64_t i)
{
    const char *panel = packed + i / FMOE_NB * left_panel_bytes(cpu, kc);
    const int64_t j = i % FMOE_NB, unit = cpu->pairs ? FMOE_NB : cpu->k.nr; /* columns side by side in a panel */
    return panel +
           (left_transposed(cpu) ? j * left_panel_bytes(cpu, kc) / FMOE_NB : (j / unit * unit * kc + j % unit) * 4);
}

/* Store a block [m][n] of sums, overwriting or adding, in the gradient's type. */
static void store_wgrad(const fmoe_kernels *k, const float *c, char *dst, int64_t m, int64_t n, int64_t stride,
                        int dtype, bool accumulate)
{
    if (!accumulate) {
        fmoe_store_block(k, dtype)(dst, stride, c, m, n, true);
        return;
    }
    float row[FMOE_NB];
    for (int64_t i = 0; i < m; i++, dst += stride * (int64_t)fmoe_dtype_size(dtype), c += FMOE_NB) {
        fmoe_load_row(k, dtype, row, dst, n);
        k->axpy(row, 1.0f, c, n);
        fmoe_store_row(k, dtype, dst, row, n);
    }
}

/* The gradient of one expert with K contiguous: dW itself or its transpose. */
static fmoe_view wgrad_view(const fmoe_wgrad_job *job, int64_t e, bool *swapped)
{
    const fmoe_view v = fmoe_stack_at(&job->dw, e);
    *swapped = v.sk != 1 && v.K > 1; /* then N has unit stride, or size 1 */
    return *swapped ? (fmoe_view){.p = v.p, .N = v.K, .K = v.N, .sn = v.sk, .sk = v.sn} : v;
}

/* What is left to do with 64 columns of dW when both operands of a chunk of rows are packed. */
typedef struct wgrad_block {
    const fmoe_wgrad_job *job;
    fmoe_scratch *s;
    char *left; /* packed, as the panel in the scratch is */
    char *dst;  /* rows of it are `stride` elements apart */
    int64_t m, n, stride, kc;
    bool first, last;         /* of the chunks of rows */
    fmoe_prefetch_rows ahead; /* what is packed after it */
} wgrad_block;

static fmoe_wgrad_form wgrad_form_of(const wgrad_block *b)
{
    const int64_t element = (int64_t)fmoe_dtype_size(b->job->dw.dtype);
    const bool whole_lines = b->n == FMOE_NB && (uintptr_t)b->dst % 64 == 0 && b->stride * element % 64 == 0;
    return fmoe_choose_wgrad_form(b->job->cpu->has, b->job->cpu->pairs, b->job->accumulate, b->last, whole_lines);
}

static void multiply_block(const wgrad_block *b)
{
    const fmoe_cpu_plan *cpu = b->job->cpu;
    const int64_t padded = padded_rows(cpu, b->kc);
    const fmoe_wgrad_form form = wgrad_form_of(b);
    if (form == FMOE_WGRAD_STREAM) {
        (cpu->pairs ? cpu->k.wgrad_bf16 : cpu->k.wgrad_f32)(b->m, padded, b->left, b->s->panel,
                                                            b->first ? NULL : b->s->c, b->dst, b->stride,
                                                            b->job->dw.dtype, b->ahead.n ? &b->ahead : NULL);
        return;
    }
    const int64_t a_step = left_transposed(cpu) ? 4 : cpu->pairs ? 4 * FMOE_NB : 4 * cpu->k.nr;
    fmoe_gemm_fn *gemm = cpu->pairs ? cpu->k.gemm_bf16 : cpu->k.gemm_f32;
    fmoe_overlap nothing = {0};
    /* Sums that are complete after one chunk are stored while they are in L1. */
    const int64_t rows = b->first && b->last ? FMOE_STORE_ROWS : b->m;
    const void *a[FMOE_ROW_BLOCK];
    for (int64_t i = 0; i < b->m; i += rows) {
        const int64_t m = fmoe_min(rows, b->m - i);
        for (int64_t j = 0; j < m; j++) a[j] = left_at(cpu, b->left, b->kc, i + j);
        gemm(m, padded, a, a_step, b->s->panel, b->s->c, FMOE_NB, b->first, &nothing);
        if (form != FMOE_WGRAD_KEEP)
            store_wgrad(&cpu->k, b->s->c, b->dst + i * b->stride * (int64_t)fmoe_dtype_size(b->job->dw.dtype), m, b->n,
                        b->stride, b->job->dw.dtype, form == FMOE_WGRAD_ADD);
    }
}

/* Rows of one expert, an operand of which 64 columns after another are packed. */
typedef struct operand {
    const fmoe_rows *rows;
    const fmoe_groups *g;
    int64_t e, row, column;
} operand;

/* The 64 columns after those that the scratch points to, which are packed next: prefetched while others are multiplied,
 * for they may have left the cache since they were written. */
static fmoe_prefetch_rows next_columns(const fmoe_scratch *s, const operand *o, int64_t kc)
{
    return (fmoe_prefetch_rows){
        .rows = s->pointers, .n = kc, .offset = FMOE_NB * (int64_t)fmoe_dtype_size(o->rows->dtype)};
}

/* The first 64 columns of dW, with the left operand packed panel by panel as it is multiplied. */
static void first_columns(const wgrad_block *b, const operand *left, const operand *right)
{
    const fmoe_cpu_plan *cpu = b->job->cpu;
    const int64_t row_bytes = b->stride * (int64_t)fmoe_dtype_size(b->job->dw.dtype);
    for (int64_t i = 0; i < b->m; i += FMOE_NB) {
        wgrad_block part = *b;
        part.m = fmoe_min(FMOE_NB, b->m - i);
        part.left += i / FMOE_NB * left_panel_bytes(cpu, b->kc);
        part.dst += i * row_bytes;
        pack_left_operand(cpu, b->s, left->rows, left->g, left->e, left->row, b->kc, left->column + i, part.m,
                          part.left);
        const operand *next = i + FMOE_NB < b->m ? left : right;
        if (next == right) point_at_columns(b->s, right->rows, right->g, right->e, right->row, b->kc, right->column);
        part.ahead = next_columns(b->s, next, b->kc);
        multiply_block(&part);
    }
}

static void wgrad_task(const fmoe_wgrad_job *job, fmoe_scratch *s, int64_t e, int64_t n0, int64_t m)
{
    const fmoe_cpu_plan *cpu = job->cpu;
    const fmoe_groups *g = job->g;
    bool swapped;
    const fmoe_view v = wgrad_view(job, e, &swapped);
    const int64_t row0 = g->off[e], rows = g->off[e + 1] - row0, chunk = chunk_rows(cpu);
    operand left = {swapped ? &job->b : &job->a, g, e, row0, n0 + (swapped ? 0 : job->a_column)};
    operand right = {swapped ? &job->a : &job->b, g, e, row0, swapped ? job->a_column : 0};
    const int64_t kept = keeps_all(cpu, rows) ? fmoe_ceil_div(m, FMOE_NB) * left_panel_bytes(cpu, chunk) : 0;
    for (int64_t k0 = 0; k0 < v.K; k0 += FMOE_NB) {
        wgrad_block b = {.job = job, .s = s, .m = m, .n = fmoe_min(FMOE_NB, v.K - k0), .stride = v.sn};
        b.dst = v.p + (n0 * v.sn + k0) * (int64_t)fmoe_dtype_size(job->dw.dtype);
        for (int64_t r = 0; r < rows; r += chunk) {
            b.kc = fmoe_min(chunk, rows - r);
            b.first = r == 0;
            b.last = r + chunk >= rows;
            b.left = (char *)s->left + r / chunk * kept;
            left.row = right.row = row0 + r;
            const bool by_panel =
                k0 == 0 && rows <= chunk && !left_transposed(cpu) && wgrad_form_of(&b) == FMOE_WGRAD_STREAM;
            if (!by_panel && (k0 == 0 || (rows > chunk && !kept)))
                pack_left_operand(cpu, s, left.rows, g, e, left.row, b.kc, left.column, m, b.left);
            pack_operand(cpu, s, right.rows, g, e, right.row, b.kc, right.column + k0, b.n, s->panel);
            const size_t packed = fmoe_panel_bytes(cpu, b.kc);
            if (left_transposed(cpu))
                memset((char *)s->panel + packed, 0, fmoe_panel_bytes(cpu, padded_rows(cpu, b.kc)) - packed);
            if (by_panel) {
                first_columns(&b, &left, &right);
            } else {
                if (rows <= chunk && k0 + FMOE_NB < v.K) b.ahead = next_columns(s, &right, b.kc);
                multiply_block(&b);
            }
        }
    }
}

/* An expert without rows: zeros, by nontemporal stores as other gradients, or left alone when accumulating. */
static void zero_task(const fmoe_wgrad_job *job, int64_t e, int64_t n0, int64_t m)
{
    bool swapped;
    const fmoe_view v = wgrad_view(job, e, &swapped);
    enum { BLOCK = FMOE_NB * 4 }; /* bytes of 64 zeros */
    static const float zeros[16][FMOE_NB];
    const int64_t element = (int64_t)fmoe_dtype_size(job->dw.dtype), bytes = v.K * element;
    for (int64_t n = n0; n < n0 + m; n++) {
        char *row = v.p + n * v.sn * element;
        for (int64_t i = 0; i < bytes; i += 16 * BLOCK)
            job->cpu->k.store_block_f32(row + i, FMOE_NB, zeros[0], fmoe_min(16, (bytes - i) / BLOCK), FMOE_NB, true);
        memset(row + bytes / BLOCK * BLOCK, 0, (size_t)(bytes % BLOCK));
    }
}

void fmoe_wgrad_worker(void *arg, int worker)
{
    fmoe_wgrad_run *run = arg;
    const fmoe_wgrad_job *job = run->job;
    const fmoe_groups *g = job->g;
    int64_t task, position = 0;
    while (fmoe_claim(&run->tasks, &task)) {
        while (task >= run->ends[position]) position++;
        bool swapped;
        const int64_t e = g->order[position], N = wgrad_view(job, e, &swapped).N, rows = task_rows(job, position, N);
        const int64_t n0 = (task - (position ? run->ends[position - 1] : 0)) * rows, m = fmoe_min(rows, N - n0);
        if (g->off[e] < g->off[e + 1]) wgrad_task(job, &job->scratch[worker], e, n0, m);
        else if (!job->accumulate) zero_task(job, e, n0, m);
    }
}

void fmoe_wgrad_prepare(fmoe_wgrad_run *run, const fmoe_wgrad_job *job, int i)
{
    const fmoe_groups *g = job->g;
    *run = (fmoe_wgrad_run){.job = job, .ends = g->ends + i * g->E};
    for (int64_t j = 0; j < g->E; j++) {
        bool swapped;
        const int64_t e = g->order[j], N = wgrad_view(job, e, &swapped).N;
        run->tasks.n += fmoe_ceil_div(N, task_rows(job, j, N));
        run->ends[j] = run->tasks.n;
    }
}

void fmoe_wgrad(const fmoe_wgrad_job *job)
{
    fmoe_wgrad_run run;
    fmoe_wgrad_prepare(&run, job, 0);
    if (run.tasks.n) fmoe_parallel(job->p, fmoe_wgrad_worker, &run);
}

/* ---- bias gradients ---- */

typedef struct sums_run {
    const fmoe_plan_impl *p;
    const fmoe_groups *g;
    const fmoe_rows *a;
    const fmoe_tensor *weights, *dbias;
    bool list, accumulate;
    fmoe_tasks tasks;
} sums_run;

static void sums_worker(void *arg, int worker)
{
    (void)worker;
    sums_run *run = arg;
    const fmoe_kernels *k = &fmoe_cpu(run->p)->k;
    const fmoe_groups *g = run->g;
    int64_t e;
    while (fmoe_claim(&run->tasks, &e)) {
        const fmoe_tensor *t = run->list ? run->dbias + e : run->dbias;
        const int dtype = fmoe_tensor_dtype(t);
        const int64_t N = t->shape[run->list ? 0 : 1], element = (int64_t)fmoe_dtype_size(dtype);
        const int64_t source = (int64_t)fmoe_dtype_size(run->a->dtype);
        char *dst = (char *)fmoe_data(t) + (run->list ? 0 : e * fmoe_stride(t, 0)) * element;
        if (g->off[e] == g->off[e + 1] && run->accumulate) continue;
        for (int64_t n0 = 0; n0 < N; n0 += FMOE_NB) {
            const int64_t n = fmoe_min(FMOE_NB, N - n0);
            float sum[FMOE_NB] = {0}, x[FMOE_NB];
            for (int64_t r = g->off[e]; r < g->off[e + 1]; r++) {
                fmoe_load_row(k, run->a->dtype, x, (const char *)fmoe_row(run->a, g, e, r) + n0 * source, n);
                const float p =
                    run->weights ? fmoe_get_float(fmoe_data(run->weights), fmoe_tensor_dtype(run->weights), g->slot[r])
                                 : 1.0f;
                k->axpy(sum, p, x, n);
            }
            store_wgrad(k, sum, dst + n0 * element, 1, n, 0, dtype, run->accumulate);
        }
    }
}

void fmoe_column_sums(const fmoe_plan_impl *p, const fmoe_groups *g, const fmoe_rows *a, const fmoe_tensor *weights,
                      const fmoe_tensor *dbias, bool list, bool accumulate)
{
    sums_run run = {.p = p, .g = g, .a = a, .weights = weights, .dbias = dbias, .list = list, .accumulate = accumulate};
    run.tasks.n = g->E;
    fmoe_parallel(p, sums_worker, &run);
}
