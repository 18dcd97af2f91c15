/* SPDX-License-Identifier: Apache-2.0
 * util.h - small inline helpers used on both sides of the backend table. */
#ifndef FMOE_UTIL_H
#define FMOE_UTIL_H

#include <stdbool.h>
#include <string.h>

#include "fusedmoe.h"

#define FMOE_TRY(expr)                                                                                                 \
    do {                                                                                                               \
        const fmoe_status status_ = (expr);                                                                            \
        if (status_ != FMOE_OK) return status_;                                                                        \
    } while (0)

static inline int64_t fmoe_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t fmoe_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t fmoe_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline float fmoe_lora_scale(float s) { return s == 0 ? 1.f : s; }
static inline size_t fmoe_align_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* Checked size arithmetic: true when the result did not fit. */
static inline bool fmoe_mul_overflow(size_t a, size_t b, size_t *r) { return __builtin_mul_overflow(a, b, r); }
static inline bool fmoe_add_overflow(size_t a, size_t b, size_t *r) { return __builtin_add_overflow(a, b, r); }

/* Heap sort of items 0 .. n-1, by their numbers; the C library's qsort may allocate. Not stable. */
static inline void fmoe_sift(void *items, int64_t root, int64_t n, bool (*before)(const void *, int64_t, int64_t),
                             void (*swap)(void *, int64_t, int64_t))
{
    for (int64_t child; (child = 2 * root + 1) < n; root = child) {
        if (child + 1 < n && before(items, child, child + 1)) child++;
        if (!before(items, root, child)) return;
        swap(items, root, child);
    }
}

static inline void fmoe_sort(void *items, int64_t n, bool (*before)(const void *items, int64_t i, int64_t j),
                             void (*swap)(void *items, int64_t i, int64_t j))
{
    for (int64_t i = n / 2; i-- > 0;) fmoe_sift(items, i, n, before, swap);
    for (int64_t i = n; i-- > 1;) {
        swap(items, 0, i);
        fmoe_sift(items, 0, i, before, swap);
    }
}

static inline void *fmoe_data(const fmoe_tensor *t) { return (char *)t->data + t->byte_offset; }

/* Stride of dimension i in elements; a NULL strides array means compact row-major. */
static inline int64_t fmoe_stride(const fmoe_tensor *t, int i)
{
    if (t->strides) return t->strides[i];
    int64_t s = 1;
    for (int j = t->ndim - 1; j > i; j--) s *= t->shape[j];
    return s;
}

enum { FMOE_BYTE = 8 }; /* any type of 8 bits: codes of quantised weights */

/* The dtype of a tensor: fmoe_dtype for floats, negative bits for ints (-32, -64), FMOE_BYTE, 0 for anything else. */
static inline int fmoe_tensor_dtype(const fmoe_tensor *t)
{
    const fmoe_datatype d = t->dtype;
    if (d.lanes != 1) return 0;
    if (d.bits == 8) return FMOE_BYTE;
    if (d.code == 2) return d.bits == 32 ? FMOE_F32 : d.bits == 16 ? FMOE_F16 : d.bits == 64 ? FMOE_F64 : 0;
    if (d.code == 4) return d.bits == 16 ? FMOE_BF16 : 0;
    if (d.code == 0) return d.bits == 32 || d.bits == 64 ? -(int)d.bits : 0;
    return 0;
}

static inline size_t fmoe_dtype_size(int dtype)
{
    return dtype == FMOE_F32 || dtype == -32 ? 4 : dtype == FMOE_F64 || dtype == -64 ? 8 : dtype == FMOE_BYTE ? 1 : 2;
}

/* Read or write element i of an int32 or int64 tensor. */
static inline int64_t fmoe_get_int(const void *p, int dtype, int64_t i)
{
    return dtype == -32 ? ((const int32_t *)p)[i] : ((const int64_t *)p)[i];
}

static inline void fmoe_set_int(void *p, int dtype, int64_t i, int64_t v)
{
    if (dtype == -32) ((int32_t *)p)[i] = (int32_t)v;
    else ((int64_t *)p)[i] = v;
}

/* ---- bf16 and f16 as bits. Round to nearest even; NaN stays NaN (quiet bit set). ---- */

static inline float fmoe_bits_to_float(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint32_t fmoe_float_to_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static inline float fmoe_bf16_to_float(uint16_t b) { return fmoe_bits_to_float((uint32_t)b << 16); }

static inline uint16_t fmoe_float_to_bf16(float f)
{
    const uint32_t u = fmoe_float_to_bits(f), rounded = u + 0x7fffu + ((u >> 16) & 1u), quiet = u | 0x400000u;
    return (uint16_t)((f == f ? rounded : quiet) >> 16);
}

static inline float fmoe_f16_to_float(uint16_t h)
{
    /* Shift exponent and mantissa into place, scale by 2^112 (exact, denormals included), repair Inf and NaN. */
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16, em = (uint32_t)(h & 0x7fffu) << 13;
    const float scaled = fmoe_bits_to_float(em) * 0x1p112f;
    const uint32_t u = em >= 0x0f800000u ? em | 0x7f800000u : fmoe_float_to_bits(scaled);
    return fmoe_bits_to_float(u | sign);
}

static inline uint16_t fmoe_float_to_f16(float f)
{
    const uint32_t u = fmoe_float_to_bits(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((a >> 13) & 0x1ffu));
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds to Inf */
    if (a < 0x38800000u) {                                   /* denormal: let the adder round */
        const float r = fmoe_bits_to_float(a) + 0.5f;
        return (uint16_t)(sign | (fmoe_float_to_bits(r) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13));
}

/* ---- Carving buffers out of one workspace: the same walk gives the size (base = NULL) and the pointers. ---- */

typedef struct fmoe_carve {
    char *base; /* NULL while measuring */
    size_t used, align;
    bool overflow;
} fmoe_carve;

/* Base is aligned up first; measuring adds align - 1 bytes for that. */
static inline fmoe_carve fmoe_carve_begin(void *base, size_t align)
{
    fmoe_carve c = {(char *)base, 0, align, false};
    if (base) c.base += (align - (uintptr_t)base % align) % align;
    return c;
}

static inline void *fmoe_carve_take(fmoe_carve *c, int64_t count, size_t element)
{
    size_t bytes = 0, end = 0;
    if (count < 0 || fmoe_mul_overflow((size_t)count, element, &bytes) ||
        fmoe_add_overflow(bytes, c->align - 1, &bytes)) {
        c->overflow = true;
        return NULL;
    }
    bytes -= bytes % c->align;
    if (fmoe_add_overflow(c->used, bytes, &end)) {
        c->overflow = true;
        return NULL;
    }
    void *p = c->base ? c->base + c->used : NULL;
    c->used = end;
    return p;
}

static inline size_t fmoe_carve_bytes(const fmoe_carve *c) { return c->used ? c->used + c->align - 1 : 0; }

#endif
