// SPDX-License-Identifier: Apache-2.0
// rowmap.cu - from ids to rows: a stable counting sort by expert, on the device, without atomics in the result.
//
// Count the experts of each block of slots; scan (blocks, then experts); place. With few blocks and experts the scan is
// part of placing: every block adds up the counts of all. Pad rows repeat the last row of their own expert with weight
// 0: their gradients are exact zeros and they bring in no other token. More experts than shared memory has counters for
// are taken in turns.
#include "common.cuh"

static constexpr int kSortThreads = 256, kSortWarps = 8;
static constexpr int kScanThreads = 1024;
static constexpr int kTurn = 11776;                             // experts of a turn: 46 KB of counters
static constexpr int kFewExperts = 512, kFewCounts = 16 * 1024; // where every block may add up all counts

DEV void report(DeviceError *error, uint32_t code, int64_t index, int64_t value)
{
    if (!error) return;
    error->index = index;
    error->value = value;
    __threadfence_system();
    error->code = code;
}

// Slot i of the tokens' choices, of which there are less than 2^31: dividing in 64 bits is slow.
struct Slot {
    uint32_t t, j;
    DEV Slot(int64_t i, int64_t k) : t((uint32_t)i / (uint32_t)k), j((uint32_t)i - t * (uint32_t)k) {}
    DEV int64_t in(const View &v) const { return t * v.s0 + j * v.s1; }
};

// The expert of a slot, or -1: skipped or out of range.
DEV int slot_expert(const View &ids, const Slot &slot, int64_t i, int64_t E, uint32_t flags, DeviceError *error)
{
    const int64_t id = load_int(ids.p, ids.dtype, slot.in(ids));
    if (id >= 0 && id < E) return (int)id;
    const bool skip = (id == -1 && (flags & FMOE_SKIP_NEG1)) || (id == E && (flags & FMOE_SKIP_E));
    if (!skip) report(error, DEVERR_ID, i, id);
    return -1;
}

__global__ void sort_count(View ids, int64_t R, int64_t k, int E, uint32_t flags, int chunk, int *part,
                           DeviceError *error)
{
    extern __shared__ int hist[];
    depend_wait();
    depend_launch();
    const int64_t first = (int64_t)blockIdx.x * chunk, last = min(R, first + chunk);
    for (int e0 = 0; e0 < E; e0 += kTurn) {
        const int n = min(kTurn, E - e0);
        for (int e = threadIdx.x; e < n; e += blockDim.x) hist[e] = 0;
        __syncthreads();
        for (int64_t i = first + threadIdx.x; i < last; i += blockDim.x) {
            const int e = slot_expert(ids, Slot(i, k), i, E, flags, e0 ? nullptr : error) - e0;
            if (e >= 0 && e < n) atomicAdd(&hist[e], 1); // integer counts: order does not matter
        }
        __syncthreads();
        for (int e = threadIdx.x; e < n; e += blockDim.x) part[(int64_t)blockIdx.x * E + e0 + e] = hist[e];
    }
}

// Inclusive sum over the block of a pair (rows, tiles) packed in 64 bits.
DEV int64_t block_scan(int64_t v, int64_t *shared)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int64_t o = __shfl_up_sync(~0u, v, d);
        if (lane >= d) v += o;
    }
    if (lane == 31) shared[warp] = v;
    __syncthreads();
    if (warp == 0) {
        int64_t w = lane < (int)blockDim.x / 32 ? shared[lane] : 0;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int64_t o = __shfl_up_sync(~0u, w, d);
            if (lane >= d) w += o;
        }
        shared[lane] = w;
    }
    __syncthreads();
    if (warp) v += shared[warp - 1];
    return v;
}

// Offsets, counts and tiles from per-expert counts; all threads of the block call it, `count(e)` gives the count and
// `first(e, row)` is told where it begins. `write`: this block writes the row map.
template <class F, class G>
DEV void layout(int E, int align, const RowMap &m, bool write, int64_t *shared, F count, G first)
{
    int64_t carry = 0; // rows in the low, tiles in the high half
    for (int e0 = 0; e0 < E; e0 += blockDim.x) {
        const int e = e0 + threadIdx.x, n = e < E ? count(e) : 0;
        const int rows = (n + align - 1) / align * align, tiles = (n + FMOE_CUDA_TILE_M - 1) / FMOE_CUDA_TILE_M;
        const int64_t own = (int64_t)tiles << 32 | rows, sum = block_scan(own, shared) + carry;
        const int64_t before = sum - own;
        if (e < E) first(e, (int)before);
        if (e < E && write) {
            m.off[e] = (int)before;
            m.cnt[e] = n;
            const int t0 = (int)(before >> 32);
            if (m.tile)
                for (int i = 0; i < tiles; i++) m.tile[t0 + i] = make_int2(e, (int)before + i * FMOE_CUDA_TILE_M);
        }
        __syncthreads();
        if (threadIdx.x == blockDim.x - 1) shared[32] = sum;
        __syncthreads();
        carry = shared[32];
    }
    if (threadIdx.x) return;
    first(E, (int)carry);
    if (write) {
        m.off[E] = (int)carry;
        if (m.ntile) *m.ntile = (int)(carry >> 32);
    }
}

// One block. part[b][e] becomes the number of rows of expert e in the blocks before b.
__global__ void __launch_bounds__(kScanThreads) sort_scan(int blocks, int E, int align, RowMap m, View counts)
{
    __shared__ int64_t shared[33];
    __shared__ int sums[kScanThreads];
    depend_wait();
    depend_launch();
    // With few experts several threads share one: thread (g, e) sums its share of the blocks.
    int G = 1;
    while (G * 2 * E <= kScanThreads && G < 32) G *= 2;
    for (int e0 = 0; e0 < E; e0 += kScanThreads) {
        const int e = e0 + (int)threadIdx.x % (G == 1 ? kScanThreads : E), g = G == 1 ? 0 : (int)threadIdx.x / E;
        const bool on = e < E && g < G;
        const int per = (blocks + G - 1) / G, b0 = min(blocks, g * per), b1 = min(blocks, b0 + per);
        int sum = 0;
        if (on)
#pragma unroll 8
            for (int b = b0; b < b1; b++) sum += m.part[(int64_t)b * E + e];
        sums[threadIdx.x] = sum;
        __syncthreads();
        int run = 0;
        if (on) {
            for (int q = 0; q < g; q++) run += sums[q * E + e];
#pragma unroll 8
            for (int b = b0; b < b1; b++) {
                const int n = m.part[(int64_t)b * E + e];
                m.part[(int64_t)b * E + e] = run;
                run += n;
            }
            if (g == G - 1) m.cnt[e] = run;
        }
        __syncthreads();
    }
    layout(E, align, m, true, shared, [&](int e) { return m.cnt[e]; }, [](int, int) {});
    if (counts.p)
        for (int e = threadIdx.x; e < E; e += blockDim.x) store_int(counts.p, counts.dtype, e * counts.s0, m.cnt[e]);
}

DEV int nth(int v, int) { return v; }
DEV int nth(const int4 &v, int q) { return q == 0 ? v.x : q == 1 ? v.y : q == 2 ? v.z : v.w; }

// here[e] and all[e] += the counts of the blocks before this one, and of all blocks. W: int, or int4 where E allows.
template <class W> DEV void add_counts(const int *part, int E, int blocks, int *here, int *all)
{
    constexpr int N = sizeof(W) / 4;
    const int cols = E / N, groups = max(1, kSortThreads / cols);
    for (int i = threadIdx.x; i < groups * cols; i += kSortThreads) {
        const int c = i % cols;
        int before[N] = {}, sum[N] = {};
#pragma unroll 4
        for (int b = i / cols; b < blocks; b += groups) {
            const W v = ((const W *)part)[(int64_t)b * cols + c];
#pragma unroll
            for (int q = 0; q < N; q++) {
                const int n = nth(v, q);
                sum[q] += n;
                if (b < (int)blockIdx.x) before[q] += n;
            }
        }
#pragma unroll
        for (int q = 0; q < N; q++) {
            if (before[q]) atomicAdd(&here[c * N + q], before[q]); // integer sums: order does not matter
            if (sum[q]) atomicAdd(&all[c * N + q], sum[q]);
        }
    }
}

// WARPS of the block take 32 slots ROUNDS times; with very many experts fewer of them, since each has a counter for
// every expert. FEW: there was no scan; this block adds up the counts itself, and the first one writes the row map.
template <int WARPS, int ROUNDS, bool FEW>
__global__ void __launch_bounds__(kSortThreads)
    sort_place(View ids, View p, View out, View counts, int64_t R, int64_t k, int E, uint32_t flags, int align,
               int chunk, int blocks, RowMap m)
{
    extern __shared__ int next[]; // [warps][experts of a turn]: the next row of each expert for each warp
    __shared__ int begin_at[FEW ? kFewExperts + 1 : 1], here[FEW ? kFewExperts : 1], all[FEW ? kFewExperts : 1];
    __shared__ int64_t scratch[33];
    depend_wait();
    depend_launch();
    const int w = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (FEW) {
        for (int e = threadIdx.x; e < E; e += blockDim.x) here[e] = all[e] = 0;
        __syncthreads();
        if (E % 4 == 0) add_counts<int4>(m.part, E, blocks, here, all);
        else add_counts<int>(m.part, E, blocks, here, all);
        __syncthreads();
        layout(
            E, align, m, blockIdx.x == 0, scratch, [&](int e) { return all[e]; },
            [&](int e, int row) { begin_at[e] = row; });
        if (counts.p && blockIdx.x == 0)
            for (int e = threadIdx.x; e < E; e += blockDim.x) store_int(counts.p, counts.dtype, e * counts.s0, all[e]);
        __syncthreads();
    }
    if (m.ready && blockIdx.x == 0 && threadIdx.x < kReady) m.ready[threadIdx.x] = Ready{};
    auto offset = [&](int e) { return FEW ? begin_at[e] : m.off[e]; };
    auto count = [&](int e) { return FEW ? all[e] : m.cnt[e]; };
    const int64_t begin = (int64_t)blockIdx.x * chunk, end = min(R, begin + chunk);
    // a tile may look past the last row.
    if (m.prob && blockIdx.x == 0 && threadIdx.x < FMOE_CUDA_SLACK) m.tok[offset(E) + threadIdx.x] = 0;
    for (int64_t base = begin; base < end; base += WARPS * ROUNDS * 32) {
        constexpr int per = ROUNDS * 32; // slots a warp takes, in order
        int ex[ROUNDS], tok[ROUNDS];
        float prob[ROUNDS];
        if (w < WARPS)
#pragma unroll
            for (int r = 0; r < ROUNDS; r++) {
                const int64_t i = base + w * per + r * 32 + lane;
                const Slot slot(i, k);
                tok[r] = (int)slot.t;
                ex[r] = i < end ? slot_expert(ids, slot, i, E, flags, nullptr) : -1;
                prob[r] = m.prob && p.p && i < end ? load_float(p.p, p.dtype, slot.in(p)) : 1.f;
                if (i < end && ex[r] < 0) {
                    if (m.slot) m.slot[i] = -1;
                    if (out.p) store_int(out.p, out.dtype, i * out.s0, -1);
                }
            }
        for (int e0 = 0; e0 < E; e0 += kTurn) {
            const int n = min(kTurn, E - e0);
            unsigned same[ROUNDS];
            for (int e = threadIdx.x; e < WARPS * n; e += blockDim.x) next[e] = 0;
            __syncthreads();
            int *mine = next + w * n;
            auto turn = [&](int r) { return ex[r] >= e0 && ex[r] < e0 + n ? ex[r] - e0 : -1; };
            if (w < WARPS)
#pragma unroll
                for (int r = 0; r < ROUNDS; r++) {
                    const int e = turn(r);
                    same[r] = __match_any_sync(~0u, e);
                    if (e >= 0 && lane == __ffs(same[r]) - 1) mine[e] += __popc(same[r]);
                    __syncwarp();
                }
            __syncthreads();
            for (int e = threadIdx.x; e < n; e += blockDim.x) {
                // Rows of this expert before these slots.
                int *seen = FEW ? &here[e] : m.part + (int64_t)blockIdx.x * E + e0 + e;
                const int first = offset(e0 + e);
                int run = first + *seen;
                for (int q = 0; q < WARPS; q++) {
                    const int v = next[q * n + e];
                    next[q * n + e] = run;
                    run += v;
                }
                *seen = run - first;
            }
            __syncthreads();
            if (w < WARPS)
#pragma unroll
                for (int r = 0; r < ROUNDS; r++) {
                    const int64_t i = base + w * per + r * 32 + lane;
                    const int e = turn(r);
                    int row = -1;
                    if (e >= 0) row = mine[e] + __popc(same[r] & ((1u << lane) - 1));
                    __syncwarp();
                    if (e >= 0 && lane == __ffs(same[r]) - 1) mine[e] += __popc(same[r]);
                    __syncwarp();
                    if (row < 0) continue;
                    if (m.slot) m.slot[i] = row;
                    if (out.p) store_int(out.p, out.dtype, i * out.s0, row);
                    if (m.tok) m.tok[row] = tok[r];
                    if (m.prob) m.prob[row] = prob[r];
                    // The last row of an expert fills the pads after it.
                    if (m.prob && row == offset(e0 + e) + count(e0 + e) - 1)
                        for (int pad = row + 1; pad < offset(e0 + e + 1); pad++) m.tok[pad] = tok[r], m.prob[pad] = 0;
                }
            __syncthreads();
        }
    }
}

static int sort_blocks(int64_t R, int chunk) { return (int)((R + chunk - 1) / chunk); }

size_t rowmap_part_count(int64_t R, int64_t E) { return (size_t)sort_blocks(R, fmoe_cuda_sort_chunk(R)) * (size_t)E; }

typedef void (*PlaceKernel)(View, View, View, View, int64_t, int64_t, int, uint32_t, int, int, int, RowMap);

void rowmap_sort_into(const SortArgs &a, const RowMap &m, const View &map, const View &counts, Stream &s)
{
    const int64_t R = a.T * a.k;
    const int E = (int)a.E, turn = E < kTurn ? E : kTurn, chunk = fmoe_cuda_sort_chunk(R),
              blocks = sort_blocks(R, chunk);
    const View none = {}, p = a.p ? *a.p : none;
    const bool few = blocks && E <= kFewExperts && (int64_t)blocks * E <= kFewCounts;
    if (blocks)
        launch(s, Product::SORT, sort_count, Grid{(unsigned)blocks, kSortThreads, (size_t)turn * 4}, a.ids, R, a.k, E,
               a.flags, chunk, m.part, a.error);
    if (!few) launch(s, Product::SORT, sort_scan, Grid{1, kScanThreads}, blocks, E, a.align, m, counts);
    if (!blocks) return;
    int warps = kSortWarps;
    while (warps > 1 && warps * turn * 4 > 48 * 1024) warps /= 2;
    const PlaceKernel place = few          ? (chunk <= 256 ? sort_place<8, 1, true> : sort_place<8, 4, true>)
                              : warps == 8 ? sort_place<8, 4, false>
                              : warps == 4 ? sort_place<4, 4, false>
                              : warps == 2 ? sort_place<2, 4, false>
                                           : sort_place<1, 4, false>;
    launch(s, Product::SORT, place, Grid{(unsigned)blocks, kSortThreads, (size_t)warps * turn * 4}, a.ids, p, map,
           few ? counts : none, R, a.k, E, a.flags, a.align, chunk, blocks, m);
}

__global__ void ready_clear(Ready *ready)
{
    depend_wait();
    depend_launch();
    ready[threadIdx.x] = Ready{};
}

void rowmap_clear(Ready *ready, Stream &s) { launch(s, Product::CLEAR_READY, ready_clear, Grid{1, kReady}, ready); }

// FMOE_NEW_WEIGHTS: other weights for the same rows.
__global__ void new_weights(View p, int64_t R, int64_t k, RowMap m)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < R; i += (int64_t)gridDim.x * blockDim.x)
        if (m.slot[i] >= 0) m.prob[m.slot[i]] = load_float(p.p, p.dtype, Slot(i, k).in(p));
}

void rowmap_weigh(const View &p, int64_t T, int64_t k, const RowMap &m, Stream &s)
{
    const unsigned blocks = (unsigned)fmoe_min(fmoe_ceil_div(T * k, kSortThreads), 4096);
    if (blocks) launch(s, Product::EP, new_weights, Grid{blocks, kSortThreads}, p, T * k, k, m);
}

void rowmap_sort(const SortArgs &a, const RowMap &m, Stream &s) { rowmap_sort_into(a, m, View{}, View{}, s); }

// ---- Groups given by sizes (grouped matmul) ----

// The size of a group, or -1 when it is out of range.
DEV int group_size(const View &sizes, int e, int64_t R, int cumulative)
{
    if (!sizes.p) return (int)R;
    int64_t n = load_int(sizes.p, sizes.dtype, e * sizes.s0);
    if (cumulative && e) n -= load_int(sizes.p, sizes.dtype, (e - 1) * sizes.s0);
    return n >= 0 && n <= R ? (int)n : -1;
}

// One block. Sizes that are negative or add up to more than R make all groups empty: nothing is computed.
__global__ void __launch_bounds__(kScanThreads)
    sizes_scan(View sizes, int E, int64_t R, int cumulative, RowMap m, DeviceError *error)
{
    __shared__ int64_t shared[33], total;
    __shared__ int bad;
    if (threadIdx.x == 0) bad = 0;
    __syncthreads();
    int64_t own = 0;
    for (int e = threadIdx.x; e < E; e += blockDim.x) {
        const int n = group_size(sizes, e, R, cumulative);
        if (n >= 0) own += n;
        else {
            bad = 1;
            report(error, DEVERR_SIZE, e, load_int(sizes.p, sizes.dtype, e * sizes.s0));
        }
    }
    const int64_t sum = block_scan(own, shared);
    if (threadIdx.x == blockDim.x - 1) total = sum;
    __syncthreads();
    if (threadIdx.x == 0 && total > R) {
        bad = 1;
        report(error, DEVERR_SIZE, E - 1, total);
    }
    __syncthreads();
    const bool none = bad;
    layout(
        E, 1, m, true, shared, [&](int e) { return none ? 0 : group_size(sizes, e, R, cumulative); }, [](int, int) {});
}

void rowmap_from_sizes(const View &sizes, int64_t E, int64_t R, int cumulative, const RowMap &m, DeviceError *error,
                       Stream &s)
{
    launch(s, Product::SIZES, sizes_scan, Grid{1, kScanThreads}, sizes, (int)E, R, cumulative, m, error);
}

// ---- A list of matrices: pointers travel as launch parameters, so that nothing is copied from pageable memory ----

struct ListPart {
    MatEntry entry[120]; // of 4 KB
};

__global__ void list_write(const __grid_constant__ ListPart part, MatEntry *dst, int n)
{
    if ((int)threadIdx.x < n) dst[threadIdx.x] = part.entry[threadIdx.x];
}

void rowmap_list(MatEntry *dst, const fmoe_tensor *list, int64_t n, Stream &s)
{
    constexpr int most = sizeof(ListPart) / sizeof(MatEntry);
    for (int64_t i = 0; i < n; i += most) {
        ListPart part = {};
        const int now = (int)fmoe_min(most, n - i);
        for (int j = 0; j < now; j++) {
            const fmoe_tensor *t = list + i + j;
            part.entry[j].p = fmoe_data(t);
            part.entry[j].r = fmoe_stride(t, 0);
            part.entry[j].c = t->ndim > 1 ? fmoe_stride(t, 1) : 1;
            part.entry[j].rows = t->shape[0];
        }
        launch(s, Product::LIST, list_write, Grid{1, most}, part, dst + i, now);
    }
}

Mat rowmap_mat(const fmoe_tensor *list, int64_t n, size_t size, MatEntry *copy, Stream &s)
{
    Mat m = {};
    m.split = INT64_MAX;
    m.r = fmoe_stride(&list[0], 0);
    m.c = fmoe_stride(&list[0], 1);
    const uintptr_t first = (uintptr_t)fmoe_data(&list[0]), step = n > 1 ? (uintptr_t)fmoe_data(&list[1]) - first : 0;
    uintptr_t low = first, high = first, bits = 0;
    bool alike = true, even = (intptr_t)step >= 0 && step % size == 0;
    for (int64_t e = 0; e < n; e++) {
        const uintptr_t p = (uintptr_t)fmoe_data(&list[e]);
        alike &= fmoe_stride(&list[e], 0) == m.r && fmoe_stride(&list[e], 1) == m.c;
        even &= p == first + (uintptr_t)e * step;
        low = p < low ? p : low;
        high = p > high ? p : high;
        bits |= p ^ first;
    }
    m.p = (void *)low;
    if (alike && even) {
        m.g = (int64_t)(step / size);
        return m;
    }
    rowmap_list(copy, list, n, s);
    m.list = copy;
    if (!alike || !bits) return m;
    while (!(bits & 1)) bits >>= 1, m.shift++;
    m.span = (int64_t)((high - low) >> m.shift);
    return m;
}
