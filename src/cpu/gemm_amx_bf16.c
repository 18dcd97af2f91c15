/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_amx_bf16.c - bf16 products on AMX tiles: 32 x 32 blocks of C in four tiles, two tiles of A and two of B a step.
 *
 * The panels of bf16 pairs are tiles of B as they lie. Rows of A are gathered, so they are first copied into tiles
 * (16 rows x 32 k, 1 KiB each, padded with zeros), 32 rows at a time. All tiles are full ones and k always goes in steps
 * of 32 from 0: a row's bits depend on K alone, not on its company. Up to 16 rows go as 16 x 64 blocks: there is no other
 * path for few rows, because the sums of vdpbf16ps differ, and loading tiles keeps up with memory by far.
 *
 * Tiles are configured on entry and released on return: the thread's tile state is left as the system likes it, and a
 * caller's own use of AMX is not disturbed. */
#include "cpu/amx.h"
#include "cpu/kernels.h"
#include "cpu/pack_avx512.h"
#include "util.h"

enum { A_BLOCK = 2, STEPS = FMOE_KC_PAIRS / TILE_K, B_STEP = TILE_K / 2 * FMOE_NB };

typedef struct a_tile {
    _Alignas(64) char bytes[TILE_BYTES];
} a_tile;

/* ---- A into tiles ---- */

/* Rows in memory: up to 16 of them, k [k0, k0+nk). */
static inline void copy_rows(char *tile, const void *const *a, int64_t rows, int64_t k0, int64_t nk)
{
    const __mmask32 m = nk >= TILE_K ? 0xffffffffu : (1u << nk) - 1u;
    for (int64_t i = 0; i < rows; i++)
        _mm512_store_si512(tile + 64 * i, _mm512_maskz_loadu_epi16(m, (const uint16_t *)a[i] + k0));
}

/* Columns of a packed panel, k [k0, k0+nk): pair p of row i at a[i] + p * step. Neighbours in the panel are transposed in
 * registers. Of the last pair of an odd k only the first half counts. */
static inline void copy_columns(char *tile, const void *const *a, int64_t rows, int64_t step, int64_t k0, int64_t nk)
{
    bool neighbours = rows == TILE_ROWS;
    for (int64_t i = 1; i < rows && neighbours; i++) neighbours = (const char *)a[i] == (const char *)a[0] + 4 * i;
    const int64_t at = k0 / 2 * step;
    if (neighbours) {
        __m512 r[16];
#pragma GCC unroll 16
        for (int p = 0; p < 16; p++) {
            const __mmask32 halves = 2 * p + 2 <= nk ? 0xffffffffu : 2 * p + 1 == nk ? 0x55555555u : 0;
            r[p] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(halves, (const char *)a[0] + at + p * step));
        }
        transpose16(r);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) _mm512_store_ps(tile + 64 * i, r[i]);
        return;
    }
    memset(tile, 0, TILE_BYTES);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t p = 0; 2 * p < nk && p < 16; p++)
            memcpy(tile + 64 * i + 4 * p, (const char *)a[i] + at + p * step, 2 * p + 1 == nk ? 2 : 4);
}

static void fill_tiles(a_tile *tiles, const void *const *a, int64_t rows, int64_t kc, int64_t a_step)
{
    const int64_t steps = fmoe_ceil_div(kc, TILE_K);
    for (int64_t s = 0; s < steps; s++) {
        if (rows < TILE_ROWS) memset(&tiles[s], 0, TILE_BYTES);
        if (a_step == 4) copy_rows(tiles[s].bytes, a, rows, s * TILE_K, kc - s * TILE_K);
        else copy_columns(tiles[s].bytes, a, rows, a_step, s * TILE_K, kc - s * TILE_K);
    }
}

/* ---- blocks of C ---- */

/* The panel, and where its last, incomplete step lies: a copy padded with zeros. */
typedef struct b_panel {
    const uint32_t *full, *last;
    int64_t steps, full_steps;
} b_panel;

static inline const uint32_t *b_step(const b_panel *b, int64_t s) { return s < b->full_steps ? b->full + s * B_STEP : b->last; }

/* A share of the lines to fetch. */
static inline void fetch_some(fmoe_fetch *next, int64_t n)
{
    for (; n > 0 && next->line < next->end; n--) _mm_prefetch(*next->line++, _MM_HINT_T1);
}

static void block_32x32(const a_tile *a, const b_panel *b, int64_t column, float *c, int64_t ldc, fmoe_fetch *next,
                        int64_t fetches)
{
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int64_t s = 0; s < b->steps; s++) {
        const uint32_t *bs = b_step(b, s) + column;
        tile_load(4, a[s].bytes, 64);
        tile_load(6, bs, 4 * FMOE_NB);
        tile_dot(0, 4, 6);
        tile_load(7, bs + 16, 4 * FMOE_NB);
        tile_dot(1, 4, 7);
        tile_load(5, a[STEPS + s].bytes, 64);
        tile_dot(2, 5, 6);
        tile_dot(3, 5, 7);
        fetch_some(next, fetches);
    }
    tile_store(0, c, 4 * ldc);
    tile_store(1, c + 16, 4 * ldc);
    tile_store(2, c + TILE_ROWS * ldc, 4 * ldc);
    tile_store(3, c + TILE_ROWS * ldc + 16, 4 * ldc);
}

static void block_16x64(const a_tile *a, const b_panel *b, float *c, int64_t ldc, fmoe_fetch *next, int64_t fetches)
{
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int64_t s = 0; s < b->steps; s++) {
        const uint32_t *bs = b_step(b, s);
        tile_load(4, a[s].bytes, 64);
        tile_load(5, bs, 4 * FMOE_NB);
        tile_dot(0, 4, 5);
        tile_load(6, bs + 16, 4 * FMOE_NB);
        tile_dot(1, 4, 6);
        tile_load(7, bs + 32, 4 * FMOE_NB);
        tile_dot(2, 4, 7);
        tile_load(5, bs + 48, 4 * FMOE_NB);
        tile_dot(3, 4, 5);
        fetch_some(next, 2 * fetches);
    }
    tile_store(0, c, 4 * ldc);
    tile_store(1, c + 16, 4 * ldc);
    tile_store(2, c + 32, 4 * ldc);
    tile_store(3, c + 48, 4 * ldc);
}

/* c[rows][64] = (first ? 0 : c) + sums. */
static void add_sums(float *c, int64_t ldc, const float *sums, int64_t rows, int first)
{
    for (int64_t i = 0; i < rows; i++)
        for (int j = 0; j < FMOE_NB; j += 16) {
            const __m512 sum = _mm512_load_ps(sums + i * FMOE_NB + j);
            float *to = c + i * ldc + j;
            _mm512_storeu_ps(to, first ? sum : _mm512_add_ps(_mm512_loadu_ps(to), sum));
        }
}

void fmoe_gemm_bf16_amx_bf16(int64_t rows, int64_t kc, const void *const *a, int64_t a_step, const void *panel, float *c,
                             int64_t ldc, int first, fmoe_fetch *next)
{
    a_tile tiles[A_BLOCK * STEPS];
    _Alignas(64) uint32_t last[B_STEP];
    _Alignas(64) float sums[A_BLOCK * TILE_ROWS * FMOE_NB];
    b_panel b = {.full = panel, .last = last, .steps = fmoe_ceil_div(kc, TILE_K), .full_steps = kc / TILE_K};
    if (b.full_steps < b.steps) {
        const size_t bytes = (size_t)((kc + 1) / 2 - b.full_steps * TILE_K / 2) * FMOE_NB * 4;
        memcpy(last, b.full + b.full_steps * B_STEP, bytes);
        memset((char *)last + bytes, 0, sizeof last - bytes);
    }
    const int64_t turns = 2 * b.steps * fmoe_ceil_div(rows, A_BLOCK * TILE_ROWS); /* steps of all blocks */
    const int64_t fetches = turns ? fmoe_ceil_div(next->end - next->line, turns) : 0;
    tile_configure();
    while (rows > 0) {
        const int64_t n = fmoe_min(rows, A_BLOCK * TILE_ROWS);
        const bool direct = first && n % TILE_ROWS == 0; /* whole tiles go where they belong */
        float *to = direct ? c : sums;
        const int64_t ld = direct ? ldc : FMOE_NB;
        fill_tiles(tiles, a, fmoe_min(n, TILE_ROWS), kc, a_step);
        if (n > TILE_ROWS) {
            fill_tiles(tiles + STEPS, a + TILE_ROWS, n - TILE_ROWS, kc, a_step);
            block_32x32(tiles, &b, 0, to, ld, next, fetches);
            block_32x32(tiles, &b, 32, to + 32, ld, next, fetches);
        } else {
            block_16x64(tiles, &b, to, ld, next, fetches);
        }
        if (!direct) add_sums(c, ldc, sums, n, first);
        rows -= n;
        a += n;
        c += n * ldc;
    }
    tile_release();
}

/* Four chains of tile products, no loads. */
double fmoe_peak_bf16_amx_bf16(int64_t rounds)
{
    tile_configure();
    for (int64_t r = 0; r < rounds; r++) {
        tile_dot(0, 4, 6);
        tile_dot(1, 4, 7);
        tile_dot(2, 5, 6);
        tile_dot(3, 5, 7);
    }
    tile_release();
    return (double)rounds * 4 * 2 * TILE_ROWS * TILE_ROWS * TILE_K;
}
