/* SPDX-License-Identifier: Apache-2.0
 *
 * tiles.h - from a register tile to a block of rows. Included after a file has defined
 *
 *   static inline void tile(const int form, const int mr, int64_t kc, const void *const *a, int64_t a_step,
 *                           const PANEL *b, float *c, int64_t ldc, int first, fmoe_overlap *overlap, int64_t tiles);
 *
 * with at most FMOE_MR rows, `form`, a constant that is the file's own, and PANEL, the type of its packed columns. Rows
 * are split evenly (8 rows: 4 + 4, not 6 + 2), and so is what overlaps: `tiles` share what is left of it, this one
 * included. */

/* `parts`: how many calls, this one included, share what overlaps. */
static inline __attribute__((always_inline)) void run_tiles(const int form, int64_t rows, int64_t kc,
                                                            const void *const *a, int64_t a_step, const PANEL *b,
                                                            float *c, int64_t ldc, int first, fmoe_overlap *overlap,
                                                            int64_t parts)
{
    const int64_t all = fmoe_ceil_div(rows, FMOE_MR);
    for (int64_t tiles = all; tiles > 0; tiles--) {
        const int64_t mr = fmoe_ceil_div(rows, tiles), share = tiles + (parts - 1) * all;
        overlap->next_rows = tiles > 1 ? fmoe_ceil_div(rows - mr, tiles - 1) : mr;
        switch (mr) {
        case 1: tile(form, 1, kc, a, a_step, b, c, ldc, first, overlap, share); break;
        case 2: tile(form, 2, kc, a, a_step, b, c, ldc, first, overlap, share); break;
        case 3: tile(form, 3, kc, a, a_step, b, c, ldc, first, overlap, share); break;
        case 4: tile(form, 4, kc, a, a_step, b, c, ldc, first, overlap, share); break;
        case 5: tile(form, 5, kc, a, a_step, b, c, ldc, first, overlap, share); break;
        default: tile(form, 6, kc, a, a_step, b, c, ldc, first, overlap, share); break;
        }
        rows -= mr;
        a += mr;
        c += mr * ldc;
    }
}
