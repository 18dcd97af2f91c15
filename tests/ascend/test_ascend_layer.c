/* SPDX-License-Identifier: Apache-2.0
 * test_ascend_layer.c - the experts layer on the simulated NPU against the reference in double. */
#include "../acts.h"
#include "layer.h"

#define LAYER(...) (npu.reset(), layer_run((layer_case){__VA_ARGS__}))
#define SIZES .T = 17, .H = 48, .I = 40, .E = 6, .k = 3

NPU_TEST(dtypes)
{
    LAYER(.dtype = FMOE_F32, SIZES);
    LAYER(.dtype = FMOE_BF16, SIZES);
    LAYER(.dtype = FMOE_F16, SIZES);
}

NPU_TEST(shapes)
{
    LAYER(.dtype = FMOE_F32, .T = 1, .H = 1, .I = 1, .E = 2, .k = 1);
    LAYER(.dtype = FMOE_BF16, .T = 3, .H = 5, .I = 3, .E = 7, .k = 2);
    LAYER(.dtype = FMOE_F32, .T = 64, .H = 33, .I = 17, .E = 3, .k = 3);
    LAYER(.dtype = FMOE_BF16, .T = 130, .H = 64, .I = 24, .E = 128, .k = 8);
    LAYER(.dtype = FMOE_F32, .T = 9, .H = 16, .I = 8, .E = 200, .k = 4);
    LAYER(.dtype = FMOE_F32, .T = 40, .H = 16, .I = 8, .E = 8, .k = 2, .idle = 7);
}

NPU_TEST(one_expert)
{
    LAYER(.dtype = FMOE_F32, .T = 11, .H = 24, .I = 16, .E = 1, .k = 1);
    LAYER(.dtype = FMOE_BF16, .T = 11, .H = 24, .I = 16, .E = 1, .k = 1, .flags = FMOE_BIAS, .grad = FMOE_F32);
    LAYER(.dtype = FMOE_BF16, .T = 11, .H = 24, .I = 16, .E = 1, .k = 2, .form = TURNED);
}

/* The workspace asked for is enough whatever is left out, of one row too: with one expert no operator has a large one
 * of its own to hide in. */
NPU_TEST(workspace_of_one_row)
{
    for (int i = 0; i < 2 * 3 * 16; i++) {
        const int64_t T = 1 + (i >> 4) % 3;
        layer l = layer_make((layer_case){.dtype = FMOE_F32,
                                          .T = T,
                                          .H = 15,
                                          .I = 6,
                                          .E = 1,
                                          .k = 1 + (i & 1),
                                          .act = i & 2 ? FMOE_ACT_GEGLU : FMOE_ACT_SWIGLU,
                                          .flags = i < 48 ? FMOE_SKIP_NEG1 : 0});
        const fmoe_run f = run_for(l.plan, FMOE_FORWARD, T, FMOE_ASCEND, 0),
                       b = run_for(l.plan, FMOE_BACKWARD, T, FMOE_ASCEND, 0);
        CHECK_STATUS(layer_forward(&l, &f), FMOE_OK);
        if (i & 4) l.a.dweights = NULL;
        if (i & 8) l.a.dw.w1 = l.a.dw.w2 = NULL;
        CHECK_STATUS(layer_backward(&l, &b), FMOE_OK);
        layer_free(&l);
    }
}

NPU_TEST(orientation)
{
    LAYER(.dtype = FMOE_F32, SIZES, .form = TURNED);
    LAYER(.dtype = FMOE_BF16, SIZES, .form = TURNED, .grad = FMOE_F32);
}

NPU_TEST(lists)
{
    LAYER(.dtype = FMOE_BF16, SIZES, .form = LISTS);
    LAYER(.dtype = FMOE_BF16, SIZES, .form = LISTS_TURNED);
    LAYER(.dtype = FMOE_F32, SIZES, .form = LISTS);
    LAYER(.dtype = FMOE_F32, SIZES, .form = LISTS_TURNED, .gaps = true);
    LAYER(.dtype = FMOE_BF16, SIZES, .form = LISTS, .act = FMOE_ACT_GELU);
    LAYER(.dtype = FMOE_F16, SIZES, .form = LISTS, .grad = FMOE_F32, .flags = FMOE_SKIP_NEG1);
}

NPU_TEST(long_lists)
{
    LAYER(.dtype = FMOE_BF16, .T = 40, .H = 16, .I = 8, .E = 129, .k = 4, .form = LISTS);
    LAYER(.dtype = FMOE_F16, .T = 60, .H = 16, .I = 8, .E = 300, .k = 4, .form = LISTS, .grad = FMOE_F32);
    LAYER(.dtype = FMOE_F32, .T = 30, .H = 8, .I = 8, .E = 130, .k = 4, .form = LISTS);
}

NPU_TEST(activations)
{
    for (int i = 0; i < CHECK_ACTS; i++) {
        LAYER(.dtype = FMOE_F32, SIZES, .act = check_acts[i], .limit = 0.4);
        /* In 16 bits h would fall on the other side of a near limit now and then: here it is far. */
        LAYER(.dtype = FMOE_BF16, SIZES, .act = check_acts[i], .flags = check_acts[i] < 16 ? FMOE_INTERLEAVED : 0);
    }
}

NPU_TEST(bias)
{
    LAYER(.dtype = FMOE_F32, SIZES, .flags = FMOE_BIAS);
    LAYER(.dtype = FMOE_BF16, SIZES, .flags = FMOE_BIAS, .grad = FMOE_F32);
    LAYER(.dtype = FMOE_BF16, SIZES, .flags = FMOE_BIAS | FMOE_INTERLEAVED, .act = FMOE_ACT_SWIGLU_OAI);
    LAYER(.dtype = FMOE_F16, SIZES, .flags = FMOE_BIAS, .backward = FMOE_ACCUMULATE, .grad = FMOE_F32);
}

NPU_TEST(recompute)
{
    LAYER(.dtype = FMOE_F32, SIZES, .flags = FMOE_RECOMPUTE);
    LAYER(.dtype = FMOE_BF16, SIZES, .flags = FMOE_RECOMPUTE | FMOE_BIAS);
    LAYER(.dtype = FMOE_BF16, SIZES, .flags = FMOE_RECOMPUTE | FMOE_SKIP_E, .form = LISTS);
}

NPU_TEST(lean)
{
    setenv("FMOE_ASCEND_KEEP", "lean", 1);
    LAYER(.dtype = FMOE_F32, SIZES);
    LAYER(.dtype = FMOE_BF16, SIZES, .flags = FMOE_SKIP_NEG1, .p = FMOE_F32);
    LAYER(.dtype = FMOE_F16, SIZES, .form = LISTS);
    unsetenv("FMOE_ASCEND_KEEP");
}

NPU_TEST(skip_marks)
{
    LAYER(.dtype = FMOE_F32, SIZES, .flags = FMOE_SKIP_NEG1);
    LAYER(.dtype = FMOE_F32, SIZES, .flags = FMOE_SKIP_E, .ids = I32);
    LAYER(.dtype = FMOE_BF16, SIZES, .flags = FMOE_SKIP_NEG1 | FMOE_SKIP_E | FMOE_BIAS, .p = FMOE_F32, .gaps = true);
    LAYER(.dtype = FMOE_BF16, .T = 2, .H = 8, .I = 8, .E = 4, .k = 1, .flags = FMOE_SKIP_NEG1);
}

NPU_TEST(types_of_arguments)
{
    LAYER(.dtype = FMOE_BF16, SIZES, .ids = I32);
    LAYER(.dtype = FMOE_BF16, SIZES, .p = FMOE_F32);
    LAYER(.dtype = FMOE_BF16, SIZES, .p = FMOE_F32, .dp = FMOE_BF16, .grad = FMOE_F32);
    LAYER(.dtype = FMOE_F16, SIZES, .dp = FMOE_F32);
    LAYER(.dtype = FMOE_BF16, SIZES, .gaps = true);
    LAYER(.dtype = FMOE_F32, SIZES, .gaps = true, .ids = I32, .form = TURNED);
}

NPU_TEST(adding)
{
    LAYER(.dtype = FMOE_BF16, SIZES, .forward = FMOE_ADD_OUT, .backward = FMOE_ADD_DX);
    LAYER(.dtype = FMOE_BF16, SIZES, .backward = FMOE_ACCUMULATE | FMOE_ADD_DX, .grad = FMOE_F32);
    LAYER(.dtype = FMOE_F16, SIZES, .backward = FMOE_ACCUMULATE, .grad = FMOE_F32, .form = TURNED);
    LAYER(.dtype = FMOE_F32, SIZES, .forward = FMOE_ADD_OUT, .backward = FMOE_ADD_DX, .gaps = true);
}

/* CANN adds into f32 only: here through scratch. */
NPU_TEST(adding_in_the_plans_dtype)
{
    LAYER(.dtype = FMOE_F32, SIZES, .backward = FMOE_ACCUMULATE, .flags = FMOE_BIAS);
    LAYER(.dtype = FMOE_BF16, SIZES, .backward = FMOE_ACCUMULATE);
    LAYER(.dtype = FMOE_BF16, SIZES, .backward = FMOE_ACCUMULATE, .form = TURNED);
    LAYER(.dtype = FMOE_F16, SIZES, .backward = FMOE_ACCUMULATE, .form = LISTS, .apart = true);
}

NPU_TEST(gradients_apart)
{
    LAYER(.dtype = FMOE_F32, SIZES, .form = LISTS, .apart = true);
    LAYER(.dtype = FMOE_BF16, SIZES, .form = LISTS_TURNED, .apart = true);
    LAYER(.dtype = FMOE_BF16, SIZES, .form = LISTS, .apart = true, .grad = FMOE_F32);
    LAYER(.dtype = FMOE_BF16, SIZES, .form = LISTS, .apart = true, .grad = FMOE_F32, .backward = FMOE_ACCUMULATE);
    LAYER(.dtype = FMOE_F16, .T = 30, .H = 16, .I = 8, .E = 150, .k = 4, .form = LISTS, .apart = true);
}

/* Gradients larger than the scratch for them: a block of rows at a time. */
NPU_TEST(gradients_in_blocks)
{
    LAYER(.dtype = FMOE_BF16, .T = 4, .H = 512, .I = 280, .E = 64, .k = 2, .form = LISTS, .apart = true, .idle = 54);
    LAYER(.dtype = FMOE_BF16, .T = 4, .H = 512, .I = 140, .E = 64, .k = 2, .backward = FMOE_ACCUMULATE, .idle = 54);
}

NPU_TEST(adapters)
{
    LAYER(.dtype = FMOE_F32, SIZES, .rank1 = 4, .rank2 = 3);
    LAYER(.dtype = FMOE_BF16, SIZES, .rank1 = 16, .rank2 = 16, .p = FMOE_F32);
    LAYER(.dtype = FMOE_F16, SIZES, .rank1 = 8, .flags = FMOE_BIAS | FMOE_SKIP_E);
    LAYER(.dtype = FMOE_F32, SIZES, .rank2 = 5, .form = TURNED, .flags = FMOE_RECOMPUTE | FMOE_SKIP_NEG1);
    LAYER(.dtype = FMOE_F32, SIZES, .rank1 = 2, .rank2 = 2, .flags = FMOE_INTERLEAVED, .backward = FMOE_ACCUMULATE);
    LAYER(.dtype = FMOE_F32, .T = 40, .H = 16, .I = 8, .E = 8, .k = 2, .idle = 7, .rank1 = 1, .rank2 = 33);
    LAYER(.dtype = FMOE_F32, .T = 0, .H = 16, .I = 8, .E = 4, .k = 2, .rank1 = 2, .rank2 = 2);
}

/* W frozen, and one gradient of the rest at a time: what it needs is made for it alone. */
NPU_TEST(adapters_single_gradients)
{
    for (int which = 0; which < 6; which++) {
        layer l = layer_make((layer_case){.dtype = FMOE_F32, SIZES, .rank1 = 4, .rank2 = 3});
        fmoe_weights *d = &l.a.dw;
        const fmoe_tensor **all[6] = {&l.a.dx, &l.a.dweights, &d->lora_a1, &d->lora_b1, &d->lora_a2, &d->lora_b2};
        d->w1 = d->w2 = NULL;
        for (int i = 0; i < 6; i++)
            if (i != which) *all[i] = NULL;
        const fmoe_run f = run_for(l.plan, FMOE_FORWARD, 17, FMOE_ASCEND, 0),
                       b = run_for(l.plan, FMOE_BACKWARD, 17, FMOE_ASCEND, 0);
        CHECK_STATUS(layer_forward(&l, &f), FMOE_OK);
        CHECK_STATUS(layer_backward(&l, &b), FMOE_OK);
        layer_reference(&l);
        layer_compare(&l);
        layer_free(&l);
    }
}

/* Beside lists (transformers 4), with f32 factors and f32 gradients, added to out and dx. */
NPU_TEST(adapters_beside_anything)
{
    LAYER(.dtype = FMOE_F32, SIZES, .rank1 = 4, .rank2 = 2, .form = LISTS);
    LAYER(.dtype = FMOE_BF16, SIZES, .rank1 = 8, .rank2 = 8, .form = LISTS, .factors = FMOE_F32);
    LAYER(.dtype = FMOE_BF16, SIZES, .rank1 = 8, .rank2 = 8, .form = LISTS_TURNED, .apart = true,
          .flags = FMOE_SKIP_NEG1);
    LAYER(.dtype = FMOE_BF16, SIZES, .rank1 = 8, .factors = FMOE_F32, .flags = FMOE_BIAS | FMOE_SKIP_E);
    LAYER(.dtype = FMOE_F16, SIZES, .rank2 = 4, .factors = FMOE_F32, .form = TURNED, .backward = FMOE_ACCUMULATE);
    LAYER(.dtype = FMOE_F32, SIZES, .rank1 = 4, .rank2 = 4, .forward = FMOE_ADD_OUT, .backward = FMOE_ADD_DX);
    LAYER(.dtype = FMOE_BF16, .T = 9, .H = 16, .I = 8, .E = 140, .k = 2, .form = LISTS, .rank1 = 2, .rank2 = 2);
    LAYER(.dtype = FMOE_BF16, .T = 9, .H = 16, .I = 8, .E = 1, .k = 1, .rank1 = 2, .rank2 = 2, .factors = FMOE_F32);
    setenv("FMOE_ASCEND_KEEP", "lean", 1);
    LAYER(.dtype = FMOE_BF16, SIZES, .rank1 = 8, .rank2 = 8, .factors = FMOE_F32);
    unsetenv("FMOE_ASCEND_KEEP");
}

NPU_TEST(no_tokens)
{
    LAYER(.dtype = FMOE_BF16, .T = 0, .H = 16, .I = 8, .E = 4, .k = 2);
    LAYER(.dtype = FMOE_F32, .T = 0, .H = 16, .I = 8, .E = 4, .k = 2, .flags = FMOE_BIAS, .form = TURNED);
    LAYER(.dtype = FMOE_F32, .T = 0, .H = 16, .I = 8, .E = 4, .k = 2, .form = LISTS);
}

/* Every slot skipped: outputs and gradients are exactly zero, even where a weight is NaN. */
NPU_TEST(all_skipped)
{
    layer l = layer_make((layer_case){.dtype = FMOE_F32, SIZES, .flags = FMOE_SKIP_NEG1});
    fmoe_tensor *ids = tensor_fill(tensor_new(I64, SHAPE(17, 3)), -1),
                *p = tensor_fill(tensor_new(FMOE_F32, SHAPE(17, 3)), NAN);
    l.a.ids = to_npu(ids);
    l.a.weights = to_npu(p);
    const fmoe_run f = run_for(l.plan, FMOE_FORWARD, 17, FMOE_ASCEND, 0),
                   b = run_for(l.plan, FMOE_BACKWARD, 17, FMOE_ASCEND, 0);
    CHECK_STATUS(layer_forward(&l, &f), FMOE_OK);
    CHECK_STATUS(layer_backward(&l, &b), FMOE_OK);
    const fmoe_tensor *zero[] = {l.a.out, l.a.dx, l.a.dweights, l.a.dw.w1, l.a.dw.w2};
    for (int i = 0; i < 5; i++) CHECK_EQUAL(zero[i], tensor_fill(from_npu(zero[i]), 0));
    layer_free(&l);
}

/* Only what is asked for is computed. */
NPU_TEST(single_gradients)
{
    for (int which = 0; which < 4; which++)
        for (int keep = 0; keep < 2; keep++) {
            setenv("FMOE_ASCEND_KEEP", keep ? "lean" : "all", 1);
            layer l = layer_make((layer_case){.dtype = FMOE_F32, SIZES});
            const fmoe_run f = run_for(l.plan, FMOE_FORWARD, 17, FMOE_ASCEND, 0),
                           b = run_for(l.plan, FMOE_BACKWARD, 17, FMOE_ASCEND, 0);
            if (which != 0) l.a.dx = NULL;
            if (which != 1) l.a.dweights = NULL;
            if (which != 2) l.a.dw.w1 = NULL;
            if (which != 3) l.a.dw.w2 = NULL;
            CHECK_STATUS(layer_forward(&l, &f), FMOE_OK);
            CHECK_STATUS(layer_backward(&l, &b), FMOE_OK);
            layer_reference(&l);
            const double bound = 1e-5;
            if (which == 0) CHECK_CLOSE(l.a.dx, l.r.dx, bound);
            if (which == 1) CHECK_CLOSE(l.a.dweights, l.r.dweights, bound);
            if (which == 2) CHECK_CLOSE(l.a.dw.w1, l.r.dw.w1, bound);
            if (which == 3) CHECK_CLOSE(l.a.dw.w2, l.r.dw.w2, bound);
            layer_free(&l);
        }
    unsetenv("FMOE_ASCEND_KEEP");
}

NPU_TEST(inference)
{
    layer l = layer_make((layer_case){.dtype = FMOE_BF16, SIZES});
    const fmoe_run f = run_for(l.plan, FMOE_FORWARD, 17, FMOE_ASCEND, 0);
    l.a.saved = NULL;
    l.a.saved_bytes = 0;
    CHECK_STATUS(layer_forward(&l, &f), FMOE_OK);
    layer_reference(&l);
    CHECK_CLOSE(l.a.out, l.r.out, 3 * 0x1p-8);
    layer_free(&l);
}
