/* SPDX-License-Identifier: Apache-2.0
 *
 * test_ref_experts.c - the specification on trial: the experts layer. See test_ref.c. */
#include "ref_op.h"

/* One layer with all its tensors. b*, d* as in fmoe_experts_args; w1 and w2 are stacks, which the list form sees by
 * slices. */
typedef struct layer {
    op o;
    fmoe_tensor *x, *ids, *p, *w1, *b1, *w2, *b2, *out, *dout, *dx, *dp, *dw1, *db1, *dw2, *db2;
    fmoe_experts_args a;
} layer;

enum { TRANSPOSED = 1, LIST = 2 };

static fmoe_weights as_list(const layer *l, const fmoe_tensor *w1, const fmoe_tensor *w2)
{
    const int64_t I = l->o.p.d.I;
    fmoe_weights w = {.down = tensor_slices(w2)};
    if (!l->o.p.gated) w.up = tensor_slices(w1);
    else if (l->o.p.d.flags & FMOE_INTERLEAVED) {
        w.gate = tensor_slices(tensor_view(w1, 1, 0, I, 2));
        w.up = tensor_slices(tensor_view(w1, 1, 1, I, 2));
    } else {
        w.gate = tensor_slices(tensor_view(w1, 1, 0, I, 1));
        w.up = tensor_slices(tensor_view(w1, 1, I, I, 1));
    }
    return w;
}

/* Values depend on the test's stream alone, not on act, flags or layout: layers of one seed state can be compared. */
static layer make_layer(int64_t T, int64_t H, int64_t I, int64_t E, int64_t k, int act, uint32_t flags, int layout)
{
    layer l = {.o = make_op(FMOE_OP_EXPERTS, H, I, E, k)};
    fmoe_desc *d = &l.o.p.d;
    d->act = act;
    d->flags = flags;
    d->act_limit = 0.5f;
    settle(&l.o, T);
    const int64_t C = l.o.p.h_cols;
    fmoe_tensor *(*const stack)(int, int64_t, int64_t, int64_t) = tensor_transposed;
    const bool tr = layout & TRANSPOSED;
    l.x = tensor_random(tensor_padded(FMOE_F64, T, H, 1), 1);
    l.p = tensor_random(tensor_new(FMOE_F64, SHAPE(T, k)), 1);
    l.w1 = tensor_random(tr ? stack(FMOE_F64, E, C, H) : tensor_new(FMOE_F64, SHAPE(E, C, H)), 1);
    l.w2 = tensor_random(tr ? stack(FMOE_F64, E, H, I) : tensor_new(FMOE_F64, SHAPE(E, H, I)), 1);
    l.b1 = tensor_random(tensor_new(FMOE_F64, SHAPE(E, C)), 1);
    l.b2 = tensor_random(tensor_new(FMOE_F64, SHAPE(E, H)), 1);
    l.dout = tensor_random(tensor_padded(FMOE_F64, T, H, 2), 1);
    l.ids = tensor_random_int(tensor_new(tr ? I64 : I32, SHAPE(T, k)), E);
    l.out = tensor_fill(tensor_padded(FMOE_F64, T, H, 3), NaN);
    l.dx = tensor_fill(tensor_padded(FMOE_F64, T, H, 1), NaN);
    l.dp = tensor_fill(tensor_new(FMOE_F64, SHAPE(T, k)), NaN);
    l.dw1 = tensor_fill(tr ? tensor_new(FMOE_F64, SHAPE(E, C, H)) : stack(FMOE_F64, E, C, H), NaN);
    l.dw2 = tensor_fill(tr ? tensor_new(FMOE_F64, SHAPE(E, H, I)) : stack(FMOE_F64, E, H, I), NaN);
    l.db1 = tensor_fill(tensor_new(FMOE_F64, SHAPE(E, C)), NaN);
    l.db2 = tensor_fill(tensor_new(FMOE_F64, SHAPE(E, H)), NaN);

    l.a = (fmoe_experts_args){.size = sizeof l.a, .x = l.x, .ids = l.ids, .weights = l.p, .out = l.out, .dout = l.dout};
    l.a.dx = l.dx;
    l.a.dweights = l.dp;
    l.a.w = (fmoe_weights){.w1 = l.w1, .w2 = l.w2};
    l.a.dw = (fmoe_weights){.w1 = l.dw1, .w2 = l.dw2};
    if (flags & FMOE_BIAS) {
        l.a.w.b1 = l.b1;
        l.a.w.b2 = l.b2;
        l.a.dw.b1 = l.db1;
        l.a.dw.b2 = l.db2;
    }
    if (layout & LIST) {
        l.a.w = as_list(&l, l.w1, l.w2);
        l.a.dw = as_list(&l, l.dw1, l.dw2);
    }
    size_t workspace;
    REQUIRE(l.o.p.backend->bytes(&l.o.p, FMOE_FORWARD, T, &workspace, &l.a.saved_bytes) == FMOE_OK);
    REQUIRE(l.a.saved_bytes == (flags & FMOE_RECOMPUTE ? 0 : (size_t)(T * k * C) * sizeof(double)));
    l.a.saved = l.a.saved_bytes ? test_alloc(l.a.saved_bytes) : NULL;
    return l;
}

static void run_layer(const layer *l)
{
    FORWARD(&l->o, &l->a, 0);
    BACKWARD(&l->o, &l->a, 0);
}

static void check_layer_gradients(layer *l)
{
    run_layer(l);
    l->a.saved = NULL; /* the differences are of the inference forward */
    CHECK_GRADIENT(&l->o, &l->a, 0, l->out, l->dout, l->x, l->dx);
    CHECK_GRADIENT(&l->o, &l->a, 0, l->out, l->dout, l->p, l->dp);
    CHECK_GRADIENT(&l->o, &l->a, 0, l->out, l->dout, l->w1, l->dw1);
    CHECK_GRADIENT(&l->o, &l->a, 0, l->out, l->dout, l->w2, l->dw2);
    if (!(l->o.p.d.flags & FMOE_BIAS)) return;
    CHECK_GRADIENT(&l->o, &l->a, 0, l->out, l->dout, l->b1, l->db1);
    CHECK_GRADIENT(&l->o, &l->a, 0, l->out, l->dout, l->b2, l->db2);
}

/* T = 2, E = 3, k = 2, H = 1, I = 1, relu(g) * u. Expert e: gate = x, up = (e+1) x, down = 1, so y = (e+1) relu(x) x.
 * Token 0 (x = 2) goes to 0 and 2, token 1 (x = 3) twice to 2; expert 1 has no rows. */
TEST(experts_by_hand)
{
    layer l = make_layer(2, 1, 1, 3, 2, FMOE_ACT_REGLU, 0, 0);
    tensor_list(l.x, VALUES(2, 3));
    tensor_list(l.ids, VALUES(0, 2, 2, 2));
    tensor_list(l.p, VALUES(1, 10, 100, 1000));
    tensor_list(l.w1, VALUES(1, 1, 1, 2, 1, 3));
    tensor_list(l.w2, VALUES(1, 1, 1));
    tensor_list(l.dout, VALUES(1, 0.5));
    run_layer(&l);
    CHECK_VALUES(l.out, 0, 4 + 10 * 12, 1100 * 27);
    const double *h = l.a.saved; /* rows sorted by expert, tokens in order */
    CHECK(h[0] == 2 && h[1] == 2 && h[2] == 2 && h[3] == 6 && h[4] == 3 && h[5] == 9 && h[6] == 3 && h[7] == 9);
    CHECK_VALUES(l.dp, 0, 4, 12, 13.5, 13.5);
    CHECK_VALUES(l.dx, 0, 4 + 10 * 12, 0.5 * 1100 * 18); /* y = (e+1) x^2 for x > 0 */
    CHECK_VALUES(l.dw2, 0, 4, 0, 10 * 12 + 0.5 * 1100 * 27);
    CHECK_VALUES(l.dw1, 0, 4, 4, 0, 0, 10 * 12 + 550 * 27, 10 * 4 + 550 * 9);
}

TEST(experts_gradients_of_every_activation)
{
    for (int i = 0; i < CHECK_ACTS; i++) {
        layer l = make_layer(4, 3, 2, 3, 2, check_acts[i], FMOE_BIAS, 0);
        check_layer_gradients(&l);
    }
}

TEST(experts_gradients_of_every_layout)
{
    const int acts[] = {FMOE_ACT_SWIGLU_OAI, FMOE_ACT_RELU2};
    for (int i = 0; i < 16; i++) {
        const int act = acts[i >> 3], layout = i & 3;
        const uint32_t flags = (i & 4 && act < FMOE_ACT_SILU ? FMOE_INTERLEAVED : 0) | (layout & LIST ? 0 : FMOE_BIAS);
        layer l = make_layer(4, 3, 2, 4, 2, act, flags, layout);
        check_layer_gradients(&l);
    }
}

/* The same numbers in every layout: bit for bit, because every layout is read by the same formula. */
TEST(experts_layouts_agree)
{
    for (int i = 0; i < 4; i++) {
        const uint32_t flags = i & 1 ? FMOE_INTERLEAVED : 0;
        const int act = i & 2 ? FMOE_ACT_SILU : FMOE_ACT_SWIGLU_CLAMP;
        const uint64_t state = test_state;
        const layer a = make_layer(6, 5, 3, 4, 2, act, flags, 0);
        run_layer(&a);
        for (int layout = 1; layout < 4; layout++) {
            test_state = state;
            const layer b = make_layer(6, 5, 3, 4, 2, act, flags, layout);
            run_layer(&b);
            CHECK_SAME(a.out, b.out);
            CHECK_SAME(a.dx, b.dx);
            CHECK_SAME(a.dp, b.dp);
            CHECK_SAME(a.dw1, b.dw1);
            CHECK_SAME(a.dw2, b.dw2);
        }
    }
}

/* Interleaved rows g0 u0 g1 u1 .. mean what g0 g1 .. u0 u1 .. mean without the flag. */
TEST(experts_interleaved_is_a_reordering)
{
    const int64_t E = 3, I = 3, H = 4;
    const uint64_t state = test_state;
    const layer a = make_layer(5, H, I, E, 2, FMOE_ACT_SWIGLU, FMOE_BIAS, 0);
    test_state = state;
    layer b = make_layer(5, H, I, E, 2, FMOE_ACT_SWIGLU, FMOE_BIAS | FMOE_INTERLEAVED, 0);
    for (int64_t i = 0; i < E * 2 * I * H; i++) {
        const int64_t e = i / (2 * I * H), n = i / H % (2 * I), m = n % 2 * I + n / 2;
        tensor_set(b.w1, i, tensor_get(a.w1, (e * 2 * I + m) * H + i % H));
        tensor_set(b.b1, e * 2 * I + n, tensor_get(a.b1, e * 2 * I + m));
    }
    run_layer(&a);
    run_layer(&b);
    CHECK_SAME(a.out, b.out);
    CHECK(tensor_distance(a.dx, b.dx) < 1e-13); /* summed in another order */
    for (int64_t i = 0; i < E * 2 * I * H; i++) {
        const int64_t e = i / (2 * I * H), n = i / H % (2 * I), m = n % 2 * I + n / 2;
        CHECK(tensor_get(b.dw1, i) == tensor_get(a.dw1, (e * 2 * I + m) * H + i % H));
        CHECK(tensor_get(b.db1, e * 2 * I + n) == tensor_get(a.db1, e * 2 * I + m));
    }
}

TEST(experts_skips_duplicates_and_empty_experts)
{
    for (int i = 0; i < 2; i++) {
        layer l = make_layer(4, 3, 2, 4, 3, FMOE_ACT_SWIGLU, FMOE_BIAS | (i ? FMOE_SKIP_E : FMOE_SKIP_NEG1), 0);
        const double s = i ? 4 : -1;
        tensor_list(l.ids, VALUES(1, 1, 3, s, 3, s, s, s, s, 1, 1, 1)); /* 0 and 2 have no rows, token 2 no expert */
        tensor_set(l.p, 3, NaN);
        tensor_set(l.p, 7, Inf);
        run_layer(&l);
        CHECK(isfinite(tensor_get(l.out, 3)));
        const double skipped[] = {3, 5, 6, 7, 8};
        for (int j = 0; j < 5; j++) CHECK(tensor_get(l.dp, (int64_t)skipped[j]) == 0);
        CHECK_VALUES(tensor_view(l.out, 0, 2, 1, 1), 0, 0, 0, 0);
        CHECK_VALUES(tensor_view(l.dx, 0, 2, 1, 1), 0, 0, 0, 0);
        CHECK_VALUES(tensor_view(l.dw2, 0, 2, 1, 1), 0, 0, 0, 0, 0, 0, 0);
        CHECK_VALUES(tensor_view(l.db1, 0, 0, 1, 1), 0, 0, 0, 0, 0);
        tensor_set(l.p, 3, 1);
        tensor_set(l.p, 7, 1);
        check_layer_gradients(&l);
    }
}

TEST(experts_bad_ids_write_nothing)
{
    layer l = make_layer(4, 3, 2, 128, 2, FMOE_ACT_SWIGLU, 0, TRANSPOSED);
    const int64_t wrong[] = {130, 128, -1, INT64_MIN, (INT64_C(1) << 32) + 3};
    for (size_t i = 0; i < 2 * sizeof wrong / sizeof *wrong; i++) {
        char text[64];
        ((int64_t *)l.ids->data)[7] = wrong[i / 2];
        snprintf(text, sizeof text, "ids[3,1] is %" PRId64 ", E is 128", wrong[i / 2]);
        BAD_INDEX(&l.o, i % 2 ? FMOE_BACKWARD : FMOE_FORWARD, &l.a, 0, text);
    }
    l.o.p.d.flags = FMOE_SKIP_E; /* one mark does not allow the other */
    tensor_set(l.ids, 7, -1);
    BAD_INDEX(&l.o, FMOE_FORWARD, &l.a, 0, "ids[3,1] is -1, E is 128");
    CHECK_SAME(l.out, tensor_fill(tensor_copy(l.out, FMOE_F64), NaN));
    CHECK_SAME(l.dw1, tensor_fill(tensor_copy(l.dw1, FMOE_F64), NaN));
    CHECK_SAME(l.dx, tensor_fill(tensor_copy(l.dx, FMOE_F64), NaN));
}

TEST(experts_recompute_equals_saved)
{
    const uint64_t state = test_state;
    const layer a = make_layer(5, 4, 3, 4, 2, FMOE_ACT_GEGLU, FMOE_BIAS, 0);
    test_state = state;
    const layer b = make_layer(5, 4, 3, 4, 2, FMOE_ACT_GEGLU, FMOE_BIAS | FMOE_RECOMPUTE, 0);
    run_layer(&a);
    run_layer(&b);
    CHECK_SAME(a.out, b.out);
    CHECK_SAME(a.dx, b.dx);
    CHECK_SAME(a.dp, b.dp);
    CHECK_SAME(a.dw1, b.dw1);
    CHECK_SAME(a.db1, b.db1);
    CHECK_SAME(a.dw2, b.dw2);
    CHECK_SAME(a.db2, b.db2);
}

TEST(experts_accumulate_adds)
{
    layer l = make_layer(4, 3, 2, 4, 2, FMOE_ACT_SWIGLU, FMOE_BIAS, 0);
    tensor_list(l.ids, VALUES(0, 1, 1, 3, 0, 0, 3, 1));
    run_layer(&l);
    fmoe_tensor *all[] = {l.out, l.dx, l.dw1, l.db1, l.dw2, l.db2}, *plain[6], *old[6];
    for (int i = 0; i < 6; i++) {
        plain[i] = tensor_copy(all[i], FMOE_F64);
        old[i] = tensor_copy(tensor_random(all[i], 1), FMOE_F64);
    }
    tensor_fill(tensor_view(l.dw1, 0, 2, 1, 1), -0.0); /* expert 2 has no rows */
    tensor_fill(tensor_view(old[2], 0, 2, 1, 1), -0.0);
    FORWARD(&l.o, &l.a, FMOE_ADD_OUT);
    BACKWARD(&l.o, &l.a, FMOE_ACCUMULATE | FMOE_ADD_DX);
    for (int i = 0; i < 6; i++) {
        for (int64_t j = 0; j < tensor_count(all[i]); j++) {
            CHECK_NEAR(tensor_get(all[i], j), tensor_get(plain[i], j) + tensor_get(old[i], j));
        }
    }
    for (int64_t j = 0; j < 12; j++) CHECK(signbit(tensor_get(tensor_view(l.dw1, 0, 2, 1, 1), j)));
}

TEST(experts_outputs_may_be_null)
{
    for (int i = 0; i < 6; i++) {
        layer l = make_layer(4, 3, 2, 3, 2, FMOE_ACT_SWIGLU, FMOE_BIAS, 0);
        run_layer(&l);
        fmoe_tensor *dw1 = tensor_copy(l.dw1, FMOE_F64), *dw2 = tensor_copy(l.dw2, FMOE_F64);
        fmoe_tensor *dx = tensor_copy(l.dx, FMOE_F64);
        const fmoe_tensor **outputs[] = {&l.a.dx, &l.a.dweights, &l.a.dw.w1, &l.a.dw.b1, &l.a.dw.w2, &l.a.dw.b2};
        *outputs[i] = NULL;
        BACKWARD(&l.o, &l.a, 0);
        CHECK_SAME(l.dw1, dw1);
        CHECK_SAME(l.dw2, dw2);
        CHECK_SAME(l.dx, dx);
        for (int j = 0; j < 6; j++) *outputs[j] = NULL;
        BACKWARD(&l.o, &l.a, 0);
    }
}

TEST(experts_no_tokens_zeroes_weight_gradients)
{
    const layer l = make_layer(0, 3, 2, 3, 2, FMOE_ACT_SWIGLU, FMOE_BIAS, 0);
    run_layer(&l);
    CHECK_SAME(l.dw1, tensor_new(FMOE_F64, SHAPE(3, 4, 3)));
    CHECK_SAME(l.db2, tensor_new(FMOE_F64, SHAPE(3, 3)));
}

/* Routing weights and gradients of weights may be f32: one rounding, of the finished sum. */
TEST(experts_f32_where_allowed)
{
    layer l = make_layer(6, 4, 3, 3, 2, FMOE_ACT_SWIGLU, 0, 0);
    for (int64_t i = 0; i < 12; i++) tensor_set(l.p, i, (double)(float)tensor_get(l.p, i));
    run_layer(&l);
    fmoe_tensor *out = tensor_copy(l.out, FMOE_F64), *dw1 = tensor_copy(l.dw1, FMOE_F32);
    l.a.weights = tensor_copy(l.p, FMOE_F32);
    l.a.dw.w1 = tensor_new(FMOE_F32, SHAPE(3, 6, 4));
    run_layer(&l);
    CHECK_SAME(l.out, out);
    CHECK_SAME(l.a.dw.w1, dw1);
}

/* A token's numbers are its own: NaN stays in its rows, and a token alone gives the bits it gives in company. */
TEST(experts_tokens_are_independent)
{
    layer l = make_layer(5, 4, 3, 3, 2, FMOE_ACT_SWIGLU, 0, 0);
    run_layer(&l);
    fmoe_tensor *out = tensor_copy(l.out, FMOE_F64), *dx = tensor_copy(l.dx, FMOE_F64);
    tensor_set(l.x, 1, NaN);
    run_layer(&l);
    CHECK(isnan(tensor_get(l.out, 0)));
    CHECK_SAME(tensor_view(l.out, 0, 1, 4, 1), tensor_view(out, 0, 1, 4, 1));
    CHECK_SAME(tensor_view(l.dx, 0, 1, 4, 1), tensor_view(dx, 0, 1, 4, 1));
    l.a.x = tensor_view(l.x, 0, 3, 1, 1);
    l.a.ids = tensor_view(l.ids, 0, 3, 1, 1);
    l.a.weights = tensor_view(l.p, 0, 3, 1, 1);
    l.a.out = tensor_new(FMOE_F64, SHAPE(1, 4));
    FORWARD(&l.o, &l.a, 0);
    CHECK_SAME(l.a.out, tensor_view(out, 0, 3, 1, 1));
}

TEST(describe_is_one_line)
{
    const op o = make_op(FMOE_OP_EXPERTS, 1, 1, 1, 1);
    char text[200], cut[8];
    const size_t n = o.p.backend->describe(&o.p, text, sizeof text);
    CHECK_EQ(n, strlen(text));
    CHECK(strchr(text, '\n') == text + n - 1);
    CHECK_EQ(o.p.backend->describe(&o.p, cut, sizeof cut), n);
    CHECK_EQ(strlen(cut), 7);
}

TEST(sizes_that_do_not_fit_are_refused)
{
    op o = make_op(FMOE_OP_EXPERTS, 8, 8, 8, INT64_C(1) << 20);
    size_t workspace, saved;
    settle(&o, 1);
    CHECK_STATUS(o.p.backend->bytes(&o.p, FMOE_FORWARD, INT64_C(1) << 50, &workspace, &saved), FMOE_ERR_OVERFLOW);
    CHECK_STATUS(o.p.backend->bytes(&o.p, FMOE_BACKWARD, INT64_C(1) << 40, &workspace, &saved), FMOE_ERR_OVERFLOW);
}

/* ---- adapters ---- */

typedef struct adapters {
    fmoe_tensor *t[4], *d[4]; /* a1, b1, a2, b2, and their gradients */
} adapters;

static layer make_adapted(int64_t T, int64_t rank1, int64_t rank2, int act, uint32_t flags, int layout, adapters *lora)
{
    const int64_t H = 3, I = 2, E = 3;
    layer l = make_layer(T, H, I, E, 2, act, flags, layout);
    l.o.p.d.rank1 = rank1;
    l.o.p.d.rank2 = rank2;
    settle(&l.o, T);
    const int64_t shape[4][2] = {{rank1, H}, {l.o.p.h_cols, rank1}, {rank2, I}, {H, rank2}};
    for (int i = 0; i < 4; i++) {
        const bool turned = (layout & TRANSPOSED) != i % 2;
        for (int grad = 0; grad < 2; grad++) {
            fmoe_tensor *t = turned ? tensor_transposed(FMOE_F64, E, shape[i][0], shape[i][1])
                                    : tensor_new(FMOE_F64, SHAPE(E, shape[i][0], shape[i][1]));
            if (grad) lora->d[i] = tensor_fill(t, NaN);
            else lora->t[i] = tensor_random(t, 1);
        }
    }
    if (rank1) l.a.w.lora_a1 = lora->t[0], l.a.w.lora_b1 = lora->t[1];
    if (rank2) l.a.w.lora_a2 = lora->t[2], l.a.w.lora_b2 = lora->t[3];
    if (rank1) l.a.dw.lora_a1 = lora->d[0], l.a.dw.lora_b1 = lora->d[1];
    if (rank2) l.a.dw.lora_a2 = lora->d[2], l.a.dw.lora_b2 = lora->d[3];
    l.a.w.lora_scale1 = 1.5f;
    l.a.w.lora_scale2 = rank2 == 3 ? -0.25f : 0; /* 0 means 1 */
    return l;
}

TEST(adapters_gradients)
{
    const uint32_t flags[] = {0, FMOE_BIAS, FMOE_INTERLEAVED, FMOE_RECOMPUTE | FMOE_SKIP_E};
    const int layouts[] = {0, TRANSPOSED, LIST}, acts[] = {FMOE_ACT_SWIGLU, FMOE_ACT_RELU2};
    const int64_t ranks[][2] = {{1, 2}, {4, 0}, {0, 3}};
    for (int i = 0; i < 4 * 3 * 2 * 3; i++) {
        const uint32_t f = flags[i % 4];
        const int layout = layouts[i / 4 % 3], act = acts[i / 12 % 2];
        const int64_t *rank = ranks[i / 24];
        if ((layout & LIST) && (f & FMOE_BIAS)) continue;
        adapters lora;
        layer l = make_adapted(4, rank[0], rank[1], act, f, layout, &lora);
        if (f & FMOE_SKIP_E) tensor_set(l.ids, 3, 3);
        check_layer_gradients(&l);
        for (int j = 0; j < 4; j++)
            if (rank[j / 2]) CHECK_GRADIENT(&l.o, &l.a, 0, l.out, l.dout, lora.t[j], lora.d[j]);
    }
}

/* W + s B A without an adapter is the same layer: the same out, dx, dp and dW; and dB = s dW A^T, dA = s B^T dW. */
TEST(adapters_are_the_merged_layer)
{
    adapters lora;
    layer l = make_adapted(5, 2, 3, FMOE_ACT_SWIGLU, FMOE_INTERLEAVED | FMOE_BIAS, 0, &lora);
    run_layer(&l);
    layer merged = l;
    merged.o.p.d.rank1 = merged.o.p.d.rank2 = 0;
    settle(&merged.o, 5);
    fmoe_tensor *w[2] = {tensor_new(FMOE_F64, SHAPE(3, 4, 3)), tensor_new(FMOE_F64, SHAPE(3, 3, 2))};
    for (int i = 0; i < 2; i++) {
        const fmoe_tensor *from = i ? l.w2 : l.w1, *A = lora.t[2 * i], *B = lora.t[2 * i + 1];
        const int64_t N = w[i]->shape[1], K = w[i]->shape[2], R = A->shape[1];
        for (int64_t j = 0; j < tensor_count(w[i]); j++) {
            const int64_t e = j / (N * K), n = j / K % N, k = j % K;
            double sum = tensor_get(from, j);
            for (int64_t r = 0; r < R; r++)
                sum += (i ? -0.25 : 1.5) * tensor_get(B, (e * N + n) * R + r) * tensor_get(A, (e * R + r) * K + k);
            tensor_set(w[i], j, sum);
        }
    }
    merged.a.w = (fmoe_weights){.w1 = w[0], .w2 = w[1], .b1 = l.b1, .b2 = l.b2};
    fmoe_tensor *out = tensor_new(FMOE_F64, SHAPE(5, 3)), *dx = tensor_new(FMOE_F64, SHAPE(5, 3)),
                *dp = tensor_new(FMOE_F64, SHAPE(5, 2)), *dw1 = tensor_new(FMOE_F64, SHAPE(3, 4, 3)),
                *dw2 = tensor_new(FMOE_F64, SHAPE(3, 3, 2));
    merged.a.out = out, merged.a.dx = dx, merged.a.dweights = dp;
    merged.a.dw = (fmoe_weights){.w1 = dw1, .w2 = dw2};
    run_layer(&merged);
    const fmoe_tensor *pairs[][2] = {{l.out, out}, {l.dx, dx}, {l.dp, dp}, {l.dw1, dw1}, {l.dw2, dw2}};
    for (int i = 0; i < 5; i++)
        for (int64_t j = 0; j < tensor_count(pairs[i][1]); j++)
            CHECK(fabs(tensor_get(pairs[i][0], j) - tensor_get(pairs[i][1], j)) < 1e-12);
}
