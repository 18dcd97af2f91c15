/* SPDX-License-Identifier: Apache-2.0
 *
 * act.c - the activations. SwiGLU in its usual layout and the ungated ones are one operator each, and so are, where
 * CANN has ClippedSwiglu, those that clamp gate and up, in both layouts. Everything else is composed of element-wise
 * operators, in f32 whatever the plan's dtype is, so that only the result is rounded: a  = s(g) * v(u)          dg =
 * s'(g) * (da * v(u))          du = v'(u) * (da * s(g)) Gates and ups are views of h: halves of its columns, or every
 * other column. */
#include "ops.h"

typedef struct {
    asc_view gate, up;
} halves;

static halves split(const asc_call *c, asc_view h)
{
    const int64_t I = h.dims[1] / 2;
    if (c->p->d.flags & FMOE_INTERLEAVED) return (halves){asc_part(h, 1, 0, 2, I), asc_part(h, 1, 1, 2, I)};
    return (halves){asc_part(h, 1, 0, 1, I), asc_part(h, 1, I, 1, I)};
}

static void gelu(asc_call *c, asc_view x, bool tanh_form, asc_view r)
{
    const aclTensor *tx = asc_t(c, x), *tr = asc_t(c, r);
    ASC_LAUNCH(c, GeluV2, tx, tanh_form ? 1 : 0, tr);
}

static void gelu_gradient(asc_call *c, asc_view d, asc_view x, bool tanh_form, asc_view r)
{
    char none[] = "none", approximate[] = "tanh";
    const aclTensor *td = asc_t(c, d), *tx = asc_t(c, x), *tr = asc_t(c, r);
    ASC_LAUNCH(c, GeluBackwardV2, td, tx, tanh_form ? approximate : none, tr);
}

static void relu_gradient(asc_call *c, asc_view d, asc_view x, asc_view r)
{
    const aclTensor *td = asc_t(c, d), *tx = asc_t(c, x), *tr = asc_t(c, r);
    const aclScalar *zero = asc_s(c, 0);
    ASC_LAUNCH(c, ThresholdBackward, td, tx, zero, tr);
}

/* v[i] = 0 where x[i] > limit, and where x[i] < -limit if `below`: the slope of a clamp. The limit itself passes. */
static void stop(asc_call *c, asc_view v, asc_view x, bool below, double limit)
{
    const asc_view mask = asc_new2(c, ACL_BOOL, x.dims[0], x.dims[1]);
    for (int side = 0; side <= (below ? 1 : 0); side++) {
        const aclTensor *tx = asc_t(c, x), *tm = asc_t(c, mask);
        const aclScalar *s = asc_s(c, side ? -limit : limit);
        if (side) ASC_LAUNCH(c, LtScalar, tx, s, tm);
        else ASC_LAUNCH(c, GtScalar, tx, s, tm);
        asc_fill_where(c, v, mask, 0);
    }
}

static bool clamps_gate(int act) { return act == FMOE_ACT_SWIGLU_CLAMP || act == FMOE_ACT_SWIGLU_OAI; }
static bool clamps_up(int act) { return clamps_gate(act) || act == FMOE_ACT_SWIGLU_CLAMP_OUT; }

/* s(g) before the clamp of CLAMP_OUT; g is clamped already. sig: sigmoid(alpha g) of OAI, for its gradient. */
static asc_view gate_value(asc_call *c, asc_view g, asc_view *sig)
{
    const fmoe_desc *d = &c->p->d;
    switch (d->act) {
    case FMOE_ACT_GEGLU:
    case FMOE_ACT_GEGLU_TANH: {
        const asc_view r = asc_like(c, g);
        gelu(c, g, d->act == FMOE_ACT_GEGLU_TANH, r);
        return r;
    }
    case FMOE_ACT_REGLU: return asc_do_Relu(c, g);
    case FMOE_ACT_SWIGLU_OAI:
        *sig = asc_do_Sigmoid(c, asc_do_Muls(c, g, (double)d->act_alpha));
        return asc_do_Mul(c, g, *sig);
    default: return asc_do_Silu(c, g);
    }
}

typedef struct {
    asc_view g, u, g_raw, u_raw, s, s_raw, v, sig;
} parts;

static parts factors(asc_call *c, asc_view h)
{
    const fmoe_desc *d = &c->p->d;
    const double L = (double)d->act_limit, minus = -L;
    const halves x = split(c, h);
    parts f = {.g_raw = asc_packed_as(c, x.gate, ACL_FLOAT), .u_raw = asc_packed_as(c, x.up, ACL_FLOAT)};
    f.g = clamps_gate(d->act) ? asc_do_Clamp(c, f.g_raw, NULL, &L) : f.g_raw;
    f.u = clamps_up(d->act) ? asc_do_Clamp(c, f.u_raw, &minus, &L) : f.u_raw;
    f.s_raw = gate_value(c, f.g, &f.sig);
    f.s = d->act == FMOE_ACT_SWIGLU_CLAMP_OUT ? asc_do_Clamp(c, f.s_raw, NULL, &L) : f.s_raw;
    f.v = d->act == FMOE_ACT_SWIGLU_OAI ? asc_do_Adds(c, f.u, 1) : f.u;
    return f;
}

static bool fused(const asc_call *c, const asc_view *h)
{
    return c->p->d.act == FMOE_ACT_SWIGLU && !(c->p->d.flags & FMOE_INTERLEAVED) && asc_is_packed(h);
}

/* ClippedSwiglu: gpt-oss's activation (a bias of 1 for the ups) and, with alpha 1 and no bias, the clamped SwiGLU. */
bool asc_act_clipped(const fmoe_acl *acl, const fmoe_desc *d)
{
    return acl->aclnnClippedSwiglu && acl->aclnnClippedSwigluGrad && clamps_gate(d->act);
}

static void clipped(asc_call *c, asc_view h, asc_view a, const asc_view *da, asc_view dh)
{
    const fmoe_desc *d = &c->p->d;
    const bool oai = d->act == FMOE_ACT_SWIGLU_OAI, pairs = d->flags & FMOE_INTERLEAVED;
    const double alpha = oai ? (double)d->act_alpha : 1, limit = (double)d->act_limit, bias = oai ? 1 : 0;
    const aclTensor *td = da ? asc_t(c, *da) : NULL, *th = asc_t(c, h), *to = asc_t(c, da ? dh : a);
    if (da) ASC_LAUNCH(c, ClippedSwigluGrad, td, th, NULL, -1, alpha, limit, bias, pairs, to);
    else ASC_LAUNCH(c, ClippedSwiglu, th, NULL, -1, alpha, limit, bias, pairs, to);
}

static void ungated(asc_call *c, asc_view h, asc_view a)
{
    switch (c->p->d.act) {
    case FMOE_ACT_GELU:
    case FMOE_ACT_GELU_TANH: gelu(c, h, c->p->d.act == FMOE_ACT_GELU_TANH, a); return;
    case FMOE_ACT_SILU: {
        const aclTensor *th = asc_t(c, h), *ta = asc_t(c, a);
        ASC_LAUNCH(c, Silu, th, ta);
        return;
    }
    case FMOE_ACT_RELU: {
        const aclTensor *th = asc_t(c, h), *ta = asc_t(c, a);
        ASC_LAUNCH(c, Relu, th, ta);
        return;
    }
    default: { /* RELU2 */
        const asc_view r = asc_do_Relu(c, h);
        const aclTensor *x = asc_t(c, r), *y = asc_t(c, r), *ta = asc_t(c, a);
        ASC_LAUNCH(c, Mul, x, y, ta);
        return;
    }
    }
}

static void ungated_gradient(asc_call *c, asc_view da, asc_view h, asc_view dh)
{
    switch (c->p->d.act) {
    case FMOE_ACT_GELU:
    case FMOE_ACT_GELU_TANH: gelu_gradient(c, da, h, c->p->d.act == FMOE_ACT_GELU_TANH, dh); return;
    case FMOE_ACT_SILU: {
        const aclTensor *td = asc_t(c, da), *th = asc_t(c, h), *tr = asc_t(c, dh);
        ASC_LAUNCH(c, SiluBackward, td, th, tr);
        return;
    }
    case FMOE_ACT_RELU: relu_gradient(c, da, h, dh); return;
    default: { /* RELU2: 2 relu(h) da */
        const asc_view t = asc_do_Mul(c, asc_do_Relu(c, h), da);
        const aclTensor *tx = asc_t(c, t), *tr = asc_t(c, dh);
        const aclScalar *two = asc_s(c, 2);
        ASC_LAUNCH(c, Muls, tx, two, tr);
        return;
    }
    }
}

void asc_act(asc_call *c, asc_view h, asc_view a)
{
    const size_t mark = c->used;
    if (h.dims[0] == 0) return;
    if (fused(c, &h)) {
        const aclTensor *th = asc_t(c, h), *ta = asc_t(c, a);
        ASC_LAUNCH(c, SwiGlu, th, -1, ta);
    } else if (asc_act_clipped(c->acl, &c->p->d)) {
        clipped(c, h, a, NULL, h);
    } else if (!c->p->gated) {
        ungated(c, h, a);
    } else {
        const parts f = factors(c, h);
        const asc_view r = a.dtype == ACL_FLOAT ? a : asc_new2(c, ACL_FLOAT, a.dims[0], a.dims[1]);
        const aclTensor *ts = asc_t(c, f.s), *tv = asc_t(c, f.v), *tr = asc_t(c, r);
        ASC_LAUNCH(c, Mul, ts, tv, tr);
        if (r.data != a.data) asc_cast(c, a, r);
    }
    asc_release(c, mark);
}

void asc_act_gradient(asc_call *c, asc_view da, asc_view h, asc_view dh)
{
    const size_t mark = c->used;
    const fmoe_desc *d = &c->p->d;
    const double L = (double)d->act_limit;
    if (h.dims[0] == 0) return; /* SwiGluGrad refuses empty tensors */
    if (fused(c, &h)) {
        const aclTensor *td = asc_t(c, da), *th = asc_t(c, h), *tr = asc_t(c, dh);
        ASC_LAUNCH(c, SwiGluGrad, td, th, -1, tr);
    } else if (asc_act_clipped(c->acl, d)) {
        clipped(c, h, h, &da, dh);
    } else if (!c->p->gated) {
        ungated_gradient(c, da, h, dh);
    } else {
        const parts f = factors(c, h);
        const asc_view D = asc_packed_as(c, da, ACL_FLOAT);
        const asc_view du = asc_do_Mul(c, D, f.s);
        if (clamps_up(d->act)) stop(c, du, f.u_raw, true, L);
        const asc_view t = asc_do_Mul(c, D, f.v);
        asc_view dg;
        if (d->act == FMOE_ACT_GEGLU || d->act == FMOE_ACT_GEGLU_TANH) {
            dg = asc_like(c, t);
            gelu_gradient(c, t, f.g, d->act == FMOE_ACT_GEGLU_TANH, dg);
        } else if (d->act == FMOE_ACT_REGLU) {
            dg = asc_like(c, t);
            relu_gradient(c, t, f.g, dg);
        } else if (d->act == FMOE_ACT_SWIGLU_OAI) { /* t * (sig + alpha g sig (1 - sig)) */
            const asc_view inner =
                asc_do_Muls(c, asc_do_SigmoidBackward(c, asc_do_Mul(c, t, f.g), f.sig), (double)d->act_alpha);
            dg = asc_do_Add(c, asc_do_Mul(c, t, f.sig), inner);
        } else {
            if (d->act == FMOE_ACT_SWIGLU_CLAMP_OUT) stop(c, t, f.s_raw, false, L);
            dg = asc_do_SiluBackward(c, t, f.g);
        }
        if (clamps_gate(d->act)) stop(c, dg, f.g_raw, false, L);
        const halves to = split(c, dh);
        asc_copy(c, to.gate, dg);
        asc_copy(c, to.up, du);
    }
    asc_release(c, mark);
}
