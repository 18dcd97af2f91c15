/* SPDX-License-Identifier: Apache-2.0
 *
 * tiles.h - from a register tile to a block of rows. Included after a file has defined
 *
 *   static inline void tile(const int mr, int64_t kc, const void *const *a, int64_t a_step, const PANEL *b, float *c,
 *                           int64_t ldc, int first, fmoe_fetch *next, int64_t fetches);
 *
 * with at most FMOE_MR rows, and PANEL, the type of its packed columns. Rows are split evenly (8 rows: 4 + 4, not 6 +
 * 2), and so are the lines to fetch. */

static inline void run_tiles(int64_t rows, int64_t kc, const void *const *a, int64_t a_step, const PANEL *b, float *c,
                             int64_t ldc, int first, fmoe_fetch *next)
{
    for (int64_t tiles = fmoe_ceil_div(rows, FMOE_MR); tiles > 0; tiles--) {
        const int64_t mr = fmoe_ceil_div(rows, tiles), fetches = fmoe_ceil_div(next->end - next->line, tiles);
        switch (mr) {
        case 1: tile(1, kc, a, a_step, b, c, ldc, first, next, fetches); break;
        case 2: tile(2, kc, a, a_step, b, c, ldc, first, next, fetches); break;
        case 3: tile(3, kc, a, a_step, b, c, ldc, first, next, fetches); break;
        case 4: tile(4, kc, a, a_step, b, c, ldc, first, next, fetches); break;
        case 5: tile(5, kc, a, a_step, b, c, ldc, first, next, fetches); break;
        default: tile(6, kc, a, a_step, b, c, ldc, first, next, fetches); break;
        }
        rows -= mr;
        a += mr;
        c += mr * ldc;
    }
}
