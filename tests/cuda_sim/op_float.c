/* SPDX-License-Identifier: Apache-2.0
 * op_float.c - floating point, and conversions. What the silicon approximates (ex2, rcp and so on) is rounded correctly
 * here. */
#include "ptx.h"

#include <fenv.h>
#include <math.h>
#include <string.h>

/* x op y in the instruction's rounding; the compiler must not compute it in another. */
#define ROUNDED(...)                                                                                                   \
    if (i->rounding != FE_TONEAREST) fesetround(i->rounding);                                                          \
    __VA_ARGS__;                                                                                                       \
    if (i->rounding != FE_TONEAREST) fesetround(FE_TONEAREST)
#define FLOAT2(name, T, ...)                                                                                           \
    static void name(warp *w, const instruction *i, uint32_t lanes)                                                    \
    {                                                                                                                  \
        T *const d = REG(T, 0);                                                                                        \
        const T *const a = REG(T, 1), *const b = REG(T, 2);                                                            \
        ROUNDED(EACH(const T x = a[l]; const T y = b[l]; d[l] = (T)(__VA_ARGS__)));                                    \
    }
#define FLOAT1(name, T, ...)                                                                                           \
    static void name(warp *w, const instruction *i, uint32_t lanes)                                                    \
    {                                                                                                                  \
        T *const d = REG(T, 0);                                                                                        \
        const T *const a = REG(T, 1);                                                                                  \
        EACH(const T x = a[l]; d[l] = (T)(__VA_ARGS__));                                                               \
    }
/* Of a number and none the number. */
static float least(float x, float y) { return x != x ? y : y != y ? x : x < y || (x == y && signbit(x)) ? x : y; }
static float most(float x, float y) { return -least(-x, -y); }

FLOAT2(add_f32, float, x + y)
FLOAT2(sub_f32, float, x - y)
FLOAT2(mul_f32, float, x *y)
FLOAT2(div_f32, float, x / y)
FLOAT2(min_f32, float, least(x, y))
FLOAT2(max_f32, float, most(x, y))
FLOAT2(copysign_f32, float, copysignf(y, x)) /* the sign of a, the rest of b */
FLOAT2(add_f64, double, x + y)
FLOAT2(sub_f64, double, x - y)
FLOAT2(mul_f64, double, x *y)
FLOAT2(div_f64, double, x / y)
FLOAT1(neg_f32, float, -x)
FLOAT1(abs_f32, float, fabsf(x))
FLOAT1(sqrt_f32, float, sqrtf(x))
FLOAT1(rcp_f32, float, 1 / x)
FLOAT1(ex2_f32, float, exp2(x))
FLOAT1(lg2_f32, float, log2(x))
FLOAT1(rsqrt_f32, float, 1 / sqrt(x))
FLOAT1(tanh_f32, float, tanh(x))
FLOAT1(neg_f64, double, -x)
FLOAT1(abs_f64, double, fabs(x))

static void fma_f32(warp *w, const instruction *i, uint32_t lanes)
{
    float *const d = REG(float, 0);
    const float *const a = REG(float, 1), *const b = REG(float, 2), *const c = REG(float, 3);
    ROUNDED(EACH(d[l] = __builtin_fmaf(a[l], b[l], c[l])));
}
static void fma_f64(warp *w, const instruction *i, uint32_t lanes)
{
    double *const d = REG(double, 0);
    const double *const a = REG(double, 1), *const b = REG(double, 2), *const c = REG(double, 3);
    ROUNDED(EACH(d[l] = fma(a[l], b[l], c[l])));
}

static float bf16_value(uint32_t bits)
{
    bits <<= 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static uint16_t bf16_bits(float f) /* to the nearest, ties to even */
{
    uint32_t u;
    memcpy(&u, &f, 4);
    if (f != f) return 0x7fff;
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
/* A double that is exact for a sum of a product of two bf16 numbers, rounded once. */
static uint16_t bf16_once(double v)
{
    float f = (float)v;
    uint32_t u;
    if ((double)f != v && f == f && !isinf(f)) { /* to odd, so that the second rounding is the first */
        memcpy(&u, &f, 4);
        if (!(u & 1)) {
            u = fabs((double)f) < fabs(v) ? u + 1 : u - 1;
            memcpy(&f, &u, 4);
        }
    }
    return bf16_bits(f);
}
static uint16_t f16_bits(_Float16 h)
{
    uint16_t u;
    memcpy(&u, &h, 2);
    return u;
}
static _Float16 f16_value(uint32_t bits)
{
    const uint16_t u = (uint16_t)bits;
    _Float16 h;
    memcpy(&h, &u, 2);
    return h;
}

/* Pairs of 16 bits: kind 0 fma, 1 mul, 2 add, 3 sub. */
static void pairs_bf16(warp *w, const instruction *i, uint32_t lanes)
{
    uint32_t *const d = REG(uint32_t, 0);
    EACH(uint32_t v = 0; for (int h = 0; h < 32; h += 16) {
        const double x = bf16_value((uint32_t)lane_value(w, i, 1, l) >> h & 0xffff),
                     y = bf16_value((uint32_t)lane_value(w, i, 2, l) >> h & 0xffff),
                     z = i->kind ? 0 : bf16_value((uint32_t)lane_value(w, i, 3, l) >> h & 0xffff);
        v |= (uint32_t)bf16_once(i->kind == 0 ? x * y + z : i->kind == 1 ? x * y : i->kind == 2 ? x + y : x - y) << h;
    } d[l] = v);
}
static void pairs_f16(warp *w, const instruction *i, uint32_t lanes)
{
    uint32_t *const d = REG(uint32_t, 0);
    EACH(uint32_t v = 0; for (int h = 0; h < 32; h += 16) {
        const double x = (double)f16_value((uint32_t)lane_value(w, i, 1, l) >> h),
                     y = (double)f16_value((uint32_t)lane_value(w, i, 2, l) >> h),
                     z = i->kind ? 0 : (double)f16_value((uint32_t)lane_value(w, i, 3, l) >> h);
        v |= (uint32_t)f16_bits((_Float16)(i->kind == 0   ? x * y + z
                                           : i->kind == 1 ? x * y
                                           : i->kind == 2 ? x + y
                                                          : x - y))
             << h;
    } d[l] = v);
}

/* ---- cvt ---- */

static bool is_float(type t) { return t == F16 || t == BF16 || t == F32 || t == F64; }
static bool is_signed(type t) { return t == S8 || t == S16 || t == S32 || t == S64; }
static int bits_of(type t)
{
    switch (t) {
    case B8:
    case U8:
    case S8: return 8;
    case B16:
    case U16:
    case S16:
    case F16:
    case BF16: return 16;
    case B64:
    case U64:
    case S64:
    case F64: return 64;
    default: return 32;
    }
}
static int64_t extended(uint64_t v, type t)
{
    const int bits = bits_of(t);
    if (bits == 64) return (int64_t)v;
    v &= (1ull << bits) - 1;
    return is_signed(t) && v >> (bits - 1) ? (int64_t)(v | ~0ull << bits) : (int64_t)v;
}
static double float_of(uint64_t v, type t)
{
    float f;
    double d;
    switch (t) {
    case F16: return (double)f16_value((uint32_t)v);
    case BF16: return bf16_value((uint32_t)v & 0xffff);
    case F32: memcpy(&f, &v, 4); return f;
    default: memcpy(&d, &v, 8); return d;
    }
}
static uint64_t bits_of_float(double v, type t)
{
    const float f = (float)v;
    uint32_t u;
    uint64_t u64;
    switch (t) {
    case F16: return f16_bits((_Float16)v);
    case BF16: return bf16_bits(f);
    case F32: memcpy(&u, &f, 4); return u;
    default: memcpy(&u64, &v, 8); return u64;
    }
}
static double whole(double v, int rounding)
{
    switch (rounding) {
    case INTEGER_ZERO: return trunc(v);
    case INTEGER_DOWN: return floor(v);
    case INTEGER_UP: return ceil(v);
    default: return nearbyint(v);
    }
}
static uint64_t integer_of(double v, type t) /* what does not fit is the nearest that does; NaN is 0 */
{
    const int bits = bits_of(t);
    if (v != v) return 0;
    if (!is_signed(t))
        return v <= 0 ? 0 : v >= ldexp(1, bits) ? (bits == 64 ? ~0ull : (1ull << bits) - 1) : (uint64_t)v;
    const double limit = ldexp(1, bits - 1);
    if (v >= limit) return (1ull << (bits - 1)) - 1;
    return v <= -limit ? (uint64_t)INT64_MIN >> (64 - bits) : (uint64_t)(int64_t)v;
}

static void convert(warp *w, const instruction *i, uint32_t lanes)
{
    const type to = i->type[0], from = i->type[1];
    if (!is_float(to) && !is_float(from)) {
        /* The size of the source says what is extended; more bits of the target than its type has are its sign. */
        EACH(int64_t v = extended(lane_value(w, i, 1, l), from); if (i->saturate) {
            const int bits = bits_of(to);
            const int64_t high = bits == 64 ? INT64_MAX : is_signed(to) ? (1ll << (bits - 1)) - 1 : (1ll << bits) - 1;
            const int64_t low = !is_signed(to) ? 0 : bits == 64 ? INT64_MIN : -(1ll << (bits - 1));
            v = v > high ? high : v < low ? low : v;
        } set_lane(w, i, 0, l, (uint64_t)extended((uint64_t)v, to)));
        return;
    }
    const int mode = i->rounding < INTEGER_ZERO ? i->rounding : FE_TONEAREST;
    if (mode != FE_TONEAREST) fesetround(mode);
    EACH(
        const uint64_t bits = lane_value(w, i, 1, l); uint64_t r; if (!is_float(from)) {
            const int64_t n = extended(bits, from);
            r = from == U64 || from == B64
                    ? (to == F32 ? bits_of_float((double)(float)(uint64_t)n, F32)
                                 : bits_of_float((double)(uint64_t)n, to))
                    : (to == F32 ? bits_of_float((double)(float)n, F32) : bits_of_float((double)n, to));
        } else {
            double v = float_of(bits, from);
            if (i->rounding >= INTEGER_ZERO) v = whole(v, i->rounding);
            if (i->saturate && is_float(to)) v = !(v > 0) ? 0 : v > 1 ? 1 : v;
            r = is_float(to) ? bits_of_float(v, to) : (uint64_t)extended(integer_of(whole(v, i->rounding), to), to);
        } set_lane(w, i, 0, l, r));
    if (mode != FE_TONEAREST) fesetround(FE_TONEAREST);
}
/* cvt.rn.bf16x2.f32 d, high, low, and f16x2. */
static void convert_pair(warp *w, const instruction *i, uint32_t lanes)
{
    uint32_t *const d = REG(uint32_t, 0);
    const float *const a = REG(float, 1), *const b = REG(float, 2);
    if (i->kind) EACH(d[l] = (uint32_t)f16_bits((_Float16)a[l]) << 16 | f16_bits((_Float16)b[l]));
    else EACH(d[l] = (uint32_t)bf16_bits(a[l]) << 16 | bf16_bits(b[l]));
}
static void convert_e4m3(warp *w, const instruction *i, uint32_t lanes) /* two of them to f16x2 */
{
    EACH(uint32_t v = 0; for (int n = 0; n < 2; n++) {
        const uint32_t b = (uint32_t)lane_value(w, i, 1, l) >> 8 * n & 255, e = b >> 3 & 15, m = b & 7;
        double f = e ? ldexp(1 + m / 8.0, (int)e - 7) : ldexp(m, -9);
        if ((b & 127) == 127) f = NAN;
        v |= (uint32_t)f16_bits((_Float16)(b & 128 ? -f : f)) << 16 * n;
    } set_lane(w, i, 0, l, v));
}
static uint32_t e4m3_bits(float x) /* to nearest, even in the middle; the largest in the place of what is larger */
{
    const uint32_t sign = signbit(x) ? 0x80 : 0;
    const double a = fabs((double)x);
    if (isnan(x)) return sign | 0x7f;
    if (a >= 448 || a == 0) return sign | (a > 0 ? 0x7e : 0);
    int exponent;
    frexp(a, &exponent);
    const int unit = (exponent > -5 ? exponent : -5) - 4; /* 2^unit: the last of three bits; below 2^-6 always 2^-9 */
    const uint32_t steps = (uint32_t)nearbyint(ldexp(a, -unit));
    return sign | ((uint32_t)(unit + 9) * 8 + steps); /* a carry goes into the exponent */
}
/* cvt.rn.satfinite.e4m3x2.f32 d, high, low */
static void convert_to_e4m3(warp *w, const instruction *i, uint32_t lanes)
{
    const float *const a = REG(float, 1), *const b = REG(float, 2);
    EACH(set_lane(w, i, 0, l, e4m3_bits(a[l]) << 8 | e4m3_bits(b[l])));
}

#define ROW(word, letters, fn) {word, letters, fn, PLAIN, 0}
const op float_ops[] = {ROW("add.f32", "ttt", add_f32),
                        ROW("add.rn.f32", "ttt", add_f32),
                        ROW("add.rz.f32", "ttt", add_f32),
                        ROW("add.ftz.f32", "ttt", add_f32),
                        ROW("sub.f32", "ttt", sub_f32),
                        ROW("sub.rn.f32", "ttt", sub_f32),
                        ROW("sub.ftz.f32", "ttt", sub_f32),
                        ROW("mul.f32", "ttt", mul_f32),
                        ROW("mul.rn.f32", "ttt", mul_f32),
                        ROW("mul.ftz.f32", "ttt", mul_f32),
                        ROW("div.*", "ttt", div_f32),
                        ROW("div.rn.f64", "ttt", div_f64),
                        ROW("min.f32", "ttt", min_f32),
                        ROW("max.f32", "ttt", max_f32),
                        ROW("min.ftz.f32", "ttt", min_f32),
                        ROW("max.ftz.f32", "ttt", max_f32),
                        ROW("copysign.f32", "ttt", copysign_f32),
                        ROW("fma.rn.f32", "tttt", fma_f32),
                        ROW("fma.rm.f32", "tttt", fma_f32),
                        ROW("fma.rz.f32", "tttt", fma_f32),
                        ROW("fma.rp.f32", "tttt", fma_f32),
                        ROW("fma.rn.ftz.f32", "tttt", fma_f32),
                        ROW("neg.f32", "tt", neg_f32),
                        ROW("neg.ftz.f32", "tt", neg_f32),
                        ROW("abs.f32", "tt", abs_f32),
                        ROW("abs.ftz.f32", "tt", abs_f32),
                        ROW("sqrt.*", "tt", sqrt_f32),
                        ROW("rcp.*", "tt", rcp_f32),
                        ROW("ex2.*", "tt", ex2_f32),
                        ROW("lg2.*", "tt", lg2_f32),
                        ROW("rsqrt.*", "tt", rsqrt_f32),
                        ROW("tanh.approx.f32", "tt", tanh_f32),
                        ROW("add.f64", "ttt", add_f64),
                        ROW("add.rn.f64", "ttt", add_f64),
                        ROW("sub.f64", "ttt", sub_f64),
                        ROW("sub.rn.f64", "ttt", sub_f64),
                        ROW("mul.f64", "ttt", mul_f64),
                        ROW("mul.rn.f64", "ttt", mul_f64),
                        ROW("fma.rn.f64", "tttt", fma_f64),
                        ROW("neg.f64", "tt", neg_f64),
                        ROW("abs.f64", "tt", abs_f64),
                        {"fma.rn.bf16x2", "wwww", pairs_bf16, PLAIN, 0},
                        {"mul.bf16x2", "www", pairs_bf16, PLAIN, 1},
                        {"mul.rn.bf16x2", "www", pairs_bf16, PLAIN, 1},
                        {"add.rn.bf16x2", "www", pairs_bf16, PLAIN, 2},
                        {"sub.rn.bf16x2", "www", pairs_bf16, PLAIN, 3},
                        {"fma.rn.f16x2", "wwww", pairs_f16, PLAIN, 0},
                        {"mul.f16x2", "www", pairs_f16, PLAIN, 1},
                        {"mul.rn.f16x2", "www", pairs_f16, PLAIN, 1},
                        {"add.f16x2", "www", pairs_f16, PLAIN, 2},
                        {"sub.f16x2", "www", pairs_f16, PLAIN, 3},
                        {"cvt.rn.bf16x2.f32", "www", convert_pair, PLAIN, 0},
                        {"cvt.rn.f16x2.f32", "www", convert_pair, PLAIN, 1},
                        ROW("cvt.rn.f16x2.e4m3x2", "wh", convert_e4m3),
                        ROW("cvt.rn.satfinite.e4m3x2.f32", "hww", convert_to_e4m3),
                        ROW("cvt.*", "ts", convert),
                        {0}};
