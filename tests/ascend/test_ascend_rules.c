/* SPDX-License-Identifier: Apache-2.0
 * test_ascend_rules.c - what the backend promises beside numbers: launches, bytes, no synchronisation, everything
 * released whatever fails, results that do not depend on when the device gets to work, clear refusals. */
#include <pthread.h>

#include "layer.h"

static bool newest(void) { return !strstr(getenv("FMOE_ASCEND_PATH"), "cann81"); }
static bool adds_by_counts(void) { return newest() && !strstr(getenv("FMOE_ASCEND_PATH"), "cann85"); }

/* ---- Launches and bytes ---- */

typedef struct {
    int64_t forward, backward, read, written, saved;
} counts;

static counts count_layer(layer_case c)
{
    counts n = {0};
    layer l = layer_make(c);
    const fmoe_run f = run_for(l.plan, FMOE_FORWARD, c.T, FMOE_ASCEND, 0),
                   b = run_for(l.plan, FMOE_BACKWARD, c.T, FMOE_ASCEND, c.backward);
    npu.reset();
    CHECK_STATUS(layer_forward(&l, &f), FMOE_OK);
    n.forward = npu.get("launches");
    CHECK_STATUS(layer_backward(&l, &b), FMOE_OK);
    n.backward = npu.get("launches") - n.forward;
    n.read = npu.get("bytes_read");
    n.written = npu.get("bytes_written");
    n.saved = (int64_t)l.a.saved_bytes;
    CHECK_EQ(npu.get("syncs"), 0);
    CHECK_EQ(npu.get("copies_h2d") + npu.get("copies_d2h") + npu.get("copies_d2d"), 0);
    CHECK_EQ(npu.get("hidden_copies"), 0);
    layer_free(&l);
    return n;
}

#define QWEN .T = 64, .H = 256, .I = 96, .E = 128, .k = 8 /* Qwen3-30B-A3B, H and I divided by 8 */

NPU_TEST(launches)
{
    const int extra = newest() ? 0 : 1; /* CANN 8.1: counts are cast to int64 */
    counts n = count_layer((layer_case){.dtype = FMOE_BF16, QWEN});
    CHECK_EQ(n.forward, 6 + extra);
    CHECK_EQ(n.backward, 7);
    n = count_layer((layer_case){.dtype = FMOE_BF16, QWEN, .ids = I32});
    CHECK_EQ(n.forward, 5 + extra);
    CHECK_EQ(n.backward, 7);
    n = count_layer((layer_case){.dtype = FMOE_BF16, QWEN, .p = FMOE_F32}); /* f32 routing weights cost nothing */
    CHECK_EQ(n.forward, 6 + extra);
    CHECK_EQ(n.backward, 7 + 2 * extra); /* before 8.5 two casts */
    n = count_layer((layer_case){.dtype = FMOE_BF16,
                                 QWEN,
                                 .grad = FMOE_F32,
                                 .backward = FMOE_ACCUMULATE}); /* running sums, in int32, where counts will not do */
    CHECK_EQ(n.backward, adds_by_counts() ? 7 : 10);
    n = count_layer((layer_case){.dtype = FMOE_BF16, QWEN, .form = TURNED});
    CHECK_EQ(n.forward, 6 + extra);
    CHECK_EQ(n.backward, 7);
    n = count_layer(
        (layer_case){.dtype = FMOE_BF16, QWEN, .form = LISTS}); /* gates, ups and a join instead of one product */
    CHECK_EQ(n.forward, 8 + extra);
    CHECK_EQ(n.backward, 12);
}

/* Lean: at most six launches more, and at most 45 % of the (2H + 3I) * n elements LLaMA-Factory 0.9.5 keeps, x counted.
 */
NPU_TEST(lean_memory)
{
    setenv("FMOE_ASCEND_KEEP", "lean", 1);
    const counts n = count_layer((layer_case){.dtype = FMOE_BF16, QWEN});
    const int64_t rows = 64 * 8, theirs = (2 * 256 + 3 * 96) * rows * 2, ours = n.saved + 64 * 256 * 2;
    printf("  lean: %" PRId64 " launches backward, %.1f %% of (2H + 3I) n kept\n", n.backward,
           100.0 * (double)ours / (double)theirs);
    CHECK(n.backward <= 13);
    CHECK(100 * ours <= 45 * theirs);
    /* The plan's own word counts more than the variable. */
    const counts all = count_layer((layer_case){.dtype = FMOE_BF16, QWEN, .flags = FMOE_KEEP_ALL});
    unsetenv("FMOE_ASCEND_KEEP");
    const counts lean = count_layer((layer_case){.dtype = FMOE_BF16, QWEN, .flags = FMOE_KEEP_LEAN}),
                 plain = count_layer((layer_case){.dtype = FMOE_BF16, QWEN});
    CHECK_EQ(lean.saved, n.saved);
    CHECK_EQ(lean.backward, n.backward);
    CHECK_EQ(all.saved, plain.saved);
    CHECK_EQ(all.backward, plain.backward);
    fmoe_plan plan = 0;
    const fmoe_desc both = {.size = sizeof both,
                            .op = FMOE_OP_EXPERTS,
                            .dtype = FMOE_BF16,
                            .H = 8,
                            .I = 8,
                            .E = 4,
                            .k = 2,
                            .flags = FMOE_KEEP_ALL | FMOE_KEEP_LEAN};
    CHECK_STATUS(fmoe_plan_create(&plan, &both), FMOE_ERR_ARG);
    CHECK_ERROR_HAS("FMOE_KEEP_ALL and FMOE_KEEP_LEAN");
}

/* Bytes of forward and backward at Qwen3-30B-A3B's own sizes, T = 512: counted, not computed. What LLaMA-Factory 0.9.5
 * moves is the same chain plus its casts and counts, and every weight gradient read and written once more. */
NPU_TEST(bytes)
{
    const int64_t T = 512, H = 2048, I = 768, E = 128, k = 8, n = T * k, es = 2;
    npu.set("count_only", 1);
    fmoe_desc d = {.op = FMOE_OP_EXPERTS, .dtype = FMOE_BF16, .H = H, .I = I, .E = E, .k = k};
    fmoe_plan plan = make_plan(d, FMOE_ASCEND);
    struct {
        int64_t shape[3];
        int ndim, dtype;
    } want[] = {{{T, H, 0}, 2, FMOE_BF16},     {{T, k, 0}, 2, I64},       {{T, k, 0}, 2, FMOE_BF16},
                {{E, 2 * I, H}, 3, FMOE_BF16}, {{E, H, I}, 3, FMOE_BF16}, {{T, H, 0}, 2, FMOE_BF16},
                {{T, H, 0}, 2, FMOE_BF16},     {{T, H, 0}, 2, FMOE_BF16}, {{T, k, 0}, 2, FMOE_BF16},
                {{E, 2 * I, H}, 3, FMOE_BF16}, {{E, H, I}, 3, FMOE_BF16}};
    fmoe_tensor *t[11];
    for (int i = 0; i < 11; i++) {
        t[i] = tensor_over(NULL, want[i].dtype, want[i].ndim, want[i].shape, NULL);
        t[i]->device = (fmoe_device){FMOE_ASCEND, 0};
        t[i]->data = npu_alloc(tensor_span(t[i]));
    }
    fmoe_experts_args a = {
        .size = sizeof a, .x = t[0], .ids = t[1], .weights = t[2], .w = {.w1 = t[3], .w2 = t[4]}, .out = t[5]};
    CHECK_STATUS(fmoe_saved_bytes(plan, T, &a.saved_bytes), FMOE_OK);
    char *at = npu_alloc(a.saved_bytes + 255);
    a.saved = at + (256 - (uintptr_t)at % 256) % 256;
    const fmoe_run f = run_for(plan, FMOE_FORWARD, T, FMOE_ASCEND, 0),
                   b = run_for(plan, FMOE_BACKWARD, T, FMOE_ASCEND, 0);
    npu.reset();
    CHECK_STATUS(fmoe_experts_forward(plan, &a, &f), FMOE_OK);
    a.out = NULL;
    a.dout = t[6];
    a.dx = t[7];
    a.dweights = t[8];
    a.dw = (fmoe_weights){.w1 = t[9], .w2 = t[10]};
    CHECK_STATUS(fmoe_experts_backward(plan, &a, &b), FMOE_OK);
    const int64_t ours = npu.get("bytes_read") + npu.get("bytes_written");
    const int64_t again = 2 * 3 * E * I * H * es, theirs = ours + again; /* their casts and histogram are left out */
    printf("  forward + backward: %.0f MB here, %.0f MB with the weight gradients turned afterwards: %.1f %%; kept "
           "%.0f MB\n",
           1e-6 * (double)ours, 1e-6 * (double)theirs, 100.0 * (double)ours / (double)theirs,
           1e-6 * (double)a.saved_bytes);
    CHECK(100 * ours <= 65 * theirs);
    CHECK(a.saved_bytes <= (size_t)((2 * H + 3 * I) * n * es) + ((size_t)1 << 20));
    fmoe_plan_destroy(&plan);
    npu.sync(npu.main_stream);
    npu.set("count_only", 0);
}

/* ---- Failures ---- */

/* Fail the n-th call of CANN for every n until a run gets through. Each time: a clean error, nothing left alive. */
static void sweep(layer_case c, const char *function)
{
    layer l = layer_make(c);
    const fmoe_run f = run_for(l.plan, FMOE_FORWARD, c.T, FMOE_ASCEND, c.forward),
                   b = run_for(l.plan, FMOE_BACKWARD, c.T, FMOE_ASCEND, c.backward);
    for (int pass = 0; pass < 2; pass++) {
        int64_t n = 1;
        for (;; n++) {
            REQUIRE(n < 2000);
            const int64_t before = npu.get("injected");
            npu.fail(function, n, 507899);
            const fmoe_status s = pass ? layer_backward(&l, &b) : layer_forward(&l, &f);
            npu.fail("", 0, 0);
            if (s == FMOE_OK && npu.get("injected") == before) break;
            if (s == FMOE_OK) continue; /* aclrtGetDevice may fail: the device is set then */
            if (s != FMOE_ERR_DEVICE || !strstr(fmoe_last_error(), "Ascend: acl"))
                TEST_FAIL("call %" PRId64 ": %s: %s", n, fmoe_status_string(s), fmoe_last_error());
            static const char *const live[] = {"live_tensors", "live_lists", "live_scalars", "live_arrays",
                                               "live_executors"};
            for (int i = 0; i < 5; i++)
                if (npu.get(live[i]))
                    TEST_FAIL("call %" PRId64 " failed, %s is %" PRId64, n, live[i], npu.get(live[i]));
        }
        CHECK(n > 3);
    }
    if (!c.backward) { /* the plan is none the worse; what was added to before a failure stays added */
        layer_reference(&l);
        layer_compare(&l);
    }
    layer_free(&l);
}

#define SMALL .T = 5, .H = 16, .I = 8, .E = 4, .k = 2

NPU_TEST(every_call_fails)
{
    sweep((layer_case){.dtype = FMOE_BF16, SMALL}, "*");
    sweep((layer_case){.dtype = FMOE_F32, SMALL, .flags = FMOE_BIAS | FMOE_INTERLEAVED | FMOE_RECOMPUTE}, "*");
    sweep((layer_case){.dtype = FMOE_BF16, SMALL, .flags = FMOE_SKIP_NEG1, .form = LISTS, .grad = FMOE_F32}, "*");
    sweep((layer_case){.dtype = FMOE_BF16, SMALL, .flags = FMOE_BIAS, .grad = FMOE_F32, .gaps = true},
          "aclCreateTensor");
    sweep((layer_case){.dtype = FMOE_F16, SMALL, .form = TURNED, .backward = FMOE_ACCUMULATE | FMOE_ADD_DX}, "*");
    sweep((layer_case){.dtype = FMOE_F32, SMALL, .form = LISTS, .apart = true}, "*");
    sweep((layer_case){.dtype = FMOE_BF16, SMALL, .form = LISTS, .rank1 = 2, .rank2 = 4, .factors = FMOE_F32}, "*");
    sweep((layer_case){.dtype = FMOE_BF16, SMALL, .act = FMOE_ACT_SWIGLU_OAI, .flags = FMOE_BIAS | FMOE_INTERLEAVED},
          "*");
    sweep((layer_case){.dtype = FMOE_BF16, .T = 3, .H = 8, .I = 8, .E = 1, .k = 1, .flags = FMOE_BIAS}, "*");
    sweep((layer_case){.dtype = FMOE_BF16, .T = 4, .H = 8, .I = 8, .E = 130, .k = 2, .form = LISTS},
          "aclCreateTensorList");
}

NPU_TEST(every_call_of_the_lean_plan_fails)
{
    setenv("FMOE_ASCEND_KEEP", "lean", 1);
    sweep((layer_case){.dtype = FMOE_BF16, SMALL}, "*");
    sweep((layer_case){.dtype = FMOE_BF16, SMALL, .form = LISTS}, "*");
    sweep((layer_case){.dtype = FMOE_BF16, SMALL, .flags = FMOE_SKIP_E, .p = FMOE_F32}, "*");
    unsetenv("FMOE_ASCEND_KEEP");
}

NPU_TEST(every_call_of_every_activation_fails)
{
    for (int act = FMOE_ACT_GEGLU; act <= FMOE_ACT_SWIGLU_CLAMP_OUT; act++)
        sweep((layer_case){.dtype = FMOE_F32, SMALL, .act = act, .limit = 0.4}, "*");
    for (int act = FMOE_ACT_SILU; act <= FMOE_ACT_RELU2; act++)
        sweep((layer_case){.dtype = FMOE_F32, SMALL, .act = act}, "*");
}

/* The same while a plan asks how much workspace it needs. */
NPU_TEST(failures_while_measuring)
{
    fmoe_desc d = {.op = FMOE_OP_EXPERTS, .dtype = FMOE_BF16, .H = 16, .I = 8, .E = 4, .k = 2, .flags = FMOE_BIAS};
    for (int pass = 0; pass < 2; pass++) {
        fmoe_plan plan = make_plan(d, FMOE_ASCEND);
        size_t bytes = 0;
        int64_t n = 1;
        for (;; n++) {
            const int64_t before = npu.get("injected");
            npu.fail("*", n, 507899);
            const fmoe_status s = fmoe_workspace_bytes(plan, (fmoe_pass)pass, 5, &bytes);
            npu.fail("", 0, 0);
            if (s == FMOE_OK && npu.get("injected") == before) break;
            if (s == FMOE_OK) { /* measured in spite of it, and remembered: ask anew */
                fmoe_plan_destroy(&plan);
                plan = make_plan(d, FMOE_ASCEND);
                continue;
            }
            CHECK_EQ(s, FMOE_ERR_DEVICE);
            CHECK_EQ(npu.get("live_tensors") + npu.get("live_executors") + npu.get("live_lists"), 0);
            REQUIRE(n < 5000);
        }
        CHECK(n > 20);
        CHECK_EQ(npu.get("launches"), 0); /* measuring starts nothing */
        fmoe_plan_destroy(&plan);
    }
}

/* Errors that show only when the device runs are the next synchronisation's, as with every asynchronous call. */
NPU_TEST(bad_id)
{
    layer l = layer_make((layer_case){.dtype = FMOE_F32, SMALL});
    fmoe_tensor *ids = tensor_fill(tensor_new(I64, SHAPE(5, 2)), 77);
    l.a.ids = to_npu(ids);
    const fmoe_run f = run_for(l.plan, FMOE_FORWARD, 5, FMOE_ASCEND, 0);
    npu.set("quiet", 1);
    CHECK_STATUS(layer_forward(&l, &f), FMOE_OK);
    CHECK_EQ(npu.sync(npu.main_stream), 507015);
    CHECK(npu.get("violations") > 0);
    npu.forgive();
    layer_free(&l);
}

/* FMOE_ASCEND_CHECK: the same id, and a mark that the plan does not have, are named before anything is launched on
 * them.
 */
NPU_TEST(bad_id_checked)
{
    setenv("FMOE_ASCEND_CHECK", "1", 1);
    layer l = layer_make((layer_case){.dtype = FMOE_F32, SMALL, .flags = FMOE_SKIP_E});
    fmoe_tensor *ids = tensor_fill(tensor_new(I64, SHAPE(5, 2)), 4); /* E: skipped */
    tensor_set(ids, 3, 77);
    tensor_set(ids, 8, -1);
    l.a.ids = to_npu(ids);
    const fmoe_run f = run_for(l.plan, FMOE_FORWARD, 5, FMOE_ASCEND, 0);
    CHECK_STATUS(layer_forward(&l, &f), FMOE_ERR_INDEX);
    CHECK_ERROR_HAS("2 of 10 ids are outside [0, 5)");
    CHECK_EQ(npu.get("aclnnMoeInitRoutingV3") + npu.get("aclnnMoeInitRoutingV2"), 0);
    layer_free(&l);
    sweep((layer_case){.dtype = FMOE_BF16, SMALL}, "*"); /* good ids: as ever, and every call may fail */
    unsetenv("FMOE_ASCEND_CHECK");
}

/* ---- A queue of the caller's ---- */

typedef struct queue {
    struct {
        int (*launch)(void *);
        void *arg;
    } task[64];
    int n, refuse; /* the refuse-th is not taken */
} queue;

static int put(void *ctx, const char *name, int (*launch)(void *), void *arg)
{
    queue *q = ctx;
    CHECK(strncmp(name, "acl", 3) == 0);
    if (--q->refuse == 0) return 7;
    REQUIRE(q->n < 64);
    q->task[q->n].launch = launch;
    q->task[q->n++].arg = arg;
    return 0;
}

static int flush(queue *q) /* the first error; what follows runs all the same, as on a device */
{
    int first = 0;
    for (int i = 0; i < q->n; i++) {
        const int code = q->task[i].launch(q->task[i].arg);
        if (!first) first = code;
    }
    q->n = 0;
    return first;
}

static void *flush_elsewhere(void *arg)
{
    npu.set_device(0);
    return (void *)(intptr_t)flush(arg);
}

static bool nothing_lives(void)
{
    return npu.get("live_tensors") + npu.get("live_lists") + npu.get("live_scalars") + npu.get("live_arrays") +
               npu.get("live_executors") ==
           0;
}

/* Forward and backward through a queue that another thread empties afterwards: nothing is launched before, and the
 * results are those of the direct way. Whatever is refused or fails later leaves nothing. */
NPU_TEST(submitting)
{
    static const layer_case cases[] = {{.dtype = FMOE_BF16, SMALL},
                                       {.dtype = FMOE_BF16, SMALL, .flags = FMOE_SKIP_NEG1, .form = LISTS},
                                       {.dtype = FMOE_BF16, SMALL, .flags = FMOE_BIAS, .grad = FMOE_F32}};
    for (int i = 0; i < 3; i++) {
        layer l = layer_make(cases[i]);
        queue q = {.n = 0};
        fmoe_run run[2] = {run_for(l.plan, FMOE_FORWARD, 5, FMOE_ASCEND, 0),
                           run_for(l.plan, FMOE_BACKWARD, 5, FMOE_ASCEND, 0)};
        npu.reset();
        for (int pass = 0; pass < 2; pass++) {
            run[pass].submit = put;
            run[pass].submit_ctx = &q;
            CHECK_STATUS(pass ? layer_backward(&l, &run[1]) : layer_forward(&l, &run[0]), FMOE_OK);
        }
        CHECK_EQ(npu.get("launches"), 0);
        CHECK(q.n >= 13);
        const int tasks = q.n;
        pthread_t thread;
        void *code = NULL;
        REQUIRE(pthread_create(&thread, NULL, flush_elsewhere, &q) == 0);
        pthread_join(thread, &code);
        CHECK_EQ((intptr_t)code, 0);
        CHECK(nothing_lives());
        layer_reference(&l);
        layer_compare(&l);
        for (int refuse = 1; refuse <= tasks; refuse++) {
            q.refuse = refuse;
            fmoe_status s = layer_forward(&l, &run[0]);
            if (s == FMOE_OK) s = layer_backward(&l, &run[1]);
            CHECK_EQ(s, FMOE_ERR_DEVICE);
            CHECK_ERROR_HAS("the caller's queue did not take it (7)");
            CHECK_EQ(flush(&q), 0);
            CHECK(nothing_lives());
        }
        q.refuse = 0;
        CHECK_STATUS(layer_forward(&l, &run[0]), FMOE_OK);
        npu.fail("aclnnSwiGlu", 1, 507899);
        CHECK_EQ(flush(&q), 507899); /* the queue hears of it, and nobody else */
        CHECK(nothing_lives());
        layer_free(&l);
    }
}

/* ---- Time ---- */

/* Every task starts late: whoever does not wait where it must, or frees too early, shows. Same bits. */
NPU_TEST(delays)
{
    const fmoe_tensor *first = NULL;
    for (int delay = 0; delay <= 2000; delay += 1000) {
        test_state = 77;
        npu.set("delay_us", delay);
        layer l = layer_make((layer_case){.dtype = FMOE_BF16, SMALL, .flags = FMOE_SKIP_NEG1, .p = FMOE_F32});
        const fmoe_run f = run_for(l.plan, FMOE_FORWARD, 5, FMOE_ASCEND, 0),
                       b = run_for(l.plan, FMOE_BACKWARD, 5, FMOE_ASCEND, 0);
        CHECK_STATUS(layer_forward(&l, &f), FMOE_OK);
        CHECK_STATUS(layer_backward(&l, &b), FMOE_OK);
        layer_free(&l); /* plans may go before the device is done */
        const fmoe_tensor *dx = from_npu(l.a.dx);
        if (!first) first = dx;
        CHECK_SAME(first, dx);
    }
}

/* ---- Refusals ---- */

static void refuse(fmoe_desc d, fmoe_status want, const char *text)
{
    fmoe_plan plan = 0;
    d.size = sizeof d;
    d.device.type = FMOE_ASCEND;
    CHECK_STATUS(fmoe_plan_create(&plan, &d), want);
    CHECK_ERROR_HAS(text);
    fmoe_plan_destroy(&plan);
}

NPU_TEST(refusals)
{
    refuse((fmoe_desc){.op = FMOE_OP_EXPERTS, .dtype = FMOE_BF16, .H = 70000, .I = 8, .E = 4, .k = 2},
           FMOE_ERR_UNSUPPORTED, "H is 70000");
    refuse((fmoe_desc){.op = FMOE_OP_EXPERTS, .dtype = FMOE_BF16, .H = 8, .I = 40000, .E = 4, .k = 2},
           FMOE_ERR_UNSUPPORTED, "2I is 80000");
    refuse((fmoe_desc){.op = FMOE_OP_EXPERTS, .dtype = FMOE_BF16, .H = 8, .I = 8, .E = 2000, .k = 2},
           FMOE_ERR_UNSUPPORTED, "E is 2000");
    refuse(
        (fmoe_desc){
            .op = FMOE_OP_EXPERTS, .dtype = FMOE_BF16, .H = 8, .I = 8, .E = 8, .k = 2, .device = {FMOE_ASCEND, 5}},
        FMOE_ERR_BACKEND, "device 5");
}

/* More rows than the permutation can number: sizes are told, the run is refused. */
NPU_TEST(too_many_rows)
{
    const int64_t T = 10000000, k = 2, H = 1;
    fmoe_plan plan =
        make_plan((fmoe_desc){.op = FMOE_OP_EXPERTS, .dtype = FMOE_BF16, .H = H, .I = 1, .E = 2, .k = k}, FMOE_ASCEND);
    npu.set("count_only", 1);
    struct {
        int64_t shape[3];
        int ndim, dtype;
    } want[] = {{{T, H, 0}, 2, FMOE_BF16}, {{T, k, 0}, 2, I32},       {{T, k, 0}, 2, FMOE_BF16},
                {{2, 2, H}, 3, FMOE_BF16}, {{2, H, 1}, 3, FMOE_BF16}, {{T, H, 0}, 2, FMOE_BF16}};
    fmoe_tensor *t[6];
    for (int i = 0; i < 6; i++) {
        t[i] = tensor_over(NULL, want[i].dtype, want[i].ndim, want[i].shape, NULL);
        t[i]->device = (fmoe_device){FMOE_ASCEND, 0};
        t[i]->data = npu_alloc(tensor_span(t[i]));
    }
    const fmoe_experts_args a = {
        .size = sizeof a, .x = t[0], .ids = t[1], .weights = t[2], .w = {.w1 = t[3], .w2 = t[4]}, .out = t[5]};
    const fmoe_run f = run_for(plan, FMOE_FORWARD, T, FMOE_ASCEND, 0);
    CHECK_STATUS(fmoe_experts_forward(plan, &a, &f), FMOE_ERR_UNSUPPORTED);
    CHECK_ERROR_HAS("16777214");
    CHECK_EQ(npu.get("launches"), 0);
    npu.set("count_only", 0);
    fmoe_plan_destroy(&plan);
}

NPU_TEST(strided_weights)
{
    layer l = layer_make((layer_case){.dtype = FMOE_F32, SMALL});
    const int64_t strides[3] = {16 * 20, 20, 1};
    l.a.w.w1 = to_npu(tensor_strided(FMOE_F32, SHAPE(4, 16, 16), strides));
    const fmoe_run f = run_for(l.plan, FMOE_FORWARD, 5, FMOE_ASCEND, 0);
    CHECK_STATUS(layer_forward(&l, &f), FMOE_ERR_STRIDE);
    CHECK_ERROR_HAS("w1 has strides");
    layer_free(&l);
}

NPU_TEST(description)
{
    char text[2000];
    fmoe_plan plan =
        make_plan((fmoe_desc){.op = FMOE_OP_EXPERTS, .dtype = FMOE_BF16, .H = 8, .I = 8, .E = 8, .k = 2}, FMOE_ASCEND);
    CHECK(fmoe_plan_describe(plan, text, sizeof text) < sizeof text);
    CHECK(strstr(text, newest() ? "aclnnGroupedMatmulV5" : "V5 is not there"));
    CHECK(strstr(text, newest() ? "aclnnMoeInitRoutingV3" : "V3 is not there"));
    fmoe_plan_destroy(&plan);
}

/* Another current device is put back. */
NPU_TEST(current_device)
{
    fmoe_plan plan =
        make_plan((fmoe_desc){.op = FMOE_OP_EXPERTS, .dtype = FMOE_BF16, .H = 8, .I = 8, .E = 8, .k = 2}, FMOE_ASCEND);
    size_t bytes;
    int32_t now = -1;
    int (*get_device)(int32_t *);
    *(void **)&get_device = dlsym(RTLD_DEFAULT, "aclrtGetDevice");
    REQUIRE(get_device != NULL);
    npu.set_device(1);
    CHECK_STATUS(fmoe_workspace_bytes(plan, FMOE_FORWARD, 5, &bytes), FMOE_OK);
    CHECK_EQ(get_device(&now), 0);
    CHECK_EQ(now, 1);
    npu.set_device(0);
    fmoe_plan_destroy(&plan);
}

/* ---- Threads ---- */

typedef struct worker {
    layer *l;
    fmoe_run run;
    fmoe_tensor *out;
    fmoe_status status;
} worker;

static void *work(void *arg)
{
    worker *w = arg;
    layer l = *w->l;
    l.a.out = w->out;
    l.a.saved = NULL; /* inference: nothing is shared but the plan */
    l.a.saved_bytes = 0;
    for (int i = 0; i < 20 && w->status == FMOE_OK; i++) w->status = layer_forward(&l, &w->run);
    return NULL;
}

/* One plan, four threads that never set a device, each with its own stream and workspace: the same bits. */
NPU_TEST(threads)
{
    layer l = layer_make((layer_case){.dtype = FMOE_BF16, QWEN});
    worker w[4];
    pthread_t thread[4];
    void *stream[4];
    for (int i = 0; i < 4; i++) {
        w[i] = (worker){
            .l = &l, .run = run_for(l.plan, FMOE_FORWARD, l.c.T, FMOE_ASCEND, 0), .out = to_npu(from_npu(l.a.out))};
        npu.stream(&stream[i]);
        w[i].run.stream = stream[i];
    }
    for (int i = 0; i < 4; i++) REQUIRE(pthread_create(&thread[i], NULL, work, &w[i]) == 0);
    for (int i = 0; i < 4; i++) pthread_join(thread[i], NULL);
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(w[i].status, FMOE_OK);
        CHECK_EQ(npu.sync(stream[i]), 0);
        npu.end_stream(stream[i]);
        CHECK_EQUAL(w[i].out, from_npu(w[0].out));
    }
    layer_free(&l);
}
