// SPDX-License-Identifier: Apache-2.0
// gemm_rows.cuh - one persistent, warp-specialised kernel for all grouped products of the layer on Hopper.
//
// Warpgroup 0 loads (TMA, or a gather of token rows by cp.async), warpgroups 1 and 2 multiply, each 64 or 128 rows of
// the tile on its own; a ring of shared-memory stages lies between them. In the fused backward a fourth warpgroup does
// the epilogue. Two CTAs form a cluster and share the operand they have in common by multicast.
//
// Rows are grouped by expert in segments that begin at multiples of 16. A warp's results are blocks of 16 rows, and a
// contraction over rows advances by 16, so no tile edge needs a mask: what lies past a segment is computed and not
// stored, or not multiplied at all. Columns past the end are zero-filled and clipped by TMA. (Groups that begin
// anywhere, those of a grouped matmul: gemm_tokens.cuh, and for the weight gradient a producer that clears the rows
// past the end.)
#pragma once
#include "epilogue_dglu.cuh"
#include "wgmma.cuh"

// The part of a stage that comes by TMA, issued by one thread. k: step inside the part; krow: first row of the
// contraction; z: where the expert's weights are. lora: a step of the adapter, whose rows are never gathered.
template <class C>
DEV void load_stage(const Sm90Args &p, const Tile &t, int part, int k, int krow, uint32_t a, uint32_t bar, int rank,
                    const int (&z)[2], bool lora = false)
{
    const uint32_t b = a + C::A_BYTES;
    mbar_expect(bar, lora ? C::STAGE : C::TX_BYTES);
    if (!C::GATHER_A || lora) {
        const CUtensorMap *const map = lora ? &p.lora : &p.a;
#pragma unroll
        for (int i = 0; i < C::BM / 64; i++) {
            const int x = C::WGRAD ? t.part * p.M + t.m0 + 64 * i : ((lora ? 0 : part * p.k_steps) + k) * 64,
                      y = C::WGRAD ? krow : t.m0 + 64 * i;
            if (!t.share_a) tma_load2(a + i * 8192, map, bar, x, y);
            else if (i % 2 == rank) tma_load2_multicast(a + i * 8192, map, bar, x, y, 3);
        }
    }
    if constexpr (!C::GATHER_B) {
        constexpr int BOXES = C::BOXES, BYTES = C::B_BYTES / BOXES;
#pragma unroll
        for (int i = 0; i < BOXES; i++) {
            if (t.share_b && i % 2 != rank) continue;
            int x = 0, y = 0, which = lora ? 0 : part;
            if (C::B == B_KMAJOR) x = k * 64, y = t.n0 + i * (C::BN / BOXES);
            if (C::B == B_GLU) x = k * 64, y = t.n0, which = i;
            if (C::B == B_NMAJOR) x = t.n0 + 64 * i, y = k * 64;
            if (C::B == B_GLU_N) x = t.n0 + i % (BOXES / 2) * 64, y = k * 64, which = i / (BOXES / 2);
            if (C::B == B_PAIRS_N) x = 2 * t.n0 + 64 * i, y = k * 64;
            if (C::B == B_T) {
                x = t.n0 + 64 * i;
                if (t.share_b) tma_load2_multicast(b + i * BYTES, &p.b[0], bar, x, krow, 3);
                else tma_load2(b + i * BYTES, &p.b[0], bar, x, krow);
                continue;
            }
            const CUtensorMap *const map = lora ? &p.lora_b[which] : &p.b[which];
            const int e = lora ? t.e : z[which];
            if (t.share_b) tma_load_multicast(b + i * BYTES, map, bar, x, y, e, 3);
            else tma_load(b + i * BYTES, map, bar, x, y, e);
        }
    }
}

template <class C> DEV void producer_tma(const Sm90Args &p, Ring ring, uint32_t cut)
{
    if (threadIdx.x >= (C::RAGGED ? 32 : 1)) return;
    const int rank = cluster_rank(), lane = threadIdx.x;
    Scheduler<C> sched(p);
    Tile t;
    int s = 0, phase = 1, before = -1;
    uint32_t cut_phase = 0;
    while (sched.next(t)) {
        wait_at_half(p, before, t.e);
        before = t.e;
        const int steps = t.steps + (t.tail != 0), krow = C::WGRAD ? offset_of<C>(p, t.e) : 0;
        const int z[2] = {C::WGRAD ? 0 : place_of(p.place_b[0], t.e), C::WGRAD ? 0 : place_of(p.place_b[1], t.e)};
        int part = 0, k = 0;
        for (int i = 0; i < steps; i++) {
            const bool past = C::RAGGED && t.past && i + 1 == steps;
            const uint32_t full = ring.full + 8 * s, bar = past ? cut + 8 * s : full, stage = ring.base + s * C::STAGE;
            mbar_wait(ring.empty + 8 * s, phase);
            const bool lora = !C::WGRAD && part == p.parts;
            if (lane == 0) load_stage<C>(p, t, part, k, krow + 64 * i, stage, bar, rank, z, lora);
            if (past) { // the rows of the next group become zeros before anybody sees the stage
                mbar_wait(bar, cut_phase >> s & 1);
                cut_phase ^= 1u << s;
                const int rows = -t.past & 15;
                for (int r = lane / 8; r < rows * (C::STAGE / 8192); r += 4)
                    asm volatile("st.shared.v4.b32 [%0], {%1,%1,%1,%1};" ::"r"(
                                     stage + r / rows * 8192 + (t.past + r % rows) * 128 + lane % 8 * 16),
                                 "r"(0)
                                 : "memory");
                fence_async();
                __syncwarp();
                if (lane == 0) mbar_arrive(full);
            }
            if (++k == p.k_steps && !C::WGRAD && !lora) k = 0, part++;
            if (++s == C::STAGES) s = 0, phase ^= 1;
        }
    }
    wait_at_half(p, before, p.E);
}

// Gather: 8 lanes copy 128 contiguous bytes of a row; a thread has the rows t/8 + 16 i, so its swizzle term is constant
// and every shared address is one register plus an immediate. Addresses are ready before the slot is waited for; token
// ids come one tile (or, in weight gradients, one step) ahead.
template <class C> DEV void producer_gather(const Sm90Args &p, Ring ring)
{
    typedef typename C::T T;
    const int thread = threadIdx.x, rank = cluster_rank(), row = thread / 8, c = thread & 7;
    const uint32_t dst = ring.base + (C::GATHER_B ? C::A_BYTES : 0) + row * 128 + ((c ^ (row & 7)) << 4);
    const T *x = (const T *)p.x + c * 8;
    Scheduler<C> sched(p);
    Tile t, ahead;
    int s = 0, phase = 1, z[2] = {0, 0};
    auto begin = [&](int k, int krow, bool lora = false) {
        mbar_wait(ring.empty + 8 * s, phase);
        if (thread == 0) load_stage<C>(p, t, 0, k, krow, ring.base + s * C::STAGE, ring.full + 8 * s, rank, z, lora);
    };
    auto end = [&] {
        cp_async_arrive(ring.full + 8 * s);
        if (++s == C::STAGES) s = 0, phase ^= 1;
    };
    bool more = sched.next(ahead);
    if constexpr (!C::WGRAD) {
        int tok[8];
        auto load_tokens = [&] {
#pragma unroll
            for (int i = 0; i < 8; i++) tok[i] = p.tok[ahead.m0 + row + 16 * i];
        };
        if (more) load_tokens();
        while (more) {
            t = ahead;
            const T *src[8];
#pragma unroll
            for (int i = 0; i < 8; i++) src[i] = x + (size_t)tok[i] * p.ldx;
            z[0] = place_of(p.place_b[0], t.e), z[1] = place_of(p.place_b[1], t.e);
            more = sched.next(ahead);
            if (more) load_tokens();
            for (int k0 = 0; k0 < p.k_steps; k0 += 2) {
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    if (k0 + k >= p.k_steps) break;
                    begin(k0 + k, 0);
#pragma unroll
                    for (int i = 0; i < 8; i++) cp_async16(dst + s * C::STAGE + i * 2048, src[i] + k * 64);
                    end();
                }
#pragma unroll
                for (int i = 0; i < 8; i++) src[i] += 128;
            }
            const int rest = t.steps + (t.tail != 0) - p.k_steps;
            for (int k = 0; k < rest; k++) {
                begin(k, 0, true);
                end();
            }
        }
    } else {
        constexpr int BOXES = C::GATHER_B ? C::BN / 64 : C::BM / 64;
        int tok[4], next[4];
        t.e = -1;
        auto load_tokens = [&](int(&q)[4], const Tile &u, int k) {
#pragma unroll
            for (int i = 0; i < 4; i++) q[i] = p.tok[offset_of<C>(p, u.e) + 64 * k + row + 16 * i];
        };
        if (more) load_tokens(next, ahead, 0);
        while (more) {
            wait_at_half(p, t.e, ahead.e);
            t = ahead;
#pragma unroll
            for (int i = 0; i < 4; i++) tok[i] = next[i];
            more = sched.next(ahead);
            if (more) load_tokens(next, ahead, 0);
            const int steps = t.steps + (t.tail != 0), limit = C::GATHER_A ? p.M : p.N, c0 = C::GATHER_A ? t.m0 : t.n0;
            // The last tile may reach past the row: what is there is not stored, but must not be read.
            int boxes = BOXES;
            if (c0 + BOXES * 64 > limit) boxes = (limit - c0) / 64;
            const int krow = offset_of<C>(p, t.e);
            for (int k = 0; k < steps; k++) {
                const T *src[4];
#pragma unroll
                for (int i = 0; i < 4; i++) src[i] = x + c0 + (size_t)tok[i] * p.ldx;
                if (k + 1 < steps) load_tokens(tok, t, k + 1);
                begin(k, krow + 64 * k);
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int b = 0; b < BOXES; b++)
                        if (b < boxes) cp_async16(dst + s * C::STAGE + i * 2048 + b * 8192, src[i] + b * 64);
                end();
            }
        }
        wait_at_half(p, t.e, p.E);
    }
}

// A consumer warp's results: staged in two 2 KB buffers in turn, stored by TMA, no barrier wider than the warp.
template <class C> struct Stores {
    uint32_t staging;
    int lane;
    uint32_t turn = 0;
    // Rows: (x, y); a weight gradient: (x, y) of expert z, or the same place of one tall matrix.
    template <class F> DEV void put(F write, const CUtensorMap *m, int x, int y, int z, bool add, bool flat)
    {
        const uint32_t buffer = staging + (turn++ & 1) * 2048;
        if (lane == 0) tma_wait_read<1>();
        __syncwarp();
        write(buffer);
        fence_async();
        __syncwarp();
        if (lane == 0) {
            if (C::WGRAD && add) tma_add(m, buffer, x, y, z);
            else if (C::WGRAD && !flat) tma_store(m, buffer, x, y, z);
            else tma_store2(m, buffer, x, y);
            tma_commit();
        }
    }
};

template <class C>
DEV void store_tile(const Sm90Args &p, const Tile &t, float (&acc)[C::SUB][C::BN / 2], int row_wg, int warp, int lane,
                    Stores<C> &out)
{
    typedef typename C::T T;
    const int shift = C::WGRAD && p.flat ? t.e * p.M : 0, z = C::WGRAD ? place_of(p.place_d[t.part], t.e) : 0;
#pragma unroll
    for (int sub = 0; sub < C::SUB; sub++) {
        const int row = t.row0 + row_wg + sub * 64 + warp * 16;
        if (row >= t.end) break;
        float *v = acc[sub];
        if constexpr (C::B == B_PAIRS_N) {
#pragma unroll
            for (int c = 0; c < C::BN / 128; c++) {
                const int n = t.n0 + 64 * c;
                if (n >= p.N) break;
                float *q = v + 64 * c;
                if (p.bias) {
                    const uint32_t *b =
                        (const uint32_t *)((const T *)p.bias + (size_t)t.e * p.bias_g + 2 * n) + lane % 4;
#pragma unroll
                    for (int j = 0; j < 16; j++) {
                        const float2 two = unpack2<T>(b[4 * j]);
                        q[4 * j] += two.x, q[4 * j + 1] += two.y, q[4 * j + 2] += two.x, q[4 * j + 3] += two.y;
                    }
                }
                if (p.keep_h) {
                    out.put([&](uint32_t b) { store_fragment<T>(b, q, lane); }, &p.h[0], 2 * n, row, 0, false, true);
                    out.put([&](uint32_t b) { store_fragment<T>(b, q + 32, lane); }, &p.h[0], 2 * n + 64, row, 0, false,
                            true);
                }
                uint32_t w[16]; // a feature of rows r and r + 8
#pragma unroll
                for (int j = 0; j < 16; j++)
                    w[j] = pack2<T>(fast_value<FAST_CLAMP, true>(p.act, q[4 * j], q[4 * j + 1]),
                                    fast_value<FAST_CLAMP, true>(p.act, q[4 * j + 2], q[4 * j + 3]));
                out.put([&](uint32_t b) { store_features(b, w, lane); }, &p.d[0], n, row, 0, false, true);
            }
        } else if constexpr (C::EPI == EPI_GLU) {
#pragma unroll
            for (int c = 0; c < C::BN / 128; c++) {
                if (t.n0 + 64 * c >= p.N) break; // N is a multiple of 64 here
                float *g = v + 32 * c, *u = v + C::BN / 4 + 32 * c;
                if (p.keep_h) {
                    out.put([&](uint32_t b) { store_fragment<T>(b, g, lane); }, &p.h[0], t.n0 + 64 * c, row, 0, false,
                            true);
                    out.put([&](uint32_t b) { store_fragment<T>(b, u, lane); }, &p.h[0], p.N + t.n0 + 64 * c, row, 0,
                            false, true);
                }
                with_smooth(p.act, [&](auto kind) {
#pragma unroll
                    for (int i = 0; i < 32; i++) g[i] = fast_value<kind.value, true>(p.act, g[i], u[i]);
                });
                out.put([&](uint32_t b) { store_fragment<T>(b, g, lane); }, &p.d[0], t.n0 + 64 * c, row, 0, false,
                        true);
            }
        } else if constexpr (C::EPI == EPI_STORE_F32) {
#pragma unroll
            for (int c = 0; c < C::BN / 32; c++)
                out.put([&](uint32_t b) { store_fragment_f32(b, v + 16 * c, lane); }, &p.d[t.part], t.n0 + 32 * c,
                        row + shift, z, p.add, p.flat);
        } else {
#pragma unroll
            for (int c = 0; c < C::BN / 64; c++)
                out.put([&](uint32_t b) { store_fragment<T>(b, v + 32 * c, lane); }, &p.d[C::WGRAD ? t.part : 0],
                        t.n0 + 64 * c, row + shift, z, C::WGRAD && p.add, C::WGRAD ? p.flat : true);
        }
    }
}

template <class C> DEV void consumer(const Sm90Args &p, Ring ring, uint32_t tile_full, uint32_t tile_empty)
{
    typedef typename C::T T;
    const int index = warp_index(), wg = index / 4 - 1, warp = index % 4, lane = threadIdx.x % 32,
              row_wg = wg * C::WG_M;
    const uint32_t staging = ring.base + C::STAGING_AT + (wg * 4 + warp) * C::STAGING;
    Scheduler<C> sched(p);
    Stores<C> out{staging, lane};
    float acc[C::SUB][C::BN / 2] = {}; // once: ptxas before 12.9 serialises every wgmma where a path has them undefined
    int s = 0, phase = 0;
    uint32_t handed = 0;
    bool published = false;
    auto publish = [&](int e) { // before the results of a tile of expert e
        if (!p.lets_in_early || published || e < p.E / 2) return;
        published = true;
        if (lane == 0) publish_half(p, ring.full + RING_COUNT, 8);
    };
    auto release = [&](int slot) {
        if (lane < 2) mbar_arrive_cluster(ring.empty + 8 * slot, lane);
    };
    auto advance = [&] {
        if (++s == C::STAGES) s = 0, phase ^= 1;
    };
    Tile t, ahead;
    bool more = sched.next(ahead), known = true;
    for (;;) {
        if (!known) more = sched.next(ahead);
        if (!more) break;
        t = ahead;
        known = false;
        if (!t.live || t.row0 + row_wg >= t.end) { // nothing of this tile is ours
            __syncwarp(); // lane 0 may still be at the tile before; no wgmma keeps it with the others here
            for (int k = t.steps + (t.tail != 0); k > 0; k--) {
                mbar_wait(ring.full + 8 * s, phase);
                release(s);
                advance();
            }
            continue;
        }
        const int steps = t.steps + (t.tail != 0);
        if (C::WGRAD && steps == 0)
#pragma unroll
            for (int m = 0; m < C::SUB; m++)
#pragma unroll
                for (int i = 0; i < C::BN / 2; i++) acc[m][i] = 0;
        int last = 0;
        auto step = [&](int k, auto depth) { // depth: of 16
            mbar_wait(ring.full + 8 * s, phase);
            if (C::GATHER) fence_async(); // cp.async wrote through the generic proxy
            const uint32_t a = ring.base + s * C::STAGE, b = a + C::A_BYTES;
            const uint64_t da = C::TA ? descriptor_mn(a + row_wg / 64 * 8192) : descriptor_k(a + row_wg * 128),
                           db = C::TB ? descriptor_mn(b) : descriptor_k(b);
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < depth.value; kk++)
#pragma unroll
                for (int m = 0; m < C::SUB; m++)
                    wgmma<T, C::BN, C::TA, C::TB>(acc[m], da + m * 512 + kk * (C::TA ? 128 : 2),
                                                  db + kk * (C::TB ? 128 : 2), (k | kk) != 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (k) release(last);
            last = s;
            advance();
        };
        for (int k = 0; k < t.steps; k++) step(k, std::integral_constant<int, 4>());
        // Of the last rows of an expert only whole 16s are its own; of a rank the rest would be zeros.
        if (t.tail == 1) step(t.steps, std::integral_constant<int, 1>());
        if (t.tail == 2) step(t.steps, std::integral_constant<int, 2>());
        if (t.tail == 3) step(t.steps, std::integral_constant<int, 3>());
        more = sched.next(ahead); // while the last products run
        known = true;
        wgmma_wait<0>();
        if (steps) release(last);
#pragma unroll
        for (int m = 0; m < C::SUB; m++) wgmma_pin<C::BN / 2>(acc[m]);

        if constexpr (C::EPI_WG) {
            if (t.row0 + row_wg + warp * 16 < t.end) {
                const uint32_t i = wg * 4 + warp;
                mbar_wait(tile_empty + 8 * i, (handed++ & 1) ^ 1); // the tile before is stored
                publish(t.e);
                hand_over<C>(acc[0], staging, ring.base + C::FACTORS + i * 64, lane);
                __syncwarp();
                if (lane == 0) mbar_arrive(tile_full + 8 * i);
            }
        } else {
            publish(t.e);
            store_tile<C>(p, t, acc, row_wg, warp, lane, out);
        }
    }
    if (C::EPI_WG && handed) mbar_wait(tile_empty + 8 * (wg * 4 + warp), (handed & 1) ^ 1);
    publish(p.E);
    if (!C::EPI_WG && lane == 0) tma_wait<0>();
}

// arrivals: at a stage's barrier, when it is full. load(ring, a barrier for each stage more): the producers.
template <class C, class F> DEV void gemm_sm90_body(const Sm90Args &p, int arrivals, F load)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    const uint32_t base = smem_u32(smem), control = base + C::CONTROL;
    const Ring ring = {base, control, control + 64};
    const uint32_t tile_full = control + 128, tile_empty = control + 192;
    if (threadIdx.x == 0) {
        for (int s = 0; s < C::STAGES; s++) {
            mbar_init(ring.full + 8 * s, arrivals);
            mbar_init(ring.empty + 8 * s, 16); // 8 consumer warps of both CTAs
        }
        for (int i = 0; i < 8; i++) mbar_init(tile_full + 8 * i, 1), mbar_init(tile_empty + 8 * i, 1);
        *(int *)(smem + C::CONTROL + RING_COUNT) = 0;
        fence_barrier_init();
        if (!C::GATHER_A) tma_prefetch(&p.a);
        if (!C::GATHER_B) tma_prefetch(&p.b[0]);
        if (!C::EPI_WG) tma_prefetch(&p.d[0]);
    }
    begin_product(p);
    if (p.off_shared)
        for (int i = threadIdx.x; i <= p.E; i += C::THREADS) ((int *)(smem + C::OFFSETS))[i] = p.off[i];
    __syncthreads();
    cluster_sync();
    if (threadIdx.x < 128) {
        registers_down<C::REG_PRODUCER>();
        load(ring, tile_full);
    } else if (!C::EPI_WG || threadIdx.x < 384) {
        registers_up<C::REG_CONSUMER>();
        consumer<C>(p, ring, tile_full, tile_empty);
    } else if constexpr (C::EPI_WG) {
        registers_up<C::REG_EPILOGUE>();
        if (p.pairs) epilogue_dglu<C, FAST_CLAMP, true>(p, ring, tile_full, tile_empty);
        else with_kind(p.act, [&](auto kind) { epilogue_dglu<C, kind.value, false>(p, ring, tile_full, tile_empty); });
    }
    __syncthreads();
    cluster_sync();
}

template <class C> __global__ void __launch_bounds__(C::THREADS, 1) gemm_sm90_kernel(const __grid_constant__ Sm90Args p)
{
    gemm_sm90_body<C>(p, C::GATHER ? 129 : 1, [&](Ring ring, uint32_t more) {
        if constexpr (C::GATHER) producer_gather<C>(p, ring);
        else producer_tma<C>(p, ring, more);
    });
}
