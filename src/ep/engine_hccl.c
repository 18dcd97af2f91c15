/* SPDX-License-Identifier: Apache-2.0
 *
 * engine_hccl.c - exchanges over HCCL: HcclAlltoAllV on the caller's communicator. The library is found in the process;
 * these are our own declarations of its public functions. Run against a small copy of its interface in tests, never on
 * an NPU. HCCL has no abort: after a deadline the engine answers with errors, but a stream may go on waiting. */
#include <stdio.h>
#include <stdlib.h>

#include "engine_stream.h"

typedef void *hccl_comm;
enum { HCCL_SUCCESS = 0, HCCL_INT8 = 0 };

static struct {
    int (*alltoallv)(const void *send, const void *send_counts, const void *send_at, int send_type, const void *recv,
                     const void *recv_counts, const void *recv_at, int recv_type, hccl_comm comm, void *stream);
    int (*size)(hccl_comm comm, uint32_t *n), (*rank)(hccl_comm comm, uint32_t *rank);
    int (*async_error)(hccl_comm comm, int *error);
    const char *(*text)(int error);
} hccl;

static fmoe_status hccl_open(void)
{
    static library_state state = LIBRARY_STATE_INIT;
    const library_symbol symbols[] = {{"HcclAlltoAllV", &hccl.alltoallv},
                                      {"HcclGetRankSize", &hccl.size},
                                      {"HcclGetRankId", &hccl.rank},
                                      {"HcclGetCommAsyncError", &hccl.async_error},
                                      {"HcclGetErrorString", &hccl.text}};
    return fmoe_ep_open_library(&state, "libhccl.so", getenv("FMOE_HCCL_LIBRARY"), symbols,
                                sizeof symbols / sizeof *symbols);
}

static fmoe_status answer(int code, const char *what)
{
    return code == HCCL_SUCCESS ? FMOE_OK : fmoe_fail(FMOE_ERR_EXCHANGE, "%s: %s", what, hccl.text(code));
}

static fmoe_status hccl_exchange(stream_engine *e, const void *send, const int64_t *send_rows, void *recv,
                                 const int64_t *recv_rows, int64_t row_bytes)
{
    const size_t n = (size_t)e->ranks;
    uint64_t *const at = calloc(4 * n, sizeof *at); /* bytes and where they begin, out and in */
    if (!at) return fmoe_fail(FMOE_ERR_NOMEM, "no memory for an exchange");
    for (size_t r = 0; r < n; r++) {
        at[r] = (uint64_t)(send_rows[r] * row_bytes);
        at[2 * n + r] = (uint64_t)(recv_rows[r] * row_bytes);
        if (!r) continue;
        at[n + r] = at[n + r - 1] + at[r - 1];
        at[3 * n + r] = at[3 * n + r - 1] + at[2 * n + r - 1];
    }
    const int code =
        hccl.alltoallv(send, at, at + n, HCCL_INT8, recv, at + 2 * n, at + 3 * n, HCCL_INT8, e->comm, e->side);
    free(at);
    return answer(code, "HcclAlltoAllV");
}

static const char *hccl_trouble(stream_engine *e)
{
    int error = HCCL_SUCCESS;
    const int code = hccl.async_error(e->comm, &error);
    if (code != HCCL_SUCCESS) return hccl.text(code);
    return error == HCCL_SUCCESS ? NULL : hccl.text(error);
}

static void hccl_abort(stream_engine *e) { (void)e; }

static const transport over_hccl = {"HCCL", hccl_exchange, hccl_trouble, hccl_abort, true};

struct fmoe_ep_hccl {
    stream_engine engine;
};

static fmoe_status fill(stream_engine *e)
{
    uint32_t ranks = 0, rank = 0;
    FMOE_TRY(answer(hccl.size(e->comm, &ranks), "HcclGetRankSize"));
    FMOE_TRY(answer(hccl.rank(e->comm, &rank), "HcclGetRankId"));
    e->ranks = (int32_t)ranks;
    e->rank = (int32_t)rank;
    return fmoe_ep_stream_start(e);
}

fmoe_status fmoe_ep_hccl_create(fmoe_ep_hccl **out, void *comm, fmoe_device device, void *stream, void *exchange_stream)
{
    if (!out) return fmoe_fail(FMOE_ERR_NULL, "engine is NULL");
    *out = NULL;
    if (!comm) return fmoe_fail(FMOE_ERR_NULL, "comm is NULL");
    FMOE_TRY(hccl_open());
    fmoe_ep_hccl *h = calloc(1, sizeof *h);
    if (!h) return fmoe_fail(FMOE_ERR_NOMEM, "no memory for an engine");
    h->engine = (stream_engine){.how = &over_hccl, .device = device, .comm = comm, .stream = stream};
    h->engine.side = exchange_stream;
    const fmoe_status status = fill(&h->engine);
    if (status) fmoe_ep_hccl_destroy(&h);
    *out = h;
    return status;
}

void fmoe_ep_hccl_destroy(fmoe_ep_hccl **engine)
{
    if (!engine || !*engine) return;
    fmoe_ep_stream_stop(&(*engine)->engine);
    free(*engine);
    *engine = NULL;
}

fmoe_status fmoe_ep_hccl_exchange(fmoe_ep_hccl *engine, fmoe_exchange *exchange)
{
    if (!engine || !exchange) return fmoe_fail(FMOE_ERR_NULL, "%s is NULL", engine ? "exchange" : "engine");
    fmoe_ep_stream_exchange(&engine->engine, exchange);
    return FMOE_OK;
}
