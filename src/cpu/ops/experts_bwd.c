/* SPDX-License-Identifier: Apache-2.0
 *
 * experts_bwd.c - the fused layer, backward.
 *
 *   dA[r]  = dout[token(r)] . W2[e]                  its epilogue, row by row in registers and L1:
 *              a, dh = activation and its gradient at the saved h, with dA scaled by p
 *              dp[r] = <dA[r], a[r]> (+ <dout, b2>)    the gradient of the routing weight: y is never needed
 *              pa[r] = p[r] * a[r]                     so that dW2 needs no scaling
 *   dx[t]  = sum over the rows of t of dh[r] . W1[e]
 *   dW2[e] = dout^T . pa,   dW1[e] = dh^T . x         over the rows of e
 *
 * Adapters add a low-rank term to dA and to dx, whose rows m2 = dout . B2 and m1 = dh . B1 also make their gradients:
 *
 *   dB2[e] = dout^T . (pa . A2^T),   dA2[e] = m2^T . pa,   dB1[e] = dh^T . (x . A1^T),   dA1[e] = m1^T . x
 *
 * What is not asked for is not computed. Columns of dh stand in the stored order of W1's rows, so interleaved weights
 * and their gradients need no shuffling. */
#include "cpu/ops/ops.h"

typedef struct backward_buffers {
    fmoe_groups g;
    fmoe_scratch *scratch;
    void *h, *dh;    /* [R, 2I or I] plan's dtype, work type; h NULL: it is in the saved state, dh NULL: it is over h */
    void *pa;        /* [R, I] work type */
    float *dp_parts; /* [blocks of I, R]: a task writes lines of its own */
    void *l1, *m1;   /* [R, rank1] work type */
    void *l2, *m2;   /* [R, rank2] work type */
    fmoe_lora_factors factors;
} backward_buffers;

static int64_t i_blocks(const fmoe_plan_impl *p) { return fmoe_ceil_div(p->d.I, FMOE_NB); }

/* dh takes the place of h, element by element, where h is ours to write over and both have one layout. */
static bool dh_over_h(const fmoe_plan_impl *p)
{
    const bool alike = fmoe_cpu(p)->work_type == p->d.dtype && !(p->gated && (p->d.flags & FMOE_INTERLEAVED));
    return alike && (p->d.flags & (FMOE_RECOMPUTE | FMOE_REUSE_SAVED));
}

static void carve_backward(const fmoe_plan_impl *p, int64_t T, fmoe_carve *c, backward_buffers *b)
{
    const fmoe_cpu_plan *cpu = fmoe_cpu(p);
    const size_t work = fmoe_dtype_size(cpu->work_type);
    int64_t R, elements;
    if (__builtin_mul_overflow(T, p->d.k, &R) || __builtin_mul_overflow(R, 2 * p->d.I, &elements)) {
        c->overflow = true;
        return;
    }
    fmoe_groups_carve(&b->g, c, p->d.E, R);
    fmoe_gather_carve(&b->g, c, p, R, fmoe_max(p->d.H, p->h_cols));
    fmoe_widen_carve(&b->g, c, p, T, p->d.H);
    b->scratch = fmoe_carve_take(c, cpu->threads, sizeof *b->scratch);
    fmoe_scratch_carve(b->scratch, c, p,
                       fmoe_max(FMOE_TOKENS_LEAST, fmoe_min(T, FMOE_TOKEN_BLOCK)) * fmoe_combine_columns(cpu, p->d.H));
    b->dh = dh_over_h(p) ? NULL : fmoe_carve_take(c, R * p->h_cols, work);
    b->pa = fmoe_carve_take(c, R * p->d.I, work);
    b->dp_parts = fmoe_carve_take(c, R * i_blocks(p), sizeof(float));
    b->h = p->d.flags & FMOE_RECOMPUTE ? fmoe_carve_take(c, R * p->h_cols, fmoe_dtype_size(p->d.dtype)) : NULL;
    b->l1 = fmoe_carve_take(c, R, (size_t)p->d.rank1 * work);
    b->m1 = fmoe_carve_take(c, R, (size_t)p->d.rank1 * work);
    b->l2 = fmoe_carve_take(c, R, (size_t)p->d.rank2 * work);
    b->m2 = fmoe_carve_take(c, R, (size_t)p->d.rank2 * work);
    fmoe_lora_factors_carve(&b->factors, c, p);
}

void fmoe_cpu_experts_backward_carve(const fmoe_plan_impl *p, int64_t T, fmoe_carve *c)
{
    backward_buffers b;
    carve_backward(p, T, c, &b);
}

/* ---- epilogue of dA ---- */

typedef struct dh_ctx {
    const fmoe_plan_impl *p;
    const fmoe_groups *g;
    const fmoe_tensor *weights;
    fmoe_act_params act;
    const char *h;
    char *dh, *pa;
    float *dp_parts;
    bool interleaved;
} dh_ctx;

/* Columns [n0, n0+n) of all rows at once; what nobody asked for goes to `spare`. */
static void dh_block(const dh_ctx *x, int64_t row, int64_t rows, int64_t n0, int64_t n, const float *c)
{
    const fmoe_plan_impl *p = x->p;
    const fmoe_cpu_plan *cpu = fmoe_cpu(p);
    const int64_t he = (int64_t)fmoe_dtype_size(p->d.dtype), we = (int64_t)fmoe_dtype_size(cpu->work_type);
    const int64_t at = row * p->h_cols + n0, up = p->gated ? p->d.I : 0;
    float weights[FMOE_ROW_BLOCK], spare[3][FMOE_NB];
    for (int64_t i = 0; i < rows; i++)
        weights[i] = fmoe_get_float(fmoe_data(x->weights), fmoe_tensor_dtype(x->weights), x->g->slot[row + i]);
    fmoe_act_rows r = {.m = rows,
                       .n = n,
                       .g = x->h + at * he,
                       .u = x->h + (at + up) * he,
                       .dg = spare[0],
                       .du = spare[1],
                       .pa = spare[2],
                       .h_stride = p->h_cols,
                       .h_type = p->d.dtype,
                       .type = cpu->work_type,
                       .da = c,
                       .p = weights,
                       .dot = x->dp_parts + n0 / FMOE_NB * x->g->R + row};
    if (x->dh) {
        r.dg = x->dh + at * we;
        r.du = x->dh + (at + up) * we;
        r.dh_stride = p->h_cols;
    }
    if (x->pa) {
        r.pa = x->pa + (row * p->d.I + n0) * we;
        r.pa_stride = p->d.I;
    }
    cpu->k.act_backward(&x->act, &r);
}

/* The same row by row, where columns of gate and up alternate in dh. */
static void dh_row(const dh_ctx *x, int64_t r, int64_t n0, int64_t n, const float *c)
{
    const fmoe_plan_impl *p = x->p;
    const fmoe_cpu_plan *cpu = fmoe_cpu(p);
    const int64_t he = (int64_t)fmoe_dtype_size(p->d.dtype), we = (int64_t)fmoe_dtype_size(cpu->work_type);
    const char *const h = x->h + (r * p->h_cols + n0) * he;
    const float weight = fmoe_get_float(fmoe_data(x->weights), fmoe_tensor_dtype(x->weights), x->g->slot[r]);
    float dg[FMOE_NB], du[FMOE_NB], pa[FMOE_NB], both[2 * FMOE_NB];
    fmoe_act_rows row = {
        .m = 1, .n = n, .g = h, .u = h + p->d.I * he, .dg = dg, .du = du, .pa = pa, .da = c, .p = &weight};
    row.h_type = p->d.dtype;
    row.type = FMOE_F32;
    row.dot = x->dp_parts + n0 / FMOE_NB * x->g->R + r;
    cpu->k.act_backward(&x->act, &row);
    for (int64_t j = 0; j < n; j++) {
        both[2 * j] = dg[j];
        both[2 * j + 1] = du[j];
    }
    if (x->pa) fmoe_store_row(&cpu->k, cpu->work_type, x->pa + (r * p->d.I + n0) * we, pa, n);
    if (x->dh) fmoe_store_row(&cpu->k, cpu->work_type, x->dh + (r * p->h_cols + 2 * n0) * we, both, 2 * n);
}

static void dh_epilogue(void *arg, int64_t e, int64_t row, int64_t rows, int64_t n0, int64_t n, float *c)
{
    (void)e;
    const dh_ctx *x = arg;
    if (!x->interleaved) dh_block(x, row, rows, n0, n, c);
    else
        for (int64_t i = 0; i < rows; i++) dh_row(x, row + i, n0, n, c + i * FMOE_NB);
}

/* What the epilogue reads and writes, half by half. */
static void dh_operands(const dh_ctx *x, fmoe_epilogue_operand *t)
{
    const fmoe_plan_impl *p = x->p;
    const int64_t he = (int64_t)fmoe_dtype_size(p->d.dtype), we = (int64_t)fmoe_dtype_size(fmoe_cpu(p)->work_type);
    for (int64_t half = 0; half < p->h_cols; half += p->d.I) {
        *t++ = (fmoe_epilogue_operand){x->h + half * he, p->h_cols * he, he};
        if (x->dh && x->dh != x->h && !x->interleaved)
            *t++ = (fmoe_epilogue_operand){x->dh + half * we, p->h_cols * we, we};
    }
    if (x->pa) *t = (fmoe_epilogue_operand){x->pa, p->d.I * we, we};
}

/* ---- dp ---- */

typedef struct dp_ctx {
    const fmoe_plan_impl *p;
    const fmoe_experts_args *args;
    const backward_buffers *b;
    fmoe_tasks tasks;
} dp_ctx;

/* <dout[t], b2[e]>: the part of y that is the bias. */
static float bias_part(const dp_ctx *x, int64_t e, int64_t t)
{
    const fmoe_tensor *dout = x->args->dout, *b2 = x->args->w.b2;
    const fmoe_kernels *k = &fmoe_cpu(x->p)->k;
    const int d_type = fmoe_tensor_dtype(dout), b_type = fmoe_tensor_dtype(b2);
    const char *d = (const char *)fmoe_data(dout) + t * fmoe_stride(dout, 0) * (int64_t)fmoe_dtype_size(d_type);
    const char *b = (const char *)fmoe_data(b2) + e * fmoe_stride(b2, 0) * (int64_t)fmoe_dtype_size(b_type);
    float sum = 0, x1[FMOE_NB], x2[FMOE_NB];
    for (int64_t n0 = 0; n0 < x->p->d.H; n0 += FMOE_NB) {
        const int64_t n = fmoe_min(FMOE_NB, x->p->d.H - n0);
        fmoe_load_row(k, d_type, x1, d + n0 * (int64_t)fmoe_dtype_size(d_type), n);
        fmoe_load_row(k, b_type, x2, b + n0 * (int64_t)fmoe_dtype_size(b_type), n);
        sum += k->dot(x1, x2, n);
    }
    return sum;
}

static void dp_worker(void *arg, int worker)
{
    (void)worker;
    dp_ctx *x = arg;
    const fmoe_groups *g = &x->b->g;
    const fmoe_tensor *dweights = x->args->dweights;
    const int64_t blocks = i_blocks(x->p);
    int64_t e;
    while (fmoe_claim(&x->tasks, &e))
        for (int64_t r = g->off[e]; r < g->off[e + 1]; r++) {
            float sum = 0;
            for (int64_t i = 0; i < blocks; i++) sum += x->b->dp_parts[i * g->R + r];
            if (x->args->w.b2) sum += bias_part(x, e, g->token[r]);
            fmoe_set_float(fmoe_data(dweights), fmoe_tensor_dtype(dweights), g->slot[r], sum);
        }
}

/* Skipped slots have no row: their gradient is zero. */
static void zero_dweights(const fmoe_tensor *dw)
{
    if (dw->shape[0] == 0) return;
    memset(fmoe_data(dw), 0, (size_t)(dw->shape[0] * dw->shape[1]) * fmoe_dtype_size(fmoe_tensor_dtype(dw)));
}

/* ---- the pass ---- */

/* The weight gradients that are asked for. */
typedef struct gradients {
    fmoe_wgrad_job job[FMOE_WGRADS];
    fmoe_wgrad_run run[FMOE_WGRADS];
    int n;
} gradients;

/* dW[e] = left^T . right over the rows of e, left from a column on; nothing where nobody asked for it. */
static void add_wgrad(gradients *all, const fmoe_wgrad_job *like, fmoe_rows left, int64_t column, fmoe_rows right,
                      fmoe_stack dw)
{
    if (!dw.t) return;
    fmoe_wgrad_job *job = &all->job[all->n];
    *job = *like;
    job->a = left;
    job->a_column = column;
    job->b = right;
    job->dw = dw;
    fmoe_wgrad_prepare(&all->run[all->n], job, all->n);
    all->n++;
}

fmoe_status fmoe_cpu_experts_backward(const fmoe_plan_impl *p, const fmoe_experts_args *given, const fmoe_run *run)
{
    fmoe_experts_args narrow = *given, *const args = &narrow;
    const fmoe_cpu_plan *cpu = fmoe_cpu(p);
    const fmoe_weights *w = &args->w, *dw = &args->dw;
    backward_buffers b;
    const bool accumulate = (run->flags & FMOE_ACCUMULATE) != 0;
    fmoe_carve c = fmoe_carve_begin(run->workspace, 64);
    carve_backward(p, args->x->shape[0], &c, &b);
    FMOE_TRY(fmoe_groups_from_ids(&b.g, p, args->ids));
    args->w = fmoe_lora_narrow_factors(p, &b.g, &b.factors, &given->w);

    const fmoe_rows x = fmoe_rows_of(args->x, b.g.token), dout = fmoe_rows_of(args->dout, b.g.token);
    if (!b.h) b.h = args->saved;
    if (!b.dh) b.dh = b.h;
    const fmoe_rows dh = fmoe_rows_buffer(b.dh, p->h_cols, cpu->work_type);
    const fmoe_rows pa = fmoe_rows_buffer(b.pa, p->d.I, cpu->work_type);
    fmoe_rows m1 = {0}, m2 = {0};
    const bool need_dw1 = dw->w1 || dw->up || dw->gate || dw->lora_a1 || dw->lora_b1;
    const bool need_dw2 = dw->w2 || dw->down || dw->lora_a2 || dw->lora_b2;
    const bool need_dh = args->dx || need_dw1 || dw->b1;
    if (need_dh || need_dw2 || args->dweights) {
        if (p->d.flags & FMOE_RECOMPUTE) fmoe_experts_up(p, args, &b.g, b.scratch, b.l1, b.h, NULL);
        dh_ctx ctx = {.p = p,
                      .g = &b.g,
                      .weights = args->weights,
                      .act = fmoe_act_of(p),
                      .h = b.h,
                      .dh = need_dh ? b.dh : NULL,
                      .pa = need_dw2 ? b.pa : NULL,
                      .dp_parts = b.dp_parts,
                      .interleaved = p->gated && fmoe_w1_whole(p, w)};
        fmoe_gemm_job job = {.p = p,
                             .cpu = cpu,
                             .g = &b.g,
                             .scratch = b.scratch,
                             .a = fmoe_rows_of(args->dout, b.g.token),
                             .w = {fmoe_w2_stack(p, w)},
                             .n_w = 1,
                             .epilogue = dh_epilogue,
                             .ctx = &ctx};
        job.w[0].swap = true; /* contract over H */
        dh_operands(&ctx, job.operands);
        if (p->d.rank2) {
            m2 = job.lora.l = fmoe_lora_project(p, &b.g, b.scratch, job.a, w->lora_b2, true, w->lora_scale2, b.m2);
            job.lora.b[0] = fmoe_lora_factor(w->lora_a2, true);
        }
        fmoe_grouped_gemm(&job);
    }
    if (p->d.rank1 && (args->dx || dw->lora_a1))
        m1 = fmoe_lora_project(p, &b.g, b.scratch, dh, w->lora_b1, true, w->lora_scale1, b.m1);
    fmoe_rows l1 = {0}, l2 = {0};
    if (dw->lora_b2)
        l2 = fmoe_lora_project(p, &b.g, b.scratch, pa, w->lora_a2, false, w->lora_scale2,
                               b.l2); /* scaled by p, as pa is */
    if (dw->lora_b1) l1 = fmoe_lora_project(p, &b.g, b.scratch, x, w->lora_a1, false, w->lora_scale1, b.l1);

    /* Everything that is left depends on the above alone: one pool of tasks, the long ones first. */
    fmoe_part parts[2 + FMOE_WGRADS];
    int n_parts = 0;
    fmoe_combine_job dx_job = {.p = p,
                               .cpu = cpu,
                               .g = &b.g,
                               .scratch = b.scratch,
                               .a = dh,
                               .w = {fmoe_w1_stack(p, w, 0), fmoe_w1_stack(p, w, 1)},
                               .n_w = fmoe_w1_whole(p, w) ? 1 : 2,
                               .lora = {m1, {fmoe_lora_factor(w->lora_a1, true)}},
                               .out = args->dx,
                               .add = (run->flags & FMOE_ADD_DX) != 0};
    fmoe_combine_run dx_run;
    dx_job.w[0].swap = dx_job.w[1].swap = true;
    if (args->dx) {
        fmoe_combine_prepare(&dx_run, &dx_job);
        parts[n_parts++] = (fmoe_part){dx_run.fn, &dx_run, false};
    }
    gradients dws = {.n = 0};
    const fmoe_wgrad_job like = {.p = p, .cpu = cpu, .g = &b.g, .scratch = b.scratch, .accumulate = accumulate};
    add_wgrad(&dws, &like, dout, 0, pa, fmoe_w2_stack(p, dw));
    fmoe_stack w1 = fmoe_w1_stack(p, dw, 0);
    if (!w1.list) w1.row = w1.rows = 0; /* both halves at once */
    add_wgrad(&dws, &like, dh, 0, x, w1);
    if (w1.list && p->gated) add_wgrad(&dws, &like, dh, p->d.I, x, fmoe_w1_stack(p, dw, 1));
    const int large = dws.n; /* the rest are as narrow as an adapter */
    add_wgrad(&dws, &like, m2, 0, pa, fmoe_lora_factor(dw->lora_a2, false));
    add_wgrad(&dws, &like, m1, 0, x, fmoe_lora_factor(dw->lora_a1, false));
    add_wgrad(&dws, &like, dout, 0, l2, fmoe_lora_factor(dw->lora_b2, false));
    add_wgrad(&dws, &like, dh, 0, l1, fmoe_lora_factor(dw->lora_b1, false));
    for (int i = 0; i < dws.n; i++) parts[n_parts++] = (fmoe_part){fmoe_wgrad_worker, &dws.run[i], i >= large};
    dp_ctx dp = {.p = p, .args = args, .b = &b, .tasks.n = b.g.E};
    if (args->dweights) {
        zero_dweights(args->dweights);
        parts[n_parts++] = (fmoe_part){dp_worker, &dp, true};
    }
    fmoe_parallel_parts(p, parts, n_parts);
    if (dw->b1) fmoe_column_sums(p, &b.g, &dh, NULL, dw->b1, false, accumulate);
    if (dw->b2) fmoe_column_sums(p, &b.g, &dout, args->weights, dw->b2, false, accumulate);
    return FMOE_OK;
}
