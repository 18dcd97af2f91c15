/* SPDX-License-Identifier: Apache-2.0
 *
 * intel_avx512.h - f32 tiles for Intel's cores: packing and prefetching (overlap.h) are looked after once in a batch of
 * several steps, not in each, and rows of A are left to the core's own prefetchers. Sums are those of kmajor_avx512.h
 * and tile_avx512.h, bit for bit.
 *
 * Such a core starts six instructions a cycle, and where another thread shares it every second cycle is the other's: 36
 * while the 24 multiply-adds of a step take their 12 cycles. 34 of them are the products; a look at what overlaps and
 * six pointers in every step made it 60. One core of a Xeon, weights in L2: 86 % of the ceiling in single steps, 95 in
 * batches; with another thread on the core, presumably, 60 and 71. Zen 4 gains nothing, and stays with single steps. */

enum { BATCH = 4, NMAJOR_BATCH = 16 }; /* steps */

/* Weights in place gain nothing before 24 rows. nmajor_batched has tiles of 5 and of 6 rows alone, and an even split
 * has no others from 20 rows on: 19 are 5 + 5 + 5 + 4, and the last tile would read and write two rows that are not
 * there.
 */
enum { NMAJOR_BATCHED_ROWS = 24 };
_Static_assert(
    FMOE_MR == 6 && NMAJOR_BATCHED_ROWS >= (FMOE_MR - 1) * (FMOE_MR - 2),
    "fewer rows leave a tile of less than 5, which nmajor_batched would multiply as one of 6: out of bounds");

static inline bool nmajor_batched_pays(const fmoe_overlap *overlap, int64_t rows)
{
    return overlap->batched && rows >= NMAJOR_BATCHED_ROWS;
}

/* A multiply-add that stays where its sum is: gcc has others in unrolled steps, and moves registers for them. */
static inline __attribute__((always_inline)) __m512 batch_dot(__m512 acc, __m512 a, __m512 b)
{
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
}

/* One step: `kmajor`, four k of a row by 16 columns; else one by 64. `keep`: B is left in the panel. */
static inline __attribute__((always_inline)) void batch_step(const int mr, const bool kmajor, const bool keep,
                                                             __m512 acc[FMOE_MR][4], const char *const at[FMOE_MR],
                                                             int64_t offset, const char *from, char *panel)
{
    __m512 b[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) b[j] = _mm512_loadu_ps(from + 64 * j);
    if (keep) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) _mm512_storeu_ps((float *)(void *)(panel + 64 * j), b[j]);
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        const float *a = (const float *)(const void *)(at[i] + offset);
        const __m512 ai = kmajor ? _mm512_broadcast_f32x4(_mm_loadu_ps(a)) : _mm512_set1_ps(*a);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) acc[i][j] = batch_dot(acc[i][j], ai, b[j]);
    }
}

/* What is due at a batch, as kmajor_prefetch does it but four lines at a time: a third of the instructions. With these
 * it pays to prefetch what is packed next at many rows too, 12 % at 28 and 12 to 17 at 64; line by line it cost that
 * much. (Weights in place are prefetched line by line: 4 % faster.) */
static inline __attribute__((always_inline)) void batch_prefetch(fmoe_walk *w, int64_t rate)
{
    for (w->due += rate; w->due >= 4 * 65536; w->due -= 4 * 65536) {
        if (w->left <= 0) continue;
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) __builtin_prefetch(w->at + i * w->step, 0, 2);
        w->at += 4 * w->step;
        w->row += 4;
        if (w->row < 8) continue;
        w->row -= 8;
        w->at -= 8 * w->step;
        fmoe_walk_on(w);
    }
}

static inline __attribute__((always_inline)) void batch_piece(int widen, fmoe_overlap *overlap)
{
    if (widen == FMOE_BF16) kmajor_piece(FMOE_BF16, overlap);
    else if (widen == FMOE_F16) kmajor_piece(FMOE_F16, overlap);
    else kmajor_piece(0, overlap);
}

/* kmajor_tile, of whole batches. */
static inline __attribute__((always_inline)) void kmajor_batched_tile(int widen, const int mr, int64_t bytes,
                                                                      const void *const *a, const char *b, float *c,
                                                                      int64_t ldc, int first, fmoe_overlap *overlap,
                                                                      int64_t tiles)
{
    const char *const volatile *row = (const char *const volatile *)a;
    const int64_t n = bytes / KBLOCK, pieces = fmoe_ceil_div(overlap->pack.left, tiles);
    const volatile int64_t apart = pieces > 0 ? fmoe_max(1, 4 * n / pieces) : INT64_MAX;
    const volatile int64_t rate = BATCH * fmoe_prefetch_rate(&overlap->prefetch, tiles * 4 * n);
    int64_t until = apart;
    for (int group = 0; group < 4; group++, c += 16) {
        __m512 acc[FMOE_MR][4];
        sums_clear(mr, acc);
        for (int64_t k = 0; k < n; k += BATCH, b += BATCH * KMAJOR_STEP) {
            const char *at[FMOE_MR];
            batch_prefetch(&overlap->prefetch, rate);
#pragma GCC unroll 6
            for (int i = 0; i < mr; i++) at[i] = row[i] + k * KBLOCK;
#pragma GCC unroll 4
            for (int u = 0; u < BATCH; u++) batch_step(mr, true, false, acc, at, u * KBLOCK, b + u * KMAJOR_STEP, NULL);
            for (until -= BATCH; until <= 0; until += apart)
                if (overlap->pack.left > 0) batch_piece(widen, overlap);
        }
        kmajor_store(mr, acc, c, ldc, first);
    }
}

/* Not inline: inlined with it, the other form came out 5 % slower at 16 rows. */
static __attribute__((noinline)) void kmajor_batched(int widen, int64_t rows, int64_t bytes, const void *const *a,
                                                     const char *b, float *c, int64_t ldc, int first,
                                                     fmoe_overlap *overlap)
{
    for (int64_t tiles = fmoe_ceil_div(rows, FMOE_MR), mr; tiles > 0; tiles--, rows -= mr, a += mr, c += mr * ldc) {
        mr = fmoe_ceil_div(rows, tiles);
        switch (mr) {
        case 1: kmajor_batched_tile(widen, 1, bytes, a, b, c, ldc, first, overlap, tiles); break;
        case 2: kmajor_batched_tile(widen, 2, bytes, a, b, c, ldc, first, overlap, tiles); break;
        case 3: kmajor_batched_tile(widen, 3, bytes, a, b, c, ldc, first, overlap, tiles); break;
        case 4: kmajor_batched_tile(widen, 4, bytes, a, b, c, ldc, first, overlap, tiles); break;
        case 5: kmajor_batched_tile(widen, 5, bytes, a, b, c, ldc, first, overlap, tiles); break;
        default: kmajor_batched_tile(widen, 6, bytes, a, b, c, ldc, first, overlap, tiles); break;
        }
    }
}

/* nmajor_tile, in batches; the panel that the first tile fills is the weights of the other tiles. */
static inline __attribute__((always_inline)) void nmajor_batched_tile(const int mr, const bool keep, int64_t kc,
                                                                      const void *const *a, const char *w, int64_t step,
                                                                      char *panel, float *c, int64_t ldc, int first,
                                                                      fmoe_overlap *overlap, int64_t tiles)
{
    const char *const volatile *row = (const char *const volatile *)a;
    const int64_t rate = NMAJOR_BATCH * fmoe_prefetch_rate(&overlap->prefetch, tiles * kc),
                  epilogue_rate = NMAJOR_BATCH * fmoe_prefetch_rate(&overlap->epilogue, tiles * kc);
    __m512 acc[FMOE_MR][4];
    sums_clear(mr, acc);
    for (int64_t k = 0; k < kc;) {
        const char *at[FMOE_MR];
        fmoe_prefetch(&overlap->prefetch, rate);
        fmoe_prefetch(&overlap->epilogue, epilogue_rate);
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) at[i] = row[i];
#pragma GCC unroll 4
        for (const int64_t stop = fmoe_min(kc, k + NMAJOR_BATCH); k < stop; k++, w += step, panel += PANEL_ROW)
            batch_step(mr, false, keep, acc, at, 4 * k, w, panel);
    }
    sums_store(mr, acc, c, ldc, first);
}

static __attribute__((noinline)) void nmajor_batched(int64_t rows, int64_t kc, const void *const *a, const char *w,
                                                     int64_t step, char *panel, float *c, int64_t ldc, int first,
                                                     fmoe_overlap *overlap)
{
    const int64_t all = fmoe_ceil_div(rows, FMOE_MR);
    for (int64_t tiles = all, mr; tiles > 0; tiles--, rows -= mr, a += mr, c += mr * ldc) {
        mr = fmoe_ceil_div(rows, tiles);
        if (tiles == all && mr == 5) nmajor_batched_tile(5, true, kc, a, w, step, panel, c, ldc, first, overlap, tiles);
        else if (tiles == all) nmajor_batched_tile(6, true, kc, a, w, step, panel, c, ldc, first, overlap, tiles);
        else if (mr == 5) nmajor_batched_tile(5, false, kc, a, panel, PANEL_ROW, panel, c, ldc, first, overlap, tiles);
        else nmajor_batched_tile(6, false, kc, a, panel, PANEL_ROW, panel, c, ldc, first, overlap, tiles);
    }
}
