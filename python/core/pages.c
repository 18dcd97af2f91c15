/* SPDX-License-Identifier: Apache-2.0
 *
 * pages.c - expert weights in huge pages.
 *
 * torch puts weights into pages of 4 KiB, of which a TLB holds some 12 MB; a layer's weights are ten times that and
 * more, and each is read once in a pass. In pages of 2 MiB the same reads miss the TLB hardly ever: 3 % of a training
 * step at 512 tokens, 5 to 10 % of a forward at 16 and 64. The kernel does it in place (MADV_COLLAPSE, Linux 6.1):
 * addresses and values stay, while it copies.
 *
 * - Only weights that are run a second time: who reads them once gains nothing.
 * - Never for longer than half a second and a tenth of the time that layers have run; the rest comes in later calls. It
 *   takes 0.6 ms a page, and 4 where a hypervisor has to find the memory first.
 * - Only memory that is this process's alone, page by page (/proc/self/pagemap): not a file's, not shared, not shared
 *   with a process that was forked, all of which a copy would double.
 * - Nothing depends on it: what the system refuses stays as it is.
 */
#define _GNU_SOURCE
#include "pages.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    PAGE = 4096,
    HUGE_PAGE = 2 << 20,
    PAGES = HUGE_PAGE / PAGE,
    SLOTS = 1 << 12,
    COLLAPSE = 25 /* MADV_COLLAPSE */,
    MAPPED_ANEW = 32 << 20 /* from here on malloc gives memory that was never touched (mallopt(3)) */
};

typedef struct {
    uintptr_t at, end; /* of what is still to be moved; at a boundary of huge pages after the first run */
    const void *data;
} weight;

/* By address: one that has the slot of another takes it; new memory at an old address is not noticed. */
static weight seen[SLOTS];
static atomic_flag busy = ATOMIC_FLAG_INIT;
static atomic_size_t moved;
static _Atomic int64_t ran; /* nanoseconds */
static atomic_bool off;

static uintptr_t up(uintptr_t at) { return (at + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE; }
static uintptr_t down(uintptr_t at) { return at / HUGE_PAGE * HUGE_PAGE; }

int64_t pages_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void pages_init(void)
{
    const char *wanted = getenv("FMOE_HUGE_PAGES");
    off = (wanted && !strcmp(wanted, "0")) || sysconf(_SC_PAGESIZE) != PAGE;
}

size_t pages_moved(void) { return moved; }

/* Every page of a huge one is there, anonymous, and mapped by nobody else. */
static bool is_ours_alone(int pagemap, uintptr_t at)
{
    const uint64_t present = 1ull << 63, file_or_shared = 1ull << 61, exclusive = 1ull << 56;
    uint64_t page[PAGES], all = ~0ull, any = 0;
    if (pread(pagemap, page, sizeof page, (off_t)(at / PAGE * sizeof *page)) != sizeof page) return false;
    for (int i = 0; i < PAGES; i++) all &= page[i], any |= page[i];
    return (all & present) && (all & exclusive) && !(any & file_or_shared);
}

static void move(weight *w)
{
    static int64_t spent;
    const int64_t limit = 500000000 + ran / 10;
    if (spent > limit) return;
    const int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    off = pagemap < 0;
    for (int64_t now = pages_now(); !off && w->at < w->end && spent <= limit; w->at += HUGE_PAGE) {
        int refused = EPERM;
        if (is_ours_alone(pagemap, w->at)) refused = madvise((void *)w->at, HUGE_PAGE, COLLAPSE) ? errno : 0;
        if (!refused) moved += HUGE_PAGE;
        else if (refused == EINVAL || refused == ENOMEM)
            w->end = w->at; /* not on this system, or no huge page is left */
        const int64_t then = now;
        spent += (now = pages_now()) - then;
    }
    if (!off) close(pagemap);
}

void pages_prefer(const void *data, size_t bytes)
{
#ifdef MADV_HUGEPAGE
    const uintptr_t from = up((uintptr_t)data), to = down((uintptr_t)data + bytes);
    if (!off && bytes >= MAPPED_ANEW && from < to) madvise((void *)from, to - from, MADV_HUGEPAGE);
#endif
}

void pages_ran_since(int64_t then) { ran += pages_now() - then; }

void pages_look_at(const fmoe_tensor *t)
{
    if (off || !t || atomic_flag_test_and_set_explicit(&busy, memory_order_acquire)) return;
    weight *w = &seen[((uintptr_t)t->data / PAGE * 0x9E3779B97F4A7C15u) >> (64 - 12)];
    if (w->data != t->data) {
        size_t last = 0, row = 1;
        for (int i = t->ndim - 1; i >= 0; row *= (size_t)t->shape[i--])
            last += (size_t)(t->shape[i] - 1) * (t->strides ? (size_t)t->strides[i] : row);
        const uintptr_t data = (uintptr_t)t->data + t->byte_offset,
                        end = row ? data + (last + 1) * (t->dtype.bits / 8u) : data;
        *w = (weight){up(data), down(end), t->data};
    } else if (w->at < w->end) {
        move(w);
    }
    atomic_flag_clear_explicit(&busy, memory_order_release);
}
