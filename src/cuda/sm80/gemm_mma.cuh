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
};

// Where a warp reads.
struct MmaReader {
    uint32_t stage, offset, phase;
    DEV void advance(int stages)
    {
        offset += MMA_STAGE;
        if (++stage == (uint32_t)stages) stage = offset = 0, phase ^= 1;
    }
};

// A step: 4 units of 16 in k. The loads of the next unit and a piece of the copies are spread among the products of
// this one: in a burst the tensor cores would wait for them. TAIL: only the first `units` have anything.
template <class C, int MI, bool TAIL>
DEV void mma_step(const MmaArgs &p, const MmaShared &shared, MmaLoader<C> &loader, const MmaFragments<C> &f,
                  MmaReader &r, bool more, int units, uint32_t (&fa)[2][4][4], uint32_t (&fb)[2][4][4],
                  float (&acc)[4][8][4])
{
#pragma unroll
    for (int kk = 0; kk < 4; kk++) {
        const int now = kk & 1;
        uint32_t behind = 0;
#pragma unroll
        for (int x = 0; x < 2 * MI; x++) { // 4 products, and what follows them
            if (!TAIL || kk < units)
#pragma unroll
                for (int j = x % 2 * 4; j < x % 2 * 4 + 4; j++)
                    mma16816<typename C::T>(acc[x / 2][j], fa[now][x / 2], fb[now][j / 2][j % 2 * 2],
                                            fb[now][j / 2][j % 2 * 2 + 1]);
            if (x == 0 && kk == 3) {
                behind = r.stage;
                r.advance(p.stages);
                if (more) bar_wait(smem_u32(shared.full + r.stage), r.phase);
            }
#pragma unroll
            for (int i = 0; i < MI + 4; i++)
                if (i * 2 * MI / (MI + 4) == x && (kk < 3 || more))
                    f.load(r.offset, (kk + 1) % 4, i, fa[now ^ 1], fb[now ^ 1]);
            // In the first half of the step: with two stages they are waited for at its end.
            if (kk < 2 && x == 0) loader.piece(p, shared, 2 * kk);
            if (kk < 2 && x == MI) loader.piece(p, shared, 2 * kk + 1);
        }
        if (MI == 0) {
            if (kk == 3) behind = r.stage, r.advance(p.stages);
            loader.piece(p, shared, kk);
        }
        if (kk == 3) {
            __syncwarp();
            if (threadIdx.x % 32 == 0) bar_arrive(smem_u32(shared.empty + behind));
        }
    }
}

// The steps of a tile whose rows are at most 32 MI; 0: none of its columns are this warp's.
template <class C, int MI>
DEV void mma_steps(const MmaArgs &p, const MmaShared &shared, MmaLoader<C> &loader, const MmaFragments<C> &f,
                   MmaReader &r, int steps, int units, float (&acc)[4][8][4])
{
    uint32_t fa[2][4][4], fb[2][4][4];
    if (MI) {
        bar_wait(smem_u32(shared.full + r.stage), r.phase);
#pragma unroll
        for (int i = 0; i < MI + 4; i++) f.load(r.offset, 0, i, fa[0], fb[0]);
    }
    const bool tail = C::WGRAD && (units % 4 != 0 || units == 0);
    const int whole = steps - tail;
#pragma unroll 1
    for (int s = 0; s < whole; s++) mma_step<C, MI, false>(p, shared, loader, f, r, s + 1 < steps, 4, fa, fb, acc);
    if (C::WGRAD && tail) mma_step<C, MI, true>(p, shared, loader, f, r, false, units % 4, fa, fb, acc);
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
        bar_init(smem_u32(shared.full + threadIdx.x), MMA_THREADS);
        bar_init(smem_u32(shared.empty + threadIdx.x), MMA_THREADS / 32);
    }
    if (w.lane == 0) shared.u[warp] = blockIdx.x + warp * gridDim.x, shared.base[warp] = shared.e0[warp] = 0;
    __syncwarp();
    if (warp < MMA_AHEAD) mma_find<C>(p, shared, warp, warp, w.lane);
    __syncthreads();
    MmaLoader<C> loader(base);
    const MmaFragments<C> f(base, w);
    // A step's copies go where the step before last was, so that warps may be apart; with fewer stages, the last.
#pragma unroll 1
    for (int s = p.stages == 4 ? 2 : 1; s < p.stages; s++)
#pragma unroll
        for (int q = 0; q < 4; q++) loader.piece(p, shared, q);
    int steps = 0;
    for (int i = 0; i < p.parts; i++) steps += (p.part[i].k + MMA_BK - 1) / MMA_BK;
    MmaReader r = {0, 0, 0};
#pragma unroll 1
    for (int tile = 0;; tile++) {
        // Copies, and other warps, are at most three tiles away, as each has a step at least.
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
        if (!live) mma_steps<C, 0>(p, shared, loader, f, r, steps, units, acc);
        else if (m > 96) mma_steps<C, 4>(p, shared, loader, f, r, steps, units, acc);
        else if (m > 64) mma_steps<C, 3>(p, shared, loader, f, r, steps, units, acc);
        else if (m > 32) mma_steps<C, 2>(p, shared, loader, f, r, steps, units, acc);
        else mma_steps<C, 1>(p, shared, loader, f, r, steps, units, acc);
        const MmaTile done = t; // in registers
        mma_epilogue<C>(p, done, w.wm, w.wn, w.lane, live, acc, &shared.dp[0][0]);
    }
    cp_async_wait<0>();
}
