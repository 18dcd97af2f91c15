// SPDX-License-Identifier: Apache-2.0
// nmajor.cu - inference of few tokens with weights [in,out]: columns of the result lie along memory.
//
// Three launches: up, down and the weighted sum. A product's work is every strip of 256 columns of every expert that is
// hit, from its first row to its last, one after the other; each block has an equal piece of that line, so that all end
// together, and leaves the sums of its part of a strip. Whoever needs them next adds up the parts in their order: the
// same bits every time.
#include "decode.cuh"

// columns: 512 bytes of a row, which a warp reads at once; rows a block.
static constexpr int STRIP = 256, GROUP = DECODE_WARPS;

struct Line { // of a product; total * blocks fits 32 bits within the bounds of fmoe_cuda_use_decode_nmajor
    uint32_t strips, groups, total, blocks; // strips an expert, groups of rows a strip
    DEV Line(int columns, int rows, int hits, int grid)
        : strips((columns + STRIP - 1) / STRIP), groups((rows + GROUP - 1) / GROUP), total(hits * strips * groups),
          blocks(min((uint32_t)grid, (DECODE_PARTS - 1) * hits * strips))
    {
    }
    DEV uint32_t begin(uint32_t block) const { return (uint32_t)((uint64_t)block * total / blocks); }
    DEV uint32_t block(uint32_t at) const { return ((at + 1) * blocks - 1) / total; } // who has it
    // Parts of a column's sum: up to DECODE_PARTS.
    DEV int parts(int hit, int column) const
    {
        const uint32_t first = (hit * strips + column / STRIP) * groups;
        return (int)(block(first + groups - 1) - block(first)) + 1;
    }
};

// Rows to which a block reads and multiplies; those past the end are zeros.
__host__ DEV int padded_rows(int rows, int depth) { return (rows + GROUP - 1 + depth * GROUP) / GROUP * GROUP; }

// The sum of a slot's column over all of k.
DEV float add_parts(const float *part, int n, const DecodeArgs &a, int64_t columns, int slot, int column)
{
    float s = part[slot * columns + column];
    for (int i = 1; i < n; i++) s += part[((int64_t)i * a.R + slot) * columns + column];
    return s;
}

// Not inline: the library would be a megabyte larger.
static __device__ __noinline__ float act_of(const DecodeArgs &a, int e, int column, float gate, float up)
{
    return decode_act(a, e, column, gate, up);
}

// Up to NT tokens of an expert at a time, DEPTH groups of rows on their way.
template <class T, int NT, int DEPTH, int PER_SM, bool DOWN>
__global__ void __launch_bounds__(DECODE_THREADS, PER_SM) decode_nmajor(const __grid_constant__ DecodeArgs a)
{
    extern __shared__ __align__(16) char shared[];
    const int inner = (int)a.I, columns = DOWN ? (int)a.H : 2 * inner, rows = DOWN ? inner : (int)a.H,
              padded = padded_rows(rows, DEPTH);
    float(*const sums)[NT][STRIP] = (float(*)[NT][STRIP])shared; // of each warp
    T *const token = (T *)(sums + DECODE_WARPS);                 // [NT][padded], zeros at the end
    if (!DOWN) depend_wait(); // ids and x come from the launch before; of down's, up waited for it
    depend_launch();
    const Hits h = find_experts(a, (char *)(token + NT * padded));
    const Line line(columns, rows, h.count, gridDim.x), up(2 * inner, (int)a.H, h.count, gridDim.x);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool busy = blockIdx.x < line.blocks;
    const uint32_t end = busy ? line.begin(blockIdx.x + 1) : 0;
    bool waited = !DOWN;
    for (uint32_t at = busy ? line.begin(blockIdx.x) : 0; at < end;) {
        const uint32_t strip = at / line.groups, first = strip * line.groups, last = min(end, first + line.groups);
        const int hit = (int)(strip / line.strips), e = h.id[h.first[hit]], column = (int)(strip % line.strips) * STRIP;
        const int from = (int)(at - first) * GROUP, to = min(rows, (int)(last - first) * GROUP),
                  part = (int)(blockIdx.x - line.block(first));
        const bool live = column + lane * 8 < columns;
        const int64_t pitch = DOWN ? a.w2_r : a.w1_r;
        const T *const w =
            (const T *)(DOWN ? a.w2 : a.w1) + e * (DOWN ? a.w2_g : a.w1_g) + warp * pitch + column + lane * 8;
        at = last;
        for (int next = h.first[hit]; next >= 0;) {
            int slot[NT], n = 0;
#pragma unroll
            for (int t = 0; t < NT; t++) {
                slot[t] = next;
                if (next >= 0) next = h.next[next], n++;
            }
            const auto slot_of = [&](int t) {
                int s = slot[0];
#pragma unroll
                for (int j = 1; j < NT; j++) s = t == j ? slot[j] : s;
                return s;
            };
            uint4 v[DEPTH];
            const auto load = [&](int r0) {
#pragma unroll
                for (int c = 0; c < DEPTH; c++)
                    v[c] = live && r0 + c * GROUP + warp < to ? load_weight(w + (r0 + c * GROUP) * pitch) : uint4{};
            };
            load(from);
            if (!waited) depend_wait();
            waited = true;
            __syncthreads();
            const int some = to - from + DEPTH * GROUP;
#pragma unroll 1
            for (int i = threadIdx.x; i < (n == 1 ? 1 : NT) * some; i += DECODE_THREADS) {
                const int t = i / some, r = from + i - t * some, gate = r * (int)a.gate, beside = gate + (int)a.up,
                          of = slot_of(t);
                T x = from_float<T>(0.f);
                if (r < to && t < n) {
                    if (!DOWN) x = ((const T *)a.x)[of / a.k * a.x_r + r];
                    else {
                        const float g = add_parts(a.part[0], up.parts(hit, gate), a, 2 * inner, of, gate),
                                    u = add_parts(a.part[0], up.parts(hit, beside), a, 2 * inner, of, beside);
                        x = from_float<T>(act_of(a, e, r, g, u));
                    }
                }
                token[t * padded + r - from] = x;
            }
            __syncthreads();
            float acc[NT][8] = {};
            const auto multiply = [&](auto tokens, int at) {
#pragma unroll
                for (int c = 0; c < DEPTH; c++) {
                    float f[8];
                    unpack8<T>(v[c], f);
#pragma unroll
                    for (int t = 0; t < tokens.value; t++) {
                        const float x = to_float(token[t * padded + at + c * GROUP + warp]);
#pragma unroll
                        for (int i = 0; i < 8; i++) acc[t][i] = fmaf(f[i], x, acc[t][i]);
                    }
                }
            };
#pragma unroll 1
            for (int r0 = from; r0 < to; r0 += DEPTH * GROUP) {
                if (n == 1) multiply(std::integral_constant<int, 1>(), r0 - from);
                else multiply(std::integral_constant<int, NT>(), r0 - from);
                if (r0 + DEPTH * GROUP < to) load(r0 + DEPTH * GROUP);
            }
#pragma unroll
            for (int t = 0; t < NT; t++)
                if (t < n) {
                    *(float4 *)&sums[warp][t][lane * 8] = {acc[t][0], acc[t][1], acc[t][2], acc[t][3]};
                    *(float4 *)&sums[warp][t][lane * 8 + 4] = {acc[t][4], acc[t][5], acc[t][6], acc[t][7]};
                }
            __syncthreads();
            for (int t = 0; t < n && column + (int)threadIdx.x < columns; t++) {
                float s = 0.f;
#pragma unroll
                for (int j = 0; j < DECODE_WARPS; j++) s += sums[j][t][threadIdx.x];
                a.part[DOWN][((int64_t)part * a.R + slot_of(t)) * columns + column + threadIdx.x] = s;
            }
        }
    }
    if (!waited) depend_wait();
}
static_assert(STRIP == DECODE_THREADS, "a thread adds up one column");

// out[t] = sum_j p[t,j] (y[t,j] + b2), a block having 256 columns of a token.
template <class T>
__global__ void __launch_bounds__(DECODE_THREADS) decode_sum(const __grid_constant__ DecodeArgs a, int grid)
{
    extern __shared__ __align__(16) char shared[];
    depend_launch();
    const Hits h = find_experts(a, shared);
    const Line line((int)a.H, (int)a.I, h.count, grid);
    const int t = blockIdx.y, column = blockIdx.x * DECODE_THREADS + threadIdx.x;
    depend_wait();
    if (column >= a.H) return;
    T *const out = (T *)a.out + t * a.out_r + column;
    float s = a.add ? to_float(*out) : 0.f;
    for (int j = 0; j < a.k; j++) {
        const int slot = t * a.k + j, e = h.id[slot];
        if (e < 0) continue;
        const float bias = a.b2.p ? load_float(a.b2.p, a.b2.dtype, e * a.b2.s0 + column * a.b2.s1) : 0.f;
        const float y = add_parts(a.part[1], line.parts(h.rank(e), column), a, a.H, slot, column);
        s = fmaf(load_float(a.p.p, a.p.dtype, t * a.p.s0 + j * a.p.s1), y + bias, s);
    }
    *out = from_float<T>(s);
}

template <class T, int NT, int DEPTH, int PER_SM> static void run(const DecodeArgs &a, int sms, Stream &s)
{
    const int grid = PER_SM * sms, hits = Hits::bytes_of(a.R, a.E);
    const auto product = [&](auto kernel, int64_t rows) {
        const size_t shared = sizeof(float) * DECODE_WARPS * NT * STRIP +
                              sizeof(T) * NT * (size_t)padded_rows((int)rows, DEPTH) + (size_t)hits;
        if (shared > 48 * 1024) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
        launch(s, Product::DECODE, kernel, Grid{(unsigned)grid, DECODE_THREADS, shared}, a);
    };
    product(decode_nmajor<T, NT, DEPTH, PER_SM, false>, a.H);
    product(decode_nmajor<T, NT, DEPTH, PER_SM, true>, a.I);
    const dim3 sums((unsigned)((a.H + DECODE_THREADS - 1) / DECODE_THREADS), (unsigned)a.T);
    launch(s, Product::DECODE, decode_sum<T>, Grid{sums, DECODE_THREADS, (size_t)hits}, a, grid);
}

template <class T> static void run(const DecodeArgs &a, int sms, Stream &s)
{
    if (a.T == 1) run<T, 1, 16, 2>(a, sms, s);
    else run<T, 4, 8, 2>(a, sms, s);
}

void decode_nmajor_run(const DecodeArgs &a, int dtype, const Plan *plan, Stream &s)
{
    if (dtype == FMOE_BF16) run<bf16>(a, plan->sms, s);
    else run<f16>(a, plan->sms, s);
}
