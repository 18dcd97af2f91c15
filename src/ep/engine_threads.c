/* SPDX-License-Identifier: Apache-2.0
 *
 * engine_threads.c - ranks that are threads of one process. An exchange is posted by each rank under its number in the
 * order of calls; the receiver copies out of the sender's buffer while it waits, after it has compared what was posted
 * with what it expects. wait answers when everybody has taken what is theirs: then buffers belong to the caller again.
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "ep.h"

enum { DEPTH = 4096, MOST = 1024 }; /* exchanges of a rank under way at once; ranks */

typedef struct post {
    int64_t number; /* -1: free */
    const char *send;
    char *recv;
    int64_t row_bytes;
    int64_t *send_rows, *recv_rows; /* [ranks] each */
    int32_t taken;                  /* by how many ranks */
    int32_t readers;                /* that copy out of it now */
} post;

typedef struct member {
    struct fmoe_ep_threads *group;
    int32_t rank;
    bool gone;
    int64_t next; /* number of the next exchange */
    post *posts[DEPTH];
} member;

struct fmoe_ep_threads {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int32_t ranks, aborted; /* rank that gave up, or -1 */
    char why[512];
    member members[];
};

fmoe_status fmoe_ep_threads_create(fmoe_ep_threads **out, int32_t ranks)
{
    if (!out) return fmoe_fail(FMOE_ERR_NULL, "group is NULL");
    *out = NULL;
    if (ranks < 1 || ranks > MOST) return fmoe_fail(FMOE_ERR_ARG, "ranks is %d, must be 1 to %d", ranks, MOST);
    fmoe_ep_threads *g = calloc(1, sizeof *g + (size_t)ranks * sizeof *g->members);
    if (!g) return fmoe_fail(FMOE_ERR_NOMEM, "no memory for %d ranks", ranks);
    pthread_condattr_t attr;
    bool ok = !pthread_condattr_init(&attr);
    if (ok) {
        ok = !pthread_condattr_setclock(&attr, CLOCK_MONOTONIC) && !pthread_cond_init(&g->changed, &attr);
        pthread_condattr_destroy(&attr);
    }
    if (!ok || pthread_mutex_init(&g->lock, NULL)) {
        free(g);
        return fmoe_fail(FMOE_ERR_NOMEM, "no condition variable");
    }
    g->ranks = ranks;
    g->aborted = -1;
    for (int32_t r = 0; r < ranks; r++) {
        g->members[r].group = g;
        g->members[r].rank = r;
    }
    *out = g;
    return FMOE_OK;
}

static void free_post(member *m, int64_t number)
{
    free(m->posts[number % DEPTH]);
    m->posts[number % DEPTH] = NULL;
}

void fmoe_ep_threads_destroy(fmoe_ep_threads **group)
{
    if (!group || !*group) return;
    fmoe_ep_threads *g = *group;
    for (int32_t r = 0; r < g->ranks; r++)
        for (int64_t i = 0; i < DEPTH; i++) free_post(&g->members[r], i);
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
    free(g);
    *group = NULL;
}

static struct timespec deadline_in(int64_t ms)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    ms = fmoe_min(ms, INT64_C(1) << 40);
    t.tv_sec += (time_t)(ms / 1000);
    t.tv_nsec += (long)(ms % 1000 * 1000000);
    if (t.tv_nsec >= 1000000000) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000;
    }
    return t;
}

static fmoe_status aborted(const fmoe_ep_threads *g)
{
    return fmoe_fail(FMOE_ERR_EXCHANGE, "rank %d gave up: %s", g->aborted, g->why);
}

/* Take a rank's posts back: nobody begins to read them, and who reads has finished. Under the lock. */
static void withdraw(member *m)
{
    fmoe_ep_threads *g = m->group;
    for (int64_t i = 0; i < DEPTH; i++) {
        while (m->posts[i] && m->posts[i]->readers) pthread_cond_wait(&g->changed, &g->lock);
        free_post(m, i);
    }
    m->gone = true;
    pthread_cond_broadcast(&g->changed);
}

static void threads_abort(void *ctx, const char *why)
{
    member *m = ctx;
    fmoe_ep_threads *g = m->group;
    pthread_mutex_lock(&g->lock);
    if (g->aborted < 0) {
        g->aborted = m->rank;
        snprintf(g->why, sizeof g->why, "%s", why ? why : "");
    }
    withdraw(m);
    pthread_mutex_unlock(&g->lock);
}

void fmoe_ep_threads_leave(fmoe_ep_threads *g, int32_t rank)
{
    pthread_mutex_lock(&g->lock);
    withdraw(&g->members[rank]);
    pthread_mutex_unlock(&g->lock);
}

static fmoe_status threads_begin(void *ctx, const void *send, const int64_t *send_rows, void *recv,
                                 const int64_t *recv_rows, int64_t row_bytes, void **request)
{
    member *m = ctx;
    fmoe_ep_threads *g = m->group;
    const size_t n = (size_t)g->ranks;
    post *p = malloc(sizeof *p + 2 * n * sizeof(int64_t));
    if (!p) return fmoe_fail(FMOE_ERR_NOMEM, "no memory for an exchange");
    *p = (post){.send = send, .recv = recv, .row_bytes = row_bytes};
    p->send_rows = (int64_t *)(void *)(p + 1);
    p->recv_rows = p->send_rows + n;
    memcpy(p->send_rows, send_rows, n * sizeof(int64_t));
    memcpy(p->recv_rows, recv_rows, n * sizeof(int64_t));
    fmoe_status status = FMOE_OK;
    pthread_mutex_lock(&g->lock);
    if (g->aborted >= 0 || m->gone) status = aborted(g);
    else if (m->posts[m->next % DEPTH])
        status = fmoe_fail(FMOE_ERR_EXCHANGE, "more than %d exchanges under way", DEPTH);
    else {
        p->number = m->next++;
        m->posts[p->number % DEPTH] = p;
        *request = p;
        pthread_cond_broadcast(&g->changed);
    }
    pthread_mutex_unlock(&g->lock);
    if (status) free(p);
    return status;
}

/* Wait under the lock until the deadline; false: it has passed. */
static bool wait_until(fmoe_ep_threads *g, const struct timespec *deadline)
{
    return pthread_cond_timedwait(&g->changed, &g->lock, deadline) == 0;
}

/* Copy what rank r has for us. Under the lock, which is released for the copy. */
static fmoe_status take_from(member *m, post *mine, int32_t r, char *to, const struct timespec *deadline)
{
    fmoe_ep_threads *g = m->group;
    member *const peer = &g->members[r];
    post *theirs;
    for (;;) {
        theirs = peer->posts[mine->number % DEPTH];
        if (g->aborted >= 0) return aborted(g);
        if (theirs && theirs->number == mine->number) break;
        if (!wait_until(g, deadline))
            return fmoe_fail(FMOE_ERR_EXCHANGE, "rank %d has not come to exchange %" PRId64 " by the deadline", r,
                             mine->number);
    }
    if (theirs->send_rows[m->rank] != mine->recv_rows[r] || theirs->row_bytes != mine->row_bytes)
        return fmoe_fail(FMOE_ERR_EXCHANGE,
                         "rank %d sends %" PRId64 " rows of %" PRId64 " bytes, it announced %" PRId64 " of %" PRId64, r,
                         theirs->send_rows[m->rank], theirs->row_bytes, mine->recv_rows[r], mine->row_bytes);
    int64_t at = 0;
    for (int32_t i = 0; i < m->rank; i++) at += theirs->send_rows[i];
    const size_t bytes = (size_t)(mine->recv_rows[r] * mine->row_bytes);
    theirs->readers++;
    pthread_mutex_unlock(&g->lock);
    if (bytes) memcpy(to, theirs->send + at * theirs->row_bytes, bytes);
    pthread_mutex_lock(&g->lock);
    theirs->readers--;
    theirs->taken++;
    pthread_cond_broadcast(&g->changed);
    return FMOE_OK;
}

static fmoe_status threads_wait(void *ctx, void *request, int64_t timeout_ms)
{
    member *m = ctx;
    fmoe_ep_threads *g = m->group;
    post *mine = request;
    const struct timespec deadline = deadline_in(timeout_ms);
    fmoe_status status = FMOE_OK;
    pthread_mutex_lock(&g->lock);
    if (m->gone) { /* its posts are no more */
        status = aborted(g);
        pthread_mutex_unlock(&g->lock);
        return status;
    }
    int64_t at = 0;
    for (int32_t r = 0; r < g->ranks && !status; r++) {
        status = take_from(m, mine, r, mine->recv + at * mine->row_bytes, &deadline);
        at += mine->recv_rows[r];
    }
    while (!status && mine->taken < g->ranks)
        if (g->aborted >= 0) status = aborted(g);
        else if (!wait_until(g, &deadline))
            status = fmoe_fail(FMOE_ERR_EXCHANGE,
                               "%d of %d ranks have taken their rows of exchange %" PRId64 " by the deadline",
                               mine->taken, g->ranks, mine->number);
    while (mine->readers) pthread_cond_wait(&g->changed, &g->lock);
    free_post(m, mine->number);
    pthread_mutex_unlock(&g->lock);
    return status;
}

static fmoe_status threads_counts(void *ctx, const int64_t *send, int64_t *recv, int64_t n, int64_t timeout_ms)
{
    const member *m = ctx;
    void *request;
    int64_t one[MOST];
    for (int32_t r = 0; r < m->group->ranks; r++) one[r] = 1;
    FMOE_TRY(threads_begin(ctx, send, one, recv, one, n * 8, &request));
    return threads_wait(ctx, request, timeout_ms);
}

fmoe_status fmoe_ep_threads_exchange(fmoe_ep_threads *group, int32_t rank, fmoe_exchange *exchange)
{
    if (!group || !exchange) return fmoe_fail(FMOE_ERR_NULL, "%s is NULL", group ? "exchange" : "group");
    if (rank < 0 || rank >= group->ranks)
        return fmoe_fail(FMOE_ERR_ARG, "rank is %d, must be 0 to %d", rank, group->ranks - 1);
    *exchange =
        (fmoe_exchange){.size = sizeof *exchange, .rank = rank, .ranks = group->ranks, .ctx = &group->members[rank]};
    exchange->counts = threads_counts;
    exchange->begin = threads_begin;
    exchange->wait = threads_wait;
    exchange->abort = threads_abort;
    return FMOE_OK;
}
