/* SPDX-License-Identifier: Apache-2.0
 *
 * experts_fwd.c - the fused layer, forward: sort, up with the activation in its epilogue, down with the combination in
 * its epilogue. Between the two products only a [R,I] exists; x is gathered by row pointers, y is never stored. */
#include <inttypes.h>

#include "cpu/ops/ops.h"

/* ---- weights ---- */

static bool is_list(const fmoe_weights *w) { return w->gate || w->up || w->down; }

/* Interleaved or ungated W1 is one matrix in stored order; otherwise gate and up are two. */
bool fmoe_w1_whole(const fmoe_plan_impl *p, const fmoe_weights *w)
{
    return !p->gated || (!is_list(w) && (p->d.flags & FMOE_INTERLEAVED));
}

fmoe_stack fmoe_w1_stack(const fmoe_plan_impl *p, const fmoe_weights *w, int half)
{
    const fmoe_tensor *t = !is_list(w) ? w->w1 : half == 0 && p->gated ? w->gate : w->up;
    fmoe_stack s = {.t = t, .list = is_list(w), .K = p->d.H};
    s.quant = s.list && half == 0 && p->gated ? w->quant_gate : w->quant1;
    if (t) s.dtype = s.quant ? p->d.dtype : fmoe_tensor_dtype(t);
    if (!s.list && !fmoe_w1_whole(p, w)) {
        s.row = half * p->d.I;
        s.rows = p->d.I;
    }
    return s;
}

fmoe_stack fmoe_w2_stack(const fmoe_plan_impl *p, const fmoe_weights *w)
{
    const fmoe_tensor *t = w->down ? w->down : w->w2;
    fmoe_stack s = {.t = t, .list = w->down != NULL, .quant = w->quant2, .K = p->d.I};
    if (t) s.dtype = s.quant ? p->d.dtype : fmoe_tensor_dtype(t);
    return s;
}

/* ---- up: h = x . W1^T + b1 (+ l1 . B1^T, l1 = x . A1^T), a = act(h) ---- */

typedef struct up_ctx {
    const fmoe_plan_impl *p;
    const fmoe_tensor *b1;
    fmoe_act_params act;
    char *h, *a;
    bool whole;
    bool nontemporal; /* h is stored nontemporally */
} up_ctx;

/* The bias of a block's 64 columns, in their order; n elements of each half. */
static void block_bias(const up_ctx *u, int64_t e, int64_t n0, int64_t n, float *bias)
{
    const fmoe_kernels *k = &fmoe_cpu(u->p)->k;
    const int dtype = fmoe_tensor_dtype(u->b1);
    const int64_t element = (int64_t)fmoe_dtype_size(dtype);
    const char *row = (const char *)fmoe_data(u->b1) + e * fmoe_stride(u->b1, 0) * element;
    fmoe_load_row(k, dtype, bias, row + n0 * element, n);
    if (!u->whole) fmoe_load_row(k, dtype, bias + FMOE_NB / 2, row + (u->p->d.I + n0) * element, n);
}

static void up_epilogue(void *ctx, int64_t e, int64_t row, int64_t rows, int64_t n0, int64_t n, float *c)
{
    const up_ctx *u = ctx;
    const fmoe_cpu_plan *cpu = fmoe_cpu(u->p);
    const fmoe_kernels *k = &cpu->k;
    const int64_t I = u->p->d.I, h_cols = u->p->h_cols;
    const int dtype = u->p->d.dtype, work = cpu->work_type;
    const int64_t he = (int64_t)fmoe_dtype_size(dtype), we = (int64_t)fmoe_dtype_size(work);
    const bool interleaved = u->p->gated && u->whole;
    const int64_t i0 = interleaved ? n0 / 2 : n0, ni = interleaved ? n / 2 : n; /* columns of I */
    float bias[FMOE_NB] = {0}, gate[FMOE_NB], up[FMOE_NB];
    if (u->b1) block_bias(u, e, n0, n, bias);
    for (int64_t i = 0; i < rows && (u->b1 || interleaved || u->act.steps); i++) {
        float *const of_row = c + i * FMOE_NB;
        if (u->act.steps) fmoe_round_row(k, dtype, of_row, u->b1 ? bias : NULL, FMOE_NB);
        else if (u->b1) k->axpy(of_row, 1.0f, bias, FMOE_NB);
        for (int64_t j = 0; j < ni && interleaved; j++) {
            gate[j] = of_row[2 * j];
            up[j] = of_row[2 * j + 1];
        }
        if (!interleaved) continue;
        memcpy(of_row, gate, (size_t)ni * sizeof *gate);
        memcpy(of_row + FMOE_NB / 2, up, (size_t)ni * sizeof *up);
    }
    const float *const v = u->p->gated ? c + FMOE_NB / 2 : c;
    char *const h = u->h + (row * h_cols + i0) * he, *const h_up = h + (u->p->gated ? I * he : 0);
    if (u->h && u->p->gated) fmoe_store_block(k, dtype)(h, h_cols, c, rows, ni, u->nontemporal);
    if (u->h) fmoe_store_block(k, dtype)(h_up, h_cols, v, rows, ni, u->nontemporal);
    if (u->a) k->act_block(&u->act, c, v, rows, ni, u->a + (row * I + i0) * we, I, work);
}

void fmoe_experts_up(const fmoe_plan_impl *p, const fmoe_experts_args *args, const fmoe_groups *g,
                     fmoe_scratch *scratch, void *l1, void *h, void *a)
{
    bool whole = fmoe_w1_whole(p, &args->w);
    const fmoe_rows x = fmoe_rows_of(args->x, g->token);
    fmoe_stack w1[2] = {fmoe_w1_stack(p, &args->w, 0), fmoe_w1_stack(p, &args->w, 1)};
    if (args->w.packed) w1[0] = w1[1] = fmoe_prepacked_w1(p, args->w.packed, &whole);
    up_ctx ctx = {.p = p, .b1 = args->w.b1, .act = fmoe_act_of(p), .h = h, .a = a, .whole = whole};
    ctx.nontemporal = g->R * p->h_cols * (int64_t)fmoe_dtype_size(p->d.dtype) >= FMOE_NONTEMPORAL_BYTES;
    fmoe_gemm_job job = {.p = p,
                         .cpu = fmoe_cpu(p),
                         .g = g,
                         .scratch = scratch,
                         .a = x,
                         .w = {w1[0], w1[1]},
                         .n_w = whole ? 1 : 2,
                         .epilogue = up_epilogue,
                         .ctx = &ctx};
    if (p->d.rank1) {
        job.lora.l = fmoe_lora_project(p, g, scratch, x, args->w.lora_a1, false, args->w.lora_scale1, l1);
        for (int half = 0; half < job.n_w; half++) {
            job.lora.b[half] = fmoe_lora_factor(args->w.lora_b1, false);
            job.lora.b[half].row = half * p->d.I;
            job.lora.b[half].rows = whole ? 0 : p->d.I;
        }
    }
    fmoe_grouped_gemm(&job);
}

/* ---- the pass ---- */

typedef struct forward_buffers {
    fmoe_groups g;
    fmoe_scratch *scratch;
    void *a;
    void *l1, *l2; /* [R, rank1], [R, rank2] work type */
    fmoe_lora_factors factors;
} forward_buffers;

static void carve_forward(const fmoe_plan_impl *p, int64_t T, fmoe_carve *c, forward_buffers *b)
{
    const fmoe_cpu_plan *cpu = fmoe_cpu(p);
    const size_t work = fmoe_dtype_size(cpu->work_type);
    int64_t R, elements;
    if (__builtin_mul_overflow(T, p->d.k, &R) || __builtin_mul_overflow(R, p->d.I, &elements)) {
        c->overflow = true;
        return;
    }
    fmoe_groups_carve(&b->g, c, p->d.E, R);
    fmoe_gather_carve(&b->g, c, p, R, fmoe_max(p->d.H, p->d.I));
    fmoe_widen_carve(&b->g, c, p, T, p->d.H);
    b->scratch = fmoe_carve_take(c, cpu->threads, sizeof *b->scratch);
    fmoe_scratch_carve(b->scratch, c, p, FMOE_TOKEN_BLOCK * FMOE_NB);
    b->a = fmoe_carve_take(c, elements, work);
    b->l1 = fmoe_carve_take(c, R, (size_t)p->d.rank1 * work);
    b->l2 = fmoe_carve_take(c, R, (size_t)p->d.rank2 * work);
    fmoe_lora_factors_carve(&b->factors, c, p);
}

fmoe_status fmoe_cpu_experts_forward(const fmoe_plan_impl *p, const fmoe_experts_args *given, const fmoe_run *run)
{
    fmoe_experts_args narrow = *given, *const args = &narrow;
    forward_buffers b;
    fmoe_carve c = fmoe_carve_begin(run->workspace, 64);
    carve_forward(p, args->x->shape[0], &c, &b);
    FMOE_TRY(fmoe_groups_from_ids(&b.g, p, args->ids));
    args->w = fmoe_lora_narrow_factors(p, &b.g, &b.factors, &given->w);
    fmoe_experts_up(p, args, &b.g, b.scratch, b.l1, p->d.flags & FMOE_RECOMPUTE ? NULL : args->saved, b.a);
    fmoe_combine_job down = {.p = p,
                             .cpu = fmoe_cpu(p),
                             .g = &b.g,
                             .scratch = b.scratch,
                             .a = fmoe_rows_buffer(b.a, p->d.I, fmoe_cpu(p)->work_type),
                             .w = {args->w.packed ? fmoe_prepacked_w2(p, args->w.packed) : fmoe_w2_stack(p, &args->w)},
                             .n_w = 1,
                             .weights = args->weights,
                             .bias = args->w.b2,
                             .out = args->out,
                             .add = (run->flags & FMOE_ADD_OUT) != 0,
                             .steps = fmoe_steps(p)};
    if (p->d.rank2) {
        down.lora.l = fmoe_lora_project(p, &b.g, b.scratch, down.a, args->w.lora_a2, false, args->w.lora_scale2, b.l2);
        down.lora.b[0] = fmoe_lora_factor(args->w.lora_b2, false);
    }
    fmoe_grouped_gemm_combine(&down);
    return FMOE_OK;
}

void fmoe_cpu_experts_forward_carve(const fmoe_plan_impl *p, int64_t T, fmoe_carve *c)
{
    forward_buffers b;
    carve_forward(p, T, c, &b);
}
