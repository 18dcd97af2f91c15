/* SPDX-License-Identifier: Apache-2.0
 *
 * ep.h - a layer over ranks, and one batch on its way, as the files of this folder see them.
 *
 *   ep.c          a layer: where its experts are, the plans of what this rank computes
 *   memory.c      memory of the device and of the host
 *   count.c       where each token goes; what comes; the memory for it
 *   rows.c        packing, exchanging and unpacking rows; the sums at home
 *   compute.c     the experts of this rank, by fusedmoe.h
 *   run.c         the phases, alone and overlapped
 *   device_cpu.c  indices, as the CPU makes them (device.h); other devices have kernels for it,
 *   host.c        or leave it to the host
 *   engine_*.c    what exchanges
 *
 * Orders. At home, rows and pairs stand by (chunk, destination, token, slot); where they arrive, by (chunk, source,
 * source row, slot). One process that has the tokens of all ranks has them by (source, chunk, row, slot): the order in
 * which weight gradients are summed. */
#ifndef FMOE_EP_H
#define FMOE_EP_H

#include <time.h>

#include "device.h"
#include "error.h"
#include "fusedmoe_ep.h"
#include "util.h"

struct fmoe_ep {
    fmoe_desc d; /* the whole layer */
    fmoe_exchange x;
    const fmoe_device_ops *ops;
    bool cpu;    /* the layer's device */
    bool staged; /* rows of a device, an engine of the host */
    bool hosted; /* a device whose indices the host makes (host.c) */
    bool fixed;  /* a capacity on a device that makes them: buffers and messages have its size */
    int32_t mode, chunks;
    int64_t capacity, timeout_ms;
    int64_t n_local;
    int32_t *dest;           /* [E]: the rank that tokens of this one go to */
    int32_t *index;          /* [E]: the expert's number there */
    int32_t *tables;         /* both, on the device */
    int32_t *local;          /* [n_local]: the experts here */
    bool direct;             /* one rank that has all experts in order: the plain layer */
    bool broken;             /* the engine was given up */
    bool agreed;             /* fixed: all ranks run the same layer */
    fmoe_plan experts;       /* those here, k = 1 (exact) or k (lean); 0: none here */
    fmoe_plan borrow;        /* of a device: the same, with FMOE_BORROW_DW1 */
    fmoe_plan whole;         /* the same, for weight gradients over all chunks: computes h again */
    fmoe_plan sum;           /* at home */
    int64_t sum_slots;       /* rows of a token that are summed, at most */
    int64_t form;            /* a hash of all that ranks must agree on */
    fmoe_report *report;     /* what the device found wrong */
    void *passed;            /* hosted: an event, that the host waits for */
    struct ep_block *blocks; /* memory.c */
    int64_t n_blocks;
};

/* Rows of one pass: out to the experts, and back. */
typedef struct ep_rows {
    char *send, *recv;           /* [send rows], [recv rows] of the layer's dtype */
    char *back_send, *back_recv; /* exact: [recv pairs], [send pairs]; lean: [recv rows], [send rows] */
    float *dp_send, *dp_recv;    /* backward: [recv pairs], [send pairs] */
} ep_rows;

typedef struct ep_request {
    void *real;                  /* of the engine */
    char *send, *recv, *recv_to; /* staged: of the host; where rows go then */
    size_t recv_bytes;
} ep_request;

struct fmoe_ep_call {
    fmoe_ep *ep;
    void *stream;
    int64_t T;
    int p_type;
    bool inference, want_dx;
    int done[2]; /* the last phase of each pass */
    /* Counts, [chunk * ranks + rank], and where each begins, with the total at the end. */
    int64_t *send_rows, *send_pairs, *recv_rows, *recv_pairs;
    int64_t *send_row_at, *send_pair_at, *recv_row_at, *recv_pair_at;
    /* On the device. Home: */
    int64_t *counts;     /* as device.h has them */
    int64_t *send_token; /* [send rows] */
    int64_t *slot_pair;  /* [T*k]: pair of a slot, -1: skipped */
    int64_t *map;        /* [T*sum_slots]: rows that are summed for a token, in the order of the sum; -1: none */
    float *sum_p;        /* [T*sum_slots]: their weights (exact) */
    fmoe_pair *pairs_send;
    /* Away: */
    fmoe_pair *pairs_recv;
    int64_t *where;   /* exact: the row of a pair; lean: row * k + slot */
    int32_t *ids;     /* of the tokens that the experts see, */
    void *p;          /* and their weights, */
    float *ones;      /* or 1, where p is applied at home */
    void *indices[4]; /* hosted: what holds all of these, home and away, on the device and on the host */
    ep_rows rows[2];
    void **saved;         /* [chunks] */
    ep_request *requests; /* [3 * chunks + 1]: chunks of rows out, of rows back, dp, chunks of pairs */
    fmoe_ep_stats stats;
};

enum { PHASE_COUNT = 1, PHASE_DISPATCH, PHASE_COMPUTE, PHASE_COMBINE };

static inline bool ep_exact(const fmoe_ep *ep) { return ep->mode == FMOE_EP_EXACT; }
static inline int64_t ep_row_bytes(const fmoe_ep *ep) { return ep->d.H * (int64_t)fmoe_dtype_size(ep->d.dtype); }
/* Exact rows come back as one process has them before its sum: devices round them, the CPU does not. */
static inline int ep_back_type(const fmoe_ep *ep) { return ep_exact(ep) && ep->cpu ? FMOE_F32 : ep->d.dtype; }
static inline int64_t ep_back_bytes(const fmoe_ep *ep) { return ep->d.H * (int64_t)fmoe_dtype_size(ep_back_type(ep)); }
static inline int64_t ep_cells(const fmoe_ep *ep) { return (int64_t)ep->chunks * ep->x.ranks; }

static inline int64_t ep_now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Exact: p is applied at home. But FMOE_ROUND_STEPS with p of the layer's own 16 bits rounds p * y: then away. */
static inline bool ep_weighs_at_home(const fmoe_ep_call *c)
{
    const fmoe_desc *d = &c->ep->d;
    return ep_exact(c->ep) && !((d->flags & FMOE_ROUND_STEPS) && d->dtype != FMOE_F32 && c->p_type == d->dtype);
}

/* A compact matrix on the layer's device. */
typedef struct ep_tensor {
    fmoe_tensor t;
    int64_t shape[2];
} ep_tensor;
const fmoe_tensor *fmoe_ep_matrix(const fmoe_ep *ep, ep_tensor *t, const void *data, int64_t rows, int64_t columns,
                                  int dtype);
/* And a map of n rows. */
const fmoe_tensor *fmoe_ep_list(const fmoe_ep *ep, ep_tensor *t, const int64_t *data, int64_t n);

/* memory.c. Of the layer's device, not cleared; NULL with an error set where there is none. 0 elements: memory too. */
void *fmoe_ep_alloc(fmoe_ep *ep, int64_t count, int64_t element);
void fmoe_ep_free(fmoe_ep *ep, void *memory);
void *fmoe_ep_alloc_host(fmoe_ep *ep, int64_t count, int64_t element); /* for an engine of the host */
void fmoe_ep_free_host(fmoe_ep *ep, void *memory);
void fmoe_ep_free_all(fmoe_ep *ep);
fmoe_status fmoe_ep_copy(const fmoe_ep_call *c, void *to, const void *from, int64_t bytes, bool wait); /* on it */
fmoe_status fmoe_ep_cross(const fmoe_ep_call *c, bool to_host, void *to, const void *from, int64_t bytes, bool wait);

/* host.c: home and away of a device that has neither; h and a hold the rest of the arguments. */
fmoe_status fmoe_ep_home_on_host(fmoe_ep_call *c, const fmoe_home_args *h);
fmoe_status fmoe_ep_away_alloc(fmoe_ep_call *c);
fmoe_status fmoe_ep_away_on_host(fmoe_ep_call *c, const fmoe_away_args *a);

/* ep.c */
fmoe_status fmoe_ep_check_size(const char *name, size_t given, size_t known, const void *bytes);
/* Name the phase, and give the engine up where that is asked for: the others cannot know of it. */
fmoe_status fmoe_ep_broken(fmoe_ep *ep, fmoe_pass pass, int phase, fmoe_status status);
fmoe_status fmoe_ep_named(const fmoe_ep *ep, fmoe_pass pass, int phase, fmoe_status status);
fmoe_status fmoe_ep_run_plan(fmoe_ep_call *c, fmoe_plan plan, fmoe_pass pass, int64_t n, fmoe_run *run);

/* count.c */
fmoe_status fmoe_ep_check_tensor(const fmoe_ep *ep, const char *name, const fmoe_tensor *t, int64_t rows,
                                 int64_t columns, int dtype, int other);

/* rows.c */
fmoe_status fmoe_ep_pairs_begin(fmoe_ep_call *c);
fmoe_status fmoe_ep_pairs_end(fmoe_ep_call *c);
fmoe_status fmoe_ep_dispatch_begin(fmoe_ep_call *c, fmoe_pass pass, int64_t chunk, const fmoe_tensor *rows);
fmoe_status fmoe_ep_wait(fmoe_ep_call *c, int64_t request);
fmoe_status fmoe_ep_combine_begin(fmoe_ep_call *c, fmoe_pass pass, int64_t chunk);
fmoe_status fmoe_ep_dp_exchange(fmoe_ep_call *c);
fmoe_status fmoe_ep_sum(fmoe_ep_call *c, fmoe_pass pass, const fmoe_ep_args *args);
fmoe_status fmoe_ep_rows_alloc(fmoe_ep_call *c, fmoe_pass pass);
void fmoe_ep_rows_free(fmoe_ep_call *c, fmoe_pass pass, bool all);
/* Rows of the layer's dtype: to[i] = from[map[i]]. from has `rows` of them, `stride` elements apart. */
fmoe_status fmoe_ep_gather(fmoe_ep_call *c, void *to, const void *from, int64_t rows, int64_t stride,
                           const int64_t *map, int64_t n);
/* Numbers, of which from has `rows`, as another type; 0 where there is none. */
fmoe_status fmoe_ep_take(fmoe_ep_call *c, void *to, int type, const float *from, int64_t rows, const int64_t *map,
                         int64_t n);

/* compute.c */
fmoe_status fmoe_ep_compute_forward(fmoe_ep_call *c, int64_t chunk, const fmoe_ep_args *args);
fmoe_status fmoe_ep_compute_backward(fmoe_ep_call *c, int64_t chunk, const fmoe_ep_args *args);
fmoe_status fmoe_ep_weight_gradients(fmoe_ep_call *c, const fmoe_ep_args *args);
fmoe_status fmoe_ep_direct(fmoe_ep_call *c, fmoe_pass pass, const fmoe_ep_args *args);

#endif
