// SPDX-License-Identifier: Apache-2.0
// kmajor.cu - inference of few tokens with weights [out,in] (nmajor.cu: [in,out]).
//
// Two launches, up with activation and down with the weighted sum; down starts under the tail of up, and asks for
// weights before it waits for up. There is no row map: every block finds the experts that are hit, and their slots,
// from the ids. As many blocks as fit at once walk all rows, so that they end together. A warp reads whole rows of
// weights, 512 contiguous bytes at a time, and multiplies them with the expert's tokens. (Fragments for mma.sync, 64
// bytes of 16 rows at a time, were half as fast.)
//
// An adapter is a launch more before the product it belongs to, x A^T, and further steps of that product's sums, with
// B.
#include "decode.cuh"
#include "cuda/sm80/mma.cuh"

DEV float warp_sum(float v)
{
#pragma unroll
    for (int o = 16; o; o /= 2) v += __shfl_xor_sync(~0u, v, o);
    return v;
}

// What a kernel is made for; each form has what those before it have, and takes more registers: ANY and LISTS 2 to 4 %
// of the time.
enum Form {
    WHOLE, // stacks of gated experts, rows of whole 256 elements, no biases
    ANY,   // biases, gates beside ups, not gated; the last chunk of a row may not be a whole one
    LISTS, // every expert's matrices where they are
    // Of stacks too, taken as lists. With 8 chunks of a token at once up had no registers left, and all took up to 18 %
    // longer: it has 4.
    ADAPTERS
};

template <int FORM> using ListsOf = std::conditional_t<FORM >= LISTS, DecodeLists, NoDecodeLists>;

// The rows of weights a warp multiplies: ROWS at a time, `apart` elements from one another, the first ones `r` times i
// % width into the (i / width)-th expert, for i = begin, begin + step and so on. Lists: p is the lowest, g and apart
// are not used.
template <class T> struct Weights {
    const T *p;
    int64_t g, r, apart;
    int n, width, begin, step; // n: elements of a row
};

// An adapter's part of a group's sums: a lane has 8 steps. B is asked for ahead of the weights and x A^T ahead of the
// token; both wait in shared memory. (In registers: 1 us more for one token.) Row r of a group is row first + group *
// between + r * beside of B.
template <class T, int ROWS, int NT> struct Adapter {
    const DecodeLora &lora;
    int64_t first, between, beside;
    char *shared;
    static __host__ DEV int bytes_of(int rank) { return DECODE_WARPS * (ROWS + NT) * rank * (int)sizeof(T); }
    // Where this lane keeps row i: the first ROWS are of B, NT more of x A^T.
    DEV T *mine(int i) const { return (T *)shared + (threadIdx.x / 32 * (ROWS + NT) + i) * lora.rank + step(); }
    DEV int step() const { return threadIdx.x % 32 * 8; }
    DEV void prefetch_factor(int e, int group) const
    {
        if (step() >= lora.rank) return;
        const T *const b = (const T *)lora.b + e * lora.b_g + (first + group * between) * lora.b_r + step();
#pragma unroll
        for (int r = 0; r < ROWS; r++) cp_async16(mine(r), b + r * beside * lora.b_r);
    }
    DEV void prefetch_token(int t, int slot) const
    {
        if (step() < lora.rank) cp_async16(mine(ROWS + t), (const T *)lora.rows + slot * lora.rank + step());
    }
    DEV void add(int t, float (&acc)[ROWS]) const
    {
        if (step() >= lora.rank) return;
        cp_async_commit();
        cp_async_wait<0>();
        float x[8], b[8];
        unpack8<T>(*(const uint4 *)mine(ROWS + t), x);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            unpack8<T>(*(const uint4 *)mine(r), b);
#pragma unroll
            for (int i = 0; i < 8; i++) acc[r] = fmaf(b[i], x[i], acc[r]);
        }
    }
};
struct NoAdapter {
    DEV void prefetch_factor(int, int) const {}
    DEV void prefetch_token(int, int) const {}
    template <int ROWS> DEV void add(int, float (&)[ROWS]) const {}
};
template <class T, int ROWS, int NT, int FORM>
DEV auto adapter(const DecodeLora &lora, char *shared, int64_t first, int64_t between, int64_t beside)
{
    if constexpr (FORM == ADAPTERS) return Adapter<T, ROWS, NT>{lora, first, between, beside, shared};
    else return NoAdapter();
}

// Calls done(slot, i % width, acc) in all lanes, acc[r] = <row r, token of the slot>, for the slots of the warp's
// experts, NT at a time. DEPTH chunks of every row are asked for at once, and with them those of a token (TOGETHER: of
// all NT): loads come back in their order, so even what is in the cache comes after weights that other warps want.
// `ready` is called between the first weights and the first token.
template <int ROWS, int DEPTH, int NT, bool TOGETHER, int FORM, class T, class Lora, class Token, class Ready,
          class Done>
DEV void multiply(const Weights<T> &w, const ListsOf<FORM> &lists, const Lora &lora, const Hits &h, Token token_of,
                  Ready ready, Done done)
{
    const int lane = threadIdx.x % 32;
    const auto in = [&](int c) { return c * 256 + (FORM >= ANY ? lane * 8 : 0) < w.n; };
    bool waited = false;
    for (int hit = 0, group = w.begin;; group += w.step) {
        while (group >= w.width) group -= w.width, hit++;
        if (hit >= h.count) break;
        int next = h.first[hit];
        int64_t at = h.id[next] * w.g, apart = w.apart;
        if constexpr (FORM >= LISTS)
            at = (int64_t)lists.at[0][h.id[next]] * DecodeLists::UNIT,
            apart = (int64_t)lists.at[1][h.id[next]] * DecodeLists::UNIT - at;
        const T *const row = w.p + at + group * w.r + lane * 8;
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
            lora.prefetch_factor(h.id[slot[0]], group);
#pragma unroll 1
            for (int c0 = 0; c0 * 256 < w.n; c0 += DEPTH) {
                uint4 v[DEPTH][ROWS], all[NT][DEPTH];
#pragma unroll
                for (int c = 0; c < DEPTH; c++)
#pragma unroll
                    for (int r = 0; r < ROWS; r++)
                        if (in(c0 + c)) v[c][r] = load_weight(row + r * apart + (c0 + c) * 256);
                if (!waited) ready();
                waited = true;
#pragma unroll
                for (int t = 0; t < NT; t++)
                    if (c0 == 0 && slot[t] >= 0) lora.prefetch_token(t, slot[t]);
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
                lora.add(t, acc[t]);
#pragma unroll
                for (int r = 0; r < ROWS; r++) acc[t][r] = warp_sum(acc[t][r]);
                done(slot[t], group, acc[t]);
            }
        }
    }
    if (!waited) ready();
}

// x A1^T, or `second` a A2^T: a warp has one row of A at a time. Few registers, so that the next launch fits beside it.
template <class T>
__global__ void __launch_bounds__(DECODE_THREADS, 4) decode_lora(const __grid_constant__ DecodeArgs a, int second)
{
    extern __shared__ __align__(16) char shared[];
    const DecodeLora &lora = a.lora[second];
    // Ids and x come from the launch before; of the second one, up or its adapter waited for it.
    if (!second) depend_wait();
    depend_launch();
    const Hits h = find_experts(a, shared);
    const int warp = blockIdx.x * DECODE_WARPS + threadIdx.x / 32, warps = gridDim.x * DECODE_WARPS;
    const Weights<T> w = {(const T *)lora.a, lora.a_g, lora.a_r, 0, (int)(second ? a.I : a.H), lora.rank, warp, warps};
    const auto token = [&](int slot) {
        return second ? (const T *)a.a + slot * a.I : (const T *)a.x + slot / a.k * a.x_r;
    };
    multiply<1, 4, 2, false, ANY>(
        w, NoDecodeLists(), NoAdapter(), h, token, [] { depend_wait(); },
        [&](int slot, int row, const float(&v)[1]) {
            if (threadIdx.x % 32 == 0) ((T *)lora.rows)[slot * lora.rank + row] = from_float<T>(v[0] * lora.scale);
        });
}

// up: a warp has one column of one expert at a time, its gate and its up row; not gated, two columns.
template <class T, int NT, int DEPTH, int PER_SM, int FORM>
__global__ void __launch_bounds__(DECODE_THREADS, PER_SM)
    decode_up(const __grid_constant__ DecodeArgs a, const __grid_constant__ ListsOf<FORM> lists)
{
    extern __shared__ __align__(16) char shared[];
    // Ids and x come from the launch before; the adapter's waited for it.
    if (FORM < ADAPTERS || !a.lora[0].rank) depend_wait();
    depend_launch();
    const Hits h = find_experts(a, shared + (FORM == ADAPTERS ? Adapter<T, 2, NT>::bytes_of(a.lora[0].rank) : 0));
    const int warp = blockIdx.x * DECODE_WARPS + threadIdx.x / 32, warps = gridDim.x * DECODE_WARPS;
    const int both = FORM >= ANY && !a.gated;
    const Weights<T> w = {(const T *)a.w1,
                          a.w1_g,
                          FORM >= ANY ? a.gate * a.w1_r : a.w1_r,
                          (FORM >= ANY ? a.up : a.I) * a.w1_r,
                          (int)a.H,
                          (int)a.I >> both,
                          warp,
                          warps};
    const auto token = [&](int slot) { return (const T *)a.x + slot / a.k * a.x_r; };
    const auto now_lora = [] {
        if (FORM == ADAPTERS) depend_wait();
    };
    const auto lora = adapter<T, 2, NT, FORM>(a.lora[0], shared, 0, a.gate, a.up);
    multiply<2, DEPTH, NT, false, FORM>(
        w, lists, lora, h, token, now_lora, [&](int slot, int group, const float(&v)[2]) {
            const int lane = threadIdx.x % 32;
            if (lane > both) return;
            const int column = both ? 2 * group + lane : group;
            const float gate = both && lane ? v[1] : v[0];
            const float r =
                FORM >= ANY ? decode_act(a, h.id[slot], column, gate, v[1])
                            : gate_factor(a.act, v[0], a.alpha, a.limit).value * up_factor(a.act, v[1], a.limit).value;
            ((T *)a.a)[slot * a.I + column] = from_float<T>(r);
        });
}

// down: a block has some columns of all experts, a warp ROWS of them at a time; each token's slots are added up in
// their order.
template <class T, int NT, int ROWS, int PER_SM, int FORM>
__global__ void __launch_bounds__(DECODE_THREADS, PER_SM)
    decode_down(const __grid_constant__ DecodeArgs a, const __grid_constant__ ListsOf<FORM> lists)
{
    extern __shared__ __align__(16) char shared[];
    depend_launch(); // every launch before up, or before up's adapter, is complete: that one waited for it
    const int groups = (int)a.H / ROWS, first = (int)((int64_t)groups * blockIdx.x / gridDim.x);
    const int width = (int)((int64_t)groups * (blockIdx.x + 1) / gridDim.x) - first;
    const int column = first * ROWS, columns = width * ROWS;
    // The weights of the slots; and part [R][columns], a sum for each slot and column of this block.
    float *const prob = (float *)(shared + (FORM == ADAPTERS ? Adapter<T, ROWS, NT>::bytes_of(a.lora[1].rank) : 0)),
                 *const part = prob + a.R;
    for (int i = threadIdx.x; i < a.R; i += DECODE_THREADS)
        prob[i] = load_float(a.p.p, a.p.dtype, i / a.k * a.p.s0 + i % a.k * a.p.s1);
    const Hits h = find_experts(a, (char *)(part + a.R * columns));
    const Weights<T> w = {(const T *)a.w2 + column * a.w2_r,
                          a.w2_g,
                          ROWS * a.w2_r,
                          a.w2_r,
                          (int)a.I,
                          width,
                          (int)threadIdx.x / 32,
                          DECODE_WARPS};
    const auto token = [&](int slot) { return (const T *)a.a + slot * a.I; };
    const auto now_a = [] { depend_wait(); };
    const auto lora = adapter<T, ROWS, NT, FORM>(a.lora[1], shared, column, ROWS, 1);
    multiply<ROWS, 3, NT, true, FORM>(w, lists, lora, h, token, now_a, [&](int slot, int group, const float(&v)[ROWS]) {
        if (threadIdx.x % 32 != 0) return;
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
                const float bias = FORM >= ANY && a.b2.p
                                       ? load_float(a.b2.p, a.b2.dtype, h.id[j] * a.b2.s0 + (column + c) * a.b2.s1)
                                       : 0.f;
                s = fmaf(prob[j], part[j * columns + c] + bias, s);
            }
        *out = from_float<T>(s);
    }
}

// PER_SM blocks a multiprocessor. lists: of W1 and of W2, where the weights are lists or there are adapters.
template <class T, int NT, int DEPTH, int ROWS, int PER_SM>
static void run(const DecodeArgs &a, const DecodeLists *lists, int sms, Stream &s)
{
    const int grid = PER_SM * sms, groups = (int)a.H / ROWS, hits = Hits::bytes_of(a.R, a.E);
    const int blocks = fmoe_cuda_decode_blocks(groups, grid, ROWS * a.R),
              columns = (groups + blocks - 1) / blocks * ROWS;
    const int lora1 = Adapter<T, 2, NT>::bytes_of(a.lora[0].rank),
              lora2 = Adapter<T, ROWS, NT>::bytes_of(a.lora[1].rank);
    const auto lora = [&](int second) {
        const int64_t most = fmoe_ceil_div((int64_t)a.R * a.lora[second].rank, DECODE_WARPS);
        if (most)
            launch(s, Product::DECODE, decode_lora<T>,
                   Grid{(unsigned)fmoe_min(sms, most), DECODE_THREADS, (size_t)hits}, a, second);
    };
    const Grid up_grid = {(unsigned)grid, DECODE_THREADS, (size_t)(hits + lora1)};
    const Grid down_grid = {(unsigned)blocks, DECODE_THREADS, (size_t)(hits + lora2 + a.R * 4 * (columns + 1))};
    const auto up = [&](auto kernel, const auto &l) { launch(s, Product::DECODE, kernel, up_grid, a, l); };
    const auto down = [&](auto kernel, const auto &l) { launch(s, Product::DECODE, kernel, down_grid, a, l); };
    if (a.lora[0].rank || a.lora[1].rank) {
        lora(0);
        up(decode_up<T, NT, 4, PER_SM, ADAPTERS>, lists[0]);
        lora(1);
        down(decode_down<T, NT, ROWS, PER_SM, ADAPTERS>, lists[1]);
    } else if (lists) {
        up(decode_up<T, NT, DEPTH, PER_SM, LISTS>, lists[0]);
        down(decode_down<T, NT, ROWS, PER_SM, LISTS>, lists[1]);
    } else {
        up(a.b1.p || a.gate != 1 || a.H % 256 ? decode_up<T, NT, DEPTH, PER_SM, ANY>
                                              : decode_up<T, NT, DEPTH, PER_SM, WHOLE>,
           NoDecodeLists());
        down(a.b2.p || a.I % 256 ? decode_down<T, NT, ROWS, PER_SM, ANY> : decode_down<T, NT, ROWS, PER_SM, WHOLE>,
             NoDecodeLists());
    }
}

template <class T> static void run(const DecodeArgs &a, const DecodeLists *lists, int sms, Stream &s)
{
    if (a.T == 1) run<T, 1, 4, 2, 3>(a, lists, sms, s);
    else run<T, 2, 8, 4, 2>(a, lists, sms, s);
}

void decode_kmajor_run(const DecodeArgs &a, const DecodeLists *lists, int dtype, const Plan *plan, Stream &s)
{
    if (dtype == FMOE_BF16) run<bf16>(a, lists, plan->sms, s);
    else run<f16>(a, lists, plan->sms, s);
}
