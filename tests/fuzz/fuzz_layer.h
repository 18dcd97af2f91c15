/* SPDX-License-Identifier: Apache-2.0
 * fuzz_layer.h - an experts layer from fuzz bytes, twice: in its own dtype and in double. */
#ifndef FMOE_FUZZ_LAYER_H
#define FMOE_FUZZ_LAYER_H

#include "fuzz.h"

typedef struct fuzz_layer {
    fmoe_desc d;
    int64_t T, C;
    fmoe_tensor *x, *ids, *p, *w1, *w2, *b1, *b2, *dout;
    bool bad_ids; /* an id that is neither an expert nor a declared mark */
} fuzz_layer;

typedef struct fuzz_results {
    fmoe_tensor *out, *dx, *dp, *dw1, *dw2;
    fmoe_status status;
} fuzz_results;

static inline fuzz_layer fuzz_layer_draw(fuzz_input *in)
{
    static const int acts[] = {0, 1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20};
    fuzz_layer l = {.d = FMOE_DESC_INIT};
    l.d.op = FMOE_OP_EXPERTS;
    l.d.dtype = 1 + (int32_t)fuzz_below(in, 3);
    l.d.act = acts[fuzz_byte(in) % 12];
    l.d.H = 1 + fuzz_below(in, 70), l.d.I = 1 + fuzz_below(in, 40), l.d.E = 1 + fuzz_below(in, 6),
    l.d.k = 1 + fuzz_below(in, 3);
    l.d.flags = fuzz_byte(in) &
                (FMOE_INTERLEAVED | FMOE_BIAS | FMOE_RECOMPUTE | FMOE_REUSE_SAVED | FMOE_SKIP_NEG1 | FMOE_SKIP_E);
    l.d.threads = 1 + fuzz_byte(in) % 2;
    l.T = fuzz_below(in, 9);
    l.C = l.d.act < 16 ? 2 * l.d.I : l.d.I;
    const int f = l.d.dtype;
    l.ids = fuzz_tensor(fuzz_byte(in) % 2 ? -32 : -64, 2, l.T, l.d.k, 1);
    for (int64_t i = 0; i < l.T * l.d.k; i++) {
        const int64_t e = (int64_t)(fuzz_byte(in) % (uint64_t)(l.d.E + 2)) - 1; /* -1 .. E */
        const bool mark = (e == -1 && (l.d.flags & FMOE_SKIP_NEG1)) || (e == l.d.E && (l.d.flags & FMOE_SKIP_E));
        if ((e < 0 || e == l.d.E) && !mark) l.bad_ids = true;
        fmoe_set_int(l.ids->data, fmoe_tensor_dtype(l.ids), i, e);
    }
    l.x = fuzz_fill(fuzz_tensor(f, 2, l.T, l.d.H, 1), in);
    l.p = fuzz_fill(fuzz_tensor(fuzz_byte(in) % 2 ? FMOE_F32 : f, 2, l.T, l.d.k, 1), in);
    l.dout = fuzz_fill(fuzz_tensor(f, 2, l.T, l.d.H, 1), in);
    l.w1 = fuzz_tensor(f, 3, l.d.E, l.C, l.d.H), l.w2 = fuzz_tensor(f, 3, l.d.E, l.d.H, l.d.I);
    uint32_t state = (uint32_t)fuzz_bits(in, 4); /* weights are many: a generator seeded by the input */
    for (int64_t i = 0; i < fuzz_count(l.w1) + fuzz_count(l.w2); i++) {
        state = state * 1664525u + 1013904223u;
        const float v = (float)((int)(state >> 24) - 128) / 512;
        if (i < fuzz_count(l.w1)) fuzz_set(l.w1, i, v);
        else fuzz_set(l.w2, i - fuzz_count(l.w1), v);
    }
    l.b1 = fuzz_fill(fuzz_tensor(f, 2, l.d.E, l.C, 1), in);
    l.b2 = fuzz_fill(fuzz_tensor(f, 2, l.d.E, l.d.H, 1), in);
    return l;
}

static inline fuzz_results fuzz_layer_run(const fuzz_layer *l, bool reference, bool backward)
{
    fmoe_desc d = l->d;
    if (reference) d.dtype = FMOE_F64;
    fmoe_plan plan;
    if (fmoe_plan_create(&plan, &d) != FMOE_OK) FUZZ_FAIL("%s", fmoe_last_error());
    const int f = d.dtype;
#define IN(t) (reference ? fuzz_f64(t) : (t))
    fmoe_experts_args a = {
        .size = sizeof a, .x = IN(l->x), .ids = l->ids, .weights = IN(l->p), .w = {.w1 = IN(l->w1), .w2 = IN(l->w2)}};
    if (d.flags & FMOE_BIAS) a.w.b1 = IN(l->b1), a.w.b2 = IN(l->b2);
    fuzz_results r = {.out = fuzz_tensor(f, 2, l->T, d.H, 1)};
    if (fmoe_saved_bytes(plan, l->T, &a.saved_bytes) != FMOE_OK) FUZZ_FAIL("%s", fmoe_last_error());
    a.saved = a.saved_bytes ? fuzz_alloc(a.saved_bytes) : NULL;
    memset(r.out->data, 0xff, (size_t)fuzz_count(r.out) * fmoe_dtype_size(f));
    fmoe_run run = fuzz_run(plan, FMOE_FORWARD, l->T, 0);
    a.out = r.out;
    r.status = fmoe_experts_forward(plan, &a, &run);
    if (r.status == FMOE_OK && backward) {
        a.out = NULL;
        a.dout = IN(l->dout);
        a.dx = r.dx = fuzz_tensor(f, 2, l->T, d.H, 1);
        a.dweights = r.dp = fuzz_tensor(reference ? FMOE_F64 : FMOE_F32, 2, l->T, d.k, 1);
        a.dw.w1 = r.dw1 = fuzz_tensor(f, 3, d.E, l->C, d.H);
        a.dw.w2 = r.dw2 = fuzz_tensor(f, 3, d.E, d.H, d.I);
        run = fuzz_run(plan, FMOE_BACKWARD, l->T, 0);
        r.status = fmoe_experts_backward(plan, &a, &run);
    }
#undef IN
    fmoe_plan_destroy(&plan);
    return r;
}

/* The same layer on absolute values. Its results in double are sums without cancellation that no term of the layer's
 * own sums exceeds (|act(h)| <= act(|h|) for every activation, and so for the slopes, up to a tenth), element by
 * element: what rounding errors are measured against. */
static inline fuzz_layer fuzz_layer_magnitude(const fuzz_layer *l)
{
    fuzz_layer m = *l;
    fmoe_tensor **const tensors[] = {&m.x, &m.p, &m.w1, &m.w2, &m.b1, &m.b2, &m.dout};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
        fmoe_tensor *t = fuzz_f64(*tensors[i]);
        for (int64_t j = 0; j < fuzz_count(t); j++) ((double *)t->data)[j] = fabs(((double *)t->data)[j]);
        *tensors[i] = t;
    }
    return m;
}

/* Within the layer's error of the double; check_layer.c has the exact bound. A derivative that jumps (relu, clamps) may
 * be off by all of itself in a few elements: not compared. */
static inline void fuzz_compare(const fuzz_layer *l, const char *what, const fmoe_tensor *got, const fmoe_tensor *want,
                                const fmoe_tensor *magnitude, double scale)
{
    const double sums = (double)(l->d.H + l->d.I + l->T * l->d.k + 16) * 0x1p-24;
    const double u = l->d.dtype == FMOE_F32 ? sums : l->d.dtype == FMOE_BF16 ? 0x1p-5 : 0x1p-8;
    for (int64_t i = 0; i < fuzz_count(want); i++)
        if (!(fabs(fuzz_get(got, i) - fuzz_get(want, i)) <= scale * u * (fuzz_get(magnitude, i) + 1e-3)))
            FUZZ_FAIL("%s[%" PRId64 "] is %g, reference %g (magnitude %g): H=%" PRId64 " I=%" PRId64 " E=%" PRId64
                      " k=%" PRId64 " T=%" PRId64 " dtype=%d act=%d flags=%u",
                      what, i, fuzz_get(got, i), fuzz_get(want, i), fuzz_get(magnitude, i), l->d.H, l->d.I, l->d.E,
                      l->d.k, l->T, l->d.dtype, l->d.act, l->d.flags);
}

static inline bool fuzz_smooth(const fuzz_layer *l)
{
    const int a = l->d.act;
    return a == FMOE_ACT_SWIGLU || a == FMOE_ACT_GEGLU || a == FMOE_ACT_GEGLU_TANH ||
           (a >= FMOE_ACT_SILU && a <= FMOE_ACT_GELU_TANH);
}

#endif
