// SPDX-License-Identifier: Apache-2.0
// lora_rows.cu - the products of adapters whose result is as narrow as their rank, for which the tiles of the others
// are too wide. Both are bound by reading the rows of the layer once. A ring of stages by cp.async; in shared memory
// 16-byte pieces are swizzled.
//
//   rows: lora = rows x factor      D[r, j]    = scale x sum over k of A[r, k] F[e(r)][j, k]
//   grad: of a factor              D[e][m, j] = sum over the expert's rows of A[r, m] L[r, j], or its transpose
//
// The wide rows may be gathered.
#include "mma.cuh"

// Piece of a line of P pieces, where eight lines one below the other lie in all banks.
template <int P> DEV int narrow_at(int line, int piece)
{
    return (line * P + (piece ^ (line >> (P == 8 ? 0 : P == 4 ? 1 : 2) & (P - 1)))) * 16;
}

static constexpr int ROWS = FMOE_CUDA_TILE_M, LINE = 128; // LINE: bytes

// ---- rows ----
//
// A block has 64 rows of an expert, a warp 16 of them, and all NR columns of the result. F_N: the factor's columns are
// neighbours ([k, j]).

struct LoraRows {
    const char *x;
    int64_t ldx; // bytes
    const int *gather;
    const char *f;
    int64_t f_g, f_line; // bytes; of a line: [j] of k, or (F_N) [k] of j
    int64_t K;
    int rank;
    void *out;
    int64_t ldo;
    RowMap map;
    float scale;
};

template <int NR> struct RowsShape {
    static constexpr int STAGES = NR == 64 ? 3 : 4, A_BYTES = ROWS * LINE, BYTES = A_BYTES + NR * LINE,
                         SMEM = STAGES * BYTES;
};

template <class T, int NR, bool F_N>
__global__ void __launch_bounds__(128) lora_rows_kernel(const __grid_constant__ LoraRows g)
{
    typedef RowsShape<NR> S;
    constexpr int A_BYTES = S::A_BYTES, STAGES = S::STAGES, P = NR / 8;
    extern __shared__ __align__(128) char smem[];
    if ((int)blockIdx.x >= *g.map.ntile) return;
    const int2 at = g.map.tile[blockIdx.x];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32,
              rows = min(g.map.off[at.x + 1] - at.y, ROWS);
    const uint32_t base = smem_u32(smem);
    const char *const f = g.f + at.x * g.f_g;
    // Eight threads copy a line: a thread has piece c of the rows thread / 8 + 16 i.
    const int c = thread % 8, r = thread / 8;
    const char *src[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = at.y + min(r + 16 * i, rows - 1);
        src[i] = g.x + (g.gather ? g.gather[row] : row) * g.ldx + c * 16;
    }
    const int steps = (int)((g.K + 63) / 64);
    auto load = [&](int step) {
        if (step < steps) {
            const uint32_t to = base + step % STAGES * S::BYTES;
            const int64_t k = (int64_t)step * 64;
            const bool inside = k + c * 8 < g.K;
#pragma unroll
            for (int i = 0; i < 4; i++)
                cp_async16(to + (r + 16 * i) * LINE + ((c ^ (r & 7)) << 4), inside ? src[i] + k * 2 : g.x, inside);
            if constexpr (F_N) { // 64 lines of NR
                for (int i = thread; i < 64 * P; i += 128) {
                    const int line = i / P, piece = i % P;
                    const bool there = k + line < g.K && piece * 8 < g.rank;
                    cp_async16(to + A_BYTES + narrow_at<P>(line, piece),
                               there ? f + (k + line) * g.f_line + piece * 16 : f, there);
                }
            } else {
                for (int j = r; j < NR; j += 16) {
                    const bool there = j < g.rank && inside;
                    cp_async16(to + A_BYTES + j * LINE + ((c ^ (j & 7)) << 4),
                               there ? f + j * g.f_line + k * 2 + c * 16 : f, there);
                }
            }
        }
        cp_async_commit();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) load(s);
    float acc[NR / 8][4] = {};
    for (int step = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        load(step + STAGES - 1);
        const uint32_t a = base + step % STAGES * S::BYTES, b = a + A_BYTES;
#pragma unroll
        for (int k = 0; k < 4; k++) { // 16 of 64
            uint32_t fa[4];
            const int row = warp * 16 + (lane & 15);
            ldmatrix4<false>(a + row * LINE + (((2 * k + (lane >> 4)) ^ (row & 7)) << 4), fa);
#pragma unroll
            for (int j = 0; j < NR / 16; j++) {
                uint32_t fb[4];
                if constexpr (F_N) {
                    const int line = 16 * k + (lane & 7) + (lane >> 3 & 1) * 8, piece = 2 * j + (lane >> 4);
                    ldmatrix4<true>(b + narrow_at<P>(line, piece), fb);
                } else {
                    const int line = 16 * j + (lane & 7) + (lane >> 4) * 8;
                    ldmatrix4<false>(b + line * LINE + (((2 * k + (lane >> 3 & 1)) ^ (line & 7)) << 4), fb);
                }
                mma16816<T>(acc[2 * j], fa, fb[0], fb[1]);
                mma16816<T>(acc[2 * j + 1], fa, fb[2], fb[3]);
            }
        }
    }
    cp_async_wait<0>();
#pragma unroll
    for (int j = 0; j < NR / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = warp * 16 + lane / 4 + i * 8, col = 8 * j + lane % 4 * 2;
            T *const to = (T *)g.out + (at.y + row) * g.ldo + col;
            __align__(4)
                const T two[2] = {from_float<T>(acc[j][2 * i] * g.scale), from_float<T>(acc[j][2 * i + 1] * g.scale)};
            if (row < rows && col + 1 < g.rank) *(uint32_t *)to = *(const uint32_t *)two;
            else if (row < rows && col < g.rank) *to = two[0];
        }
}

// The rows of a product that another kernel made.
template <class T> __global__ void lora_scale_kernel(T *rows, int64_t n, float by)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        rows[i] = from_float<T>(to_float(rows[i]) * by);
}

void lora_scale(int dtype, void *rows, int64_t n, float by, Stream &s)
{
    const Grid grid = {(unsigned)fmoe_min(fmoe_ceil_div(n, 1024), 1 << 12), 256};
    if (n == 0 || by == 1) return;
    if (dtype == FMOE_F32) launch(s, Product::LORA_SCALE, lora_scale_kernel<float>, grid, (float *)rows, n, by);
    else if (dtype == FMOE_BF16) launch(s, Product::LORA_SCALE, lora_scale_kernel<bf16>, grid, (bf16 *)rows, n, by);
    else launch(s, Product::LORA_SCALE, lora_scale_kernel<f16>, grid, (f16 *)rows, n, by);
}

// ---- grad ----
//
// A block has 128 columns of the rows, a warp 32 of them, and all of an expert's rows, 64 at a time. The tokens of
// gathered rows are asked for a step before: waiting for them took a third of the time. Results go through shared
// memory, to be stored in pieces of 4 neighbours.

struct LoraWgrad {
    const char *x;
    int64_t ldx; // bytes
    const int *gather;
    const char *l;
    int64_t ldl;
    int64_t M;
    int rank;
    void *d;
    int64_t d_g, d_m, d_j; // elements
    int f32, add, pieces;  // pieces: 4 neighbours are aligned as one
    RowMap map;
};

template <int NR> struct GradShape {
    static constexpr int STAGES = 2, DEPTH = 64, COLS = 128, A_BYTES = DEPTH * COLS * 2,
                         BYTES = A_BYTES + DEPTH * NR * 2, SMEM = STAGES * BYTES;
};

template <class T> DEV void store_piece(void *d, bool f32, int64_t to, float4 v)
{
    if (f32) {
        *(float4 *)((float *)d + to) = v;
        return;
    }
    __align__(8) T four[4] = {from_float<T>(v.x), from_float<T>(v.y), from_float<T>(v.z), from_float<T>(v.w)};
    *(uint2 *)((T *)d + to) = *(const uint2 *)four;
}

template <class T, int NR> __global__ void __launch_bounds__(128) lora_wgrad_kernel(const __grid_constant__ LoraWgrad g)
{
    typedef GradShape<NR> S;
    constexpr int DEPTH = S::DEPTH, A_BYTES = S::A_BYTES, STAGES = S::STAGES, P = NR / 8;
    extern __shared__ __align__(128) char smem[];
    const int e = blockIdx.y, thread = threadIdx.x, warp = thread / 32, lane = thread % 32, row0 = g.map.off[e],
              rows = g.map.off[e + 1] - row0;
    const int64_t m0 = (int64_t)blockIdx.x * S::COLS;
    if (rows == 0 && g.add) return;
    const uint32_t base = smem_u32(smem);
    const int steps = (rows + DEPTH - 1) / DEPTH, c = thread % 16, r = thread / 16; // 16 pieces a row, 8 rows at a time
    const bool inside = m0 + c * 8 < g.M;
    int token[DEPTH / 8]; // of the rows that are loaded next
    auto prefetch_tokens = [&](int step) {
#pragma unroll
        for (int i = 0; i < DEPTH / 8; i++) {
            const int row = step * DEPTH + r + 8 * i;
            token[i] = row < rows ? g.gather ? g.gather[row0 + row] : row0 + row : 0;
        }
    };
    prefetch_tokens(0);
    auto load = [&](int step) {
        if (step < steps) {
            const uint32_t to = base + step % STAGES * S::BYTES;
#pragma unroll
            for (int i = 0; i < DEPTH / 8; i++) {
                const int line = r + 8 * i, row = step * DEPTH + line;
                const bool there = inside && row < rows;
                const int64_t from = token[i];
                cp_async16(to + line * 256 + ((c ^ (line & 7)) << 4),
                           there ? g.x + from * g.ldx + (m0 + c * 8) * 2 : g.x, there);
            }
            for (int i = thread; i < DEPTH * P; i += 128) {
                const int line = i / P, piece = i % P, row = step * DEPTH + line;
                const bool there = row < rows && piece * 8 < g.rank;
                cp_async16(to + A_BYTES + narrow_at<P>(line, piece),
                           there ? g.l + (row0 + row) * g.ldl + piece * 16 : g.l, there);
            }
            prefetch_tokens(step + 1);
        }
        cp_async_commit();
    };
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) load(s);
    float acc[2][NR / 8][4] = {};
    for (int step = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        load(step + STAGES - 1);
        const uint32_t a = base + step % STAGES * S::BYTES, b = a + A_BYTES;
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            uint32_t fa[2][4];
#pragma unroll
            for (int i = 0; i < 2; i++) { // 16 columns of the rows are the m of an mma: [k][m], turned
                const int line = k + (lane & 7) + (lane >> 4) * 8, piece = warp * 4 + i * 2 + (lane >> 3 & 1);
                ldmatrix4<true>(a + line * 256 + ((piece ^ (line & 7)) << 4), fa[i]);
            }
#pragma unroll
            for (int j = 0; j < NR / 16; j++) {
                uint32_t fb[4];
                const int line = k + (lane & 7) + (lane >> 3 & 1) * 8, piece = 2 * j + (lane >> 4);
                ldmatrix4<true>(b + narrow_at<P>(line, piece), fb);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    mma16816<T>(acc[i][2 * j], fa[i], fb[0], fb[1]);
                    mma16816<T>(acc[i][2 * j + 1], fa[i], fb[2], fb[3]);
                }
            }
        }
    }
    cp_async_wait<0>();
    __syncthreads();
    float *const staged = (float *)smem; // lines of what lies side by side in the factor: of j, or of columns
    const bool by_j = g.d_j == 1;
    const int pitch = (by_j ? NR : S::COLS) + 4;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < NR / 8; j++)
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const int m = warp * 32 + i * 16 + lane / 4 + q / 2 * 8, n = 8 * j + lane % 4 * 2 + q % 2;
                staged[by_j ? m * pitch + n : n * pitch + m] = acc[i][j][q];
            }
    __syncthreads();
    const int cols = (int)(g.M - m0 < S::COLS ? g.M - m0 : S::COLS), lines = by_j ? cols : g.rank,
              length = by_j ? g.rank : cols;
    const int64_t between = by_j ? g.d_m : g.d_j, beside = by_j ? g.d_j : g.d_m;
    const int type = g.f32                     ? FMOE_F32
                     : std::is_same_v<T, bf16> ? FMOE_BF16
                                               : FMOE_F16,
              per_line = (by_j ? NR : S::COLS) / 4;
    for (int i = thread; i < lines * per_line; i += 128) {
        const int line = i / per_line, at = i % per_line * 4;
        const float *const v = staged + line * pitch + at;
        const int64_t to = e * g.d_g + m0 * g.d_m + line * between + at * beside;
        if (g.pieces && !g.add && at + 4 <= length) store_piece<T>(g.d, g.f32, to, *(const float4 *)v);
        else
            for (int c = 0; c < 4 && at + c < length; c++)
                store_float(g.d, type, to + c * beside, v[c] + (g.add ? load_float(g.d, type, to + c * beside) : 0.f));
    }
}

// ---- Choice ----

// Rows of whole pieces.
static bool even(const Mat &m) { return m.c == 1 && (m.r | m.g) % 8 == 0 && (uintptr_t)m.p % 16 == 0 && !m.list; }

template <class T, int NR> static void run_rows(const LoraRows &a, bool f_n, unsigned tiles, Stream &s)
{
    static_assert(RowsShape<NR>::SMEM <= 48 * 1024, "no opt-in is asked for");
    const auto kernel = f_n ? lora_rows_kernel<T, NR, true> : lora_rows_kernel<T, NR, false>;
    launch(s, Product::LORA_ROWS, kernel, Grid{tiles, 128, RowsShape<NR>::SMEM}, a);
}

template <class T> static void run_rows(const LoraRows &a, bool f_n, unsigned tiles, Stream &s)
{
    if (a.rank <= 16) run_rows<T, 16>(a, f_n, tiles, s);
    else if (a.rank <= 32) run_rows<T, 32>(a, f_n, tiles, s);
    else run_rows<T, 64>(a, f_n, tiles, s);
}

bool lora_rows(int dtype, const GemmArgs &g, float scale, Stream &s)
{
    if (dtype == FMOE_F32 || !g.map_value.off || g.N > 64 || g.K % 8 || !even(g.A) || g.D.c != 1) return false;
    const bool f_n = g.b_rows_are_k ? g.B.c == 1 : g.B.r == 1 && g.B.c != 1;
    Mat f = g.B;
    if (!g.b_rows_are_k == f_n) f.r = g.B.c, f.c = g.B.r; // lines are what lies together
    if (!even(f) || (f_n && g.N % 8)) return false;
    const int64_t tiles = fmoe_cuda_tiles(g.R, g.E, ROWS);
    if (tiles == 0) return true;
    const LoraRows a = {
        (const char *)g.A.p, g.A.r * 2, g.gather_a, (const char *)f.p, f.g * 2, f.r * 2, g.K, (int)g.N, g.D.p, g.D.r,
        g.map_value,         scale};
    if (dtype == FMOE_BF16) run_rows<bf16>(a, f_n, (unsigned)tiles, s);
    else run_rows<f16>(a, f_n, (unsigned)tiles, s);
    return true;
}

template <class T, int NR> static void run_grad(const LoraWgrad &a, int64_t E, Stream &s)
{
    typedef GradShape<NR> S;
    static_assert(S::SMEM <= 48 * 1024, "no opt-in is asked for");
    static_assert((S::COLS + 4) * (NR + 4) * (int)sizeof(float) <= S::SMEM, "the result fits");
    const dim3 blocks((unsigned)((a.M + S::COLS - 1) / S::COLS), (unsigned)E);
    launch(s, Product::LORA_WGRAD, lora_wgrad_kernel<T, NR>, Grid{blocks, 128, S::SMEM}, a);
}

template <class T> static void run_grad(const LoraWgrad &a, int64_t E, Stream &s)
{
    if (a.rank <= 16) run_grad<T, 16>(a, E, s);
    else if (a.rank <= 32) run_grad<T, 32>(a, E, s);
    else run_grad<T, 64>(a, E, s);
}

bool lora_wgrad(int dtype, const GemmArgs &g, Stream &s)
{
    // Which operand is as narrow as the rank.
    const bool right = g.N <= 64 && !g.gather_b, left = !right && g.M <= 64 && !g.gather_a;
    const Mat &x = right ? g.A : g.B, &l = right ? g.B : g.A, &d = g.D;
    const int64_t M = right ? g.M : g.N;
    if (dtype == FMOE_F32 || !g.map_value.off || !(right || left) || M % 8 || !even(x) || !even(l) || d.list ||
        d.split < INT64_MAX)
        return false;
    if (M == 0) return true;
    const int64_t far = d.c == 1 ? d.r : d.c;
    const int pieces = (d.c == 1 || d.r == 1) && (d.g | far) % 4 == 0 && (uintptr_t)d.p % (g.out_f32 ? 16 : 8) == 0;
    const LoraWgrad a = {(const char *)x.p,
                         x.r * 2,
                         right ? g.gather_a : g.gather_b,
                         (const char *)l.p,
                         l.r * 2,
                         M,
                         (int)(right ? g.N : g.M),
                         d.p,
                         d.g,
                         right ? d.r : d.c,
                         right ? d.c : d.r,
                         g.out_f32,
                         g.accumulate,
                         pieces,
                         g.map_value};
    if (dtype == FMOE_BF16) run_grad<bf16>(a, g.E, s);
    else run_grad<f16>(a, g.E, s);
    return true;
}
