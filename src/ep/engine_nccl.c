/* SPDX-License-Identifier: Apache-2.0
 *
 * engine_nccl.c - exchanges over NCCL: a group of sends and receives on the caller's communicator. The library is found
 * in the process; these are our own declarations of its public functions (NCCL 2.7 and newer). */
#include <stdio.h>
#include <stdlib.h>

#include "engine_stream.h"

typedef void *nccl_comm;
enum { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7, NCCL_UINT8 = 1 };

static struct {
    int (*group_start)(void), (*group_end)(void);
    int (*send)(const void *from, size_t count, int type, int peer, nccl_comm comm, void *stream);
    int (*recv)(void *to, size_t count, int type, int peer, nccl_comm comm, void *stream);
    int (*count)(nccl_comm comm, int *n), (*rank)(nccl_comm comm, int *rank), (*device)(nccl_comm comm, int *device);
    int (*async_error)(nccl_comm comm, int *error), (*abort)(nccl_comm comm);
    const char *(*text)(int error);
} nccl;

static fmoe_status nccl_open(void)
{
    static library_state state = LIBRARY_STATE_INIT;
    const library_symbol symbols[] = {{"ncclGroupStart", &nccl.group_start},
                                      {"ncclGroupEnd", &nccl.group_end},
                                      {"ncclSend", &nccl.send},
                                      {"ncclRecv", &nccl.recv},
                                      {"ncclCommCount", &nccl.count},
                                      {"ncclCommUserRank", &nccl.rank},
                                      {"ncclCommCuDevice", &nccl.device},
                                      {"ncclCommGetAsyncError", &nccl.async_error},
                                      {"ncclCommAbort", &nccl.abort},
                                      {"ncclGetErrorString", &nccl.text}};
    return fmoe_ep_open_library(&state, "libnccl.so.2", getenv("FMOE_NCCL_LIBRARY"), symbols,
                                sizeof symbols / sizeof *symbols);
}

static fmoe_status answer(int code, const char *what)
{
    if (code == NCCL_SUCCESS || code == NCCL_IN_PROGRESS) return FMOE_OK; /* of a communicator that does not block */
    return fmoe_fail(FMOE_ERR_EXCHANGE, "%s: %s", what, nccl.text(code));
}

static fmoe_status nccl_exchange(stream_engine *e, const void *send, const int64_t *send_rows, void *recv,
                                 const int64_t *recv_rows, int64_t row_bytes)
{
    const char *from = send;
    char *to = recv;
    FMOE_TRY(answer(nccl.group_start(), "ncclGroupStart"));
    fmoe_status status = FMOE_OK;
    for (int32_t r = 0; r < e->ranks && !status; r++) {
        const size_t out = (size_t)(send_rows[r] * row_bytes), in = (size_t)(recv_rows[r] * row_bytes);
        if (r != e->rank && out) status = answer(nccl.send(from, out, NCCL_UINT8, r, e->comm, e->side), "ncclSend");
        if (r != e->rank && in && !status)
            status = answer(nccl.recv(to, in, NCCL_UINT8, r, e->comm, e->side), "ncclRecv");
        from += out;
        to += in;
    }
    const fmoe_status ended =
        answer(nccl.group_end(), "ncclGroupEnd"); /* whatever happened: a group must not stay open */
    return status ? status : ended;
}

static const char *nccl_trouble(stream_engine *e)
{
    int error = NCCL_SUCCESS;
    const int code = nccl.async_error(e->comm, &error);
    if (code != NCCL_SUCCESS) return nccl.text(code);
    return error == NCCL_SUCCESS || error == NCCL_IN_PROGRESS ? NULL : nccl.text(error);
}

static void nccl_abort(stream_engine *e) { nccl.abort(e->comm); }

static const transport over_nccl = {"NCCL", nccl_exchange, nccl_trouble, nccl_abort, false};

struct fmoe_ep_nccl {
    stream_engine engine;
};

static fmoe_status fill(stream_engine *e)
{
    int ranks = 0, rank = 0, device = -1;
    FMOE_TRY(answer(nccl.count(e->comm, &ranks), "ncclCommCount"));
    FMOE_TRY(answer(nccl.rank(e->comm, &rank), "ncclCommUserRank"));
    FMOE_TRY(answer(nccl.device(e->comm, &device), "ncclCommCuDevice"));
    if (e->device.type == FMOE_CUDA && device != e->device.id)
        return fmoe_fail(FMOE_ERR_ARG, "device.id is %d, the communicator is on device %d", e->device.id, device);
    e->ranks = ranks;
    e->rank = rank;
    return fmoe_ep_stream_start(e);
}

fmoe_status fmoe_ep_nccl_create(fmoe_ep_nccl **out, void *comm, fmoe_device device, void *stream, void *exchange_stream)
{
    if (!out) return fmoe_fail(FMOE_ERR_NULL, "engine is NULL");
    *out = NULL;
    if (!comm) return fmoe_fail(FMOE_ERR_NULL, "comm is NULL");
    FMOE_TRY(nccl_open());
    fmoe_ep_nccl *n = calloc(1, sizeof *n);
    if (!n) return fmoe_fail(FMOE_ERR_NOMEM, "no memory for an engine");
    n->engine = (stream_engine){.how = &over_nccl, .device = device, .comm = comm, .stream = stream};
    n->engine.side = exchange_stream;
    const fmoe_status status = fill(&n->engine);
    if (status) fmoe_ep_nccl_destroy(&n);
    *out = n;
    return status;
}

void fmoe_ep_nccl_destroy(fmoe_ep_nccl **engine)
{
    if (!engine || !*engine) return;
    fmoe_ep_stream_stop(&(*engine)->engine);
    free(*engine);
    *engine = NULL;
}

fmoe_status fmoe_ep_nccl_exchange(fmoe_ep_nccl *engine, fmoe_exchange *exchange)
{
    if (!engine || !exchange) return fmoe_fail(FMOE_ERR_NULL, "%s is NULL", engine ? "exchange" : "engine");
    fmoe_ep_stream_exchange(&engine->engine, exchange);
    return FMOE_OK;
}
