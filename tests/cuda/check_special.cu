// SPDX-License-Identifier: Apache-2.0
// check_special.cu - the layer on the GPU in special cases: bad ids, no tokens, a NaN that stays at home, graph
// capture, more than 2^31 elements.
#include "check.cuh"

struct Small { // a layer of fixed size with everything on the device
    Pair p;
    Tensor x, ids, pr, out, dout, dx, dp, w1, w2, dw1, dw2;
    static fmoe_desc desc(int64_t E, uint32_t flags)
    {
        fmoe_desc d = {};
        d.size = sizeof d;
        d.op = FMOE_OP_EXPERTS;
        d.dtype = FMOE_BF16;
        d.H = 256, d.I = 128, d.E = E, d.k = 2;
        d.flags = flags;
        return d;
    }
    Small(int64_t T, int64_t E, uint32_t flags) : p(desc(E, flags))
    {
        const int64_t H = 256, I = 128;
        for (Tensor *t : {&x, &out, &dout, &dx}) t->init(FMOE_BF16, {T, H}), t->fill(normal), t->upload();
        ids.init(-32, {T, 2});
        for (auto &v : ids.ints) v = pick(0, E - 1);
        ids.upload();
        for (Tensor *t : {&pr, &dp}) t->init(FMOE_F32, {T, 2}), t->fill(uniform), t->upload();
        for (Tensor *t : {&w1, &dw1})
            t->init(FMOE_BF16, {E, 2 * I, H}), t->fill([] { return 0.06 * normal(); }), t->upload();
        for (Tensor *t : {&w2, &dw2})
            t->init(FMOE_BF16, {E, H, I}), t->fill([] { return 0.09 * normal(); }), t->upload();
    }
    fmoe_experts_args args(bool backward)
    {
        fmoe_experts_args a = {};
        a.size = sizeof a;
        a.x = &x.dev_t, a.ids = &ids.dev_t, a.weights = &pr.dev_t, a.w.w1 = &w1.dev_t, a.w.w2 = &w2.dev_t;
        a.saved = p.dev_saved, a.saved_bytes = p.dev_saved_bytes;
        if (!backward) a.out = &out.dev_t;
        else a.dout = &dout.dev_t, a.dx = &dx.dev_t, a.dweights = &dp.dev_t, a.dw.w1 = &dw1.dev_t, a.dw.w2 = &dw2.dev_t;
        return a;
    }
};

static void bad_ids()
{
    arena.reset();
    context = "bad ids";
    Small s(50, 6, 0);
    const int64_t keep = s.ids.ints[31];
    s.ids.ints[31] = 77;
    s.ids.upload();
    fmoe_run f = s.p.dev_run(FMOE_FORWARD, 50, 0);
    fmoe_experts_args a = s.args(false);
    verdict(s.p.dev.backend->experts[0](&s.p.dev, &a, &f) == FMOE_OK, "the call itself passes");
    CK(cudaDeviceSynchronize());
    verdict(s.p.dev.backend->experts[0](&s.p.dev, &a, &f) == FMOE_ERR_INDEX, "the next call reports it");
    s.ids.ints[31] = keep;
    s.ids.upload();
    CK(cudaDeviceSynchronize());
    verdict(s.p.dev.backend->experts[0](&s.p.dev, &a, &f) == FMOE_OK, "then all is well");
    CK(cudaDeviceSynchronize());
    verdict(s.p.dev.backend->experts[0](&s.p.dev, &a, &f) == FMOE_OK, "and stays so");
    CK(cudaDeviceSynchronize());
    check_guards();
}

static void no_tokens()
{
    arena.reset();
    context = "no tokens";
    Small s(0, 5, 0);
    fmoe_run f = s.p.dev_run(FMOE_FORWARD, 0, 0), b = s.p.dev_run(FMOE_BACKWARD, 0, 0);
    fmoe_experts_args a = s.args(false);
    verdict(s.p.dev.backend->experts[0](&s.p.dev, &a, &f) == FMOE_OK, "forward");
    a = s.args(true);
    verdict(s.p.dev.backend->experts[1](&s.p.dev, &a, &b) == FMOE_OK, "backward");
    CK(cudaDeviceSynchronize());
    bool zero = true;
    for (Tensor *t : {&s.dw1, &s.dw2})
        for (double v : t->download()) zero &= v == 0;
    verdict(zero, "gradients of weights are zero");
    check_guards();
}

static void nan_stays()
{
    for (int64_t T : {7, 200}) {
        arena.reset();
        context = "NaN in one token";
        Small s(T, 3, 0);
        fmoe_run f = s.p.dev_run(FMOE_FORWARD, T, 0), b = s.p.dev_run(FMOE_BACKWARD, T, 0);
        fmoe_experts_args a = s.args(false), g = s.args(true);
        s.p.dev.backend->experts[0](&s.p.dev, &a, &f);
        s.p.dev.backend->experts[1](&s.p.dev, &g, &b);
        CK(cudaDeviceSynchronize());
        const std::vector<double> out = s.out.download(), dx = s.dx.download(), dp = s.dp.download();
        const int64_t bad = T / 2;
        for (int i = 0; i < 256; i++) s.x.ref[(size_t)(bad * 256 + i)] = s.dout.ref[(size_t)(bad * 256 + i)] = NAN;
        s.x.upload(), s.dout.upload();
        for (int saved = 1; saved >= 0; saved--) {
            if (!saved) a.saved = nullptr;
            s.p.dev.backend->experts[0](&s.p.dev, &a, &f);
            if (saved) s.p.dev.backend->experts[1](&s.p.dev, &g, &b);
            CK(cudaDeviceSynchronize());
            const std::vector<double> o = s.out.download(), x = s.dx.download(), q = s.dp.download();
            bool same = true;
            for (int64_t i = 0; i < T * 256; i++)
                if (i / 256 != bad)
                    same &= saved ? o[(size_t)i] == out[(size_t)i] && x[(size_t)i] == dx[(size_t)i]
                                  : std::isfinite(o[(size_t)i]);
            for (int64_t i = 0; saved && i < T * 2; i++)
                if (i / 2 != bad) same &= q[(size_t)i] == dp[(size_t)i];
            verdict(same, "other tokens keep their results (T %lld, saved %d)", (long long)T, saved);
        }
        check_guards();
    }
}

static void graph()
{
    for (int64_t T : {3, 150}) {
        arena.reset();
        context = "graph capture";
        Small s(T, 8, 0);
        cudaStream_t stream;
        CK(cudaStreamCreate(&stream));
        fmoe_run f = s.p.dev_run(FMOE_FORWARD, T, 0, stream), b = s.p.dev_run(FMOE_BACKWARD, T, 0, stream);
        fmoe_experts_args a = s.args(false), g = s.args(true), i = a;
        i.saved = nullptr;
        s.p.dev.backend->experts[0](&s.p.dev, &i, &f);
        CK(cudaDeviceSynchronize());
        const std::vector<char> inference = s.out.raw();
        s.p.dev.backend->experts[0](&s.p.dev, &a, &f);
        s.p.dev.backend->experts[1](&s.p.dev, &g, &b);
        CK(cudaDeviceSynchronize());
        const std::vector<char> out = s.out.raw(), dx = s.dx.raw(), dw = s.dw1.raw();
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        verdict(s.p.dev.backend->experts[0](&s.p.dev, &a, &f) == FMOE_OK &&
                    s.p.dev.backend->experts[1](&s.p.dev, &g, &b) == FMOE_OK,
                "captured");
        CK(cudaStreamEndCapture(stream, &graph));
        CK(cudaGraphInstantiate(&exec, graph, 0));
        s.out.poison(), s.dx.poison(), s.dw1.poison();
        for (int n = 0; n < 3; n++) CK(cudaGraphLaunch(exec, stream));
        CK(cudaStreamSynchronize(stream));
        verdict(s.out.raw() == out && s.dx.raw() == dx && s.dw1.raw() == dw, "replay gives the same bits (T %lld)",
                (long long)T);
        CK(cudaGraphExecDestroy(exec));
        CK(cudaGraphDestroy(graph));
        CK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        verdict(s.p.dev.backend->experts[0](&s.p.dev, &i, &f) == FMOE_OK, "inference captured");
        CK(cudaStreamEndCapture(stream, &graph));
        CK(cudaGraphInstantiate(&exec, graph, 0));
        s.out.poison();
        for (int n = 0; n < 3; n++) CK(cudaGraphLaunch(exec, stream));
        CK(cudaStreamSynchronize(stream));
        verdict(s.out.raw() == inference, "replay of inference gives the same bits (T %lld)", (long long)T);
        CK(cudaGraphExecDestroy(exec));
        CK(cudaGraphDestroy(graph));
        CK(cudaStreamDestroy(stream));
        check_guards();
    }
}

// More than 2^31 elements in a buffer: the last tokens of a large batch against the same tokens alone. Needs 24 GB of
// the device.
void check_big()
{
    context = "more than 2^31 elements";
    const int64_t T = 33000, few = 40, H = 2048, I = 64, E = 64, k = 32;
    arena.reset();
    fmoe_desc d = {};
    d.size = sizeof d;
    d.op = FMOE_OP_EXPERTS;
    d.dtype = FMOE_BF16;
    d.H = H, d.I = I, d.E = E, d.k = k;
    Pair p(d);
    Tensor x, dout, ids, pr, w1, w2, out[2], dx[2];
    x.init(FMOE_BF16, {T, H}), dout.init(FMOE_BF16, {T, H});
    for (Tensor *t : {&x, &dout})
        for (size_t i = 0; i < t->ref.size(); i++)
            t->ref[i] = (double)(int64_t)(rng() % 255) / 64 - 2, t->ref[i] = round_to(t->ref[i], FMOE_BF16);
    ids.init(-32, {T, k});
    for (auto &v : ids.ints) v = pick(0, E - 1);
    pr.init(FMOE_F32, {T, k});
    pr.fill(uniform);
    w1.init(FMOE_BF16, {E, 2 * I, H}), w1.fill([] { return 0.03 * normal(); });
    w2.init(FMOE_BF16, {E, H, I}), w2.fill([] { return 0.1 * normal(); });
    for (Tensor *t : {&x, &dout, &ids, &pr, &w1, &w2}) t->upload();
    for (int run = 0; run < 2; run++) {
        const int64_t n = run ? few : T, skip = T - n;
        out[run].init(FMOE_BF16, {n, H}), dx[run].init(FMOE_BF16, {n, H});
        fmoe_tensor xt = x.dev_t, gt = dout.dev_t, it = ids.dev_t, pt = pr.dev_t;
        int64_t rows[2] = {n, H}, slots[2] = {n, k};
        xt.shape = gt.shape = rows, it.shape = pt.shape = slots;
        xt.byte_offset = gt.byte_offset = (uint64_t)(skip * H * 2),
        it.byte_offset = pt.byte_offset = (uint64_t)(skip * k * 4);
        fmoe_run f = p.dev_run(FMOE_FORWARD, n, 0), b = p.dev_run(FMOE_BACKWARD, n, 0);
        fmoe_experts_args a = {};
        a.size = sizeof a;
        a.x = &xt, a.ids = &it, a.weights = &pt, a.w.w1 = &w1.dev_t, a.w.w2 = &w2.dev_t, a.out = &out[run].dev_t;
        a.saved = p.dev_saved, a.saved_bytes = p.dev_saved_bytes;
        verdict(p.dev.backend->experts[0](&p.dev, &a, &f) == FMOE_OK, "forward");
        a.out = nullptr, a.dout = &gt, a.dx = &dx[run].dev_t;
        verdict(p.dev.backend->experts[1](&p.dev, &a, &b) == FMOE_OK, "backward");
        CK(cudaDeviceSynchronize());
    }
    for (int i = 0; i < 2; i++) {
        const std::vector<double> all = (i ? dx[0] : out[0]).download(), last = (i ? dx[1] : out[1]).download();
        double e2 = 0, r2 = 0;
        for (int64_t j = 0; j < few * H; j++) {
            const double v = all[(size_t)((T - few) * H + j)], r = last[(size_t)j];
            e2 += (v - r) * (v - r), r2 += r * r;
        }
        verdict(std::isfinite(e2) && r2 > 0 && e2 <= 1e-6 * r2, "%s: relative L2 %.3e", i ? "dx" : "out",
                sqrt(e2 / r2));
    }
    check_guards();
}

// That the guards see a byte written just outside of a buffer, or as far off as they reach, on either side.
static void guards()
{
    arena.reset();
    context = "guards";
    char *const p = (char *)arena.take(100);
    verdict(arena.broken().empty(), "untouched");
    for (const int64_t at : {(int64_t)-1, -(int64_t)Arena::kGuard, (int64_t)100, 99 + (int64_t)Arena::kGuard}) {
        CK(cudaMemset(p + at, 0, 1));
        verdict(!arena.broken().empty(), "byte %lld of 100 is seen", (long long)at);
        CK(cudaMemset(p + at, Arena::kPoison, 1));
    }
    CK(cudaMemset(p, 0, 100));
    check_guards();
}

void check_special()
{
    guards();
    bad_ids();
    no_tokens();
    nan_stays();
    graph();
}
