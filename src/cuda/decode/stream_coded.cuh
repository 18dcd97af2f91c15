// SPDX-License-Identifier: Apache-2.0
// stream_coded.cuh - a Source (stream.cuh) of quantised weights [out,in]: codes and scales come through the ring, and
// are decoded in registers, each weight rounded to the plan's dtype as dequant.cu rounds it. So the results have the
// bits of the large products on decoded weights.
//
// Of each 16 of k a lane has four neighbours, not two and two: their codes are one load, and so are those of a token.
// (The order inside 16 does not matter, stream.cuh.) Two codes of 4 bits are one byte, and a table in shared memory has
// both values of each: 16 copies, so that no two lanes want different lines of one bank.
#pragma once
#include "cuda/quant/values.cuh"
#include "stream.cuh"

// ---- Codes ----

// A byte of two codes is worth two values: of each byte a table has both, in as many copies as lanes may ask at once.
template <class Entry> struct Nibbles {
    static constexpr int BITS = 4, CHUNK = 256, TABLE = 32768, COPIES = TABLE / 256 / (int)sizeof(Entry);
    typedef uint16_t Word;
    static DEV void prepare(const CodedMatrix &m, char *table)
    {
        for (int i = threadIdx.x; i < 256 * COPIES; i += DECODE_THREADS) {
            const int b = i / COPIES, low = b & 15, high = b >> 4;
            const float first = m.table[m.high_first ? high : low], second = m.table[m.high_first ? low : high];
            if constexpr (sizeof(Entry) == 8) ((float2 *)table)[i] = make_float2(first, second);
            else ((uint32_t *)table)[i] = pack2<bf16>(first, second);
        }
    }
    // Of the lower byte of w, and of the upper one. What is added to table is one shift and one LOP3.
    static DEV Entry lower(const char *table, int lane, uint32_t w) { return entry(table, lane, w << 7); }
    static DEV Entry upper(const char *table, int lane, uint32_t w) { return entry(table, lane, w >> 1); }
    static DEV Entry entry(const char *table, int lane, uint32_t at)
    {
        static_assert(COPIES * sizeof(Entry) == 128, "bytes from one entry to the next");
        return *(const Entry *)(table + ((at & 0x7f80) | (uint32_t)lane % COPIES * (uint32_t)sizeof(Entry)));
    }
};
typedef Nibbles<float2> Nibbles4;   // any values
typedef Nibbles<uint32_t> NibblesX; // values that bf16 has (E2M1); scales of E8M0 are exact in it too

enum ByteKind { BYTE_E4M3, BYTE_S8, BYTE_ANY };
template <int KIND> struct Bytes {
    static constexpr int BITS = 8, CHUNK = 128, TABLE = 0;
    typedef uint32_t Word;
    static DEV void prepare(const CodedMatrix &, char *) {}
};

// Values of the four codes of a lane, in f32, as (code - the constant zero point).
static DEV void code_values(Nibbles4, const CodedMatrix &, const char *table, int lane, uint16_t w, float (&v)[4])
{
    const float2 a = Nibbles4::lower(table, lane, w), b = Nibbles4::upper(table, lane, w);
    v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y;
}
template <int KIND>
static DEV void code_values(Bytes<KIND>, const CodedMatrix &m, const char *, int, uint32_t w, float (&v)[4])
{
    if (KIND == BYTE_S8 || (KIND == BYTE_ANY && m.code == FMOE_CODE_S8)) {
#pragma unroll
        for (int i = 0; i < 4; i++) { // 2^23 + 128 + code: a conversion takes four times as long
            const float f = __uint_as_float(__byte_perm(w ^ 0x80808080u, 0x4b000000u, 0x7440u + (uint32_t)i));
            v[i] = f - 8388736.f;
            if (KIND == BYTE_ANY) v[i] = v[i] - m.zero;
        }
        return;
    }
    const float2 a = e4m3_pair((uint16_t)w), b = e4m3_pair((uint16_t)(w >> 16));
    v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y;
}

// ---- The source ----

// PER: 16s of k that have one scale, of kind KIND, with no zeros and (but for INT8) no second scale; 0: any kind, any
// number, with or without them.
template <class T, DecodeProduct P, class Code, int KIND, int PER, int ROWS_> struct CodedSource {
    typedef CodedParams Params;
    static constexpr bool PLAIN = PER > 0, BY_EXPERT = false, PACKED = std::is_same_v<Code, NibblesX>,
                          TWICE = !PLAIN || std::is_same_v<Code, Bytes<BYTE_S8>>; // bitsandbytes' 1/127
    static constexpr int ROWS = ROWS_, HALF = ROWS / 2, LANES = 32 / ROWS; // of a tile; that bring a row's scales
    static constexpr int MT = 1, CHUNK = Code::CHUNK, UNITS = CHUNK / 16, LINE = CHUNK * Code::BITS / 8,
                         PITCH = LINE + 16;
    // Words of scales that a row has of a chunk; those of bytes may begin inside of a word.
    static constexpr int WORDS = !PLAIN ? 5 : KIND == SCALE_F32 ? UNITS / PER : UNITS / PER / 4 + 1;
    static constexpr int SCALES = ROWS * WORDS * 4, STAGE = ROWS * PITCH + (PLAIN ? 1 : 2) * SCALES,
                         EXTRA = Code::TABLE, FACTOR = LINE / 2, PITCH_PAD = 32;
    struct Tile {
        const char *codes[2]; // this lane's pieces of the first half of the rows and of the others
        const char *grid[2];  // scales and zeros of row lane / LANES
        const T *factor[2];
        int64_t step, factor_step; // bytes, elements, from row to row
    };
    const StreamProduct<P> p;
    const Params &params;
    const StreamWarp warp;
    const char *table;
    float scale2;
    int low[2][2]; // of scales and zeros, of this lane's rows: the address, as far as words have bytes
    DEV CodedSource(const DecodeArgs &a, const Params &of, const StreamWarp &w) : p{a}, params(of), warp(w) {}

    // With few slots an expert has few: less room for tokens, more for weights on their way.
    static __host__ DEV int most(const DecodeArgs &a) { return most_tokens(a, a.R <= a.E ? 4 : 8); }
    DEV void prepare(char *extra) { table = extra, Code::prepare(params.m, extra); }
    DEV int tiles() const { return p.gated() ? p.features() / HALF : (p.features() + ROWS - 1) / ROWS; }

    // Row i of tile g. The last of 16 may have eight rows: they come again.
    DEV int row_of(int g, int i) const
    {
        if (p.gated()) return (int)((HALF * g + i % HALF) * p.a.gate + (i < HALF ? 0 : p.a.up));
        return ROWS * g + (ROWS * g + i < p.features() ? i : i - HALF);
    }
    DEV const char *grid_row(const CodedGrid &of, int e, int row) const
    {
        return (const char *)of.p + (e * of.g + group_row(params.m, row) * of.r) * scale_bytes(of.kind);
    }
    DEV Tile tile(int e, int g) const
    {
        const CodedMatrix &m = params.m;
        constexpr int PIECES = LINE / 16; // of a row
        const int lane = warp.lane, in = lane / PIECES;
        Tile t = {};
        t.step = p.gated() ? p.a.gate * m.r : m.r;
#pragma unroll
        for (int i = 0; i < 2; i++)
            t.codes[i] = (const char *)m.codes + e * m.g + row_of(g, HALF * i) * m.r + in * t.step + lane % PIECES * 16;
        t.grid[0] = grid_row(m.scale, e, row_of(g, lane / LANES));
        if (!PLAIN && m.zeros.p) t.grid[1] = grid_row(m.zeros, e, row_of(g, lane / LANES));
        if (p.adapted()) {
            const DecodeLora &lora = p.lora();
            t.factor_step = p.gated() ? p.a.gate * lora.b_r : lora.b_r;
#pragma unroll
            for (int i = 0; i < 2; i++)
                t.factor[i] = (const T *)lora.b + e * lora.b_g + row_of(g, HALF * i) * lora.b_r + in * t.factor_step +
                              lane % PIECES * 8;
        }
        return t;
    }
    // Some bytes from p on, and what is before them in their first word, to shared memory.
    DEV void ask_words(uint32_t to, const char *from, int bytes) const
    {
        const char *const end = from + bytes, *word = (const char *)((uintptr_t)from & ~(uintptr_t)3);
        word += warp.lane % LANES * 4, to += warp.lane % LANES * 4;
#pragma unroll
        for (int i = 0; i < WORDS; i += LANES, word += LANES * 4, to += LANES * 4)
            if (word < end) cp_async4(to, word, (int)min((int64_t)4, (int64_t)(end - word)));
    }
    DEV void ask_scales(int stage, const Tile &t, int k) const
    {
        const uint32_t to = warp.at(stage) + ROWS * PITCH + warp.lane / LANES * WORDS * 4;
        const int first = k >> params.shift, end = (min(k + CHUNK, p.k()) - 1) >> params.shift; // groups
        if constexpr (KIND == SCALE_F32) {
#pragma unroll
            for (int i = 0; i < WORDS; i += LANES) {
                const int word = i + warp.lane % LANES;
                if (word < WORDS && first + word <= end) cp_async4(to + word * 4, t.grid[0] + (first + word) * 4, 4);
            }
        } else {
            const int size = scale_bytes(kind()), other = scale_bytes(params.m.zeros.kind);
            ask_words(to, t.grid[0] + first * size, (end - first + 1) * size);
            if (!PLAIN && params.m.zeros.p)
                ask_words(to + SCALES, t.grid[1] + first * other, (end - first + 1) * other);
        }
    }
    DEV void ask(int stage, const Tile &t, int step) const
    {
        constexpr int PIECES = LINE / 16, AT_ONCE = 32 / PIECES; // of a row; rows
        const int piece = warp.lane % PIECES, k = step * CHUNK;
        const uint32_t to = warp.at(stage) + warp.lane / PIECES * PITCH + piece * 16;
        if (k >= p.k()) {
            const int first = (step - (p.k() + CHUNK - 1) / CHUNK) * FACTOR;
            if (first + piece * 8 < p.lora().rank)
#pragma unroll
                for (int i = 0; i < ROWS; i += AT_ONCE)
                    cp_async16(to + i * PITCH, t.factor[i / HALF] + i % HALF * t.factor_step + first, true);
            return;
        }
        if (k + piece * (128 / Code::BITS) < p.k())
#pragma unroll
            for (int i = 0; i < ROWS; i += AT_ONCE)
                cp_async16(to + i * PITCH, t.codes[i / HALF] + i % HALF * t.step + step * LINE, true);
        ask_scales(stage, t, k);
    }

    // ---- Decoding ----

    DEV ScaleKind kind() const { return PLAIN ? (ScaleKind)KIND : params.m.scale.kind; }
    DEV void begin(int e, int g)
    {
        const CodedMatrix &m = params.m;
        if (TWICE) scale2 = m.scale2 ? m.scale2[e * m.scale2_g] : 1.f;
#pragma unroll
        for (int j = 0; j < ROWS / 8; j++) {
            const int row = row_of(g, warp.lane / 4 + 8 * j);
            low[0][j] = KIND == SCALE_F32 ? 0 : (int)((uintptr_t)grid_row(m.scale, e, row) & 3);
            low[1][j] = PLAIN || !m.zeros.p ? 0 : (int)((uintptr_t)grid_row(m.zeros, e, row) & 3);
        }
    }
    // The scale or zero point of unit j of the chunk at k, from the words that ask_words brought.
    DEV float value(ScaleKind kind, const char *words, int low, int k, int j) const
    {
        const int skipped = kind == SCALE_F32 ? 0 : (low + (k >> params.shift) * scale_bytes(kind)) & 3;
        return scale_value(words + skipped, kind, PLAIN ? j / PER : 16 * j >> params.shift);
    }
    // Four weights of a row, (code - zero) * scale * scale2.
    DEV void decode(typename Code::Word w, float scale, float zero, uint32_t &first, uint32_t &second) const
    {
        if constexpr (PACKED) {
            const uint32_t two = pack2<bf16>(scale, scale);
            first = scaled(Code::lower(table, warp.lane, w), two);
            second = scaled(Code::upper(table, warp.lane, w), two);
        } else {
            float v[4];
            code_values(Code(), params.m, table, warp.lane, w, v);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (!PLAIN && params.m.zeros.p) v[i] = v[i] - zero;
                v[i] = __fmul_rn(v[i], scale);
                if (TWICE && (PLAIN || params.m.scale2)) v[i] = __fmul_rn(v[i], scale2); // by 1: nothing changes
            }
            first = pack2<T>(v[0], v[1]), second = pack2<T>(v[2], v[3]);
        }
    }
    static DEV uint32_t scaled(uint32_t a, uint32_t b)
    {
        const __nv_bfloat162 v = __hmul2(*(const __nv_bfloat162 *)&a, *(const __nv_bfloat162 *)&b);
        return *(const uint32_t *)&v;
    }
    DEV void chunk(int stage, int most, int step, int n, float (&acc)[1][4]) const
    {
        const int q = warp.lane % 4, row = warp.lane / 4;
        const char *const from = warp.stage(stage), *const token = from + STAGE +
                                                                   min(row, most - 1) * (CHUNK * 2 + PITCH_PAD) + q * 8;
        if (step * CHUNK >= p.k()) {
#pragma unroll 1
            for (int j = 0; 16 * j < n; j++) {
                uint2 b = *(const uint2 *)(token + 32 * j), f[2] = {};
#pragma unroll
                for (int i = 0; i < ROWS / 8; i++)
                    f[i] = *(const uint2 *)(from + (row + 8 * i) * PITCH + 32 * j + q * 8);
                if (16 * j + 4 * q >= n) b = f[0] = f[1] = make_uint2(0, 0); // of the last 16 there may be eight
                const uint32_t v[4] = {f[0].x, f[1].x, f[0].y, f[1].y};
                mma16816<T>(acc[0], v, b.x, b.y);
            }
            return;
        }
        const char *const grid = from + ROWS * PITCH + row * WORDS * 4;
        const int same = (1 << min(params.shift, 30)) - 1; // 16s of k that begin with another scale have none of these
        float scale[2], zero[2] = {};
        const auto unit = [&](int j) {
            uint32_t v[4] = {};
#pragma unroll
            for (int i = 0; i < ROWS / 8; i++) {
                if (PLAIN ? j % PER == 0 : !(16 * j & same)) {
                    const char *const at = grid + i * 8 * WORDS * 4;
                    scale[i] = value(kind(), at, low[0][i], step * CHUNK, j);
                    if (!PLAIN && params.m.zeros.p)
                        zero[i] = value(params.m.zeros.kind, at + SCALES, low[1][i], step * CHUNK, j);
                }
                const auto w =
                    *(const typename Code::Word *)(from + (row + 8 * i) * PITCH + (16 * j + 4 * q) * Code::BITS / 8);
                decode(w, scale[i], zero[i], v[i], v[2 + i]);
            }
            const uint2 b = *(const uint2 *)(token + 32 * j);
            mma16816<T>(acc[0], v, b.x, b.y);
        };
        if (n == CHUNK) {
#pragma unroll
            for (int j = 0; j < CHUNK / 16; j++) unit(j);
        } else {
#pragma unroll 1
            for (int j = 0; 16 * j < n; j++) unit(j);
        }
    }
    template <class F> DEV void rows(int g, const float (&v)[1][4], F f) const
    {
        tile_rows<ROWS>(g, p.features(), v, f);
    }
    template <class F> DEV void pairs(int g, const float (&v)[1][4], F f) const { tile_pairs<ROWS>(g, v, f); }
};

template <class T, DecodeProduct P, class Code, int KIND, int PER, int ROWS>
static void run_tiles(const DecodeArgs &a, const CodedParams &params, const Plan *plan, Stream &s)
{
    typedef CodedSource<T, P, Code, KIND, PER, ROWS> Source;
    const int64_t tiles = fmoe_min(a.R, a.E) * fmoe_ceil_div(params.m.N, ROWS);
    if (tiles) launch_decode<Source>(a, params, decode_kernel<T, P, Source>, tiles, plan, s);
}

template <class T, DecodeProduct P, class Code, int KIND, int PER>
static void run_coded(const DecodeArgs &a, const CodedParams &params, const Plan *plan, Stream &s)
{
    if constexpr (PER > 0)
        if (small_tiles(fmoe_min(a.R, a.E) * fmoe_ceil_div(params.m.N, 16), plan))
            return run_tiles<T, P, Code, KIND, PER, 8>(a, params, plan, s);
    run_tiles<T, P, Code, KIND, PER, 16>(a, params, plan, s);
}
