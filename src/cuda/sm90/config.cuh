// SPDX-License-Identifier: Apache-2.0
// config.cuh - what the roles of gemm_rows.cuh's kernel agree on: the shape of a product, its tiles and their order.
#pragma once
#include "sched.cuh"

// A_T*: the contraction runs over rows (weight gradients).
enum ASource { A_ROWS, A_GATHER, A_T, A_T_GATHER };
// Weights stored [n,k], or gates and ups of two such; [k,n], or gates and ups of two such, or gate and up of a feature
// as neighbours; rows.
enum BSource { B_KMAJOR, B_GLU, B_NMAJOR, B_GLU_N, B_PAIRS_N, B_T, B_T_GATHER };
enum Epilogue { EPI_STORE, EPI_GLU, EPI_DGLU, EPI_STORE_F32 };

template <class T_, int BM_, int BN_, int STAGES_, ASource A_, BSource B_, Epilogue EPI_> struct Config {
    typedef T_ T;
    static constexpr int BM = BM_, BN = BN_, STAGES = STAGES_;
    static constexpr ASource A = A_;
    static constexpr BSource B = B_;
    static constexpr Epilogue EPI = EPI_;
    static constexpr bool TOKENS = false, F32 = EPI == EPI_STORE_F32;
    static constexpr bool WGRAD = A >= A_T, GATHER_A = A == A_GATHER || A == A_T_GATHER, GATHER_B = B == B_T_GATHER,
                          GATHER = GATHER_A || GATHER_B;
    static constexpr bool EPI_WG = EPI == EPI_DGLU;  // a warpgroup of its own does the epilogue
    static constexpr bool RAGGED = WGRAD && !GATHER; // an expert's rows begin and end anywhere
    static constexpr int TA = WGRAD, TB = B >= B_NMAJOR;
    static constexpr int WG_M = BM / 2, SUB = WG_M / 64; // rows of a consumer warpgroup
    static constexpr int A_BYTES = BM * 128, B_BYTES = BN * 128, STAGE = A_BYTES + B_BYTES;
    static constexpr int STAGING = EPI_WG ? BN * 32 : 4096; // bytes of a consumer warp
    static constexpr int THREADS = EPI_WG ? 512 : 384;
    static constexpr int STAGING_AT = STAGES * STAGE;
    // barriers, then what rows of da are to be multiplied by (16 a consumer warp), then offsets.
    static constexpr int CONTROL = STAGING_AT + 8 * STAGING, FACTORS = CONTROL + 256,
                         OFFSETS = FACTORS + (EPI_WG ? 8 * 64 : 0), SMEM = OFFSETS;
    static constexpr int COLS = EPI == EPI_GLU ? BN / 2 : BN;         // columns of the result in a tile
    static constexpr int BOXES = B <= B_GLU && !EPI_WG ? 2 : BN / 64; // of weights
    static constexpr int TX_BYTES = STAGE - (GATHER_A ? A_BYTES : 0) - (GATHER_B ? B_BYTES : 0);
    static constexpr int REG_PRODUCER = EPI_WG   ? 56
                                        : GATHER ? 72
                                        : RAGGED ? 56
                                                 : 40,
                         REG_CONSUMER = EPI_WG   ? 144
                                        : GATHER ? 216
                                        : RAGGED ? 224
                                                 : 232,
                         REG_EPILOGUE = 168;
    static constexpr int GROUP = 8; // row tiles (or pairs) walked before the next column tile
};

struct Tile {
    // Steps of 64 in k and `tail` more of 16: the last rows of an expert, or of an adapter's rank.
    int e, part, m0, n0, steps, tail, row0, end;
    // ragged: of the last step, the first row that is not the expert's; 0: none.
    int past;
    int share_a, share_b, live;
};

// Walks the tiles of this cluster: a fixed order, the same for every role, from the offsets alone.
template <class C> struct Scheduler {
    const Sm90Args &p;
    int u, e = 0, base = 0;
    const int rank, cols;
    DEV Scheduler(const Sm90Args &args)
        : p(args), u(blockIdx.x / 2), rank(cluster_rank()), cols((p.N + C::COLS - 1) / C::COLS)
    {
    }
    // Groups of rows; in a group columns outside, rows inside.
    static DEV void order(int r, int rows, int cols, int &m, int &n)
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
            t.steps = p.k_steps * p.parts + p.lora_steps;
            t.tail = p.lora_tail;
            t.m0 = t.row0 = offset_of<C>(p, e) + m * C::BM;
            t.end = offset_of<C>(p, e + 1);
        }
        t.e = e;
        t.n0 = n * C::COLS;
        u += gridDim.x / 2;
        return true;
    }
};

struct Ring {
    uint32_t base, full, empty; // of shared memory
};
