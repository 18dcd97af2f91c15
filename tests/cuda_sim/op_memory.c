/* SPDX-License-Identifier: Apache-2.0
 * op_memory.c - loads, stores, atomics and copies that are begun now and waited for later. An address that nothing was
 * allocated at, or that is not a multiple of its size, ends the launch. */
#include "ptx.h"
#include "races.h"

#include <stdlib.h>
#include <string.h>

static void check_multiple(const warp *w, const instruction *i, uint64_t address, size_t bytes, int lane)
{
    if (bytes && address % bytes && bytes <= 16)
        sim_fault(w, i, "lane %d: address %#llx is no multiple of %zu", lane, (unsigned long long)address, bytes);
}
void *sim_shared(const warp *w, const instruction *i, const block *b, uint64_t at, size_t bytes, int lane)
{
    const bool dynamic = at >= DYNAMIC_SHARED && at + bytes <= DYNAMIC_SHARED + b->shared_bytes,
               fixed = at >= STATIC_SHARED && at + bytes <= STATIC_SHARED + b->k->shared;
    if (b->ended || !b->shared) sim_fault(w, i, "shared memory of a block that has ended");
    if (!dynamic && !fixed)
        sim_fault(w, i, "lane %d: byte %lld of shared memory, which has %zu and %zu of variables", lane,
                  (long long)at - DYNAMIC_SHARED, b->shared_bytes, b->k->shared);
    check_multiple(w, i, at, bytes, lane);
    return b->shared + at;
}
void *sim_address(warp *w, const instruction *i, space s, uint64_t address, size_t bytes, int lane)
{
    const block *const b = w->b;
    if (s == SHARED) return sim_shared(w, i, b, address, bytes, lane);
    if (s == SHARED_CLUSTER) {
        const uint64_t rank = address >> CLUSTER_SHIFT, at = address & ((1u << CLUSTER_SHIFT) - 1);
        if (rank > (uint64_t)b->cluster_size) sim_fault(w, i, "lane %d: block %d of a cluster", lane, (int)rank - 1);
        return sim_shared(w, i, rank ? b->cluster[rank - 1] : b, at, bytes, lane);
    }
    check_multiple(w, i, address, bytes, lane);
    if (s == LOCAL) {
        if (address + bytes > b->k->local)
            sim_fault(w, i, "lane %d: byte %lld of local memory", lane, (long long)address);
        return local_memory(w, lane) + address;
    }
    const uint64_t params = (uint64_t)(uintptr_t)b->params, shared = (uint64_t)(uintptr_t)b->shared;
    if (address >= params && address + bytes <= params + b->k->params) return (void *)(uintptr_t)address;
    if (s == GENERIC && address >= shared && address < shared + STATIC_SHARED + b->k->shared)
        return sim_address(w, i, SHARED, address - shared, bytes, lane);
    const uint64_t own = (uint64_t)(uintptr_t)local_memory(w, lane);
    if (s == GENERIC && address >= own && address + bytes <= own + b->k->local) return (void *)(uintptr_t)address;
    if (s == PARAM || !sim_allocated(address, bytes))
        sim_fault(w, i, "lane %d: %zu bytes at %#llx, where nothing is allocated", lane, bytes,
                  (unsigned long long)address);
    return (void *)(uintptr_t)address;
}
static inline uint64_t address_of(const warp *w, const instruction *i, int operand, int number, int lane)
{
    const uint64_t a = lane_value(w, i, operand, lane) + (uint64_t)i->imm[number];
    return i->width[operand] == 4 ? (uint32_t)a : a;
}
/* Where an access to shared memory is looked at: of a block of the cluster, by the address as the kernel has it. */
static void touch(const warp *w, const instruction *i, uint64_t address, size_t bytes, access how)
{
    const block *const b = w->b;
    if (!b->races || (i->space != SHARED && i->space != SHARED_CLUSTER)) return;
    const uint64_t rank = address >> CLUSTER_SHIFT;
    races_touch(w, i, rank ? b->cluster[rank - 1] : b, address & ((1u << CLUSTER_SHIFT) - 1), bytes, how);
}
static int size_of(type t)
{
    switch (t) {
    case B8:
    case U8:
    case S8: return 1;
    case B16:
    case U16:
    case S16:
    case F16:
    case BF16: return 2;
    case B64:
    case U64:
    case S64:
    case F64: return 8;
    default: return 4;
    }
}

static void load(warp *w, const instruction *i, uint32_t lanes)
{
    const int n = i->operands - 1, size = size_of(i->type[0]), spare = 64 - 8 * size;
    const bool sign = i->type[0] == S8 || i->type[0] == S16 || i->type[0] == S32;
    EACH(const char *const p = sim_address(w, i, i->space, address_of(w, i, n, 0, l), (size_t)(n * size), l);
         touch(w, i, address_of(w, i, n, 0, l), (size_t)(n * size), READ); for (int e = 0; e < n; e++) {
             uint64_t v = 0;
             memcpy(&v, p + e * size, (size_t)size);
             if (sign) v = (uint64_t)((int64_t)(v << spare) >> spare);
             set_lane(w, i, e, l, v);
         });
}
static void store(warp *w, const instruction *i, uint32_t lanes)
{
    const int n = i->operands - 1, size = size_of(i->type[0]);
    EACH(char *const p = sim_address(w, i, i->space, address_of(w, i, 0, 0, l), (size_t)(n * size), l);
         touch(w, i, address_of(w, i, 0, 0, l), (size_t)(n * size), WRITE); for (int e = 0; e < n; e++) {
             const uint64_t v = lane_value(w, i, e + 1, l);
             memcpy(p + e * size, &v, (size_t)size);
         });
}

static uint64_t changed(warp *w, const instruction *i, uint64_t old, uint64_t v, uint64_t with)
{
    float a, b;
    switch (i->compare) {
    case ADD:
        if (i->type[0] != F32) return old + v;
        memcpy(&a, &old, 4), memcpy(&b, &v, 4);
        a += b, v = 0;
        memcpy(&v, &a, 4);
        return v;
    case EXCH: return v;
    case CAS: return old == v ? with : old;
    case AND: return old & v;
    case OR: return old | v;
    case XOR: return old ^ v;
    case MIN:
        if (i->type[0] == S32) return (uint32_t)((int32_t)old < (int32_t)v ? old : v);
        return old < v ? old : v;
    case MAX:
        if (i->type[0] == S32) return (uint32_t)((int32_t)old > (int32_t)v ? old : v);
        return old > v ? old : v;
    default: sim_fault(w, i, "no such atomic operation here");
    }
}
static void atomic(warp *w, const instruction *i, uint32_t lanes) /* kind 1: without a result */
{
    const int size = size_of(i->type[0]), first = i->kind ? 0 : 1;
    for (int l = 0; l < LANES; l++) {
        if (!(lanes >> l & 1)) continue;
        char *const p = sim_address(w, i, i->space, address_of(w, i, first, 0, l), (size_t)size, l);
        touch(w, i, address_of(w, i, first, 0, l), (size_t)size, ATOMIC);
        uint64_t old = 0;
        memcpy(&old, p, (size_t)size);
        const uint64_t v =
            changed(w, i, old, lane_value(w, i, first + 1, l), i->compare == CAS ? lane_value(w, i, first + 2, l) : 0);
        memcpy(p, &v, (size_t)size);
        if (!i->kind) set_lane(w, i, 0, l, old);
    }
}

/* Generic addresses of shared memory are where it lies on the host. */
static void same(warp *w, const instruction *i, uint32_t lanes) { EACH(set_lane(w, i, 0, l, lane_value(w, i, 1, l))); }
static void from_shared(warp *w, const instruction *i, uint32_t lanes)
{
    EACH(set_lane(w, i, 0, l, (uint64_t)(uintptr_t)w->b->shared + lane_value(w, i, 1, l)));
}
static void from_local(warp *w, const instruction *i, uint32_t lanes)
{
    EACH(set_lane(w, i, 0, l, (uint64_t)(uintptr_t)local_memory(w, l) + lane_value(w, i, 1, l)));
}
static void to_shared(warp *w, const instruction *i, uint32_t lanes)
{
    EACH(set_lane(w, i, 0, l, lane_value(w, i, 1, l) - (uint64_t)(uintptr_t)w->b->shared));
}
static void prefetch(warp *w, const instruction *i, uint32_t lanes) { (void)w, (void)i, (void)lanes; }

/* cp.async [to], [from], bytes {, bytes that are there | predicate: nothing is} */
static void copy_begin(warp *w, const instruction *i, uint32_t lanes)
{
    for (int l = 0; l < LANES; l++) {
        if (!(lanes >> l & 1)) continue;
        copy c = {.bytes = (int)lane_value(w, i, 2, l), .group = -1};
        c.there = c.bytes;
        if (i->operands > 3)
            c.there = i->width[3] == 1 ? (lane_value(w, i, 3, l) ? 0 : c.bytes) : (int)(uint32_t)lane_value(w, i, 3, l);
        if (c.there > c.bytes || c.there < 0) sim_fault(w, i, "%d bytes of %d", c.there, c.bytes);
        c.to = sim_address(w, i, SHARED, address_of(w, i, 0, 0, l), (size_t)c.bytes, l);
        races_touch(w, i, w->b, address_of(w, i, 0, 0, l), (size_t)c.bytes, WRITE);
        const uint64_t from = address_of(w, i, 1, 1, l);
        if (from % (uint64_t)c.bytes)
            sim_fault(w, i, "lane %d: %#llx is no multiple of %d", l, (unsigned long long)from, c.bytes);
        if (c.there && !sim_allocated(from, (size_t)c.there))
            sim_fault(w, i, "lane %d: %d bytes at %#llx, where nothing is allocated", l, c.there,
                      (unsigned long long)from);
        c.from = (const void *)(uintptr_t)from;
        memset(c.to, 0xff, (size_t)c.bytes); /* who reads before the wait finds NaN */
        if (w->copies[l].count == w->copies[l].room) {
            w->copies[l].room = w->copies[l].room ? 2 * w->copies[l].room : 16;
            w->copies[l].list = realloc(w->copies[l].list, sizeof(copy) * (size_t)w->copies[l].room);
            if (!w->copies[l].list) abort();
        }
        w->copies[l].list[w->copies[l].count++] = c;
    }
}
static void copy_commit(warp *w, const instruction *i, uint32_t lanes)
{
    (void)i;
    for (int l = 0; l < LANES; l++)
        if (lanes >> l & 1) {
            for (int n = 0; n < w->copies[l].count; n++)
                if (w->copies[l].list[n].group < 0) w->copies[l].list[n].group = w->copies[l].committed;
            w->copies[l].committed++;
        }
}
static void copies_up_to(warp *w, int l, int group) /* of groups before this one; INT32_MAX: all, committed or not */
{
    int left = 0;
    for (int n = 0; n < w->copies[l].count; n++) {
        const copy c = w->copies[l].list[n];
        if (group != INT32_MAX && (c.group < 0 || c.group >= group)) {
            w->copies[l].list[left++] = c;
            continue;
        }
        memset(c.to, 0, (size_t)c.bytes);
        memcpy(c.to, c.from, (size_t)c.there);
    }
    w->copies[l].count = left;
}
static void copy_wait(warp *w, const instruction *i, uint32_t lanes)
{
    const bool all = !i->operands;
    EACH(copies_up_to(w, l, all ? INT32_MAX : w->copies[l].committed - (int)lane_value(w, i, 0, l)));
}
/* The barrier's part is in op_async.c. */
void sim_copies_arrive(warp *w, int lane) { copies_up_to(w, lane, INT32_MAX); }

const op memory_ops[] = {{"ld.*", "vm", load, PLAIN, 0},
                         {"st.*", "mv", store, PLAIN, 0},
                         {"atom.*", "tmt?t", atomic, PLAIN, 0},
                         {"red.*", "mt", atomic, PLAIN, 1},
                         {"cvta.to.global.u64", "dd", same, PLAIN, 0},
                         {"cvta.global.u64", "dd", same, PLAIN, 0},
                         {"cvta.param.u64", "dd", same, PLAIN, 0},
                         {"cvta.to.shared.u64", "dd", to_shared, PLAIN, 0},
                         {"cvta.shared.u64", "dd", from_shared, PLAIN, 0},
                         {"cvta.local.u64", "dd", from_local, PLAIN, 0},
                         {"prefetch.*", "m", prefetch, PLAIN, 0},
                         {"prefetchu.*", "m", prefetch, PLAIN, 0},
                         {"cp.async.ca.*", "mmw?x", copy_begin, PLAIN, 0},
                         {"cp.async.cg.*", "mmw?x", copy_begin, PLAIN, 0},
                         {"cp.async.commit_group", "", copy_commit, PLAIN, 0},
                         {"cp.async.wait_group", "w", copy_wait, PLAIN, 0},
                         {"cp.async.wait_all", "", copy_wait, PLAIN, 0},
                         {0}};
