// SPDX-License-Identifier: Apache-2.0
// route.cu - logits to ids and weights, and back to dlogits: a warp a token, scores in shared memory.
//
// Selection is repeated argmax: the lowest index wins among equals and NaN ranks below everything, so any row gives k
// distinct ids.
#include "ops.cuh"

#include <math_constants.h>

static constexpr int kMaxWarps = 4;

DEV float warp_max(float v)
{
#pragma unroll
    for (int o = 16; o; o /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
    return v;
}
DEV float warp_sum(float v)
{
#pragma unroll
    for (int o = 16; o; o /= 2) v += __shfl_xor_sync(~0u, v, o);
    return v;
}
DEV float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
DEV float softplus(float x) { return (x > 0 ? x : 0.f) + log1pf(expf(-fabsf(x))); }

// a ranks before b: larger, or b is NaN and a is not.
DEV bool before(float a, float b) { return a > b || (isnan(b) && !isnan(a)); }

struct Shared { // of one warp
    float *score, *choice, *group, *q, *dq;
    int *id;
    unsigned char *taken;
};
static size_t shared_bytes(const RouteArgs &a)
{
    return ((size_t)(2 * a.E + a.rule.groups + 3 * a.k) * 4 + (size_t)a.E + 15) / 16 * 16;
}
DEV Shared carve(const RouteArgs &a, char *base)
{
    Shared s;
    s.score = (float *)base;
    s.choice = s.score + a.E;
    s.group = s.choice + a.E;
    s.q = s.group + a.rule.groups;
    s.dq = s.q + a.k;
    s.id = (int *)(s.dq + a.k);
    s.taken = (unsigned char *)(s.id + a.k);
    return s;
}

DEV float logit(const RouteArgs &a, int64_t t, int64_t e)
{
    return load_float(a.logits.p, a.logits.dtype, t * a.logits.s0 + e);
}

DEV void score_all(const RouteArgs &a, int64_t t, const Shared &s, int lane, bool *bad)
{
    float max = -CUDART_INF_F;
    bool wrong = false, finite = false;
    for (int e = lane; e < a.E; e += 32) {
        const float l = logit(a, t, e);
        wrong |= isnan(l) || l == CUDART_INF_F;
        finite |= isfinite(l);
        float v = l;
        if (a.rule.score == FMOE_SCORE_SIGMOID) v = sigmoid(l);
        if (a.rule.score == FMOE_SCORE_SQRT_SOFTPLUS) v = sqrtf(softplus(l));
        s.score[e] = v;
        max = l > max ? l : max;
    }
    *bad = __any_sync(~0u, wrong) || !__any_sync(~0u, finite);
    if (a.rule.score != FMOE_SCORE_SOFTMAX) return;
    max = warp_max(max);
    float sum = 0;
    for (int e = lane; e < a.E; e += 32) sum += s.score[e] = expf(s.score[e] - max);
    sum = warp_sum(sum);
    for (int e = lane; e < a.E; e += 32) s.score[e] /= sum;
}

// Index of the best of x[0..n) that is not taken.
DEV int best(const float *x, const unsigned char *taken, int n, int lane)
{
    int found = -1;
    float value = 0;
    for (int e = lane; e < n; e += 32)
        if (!(taken && taken[e]) && (found < 0 || before(x[e], value))) found = e, value = x[e];
#pragma unroll
    for (int o = 16; o; o /= 2) {
        const int f = __shfl_xor_sync(~0u, found, o);
        const float v = __shfl_xor_sync(~0u, value, o);
        if (f < 0) continue;
        if (found < 0 || before(v, value) || (!before(value, v) && f < found)) found = f, value = v;
    }
    return found;
}

DEV void limit_to_groups(const RouteArgs &a, const Shared &s, int lane)
{
    const int groups = a.rule.groups;
    if (groups <= 1) return;
    const int n = (int)(a.E / groups);
    for (int g = 0; g < groups; g++) {
        const float *c = s.choice + g * n;
        const int first = best(c, nullptr, n, lane);
        float v = c[first];
        if (a.rule.group_score != FMOE_GROUP_MAX && n > 1) {
            __syncwarp();
            if (lane == 0) s.taken[g * n + first] = 1;
            __syncwarp();
            v += c[best(c, s.taken + g * n, n, lane)];
            __syncwarp();
            if (lane == 0) s.taken[g * n + first] = 0;
        }
        if (lane == 0) s.group[g] = v;
        __syncwarp();
    }
    for (int g = 0; g < groups; g++) {
        int rank = 0;
        for (int o = 0; o < groups; o++)
            rank += before(s.group[o], s.group[g]) || (o < g && !before(s.group[g], s.group[o]));
        if (rank < a.rule.topk_groups) continue;
        for (int i = lane; i < n; i += 32) s.choice[g * n + i] = a.rule.excluded_zero ? 0.f : -CUDART_INF_F;
    }
    __syncwarp();
}

// The id of slot j, or -1 when it is skipped (or out of range, which is reported).
DEV int64_t slot_id(const RouteArgs &a, int64_t t, int64_t j)
{
    const int64_t id = load_int(a.ids.p, a.ids.dtype, t * a.ids.s0 + j * a.ids.s1);
    if (id >= 0 && id < a.E) return id;
    if ((id == -1 && (a.flags & FMOE_SKIP_NEG1)) || (id == a.E && (a.flags & FMOE_SKIP_E))) return -1;
    a.error->index = t * a.k + j;
    a.error->value = id;
    __threadfence_system();
    a.error->code = DEVERR_ID;
    return -1;
}

// q_j of the selected, after the softmax over them where the rule has it.
DEV void selected_scores(const RouteArgs &a, int64_t t, const Shared &s, int lane)
{
    const bool topk = a.rule.score == FMOE_SCORE_TOPK_SOFTMAX;
    float max = -CUDART_INF_F;
    for (int j = lane; j < a.k; j += 32) {
        const int64_t e = slot_id(a, t, j);
        s.q[j] = e >= 0 ? s.score[e] : topk ? -CUDART_INF_F : 0.f;
        max = s.q[j] > max ? s.q[j] : max;
    }
    if (topk) {
        max = warp_max(max);
        float sum = 0;
        for (int j = lane; j < a.k; j += 32) sum += s.q[j] = expf(s.q[j] - max);
        sum = warp_sum(sum);
        for (int j = lane; j < a.k; j += 32) s.q[j] /= sum;
    }
    __syncwarp();
}

__global__ void route_forward_kernel(const __grid_constant__ RouteArgs a, int per_warp)
{
    extern __shared__ __align__(16) char smem[];
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Shared s = carve(a, smem + (size_t)warp * per_warp);
    for (int64_t t = (int64_t)blockIdx.x * warps + warp; t < a.T; t += (int64_t)gridDim.x * warps) {
        bool bad;
        score_all(a, t, s, lane, &bad);
        if (a.bad_rows && bad && lane == 0) atomicAdd((unsigned long long *)a.bad_rows, 1ull);
        if (!a.replay) {
            for (int e = lane; e < a.E; e += 32) {
                s.choice[e] = s.score[e] + (a.bias ? a.bias[e * a.bias_s] : 0.f);
                s.taken[e] = 0;
            }
            __syncwarp();
            limit_to_groups(a, s, lane);
            for (int64_t j = 0; j < a.k; j++) {
                const int id = best(s.choice, s.taken, (int)a.E, lane);
                __syncwarp();
                if (lane == 0) {
                    s.taken[id] = 1;
                    store_int(a.ids.p, a.ids.dtype, t * a.ids.s0 + j * a.ids.s1, id);
                }
                __syncwarp();
            }
        }
        __syncwarp();
        selected_scores(a, t, s, lane);
        float sum = a.rule.renormalize ? (float)a.rule.eps : 1.f;
        if (a.rule.renormalize)
            for (int64_t j = 0; j < a.k; j++) sum += s.q[j];
        for (int j = lane; j < a.k; j += 32) {
            const float q = a.rule.renormalize ? s.q[j] / sum : s.q[j];
            store_float(a.weights.p, a.weights.dtype, t * a.weights.s0 + j * a.weights.s1,
                        slot_id(a, t, j) < 0 ? 0.f : (float)a.rule.scale * q);
        }
        __syncwarp();
    }
}

// ---- The common case, forward: no groups, up to 32 * NV experts, scores in registers, argmax by two warp reductions
// ----

// Larger is better, NaN lowest, +0 and -0 alike.
DEV uint32_t rank_key(float v)
{
    if (isnan(v)) return 0;
    const uint32_t b = __float_as_uint(v + 0.f);
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}

template <int NV> __global__ void __launch_bounds__(128) route_small_kernel(const __grid_constant__ RouteArgs a)
{
    const int lane = threadIdx.x % 32;
    const int64_t t = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    depend_wait();
    depend_launch();
    if (t >= a.T) return;
    const int E = (int)a.E;
    float s[NV];
    uint32_t key[NV];
    bool wrong = false, finite = false;
    float max = -CUDART_INF_F;
#pragma unroll
    for (int i = 0; i < NV; i++) {
        const int e = lane + 32 * i;
        const float l = e < E ? logit(a, t, e) : -CUDART_INF_F;
        wrong |= isnan(l) || l == CUDART_INF_F;
        finite |= isfinite(l);
        max = l > max ? l : max;
        s[i] = l;
    }
    if (a.bad_rows) {
        const bool bad = __any_sync(~0u, wrong) || !__any_sync(~0u, finite);
        if (bad && lane == 0) atomicAdd((unsigned long long *)a.bad_rows, 1ull);
    }
    if (a.rule.score == FMOE_SCORE_SOFTMAX) {
        max = warp_max(max);
        float sum = 0;
#pragma unroll
        for (int i = 0; i < NV; i++)
            if (lane + 32 * i < E) sum += s[i] = expf(s[i] - max);
        sum = warp_sum(sum);
#pragma unroll
        for (int i = 0; i < NV; i++) s[i] /= sum;
    } else if (a.rule.score != FMOE_SCORE_TOPK_SOFTMAX) {
#pragma unroll
        for (int i = 0; i < NV; i++) s[i] = a.rule.score == FMOE_SCORE_SIGMOID ? sigmoid(s[i]) : sqrtf(softplus(s[i]));
    }
#pragma unroll
    for (int i = 0; i < NV; i++) {
        const int e = lane + 32 * i;
        // Keys of experts are at least 1, so that 0 is left for taken and absent ones.
        key[i] = e < E ? rank_key(s[i] + (a.bias ? a.bias[e * a.bias_s] : 0.f)) : 0;
        if (e < E && key[i] == 0) key[i] = 1;
    }
    int mine = -1; // lane j keeps the choice of slot j; k <= 32
    float q = a.rule.score == FMOE_SCORE_TOPK_SOFTMAX ? -CUDART_INF_F : 0.f;
    uint32_t best; // of this lane, with its index and score
    int at;
    float value;
    auto find = [&] {
        best = key[0], at = 0, value = s[0];
#pragma unroll
        for (int i = 1; i < NV; i++)
            if (key[i] > best) best = key[i], at = i, value = s[i];
    };
    find();
    for (int j = 0; j < (int)a.k; j++) {
        const uint32_t top = __reduce_max_sync(~0u, best);
        const uint32_t id = __reduce_min_sync(~0u, best == top ? (uint32_t)(lane + 32 * at) : ~0u);
        const float v = __shfl_sync(~0u, value, id & 31);
        if (lane == j) mine = (int)id, q = v;
        if ((id & 31) == (uint32_t)lane) {
#pragma unroll
            for (int i = 0; i < NV; i++)
                if (i == at) key[i] = 0;
            find();
        }
    }
    if (a.rule.score == FMOE_SCORE_TOPK_SOFTMAX) {
        float top = lane < a.k ? q : -CUDART_INF_F;
        top = warp_max(top);
        q = lane < a.k ? expf(q - top) : 0.f;
        q /= warp_sum(q);
    }
    if (lane >= a.k) q = 0;
    if (a.rule.renormalize) {
        float sum = (float)a.rule.eps;
        for (int j = 0; j < (int)a.k; j++) sum += __shfl_sync(~0u, q, j);
        q /= sum;
    }
    if (lane < a.k) {
        store_int(a.ids.p, a.ids.dtype, t * a.ids.s0 + lane * a.ids.s1, mine);
        store_float(a.weights.p, a.weights.dtype, t * a.weights.s0 + lane * a.weights.s1, (float)a.rule.scale * q);
    }
}

static bool route_small(const RouteArgs &a, Stream &s)
{
    if (a.replay || a.rule.groups > 1 || a.k > 32 || a.E > 512) return false;
    const int warps = a.T < 512 ? 1 : 4;
    const Grid grid = {(unsigned)((a.T + warps - 1) / warps), 32u * (unsigned)warps};
    const auto kernel = a.E <= 32    ? route_small_kernel<1>
                        : a.E <= 64  ? route_small_kernel<2>
                        : a.E <= 128 ? route_small_kernel<4>
                        : a.E <= 256 ? route_small_kernel<8>
                                     : route_small_kernel<16>;
    launch(s, Product::ROUTE_SMALL, kernel, grid, a);
    return true;
}

__global__ void route_backward_kernel(const __grid_constant__ RouteArgs a, int per_warp)
{
    extern __shared__ __align__(16) char smem[];
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Shared s = carve(a, smem + (size_t)warp * per_warp);
    float *G = s.choice;
    for (int64_t t = (int64_t)blockIdx.x * warps + warp; t < a.T; t += (int64_t)gridDim.x * warps) {
        bool bad;
        score_all(a, t, s, lane, &bad);
        __syncwarp();
        selected_scores(a, t, s, lane);
        __syncwarp();
        for (int e = lane; e < a.E; e += 32) G[e] = 0;
        for (int j = lane; j < a.k; j += 32) {
            s.id[j] = (int)slot_id(a, t, j);
            s.dq[j] = s.id[j] < 0 ? 0.f
                                  : (float)a.rule.scale *
                                        load_float(a.weights.p, a.weights.dtype, t * a.weights.s0 + j * a.weights.s1);
        }
        __syncwarp();
        if (lane == 0) { // k is small; one lane keeps the order of the sums fixed
            float sum = (float)a.rule.eps, dot = 0;
            for (int64_t j = 0; j < a.k; j++) {
                sum += s.q[j];
                dot += s.dq[j] * s.q[j];
            }
            if (a.rule.renormalize)
                for (int64_t j = 0; j < a.k; j++) s.dq[j] = (s.dq[j] - dot / sum) / sum;
            if (a.rule.score == FMOE_SCORE_TOPK_SOFTMAX) {
                dot = 0;
                for (int64_t j = 0; j < a.k; j++) dot += s.dq[j] * s.q[j];
                for (int64_t j = 0; j < a.k; j++) s.dq[j] = s.q[j] * (s.dq[j] - dot);
            }
            for (int64_t j = 0; j < a.k; j++)
                if (s.id[j] >= 0) G[s.id[j]] += s.dq[j];
        }
        __syncwarp();
        float dot = 0;
        if (a.rule.score == FMOE_SCORE_SOFTMAX) {
            for (int e = lane; e < a.E; e += 32) dot += G[e] * s.score[e];
            dot = warp_sum(dot);
        }
        for (int e = lane; e < a.E; e += 32) {
            const float l = logit(a, t, e), score = s.score[e];
            float slope = 1, d;
            if (a.rule.score == FMOE_SCORE_SIGMOID) slope = score * sigmoid(-l);
            if (a.rule.score == FMOE_SCORE_SQRT_SOFTPLUS) slope = score == 0 ? 0 : sigmoid(l) / (2 * score);
            if (a.rule.score == FMOE_SCORE_SOFTMAX) d = score * (G[e] - dot);
            else d = G[e] == 0 ? 0 : G[e] * slope;
            store_float(a.dlogits.p, a.dlogits.dtype, t * a.dlogits.s0 + e, d);
        }
        __syncwarp();
    }
}

bool route_fits(int device, int64_t E, int64_t k, int64_t groups)
{
    int most = 0;
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return E * 9 + groups * 4 + k * 12 + 16 <= most;
}

void route_run(const RouteArgs &a, bool forward, Stream &s)
{
    if (a.T == 0 || (forward && route_small(a, s))) return;
    const size_t per_warp = shared_bytes(a);
    int warps = kMaxWarps;
    while (warps > 1 && (per_warp * warps > 48 * 1024 || a.T < (int64_t)warps * 64)) warps /= 2;
    const Grid grid = {(unsigned)fmoe_min((a.T + warps - 1) / warps, 1 << 20), 32u * (unsigned)warps, per_warp * warps};
    const auto kernel = forward ? route_forward_kernel : route_backward_kernel;
    if (per_warp > 48 * 1024) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)per_warp);
    launch(s, Product::ROUTE, kernel, grid, a, (int)per_warp);
}
