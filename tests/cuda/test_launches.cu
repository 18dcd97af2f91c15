// SPDX-License-Identifier: Apache-2.0
// test_launches.cu - what the CUDA backend launches, without a GPU: order, grids, shared memory, clusters, and which
// launches may begin before the one before them has ended. A forgotten wait is a race that a run on a card may not
// show; here it is a line that differs.
//
//   test_launches FILE                      compares with FILE (launches.txt), which says what is expected
//   test_launches --write FILE              writes it
//   test_launches --draw SEED COUNT [SIZES] prints the launches of drawn layers, to compare two builds; SIZES: a line
//   for each kernel,
//                                           its mangled name and the sizes of its parameters, which are printed then
#include <cxxabi.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <sstream>
#include <vector>

#include "cuda/sm90/product.cuh"
#include "fake_tensors.h"
#include "record_runtime.h"

static std::string text; // all launches so far
static bool mangled;     // drawn layers: names as they are
static std::map<std::string, std::vector<size_t>> param_sizes;

static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *format, ...)
{
    char line[1000];
    va_list v;
    va_start(v, format);
    vsnprintf(line, sizeof line, format, v);
    va_end(v);
    text += line;
}

struct Launch {
    record_launch r;
    std::string note; // of its parameters, which are gone after the call
};
static std::vector<Launch> launches;

static void report(const record_launch *r)
{
    std::string note;
    const auto sizes = param_sizes.find(r->kernel);
    if (sizes != param_sizes.end()) {
        note = " params ";
        for (size_t i = 0; i < sizes->second.size(); i++)
            for (size_t j = 0; j < sizes->second[i]; j++) {
                char t[4];
                snprintf(t, sizeof t, "%02x", ((const unsigned char *)r->args[i])[j]);
                note += t;
            }
    }
    if (strstr(r->kernel, "_sm90_kernel")) {
        const Sm90Args &a = *(const Sm90Args *)r->args[0];
        note += a.begin == SM90_EARLY ? " EARLY" : " waits";
        if (a.lets_in_early) note += " lets-in-early";
    }
    launches.push_back({*r, note});
}

static std::string short_name(const std::string &kernel)
{
    int status = 0;
    char *plain = abi::__cxa_demangle(kernel.c_str(), nullptr, nullptr, &status);
    std::string s = plain ? plain : kernel;
    free(plain);
    const size_t open = s.rfind(">(") != std::string::npos ? s.rfind(">(") + 1 : s.find('(');
    if (open != std::string::npos) s.resize(open);
    if (s.compare(0, 5, "void ") == 0) s.erase(0, 5);
    static const char *const words[][2] = {{"__nv_bfloat16", "bf16"}, {"__half", "f16"}, {", ", ","}};
    for (const auto &w : words)
        for (size_t at; (at = s.find(w[0])) != std::string::npos;) s.replace(at, strlen(w[0]), w[1]);
    for (size_t at; (at = s.find("(")) != std::string::npos;) s.erase(at, s.find(')', at) + 1 - at); // casts to enums
    return s;
}

static void flush(const char *pass, fmoe_status status)
{
    say("%s%s\n", pass, status == FMOE_OK ? "" : " FAILED");
    for (const Launch &l : launches) {
        const record_launch &r = l.r;
        say("    %s grid %u", mangled ? r.kernel : short_name(r.kernel).c_str(), r.grid.x);
        if (r.grid.y > 1 || r.grid.z > 1) say("x%ux%u", r.grid.y, r.grid.z);
        say(" block %u", r.block.x);
        if (r.shared) say(" shared %zu", r.shared);
        if (r.cluster > 1) say(" cluster %u", r.cluster);
        text += (r.overlapped ? " overlapped" : "") + l.note + (r.plain ? " NOT BY launch()" : "") + "\n";
    }
    launches.clear();
}

static const fmoe_backend *backend;

struct Plan1 { // a plan, and the runs of its passes
    fmoe_plan_impl p = {};
    explicit Plan1(const fmoe_desc &d)
    {
        p.d = d;
        p.d.device = {FMOE_CUDA, 0};
        p.d.act_alpha = 1.702f, p.d.act_limit = 7;
        if (p.d.route.scale == 0) p.d.route.scale = 1;
        p.gated = d.act < FMOE_ACT_SILU;
        p.h_cols = p.gated ? 2 * d.I : d.I;
        if (backend->plan_init(&p) != FMOE_OK) say("plan FAILED\n");
    }
    Plan1(const Plan1 &) = delete;
    ~Plan1() { backend->plan_fini(&p); }
    fmoe_run run(fmoe_pass pass, int64_t T, uint32_t flags, void **saved = nullptr)
    {
        size_t workspace = 0, kept = 0;
        if (backend->bytes(&p, pass, T, &workspace, &kept) != FMOE_OK) say("bytes FAILED\n");
        fmoe_run r = {};
        r.size = sizeof r;
        r.workspace = (void *)take((int64_t)workspace, 0);
        r.workspace_bytes = workspace;
        r.flags = flags;
        if (saved) *saved = (void *)take((int64_t)kept, 0);
        return r;
    }
};

// ---- The layer ----

enum { DX = 1, DP = 2, DW1 = 4, DW2 = 8, ALL = 15 };
enum { A1 = 1, B1 = 2, A2 = 4, B2 = 8 };

struct Experts {
    int64_t T = 8192, H = 2048, I = 768, E = 128, k = 8;
    int dtype = FMOE_BF16, gtype = FMOE_BF16, act = FMOE_ACT_SWIGLU;
    uint32_t flags = 0, run_flags = 0;
    int grads = ALL, factors = ALL;        // those that are asked for
    bool nmajor1 = false, nmajor2 = false; // weights stored [in,out]
    bool turned_grads = false;             // gradients so
    bool list = false, list_grads = false;
    int scatter = 0; // lists: 0 equal distances, 1 anywhere, 2 strides of their own
    int64_t rank1 = 0, rank2 = 0, shift = 0;
    int turned_factors = 0;
    bool inference = false; // that alone
    int format = 0;         // of quantised weights (fake_tensors.h)
};

static uint64_t state = 1;
static int64_t pick(int64_t lo, int64_t hi)
{
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return lo + (int64_t)((state >> 11) % (uint64_t)(hi - lo + 1));
}
static bool coin(int percent = 50) { return pick(0, 99) < percent; }

static std::deque<std::vector<fmoe_tensor>> lists;
static const fmoe_tensor *matrices(const Experts &c, int dtype, int64_t rows, int64_t cols, bool turned)
{
    lists.emplace_back();
    for (int64_t e = 0; e < c.E; e++)
        lists.back().push_back(
            *tensor(dtype, {rows, cols}, turned, c.scatter > 1 ? 8 * (e % 3) : 0, c.scatter ? 16 * (e * 7 % 40) : 0));
    return lists.back().data();
}

static fmoe_weights weights(const Experts &c, bool gated, int dtype, bool list, bool turned1, bool turned2, int which)
{
    const int64_t HC = gated ? 2 * c.I : c.I;
    fmoe_weights w = {};
    if (list) {
        if (which & DW1 && gated) w.gate = matrices(c, dtype, c.I, c.H, turned1);
        if (which & DW1) w.up = matrices(c, dtype, c.I, c.H, turned1);
        if (which & DW2) w.down = matrices(c, dtype, c.H, c.I, turned2);
        return w;
    }
    if (which & DW1) w.w1 = tensor(dtype, {c.E, HC, c.H}, turned1, 0, c.shift);
    if (which & DW2) w.w2 = tensor(dtype, {c.E, c.H, c.I}, turned2);
    if (c.flags & FMOE_BIAS && which & DW1) w.b1 = tensor(dtype, {c.E, HC});
    if (c.flags & FMOE_BIAS && which & DW2) w.b2 = tensor(dtype, {c.E, c.H});
    return w;
}

static void factors(const Experts &c, bool gated, int dtype, int turned, int which, fmoe_weights &w)
{
    const int64_t HC = gated ? 2 * c.I : c.I;
    if (c.rank1 && which & A1) w.lora_a1 = tensor(dtype, {c.E, c.rank1, c.H}, turned & A1);
    if (c.rank1 && which & B1) w.lora_b1 = tensor(dtype, {c.E, HC, c.rank1}, turned & B1);
    if (c.rank2 && which & A2) w.lora_a2 = tensor(dtype, {c.E, c.rank2, c.I}, turned & A2);
    if (c.rank2 && which & B2) w.lora_b2 = tensor(dtype, {c.E, c.H, c.rank2}, turned & B2);
}

static void run_experts(const Experts &c)
{
    tensors.clear(), lists.clear(), fake_codes.clear();
    next_address = (uintptr_t)1 << 45;
    fmoe_desc d = {};
    d.size = sizeof d;
    d.op = FMOE_OP_EXPERTS;
    d.dtype = c.dtype, d.act = c.act, d.flags = c.flags | (c.format ? (uint32_t)FMOE_QUANT : 0);
    d.H = c.H, d.I = c.I, d.E = c.E, d.k = c.k, d.rank1 = c.rank1, d.rank2 = c.rank2;
    Plan1 plan(d);
    const bool gated = plan.p.gated;
    fmoe_experts_args a = {};
    a.size = sizeof a;
    a.x = tensor(c.dtype, {c.T, c.H});
    a.ids = tensor(-32, {c.T, c.k});
    a.weights = tensor(FMOE_F32, {c.T, c.k});
    a.w = weights(c, gated, c.dtype, c.list, c.nmajor1, c.nmajor2, DW1 | DW2);
    if (c.format) {
        const FakeCodes &first = coded(c.format, c.E, gated ? 2 * c.I : c.I, c.H),
                        &second = coded(c.format, c.E, c.H, c.I);
        a.w.w1 = first.codes, a.w.quant1 = &first.q, a.w.w2 = second.codes, a.w.quant2 = &second.q;
    }
    factors(c, gated, c.dtype, c.turned_factors, ALL, a.w);
    a.w.lora_scale1 = 2;
    a.out = tensor(c.dtype, {c.T, c.H});
    if (!c.inference) {
        fmoe_run r = plan.run(FMOE_FORWARD, c.T, c.run_flags, &a.saved);
        flush("  forward", backend->experts[0](&plan.p, &a, &r));
        fmoe_experts_args b = a;
        b.out = nullptr;
        b.dout = tensor(c.dtype, {c.T, c.H});
        if (c.grads & DX) b.dx = tensor(c.dtype, {c.T, c.H});
        if (c.grads & DP) b.dweights = tensor(FMOE_F32, {c.T, c.k});
        b.dw = weights(c, gated, c.gtype, c.list_grads, c.turned_grads, c.turned_grads, c.grads);
        factors(c, gated, c.gtype, c.turned_factors >> 1, c.factors, b.dw);
        r = plan.run(FMOE_BACKWARD, c.T, c.run_flags);
        flush("  backward", backend->experts[1](&plan.p, &b, &r));
    }
    if (!c.inference && !mangled) return;
    fmoe_run r = plan.run(FMOE_FORWARD, c.T, c.run_flags);
    a.saved = nullptr;
    flush("  inference", backend->experts[0](&plan.p, &a, &r));
}

// ---- Grouped matmul ----

struct Groups {
    int64_t E = 8, K = 512, N = 1024, R = 4096;
    int dtype = FMOE_BF16, wide = FMOE_BF16, gtype = FMOE_BF16;
    bool turned = false, bias = false, list = false, alike = true, sizes = true;
    uint32_t run_flags = 0;
};

static void run_gmm(const Groups &c)
{
    tensors.clear(), lists.clear();
    next_address = (uintptr_t)1 << 45;
    fmoe_desc d = {};
    d.size = sizeof d;
    d.op = FMOE_OP_GROUPED_MATMUL;
    d.dtype = c.dtype, d.E = c.E;
    if (!c.list) d.K = c.K, d.N = c.N;
    Plan1 plan(d);
    const int64_t each = c.R / c.E;
    // Rows: one tensor, or one a group; alike: one after the other.
    auto rows = [&](int dtype, int64_t cols) {
        if (!c.list) return tensor(dtype, {c.R, cols});
        const uintptr_t base = take(c.R * cols * (dtype == FMOE_F32 ? 4 : 2), 0);
        lists.emplace_back();
        for (int64_t e = 0; e < c.E; e++) {
            fmoe_tensor t = *tensor(dtype, {each, cols});
            if (c.alike) t.data = (void *)(base + (uintptr_t)(e * each * cols * (dtype == FMOE_F32 ? 4 : 2)));
            lists.back().push_back(t);
        }
        return (const fmoe_tensor *)lists.back().data();
    };
    auto stack = [&](int dtype, std::vector<int64_t> shape, bool turned) {
        if (!c.list) return shape.insert(shape.begin(), c.E), tensor(dtype, shape, turned);
        lists.emplace_back();
        for (int64_t e = 0; e < c.E; e++) lists.back().push_back(*tensor(dtype, shape, turned));
        return (const fmoe_tensor *)lists.back().data();
    };
    fmoe_gmm_args a = {};
    a.size = sizeof a;
    a.list = c.list;
    a.x = rows(c.dtype, c.K), a.w = stack(c.dtype, {c.K, c.N}, c.turned);
    if (c.bias) a.bias = stack(c.dtype, {c.N}, false);
    if (!c.list && c.sizes) a.sizes = tensor(-64, {c.E});
    a.y = rows(c.wide, c.N);
    fmoe_run r = plan.run(FMOE_FORWARD, c.R, c.run_flags);
    flush("  forward", backend->gmm[0](&plan.p, &a, &r));
    a.y = a.bias = nullptr;
    a.dy = rows(c.wide, c.N), a.dx = rows(c.dtype, c.K), a.dw = stack(c.gtype, {c.K, c.N}, c.turned);
    if (c.bias) a.dbias = stack(c.gtype, {c.N}, false);
    r = plan.run(FMOE_BACKWARD, c.R, c.run_flags);
    flush("  backward", backend->gmm[1](&plan.p, &a, &r));
}

// ---- The small operations ----

static void run_small(int dtype, int64_t T, int64_t H, int64_t E, int64_t k, int groups, bool replay)
{
    tensors.clear();
    next_address = (uintptr_t)1 << 45;
    fmoe_desc d = {};
    d.size = sizeof d;
    d.dtype = dtype, d.H = H, d.I = H, d.E = E, d.k = k;
    d.op = FMOE_OP_ROUTE;
    d.route.groups = groups, d.route.topk_groups = groups > 1 ? groups / 2 : 0;
    const fmoe_tensor *const logits = tensor(dtype, {T, E}), *const ids = tensor(-64, {T, k}),
                             *const p = tensor(FMOE_F32, {T, k});
    {
        Plan1 plan(d);
        fmoe_route_args a = {};
        a.size = sizeof a;
        a.logits = logits, a.ids = ids, a.weights = p, a.bad_rows = tensor(-64, {1});
        fmoe_run r = plan.run(FMOE_FORWARD, T, replay ? FMOE_REPLAY : 0);
        flush("  route forward", backend->route[0](&plan.p, &a, &r));
        a.weights = a.bad_rows = nullptr, a.dweights = p, a.dlogits = tensor(dtype, {T, E});
        flush("  route backward", backend->route[1](&plan.p, &a, &r));
    }
    d.op = FMOE_OP_PERMUTE;
    {
        Plan1 plan(d);
        const fmoe_tensor *const x = tensor(dtype, {T, H}), *const xp = tensor(dtype, {T * k, H}),
                                 *const map = tensor(-64, {T * k});
        fmoe_run r = plan.run(FMOE_FORWARD, T, 0);
        fmoe_permute_args a = {sizeof a, x, ids, xp, map, tensor(-64, {E})};
        flush("  permute forward", backend->permute[0](&plan.p, &a, &r));
        a = {sizeof a, x, nullptr, xp, map, nullptr};
        flush("  permute backward", backend->permute[1](&plan.p, &a, &r));
        fmoe_unpermute_args b = {};
        b.size = sizeof b;
        b.y = xp, b.map = map, b.weights = p, b.out = x;
        flush("  unpermute forward", backend->unpermute[0](&plan.p, &b, &r));
        b.out = nullptr, b.dout = x, b.dy = tensor(dtype, {T * k, H}), b.dweights = tensor(FMOE_F32, {T, k});
        flush("  unpermute backward", backend->unpermute[1](&plan.p, &b, &r));
    }
    d.op = FMOE_OP_ACTIVATION;
    {
        Plan1 plan(d);
        const fmoe_tensor *const h = tensor(dtype, {T, 2 * H}), *const a = tensor(dtype, {T, H});
        fmoe_run r = plan.run(FMOE_FORWARD, T, 0);
        fmoe_activation_args q = {sizeof q, h, a, nullptr, nullptr};
        flush("  activation forward", backend->activation[0](&plan.p, &q, &r));
        q = {sizeof q, h, nullptr, a, tensor(dtype, {T, 2 * H})};
        flush("  activation backward", backend->activation[1](&plan.p, &q, &r));
    }
}

// ---- What is compared ----

static void named()
{
    auto experts = [](const char *name, auto change) {
        Experts c;
        change(c);
        say("%s\n", name);
        run_experts(c);
    };
    auto gmm = [](const char *name, auto change) {
        Groups c;
        change(c);
        say("%s\n", name);
        run_gmm(c);
    };
    typedef Experts &X;
    experts("many rows an expert", [](X) {});
    experts("few rows an expert", [](X c) { c.T = 1024; });
    experts("gradients of f32 that are added to", [](X c) { c.gtype = FMOE_F32, c.run_flags = FMOE_ACCUMULATE; });
    experts("dx alone", [](X c) { c.grads = DX; });
    experts("dW1 alone", [](X c) { c.grads = DW1; });
    experts("dW1 and dx", [](X c) { c.grads = DW1 | DX; });
    experts("dW2 and dx", [](X c) { c.grads = DW2 | DX; });
    experts("dW1's memory is borrowed", [](X c) { c.T = 1024, c.flags = FMOE_BORROW_DW1; });
    experts("dW1's memory is borrowed, no dx", [](X c) { c.T = 1024, c.flags = FMOE_BORROW_DW1, c.grads = DW1 | DW2; });
    experts("h is computed again", [](X c) { c.flags = FMOE_RECOMPUTE; });
    experts("biases, gate and up as neighbours, weights [in,out]", [](X c) {
        c.E = 32, c.k = 4, c.flags = FMOE_BIAS | FMOE_INTERLEAVED, c.act = FMOE_ACT_SWIGLU_OAI,
        c.nmajor1 = c.nmajor2 = true;
    });
    experts("the same with few rows an expert, h is computed again", [](X c) {
        c.T = 1024, c.E = 32, c.k = 4, c.flags = FMOE_BIAS | FMOE_INTERLEAVED | FMOE_RECOMPUTE,
        c.act = FMOE_ACT_SWIGLU_OAI;
        c.nmajor1 = c.nmajor2 = true;
    });
    experts("gate and up as neighbours, weights [out,in]", [](X c) { c.flags = FMOE_INTERLEAVED; });
    experts("weights [in,out]", [](X c) { c.nmajor1 = c.nmajor2 = c.turned_grads = true; });
    experts("experts that are not gated", [](X c) { c.act = FMOE_ACT_RELU2, c.I = 1024; });
    experts("W1 is not aligned", [](X c) { c.shift = 2; });
    experts("lists at equal distances", [](X c) { c.E = 16, c.list = c.list_grads = true; });
    experts("lists anywhere", [](X c) { c.E = 16, c.list = c.list_grads = true, c.scatter = 1; });
    experts("lists with strides of their own", [](X c) { c.E = 16, c.list = c.list_grads = true, c.scatter = 2; });
    experts("a stack, gradients in lists", [](X c) { c.E = 16, c.list_grads = true, c.scatter = 1; });
    experts("adapters", [](X c) { c.rank1 = c.rank2 = 16; });
    experts("adapters, frozen weights", [](X c) { c.rank1 = c.rank2 = 16, c.grads = DX | DP; });
    experts("adapters of a large rank, few rows an expert", [](X c) { c.T = 1024, c.rank1 = c.rank2 = 72; });
    experts("adapters of a large rank, of B2 and W1 the gradients",
            [](X c) { c.rank1 = c.rank2 = 72, c.factors = B2, c.grads = DW1; });
    experts("adapters stored the other way", [](X c) { c.rank1 = c.rank2 = 24, c.turned_factors = 15; });
    experts("f32", [](X c) { c.dtype = c.gtype = FMOE_F32, c.flags = FMOE_BIAS; });
    experts("sizes that are odd", [](X c) { c.H = 100, c.I = 36, c.E = 5, c.T = 50, c.k = 2; });
    experts("no tokens", [](X c) { c.T = 0; });
    experts("more experts than every block can add up", [](X c) { c.E = 13000, c.H = 64, c.I = 8; });
    experts("one token", [](X c) { c.T = 1, c.inference = true; });
    experts("eight tokens, biases", [](X c) { c.T = 8, c.flags = FMOE_BIAS, c.inference = true; });
    experts("four tokens, weights [in,out]", [](X c) { c.T = 4, c.nmajor1 = c.nmajor2 = c.inference = true; });
    experts("four tokens, lists", [](X c) { c.T = 4, c.list = true, c.scatter = 1, c.inference = true; });
    experts("one token, adapters", [](X c) { c.T = 1, c.rank1 = c.rank2 = 16, c.inference = true; });
    experts("one token, same bits", [](X c) { c.T = 1, c.flags = FMOE_SAME_BITS, c.inference = true; });
    experts("16 tokens, same bits", [](X c) { c.T = 16, c.flags = FMOE_SAME_BITS, c.inference = true; });
    experts("four tokens, weights [in,out], same bits",
            [](X c) { c.T = 4, c.flags = FMOE_SAME_BITS, c.nmajor1 = c.nmajor2 = c.inference = true; });
    experts("four tokens, lists, same bits",
            [](X c) { c.T = 4, c.flags = FMOE_SAME_BITS, c.list = true, c.scatter = 1, c.inference = true; });
    experts("one token, adapters, same bits",
            [](X c) { c.T = 1, c.flags = FMOE_SAME_BITS, c.rank1 = c.rank2 = 16, c.inference = true; });
    experts("gate and up as neighbours, weights [in,out], same bits", [](X c) {
        c.T = 1024, c.E = 32, c.k = 4, c.flags = FMOE_BIAS | FMOE_INTERLEAVED | FMOE_SAME_BITS,
        c.act = FMOE_ACT_SWIGLU_OAI, c.nmajor1 = c.nmajor2 = true;
    });
    experts("NF4, adapters", [](X c) { c.format = 1, c.E = 16, c.rank1 = c.rank2 = 16, c.grads = DX | DP; });
    experts("one token, NF4", [](X c) { c.T = 1, c.format = 1, c.inference = true; });
    experts("one token, NF4, same bits",
            [](X c) { c.T = 1, c.format = 1, c.flags = FMOE_SAME_BITS, c.inference = true; });
    experts("16 tokens, MXFP4", [](X c) { c.T = 16, c.format = 2, c.inference = true; });
    experts("16 tokens, MXFP4, adapters", [](X c) { c.T = 16, c.format = 2, c.rank1 = 16, c.inference = true; });
    experts("64 tokens, FP8", [](X c) { c.T = 64, c.format = 3, c.inference = true; });
    experts("four tokens, INT8, f16", [](X c) { c.T = 4, c.format = 4, c.dtype = FMOE_F16, c.inference = true; });
    experts("four tokens, INT4 with zeros", [](X c) { c.T = 4, c.format = 5, c.inference = true; });
    experts("four tokens, NVFP4", [](X c) { c.T = 4, c.format = 6, c.inference = true; });
    experts("four tokens, NF4, rows of no whole 16 bytes",
            [](X c) { c.T = 4, c.E = 16, c.format = 1, c.H = 2056, c.inference = true; });
    experts("129 tokens, NF4", [](X c) { c.T = 129, c.E = 16, c.format = 1, c.inference = true; });
    experts("NF4 decoded inside the products, adapters",
            [](X c) { c.format = 1, c.rank1 = c.rank2 = 16, c.grads = DX | DP; });
    experts("FP8 decoded inside, biases", [](X c) { c.format = 3, c.flags = FMOE_BIAS, c.grads = DX | DP; });
    experts("MXFP4 decoded inside, 256 tokens", [](X c) { c.format = 2, c.T = 256, c.inference = true; });
    setenv("FMOE_CUDA_CODES", "ahead", 1);
    experts("NF4 decoded ahead, adapters", [](X c) { c.format = 1, c.rank1 = c.rank2 = 16, c.grads = DX | DP; });
    unsetenv("FMOE_CUDA_CODES");
    typedef Groups &G;
    gmm("grouped matmul", [](G) {});
    gmm("grouped matmul, biases, gradients of f32 that are added to",
        [](G c) { c.bias = true, c.gtype = FMOE_F32, c.run_flags = FMOE_ACCUMULATE; });
    gmm("grouped matmul, f32 results", [](G c) { c.wide = FMOE_F32; });
    gmm("grouped matmul, a list as a stack would be", [](G c) { c.list = true; });
    gmm("grouped matmul, a list", [](G c) { c.list = true, c.alike = false, c.E = 2; });
    gmm("grouped matmul, one group without sizes", [](G c) { c.E = 1, c.sizes = false; });
    say("small operations\n"), run_small(FMOE_BF16, 4096, 2048, 128, 8, 1, false);
    say("small operations, groups of experts\n"), run_small(FMOE_F16, 300, 100, 256, 8, 8, false);
    record_capability = 80;
    experts("compute capability 8.0", [](X) {});
    experts("compute capability 8.0, adapters, h is computed again",
            [](X c) { c.rank1 = c.rank2 = 16, c.flags = FMOE_RECOMPUTE; });
    experts("compute capability 8.0, four tokens", [](X c) { c.T = 4, c.inference = true; });
    experts("compute capability 8.0, four tokens, same bits",
            [](X c) { c.T = 4, c.flags = FMOE_SAME_BITS, c.inference = true; });
    experts("compute capability 8.0, four tokens, NF4", [](X c) { c.T = 4, c.format = 1, c.inference = true; });
    gmm("compute capability 8.0, grouped matmul", [](G c) { c.bias = true; });
    experts("compute capability 8.0, biases, gate and up as neighbours, weights [in,out]", [](X c) {
        c.E = 32, c.k = 4, c.flags = FMOE_BIAS | FMOE_INTERLEAVED, c.act = FMOE_ACT_SWIGLU_OAI,
        c.nmajor1 = c.nmajor2 = true;
    });
    experts("compute capability 8.0, lists anywhere",
            [](X c) { c.E = 16, c.list = c.list_grads = true, c.scatter = 1; });
    experts("compute capability 8.0, inference, W1 is not aligned",
            [](X c) { c.I = 4096, c.shift = 2, c.inference = true; });
    record_capability = 89;
    experts("compute capability 8.9", [](X) {});
    record_capability = 120;
    experts("compute capability 12.0", [](X) {});
    record_capability = 90;
}

static void drawn(int count)
{
    static const int types[] = {FMOE_BF16, FMOE_BF16, FMOE_F16, FMOE_F32},
                     acts[] = {0, 0, 0, 1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20};
    for (int i = 0; i < count; i++) {
        say("drawn %d\n", i);
        record_capability = coin(85) ? 90 : coin() ? 80 : 100;
        if (coin(8)) {
            run_small(types[pick(0, 3)], pick(1, 3000), coin() ? 8 * pick(1, 200) : pick(1, 300),
                      8 * pick(1, coin() ? 40 : 300), pick(1, 8), coin() ? 1 : 8, coin(30));
            continue;
        }
        if (coin(15)) {
            Groups c;
            c.E = coin(20) ? 1 : pick(2, 40), c.K = coin(70) ? 64 * pick(1, 12) : pick(1, 200),
            c.N = coin(70) ? 8 * pick(1, 99) : pick(1, 200);
            c.R = c.E * pick(0, 300), c.dtype = types[pick(0, 3)], c.wide = coin(70) ? c.dtype : FMOE_F32,
            c.gtype = coin() ? c.dtype : FMOE_F32;
            c.turned = coin(), c.list = coin(40), c.alike = coin(60), c.bias = coin(40) && !(c.list && c.alike),
            c.sizes = c.E > 1 || coin();
            c.run_flags = (coin() ? FMOE_ACCUMULATE : 0) | (coin() ? FMOE_ADD_DX : 0);
            run_gmm(c);
            continue;
        }
        Experts c;
        c.dtype = types[pick(0, 3)], c.gtype = coin() ? FMOE_F32 : c.dtype, c.act = acts[pick(0, 13)];
        const bool fast = coin(85);
        c.H = fast ? 64 * pick(1, 40) : pick(1, 300), c.I = fast ? 8 * pick(1, coin() ? 200 : 20) : pick(1, 200);
        if (fast && coin()) c.I = 64 * pick(1, 20);
        c.E = coin(15) ? pick(60, 700) : pick(1, 16), c.k = pick(1, c.E < 8 ? (int)c.E : 8);
        c.T = coin(12) ? pick(0, 6) : coin() ? pick(7, 400) : pick(400, 20000);
        c.list = coin(25), c.list_grads = coin(15) ? !c.list : c.list, c.scatter = (int)pick(0, 2);
        c.flags = (coin(25) ? FMOE_INTERLEAVED : 0) | (!c.list && !c.list_grads && coin(30) ? FMOE_BIAS : 0) |
                  (coin(25) ? FMOE_RECOMPUTE
                   : coin() ? FMOE_REUSE_SAVED
                            : 0);
        c.run_flags = (coin(40) ? FMOE_ACCUMULATE : 0) | (coin(30) ? FMOE_ADD_OUT : 0) | (coin(30) ? FMOE_ADD_DX : 0);
        c.grads = coin(40) ? ALL : (int)pick(0, 15), c.factors = coin() ? 15 : (int)pick(0, 15);
        c.nmajor1 = coin(30), c.nmajor2 = coin(30), c.turned_grads = coin(25), c.shift = coin(7) ? 4 : 0;
        auto rank = [] { return coin(55) ? 0 : coin(60) ? 8 * pick(1, coin(40) ? 17 : 5) : pick(1, 300); };
        c.rank1 = rank(), c.rank2 = rank(), c.turned_factors = coin(40) ? (int)pick(0, 15) : 0;
        if (!c.list_grads && c.grads & DW1 && !(c.run_flags & FMOE_ACCUMULATE) && coin()) c.flags |= FMOE_BORROW_DW1;
        run_experts(c);
    }
}

static fmoe_status fail(fmoe_status status, const char *format, ...)
{
    char line[600];
    va_list v;
    va_start(v, format);
    vsnprintf(line, sizeof line, format, v);
    va_end(v);
    say("  [status %d: %s]\n", (int)status, line);
    return status;
}

extern "C" const fmoe_backend *fmoe_cuda_backend(const fmoe_core *core);

int main(int argc, char **argv)
{
    static const fmoe_core core = {FMOE_BACKEND_VERSION, fail};
    backend = fmoe_cuda_backend(&core);
    record_report = report;
    if (argc > 3 && !strcmp(argv[1], "--draw")) {
        mangled = true;
        std::ifstream sizes(argc > 4 ? argv[4] : "/dev/null");
        for (std::string line; std::getline(sizes, line);) {
            std::istringstream words(line);
            std::string name;
            size_t n;
            words >> name;
            for (param_sizes[name].clear(); words >> n;) param_sizes[name].push_back(n);
        }
        state = strtoull(argv[2], nullptr, 10) * 0x9e3779b97f4a7c15ull + 1;
        drawn(atoi(argv[3]));
        fwrite(text.data(), 1, text.size(), stdout);
        return 0;
    }
    named();
    if (argc > 2 && !strcmp(argv[1], "--write")) {
        std::ofstream(argv[2]) << text;
        return 0;
    }
    std::ifstream file(argc > 1 ? argv[1] : "");
    if (!file) {
        printf("usage: test_launches FILE | --write FILE | --draw SEED COUNT [SIZES]\n0 passed, 1 failed, 0 skipped\n");
        return 1;
    }
    // By layers: a line that is not indented begins one.
    std::istringstream now(text);
    std::string want, got, layer;
    int passed = 0, failed = 0, line = 0;
    bool ok = true;
    while (true) {
        const bool more = (bool)std::getline(now, got), expected = (bool)std::getline(file, want);
        line++;
        if (!more || (!got.empty() && got[0] != ' ')) {
            if (!layer.empty()) (ok ? passed : failed)++;
            layer = got, ok = true;
        }
        if (!more && !expected) break;
        if (more != expected || got != want) {
            if (ok)
                printf("FAILED: %s, line %d\n  expected %s\n  got      %s\n", layer.c_str(), line,
                       expected ? want.c_str() : "nothing", more ? got.c_str() : "nothing");
            ok = false;
            if (more != expected) {
                failed++;
                break;
            }
        }
    }
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed != 0;
}
