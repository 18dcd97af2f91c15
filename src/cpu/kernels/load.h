/* SPDX-License-Identifier: Apache-2.0
 * load.h - an element of any storage type as f32. The type is a constant where these are inlined. */
#ifndef FMOE_CPU_LOAD_H
#define FMOE_CPU_LOAD_H

#include "util.h"

static inline __attribute__((always_inline)) int64_t bytes_of(const int dtype) { return dtype == FMOE_F32 ? 4 : 2; }

static inline __attribute__((always_inline)) float load1(const int dtype, const void *p)
{
    return dtype == FMOE_BF16  ? fmoe_bf16_to_float(*(const uint16_t *)p)
           : dtype == FMOE_F16 ? fmoe_f16_to_float(*(const uint16_t *)p)
                               : *(const float *)p;
}

#endif
