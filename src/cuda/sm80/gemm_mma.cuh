// SPDX-License-Identifier: Apache-2.0
// gemm_mma.cuh - the fast general product: mma.sync from swizzled shared memory that cp.async fills, a persistent block
// an SM. The copies run through all tiles of a block without a break: while a tile is stored, the first steps of the
// next one arrive. No barrier of the block is in the way: a warp waits for the stage it reads and, before it copies
// into one, for the warps that still read it. Sums over k are the same for every number of rows.
#pragma once
#include "epilogue_mma.cuh"

// A warp's place in the tile: rows 32 i + 16 wm of every i, so that a tile of few rows keeps both halves of the warps
// busy; columns 64 wn. Warps of one scheduler (w, w + 4) differ in wn by two: a half-empty tile takes half the time.
struct MmaWarp {
    int wm, wn, lane;
    DEV MmaWarp() : wm(threadIdx.x / 32 % 2), wn(threadIdx.x / 64), lane(threadIdx.x % 32) {}
};

struct MmaUnits { // fragments of two units, in turns
    uint32_t a[2][4][4], b[2][4][4];
};

// Fragments of a step: 16 of k at a time.
template <class C> struct MmaFragments {
    uint32_t a, b; // a lane's address in the first stage
    DEV MmaFragments(uint32_t base, const MmaWarp &w)
    {
        const int lane = w.lane, r = lane & 7, x = lane >> 3 & 1, y = lane >> 4;
        if (C::TA) a = base + (r + y * 8) * 128 + ((x ^ r ^ 2 * w.wm) << 4);
        else a = base + (16 * w.wm + (lane & 15)) * 128 + ((y ^ r) << 4);
        b = base + MMA_BM * 128 + 8192 * w.wn;
        if (C::TB) b += (r + x * 8) * 128 + ((y ^ r) << 4);
        else b += (r + y * 8) * 128 + ((x ^ r) << 4);
    }
    // Load i of a unit: B's first, which the first product of the next unit needs all of.
    DEV void load(uint32_t stage, int kk, int i, uint32_t (&fa)[4][4], uint32_t (&fb)[4][4]) const
    {
        if (i < 4) {
            if (C::TB) ldmatrix4<true>(((b + stage) ^ i * 32) + kk * 2048, fb[i]);
            else ldmatrix4<false>(((b + stage) ^ kk * 32) + i * 2048, fb[i]);
        } else {
            i -= 4;
            if (C::TA) ldmatrix4<true>(((a + stage) ^ (i & 1) * 64) + (i >> 1) * 8192 + kk * 2048, fa[i]);
            else ldmatrix4<false>(((a + stage) ^ kk * 32) + i * 4096, fa[i]);
        }
    }
    DEV void load(uint32_t stage, MmaUnits &u) const // the first unit of a step
    {
#pragma unroll
        for (int i = 0; i < 8; i++) load(stage, 0, i, u.a[0], u.b[0]);
    }
};

// Where a warp reads.
struct MmaReader {
    uint32_t stage, offset, phase;
    DEV void advance(int stages)
    {
        offset += MMA_STAGE;
        if (++stage == (uint32_t)stages) stage = offset = 0, phase ^= 1;
    }
    DEV bool ready(const MmaShared &s) const { return bar_test(smem_u32(s.full + stage), phase); }
};

DEV void mma_arrive(const uint64_t &bar) // a warp
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) bar_arrive(smem_u32(&bar));
}

// The copies of the step at r have arrived, as far as they are this warp's. With two stages they are the last ones;
// else (ALL) the last are of the step after it.
template <bool ALL> DEV void mma_copied(const MmaArgs &p, const MmaShared &s, const MmaReader &r)
{
    if (ALL || p.stages > 2) cp_async_wait<1>();
    else cp_async_wait<0>();
    mma_arrive(s.full[r.stage]);
}

// A step: 4 units of 16 in k. The loads of the next unit and a piece of the copies are spread among the products of
// this one: in a burst the tensor cores would wait for them. A branch waits for all loads before it, so there is one in
// a step, in its last unit: for what the next step reads, and for the stage that it copies into. ALL: the copies need
// no test of a bound, and there are three stages or more. TAIL: only the first `units` have anything. MI = 0: no
// products.
template <class C, int MI, bool ALL, bool TAIL>
DEV void mma_step(const MmaArgs &p, const MmaShared &shared, MmaLoader<C> &loader, const MmaFragments<C> &f,
                  MmaReader &r, int units, MmaUnits &u, float (&acc)[4][8][4])
{
    constexpr int X = MI ? 2 * MI : 1;
    const uint64_t &done = shared.empty[r.stage];
    const uint32_t here = r.offset;
    bool ready = false;
#pragma unroll
    for (int kk = 0; kk < 4; kk++) {
        const int now = kk & 1;
#pragma unroll
        for (int x = 0; x < X; x++) { // 4 products, and what follows them
            if (MI && (!TAIL || kk < units))
#pragma unroll
                for (int j = x % 2 * 4; j < x % 2 * 4 + 4; j++)
                    mma16816<typename C::T>(acc[x / 2][j], u.a[now][x / 2], u.b[now][j / 2][j % 2 * 2],
                                            u.b[now][j / 2][j % 2 * 2 + 1]);
            // In the first half of the step: with two stages they are waited for in its second.
            if (kk < 2 && x == 0) loader.template piece<ALL>(p, shared, 2 * kk);
            if (kk < 2 && x == X / 2) loader.template piece<ALL>(p, shared, 2 * kk + 1);
            if (kk == 1 && x == X - 1) cp_async_commit();
            if (kk == 2 && x == 0) {
                r.advance(p.stages);
                mma_copied<ALL>(p, shared, r);
            }
            if (kk == 2 && x == X / 2) loader.template advance<ALL>(p);
            if (kk == 2 && x == X - 1) ready = r.ready(shared) & loader.empty(shared); // a while before it is asked
            if (kk == 3 && x == 0) {
                mma_arrive(done); // all its fragments are in registers
#ifdef FMOE_MMA_SYNC // for racecheck, which sees no order in a warp's one arrival: the same, and a barrier of the block
                __syncthreads();
#endif
                while (!ready) ready = r.ready(shared) & loader.empty(shared);
            }
#pragma unroll
            for (int i = 0; i < 8; i++)
                if ((kk == 3 ? i * X / 16 : i * X / (2 * MI + 8)) == x && (kk == 3 || (MI && i < MI + 4)))
                    f.load(kk < 3 ? here : r.offset, (kk + 1) % 4, i, u.a[now ^ 1], u.b[now ^ 1]);
        }
    }
}

// The steps of a tile whose rows are at most 32 MI; 0: none of its columns are this warp's.
template <class C, int MI>
DEV void mma_steps(const MmaArgs &p, const MmaShared &shared, MmaLoader<C> &loader, const MmaFragments<C> &f,
                   MmaReader &r, int steps, int units, MmaUnits &u, float (&acc)[4][8][4])
{
    const bool tail = C::WGRAD && (units % 4 != 0 || units == 0);
    int whole = steps - tail;
#pragma unroll 1
    while (whole > 0) {
        if (loader.left <= 0 && loader.live) loader.begin(p, shared);
        const int fast = p.stages > 2 ? min(whole, loader.fast_steps()) : 0; // cards with two stages are slower anyway
        if (fast) {
#pragma unroll 1
            for (int s = 0; s < fast; s++) mma_step<C, MI, true, false>(p, shared, loader, f, r, 4, u, acc);
            whole -= fast;
        } else {
            mma_step<C, MI, false, false>(p, shared, loader, f, r, 4, u, acc);
            whole--;
        }
    }
    if (C::WGRAD && tail) {
        if (loader.left <= 0 && loader.live) loader.begin(p, shared);
        mma_step<C, MI, false, true>(p, shared, loader, f, r, units % 4, u, acc);
    }
}

template <class C> __global__ void __launch_bounds__(MMA_THREADS, 1) mma_kernel(const __grid_constant__ MmaArgs p)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    depend_wait();
    depend_launch();
    const uint32_t base = smem_u32(smem);
    MmaShared &shared = *(MmaShared *)(smem + p.stages * MMA_STAGE);
    const MmaWarp w;
    const int warp = threadIdx.x / 32;
    if (threadIdx.x < 4) {
        bar_init(smem_u32(shared.full + threadIdx.x), MMA_THREADS / 32);
        bar_init(smem_u32(shared.empty + threadIdx.x), MMA_THREADS / 32);
    }
    if (w.lane == 0) shared.u[warp] = blockIdx.x + warp * gridDim.x, shared.base[warp] = shared.e0[warp] = 0;
    __syncwarp();
    if (warp < MMA_AHEAD) mma_find<C>(p, shared, warp, warp, w.lane);
    __syncthreads();
    MmaLoader<C> loader(p, shared, base);
    const MmaFragments<C> f(base, w);
    // A step's copies go where the step before last was, so that warps may be apart; with fewer stages, the last.
#pragma unroll 1
    for (int s = p.stages == 4 ? 2 : 1; s < p.stages; s++) {
        if (loader.left <= 0 && loader.live) loader.begin(p, shared);
#pragma unroll
        for (int q = 0; q < 4; q++) loader.template piece<false>(p, shared, q);
        cp_async_commit();
        loader.template advance<false>(p);
    }
    int steps = 0;
    for (int i = 0; i < p.parts; i++) steps += (p.part[i].k + MMA_BK - 1) / MMA_BK;
    MmaReader r = {0, 0, 0};
    mma_copied<false>(p, shared, r);
    while (!r.ready(shared)) {}
#pragma unroll 1
    for (int tile = 0;; tile++) {
        // Copies, tokens and other warps are at most four tiles away, as each has a step at least.
        if ((tile + MMA_AHEAD) % 8 == warp) mma_find<C>(p, shared, (tile + MMA_AHEAD) % MMA_TILES, warp, w.lane);
        const MmaTile &t = shared.tile[tile % MMA_TILES];
        if (!t.there) break;
        float acc[4][8][4];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int q = 0; q < 4; q++) acc[i][j][q] = 0;
        if (C::WGRAD) steps = max(1, (t.rows + MMA_BK - 1) / MMA_BK);
        const int units = C::WGRAD ? (t.rows + 15) / 16 : 0, m = t.m;
        const bool live = t.n0 + (C::GLU ? 32 : 64) * w.wn < p.N;
        mma_prepare<C>(p, t);
        MmaUnits u;
        f.load(r.offset, u); // the last step before loaded it too, but the epilogue needs the registers
        if (!live) mma_steps<C, 0>(p, shared, loader, f, r, steps, units, u, acc);
        else if (m > 96) mma_steps<C, 4>(p, shared, loader, f, r, steps, units, u, acc);
        else if (m > 64) mma_steps<C, 3>(p, shared, loader, f, r, steps, units, u, acc);
        else if (m > 32) mma_steps<C, 2>(p, shared, loader, f, r, steps, units, u, acc);
        else mma_steps<C, 1>(p, shared, loader, f, r, steps, units, u, acc);
        const MmaTile done = t; // in registers
        mma_epilogue<C>(p, done, w.wm, w.wn, w.lane, live, acc);
    }
    cp_async_wait<0>();
}
