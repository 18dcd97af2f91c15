/* SPDX-License-Identifier: Apache-2.0
 *
 * ref_op.h - calling the reference through the backend's table, with nothing of the core between, and its gradients
 * against central finite differences. Used by test_ref.c,
 * test_ref_experts.c and test_ref_route.c. */
#ifndef FMOE_REF_OP_H
#define FMOE_REF_OP_H

#include "test.h"
#include "acts.h"
#include "tensors.h"
#include "backend.h"

static const double NaN = NAN, Inf = INFINITY;

#define CHECK_NEAR(a, b) CHECK(fabs((a) - (b)) <= 1e-9)

/* ---- A plan by hand, and calls on it ----------------------------------------------------------------------------- */

typedef struct op {
    fmoe_plan_impl p;
    bool unpermute;
    char *workspace;
} op;

static inline op make_op(fmoe_op kind, int64_t H, int64_t I, int64_t E, int64_t k)
{
    op o = {.p = {.d = FMOE_DESC_INIT, .backend = &fmoe_backend_reference}};
    fmoe_desc *d = &o.p.d;
    d->op = (int32_t)kind;
    d->dtype = FMOE_F64;
    d->device.type = FMOE_CPU;
    d->H = H;
    d->I = I;
    d->E = E;
    d->k = k;
    d->act_alpha = 1.702f;
    d->act_limit = 7;
    d->route.scale = 1;
    return o;
}

/* Settle what depends on the description, with an oddly placed workspace of exactly the size that is asked for. */
static inline void settle(op *o, int64_t T)
{
    size_t bytes[2], saved;
    o->p.gated = o->p.d.act < FMOE_ACT_SILU;
    o->p.h_cols = o->p.gated ? 2 * o->p.d.I : o->p.d.I;
    for (int i = 0; i < 2; i++) REQUIRE(o->p.backend->bytes(&o->p, (fmoe_pass)i, T, &bytes[i], &saved) == FMOE_OK);
    o->workspace = (char *)test_alloc((bytes[0] > bytes[1] ? bytes[0] : bytes[1]) + 1) + 1;
}

static inline fmoe_status call(const op *o, fmoe_pass pass, const void *args, uint32_t flags)
{
    const fmoe_backend *b = o->p.backend;
    fmoe_run run = FMOE_RUN_INIT;
    run.workspace = o->workspace;
    run.flags = flags;
    switch (o->p.d.op) {
    case FMOE_OP_ROUTE: return b->route[pass](&o->p, args, &run);
    case FMOE_OP_PERMUTE:
        if (o->unpermute) return b->unpermute[pass](&o->p, args, &run);
        return b->permute[pass](&o->p, args, &run);
    case FMOE_OP_GROUPED_MATMUL: return b->gmm[pass](&o->p, args, &run);
    case FMOE_OP_ACTIVATION: return b->activation[pass](&o->p, args, &run);
    default: return b->experts[pass](&o->p, args, &run);
    }
}

#define FORWARD(o, args, flags) CHECK_STATUS(call(o, FMOE_FORWARD, args, flags), FMOE_OK)
#define BACKWARD(o, args, flags) CHECK_STATUS(call(o, FMOE_BACKWARD, args, flags), FMOE_OK)
#define BAD_INDEX(o, pass, args, flags, text)                                                                          \
    (CHECK_STATUS(call(o, pass, args, flags), FMOE_ERR_INDEX), CHECK_ERROR_HAS(text))

/* L = <out, c>, so dL/dout = c. Each element of param is moved by +-step and the forward run again. A step that crosses
 * a corner of a clamp or relu is tried again smaller. */
static inline double loss(const op *o, const void *args, uint32_t flags, const fmoe_tensor *out, const fmoe_tensor *c)
{
    double sum = 0;
    REQUIRE(call(o, FMOE_FORWARD, args, flags) == FMOE_OK);
    for (int64_t i = 0; i < tensor_count(out); i++) {
        if (tensor_get(c, i) != 0) sum += tensor_get(out, i) * tensor_get(c, i);
    }
    return sum;
}

static inline void check_gradient(int line, const char *name, const op *o, const void *args, uint32_t flags,
                                  const fmoe_tensor *out, const fmoe_tensor *c, const fmoe_tensor *param,
                                  const fmoe_tensor *grad)
{
    REQUIRE(tensor_count(param) == tensor_count(grad));
    for (int64_t i = 0; i < tensor_count(param); i++) {
        const double value = tensor_get(param, i), g = tensor_get(grad, i), steps[] = {1e-4, 1e-5, 1e-6};
        double slope = NaN;
        for (int s = 0; s < 3 && !(fabs(slope - g) <= 1e-7 * (1 + fabs(g))); s++) {
            tensor_set(param, i, value + steps[s]);
            const double above = loss(o, args, flags, out, c);
            tensor_set(param, i, value - steps[s]);
            slope = (above - loss(o, args, flags, out, c)) / (2 * steps[s]);
        }
        tensor_set(param, i, value);
        if (!(fabs(slope - g) <= 1e-7 * (1 + fabs(g)))) {
            TEST_FAIL("line %d: d%s[%" PRId64 "] is %.12g, by differences %.12g", line, name, i, g, slope);
        }
    }
}

#define CHECK_GRADIENT(o, args, flags, out, c, param, grad)                                                            \
    check_gradient(__LINE__, #param, o, args, flags, out, c, param, grad)

#endif
