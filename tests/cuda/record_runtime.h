/* SPDX-License-Identifier: Apache-2.0
 * record_runtime.h - a CUDA runtime that runs nothing and reports every launch, for tests without a GPU. */
#ifndef RECORD_RUNTIME_H
#define RECORD_RUNTIME_H

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct record_launch {
    const char *kernel; /* as the compiler mangled it; "memset" for cudaMemsetAsync */
    dim3 grid, block;
    size_t shared; /* memset: bytes */
    unsigned cluster;
    int overlapped; /* may start before the launch before it has ended */
    int plain;      /* by <<<>>> */
    void **args;    /* addresses of the kernel's parameters; memset: NULL */
} record_launch;

extern void (*record_report)(const record_launch *launch); /* called for every launch */
extern int record_capability;                              /* of the one device: 90 for 9.0 */

#ifdef __cplusplus
}
#endif
#endif
