/* SPDX-License-Identifier: Apache-2.0
 *
 * check_device.h - tensors and runs of `fusedmoe check --backend ascend`: every tensor exists on the device, and in
 * double beside it for the reference; every launch is noted by name. The public API, and seven functions of CANN's
 * runtime for memory. */
#ifndef FMOE_CHECK_DEVICE_H
#define FMOE_CHECK_DEVICE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "fusedmoe.h"

enum { I32 = -32, I64 = -64, MAX_OPERATORS = 128, MAX_TENSORS = 64 };

typedef struct twin { /* a tensor on the device, and as the reference reads it */
    fmoe_tensor dev, ref;
    int64_t shape[3], strides[3];
    int dtype;
    const char *name;
    bool out; /* compared after the run */
    bool exact;
} twin;

typedef struct probe_case {
    const char *name;
    int dtype;
    double bound;      /* relative L2 error of every output */
    double worst;      /* the largest error found, and where */
    const char *where; /* a tensor's name, "" before */
    char problem[400]; /* what a call answered */
    double ms;
    int launches;
    uint64_t used[MAX_OPERATORS / 64]; /* operators, as bits */
    bool failed;
} probe_case;

typedef struct probe_device {
    void *stream;
    int32_t id;
    probe_case *now;
    twin *tensors[MAX_TENSORS];
    int count;
    void *blocks[4 * MAX_TENSORS];
    int n_blocks;
    void *workspace; /* grows */
    size_t workspace_bytes;
    char operators[MAX_OPERATORS][64];
    int n_operators;
    uint64_t random;
} probe_device;

/* NULL, or why the device cannot be used. */
const char *probe_open(probe_device *d, int32_t id);
void probe_close(probe_device *d);

/* A tensor with random values in [-scale, scale]. Integers: all zero, to be set. */
twin *probe_tensor(probe_device *d, const char *name, int dtype, int ndim, const int64_t *shape, double scale);
twin *probe_turned(probe_device *d, const char *name, int dtype, int64_t a, int64_t b, int64_t c, double scale);
twin *probe_ids(probe_device *d, int64_t T, int64_t k, int64_t E, bool skip);
twin *probe_map(probe_device *d, const twin *ids, int64_t E); /* of these ids, as permute makes it */
twin *probe_sizes(probe_device *d, int64_t E, int64_t rows, bool cumulative);
twin *probe_out(twin *t);                                               /* compared after the run */
void probe_list(const twin *stack, fmoe_tensor *dev, fmoe_tensor *ref); /* its matrices one by one */
double probe_unit(probe_device *d);

/* Run an operation on both and compare every output. call: fmoe_experts_forward or another, through a wrapper. */
typedef fmoe_status (*probe_call)(fmoe_plan plan, const void *args, const fmoe_run *run);
void probe_run(probe_device *d, fmoe_desc desc, fmoe_pass pass, int64_t T, uint32_t flags, probe_call call,
               const void *dev_args, const void *ref_args);
bool probe_saved(probe_device *d, fmoe_desc desc, int64_t T, void **dev, size_t *dev_bytes, void **ref,
                 size_t *ref_bytes);
void probe_end_case(probe_device *d); /* frees its tensors */

#endif
