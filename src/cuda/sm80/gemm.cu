// SPDX-License-Identifier: Apache-2.0
// gemm.cu - grouped products of any size, stride and dtype: mma.sync on tiles loaded by cp.async where a 16-byte chunk
// is aligned and inside, element by element where it is not. f32, and operands of mixed type, run on plain
// multiply-adds.
//
// rows form:     D[r, n]    = sum_k A[r, k] * B[e][n, k] + bias[e][n]      for the rows r of each expert e
// weight form:   D[e][m, n] = sum over the rows r of e of A[r, m] * B[r, n]
#include "mma.cuh"

static constexpr int BM = FMOE_CUDA_TILE_M, BN = 128, THREADS = 128, STAGES = 3;

// One operand of one block: element (mn, k) of the expert's matrix, whose rows are mn or k.
struct Side {
    const char *p, *p2; // p2: rows from split on
    int64_t s_mn, s_k, s_mn2, s_k2, split, n_mn, n_k;
    const int *gather; // on the rows
    int dtype;
    bool rows_k, k_major, vector;
};

template <class T>
DEV Side make_side(const Mat &m, int dtype, int e, const int *gather, bool rows_k, int64_t row0, int64_t n_mn,
                   int64_t n_k)
{
    Side s;
    const int size = dtype == FMOE_F32 ? 4 : 2;
    int64_t r = m.r, c = m.c;
    const char *p = (const char *)m.p + e * m.g * size, *p2 = p + m.delta * size;
    if (m.list) p = (const char *)m.list[e].p, r = m.list[e].r, c = m.list[e].c, p2 = p;
    int64_t r2 = r, c2 = c;
    if (m.list2) p2 = (const char *)m.list2[e].p, r2 = m.list2[e].r, c2 = m.list2[e].c;
    p += m.skip * r * size, p2 += m.skip * r2 * size;
    s.rows_k = rows_k;
    s.gather = gather ? gather + row0 : nullptr;
    s.split = m.split;
    if (!gather) p += row0 * r * size;
    s.p = p;
    s.p2 = p2;
    s.s_mn = rows_k ? c : r;
    s.s_k = rows_k ? r : c;
    s.s_mn2 = rows_k ? c2 : r2;
    s.s_k2 = rows_k ? r2 : c2;
    s.n_mn = n_mn;
    s.n_k = n_k;
    s.dtype = dtype;
    s.k_major = s.s_k == 1 || s.s_mn != 1;
    constexpr int V = 16 / sizeof(T);
    const int64_t lead = s.k_major ? s.s_mn : s.s_k;
    const bool unit = s.k_major ? s.s_k == 1 : s.s_mn == 1;
    const bool along_rows = s.k_major == rows_k; // chunks run along the rows: gather and split cut them
    const bool cut = gather || (s.split != INT64_MAX && s.split % V != 0);
    s.vector = unit && lead % V == 0 && ((uintptr_t)s.p | (uintptr_t)s.p2) % 16 == 0 && size == (int)sizeof(T) &&
               !(along_rows && cut) && r == r2 && c == c2;
    return s;
}

DEV const char *side_at(const Side &s, int64_t mn, int64_t k, int size)
{
    int64_t row = s.rows_k ? k : mn;
    const int64_t col = s.rows_k ? mn : k;
    const char *p = s.p;
    int64_t sr = s.rows_k ? s.s_k : s.s_mn, sc = s.rows_k ? s.s_mn : s.s_k;
    if (s.gather) row = s.gather[row];
    else if (row >= s.split) {
        p = s.p2, row -= s.split;
        sr = s.rows_k ? s.s_k2 : s.s_mn2, sc = s.rows_k ? s.s_mn2 : s.s_k2;
    }
    return p + (row * sr + col * sc) * size;
}

template <class T> DEV T side_element(const Side &s, int64_t mn, int64_t k)
{
    if (mn >= s.n_mn || k >= s.n_k) return from_float<T>(0.f);
    if constexpr (sizeof(T) == 2) return *(const T *)side_at(s, mn, k, 2);
    else return load_float(side_at(s, mn, k, s.dtype == FMOE_F32 ? 4 : 2), s.dtype, 0);
}

// Tile of NMN x BK into shared memory: [mn][BK + V] when the contraction is contiguous, [k][NMN + V] otherwise.
template <class T, int NMN, int BK> DEV void load_tile(const Side &s, T *dst, int64_t mn0, int64_t k0)
{
    constexpr int V = 16 / sizeof(T), CH = NMN * BK / V / THREADS;
#pragma unroll
    for (int i = 0; i < CH; i++) {
        const int c = i * THREADS + threadIdx.x;
        int mn, k;
        T *d;
        if (s.k_major) mn = c / (BK / V), k = c % (BK / V) * V, d = dst + mn * (BK + V) + k;
        else k = c / (NMN / V), mn = c % (NMN / V) * V, d = dst + k * (NMN + V) + mn;
        const int64_t gm = mn0 + mn, gk = k0 + k;
        const bool inside = gm + (s.k_major ? 1 : V) <= s.n_mn && gk + (s.k_major ? V : 1) <= s.n_k;
        if (s.vector && inside) cp_async16(d, side_at(s, gm, gk, sizeof(T)));
        else
#pragma unroll
            for (int j = 0; j < V; j++) d[j] = side_element<T>(s, s.k_major ? gm : gm + j, s.k_major ? gk + j : gk);
    }
}

template <class T> struct Shape {
    static constexpr int BK = sizeof(T) == 2 ? 32 : 16, V = 16 / sizeof(T);
    static constexpr int A = BM * (BK + V) > BK *(BM + V) ? BM *(BK + V) : BK *(BM + V);
    static constexpr int B = BN * (BK + V) > BK *(BN + V) ? BN *(BK + V) : BK *(BN + V);
    static constexpr int SMEM = STAGES * (A + B) * (int)sizeof(T);
};

// D element, in the order of the columns of the tile.
struct Sink {
    char *p, *p2;
    int64_t sm, sn, split;
    int size, dtype, accumulate;
    DEV void put(int64_t m, int64_t n, float v) const
    {
        char *q = m >= split ? p2 + ((m - split) * sm + n * sn) * size : p + (m * sm + n * sn) * size;
        if (accumulate) v += load_float(q, dtype, 0);
        store_float(q, dtype, 0, v);
    }
};

template <class T>
__global__ void __launch_bounds__(THREADS)
    gemm_kernel(const __grid_constant__ GemmArgs g, int dtype, int a_dtype, int b_dtype)
{
    typedef Shape<T> S;
    constexpr int BK = S::BK;
    extern __shared__ __align__(16) char smem[];
    T *sa = (T *)smem, *sb = sa + STAGES * S::A;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const RowMap &map = g.map_value;

    int e;
    int64_t m0, n0, row0, rows;
    const int nN = (int)((g.N + BN - 1) / BN);
    if (g.wgrad) {
        e = blockIdx.y;
        m0 = (int64_t)(blockIdx.x / nN) * BM;
        n0 = (int64_t)(blockIdx.x % nN) * BN;
        row0 = map.off ? map.off[e] : 0;
        rows = map.off ? map.cnt[e] : g.R;
        if (rows == 0 && g.accumulate) return;
    } else {
        const int64_t tile = blockIdx.x / nN;
        n0 = (int64_t)(blockIdx.x % nN) * BN;
        if (map.off) {
            if (tile >= *map.ntile) return;
            e = map.tile[tile].x - map.first;
            if (e < 0 || e >= g.E) return;
            row0 = map.tile[tile].y;
            rows = map.off[e + 1] - row0;
        } else {
            e = 0;
            row0 = tile * BM;
            rows = g.R - row0;
        }
        if (rows > BM) rows = BM;
        m0 = 0;
    }
    const int64_t K = g.wgrad ? rows : g.K;
    const Side A = make_side<T>(g.A, a_dtype, 0, g.gather_a, g.wgrad, row0, g.wgrad ? g.M : rows, K);
    const Side B =
        make_side<T>(g.B, b_dtype, g.wgrad ? 0 : e, g.gather_b, g.wgrad || g.b_rows_are_k, g.wgrad ? row0 : 0, g.N, K);

    float acc[2][8][4] = {}; // mma: 2 x 8 fragments of a 32 x 64 warp tile; f32: 8 x 8 of a thread
    const int steps = (int)((K + BK - 1) / BK);
    auto load = [&](int step) {
        const int s = step % STAGES;
        if (step < steps) {
            load_tile<T, BM, BK>(A, sa + s * S::A, m0, (int64_t)step * BK);
            load_tile<T, BN, BK>(B, sb + s * S::B, n0, (int64_t)step * BK);
        }
        cp_async_commit();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) load(s);
    const int wm = warp / 2 * 32, wn = warp % 2 * 64;
    for (int step = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        load(step + STAGES - 1);
        const T *ta = sa + step % STAGES * S::A, *tb = sb + step % STAGES * S::B;
        if constexpr (sizeof(T) == 2) {
#pragma unroll
            for (int kk = 0; kk < BK; kk += 16) {
                uint32_t fa[2][4], fb[4][4];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int m = wm + i * 16;
                    if (A.k_major) ldmatrix4<false>(ta + (m + (lane & 15)) * (BK + 8) + kk + (lane >> 4) * 8, fa[i]);
                    else
                        ldmatrix4<true>(ta + (kk + (lane & 7) + (lane >> 4) * 8) * (BM + 8) + m + (lane >> 3 & 1) * 8,
                                        fa[i]);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const int n = wn + j * 16;
                    if (B.k_major)
                        ldmatrix4<false>(tb + (n + (lane & 7) + (lane >> 4) * 8) * (BK + 8) + kk + (lane >> 3 & 1) * 8,
                                         fb[j]);
                    else
                        ldmatrix4<true>(tb + (kk + (lane & 7) + (lane >> 3 & 1) * 8) * (BN + 8) + n + (lane >> 4) * 8,
                                        fb[j]);
                }
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        mma16816<T>(acc[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
            }
        } else {
            const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
            const int am = A.k_major ? BK + 4 : 1, ak = A.k_major ? 1 : BM + 4, bn = B.k_major ? BK + 4 : 1,
                      bk = B.k_major ? 1 : BN + 4;
#pragma unroll 4
            for (int k = 0; k < BK; k++) {
                float va[8], vb[8];
#pragma unroll
                for (int i = 0; i < 8; i++)
                    va[i] = to_float(ta[(ty + 8 * i) * am + k * ak]), vb[i] = to_float(tb[(tx + 16 * i) * bn + k * bk]);
#pragma unroll
                for (int i = 0; i < 8; i++)
#pragma unroll
                    for (int j = 0; j < 8; j++)
                        acc[i / 4][i % 4 * 2 + j / 4][j % 4] = fmaf(va[i], vb[j], acc[i / 4][i % 4 * 2 + j / 4][j % 4]);
            }
        }
    }
    cp_async_wait<0>();

    Sink d;
    d.dtype = g.out_f32 ? FMOE_F32 : dtype;
    d.size = d.dtype == FMOE_F32 ? 4 : 2;
    d.accumulate = g.accumulate;
    d.sm = g.D.r;
    d.sn = g.D.c;
    d.split = g.D.split;
    const int64_t de = g.wgrad ? e : 0;
    d.p = (char *)g.D.p + de * g.D.g * d.size;
    d.p2 = d.p + g.D.delta * d.size;
    if (g.D.list) d.p = (char *)g.D.list[e].p, d.sm = g.D.list[e].r, d.sn = g.D.list[e].c;
    if (g.D.list2) d.p2 = (char *)g.D.list2[e].p;
    if (!g.wgrad) d.p += row0 * d.sm * d.size;
    const int64_t M = g.wgrad ? g.M : rows;
    auto put = [&](int64_t m, int64_t n, float v) {
        if (m >= M || n >= g.N) return;
        if (g.bias)
            v += load_float(g.bias, g.bias_dtype,
                            e * g.bias_g +
                                (n >= g.bias_split ? g.bias_delta + (n - g.bias_split) * g.bias_n : n * g.bias_n));
        d.put(m, n, v);
    };
    if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int q = 0; q < 4; q++)
                    put(m0 + wm + i * 16 + lane / 4 + (q >> 1) * 8, n0 + wn + j * 8 + lane % 4 * 2 + (q & 1),
                        acc[i][j][q]);
    } else {
        const int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < 8; j++) put(m0 + ty + 8 * i, n0 + tx + 16 * j, acc[i / 4][i % 4 * 2 + j / 4][j % 4]);
    }
}

template <class T> static void run(int dtype, int a_dtype, int b_dtype, const GemmArgs &g, Stream &s)
{
    const int64_t nN = (g.N + BN - 1) / BN;
    const int64_t nM = g.wgrad           ? (g.M + BM - 1) / BM
                       : g.map_value.off ? fmoe_cuda_tiles(g.R, g.map_value.first + g.E, BM)
                                         : (g.R + BM - 1) / BM;
    if (nN * nM == 0) return;
    const dim3 grid((unsigned)(nN * nM), g.wgrad ? (unsigned)g.E : 1);
    launch(s, Product::GEMM, gemm_kernel<T>, Grid{grid, THREADS, Shape<T>::SMEM}, g, dtype, a_dtype, b_dtype);
}

void gemm_sm80(int dtype, const GemmArgs &g, Stream &s)
{
    if (lora_add(dtype, g, s) || mma_gemm(dtype, g, s)) return;
    const int a = g.a_f32 ? FMOE_F32 : dtype, b = g.b_f32 ? FMOE_F32 : dtype;
    if (dtype == FMOE_F32 || g.a_f32 || g.b_f32) run<float>(dtype, a, b, g, s);
    else if (dtype == FMOE_BF16) run<bf16>(dtype, a, b, g, s);
    else run<f16>(dtype, a, b, g, s);
}

static_assert(Shape<bf16>::SMEM <= 48 * 1024 && Shape<float>::SMEM <= 48 * 1024, "no opt-in is asked for");
