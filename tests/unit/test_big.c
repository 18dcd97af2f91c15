/* SPDX-License-Identifier: Apache-2.0
 *
 * test_big.c - row 5: more than 2^31 elements while every dimension is small, in activations and in weights. Memory is
 * mapped without being reserved, and only little of it is touched. */
#include <sys/mman.h>

#include "test.h"
#include "tensors.h"

static const int64_t limit = INT64_C(1) << 31;

typedef struct mapping {
    void *p;
    size_t bytes;
} mapping;

static mapping mappings[16];
static int n_mappings;

/* A tensor of zeros that costs nothing until it is written. */
static fmoe_tensor *sparse(int dtype, int ndim, const int64_t *shape)
{
    fmoe_tensor *t = tensor_over(NULL, dtype, ndim, shape, NULL);
    const size_t bytes = (size_t)tensor_count(t) * fmoe_dtype_size(dtype);
    t->data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(t->data != MAP_FAILED);
    madvise(t->data, bytes, MADV_HUGEPAGE); /* only faster */
    mappings[n_mappings++] = (mapping){t->data, bytes};
    return t;
}

static void unmap(void)
{
    for (; n_mappings; n_mappings--) munmap(mappings[n_mappings - 1].p, mappings[n_mappings - 1].bytes);
}

static fmoe_run workspace(fmoe_plan plan, fmoe_pass pass, int64_t T)
{
    fmoe_run run = FMOE_RUN_INIT;
    REQUIRE(fmoe_workspace_bytes(plan, pass, T, &run.workspace_bytes) == FMOE_OK);
    run.workspace = test_alloc(run.workspace_bytes);
    return run;
}

/* Weights: E*2I*H > 2^31, two experts used: the first and the last. The same two experts in a layer of two give the
 * same bits. */
TEST(weights_past_2_31)
{
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_EXPERTS;
    d.dtype = FMOE_BF16;
    d.H = 1024, d.I = 512, d.E = 2051, d.k = 2;
    const int64_t T = 3, H = d.H, I = d.I, E = d.E, one = 2 * I * H;
    REQUIRE(E * one > limit);
    fmoe_tensor *x = tensor_random(tensor_new(FMOE_BF16, SHAPE(T, H)), 1),
                *dout = tensor_random(tensor_new(FMOE_BF16, SHAPE(T, H)), 1);
    fmoe_tensor *p = tensor_random(tensor_new(FMOE_F32, SHAPE(T, 2)), 1), *ids = tensor_new(I32, SHAPE(T, 2)),
                *few_ids = tensor_new(I32, SHAPE(T, 2));
    fmoe_tensor *w1 = sparse(FMOE_BF16, SHAPE(E, 2 * I, H)), *w2 = sparse(FMOE_BF16, SHAPE(E, H, I));
    fmoe_tensor *dw1 = sparse(FMOE_BF16, SHAPE(E, 2 * I, H)), *dw2 = sparse(FMOE_BF16, SHAPE(E, H, I));
    fmoe_tensor *few1 = tensor_random(tensor_new(FMOE_BF16, SHAPE(2, 2 * I, H)), 0.05),
                *few2 = tensor_random(tensor_new(FMOE_BF16, SHAPE(2, H, I)), 0.05);
    fmoe_tensor *few_dw1 = tensor_new(FMOE_BF16, SHAPE(2, 2 * I, H)), *few_dw2 = tensor_new(FMOE_BF16, SHAPE(2, H, I));
    for (int64_t i = 0; i < 2 * T; i++) {
        tensor_set(ids, i, i % 2 ? (double)(E - 1) : 0);
        tensor_set(few_ids, i, (double)(i % 2));
    }
    for (int64_t e = 0; e < 2; e++) {
        const int64_t to = e ? E - 1 : 0;
        memcpy((uint16_t *)w1->data + to * one, (uint16_t *)few1->data + e * one, (size_t)one * 2);
        memcpy((uint16_t *)w2->data + to * I * H, (uint16_t *)few2->data + e * I * H, (size_t)(I * H) * 2);
    }
    fmoe_tensor *out[2], *dx[2];
    for (int few = 0; few < 2; few++) {
        fmoe_plan plan;
        d.E = few ? 2 : E;
        REQUIRE(fmoe_plan_create(&plan, &d) == FMOE_OK);
        out[few] = tensor_new(FMOE_BF16, SHAPE(T, H));
        dx[few] = tensor_new(FMOE_BF16, SHAPE(T, H));
        fmoe_experts_args a = {.size = sizeof a,
                               .x = x,
                               .ids = few ? few_ids : ids,
                               .weights = p,
                               .w = {.w1 = few ? few1 : w1, .w2 = few ? few2 : w2},
                               .out = out[few]};
        REQUIRE(fmoe_saved_bytes(plan, T, &a.saved_bytes) == FMOE_OK);
        a.saved = test_alloc(a.saved_bytes);
        const fmoe_run forward = workspace(plan, FMOE_FORWARD, T);
        fmoe_run backward = workspace(plan, FMOE_BACKWARD, T);
        CHECK_STATUS(fmoe_experts_forward(plan, &a, &forward), FMOE_OK);
        a.dout = dout;
        a.dx = dx[few];
        a.dw = (fmoe_weights){.w1 = few ? few_dw1 : dw1, .w2 = few ? few_dw2 : dw2};
        backward.flags = FMOE_ACCUMULATE; /* experts without rows are left alone: no 6 GB of zeros */
        CHECK_STATUS(fmoe_experts_backward(plan, &a, &backward), FMOE_OK);
        fmoe_plan_destroy(&plan);
    }
    CHECK_SAME(out[0], out[1]);
    CHECK_SAME(dx[0], dx[1]);
    CHECK(tensor_get(out[0], 5) != 0 && tensor_get(dx[0], 5) != 0);
    for (int64_t e = 0; e < 2; e++) {
        const int64_t from = e ? E - 1 : 0;
        CHECK(!memcmp((uint16_t *)dw1->data + from * one, (uint16_t *)few_dw1->data + e * one, (size_t)one * 2));
        CHECK(
            !memcmp((uint16_t *)dw2->data + from * I * H, (uint16_t *)few_dw2->data + e * I * H, (size_t)(I * H) * 2));
    }
    unmap();
}

/* Activations: T*H > 2^31, all tokens but the first and the last two skipped; forward and backward. */
TEST(tokens_past_2_31)
{
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_EXPERTS;
    d.dtype = FMOE_BF16;
    d.H = 2048, d.I = 5, d.E = 2, d.k = 1;
    d.flags = FMOE_SKIP_NEG1 | FMOE_RECOMPUTE;
    const int64_t T = limit / d.H + 3, H = d.H;
    fmoe_plan plan;
    REQUIRE(fmoe_plan_create(&plan, &d) == FMOE_OK);
    fmoe_tensor *x = sparse(FMOE_BF16, SHAPE(T, H)), *out = sparse(FMOE_BF16, SHAPE(T, H));
    fmoe_tensor *ids = tensor_fill(tensor_new(I32, SHAPE(T, 1)), -1),
                *p = tensor_fill(tensor_new(FMOE_F32, SHAPE(T, 1)), 1);
    fmoe_tensor *w1 = tensor_random(tensor_new(FMOE_BF16, SHAPE(2, 10, H)), 0.1),
                *w2 = tensor_random(tensor_new(FMOE_BF16, SHAPE(2, H, 5)), 1);
    fmoe_tensor *few_x = tensor_random(tensor_new(FMOE_BF16, SHAPE(3, H)), 1),
                *few_out = tensor_new(FMOE_BF16, SHAPE(3, H));
    fmoe_tensor *few_ids = tensor_list(tensor_new(I32, SHAPE(3, 1)), VALUES(0, 1, 1)),
                *few_p = tensor_fill(tensor_new(FMOE_F32, SHAPE(3, 1)), 1);
    const int64_t rows[] = {0, T - 2, T - 1};
    for (int i = 0; i < 3; i++) {
        memcpy((uint16_t *)x->data + rows[i] * H, (uint16_t *)few_x->data + i * H, (size_t)H * 2);
        tensor_set(ids, rows[i], tensor_get(few_ids, i));
    }
    fmoe_experts_args a = {.size = sizeof a, .x = x, .ids = ids, .weights = p, .w = {.w1 = w1, .w2 = w2}, .out = out};
    fmoe_experts_args few = {
        .size = sizeof few, .x = few_x, .ids = few_ids, .weights = few_p, .w = a.w, .out = few_out};
    const fmoe_run run = workspace(plan, FMOE_FORWARD, T), few_run = workspace(plan, FMOE_FORWARD, 3);
    CHECK_STATUS(fmoe_experts_forward(plan, &a, &run), FMOE_OK);
    CHECK_STATUS(fmoe_experts_forward(plan, &few, &few_run), FMOE_OK);
    for (int i = 0; i < 3; i++)
        CHECK(!memcmp((uint16_t *)out->data + rows[i] * H, (uint16_t *)few_out->data + i * H, (size_t)H * 2));
    CHECK(tensor_get(few_out, 1) != 0);
    CHECK(((uint16_t *)out->data)[limit - 1] == 0); /* a skipped one */
    fmoe_plan_destroy(&plan);
    unmap();
}

/* Rows of a grouped product: R*K > 2^31, the second group is the last two rows. */
TEST(grouped_rows_past_2_31)
{
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_GROUPED_MATMUL;
    d.dtype = FMOE_BF16; /* 268 GFLOP, most of them of columns that are not there: in f32 they take twice as long */
    d.K = 1024, d.N = 3, d.E = 2;
    const int64_t R = limit / d.K + 2;
    fmoe_plan plan;
    REQUIRE(fmoe_plan_create(&plan, &d) == FMOE_OK);
    fmoe_tensor *x = sparse(FMOE_BF16, SHAPE(R, d.K)), *y = tensor_new(FMOE_F32, SHAPE(R, d.N));
    fmoe_tensor *w = tensor_fill(tensor_new(FMOE_BF16, SHAPE(2, d.K, d.N)), 2),
                *sizes = tensor_list(tensor_new(I64, SHAPE(2)), VALUES((double)(R - 2), 2));
    tensor_set(x, 1, 3);
    tensor_set(x, R * d.K - 1, 7);
    const fmoe_gmm_args a = {.size = sizeof a, .x = x, .w = w, .sizes = sizes, .y = y};
    const fmoe_run run = workspace(plan, FMOE_FORWARD, R);
    CHECK_STATUS(fmoe_grouped_matmul_forward(plan, &a, &run), FMOE_OK);
    for (int64_t n = 0; n < 3; n++)
        CHECK(tensor_get(y, n) == 6 && tensor_get(y, (R - 1) * 3 + n) == 14 && tensor_get(y, (R - 2) * 3 + n) == 0);
    fmoe_plan_destroy(&plan);
    unmap();
}

/* Rows far apart: a stride that takes row 2 past 2^31 elements, in and out. */
TEST(strides_past_2_31)
{
    const int64_t stride = limit - 5, I = 7;
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_ACTIVATION;
    d.dtype = FMOE_F16;
    d.I = I;
    d.act = FMOE_ACT_RELU;
    fmoe_plan plan;
    REQUIRE(fmoe_plan_create(&plan, &d) == FMOE_OK);
    fmoe_tensor *h = sparse(FMOE_F16, SHAPE(2 * stride + I)), *a = sparse(FMOE_F16, SHAPE(2 * stride + I));
    const fmoe_tensor *rows_h = tensor_over(h->data, FMOE_F16, SHAPE(3, I), (const int64_t[]){stride, 1});
    const fmoe_tensor *rows_a = tensor_over(a->data, FMOE_F16, SHAPE(3, I), (const int64_t[]){stride, 1});
    for (int64_t i = 0; i < 3 * I; i++) tensor_set(rows_h, i, (double)(i - 4));
    const fmoe_activation_args args = {.size = sizeof args, .h = rows_h, .a = rows_a};
    const fmoe_run run = workspace(plan, FMOE_FORWARD, 3);
    CHECK_STATUS(fmoe_activation_forward(plan, &args, &run), FMOE_OK);
    for (int64_t i = 0; i < 3 * I; i++) CHECK(tensor_get(rows_a, i) == (i < 4 ? 0 : (double)(i - 4)));
    fmoe_plan_destroy(&plan);
    unmap();
}
