/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_amx_bf16.c - bf16 products on AMX tiles: 32 x 32 blocks of C in four tiles, two tiles of A and two of B a step.
 *
 * The panels of bf16 pairs are tiles of B as they are, and so are rows of A that are equally far apart: nothing is
 * copied. (Copying gathered rows into tiles takes as long as multiplying them; experts gather once, before the
 * product.) Other rows, and the end of a K that is no multiple of 32, are copied and padded with zeros.
 *
 * k always goes in steps of 32 from 0, and rows have no part in one another's sums: a row's bits depend on K alone. Few
 * rows take tiles too (16 x 64 blocks): the sums of vdpbf16ps differ, and loading tiles is faster than memory.
 *
 * Tiles are configured on entry and released on return, 0.1 us: nothing of them is left in the thread. */
#include "cpu/kernels/kernels.h"
#include "cpu/kernels/vec.h"
#include "cpu/kernels/x86/amx.h"
#include "cpu/kernels/x86/pack_avx512.h"

enum { HALVES = 2, BLOCK_ROWS = HALVES * TILE_ROWS, STEPS = FMOE_KC_PAIRS / TILE_K, B_STEP = TILE_K / 2 * FMOE_NB };

/* ---- A ---- */

/* Up to 16 rows of A, k [k0, kc): pair p of row i at a[i] + p * a_step. Of the last pair of an odd kc only the first
 * half counts. Rows that are missing stay as they are: no product reads them. */
static void copy_tile(tile *to, const void *const *a, int64_t rows, int64_t a_step, int64_t k0, int64_t kc)
{
    const int64_t nk = fmoe_min(TILE_K, kc - k0);
    const __mmask32 m = first_k(nk);
    for (int64_t i = 0; i < rows; i++) {
        char *row = to->bytes + 64 * i;
        const char *from = (const char *)a[i] + k0 / 2 * a_step;
        if (a_step == 4) {
            _mm512_store_si512(row, _mm512_maskz_loadu_epi16(m, from));
            continue;
        }
        memset(row, 0, 64);
        for (int64_t p = 0; 2 * p < nk; p++) memcpy(row + 4 * p, from + p * a_step, 2 * p + 1 == nk ? 2 : 4);
    }
}

/* Up to 32 rows, the upper and the lower 16 apart: their tiles' rows are `stride` apart, and one tile is `step` after
 * the other. `copies` hold what is not read in place, at the least the incomplete last step. */
typedef struct a_block {
    const char *at[HALVES];
    int64_t stride[HALVES], step[HALVES];
    tile *copies; /* [HALVES][STEPS] */
} a_block;

static a_block a_block_of(const void *const *a, int64_t rows, int64_t kc, int64_t a_step, tile *copies)
{
    a_block b = {.copies = copies};
    for (int h = 0; h < HALVES && rows > 0; h++, a += TILE_ROWS, rows -= TILE_ROWS, copies += STEPS) {
        const char *const *row = (const char *const *)a;
        const int64_t n = fmoe_min(TILE_ROWS, rows), apart = n > 1 ? row[1] - row[0] : 64;
        bool in_place = a_step == 4;
        for (int64_t i = 2; in_place && i < n; i++) in_place = row[i] - row[i - 1] == apart;
        b.at[h] = in_place ? row[0] : copies->bytes;
        b.stride[h] = in_place ? apart : 64;
        b.step[h] = in_place ? 64 : TILE_BYTES;
        for (int64_t s = in_place ? kc / TILE_K : 0; s * TILE_K < kc; s++)
            copy_tile(copies + s, a, n, a_step, s * TILE_K, kc);
    }
    return b;
}

/* ---- blocks of C ---- */

/* The panel, and its last, incomplete step: a copy padded with zeros. */
typedef struct b_panel {
    const uint32_t *full, *last;
    int64_t steps, full_steps;
} b_panel;

/* What overlaps, so much at each step: the vector units have nothing else to do. */
typedef struct overlap_share {
    fmoe_overlap *overlap;
    int64_t pieces, lines;
} overlap_share;

static inline void overlap_step(const overlap_share *w, int times)
{
    fmoe_prefetch(&w->overlap->prefetch, times * w->lines);
    for (int64_t i = 0; i < times * w->pieces && w->overlap->pack.left > 0; i++) piece_pairs(w->overlap);
}

static inline void zero_c(void)
{
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
}

static inline void step_32x32(const char *a0, int64_t s0, const char *a1, int64_t s1, const uint32_t *b)
{
    tile_load(4, a0, s0);
    tile_load(6, b, 4 * FMOE_NB);
    tile_dot(0, 4, 6);
    tile_load(7, b + 16, 4 * FMOE_NB);
    tile_dot(1, 4, 7);
    tile_load(5, a1, s1);
    tile_dot(2, 5, 6);
    tile_dot(3, 5, 7);
}

static void block_32x32(const a_block *a, const b_panel *b, int64_t column, float *c, int64_t ldc,
                        const overlap_share *w)
{
    zero_c();
    for (int64_t s = 0; s < b->full_steps; s++) {
        step_32x32(a->at[0] + s * a->step[0], a->stride[0], a->at[1] + s * a->step[1], a->stride[1],
                   b->full + s * B_STEP + column);
        overlap_step(w, 1);
    }
    if (b->full_steps < b->steps) {
        const tile *last = a->copies + b->full_steps;
        step_32x32(last->bytes, 64, last[STEPS].bytes, 64, b->last + column);
    }
    tile_store(0, c, 4 * ldc);
    tile_store(1, c + 16, 4 * ldc);
    tile_store(2, c + TILE_ROWS * ldc, 4 * ldc);
    tile_store(3, c + TILE_ROWS * ldc + 16, 4 * ldc);
}

static inline void step_16x64(const char *a, int64_t stride, const uint32_t *b)
{
    tile_load(4, a, stride);
    tile_load(5, b, 4 * FMOE_NB);
    tile_dot(0, 4, 5);
    tile_load(6, b + 16, 4 * FMOE_NB);
    tile_dot(1, 4, 6);
    tile_load(7, b + 32, 4 * FMOE_NB);
    tile_dot(2, 4, 7);
    tile_load(5, b + 48, 4 * FMOE_NB);
    tile_dot(3, 4, 5);
}

static void block_16x64(const a_block *a, const b_panel *b, float *c, int64_t ldc, const overlap_share *w)
{
    zero_c();
    for (int64_t s = 0; s < b->full_steps; s++) {
        step_16x64(a->at[0] + s * a->step[0], a->stride[0], b->full + s * B_STEP);
        overlap_step(w, 2);
    }
    if (b->full_steps < b->steps) step_16x64(a->copies[b->full_steps].bytes, 64, b->last);
    tile_store(0, c, 4 * ldc);
    tile_store(1, c + 16, 4 * ldc);
    tile_store(2, c + 32, 4 * ldc);
    tile_store(3, c + 48, 4 * ldc);
}

/* Tiles for a block of n rows: C in 0 to 3, A in 4 (and 5), B in the others. */
static void shape_tiles(int64_t n)
{
    const uint8_t upper = (uint8_t)fmoe_min(n, TILE_ROWS), lower = (uint8_t)(n - upper);
    if (lower) tile_configure((const uint8_t[8]){upper, upper, lower, lower, upper, lower, 16, 16}, tiles_whole);
    else tile_configure((const uint8_t[8]){upper, upper, upper, upper, upper, 16, 16, 16}, tiles_whole);
}

static void add_sums(float *c, int64_t ldc, const float *sums, int64_t rows)
{
    for (int64_t i = 0; i < rows; i++)
        for (int j = 0; j < FMOE_NB; j += 16) {
            float *to = c + i * ldc + j;
            _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_load_ps(sums + i * FMOE_NB + j)));
        }
}

void fmoe_gemm_bf16_amx_bf16(int64_t rows, int64_t kc, const void *const *a, int64_t a_step, const void *panel,
                             float *c, int64_t ldc, int first, fmoe_overlap *overlap)
{
    tile copies[HALVES * STEPS];
    _Alignas(64) uint32_t last[B_STEP];
    _Alignas(64) float sums[BLOCK_ROWS * FMOE_NB];
    const b_panel b = {.full = panel, .last = last, .steps = fmoe_ceil_div(kc, TILE_K), .full_steps = kc / TILE_K};
    if (b.full_steps < b.steps) {
        const size_t bytes = (size_t)((kc + 1) / 2 - b.full_steps * TILE_K / 2) * FMOE_NB * 4;
        memcpy(last, b.full + b.full_steps * B_STEP, bytes);
        memset((char *)last + bytes, 0, sizeof last - bytes);
    }
    const int64_t all_steps =
        2 * b.full_steps * fmoe_ceil_div(rows, BLOCK_ROWS); /* steps in all, or halves of 16 x 64 */
    const overlap_share w = {overlap, all_steps ? fmoe_ceil_div(overlap->pack.left, all_steps) : 0,
                             fmoe_prefetch_rate(&overlap->prefetch, all_steps)};
    for (int64_t n, shape = 0; rows > 0; rows -= n, a += n, c += n * ldc) {
        n = fmoe_min(rows, BLOCK_ROWS);
        if (n != shape) shape_tiles(shape = n);
        const a_block block = a_block_of(a, n, kc, a_step, copies);
        float *to = first ? c : sums;
        const int64_t ld = first ? ldc : FMOE_NB;
        if (n > TILE_ROWS) {
            block_32x32(&block, &b, 0, to, ld, &w);
            block_32x32(&block, &b, 32, to + 32, ld, &w);
        } else {
            block_16x64(&block, &b, to, ld, &w);
        }
        if (!first) add_sums(c, ldc, sums, n);
    }
    tile_release();
    while (overlap->pack.left > 0) piece_pairs(overlap);
}

/* ---- weight gradients ---- */

/* Rows of 64 sums, added to earlier ones if there are, to memory by nontemporal stores. The tile unit makes no
 * denormals, so that the CPU's own rounding to bf16, which does not either, gives the bits of fmoe_float_to_bf16. */
static inline __attribute__((always_inline)) void stream_rows(const int dtype, int64_t rows, const float *sums,
                                                              const float *c, char *to, int64_t bytes)
{
    for (int64_t i = 0; i < rows; i++, sums += FMOE_NB, to += bytes)
        for (int64_t j = 0; j < FMOE_NB; j += STEP) {
            vec2 x = load2(FMOE_F32, sums + j);
            if (c) {
                const vec2 before = load2(FMOE_F32, c + i * FMOE_NB + j);
                x = (vec2){{before.v[0] + x.v[0], before.v[1] + x.v[1]}};
            }
            store2(dtype, to + j * bytes_of(dtype), x, true);
        }
}

static void stream_block(int dtype, int64_t rows, const float *sums, const float *c, char *to, int64_t stride)
{
    if (dtype == FMOE_F32) stream_rows(FMOE_F32, rows, sums, c, to, 4 * stride);
    else if (dtype == FMOE_BF16) stream_rows(FMOE_BF16, rows, sums, c, to, 2 * stride);
    else stream_rows(FMOE_F16, rows, sums, c, to, 2 * stride);
}

/* `left` is rows of kc, a multiple of 32 (pack_wgrad_left_pairs). A block goes to memory while the next one is
 * multiplied. */
void fmoe_wgrad_bf16_amx_bf16(int64_t m, int64_t kc, const void *left, const void *panel, const float *c, void *dst,
                              int64_t stride, int dtype, const fmoe_prefetch_rows *ahead)
{
    (void)ahead;
    _Alignas(64) float sums[2][BLOCK_ROWS * FMOE_NB];
    const b_panel b = {.full = panel, .steps = kc / TILE_K, .full_steps = kc / TILE_K};
    fmoe_overlap none = {0};
    const overlap_share nothing = {.overlap = &none};
    const int64_t element = dtype == FMOE_F32 ? 4 : 2;
    for (int64_t i = 0, shape = 0; i < m + BLOCK_ROWS; i += BLOCK_ROWS) {
        const int64_t n = fmoe_min(m - i, BLOCK_ROWS), before = i - BLOCK_ROWS;
        float *to = sums[i / BLOCK_ROWS % 2], *done = sums[(i / BLOCK_ROWS + 1) % 2];
        const char *a = (const char *)left + i * kc * 2;
        const a_block block = {.at = {a, a + TILE_ROWS * kc * 2}, .stride = {kc * 2, kc * 2}, .step = {64, 64}};
        if (n > 0 && n != shape) shape_tiles(shape = n);
        if (n > TILE_ROWS) {
            block_32x32(&block, &b, 0, to, FMOE_NB, &nothing);
            block_32x32(&block, &b, 32, to + 32, FMOE_NB, &nothing);
        } else if (n > 0) {
            block_16x64(&block, &b, to, FMOE_NB, &nothing);
        }
        if (before >= 0)
            stream_block(dtype, fmoe_min(m - before, BLOCK_ROWS), done, c ? c + before * FMOE_NB : NULL,
                         (char *)dst + before * stride * element, stride);
    }
    tile_release();
}

/* Four chains of tile products, no loads. */
double fmoe_peak_bf16_amx_bf16(int64_t rounds)
{
    tile_configure(tiles_whole, tiles_whole);
    for (int64_t r = 0; r < rounds; r++) {
        tile_dot(0, 4, 6);
        tile_dot(1, 4, 7);
        tile_dot(2, 5, 6);
        tile_dot(3, 5, 7);
    }
    tile_release();
    return (double)rounds * 4 * 2 * TILE_ROWS * TILE_ROWS * TILE_K;
}
