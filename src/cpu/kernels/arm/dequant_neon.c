/* SPDX-License-Identifier: Apache-2.0
 *
 * dequant_neon.c - quantised weights to the plan's dtype (kernels.h: dequant) on 64-bit Arm. 4 bits: the sixteen
 * weights of a group are scaled and rounded once. Each byte of a weight has a table of its own, two for 16 bits and
 * four for f32, in which TBL looks up 16 codes. float8_e4m3fn to bf16 is looked up too, see lookup_floats. Other bytes
 * are converted, scaled and rounded 16 at a time. What is left of a group, and a first code in the middle of a byte,
 * one by one. */
#include <arm_neon.h>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/load.h"

#define INLINE static inline __attribute__((always_inline))

/* What the codes of a group are decoded by. */
typedef struct group {
    float scale, zero, scale2;
    bool plain; /* scale2 is 1 */
} group;

/* (v - zero) * scale * scale2, from left to right. The zero of e4m3 is 0. */
INLINE float32x4_t scaled(const int32_t code, const group *g, float32x4_t v)
{
    const float32x4_t from_zero = code == FMOE_CODE_E4M3 ? v : vsubq_f32(v, vdupq_n_f32(g->zero));
    const float32x4_t once = vmulq_n_f32(from_zero, g->scale);
    return g->plain ? once : vmulq_n_f32(once, g->scale2);
}

/* ---- stores ---- */

/* Eight numbers to the nearest of 16 bits; bf16 as fmoe_float_to_bf16, but for the bits of a NaN. Bit 16 is added at
 * the lowest place, then 0x7fff, and the upper halves are taken. regular: none is a NaN. */
INLINE uint16x8_t to_16bit(const int dtype, const bool regular, float32x4_t a, float32x4_t b)
{
    if (dtype == FMOE_F16) return vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(a), b));
    const uint32x4_t half = vdupq_n_u32(0x7fff), nan = vdupq_n_u32(0x7fc00000);
    const uint32x4_t x = vreinterpretq_u32_f32(a), y = vreinterpretq_u32_f32(b);
    uint32x4_t even_x = vsraq_n_u32(x, vshlq_n_u32(x, 15), 31), even_y = vsraq_n_u32(y, vshlq_n_u32(y, 15), 31);
    if (!regular) even_x = vbslq_u32(vceqq_f32(a, a), even_x, nan), even_y = vbslq_u32(vceqq_f32(b, b), even_y, nan);
    return vaddhn_high_u32(vaddhn_u32(even_x, half), even_y, half);
}

INLINE void put16(const int dtype, const bool regular, char *to, const float32x4_t v[4])
{
    for (int i = 0; i < 4 && dtype == FMOE_F32; i++) vst1q_f32((float *)(void *)to + 4 * i, v[i]);
    for (int i = 0; i < 2 && dtype != FMOE_F32; i++)
        vst1q_u16((uint16_t *)(void *)to + 8 * i, to_16bit(dtype, regular, v[2 * i], v[2 * i + 1]));
}

INLINE void put1(const int dtype, char *to, float v)
{
    if (dtype == FMOE_F32) *(float *)(void *)to = v;
    else *(uint16_t *)(void *)to = dtype == FMOE_BF16 ? fmoe_float_to_bf16(v) : fmoe_float_to_f16(v);
}

/* ---- 16 weights as tables of their bytes ---- */

typedef struct tables {
    uint8x16_t byte[4]; /* from the lowest on; of 16 bits two */
} tables;

INLINE tables tables_of(const int dtype, const bool regular, const float32x4_t t[4])
{
    tables made = {{{0}}};
    uint16x8_t lower[2], upper[2]; /* halves of f32, or words of 16 bits */
    for (int i = 0; i < 2; i++) {
        const uint16x8_t a = vreinterpretq_u16_f32(t[2 * i]), b = vreinterpretq_u16_f32(t[2 * i + 1]);
        lower[i] = dtype == FMOE_F32 ? vuzp1q_u16(a, b) : to_16bit(dtype, regular, t[2 * i], t[2 * i + 1]);
        upper[i] = vuzp2q_u16(a, b);
    }
    made.byte[0] = vuzp1q_u8(vreinterpretq_u8_u16(lower[0]), vreinterpretq_u8_u16(lower[1]));
    made.byte[1] = vuzp2q_u8(vreinterpretq_u8_u16(lower[0]), vreinterpretq_u8_u16(lower[1]));
    if (dtype != FMOE_F32) return made;
    made.byte[2] = vuzp1q_u8(vreinterpretq_u8_u16(upper[0]), vreinterpretq_u8_u16(upper[1]));
    made.byte[3] = vuzp2q_u8(vreinterpretq_u8_u16(upper[0]), vreinterpretq_u8_u16(upper[1]));
    return made;
}

/* The weights of 16 codes. */
INLINE void lookup16(const int dtype, char *to, uint8x16_t index, const tables *t)
{
    const uint8x16_t b0 = vqtbl1q_u8(t->byte[0], index), b1 = vqtbl1q_u8(t->byte[1], index);
    const uint16x8_t x = vreinterpretq_u16_u8(vzip1q_u8(b0, b1)), y = vreinterpretq_u16_u8(vzip2q_u8(b0, b1));
    uint16_t *words = (uint16_t *)(void *)to;
    if (dtype != FMOE_F32) {
        vst1q_u16(words, x);
        vst1q_u16(words + 8, y);
        return;
    }
    const uint8x16_t b2 = vqtbl1q_u8(t->byte[2], index), b3 = vqtbl1q_u8(t->byte[3], index);
    const uint16x8_t u = vreinterpretq_u16_u8(vzip1q_u8(b2, b3)), v = vreinterpretq_u16_u8(vzip2q_u8(b2, b3));
    vst1q_u16(words, vzip1q_u16(x, u));
    vst1q_u16(words + 8, vzip2q_u16(x, u));
    vst1q_u16(words + 16, vzip1q_u16(y, v));
    vst1q_u16(words + 24, vzip2q_u16(y, v));
}

/* ---- 4 bits ---- */

/* n codes from the beginning of a byte on, as many sixteens as there are. */
INLINE void lookup_nibbles(const int dtype, const bool high_first, char *to, const uint8_t *p, int64_t n,
                           const tables *t)
{
    const uint8x16_t nibble = vdupq_n_u8(15);
    for (; n >= 32; n -= 32, p += 16, to += 32 * bytes_of(dtype)) {
        const uint8x16_t codes = vld1q_u8(p), lower = vandq_u8(codes, nibble), upper = vshrq_n_u8(codes, 4);
        const uint8x16_t even = high_first ? upper : lower, odd = high_first ? lower : upper;
        lookup16(dtype, to, vzip1q_u8(even, odd), t);
        lookup16(dtype, to + 16 * bytes_of(dtype), vzip2q_u8(even, odd), t);
    }
    if (n < 16) return;
    const uint8x16_t codes = vcombine_u8(vld1_u8(p), vdup_n_u8(0)), lower = vandq_u8(codes, nibble);
    const uint8x16_t upper = vshrq_n_u8(codes, 4);
    lookup16(dtype, to, vzip1q_u8(high_first ? upper : lower, high_first ? lower : upper), t);
}

/* Codes [k, k+n) of a row, all of one group. */
INLINE void decode_nibbles(const int dtype, const bool regular, const fmoe_coded *m, char *to, const uint8_t *codes,
                           int64_t k, int64_t n, const group *g)
{
    float32x4_t t[4];
    for (int i = 0; i < 4; i++) t[i] = scaled(FMOE_CODE_LUT4, g, vld1q_f32(m->table + 4 * i));
    float singly[16];
    if (k & 1 || n % 16)
        for (int i = 0; i < 4; i++) vst1q_f32(singly + 4 * i, t[i]);
    if (k & 1) {
        put1(dtype, to, singly[fmoe_nibble(codes, k, m->high_first)]);
        to += bytes_of(dtype), k++, n--;
    }
    const int64_t whole = n & ~INT64_C(15);
    if (whole) {
        const tables by = tables_of(dtype, regular, t);
        if (m->high_first) lookup_nibbles(dtype, true, to, codes + k / 2, whole, &by);
        else lookup_nibbles(dtype, false, to, codes + k / 2, whole, &by);
    }
    to += whole * bytes_of(dtype);
    for (int64_t i = whole; i < n; i++, to += bytes_of(dtype))
        put1(dtype, to, singly[fmoe_nibble(codes, k + i, m->high_first)]);
}

/* ---- 8 bits ---- */

/* Sixteen integers: each byte to the top of 32 bits, a fixed-point number with 24 of them behind the point. TBL gives
 * zero for an index of 255. */
INLINE void from_s8(float32x4_t v[4], const uint8_t *p)
{
    const uint8x16_t x = vld1q_u8(p);
    for (int i = 0; i < 4; i++) {
        const uint32x4_t top = {0x00ffffffu, 0x01ffffffu, 0x02ffffffu, 0x03ffffffu};
        const uint8x16_t index = vreinterpretq_u8_u32(vaddq_u32(top, vdupq_n_u32((uint32_t)i << 26)));
        v[i] = vcvtq_n_f32_s32(vreinterpretq_s32_u8(vqtbl1q_u8(x, index)), 24);
    }
}

/* Sixteen float8_e4m3fn by way of f16, whose exponent is one bit longer; as fmoe_e4m3_to_float. */
INLINE void from_e4m3(float32x4_t v[4], const uint8_t *p)
{
    const uint8x16_t x = vld1q_u8(p), most = vdupq_n_u8(0x7f);
    const int8x16_t code = vreinterpretq_s8_u8(x), nan = vreinterpretq_s8_u8(vceqq_u8(vandq_u8(x, most), most));
    for (int i = 0; i < 2; i++) {
        const uint16x8_t moved = vreinterpretq_u16_s16(i ? vshll_high_n_s8(code, 7) : vshll_n_s8(vget_low_s8(code), 7));
        const uint16x8_t ones = vreinterpretq_u16_s16(i ? vmovl_high_s8(nan) : vmovl_s8(vget_low_s8(nan)));
        const float16x8_t half = vreinterpretq_f16_u16(vorrq_u16(vbicq_u16(moved, vdupq_n_u16(0x4000)), ones));
        v[2 * i] = vmulq_n_f32(vcvt_f32_f16(vget_low_f16(half)), 0x1p8f);
        v[2 * i + 1] = vmulq_n_f32(vcvt_high_f32_f16(half), 0x1p8f);
    }
}

/* Codes of e4m3 to bf16 by a regular group: those below 16 by a table; above, a weight is that of the same three bits
 * of mantissa among 8 to 15, as scaling and rounding do not see a power of two, and the exponent is added. */
INLINE void lookup_floats(char *to, const uint8_t *p, const tables *t)
{
    const uint8x16_t x = vld1q_u8(p), most = vdupq_n_u8(0x7f), magnitude = vandq_u8(x, most);
    const uint8x16_t index = vminq_u8(magnitude, vorrq_u8(vandq_u8(x, vdupq_n_u8(7)), vdupq_n_u8(8)));
    const uint8x16_t exponent = vsubq_u8(magnitude, index), nan = vceqq_u8(magnitude, most); /* in eighths */
    const uint8x16_t sign = vandq_u8(x, vdupq_n_u8(0x80));
    /* 0x78ff, and the exponent of 0x7f, which is 0x0700, are 0x7fff */
    const uint8x16_t lower = vorrq_u8(vqtbl1q_u8(t->byte[0], index), nan);
    const uint8x16_t upper = veorq_u8(vbslq_u8(nan, vdupq_n_u8(0x78), vqtbl1q_u8(t->byte[1], index)), sign);
    uint16_t *words = (uint16_t *)(void *)to;
    vst1q_u16(words, vaddq_u16(vreinterpretq_u16_u8(vzip1q_u8(lower, upper)), vshll_n_u8(vget_low_u8(exponent), 4)));
    vst1q_u16(words + 8, vaddq_u16(vreinterpretq_u16_u8(vzip2q_u8(lower, upper)), vshll_high_n_u8(exponent, 4)));
}

INLINE void decode_bytes(const int dtype, const bool regular, const int32_t code, char *to, const uint8_t *p, int64_t n,
                         const group *g)
{
    float32x4_t v[4];
    if (code == FMOE_CODE_E4M3 && dtype == FMOE_BF16 && regular && n >= 16) {
        for (int i = 0; i < 4; i++) v[i] = scaled(code, g, vld1q_f32(fmoe_e4m3_magnitudes() + 4 * i));
        const tables t = tables_of(dtype, true, v);
        for (; n >= 16; n -= 16, p += 16, to += 32) lookup_floats(to, p, &t);
    }
    for (; n >= 16; n -= 16, p += 16, to += 16 * bytes_of(dtype)) {
        if (code == FMOE_CODE_S8) from_s8(v, p);
        else from_e4m3(v, p);
        for (int i = 0; i < 4; i++) v[i] = scaled(code, g, v[i]);
        put16(dtype, regular && code == FMOE_CODE_S8, to, v);
    }
    for (; n > 0; n--, p++, to += bytes_of(dtype)) {
        const float x = code == FMOE_CODE_S8 ? (float)(int8_t)*p : fmoe_e4m3_to_float(*p);
        put1(dtype, to, (x - g->zero) * g->scale * g->scale2);
    }
}

/* ---- rows ---- */

INLINE void decode_group(const int dtype, const bool regular, const fmoe_coded *m, char *to, const uint8_t *codes,
                         int64_t k, int64_t n, const group *g)
{
    if (m->code == FMOE_CODE_S8) decode_bytes(dtype, regular, FMOE_CODE_S8, to, codes + k, n, g);
    else if (m->code == FMOE_CODE_E4M3) decode_bytes(dtype, regular, FMOE_CODE_E4M3, to, codes + k, n, g);
    else decode_nibbles(dtype, regular, m, to, codes, k, n, g);
}

INLINE void decode_row(const int dtype, char *to, const fmoe_coded *m, int64_t row, int64_t k, int64_t n)
{
    const uint8_t *codes = m->codes + row * m->step;
    const int64_t group_row = fmoe_coded_group(m, row), last = k + n;
    int64_t column = k / m->group_cols, end = (column + 1) * m->group_cols;
    for (; k < last; column++, end += m->group_cols) {
        const int64_t length = fmoe_min(last, end) - k;
        const float scale = fmoe_coded_scale(m, group_row, column), size = scale < 0 ? -scale : scale;
        const group g = {scale, fmoe_coded_zero(m, group_row, column), m->scale2, m->scale2 == 1};
        if (dtype == FMOE_BF16 && m->regular && size > 0x1p-60f && size < 0x1p60f)
            decode_group(dtype, true, m, to, codes, k, length, &g);
        else decode_group(dtype, false, m, to, codes, k, length, &g);
        to += length * bytes_of(dtype);
        k += length;
    }
}

void NAME(fmoe_dequant)(void *dst, int64_t apart, int dtype, const fmoe_coded *m, int64_t row, int64_t rows, int64_t k0,
                        int64_t n)
{
    for (int64_t i = 0; i < rows; i++) {
        char *to = (char *)dst + i * apart;
        if (dtype == FMOE_BF16) decode_row(FMOE_BF16, to, m, row + i, k0, n);
        else if (dtype == FMOE_F16) decode_row(FMOE_F16, to, m, row + i, k0, n);
        else decode_row(FMOE_F32, to, m, row + i, k0, n);
    }
}
