/* SPDX-License-Identifier: Apache-2.0
 * check_act.c - the activations in double, written from the formulas of fusedmoe.h: a second opinion beside ref.c. */
#include "check.h"

typedef struct value {
    double f, d;
} value;

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

static value scaled_silu(double x, double alpha) /* x sigmoid(alpha x) */
{
    const double s = sigmoid(alpha * x);
    return (value){x * s, s + alpha * x * s * sigmoid(-alpha * x)};
}

static value gelu(double x)
{
    const double cdf = 0.5 * erfc(-x * M_SQRT1_2), pdf = exp(-0.5 * x * x) * 0.39894228040143267794;
    return (value){x * cdf, cdf + x * pdf};
}

static value gelu_tanh(double x) /* 0.5 (1 + tanh z) is sigmoid(2z), without cancelling in the tail */
{
    const double c = 2 * 0.79788456080286535588, z = c * (x + 0.044715 * x * x * x), s = sigmoid(z);
    return (value){x * s, s + x * s * sigmoid(-z) * c * (1 + 3 * 0.044715 * x * x)};
}

static value relu(double x) { return (value){x > 0 ? x : 0, x > 0}; }

check_act_value check_act(int act, double alpha, double limit, double g, double u)
{
    const bool clamps = act == FMOE_ACT_SWIGLU_CLAMP || act == FMOE_ACT_SWIGLU_OAI || act == FMOE_ACT_SWIGLU_CLAMP_OUT;
    const double gc = clamps && act != FMOE_ACT_SWIGLU_CLAMP_OUT ? fmin(g, limit) : g;
    const double uc = clamps ? fmax(-limit, fmin(u, limit)) : u;
    const double pass_g = gc == g, pass_u = uc == u;
    value v;
    switch (act) {
    case FMOE_ACT_SWIGLU:
    case FMOE_ACT_SWIGLU_CLAMP: v = scaled_silu(gc, 1); break;
    case FMOE_ACT_SWIGLU_CLAMP_OUT:
        v = scaled_silu(g, 1);
        if (v.f > limit) v = (value){limit, 0};
        break;
    case FMOE_ACT_GEGLU: v = gelu(g); break;
    case FMOE_ACT_GEGLU_TANH: v = gelu_tanh(g); break;
    case FMOE_ACT_REGLU: v = relu(g); break;
    case FMOE_ACT_SWIGLU_OAI:
        v = scaled_silu(gc, alpha);
        return (check_act_value){(uc + 1) * v.f, (uc + 1) * v.d * pass_g, v.f * pass_u};
    default: /* ungated */
        v = act == FMOE_ACT_SILU        ? scaled_silu(u, 1)
            : act == FMOE_ACT_GELU      ? gelu(u)
            : act == FMOE_ACT_GELU_TANH ? gelu_tanh(u)
                                        : relu(u);
        if (act == FMOE_ACT_RELU2) v = (value){v.f * v.f, 2 * v.f};
        return (check_act_value){v.f, 0, v.d};
    }
    return (check_act_value){v.f * uc, v.d * uc * pass_g, v.f * pass_u};
}

/* ---- bounds ---- */

static double part_of(check_act_value v, int which) { return which == 0 ? v.a : which == 1 ? v.dg : v.du; }

/* The largest change of a, dg or du while g and u move inside their uncertainty. Kinks are felt: the corners lie beyond
 * them. */
static double moved(const fmoe_act_params *p, double g, double u, double eg, double eu, int which)
{
    const double alpha = (double)p->alpha, limit = (double)p->limit;
    const double mid = part_of(check_act(p->act, alpha, limit, g, u), which);
    double most = 0;
    for (int corner = 0; corner < 9; corner++) {
        const check_act_value v = check_act(p->act, alpha, limit, g + (corner % 3 - 1) * eg, u + (corner / 3 - 1) * eu);
        const double d = fabs(part_of(v, which) - mid);
        most = d > most ? d : most;
    }
    return most;
}

/* |f'| <= 1.13 for every gate function here (2|x| for relu squared): the terms that are added to get a derivative. */
static double terms(const fmoe_act_params *p, double g, double u, int which)
{
    const bool gated = p->act < FMOE_ACT_SILU, clamps = gated && p->act >= FMOE_ACT_SWIGLU_CLAMP;
    const check_act_value v = check_act(p->act, (double)p->alpha, (double)p->limit, g, u);
    if (which == 0) return fabs(v.a);
    if (which == 1)
        return 1.13 * (fmin(fabs(u), clamps ? (double)p->limit : INFINITY) + (p->act == FMOE_ACT_SWIGLU_OAI));
    if (!gated) return p->act == FMOE_ACT_RELU2 ? 2 * fabs(u) : 1.13;
    return fabs(v.du);
}

/* 16 u: exp to 1.5 ulp, a division, a few products. 8 u in the inputs: arguments that are rounded before exp sees them
 * (alpha g, z^2). Twice the movement: the function may bend inside. A sigmoid below the smallest normal number may be
 * zero. */
double check_act_bound(const fmoe_act_params *p, double g, double u, double eg, double eu, int which)
{
    const double floor = 0x1p-126 * (1 + fabs(g)) * (1 + fabs(u));
    return 16 * U32 * terms(p, g, u, which) +
           2 * moved(p, g, u, eg + 8 * U32 * fabs(g), eu + 8 * U32 * fabs(u), which) + floor;
}
