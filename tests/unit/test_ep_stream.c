/* SPDX-License-Identifier: Apache-2.0
 *
 * test_ep_stream.c - engine_stream.c and engine_nccl.c on a device that works things off later: streams with a thread
 * each (fake_ccl), events that pass when their stream comes there. Order, sizes, deadlines, errors that come later;
 * nothing hangs. */
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

#include "fake_ccl/fake_ccl.h"
#include "fusedmoe_ep.h"
#include "tensors.h"

/* These two, on the device below: the library's own are not linked then. */
#define fmoe_device_find fake_device_find
#include "ep/engine_nccl.c"
#include "ep/engine_stream.c"
#undef fmoe_device_find

static const fake_api *api;
static bool in_capture;

/* ---- the device ---- */

typedef struct fake_event {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    long recorded, passed;
} fake_event;

typedef struct step {
    int kind; /* 0: copy, 1: the event passes, 2: wait for it */
    void *to;
    const void *from;
    size_t bytes;
    fake_event *event;
    long number;
} step;

static void do_step(void *arg)
{
    step *const s = arg;
    if (s->kind == 0) memcpy(s->to, s->from, s->bytes);
    else {
        pthread_mutex_lock(&s->event->lock);
        if (s->kind == 1 && s->event->passed < s->number) s->event->passed = s->number;
        while (s->kind == 2 && s->event->passed < s->number) pthread_cond_wait(&s->event->changed, &s->event->lock);
        pthread_cond_broadcast(&s->event->changed);
        pthread_mutex_unlock(&s->event->lock);
    }
    free(s);
}

static void push_step(void *stream, step one)
{
    step *const s = malloc(sizeof *s);
    if (!s) abort();
    *s = one;
    api->push(stream, do_step, s);
}

static void *fake_alloc(int32_t device, size_t bytes, bool host)
{
    (void)device, (void)host;
    return malloc(bytes);
}

static void fake_free(int32_t device, void *p, bool host)
{
    (void)device, (void)host;
    free(p);
}

static fmoe_status fake_new_event(int32_t device, void **out)
{
    fake_event *const e = calloc(1, sizeof *e);
    (void)device;
    if (!e || pthread_mutex_init(&e->lock, NULL) || pthread_cond_init(&e->changed, NULL)) abort();
    *out = e;
    return FMOE_OK;
}

static void fake_event_free(int32_t device, void *event)
{
    fake_event *const e = event;
    (void)device;
    pthread_cond_destroy(&e->changed);
    pthread_mutex_destroy(&e->lock);
    free(e);
}

static fmoe_status fake_record(int32_t device, void *event, void *stream)
{
    fake_event *const e = event;
    (void)device;
    pthread_mutex_lock(&e->lock);
    const long number = ++e->recorded;
    pthread_mutex_unlock(&e->lock);
    push_step(stream, (step){.kind = 1, .event = e, .number = number});
    return FMOE_OK;
}

static fmoe_status fake_after(int32_t device, void *event, void *stream)
{
    fake_event *const e = event;
    (void)device;
    pthread_mutex_lock(&e->lock);
    const long number = e->recorded;
    pthread_mutex_unlock(&e->lock);
    push_step(stream, (step){.kind = 2, .event = e, .number = number});
    return FMOE_OK;
}

static fmoe_status fake_passed(int32_t device, void *event, bool *yes)
{
    fake_event *const e = event;
    (void)device;
    pthread_mutex_lock(&e->lock);
    *yes = e->passed >= e->recorded;
    pthread_mutex_unlock(&e->lock);
    return FMOE_OK;
}

static fmoe_status fake_copy(int32_t device, void *to, const void *from, size_t bytes, void *stream, bool wait)
{
    push_step(stream, (step){.kind = 0, .to = to, .from = from, .bytes = bytes});
    if (!wait) return FMOE_OK;
    void *event;
    bool yes = false;
    fake_new_event(device, &event);
    fake_record(device, event, stream);
    while (!yes) {
        fake_passed(device, event, &yes);
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    fake_event_free(device, event);
    return FMOE_OK;
}

static bool fake_capturing(int32_t device, void *stream)
{
    (void)device, (void)stream;
    return in_capture;
}

fmoe_status fake_device_find(fmoe_device device, const fmoe_device_ops **ops)
{
    static const fmoe_device_ops table = {.alloc = fake_alloc,
                                          .free = fake_free,
                                          .copy = fake_copy,
                                          .event = fake_new_event,
                                          .event_free = fake_event_free,
                                          .record = fake_record,
                                          .after = fake_after,
                                          .passed = fake_passed,
                                          .capturing = fake_capturing};
    (void)device;
    *ops = &table;
    return FMOE_OK;
}

/* ---- ranks ---- */

enum { RANKS = 3, ROUNDS = 12, DEADLINE = 300 };

typedef struct member {
    int rank, rounds, two_streams;
    void *comm;
    fake_stream *stream, *side;
    fmoe_ep_nccl *engine;
    fmoe_exchange x;
    int wrong;
    fmoe_status status;
    char error[400];
    int64_t took_ms;
} member;

static fake_group *make(member *m, int two_streams)
{
    void *library = dlopen(FAKE_CCL, RTLD_NOW | RTLD_LOCAL);
    api = library ? dlsym(library, "fake_ccl_api") : NULL;
    REQUIRE(api);
    setenv("FMOE_NCCL_LIBRARY", FAKE_CCL, 1);
    fake_group *const g = api->group_new(RANKS);
    for (int r = 0; r < RANKS; r++) {
        m[r] = (member){.rank = r, .rounds = ROUNDS, .two_streams = two_streams, .comm = api->comm(g, r)};
        m[r].stream = api->stream_new();
        m[r].side = two_streams ? api->stream_new() : m[r].stream;
        CHECK_STATUS(fmoe_ep_nccl_create(&m[r].engine, m[r].comm, (fmoe_device){FMOE_CPU, 0}, m[r].stream, m[r].side),
                     FMOE_OK);
        REQUIRE(m[r].engine);
        CHECK_STATUS(fmoe_ep_nccl_exchange(m[r].engine, &m[r].x), FMOE_OK);
    }
    return g;
}

static void unmake(member *m, fake_group *g)
{
    for (int r = 0; r < RANKS; r++) { /* streams end: nothing on them waits for ever */
        if (m[r].two_streams) api->stream_free(m[r].side);
        api->stream_free(m[r].stream);
        fmoe_ep_nccl_destroy(&m[r].engine);
    }
    api->group_free(g);
}

/* Rows from rank a to rank b in round i, and byte j of them. */
static int64_t rows_of(int a, int b, int i) { return (a * 7 + b * 3 + i) % 5; }
static char byte_of(int a, int b, int i, int64_t j) { return (char)(a * 31 + b * 17 + i * 5 + j); }

/* Rounds of counts and rows; what is sent is written on the stream, after the round before. */
static void *rounds(void *arg)
{
    member *const m = arg;
    enum { WIDTH = 24 };
    const int64_t began = ep_now_ms();
    for (int i = 0; i < m->rounds && !m->status; i++) {
        int64_t out[RANKS], in[RANKS], tell[RANKS], told[RANKS], n = 0, into = 0;
        void *q = NULL;
        for (int r = 0; r < RANKS; r++) {
            out[r] = rows_of(m->rank, r, i), in[r] = rows_of(r, m->rank, i);
            tell[r] = 100 * m->rank + r + i;
            n += out[r], into += in[r];
        }
        if (i % 3 == 0) m->status = m->x.counts(m->x.ctx, tell, told, 1, DEADLINE);
        for (int r = 0; i % 3 == 0 && !m->status && r < RANKS; r++) m->wrong += told[r] != 100 * r + m->rank + i;
        char *const fresh = malloc((size_t)(n * WIDTH) + 1), *const send = malloc((size_t)(n * WIDTH) + 1),
                    *const recv = calloc((size_t)(into * WIDTH) + 1, 1),
                    *const got = malloc((size_t)(into * WIDTH) + 1);
        for (int64_t r = 0, at = 0; r < RANKS; r++)
            for (int64_t j = 0; j < out[r] * WIDTH; j++) fresh[at++] = byte_of(m->rank, (int)r, i, j);
        fake_copy(0, send, fresh, (size_t)(n * WIDTH), m->stream, false);
        if (!m->status) m->status = m->x.begin(m->x.ctx, send, out, recv, in, WIDTH, &q);
        if (!m->status) m->status = m->x.wait(m->x.ctx, q, DEADLINE);
        fake_copy(0, got, recv, (size_t)(into * WIDTH), m->stream, true); /* what comes after wait sees the rows */
        for (int64_t r = 0, at = 0; !m->status && r < RANKS; r++)
            for (int64_t j = 0; j < in[r] * WIDTH; j++) m->wrong += got[at++] != byte_of((int)r, m->rank, i, j);
        free(fresh), free(send), free(recv), free(got);
    }
    if (m->status) snprintf(m->error, sizeof m->error, "%s", fmoe_last_error());
    m->took_ms = ep_now_ms() - began;
    return NULL;
}

static void run(member *m, int from)
{
    pthread_t threads[RANKS];
    for (int r = from; r < RANKS; r++) REQUIRE(!pthread_create(&threads[r], NULL, rounds, &m[r]));
    for (int r = from; r < RANKS; r++) pthread_join(threads[r], NULL);
}

TEST(rows_come_in_order)
{
    for (int two = 0; two < 2; two++) {
        member m[RANKS];
        fake_group *g = make(m, two);
        run(m, 0);
        for (int r = 0; r < RANKS; r++) {
            CHECK_STATUS(m[r].status, FMOE_OK);
            CHECK_EQ(m[r].wrong, 0);
            CHECK_EQ(api->calls(m[r].comm, 3), 0);
        }
        unmake(m, g);
    }
}

/* Rank 0 does not come to the counts: the others know by the deadline. */
TEST(a_rank_does_not_come)
{
    member m[RANKS];
    fake_group *g = make(m, 1);
    run(m, 1);
    for (int r = 1; r < RANKS; r++) {
        CHECK_STATUS(m[r].status, FMOE_ERR_EXCHANGE);
        if (!strstr(m[r].error, "by the deadline")) TEST_FAIL("\"%s\"", m[r].error);
        CHECK(m[r].took_ms < DEADLINE + 1000);
        m[r].x.abort(m[r].x.ctx, "as the layer does after an error");
        CHECK_EQ(api->calls(m[r].comm, 3), 1);
    }
    unmake(m, g);
}

static int64_t wait_until_broken(member *m)
{
    const int64_t one[RANKS] = {1, 1, 1}, began = ep_now_ms();
    char send[RANKS] = {0}, recv[RANKS];
    void *q = NULL;
    CHECK_STATUS(m->x.begin(m->x.ctx, send, one, recv, one, 1, &q), FMOE_OK);
    CHECK_STATUS(m->x.wait(m->x.ctx, q, DEADLINE), FMOE_OK); /* the host does not wait */
    CHECK(ep_now_ms() - began < DEADLINE);
    fake_copy(0, recv, send, 1, m->stream, true); /* the stream does, and goes on when the engine gives up */
    const int64_t took = ep_now_ms() - began;
    CHECK_STATUS(m->x.begin(m->x.ctx, send, one, recv, one, 1, &q), FMOE_ERR_EXCHANGE);
    return took;
}

/* Nobody else comes to the rows: the watcher gives up, so that the stream goes on. */
TEST(rows_do_not_come)
{
    member m[RANKS];
    fake_group *g = make(m, 1);
    const int64_t took = wait_until_broken(&m[1]);
    CHECK_ERROR_HAS("NCCL was given up: NCCL: not every rank has come by the deadline");
    CHECK(took >= DEADLINE - 50 && took < DEADLINE + 1000);
    CHECK_EQ(api->calls(m[1].comm, 3), 1);
    unmake(m, g);
}

TEST(an_error_that_comes_later)
{
    member m[RANKS];
    fake_group *g = make(m, 1);
    api->fail_async(m[2].comm, 2);
    CHECK(wait_until_broken(&m[2]) < DEADLINE);
    CHECK_ERROR_HAS("unhandled system error");
    unmake(m, g);
}

TEST(an_error_at_once)
{
    member m[RANKS];
    fake_group *g = make(m, 0);
    const int64_t one[RANKS] = {1, 1, 1};
    char send[RANKS] = {0}, recv[RANKS];
    void *q = NULL;
    api->fail_next(m[0].comm, 3);
    CHECK_STATUS(m[0].x.begin(m[0].x.ctx, send, one, recv, one, 1, &q), FMOE_ERR_EXCHANGE);
    CHECK_ERROR_HAS("ncclSend: internal error");
    const int64_t other[RANKS] = {1, 0, 1};
    CHECK_STATUS(m[1].x.begin(m[1].x.ctx, send, other, recv, one, 1, &q), FMOE_ERR_EXCHANGE);
    CHECK_ERROR_HAS("rank 1 sends itself other rows");
    run(m, 0); /* no group stayed open, and all works */
    for (int r = 0; r < RANKS; r++) CHECK_STATUS(m[r].status, FMOE_OK);
    unmake(m, g);
}

/* What a graph has captured is not under way: nobody watches it. */
TEST(captured_exchanges_are_not_watched)
{
    member m[RANKS];
    fake_group *g = make(m, 0);
    const int64_t one[RANKS] = {0, 1, 0};
    char send[1] = {7}, recv[1];
    void *q = NULL;
    in_capture = true;
    CHECK_STATUS(m[1].x.begin(m[1].x.ctx, send, one, recv, one, 1, &q), FMOE_OK);
    CHECK_STATUS(m[1].x.wait(m[1].x.ctx, q, 1), FMOE_OK);
    in_capture = false;
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    CHECK_STATUS(m[1].x.begin(m[1].x.ctx, send, one, recv, one, 1, &q), FMOE_OK);
    CHECK_STATUS(m[1].x.wait(m[1].x.ctx, q, DEADLINE), FMOE_OK);
    unmake(m, g);
}
