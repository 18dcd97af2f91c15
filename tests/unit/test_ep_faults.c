/* SPDX-License-Identifier: Apache-2.0
 *
 * test_ep_faults.c - what goes wrong between ranks, at every exchange and every allocation: an error that names the
 * rank and the phase on all ranks that live, within the deadline, and nothing leaked (run under the address sanitizer).
 */
#include "ep_layer.h"

#include <pthread.h>
#include <time.h>

typedef enum fault { NONE, DIES, DIES_ALOUD, LATE, LIES, ROWS, GARBLES, NO_MEMORY } fault;

enum { DEADLINE = 60, LONG = 20000 }; /* ms */

/* An engine that does as it is told, and fails on the step that it is told. Blocks it lent are counted. */
typedef struct faulty {
    fmoe_exchange real;
    fmoe_ep_threads *group;
    fault fault;
    int step, at; /* exchanges (or allocations) so far, and the one that fails */
    int lent;
    uint64_t noise;
    unsigned char *garbled; /* what was sent instead */
    int64_t took_ms;
    ep_rank *share;
} faulty;

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int strikes(faulty *f, fault kind) { return f->fault == kind && f->at == f->step; }

static fmoe_status before(faulty *f)
{
    if (f->fault == NO_MEMORY) return FMOE_OK; /* whose steps are allocations */
    f->step++;
    if (strikes(f, DIES)) {
        fmoe_ep_threads_leave(f->group, f->real.rank);
        return fmoe_ep_fail(FMOE_ERR_EXCHANGE, "dead");
    }
    if (strikes(f, DIES_ALOUD)) return fmoe_ep_fail(FMOE_ERR_EXCHANGE, "the line is cut");
    if (strikes(f, LATE)) nanosleep(&(struct timespec){.tv_nsec = 4L * DEADLINE * 1000000}, NULL);
    return FMOE_OK;
}

static fmoe_status faulty_counts(void *ctx, const int64_t *send, int64_t *recv, int64_t n, int64_t timeout_ms)
{
    faulty *f = ctx;
    const fmoe_status status = before(f);
    if (status) return status;
    if (!strikes(f, LIES)) return f->real.counts(f->real.ctx, send, recv, n, timeout_ms);
    int64_t *lie = malloc((size_t)(f->real.ranks * n) * 8);
    if (!lie) abort();
    memcpy(lie, send, (size_t)(f->real.ranks * n) * 8);
    for (int r = 0; r < f->real.ranks; r++) {
        static const int64_t lies[] = {-1, 1, INT64_MAX, INT64_MIN, INT64_C(1) << 62};
        const int64_t lied = lies[(f->share->n_local + r) % 5];
        lie[r * n + 3] = lied == 1 ? lie[r * n + 3] + 1 : lied;
    }
    const fmoe_status answer = f->real.counts(f->real.ctx, lie, recv, n, timeout_ms);
    free(lie);
    return answer;
}

static fmoe_status faulty_begin(void *ctx, const void *send, const int64_t *send_rows, void *recv,
                                const int64_t *recv_rows, int64_t row_bytes, void **request)
{
    faulty *f = ctx;
    const fmoe_status status = before(f);
    if (status) return status;
    if (strikes(f, GARBLES)) {
        size_t bytes = 0;
        for (int r = 0; r < f->real.ranks; r++) bytes += (size_t)(send_rows[r] * row_bytes);
        f->garbled = memcpy(malloc(bytes + 1), send, bytes);
        for (int i = 0; i < 8 && bytes; i++) {
            f->noise = f->noise * 6364136223846793005u + 1442695040888963407u;
            f->garbled[(f->noise >> 20) % bytes] ^= (unsigned char)(1u << (f->noise >> 60) % 8);
        }
        send = f->garbled;
    }
    if (!strikes(f, ROWS)) return f->real.begin(f->real.ctx, send, send_rows, recv, recv_rows, row_bytes, request);
    int64_t other[EP_RANKS];
    for (int r = 0; r < f->real.ranks; r++) other[r] = send_rows[r] ? send_rows[r] - 1 : 1;
    return f->real.begin(f->real.ctx, send, other, recv, recv_rows, row_bytes, request);
}

static fmoe_status faulty_wait(void *ctx, void *request, int64_t timeout_ms)
{
    faulty *f = ctx;
    return f->real.wait(f->real.ctx, request, timeout_ms);
}

static void faulty_abort(void *ctx, const char *why)
{
    faulty *f = ctx;
    if (f->fault != DIES) f->real.abort(f->real.ctx, why); /* the dead do not speak */
}

static void *faulty_alloc(void *ctx, size_t bytes)
{
    faulty *f = ctx;
    if (f->fault == NO_MEMORY && ++f->step == f->at) return NULL;
    void *memory = bytes > (size_t)1 << 40 ? NULL : malloc(bytes);
    f->lent += memory != NULL;
    return memory;
}

static void faulty_free(void *ctx, void *memory)
{
    ((faulty *)ctx)->lent--;
    free(memory);
}

static void *run(void *arg)
{
    faulty *f = arg;
    const int64_t began = now_ms();
    ep_run_rank(f->share);
    f->took_ms = now_ms() - began;
    return NULL;
}

/* All ranks, one of which has the fault. Answers how many steps that rank made. */
static int run_with(const ep_layer *l, faulty *f, int who, fault kind, int at, int64_t deadline)
{
    fmoe_ep_threads *group;
    fmoe_exchange x[EP_RANKS];
    pthread_t threads[EP_RANKS];
    CHECK_STATUS(fmoe_ep_threads_create(&group, l->ranks), FMOE_OK);
    for (int r = 0; r < l->ranks; r++) {
        f[r] = (faulty){.group = group, .fault = r == who ? kind : NONE, .at = at, .noise = test_random()};
        CHECK_STATUS(fmoe_ep_threads_exchange(group, r, &f[r].real), FMOE_OK);
        x[r] = (fmoe_exchange){.size = sizeof x[r], .rank = r, .ranks = l->ranks, .ctx = &f[r]};
        x[r].counts = faulty_counts, x[r].begin = faulty_begin, x[r].wait = faulty_wait, x[r].abort = faulty_abort;
        x[r].alloc = faulty_alloc, x[r].free = faulty_free;
        f[r].share = ep_share(l, r, &x[r]);
        f[r].share->desc.timeout_ms = deadline;
    }
    for (int r = 0; r < l->ranks; r++) REQUIRE(!pthread_create(&threads[r], NULL, run, &f[r]));
    for (int r = 0; r < l->ranks; r++) pthread_join(threads[r], NULL);
    fmoe_ep_threads_destroy(&group);
    for (int r = 0; r < l->ranks; r++) {
        CHECK_EQ(f[r].lent, 0);
        free(f[r].garbled);
    }
    return f[who].step;
}

/* Every rank has an error that names itself, a phase, and where it came from; in time. */
static void check_errors(const ep_layer *l, const faulty *f, int who, fault kind, int64_t deadline)
{
    for (int r = 0; r < l->ranks; r++) {
        const ep_rank *s = f[r].share;
        char self[64];
        snprintf(self, sizeof self, "rank %d of %d, ", r, l->ranks);
        const int may_be_done = kind == NO_MEMORY && r != who; /* after the last exchange it is nobody else's */
        if (!s->status && may_be_done) ep_compare(l, s, r);
        else if (!s->status) TEST_FAIL("fault %d of rank %d: rank %d answers no error", kind, who, r);
        else if (!strstr(s->error, self)) TEST_FAIL("\"%s\" has no \"%s\"", s->error, self);
        else if (!strstr(s->error, "count: ") && !strstr(s->error, "dispatch: ") && !strstr(s->error, "combine: ") &&
                 !strstr(s->error, "compute: "))
            TEST_FAIL("\"%s\" names no phase", s->error);
        if (f[r].took_ms > deadline + 1000)
            TEST_FAIL("fault %d of rank %d: rank %d took %d ms", kind, who, r, (int)f[r].took_ms);
    }
}

static ep_layer *small_layer(void)
{
    ep_layer *l = ep_draw(3, FMOE_BF16, (int)test_below(2));
    while (l->placements || l->d.E < 3 || !l->T[0] || !l->T[1] || !l->T[2])
        l = ep_draw(3, FMOE_BF16, (int)test_below(2));
    ep_one_process(l);
    return l;
}

/* At every exchange of forward and backward, phase by phase and overlapped. */
static void at_every_exchange(fault kind, int64_t deadline)
{
    faulty f[EP_RANKS];
    for (int phases = 0; phases < 2 && !test_failures; phases++) {
        ep_layer *l = small_layer();
        l->phases = phases;
        l->chunks = 2;
        const int steps = run_with(l, f, 1, NONE, 0, LONG);
        for (int r = 0; r < l->ranks; r++) ep_compare(l, f[r].share, r);
        CHECK(steps > 8);
        for (int at = 1; at <= steps && !test_failures; at++) {
            run_with(l, f, 1, kind, at, deadline);
            check_errors(l, f, 1, kind, deadline * (kind == LATE ? 5 : 1));
        }
        run_with(l, f, 1, NONE, 0, LONG); /* and it works after */
        for (int r = 0; r < l->ranks; r++) ep_compare(l, f[r].share, r);
    }
}

TEST(a_rank_dies_at_every_exchange) { at_every_exchange(DIES, DEADLINE); }
TEST(a_rank_loses_its_line_at_every_exchange) { at_every_exchange(DIES_ALOUD, LONG / 10); }
TEST(a_rank_is_late_at_every_exchange) { at_every_exchange(LATE, DEADLINE); }

TEST(a_rank_announces_what_cannot_be)
{
    faulty f[EP_RANKS];
    for (int i = 0; i < 20 && !test_failures; i++) {
        ep_layer *l = small_layer();
        run_with(l, f, i % 3, LIES, 1, LONG / 10);
        check_errors(l, f, i % 3, LIES, LONG / 10);
    }
}

TEST(a_rank_sends_another_number_of_rows)
{
    faulty f[EP_RANKS];
    for (int i = 0; i < 20 && !test_failures; i++) {
        ep_layer *l = small_layer();
        const int steps = run_with(l, f, 0, NONE, 0, LONG);
        for (int at = 2; at <= steps && !test_failures; at++) {
            run_with(l, f, i % 3, ROWS, at, LONG / 10);
            check_errors(l, f, i % 3, ROWS, LONG / 10);
        }
    }
}

/* Flipped bits in ids, weights and rows: an error on all ranks, or numbers that are wrong; never a crash, never a hang.
 */
TEST(a_rank_sends_garbled_bytes)
{
    faulty f[EP_RANKS];
    for (int i = 0; i < 30 && !test_failures; i++) {
        ep_layer *l = small_layer();
        const int steps = run_with(l, f, 0, NONE, 0, LONG);
        for (int at = 2; at <= steps && !test_failures; at++) {
            run_with(l, f, i % 3, GARBLES, at, LONG / 10);
            int errors = 0;
            for (int r = 0; r < l->ranks; r++) errors += f[r].share->status != FMOE_OK;
            if (errors) check_errors(l, f, i % 3, GARBLES, LONG / 10);
        }
    }
}

TEST(an_allocation_fails_at_every_call)
{
    faulty f[EP_RANKS];
    ep_layer *l = small_layer();
    const int counted = run_with(l, f, 2, NO_MEMORY, 0, LONG);
    CHECK(counted > 20);
    for (int at = 1; at <= counted && !test_failures; at++) {
        run_with(l, f, 2, NO_MEMORY, at, LONG / 10);
        check_errors(l, f, 2, NO_MEMORY, LONG / 10);
        CHECK_STATUS(f[2].share->status, FMOE_ERR_NOMEM);
    }
}

/* A rank whose own arguments are wrong tells the others in the count, and the same engine works in the next call. */
typedef struct retry {
    ep_rank *share;
    fmoe_ep_args wrong;
    fmoe_status first;
    char error[512];
} retry;

static void *run_twice(void *arg)
{
    retry *t = arg;
    fmoe_ep *ep = NULL;
    fmoe_ep_call *call = NULL;
    ep_rank *s = t->share;
    s->status = fmoe_ep_create(&ep, &s->desc);
    if (s->status) return NULL;
    t->first = fmoe_ep_forward(ep, &t->wrong, &call);
    snprintf(t->error, sizeof t->error, "%s", fmoe_last_error());
    s->status = fmoe_ep_forward(ep, &s->args, &call);
    if (!s->status) s->status = fmoe_ep_backward(call, &s->args);
    snprintf(s->error, sizeof s->error, "%s", fmoe_last_error());
    fmoe_ep_call_free(&call);
    fmoe_ep_destroy(&ep);
    return NULL;
}

TEST(wrong_arguments_of_one_rank_are_told_to_all)
{
    for (int i = 0; i < 4; i++) {
        ep_layer *l = small_layer();
        fmoe_ep_threads *group;
        fmoe_exchange x[3];
        retry t[3];
        pthread_t threads[3];
        CHECK_STATUS(fmoe_ep_threads_create(&group, 3), FMOE_OK);
        for (int r = 0; r < 3; r++) {
            fmoe_ep_threads_exchange(group, r, &x[r]);
            t[r] = (retry){.share = ep_share(l, r, &x[r])};
            t[r].wrong = t[r].share->args;
        }
        fmoe_tensor *ids = tensor_copy(t[1].wrong.ids, I64);
        tensor_set(ids, 0, (double)l->d.E + 5);
        if (i == 0) t[1].wrong.ids = ids;
        if (i == 1) t[1].wrong.weights = NULL;
        if (i == 2) t[1].wrong.x = tensor_new(FMOE_F32, SHAPE(l->T[1], l->d.H));
        if (i == 3) t[1].wrong.out = tensor_new(FMOE_BF16, SHAPE(l->T[1] + 1, l->d.H));
        for (int r = 0; r < 3; r++) REQUIRE(!pthread_create(&threads[r], NULL, run_twice, &t[r]));
        for (int r = 0; r < 3; r++) pthread_join(threads[r], NULL);
        for (int r = 0; r < 3; r++) {
            CHECK(t[r].first != FMOE_OK);
            if (!strstr(t[r].error, r == 1 ? "rank 1 of 3, count: " : "count: rank 1 could not begin"))
                TEST_FAIL("rank %d says \"%s\"", r, t[r].error);
            ep_compare(l, t[r].share, r);
        }
        fmoe_ep_threads_destroy(&group);
    }
}

TEST(descriptions_that_make_no_sense)
{
    fmoe_ep_threads *group;
    fmoe_exchange x;
    fmoe_ep *ep;
    fmoe_desc layer = {.size = sizeof layer, .op = FMOE_OP_EXPERTS, .dtype = FMOE_F32, .H = 4, .I = 4, .E = 4, .k = 2};
    CHECK_STATUS(fmoe_ep_threads_create(&group, 2), FMOE_OK);
    CHECK_STATUS(fmoe_ep_threads_create(NULL, 2), FMOE_ERR_NULL);
    CHECK_STATUS(fmoe_ep_threads_exchange(group, 2, &x), FMOE_ERR_ARG);
    CHECK_STATUS(fmoe_ep_threads_exchange(group, 0, &x), FMOE_OK);
    const int32_t experts[] = {0, 1, 2, 3, 3}, ranks[] = {0, 0, 1, 1, 1}, far[] = {0, 0, 1, 2, 1};
    const fmoe_ep_desc good = {.size = sizeof good, .layer = &layer, .exchange = &x};
    fmoe_ep_desc d;
#define REFUSED(change, status, text)                                                                                  \
    d = good, change, CHECK_STATUS(fmoe_ep_create(&ep, &d), status), CHECK_ERROR_HAS(text), CHECK(!ep)
    REFUSED(d.size = 8, FMOE_ERR_ABI, "fmoe_ep_desc.size is 8");
    REFUSED(d.layer = NULL, FMOE_ERR_NULL, "layer is NULL");
    REFUSED(d.exchange = NULL, FMOE_ERR_NULL, "exchange is NULL");
    REFUSED(d.mode = 2, FMOE_ERR_ARG, "mode is 2");
    REFUSED(d.chunks = -1, FMOE_ERR_ARG, "chunks is -1");
    REFUSED(d.capacity = -1, FMOE_ERR_ARG, "capacity is -1");
    REFUSED(d.timeout_ms = -5, FMOE_ERR_ARG, "timeout_ms is -5");
    REFUSED(d.expert = experts, FMOE_ERR_ARG, "rank is NULL");
    REFUSED((d.expert = experts, d.rank = ranks, d.placements = 3), FMOE_ERR_ARG, "expert 3 is on no rank");
    REFUSED((d.expert = experts, d.rank = ranks, d.placements = 5), FMOE_ERR_ARG, "expert 3 is on rank 1 twice");
    REFUSED((d.expert = experts, d.rank = far, d.placements = 5), FMOE_ERR_INDEX, "rank[3] is 2");
    layer.dtype = FMOE_F64;
    REFUSED(d.chunks = 1, FMOE_ERR_DTYPE, "layer.dtype is 4");
    layer.dtype = FMOE_F32;
    layer.device.type = 7;
    REFUSED(d.chunks = 1, FMOE_ERR_BACKEND, "device.type is 7");
    layer.device.type = FMOE_CPU;
    layer.k = 0;
    REFUSED(d.chunks = 1, FMOE_ERR_ARG, "k");
    layer.k = 2;
    CHECK_STATUS(fmoe_ep_create(&ep, &good), FMOE_OK);
    CHECK_EQ(fmoe_ep_local(ep, NULL, 0), 2);
    CHECK_STATUS(fmoe_ep_backward(NULL, NULL), FMOE_ERR_NULL);
    fmoe_ep_destroy(&ep);
    fmoe_ep_threads_destroy(&group);
}
