// SPDX-License-Identifier: Apache-2.0
// check_batch.cu - same bits for any batch: tokens alone and with others, at any place, through the kernels of few and
// of many tokens, have the same out, dx and gradients of their routing weights as in one large batch.
#include "check.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

struct BatchLayer {
    const char *name;
    int64_t H, I, E, k;
    int act;
    uint32_t flags;
    bool transposed, list; // weights [in,out]; a list of matrices
    int64_t rank;
    int64_t pool; // tokens of the large batch
};

// ---- Memory of a layer, on the device alone: models' sizes are too large for doubles ----

struct Pool {
    std::vector<void *> all;
    ~Pool()
    {
        for (void *p : all) cudaFree(p);
    }
    void *take(size_t bytes)
    {
        void *p;
        CK(cudaMalloc(&p, bytes + 256));
        CK(cudaMemset(p, 0xff, bytes + 256));
        all.push_back(p);
        return p;
    }
};

static __global__ void draw_values(void *p, int64_t n, int dtype, float scale, float shift, uint64_t seed)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t z = (seed + (uint64_t)i) * 0x9e3779b97f4a7c15ull;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        z ^= z >> 31;
        // The sum of four is near enough to a normal distribution.
        const float four =
            (float)(z & 0xffff) + (float)(z >> 16 & 0xffff) + (float)(z >> 32 & 0xffff) + (float)(z >> 48);
        const float v = scale * (four / 65536.f - 2.f) + shift;
        if (dtype == FMOE_F32) ((float *)p)[i] = v;
        else if (dtype == FMOE_BF16) ((__nv_bfloat16 *)p)[i] = __float2bfloat16(v);
        else ((__half *)p)[i] = __float2half(v);
    }
}

// Rows of n half words; `swap`: with the first and the last 16 exchanged.
static __global__ void take_rows(uint16_t *to, const uint16_t *from, const int64_t *row, int64_t rows, int64_t n,
                                 bool swap)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < rows * n;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t r = i / n, c = i % n, other = c < 16 ? n - 16 + c : c >= n - 16 ? c - (n - 16) : c;
        to[i] = from[(row ? row[r] : r) * n + (swap ? other : c)];
    }
}

// A tensor with room for its shape.
struct View {
    int64_t shape[3], strides[3];
    fmoe_tensor t = {};
    void set(void *p, int type, std::initializer_list<int64_t> dims, bool transposed = false)
    {
        const int n = (int)dims.size();
        int64_t s = 1;
        std::copy(dims.begin(), dims.end(), shape);
        for (int i = n - 1; i >= 0; i--) strides[i] = s, s *= shape[i];
        if (transposed) strides[n - 1] = shape[n - 2], strides[n - 2] = 1;
        t.data = p;
        t.ndim = n;
        t.shape = shape;
        t.strides = strides;
        t.device = {FMOE_CUDA, 0};
        t.dtype = type == -64         ? fmoe_datatype{0, 64, 1}
                  : type == FMOE_F32  ? fmoe_datatype{2, 32, 1}
                  : type == FMOE_BF16 ? fmoe_datatype{4, 16, 1}
                                      : fmoe_datatype{2, 16, 1};
    }
};

struct BatchCase {
    const BatchLayer &c;
    const int dtype;
    Pool pool;
    Pair p;
    fmoe_weights w = {};
    View w1, w2, b1, b2, lora[4];
    std::deque<View> parts;
    std::vector<fmoe_tensor> lists[3];
    uint16_t *first = nullptr;                                            // W1
    int64_t words() const { return (int64_t)fmoe_dtype_size(dtype) / 2; } // half words of an element

    static fmoe_desc desc(const BatchLayer &c, int dtype)
    {
        fmoe_desc d = {};
        d.size = sizeof d;
        d.op = FMOE_OP_EXPERTS;
        d.dtype = dtype;
        d.H = c.H, d.I = c.I, d.E = c.E, d.k = c.k;
        d.act = c.act;
        d.flags = c.flags | FMOE_SAME_BITS;
        d.rank1 = d.rank2 = c.rank;
        return d;
    }
    void *values(int64_t n, float scale, int type, float shift = 0)
    {
        void *const q = pool.take((size_t)n * fmoe_dtype_size(type));
        draw_values<<<1024, 256>>>(q, n, type, scale, shift, rng());
        return q;
    }
    BatchCase(const BatchLayer &layer, int type) : c(layer), dtype(type), p(desc(layer, type))
    {
        const int64_t HC = p.ref.h_cols;
        const float s1 = 2 / sqrtf((float)c.H), s2 = 2 / sqrtf((float)c.I);
        if (!c.list) {
            first = (uint16_t *)values(c.E * HC * c.H, s1, type);
            w1.set(first, type, {c.E, HC, c.H}, c.transposed);
            w2.set(values(c.E * c.H * c.I, s2, type), type, {c.E, c.H, c.I}, c.transposed);
            w.w1 = &w1.t, w.w2 = &w2.t;
        } else {
            for (int64_t e = 0; e < c.E; e++)
                for (int i = 0; i < 3; i++) {
                    if (i == 0 && !p.ref.gated) continue;
                    parts.emplace_back();
                    parts.back().set(values(c.I * c.H, i < 2 ? s1 : s2, type), type,
                                     {i < 2 ? c.I : c.H, i < 2 ? c.H : c.I});
                    lists[i].push_back(parts.back().t);
                }
            if (p.ref.gated) w.gate = lists[0].data();
            w.up = lists[1].data(), w.down = lists[2].data();
        }
        if (c.flags & FMOE_BIAS) {
            b1.set(values(c.E * HC, 0.3f, type), type, {c.E, HC});
            b2.set(values(c.E * c.H, 0.3f, type), type, {c.E, c.H});
            w.b1 = &b1.t, w.b2 = &b2.t;
        }
        if (c.rank) {
            const int64_t rows[4] = {c.rank, HC, c.rank, c.H}, cols[4] = {c.H, c.rank, c.I, c.rank};
            // Factors lie as the weights do.
            for (int i = 0; i < 4; i++)
                lora[i].set(values(c.E * rows[i] * cols[i], 2 / sqrtf((float)cols[i]), type), type,
                            {c.E, rows[i], cols[i]}, c.transposed);
            w.lora_a1 = &lora[0].t, w.lora_b1 = &lora[1].t, w.lora_a2 = &lora[2].t, w.lora_b2 = &lora[3].t;
            w.lora_scale1 = 0.7f, w.lora_scale2 = 1.3f;
        }
    }
};

struct Results {
    std::vector<char> inference, out, dx, dp;
};

static std::vector<char> bytes_of(const void *p, size_t n)
{
    std::vector<char> v(n);
    CK(cudaMemcpy(v.data(), p, n, cudaMemcpyDeviceToHost));
    return v;
}

// The layer on T tokens: without anything saved, and with its backward.
static Results run_layer(BatchCase &b, int64_t T, void *x, void *ids, void *pr, void *dout, bool backward)
{
    const BatchLayer &c = b.c;
    Pool memory;
    View vx, vi, vp, vo, vd, vdx, vdp;
    const size_t rows = (size_t)(T * c.H * b.words()) * 2, slots = (size_t)(T * c.k) * 4;
    void *const out = memory.take(rows), *const dx = memory.take(rows), *const dp = memory.take(slots);
    vx.set(x, b.dtype, {T, c.H}), vi.set(ids, -64, {T, c.k}), vp.set(pr, FMOE_F32, {T, c.k});
    vo.set(out, b.dtype, {T, c.H}), vd.set(dout, b.dtype, {T, c.H}), vdx.set(dx, b.dtype, {T, c.H});
    vdp.set(dp, FMOE_F32, {T, c.k});
    fmoe_experts_args a = {};
    a.size = sizeof a;
    a.x = &vx.t, a.ids = &vi.t, a.weights = &vp.t, a.out = &vo.t;
    a.w = b.w;
    Results r;
    const auto pass = [&](int which, const char *name) {
        size_t ws = 0, saved = 0;
        verdict(b.p.dev.backend->bytes(&b.p.dev, which ? FMOE_BACKWARD : FMOE_FORWARD, T, &ws, &saved) == FMOE_OK,
                "bytes");
        fmoe_run run = {};
        run.size = sizeof run;
        run.workspace = memory.take(ws);
        run.workspace_bytes = ws;
        verdict(b.p.dev.backend->experts[which](&b.p.dev, &a, &run) == FMOE_OK, "%s", name);
        CK(cudaDeviceSynchronize());
        return saved;
    };
    const size_t saved = pass(0, "inference");
    r.inference = bytes_of(out, rows);
    if (!backward) return r;
    a.saved = memory.take(saved), a.saved_bytes = saved;
    CK(cudaMemset(out, 0xff, rows));
    pass(0, "forward");
    r.out = bytes_of(out, rows);
    a.out = nullptr;
    a.dout = &vd.t, a.dx = &vdx.t, a.dweights = &vdp.t;
    pass(1, "backward");
    r.dx = bytes_of(dx, rows), r.dp = bytes_of(dp, slots);
    return r;
}

static int64_t differing(const std::vector<char> &got, const std::vector<char> &want, const std::vector<int64_t> &row)
{
    const size_t n = row.empty() ? 0 : got.size() / row.size();
    int64_t bad = 0;
    for (size_t i = 0; i < row.size(); i++) bad += memcmp(&got[i * n], &want[(size_t)row[i] * n], n) != 0;
    return bad;
}

static void run_batches(const BatchLayer &c, int dtype)
{
    context = std::string("batch ") + c.name + (dtype == FMOE_F16 ? " f16" : dtype == FMOE_F32 ? " f32" : "");
    const double fit = most_products() / (double)(c.k * c.H * c.I);
    const int64_t N = fit < (double)c.pool ? (int64_t)fit : c.pool;
    if (N < 33) {
        left_out++;
        return;
    }
    BatchCase b(c, dtype);
    if (!b.p.ok) return;
    void *const x = b.values(N * c.H, 1, dtype), *const dout = b.values(N * c.H, 1, dtype),
                *const pr = b.values(N * c.k, 0.2f, FMOE_F32, 0.5f);
    std::vector<int64_t> ids((size_t)(N * c.k));
    for (int64_t t = 0; t < N; t++)
        for (int64_t j = 0; j < c.k; j++) {
            int64_t e = pick(0, c.E - 1);
            for (int64_t i = 0; i < j; i++) // distinct, as a router's are
                if (ids[(size_t)(t * c.k + i)] == e) e = (e + 1) % c.E, i = -1;
            ids[(size_t)(t * c.k + j)] = e;
        }
    void *const ids_dev = b.pool.take(ids.size() * 8);
    CK(cudaMemcpy(ids_dev, ids.data(), ids.size() * 8, cudaMemcpyHostToDevice));
    const Results all = run_layer(b, N, x, ids_dev, pr, dout, true);
    std::vector<int64_t> every((size_t)N);
    for (int64_t i = 0; i < N; i++) every[(size_t)i] = i;
    verdict(differing(all.inference, all.out, every) == 0, "inference and forward of %lld tokens", (long long)N);

    Pool some;
    const int64_t most = fmoe_min(N, 2048), line = c.H * b.words();
    int64_t *const rows_dev = (int64_t *)some.take((size_t)most * 8);
    uint16_t *const xs = (uint16_t *)some.take((size_t)(most * line) * 2),
                    *const ds = (uint16_t *)some.take((size_t)(most * line) * 2),
                    *const is = (uint16_t *)some.take((size_t)(most * c.k) * 8),
                    *const ps = (uint16_t *)some.take((size_t)(most * c.k) * 4);
    std::vector<int64_t> row;
    for (int64_t T : {1, 1, 1, 2, 4, 8, 16, 17, 32, 64, 256, 2048}) {
        if (T > most) continue;
        // Any tokens in any order; those after the first are its neighbours.
        row.resize((size_t)T);
        for (int64_t &r : row) r = pick(0, N - 1);
        CK(cudaMemcpy(rows_dev, row.data(), row.size() * 8, cudaMemcpyHostToDevice));
        take_rows<<<256, 256>>>(xs, (const uint16_t *)x, rows_dev, T, line, false);
        take_rows<<<256, 256>>>(ds, (const uint16_t *)dout, rows_dev, T, line, false);
        take_rows<<<256, 256>>>(is, (const uint16_t *)ids_dev, rows_dev, T, c.k * 4, false);
        take_rows<<<256, 256>>>(ps, (const uint16_t *)pr, rows_dev, T, c.k * 2, false);
        const Results r = run_layer(b, T, xs, is, ps, ds, true);
        const int64_t bad[4] = {differing(r.inference, all.out, row), differing(r.out, all.out, row),
                                differing(r.dx, all.dx, row), differing(r.dp, all.dp, row)};
        verdict(!bad[0] && !bad[1] && !bad[2] && !bad[3],
                "rows of T = %lld that differ: inference %lld, forward %lld, dx %lld, dp %lld", (long long)T,
                (long long)bad[0], (long long)bad[1], (long long)bad[2], (long long)bad[3]);
    }
    // The control: the same sums in another order of k must not pass. Of few terms they may: both round to the same
    // bits.
    if (c.list || c.transposed || c.rank || c.H < 512 || N < 64) return;
    const int64_t T = 64;
    std::vector<int64_t> ahead(every.begin(), every.begin() + T);
    take_rows<<<256, 256>>>(xs, (const uint16_t *)x, nullptr, T, line, true);
    const int64_t lines = c.E * b.p.ref.h_cols;
    uint16_t *const turned = (uint16_t *)some.take((size_t)(lines * line) * 2);
    take_rows<<<1024, 256>>>(turned, b.first, nullptr, lines, line, true);
    b.w1.t.data = turned;
    verdict(differing(run_layer(b, T, xs, ids_dev, pr, dout, false).inference, all.out, ahead) > 0,
            "the control, another order of k, has the same bits");
}

void check_batch()
{
    const uint32_t pairs = FMOE_INTERLEAVED, bias = FMOE_BIAS;
    const BatchLayer layers[] = {
        // Models' own sizes, fewer experts.
        {"Qwen3-30B-A3B", 2048, 768, 32, 8, FMOE_ACT_SWIGLU, 0, false, false, 0, 2304},
        {"Qwen3-30B-A3B LoRA 16", 2048, 768, 32, 8, FMOE_ACT_SWIGLU, 0, false, false, 16, 2304},
        {"Qwen3-30B-A3B [in,out]", 2048, 768, 32, 8, FMOE_ACT_SWIGLU, 0, true, false, 0, 2304},
        {"Mixtral", 4096, 14336, 4, 2, FMOE_ACT_SWIGLU, 0, false, false, 0, 600},
        {"gpt-oss-20b", 2880, 2880, 8, 4, FMOE_ACT_SWIGLU_OAI, pairs | bias, true, false, 0, 2304},
        {"gpt-oss-20b LoRA 16", 2880, 2880, 8, 4, FMOE_ACT_SWIGLU_OAI, pairs | bias, true, false, 16, 600},
        {"Nemotron 3 Nano", 2688, 1856, 16, 6, FMOE_ACT_RELU2, 0, false, false, 0, 600},
        // Every way that a product may take.
        {"lists", 512, 256, 24, 4, FMOE_ACT_SWIGLU, 0, false, true, 0, 2304},
        {"lists LoRA 24", 512, 256, 24, 4, FMOE_ACT_GEGLU, 0, false, true, 24, 700},
        {"LoRA 72", 576, 264, 16, 4, FMOE_ACT_SWIGLU, bias, false, false, 72, 700},
        {"LoRA 128", 512, 256, 16, 4, FMOE_ACT_SILU, 0, false, false, 128, 700},
        {"LoRA 5", 512, 256, 16, 4, FMOE_ACT_SWIGLU, 0, false, false, 5, 700},
        {"[in,out] LoRA 16", 512, 256, 16, 4, FMOE_ACT_SWIGLU, 0, true, false, 16, 2304},
        {"interleaved", 512, 264, 16, 4, FMOE_ACT_SWIGLU, pairs, false, false, 0, 2304},
        {"interleaved LoRA 16", 512, 256, 16, 4, FMOE_ACT_SWIGLU_CLAMP, pairs, false, false, 16, 2304},
        {"interleaved bias", 512, 264, 16, 4, FMOE_ACT_REGLU, pairs | bias, false, false, 0, 700},
        {"interleaved [in,out]", 512, 256, 8, 4, FMOE_ACT_SWIGLU, pairs, true, false, 0, 2304},
        {"interleaved [in,out] odd", 512, 264, 8, 4, FMOE_ACT_SWIGLU_OAI, pairs | bias, true, false, 0, 2304},
        {"interleaved [in,out] tanh", 512, 256, 8, 4, FMOE_ACT_GEGLU_TANH, pairs, true, false, 0, 2304},
        {"[in,out] bias", 512, 264, 16, 4, FMOE_ACT_GEGLU, bias, true, false, 0, 700},
        {"[in,out] not gated", 512, 264, 16, 4, FMOE_ACT_RELU2, bias, true, false, 0, 700},
        {"not gated", 520, 264, 16, 3, FMOE_ACT_GELU, bias, false, false, 0, 700},
        {"H of 8", 1032, 136, 16, 3, FMOE_ACT_GEGLU_TANH, 0, false, false, 8, 700},
        {"H of 8 [in,out]", 1032, 136, 16, 3, FMOE_ACT_SWIGLU_CLAMP_OUT, bias, true, false, 0, 700},
        {"one expert", 256, 128, 1, 1, FMOE_ACT_SWIGLU, 0, false, false, 0, 300},
        {"odd", 201, 77, 5, 3, FMOE_ACT_SWIGLU, 0, false, false, 0, 300},
    };
    for (const BatchLayer &l : layers) run_batches(l, FMOE_BF16);
    for (int i : {0, 2, 8, 16}) run_batches(layers[i], FMOE_F16);
    for (int i : {7, 9, 17, 25}) run_batches(layers[i], FMOE_F32);
    const BatchLayer large = {"16384 tokens", 1024, 512, 32, 8, FMOE_ACT_SWIGLU, 0, false, false, 0, 16384};
    run_batches(large, FMOE_BF16);
}
