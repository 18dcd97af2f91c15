// SPDX-License-Identifier: Apache-2.0
// ep_rows.cu - expert parallelism on the device (device.h): where rows go, and what moves them.
//
// Home: a key for each slot, its (chunk, rank) cell; rows (the first slot of a token in each cell) and pairs are sorted
// by it with the sort of the layer itself (rowmap.cu), stable and without atomics in the result. Away: the row of a
// pair is the number of pairs before it that begin one. With a capacity every place is known beforehand, and one sort
// does.
#include "cuda/ops.cuh"

extern "C" {
#include "device.h"
}

static constexpr int kThreads = 256;

static unsigned blocks_of(int64_t n) { return (unsigned)fmoe_min(fmoe_ceil_div(n, kThreads), 1 << 20); }

// A launch waits for all before it: these are small.
static Stream plain(void *stream) { return Stream{(cudaStream_t)stream, false, Product::NONE, 0, 0}; }

#define EACH(i, n)                                                                                                     \
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < (n); i += (int64_t)gridDim.x * blockDim.x)

// ---- home ----

DEV int slot_rank(const fmoe_home_args &a, int64_t i)
{
    const int64_t id = load_int(a.ids, a.ids_type, i);
    return id >= 0 && id < a.E ? a.dest[id] : -1;
}

__global__ void ep_keys(fmoe_home_args a, int *row_key, int *pair_key)
{
    EACH(i, a.T * a.k)
    {
        const int64_t t = i / a.k, id = load_int(a.ids, a.ids_type, i);
        const int d = slot_rank(a, i), cell = d < 0 ? -1 : (int)(t * a.chunks / a.T * a.ranks) + d;
        const bool skip = (id == -1 && (a.flags & FMOE_SKIP_NEG1)) || (id == a.E && (a.flags & FMOE_SKIP_E));
        if (d < 0 && !skip) {
            a.report->id = id;
            __threadfence_system();
            a.report->slot = i + 1;
        }
        bool first = true;
        for (int64_t j = t * a.k; j < i; j++) first &= slot_rank(a, j) != d;
        row_key[i] = first ? cell : -1;
        pair_key[i] = cell;
    }
}

// Row and pair of slot i, or -1: by the sorts, or by their places. row: of the first slot of its rank alone, which
// begins it.
DEV int64_t place_of(const fmoe_home_args &a, const RowMap &rows, const int *pair, int64_t i, int64_t *row)
{
    *row = rows.slot[i];
    if (!a.capacity) return pair[i];
    const int d = slot_rank(a, i);
    if (d < 0) return -1;
    int64_t j = i / a.k * a.k, n = 0;
    while (slot_rank(a, j) != d) j++;
    for (int64_t q = j; q < i; q++) n += slot_rank(a, q) == d;
    const int64_t at = rows.slot[j] - rows.off[d];
    if (at >= a.capacity) return -1;
    *row = j == i ? d * a.capacity + at : -1;
    return (d * a.capacity + at) * a.k + n;
}

__global__ void ep_fill(fmoe_home_args a, RowMap rows, const int *pair_slot)
{
    EACH(i, a.T * a.k)
    {
        const int64_t t = i / a.k;
        int64_t row;
        const int64_t pair = place_of(a, rows, pair_slot, i, &row);
        const float p = load_float(a.p, a.p_type, i);
        a.slot_pair[i] = pair;
        if (a.exact) a.map[i] = pair, a.sum_p[i] = a.weighted ? p : 1.f;
        if (a.capacity && pair < 0 && slot_rank(a, i) >= 0)
            atomicAdd((unsigned long long *)&a.counts[2 * a.chunks * a.ranks], 1ull);
        if (pair < 0) continue;
        const uint32_t expert = (uint32_t)a.index[load_int(a.ids, a.ids_type, i)];
        a.pairs[pair] = fmoe_pair{expert | (row >= 0 ? PAIR_FIRST : 0u), p};
        if (row >= 0) a.send_token[row] = t;
    }
}

// Lean: the rows of a token, by rank.
__global__ void ep_sums(fmoe_home_args a, RowMap rows, const int *pair_slot)
{
    EACH(i, a.T * a.k)
    {
        const int64_t t = i / a.k, j = i % a.k;
        int64_t row, before = 0, all = 0;
        const int64_t pair = place_of(a, rows, pair_slot, i, &row);
        for (int64_t q = t * a.k; q < (t + 1) * a.k; q++) {
            int64_t other;
            if (place_of(a, rows, pair_slot, q, &other) < 0 || other < 0) continue;
            all++;
            before += other < row;
        }
        if (pair >= 0 && row >= 0) a.map[t * a.columns + before] = row;
        if (j >= all && j < a.columns) a.map[t * a.columns + j] = -1;
    }
}

struct HomeWork {
    int *row_key, *pair_key;
    RowMap rows, pairs;
};

static RowMap carve_rows(fmoe_carve *c, int64_t slots, int64_t cells)
{
    RowMap m = {};
    m.off = (int *)fmoe_carve_take(c, cells + 1, 4);
    m.cnt = (int *)fmoe_carve_take(c, cells, 4);
    m.slot = (int *)fmoe_carve_take(c, slots, 4);
    m.part = (int *)fmoe_carve_take(c, (int64_t)rowmap_part_count(slots, cells), 4);
    return m;
}

static size_t carve_home(const fmoe_home_args *a, void *base, HomeWork *w)
{
    fmoe_carve c = fmoe_carve_begin(base, kOpsAlign);
    const int64_t slots = a->T * a->k, cells = a->chunks * a->ranks;
    w->row_key = (int *)fmoe_carve_take(&c, slots, 4);
    w->pair_key = (int *)fmoe_carve_take(&c, slots, 4);
    w->rows = carve_rows(&c, slots, cells);
    w->pairs = carve_rows(&c, a->capacity ? 0 : slots, cells);
    return fmoe_carve_bytes(&c);
}

static size_t home_bytes(const fmoe_home_args *a)
{
    HomeWork w;
    return carve_home(a, nullptr, &w);
}

static void sort_keys(int *key, int64_t n, int64_t cells, const RowMap &m, int64_t *counts, Stream &s)
{
    SortArgs q = {};
    q.ids = View{key, -32, 1, 1};
    q.T = n, q.k = 1, q.E = cells;
    q.flags = FMOE_SKIP_NEG1;
    q.align = 1;
    rowmap_sort_into(q, m, View{}, View{counts, -64, 1, 1}, s);
}

static fmoe_status home(int32_t device, const fmoe_home_args *a)
{
    const int64_t slots = a->T * a->k, cells = a->chunks * a->ranks;
    if (slots > INT32_MAX || cells > INT32_MAX / 2)
        return FAIL(FMOE_ERR_OVERFLOW, "T * k = %lld slots to %lld (chunk, rank) do not fit the CUDA backend's 2^31",
                    (long long)slots, (long long)cells);
    DeviceScope scope(device);
    Stream s = plain(a->stream);
    HomeWork w;
    carve_home(a, a->work, &w);
    cudaMemsetAsync(a->counts, 0, (size_t)(2 * cells + 1) * 8, s.handle);
    if (a->capacity) { // -1, and PAIR_EXPERT
        cudaMemsetAsync(a->send_token, 0xff, (size_t)cells * a->capacity * 8, s.handle);
        cudaMemsetAsync(a->pairs, 0xff, (size_t)(cells * a->capacity * a->k) * sizeof(fmoe_pair), s.handle);
    }
    if (slots) launch(s, Product::EP, ep_keys, Grid{blocks_of(slots), kThreads}, *a, w.row_key, w.pair_key);
    sort_keys(w.row_key, slots, cells, w.rows, a->counts, s);
    if (!a->capacity) sort_keys(w.pair_key, slots, cells, w.pairs, a->counts + cells, s);
    if (slots) launch(s, Product::EP, ep_fill, Grid{blocks_of(slots), kThreads}, *a, w.rows, w.pairs.slot);
    if (slots && !a->exact) launch(s, Product::EP, ep_sums, Grid{blocks_of(slots), kThreads}, *a, w.rows, w.pairs.slot);
    return fmoe_cuda_launched("expert parallelism: where tokens go");
}

// ---- away ----

static constexpr int kScan = 1024; // pairs of a block

__global__ void __launch_bounds__(kScan) ep_begins(const fmoe_pair *recv, int64_t pairs, int *part)
{
    const int64_t q = blockIdx.x * (int64_t)kScan + threadIdx.x;
    const int n = __syncthreads_count(q < pairs && (recv[q].expert & PAIR_FIRST));
    if (threadIdx.x == 0) part[blockIdx.x] = n;
}

DEV void bad_pair(const fmoe_away_args &a, int64_t q, int64_t expert)
{
    a.report->expert = expert;
    __threadfence_system();
    a.report->pair = q + 1;
}

DEV void write_pair(const fmoe_away_args &a, int64_t q, int64_t row, int64_t slot, int64_t expert, bool ok)
{
    const int64_t at = a.exact ? q : row * a.k + slot;
    a.where[q] = !ok ? -1 : a.exact ? row : at;
    if (a.ones) a.ones[q] = 1.f;
    if (!ok && !a.exact) return;
    a.ids[at] = ok ? (int)expert : -1;
    store_float(a.p, a.p_type, at, ok ? a.recv[q].p : 0.f);
}

// at: row_at and pair_at on the device.
__global__ void __launch_bounds__(kScan) ep_read(fmoe_away_args a, const int64_t *at, const int *part)
{
    __shared__ int warps[kScan / 32], blocks_before;
    const int64_t q = blockIdx.x * (int64_t)kScan + threadIdx.x;
    const int lane = threadIdx.x % 32, w = threadIdx.x / 32;
    const uint32_t word = q < a.pairs ? a.recv[q].expert : 0;
    const unsigned begins = __ballot_sync(~0u, word & PAIR_FIRST);
    if (lane == 0) warps[w] = __popc(begins);
    if (threadIdx.x == 0) blocks_before = 0;
    __syncthreads();
    int own = 0;
    for (int b = threadIdx.x; b < (int)blockIdx.x; b += kScan) own += part[b];
    if (own) atomicAdd(&blocks_before, own); // integers: order does not matter
    __syncthreads();
    int in_block = 0;
    for (int i = 0; i < w; i++) in_block += warps[i];
    if (q >= a.pairs) return;
    const int64_t row = (int64_t)blocks_before + in_block + __popc(begins & ((2u << lane) - 1)) - 1;
    const int64_t *const row_at = at, *const pair_at = at + a.cells + 1;
    int64_t low = 0, high = a.cells; // the last cell that begins at or before q
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (pair_at[middle] <= q) low = middle;
        else high = middle;
    }
    int64_t slot = 0;
    while (slot < a.k && q - slot >= pair_at[low] && !(a.recv[q - slot].expert & PAIR_FIRST)) slot++;
    const int64_t expert = word & PAIR_EXPERT;
    const bool last = q + 1 == pair_at[low + 1];
    const bool ok = expert < a.experts && row >= row_at[low] && row < row_at[low + 1] && slot < a.k &&
                    q - slot >= pair_at[low] && (!last || row + 1 == row_at[low + 1]);
    if (!ok) bad_pair(a, q, expert);
    write_pair(a, q, row, slot, expert, ok);
}

__global__ void ep_read_fixed(fmoe_away_args a)
{
    EACH(q, a.pairs)
    {
        const int64_t expert = a.recv[q].expert & PAIR_EXPERT;
        const bool none = expert == PAIR_EXPERT, ok = expert < a.experts;
        if (!none && !ok) bad_pair(a, q, expert);
        write_pair(a, q, q / a.k, q % a.k, expert, ok);
    }
}

static int64_t scan_blocks(const fmoe_away_args *a) { return fmoe_ceil_div(a->pairs, kScan); }

static size_t away_bytes(const fmoe_away_args *a)
{
    return (size_t)(a->capacity ? 0 : 2 * (a->cells + 1) * 8 + scan_blocks(a) * 4);
}

static fmoe_status away(int32_t device, const fmoe_away_args *a)
{
    if (a->pairs > INT32_MAX || a->rows > INT32_MAX / a->k)
        return FAIL(FMOE_ERR_OVERFLOW, "%lld pairs of %lld rows came: they do not fit the CUDA backend's 2^31",
                    (long long)a->pairs, (long long)a->rows);
    if (!a->pairs) return FMOE_OK;
    DeviceScope scope(device);
    Stream s = plain(a->stream);
    if (!a->exact) {
        cudaMemsetAsync(a->ids, 0xff, (size_t)(a->rows * a->k) * 4, s.handle);
        cudaMemsetAsync(a->p, 0, (size_t)(a->rows * a->k) * fmoe_dtype_size(a->p_type), s.handle);
    }
    if (a->capacity) {
        launch(s, Product::EP, ep_read_fixed, Grid{blocks_of(a->pairs), kThreads}, *a);
        return fmoe_cuda_launched("expert parallelism: what came");
    }
    int64_t *const at = (int64_t *)a->work;
    const size_t bytes = (size_t)(a->cells + 1) * 8;
    int *const part = (int *)(at + 2 * (a->cells + 1));
    cudaMemcpyAsync(at, a->row_at, bytes, cudaMemcpyHostToDevice, s.handle);
    cudaMemcpyAsync(at + a->cells + 1, a->pair_at, bytes, cudaMemcpyHostToDevice, s.handle);
    const unsigned blocks = (unsigned)scan_blocks(a);
    launch(s, Product::EP, ep_begins, Grid{blocks, kScan}, a->recv, a->pairs, part);
    launch(s, Product::EP, ep_read, Grid{blocks, kScan}, *a, (const int64_t *)at, (const int *)part);
    return fmoe_cuda_launched("expert parallelism: what came");
}

// ---- Moving ----

template <class W>
__global__ void __launch_bounds__(kThreads)
    ep_gather(char *to, const char *from, int64_t stride, int64_t words, const int64_t *map, int64_t n)
{
    for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
        const int64_t row = map[i];
        W *const out = (W *)to + i * words;
        const W *const in = (const W *)(from + row * stride);
        for (int64_t c = threadIdx.x; c < words; c += blockDim.x) out[c] = row < 0 ? W{} : in[c];
    }
}

static fmoe_status gather(int32_t device, void *to, const void *from, int64_t stride, int64_t bytes, const int64_t *map,
                          int64_t n, void *stream)
{
    if (!n) return FMOE_OK;
    DeviceScope scope(device);
    Stream s = plain(stream);
    const bool wide = ((uintptr_t)to | (uintptr_t)from | (uintptr_t)stride | (uintptr_t)bytes) % 16 == 0;
    const Grid grid = {(unsigned)fmoe_min(n, 1 << 30), kThreads};
    if (wide)
        launch(s, Product::EP, ep_gather<uint4>, grid, (char *)to, (const char *)from, stride, bytes / 16, map, n);
    else launch(s, Product::EP, ep_gather<uint16_t>, grid, (char *)to, (const char *)from, stride, bytes / 2, map, n);
    return fmoe_cuda_launched("expert parallelism: rows");
}

__global__ void ep_take(void *to, int type, const float *from, const int64_t *map, int64_t n)
{
    EACH(i, n)
    store_float(to, type, i, map[i] < 0 ? 0.f : from[map[i]]);
}

static fmoe_status take(int32_t device, void *to, int type, const float *from, const int64_t *map, int64_t n,
                        void *stream)
{
    if (!n) return FMOE_OK;
    DeviceScope scope(device);
    Stream s = plain(stream);
    launch(s, Product::EP, ep_take, Grid{blocks_of(n), kThreads}, to, type, from, map, n);
    return fmoe_cuda_launched("expert parallelism: dp");
}

// ---- Memory and streams ----

static fmoe_status answer(cudaError_t e, const char *what)
{
    if (e == cudaSuccess) return FMOE_OK;
    cudaGetLastError();
    return FAIL(e == cudaErrorMemoryAllocation ? FMOE_ERR_NOMEM : FMOE_ERR_DEVICE, "CUDA: %s: %s", what,
                cudaGetErrorString(e));
}

static void *alloc(int32_t device, size_t bytes, bool host)
{
    DeviceScope scope(device);
    const OutsideCapture outside;
    void *p = nullptr;
    const cudaError_t e =
        host ? cudaHostAlloc(&p, bytes, cudaHostAllocMapped | cudaHostAllocPortable) : cudaMalloc(&p, bytes);
    return answer(e, host ? "pinned memory" : "memory") == FMOE_OK ? p : nullptr;
}

static void release(int32_t device, void *memory, bool host)
{
    DeviceScope scope(device);
    const OutsideCapture outside;
    if (host) cudaFreeHost(memory);
    else cudaFree(memory);
    cudaGetLastError();
}

static fmoe_status copy(int32_t device, void *to, const void *from, size_t bytes, void *stream, bool wait)
{
    DeviceScope scope(device);
    cudaError_t e = bytes ? cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, (cudaStream_t)stream) : cudaSuccess;
    if (e == cudaSuccess && wait) e = cudaStreamSynchronize((cudaStream_t)stream);
    return answer(e, "a copy between host and device");
}

static fmoe_status event(int32_t device, void **out)
{
    DeviceScope scope(device);
    return answer(cudaEventCreateWithFlags((cudaEvent_t *)out, cudaEventDisableTiming), "an event");
}

static void event_free(int32_t device, void *e)
{
    DeviceScope scope(device);
    if (e) cudaEventDestroy((cudaEvent_t)e);
}

static fmoe_status record(int32_t device, void *e, void *stream)
{
    DeviceScope scope(device);
    return answer(cudaEventRecord((cudaEvent_t)e, (cudaStream_t)stream), "recording an event");
}

static fmoe_status after(int32_t device, void *e, void *stream)
{
    DeviceScope scope(device);
    return answer(cudaStreamWaitEvent((cudaStream_t)stream, (cudaEvent_t)e, 0), "waiting for an event");
}

static fmoe_status passed(int32_t device, void *e, bool *yes)
{
    DeviceScope scope(device);
    const OutsideCapture outside;
    const cudaError_t state = cudaEventQuery((cudaEvent_t)e);
    *yes = state == cudaSuccess;
    return state == cudaErrorNotReady ? FMOE_OK : answer(state, "asking for an event");
}

static bool capturing(int32_t device, void *stream)
{
    DeviceScope scope(device);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    return cudaStreamIsCapturing((cudaStream_t)stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone;
}

const fmoe_device_ops fmoe_cuda_device = {alloc,     release,    copy, event,      event_free, record, after, passed,
                                          capturing, home_bytes, home, away_bytes, away,       gather, take};
