/* SPDX-License-Identifier: Apache-2.0
 *
 * decode.c - quantised weights as the products meet them: a chunk at a time, in the plan's dtype and the layout that a
 * stack of plain weights would have, so that everything after it is the same. Rows of codes are contiguous in memory:
 * those of a chunk are columns where k runs in them, and k where the stack is swapped (the backward). */
#include "cpu/gemm/views.h"

fmoe_coded fmoe_coded_of(const fmoe_tensor *stack, const fmoe_quant *q, bool list, int64_t e)
{
    const int64_t at = list ? 0 : e;
    const int d = list ? 0 : 1; /* the dimension of rows */
    const fmoe_tensor *t = list ? stack + e : stack, *scale = list ? q->scale + e : q->scale;
    const fmoe_tensor *zeros = q->zeros && list ? q->zeros + e : q->zeros;
    const int64_t N = t->shape[d];
    fmoe_coded m = {.code = q->code,
                    .high_first = q->flags & FMOE_QUANT_HIGH_FIRST,
                    .codes = fmoe_data(t),
                    .step = fmoe_stride(t, d),
                    .group_rows = q->group_rows ? q->group_rows : N,
                    .group_cols = q->group_cols ? q->group_cols : INT64_MAX / 2,
                    .half = INT64_MAX,
                    .scale_dtype = fmoe_tensor_dtype(scale),
                    .scale_type = q->scale_type,
                    .scale_step = fmoe_stride(scale, d),
                    .zero = q->zero,
                    .scale2 = 1};
    if (!list) m.codes += e * fmoe_stride(t, 0);
    const int64_t scale_at = list ? 0 : e * fmoe_stride(scale, 0);
    m.scale = (const char *)fmoe_data(scale) + scale_at * (int64_t)fmoe_dtype_size(m.scale_dtype);
    if (q->flags & FMOE_QUANT_HALVES) {
        m.half = N / 2;
        if (!q->group_rows) m.group_rows = m.half;
        m.half_groups = fmoe_ceil_div(m.half, m.group_rows);
    }
    if (zeros) {
        m.zeros_dtype = fmoe_tensor_dtype(zeros);
        m.zeros_step = fmoe_stride(zeros, d);
        const int64_t zeros_at = list ? 0 : e * fmoe_stride(zeros, 0);
        m.zeros = (const char *)fmoe_data(zeros) + zeros_at * (int64_t)fmoe_dtype_size(m.zeros_dtype);
    }
    if (q->scale2) {
        const fmoe_tensor *scale2 = list ? q->scale2 + e : q->scale2;
        m.scale2 = ((const float *)fmoe_data(scale2))[scale2->shape[0] > 1 ? at : 0];
    }
    /* Zeros that are integers leave nothing smaller than 1; a LUT4 may hold anything, and NaN of e4m3
     * stays NaN either way. */
    const bool integers =
        zeros ? m.zeros_dtype == FMOE_BYTE : q->zero >= -1024 && q->zero <= 1024 && q->zero == (float)(int)q->zero;
    m.regular = integers && q->code != FMOE_CODE_LUT4 && m.scale2 > 0x1p-40f && m.scale2 < 0x1p40f;
    if (fmoe_code_is_4bit(q->code)) m.table = fmoe_code_table(q->code, q->lut);
    return m;
}

/* A block as rows of codes: the first of them, how many, and the codes [from, from+length) of each. */
typedef struct code_rows {
    int64_t row, rows, from, length;
} code_rows;

static code_rows rows_of(const fmoe_code_block *b)
{
    const fmoe_stack *s = b->v->coded;
    return s->swap ? (code_rows){s->row + b->k0, b->kc, b->n0, b->n} : (code_rows){s->row + b->n0, b->n, b->k0, b->kc};
}

static fmoe_coded coded_at(const fmoe_view *v)
{
    return fmoe_coded_of(v->coded->t, v->coded->quant, v->coded->list, v->e);
}

static void prefetch_codes(const fmoe_coded *m, const code_rows *r, int64_t i)
{
    enum { LINE = 64 };
    const uint8_t *at = m->codes + (r->row + i) * m->step + fmoe_code_bytes(m->code, r->from & ~INT64_C(1));
    const int64_t bytes = fmoe_code_bytes(m->code, r->length);
    for (int64_t line = 0; line < bytes; line += LINE) __builtin_prefetch(at + line, 0, 2);
    const int64_t first = fmoe_coded_group(m, r->row + i) * m->scale_step + r->from / m->group_cols;
    __builtin_prefetch(m->scale + first * (int64_t)fmoe_dtype_size(m->scale_dtype), 0, 2);
}

void fmoe_decode(const fmoe_cpu_plan *cpu, const fmoe_code_block *b, void *to, int64_t apart,
                 const fmoe_code_block *ahead)
{
    const fmoe_stack *s = b->v->coded;
    fmoe_coded now = coded_at(b->v);
    const fmoe_coded then = ahead ? coded_at(ahead->v) : now;
    now.for_pairs = cpu->pairs;
    const code_rows r = rows_of(b), next = ahead ? rows_of(ahead) : (code_rows){0, 0, 0, 0};
    const int64_t step = apart * (int64_t)fmoe_dtype_size(s->dtype);
    for (int64_t i = 0; i < r.rows; i++) {
        if (i < next.rows) prefetch_codes(&then, &next, i);
        cpu->k.dequant((char *)to + i * step, s->dtype, &now, r.row + i, r.from, r.length);
    }
}
