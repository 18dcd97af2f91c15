/* SPDX-License-Identifier: Apache-2.0
 * quantised.h - quantised weights for tests: drawn codes and descriptors, and the weights they stand for. */
#ifndef FMOE_TESTS_QUANTISED_H
#define FMOE_TESTS_QUANTISED_H

#include "codes.h"
#include "tensors.h"

enum { FORMATS = 12 };

typedef struct quant_format {
    const char *name;
    int32_t code;
    uint32_t flags;
    int32_t rows, cols, scale_dtype, scale_type;
    float zero;
    bool zeros, scale2;
} quant_format;

static const quant_format quant_formats[FORMATS] = {
    {"nf4", FMOE_CODE_NF4, FMOE_QUANT_HIGH_FIRST, 1, 64, FMOE_F32, 0, 0, false, false},
    {"fp8 128x128", FMOE_CODE_E4M3, 0, 128, 128, FMOE_F32, 0, 0, false, false},
    {"fp8 channel", FMOE_CODE_E4M3, 0, 1, 0, FMOE_BF16, 0, 0, false, false},
    {"mxfp4", FMOE_CODE_E2M1, 0, 1, 32, FMOE_BYTE, FMOE_SCALE_E8M0, 0, false, false},
    {"int8", FMOE_CODE_S8, 0, 1, 0, FMOE_F32, 0, 0, false, true},
    {"int4", FMOE_CODE_U4, 0, 1, 128, FMOE_F16, 0, 8, false, false},
    {"int4 zeros", FMOE_CODE_U4, 0, 1, 32, FMOE_F32, 0, 0, true, false},
    {"fp4", FMOE_CODE_FP4, FMOE_QUANT_HIGH_FIRST, 1, 64, FMOE_F32, 0, 0, false, false},
    {"nvfp4", FMOE_CODE_E2M1, 0, 1, 16, FMOE_BYTE, FMOE_SCALE_E4M3, 0, false, true},
    {"lut, odd groups", FMOE_CODE_LUT4, 0, 3, 37, FMOE_F32, 0, 0, false, true},
    {"int8, zeros in blocks", FMOE_CODE_S8, 0, 5, 7, FMOE_BF16, 0, 0, true, false},
    {"one scale", FMOE_CODE_E4M3, 0, 0, 0, FMOE_F32, 0, 0, false, false},
};

static const float quant_lut[16] = {-3, -2,   -1.5f, -1,   -0.75f, -0.5f, -0.25f, -0.f,
                                    0,  0.1f, 0.3f,  0.6f, 1,      1.25f, 2,      3};

typedef struct quantised {
    fmoe_quant q;
    fmoe_tensor *codes;
    int64_t E, N, K;
} quantised;

static inline fmoe_tensor *bytes_new(int64_t a, int64_t b, int64_t c, int64_t gap)
{
    fmoe_tensor *t = tensor_strided(FMOE_BYTE, SHAPE(a, b, c), (const int64_t[]){b * (c + gap) + gap, c + gap, 1});
    t->dtype = (fmoe_datatype){1, 8, 1};
    const int64_t last = (a - 1) * (b * (c + gap) + gap) + (b - 1) * (c + gap) + c;
    for (int64_t i = 0; i < last; i++) ((uint8_t *)t->data)[i] = (uint8_t)test_random();
    return t;
}

/* A grid of scales about `scale`, or of zeros; now and then a zero scale, a negative one. */
static inline fmoe_tensor *grid_new(int dtype, int scale_type, int64_t E, int64_t rows, int64_t cols, double scale)
{
    if (dtype == FMOE_BYTE) {
        fmoe_tensor *t = bytes_new(E, rows, cols, 0);
        uint8_t *b = t->data;
        for (int64_t i = 0; i < E * rows * cols; i++)
            b[i] = (uint8_t)(scale_type == FMOE_SCALE_E8M0 ? 118 + b[i] % 6 : scale_type ? b[i] % 0x40 : b[i] % 16);
        return t;
    }
    fmoe_tensor *t = tensor_new(dtype, SHAPE(E, rows, cols));
    for (int64_t i = 0; i < E * rows * cols; i++)
        tensor_set(t, i, test_below(40) ? scale * (0.5 + test_uniform()) * (test_below(8) ? 1 : -1) : 0);
    return t;
}

/* halves: as FMOE_QUANT_HALVES. */
static inline quantised quant_draw(const quant_format *f, int64_t E, int64_t N, int64_t K, bool halves)
{
    quantised w = {.q = FMOE_QUANT_INIT, .E = E, .N = N, .K = K};
    const int64_t part = halves ? N / 2 : N;
    const int64_t rows = (halves ? 2 : 1) * (f->rows ? (part + f->rows - 1) / f->rows : 1),
                  cols = f->cols ? (K + f->cols - 1) / f->cols : 1;
    w.codes = bytes_new(E, N, fmoe_code_bytes(f->code, K), test_below(2) * 5);
    uint8_t *codes = w.codes->data;
    for (int64_t e = 0; e < E; e++) /* no NaN, but where a test wants one */
        for (int64_t i = 0; i < N * K && f->code == FMOE_CODE_E4M3; i++) {
            uint8_t *c = &codes[e * w.codes->strides[0] + i / K * w.codes->strides[1] + i % K];
            if ((*c & 0x7f) == 0x7f) *c = 0x38;
        }
    const double most = f->code == FMOE_CODE_S8     ? 127
                        : f->code == FMOE_CODE_U4   ? 8
                        : f->code == FMOE_CODE_E4M3 ? 448
                                                    : 2;
    w.q.code = f->code;
    w.q.flags = f->flags | (halves ? FMOE_QUANT_HALVES : 0);
    w.q.group_rows = f->rows;
    w.q.group_cols = f->cols;
    w.q.scale_type = f->scale_type;
    w.q.zero = f->zero;
    w.q.scale = grid_new(f->scale_dtype, f->scale_type, E, rows, cols, 0.2 / most);
    if (f->zeros) w.q.zeros = grid_new(FMOE_BYTE, 0, E, rows, cols, 0);
    if (f->scale2) w.q.scale2 = tensor_fill(tensor_new(FMOE_F32, SHAPE(test_below(2) ? E : 1)), 0.3);
    if (f->code == FMOE_CODE_LUT4) w.q.lut = quant_lut;
    return w;
}

/* The weights, in dtype. */
static inline fmoe_tensor *quant_weights(const quantised *w, int dtype)
{
    fmoe_tensor *t = tensor_new(dtype, SHAPE(w->E, w->N, w->K));
    const fmoe_quant_args a = {.size = sizeof a, .w = t, .codes = w->codes, .quant = &w->q};
    CHECK_STATUS(fmoe_dequantize(&a), FMOE_OK);
    return t;
}

/* Bits, but any NaN is as good as another. */
static inline int64_t differences(const fmoe_tensor *a, const fmoe_tensor *b)
{
    int64_t n = 0;
    const size_t size = fmoe_dtype_size(fmoe_tensor_dtype(a));
    for (int64_t i = 0; i < tensor_count(a); i++)
        n += memcmp(tensor_at(a, i), tensor_at(b, i), size) && !(isnan(tensor_get(a, i)) && isnan(tensor_get(b, i)));
    return n;
}

/* The slices of every tensor of a descriptor, for lists. */
static inline fmoe_quant *quant_slices(const fmoe_quant *q, int64_t E)
{
    fmoe_quant *list = test_alloc(sizeof *list);
    *list = *q;
    list->scale = tensor_slices((fmoe_tensor *)(uintptr_t)q->scale);
    if (q->zeros) list->zeros = tensor_slices((fmoe_tensor *)(uintptr_t)q->zeros);
    if (q->scale2) {
        fmoe_tensor *ones = test_alloc((size_t)E * sizeof *ones);
        for (int64_t e = 0; e < E; e++)
            ones[e] =
                *tensor_over((float *)q->scale2->data + (q->scale2->shape[0] > 1 ? e : 0), FMOE_F32, SHAPE(1), NULL);
        list->scale2 = ones;
    }
    return list;
}

#endif
