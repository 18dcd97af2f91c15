/* SPDX-License-Identifier: Apache-2.0
 *
 * check_steps.c - FMOE_ROUND_STEPS: the activation against its formula in double with a rounding after every operation,
 * and the fused forward, bit for bit, against its composition: grouped matmuls, activations, and plain loops for
 * biases, p and the sum, each of which stores what it makes. */
#include "check_layer.h"

static double rounded(int dtype, double x)
{
    const float f = (float)x;
    return dtype == FMOE_BF16 ? (double)fmoe_bf16_to_float(fmoe_float_to_bf16(f))
                              : (double)fmoe_f16_to_float(fmoe_float_to_f16(f));
}

/* ---- the activation ---- */

static double function(int act, double x) { return check_act(act, 1.702, 7, 0, x).a; } /* of the ungated ones */

static double by_steps(int dtype, int act, double alpha, double limit, double g, double u)
{
    const bool clamps = act >= FMOE_ACT_SWIGLU_CLAMP && act < FMOE_ACT_SILU;
    limit = rounded(dtype, limit);
    if (clamps && act != FMOE_ACT_SWIGLU_CLAMP_OUT) g = fmin(g, limit);
    if (clamps) u = fmax(-limit, fmin(u, limit));
    if (act == FMOE_ACT_SWIGLU_OAI) {
        const double s = rounded(dtype, 1 / (1 + exp(-rounded(dtype, alpha * g))));
        return rounded(dtype, rounded(dtype, u + 1) * rounded(dtype, g * s));
    }
    if (act >= FMOE_ACT_SILU) return rounded(dtype, function(act, u));
    const int gate = act == FMOE_ACT_GEGLU        ? FMOE_ACT_GELU
                     : act == FMOE_ACT_GEGLU_TANH ? FMOE_ACT_GELU_TANH
                     : act == FMOE_ACT_REGLU      ? FMOE_ACT_RELU
                                                  : FMOE_ACT_SILU;
    double f = rounded(dtype, function(gate, g));
    if (act == FMOE_ACT_SWIGLU_CLAMP_OUT) f = fmin(f, limit);
    return rounded(dtype, f * u);
}

/* The function inside a step is computed in f32: where it comes to lie at the middle between two numbers, it may round
 * the other way, and the steps after it carry that on, as a few units in the last place. One element in some thousand.
 */
static void draw_activation(int64_t index)
{
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_ACTIVATION;
    d.dtype = (int32_t)CHECK_PICK(FMOE_BF16, FMOE_F16);
    d.act = check_acts[index % CHECK_ACTS];
    const bool gated = d.act < FMOE_ACT_SILU;
    d.flags = FMOE_ROUND_STEPS | (gated && check_below(2) ? FMOE_INTERLEAVED : 0);
    d.I = CHECK_PICK(1, 31, 64, 200);
    d.act_limit = check_below(2) ? 0.7f : 7; /* 0.7 is a number of neither type */
    d.act_alpha = 1.702f;
    const int64_t R = 20, I = d.I, C = gated ? 2 * I : I;
    check_note("I=%" PRId64 " act=%d dtype=%d flags=%u limit=%g", I, d.act, d.dtype, d.flags, (double)d.act_limit);
    const fmoe_plan plan = check_plan(&d);
    fmoe_tensor *h = check_fill(check_rows(d.dtype, R, C, 0), 3);
    fmoe_activation_args a = {.size = sizeof a, .h = h, .a = check_rows(d.dtype, R, I, 1)};
    const fmoe_run run = check_run(plan, FMOE_FORWARD, R, 0);
    CHECK_OK(fmoe_activation_forward(plan, &a, &run));
    int64_t apart = 0;
    for (int64_t i = 0; i < R * I && !check_failed(); i++) {
        const int64_t row = i / I, j = i % I;
        const bool both = d.flags & FMOE_INTERLEAVED;
        const int64_t gc = row * C + (both ? 2 * j : j), uc = !gated ? gc : both ? gc + 1 : gc + I;
        const double want = by_steps(d.dtype, d.act, 1.702f, (double)d.act_limit, gated ? check_get(h, gc) : 0,
                                     check_get(h, uc)),
                     got = check_get(a.a, i);
        apart += got != want;
        check_near("a", i, got, want, 4.1 * check_u(d.dtype) * fabs(want) + check_tiny(d.dtype));
    }
    if (apart > 2 + R * I / 100)
        check_fail("%" PRId64 " of %" PRId64 " elements are not those of the steps", apart, R * I);
}

/* ---- the layer ---- */

/* The rows of one expert through its matrices, as a list of one. */
static const fmoe_tensor *product(const fmoe_desc *like, const fmoe_tensor *x, const fmoe_tensor *w)
{
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_GROUPED_MATMUL, d.dtype = like->dtype, d.E = 1, d.threads = like->threads;
    fmoe_tensor turned = *w; /* [out,in], as the layer has it, to [in,out] */
    int64_t shape[2] = {w->shape[1], w->shape[0]}, strides[2] = {fmoe_stride(w, 1), fmoe_stride(w, 0)};
    turned.shape = shape, turned.strides = strides;
    const fmoe_plan plan = check_plan(&d);
    fmoe_gmm_args a = {.size = sizeof a, .x = x, .w = &turned, .list = 1};
    a.y = check_rows(d.dtype, x->shape[0], shape[1], 0);
    const fmoe_run run = check_run(plan, FMOE_FORWARD, x->shape[0], 0);
    CHECK_OK(fmoe_grouped_matmul_forward(plan, &a, &run));
    return a.y;
}

static void add_bias(const check_layer *l, const fmoe_tensor *y, const fmoe_tensor *bias, int64_t e)
{
    const int64_t n = y->shape[1];
    for (int64_t i = 0; (l->d.flags & FMOE_BIAS) && i < check_count(y); i++)
        check_set(y, i, (double)((float)check_get(y, i) + (float)check_get(bias, e * n + i % n)));
}

/* sum += p * y of the slots of expert e, in the order of tokens. */
static void compose_expert(const check_layer *l, int64_t e, float *sum)
{
    const int64_t H = l->d.H, k = l->d.k, slots = l->T * k;
    int64_t *slot = check_alloc((size_t)slots * sizeof *slot), n = 0;
    for (int64_t i = 0; i < slots; i++)
        if ((int64_t)check_get(l->ids, i) == e) slot[n++] = i;
    if (n == 0) return;
    fmoe_tensor *x = check_rows(l->d.dtype, n, H, 0);
    for (int64_t i = 0; i < n * H; i++) check_set(x, i, check_get(l->x, slot[i / H] / k * H + i % H));
    const fmoe_tensor *h = product(&l->d, x, &check_slices(l->w1)[e]);
    add_bias(l, h, l->b1, e);
    fmoe_desc d = l->d;
    d.op = FMOE_OP_ACTIVATION;
    if (l->list) d.flags &= ~(uint32_t)FMOE_INTERLEAVED;
    fmoe_activation_args act = {.size = sizeof act, .h = h, .a = check_rows(d.dtype, n, l->d.I, 0)};
    const fmoe_plan plan = check_plan(&d);
    const fmoe_run run = check_run(plan, FMOE_FORWARD, n, 0);
    CHECK_OK(fmoe_activation_forward(plan, &act, &run));
    const fmoe_tensor *y = product(&l->d, act.a, &check_slices(l->w2)[e]);
    add_bias(l, y, l->b2, e);
    for (int64_t i = 0; i < n * H; i++)
        sum[slot[i / H] / k * H + i % H] += (float)rounded(d.dtype, check_get(l->p, slot[i / H]) * check_get(y, i));
}

static void draw_layer(int64_t index)
{
    fmoe_desc d = FMOE_DESC_INIT;
    d.op = FMOE_OP_EXPERTS;
    d.dtype = (int32_t)CHECK_PICK(FMOE_BF16, FMOE_BF16, FMOE_F16);
    d.act = index % 2 ? check_acts[index / 2 % CHECK_ACTS] : FMOE_ACT_SWIGLU_OAI;
    d.E = CHECK_PICK(1, 3, 8), d.k = CHECK_PICK(1, 2, 4);
    d.H = check_size(200), d.I = check_size(200);
    d.threads = (int32_t)CHECK_PICK(1, 2, 3);
    d.flags = FMOE_ROUND_STEPS |
              (uint32_t)(CHECK_PICK(0, FMOE_BIAS) | CHECK_PICK(0, FMOE_INTERLEAVED) | CHECK_PICK(0, FMOE_SKIP_NEG1));
    const int layout = (int)(check_below(256) & ~(LAYER_WIDE_P | LAYER_WIDE_BIAS));
    check_layer l = layer_make(&d, CHECK_PICK(1, 5, 17, 40), layout);
    check_note("T=%" PRId64 " H=%" PRId64 " I=%" PRId64 " E=%" PRId64 " k=%" PRId64
               " dtype=%d act=%d flags=%u layout=%d",
               l.T, d.H, d.I, d.E, d.k, d.dtype, d.act, l.d.flags, layout);
    layer_run(&l, 0, 0);
    float *sum = check_alloc((size_t)(l.T * d.H) * sizeof *sum);
    for (int64_t e = 0; e < d.E; e++) compose_expert(&l, e, sum);
    const fmoe_tensor *want = check_rows(d.dtype, l.T, d.H, 0);
    for (int64_t i = 0; i < l.T * d.H; i++) check_set(want, i, (double)sum[i]);
    check_equal("out", l.out, want);

    /* The backward has nothing to round by: on the same h, the same gradients without the flag. */
    fmoe_desc plain = l.d;
    plain.flags &= ~(uint32_t)FMOE_ROUND_STEPS;
    check_layer again = layer_again(&l, &plain);
    again.backward.saved = l.backward.saved;
    const fmoe_run b = check_run(again.plan, FMOE_BACKWARD, l.T, 0);
    CHECK_OK(fmoe_experts_backward(again.plan, &again.backward, &b));
    again.out = l.out;
    layer_equal("gradients", &l, &again);
}

const check_case check_steps_cases[] = {
    {"steps_activation", draw_activation, 24, 1, 0},
    {"steps_layer", draw_layer, 24, 1, 0},
    {NULL, NULL, 0, 0, 0},
};
