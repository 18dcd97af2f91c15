// SPDX-License-Identifier: Apache-2.0
// stream.cuh - few tokens times weights that are read once, with the bits of the large products.
//
// Those add 16 of k at a time, in their order; wgmma and mma.sync give the same bits, whichever operand is on which
// side, and for any order inside 16. So a warp has 16 or more rows of the result and all of k, as one chain of mma.sync
// m16n8k16 for each 16: weights on that side, up to 8 tokens on the other. A ring of its own in shared memory has the
// next chunks of its weights on their way; nothing in a warp's way waits for another warp.
//
// The tokens come through the ring too: a load from global memory would come back after the weights that all warps of
// the multiprocessor asked for before it. (So measured: up to 1.6 times the time.)
//
// Where the weights come from is a Source (stream_kmajor.cu, stream_nmajor.cu and stream_coded.cuh have one each):
//   Params          a launch parameter                MT      16s of rows of a tile; ROWS: those that are there
//   Tile            where a tile's weights are        CHUNK   elements of k that are asked for at once
//   STAGE           bytes of a chunk in shared memory; EXTRA: bytes of a block's own beside its stages
//   FACTOR          elements of an adapter's rank that are asked for at once
//   PITCH_PAD       bytes after each token in shared memory
//   BY_EXPERT       tiles of an expert are neighbours in memory, so a block should have them
//   most(a)         tokens of a stage, eight at most
//   prepare(extra)  called by all threads, before anything is waited for
//   tiles()         tiles of an expert's matrix       tile(e, g)   the g-th
//   ask(stage, tile, step)        begins to bring chunk `step`; those after the last of k are the adapter's
//   begin(e, g)                   the next chunks are of this tile
//   chunk(stage, most, step, n, acc)  up to eight tokens times chunk `step`, n of k
//   rows(g, v, f), pairs(g, v, f) calls f(row, values of two tokens), f(feature, gates, ups) for what this lane has
#pragma once
#include "decode.cuh"
#include "cuda/sm80/mma.cuh"

enum DecodeProduct { UP, DOWN, LORA_UP, LORA_DOWN };

static constexpr int MOST_STAGES = 8; // of a ring

// What a Source has of shared memory.
struct StreamWarp {
    const char *buffer; // stages one after the other
    int bytes;          // of a stage: weights, then tokens
    int lane;
    DEV const char *stage(int i) const { return buffer + i * bytes; }
    DEV uint32_t at(int i) const { return smem_u32(stage(i)); }
};

// When all copies of this lane but those of the last n stages have arrived.
DEV void wait_for_all_but(int n)
{
    switch (n) {
    case 0: return cp_async_wait<0>();
    case 1: return cp_async_wait<1>();
    case 2: return cp_async_wait<2>();
    case 3: return cp_async_wait<3>();
    case 4: return cp_async_wait<4>();
    case 5: return cp_async_wait<5>();
    case 6: return cp_async_wait<6>();
    default: return cp_async_wait<7>();
    }
}
static_assert(MOST_STAGES == 8, "stages to wait for");

template <DecodeProduct P> struct StreamProduct {
    const DecodeArgs &a;
    DEV const DecodeLora &lora() const { return a.lora[P == DOWN || P == LORA_DOWN]; }
    DEV bool adapted() const { return (P == UP || P == DOWN) && lora().rank; }
    DEV bool gated() const { return P == UP && a.gated; }
    DEV int k() const { return (int)(P == UP || P == LORA_UP ? a.H : a.I); }
    DEV int features() const { return P == UP ? (int)a.I : P == DOWN ? (int)a.H : lora().rank; } // of the result
};

// Tokens of a stage. Lines of shared memory lie so that what a warp reads at once is in different banks.
template <class Source> struct StreamTokens {
    static constexpr int PITCH = Source::CHUNK * 2 + Source::PITCH_PAD;
    // With the weights.
    static __host__ DEV int stage_bytes(const DecodeArgs &a) { return Source::STAGE + Source::most(a) * PITCH; }
};
static __host__ DEV int most_tokens(const DecodeArgs &a, int64_t n) { return (int)(a.T < n ? a.T : n); }

// Up to eight tokens times a chunk of n of k, of weights in shared memory: source.fragment(stage, j, m, v) is the j-th
// 16 of k of the m-th 16 rows, as mma.sync wants it.
template <class T, class Source>
DEV void stream_chunk(const Source &source, int stage, int most, int n, float (&acc)[Source::MT][4])
{
    constexpr int UNITS = Source::CHUNK / 16;
    static_assert(UNITS % 2 == 0, "tokens are loaded for two units");
    const int lane = source.warp.lane;
    const uint32_t tokens =
        source.warp.at(stage) + Source::STAGE + min(lane % 8, most - 1) * StreamTokens<Source>::PITCH + lane / 8 * 16;
    const auto unit = [&](int j, uint32_t b0, uint32_t b1, bool whole) {
#pragma unroll
        for (int m = 0; m < Source::MT; m++) {
            uint32_t v[4];
            source.fragment(stage, j, m, v);
            if (!whole) v[2] = v[3] = b1 = 0; // of the last 16 there are eight
            mma16816<T>(acc[m], v, b0, b1);
        }
    };
    const auto two = [&](int j, int left) {
        uint32_t b[4];
        ldmatrix4<false>(tokens + j * 32, b);
        unit(j, b[0], b[1], left > 8);
        if (left > 16) unit(j + 1, b[2], b[3], left > 24);
    };
    if (n == Source::CHUNK) {
#pragma unroll
        for (int j = 0; j < UNITS; j += 2) two(j, 32);
    } else {
#pragma unroll 1
        for (int j = 0; 16 * j < n; j += 2) two(j, n - 16 * j);
    }
}

// ---- Tiles of 16 rows, or of eight ----

// Of one token a warp to every 16 rows is too few warps: what each does one after the other takes longer than to read
// its weights. With eight rows there are twice as many, and half of every mma.sync is zeros. A tile of a gated up has
// as many rows of the gates as of the ups. What a lane has of a tile's results:
template <int ROWS, class F> DEV void tile_rows(int g, int features, const float (&v)[1][4], F f)
{
    const int row = ROWS * g + threadIdx.x % 32 / 4;
    f(row, {v[0][0], v[0][1]});
    if (ROWS == 16 && row + 8 < features) f(row + 8, {v[0][2], v[0][3]});
}
template <int ROWS, class F> DEV void tile_pairs(int g, const float (&v)[1][4], F f)
{
    const int row = threadIdx.x % 32 / 4;
    if (ROWS == 16) return f(8 * g + row, {v[0][0], v[0][1]}, {v[0][2], v[0][3]});
    const float up[2] = {__shfl_xor_sync(~0u, v[0][0], 16), __shfl_xor_sync(~0u, v[0][1], 16)}; // of row + 4
    if (row < 4) f(4 * g + row, {v[0][0], v[0][1]}, up);
}
// Whether tiles of eight rows, twice as many as these of 16, are no more than warps that the card has.
static inline bool small_tiles(int64_t tiles, const Plan *plan) { return 2 * tiles <= 2 * DECODE_WARPS * plan->sms; }

// ---- What follows a tile ----

// This lane's two tokens of eight: slots, and whether they are there.
struct TwoTokens {
    int slot[2];
    bool there[2];
    DEV TwoTokens(int slot_of, int tokens)
    {
        const int q = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 2; i++) slot[i] = __shfl_sync(~0u, slot_of, 4 * (2 * q + i)), there[i] = 2 * q + i < tokens;
    }
};

template <class T, class Source>
DEV void store_up(const DecodeArgs &a, const Source &s, int e, int g, const TwoTokens &of,
                  const float (&v)[Source::MT][4])
{
    const auto bias = [&](int64_t at) {
        return a.b1.p ? load_float(a.b1.p, a.b1.dtype, e * a.b1.s0 + at * a.b1.s1) : 0.f;
    };
    const auto h = [&](float x) { return a.round_h ? to_float(from_float<T>(x)) : x; };
    const auto to = [&](int i, int f) { return (T *)a.a + of.slot[i] * a.I + f; };
    with_kind(a.fast, [&](auto kind) {
        if (a.gated)
            s.pairs(g, v, [&](int f, const float(&gate)[2], const float(&up)[2]) {
                const float b0 = bias(f * a.gate), b1 = bias(f * a.gate + a.up);
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (of.there[i])
                        *to(i, f) = from_float<T>(fast_value<kind.value, true>(a.fast, h(gate[i] + b0), h(up[i] + b1)));
            });
        else
            s.rows(g, v, [&](int f, const float(&x)[2]) {
                const float b = bias(f);
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (of.there[i]) *to(i, f) = from_float<T>(fast_value<kind.value, false>(a.fast, h(x[i] + b), 1.f));
            });
    });
}

template <class T, class Source>
DEV void store_down(const DecodeArgs &a, const Source &s, int e, int g, const TwoTokens &of,
                    const float (&v)[Source::MT][4])
{
    s.rows(g, v, [&](int c, const float(&x)[2]) {
        const float b = a.b2.p ? load_float(a.b2.p, a.b2.dtype, e * a.b2.s0 + c * a.b2.s1) : 0.f;
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (of.there[i]) ((T *)a.y)[of.slot[i] * a.H + c] = from_float<T>(x[i] + b);
    });
}

// Ranks over 64 are another kernel's there (lora_rows.cu), which rounds before the scale too.
template <class T, class Source>
DEV void store_lora(const DecodeLora &lora, const Source &s, int g, const TwoTokens &of,
                    const float (&v)[Source::MT][4])
{
    s.rows(g, v, [&](int j, const float(&x)[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float y = lora.rank > 64 ? to_float(from_float<T>(x[i])) : x[i];
            if (of.there[i]) ((T *)lora.rows)[of.slot[i] * lora.rank + j] = from_float<T>(y * lora.scale);
        }
    });
}

// out of all tokens, columns c0 to c0 + n, from y: in the order and with the roundings of combine.cu. By a warp.
template <class T> DEV void add_slots(const DecodeArgs &a, const Hits &h, int c0, int n)
{
    constexpr int AHEAD = 8;
    const int lane = threadIdx.x % 32;
    for (int i = lane; i < (int)a.T * (n / 4); i += 32) {
        const int t = i / (n / 4), c = c0 + i % (n / 4) * 4;
        if (c >= a.H) continue;
        float s[4] = {};
        for (int j0 = 0; j0 < a.k; j0 += AHEAD) {
            uint2 v[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
                if (j0 + j < a.k && h.id[t * a.k + j0 + j] >= 0)
                    v[j] = __ldcg((const uint2 *)((const T *)a.y + (t * a.k + j0 + j) * a.H + c));
#pragma unroll
            for (int j = 0; j < AHEAD; j++)
                if (j0 + j < a.k && h.id[t * a.k + j0 + j] >= 0) {
                    const float w = load_float(a.p.p, a.p.dtype, t * a.p.s0 + (j0 + j) * a.p.s1);
                    const float2 lo = unpack2<T>(v[j].x), hi = unpack2<T>(v[j].y);
                    s[0] = fmaf(w, lo.x, s[0]), s[1] = fmaf(w, lo.y, s[1]);
                    s[2] = fmaf(w, hi.x, s[2]), s[3] = fmaf(w, hi.y, s[3]);
                }
        }
        T *const out = (T *)a.out + t * a.out_r + c;
#pragma unroll
        for (int q = 0; q < 4; q++) out[q] = from_float<T>(a.add ? s[q] + to_float(out[q]) : s[q]);
    }
}

// y of an expert's tile is written: whether all experts' are.
DEV bool last_of_columns(const DecodeArgs &a, const Hits &h, int g)
{
    int before = 0;
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        __threadfence();
        before = atomicAdd(&a.done[g], 1);
        __threadfence();
    }
    return __shfl_sync(~0u, before, 0) == h.count - 1;
}

// ---- The kernel ----

// A block has an equal piece of the line of all tiles, `warps` of it take them in turn, each with a ring of `stages`.
template <class T, DecodeProduct P, class Source>
__global__ void __launch_bounds__(DECODE_THREADS, 2)
    decode_kernel(const __grid_constant__ DecodeArgs a, const __grid_constant__ typename Source::Params params,
                  int warps, int stages)
{
    extern __shared__ __align__(128) char shared[];
    typedef StreamTokens<Source> Tokens;
    constexpr int COLUMNS = Source::ROWS; // of a tile of down
    const int most = Source::most(a), bytes = Tokens::stage_bytes(a);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const StreamProduct<P> m = {a};
    Source source(a, params, StreamWarp{shared + Source::EXTRA + warp * stages * bytes, bytes, lane});
    source.prepare(shared);
    // Ids and x come from the launch before. An adapter's launch before up waited for it, and up for all of down's.
    bool waited = P == LORA_UP || (P == UP && !m.adapted());
    if (waited) depend_wait();
    depend_launch();
    const Hits h = find_experts(a, shared + Source::EXTRA + warps * stages * bytes);
    const int groups = source.tiles(), total = groups * h.count, k = m.k(), rank = m.adapted() ? m.lora().rank : 0,
              chunks = (k + Source::CHUNK - 1) / Source::CHUNK,
              steps = chunks + (rank + Source::FACTOR - 1) / Source::FACTOR;
    const int begin = (int)((int64_t)total * blockIdx.x / gridDim.x) + warp,
              end = warp < warps ? (int)((int64_t)total * (blockIdx.x + 1) / gridDim.x) : 0;
    if (P == UP && blockIdx.x == 0)
        for (int i = threadIdx.x; i < (a.H + 7) / 8; i += DECODE_THREADS) a.done[i] = 0;
    // Of down all experts of some columns come one after the other, so that sums over them are made as it goes.
    constexpr bool ACROSS = P == DOWN && !Source::BY_EXPERT;
    const auto hit_of = [&](int i) { return ACROSS ? i % h.count : i / groups; };
    const auto group_of = [&](int i) { return ACROSS ? i / h.count : i % groups; };
    const auto elements = [&](int step) {
        return step < chunks ? min(Source::CHUNK, k - step * Source::CHUNK)
                             : min(Source::FACTOR, rank - (step - chunks) * Source::FACTOR);
    };

    constexpr bool FIRST = P == UP || P == LORA_UP; // else the tokens are results of the launch before
    // What is asked for next. More tokens of an expert than a stage has: its weights come again. What a tile needs is
    // found out once: what a warp does for a chunk is in the way of what it computes.
    struct Next {
        int i, step, from;
        int there;      // tokens
        bool last;      // of the expert
        int slot;       // of token from + lane % 8
        const T *token; // that one
        typename Source::Tile tile;
    };
    Next next = {begin};
    const auto ask = [&](int stage, bool weights, bool tokens) {
        if (next.i >= end) return;
        if (next.step == 0) {
            const int hit = hit_of(next.i), left = h.slots[hit] - next.from;
            next.there = min(most, left), next.last = left <= most;
            next.slot = h.slot(hit, next.from + lane % 8);
            next.token = FIRST ? (const T *)a.x + next.slot / a.k * a.x_r : (const T *)a.a + next.slot * a.I;
            next.tile = source.tile(h.id[h.first[hit]], group_of(next.i));
        }
        if (weights) source.ask(stage, next.tile, next.step);
        if (tokens) {
            constexpr int PIECES = Source::CHUNK / 8;
            const int piece = lane % PIECES;
            const bool lora = next.step >= chunks;
            const T *from = next.token + next.step * Source::CHUNK;
            if (lora) {
                if (!waited) depend_wait(), waited = true;
                from = (const T *)m.lora().rows + next.slot * rank + (next.step - chunks) * Source::FACTOR;
            }
            const bool in = piece * 8 < elements(next.step);
            const uint32_t to = source.warp.at(stage) + Source::STAGE + piece * 16;
            for (int r = 0; r < next.there; r += 32 / PIECES) {
                const int row = r + lane / PIECES;
                const T *const token = (const T *)__shfl_sync(~0u, (unsigned long long)from, row % 8);
                if (in && row < next.there) cp_async16(to + row * Tokens::PITCH, token + piece * 8, true);
            }
        }
        if (++next.step < steps) return;
        next.step = 0, next.from += most;
        if (next.last) next.from = 0, next.i += warps;
    };
    if (!FIRST) {
        for (int s = 0; s < stages; s++) ask(s, true, false);
        depend_wait(), waited = true;
        next = {begin};
    }
    for (int s = 0; s < stages; s++) ask(s, FIRST, true), cp_async_commit();

    int stage = 0;
    for (int i = begin; i < end; i += warps) {
        const int hit = hit_of(i), g = group_of(i), e = h.id[h.first[hit]], tokens = h.slots[hit];
        source.begin(e, g);
        for (int from = 0; from < tokens; from += most) {
            float acc[Source::MT][4] = {};
#pragma unroll 1
            for (int step = 0; step < steps; step++) {
                wait_for_all_but(stages - 1);
                __syncwarp();
                source.chunk(stage, most, step, elements(step), acc);
                __syncwarp();
                ask(stage, true, true);
                cp_async_commit();
                if (++stage == stages) stage = 0;
            }
            const TwoTokens of(h.slot(hit, from + lane / 4), min(most, tokens - from));
            if constexpr (P == UP) store_up<T>(a, source, e, g, of, acc);
            else if constexpr (P == DOWN) store_down<T>(a, source, e, g, of, acc);
            else store_lora<T>(m.lora(), source, g, of, acc);
        }
        if (P == DOWN && last_of_columns(a, h, g)) add_slots<T>(a, h, COLUMNS * g, COLUMNS);
    }
    if (!waited) depend_wait();
    if (P == DOWN && h.count == 0) // no slot names an expert
        for (int g = warp * gridDim.x + blockIdx.x; g < groups; g += DECODE_WARPS * gridDim.x)
            add_slots<T>(a, h, COLUMNS * g, COLUMNS);
}

// `tiles`: at most. Two blocks fit a multiprocessor of 9.0.
template <class Source, class Kernel>
static void launch_decode(const DecodeArgs &a, const typename Source::Params &params, Kernel kernel, int64_t tiles,
                          const Plan *plan, Stream &s)
{
    const int bytes = StreamTokens<Source>::stage_bytes(a), hits = Hits::bytes_of(a.R, a.E) + Source::EXTRA,
              blocks = Source::BY_EXPERT && tiles <= DECODE_WARPS * plan->sms ? 1 : 2,
              grid = (int)fmoe_min(tiles, blocks * plan->sms),
              room = (int)fmoe_min((int64_t)plan->shared, (int64_t)112 * 1024) - hits;
    const int warps =
        (int)fmoe_max(1, fmoe_min(fmoe_min(fmoe_ceil_div(tiles, grid), DECODE_WARPS), room / (2 * bytes)));
    const int stages = (int)fmoe_min(room / (warps * bytes), MOST_STAGES);
    const size_t shared = (size_t)(hits + warps * stages * bytes);
    if (shared > 48 * 1024) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    launch(s, Product::DECODE, kernel, Grid{(unsigned)grid, DECODE_THREADS, shared}, a, params, warps, stages);
}
