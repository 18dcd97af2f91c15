/* SPDX-License-Identifier: Apache-2.0
 *
 * test_values.c - plans (rows 4, 16, 24, 25 of the fault table) and values inside tensors (11 to 15, 17 to 19). */
#include <sys/wait.h>
#include <unistd.h>

#include "calls.h"
#include "cpu/kernels/kernels.h"

/* ---- plans ---- */

static fmoe_desc layer(void) { return call_desc(CALL_EXPERTS, FMOE_F32); }

static void refuse(const char *what, const fmoe_desc *d, fmoe_status status, const char *word, const char *word2)
{
    fmoe_plan plan = 1;
    const fmoe_status got = fmoe_plan_create(&plan, d);
    if (got != status)
        TEST_FAIL("%s: %s (%s), not %s", what, fmoe_status_string(got), got ? fmoe_last_error() : "",
                  fmoe_status_string(status));
    if (got == FMOE_OK) fmoe_plan_destroy(&plan);
    else if (!strstr(fmoe_last_error(), word) || !strstr(fmoe_last_error(), word2))
        TEST_FAIL("%s: \"%s\" lacks \"%s\" or \"%s\"", what, fmoe_last_error(), word, word2);
    CHECK_EQ(plan, 0);
}

#define REFUSE(change, status, word, word2)                                                                            \
    do {                                                                                                               \
        fmoe_desc d = layer();                                                                                         \
        change;                                                                                                        \
        refuse(#change, &d, status, word, word2);                                                                      \
    } while (0)

TEST(row16_plan_arguments)
{
    REFUSE(d.op = 0, FMOE_ERR_ARG, "op", "0");
    REFUSE(d.op = 7, FMOE_ERR_ARG, "op", "7");
    REFUSE(d.dtype = 0, FMOE_ERR_DTYPE, "dtype", "0");
    REFUSE(d.dtype = 5, FMOE_ERR_DTYPE, "dtype", "5");
    REFUSE(d.flags = 1u << 31, FMOE_ERR_ARG, "flags", "0x80000000");
    REFUSE(d.flags = FMOE_ROUND_STEPS; d.device.type = FMOE_CUDA, FMOE_ERR_UNSUPPORTED, "FMOE_ROUND_STEPS", "2");
    REFUSE(d.flags = FMOE_ROUND_STEPS; d.device.type = FMOE_ASCEND, FMOE_ERR_UNSUPPORTED, "FMOE_ROUND_STEPS", "12");
    REFUSE(d.flags = FMOE_SAME_BITS; d.device.type = FMOE_ASCEND, FMOE_ERR_UNSUPPORTED, "FMOE_SAME_BITS", "12");
    REFUSE(d.threads = -1, FMOE_ERR_ARG, "threads", "-1");
    REFUSE(d.threads = 65537, FMOE_ERR_ARG, "threads", "65537");
    REFUSE(d.act = 7, FMOE_ERR_ARG, "act", "7");
    REFUSE(d.act = 21, FMOE_ERR_ARG, "act", "21");
    REFUSE(d.act_limit = -1, FMOE_ERR_ARG, "act_limit", "-1");
    REFUSE(d.act_limit = NAN, FMOE_ERR_ARG, "act_limit", "nan");
    REFUSE(d.act_alpha = INFINITY, FMOE_ERR_ARG, "act_alpha", "inf");
    REFUSE(d.H = 0, FMOE_ERR_ARG, "H", "0");
    REFUSE(d.I = -3, FMOE_ERR_ARG, "I", "-3");
    REFUSE(d.E = 0, FMOE_ERR_ARG, "E", "0");
    REFUSE(d.k = 0, FMOE_ERR_ARG, "k", "0");
    REFUSE(d.rank1 = -1, FMOE_ERR_ARG, "rank1", "-1");
    REFUSE(d.rank2 = INT64_MAX, FMOE_ERR_ARG, "rank2", "9223372036854775807");
    REFUSE(d.H = INT64_MAX, FMOE_ERR_ARG, "H", "9223372036854775807");
    REFUSE(d.device.type = 99, FMOE_ERR_BACKEND, "device.type", "99");
    REFUSE(d.device.type = FMOE_CPU; d.device.id = 1, FMOE_ERR_ARG, "device.id", "1");
    REFUSE(d.device.type = FMOE_CUDA; d.dtype = FMOE_F64, FMOE_ERR_UNSUPPORTED, "f64", "2");
}

TEST(row16_routing_rules)
{
    fmoe_desc base = call_desc(CALL_ROUTE, FMOE_F32);
#define ROUTE(change, word, word2)                                                                                     \
    do {                                                                                                               \
        fmoe_desc d = base;                                                                                            \
        change;                                                                                                        \
        refuse(#change, &d, FMOE_ERR_ARG, word, word2);                                                                \
    } while (0)
    ROUTE(d.k = 5, "k", "5");
    ROUTE(d.route.score = 4, "score", "4");
    ROUTE(d.route.score = -1, "score", "-1");
    ROUTE(d.route.group_score = 2, "group_score", "2");
    ROUTE(d.route.groups = -1, "groups", "-1");
    ROUTE(d.route.groups = 3; d.route.topk_groups = 1, "groups", "3");
    ROUTE(d.route.groups = 2; d.route.topk_groups = 0, "topk_groups", "0");
    ROUTE(d.route.groups = 2; d.route.topk_groups = 3, "topk_groups", "3");
    ROUTE(d.route.groups = 4; d.route.topk_groups = 1, "k", "2");
    ROUTE(d.route.eps = -1, "eps", "-1");
    ROUTE(d.route.eps = NAN, "eps", "nan");
    ROUTE(d.route.scale = INFINITY, "scale", "inf");
    fmoe_desc d = call_desc(CALL_BLOCK, FMOE_F32);
    d.shared_I = 0;
    refuse("gate without a shared expert", &d, FMOE_ERR_ARG, "FMOE_SHARED_GATE", "shared_I");
    d.shared_I = -1;
    refuse("shared_I", &d, FMOE_ERR_ARG, "shared_I", "-1");
    d = call_desc(CALL_BLOCK, FMOE_F32);
    d.k = N_E + 1;
    refuse("k > E in a block", &d, FMOE_ERR_ARG, "k", "5");
}

/* E = 1, k = E, E of 257 and 1025: every expert can be reached. */
TEST(row16_every_expert_is_reachable)
{
    const int64_t sizes[] = {1, 2, 257, 1025};
    for (int i = 0; i < 4; i++) {
        fmoe_desc d = call_desc(CALL_ROUTE, FMOE_F32);
        const int64_t E = d.E = sizes[i];
        d.k = 1;
        fmoe_plan plan;
        REQUIRE(fmoe_plan_create(&plan, &d) == FMOE_OK);
        fmoe_tensor *logits = tensor_new(FMOE_F32, SHAPE(E, E)), *ids = tensor_new(I32, SHAPE(E, 1)),
                    *p = tensor_new(FMOE_F32, SHAPE(E, 1));
        for (int64_t e = 0; e < E; e++) tensor_set(logits, e * E + e, 1);
        const fmoe_route_args a = {.size = sizeof a, .logits = logits, .ids = ids, .weights = p};
        fmoe_run run = FMOE_RUN_INIT;
        REQUIRE(fmoe_workspace_bytes(plan, FMOE_FORWARD, E, &run.workspace_bytes) == FMOE_OK);
        run.workspace = test_alloc(run.workspace_bytes);
        CHECK_STATUS(fmoe_route_forward(plan, &a, &run), FMOE_OK);
        for (int64_t e = 0; e < E; e++) CHECK(tensor_get(ids, e) == (double)e);
        fmoe_plan_destroy(&plan);
    }
}

TEST(row04_sizes_that_do_not_fit)
{
    REFUSE(d.E = INT64_C(1) << 24; d.I = INT64_C(1) << 24;
           d.H = INT64_C(1) << 24, FMOE_ERR_OVERFLOW, "16777216", "E*2I*H");
    REFUSE(d.rank1 = INT64_C(1) << 40; d.H = INT64_C(1) << 30, FMOE_ERR_OVERFLOW, "adapter", "1099511627776");
    REFUSE(d.rank2 = INT64_C(1) << 40; d.H = INT64_C(1) << 30, FMOE_ERR_OVERFLOW, "adapter", "1099511627776");
    fmoe_desc d = call_desc(CALL_GMM, FMOE_F32);
    d.E = d.K = d.N = INT64_C(1) << 21;
    refuse("E*K*N", &d, FMOE_ERR_OVERFLOW, "E*K*N", "2097152");
    d = call_desc(CALL_BLOCK, FMOE_F32);
    d.shared_I = d.H = INT64_C(1) << 40;
    d.E = d.I = 1, d.k = 1;
    refuse("shared_I*H", &d, FMOE_ERR_OVERFLOW, "shared_I", "1099511627776");

    d = layer();
    d.k = INT64_C(1) << 20;
    fmoe_plan plan;
    REQUIRE(fmoe_plan_create(&plan, &d) == FMOE_OK);
    size_t bytes = 1;
    CHECK_STATUS(fmoe_workspace_bytes(plan, FMOE_FORWARD, INT64_C(1) << 48, &bytes), FMOE_ERR_OVERFLOW);
    CHECK_EQ(bytes, 0);
    CHECK_STATUS(fmoe_saved_bytes(plan, INT64_C(1) << 44, &bytes), FMOE_ERR_OVERFLOW);
    CHECK_EQ(bytes, 0);
    CHECK_STATUS(fmoe_workspace_bytes(plan, FMOE_BACKWARD, (INT64_C(1) << 48) + 1, &bytes), FMOE_ERR_ARG);
    fmoe_plan_destroy(&plan);

    /* Dimensions that are allowed one by one, and do not fit together. */
    for (int strided = 0; strided < 2; strided++) {
        api_call c;
        call_begin(&c, CALL_ACTIVATION, FMOE_FORWARD, FMOE_F32);
        fmoe_tensor h = *c.a.activation.h;
        int64_t strides[] = {INT64_C(1) << 60, 1};
        h.shape = (int64_t[]){strided ? N_R : INT64_C(1) << 48, 2 * N_I};
        h.strides = strided ? strides : NULL;
        if (!strided) h.shape[1] = 2 * N_I;
        c.a.activation.h = &h;
        const fmoe_status got = call_make(&c);
        CHECK(got == (strided ? FMOE_ERR_OVERFLOW : FMOE_ERR_SHAPE));
        CHECK_ERROR_HAS(strided ? "h" : "281474976710656");
        CHECK(call_untouched(&c));
        call_end(&c);
    }
}

/* 2^31 rows, in memory that is not there: an int32 cannot name them all. */
TEST(row04_rows_that_int32_does_not_hold)
{
    api_call c;
    call_begin(&c, CALL_PERMUTE, FMOE_FORWARD, FMOE_F32);
    for (int i = 0; i < c.n_slots; i++) {
        fmoe_tensor *t = (fmoe_tensor *)(uintptr_t)*c.slots[i].at;
        t->data = (void *)((uintptr_t)(i + 1) << 44);
        if (t->shape[0] == N_T) t->shape[0] = INT64_C(1) << 30;
        if (t->shape[0] == N_R) t->shape[0] = INT64_C(1) << 31;
    }
    REQUIRE(fmoe_workspace_bytes(c.plan, FMOE_FORWARD, INT64_C(1) << 30, &c.run.workspace_bytes) == FMOE_OK);
    c.run.workspace = (void *)((uintptr_t)9 << 44);
    CHECK_STATUS(call_make(&c), FMOE_ERR_DTYPE);
    CHECK_ERROR_HAS("map is int32");
    CHECK_ERROR_HAS("2147483648");
    ((fmoe_tensor *)(uintptr_t)c.a.permute.map)->dtype.bits = 64;
    ((fmoe_tensor *)(uintptr_t)c.a.permute.counts)->dtype.bits = 32;
    CHECK_STATUS(call_make(&c), FMOE_ERR_DTYPE);
    CHECK_ERROR_HAS("counts is int32");
    call_end(&c);
}

TEST(row24_handles)
{
    api_call c;
    call_begin(&c, CALL_ACTIVATION, FMOE_FORWARD, FMOE_F32);
    const fmoe_plan good = c.plan;
    char text[200];
    size_t bytes;
    const fmoe_plan forged[] = {
        0, 1, good + 1, good ^ (UINT64_C(1) << 40), good + 65536, UINT64_MAX, (fmoe_plan)(uintptr_t)&c, good << 1};
    for (size_t i = 0; i < sizeof forged / sizeof *forged; i++) {
        c.plan = forged[i];
        CHECK_STATUS(call_make(&c), FMOE_ERR_HANDLE);
        snprintf(text, sizeof text, "0x%" PRIx64, forged[i]);
        CHECK_ERROR_HAS(text);
        CHECK_STATUS(fmoe_workspace_bytes(forged[i], FMOE_FORWARD, 1, &bytes), FMOE_ERR_HANDLE);
        CHECK_STATUS(fmoe_saved_bytes(forged[i], 1, &bytes), FMOE_ERR_HANDLE);
        CHECK_EQ(fmoe_plan_describe(forged[i], text, sizeof text), 0);
        CHECK(text[0] == 0);
        fmoe_plan stale = forged[i];
        if (stale) CHECK_STATUS(fmoe_plan_destroy(&stale), FMOE_ERR_HANDLE);
    }
    CHECK(call_untouched(&c));
    c.plan = good;
    CHECK_STATUS(call_make(&c), FMOE_OK);
    call_end(&c);
    fmoe_plan stale = good; /* destroyed once already; and again after the slot is in use by another */
    CHECK_STATUS(fmoe_plan_destroy(&stale), FMOE_ERR_HANDLE);
    fmoe_plan others[40];
    for (int i = 0; i < 40; i++) REQUIRE(fmoe_plan_create(&others[i], &c.d) == FMOE_OK);
    c.plan = good;
    CHECK_STATUS(call_make(&c), FMOE_ERR_HANDLE);
    for (int i = 0; i < 40; i++) CHECK_STATUS(fmoe_plan_destroy(&others[i]), FMOE_OK);
}

TEST(row24_too_many_plans)
{
    static fmoe_plan plans[20000];
    const fmoe_desc d = call_desc(CALL_ACTIVATION, FMOE_F32);
    int n = 0;
    fmoe_status status = FMOE_OK;
    while (n < 20000 && (status = fmoe_plan_create(&plans[n], &d)) == FMOE_OK) n++;
    CHECK_EQ(status, FMOE_ERR_NOMEM);
    CHECK_ERROR_HAS("plans");
    CHECK(n >= 10000);
    for (int i = 0; i < n; i++) CHECK_STATUS(fmoe_plan_destroy(&plans[i]), FMOE_OK);
    fmoe_plan again;
    CHECK_STATUS(fmoe_plan_create(&again, &d), FMOE_OK);
    fmoe_plan_destroy(&again);
}

TEST(row25_plan_of_another_operation)
{
    for (int a = 0; a < CALL_KINDS; a++)
        for (int b = 0; b < CALL_KINDS; b++) {
            api_call c;
            call_begin(&c, (call_kind)a, FMOE_FORWARD, FMOE_F32);
            const fmoe_desc other = call_desc((call_kind)b, FMOE_F32);
            fmoe_plan mine = c.plan;
            REQUIRE(fmoe_plan_create(&c.plan, &other) == FMOE_OK);
            if (other.op != c.d.op) {
                CHECK_STATUS(call_make(&c), FMOE_ERR_PLAN);
                CHECK_ERROR_HAS("the plan is for");
                CHECK(call_untouched(&c));
            }
            fmoe_plan_destroy(&c.plan);
            fmoe_plan_destroy(&mine);
        }
}

TEST(row25_plan_for_other_sizes)
{
    api_call c;
    call_begin(&c, CALL_EXPERTS, FMOE_FORWARD, FMOE_F32);
    fmoe_plan mine = c.plan;
    int64_t *const sizes[] = {&c.d.H, &c.d.I, &c.d.E, &c.d.k};
    for (int i = 0; i < 4; i++) {
        char word[32];
        ++*sizes[i];
        REQUIRE(fmoe_plan_create(&c.plan, &c.d) == FMOE_OK);
        CHECK_STATUS(call_make(&c), FMOE_ERR_PLAN);
        snprintf(word, sizeof word, "%" PRId64, i == 1 ? 2 * *sizes[i] : *sizes[i]);
        CHECK_ERROR_HAS(word);
        CHECK_ERROR_HAS("the plan");
        CHECK(call_untouched(&c));
        fmoe_plan_destroy(&c.plan);
        --*sizes[i];
    }
    c.d.flags = 0; /* made without FMOE_BIAS */
    REQUIRE(fmoe_plan_create(&c.plan, &c.d) == FMOE_OK);
    CHECK_STATUS(call_make(&c), FMOE_ERR_PLAN);
    CHECK_ERROR_HAS("FMOE_BIAS");
    fmoe_plan_destroy(&c.plan);
    c.plan = mine;
    CHECK_STATUS(call_make(&c), FMOE_OK);
    call_end(&c);
}

/* ---- ids and sizes ---- */

static void bad_index(api_call *c, const fmoe_tensor *t, int64_t at, int64_t value, const char *name)
{
    const double was = tensor_get(t, at);
    char word[32];
    if (fmoe_tensor_dtype(t) == I64) ((int64_t *)t->data)[at] = value;
    else ((int32_t *)t->data)[at] = (int32_t)value;
    const fmoe_status got = call_make(c);
    snprintf(word, sizeof word, "%" PRId64, fmoe_tensor_dtype(t) == I64 ? value : (int64_t)(int32_t)value);
    if (got != FMOE_ERR_INDEX)
        TEST_FAIL("%s %d, %s = %" PRId64 ": %s", call_names[c->kind], c->pass, name, value, fmoe_status_string(got));
    else if (!strstr(fmoe_last_error(), name) || !strstr(fmoe_last_error(), word))
        TEST_FAIL("\"%s\" lacks %s or %s", fmoe_last_error(), name, word);
    CHECK(call_untouched(c));
    tensor_set(t, at, was);
}

TEST(row11_12_ids_out_of_range)
{
    const int64_t wrong[] = {
        N_E, N_E + 1, -1, -2, INT32_MIN, INT32_MAX, INT64_MIN, INT64_MAX, (INT64_C(1) << 32) + 1, INT64_C(1) << 31};
    for (int kind = 0; kind < CALL_KINDS; kind++)
        for (int pass = 0; pass < 2; pass++) {
            api_call c;
            call_begin(&c, (call_kind)kind, (fmoe_pass)pass, FMOE_F32);
            for (int s = 0; s < c.n_slots; s++) {
                if (strcmp(c.slots[s].name, "ids") || c.slots[s].role != SLOT_IN) continue;
                const fmoe_tensor *ids = *c.slots[s].at;
                for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
                    if (fmoe_tensor_dtype(ids) == I32 && wrong[i] != (int32_t)wrong[i]) continue;
                    bad_index(&c, ids, 7, wrong[i], "ids[3,1]");
                }
            }
            call_end(&c);
        }
}

TEST(row12_one_mark_does_not_allow_the_other)
{
    for (int i = 0; i < 2; i++) {
        api_call c;
        call_begin(&c, CALL_EXPERTS, FMOE_FORWARD, FMOE_F32);
        fmoe_plan_destroy(&c.plan);
        c.d.flags |= i ? FMOE_SKIP_E : FMOE_SKIP_NEG1;
        REQUIRE(fmoe_plan_create(&c.plan, &c.d) == FMOE_OK);
        bad_index(&c, c.a.experts.ids, 0, i ? -1 : N_E, "ids[0,0]");
        call_end(&c);
    }
}

TEST(row11_maps_and_sizes_out_of_range)
{
    api_call c;
    for (int pass = 0; pass < 2; pass++) {
        call_begin(&c, CALL_UNPERMUTE, (fmoe_pass)pass, FMOE_F32);
        bad_index(&c, c.a.unpermute.map, 4, N_R, "map[4]");
        bad_index(&c, c.a.unpermute.map, 4, -2, "map[4]");
        if (pass)
            bad_index(&c, c.a.unpermute.map, 4, (int64_t)tensor_get(c.a.unpermute.map, 0),
                      "map[4]"); /* two slots, one row of dy */
        call_end(&c);
        for (int dtype = FMOE_F32; dtype <= FMOE_F64; dtype += FMOE_F64 - FMOE_F32) {
            call_begin(&c, CALL_GMM, (fmoe_pass)pass, dtype);
            bad_index(&c, c.a.gmm.sizes, 2, -1, "sizes[2]");
            bad_index(&c, c.a.gmm.sizes, 2, 100, "sizes[2]");
            bad_index(&c, c.a.gmm.sizes, 3, N_R - 2, "sizes[3]"); /* with the three rows before it one too many */
            bad_index(&c, c.a.gmm.sizes, 3, INT64_MAX, "sizes[3]");
            c.a.gmm.cumulative = 1;
            bad_index(&c, c.a.gmm.sizes, 2, 0, "sizes[2]"); /* falls */
            bad_index(&c, c.a.gmm.sizes, 3, N_R + 1, "sizes[3]");
            call_end(&c);
        }
    }
    call_begin(&c, CALL_PERMUTE, FMOE_BACKWARD, FMOE_F32);
    bad_index(&c, c.a.permute.map, 9, N_R, "map[9]");
    bad_index(&c, c.a.permute.map, 9, INT32_MIN, "map[9]");
    call_end(&c);
}

/* A layer f32 forward and backward, on its own ids and p. */
typedef struct both {
    api_call f, b;
} both;

static void both_begin(both *x, uint32_t flags)
{
    call_begin(&x->f, CALL_EXPERTS, FMOE_FORWARD, FMOE_F32);
    call_begin(&x->b, CALL_EXPERTS, FMOE_BACKWARD, FMOE_F32);
    x->f.d.flags |= flags;
    fmoe_plan_destroy(&x->f.plan);
    fmoe_plan_destroy(&x->b.plan);
    REQUIRE(fmoe_plan_create(&x->f.plan, &x->f.d) == FMOE_OK);
    x->b.plan = x->f.plan;
    fmoe_experts_args *f = &x->f.a.experts, *b = &x->b.a.experts;
    b->x = f->x, b->ids = f->ids, b->weights = f->weights, b->w = f->w, b->saved = f->saved;
}

static void both_run(both *x)
{
    CHECK_STATUS(call_make(&x->f), FMOE_OK);
    CHECK_STATUS(call_make(&x->b), FMOE_OK);
}

TEST(row13_skipped_slots_are_zero_even_with_nan_weights)
{
    for (int mark = 0; mark < 2; mark++) {
        both x;
        both_begin(&x, mark ? FMOE_SKIP_E : FMOE_SKIP_NEG1);
        const fmoe_experts_args *f = &x.f.a.experts, *b = &x.b.a.experts;
        const double skip = mark ? N_E : -1;
        tensor_list((fmoe_tensor *)(uintptr_t)f->ids, VALUES(0, 1, skip, skip, skip, 2, 1, 0, 2, skip));
        tensor_set(f->weights, 2, NAN);
        tensor_set(f->weights, 3, INFINITY);
        tensor_set(f->weights, 4, NAN);
        both_run(&x);
        for (int64_t h = 0; h < N_H; h++) {
            CHECK(tensor_get(f->out, N_H + h) == 0 && tensor_get(b->dx, N_H + h) == 0); /* token 1 has no expert */
            CHECK(isfinite(tensor_get(f->out, 2 * N_H + h)));
        }
        const int64_t skipped[] = {2, 3, 4, 9};
        for (int i = 0; i < 4; i++) CHECK(tensor_get(b->dweights, skipped[i]) == 0);
        const int64_t size = 2 * N_I * N_H;
        for (int64_t i = 0; i < size; i++) CHECK(tensor_get(b->dw.w1, 3 * size + i) == 0); /* expert 3 has no row */
        fmoe_plan_destroy(&x.f.plan);
    }
}

TEST(row14_duplicates_add)
{
    both x;
    both_begin(&x, 0);
    const fmoe_experts_args *f = &x.f.a.experts;
    tensor_fill((fmoe_tensor *)(uintptr_t)f->ids, 1);
    tensor_fill((fmoe_tensor *)(uintptr_t)f->weights, 0.25);
    both_run(&x);
    fmoe_tensor *twice = tensor_copy(f->out, FMOE_F32);
    for (int64_t t = 0; t < N_T; t++) {
        tensor_set(f->weights, 2 * t, 0.5);
        tensor_set(f->weights, 2 * t + 1, 0);
    }
    both_run(&x);
    CHECK(tensor_distance(twice, f->out) <= 1e-6);
    fmoe_plan_destroy(&x.f.plan);
}

TEST(row15_nan_and_inf_logits)
{
    const double rows[][4] = {{NAN, NAN, NAN, NAN},
                              {NAN, 1, NAN, 2},
                              {INFINITY, 1, 2, 3},
                              {-INFINITY, -INFINITY, -INFINITY, -INFINITY},
                              {1, 1, 1, 1}};
    for (int score = 0; score < 4; score++)
        for (int dtype = FMOE_F32; dtype <= FMOE_F16; dtype++) {
            api_call c;
            call_begin(&c, CALL_ROUTE, FMOE_FORWARD, dtype);
            fmoe_plan_destroy(&c.plan);
            c.d.route.score = score;
            REQUIRE(fmoe_plan_create(&c.plan, &c.d) == FMOE_OK);
            c.a.route.select_bias = NULL;
            for (int64_t i = 0; i < N_T * N_E; i++) tensor_set(c.a.route.logits, i, rows[i / N_E][i % N_E]);
            CHECK_STATUS(call_make(&c), FMOE_OK);
            const fmoe_tensor *ids = c.a.route.ids, *p = c.a.route.weights;
            for (int64_t t = 0; t < N_T; t++) {
                const double a = tensor_get(ids, 2 * t), b = tensor_get(ids, 2 * t + 1);
                CHECK(a >= 0 && a < N_E && b >= 0 && b < N_E && a != b);
            }
            CHECK_EQ(tensor_get(c.a.route.bad_rows, 0), 4);
            /* An infinity makes a softmax NaN all over its own row; a sigmoid only saturates. NaN ranks lowest. */
            if (score != FMOE_SCORE_SOFTMAX) CHECK_VALUES(tensor_view(ids, 0, 1, 1, 1), 0, 3, 1);
            CHECK_VALUES(tensor_view(ids, 0, 4, 1, 1), 0, 0, 1); /* ties: the lowest index first */
            CHECK(isfinite(tensor_get(p, 8)) && isfinite(tensor_get(p, 9)));
            call_end(&c);
        }
}

/* A bias of -Inf takes an expert out of the routing: nobody's weight but that expert's may feel it. */
TEST(row15_an_expert_that_is_shut_out)
{
    for (int score = 0; score < 4; score++)
        for (int dtype = FMOE_F32; dtype <= FMOE_F16; dtype++) {
            api_call c;
            call_begin(&c, CALL_BLOCK, FMOE_FORWARD, dtype);
            fmoe_plan_destroy(&c.plan);
            c.d.flags = 0; /* a shared expert without a gate: its weight is 1 */
            c.d.route.score = score;
            c.a.block.shared_gate = c.a.block.select_bias = NULL;
            REQUIRE(fmoe_plan_create(&c.plan, &c.d) == FMOE_OK);
            REQUIRE(fmoe_workspace_bytes(c.plan, FMOE_FORWARD, N_T, &c.run.workspace_bytes) == FMOE_OK);
            c.run.workspace = test_alloc(c.run.workspace_bytes);
            tensor_set(c.a.block.b_router, 0, -(double)INFINITY);
            CHECK_STATUS(call_make(&c), FMOE_OK);
            bool chosen = false, finite = true;
            for (int64_t i = 0; i < N_T * N_K; i++) chosen |= tensor_get(c.a.block.ids, i) == 0;
            for (int64_t i = 0; i < N_T * N_H; i++) finite &= isfinite(tensor_get(c.a.block.out, i)) != 0;
            CHECK(!chosen && finite);
            call_end(&c);
        }
}

TEST(row17_nan_stays_in_its_token)
{
    both x;
    both_begin(&x, 0);
    const fmoe_experts_args *f = &x.f.a.experts, *b = &x.b.a.experts;
    both_run(&x);
    fmoe_tensor *out = tensor_copy(f->out, FMOE_F32), *dx = tensor_copy(b->dx, FMOE_F32),
                *dp = tensor_copy(b->dweights, FMOE_F32);
    const double bad[] = {NAN, INFINITY, -INFINITY, 1e-40};
    for (int i = 0; i < 4; i++) {
        tensor_set(f->x, 2 * N_H + 1, bad[i]);
        both_run(&x);
        for (int64_t t = 0; t < N_T; t++) {
            if (t == 2) continue;
            CHECK_SAME(tensor_view(out, 0, t, 1, 1), tensor_view(f->out, 0, t, 1, 1));
            CHECK_SAME(tensor_view(dx, 0, t, 1, 1), tensor_view(b->dx, 0, t, 1, 1));
            CHECK_SAME(tensor_view(dp, 0, t, 1, 1), tensor_view(b->dweights, 0, t, 1, 1));
        }
        if (i == 0) CHECK(isnan(tensor_get(f->out, 2 * N_H)));
    }
    fmoe_plan_destroy(&x.f.plan);
}

/* T = 0 through every call: success, and weight gradients are zero. */
TEST(row18_no_tokens)
{
    for (int kind = 0; kind < CALL_KINDS; kind++)
        for (int pass = 0; pass < 2; pass++) {
            api_call c;
            if (kind == CALL_GMM_LIST) continue; /* no free size: the stacked form below has it */
            call_begin(&c, (call_kind)kind, (fmoe_pass)pass, FMOE_F32);
            for (int i = 0; i < c.n_slots; i++) {
                const fmoe_tensor *t = *c.slots[i].at;
                const int64_t rows = t->shape[0];
                const bool fixed = !strncmp(c.slots[i].name, "w", 1) && strcmp(c.slots[i].name, "weights");
                if (c.slots[i].list || fixed || (rows != N_T && rows != N_R)) continue;
                t->shape[0] = 0;
                ((fmoe_tensor *)(uintptr_t)t)->data = NULL; /* nothing there may be touched */
            }
            if (kind == CALL_GMM) tensor_fill((fmoe_tensor *)(uintptr_t)c.a.gmm.sizes, 0);
            if (call_make(&c) != FMOE_OK) TEST_FAIL("%s %d: %s", call_names[kind], pass, fmoe_last_error());
            for (int i = 0; i < c.n_slots; i++) {
                const fmoe_tensor *t = *c.slots[i].at;
                const bool gradient = c.slots[i].name[0] == 'd' && (c.slots[i].role & SLOT_OUT);
                for (int64_t j = 0; gradient && j < tensor_count(t); j++) CHECK(tensor_get(t, j) == 0);
            }
            call_end(&c);
        }
}

/* Groups of a list with no rows, with nothing to contract (y is the bias), and with no columns. */
TEST(row18_lists_with_empty_sizes)
{
    const int64_t sizes[][3] = {{3, 0, 5}, {0, 4, 5}, {2, 4, 0}, {2, 70, 3}, {0, 0, 0}}; /* m, K, N */
    enum { G = 5 };
    for (int dtype = FMOE_F32; dtype <= FMOE_F64; dtype++) {
        fmoe_desc d = FMOE_DESC_INIT;
        d.op = FMOE_OP_GROUPED_MATMUL;
        d.dtype = dtype;
        d.E = G;
        d.threads = 2;
        fmoe_plan plan;
        REQUIRE(fmoe_plan_create(&plan, &d) == FMOE_OK);
        fmoe_tensor x[G], w[G], bias[G], y[G], dx[G], dw[G], db[G];
        int64_t rows = 0;
        for (int g = 0; g < G; g++) {
            const int64_t m = sizes[g][0], K = sizes[g][1], N = sizes[g][2];
            x[g] = *tensor_fill(tensor_new(dtype, SHAPE(m, K)), 1),
            w[g] = *tensor_fill(tensor_new(dtype, SHAPE(K, N)), 2);
            bias[g] = *tensor_fill(tensor_new(dtype, SHAPE(N)), 3),
            y[g] = *tensor_fill(tensor_new(dtype, SHAPE(m, N)), 9);
            dx[g] = *tensor_fill(tensor_new(dtype, SHAPE(m, K)), 9),
            dw[g] = *tensor_fill(tensor_new(dtype, SHAPE(K, N)), 9);
            db[g] = *tensor_fill(tensor_new(dtype, SHAPE(N)), 9);
            rows += m;
        }
        fmoe_gmm_args a = {.size = sizeof a, .x = x, .w = w, .bias = bias, .y = y, .list = 1};
        fmoe_run run = FMOE_RUN_INIT;
        size_t back;
        REQUIRE(fmoe_workspace_bytes(plan, FMOE_FORWARD, rows, &run.workspace_bytes) == FMOE_OK);
        REQUIRE(fmoe_workspace_bytes(plan, FMOE_BACKWARD, rows, &back) == FMOE_OK);
        run.workspace_bytes = back > run.workspace_bytes ? back : run.workspace_bytes;
        run.workspace = test_alloc(run.workspace_bytes);
        CHECK_STATUS(fmoe_grouped_matmul_forward(plan, &a, &run), FMOE_OK);
        a.bias = NULL, a.y = NULL, a.dy = y, a.dx = dx, a.dw = dw, a.dbias = db;
        CHECK_STATUS(fmoe_grouped_matmul_backward(plan, &a, &run), FMOE_OK);
        for (int g = 0; g < G; g++) { /* x is 1, w 2, bias 3, so y is 2K + 3; and dy = y */
            const double m = (double)sizes[g][0], K = (double)sizes[g][1], N = (double)sizes[g][2], v = 2 * K + 3;
            CHECK_SAME(&y[g], tensor_fill(tensor_copy(&y[g], dtype), v));
            CHECK_SAME(&dx[g], tensor_fill(tensor_copy(&dx[g], dtype), 2 * N * v));
            CHECK_SAME(&dw[g], tensor_fill(tensor_copy(&dw[g], dtype), m * v));
            CHECK_SAME(&db[g], tensor_fill(tensor_copy(&db[g], dtype), m * v));
        }
        fmoe_plan_destroy(&plan);
    }
}

TEST(row18_every_token_skipped)
{
    both x;
    both_begin(&x, FMOE_SKIP_NEG1);
    const fmoe_experts_args *f = &x.f.a.experts, *b = &x.b.a.experts;
    tensor_fill((fmoe_tensor *)(uintptr_t)f->ids, -1);
    both_run(&x);
    const fmoe_tensor *zero[] = {f->out, b->dx, b->dweights, b->dw.w1, b->dw.w2, b->dw.b1, b->dw.b2};
    for (int i = 0; i < 7; i++)
        for (int64_t j = 0; j < tensor_count(zero[i]); j++) CHECK(tensor_get(zero[i], j) == 0);
    fmoe_plan_destroy(&x.f.plan);
}
