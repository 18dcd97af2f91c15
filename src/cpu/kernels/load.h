/* SPDX-License-Identifier: Apache-2.0
 * load.h - what kernels of every level share: their names, and an element of any storage type as f32. */
#ifndef FMOE_CPU_LOAD_H
#define FMOE_CPU_LOAD_H

#include "util.h"

/* A name for each level: files are compiled once per level, which the build gives. */
#define CAT_(a, b) a##_##b
#define CAT(a, b) CAT_(a, b)
#define NAME(base) CAT(base, FMOE_ISA)

/* The type is a constant where these are inlined. */
static inline __attribute__((always_inline)) int64_t bytes_of(const int dtype) { return dtype == FMOE_F32 ? 4 : 2; }

static inline __attribute__((always_inline)) float load1(const int dtype, const void *p)
{
    return dtype == FMOE_BF16  ? fmoe_bf16_to_float(*(const uint16_t *)p)
           : dtype == FMOE_F16 ? fmoe_f16_to_float(*(const uint16_t *)p)
                               : *(const float *)p;
}

#endif
