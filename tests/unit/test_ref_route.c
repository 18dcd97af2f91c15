/* SPDX-License-Identifier: Apache-2.0
 *
 * test_ref_route.c - the specification of routing on trial: every rule by hand on logits whose exponentials are whole
 * numbers, every gradient by finite differences with the ids held fixed, and the order of selection on rows made to
 * break it. */
#include "ref_op.h"

typedef struct router {
    op o;
    fmoe_tensor *logits, *bias, *ids, *weights, *bad, *dweights, *dlogits;
    fmoe_route_args a;
} router;

static router make_router(int64_t T, int64_t E, int64_t k, fmoe_score score)
{
    router r = {.o = make_op(FMOE_OP_ROUTE, 0, 0, E, k)};
    r.o.p.d.route.score = (int32_t)score;
    r.logits = tensor_random(tensor_padded(FMOE_F64, T, E, 2), 3);
    r.bias = tensor_random(tensor_new(FMOE_F32, SHAPE(E)), 1);
    r.ids = tensor_fill(tensor_padded(I32, T, k, 1), -7);
    r.weights = tensor_fill(tensor_padded(FMOE_F64, T, k, 1), NaN);
    r.bad = tensor_fill(tensor_new(I64, SHAPE(1)), -7);
    r.dweights = tensor_random(tensor_new(FMOE_F64, SHAPE(T, k)), 1);
    r.dlogits = tensor_fill(tensor_padded(FMOE_F64, T, E, 1), NaN);
    r.a = (fmoe_route_args){.size = sizeof r.a,
                            .logits = r.logits,
                            .ids = r.ids,
                            .weights = r.weights,
                            .bad_rows = r.bad,
                            .dweights = r.dweights,
                            .dlogits = r.dlogits};
    return r;
}

static void set_groups(router *r, int32_t groups, int32_t topk, fmoe_group_score score)
{
    r->o.p.d.route.groups = groups;
    r->o.p.d.route.topk_groups = topk;
    r->o.p.d.route.group_score = (int32_t)score;
}

static void route(router *r)
{
    settle(&r->o, r->logits->shape[0]);
    FORWARD(&r->o, &r->a, 0);
}

/* T = 2, E = 3, k = 2; e^l = (1, 2, 5) and (4, 4, 8): softmax is (1, 2, 5)/8 and (4, 4, 8)/16. */
static router make_small(fmoe_score score)
{
    router r = make_router(2, 3, 2, score);
    const double x[] = {1, 2, 5, 4, 4, 8};
    for (int64_t i = 0; i < 6; i++) tensor_set(r.logits, i, log(x[i]));
    return r;
}

TEST(route_by_hand)
{
    router r = make_small(FMOE_SCORE_SOFTMAX);
    route(&r);
    CHECK_VALUES(r.ids, 0, 2, 1, 2, 0); /* 0 and 1 tie in the second row: the lower index */
    CHECK_VALUES(r.weights, 1e-15, 5. / 8, 2. / 8, 1. / 2, 1. / 4);
    CHECK_VALUES(r.bad, 0, 0);
    r.o.p.d.route.renormalize = 1;
    r.o.p.d.route.scale = 2.5;
    route(&r);
    CHECK_VALUES(r.weights, 1e-15, 2.5 * 5 / 7, 2.5 * 2 / 7, 2.5 * 2 / 3, 2.5 / 3);
    r.o.p.d.route.eps = 1. / 8; /* the sum of the first row becomes 1 */
    route(&r);
    CHECK_VALUES(tensor_view(r.weights, 0, 0, 1, 1), 1e-15, 2.5 * 5 / 8, 2.5 * 2 / 8);

    r = make_small(FMOE_SCORE_TOPK_SOFTMAX);
    route(&r);
    CHECK_VALUES(r.ids, 0, 2, 1, 2, 0);
    CHECK_VALUES(r.weights, 1e-15, 5. / 7, 2. / 7, 2. / 3, 1. / 3);

    r = make_small(FMOE_SCORE_SIGMOID); /* x / (1 + x) */
    route(&r);
    CHECK_VALUES(r.ids, 0, 2, 1, 2, 0);
    CHECK_VALUES(r.weights, 1e-15, 5. / 6, 2. / 3, 8. / 9, 4. / 5);

    r = make_small(FMOE_SCORE_SQRT_SOFTPLUS); /* sqrt(log(1 + x)) */
    route(&r);
    CHECK_VALUES(r.ids, 0, 2, 1, 2, 0);
    CHECK_VALUES(r.weights, 1e-15, sqrt(log(6)), sqrt(log(3)), sqrt(log(9)), sqrt(log(5)));
}

/* The bias moves the choice, never the weight; it may be f32 or f64. */
TEST(route_bias_selects_only)
{
    for (int score = 0; score < 4; score++) {
        for (int wide = 0; wide < 2; wide++) {
            router plain = make_small((fmoe_score)score), r = make_small((fmoe_score)score);
            r.a.select_bias = tensor_list(tensor_new(wide ? FMOE_F64 : FMOE_F32, SHAPE(3)), VALUES(9, 0, 0));
            route(&r);
            CHECK_VALUES(r.ids, 0, 0, 2, 0, 2);
            tensor_list(plain.ids, VALUES(0, 2, 0, 2));
            settle(&plain.o, 2);
            FORWARD(&plain.o, &plain.a, FMOE_REPLAY);
            CHECK_SAME(r.weights, plain.weights);
        }
    }
}

TEST(route_backward_by_hand)
{
    router r = make_small(FMOE_SCORE_SOFTMAX);
    route(&r);
    tensor_list(r.dweights, VALUES(8, 0, 0, 16));
    BACKWARD(&r.o, &r.a, 0);
    CHECK_VALUES(r.dlogits, 1e-14, -5. / 8, -10. / 8, 15. / 8, 3, -1, -2);
}

/* Every rule, with and without renormalisation, scale, eps, bias, groups and duplicates in the replayed ids. */
TEST(route_gradients)
{
    for (int i = 0; i < 4 * 2 * 2 * 2 * 2; i++) {
        router r = make_router(4, 6, 3, (fmoe_score)(i & 3));
        fmoe_route_rule *rule = &r.o.p.d.route;
        rule->renormalize = i >> 2 & 1;
        rule->eps = i >> 2 & 1 ? 0.01 : 0;
        if (i >> 3 & 1) {
            rule->scale = 2.5;
            r.a.select_bias = r.bias;
        }
        if (i >> 4 & 1) set_groups(&r, 3, 2, i & 1 ? FMOE_GROUP_MAX : FMOE_GROUP_TOP2_SUM);
        route(&r);
        if (i >> 5 & 1) tensor_random_int(r.ids, 6);
        BACKWARD(&r.o, &r.a, 0);
        CHECK_GRADIENT(&r.o, &r.a, FMOE_REPLAY, r.weights, r.dweights, r.logits, r.dlogits);
    }
}

TEST(route_gradients_far_out)
{
    for (int score = 0; score < 4; score++) {
        router r = make_router(1, 4, 2, (fmoe_score)score);
        tensor_list(r.logits, VALUES(-900, 900, -1e300, 30));
        route(&r);
        tensor_list(r.ids, VALUES(1, 2));
        BACKWARD(&r.o, &r.a, 0);
        for (int64_t i = 0; i < 4; i++) CHECK(isfinite(tensor_get(r.dlogits, i)));
        CHECK_VALUES(r.bad, 0, 0);
    }
}

/* Replaying what was chosen gives the same weights; ids of any kind are taken, and are not written. */
TEST(route_replay)
{
    for (int score = 0; score < 4; score++) {
        router r = make_router(5, 6, 3, (fmoe_score)score);
        r.o.p.d.route.renormalize = 1;
        r.a.select_bias = r.bias;
        route(&r);
        fmoe_tensor *weights = tensor_copy(r.weights, FMOE_F64), *ids = tensor_copy(r.ids, I64);
        r.a.ids = ids;
        tensor_fill(r.weights, NaN);
        FORWARD(&r.o, &r.a, FMOE_REPLAY);
        CHECK_SAME(r.weights, weights);
        CHECK_SAME(r.ids, ids);
    }
}

TEST(route_replay_of_skip_marks)
{
    for (int score = 0; score < 4; score++) {
        router r = make_small((fmoe_score)score);
        r.o.p.d.flags = FMOE_SKIP_NEG1;
        r.o.p.d.route.renormalize = 1;
        settle(&r.o, 2);
        tensor_list(r.ids, VALUES(-1, 1, -1, -1));
        FORWARD(&r.o, &r.a, FMOE_REPLAY);
        CHECK_VALUES(r.weights, 1e-15, 0, 1, 0, 0); /* the one that is left has all the weight */
        tensor_list(r.dweights, VALUES(NaN, 1, NaN, NaN));
        BACKWARD(&r.o, &r.a, 0);
        CHECK_VALUES(r.dlogits, 1e-15, 0, 0, 0, 0, 0, 0);
        r.o.p.d.route.renormalize = 0;
        tensor_list(r.dweights, VALUES(0, 1, 0, 0));
        BACKWARD(&r.o, &r.a, 0);
        CHECK_GRADIENT(&r.o, &r.a, FMOE_REPLAY, r.weights, r.dweights, r.logits, r.dlogits);
    }
}

TEST(route_bad_ids_write_nothing)
{
    router r = make_router(2, 6, 3, FMOE_SCORE_SOFTMAX);
    settle(&r.o, 2);
    tensor_list(r.ids, VALUES(0, 1, 2, 3, 6, 5));
    BAD_INDEX(&r.o, FMOE_FORWARD, &r.a, FMOE_REPLAY, "ids[1,1] is 6, E is 6");
    BAD_INDEX(&r.o, FMOE_BACKWARD, &r.a, 0, "ids[1,1] is 6, E is 6");
    tensor_set(r.ids, 4, -1);
    BAD_INDEX(&r.o, FMOE_FORWARD, &r.a, FMOE_REPLAY, "ids[1,1] is -1, E is 6");
    CHECK_SAME(r.weights, tensor_fill(tensor_copy(r.weights, FMOE_F64), NaN));
    CHECK_SAME(r.dlogits, tensor_fill(tensor_copy(r.dlogits, FMOE_F64), NaN));
    CHECK_VALUES(r.bad, 0, -7);
}

/* E = 6 in three groups of two. Scores (sigmoid) grow with the logits:
 *   members   {5, -5}  {2, 1}  {3, -9}      by maximum: groups 0, 2      by the sum of two: groups 1, 0 */
TEST(route_groups)
{
    router r = make_router(1, 6, 2, FMOE_SCORE_SIGMOID);
    tensor_list(r.logits, VALUES(5, -5, 2, 1, 3, -9));
    set_groups(&r, 3, 2, FMOE_GROUP_MAX);
    route(&r);
    CHECK_VALUES(r.ids, 0, 0, 4);
    set_groups(&r, 3, 2, FMOE_GROUP_TOP2_SUM);
    route(&r);
    CHECK_VALUES(r.ids, 0, 0, 2);
    set_groups(&r, 3, 1, FMOE_GROUP_TOP2_SUM);
    route(&r);
    CHECK_VALUES(r.ids, 0, 2, 3);
    set_groups(&r, 3, 1, FMOE_GROUP_MAX);
    route(&r);
    CHECK_VALUES(r.ids, 0, 0, 1); /* the whole group, however bad the second is */
    set_groups(&r, 6, 2, FMOE_GROUP_TOP2_SUM);
    route(&r);
    CHECK_VALUES(r.ids, 0, 0, 4); /* groups of one: the sum of the one there is */
    router tie = make_router(1, 6, 2, FMOE_SCORE_TOPK_SOFTMAX);
    tensor_list(tie.logits, VALUES(0, 0, 1, 1, 2, 0));
    set_groups(&tie, 3, 1, FMOE_GROUP_TOP2_SUM);
    route(&tie);
    CHECK_VALUES(tie.ids, 0, 2, 3); /* groups 1 and 2 tie: the lower one, though 4 is the best expert */
}

/* An excluded expert competes with 0: behind a bias that makes the chosen ones negative, it wins. Its weight is its own
 * score. */
TEST(route_excluded_zero)
{
    router r = make_router(1, 4, 2, FMOE_SCORE_SIGMOID);
    tensor_list(r.logits, VALUES(2, 1, 0, 0));
    r.a.select_bias = tensor_list(r.bias, VALUES(0, -2, -3, -3));
    set_groups(&r, 2, 1, FMOE_GROUP_MAX);
    route(&r);
    CHECK_VALUES(r.ids, 0, 0, 1);
    r.o.p.d.route.excluded_zero = 1;
    route(&r);
    CHECK_VALUES(r.ids, 0, 0, 2);
    CHECK_VALUES(r.weights, 1e-15, 1 / (1 + exp(-2)), 0.5);
}

/* NaN ranks below -Inf; whatever a row holds, its ids are distinct and in range. */
TEST(route_bad_rows)
{
    const double rows[6][4] = {{1, NaN, 2, -Inf}, {NaN, NaN, NaN, NaN},  {-Inf, -Inf, -Inf, -Inf},
                               {0, Inf, Inf, 1},  {-Inf, 3, -Inf, -Inf}, {7, 7, 7, 7}};
    for (int score = 0; score < 4; score++) {
        router r = make_router(6, 4, 3, (fmoe_score)score);
        tensor_list(r.logits, &rows[0][0]);
        route(&r);
        CHECK_VALUES(r.bad, 0, 4); /* the last two are sound */
        for (int64_t t = 0; t < 6; t++) {
            const fmoe_tensor *ids = tensor_view(r.ids, 0, t, 1, 1);
            const double a = tensor_get(ids, 0), b = tensor_get(ids, 1), c = tensor_get(ids, 2);
            CHECK(a != b && b != c && a != c && a >= 0 && b >= 0 && c >= 0 && a < 4 && b < 4 && c < 4);
        }
        CHECK_VALUES(tensor_view(r.ids, 0, 1, 2, 1), 0, 0, 1, 2, 0, 1, 2);
        CHECK_VALUES(tensor_view(r.ids, 0, 4, 2, 1), 0, 1, 0, 2, 0, 1, 2);
        for (int64_t i = 12; i < 18; i++) CHECK(isfinite(tensor_get(r.weights, i)));
        /* One NaN makes every softmax NaN; elementwise scores keep their order, with the NaN behind -Inf. */
        if (score == FMOE_SCORE_SOFTMAX) CHECK_VALUES(tensor_view(r.ids, 0, 0, 1, 1), 0, 0, 1, 2);
        else CHECK_VALUES(tensor_view(r.ids, 0, 0, 1, 1), 0, 2, 0, 3);
        if (score == FMOE_SCORE_SOFTMAX) CHECK_VALUES(tensor_view(r.weights, 0, 0, 1, 1), 0, NaN, NaN, NaN);
        if (score == FMOE_SCORE_SIGMOID) {
            CHECK_VALUES(tensor_view(r.weights, 0, 3, 1, 1), 1e-15, 1, 1, 1 / (1 + exp(-1)));
        }
        BACKWARD(&r.o, &r.a, 0);
        for (int64_t i = 16; i < 24; i++) CHECK(isfinite(tensor_get(r.dlogits, i))); /* bad rows keep to themselves */
    }
}

/* In a chosen group a NaN member loses even to an excluded expert: k distinct ids come first. */
TEST(route_bad_rows_in_groups)
{
    router r = make_router(1, 4, 2, FMOE_SCORE_SIGMOID);
    tensor_list(r.logits, VALUES(0, 0, 9, NaN));
    set_groups(&r, 2, 1, FMOE_GROUP_MAX);
    route(&r);
    CHECK_VALUES(r.ids, 0, 2, 0);
    set_groups(&r, 2, 1, FMOE_GROUP_TOP2_SUM); /* 9 + NaN is NaN: that group ranks last */
    route(&r);
    CHECK_VALUES(r.ids, 0, 0, 1);
}

TEST(route_every_expert_is_reachable)
{
    router r = make_router(300, 300, 1, FMOE_SCORE_SOFTMAX);
    for (int64_t i = 0; i < 300 * 300; i++) tensor_set(r.logits, i, i % 300 == i / 300 ? 9 : 0);
    r.a.bad_rows = NULL;
    route(&r);
    for (int64_t t = 0; t < 300; t++) CHECK_EQ(tensor_get(r.ids, t), t);
    router all = make_router(3, 5, 5, FMOE_SCORE_SIGMOID); /* k = E: a sort */
    route(&all);
    for (int64_t i = 0; i < 15; i++) CHECK(i % 5 == 0 || tensor_get(all.weights, i) <= tensor_get(all.weights, i - 1));
}

TEST(route_no_tokens)
{
    router r = make_router(0, 4, 2, FMOE_SCORE_SOFTMAX);
    route(&r);
    BACKWARD(&r.o, &r.a, 0);
    CHECK_VALUES(r.bad, 0, 0);
}
