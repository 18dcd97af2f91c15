// SPDX-License-Identifier: Apache-2.0
// coded_batches.cuh - which tokens the kernels of coded.cuh multiply at once: up to `most` slots of one expert, in the
// order of experts and of slots.
#pragma once
#include "coded_values.cuh"

// In shared memory; the same in every block.
struct Batches {
    int16_t *id;                     // of a slot; -1: the slot is skipped
    int16_t *expert, *tokens, *slot; // of a batch; how many; [batch][most]
    int count;
    static __host__ DEV int bytes_of(int R, int E, int most) { return 4 * ((E + 31) / 32 + 1) + 2 * R * (7 + most); }
};
DEV Batches find_batches(const DecodeArgs &a, char *shared, int most)
{
    const int words = (a.E + 31) / 32, step = blockDim.x, lane = threadIdx.x % 32;
    uint32_t *const bits = (uint32_t *)shared;
    int *const total = (int *)(bits + words);
    Batches b;
    b.id = (int16_t *)(total + 1);
    b.expert = b.id + a.R;
    b.tokens = b.expert + a.R;
    // Of a slot: which of the experts that are hit, which of its slots. Of such an expert: slots, its first batch.
    int16_t *const hit = b.tokens + a.R, *const rank = hit + a.R, *const slots = rank + a.R, *const first = slots + a.R;
    b.slot = first + a.R;
    for (int i = threadIdx.x; i < words; i += step) bits[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < a.R; i += step) {
        const int64_t v = load_int(a.ids.p, a.ids.dtype, i / a.k * a.ids.s0 + i % a.k * a.ids.s1);
        const bool in = v >= 0 && v < a.E;
        b.id[i] = in ? (int16_t)v : (int16_t)-1;
        slots[i] = 0;
        if (in) atomicOr(&bits[v >> 5], 1u << (v & 31));
        else bad_id(a, i, v);
    }
    __syncthreads();
    int count = 0;
    for (int w = 0; w < words; w++) count += __popc(bits[w]);
    for (int i = threadIdx.x; i < a.R; i += step) {
        const int e = b.id[i];
        int n = -1;
        if (e >= 0) {
            n = __popc(bits[e >> 5] & ((1u << (e & 31)) - 1));
            for (int w = 0; w < e >> 5; w++) n += __popc(bits[w]);
        }
        hit[i] = (int16_t)n;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        for (int i = lane; i < (a.R + 31) / 32 * 32; i += 32) {
            const int h = i < a.R ? hit[i] : -1;
            const uint32_t same = __match_any_sync(~0u, h);
            const int before = __popc(same & ((1u << lane) - 1));
            if (h >= 0) rank[i] = (int16_t)(slots[h] + before);
            __syncwarp();
            if (h >= 0 && before == 0) slots[h] = (int16_t)(slots[h] + __popc(same));
            __syncwarp();
        }
        int sum = 0;
        for (int i = lane; i < (count + 31) / 32 * 32; i += 32) {
            const int n = i < count ? (slots[i] + most - 1) / most : 0;
            int upto = n;
#pragma unroll
            for (int o = 1; o < 32; o *= 2) {
                const int below = __shfl_up_sync(~0u, upto, o);
                if (lane >= o) upto += below;
            }
            if (i < count) first[i] = (int16_t)(sum + upto - n);
            sum += __shfl_sync(~0u, upto, 31);
        }
        if (lane == 0) *total = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.R; i += step) {
        if (hit[i] < 0) continue;
        const int n = rank[i], batch = first[hit[i]] + n / most;
        b.slot[batch * most + n % most] = (int16_t)i;
        if (n % most == 0) b.expert[batch] = b.id[i], b.tokens[batch] = (int16_t)min(most, slots[hit[i]] - n);
    }
    b.count = *total;
    __syncthreads();
    return b;
}

// Of shared memory, all but tables.
struct CodedRoom {
    static constexpr int ZEROS = 128;
    static __host__ DEV int up(int n) { return (n + 127) / 128 * 128; }
    static __host__ DEV int tokens(const CodedShape &s, int pieces) { return s.chunks * pieces * s.most * 64; }
    static __host__ DEV int partials(const CodedShape &s) { return s.team > 1 ? 2 * s.team * 512 : 0; }
    static __host__ DEV int team(const CodedShape &s, int pieces)
    {
        return up(tokens(s, pieces) + partials(s) + (s.team + 1) * s.most * 4);
    }
    static __host__ DEV int batches(const CodedShape &s, int R, int E) { return up(Batches::bytes_of(R, E, s.most)); }
    static __host__ DEV int sums(const CodedShape &s, int R) { return s.columns ? up(R * 4 * (s.columns + 1)) : 0; }
    static __host__ DEV int all(const CodedShape &s, int pieces, int R, int E)
    {
        return ZEROS + batches(s, R, E) + sums(s, R) + s.teams * team(s, pieces);
    }
};
