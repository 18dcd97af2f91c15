/* SPDX-License-Identifier: Apache-2.0
 * managed.h - tests of a CUDA device whose tensors lie in memory that both sides see: one arena, emptied after each
 * test. To be included before test.h. FMOE_CUDA_SO: the backend. */
#ifndef FMOE_TESTS_MANAGED_H
#define FMOE_TESTS_MANAGED_H

#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>

static char *arena;
static size_t arena_used;
enum { ARENA = 1 << 29 };

static void *arena_calloc(size_t n, size_t size)
{
    if (!arena) return calloc(n, size); /* no card: every test is skipped */
    const size_t bytes = (n * size + 255) / 256 * 256;
    if (arena_used + bytes > ARENA) abort();
    void *p = arena + arena_used;
    arena_used += bytes;
    return memset(p, 0, n * size);
}

static void arena_free(void *p)
{
    if (!arena) free(p);
    else if (p == arena) arena_used = 0; /* the first block is freed last */
}

__attribute__((constructor)) static void begin_arena(void)
{
    int n = 0;
    void *p = NULL;
    if (cudaGetDeviceCount(&n) != cudaSuccess || !n) return;
    if (cudaMallocManaged(&p, ARENA, cudaMemAttachGlobal) == cudaSuccess) arena = p;
    setenv("FMOE_CUDA_LIBRARY", FMOE_CUDA_SO, 0);
}

#define need_card()                                                                                                    \
    do {                                                                                                               \
        int cards = 0;                                                                                                 \
        if (cudaGetDeviceCount(&cards) != cudaSuccess || !cards) SKIP("no CUDA device");                               \
    } while (0)

#define TEST_CALLOC arena_calloc
#define TEST_FREE arena_free
#define TEST_DEVICE FMOE_CUDA

#endif
