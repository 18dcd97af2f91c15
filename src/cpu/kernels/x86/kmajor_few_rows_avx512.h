/* SPDX-License-Identifier: Apache-2.0
 *
 * kmajor_few_rows_avx512.h - products of few rows by k-major weights in place, on AVX-512: no panel, registers of B are
 * put together where they are used. The same bits as by kmajor panels. Included after kmajor_avx512.h. */

enum { LINE = 4 * KBLOCK, FEW_ROWS_MR = 8 }; /* FEW_ROWS_MR: rows of a register tile */

/* A cache line of each of four columns, as four registers of B: 2 shuffles a line, which, with a broadcast for every
 * second multiply-add, take the place of as many. (Inserts from memory take half as long again, masked loads more.) */
static inline __attribute__((always_inline)) void few_rows_load_b(const char *p, int64_t step, __m512 b[4])
{
    const __m512 w = _mm512_loadu_ps(p), x = _mm512_loadu_ps(p + step), y = _mm512_loadu_ps(p + 2 * step),
                 z = _mm512_loadu_ps(p + 3 * step);
    const __m512 wx = _mm512_shuffle_f32x4(w, x, 0x44), yz = _mm512_shuffle_f32x4(y, z, 0x44),
                 wx2 = _mm512_shuffle_f32x4(w, x, 0xee), yz2 = _mm512_shuffle_f32x4(y, z, 0xee);
    b[0] = _mm512_shuffle_f32x4(wx, yz, 0x88);
    b[1] = _mm512_shuffle_f32x4(wx, yz, 0xdd);
    b[2] = _mm512_shuffle_f32x4(wx2, yz2, 0x88);
    b[3] = _mm512_shuffle_f32x4(wx2, yz2, 0xdd);
}

/* The sums of a row by one or two times four columns; lanes are added as in kmajor_sum. No masks: of a constant one gcc
 * 10.2 makes a blend, which reads all eight. */
static inline __attribute__((always_inline)) void few_rows_store(const int fours, const __m512 acc[2], float *c,
                                                                 int first)
{
    const __m512 x = acc[0], y = acc[fours - 1];
    const __m512 two = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y)),
                 one = _mm512_add_ps(two, _mm512_permute_ps(two, 0x4e));
    const __m256 sum = _mm512_castps512_ps256(_mm512_permutexvar_ps(kmajor_column_order(), one));
    const __m128 half = _mm256_castps256_ps128(sum);
    if (fours == 2) _mm256_storeu_ps(c, first ? sum : _mm256_add_ps(_mm256_loadu_ps(c), sum));
    else _mm_storeu_ps(c, first ? half : _mm_add_ps(_mm_loadu_ps(c), half));
}

/* The end of a tile whose last line is not whole: blocks of 16 bytes or less. Not inline: where the sums of a loop go
 * two ways a compiler keeps them in memory. */
static __attribute__((noinline)) void NAME(few_rows_rest)(int mr, int fours, int64_t offset, int64_t end,
                                                          const void *const *a, const char *p, int64_t step, float *c,
                                                          int64_t ldc, int first, __m512 (*acc)[2])
{
    for (; offset < end; offset += KBLOCK) {
        const __mmask16 m = (__mmask16)(end - offset >= KBLOCK ? 0xffffu : (1u << (end - offset)) - 1u);
        for (int f = 0; f < fours; f++) {
            const char *w = p + offset + 4 * f * step;
            __m512i b = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(m, w));
            b = _mm512_inserti32x4(b, _mm_maskz_loadu_epi8(m, w + step), 1);
            b = _mm512_inserti32x4(b, _mm_maskz_loadu_epi8(m, w + 2 * step), 2);
            b = _mm512_inserti32x4(b, _mm_maskz_loadu_epi8(m, w + 3 * step), 3);
            for (int i = 0; i < mr; i++) {
                const __m512i ai = _mm512_broadcast_i32x4(_mm_maskz_loadu_epi8(m, (const char *)a[i] + offset));
                acc[i][f] = DOT_UNITS(acc[i][f], _mm512_castsi512_ps(ai), _mm512_castsi512_ps(b));
            }
        }
    }
    for (int i = 0; i < mr; i++) few_rows_store(fours, acc[i], c + i * ldc, first);
}

/* What comes next, into L2: as many lines as all tiles multiply meanwhile. Near (Intel's cores): 12 lines ahead in the
 * columns themselves, into L1; see multiply_few_rows. */
static inline __attribute__((always_inline)) void
few_rows_prefetch(const bool same_columns, const int fours, fmoe_walk *w, const char *p, int64_t offset, int64_t step)
{
    enum { AHEAD = 12 * LINE };
    if (same_columns) {
        const char *at = offset + AHEAD < w->left ? p + offset : w->at + offset - w->left;
#pragma GCC unroll 8
        for (int i = 0; i < 4 * fours; i++) __builtin_prefetch(at + AHEAD + i * step, 0, 3);
        return;
    }
    w->due += w->rate;
    if (w->due < 65536 || w->left <= 0) return;
    w->due -= 65536;
#pragma GCC unroll 2
    for (int f = 0; f < fours; f++) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) __builtin_prefetch(w->at + i * LINE, 0, 2);
        fmoe_walk_on(w);
    }
}

/* `bytes` of mr rows from a[i] + offset on, by `fours` times four columns. */
static inline __attribute__((always_inline)) void few_rows_tile(const bool same_columns, const int mr, const int fours,
                                                                int64_t offset, int64_t bytes, const void *const *a,
                                                                const char *p, int64_t step, float *c, int64_t ldc,
                                                                int first, fmoe_walk *prefetch)
{
    __m512 acc[FEW_ROWS_MR][2], b[2][4];
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
    const int64_t end = offset + bytes;
    for (; offset + LINE <= end; offset += LINE) {
        few_rows_prefetch(same_columns, fours, prefetch, p, offset, step);
#pragma GCC unroll 2
        for (int f = 0; f < fours; f++) few_rows_load_b(p + offset + 4 * f * step, step, b[f]);
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const char *four = (const char *)a[i] + offset + j * KBLOCK;
                const __m512 ai = _mm512_broadcast_f32x4(_mm_loadu_ps((const float *)(const void *)four));
#pragma GCC unroll 2
                for (int f = 0; f < fours; f++) acc[i][f] = DOT_UNITS(acc[i][f], ai, b[f][j]);
            }
        }
    }
    if (offset < end) {
        __m512 sums[FEW_ROWS_MR][2];
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) sums[i][0] = acc[i][0], sums[i][1] = acc[i][1];
        NAME(few_rows_rest)(mr, fours, offset, end, a, p, step, c, ldc, first, sums);
        return;
    }
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) few_rows_store(fours, acc[i], c + i * ldc, first);
}

static inline __attribute__((always_inline)) void few_rows_rows(const bool same_columns, const int fours, int64_t mr,
                                                                int64_t offset, int64_t bytes, const void *const *a,
                                                                const char *p, int64_t step, float *c, int64_t ldc,
                                                                int first, fmoe_walk *prefetch)
{
    switch (mr) {
    case 1: few_rows_tile(same_columns, 1, fours, offset, bytes, a, p, step, c, ldc, first, prefetch); break;
    case 2: few_rows_tile(same_columns, 2, fours, offset, bytes, a, p, step, c, ldc, first, prefetch); break;
    case 3: few_rows_tile(same_columns, 3, fours, offset, bytes, a, p, step, c, ldc, first, prefetch); break;
    case 4: few_rows_tile(same_columns, 4, fours, offset, bytes, a, p, step, c, ldc, first, prefetch); break;
    case 5: few_rows_tile(same_columns, 5, fours, offset, bytes, a, p, step, c, ldc, first, prefetch); break;
    case 6: few_rows_tile(same_columns, 6, fours, offset, bytes, a, p, step, c, ldc, first, prefetch); break;
    case 7: few_rows_tile(same_columns, 7, fours, offset, bytes, a, p, step, c, ldc, first, prefetch); break;
    default: few_rows_tile(same_columns, 8, fours, offset, bytes, a, p, step, c, ldc, first, prefetch); break;
    }
}

/* Columns to their end, chunk by chunk, before the next ones: memory is read almost in order. Eight at a time, for each
 * four of a row are then loaded once for two multiply-adds; but four of one or two rows, which wait for memory alone
 * (it is 6 % slower with twice the streams), and where columns are whole pages apart: their lines, and those of A as a
 * rule, are then in one set of L1, which holds eight (4 to 8 %). */
static inline __attribute__((always_inline)) void few_rows_columns(const bool same_columns, int64_t rows, int64_t kc,
                                                                   int64_t chunk, const void *const *a, const char *w,
                                                                   int64_t step, float *c, int64_t ldc, int first,
                                                                   fmoe_walk *prefetch)
{
    enum { PAGE = 4096 };
    const int fours = rows <= 2 || step % PAGE == 0 ? 1 : 2;
    const int64_t tiles = fmoe_ceil_div(rows, FEW_ROWS_MR);
    prefetch->rate = 65536 / tiles;
    for (int64_t n = 0; n < FMOE_NB / 2; n += 4 * fours, w += 4 * fours * step) {
        if (same_columns) prefetch->at = n + 4 * fours < FMOE_NB / 2 ? w + 4 * fours * step : prefetch->half[1];
        for (int64_t k = 0; k < kc; k += chunk)
            for (int64_t row = 0, left = tiles, mr; left > 0; left--, row += mr) {
                const int64_t bytes = fmoe_min(chunk, kc - k);
                float *const to = c + row * ldc + n;
                mr = fmoe_ceil_div(rows - row, left);
                if (fours == 1)
                    few_rows_rows(same_columns, 1, mr, k, bytes, a + row, w, step, to, ldc, first && k == 0, prefetch);
                else few_rows_rows(same_columns, 2, mr, k, bytes, a + row, w, step, to, ldc, first && k == 0, prefetch);
            }
    }
}

static inline void NAME(few_rows_multiply)(int64_t rows, int64_t kc, int64_t chunk, const void *const *a, const char *w,
                                           int64_t step, float *c, int64_t ldc, int first, fmoe_walk *prefetch)
{
    if (prefetch->same_columns) few_rows_columns(true, rows, kc, chunk, a, w, step, c, ldc, first, prefetch);
    else few_rows_columns(false, rows, kc, chunk, a, w, step, c, ldc, first, prefetch);
}
