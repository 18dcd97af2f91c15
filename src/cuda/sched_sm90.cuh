// SPDX-License-Identifier: Apache-2.0
// sched_sm90.cuh - what both Hopper kernels share of their schedules.
#pragma once
#include "sm90.cuh"

// First row of expert e: from shared memory where all of them fit beside the stages.
template <class C> DEV int offset_of(const Sm90Args &p, int e)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    return p.off_shared ? ((const int *)(smem + C::OFFSETS))[e] : __ldg(p.off + e);
}

DEV int place_of(const Place &q, int e) { return q.list ? (int)(((uintptr_t)q.list[e].p - q.base) >> q.shift) : e; }
