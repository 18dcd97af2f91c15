/* SPDX-License-Identifier: Apache-2.0
 *
 * amx.h - the six tile operations the AMX kernels are made of, on the CPU or, with FMOE_AMX_EMULATE (a test build), in
 * software: the same code is then checked on any AVX-512 machine.
 *
 * A tile is up to 16 rows of 64 bytes. tile_dot(c, a, b) takes a: 16 rows of 32 bf16, b: 16 pairs of k, each 16 columns
 * of two bf16, and adds a . b to c, 16 x 16 f32. Its sums, by Intel's manual and confirmed bit by bit on a Xeon: for
 * each element, the even k and the odd k are two chains of FMAs from zero; then even + odd; then c + that. Each step
 * rounds to nearest even, denormals are zero on the way in and out, MXCSR is not asked. Exchanging a and b changes no
 * bit. */
#ifndef FMOE_AMX_H
#define FMOE_AMX_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { TILE_ROWS = 16, TILE_K = 32, TILE_BYTES = 1024 };

typedef struct tile {
    _Alignas(64) char bytes[TILE_BYTES];
} tile;

/* The first n of a step's 32 k. */
static inline __mmask32 first_k(int64_t n) { return n >= TILE_K ? 0xffffffffu : (1u << n) - 1u; }

/* What LDTILECFG reads: palette 1, eight tiles of up to 16 rows of 64 bytes. */
typedef struct amx_shape {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} amx_shape;

/* Tile i: rows[i] of columns[i] units of 32 bits. */
static inline amx_shape amx_shape_of(const uint8_t rows[8], const uint8_t columns[8])
{
    amx_shape s = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        s.rows[i] = rows[i];
        s.row_bytes[i] = rows[i] ? 4 * columns[i] : 0;
    }
    return s;
}

static const uint8_t tiles_whole[8] = {16, 16, 16, 16, 16, 16, 16, 16};

/* c + a . b in software, for the first `rows` rows of c and a. FMAs of AVX-512 with flush-to-zero and
 * denormals-are-zero round as the tile unit does. */
static inline void amx_emulated_dot(int rows, float *c, const uint32_t *a, const uint32_t *b)
{
    const unsigned callers = _mm_getcsr();
    _mm_setcsr(0x9fc0); /* FTZ, DAZ, nearest even, no exceptions */
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    for (int m = 0; m < rows; m++, c += 16, a += 16) {
        __m512 even = _mm512_setzero_ps(), odd = even;
        for (int k = 0; k < 16; k++) {
            const __m512i pair = _mm512_set1_epi32((int)a[k]), column = _mm512_loadu_si512(b + 16 * k);
            even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)),
                                   _mm512_castsi512_ps(_mm512_slli_epi32(column, 16)), even);
            odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(pair, upper)),
                                  _mm512_castsi512_ps(_mm512_and_si512(column, upper)), odd);
        }
        _mm512_storeu_ps(c, _mm512_add_ps(_mm512_loadu_ps(c), _mm512_add_ps(even, odd)));
    }
    _mm_setcsr(callers);
}

#ifndef FMOE_AMX_EMULATE

/* Tiles are named in the instruction, so these are macros. "memory": what was written before a load must be there. */
#define tile_load(t, p, stride)                                                                                        \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(p), "r"((int64_t)(stride)) : "memory")
#define tile_store(t, p, stride)                                                                                       \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(p), "r"((int64_t)(stride)) : "memory")
#define tile_zero(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define tile_dot(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
static inline void tile_configure(const uint8_t rows[8], const uint8_t columns[8]) /* and all of them to zero */
{
    const amx_shape shape = amx_shape_of(rows, columns);
    __asm__ volatile("ldtilecfg %0" : : "m"(shape));
}
static inline void tile_release(void) { __asm__ volatile("tilerelease" : :); }

#else

/* The tile file of this thread. What is an illegal instruction on the CPU, a tile without a shape or shapes that do not
 * fit, traps here as there. */
static _Thread_local struct {
    amx_shape shape;
    uint32_t tile[8][16 * 16];
} amx_state;

static inline int amx_rows(int t)
{
    if (amx_state.shape.palette != 1 || amx_state.shape.rows[t] == 0 || amx_state.shape.rows[t] > 16) __builtin_trap();
    return amx_state.shape.rows[t];
}

static inline void tile_configure(const uint8_t rows[8], const uint8_t columns[8])
{
    memset(&amx_state, 0, sizeof amx_state);
    amx_state.shape = amx_shape_of(rows, columns);
}
static inline void tile_release(void) { memset(&amx_state, 0, sizeof amx_state); }
static inline void tile_zero(int t)
{
    amx_rows(t);
    memset(amx_state.tile[t], 0, TILE_BYTES);
}
static inline void tile_load(int t, const void *p, int64_t stride)
{
    const int rows = amx_rows(t);
    memset(amx_state.tile[t], 0, TILE_BYTES);
    for (int i = 0; i < rows; i++)
        memcpy(amx_state.tile[t] + 16 * i, (const char *)p + i * stride, amx_state.shape.row_bytes[t]);
}
static inline void tile_store(int t, void *p, int64_t stride)
{
    for (int i = 0; i < amx_rows(t); i++)
        memcpy((char *)p + i * stride, amx_state.tile[t] + 16 * i, amx_state.shape.row_bytes[t]);
}
static inline void tile_dot(int c, int a, int b)
{
    const uint16_t *bytes = amx_state.shape.row_bytes;
    if (amx_rows(c) != amx_rows(a) || amx_rows(b) != 16 || bytes[a] != 64 || bytes[c] != bytes[b]) __builtin_trap();
    if (c == a || c == b || a == b) __builtin_trap();
    float sums[16 * 16];
    memcpy(sums, amx_state.tile[c], sizeof sums);
    amx_emulated_dot(amx_rows(c), sums, amx_state.tile[a], amx_state.tile[b]);
    memcpy(amx_state.tile[c], sums, sizeof sums);
}

#endif
#endif
