/* SPDX-License-Identifier: Apache-2.0
 * gmm.c - grouped matmul, forward and backward, stacked and as lists. */
#include "cpu/ops/ops.h"

typedef struct gmm_buffers {
    fmoe_groups g;
    fmoe_scratch *scratch;
} gmm_buffers;

static void gmm_carve(const fmoe_plan_impl *p, fmoe_carve *c, gmm_buffers *b)
{
    fmoe_groups_carve(&b->g, c, p->d.E, 0);
    b->scratch = fmoe_carve_take(c, fmoe_cpu(p)->threads, sizeof *b->scratch);
    fmoe_scratch_carve(b->scratch, c, p, FMOE_TOKEN_BLOCK * FMOE_NB);
}

void fmoe_cpu_gmm_carve(const fmoe_plan_impl *p, fmoe_carve *c)
{
    gmm_buffers b;
    gmm_carve(p, c, &b);
}

static fmoe_status gmm_groups(const fmoe_plan_impl *p, const fmoe_gmm_args *a, const fmoe_tensor *rows,
                              const fmoe_run *run, gmm_buffers *b)
{
    fmoe_carve c = fmoe_carve_begin(run->workspace, 64);
    gmm_carve(p, &c, b);
    if (!a->list) return fmoe_groups_from_sizes(&b->g, a->sizes, a->cumulative, rows->shape[0]);
    b->g.off[0] = b->g.R = b->g.active = 0;
    for (int64_t e = 0; e < p->d.E; e++) {
        b->g.R += rows[e].shape[0];
        b->g.active += rows[e].shape[0] > 0;
        b->g.off[e + 1] = b->g.R;
        b->g.order[e] = e;
    }
    return FMOE_OK;
}

static fmoe_rows gmm_rows_of(const fmoe_gmm_args *a, const fmoe_tensor *t)
{
    fmoe_rows r = {.list = t, .dtype = fmoe_tensor_dtype(t)};
    return a->list ? r : fmoe_rows_of(t, NULL);
}

/* w is [K,N] where products want [N,K]: swap. */
static fmoe_stack gmm_stack(const fmoe_gmm_args *a, const fmoe_tensor *w, bool swap)
{
    return (fmoe_stack){.t = w, .list = a->list, .swap = swap, .dtype = fmoe_tensor_dtype(w)};
}

/* Quantised, rows of codes are along N (FMOE_QUANT_IN_OUT: along K) and what products want in the forward (backward)
 * as they are. x and y: the rows that have K and N columns. */
static fmoe_stack gmm_w(const fmoe_plan_impl *p, const fmoe_gmm_args *a, bool back, const fmoe_tensor *x,
                        const fmoe_tensor *y)
{
    if (!a->quant) return gmm_stack(a, a->w, !back);
    const bool in_out = a->quant->flags & FMOE_QUANT_IN_OUT;
    return (fmoe_stack){.t = a->w,
                        .list = a->list,
                        .swap = back != in_out,
                        .dtype = p->d.dtype,
                        .quant = a->quant,
                        .K = in_out ? p->d.N : p->d.K,
                        .like = !a->list ? NULL
                                : in_out ? y
                                         : x};
}

/* Where a block of results goes: y (with bias) or dx (added to, if asked). */
typedef struct gmm_epilogue_ctx {
    const fmoe_cpu_plan *cpu;
    const fmoe_groups *g;
    fmoe_rows y;
    const fmoe_tensor *bias;
    bool list, add;
} gmm_epilogue_ctx;

static void gmm_epilogue(void *arg, int64_t e, int64_t row, int64_t rows, int64_t n0, int64_t n, float *c)
{
    const gmm_epilogue_ctx *x = arg;
    const fmoe_kernels *k = &x->cpu->k;
    const int64_t element = (int64_t)fmoe_dtype_size(x->y.dtype);
    float bias[FMOE_NB], old[FMOE_NB];
    if (x->bias) {
        const fmoe_tensor *t = x->list ? x->bias + e : x->bias;
        const int dtype = fmoe_tensor_dtype(t);
        const int64_t at = (x->list ? 0 : e * fmoe_stride(t, 0)) + n0;
        fmoe_load_row(k, dtype, bias, (const char *)fmoe_data(t) + at * (int64_t)fmoe_dtype_size(dtype), n);
    }
    for (int64_t i = 0; i < rows; i++, c += FMOE_NB) {
        char *dst = (char *)(uintptr_t)fmoe_row(&x->y, x->g, e, row + i) + n0 * element;
        if (x->bias) k->axpy(c, 1.0f, bias, n);
        if (x->add) {
            fmoe_load_row(k, x->y.dtype, old, dst, n);
            k->axpy(c, 1.0f, old, n);
        }
        fmoe_store_row(k, x->y.dtype, dst, c, n);
    }
}

fmoe_status fmoe_cpu_gmm_forward(const fmoe_plan_impl *p, const fmoe_gmm_args *a, const fmoe_run *run)
{
    gmm_buffers b;
    FMOE_TRY(gmm_groups(p, a, a->x, run, &b));
    gmm_epilogue_ctx ctx = {.cpu = fmoe_cpu(p), .g = &b.g, .y = gmm_rows_of(a, a->y), .bias = a->bias, .list = a->list};
    const fmoe_gemm_job job = {.p = p,
                               .cpu = fmoe_cpu(p),
                               .g = &b.g,
                               .scratch = b.scratch,
                               .a = gmm_rows_of(a, a->x),
                               .w = {gmm_w(p, a, false, a->x, a->y)},
                               .n_w = 1,
                               .epilogue = gmm_epilogue,
                               .ctx = &ctx};
    fmoe_grouped_gemm(&job);
    return FMOE_OK;
}

/* Rows after the last group. */
static void zero_tail(const fmoe_tensor *dx, int64_t from)
{
    const size_t element = fmoe_dtype_size(fmoe_tensor_dtype(dx));
    for (int64_t r = from; r < dx->shape[0]; r++)
        memset((char *)fmoe_data(dx) + (size_t)(r * fmoe_stride(dx, 0)) * element, 0, (size_t)dx->shape[1] * element);
}

fmoe_status fmoe_cpu_gmm_backward(const fmoe_plan_impl *p, const fmoe_gmm_args *a, const fmoe_run *run)
{
    gmm_buffers b;
    const bool accumulate = (run->flags & FMOE_ACCUMULATE) != 0, add = (run->flags & FMOE_ADD_DX) != 0;
    FMOE_TRY(gmm_groups(p, a, a->dy, run, &b));
    /* f32 dy with bf16 x and w (the router): all of it in f32. */
    const fmoe_cpu_plan f32 = fmoe_cpu_f32(fmoe_cpu(p));
    const fmoe_rows dy = gmm_rows_of(a, a->dy);
    const fmoe_cpu_plan *cpu = dy.dtype == p->d.dtype ? fmoe_cpu(p) : &f32;
    if (a->dx) {
        gmm_epilogue_ctx ctx = {.cpu = cpu, .g = &b.g, .y = gmm_rows_of(a, a->dx), .list = a->list, .add = add};
        const fmoe_gemm_job job = {.p = p,
                                   .cpu = cpu,
                                   .g = &b.g,
                                   .scratch = b.scratch,
                                   .a = dy,
                                   .w = {gmm_w(p, a, true, a->dx, a->dy)},
                                   .n_w = 1,
                                   .epilogue = gmm_epilogue,
                                   .ctx = &ctx};
        fmoe_grouped_gemm(&job);
        if (!a->list && !add) zero_tail(a->dx, b.g.R);
    }
    if (a->dw) {
        const fmoe_wgrad_job job = {.p = p,
                                    .cpu = cpu,
                                    .g = &b.g,
                                    .scratch = b.scratch,
                                    .a = gmm_rows_of(a, a->x),
                                    .b = dy,
                                    .dw = gmm_stack(a, a->dw, false),
                                    .accumulate = accumulate};
        fmoe_wgrad(&job);
    }
    if (a->dbias) fmoe_column_sums(p, &b.g, &dy, NULL, a->dbias, a->list, accumulate);
    return FMOE_OK;
}
