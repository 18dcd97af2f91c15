// SPDX-License-Identifier: Apache-2.0
// epilogue_dglu.cuh - the backward of the activation as an epilogue of gemm_rows.cuh's kernel.
#pragma once
#include "cuda/act.cuh"
#include "config.cuh"

// da goes from the consumers to the epilogue in 16 bits: f16, each row times a power of two that brings its largest
// number to 2^14. Rounding to bf16 here was 15 % of the error of dx, dW1 and dp; this is an eighth of that, and what is
// 2^-28 of the row's largest is lost. Infinities and NaNs stay what they are.
template <class C> DEV void hand_over(const float (&v)[C::BN / 2], uint32_t staging, uint32_t factors, int lane)
{
    float scale[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float top = 0;
#pragma unroll
        for (int i = 2 * h; i < C::BN / 2; i += 4) top = fmaxf(top, fmaxf(fabsf(v[i]), fabsf(v[i + 1])));
        if (__any_sync(~0u, top == INFINITY)) {
            top = 0;
#pragma unroll
            for (int i = 2 * h; i < C::BN / 2; i += 4)
#pragma unroll
                for (int q = 0; q < 2; q++) top = fabsf(v[i + q]) < INFINITY ? fmaxf(top, fabsf(v[i + q])) : top;
        }
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const int exponent = min(253, max(1, 268 - (int)(__float_as_uint(top) >> 23)));
        scale[h] = __uint_as_float((uint32_t)exponent << 23);
        if (lane % 4 == 0)
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(factors + 4 * (lane / 4 + 8 * h)),
                         "f"(__uint_as_float((uint32_t)(254 - exponent) << 23))
                         : "memory");
    }
#pragma unroll
    for (int c = 0; c < C::BN / 64; c++)
        store_words(staging + c * 2048, lane, [&](int j, int h) {
            const int i = 32 * c + 4 * j + 2 * h;
            return pack2<f16>(v[i] * scale[h], v[i + 1] * scale[h]);
        });
}

// Epilogue warpgroup of the fused backward: from da (handed over in shared memory) and h. Warp w takes the 16
// rows of warp w of each consumer, 64 columns of a row as 8 lanes of 16 bytes: whole 128-byte lines. PAIRS: gate and up
// of a feature are neighbours in h and dh.
template <class C, int KIND, bool PAIRS>
DEV void epilogue_dglu(const Sm90Args &p, Ring ring, uint32_t tile_full, uint32_t tile_empty)
{
    typedef typename C::T T;
    const int warp = warp_index() % 4, lane = threadIdx.x % 32, lr = lane / 8, lc = (lane & 7) * 8;
    const bool gated = PAIRS || KIND == FAST_SWIGLU || p.gated;
    // Elements from a thread's first 16 bytes to its others.
    const size_t pitch = gated ? 2 * (size_t)p.N : p.N, second = PAIRS ? 8 : p.N;
    constexpr int STEP = PAIRS ? 2 : 1;
    const uint32_t ones = pack2<T>(1.f, 1.f);
    const uint4 one = {ones, ones, ones, ones};
    const T *h = (const T *)p.h_in;
    T *dh = (T *)p.dh, *pa = (T *)p.pa;
    Scheduler<C> sched(p);
    Tile t;
    uint32_t taken = 0; // a bit a consumer: arrays would not stay in registers
    while (sched.next(t)) {
        uint4 hg[4], hu[4];
#pragma unroll
        for (int i = 0; i < 4; i++) hu[i] = one; // ungated: F(h) * 1
        auto load_h = [&](int wg, int c) {
            if (t.n0 + 64 * c + lc >= p.N) return;
            const T *q = h + (size_t)(t.row0 + wg * 64 + warp * 16 + lr) * pitch + STEP * (t.n0 + 64 * c + lc);
#pragma unroll
            for (int i = 0; i < 4; i++, q += 4 * pitch) {
                hg[i] = __ldcs((const uint4 *)q);
                if (gated) hu[i] = __ldcs((const uint4 *)(q + second));
            }
        };
        const int mine = !t.live ? 0 : (t.row0 + warp * 16 < t.end) + 2 * (t.row0 + 64 + warp * 16 < t.end);
        if (mine & 1) load_h(0, 0);
#pragma unroll
        for (int wg = 0; wg < 2; wg++) {
            if (!(mine >> wg & 1)) continue;
            const int b = wg * 4 + warp, row = t.row0 + wg * 64 + warp * 16;
            const uint32_t d = ring.base + C::STAGING_AT + b * C::STAGING;
            float prob[4], factor[4], dot[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < 4; i++) prob[i] = p.prob[row + 4 * i + lr];
            mbar_wait(tile_full + 8 * b, taken >> wg & 1);
            taken ^= 1u << wg;
#pragma unroll
            for (int i = 0; i < 4; i++)
                asm volatile("ld.shared.f32 %0, [%1];"
                             : "=f"(factor[i])
                             : "r"(ring.base + C::FACTORS + b * 64 + 4 * (4 * i + lr))
                             : "memory");
#pragma unroll 1 // otherwise more instructions than their cache holds: dh took up to 1.6 times as long
            for (int c = 0; c < C::BN / 64; c++) {
                if (t.n0 + 64 * c >= p.N) break;
                const bool inside = t.n0 + 64 * c + lc < p.N;
                uint4 g4[4], u4[4];
#pragma unroll
                for (int i = 0; i < 4; i++) g4[i] = hg[i], u4[i] = hu[i];
                if (c + 1 < C::BN / 64 && t.n0 + 64 * (c + 1) < p.N) load_h(wg, c + 1);
                else if (wg == 0 && mine & 2) load_h(1, 0);
                if (!inside) continue;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const uint4 X = load_shared16(row_address(d + c * 2048, i, lane));
                    const uint32_t *xp = &X.x, *gp = &g4[i].x, *up = &u4[i].x;
                    const size_t r = row + 4 * i + lr;
                    T *const o = dh + r * pitch + STEP * (t.n0 + 64 * c + lc);
                    uint4 og, ou, oa;
                    uint32_t *ogp = &og.x, *oup = &ou.x, *oap = &oa.x;
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const float2 x = unpack2<f16>(xp[j]);
                        float2 g, u; // of two features
                        if (PAIRS) {
                            const float2 a = unpack2<T>(j < 2 ? gp[2 * j] : up[2 * j - 4]),
                                         b = unpack2<T>(j < 2 ? gp[2 * j + 1] : up[2 * j - 3]);
                            g = {a.x, b.x}, u = {a.y, b.y};
                        } else g = unpack2<T>(gp[j]), u = unpack2<T>(up[j]);
                        const Slopes v = slopes<KIND>(p.act, x.x * factor[i], prob[i], g.x, u.x),
                                     w = slopes<KIND>(p.act, x.y * factor[i], prob[i], g.y, u.y);
                        dot[i] += v.dp + w.dp;
                        oap[j] = pack2<T>(v.pa, w.pa);
                        if (PAIRS) {
                            ogp[j % 2 * 2] = pack2<T>(v.gate, v.up), ogp[j % 2 * 2 + 1] = pack2<T>(w.gate, w.up);
                            if (j % 2) store_global16(o + j / 2 * 8, og);
                        } else ogp[j] = pack2<T>(v.gate, w.gate), oup[j] = pack2<T>(v.up, w.up);
                    }
                    store_global16(pa + r * p.N + t.n0 + 64 * c + lc, oa);
                    if (PAIRS) continue;
                    store_global16(o, og);
                    if (gated) store_global16(o + second, ou);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                dot[i] += __shfl_xor_sync(~0u, dot[i], 1);
                dot[i] += __shfl_xor_sync(~0u, dot[i], 2);
                dot[i] += __shfl_xor_sync(~0u, dot[i], 4);
                if ((lane & 7) == 0) p.dp[(size_t)(t.n0 / C::BN) * p.dp_pitch + row + 4 * i + lr] = dot[i];
            }
            __syncwarp();
            if (lane == 0) mbar_arrive(tile_empty + 8 * b);
        }
    }
}
