/* SPDX-License-Identifier: Apache-2.0
 *
 * test_ascend_ep.c - expert parallelism on the simulated NPU against one process on it: drawn layers, the bound of the
 * lean mode, a capacity, and what the host waits for. FMOE_EP_DRAWS: layers of each test. */
#include "ep_ranks.h"

static int draws(void)
{
    const char *const more = getenv("FMOE_EP_DRAWS");
    return more ? atoi(more) : 24;
}

/* A rank with one expert multiplies by Mm, which sums otherwise than GroupedMatmul. */
static bool has_lone_expert(const ep_layer *l)
{
    for (int r = 0; r < l->ranks; r++) {
        int64_t n = 0;
        for (int64_t i = 0; i < (l->placements ? l->placements : l->d.E); i++)
            n += (l->placements ? l->rank[i] : ep_owner(l, i)) == r;
        if (n == 1) return true;
    }
    return false;
}

static ep_layer *draw(int ranks, int dtype, int mode, bool lone)
{
    ep_layer *l = npu_draw(ranks, dtype, mode);
    while (has_lone_expert(l) != lone) l = npu_draw(ranks, dtype, mode);
    return l;
}

static void same_bits(int dtype, int mode)
{
    hccl_load();
    for (int i = 0; i < draws() && !test_failures; i++) {
        ep_layer *l = draw(1 + i % EP_RANKS, dtype, mode, false);
        npu_one_process(l);
        const npu_group *const g = npu_layer(l, i % 2);
        for (int r = 0; r < l->ranks; r++) ep_compare(l, g->r[r].share, r);
        if (test_failures) describe_draw(l, i);
    }
}

NPU_TEST(exact_f32) { same_bits(FMOE_F32, FMOE_EP_EXACT); }
NPU_TEST(exact_bf16) { same_bits(FMOE_BF16, FMOE_EP_EXACT); }
NPU_TEST(exact_f16) { same_bits(FMOE_F16, FMOE_EP_EXACT); }
NPU_TEST(lean_f32) { same_bits(FMOE_F32, FMOE_EP_LEAN); } /* dp and weight gradients */
NPU_TEST(lean_bf16) { same_bits(FMOE_BF16, FMOE_EP_LEAN); }

/* ---- what is not a promise of bits ---- */

static double error_of(const fmoe_tensor *got, const fmoe_tensor *want, int64_t from)
{
    double error = 0, norm = 0;
    for (int64_t i = 0; i < tensor_count(got); i++) {
        const double w = tensor_get(want, from + i), d = tensor_get(got, i) - w;
        error += d * d;
        norm += w * w;
    }
    return norm > 0 ? sqrt(error / norm) : sqrt(error);
}

/* Relative errors of a rank's results against one process. */
static void near(const ep_layer *l, const ep_rank *s, int r, double bound)
{
    const int64_t at = l->at[r], H = l->d.H, k = l->d.k;
    if (s->status) {
        TEST_FAIL("rank %d: %s", r, s->error);
        return;
    }
    const double errors[] = {error_of(s->out, l->out, at * H), error_of(s->dx, l->dx, at * H),
                             error_of(s->dp, l->dp, at * k)};
    static const char *const names[] = {"out", "dx", "dp"};
    for (int i = 0; i < 3; i++)
        if (!(errors[i] <= bound)) TEST_FAIL("rank %d: error of %s is %g, bound %g", r, names[i], errors[i], bound);
    for (int i = 0; i < 8; i++)
        for (int64_t j = 0; s->dw[i] && j < s->n_local; j++) {
            const int64_t n = tensor_count(l->dw[i]) / l->d.E;
            const double error = error_of(tensor_view(s->dw[i], 0, j, 1, 1), l->dw[i], s->local[j] * n);
            if (!(error <= bound)) TEST_FAIL("rank %d: error of gradient %d is %g, bound %g", r, i, error, bound);
        }
}

static void all_near(int dtype, int mode, bool lone, double bound)
{
    hccl_load();
    for (int i = 0; i < draws() && !test_failures; i++) {
        ep_layer *l = draw(1 + i % EP_RANKS, dtype, mode, lone);
        npu_one_process(l);
        const npu_group *const g = npu_layer(l, i % 2);
        for (int r = 0; r < l->ranks; r++) near(l, g->r[r].share, r, bound);
        if (test_failures) describe_draw(l, i);
    }
}

NPU_TEST(lean_is_near_f32) { all_near(FMOE_F32, FMOE_EP_LEAN, false, 1e-5); }
NPU_TEST(lean_is_near_bf16) { all_near(FMOE_BF16, FMOE_EP_LEAN, false, 0.02); }
NPU_TEST(lone_experts_are_near_f32) { all_near(FMOE_F32, FMOE_EP_EXACT, true, 1e-5); }
NPU_TEST(lone_experts_are_near_bf16) { all_near(FMOE_BF16, FMOE_EP_EXACT, true, 0.04); }
NPU_TEST(lean_lone_experts_are_near_f32) { all_near(FMOE_F32, FMOE_EP_LEAN, true, 1e-5); }

/* ---- the same bits every run: whenever the device gets to work, and however often the layer was used ---- */

NPU_TEST(again_and_late)
{
    hccl_load();
    for (int i = 0; i < 6; i++) {
        ep_layer *l = draw(2 + i % 3, i % 2 ? FMOE_BF16 : FMOE_F32, i % 2, false);
        const npu_group *const first = npu_layer(l, i % 2);
        npu.set("delay_us", 300);
        npu_group *const g = npu_start(l, i % 2);
        npu_create(g);
        for (int again = 0; again < 3; again++) npu_run(g);
        npu_fetch(g);
        npu_stop(g);
        npu.set("delay_us", 0);
        for (int r = 0; r < l->ranks; r++) {
            const ep_rank *const a = first->r[r].share, *const b = g->r[r].share;
            if (b->status) TEST_FAIL("rank %d: %s", r, b->error);
            CHECK_EQ(ep_differ(b->out, a->out, 0) + ep_differ(b->dx, a->dx, 0) + ep_differ(b->dp, a->dp, 0), 0);
            for (int w = 0; w < 8; w++)
                if (a->dw[w]) CHECK_EQ(ep_differ(b->dw[w], a->dw[w], 0), 0);
        }
        if (test_failures) describe_draw(l, i);
    }
}

/* ---- a capacity: the first rows to a rank go, later ones skip it, as if their slots were marked ---- */

static int64_t mark_dropped(const ep_layer *l, int r, int64_t most)
{
    int64_t sent[EP_RANKS] = {0}, dropped = 0;
    for (int64_t t = l->at[r]; t < l->at[r + 1]; t++) {
        int to[EP_RANKS] = {0};
        for (int64_t j = 0; j < l->d.k; j++) {
            const int64_t e = (int64_t)tensor_get(l->ids, t * l->d.k + j);
            if (e < 0) continue;
            const int32_t d = ep_owner(l, e);
            if (!to[d]) to[d] = sent[d] < most ? (sent[d]++, 1) : 2;
            if (to[d] == 2) tensor_set(l->ids, t * l->d.k + j, -1), dropped++;
        }
    }
    return dropped;
}

static void capacity(int mode)
{
    hccl_load();
    for (int i = 0; i < draws() && !test_failures; i++) {
        ep_layer *l = draw(1 + i % 4, FMOE_F32, mode, false);
        const int64_t most = 1 + test_below(12);
        int64_t dropped[EP_RANKS];
        fmoe_tensor *const given = tensor_copy(l->ids, fmoe_tensor_dtype(l->ids)), *count[EP_RANKS];
        for (int r = 0; r < l->ranks; r++) dropped[r] = mark_dropped(l, r, most);
        npu_one_process(l);
        l->ids = given;
        npu_group *const g = npu_start(l, i % 2);
        for (int r = 0; r < l->ranks; r++) {
            g->r[r].share->desc.capacity = most;
            g->r[r].args.dropped = count[r] = to_npu(tensor_fill(tensor_new(I64, SHAPE(1, 1)), -7));
        }
        npu_create(g);
        npu_run(g);
        npu_fetch(g);
        for (int r = 0; r < l->ranks; r++) {
            ep_compare(l, g->r[r].share, r);
            CHECK_EQ((int64_t)tensor_get(from_npu(count[r]), 0), dropped[r]);
            CHECK_EQ(g->r[r].share->stats.dropped, dropped[r]);
        }
        npu_stop(g);
        if (test_failures) describe_draw(l, i);
    }
}

NPU_TEST(capacity_exact) { capacity(FMOE_EP_EXACT); }
NPU_TEST(capacity_lean) { capacity(FMOE_EP_LEAN); }

/* ---- what the host waits for, and what a second call allocates ---- */

static const char *const allocations[] = {"aclrtMalloc", "aclrtMallocHost"};

NPU_TEST(second_calls_allocate_nothing)
{
    hccl_load();
    ep_layer *l = draw(3, FMOE_BF16, FMOE_EP_EXACT, false);
    while (l->chunks > 1 || !l->T[0]) l = draw(3, FMOE_BF16, FMOE_EP_EXACT, false);
    npu_group *const g = npu_start(l, 1);
    npu_create(g);
    npu_run(g);
    npu_run(g);
    npu.reset();
    npu_run(g);
    for (int i = 0; i < 2; i++)
        if (npu.get(allocations[i])) TEST_FAIL("%s: %" PRId64, allocations[i], npu.get(allocations[i]));
    CHECK_EQ(npu.get("syncs"), 0); /* the host asks events, by their deadline */
    CHECK_EQ(npu.get("hidden_copies"), 0);
    CHECK_EQ(npu.get("aicpu"), 0);
    npu_stop(g);
}

NPU_TEST(inference)
{
    hccl_load();
    for (int i = 0; i < 6; i++) {
        ep_layer *l = draw(1 + i, FMOE_BF16, FMOE_EP_EXACT, false);
        npu_one_process(l);
        npu_group *const g = npu_start(l, i % 2);
        npu_create(g);
        for (int r = 0; r < l->ranks; r++) g->r[r].args.inference = 1;
        for (int r = 0; r < l->ranks; r++) REQUIRE(!pthread_create(&g->r[r].thread, NULL, npu_infer_rank, &g->r[r]));
        for (int r = 0; r < l->ranks; r++) pthread_join(g->r[r].thread, NULL);
        npu_fetch(g);
        for (int r = 0; r < l->ranks; r++) {
            if (g->r[r].share->status) TEST_FAIL("rank %d: %s", r, g->r[r].share->error);
            CHECK_EQ(ep_differ(g->r[r].share->out, l->out, l->at[r] * l->d.H), 0);
        }
        npu_stop(g);
        if (test_failures) describe_draw(l, i);
    }
}
