/* SPDX-License-Identifier: Apache-2.0
 *
 * ep.h - a layer over ranks, and one batch on its way, as the files of this folder see them.
 *
 *   ep.c        a layer: where its experts are, the plans of what this rank computes
 *   count.c     where each token goes; what comes; the memory for it
 *   rows.c      packing, exchanging and unpacking rows; the sums at home
 *   compute.c   the experts of this rank, by fusedmoe.h
 *   run.c       the phases, alone and overlapped
 *   engine_*.c  what exchanges
 *
 * Orders. At home, rows and pairs stand by (chunk, destination, token, slot); where they arrive, by (chunk, source,
 * source row, slot). Pairs travel at once, by (peer, chunk, row, slot), which on arrival is the order of one process
 * that has the tokens of all ranks: the order in which weight gradients are summed. */
#ifndef FMOE_EP_H
#define FMOE_EP_H

#include "error.h"
#include "fusedmoe_ep.h"
#include "util.h"

enum { EP_KEPT = 24 }; /* blocks of memory that wait for the next call */

struct fmoe_ep {
    fmoe_desc d; /* the whole layer */
    fmoe_exchange x;
    int32_t mode, chunks;
    int64_t capacity, timeout_ms;
    int64_t n_local;
    int32_t *dest;     /* [E]: the rank that tokens of this one go to */
    int32_t *index;    /* [E]: the expert's number there */
    int32_t *local;    /* [n_local]: the experts here */
    bool direct;       /* one rank that has all experts in order: the plain layer */
    bool broken;       /* the engine was given up */
    fmoe_plan experts; /* those here, k = 1 (exact) or k (lean); 0: none here */
    fmoe_plan whole;   /* the same, for weight gradients over all chunks: computes h again */
    fmoe_plan sum;     /* at home */
    int64_t sum_slots; /* rows of a token that are summed, at most */
    int64_t form;      /* a hash of all that ranks must agree on */
    struct ep_block *kept[EP_KEPT];
};

typedef struct ep_pair {
    uint32_t expert; /* its number on the receiving rank; PAIR_FIRST: its row begins here */
    float p;
} ep_pair;

enum { PAIR_EXPERT = 0x7fffffff };
#define PAIR_FIRST 0x80000000u

/* Rows of one pass: out to the experts, and back. */
typedef struct ep_rows {
    char *send, *recv;           /* [send_rows], [recv_rows] of the layer's dtype */
    char *back_send, *back_recv; /* exact: [recv_pairs], [send_pairs] f32; lean: [recv_rows], [send_rows] */
    float *dp_send, *dp_recv;    /* backward: [recv_pairs], [send_pairs] */
} ep_rows;

struct fmoe_ep_call {
    fmoe_ep *ep;
    int64_t T;
    int p_type;
    bool inference, want_dx, counted;
    int done[2]; /* the last phase of each pass */
    /* Counts, [chunk * ranks + rank], and where each begins, with the total at the end. */
    int64_t *send_rows, *send_pairs, *recv_rows, *recv_pairs;
    int64_t *send_row_at, *send_pair_at, *recv_row_at, *recv_pair_at;
    /* Home. */
    int64_t *send_token; /* [send rows] */
    int64_t *slot_pair;  /* [T*k]: pair of a slot, -1: skipped */
    int64_t *map;        /* [T*sum_slots]: rows that are summed for a token, in the order of the sum; -1: none */
    float *p;            /* [T*sum_slots]: their weights (exact) */
    ep_pair *pairs_send; /* by (destination, chunk, token, slot) */
    /* Away. */
    ep_pair *pairs_recv;  /* by (source, chunk, row, slot) */
    int64_t *pair_row;    /* [recv pairs], by (chunk, source, row, slot): its row in recv, */
    int32_t *pair_expert; /* its expert, */
    float *pair_p;        /* its weight, */
    int64_t *pair_slot;   /* and how many pairs of its row come before it */
    int64_t *order;       /* [recv pairs]: pairs in the order of one process */
    int64_t *row_order;   /* [recv rows]: rows in that order (lean) */
    ep_rows rows[2];
    void **saved;    /* [chunks] */
    void **requests; /* [2 * chunks + 1]: 0.. rows out, chunks.. rows back, the last: dp or pairs */
    fmoe_ep_stats stats;
};

enum { PHASE_COUNT = 1, PHASE_DISPATCH, PHASE_COMPUTE, PHASE_COMBINE };

static inline bool ep_exact(const fmoe_ep *ep) { return ep->mode == FMOE_EP_EXACT; }
static inline int64_t ep_row_bytes(const fmoe_ep *ep) { return ep->d.H * (int64_t)fmoe_dtype_size(ep->d.dtype); }
static inline int64_t ep_back_bytes(const fmoe_ep *ep) { return ep_exact(ep) ? ep->d.H * 4 : ep_row_bytes(ep); }
static inline int64_t ep_cells(const fmoe_ep *ep) { return (int64_t)ep->chunks * ep->x.ranks; }

/* Exact: p is applied at home. But FMOE_ROUND_STEPS with p of the layer's own 16 bits rounds p * y: then away. */
static inline bool ep_weighs_at_home(const fmoe_ep_call *c)
{
    const fmoe_desc *d = &c->ep->d;
    return ep_exact(c->ep) && !((d->flags & FMOE_ROUND_STEPS) && d->dtype != FMOE_F32 && c->p_type == d->dtype);
}

/* A compact matrix. */
typedef struct ep_tensor {
    fmoe_tensor t;
    int64_t shape[2];
} ep_tensor;
const fmoe_tensor *fmoe_ep_matrix(ep_tensor *t, const void *data, int64_t rows, int64_t columns, int dtype);

/* ep.c. Memory of the engine, not cleared; NULL with an error set where there is none. 0 elements: memory too. */
void *fmoe_ep_alloc(fmoe_ep *ep, int64_t count, int64_t element);
void fmoe_ep_free(fmoe_ep *ep, void *memory);
fmoe_status fmoe_ep_check_size(const char *name, size_t given, size_t known, const void *bytes);
/* Name the phase, and give the engine up where that is asked for: the others cannot know of it. */
fmoe_status fmoe_ep_broken(fmoe_ep *ep, fmoe_pass pass, int phase, fmoe_status status);
fmoe_status fmoe_ep_named(const fmoe_ep *ep, fmoe_pass pass, int phase, fmoe_status status);

/* count.c */
fmoe_status fmoe_ep_read_pairs(fmoe_ep_call *c);
fmoe_status fmoe_ep_check_tensor(const char *name, const fmoe_tensor *t, int64_t rows, int64_t columns, int dtype,
                                 int other);

/* rows.c */
fmoe_status fmoe_ep_pairs(fmoe_ep_call *c);
fmoe_status fmoe_ep_dispatch_begin(fmoe_ep_call *c, fmoe_pass pass, int64_t chunk, const fmoe_tensor *rows);
fmoe_status fmoe_ep_wait(fmoe_ep_call *c, int64_t request);
fmoe_status fmoe_ep_combine_begin(fmoe_ep_call *c, fmoe_pass pass, int64_t chunk);
fmoe_status fmoe_ep_dp_exchange(fmoe_ep_call *c);
fmoe_status fmoe_ep_sum(fmoe_ep_call *c, fmoe_pass pass, const fmoe_ep_args *args);
fmoe_status fmoe_ep_rows_alloc(fmoe_ep_call *c, fmoe_pass pass);
void fmoe_ep_rows_free(fmoe_ep_call *c, fmoe_pass pass, bool all);

/* compute.c */
fmoe_status fmoe_ep_compute_forward(fmoe_ep_call *c, int64_t chunk, const fmoe_ep_args *args);
fmoe_status fmoe_ep_compute_backward(fmoe_ep_call *c, int64_t chunk, const fmoe_ep_args *args);
fmoe_status fmoe_ep_weight_gradients(fmoe_ep_call *c, const fmoe_ep_args *args);
fmoe_status fmoe_ep_direct(fmoe_ep_call *c, fmoe_pass pass, const fmoe_ep_args *args);

#endif
