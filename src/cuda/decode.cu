// SPDX-License-Identifier: Apache-2.0
// decode.cu - inference of few tokens: every weight that is needed is read once, straight into the registers mma wants.
//
// Three launches (up with activation, down, combine), each of which starts under the tail of the one before it. There is no row map: a
// block finds the y-th expert that is hit, and its slots, from the ids. A warp holds 16 rows of weights against 8 tokens: a lane
// loads 16 bytes of a row, and since the token's 16 bytes are taken from the same place, the order of k inside them does not matter.
#include "decode.cuh"

#include "act.cuh"
#include "ops.cuh"

#include <type_traits>

static constexpr int THREADS = 128, WARPS = 4, MAX_SLOTS = 1024, MAX_EXPERTS = 4096, UNROLL = 4;

struct DecodeArgs {
    View ids, p;
    int R, k, E;
    int64_t T, H, I;
    uint32_t flags;
    const void *x;
    int64_t x_r;
    const void *gate, *up, *w2; // rows of unit stride
    int64_t w1_r, w1_g, w2_r, w2_g;
    void *a;  // [R, I]
    float *y; // [R, H]
    void *out;
    int64_t out_r;
    int act, add;
    float alpha, limit;
    DeviceError *error;
};

// The y-th expert that some slot names, its number of slots, and the slots in order. -1: there are not so many.
struct Found {
    int expert, count;
};
DEV Found find_expert(const DecodeArgs &a, int y, uint16_t *slots)
{
    __shared__ uint32_t bits[MAX_EXPERTS / 32];
    __shared__ int16_t id[MAX_SLOTS];
    __shared__ Found found;
    const int words = (a.E + 31) / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < words; i += THREADS) bits[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < a.R; i += THREADS) {
        const int64_t v = load_int(a.ids.p, a.ids.dtype, i / a.k * a.ids.s0 + i % a.k * a.ids.s1);
        const bool in = v >= 0 && v < a.E;
        id[i] = in ? (int16_t)v : (int16_t)-1;
        if (in) atomicOr(&bits[v >> 5], 1u << (v & 31));
        else if (blockIdx.x == 0 && y == 0 && !(v == -1 && (a.flags & FMOE_SKIP_NEG1)) && !(v == a.E && (a.flags & FMOE_SKIP_E))) {
            a.error->index = i;
            a.error->value = v;
            __threadfence_system();
            a.error->code = DEVERR_ID;
        }
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        int left = y, e = -1;
        for (int w0 = 0; w0 < words && e < 0; w0 += 32) {
            const uint32_t w = w0 + lane < words ? bits[w0 + lane] : 0;
            int sum = __popc(w);
            for (int d = 1; d < 32; d *= 2) {
                const int o = __shfl_up_sync(~0u, sum, d);
                if (lane >= d) sum += o;
            }
            const int before = sum - __popc(w), total = __shfl_sync(~0u, sum, 31);
            int mine = -1;
            if (left >= before && left < sum) mine = 32 * (w0 + lane) + (int)__fns(w, 0, left - before + 1);
            const unsigned who = __ballot_sync(~0u, mine >= 0);
            if (who) e = __shfl_sync(~0u, mine, __ffs(who) - 1);
            else left -= total;
        }
        int n = 0;
        if (e >= 0)
            for (int i0 = 0; i0 < a.R; i0 += 32) {
                const bool hit = i0 + lane < a.R && id[i0 + lane] == e;
                const unsigned m = __ballot_sync(~0u, hit);
                if (hit) slots[n + __popc(m & ((1u << lane) - 1))] = (uint16_t)(i0 + lane);
                n += __popc(m);
            }
        if (lane == 0) found = Found{e, n};
    }
    __syncthreads();
    return found;
}

template <class T> DEV void mma8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
    if constexpr (std::is_same_v<T, bf16>)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

DEV uint4 load_weight(const void *p) { return __ldcs((const uint4 *)p); }

// acc[nb] += 16 rows (8 at w0, 8 at w1) x 8 tokens over `steps` of 32 in k. token[nb]: this lane's token row, NULL: none.
// `ready` is called when the first weights are on their way and before the first token is read.
template <class T, int NB, class F> DEV void stream_rows(float (&acc)[NB][4], const T *w0, const T *w1, const T *const (&token)[NB], int steps, F ready)
{
    uint4 g[UNROLL], u[UNROLL];
    auto fetch = [&](int s) {
#pragma unroll
        for (int i = 0; i < UNROLL; i++)
            if (s + i < steps) g[i] = load_weight(w0 + (s + i) * 32), u[i] = load_weight(w1 + (s + i) * 32);
    };
    fetch(0);
    ready();
    for (int s = 0; s < steps; s += UNROLL) {
        uint4 cg[UNROLL], cu[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) cg[i] = g[i], cu[i] = u[i];
        fetch(s + UNROLL);
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            if (s + i >= steps) break;
#pragma unroll
            for (int nb = 0; nb < NB; nb++) {
                uint4 x = make_uint4(0, 0, 0, 0);
                if (token[nb]) x = __ldg((const uint4 *)(token[nb] + (s + i) * 32));
                mma8<T>(acc[nb], cg[i].x, cu[i].x, cg[i].y, cu[i].y, x.x, x.y);
                mma8<T>(acc[nb], cg[i].z, cu[i].z, cg[i].w, cu[i].w, x.z, x.w);
            }
        }
    }
}

// up: a block has 8 columns of one expert; its warps share the contraction.
template <class T, int NB> __global__ void __launch_bounds__(THREADS) decode_up(const __grid_constant__ DecodeArgs a)
{
    __shared__ uint16_t slots[MAX_SLOTS];
    __shared__ float4 sums[WARPS][NB][32];
    depend_wait(); // ids and x come from the launch before
    depend_launch();
    const Found f = find_expert(a, blockIdx.y, slots);
    if (f.expert < 0) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, c0 = blockIdx.x * 8, row = lane / 4;
    const int steps = (int)(a.H / 32 / WARPS), k0 = warp * steps * 32 + lane % 4 * 8;
    const int64_t at = f.expert * a.w1_g + (c0 + row) * a.w1_r + k0;
    for (int first = 0; first < f.count; first += 8 * NB) {
        const T *token[NB];
#pragma unroll
        for (int nb = 0; nb < NB; nb++) {
            const int i = first + nb * 8 + row;
            token[nb] = i < f.count ? (const T *)a.x + slots[i] / a.k * a.x_r + k0 : nullptr;
        }
        float acc[NB][4] = {};
        stream_rows<T, NB>(acc, (const T *)a.gate + at, (const T *)a.up + at, token, steps, [] {});
#pragma unroll
        for (int nb = 0; nb < NB; nb++) sums[warp][nb][lane] = make_float4(acc[nb][0], acc[nb][1], acc[nb][2], acc[nb][3]);
        __syncthreads();
        for (int nb = warp; nb < NB; nb += WARPS) {
            float4 s = sums[0][nb][lane];
#pragma unroll
            for (int w = 1; w < WARPS; w++) {
                const float4 o = sums[w][nb][lane];
                s.x += o.x, s.y += o.y, s.z += o.z, s.w += o.w;
            }
            // Columns of the fragment are tokens 2 q and 2 q + 1; its rows the gate, and 8 below, the up value of column `row`.
            const int i = first + nb * 8 + lane % 4 * 2;
            const float v[2] = {gate_factor(a.act, s.x, a.alpha, a.limit).value * up_factor(a.act, s.z, a.limit).value,
                                gate_factor(a.act, s.y, a.alpha, a.limit).value * up_factor(a.act, s.w, a.limit).value};
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (i + j < f.count) ((T *)a.a)[slots[i + j] * a.I + c0 + row] = from_float<T>(v[j]);
        }
        __syncthreads();
    }
}

// down: a block has 16 output columns for each half of its warps, which share the contraction two by two.
template <class T, int NB> __global__ void __launch_bounds__(THREADS) decode_down(const __grid_constant__ DecodeArgs a)
{
    __shared__ uint16_t slots[MAX_SLOTS];
    __shared__ float4 sums[WARPS / 2][NB][32];
    depend_launch(); // every launch before the last one is complete: up waited for it
    const Found f = find_expert(a, blockIdx.y, slots);
    if (f.expert < 0) return depend_wait();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp & 1, n0 = blockIdx.x * 32 + warp / 2 * 16, row = lane / 4;
    const int all = (int)(a.I / 32), steps = half ? all / 2 : all - all / 2, k0 = (half ? all - all / 2 : 0) * 32 + lane % 4 * 8;
    const T *w = (const T *)a.w2 + f.expert * a.w2_g + (n0 + row) * a.w2_r + k0;
    const bool on = n0 < a.H;
    bool waited = false;
    for (int first = 0; first < f.count; first += 8 * NB) {
        const T *token[NB];
#pragma unroll
        for (int nb = 0; nb < NB; nb++) {
            const int i = first + nb * 8 + row;
            token[nb] = i < f.count ? (const T *)a.a + slots[i] * a.I + k0 : nullptr;
        }
        float acc[NB][4] = {};
        auto ready = [&] {
            if (!waited) depend_wait(); // now a
            waited = true;
        };
        if (on) stream_rows<T, NB>(acc, w, w + 8 * a.w2_r, token, steps, ready);
        else ready();
        if (half)
#pragma unroll
            for (int nb = 0; nb < NB; nb++) sums[warp / 2][nb][lane] = make_float4(acc[nb][0], acc[nb][1], acc[nb][2], acc[nb][3]);
        __syncthreads();
        if (!half && on)
#pragma unroll
            for (int nb = 0; nb < NB; nb++) {
                const float4 o = sums[warp / 2][nb][lane];
                const float v[4] = {acc[nb][0] + o.x, acc[nb][1] + o.y, acc[nb][2] + o.z, acc[nb][3] + o.w};
                const int i = first + nb * 8 + lane % 4 * 2;
#pragma unroll
                for (int j = 0; j < 2; j++)
                    if (i + j < f.count) {
                        float *y = a.y + (int64_t)slots[i + j] * a.H + n0 + row;
                        y[0] = v[j];
                        y[8] = v[2 + j];
                    }
            }
        __syncthreads();
    }
}

// out[t] = sum over its slots, in their order.
template <class T> __global__ void __launch_bounds__(THREADS) decode_combine(const __grid_constant__ DecodeArgs a)
{
    depend_wait();
    depend_launch();
    const int64_t t = blockIdx.y, c = blockIdx.x * THREADS + threadIdx.x;
    if (c >= a.H) return;
    T *out = (T *)a.out + t * a.out_r + c;
    float s = a.add ? to_float(*out) : 0.f;
#pragma unroll 8
    for (int j = 0; j < a.k; j++) {
        const int64_t id = load_int(a.ids.p, a.ids.dtype, t * a.ids.s0 + j * a.ids.s1);
        if (id >= 0 && id < a.E) s = fmaf(load_float(a.p.p, a.p.dtype, t * a.p.s0 + j * a.p.s1), a.y[(t * a.k + j) * a.H + c], s);
    }
    *out = from_float<T>(s);
}

template <class T> static void run(const DecodeArgs &a, cudaStream_t s)
{
    const unsigned experts = (unsigned)fmoe_min(a.R, a.E);
    const dim3 up((unsigned)(a.I / 8), experts), down((unsigned)((a.H + 31) / 32), experts), sum((unsigned)((a.H + THREADS - 1) / THREADS), (unsigned)a.T);
    if (a.T <= 8) {
        launch_overlapped(decode_up<T, 1>, up, THREADS, 0, 1, s, a);
        launch_overlapped(decode_down<T, 1>, down, THREADS, 0, 1, s, a);
    } else {
        launch_overlapped(decode_up<T, 2>, up, THREADS, 0, 1, s, a);
        launch_overlapped(decode_down<T, 2>, down, THREADS, 0, 1, s, a);
    }
    launch_overlapped(decode_combine<T>, sum, THREADS, 0, 1, s, a);
}

bool decode_run(const fmoe_plan_impl *p, const fmoe_experts_args *args, const fmoe_run *run_args, void *a_rows, float *y_rows)
{
    const Plan *plan = plan_of(p);
    const int64_t T = args->x->shape[0];
    if (!fmoe_cuda_use_decode(&plan->shape, T) || (p->d.flags & (FMOE_BIAS | FMOE_INTERLEAVED)) || !args->w.w1 || !args->w.w2) return false;
    const fmoe_tensor *w1 = args->w.w1, *w2 = args->w.w2;
    const size_t size = 2;
    DecodeArgs a = {};
    a.ids = View{fmoe_data(args->ids), fmoe_tensor_dtype(args->ids), fmoe_stride(args->ids, 0), fmoe_stride(args->ids, 1)};
    a.p = View{fmoe_data(args->weights), fmoe_tensor_dtype(args->weights), fmoe_stride(args->weights, 0), fmoe_stride(args->weights, 1)};
    a.T = T, a.H = p->d.H, a.I = p->d.I;
    a.R = (int)(T * p->d.k), a.k = (int)p->d.k, a.E = (int)p->d.E;
    a.flags = p->d.flags;
    a.x = fmoe_data(args->x);
    a.x_r = fmoe_stride(args->x, 0);
    a.w1_g = fmoe_stride(w1, 0), a.w1_r = fmoe_stride(w1, 1);
    a.w2_g = fmoe_stride(w2, 0), a.w2_r = fmoe_stride(w2, 1);
    a.gate = fmoe_data(w1);
    a.up = (const char *)a.gate + (size_t)(a.I * a.w1_r) * size;
    a.w2 = fmoe_data(w2);
    const uintptr_t bits = (uintptr_t)a.x | (uintptr_t)a.gate | (uintptr_t)a.up | (uintptr_t)a.w2;
    if (fmoe_stride(w1, 2) != 1 || fmoe_stride(w2, 2) != 1 || bits % 16 || (a.x_r | a.w1_g | a.w1_r | a.w2_g | a.w2_r) % 8) return false;
    a.a = a_rows;
    a.y = y_rows;
    a.out = fmoe_data(args->out);
    a.out_r = fmoe_stride(args->out, 0);
    a.act = p->d.act;
    a.alpha = p->d.act_alpha;
    a.limit = p->d.act_limit;
    a.add = (run_args->flags & FMOE_ADD_OUT) != 0;
    a.error = plan->error_dev;
    const cudaStream_t s = stream_of(run_args);
    if (p->d.dtype == FMOE_BF16) run<bf16>(a, s);
    else run<f16>(a, s);
    return true;
}
