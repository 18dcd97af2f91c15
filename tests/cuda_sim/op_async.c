/* SPDX-License-Identifier: Apache-2.0
 * op_async.c - Hopper: barriers in shared memory, clusters, and copies of boxes of a tensor (TMA). Copies are made when
 * they are begun, and then counted at their barrier. */
#include "ptx.h"
#include "races.h"
#include "tensor_map.h"

#include <string.h>

void sim_copies_arrive(warp *w, int lane);

/* A barrier's 64 bits: arrivals that are missing, arrivals of a phase, bytes that are missing (signed), parity. */
typedef struct mbarrier {
    uint32_t missing : 16, count : 15, parity : 1;
    int32_t bytes;
} mbarrier;
_Static_assert(sizeof(mbarrier) == 8, "an mbarrier has 64 bits");

typedef struct found {
    mbarrier *m;
    const block *b; /* whose it is */
    uint32_t at;
} found;
static found barrier_at(warp *w, const instruction *i, space s, int operand, int number, int lane)
{
    const uint32_t a = (uint32_t)(lane_value(w, i, operand, lane) + (uint64_t)i->imm[number]),
                   rank = a >> CLUSTER_SHIFT;
    mbarrier *const m = sim_address(w, i, s, a, 8, lane);
    return (found){m, rank ? w->b->cluster[rank - 1] : w->b, a & ((1u << CLUSTER_SHIFT) - 1)};
}
static void complete(found f)
{
    mbarrier *const b = f.m;
    if (b->missing || b->bytes) return;
    b->parity ^= 1;
    b->missing = b->count;
    races_mbarrier_phase(f.b, f.at);
}
static void barrier_begin(warp *w, const instruction *i, uint32_t lanes)
{
    EACH(const uint32_t n = (uint32_t)lane_value(w, i, 1, l); mbarrier *const b = barrier_at(w, i, SHARED, 0, 0, l).m;
         *b = (mbarrier){.missing = (uint16_t)n, .count = n & 0x7fff});
}
static void arrive(warp *w, const instruction *i, found f, int32_t bytes)
{
    mbarrier *const b = f.m;
    if (!b->missing) sim_fault(w, i, "an arrival more than the barrier's %u", b->count);
    b->bytes += bytes;
    b->missing--;
    races_mbarrier_arrive(w, f.b, f.at);
    complete(f);
}
static void barrier_arrive(warp *w, const instruction *i, uint32_t lanes) /* kind 1: expects bytes */
{
    EACH(arrive(w, i, barrier_at(w, i, i->space == SHARED_CLUSTER ? SHARED_CLUSTER : SHARED, 1, 0, l),
                i->kind ? (int32_t)lane_value(w, i, 2, l) : 0));
}
static void barrier_arrive_copies(warp *w, const instruction *i, uint32_t lanes)
{
    EACH(sim_copies_arrive(w, l); arrive(w, i, barrier_at(w, i, SHARED, 0, 0, l), 0));
}
static void barrier_test(warp *w, const instruction *i, uint32_t lanes)
{
    EACH(const found f = barrier_at(w, i, SHARED, 1, 0, l); const mbarrier *const b = f.m;
         const bool done = b->parity != (lane_value(w, i, 2, l) & 1); REG(uint8_t, 0)[l] = done;
         if (done) races_mbarrier_passed(w, f.b, f.at); w->yields |= !done);
}

/* ---- Clusters ---- */

static void peer_address(warp *w, const instruction *i, uint32_t lanes) /* mapa */
{
    EACH(const uint32_t rank = (uint32_t)lane_value(w, i, 2, l); if (rank >= (uint32_t)w->b->cluster_size)
             sim_fault(w, i, "block %u of a cluster of %d", rank, w->b->cluster_size);
         REG(uint32_t, 0)[l] = (REG(uint32_t, 1)[l] & ((1u << CLUSTER_SHIFT) - 1)) | (rank + 1) << CLUSTER_SHIFT);
}
static void cluster_arrive(warp *w, const instruction *i, uint32_t lanes)
{
    (void)i;
    w->cluster_arrived += (int)w->b->threads * w->b->cluster_size;
    *w->b->cluster_waits += __builtin_popcount(lanes);
    races_cluster(w, true);
}
static void nothing(warp *w, const instruction *i, uint32_t lanes) { (void)w, (void)i, (void)lanes; }

/* ---- Boxes of a tensor ---- */

static uint32_t swizzled(const tensor_map *m, uint32_t at)
{
    return m->swizzle == 3 ? at ^ (at >> 7 & 7) << 4 : m->swizzle == 2 ? at ^ (at >> 7 & 3) << 4 : at;
}

/* Calls f for every element of the box: where it lies in the tensor, or NULL, and where in shared memory. */
typedef void element_fn(const tensor_map *m, char *in_tensor, char *in_shared);
static void each_element(warp *w, const instruction *i, const tensor_map *m, const int32_t *from, const block *b,
                         uint32_t at, element_fn *f, access how)
{
    int index[5] = {0};
    uint32_t n = 0;
    const uint32_t size = (uint32_t)m->bytes;
    if (at % 128) sim_fault(w, i, "a box at %#x of shared memory, no multiple of 128", at);
    for (bool more = true; more; n += size) {
        bool inside = true;
        uint64_t address = m->address;
        for (int d = 0; d < m->rank; d++) {
            const int64_t c = (int64_t)from[d] + index[d];
            inside &= c >= 0 && (uint64_t)c < m->size[d];
            address += (uint64_t)c * (d ? m->stride[d - 1] : size);
        }
        if (inside && !sim_allocated(address, size))
            sim_fault(w, i, "a tensor's element at %#llx, where nothing is allocated", (unsigned long long)address);
        races_touch(w, i, b, swizzled(m, at + n), size, how);
        f(m, inside ? (char *)(uintptr_t)address : NULL, sim_shared(w, i, b, swizzled(m, at + n), size, 0));
        more = false;
        for (int d = 0; d < m->rank; d++) {
            if (++index[d] < m->box[d]) {
                more = true;
                break;
            }
            index[d] = 0;
        }
    }
}
static void to_shared(const tensor_map *m, char *tensor, char *shared)
{
    if (tensor) memcpy(shared, tensor, (size_t)m->bytes);
    else memset(shared, 0, (size_t)m->bytes);
}
static void to_tensor(const tensor_map *m, char *tensor, char *shared)
{
    if (tensor) memcpy(tensor, shared, (size_t)m->bytes);
}
static void add_f32(const tensor_map *m, char *tensor, char *shared)
{
    (void)m;
    float a, b;
    if (!tensor) return;
    memcpy(&a, tensor, 4), memcpy(&b, shared, 4);
    a += b;
    memcpy(tensor, &a, 4);
}

static const tensor_map *map_at(warp *w, const instruction *i, int operand, int lane)
{
    const uint64_t a = lane_value(w, i, operand, lane);
    if (a % 64) sim_fault(w, i, "a tensor map at %#llx, no multiple of 64", (unsigned long long)a);
    const tensor_map *const m = sim_address(w, i, GENERIC, a, sizeof(tensor_map), lane);
    if (m->magic != TENSOR_MAP) sim_fault(w, i, "no tensor map at %#llx", (unsigned long long)a);
    return m;
}

/* [to], [map, {coordinates}], [barrier] {, blocks of the cluster}. kind: dimensions, 8 more: to several blocks. */
static void box_load(warp *w, const instruction *i, uint32_t lanes)
{
    const int rank = i->kind & 7;
    for (int l = 0; l < LANES; l++) {
        if (!(lanes >> l & 1)) continue;
        const tensor_map *const m = map_at(w, i, 1, l);
        if (m->rank != rank) sim_fault(w, i, "%d coordinates of a tensor of %d", rank, m->rank);
        int32_t at[5];
        size_t bytes = (size_t)m->bytes;
        for (int d = 0; d < rank; d++) at[d] = (int32_t)lane_value(w, i, 2 + d, l), bytes *= m->box[d];
        const uint32_t to = (uint32_t)(lane_value(w, i, 0, l) + (uint64_t)i->imm[0]),
                       bar = (uint32_t)(lane_value(w, i, 2 + rank, l) + (uint64_t)i->imm[2]);
        const uint32_t blocks = i->kind & 8 ? (uint32_t)lane_value(w, i, 3 + rank, l) : 1u << w->b->rank;
        for (int r = 0; r < w->b->cluster_size; r++) {
            if (!(blocks >> r & 1)) continue;
            each_element(w, i, m, at, w->b->cluster[r], to, to_shared, WRITE);
            mbarrier *const b = sim_shared(w, i, w->b->cluster[r], bar, 8, l);
            b->bytes -= (int32_t)bytes;
            races_mbarrier_arrive(w, w->b->cluster[r], bar);
            complete((found){b, w->b->cluster[r], bar});
        }
        if (blocks >> w->b->cluster_size) sim_fault(w, i, "blocks %#x of a cluster of %d", blocks, w->b->cluster_size);
    }
}
/* [map, {coordinates}], [from]. kind: dimensions, 8 more: added. */
static void box_store(warp *w, const instruction *i, uint32_t lanes)
{
    const int rank = i->kind & 7;
    for (int l = 0; l < LANES; l++) {
        if (!(lanes >> l & 1)) continue;
        const tensor_map *const m = map_at(w, i, 0, l);
        if (m->rank != rank) sim_fault(w, i, "%d coordinates of a tensor of %d", rank, m->rank);
        if (i->kind & 8 && !m->is_f32) sim_fault(w, i, "an addition that is not of f32");
        int32_t at[5];
        for (int d = 0; d < rank; d++) at[d] = (int32_t)lane_value(w, i, 1 + d, l);
        const uint32_t from = (uint32_t)(lane_value(w, i, 1 + rank, l) + (uint64_t)i->imm[1]);
        each_element(w, i, m, at, w->b, from, i->kind & 8 ? add_f32 : to_tensor, READ);
    }
}

/* [to], [from], bytes, [barrier] */
static void bytes_load(warp *w, const instruction *i, uint32_t lanes)
{
    EACH(
        const uint32_t to = (uint32_t)(lane_value(w, i, 0, l) + (uint64_t)i->imm[0]),
        bytes = (uint32_t)lane_value(w, i, 2, l);
        const uint64_t from = lane_value(w, i, 1, l) + (uint64_t)i->imm[1]; if (to % 16 || from % 16 || bytes % 16)
            sim_fault(w, i, "%u bytes from %#llx to %#x, not whole 16", bytes, (unsigned long long)from, to);
        const found f = barrier_at(w, i, SHARED, 3, 2, l); for (uint32_t n = 0; n < bytes; n += 16) {
            races_touch(w, i, w->b, to + n, 16, WRITE);
            memcpy(sim_shared(w, i, w->b, to + n, 16, l), sim_address(w, i, GLOBAL, from + n, 16, l), 16);
        } f.m->bytes -= (int32_t)bytes;
        races_mbarrier_arrive(w, f.b, f.at); complete(f));
}

#define LOAD(d) "cp.async.bulk.tensor." d ".shared::cluster.global.tile.mbarrier::complete_tx::bytes"
const op async_ops[] = {
    {"mbarrier.init.*", "mw", barrier_begin, PLAIN, 0},
    {"mbarrier.inval.*", "m", nothing, PLAIN, 0},
    {"mbarrier.arrive.expect_tx.*", "dmw", barrier_arrive, PLAIN, 1},
    {"mbarrier.arrive.*", "dm", barrier_arrive, PLAIN, 0},
    {"mbarrier.try_wait.parity.*", "pmw", barrier_test, PLAIN, 0},
    {"mbarrier.test_wait.parity.*", "pmw", barrier_test, PLAIN, 0},
    {"cp.async.mbarrier.arrive.noinc.*", "m", barrier_arrive_copies, PLAIN, 0},
    {"mapa.shared::cluster.u32", "www", peer_address, PLAIN, 0},
    {"barrier.cluster.arrive*", "", cluster_arrive, TOGETHER, 17},
    {"barrier.cluster.wait*", "", nothing, CLUSTER_WAIT, 0},
    {LOAD("2d"), "mmm", box_load, PLAIN, 2},
    {LOAD("3d"), "mmm", box_load, PLAIN, 3},
    {LOAD("5d"), "mmm", box_load, PLAIN, 5},
    {LOAD("2d") ".multicast::cluster", "mmmx", box_load, PLAIN, 2 + 8},
    {LOAD("3d") ".multicast::cluster", "mmmx", box_load, PLAIN, 3 + 8},
    {LOAD("5d") ".multicast::cluster", "mmmx", box_load, PLAIN, 5 + 8},
    {"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", "mmwm", bytes_load, PLAIN, 0},
    {"cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group", "mm", box_store, PLAIN, 2},
    {"cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group", "mm", box_store, PLAIN, 3},
    {"cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group", "mm", box_store, PLAIN, 3 + 8},
    {"cp.async.bulk.commit_group", "", nothing, PLAIN, 0},
    {"cp.async.bulk.wait_group*", "w", nothing, PLAIN, 0},
    {0}};
