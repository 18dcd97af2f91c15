/* SPDX-License-Identifier: Apache-2.0
 *
 * test_ascend_ep_faults.c - expert parallelism on the simulated NPU when something goes wrong: wrong arguments, peers
 * that lie or never come, and every call of CANN failing in turn. An error on the ranks that can know, nothing used
 * that was not announced, nothing left behind, nothing that hangs. */
#include <time.h>

#include "../../src/device.h" /* pairs */
#include "ep_ranks.h"

enum { DEADLINE = 200 }; /* ms */

static int64_t milliseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Each rank has experts and tokens. */
static ep_layer *small(int dtype, int mode, int ranks)
{
    for (;;) {
        ep_layer *l = npu_draw(ranks, dtype, mode);
        bool good = !l->placements && l->d.E >= 2 * ranks && l->d.H <= 24 && l->d.I <= 16 && l->chunks == 1;
        for (int r = 0; r < ranks; r++) good = good && l->T[r] * l->d.k >= l->d.E;
        for (int64_t i = 0; good && i < l->at[ranks] * l->d.k; i++) /* no marks, and something for every rank */
            tensor_set(l->ids, i, (double)(i % l->d.E));
        if (good && l->d.k > 1) return l;
    }
}

static void has_error(const npu_group *g, int r, const char *text)
{
    const ep_rank *const s = g->r[r].share;
    if (!s->status || !strstr(s->error, text)) TEST_FAIL("rank %d: '%s' has no '%s'", r, s->error, text);
}

/* ---- arguments ---- */

static void wrong_id(int on_device)
{
    hccl_load();
    ep_layer *l = small(FMOE_F32, FMOE_EP_EXACT, 3);
    const int64_t at = l->at[1] * l->d.k + 1;
    const double was = tensor_get(l->ids, at);
    tensor_set(l->ids, at, 77);
    npu_group *const g = npu_start(l, on_device);
    npu_create(g);
    npu_run(g);
    has_error(g, 0, "rank 1 could not begin: FMOE_ERR_INDEX");
    has_error(g, 1, "rank 1 of 3, count: ids[0,1] is 77, must be in [0,");
    has_error(g, 2, "rank 1 could not begin: FMOE_ERR_INDEX");
    CHECK_EQ(g->r[1].share->status, FMOE_ERR_INDEX);
    tensor_set(l->ids, at, was); /* the next call of the same layers works */
    npu_one_process(l);
    g->r[1].args.ids = to_npu(tensor_view(l->ids, 0, l->at[1], l->T[1], 1));
    npu_run(g);
    npu_fetch(g);
    for (int r = 0; r < 3; r++) ep_compare(l, g->r[r].share, r);
    npu_stop(g);
    npu_nothing_left();
}

NPU_TEST(wrong_ids_are_told)
{
    wrong_id(0);
    wrong_id(1);
}

NPU_TEST(tensors_of_another_device)
{
    ep_layer *l = small(FMOE_F32, FMOE_EP_EXACT, 2);
    npu_group *const g = npu_start(l, 0);
    npu_create(g);
    g->r[0].args.weights = g->r[0].share->args.weights; /* of the host */
    npu_run(g);
    has_error(g, 0, "weights is on device type 1");
    has_error(g, 1, "rank 0 could not begin");
    npu_stop(g);
}

/* ---- peers that lie ---- */

typedef struct liar {
    fmoe_exchange real;
    npu_rank *rank;
    int what;            /* LIE_COUNTS and so on */
    fmoe_pair *told[16]; /* in place of pairs */
    int n;
} liar;

enum { LIE_COUNTS, LIE_EXPERT, LIE_FIRST, LIE_SLOTS, LIES };

static fmoe_status lie_counts(void *ctx, const int64_t *send, int64_t *recv, int64_t n, int64_t timeout_ms)
{
    liar *const x = ctx;
    if (x->what != LIE_COUNTS) return x->real.counts(x->real.ctx, send, recv, n, timeout_ms);
    int64_t *const lie = memcpy(malloc((size_t)(x->real.ranks * n) * 8), send, (size_t)(x->real.ranks * n) * 8);
    for (int r = 0; r < x->real.ranks; r++) lie[r * n + 3] = r ? INT64_MAX : -1;
    const fmoe_status answer = x->real.counts(x->real.ctx, lie, recv, n, timeout_ms);
    free(lie);
    return answer;
}

/* Pairs: the last one of each rank says something else than the counts did. */
static fmoe_status lie_begin(void *ctx, const void *send, const int64_t *send_rows, void *recv,
                             const int64_t *recv_rows, int64_t row_bytes, void **request)
{
    liar *const x = ctx;
    if (x->what == LIE_COUNTS || row_bytes != sizeof(fmoe_pair) || x->n == 16)
        return x->real.begin(x->real.ctx, send, send_rows, recv, recv_rows, row_bytes, request);
    int64_t all = 0;
    for (int r = 0; r < x->real.ranks; r++) all += send_rows[r];
    const size_t bytes = (size_t)all * sizeof(fmoe_pair);
    fmoe_pair *const lie = x->told[x->n++] = malloc(bytes + 1);
    if (x->real.on_device) {
        npu.sync(x->rank->stream);
        npu.copy(lie, bytes, send, bytes, 2);
    } else memcpy(lie, send, bytes);
    for (int64_t r = 0, at = 0; r < x->real.ranks; r++) {
        at += send_rows[r];
        if (!send_rows[r]) continue;
        if (x->what == LIE_EXPERT) lie[at - 1].expert |= 1000;
        if (x->what == LIE_FIRST) lie[at - 1].expert ^= PAIR_FIRST;
        if (x->what == LIE_SLOTS)
            for (int64_t i = at - send_rows[r]; i < at; i++) lie[i].expert &= ~PAIR_FIRST;
    }
    if (!x->real.on_device) return x->real.begin(x->real.ctx, lie, send_rows, recv, recv_rows, row_bytes, request);
    npu.copy((void *)(uintptr_t)send, bytes, lie, bytes, 1);
    return x->real.begin(x->real.ctx, send, send_rows, recv, recv_rows, row_bytes, request);
}

static fmoe_status plain_wait(void *ctx, void *request, int64_t timeout_ms)
{
    return ((liar *)ctx)->real.wait(((liar *)ctx)->real.ctx, request, timeout_ms);
}

static void plain_abort(void *ctx, const char *why) { ((liar *)ctx)->real.abort(((liar *)ctx)->real.ctx, why); }

/* What rank 0 says is refused by the others before anything is computed with it. */
static void lies(int on_device, int mode, int what)
{
    hccl_load();
    ep_layer *l = small(FMOE_F32, mode, 3);
    npu_group *const g = npu_start(l, on_device);
    liar x = {.real = g->r[0].x, .rank = &g->r[0], .what = what};
    g->r[0].x.ctx = &x;
    g->r[0].x.counts = lie_counts, g->r[0].x.begin = lie_begin, g->r[0].x.wait = plain_wait;
    g->r[0].x.abort = plain_abort;
    for (int r = 0; r < 3; r++) g->r[r].share->desc.timeout_ms = on_device ? DEADLINE : 20000;
    npu_create(g);
    npu_run(g);
    for (int r = 1; r < 3; r++) {
        const ep_rank *const s = g->r[r].share;
        CHECK_EQ(s->status, FMOE_ERR_EXCHANGE);
        const char *const text = what == LIE_COUNTS ? "rank 0 announces " : "rank 0 ";
        if (on_device || !strstr(s->error, "told by")) has_error(g, r, text);
    }
    if (!on_device) CHECK_EQ(g->r[0].share->status, FMOE_ERR_EXCHANGE); /* HCCL tells nobody */
    if (g->hccl) hccl.end(g->hccl);
    npu_stop(g);
    npu_nothing_left();
    for (int i = 0; i < x.n; i++) free(x.told[i]);
}

NPU_TEST(lies_are_refused)
{
    npu.set("quiet", 1);
    for (int i = 0; i < LIES * 4 && !test_failures; i++) {
        lies(i & 1, i >> 1 & 1, i >> 2);
        if (test_failures) printf("  engine %d, mode %d, lie %d\n", i & 1, i >> 1 & 1, i >> 2);
    }
    npu.forgive(); /* exchanges that were ended have told less than was waited for */
}

/* ---- peers that never come ---- */

static void *count_alone(void *arg)
{
    npu_rank *const n = arg;
    fmoe_ep_call *call = NULL;
    n->share->status = fmoe_ep_count(n->ep, &n->args, &call);
    fmoe_ep_call_free(&call);
    return NULL;
}

/* Rank 1 does nothing at all, or nothing after the count. */
static npu_group *left_alone(bool counts)
{
    hccl_load();
    ep_layer *l = small(FMOE_BF16, FMOE_EP_EXACT, 2);
    npu_group *const g = npu_start(l, 1);
    for (int r = 0; r < 2; r++) g->r[r].share->desc.timeout_ms = DEADLINE;
    npu_create(g);
    const int64_t began = milliseconds();
    REQUIRE(!pthread_create(&g->r[0].thread, NULL, npu_run_rank, &g->r[0]));
    if (counts) REQUIRE(!pthread_create(&g->r[1].thread, NULL, count_alone, &g->r[1]));
    pthread_join(g->r[0].thread, NULL);
    if (counts) pthread_join(g->r[1].thread, NULL);
    const int64_t took = milliseconds() - began;
    CHECK_EQ(g->r[0].share->status, FMOE_ERR_EXCHANGE);
    has_error(g, 0, counts ? "rank 0 of 2, dispatch: " : "rank 0 of 2, count: ");
    has_error(g, 0, "by the deadline");
    CHECK(took >= DEADLINE - 50 && took < 100 * DEADLINE); /* a busy machine is slow */
    return g;
}

NPU_TEST(deadlines)
{
    npu.set("quiet", 1);
    for (int counts = 0; counts < 2; counts++) {
        npu_group *const g = left_alone(counts);
        fmoe_ep_call *call = NULL;
        CHECK_STATUS(fmoe_ep_count(g->r[0].ep, &g->r[0].args, &call), FMOE_ERR_EXCHANGE);
        CHECK_ERROR_HAS("make a new one");
        hccl.end(g->hccl);
        npu_stop(g);
        npu_nothing_left();
    }
    npu.forgive();
}

NPU_TEST(trouble_of_the_library)
{
    hccl_load();
    ep_layer *l = small(FMOE_BF16, FMOE_EP_LEAN, 2);
    npu_group *const g = npu_start(l, 1);
    npu_create(g);
    hccl.fail(hccl.comm(g->hccl, 0), 15);
    REQUIRE(!pthread_create(&g->r[0].thread, NULL, npu_run_rank, &g->r[0]));
    pthread_join(g->r[0].thread, NULL);
    has_error(g, 0, "HCCL: the line is cut");
    hccl.end(g->hccl);
    npu_stop(g);
    npu_nothing_left();
}

/* ---- every call of CANN ---- */

static const char *const groups_of_calls[] = {"aclnn*",    "aclCreate*",   "aclrtM*",     "aclrtSync*",
                                              "aclrtSet*", "aclrtRecord*", "aclrtCreate*"};

static void live_nothing(const char *function, int64_t n, int64_t before)
{
    npu_nothing_left();
    if (npu.get("live_allocations") != before)
        TEST_FAIL("%s %" PRId64 ": %" PRId64 " allocations, not %" PRId64, function, n, npu.get("live_allocations"),
                  before);
}

NPU_TEST(every_call_of_create_fails)
{
    ep_layer *l = small(FMOE_BF16, FMOE_EP_EXACT, 2);
    npu_group *const g = npu_start(l, 0);
    const int64_t before = npu.get("live_allocations");
    int64_t n = 1;
    for (;; n++) {
        REQUIRE(n < 500);
        const int64_t injected = npu.get("injected");
        npu.fail("*", n, 507899);
        const fmoe_status s = fmoe_ep_create(&g->r[0].ep, &g->r[0].share->desc);
        npu.fail("", 0, 0);
        fmoe_ep_destroy(&g->r[0].ep);
        live_nothing("create", n, before);
        if (npu.get("injected") == injected) break;
        if (s && !strstr(fmoe_last_error(), "Ascend: acl")) TEST_FAIL("call %" PRId64 ": %s", n, fmoe_last_error());
    }
    CHECK(n > 1);
    npu_stop(g);
}

/* Ranks are threads, so which of them a failure meets is open: that one names it, the other is told (with HCCL it meets
 * its deadline, or notices nothing before the next call). */
static void sweep(ep_layer *l, int on_device, const char *function)
{
    hccl_load();
    npu_one_process(l);
    npu_group *const g = npu_start(l, on_device);
    npu_part(g);
    for (int r = 0; r < 2; r++) g->r[r].share->desc.timeout_ms = on_device ? DEADLINE : 20000;
    const int64_t before = npu.get("live_allocations");
    ep_rank *const a = g->r[0].share, *const b = g->r[1].share;
    bool met = true;
    int64_t n = 1;
    int64_t untold = 0;
    for (; met; n++) {
        REQUIRE(n < 10000 && !test_failures);
        const int64_t injected = npu.get("injected");
        npu_connect(g);
        npu_create(g);
        a->error[0] = b->error[0] = 0;
        npu.fail(function, n, 507899);
        npu_run(g);
        npu.fail("", 0, 0);
        met = npu.get("injected") != injected;
        if (!met) npu_fetch(g);
        if (g->hccl) hccl.end(g->hccl);
        npu_part(g);
        live_nothing(function, n, before);
        const bool named = strstr(a->error, "Ascend: acl") || strstr(b->error, "Ascend: acl") ||
                           strstr(a->error, "HcclAlltoAllV") || strstr(b->error, "HcclAlltoAllV") ||
                           strstr(a->error, "no memory") || strstr(b->error, "no memory");
        if (met && !named) TEST_FAIL("%s %" PRId64 ": '%s', '%s'", function, n, a->error, b->error);
        untold += met && !(a->status && b->status); /* the other one was done */
    }
    for (int r = 0; r < 2; r++) ep_compare(l, g->r[r].share, r);
    if (!on_device) CHECK(untold <= n / 4);
    printf("  %s: %" PRId64 " calls, %" PRId64 " errors of one rank alone\n", function, n - 2, untold);
    npu_stop(g);
}

static void sweeps(int dtype, int mode)
{
    for (size_t i = 0; i < sizeof groups_of_calls / sizeof *groups_of_calls; i++) {
        npu.forgive();
        sweep(small(dtype, mode, 2), 0, groups_of_calls[i]);
    }
}

NPU_TEST(every_call_fails_exact) { sweeps(FMOE_BF16, FMOE_EP_EXACT); }
NPU_TEST(every_call_fails_lean) { sweeps(FMOE_F32, FMOE_EP_LEAN); }

NPU_TEST(calls_fail_over_hccl)
{
    npu.set("quiet", 1); /* exchanges that are ended have told less than was waited for */
    ep_layer *l = small(FMOE_BF16, FMOE_EP_EXACT, 2);
    static const char *const some[] = {"HcclAlltoAllV", "aclrtStreamWaitEvent", "aclnnIndexSelect", "aclrtMemcpyAsync"};
    for (size_t i = 0; i < 4; i++) sweep(l, 1, some[i]);
    npu.forgive();
}

/* ---- the last one: what hangs is left alone ---- */

TEST(memory_that_hccl_may_write_to_stays_taken)
{
    npu_begin();
    npu.set("quiet", 1);
    npu_group *const g = left_alone(true);
    const int64_t began = milliseconds();
    fmoe_ep_destroy(&g->r[0].ep);
    fmoe_ep_hccl_destroy(&g->r[0].engine);
    CHECK(milliseconds() - began < 60000);
    hccl.end(g->hccl);
    npu_stop(g);
    if (npu.get("violations") && !strstr(npu.violation(), "waits for")) TEST_FAIL("violation: %s", npu.violation());
    CHECK(npu.get("live_allocations") > npu_count);
}
