/* SPDX-License-Identifier: Apache-2.0
 * op_integer.c - whole numbers, bits and predicates. */
#include "ptx.h"

#define BINARY(name, T, ...)                                                                                           \
    static void name(warp *w, const instruction *i, uint32_t lanes)                                                    \
    {                                                                                                                  \
        T *const d = REG(T, 0);                                                                                        \
        const T *const a = REG(T, 1), *const b = REG(T, 2);                                                            \
        EACH(const T x = a[l]; const T y = b[l]; d[l] = (T)(__VA_ARGS__));                                             \
    }
#define UNARY(name, T, ...)                                                                                            \
    static void name(warp *w, const instruction *i, uint32_t lanes)                                                    \
    {                                                                                                                  \
        T *const d = REG(T, 0);                                                                                        \
        const T *const a = REG(T, 1);                                                                                  \
        EACH(const T x = a[l]; d[l] = (T)(__VA_ARGS__));                                                               \
    }
/* For every size, without a sign (U) or with one (S). */
#define SIZES_U(M, name, ...)                                                                                          \
    M(name##_u16, uint16_t, __VA_ARGS__) M(name##_u32, uint32_t, __VA_ARGS__) M(name##_u64, uint64_t, __VA_ARGS__)
#define SIZES_S(M, name, ...)                                                                                          \
    M(name##_s16, int16_t, __VA_ARGS__) M(name##_s32, int32_t, __VA_ARGS__) M(name##_s64, int64_t, __VA_ARGS__)

SIZES_U(BINARY, add, x + y)
SIZES_U(BINARY, sub, x - y)
BINARY(mul_u16, uint16_t, (uint32_t)x *y)
BINARY(mul_u32, uint32_t, x *y)
BINARY(mul_u64, uint64_t, x *y)
BINARY(mulhi_u32, uint32_t, (uint64_t)x *y >> 32)
BINARY(mulhi_s32, int32_t, (int64_t)x *y >> 32)
BINARY(mulhi_u64, uint64_t, (unsigned __int128)x *y >> 64)
BINARY(mulhi_s64, int64_t, (__int128)x *y >> 64)
/* What a division by zero gives is not said; the silicon gives all ones. */
SIZES_U(BINARY, div, y ? x / y : (uint64_t)-1)
SIZES_S(BINARY, div, !y ? -1 : y == -1 ? (int64_t)(0 - (uint64_t)x) : x / y)
SIZES_U(BINARY, rem, y ? x % y : x)
SIZES_S(BINARY, rem, !y ? x : y == -1 ? 0 : x % y)
SIZES_U(BINARY, min, x < y ? x : y)
SIZES_S(BINARY, min, x < y ? x : y)
SIZES_U(BINARY, max, x > y ? x : y)
SIZES_S(BINARY, max, x > y ? x : y)
SIZES_U(BINARY, and, x &y)
SIZES_U(BINARY, or, x | y)
SIZES_U(BINARY, xor, x ^ y)
SIZES_U(UNARY, not, ~x)
SIZES_U(UNARY, neg, 0 - x)
SIZES_S(UNARY, abs, x < 0 ? (int64_t)(0 - (uint64_t)x) : x)
BINARY(and_pred, uint8_t, x &y)
BINARY(or_pred, uint8_t, x | y)
BINARY(xor_pred, uint8_t, x ^ y)
UNARY(not_pred, uint8_t, !x)

#define TERNARY(name, D, A, B, C, ...)                                                                                 \
    static void name(warp *w, const instruction *i, uint32_t lanes)                                                    \
    {                                                                                                                  \
        D *const d = REG(D, 0);                                                                                        \
        const A *const a = REG(A, 1);                                                                                  \
        const B *const b = REG(B, 2);                                                                                  \
        const C *const c = REG(C, 3);                                                                                  \
        EACH(const A x = a[l]; const B y = b[l]; const C z = c[l]; d[l] = (D)(__VA_ARGS__));                           \
    }
TERNARY(mad_16, uint16_t, uint16_t, uint16_t, uint16_t, (uint32_t)x *y + z)
TERNARY(mad_32, uint32_t, uint32_t, uint32_t, uint32_t, x *y + z)
TERNARY(mad_64, uint64_t, uint64_t, uint64_t, uint64_t, x *y + z)
TERNARY(mad_wide_u32, uint64_t, uint32_t, uint32_t, uint64_t, (uint64_t)x *y + z)
TERNARY(mad_wide_s32, uint64_t, int32_t, int32_t, uint64_t, (uint64_t)((int64_t)x *y) + z)
TERNARY(select_8, uint8_t, uint8_t, uint8_t, uint8_t, z ? x : y)
TERNARY(select_16, uint16_t, uint16_t, uint16_t, uint8_t, z ? x : y)
TERNARY(select_32, uint32_t, uint32_t, uint32_t, uint8_t, z ? x : y)
TERNARY(select_64, uint64_t, uint64_t, uint64_t, uint8_t, z ? x : y)

#define TWO_TYPES(name, D, A, B, ...)                                                                                  \
    static void name(warp *w, const instruction *i, uint32_t lanes)                                                    \
    {                                                                                                                  \
        D *const d = REG(D, 0);                                                                                        \
        const A *const a = REG(A, 1);                                                                                  \
        const B *const b = REG(B, 2);                                                                                  \
        EACH(const A x = a[l]; const B y = b[l]; d[l] = (D)(__VA_ARGS__));                                             \
    }
TWO_TYPES(wide_u16, uint32_t, uint16_t, uint16_t, (uint32_t)x *y)
TWO_TYPES(wide_s16, int32_t, int16_t, int16_t, (int32_t)x *y)
TWO_TYPES(wide_u32, uint64_t, uint32_t, uint32_t, (uint64_t)x *y)
TWO_TYPES(wide_s32, int64_t, int32_t, int32_t, (int64_t)x *y)
/* Shifts of the width or more give what shifting one by one would. */
TWO_TYPES(shl_16, uint16_t, uint16_t, uint32_t, y > 15 ? 0 : x << y)
TWO_TYPES(shl_32, uint32_t, uint32_t, uint32_t, y > 31 ? 0 : x << y)
TWO_TYPES(shl_64, uint64_t, uint64_t, uint32_t, y > 63 ? 0 : x << y)
TWO_TYPES(shr_u16, uint16_t, uint16_t, uint32_t, y > 15 ? 0 : x >> y)
TWO_TYPES(shr_u32, uint32_t, uint32_t, uint32_t, y > 31 ? 0 : x >> y)
TWO_TYPES(shr_u64, uint64_t, uint64_t, uint32_t, y > 63 ? 0 : x >> y)
TWO_TYPES(shr_s16, int16_t, int16_t, uint32_t, x >> (y > 15 ? 15 : y))
TWO_TYPES(shr_s32, int32_t, int32_t, uint32_t, x >> (y > 31 ? 31 : y))
TWO_TYPES(shr_s64, int64_t, int64_t, uint32_t, x >> (y > 63 ? 63 : y))

#define COUNTED(name, T, ...)                                                                                          \
    static void name(warp *w, const instruction *i, uint32_t lanes)                                                    \
    {                                                                                                                  \
        uint32_t *const d = REG(uint32_t, 0);                                                                          \
        const T *const a = REG(T, 1);                                                                                  \
        EACH(const T x = a[l]; d[l] = (uint32_t)(__VA_ARGS__));                                                        \
    }
static uint32_t reversed(uint32_t x)
{
    uint32_t y = 0;
    for (int n = 0; n < 32; n++) y |= (x >> n & 1) << (31 - n);
    return y;
}
COUNTED(popc_32, uint32_t, __builtin_popcount(x))
COUNTED(popc_64, uint64_t, __builtin_popcountll(x))
COUNTED(clz_32, uint32_t, x ? __builtin_clz(x) : 32)
COUNTED(clz_64, uint64_t, x ? __builtin_clzll(x) : 64)
COUNTED(brev_32, uint32_t, reversed(x))
COUNTED(find_32, uint32_t, x ? 31 - __builtin_clz(x) : -1)
COUNTED(find_shift_32, uint32_t, x ? __builtin_clz(x) : -1)

static void permute_bytes(warp *w, const instruction *i, uint32_t lanes)
{
    uint32_t *const d = REG(uint32_t, 0);
    const uint32_t *const a = REG(uint32_t, 1), *const b = REG(uint32_t, 2), *const c = REG(uint32_t, 3);
    EACH(const uint64_t both = (uint64_t)b[l] << 32 | a[l]; uint32_t v = 0; for (int n = 0; n < 4; n++) {
        const uint32_t how = c[l] >> 4 * n;
        uint32_t byte = (uint32_t)(both >> 8 * (how & 7)) & 255;
        if (how & 8) byte = byte & 128 ? 255 : 0;
        v |= byte << 8 * n;
    } d[l] = v);
}
static void insert_bits(warp *w, const instruction *i, uint32_t lanes) /* a into b, from bit c on, d bits */
{
    uint32_t *const out = REG(uint32_t, 0);
    const uint32_t *const a = REG(uint32_t, 1), *const b = REG(uint32_t, 2), *const c = REG(uint32_t, 3),
                          *const n = REG(uint32_t, 4);
    EACH(const uint32_t at = c[l] & 255; const uint32_t bits = n[l] & 255;
         const uint64_t mask = at > 31 ? 0 : ((bits > 31 ? 1ull << 32 : 1ull << bits) - 1) << at;
         out[l] = (uint32_t)((b[l] & ~mask) | ((at > 31 ? 0 : (uint64_t)a[l] << at) & mask)));
}
static void extract_bits(warp *w, const instruction *i, uint32_t lanes) /* bfe.u32 */
{
    uint32_t *const d = REG(uint32_t, 0);
    const uint32_t *const a = REG(uint32_t, 1), *const b = REG(uint32_t, 2), *const c = REG(uint32_t, 3);
    EACH(const uint32_t at = b[l] & 255; const uint32_t n = c[l] & 255; const uint32_t v = at > 31 ? 0 : a[l] >> at;
         d[l] = n > 31 ? v : v & ((1u << n) - 1));
}
static void funnel(warp *w, const instruction *i, uint32_t lanes) /* shf.l (0) or r (1), .wrap */
{
    uint32_t *const d = REG(uint32_t, 0);
    const uint32_t *const a = REG(uint32_t, 1), *const b = REG(uint32_t, 2), *const c = REG(uint32_t, 3);
    const int right = i->kind;
    EACH(const uint64_t both = (uint64_t)b[l] << 32 | a[l]; const uint32_t n = c[l] & 31;
         d[l] = (uint32_t)(right ? both >> n : both << n >> 32));
}
static void logic(warp *w, const instruction *i, uint32_t lanes) /* lop3 */
{
    uint32_t *const d = REG(uint32_t, 0);
    const uint32_t *const a = REG(uint32_t, 1), *const b = REG(uint32_t, 2), *const c = REG(uint32_t, 3);
    const uint32_t table = (uint32_t)lane_value(w, i, 4, 0);
    EACH(uint32_t v = 0; for (int n = 0; n < 32; n++) {
        const uint32_t row = (a[l] >> n & 1) << 2 | (b[l] >> n & 1) << 1 | (c[l] >> n & 1);
        v |= (table >> row & 1) << n;
    } d[l] = v);
}

/* mov: a register, a constant, an address; or parts put together, or taken apart. */
static void move(warp *w, const instruction *i, uint32_t lanes)
{
    if (i->operands == 2 && i->width[0] == i->width[1]) {
        switch (i->width[0]) {
        case 1: EACH(REG(uint8_t, 0)[l] = REG(uint8_t, 1)[l]); return;
        case 2: EACH(REG(uint16_t, 0)[l] = REG(uint16_t, 1)[l]); return;
        case 4: EACH(REG(uint32_t, 0)[l] = REG(uint32_t, 1)[l]); return;
        default: EACH(REG(uint64_t, 0)[l] = REG(uint64_t, 1)[l]); return;
        }
    }
    EACH(int total = 0; for (int n = 0; n < i->operands; n++) total += i->width[n];
         const bool apart = i->width[i->operands - 1] * 2 == total && i->operands > 2; uint64_t v = 0;
         if (apart) v = lane_value(w, i, i->operands - 1, l);
         else for (int n = i->operands; n-- > 1;) v =
             (i->width[n] < 8 ? v << 8 * i->width[n] : 0) | lane_value(w, i, n, l);
         for (int n = 0; n < (apart ? i->operands - 1 : 1); n++) {
             set_lane(w, i, n, l, v);
             if (i->width[n] < 8) v >>= 8 * i->width[n];
         });
}

/* setp, of every type: the comparison by `compare`, also of numbers that are not ordered. */
#define COMPARE(T)                                                                                                     \
    {                                                                                                                  \
        const T *const a = REG(T, 1), *const b = REG(T, 2);                                                            \
        switch (i->compare) {                                                                                          \
        case EQ: EACH(d[l] = a[l] == b[l]); break;                                                                     \
        case NE: EACH(d[l] = a[l] < b[l] || a[l] > b[l]); break;                                                       \
        case LT:                                                                                                       \
        case LO: EACH(d[l] = a[l] < b[l]); break;                                                                      \
        case LE:                                                                                                       \
        case LS: EACH(d[l] = a[l] <= b[l]); break;                                                                     \
        case GT:                                                                                                       \
        case HI: EACH(d[l] = a[l] > b[l]); break;                                                                      \
        case GE:                                                                                                       \
        case HS: EACH(d[l] = a[l] >= b[l]); break;                                                                     \
        case EQU: EACH(d[l] = !(a[l] < b[l] || a[l] > b[l])); break;                                                   \
        case NEU: EACH(d[l] = !(a[l] == b[l])); break;                                                                 \
        case LTU: EACH(d[l] = !(a[l] >= b[l])); break;                                                                 \
        case LEU: EACH(d[l] = !(a[l] > b[l])); break;                                                                  \
        case GTU: EACH(d[l] = !(a[l] <= b[l])); break;                                                                 \
        case GEU: EACH(d[l] = !(a[l] < b[l])); break;                                                                  \
        case NUM: EACH(d[l] = a[l] == a[l] && b[l] == b[l]); break;                                                    \
        case NAN_: EACH(d[l] = !(a[l] == a[l] && b[l] == b[l])); break;                                                \
        default: sim_fault(w, i, "no such comparison");                                                                \
        }                                                                                                              \
    }
static void compare(warp *w, const instruction *i, uint32_t lanes)
{
    uint8_t d[LANES];
    switch (i->type[0]) {
    case U16:
    case B16: COMPARE(uint16_t) break;
    case S16: COMPARE(int16_t) break;
    case U32:
    case B32: COMPARE(uint32_t) break;
    case S32: COMPARE(int32_t) break;
    case U64:
    case B64: COMPARE(uint64_t) break;
    case S64: COMPARE(int64_t) break;
    case F16: COMPARE(_Float16) break;
    case F32: COMPARE(float) break;
    case F64: COMPARE(double) break;
    default: sim_fault(w, i, "no comparison of this type");
    }
    uint8_t *const p = REG(uint8_t, 0);
    if (i->combine >= 0 && i->operands > 3) {
        const uint8_t *const q = REG(uint8_t, 3);
        EACH(p[l] = i->combine == AND ? d[l] & q[l] : i->combine == OR ? d[l] | q[l] : d[l] ^ q[l]);
    } else EACH(p[l] = d[l]);
}

#define ROW(word, letters, fn) {word, letters, fn, PLAIN, 0}
#define UNSIGNED(word, fn)                                                                                             \
    ROW(word ".u16", "ttt", fn##_u16), ROW(word ".u32", "ttt", fn##_u32), ROW(word ".u64", "ttt", fn##_u64)
#define SIGNED(word, fn)                                                                                               \
    ROW(word ".s16", "ttt", fn##_s16), ROW(word ".s32", "ttt", fn##_s32), ROW(word ".s64", "ttt", fn##_s64)
#define SAME(word, fn)                                                                                                 \
    UNSIGNED(word, fn), ROW(word ".s16", "ttt", fn##_u16), ROW(word ".s32", "ttt", fn##_u32),                          \
        ROW(word ".s64", "ttt", fn##_u64)
#define BITS(word, fn)                                                                                                 \
    ROW(word ".b16", "ttt", fn##_u16), ROW(word ".b32", "ttt", fn##_u32), ROW(word ".b64", "ttt", fn##_u64)
const op integer_ops[] = {SAME("add", add),
                          SAME("sub", sub),
                          SAME("mul.lo", mul),
                          UNSIGNED("div", div),
                          SIGNED("div", div),
                          UNSIGNED("rem", rem),
                          SIGNED("rem", rem),
                          UNSIGNED("min", min),
                          SIGNED("min", min),
                          UNSIGNED("max", max),
                          SIGNED("max", max),
                          BITS("and", and),
                          BITS("or", or),
                          BITS("xor", xor),
                          ROW("mul.hi.u32", "ttt", mulhi_u32),
                          ROW("mul.hi.s32", "ttt", mulhi_s32),
                          ROW("mul.hi.u64", "ttt", mulhi_u64),
                          ROW("mul.hi.s64", "ttt", mulhi_s64),
                          ROW("mul.wide.u16", "whh", wide_u16),
                          ROW("mul.wide.s16", "whh", wide_s16),
                          ROW("mul.wide.u32", "dww", wide_u32),
                          ROW("mul.wide.s32", "dww", wide_s32),
                          ROW("mad.lo.s16", "tttt", mad_16),
                          ROW("mad.lo.u16", "tttt", mad_16),
                          ROW("mad.lo.s32", "tttt", mad_32),
                          ROW("mad.lo.u32", "tttt", mad_32),
                          ROW("mad.lo.s64", "tttt", mad_64),
                          ROW("mad.lo.u64", "tttt", mad_64),
                          ROW("mad.wide.u32", "dwwd", mad_wide_u32),
                          ROW("mad.wide.s32", "dwwd", mad_wide_s32),
                          ROW("not.b16", "tt", not_u16),
                          ROW("not.b32", "tt", not_u32),
                          ROW("not.b64", "tt", not_u64),
                          ROW("neg.s16", "tt", neg_u16),
                          ROW("neg.s32", "tt", neg_u32),
                          ROW("neg.s64", "tt", neg_u64),
                          ROW("abs.s16", "tt", abs_s16),
                          ROW("abs.s32", "tt", abs_s32),
                          ROW("abs.s64", "tt", abs_s64),
                          ROW("and.pred", "ppp", and_pred),
                          ROW("or.pred", "ppp", or_pred),
                          ROW("xor.pred", "ppp", xor_pred),
                          ROW("not.pred", "pp", not_pred),
                          ROW("shl.b16", "ttw", shl_16),
                          ROW("shl.b32", "ttw", shl_32),
                          ROW("shl.b64", "ttw", shl_64),
                          ROW("shr.u16", "ttw", shr_u16),
                          ROW("shr.b16", "ttw", shr_u16),
                          ROW("shr.u32", "ttw", shr_u32),
                          ROW("shr.b32", "ttw", shr_u32),
                          ROW("shr.u64", "ttw", shr_u64),
                          ROW("shr.b64", "ttw", shr_u64),
                          ROW("shr.s16", "ttw", shr_s16),
                          ROW("shr.s32", "ttw", shr_s32),
                          ROW("shr.s64", "ttw", shr_s64),
                          ROW("popc.b32", "wt", popc_32),
                          ROW("popc.b64", "wt", popc_64),
                          ROW("clz.b32", "wt", clz_32),
                          ROW("clz.b64", "wt", clz_64),
                          ROW("brev.b32", "wt", brev_32),
                          ROW("bfind.u32", "wt", find_32),
                          ROW("bfind.shiftamt.u32", "wt", find_shift_32),
                          ROW("prmt.b32", "wwww", permute_bytes),
                          ROW("bfi.b32", "wwwww", insert_bits),
                          ROW("bfe.u32", "wwww", extract_bits),
                          ROW("lop3.b32", "wwwww", logic),
                          {"shf.l.wrap.b32", "wwww", funnel, PLAIN, 0},
                          {"shf.r.wrap.b32", "wwww", funnel, PLAIN, 1},
                          ROW("selp.pred", "pppp", select_8),
                          ROW("selp.b16", "tttp", select_16),
                          ROW("selp.u16", "tttp", select_16),
                          ROW("selp.s16", "tttp", select_16),
                          ROW("selp.b32", "tttp", select_32),
                          ROW("selp.u32", "tttp", select_32),
                          ROW("selp.s32", "tttp", select_32),
                          ROW("selp.f32", "tttp", select_32),
                          ROW("selp.b64", "tttp", select_64),
                          ROW("selp.u64", "tttp", select_64),
                          ROW("selp.s64", "tttp", select_64),
                          ROW("selp.f64", "tttp", select_64),
                          ROW("mov.*", "vv", move),
                          ROW("mov.copy", "", move),
                          ROW("setp.*", "ptt?p", compare),
                          {0}};
