// SPDX-License-Identifier: Apache-2.0
// coded_values.cuh - launch parameters of the kernels of coded.cuh, and codes in registers to pairs of f16.
#pragma once
#include "cuda/quant/values.cuh"
#include "stream.cuh"

// What may be varied.
static constexpr int CODED_WARPS = 16,    // of a block, one a multiprocessor,
    CODED_WARPS_ONE = 8,                  // and of one token: so the next launch fits beside it
    CODED_STEPS = 4,                      // 16 bytes of two rows that a lane has on their way,
    CODED_STEPS_ONE = 3,                  // and where every lane has its own scale, for want of registers;
    CODED_STEPS_TWO = 2,                  // or two
    CODED_TOKENS = 8;                     // of a batch: one expert's, that are multiplied at once
static constexpr float CODED_HALF = 1.2f; // time of eight rows, of that of 16 halved

// ---- The launch ----

struct CodedShape {
    int team, teams; // warps of a team, teams of a block
    int most;        // tokens of a batch: 1, 2, 4 or 8
    int chunks;      // of a row: 64 bytes
    int steps;       // chunks of a warp, at most
    int columns;     // of a block of down, at most
};
struct CodedFew {
    CodedMatrix m;        // the table multiplied by 1 / unit, which f16 can have
    int shift, row_shift; // 2^shift neighbours of a row, 2^row_shift rows have one scale; row_shift -1: no power of 2
    float unit;
    // 1024 and 1024 in f16, less what the codes' signs take. Were it a constant of the code, ptxas would make two
    // instructions of an AND and an OR with constants.
    uint32_t exponent;
    CodedShape s;
};

// ---- Codes: 16 bytes of a lane are PIECES times eight values of its row, four registers ----

DEV uint32_t half2_of(float a, float b) { return pack2<f16>(a, b); }
DEV uint32_t add2(uint32_t a, uint32_t b)
{
    const __half2 v = __hadd2(*(const __half2 *)&a, *(const __half2 *)&b);
    return *(const uint32_t *)&v;
}
DEV uint32_t fma2(uint32_t a, uint32_t b, uint32_t c)
{
    const __half2 v = __hfma2(*(const __half2 *)&a, *(const __half2 *)&b, *(const __half2 *)&c);
    return *(const uint32_t *)&v;
}

// In which order a piece has its eight elements, as pairs.
enum PairOrder { NEXT, TWO_APART, FOUR_APART };

// Any 16 values: a byte of two codes is worth the two of a table in shared memory, which every lane has a copy of. The
// address is one byte permutation: entries lie 256 bytes apart.
struct TableCodes {
    static constexpr int BITS = 4, PIECES = 4, TABLE = 65536;
    static constexpr PairOrder ORDER = NEXT;
    const char *table;
    uint32_t lane;
    DEV TableCodes(const CodedFew &, const char *shared) : table(shared), lane(threadIdx.x % 32 * 4) {}
    static DEV void prepare(const CodedMatrix &m, char *shared)
    {
        for (int i = threadIdx.x; i < 256 * 32; i += blockDim.x) {
            const int b = i / 32, low = b & 15, high = b >> 4;
            *(uint32_t *)(shared + b * 256 + i % 32 * 4) =
                half2_of(m.table[m.high_first ? high : low], m.table[m.high_first ? low : high]);
        }
    }
    DEV void piece(const uint4 &w, int p, uint32_t (&v)[4]) const
    {
        const uint32_t of = p == 0 ? w.x : p == 1 ? w.y : p == 2 ? w.z : w.w;
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = *(const uint32_t *)(table + __byte_perm(of, lane, 0x5504u + 16u * (uint32_t)i));
    }
};

// Integers of 4 bits less a whole zero point: 1024 + n, or 1024 + 16 n, is the code itself in f16's last bits.
struct IntegerCodes {
    static constexpr int BITS = 4, PIECES = 4, TABLE = 0;
    static constexpr PairOrder ORDER = FOUR_APART;
    static constexpr uint32_t EXPONENT = 0x64006400;
    uint32_t low, high, exponent; // low and high are added
    DEV IntegerCodes(const CodedFew &f, const char *)
        : low(half2_of(f.m.table[0] - 1024.f, f.m.table[0] - 1024.f)),
          high(half2_of(f.m.table[0] - 64.f, f.m.table[0] - 64.f)), exponent(f.exponent)
    {
    }
    static DEV void prepare(const CodedMatrix &, char *) {}
    DEV void piece(const uint4 &w, int p, uint32_t (&v)[4]) const
    {
        const uint32_t of = p == 0 ? w.x : p == 1 ? w.y : p == 2 ? w.z : w.w, next = of >> 8;
        v[0] = add2((of & 0x000f000fu) | exponent, low);
        v[1] = fma2((of & 0x00f000f0u) | exponent, 0x2c002c00u, high); // 1 / 16
        v[2] = add2((next & 0x000f000fu) | exponent, low);
        v[3] = fma2((next & 0x00f000f0u) | exponent, 0x2c002c00u, high);
    }
};

struct Fp8Codes {
    static constexpr int BITS = 8, PIECES = 2, TABLE = 0;
    static constexpr PairOrder ORDER = NEXT;
    DEV Fp8Codes(const CodedFew &, const char *) {}
    static DEV void prepare(const CodedMatrix &, char *) {}
    static DEV uint32_t pair(uint16_t w)
    {
#if __CUDA_ARCH__ >= 890
        const __half2_raw v = __nv_cvt_fp8x2_to_halfraw2(w, __NV_E4M3);
        return *(const uint32_t *)&v;
#else
        const float2 v = e4m3_pair(w);
        return half2_of(v.x, v.y);
#endif
    }
    DEV void piece(const uint4 &w, int p, uint32_t (&v)[4]) const
    {
        const uint32_t first = p ? w.z : w.x, second = p ? w.w : w.y;
        v[0] = pair((uint16_t)first), v[1] = pair((uint16_t)(first >> 16));
        v[2] = pair((uint16_t)second), v[3] = pair((uint16_t)(second >> 16));
    }
};

struct Int8Codes {
    static constexpr int BITS = 8, PIECES = 2, TABLE = 0;
    static constexpr PairOrder ORDER = TWO_APART;
    static constexpr uint32_t EXPONENT = 0x64806480;
    uint32_t exponent;
    DEV Int8Codes(const CodedFew &f, const char *) : exponent(f.exponent) {}
    static DEV void prepare(const CodedMatrix &, char *) {}
    DEV uint32_t pair(uint32_t w) const // 1024 + 128 + code, less 1152
    {
        return add2((w & 0x00ff00ffu) ^ exponent, 0xe480e480u);
    }
    DEV void piece(const uint4 &w, int p, uint32_t (&v)[4]) const
    {
        const uint32_t first = p ? w.z : w.x, second = p ? w.w : w.y;
        v[0] = pair(first), v[1] = pair(first >> 8);
        v[2] = pair(second), v[3] = pair(second >> 8);
    }
};
