// SPDX-License-Identifier: Apache-2.0
// gemm_coded.cuh - rows times quantised weights: D^T[feature, token] = W[feature, k] X[token, k]^T as in
// gemm_tokens.cuh, with weights that are decoded in the registers of the warps that multiply them, and go into wgmma
// from there (fragments.cuh).
//
// A tile is 128 features by up to 256 tokens, so that a weight that is decoded, by some four instructions, is
// multiplied by many. A stage of the ring has codes (4 or 8 KB), their scales and 32 KB of tokens. While a warpgroup
// decodes 32 of k, its products of the 32 before are under way, and so are those of the other one. What was tried in
// its place: docs/notes/hopper.md.
//
// Each weight is (code - zero) * scale in f32, rounded once: dequant.cu's, so that results have the bits of the
// products of decoded weights. The rows of an adapter's rank are further steps, whose factor comes as 16-bit weights.
#pragma once
#include "cuda/sm90/gemm_tokens.cuh"
#include "epilogue_dh.cuh"
#include "fragments.cuh"

template <CodedKernel KERNEL_, CodeKind CODE_> struct CodedConfig {
    typedef bf16 T;
    static constexpr CodedKernel KERNEL = KERNEL_;
    static constexpr CodeKind CODE = CODE_;
    static constexpr bool UP = KERNEL == CODED_UP, DH = KERNEL == CODED_DH, TURNED = KERNEL >= CODED_ROWS_N,
                          GATHER = UP || DH || KERNEL == CODED_GATHER_K || KERNEL == CODED_GATHER_N;
    static constexpr int STAGES = 4, MAX_UNITS = 16, MAX_N = 16 * MAX_UNITS;
    static constexpr int COLS = UP ? CODED_TILE / 2 : CODED_TILE; // features of the result in a tile
    static constexpr int ROW = (TURNED ? CODED_TILE : 64) / (CODE == CODE_NIBBLES ? 2 : 1); // bytes of a row of codes
    static constexpr int CODES = CODED_TILE * 64 / (CODE == CODE_NIBBLES ? 2 : 1);
    // Codes, or the factor of an adapter; scales; tokens.
    static constexpr int A_BYTES = CODED_TILE * 128, SCALES = A_BYTES, TOKENS = SCALES + 1024,
                         STAGE = TOKENS + MAX_N * 128;
    static constexpr int PIECE = UP ? CODED_PIECE_UP : CODED_PIECE, PIECES = MAX_UNITS / PIECE, BUFFER = PIECE * 2048;
    static constexpr int STAGING = STAGES * STAGE; // two buffers; each consumer's own but for UP, who share them
    static constexpr int CONTROL = STAGING + (DH ? DH_SUMS : 2 * BUFFER * (UP ? 1 : 2)), OFFSETS = CONTROL + 256,
                         SMEM = OFFSETS;
    static constexpr int THREADS = 384, REG_PRODUCER = 56, REG_CONSUMER = 224;
};

template <class C> struct CodedScheduler {
    const Sm90Args &p;
    int u = blockIdx.x, e = 0, base = 0;
    DEV CodedScheduler(const Sm90Args &args) : p(args) {}
    DEV bool next(TokenTile &t)
    {
        const int tiles = (p.N + C::COLS - 1) / C::COLS;
        int units, first, pieces;
        for (;;) {
            if (e == p.E) return false;
            first = offset_of<C>(p, e);
            units = (offset_of<C>(p, e + 1) - first + 15) / 16;
            pieces = (units + C::MAX_UNITS - 1) / C::MAX_UNITS;
            if (u < base + pieces * tiles) break;
            base += pieces * tiles;
            e++;
        }
        const int r = u - base, n = quotient(r, pieces), m = r - n * pieces;
        const int least = quotient(units, pieces), more = units - least * pieces, begin = m * least + min(m, more);
        t.e = e;
        t.n0 = n * C::COLS;
        t.row0 = first + begin * 16;
        t.units = least + (m < more);
        t.rows = t.units * 16;
        t.live = 1, t.share = 0;
        u += gridDim.x;
        return true;
    }
};

// ---- The producer ----

// Codes and scales of one step (or an adapter's factor), and the tokens where they lie in order.
template <class C> DEV void coded_load(const Sm90CodedArgs &a, const TokenTile &t, int k, uint32_t to, uint32_t bar)
{
    const Sm90Args &p = a.p;
    mbar_expect(bar, C::CODES + 512 * a.subs + (C::GATHER ? 0 : t.units * 2048));
    const float *s = a.scales + t.e * a.scales_each + k * a.scales_step;
    if constexpr (C::UP) {
        tma_load5_to(to, &p.b[0], bar, k * (C::ROW / 2), t.n0 / 8, t.e, false);
        for (int i = 0; i < a.subs; i++, s += a.scales_sub) {
            bulk_load(to + C::SCALES + 512 * i, s + t.n0, 256, bar);
            bulk_load(to + C::SCALES + 512 * i + 256, s + a.scales_up + t.n0, 256, bar);
        }
    } else if constexpr (C::TURNED) {
        tma_load(to, &p.b[0], bar, t.n0 / (C::CODE == CODE_NIBBLES ? 4 : 2), k * 64, t.e);
        bulk_load(to + C::SCALES, s + (int64_t)t.n0 * a.subs, 512 * a.subs, bar);
    } else {
        tma_load(to, &p.b[0], bar, k * (C::ROW / 2), t.n0, t.e);
        for (int i = 0; i < a.subs; i++, s += a.scales_sub) bulk_load(to + C::SCALES + 512 * i, s + t.n0, 512, bar);
    }
    if (C::GATHER) return;
    int u = 0;
    for (; u + 4 <= t.units; u += 4) tma_load(to + C::TOKENS + u * 2048, &p.a, bar, k * 64, 0, t.row0 + 16 * u);
    for (; u < t.units; u++) tma_load(to + C::TOKENS + u * 2048, &p.a16, bar, k * 64, 0, t.row0 + 16 * u);
}
template <class C> DEV void coded_load_lora(const Sm90Args &p, const TokenTile &t, int k, uint32_t to, uint32_t bar)
{
    mbar_expect(bar, C::A_BYTES + t.units * 2048);
    if constexpr (C::UP) tma_load5_to(to, &p.lora_b[0], bar, k * 64, t.n0 / 8, t.e, false);
    else if constexpr (C::TURNED)
        for (int i = 0; i < 2; i++) tma_load(to + i * 8192, &p.lora_b[0], bar, t.n0 + 64 * i, k * 64, t.e);
    else tma_load(to, &p.lora_b[0], bar, k * 64, t.n0, t.e);
    int u = 0;
    for (; u + 4 <= t.units; u += 4) tma_load(to + C::TOKENS + u * 2048, &p.lora, bar, k * 64, 0, t.row0 + 16 * u);
    for (; u < t.units; u++) tma_load(to + C::TOKENS + u * 2048, &p.lora16, bar, k * 64, 0, t.row0 + 16 * u);
}

template <class C> DEV void coded_producer(const Sm90CodedArgs &a, TokenRing ring)
{
    const Sm90Args &p = a.p;
    const int thread = threadIdx.x, lora_steps = p.lora_steps + (p.lora_tail != 0);
    CodedScheduler<C> sched(p);
    int s = 0, phase = 1;
    auto next = [&] {
        if (++s == C::STAGES) s = 0, phase ^= 1;
    };
    if constexpr (!C::GATHER) {
        if (thread != 0) return;
        TokenTile t;
        while (sched.next(t))
            for (int k = 0; k < p.k_steps + lora_steps; k++, next()) {
                mbar_wait(ring.empty + 8 * s, phase);
                if (k < p.k_steps) coded_load<C>(a, t, k, ring.base + s * C::STAGE, ring.full + 8 * s);
                else coded_load_lora<C>(p, t, k - p.k_steps, ring.base + s * C::STAGE, ring.full + 8 * s);
            }
    } else {
        // As in gemm_rows.cuh: 8 lanes a row of 128 bytes, thread t has row t/8 of every unit.
        const int row = thread / 8, c = thread & 7;
        const uint32_t dst = ring.base + C::TOKENS + row * 128 + ((c ^ (row & 7)) << 4);
        TokenTile t, ahead;
        uint32_t at[C::MAX_UNITS]; // of each row's token, in 16 bytes
        const uint32_t pitch = (uint32_t)(p.ldx / 8);
        bool more = sched.next(ahead);
        while (more) {
            t = ahead;
#pragma unroll
            for (int i = 0; i < C::MAX_UNITS; i++)
                at[i] = (uint32_t)p.tok[t.row0 + row + 16 * min(i, t.units - 1)] * pitch;
            more = sched.next(ahead);
            for (int k = 0; k < p.k_steps + lora_steps; k++, next()) {
                mbar_wait(ring.empty + 8 * s, phase);
                if (thread == 0 && k < p.k_steps) coded_load<C>(a, t, k, ring.base + s * C::STAGE, ring.full + 8 * s);
                if (thread == 0 && k >= p.k_steps)
                    coded_load_lora<C>(p, t, k - p.k_steps, ring.base + s * C::STAGE, ring.full + 8 * s);
                const uint4 *const x = (const uint4 *)p.x + k * 8 + c;
#pragma unroll
                for (int i = 0; i < C::MAX_UNITS; i += 4) { // a few rows more than there are cost less than to ask
                    if (k >= p.k_steps || i >= t.units) break;
#pragma unroll
                    for (int j = i; j < i + 4; j++) cp_async16(dst + s * C::STAGE + j * 2048, x + at[j]);
                }
                cp_async_arrive(ring.full + 8 * s);
            }
            if constexpr (C::DH)
                for (int first = 0; first < t.units; first += DH_UNITS, next()) {
                    mbar_wait(ring.empty + 8 * s, phase);
                    if (thread == 0) dh_load<C>(p, t, first, ring.base + s * C::STAGE, ring.full + 8 * s);
                    cp_async_arrive(ring.full + 8 * s);
                }
        }
    }
}

// ---- The consumers ----

template <class C> struct CodedConsumer {
    const Sm90Args &p;
    const TokenRing ring;
    const int wg, warp, lane;
    CodedFragments<C> fragment;
    CodedScheduler<C> sched;
    TokenTile ahead; // the tile after the present one
    bool more = false;
    int s = 0, phase = 0;
    uint32_t turn = 0;
    float acc[C::MAX_N / 2] = {}; // as in gemm_rows.cuh

    DEV CodedConsumer(const Sm90CodedArgs &a, TokenRing r)
        : p(a.p), ring(r), wg(warp_index() / 4 - 1), warp(warp_index() % 4), lane(threadIdx.x % 32),
          fragment(a, wg, warp, lane), sched(a.p)
    {
    }
    DEV void release(int slot)
    {
        __syncwarp(); // every lane has read its codes
        if (lane == 0) mbar_arrive(ring.empty + 8 * slot);
    }
    DEV void advance()
    {
        if (++s == C::STAGES) s = 0, phase ^= 1;
    }
    template <int N> DEV void multiply()
    {
        uint32_t f[2][2][4];
        int last = 0;
        const int look = min(1, p.k_steps - 1);
        // True. Without branches ptxas moves decoding over wgmma_wait, is then short of registers, and serialises all.
        const bool always = fragment.a.subs;
        auto begin = [&] { // a stage
            mbar_wait(ring.full + 8 * s, phase);
            if (C::GATHER) fence_async();
            if (always) fragment.load(ring.base + s * C::STAGE, 0);
        };
        begin();
        for (int k = 0; k < p.k_steps; k++) {
            const uint32_t stage = ring.base + s * C::STAGE;
            const uint64_t tokens = descriptor_k(stage + C::TOKENS);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                if (always) fragment.decode(f[half]);
                wgmma_fence();
#pragma unroll
                for (int q = 0; q < 2; q++)
                    wgmma_a<N>(acc, f[half][q], tokens + (2 * half + q) * 2, (k | half | q) != 0);
                wgmma_commit();
                // What the next products need is on its way before these are waited for.
                if (half == 0) {
                    if (always) fragment.load(stage, 1);
                    if (k == look) more = sched.next(ahead);
                } else if (k + 1 < p.k_steps) {
                    const int slot = s;
                    advance();
                    begin();
                    wgmma_wait<1>();
                    last = slot;
                    continue;
                }
                wgmma_wait<1>();
                if (half == 0 && k) release(last);
            }
        }
        last = s;
        advance();
        auto adapter = [&](auto depth) { // depth: of 16
            mbar_wait(ring.full + 8 * s, phase);
            const uint32_t stage = ring.base + s * C::STAGE, a = stage + wg * 8192;
            const uint64_t factor = descriptor_k(a), tokens = descriptor_k(stage + C::TOKENS);
            if constexpr (C::TURNED) { // through registers too: the order of features is that of the codes
#pragma unroll 1
                for (int kk = 0; kk < depth.value; kk++) {
                    wgmma_wait<0>();
                    fragment.factor_n(a, kk, f[0][0]);
                    wgmma_fence();
                    wgmma_a<N>(acc, f[0][0], tokens + kk * 2, 1);
                    wgmma_commit();
                }
                wgmma_wait<0>();
            } else {
                wgmma_fence();
#pragma unroll
                for (int kk = 0; kk < depth.value; kk++) wgmma<bf16, N, 0, 0>(acc, factor + kk * 2, tokens + kk * 2, 1);
            }
            wgmma_commit();
            wgmma_wait<1>();
            release(last);
            last = s;
            advance();
        };
        for (int k = 0; k < p.lora_steps; k++) adapter(std::integral_constant<int, 4>());
        if (p.lora_tail) adapter(std::integral_constant<int, 1>());
        wgmma_wait<0>();
        release(last);
        wgmma_pin<N / 2>(acc);
    }
    DEV void multiply_any(int units)
    {
        switch ((units + 1) / 2) {
        case 1: return multiply<32>();
        case 2: return multiply<64>();
        case 3: return multiply<96>();
        case 4: return multiply<128>();
        case 5: return multiply<160>();
        case 6: return multiply<192>();
        case 7: return multiply<224>();
        default: return multiply<256>();
        }
    }
    // Units first ... of 64 features through shared memory, turned, then by TMA. write(buffer): this warp's part.
    template <class F> DEV void put(const TokenTile &t, int first, const CUtensorMap (&maps)[2], int x, int y, F write)
    {
        const uint32_t buffer = ring.base + C::STAGING + (C::UP ? 0 : wg * 2 * C::BUFFER) + (turn++ & 1) * C::BUFFER;
        const bool storing = warp == 0 && lane == 0 && (!C::UP || wg == 0);
        const int bar = C::UP ? 1 : 1 + wg, threads = C::UP ? 256 : 128;
        if (storing) tma_wait_read<1>();
        bar_sync(bar, threads);
        write(buffer);
        fence_async();
        bar_sync(bar, threads);
        if (!storing) return;
        if (first + C::PIECE <= t.units) tma_store(&maps[1], buffer, x, y, t.row0 + 16 * first);
        else
            for (int u = 0; first + u < t.units; u++)
                tma_store(&maps[0], buffer + u * 2048, x, y, t.row0 + 16 * (first + u));
        tma_commit();
    }
    DEV void store(const TokenTile &t)
    {
        const int token = lane & 15, x = t.n0 + (C::UP ? 0 : 64 * wg);
        float low = 0, high = 0; // biases of this lane's two features, or of its gate and its up
        if (p.bias) {
            const bf16 *const b = (const bf16 *)p.bias + (size_t)t.e * p.bias_g;
            const int f = x + (C::UP ? 8 * (wg * 4 + warp) + lane / 4 : coded_feature<C>(warp, lane / 4)),
                      more = C::UP       ? 0
                             : C::TURNED ? 1
                                         : 8;
            if (f < p.N) low = to_float(b[f * p.bias_n]);
            if (f + more < p.N) high = to_float(b[(f + more) * p.bias_n + (C::UP ? p.bias_up : 0)]);
        }
#pragma unroll
        for (int piece = 0; piece < C::PIECES; piece++) {
            const int first = piece * C::PIECE;
            if (first >= t.units) break;
            if constexpr (C::UP) {
                // A warp has 8 features: two units at a time, 16 tokens each. value(i): of accumulators i and i + 2.
                auto features = [&](auto value) {
                    return [&, value](uint32_t buffer) {
                        const uint32_t at =
                            buffer + (lane >> 4) * 2048 + token * 128 + (((wg * 4 + warp) ^ (token & 7)) << 4);
#pragma unroll
                        for (int u = 0; u < C::PIECE; u += 2) {
                            if (first + u >= t.units) break; // and fewer registers, where both were computed at once
                            const int i = 8 * (first + u);
                            stmatrix4_t(at + u * 2048, pack2<bf16>(value(i), value(i + 1)),
                                        pack2<bf16>(value(i + 4), value(i + 5)),
                                        pack2<bf16>(value(i + 8), value(i + 9)),
                                        pack2<bf16>(value(i + 12), value(i + 13)));
                        }
                    };
                };
                // As gemm_tokens.cuh has it, where smooth activations without a bias have an epilogue of their own.
                const bool plain = !p.bias && p.act.kind <= FAST_TANH;
                auto gate = [&](int i) { return plain ? acc[i] : acc[i] + low; };
                auto up = [&](int i) { return plain ? acc[i + 2] : acc[i + 2] + high; };
                auto put_act = [&](auto kind) {
                    put(t, first, p.d, x, 0,
                        features([&](int i) { return fast_value<kind.value, true>(p.act, gate(i), up(i)); }));
                };
                if (p.keep_h) {
                    put(t, first, p.h, x, 0, features(gate));
                    put(t, first, p.h, x, 1, features(up));
                }
                if (plain) with_smooth(p.act, put_act);
                else if (p.act.kind == FAST_ERF) put_act(std::integral_constant<int, FAST_ERF>());
                else if (p.act.kind == FAST_RELU) put_act(std::integral_constant<int, FAST_RELU>());
                else if (p.act.kind == FAST_TANH) put_act(std::integral_constant<int, FAST_TANH>());
                else put_act(std::integral_constant<int, FAST_CLAMP>()); // SwiGLU with a bias too
            } else if constexpr (C::TURNED) {
                put(t, first, p.d, x, 0, [&](uint32_t buffer) {
                    const int feature = coded_feature<C>(warp, lane / 4), row = lane % 4 * 2;
                    const uint32_t even = buffer + coded_word(row, feature),
                                   odd = buffer + coded_word(row + 1, feature);
#pragma unroll
                    for (int u = 0; u < 2 * C::PIECE; u++) { // of eight tokens
                        const float *v = acc + 4 * (2 * first + u);
                        put_word(even + u * 1024, pack2<bf16>(v[0] + low, v[2] + high));
                        put_word(odd + u * 1024, pack2<bf16>(v[1] + low, v[3] + high));
                    }
                });
            } else {
                put(t, first, p.d, x, 0, [&](uint32_t buffer) {
                    const uint32_t at = buffer + token * 128 + (((2 * warp + (lane >> 4)) ^ (token & 7)) << 4);
#pragma unroll
                    for (int u = 0; u < C::PIECE; u++) {
                        const float *v = acc + 8 * (first + u);
                        stmatrix4_t(at + u * 2048, pack2<bf16>(v[0] + low, v[1] + low),
                                    pack2<bf16>(v[4] + low, v[5] + low), pack2<bf16>(v[2] + high, v[3] + high),
                                    pack2<bf16>(v[6] + high, v[7] + high));
                    }
                });
            }
        }
    }
    DEV void run()
    {
        more = sched.next(ahead);
        while (more) {
            const TokenTile t = ahead.uniform();
            fragment.expert(t.e);
            multiply_any(t.units);
            if constexpr (C::DH)
                with_kind(p.act, [&](auto kind) { dh_store<C, kind.value>(p, t, ring, acc, s, phase, turn); });
            else store(t);
        }
        if (warp == 0 && lane == 0) tma_wait<0>();
    }
};

template <class C>
__global__ void __launch_bounds__(C::THREADS, 1) coded_sm90_kernel(const __grid_constant__ Sm90CodedArgs a)
{
    extern __shared__ __align__(1024) uint8_t smem[];
    const Sm90Args &p = a.p;
    const uint32_t base = smem_u32(smem), control = base + C::CONTROL;
    const TokenRing ring = {base, control, control + 64};
    if (threadIdx.x == 0) {
        for (int s = 0; s < C::STAGES; s++) {
            mbar_init(ring.full + 8 * s, C::GATHER ? 129 : 1);
            mbar_init(ring.empty + 8 * s, 8); // consumer warps
        }
        fence_barrier_init();
        tma_prefetch(&p.b[0]);
        tma_prefetch(&p.d[0]);
    }
    begin_product(p);
    if (p.off_shared)
        for (int i = threadIdx.x; i <= p.E; i += C::THREADS) ((int *)(smem + C::OFFSETS))[i] = p.off[i];
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<C::REG_PRODUCER>();
        coded_producer<C>(a, ring);
    } else {
        registers_up<C::REG_CONSUMER>();
        CodedConsumer<C>(a, ring).run();
    }
}
