// SPDX-License-Identifier: Apache-2.0
// cuda_bench.cu - the layer on a CUDA device beside dense cuBLAS products of the same FLOPs, in one process.
// Routing is included.
//
//   nvcc -O2 -std=c++17 -arch=sm_80 -Iinclude bench/cuda_bench.cu -o build/cuda_bench \
//       -Lbuild -lfusedmoe -Xlinker -rpath=$PWD/build -ldl
//
// Everything goes through the public API of libfusedmoe.so. LIBRARY is the absolute path of the libfusedmoe_cuda.so
// that it is to load.
//
//   cuda_bench LIBRARY layer SHAPE:T...      forward and forward+backward, from idle and sustained at the power limit;
//                                            "routed": routing left out
//   cuda_bench LIBRARY given SHAPE:T...      the same with ids and weights given, and nothing beside it: 4 s a shape
//   cuda_bench LIBRARY decode SHAPE T...     forward in a CUDA graph, routing included, weights not in the cache
//   cuda_bench LIBRARY gmm SHAPE:T...        grouped matmul of the routed rows with W1: forward, dx and dW
//   cuda_bench LIBRARY once SHAPE:T          one forward and backward (for a profiler)
//   cuda_bench LIBRARY memory SHAPE:T...     workspace and kept bytes
//
// Shapes: q30 olmoe q235 mixtral dsv3, gptoss (that model's own layer: biases, gate and up as neighbours, weights
// [in,out]), and tiny and odd for checkers (H, I, E, k as in the table below). FMOE_BENCH_CUBLAS names libcublas.so for
// the dense figures. Normal random data. "From idle": median of 15 passes after 3, the card idle before. "Sustained":
// passes between 0.3 s and 1 s.
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "fusedmoe.h"

#define CK(x)                                                                                                          \
    do {                                                                                                               \
        const cudaError_t e_ = (x);                                                                                    \
        if (e_ != cudaSuccess) {                                                                                       \
            printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(e_));                                         \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static const struct {
    const char *name;
    int64_t H, I, E, k;
    bool oai; // gpt-oss's own layer: biases, gate and up as neighbours, weights [in,out]
} shapes[] = {{"gptoss", 2880, 2880, 32, 4, true},
              {"q30", 2048, 768, 128, 8},
              {"olmoe", 2048, 1024, 64, 8},
              {"q235", 4096, 1536, 128, 8},
              {"mixtral", 4096, 14336, 8, 2},
              {"dsv3", 7168, 2048, 32, 8},
              {"tiny", 512, 256, 8, 2},
              {"odd", 200, 76, 5, 3}};

static cudaStream_t stream;

static void ok(fmoe_status s)
{
    if (s != FMOE_OK) printf("%s: %s\n", fmoe_status_string(s), fmoe_last_error()), exit(1);
}

__device__ static uint32_t hash32(uint32_t v)
{
    v ^= v >> 16, v *= 0x7feb352d, v ^= v >> 15, v *= 0x846ca68b;
    return v ^ v >> 16;
}
__global__ static void fill(uint16_t *p, float *f, size_t n, float s, uint32_t seed)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        const uint32_t a = hash32((uint32_t)i * 2 + seed), b = hash32(a + 0x9e3779b9 + (uint32_t)(i >> 31));
        const float v = s * sqrtf(-2.f * logf((a + 1.f) * 2.3283064e-10f)) * cospif(2.f * b * 2.3283064e-10f);
        if (f) f[i] = v;
        else p[i] = (uint16_t)((__float_as_uint(v) + 0x8000) >> 16);
    }
}

struct Tensor {
    fmoe_tensor t = {};
    int64_t shape[3], strides[3];
    size_t bytes = 0;
    Tensor() = default;
    Tensor(const Tensor &) = delete;
    void make(int dtype, std::vector<int64_t> dims, float scale, uint32_t seed)
    {
        size_t n = 1;
        for (size_t i = dims.size(); i-- > 0;) shape[i] = dims[i], strides[i] = (int64_t)n, n *= (size_t)dims[i];
        const size_t size = dtype == FMOE_F32 || dtype == -32 ? 4 : dtype == -64 ? 8 : 2;
        bytes = n * size;
        CK(cudaMalloc(&t.data, bytes + 256));
        t.device = {FMOE_CUDA, 0};
        t.ndim = (int32_t)dims.size();
        t.shape = shape;
        t.strides = strides;
        t.dtype = dtype == FMOE_F32 ? fmoe_datatype{2, 32, 1}
                  : dtype < 0       ? fmoe_datatype{0, (uint8_t)-dtype, 1}
                                    : fmoe_datatype{4, 16, 1};
        if (dtype > 0)
            fill<<<1024, 256>>>((uint16_t *)t.data, dtype == FMOE_F32 ? (float *)t.data : nullptr, n, scale, seed);
    }
    ~Tensor() { cudaFree(t.data); }
};

struct Layer {
    int64_t T, H, I, E, k;
    fmoe_plan plan = 0, route = 0;
    Tensor x, dout, out, dx, logits, ids, p, dp, w1, w2, dw1, dw2, b1, b2, db1, db2;
    bool oai;
    void *ws[2] = {}, *saved = nullptr;
    size_t ws_bytes[2] = {}, saved_bytes = 0;
    Layer(const Layer &) = delete;
    Layer(int shape, int64_t tokens, bool train, bool buffers = true, uint32_t flags = 0) : T(tokens)
    {
        H = shapes[shape].H, I = shapes[shape].I, E = shapes[shape].E, k = shapes[shape].k, oai = shapes[shape].oai;
        fmoe_desc d = {};
        d.size = sizeof d;
        d.op = FMOE_OP_EXPERTS;
        d.dtype = FMOE_BF16;
        d.device = {FMOE_CUDA, 0};
        d.H = H, d.I = I, d.E = E, d.k = k;
        d.flags = flags | (oai ? FMOE_BIAS | FMOE_INTERLEAVED : 0);
        if (oai) d.act = FMOE_ACT_SWIGLU_OAI;
        ok(fmoe_plan_create(&plan, &d));
        d.op = FMOE_OP_ROUTE, d.flags = 0, d.route.renormalize = 1;
        ok(fmoe_plan_create(&route, &d));
        for (int pass = 0; pass < 2; pass++) ok(fmoe_workspace_bytes(plan, (fmoe_pass)pass, T, &ws_bytes[pass]));
        ok(fmoe_saved_bytes(plan, T, &saved_bytes));
        if (!buffers) return;
        x.make(FMOE_BF16, {T, H}, 1, 1), out.make(FMOE_BF16, {T, H}, 1, 5);
        logits.make(FMOE_F32, {T, E}, 1, 9), ids.make(-32, {T, k}, 0, 0), p.make(FMOE_F32, {T, k}, 1, 0);
        w1.make(FMOE_BF16, {E, 2 * I, H}, 0.02f, 3), w2.make(FMOE_BF16, {E, H, I}, 0.02f, 4);
        CK(cudaMalloc(&ws[0], std::max(ws_bytes[0], ws_bytes[1]) + 256));
        ws[1] = ws[0];
        if (train) {
            CK(cudaMalloc(&saved, saved_bytes));
            dout.make(FMOE_BF16, {T, H}, 1, 2), dx.make(FMOE_BF16, {T, H}, 1, 6), dp.make(FMOE_F32, {T, k}, 1, 0);
            dw1.make(FMOE_BF16, {E, 2 * I, H}, 0.02f, 7), dw2.make(FMOE_BF16, {E, H, I}, 0.02f, 8);
        }
        if (oai) {
            b1.make(FMOE_BF16, {E, 2 * I}, 0.1f, 11), b2.make(FMOE_BF16, {E, H}, 0.1f, 12);
            if (train) db1.make(FMOE_BF16, {E, 2 * I}, 0.1f, 13), db2.make(FMOE_BF16, {E, H}, 0.1f, 14);
            for (Tensor *t : {&w1, &w2, &dw1, &dw2}) // the same shapes, stored the other way
                t->strides[1] = 1, t->strides[2] = t->shape[1];
        }
        choose();
        CK(cudaDeviceSynchronize());
    }
    ~Layer()
    {
        cudaFree(ws[0]), cudaFree(saved);
        fmoe_plan_destroy(&plan), fmoe_plan_destroy(&route);
    }
    fmoe_run run(int pass) const
    {
        fmoe_run r = {};
        r.size = sizeof r;
        r.workspace = ws[pass];
        r.workspace_bytes = ws_bytes[pass];
        r.stream = stream;
        return r;
    }
    void choose(int64_t offset = 0) // route: rows from `offset` of the logits
    {
        fmoe_route_args a = {};
        a.size = sizeof a;
        fmoe_tensor l = logits.t;
        l.byte_offset = (uint64_t)(offset * E * 4);
        a.logits = &l, a.ids = &ids.t, a.weights = &p.t;
        const fmoe_run r = run(0);
        ok(fmoe_route_forward(route, &a, &r));
    }
    void forward() const
    {
        fmoe_experts_args a = {};
        a.size = sizeof a;
        a.x = &x.t, a.ids = &ids.t, a.weights = &p.t, a.w.w1 = &w1.t, a.w.w2 = &w2.t, a.out = &out.t;
        if (oai) a.w.b1 = &b1.t, a.w.b2 = &b2.t;
        a.saved = saved, a.saved_bytes = saved_bytes;
        const fmoe_run r = run(0);
        ok(fmoe_experts_forward(plan, &a, &r));
    }
    void backward() const
    {
        fmoe_experts_args a = {};
        a.size = sizeof a;
        a.x = &x.t, a.ids = &ids.t, a.weights = &p.t, a.w.w1 = &w1.t, a.w.w2 = &w2.t;
        a.saved = saved, a.saved_bytes = saved_bytes;
        a.dout = &dout.t, a.dx = &dx.t, a.dweights = &dp.t, a.dw.w1 = &dw1.t, a.dw.w2 = &dw2.t;
        if (oai) a.w.b1 = &b1.t, a.w.b2 = &b2.t, a.dw.b1 = &db1.t, a.dw.b2 = &db2.t;
        const fmoe_run r = run(1);
        ok(fmoe_experts_backward(plan, &a, &r));
    }
    double flop(int n) const { return 2.0 * (double)(T * k) * (double)H * (double)I * n; }
};

// ---- Dense: one matrix for all rows ----

struct Dense {
    typedef int (*Create)(void **);
    typedef int (*Set)(void *, cudaStream_t);
    typedef int (*SetWs)(void *, void *, size_t);
    typedef int (*Gemm)(void *, int, int, int, int, int, const void *, const void *, int, int, const void *, int, int,
                        const void *, void *, int, int, int, int);
    void *handle = nullptr, *ws = nullptr;
    Gemm gemm = nullptr;
    bool open()
    {
        const char *path = getenv("FMOE_BENCH_CUBLAS");
        void *lib = path ? dlopen(path, RTLD_NOW) : nullptr;
        if (!lib) return false;
        gemm = (Gemm)dlsym(lib, "cublasGemmEx");
        const Create create = (Create)dlsym(lib, "cublasCreate_v2");
        const Set set = (Set)dlsym(lib, "cublasSetStream_v2");
        const SetWs set_ws = (SetWs)dlsym(lib, "cublasSetWorkspace_v2");
        if (!gemm || !create || create(&handle) != 0) return false;
        set(handle, stream);
        CK(cudaMalloc(&ws, 64 << 20));
        return set_ws(handle, ws, 64 << 20) == 0;
    }
    // Row-major C[m,n] = op(A) op(B); ta: A is stored [k,m]; tb: B is stored [n,k].
    void mm(const void *a, bool ta, const void *b, bool tb, void *c, int64_t m, int64_t n, int64_t k) const
    {
        const float one = 1, zero = 0;
        const int bf16 = 14, f32 = 68 /* CUBLAS_COMPUTE_32F */;
        const int r = gemm(handle, tb, ta, (int)n, (int)m, (int)k, &one, b, bf16, (int)(tb ? k : n), a, bf16,
                           (int)(ta ? m : k), &zero, c, bf16, (int)n, f32, 99);
        if (r) printf("cublas %d\n", r), exit(1);
    }
};

static double median(std::vector<float> v)
{
    std::sort(v.begin(), v.end());
    return v.empty() ? 0 : v[v.size() / 2];
}

// Median milliseconds of a pass, from idle or sustained. Passes are enqueued back to back, an event between any two:
// the device never waits for the host, as it would not in a model. All that is timed from idle comes before anything
// sustained: a pause does not give the card back what a second at the power limit took.
static double time_pass(const std::function<void()> &pass, bool sustained)
{
    static constexpr int BATCH = 18, WARM = 3;
    cudaEvent_t event[BATCH + 1];
    for (cudaEvent_t &e : event) CK(cudaEventCreate(&e));
    std::vector<float> t;
    double elapsed = 0;
    CK(cudaDeviceSynchronize());
    if (!sustained) usleep(400000);
    do {
        CK(cudaEventRecord(event[0], stream));
        for (int i = 0; i < BATCH; i++) {
            pass();
            CK(cudaEventRecord(event[i + 1], stream));
        }
        CK(cudaStreamSynchronize(stream));
        for (int i = 0; i < BATCH; i++) {
            float ms;
            CK(cudaEventElapsedTime(&ms, event[i], event[i + 1]));
            elapsed += ms;
            if (sustained ? elapsed > 300 : i >= WARM) t.push_back(ms);
        }
    } while (sustained && elapsed < 1000);
    for (cudaEvent_t &e : event) CK(cudaEventDestroy(e));
    return median(t);
}

static int find_shape(const char *name, size_t n)
{
    for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++)
        if (strlen(shapes[i].name) == n && !strncmp(shapes[i].name, name, n)) return i;
    printf("no shape %s\n", name);
    exit(1);
}
static void parse(const char *arg, int *shape, int64_t *T)
{
    const char *colon = strchr(arg, ':');
    if (!colon) printf("SHAPE:T expected, not %s\n", arg), exit(1);
    *shape = find_shape(arg, (size_t)(colon - arg));
    *T = atoll(colon + 1);
}

static void bench_layer(const char *arg, const Dense &dense)
{
    int shape;
    int64_t T;
    parse(arg, &shape, &T);
    double ours[2][2], bare[2][2], lib[2][2] = {}; // [pass][regime]; bare: ids and weights given
    const char *words[2] = {"fwd", "fwd+bwd"};
    const int n[2] = {3, 9};
    Layer l(shape, T, true);
    const int64_t H = l.H, I = l.I, R = T * l.k;
    const double flop = 2.0 * (double)R * (double)H * (double)I;
    Tensor x, g, h, a, w1, w2, y;
    if (dense.handle) {
        x.make(FMOE_BF16, {R, H}, 1, 1), g.make(FMOE_BF16, {R, H}, 1, 2), h.make(FMOE_BF16, {R, 2 * I}, 1, 3),
            a.make(FMOE_BF16, {R, I}, 1, 4);
        w1.make(FMOE_BF16, {2 * I, H}, 0.02f, 5), w2.make(FMOE_BF16, {H, I}, 0.02f, 6),
            y.make(FMOE_BF16, {std::max(R, 2 * I), std::max(H, 2 * I)}, 1, 7);
    }
    auto fwd = [&] {
        dense.mm(x.t.data, false, w1.t.data, true, y.t.data, R, 2 * I, H);
        dense.mm(a.t.data, false, w2.t.data, true, y.t.data, R, H, I);
    };
    auto bwd = [&] {
        dense.mm(g.t.data, false, w2.t.data, false, y.t.data, R, I, H);
        dense.mm(h.t.data, false, w1.t.data, false, y.t.data, R, H, 2 * I);
        dense.mm(g.t.data, true, a.t.data, false, y.t.data, H, I, R);
        dense.mm(h.t.data, true, x.t.data, false, y.t.data, 2 * I, H, R);
    };
    for (int m = 0; m < 2; m++) {
        ours[0][m] = time_pass([&] { l.choose(), l.forward(); }, m);
        ours[1][m] = time_pass([&] { l.choose(), l.forward(), l.backward(); }, m);
        bare[0][m] = time_pass([&] { l.forward(); }, m);
        bare[1][m] = time_pass([&] { l.forward(), l.backward(); }, m);
        if (!dense.handle) continue;
        lib[0][m] = time_pass(fwd, m);
        lib[1][m] = time_pass([&] { fwd(), bwd(); }, m);
    }
    for (int i = 0; i < 2; i++) {
        printf("layer %-14s %-8s", arg, words[i]);
        for (int m = 0; m < 2; m++) {
            const double f = flop * n[i] * 1e-9;
            printf(" | %s ours %8.4f ms %6.1f TF/s (routed %6.1f)", m ? "sustained" : "from idle", ours[i][m],
                   f / ours[i][m], f / bare[i][m]);
            if (lib[i][m] > 0) printf(" dense %6.1f share %5.1f %%", f / lib[i][m], 100 * lib[i][m] / ours[i][m]);
        }
        printf("\n");
    }
    fflush(stdout);
}

// The layer alone, ids and weights given.
static void bench_given(const char *arg)
{
    int shape;
    int64_t T;
    parse(arg, &shape, &T);
    Layer l(shape, T, true);
    const double flop = 6.0 * (double)(T * l.k) * (double)l.H * (double)l.I * 1e-9;
    printf("given %-14s", arg);
    for (int i = 0; i < 2; i++) {
        const std::function<void()> pass =
            i ? std::function<void()>([&] { l.forward(), l.backward(); }) : std::function<void()>([&] { l.forward(); });
        const double idle = time_pass(pass, false), held = time_pass(pass, true);
        printf(" | %s from idle %6.1f sustained %6.1f TF/s", i ? "fwd+bwd" : "fwd", flop * (i ? 3 : 1) / idle,
               flop * (i ? 3 : 1) / held);
    }
    printf("\n");
    fflush(stdout);
}

static void bench_gmm(const char *arg)
{
    int shape;
    int64_t T;
    parse(arg, &shape, &T);
    const int64_t H = shapes[shape].H, N = 2 * shapes[shape].I, E = shapes[shape].E, R = T * shapes[shape].k;
    fmoe_desc d = {};
    d.size = sizeof d;
    d.op = FMOE_OP_GROUPED_MATMUL, d.dtype = FMOE_BF16, d.device = {FMOE_CUDA, 0};
    d.E = E, d.K = H, d.N = N;
    fmoe_plan plan;
    ok(fmoe_plan_create(&plan, &d));
    Tensor x, dy, y, dx, w, dw, sizes;
    x.make(FMOE_BF16, {R, H}, 1, 1), dy.make(FMOE_BF16, {R, N}, 1, 2), y.make(FMOE_BF16, {R, N}, 1, 3),
        dx.make(FMOE_BF16, {R, H}, 1, 4);
    w.make(FMOE_BF16, {E, N, H}, 0.02f, 5), dw.make(FMOE_BF16, {E, N, H}, 0.02f, 6), sizes.make(-32, {E}, 0, 0);
    for (Tensor *t : {&w, &dw})
        std::swap(t->shape[1], t->shape[2]),
            std::swap(t->strides[1], t->strides[2]); // [E,K,N], stored as in Hugging Face
    std::vector<int32_t> n((size_t)E);
    srand(1);
    for (int64_t r = 0; r < R; r++) n[(size_t)(rand() % E)]++;
    CK(cudaMemcpy(sizes.t.data, n.data(), n.size() * 4, cudaMemcpyHostToDevice));
    size_t bytes[2];
    for (int pass = 0; pass < 2; pass++) ok(fmoe_workspace_bytes(plan, (fmoe_pass)pass, R, &bytes[pass]));
    fmoe_run run = {};
    run.size = sizeof run;
    run.workspace_bytes = std::max(bytes[0], bytes[1]);
    run.stream = stream;
    CK(cudaMalloc(&run.workspace, run.workspace_bytes + 256));
    const char *words[3] = {"forward", "dx", "dw"};
    double ms[3][2];
    for (int m = 0; m < 2; m++)
        for (int what = 0; what < 3; what++) {
            fmoe_gmm_args a = {};
            a.size = sizeof a;
            a.x = &x.t, a.w = &w.t, a.sizes = &sizes.t;
            if (what == 0) a.y = &y.t;
            else a.dy = &dy.t;
            if (what == 1) a.dx = &dx.t;
            if (what == 2) a.dw = &dw.t;
            ms[what][m] = time_pass(
                [&] {
                    ok(what ? fmoe_grouped_matmul_backward(plan, &a, &run)
                            : fmoe_grouped_matmul_forward(plan, &a, &run));
                },
                m);
        }
    const double f = 2.0 * (double)R * (double)H * (double)N * 1e-9;
    for (int i = 0; i < 3; i++)
        printf("gmm %-14s %-8s | from idle %8.4f ms %6.1f TF/s | sustained %8.4f ms %6.1f TF/s\n", arg, words[i],
               ms[i][0], f / ms[i][0], ms[i][1], f / ms[i][1]);
    fflush(stdout);
    cudaFree(run.workspace);
    ok(fmoe_plan_destroy(&plan));
}

// Bytes a second of a large device-to-device copy, read and written ones counted: the median of 15.
static double copy_bandwidth()
{
    const size_t n = (size_t)2 << 30;
    void *from, *to;
    CK(cudaMalloc(&from, n));
    CK(cudaMalloc(&to, n));
    fill<<<1024, 256>>>((uint16_t *)from, nullptr, n / 2, 1, 1);
    const double ms = time_pass([&] { CK(cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToDevice, stream)); }, false);
    cudaFree(from), cudaFree(to);
    return 2 * (double)n / (ms * 1e-3);
}

static void bench_decode(int shape, int64_t T, double bandwidth)
{
    Layer l(shape, T, false);
    const int rounds = 16;
    Tensor many;
    many.make(FMOE_F32, {rounds * T, l.E}, 1, 77);
    std::swap(many.t.data, l.logits.t.data);
    auto one = [&](int r) { l.choose(r * T), l.forward(); };
    for (int r = 0; r < rounds; r++) one(r);
    CK(cudaStreamSynchronize(stream));
    // Experts that are hit, for the bytes that must be read.
    double hit = 0;
    std::vector<int32_t> ids((size_t)(T * l.k));
    for (int r = 0; r < rounds; r++) {
        l.choose(r * T);
        CK(cudaStreamSynchronize(stream));
        CK(cudaMemcpy(ids.data(), l.ids.t.data, ids.size() * 4, cudaMemcpyDeviceToHost));
        std::sort(ids.begin(), ids.end());
        hit += (double)(std::unique(ids.begin(), ids.end()) - ids.begin());
    }
    hit /= rounds;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int r = 0; r < rounds; r++) one(r);
    CK(cudaStreamEndCapture(stream, &graph));
    CK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t a, b;
    CK(cudaEventCreate(&a));
    CK(cudaEventCreate(&b));
    std::vector<float> t;
    for (int i = 0; i < 25; i++) {
        CK(cudaEventRecord(a, stream));
        CK(cudaGraphLaunch(exec, stream));
        CK(cudaEventRecord(b, stream));
        CK(cudaStreamSynchronize(stream));
        float ms;
        CK(cudaEventElapsedTime(&ms, a, b));
        if (i >= 5) t.push_back(ms / rounds);
    }
    const double us = median(t) * 1000, bytes = hit * 3 * (double)(l.H * l.I) * 2;
    const double read = bytes / bandwidth * 1e6;
    printf("decode %s T %lld: %.2f us a layer, routing included; %.1f experts hit, %.1f MB of weights, %.2f TB/s; at "
           "%.2f TB/s they take %.1f us: %.2fx\n",
           shapes[shape].name, (long long)T, us, hit, bytes * 1e-6, bytes / us * 1e-6, bandwidth * 1e-12, read,
           us / read);
    fflush(stdout);
    CK(cudaGraphExecDestroy(exec));
    CK(cudaGraphDestroy(graph));
}

int main(int argc, char **argv)
{
    if (argc < 4) {
        printf("usage: cuda_bench LIBRARY layer|given|decode|gmm|once|memory SHAPE...\n");
        return 2;
    }
    setenv("FMOE_CUDA_LIBRARY", argv[1], 1);
    CK(cudaStreamCreate(&stream));
    const std::string mode = argv[2];
    if (mode == "layer") {
        Dense dense;
        if (!dense.open()) printf("no dense figures: FMOE_BENCH_CUBLAS does not name a usable libcublas\n");
        for (int i = 3; i < argc; i++) bench_layer(argv[i], dense);
    } else if (mode == "decode") {
        const double bandwidth = copy_bandwidth();
        for (int i = 4; i < argc; i++) bench_decode(find_shape(argv[3], strlen(argv[3])), atoll(argv[i]), bandwidth);
    } else if (mode == "given") {
        for (int i = 3; i < argc; i++) bench_given(argv[i]);
    } else if (mode == "gmm") {
        for (int i = 3; i < argc; i++) bench_gmm(argv[i]);
    } else if (mode == "once") {
        int shape;
        int64_t T;
        parse(argv[3], &shape, &T);
        Layer l(shape, T, true);
        l.forward();
        l.backward();
        CK(cudaDeviceSynchronize());
    } else {
        for (int i = 3; i < argc; i++) {
            int shape;
            int64_t T;
            parse(argv[i], &shape, &T);
            for (uint32_t flags : {0u, (uint32_t)FMOE_RECOMPUTE}) {
                Layer l(shape, T, true, false, flags);
                const double M = 1 << 20, act = (double)(T * l.H) * 2 / M, saved = (double)l.saved_bytes / M;
                printf("memory %s%s: kept %.1f MiB (x %.1f + saved %.1f), workspace forward %.1f, backward %.1f, peak "
                       "over weights and gradients %.1f MiB\n",
                       argv[i], flags ? " recompute" : "", act + saved, act, saved, (double)l.ws_bytes[0] / M,
                       (double)l.ws_bytes[1] / M, 4 * act + saved + (double)std::max(l.ws_bytes[0], l.ws_bytes[1]) / M);
            }
        }
    }
    return 0;
}
