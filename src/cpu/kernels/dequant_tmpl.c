/* SPDX-License-Identifier: Apache-2.0
 *
 * dequant_tmpl.c - quantised weights to the plan's dtype, for levels without a kernel of their own: group by group. A
 * group of 4-bit codes has sixteen possible weights, so these are scaled and rounded once and then looked up. */
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/load.h"

/* v, times its scales, as an element of dtype at dst[i]. */
static inline void put(void *dst, int dtype, int64_t i, float v)
{
    if (dtype == FMOE_F32) ((float *)dst)[i] = v;
    else ((uint16_t *)dst)[i] = dtype == FMOE_BF16 ? fmoe_float_to_bf16(v) : fmoe_float_to_f16(v);
}

static void nibbles(void *dst, int dtype, const uint8_t *row, bool high_first, int64_t begin, int64_t end,
                    const float *t)
{
    uint16_t narrow[16];
    for (int i = 0; i < 16 && dtype != FMOE_F32; i++) put(narrow, dtype, i, t[i]);
    int64_t i = 0, k = begin;
    if (k & 1 && k < end) {
        put(dst, dtype, i++, t[fmoe_nibble(row, k, high_first)]);
        k++;
    }
    for (; k + 1 < end; k += 2, i += 2) {
        const uint8_t b = row[k / 2], even = high_first ? b >> 4 : b & 15, odd = high_first ? b & 15 : b >> 4;
        if (dtype == FMOE_F32) {
            ((float *)dst)[i] = t[even];
            ((float *)dst)[i + 1] = t[odd];
        } else {
            ((uint16_t *)dst)[i] = narrow[even];
            ((uint16_t *)dst)[i + 1] = narrow[odd];
        }
    }
    if (k < end) put(dst, dtype, i, t[fmoe_nibble(row, k, high_first)]);
}

static void decode_row(void *dst, int dtype, const fmoe_coded *m, int64_t row, int64_t k0, int64_t n)
{
    const uint8_t *codes = m->codes + row * m->step;
    const int64_t group_row = fmoe_coded_group(m, row), element = (int64_t)fmoe_dtype_size(dtype);
    char *to = dst;
    for (int64_t k = k0, end; k < k0 + n; to += (end - k) * element, k = end) {
        const int64_t group = k / m->group_cols;
        end = fmoe_min(k0 + n, (group + 1) * m->group_cols);
        const float scale = fmoe_coded_scale(m, group_row, group), zero = fmoe_coded_zero(m, group_row, group);
        if (m->table) {
            float t[16];
            for (int i = 0; i < 16; i++) t[i] = (m->table[i] - zero) * scale * m->scale2;
            nibbles(to, dtype, codes, m->high_first, k, end, t);
        } else if (m->code == FMOE_CODE_S8) {
            for (int64_t i = k; i < end; i++)
                put(to, dtype, i - k, ((float)(int8_t)codes[i] - zero) * scale * m->scale2);
        } else {
            for (int64_t i = k; i < end; i++) put(to, dtype, i - k, fmoe_e4m3_to_float(codes[i]) * scale * m->scale2);
        }
    }
}

void NAME(fmoe_dequant)(void *dst, int64_t apart, int dtype, const fmoe_coded *m, int64_t row, int64_t rows, int64_t k0,
                        int64_t n)
{
    for (int64_t i = 0; i < rows; i++) decode_row((char *)dst + i * apart, dtype, m, row + i, k0, n);
}
