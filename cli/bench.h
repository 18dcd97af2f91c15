/* SPDX-License-Identifier: Apache-2.0
 * bench.h - what bench.c (command line, timing, output) and bench_cases.c (the operations) share. */
#ifndef FMOE_BENCH_H
#define FMOE_BENCH_H

#include <stdbool.h>
#include <stdint.h>

typedef struct bench_shape {
    int dtype; /* fmoe_dtype */
    int64_t T, H, I, E, k;
    int threads;
    bool skew;         /* half of all tokens send a slot to expert 0 */
    bool forward_only; /* no memory for gradients */
    bool packed;       /* experts: packed weights too */
    int pages;         /* of tensors of 2 MiB and more */
} bench_shape;

enum { PAGES_AS_IS, PAGES_SMALL, PAGES_HUGE };

/* One operation on one shape, ready to run. Work of one pass: flops for products, bytes for what only moves data. */
typedef struct bench_case {
    void (*forward)(void *state);
    void (*backward)(void *state);
    void *state;
    double forward_flops, backward_flops;
    double forward_bytes, backward_bytes;
    const void *experts;         /* the layer's fmoe_experts_args, for peers to run too; NULL: another operation */
    void (*packed)(void *state); /* the forward with packed weights, or NULL */
    /* Seconds that a sweep over the weights takes that the forward reads, as they are or packed; NULL: none. */
    double (*sweep)(void *state, bool packed);
    void (*drop)(void *state);
} bench_case;

/* NULL-terminated: experts, block, gmm, activation, permute, unpermute, route. */
extern const char *const bench_op_names[];

bench_case bench_make(const char *op, const bench_shape *shape); /* exits with a message on failure */

#endif
