/* SPDX-License-Identifier: Apache-2.0
 * codes.h - what codes and 8-bit scales of quantised weights are worth (fmoe_code, fmoe_scale_type in fusedmoe.h). */
#ifndef FMOE_CODES_H
#define FMOE_CODES_H

#include "util.h"

static inline bool fmoe_code_is_4bit(int32_t code) { return code >= FMOE_CODE_E2M1; }

/* Bytes of a row of K codes. */
static inline int64_t fmoe_code_bytes(int32_t code, int64_t K) { return fmoe_code_is_4bit(code) ? (K + 1) / 2 : K; }

/* Exponent and mantissa shifted into place and scaled by 2^(127-7): exact, denormals included. */
static inline float fmoe_e4m3_to_float(uint8_t b)
{
    const uint32_t magnitude = b & 0x7fu, sign = (uint32_t)(b & 0x80u) << 24;
    const float scaled = fmoe_bits_to_float(magnitude << 20) * 0x1p120f;
    return fmoe_bits_to_float(sign | (magnitude == 0x7f ? 0x7fc00000u : fmoe_float_to_bits(scaled)));
}

/* All 128 magnitudes. */
static inline const float *fmoe_e4m3_magnitudes(void)
{
#define EIGHT(n, p) n *(p), (n + 1) * (p), (n + 2) * (p), (n + 3) * (p), (n + 4) * (p), (n + 5) * (p), (n + 6) * (p)
    static const float all[128] = {EIGHT(0, 0x1p-9f), 7 * 0x1p-9f,  EIGHT(8, 0x1p-9f), 15 * 0x1p-9f,
                                   EIGHT(8, 0x1p-8f), 15 * 0x1p-8f, EIGHT(8, 0x1p-7f), 15 * 0x1p-7f,
                                   EIGHT(8, 0x1p-6f), 15 * 0x1p-6f, EIGHT(8, 0x1p-5f), 15 * 0x1p-5f,
                                   EIGHT(8, 0x1p-4f), 15 * 0x1p-4f, EIGHT(8, 0x1p-3f), 15 * 0x1p-3f,
                                   EIGHT(8, 0x1p-2f), 15 * 0x1p-2f, EIGHT(8, 0x1p-1f), 15 * 0x1p-1f,
                                   EIGHT(8, 1.f),     15,           EIGHT(8, 2.f),     30,
                                   EIGHT(8, 4.f),     60,           EIGHT(8, 8.f),     120,
                                   EIGHT(8, 16.f),    240,          EIGHT(8, 32.f),    __builtin_nanf("")};
#undef EIGHT
    return all;
}

static inline float fmoe_e8m0_to_float(uint8_t b)
{
    return fmoe_bits_to_float(b == 255 ? 0x7fc00000u : b == 0 ? 0x00400000u : (uint32_t)b << 23);
}

/* Element i of a tensor of scales or zeros: fmoe_dtype, or FMOE_BYTE with what its bytes are (0: integers). */
static inline float fmoe_scale_at(const void *p, int dtype, int scale_type, int64_t i)
{
    if (dtype == FMOE_F32) return ((const float *)p)[i];
    if (dtype == FMOE_BF16) return fmoe_bf16_to_float(((const uint16_t *)p)[i]);
    if (dtype == FMOE_F16) return fmoe_f16_to_float(((const uint16_t *)p)[i]);
    const uint8_t b = ((const uint8_t *)p)[i];
    return scale_type == FMOE_SCALE_E8M0   ? fmoe_e8m0_to_float(b)
           : scale_type == FMOE_SCALE_E4M3 ? fmoe_e4m3_to_float(b)
                                           : b;
}

/* The sixteen values of a 4-bit code; lut: those of LUT4. */
static inline const float *fmoe_code_table(int32_t code, const float *lut)
{
    static const float e2m1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -0.5f, -1., -1.5f, -2., -3., -4., -6.};
    static const float u4[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    /* Quantiles of the normal distribution, as bitsandbytes has them. */
    static const float nf4[16] = {-1.0f,
                                  -0.6961928009986877f,
                                  -0.5250730514526367f,
                                  -0.39491748809814453f,
                                  -0.28444138169288635f,
                                  -0.18477343022823334f,
                                  -0.09105003625154495f,
                                  0.0f,
                                  0.07958029955625534f,
                                  0.16093020141124725f,
                                  0.24611230194568634f,
                                  0.33791524171829224f,
                                  0.44070982933044434f,
                                  0.5626170039176941f,
                                  0.7229568362236023f,
                                  1.0f};
    static const float fp4[16] = {0.f, 1.f / 192,  2.f / 3,  1,   1.f / 3,  0.5f,  1.f / 6,  0.25f,
                                  0.f, -1.f / 192, -2.f / 3, -1., -1.f / 3, -0.5f, -1.f / 6, -0.25f};
    switch (code) {
    case FMOE_CODE_E2M1: return e2m1;
    case FMOE_CODE_NF4: return nf4;
    case FMOE_CODE_FP4: return fp4;
    case FMOE_CODE_LUT4: return lut;
    default: return u4;
    }
}

#endif
