/* SPDX-License-Identifier: Apache-2.0
 *
 * quant.c - quantised weights are decoded by element-wise operators, just before the product that reads them:
 *
 *   W = (code - zero) * scale * scale2       in f32, from left to right, then one cast to the plan's dtype
 *
 * The scratch is one stack in the plan's dtype, which the product gives back, and some arrays of a block of rows. All
 * of the stack at once, for GroupedMatmul takes its rows from the first on: of a part of the experts it would multiply
 * the rows of all experts before them, too.
 * GroupedMatmul's own int8 and int4 weights (antiquantScale) are not used: their scales are of x's 16 bits.
 *
 * Tables are looked up by comparing and filling: a gather of single elements is the slowest thing the vector units do,
 * and a table would have to be copied to the device in the run. */
#include <math.h>

#include "codes.h"
#include "ops.h"

/* Elements of a block: f32 arrays of 8 MiB. */
enum { BLOCK = 2 << 20 };

/* ---- Bytes to values, in f32 ---- */

static asc_view filled(asc_call *c, asc_view like, double value)
{
    const asc_view v = asc_like(c, like);
    const aclTensor *to = asc_t(c, v);
    const aclScalar *s = asc_s(c, value);
    ASC_LAUNCH(c, InplaceFillScalar, to, s);
    return v;
}

/* v = value where x >= limit, or where x < limit. mask: scratch. */
static void fill_from(asc_call *c, asc_view v, asc_view x, double limit, asc_view mask, double value)
{
    const aclTensor *tx = asc_t(c, x), *tm = asc_t(c, mask);
    const aclScalar *s = asc_s(c, limit);
    ASC_LAUNCH(c, GeScalar, tx, s, tm);
    asc_fill_where(c, v, mask, value);
}

static void fill_below(asc_call *c, asc_view v, asc_view x, double limit, asc_view mask, double value)
{
    const aclTensor *tx = asc_t(c, x), *tm = asc_t(c, mask);
    const aclScalar *s = asc_s(c, limit);
    ASC_LAUNCH(c, LtScalar, tx, s, tm);
    asc_fill_where(c, v, mask, value);
}

static asc_view mask_for(asc_call *c, asc_view like)
{
    like.dtype = ACL_BOOL;
    return asc_like(c, like);
}

/* bytes * 2^shift + plus, whose bits are those of a float. */
static asc_view bits(asc_call *c, asc_view bytes, int shift, int64_t plus)
{
    asc_view x = asc_packed_as(c, bytes, ACL_INT32);
    for (int i = 0; i < (plus ? 2 : 1); i++) {
        const asc_view r = asc_like(c, x);
        const aclTensor *tx = asc_t(c, x), *tr = asc_t(c, r);
        const aclScalar *by = asc_si(c, i ? plus : (int64_t)1 << shift), *one = asc_si(c, 1);
        if (i) ASC_LAUNCH(c, Adds, tx, by, one, tr);
        else ASC_LAUNCH(c, Muls, tx, by, tr);
        x = r;
    }
    x.dtype = ACL_FLOAT;
    return x;
}

/* float8_e4m3fn. Exponent and mantissa are shifted to where f32 has them, its bias of 127 less 7 added: right from the
 * exponent 1 on. Below there are eight values, and there is a NaN. */
static asc_view e4m3(asc_call *c, asc_view bytes)
{
    const asc_view b = asc_packed_as(c, bytes, ACL_FLOAT), sign = filled(c, b, 1), mask = mask_for(c, b);
    fill_from(c, sign, b, 128, mask, -1);
    const asc_view magnitude = asc_do_Adds(c, asc_do_Add(c, b, asc_do_Muls(c, sign, 64)), -64); /* b, or b - 128 */
    const asc_view v = bits(c, magnitude, 20, (int64_t)120 << 23);
    for (int i = 7; i >= 0; i--) fill_below(c, v, magnitude, i + 1, mask, i * 0x1p-9);
    fill_from(c, v, magnitude, 127, mask, (double)NAN);
    return asc_do_Mul(c, v, sign);
}

static asc_view e8m0(asc_call *c, asc_view bytes)
{
    const asc_view b = asc_packed_as(c, bytes, ACL_FLOAT), v = bits(c, bytes, 23, 0), mask = mask_for(c, b);
    fill_below(c, v, b, 1, mask, 0x1p-127);
    fill_from(c, v, b, 255, mask, (double)NAN);
    return v;
}

/* Two codes a byte, [m, ceil(K/2)], as [m, K]. */
static asc_view nibbles(asc_call *c, asc_view bytes, int64_t K, bool high_first)
{
    const int64_t m = bytes.dims[0];
    const asc_view codes = asc_new2(c, ACL_FLOAT, m, K);
    const size_t mark = c->used;
    const asc_view b = asc_packed_as(c, bytes, ACL_FLOAT);
    const asc_view high = asc_packed_as(c, asc_packed_as(c, asc_do_Muls(c, b, 0x1p-4), ACL_INT32), ACL_FLOAT);
    const asc_view low = asc_do_Sub(c, b, asc_do_Muls(c, high, 16));
    const asc_view half[2] = {high_first ? high : low, high_first ? low : high};
    for (int odd = 0; odd < 2; odd++) {
        const int64_t n = (K + 1 - odd) / 2;
        if (n > 0) asc_copy(c, asc_part(codes, 1, odd, 2, n), asc_part(half[odd], 1, 0, 1, n));
    }
    asc_release(c, mark);
    return codes;
}

static asc_view values(asc_call *c, const fmoe_quant *q, asc_view bytes, int64_t K)
{
    if (q->code == FMOE_CODE_E4M3) return e4m3(c, bytes);
    if (q->code == FMOE_CODE_S8) {
        bytes.dtype = ACL_INT8;
        return asc_packed_as(c, bytes, ACL_FLOAT);
    }
    const asc_view codes = nibbles(c, bytes, K, q->flags & FMOE_QUANT_HIGH_FIRST);
    if (q->code == FMOE_CODE_U4) return codes;
    const float *table = fmoe_code_table(q->code, q->lut);
    const asc_view v = filled(c, codes, (double)table[0]), mask = mask_for(c, codes);
    for (int i = 1; i < 16; i++) fill_from(c, v, codes, i, mask, (double)table[i]);
    return v;
}

/* ---- Grids of scales and zeros ---- */

static asc_view grid_values(asc_call *c, asc_view g, int32_t scale_type)
{
    if (scale_type == FMOE_SCALE_E8M0) return e8m0(c, g);
    if (scale_type == FMOE_SCALE_E4M3) return e4m3(c, g);
    return asc_packed_as(c, g, ACL_FLOAT);
}

/* Rows of a grid for m rows of weights, each for `group` of them; the last one for what is left. */
static asc_view spread(asc_call *c, asc_view g, int64_t m, int64_t group)
{
    if (group == 1 || g.dims[0] == m) return g;
    const int64_t cols = g.dims[1], whole = m / group, rest = m - whole * group;
    const asc_view rows = asc_new2(c, ACL_FLOAT, m, cols);
    if (whole > 0)
        asc_copy(c, asc_shape(asc_part(rows, 0, 0, 1, whole * group), 3, whole, group, cols),
                 asc_shape(asc_part(g, 0, 0, 1, whole), 3, whole, 1, cols));
    if (rest > 0) asc_copy(c, asc_part(rows, 0, whole * group, 1, rest), asc_part(g, 0, whole, 1, 1));
    return rows;
}

/* v - g, or v * g: every column of g for `group` columns of v; the last one for what is left. */
static asc_view with_grid(asc_call *c, asc_view v, asc_view g, int64_t group, bool times)
{
    const asc_view r = asc_like(c, v);
    const int64_t m = v.dims[0], K = v.dims[1], whole = K / group, rest = K - whole * group;
    for (int part = 0; part < 2; part++) {
        const int64_t n = part ? 1 : whole, width = part ? rest : group, at = part ? whole * group : 0;
        if (n == 0 || width == 0) continue;
        asc_view three[3] = {v, g, r};
        for (int i = 0; i < 3; i++) {
            const int64_t w = i == 1 ? 1 : width;
            three[i] = asc_part(three[i], 1, i == 1 ? part * whole : at, 1, n * w);
            three[i].ndim = 3;
            three[i].dims[0] = m, three[i].dims[1] = n, three[i].dims[2] = w;
            three[i].strides[1] = w, three[i].strides[2] = 1;
        }
        const aclTensor *tv = asc_t(c, three[0]), *tg = asc_t(c, three[1]), *tr = asc_t(c, three[2]);
        const aclScalar *one = times ? NULL : asc_s(c, 1);
        if (times) ASC_LAUNCH(c, Mul, tv, tg, tr);
        else ASC_LAUNCH(c, Sub, tv, tg, one, tr);
    }
    return r;
}

/* ---- Weights ---- */

/* What belongs to some rows: codes [m, bytes] and their grids; .data NULL: there are none. */
typedef struct coded_rows {
    asc_view codes, scale, zeros, scale2;
} coded_rows;

static asc_view as_bytes(const fmoe_tensor *t)
{
    asc_view v = asc_of(t);
    if (fmoe_tensor_dtype(t) == FMOE_BYTE) v.dtype = ACL_UINT8;
    return v;
}

/* v, or its e-th matrix, or that of a list. */
static asc_view expert_of(const fmoe_tensor *t, bool list, int64_t e)
{
    if (!t) return (asc_view){.data = NULL};
    return list ? as_bytes(&t[e]) : asc_at(as_bytes(t), e);
}

/* Rows [at, at + m), which begin a group, into `to` [m, K]. group: rows of one. */
static void decode(asc_call *c, const fmoe_quant *q, coded_rows s, int64_t first_group, int64_t at, int64_t group,
                   asc_view to)
{
    const size_t mark = c->used;
    const int64_t m = to.dims[0], K = to.dims[1], cols = q->group_cols ? q->group_cols : K;
    const int64_t groups = fmoe_ceil_div(m, group);
    asc_view v = values(c, q, asc_part(s.codes, 0, at, 1, m), K);
    if (s.zeros.data) {
        const asc_view z = grid_values(c, asc_part(s.zeros, 0, first_group, 1, groups), 0);
        v = with_grid(c, v, spread(c, z, m, group), cols, false);
    } else if (q->zero != 0) {
        v = asc_do_Adds(c, v, -(double)q->zero);
    }
    const asc_view g = grid_values(c, asc_part(s.scale, 0, first_group, 1, groups), q->scale_type);
    v = with_grid(c, v, spread(c, g, m, group), cols, true);
    if (s.scale2.data) {
        const asc_view r = asc_like(c, v);
        const aclTensor *tv = asc_t(c, v), *ts = asc_t(c, s.scale2), *tr = asc_t(c, r);
        ASC_LAUNCH(c, Mul, tv, ts, tr);
        v = r;
    }
    if (v.dtype == to.dtype) asc_copy(c, to, v);
    else asc_cast(c, to, v);
    asc_release(c, mark);
}

/* Rows [first, first + n) share a run of groups, which begins at first_group. */
static void decode_run(asc_call *c, const fmoe_quant *q, coded_rows s, int64_t first, int64_t n, int64_t first_group,
                       asc_view to)
{
    const int64_t K = to.dims[1], group = q->group_rows ? fmoe_min(q->group_rows, n) : n;
    int64_t block = fmoe_max(BLOCK / fmoe_max(K, 1), 1);
    /* Blocks begin where a group does; of a group that is larger than a block, each has a part. */
    if (block > group) block = block / group * group;
    for (int64_t at = 0; at < n && c->status == FMOE_OK;) {
        const int64_t left = group - at % group, m = fmoe_min(n - at, block < group ? fmoe_min(block, left) : block);
        decode(c, q, s, first_group + at / group, first + at, fmoe_min(group, block), asc_part(to, 0, at, 1, m));
        at += m;
    }
}

/* Rows of all experts lie one after the other, in codes and grids, and each has groups of its own. */
static bool in_one_run(const fmoe_quant *q, const fmoe_tensor *codes, int64_t n)
{
    if (q->group_rows != 1 || (q->scale2 && q->scale2->shape[0] > 1)) return false;
    const fmoe_tensor *all[] = {codes, q->scale, q->zeros};
    for (int i = 0; i < 3; i++)
        if (all[i] && n > 1 && fmoe_stride(all[i], 0) != all[i]->shape[1] * fmoe_stride(all[i], 1)) return false;
    return true;
}

static asc_view joined(const fmoe_tensor *t)
{
    if (!t) return (asc_view){.data = NULL};
    asc_view v = as_bytes(t);
    v.ndim = 2;
    v.dims[0] *= v.dims[1], v.dims[1] = v.dims[2];
    v.strides[0] = v.strides[1], v.strides[1] = v.strides[2];
    return v;
}

asc_weights asc_weights_decoded(asc_call *c, const fmoe_tensor *stack, const fmoe_tensor *list, const fmoe_quant *q,
                                int64_t n, int64_t N, int64_t K)
{
    const asc_view to = asc_new3(c, asc_plan_dtype(c->p), n, N, K);
    const asc_weights w = {.n = n, .stack = to, .decoded = true};
    if (n == 0 || N == 0 || K == 0) return w;
    const fmoe_tensor *codes = stack ? stack : list;
    const asc_view one = {.data = NULL};
    coded_rows s = {one, one, one, one};
    if (stack && in_one_run(q, stack, n)) {
        s = (coded_rows){joined(stack), joined(q->scale), joined(q->zeros), one};
        if (q->scale2) s.scale2 = asc_2d(fmoe_data(q->scale2), ACL_FLOAT, 1, 1);
        decode_run(c, q, s, 0, n * N, 0, asc_shape(to, 2, n * N, K, 0));
        return w;
    }
    for (int64_t e = 0; e < n && c->status == FMOE_OK; e++) {
        s = (coded_rows){expert_of(codes, list, e), expert_of(q->scale, list, e), expert_of(q->zeros, list, e), one};
        if (q->scale2) {
            const fmoe_tensor *t = list ? &q->scale2[e] : q->scale2;
            s.scale2 = asc_2d((float *)fmoe_data(t) + (t->shape[0] > 1 ? e : 0), ACL_FLOAT, 1, 1);
        }
        const asc_view rows = asc_at(to, e);
        const bool halves = q->flags & FMOE_QUANT_HALVES;
        const int64_t part = halves ? N / 2 : N;
        const int64_t groups = q->group_rows ? fmoe_ceil_div(part, q->group_rows) : 1;
        for (int64_t i = 0; i < (halves ? 2 : 1); i++)
            decode_run(c, q, s, i * part, part, i * groups, asc_part(rows, 0, i * part, 1, part));
    }
    return w;
}
