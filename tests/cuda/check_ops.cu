// SPDX-License-Identifier: Apache-2.0
// check_ops.cu - route, permute, unpermute, grouped matmul, activation on the GPU against the reference.
#include "check.cuh"

static int any_dtype()
{
    static const int types[] = {FMOE_F32, FMOE_BF16, FMOE_F16};
    return types[pick(0, 2)];
}
static int int_type() { return coin() ? -32 : -64; }
static const char *dtype_name(int d) { return d == FMOE_F32 ? "f32" : d == FMOE_BF16 ? "bf16" : "f16"; }

template <class... A> static void set_context(const char *format, A... a)
{
    char text[512];
    snprintf(text, sizeof text, format, a...);
    context = text;
}

// ---- route ----

static void one_route()
{
    arena.reset();
    fmoe_desc d = {};
    d.size = sizeof d;
    d.op = FMOE_OP_ROUTE;
    d.dtype = any_dtype();
    static const int64_t sizes[] = {1, 3, 8, 31, 64, 128, 160, 256, 512, 1000, 7000};
    d.E = sizes[pick(0, coin(10) ? 10 : 9)];
    d.k = pick(1, d.E < 10 ? d.E : 10);
    d.route.score = (int32_t)pick(0, 3);
    d.route.renormalize = coin();
    d.route.eps = coin() ? 0 : 1e-20;
    d.route.scale = coin() ? 1 : 2.5;
    if (d.E % 8 == 0 && coin()) {
        d.route.groups = 8;
        d.route.group_score = (int32_t)pick(0, 1);
        d.route.topk_groups = (int32_t)pick(1, 8);
        d.route.excluded_zero = coin(20);
        while (d.k > d.E / 8 * d.route.topk_groups) d.route.topk_groups++;
    }
    const int64_t T = pick(0, 70);
    const int wide = coin() ? FMOE_F32 : d.dtype, wt = coin() ? FMOE_F32 : d.dtype;
    set_context("route dtype %s E %lld k %lld T %lld score %d renorm %d groups %d/%d gs %d", dtype_name(d.dtype),
                (long long)d.E, (long long)d.k, (long long)T, d.route.score, d.route.renormalize, d.route.topk_groups,
                d.route.groups, d.route.group_score);
    Pair p(d);
    Tensor logits, bias, ids, weights, bad, dweights, dlogits;
    logits.init(FMOE_F32, {T, d.E}, {}, coin() ? 3 : 0);
    // Distinct multiples of 1/128 (of very many experts 1/1024, or their sigmoids would be 1 in f32), whose sums with
    // the biases are exact in f32 too: rounding cannot change the choice.
    for (int64_t t = 0; t < T; t++) {
        std::vector<int64_t> perm((size_t)d.E);
        for (int64_t e = 0; e < d.E; e++) perm[(size_t)e] = e;
        for (int64_t e = d.E - 1; e > 0; e--) std::swap(perm[(size_t)e], perm[(size_t)pick(0, e)]);
        for (int64_t e = 0; e < d.E; e++)
            logits.ref[(size_t)(t * logits.strides[0] + e)] =
                ((double)perm[(size_t)e] - (double)(d.E / 2)) / (d.E > 1000 ? 1024 : 128);
    }
    for (auto &v : logits.ref)
        if (std::isnan(v)) v = 0;
    bias.init(FMOE_F32, {d.E});
    bias.fill([] { return (double)pick(-3, 3) * 0.25; });
    const bool with_bias = coin(40);
    ids.init(int_type(), {T, d.k});
    weights.init(wt, {T, d.k});
    bad.init(-64, {1});
    dweights.init(wt, {T, d.k});
    dweights.fill(normal);
    dlogits.init(wide, {T, d.E});
    for (Tensor *t : {&logits, &bias, &ids, &dweights}) t->upload();
    fmoe_route_args a = {};
    a.size = sizeof a;
    a.logits = &logits.ref_t, a.ids = &ids.ref_t, a.weights = &weights.ref_t, a.bad_rows = &bad.ref_t;
    a.select_bias = with_bias ? &bias.ref_t : nullptr;
    fmoe_run r = p.ref_run(FMOE_FORWARD, T, 0);
    // With a bias, or zero scores of excluded experts, equal sums are possible: compare weights only where ids agree
    // exactly.
    verdict(p.ref.backend->route[0](&p.ref, &a, &r) == FMOE_OK, "reference");
    fmoe_route_args q = a;
    q.logits = &logits.dev_t, q.ids = &ids.dev_t, q.weights = &weights.dev_t, q.bad_rows = &bad.dev_t;
    q.select_bias = with_bias ? &bias.dev_t : nullptr;
    fmoe_run dr = p.dev_run(FMOE_FORWARD, T, 0);
    verdict(p.dev.backend->route[0](&p.dev, &q, &dr) == FMOE_OK, "forward: %s", "status");
    CK(cudaDeviceSynchronize());
    compare_ints("ids", ids);
    compare_ints("bad_rows", bad);
    const double u = unit(wt) + 0x1p-20;
    compare("weights", weights, 2 * u, 2 * u);
    // Backward, on the reference's ids.
    fmoe_route_args b = {};
    b.size = sizeof b;
    b.logits = &logits.ref_t, b.ids = &ids.ref_t, b.dweights = &dweights.ref_t, b.dlogits = &dlogits.ref_t;
    r = p.ref_run(FMOE_BACKWARD, T, 0);
    p.ref.backend->route[1](&p.ref, &b, &r);
    b.logits = &logits.dev_t, b.ids = &ids.dev_t, b.dweights = &dweights.dev_t, b.dlogits = &dlogits.dev_t;
    dr = p.dev_run(FMOE_BACKWARD, T, 0);
    verdict(p.dev.backend->route[1](&p.dev, &b, &dr) == FMOE_OK, "backward");
    CK(cudaDeviceSynchronize());
    // Differences of close numbers (renormalised, k = 1): the error is relative to what was subtracted.
    double top = 0;
    for (double v : dweights.ref) top = std::fmax(top, std::fabs(v));
    const std::vector<double> got = dlogits.download();
    double worst = 0;
    dlogits.each([&](int64_t i) {
        worst = std::fmax(worst, std::fabs(got[(size_t)i] - dlogits.ref[(size_t)i]) -
                                     unit(wide) * std::fabs(dlogits.ref[(size_t)i]) * 2);
    });
    verdict(worst <= 0x1p-18 * top * d.route.scale * (double)d.k, "dlogits: worst %.3e of %.3e", worst, top);
    check_guards();
}

static void route_rows_that_are_bad()
{
    arena.reset();
    context = "route: NaN, Inf, -Inf";
    fmoe_desc d = {};
    d.size = sizeof d;
    d.op = FMOE_OP_ROUTE;
    d.dtype = FMOE_F32;
    d.E = 40;
    d.k = 5;
    for (int score = 0; score < 4; score++) {
        d.route.score = score;
        Pair p(d);
        Tensor logits, ids, weights, bad;
        logits.init(FMOE_F32, {6, 40});
        logits.fill(normal);
        logits.ref[3] = NAN;
        logits.ref[40 + 7] = INFINITY;
        for (int e = 0; e < 40; e++) logits.ref[(size_t)(80 + e)] = -INFINITY;
        for (int e = 0; e < 37; e++) logits.ref[(size_t)(120 + e)] = -INFINITY;
        ids.init(-32, {6, 5});
        weights.init(FMOE_F32, {6, 5});
        bad.init(-64, {1});
        logits.upload();
        fmoe_route_args a = {};
        a.size = sizeof a;
        a.logits = &logits.ref_t, a.ids = &ids.ref_t, a.weights = &weights.ref_t, a.bad_rows = &bad.ref_t;
        fmoe_run r = p.ref_run(FMOE_FORWARD, 6, 0), dr = p.dev_run(FMOE_FORWARD, 6, 0);
        p.ref.backend->route[0](&p.ref, &a, &r);
        a.logits = &logits.dev_t, a.ids = &ids.dev_t, a.weights = &weights.dev_t, a.bad_rows = &bad.dev_t;
        verdict(p.dev.backend->route[0](&p.dev, &a, &dr) == FMOE_OK, "status");
        CK(cudaDeviceSynchronize());
        compare_ints("ids", ids);
        compare_ints("bad_rows", bad);
        check_guards();
    }
}

void check_route()
{
    for (int i = 0; i < 30; i++) one_route();
    route_rows_that_are_bad();
}

// ---- permute ----

void check_permute()
{
    for (int i = 0; i < 16; i++) {
        arena.reset();
        fmoe_desc d = {};
        d.size = sizeof d;
        d.op = FMOE_OP_PERMUTE;
        d.dtype = any_dtype();
        d.H = coin() ? pick(1, 70) : 8 * pick(1, 40);
        d.E = i == 1 ? 30000 : coin() ? pick(1, 9) : pick(100, 1500);
        d.k = pick(1, 6);
        d.flags = (coin() ? FMOE_SKIP_NEG1 : 0) | (coin() ? FMOE_SKIP_E : 0);
        const int64_t T = i == 0 ? 0 : coin(20) ? pick(1000, 3000) : pick(1, 300), R = T * d.k;
        set_context("permute %s H %lld E %lld k %lld T %lld flags %u", dtype_name(d.dtype), (long long)d.H,
                    (long long)d.E, (long long)d.k, (long long)T, d.flags);
        Pair p(d);
        Tensor x, ids, xp, map, counts, weights, out, dout, dy, dweights, dx;
        x.init(d.dtype, {T, d.H}, {}, coin() ? 8 : 0);
        x.fill(normal);
        ids.init(int_type(), {T, d.k});
        for (auto &v : ids.ints) {
            v = pick(0, d.E - 1);
            if ((d.flags & FMOE_SKIP_NEG1) && coin(10)) v = -1;
            if ((d.flags & FMOE_SKIP_E) && coin(10)) v = d.E;
        }
        xp.init(d.dtype, {R, d.H});
        map.init(int_type(), {R});
        counts.init(int_type(), {d.E});
        const int wt = coin() ? FMOE_F32 : d.dtype;
        weights.init(wt, {T, d.k});
        weights.fill(uniform);
        out.init(d.dtype, {T, d.H});
        dout.init(d.dtype, {T, d.H});
        dout.fill(normal);
        dy.init(d.dtype, {R, d.H});
        dweights.init(wt, {T, d.k});
        dx.init(d.dtype, {T, d.H});
        for (Tensor *t : {&x, &ids, &weights, &dout}) t->upload();
        const double u = unit(d.dtype) + (double)d.k * 0x1p-24;

        fmoe_permute_args a = {sizeof a, &x.ref_t, &ids.ref_t, &xp.ref_t, &map.ref_t, &counts.ref_t};
        fmoe_run r = p.ref_run(FMOE_FORWARD, T, 0), dr = p.dev_run(FMOE_FORWARD, T, 0);
        p.ref.backend->permute[0](&p.ref, &a, &r);
        a = {sizeof a, &x.dev_t, &ids.dev_t, &xp.dev_t, &map.dev_t, &counts.dev_t};
        verdict(p.dev.backend->permute[0](&p.dev, &a, &dr) == FMOE_OK, "forward");
        CK(cudaDeviceSynchronize());
        compare("xp", xp, 0, 0);
        compare_ints("map", map);
        compare_ints("counts", counts);

        a = {sizeof a, &dx.ref_t, nullptr, &xp.ref_t, &map.ref_t, nullptr};
        p.ref.backend->permute[1](&p.ref, &a, &r);
        a = {sizeof a, &dx.dev_t, nullptr, &xp.dev_t, &map.dev_t, nullptr};
        verdict(p.dev.backend->permute[1](&p.dev, &a, &dr) == FMOE_OK, "backward");
        CK(cudaDeviceSynchronize());
        compare("dx", dx, 2 * u, 2 * u);

        const bool weighted = coin(70);
        fmoe_unpermute_args b = {};
        b.size = sizeof b;
        b.y = &xp.ref_t, b.map = &map.ref_t, b.weights = weighted ? &weights.ref_t : nullptr, b.out = &out.ref_t;
        p.ref.backend->unpermute[0](&p.ref, &b, &r);
        b.y = &xp.dev_t, b.map = &map.dev_t, b.weights = weighted ? &weights.dev_t : nullptr, b.out = &out.dev_t;
        verdict(p.dev.backend->unpermute[0](&p.dev, &b, &dr) == FMOE_OK, "unpermute forward");
        CK(cudaDeviceSynchronize());
        compare("out", out, 2 * u, 2 * u);

        b.y = &xp.ref_t, b.map = &map.ref_t, b.weights = weighted ? &weights.ref_t : nullptr, b.out = nullptr;
        b.dout = &dout.ref_t, b.dy = &dy.ref_t, b.dweights = &dweights.ref_t;
        p.ref.backend->unpermute[1](&p.ref, &b, &r);
        b.y = &xp.dev_t, b.map = &map.dev_t, b.weights = weighted ? &weights.dev_t : nullptr;
        b.dout = &dout.dev_t, b.dy = &dy.dev_t, b.dweights = &dweights.dev_t;
        verdict(p.dev.backend->unpermute[1](&p.dev, &b, &dr) == FMOE_OK, "unpermute backward");
        CK(cudaDeviceSynchronize());
        compare("dy", dy, 2 * u, 2 * u);
        const double ud = unit(wt) + (double)d.H * 0x1p-24;
        compare("dweights", dweights, 4 * ud, 4 * ud);
        check_guards();
    }
}

// ---- grouped matmul: |y - ref| <= u |ref| + (n + 4) 2^-24 sum |a b| ----

static void bound_gmm(const char *name, const Tensor &t, const std::vector<double> &magnitude, double n)
{
    const std::vector<double> got = t.download();
    double worst = 0;
    t.each([&](int64_t i) {
        const double bound =
            1.01 * (unit(t.dtype) * std::fabs(t.ref[(size_t)i]) + (n + 4) * 0x1p-24 * magnitude[(size_t)i]) + 1e-30;
        const double ratio = std::fabs(got[(size_t)i] - t.ref[(size_t)i]) / bound;
        worst = std::isnan(ratio) ? INFINITY : std::fmax(worst, ratio);
    });
    verdict(worst <= 1, "%s: %.2f times the bound", name, worst);
}

static void one_gmm(int index)
{
    arena.reset();
    fmoe_desc d = {};
    d.size = sizeof d;
    d.op = FMOE_OP_GROUPED_MATMUL;
    d.dtype = any_dtype();
    // alike: as one stack would be, its rows one after the other.
    const bool list = coin(40), alike = list && coin(), odd = coin();
    d.E = coin(30) ? 1 : pick(2, 7);
    d.K = odd ? pick(1, 90) : 16 * pick(1, 12);
    d.N = odd ? pick(1, 150) : 16 * pick(1, 12);
    const int wide = coin(60) ? d.dtype : FMOE_F32, gt = coin() ? d.dtype : FMOE_F32;
    const bool cumulative = coin(), bias_on = coin(), w_t = coin(), dw_t = coin();
    uint32_t flags = (coin() ? FMOE_ACCUMULATE : 0) | (coin() ? FMOE_ADD_DX : 0);
    std::vector<int64_t> size((size_t)d.E);
    int64_t R = 0;
    for (auto &n : size) n = coin(20) ? 0 : pick(1, coin(20) ? 400 : 60), R += n;
    const bool no_sizes = d.E == 1 && !list && coin();
    const int64_t total = R + (no_sizes || list ? 0 : coin() ? pick(1, 50) : 0);
    if (index == 0) R = 0;
    set_context("gmm %s E %lld K %lld N %lld R %lld list %d alike %d wide %d grads %s flags %u w_t %d dw_t %d bias %d "
                "cumulative %d",
                dtype_name(d.dtype), (long long)d.E, (long long)d.K, (long long)d.N, (long long)total, list, alike,
                wide, dtype_name(gt), flags, w_t, dw_t, bias_on, cumulative);
    fmoe_desc made = d;
    if (list) made.K = made.N = 0;
    Pair p(made);
    std::deque<Tensor> x, w, bias, y, dy, dx, dw, dbias, abs_y, abs_dx, abs_dw;
    const int64_t G = list ? d.E : 1;
    Tensor sizes;
    sizes.init(int_type(), {d.E});
    int64_t sum = 0;
    for (int64_t e = 0; e < d.E; e++)
        sum += size[(size_t)e], sizes.ints[(size_t)e] = cumulative ? sum : size[(size_t)e];
    sizes.upload();
    std::vector<fmoe_tensor> v[2][8];
    for (int64_t g = 0; g < G; g++) {
        const int64_t rows = list       ? size[(size_t)g]
                             : no_sizes ? R
                                        : total,
                      K = list && !alike ? pick(1, 64) : d.K, N = list && !alike ? pick(1, 64) : d.N;
        auto dims = [&](int64_t a, int64_t b) {
            return list ? std::vector<int64_t>{a, b} : std::vector<int64_t>{d.E, a, b};
        };
        auto order = [&](bool t) {
            return list ? (t ? std::vector<int>{1, 0} : std::vector<int>{0, 1})
                        : (t ? std::vector<int>{0, 2, 1} : std::vector<int>{0, 1, 2});
        };
        for (std::deque<Tensor> *t : {&x, &w, &bias, &y, &dy, &dx, &dw, &dbias}) t->emplace_back();
        x[g].init(d.dtype, {rows, K});
        w[g].init(d.dtype, dims(K, N), order(w_t));
        bias[g].init(d.dtype, list ? std::vector<int64_t>{N} : std::vector<int64_t>{d.E, N});
        y[g].init(wide, {rows, N});
        dy[g].init(wide, {rows, N});
        dx[g].init(d.dtype, {rows, K});
        dw[g].init(gt, dims(K, N), order(dw_t));
        dbias[g].init(gt, list ? std::vector<int64_t>{N} : std::vector<int64_t>{d.E, N});
    }
    for (std::deque<Tensor> *rows : {&x, &y, &dy, &dx}) {
        char *next = alike
                         ? (char *)arena.take((size_t)(total * (*rows)[0].size(1)) * fmoe_dtype_size((*rows)[0].dtype))
                         : nullptr;
        for (Tensor &t : *rows)
            if (alike && t.span) t.dev_t.data = t.dev = next, next += t.bytes(); // one without rows lies elsewhere
    }
    for (int64_t g = 0; g < G; g++) {
        for (Tensor *t : {&x[g], &w[g], &bias[g], &dy[g], &dx[g], &dw[g], &dbias[g]}) t->fill(normal), t->upload();
        y[g].fill([] { return 7.0; }), y[g].upload(); // rows past the total are left alone
        Tensor *all[8] = {&x[g], &w[g], &bias[g], &y[g], &dy[g], &dx[g], &dw[g], &dbias[g]};
        for (int i = 0; i < 8; i++) v[0][i].push_back(all[i]->ref_t), v[1][i].push_back(all[i]->dev_t);
    }
    const double depth = (double)(total + d.K + d.N + 64);
    // 1: dx, which alone needs w; 2: dw, which alone needs x; 4: dbias.
    const int asked = coin(60) ? 7 : (int)pick(1, 7);
    for (int pass = 0; pass < 2; pass++) {
        for (int side = 0; side < 2; side++) {
            fmoe_gmm_args a = {};
            a.size = sizeof a;
            a.x = pass == 0 || asked & 2 ? v[side][0].data() : nullptr;
            a.w = pass == 0 || asked & 1 ? v[side][1].data() : nullptr;
            a.sizes = no_sizes || list ? nullptr : side ? &sizes.dev_t : &sizes.ref_t;
            a.cumulative = cumulative, a.list = list;
            if (pass == 0) a.bias = bias_on ? v[side][2].data() : nullptr, a.y = v[side][3].data();
            else {
                a.dy = v[side][4].data();
                if (asked & 1) a.dx = v[side][5].data();
                if (asked & 2) a.dw = v[side][6].data();
                if (asked & 4) a.dbias = v[side][7].data();
            }
            fmoe_run r = side ? p.dev_run((fmoe_pass)pass, total, flags) : p.ref_run((fmoe_pass)pass, total, flags);
            const fmoe_plan_impl *plan = side ? &p.dev : &p.ref;
            verdict(plan->backend->gmm[pass](plan, &a, &r) == FMOE_OK, "status of pass %d side %d", pass, side);
        }
        CK(cudaDeviceSynchronize());
        for (int64_t g = 0; g < G; g++) {
            // Inputs are normal: sum |a b| is close to n * 2/pi and surely below 4 n here, plus what was there before.
            auto flat = [&](const Tensor &t, double m) { return std::vector<double>((size_t)t.span, m); };
            if (pass == 0) bound_gmm("y", y[g], flat(y[g], 4 * (double)x[g].size(1) + 8), depth);
            else {
                if (asked & 1) bound_gmm("dx", dx[g], flat(dx[g], 4 * (double)dy[g].size(1) + 8), depth);
                if (asked & 2) bound_gmm("dw", dw[g], flat(dw[g], 4 * (double)x[g].size(0) + 8), depth);
                if (asked & 4) bound_gmm("dbias", dbias[g], flat(dbias[g], 4 * (double)x[g].size(0) + 8), depth);
            }
        }
    }
    check_guards();
}

void check_gmm()
{
    for (int i = 0; i < 60; i++) one_gmm(i);
}

// ---- activation ----

void check_activation()
{
    static const int acts[] = {0, 1, 2, 3, 4, 5, 6, 16, 17, 18, 19, 20};
    for (int i = 0; i < 36; i++) {
        arena.reset();
        fmoe_desc d = {};
        d.size = sizeof d;
        d.op = FMOE_OP_ACTIVATION;
        d.dtype = any_dtype();
        d.act = acts[i % 12];
        d.I = coin() ? pick(1, 60) : 8 * pick(1, 30);
        d.act_limit = coin() ? 1.5f : 0;
        d.flags = coin() ? FMOE_INTERLEAVED : 0;
        const int64_t R = i == 0 ? 0 : pick(1, 90);
        set_context("activation %d %s I %lld R %lld flags %u", d.act, dtype_name(d.dtype), (long long)d.I, (long long)R,
                    d.flags);
        Pair p(d);
        Tensor h, a, da, dh;
        h.init(d.dtype, {R, p.dev.h_cols}, {}, coin() ? 8 : 0);
        h.fill([] { return 2 * normal(); });
        a.init(d.dtype, {R, d.I});
        da.init(d.dtype, {R, d.I});
        da.fill(normal);
        dh.init(d.dtype, {R, p.dev.h_cols});
        h.upload(), da.upload();
        fmoe_activation_args q = {sizeof q, &h.ref_t, &a.ref_t, nullptr, nullptr};
        fmoe_run r = p.ref_run(FMOE_FORWARD, R, 0), dr = p.dev_run(FMOE_FORWARD, R, 0);
        p.ref.backend->activation[0](&p.ref, &q, &r);
        q = {sizeof q, &h.dev_t, &a.dev_t, nullptr, nullptr};
        verdict(p.dev.backend->activation[0](&p.dev, &q, &dr) == FMOE_OK, "forward");
        q = {sizeof q, &h.ref_t, nullptr, &da.ref_t, &dh.ref_t};
        p.ref.backend->activation[1](&p.ref, &q, &r);
        q = {sizeof q, &h.dev_t, nullptr, &da.dev_t, &dh.dev_t};
        verdict(p.dev.backend->activation[1](&p.dev, &q, &dr) == FMOE_OK, "backward");
        CK(cudaDeviceSynchronize());
        const double u = unit(d.dtype) + 0x1p-19;
        compare("a", a, u, u);
        compare("dh", dh, u, u);
        check_guards();
    }
}
