/* SPDX-License-Identifier: Apache-2.0
 *
 * test_quant.c - quantised weights: every level decodes as the reference does, the layer has the bits of the layer on
 * decoded weights, codes are the nearest, and foreign packings go there and back. */
#include "unit/quantised.h"

#include "cpu/kernels/kernels.h"
#include "cpu/ref/ref.h"

static double reference(const quantised *w, int64_t e, int64_t n, int64_t k)
{
    const ref_vec row = {.p = (char *)w->codes->data + e * fmoe_stride(w->codes, 0) + n * fmoe_stride(w->codes, 1),
                         .quant = &w->q,
                         .e = e,
                         .n = n,
                         .N = w->N};
    return fmoe_ref_weight(&row, k);
}

TEST(every_level_decodes_as_the_reference_does)
{
    for (int level = 0; level < fmoe_cpu_level_count() && fmoe_cpu_level_available(level); level++) {
        CHECK_STATUS(fmoe_cpu_set_max_isa(fmoe_cpu_level_name(level)), FMOE_OK);
        for (int f = 0; f < FORMATS * 3; f++) {
            const int64_t E = 1 + test_below(3), N = 2 * (1 + test_below(70)), K = 1 + test_below(300);
            quantised w = quant_draw(&quant_formats[f % FORMATS], E, N, K, test_below(2));
            if (fmoe_tensor_dtype(w.q.scale) == FMOE_F32 && f >= FORMATS) {
                tensor_set(w.q.scale, 0, NAN);
                tensor_set(w.q.scale, tensor_count(w.q.scale) - 1, 1e-38); /* weights that are denormal */
                if (!fmoe_code_is_4bit(w.q.code)) ((uint8_t *)w.codes->data)[0] = 0x7f;
            }
            for (int dtype = FMOE_F32; dtype <= FMOE_F16; dtype++) {
                const fmoe_tensor *got = quant_weights(&w, dtype);
                int64_t wrong = 0;
                for (int64_t i = 0; i < E * N * K; i++) {
                    const float v = (float)reference(&w, i / K / N, i / K % N, i % K);
                    const double want = dtype == FMOE_F32    ? v
                                        : dtype == FMOE_BF16 ? fmoe_bf16_to_float(fmoe_float_to_bf16(v))
                                                             : fmoe_f16_to_float(fmoe_float_to_f16(v));
                    const double is = tensor_get(got, i);
                    wrong += !(memcmp(&is, &want, 8) == 0 || (isnan(is) && isnan(want)));
                }
                if (wrong)
                    TEST_FAIL("%s, %s, dtype %d, E=%d N=%d K=%d: %d differ", fmoe_cpu_level_name(level),
                              quant_formats[f % FORMATS].name, dtype, (int)E, (int)N, (int)K, (int)wrong);
            }
        }
    }
    fmoe_cpu_set_max_isa(NULL);
}

/* ---- the layer ---- */

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
    fmoe_plan plan;
    fmoe_run run = FMOE_RUN_INIT;
    results r = {.out = tensor_new(d->dtype, SHAPE(l->T, d->H)), .dx = tensor_new(d->dtype, SHAPE(l->T, d->H))};
    r.dp = tensor_new(d->dtype == FMOE_F64 ? FMOE_F64 : FMOE_F32, SHAPE(l->T, d->k));
    fmoe_experts_args a = {.size = sizeof a, .x = l->x, .ids = l->ids, .weights = l->p, .w = l->w, .out = r.out};
    CHECK_STATUS(fmoe_plan_create(&plan, d), FMOE_OK);
    CHECK_STATUS(fmoe_saved_bytes(plan, l->T, &a.saved_bytes), FMOE_OK);
    a.saved = test_alloc(a.saved_bytes);
    CHECK_STATUS(fmoe_workspace_bytes(plan, FMOE_FORWARD, l->T, &run.workspace_bytes), FMOE_OK);
    run.workspace = test_alloc(run.workspace_bytes);
    CHECK_STATUS(fmoe_experts_forward(plan, &a, &run), FMOE_OK);
    a.out = NULL;
    a.dout = l->dout;
    a.dx = r.dx;
    a.dweights = r.dp;
    if (l->w.b1) a.dw.b1 = r.db1 = tensor_new(FMOE_F32, SHAPE(d->E, l->w.b1->shape[1]));
    if (d->rank1) a.dw.lora_a1 = r.da1 = tensor_new(d->dtype, SHAPE(d->E, d->rank1, d->H));
    if (d->rank2) a.dw.lora_b2 = r.db2 = tensor_new(d->dtype, SHAPE(d->E, d->H, d->rank2));
    CHECK_STATUS(fmoe_workspace_bytes(plan, FMOE_BACKWARD, l->T, &run.workspace_bytes), FMOE_OK);
    run.workspace = test_alloc(run.workspace_bytes);
    CHECK_STATUS(fmoe_experts_backward(plan, &a, &run), FMOE_OK);
    fmoe_plan_destroy(&plan);
    return r;
}

static void compare_layers(const char *level, int f, int64_t H, int64_t I, int64_t T, int dtype, bool large)
{
    static const int32_t acts[] = {FMOE_ACT_SWIGLU, FMOE_ACT_SWIGLU_OAI, FMOE_ACT_RELU2, FMOE_ACT_GEGLU};
    layer l = {.d = FMOE_DESC_INIT, .T = T};
    l.d.op = FMOE_OP_EXPERTS, l.d.dtype = dtype, l.d.H = H, l.d.I = I, l.d.E = 1 + test_below(large ? 3 : 5);
    l.d.k = 1 + test_below(3);
    l.d.act = acts[test_below(4)];
    l.d.flags = (test_below(2) ? FMOE_INTERLEAVED : 0) | (test_below(2) ? FMOE_RECOMPUTE : 0);
    const bool list = test_below(4) == 0, gated = l.d.act < FMOE_ACT_SILU;
    if (!list && test_below(2)) l.d.flags |= FMOE_BIAS;
    l.d.rank1 = test_below(2) ? 1 + test_below(9) : 0;
    l.d.rank2 = test_below(2) ? 1 + test_below(9) : 0;
    l.d.threads = 1;
    const int64_t E = l.d.E, C = gated ? 2 * I : I;
    l.x = tensor_random(tensor_new(dtype, SHAPE(T, H)), 1);
    l.dout = tensor_random(tensor_new(dtype, SHAPE(T, H)), 1);
    l.p = tensor_random(tensor_new(FMOE_F32, SHAPE(T, l.d.k)), 1);
    l.ids = tensor_random_int(tensor_new(I32, SHAPE(T, l.d.k)), E);
    if (l.d.rank1) l.w.lora_a1 = tensor_random(tensor_new(dtype, SHAPE(E, l.d.rank1, H)), 0.2);
    if (l.d.rank1) l.w.lora_b1 = tensor_random(tensor_new(dtype, SHAPE(E, C, l.d.rank1)), 0.2);
    if (l.d.rank2) l.w.lora_a2 = tensor_random(tensor_new(FMOE_F32, SHAPE(E, l.d.rank2, I)), 0.2);
    if (l.d.rank2) l.w.lora_b2 = tensor_random(tensor_new(dtype, SHAPE(E, H, l.d.rank2)), 0.2);
    if (l.d.flags & FMOE_BIAS) l.w.b1 = tensor_random(tensor_new(FMOE_F32, SHAPE(E, C)), 1);
    if (l.d.flags & FMOE_BIAS) l.w.b2 = tensor_random(tensor_new(dtype, SHAPE(E, H)), 1);
    const bool halves = gated && !list && !(l.d.flags & FMOE_INTERLEAVED) && test_below(2);
    const quantised w1 = quant_draw(&quant_formats[f], E, list ? I : C, H, halves),
                    gate = quant_draw(&quant_formats[f], E, I, H, false),
                    w2 = quant_draw(&quant_formats[test_below(3) ? f : test_below(FORMATS)], E, H, I, false);
    layer plain = l;
    l.d.flags |= FMOE_QUANT;
    if (list) {
        plain.w.up = tensor_slices(quant_weights(&w1, dtype)), plain.w.down = tensor_slices(quant_weights(&w2, dtype));
        l.w.up = tensor_slices(w1.codes), l.w.down = tensor_slices(w2.codes);
        l.w.quant1 = quant_slices(&w1.q, E), l.w.quant2 = quant_slices(&w2.q, E);
        if (gated) plain.w.gate = tensor_slices(quant_weights(&gate, dtype)), l.w.gate = tensor_slices(gate.codes);
        if (gated) l.w.quant_gate = quant_slices(&gate.q, E);
    } else {
        plain.w.w1 = quant_weights(&w1, dtype), plain.w.w2 = quant_weights(&w2, dtype);
        l.w.w1 = w1.codes, l.w.w2 = w2.codes, l.w.quant1 = &w1.q, l.w.quant2 = &w2.q;
        if (test_below(5) == 0) l.w.w2 = plain.w.w2, l.w.quant2 = NULL; /* one of the two alone */
    }
    const results want = run_layer(&plain);
    for (int threads = 1; threads <= 2; threads++) {
        l.d.threads = threads;
        const results got = run_layer(&l);
        const fmoe_tensor *const pairs[][2] = {{got.out, want.out}, {got.dx, want.dx},   {got.dp, want.dp},
                                               {got.db1, want.db1}, {got.da1, want.da1}, {got.db2, want.db2}};
        static const char *const names[] = {"out", "dx", "dp", "db1", "da1", "dB2"};
        for (int i = 0; i < 6; i++) {
            const int64_t n = pairs[i][0] ? differences(pairs[i][0], pairs[i][1]) : 0;
            if (n)
                TEST_FAIL(
                    "%s, %s, dtype %d, %d threads, %s: %d differ (H=%d I=%d E=%d k=%d T=%d act=%d flags=%u list=%d)",
                    level, quant_formats[f].name, dtype, threads, names[i], (int)n, (int)H, (int)I, (int)E, (int)l.d.k,
                    (int)T, l.d.act, l.d.flags, list);
        }
    }
}

TEST(the_layer_has_the_bits_of_the_one_on_decoded_weights)
{
    for (int level = 0; level < fmoe_cpu_level_count() && fmoe_cpu_level_available(level); level++) {
        const char *name = fmoe_cpu_level_name(level);
        CHECK_STATUS(fmoe_cpu_set_max_isa(name), FMOE_OK);
        for (int f = 0; f < 2 * FORMATS; f++) {
            static const int64_t tokens[] = {1, 3, 8, 40};
            const int64_t H = test_below(2) ? 64 * (1 + test_below(4)) : 1 + test_below(200),
                          I = test_below(2) ? 64 : 1 + test_below(90);
            compare_layers(name, f % FORMATS, H, I, tokens[test_below(4)], 1 + (int)test_below(3), false);
        }
        if (level)
            compare_layers(name, (int)test_below(5), 1152, 640, 150, FMOE_BF16, true); /* chunks and panels, whole */
        if (level) compare_layers(name, (int)test_below(5), 2080, 576, 6, FMOE_BF16, true);
    }
    fmoe_cpu_set_max_isa(NULL);
}

/* The reference itself on codes: a layer in double is near the one in f32. */
TEST(a_plan_of_f64_reads_codes)
{
    const quantised w1 = quant_draw(&quant_formats[0], 2, 12, 70, true),
                    w2 = quant_draw(&quant_formats[3], 2, 70, 6, false);
    layer l = {.d = FMOE_DESC_INIT, .T = 4};
    l.d.op = FMOE_OP_EXPERTS, l.d.H = 70, l.d.I = 6, l.d.E = 2, l.d.k = 2, l.d.flags = FMOE_QUANT;
    l.ids = tensor_random_int(tensor_new(I32, SHAPE(4, 2)), 2);
    l.w.w1 = w1.codes, l.w.w2 = w2.codes, l.w.quant1 = &w1.q, l.w.quant2 = &w2.q;
    results r[2];
    double x[4 * 70];
    for (int i = 0; i < 4 * 70; i++) x[i] = 2 * test_uniform() - 1;
    for (int i = 0; i < 2; i++) {
        l.d.dtype = i ? FMOE_F64 : FMOE_F32;
        l.x = l.dout = tensor_list(tensor_new(l.d.dtype, SHAPE(4, 70)), x);
        l.p = tensor_fill(tensor_new(l.d.dtype, SHAPE(4, 2)), 0.5);
        r[i] = run_layer(&l);
    }
    for (int64_t i = 0; i < 4 * 70; i++) {
        CHECK(fabs(tensor_get(r[0].out, i) - tensor_get(r[1].out, i)) < 1e-5);
        CHECK(fabs(tensor_get(r[0].dx, i) - tensor_get(r[1].dx, i)) < 1e-5);
    }
}

/* ---- weights to codes ---- */

TEST(codes_are_the_nearest)
{
    for (int f = 0; f < FORMATS; f++) {
        const quant_format *format = &quant_formats[f];
        if (format->scale_type == FMOE_SCALE_E4M3 || (format->zeros && format->code != FMOE_CODE_U4)) continue;
        const int64_t E = 2, N = 6, K = 150;
        quantised w = quant_draw(format, E, N, K, false);
        fmoe_tensor *weights = tensor_random(tensor_new(FMOE_BF16, SHAPE(E, N, K)), 0.3);
        const fmoe_quant_args a = {.size = sizeof a, .w = weights, .codes = w.codes, .quant = &w.q};
        REQUIRE(fmoe_quantize(&a) == FMOE_OK);
        const fmoe_tensor *back = quant_weights(&w, FMOE_F32);
        for (int64_t i = 0; i < E * N * K; i++) { /* no other code of the group is nearer */
            const int64_t e = i / K / N, n = i / K % N, k = i % K,
                          high = (k % 2 == 1) != ((w.q.flags & FMOE_QUANT_HIGH_FIRST) != 0);
            const bool four = fmoe_code_is_4bit(w.q.code);
            uint8_t *at = (uint8_t *)w.codes->data + e * fmoe_stride(w.codes, 0) + n * fmoe_stride(w.codes, 1) +
                          (four ? k / 2 : k),
                    was = *at;
            const double x = tensor_get(weights, i), error = fabs(tensor_get(back, i) - x);
            double least = INFINITY;
            for (int c = 0; c < (four ? 16 : 256); c++) {
                *at = (uint8_t)(!four ? c : high ? (was & 15) | c << 4 : (was & 240) | c);
                const double d = fabs(reference(&w, e, n, k) - x);
                if (d < least) least = d;
            }
            *at = was;
            if (error > least * 1.0001 + 1e-9) {
                TEST_FAIL("%s: %g became %g, an error of %g where %g is possible", format->name, x, tensor_get(back, i),
                          error, least);
                return;
            }
        }
    }
}

TEST(foreign_packings_go_there_and_back)
{
    for (int form = FMOE_REPACK_CT_INT4; form <= FMOE_REPACK_BNB_4BIT; form++) {
        const int64_t N = 16, K = 24, words[5][2] = {{0, 0}, {N, K / 8}, {K / 8, N}, {K, N / 8}, {N * K / 2, 1}};
        fmoe_tensor *foreign =
            tensor_new(form == FMOE_REPACK_BNB_4BIT ? FMOE_BYTE : I32, SHAPE(words[form][0], words[form][1]));
        uint8_t before[16 * 12];
        for (size_t i = 0; i < sizeof before; i++) before[i] = ((uint8_t *)foreign->data)[i] = (uint8_t)test_random();
        fmoe_tensor *codes = tensor_new(FMOE_BYTE, SHAPE(N, K / 2));
        fmoe_repack_args a = {.size = sizeof a, .form = form, .N = N, .K = K, .foreign = foreign, .codes = codes};
        CHECK_STATUS(fmoe_quant_repack(&a), FMOE_OK);
        memset(foreign->data, 0, sizeof before);
        a.back = 1;
        CHECK_STATUS(fmoe_quant_repack(&a), FMOE_OK);
        CHECK(!memcmp(foreign->data, before, sizeof before));
        a.K = 25;
        CHECK_STATUS(fmoe_quant_repack(&a), FMOE_ERR_SHAPE);
        CHECK_ERROR_HAS(form == FMOE_REPACK_AWQ ? "foreign" : "25");
    }
}

/* ---- bad descriptors ---- */

static fmoe_status forward_with(const layer *l)
{
    fmoe_plan plan;
    fmoe_run run = FMOE_RUN_INIT;
    fmoe_tensor *out = tensor_fill(tensor_new(l->d.dtype, SHAPE(l->T, l->d.H)), 7);
    fmoe_experts_args a = {.size = sizeof a, .x = l->x, .ids = l->ids, .weights = l->p, .w = l->w, .out = out};
    CHECK_STATUS(fmoe_plan_create(&plan, &l->d), FMOE_OK);
    CHECK_STATUS(fmoe_workspace_bytes(plan, FMOE_FORWARD, l->T, &run.workspace_bytes), FMOE_OK);
    run.workspace = test_alloc(run.workspace_bytes);
    const fmoe_status status = fmoe_experts_forward(plan, &a, &run);
    for (int64_t i = 0; status != FMOE_OK && i < l->T * l->d.H; i++) CHECK(tensor_get(out, i) == 7);
    fmoe_plan_destroy(&plan);
    return status;
}

TEST(bad_descriptors_are_named)
{
    const quantised w1 = quant_draw(&quant_formats[0], 2, 12, 64, false),
                    w2 = quant_draw(&quant_formats[5], 2, 64, 6, false);
    fmoe_quant q = w1.q, int4 = w2.q;
    layer l = {.d = FMOE_DESC_INIT, .T = 3};
    l.d.op = FMOE_OP_EXPERTS, l.d.dtype = FMOE_BF16, l.d.H = 64, l.d.I = 6, l.d.E = 2, l.d.k = 1,
    l.d.flags = FMOE_QUANT;
    l.x = tensor_random(tensor_new(FMOE_BF16, SHAPE(3, 64)), 1);
    l.ids = tensor_random_int(tensor_new(I32, SHAPE(3, 1)), 2);
    l.p = tensor_fill(tensor_new(FMOE_F32, SHAPE(3, 1)), 1);
    l.w.w1 = w1.codes, l.w.w2 = w2.codes, l.w.quant1 = &q, l.w.quant2 = &int4;
    CHECK_STATUS(forward_with(&l), FMOE_OK);
#define BAD(set, status, part)                                                                                         \
    do {                                                                                                               \
        set;                                                                                                           \
        CHECK_STATUS(forward_with(&l), status);                                                                        \
        CHECK_ERROR_HAS(part);                                                                                         \
        q = w1.q, int4 = w2.q;                                                                                         \
    } while (0)
    BAD(q.size = 63, FMOE_ERR_ABI, "fmoe_quant.size is 63");
    BAD(q.code = 0, FMOE_ERR_ARG, "quant1.code is 0");
    BAD(q.code = 8, FMOE_ERR_ARG, "quant1.code is 8");
    BAD(q.flags |= 16, FMOE_ERR_ARG, "0x11");
    BAD(q.group_cols = -1, FMOE_ERR_ARG, "group_cols -1");
    BAD(q.group_cols = 32, FMOE_ERR_SHAPE, "quant1.scale has columns of groups = 1");
    BAD(q.group_rows = 0, FMOE_ERR_SHAPE, "quant1.scale has rows of groups = 12");
    BAD(q.scale_type = 3, FMOE_ERR_ARG, "scale_type is 3");
    BAD(q.scale_type = FMOE_SCALE_E8M0, FMOE_ERR_DTYPE, "quant1.scale has dtype f32");
    BAD(q.zero = 1, FMOE_ERR_ARG, "quant1.zero is 1");
    BAD(int4.zero = NAN, FMOE_ERR_ARG, "quant2.zero is nan");
    BAD(q.lut = quant_lut, FMOE_ERR_ARG, "quant1.lut is given");
    BAD(q.code = FMOE_CODE_LUT4, FMOE_ERR_NULL, "quant1.lut is NULL");
    BAD(q.scale = NULL, FMOE_ERR_NULL, "quant1.scale is NULL");
    BAD(q.code = FMOE_CODE_E4M3, FMOE_ERR_ARG, "HIGH_FIRST");
    BAD((q.code = FMOE_CODE_E4M3, q.flags = 0), FMOE_ERR_SHAPE, "w1 has bytes of codes = 32");
    BAD(int4.flags = FMOE_QUANT_HALVES, FMOE_ERR_ARG, "quant2.flags");
    BAD(q.scale2 = l.p, FMOE_ERR_SHAPE, "quant1.scale2");
    BAD(int4.zeros = w2.codes, FMOE_ERR_ARG, "quant2.zeros is given");
    const fmoe_tensor *was = l.w.w1;
    BAD(l.w.w1 = tensor_new(FMOE_BF16, SHAPE(2, 12, 32)), FMOE_ERR_DTYPE, "w1 has dtype bf16");
    BAD(l.w.w1 = NULL, FMOE_ERR_NULL, "w1 is NULL");
    l.w.w1 = was;
    BAD(l.w.quant_gate = &q, FMOE_ERR_ARG, "quant_gate");
    l.w.quant_gate = NULL;
    BAD(l.d.flags = 0, FMOE_ERR_PLAN, "FMOE_QUANT");
    l.d.flags = FMOE_QUANT;
    const quantised wrong = quant_draw(&quant_formats[0], 2, 12, 66, false);
    BAD(l.w.w1 = wrong.codes, FMOE_ERR_SHAPE, "w1 has bytes of codes = 33");
    l.w.w1 = was;
    CHECK_STATUS(forward_with(&l), FMOE_OK);
}

TEST(a_gradient_of_quantised_weights_is_refused)
{
    const quantised w1 = quant_draw(&quant_formats[0], 2, 12, 64, false),
                    w2 = quant_draw(&quant_formats[3], 2, 64, 6, false);
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_EXPERTS, d.dtype = FMOE_BF16, d.H = 64, d.I = 6, d.E = 2, d.k = 1,
    d.flags = FMOE_QUANT | FMOE_RECOMPUTE;
    fmoe_plan plan;
    fmoe_run run = FMOE_RUN_INIT;
    CHECK_STATUS(fmoe_plan_create(&plan, &d), FMOE_OK);
    CHECK_STATUS(fmoe_workspace_bytes(plan, FMOE_BACKWARD, 3, &run.workspace_bytes), FMOE_OK);
    run.workspace = test_alloc(run.workspace_bytes);
    const fmoe_tensor *x = tensor_random(tensor_new(FMOE_BF16, SHAPE(3, 64)), 1);
    fmoe_experts_args a = {.size = sizeof a,
                           .x = x,
                           .dout = x,
                           .ids = tensor_new(I32, SHAPE(3, 1)),
                           .weights = tensor_fill(tensor_new(FMOE_F32, SHAPE(3, 1)), 1),
                           .w = {.w1 = w1.codes, .w2 = w2.codes, .quant1 = &w1.q, .quant2 = &w2.q}};
    a.dw.w2 = tensor_new(FMOE_BF16, SHAPE(2, 64, 6));
    CHECK_STATUS(fmoe_experts_backward(plan, &a, &run), FMOE_ERR_UNSUPPORTED);
    CHECK_ERROR_HAS("dw2 is given, but quant2");
    a.dw = (fmoe_weights){.w1 = tensor_new(FMOE_BF16, SHAPE(2, 12, 64))};
    CHECK_STATUS(fmoe_experts_backward(plan, &a, &run), FMOE_ERR_UNSUPPORTED);
    CHECK_ERROR_HAS("dw1 is given, but quant1");
    a.dw = (fmoe_weights){.quant1 = &w1.q};
    CHECK_STATUS(fmoe_experts_backward(plan, &a, &run), FMOE_ERR_ARG);
    CHECK_ERROR_HAS("dquant1");
    fmoe_plan_destroy(&plan);
}
