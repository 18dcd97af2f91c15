/* SPDX-License-Identifier: Apache-2.0
 *
 * test_ref_block.c - the composition of the block in double: its output is the sum of its parts, called one by one, and
 * its gradients are those of central finite differences. (check_block.c holds the other dtypes to this block, which
 * composes as they do: what both get wrong shows only here.) */
#include "tensors.h"

enum { T = 3, H = 4, I = 3, E = 4, K = 2, S = 2 };
enum { X, W_ROUTER, B_ROUTER, W1, W2, SHARED1, SHARED2, GATE, PARAMETERS };

typedef struct block {
    fmoe_plan plan;
    fmoe_block_args a;
    fmoe_run run;
    fmoe_tensor *of[PARAMETERS], *d[PARAMETERS], *dout, *dlogits; /* NULL: the block has none */
} block;

static block make_block(int score, bool shared, bool gate)
{
    static const int64_t shapes[PARAMETERS][4] = {{2, T, H},    {2, E, H},        {1, E},       {3, E, 2 * I, H},
                                                  {3, E, H, I}, {3, 1, 2 * S, H}, {3, 1, H, S}, {2, 1, H}};
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_BLOCK;
    d.dtype = FMOE_F64;
    d.H = H, d.I = I, d.E = E, d.k = K, d.shared_I = shared ? S : 0;
    d.flags = gate ? FMOE_SHARED_GATE : 0;
    d.route.score = score;
    d.route.renormalize = score % 2;
    d.route.eps = 0.1;
    d.route.scale = 1.5;
    block b = {.run = FMOE_RUN_INIT};
    REQUIRE(fmoe_plan_create(&b.plan, &d) == FMOE_OK);
    for (int i = 0; i < PARAMETERS; i++) {
        if ((i == GATE && !gate) || (i >= SHARED1 && !shared)) continue;
        b.of[i] = tensor_random(tensor_new(FMOE_F64, (int)shapes[i][0], shapes[i] + 1), 1);
        b.d[i] = tensor_fill(tensor_new(FMOE_F64, (int)shapes[i][0], shapes[i] + 1), NAN);
    }
    b.dout = tensor_random(tensor_new(FMOE_F64, SHAPE(T, H)), 1);
    b.dlogits = tensor_random(tensor_new(FMOE_F64, SHAPE(T, E)), 1);
    b.a = (fmoe_block_args){.size = sizeof b.a,
                            .x = b.of[X],
                            .w_router = b.of[W_ROUTER],
                            .b_router = b.of[B_ROUTER],
                            .w = {.w1 = b.of[W1], .w2 = b.of[W2]},
                            .shared = {.w1 = b.of[SHARED1], .w2 = b.of[SHARED2]},
                            .shared_gate = b.of[GATE],
                            .logits = tensor_new(FMOE_F64, SHAPE(T, E)),
                            .ids = tensor_new(I64, SHAPE(T, K)),
                            .weights = tensor_new(FMOE_F64, SHAPE(T, K)),
                            .out = tensor_new(FMOE_F64, SHAPE(T, H)),
                            .dout = b.dout,
                            .dlogits = b.dlogits,
                            .dx = b.d[X],
                            .dw_router = b.d[W_ROUTER],
                            .db_router = b.d[B_ROUTER],
                            .dw = {.w1 = b.d[W1], .w2 = b.d[W2]},
                            .dshared = {.w1 = b.d[SHARED1], .w2 = b.d[SHARED2]},
                            .dshared_gate = b.d[GATE]};
    size_t forward, backward;
    REQUIRE(fmoe_workspace_bytes(b.plan, FMOE_FORWARD, T, &forward) == FMOE_OK);
    REQUIRE(fmoe_workspace_bytes(b.plan, FMOE_BACKWARD, T, &backward) == FMOE_OK);
    REQUIRE(fmoe_saved_bytes(b.plan, T, &b.a.saved_bytes) == FMOE_OK);
    b.a.saved = test_alloc(b.a.saved_bytes);
    b.run.workspace_bytes = forward > backward ? forward : backward;
    b.run.workspace = test_alloc(b.run.workspace_bytes);
    return b;
}

/* Experts of their own, with as many as w has; added to out. */
static void add_experts(fmoe_tensor *out, const fmoe_tensor *x, const fmoe_tensor *ids, const fmoe_tensor *p,
                        fmoe_weights w)
{
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_EXPERTS;
    d.dtype = FMOE_F64;
    d.H = H, d.I = w.w2->shape[2], d.E = w.w2->shape[0], d.k = ids->shape[1];
    fmoe_plan plan;
    REQUIRE(fmoe_plan_create(&plan, &d) == FMOE_OK);
    const fmoe_experts_args a = {.size = sizeof a, .x = x, .ids = ids, .weights = p, .w = w, .out = out};
    fmoe_run run = FMOE_RUN_INIT;
    run.flags = FMOE_ADD_OUT;
    REQUIRE(fmoe_workspace_bytes(plan, FMOE_FORWARD, T, &run.workspace_bytes) == FMOE_OK);
    run.workspace = test_alloc(run.workspace_bytes);
    CHECK_STATUS(fmoe_experts_forward(plan, &a, &run), FMOE_OK);
    fmoe_plan_destroy(&plan);
}

TEST(block_is_the_sum_of_its_parts)
{
    for (int kind = 0; kind < 3; kind++) { /* no shared expert, one, one with a gate */
        block b = make_block(FMOE_SCORE_SOFTMAX, kind > 0, kind > 1);
        CHECK_STATUS(fmoe_block_forward(b.plan, &b.a, &b.run), FMOE_OK);
        fmoe_tensor *out = tensor_new(FMOE_F64, SHAPE(T, H)), *one = tensor_new(FMOE_F64, SHAPE(T, 1));
        add_experts(out, b.a.x, b.a.ids, b.a.weights, b.a.w);
        for (int64_t t = 0; t < T; t++) {
            double dot = 0;
            for (int64_t h = 0; kind > 1 && h < H; h++)
                dot += tensor_get(b.of[X], t * H + h) * tensor_get(b.of[GATE], h);
            tensor_set(one, t, kind > 1 ? 1 / (1 + exp(-dot)) : 1);
        }
        if (kind) add_experts(out, b.a.x, tensor_new(I64, SHAPE(T, 1)), one, b.a.shared);
        CHECK(tensor_distance(out, b.a.out) <= 1e-12);
        fmoe_plan_destroy(&b.plan);
    }
}

static double loss(const block *b) /* <out, dout> + <logits, dlogits> */
{
    double sum = 0;
    REQUIRE(fmoe_block_forward(b->plan, &b->a, &b->run) == FMOE_OK);
    for (int64_t i = 0; i < T * H; i++) sum += tensor_get(b->a.out, i) * tensor_get(b->dout, i);
    for (int64_t i = 0; i < T * E; i++) sum += tensor_get(b->a.logits, i) * tensor_get(b->dlogits, i);
    return sum;
}

TEST(block_gradients)
{
    static const char *const names[PARAMETERS] = {"x",  "w_router",  "b_router",  "w1",
                                                  "w2", "shared w1", "shared w2", "shared_gate"};
    for (int n = 0; n < 12; n++) {
        block b = make_block(n % 4, n >= 4, n >= 8);
        CHECK_STATUS(fmoe_block_forward(b.plan, &b.a, &b.run), FMOE_OK);
        CHECK_STATUS(fmoe_block_backward(b.plan, &b.a, &b.run), FMOE_OK);
        for (int i = 0; i < PARAMETERS; i++)
            for (int64_t j = 0; b.of[i] && j < tensor_count(b.of[i]); j++) {
                const double value = tensor_get(b.of[i], j), got = tensor_get(b.d[i], j), step = 1e-5;
                tensor_set(b.of[i], j, value + step);
                const double above = loss(&b);
                tensor_set(b.of[i], j, value - step);
                const double slope = (above - loss(&b)) / (2 * step);
                tensor_set(b.of[i], j, value);
                if (!(fabs(slope - got) <= 1e-7 * (1 + fabs(got))))
                    TEST_FAIL("case %d: d%s[%" PRId64 "] is %.12g, by differences %.12g", n, names[i], j, got, slope);
            }
        fmoe_plan_destroy(&b.plan);
    }
}
