// SPDX-License-Identifier: Apache-2.0
// sched.cuh - what both Hopper kernels share of their schedules.
#pragma once
#include "ptx.cuh"
#include "product.cuh"

// First row of expert e: from shared memory where all of them fit beside the stages.
template <class C> DEV int offset_of(const Sm90Args &p, int e)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    return p.off_shared ? ((const int *)(smem + C::OFFSETS))[e] : __ldg(p.off + e);
}

// ---- A product under the tail of the one before it ----
//
// The CTAs of a kernel come in one by one, as those of the kernel before leave, once every one of those has let it: at
// once, or (p.lets_in_early) when what it has of the first half of the experts is in memory. Tiles come in the order of
// experts, so the next product can multiply that half while the last tiles of this one are under way; before it comes
// to the other half it waits for the launch as a whole. Every kernel lets the next one in after its own wait, so that a
// kernel shares the device with one other at most. Being let in does not make results visible (only depend_wait()
// does): p.ready hands them over, by release and acquire. It is always there when a CTA comes in; the loop is for the
// memory model.

DEV void begin_product(const Sm90Args &p)
{
    if (p.begin == SM90_AFTER) {
        depend_wait();
        if (!p.lets_in_early) depend_launch();
        return;
    }
    unsigned all;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(all) : "l"(&p.ready->all) : "memory");
    while (!all);
    asm volatile("fence.proxy.async;" ::: "memory"); // TMA reads them
}

static constexpr int RING_COUNT = 56; // after the barriers of up to seven stages

// The threads that store, each once, before the first tile of the second half or at the end. count: in shared memory,
// at first 0.
DEV void publish_half(const Sm90Args &p, uint32_t count, int storing)
{
    int before;
    unsigned ctas;
    tma_wait<0>(); // not only read: in memory
    asm volatile("fence.proxy.async;\nfence.acq_rel.gpu;\natom.shared.add.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "r"(count)
                 : "memory");
    if (before + 1 != storing) return;
    asm volatile("fence.acq_rel.gpu;\natom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(ctas)
                 : "l"(&p.ready->ctas)
                 : "memory");
    if (ctas + 1 == gridDim.x) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(&p.ready->all) : "memory");
    depend_launch();
}

// The threads that load, between tiles of expert `from` (at first -1) and `to` (at last p.E).
DEV void wait_at_half(const Sm90Args &p, int from, int to)
{
    if (p.begin == SM90_AFTER || from >= p.E / 2 || to < p.E / 2) return;
    depend_wait();
    depend_launch();
}

// n / d for n >= 0, d > 0 and a quotient below 2^20: half the instructions of the exact division of any two.
DEV int quotient(int n, int d)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"((float)d));
    const int q = (int)((float)n * r), rest = n - q * d; // q is right or next to it
    return q + (rest >= d) - (rest < 0);
}

DEV int place_of(const Place &q, int e) { return q.list ? (int)(((uintptr_t)q.list[e].p - q.base) >> q.shift) : e; }
