// SPDX-License-Identifier: Apache-2.0
// stream_nmajor.cu - inference of few tokens with weights [in,out] of gated experts, same bits: columns of the result
// lie along memory. As stream_kmajor.cu, but that a tile is 32 columns: 64 bytes of each k, or 32 of the gates and 32
// of the ups. A block has neighbours, so that whole lines of memory are asked for at about one time.
#include "stream.cuh"

struct NoParams {
};

template <class T, DecodeProduct P> struct ColumnSource {
    typedef NoParams Params;
    static constexpr bool BY_EXPERT = true;
    static constexpr int MT = 2, ROWS = 32, CHUNK = 64, LINE = 64, STAGE = CHUNK * LINE, EXTRA = 0, FACTOR = CHUNK,
                         PITCH_PAD = 16;
    struct Tile {
        const T *piece; // this lane's of the first k it has
    };
    const StreamProduct<P> m;
    const StreamWarp warp;
    DEV ColumnSource(const DecodeArgs &a, const Params &, const StreamWarp &w) : m{a}, warp(w) {}

    static __host__ DEV int most(const DecodeArgs &a) { return most_tokens(a, 8); }
    DEV void prepare(char *) const {}
    DEV void begin(int, int) const {}
    DEV void chunk(int stage, int most, int, int n, float (&acc)[MT][4]) const
    {
        stream_chunk<T>(*this, stage, most, n, acc);
    }
    DEV bool beside() const { return P == UP && m.a.gate == 2; } // gate and up are neighbours
    DEV int64_t pitch() const { return P == UP ? m.a.w1_r : m.a.w2_r; }
    DEV int tiles() const { return (m.features() * (P == UP ? 2 : 1) + 31) / 32; }
    // Four lanes have the 16-byte pieces of a k. Past the last column: the first again.
    DEV Tile tile(int e, int g) const
    {
        const DecodeArgs &a = m.a;
        const int q = warp.lane % 4, columns = beside() ? 2 * m.features() : m.features();
        int64_t c = 32 * g + 8 * q;
        if (P == UP && !beside()) {
            c = 16 * g + q % 2 * 8;
            if (c >= columns) c = 0;
            if (q >= 2) c += a.up;
        } else if (c >= columns) c = 0;
        return {(const T *)(P == UP ? a.w1 : a.w2) + e * (P == UP ? a.w1_g : a.w2_g) + warp.lane / 4 * pitch() + c};
    }
    DEV static int place(int k, int piece) { return k * LINE + ((piece ^ (k >> 1 & 3)) << 4); }
    DEV void ask(int stage, const Tile &t, int step) const
    {
        const int n = m.k() - step * CHUNK, first = warp.lane / 4;
        const T *const from = t.piece + step * CHUNK * pitch();
        const uint32_t to = warp.at(stage);
#pragma unroll
        for (int i = 0; i < CHUNK; i += 8)
            if (i < n) cp_async16_line(to + place(i + first, warp.lane % 4), from + i * pitch());
    }
    DEV void fragment(int stage, int j, int i, uint32_t (&v)[4]) const
    {
        const int matrix = warp.lane >> 3, k = 16 * j + (warp.lane & 7) + (matrix >> 1) * 8,
                  piece = 2 * i + (matrix & 1);
        ldmatrix4<true>(warp.at(stage) + place(k, piece), v);
    }
    template <class F> DEV void rows(int g, const float (&v)[2][4], F f) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int c = 32 * g + 8 * i + warp.lane / 4;
            if (c < m.features()) f(c, {v[i / 2][i % 2 * 2], v[i / 2][i % 2 * 2 + 1]});
        }
    }
    template <class F> DEV void pairs(int g, const float (&v)[2][4], F f) const
    {
        if (!beside()) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int c = 16 * g + 8 * i + warp.lane / 4;
                if (c < m.features()) f(c, {v[0][2 * i], v[0][2 * i + 1]}, {v[1][2 * i], v[1][2 * i + 1]});
            }
            return;
        }
        // Columns lane / 4 and eight further: lanes of even columns have gates, the others ups. Of two such lanes each
        // takes a feature.
        const bool odd = warp.lane & 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float other[2], gate[2], up[2];
#pragma unroll
            for (int t = 0; t < 2; t++) {
                other[t] = __shfl_xor_sync(~0u, odd ? v[i][t] : v[i][2 + t], 4);
                gate[t] = odd ? other[t] : v[i][t];
                up[t] = odd ? v[i][2 + t] : other[t];
            }
            const int c = 16 * g + 8 * i + warp.lane / 8 + (odd ? 4 : 0);
            if (c < m.features()) f(c, gate, up);
        }
    }
};

template <class T> static void run(const DecodeArgs &a, const Plan *plan, Stream &s)
{
    const int64_t experts = fmoe_min(a.R, a.E);
    typedef ColumnSource<T, UP> Up;
    typedef ColumnSource<T, DOWN> Down;
    launch_decode<Up>(a, NoParams(), decode_kernel<T, UP, Up>, experts * fmoe_ceil_div(2 * a.I, 32), plan, s);
    launch_decode<Down>(a, NoParams(), decode_kernel<T, DOWN, Down>, experts * fmoe_ceil_div(a.H, 32), plan, s);
}

void stream_nmajor_run(const DecodeArgs &a, int dtype, const Plan *plan, Stream &s)
{
    if (dtype == FMOE_BF16) run<bf16>(a, plan, s);
    else run<f16>(a, plan, s);
}
