/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize.c - weights to codes and back (fmoe_quantize, fmoe_dequantize), a row of groups at a time on all cores. What
 * is computed, and in which order, is bitsandbytes' way where it has the format: the bytes are the same. */
#include <math.h>

#include "cpu/ops/ops.h"

typedef struct quantize_run {
    const fmoe_quant_args *a;
    fmoe_kernels k;
    int64_t E, N, K;
    float sorted[16], bounds[15]; /* the values of a 4-bit code from small to large, and what separates neighbours */
    uint8_t order[16];
    float most; /* the largest magnitude of a code */
    fmoe_tasks tasks;
} quantize_run;

static fmoe_coded matrix_at(const quantize_run *run, int64_t e)
{
    return fmoe_coded_of(run->a->codes, run->a->quant, false, e);
}

static const char *weight_row(const quantize_run *run, int64_t e, int64_t n)
{
    const fmoe_tensor *w = run->a->w;
    const int64_t at = e * fmoe_stride(w, 0) + n * fmoe_stride(w, 1);
    return (const char *)fmoe_data(w) + at * (int64_t)fmoe_dtype_size(fmoe_tensor_dtype(w));
}

static float weight_at(const char *row, int dtype, int64_t k)
{
    return dtype == FMOE_F32 ? ((const float *)(const void *)row)[k] : fmoe_scale_at(row, dtype, 0, k);
}

/* ---- scales ---- */

typedef struct range {
    float most, lowest, highest; /* |x|, x below zero, x above; most is NaN where one of them is */
} range;

static range range_of(const quantize_run *run, int64_t e, int64_t n0, int64_t n1, int64_t k0, int64_t k1)
{
    const int dtype = fmoe_tensor_dtype(run->a->w);
    range r = {0, 0, 0};
    bool nan = false;
    for (int64_t n = n0; n < n1; n++) {
        const char *row = weight_row(run, e, n);
        for (int64_t k = k0; k < k1; k++) {
            const float x = weight_at(row, dtype, k);
            nan = nan || x != x;
            r.lowest = fminf(r.lowest, x);
            r.highest = fmaxf(r.highest, x);
        }
    }
    r.most = nan ? NAN : fmaxf(fabsf(r.lowest), r.highest);
    return r;
}

/* The power of two that brings the largest into E2M1's last binade, or its like of another code. */
static uint8_t e8m0_of(float most, float code_most)
{
    int of_most, of_code;
    if (!isfinite(most)) return 255;
    if (most == 0) return 0;
    frexpf(most, &of_most);
    frexpf(code_most, &of_code);
    const int e = of_most - of_code + 127;
    return (uint8_t)(e < 0 ? 0 : e > 254 ? 254 : e);
}

/* bitsandbytes' INT8: the scale is the magnitude itself, and scale2 what makes it that of a code. */
static bool is_by_magnitude(const fmoe_coded *m) { return m->code == FMOE_CODE_S8 && m->scale2 == 1.0f / 127; }

/* Store the scale of a group, and its zero; what is read back of them is what codes are made for. */
static void store_scale(const quantize_run *run, const fmoe_coded *m, int64_t at, int64_t zeros_at, range r)
{
    const fmoe_quant *q = run->a->quant;
    char *scale = (char *)(uintptr_t)m->scale;
    float s = is_by_magnitude(m) ? r.most : r.most / run->most;
    if (m->zeros) {
        s = (r.highest - r.lowest) / 15;
        if (r.most != r.most) s = NAN;
        const float z = s > 0 ? rintf(-r.lowest / s) : 0;
        ((uint8_t *)(uintptr_t)m->zeros)[zeros_at] = (uint8_t)fminf(fmaxf(z, 0), 15);
    }
    if (q->scale2 && !is_by_magnitude(m)) s /= m->scale2;
    if (m->scale_dtype == FMOE_BYTE) ((uint8_t *)scale)[at] = e8m0_of(r.most, run->most);
    else if (m->scale_dtype == FMOE_F32) ((float *)(void *)scale)[at] = s;
    else ((uint16_t *)(void *)scale)[at] = m->scale_dtype == FMOE_BF16 ? fmoe_float_to_bf16(s) : fmoe_float_to_f16(s);
}

/* ---- codes ---- */

static uint8_t to_e4m3(float x)
{
    const uint8_t sign = x < 0 ? 0x80 : 0;
    const float a = fminf(fabsf(x), 448);                                 /* NaN: 448 */
    if (a < 0x1p-6f) return (uint8_t)(sign | (uint8_t)rintf(a * 0x1p9f)); /* 8: the smallest normal, as it is */
    const uint32_t u = fmoe_float_to_bits(a), rounded = u + 0x7ffffu + ((u >> 20) & 1u);
    return (uint8_t)(sign | (uint8_t)((rounded >> 20) - (120u << 3)));
}

/* Nearest, to even in the middle. */
static uint8_t to_e2m1(float x)
{
    const float a = fabsf(x);
    const uint8_t code =
        (uint8_t)((a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5));
    return (uint8_t)(code | (x < 0 ? 8 : 0));
}

static uint8_t nearest(const quantize_run *run, float x)
{
    int i = 0;
    for (int b = 0; b < 15; b++) i += run->bounds[b] < x;
    return run->order[i];
}

static uint8_t code_of(const quantize_run *run, const fmoe_coded *m, float x, float inverse, float zero)
{
    const float v = x * inverse;
    switch (m->code) {
    case FMOE_CODE_E4M3: return to_e4m3(v);
    case FMOE_CODE_S8: return (uint8_t)(int8_t)fminf(fmaxf(rintf(v + zero), -127), 127);
    case FMOE_CODE_E2M1: return to_e2m1(v);
    case FMOE_CODE_U4: return (uint8_t)fminf(fmaxf(rintf(v) + zero, 0), 15);
    default: return nearest(run, v);
    }
}

/* What weights are multiplied by to be codes. */
static float inverse_of(const fmoe_coded *m, float scale)
{
    if (is_by_magnitude(m)) return scale > 0 ? 127.0f / scale : 0;
    return scale == 0 && m->code != FMOE_CODE_NF4 && m->code != FMOE_CODE_FP4
               ? 0
               : 1.0f / (fmaxf(scale, 1e-38f) * m->scale2);
}

static void quantize_worker(void *arg, int worker)
{
    (void)worker;
    quantize_run *run = arg;
    const int dtype = fmoe_tensor_dtype(run->a->w);
    const int64_t per_expert = run->tasks.n / run->E;
    for (int64_t task; fmoe_claim(&run->tasks, &task);) {
        const int64_t e = task / per_expert, g = task % per_expert;
        const fmoe_coded m = matrix_at(run, e);
        const bool second = m.half != INT64_MAX && g >= m.half_groups;
        const int64_t n0 = second ? m.half + (g - m.half_groups) * m.group_rows : g * m.group_rows;
        const int64_t end = m.half == INT64_MAX || second ? run->N : m.half, n1 = fmoe_min(end, n0 + m.group_rows);
        const int64_t cols = fmoe_min(m.group_cols, run->K);
        for (int64_t c = 0, k0 = 0; k0 < run->K; c++, k0 += cols) {
            const int64_t k1 = fmoe_min(run->K, k0 + cols);
            store_scale(run, &m, g * m.scale_step + c, g * m.zeros_step + c, range_of(run, e, n0, n1, k0, k1));
            const float inverse = inverse_of(&m, fmoe_coded_scale(&m, g, c)), zero = fmoe_coded_zero(&m, g, c);
            for (int64_t n = n0; n < n1; n++) {
                const char *row = weight_row(run, e, n);
                uint8_t *to = (uint8_t *)(uintptr_t)m.codes + n * m.step;
                for (int64_t k = k0; k < k1; k++) {
                    const uint8_t code = code_of(run, &m, weight_at(row, dtype, k), inverse, zero);
                    const bool upper = ((k & 1) != 0) != m.high_first;
                    if (!m.table) to[k] = code;
                    else if (k & 1) to[k / 2] = (uint8_t)(to[k / 2] | (upper ? code << 4 : code));
                    else to[k / 2] = (uint8_t)(upper ? code << 4 : code);
                }
            }
        }
    }
}

static void dequantize_worker(void *arg, int worker)
{
    (void)worker;
    quantize_run *run = arg;
    for (int64_t task; fmoe_claim(&run->tasks, &task);) {
        const int64_t e = task / run->N, n = task % run->N;
        const fmoe_coded m = matrix_at(run, e);
        run->k.dequant((char *)(uintptr_t)weight_row(run, e, n), 0, fmoe_tensor_dtype(run->a->w), &m, n, 1, 0, run->K);
    }
}

/* Values by size; equal ones (the two zeros of a code) stay in order. */
static void sort_values(quantize_run *run)
{
    const fmoe_quant *q = run->a->quant;
    const float *table = fmoe_code_table(q->code, q->lut);
    run->most = 0;
    for (int i = 0, j; i < 16; i++) {
        for (j = i; j > 0 && run->sorted[j - 1] > table[i]; j--) {
            run->sorted[j] = run->sorted[j - 1];
            run->order[j] = run->order[j - 1];
        }
        run->sorted[j] = table[i];
        run->order[j] = (uint8_t)i;
        run->most = fmaxf(run->most, fabsf(table[i]));
    }
    for (int i = 0; i < 15; i++) run->bounds[i] = (run->sorted[i] + run->sorted[i + 1]) / 2;
}

static quantize_run run_of(const fmoe_quant_args *a)
{
    quantize_run run = {.a = a, .E = a->w->shape[0], .N = a->w->shape[1], .K = a->w->shape[2]};
    fmoe_kernels_fill(&run.k, fmoe_cpu_level());
    return run;
}

fmoe_status fmoe_cpu_quantize(const fmoe_quant_args *a)
{
    quantize_run run = run_of(a);
    if (fmoe_code_is_4bit(a->quant->code)) sort_values(&run);
    if (a->quant->code == FMOE_CODE_E4M3) run.most = 448;
    if (a->quant->code == FMOE_CODE_S8) run.most = 127;
    if (a->quant->code == FMOE_CODE_U4) run.most = 7.5f; /* half of the codes on each side of the zero */
    run.tasks.n = run.K ? run.E * a->quant->scale->shape[1] : 0;
    if (run.tasks.n) fmoe_pool_run(fmoe_cpu_count(), quantize_worker, &run);
    return FMOE_OK;
}

fmoe_status fmoe_cpu_dequantize(const fmoe_quant_args *a)
{
    quantize_run run = run_of(a);
    run.tasks.n = run.K ? run.E * run.N : 0;
    if (run.tasks.n) fmoe_pool_run(fmoe_cpu_count(), dequantize_worker, &run);
    return FMOE_OK;
}
