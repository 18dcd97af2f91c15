/* SPDX-License-Identifier: Apache-2.0
 * test_ascend_quant.c - quantised weights on the simulated NPU: the bits of the layer on decoded weights. */
#include "device.h"
#include "unit/quantised.h"

typedef struct layer {
    fmoe_desc d;
    int64_t T;
    const fmoe_tensor *x, *ids, *p, *dout;
    fmoe_weights w;
} layer;

typedef struct results {
    fmoe_tensor *out, *dx, *dp, *db1, *da1, *db2;
} results;

static results run_layer(const layer *l)
{
    const fmoe_desc *d = &l->d;
    const fmoe_plan plan = make_plan(*d, FMOE_ASCEND);
    results r = {.out = to_npu(tensor_new(d->dtype, SHAPE(l->T, d->H))),
                 .dx = to_npu(tensor_new(d->dtype, SHAPE(l->T, d->H))),
                 .dp = to_npu(tensor_new(FMOE_F32, SHAPE(l->T, d->k)))};
    fmoe_experts_args a = {.size = sizeof a, .x = l->x, .ids = l->ids, .weights = l->p, .w = l->w, .out = r.out};
    CHECK_STATUS(fmoe_saved_bytes(plan, l->T, &a.saved_bytes), FMOE_OK);
    if (a.saved_bytes) {
        char *at = npu_alloc(a.saved_bytes + 255);
        a.saved = at + (256 - (uintptr_t)at % 256) % 256;
    }
    const fmoe_run f = run_for(plan, FMOE_FORWARD, l->T, FMOE_ASCEND, 0),
                   b = run_for(plan, FMOE_BACKWARD, l->T, FMOE_ASCEND, 0);
    const int64_t syncs = npu.get("syncs");
    CHECK_STATUS(fmoe_experts_forward(plan, &a, &f), FMOE_OK);
    a.out = NULL;
    a.dout = l->dout;
    a.dx = r.dx;
    a.dweights = r.dp;
    if (l->w.b1) a.dw.b1 = r.db1 = to_npu(tensor_new(FMOE_F32, SHAPE(d->E, l->w.b1->shape[1])));
    if (d->rank1) a.dw.lora_a1 = r.da1 = to_npu(tensor_new(d->dtype, SHAPE(d->E, d->rank1, d->H)));
    if (d->rank2) a.dw.lora_b2 = r.db2 = to_npu(tensor_new(d->dtype, SHAPE(d->E, d->H, d->rank2)));
    CHECK_STATUS(fmoe_experts_backward(plan, &a, &b), FMOE_OK);
    CHECK_EQ(npu.get("syncs"), syncs);
    fmoe_plan p = plan;
    fmoe_plan_destroy(&p);
    return r;
}

/* The tensor with its own 8-bit type. */
static fmoe_tensor *moved(const fmoe_tensor *t)
{
    fmoe_tensor *d = to_npu(t);
    if (t) d->dtype = t->dtype;
    return d;
}

static fmoe_quant *moved_quant(const fmoe_quant *q)
{
    fmoe_quant *r = test_alloc(sizeof *r);
    *r = *q;
    r->scale = moved(q->scale), r->zeros = moved(q->zeros), r->scale2 = moved(q->scale2);
    return r;
}

/* Every matrix of a stack as a tensor of its own, somewhere. */
static fmoe_tensor *apart(const fmoe_tensor *stack)
{
    if (!stack) return NULL;
    const int64_t E = stack->shape[0];
    fmoe_tensor *list = test_alloc((size_t)E * sizeof *list), *slices = tensor_slices(stack);
    for (int64_t e = 0; e < E; e++) {
        slices[e].dtype = stack->dtype;
        list[e] = *moved(&slices[e]);
    }
    return list;
}

static fmoe_quant *apart_quant(const fmoe_quant *q, int64_t E)
{
    fmoe_quant *r = test_alloc(sizeof *r);
    *r = *q;
    r->scale = apart(q->scale), r->zeros = apart(q->zeros);
    if (q->scale2) {
        fmoe_tensor *ones = test_alloc((size_t)E * sizeof *ones);
        for (int64_t e = 0; e < E; e++)
            ones[e] = *to_npu(
                tensor_over((float *)q->scale2->data + (q->scale2->shape[0] > 1 ? e : 0), FMOE_F32, SHAPE(1), NULL));
        r->scale2 = ones;
    }
    return r;
}

static void compare(int f, int dtype, int64_t H, int64_t I, int64_t T)
{
    static const int32_t acts[] = {FMOE_ACT_SWIGLU, FMOE_ACT_SWIGLU_OAI, FMOE_ACT_RELU2};
    layer l = {.d = {.op = FMOE_OP_EXPERTS, .dtype = dtype, .H = H, .I = I}, .T = T};
    const int64_t E = l.d.E = 1 + test_below(5);
    l.d.k = 1 + test_below(3);
    l.d.act = acts[test_below(3)];
    l.d.flags = (test_below(2) ? FMOE_INTERLEAVED : 0) | (test_below(2) ? FMOE_RECOMPUTE : 0);
    const bool list = test_below(3) == 0, gated = l.d.act < FMOE_ACT_SILU;
    if (!list && test_below(2)) l.d.flags |= FMOE_BIAS;
    l.d.rank1 = test_below(2) ? 1 + test_below(9) : 0;
    l.d.rank2 = test_below(2) ? 1 + test_below(9) : 0;
    const int64_t C = gated ? 2 * I : I;
    l.x = to_npu(tensor_random(tensor_new(dtype, SHAPE(T, H)), 1));
    l.dout = to_npu(tensor_random(tensor_new(dtype, SHAPE(T, H)), 1));
    l.p = to_npu(tensor_random(tensor_new(FMOE_F32, SHAPE(T, l.d.k)), 1));
    l.ids = to_npu(tensor_random_int(tensor_new(I32, SHAPE(T, l.d.k)), E));
    if (l.d.rank1) l.w.lora_a1 = to_npu(tensor_random(tensor_new(dtype, SHAPE(E, l.d.rank1, H)), 0.2));
    if (l.d.rank1) l.w.lora_b1 = to_npu(tensor_random(tensor_new(dtype, SHAPE(E, C, l.d.rank1)), 0.2));
    if (l.d.rank2) l.w.lora_a2 = to_npu(tensor_random(tensor_new(FMOE_F32, SHAPE(E, l.d.rank2, I)), 0.2));
    if (l.d.rank2) l.w.lora_b2 = to_npu(tensor_random(tensor_new(dtype, SHAPE(E, H, l.d.rank2)), 0.2));
    if (l.d.flags & FMOE_BIAS) l.w.b1 = to_npu(tensor_random(tensor_new(dtype, SHAPE(E, C)), 1));
    if (l.d.flags & FMOE_BIAS) l.w.b2 = to_npu(tensor_random(tensor_new(dtype, SHAPE(E, H)), 1));
    const bool halves = gated && !list && !(l.d.flags & FMOE_INTERLEAVED) && test_below(2);
    const quantised w1 = quant_draw(&quant_formats[f], E, list ? I : C, H, halves),
                    gate = quant_draw(&quant_formats[f], E, I, H, false),
                    w2 = quant_draw(&quant_formats[test_below(FORMATS)], E, H, I, false);
    layer plain = l;
    l.d.flags |= FMOE_QUANT;
    const fmoe_tensor *first = quant_weights(&w1, dtype), *second = quant_weights(&w2, dtype);
    if (list) {
        plain.w.up = apart(first), plain.w.down = apart(second);
        l.w.up = apart(w1.codes), l.w.down = apart(w2.codes);
        l.w.quant1 = apart_quant(&w1.q, E), l.w.quant2 = apart_quant(&w2.q, E);
        if (gated) plain.w.gate = apart(quant_weights(&gate, dtype)), l.w.gate = apart(gate.codes);
        if (gated) l.w.quant_gate = apart_quant(&gate.q, E);
    } else {
        plain.w.w1 = to_npu(first), plain.w.w2 = to_npu(second);
        l.w.w1 = moved(w1.codes), l.w.w2 = moved(w2.codes);
        l.w.quant1 = moved_quant(&w1.q), l.w.quant2 = moved_quant(&w2.q);
        if (test_below(5) == 0) l.w.w2 = plain.w.w2, l.w.quant2 = NULL; /* one of the two alone */
    }
    const results want = run_layer(&plain), got = run_layer(&l);
    const fmoe_tensor *const pairs[][2] = {{got.out, want.out}, {got.dx, want.dx},   {got.dp, want.dp},
                                           {got.db1, want.db1}, {got.da1, want.da1}, {got.db2, want.db2}};
    static const char *const names[] = {"out", "dx", "dp", "db1", "da1", "dB2"};
    for (int i = 0; i < 6; i++) {
        const int before = test_failures;
        if (pairs[i][0]) CHECK_EQUAL(pairs[i][0], from_npu(pairs[i][1]));
        if (test_failures != before)
            printf("  %s: %s, dtype %d, H=%d I=%d E=%d T=%d act=%d flags=%u list=%d\n", names[i], quant_formats[f].name,
                   dtype, (int)H, (int)I, (int)E, (int)T, l.d.act, l.d.flags, list);
    }
    while (npu_count > 0) npu.free(npu_blocks[--npu_count]);
}

NPU_TEST(the_layer_has_the_bits_of_the_one_on_decoded_weights)
{
    for (int f = 0; f < 5 * FORMATS; f++)
        compare(f % FORMATS, FMOE_F32 + (int)test_below(3), 1 + test_below(150), 1 + test_below(70),
                1 + test_below(20));
}

NPU_TEST(more_rows_than_a_block)
{
    for (int f = 0; f < 2; f++) compare(f, FMOE_BF16, 2100, 550 + test_below(50), 2);
}

/* Every code of 8 bits and every scale byte, NaN and denormal values too: K columns of one row. */
NPU_TEST(every_byte)
{
    for (int scales = 0; scales < 3; scales++) {
        enum { K = 256 };
        quantised w = {.q = FMOE_QUANT_INIT, .E = 2, .N = 2, .K = K};
        w.codes = bytes_new(2, 2, K, 0);
        w.q.code = FMOE_CODE_E4M3, w.q.group_rows = 1, w.q.group_cols = scales ? 1 : 0;
        w.q.scale_type = scales;
        w.q.scale = scales ? bytes_new(2, 2, K, 0) : tensor_fill(tensor_new(FMOE_F32, SHAPE(2, 2, 1)), 0.75);
        for (int i = 0; i < 4 * K; i++) {
            ((uint8_t *)w.codes->data)[i] = (uint8_t)(scales ? 0x38 : i);
            if (scales) ((uint8_t *)w.q.scale->data)[i] = (uint8_t)i;
        }
        /* W2 [E, H=2, I=256] meets an `a` with one element that is not zero: out is a column of it. */
        const fmoe_tensor *decoded = quant_weights(&w, FMOE_F32);
        int64_t nan = 0;
        for (int64_t i = 0; i < 4 * K; i++) nan += isnan(tensor_get(decoded, i));
        CHECK(nan > 0);
        layer l = {.d = {.op = FMOE_OP_EXPERTS, .dtype = FMOE_F32, .H = 2, .I = K, .E = 2, .k = 1}, .T = 1};
        l.d.act = FMOE_ACT_RELU;
        l.d.flags = FMOE_QUANT;
        l.x = to_npu(tensor_list(tensor_new(FMOE_F32, SHAPE(1, 2)), (const double[]){1, 0}));
        l.dout = to_npu(tensor_list(tensor_new(FMOE_F32, SHAPE(1, 2)), (const double[]){1, 0}));
        l.p = to_npu(tensor_fill(tensor_new(FMOE_F32, SHAPE(1, 1)), 1));
        l.ids = to_npu(tensor_fill(tensor_new(I32, SHAPE(1, 1)), 1));
        /* dx = dout W2 W1 with W1 = [I, 2]: the identity would need 256 columns; the gradient of an adapter of rank
         * one shows dA = W2^T dout as it is. */
        l.d.rank1 = 1;
        l.w.lora_a1 = to_npu(tensor_list(tensor_new(FMOE_F32, SHAPE(2, 1, 2)), (const double[]){1, 0, 1, 0}));
        l.w.lora_b1 = to_npu(tensor_fill(tensor_new(FMOE_F32, SHAPE(2, K, 1)), 0));
        l.w.w1 = to_npu(tensor_fill(tensor_new(FMOE_F32, SHAPE(2, K, 2)), 1));
        l.w.w2 = moved(w.codes), l.w.quant2 = moved_quant(&w.q);
        const fmoe_plan plan = make_plan(l.d, FMOE_ASCEND);
        fmoe_tensor *db = to_npu(tensor_new(FMOE_F32, SHAPE(2, K, 1)));
        fmoe_experts_args a = {.size = sizeof a, .x = l.x, .ids = l.ids, .weights = l.p, .w = l.w};
        fmoe_tensor *out = to_npu(tensor_new(FMOE_F32, SHAPE(1, 2)));
        CHECK_STATUS(fmoe_saved_bytes(plan, 1, &a.saved_bytes), FMOE_OK);
        char *at = npu_alloc(a.saved_bytes + 255);
        a.saved = at + (256 - (uintptr_t)at % 256) % 256;
        a.out = out;
        const fmoe_run f = run_for(plan, FMOE_FORWARD, 1, FMOE_ASCEND, 0),
                       b = run_for(plan, FMOE_BACKWARD, 1, FMOE_ASCEND, 0);
        CHECK_STATUS(fmoe_experts_forward(plan, &a, &f), FMOE_OK);
        a.out = NULL, a.dout = l.dout, a.dw.lora_b1 = db;
        CHECK_STATUS(fmoe_experts_backward(plan, &a, &b), FMOE_OK);
        const fmoe_tensor *got = from_npu(db);
        for (int64_t i = 0; i < K; i++) {
            const double g = tensor_get(got, K + i), want = tensor_get(decoded, 2 * K + i);
            if (g != want && !(isnan(g) && isnan(want)))
                TEST_FAIL("scale type %d, byte %d: %g, not %g", scales, (int)i, g, want);
        }
        fmoe_plan p = plan;
        fmoe_plan_destroy(&p);
    }
}

static fmoe_tensor *run_gmm(fmoe_desc d, fmoe_gmm_args a, int64_t R, bool backward)
{
    const fmoe_plan plan = make_plan(d, FMOE_ASCEND);
    fmoe_tensor *result = to_npu(tensor_fill(tensor_new(d.dtype, SHAPE(R, backward ? d.K : d.N)), 3));
    const fmoe_run run = run_for(plan, backward ? FMOE_BACKWARD : FMOE_FORWARD, R, FMOE_ASCEND, 0);
    if (backward) {
        a.dx = result;
        CHECK_STATUS(fmoe_grouped_matmul_backward(plan, &a, &run), FMOE_OK);
    } else {
        a.y = result;
        CHECK_STATUS(fmoe_grouped_matmul_forward(plan, &a, &run), FMOE_OK);
    }
    fmoe_plan p = plan;
    fmoe_plan_destroy(&p);
    return result;
}

NPU_TEST(the_grouped_matmul_has_the_bits_of_the_one_on_decoded_weights)
{
    for (int f = 0; f < 3 * FORMATS; f++) {
        const int64_t E = 1 + test_below(4), K = 1 + test_below(90), N = 1 + test_below(90), R = 1 + test_below(20);
        const int dtype = FMOE_F32 + (int)test_below(3);
        const bool in_out = test_below(2), backward = test_below(2);
        quantised w = quant_draw(&quant_formats[f % FORMATS], E, in_out ? K : N, in_out ? N : K, false);
        fmoe_tensor *sizes = tensor_new(I64, SHAPE(E));
        for (int64_t e = 0, left = R; e < E; e++) {
            const int64_t n = test_below(left + 1); /* rows past the total, too */
            tensor_set(sizes, e, (double)n);
            left -= n;
        }
        fmoe_gmm_args plain = {.size = sizeof plain, .sizes = to_npu(sizes)};
        if (backward) plain.dy = to_npu(tensor_random(tensor_new(dtype, SHAPE(R, N)), 1));
        else plain.x = to_npu(tensor_random(tensor_new(dtype, SHAPE(R, K)), 1));
        fmoe_gmm_args coded = plain;
        fmoe_tensor *decoded = to_npu(quant_weights(&w, dtype));
        if (!in_out) { /* [E,N,K] as [E,K,N] */
            const int64_t shape[3] = {E, K, N}, strides[3] = {N * K, 1, K};
            fmoe_tensor *turned = tensor_over(decoded->data, dtype, 3, shape, strides);
            turned->device = decoded->device;
            decoded = turned;
        }
        plain.w = decoded;
        coded.w = moved(w.codes);
        fmoe_quant *q = moved_quant(&w.q);
        q->flags |= in_out ? FMOE_QUANT_IN_OUT : 0;
        coded.quant = q;
        fmoe_desc d = {.op = FMOE_OP_GROUPED_MATMUL, .dtype = dtype, .E = E, .K = K, .N = N};
        const fmoe_tensor *want = from_npu(run_gmm(d, plain, R, backward));
        d.flags = FMOE_QUANT;
        const int before = test_failures;
        CHECK_EQUAL(run_gmm(d, coded, R, backward), want);
        if (test_failures != before) printf("  %s in_out %d\n", quant_formats[f % FORMATS].name, in_out);
        while (npu_count > 0) npu.free(npu_blocks[--npu_count]);
    }
}

NPU_TEST(a_gradient_of_codes_is_an_error)
{
    const quantised w1 = quant_draw(&quant_formats[0], 2, 8, 16, false),
                    w2 = quant_draw(&quant_formats[0], 2, 16, 4, false);
    const fmoe_desc d = {
        .op = FMOE_OP_EXPERTS, .dtype = FMOE_F32, .H = 16, .I = 4, .E = 2, .k = 1, .flags = FMOE_QUANT};
    const fmoe_plan plan = make_plan(d, FMOE_ASCEND);
    fmoe_tensor *row = to_npu(tensor_fill(tensor_new(FMOE_F32, SHAPE(1, 16)), 1)),
                *one = to_npu(tensor_fill(tensor_new(FMOE_F32, SHAPE(1, 1)), 1)),
                *id = to_npu(tensor_fill(tensor_new(I32, SHAPE(1, 1)), 0));
    fmoe_experts_args a = {.size = sizeof a, .x = row, .ids = id, .weights = one, .dout = row};
    a.w = (fmoe_weights){
        .w1 = moved(w1.codes), .w2 = moved(w2.codes), .quant1 = moved_quant(&w1.q), .quant2 = moved_quant(&w2.q)};
    a.dw.w1 = to_npu(tensor_new(FMOE_F32, SHAPE(2, 8, 16)));
    CHECK_STATUS(fmoe_saved_bytes(plan, 1, &a.saved_bytes), FMOE_OK);
    char *at = npu_alloc(a.saved_bytes + 255);
    a.saved = at + (256 - (uintptr_t)at % 256) % 256;
    const fmoe_run b = run_for(plan, FMOE_BACKWARD, 1, FMOE_ASCEND, 0);
    CHECK(fmoe_experts_backward(plan, &a, &b) != FMOE_OK);
    CHECK(strstr(fmoe_last_error(), "quant1") != NULL || strstr(fmoe_last_error(), "dw1") != NULL);
    fmoe_plan p = plan;
    fmoe_plan_destroy(&p);
}
