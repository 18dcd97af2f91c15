// SPDX-License-Identifier: Apache-2.0
// coded.cuh - few tokens times quantised weights [out,in], with more precision than weights that are rounded one by one
// (stream_coded.cuh has the bits of those): a weight is value(code) * scale, and scales multiply sums in f32.
//
// Codes go from memory to registers, 16 bytes of a row at a time, and become pairs of f16: every value of FP8, INT8,
// INT4 and E2M1 is one, others (NF4, tables) are rounded to its 11 bits. Tokens become f16 too, each multiplied by the
// power of two that brings its largest element to 2^7: exact but for elements below 2^-24 of that one, which keep
// 2^-33 of it. mma.sync m16n8k16 then has 16 rows of weights on one side, and adds up what has one scale.
//
// The four lanes of a row have codes of their own, `LANES` neighbours of a group. So what a mma.sync adds up may have
// 4 / LANES scales; its eight columns are 2 * LANES tokens, as often as there are scales, and zeros where lanes of
// another scale would multiply. A lane then holds sums of its own group, and its own scale is theirs.
//
// A team of warps has 16 rows of one expert at a time, each warp some of k; what the warps add up goes through shared
// memory and is added in their order. A warp's codes of the next 16 rows are on their way while it multiplies these.
#pragma once
#include "coded_batches.cuh"

// ---- The kernel ----

DEV void mma_f16(float (&d)[4], const uint32_t (&v)[2][4], int i, uint32_t b0, uint32_t b1, bool fresh)
{
    if (fresh)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%10,%10,%10,%10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(v[0][i]), "r"(v[1][i]), "r"(v[0][i + 1]), "r"(v[1][i + 1]), "r"(b0), "r"(b1), "f"(0.f));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(v[0][i]), "r"(v[1][i]), "r"(v[0][i + 1]), "r"(v[1][i + 1]), "r"(b0), "r"(b1));
}

// KIND: of scales, -1 any. SHIFT: 2^SHIFT neighbours of a row have one, 0 any number that LANES allows. LANES:
// neighbours, of the four of a row, that have one scale; SCALES: that a lane's 16 bytes have. ROWS: of a tile, 16 or
// (down) eight; then half of a mma.sync is zeros.
template <DecodeProduct P_, class Code_, int KIND_, int SHIFT_, int LANES_, int SCALES_, int ROWS_> struct CodedForm {
    static constexpr DecodeProduct P = P_;
    typedef Code_ Code;
    static constexpr int KIND = KIND_, SHIFT = SHIFT_, LANES = LANES_, SCALES = SCALES_, ROWS = ROWS_;
    static constexpr int HALVES = ROWS / 8, SPAN = 128 / Code::BITS, CHUNK = 4 * SPAN, PIECES = Code::PIECES,
                         COLUMNS = 2 * LANES, MMAS = CODED_TOKENS / COLUMNS, // of a piece
        STEPS = SCALES == 2  ? CODED_STEPS_TWO
                : LANES == 1 ? CODED_STEPS_ONE
                             : CODED_STEPS;
    static constexpr int GROUPS = CHUNK >> SHIFT;                   // of a chunk,
    static constexpr bool EVEN = SHIFT && GROUPS << SHIFT == CHUNK; // which begins with one then
    static_assert(P == DOWN || ROWS == 16, "gates and ups are eight and eight");
};

// 16 bytes of each of a lane's rows, and their scales as they are in memory.
template <class F> struct CodedStage {
    uint4 codes[F::HALVES];
    uint32_t scale[F::HALVES][F::SCALES];
};

template <class F> struct CodedWarp {
    typedef typename F::Code Code;
    static constexpr bool UPWARD = F::P == UP;
    const DecodeArgs &a;
    const CodedFew &f;
    const Batches b;
    const int team, w, lane, q;
    const int first, end, whole; // the warp's chunks: the last of all may not be a whole one
    char *const tokens;          // of the team
    float *const most_of;        // [warps][tokens]
    float *const unit_of;        // [tokens]: what brings a token's sums back
    float4 *const partial;
    const Code code;

    DEV int k() const { return (int)(UPWARD ? a.H : a.I); }
    DEV int features() const { return (int)(UPWARD ? a.I : a.H); }
    DEV void team_sync() const
    {
        if (f.s.team == 1) __syncwarp();
        else asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(32 * f.s.team) : "memory");
    }

    // ---- Weights ----

    struct Place { // of a warp's next chunks
        int batch, tile, left;
        int first; // chunk
        const char *codes[F::HALVES], *scale[F::HALVES];
    };
    // Row i of a tile; the last of 16 may have eight, which come again.
    DEV int row_of(int tile, int i) const
    {
        if (UPWARD && a.gated) return (int)((8 * tile + i % 8) * a.gate + (i < 8 ? 0 : a.up));
        const int row = F::ROWS * tile + i;
        return row < features() ? row : row - 8;
    }
    DEV ScaleKind kind() const { return F::KIND < 0 ? f.m.scale.kind : (ScaleKind)F::KIND; }
    DEV void find(Place &p) const
    {
        const CodedMatrix &m = f.m;
        const int64_t e = b.expert[p.batch];
#pragma unroll
        for (int i = 0; i < F::HALVES; i++) {
            const int row = row_of(p.tile, lane / 4 + 8 * i);
            int group;
            if (f.row_shift >= 0) {
                const bool lower = row >= m.half;
                group = ((lower ? row - m.half : row) >> f.row_shift) + (lower ? m.lower_groups : 0);
            } else group = group_row(m, row);
            p.codes[i] = (const char *)m.codes + e * m.g + row * m.r + first * 64 + q * 16;
            p.scale[i] = (const char *)m.scale.p + (e * m.scale.g + group * m.scale.r) * scale_bytes(kind());
            if (F::EVEN) p.scale[i] += ((first * F::CHUNK + q * F::SPAN) >> F::SHIFT) * scale_bytes(kind());
        }
        p.first = first;
    }
    DEV void next_round(Place &p) const
    {
#pragma unroll
        for (int i = 0; i < F::HALVES; i++) {
            p.codes[i] += F::STEPS * 64;
            if (F::EVEN) p.scale[i] += F::STEPS * F::GROUPS * scale_bytes(kind());
        }
        p.first += F::STEPS;
    }
    DEV uint32_t load_scale(const char *at) const
    {
        const ScaleKind of = kind();
        if (of == SCALE_F32) return __ldg((const uint32_t *)at);
        if (of == SCALE_BF16 || of == SCALE_F16) return __ldg((const uint16_t *)at);
        return __ldg((const uint8_t *)at);
    }
    // Chunk p.first + i; `whole`: all four lanes have codes.
    DEV void load_codes(CodedStage<F> &s, const Place &p, int i, bool whole) const
    {
        const int from = (p.first + i) * F::CHUNK, at = from + q * F::SPAN;
        const bool there = whole || at < k();
#pragma unroll
        for (int h = 0; h < F::HALVES; h++) {
            s.codes[h] = there ? load_weight(p.codes[h] + i * 64) : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int j = 0; j < F::SCALES; j++) {
                if (F::EVEN && whole) {
                    s.scale[h][j] = load_scale(p.scale[h] + i * F::GROUPS * scale_bytes(kind()));
                    continue;
                }
                int group = (F::LANES == 4 ? from : at + j * (F::SPAN / F::SCALES)) >> f.shift;
                if (!whole) group = min(group, (k() - 1) >> f.shift);
                if (F::EVEN) group -= (first * F::CHUNK + q * F::SPAN) >> F::SHIFT;
                s.scale[h][j] = load_scale(p.scale[h] + group * scale_bytes(kind()));
            }
        }
    }
    DEV void load(CodedStage<F> &s, const Place &p, int i) const
    {
        if (p.first + i < whole) load_codes(s, p, i, true);
        else if (p.first + i < end) load_codes(s, p, i, false);
    }
    DEV float scale_of(uint32_t v) const
    {
        switch (kind()) {
        case SCALE_F32: return __uint_as_float(v);
        case SCALE_BF16: return __uint_as_float(v << 16);
        case SCALE_F16: return __half2float(__ushort_as_half((unsigned short)v));
        case SCALE_E8M0: return __uint_as_float(v == 255 ? 0x7fc00000u : v == 0 ? 0x00400000u : v << 23);
        case SCALE_E4M3: return e4m3((uint8_t)v);
        default: return (float)v;
        }
    }

    // ---- Tokens ----

    // Element 8 p of a token is piece p; pieces of a lane lie apart, so that a warp reads without conflicts.
    DEV char *token_at(int t, int p) const
    {
        const int i = p % F::PIECES, of = p / F::PIECES; // lanes, chunk after chunk
        return tokens + (((of / 4 * F::PIECES + i) * f.s.most + t) * 4 + of % 4) * 16;
    }
    static DEV void order(const float (&v)[8], bool high_first, uint32_t (&to)[4])
    {
        constexpr int APART = F::Code::ORDER == FOUR_APART ? 4 : F::Code::ORDER == TWO_APART ? 2 : 1;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int first = APART == 4 ? i : APART == 2 ? i / 2 * 4 + i % 2 : 2 * i;
            to[i] = half2_of(v[first], v[first + APART]);
        }
        if (APART != 4 || !high_first) return;
        const uint32_t even[2] = {to[0], to[2]};
        to[0] = to[1], to[2] = to[3], to[1] = even[0], to[3] = even[1];
    }
    DEV void bring_tokens(int batch) const
    {
        const int count = b.tokens[batch], pieces = k() / 8, all = f.s.chunks * 4 * F::PIECES, step = 32 * f.s.team,
                  mine = 32 * w + lane;
        const auto from = [&](int t) {
            const int slot = b.slot[batch * f.s.most + t];
            return (const uint4 *)(UPWARD ? (const bf16 *)a.x + slot / a.k * a.x_r : (const bf16 *)a.a + slot * a.I);
        };
        for (int t = 0; t < count; t++) {
            const uint4 *const x = from(t);
            float most = 0.f;
            for (int p = mine; p < pieces; p += step) {
                float v[8];
                unpack8<bf16>(x[p], v);
#pragma unroll
                for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(v[i]));
            }
#pragma unroll
            for (int o = 16; o; o /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
            if (lane == 0) most_of[w * f.s.most + t] = most;
        }
        team_sync();
        for (int t = 0; t < count; t++) {
            const uint4 *const x = from(t);
            float most = 0.f;
            for (int i = 0; i < f.s.team; i++) most = fmaxf(most, most_of[i * f.s.most + t]);
            // 2^7 divided by the power of two below the largest; of a token of zeros, or of infinities, one that is.
            const uint32_t by = min(261u - (__float_as_uint(most) >> 23), 250u);
            const float scale = __uint_as_float(by << 23);
            if (mine == 0) unit_of[t] = __uint_as_float((254u - by) << 23) * f.unit;
            for (int p = mine; p < all; p += step) {
                uint32_t to[4] = {};
                if (p < pieces) {
                    float v[8];
                    unpack8<bf16>(x[p], v);
#pragma unroll
                    for (int i = 0; i < 8; i++) v[i] *= scale;
                    order(v, f.m.high_first, to);
                }
                *(uint4 *)token_at(t, p) = make_uint4(to[0], to[1], to[2], to[3]);
            }
        }
        team_sync();
    }

    // ---- Products ----

    // What this lane reads of the tokens of a chunk: the address of the first piece, and how much further the next one
    // is, and the tokens of the next mma.sync.
    struct Reader {
        uint32_t at;
        int piece, mma;
    };
    static DEV uint4 read(uint32_t at)
    {
        uint4 v;
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
        return v;
    }
    DEV Reader reader(const char *zeros) const
    {
        const int column = lane / 4, t = min(column % F::COLUMNS, f.s.most - 1), own = t * 64 + q * 16;
        if (column / F::COLUMNS != q / F::LANES) return {smem_u32(zeros) + own % 128, 0, 0};
        return {smem_u32(tokens) + own, f.s.most * 64, F::COLUMNS * 64};
    }
    // Of the mma.syncs of a piece N, from the FROMth on.
    template <int N, int FROM = 0>
    DEV void multiply(const CodedStage<F> &s, const Reader &r, int chunk, float (&acc)[F::MMAS][4]) const
    {
        const uint32_t at = r.at + chunk * F::PIECES * r.piece + FROM * r.mma;
#pragma unroll
        for (int j = 0; j < F::SCALES; j++) {
            constexpr int EACH = F::PIECES / F::SCALES;
            float part[N][4];
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int p = j * EACH + i;
                uint32_t v[2][4] = {};
#pragma unroll
                for (int h = 0; h < F::HALVES; h++) code.piece(s.codes[h], p, v[h]);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    const uint4 x = read(at + p * r.piece + n * r.mma);
                    mma_f16(part[n], v, 0, x.x, x.y, i == 0);
                    mma_f16(part[n], v, 2, x.z, x.w, false);
                }
            }
            const float first = scale_of(s.scale[0][j]),
                        second = F::HALVES == 2 ? scale_of(s.scale[F::HALVES - 1][j]) : 0.f;
#pragma unroll
            for (int n = 0; n < N; n++) {
                float(&to)[4] = acc[FROM + n];
                to[0] = fmaf(first, part[n][0], to[0]), to[1] = fmaf(first, part[n][1], to[1]);
                if (F::HALVES == 2) to[2] = fmaf(second, part[n][2], to[2]), to[3] = fmaf(second, part[n][3], to[3]);
            }
        }
    }
    // The sums of all groups, so that this lane has tokens 2q and 2q + 1, whichever mma.sync they were of.
    DEV void gather(const float (&acc)[F::MMAS][4], int mmas, float (&v)[4]) const
    {
        const auto other = [](float x, int o) { return __shfl_xor_sync(~0u, x, o); };
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (F::LANES == 4) v[i] = acc[0][i];
            else if constexpr (F::LANES == 2) {
                const bool high = mmas > 1 && q >= 2;
                v[i] = (high ? acc[1][i] : acc[0][i]) + other(mmas > 1 && !high ? acc[1][i] : acc[0][i], 2);
            } else if (mmas == 1) {
                const float two = acc[0][i] + other(acc[0][i], 1);
                v[i] = two + other(two, 2);
            } else {
                const bool odd = q & 1, high = q & 2;
                const float low = (odd ? acc[1][i] : acc[0][i]) + other(odd ? acc[0][i] : acc[1][i], 1),
                            upper = (odd ? acc[3][i] : acc[2][i]) + other(odd ? acc[2][i] : acc[3][i], 1);
                v[i] = (high ? upper : low) + other(high ? low : upper, 2);
            }
        }
    }
    DEV void multiply_all(CodedStage<F> &s, const Reader &r, int chunk, int mmas, float (&acc)[F::MMAS][4]) const
    {
        // Decoded again for some: registers for the sums of all are not there.
        const auto again = [&] {
#pragma unroll
            for (uint4 &v : s.codes) asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
        };
        if (F::MMAS == 1 || F::SCALES == 2 || mmas == 1) multiply<1>(s, r, chunk, acc);
        if constexpr (F::SCALES == 2) {
            if (mmas > 1) again(), multiply<1, 1>(s, r, chunk, acc);
            if (mmas > 2) again(), multiply<1, 2>(s, r, chunk, acc);
            if (mmas > 3) again(), multiply<1, 3>(s, r, chunk, acc);
        } else if constexpr (F::MMAS > 1) {
            if (mmas > 1) multiply<2>(s, r, chunk, acc);
            if constexpr (F::MMAS == 4)
                if (mmas > 2) again(), multiply<2, 2>(s, r, chunk, acc);
        }
    }

    // ---- Results ----

    DEV void scaled(float (&v)[4], int e) const
    {
        const float scale2 = f.m.scale2 ? f.m.scale2[e * f.m.scale2_g] : 1.f;
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = v[i] * unit_of[min(2 * q + (i & 1), f.s.most - 1)] * scale2;
    }
    DEV void store_up(int batch, int tile, float (&v)[4]) const
    {
        const int e = b.expert[batch], row = lane / 4;
        scaled(v, e);
        const auto bias = [&](int64_t at) {
            return a.b1.p ? load_float(a.b1.p, a.b1.dtype, e * a.b1.s0 + at * a.b1.s1) : 0.f;
        };
        const auto store = [&](int i, int feature, float x) {
            if (2 * q + i < b.tokens[batch])
                ((bf16 *)a.a)[b.slot[batch * f.s.most + 2 * q + i] * a.I + feature] = from_float<bf16>(x);
        };
        with_kind(a.fast, [&](auto kind) {
            if (a.gated) {
                const int feature = 8 * tile + row;
                const float b0 = bias(feature * a.gate), b1 = bias(feature * a.gate + a.up);
#pragma unroll
                for (int i = 0; i < 2; i++)
                    store(i, feature, fast_value<kind.value, true>(a.fast, v[i] + b0, v[2 + i] + b1));
            } else {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int feature = 16 * tile + row + 8 * h;
                    if (feature >= a.I) continue;
                    const float b0 = bias(feature);
#pragma unroll
                    for (int i = 0; i < 2; i++)
                        store(i, feature, fast_value<kind.value, false>(a.fast, v[2 * h + i] + b0, 1.f));
                }
            }
        });
    }
    // part: [slots][columns], of the block's columns from tile `first` on.
    DEV void store_down(int batch, int tile, int first, int columns, float *part, float (&v)[4]) const
    {
        scaled(v, b.expert[batch]);
#pragma unroll
        for (int i = 0; i < 2 * F::HALVES; i++) {
            const int t = 2 * q + (i & 1), column = (tile - first) * F::ROWS + lane / 4 + 8 * (i / 2);
            if (t < b.tokens[batch]) part[b.slot[batch * f.s.most + t] * columns + column] = v[i];
        }
    }

    // All items of the team: tiles `begin` to `stop` of a batch, then of the batch `step` further, from `p` on. `ready`
    // is called before the first tokens are read, done(batch, tile, sums) by one warp of the team.
    template <class Ready, class Done>
    DEV void run(Place p, int begin, int stop, int step, const Reader &r, Ready ready, Done done) const
    {
        CodedStage<F> stages[F::STEPS];
        if (p.left > 0) {
            find(p);
#pragma unroll
            for (int i = 0; i < F::STEPS; i++) load(stages[i], p, i);
        }
        ready();
        int staged = -1, item = 0;
        float acc[F::MMAS][4] = {};
        while (p.left > 0) {
            const int batch = p.batch, tile = p.tile, now = p.first;
            const bool last = now + F::STEPS >= end;
            if (last) {
                p.left--;
                if (++p.tile == stop) p.tile = begin, p.batch += step;
                if (p.left > 0) find(p);
                else p.first = end;
            } else next_round(p);
            if (batch != staged) bring_tokens(batch), staged = batch;
            const int mmas = (b.tokens[batch] + F::COLUMNS - 1) / F::COLUMNS;
#pragma unroll
            for (int i = 0; i < F::STEPS; i++) {
                if (now + i < end) multiply_all(stages[i], r, now + i, mmas, acc);
                load(stages[i], p, i);
            }
            if (!last) continue;
            float v[4];
            gather(acc, mmas, v);
#pragma unroll
            for (int n = 0; n < F::MMAS; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[n][i] = 0.f;
            if (f.s.team > 1) {
                // The next item's go elsewhere: whoever adds these does so before it comes to the next barrier.
                float4 *const to = partial + (item & 1) * f.s.team * 32;
                to[w * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
                team_sync();
                if (item % f.s.team == w) {
                    v[0] = v[1] = v[2] = v[3] = 0.f;
                    for (int i = 0; i < f.s.team; i++) {
                        const float4 of = to[i * 32 + lane];
                        v[0] += of.x, v[1] += of.y, v[2] += of.z, v[3] += of.w;
                    }
                    done(batch, tile, v);
                }
            } else done(batch, tile, v);
            item++;
        }
    }
};

template <class F>
__global__ void __launch_bounds__(32 * CODED_WARPS, 1)
    coded_kernel(const __grid_constant__ DecodeArgs a, const __grid_constant__ CodedFew f)
{
    extern __shared__ __align__(128) char shared[];
    typedef CodedRoom Room;
    typedef CodedWarp<F> Warp;
    const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0), lane = threadIdx.x % 32, team = warp / f.s.team;
    F::Code::prepare(f.m, shared);
    char *const zeros = shared + F::Code::TABLE, *const batches = zeros + Room::ZEROS,
                *const sums = batches + Room::batches(f.s, a.R, a.E),
                *const mine = sums + Room::sums(f.s, a.R) + team * Room::team(f.s, F::PIECES);
    if (threadIdx.x < Room::ZEROS / 4) ((uint32_t *)zeros)[threadIdx.x] = 0;
    // Ids and x come from the launch before; up waited for it.
    if (F::P == UP) depend_wait();
    depend_launch();
    const Batches b = find_batches(a, batches, f.s.most);
    const int partials = Room::tokens(f.s, F::PIECES), floats = partials + Room::partials(f.s);
    const int w = warp % f.s.team, steps = w * f.s.steps + f.s.steps;
    const Warp of = {a,
                     f,
                     b,
                     team,
                     w,
                     lane,
                     lane % 4,
                     w * f.s.steps,
                     min(steps, f.s.chunks),
                     min(steps, (int)(F::P == UP ? a.H : a.I) / F::CHUNK),
                     mine,
                     (float *)(mine + floats),
                     (float *)(mine + floats) + f.s.team * f.s.most,
                     (float4 *)(mine + partials),
                     typename F::Code(f, shared)};
    const auto reader = of.reader(zeros);
    if constexpr (F::P == UP) {
        // Every team has an equal piece of the line of all tiles.
        const int tiles = (int)(a.gated ? a.I / 8 : (a.I + 15) / 16), teams = gridDim.x * f.s.teams,
                  at = team * gridDim.x + blockIdx.x;
        const int64_t total = (int64_t)tiles * b.count;
        const int begin = (int)(total * at / teams), end = (int)(total * (at + 1) / teams);
        typename Warp::Place p = {};
        p.batch = begin / tiles, p.tile = begin % tiles, p.left = end - begin;
        of.run(p, 0, tiles, 1, reader, [] {}, [&](int batch, int tile, float(&v)[4]) { of.store_up(batch, tile, v); });
    } else {
        // A block has some columns of all experts, so that it has all of their sums.
        const int tiles = (int)((a.H + F::ROWS - 1) / F::ROWS), first = (int)((int64_t)tiles * blockIdx.x / gridDim.x),
                  end = (int)((int64_t)tiles * (blockIdx.x + 1) / gridDim.x), columns = (end - first) * F::ROWS;
        float *const prob = (float *)sums, *const part = prob + a.R;
        for (int i = threadIdx.x; i < a.R; i += blockDim.x)
            prob[i] = load_float(a.p.p, a.p.dtype, i / a.k * a.p.s0 + i % a.k * a.p.s1);
        typename Warp::Place p = {};
        p.batch = team, p.tile = first, p.left = (b.count - team + f.s.teams - 1) / f.s.teams * (end - first);
        of.run(
            p, first, end, f.s.teams, reader, [] { depend_wait(); },
            [&](int batch, int tile, float(&v)[4]) { of.store_down(batch, tile, first, columns, part, v); });
        __syncthreads();
        for (int i = threadIdx.x; i < (int)a.T * columns; i += blockDim.x) {
            const int t = i / columns, c = i % columns, column = first * F::ROWS + c;
            if (column >= a.H) continue;
            bf16 *const out = (bf16 *)a.out + t * a.out_r + column;
            float s = a.add ? to_float(*out) : 0.f;
            for (int j = t * a.k; j < (t + 1) * a.k; j++) {
                if (b.id[j] < 0) continue;
                const float bias = a.b2.p ? load_float(a.b2.p, a.b2.dtype, b.id[j] * a.b2.s0 + column * a.b2.s1) : 0.f;
                s = fmaf(prob[j], part[j * columns + c] + bias, s);
            }
            *out = from_float<bf16>(s);
        }
    }
}

template <class F> static void launch_coded(const DecodeArgs &a, const CodedFew &f, int blocks, Stream &s)
{
    const size_t shared = (size_t)(F::Code::TABLE + CodedRoom::all(f.s, F::PIECES, a.R, a.E));
    if (shared > 48 * 1024)
        cudaFuncSetAttribute(coded_kernel<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    launch(s, Product::DECODE, coded_kernel<F>, Grid{(unsigned)blocks, (unsigned)(32 * f.s.team * f.s.teams), shared},
           a, f);
}

// The forms that there are: of 4 bits and of 8 bits.
enum CodedKind {
    CODED_TABLE,        // any 16 values, any scales
    CODED_TABLE_F32,    // scales in f32 for 64 (NF4)
    CODED_TABLE_E8M0,   // for 32 (MXFP4)
    CODED_INTEGERS_F32, // less a whole zero point, in f32 for 128 (INT4)
    CODED_FP8,
    CODED_FP8_F32, // for 64 or more
    CODED_INT8,
    CODED_INT8_F32
};
// rows: of a tile of down.
void coded_nibbles_run(const DecodeArgs &a, CodedKind kind, bool down, int rows, const CodedFew &f, int blocks,
                       Stream &s);
void coded_bytes_run(const DecodeArgs &a, CodedKind kind, bool down, int rows, const CodedFew &f, int blocks,
                     Stream &s);

template <class Code, int KIND, int SHIFT, int LANES, int SCALES>
static void launch_form(const DecodeArgs &a, bool down, int rows, const CodedFew &f, int blocks, Stream &s)
{
    if (!down) launch_coded<CodedForm<UP, Code, KIND, SHIFT, LANES, SCALES, 16>>(a, f, blocks, s);
    else if (rows == 16) launch_coded<CodedForm<DOWN, Code, KIND, SHIFT, LANES, SCALES, 16>>(a, f, blocks, s);
    else launch_coded<CodedForm<DOWN, Code, KIND, SHIFT, LANES, SCALES, 8>>(a, f, blocks, s);
}
