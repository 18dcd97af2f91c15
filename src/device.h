/* SPDX-License-Identifier: Apache-2.0
 *
 * device.h - what expert parallelism (src/ep) asks of a device beside the operations of fusedmoe.h: memory, the order
 * of streams, and where rows go. The CPU's table is in src/ep; a backend has one in its own table, or none.
 *
 * Rows are summed by a public operation (unpermute). Here are the indices for that, and what gathers rows: `home`
 * makes of the ids of T tokens the rows and pairs that this rank sends, `away` makes of the pairs that came the ids and
 * weights of the tokens that the experts here see. */
#ifndef FMOE_DEVICE_H
#define FMOE_DEVICE_H

#include <stdbool.h>

#include "fusedmoe.h"

/* A (token, expert), as it travels. */
typedef struct fmoe_pair {
    uint32_t expert; /* its number on the receiving rank; PAIR_FIRST: its row begins here */
    float p;
} fmoe_pair;

enum { PAIR_EXPERT = 0x7fffffff }; /* as a number: no pair (of a fixed capacity) */
#define PAIR_FIRST 0x80000000u

/* What a device found wrong, in memory that the host reads: written once, read after the stream has come there. */
typedef struct fmoe_report {
    int64_t slot, id;     /* an id that is none: its slot + 1; 0: nothing wrong */
    int64_t pair, expert; /* a pair that was not announced so: its number + 1, and what it says */
} fmoe_report;

/* Rows, or numbers (one column), that move on a device: to[i] = from[map[i]]. */
typedef struct fmoe_move_args {
    const void *from;
    int64_t rows, columns, stride; /* of from; stride in elements */
    int from_type, type;           /* of from and to */
    const int64_t *map;            /* [n], each in [0, rows) */
    int64_t n;
    void *to; /* compact */
    void *work;
    size_t work_bytes;
    void *stream;
} fmoe_move_args;

/* Cells are chunk * ranks + rank. Rows and pairs stand by (cell, token, slot). Rows beyond a
 * capacity are left out. On devices with a capacity (one chunk) rows of rank r begin at r * capacity, the pairs of row
 * i at i * k, and what is not used is empty: token -1, PAIR_EXPERT. */
typedef struct fmoe_home_args {
    int64_t T, k, E, ranks, chunks, capacity;
    uint32_t flags;  /* of the layer: skip marks */
    int64_t columns; /* of map: k where pairs are summed at home, else min(k, ranks), of rows */
    bool exact;      /* pairs are summed */
    bool weighted;   /* by p; else by 1 */
    const void *ids, *p;
    int ids_type, p_type;
    const int32_t *dest, *index; /* [E]: the rank that has an expert, and its number there */
    int64_t *counts;             /* out [2 * cells + 1]: rows, pairs, and slots that were dropped */
    int64_t *slot_pair;          /* out [T*k]: pair of a slot, -1: skipped */
    int64_t *map;        /* out [T*columns]: what is summed for a token, in the order of one process; -1: none */
    float *sum_p;        /* out [T*columns] (exact) */
    int64_t *send_token; /* out [T * min(k, ranks), or ranks * capacity] */
    fmoe_pair *pairs;    /* out [T*k, or ranks * capacity * k] */
    fmoe_report *report;
    void *work; /* home_bytes */
    void *stream;
} fmoe_home_args;

/* Tokens are pairs (exact) or rows with k slots. */
typedef struct fmoe_away_args {
    int64_t cells, ranks, k, experts, capacity; /* experts: that are here */
    int64_t rows, pairs;                        /* that came */
    const int64_t *row_at, *pair_at;            /* [cells + 1], of the host */
    bool exact;
    int p_type;
    const fmoe_pair *recv;
    int64_t *where; /* out [pairs]: exact: the row of a pair; else row * k + slot; -1: no pair */
    int32_t *ids;   /* out [pairs] or [rows,k]; -1: none */
    void *p;        /* out, as ids */
    float *ones;    /* out [pairs], or NULL */
    fmoe_report *report;
    void *work; /* away_bytes */
    void *stream;
} fmoe_away_args;

typedef struct fmoe_device_ops {
    /* NULL with an error set where there is none. host: memory of the host that the device reads and writes. */
    void *(*alloc)(int32_t device, size_t bytes, bool host);
    void (*free)(int32_t device, void *memory, bool host);
    /* In any direction. wait: the host waits for it, and for all that is before it on the stream. */
    fmoe_status (*copy)(int32_t device, void *to, const void *from, size_t bytes, void *stream, bool wait);
    /* Order of streams, for engines. */
    fmoe_status (*event)(int32_t device, void **event);
    void (*event_free)(int32_t device, void *event);
    fmoe_status (*record)(int32_t device, void *event, void *stream);
    fmoe_status (*after)(int32_t device, void *event, void *stream); /* the stream goes on after the event */
    fmoe_status (*passed)(int32_t device, void *event, bool *yes);
    bool (*capturing)(int32_t device, void *stream); /* into a graph */
    /* Where rows go. */
    size_t (*home_bytes)(const fmoe_home_args *a);
    fmoe_status (*home)(int32_t device, const fmoe_home_args *a);
    size_t (*away_bytes)(const fmoe_away_args *a);
    fmoe_status (*away)(int32_t device, const fmoe_away_args *a);
    /* Rows of `bytes`: to[i] = from[map[i]], which are `stride` bytes apart; zero where that is -1. */
    fmoe_status (*gather)(int32_t device, void *to, const void *from, int64_t stride, int64_t bytes, const int64_t *map,
                          int64_t n, void *stream);
    /* Numbers: the same, as `type`. */
    fmoe_status (*take)(int32_t device, void *to, int type, const float *from, const int64_t *map, int64_t n,
                        void *stream);

    /* A device that has none of home, away, gather and take: the host makes the indices, by the CPU's functions. It has
     * what follows instead; other devices leave it NULL. */
    fmoe_status (*move_bytes)(int32_t device, const fmoe_move_args *a, size_t *work);
    fmoe_status (*move)(int32_t device, const fmoe_move_args *a);
    fmoe_status (*zero)(int32_t device, void *at, size_t bytes, void *stream);
    /* Between host and device; `copy` is then one on the device. */
    fmoe_status (*cross)(int32_t device, bool to_host, void *to, const void *from, size_t bytes, void *stream,
                         bool wait);
    /* Whether the device has nothing left to do, after at most so long: free does not wait for it. */
    bool (*idle)(int32_t device, int64_t timeout_ms);
} fmoe_device_ops;

static inline fmoe_status fmoe_device_cross(const fmoe_device_ops *ops, int32_t device, bool to_host, void *to,
                                            const void *from, size_t bytes, void *stream, bool wait)
{
    return ops->cross ? ops->cross(device, to_host, to, from, bytes, stream, wait)
                      : ops->copy(device, to, from, bytes, stream, wait);
}

/* backend.c: FMOE_ERR_UNSUPPORTED where the backend has none. */
fmoe_status fmoe_device_find(fmoe_device device, const fmoe_device_ops **ops);

extern const fmoe_device_ops fmoe_device_cpu; /* ep/device_cpu.c */

#endif
