/* SPDX-License-Identifier: Apache-2.0
 * memory.c - what is allocated on the device: addresses of the host, in a sorted list that every access is looked up
 * in, each with a page before and behind it that nobody may touch. */
#include "memory.h"
#include "ptx.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096 };
typedef struct piece {
    uint64_t from, to;
} piece;
static piece *pieces;
static int count, room;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local piece last; /* that was looked up */
static _Thread_local unsigned last_change;
static unsigned change;

static size_t mapped(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE + 2 * PAGE; }

void *sim_allocate(size_t bytes)
{
    if (bytes > (size_t)1 << 46) return NULL;
    char *const p = mmap(NULL, mapped(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return NULL;
    char *const inside = p + PAGE;
    if (mprotect(inside, mapped(bytes) - 2 * PAGE, PROT_READ | PROT_WRITE)) {
        munmap(p, mapped(bytes));
        return NULL;
    }
    memset(inside, 0xff, bytes < (size_t)256 << 20 ? bytes : (size_t)256 << 20);
    pthread_mutex_lock(&lock);
    if (count == room) {
        room = room ? 2 * room : 64;
        pieces = realloc(pieces, sizeof *pieces * (size_t)room);
        if (!pieces) abort();
    }
    int n = count++;
    for (; n && pieces[n - 1].from > (uint64_t)(uintptr_t)inside; n--) pieces[n] = pieces[n - 1];
    pieces[n] = (piece){(uint64_t)(uintptr_t)inside, (uint64_t)(uintptr_t)inside + bytes};
    change++;
    pthread_mutex_unlock(&lock);
    return inside;
}

static int find(uint64_t address) /* the last that begins no later */
{
    int low = 0, high = count;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (pieces[middle].from <= address) low = middle + 1;
        else high = middle;
    }
    return low - 1;
}

bool sim_free(void *p)
{
    pthread_mutex_lock(&lock);
    const int n = find((uint64_t)(uintptr_t)p);
    const bool there = n >= 0 && pieces[n].from == (uint64_t)(uintptr_t)p;
    if (there) {
        munmap((char *)p - PAGE, mapped((size_t)(pieces[n].to - pieces[n].from)));
        memmove(&pieces[n], &pieces[n + 1], sizeof *pieces * (size_t)(count - n - 1));
        count--, change++;
    }
    pthread_mutex_unlock(&lock);
    return there;
}

bool sim_allocated(uint64_t address, size_t bytes)
{
    if (last_change == change && address >= last.from && address + bytes <= last.to) return true;
    pthread_mutex_lock(&lock);
    const int n = find(address);
    const bool there = n >= 0 && address + bytes <= pieces[n].to;
    if (there) last = pieces[n], last_change = change;
    pthread_mutex_unlock(&lock);
    return there;
}
