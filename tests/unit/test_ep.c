/* SPDX-License-Identifier: Apache-2.0
 * test_ep.c - expert parallelism on ranks that are threads: the bits of one process, the bytes that travel, faults. */
#include "ep_layer.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

static void *rank_thread(void *arg)
{
    ep_run_rank(arg);
    return NULL;
}

static void run_ranks(ep_rank **s, int ranks)
{
    pthread_t threads[EP_RANKS];
    for (int r = 0; r < ranks; r++) REQUIRE(!pthread_create(&threads[r], NULL, rank_thread, s[r]));
    for (int r = 0; r < ranks; r++) pthread_join(threads[r], NULL);
}

/* All ranks of a layer, over an engine of threads that lives for this run. */
static void run_layer(const ep_layer *l, ep_rank **s)
{
    fmoe_ep_threads *group;
    CHECK_STATUS(fmoe_ep_threads_create(&group, l->ranks), FMOE_OK);
    fmoe_exchange x[EP_RANKS];
    for (int r = 0; r < l->ranks; r++) {
        CHECK_STATUS(fmoe_ep_threads_exchange(group, r, &x[r]), FMOE_OK);
        s[r] = ep_share(l, r, &x[r]);
    }
    run_ranks(s, l->ranks);
    fmoe_ep_threads_destroy(&group);
}

static void exact(int dtype, int draws)
{
    ep_rank *s[EP_RANKS];
    for (int i = 0; i < draws; i++) {
        ep_layer *l = ep_draw(1 + i % EP_RANKS, dtype, FMOE_EP_EXACT);
        ep_one_process(l);
        run_layer(l, s);
        for (int r = 0; r < l->ranks; r++) ep_compare(l, s[r], r);
        if (test_failures) {
            printf("  draw %d: ranks %d H %d I %d E %d k %d act %d flags %u chunks %d list %d lora %d %d\n", i,
                   l->ranks, (int)l->d.H, (int)l->d.I, (int)l->d.E, (int)l->d.k, l->d.act, l->d.flags, l->chunks,
                   l->list, (int)l->d.rank1, (int)l->d.rank2);
            return;
        }
    }
}

TEST(exact_mode_has_the_bits_of_one_process_f32) { exact(FMOE_F32, 96); }
TEST(exact_mode_has_the_bits_of_one_process_bf16) { exact(FMOE_BF16, 96); }
TEST(exact_mode_has_the_bits_of_one_process_f16) { exact(FMOE_F16, 32); }

/* ---- lean ---- */

/* Each slot as a token of its own: p y (of out) or the part of dx, f32 [T*k,H]. */
static void slot_rows(const ep_layer *l, fmoe_tensor *y, fmoe_tensor *dx)
{
    const int64_t R = l->at[l->ranks] * l->d.k, H = l->d.H, k = l->d.k;
    fmoe_desc d = l->d;
    d.k = 1;
    fmoe_plan plan = 0;
    CHECK_STATUS(fmoe_plan_create(&plan, &d), FMOE_OK);
    fmoe_tensor *x = tensor_new(d.dtype, SHAPE(R, H)), *dout = tensor_new(d.dtype, SHAPE(R, H));
    for (int64_t i = 0; i < R * H; i++) {
        tensor_set(x, i, tensor_get(l->x, i / H / k * H + i % H));
        tensor_set(dout, i, tensor_get(l->dout, i / H / k * H + i % H));
    }
    fmoe_run run = FMOE_RUN_INIT;
    fmoe_experts_args a = {.size = sizeof a, .x = x, .dout = dout, .out = y};
    a.ids = tensor_over(l->ids->data, fmoe_tensor_dtype(l->ids), SHAPE(R, 1), NULL);
    a.weights = tensor_over(l->p->data, l->p_type, SHAPE(R, 1), NULL);
    ep_set_weights(&a.w, l->w, l->list, d.act < FMOE_ACT_SILU, d.I);
    fmoe_saved_bytes(plan, R, &a.saved_bytes);
    a.saved = test_alloc(a.saved_bytes);
    for (int pass = 0; pass < 2; pass++) {
        CHECK_STATUS(fmoe_workspace_bytes(plan, (fmoe_pass)pass, R, &run.workspace_bytes), FMOE_OK);
        run.workspace = test_alloc(run.workspace_bytes);
        a.dx = pass ? dx : NULL;
        CHECK_STATUS(pass ? fmoe_experts_backward(plan, &a, &run) : fmoe_experts_forward(plan, &a, &run), FMOE_OK);
    }
    fmoe_plan_destroy(&plan);
}

/* |lean - exact| against the bound of fusedmoe_ep.h. */
static void check_bound(const ep_layer *l, const ep_rank *s, int r, const fmoe_tensor *rows, const fmoe_tensor *got,
                        const fmoe_tensor *want, const char *name)
{
    const int64_t H = l->d.H, k = l->d.k;
    const double u = ep_unit(l->d.dtype), v = 0x1p-24, tiny = l->d.dtype == FMOE_F16 ? 0x1p-25 : 0;
    for (int64_t i = 0; i < l->T[r] * H && !s->status; i++) {
        const int64_t t = l->at[r] + i / H;
        double parts[EP_RANKS] = {0}, mag = 0, partial = 0;
        for (int64_t j = 0; j < k; j++) {
            const double e = tensor_get(l->ids, t * k + j), y = tensor_get(rows, (t * k + j) * H + i % H);
            if (e < 0) continue;
            parts[ep_owner(l, (int64_t)e)] += y;
            mag += fabs(y);
        }
        for (int p = 0; p < l->ranks; p++) partial += fabs(parts[p]);
        const double exact = tensor_get(want, l->at[r] * H + i), m = fmin((double)k, l->ranks);
        const double bound = 1.01 * (u * partial + u * fabs(exact) + ((double)k + m) * v * mag) + (m + 1) * tiny;
        const double off = fabs(tensor_get(got, i) - exact);
        if (off <= bound) continue;
        TEST_FAIL("%s of rank %d, element %d: off by %g, the bound is %g", name, r, (int)i, off, bound);
        return;
    }
}

static void lean(int dtype, int draws)
{
    ep_rank *s[EP_RANKS];
    for (int i = 0; i < draws && !test_failures; i++) {
        ep_layer *l = ep_draw(1 + i % EP_RANKS, dtype, FMOE_EP_LEAN);
        const int64_t R = l->at[l->ranks] * l->d.k;
        fmoe_tensor *y = tensor_new(FMOE_F32, SHAPE(R, l->d.H)), *dx = tensor_new(FMOE_F32, SHAPE(R, l->d.H));
        ep_one_process(l);
        slot_rows(l, y, dx);
        run_layer(l, s);
        for (int r = 0; r < l->ranks; r++) {
            ep_compare(l, s[r], r); /* dp and weight gradients have the bits of one process */
            check_bound(l, s[r], r, y, s[r]->out, l->out, "out");
            check_bound(l, s[r], r, dx, s[r]->dx, l->dx, "dx");
        }
    }
}

TEST(lean_mode_stays_within_its_bound_f32) { lean(FMOE_F32, 48); }
TEST(lean_mode_stays_within_its_bound_bf16) { lean(FMOE_BF16, 48); }
TEST(lean_mode_stays_within_its_bound_f16) { lean(FMOE_F16, 24); }

/* ---- what travels ---- */

TEST(bytes_are_the_fewest_there_can_be)
{
    for (int mode = 0; mode < 2; mode++)
        for (int i = 0; i < 12; i++) {
            ep_rank *s[EP_RANKS];
            ep_layer *l = ep_draw(2 + i % 7, FMOE_BF16, mode);
            run_layer(l, s);
            const int64_t H = l->d.H, k = l->d.k;
            for (int r = 0; r < l->ranks; r++) {
                int64_t rows = 0, pairs = 0;
                for (int64_t t = l->at[r]; t < l->at[r + 1]; t++) {
                    int to[EP_RANKS] = {0};
                    for (int64_t j = 0; j < k; j++) {
                        const int64_t e = (int64_t)tensor_get(l->ids, t * k + j);
                        const int32_t d = e < 0 ? r : ep_owner(l, e);
                        if (d != r) pairs++, to[d] = 1;
                    }
                    for (int d = 0; d < l->ranks; d++) rows += to[d];
                }
                const fmoe_ep_stats *st = &s[r]->stats;
                CHECK_EQ(st->rows_out, rows);
                CHECK_EQ(st->pairs_out, pairs);
                CHECK_EQ(st->bytes_out, 2 * rows * H * 2); /* x and dout */
                CHECK_EQ(st->bytes_pairs, 8 * pairs);
                CHECK_EQ(st->bytes_counts, (l->ranks - 1) * (3 + 2 * l->chunks) * 8);
                const int64_t back = mode == FMOE_EP_EXACT ? st->pairs_in * H * 4 : st->rows_in * H * 2;
                CHECK_EQ(st->bytes_back, 2 * back + 4 * st->pairs_in); /* y, dx, dp */
                CHECK_EQ(st->dropped, 0);
            }
        }
}

/* Capacity: the first rows to a rank go, later ones skip it, as if their slots were marked. */
TEST(capacity_drops_rows_and_counts_them)
{
    for (int i = 0; i < 16 && !test_failures; i++) {
        ep_rank *s[EP_RANKS];
        ep_layer *l = ep_draw(2 + i % 3, FMOE_F32, FMOE_EP_EXACT);
        const int64_t capacity = 1 + test_below(8), k = l->d.k;
        int64_t dropped[EP_RANKS] = {0};
        fmoe_tensor *given = tensor_copy(l->ids, fmoe_tensor_dtype(l->ids));
        for (int r = 0; r < l->ranks; r++) { /* what one process computes: the same with marks */
            int64_t sent[EP_RANKS] = {0};
            for (int64_t t = l->at[r]; t < l->at[r + 1]; t++) {
                int to[EP_RANKS] = {0};
                for (int64_t j = 0; j < k; j++) {
                    const int64_t e = (int64_t)tensor_get(given, t * k + j);
                    if (e < 0) continue;
                    const int32_t d = ep_owner(l, e);
                    if (!to[d]) to[d] = sent[d] < capacity ? (sent[d]++, 1) : 2;
                    if (to[d] == 2) tensor_set(l->ids, t * k + j, -1), dropped[r]++;
                }
            }
        }
        ep_one_process(l);
        fmoe_ep_threads *group;
        fmoe_exchange x[EP_RANKS];
        CHECK_STATUS(fmoe_ep_threads_create(&group, l->ranks), FMOE_OK);
        for (int r = 0; r < l->ranks; r++) {
            fmoe_ep_threads_exchange(group, r, &x[r]);
            s[r] = ep_share(l, r, &x[r]);
            s[r]->desc.capacity = capacity;
            s[r]->args.ids = tensor_view(given, 0, l->at[r], l->T[r], 1);
        }
        run_ranks(s, l->ranks);
        fmoe_ep_threads_destroy(&group);
        for (int r = 0; r < l->ranks; r++) {
            ep_compare(l, s[r], r);
            CHECK_EQ(s[r]->stats.dropped, dropped[r]);
        }
    }
}

/* Replicas: out, dx and dp have the bits of one process; weight gradients of the copies add up to its own. */
TEST(replicas_share_the_work_of_an_expert)
{
    for (int i = 0; i < 16 && !test_failures; i++) {
        ep_rank *s[EP_RANKS];
        ep_layer *l = ep_draw(2 + i % 4, FMOE_F32, FMOE_EP_EXACT);
        l->list = 0;
        l->d.flags &= ~(uint32_t)FMOE_BIAS;
        ep_weights(l, l->d.E, FMOE_F32, l->w);
        ep_weights(l, l->d.E, FMOE_F32, l->dw);
        for (int j = 0; j < 8; j++)
            if (l->w[j]) tensor_random(l->w[j], 0.3);
        l->placements = 0;
        for (int64_t e = 0; e < l->d.E; e++)
            for (int32_t r = 0; r < l->ranks; r++)
                if (r == (int32_t)(e % l->ranks) || (test_below(2) && l->placements < 40)) {
                    l->expert[l->placements] = (int32_t)e;
                    l->rank[l->placements++] = r;
                }
        ep_one_process(l);
        run_layer(l, s);
        for (int64_t e = 0; e < l->d.E; e++) {
            const int64_t n = tensor_count(l->dw[0]) / l->d.E;
            for (int64_t j = 0; j < n; j++) {
                double sum = 0;
                for (int r = 0; r < l->ranks; r++)
                    for (int64_t q = 0; q < s[r]->n_local; q++)
                        if (s[r]->local[q] == e) sum += tensor_get(s[r]->dw[0], q * n + j);
                const double want = tensor_get(l->dw[0], e * n + j);
                if (fabs(sum - want) > 1e-4 * (1 + fabs(want))) TEST_FAIL("expert %d: %g, not %g", (int)e, sum, want);
            }
        }
        for (int r = 0; r < l->ranks; r++) {
            memset(s[r]->dw, 0, sizeof s[r]->dw);
            ep_compare(l, s[r], r);
        }
    }
}

/* A NaN in the tokens of one rank stays in the rows it belongs to. */
TEST(nan_stays_where_it_is)
{
    ep_rank *s[EP_RANKS];
    ep_layer *l = ep_draw(4, FMOE_BF16, FMOE_EP_EXACT);
    for (int64_t i = 0; i < l->T[1] * l->d.H; i++) tensor_set(l->x, l->at[1] * l->d.H + i, NAN);
    ep_one_process(l);
    run_layer(l, s);
    for (int r = 0; r < l->ranks; r++) {
        CHECK_STATUS(s[r]->status, FMOE_OK);
        if (r != 1) CHECK_EQ(ep_differ(s[r]->out, l->out, l->at[r] * l->d.H), 0);
    }
}

/* ---- overlap ---- */

/* Products that take as long as they are told, and a line that takes its time for each byte: both sleep, so that the
 * machine's load does not count. */
typedef struct slow {
    fmoe_exchange real;
    double compute_s, second_per_byte, line_free;
    int regions; /* of products in one pass, counted while compute_s is 0 */
    ep_rank *share;
    double took;
} slow;

typedef struct slow_request {
    void *real;
    double arrives;
} slow_request;

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void sleep_until(double when)
{
    const double s = when - now_s();
    if (s > 0) nanosleep(&(struct timespec){(time_t)s, (long)(1e9 * (s - (double)(time_t)s))}, NULL);
}

static void slow_parallel(void *ctx, int n, void (*fn)(void *arg, int worker), void *arg)
{
    slow *w = ctx;
    const double end = now_s() + w->compute_s / (w->regions ? w->regions : 1);
    for (int i = 0; i < n; i++) fn(arg, i);
    if (w->compute_s > 0) sleep_until(end);
    else w->regions++;
}

static fmoe_status slow_counts(void *ctx, const int64_t *send, int64_t *recv, int64_t n, int64_t timeout_ms)
{
    slow *w = ctx;
    return w->real.counts(w->real.ctx, send, recv, n, timeout_ms);
}

static fmoe_status slow_begin(void *ctx, const void *send, const int64_t *send_rows, void *recv,
                              const int64_t *recv_rows, int64_t row_bytes, void **request)
{
    slow *w = ctx;
    slow_request *q = malloc(sizeof *q);
    if (!q) abort();
    const double start = now_s() > w->line_free ? now_s() : w->line_free;
    w->line_free = start;
    for (int r = 0; r < w->real.ranks; r++)
        w->line_free += r == w->real.rank ? 0 : (double)(recv_rows[r] * row_bytes) * w->second_per_byte;
    q->arrives = w->line_free;
    *request = q;
    return w->real.begin(w->real.ctx, send, send_rows, recv, recv_rows, row_bytes, &q->real);
}

static fmoe_status slow_wait(void *ctx, void *request, int64_t timeout_ms)
{
    slow *w = ctx;
    slow_request *q = request;
    const fmoe_status status = w->real.wait(w->real.ctx, q->real, timeout_ms);
    sleep_until(q->arrives);
    free(q);
    return status;
}

static void slow_abort(void *ctx, const char *why) { ((slow *)ctx)->real.abort(((slow *)ctx)->real.ctx, why); }

static void *slow_forward(void *arg)
{
    slow *w = arg;
    fmoe_ep *ep = NULL;
    ep_rank *s = w->share;
    s->args.inference = 1;
    s->status = fmoe_ep_create(&ep, &s->desc);
    for (int i = 0; i < 2 && !s->status; i++) { /* one to count, one to measure */
        const double compute = w->compute_s, line = w->second_per_byte;
        if (i == 0) w->compute_s = w->second_per_byte = 0;
        const double start = now_s();
        s->status = fmoe_ep_forward(ep, &s->args, NULL);
        w->took = now_s() - start;
        w->compute_s = compute;
        w->second_per_byte = line;
    }
    if (s->status) snprintf(s->error, sizeof s->error, "%s", fmoe_last_error());
    fmoe_ep_destroy(&ep);
    return NULL;
}

/* Seconds of a forward on two ranks whose products take compute_s, and whose rows take half of that. */
static double overlapped(int chunks, double compute_s)
{
    ep_layer *l = ep_draw(2, FMOE_F32, FMOE_EP_LEAN);
    while (l->d.E < 4 || l->d.k < 2 || l->placements) l = ep_draw(2, FMOE_F32, FMOE_EP_LEAN);
    l->chunks = chunks;
    l->T[0] = l->T[1] = 64;
    l->at[1] = 64;
    l->at[2] = 128;
    l->x = tensor_random(tensor_new(FMOE_F32, SHAPE(128, l->d.H)), 1);
    l->p = tensor_random(tensor_new(FMOE_F32, SHAPE(128, l->d.k)), 1);
    l->dout = l->x;
    l->p_type = FMOE_F32;
    l->ids = tensor_random_int(tensor_new(I32, SHAPE(128, l->d.k)), l->d.E);
    for (int64_t t = 0; t < 128; t++) tensor_set(l->ids, t * l->d.k, (double)(t % l->d.E)); /* even over time */
    fmoe_ep_threads *group;
    fmoe_exchange x[2];
    slow w[2];
    fmoe_desc d[2];
    pthread_t threads[2];
    double most = 0;
    CHECK_STATUS(fmoe_ep_threads_create(&group, 2), FMOE_OK);
    for (int r = 0; r < 2; r++) {
        w[r] = (slow){.compute_s = compute_s};
        fmoe_ep_threads_exchange(group, r, &w[r].real);
        x[r] = (fmoe_exchange){.size = sizeof x[r], .rank = r, .ranks = 2, .ctx = &w[r]};
        x[r].counts = slow_counts;
        x[r].begin = slow_begin;
        x[r].wait = slow_wait;
        x[r].abort = slow_abort;
        w[r].share = ep_share(l, r, &x[r]);
        d[r] = l->d;
        d[r].threads = 2;
        d[r].parallel = slow_parallel;
        d[r].parallel_ctx = &w[r];
        w[r].share->desc.layer = &d[r];
        int64_t rows = 0; /* of the other rank that come here, and of this one that come home */
        for (int64_t t = 0; t < 128; t++) {
            int away = 0;
            for (int64_t j = 0; j < l->d.k; j++) {
                const int64_t e = (int64_t)tensor_get(l->ids, t * l->d.k + j);
                away |= ep_owner(l, e) != t / 64 && (t / 64 == r || ep_owner(l, e) == r);
            }
            rows += away;
        }
        w[r].second_per_byte = 0.5 * compute_s / (double)(rows * l->d.H * 4);
    }
    for (int r = 0; r < 2; r++) REQUIRE(!pthread_create(&threads[r], NULL, slow_forward, &w[r]));
    for (int r = 0; r < 2; r++) pthread_join(threads[r], NULL);
    fmoe_ep_threads_destroy(&group);
    for (int r = 0; r < 2; r++) {
        if (w[r].share->status) TEST_FAIL("rank %d: %s", r, w[r].share->error);
        if (w[r].took > most) most = w[r].took;
    }
    return most;
}

TEST(chunks_hide_the_exchange_behind_the_products)
{
    const double compute = 0.4;
    double whole = 9, cut = 9;
    for (int i = 0; i < 3 && cut > 1.15 * compute; i++) { /* the best of three: a busy machine wakes sleepers late */
        whole = fmin(whole, overlapped(1, compute));
        cut = fmin(cut, overlapped(8, compute));
    }
    printf("  products %.3f s, rows %.3f s: %.3f s at once, %.3f s in 8 chunks\n", compute, compute / 2, whole, cut);
    CHECK(whole >= 1.45 * compute); /* the sum */
    CHECK(cut <= 1.15 * compute);
}
