/* SPDX-License-Identifier: Apache-2.0
 *
 * engine_mpi.c - exchanges over MPI, as one message from each rank to each other, also of no rows: so that a peer which
 * sends what it did not announce is found out, and one that does not come is known by its number. Messages between two
 * ranks do not overtake one another, so all exchanges share a tag. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fusedmoe_mpi.h"

enum { TAG_ROWS = 1, TAG_ABORT = 2, TEXT = 384 };

typedef struct block { /* memory of an exchange, before what the caller sees of it */
    struct block *next, *prev;
} block;

typedef struct request {
    struct request *next, *prev; /* of those under way */
    int64_t *recv_rows;
    MPI_Datatype row;
    MPI_Request *of; /* [ranks] receives, [ranks] sends */
} request;

struct fmoe_ep_mpi {
    MPI_Comm comm;
    int rank, ranks, broken;
    block blocks;     /* a ring */
    request requests; /* a ring */
    char why[TEXT];   /* what is being sent to the peers after an abort */
};

static fmoe_status fail(const char *what, int rank, int code)
{
    char text[TEXT + MPI_MAX_ERROR_STRING], reason[MPI_MAX_ERROR_STRING] = "";
    int n = 0;
    if (code != MPI_SUCCESS) MPI_Error_string(code, reason, &n);
    if (rank >= 0) snprintf(text, sizeof text, "rank %d %s%s%s", rank, what, *reason ? ": " : "", reason);
    else snprintf(text, sizeof text, "%s%s%s", what, *reason ? ": " : "", reason);
    return fmoe_ep_fail(FMOE_ERR_EXCHANGE, text);
}

fmoe_status fmoe_ep_mpi_create(fmoe_ep_mpi **out, MPI_Comm comm)
{
    int ready = 0, done = 0, code;
    if (!out) return fmoe_ep_fail(FMOE_ERR_NULL, "engine is NULL");
    *out = NULL;
    MPI_Initialized(&ready);
    MPI_Finalized(&done);
    if (!ready || done) return fmoe_ep_fail(FMOE_ERR_BACKEND, "MPI is not initialized, or finalized");
    if (comm == MPI_COMM_NULL) return fmoe_ep_fail(FMOE_ERR_NULL, "comm is MPI_COMM_NULL");
    fmoe_ep_mpi *e = calloc(1, sizeof *e);
    if (!e) return fmoe_ep_fail(FMOE_ERR_NOMEM, "no memory for an engine");
    if ((code = MPI_Comm_dup(comm, &e->comm)) != MPI_SUCCESS) {
        free(e);
        return fail("MPI_Comm_dup", -1, code);
    }
    MPI_Comm_set_errhandler(e->comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(e->comm, &e->rank);
    MPI_Comm_size(e->comm, &e->ranks);
    e->blocks.next = e->blocks.prev = &e->blocks;
    e->requests.next = e->requests.prev = &e->requests;
    *out = e;
    return FMOE_OK;
}

void fmoe_ep_mpi_destroy(fmoe_ep_mpi **engine)
{
    if (!engine || !*engine) return;
    fmoe_ep_mpi *e = *engine;
    *engine = NULL;
    if (e->broken) return; /* messages of it may be under way: it stays */
    MPI_Comm_free(&e->comm);
    free(e);
}

/* ---- memory ---- */

static void *mpi_alloc(void *ctx, size_t bytes)
{
    fmoe_ep_mpi *e = ctx;
    block *b = bytes > SIZE_MAX - 64 ? NULL : aligned_alloc(64, (bytes + 2 * 64 - 1) / 64 * 64);
    if (!b) return NULL;
    b->next = &e->blocks;
    b->prev = e->blocks.prev;
    b->prev->next = b->next->prev = b;
    return (char *)b + 64;
}

static void mpi_free(void *ctx, void *memory)
{
    fmoe_ep_mpi *e = ctx;
    if (!memory || e->broken) return; /* MPI may still read it */
    block *b = (block *)(void *)((char *)memory - 64);
    b->prev->next = b->next;
    b->next->prev = b->prev;
    free(b);
}

/* ---- exchanges ---- */

static int post(const fmoe_ep_mpi *e, int peer, const char *send, int64_t send_rows, char *recv, int64_t recv_rows,
                request *r)
{
#if MPI_VERSION >= 4
    const int code = MPI_Irecv_c(recv, recv_rows, r->row, peer, TAG_ROWS, e->comm, &r->of[peer]);
    return code ? code : MPI_Isend_c(send, send_rows, r->row, peer, TAG_ROWS, e->comm, &r->of[e->ranks + peer]);
#else
    const int code = MPI_Irecv(recv, (int)recv_rows, r->row, peer, TAG_ROWS, e->comm, &r->of[peer]);
    return code ? code : MPI_Isend(send, (int)send_rows, r->row, peer, TAG_ROWS, e->comm, &r->of[e->ranks + peer]);
#endif
}

static fmoe_status too_many(const char *what, int peer, int64_t rows)
{
    char text[160];
    snprintf(text, sizeof text, "%lld rows %s rank %d: this MPI counts to %d", (long long)rows, what, peer, INT_MAX);
    return fmoe_ep_fail(FMOE_ERR_OVERFLOW, text);
}

static fmoe_status mpi_begin(void *ctx, const void *send, const int64_t *send_rows, void *recv,
                             const int64_t *recv_rows, int64_t row_bytes, void **out)
{
    fmoe_ep_mpi *e = ctx;
    const size_t n = (size_t)e->ranks;
    if (e->broken) return fmoe_ep_fail(FMOE_ERR_EXCHANGE, "the engine was given up");
    if (row_bytes > INT_MAX) return too_many("(bytes of a row) for", e->rank, row_bytes);
    for (int r = 0; r < e->ranks && MPI_VERSION < 4; r++)
        if (send_rows[r] > INT_MAX || recv_rows[r] > INT_MAX)
            return too_many("to or from", r, send_rows[r] > INT_MAX ? send_rows[r] : recv_rows[r]);
    request *q = malloc(sizeof *q + n * sizeof *q->recv_rows + 2 * n * sizeof *q->of);
    if (!q) return fmoe_ep_fail(FMOE_ERR_NOMEM, "no memory for an exchange");
    q->recv_rows = (int64_t *)(void *)(q + 1);
    q->of = (MPI_Request *)(void *)(q->recv_rows + n);
    memcpy(q->recv_rows, recv_rows, n * sizeof *recv_rows);
    for (size_t i = 0; i < 2 * n; i++) q->of[i] = MPI_REQUEST_NULL;
    MPI_Type_contiguous((int)row_bytes, MPI_BYTE, &q->row);
    MPI_Type_commit(&q->row);
    q->next = &e->requests;
    q->prev = e->requests.prev;
    q->prev->next = q->next->prev = q;
    *out = q;
    const char *from = send;
    char *to = recv;
    int code = MPI_SUCCESS;
    for (int r = 0; r < e->ranks; r++) {
        if (r != e->rank) code = post(e, r, from, send_rows[r], to, recv_rows[r], q);
        else if (send_rows[r] != recv_rows[r]) return fail("sends itself other rows than it announced", r, MPI_SUCCESS);
        else if (send_rows[r]) memcpy(to, from, (size_t)(send_rows[r] * row_bytes));
        if (code != MPI_SUCCESS) return fail("cannot be reached", r, code);
        from += send_rows[r] * row_bytes;
        to += recv_rows[r] * row_bytes;
    }
    return FMOE_OK;
}

/* A peer that gave up says so, and why. */
static fmoe_status look_for_abort(fmoe_ep_mpi *e)
{
    int there = 0;
    MPI_Status status;
    char text[TEXT] = "", why[TEXT + 16];
    if (MPI_Iprobe(MPI_ANY_SOURCE, TAG_ABORT, e->comm, &there, &status) != MPI_SUCCESS || !there) return FMOE_OK;
    MPI_Recv(text, TEXT - 1, MPI_CHAR, status.MPI_SOURCE, TAG_ABORT, e->comm, MPI_STATUS_IGNORE);
    snprintf(why, sizeof why, "gave up: %s", text);
    return fail(why, status.MPI_SOURCE, MPI_SUCCESS);
}

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* One of the messages: done, or not yet. */
static fmoe_status test_one(fmoe_ep_mpi *e, request *q, int i, int *done)
{
    MPI_Status status;
    int flag = 0;
    if (q->of[i] == MPI_REQUEST_NULL) return FMOE_OK;
    const int code = MPI_Test(&q->of[i], &flag, &status), peer = i % e->ranks;
    if (code != MPI_SUCCESS)
        return fail(i < e->ranks ? "sends other rows than it announced" : "cannot be reached", peer, code);
    if (!flag) *done = 0;
    if (!flag || i >= e->ranks) return FMOE_OK;
    MPI_Count elements = 0;
    MPI_Get_elements_x(&status, q->row, &elements); /* bytes */
    int size = 0;
    MPI_Type_size(q->row, &size);
    if (elements != (MPI_Count)q->recv_rows[peer] * size)
        return fail("sends fewer rows than it announced", peer, MPI_SUCCESS);
    return FMOE_OK;
}

static void forget(request *q)
{
    q->prev->next = q->next;
    q->next->prev = q->prev;
    MPI_Type_free(&q->row);
    free(q);
}

static fmoe_status mpi_wait(void *ctx, void *request_, int64_t timeout_ms)
{
    fmoe_ep_mpi *e = ctx;
    request *q = request_;
    if (e->broken || !q) return fmoe_ep_fail(FMOE_ERR_EXCHANGE, "the engine was given up");
    const int64_t began = now_ms();
    for (int64_t turn = 0;; turn++) {
        int done = 1;
        fmoe_status status = FMOE_OK;
        for (int i = 0; i < 2 * e->ranks && !status; i++) status = test_one(e, q, i, &done);
        if (!status && done) {
            forget(q);
            return FMOE_OK;
        }
        if (!status) status = look_for_abort(e);
        if (status) return status; /* the caller aborts, which takes the request along */
        if (now_ms() - began > timeout_ms) break;
        if (turn > 100) nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL); /* ranks may share a core */
    }
    int peer = 0;
    for (int i = 2 * e->ranks - 1; i >= 0; i--)
        if (q->of[i] != MPI_REQUEST_NULL) peer = i % e->ranks;
    return fail("has not come by the deadline", peer, MPI_SUCCESS);
}

static fmoe_status mpi_counts(void *ctx, const int64_t *send, int64_t *recv, int64_t n, int64_t timeout_ms)
{
    fmoe_ep_mpi *e = ctx;
    void *q = NULL;
    int64_t *const one = malloc((size_t)e->ranks * sizeof *one);
    if (!one) return fmoe_ep_fail(FMOE_ERR_NOMEM, "no memory for counts");
    for (int r = 0; r < e->ranks; r++) one[r] = 1;
    /* The engine's memory: what was not taken when the deadline passes stays readable. */
    const size_t bytes = (size_t)e->ranks * (size_t)n * sizeof *send;
    int64_t *const out = mpi_alloc(ctx, 2 * bytes);
    if (!out) {
        free(one);
        return fmoe_ep_fail(FMOE_ERR_NOMEM, "no memory for counts");
    }
    int64_t *const in = out + (size_t)e->ranks * (size_t)n;
    memcpy(out, send, bytes);
    fmoe_status status = mpi_begin(ctx, out, one, in, one, n * (int64_t)sizeof *send, &q);
    if (!status) status = mpi_wait(ctx, q, timeout_ms);
    if (!status) memcpy(recv, in, bytes);
    if (!status) mpi_free(ctx, out);
    free(one);
    return status;
}

static void mpi_abort(void *ctx, const char *why)
{
    fmoe_ep_mpi *e = ctx;
    if (e->broken) return;
    e->broken = 1;
    snprintf(e->why, sizeof e->why, "%s", why ? why : "");
    for (int r = 0; r < e->ranks; r++) {
        MPI_Request sent = MPI_REQUEST_NULL;
        if (r == e->rank) continue;
        if (MPI_Isend(e->why, (int)strlen(e->why), MPI_CHAR, r, TAG_ABORT, e->comm, &sent) == MPI_SUCCESS)
            MPI_Request_free(&sent);
    }
    for (request *q = e->requests.next, *next; q != &e->requests; q = next) {
        next = q->next;
        for (int i = 0; i < 2 * e->ranks; i++) {
            if (q->of[i] == MPI_REQUEST_NULL) continue;
            if (i < e->ranks) MPI_Cancel(&q->of[i]);
            MPI_Request_free(&q->of[i]);
        }
        forget(q);
    }
}

fmoe_status fmoe_ep_mpi_exchange(fmoe_ep_mpi *e, fmoe_exchange *x)
{
    if (!e || !x) return fmoe_ep_fail(FMOE_ERR_NULL, e ? "exchange is NULL" : "engine is NULL");
    *x = (fmoe_exchange){.size = sizeof *x, .rank = e->rank, .ranks = e->ranks, .ctx = e};
    x->counts = mpi_counts;
    x->begin = mpi_begin;
    x->wait = mpi_wait;
    x->abort = mpi_abort;
    x->alloc = mpi_alloc;
    x->free = mpi_free;
    return FMOE_OK;
}
