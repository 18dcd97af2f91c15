/* SPDX-License-Identifier: Apache-2.0
 *
 * measure.c - how much workspace a pass needs: the walks themselves, on tensors that are only descriptions. They are
 * the most demanding ones a caller may bring: rows with gaps, int64 ids, f32 routing weights, f32 gradients, lists.
 */
#include <stdlib.h>

#include "ascend.h"
#include "ops.h"

typedef struct fake {
    fmoe_tensor t;
    int64_t shape[3], strides[3];
} fake;

#define NOWHERE ((void *)(uintptr_t)((uint64_t)1 << 41))

static fmoe_datatype datatype(int dtype)
{
    switch (dtype) {
    case FMOE_F32: return (fmoe_datatype){2, 32, 1};
    case FMOE_F16: return (fmoe_datatype){2, 16, 1};
    case FMOE_BF16: return (fmoe_datatype){4, 16, 1};
    default: return (fmoe_datatype){0, (uint8_t)-dtype, 1};
    }
}

/* Rows with a gap where the caller may have one (2-D), else packed. */
static const fmoe_tensor *describe(fake *f, int dtype, int ndim, int64_t a, int64_t b, int64_t c)
{
    const int64_t gap = ndim == 2 ? b + 1 : b * c;
    *f = (fake){.shape = {a, b, c}, .strides = {ndim == 1 ? 1 : gap, ndim == 3 ? c : 1, 1}};
    f->t = (fmoe_tensor){.data = NOWHERE,
                         .device = {FMOE_ASCEND, 0},
                         .ndim = ndim,
                         .dtype = datatype(dtype),
                         .shape = f->shape,
                         .strides = f->strides};
    return &f->t;
}

static const fmoe_tensor *packed2(fake *f, int dtype, int64_t a, int64_t b)
{
    describe(f, dtype, 2, a, b, 0);
    f->strides[0] = b;
    return &f->t;
}

/* n matrices, all at one place: not a stack in disguise. */
static fmoe_tensor *list_of(fake *f, int dtype, int64_t n, int64_t a, int64_t b)
{
    fmoe_tensor *list = malloc((size_t)n * sizeof *list);
    if (!list) return NULL;
    packed2(f, dtype, a, b);
    for (int64_t i = 0; i < n; i++) list[i] = f->t;
    return list;
}

/* ---- Each operation ---- */

static void adapters(asc_call *c, fake *f, fmoe_weights *w, int dtype, float scale)
{
    const fmoe_desc *d = &c->p->d;
    if (d->rank1) {
        w->lora_a1 = describe(&f[0], dtype, 3, d->E, d->rank1, d->H);
        w->lora_b1 = describe(&f[1], dtype, 3, d->E, c->p->h_cols, d->rank1);
    }
    if (d->rank2) {
        w->lora_a2 = describe(&f[2], dtype, 3, d->E, d->rank2, d->I);
        w->lora_b2 = describe(&f[3], dtype, 3, d->E, d->H, d->rank2);
    }
    w->lora_scale1 = w->lora_scale2 = scale;
}

/* Codes with grids as large as they can be. Of a stack the rows of all experts are one run where group_rows is 1. */
typedef struct coded {
    fake codes, scale, zeros, scale2;
    fmoe_quant q;
    fmoe_tensor *list[4]; /* of a list: codes, scale, zeros, scale2 of every expert */
} coded;

static const fmoe_tensor *code(asc_call *c, coded *f, bool list, int64_t N, int64_t K, int64_t group_rows)
{
    enum { BYTE = -8 };
    const int64_t E = c->p->d.E, rows = fmoe_ceil_div(N, group_rows);
    f->q = (fmoe_quant){.size = sizeof f->q,
                        .code = group_rows == 1 ? FMOE_CODE_NF4 : FMOE_CODE_E4M3,
                        .group_rows = (int32_t)group_rows,
                        .group_cols = 1,
                        .scale_type = FMOE_SCALE_E4M3,
                        .scale = describe(&f->scale, BYTE, 3, E, rows, K),
                        .zeros = describe(&f->zeros, BYTE, 3, E, rows, K),
                        .scale2 = describe(&f->scale2, FMOE_F32, 1, 1, 0, 0)};
    if (!list) return describe(&f->codes, BYTE, 3, E, N, K);
    f->list[0] = list_of(&f->codes, BYTE, E, N, K);
    f->list[1] = list_of(&f->scale, BYTE, E, rows, K);
    f->list[2] = list_of(&f->zeros, BYTE, E, rows, K);
    f->list[3] = list_of(&f->scale2, FMOE_F32, E, 1, 1);
    for (int i = 0; i < 4; i++)
        if (!f->list[i]) asc_fail(c, FMOE_ERR_NOMEM, "no memory to describe %lld matrices", (long long)E);
    f->q.scale = f->list[1], f->q.zeros = f->list[2], f->q.scale2 = f->list[3];
    return f->list[0];
}

/* What differs between the calls of one plan. */
typedef struct form {
    bool lists;
    int grad;           /* dtype of gradients */
    int64_t group_rows; /* of quantised weights; 0: they are not */
} form;

static void experts(asc_call *c, fmoe_pass pass, int64_t T, form how)
{
    const fmoe_desc *d = &c->p->d;
    const int t = d->dtype, grad = how.grad;
    const int64_t hc = c->p->h_cols;
    const bool bias = d->flags & FMOE_BIAS, lists = how.lists, quant = how.group_rows > 0;
    fake x, ids, p, out, dout, dx, dp, w1, w2, b1, b2, dw1, dw2, db1, db2, lw[3], lg[3], lora[8];
    coded codes[3] = {{.q = {.size = 0}}};
    fmoe_tensor *list[6] = {NULL};
    fmoe_experts_args a = {.size = sizeof a,
                           .x = describe(&x, t, 2, T, d->H, 0),
                           .ids = describe(&ids, -64, 2, T, d->k, 0),
                           .weights = describe(&p, FMOE_F32, 2, T, d->k, 0)};
    if (lists) {
        list[0] = list_of(&lw[0], t, d->E, d->I, d->H);
        list[1] = list_of(&lw[1], t, d->E, d->I, d->H);
        list[2] = list_of(&lw[2], t, d->E, d->H, d->I);
        list[3] = list_of(&lg[0], grad, d->E, d->I, d->H);
        list[4] = list_of(&lg[1], grad, d->E, d->I, d->H);
        list[5] = list_of(&lg[2], grad, d->E, d->H, d->I);
        for (int i = 0; i < 6; i++)
            if (!list[i]) asc_fail(c, FMOE_ERR_NOMEM, "no memory to describe %lld matrices", (long long)d->E);
        a.w = (fmoe_weights){.gate = c->p->gated ? list[0] : NULL, .up = list[1], .down = list[2]};
    } else {
        a.w = (fmoe_weights){.w1 = describe(&w1, t, 3, d->E, hc, d->H),
                             .w2 = describe(&w2, t, 3, d->E, d->H, d->I),
                             .b1 = bias ? describe(&b1, t, 2, d->E, hc, 0) : NULL,
                             .b2 = bias ? describe(&b2, t, 2, d->E, d->H, 0) : NULL};
    }
    if (quant) {
        const fmoe_tensor *first = code(c, &codes[0], lists, lists ? d->I : hc, d->H, how.group_rows),
                          *second = code(c, &codes[1], lists, d->H, d->I, how.group_rows);
        a.w.quant1 = &codes[0].q, a.w.quant2 = &codes[1].q;
        if (lists) a.w.up = first, a.w.down = second;
        else a.w.w1 = first, a.w.w2 = second;
        if (a.w.gate) {
            a.w.gate = code(c, &codes[2], true, d->I, d->H, how.group_rows);
            a.w.quant_gate = &codes[2].q;
        }
    }
    adapters(c, lora, &a.w, d->dtype == FMOE_F32 ? t : FMOE_F32, 0.5f);
    if (c->status == FMOE_OK && pass == FMOE_FORWARD) {
        a.out = describe(&out, t, 2, T, d->H, 0);
        asc_experts_forward(c, &a, FMOE_ADD_OUT);
    } else if (c->status == FMOE_OK) {
        a.saved = NOWHERE;
        a.dout = describe(&dout, t, 2, T, d->H, 0);
        a.dx = describe(&dx, t, 2, T, d->H, 0);
        a.dweights = describe(&dp, FMOE_F32, 2, T, d->k, 0);
        if (lists && !quant) a.dw = (fmoe_weights){.gate = a.w.gate ? list[3] : NULL, .up = list[4], .down = list[5]};
        else if (!lists)
            a.dw = (fmoe_weights){.w1 = quant ? NULL : describe(&dw1, grad, 3, d->E, hc, d->H),
                                  .w2 = quant ? NULL : describe(&dw2, grad, 3, d->E, d->H, d->I),
                                  .b1 = bias ? packed2(&db1, grad, d->E, hc) : NULL,
                                  .b2 = bias ? packed2(&db2, grad, d->E, d->H) : NULL};
        adapters(c, lora + 4, &a.dw, grad, 0);
        asc_experts_backward(c, &a, FMOE_ADD_DX | FMOE_ACCUMULATE);
    }
    for (int i = 0; i < 6; i++) free(list[i]);
    for (int i = 0; i < 12; i++) free(codes[i / 4].list[i % 4]);
}

/* coding: 0 for none, 1 and 2 the rows of a group, 3 and 4 the same of codes [E,in,out]. */
static void gmm(asc_call *c, fmoe_pass pass, int64_t R, int wide, bool sized, int coding)
{
    const fmoe_desc *d = &c->p->d;
    const int t = d->dtype;
    fake x, w, bias, sizes, y, dx, dw, db;
    fmoe_gmm_args a = {.size = sizeof a,
                       .x = describe(&x, t, 2, R, d->K, 0),
                       .w = describe(&w, t, 3, d->E, d->K, d->N),
                       .sizes = d->E > 1 || sized ? describe(&sizes, -32, 1, d->E, 0, 0) : NULL};
    if (pass == FMOE_FORWARD) {
        a.bias = describe(&bias, t, 2, d->E, d->N, 0);
        a.y = describe(&y, wide, 2, R, d->N, 0);
    } else {
        a.dy = describe(&y, wide, 2, R, d->N, 0);
        a.dx = describe(&dx, t, 2, R, d->K, 0);
        a.dw = describe(&dw, wide, 3, d->E, d->K, d->N);
        a.dbias = packed2(&db, wide, d->E, d->N);
    }
    coded codes = {.q = {.size = 0}};
    if (coding) {
        const bool in_out = coding > 2;
        a.w = code(c, &codes, false, in_out ? d->K : d->N, in_out ? d->N : d->K, in_out ? coding - 2 : coding);
        codes.q.flags = in_out ? FMOE_QUANT_IN_OUT : 0;
        a.quant = &codes.q;
        a.dw = NULL;
    }
    asc_gmm(c, pass, &a, pass == FMOE_BACKWARD ? FMOE_ADD_DX | FMOE_ACCUMULATE : 0);
}

static void route(asc_call *c, fmoe_pass pass, int64_t T, bool bad)
{
    const fmoe_desc *d = &c->p->d;
    fake logits, bias, ids, w, count, dw, dl;
    fmoe_route_args a = {.size = sizeof a,
                         .logits = describe(&logits, d->dtype, 2, T, d->E, 0),
                         .ids = describe(&ids, -32, 2, T, d->k, 0)};
    if (pass == FMOE_FORWARD) {
        a.weights = describe(&w, d->dtype, 2, T, d->k, 0);
        if (bad) {
            a.select_bias = describe(&bias, FMOE_F32, 1, d->E, 0, 0);
            a.bad_rows = describe(&count, -64, 1, 1, 0, 0);
        }
    } else {
        a.dweights = describe(&dw, d->dtype, 2, T, d->k, 0);
        a.dlogits = describe(&dl, d->dtype, 2, T, d->E, 0);
    }
    asc_route(c, pass, &a, 0);
}

static void permutes(asc_call *c, fmoe_pass pass, int64_t T, bool back)
{
    const fmoe_desc *d = &c->p->d;
    const int64_t R = T * d->k;
    const int t = d->dtype;
    fake x, xp, ids, map, counts, p, dout, dp, y;
    if (!back) {
        const fmoe_permute_args a = {.size = sizeof a,
                                     .x = describe(&x, t, 2, T, d->H, 0),
                                     .ids = describe(&ids, -64, 2, T, d->k, 0),
                                     .xp = describe(&xp, t, 2, R, d->H, 0),
                                     .map = describe(&map, -64, 1, R, 0, 0),
                                     .counts = describe(&counts, -32, 1, d->E, 0, 0)};
        asc_permute(c, pass, &a);
        return;
    }
    fmoe_unpermute_args a = {.size = sizeof a,
                             .y = describe(&xp, t, 2, R, d->H, 0),
                             .map = describe(&map, -64, 1, R, 0, 0),
                             .weights = describe(&p, FMOE_F32, 2, T, d->k, 0)};
    if (pass == FMOE_FORWARD) {
        a.out = describe(&x, t, 2, T, d->H, 0);
    } else {
        a.dout = describe(&dout, t, 2, T, d->H, 0);
        a.dy = describe(&y, t, 2, R, d->H, 0);
        a.dweights = describe(&dp, t, 2, T, d->k, 0);
    }
    asc_unpermute(c, pass, &a);
}

static void activation(asc_call *c, fmoe_pass pass, int64_t R)
{
    const fmoe_desc *d = &c->p->d;
    fake h, a, da, dh;
    const fmoe_activation_args args = {.size = sizeof args,
                                       .h = describe(&h, d->dtype, 2, R, c->p->h_cols, 0),
                                       .a = describe(&a, d->dtype, 2, R, d->I, 0),
                                       .da = describe(&da, d->dtype, 2, R, d->I, 0),
                                       .dh = describe(&dh, d->dtype, 2, R, c->p->h_cols, 0)};
    asc_activation(c, pass, &args);
}

/* ---- */

enum { VARIANTS = 20 };

/* Which of the variants differ: bit 0 another form of the call, bit 1 f32 results; from 4 on: quantised weights. */
static bool worth_it(const fmoe_plan_impl *p, fmoe_pass pass, int variant)
{
    switch (p->d.op) {
    case FMOE_OP_EXPERTS:
        return (pass == FMOE_BACKWARD || !(variant & 2)) &&
               (variant < 4 || (variant < 12 && (p->d.flags & FMOE_QUANT)));
    case FMOE_OP_GROUPED_MATMUL: return (p->d.E == 1 || !(variant & 1)) && (variant < 4 || (p->d.flags & FMOE_QUANT));
    case FMOE_OP_ROUTE: return variant < (pass == FMOE_FORWARD ? 2 : 1);
    case FMOE_OP_PERMUTE: return variant < 2;
    default: return variant == 0;
    }
}

static void one(asc_call *c, fmoe_pass pass, int64_t rows, int variant)
{
    const int t = c->p->d.dtype;
    switch (c->p->d.op) {
    case FMOE_OP_EXPERTS: experts(c, pass, rows, (form){variant & 1, variant & 2 ? FMOE_F32 : t, variant / 4}); break;
    case FMOE_OP_GROUPED_MATMUL: gmm(c, pass, rows, variant & 2 ? FMOE_F32 : t, variant & 1, variant / 4); break;
    case FMOE_OP_ROUTE: route(c, pass, rows, variant & 1); break;
    case FMOE_OP_PERMUTE: permutes(c, pass, rows, variant & 1); break;
    default: activation(c, pass, rows); break;
    }
}

fmoe_status asc_measure(const fmoe_plan_impl *p, fmoe_pass pass, int64_t rows, size_t *workspace)
{
    asc_call *c = malloc(sizeof *c);
    if (!c) return fmoe_fail(FMOE_ERR_NOMEM, "Ascend: no memory for a measurement");
    size_t most = 0;
    fmoe_status status = FMOE_OK;
    for (int variant = 0; variant < VARIANTS && status == FMOE_OK; variant++) {
        if (!worth_it(p, pass, variant)) continue;
        status = asc_begin_measure(c, p);
        if (status == FMOE_OK) {
            one(c, pass, rows, variant);
            status = asc_end(c);
        }
        if (c->peak > most) most = c->peak;
    }
    free(c);
    *workspace = most ? most + 512 : 0;
    return status;
}
