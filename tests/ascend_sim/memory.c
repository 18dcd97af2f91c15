/* SPDX-License-Identifier: Apache-2.0
 * memory.c - device memory: one file mapped twice. The range whose addresses the callers get has no access rights, so a
 * host that touches it dies as it would on a machine with an NPU; kernels use the twin range. Fresh and freed memory is
 * filled with 0xFF, which is NaN in every floating point type. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim.h"

#define TOTAL ((size_t)32 << 30)

typedef struct block {
    size_t start, bytes;
    struct block *next;
} block; /* sorted by start */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static char *device_base, *twin_base;
static int memory_file;
static block *blocks;
static size_t used;

static void map(void)
{
    const int fd = memory_file = (int)memfd_create("ascend_sim", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)TOTAL) != 0) goto fail;
    device_base = mmap(NULL, TOTAL, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    twin_base = mmap(NULL, TOTAL, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (device_base != MAP_FAILED && twin_base != MAP_FAILED) return;
fail:
    perror("ascend_sim: device memory");
    abort();
}

aclError sim_malloc(void **device, size_t bytes)
{
    pthread_once(&once, map);
    if (!device || bytes == 0) return ACL_E_PARAM;
    /* Documented: 64-byte alignment, and 32 bytes more than asked for. Small blocks get no more alignment than that. */
    const size_t align = bytes >= (1 << 20) ? (size_t)1 << 21 : 64, odd = align == 64 ? 64 : 0;
    const size_t need = (bytes + 31) / 32 * 32 + 32 + 64;
    pthread_mutex_lock(&lock);
    block **at = &blocks;
    size_t start = align + odd;
    while (*at) {
        if (start + need <= (*at)->start) break;
        const size_t end = (*at)->start + (*at)->bytes + 64;
        if (end > start) {
            start = (end + align - 1) / align * align;
            if (odd && start % 128 == 0) start += odd;
        }
        at = &(*at)->next;
    }
    if (start + need > TOTAL) {
        pthread_mutex_unlock(&lock);
        return ACL_E_MEMORY;
    }
    block *b = malloc(sizeof *b);
    if (!b) abort();
    *b = (block){start, (bytes + 31) / 32 * 32 + 32, *at};
    *at = b;
    used += b->bytes;
    const size_t now = used;
    pthread_mutex_unlock(&lock);
    if (!fmoe_sim_option("count_only")) memset(twin_base + start, 0xFF, b->bytes);
    *device = device_base + start;
    sim_add("live_allocations", 1);
    sim_add("live_bytes", (int64_t)bytes);
    if ((int64_t)now > fmoe_sim_get("peak_bytes")) sim_add("peak_bytes", (int64_t)now - fmoe_sim_get("peak_bytes"));
    return ACL_OK;
}

aclError sim_free(void *device)
{
    pthread_once(&once, map);
    pthread_mutex_lock(&lock);
    block **at = &blocks;
    while (*at && device_base + (*at)->start != (char *)device) at = &(*at)->next;
    block *b = *at;
    if (!b) {
        pthread_mutex_unlock(&lock);
        sim_violation("aclrtFree of %p, which is not an allocation", device);
        return ACL_E_RT_PARAM;
    }
    *at = b->next;
    used -= b->bytes;
    /* Large blocks give their pages back, which takes longer than to fill them; what is kept is poisoned. */
    const size_t page = 4096, first = (b->start + page - 1) / page * page, last = (b->start + b->bytes) / page * page;
    if (last > first + ((size_t)32 << 20))
        fallocate(memory_file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)first, (off_t)(last - first));
    else memset(twin_base + b->start, 0xFF, b->bytes);
    pthread_mutex_unlock(&lock);
    sim_add("live_allocations", -1);
    sim_add("live_bytes", -(int64_t)(b->bytes - 32));
    free(b);
    return ACL_OK;
}

bool sim_is_device(const void *p)
{
    pthread_once(&once, map);
    return (const char *)p >= device_base && (const char *)p < device_base + TOTAL;
}

bool sim_is_live(const void *p, size_t bytes)
{
    if (!sim_is_device(p)) return false;
    const size_t start = (size_t)((const char *)p - device_base);
    bool live = false;
    pthread_mutex_lock(&lock);
    for (const block *b = blocks; b && !live; b = b->next)
        live = start >= b->start && start + bytes <= b->start + b->bytes;
    pthread_mutex_unlock(&lock);
    return live;
}

void *sim_twin(const void *device) { return twin_base + ((const char *)device - device_base); }

size_t sim_memory_total(void) { return TOTAL; }

size_t sim_memory_free(void)
{
    pthread_mutex_lock(&lock);
    const size_t n = TOTAL - used;
    pthread_mutex_unlock(&lock);
    return n;
}
