// SPDX-License-Identifier: Apache-2.0
// gemm_tokens.cuh - rows times weights with the tokens on the N side of wgmma: D^T[feature, token] = W[feature, k]
// X[token, k]^T.
//
// A tile is 256 features by any multiple of 16 tokens up to MAX_N, so that an expert's rows are cut into equal pieces
// and nothing is multiplied in vain: with 64-row granularity on the M side the ragged ends cost 6 % at 1024 rows an
// expert and 25 % at 256. Roles, ring and multicast as in gemm_rows.cuh; a pair of CTAs takes two pieces of one expert
// and shares the weights, or, where an expert has one piece only, two tiles of features.
//
// A consumer multiplies 128 features, as two blocks of 64. With an activation a thread has gate and up of the same
// feature: by turns of 8 rows in the weights' tile (W_GLU: one tensor, so a stack, and the fastest), or as 64 gates and
// then their 64 ups (any list). Results pass through shared memory transposed, 48 tokens at a time.
#pragma once
#include "cuda/act.cuh"
#include "sched.cuh"
#include "wgmma.cuh"

// [feature, k]; [k, feature]; the first, 8 gates and 8 ups in turn.
enum WeightSource { W_KMAJOR, W_NMAJOR, W_GLU };
// plain; a smooth activation of W_GLU; any of gate and up; of one.
enum TokenEpilogue { TOK_STORE, TOK_SMOOTH, TOK_GLU, TOK_ACT };

template <class T_, WeightSource W_, bool GATHER_, TokenEpilogue EPI_> struct TokenConfig {
    typedef T_ T;
    static constexpr WeightSource W = W_;
    static constexpr bool GATHER = GATHER_;
    static constexpr TokenEpilogue EPI = EPI_;
    static constexpr bool TOKENS = true, F32 = false;
    static constexpr int STAGES = 4, MAX_UNITS = FMOE_CUDA_TOKEN_UNITS, MAX_N = 16 * MAX_UNITS; // a unit is 16 tokens
    static constexpr int TA = W == W_NMAJOR;
    static constexpr int COLS = EPI == TOK_GLU || EPI == TOK_SMOOTH ? 128 : 256; // features of the result in a tile
    static constexpr bool ACT_BOXES = EPI == TOK_GLU || EPI == TOK_ACT;
    static constexpr int BOX_ROWS = TA ? 64 : ACT_BOXES ? SM90_BOX_ACT : SM90_BOX; // of weights
    static constexpr int BOXES = 256 / BOX_ROWS, BOX = BOX_ROWS * 128;
    static constexpr int A_BYTES = 256 * 128, B_BYTES = MAX_N * 128, STAGE = A_BYTES + B_BYTES;
    static constexpr int PIECE = SM90_PIECE, PIECES = MAX_UNITS / PIECE; // units that pass shared memory at a time
    static constexpr int BUFFER = PIECE * 2048, STAGING = 2 * BUFFER;    // of a consumer
    static constexpr int THREADS = 384;
    static constexpr int CONTROL = STAGES * STAGE + 2 * STAGING, OFFSETS = CONTROL + 256, SMEM = OFFSETS;
    static constexpr int REG_PRODUCER = GATHER ? 88 : 56, REG_CONSUMER = GATHER ? 208 : 224;
    static constexpr int GROUP = 8;
};

struct TokenTile {
    int e, n0, row0, units, share, live;
    int rows; // from row0 to the end of the expert, or (not ragged) whole units of them
    // For the compiler, which otherwise loops over the values that a warp's lanes may have.
    DEV TokenTile uniform() const
    {
        return {::uniform(e), ::uniform(n0),   ::uniform(row0), ::uniform(units),
                share,        ::uniform(live), ::uniform(rows)};
    }
};

template <class C> struct TokenScheduler {
    const Sm90Args &p;
    int u, e = 0, base = 0;
    DEV TokenScheduler(const Sm90Args &args) : p(args), u(blockIdx.x / 2) {}
    DEV bool next(TokenTile &t)
    {
        const int tiles = (p.N + C::COLS - 1) / C::COLS, rank = cluster_rank();
        int units, first, rows, pieces, work;
        for (;;) {
            if (e == p.E) return false;
            first = offset_of<C>(p, e);
            rows = offset_of<C>(p, e + 1) - first;
            units = (rows + 15) / 16;
            pieces = units <= C::MAX_UNITS ? units != 0 : (units + 2 * C::MAX_UNITS - 1) / (2 * C::MAX_UNITS) * 2;
            work = pieces == 1 ? (tiles + 1) / 2 : pieces / 2 * tiles;
            if (u < base + work) break;
            base += work;
            e++;
        }
        int r = u - base, n, m = 0;
        t.live = 1;
        t.share = pieces > 1;
        if (pieces == 1) {
            n = 2 * r + rank;
            if (n >= tiles) n = tiles - 1, t.live = 0;
        } else { // groups of pairs of pieces; in a group features outside, pieces inside
            const int pairs = pieces / 2, g = quotient(r, C::GROUP * tiles), size = min(C::GROUP, pairs - g * C::GROUP);
            r -= g * C::GROUP * tiles;
            n = quotient(r, size);
            m = 2 * (g * C::GROUP + r - n * size) + rank;
        }
        // The larger pieces first, so that pairs are equal.
        const int least = quotient(units, pieces), more = units - least * pieces, begin = m * least + min(m, more);
        t.e = e;
        t.n0 = n * C::COLS;
        t.row0 = first + begin * 16;
        t.units = least + (m < more);
        t.rows = (p.ragged ? rows : units * 16) - begin * 16;
        u += gridDim.x / 2;
        return true;
    }
};

struct TokenRing {
    uint32_t base, full, empty;
};

DEV void tma_load5_to(uint32_t dst, const CUtensorMap *m, uint32_t bar, int x, int g, int e, bool both)
{
    const int zero = 0;
    if (both)
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::"
                     "cluster [%0], [%1, {%3, %4, %4, %5, %6}], [%2], %7;" ::"r"(dst),
                     "l"(m), "r"(bar), "r"(x), "r"(zero), "r"(g), "r"(e), "h"((uint16_t)3)
                     : "memory");
    else
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
                     "%4, %4, %5, %6}], [%2];" ::"r"(dst),
                     "l"(m), "r"(bar), "r"(x), "r"(zero), "r"(g), "r"(e)
                     : "memory");
}

// Weights of one stage, and the tokens where they lie in order. z: where the expert's matrices are. lora: a step of the
// adapter, whose rows are never gathered.
template <class C>
DEV void token_load(const Sm90Args &p, const TokenTile &t, int part, int k, uint32_t a, uint32_t bar, int rank,
                    const int (&z)[2], bool lora)
{
    const bool rows = !C::GATHER || lora;
    mbar_expect(bar, C::A_BYTES + (rows ? t.units * 2048 : 0));
#pragma unroll
    for (int i = 0; i < C::BOXES; i++) {
        if (t.share && i % 2 != rank) continue;
        if constexpr (C::W == W_GLU) {
            tma_load5_to(a + i * C::BOX, lora ? &p.lora_b[0] : &p.b[0], bar, k * 64, t.n0 / 8 + 8 * i, t.e, t.share);
            continue;
        }
        const int which = C::EPI == TOK_GLU ? i % 2
                          : lora            ? 0
                                            : part,
                  n = t.n0 + C::BOX_ROWS * (C::EPI == TOK_GLU ? i / 2 : i);
        const int x = C::W == W_KMAJOR ? k * 64 : n, y = C::W == W_KMAJOR ? n : k * 64;
        const CUtensorMap *const map = lora ? &p.lora_b[which] : &p.b[which];
        const int e = lora ? t.e : z[which];
        if (t.share) tma_load_multicast(a + i * C::BOX, map, bar, x, y, e, 3);
        else tma_load(a + i * C::BOX, map, bar, x, y, e);
    }
    if (rows) {
        const CUtensorMap *const four = lora ? &p.lora : &p.a, *const one = lora ? &p.lora16 : &p.a16;
        if (lora) part = 0;
        const uint32_t b = a + C::A_BYTES;
        int u = 0;
        for (; u + 4 <= t.units; u += 4) tma_load(b + u * 2048, four, bar, k * 64, part, t.row0 + 16 * u);
        for (; u < t.units; u++) tma_load(b + u * 2048, one, bar, k * 64, part, t.row0 + 16 * u);
    }
}

template <class C> DEV void token_producer(const Sm90Args &p, TokenRing ring)
{
    typedef typename C::T T;
    const int thread = threadIdx.x, rank = cluster_rank();
    TokenScheduler<C> sched(p);
    const int lora_steps = p.lora_steps + (p.lora_tail != 0);
    int s = 0, phase = 1;
    if constexpr (!C::GATHER) {
        if (thread != 0) return;
        TokenTile t;
        int before = -1;
        while (sched.next(t)) {
            wait_at_half(p, before, t.e);
            before = t.e;
            const int z[2] = {place_of(p.place_b[0], t.e), place_of(p.place_b[1], t.e)};
            for (int part = 0; part <= p.parts; part++) {
                const bool lora = part == p.parts;
                for (int k = 0; k < (lora ? lora_steps : p.k_steps); k++) {
                    mbar_wait(ring.empty + 8 * s, phase);
                    token_load<C>(p, t, part, k, ring.base + s * C::STAGE, ring.full + 8 * s, rank, z, lora);
                    if (++s == C::STAGES) s = 0, phase ^= 1;
                }
            }
        }
        wait_at_half(p, before, p.E);
    } else {
        // As in gemm_rows.cuh: 8 lanes a row of 128 bytes, thread t has row t/8 of every unit.
        const int row = thread / 8, c = thread & 7;
        const uint32_t dst = ring.base + C::A_BYTES + row * 128 + ((c ^ (row & 7)) << 4);
        const T *x = (const T *)p.x + c * 8;
        TokenTile t, ahead;
        int tok[C::MAX_UNITS];
        auto load_tokens = [&] {
#pragma unroll
            for (int i = 0; i < C::MAX_UNITS; i++)
                if (i < ahead.units) tok[i] = p.tok[ahead.row0 + row + 16 * i];
        };
#pragma unroll
        for (int i = 0; i < C::MAX_UNITS; i++) tok[i] = 0;
        bool more = sched.next(ahead);
        if (more) load_tokens();
        while (more) {
            t = ahead;
            const T *src[C::MAX_UNITS];
#pragma unroll
            for (int i = 0; i < C::MAX_UNITS; i++) src[i] = x + (size_t)tok[i] * p.ldx;
            const int z[2] = {place_of(p.place_b[0], t.e), place_of(p.place_b[1], t.e)};
            more = sched.next(ahead);
            if (more) load_tokens();
            for (int k = 0; k < p.k_steps; k++) {
                mbar_wait(ring.empty + 8 * s, phase);
                if (thread == 0) token_load<C>(p, t, 0, k, ring.base + s * C::STAGE, ring.full + 8 * s, rank, z, false);
#pragma unroll
                for (int i = 0; i < C::MAX_UNITS; i++)
                    if (i < t.units) {
                        cp_async16(dst + s * C::STAGE + i * 2048, src[i]);
                        src[i] += 64;
                    }
                cp_async_arrive(ring.full + 8 * s);
                if (++s == C::STAGES) s = 0, phase ^= 1;
            }
            for (int k = 0; k < lora_steps; k++) {
                mbar_wait(ring.empty + 8 * s, phase);
                if (thread == 0) token_load<C>(p, t, 0, k, ring.base + s * C::STAGE, ring.full + 8 * s, rank, z, true);
                cp_async_arrive(ring.full + 8 * s);
                if (++s == C::STAGES) s = 0, phase ^= 1;
            }
        }
    }
}

DEV void stmatrix4_t(uint32_t a, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

template <class C> struct TokenConsumer {
    typedef typename C::T T;
    const Sm90Args &p;
    const TokenRing ring;
    const int wg, warp, lane;
    TokenScheduler<C> sched;
    TokenTile ahead; // the tile after the present one
    bool more = false;
    int s = 0, phase = 0;
    uint32_t turn = 0;
    float acc[2][C::MAX_N / 2] = {}; // as in gemm_rows.cuh

    DEV TokenConsumer(const Sm90Args &args, TokenRing r)
        : p(args), ring(r), wg(warp_index() / 4 - 1), warp(warp_index() % 4), lane(threadIdx.x % 32), sched(args)
    {
    }
    DEV void release(int slot)
    {
        if (lane < 2) mbar_arrive_cluster(ring.empty + 8 * slot, lane);
    }
    DEV void advance()
    {
        if (++s == C::STAGES) s = 0, phase ^= 1;
    }
    template <int UNITS> DEV void multiply(int steps)
    {
        static_assert(UNITS <= C::MAX_UNITS, "more tokens than a stage holds");
        int last = 0;
        const int look = min(1, steps - 1);
        auto step = [&](int k, auto depth) { // depth: of 16
            mbar_wait(ring.full + 8 * s, phase);
            if (C::GATHER) fence_async();
            const uint32_t a = ring.base + s * C::STAGE + wg * 16384, b = ring.base + s * C::STAGE + C::A_BYTES;
            const uint64_t da = C::TA ? descriptor_mn(a) : descriptor_k(a), db = descriptor_k(b);
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < depth.value; kk++)
#pragma unroll
                for (int m = 0; m < 2; m++)
                    wgmma<T, 16 * UNITS, C::TA, 0>(acc[m], da + m * 512 + kk * (C::TA ? 128 : 2), db + kk * 2,
                                                   (k | kk) != 0);
            wgmma_commit();
            if (depth.value == 4 && k == look) more = sched.next(ahead); // some 500 cycles, under the products
            wgmma_wait<1>();
            if (k) release(last);
            last = s;
            advance();
        };
        for (int k = 0; k < steps; k++) step(k, std::integral_constant<int, 4>());
        if (p.lora_tail) step(steps, std::integral_constant<int, 1>());
        wgmma_wait<0>();
        release(last);
#pragma unroll
        for (int m = 0; m < 2; m++) wgmma_pin<8 * UNITS>(acc[m]);
    }
    DEV void multiply_any(int units, int steps)
    {
        switch (units) {
        case 1: return multiply<1>(steps);
        case 2: return multiply<2>(steps);
        case 3: return multiply<3>(steps);
        case 4: return multiply<4>(steps);
        case 5: return multiply<5>(steps);
        case 6: return multiply<6>(steps);
        case 7: return multiply<7>(steps);
        case 8: return multiply<8>(steps);
        default: return multiply<9>(steps);
        }
    }
    // Units from `first` on of one block of 64 features: every warp writes its 16 x 16 blocks, then one TMA store a
    // unit. words(u, w): the four words of the unit's block; column: of the first two and of the others, in 16 bytes.
    // maps: boxes of 16 rows and of a whole piece, which goes in one store: issuing one takes 150 cycles, for which all
    // warps wait.
    template <class F>
    DEV void put(const TokenTile &t, const int first, const CUtensorMap (&maps)[2], int x, int y, int column, int other,
                 F words)
    {
        const uint32_t buffer = ring.base + C::STAGES * C::STAGE + wg * C::STAGING + (turn++ & 1) * C::BUFFER;
        if (warp == 0 && lane == 0) tma_wait_read<1>();
        bar_sync(1 + wg, 128);
        // Where this lane's row of a transposed block goes: 16 tokens of 128 bytes.
        const int token = (lane & 7) + (lane >> 3 & 1) * 8;
        const uint32_t at = buffer + token * 128 + (((lane >> 4 ? other : column) ^ (token & 7)) << 4);
#pragma unroll
        for (int u = 0; u < C::PIECE; u++)
            if (first + u < t.units) {
                uint32_t w[4];
                words(first + u, w);
                stmatrix4_t(at + u * 2048, w[0], w[1], w[2], w[3]);
            }
        fence_async();
        bar_sync(1 + wg, 128);
        if (warp == 0 && lane == 0) {
            if (16 * C::PIECE <= t.rows - 16 * first && first + C::PIECE <= t.units)
                tma_store(&maps[1], buffer, x, y, t.row0 + 16 * first);
            else
                for (int u = 0; u < C::PIECE && first + u < t.units; u++) {
                    const int row = t.row0 + 16 * (first + u), rows = t.rows - 16 * (first + u);
                    if (rows >= 16) tma_store(&maps[0], buffer + u * 2048, x, y, row);
                    else
                        for (int r = 0; r < rows; r++) tma_store(&p.d1, buffer + u * 2048 + r * 128, x, y, row + r);
                }
            tma_commit();
        }
    }
    // A block whose rows are 16 features: value(i) of accumulator i.
    template <class F>
    DEV void put_rows(const TokenTile &t, int first, const CUtensorMap (&maps)[2], int x, int y, F value)
    {
        put(t, first, maps, x, y, 2 * warp, 2 * warp + 1, [&](int u, uint32_t(&w)[4]) {
            const int i = 8 * u;
            w[0] = pack2<T>(value(i), value(i + 1)), w[1] = pack2<T>(value(i + 4), value(i + 5));
            w[2] = pack2<T>(value(i + 2), value(i + 3)), w[3] = pack2<T>(value(i + 6), value(i + 7));
        });
    }
    // Rows are 8 gates and 8 ups, in both blocks of 64: accumulators i and i + 2.
    DEV void store_smooth(const TokenTile &t)
    {
        const int x = t.n0 + 64 * wg;
#pragma unroll
        for (int piece = 0; piece < C::PIECES; piece++) {
            const int first = piece * C::PIECE;
            if (first >= t.units) break;
            auto half = [&](int h) {
                return [&, h](int u, uint32_t(&w)[4]) {
                    const float *v = acc[0] + 8 * u + 2 * h, *q = acc[1] + 8 * u + 2 * h;
                    w[0] = pack2<T>(v[0], v[1]), w[1] = pack2<T>(v[4], v[5]), w[2] = pack2<T>(q[0], q[1]),
                    w[3] = pack2<T>(q[4], q[5]);
                };
            };
            if (p.keep_h) {
                put(t, first, p.h, x, 0, warp, warp + 4, half(0));
                put(t, first, p.h, x, 1, warp, warp + 4, half(1));
            }
            with_smooth(p.act, [&](auto kind) {
                put(t, first, p.d, x, 0, warp, warp + 4, [&](int u, uint32_t(&w)[4]) {
#pragma unroll
                    for (int m = 0; m < 2; m++)
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            const float *v = acc[m] + 4 * (2 * u + h);
                            w[2 * m + h] = pack2<T>(fast_value<kind.value, true>(p.act, v[0], v[2]),
                                                    fast_value<kind.value, true>(p.act, v[1], v[3]));
                        }
                });
            });
        }
    }
    struct Two { // of a thread's two features
        float lo, hi;
        DEV float at(int i) const { return i & 2 ? hi : lo; }
    };
    DEV Two bias(const TokenTile &t, int feature, int64_t offset)
    {
        if (!p.bias) return {0.f, 0.f};
        const T *b = (const T *)p.bias + (size_t)t.e * p.bias_g + offset;
        const int f = feature + 16 * warp + lane / 4;
        return {f < p.N ? to_float(b[f * p.bias_n]) : 0.f, f + 8 < p.N ? to_float(b[(f + 8) * p.bias_n]) : 0.f};
    }
    DEV void store(const TokenTile &t)
    {
        constexpr bool GLU = C::EPI == TOK_GLU;
#pragma unroll
        for (int m = 0; m < (GLU ? 1 : 2); m++) {
            const int x = GLU ? t.n0 + 64 * wg : t.n0 + 128 * wg + 64 * m;
            const Two b = bias(t, x, 0), b_up = GLU ? bias(t, x, p.bias_up) : b;
            auto gate = [&](int i) { return acc[m][i] + b.at(i); };
            auto up = [&](int i) { return acc[1][i] + b_up.at(i); };
#pragma unroll
            for (int piece = 0; piece < C::PIECES; piece++) {
                const int first = piece * C::PIECE;
                if (first >= t.units) break;
                auto put_act = [&](auto kind) {
                    put_rows(t, first, p.d, x, 0,
                             [&](int i) { return fast_value<kind.value, GLU>(p.act, gate(i), up(i)); });
                };
                if constexpr (C::EPI == TOK_STORE) put_rows(t, first, p.d, x, 0, gate);
                else {
                    if (p.keep_h) put_rows(t, first, p.h, x, 0, gate);
                    if (GLU && p.keep_h) put_rows(t, first, p.h, x, 1, up);
                    if (p.act.kind == FAST_ERF) put_act(std::integral_constant<int, FAST_ERF>());
                    else if (p.act.kind == FAST_RELU) put_act(std::integral_constant<int, FAST_RELU>());
                    else if (p.act.kind == FAST_TANH) put_act(std::integral_constant<int, FAST_TANH>());
                    else put_act(std::integral_constant<int, FAST_CLAMP>()); // SwiGLU with a bias too
                }
            }
        }
    }
    DEV void run()
    {
        const int steps = p.k_steps * p.parts + p.lora_steps;
        bool published = !p.lets_in_early;
        auto publish = [&] {
            if (!published && warp == 0 && lane == 0) publish_half(p, ring.full + RING_COUNT, 2);
            published = true;
        };
        more = sched.next(ahead);
        while (more) {
            const TokenTile t = ahead.uniform();
            if (!t.live) {
                for (int k = steps + (p.lora_tail != 0); k > 0; k--) {
                    mbar_wait(ring.full + 8 * s, phase);
                    release(s);
                    advance();
                }
                more = sched.next(ahead);
                continue;
            }
            multiply_any(t.units, steps);
            if (t.e >= p.E / 2) publish();
            if constexpr (C::EPI == TOK_SMOOTH) store_smooth(t);
            else store(t);
        }
        publish();
        if (warp == 0 && lane == 0) tma_wait<0>();
    }
};

template <class C>
__global__ void __launch_bounds__(C::THREADS, 1) tokens_sm90_kernel(const __grid_constant__ Sm90Args p)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    const uint32_t base = smem_u32(smem), control = base + C::CONTROL;
    const TokenRing ring = {base, control, control + 64};
    if (threadIdx.x == 0) {
        for (int s = 0; s < C::STAGES; s++) {
            mbar_init(ring.full + 8 * s, C::GATHER ? 129 : 1);
            mbar_init(ring.empty + 8 * s, 16); // 8 consumer warps of both CTAs
        }
        *(int *)(smem + C::CONTROL + RING_COUNT) = 0;
        fence_barrier_init();
        tma_prefetch(&p.b[0]);
        tma_prefetch(&p.d[0]);
    }
    begin_product(p);
    if (p.off_shared)
        for (int i = threadIdx.x; i <= p.E; i += C::THREADS) ((int *)(smem + C::OFFSETS))[i] = p.off[i];
    __syncthreads();
    cluster_sync();
    if (threadIdx.x < 128) {
        registers_down<C::REG_PRODUCER>();
        token_producer<C>(p, ring);
    } else {
        registers_up<C::REG_CONSUMER>();
        TokenConsumer<C>(p, ring).run();
    }
    __syncthreads();
    cluster_sync();
}
