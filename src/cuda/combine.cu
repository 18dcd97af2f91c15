// SPDX-License-Identifier: Apache-2.0
// combine.cu - moving rows between tokens and experts: gather-and-sum, scatter, dot products, column sums. Sums run in
// a fixed order, so the same inputs give the same bits.
#include "common.cuh"

// 16 bytes of a row, or one element: kept as words, so that nothing is taken apart before it is used.
template <class T, int V> struct Words;
template <class T> struct Words<T, 1> {
    T v;
    DEV void load(const T *p) { v = *p; }
    DEV void store(T *p) const { *p = v; }
    DEV void get(float (&f)[1]) const { f[0] = to_float(v); }
    DEV void set(const float (&f)[1]) { v = from_float<T>(f[0]); }
};
template <> struct Words<float, 4> {
    float4 v;
    DEV void load(const float *p) { v = __ldcs((const float4 *)p); }
    DEV void store(float *p) const { *(float4 *)p = v; }
    DEV void get(float (&f)[4]) const { f[0] = v.x, f[1] = v.y, f[2] = v.z, f[3] = v.w; }
    DEV void set(const float (&f)[4]) { v = make_float4(f[0], f[1], f[2], f[3]); }
};
DEV float2 pair_floats(uint32_t w, bf16)
{
    return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u));
}
DEV float2 pair_floats(uint32_t w, f16) { return __half22float2(*(const __half2 *)&w); }
DEV uint32_t pair_word(float a, float b, bf16)
{
    const __nv_bfloat162 t = __floats2bfloat162_rn(a, b);
    return *(const uint32_t *)&t;
}
DEV uint32_t pair_word(float a, float b, f16)
{
    const __half2 t = __floats2half2_rn(a, b);
    return *(const uint32_t *)&t;
}
template <class T> struct Words<T, 8> {
    uint32_t w[4];
    DEV void load(const T *p)
    {
        const uint4 v = __ldcs((const uint4 *)p);
        w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    }
    DEV void store(T *p) const { *(uint4 *)p = make_uint4(w[0], w[1], w[2], w[3]); }
    DEV void get(float (&f)[8]) const
    {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 v = pair_floats(w[i], T());
            f[2 * i] = v.x, f[2 * i + 1] = v.y;
        }
    }
    DEV void set(const float (&f)[8])
    {
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = pair_word(f[2 * i], f[2 * i + 1], T());
    }
};

DEV int64_t map_row(const View &map, int64_t i, int64_t R, DeviceError *error)
{
    const int64_t r = load_int(map.p, map.dtype, i * map.s0);
    if (!error || (r >= -1 && r < R)) return r;
    error->index = i;
    error->value = r;
    __threadfence_system();
    error->code = DEVERR_MAP;
    return -1;
}

// ---- out[t] = sum_j p[t,j] * y[map[t,j]] (+ out[t]) ----

// All rows of a token are asked for before the first is used; weights come while they travel. 64 registers, so that
// four blocks share a multiprocessor: with three the memory has moments without work.
template <class T, int V, int K> __global__ void __launch_bounds__(256, 4) combine_kernel(CombineArgs a, View p)
{
    depend_wait();
    depend_launch();
    const int64_t t = blockIdx.x, per = a.H / V;
    for (int64_t c = threadIdx.x; c < per; c += blockDim.x) {
        float s[V] = {};
        T *out = (T *)a.out + t * a.out_r + c * V;
        for (int j0 = 0; j0 < a.k; j0 += K) {
            int row[K];
#pragma unroll
            for (int j = 0; j < K; j++)
                row[j] = j0 + j < a.k ? (int)map_row(a.map, t * a.k + j0 + j, a.R, a.error) : -1;
            Words<T, V> v[K];
            uint32_t on = 0; // a skipped slot reads nothing
#pragma unroll
            for (int j = 0; j < K; j++)
                if (row[j] >= 0) on |= 1u << j, v[j].load((const T *)a.y + row[j] * a.y_r + c * V);
#pragma unroll
            for (int j = 0; j < K; j++)
                if (on >> j & 1) {
                    const float w = p.p ? load_float(p.p, p.dtype, t * p.s0 + (j0 + j) * p.s1) : 1.f;
                    float f[V];
                    v[j].get(f);
#pragma unroll
                    for (int i = 0; i < V; i++) s[i] = fmaf(w, f[i], s[i]);
                }
        }
        Words<T, V> o;
        if (a.add) {
            float f[V];
            o.load(out);
            o.get(f);
#pragma unroll
            for (int i = 0; i < V; i++) s[i] += f[i];
        }
        o.set(s);
        o.store(out);
    }
}

template <class T, int V> static void combine_launch(const CombineArgs &a, const View &p, Stream &s)
{
    const unsigned grid = (unsigned)a.T;
    if (a.k > 4) launch(s, Product::COMBINE, combine_kernel<T, V, 8>, Grid{grid, 256}, a, p);
    else if (a.k > 2) launch(s, Product::COMBINE, combine_kernel<T, V, 4>, Grid{grid, 256}, a, p);
    else launch(s, Product::COMBINE, combine_kernel<T, V, 2>, Grid{grid, 256}, a, p);
}

template <class T> static void combine_dispatch(const CombineArgs &a, Stream &s)
{
    constexpr int V = 16 / sizeof(T);
    const View none = {}, p = a.p ? *a.p : none;
    const bool wide = ((uintptr_t)a.y | (uintptr_t)a.out) % 16 == 0 && (a.y_r | a.out_r | a.H) % V == 0;
    if (wide) combine_launch<T, V>(a, p, s);
    else combine_launch<T, 1>(a, p, s);
}

void combine_rows(int dtype, const CombineArgs &a, Stream &s)
{
    if (a.T == 0 || a.H == 0) return;
    if (dtype == FMOE_F32) combine_dispatch<float>(a, s);
    else if (dtype == FMOE_BF16) combine_dispatch<bf16>(a, s);
    else combine_dispatch<f16>(a, s);
}

// ---- out[map[t,j]] = p[t,j] * x[t] ----

template <class T, int V> __global__ void __launch_bounds__(128) scatter_kernel(ScatterArgs a, View p)
{
    const int64_t per = a.H / V;
    for (int64_t i = blockIdx.x; i < a.T * a.k; i += gridDim.x) {
        const int64_t r = map_row(a.map, i, a.R, threadIdx.x == 0 ? a.error : nullptr), t = i / a.k;
        if (r < 0 || r >= a.R) continue;
        const float w = p.p ? load_float(p.p, p.dtype, t * p.s0 + i % a.k * p.s1) : 1.f;
        for (int64_t c = threadIdx.x; c < per; c += blockDim.x) {
            Pack<T, V> v = *(const Pack<T, V> *)((const T *)a.x + t * a.x_r + c * V);
            if (p.p)
#pragma unroll
                for (int j = 0; j < V; j++) v.v[j] = from_float<T>(w * to_float(v.v[j]));
            *(Pack<T, V> *)((T *)a.out + r * a.out_r + c * V) = v;
        }
    }
}

template <class T> static void scatter_dispatch(const ScatterArgs &a, Stream &s)
{
    constexpr int V = 16 / sizeof(T);
    const View none = {}, p = a.p ? *a.p : none;
    const bool wide = ((uintptr_t)a.x | (uintptr_t)a.out) % 16 == 0 && (a.x_r | a.out_r | a.H) % V == 0;
    const unsigned grid = (unsigned)fmoe_min(a.T * a.k, (int64_t)1 << 30);
    launch(s, Product::SCATTER, wide ? scatter_kernel<T, V> : scatter_kernel<T, 1>, Grid{grid, 128}, a, p);
}

void scatter_rows(int dtype, const ScatterArgs &a, Stream &s)
{
    if (a.T * a.k == 0 || a.H == 0) return;
    if (dtype == FMOE_F32) scatter_dispatch<float>(a, s);
    else if (dtype == FMOE_BF16) scatter_dispatch<bf16>(a, s);
    else scatter_dispatch<f16>(a, s);
}

// Rows from *first (or 0) on become zero.
__global__ void zero_kernel(char *p, int64_t rows, int64_t row_bytes, int64_t pitch, const int *first)
{
    for (int64_t r = (first ? *first : 0) + blockIdx.x; r < rows; r += gridDim.x)
        for (int64_t i = threadIdx.x; i < row_bytes / 2; i += blockDim.x) ((uint16_t *)(p + r * pitch))[i] = 0;
}

void zero_rows(void *p, int64_t rows, int64_t row_bytes, int64_t pitch_bytes, const int *first, Stream &s)
{
    if (rows == 0 || row_bytes == 0) return;
    const Grid grid = {(unsigned)fmoe_min(rows, 4096), 128};
    launch(s, Product::ZERO, zero_kernel, grid, (char *)p, rows, row_bytes, pitch_bytes, first);
}

// ---- Dot products: a warp a slot, lanes over the columns, then a fixed tree ----

DEV float warp_sum(float v)
{
#pragma unroll
    for (int o = 16; o; o /= 2) v += __shfl_xor_sync(~0u, v, o);
    return v;
}

template <class T> __global__ void __launch_bounds__(128) dot_kernel(CombineArgs a, View out)
{
    const int lane = threadIdx.x % 32;
    for (int64_t i = blockIdx.x * 4 + threadIdx.x / 32; i < a.T * a.k; i += (int64_t)gridDim.x * 4) {
        const int64_t t = i / a.k, r = map_row(a.map, i, a.R, lane == 0 ? a.error : nullptr);
        float s = 0;
        if (r >= 0 && r < a.R)
            for (int64_t c = lane; c < a.H; c += 32)
                s = fmaf(to_float(((const T *)a.out)[t * a.out_r + c]), to_float(((const T *)a.y)[r * a.y_r + c]), s);
        s = warp_sum(s);
        if (lane == 0) store_float(out.p, out.dtype, t * out.s0 + i % a.k * out.s1, s);
    }
}

// Here a.out is dout [T,H] and is read.
void dot_rows(int dtype, const CombineArgs &a, const View &out, Stream &s)
{
    if (a.T * a.k == 0) return;
    const Grid grid = {(unsigned)fmoe_min((a.T * a.k + 3) / 4, (int64_t)1 << 30), 128};
    const auto kernel = dtype == FMOE_F32 ? dot_kernel<float> : dtype == FMOE_BF16 ? dot_kernel<bf16> : dot_kernel<f16>;
    launch(s, Product::DOT, kernel, grid, a, out);
}

__global__ void dp_sum(DpArgs a)
{
    depend_wait();
    depend_launch();
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < a.T * a.k;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int r = a.slot[i];
        float s = 0;
        if (r >= 0)
            for (int64_t q = 0; q < a.parts; q++) s += a.dp[q * a.pitch + r];
        store_float(a.out.p, a.out.dtype, i / a.k * a.out.s0 + i % a.k * a.out.s1, s);
    }
}

template <class T, int V> __global__ void __launch_bounds__(128) dp_sum_bias(DpArgs a)
{
    const int lane = threadIdx.x % 32;
    for (int64_t i = blockIdx.x * 4 + threadIdx.x / 32; i < a.T * a.k; i += (int64_t)gridDim.x * 4) {
        const int64_t t = i / a.k;
        const int r = a.slot[i];
        float s = 0;
        if (r >= 0) {
            const int64_t e = load_int(a.ids.p, a.ids.dtype, t * a.ids.s0 + i % a.k * a.ids.s1);
            const T *d = (const T *)a.dout + t * a.dout_r, *b = (const T *)a.bias + e * a.bias_g;
            for (int64_t c = lane * V; c < a.H; c += 32 * V) {
                const Pack<T, V> x = *(const Pack<T, V> *)(d + c),
                                 y = V > 1 ? *(const Pack<T, V> *)(b + c) : Pack<T, V>{b[c * a.bias_n]};
#pragma unroll
                for (int j = 0; j < V; j++) s = fmaf(to_float(x.v[j]), to_float(y.v[j]), s);
            }
            s = warp_sum(s);
            for (int64_t q = 0; q < a.parts; q++) s += a.dp[q * a.pitch + r];
        }
        if (lane == 0) store_float(a.out.p, a.out.dtype, t * a.out.s0 + i % a.k * a.out.s1, s);
    }
}

template <class T> static void dp_bias_launch(const DpArgs &a, Stream &s)
{
    constexpr int V = 16 / sizeof(T);
    const unsigned grid = (unsigned)fmoe_min((a.T * a.k + 3) / 4, (int64_t)1 << 30);
    const bool whole = ((uintptr_t)a.dout | (uintptr_t)a.bias) % 16 == 0 && a.dout_r % V == 0 && a.bias_g % V == 0 &&
                       a.H % V == 0 && a.bias_n == 1;
    launch(s, Product::DP_BIAS, whole ? dp_sum_bias<T, V> : dp_sum_bias<T, 1>, Grid{grid, 128}, a);
}

void dp_reduce(int dtype, const DpArgs &a, Stream &s)
{
    const int64_t R = a.T * a.k;
    if (R == 0) return;
    if (!a.bias) launch(s, Product::DP, dp_sum, Grid{(unsigned)fmoe_min((R + 255) / 256, 65536), 256}, a);
    else if (dtype == FMOE_F32) dp_bias_launch<float>(a, s);
    else if (dtype == FMOE_BF16) dp_bias_launch<bf16>(a, s);
    else dp_bias_launch<f16>(a, s);
}

// ---- Column sums over an expert's rows: 8 warps share them and are added in order; a lane has V columns ----

template <class T, int V> __global__ void __launch_bounds__(256) colsum_kernel(ColsumArgs a)
{
    constexpr int COLS = 32 * V, AHEAD = 4;
    const RowMap &m = a.map_value;
    __shared__ float sums[8][COLS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, e = blockIdx.y;
    const int64_t n0 = blockIdx.x * (int64_t)COLS, n = n0 + lane * V, first = m.off ? m.off[e] : 0,
                  count = m.off ? m.cnt[e] : a.rows;
    if (count == 0 && a.accumulate) return;
    float s[V] = {};
    for (int64_t i = warp; i < count && n < a.N; i += 8 * AHEAD) {
        Words<T, V> v[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (i + 8 * j < count) {
                const int64_t r = first + i + 8 * j;
                v[j].load((const T *)a.a + (a.gather ? a.gather[r] : r) * a.a_r + n);
            }
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            if (i + 8 * j < count) {
                const float w = a.prob ? a.prob[first + i + 8 * j] : 1.f;
                float f[V];
                v[j].get(f);
#pragma unroll
                for (int c = 0; c < V; c++) s[c] = fmaf(w, f[c], s[c]);
            }
    }
#pragma unroll
    for (int c = 0; c < V; c++) sums[warp][lane * V + c] = s[c];
    __syncthreads();
    const int64_t column = n0 + threadIdx.x;
    if (threadIdx.x >= COLS || column >= a.N) return;
    float sum = 0;
    for (int w = 0; w < 8; w++) sum += sums[w][threadIdx.x];
    const int64_t o =
        e * a.out_g + (column >= a.out_split ? a.out_delta + (column - a.out_split) * a.out_n : column * a.out_n);
    if (a.accumulate) sum += load_float(a.out, a.out_dtype, o);
    store_float(a.out, a.out_dtype, o, sum);
}

// 16 bytes a lane where that is enough blocks for a card; the sums are the same.
template <class T> static void colsum_launch(const ColsumArgs &a, Stream &s)
{
    constexpr int V = 16 / sizeof(T);
    const int64_t wide = (a.N + 32 * V - 1) / (32 * V);
    const bool whole = (uintptr_t)a.a % 16 == 0 && a.a_r % V == 0 && a.N % V == 0;
    if (whole && wide * a.E >= 128)
        launch(s, Product::COLSUM, colsum_kernel<T, V>, Grid{dim3((unsigned)wide, (unsigned)a.E), 256}, a);
    else
        launch(s, Product::COLSUM, colsum_kernel<T, 1>, Grid{dim3((unsigned)((a.N + 31) / 32), (unsigned)a.E), 256}, a);
}

void colsum_rows(const ColsumArgs &a, Stream &s)
{
    if (a.E == 0 || a.N == 0) return;
    if (a.a_dtype == FMOE_F32) colsum_launch<float>(a, s);
    else if (a.a_dtype == FMOE_BF16) colsum_launch<bf16>(a, s);
    else colsum_launch<f16>(a, s);
}
