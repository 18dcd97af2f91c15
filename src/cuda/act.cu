// SPDX-License-Identifier: Apache-2.0
// act.cu - the activation on whole rows, forward and backward; in the layer also the routing weight: p*a and <da, a>.
#include "act.cuh"

static constexpr int THREADS = 128, WARPS = THREADS / 32;

// V elements of a row at once where the layout allows.
template <class T, int V> struct alignas(V * sizeof(T)) Pack {
    T v[V];
};
template <class T, int V> DEV Pack<T, V> load_pack(const void *p, int64_t i) { return *(const Pack<T, V> *)((const T *)p + i); }
template <class T, int V> DEV void store_pack(void *p, int64_t i, const Pack<T, V> &v) { *(Pack<T, V> *)((T *)p + i) = v; }

template <class T, bool GATED, int V> __global__ void __launch_bounds__(THREADS) act_fwd(ActArgs a)
{
    const int64_t rows = a.rows_dev ? *a.rows_dev : a.rows, per = a.I / V;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x)
        for (int64_t c = threadIdx.x; c < per; c += THREADS) {
            const int64_t i = c * V, h = r * a.h_r + i * a.h_i;
            const Pack<T, V> g = load_pack<T, V>(a.h, h);
            Pack<T, V> u = g, o;
            if (GATED) u = load_pack<T, V>(a.h, h + a.h_u);
#pragma unroll
            for (int j = 0; j < V; j++) {
                float v = gate_factor(a.act, to_float(g.v[j]), a.alpha, a.limit).value;
                if (GATED) v *= up_factor(a.act, to_float(u.v[j]), a.limit).value;
                o.v[j] = from_float<T>(v);
            }
            store_pack<T, V>(a.a, r * a.a_r + i, o);
        }
}

template <class T, bool GATED, int V> __global__ void __launch_bounds__(THREADS) act_bwd(ActArgs a)
{
    __shared__ float sums[WARPS];
    const int64_t rows = a.rows_dev ? *a.rows_dev : a.rows, per = a.I / V;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        const float prob = a.prob ? a.prob[r] : 1.f;
        float dot = 0;
        for (int64_t c = threadIdx.x; c < per; c += THREADS) {
            const int64_t i = c * V, h = r * a.h_r + i * a.h_i, o = r * a.dh_r + i * a.dh_i;
            const Pack<T, V> g = load_pack<T, V>(a.h, h), d = load_pack<T, V>(a.da, r * a.da_r + i);
            Pack<T, V> u = g, og, ou, pa;
            if (GATED) u = load_pack<T, V>(a.h, h + a.h_u);
#pragma unroll
            for (int j = 0; j < V; j++) {
                const Factor f = gate_factor(a.act, to_float(g.v[j]), a.alpha, a.limit);
                const Factor v = GATED ? up_factor(a.act, to_float(u.v[j]), a.limit) : Factor{1.f, 0.f};
                const float da = to_float(d.v[j]), act = f.value * v.value;
                dot += da * act;
                pa.v[j] = from_float<T>(prob * act);
                og.v[j] = from_float<T>(prob * da * f.slope * v.value);
                ou.v[j] = from_float<T>(prob * da * f.value * v.slope);
            }
            store_pack<T, V>(a.dh, o, og);
            if (GATED) store_pack<T, V>(a.dh, o + a.dh_u, ou);
            if (a.pa) store_pack<T, V>(a.pa, r * a.I + i, pa);
        }
        if (!a.dp) continue;
#pragma unroll
        for (int o = 16; o; o /= 2) dot += __shfl_xor_sync(~0u, dot, o);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = dot;
        __syncthreads();
        if (threadIdx.x == 0) {
            float s = 0;
            for (int w = 0; w < WARPS; w++) s += sums[w];
            a.dp[r] = s;
        }
        __syncthreads();
    }
}

template <class T, bool GATED, int V> static void launch(bool forward, const ActArgs &a, cudaStream_t s)
{
    const unsigned grid = (unsigned)fmoe_min(a.rows, 1 << 16);
    if (forward) act_fwd<T, GATED, V><<<grid, THREADS, 0, s>>>(a);
    else act_bwd<T, GATED, V><<<grid, THREADS, 0, s>>>(a);
}

template <class T> static void dispatch(bool forward, int gated, const ActArgs &a, cudaStream_t s)
{
    if (a.rows == 0 || a.I == 0) return;
    const int64_t V = 16 / sizeof(T);
    const uintptr_t bits = (uintptr_t)a.h | (uintptr_t)a.a | (uintptr_t)a.da | (uintptr_t)a.dh | (uintptr_t)a.pa;
    const int64_t strides = a.h_r | a.h_u | a.a_r | a.da_r | a.dh_r | a.dh_u | a.I;
    const bool wide = bits % 16 == 0 && strides % V == 0 && a.h_i == 1 && (forward || a.dh_i == 1);
    if (wide && gated) launch<T, true, 16 / sizeof(T)>(forward, a, s);
    else if (wide) launch<T, false, 16 / sizeof(T)>(forward, a, s);
    else if (gated) launch<T, true, 1>(forward, a, s);
    else launch<T, false, 1>(forward, a, s);
}

static void run(int dtype, bool forward, int gated, const ActArgs &a, cudaStream_t s)
{
    if (dtype == FMOE_F32) dispatch<float>(forward, gated, a, s);
    else if (dtype == FMOE_BF16) dispatch<bf16>(forward, gated, a, s);
    else dispatch<f16>(forward, gated, a, s);
}

void act_forward(int dtype, int gated, const ActArgs &a, cudaStream_t s) { run(dtype, true, gated, a, s); }
void act_backward(int dtype, int gated, const ActArgs &a, cudaStream_t s) { run(dtype, false, gated, a, s); }
