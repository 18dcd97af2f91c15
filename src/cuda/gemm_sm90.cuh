// SPDX-License-Identifier: Apache-2.0
// gemm_sm90.cuh - one persistent, warp-specialised kernel for all grouped products of the layer on Hopper.
//
// Warpgroup 0 loads (TMA, or a gather of token rows by cp.async), warpgroups 1 and 2 multiply, each 64 or 128 rows of the tile on its
// own; a ring of shared-memory stages lies between them. In the fused backward a fourth warpgroup does the epilogue. Two CTAs form a
// cluster and share the operand they have in common by multicast.
//
// Rows are grouped by expert in segments that begin at multiples of 16. A warp's results are blocks of 16 rows, and a contraction over
// rows advances by 16, so no tile edge needs a mask: what lies past a segment is computed and not stored, or not multiplied at all.
// Columns past the end are zero-filled and clipped by TMA. (Groups that begin anywhere, those of a grouped matmul: tokens_sm90.cuh, and
// for the weight gradient a producer that clears the rows past the end.)
#pragma once
#include "act.cuh"
#include "sched_sm90.cuh"
#include "wgmma.cuh"

enum ASource { A_ROWS, A_GATHER, A_T, A_T_GATHER };              // A_T*: the contraction runs over rows (weight gradients)
// Weights stored [n,k], or gates and ups of two such; [k,n], or gates and ups of two such, or gate and up of a feature as neighbours; rows.
enum BSource { B_KMAJOR, B_GLU, B_NMAJOR, B_GLU_N, B_PAIRS_N, B_T, B_T_GATHER };
enum Epilogue { EPI_STORE, EPI_GLU, EPI_DGLU, EPI_STORE_F32 };

template <class T_, int BM_, int BN_, int STAGES_, ASource A_, BSource B_, Epilogue EPI_> struct Config {
    typedef T_ T;
    static constexpr int BM = BM_, BN = BN_, STAGES = STAGES_;
    static constexpr ASource A = A_;
    static constexpr BSource B = B_;
    static constexpr Epilogue EPI = EPI_;
    static constexpr bool WGRAD = A >= A_T, GATHER_A = A == A_GATHER || A == A_T_GATHER, GATHER_B = B == B_T_GATHER, GATHER = GATHER_A || GATHER_B;
    static constexpr bool EPI_WG = EPI == EPI_DGLU; // a warpgroup of its own does the epilogue
    static constexpr bool RAGGED = WGRAD && !GATHER; // an expert's rows begin and end anywhere
    static constexpr int TA = WGRAD, TB = B >= B_NMAJOR;
    static constexpr int WG_M = BM / 2, SUB = WG_M / 64; // rows of a consumer warpgroup
    static constexpr int A_BYTES = BM * 128, B_BYTES = BN * 128, STAGE = A_BYTES + B_BYTES;
    static constexpr int STAGING = EPI_WG ? BN * 32 : 4096; // bytes of a consumer warp
    static constexpr int THREADS = EPI_WG ? 512 : 384;
    static constexpr int STAGING_AT = STAGES * STAGE;
    static constexpr int CONTROL = STAGING_AT + 8 * STAGING, OFFSETS = CONTROL + 256, SMEM = OFFSETS; // barriers, then offsets
    static constexpr int COLS = EPI == EPI_GLU ? BN / 2 : BN; // columns of the result in a tile
    static constexpr int BOXES = B <= B_GLU && !EPI_WG ? 2 : BN / 64; // of weights
    static constexpr int TX_BYTES = STAGE - (GATHER_A ? A_BYTES : 0) - (GATHER_B ? B_BYTES : 0);
    static constexpr int REG_PRODUCER = EPI_WG ? 56 : GATHER ? 72 : RAGGED ? 56 : 40, REG_CONSUMER = EPI_WG ? 144 : GATHER ? 216 : RAGGED ? 224 : 232, REG_EPILOGUE = 168;
    static constexpr int GROUP = 8; // row tiles (or pairs) walked before the next column tile
};

struct Tile {
    int e, part, m0, n0, steps, tail, row0, end; // steps of 64 in k and `tail` more of 16: the last rows of an expert, or of an adapter's rank
    int past;                                    // ragged: of the last step, the first row that is not the expert's; 0: none
    int share_a, share_b, live;
};

// Walks the tiles of this cluster: a fixed order, the same for every role, from the offsets alone.
template <class C> struct Scheduler {
    const Sm90Args &p;
    int u, e = 0, base = 0;
    const int rank, cols;
    DEV Scheduler(const Sm90Args &args) : p(args), u(blockIdx.x / 2), rank(cluster_rank()), cols((p.N + C::COLS - 1) / C::COLS) {}
    static DEV void order(int r, int rows, int cols, int &m, int &n) // groups of rows; in a group columns outside, rows inside
    {
        const int g = quotient(r, C::GROUP * cols), size = min(C::GROUP, rows - g * C::GROUP);
        r -= g * C::GROUP * cols;
        n = quotient(r, size);
        m = g * C::GROUP + r - n * size;
    }
    DEV bool next(Tile &t)
    {
        int m, n;
        t.live = 1;
        t.share_a = t.share_b = 0;
        t.part = 0;
        if constexpr (C::WGRAD) {
            // A pair shares B and takes two row tiles; where B is gathered it shares A and takes two column tiles.
            const int per_part = (p.M + C::BM - 1) / C::BM, rows = per_part * p.parts;
            const int P = C::GATHER_B ? rows : (rows + 1) / 2, Q = C::GATHER_B ? (cols + 1) / 2 : cols;
            e = quotient(u, P * Q);
            if (e >= p.E) return false;
            order(u - e * P * Q, P, Q, m, n);
            if (C::GATHER_B) {
                n = 2 * n + rank;
                t.share_a = 1;
                if (n >= cols) n = cols - 1, t.live = 0;
            } else {
                m = 2 * m + rank;
                t.share_b = 1;
                if (m >= rows) m = rows - 1, t.live = 0;
            }
            const int count = offset_of<C>(p, e + 1) - offset_of<C>(p, e), units = (count + 15) / 16;
            t.steps = units / 4;
            t.tail = units % 4;
            t.past = count % 16 ? count % 64 : 0;
            t.part = m >= per_part; // at most two parts
            t.m0 = t.row0 = (m - t.part * per_part) * C::BM;
            t.end = p.M;
            if (count == 0 && p.add) t.live = 0;
        } else {
            int tiles, units;
            for (;;) {
                if (e == p.E) return false;
                tiles = (offset_of<C>(p, e + 1) - offset_of<C>(p, e) + C::BM - 1) / C::BM;
                units = tiles / 2 * cols + (tiles & 1) * ((cols + 1) / 2);
                if (u < base + units) break;
                base += units;
                e++;
            }
            const int r = u - base, P = tiles / 2;
            if (r < P * cols) {
                order(r, P, cols, m, n);
                m = 2 * m + rank;
                t.share_b = 1;
            } else { // an odd last tile of rows: the pair shares it and takes two column tiles
                m = tiles - 1;
                n = 2 * (r - P * cols) + rank;
                t.share_a = 1;
                if (n >= cols) n = cols - 1, t.live = 0;
            }
            t.steps = p.k_steps * p.parts + p.low_steps;
            t.tail = p.low_tail;
            t.m0 = t.row0 = offset_of<C>(p, e) + m * C::BM;
            t.end = offset_of<C>(p, e + 1);
        }
        t.e = e;
        t.n0 = n * C::COLS;
        u += gridDim.x / 2;
        return true;
    }
};

// The part of a stage that comes by TMA, issued by one thread. k: step inside the part; krow: first row of the contraction; z: where
// the expert's weights are. low: a step of the adapter, whose rows are never gathered.
template <class C> DEV void load_stage(const Sm90Args &p, const Tile &t, int part, int k, int krow, uint32_t a, uint32_t bar, int rank, const int (&z)[2], bool low = false)
{
    const uint32_t b = a + C::A_BYTES;
    mbar_expect(bar, low ? C::STAGE : C::TX_BYTES);
    if (!C::GATHER_A || low) {
        const CUtensorMap *const map = low ? &p.low : &p.a;
#pragma unroll
        for (int i = 0; i < C::BM / 64; i++) {
            const int x = C::WGRAD ? t.part * p.M + t.m0 + 64 * i : ((low ? 0 : part * p.k_steps) + k) * 64, y = C::WGRAD ? krow : t.m0 + 64 * i;
            if (!t.share_a) tma_load2(a + i * 8192, map, bar, x, y);
            else if (i % 2 == rank) tma_load2_multicast(a + i * 8192, map, bar, x, y, 3);
        }
    }
    if constexpr (!C::GATHER_B) {
        constexpr int BOXES = C::BOXES, BYTES = C::B_BYTES / BOXES;
#pragma unroll
        for (int i = 0; i < BOXES; i++) {
            if (t.share_b && i % 2 != rank) continue;
            int x = 0, y = 0, which = low ? 0 : part;
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
            const CUtensorMap *const map = low ? &p.low_b[which] : &p.b[which];
            const int e = low ? t.e : z[which];
            if (t.share_b) tma_load_multicast(b + i * BYTES, map, bar, x, y, e, 3);
            else tma_load(b + i * BYTES, map, bar, x, y, e);
        }
    }
}

struct Ring {
    uint32_t base, full, empty; // of shared memory
};

template <class C> DEV void producer_tma(const Sm90Args &p, Ring ring, uint32_t cut)
{
    if (threadIdx.x >= (C::RAGGED ? 32 : 1)) return;
    const int rank = cluster_rank(), lane = threadIdx.x;
    Scheduler<C> sched(p);
    Tile t;
    int s = 0, phase = 1, before = -1;
    uint32_t cut_phase = 0;
    while (sched.next(t)) {
        pass_half(p, before, t.e);
        before = t.e;
        const int steps = t.steps + (t.tail != 0), krow = C::WGRAD ? offset_of<C>(p, t.e) : 0;
        const int z[2] = {C::WGRAD ? 0 : place_of(p.place_b[0], t.e), C::WGRAD ? 0 : place_of(p.place_b[1], t.e)};
        int part = 0, k = 0;
        for (int i = 0; i < steps; i++) {
            const bool past = C::RAGGED && t.past && i + 1 == steps;
            const uint32_t full = ring.full + 8 * s, bar = past ? cut + 8 * s : full, stage = ring.base + s * C::STAGE;
            mbar_wait(ring.empty + 8 * s, phase);
            const bool low = !C::WGRAD && part == p.parts;
            if (lane == 0) load_stage<C>(p, t, part, k, krow + 64 * i, stage, bar, rank, z, low);
            if (past) { // the rows of the next group become zeros before anybody sees the stage
                mbar_wait(bar, cut_phase >> s & 1);
                cut_phase ^= 1u << s;
                const int rows = -t.past & 15;
                for (int r = lane / 8; r < rows * (C::STAGE / 8192); r += 4)
                    asm volatile("st.shared.v4.b32 [%0], {%1,%1,%1,%1};" ::"r"(stage + r / rows * 8192 + (t.past + r % rows) * 128 + lane % 8 * 16), "r"(0) : "memory");
                fence_async();
                __syncwarp();
                if (lane == 0) mbar_arrive(full);
            }
            if (++k == p.k_steps && !C::WGRAD && !low) k = 0, part++;
            if (++s == C::STAGES) s = 0, phase ^= 1;
        }
    }
    pass_half(p, before, p.E);
}

// Gather: 8 lanes copy 128 contiguous bytes of a row; a thread has the rows t/8 + 16 i, so its swizzle term is constant and every
// shared address is one register plus an immediate. Addresses are ready before the slot is waited for; token ids come one tile (or,
// in weight gradients, one step) ahead.
template <class C> DEV void producer_gather(const Sm90Args &p, Ring ring)
{
    typedef typename C::T T;
    const int thread = threadIdx.x, rank = cluster_rank(), row = thread / 8, c = thread & 7;
    const uint32_t dst = ring.base + (C::GATHER_B ? C::A_BYTES : 0) + row * 128 + ((c ^ (row & 7)) << 4);
    const T *x = (const T *)p.x + c * 8;
    Scheduler<C> sched(p);
    Tile t, ahead;
    int s = 0, phase = 1, z[2] = {0, 0};
    auto begin = [&](int k, int krow, bool low = false) {
        mbar_wait(ring.empty + 8 * s, phase);
        if (thread == 0) load_stage<C>(p, t, 0, k, krow, ring.base + s * C::STAGE, ring.full + 8 * s, rank, z, low);
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
        auto load_tokens = [&](int (&q)[4], const Tile &u, int k) {
#pragma unroll
            for (int i = 0; i < 4; i++) q[i] = p.tok[offset_of<C>(p, u.e) + 64 * k + row + 16 * i];
        };
        if (more) load_tokens(next, ahead, 0);
        while (more) {
            pass_half(p, t.e, ahead.e);
            t = ahead;
#pragma unroll
            for (int i = 0; i < 4; i++) tok[i] = next[i];
            more = sched.next(ahead);
            if (more) load_tokens(next, ahead, 0);
            const int steps = t.steps + (t.tail != 0), limit = C::GATHER_A ? p.M : p.N, c0 = C::GATHER_A ? t.m0 : t.n0;
            int boxes = BOXES; // the last tile may reach past the row: what is there is not stored, but must not be read
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
        pass_half(p, t.e, p.E);
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

template <class C> DEV void store_tile(const Sm90Args &p, const Tile &t, float (&acc)[C::SUB][C::BN / 2], int row_wg, int warp, int lane, Stores<C> &out)
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
                    const uint32_t *b = (const uint32_t *)((const T *)p.bias + (size_t)t.e * p.bias_g + 2 * n) + lane % 4;
#pragma unroll
                    for (int j = 0; j < 16; j++) {
                        const float2 two = unpack2<T>(b[4 * j]);
                        q[4 * j] += two.x, q[4 * j + 1] += two.y, q[4 * j + 2] += two.x, q[4 * j + 3] += two.y;
                    }
                }
                if (p.keep_h) {
                    out.put([&](uint32_t b) { store_fragment<T>(b, q, lane); }, &p.h[0], 2 * n, row, 0, false, true);
                    out.put([&](uint32_t b) { store_fragment<T>(b, q + 32, lane); }, &p.h[0], 2 * n + 64, row, 0, false, true);
                }
                uint32_t w[16]; // a feature of rows r and r + 8
#pragma unroll
                for (int j = 0; j < 16; j++)
                    w[j] = pack2<T>(fast_value<FAST_CLAMP, true>(p.act, q[4 * j], q[4 * j + 1]), fast_value<FAST_CLAMP, true>(p.act, q[4 * j + 2], q[4 * j + 3]));
                out.put([&](uint32_t b) { store_features(b, w, lane); }, &p.d[0], n, row, 0, false, true);
            }
        } else if constexpr (C::EPI == EPI_GLU) {
#pragma unroll
            for (int c = 0; c < C::BN / 128; c++) {
                if (t.n0 + 64 * c >= p.N) break; // N is a multiple of 64 here
                float *g = v + 32 * c, *u = v + C::BN / 4 + 32 * c;
                if (p.keep_h) {
                    out.put([&](uint32_t b) { store_fragment<T>(b, g, lane); }, &p.h[0], t.n0 + 64 * c, row, 0, false, true);
                    out.put([&](uint32_t b) { store_fragment<T>(b, u, lane); }, &p.h[0], p.N + t.n0 + 64 * c, row, 0, false, true);
                }
                with_smooth(p.act, [&](auto kind) {
#pragma unroll
                    for (int i = 0; i < 32; i++) g[i] = fast_value<kind.value, true>(p.act, g[i], u[i]);
                });
                out.put([&](uint32_t b) { store_fragment<T>(b, g, lane); }, &p.d[0], t.n0 + 64 * c, row, 0, false, true);
            }
        } else if constexpr (C::EPI == EPI_STORE_F32) {
#pragma unroll
            for (int c = 0; c < C::BN / 32; c++)
                out.put([&](uint32_t b) { store_fragment_f32(b, v + 16 * c, lane); }, &p.d[t.part], t.n0 + 32 * c, row + shift, z, p.add, p.flat);
        } else {
#pragma unroll
            for (int c = 0; c < C::BN / 64; c++)
                out.put([&](uint32_t b) { store_fragment<T>(b, v + 32 * c, lane); }, &p.d[C::WGRAD ? t.part : 0], t.n0 + 64 * c, row + shift, z,
                        C::WGRAD && p.add, C::WGRAD ? p.flat : true);
        }
    }
}

template <class C> DEV void consumer(const Sm90Args &p, Ring ring, uint32_t tile_full, uint32_t tile_empty)
{
    typedef typename C::T T;
    const int index = warp_index(), wg = index / 4 - 1, warp = index % 4, lane = threadIdx.x % 32, row_wg = wg * C::WG_M;
    const uint32_t staging = ring.base + C::STAGING_AT + (wg * 4 + warp) * C::STAGING;
    Scheduler<C> sched(p);
    Stores<C> out{staging, lane};
    float acc[C::SUB][C::BN / 2] = {}; // once: ptxas before 12.9 serialises every wgmma where a path has them undefined
    int s = 0, phase = 0;
    uint32_t handed = 0;
    bool told = false;
    auto tell = [&](int e) { // before the results of a tile of expert e
        if (!p.halves || told || e < p.E / 2) return;
        told = true;
        if (lane == 0) half_stored(p, ring.full + RING_COUNT, 8);
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
            const uint64_t da = C::TA ? descriptor_mn(a + row_wg / 64 * 8192) : descriptor_k(a + row_wg * 128), db = C::TB ? descriptor_mn(b) : descriptor_k(b);
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < depth.value; kk++)
#pragma unroll
                for (int m = 0; m < C::SUB; m++)
                    wgmma<T, C::BN, C::TA, C::TB>(acc[m], da + m * 512 + kk * (C::TA ? 128 : 2), db + kk * (C::TB ? 128 : 2), (k | kk) != 0);
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
                tell(t.e);
#pragma unroll
                for (int c = 0; c < C::BN / 64; c++) store_fragment<T>(staging + c * 2048, acc[0] + 32 * c, lane);
                __syncwarp();
                if (lane == 0) mbar_arrive(tile_full + 8 * i);
            }
        } else {
            tell(t.e);
            store_tile<C>(p, t, acc, row_wg, warp, lane, out);
        }
    }
    if (C::EPI_WG && handed) mbar_wait(tile_empty + 8 * (wg * 4 + warp), (handed & 1) ^ 1);
    tell(p.E);
    if (!C::EPI_WG && lane == 0) tma_wait<0>();
}

// One element of the fused backward: d = <dout, W2>, p, gate and up to dh, p*a and a term of dp.
struct Slopes {
    float gate, up, pa, dp;
};
template <int KIND> DEV Slopes slopes(const Sm90Args &p, float d, float prob, float g, float u)
{
    if (KIND == FAST_SWIGLU) {
        const float s = sigmoid_fast(g), l = g * s, a = l * u, dp = d * prob;
        return {dp * u * (s + l * (1.f - s)), dp * l, a * prob, d * a};
    }
    const Factor f = fast_gate<KIND>(p.act, g), v = fast_up<KIND>(p.act, u);
    const float a = f.value * v.value, dp = d * prob;
    return {dp * v.value * f.slope, dp * f.value * v.slope, a * prob, d * a};
}

// Epilogue warpgroup of the fused backward: from d (rounded to 16 bits in shared memory) and h. Warp w takes the 16 rows of warp w of
// each consumer, 64 columns of a row as 8 lanes of 16 bytes: whole 128-byte lines.
// PAIRS: gate and up of a feature are neighbours in h and dh.
template <class C, int KIND, bool PAIRS> DEV void epilogue_dglu(const Sm90Args &p, Ring ring, uint32_t tile_full, uint32_t tile_empty)
{
    typedef typename C::T T;
    const int warp = warp_index() % 4, lane = threadIdx.x % 32, lr = lane / 8, lc = (lane & 7) * 8;
    const bool gated = PAIRS || KIND == FAST_SWIGLU || p.gated;
    const size_t pitch = gated ? 2 * (size_t)p.N : p.N, second = PAIRS ? 8 : p.N; // elements from a thread's first 16 bytes to its others
    constexpr int STEP = PAIRS ? 2 : 1;
    const uint32_t ones = pack2<T>(1.f, 1.f);
    const uint4 one = {ones, ones, ones, ones};
    const T *h = (const T *)p.h_in;
    T *dh = (T *)p.dh, *pa = (T *)p.pa;
    Scheduler<C> sched(p);
    Tile t;
    uint32_t taken = 0; // a bit a consumer: arrays would not stay in registers
    while (sched.next(t)) {
        uint4 hg[4], hu[4];
#pragma unroll
        for (int i = 0; i < 4; i++) hu[i] = one; // ungated: F(h) * 1
        auto load_h = [&](int wg, int c) {
            if (t.n0 + 64 * c + lc >= p.N) return;
            const T *q = h + (size_t)(t.row0 + wg * 64 + warp * 16 + lr) * pitch + STEP * (t.n0 + 64 * c + lc);
#pragma unroll
            for (int i = 0; i < 4; i++, q += 4 * pitch) {
                hg[i] = __ldcs((const uint4 *)q);
                if (gated) hu[i] = __ldcs((const uint4 *)(q + second));
            }
        };
        const int mine = !t.live ? 0 : (t.row0 + warp * 16 < t.end) + 2 * (t.row0 + 64 + warp * 16 < t.end);
        if (mine & 1) load_h(0, 0);
#pragma unroll
        for (int wg = 0; wg < 2; wg++) {
            if (!(mine >> wg & 1)) continue;
            const int b = wg * 4 + warp, row = t.row0 + wg * 64 + warp * 16;
            const uint32_t d = ring.base + C::STAGING_AT + b * C::STAGING;
            float prob[4], dot[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < 4; i++) prob[i] = p.prob[row + 4 * i + lr];
            mbar_wait(tile_full + 8 * b, taken >> wg & 1);
            taken ^= 1u << wg;
#pragma unroll 1 // otherwise more instructions than their cache holds: dh took up to 1.6 times as long
            for (int c = 0; c < C::BN / 64; c++) {
                if (t.n0 + 64 * c >= p.N) break;
                const bool inside = t.n0 + 64 * c + lc < p.N;
                uint4 g4[4], u4[4];
#pragma unroll
                for (int i = 0; i < 4; i++) g4[i] = hg[i], u4[i] = hu[i];
                if (c + 1 < C::BN / 64 && t.n0 + 64 * (c + 1) < p.N) load_h(wg, c + 1);
                else if (wg == 0 && mine & 2) load_h(1, 0);
                if (!inside) continue;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const uint4 X = load_shared16(row_address(d + c * 2048, i, lane));
                    const uint32_t *xp = &X.x, *gp = &g4[i].x, *up = &u4[i].x;
                    const size_t r = row + 4 * i + lr;
                    T *const o = dh + r * pitch + STEP * (t.n0 + 64 * c + lc);
                    uint4 og, ou, oa;
                    uint32_t *ogp = &og.x, *oup = &ou.x, *oap = &oa.x;
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const float2 x = unpack2<T>(xp[j]);
                        float2 g, u; // of two features
                        if (PAIRS) {
                            const float2 a = unpack2<T>(j < 2 ? gp[2 * j] : up[2 * j - 4]), b = unpack2<T>(j < 2 ? gp[2 * j + 1] : up[2 * j - 3]);
                            g = {a.x, b.x}, u = {a.y, b.y};
                        } else g = unpack2<T>(gp[j]), u = unpack2<T>(up[j]);
                        const Slopes v = slopes<KIND>(p, x.x, prob[i], g.x, u.x), w = slopes<KIND>(p, x.y, prob[i], g.y, u.y);
                        dot[i] += v.dp + w.dp;
                        oap[j] = pack2<T>(v.pa, w.pa);
                        if (PAIRS) {
                            ogp[j % 2 * 2] = pack2<T>(v.gate, v.up), ogp[j % 2 * 2 + 1] = pack2<T>(w.gate, w.up);
                            if (j % 2) store_global16(o + j / 2 * 8, og);
                        } else ogp[j] = pack2<T>(v.gate, w.gate), oup[j] = pack2<T>(v.up, w.up);
                    }
                    store_global16(pa + r * p.N + t.n0 + 64 * c + lc, oa);
                    if (PAIRS) continue;
                    store_global16(o, og);
                    if (gated) store_global16(o + second, ou);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                dot[i] += __shfl_xor_sync(~0u, dot[i], 1);
                dot[i] += __shfl_xor_sync(~0u, dot[i], 2);
                dot[i] += __shfl_xor_sync(~0u, dot[i], 4);
                if ((lane & 7) == 0) p.dp[(size_t)(t.n0 / C::BN) * p.dp_pitch + row + 4 * i + lr] = dot[i];
            }
            __syncwarp();
            if (lane == 0) mbar_arrive(tile_empty + 8 * b);
        }
    }
}

template <class C> __global__ void __launch_bounds__(C::THREADS, 1) gemm_sm90_kernel(const __grid_constant__ Sm90Args p)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    const uint32_t base = smem_u32(smem), control = base + C::CONTROL;
    const Ring ring = {base, control, control + 64};
    const uint32_t tile_full = control + 128, tile_empty = control + 192;
    if (threadIdx.x == 0) {
        for (int s = 0; s < C::STAGES; s++) {
            mbar_init(ring.full + 8 * s, C::GATHER ? 129 : 1);
            mbar_init(ring.empty + 8 * s, 16); // 8 consumer warps of both CTAs
        }
        for (int i = 0; i < 8; i++) mbar_init(tile_full + 8 * i, 1), mbar_init(tile_empty + 8 * i, 1);
        *(int *)(smem + C::CONTROL + RING_COUNT) = 0;
        fence_barrier_init();
        if (!C::GATHER_A) tma_prefetch(&p.a);
        if (!C::GATHER_B) tma_prefetch(&p.b[0]);
        if (!C::EPI_WG) tma_prefetch(&p.d[0]);
    }
    begin(p);
    if (p.off_shared)
        for (int i = threadIdx.x; i <= p.E; i += C::THREADS) ((int *)(smem + C::OFFSETS))[i] = p.off[i];
    __syncthreads();
    cluster_sync();
    if (threadIdx.x < 128) {
        registers_down<C::REG_PRODUCER>();
        if constexpr (C::GATHER) producer_gather<C>(p, ring);
        else producer_tma<C>(p, ring, tile_full);
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

// ---- Host ----

template <class C> static cudaError_t sm90_setup_one()
{
    return cudaFuncSetAttribute(gemm_sm90_kernel<C>, cudaFuncAttributeMaxDynamicSharedMemorySize, SM90_MAX_SMEM);
}

template <class C> static cudaError_t sm90_launch_one(Sm90Args &p, int sms, cudaStream_t stream)
{
    static_assert(C::SMEM <= SM90_MAX_SMEM, "too much shared memory");
    static_assert(C::B > B_GLU || C::BN / C::BOXES == (C::EPI_WG ? SM90_BOX_ACT : SM90_BOX), "boxes of weights are not those of the maps");
    const size_t all = C::SMEM + ((size_t)p.E + 1) * 4;
    p.off_shared = all <= SM90_MAX_SMEM;
    return launch_overlapped(gemm_sm90_kernel<C>, dim3((unsigned)(sms / 2 * 2)), C::THREADS, p.off_shared ? all : C::SMEM, 2, stream, p);
}
