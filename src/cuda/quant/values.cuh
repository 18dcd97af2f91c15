// SPDX-License-Identifier: Apache-2.0
// values.cuh - what codes of 8 bits and scales are worth, exactly, in f32 (src/codes.h on the device).
#pragma once
#include "coded.cuh"

#include <cuda_fp8.h>

DEV float e4m3(uint8_t b)
{
#if __CUDA_ARCH__ >= 890
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(b, __NV_E4M3)));
#else
    const uint32_t magnitude = b & 0x7fu, sign = (uint32_t)(b & 0x80u) << 24;
    const float v = __fmul_rn(__uint_as_float(magnitude << 20), 0x1p120f); // exact, denormals included
    return __uint_as_float(sign | (magnitude == 0x7f ? 0x7fc00000u : __float_as_uint(v)));
#endif
}

// Of two neighbours, the first in the lower byte.
DEV float2 e4m3_pair(uint16_t w)
{
#if __CUDA_ARCH__ >= 890
    return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(w, __NV_E4M3)));
#else
    return make_float2(e4m3((uint8_t)w), e4m3((uint8_t)(w >> 8)));
#endif
}

// What two bytes of codes are worth, the first in the lower one: FP8, or integers less the constant zero point.
template <int CODE> DEV float2 coded_pair(uint32_t two, float zero)
{
    if (CODE == CODE_E4M3) return e4m3_pair((uint16_t)two);
    const uint32_t w = two ^ 0x8080u; // 2^23 + 128 + code
    return make_float2(__uint_as_float(__byte_perm(w, 0x4b000000u, 0x7440u)) - 8388736.f - zero,
                       __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7441u)) - 8388736.f - zero);
}

// The row of scales and zeros that a row of codes has.
DEV int group_row(const CodedMatrix &m, int row)
{
    const int lower = row < m.half ? 0 : m.lower_groups, r = row < m.half ? row : row - m.half;
    return lower + (m.group_rows ? r / m.group_rows : 0);
}

static __host__ DEV int scale_bytes(ScaleKind kind)
{
    return kind == SCALE_F32 ? 4 : kind == SCALE_BF16 || kind == SCALE_F16 ? 2 : 1;
}

// Element i of scales or zeros.
DEV float scale_value(const void *p, ScaleKind kind, int64_t i)
{
    switch (kind) {
    case SCALE_F32: return ((const float *)p)[i];
    case SCALE_BF16: return to_float(((const bf16 *)p)[i]);
    case SCALE_F16: return to_float(((const f16 *)p)[i]);
    default: break;
    }
    const uint8_t b = ((const uint8_t *)p)[i];
    if (kind == SCALE_E8M0) return __uint_as_float(b == 255 ? 0x7fc00000u : b == 0 ? 0x00400000u : (uint32_t)b << 23);
    return kind == SCALE_E4M3 ? e4m3(b) : (float)b;
}
