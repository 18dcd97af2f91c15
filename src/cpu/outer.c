/* SPDX-License-Identifier: Apache-2.0
 *
 * outer.c - weight and bias gradients: products that contract over the rows of an expert.
 *
 * dW[n,k] = sum_r A[r,n] B[r,k]. Both operands are packed row by row ([r][columns]), so nothing is transposed: 64
 * columns of B make the panel, columns of A are broadcast. B is the operand whose columns are neighbours in dW. A task
 * owns up to 512 rows of dW, keeps the packed A for them (384 KiB at most), and walks along the columns; sums stay in
 * registers over all rows of the expert, up to a chunk. */
#include "cpu/cpu.h"

/* Rows of dW in one task: as many as the packed A of this many rows has room for. Each task packs all of B again, so
 * more is better, down to a few tasks a thread. */
static int64_t task_rows(const fmoe_outer_job *job, int64_t e, int64_t N)
{
    const fmoe_groups *g = job->g;
    const int64_t chunk = job->cpu->pairs ? FMOE_KC_PAIRS : FMOE_KC,
                  rows = fmoe_ceil_div(fmoe_max(1, fmoe_min(chunk, g->off[e + 1] - g->off[e])), 32) * 32;
    const int64_t fit = FMOE_LEFT_PANELS * FMOE_PANEL_BYTES / (int64_t)fmoe_panel_bytes(job->cpu, rows) * FMOE_NB;
    const int64_t share = fmoe_ceil_div(N * g->E, 4 * job->cpu->threads); /* of all rows of all experts */
    const int64_t want = fmoe_min(fmoe_min(fit, FMOE_ROW_BLOCK), fmoe_max(FMOE_LEFT_PANELS * FMOE_NB, share));
    return fmoe_ceil_div(fmoe_ceil_div(N, fmoe_ceil_div(N, want)), FMOE_NB) * FMOE_NB; /* equal tasks, whole panels */
}

/* Pack columns [n0, n0+n) of rows [row, row+kc) of expert e. */
static void pack_operand(const fmoe_cpu_plan *cpu, fmoe_scratch *s, const fmoe_rows *a, const fmoe_groups *g, int64_t e,
                         int64_t row, int64_t kc, int64_t column, int64_t n, void *panel)
{
    const void **pointers = s->pointers;
    const int64_t offset = column * (int64_t)fmoe_dtype_size(a->dtype);
    for (int64_t k = 0; k < kc; k++) pointers[k] = (const char *)fmoe_row(a, g, e, row + k) + offset;
    if (n < FMOE_NB) memset(panel, 0, fmoe_panel_bytes(cpu, kc));
    fmoe_pack_fn *pack = cpu->pairs              ? cpu->k.pack_rows_pairs
                         : a->dtype == FMOE_BF16 ? cpu->k.pack_rows_bf16
                         : a->dtype == FMOE_F16  ? cpu->k.pack_rows_f16
                                                 : cpu->k.pack_rows_f32;
    pack(panel, kc, 0, pointers, n);
}

/* Where a level transposes the left operand (AMX), its rows of dW are rows of their own, padded to whole steps of 32.
 */
static bool own_rows(const fmoe_cpu_plan *cpu) { return cpu->pairs && cpu->k.pack_left_pairs; }

static int64_t padded_rows(const fmoe_cpu_plan *cpu, int64_t kc)
{
    return own_rows(cpu) ? fmoe_ceil_div(kc, 32) * 32 : cpu->pairs ? kc + (kc & 1) : kc;
}

/* Columns [column, column+m) of the left operand, and where each begins. */
static void pack_left(const fmoe_cpu_plan *cpu, fmoe_scratch *s, const fmoe_rows *left, const fmoe_groups *g, int64_t e,
                      int64_t row, int64_t kc, int64_t column, int64_t m, const void **a)
{
    const int64_t panel_bytes = (int64_t)fmoe_panel_bytes(cpu, padded_rows(cpu, kc));
    const int64_t unit = cpu->pairs ? FMOE_NB : cpu->k.nr; /* columns side by side in a panel */
    const void **pointers = s->pointers;
    for (int64_t i = 0; i < m; i += FMOE_NB) {
        const int64_t n = fmoe_min(FMOE_NB, m - i);
        char *to = (char *)s->left + i / FMOE_NB * panel_bytes;
        if (own_rows(cpu)) {
            for (int64_t k = 0; k < kc; k++) pointers[k] = (const uint16_t *)fmoe_row(left, g, e, row + k) + column + i;
            cpu->k.pack_left_pairs(to, kc, pointers, n);
            for (int64_t j = 0; j < n; j++) a[i + j] = to + j * panel_bytes / FMOE_NB;
        } else {
            pack_operand(cpu, s, left, g, e, row, kc, column + i, n, to);
            for (int64_t j = 0; j < n; j++) a[i + j] = to + (j / unit * unit * kc + j % unit) * 4;
        }
    }
}

/* Store a block [m][n] of sums, overwriting or adding, in the gradient's type. */
static void store_block(const fmoe_kernels *k, const float *c, char *dst, int64_t m, int64_t n, int64_t stride,
                        int dtype, bool accumulate)
{
    if (!accumulate) {
        fmoe_store_block_fn *store = dtype == FMOE_BF16  ? k->store_block_bf16
                                     : dtype == FMOE_F16 ? k->store_block_f16
                                                         : k->store_block_f32;
        store(dst, stride, c, m, n);
        return;
    }
    float row[FMOE_NB];
    for (int64_t i = 0; i < m; i++, dst += stride * (int64_t)fmoe_dtype_size(dtype), c += FMOE_NB) {
        fmoe_load_row(k, dtype, row, dst, n);
        k->axpy(row, 1.0f, c, n);
        fmoe_store_row(k, dtype, dst, row, n);
    }
}

/* The gradient of one expert with its neighbours along K: dW itself or its transpose. */
static fmoe_view outer_view(const fmoe_outer_job *job, int64_t e, bool *swapped)
{
    const fmoe_view v = fmoe_stack_at(&job->dw, e);
    *swapped = v.sk != 1 && v.K > 1; /* then N has unit stride, or size 1 */
    return *swapped ? (fmoe_view){.p = v.p, .N = v.K, .K = v.N, .sn = v.sk, .sk = v.sn} : v;
}

enum { STORE_ROWS = 128 }; /* of 64 f32 sums: 32 KiB */

static void outer_task(const fmoe_outer_job *job, fmoe_scratch *s, int64_t e, int64_t n0, int64_t m)
{
    const fmoe_cpu_plan *cpu = job->cpu;
    const fmoe_groups *g = job->g;
    bool swapped;
    const fmoe_view v = outer_view(job, e, &swapped);
    const fmoe_rows *left = swapped ? &job->b : &job->a, *right = swapped ? &job->a : &job->b;
    const int64_t left_column = swapped ? 0 : job->a_column, right_column = swapped ? job->a_column : 0;
    const int64_t row0 = g->off[e], rows = g->off[e + 1] - row0;
    const int64_t chunk = cpu->pairs ? FMOE_KC_PAIRS : FMOE_KC;
    const int64_t a_step = own_rows(cpu) ? 4 : cpu->pairs ? 4 * FMOE_NB : 4 * cpu->k.nr;
    fmoe_gemm_fn *gemm = cpu->pairs ? cpu->k.gemm_bf16 : cpu->k.gemm_f32;
    const void *a[FMOE_ROW_BLOCK];
    fmoe_side nothing = {0};
    /* Sums that are complete after one chunk are stored while they are in L1. */
    const int64_t block = rows > chunk ? m : STORE_ROWS;
    for (int64_t k0 = 0; k0 < v.K; k0 += FMOE_NB) {
        const int64_t n = fmoe_min(FMOE_NB, v.K - k0);
        char *dst = v.p + (n0 * v.sn + k0) * (int64_t)fmoe_dtype_size(job->dw.dtype);
        for (int64_t r = 0; r < rows; r += chunk) {
            const int64_t kc = fmoe_min(chunk, rows - r), padded = padded_rows(cpu, kc);
            if (k0 == 0 || rows > chunk) pack_left(cpu, s, left, g, e, row0 + r, kc, left_column + n0, m, a);
            pack_operand(cpu, s, right, g, e, row0 + r, kc, right_column + k0, n, s->panel);
            if (own_rows(cpu))
                memset((char *)s->panel + fmoe_panel_bytes(cpu, kc), 0,
                       fmoe_panel_bytes(cpu, padded) - fmoe_panel_bytes(cpu, kc));
            for (int64_t i = 0; i < m; i += block) {
                const int64_t mi = fmoe_min(block, m - i);
                gemm(mi, padded, a + i, a_step, s->panel, s->c, FMOE_NB, r == 0, &nothing);
                if (r + chunk >= rows)
                    store_block(&cpu->k, s->c, dst + i * v.sn * (int64_t)fmoe_dtype_size(job->dw.dtype), mi, n, v.sn,
                                job->dw.dtype, job->accumulate);
            }
        }
    }
}

/* An expert without rows: zeros, or left alone when accumulating. */
static void zero_task(const fmoe_outer_job *job, int64_t e, int64_t n0, int64_t m)
{
    bool swapped;
    const fmoe_view v = outer_view(job, e, &swapped);
    const int64_t element = (int64_t)fmoe_dtype_size(job->dw.dtype);
    for (int64_t n = n0; n < n0 + m; n++) memset(v.p + n * v.sn * element, 0, (size_t)(v.K * element));
}

void fmoe_outer_worker(void *arg, int worker)
{
    fmoe_outer_run *run = arg;
    const fmoe_outer_job *job = run->job;
    const fmoe_groups *g = job->g;
    int64_t task, position = 0;
    while (fmoe_claim(&run->tasks, &task)) {
        while (task >= run->ends[position]) position++;
        bool swapped;
        const int64_t e = g->order[position], N = outer_view(job, e, &swapped).N, rows = task_rows(job, e, N);
        const int64_t n0 = (task - (position ? run->ends[position - 1] : 0)) * rows, m = fmoe_min(rows, N - n0);
        if (g->off[e] < g->off[e + 1]) outer_task(job, &job->scratch[worker], e, n0, m);
        else if (!job->accumulate) zero_task(job, e, n0, m);
    }
}

void fmoe_outer_prepare(fmoe_outer_run *run, const fmoe_outer_job *job, int i)
{
    const fmoe_groups *g = job->g;
    *run = (fmoe_outer_run){.job = job, .ends = g->ends + i * g->E};
    for (int64_t j = 0; j < g->E; j++) {
        bool swapped;
        const int64_t e = g->order[j], N = outer_view(job, e, &swapped).N;
        run->tasks.n += fmoe_ceil_div(N, task_rows(job, e, N));
        run->ends[j] = run->tasks.n;
    }
}

void fmoe_multiply_outer(const fmoe_outer_job *job)
{
    fmoe_outer_run run;
    fmoe_outer_prepare(&run, job, 0);
    if (run.tasks.n) fmoe_parallel(job->p, fmoe_outer_worker, &run);
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
            store_block(k, sum, dst + n0 * element, 1, n, 0, dtype, run->accumulate);
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
