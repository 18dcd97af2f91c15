// SPDX-License-Identifier: Apache-2.0
// decode.cu - inference of few tokens: the weights that are needed are read once, at the speed of memory.
//
// Three launches (up with activation, down, combine; for one token combine is part of down), each of which starts under the tail of
// the one before it. There is no row map: a block finds the y-th expert that is hit, and its slots, from the ids. A warp reads whole
// rows of weights, 512 contiguous bytes at a time, and multiplies them with the expert's tokens. (Fragments for mma.sync, 64 bytes of
// 16 rows at a time, were half as fast.)
#include "decode.cuh"

#include "act.cuh"
#include "ops.cuh"

#include <type_traits>

static constexpr int THREADS = 256, WARPS = 8, MAX_SLOTS = 1024, MAX_EXPERTS = 4096, FEW_SLOTS = 32;

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

DEV void bad_id(const DecodeArgs &a, int slot, int64_t id)
{
    if (blockIdx.x || (id == -1 && (a.flags & FMOE_SKIP_NEG1)) || (id == a.E && (a.flags & FMOE_SKIP_E))) return;
    a.error->index = slot;
    a.error->value = id;
    __threadfence_system();
    a.error->code = DEVERR_ID;
}

// The y-th expert that some slot names, its number of slots, and the slots in order. -1: there are not so many.
struct Found {
    int expert, count;
    int only; // the slot where there is no list
    DEV int slot(const uint16_t *slots, int i) const { return only >= 0 ? only : slots[i]; }
};
DEV Found find_expert(const DecodeArgs &a, int y, uint16_t *slots)
{
    __shared__ uint32_t bits[MAX_EXPERTS / 32];
    __shared__ int16_t id[MAX_SLOTS];
    __shared__ Found found;
    const int words = (a.E + 31) / 32, lane = threadIdx.x % 32;
    if (a.R <= FEW_SLOTS) { // each slot on its own: experts hardly repeat, and a repeated one is in the cache
        const int64_t v = load_int(a.ids.p, a.ids.dtype, y / a.k * a.ids.s0 + y % a.k * a.ids.s1);
        const bool in = v >= 0 && v < a.E;
        if (!in && threadIdx.x == 0) bad_id(a, y, v);
        return Found{in ? (int)v : -1, 1, y};
    }
    for (int i = threadIdx.x; i < words; i += THREADS) bits[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < a.R; i += THREADS) {
        const int64_t v = load_int(a.ids.p, a.ids.dtype, i / a.k * a.ids.s0 + i % a.k * a.ids.s1);
        const bool in = v >= 0 && v < a.E;
        id[i] = in ? (int16_t)v : (int16_t)-1;
        if (in) atomicOr(&bits[v >> 5], 1u << (v & 31));
        else if (y == 0) bad_id(a, i, v);
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
        if (lane == 0) found = Found{e, n, -1};
    }
    __syncthreads();
    return found;
}

DEV uint4 load_weight(const void *p) { return __ldcs((const uint4 *)p); }

template <class T> DEV void unpack8(const uint4 &v, float (&f)[8])
{
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (std::is_same_v<T, bf16>) f[2 * i] = __uint_as_float(w[i] << 16), f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
        else {
            const float2 p = __half22float2(*(const __half2 *)&w[i]);
            f[2 * i] = p.x, f[2 * i + 1] = p.y;
        }
    }
}

DEV float warp_sum(float v)
{
#pragma unroll
    for (int o = 16; o; o /= 2) v += __shfl_xor_sync(~0u, v, o);
    return v;
}

// acc[r][t] += <row r, token t> over `chunks` of 256 elements, ROWS rows of weights against NT tokens (NULL: none). DEPTH chunks of
// every row are asked for at once; `ready` is called between that and the first read of a token.
template <class T, int ROWS, int NT, int DEPTH, class F>
DEV void dot_rows_of(float (&acc)[ROWS][NT], const T *const (&w)[ROWS], const T *const (&token)[NT], int chunks, int lane, F ready)
{
    for (int c0 = 0; c0 < chunks; c0 += DEPTH) {
        uint4 v[ROWS][DEPTH];
#pragma unroll
        for (int c = 0; c < DEPTH; c++)
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                if (c0 + c < chunks) v[r][c] = load_weight(w[r] + (c0 + c) * 256 + lane * 8);
        if (c0 == 0) ready();
#pragma unroll
        for (int c = 0; c < DEPTH; c++) {
            if (c0 + c >= chunks) break;
            float f[ROWS][8];
#pragma unroll
            for (int r = 0; r < ROWS; r++) unpack8<T>(v[r][c], f[r]);
#pragma unroll
            for (int t = 0; t < NT; t++) {
                if (NT > 1 && !token[t]) break; // tokens are dense from 0 on
                float x[8];
                unpack8<T>(__ldg((const uint4 *)(token[t] + (c0 + c) * 256 + lane * 8)), x);
#pragma unroll
                for (int r = 0; r < ROWS; r++)
#pragma unroll
                    for (int i = 0; i < 8; i++) acc[r][t] = fmaf(f[r][i], x[i], acc[r][t]);
            }
        }
    }
}

// up: a warp has one column of one expert, its gate and its up row.
template <class T, int NT> __global__ void __launch_bounds__(THREADS) decode_up(const __grid_constant__ DecodeArgs a)
{
    __shared__ uint16_t slots[MAX_SLOTS];
    depend_wait(); // ids and x come from the launch before
    depend_launch();
    const Found f = find_expert(a, blockIdx.y, slots);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (f.expert < 0) return;
    for (int col = blockIdx.x * WARPS + warp; col < a.I; col += gridDim.x * WARPS) {
        const int64_t at = f.expert * a.w1_g + col * a.w1_r;
        const T *const w[2] = {(const T *)a.gate + at, (const T *)a.up + at};
        for (int first = 0; first < f.count; first += NT) {
            const T *token[NT];
#pragma unroll
            for (int t = 0; t < NT; t++) token[t] = first + t < f.count ? (const T *)a.x + f.slot(slots, first + t) / a.k * a.x_r : nullptr;
            float acc[2][NT] = {};
            dot_rows_of<T, 2, NT, 8>(acc, w, token, (int)(a.H / 256), lane, [] {});
#pragma unroll
            for (int t = 0; t < NT; t++) {
                if (first + t >= f.count) break;
                const float g = warp_sum(acc[0][t]), u = warp_sum(acc[1][t]);
                if (lane == 0)
                    ((T *)a.a)[f.slot(slots, first + t) * a.I + col] = from_float<T>(gate_factor(a.act, g, a.alpha, a.limit).value * up_factor(a.act, u, a.limit).value);
            }
        }
    }
}

// down: a warp has DOWN_COLS output columns of one expert.
static constexpr int DOWN_COLS = 4;
template <class T, int NT> __global__ void __launch_bounds__(THREADS) decode_down(const __grid_constant__ DecodeArgs a)
{
    __shared__ uint16_t slots[MAX_SLOTS];
    depend_launch(); // every launch before the last one is complete: up waited for it
    const Found f = find_expert(a, blockIdx.y, slots);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (f.expert < 0) return depend_wait();
    bool waited = false;
    for (int n0 = (blockIdx.x * WARPS + warp) * DOWN_COLS; n0 < a.H; n0 += gridDim.x * WARPS * DOWN_COLS) {
        const T *w[DOWN_COLS];
#pragma unroll
        for (int r = 0; r < DOWN_COLS; r++) w[r] = (const T *)a.w2 + f.expert * a.w2_g + (n0 + r) * a.w2_r;
        for (int first = 0; first < f.count; first += NT) {
            const T *token[NT];
#pragma unroll
            for (int t = 0; t < NT; t++) token[t] = first + t < f.count ? (const T *)a.a + f.slot(slots, first + t) * a.I : nullptr;
            float acc[DOWN_COLS][NT] = {};
            dot_rows_of<T, DOWN_COLS, NT, 3>(acc, w, token, (int)(a.I / 256), lane, [&] {
                if (!waited) depend_wait(); // now a
                waited = true;
            });
#pragma unroll
            for (int t = 0; t < NT; t++) {
                if (first + t >= f.count) break;
                float s[DOWN_COLS];
#pragma unroll
                for (int r = 0; r < DOWN_COLS; r++) s[r] = warp_sum(acc[r][t]);
                if (lane == 0) *(float4 *)(a.y + (int64_t)f.slot(slots, first + t) * a.H + n0) = make_float4(s[0], s[1], s[2], s[3]);
            }
        }
    }
    if (!waited) depend_wait();
}

// One token: a pair of warps has one output column; each reads its row of half of the experts, before it waits for up. The slots are
// added in their order, and nothing is left to combine.
static constexpr int ONE_SLOTS = 4, ONE_COLS = WARPS / 2, ONE_MAX_K = 32;
template <class T> __global__ void __launch_bounds__(THREADS, 2) decode_down_one(const __grid_constant__ DecodeArgs a)
{
    __shared__ float part[ONE_COLS][ONE_MAX_K];
    __shared__ int64_t expert[ONE_MAX_K];
    __shared__ float prob[ONE_MAX_K];
    depend_launch();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp & 1, column = warp / 2;
    if ((int)threadIdx.x < a.k) {
        const int64_t id = load_int(a.ids.p, a.ids.dtype, threadIdx.x * a.ids.s1);
        expert[threadIdx.x] = id >= 0 && id < a.E ? id : -1;
        prob[threadIdx.x] = load_float(a.p.p, a.p.dtype, threadIdx.x * a.p.s1);
    }
    __syncthreads();
    const int chunks = (int)(a.I / 256), k = a.k;
    bool waited = false;
    for (int64_t n0 = blockIdx.x * ONE_COLS; n0 < a.H; n0 += gridDim.x * ONE_COLS) {
        const T *w = (const T *)a.w2 + (n0 + column) * a.w2_r + lane * 8, *x = (const T *)a.a + lane * 8;
        for (int j0 = half * ONE_SLOTS; j0 < k; j0 += 2 * ONE_SLOTS) {
            float dot[ONE_SLOTS] = {};
            for (int c0 = 0; c0 < chunks; c0 += 3) {
                uint4 v[ONE_SLOTS][3];
#pragma unroll
                for (int j = 0; j < ONE_SLOTS; j++)
#pragma unroll
                    for (int c = 0; c < 3; c++)
                        if (j0 + j < k && c0 + c < chunks && expert[j0 + j] >= 0) v[j][c] = load_weight(w + expert[j0 + j] * a.w2_g + (c0 + c) * 256);
                if (!waited) depend_wait(); // now a
                waited = true;
#pragma unroll
                for (int j = 0; j < ONE_SLOTS; j++)
#pragma unroll
                    for (int c = 0; c < 3; c++)
                        if (j0 + j < k && c0 + c < chunks && expert[j0 + j] >= 0) {
                            float f[8], y[8];
                            unpack8<T>(v[j][c], f);
                            unpack8<T>(*(const uint4 *)(x + (j0 + j) * a.I + (c0 + c) * 256), y);
#pragma unroll
                            for (int i = 0; i < 8; i++) dot[j] = fmaf(f[i], y[i], dot[j]);
                        }
            }
#pragma unroll
            for (int j = 0; j < ONE_SLOTS; j++) {
                const float s = warp_sum(dot[j]);
                if (lane == 0 && j0 + j < k) part[column][j0 + j] = s;
            }
        }
        if (!waited) depend_wait();
        waited = true;
        __syncthreads();
        if (threadIdx.x < ONE_COLS) {
            T *out = (T *)a.out + n0 + threadIdx.x;
            float s = a.add ? to_float(*out) : 0.f;
            for (int j = 0; j < k; j++)
                if (expert[j] >= 0) s = fmaf(prob[j], part[threadIdx.x][j], s);
            *out = from_float<T>(s);
        }
        __syncthreads();
    }
    if (!waited) depend_wait();
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

// Blocks of eight warps, two to a multiprocessor; each walks the columns, so that finding the expert is paid for once.
static unsigned blocks_of(int64_t groups, int64_t experts, int sms, bool few)
{
    const int64_t fit = few ? 2 * sms / experts : (groups + 3) / 4;
    return (unsigned)fmoe_max(1, fmoe_min(groups, fit));
}

template <class T, int NT> static void run_many(const DecodeArgs &a, int sms, cudaStream_t s)
{
    const bool few = a.R <= FEW_SLOTS;
    const unsigned experts = (unsigned)(few ? a.R : fmoe_min(a.R, a.E));
    launch_overlapped(decode_up<T, NT>, dim3(blocks_of((a.I + WARPS - 1) / WARPS, experts, sms, few), experts), THREADS, 0, 1, s, a);
    if (a.T == 1 && a.k <= ONE_MAX_K) {
        launch_overlapped(decode_down_one<T>, dim3((unsigned)fmoe_min(2 * sms, a.H / ONE_COLS)), THREADS, 0, 1, s, a);
        return;
    }
    launch_overlapped(decode_down<T, NT>, dim3(blocks_of((a.H / DOWN_COLS + WARPS - 1) / WARPS, experts, sms, few), experts), THREADS, 0, 1, s, a);
    launch_overlapped(decode_combine<T>, dim3((unsigned)((a.H + SUM_THREADS - 1) / SUM_THREADS), (unsigned)a.T), SUM_THREADS, 0, 1, s, a);
}

template <class T> static void run(const DecodeArgs &a, int sms, cudaStream_t s)
{
    if (a.R <= FEW_SLOTS) run_many<T, 1>(a, sms, s);
    else run_many<T, 2>(a, sms, s);
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
    if (p->d.dtype == FMOE_BF16) run<bf16>(a, plan->sms, s);
    else run<f16>(a, plan->sms, s);
    return true;
}
