// SPDX-License-Identifier: Apache-2.0
// check.cuh - what the CUDA checks share: random numbers, tensors in both memories, comparisons, the two backends.
#pragma once
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

extern "C" {
#include "backend.h"
#include "util.h"
}

#define CK(x)                                                                                                          \
    do {                                                                                                               \
        const cudaError_t e_ = (x);                                                                                    \
        if (e_ != cudaSuccess) {                                                                                       \
            printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_));                                 \
            exit(2);                                                                                                   \
        }                                                                                                              \
    } while (0)

extern uint64_t rng_state;
static inline uint64_t rng()
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 7;
    rng_state ^= rng_state << 17;
    return rng_state;
}
static inline int64_t pick(int64_t lo, int64_t hi) { return lo + (int64_t)((rng() >> 11) % (uint64_t)(hi - lo + 1)); }
static inline bool coin(int percent = 50) { return pick(0, 99) < percent; }
static inline double uniform() { return (double)(rng() >> 11) * (1.0 / 9007199254740992.0); }
static inline double normal() { return sqrt(-2 * log(uniform() + 1e-300)) * cos(6.283185307179586 * uniform()); }

// FMOE_CHECK_MOST: multiplications of one product of a case at most, for devices that are simulated (tests/cuda_sim).
// Cases that have more are not run, and counted.
extern int left_out;
static inline double most_products()
{
    static const char *const text = getenv("FMOE_CHECK_MOST");
    return text ? atof(text) : 1e300;
}
static inline bool too_large(int64_t rows, int64_t H, int64_t I)
{
    const bool is = (double)rows * (double)H * (double)I > most_products();
    left_out += is;
    return is;
}

// ---- Device memory: one arena, emptied for every case; every buffer lies between guards ----

struct Arena {
    char *base = nullptr;
    size_t size = 0, used = 0;
    struct Block {
        size_t at, bytes;
    };
    std::vector<Block> blocks;
    static constexpr size_t kGuard = 256;          // bytes, of its own for either side of every buffer
    static constexpr unsigned char kPoison = 0xff; // NaN in every dtype, -1 in every int
    void open(size_t bytes)
    {
        size = bytes;
        CK(cudaMalloc(&base, bytes));
    }
    void reset()
    {
        used = 0;
        blocks.clear();
        CK(cudaMemset(base, kPoison, size < (64u << 20) ? size : (64u << 20)));
    }
    void *take(size_t bytes, size_t shift = 0)
    {
        used = (used + kGuard + 255) / 256 * 256 + shift;
        if (used + bytes + 2 * kGuard > size) {
            printf("arena too small\n");
            exit(2);
        }
        void *p = base + used;
        CK(cudaMemset(base + used - kGuard, kPoison, bytes + 2 * kGuard));
        blocks.push_back({used, bytes});
        used += bytes + kGuard;
        return p;
    }
    // Where the memory before or after a buffer was written to, in words; nothing: nowhere.
    std::string broken() const
    {
        unsigned char g[kGuard];
        for (size_t i = 0; i < blocks.size(); i++)
            for (int after = 0; after < 2; after++) {
                const size_t at = after ? blocks[i].at + blocks[i].bytes : blocks[i].at - kGuard;
                CK(cudaMemcpy(g, base + at, kGuard, cudaMemcpyDeviceToHost));
                for (size_t j = 0; j < kGuard; j++)
                    if (g[j] != kPoison)
                        return "buffer " + std::to_string(i) + " of " + std::to_string(blocks[i].bytes) +
                               " bytes, byte " +
                               (after ? std::to_string(j) + " after its end"
                                      : std::to_string(kGuard - j) + " before it");
            }
        return "";
    }
};
extern Arena arena;

// ---- A tensor: doubles on the host for the reference, the same numbers in its dtype on the device ----

static inline double round_to(double v, int dtype)
{
    if (dtype == FMOE_F32) return (float)v;
    if (dtype == FMOE_BF16) return fmoe_bf16_to_float(fmoe_float_to_bf16((float)v));
    return fmoe_f16_to_float(fmoe_float_to_f16((float)v));
}

struct Tensor {
    int dtype = FMOE_F32;                // or -32, -64
    std::vector<int64_t> shape, strides; // strides on the device; the reference's are the same
    std::vector<double> ref;             // span of the strides
    std::vector<int64_t> ints;
    void *dev = nullptr;
    fmoe_tensor ref_t = {}, dev_t = {};
    int64_t span = 0;

    int64_t size(int i) const { return shape[(size_t)i]; }
    size_t bytes() const { return (size_t)span * fmoe_dtype_size(dtype); }
    // order: dimensions from slowest to fastest; pad: extra elements at the end of each row of the fastest
    void init(int type, std::vector<int64_t> dims, std::vector<int> order = {}, int64_t pad = 0, size_t shift = 0)
    {
        dtype = type;
        shape = dims;
        strides.assign(dims.size(), 1);
        if (order.empty())
            for (size_t i = 0; i < dims.size(); i++) order.push_back((int)i);
        int64_t s = 1;
        for (size_t i = dims.size(); i-- > 0;) {
            strides[(size_t)order[i]] = s;
            s *= dims[(size_t)order[i]];
            if (i == dims.size() - 1 && dims.size() > 1) s += pad;
        }
        span = s;
        for (int64_t d : dims)
            if (d == 0) span = 0;
        if (dtype > 0) ref.assign((size_t)span, NAN);
        else ints.assign((size_t)span, 0);
        dev = arena.take(bytes(), shift);
        describe();
    }
    void describe()
    {
        ref_t = {};
        ref_t.ndim = (int32_t)shape.size();
        ref_t.shape = shape.data();
        ref_t.strides = strides.data();
        dev_t = ref_t;
        ref_t.device = {FMOE_CPU, 0};
        dev_t.device = {FMOE_CUDA, 0};
        dev_t.data = dev;
        if (dtype > 0) {
            ref_t.data = ref.data();
            ref_t.dtype = {2, 64, 1};
            dev_t.dtype = dtype == FMOE_F32    ? fmoe_datatype{2, 32, 1}
                          : dtype == FMOE_BF16 ? fmoe_datatype{4, 16, 1}
                                               : fmoe_datatype{2, 16, 1};
        } else {
            ref_t.data = ints.data();
            ref_t.dtype = {0, 64, 1};
            dev_t.dtype = {0, (uint8_t)-dtype, 1};
        }
    }
    template <class F> void fill(F f)
    {
        for (auto &v : ref) v = round_to(f(), dtype);
    }
    void upload() const
    {
        std::vector<char> raw(bytes());
        for (int64_t i = 0; i < span; i++) {
            if (dtype == FMOE_F32) ((float *)raw.data())[i] = (float)ref[(size_t)i];
            else if (dtype == FMOE_BF16) ((uint16_t *)raw.data())[i] = fmoe_float_to_bf16((float)ref[(size_t)i]);
            else if (dtype == FMOE_F16) ((uint16_t *)raw.data())[i] = fmoe_float_to_f16((float)ref[(size_t)i]);
            else if (dtype == -32) ((int32_t *)raw.data())[i] = (int32_t)ints[(size_t)i];
            else ((int64_t *)raw.data())[i] = ints[(size_t)i];
        }
        if (span) CK(cudaMemcpy(dev, raw.data(), raw.size(), cudaMemcpyHostToDevice));
    }
    void poison() const
    {
        if (span) CK(cudaMemset(dev, Arena::kPoison, bytes()));
    }
    std::vector<char> raw() const
    {
        std::vector<char> r(bytes());
        if (span) CK(cudaMemcpy(r.data(), dev, r.size(), cudaMemcpyDeviceToHost));
        return r;
    }
    std::vector<double> download() const
    {
        const std::vector<char> r = raw();
        std::vector<double> v((size_t)span);
        for (int64_t i = 0; i < span; i++) {
            if (dtype == FMOE_F32) v[(size_t)i] = ((const float *)r.data())[i];
            else if (dtype == FMOE_BF16) v[(size_t)i] = fmoe_bf16_to_float(((const uint16_t *)r.data())[i]);
            else if (dtype == FMOE_F16) v[(size_t)i] = fmoe_f16_to_float(((const uint16_t *)r.data())[i]);
            else if (dtype == -32) v[(size_t)i] = ((const int32_t *)r.data())[i];
            else v[(size_t)i] = (double)((const int64_t *)r.data())[i];
        }
        return v;
    }
    // Positions in memory of all elements.
    template <class F> void each(F f) const
    {
        if (span == 0) return;
        std::vector<int64_t> i(shape.size(), 0);
        for (;;) {
            int64_t at = 0;
            for (size_t d = 0; d < i.size(); d++) at += i[d] * strides[d];
            f(at);
            size_t d = i.size();
            while (d-- > 0) {
                if (++i[d] < shape[d]) break;
                i[d] = 0;
                if (d == 0) return;
            }
        }
    }
};

static inline double unit(int dtype) { return dtype == FMOE_F32 ? 0x1p-24 : dtype == FMOE_BF16 ? 0x1p-8 : 0x1p-11; }

// ---- Verdicts ----

extern int passed, failed, skipped;
extern std::string context;
static inline void verdict(bool ok, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline void verdict(bool ok, const char *format, ...)
{
    if (ok) {
        passed++;
        return;
    }
    failed++;
    va_list v;
    va_start(v, format);
    printf("FAILED %s: ", context.c_str());
    vprintf(format, v);
    printf("\n");
    fflush(stdout);
    va_end(v);
}

// At the end of a case: nothing but the buffers was written.
static inline void check_guards()
{
    const std::string where = arena.broken();
    verdict(where.empty(), "written outside: %s", where.c_str());
}

// Of what the reference has.
static inline double mean_square(const Tensor &t)
{
    double sum = 0;
    int64_t count = 0;
    t.each([&](int64_t i) { sum += t.ref[(size_t)i] * t.ref[(size_t)i], count++; });
    return count ? sum / (double)count : 0;
}

// Relative L2 error of the whole, and every element within `peak` roundings of the largest magnitude. `usual`: the
// magnitude an element has unless its sum cancels; where all of them are smaller, errors are measured by it.
static inline void compare(const char *name, const Tensor &t, double l2, double peak, double usual = 0)
{
    const std::vector<double> got = t.download();
    double e2 = 0, r2 = 0, worst = 0, top = 0;
    int64_t count = 0;
    bool finite = true;
    t.each([&](int64_t i) {
        const double d = got[(size_t)i] - t.ref[(size_t)i];
        finite &= std::isfinite(got[(size_t)i]);
        count++;
        e2 += d * d;
        r2 += t.ref[(size_t)i] * t.ref[(size_t)i];
        worst = std::fmax(worst, std::fabs(d));
        top = std::fmax(top, std::fabs(t.ref[(size_t)i]));
    });
    r2 = std::fmax(r2, (double)count * usual * usual), top = std::fmax(top, usual);
    const double rel = r2 > 0 ? sqrt(e2 / r2) : sqrt(e2);
    static const bool aloud = getenv("CHECK_ERRORS") != nullptr;
    if (aloud) printf("error %s: %s %.3e\n", context.c_str(), name, rel);
    verdict(finite && rel <= l2 && worst <= peak * top + 1e-30,
            "%s: relative L2 %.3e (bound %.3e), worst %.3e of %.3e (bound %.3e)%s", name, rel, l2, worst, top,
            peak * top, finite ? "" : ", NOT FINITE");
}

static inline void compare_ints(const char *name, const Tensor &t)
{
    const std::vector<double> got = t.download();
    int64_t bad = 0, first = -1;
    t.each([&](int64_t i) {
        if (got[(size_t)i] != (double)t.ints[(size_t)i]) {
            if (first < 0) first = i;
            bad++;
        }
    });
    verdict(bad == 0, "%s: %lld differ, first at %lld: %.0f, expected %lld", name, (long long)bad, (long long)first,
            first < 0 ? 0. : got[(size_t)first], first < 0 ? 0ll : (long long)t.ints[(size_t)first]);
}

// ---- The two backends, through their tables ----

extern const fmoe_backend *cuda_backend;

struct Pair {
    fmoe_plan_impl ref = {}, dev = {};
    bool ok = false;
    Pair(const Pair &) = delete;
    explicit Pair(const fmoe_desc &desc)
    {
        ref.d = desc;
        if (ref.d.act_alpha == 0) ref.d.act_alpha = 1.702f;
        if (ref.d.act_limit == 0) ref.d.act_limit = 7;
        if (ref.d.route.scale == 0) ref.d.route.scale = 1;
        ref.gated = desc.act < FMOE_ACT_SILU;
        ref.h_cols = ref.gated ? 2 * desc.I : desc.I;
        dev = ref;
        ref.d.dtype = FMOE_F64;
        ref.d.device = {FMOE_CPU, 0};
        dev.d.device = {FMOE_CUDA, 0};
        ref.backend = &fmoe_backend_reference;
        dev.backend = cuda_backend;
        ref.backend->plan_init(&ref);
        const fmoe_status s = dev.backend->plan_init(&dev);
        ok = s == FMOE_OK;
        verdict(ok, "plan: status %d", (int)s);
    }
    ~Pair()
    {
        if (ok) dev.backend->plan_fini(&dev);
        ref.backend->plan_fini(&ref);
    }
    // Workspace and saved state for both.
    std::vector<char> ref_ws, ref_saved;
    void *dev_saved = nullptr;
    size_t dev_saved_bytes = 0;
    fmoe_run ref_run(fmoe_pass pass, int64_t T, uint32_t flags)
    {
        size_t ws = 0, saved = 0;
        ref.backend->bytes(&ref, pass, T, &ws, &saved);
        ref_ws.assign(ws + 64, 0);
        if (pass == FMOE_FORWARD) ref_saved.assign(saved + 64, 0);
        fmoe_run r = {};
        r.size = sizeof r;
        r.workspace = ref_ws.data();
        r.workspace_bytes = ws;
        r.flags = flags;
        return r;
    }
    fmoe_run dev_run(fmoe_pass pass, int64_t T, uint32_t flags, cudaStream_t stream = nullptr)
    {
        size_t ws = 0, saved = 0;
        verdict(dev.backend->bytes(&dev, pass, T, &ws, &saved) == FMOE_OK, "bytes");
        if (pass == FMOE_FORWARD && saved) {
            dev_saved = arena.take(saved);
            dev_saved_bytes = saved;
        }
        fmoe_run r = {};
        r.size = sizeof r;
        r.workspace = ws ? arena.take(ws) : nullptr;
        r.workspace_bytes = ws;
        r.stream = stream;
        r.flags = flags;
        return r;
    }
};

void check_route();
void check_permute();
void check_gmm();
void check_activation();
void check_experts(int cases);
void check_batch();
void check_special();
void check_quant(int cases);
void check_inside(int cases); // sm90/coded
void check_gmm_quant(int cases);
void check_big();
