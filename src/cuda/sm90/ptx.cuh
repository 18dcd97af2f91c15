// SPDX-License-Identifier: Apache-2.0
// ptx.cuh - Hopper primitives: mbarrier, TMA, clusters, stmatrix, warpgroup registers. Nothing of MoE is known here.
#pragma once
#include "cuda/common.cuh"

#include <cuda.h>

DEV uint32_t smem_u32(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }
DEV int uniform(int v) { return __shfl_sync(~0u, v, 0); } // which the compiler then knows to be one value a warp
DEV int warp_index() { return uniform((int)threadIdx.x / 32); }
DEV uint32_t cluster_rank()
{
    uint32_t r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
DEV void cluster_sync() { asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory"); }

DEV void bar_sync(int id, int n) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory"); }

// ---- mbarrier ----
DEV void mbar_init(uint32_t b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n)); }
DEV void mbar_expect(uint32_t b, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
DEV void mbar_arrive(uint32_t b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
// The barrier at the same place in CTA `rank` of the cluster. The release.cluster form is 20 % slower and orders
// nothing we need.
DEV void mbar_arrive_cluster(uint32_t b, uint32_t rank)
{
    asm volatile("{.reg .b32 r; mapa.shared::cluster.u32 r, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [r];}" ::"r"(b),
                 "r"(rank)
                 : "memory");
}
DEV void mbar_wait(uint32_t b, uint32_t parity)
{
    asm volatile(
        "{.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra W;\nD:}" ::"r"(b),
        "r"(parity)
        : "memory");
}
DEV void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- TMA ----
DEV void tma_prefetch(const CUtensorMap *m) { asm volatile("prefetch.tensormap [%0];" ::"l"(m) : "memory"); }
DEV void tma_load(uint32_t dst, const CUtensorMap *m, uint32_t bar, int x, int y, int z)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, "
                 "%5}], [%2];" ::"r"(dst),
                 "l"(m), "r"(bar), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
DEV void tma_load_multicast(uint32_t dst, const CUtensorMap *m, uint32_t bar, int x, int y, int z, uint16_t mask)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(dst),
                 "l"(m), "r"(bar), "r"(x), "r"(y), "r"(z), "h"(mask)
                 : "memory");
}
DEV void tma_load2(uint32_t dst, const CUtensorMap *m, uint32_t bar, int x, int y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
                 "%4}], [%2];" ::"r"(dst),
                 "l"(m), "r"(bar), "r"(x), "r"(y)
                 : "memory");
}
DEV void tma_load2_multicast(uint32_t dst, const CUtensorMap *m, uint32_t bar, int x, int y, uint16_t mask)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst),
                 "l"(m), "r"(bar), "r"(x), "r"(y), "h"(mask)
                 : "memory");
}
// Neighbouring bytes, whole 16 at multiples of 16.
DEV void bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
}
DEV void tma_store2(const CUtensorMap *m, uint32_t src, int x, int y)
{
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(m), "r"(src),
                 "r"(x), "r"(y)
                 : "memory");
}
DEV void tma_store(const CUtensorMap *m, uint32_t src, int x, int y, int z)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(m),
                 "r"(src), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
DEV void tma_add(const CUtensorMap *m, uint32_t src, int x, int y, int z)
{
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(m),
        "r"(src), "r"(x), "r"(y), "r"(z)
        : "memory");
}
DEV void tma_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> DEV void tma_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }
template <int N> DEV void tma_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }

// ---- cp.async that arrives on an mbarrier ----
DEV void cp_async16(uint32_t dst, const void *src)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
DEV void cp_async_arrive(uint32_t bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

template <int R> DEV void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(R)); }
template <int R> DEV void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(R)); }

// ---- A warp's 16 x 64 block of 16-bit elements in 2 KB, 128-byte swizzle: what a TMA box of 64 x 16 expects ----
DEV void stmatrix4(uint32_t a, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(r0), "r"(r1), "r"(r2),
                 "r"(r3)
                 : "memory");
}
// word(j, h): what a thread has of columns 8 j to 8 j + 7 in its row r + 8 h, two neighbours.
template <class F> DEV void store_words(uint32_t base, int lane, F word)
{
    const int row = lane & 15;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const int unit = j + (lane >> 4);
        stmatrix4(base + row * 128 + ((unit ^ (row & 7)) << 4), word(j, 0), word(j, 1), word(j + 1, 0), word(j + 1, 1));
    }
}
// v: the 32 accumulators of 64 columns.
template <class T> DEV void store_fragment(uint32_t base, const float *v, int lane)
{
    store_words(base, lane, [&](int j, int h) { return pack2<T>(v[4 * j + 2 * h], v[4 * j + 2 * h + 1]); });
}
// w[i]: column 4 i + lane % 4, of row r and (high half) of row r + 8. Neighbours come together in two exchanges within
// four lanes: of columns 8 j to 8 j + 7 lanes 0 and 1 take the first four, lanes 2 and 3 the others.
DEV void store_features(uint32_t base, const uint32_t (&w)[16], int lane)
{
    const bool odd = lane & 1, upper = lane & 2;
    const int even_lane = (lane & ~3) | (lane & 1) << 1, odd_lane = even_lane | 1;
    uint32_t v[16];
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
        const uint32_t one = __shfl_sync(~0u, odd ? w[j + 1] : w[j], upper ? odd_lane : even_lane);
        const uint32_t two = __shfl_sync(~0u, odd ? w[j] : w[j + 1], upper ? even_lane : odd_lane);
        const uint32_t left = upper ? two : one, right = upper ? one : two;
        v[j] = __byte_perm(left, right, 0x5410), v[j + 1] = __byte_perm(left, right, 0x7632);
    }
    store_words(base, lane, [&](int j, int h) { return v[2 * j + h]; });
}
// The same for 16 x 32 f32.
DEV void store_fragment_f32(uint32_t base, const float *v, int lane) // v: the 16 accumulators of 32 columns
{
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = lane / 4 + 8 * h, unit = j * 2 + (lane % 4 >> 1);
            asm volatile(
                "st.shared.v2.f32 [%0], {%1,%2};" ::"r"(base + row * 128 + ((unit ^ (row & 7)) << 4) + (lane & 1) * 8),
                "f"(v[4 * j + 2 * h]), "f"(v[4 * j + 2 * h + 1])
                : "memory");
        }
}
DEV uint4 load_shared16(uint32_t a)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(a)
                 : "memory");
    return v;
}
// Address of 16 bytes of such a block in row order: 8 lanes a row, rows 4 i + lane / 8.
DEV uint32_t row_address(uint32_t base, int i, int lane)
{
    const int row = 4 * i + lane / 8;
    return base + row * 128 + (((lane ^ row) & 7) << 4);
}
