// SPDX-License-Identifier: Apache-2.0
// tiles.cuh - tiles of the fast general products: their order, and their operands on the way into shared memory.
//
// An operand in shared memory is a row of 128 bytes for each of its rows (64 of k), or for each k in turns of 64 of its
// columns, eight 16-byte chunks each, chunk c of line r at c ^ (r & 7): ldmatrix, transposed or not, reads eight lines
// of one chunk and meets every bank once.
#pragma once
#include "mma.cuh"
#include "product.cuh"

enum MmaB { MMA_B_K, MMA_B_N, MMA_B_GLU_K, MMA_B_GLU_N, MMA_B_ROWS };
enum MmaEpilogue { MMA_STORE, MMA_GLU, MMA_PAIRS, MMA_ACT, MMA_DGLU };

template <class T_, MmaB B_, MmaEpilogue EPI_> struct MmaConfig {
    typedef T_ T;
    static constexpr MmaB B = B_;
    static constexpr MmaEpilogue EPI = EPI_;
    static constexpr bool WGRAD = B == MMA_B_ROWS, GLU = B == MMA_B_GLU_K || B == MMA_B_GLU_N;
    static constexpr bool TA = WGRAD, TB = B == MMA_B_N || B == MMA_B_GLU_N || WGRAD; // lines are k
    static constexpr int COLS = GLU ? MMA_BN / 2 : MMA_BN;                            // of N in a tile
};

struct MmaTile {
    int e, part, row0, rows; // rows of the tile; weight gradients: rows of the expert
    int m0, n0, m, there;    // first row and column of the result, its rows; whether there is a tile
};

// What the warps of a block share beside the stages: the next tiles, which they find in turns, and how far each is in
// that.
static constexpr int MMA_TILES = 16, MMA_AHEAD = 6;
struct MmaShared {
    uint64_t full[4], empty[4]; // of each stage: all copies are there; all warps have read it
    MmaTile tile[MMA_TILES];
    int64_t base[8];
    int u[8], e0[8];
};
static_assert(sizeof(MmaShared) <= MMA_EXTRA, "see product.cuh");

DEV void mma_order(int r, int rows, int cols, int &m, int &n) // groups of 8 row tiles, in them columns outside
{
    const int g = r / (8 * cols), size = min(8, rows - g * 8);
    r -= g * 8 * cols;
    n = r / size;
    m = g * 8 + r - n * size;
}

// The next tile that is this warp's to find, every eighth of this block: experts in order. Lane i looks at expert e0 +
// i.
template <class C> DEV void mma_find(const MmaArgs &p, MmaShared &s, int slot, int warp, int lane)
{
    MmaTile t = {};
    int m, n, e0 = s.e0[warp], u = s.u[warp];
    int64_t base = s.base[warp];
    const int cols = (p.N + C::COLS - 1) / C::COLS;
    if constexpr (C::WGRAD) {
        const int per = (p.M + MMA_BM - 1) / MMA_BM, rows = per * p.m_parts;
        t.e = u / (rows * cols);
        t.there = t.e < p.E;
        if (t.there) {
            t.row0 = p.off ? __ldg(p.off + t.e) : 0;
            t.rows = p.off ? __ldg(p.cnt + t.e) : p.R;
            mma_order(u - t.e * rows * cols, rows, cols, m, n);
            t.part = m >= per;
            t.m0 = (m - t.part * per) * MMA_BM;
            t.m = min(MMA_BM, p.M - t.m0);
        }
    } else {
        while (e0 < p.E) {
            const int e = e0 + lane;
            int first = 0, count = 0;
            if (e < p.E) {
                first = p.off ? __ldg(p.off + e) : 0;
                count = (p.off ? __ldg(p.off + e + 1) : p.R) - first;
            }
            const int tiles = (count + MMA_BM - 1) / MMA_BM;
            int64_t sum = (int64_t)tiles * cols;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int64_t o = __shfl_up_sync(~0u, sum, d);
                if (lane >= d) sum += o;
            }
            const unsigned here = __ballot_sync(~0u, u < base + sum);
            if (!here) {
                base += __shfl_sync(~0u, sum, 31);
                e0 += 32;
                continue;
            }
            const int at = __ffs(here) - 1, all = __shfl_sync(~0u, tiles, at);
            const int64_t before = __shfl_sync(~0u, sum, at) - (int64_t)all * cols;
            mma_order((int)(u - base - before), all, cols, m, n);
            t.e = e0 + at;
            t.row0 = __shfl_sync(~0u, first, at) + m * MMA_BM;
            t.rows = t.m = min(MMA_BM, __shfl_sync(~0u, count, at) - m * MMA_BM);
            t.there = 1;
            break;
        }
    }
    if (t.there) t.n0 = n * C::COLS;
    __syncwarp();
    if (lane == 0) s.u[warp] = u + 8 * gridDim.x, s.base[warp] = base, s.e0[warp] = e0, s.tile[slot] = t;
}

DEV const char *mma_matrix(const MmaMatrix &w, int e) { return w.list ? (const char *)w.list[e].p : w.p + e * w.g; }

// 16 bytes. Not ALL: nothing where outside the tile, zeros past the contraction.
template <bool ALL> DEV void mma_copy(uint32_t dst, const char *src, bool inside, bool there)
{
    if (ALL) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
    else if (inside)
        asm volatile(
            "{\n.reg .pred p;\nsetp.eq.u32 p, %2, 0;\ncp.async.cg.shared.global [%0], [%1], 16, p;\n}" ::"r"(dst),
            "l"(src), "r"((int)there)
            : "memory");
}

// Copies the steps of all tiles into the stages, four pieces a step: a quarter of A and a quarter of B each. What is
// past the contraction is zero; what is past the result's rows and columns is not there. A thread has chunk tid % 8 of
// lines tid / 8 + 32 i.
template <class C> struct MmaLoader {
    const char *a[C::WGRAD ? 2 : 4], *b, *b1; // weight gradients: of the step's two lines, b and b1 too
    int step;                                 // of b, from a thread's line to its next
    int row[C::WGRAD ? 2 : 4];                // tokens: of the next tile's lines; weight gradients: of the next step's
    uint32_t dst, stage, phase;
    int left; // of the contraction's part; 0 or less: the next part or tile begins
    int cols; // i or blocks of B that are inside
    int tile, part;
    int groups; // of 32 rows that the tile has, the others are not multiplied; 8 more where it has columns outside
    bool live;  // whether there is a tile
    DEV MmaLoader(const MmaArgs &p, const MmaShared &s, uint32_t base)
        : stage(0), phase(0), left(0), tile(0), part(0), groups(8), live(true)
    {
        const int line = threadIdx.x / 8, chunk = threadIdx.x % 8;
        dst = base + line * 128 + ((chunk ^ (line & 7)) << 4);
        if (!C::WGRAD) tokens(p, s.tile[0]);
    }
    // A tile without rows looks at one, as the list has some after its end. Weight gradients past the last step: as
    // well.
    DEV void tokens(const MmaArgs &p, const MmaTile &t)
    {
#pragma unroll
        for (int i = 0; i < (C::WGRAD ? 2 : 4); i++) {
            const int line = (C::WGRAD ? t.rows - left : 0) + threadIdx.x / 8 + 32 * i;
            if (p.tok) row[i] = __ldg(p.tok + t.row0 + max(0, min(line, t.rows - 1)));
        }
    }
    DEV void begin(const MmaArgs &p, const MmaShared &s)
    {
        const MmaTile &t = s.tile[tile % MMA_TILES];
        const int line = threadIdx.x / 8, chunk = threadIdx.x % 8;
        live = t.there;
        const bool whole = live && t.n0 + C::COLS <= p.N && (!C::WGRAD || t.m0 + MMA_BM <= p.M);
        groups = (C::WGRAD ? 0 : (t.rows + 31) / 32) + (whole ? 0 : 8);
        if (!live) return;
        const MmaPart &q = p.part[part];
        if constexpr (C::WGRAD) {
            left = t.rows;
            cols = (p.N - t.n0 - chunk * 8 + 63) / 64;
            step = (p.M - t.m0 - chunk * 8 + 63) / 64; // blocks of A
            tokens(p, t);
            tile++;
        } else {
            left = q.k;
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[i] = q.a + (q.gather ? row[i] : t.row0 + min(line + 32 * i, t.rows - 1)) * q.lda + chunk * 16;
            const int which = C::B == MMA_B_GLU_K ? line >> 3 & 1 : C::B == MMA_B_GLU_N ? chunk & 1 : 0;
            const MmaMatrix &w = q.b[which];
            const int first = C::TB ? t.n0 + (C::GLU ? chunk >> 1 : chunk) * 8
                                    : t.n0 + (C::GLU ? (line >> 4) * 8 + (line & 7) : line);
            constexpr int each = C::TB ? (C::GLU ? 32 : 64) : (C::GLU ? 16 : 32);
            cols = (p.N - first + each - 1) / each;
            b = mma_matrix(w, t.e) + (C::TB ? line * w.pitch + first * 2 : first * w.pitch + chunk * 16);
            step = (int)((C::TB || !C::GLU ? 32 : 16) * w.pitch);
            if (++part == p.parts) {
                part = 0, tile++;
                tokens(p, s.tile[tile % MMA_TILES]); // they arrive while this one is copied
            }
        }
    }
    DEV int fast_steps() const { return groups < 8 ? max(0, left) / MMA_BK : 0; } // that need no test of a bound
    DEV bool empty(const MmaShared &s) const { return bar_test(smem_u32(s.empty + stage), phase ^ 1); }
    // Piece q of a step whose stage is empty.
    template <bool ALL> DEV void piece(const MmaArgs &p, const MmaShared &s, int q)
    {
        if (!ALL && !live) return;
        const int line = threadIdx.x / 8, chunk8 = threadIdx.x % 8 * 8;
        const uint32_t to = dst + MMA_BM * 128;
        if constexpr (C::WGRAD) {
            const MmaTile &t = s.tile[(tile + MMA_TILES - 1) % MMA_TILES];
            if (q == 0) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int r = t.row0 + max(0, min(t.rows - left + line + 32 * i, t.rows - 1));
                    const int ra = p.part[0].gather ? row[i] : r, rb = p.gather_b ? row[i] : r;
                    a[i] = p.part[0].a + ra * p.part[0].lda + (t.part * p.M + t.m0 + chunk8) * 2;
                    (i ? b1 : b) = p.part[0].b[0].p + rb * p.part[0].b[0].pitch + (int64_t)(t.n0 + chunk8) * 2;
                }
            }
            const bool there[2] = {left > line, left > line + 32};
            mma_copy<ALL>(dst + q * 4096, a[q & 1] + (q >> 1) * 128, (q >> 1) < step, there[q & 1]);
            mma_copy<ALL>(to + 2 * q * 4096, b + q * 128, q < cols, there[0]);
            mma_copy<ALL>(to + (2 * q + 1) * 4096, b1 + q * 128, q < cols, there[1]);
            if (q == 3) {
                left -= MMA_BK;
                tokens(p, t);
            }
        } else {
            const bool there = left > chunk8;
            if (q < (ALL ? groups : groups & 7)) mma_copy<ALL>(dst + q * 4096, a[q], true, there);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int i = 2 * q + j;
                if constexpr (!C::TB) mma_copy<ALL>(to + i * 4096, b + (int64_t)i * step, i < cols, there);
                else
                    mma_copy<ALL>(to + i * 4096, b + (int64_t)j * step + q * (C::GLU ? 64 : 128),
                                  q<cols, left> line + 32 * j);
            }
            if (q == 3) left -= MMA_BK;
        }
    }
    // After the last piece, well behind it: an address is free only when its copy has left the queue.
    template <bool ALL> DEV void advance(const MmaArgs &p)
    {
        if (!ALL && !live) return;
        if constexpr (!C::WGRAD) {
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] += 128;
            b += C::TB ? 2 * (int64_t)step : 128;
        }
        dst += MMA_STAGE;
        if (++stage == (uint32_t)p.stages) stage = 0, phase ^= 1, dst -= p.stages * MMA_STAGE;
    }
};
