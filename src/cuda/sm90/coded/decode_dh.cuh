// SPDX-License-Identifier: Apache-2.0
// decode_dh.cuh - the fused backward by quantised W2: gemm_rows.cuh's kernel, whose producer decodes the weights into
// the stages, as TMA would have brought them. (Its epilogue needs rows on the M side, so weights cannot go through
// registers as in gemm_coded.cuh.)
#pragma once
#include "cuda/quant/values.cuh"
#include "cuda/sm90/gemm_rows.cuh"
#include "inside.cuh"

template <int BN_, CodeKind CODE_>
struct CodedDhConfig : Config<bf16, 128, BN_, BN_ == 192 ? 4 : 6, A_GATHER, B_NMAJOR, EPI_DGLU> {
    static constexpr CodeKind CODE = CODE_;
    static constexpr int REG_PRODUCER = 96, REG_CONSUMER = 136;
};

// What a thread has of one step: row thread % 64 of k, and of it runs of 32 codes, every other one of the tile.
template <class C> struct CodedRuns {
    static constexpr int RUNS = C::BN / 64, WORDS = C::CODE == CODE_NIBBLES ? 1 : 2;
    uint4 codes[RUNS][WORDS];
    float scale[RUNS];
};

template <class C> struct RunDecoder {
    const Sm90CodedArgs &a;
    const int row, first;
    const float entry; // CODE_NIBBLES: the table's value that this lane keeps for the others
    float scale2 = 1;
    DEV RunDecoder(const Sm90CodedArgs &args)
        : a(args), row(threadIdx.x % 64), first(threadIdx.x / 64), entry(args.table[threadIdx.x % 16])
    {
    }
    DEV void fetch(CodedRuns<C> &r, int i, int e, int n0, int k) const
    {
        const int col = n0 + 32 * (first + 2 * i);
        if (col >= a.p.N) return;
        const float *const scales = a.scales + e * a.scales_each + k * a.scales_step + row;
        r.scale[i] = __ldg(scales + (int64_t)(col * a.subs / 64) * 64);
        const uint8_t *const codes = a.codes + e * a.codes_g + (k * 64 + row) * a.codes_r;
        const uint4 *const from = (const uint4 *)(codes + (r.WORDS == 1 ? col / 2 : col));
#pragma unroll
        for (int j = 0; j < r.WORDS; j++) r.codes[i][j] = __ldg(from + j);
    }
    DEV float value(uint32_t nibble) const { return __shfl_sync(~0u, entry, (int)nibble, 16); }
    // Of codes 2 i and 2 i + 1 of eight.
    DEV uint32_t pair(const uint32_t (&w)[2], int i, float s) const
    {
        float2 v;
        if constexpr (C::CODE == CODE_NIBBLES) {
            const int low = 8 * i + 4 * a.high_first;
            v = make_float2(value(w[0] >> low), value(w[0] >> (low ^ 4)));
        } else {
            v = coded_pair<C::CODE>(w[i / 2] >> 16 * (i % 2), a.zero);
        }
        v = make_float2(__fmul_rn(v.x, s), __fmul_rn(v.y, s));
        if (C::CODE == CODE_S8) v = make_float2(__fmul_rn(v.x, scale2), __fmul_rn(v.y, scale2));
        return pack2<bf16>(v.x, v.y);
    }
    // Into 64 columns x 64 of k a box, rows of 128 bytes, swizzled.
    DEV void write(const CodedRuns<C> &r, int i, int n0, uint32_t b) const
    {
        const int run = first + 2 * i;
        const bool there = n0 + 32 * run < a.p.N; // the same for a whole warp
        const uint32_t at = b + run / 2 * 8192 + row * 128;
        const uint32_t *const w = (const uint32_t *)r.codes[i];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t two[2] = {w[j * r.WORDS], w[(j + 1) * r.WORDS - 1]};
            uint32_t v[4];
#pragma unroll
            for (int q = 0; q < 4; q++) v[q] = there ? pair(two, q, r.scale[i]) : 0;
            asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at + (((run % 2 * 4 + j) ^ (row & 7)) << 4)),
                         "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
                         : "memory");
        }
    }
};

// As producer_gather, for rows that are gathered, with the weights decoded instead of loaded.
template <class C> DEV void producer_decode(const Sm90CodedArgs &a, Ring ring)
{
    const Sm90Args &p = a.p;
    const int thread = threadIdx.x, rank = cluster_rank(), row = thread / 8, c = thread & 7;
    const uint32_t dst = ring.base + row * 128 + ((c ^ (row & 7)) << 4);
    const bf16 *const x = (const bf16 *)p.x + c * 8;
    const int z[2] = {0, 0};
    RunDecoder<C> decoder(a);
    CodedRuns<C> runs; // of the next step as soon as one is written
    Scheduler<C> sched(p);
    Tile t, ahead;
    int s = 0, phase = 1;
    auto end = [&] {
        cp_async_arrive(ring.full + 8 * s);
        if (++s == C::STAGES) s = 0, phase ^= 1;
    };
    bool more = sched.next(ahead);
#pragma unroll
    for (int i = 0; i < runs.RUNS; i++)
        if (more) decoder.fetch(runs, i, ahead.e, ahead.n0, 0);
    while (more) {
        t = ahead;
        int tok[8];
#pragma unroll
        for (int i = 0; i < 8; i++) tok[i] = p.tok[t.m0 + row + 16 * i];
        more = sched.next(ahead);
        if (C::CODE == CODE_S8 && a.scale2) decoder.scale2 = a.scale2[t.e * a.scale2_g];
        for (int k = 0; k < p.k_steps; k++) {
            mbar_wait(ring.empty + 8 * s, phase);
#pragma unroll
            for (int i = 0; i < 8; i++) cp_async16(dst + s * C::STAGE + i * 2048, x + (size_t)tok[i] * p.ldx + k * 64);
            const bool same = k + 1 < p.k_steps;
#pragma unroll
            for (int i = 0; i < runs.RUNS; i++) {
                decoder.write(runs, i, t.n0, ring.base + s * C::STAGE + C::A_BYTES);
                if (same || more)
                    decoder.fetch(runs, i, same ? t.e : ahead.e, same ? t.n0 : ahead.n0, same ? k + 1 : 0);
            }
            fence_async();
            mbar_arrive(ring.full + 8 * s);
            end();
        }
        for (int k = p.k_steps; k < t.steps + (t.tail != 0); k++) {
            mbar_wait(ring.empty + 8 * s, phase);
            if (thread == 0)
                load_stage<C>(p, t, 0, k - p.k_steps, 0, ring.base + s * C::STAGE, ring.full + 8 * s, rank, z, true);
            else mbar_arrive(ring.full + 8 * s);
            end();
        }
    }
}

template <class C>
__global__ void __launch_bounds__(C::THREADS, 1) coded_dh_kernel(const __grid_constant__ Sm90CodedArgs a)
{
    gemm_sm90_body<C>(a.p, 256, [&](Ring ring, uint32_t) { producer_decode<C>(a, ring); });
}
