/* SPDX-License-Identifier: Apache-2.0
 *
 * engine_stream.h - what the engines over a device's own communication library (NCCL, HCCL) share: exchanges are put on
 * a stream, the host does not wait for them, and a thread watches that none of them lasts longer than its deadline. */
#ifndef FMOE_ENGINE_STREAM_H
#define FMOE_ENGINE_STREAM_H

#include <pthread.h>

#include "ep.h"

typedef struct stream_engine stream_engine;

/* The library. All of it is called under no lock. */
typedef struct transport {
    const char *name;
    /* Put an exchange on e->side; the rows of this rank itself are not moved by it where own_rows is false. */
    fmoe_status (*exchange)(stream_engine *e, const void *send, const int64_t *send_rows, void *recv,
                            const int64_t *recv_rows, int64_t row_bytes);
    const char *(*trouble)(stream_engine *e); /* what the library found wrong since, or NULL */
    void (*abort)(stream_engine *e);          /* exchanges under way end, if the library can do that */
    bool own_rows;
} transport;

typedef struct stream_request {
    struct stream_request *next, *older; /* in a list; of all, also those that nobody waited for after an error */
    void *done;                          /* an event */
    int64_t deadline_ms;
    bool captured; /* in a graph: nothing to watch */
} stream_request;

struct stream_engine {
    const transport *how;
    fmoe_device device;
    const fmoe_device_ops *ops;
    int32_t rank, ranks;
    void *comm, *stream, *side; /* side: the stream of exchanges */
    void *ready;                /* an event */
    char *counts, *counts_host; /* [2 * ranks * n] */
    size_t counts_bytes;
    int64_t timeout_ms;   /* the last one given */
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t changed;
    pthread_t watcher;
    bool watching, stop, broken;
    int64_t call_deadline_ms; /* of a call into the library; 0: none */
    char why[384];
    stream_request *watched, *spare, *newest;
};

/* e: filled but for what this makes. */
fmoe_status fmoe_ep_stream_start(stream_engine *e);
void fmoe_ep_stream_stop(stream_engine *e);
void fmoe_ep_stream_exchange(stream_engine *e, fmoe_exchange *exchange);

/* Functions of a library that the process has, or that is loaded now, once. path: of another than `name`, or NULL. */
typedef struct library_symbol {
    const char *name;
    void *to; /* of the function pointer */
} library_symbol;
typedef struct library_state {
    pthread_mutex_t lock;
    bool loaded;
} library_state;
#define LIBRARY_STATE_INIT {PTHREAD_MUTEX_INITIALIZER, false}
fmoe_status fmoe_ep_open_library(library_state *state, const char *name, const char *path,
                                 const library_symbol *symbols, size_t n);

#endif
