/* SPDX-License-Identifier: Apache-2.0
 * test_ascend_ops.c - route, permute, unpermute, grouped matmul, activation and block on the simulated NPU against the
 * reference in double. */
#include "../acts.h"
#include "device.h"

/* Both plans of a description; both runs of a call. d: device arguments, r: reference arguments. */
typedef struct pair {
    fmoe_plan npu, ref;
    int64_t rows;
} pair;

static pair pair_make(fmoe_desc d, int64_t rows)
{
    pair p = {.npu = make_plan(d, FMOE_ASCEND), .rows = rows};
    d.dtype = FMOE_F64;
    p.ref = make_plan(d, FMOE_CPU);
    return p;
}

static void pair_free(pair *p)
{
    fmoe_plan_destroy(&p->npu);
    fmoe_plan_destroy(&p->ref);
}

#define BOTH(fn, p, pass, d, r, flags)                                                                                 \
    do {                                                                                                               \
        const fmoe_run rd_ = run_for((p).npu, pass, (p).rows, FMOE_ASCEND, flags);                                     \
        const fmoe_run rr_ = run_for((p).ref, pass, (p).rows, FMOE_CPU, flags);                                        \
        npu.reset();                                                                                                   \
        CHECK_STATUS(fn((p).npu, d, &rd_), FMOE_OK);                                                                   \
        CHECK_EQ(npu.get("syncs") + npu.get("copies_h2d") + npu.get("copies_d2h"), 0);                                 \
        CHECK_STATUS(fn((p).ref, r, &rr_), FMOE_OK);                                                                   \
    } while (0)

/* ---- Route ---- */

static void route_case(fmoe_route_rule rule, int dtype, int logits_type, int ids_type, bool bias, bool count, int64_t E,
                       int64_t k)
{
    const int64_t T = 23;
    pair p = pair_make((fmoe_desc){.op = FMOE_OP_ROUTE, .dtype = dtype, .E = E, .k = k, .route = rule}, T);
    fmoe_tensor *logits = tensor_random(tensor_new(logits_type, SHAPE(T, E)), 4),
                *b = bias ? tensor_random(tensor_new(FMOE_F32, SHAPE(E)), 0.3) : NULL;
    if (count) {
        tensor_set(logits, 3, NAN);
        tensor_set(logits, 5 * E + 1, INFINITY);
        for (int64_t i = 0; i < E; i++) tensor_set(logits, 7 * E + i, -INFINITY);
    }
    fmoe_tensor *ids = tensor_new(ids_type, SHAPE(T, k)), *w = tensor_new(logits_type, SHAPE(T, k)),
                *bad = tensor_new(I64, SHAPE(1));
    fmoe_tensor *wr = tensor_new(FMOE_F64, SHAPE(T, k)), *idr = tensor_new(ids_type, SHAPE(T, k)),
                *badr = tensor_new(I64, SHAPE(1));
    fmoe_route_args d = {.size = sizeof d,
                         .logits = to_npu(logits),
                         .select_bias = to_npu(b),
                         .ids = to_npu(ids),
                         .weights = to_npu(w),
                         .bad_rows = count ? to_npu(bad) : NULL};
    fmoe_route_args r = {.size = sizeof r,
                         .logits = wide(logits),
                         .select_bias = wide(b),
                         .ids = idr,
                         .weights = wr,
                         .bad_rows = count ? badr : NULL};
    const double bound = 4 * unit(logits_type);
    BOTH(fmoe_route_forward, p, FMOE_FORWARD, &d, &r, 0);
    CHECK_EQUAL(d.ids, idr);
    if (!count) CHECK_CLOSE(d.weights, wr, bound);
    if (count) CHECK_EQUAL(d.bad_rows, badr);
    if (count) goto done; /* gradients of bad rows are not compared */
    BOTH(fmoe_route_forward, p, FMOE_FORWARD, &d, &r, FMOE_REPLAY);
    CHECK_CLOSE(d.weights, wr, bound);
    fmoe_tensor *dw = tensor_random(tensor_new(logits_type, SHAPE(T, k)), 1),
                *dl = tensor_new(logits_type, SHAPE(T, E));
    d = (fmoe_route_args){
        .size = sizeof d, .logits = d.logits, .ids = d.ids, .dweights = to_npu(dw), .dlogits = to_npu(dl)};
    r = (fmoe_route_args){.size = sizeof r, .logits = r.logits, .ids = idr, .dweights = wide(dw), .dlogits = wide(dl)};
    BOTH(fmoe_route_backward, p, FMOE_BACKWARD, &d, &r, 0);
    CHECK_CLOSE(d.dlogits, r.dlogits, 2 * bound);
done:
    pair_free(&p);
}

NPU_TEST(route_rules)
{
    for (int score = 0; score < 4; score++)
        for (int norm = 0; norm < 2; norm++) {
            const fmoe_route_rule rule = {.score = score,
                                          .renormalize = norm,
                                          .scale = score == 2 ? 2.5 : 1,
                                          .eps = score == 2  ? 0.25
                                                 : score > 2 ? 1e-20
                                                             : 0};
            route_case(rule, FMOE_F32, FMOE_F32, I64, false, false, 16, 4);
            route_case(rule, FMOE_F32, FMOE_F32, I32, true, false, 12, 3);
            route_case(rule, FMOE_F32, FMOE_F32, I64, false, true, 8, 2);
        }
}

NPU_TEST(route_groups)
{
    for (int zero = 0; zero < 2; zero++)
        for (int how = 0; how < 2; how++) {
            const fmoe_route_rule rule = {.score = FMOE_SCORE_SIGMOID,
                                          .renormalize = 1,
                                          .groups = 4,
                                          .topk_groups = 2,
                                          .group_score = how,
                                          .excluded_zero = zero,
                                          .eps = 1e-20,
                                          .scale = 2.5};
            route_case(rule, FMOE_F32, FMOE_F32, I64, true, false, 32, 6);
            route_case(rule, FMOE_BF16, FMOE_F32, I32, false, false, 16, 3);
        }
}

NPU_TEST(route_types)
{
    const fmoe_route_rule rule = {.score = FMOE_SCORE_SOFTMAX, .renormalize = 1};
    route_case(rule, FMOE_BF16, FMOE_F32, I64, false, false, 128, 8);
    route_case(rule, FMOE_BF16, FMOE_F32, I64, true, false, 64, 8);
    route_case((fmoe_route_rule){.score = FMOE_SCORE_SOFTMAX, .scale = 1.5}, FMOE_F16, FMOE_F32, I32, false, false, 5,
               5);
}

/* Equal scores: the lowest index first, in the composed path as well. */
NPU_TEST(route_ties)
{
    const int64_t T = 4, E = 9, k = 3;
    for (int bias = 0; bias < 2; bias++) {
        pair p = pair_make((fmoe_desc){.op = FMOE_OP_ROUTE, .dtype = FMOE_F32, .E = E, .k = k}, T);
        fmoe_tensor *logits = tensor_random_int(tensor_new(FMOE_F32, SHAPE(T, E)), 2),
                    *b = bias ? tensor_new(FMOE_F32, SHAPE(E)) : NULL;
        fmoe_tensor *ids = tensor_new(I64, SHAPE(T, k)), *w = tensor_new(FMOE_F32, SHAPE(T, k)),
                    *idr = tensor_new(I64, SHAPE(T, k));
        const fmoe_route_args d = {.size = sizeof d,
                                   .logits = to_npu(logits),
                                   .select_bias = to_npu(b),
                                   .ids = to_npu(ids),
                                   .weights = to_npu(w)};
        const fmoe_route_args r = {
            .size = sizeof r, .logits = wide(logits), .select_bias = wide(b), .ids = idr, .weights = wide(w)};
        BOTH(fmoe_route_forward, p, FMOE_FORWARD, &d, &r, 0);
        CHECK_EQUAL(d.ids, idr);
        pair_free(&p);
    }
}

/* MoeGatingTopKSoftmaxV2's order of equal scores and of NaN is its own: here the worst one. Without bad_rows the ids
 * are distinct, in range, and the weights are theirs. With bad_rows the operator is not used, and the ids are the
 * reference's: the lowest index first, NaN last. */
NPU_TEST(route_of_another_order)
{
    const int64_t T = 6, E = 9, k = 3;
    npu.set("gating_perverse", 1);
    for (int exact = 0; exact < 2; exact++) {
        pair p = pair_make((fmoe_desc){.op = FMOE_OP_ROUTE, .dtype = FMOE_F32, .E = E, .k = k}, T);
        fmoe_tensor *logits = tensor_random_int(tensor_new(FMOE_F32, SHAPE(T, E)), 2);
        if (exact) {
            tensor_set(logits, 2 * E + 4, NAN);
            tensor_set(logits, 3 * E + 1, INFINITY);
            for (int64_t i = 0; i < E; i++) tensor_set(logits, 4 * E + i, -INFINITY);
        }
        fmoe_tensor *ids = tensor_new(I64, SHAPE(T, k)), *w = tensor_new(FMOE_F32, SHAPE(T, k)),
                    *idr = tensor_new(I64, SHAPE(T, k)), *bad = tensor_new(I64, SHAPE(1)),
                    *badr = tensor_new(I64, SHAPE(1));
        const fmoe_route_args d = {.size = sizeof d,
                                   .logits = to_npu(logits),
                                   .ids = to_npu(ids),
                                   .weights = to_npu(w),
                                   .bad_rows = exact ? to_npu(bad) : NULL};
        const fmoe_route_args r = {
            .size = sizeof r, .logits = wide(logits), .ids = idr, .weights = wide(w), .bad_rows = exact ? badr : NULL};
        BOTH(fmoe_route_forward, p, FMOE_FORWARD, &d, &r, 0);
        CHECK_EQ(npu.get("aclnnMoeGatingTopKSoftmaxV2"), exact ? 0 : 1);
        if (exact) {
            CHECK_EQUAL(d.ids, idr);
            CHECK_EQUAL(d.bad_rows, badr);
        } else {
            const fmoe_tensor *got = from_npu(d.ids), *weights = from_npu(d.weights);
            for (int64_t t = 0; t < T; t++) {
                double sum = 0;
                uint32_t seen = 0;
                for (int64_t e = 0; e < E; e++) sum += exp(tensor_get(logits, t * E + e));
                for (int64_t j = 0; j < k; j++) {
                    const int64_t id = (int64_t)tensor_get(got, t * k + j);
                    REQUIRE(id >= 0 && id < E && !(seen >> id & 1));
                    seen |= 1u << id;
                    const double want = exp(tensor_get(logits, t * E + id)) / sum;
                    CHECK(fabs(tensor_get(weights, t * k + j) - want) < 1e-6);
                }
            }
        }
        npu.reset();
        pair_free(&p);
    }
    npu.set("gating_perverse", 0);
}

/* ---- Permute and unpermute ---- */

static void permute_case(int dtype, uint32_t flags, int ids_type, int map_type, bool weights, int p_type, bool gaps)
{
    const int64_t T = 19, H = 24, E = 5, k = 3, R = T * k;
    pair p = pair_make((fmoe_desc){.op = FMOE_OP_PERMUTE, .dtype = dtype, .H = H, .E = E, .k = k, .flags = flags}, T);
    const int64_t gap = gaps ? 5 : 0;
    fmoe_tensor *x = tensor_random(tensor_padded(dtype, T, H, gap), 1), *ids = tensor_new(ids_type, SHAPE(T, k));
    for (int64_t i = 0; i < R; i++)
        tensor_set(ids, i,
                   flags && test_below(4) == 0 ? (flags & FMOE_SKIP_NEG1 ? -1.0 : (double)E) : (double)test_below(E));
    fmoe_tensor *xp = tensor_padded(dtype, R, H, gap), *map = tensor_new(map_type, SHAPE(R)),
                *counts = tensor_new(map_type, SHAPE(E));
    fmoe_permute_args d = {.size = sizeof d,
                           .x = to_npu(x),
                           .ids = to_npu(ids),
                           .xp = to_npu(xp),
                           .map = to_npu(map),
                           .counts = to_npu(counts)};
    fmoe_permute_args r = {.size = sizeof r, .x = wide(x), .ids = ids, .xp = wide(xp), .map = map, .counts = counts};
    BOTH(fmoe_permute_forward, p, FMOE_FORWARD, &d, &r, 0);
    CHECK_EQUAL(d.xp, r.xp);
    CHECK_EQUAL(d.map, map);
    CHECK_EQUAL(d.counts, counts);

    fmoe_tensor *y = tensor_random(tensor_padded(dtype, R, H, gap), 1),
                *w = weights ? tensor_random(tensor_new(p_type, SHAPE(T, k)), 1) : NULL;
    for (int64_t i = 0; flags && i < R; i++) { /* rows nobody maps to may hold anything */
        bool used = false;
        for (int64_t j = 0; j < R; j++) used |= tensor_get(map, j) == (double)i;
        if (!used)
            for (int64_t c = 0; c < H; c++) tensor_set(y, i * H + c, NAN);
    }
    const double bound = 2 * unit(dtype);
    d = (fmoe_permute_args){.size = sizeof d, .x = to_npu(x), .xp = to_npu(y), .map = d.map};
    r = (fmoe_permute_args){.size = sizeof r, .x = wide(x), .xp = wide(y), .map = map};
    BOTH(fmoe_permute_backward, p, FMOE_BACKWARD, &d, &r, 0);
    CHECK_CLOSE(d.x, r.x, bound);

    fmoe_tensor *out = tensor_padded(dtype, T, H, gap);
    fmoe_unpermute_args du = {
        .size = sizeof du, .y = to_npu(y), .map = d.map, .weights = to_npu(w), .out = to_npu(out)};
    fmoe_unpermute_args ru = {.size = sizeof ru, .y = wide(y), .map = map, .weights = wide(w), .out = wide(out)};
    BOTH(fmoe_unpermute_forward, p, FMOE_FORWARD, &du, &ru, 0);
    CHECK_CLOSE(du.out, ru.out, bound);

    fmoe_tensor *dout = tensor_random(tensor_padded(dtype, T, H, gap), 1), *dw = tensor_new(p_type, SHAPE(T, k)),
                *dy = tensor_padded(dtype, R, H, gap);
    du = (fmoe_unpermute_args){.size = sizeof du,
                               .y = du.y,
                               .map = du.map,
                               .weights = du.weights,
                               .dout = to_npu(dout),
                               .dy = to_npu(dy),
                               .dweights = to_npu(dw)};
    ru = (fmoe_unpermute_args){.size = sizeof ru,
                               .y = ru.y,
                               .map = map,
                               .weights = ru.weights,
                               .dout = wide(dout),
                               .dy = wide(dy),
                               .dweights = wide(dw)};
    BOTH(fmoe_unpermute_backward, p, FMOE_BACKWARD, &du, &ru, 0);
    CHECK_CLOSE(du.dy, ru.dy, bound);
    CHECK_CLOSE(du.dweights, ru.dweights, 2 * bound);
    pair_free(&p);
}

NPU_TEST(permute)
{
    permute_case(FMOE_F32, 0, I64, I32, true, FMOE_F32, false);
    permute_case(FMOE_BF16, 0, I32, I64, true, FMOE_F32, false);
    permute_case(FMOE_F16, 0, I64, I64, true, FMOE_F16, true);
    permute_case(FMOE_F32, 0, I32, I32, false, FMOE_F32, true);
}

NPU_TEST(permute_skips)
{
    permute_case(FMOE_F32, FMOE_SKIP_NEG1, I64, I32, true, FMOE_F32, false);
    permute_case(FMOE_BF16, FMOE_SKIP_E, I32, I64, true, FMOE_F32, true);
    permute_case(FMOE_F32, FMOE_SKIP_NEG1, I64, I64, false, FMOE_F32, false);
}

/* ---- Grouped matmul ---- */

typedef struct {
    int dtype;
    int64_t R, K, N, E;
    bool turned, bias, cumulative, sized;
    int sizes, y, grad;
    uint32_t flags;
    int64_t tail;
} gmm_case;

static void gmm_run(gmm_case c)
{
    pair p = pair_make((fmoe_desc){.op = FMOE_OP_GROUPED_MATMUL, .dtype = c.dtype, .K = c.K, .N = c.N, .E = c.E}, c.R);
    const int grad = c.grad ? c.grad : c.dtype, ytype = c.y ? c.y : c.dtype;
    fmoe_tensor *x = tensor_random(tensor_new(c.dtype, SHAPE(c.R, c.K)), 1),
                *dy = tensor_random(tensor_new(ytype, SHAPE(c.R, c.N)), 1);
    fmoe_tensor *w =
        tensor_random(c.turned ? tensor_transposed(c.dtype, c.E, c.K, c.N) : tensor_new(c.dtype, SHAPE(c.E, c.K, c.N)),
                      1 / sqrt((double)c.K));
    fmoe_tensor *b = c.bias ? tensor_random(tensor_new(c.dtype, SHAPE(c.E, c.N)), 1) : NULL;
    fmoe_tensor *sizes = c.E > 1 || c.sized ? tensor_new(c.sizes ? c.sizes : I64, SHAPE(c.E)) : NULL;
    for (int64_t g = 0, left = c.R - c.tail; g < c.E && sizes; g++) {
        const int64_t n = g == c.E - 1 ? left : test_below(left + 1) / 2;
        left -= n;
        tensor_set(sizes, g, c.cumulative ? (double)(c.R - c.tail - left) : (double)n);
    }
    fmoe_tensor *y = tensor_random(tensor_new(ytype, SHAPE(c.R, c.N)), 1);
    fmoe_gmm_args d = {.size = sizeof d,
                       .x = to_npu(x),
                       .w = to_npu(w),
                       .bias = to_npu(b),
                       .sizes = to_npu(sizes),
                       .y = to_npu(y),
                       .cumulative = c.cumulative};
    fmoe_gmm_args r = {.size = sizeof r,
                       .x = wide(x),
                       .w = wide(w),
                       .bias = wide(b),
                       .sizes = sizes,
                       .y = wide(y),
                       .cumulative = c.cumulative};
    const double u = unit(c.dtype) * (c.dtype == FMOE_F32 ? 8 : 1.5);
    BOTH(fmoe_grouped_matmul_forward, p, FMOE_FORWARD, &d, &r, 0);
    CHECK_CLOSE(d.y, r.y, u);
    fmoe_tensor *dx = tensor_random(tensor_new(c.dtype, SHAPE(c.R, c.K)), 1);
    fmoe_tensor *dw =
        tensor_random(c.turned ? tensor_transposed(grad, c.E, c.K, c.N) : tensor_new(grad, SHAPE(c.E, c.K, c.N)), 1);
    fmoe_tensor *db = c.bias ? tensor_random(tensor_new(grad, SHAPE(c.E, c.N)), 1) : NULL;
    d = (fmoe_gmm_args){.size = sizeof d,
                        .x = d.x,
                        .w = d.w,
                        .sizes = d.sizes,
                        .dy = to_npu(dy),
                        .dx = to_npu(dx),
                        .dw = to_npu(dw),
                        .dbias = to_npu(db),
                        .cumulative = c.cumulative};
    r = (fmoe_gmm_args){.size = sizeof r,
                        .x = r.x,
                        .w = r.w,
                        .sizes = r.sizes,
                        .dy = wide(dy),
                        .dx = wide(dx),
                        .dw = wide(dw),
                        .dbias = wide(db),
                        .cumulative = c.cumulative};
    BOTH(fmoe_grouped_matmul_backward, p, FMOE_BACKWARD, &d, &r, c.flags);
    CHECK_CLOSE(d.dx, r.dx, u);
    CHECK_CLOSE(d.dw, r.dw, u);
    if (db) CHECK_CLOSE(d.dbias, r.dbias, u);
    pair_free(&p);
}

#define GMM(...) gmm_run((gmm_case){__VA_ARGS__})

NPU_TEST(grouped_matmul)
{
    GMM(.dtype = FMOE_F32, .R = 40, .K = 24, .N = 33, .E = 5);
    GMM(.dtype = FMOE_BF16, .R = 40, .K = 24, .N = 33, .E = 5, .turned = true, .bias = true);
    GMM(.dtype = FMOE_F16, .R = 40, .K = 24, .N = 33, .E = 5, .cumulative = true, .sizes = I32, .bias = true,
        .grad = FMOE_F32);
    GMM(.dtype = FMOE_BF16, .R = 40, .K = 16, .N = 8, .E = 4, .flags = FMOE_ACCUMULATE | FMOE_ADD_DX, .grad = FMOE_F32,
        .cumulative = true);
    GMM(.dtype = FMOE_F32, .R = 40, .K = 24, .N = 33, .E = 5, .tail = 7);
    GMM(.dtype = FMOE_BF16, .R = 40, .K = 24, .N = 32, .E = 3, .y = FMOE_F32, .grad = FMOE_F32);
    GMM(.dtype = FMOE_F32, .R = 3, .K = 7, .N = 5, .E = 300);
}

NPU_TEST(few_rows) /* one row, and none: gradients are zero then */
{
    for (int64_t rows = 0; rows < 3; rows++)
        for (int dtype = FMOE_F32; dtype <= FMOE_BF16; dtype++) {
            GMM(.dtype = dtype, .R = rows, .K = 16, .N = 8, .E = 4, .bias = true);
            GMM(.dtype = dtype, .R = rows, .K = 16, .N = 8, .E = 4, .turned = true, .grad = FMOE_F32);
            GMM(.dtype = dtype, .R = rows, .K = 16, .N = 8, .E = 1, .sized = true);
        }
}

NPU_TEST(one_group)
{
    GMM(.dtype = FMOE_F32, .R = 21, .K = 24, .N = 16, .E = 1, .bias = true);
    GMM(.dtype = FMOE_BF16, .R = 21, .K = 24, .N = 16, .E = 1, .turned = true, .y = FMOE_F32, .grad = FMOE_F32);
    GMM(.dtype = FMOE_BF16, .R = 21, .K = 24, .N = 16, .E = 1, .y = FMOE_F32);
    GMM(.dtype = FMOE_F32, .R = 21, .K = 24, .N = 16, .E = 1, .bias = true, .sized = true, .tail = 4);
    GMM(.dtype = FMOE_BF16, .R = 21, .K = 24, .N = 16, .E = 1, .sized = true, .turned = true, .flags = FMOE_ACCUMULATE,
        .grad = FMOE_F32, .sizes = I32);
}

/* Lists: sizes of their own for every member, some without rows. */
static void list_case(int dtype, int64_t E, bool turned, bool bias)
{
    pair p = pair_make((fmoe_desc){.op = FMOE_OP_GROUPED_MATMUL, .dtype = dtype, .E = E}, 64);
    fmoe_tensor *t[16];
    for (int i = 0; i < 16; i++) t[i] = test_alloc((size_t)E * sizeof *t[i]);
    for (int64_t e = 0; e < E; e++) {
        const int64_t m = test_below(5), K = 8 + test_below(3), N = 4 + test_below(3);
        const int64_t strides[2] = {turned ? 1 : N, turned ? K : 1};
        fmoe_tensor *host[] = {tensor_random(tensor_new(dtype, SHAPE(m, K)), 1),
                               tensor_random(tensor_strided(dtype, SHAPE(K, N), strides), 0.4),
                               tensor_random(tensor_new(dtype, SHAPE(N)), 1),
                               tensor_new(dtype, SHAPE(m, N)),
                               tensor_random(tensor_new(dtype, SHAPE(m, N)), 1),
                               tensor_new(dtype, SHAPE(m, K)),
                               tensor_random(tensor_strided(dtype, SHAPE(K, N), strides), 1),
                               tensor_new(dtype, SHAPE(N))};
        for (int i = 0; i < 8; i++) {
            t[i][e] = *to_npu(host[i]);
            t[8 + i][e] = *wide(host[i]);
        }
    }
    fmoe_gmm_args d = {.size = sizeof d, .list = 1, .x = t[0], .w = t[1], .bias = bias ? t[2] : NULL, .y = t[3]};
    fmoe_gmm_args r = {.size = sizeof r, .list = 1, .x = t[8], .w = t[9], .bias = bias ? t[10] : NULL, .y = t[11]};
    const double u = unit(dtype) * (dtype == FMOE_F32 ? 8 : 1.5);
    BOTH(fmoe_grouped_matmul_forward, p, FMOE_FORWARD, &d, &r, 0);
    for (int64_t e = 0; e < E; e++) CHECK_CLOSE(&t[3][e], &t[11][e], u);
    d = (fmoe_gmm_args){.size = sizeof d,
                        .list = 1,
                        .x = t[0],
                        .w = t[1],
                        .dy = t[4],
                        .dx = t[5],
                        .dw = t[6],
                        .dbias = bias ? t[7] : NULL};
    r = (fmoe_gmm_args){.size = sizeof r,
                        .list = 1,
                        .x = t[8],
                        .w = t[9],
                        .dy = t[12],
                        .dx = t[13],
                        .dw = t[14],
                        .dbias = bias ? t[15] : NULL};
    BOTH(fmoe_grouped_matmul_backward, p, FMOE_BACKWARD, &d, &r, 0);
    for (int64_t e = 0; e < E; e++) {
        CHECK_CLOSE(&t[5][e], &t[13][e], u);
        CHECK_CLOSE(&t[6][e], &t[14][e], u);
        if (bias) CHECK_CLOSE(&t[7][e], &t[15][e], u);
    }
    pair_free(&p);
}

NPU_TEST(grouped_matmul_lists)
{
    list_case(FMOE_BF16, 6, false, false);
    list_case(FMOE_F16, 6, true, true);
    list_case(FMOE_F32, 6, true, true);
    list_case(FMOE_BF16, 150, true, false);
}

/* ---- Activation ---- */

NPU_TEST(activation)
{
    static const int types[] = {FMOE_F32, FMOE_BF16, FMOE_F16};
    for (int i = 0; i < 3 * CHECK_ACTS; i++)
        for (uint32_t flags = 0; flags <= (check_acts[i / 3] < 16 ? FMOE_INTERLEAVED : 0); flags++) {
            const int act = check_acts[i / 3], t = types[i % 3];
            const int64_t R = 13, I = 20, hc = act < 16 ? 2 * I : I;
            pair p = pair_make(
                (fmoe_desc){.op = FMOE_OP_ACTIVATION, .dtype = t, .I = I, .act = act, .flags = flags, .act_limit = 1},
                R);
            fmoe_tensor *h = tensor_random(tensor_new(t, SHAPE(R, hc)), 3), *a = tensor_padded(t, R, I, 2),
                        *da = tensor_random(tensor_padded(t, R, I, 1), 1);
            fmoe_tensor *dh = tensor_new(t, SHAPE(R, hc));
            tensor_set(h, 0, 1); /* the limit itself */
            tensor_set(h, 1, -1);
            fmoe_activation_args d = {.size = sizeof d, .h = to_npu(h), .a = to_npu(a)},
                                 r = {.size = sizeof r, .h = wide(h), .a = wide(a)};
            BOTH(fmoe_activation_forward, p, FMOE_FORWARD, &d, &r, 0);
            CHECK_CLOSE(d.a, r.a, unit(t) * 1.01);
            d = (fmoe_activation_args){.size = sizeof d, .h = d.h, .da = to_npu(da), .dh = to_npu(dh)};
            r = (fmoe_activation_args){.size = sizeof r, .h = r.h, .da = wide(da), .dh = wide(dh)};
            BOTH(fmoe_activation_backward, p, FMOE_BACKWARD, &d, &r, 0);
            CHECK_CLOSE(d.dh, r.dh, unit(t) * (act == FMOE_ACT_RELU2 ? 2 : 1.01));
            pair_free(&p);
        }
}

/* ---- Block ---- */

static void block_case(int dtype, int logits_type, uint32_t flags, int64_t shared)
{
    const int64_t T = 12, H = 32, I = 24, E = 8, k = 2;
    const fmoe_desc desc = {.op = FMOE_OP_BLOCK,
                            .dtype = dtype,
                            .H = H,
                            .I = I,
                            .E = E,
                            .k = k,
                            .shared_I = shared,
                            .flags = flags,
                            .route = {.score = FMOE_SCORE_SOFTMAX, .renormalize = 1}};
    pair p = pair_make(desc, T);
    enum { X, WR, W1, W2, S1, S2, SG, LOGITS, IDS, WEIGHTS, OUT, DOUT, DX, DWR, DW1, DW2, DS1, DS2, DSG, COUNT };
    fmoe_tensor *h[COUNT], *n[COUNT], *r[COUNT];
    const int64_t SI = shared ? shared : 1;
    h[X] = tensor_random(tensor_new(dtype, SHAPE(T, H)), 1);
    h[WR] = tensor_random(tensor_new(dtype, SHAPE(E, H)), 2); /* far apart: no two logits trade places */
    h[W1] = tensor_random(tensor_new(dtype, SHAPE(E, 2 * I, H)), 0.3);
    h[W2] = tensor_random(tensor_new(dtype, SHAPE(E, H, I)), 0.3);
    h[S1] = tensor_random(tensor_new(dtype, SHAPE(1, 2 * SI, H)), 0.3);
    h[S2] = tensor_random(tensor_new(dtype, SHAPE(1, H, SI)), 0.3);
    h[SG] = tensor_random(tensor_new(dtype, SHAPE(1, H)), 0.3);
    h[LOGITS] = tensor_new(logits_type, SHAPE(T, E));
    h[IDS] = tensor_new(I64, SHAPE(T, k));
    h[WEIGHTS] = tensor_new(logits_type, SHAPE(T, k));
    h[DOUT] = tensor_random(tensor_new(dtype, SHAPE(T, H)), 1);
    h[OUT] = tensor_new(dtype, SHAPE(T, H));
    h[DX] = tensor_new(dtype, SHAPE(T, H));
    h[DWR] = tensor_new(dtype, SHAPE(E, H));
    h[DW1] = tensor_new(dtype, SHAPE(E, 2 * I, H));
    h[DW2] = tensor_new(dtype, SHAPE(E, H, I));
    h[DS1] = tensor_new(dtype, SHAPE(1, 2 * SI, H));
    h[DS2] = tensor_new(dtype, SHAPE(1, H, SI));
    h[DSG] = tensor_new(dtype, SHAPE(1, H));
    for (int i = 0; i < COUNT; i++) {
        n[i] = to_npu(h[i]);
        r[i] = i == IDS ? h[i] : wide(h[i]);
    }
    fmoe_block_args args[2];
    for (int side = 0; side < 2; side++) {
        fmoe_tensor **t = side ? r : n;
        args[side] = (fmoe_block_args){.size = sizeof args[side],
                                       .x = t[X],
                                       .w_router = t[WR],
                                       .w = {.w1 = t[W1], .w2 = t[W2]},
                                       .logits = t[LOGITS],
                                       .ids = t[IDS],
                                       .weights = t[WEIGHTS],
                                       .out = t[OUT]};
        if (shared) args[side].shared = (fmoe_weights){.w1 = t[S1], .w2 = t[S2]};
        if (flags & FMOE_SHARED_GATE) args[side].shared_gate = t[SG];
        CHECK_STATUS(fmoe_saved_bytes(side ? p.ref : p.npu, T, &args[side].saved_bytes), FMOE_OK);
        char *at = side ? test_alloc(args[side].saved_bytes + 1) : npu_alloc(args[side].saved_bytes + 256);
        args[side].saved = side ? at : at + (256 - (uintptr_t)at % 256) % 256;
    }
    const double u = unit(dtype) * (dtype == FMOE_F32 ? 16 : 4);
    BOTH(fmoe_block_forward, p, FMOE_FORWARD, &args[0], &args[1], 0);
    CHECK_EQUAL(n[IDS], r[IDS]);
    CHECK_CLOSE(n[LOGITS], r[LOGITS], unit(logits_type) * 8);
    CHECK_CLOSE(n[OUT], r[OUT], u);
    for (int side = 0; side < 2; side++) {
        fmoe_tensor **t = side ? r : n;
        args[side].out = NULL;
        args[side].dout = t[DOUT];
        args[side].dx = t[DX];
        args[side].dw_router = t[DWR];
        args[side].dw = (fmoe_weights){.w1 = t[DW1], .w2 = t[DW2]};
        if (shared) args[side].dshared = (fmoe_weights){.w1 = t[DS1], .w2 = t[DS2]};
        if (flags & FMOE_SHARED_GATE) args[side].dshared_gate = t[DSG];
    }
    BOTH(fmoe_block_backward, p, FMOE_BACKWARD, &args[0], &args[1], 0);
    CHECK_CLOSE(n[DX], r[DX], u);
    CHECK_CLOSE(n[DWR], r[DWR], 3 * u);
    CHECK_CLOSE(n[DW1], r[DW1], u);
    CHECK_CLOSE(n[DW2], r[DW2], u);
    if (shared) CHECK_CLOSE(n[DS1], r[DS1], u);
    if (flags & FMOE_SHARED_GATE) CHECK_CLOSE(n[DSG], r[DSG], 3 * u);
    pair_free(&p);
}

NPU_TEST(whole_block)
{
    block_case(FMOE_F32, FMOE_F32, 0, 0);
    block_case(FMOE_F32, FMOE_F32, FMOE_SHARED_GATE, 16);
    block_case(FMOE_BF16, FMOE_F32, 0, 16);
}
