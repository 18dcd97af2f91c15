// SPDX-License-Identifier: Apache-2.0
// decode.cuh - few tokens, inference: the weights that are needed are read once, at the speed of memory. What the
// kernels share: kmajor.cu, nmajor.cu and, for quantised weights, coded.cuh are the fastest; stream_kmajor.cu and
// stream_nmajor.cu (FMOE_SAME_BITS) have the bits of the large products.
#pragma once
#include "cuda/act.cuh"
#include "cuda/quant/coded.cuh"

#include <type_traits>

// Runs the forward of few tokens where that path applies; false: it does not, and nothing was done.
static constexpr int DECODE_PARTS = 8;
struct DecodeScratch {
    void *a;             // [R, I] in the plan's dtype
    void *y;             // [R, H]
    int *done;           // [H / 8, rounded up]
    void *parts;         // [DECODE_PARTS][R, 2I + H] in f32, for weights [in,out]
    const void *lora[2]; // [R, rank] in the plan's dtype, for the adapters of W1 and W2
};
// quant: of a layer with quantised weights, its descriptors, else NULL.
bool decode_run(const fmoe_plan_impl *p, const fmoe_experts_args *a, const fmoe_run *run, const DecodeScratch &scratch,
                const Quant *quant, Stream &s);

static constexpr int DECODE_THREADS = 256, DECODE_WARPS = DECODE_THREADS / 32;

// An adapter adds scale (x A^T) B^T; A is [E, rank, in], B [E, out, rank], the rows of both of unit stride.
struct DecodeLora {
    const void *a, *b;
    int64_t a_g, a_r, b_g, b_r;
    void *rows; // scale x A^T, [R, rank]
    int rank;   // 0: there is none
    float scale;
};

struct DecodeArgs {
    View ids, p;
    int R, k, E;
    int64_t T, H, I;
    const void *x;
    int64_t x_r;
    const void *w1, *w2; // rows [out,in] or [in,out], of unit stride
    int64_t w1_r, w1_g, w2_r, w2_g;
    int64_t gate, up;   // of feature i w1 has the gate in row or column i * gate, and the value beside it `up` further
    int gated;          // if not, and the bits are not to be the same, features 2i and 2i + 1 are there
    DecodeLora lora[2]; // of W1, of W2
    View b1, b2;        // biases, or NULL
    void *a;            // [R, I]
    void *y;            // [R, H], rounded as the large products round it
    int *done;          // of a tile of columns: experts that are in y
    float *part[2];     // [DECODE_PARTS][R, 2I] and [.., H]: parts of sums over k, in their order
    void *out;
    int64_t out_r;
    int act, add;
    FastAct fast;
    int round_h; // before the activation: the large products do not have it in their epilogue
    uint32_t flags;
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

// The experts that slots name, in the order of their numbers: the slots of the h-th are first[h], next[first[h]] and so
// on to -1. In shared memory; up to 1024 slots and 4096 experts (fmoe_cuda_use_decode).
struct Hits {
    int *first;
    uint32_t *bits;
    int *slots;         // how many
    int16_t *id, *next; // of a slot; -1: the slot is skipped
    int count;
    static constexpr int bytes_of(int R, int E) { return 12 * R + (E + 31) / 32 * 4; }
    DEV int slot(int hit, int n) const // the n-th, or the last
    {
        int s = first[hit];
        for (int i = 0; i < n && next[s] >= 0; i++) s = next[s];
        return s;
    }
    DEV int rank(int e) const // which of the experts that are hit
    {
        int n = __popc(bits[e >> 5] & ((1u << (e & 31)) - 1));
        for (int w = 0; w < e >> 5; w++) n += __popc(bits[w]);
        return n;
    }
};
DEV Hits find_experts(const DecodeArgs &a, char *shared)
{
    const int words = (a.E + 31) / 32;
    Hits h;
    h.first = (int *)shared;
    h.slots = h.first + a.R;
    h.bits = (uint32_t *)(h.slots + a.R);
    h.id = (int16_t *)(h.bits + words);
    h.next = h.id + a.R;
    for (int i = threadIdx.x; i < words; i += DECODE_THREADS) h.bits[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < a.R; i += DECODE_THREADS) {
        const int64_t v = load_int(a.ids.p, a.ids.dtype, i / a.k * a.ids.s0 + i % a.k * a.ids.s1);
        const bool in = v >= 0 && v < a.E;
        h.id[i] = in ? (int16_t)v : (int16_t)-1;
        h.first[i] = -1;
        h.slots[i] = 0;
        if (in) atomicOr(&h.bits[v >> 5], 1u << (v & 31));
        else bad_id(a, i, v);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.R; i += DECODE_THREADS) {
        const int e = h.id[i];
        if (e < 0) continue;
        // In any order: no sum runs over the slots of an expert.
        const int hit = h.rank(e);
        h.next[i] = (int16_t)atomicExch(&h.first[hit], i);
        atomicAdd(&h.slots[hit], 1);
    }
    h.count = 0;
    for (int w = 0; w < words; w++) h.count += __popc(h.bits[w]);
    __syncthreads();
    return h;
}

DEV uint4 load_weight(const void *p) { return __ldcs((const uint4 *)p); }

template <class T> DEV void unpack8(const uint4 &v, float (&f)[8])
{
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (std::is_same_v<T, bf16>)
            f[2 * i] = __uint_as_float(w[i] << 16), f[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
        else {
            const float2 p = __half22float2(*(const __half2 *)&w[i]);
            f[2 * i] = p.x, f[2 * i + 1] = p.y;
        }
    }
}

DEV float decode_act(const DecodeArgs &a, int e, int column, float gate, float up)
{
    if (a.b1.p) {
        const int64_t at = e * a.b1.s0 + column * (a.gated ? a.gate : 1) * a.b1.s1;
        gate += load_float(a.b1.p, a.b1.dtype, at);
        if (a.gated) up += load_float(a.b1.p, a.b1.dtype, at + a.up * a.b1.s1);
    }
    const float value = gate_factor(a.act, gate, a.alpha, a.limit).value;
    return a.gated ? value * up_factor(a.act, up, a.limit).value : value;
}

// The first two rows of every expert, in units from the lowest matrix. Launch parameters, with all others 4 KB at most.
struct DecodeLists {
    static constexpr int MOST = 448, UNIT = 8; // experts; elements, 16 bytes
    uint32_t at[2][MOST];
};
struct NoDecodeLists {
};
static_assert(sizeof(DecodeArgs) + sizeof(DecodeLists) <= 4096, "launch parameters");

// ---- Quantised weights (stream_coded.cuh) ----

// A launch parameter: codes of a stack, [out,in]; 2^shift neighbours of a row have one scale.
struct CodedParams {
    CodedMatrix m;
    int shift;
};
// False: not of this form, and the layer is for the large products.
bool stream_coded_ok(const CodedMatrix &m, int64_t E, CodedParams *params);
void stream_coded_run(const DecodeArgs &a, bool down, const CodedParams &c, int dtype, const Plan *plan, Stream &s);
void stream_nibbles_run(const DecodeArgs &a, bool down, const CodedParams &c, int dtype, const Plan *plan, Stream &s);
void stream_bytes_run(const DecodeArgs &a, bool down, const CodedParams &c, int dtype, const Plan *plan, Stream &s);
// coded.cuh, both weights quantised, bf16, no adapters: other bits than those of the large products. False: not for
// these, and nothing was launched.
bool coded_few_run(const DecodeArgs &a, const CodedParams *const coded[2], const Plan *plan, Stream &s);

// lists: of W1 and of W2, where the weights are lists or (kmajor.cu) there are adapters, else NULL.
void decode_kmajor_run(const DecodeArgs &a, const DecodeLists *lists, int dtype, const Plan *plan, Stream &s);
void decode_nmajor_run(const DecodeArgs &a, int dtype, const Plan *plan, Stream &s);
// coded: of W1 and of W2, where they are quantised, else NULL.
void stream_kmajor_run(const DecodeArgs &a, const DecodeLists *lists, const CodedParams *const coded[2], int dtype,
                       const Plan *plan, Stream &s);
void stream_nmajor_run(const DecodeArgs &a, int dtype, const Plan *plan, Stream &s);
