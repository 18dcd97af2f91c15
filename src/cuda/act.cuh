// SPDX-License-Identifier: Apache-2.0
// act.cuh - the activations. Every entry of fmoe_act is F(gate) * V(up), ungated F(h): two functions of one variable with
// their slopes. relu'(0) = 0; a clamp's limit itself still passes (as PyTorch has it). A NaN stays a NaN.
#pragma once
#include "common.cuh"

#include <cmath>

struct Factor {
    float value, slope;
};

DEV float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
DEV float sigmoid_fast(float x) { return __fdividef(1.f, 1.f + __expf(-x)); } // for results rounded to 16 bits

DEV Factor silu_factor(float g, float alpha)
{
    const float s = sigmoid(alpha * g);
    return {g * s, s + alpha * g * s * (1.f - s)};
}

DEV Factor gelu_factor(float g)
{
    const float phi = 0.5f * erfcf(-g * 0.70710678118654752f), density = expf(-0.5f * g * g) * 0.39894228040143268f;
    return {g * phi, phi + g * density};
}

DEV Factor gelu_tanh_factor(float g)
{
    const float c = 0.79788456080286536f, z = c * (g + 0.044715f * g * g * g), dz = c * (1.f + 0.134145f * g * g);
    const float s = sigmoid(2.f * z);
    return {g * s, s + g * s * (1.f - s) * 2.f * dz};
}

DEV Factor relu_factor(float g)
{
    if (g <= 0.f) return {0.f, 0.f};
    return {g, 1.f};
}

DEV Factor at_most(Factor f, float limit)
{
    if (f.value > limit) return {limit, 0.f};
    return f;
}

DEV Factor gate_factor(int act, float g, float alpha, float limit)
{
    switch (act) {
    case FMOE_ACT_GEGLU:
    case FMOE_ACT_GELU: return gelu_factor(g);
    case FMOE_ACT_GEGLU_TANH:
    case FMOE_ACT_GELU_TANH: return gelu_tanh_factor(g);
    case FMOE_ACT_REGLU:
    case FMOE_ACT_RELU: return relu_factor(g);
    case FMOE_ACT_RELU2: {
        const Factor f = relu_factor(g);
        return {f.value * f.value, 2.f * f.value};
    }
    case FMOE_ACT_SWIGLU_CLAMP:
    case FMOE_ACT_SWIGLU_OAI: {
        const Factor c = at_most({g, 1.f}, limit);
        const Factor f = silu_factor(c.value, act == FMOE_ACT_SWIGLU_OAI ? alpha : 1.f);
        return {f.value, f.slope * c.slope};
    }
    case FMOE_ACT_SWIGLU_CLAMP_OUT: return at_most(silu_factor(g, 1.f), limit);
    default: return silu_factor(g, 1.f);
    }
}

DEV Factor up_factor(int act, float u, float limit)
{
    if (act != FMOE_ACT_SWIGLU_CLAMP && act != FMOE_ACT_SWIGLU_OAI && act != FMOE_ACT_SWIGLU_CLAMP_OUT) return {u, 1.f};
    Factor c;
    if (u < -limit) c = {-limit, 0.f};
    else c = at_most({u, 1.f}, limit);
    if (act == FMOE_ACT_SWIGLU_OAI) c.value += 1.f;
    return c;
}

// ---- For results of 16 bits, in the epilogues of the products: all sigmoids in one formula,
//   F(g) = min(c s(c (k0 + k1 c^2)), out_max) with c = min(g, gate_max),   V(u) = clamp(u, up_max) + up_add

enum { FAST_SWIGLU, FAST_SIGMOID, FAST_ERF, FAST_RELU };

struct FastAct {
    int kind, squared; // squared: of relu
    float k0, k1, gate_max, out_max, up_max, up_add;
};

static inline FastAct fast_act(int act, float alpha, float limit)
{
    FastAct f = {FAST_SIGMOID, 0, 1.f, 0.f, INFINITY, INFINITY, INFINITY, 0.f};
    switch (act) {
    case FMOE_ACT_SWIGLU: f.kind = FAST_SWIGLU; break;
    case FMOE_ACT_GEGLU:
    case FMOE_ACT_GELU: f.kind = FAST_ERF; break;
    case FMOE_ACT_GEGLU_TANH:
    case FMOE_ACT_GELU_TANH: f.k0 = 1.59576912160573072f, f.k1 = 0.0713548162726009f; break; // 2 sqrt(2 / pi) and 0.044715 of it
    case FMOE_ACT_REGLU:
    case FMOE_ACT_RELU: f.kind = FAST_RELU; break;
    case FMOE_ACT_RELU2: f.kind = FAST_RELU, f.squared = 1; break;
    case FMOE_ACT_SWIGLU_OAI: f.k0 = alpha, f.up_add = 1.f; // and as the next
    case FMOE_ACT_SWIGLU_CLAMP: f.gate_max = f.up_max = limit; break;
    case FMOE_ACT_SWIGLU_CLAMP_OUT: f.out_max = f.up_max = limit; break;
    default: break;
    }
    return f;
}

template <int KIND> DEV Factor fast_gate(const FastAct &f, float g)
{
    if (KIND == FAST_ERF) return gelu_factor(g);
    if (KIND == FAST_RELU) {
        const Factor r = relu_factor(g);
        return f.squared ? Factor{r.value * r.value, 2.f * r.value} : r;
    }
    const bool over = g > f.gate_max;
    const float c = over ? f.gate_max : g, q = c * c, s = sigmoid_fast(c * fmaf(f.k1, q, f.k0)), v = c * s;
    const float slope = over ? 0.f : s + v * (1.f - s) * fmaf(3.f * f.k1, q, f.k0);
    return at_most({v, slope}, f.out_max);
}

DEV Factor fast_up(const FastAct &f, float u)
{
    if (u > f.up_max) return {f.up_max + f.up_add, 0.f};
    if (u < -f.up_max) return {f.up_add - f.up_max, 0.f};
    return {u + f.up_add, 1.f};
}

template <int KIND, bool GATED> DEV float fast_value(const FastAct &f, float g, float u)
{
    if (KIND == FAST_SWIGLU) return g * sigmoid_fast(g) * u;
    const float v = fast_gate<KIND>(f, g).value;
    return GATED ? v * fast_up(f, u).value : v;
}
