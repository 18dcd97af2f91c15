/* SPDX-License-Identifier: Apache-2.0
 *
 * engine_stream.c - exchanges on a stream. begin puts one on the side stream, after all that the layer has launched;
 * wait makes the layer's stream go on after it. The host waits for counts alone. A thread asks now and then whether
 * each exchange has passed, and gives the library up where one is late or in trouble: then streams go on, the rows are
 * worth nothing, and every call answers with the reason. */
#include "engine_stream.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { LOOK_MS = 20, MOST_MS = 1 << 30, LAST_WAIT_MS = 1000 };

static fmoe_status open_library(const char *name, const char *path, const library_symbol *symbols, size_t n)
{
    const bool given = path && *path;
    if (given && *path != '/')
        return fmoe_fail(FMOE_ERR_BACKEND, "the path of %s is '%.100s', must be an absolute one", name, path);
    /* The communicator is the caller's, so its library is in the process already, under whatever name. */
    void *library = given ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (!library && !given && dlsym(RTLD_DEFAULT, symbols[0].name)) library = dlopen(NULL, RTLD_NOW);
    if (!library && !given) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *const why = dlerror();
        return fmoe_fail(FMOE_ERR_BACKEND, "%s could not be loaded: %.250s", given ? path : name, why ? why : "?");
    }
    for (size_t i = 0; i < n; i++) {
        void *const f = dlsym(library, symbols[i].name);
        if (!f) return fmoe_fail(FMOE_ERR_BACKEND, "%s has no %s", given ? path : name, symbols[i].name);
        memcpy(symbols[i].to, &f, sizeof f);
    }
    return FMOE_OK; /* the library stays loaded */
}

fmoe_status fmoe_ep_open_library(library_state *state, const char *name, const char *path,
                                 const library_symbol *symbols, size_t n)
{
    pthread_mutex_lock(&state->lock);
    const fmoe_status status = state->loaded ? FMOE_OK : open_library(name, path, symbols, n);
    state->loaded = status == FMOE_OK;
    pthread_mutex_unlock(&state->lock);
    return status;
}

/* ---- giving up ---- */

static void give_up(stream_engine *e, const char *why)
{
    pthread_mutex_lock(&e->lock);
    const bool first = !e->broken;
    e->broken = true;
    if (first) snprintf(e->why, sizeof e->why, "%s", why ? why : "");
    pthread_mutex_unlock(&e->lock);
    if (first) e->how->abort(e);
}

static fmoe_status alive(stream_engine *e)
{
    char why[sizeof e->why];
    pthread_mutex_lock(&e->lock);
    const bool broken = e->broken;
    memcpy(why, e->why, sizeof why);
    pthread_mutex_unlock(&e->lock);
    return broken ? fmoe_fail(FMOE_ERR_EXCHANGE, "%s was given up: %s", e->how->name, why) : FMOE_OK;
}

/* Whether an exchange has passed; an error where it never will. */
static fmoe_status look(stream_engine *e, void *done, int64_t deadline_ms, bool *passed)
{
    FMOE_TRY(e->ops->passed(e->device.id, done, passed));
    if (*passed) return FMOE_OK;
    const char *const trouble = e->how->trouble(e);
    if (trouble) return fmoe_fail(FMOE_ERR_EXCHANGE, "%s: %s", e->how->name, trouble);
    if (ep_now_ms() > deadline_ms)
        return fmoe_fail(FMOE_ERR_EXCHANGE, "%s: not every rank has come by the deadline", e->how->name);
    return FMOE_OK;
}

/* Those that passed leave the list; false: one never will, and its error is set. Without the lock, on a list of its
 * own. */
static bool look_at_all(stream_engine *e, stream_request **list, stream_request **passed)
{
    for (stream_request **at = list; *at;) {
        stream_request *const q = *at;
        bool yes = false;
        if (look(e, q->done, q->deadline_ms, &yes)) return false;
        if (!yes) {
            at = &q->next;
            continue;
        }
        *at = q->next;
        q->next = *passed;
        *passed = q;
    }
    return true;
}

static void append(stream_request **list, stream_request *more)
{
    while (*list) list = &(*list)->next;
    *list = more;
}

static void *watch(void *arg)
{
    stream_engine *const e = arg;
    pthread_mutex_lock(&e->lock);
    while (!e->stop) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        t.tv_nsec += (long)LOOK_MS * 1000000;
        if (t.tv_nsec >= 1000000000) t.tv_sec++, t.tv_nsec -= 1000000000;
        if ((e->watched || e->call_deadline_ms) && !e->broken) pthread_cond_timedwait(&e->changed, &e->lock, &t);
        else pthread_cond_wait(&e->changed, &e->lock);
        if (e->broken || e->stop) continue;
        stream_request *mine = e->watched, *passed = NULL;
        const bool late = e->call_deadline_ms && ep_now_ms() > e->call_deadline_ms;
        e->watched = NULL;
        pthread_mutex_unlock(&e->lock);
        if (late) fmoe_fail(FMOE_ERR_EXCHANGE, "%s: not every rank has come by the deadline", e->how->name);
        if (late || !look_at_all(e, &mine, &passed)) {
            char why[sizeof e->why];
            snprintf(why, sizeof why, "%s", fmoe_last_error());
            give_up(e, why);
        }
        pthread_mutex_lock(&e->lock);
        append(&mine, e->watched); /* those that came meanwhile are later */
        e->watched = mine;
        append(&e->spare, passed);
    }
    pthread_mutex_unlock(&e->lock);
    return NULL;
}

/* ---- exchanges ---- */

static fmoe_status new_request(stream_engine *e, stream_request **out)
{
    pthread_mutex_lock(&e->lock);
    stream_request *q = e->spare;
    if (q) e->spare = q->next;
    pthread_mutex_unlock(&e->lock);
    if (!q) {
        if (!(q = calloc(1, sizeof *q))) return fmoe_fail(FMOE_ERR_NOMEM, "no memory for an exchange");
        const fmoe_status status = e->ops->event(e->device.id, &q->done);
        if (status) {
            free(q);
            return status;
        }
        pthread_mutex_lock(&e->lock);
        q->older = e->newest;
        e->newest = q;
        pthread_mutex_unlock(&e->lock);
    }
    q->next = NULL;
    *out = q;
    return FMOE_OK;
}

static void drop(stream_engine *e, stream_request *q)
{
    pthread_mutex_lock(&e->lock);
    q->next = e->spare;
    e->spare = q;
    pthread_mutex_unlock(&e->lock);
}

static void set_call_deadline(stream_engine *e, int64_t ms)
{
    pthread_mutex_lock(&e->lock);
    e->call_deadline_ms = ms;
    if (ms) pthread_cond_signal(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

/* On the side stream, after all that is on the layer's. */
static fmoe_status put(stream_engine *e, const void *send, const int64_t *send_rows, void *recv,
                       const int64_t *recv_rows, int64_t row_bytes)
{
    if (e->side != e->stream) {
        FMOE_TRY(e->ops->record(e->device.id, e->ready, e->stream));
        FMOE_TRY(e->ops->after(e->device.id, e->ready, e->side));
    }
    int64_t from = 0, to = 0;
    for (int32_t r = 0; r < e->rank; r++) from += send_rows[r], to += recv_rows[r];
    if (send_rows[e->rank] != recv_rows[e->rank])
        return fmoe_fail(FMOE_ERR_EXCHANGE, "rank %d sends itself other rows than it announced", e->rank);
    if (!e->how->own_rows && send_rows[e->rank])
        FMOE_TRY(e->ops->copy(e->device.id, (char *)recv + to * row_bytes, (const char *)send + from * row_bytes,
                              (size_t)(send_rows[e->rank] * row_bytes), e->side, false));
    set_call_deadline(e, ep_now_ms() + e->timeout_ms); /* the first one to a peer may wait for it, inside the library */
    const fmoe_status status = e->how->exchange(e, send, send_rows, recv, recv_rows, row_bytes);
    set_call_deadline(e, 0);
    const fmoe_status given_up = alive(e);
    return given_up ? given_up : status;
}

static fmoe_status stream_begin(void *ctx, const void *send, const int64_t *send_rows, void *recv,
                                const int64_t *recv_rows, int64_t row_bytes, void **request)
{
    stream_engine *const e = ctx;
    stream_request *q;
    FMOE_TRY(alive(e));
    FMOE_TRY(new_request(e, &q));
    q->captured = e->ops->capturing(e->device.id, e->stream);
    fmoe_status status = put(e, send, send_rows, recv, recv_rows, row_bytes);
    if (!status) status = e->ops->record(e->device.id, q->done, e->side);
    if (status) drop(e, q);
    else *request = q;
    return status;
}

static fmoe_status stream_wait(void *ctx, void *request, int64_t timeout_ms)
{
    stream_engine *const e = ctx;
    stream_request *const q = request;
    if (!q) return fmoe_fail(FMOE_ERR_EXCHANGE, "%s: no such exchange", e->how->name);
    fmoe_status status = alive(e);
    if (!status && e->side != e->stream) status = e->ops->after(e->device.id, q->done, e->stream);
    if (status || q->captured) {
        drop(e, q);
        return status;
    }
    e->timeout_ms = fmoe_min(timeout_ms, MOST_MS);
    q->deadline_ms = ep_now_ms() + e->timeout_ms;
    pthread_mutex_lock(&e->lock);
    append(&e->watched, q);
    pthread_cond_signal(&e->changed);
    pthread_mutex_unlock(&e->lock);
    return FMOE_OK;
}

static fmoe_status counts_memory(stream_engine *e, size_t bytes)
{
    if (bytes <= e->counts_bytes) return FMOE_OK;
    if (e->counts) e->ops->free(e->device.id, e->counts, false);
    if (e->counts_host) e->ops->free(e->device.id, e->counts_host, true);
    e->counts_bytes = 0;
    e->counts = e->ops->alloc(e->device.id, bytes, false);
    e->counts_host = e->ops->alloc(e->device.id, bytes, true);
    if (!e->counts || !e->counts_host) return fmoe_fail(FMOE_ERR_NOMEM, "no memory for %zu bytes of counts", bytes);
    e->counts_bytes = bytes;
    return FMOE_OK;
}

/* The host waits here, and looks itself while it does. */
static fmoe_status stream_counts(void *ctx, const int64_t *send, int64_t *recv, int64_t n, int64_t timeout_ms)
{
    stream_engine *const e = ctx;
    const size_t bytes = (size_t)e->ranks * (size_t)n * 8;
    stream_request *q;
    e->timeout_ms = fmoe_min(timeout_ms, MOST_MS);
    FMOE_TRY(alive(e));
    FMOE_TRY(counts_memory(e, 2 * bytes));
    int64_t *const one = malloc((size_t)e->ranks * sizeof *one);
    if (!one) return fmoe_fail(FMOE_ERR_NOMEM, "no memory for counts");
    for (int32_t r = 0; r < e->ranks; r++) one[r] = 1;
    memcpy(e->counts_host, send, bytes);
    fmoe_status status = new_request(e, &q);
    if (status) {
        free(one);
        return status;
    }
    status = fmoe_device_cross(e->ops, e->device.id, false, e->counts, e->counts_host, bytes, e->stream, false);
    if (!status) status = put(e, e->counts, one, e->counts + bytes, one, n * 8);
    if (!status)
        status = fmoe_device_cross(e->ops, e->device.id, true, e->counts_host + bytes, e->counts + bytes, bytes,
                                   e->side, false);
    if (!status) status = e->ops->record(e->device.id, q->done, e->side);
    const int64_t deadline = ep_now_ms() + e->timeout_ms;
    bool passed = false;
    for (int64_t turn = 0; !status && !passed; turn++) {
        status = look(e, q->done, deadline, &passed);
        if (!status && !passed) status = alive(e);
        if (turn > 2000 && !passed) nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
    if (!status) memcpy(recv, e->counts_host + bytes, bytes);
    drop(e, q);
    free(one);
    return status;
}

static void stream_abort(void *ctx, const char *why) { give_up(ctx, why); }

void fmoe_ep_stream_exchange(stream_engine *e, fmoe_exchange *x)
{
    *x = (fmoe_exchange){.size = sizeof *x, .rank = e->rank, .ranks = e->ranks, .ctx = e};
    x->counts = stream_counts;
    x->begin = stream_begin;
    x->wait = stream_wait;
    x->abort = stream_abort;
    x->on_device = 1;
}

/* ---- life ---- */

fmoe_status fmoe_ep_stream_start(stream_engine *e)
{
    e->timeout_ms = 600000;
    FMOE_TRY(fmoe_device_find(e->device, &e->ops));
    FMOE_TRY(e->ops->event(e->device.id, &e->ready));
    pthread_condattr_t attr;
    if (pthread_mutex_init(&e->lock, NULL) || pthread_condattr_init(&attr) ||
        pthread_condattr_setclock(&attr, CLOCK_MONOTONIC) || pthread_cond_init(&e->changed, &attr))
        return fmoe_fail(FMOE_ERR_NOMEM, "no condition variable");
    pthread_condattr_destroy(&attr);
    if (pthread_create(&e->watcher, NULL, watch, e)) return fmoe_fail(FMOE_ERR_NOMEM, "no thread to watch exchanges");
    e->watching = true;
    return FMOE_OK;
}

void fmoe_ep_stream_stop(stream_engine *e)
{
    if (e->watching) {
        pthread_mutex_lock(&e->lock);
        e->stop = true;
        pthread_cond_signal(&e->changed);
        pthread_mutex_unlock(&e->lock);
        pthread_join(e->watcher, NULL);
        pthread_cond_destroy(&e->changed);
        pthread_mutex_destroy(&e->lock);
    }
    if (!e->ops) return;
    while (e->newest) {
        stream_request *const q = e->newest;
        e->newest = q->older;
        e->ops->event_free(e->device.id, q->done);
        free(q);
    }
    if (e->ready) e->ops->event_free(e->device.id, e->ready);
    if (e->broken && e->ops->idle && !e->ops->idle(e->device.id, LAST_WAIT_MS)) return; /* it may still write there */
    if (e->counts) e->ops->free(e->device.id, e->counts, false);
    if (e->counts_host) e->ops->free(e->device.id, e->counts_host, true);
}
