/* SPDX-License-Identifier: Apache-2.0
 * Train one Mixture-of-Experts layer, router and experts, to imitate a function: cc train_layer.c -lfusedmoe -lm */
#include <fusedmoe.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    T = 256,
    H = 16,
    I = 64,
    E = 4,
    K = 2,
    STEPS = 200
}; /* tokens, hidden, intermediate, experts, experts per token */

static fmoe_tensor *tensor(fmoe_datatype type, int ndim, int64_t a, int64_t b, int64_t c)
{
    fmoe_tensor *t = calloc(1, sizeof *t + 3 * sizeof(int64_t));
    const size_t n = (size_t)(a * b * c);
    *t = (fmoe_tensor){
        .data = calloc(n, 8), .device = {FMOE_CPU, 0}, .ndim = ndim, .dtype = type, .shape = (int64_t *)(t + 1)};
    t->shape[0] = a, t->shape[1] = b, t->shape[2] = c;
    return t;
}

static fmoe_tensor *floats(int ndim, int64_t a, int64_t b, int64_t c, float scale)
{
    fmoe_tensor *t = tensor((fmoe_datatype){2, 32, 1}, ndim, a, b, c);
    for (int64_t i = 0; i < a * b * c; i++)
        ((float *)t->data)[i] = scale * (2.0f * (float)rand() / (float)RAND_MAX - 1.0f);
    return t;
}

static void must(fmoe_status status)
{
    if (status == FMOE_OK) return;
    fprintf(stderr, "%s: %s\n", fmoe_status_string(status), fmoe_last_error());
    exit(1);
}

static void step(fmoe_tensor *w, const fmoe_tensor *dw, float rate) /* plain gradient descent */
{
    for (int64_t i = 0; i < w->shape[0] * w->shape[1] * (w->ndim == 3 ? w->shape[2] : 1); i++)
        ((float *)w->data)[i] -= rate * ((const float *)dw->data)[i];
}

int main(void)
{
    fmoe_desc d = FMOE_DESC_INIT; /* what to compute: router, top-2 routing, SwiGLU experts */
    d.op = FMOE_OP_BLOCK;
    d.dtype = FMOE_F32;
    d.H = H, d.I = I, d.E = E, d.k = K;
    d.route.renormalize = 1;
    fmoe_plan plan;
    must(fmoe_plan_create(&plan, &d));

    fmoe_tensor *x = floats(2, T, H, 1, 1), *out = floats(2, T, H, 1, 0), *dout = floats(2, T, H, 1, 0);
    fmoe_tensor *router = floats(2, E, H, 1, 0.5f), *drouter = floats(2, E, H, 1, 0);
    fmoe_tensor *w1 = floats(3, E, 2 * I, H, 0.5f), *dw1 = floats(3, E, 2 * I, H, 0);
    fmoe_tensor *w2 = floats(3, E, H, I, 0.5f), *dw2 = floats(3, E, H, I, 0);
    fmoe_block_args a = {.size = sizeof a,
                         .x = x,
                         .w_router = router,
                         .w = {.w1 = w1, .w2 = w2},
                         .logits = floats(2, T, E, 1, 0),
                         .ids = tensor((fmoe_datatype){0, 32, 1}, 2, T, K, 1),
                         .weights = floats(2, T, K, 1, 0),
                         .out = out,
                         .dout = dout,
                         .dw_router = drouter,
                         .dw = {.w1 = dw1, .w2 = dw2}};
    fmoe_run run = FMOE_RUN_INIT; /* the caller owns all memory: workspace, and what forward keeps for backward */
    size_t forward, backward;
    must(fmoe_workspace_bytes(plan, FMOE_FORWARD, T, &forward));
    must(fmoe_workspace_bytes(plan, FMOE_BACKWARD, T, &backward));
    run.workspace_bytes = forward > backward ? forward : backward;
    run.workspace = malloc(run.workspace_bytes);
    must(fmoe_saved_bytes(plan, T, &a.saved_bytes));
    a.saved = malloc(a.saved_bytes);

    for (int i = 0; i <= STEPS; i++) {
        must(fmoe_block_forward(plan, &a, &run));
        double loss = 0;
        for (int n = 0; n < T * H; n++) { /* the target: sin(3x), element by element */
            const float error = ((float *)out->data)[n] - sinf(3 * ((float *)x->data)[n]);
            ((float *)dout->data)[n] = 2 * error / T;
            loss += (double)(error * error) / T;
        }
        if (i % 40 == 0) printf("step %3d  loss %.4f\n", i, loss);
        must(fmoe_block_backward(plan, &a, &run));
        step(router, drouter, 0.2f);
        step(w1, dw1, 0.2f);
        step(w2, dw2, 0.2f);
    }
    must(fmoe_plan_destroy(&plan));
    return 0;
}
