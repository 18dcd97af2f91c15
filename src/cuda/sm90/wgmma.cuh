// SPDX-License-Identifier: Apache-2.0
// wgmma.cuh - m64nNk16, both operands in shared memory, f32 accumulators. TA, TB = 1 for an operand whose contiguous
// dimension is not k.
#pragma once
#include "ptx.cuh"

#include <type_traits>

// Shared memory matrix descriptors, 128-byte swizzle, tile base aligned to 1024 bytes.
// k contiguous: rows of 64 elements (128 B), 8 rows 1024 B apart (SBO), LBO unused; next k16 is 32 B on.
DEV uint64_t descriptor_k(uint32_t a)
{
    return (uint64_t)((a & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
// mn contiguous: k rows of 64 mn (128 B), 8 k 1024 B apart (SBO), next 64 mn 8192 B on (LBO); next k16 is 2048 B on.
DEV uint64_t descriptor_mn(uint32_t a)
{
    return (uint64_t)((a & 0x3ffff) >> 4) | (512ull << 16) | (64ull << 32) | (1ull << 62);
}

DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEV void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
template <int N> DEV void wgmma_pin(float *v) // accumulators are not read before this point
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(v[i])::"memory");
}

// clang-format off
#define WG_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WG_F8(i) WG_F4(i), WG_F4(i + 4)
#define WG_F16(i) WG_F8(i), WG_F8(i + 8)
#define WG_F32(i) WG_F16(i), WG_F16(i + 16)
#define WG_F64(i) WG_F32(i), WG_F32(i + 32)
#define WG_R8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WG_R16 WG_R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WG_R24 WG_R16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define WG_R32 WG_R24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define WG_R40 WG_R32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WG_R48 WG_R40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WG_R56 WG_R48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define WG_R64 WG_R56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define WG_R72 WG_R64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define WG_R80 WG_R72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define WG_R96 WG_R72 ",%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WG_R112 WG_R96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define WG_R128 WG_R112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WG_ASM(n, type, regs, a, b, p, ta, tb, ...)                                                   \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #p ", 0;\n"                                         \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" regs "}, %" #a   \
                 ", %" #b ", p, 1, 1, %" #ta ", %" #tb ";}" : __VA_ARGS__                              \
                 : "l"(desc_a), "l"(desc_b), "r"(accumulate), "n"(TA), "n"(TB))
#define WG_ASM_A(n, type, regs, a0, a1, a2, a3, b, p, ...)                                            \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #p ", 0;\n"                                         \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" regs "}, {%" #a0 \
                 ",%" #a1 ",%" #a2 ",%" #a3 "}, %" #b ", p, 1, 1, 0;}" : __VA_ARGS__                   \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "r"(accumulate))
// clang-format on

// N from 16 to 144 in steps of 16, 160, 192, 224 and 256.
template <class T, int N, int TA, int TB> DEV void wgmma(float *d, uint64_t desc_a, uint64_t desc_b, int accumulate)
{
    constexpr bool BF = std::is_same_v<T, bf16>;
    if constexpr (N == 16 && BF) WG_ASM(16, "bf16", WG_R8, 8, 9, 10, 11, 12, WG_F8(0));
    if constexpr (N == 16 && !BF) WG_ASM(16, "f16", WG_R8, 8, 9, 10, 11, 12, WG_F8(0));
    if constexpr (N == 32 && BF) WG_ASM(32, "bf16", WG_R16, 16, 17, 18, 19, 20, WG_F16(0));
    if constexpr (N == 32 && !BF) WG_ASM(32, "f16", WG_R16, 16, 17, 18, 19, 20, WG_F16(0));
    if constexpr (N == 48 && BF) WG_ASM(48, "bf16", WG_R24, 24, 25, 26, 27, 28, WG_F16(0), WG_F8(16));
    if constexpr (N == 48 && !BF) WG_ASM(48, "f16", WG_R24, 24, 25, 26, 27, 28, WG_F16(0), WG_F8(16));
    if constexpr (N == 64 && BF) WG_ASM(64, "bf16", WG_R32, 32, 33, 34, 35, 36, WG_F32(0));
    if constexpr (N == 64 && !BF) WG_ASM(64, "f16", WG_R32, 32, 33, 34, 35, 36, WG_F32(0));
    if constexpr (N == 80 && BF) WG_ASM(80, "bf16", WG_R40, 40, 41, 42, 43, 44, WG_F32(0), WG_F8(32));
    if constexpr (N == 80 && !BF) WG_ASM(80, "f16", WG_R40, 40, 41, 42, 43, 44, WG_F32(0), WG_F8(32));
    if constexpr (N == 96 && BF) WG_ASM(96, "bf16", WG_R48, 48, 49, 50, 51, 52, WG_F32(0), WG_F16(32));
    if constexpr (N == 96 && !BF) WG_ASM(96, "f16", WG_R48, 48, 49, 50, 51, 52, WG_F32(0), WG_F16(32));
    if constexpr (N == 112 && BF) WG_ASM(112, "bf16", WG_R56, 56, 57, 58, 59, 60, WG_F32(0), WG_F16(32), WG_F8(48));
    if constexpr (N == 112 && !BF) WG_ASM(112, "f16", WG_R56, 56, 57, 58, 59, 60, WG_F32(0), WG_F16(32), WG_F8(48));
    if constexpr (N == 128 && BF) WG_ASM(128, "bf16", WG_R64, 64, 65, 66, 67, 68, WG_F64(0));
    if constexpr (N == 128 && !BF) WG_ASM(128, "f16", WG_R64, 64, 65, 66, 67, 68, WG_F64(0));
    if constexpr (N == 144 && BF) WG_ASM(144, "bf16", WG_R72, 72, 73, 74, 75, 76, WG_F64(0), WG_F8(64));
    if constexpr (N == 144 && !BF) WG_ASM(144, "f16", WG_R72, 72, 73, 74, 75, 76, WG_F64(0), WG_F8(64));
    if constexpr (N == 160 && BF) WG_ASM(160, "bf16", WG_R80, 80, 81, 82, 83, 84, WG_F64(0), WG_F16(64));
    if constexpr (N == 160 && !BF) WG_ASM(160, "f16", WG_R80, 80, 81, 82, 83, 84, WG_F64(0), WG_F16(64));
    if constexpr (N == 192 && BF) WG_ASM(192, "bf16", WG_R96, 96, 97, 98, 99, 100, WG_F64(0), WG_F32(64));
    if constexpr (N == 192 && !BF) WG_ASM(192, "f16", WG_R96, 96, 97, 98, 99, 100, WG_F64(0), WG_F32(64));
    if constexpr (N == 224 && BF)
        WG_ASM(224, "bf16", WG_R112, 112, 113, 114, 115, 116, WG_F64(0), WG_F32(64), WG_F16(96));
    if constexpr (N == 224 && !BF)
        WG_ASM(224, "f16", WG_R112, 112, 113, 114, 115, 116, WG_F64(0), WG_F32(64), WG_F16(96));
    if constexpr (N == 256 && BF) WG_ASM(256, "bf16", WG_R128, 128, 129, 130, 131, 132, WG_F64(0), WG_F64(64));
    if constexpr (N == 256 && !BF) WG_ASM(256, "f16", WG_R128, 128, 129, 130, 131, 132, WG_F64(0), WG_F64(64));
    static_assert((N % 32 == 0 && N <= 256) || (N % 16 == 0 && N >= 16 && N <= 144),
                  "a width that is not written down");
}

// The same with A in registers, bf16: of rows l / 4 and l / 4 + 8 of its warp's 16, lane l has k 2 (l % 4), + 1 in a[0]
// and a[1], + 8, + 9 in a[2] and a[3]. N from 32 to 256 in steps of 32; tokens with k contiguous.
template <int N> DEV void wgmma_a(float *d, const uint32_t (&a)[4], uint64_t desc_b, int accumulate)
{
    if constexpr (N == 32) WG_ASM_A(32, "bf16", WG_R16, 16, 17, 18, 19, 20, 21, WG_F16(0));
    if constexpr (N == 64) WG_ASM_A(64, "bf16", WG_R32, 32, 33, 34, 35, 36, 37, WG_F32(0));
    if constexpr (N == 96) WG_ASM_A(96, "bf16", WG_R48, 48, 49, 50, 51, 52, 53, WG_F32(0), WG_F16(32));
    if constexpr (N == 128) WG_ASM_A(128, "bf16", WG_R64, 64, 65, 66, 67, 68, 69, WG_F64(0));
    if constexpr (N == 160) WG_ASM_A(160, "bf16", WG_R80, 80, 81, 82, 83, 84, 85, WG_F64(0), WG_F16(64));
    if constexpr (N == 192) WG_ASM_A(192, "bf16", WG_R96, 96, 97, 98, 99, 100, 101, WG_F64(0), WG_F32(64));
    if constexpr (N == 224)
        WG_ASM_A(224, "bf16", WG_R112, 112, 113, 114, 115, 116, 117, WG_F64(0), WG_F32(64), WG_F16(96));
    if constexpr (N == 256) WG_ASM_A(256, "bf16", WG_R128, 128, 129, 130, 131, 132, 133, WG_F64(0), WG_F64(64));
    static_assert(N % 32 == 0 && N >= 32 && N <= 256, "a width that is not written down");
}
