/* SPDX-License-Identifier: Apache-2.0
 * check_same.c - what must give the same bits: runs, numbers of threads, the caller's own threads, saved or recomputed
 * state, and tokens in another order, in two batches, or alone. */
#include <pthread.h>

#include "check_layer.h"

static fmoe_desc draw_desc(void)
{
    fmoe_desc d = layer_draw();
    d.H = check_below(4) || check_quick ? check_size(check_quick ? 80 : 200) : CHECK_PICK(513, 600, 1025);
    d.I = check_below(4) || check_quick ? check_size(check_quick ? 80 : 200) : CHECK_PICK(513, 600, 1025);
    d.flags |= (uint32_t)CHECK_PICK(0, 0, 0, FMOE_ROUND_STEPS);
    d.threads = 1;
    return d;
}

static check_layer draw_layer(void)
{
    const fmoe_desc d = draw_desc();
    check_layer l = layer_make(
        &d, check_quick ? CHECK_PICK(1, 7, 20) : CHECK_PICK(1, 2, 7, 40, 70, 130),
        (int)(check_below(256) | (check_below(4) ? 0 : LAYER_MIXED) | (check_below(2) ? 0 : LAYER_WIDE_FACTOR)));
    layer_note(&l);
    return l;
}

/* ---- threads ---- */

typedef struct helper {
    void (*fn)(void *arg, int worker);
    void *arg;
    int worker;
} helper;

static void *helper_main(void *p)
{
    const helper *h = p;
    h->fn(h->arg, h->worker);
    return NULL;
}

/* The caller's threads: new ones for every call, started from the last worker to the first. */
static void own_threads(void *ctx, int n, void (*fn)(void *arg, int worker), void *arg)
{
    pthread_t threads[16];
    helper helpers[16];
    ++*(int *)ctx;
    for (int i = n - 1; i > 0; i--) {
        helpers[i] = (helper){fn, arg, i};
        if (pthread_create(&threads[i], NULL, helper_main, &helpers[i])) check_fail("pthread_create");
    }
    fn(arg, 0);
    for (int i = 1; i < n; i++) pthread_join(threads[i], NULL);
}

/* One after another on one thread: no worker may wait for another. */
static void one_by_one(void *ctx, int n, void (*fn)(void *arg, int worker), void *arg)
{
    ++*(int *)ctx;
    for (int i = 0; i < n; i++) fn(arg, i);
}

static void draw_threads(int64_t index)
{
    (void)index;
    check_layer one = draw_layer();
    layer_run(&one, 0, 0);
    static const int32_t counts[] = {1, 2, 3, 5, 8, 16};
    for (int i = 0; i < 6 && !check_failed(); i++) {
        fmoe_desc d = one.d;
        d.threads = counts[i];
        check_layer many = layer_again(&one, &d);
        layer_run(&many, 0, 0);
        layer_equal(i ? "several threads" : "run again", &one, &many);
    }
    for (int i = 0; i < 2 && !check_failed(); i++) {
        fmoe_desc d = one.d;
        int calls = 0;
        d.threads = 3;
        d.parallel = i ? one_by_one : own_threads;
        d.parallel_ctx = &calls;
        check_layer own = layer_again(&one, &d);
        layer_run(&own, 0, 0);
        layer_equal("the caller's threads", &one, &own);
        if (!calls) check_fail("the caller's threads were not used");
    }
}

static void draw_recompute(int64_t index)
{
    (void)index;
    check_layer saved = draw_layer();
    layer_run(&saved, 0, 0);
    fmoe_desc d = saved.d;
    d.flags |= FMOE_RECOMPUTE;
    check_layer again = layer_again(&saved, &d);
    if (again.backward.saved_bytes != 0) check_fail("FMOE_RECOMPUTE keeps %zu bytes", again.backward.saved_bytes);
    layer_run(&again, 0, 0);
    layer_equal("recomputed", &saved, &again);
    /* A backward may write over the saved state, but only where it was told so. */
    const size_t bytes = saved.backward.saved_bytes;
    void *const after = memcpy(check_alloc(bytes), saved.backward.saved, bytes);
    const fmoe_run forward = check_run(saved.plan, FMOE_FORWARD, saved.T, 0);
    CHECK_OK(fmoe_experts_forward(saved.plan, &saved.forward, &forward));
    if (memcmp(after, saved.backward.saved, bytes)) check_fail("the backward changed the saved state");
    d = saved.d;
    d.flags |= FMOE_REUSE_SAVED;
    check_layer reused = layer_again(&saved, &d);
    layer_run(&reused, 0, 0);
    layer_equal("saved state used up", &saved, &reused);
    /* Inference: no saved state, the same output. */
    check_layer inference = layer_again(&saved, &saved.d);
    inference.forward.saved = NULL;
    inference.forward.saved_bytes = 0;
    const fmoe_run run = check_run(inference.plan, FMOE_FORWARD, inference.T, 0);
    CHECK_OK(fmoe_experts_forward(inference.plan, &inference.forward, &run));
    check_equal("inference: out", saved.out, inference.out);
}

/* ---- tokens ---- */

/* The layer on some of the tokens of l: rows[i] of l becomes token i. */
static check_layer some_tokens(const check_layer *l, const int64_t *rows, int64_t n)
{
    check_layer s = *l;
    const int64_t H = l->d.H, k = l->d.k;
    s.T = n;
    s.x = check_rows(l->d.dtype, n, H, 1);
    s.dout = check_rows(l->d.dtype, n, H, 1);
    s.p = check_tensor(fmoe_tensor_dtype(l->p), CHECK_SHAPE(n, k), NULL);
    s.ids = check_tensor(fmoe_tensor_dtype(l->ids), CHECK_SHAPE(n, k), NULL);
    for (int64_t i = 0; i < n; i++) {
        for (int64_t h = 0; h < H; h++) {
            check_set(s.x, i * H + h, check_get(l->x, rows[i] * H + h));
            check_set(s.dout, i * H + h, check_get(l->dout, rows[i] * H + h));
        }
        for (int64_t j = 0; j < k; j++) {
            check_set(s.p, i * k + j, check_get(l->p, rows[i] * k + j));
            check_set(s.ids, i * k + j, check_get(l->ids, rows[i] * k + j));
        }
    }
    s = layer_again(&s, &s.d);
    layer_run(&s, 0, 0);
    return s;
}

static void rows_equal(const char *what, const check_layer *l, const check_layer *s, const int64_t *rows)
{
    for (int64_t i = 0; i < s->T && !check_failed(); i++) {
        check_equal(what, check_part(l->out, 0, rows[i], 1, 1), check_part(s->out, 0, i, 1, 1));
        check_equal(what, check_part(l->dx, 0, rows[i], 1, 1), check_part(s->dx, 0, i, 1, 1));
        check_equal(what, check_part(l->dp, 0, rows[i], 1, 1), check_part(s->dp, 0, i, 1, 1));
    }
}

static void draw_tokens(int64_t index)
{
    check_layer l = draw_layer();
    layer_run(&l, 0, 0);
    const int64_t T = l.T, cut = check_below(T + 1), one = check_below(T);
    int64_t *rows = check_alloc((size_t)T * sizeof *rows);
    for (int64_t i = 0; i < T; i++) rows[i] = i;
    switch (index % 3) {
    case 0:
        for (int64_t i = T - 1; i > 0; i--) { /* any order */
            const int64_t j = check_below(i + 1), swap = rows[i];
            rows[i] = rows[j];
            rows[j] = swap;
        }
        {
            const check_layer s = some_tokens(&l, rows, T);
            rows_equal("in another order", &l, &s, rows);
        }
        break;
    case 1: {
        const check_layer a = some_tokens(&l, rows, cut), b = some_tokens(&l, rows + cut, T - cut);
        rows_equal("first part", &l, &a, rows);
        rows_equal("second part", &l, &b, rows + cut);
        break;
    }
    default: {
        const check_layer s = some_tokens(&l, &one, 1);
        rows_equal("alone", &l, &s, &one);
    }
    }
}

/* NaN in one token stays in its rows (the weight gradients of its experts excepted). */
static void draw_nan(int64_t index)
{
    check_layer l = draw_layer();
    layer_run(&l, 0, 0);
    const int64_t bad = check_below(l.T), H = l.d.H;
    check_set(index % 2 ? l.x : l.dout, bad * H + check_below(H), CHECK_PICK(0, 1) ? NAN : INFINITY);
    check_layer s = layer_again(&l, &l.d);
    layer_run(&s, 0, 0);
    for (int64_t t = 0; t < l.T && !check_failed(); t++) {
        if (t == bad) continue;
        check_equal("beside NaN: out", check_part(l.out, 0, t, 1, 1), check_part(s.out, 0, t, 1, 1));
        check_equal("beside NaN: dx", check_part(l.dx, 0, t, 1, 1), check_part(s.dx, 0, t, 1, 1));
        check_equal("beside NaN: dp", check_part(l.dp, 0, t, 1, 1), check_part(s.dp, 0, t, 1, 1));
    }
}

/* Scaling p by a power of two scales out and every gradient but dp, exactly. (f32: no overflow here; the tail of an
 * activation may be denormal, which rounds otherwise: 1e-40 is less than a unit of any number from 1e-32 on.) */
static void draw_scale(int64_t index)
{
    (void)index;
    fmoe_desc d = draw_desc();
    d.dtype = FMOE_F32;
    check_layer l = layer_make(&d, CHECK_PICK(1, 7, 40), 0);
    layer_note(&l);
    layer_run(&l, 0, 0);
    for (int64_t i = 0; i < check_count(l.p); i++) check_set(l.p, i, 4 * check_get(l.p, i));
    check_layer s = layer_again(&l, &l.d);
    layer_run(&s, 0, 0);
    const fmoe_tensor *a[LAYER_OUTPUTS], *b[LAYER_OUTPUTS];
    layer_outputs(&l, a);
    layer_outputs(&s, b);
    for (int o = 0; o < LAYER_OUTPUTS; o++)
        for (int64_t i = 0; a[o] && i < check_count(a[o]) && !check_failed(); i++)
            if (!(fabs(check_get(b[o], i) - (o == 2 ? 1 : 4) * check_get(a[o], i)) <= 1e-40))
                check_fail("%s[%" PRId64 "]: 4 p gives %.9g, p gave %.9g", layer_output_names[o], i, check_get(b[o], i),
                           check_get(a[o], i));
}

const check_case check_same_cases[] = {
    {"same_threads", draw_threads, 8, 2, 0}, {"same_recompute", draw_recompute, 8, 1, 0},
    {"same_tokens", draw_tokens, 12, 2, 0},  {"same_beside_nan", draw_nan, 6, 1, 0},
    {"same_scaled", draw_scale, 6, 1, 0},    {NULL, NULL, 0, 0, 0},
};
