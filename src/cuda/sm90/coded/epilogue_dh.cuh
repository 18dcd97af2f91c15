// SPDX-License-Identifier: Apache-2.0
// epilogue_dh.cuh - the backward of the activation after a product of gemm_coded.cuh: features are on the M side, and
// da stays in f32 (gemm_rows.cuh's epilogue gets it rounded to f16, so that these results are a little more precise).
//
// h comes through the ring, 64 tokens a stage after the stages of the product, as gates and ups of both warpgroups'
// features; dh takes its place there, p a that of the codes, and TMA stores them from the stage.
#pragma once
#include "cuda/act.cuh"
#include "cuda/sm90/gemm_tokens.cuh"
#include "fragments.cuh"

static constexpr int DH_BOX = 8192;  // bytes of 64 tokens x 64 features
static constexpr int DH_SUMS = 4096; // bytes: [two stages in turn][8 warps][64 tokens] parts of dp

// Units first to first + 3 of h, and of the routing weights.
template <class C> DEV void dh_load(const Sm90Args &p, const TokenTile &t, int first, uint32_t stage, uint32_t bar)
{
    const int units = min(DH_UNITS, t.units - first), row = t.row0 + 16 * first;
    mbar_expect(bar, units * ((p.gated ? 4 : 2) * 2048 + 64));
    bulk_load(stage + C::SCALES, p.prob + row, units * 64, bar);
    for (int i = 0; i < (p.gated ? 4 : 2); i++) { // gates, then ups
        const uint32_t to = stage + C::TOKENS + i * DH_BOX;
        const int x = t.n0 + i % 2 * 64;
        if (units == DH_UNITS) tma_load(to, &p.h[1], bar, x, i / 2, row);
        else
            for (int u = 0; u < units; u++) tma_load(to + u * 2048, &p.h[0], bar, x, i / 2, row + 16 * u);
    }
}

// Of four sums over eight lanes each (l / 4) every lane gets one, that of token dh_token(lane).
DEV float dh_sum(const float (&v)[4], int lane)
{
    const bool upper = lane & 16, odd = lane & 8;
    const float a = (upper ? v[2] : v[0]) + __shfl_xor_sync(~0u, upper ? v[0] : v[2], 16),
                b = (upper ? v[3] : v[1]) + __shfl_xor_sync(~0u, upper ? v[1] : v[3], 16),
                c = (odd ? b : a) + __shfl_xor_sync(~0u, odd ? a : b, 8);
    return c + __shfl_xor_sync(~0u, c, 4);
}
DEV int dh_token(int lane) { return (lane >> 4) * 8 + lane % 4 * 2 + (lane >> 3 & 1); }

template <class C, int KIND>
DEV void dh_store(const Sm90Args &p, const TokenTile &t, TokenRing ring, float (&acc)[C::MAX_N / 2], int &s, int &phase,
                  uint32_t &turn)
{
    const int index = warp_index() - 4, wg = index / 4, warp = index % 4, lane = threadIdx.x % 32, q = lane % 4;
    const int n = t.n0 + 64 * wg;
    const bool gated = KIND == FAST_SWIGLU || p.gated, storing = warp == 0 && lane == 0, there = n < p.N;
    // This lane's two features of tokens 2 q and 2 q + 1 of each eight.
    const int feature = coded_feature<C>(warp, lane / 4), even = coded_word(2 * q, feature),
              odd = coded_word(2 * q + 1, feature);
    const uint32_t ones = pack2<bf16>(1.f, 1.f);
    int before = -1;
    auto release = [&](int slot) { // by the storing thread, for its four warps
        for (int i = 0; i < 4; i++) mbar_arrive(ring.empty + 8 * slot);
    };
#pragma unroll
    for (int first = 0; first < C::MAX_UNITS; first += DH_UNITS) {
        if (first >= t.units) break;
        const uint32_t stage = ring.base + s * C::STAGE, gates = stage + C::TOKENS + wg * DH_BOX,
                       ups = gates + 2 * DH_BOX, pa = stage + wg * DH_BOX;
        const uint32_t sums = ring.base + C::STAGING + (turn++ & 1) * (DH_SUMS / 2) + wg * 1024;
        mbar_wait(ring.full + 8 * s, phase);
#pragma unroll
        for (int u = 0; u < DH_UNITS; u++) {
            if (first + u >= t.units) break;
            float prob[4], dp[4] = {}; // tokens 2 q, 2 q + 1, 2 q + 8, 2 q + 9
#pragma unroll
            for (int i = 0; i < 2; i++)
                asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                             : "=f"(prob[2 * i]), "=f"(prob[2 * i + 1])
                             : "r"(stage + C::SCALES + u * 64 + q * 8 + i * 32));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = u * 2048 + i / 2 * 1024 + (i % 2 ? odd : even), j = 8 * (first + u) + i / 2 * 4 + i % 2;
                const float2 g = unpack2<bf16>(shared_word(gates + at)),
                             h = unpack2<bf16>(gated ? shared_word(ups + at) : ones);
                const Slopes v = slopes<KIND>(p.act, acc[j], prob[i], g.x, h.x),
                             w = slopes<KIND>(p.act, acc[j + 2], prob[i], g.y, h.y);
                put_word(gates + at, pack2<bf16>(v.gate, w.gate));
                if (gated) put_word(ups + at, pack2<bf16>(v.up, w.up));
                put_word(pa + at, pack2<bf16>(v.pa, w.pa));
                dp[i] = v.dp + w.dp;
            }
            const float sum = dh_sum(dp, lane);
            if (!(lane & 4))
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(sums + warp * 256 + (16 * u + dh_token(lane)) * 4),
                             "f"(sum)
                             : "memory");
        }
        fence_async();
        bar_sync(1 + wg, 128);
        const int units = min(DH_UNITS, t.units - first), row = t.row0 + 16 * first, i = warp * 32 + lane;
        if (there && i < 16 * units) {
            float v[4];
#pragma unroll
            for (int w = 0; w < 4; w++)
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v[w]) : "r"(sums + w * 256 + i * 4) : "memory");
            p.dp[(size_t)(n / 64) * p.dp_pitch + row + i] = v[0] + v[1] + v[2] + v[3];
        }
        if (storing) {
            if (there && units == DH_UNITS) {
                tma_store(&p.d[1], gates, n, 0, row);
                if (gated) tma_store(&p.d[1], ups, n, 1, row);
                tma_store(&p.a, pa, n, 0, row);
            }
            for (int u = 0; there && units < DH_UNITS && u < units; u++) {
                tma_store(&p.d[0], gates + u * 2048, n, 0, row + 16 * u);
                if (gated) tma_store(&p.d[0], ups + u * 2048, n, 1, row + 16 * u);
                tma_store(&p.a16, pa + u * 2048, n, 0, row + 16 * u);
            }
            tma_commit();
            tma_wait_read<1>();
            if (before >= 0) release(before);
            before = s;
        }
        if (++s == C::STAGES) s = 0, phase ^= 1;
    }
    if (storing) {
        tma_wait_read<0>();
        if (before >= 0) release(before);
    }
    __syncwarp();
}
