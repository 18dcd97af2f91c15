/* SPDX-License-Identifier: Apache-2.0
 *
 * fusedmoe_ep.h - expert parallelism: the experts of one layer on several ranks, tokens travel. Part of libfusedmoe.
 *
 * The layer is split at its communication points, and an engine that exists stands between the halves: a table of
 * exchange functions (fmoe_exchange) over MPI (fusedmoe_mpi.h), torch.distributed (Python), NCCL, HCCL, or threads
 * (below).
 *
 *   count      every rank tells every other how many rows and (token, expert) pairs it will send
 *   dispatch   one row of x for each (token, destination rank): a token whose experts share a rank travels once
 *   compute    the experts of this rank on what came
 *   combine    rows come back and are summed at home
 *
 * and the same in reverse for the gradients. Every rank enters every phase, also one without tokens or experts.
 *
 * On the way back, by option:
 *   FMOE_EP_EXACT  a row for each (token, expert), as one process has it before its sum (the CPU in f32, devices in
 *                  the layer's dtype), summed at home in the order of one process. The bits of EP = n are those of one
 *                  process that has all tokens, rank after rank: outputs, and every gradient. (Replicas: a gradient is
 *                  in parts, one for each rank that has the expert, for the caller to add.)
 *   FMOE_EP_LEAN   one weighted partial sum for each (token, rank), in the layer's dtype: fewest bytes, another
 * rounding of out and dx. With u of the dtype, m <= min(k, ranks) partial sums s_i of a token, and v = 2^-24: |lean -
 * exact| <= u * sum |s_i| + u |out| + (k + m) v * sum_j |p_j y_j|  (first order). Gradients of weights and of p have
 * the bits of one process here too.
 *
 * Rows are ordered by (source rank, source row), never by arrival: same inputs, same bits.
 *
 * What differs from fusedmoe.h: how many rows come is known after the count alone, so a call (fmoe_ep_call) allocates,
 * by the engine's functions where it has them. On the CPU, CUDA and Ascend, in f32, bf16 and f16.
 *
 * Errors: what is wrong with a rank's own arguments is told to the others in the count; every rank returns an error
 * that names rank and phase, and the next call works. After any later error, and after a deadline, the engine is given
 * up (fmoe_exchange.abort): all ranks that live return an error, and make a new engine to go on.
 *
 * On CUDA the count waits for the device, to read the numbers of rows (with a capacity it does not); nothing else does.
 * What only the device can find (an id out of range with a capacity, a pair that was not announced) is skipped there
 * and reported by the next call. On Ascend the host says where rows go: the count waits for ids, the dispatch for what
 * others sent, both by the deadline, and what is wrong is an error of that call. docs/parallel.md
 */
#ifndef FUSEDMOE_EP_H
#define FUSEDMOE_EP_H

#include "fusedmoe.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- The engine: a table of functions ------------------------------------------------------------------- *
 *
 * All but alloc and free are collective: every rank of the group calls them in the same order. They answer FMOE_OK, or
 * another status after fmoe_ep_fail(). */
typedef struct fmoe_exchange {
    size_t size; /* sizeof(fmoe_exchange) */
    int32_t rank, ranks;
    void *ctx;
    /* n numbers for each rank: recv[r*n ..] are those that rank r has in send[rank*n ..]. */
    fmoe_status (*counts)(void *ctx, const int64_t *send, int64_t *recv, int64_t n, int64_t timeout_ms);
    /* Rows of row_bytes, those of rank 0 first: send_rows[r] to rank r, recv_rows[r] from rank r. The buffers belong to
     * the engine until wait (or abort) has answered; the arrays of counts only for this call. A peer that sends
     * another number of rows is an error, before anything is written. */
    fmoe_status (*begin)(void *ctx, const void *send, const int64_t *send_rows, void *recv, const int64_t *recv_rows,
                         int64_t row_bytes, void **request);
    fmoe_status (*wait)(void *ctx, void *request,
                        int64_t timeout_ms); /* the request is gone after it, whatever it answers */
    /* Give up: no buffer is read or written after it (those of `alloc`: before `free` gives them back), and the peers
     * learn of it, with this text, as soon as the engine can tell them, or by their deadline. */
    void (*abort)(void *ctx, const char *why);
    /* Memory of the host for the buffers, or NULL, both: malloc and free. */
    void *(*alloc)(void *ctx, size_t bytes);
    void (*free)(void *ctx, void *memory);
    /* For layers on a device. 1: begin takes memory of the device; what it does comes after all that was launched on
     * the caller's stream, and what is launched there after wait comes after it: the host need not wait. 0: begin takes
     * memory of the host, and rows pass through it. */
    int32_t on_device;
    /* Memory of the device, in the order of the caller's stream, or NULL, both: the library's own. */
    void *(*device_alloc)(void *ctx, size_t bytes);
    void (*device_free)(void *ctx, void *memory);
} fmoe_exchange;

/* For engines: set fmoe_last_error() of this thread, and return the status. */
FMOE_API fmoe_status fmoe_ep_fail(fmoe_status status, const char *text);

/* ---- A layer over ranks ---------------------------------------------------------------------------------- */

typedef enum fmoe_ep_mode { FMOE_EP_EXACT = 0, FMOE_EP_LEAN = 1 } fmoe_ep_mode;

typedef struct fmoe_ep_desc {
    size_t size;                   /* sizeof(fmoe_ep_desc) */
    const fmoe_desc *layer;        /* FMOE_OP_EXPERTS of the whole layer: E counts the experts of all ranks */
    const fmoe_exchange *exchange; /* copied; its ctx must outlive the layer */
    /* Where experts are: expert[i] is on rank[i], in this order on each rank. Every expert at least once; more than
     * once is a replica: a rank uses its own, else the one that (its rank + expert) modulo their number picks. NULL,
     * both: rank r has the experts from r*E/ranks to (r+1)*E/ranks. */
    const int32_t *expert, *rank;
    int64_t placements;
    int32_t mode;     /* fmoe_ep_mode */
    int32_t chunks;   /* tokens are cut in so many pieces, and the exchange of one runs beside the products of another.
                         0: 1. Weight gradients are computed last, over all of them. */
    int64_t capacity; /* rows a rank sends to another at most; tokens beyond it skip that rank. 0: no limit (dropless).
                         On CUDA, buffers and messages have that size (and there is one chunk): nothing waits for
                         the host, and a pass can be captured in a graph, after one that was not */
    int64_t timeout_ms; /* of every exchange; 0: 600000 */
} fmoe_ep_desc;

#define FMOE_EP_DESC_INIT ((fmoe_ep_desc){.size = sizeof(fmoe_ep_desc)}) /* C only */

typedef struct fmoe_ep fmoe_ep;           /* a layer; one call of it at a time */
typedef struct fmoe_ep_call fmoe_ep_call; /* one batch of tokens on its way, and what its backward needs */

FMOE_API fmoe_status fmoe_ep_create(fmoe_ep **ep, const fmoe_ep_desc *desc);
FMOE_API void fmoe_ep_destroy(fmoe_ep **ep); /* after its calls. Sets NULL; NULL is allowed */

/* The experts of this rank, in the order of its weights; at most n of them are written. Returns how many there are. */
FMOE_API int64_t fmoe_ep_local(const fmoe_ep *ep, int32_t *experts, int64_t n);

/* ---- Running --------------------------------------------------------------------------------------------- *
 *
 * Tensors as in fmoe_experts_args, of this rank: its T tokens (which may differ from rank to rank), ids over all E, and
 * weights of its own experts alone, E there being their number. A rank without experts gives none. Each phase reads
 * what it needs; the tensors stay the same from phase to phase. */
typedef struct fmoe_ep_args {
    size_t size;
    const fmoe_tensor *x;        /* dispatch forward: in [T,H] */
    const fmoe_tensor *ids;      /* count, combine: in [T,k] */
    const fmoe_tensor *weights;  /* count, combine: in [T,k] */
    const fmoe_tensor *out;      /* combine forward: out [T,H] */
    const fmoe_tensor *dout;     /* dispatch backward: in [T,H] */
    const fmoe_tensor *dx;       /* combine backward: out [T,H] (all ranks, or NULL on all) */
    const fmoe_tensor *dweights; /* combine backward: out [T,k] */
    int32_t inference;           /* count: 1: no backward will follow; nothing is kept */
    int32_t accumulate;          /* compute backward: gradients in dw are added to */
    fmoe_weights w;              /* compute: in */
    fmoe_weights dw;             /* compute backward: out, each or NULL */
    void *stream;                /* of a device: where all is launched. One stream for all calls of a layer */
    const fmoe_tensor *dropped;  /* count, with a capacity: out [1,1] int64, slots that were dropped, or NULL */
} fmoe_ep_args;

#define FMOE_EP_ARGS_INIT ((fmoe_ep_args){.size = sizeof(fmoe_ep_args)})

/* Phase by phase. count makes the call; free it whatever happened (0 after an error of count). dx is computed where the
 * backward's dispatch was given it. */
FMOE_API fmoe_status fmoe_ep_count(fmoe_ep *ep, const fmoe_ep_args *args, fmoe_ep_call **call);
FMOE_API fmoe_status fmoe_ep_dispatch(fmoe_ep_call *call, fmoe_pass pass, const fmoe_ep_args *args);
FMOE_API fmoe_status fmoe_ep_compute(fmoe_ep_call *call, fmoe_pass pass, const fmoe_ep_args *args);
FMOE_API fmoe_status fmoe_ep_combine(fmoe_ep_call *call, fmoe_pass pass, const fmoe_ep_args *args);
FMOE_API void fmoe_ep_call_free(fmoe_ep_call **call);

/* All of a pass, its chunks overlapped. call may be NULL where args.inference is 1. One backward for each forward. */
FMOE_API fmoe_status fmoe_ep_forward(fmoe_ep *ep, const fmoe_ep_args *args, fmoe_ep_call **call);
FMOE_API fmoe_status fmoe_ep_backward(fmoe_ep_call *call, const fmoe_ep_args *args);

/* What a call moved so far, to and from other ranks. */
typedef struct fmoe_ep_stats {
    size_t size;
    int64_t rows_out, rows_in; /* rows of x sent and received: (token, rank) pairs */
    int64_t pairs_out, pairs_in;
    int64_t bytes_counts; /* sent, in counts, */
    int64_t bytes_pairs;  /* in expert ids and routing weights, 8 for each (token, expert), */
    int64_t bytes_out;    /* in rows of x and dout, */
    int64_t bytes_back;   /* and in rows that go home: y, dx, dp */
    int64_t dropped;      /* slots beyond the capacity; -1: counted on the device (CUDA: fmoe_ep_args.dropped) */
} fmoe_ep_stats;

FMOE_API fmoe_status fmoe_ep_call_stats(const fmoe_ep_call *call, fmoe_ep_stats *stats);

/* ---- Engine: threads of one process ---------------------------------------------------------------------- *
 *
 * For tests, and for several devices of one process: each rank is a thread. After an abort, or a deadline, every call
 * answers with an error; make a new group then. */
typedef struct fmoe_ep_threads fmoe_ep_threads;
FMOE_API fmoe_status fmoe_ep_threads_create(fmoe_ep_threads **group, int32_t ranks); /* 1 to 1024 */
FMOE_API void fmoe_ep_threads_destroy(fmoe_ep_threads **group);
FMOE_API fmoe_status fmoe_ep_threads_exchange(fmoe_ep_threads *group, int32_t rank, fmoe_exchange *exchange);
/* This rank is gone without a word, as if it had died: the others meet their deadline. */
FMOE_API void fmoe_ep_threads_leave(fmoe_ep_threads *group, int32_t rank);

/* ---- Engines: NCCL and HCCL ------------------------------------------------------------------------------- *
 *
 * Over the caller's communicator (ncclComm_t, HcclComm), whose library is found in the process, or where
 * FMOE_NCCL_LIBRARY and FMOE_HCCL_LIBRARY say (absolute paths). Rows stay on the device: exchanges are put on
 * exchange_stream, after what the layer launched on stream; with chunks that overlap they are two streams, else they
 * may be one. The host waits for counts alone. A thread of the engine watches the deadlines: NCCL is given up by
 * ncclCommAbort then (the communicator is gone, nothing hangs), HCCL cannot be. Create and destroy an engine when
 * nothing is under way. A communicator serves one engine at a time. The HCCL engine was never run on an NPU. */
typedef struct fmoe_ep_nccl fmoe_ep_nccl;
FMOE_API fmoe_status fmoe_ep_nccl_create(fmoe_ep_nccl **engine, void *comm, fmoe_device device, void *stream,
                                         void *exchange_stream);
FMOE_API void fmoe_ep_nccl_destroy(fmoe_ep_nccl **engine); /* sets NULL; NULL is allowed */
FMOE_API fmoe_status fmoe_ep_nccl_exchange(fmoe_ep_nccl *engine, fmoe_exchange *exchange);

typedef struct fmoe_ep_hccl fmoe_ep_hccl;
FMOE_API fmoe_status fmoe_ep_hccl_create(fmoe_ep_hccl **engine, void *comm, fmoe_device device, void *stream,
                                         void *exchange_stream);
FMOE_API void fmoe_ep_hccl_destroy(fmoe_ep_hccl **engine);
FMOE_API fmoe_status fmoe_ep_hccl_exchange(fmoe_ep_hccl *engine, fmoe_exchange *exchange);

#ifdef __cplusplus
}
#endif
#endif
