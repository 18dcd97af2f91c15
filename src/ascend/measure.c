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

static void experts(asc_call *c, fmoe_pass pass, int64_t T, bool lists, int grad)
{
    const fmoe_desc *d = &c->p->d;
    const int t = d->dtype;
    const int64_t hc = c->p->h_cols;
    const bool bias = d->flags & FMOE_BIAS;
    fake x, ids, p, out, dout, dx, dp, w1, w2, b1, b2, dw1, dw2, db1, db2, lw[3], lg[3], lora[8];
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
    adapters(c, lora, &a.w, d->dtype == FMOE_F32 ? t : FMOE_F32, 0.5f);
    if (c->status == FMOE_OK && pass == FMOE_FORWARD) {
        a.out = describe(&out, t, 2, T, d->H, 0);
        asc_experts_forward(c, &a, FMOE_ADD_OUT);
    } else if (c->status == FMOE_OK) {
        a.saved = NOWHERE;
        a.dout = describe(&dout, t, 2, T, d->H, 0);
        a.dx = describe(&dx, t, 2, T, d->H, 0);
        a.dweights = describe(&dp, FMOE_F32, 2, T, d->k, 0);
        if (lists) a.dw = (fmoe_weights){.gate = a.w.gate ? list[3] : NULL, .up = list[4], .down = list[5]};
        else
            a.dw = (fmoe_weights){.w1 = describe(&dw1, grad, 3, d->E, hc, d->H),
                                  .w2 = describe(&dw2, grad, 3, d->E, d->H, d->I),
                                  .b1 = bias ? packed2(&db1, grad, d->E, hc) : NULL,
                                  .b2 = bias ? packed2(&db2, grad, d->E, d->H) : NULL};
        adapters(c, lora + 4, &a.dw, grad, 0);
        asc_experts_backward(c, &a, FMOE_ADD_DX | FMOE_ACCUMULATE);
    }
    for (int i = 0; i < 6; i++) free(list[i]);
}

static void gmm(asc_call *c, fmoe_pass pass, int64_t R, int wide, bool sized)
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

/* Which of the four variants differ: bit 0 another form of the call, bit 1 f32 results. */
static bool worth_it(const fmoe_plan_impl *p, fmoe_pass pass, int variant)
{
    switch (p->d.op) {
    case FMOE_OP_EXPERTS: return pass == FMOE_BACKWARD || variant < 2;
    case FMOE_OP_GROUPED_MATMUL: return p->d.E == 1 || !(variant & 1);
    case FMOE_OP_ROUTE: return variant < (pass == FMOE_FORWARD ? 2 : 1);
    case FMOE_OP_PERMUTE: return variant < 2;
    default: return variant == 0;
    }
}

static void one(asc_call *c, fmoe_pass pass, int64_t rows, int variant)
{
    const int t = c->p->d.dtype;
    switch (c->p->d.op) {
    case FMOE_OP_EXPERTS: experts(c, pass, rows, variant & 1, variant & 2 ? FMOE_F32 : t); break;
    case FMOE_OP_GROUPED_MATMUL: gmm(c, pass, rows, variant & 2 ? FMOE_F32 : t, variant & 1); break;
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
    for (int variant = 0; variant < 4 && status == FMOE_OK; variant++) {
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
