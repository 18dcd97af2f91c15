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

fmoe_code_lines fmoe_codes_at(const fmoe_code_block *b)
{
    const fmoe_coded m = coded_at(b->v);
    const code_rows r = rows_of(b);
    return (fmoe_code_lines){(const char *)m.codes + r.row * m.step + fmoe_code_bytes(m.code, r.from & ~INT64_C(1)),
                             m.step, r.rows, fmoe_code_bytes(m.code, r.length)};
}

void fmoe_decode(const fmoe_cpu_plan *cpu, const fmoe_code_block *b, void *to, int64_t apart)
{
    enum { LINE = 64 };
    const fmoe_stack *s = b->v->coded;
    fmoe_coded m = coded_at(b->v);
    m.for_pairs = cpu->pairs;
    const code_rows r = rows_of(b);
    const fmoe_code_lines lines = fmoe_codes_at(b);
    const int64_t step = apart * (int64_t)fmoe_dtype_size(s->dtype);
    const int64_t group = r.from / m.group_cols, scale = (int64_t)fmoe_dtype_size(m.scale_dtype);
    for (int64_t i = 0, rows; i < r.rows; i += rows) {
        rows = fmoe_min(FMOE_DECODE_ROWS, r.rows - i);
        for (int64_t j = i + rows; j < fmoe_min(i + 2 * rows, r.rows); j++) {
            for (int64_t line = 0; line < lines.bytes; line += LINE)
                __builtin_prefetch(lines.at + j * lines.step + line, 0, 3);
            if (m.group_rows == 1)
                __builtin_prefetch(m.scale + (fmoe_coded_group(&m, r.row + j) * m.scale_step + group) * scale, 0, 3);
        }
        cpu->k.dequant((char *)to + i * step, step, s->dtype, &m, r.row + i, rows, r.from, r.length);
    }
}
