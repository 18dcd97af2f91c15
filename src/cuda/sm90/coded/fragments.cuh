// SPDX-License-Identifier: Apache-2.0
// fragments.cuh - codes in shared memory to what wgmma takes from registers (gemm_coded.cuh).
#pragma once
#include "cuda/quant/values.cuh"
#include "cuda/sm90/ptx.cuh"
#include "inside.cuh"

DEV void ldmatrix4_t(uint32_t a, uint32_t (&r)[4])
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a)
                 : "memory");
}
DEV uint32_t shared_word(uint32_t at)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}
DEV void put_word(uint32_t at, uint32_t v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
DEV float2 shared_pair(uint32_t at)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at));
    return v;
}
DEV float shared_float(uint32_t at)
{
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at));
    return v;
}
DEV uint32_t shared_two(uint32_t at)
{
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return v;
}

// Of lane l of a warp: the rows g = l / 4 and g + 8 of its 16, and k 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of each 16, t = l %
// 4 (wgmma_a). Which of a warpgroup's 64 features row g is; row g + 8 is eight further, or (TURNED) the next one.
template <class C> DEV int coded_feature(int warp, int g)
{
    if (!C::TURNED) return warp * 16 + g;
    return C::CODE == CODE_NIBBLES ? warp / 2 * 32 + g * 4 + warp % 2 * 2 : warp * 16 + g * 2;
}
// Two features of a row of 64 in a box of shared memory, swizzled by 128 bytes.
DEV int coded_word(int row, int feature) { return row * 128 + ((feature / 8 ^ (row & 7)) << 4) + feature % 8 * 2; }

template <class C> struct CodedFragments {
    const Sm90CodedArgs &a;
    const int sixteen, g, t; // which 16 features of the tile
    const float entry;       // CODE_NIBBLES: the table's value that this lane keeps for the others
    const int pick;          // load_k: which bytes of eight
    const int shift;         // bits to the first of two codes
    const int later;         // bytes to the scales of the second half of k; load_n: to this warp's
    float scale2 = 1;        // CODE_S8
    // Of 32 of k, from shared memory: what decode() needs.
    float2 scale[2][2];
    uint4 codes[2][2];
    DEV CodedFragments(const Sm90CodedArgs &args, int wg, int warp, int lane)
        : a(args), sixteen(wg * 4 + warp), g(lane / 4), t(lane % 4), entry(args.table[lane % 16]),
          pick(t | (4 + t) << 4), shift(args.high_first * 4 + (C::TURNED ? sixteen % 2 * 8 : 0)),
          later(C::TURNED ? sixteen >> (args.subs == 2 ? 1 : 2) << 8 : (args.subs - 1) * 512)
    {
    }
    DEV float value(uint32_t nibble) const
    {
        return __shfl_sync(~0u, entry, (int)nibble, 16);
    } // its upper bits do not count
    DEV float2 values(uint32_t two) const { return coded_pair<C::CODE>(two, a.zero); } // of two bytes
    DEV void expert(int e)
    {
        if (C::CODE == CODE_S8 && a.scale2) scale2 = a.scale2[e * a.scale2_g];
    }
    DEV float weight(float v, float s) const
    {
        v = __fmul_rn(v, s);
        return C::CODE == CODE_S8 ? __fmul_rn(v, scale2) : v;
    }
    DEV uint32_t weights(float2 v, float2 s) const { return pack2<bf16>(weight(v.x, s.x), weight(v.y, s.y)); }

    // Rows of codes run along k: [feature][64].
    DEV void load_k(uint32_t stage, int half)
    {
        const uint32_t scales = stage + C::SCALES + (half ? later : 0);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = sixteen * 16 + g + 8 * h;
            // Gates and ups take turns of 8 rows; their scales lie apart.
            scale[0][h].x = shared_float(scales + 4 * (C::UP ? 64 * h + sixteen * 8 + g : row));
            if constexpr (C::CODE == CODE_NIBBLES) {
                codes[0][h] = load_shared16(stage + row * 32 + half * 16);
            } else {
#pragma unroll
                for (int q = 0; q < 2; q++) { // swizzle of 64 bytes
                    const uint32_t at = stage + row * 64 + (((2 * half + q) ^ (g >> 1 & 3)) << 4) + 2 * t;
                    codes[q][h].x = shared_two(at), codes[q][h].y = shared_two(at + 8);
                }
            }
        }
    }
    DEV void decode_k(int q, uint32_t (&f)[4]) const
    {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float2 both = make_float2(scale[0][h].x, scale[0][h].x);
            if constexpr (C::CODE == CODE_NIBBLES) {
                const uint4 w = codes[0][h];
                const uint32_t b = q ? __byte_perm(w.z, w.w, pick) : __byte_perm(w.x, w.y, pick);
                const int low = shift, high = 4 - shift;
                f[h] = weights(make_float2(value(b >> low), value(b >> high)), both);
                f[2 + h] = weights(make_float2(value(b >> (8 + low)), value(b >> (8 + high))), both);
            } else {
                f[h] = weights(values(codes[q][h].x), both);
                f[2 + h] = weights(values(codes[q][h].y), both);
            }
        }
    }
    // Rows of codes run along features: [64 of k][feature]. ldmatrix turns them, two bytes of a row as one element: a
    // lane gets 2 t and 2 t + 1 of each 8 of k, of two bytes' features.
    DEV void load_n(uint32_t stage, int half)
    {
        const int k = 32 * half + threadIdx.x % 32;
        const uint32_t scales = stage + C::SCALES + later;
        if constexpr (C::CODE == CODE_NIBBLES) turned(stage + k * 64 + ((sixteen / 2 ^ (k >> 1 & 3)) << 4));
        else turned(stage + k * 128 + ((sixteen ^ (k & 7)) << 4));
#pragma unroll
        for (int q = 0; q < 2; q++)
#pragma unroll
            for (int h = 0; h < 2; h++) scale[q][h] = shared_pair(scales + 4 * ((2 * half + q) * 16 + 2 * t + 8 * h));
    }
    DEV void turned(uint32_t at)
    {
        uint32_t r[4];
        ldmatrix4_t(at, r);
        codes[0][0] = make_uint4(r[0], r[1], r[2], r[3]);
    }
    DEV void decode_n(int q, uint32_t (&f)[4]) const
    {
        const uint32_t w[2] = {q ? codes[0][0].z : codes[0][0].x, q ? codes[0][0].w : codes[0][0].y};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float2 now, next; // two features of k, and of k + 1
            if constexpr (C::CODE == CODE_NIBBLES) {
                now = make_float2(value(w[h] >> shift), value(w[h] >> (shift ^ 4)));
                next = make_float2(value(w[h] >> (shift + 16)), value(w[h] >> ((shift ^ 4) + 16)));
            } else {
                now = values(w[h]), next = values(w[h] >> 16);
            }
            f[2 * h] = weights(make_float2(now.x, next.x), scale[q][h]);
            f[2 * h + 1] = weights(make_float2(now.y, next.y), scale[q][h]);
        }
    }
    // Of a factor of an adapter that lies so, in 16 bits: [64 of k][64 features] of a warpgroup.
    DEV void factor_n(uint32_t box, int kk, uint32_t (&f)[4]) const
    {
        const int feature = coded_feature<C>(sixteen % 4, g);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int k = kk * 16 + 2 * t + 8 * h;
            const uint32_t now = shared_word(box + coded_word(k, feature)),
                           next = shared_word(box + coded_word(k + 1, feature));
            f[2 * h] = __byte_perm(now, next, 0x5410), f[2 * h + 1] = __byte_perm(now, next, 0x7632);
        }
    }
    DEV void load(uint32_t stage, int half)
    {
        if constexpr (C::TURNED) load_n(stage, half);
        else load_k(stage, half);
    }
    DEV void decode(uint32_t (&f)[2][4]) const
    {
#pragma unroll
        for (int q = 0; q < 2; q++)
            if constexpr (C::TURNED) decode_n(q, f[q]);
            else decode_k(q, f[q]);
    }
};
