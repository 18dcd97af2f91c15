/* SPDX-License-Identifier: Apache-2.0
 * block.c - who executes next. The lanes of a warp that are at the same instruction are a group; the group that is
 * least far in the code goes first, so that the others find it where their ways meet again. A warp runs until all its
 * groups wait, or for so many instructions that one which waits in a loop lets the others go on. */
#include "ptx.h"
#include "races.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { QUANTUM = 4000, TURNS = 50 /* of a block before the next */, RESIDENT = 64 /* blocks at a time */ };

char sim_message[1024];
static jmp_buf ended;
static int traced = -1;
static uint64_t order; /* of the warps: FMOE_SIM_SEED, or 0: one after the other */

static uint32_t drawn(uint32_t n)
{
    order ^= order << 13, order ^= order >> 7, order ^= order << 17;
    return (uint32_t)((order >> 11) % n);
}

void sim_fault(const warp *w, const instruction *i, const char *format, ...)
{
    const block *const b = w->b;
    int n = snprintf(sim_message, sizeof sim_message, "%s, block %u,%u,%u, warp %d: ", b->k->name, b->id[0], b->id[1],
                     b->id[2], w->index);
    va_list list;
    va_start(list, format);
    n += vsnprintf(sim_message + n, sizeof sim_message - (size_t)n, format, list);
    va_end(list);
    if (i && (size_t)n < sizeof sim_message)
        snprintf(sim_message + n, sizeof sim_message - (size_t)n, ": %.*s", (int)strcspn(i->text, ";\n"), i->text);
    longjmp(ended, 1);
}

static inline uint32_t true_lanes(const uint8_t *p)
{
    uint32_t m = 0;
    for (int i = 0; i < 4; i++) {
        uint64_t v;
        memcpy(&v, p + 8 * i, 8);
        v &= 0x0101010101010101ull;                                  /* lanes that never wrote it have other bits */
        m |= (uint32_t)((v * 0x0102040810204080ull) >> 56) << 8 * i; /* the eight bytes' bits, side by side */
    }
    return m;
}

/* ---- Groups, in the order of their place ---- */

static lane_group at(int pc, uint32_t lanes) { return (lane_group){.pc = pc, .lanes = lanes, .barrier = -1}; }
static void insert(warp *w, lane_group g)
{
    if (!g.lanes) return;
    int n = 0;
    while (n < w->groups && w->group[n].pc < g.pc) n++;
    for (; n < w->groups && w->group[n].pc == g.pc; n++)
        if (w->group[n].barrier < 0) { /* they meet */
            w->group[n].lanes |= g.lanes;
            w->group[n].waits = false;
            w->group[n].tired &= g.tired;
            return;
        }
    memmove(&w->group[n + 1], &w->group[n], sizeof w->group[0] * (size_t)(w->groups - n));
    w->group[n] = g;
    w->groups++;
}
static lane_group take_out(warp *w, int n)
{
    const lane_group g = w->group[n];
    w->groups--;
    memmove(&w->group[n], &w->group[n + 1], sizeof w->group[0] * (size_t)(w->groups - n));
    return g;
}

/* ---- Barriers of a block ---- */

static void release(block *b, int id)
{
    const int all = b->barrier[id].expected ? b->barrier[id].expected : (int)b->live;
    if (!b->barrier[id].arrived || b->barrier[id].arrived < all) return;
    b->barrier[id].arrived = 0;
    for (int n = 0; n < b->warp_count; n++) {
        warp *const w = &b->warps[n];
        for (int g = 0; g < w->groups;)
            if (w->group[g].barrier == id) {
                lane_group on = take_out(w, g);
                const instruction *const i = &b->k->code[on.pc];
                if (i->kind == 1) /* bar.red.popc: its result */
                    for (int l = 0; l < LANES; l++)
                        if (on.lanes >> l & 1) set_lane(w, i, 0, l, (uint64_t)b->barrier[id].votes);
                on.barrier = -1, on.pc++;
                races_released(w, id);
                insert(w, on);
                g = 0;
            } else g++;
    }
    b->barrier[id].votes = 0;
}

/* bar.sync id {, threads}; bar.arrive; bar.red.popc result, id, predicate */
static bool arrive(warp *w, lane_group *g, const instruction *i)
{
    block *const b = w->b;
    const int first = i->kind == 1, last = first + 1;
    const int lane = __builtin_ctz(g->lanes), id = (int)lane_value(w, i, first, lane);
    const int threads = i->kind != 1 && i->operands > last ? (int)lane_value(w, i, last, lane) : 0;
    if (id < 0 || id > 15) sim_fault(w, i, "barrier %d of 16", id);
    if (b->barrier[id].arrived && b->barrier[id].expected != threads)
        sim_fault(w, i, "barrier %d for %d threads, and for %d", id, b->barrier[id].expected, threads);
    b->barrier[id].expected = threads;
    b->barrier[id].arrived += __builtin_popcount(g->lanes);
    races_arrive(w, id);
    if (i->kind == 1)
        for (int l = 0; l < LANES; l++)
            if (g->lanes >> l & 1) b->barrier[id].votes += lane_value(w, i, 2, l) != 0;
    if (threads && b->barrier[id].arrived > threads)
        sim_fault(w, i, "barrier %d: %d threads of %d", id, b->barrier[id].arrived, threads);
    if (i->kind == 2) {
        g->pc++;
        release(b, id);
        return true;
    }
    lane_group waiting = *g;
    waiting.barrier = id;
    insert(w, waiting);
    release(b, id);
    return false;
}

static void end_lanes(warp *w, uint32_t lanes)
{
    w->live &= ~lanes;
    w->b->live -= (uint32_t)__builtin_popcount(lanes);
    for (int g = 0; g < w->groups; g++) w->group[g].waits = false; /* perhaps for these */
    for (int id = 0; id < 16; id++)
        if (w->b->barrier[id].arrived && !w->b->barrier[id].expected) release(w->b, id);
}

/* ---- A warp ---- */

static bool all_here(const warp *w, const instruction *i, uint32_t lanes, uint32_t here)
{
    if (i->mask < 0) return here == w->live;
    for (int l = 0; l < LANES; l++)
        if (lanes >> l & 1) {
            const uint32_t mask = (uint32_t)lane_value(w, i, i->mask, l);
            if (!(mask >> l & 1)) sim_fault(w, i, "lane %d is not in its own mask %08x", l, mask);
            if (mask & w->live & ~here) return false;
        }
    return true;
}

/* FMOE_SIM_TRACE=n: what lane n of every warp executes, and the operands after it, on stderr. */
static void trace(const warp *w, const instruction *i, int lane)
{
    fprintf(stderr, "%u.%d  %.*s ", w->b->id[0], w->index, (int)strcspn(i->text, ";\n"), i->text);
    for (int n = 0; n < i->operands && n < 8; n++)
        fprintf(stderr, " %llx", (unsigned long long)lane_value(w, i, n, lane));
    fprintf(stderr, "\n");
}

/* False: these lanes are elsewhere now, or wait. */
static bool step(warp *w, lane_group *g)
{
    const instruction *const i = &w->b->k->code[g->pc];
    uint32_t lanes = g->lanes;
    if (i->guard >= 0) {
        const uint32_t yes = true_lanes(w->file + i->guard);
        lanes &= i->guard_not ? ~yes : yes;
    }
    switch (i->flow) {
    case PLAIN:
        if (lanes) i->fn(w, i, lanes);
        g->pc++;
        return true;
    case TOGETHER:
        if (!all_here(w, i, lanes, g->lanes)) {
            g->waits = true;
            insert(w, *g);
            return false;
        }
        if (lanes) i->fn(w, i, lanes);
        g->pc++;
        return true;
    case CALL:
        for (int l = 0; l < LANES; l++)
            if (lanes >> l & 1) set_lane(w, i, 0, l, (uint64_t)(g->pc + 1));
        g->pc = i->target;
        return true;
    case BRANCH: {
        if (lanes == g->lanes) {
            g->pc = i->target;
            return true;
        }
        if (lanes) {
            insert(w, at(i->target, lanes));
            insert(w, at(g->pc + 1, g->lanes & ~lanes));
            return false;
        }
        g->pc++;
        return true;
    }
    case RETURN:
        for (int l = 0; l < LANES; l++)
            if (lanes >> l & 1) insert(w, at((int)lane_value(w, i, 0, l), 1u << l));
        insert(w, at(g->pc + 1, g->lanes & ~lanes));
        return false;
    case EXIT:
        insert(w, at(g->pc + 1, g->lanes & ~lanes));
        if (lanes) end_lanes(w, lanes);
        return false;
    case BARRIER:
        if (lanes != g->lanes) sim_fault(w, i, "a barrier with a predicate that lanes differ in");
        return arrive(w, g, i);
    case CLUSTER_WAIT:
        if (*w->b->cluster_waits >= w->cluster_arrived) {
            races_cluster(w, false);
            g->pc++;
            return true;
        }
        insert(w, *g);
        return false;
    }
    return true;
}

static int runnable(const warp *w) /* the group that is least far and may go on */
{
    int n = 0;
    while (n < w->groups && (w->group[n].waits || w->group[n].barrier >= 0 || w->group[n].tired)) n++;
    return n;
}

/* How many instructions were executed. */
static int run_warp(warp *w)
{
    const int quantum = order ? 1 + (int)drawn(QUANTUM) : QUANTUM;
    int left = quantum;
    w->yields = false;
    while (w->live && left > 0 && !w->yields) {
        int n = runnable(w);
        if (n == w->groups) {
            for (int g = 0; g < w->groups; g++) w->group[g].tired = false;
            n = runnable(w);
        }
        if (n == w->groups) break;
        lane_group g = take_out(w, n);
        const int begun = g.pc, before = left;
        bool here = true;
        while (here && left > 0 && !w->yields) { /* until another group is at the place, or behind it */
            const int next = n < w->groups ? w->group[n].pc : w->b->k->length;
            const int from = g.pc;
            const uint32_t lanes = g.lanes;
            here = step(w, &g);
            if (traced >= 0 && lanes >> traced & 1) trace(w, &w->b->k->code[from], traced);
            left--;
            if (here && (g.pc >= next || (n && g.pc <= from))) {
                insert(w, g);
                here = false;
            }
        }
        if (here) {
            g.tired = true;
            insert(w, g);
        }
        if (before - left == 1 && w->groups && w->group[0].pc == begun && w->b->k->code[begun].flow == CLUSTER_WAIT)
            break;
    }
    return quantum - left;
}

/* ---- Blocks ---- */

/* Register files that are not used now, by size: each has the address of the next. */
static void *files[64];
static int size_class(const kernel *k) /* its power of two */
{
    return 64 - __builtin_clzll(k->registers + k->local * LANES);
}
static uint8_t *take_file(const kernel *k)
{
    const int c = size_class(k);
    uint8_t *const p = files[c] ? files[c] : aligned_alloc(64, (size_t)1 << c);
    if (!p) abort();
    if (files[c]) memcpy(&files[c], p, sizeof files[c]);
    return p;
}
static void give_file(const kernel *k, uint8_t *file)
{
    memcpy(file, &files[size_class(k)], sizeof files[0]);
    files[size_class(k)] = file;
}

static void begin_block(block *b, const launch *l, uint64_t index, block **cluster, int *cluster_waits)
{
    kernel *const k = l->k;
    memset(b, 0, sizeof *b);
    b->k = k, b->params = l->params;
    b->id[0] = (uint32_t)(index % l->grid[0]);
    b->id[1] = (uint32_t)(index / l->grid[0] % l->grid[1]);
    b->id[2] = (uint32_t)(index / l->grid[0] / l->grid[1]);
    b->rank = b->id[0] % (uint32_t)l->cluster;
    b->threads = b->live = l->threads[0] * l->threads[1] * l->threads[2];
    b->warp_count = (int)((b->threads + LANES - 1) / LANES);
    b->warps = calloc((size_t)b->warp_count, sizeof *b->warps);
    b->shared_bytes = l->shared;
    b->shared = malloc(STATIC_SHARED + k->shared);
    if (!b->warps || !b->shared) abort();
    memset(b->shared, 0xff, STATIC_SHARED + k->shared); /* NaN */
    b->cluster = cluster, b->cluster_size = l->cluster, b->cluster_waits = cluster_waits;
    cluster[b->rank] = b;
    for (int n = 0; n < b->warp_count; n++) {
        warp *const w = &b->warps[n];
        w->b = b, w->index = n;
        w->file = take_file(k);
        memset(w->file, 0xff, k->registers + k->local * LANES); /* what was never written is NaN */
        const uint32_t lanes = b->threads - (uint32_t)n * LANES;
        w->live = lanes >= LANES ? ~0u : (1u << lanes) - 1;
        w->group[0] = at(0, w->live);
        w->groups = 1;
        for (int c = 0; c < k->constant_count; c++)
            for (int lane = 0; lane < LANES; lane++)
                memcpy(w->file + k->constants[c].at + lane * k->constants[c].width, &k->constants[c].bits,
                       (size_t)k->constants[c].width);
        for (int lane = 0; lane < LANES; lane++) {
            const uint32_t t = (uint32_t)n * LANES + (uint32_t)lane;
            const uint32_t values[] = {t % l->threads[0],
                                       t / l->threads[0] % l->threads[1],
                                       t / l->threads[0] / l->threads[1],
                                       l->threads[0],
                                       l->threads[1],
                                       l->threads[2],
                                       b->id[0],
                                       b->id[1],
                                       b->id[2],
                                       l->grid[0],
                                       l->grid[1],
                                       l->grid[2],
                                       (uint32_t)lane,
                                       b->rank,
                                       (uint32_t)l->cluster,
                                       (uint32_t)(index % 4),
                                       4,
                                       (uint32_t)n,
                                       (1u << lane) - 1,
                                       (2u << lane) - 1,
                                       ~((2u << lane) - 1),
                                       ~((1u << lane) - 1)};
            for (int v = 0; v < PARAMS; v++)
                if (k->special[v]) ((uint32_t *)(void *)(w->file + k->special[v]))[lane] = values[v];
            if (k->special[PARAMS])
                ((uint64_t *)(void *)(w->file + k->special[PARAMS]))[lane] = (uint64_t)(uintptr_t)b->params;
        }
    }
}

static void free_block(block *b)
{
    for (int n = 0; n < b->warp_count; n++) {
        for (int l = 0; l < LANES; l++) free(b->warps[n].copies[l].list);
        give_file(b->k, b->warps[n].file);
    }
    free(b->warps), free(b->shared);
    b->warps = NULL, b->shared = NULL;
}

typedef struct resident { /* a cluster of blocks */
    block *blocks, *list[MOST_CLUSTER];
    int waits, ended;
    races *races;
} resident;

/* Of every block and warp of a cluster where its first lanes are, for a message. */
static const char *where_they_wait(const resident *r, int blocks)
{
    static char text[900];
    size_t n = 0;
    for (int c = 0; c < blocks; c++)
        for (int m = 0; m < r->blocks[c].warp_count && n < sizeof text - 100; m++) {
            const warp *const w = &r->blocks[c].warps[m];
            if (!w->groups) continue;
            const char *const text_at = w->b->k->code[w->group[0].pc].text;
            n += (size_t)snprintf(text + n, sizeof text - n, "%sblock %u warp %d %08x: %.*s", n ? "; " : "",
                                  w->b->id[0], m, w->group[0].lanes, (int)strcspn(text_at, ";\n") % 50, text_at);
        }
    return text;
}

bool sim_run(const launch *l)
{
    const uint64_t blocks = (uint64_t)l->grid[0] * l->grid[1] * l->grid[2];
    const uint64_t clusters = blocks / (uint64_t)l->cluster;
    const int most = RESIDENT / l->cluster;
    resident *const r = calloc((size_t)most, sizeof *r);
    if (!r) abort();
    volatile uint64_t next = 0, done = 0, total = 0;
    volatile bool good = true;
    order = getenv("FMOE_SIM_SEED") ? strtoull(getenv("FMOE_SIM_SEED"), NULL, 10) * 0x9e3779b97f4a7c15ull : 0;
    /* Of a launch: a minute or two. */
    const uint64_t most_steps = getenv("FMOE_SIM_STEPS") ? strtoull(getenv("FMOE_SIM_STEPS"), NULL, 10) : 4000000000;
    traced = getenv("FMOE_SIM_TRACE") ? atoi(getenv("FMOE_SIM_TRACE")) : -1;
    if (!setjmp(ended)) {
        while (done < clusters) {
            bool moved = false;
            for (int n = 0; n < most; n++) {
                if (!r[n].blocks) {
                    if (next == clusters) continue;
                    r[n].blocks = calloc((size_t)l->cluster, sizeof(block));
                    if (!r[n].blocks) abort();
                    r[n].waits = r[n].ended = 0;
                    for (int c = 0; c < l->cluster; c++)
                        begin_block(&r[n].blocks[c], l, next * (uint64_t)l->cluster + (uint64_t)c, r[n].list,
                                    &r[n].waits);
                    r[n].races = races_begin(l->cluster, r[n].blocks->warp_count);
                    for (int c = 0; c < l->cluster; c++) r[n].blocks[c].races = r[n].races;
                    next++;
                }
                /* As far as it goes; others only when it waits. */
                bool on = true;
                for (int turn = 0; on && turn < TURNS; turn++) {
                    on = false;
                    for (int c = 0; c < l->cluster; c++) {
                        block *const b = &r[n].blocks[c];
                        int executed = 0;
                        const int first = order ? (int)drawn((uint32_t)b->warp_count) : 0;
                        for (int w = 0; b->live && w < b->warp_count; w++) {
                            const int steps = run_warp(&b->warps[(w + first) % b->warp_count]);
                            executed += steps;
                            on |= steps > 0;
                            total += (uint64_t)steps;
                        }
                        moved |= executed > 0;
                        if (!b->live && !b->ended) {
                            b->ended = on = true;
                            r[n].ended++;
                        }
                    }
                }
                if (total > most_steps) {
                    snprintf(sim_message, sizeof sim_message, "%.100s: no end after %llu instructions; %s", l->k->name,
                             (unsigned long long)total, where_they_wait(&r[n], l->cluster));
                    longjmp(ended, 1);
                }
                if (r[n].ended == l->cluster) {
                    for (int c = 0; c < l->cluster; c++) free_block(&r[n].blocks[c]);
                    free(r[n].blocks);
                    races_end(r[n].races);
                    r[n].blocks = NULL;
                    done++;
                    n--; /* the next one in its place */
                }
            }
            if (!moved && done < clusters) {
                const resident *first = r;
                while (!first->blocks) first++;
                snprintf(sim_message, sizeof sim_message, "%.100s: nobody can go on; %s", l->k->name,
                         where_they_wait(first, l->cluster));
                good = false;
                break;
            }
        }
    } else good = false;
    for (int n = 0; n < most; n++)
        if (r[n].blocks) {
            for (int c = 0; c < l->cluster; c++) free_block(&r[n].blocks[c]);
            free(r[n].blocks);
            races_end(r[n].races);
        }
    free(r);
    return good;
}
