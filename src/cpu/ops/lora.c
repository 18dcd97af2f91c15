/* SPDX-License-Identifier: Apache-2.0
 *
 * lora.c - the first product of a LoRA adapter, rows by its factor A, and factors that are wider than the plan's dtype.
 */
#include "cpu/ops/ops.h"

fmoe_stack fmoe_lora_factor(const fmoe_tensor *factor, bool swap)
{
    return (fmoe_stack){.t = factor, .swap = swap, .dtype = factor ? fmoe_tensor_dtype(factor) : 0};
}

/* ---- rows by one factor ---- */

typedef struct lora_project_ctx {
    const fmoe_cpu_plan *cpu;
    char *l;
    int64_t rank;
    float scale;
} lora_project_ctx;

static void lora_epilogue(void *ctx, int64_t e, int64_t row, int64_t rows, int64_t n0, int64_t n, float *c)
{
    (void)e;
    const lora_project_ctx *x = ctx;
    const int64_t element = (int64_t)fmoe_dtype_size(x->cpu->work_type);
    for (int64_t i = 0; i < rows; i++, c += FMOE_NB) {
        for (int64_t j = 0; j < n; j++) c[j] *= x->scale;
        fmoe_store_row(&x->cpu->k, x->cpu->work_type, x->l + ((row + i) * x->rank + n0) * element, c, n);
    }
}

fmoe_rows fmoe_lora_project(const fmoe_plan_impl *p, const fmoe_groups *g, fmoe_scratch *scratch, fmoe_rows a,
                            const fmoe_tensor *factor, bool swap, float scale, void *l)
{
    lora_project_ctx ctx = {fmoe_cpu(p), l, factor->shape[swap ? 2 : 1], fmoe_lora_scale(scale)};
    const fmoe_gemm_job job = {.p = p,
                               .cpu = fmoe_cpu(p),
                               .g = g,
                               .scratch = scratch,
                               .a = a,
                               .w = {fmoe_lora_factor(factor, swap)},
                               .n_w = 1,
                               .epilogue = lora_epilogue,
                               .ctx = &ctx};
    fmoe_grouped_gemm(&job);
    return fmoe_rows_buffer(l, ctx.rank, fmoe_cpu(p)->work_type);
}

/* ---- factors in f32 of a plan in 16 bits: those of the experts that have rows, rounded ---- */

void fmoe_lora_factors_carve(fmoe_lora_factors *f, fmoe_carve *c, const fmoe_plan_impl *p)
{
    const fmoe_desc *d = &p->d;
    const int64_t size[4] = {d->rank1 * d->H, d->rank1 * p->h_cols, d->rank2 * d->I, d->rank2 * d->H};
    const size_t element = fmoe_dtype_size(d->dtype);
    for (int i = 0; i < 4; i++) f->room[i] = fmoe_carve_take(c, element == 2 ? d->E : 0, (size_t)size[i] * element);
}

typedef struct narrow_run {
    const fmoe_plan_impl *p;
    const fmoe_groups *g;
    const fmoe_tensor *from[4]; /* or NULL */
    const fmoe_lora_factors *to;
    fmoe_tasks tasks;
} narrow_run;

/* The last dimension but one is contiguous. */
static bool is_transposed(const fmoe_tensor *t) { return fmoe_stride(t, 2) != 1 && t->shape[2] > 1; }

static void narrow_worker(void *arg, int worker)
{
    (void)worker;
    narrow_run *run = arg;
    const int dtype = run->p->d.dtype;
    const int64_t element = (int64_t)fmoe_dtype_size(dtype);
    int64_t task;
    while (fmoe_claim(&run->tasks, &task)) {
        const fmoe_tensor *t = run->from[task % 4];
        if (!t) continue;
        const int64_t e = run->g->order[task / 4], between = fmoe_stride(t, is_transposed(t) ? 2 : 1);
        int64_t runs = t->shape[is_transposed(t) ? 2 : 1], length = t->shape[is_transposed(t) ? 1 : 2];
        const float *from = (const float *)fmoe_data(t) + e * fmoe_stride(t, 0);
        char *to = (char *)run->to->room[task % 4] + e * runs * length * element;
        if (between == length) length *= runs, runs = 1;
        for (int64_t i = 0; i < runs; i++)
            fmoe_store_row(&fmoe_cpu(run->p)->k, dtype, to + i * length * element, from + i * between, length);
    }
}

fmoe_weights fmoe_lora_narrow_factors(const fmoe_plan_impl *p, const fmoe_groups *g, fmoe_lora_factors *f,
                                      const fmoe_weights *w)
{
    fmoe_weights out = *w;
    const fmoe_tensor **factor[4] = {&out.lora_a1, &out.lora_b1, &out.lora_a2, &out.lora_b2};
    narrow_run run = {.p = p, .g = g, .to = f};
    for (int i = 0; i < 4; i++) {
        const fmoe_tensor *t = *factor[i];
        if (!t || fmoe_tensor_dtype(t) == p->d.dtype) continue;
        const int64_t a = t->shape[1], b = t->shape[2];
        f->strides[i][0] = a * b;
        f->strides[i][1] = is_transposed(t) ? 1 : b;
        f->strides[i][2] = is_transposed(t) ? a : 1;
        f->t[i] = *t;
        f->t[i].data = f->room[i];
        f->t[i].byte_offset = 0;
        f->t[i].strides = f->strides[i];
        f->t[i].dtype = (fmoe_datatype){p->d.dtype == FMOE_BF16 ? 4 : 2, 16, 1};
        run.from[i] = t;
        run.tasks.n = 4 * g->active;
        *factor[i] = &f->t[i];
    }
    if (run.tasks.n) fmoe_parallel(p, narrow_worker, &run);
    return out;
}
