/* SPDX-License-Identifier: Apache-2.0
 *
 * nmajor_inplace_avx512.h - products by n-major weights in place, 64 columns contiguous in memory, on AVX-512: the
 * backward's, as Hugging Face stores them. Included after tile_avx512.h and after a file has defined
 *
 *   static inline void nmajor_load(const char *w, int64_t step, bool whole, __m512 b[4]);      one step of k
 *
 * which is not whole at the end of an odd kc. The first tile of rows takes the weights from memory, and leaves them
 * packed for the others. Packing a chunk ahead, between the steps of another one, takes more than twice as long: at 64
 * rows, bf16, 8 to 14 % of the product, and few rows need no panel at all. */

static inline __attribute__((always_inline)) void nmajor_step(const int mr, const bool keep, const bool whole,
                                                              __m512 acc[FMOE_MR][4], const char *const volatile *row,
                                                              int64_t offset, const char *w, int64_t step, char *panel)
{
    __m512 b[4];
    nmajor_load(w, step, whole, b);
    if (keep) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) _mm512_storeu_ps((float *)(void *)(panel + 64 * j), b[j]);
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        const __m512 ai = tile_unit(row[i] + offset, whole);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) acc[i][j] = DOT_UNITS(acc[i][j], ai, b[j]);
    }
}

static inline __attribute__((always_inline)) void nmajor_tile(const int mr, const bool keep, int64_t kc,
                                                              const void *const *a, const char *w, int64_t step,
                                                              char *panel, float *c, int64_t ldc, int first,
                                                              fmoe_overlap *overlap, int64_t tiles)
{
    const char *const volatile *row = (const char *const volatile *)a;
    const int64_t n = kc / UNIT, below = keep ? mr : 0, next = overlap->next_rows;
    const int64_t rate = fmoe_prefetch_rate(&overlap->prefetch, tiles * n),
                  epilogue_rate = fmoe_prefetch_rate(&overlap->epilogue, tiles * n);
    __m512 acc[FMOE_MR][4];
    sums_clear(mr, acc);
    for (int64_t k = 0; k < n; k++, w += UNIT * step, panel += PANEL_ROW) {
        fmoe_prefetch(&overlap->prefetch, rate);
        fmoe_prefetch(&overlap->epilogue, epilogue_rate);
        if ((k & 15) < next) __builtin_prefetch(row[below + (k & 15)] + 4 * k, 0, 3); /* A of the next tile */
        nmajor_step(mr, keep, true, acc, row, 4 * k, w, step, panel);
    }
    if (kc % UNIT) nmajor_step(mr, keep, false, acc, row, 4 * n, w, step, panel);
    sums_store(mr, acc, c, ldc, first);
}

/* The first tile of `rows`; how many it took. */
static inline int64_t NAME(nmajor_first_tile)(int64_t rows, int64_t kc, const void *const *a, const char *w,
                                              int64_t step, char *panel, float *c, int64_t ldc, int first,
                                              fmoe_overlap *overlap)
{
    const int64_t tiles = fmoe_ceil_div(rows, FMOE_MR);
    if (tiles == 0) return 0;
    const int64_t mr = fmoe_ceil_div(rows, tiles);
    overlap->next_rows = tiles > 1 ? fmoe_ceil_div(rows - mr, tiles - 1) : mr;
    if (tiles > 1) { /* of 7 rows or more, evenly */
        if (mr == 4) nmajor_tile(4, true, kc, a, w, step, panel, c, ldc, first, overlap, tiles);
        else if (mr == 5) nmajor_tile(5, true, kc, a, w, step, panel, c, ldc, first, overlap, tiles);
        else nmajor_tile(6, true, kc, a, w, step, panel, c, ldc, first, overlap, tiles);
        return mr;
    }
    switch (mr) {
    case 1: nmajor_tile(1, false, kc, a, w, step, panel, c, ldc, first, overlap, 1); break;
    case 2: nmajor_tile(2, false, kc, a, w, step, panel, c, ldc, first, overlap, 1); break;
    case 3: nmajor_tile(3, false, kc, a, w, step, panel, c, ldc, first, overlap, 1); break;
    case 4: nmajor_tile(4, false, kc, a, w, step, panel, c, ldc, first, overlap, 1); break;
    case 5: nmajor_tile(5, false, kc, a, w, step, panel, c, ldc, first, overlap, 1); break;
    default: nmajor_tile(6, false, kc, a, w, step, panel, c, ldc, first, overlap, 1); break;
    }
    return mr;
}
