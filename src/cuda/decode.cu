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

static constexpr int THREADS = 64, WARPS = 2, MAX_SLOTS = 1024, MAX_EXPERTS = 4096, DEPTH = 8;

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

DEV void bad_id(const DecodeArgs &a, int slot, int64_t id, int y)
{
    if (blockIdx.x || y || (id == -1 && (a.flags & FMOE_SKIP_NEG1)) || (id == a.E && (a.flags & FMOE_SKIP_E))) return;
    a.error->index = slot;
    a.error->value = id;
    __threadfence_system();
    a.error->code = DEVERR_ID;
}

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
    if (a.R <= 32) { // every warp on its own, in registers; the order of experts is that of their first slots
        const int64_t v = lane < a.R ? load_int(a.ids.p, a.ids.dtype, lane / a.k * a.ids.s0 + lane % a.k * a.ids.s1) : -1;
        const bool in = lane < a.R && v >= 0 && v < a.E;
        if (lane < a.R && !in) bad_id(a, lane, v, y);
        const unsigned same = __match_any_sync(~0u, in ? (int)v : -1), leaders = __ballot_sync(~0u, in && lane == __ffs(same) - 1);
        if (y >= __popc(leaders)) return Found{-1, 0};
        const int src = (int)__fns(leaders, 0, y + 1), e = __shfl_sync(~0u, (int)v, src);
        const unsigned mine = __shfl_sync(~0u, same, src);
        if (mine >> lane & 1) slots[__popc(mine & ((1u << lane) - 1))] = (uint16_t)lane; // all warps write the same
        __syncwarp();
        return Found{e, __popc(mine)};
    }
    for (int i = threadIdx.x; i < words; i += THREADS) bits[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < a.R; i += THREADS) {
        const int64_t v = load_int(a.ids.p, a.ids.dtype, i / a.k * a.ids.s0 + i % a.k * a.ids.s1);
        const bool in = v >= 0 && v < a.E;
        id[i] = in ? (int16_t)v : (int16_t)-1;
        if (in) atomicOr(&bits[v >> 5], 1u << (v & 31));
        else bad_id(a, i, v, y);
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
// DEPTH steps of weights are on their way at any time; `ready` is called between the first of them and the first read of a token.
template <class T, int NB, class F> DEV void stream_rows(float (&acc)[NB][4], const T *w0, const T *w1, const T *const (&token)[NB], int steps, F ready)
{
    uint4 g[DEPTH], u[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
        if (i < steps) g[i] = load_weight(w0 + i * 32), u[i] = load_weight(w1 + i * 32);
    ready();
    for (int s = 0; s < steps; s += DEPTH) {
#pragma unroll
        for (int half = 0; half < DEPTH; half += DEPTH / 2) { // tokens for a few steps at once, from the cache
            uint4 x[DEPTH / 2][NB];
#pragma unroll
            for (int i = 0; i < DEPTH / 2; i++)
#pragma unroll
                for (int nb = 0; nb < NB; nb++) {
                    x[i][nb] = make_uint4(0, 0, 0, 0);
                    if (token[nb] && s + half + i < steps) x[i][nb] = __ldg((const uint4 *)(token[nb] + (s + half + i) * 32));
                }
#pragma unroll
            for (int i = 0; i < DEPTH / 2; i++) {
                const int at = half + i, next = s + at + DEPTH;
                if (s + at < steps) {
#pragma unroll
                    for (int nb = 0; nb < NB; nb++) {
                        mma8<T>(acc[nb], g[at].x, u[at].x, g[at].y, u[at].y, x[i][nb].x, x[i][nb].y);
                        mma8<T>(acc[nb], g[at].z, u[at].z, g[at].w, u[at].w, x[i][nb].z, x[i][nb].w);
                    }
                    if (next < steps) g[at] = load_weight(w0 + next * 32), u[at] = load_weight(w1 + next * 32);
                }
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

// down: a warp has 16 output columns of one expert.
template <class T, int NB> __global__ void __launch_bounds__(THREADS) decode_down(const __grid_constant__ DecodeArgs a)
{
    __shared__ uint16_t slots[MAX_SLOTS];
    depend_launch(); // every launch before the last one is complete: up waited for it
    const Found f = find_expert(a, blockIdx.y, slots);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n0 = (blockIdx.x * WARPS + warp) * 16, row = lane / 4, k0 = lane % 4 * 8;
    if (f.expert < 0 || n0 >= a.H) return depend_wait();
    const T *w = (const T *)a.w2 + f.expert * a.w2_g + (n0 + row) * a.w2_r + k0;
    bool waited = false;
    for (int first = 0; first < f.count; first += 8 * NB) {
        const T *token[NB];
#pragma unroll
        for (int nb = 0; nb < NB; nb++) {
            const int i = first + nb * 8 + row;
            token[nb] = i < f.count ? (const T *)a.a + slots[i] * a.I + k0 : nullptr;
        }
        float acc[NB][4] = {};
        stream_rows<T, NB>(acc, w, w + 8 * a.w2_r, token, (int)(a.I / 32), [&] {
            if (!waited) depend_wait(); // now a
            waited = true;
        });
#pragma unroll
        for (int nb = 0; nb < NB; nb++) {
            const int i = first + nb * 8 + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (i + j < f.count) {
                    float *y = a.y + (int64_t)slots[i + j] * a.H + n0 + row;
                    y[0] = acc[nb][j];
                    y[8] = acc[nb][2 + j];
                }
        }
    }
}

// One token: a block has 16 columns, a warp a slot; the slots are added in their order, and nothing is left to combine.
static constexpr int ONE_WARPS = 8;
template <class T> __global__ void __launch_bounds__(32 * ONE_WARPS) decode_down_one(const __grid_constant__ DecodeArgs a)
{
    __shared__ float part[32][17];
    depend_launch();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, n0 = blockIdx.x * 16;
    bool waited = false;
    for (int j = warp; j < a.k; j += ONE_WARPS) {
        const int64_t id = load_int(a.ids.p, a.ids.dtype, j * a.ids.s1);
        const bool in = id >= 0 && id < a.E;
        float acc[1][4] = {};
        if (in) {
            const T *w = (const T *)a.w2 + id * a.w2_g + (n0 + row) * a.w2_r + lane % 4 * 8;
            const T *token[1] = {row == 0 ? (const T *)a.a + j * a.I + lane % 4 * 8 : nullptr};
            stream_rows<T, 1>(acc, w, w + 8 * a.w2_r, token, (int)(a.I / 32), [&] {
                if (!waited) depend_wait();
                waited = true;
            });
        }
        if (lane % 4 == 0) part[j][row] = in ? acc[0][0] : 0.f, part[j][row + 8] = in ? acc[0][2] : 0.f;
    }
    if (!waited) depend_wait();
    __syncthreads();
    if (threadIdx.x >= 16) return;
    T *out = (T *)a.out + n0 + threadIdx.x;
    float s = a.add ? to_float(*out) : 0.f;
    for (int j = 0; j < a.k; j++) {
        const int64_t id = load_int(a.ids.p, a.ids.dtype, j * a.ids.s1);
        if (id >= 0 && id < a.E) s = fmaf(load_float(a.p.p, a.p.dtype, j * a.p.s1), part[j][threadIdx.x], s);
    }
    *out = from_float<T>(s);
}

// out[t] = sum over its slots, in their order.
static constexpr int SUM_THREADS = 128;
template <class T> __global__ void __launch_bounds__(SUM_THREADS) decode_combine(const __grid_constant__ DecodeArgs a)
{
    depend_wait();
    depend_launch();
    const int64_t t = blockIdx.y, c = blockIdx.x * SUM_THREADS + threadIdx.x;
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
    const dim3 up((unsigned)(a.I / 8), experts), down((unsigned)((a.H / 16 + WARPS - 1) / WARPS), experts), sum((unsigned)((a.H + SUM_THREADS - 1) / SUM_THREADS), (unsigned)a.T);
    if (a.T == 1 && a.k <= 32) {
        launch_overlapped(decode_up<T, 1>, up, THREADS, 0, 1, s, a);
        launch_overlapped(decode_down_one<T>, dim3((unsigned)(a.H / 16)), 32 * ONE_WARPS, 0, 1, s, a);
        return;
    }
    if (a.T <= 8) {
        launch_overlapped(decode_up<T, 1>, up, THREADS, 0, 1, s, a);
        launch_overlapped(decode_down<T, 1>, down, THREADS, 0, 1, s, a);
    } else {
        launch_overlapped(decode_up<T, 2>, up, THREADS, 0, 1, s, a);
        launch_overlapped(decode_down<T, 2>, down, THREADS, 0, 1, s, a);
    }
    launch_overlapped(decode_combine<T>, sum, SUM_THREADS, 0, 1, s, a);
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
