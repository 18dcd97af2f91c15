/* SPDX-License-Identifier: Apache-2.0
 * races.c - races in shared memory (FMOE_SIM_RACES=1): two warps touch the same two bytes, one of them writes, and no
 * barrier orders the two. Every warp has a clock, and knows how far it has seen those of the others (vector clocks):
 * a barrier takes what those that arrive know, and gives it to those that it lets go. Lanes of one warp are one. */
#include "races.h"

#include <stdlib.h>
#include <string.h>

enum { UNIT = 2, UNITS = (STATIC_SHARED + (64 << 10)) / UNIT, BARRIERS = 256 };
typedef struct touched {
    const instruction *by;
    uint32_t clock;
    int16_t warp; /* -1: nobody */
    bool atomic;
} touched;
typedef struct keeper { /* what a barrier was told: by the arrivals of this phase, and of the one that is complete */
    uint32_t at;
    uint32_t *now, *then;
} keeper;
struct races {
    int warps, all;  /* of a block; of the cluster */
    uint32_t *clock; /* [all][all] */
    uint32_t *cluster;
    struct {
        touched *written;
        uint32_t *read; /* [UNITS][all] */
        uint32_t *named[16];
        keeper barrier[BARRIERS];
        int barriers;
    } of[MOST_CLUSTER];
};

static uint32_t *clocks(int n)
{
    uint32_t *const p = calloc((size_t)n, sizeof *p);
    if (!p) abort();
    return p;
}
static void join(uint32_t *to, const uint32_t *from, int n)
{
    for (int i = 0; i < n; i++)
        if (from[i] > to[i]) to[i] = from[i];
}
static uint32_t *mine(const warp *w, int *index)
{
    races *const r = w->b->races;
    *index = (int)w->b->rank * r->warps + w->index;
    return r->clock + (size_t)*index * (size_t)r->all;
}

races *races_begin(int blocks, int warps)
{
    if (!getenv("FMOE_SIM_RACES")) return NULL;
    races *const r = calloc(1, sizeof *r);
    if (!r) abort();
    r->warps = warps, r->all = blocks * warps;
    r->clock = clocks(r->all * r->all), r->cluster = clocks(r->all);
    for (int i = 0; i < r->all; i++) r->clock[i * r->all + i] = 1;
    for (int b = 0; b < blocks; b++) {
        r->of[b].written = calloc(UNITS, sizeof(touched));
        if (!r->of[b].written) abort();
        for (int u = 0; u < UNITS; u++) r->of[b].written[u].warp = -1;
        r->of[b].read = clocks(UNITS * r->all);
        for (int n = 0; n < 16; n++) r->of[b].named[n] = clocks(r->all);
    }
    return r;
}
void races_end(races *r)
{
    if (!r) return;
    for (int b = 0; b < MOST_CLUSTER; b++) {
        free(r->of[b].written), free(r->of[b].read);
        for (int n = 0; n < 16; n++) free(r->of[b].named[n]);
        for (int n = 0; n < r->of[b].barriers; n++) free(r->of[b].barrier[n].now), free(r->of[b].barrier[n].then);
    }
    free(r->clock), free(r->cluster), free(r);
}

void races_touch(const warp *w, const instruction *i, const block *b, uint64_t at, size_t bytes, access how)
{
    races *const r = b->races;
    if (!r || (at + bytes) / UNIT >= UNITS) return;
    int me;
    const uint32_t *const seen = mine(w, &me);
    for (uint64_t u = at / UNIT; u <= (at + bytes - 1) / UNIT; u++) {
        touched *const t = &r->of[b->rank].written[u];
        uint32_t *const read = r->of[b->rank].read + u * (uint64_t)r->all;
        const bool both = how == ATOMIC && t->atomic;
        if (t->warp >= 0 && t->warp != me && t->clock > seen[t->warp] && !both)
            sim_fault(w, i,
                      "a race at byte %lld of shared memory: warp %d wrote it (%.*s), with no barrier after, and here",
                      (long long)(u * UNIT) - DYNAMIC_SHARED, t->warp, (int)strcspn(t->by->text, ";\n"), t->by->text);
        if (how == READ) {
            read[me] = seen[me];
            continue;
        }
        for (int n = 0; n < r->all && !both; n++)
            if (n != me && read[n] > seen[n])
                sim_fault(w, i,
                          "a race at byte %lld of shared memory: warp %d read it, with no barrier after, and here",
                          (long long)(u * UNIT) - DYNAMIC_SHARED, n);
        *t = (touched){i, seen[me], (int16_t)me, how == ATOMIC};
    }
}

/* ---- What orders two warps ---- */

static void tell(const warp *w, uint32_t *told)
{
    int me;
    uint32_t *const c = mine(w, &me);
    join(told, c, w->b->races->all);
    c[me]++;
}
static void hear(const warp *w, const uint32_t *told)
{
    int me;
    join(mine(w, &me), told, w->b->races->all);
}
void races_arrive(const warp *w, int id)
{
    if (w->b->races) tell(w, w->b->races->of[w->b->rank].named[id]);
}
void races_released(const warp *w, int id)
{
    if (w->b->races) hear(w, w->b->races->of[w->b->rank].named[id]);
}
void races_cluster(const warp *w, bool arrives)
{
    if (!w->b->races) return;
    if (arrives) tell(w, w->b->races->cluster);
    else hear(w, w->b->races->cluster);
}
static keeper *keeper_at(const block *b, uint32_t at)
{
    races *const r = b->races;
    keeper *k = r->of[b->rank].barrier;
    for (int n = 0; n < r->of[b->rank].barriers; n++, k++)
        if (k->at == at) return k;
    if (r->of[b->rank].barriers == BARRIERS) abort();
    r->of[b->rank].barriers++;
    *k = (keeper){at, clocks(r->all), clocks(r->all)};
    return k;
}
void races_mbarrier_arrive(const warp *w, const block *b, uint32_t at)
{
    if (b->races) tell(w, keeper_at(b, at)->now);
}
void races_mbarrier_phase(const block *b, uint32_t at)
{
    if (!b->races) return;
    keeper *const k = keeper_at(b, at);
    memcpy(k->then, k->now, sizeof *k->now * (size_t)b->races->all);
    memset(k->now, 0, sizeof *k->now * (size_t)b->races->all);
}
void races_mbarrier_passed(const warp *w, const block *b, uint32_t at)
{
    if (b->races) hear(w, keeper_at(b, at)->then);
}
