/* SPDX-License-Identifier: Apache-2.0
 * op_math.c - element by element: unary, binary with broadcasting, with a scalar, in place, comparisons. */
#include <math.h>
#include <string.h>

#include "sim.h"

typedef double (*fn2)(double a, double b, const double *s); /* s: the scalars */

/* One kernel for all: the tensors are i[1] (first), i[2] (second, or -1) and i[3] (out). */
static void apply(sim_exec *e)
{
    const sim_tensor *out = &e->t[e->i[3]];
    const int64_t n = sim_numel(out);
    const fn2 f = e->element;
    const double *a = sim_load_as(e, (int)e->i[1], out), *b = e->i[2] >= 0 ? sim_load_as(e, (int)e->i[2], out) : a;
    double *r = sim_buffer(e, (size_t)n * sizeof *r);
    for (int64_t i = 0; i < n; i++) r[i] = f(a[i], b[i], e->d);
    sim_store(e, (int)e->i[3], r);
}

static bool fits(const sim_tensor *t, const sim_tensor *out) /* t broadcasts to out */
{
    if (t->ndim > out->ndim) return false;
    for (int i = 1; i <= t->ndim; i++) {
        const int64_t d = t->dims[t->ndim - i];
        if (d != 1 && d != out->dims[out->ndim - i]) return false;
    }
    return true;
}

static sim_exec *begin(const char *name, fn2 f, const aclTensor *a, const aclTensor *b, const aclTensor *out,
                       bool in_place)
{
    sim_exec *e = sim_begin(name, apply);
    const bool fill = !in_place && a == out; /* written only */
    const int ia = in_place ? sim_inout(e, out) : fill ? sim_out(e, out) : sim_in(e, a), ib = b ? sim_in(e, b) : -1;
    const int io = in_place || fill ? ia : sim_out(e, out);
    const int64_t v[] = {0, ia, ib, io};
    memcpy(e->i, v, sizeof v);
    e->element = f;
    if (!e->status) {
        sim_check(e, fits(&e->t[ia], &e->t[io]), "self does not broadcast to out");
        if (ib >= 0) sim_check(e, fits(&e->t[ib], &e->t[io]), "other does not broadcast to out");
    }
    return e;
}

#define FN(Name, expr)                                                                                                 \
    static double f_##Name(double a, double b, const double *s)                                                        \
    {                                                                                                                  \
        (void)a, (void)b, (void)s;                                                                                     \
        return expr;                                                                                                   \
    }

#define UNARY(Name, expr)                                                                                              \
    FN(Name, expr)                                                                                                     \
    aclnnStatus aclnn##Name##GetWorkspaceSize(const aclTensor *self, aclTensor *out, SIM_WS)                           \
    {                                                                                                                  \
        return sim_end(begin(#Name, f_##Name, self, NULL, out, false), 0, workspaceSize, executor);                    \
    }                                                                                                                  \
    SIM_PHASE2(Name)

#define FILL(Name, expr)                                                                                               \
    FN(Name, expr)                                                                                                     \
    aclnnStatus aclnn##Name##GetWorkspaceSize(aclTensor *self, SIM_WS)                                                 \
    {                                                                                                                  \
        return sim_end(begin(#Name, f_##Name, self, NULL, self, false), 0, workspaceSize, executor);                   \
    }                                                                                                                  \
    SIM_PHASE2(Name)

#define UNARY_INPLACE(Name, expr)                                                                                      \
    FN(Name, expr)                                                                                                     \
    aclnnStatus aclnn##Name##GetWorkspaceSize(aclTensor *self, SIM_WS)                                                 \
    {                                                                                                                  \
        return sim_end(begin(#Name, f_##Name, NULL, NULL, self, true), 0, workspaceSize, executor);                    \
    }                                                                                                                  \
    SIM_PHASE2(Name)

#define BINARY(Name, expr)                                                                                             \
    FN(Name, expr)                                                                                                     \
    aclnnStatus aclnn##Name##GetWorkspaceSize(const aclTensor *self, const aclTensor *other, aclTensor *out, SIM_WS)   \
    {                                                                                                                  \
        return sim_end(begin(#Name, f_##Name, self, other, out, false), 0, workspaceSize, executor);                   \
    }                                                                                                                  \
    SIM_PHASE2(Name)

#define BINARY_INPLACE(Name, expr)                                                                                     \
    FN(Name, expr)                                                                                                     \
    aclnnStatus aclnn##Name##GetWorkspaceSize(aclTensor *self, const aclTensor *other, SIM_WS)                         \
    {                                                                                                                  \
        return sim_end(begin(#Name, f_##Name, NULL, other, self, true), 0, workspaceSize, executor);                   \
    }                                                                                                                  \
    SIM_PHASE2(Name)

#define WITH_SCALAR(Name, expr)                                                                                        \
    FN(Name, expr)                                                                                                     \
    aclnnStatus aclnn##Name##GetWorkspaceSize(const aclTensor *self, const aclScalar *other, aclTensor *out, SIM_WS)   \
    {                                                                                                                  \
        sim_exec *e = begin(#Name, f_##Name, self, NULL, out, false);                                                  \
        e->d[0] = sim_scalar(other);                                                                                   \
        return sim_end(e, 0, workspaceSize, executor);                                                                 \
    }                                                                                                                  \
    SIM_PHASE2(Name)

#define WITH_SCALAR_INPLACE(Name, expr)                                                                                \
    FN(Name, expr)                                                                                                     \
    aclnnStatus aclnn##Name##GetWorkspaceSize(aclTensor *self, const aclScalar *other, SIM_WS)                         \
    {                                                                                                                  \
        sim_exec *e = begin(#Name, f_##Name, NULL, NULL, self, true);                                                  \
        e->d[0] = sim_scalar(other);                                                                                   \
        return sim_end(e, 0, workspaceSize, executor);                                                                 \
    }                                                                                                                  \
    SIM_PHASE2(Name)

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }
static double gelu(double x) { return 0.5 * x * (1 + erf(x * M_SQRT1_2)); }
static double gelu_tanh(double x) { return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }
static double gelu_d(double x) { return 0.5 * (1 + erf(x * M_SQRT1_2)) + x * exp(-0.5 * x * x) * 0.3989422804014327; }

static double gelu_tanh_d(double x)
{
    const double t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
}

UNARY(Silu, a *sigmoid(a))
UNARY(Sigmoid, sigmoid(a))
UNARY(Relu, a > 0 || isnan(a) ? a : 0)
UNARY(Sqrt, sqrt(a))
UNARY(Rsqrt, 1 / sqrt(a))
UNARY(Exp, exp(a))
UNARY(Log, log(a))
UNARY(Neg, -a)
UNARY(Abs, fabs(a))
UNARY(Cos, cos(a))
UNARY(Sin, sin(a))
UNARY(Reciprocal, 1 / a)
UNARY(LogicalNot, a == 0)
UNARY(BitwiseNot, a == 0)
UNARY(IsFinite, isfinite(a) != 0)
UNARY(Gelu, gelu(a))
UNARY(Tanh, tanh(a))
FILL(InplaceZero, 0)
FILL(InplaceOne, 1)
UNARY_INPLACE(InplaceNeg, -a)
UNARY_INPLACE(InplaceSqrt, sqrt(a))

BINARY(SiluBackward, a *sigmoid(b) * (1 + b * (1 - sigmoid(b))))
BINARY(SigmoidBackward, a *b * (1 - b))
BINARY(TanhBackward, a * (1 - b * b))
BINARY(GeluBackward, a *gelu_d(b))
BINARY(Mul, a *b)
BINARY(Div, a / b)
BINARY(Maximum, fmax(a, b))
BINARY(Minimum, fmin(a, b))
BINARY(EqTensor, a == b)
BINARY(NeTensor, a != b)
BINARY(LtTensor, a < b)
BINARY(LeTensor, a <= b)
BINARY(GtTensor, a > b)
BINARY(GeTensor, a >= b)
BINARY(LogicalAnd, a != 0 && b != 0)
BINARY(LogicalOr, a != 0 || b != 0)
BINARY(BitwiseAndTensor, (double)((int64_t)a &(int64_t)b))
BINARY(BitwiseOrTensor, (double)((int64_t)a | (int64_t)b))
BINARY(PowTensorTensor, pow(a, b))
BINARY_INPLACE(InplaceMul, a *b)
BINARY_INPLACE(InplaceDiv, a / b)
BINARY_INPLACE(InplaceBitwiseAndTensor, (double)((int64_t)a &(int64_t)b))
BINARY_INPLACE(InplaceBitwiseOrTensor, (double)((int64_t)a | (int64_t)b))

WITH_SCALAR(Muls, a *s[0])
WITH_SCALAR(Divs, a / s[0])
WITH_SCALAR(EqScalar, a == s[0])
WITH_SCALAR(NeScalar, a != s[0])
WITH_SCALAR(LtScalar, a < s[0])
WITH_SCALAR(LeScalar, a <= s[0])
WITH_SCALAR(GtScalar, a > s[0])
WITH_SCALAR(GeScalar, a >= s[0])
WITH_SCALAR(PowTensorScalar, pow(a, s[0]))
WITH_SCALAR(FloorDivides, floor(a / s[0]))
WITH_SCALAR(RemainderTensorScalar, a - floor(a / s[0]) * s[0])
WITH_SCALAR(ClampMin, a < s[0] ? s[0] : a)
WITH_SCALAR_INPLACE(InplaceMuls, a *s[0])
WITH_SCALAR_INPLACE(InplaceDivs, a / s[0])
FN(InplaceFillScalar, s[0])
aclnnStatus aclnnInplaceFillScalarGetWorkspaceSize(aclTensor *self, const aclScalar *value, SIM_WS)
{
    sim_exec *e = begin("InplaceFillScalar", f_InplaceFillScalar, self, NULL, self, false);
    e->d[0] = sim_scalar(value);
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(InplaceFillScalar)

/* ---- More than one scalar, or three tensors ---- */

#define ALPHA(Name, inplace, expr)                                                                                     \
    FN(Name, expr)                                                                                                     \
    aclnnStatus aclnn##Name##GetWorkspaceSize(const aclTensor *self, const aclTensor *other, const aclScalar *alpha,   \
                                              aclTensor *out, SIM_WS)                                                  \
    {                                                                                                                  \
        sim_exec *e = begin(#Name, f_##Name, self, other, out, inplace);                                               \
        e->d[0] = sim_scalar(alpha);                                                                                   \
        return sim_end(e, 0, workspaceSize, executor);                                                                 \
    }                                                                                                                  \
    SIM_PHASE2(Name)

ALPHA(Add, false, a + s[0] * b)
ALPHA(Sub, false, a - s[0] * b)

#define ALPHA_INPLACE(Name, expr)                                                                                      \
    FN(Name, expr)                                                                                                     \
    aclnnStatus aclnn##Name##GetWorkspaceSize(aclTensor *self, const aclTensor *other, const aclScalar *alpha, SIM_WS) \
    {                                                                                                                  \
        sim_exec *e = begin(#Name, f_##Name, NULL, other, self, true);                                                 \
        e->d[0] = sim_scalar(alpha);                                                                                   \
        return sim_end(e, 0, workspaceSize, executor);                                                                 \
    }                                                                                                                  \
    SIM_PHASE2(Name)

ALPHA_INPLACE(InplaceAdd, a + s[0] * b)
ALPHA_INPLACE(InplaceSub, a - s[0] * b)
ALPHA_INPLACE(InplaceLerps, a + s[0] * (b - a))

#define SCALAR_ALPHA(Name, expr)                                                                                       \
    FN(Name, expr)                                                                                                     \
    aclnnStatus aclnn##Name##GetWorkspaceSize(const aclTensor *self, const aclScalar *other, const aclScalar *alpha,   \
                                              aclTensor *out, SIM_WS)                                                  \
    {                                                                                                                  \
        sim_exec *e = begin(#Name, f_##Name, self, NULL, out, false);                                                  \
        e->d[0] = sim_scalar(other);                                                                                   \
        e->d[1] = sim_scalar(alpha);                                                                                   \
        return sim_end(e, 0, workspaceSize, executor);                                                                 \
    }                                                                                                                  \
    SIM_PHASE2(Name)

SCALAR_ALPHA(Adds, a + s[0] * s[1])
SCALAR_ALPHA(Subs, a - s[0] * s[1])
SCALAR_ALPHA(Softplus, a *s[0] > s[1] ? a : log1p(exp(a * s[0])) / s[0])
FN(Rsubs, s[0] - s[1] * a)

aclnnStatus aclnnRsubsGetWorkspaceSize(const aclTensor *self, const aclScalar *other, const aclScalar *alpha,
                                       aclTensor *out, SIM_WS)
{
    sim_exec *e = begin("Rsubs", f_Rsubs, self, NULL, out, false);
    e->d[0] = sim_scalar(other);
    e->d[1] = sim_scalar(alpha);
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(Rsubs)

FN(InplaceAdds, a + s[0] * s[1])
aclnnStatus aclnnInplaceAddsGetWorkspaceSize(aclTensor *self, const aclScalar *other, const aclScalar *alpha, SIM_WS)
{
    sim_exec *e = begin("InplaceAdds", f_InplaceAdds, NULL, NULL, self, true);
    e->d[0] = sim_scalar(other);
    e->d[1] = sim_scalar(alpha);
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(InplaceAdds)

FN(Clamp, isnan(a) ? a : a<s[0] ? s[0] : a> s[1] ? s[1] : a)
aclnnStatus aclnnClampGetWorkspaceSize(const aclTensor *self, const aclScalar *min, const aclScalar *max,
                                       aclTensor *out, SIM_WS)
{
    sim_exec *e = begin("Clamp", f_Clamp, self, NULL, out, false);
    e->d[0] = min ? sim_scalar(min) : -INFINITY;
    e->d[1] = max ? sim_scalar(max) : INFINITY;
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(Clamp)

FN(ThresholdBackward, b <= s[0] ? 0 : a)
aclnnStatus aclnnThresholdBackwardGetWorkspaceSize(const aclTensor *grad, const aclTensor *self,
                                                   const aclScalar *threshold, aclTensor *out, SIM_WS)
{
    sim_exec *e = begin("ThresholdBackward", f_ThresholdBackward, grad, self, out, false);
    e->d[0] = sim_scalar(threshold);
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(ThresholdBackward)

FN(GeluV2, s[0] != 0 ? gelu_tanh(a) : gelu(a))
aclnnStatus aclnnGeluV2GetWorkspaceSize(const aclTensor *x, int64_t approximate, aclTensor *y, SIM_WS)
{
    sim_exec *e = begin("GeluV2", f_GeluV2, x, NULL, y, false);
    e->d[0] = (double)approximate;
    sim_check(e, approximate == 0 || approximate == 1, "approximate %lld", (long long)approximate);
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(GeluV2)

FN(GeluBackwardV2, a *(s[0] != 0 ? gelu_tanh_d(b) : gelu_d(b)))
aclnnStatus aclnnGeluBackwardV2GetWorkspaceSize(const aclTensor *grad, const aclTensor *self, char *approximate,
                                                aclTensor *out, SIM_WS)
{
    sim_exec *e = begin("GeluBackwardV2", f_GeluBackwardV2, grad, self, out, false);
    sim_check(e, approximate && (!strcmp(approximate, "none") || !strcmp(approximate, "tanh")), "approximate");
    e->d[0] = approximate && !strcmp(approximate, "tanh");
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(GeluBackwardV2)

FN(InplaceMaskedFillScalar, b != 0 ? s[0] : a)
aclnnStatus aclnnInplaceMaskedFillScalarGetWorkspaceSize(aclTensor *self, const aclTensor *mask, const aclScalar *value,
                                                         SIM_WS)
{
    sim_exec *e = begin("InplaceMaskedFillScalar", f_InplaceMaskedFillScalar, NULL, mask, self, true);
    sim_check(e, e->t[1].dtype == ACL_BOOL, "mask must be bool");
    e->d[0] = sim_scalar(value);
    sim_on_aicpu(e, e->t[0].dtype == ACL_INT64);
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(InplaceMaskedFillScalar)

/* self + value * t1 (* or /) t2, in place; where(condition, self, other) */
static void ternary(sim_exec *e)
{
    const int out = (int)e->i[1];
    const sim_tensor *like = &e->t[out];
    const int64_t n = sim_numel(like);
    const double *a = sim_load_as(e, 0, like), *b = sim_load_as(e, 1, like), *c = sim_load_as(e, 2, like);
    double *r = sim_buffer(e, (size_t)n * sizeof *r);
    for (int64_t i = 0; i < n; i++)
        r[i] = e->i[0] == 2 ? (a[i] != 0 ? b[i] : c[i]) : a[i] + e->d[0] * (e->i[0] ? b[i] / c[i] : b[i] * c[i]);
    sim_store(e, out, r);
}

static aclnnStatus three(const char *name, int kind, aclTensor *self, const aclTensor *a, const aclTensor *b,
                         const aclScalar *value, SIM_WS)
{
    sim_exec *e = sim_begin(name, ternary);
    sim_inout(e, self);
    sim_in(e, a);
    sim_in(e, b);
    e->i[0] = kind;
    e->d[0] = sim_scalar(value);
    return sim_end(e, 0, workspaceSize, executor);
}

aclnnStatus aclnnInplaceAddcmulGetWorkspaceSize(aclTensor *self, const aclTensor *a, const aclTensor *b,
                                                const aclScalar *value, SIM_WS)
{
    return three("InplaceAddcmul", 0, self, a, b, value, workspaceSize, executor);
}
SIM_PHASE2(InplaceAddcmul)

aclnnStatus aclnnInplaceAddcdivGetWorkspaceSize(aclTensor *self, const aclTensor *a, const aclTensor *b,
                                                const aclScalar *value, SIM_WS)
{
    return three("InplaceAddcdiv", 1, self, a, b, value, workspaceSize, executor);
}
SIM_PHASE2(InplaceAddcdiv)

aclnnStatus aclnnSWhereGetWorkspaceSize(const aclTensor *condition, const aclTensor *self, const aclTensor *other,
                                        aclTensor *out, SIM_WS)
{
    sim_exec *e = sim_begin("SWhere", ternary);
    sim_in(e, condition);
    sim_in(e, self);
    sim_in(e, other);
    e->i[1] = sim_out(e, out);
    e->i[0] = 2;
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(SWhere)

/* ---- Cast and copy ---- */

static void cast(sim_exec *e) { sim_store(e, 1, sim_load_as(e, 0, &e->t[1])); }

aclnnStatus aclnnCastGetWorkspaceSize(const aclTensor *self, const aclDataType dtype, aclTensor *out, SIM_WS)
{
    sim_exec *e = sim_begin("Cast", cast);
    sim_in(e, self);
    sim_out(e, out);
    sim_check(e, e->t[1].dtype == dtype && sim_same_shape(&e->t[0], &e->t[1]),
              "out must be of dtype %d and self's shape", dtype);
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(Cast)

aclnnStatus aclnnInplaceCopyGetWorkspaceSize(aclTensor *self, const aclTensor *src, SIM_WS)
{
    sim_exec *e = sim_begin("InplaceCopy", cast);
    sim_in(e, src);
    sim_out(e, self);
    sim_check(e, fits(&e->t[0], &e->t[1]), "src does not broadcast to self");
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(InplaceCopy)

static void arange(sim_exec *e)
{
    const int64_t n = sim_numel(&e->t[0]);
    double *r = sim_buffer(e, (size_t)n * sizeof *r);
    for (int64_t i = 0; i < n; i++) r[i] = e->d[0] + (double)i * e->d[1];
    sim_store(e, 0, r);
}

aclnnStatus aclnnArangeGetWorkspaceSize(const aclScalar *start, const aclScalar *end, const aclScalar *step,
                                        aclTensor *out, SIM_WS)
{
    (void)end;
    sim_exec *e = sim_begin("Arange", arange);
    sim_out(e, out);
    e->d[0] = sim_scalar(start);
    e->d[1] = sim_scalar(step);
    return sim_end(e, 0, workspaceSize, executor);
}
SIM_PHASE2(Arange)

static void triangle(sim_exec *e)
{
    const sim_tensor *t = &e->t[0];
    const int64_t n = sim_numel(t), c = t->dims[t->ndim - 1], rows = t->dims[t->ndim - 2];
    double *v = sim_load(e, 0);
    for (int64_t i = 0; i < n; i++) {
        const int64_t d = i % c - i / c % rows;
        if (e->i[1] ? d < e->i[0] : d > e->i[0]) v[i] = 0;
    }
    sim_store(e, 1, v);
}

static aclnnStatus tri(const char *name, const aclTensor *self, int64_t diagonal, aclTensor *out, int upper, SIM_WS)
{
    sim_exec *e = sim_begin(name, triangle);
    sim_in(e, self);
    sim_out(e, out);
    e->i[0] = diagonal;
    e->i[1] = upper;
    return sim_end(e, 0, workspaceSize, executor);
}

aclnnStatus aclnnTriuGetWorkspaceSize(const aclTensor *self, int64_t diagonal, aclTensor *out, SIM_WS)
{
    return tri("Triu", self, diagonal, out, 1, workspaceSize, executor);
}
aclnnStatus aclnnTrilGetWorkspaceSize(const aclTensor *self, int64_t diagonal, aclTensor *out, SIM_WS)
{
    return tri("Tril", self, diagonal, out, 0, workspaceSize, executor);
}
SIM_PHASE2(Triu)
SIM_PHASE2(Tril)
