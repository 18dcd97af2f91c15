/* SPDX-License-Identifier: Apache-2.0
 *
 * widen.c - rows of A as f32 products want them, made once before the product: widened, where the level has no unit for
 * their type (widened again for every 64 columns, it is 5 % of the forward), and not a multiple of a page apart where
 * all rows of a tile are read at once (their same bytes would share the eight lines of one set of L1 with the columns
 * that are packed: 6 % of the f32 forward on AVX2 at 64 rows, H = 2048). */
#include "cpu/gemm/jobs.h"

enum { GRAIN = 16 }; /* rows of one piece of work */

/* Elements from one row to the next. */
static int64_t spread_stride(int64_t K) { return K * 4 % 4096 ? K : K + 16; }

static bool is_f32_spread(const fmoe_cpu_plan *cpu, int dtype, int64_t stride)
{
    return dtype == FMOE_F32 && (stride % 4096 || cpu->k.nr == FMOE_NB);
}

void fmoe_widen_carve(fmoe_groups *g, fmoe_carve *c, const fmoe_plan_impl *p, int64_t T, int64_t K)
{
    const fmoe_cpu_plan *cpu = fmoe_cpu(p);
    int64_t elements = 0;
    g->rows_f32 = NULL;
    if (cpu->pairs || is_f32_spread(cpu, p->d.dtype, K * (int64_t)fmoe_dtype_size(p->d.dtype))) return;
    if (__builtin_mul_overflow(T, spread_stride(K), &elements)) c->overflow = true;
    g->f32_rows = T;
    g->f32_k = K;
    g->rows_f32 = fmoe_carve_take(c, elements, sizeof *g->rows_f32);
}

typedef struct widen_run {
    const fmoe_kernels *k;
    const fmoe_groups *g;
    const fmoe_rows *a;
} widen_run;

static void widen_rows(void *ctx, int64_t begin, int64_t end)
{
    const widen_run *run = ctx;
    const fmoe_groups *g = run->g;
    for (int64_t t = begin; t < end; t++)
        fmoe_load_row(run->k, run->a->dtype, g->rows_f32 + t * spread_stride(g->f32_k),
                      run->a->base + t * run->a->stride, g->f32_k);
}

fmoe_rows fmoe_widen_rows(const fmoe_plan_impl *p, const fmoe_groups *g, const fmoe_rows *a, int64_t K)
{
    if (!g->rows_f32 || !a->index || K != g->f32_k || is_f32_spread(fmoe_cpu(p), a->dtype, a->stride)) return *a;
    widen_run run = {&fmoe_cpu(p)->k, g, a};
    fmoe_for_rows(p, g->f32_rows, GRAIN, widen_rows, &run);
    fmoe_rows f32 = fmoe_rows_buffer(g->rows_f32, spread_stride(K), FMOE_F32);
    f32.index = a->index;
    return f32;
}
