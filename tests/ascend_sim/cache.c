/* SPDX-License-Identifier: Apache-2.0
 *
 * cache.c - the operator cache of libnnopbase, as its public sources have it: one for each thread, keyed by operator,
 * shapes, strides, dtypes and attributes, never by addresses.
 *
 * Phase 1 publishes an entry, which counts from when its executor is destroyed: by phase 2, with the tasks that ran, or
 * by aclDestroyAclOpExecutor, with none. A later phase 1 of the same key takes what is there, so a hit on an entry
 * without tasks is an executor that answers 0 and runs nothing. aclSetAclOpExecutorRepeatable takes the entry out. The
 * switch cache_guard is the rule of opbase since 2025-12: entries without tasks are not used.
 *
 * torch_npu's hash mode (InitPTACacheThreadLocal, SetPTAHashKey, UnInitPTACacheThreadLocal): while it is on, phase 1
 * stores under torch's hash instead, whoever calls. Counted as pta_stores. */
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "sim.h"

enum { PENDING = 1, WITH_TASKS, WITHOUT_TASKS };

#define SLOTS 32768 /* of which half are used before all is forgotten; the vendor keeps 10000 */

static struct {
    uint64_t key;
    int state; /* 0: free */
} slot[SLOTS];
static int used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread bool pta;
static __thread uint64_t pta_hash;

static uint64_t mix(uint64_t h, const void *p, size_t n)
{
    for (size_t i = 0; i < n; i++) h = (h ^ ((const unsigned char *)p)[i]) * UINT64_C(1099511628211);
    return h;
}

static uint64_t key_of(const sim_exec *e)
{
    const pid_t thread = gettid();
    uint64_t h = mix(UINT64_C(14695981039346656037), &thread, sizeof thread);
    h = mix(h, e->name, strlen(e->name));
    for (int i = 0; i < e->nt; i++) {
        const sim_tensor *t = &e->t[i];
        const int64_t head[] = {t->present, t->ndim, t->dtype, t->offset, t->storage};
        h = mix(h, head, sizeof head);
        h = mix(h, t->dims, (size_t)t->ndim * sizeof *t->dims);
        h = mix(h, t->strides, (size_t)t->ndim * sizeof *t->strides);
    }
    h = mix(h, e->i, sizeof e->i);
    h = mix(h, e->d, sizeof e->d);
    return h ? h : 1;
}

static int *state_of(uint64_t key, bool make)
{
    if (used > SLOTS / 2) {
        memset(slot, 0, sizeof slot);
        used = 0;
    }
    for (uint64_t i = key % SLOTS;; i = (i + 1) % SLOTS) {
        if (slot[i].key == key) return &slot[i].state;
        if (slot[i].key) continue;
        if (!make) return NULL;
        slot[i].key = key;
        used++;
        return &slot[i].state;
    }
}

/* Phase 1 is done: look the executor up, or publish it. */
void sim_cache_open(sim_exec *e)
{
    if (pta) sim_add("pta_stores", 1);
    if (e->uncached) return;
    const uint64_t key = key_of(e);
    pthread_mutex_lock(&lock);
    int *state = state_of(key, true);
    if (*state == WITHOUT_TASKS && fmoe_sim_option("cache_guard")) *state = 0;
    e->hollow = *state == WITHOUT_TASKS;
    if (*state != PENDING) e->key = key; /* an entry that waits for its phase 2 is not used, and stays its owner's */
    if (*state == 0) *state = PENDING;
    pthread_mutex_unlock(&lock);
}

/* The executor is gone. */
void sim_cache_close(sim_exec *e, bool ran)
{
    if (!e->key) return;
    pthread_mutex_lock(&lock);
    int *state = state_of(e->key, false);
    if (state && *state == PENDING) *state = ran ? WITH_TASKS : WITHOUT_TASKS;
    pthread_mutex_unlock(&lock);
    e->key = 0;
}

void sim_cache_remove(sim_exec *e)
{
    if (!e->key) return;
    pthread_mutex_lock(&lock);
    int *state = state_of(e->key, false);
    if (state) *state = 0;
    pthread_mutex_unlock(&lock);
    e->key = 0;
}

void InitPTACacheThreadLocal(void) { pta = true; }
void SetPTAHashKey(uint64_t hash) { pta_hash = hash; }

void UnInitPTACacheThreadLocal(void)
{
    sim_enter(__func__);
    pta = false;
    pta_hash = 0;
}
