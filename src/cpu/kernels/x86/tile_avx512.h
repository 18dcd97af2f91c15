/* SPDX-License-Identifier: Apache-2.0
 *
 * tile_avx512.h - the register tile of both AVX-512 levels: up to 6 rows x 64 columns (24 accumulators, 4 B, 1 A), and
 * blocks of rows made of it (tiles.h). Included after a file has defined
 *
 *   DOT_UNITS(acc, a, b)                                         the multiply-add of its 32-bit units
 *   enum { UNIT };                                               k of such a unit
 *   static inline __m512 tile_unit(const char *a, bool whole);   one of A, broadcast; not whole at the end of an odd kc
 *   enum { ..., KMAJOR };                                        forms of a tile, the last ones of kmajor_avx512.h
 *   static inline void tile_piece(const int form, fmoe_overlap *overlap);
 *
 * In the forms of kmajor panels kc is in bytes. */

static inline __attribute__((always_inline)) void sums_clear(const int mr, __m512 acc[FMOE_MR][4])
{
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) acc[i][j] = _mm512_setzero_ps();
    }
}

static inline __attribute__((always_inline)) void sums_store(const int mr, __m512 acc[FMOE_MR][4], float *c,
                                                             int64_t ldc, int first)
{
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            float *to = c + i * ldc + 16 * j;
            _mm512_storeu_ps(to, first ? acc[i][j] : _mm512_add_ps(_mm512_loadu_ps(to), acc[i][j]));
        }
}

static inline __attribute__((always_inline)) void tile(const int form, const int mr, int64_t kc, const void *const *a,
                                                       int64_t a_step, const float *b, float *c, int64_t ldc, int first,
                                                       fmoe_overlap *overlap, int64_t tiles)
{
    if (form >= KMAJOR) {
        kmajor_tile(form - KMAJOR, mr, kc, a, (const char *)b, c, ldc, first, overlap, tiles);
        return;
    }
    __m512 acc[FMOE_MR][4];
    const char *const volatile *row = (const char *const volatile *)a; /* six registers less to spill at each piece */
    sums_clear(mr, acc);
    int64_t offset = 0;
    const int64_t below = tiles > 1 ? mr : 0, next = overlap->next_rows;
    int64_t pieces = fmoe_ceil_div(overlap->pack.left, tiles);
    const int64_t n = kc / UNIT, apart = pieces ? fmoe_max(1, n / pieces) : n;
    const int64_t rate = fmoe_prefetch_rate(&overlap->prefetch, tiles * n),
                  epilogue_rate = fmoe_prefetch_rate(&overlap->epilogue, tiles * n);
    const bool prefetch_again = take_prefetch_again(overlap);
    for (int64_t k = 0; k < n;) {
        const int64_t stop = fmoe_min(n, k + apart);
        for (; k < stop; k++, b += FMOE_NB, offset += a_step) {
            fmoe_prefetch(&overlap->prefetch, rate);
            fmoe_prefetch(&overlap->epilogue, epilogue_rate);
            if (prefetch_again) prefetch_again_at(b);
            if ((k & 15) < next) __builtin_prefetch(row[below + (k & 15)] + offset, 0, 3); /* A of the next tile */
            const __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + 16), b2 = _mm512_loadu_ps(b + 32),
                         b3 = _mm512_loadu_ps(b + 48);
#pragma GCC unroll 6
            for (int i = 0; i < mr; i++) {
                const __m512 ai = tile_unit(row[i] + offset, true);
                acc[i][0] = DOT_UNITS(acc[i][0], ai, b0);
                acc[i][1] = DOT_UNITS(acc[i][1], ai, b1);
                acc[i][2] = DOT_UNITS(acc[i][2], ai, b2);
                acc[i][3] = DOT_UNITS(acc[i][3], ai, b3);
            }
        }
        if (pieces-- > 0) tile_piece(form, overlap);
    }
    if (kc % UNIT) {
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            const __m512 ai = tile_unit(row[i] + offset, false);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) acc[i][j] = DOT_UNITS(acc[i][j], ai, _mm512_loadu_ps(b + 16 * j));
        }
    }
    sums_store(mr, acc, c, ldc, first);
}

#define PANEL float
#include "cpu/kernels/tiles.h"
