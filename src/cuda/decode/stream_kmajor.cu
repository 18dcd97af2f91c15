// SPDX-License-Identifier: Apache-2.0
// stream_kmajor.cu - inference of few tokens with weights [out,in] (stream_nmajor.cu: [in,out]), same bits.
//
// Two launches, up with activation and down with the weighted sum; down starts under the tail of up, and asks for
// weights before it waits for up. There is no row map: every block finds the experts that are hit, and their slots,
// from the ids. A tile is 16 or eight rows of an expert's matrix and all of k (stream.cuh). Results have the bits of
// the large products: y is rounded, and whoever is the last to write some columns of it adds up the slots of a token in
// their order, as combine.cu does.
//
// An adapter is a launch more before the product it belongs to, x A^T, and one more chunk of k of that product, with B.
// A weight that is quantised has kernels of its own (stream_coded.cuh).
#include "stream.cuh"

// Rows of 16-bit weights. Tile g of a gated up has rows HALF g and following of the gates and of the ups, any other
// rows ROWS_ g and following.
template <class T, DecodeProduct P, bool LISTS, int ROWS_> struct RowSource {
    typedef std::conditional_t<LISTS, DecodeLists, NoDecodeLists> Params;
    static constexpr bool BY_EXPERT = false;
    static constexpr int MT = 1, ROWS = ROWS_, HALF = ROWS / 2, CHUNK = 128, PITCH = CHUNK * 2 + 16,
                         STAGE = ROWS * PITCH, EXTRA = 0, FACTOR = CHUNK, PITCH_PAD = 16;
    struct Rows { // HALF from `first` on and HALF from `second` on, `step` elements apart
        const T *first, *second;
        int64_t step;
    };
    struct Tile {
        Rows weights, factor;
    };
    const StreamProduct<P> m;
    const Params &lists;
    const StreamWarp warp;
    DEV RowSource(const DecodeArgs &a, const Params &params, const StreamWarp &w) : m{a}, lists(params), warp(w) {}

    static __host__ DEV int most(const DecodeArgs &a) { return most_tokens(a, 8); }
    DEV void prepare(char *) const {}
    DEV void begin(int, int) const {}
    DEV void chunk(int stage, int most, int, int n, float (&acc)[MT][4]) const
    {
        stream_chunk<T>(*this, stage, most, n, acc);
    }
    DEV int tiles() const { return m.gated() ? m.features() / HALF : (m.features() + ROWS - 1) / ROWS; }
    DEV Rows rows_of(const T *first, const T *second, int64_t pitch, int g) const
    {
        if (m.gated()) {
            const int64_t step = m.a.gate * pitch;
            return {first + HALF * g * step, second + HALF * g * step, step};
        }
        first += ROWS * g * pitch;
        // The last of 16 may have eight rows.
        return {first, ROWS * g + HALF < m.features() ? first + HALF * pitch : first, pitch};
    }
    DEV Tile tile(int e, int g) const
    {
        const DecodeArgs &a = m.a;
        const DecodeLora &lora = m.lora();
        Tile t = {};
        if constexpr (P == LORA_UP || P == LORA_DOWN) {
            t.weights = rows_of((const T *)lora.a + e * lora.a_g, nullptr, lora.a_r, g);
        } else {
            const int64_t pitch = P == UP ? a.w1_r : a.w2_r;
            const T *const p = (const T *)(P == UP ? a.w1 : a.w2);
            if constexpr (LISTS)
                t.weights = rows_of(p + (int64_t)lists.at[0][e] * DecodeLists::UNIT,
                                    p + (int64_t)lists.at[1][e] * DecodeLists::UNIT, pitch, g);
            else {
                const T *const first = p + e * (P == UP ? a.w1_g : a.w2_g);
                t.weights = rows_of(first, first + a.up * pitch, pitch, g);
            }
            const T *const b = (const T *)lora.b + e * lora.b_g;
            if (m.adapted()) t.factor = rows_of(b, b + a.up * lora.b_r, lora.b_r, g);
        }
        return t;
    }
    DEV void ask(int stage, const Tile &t, int step) const
    {
        const bool lora = step * CHUNK >= m.k();
        const Rows r = {lora ? t.factor.first : t.weights.first, lora ? t.factor.second : t.weights.second,
                        lora ? t.factor.step : t.weights.step};
        const int k = lora ? 0 : step * CHUNK, n = lora ? m.lora().rank : min(CHUNK, m.k() - k), lane = warp.lane;
        constexpr int PIECES = CHUNK / 8; // two rows at a time
        const int piece = lane % PIECES, second = lane / PIECES;
        const uint32_t to = warp.at(stage) + second * PITCH + piece * 16;
        if (piece * 8 < n)
#pragma unroll
            for (int i = 0; i < ROWS; i += 2) {
                const T *const from = (i < HALF ? r.first : r.second) + (i % HALF + second) * r.step;
                cp_async16(to + i * PITCH, from + k + piece * 8, true);
            }
    }
    DEV void fragment(int stage, int j, int, uint32_t (&v)[4]) const
    {
        const uint32_t from = warp.at(stage) + warp.lane % ROWS * PITCH + j * 32;
        if (ROWS == 16) return ldmatrix4<false>(from + warp.lane / 16 * 16, v);
        ldmatrix2(from + warp.lane / 8 % 2 * 16, v[0], v[2]);
        v[1] = v[3] = 0;
    }
    template <class F> DEV void rows(int g, const float (&v)[1][4], F f) const
    {
        tile_rows<ROWS>(g, m.features(), v, f);
    }
    template <class F> DEV void pairs(int g, const float (&v)[1][4], F f) const { tile_pairs<ROWS>(g, v, f); }
};

template <class T, DecodeProduct P, bool LISTS, int ROWS>
static void run_tiles(const DecodeArgs &a, const DecodeLists *lists, int64_t rows, const Plan *plan, Stream &s)
{
    typedef RowSource<T, P, LISTS, ROWS> Source;
    typename Source::Params params;
    if constexpr (LISTS) params = lists[P == DOWN];
    const int64_t tiles = fmoe_min(a.R, a.E) * fmoe_ceil_div(rows, ROWS);
    if (tiles) launch_decode<Source>(a, params, decode_kernel<T, P, Source>, tiles, plan, s);
}

template <class T, DecodeProduct P, bool LISTS>
static void run_product(const DecodeArgs &a, const DecodeLists *lists, int64_t rows, const Plan *plan, Stream &s)
{
    if constexpr (P == UP || P == DOWN)
        if (small_tiles(fmoe_min(a.R, a.E) * fmoe_ceil_div(rows, 16), plan))
            return run_tiles<T, P, LISTS, 8>(a, lists, rows, plan, s);
    run_tiles<T, P, LISTS, 16>(a, lists, rows, plan, s);
}

template <class T, bool LISTS>
static void run_rows(const DecodeArgs &a, const DecodeLists *lists, const CodedParams *const coded[2], int dtype,
                     const Plan *plan, Stream &s)
{
    run_product<T, LORA_UP, false>(a, nullptr, a.lora[0].rank, plan, s);
    if (coded[0]) stream_coded_run(a, false, *coded[0], dtype, plan, s);
    else run_product<T, UP, LISTS>(a, lists, a.gated ? 2 * a.I : a.I, plan, s);
    run_product<T, LORA_DOWN, false>(a, nullptr, a.lora[1].rank, plan, s);
    if (coded[1]) stream_coded_run(a, true, *coded[1], dtype, plan, s);
    else run_product<T, DOWN, LISTS>(a, lists, a.H, plan, s);
}

void stream_kmajor_run(const DecodeArgs &a, const DecodeLists *lists, const CodedParams *const coded[2], int dtype,
                       const Plan *plan, Stream &s)
{
    if (dtype == FMOE_BF16) (lists ? run_rows<bf16, true> : run_rows<bf16, false>)(a, lists, coded, dtype, plan, s);
    else (lists ? run_rows<f16, true> : run_rows<f16, false>)(a, lists, coded, dtype, plan, s);
}
