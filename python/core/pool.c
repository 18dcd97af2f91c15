/* SPDX-License-Identifier: Apache-2.0
 *
 * pool.c - large blocks of CPU memory that are used again.
 *
 * A training step writes the same gradients into new memory every time: the allocator returns what zero_grad() frees to
 * the system and maps it again, and the kernel zeroes it page by page before we write it: 64 MB cost 15 ms of page
 * faults, as much as the sums in them. Here a block that is freed stays mapped, and the next request of its size gets
 * it.
 *
 * So it is for results, saved states and workspaces, from 64 KiB on: there free() begins to give the end of the heap
 * back to the system, which is then mapped anew in every step, or not, by where things happen to lie (3 of 47 ms at 512
 * tokens, in a third of the runs).
 *
 * - What is mapped is never more than what was in use at one time (peak) and an eighth of that: before a new block is
 *   mapped beyond it, those that have been free for the longest go. An eighth, because not all blocks of a step are in
 *   use at its peak.
 * - A block that has been free for a second is the system's to take (MADV_FREE) from the next request or release on: it
 *   counts as memory of the process until there is need of it elsewhere. Not at once: that took 10 us for each huge
 * page, at every step.
 * - The lock is held for a few loads and stores, and over a fork; a child owns its copy of all blocks.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

size_t pool_from = (size_t)1 << 16;

static const size_t HUGE_PAGE = (size_t)2 << 20;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pool_block *newest, *oldest; /* free blocks */
static pool_block *kept;            /* the oldest of them that is not the system's */
static pool_counts count;

static void acquire(void) { pthread_mutex_lock(&lock); }
static void release(void) { pthread_mutex_unlock(&lock); }

int pool_init(void)
{
    const char *wanted = getenv("FMOE_POOL");
    if (wanted && !strcmp(wanted, "0")) pool_from = SIZE_MAX;
    return pthread_atfork(acquire, release, release);
}

/* Eight sizes to each power of two, so that a batch of a few tokens more finds the block of the last one too. What is
 * not touched of a block takes no memory. */
static size_t round_up(size_t bytes)
{
    size_t step = 4096;
    while (step <= bytes / 16) step *= 2;
    return (bytes + step - 1) / step * step;
}

static void unlink_free(pool_block *b)
{
    if (b == kept) kept = b->newer;
    *(b->newer ? &b->newer->older : &newest) = b->older;
    *(b->older ? &b->older->newer : &oldest) = b->newer;
    count.free -= b->bytes;
}

/* Of anonymous memory. huge: from a boundary of huge pages on, and in them; what is not wholly written would take more
 * by that. */
static void *map(size_t bytes, bool huge)
{
    const size_t slack = huge && bytes >= HUGE_PAGE ? HUGE_PAGE - 4096 : 0;
    char *p = mmap(NULL, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    const size_t before = slack ? (HUGE_PAGE - (uintptr_t)p % HUGE_PAGE) % HUGE_PAGE : 0;
    if (before) munmap(p, before);
    if (slack > before) munmap(p + before + bytes, slack - before);
#ifdef MADV_HUGEPAGE
    if (slack) madvise(p + before, bytes, MADV_HUGEPAGE); /* a hint: failing is fine */
#endif
    return p + before;
}

static int64_t milliseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Under the lock: nobody takes a block meanwhile. */
static void offer_to_system(int64_t now)
{
#ifdef MADV_FREE
    for (; kept && now - kept->free_since > 1000; kept = kept->newer) madvise(kept->data, kept->bytes, MADV_FREE);
#endif
}

static size_t unmap_all(pool_block *list)
{
    size_t sum = 0;
    for (pool_block *next; list; list = next) {
        next = list->older;
        sum += list->bytes;
        munmap(list->data, list->bytes);
        free(list);
    }
    return sum;
}

/* For a workspace, any free block that is large enough. For long, the smallest of those that were made for that and are
 * at most half as large again: the next batch may have fewer tokens. */
static pool_block *find_free(size_t bytes, bool for_long)
{
    pool_block *best = NULL;
    for (pool_block *b = newest; b && !(best && (!for_long || best->bytes == bytes)); b = b->older) {
        const bool fits = b->bytes >= bytes && (!for_long || (b->for_long && b->bytes - bytes <= bytes / 2));
        if (fits && (!best || b->bytes < best->bytes)) best = b;
    }
    return best;
}

pool_block *pool_take(size_t wanted, bool for_long)
{
    if (wanted > SIZE_MAX / 2) return NULL;
    size_t bytes = round_up(wanted);
    pool_block *b, *drop = NULL;
    const int64_t now = milliseconds();
    acquire();
    if ((b = find_free(bytes, for_long))) unlink_free(b), bytes = b->bytes;
    offer_to_system(now);
    count.live += bytes;
    while (oldest && count.live + count.free > count.peak + count.peak / 8) {
        pool_block *o = oldest;
        unlink_free(o);
        o->older = drop;
        drop = o;
    }
    release();
    unmap_all(drop);
    if (b) return b;
    b = calloc(1, sizeof *b);
    void *data = b ? map(bytes, for_long) : NULL;
    acquire();
    if (!data) count.live -= bytes;
    else if (count.live > count.peak) count.peak = count.live;
    release();
    if (!data) return free(b), NULL;
    b->bytes = bytes;
    b->for_long = for_long;
    b->data = data;
    return b;
}

void pool_give(pool_block *b)
{
    b->free_since = milliseconds();
    acquire();
    b->newer = NULL;
    b->older = newest;
    *(newest ? &newest->newer : &oldest) = b;
    newest = b;
    if (!kept) kept = b;
    offer_to_system(b->free_since);
    count.live -= b->bytes;
    count.free += b->bytes;
    release();
}

size_t pool_empty(void)
{
    acquire();
    pool_block *list = newest;
    newest = oldest = kept = NULL;
    count.free = 0;
    count.peak = count.live;
    release();
    return unmap_all(list);
}

pool_counts pool_count(void)
{
    acquire();
    const pool_counts now = count;
    release();
    return now;
}

static void tensor_released(managed_tensor *m) { pool_give(m->owner); }

/* The strides of t, without holes and without overlap: some order of its dimensions is that of rows. */
static bool is_dense(const fmoe_tensor *t)
{
    if (!t->strides) return true;
    int64_t run = 1;
    unsigned seen = 0;
    for (int found = 0, i = 0; found < t->ndim; found++) {
        for (i = 0; i < t->ndim; i++)
            if (!(seen >> i & 1) && (t->shape[i] == 1 || t->strides[i] == run)) break;
        if (i == t->ndim) return false;
        seen |= 1u << i;
        run *= t->shape[i];
    }
    return true;
}

pool_block *pool_tensor(const fmoe_tensor *like)
{
    if (like->ndim > POOL_RANK || !is_dense(like)) return NULL;
    size_t bytes = like->dtype.bits / 8;
    for (int i = 0; i < like->ndim; i++) bytes *= (size_t)like->shape[i];
    pool_block *b = pool_take(bytes, true);
    if (!b) return NULL;
    int64_t run = 1;
    for (int i = like->ndim - 1; i >= 0; run *= like->shape[i--]) {
        b->dims[i] = like->shape[i];
        b->dims[POOL_RANK + i] = like->strides ? like->strides[i] : run;
    }
    b->managed = (managed_tensor){.version = {1, 0}, .owner = b, .release = tensor_released, .tensor = *like};
    b->managed.tensor.data = b->data;
    b->managed.tensor.byte_offset = 0;
    b->managed.tensor.shape = b->dims;
    b->managed.tensor.strides = b->dims + POOL_RANK;
    return b;
}
