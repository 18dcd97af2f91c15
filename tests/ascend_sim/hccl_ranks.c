/* SPDX-License-Identifier: Apache-2.0
 *
 * hccl_ranks.c - HcclAlltoAllV between ranks that are threads, on the simulator's streams and memory: a task that sends
 * what it has, and keeps its stream waiting until every peer has sent. Counts of two ranks that differ are a violation.
 * With names of HCCL's, and of the tests: a group, its communicators, and a way to end what would wait for ever. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"

enum { MOST = 16, BYTES = 0 /* HCCL_DATA_TYPE_INT8 */ };

typedef struct message {
    struct message *next;
    size_t bytes;
    char data[];
} message;

typedef struct group group;
typedef struct comm {
    group *in;
    int rank, error;
} comm;

struct group {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int ranks;
    bool ended;
    comm comms[MOST];
    message *mail[MOST][MOST]; /* from, to */
};

typedef struct exchange {
    comm *of;
    const char *send;
    char *recv;
    size_t out[MOST], from[MOST], in[MOST], to[MOST];
} exchange;

static void post(group *g, int from, int to, const char *data, size_t bytes)
{
    message *m = malloc(sizeof *m + bytes);
    if (!m) abort();
    m->next = NULL;
    m->bytes = bytes;
    memcpy(m->data, data, bytes);
    pthread_mutex_lock(&g->lock);
    message **at = &g->mail[from][to];
    while (*at) at = &(*at)->next;
    *at = m;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

static message *fetch(group *g, int from, int to) /* NULL: it was ended */
{
    pthread_mutex_lock(&g->lock);
    while (!g->mail[from][to] && !g->ended) pthread_cond_wait(&g->changed, &g->lock);
    message *const m = g->mail[from][to];
    if (m) g->mail[from][to] = m->next;
    pthread_mutex_unlock(&g->lock);
    return m;
}

static void run(void *arg)
{
    exchange *x = arg;
    group *g = x->of->in;
    static char nothing;
    for (int r = 0; r < g->ranks; r++) {
        const bool live = !x->out[r] || sim_is_live(x->send + x->from[r], x->out[r]);
        if (!live) sim_violation("HcclAlltoAllV sends memory that is not allocated");
        post(g, x->of->rank, r, x->out[r] && live ? (char *)sim_twin(x->send + x->from[r]) : &nothing,
             live ? x->out[r] : 0);
    }
    for (int r = 0; r < g->ranks; r++) {
        message *m = fetch(g, r, x->of->rank);
        if (!m) break;
        if (m->bytes != x->in[r])
            sim_violation("rank %d has %zu bytes for rank %d, which waits for %zu", r, m->bytes, x->of->rank, x->in[r]);
        else if (m->bytes && !sim_is_live(x->recv + x->to[r], m->bytes))
            sim_violation("HcclAlltoAllV receives into memory that is not allocated");
        else if (m->bytes) memcpy(sim_twin(x->recv + x->to[r]), m->data, m->bytes);
        free(m);
    }
    free(x);
}

int HcclAlltoAllV(const void *send, const void *send_counts, const void *send_at, int send_type, const void *recv,
                  const void *recv_counts, const void *recv_at, int recv_type, void *of, void *stream)
{
    const uint64_t *const out = send_counts, *const from = send_at, *const in = recv_counts, *const to = recv_at;
    comm *const c = of;
    const int code = sim_enter(__func__);
    if (code) return code;
    if (send_type != BYTES || recv_type != BYTES) return ACL_E_PARAM;
    exchange *x = calloc(1, sizeof *x);
    if (!x) abort();
    x->of = c;
    x->send = send;
    x->recv = (char *)(uintptr_t)recv;
    for (int r = 0; r < c->in->ranks; r++) x->out[r] = out[r], x->from[r] = from[r], x->in[r] = in[r], x->to[r] = to[r];
    const aclError error = sim_submit(stream, run, x);
    if (error) free(x);
    return error;
}

int HcclGetRankSize(void *of, uint32_t *n)
{
    *n = (uint32_t)((comm *)of)->in->ranks;
    return 0;
}

int HcclGetRankId(void *of, uint32_t *rank)
{
    *rank = (uint32_t)((comm *)of)->rank;
    return 0;
}

int HcclGetCommAsyncError(void *of, int *error)
{
    comm *const c = of;
    pthread_mutex_lock(&c->in->lock);
    *error = c->error;
    pthread_mutex_unlock(&c->in->lock);
    return 0;
}

const char *HcclGetErrorString(int code) { return code == 15 ? "the line is cut" : "an error of HCCL"; }

/* ---- for tests ---- */

void *fmoe_sim_hccl_group(int ranks)
{
    group *g = calloc(1, sizeof *g);
    if (!g || ranks > MOST || pthread_mutex_init(&g->lock, NULL) || pthread_cond_init(&g->changed, NULL)) abort();
    g->ranks = ranks;
    for (int r = 0; r < ranks; r++) g->comms[r] = (comm){g, r, 0};
    return g;
}

void *fmoe_sim_hccl_comm(void *of, int rank) { return &((group *)of)->comms[rank]; }

void fmoe_sim_hccl_break(void *of, int code) /* what HcclGetCommAsyncError answers from now on */
{
    comm *const c = of;
    pthread_mutex_lock(&c->in->lock);
    c->error = code;
    pthread_mutex_unlock(&c->in->lock);
}

void fmoe_sim_hccl_end(void *of) /* exchanges that wait for a peer end, with whatever came */
{
    group *const g = of;
    pthread_mutex_lock(&g->lock);
    g->ended = true;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

void fmoe_sim_hccl_free(void *of) /* when no stream has an exchange any more */
{
    group *const g = of;
    for (int i = 0; i < MOST * MOST; i++)
        while (g->mail[i / MOST][i % MOST]) {
            message *const next = g->mail[i / MOST][i % MOST]->next;
            free(g->mail[i / MOST][i % MOST]);
            g->mail[i / MOST][i % MOST] = next;
        }
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
    free(g);
}
