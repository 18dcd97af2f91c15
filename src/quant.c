/* SPDX-License-Identifier: Apache-2.0
 * quant.c - descriptors of quantised weights are checked here, and so are the calls that make codes and read them. */
#include "quant.h"

#include <inttypes.h>
#include <math.h>

#include "api.h"
#include "codes.h"

/* ---- descriptors ---- */

static fmoe_status check_fields(const fmoe_quant_matrix *m)
{
    const fmoe_quant *q = m->quant;
    const char *name = m->names->quant;
    const uint32_t known = FMOE_QUANT_HIGH_FIRST | FMOE_QUANT_HALVES | FMOE_QUANT_IN_OUT;
    const bool integer = q->code == FMOE_CODE_U4 || q->code == FMOE_CODE_S8;
    if (q->code < FMOE_CODE_E4M3 || q->code > FMOE_CODE_LUT4)
        return fmoe_fail(FMOE_ERR_ARG, "%s.code is %d, must be a value of fmoe_code (1 to 7)", name, q->code);
    if (q->flags & ~known)
        return fmoe_fail(FMOE_ERR_ARG, "%s.flags 0x%x has unknown bits, known are 0x%x", name, q->flags, known);
    if ((q->flags & FMOE_QUANT_HIGH_FIRST) && !fmoe_code_is_4bit(q->code))
        return fmoe_fail(FMOE_ERR_ARG, "%s.flags has FMOE_QUANT_HIGH_FIRST, but code %d has 8 bits, not 4", name,
                         q->code);
    if ((q->flags & FMOE_QUANT_HALVES) && !m->halves)
        return fmoe_fail(FMOE_ERR_ARG,
                         "%s.flags has FMOE_QUANT_HALVES, which is for a stack with all gates, then all ups", name);
    if ((q->flags & FMOE_QUANT_IN_OUT) && (!m->in || q->flags & FMOE_QUANT_HALVES))
        return fmoe_fail(FMOE_ERR_ARG, "%s.flags has FMOE_QUANT_IN_OUT, which is %s", name,
                         m->in ? "without FMOE_QUANT_HALVES: its rows are no gates and ups" : "for the grouped matmul");
    if (q->group_rows < 0 || q->group_cols < 0)
        return fmoe_fail(FMOE_ERR_ARG, "%s.group_rows is %d and group_cols %d, must not be negative", name,
                         q->group_rows, q->group_cols);
    if (q->scale_type < 0 || q->scale_type > FMOE_SCALE_E4M3)
        return fmoe_fail(FMOE_ERR_ARG, "%s.scale_type is %d, must be 0 or a value of fmoe_scale_type (1, 2)", name,
                         q->scale_type);
    if (!isfinite(q->zero) || (q->zero != 0 && !integer))
        return fmoe_fail(FMOE_ERR_ARG, "%s.zero is %g with code %d: U4 (6) and S8 (2) have a zero, a finite one", name,
                         (double)q->zero, q->code);
    if (q->zeros && (q->zero != 0 || !integer))
        return fmoe_fail(FMOE_ERR_ARG, "%s is given, but %s.%s is %g", m->names->zeros, name, integer ? "zero" : "code",
                         integer ? (double)q->zero : q->code);
    if ((q->lut != NULL) != (q->code == FMOE_CODE_LUT4))
        return fmoe_fail(q->lut ? FMOE_ERR_ARG : FMOE_ERR_NULL, "%s.lut is %s, and its code %d: LUT4 is %d", name,
                         q->lut ? "given" : "NULL", q->code, FMOE_CODE_LUT4);
    return FMOE_OK;
}

static int64_t groups_of(int64_t n, int32_t group) { return group ? fmoe_ceil_div(n, group) : fmoe_min(n, 1); }

void fmoe_quant_bind(fmoe_checker *c, const fmoe_quant_matrix *m)
{
    const fmoe_quant *q = m->quant;
    const bool halves = q->flags & FMOE_QUANT_HALVES, in_out = q->flags & FMOE_QUANT_IN_OUT;
    const int64_t N = in_out ? m->K : m->N, K = in_out ? m->N : m->K;
    c->size[m->axes] = fmoe_code_bytes(q->code, K);
    c->size[m->axes + 1] = halves ? 2 * groups_of(N / 2, q->group_rows) : groups_of(N, q->group_rows);
    c->size[m->axes + 2] = groups_of(K, q->group_cols);
}

fmoe_status fmoe_quant_args_of(fmoe_checker *c, const fmoe_quant_matrix *m, fmoe_arg *codes, fmoe_arg *args, int *n)
{
    const fmoe_quant *q = m->quant;
    fmoe_quant copy;
    const void *read;
    FMOE_TRY(fmoe_struct_read(&fmoe_quant_form, q, &copy, &read)); /* there is no shorter one: it is q itself */
    FMOE_TRY(check_fields(m));
    fmoe_quant_bind(c, m);
    const fmoe_axis_id rows = (fmoe_axis_id)(m->axes + 1), columns = (fmoe_axis_id)(m->axes + 2);
    codes->types = TYPE_BYTE;
    codes->layout = LAYOUT_ROWS;
    codes->axes[m->list ? 1 : 2] = m->axes;
    if (q->flags & FMOE_QUANT_IN_OUT) codes->axes[m->list ? 0 : 1] = m->in;
    fmoe_arg scale = {
        m->names->scale,       q->scale, m->role, q->scale_type ? TYPE_BYTE : TYPE_F32 | TYPE_16BIT, LAYOUT_ROWS,
        {m->E, rows, columns}, m->list};
    if (m->list) scale = (fmoe_arg){scale.name, scale.t, m->role, scale.types, LAYOUT_ROWS, {rows, columns}, m->list};
    args[(*n)++] = scale;
    if (q->zeros) {
        args[*n] = scale;
        args[*n].name = m->names->zeros;
        args[*n].t = q->zeros;
        args[(*n)++].types = TYPE_BYTE | TYPE_F32 | TYPE_16BIT;
    }
    if (q->scale2) {
        const bool one = m->list || (q->scale2->ndim == 1 && q->scale2->shape && q->scale2->shape[0] == 1);
        args[(*n)++] =
            (fmoe_arg){m->names->scale2, q->scale2, ARG_IN, TYPE_F32, LAYOUT_COMPACT, {one ? AXIS_ONE : m->E}, m->list};
    }
    return FMOE_OK;
}

/* ---- weights to codes, and back ---- */

static fmoe_status check_conversion(const fmoe_quant_args *given, bool back, fmoe_quant_args *copy,
                                    const fmoe_quant_args **a, const fmoe_backend **backend)
{
    static const fmoe_quant_names names = FMOE_QUANT_NAMES("quant");
    fmoe_plan_impl plan = {.d = {.dtype = FMOE_F32}}; /* none: only what checks ask for */
    const void *read;
    fmoe_arg args[5];
    int n = 2;
    if (!given) return fmoe_fail(FMOE_ERR_NULL, "fmoe_quant_args is NULL");
    FMOE_TRY(fmoe_struct_read(&fmoe_quant_args_form, given, copy, &read));
    *a = read;
    const fmoe_tensor *w = (*a)->w;
    const fmoe_quant *q = (*a)->quant;
    if (!w || !q) return fmoe_fail(FMOE_ERR_NULL, "%s is NULL", w ? "quant" : "w");
    plan.d.device = w->device;
    FMOE_TRY(fmoe_backend_find(w->device, FMOE_F32, backend));
    if (!(*backend)->quantize)
        return fmoe_fail(
            FMOE_ERR_UNSUPPORTED,
            "w is on device type %d (%s): weights are quantised and decoded on the CPU (1) and on CUDA (2)",
            w->device.type, (*backend)->name);
    fmoe_checker c = fmoe_checker_begin(&plan);
    c.size[AXIS_E] = c.size[AXIS_N] = c.size[AXIS_K] = -1;
    args[0] =
        (fmoe_arg){"w", w, back ? ARG_OUT : ARG_IN, TYPE_F32 | TYPE_16BIT, LAYOUT_ROWS, {AXIS_E, AXIS_N, AXIS_K}, 0};
    args[1] = (fmoe_arg){"codes", (*a)->codes, back ? ARG_IN : ARG_OUT, 0, LAYOUT_ROWS, {AXIS_E, AXIS_N}, 0};
    FMOE_TRY(fmoe_check_tensor(&c, &args[0], 0));
    const fmoe_quant_matrix m = {.quant = q,
                                 .names = &names,
                                 .axes = AXIS_GRID,
                                 .E = AXIS_E,
                                 .N = w->shape[1],
                                 .K = w->shape[2],
                                 .halves = w->shape[1] % 2 == 0,
                                 .role = back ? ARG_IN : ARG_OUT};
    FMOE_TRY(fmoe_quant_args_of(&c, &m, &args[1], args, &n));
    if (!back && q->scale_type == FMOE_SCALE_E4M3)
        return fmoe_fail(FMOE_ERR_UNSUPPORTED, "quant.scale_type is E4M3 (2): fmoe_quantize writes no such scales");
    if (!back && q->zeros && (q->code != FMOE_CODE_U4 || fmoe_tensor_dtype(q->zeros) != FMOE_BYTE))
        return fmoe_fail(FMOE_ERR_UNSUPPORTED,
                         "quant.zeros is given with code %d: fmoe_quantize writes those of U4 (6), of 8 bits", q->code);
    return fmoe_check_args(&c, args, n, NULL, 0);
}

fmoe_status fmoe_quantize(const fmoe_quant_args *given)
{
    fmoe_quant_args copy;
    const fmoe_quant_args *a;
    const fmoe_backend *backend;
    FMOE_TRY(check_conversion(given, false, &copy, &a, &backend));
    return backend->quantize(a);
}

fmoe_status fmoe_dequantize(const fmoe_quant_args *given)
{
    fmoe_quant_args copy;
    const fmoe_quant_args *a;
    const fmoe_backend *backend;
    FMOE_TRY(check_conversion(given, true, &copy, &a, &backend));
    return backend->dequantize(a);
}

/* ---- foreign packings: a nibble at a time, for they are repacked once ---- */

static uint8_t get_nibble(const uint8_t *p, int64_t i) { return (uint8_t)(p[i / 2] >> (i % 2 * 4) & 15); }

static void set_nibble(uint8_t *p, int64_t i, uint8_t v)
{
    p[i / 2] = (uint8_t)((p[i / 2] & (i % 2 ? 15 : 240)) | v << (i % 2 * 4));
}

/* Where code (n,k) is in the foreign form, as a nibble of little-endian words. */
static int64_t foreign_at(int32_t form, int64_t N, int64_t K, int64_t n, int64_t k)
{
    static const int awq[8] = {0, 4, 1, 5, 2, 6, 3, 7}; /* the nibble that column i of eight is in */
    switch (form) {
    case FMOE_REPACK_GPTQ: return (k / 8 * N + n) * 8 + k % 8;
    case FMOE_REPACK_AWQ: return k * N + n / 8 * 8 + awq[n % 8];
    case FMOE_REPACK_BNB_4BIT: return (n * K + k) ^ 1;
    default: return n * K + k;
    }
}

static fmoe_status check_foreign(const fmoe_repack_args *a)
{
    static const char *const names[] = {"", "N x K/8", "K/8 x N", "K x N/8", "N*K/2 x 1"};
    const int64_t N = a->N, K = a->K;
    int64_t elements;
    if (a->form < FMOE_REPACK_CT_INT4 || a->form > FMOE_REPACK_BNB_4BIT)
        return fmoe_fail(FMOE_ERR_ARG, "form is %d, must be a value of fmoe_repack (1 to 4)", a->form);
    if (N < 1 || K < 1 || __builtin_mul_overflow(N, K, &elements) || elements > INT64_MAX / 8)
        return fmoe_fail(FMOE_ERR_ARG,
                         "N is %" PRId64 " and K %" PRId64 ", must be positive and their product below 2^60", N, K);
    const bool by_rows = a->form == FMOE_REPACK_AWQ, words = a->form != FMOE_REPACK_BNB_4BIT;
    if (words ? (by_rows ? N : K) % 8 : K % 2)
        return fmoe_fail(FMOE_ERR_SHAPE, "%s is %" PRId64 ", must be a multiple of %d in this form",
                         by_rows ? "N" : "K", by_rows ? N : K, words ? 8 : 2);
    const fmoe_tensor *t = a->foreign;
    const int64_t shape[5][2] = {{0, 0}, {N, K / 8}, {K / 8, N}, {K, N / 8}, {N * K / 2, 1}};
    if (!t) return fmoe_fail(FMOE_ERR_NULL, "foreign is NULL");
    if (t->ndim != 2 || !t->shape || t->shape[0] != shape[a->form][0] || t->shape[1] != shape[a->form][1])
        return fmoe_fail(FMOE_ERR_SHAPE, "foreign has another shape than %s = %" PRId64 " x %" PRId64, names[a->form],
                         shape[a->form][0], shape[a->form][1]);
    if (fmoe_tensor_dtype(t) != (words ? -32 : FMOE_BYTE))
        return fmoe_fail(FMOE_ERR_DTYPE, "foreign has a dtype of %d bits (code %d), expected %s", t->dtype.bits,
                         t->dtype.code, words ? "int32" : "8 bits");
    return FMOE_OK;
}

fmoe_status fmoe_quant_repack(const fmoe_repack_args *given)
{
    const fmoe_plan_impl plan = {.d = {.device = {FMOE_CPU, 0}, .dtype = FMOE_F32}};
    fmoe_checker c = fmoe_checker_begin(&plan);
    fmoe_repack_args copy;
    const void *read;
    if (!given) return fmoe_fail(FMOE_ERR_NULL, "fmoe_repack_args is NULL");
    FMOE_TRY(fmoe_struct_read(&fmoe_repack_args_form, given, &copy, &read));
    const fmoe_repack_args *a = read;
    FMOE_TRY(check_foreign(a));
    c.size[AXIS_N] = a->N;
    c.size[AXIS_GRID] = fmoe_ceil_div(a->K, 2);
    c.size[AXIS_K] = c.size[AXIS_R] = -1;
    const bool back = a->back != 0;
    const fmoe_arg args[2] = {
        {"foreign", a->foreign, back ? ARG_OUT : ARG_IN, TYPE_BYTE | TYPE_INT, LAYOUT_COMPACT, {AXIS_R, AXIS_K}, 0},
        {"codes", a->codes, back ? ARG_IN : ARG_OUT, TYPE_BYTE, LAYOUT_ROWS, {AXIS_N, AXIS_GRID}, 0}};
    FMOE_TRY(fmoe_check_args(&c, args, 2, NULL, 0));
    uint8_t *foreign = fmoe_data(a->foreign);
    for (int64_t n = 0; n < a->N; n++) {
        uint8_t *row = (uint8_t *)fmoe_data(a->codes) + n * fmoe_stride(a->codes, 0);
        if (!back && a->K % 2) row[a->K / 2] = 0;
        for (int64_t k = 0; k < a->K; k++) {
            const int64_t at = foreign_at(a->form, a->N, a->K, n, k);
            if (back) set_nibble(foreign, at, get_nibble(row, k));
            else set_nibble(row, k, get_nibble(foreign, at));
        }
    }
    return FMOE_OK;
}
