/* SPDX-License-Identifier: Apache-2.0
 *
 * test_ref.c - the specification on trial: activation, permute and grouped matmul. Numbers are pinned by examples
 * worked by hand, gradients by finite differences in double, corners by the sentences of fusedmoe.h. The layer:
 * test_ref_experts.c, routing: test_ref_route.c */
#include "ref_op.h"

/* ---- activation -------------------------------------------------------------------------------------------------- */

static double act1(int act, float limit, double g, double u)
{
    op o = make_op(FMOE_OP_ACTIVATION, 0, 1, 0, 0);
    o.p.d.act = act;
    o.p.d.act_limit = limit;
    settle(&o, 1);
    fmoe_tensor *h = tensor_list(tensor_new(FMOE_F64, SHAPE(1, o.p.h_cols)), VALUES(g, u));
    fmoe_tensor *a = tensor_new(FMOE_F64, SHAPE(1, 1));
    const fmoe_activation_args args = {.size = sizeof args, .h = h, .a = a};
    FORWARD(&o, &args, 0);
    return tensor_get(a, 0);
}

TEST(activation_known_values)
{
    CHECK_NEAR(act1(FMOE_ACT_SWIGLU, 0, 1, 3), 3 * 0.7310585786300049); /* sigmoid(1) */
    CHECK_NEAR(act1(FMOE_ACT_GEGLU, 0, 1, 2), 2 * 0.8413447460685429);  /* Phi(1) */
    CHECK_NEAR(act1(FMOE_ACT_GEGLU_TANH, 0, 1, 2), 2 * 0.8411919906082768);
    CHECK_NEAR(act1(FMOE_ACT_REGLU, 0, -1, 2), 0);
    CHECK_NEAR(act1(FMOE_ACT_REGLU, 0, 3, 2), 6);
    CHECK_NEAR(act1(FMOE_ACT_SWIGLU_CLAMP, 1, 5, -9), -0.7310585786300049); /* g = 1, u = -1 */
    CHECK_NEAR(act1(FMOE_ACT_SWIGLU_CLAMP, 1, -5, 9), -5 / (1 + exp(5)));   /* g has no lower limit */
    CHECK_NEAR(act1(FMOE_ACT_SWIGLU_OAI, 7, 1, 2), 3 / (1 + exp(-(double)1.702f)));
    CHECK_NEAR(act1(FMOE_ACT_SWIGLU_OAI, 1, 9, 9), 2 / (1 + exp(-(double)1.702f)));
    CHECK_NEAR(act1(FMOE_ACT_SWIGLU_CLAMP_OUT, 0.5f, 1, 9), 0.25); /* min(0.73, 0.5) * 0.5 */
    CHECK_NEAR(act1(FMOE_ACT_SILU, 0, 1, 0), 0.7310585786300049);
    CHECK_NEAR(act1(FMOE_ACT_GELU, 0, -1, 0), -0.1586552539314571);
    CHECK_NEAR(act1(FMOE_ACT_GELU_TANH, 0, -1, 0), -0.1588080093917232);
    CHECK_NEAR(act1(FMOE_ACT_RELU, 0, -2, 0), 0);
    CHECK_NEAR(act1(FMOE_ACT_RELU2, 0, 3, 0), 9);
    CHECK_NEAR(act1(FMOE_ACT_SWIGLU, 0, -1000, 1), 0); /* no overflow on either side */
    CHECK_NEAR(act1(FMOE_ACT_SWIGLU, 0, 1000, 1), 1000);
}

TEST(activation_nan_is_never_swallowed)
{
    for (int i = 0; i < CHECK_ACTS; i++) {
        CHECK(isnan(act1(check_acts[i], 1, NaN, 0.5)));
        if (check_acts[i] < FMOE_ACT_SILU) CHECK(isnan(act1(check_acts[i], 1, 0.5, NaN)));
    }
}

TEST(activation_gradients)
{
    for (int i = 0; i < 2 * CHECK_ACTS; i++) {
        op o = make_op(FMOE_OP_ACTIVATION, 0, 5, 0, 0);
        o.p.d.act = check_acts[i / 2];
        o.p.d.act_limit = 0.75f;
        o.p.d.flags = i % 2 && check_acts[i / 2] < FMOE_ACT_SILU ? FMOE_INTERLEAVED : 0;
        settle(&o, 4);
        const int64_t C = o.p.h_cols;
        fmoe_tensor *h = tensor_random(tensor_padded(FMOE_F64, 4, C, 3), 3), *dh = tensor_padded(FMOE_F64, 4, C, 2);
        fmoe_tensor *da = tensor_random(tensor_new(FMOE_F64, SHAPE(4, 5)), 1), *a = tensor_padded(FMOE_F64, 4, 5, 1);
        const fmoe_activation_args args = {.size = sizeof args, .h = h, .a = a, .da = da, .dh = dh};
        BACKWARD(&o, &args, 0);
        CHECK_GRADIENT(&o, &args, 0, a, da, h, dh);
    }
}

/* At its corner relu has slope 0, a clamp slope 1: PyTorch's choice. */
TEST(activation_corners)
{
    op o = make_op(FMOE_OP_ACTIVATION, 0, 2, 0, 0);
    o.p.d.act = FMOE_ACT_REGLU;
    settle(&o, 1);
    fmoe_tensor *h = tensor_list(tensor_new(FMOE_F64, SHAPE(1, 4)), VALUES(0, 1, 2, 3));
    fmoe_tensor *dh = tensor_new(FMOE_F64, SHAPE(1, 4)), *da = tensor_fill(tensor_new(FMOE_F64, SHAPE(1, 2)), 1);
    const fmoe_activation_args args = {.size = sizeof args, .h = h, .dh = dh, .da = da};
    BACKWARD(&o, &args, 0);
    CHECK_VALUES(dh, 0, 0, 3, 0, 1);
    o.p.d.act = FMOE_ACT_SWIGLU_CLAMP;
    o.p.d.act_limit = 1;
    tensor_list(h, VALUES(1, 1.5, -1, -1.5));
    BACKWARD(&o, &args, 0);
    const double s = 0.7310585786300049;
    CHECK_VALUES(dh, 1e-12, -(s + s * (1 - s)), 0, s, 0);
}

/* ---- permute and unpermute --------------------------------------------------------------------------------------- */

/* T = 3, k = 2, E = 3. Expert 0 gets slot (1,1); expert 1 slots (0,1), (2,0), (2,1); expert 2 slot (0,0); (1,0) is
 * skipped. */
TEST(permute_by_hand)
{
    for (int wide = 0; wide < 2; wide++) {
        const int ints = wide ? I64 : I32;
        op o = make_op(FMOE_OP_PERMUTE, 2, 0, 3, 2);
        o.p.d.flags = FMOE_SKIP_NEG1;
        settle(&o, 3);
        fmoe_tensor *x = tensor_list(tensor_padded(FMOE_F64, 3, 2, 1), VALUES(1, 2, 3, 4, 5, 6));
        fmoe_tensor *ids = tensor_list(tensor_padded(ints, 3, 2, wide), VALUES(2, 1, -1, 0, 1, 1));
        fmoe_tensor *xp = tensor_fill(tensor_padded(FMOE_F64, 6, 2, 1), NaN), *map = tensor_new(ints, SHAPE(6));
        fmoe_tensor *counts = tensor_new(ints, SHAPE(3));
        fmoe_permute_args args = {.size = sizeof args, .x = x, .ids = ids, .xp = xp, .map = map, .counts = counts};
        FORWARD(&o, &args, 0);
        CHECK_VALUES(map, 0, 4, 1, -1, 0, 2, 3);
        CHECK_VALUES(counts, 0, 1, 3, 1);
        CHECK_VALUES(xp, 0, 3, 4, 1, 2, 5, 6, 5, 6, 1, 2, 0, 0);
        BACKWARD(&o, &args, 0); /* dxp = xp: every token comes back as often as it was sent */
        CHECK_VALUES(x, 0, 2, 4, 3, 4, 10, 12);

        o.unpermute = true;
        fmoe_tensor *p = tensor_list(tensor_new(FMOE_F64, SHAPE(3, 2)), VALUES(10, 1, NaN, 2, 3, 4));
        fmoe_tensor *out = tensor_new(FMOE_F64, SHAPE(3, 2)), *dp = tensor_fill(tensor_new(FMOE_F64, SHAPE(3, 2)), NaN);
        fmoe_tensor *dy = tensor_fill(tensor_new(FMOE_F64, SHAPE(6, 2)), NaN);
        fmoe_unpermute_args u = {
            .size = sizeof u, .y = xp, .map = map, .weights = p, .out = out, .dout = out, .dy = dy, .dweights = dp};
        FORWARD(&o, &u, 0);
        CHECK_VALUES(out, 0, 11, 22, 6, 8, 35, 42);
        BACKWARD(&o, &u, 0);
        CHECK_VALUES(dp, 0, 55, 55, 0, 50, 427, 427);
        CHECK_VALUES(dy, 0, 12, 16, 11, 22, 105, 126, 140, 168, 110, 220, 0, 0);
        u.weights = NULL;
        FORWARD(&o, &u, 0);
        CHECK_VALUES(out, 0, 2, 4, 3, 4, 10, 12);
    }
}

TEST(permute_gradients)
{
    const int64_t T = 5, H = 3, E = 4, k = 3;
    op o = make_op(FMOE_OP_PERMUTE, H, 0, E, k);
    o.p.d.flags = FMOE_SKIP_E;
    settle(&o, T);
    fmoe_tensor *x = tensor_random(tensor_new(FMOE_F64, SHAPE(T, H)), 1), *xp = tensor_new(FMOE_F64, SHAPE(T * k, H));
    fmoe_tensor *ids = tensor_random_int(tensor_new(I32, SHAPE(T, k)), E + 1), *map = tensor_new(I32, SHAPE(T * k));
    fmoe_tensor *c = tensor_random(tensor_new(FMOE_F64, SHAPE(T * k, H)), 1), *dx = tensor_new(FMOE_F64, SHAPE(T, H));
    const fmoe_permute_args args = {.size = sizeof args, .x = x, .ids = ids, .xp = xp, .map = map};
    FORWARD(&o, &args, 0);
    const fmoe_permute_args back = {.size = sizeof back, .x = dx, .xp = c, .map = map};
    BACKWARD(&o, &back, 0);
    CHECK_GRADIENT(&o, &args, 0, xp, c, x, dx);

    o.unpermute = true;
    fmoe_tensor *p = tensor_random(tensor_new(FMOE_F64, SHAPE(T, k)), 1), *out = tensor_new(FMOE_F64, SHAPE(T, H));
    fmoe_tensor *dp = tensor_new(FMOE_F64, SHAPE(T, k)), *dy = tensor_new(FMOE_F64, SHAPE(T * k, H));
    const fmoe_unpermute_args u = {
        .size = sizeof u, .y = xp, .map = map, .weights = p, .out = out, .dout = x, .dy = dy, .dweights = dp};
    BACKWARD(&o, &u, 0);
    CHECK_GRADIENT(&o, &u, 0, out, x, xp, dy);
    CHECK_GRADIENT(&o, &u, 0, out, x, p, dp);
}

/* xp may have more rows than slots; no map may name them. */
TEST(permute_more_rows_than_slots)
{
    op o = make_op(FMOE_OP_PERMUTE, 1, 0, 2, 1);
    settle(&o, 2);
    fmoe_tensor *x = tensor_list(tensor_new(FMOE_F64, SHAPE(2, 1)), VALUES(5, 6)), *map = tensor_new(I32, SHAPE(2));
    fmoe_tensor *xp = tensor_fill(tensor_new(FMOE_F64, SHAPE(4, 1)), NaN), *ids = tensor_new(I32, SHAPE(2, 1));
    const fmoe_permute_args args = {.size = sizeof args, .x = x, .ids = ids, .xp = xp, .map = map};
    FORWARD(&o, &args, 0);
    CHECK_VALUES(xp, 0, 5, 6, 0, 0);
    o.unpermute = true;
    fmoe_unpermute_args u = {.size = sizeof u, .y = xp, .map = map, .out = x, .dout = x, .dy = xp};
    tensor_list(map, VALUES(1, 0));
    BACKWARD(&o, &u, 0);
    CHECK_VALUES(xp, 0, 6, 5, 0, 0);
    FORWARD(&o, &u, 0);
    CHECK_VALUES(x, 0, 5, 6);
    tensor_list(map, VALUES(0, 2));
    BAD_INDEX(&o, FMOE_FORWARD, &u, 0, "map[1] is 2, must be -1 or a row below 2");
    u.dy = u.y = NULL;
    BACKWARD(&o, &u, 0);
}

TEST(permute_bad_values_write_nothing)
{
    op o = make_op(FMOE_OP_PERMUTE, 1, 0, 128, 2);
    settle(&o, 4);
    fmoe_tensor *x = tensor_new(FMOE_F64, SHAPE(4, 1)), *xp = tensor_fill(tensor_new(FMOE_F64, SHAPE(8, 1)), 7);
    fmoe_tensor *ids = tensor_new(I64, SHAPE(4, 2)), *map = tensor_fill(tensor_new(I64, SHAPE(8)), 7);
    const fmoe_permute_args args = {.size = sizeof args, .x = x, .ids = ids, .xp = xp, .map = map};
    const int64_t wrong[] = {130, 128, -1, -2, INT32_MIN, INT64_MAX, INT64_MIN, (INT64_C(1) << 32) + 1};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char text[64];
        ((int64_t *)ids->data)[7] = wrong[i];
        snprintf(text, sizeof text, "ids[3,1] is %" PRId64 ", E is 128", wrong[i]);
        BAD_INDEX(&o, FMOE_FORWARD, &args, 0, text);
    }
    CHECK_VALUES(xp, 0, 7, 7, 7, 7, 7, 7, 7, 7);
    CHECK_VALUES(map, 0, 7, 7, 7, 7, 7, 7, 7, 7);

    tensor_list(map, VALUES(0, 1, 2, 3, 4, 8, 6, 7));
    BAD_INDEX(&o, FMOE_BACKWARD, &args, 0, "map[5] is 8, must be -1 or a row below 8");
    o.unpermute = true;
    tensor_fill(x, 5);
    const fmoe_unpermute_args u = {.size = sizeof u, .y = xp, .map = map, .out = x, .dout = x, .dy = xp};
    tensor_set(map, 5, -2);
    BAD_INDEX(&o, FMOE_FORWARD, &u, 0, "map[5] is -2, must be -1 or a row below 8");
    tensor_set(map, 5, 2);
    BAD_INDEX(&o, FMOE_FORWARD, &u, 0, "map[2] and map[5] are both 2");
    BAD_INDEX(&o, FMOE_BACKWARD, &u, 0, "map[2] and map[5] are both 2");
    CHECK_VALUES(x, 0, 5, 5, 5, 5);
    CHECK_VALUES(xp, 0, 7, 7, 7, 7, 7, 7, 7, 7);
}

/* ---- grouped matmul ---------------------------------------------------------------------------------------------- */

/* K = 2, N = 1: group 0 has row 0 and w = (1, 10), group 1 is empty, group 2 has rows 1, 2 and w = (2, 20); row 3 is
 * past. */
TEST(gmm_by_hand)
{
    op o = make_op(FMOE_OP_GROUPED_MATMUL, 0, 0, 3, 0);
    settle(&o, 4);
    fmoe_tensor *x = tensor_list(tensor_new(FMOE_F64, SHAPE(4, 2)), VALUES(1, 2, 3, 4, 5, 6, 7, 8));
    fmoe_tensor *w = tensor_list(tensor_new(FMOE_F64, SHAPE(3, 2, 1)), VALUES(1, 10, 5, 5, 2, 20));
    fmoe_tensor *b = tensor_list(tensor_new(FMOE_F64, SHAPE(3, 1)), VALUES(0.5, 9, -1));
    fmoe_tensor *sizes = tensor_new(I32, SHAPE(3));
    fmoe_tensor *y = tensor_new(FMOE_F64, SHAPE(4, 1)), *dx = tensor_new(FMOE_F64, SHAPE(4, 2));
    fmoe_tensor *dw = tensor_new(FMOE_F64, SHAPE(3, 2, 1)), *db = tensor_new(FMOE_F64, SHAPE(3, 1));
    fmoe_gmm_args a = {
        .size = sizeof a, .x = x, .w = w, .bias = b, .sizes = sizes, .y = y, .dx = dx, .dw = dw, .dbias = db};
    a.dy = tensor_list(tensor_new(FMOE_F64, SHAPE(4, 1)), VALUES(1, 2, 3, 4));
    for (a.cumulative = 0; a.cumulative < 2; a.cumulative++) {
        tensor_list(sizes, a.cumulative ? VALUES(1, 1, 3) : VALUES(1, 0, 2));
        tensor_fill(y, 77);
        FORWARD(&o, &a, 0);
        CHECK_VALUES(y, 0, 21.5, 85, 129, 77);
        tensor_fill(dx, NaN);
        tensor_fill(dw, NaN);
        tensor_fill(db, NaN);
        BACKWARD(&o, &a, 0);
        CHECK_VALUES(dx, 0, 1, 10, 4, 40, 6, 60, 0, 0);
        CHECK_VALUES(dw, 0, 1, 2, 0, 0, 21, 26);
        CHECK_VALUES(db, 0, 1, 0, 5);
        tensor_set(dw, 2, NaN); /* FMOE_ACCUMULATE does not touch group 1 */
        BACKWARD(&o, &a, FMOE_ACCUMULATE | FMOE_ADD_DX);
        CHECK_VALUES(dx, 0, 2, 20, 8, 80, 12, 120, 0, 0);
        CHECK_VALUES(dw, 0, 2, 4, NaN, 0, 42, 52);
        CHECK_VALUES(db, 0, 2, 0, 10);
    }
    a.cumulative = 0;
    tensor_list(sizes, VALUES(2, 1, 3));
    BAD_INDEX(&o, FMOE_FORWARD, &a, 0, "sizes[2] is 3, 3 rows come before it, R is 4");
    a.cumulative = 1;
    BAD_INDEX(&o, FMOE_FORWARD, &a, 0, "sizes[1] is 1, less than the running sum 2 before it");
    tensor_set(sizes, 0, -1);
    BAD_INDEX(&o, FMOE_FORWARD, &a, 0, "sizes[0] is -1, less than the running sum 0");
    a.cumulative = 0;
    BAD_INDEX(&o, FMOE_BACKWARD, &a, 0, "sizes[0] is -1, less than 0");
    a.sizes = tensor_fill(tensor_new(I64, SHAPE(3)), 1);
    ((int64_t *)a.sizes->data)[1] = INT64_MAX;
    BAD_INDEX(&o, FMOE_FORWARD, &a, 0, "sizes[1] is 9223372036854775807, 1 rows come before it, R is 4");
}

/* Stacked, transposed and as a list, gradients of all three; the list sees the same memory as the stack. */
TEST(gmm_gradients)
{
    const int64_t R = 7, K = 3, N = 4, E = 4;
    for (int transposed = 0; transposed < 2; transposed++) {
        op o = make_op(FMOE_OP_GROUPED_MATMUL, 0, 0, E, 0);
        settle(&o, R);
        fmoe_tensor *x = tensor_random(tensor_padded(FMOE_F64, R, K, 2), 1), *y = tensor_padded(FMOE_F64, R, N, 1);
        fmoe_tensor *w = transposed ? tensor_transposed(FMOE_F64, E, K, N) : tensor_new(FMOE_F64, SHAPE(E, K, N));
        fmoe_tensor *dw = transposed ? tensor_new(FMOE_F64, SHAPE(E, K, N)) : tensor_transposed(FMOE_F64, E, K, N);
        fmoe_tensor *b = tensor_random(tensor_new(FMOE_F64, SHAPE(E, N)), 1), *db = tensor_new(FMOE_F64, SHAPE(E, N));
        fmoe_tensor *dy = tensor_random(tensor_new(FMOE_F64, SHAPE(R, N)), 1), *dx = tensor_new(FMOE_F64, SHAPE(R, K));
        fmoe_tensor *sizes = tensor_list(tensor_new(I64, SHAPE(E)), VALUES(2, 0, 3, 1));
        tensor_random(w, 1);
        const fmoe_gmm_args a = {.size = sizeof a,
                                 .x = x,
                                 .w = w,
                                 .bias = b,
                                 .sizes = sizes,
                                 .y = y,
                                 .dy = dy,
                                 .dx = dx,
                                 .dw = dw,
                                 .dbias = db};
        tensor_fill(tensor_view(dy, 0, 6, 1, 1), 0); /* row 6 is past the total and no part of the loss */
        BACKWARD(&o, &a, 0);
        CHECK_GRADIENT(&o, &a, 0, y, dy, x, dx);
        CHECK_GRADIENT(&o, &a, 0, y, dy, w, dw);
        CHECK_GRADIENT(&o, &a, 0, y, dy, b, db);
        FORWARD(&o, &a, 0);
        fmoe_gmm_args part = a; /* each gradient alone, with no more inputs than it needs */
        part.y = part.x = part.bias = part.dw = part.dbias = NULL;
        part.dx = tensor_fill(tensor_new(FMOE_F64, SHAPE(R, K)), NaN);
        BACKWARD(&o, &part, 0);
        CHECK_SAME(part.dx, dx);
        part.x = x;
        part.w = part.dx = NULL;
        part.dw = tensor_new(FMOE_F64, SHAPE(E, K, N));
        BACKWARD(&o, &part, 0);
        CHECK_SAME(part.dw, dw);
        part.x = part.dw = NULL;
        part.dbias = tensor_new(FMOE_F64, SHAPE(E, N));
        BACKWARD(&o, &part, 0);
        CHECK_SAME(part.dbias, db);

        fmoe_tensor *list[4], *rows[] = {x, y, dy, dx};
        fmoe_tensor *y2 = tensor_copy(y, FMOE_F64), *dx2 = tensor_copy(dx, FMOE_F64);
        fmoe_tensor *dw2 = tensor_copy(dw, FMOE_F64), *db2 = tensor_copy(db, FMOE_F64);
        for (int i = 0; i < 4; i++) {
            const int64_t first[] = {0, 2, 2, 5, 6};
            list[i] = test_alloc((size_t)E * sizeof *list[i]);
            for (int64_t g = 0; g < E; g++) list[i][g] = *tensor_view(rows[i], 0, first[g], first[g + 1] - first[g], 1);
        }
        const fmoe_gmm_args l = {.size = sizeof l,
                                 .x = list[0],
                                 .y = list[1],
                                 .dy = list[2],
                                 .dx = list[3],
                                 .list = 1,
                                 .w = tensor_slices(w),
                                 .bias = tensor_slices(b),
                                 .dw = tensor_slices(dw),
                                 .dbias = tensor_slices(db)};
        tensor_fill(tensor_view(y, 0, 0, 6, 1), NaN);
        tensor_fill(tensor_view(dx, 0, 0, 6, 1), NaN);
        tensor_fill(dw, NaN);
        tensor_fill(db, NaN);
        FORWARD(&o, &l, 0);
        BACKWARD(&o, &l, 0);
        CHECK_SAME(y, y2);
        CHECK_SAME(dx, dx2);
        CHECK_SAME(dw, dw2);
        CHECK_SAME(db, db2);
    }
}

TEST(gmm_one_group_without_sizes)
{
    op o = make_op(FMOE_OP_GROUPED_MATMUL, 0, 0, 1, 0);
    settle(&o, 2);
    fmoe_tensor *x = tensor_list(tensor_new(FMOE_F64, SHAPE(2, 1)), VALUES(2, 3));
    fmoe_tensor *y = tensor_new(FMOE_F32, SHAPE(2, 1));
    fmoe_tensor *w = tensor_fill(tensor_new(FMOE_F64, SHAPE(1, 1, 1)), 5), *dw = tensor_new(FMOE_F32, SHAPE(1, 1, 1));
    const fmoe_gmm_args a = {.size = sizeof a, .x = x, .w = w, .y = y, .dy = y, .dw = dw};
    FORWARD(&o, &a, 0);
    CHECK_VALUES(y, 0, 10, 15);
    BACKWARD(&o, &a, 0);
    CHECK_VALUES(dw, 0, 65);
}
