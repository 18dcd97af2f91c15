// SPDX-License-Identifier: Apache-2.0
// act.cuh - the activations. Every entry of fmoe_act is F(gate) * V(up), ungated F(h): two functions of one variable
// with their slopes. relu'(0) = 0; a clamp's limit itself still passes (as PyTorch has it). A NaN stays a NaN.
#pragma once
#include "common.cuh"

#include <cmath>
#include <type_traits>

struct Factor {
    float value, slope;
};

DEV float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }

// For results rounded to 16 bits: four instructions, where __fdividef(1.f, 1.f + __expf(-x)) is seven for the sake of
// denormals.
DEV float sigmoid_fast(float x)
{
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.f + e));
    return s;
}

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

// ---- For results of 16 bits ----
//
// FAST_CLAMP: F(g) = min(c s(alpha c), out_max) with c = min(g, gate_max), V(u) = clamp(u, up_max) + up_add. SiLU is
// one without limits.

enum { FAST_SWIGLU, FAST_CLAMP, FAST_TANH, FAST_ERF, FAST_RELU };

struct FastAct {
    int kind, squared; // squared: of relu
    float alpha, gate_max, out_max, up_max, up_add;
};

static inline FastAct fast_act(int act, float alpha, float limit)
{
    FastAct f = {FAST_CLAMP, 0, 1.f, INFINITY, INFINITY, INFINITY, 0.f};
    switch (act) {
    case FMOE_ACT_SWIGLU: f.kind = FAST_SWIGLU; break;
    case FMOE_ACT_GEGLU:
    case FMOE_ACT_GELU: f.kind = FAST_ERF; break;
    case FMOE_ACT_GEGLU_TANH:
    case FMOE_ACT_GELU_TANH: f.kind = FAST_TANH; break;
    case FMOE_ACT_REGLU:
    case FMOE_ACT_RELU: f.kind = FAST_RELU; break;
    case FMOE_ACT_RELU2: f.kind = FAST_RELU, f.squared = 1; break;
    case FMOE_ACT_SWIGLU_OAI: f.alpha = alpha, f.up_add = 1.f; // and as the next
    case FMOE_ACT_SWIGLU_CLAMP: f.gate_max = f.up_max = limit; break;
    case FMOE_ACT_SWIGLU_CLAMP_OUT: f.out_max = f.up_max = limit; break;
    default: break; // SiLU
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
    if (KIND == FAST_TANH) {
        const float k = 1.59576912160573072f, k3 = 0.0713548162726009f, q = g * g; // 2 sqrt(2 / pi) and 0.044715 of it
        const float s = sigmoid_fast(g * fmaf(k3, q, k)), v = g * s;
        return {v, fmaf(fmaf(-v, s, v), fmaf(3.f * k3, q, k), s)};
    }
    const bool over = g > f.gate_max;
    const float c = over ? f.gate_max : g, s = sigmoid_fast(f.alpha * c), v = c * s,
                slope = fmaf(fmaf(-v, s, v), f.alpha, s);
    const bool out = v > f.out_max;
    return {out ? f.out_max : v, over || out ? 0.f : slope};
}

template <int KIND> DEV Factor fast_up(const FastAct &f, float u)
{
    if (KIND != FAST_CLAMP) return {u, 1.f};
    const bool over = fabsf(u) > f.up_max;
    return {(over ? copysignf(f.up_max, u) : u) + f.up_add, over ? 0.f : 1.f};
}

template <int KIND, bool GATED> DEV float fast_value(const FastAct &f, float g, float u)
{
    if (KIND == FAST_SWIGLU) return g * sigmoid_fast(g) * u;
    const float v = fast_gate<KIND>(f, g).value;
    return GATED ? v * fast_up<KIND>(f, u).value : v;
}

// One element of the fused backward: d = <dout, W2>, p, gate and up to dh, p*a and a term of dp.
struct Slopes {
    float gate, up, pa, dp;
};
template <int KIND> DEV Slopes slopes(const FastAct &act, float d, float prob, float g, float u)
{
    if (KIND == FAST_SWIGLU) {
        const float s = sigmoid_fast(g), l = g * s, a = l * u, dp = d * prob;
        return {dp * u * (s + l * (1.f - s)), dp * l, a * prob, d * a};
    }
    const Factor f = fast_gate<KIND>(act, g), v = fast_up<KIND>(act, u);
    const float a = f.value * v.value, dp = d * prob;
    return {dp * v.value * f.slope, dp * f.value * v.slope, a * prob, d * a};
}

// call(KIND) with the kind of f as a constant: of those with a sigmoid, or of all.
template <class F> DEV void with_smooth(const FastAct &f, F call)
{
    if (f.kind == FAST_SWIGLU) call(std::integral_constant<int, FAST_SWIGLU>());
    else if (f.kind == FAST_CLAMP) call(std::integral_constant<int, FAST_CLAMP>());
    else call(std::integral_constant<int, FAST_TANH>());
}
template <class F> DEV void with_kind(const FastAct &f, F call)
{
    if (f.kind == FAST_ERF) call(std::integral_constant<int, FAST_ERF>());
    else if (f.kind == FAST_RELU) call(std::integral_constant<int, FAST_RELU>());
    else with_smooth(f, call);
}
