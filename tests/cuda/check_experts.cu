// SPDX-License-Identifier: Apache-2.0
// check_experts.cu - the layer on the GPU against the reference: drawn shapes, dtypes, layouts, activations and flags.
#include "check.cuh"

struct Case {
    int64_t T, H, I, E, k;
    int dtype, act, ptype, gtype, id_type;
    uint32_t flags, run_flags;
    bool list, w1_t, w2_t, dw1_t, dw2_t, dx, dp, dw1, dw2, shift;
    int skew;             // percent of ids that go to expert 0
    int scatter;          // lists: 0 equal distances, 1 anywhere, 2 strides of their own
    int64_t rank1, rank2; // of adapters
    int turned, wanted;   // bits of the factors a1, b1, a2, b2: stored by columns; whose gradient is asked for
    size_t launches;      // inference is to take so many, 0: any number
};

static Case draw()
{
    static const int types[] = {FMOE_BF16, FMOE_BF16, FMOE_F16, FMOE_F32};
    static const int acts[] = {0, 1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20};
    Case c = {};
    c.dtype = types[pick(0, 3)];
    const bool fast = coin(65);
    c.act = coin() ? 0 : acts[pick(0, 11)];
    c.H = fast ? 64 * pick(1, coin(30) ? 9 : 4) : pick(1, 150);
    c.I = fast ? 8 * pick(1, coin(30) ? 60 : 24) : pick(1, 120);
    c.E = coin(15) ? pick(60, 300) : pick(1, 9);
    c.k = pick(1, 4);
    c.T = coin(10) ? pick(1, 3) : coin(30) ? pick(100, 260) : pick(4, 90);
    if (c.H * c.I > 60000 && c.T > 60) c.T = pick(30, 60);
    if (c.H * c.I > 60000 && c.E > 9) c.E = pick(10, 20);
    c.ptype = coin() ? FMOE_F32 : c.dtype;
    c.gtype = coin() ? FMOE_F32 : c.dtype;
    c.id_type = coin() ? -32 : -64;
    c.list = coin(25);
    c.scatter = (int)pick(0, 2);
    c.flags = (coin(25) ? FMOE_INTERLEAVED : 0) | (!c.list && coin(30) ? FMOE_BIAS : 0) |
              (coin(25) ? FMOE_RECOMPUTE
               : coin() ? FMOE_REUSE_SAVED
                        : 0) |
              (coin(40) ? FMOE_SAME_BITS : 0) | (coin(25) ? FMOE_SKIP_NEG1 : 0) | (coin(25) ? FMOE_SKIP_E : 0);
    c.run_flags = (coin(40) ? FMOE_ACCUMULATE : 0) | (coin(30) ? FMOE_ADD_OUT : 0) | (coin(30) ? FMOE_ADD_DX : 0);
    c.w1_t = coin(25), c.w2_t = coin(25), c.dw1_t = coin(25), c.dw2_t = coin(25);
    c.dx = coin(85), c.dp = coin(85), c.dw1 = coin(85), c.dw2 = coin(85);
    if (!c.list && c.dw1 && !(c.run_flags & FMOE_ACCUMULATE) && coin(60)) c.flags |= FMOE_BORROW_DW1;
    c.shift = coin(10);
    c.skew = coin(25) ? 80 : 0;
    auto rank = [] { return coin(60) ? 0 : coin(60) ? 8 * pick(1, coin(25) ? 17 : 5) : pick(1, 70); };
    c.rank1 = rank(), c.rank2 = rank();
    c.turned = coin(40) ? (int)pick(0, 15) : 0;
    c.wanted = coin(70) ? 15 : (int)pick(0, 15);
    return c;
}

static std::string words(const Case &c)
{
    char t[400];
    snprintf(t, sizeof t,
             "experts dtype %d act %d T %lld H %lld I %lld E %lld k %lld flags %u run %u list %d w1_t %d w2_t %d dw1_t "
             "%d dw2_t %d p %d g %d shift %d skew %d scatter %d rank %lld %lld turned %d wanted %d",
             c.dtype, c.act, (long long)c.T, (long long)c.H, (long long)c.I, (long long)c.E, (long long)c.k, c.flags,
             c.run_flags, c.list, c.w1_t, c.w2_t, c.dw1_t, c.dw2_t, c.ptype, c.gtype, c.shift, c.skew, c.scatter,
             (long long)c.rank1, (long long)c.rank2, c.turned, c.wanted);
    return t;
}

// Weights or their gradients, stacked or as lists.
struct Weights {
    Tensor w1, b1, w2, b2;
    std::deque<Tensor> gate, up, down;
    std::vector<fmoe_tensor> lists[2][3];
    bool list = false, gated = true;
    std::vector<Tensor *> all;

    void init(const Case &c, bool is_gated, int dtype, bool t1, bool t2)
    {
        list = c.list, gated = is_gated;
        const int64_t HC = gated ? 2 * c.I : c.I;
        const size_t shift = c.shift ? 2 * fmoe_dtype_size(dtype) : 0;
        if (!list) {
            w1.init(dtype, {c.E, HC, c.H}, t1 ? std::vector<int>{0, 2, 1} : std::vector<int>{}, 0, shift);
            w2.init(dtype, {c.E, c.H, c.I}, t2 ? std::vector<int>{0, 2, 1} : std::vector<int>{}, 0, 0);
            b1.init(dtype, {c.E, HC});
            b2.init(dtype, {c.E, c.H});
            all = {&w1, &w2};
            if (c.flags & FMOE_BIAS) all.push_back(&b1), all.push_back(&b2);
            return;
        }
        for (int64_t e = 0; e < c.E; e++) {
            // At equal distances, anywhere, or even with strides of their own.
            auto one = [&](std::deque<Tensor> &d, int64_t rows, int64_t cols, bool t, int64_t pad) {
                const size_t gap = c.scatter ? 16 * (size_t)pick(0, 40) : 0;
                d.emplace_back();
                d.back().init(dtype, {rows, cols}, t ? std::vector<int>{1, 0} : std::vector<int>{},
                              pad + (c.scatter > 1 ? pick(0, 2) : 0), gap);
            };
            if (gated) one(gate, c.I, c.H, c.scatter > 1 && coin() ? !t1 : t1, c.scatter > 1 ? 8 : 0);
            one(up, c.I, c.H, t1, 0);
            one(down, c.H, c.I, t2, 0);
        }
        for (auto *d : {&gate, &up, &down})
            for (Tensor &t : *d) all.push_back(&t);
        for (int side = 0; side < 2; side++) {
            std::deque<Tensor> *d[3] = {&gate, &up, &down};
            for (int i = 0; i < 3; i++)
                for (Tensor &t : *d[i]) lists[side][i].push_back(side ? t.dev_t : t.ref_t);
        }
    }
    fmoe_weights get(int side, bool bias, bool one, bool two)
    {
        fmoe_weights w = {};
        if (!list) {
            if (one) w.w1 = side ? &w1.dev_t : &w1.ref_t;
            if (two) w.w2 = side ? &w2.dev_t : &w2.ref_t;
            if (bias && one) w.b1 = side ? &b1.dev_t : &b1.ref_t;
            if (bias && two) w.b2 = side ? &b2.dev_t : &b2.ref_t;
        } else {
            if (one && gated) w.gate = lists[side][0].data();
            if (one) w.up = lists[side][1].data();
            if (two) w.down = lists[side][2].data();
        }
        return w;
    }
    void compare_all(double l2, double peak, bool bias, bool one, bool two) const
    {
        if (!list) {
            if (one) compare("dw1", w1, l2, peak);
            if (two) compare("dw2", w2, l2, peak);
            if (bias && one) compare("db1", b1, l2, peak);
            if (bias && two) compare("db2", b2, l2, peak);
            return;
        }
        // One small matrix alone may be all zeros or one row: the bound is of the peak.
        for (auto *d : {&gate, &up})
            for (const Tensor &t : *d)
                if (one) compare("dw1[e]", t, 3 * l2, 2 * peak);
        for (const Tensor &t : down)
            if (two) compare("dw2[e]", t, 3 * l2, 2 * peak);
    }
};

// The factors of adapters, or their gradients.
struct Factors {
    Tensor t[4];
    std::vector<int> there;

    void init(const Case &c, bool gated, int dtype, int turned)
    {
        const int64_t HC = gated ? 2 * c.I : c.I, rows[4] = {c.rank1, HC, c.rank2, c.H},
                      cols[4] = {c.H, c.rank1, c.I, c.rank2};
        for (int i = 0; i < 4; i++) {
            if (!(i < 2 ? c.rank1 : c.rank2)) continue;
            t[i].init(dtype, {c.E, rows[i], cols[i]}, turned >> i & 1 ? std::vector<int>{0, 2, 1} : std::vector<int>{});
            there.push_back(i);
        }
    }
    void put(fmoe_weights &w, int side, int wanted)
    {
        const fmoe_tensor **to[4] = {&w.lora_a1, &w.lora_b1, &w.lora_a2, &w.lora_b2};
        for (int i : there)
            if (wanted >> i & 1) *to[i] = side ? &t[i].dev_t : &t[i].ref_t;
    }
};

static void draw_ids(const Case &c, Tensor &ids)
{
    for (auto &v : ids.ints) {
        v = pick(0, 99) < c.skew ? 0 : pick(0, c.E - 1);
        if ((c.flags & FMOE_SKIP_NEG1) && coin(10)) v = -1;
        if ((c.flags & FMOE_SKIP_E) && coin(10)) v = c.E;
    }
}

// Elements of h (the gate, where there is one) so near zero that roundings decide on which side they are: of W1 x, of
// A1 x and of their sum.
static int64_t near_zero(const Case &c, bool gated, const Tensor &x, const Tensor &ids, Weights &w, const Factors &lora,
                         double scale)
{
    auto at = [](const Tensor &t, int64_t e, int64_t i, int64_t j) {
        return t.ref[(size_t)(e * t.strides[0] + i * t.strides[1] + j * t.strides[2])];
    };
    int64_t near = 0;
    std::vector<double> low((size_t)c.rank1);
    for (int64_t s = 0; s < c.T * c.k; s++) {
        const int64_t e = ids.ints[(size_t)s];
        if (e < 0 || e >= c.E) continue;
        const double *row = &x.ref[(size_t)(s / c.k * x.strides[0])];
        for (int64_t r = 0; r < c.rank1; r++) {
            low[(size_t)r] = 0;
            for (int64_t j = 0; j < c.H; j++) low[(size_t)r] += at(lora.t[0], e, r, j) * row[j];
        }
        for (int64_t i = 0; i < c.I; i++) {
            const int64_t n = gated && (c.flags & FMOE_INTERLEAVED) ? 2 * i : i;
            const Tensor *one = c.list ? &(gated ? w.gate : w.up)[(size_t)e] : nullptr;
            double h = 0, size = 0, sum;
            for (int64_t j = 0; j < c.H; j++)
                h += row[j] * (one ? one->ref[(size_t)(i * one->strides[0] + j * one->strides[1])] : at(w.w1, e, n, j));
            if (c.flags & FMOE_BIAS) h += w.b1.ref[(size_t)(e * w.b1.strides[0] + n * w.b1.strides[1])];
            sum = h, size = std::fabs(h);
            for (int64_t r = 0; r < c.rank1; r++) {
                const double term = scale * at(lora.t[1], e, n, r) * low[(size_t)r];
                sum += term, size += std::fabs(term);
            }
            near += std::fabs(sum) <= unit(c.dtype) * size;
        }
    }
    return near;
}

// Ends the capture of a stream and runs it once; returns the number of launches.
static size_t replay(cudaStream_t stream)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    size_t nodes = 0;
    CK(cudaStreamEndCapture(stream, &graph));
    CK(cudaGraphGetNodes(graph, nullptr, &nodes));
    CK(cudaGraphInstantiate(&exec, graph, 0));
    CK(cudaGraphLaunch(exec, stream));
    CK(cudaStreamSynchronize(stream));
    CK(cudaGraphExecDestroy(exec));
    CK(cudaGraphDestroy(graph));
    return nodes;
}

static void run_case(const Case &c)
{
    if (too_large(c.T * c.k, c.H, c.I)) return;
    arena.reset();
    context = words(c);
    fmoe_desc d = {};
    d.size = sizeof d;
    d.op = FMOE_OP_EXPERTS;
    d.dtype = c.dtype;
    d.H = c.H, d.I = c.I, d.E = c.E, d.k = c.k;
    d.act = c.act;
    d.flags = c.flags;
    d.rank1 = c.rank1, d.rank2 = c.rank2;
    Pair p(d);
    if (!p.ok) return;
    const bool bias = c.flags & FMOE_BIAS;
    Tensor x, ids, pr, out, dout, dx, dp;
    x.init(c.dtype, {c.T, c.H}, {}, coin() ? 8 : 0);
    x.fill(normal);
    ids.init(c.id_type, {c.T, c.k});
    draw_ids(c, ids);
    pr.init(c.ptype, {c.T, c.k});
    pr.fill(uniform);
    out.init(c.dtype, {c.T, c.H});
    dout.init(c.dtype, {c.T, c.H});
    dout.fill(normal);
    dx.init(c.dtype, {c.T, c.H});
    dp.init(c.ptype, {c.T, c.k});
    Weights w, dw;
    w.init(c, p.ref.gated, c.dtype, c.w1_t, c.w2_t);
    dw.init(c, p.ref.gated, c.gtype, c.dw1_t, c.dw2_t);
    Factors lora, dlora;
    lora.init(c, p.ref.gated, c.dtype, c.turned);
    dlora.init(c, p.ref.gated, c.gtype, c.turned >> 1);
    const float scales[] = {0, 1, 2, 0.3f, -1.7f}, scale[2] = {scales[pick(0, 4)], scales[pick(0, 4)]}; // 0 means 1
    for (int i : lora.there) {
        const double s = 1 / sqrt((double)lora.t[i].size(2));
        lora.t[i].fill([&] { return s * normal(); });
        lora.t[i].upload();
    }
    const double s1 = 1 / sqrt((double)c.H), s2 = 1 / sqrt((double)c.I);
    for (Tensor *t : w.all) {
        const double s = t == &w.w2 || (w.list && t->size(0) == c.H && t->size(1) == c.I) ? s2
                         : t == &w.b1 || t == &w.b2                                       ? 0.3
                                                                                          : s1;
        t->fill([&] { return s * normal(); });
        t->upload();
    }
    auto prepare = [&](Tensor &t, bool add) {
        if (!add) t.poison();
        else t.upload();
    };
    const bool add_out = c.run_flags & FMOE_ADD_OUT, add_dx = c.run_flags & FMOE_ADD_DX,
               add_dw = c.run_flags & FMOE_ACCUMULATE;
    if (add_out) out.fill(normal);
    if (add_dx) dx.fill(normal);
    std::vector<Tensor *> grads = dw.all;
    for (int i : dlora.there) grads.push_back(&dlora.t[i]);
    for (Tensor *t : grads)
        if (add_dw) t->fill(normal);
    for (Tensor *t : {&x, &ids, &pr, &dout}) t->upload();

    auto args = [&](int side, bool backward) {
        fmoe_experts_args a = {};
        a.size = sizeof a;
        auto at = [&](Tensor &t) -> const fmoe_tensor * { return side ? &t.dev_t : &t.ref_t; };
        a.x = at(x), a.ids = at(ids), a.weights = at(pr);
        a.w = w.get(side, bias, true, true);
        lora.put(a.w, side, 15);
        a.w.lora_scale1 = scale[0], a.w.lora_scale2 = scale[1];
        a.saved = side ? p.dev_saved : p.ref_saved.data();
        a.saved_bytes = side ? p.dev_saved_bytes : p.ref_saved.size();
        if (!backward) a.out = at(out);
        else {
            a.dout = at(dout);
            a.dx = c.dx ? at(dx) : nullptr;
            a.dweights = c.dp ? at(dp) : nullptr;
            a.dw = dw.get(side, bias, c.dw1, c.dw2);
            dlora.put(a.dw, side, c.wanted);
        }
        return a;
    };
    // Device first: with FMOE_ADD_* and FMOE_ACCUMULATE the reference changes what it adds to.
    std::vector<std::vector<char>> bits[2];
    std::vector<Tensor *> results = {&out, &dx, &dp};
    for (Tensor *t : grads) results.push_back(t);
    const size_t mark = arena.used, blocks = arena.blocks.size();
    std::vector<char> inference;
    for (int round = 0; round < 2; round++) {
        arena.used = mark;
        arena.blocks.resize(blocks);
        fmoe_run f = p.dev_run(FMOE_FORWARD, c.T, c.run_flags);
        prepare(out, add_out), prepare(dx, add_dx), prepare(dp, false);
        for (Tensor *t : grads) prepare(*t, add_dw);
        fmoe_experts_args a = args(1, false);
        verdict(p.dev.backend->experts[0](&p.dev, &a, &f) == FMOE_OK, "forward");
        fmoe_run b = p.dev_run(FMOE_BACKWARD, c.T, c.run_flags);
        a = args(1, true);
        verdict(p.dev.backend->experts[1](&p.dev, &a, &b) == FMOE_OK, "backward");
        CK(cudaDeviceSynchronize());
        for (Tensor *t : results) bits[round].push_back(t->raw());
    }
    for (size_t i = 0; i < results.size(); i++)
        verdict(bits[0][i] == bits[1][i], "result %d differs between two runs", (int)i);
    // The reference.
    fmoe_run r = p.ref_run(FMOE_FORWARD, c.T, c.run_flags);
    fmoe_experts_args a = args(0, false);
    const std::vector<double> out_before = out.ref;
    verdict(p.ref.backend->experts[0](&p.ref, &a, &r) == FMOE_OK, "reference forward");
    r = p.ref_run(FMOE_BACKWARD, c.T, c.run_flags);
    a = args(0, true);
    verdict(p.ref.backend->experts[1](&p.ref, &a, &r) == FMOE_OK, "reference backward");

    // Roundings on the way: h, a, y, out forward; h, a, da, dh, the result backward; with adapters h, y, da and dx once
    // more, and their rank-sized rows. A clamp's slope jumps where h rounds across the limit: single elements may be
    // wrong by all of it, and the sum of squares holds the rest.
    const double adapted = (c.rank1 ? 1 : 0) + (c.rank2 ? 1 : 0);
    const double u = unit(c.dtype) * (1 + adapted / 2), wide = c.dtype == FMOE_F32 ? 1e-5 : 0;
    // The order of a sum, or an adapter's second rounding, may decide on which side of zero h is: each such element may
    // be wrong by all of it, and by few rows nothing averages that out.
    const bool kink = c.act == FMOE_ACT_REGLU || c.act == FMOE_ACT_RELU;
    const int64_t near = kink ? near_zero(c, p.ref.gated, x, ids, w, lora, scale[0] == 0 ? 1 : scale[0]) : 0;
    const double flips = sqrt(6. * (double)near / (double)(c.T * c.k * c.I));
    const bool jumps = (kink && c.rank1) || (c.act >= FMOE_ACT_SWIGLU_CLAMP && c.act <= FMOE_ACT_SWIGLU_CLAMP_OUT);
    const double l2 = 3 * u + wide, peak = 6 * u + wide, l2b = (jumps ? 20 : 4) * u + wide + flips,
                 peakb = kink || jumps ? 1 : 10 * u + wide;
    compare("out", out, l2, peak);
    if (c.dx) compare("dx", dx, l2b, peakb);
    // dp is a product of dout's row and an expert's. It may cancel, and few of them do not average that out: then the
    // error is that of a product which does not, of rms(dout) rms(y) sqrt(H), with y by out = sum over k of p y.
    const double few = c.T * c.k < 32 ? 16 : 2;
    const double y = mean_square(pr) > 0 ? sqrt(mean_square(out) / mean_square(pr) / (double)c.k) : 0;
    const double usual = c.T * c.k < 32 ? y * sqrt(mean_square(dout) * (double)c.H) : 0;
    if (c.dp) compare("dweights", dp, few * l2b, few * peakb, usual);
    dw.compare_all(l2b, peakb, bias, c.dw1, c.dw2);
    static const char *const names[4] = {"da1", "db1", "da2", "db2"};
    for (int i : dlora.there)
        if (c.wanted >> i & 1) compare(names[i], dlora.t[i], 1.5 * l2b, 1.5 * peakb);

    // Inference: nothing is saved, perhaps other kernels; the second time from a CUDA graph.
    cudaStream_t stream;
    CK(cudaStreamCreate(&stream));
    for (int round = 0; round < 2; round++) {
        if (add_out) {
            std::swap(out.ref, const_cast<std::vector<double> &>(out_before));
            out.upload();
            std::swap(out.ref, const_cast<std::vector<double> &>(out_before));
        } else out.poison();
        fmoe_run f = p.dev_run(FMOE_FORWARD, c.T, c.run_flags, stream);
        a = args(1, false);
        a.saved = nullptr, a.saved_bytes = 0;
        CK(cudaDeviceSynchronize());
        if (round) CK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        verdict(p.dev.backend->experts[0](&p.dev, &a, &f) == FMOE_OK, "inference");
        if (round) {
            const size_t n = replay(stream);
            verdict(!c.launches || n == c.launches, "inference in %zu launches, not %zu", n, c.launches);
        }
        CK(cudaDeviceSynchronize());
        if (round == 0) inference = out.raw();
    }
    CK(cudaStreamDestroy(stream));
    verdict(inference == out.raw(), "inference differs between two runs");
    // Slices of a list (slices.cu) take no adapter into the product: it is then added on its own.
    const bool apart = c.list && c.rank1 && (c.I % 8 || c.H % 8);
    verdict(!(c.flags & FMOE_SAME_BITS) || apart || inference == bits[0][0],
            "inference has other bits than the forward of training");
    compare("inference", out, l2, peak);
    check_guards();
}

void check_experts(int cases)
{
    for (int i = 0; i < cases; i++) run_case(draw());
    // Shapes the fast path is made for, in full: several row tiles, column tiles and experts.
    Case c = {};
    c.dtype = FMOE_BF16;
    c.H = 512, c.I = 256, c.E = 4, c.k = 2, c.T = 300;
    c.ptype = FMOE_F32, c.gtype = FMOE_BF16, c.id_type = -64;
    c.dx = c.dp = c.dw1 = c.dw2 = true;
    run_case(c);
    c.flags = FMOE_BORROW_DW1;
    run_case(c);
    c.flags = 0;
    c.I = 328, c.H = 320, c.gtype = FMOE_F32, c.run_flags = FMOE_ACCUMULATE;
    run_case(c);
    c.flags = FMOE_INTERLEAVED;
    run_case(c);
    // Decode: rows in one and in several parts, few and many slots, experts with none to many of them.
    static const struct {
        int64_t T, k, E, H, I;
    } few[] = {{1, 8, 9, 512, 768},  {1, 2, 16, 512, 256}, {4, 8, 34, 512, 128},  {2, 2, 5, 2304, 256},
               {2, 3, 8, 256, 1024}, {9, 4, 40, 256, 136}, {20, 3, 64, 128, 128}, {1, 6, 6, 512, 1408},
               {3, 2, 7, 8, 8},      {5, 3, 16, 520, 72},  {2, 2, 3, 96, 2056},   {1, 2, 2, 2888, 104},
               {11, 4, 48, 72, 200}, {1, 4, 4, 264, 288}};
    for (const auto &f : few)
        // Weights [out,in], [in,out], and those with gate and up as neighbours and biases.
        for (int round = 0; round < (f.E * f.H * f.I < 700000 ? 9 : 3); round++) {
            Case q = c;
            q.T = f.T, q.k = f.k, q.E = f.E, q.H = f.H, q.I = f.I;
            q.dtype = q.gtype = round % 3 == 1 ? FMOE_F16 : FMOE_BF16;
            q.flags = round % 3 == 1 ? FMOE_SKIP_NEG1 | FMOE_SKIP_E : 0;
            q.run_flags = round % 3 == 2 ? FMOE_ADD_OUT : 0;
            q.id_type = round % 3 == 1 ? -32 : -64;
            q.skew = round % 3 == 2 ? 60 : 0;
            q.w1_t = q.w2_t = round >= 3 && round != 7;
            q.launches = q.w1_t ? 3 : 2;
            if (round >= 6) q.flags |= FMOE_INTERLEAVED | FMOE_BIAS, q.act = FMOE_ACT_SWIGLU_OAI;
            run_case(q);
            q.flags |= FMOE_SAME_BITS, q.launches = 2;
            run_case(q);
        }
    // Decode again: not gated, lists (at equal distances, anywhere, strides of their own), adapters, and all of these.
    // The last two do not decode.
    static const int64_t ranks[][2] = {{16, 16}, {0, 8}, {128, 24}, {64, 0}, {8, 32}, {12, 16}, {16, 136}};
    int which = 0;
    for (const auto &f : few)
        for (int round = 0; round < (f.E * f.H * f.I < 700000 ? 12 : 4); round++, which++) {
            const int kind = round % 4, some = which % 3;
            Case q = c;
            q.T = f.T, q.k = f.k, q.E = f.E, q.H = f.H, q.I = f.I;
            q.dtype = q.gtype = some == 1 ? FMOE_F16 : FMOE_BF16;
            q.flags = some == 1 ? FMOE_SKIP_NEG1 | FMOE_SKIP_E : 0;
            q.run_flags = some == 2 ? FMOE_ADD_OUT : 0;
            q.id_type = some == 1 ? -32 : -64;
            q.skew = some == 2 ? 60 : 0;
            if (kind == 0 || (kind == 3 && coin())) q.act = 16 + which % 5;
            q.list = kind == 1 || kind == 3;
            q.scatter = round / 4;
            if (!q.list && which % 2) q.flags |= FMOE_BIAS | FMOE_INTERLEAVED;
            if (kind >= 2) q.rank1 = ranks[which % 7][0], q.rank2 = ranks[which % 7][1], q.wanted = 15;
            q.turned = which % 11 == 10 ? 15 : 0;
            q.dp = false; // of one token the few dot products may all cancel
            const bool adapted = q.rank1 || q.rank2,
                       fits = q.rank1 % 8 == 0 && q.rank2 <= 128 && !(adapted && q.turned);
            if (fits && !(q.list && q.scatter == 2)) q.launches = 2 + (q.rank1 ? 1 : 0) + (q.rank2 ? 1 : 0);
            run_case(q);
            q.flags |= FMOE_SAME_BITS;
            run_case(q);
        }
    for (int64_t E : {448, 449}) { // as many matrices as launch parameters hold, and more
        Case q = c;
        q.T = 3, q.k = 4, q.E = E, q.H = 64, q.I = 16, q.run_flags = 0, q.list = true, q.scatter = 1;
        q.launches = E == 448 ? 2 : 0;
        run_case(q);
        q.list = false, q.rank1 = q.rank2 = 8, q.wanted = 15, q.launches *= 2;
        run_case(q);
    }
    c.flags = 0;
    // Lists anywhere in memory, every activation, biases: the fused products.
    c.T = 200, c.H = 192, c.I = 136, c.E = 5;
    c.list = true;
    for (c.scatter = 0; c.scatter < 3; c.scatter++) run_case(c);
    c.list = false;
    for (int act : {1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20})
        for (uint32_t flags : {0u, (uint32_t)FMOE_BIAS, (uint32_t)(FMOE_BIAS | FMOE_INTERLEAVED | FMOE_RECOMPUTE)}) {
            c.act = act, c.flags = flags;
            run_case(c);
        }
    // Adapters: several row tiles and column tiles, ranks within and beyond a step of the products, lists, every order
    // of h.
    c.act = 0, c.wanted = 15;
    for (uint32_t flags : {0u, (uint32_t)FMOE_INTERLEAVED, (uint32_t)(FMOE_RECOMPUTE | FMOE_BIAS)})
        for (int64_t rank : {8, 16, 72, 300}) {
            c.flags = flags, c.rank1 = rank, c.rank2 = rank == 72 ? 5 : rank;
            c.T = 300, c.H = 576, c.I = 328, c.E = 4;
            run_case(c);
        }
    c.list = true, c.scatter = 1, c.flags = FMOE_INTERLEAVED, c.rank1 = c.rank2 = 16;
    run_case(c);
    // As further steps of the products: every activation, stacks and lists, biases.
    c.T = 200, c.H = 192, c.I = 136, c.E = 5;
    for (int act : {1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20})
        for (uint32_t flags : {0u, (uint32_t)FMOE_BIAS, (uint32_t)FMOE_RECOMPUTE}) {
            c.act = act, c.flags = flags, c.rank1 = 8 * pick(1, 10), c.rank2 = 8 * pick(1, 10);
            c.list = !(flags & FMOE_BIAS) && act % 2;
            run_case(c);
        }
    // Rows for tiles of 128 x 256, an odd number of them too, and every number of 16s in the last step; experts with
    // none of the rows.
    c.act = 0, c.list = false, c.H = 320, c.I = 192;
    for (int64_t rank : {1, 8, 16, 24, 40, 56, 64, 72, 128}) {
        c.flags = rank == 24 ? FMOE_RECOMPUTE : rank == 40 ? FMOE_REUSE_SAVED : rank == 56 ? FMOE_BORROW_DW1 : 0;
        c.run_flags = c.flags & FMOE_BORROW_DW1 ? 0 : FMOE_ACCUMULATE;
        c.dtype = c.gtype = rank == 16 || rank == 72 ? FMOE_F16 : FMOE_BF16;
        c.list = rank == 8 || rank == 72;
        c.T = rank % 16 ? 520 : 440, c.E = 2, c.k = 2, c.rank1 = rank, c.rank2 = rank == 64 ? 16 : rank;
        run_case(c);
    }
    c.dtype = c.gtype = FMOE_BF16, c.flags = 0, c.E = 3, c.k = 3, c.skew = 100, c.T = 420, c.rank1 = 32, c.rank2 = 48;
    run_case(c);
    c.list = false, c.k = 2, c.skew = 0, c.rank1 = c.rank2 = c.wanted = 0;
    for (int act : {1, 2, 4, 5, 6}) { // in the epilogue of those tiles, but for the first
        c.act = act, c.dtype = c.gtype = act == 2 ? FMOE_F16 : FMOE_BF16, c.E = 2, c.T = 440;
        run_case(c);
    }
    // Weights [in,out]: gates and ups apart and as neighbours, for tiles of tokens and of 128 x 256, W2 either way,
    // tiles of dh of 192 and 128.
    for (int round = 0; round < 28; round++) {
        c.act = round % 7, c.flags = (round & 1 ? FMOE_INTERLEAVED : 0) | (round & 2 ? FMOE_BIAS : 0) |
                                     (round % 5 == 4 ? FMOE_RECOMPUTE
                                      : round % 3    ? FMOE_REUSE_SAVED
                                                     : 0) |
                                     (round & 12 ? FMOE_BORROW_DW1 : 0);
        c.run_flags = round & 12 ? round & 2 ? FMOE_ADD_DX : 0 : FMOE_ACCUMULATE;
        if (round & 1 && round % 4 != 3) c.act = round & 4 ? 0 : 5; // what neighbours are fused for
        c.dtype = c.gtype = round % 6 == 5 ? FMOE_F16 : FMOE_BF16;
        c.w1_t = true, c.w2_t = round % 8 != 7, c.dw1_t = c.dw2_t = round % 4 == 2;
        c.T = round & 8 ? 60 : 440, c.H = 320, c.I = round & 4 ? 320 : round % 9 == 8 ? 136 : 192, c.E = 2, c.k = 2;
        c.rank1 = round & 16 ? 16 * pick(1, 5) : 0, c.rank2 = round & 16 ? 8 * pick(1, 9) : 0, c.turned = c.wanted = 15;
        run_case(c);
    }
    c.w1_t = c.w2_t = c.dw1_t = c.dw2_t = false, c.rank1 = c.rank2 = c.turned = c.wanted = 0;
    c.dtype = c.gtype = FMOE_BF16;
    // More experts than counters fit.
    c.act = 0, c.flags = c.run_flags = 0, c.T = 60, c.H = 64, c.I = 8, c.E = 13000;
    run_case(c);
}
