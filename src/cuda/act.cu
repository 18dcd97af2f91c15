// SPDX-License-Identifier: Apache-2.0
// act.cu - the activation on whole rows, forward and backward; in the layer also the routing weight: p*a and <da, a>.
#include "act.cuh"

static constexpr int THREADS = 128, WARPS = THREADS / 32;

template <class T, int V> DEV Pack<T, V> load_pack(const void *p, int64_t i)
{
    return *(const Pack<T, V> *)((const T *)p + i);
}
template <class T, int V> DEV void store_pack(void *p, int64_t i, const Pack<T, V> &v)
{
    *(Pack<T, V> *)((T *)p + i) = v;
}

// How gate and up lie: V of each, or (PAIRS) V pairs, 16 bytes.
enum Layout { PLAIN, GATED, PAIRS };

template <class T, Layout LAY, int V> DEV void load_h(const ActArgs &a, int64_t at, Pack<T, V> &g, Pack<T, V> &u)
{
    if (LAY == PAIRS) {
        const Pack<T, 2 * V> both = load_pack<T, 2 * V>(a.h, at);
#pragma unroll
        for (int j = 0; j < V; j++) g.v[j] = both.v[2 * j], u.v[j] = both.v[2 * j + 1];
    } else {
        g = load_pack<T, V>(a.h, at);
        if (LAY == GATED) u = load_pack<T, V>(a.h, at + a.h_u);
    }
}

template <class T, Layout LAY, int V>
DEV void store_dh(const ActArgs &a, int64_t at, const Pack<T, V> &g, const Pack<T, V> &u)
{
    if (LAY == PAIRS) {
        Pack<T, 2 * V> both;
#pragma unroll
        for (int j = 0; j < V; j++) both.v[2 * j] = g.v[j], both.v[2 * j + 1] = u.v[j];
        store_pack<T, 2 * V>(a.dh, at, both);
    } else {
        store_pack<T, V>(a.dh, at, g);
        if (LAY == GATED) store_pack<T, V>(a.dh, at + a.dh_u, u);
    }
}

// call(gate, up): the two functions, exact for f32.
template <class T, bool GATED, class F> DEV void with_factors(const ActArgs &a, const FastAct &fast, F call)
{
    if constexpr (sizeof(T) == 4)
        call([&](float g) { return gate_factor(a.act, g, a.alpha, a.limit); },
             [&](float u) { return GATED ? up_factor(a.act, u, a.limit) : Factor{1.f, 0.f}; });
    else
        with_kind(fast, [&](auto kind) {
            constexpr int KIND = kind.value == FAST_SWIGLU && !GATED ? FAST_CLAMP : kind.value;
            call([&](float g) { return fast_gate<KIND>(fast, g); },
                 [&](float u) { return GATED ? fast_up<KIND>(fast, u) : Factor{1.f, 0.f}; });
        });
}

template <class T, Layout LAY, int V> __global__ void __launch_bounds__(THREADS) act_fwd(ActArgs a, FastAct fast)
{
    const int64_t rows = a.rows_dev ? *a.rows_dev : a.rows, per = a.I / V;
    with_factors<T, LAY != PLAIN>(a, fast, [&](auto gate, auto up) {
        for (int64_t r = blockIdx.x; r < rows; r += gridDim.x)
            for (int64_t c = threadIdx.x; c < per; c += THREADS) {
                Pack<T, V> g, u, o;
                load_h<T, LAY, V>(a, r * a.h_r + c * V * a.h_i, g, u);
#pragma unroll
                for (int j = 0; j < V; j++)
                    o.v[j] =
                        from_float<T>(gate(to_float(g.v[j])).value * up(LAY == PLAIN ? 0.f : to_float(u.v[j])).value);
                store_pack<T, V>(a.a, r * a.a_r + c * V, o);
            }
    });
}

template <class T, Layout LAY, int V> __global__ void __launch_bounds__(THREADS) act_bwd(ActArgs a, FastAct fast)
{
    __shared__ float sums[WARPS];
    const int64_t rows = a.rows_dev ? *a.rows_dev : a.rows, per = a.I / V;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        const float prob = a.prob ? a.prob[r] : 1.f;
        float dot = 0;
        with_factors<T, LAY != PLAIN>(a, fast, [&](auto gate, auto up) {
            for (int64_t c = threadIdx.x; c < per; c += THREADS) {
                const int64_t i = c * V;
                const Pack<T, V> d = load_pack<T, V>(a.da, r * a.da_r + i);
                Pack<T, V> g, u, og, ou, pa;
                load_h<T, LAY, V>(a, r * a.h_r + i * a.h_i, g, u);
#pragma unroll
                for (int j = 0; j < V; j++) {
                    const Factor f = gate(to_float(g.v[j])), v = up(LAY == PLAIN ? 0.f : to_float(u.v[j]));
                    const float da = to_float(d.v[j]), act = f.value * v.value;
                    dot += da * act;
                    pa.v[j] = from_float<T>(prob * act);
                    og.v[j] = from_float<T>(prob * da * f.slope * v.value);
                    ou.v[j] = from_float<T>(prob * da * f.value * v.slope);
                }
                store_dh<T, LAY, V>(a, r * a.dh_r + i * a.dh_i, og, ou);
                if (a.pa) store_pack<T, V>(a.pa, r * a.I + i, pa);
            }
        });
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

template <class T, Layout LAY, int V> static void run(bool forward, const ActArgs &a, Stream &s)
{
    const unsigned grid = (unsigned)fmoe_min(a.rows, 1 << 16);
    const FastAct fast = fast_act(a.act, a.alpha, a.limit);
    launch(s, Product::ACT, forward ? act_fwd<T, LAY, V> : act_bwd<T, LAY, V>, Grid{grid, THREADS}, a, fast);
}

template <class T> static void dispatch(bool forward, int gated, const ActArgs &a, Stream &s)
{
    if (a.rows == 0 || a.I == 0) return;
    constexpr int V = 16 / sizeof(T);
    const bool pairs = gated && a.h_i == 2 && a.h_u == 1 && (forward || (a.dh_i == 2 && a.dh_u == 1)),
               plain = a.h_i == 1 && (forward || a.dh_i == 1);
    const uintptr_t bits = (uintptr_t)a.h | (uintptr_t)a.a | (uintptr_t)a.da | (uintptr_t)a.dh | (uintptr_t)a.pa;
    const int64_t strides = a.h_r | a.a_r | a.da_r | a.dh_r | a.I | (pairs ? 0 : a.h_u | a.dh_u);
    const bool wide = bits % 16 == 0 && strides % V == 0;
    if (wide && pairs) run<T, PAIRS, V / 2>(forward, a, s);
    else if (wide && plain && gated) run<T, GATED, V>(forward, a, s);
    else if (wide && plain) run<T, PLAIN, V>(forward, a, s);
    else if (gated) run<T, GATED, 1>(forward, a, s);
    else run<T, PLAIN, 1>(forward, a, s);
}

static void run(int dtype, bool forward, int gated, const ActArgs &a, Stream &s)
{
    if (dtype == FMOE_F32) dispatch<float>(forward, gated, a, s);
    else if (dtype == FMOE_BF16) dispatch<bf16>(forward, gated, a, s);
    else dispatch<f16>(forward, gated, a, s);
}

void act_forward(int dtype, int gated, const ActArgs &a, Stream &s) { run(dtype, true, gated, a, s); }
void act_backward(int dtype, int gated, const ActArgs &a, Stream &s) { run(dtype, false, gated, a, s); }
