// SPDX-License-Identifier: Apache-2.0
// decode.cu - inference of few tokens with weights [out,in] (decode_cols.cu: [in,out]).
//
// Two launches, up with activation and down with the weighted sum; down starts under the tail of up, and asks for weights before it waits
// for up. There is no row map: every block finds the experts that are hit, and their slots, from the ids. As many blocks as fit at once
// walk all rows, so that they end together. A warp reads whole rows of weights, 512 contiguous bytes at a time, and multiplies them with
// the expert's tokens. (Fragments for mma.sync, 64 bytes of 16 rows at a time, were half as fast.)
#include "decode.cuh"
#include "ops.cuh"

DEV float warp_sum(float v)
{
#pragma unroll
    for (int o = 16; o; o /= 2) v += __shfl_xor_sync(~0u, v, o);
    return v;
}

// The rows of weights a warp multiplies: ROWS at a time, `apart` elements from one another, the first ones `r` times i % width into the
// (i / width)-th expert, for i = begin, begin + step and so on.
template <class T> struct Weights {
    const T *p;
    int64_t g, r, apart;
    int n, width, begin, step; // n: elements of a row
};

// Calls done(slot, i % width, acc), acc[r] = <row r, token of the slot>, for the slots of the warp's experts, NT at a time. DEPTH chunks
// of every row are asked for at once, and with them those of a token (TOGETHER: of all NT): loads come back in their order, so even what
// is in the cache comes after weights that other warps want. `ready` is called between the first weights and the first token. ANY:
// the last chunk of 256 elements may not be a whole one. (It costs registers, and so do biases: 2 to 3 % of the time.)
template <int ROWS, int DEPTH, int NT, bool TOGETHER, bool ANY, class T, class Token, class Ready, class Done>
DEV void multiply(const Weights<T> &w, const Hits &h, Token token_of, Ready ready, Done done)
{
    const int lane = threadIdx.x % 32;
    const auto in = [&](int c) { return c * 256 + (ANY ? lane * 8 : 0) < w.n; };
    bool waited = false;
    for (int hit = 0, group = w.begin;; group += w.step) {
        while (group >= w.width) group -= w.width, hit++;
        if (hit >= h.count) break;
        int next = h.first[hit];
        const T *const row = w.p + h.id[next] * w.g + group * w.r + lane * 8;
        while (next >= 0) {
            int slot[NT];
            const T *token[NT];
#pragma unroll
            for (int t = 0; t < NT; t++) {
                slot[t] = next;
                if (next < 0) continue;
                token[t] = token_of(next) + lane * 8;
                next = h.next[next];
            }
            float acc[NT][ROWS] = {};
#pragma unroll 1
            for (int c0 = 0; c0 * 256 < w.n; c0 += DEPTH) {
                uint4 v[DEPTH][ROWS], all[NT][DEPTH];
#pragma unroll
                for (int c = 0; c < DEPTH; c++)
#pragma unroll
                    for (int r = 0; r < ROWS; r++)
                        if (in(c0 + c)) v[c][r] = load_weight(row + r * w.apart + (c0 + c) * 256);
                if (!waited) ready();
                waited = true;
                const auto load = [&](int t, int c) { return *(const uint4 *)(token[t] + (c0 + c) * 256); };
#pragma unroll
                for (int t = 0; t < NT; t++)
                    if (TOGETHER && (t == 0 || slot[t] >= 0)) {
#pragma unroll
                        for (int c = 0; c < DEPTH; c++)
                            if (in(c0 + c)) all[t][c] = load(t, c);
                    }
#pragma unroll
                for (int t = 0; t < NT; t++) {
                    if (t > 0 && slot[t] < 0) break;
                    uint4 x[DEPTH];
#pragma unroll
                    for (int c = 0; c < DEPTH; c++)
                        if (!TOGETHER && in(c0 + c)) x[c] = load(t, c);
#pragma unroll
                    for (int c = 0; c < DEPTH; c++)
                        if (in(c0 + c)) {
                            float y[8];
                            unpack8<T>(TOGETHER ? all[t][c] : x[c], y);
#pragma unroll
                            for (int r = 0; r < ROWS; r++) {
                                float f[8];
                                unpack8<T>(v[c][r], f);
#pragma unroll
                                for (int i = 0; i < 8; i++) acc[t][r] = fmaf(f[i], y[i], acc[t][r]);
                            }
                        }
                }
            }
#pragma unroll
            for (int t = 0; t < NT; t++) {
                if (slot[t] < 0) break;
#pragma unroll
                for (int r = 0; r < ROWS; r++) acc[t][r] = warp_sum(acc[t][r]);
                if (lane == 0) done(slot[t], group, acc[t]);
            }
        }
    }
    if (!waited) ready();
}

// up: a warp has one column of one expert at a time, its gate and its up row.
template <class T, int NT, int DEPTH, int PER_SM, bool ANY> __global__ void __launch_bounds__(DECODE_THREADS, PER_SM) decode_up(const __grid_constant__ DecodeArgs a)
{
    extern __shared__ __align__(16) char shared[];
    depend_wait(); // ids and x come from the launch before
    depend_launch();
    const Hits h = find_experts(a, shared);
    const int warp = blockIdx.x * DECODE_WARPS + threadIdx.x / 32, warps = gridDim.x * DECODE_WARPS;
    const Weights<T> w = {(const T *)a.w1, a.w1_g, ANY ? a.gate * a.w1_r : a.w1_r, (ANY ? a.up : a.I) * a.w1_r, (int)a.H, (int)a.I, warp, warps};
    multiply<2, DEPTH, NT, false, ANY>(w, h, [&](int slot) { return (const T *)a.x + slot / a.k * a.x_r; }, [] {}, [&](int slot, int column, const float (&v)[2]) {
        const float r = ANY ? decode_act(a, h.id[slot], column, v[0], v[1]) : gate_factor(a.act, v[0], a.alpha, a.limit).value * up_factor(a.act, v[1], a.limit).value;
        ((T *)a.a)[slot * a.I + column] = from_float<T>(r);
    });
}

// down: a block has some columns of all experts, a warp ROWS of them at a time; each token's slots are added up in their order.
template <class T, int NT, int ROWS, int PER_SM, bool ANY> __global__ void __launch_bounds__(DECODE_THREADS, PER_SM) decode_down(const __grid_constant__ DecodeArgs a)
{
    extern __shared__ __align__(16) char shared[];
    depend_launch(); // every launch before the last one is complete: up waited for it
    const int groups = (int)a.H / ROWS, first = (int)((int64_t)groups * blockIdx.x / gridDim.x);
    const int width = (int)((int64_t)groups * (blockIdx.x + 1) / gridDim.x) - first;
    const int column = first * ROWS, columns = width * ROWS;
    float *const prob = (float *)shared, *const part = prob + a.R; // part [R][columns]
    for (int i = threadIdx.x; i < a.R; i += DECODE_THREADS) prob[i] = load_float(a.p.p, a.p.dtype, i / a.k * a.p.s0 + i % a.k * a.p.s1);
    const Hits h = find_experts(a, (char *)(part + a.R * columns));
    const Weights<T> w = {(const T *)a.w2 + column * a.w2_r, a.w2_g, ROWS * a.w2_r, a.w2_r, (int)a.I, width, (int)threadIdx.x / 32, DECODE_WARPS};
    const auto now_a = [] { depend_wait(); };
    multiply<ROWS, 3, NT, true, ANY>(w, h, [&](int slot) { return (const T *)a.a + slot * a.I; }, now_a, [&](int slot, int group, const float (&v)[ROWS]) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) part[slot * columns + group * ROWS + r] = v[r];
    });
    __syncthreads();
    for (int i = threadIdx.x; i < (int)a.T * columns; i += DECODE_THREADS) {
        const int t = i / columns, c = i % columns;
        T *out = (T *)a.out + t * a.out_r + column + c;
        float s = a.add ? to_float(*out) : 0.f;
        for (int j = t * a.k; j < (t + 1) * a.k; j++)
            if (h.id[j] >= 0) {
                const float bias = ANY && a.b2.p ? load_float(a.b2.p, a.b2.dtype, h.id[j] * a.b2.s0 + (column + c) * a.b2.s1) : 0.f;
                s = fmaf(prob[j], part[j * columns + c] + bias, s);
            }
        *out = from_float<T>(s);
    }
}

// PER_SM blocks a multiprocessor.
template <class T, int NT, int DEPTH, int ROWS, int PER_SM> static void run(const DecodeArgs &a, int sms, cudaStream_t s)
{
    const int grid = PER_SM * sms, groups = (int)a.H / ROWS, hits = Hits::bytes_of(a.R, a.E);
    const int blocks = fmoe_cuda_decode_blocks(groups, grid, ROWS * a.R), columns = (groups + blocks - 1) / blocks * ROWS;
    const bool any = a.b1.p || a.gate != 1;
    launch_overlapped(any || a.H % 256 ? decode_up<T, NT, DEPTH, PER_SM, true> : decode_up<T, NT, DEPTH, PER_SM, false>, dim3((unsigned)grid), DECODE_THREADS, (size_t)hits, 1, s, a);
    launch_overlapped(any || a.I % 256 ? decode_down<T, NT, ROWS, PER_SM, true> : decode_down<T, NT, ROWS, PER_SM, false>, dim3((unsigned)blocks), DECODE_THREADS,
                      (size_t)(hits + a.R * 4 * (columns + 1)), 1, s, a);
}

template <class T> static void run(const DecodeArgs &a, int sms, cudaStream_t s)
{
    if (a.T == 1) run<T, 1, 4, 2, 3>(a, sms, s);
    else run<T, 2, 8, 4, 2>(a, sms, s);
}

bool decode_run(const fmoe_plan_impl *p, const fmoe_experts_args *args, const fmoe_run *run_args, void *a_rows, void *parts)
{
    const Plan *plan = plan_of(p);
    const int64_t T = args->x->shape[0], HC = p->h_cols;
    if (!fmoe_cuda_use_decode(&plan->shape, T) || !args->w.w1 || !args->w.w2) return false;
    const fmoe_tensor *w1 = args->w.w1, *w2 = args->w.w2;
    const bool rows = fmoe_stride(w1, 2) == 1 && fmoe_stride(w2, 2) == 1, cols = fmoe_stride(w1, 1) == 1 && fmoe_stride(w2, 1) == 1;
    if (!rows && !cols) return false;
    DecodeArgs a = {};
    a.ids = view(args->ids);
    a.p = view(args->weights);
    a.T = T, a.H = p->d.H, a.I = p->d.I;
    a.R = (int)(T * p->d.k), a.k = (int)p->d.k, a.E = (int)p->d.E;
    a.flags = p->d.flags;
    a.gate = a.flags & FMOE_INTERLEAVED ? 2 : 1;
    a.up = a.flags & FMOE_INTERLEAVED ? 1 : a.I;
    if (a.flags & FMOE_BIAS) a.b1 = view(args->w.b1), a.b2 = view(args->w.b2);
    a.x = fmoe_data(args->x);
    a.x_r = fmoe_stride(args->x, 0);
    a.w1 = fmoe_data(w1);
    a.w2 = fmoe_data(w2);
    a.w1_g = fmoe_stride(w1, 0), a.w1_r = fmoe_stride(w1, rows ? 1 : 2);
    a.w2_g = fmoe_stride(w2, 0), a.w2_r = fmoe_stride(w2, rows ? 1 : 2);
    const uintptr_t bits = (uintptr_t)a.x | (uintptr_t)a.w1 | (uintptr_t)a.w2;
    if (bits % 16 || (a.x_r | a.w1_g | a.w1_r | a.w2_g | a.w2_r) % 8) return false;
    a.a = a_rows;
    a.out = fmoe_data(args->out);
    a.out_r = fmoe_stride(args->out, 0);
    a.act = p->d.act;
    a.alpha = p->d.act_alpha;
    a.limit = p->d.act_limit;
    a.add = (run_args->flags & FMOE_ADD_OUT) != 0;
    a.error = plan->error_dev;
    const cudaStream_t s = stream_of(run_args);
    if (rows) {
        if (p->d.dtype == FMOE_BF16) run<bf16>(a, plan->sms, s);
        else run<f16>(a, plan->sms, s);
        return true;
    }
    if (!fmoe_cuda_use_decode_cols(&plan->shape, T)) return false;
    a.part[0] = (float *)parts;
    a.part[1] = a.part[0] + (size_t)DECODE_PARTS * (size_t)a.R * (size_t)HC;
    decode_cols_run(a, p->d.dtype, plan->sms, s);
    return true;
}
