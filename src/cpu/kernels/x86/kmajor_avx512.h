/* SPDX-License-Identifier: Apache-2.0
 *
 * kmajor_avx512.h - products by k-major weights on AVX-512: kmajor panels (kernels.h), made by moving 16 bytes at a
 * time. Included after a file has defined DOT_UNITS(acc, a, b), the multiply-add of its 32-bit units.
 *
 * A panel of single units is a transposition: on Zen 4 its shuffles and its 64 half stores take 14 % of the time of 16
 * rows, for shuffles across lanes and most stores share units with the multiply-adds. Blocks of four units need none: a
 * register of B is 4 columns x 4 units as two loads, two inserts and two stores make it, a register of A four units of
 * a row, broadcast. A sum then runs in four lanes, which are added at the end of the chunk. Packing costs 2 % at 16
 * rows (weights in L2). */

#include "cpu/kernels/x86/avx2.h"

enum { KBLOCK = 16, KMAJOR_STEP = FMOE_NB / 4 * KBLOCK }; /* bytes: of a block; of one step of 16 columns */

/* Four columns x one cache line, to four steps. Inserts into halves and stores of halves: a store of 64 bytes costs as
 * much as two of 32, and masked loads more than inserts. */
#define KMAJOR_MOVE(offset)                                                                                            \
    "vmovups " offset "(%[p]), %[x]\n\tvmovups " offset "(%[p],%[s],2), %[y]\n\t"                                      \
    "vinsertf32x4 $1, " offset "(%[p],%[s]), %t[x], %t[x]\n\tvinsertf32x4 $1, " offset "(%[p],%[t]), %t[y], %t[y]\n\t" \
    "vmovups %t[x], 16*" offset "(%[to])\n\tvmovups %t[y], 16*" offset "+32(%[to])\n\t"

/* The same from 16-bit elements, as f32: four columns x 8 k, to two steps, each a whole line before the next: two
 * stores that follow one another in a line are one on their way to L2. */
static inline __attribute__((always_inline)) void kmajor_widen(const int dtype, const char *p, int64_t step, char *to)
{
    __m256 out[4];
    widen_kblocks(dtype, p, step, out);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        _mm256_storeu_ps((float *)(void *)(to + i / 2 * KMAJOR_STEP + i % 2 * 2 * KBLOCK), out[i]);
}

/* `widen`: the type of 16-bit elements that become f32; 0: they are moved as they are. */
static inline __attribute__((always_inline)) void kmajor_piece(const int widen, fmoe_overlap *overlap)
{
    fmoe_walk *w = &overlap->pack;
    if (widen) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) kmajor_widen(widen, w->at + 16 * i, w->step, overlap->to + 2 * i * KMAJOR_STEP);
    } else {
        __m128 x, y;
        __asm__ volatile(KMAJOR_MOVE("0") KMAJOR_MOVE("16") KMAJOR_MOVE("32") KMAJOR_MOVE("48")
                         : [x] OUT_IN_PARTS(x), [y] OUT_IN_PARTS(y)
                         : [p] "r"(w->at), [s] "r"(w->step), [t] "r"(3 * w->step), [to] "r"(overlap->to)
                         : "memory");
    }
    overlap->to += 4 * KMAJOR_STEP;
    if (w->in_run == 1) /* the last of a run: on to the next four columns, or to the next sixteen */
        overlap->to += w->run % 4 < 3 ? 4 * KBLOCK - w->length * 4 * KMAJOR_STEP : -3 * 4 * KBLOCK;
    fmoe_walk_on(w);
}

static const int32_t kmajor_columns[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};

/* The order of columns in a sum, from memory: a register that held it all the time would be one too few for the
 * products, and one of theirs was moved in every step (5 % at 32 rows of f32). */
static inline __attribute__((always_inline)) __m512i kmajor_column_order(void)
{
    const int32_t *columns = kmajor_columns;
    __asm__ volatile("" : "+r"(columns));
    return _mm512_loadu_si512(columns);
}

/* acc[i][j]: columns 4j .. 4j+3 of 16, four lanes each. */
static inline __attribute__((always_inline)) __m512 kmajor_sum(const __m512 acc[4], __m512i in_order)
{
    const __m512d a = _mm512_castps_pd(
                      _mm512_add_ps(_mm512_unpacklo_ps(acc[0], acc[1]), _mm512_unpackhi_ps(acc[0], acc[1]))),
                  b = _mm512_castps_pd(
                      _mm512_add_ps(_mm512_unpacklo_ps(acc[2], acc[3]), _mm512_unpackhi_ps(acc[2], acc[3])));
    return _mm512_permutexvar_ps(in_order, _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                                         _mm512_castpd_ps(_mm512_unpackhi_pd(a, b))));
}

static inline __attribute__((always_inline)) void kmajor_store(const int mr, __m512 acc[FMOE_MR][4], float *c,
                                                               int64_t ldc, int first)
{
    const __m512i in_order = kmajor_column_order();
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        const __m512 sum = kmajor_sum(acc[i], in_order);
        float *to = c + i * ldc;
        _mm512_storeu_ps(to, first ? sum : _mm512_add_ps(_mm512_loadu_ps(to), sum));
    }
}

/* fmoe_prefetch in fewer instructions: `at` is the line itself, and nothing asks whether one is left (one too many does
 * no harm). At 8 to 16 rows a step has 16 to 24 multiply-adds, and up to two of these lines and half a piece with them:
 * a core that starts six instructions a cycle has none to spare. (In the loops of pairs, where gcc has two walks to
 * keep, it came out 2 % slower.) */
static inline __attribute__((always_inline)) void kmajor_prefetch(fmoe_walk *w)
{
    int64_t due = w->due + w->rate;
    for (; due >= 65536; due -= 65536) {
        if (w->into_l1) __builtin_prefetch(w->at, 0, 3);
        else __builtin_prefetch(w->at, 0, 2);
        w->at += w->step;
        if (++w->row < 8) continue;
        w->row = 0;
        w->at -= 8 * w->step;
        fmoe_walk_on(w);
    }
    w->due = due;
}

/* `bytes` of each row of A. What is seldom wanted is volatile: for want of registers a compiler keeps it in vector
 * registers, and moves it from there in every step. (This, and few instructions for what overlaps, are 6 % at 8 and at
 * 16 rows of bf16, 12 and 5 % of f32.) */
static inline __attribute__((always_inline)) void kmajor_tile(const int widen, const int mr, int64_t bytes,
                                                              const void *const *a, const char *b, float *c,
                                                              int64_t ldc, int first, fmoe_overlap *overlap,
                                                              int64_t tiles)
{
    const char *const volatile *row = (const char *const volatile *)a;
    const int64_t n = bytes / KBLOCK, pieces = fmoe_ceil_div(overlap->pack.left, tiles);
    const volatile int64_t apart = pieces > 0 ? fmoe_max(1, 4 * n / pieces) : INT64_MAX, next = overlap->next_rows;
    const char *const volatile *const volatile below = row + (tiles > 1 ? mr : 0);
    overlap->prefetch.rate = fmoe_prefetch_rate(&overlap->prefetch, tiles * 4 * n);
    const __mmask16 rest = (__mmask16)((1u << bytes % KBLOCK) - 1u);
    int64_t until = apart;
    const volatile bool prefetch_again = take_prefetch_again(overlap);
    for (int group = 0; group < 4; group++, c += 16) {
        __m512 acc[FMOE_MR][4];
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) acc[i][j] = _mm512_setzero_ps();
        }
        const volatile int64_t quarter = group * n * (KBLOCK / 4);
        int64_t offset = 0;
        for (int64_t k = 0; k < n; k++, b += KMAJOR_STEP, offset += KBLOCK) {
            kmajor_prefetch(&overlap->prefetch);
            if (prefetch_again) prefetch_again_at(b);
            if ((k & 15) < next) /* A of the next tile, a quarter of it */
                __builtin_prefetch(below[k & 15] + quarter + k / 16 * 64, 0, 3);
            const __m512 b0 = _mm512_loadu_ps(b), b1 = _mm512_loadu_ps(b + 64), b2 = _mm512_loadu_ps(b + 128),
                         b3 = _mm512_loadu_ps(b + 192);
#pragma GCC unroll 6
            for (int i = 0; i < mr; i++) {
                const __m512 ai = _mm512_broadcast_f32x4(_mm_loadu_ps((const float *)(const void *)(row[i] + offset)));
                acc[i][0] = DOT_UNITS(acc[i][0], ai, b0);
                acc[i][1] = DOT_UNITS(acc[i][1], ai, b1);
                acc[i][2] = DOT_UNITS(acc[i][2], ai, b2);
                acc[i][3] = DOT_UNITS(acc[i][3], ai, b3);
            }
            if (--until == 0) {
                until = apart;
                if (overlap->pack.left > 0) kmajor_piece(widen, overlap);
            }
        }
        if (rest) {
#pragma GCC unroll 6
            for (int i = 0; i < mr; i++) {
                const __m512 ai = _mm512_broadcast_f32x4(_mm_castsi128_ps(_mm_maskz_loadu_epi8(rest, row[i] + offset)));
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) acc[i][j] = DOT_UNITS(acc[i][j], ai, _mm512_loadu_ps(b + 64 * j));
            }
            b += KMAJOR_STEP;
        }
        kmajor_store(mr, acc, c, ldc, first);
    }
}

/* A whole chunk, or what there is of it. */
static inline void kmajor_pack(char *panel, int64_t bytes, int64_t col, const void *const *cols, int64_t n)
{
    const int64_t steps = fmoe_ceil_div(bytes, KBLOCK);
    for (int64_t j = 0; j < n; j++) {
        const int64_t at = col + j;
        char *to = panel + at / 16 * steps * KMAJOR_STEP + at % 16 * KBLOCK;
        for (int64_t k = 0; k < steps; k++, to += KMAJOR_STEP) {
            const int64_t left = bytes - k * KBLOCK;
            const __mmask16 m = (__mmask16)(left >= KBLOCK ? 0xffffu : (1u << left) - 1u);
            _mm_storeu_si128((__m128i *)(void *)to, _mm_maskz_loadu_epi8(m, (const char *)cols[j] + k * KBLOCK));
        }
    }
}
