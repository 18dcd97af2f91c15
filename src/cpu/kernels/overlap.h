/* SPDX-License-Identifier: Apache-2.0
 *
 * overlap.h - what a product does between its multiply-adds. While chunk i of the weights is multiplied, chunk i+1 is
 * packed and chunk i+2 is prefetched from memory, a piece of eight cache lines at a time, spread over the
 * multiply-adds: packing then uses units that wait otherwise (shuffles, stores), and memory never rests.
 *
 * A level whose gemm knows no pieces leaves `pack` alone, and the caller packs the whole chunk when gemm returns. */
#ifndef FMOE_CPU_OVERLAP_H
#define FMOE_CPU_OVERLAP_H

#include <stdbool.h>
#include <stdint.h>

/* A walk over `left` equal pieces, in runs of `length` pieces that are `advance` bytes apart. Run `run` starts in
 * half[run / per_half], run_step bytes further for each run of that half. */
typedef struct fmoe_walk {
    const char *at, *half[2];
    int64_t left; /* pieces, in all */
    int64_t step; /* bytes between the rows of a piece */
    int64_t advance, run_step;
    int32_t in_run, length, run, per_half;
    int32_t row;       /* prefetch: of the eight rows of a piece, the next one */
    bool into_l1;      /* prefetch: into L1 too, for there is much time for it */
    bool same_columns; /* prefetch, few rows: further on in the same columns; `left` bytes of each, the next columns at
                          `at` */
    int64_t due, rate; /* prefetch: lines, in 1/65536; rate: of the kmajor kernels */
} fmoe_walk;

/* How a chunk of weights is stored, and packed. k-major: TRANSPOSE, a piece is 8 columns x 16 units of 32 bits; for a
 * kmajor panel KMAJOR, 4 columns x 64 bytes. n-major: NMAJOR, a piece is two rows of units, 64 columns of one panel;
 * pieces of all panels side by side are one run. A gemm packs pieces for panels of its own form. */
enum { FMOE_OVERLAP_NONE, FMOE_OVERLAP_TRANSPOSE, FMOE_OVERLAP_NMAJOR, FMOE_OVERLAP_KMAJOR };

typedef struct fmoe_overlap {
    fmoe_walk pack, prefetch;
    char *panel; /* where pack goes; of a kmajor panel `to` is where the next piece goes, the panel at first */
    char *to;
    int64_t to_step, to_run; /* other panels: bytes on for each piece of a run, and for each run */
    int kind, dtype;
    bool batched;        /* a look at all this once in several steps, where a kernel has that (intel_avx512.h) */
    bool prefetch_again; /* few rows: what was prefetched a chunk ago is prefetched once more, just before it is used */
    int64_t next_rows;   /* of the tile after this one, whose A is prefetched; the tile's own where it is the last */
    fmoe_walk epilogue;  /* prefetched too: what the epilogue will read and write */
} fmoe_overlap;

/* How long before, in bytes of a packed panel. A core drops some prefetches when there are many of them, and a line
 * that is not there then costs as much as the products of several: 4 points at 16 rows an expert. */
enum { FMOE_PREFETCH_AGAIN = 4096 };

static inline void fmoe_walk_on(fmoe_walk *w)
{
    w->left--;
    w->at += w->advance;
    if (--w->in_run > 0) return;
    w->in_run = w->length;
    const int32_t run = ++w->run;
    w->at = w->half[run >= w->per_half] + (run >= w->per_half ? run - w->per_half : run) * w->run_step;
}

/* One line into L2; of the eight rows one after another, so that their pages are looked up at once where each has its
 * own. One line at a time: a core drops prefetches that come in a burst. At a slow rate (many rows) into L1 too: that
 * spares what is in L2, and is 2 % at 64 rows; at a fast one it displaces what is being multiplied, and costs 10 %
 * at 12. */
static inline __attribute__((always_inline)) void fmoe_prefetch_line(fmoe_walk *w)
{
    if (w->left <= 0) return;
    if (w->into_l1) __builtin_prefetch(w->at + w->row * w->step, 0, 3);
    else __builtin_prefetch(w->at + w->row * w->step, 0, 2);
    w->row = (w->row + 1) & 7;
    if (w->row == 0) fmoe_walk_on(w);
}

/* Lines to prefetch at each of `steps` steps, in 1/65536, so that the last is due when they end: evenly, for the time
 * in which memory rests at the end of a chunk is lost. */
static inline int64_t fmoe_prefetch_rate(const fmoe_walk *w, int64_t steps)
{
    return w->left <= 0 || steps <= 0 ? 0 : (8 * w->left * 65536 - w->row * 65536) / steps + 1;
}

/* What is due at one step. */
static inline __attribute__((always_inline)) void fmoe_prefetch(fmoe_walk *w, int64_t rate)
{
    for (w->due += rate; w->due >= 65536; w->due -= 65536) fmoe_prefetch_line(w);
}

#endif
