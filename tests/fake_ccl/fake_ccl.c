/* SPDX-License-Identifier: Apache-2.0
 *
 * fake_ccl.c - NCCL and HCCL, as far as the engines of expert parallelism call them, between threads of one process.
 * Messages between two ranks keep their order; a receive of another size than what was sent answers with an error, as
 * the real ones may hang. Nothing here is of NCCL or HCCL but the names and the order of arguments. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "fake_ccl.h"

#define EXPORT __attribute__((visibility("default")))
enum { OK = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_USAGE = 5 };

typedef struct message {
    struct message *next;
    size_t bytes;
    char data[];
} message;

struct fake_group {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int ranks;
    message *to[FAKE_MOST][FAKE_MOST]; /* from, to: in order */
    struct comm *comms[FAKE_MOST];
};

typedef struct comm {
    fake_group *group;
    int rank, aborted, async_error, next_error;
    long calls[4];
} comm;

/* ---- messages ---- */

static int put_message(comm *c, const void *data, size_t bytes, int to)
{
    message *m = malloc(sizeof *m + bytes);
    if (!m) return SYSTEM_ERROR;
    m->next = NULL;
    m->bytes = bytes;
    if (bytes) memcpy(m->data, data, bytes);
    fake_group *const g = c->group;
    pthread_mutex_lock(&g->lock);
    message **at = &g->to[c->rank][to];
    while (*at) at = &(*at)->next;
    *at = m;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
    return OK;
}

static int take_message(comm *c, void *data, size_t bytes, int from)
{
    fake_group *const g = c->group;
    int code = OK;
    pthread_mutex_lock(&g->lock);
    while (!g->to[from][c->rank] && !c->aborted) pthread_cond_wait(&g->changed, &g->lock);
    message *const m = c->aborted ? NULL : g->to[from][c->rank];
    if (m) {
        g->to[from][c->rank] = m->next;
        if (m->bytes != bytes) code = c->async_error = INTERNAL_ERROR;
        else if (bytes) memcpy(data, m->data, bytes);
    } else code = SYSTEM_ERROR;
    pthread_mutex_unlock(&g->lock);
    free(m);
    return code;
}

/* ---- streams ---- */

typedef struct task {
    struct task *next;
    void (*fn)(void *);
    void *arg;
} task;

struct fake_stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    task *first;
    bool stop;
};

static void *work(void *arg)
{
    fake_stream *const s = arg;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->first && !s->stop) pthread_cond_wait(&s->changed, &s->lock);
        task *const t = s->first;
        if (!t) break;
        pthread_mutex_unlock(&s->lock);
        t->fn(t->arg);
        pthread_mutex_lock(&s->lock);
        s->first = t->next;
        free(t);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static fake_stream *stream_new(void)
{
    fake_stream *const s = calloc(1, sizeof *s);
    if (!s || pthread_mutex_init(&s->lock, NULL) || pthread_cond_init(&s->changed, NULL) ||
        pthread_create(&s->thread, NULL, work, s))
        abort();
    return s;
}

static void push(fake_stream *s, void (*fn)(void *), void *arg)
{
    task *const t = calloc(1, sizeof *t);
    if (!t) abort();
    t->fn = fn;
    t->arg = arg;
    pthread_mutex_lock(&s->lock);
    task **at = &s->first;
    while (*at) at = &(*at)->next;
    *at = t;
    pthread_cond_signal(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static void stream_free(fake_stream *s)
{
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_signal(&s->changed);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

/* ---- a group of sends and receives ---- */

typedef struct operation {
    struct operation *next;
    comm *c;
    bool receives;
    const void *from;
    void *to;
    size_t bytes;
    int peer;
    void *stream;
} operation;

static _Thread_local operation *pending, **pending_end;
static _Thread_local int depth;

/* Sends first: they wait for nobody. */
static int carry_out(operation *all)
{
    int code = OK;
    for (operation *o = all; o; o = o->next)
        if (!o->receives && !code) code = put_message(o->c, o->from, o->bytes, o->peer);
    for (operation *o = all; o; o = o->next)
        if (o->receives && !code) code = take_message(o->c, o->to, o->bytes, o->peer);
    while (all) {
        operation *const next = all->next;
        free(all);
        all = next;
    }
    return code;
}

static void carry_out_later(void *arg) { carry_out(arg); }

static int add(comm *c, bool receives, const void *from, void *to, size_t bytes, int peer, void *stream)
{
    if (!depth || peer < 0 || peer >= c->group->ranks) return INVALID_USAGE;
    if (c->next_error) {
        const int code = c->next_error;
        c->next_error = 0;
        return code;
    }
    operation *const o = calloc(1, sizeof *o);
    if (!o) return SYSTEM_ERROR;
    *o = (operation){
        .c = c, .receives = receives, .from = from, .to = to, .bytes = bytes, .peer = peer, .stream = stream};
    *pending_end = o;
    pending_end = &o->next;
    c->calls[receives]++;
    return OK;
}

EXPORT int ncclGroupStart(void)
{
    if (!depth++) pending = NULL, pending_end = &pending;
    return OK;
}

EXPORT int ncclGroupEnd(void)
{
    if (!depth) return INVALID_USAGE;
    if (--depth || !pending) return OK;
    operation *const all = pending;
    pending = NULL;
    all->c->calls[2]++;
    if (!all->stream) return carry_out(all);
    push(all->stream, carry_out_later, all);
    return OK;
}

EXPORT int ncclSend(const void *from, size_t count, int type, int peer, void *c, void *stream)
{
    return type == 1 ? add(c, false, from, NULL, count, peer, stream) : INVALID_USAGE;
}

EXPORT int ncclRecv(void *to, size_t count, int type, int peer, void *c, void *stream)
{
    return type == 1 ? add(c, true, NULL, to, count, peer, stream) : INVALID_USAGE;
}

EXPORT int ncclCommCount(void *c, int *n)
{
    *n = ((comm *)c)->group->ranks;
    return OK;
}

EXPORT int ncclCommUserRank(void *c, int *rank)
{
    *rank = ((comm *)c)->rank;
    return OK;
}

EXPORT int ncclCommCuDevice(void *c, int *device)
{
    (void)c;
    *device = 0;
    return OK;
}

EXPORT int ncclCommGetAsyncError(void *arg, int *error)
{
    comm *const c = arg;
    pthread_mutex_lock(&c->group->lock);
    *error = c->async_error;
    pthread_mutex_unlock(&c->group->lock);
    return OK;
}

EXPORT int ncclCommAbort(void *arg)
{
    comm *const c = arg;
    pthread_mutex_lock(&c->group->lock);
    c->aborted = 1;
    c->calls[3]++;
    pthread_cond_broadcast(&c->group->changed);
    pthread_mutex_unlock(&c->group->lock);
    return OK;
}

EXPORT const char *ncclGetErrorString(int code)
{
    return code == SYSTEM_ERROR     ? "unhandled system error"
           : code == INTERNAL_ERROR ? "internal error"
                                    : "another error";
}

/* ---- HCCL: all at once, the rows of the rank itself too ---- */

EXPORT int HcclAlltoAllV(const void *send, const void *send_counts, const void *send_at, int send_type,
                         const void *recv, const void *recv_counts, const void *recv_at, int recv_type, void *arg,
                         void *stream)
{
    comm *const c = arg;
    const uint64_t *const out = send_counts, *const from = send_at, *const in = recv_counts, *const to = recv_at;
    union {
        const void *in;
        char *out;
    } into = {recv};
    if (send_type || recv_type) return INVALID_USAGE;
    ncclGroupStart();
    int code = OK;
    for (int r = 0; r < c->group->ranks && !code; r++) {
        code = add(c, false, (const char *)send + from[r], NULL, out[r], r, stream);
        if (!code) code = add(c, true, NULL, into.out + to[r], in[r], r, stream);
    }
    if (code) {
        carry_out(NULL);
        while (pending) {
            operation *const next = pending->next;
            free(pending);
            pending = next;
        }
        depth = 0;
        return code;
    }
    return ncclGroupEnd();
}

EXPORT int HcclGetRankSize(void *c, uint32_t *n)
{
    *n = (uint32_t)((comm *)c)->group->ranks;
    return OK;
}

EXPORT int HcclGetRankId(void *c, uint32_t *rank)
{
    *rank = (uint32_t)((comm *)c)->rank;
    return OK;
}

EXPORT int HcclGetCommAsyncError(void *c, int *error) { return ncclCommGetAsyncError(c, error); }
EXPORT const char *HcclGetErrorString(int code) { return ncclGetErrorString(code); }

/* ---- for tests ---- */

static fake_group *group_new(int ranks)
{
    fake_group *const g = calloc(1, sizeof *g);
    if (!g || ranks > FAKE_MOST || pthread_mutex_init(&g->lock, NULL) || pthread_cond_init(&g->changed, NULL)) abort();
    g->ranks = ranks;
    for (int r = 0; r < ranks; r++) {
        comm *const c = g->comms[r] = calloc(1, sizeof *c);
        if (!c) abort();
        c->group = g;
        c->rank = r;
    }
    return g;
}

static void group_free(fake_group *g)
{
    for (int r = 0; r < g->ranks; r++)
        for (int q = 0; q < g->ranks; q++)
            while (g->to[r][q]) {
                message *const next = g->to[r][q]->next;
                free(g->to[r][q]);
                g->to[r][q] = next;
            }
    for (int r = 0; r < g->ranks; r++) free(g->comms[r]);
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

static void *comm_of(fake_group *g, int rank) { return g->comms[rank]; }

static void fail_async(void *arg, int code)
{
    comm *const c = arg;
    pthread_mutex_lock(&c->group->lock);
    c->async_error = code;
    pthread_mutex_unlock(&c->group->lock);
}

static void fail_next(void *c, int code) { ((comm *)c)->next_error = code; }
static long calls(void *c, int what) { return ((comm *)c)->calls[what]; }

EXPORT const fake_api fake_ccl_api = {group_new, group_free, comm_of,     fail_async, fail_next,
                                      calls,     stream_new, stream_free, push};
