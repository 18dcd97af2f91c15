/* SPDX-License-Identifier: Apache-2.0
 *
 * pool.h - large blocks of CPU memory that are used again, for results, saved states, gradients and workspaces.
 * See pool.c. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fusedmoe.h"

enum { POOL_RANK = 8 };

/* DLPack's DLManagedTensorVersioned, our own declaration of its public layout (fmoe_tensor is its DLTensor). */
typedef struct managed_tensor {
    struct {
        uint32_t major, minor;
    } version;
    void *owner;
    void (*release)(struct managed_tensor *);
    uint64_t flags;
    fmoe_tensor tensor;
} managed_tensor;

typedef struct pool_block {
    managed_tensor managed; /* what torch gets; filled by pool_tensor */
    int64_t dims[2 * POOL_RANK];
    void *data;
    size_t bytes;
    bool for_long;
    int64_t free_since;               /* milliseconds */
    struct pool_block *older, *newer; /* among the free ones */
} pool_block;

typedef struct {
    size_t live, free, peak;
} pool_counts;

extern size_t pool_from; /* requests of fewer bytes are not for the pool; 64 KiB, or none at all with FMOE_POOL=0 */

int pool_init(void); /* once, before anything else; 0, or an errno */
/* NULL: no memory. for_long: a block of about this size, in huge pages; else, for what is given back before the next
 * gradient is asked for, any that is large enough, so that a workspace lies where a gradient will be. */
pool_block *pool_take(size_t bytes, bool for_long);
void pool_give(pool_block *block); /* from any thread, with or without the interpreter */
/* Memory for a tensor like this one; NULL: no memory, or it has holes. */
pool_block *pool_tensor(const fmoe_tensor *like);
size_t pool_empty(void); /* unmap what is free: bytes */
pool_counts pool_count(void);
