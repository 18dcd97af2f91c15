/* SPDX-License-Identifier: Apache-2.0
 * test_ascend_vendor.c - rules that the vendor's public sources show and its documentation does not: the operator
 * cache, torch_npu's hash mode, what passes for a transposed view, what runs on the AI CPU, calls that are several
 * launches. */
#include "layer.h"

static bool has(const char *operator) /* in this CANN, on this chip */
{
    const char *path = getenv("FMOE_ASCEND_PATH"), *chip = getenv("FMOE_SIM_SOC");
    if (chip && strncmp(chip, "Ascend950", 9) == 0 && strstr(operator, "Backward")) return false;
    return !strstr(path, "cann81") && (!strstr(path, "cann85") || !*operator);
}

#define SMALL .T = 5, .H = 16, .I = 8, .E = 4, .k = 2

/* ---- The operator cache ---- */

/* Sizes asked, a queue that refuses, a workspace that is too small: executors that were made and not run. What follows
 * runs all the same. */
NPU_TEST(no_cache_entry_without_tasks)
{
    static const layer_case cases[] = {{.dtype = FMOE_BF16, SMALL},
                                       {.dtype = FMOE_BF16, SMALL, .grad = FMOE_F32, .flags = FMOE_BIAS},
                                       {.dtype = FMOE_F32, SMALL, .act = FMOE_ACT_SWIGLU_OAI, .flags = FMOE_SKIP_NEG1}};
    for (int i = 0; i < 3; i++) {
        layer l = layer_make(cases[i]);
        const fmoe_run f = run_for(l.plan, FMOE_FORWARD, 5, FMOE_ASCEND, 0),
                       b = run_for(l.plan, FMOE_BACKWARD, 5, FMOE_ASCEND, 0);
        fmoe_run small = f;
        small.workspace_bytes /= 2;
        CHECK_STATUS(layer_forward(&l, &small), FMOE_ERR_WORKSPACE);
        npu.sync(npu.main_stream);
        CHECK_STATUS(layer_forward(&l, &f), FMOE_OK);
        CHECK_STATUS(layer_backward(&l, &b), FMOE_OK);
        CHECK_EQ(npu.get("hollow_launches"), 0);
        layer_reference(&l);
        layer_compare(&l);
        layer_free(&l);
    }
}

/* torch_npu's hash mode, left on by a call of its own that threw: nothing of ours is stored under its name. */
NPU_TEST(torch_hash_mode_is_left)
{
    void (*init)(void), (*key)(uint64_t);
    *(void **)&init = dlsym(RTLD_DEFAULT, "InitPTACacheThreadLocal");
    *(void **)&key = dlsym(RTLD_DEFAULT, "SetPTAHashKey");
    layer l = layer_make((layer_case){.dtype = FMOE_BF16, SMALL});
    REQUIRE(init && key);
    init();
    key(4711);
    const fmoe_run f = run_for(l.plan, FMOE_FORWARD, 5, FMOE_ASCEND, 0);
    CHECK_EQ(npu.get("pta_stores"), 0);
    init();
    key(4711);
    CHECK_STATUS(layer_forward(&l, &f), FMOE_OK);
    CHECK_EQ(npu.get("pta_stores"), 0);
    layer_free(&l);
}

/* ---- Transposed or not ---- */

typedef struct gmm_case {
    int64_t E, R, K, N;
} gmm_case;

/* One row whose strides say nothing: forward, dx and dw, with x and dy as {1,1} and as regular ones. */
NPU_TEST(one_row)
{
    static const gmm_case cases[] = {{2, 1, 5, 3}, {3, 1, 1, 4}, {2, 1, 6, 1}, {2, 1, 1, 1}};
    for (int i = 0; i < 4; i++) {
        const gmm_case c = cases[i];
        const int64_t odd[2] = {1, 1};
        fmoe_plan plan = make_plan(
            (fmoe_desc){.op = FMOE_OP_GROUPED_MATMUL, .dtype = FMOE_BF16, .E = c.E, .K = c.K, .N = c.N}, FMOE_ASCEND);
        fmoe_tensor *x = tensor_random(tensor_new(FMOE_BF16, SHAPE(1, c.K)), 1),
                    *dy = tensor_random(tensor_new(FMOE_BF16, SHAPE(1, c.N)), 1),
                    *w = tensor_random(tensor_new(FMOE_BF16, SHAPE(c.E, c.K, c.N)), 1),
                    *sizes = tensor_fill(tensor_new(I64, SHAPE(c.E)), 0);
        tensor_set(sizes, c.E - 1, 1);
        fmoe_tensor *first[3] = {NULL};
        for (int irregular = 0; irregular < 2; irregular++) {
            fmoe_gmm_args a = {.size = sizeof a,
                               .x = to_npu(x),
                               .w = to_npu(w),
                               .sizes = to_npu(sizes),
                               .y = to_npu(tensor_new(FMOE_BF16, SHAPE(1, c.N)))};
            if (irregular && c.K > 1) ((fmoe_tensor *)a.x)->strides = (int64_t *)odd;
            const fmoe_run f = run_for(plan, FMOE_FORWARD, 1, FMOE_ASCEND, 0),
                           b = run_for(plan, FMOE_BACKWARD, 1, FMOE_ASCEND, 0);
            CHECK_STATUS(fmoe_grouped_matmul_forward(plan, &a, &f), FMOE_OK);
            fmoe_gmm_args back = {.size = sizeof back,
                                  .x = a.x,
                                  .w = a.w,
                                  .sizes = a.sizes,
                                  .dy = to_npu(dy),
                                  .dx = to_npu(tensor_new(FMOE_BF16, SHAPE(1, c.K))),
                                  .dw = to_npu(tensor_new(FMOE_BF16, SHAPE(c.E, c.K, c.N)))};
            if (irregular && c.N > 1) ((fmoe_tensor *)back.dy)->strides = (int64_t *)odd;
            CHECK_STATUS(fmoe_grouped_matmul_backward(plan, &back, &b), FMOE_OK);
            const fmoe_tensor *got[3] = {a.y, back.dx, back.dw};
            for (int j = 0; j < 3; j++) {
                if (!irregular) first[j] = from_npu(got[j]);
                else CHECK_EQUAL(got[j], first[j]);
            }
        }
        fmoe_plan_destroy(&plan);
    }
}

/* Lists whose members have one row, one column or both, stored either way, in every order. */
NPU_TEST(thin_members)
{
    for (int round = 0; round < 60; round++) {
        const int64_t E = 2 + test_below(4);
        fmoe_plan plan = make_plan((fmoe_desc){.op = FMOE_OP_GROUPED_MATMUL, .dtype = FMOE_F16, .E = E}, FMOE_ASCEND),
                  ref = make_plan((fmoe_desc){.op = FMOE_OP_GROUPED_MATMUL, .dtype = FMOE_F64, .E = E}, FMOE_CPU);
        fmoe_tensor x[8], w[8], y[8], rx[8], rw[8], ry[8], *back[8];
        for (int64_t e = 0; e < E; e++) {
            const int64_t m = 1 + test_below(3), K = 1 + test_below(2) * 4, N = 1 + test_below(2) * 3;
            const int64_t turned[2] = {1, K};
            fmoe_tensor *tx = tensor_random(tensor_new(FMOE_F16, SHAPE(m, K)), 1),
                        *tw = tensor_random(test_below(2) ? tensor_new(FMOE_F16, SHAPE(K, N))
                                                          : tensor_strided(FMOE_F16, SHAPE(K, N), turned),
                                            1);
            x[e] = *to_npu(tx), w[e] = *to_npu(tw);
            y[e] = *(back[e] = to_npu(tensor_new(FMOE_F16, SHAPE(m, N))));
            rx[e] = *wide(tx), rw[e] = *wide(tw), ry[e] = *tensor_new(FMOE_F64, SHAPE(m, N));
        }
        const fmoe_gmm_args a = {.size = sizeof a, .list = 1, .x = x, .w = w, .y = y},
                            r = {.size = sizeof r, .list = 1, .x = rx, .w = rw, .y = ry};
        const fmoe_run f = run_for(plan, FMOE_FORWARD, 4, FMOE_ASCEND, 0),
                       g = run_for(ref, FMOE_FORWARD, 4, FMOE_CPU, 0);
        CHECK_STATUS(fmoe_grouped_matmul_forward(plan, &a, &f), FMOE_OK);
        CHECK_STATUS(fmoe_grouped_matmul_forward(ref, &r, &g), FMOE_OK);
        for (int64_t e = 0; e < E; e++) CHECK_CLOSE(back[e], &ry[e], 1e-3);
        fmoe_plan_destroy(&plan);
        fmoe_plan_destroy(&ref);
    }
}

/* ---- The AI CPU, and calls that are several launches ---- */

static void run_counted(layer_case c)
{
    npu.reset();
    layer_run(c);
    CHECK_EQ(npu.get("aicpu"), 0);
    CHECK_EQ(npu.get("hidden_rounds"), 0);
    CHECK_EQ(npu.get("undocumented"), 0);
}

NPU_TEST(nothing_on_the_ai_cpu)
{
    run_counted((layer_case){.dtype = FMOE_BF16, SMALL, .grad = FMOE_F32});
    run_counted((layer_case){
        .dtype = FMOE_BF16, SMALL, .grad = FMOE_F32, .flags = FMOE_BIAS, .p = FMOE_F32, .backward = FMOE_ACCUMULATE});
    run_counted((layer_case){.dtype = FMOE_BF16, SMALL, .flags = FMOE_SKIP_NEG1});
    run_counted((layer_case){.dtype = FMOE_BF16, SMALL, .flags = FMOE_SKIP_NEG1 | FMOE_SKIP_E, .grad = FMOE_F32});
    run_counted((layer_case){.dtype = FMOE_F32, SMALL, .flags = FMOE_SKIP_E, .act = FMOE_ACT_SWIGLU_OAI});
    run_counted((layer_case){.dtype = FMOE_BF16, .T = 9, .H = 16, .I = 8, .E = 130, .k = 2, .form = LISTS});
    run_counted((layer_case){.dtype = FMOE_BF16, .T = 9, .H = 16, .I = 8, .E = 1, .k = 1, .grad = FMOE_F32});
}

/* Gradients of lists that are not adjacent, and lists in f32: pieces of 32 at most. */
NPU_TEST(no_hidden_rounds)
{
    run_counted(
        (layer_case){.dtype = FMOE_BF16, .T = 9, .H = 16, .I = 8, .E = 70, .k = 2, .form = LISTS, .apart = true});
    run_counted(
        (layer_case){.dtype = FMOE_F32, .T = 9, .H = 16, .I = 8, .E = 70, .k = 2, .form = LISTS, .apart = true});
    run_counted((layer_case){.dtype = FMOE_F32, .T = 9, .H = 16, .I = 8, .E = 70, .k = 2, .form = LISTS_TURNED});
}

/* Routing of one expert, one slot and every rule: 0 on the AI CPU, and no optional output that is NULL. */
NPU_TEST(routing)
{
    npu.set("no_null_outputs", 1);
    for (int round = 0; round < 12; round++) {
        const int64_t T = 1 + test_below(3), E = round % 3 == 0 ? 1 : 8, k = E == 1 ? 1 : 2;
        const fmoe_desc d = {.op = FMOE_OP_ROUTE,
                             .dtype = FMOE_F32,
                             .E = E,
                             .k = k,
                             .route = {.score = round % 4, .renormalize = round % 2}};
        fmoe_plan plan = make_plan(d, FMOE_ASCEND);
        fmoe_route_args a = {.size = sizeof a,
                             .logits = to_npu(tensor_random(tensor_new(FMOE_F32, SHAPE(T, E)), 1)),
                             .ids = to_npu(tensor_new(I64, SHAPE(T, k))),
                             .weights = to_npu(tensor_new(FMOE_F32, SHAPE(T, k)))};
        const fmoe_run f = run_for(plan, FMOE_FORWARD, T, FMOE_ASCEND, 0),
                       b = run_for(plan, FMOE_BACKWARD, T, FMOE_ASCEND, 0);
        CHECK_STATUS(fmoe_route_forward(plan, &a, &f), FMOE_OK);
        a.weights = NULL;
        a.dweights = to_npu(tensor_random(tensor_new(FMOE_F32, SHAPE(T, k)), 1));
        a.dlogits = to_npu(tensor_new(FMOE_F32, SHAPE(T, E)));
        CHECK_STATUS(fmoe_route_backward(plan, &a, &b), FMOE_OK);
        CHECK_EQ(npu.get("aicpu"), 0);
        fmoe_plan_destroy(&plan);
    }
    npu.sync(npu.main_stream);
    npu.set("no_null_outputs", 0);
}

NPU_TEST(permutation_of_one_slot)
{
    fmoe_plan plan = make_plan(
        (fmoe_desc){.op = FMOE_OP_PERMUTE, .dtype = FMOE_F32, .H = 4, .E = 3, .k = 1, .flags = FMOE_SKIP_NEG1},
        FMOE_ASCEND);
    for (int id = -1; id < 3; id++) {
        fmoe_tensor *x = tensor_random(tensor_new(FMOE_F32, SHAPE(1, 4)), 1);
        fmoe_permute_args a = {.size = sizeof a,
                               .x = to_npu(x),
                               .ids = to_npu(tensor_fill(tensor_new(I64, SHAPE(1, 1)), id)),
                               .xp = to_npu(tensor_new(FMOE_F32, SHAPE(1, 4))),
                               .map = to_npu(tensor_new(I32, SHAPE(1))),
                               .counts = to_npu(tensor_new(I64, SHAPE(3)))};
        const fmoe_run f = run_for(plan, FMOE_FORWARD, 1, FMOE_ASCEND, 0),
                       b = run_for(plan, FMOE_BACKWARD, 1, FMOE_ASCEND, 0);
        CHECK_STATUS(fmoe_permute_forward(plan, &a, &f), FMOE_OK);
        CHECK_EQUAL(a.xp, id < 0 ? tensor_fill(tensor_new(FMOE_F32, SHAPE(1, 4)), 0) : x);
        a.x = to_npu(tensor_new(FMOE_F32, SHAPE(1, 4)));
        a.ids = a.counts = NULL;
        CHECK_STATUS(fmoe_permute_backward(plan, &a, &b), FMOE_OK);
        CHECK_EQUAL(a.x, id < 0 ? tensor_fill(tensor_new(FMOE_F32, SHAPE(1, 4)), 0) : x);
    }
    CHECK_EQ(npu.get("aicpu"), 0);
    fmoe_plan_destroy(&plan);
}

/* Sigmoid scores, normalised: the backward by one operator where it is, not on 950. */
NPU_TEST(backward_of_sigmoid_routing)
{
    const fmoe_desc d = {.op = FMOE_OP_ROUTE,
                         .dtype = FMOE_F32,
                         .E = 8,
                         .k = 2,
                         .route = {.score = FMOE_SCORE_SIGMOID, .renormalize = 1}};
    fmoe_plan plan = make_plan(d, FMOE_ASCEND);
    const fmoe_route_args a = {.size = sizeof a,
                               .logits = to_npu(tensor_random(tensor_new(FMOE_F32, SHAPE(5, 8)), 1)),
                               .ids = to_npu(tensor_fill(tensor_new(I64, SHAPE(5, 2)), 3)),
                               .dweights = to_npu(tensor_random(tensor_new(FMOE_F32, SHAPE(5, 2)), 1)),
                               .dlogits = to_npu(tensor_new(FMOE_F32, SHAPE(5, 8)))};
    const fmoe_run b = run_for(plan, FMOE_BACKWARD, 5, FMOE_ASCEND, 0);
    npu.reset();
    CHECK_STATUS(fmoe_route_backward(plan, &a, &b), FMOE_OK);
    CHECK_EQ(npu.get("launches"), has("Backward") ? 3 : 12);
    fmoe_plan_destroy(&plan);
}

/* ---- Newer operators: fewer launches where they are, the same results ---- */

NPU_TEST(launches_of_newer_operators)
{
    const struct {
        layer_case c;
        int64_t forward, backward, old_forward, old_backward; /* old: CANN 8.5 */
    } all[] = {
        {{.dtype = FMOE_BF16, SMALL, .act = FMOE_ACT_SWIGLU_OAI, .flags = FMOE_BIAS | FMOE_INTERLEAVED}, 8, 10, 17, 33},
        {{.dtype = FMOE_BF16, SMALL, .act = FMOE_ACT_SWIGLU_CLAMP}, 6, 7, 12, 23},
        {{.dtype = FMOE_BF16, SMALL, .grad = FMOE_F32}, 6, 9, 6, 12}, /* two of them fill with zeros */
    };
    const int extra = has("") ? 0 : 1; /* CANN 8.1 casts the counts */
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        layer l = layer_make(all[i].c);
        const fmoe_run f = run_for(l.plan, FMOE_FORWARD, 5, FMOE_ASCEND, 0),
                       b = run_for(l.plan, FMOE_BACKWARD, 5, FMOE_ASCEND, 0);
        npu.reset();
        CHECK_STATUS(layer_forward(&l, &f), FMOE_OK);
        const int64_t forward = npu.get("launches");
        CHECK_STATUS(layer_backward(&l, &b), FMOE_OK);
        const int64_t backward = npu.get("launches") - forward;
        CHECK_EQ(forward, has("Clipped") ? all[i].forward : all[i].old_forward + extra);
        CHECK_EQ(backward, has("Clipped") ? all[i].backward : all[i].old_backward);
        layer_reference(&l);
        layer_compare(&l);
        layer_free(&l);
    }
}
