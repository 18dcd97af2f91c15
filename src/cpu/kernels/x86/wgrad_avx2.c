/* SPDX-License-Identifier: Apache-2.0
 *
 * wgrad_avx2.c - blocks of a weight gradient on AVX2 + FMA, from two packed panels to memory: the 6 x 16 tile of
 * gemm_avx2.c, whose rows are adjacent columns of a panel here. Sums of f32 leave the registers by nontemporal stores,
 * a line each; in 16 bits a tile has half a line, so they wait in L1 for the other columns of their rows. */
#include <immintrin.h>

#include "cpu/kernels/kernels.h"
#include "util.h"

enum { NR = 16 }; /* columns of a strip, of either panel */

/* 16 columns of mr rows: to lines of memory, or to rows that are read again soon. */
static inline __attribute__((always_inline)) void tile(const int mr, const bool nontemporal, int64_t kc, const float *a,
                                                       const float *b, const float *c, float *to, int64_t stride)
{
    __m256 acc[FMOE_MR][2];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) acc[i][0] = acc[i][1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < kc; k++, a += NR, b += NR) {
        const __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            const __m256 ai = _mm256_broadcast_ss(a + i);
            acc[i][0] = _mm256_fmadd_ps(ai, b0, acc[i][0]);
            acc[i][1] = _mm256_fmadd_ps(ai, b1, acc[i][1]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            if (c) acc[i][j] = _mm256_add_ps(_mm256_loadu_ps(c + i * FMOE_NB + 8 * j), acc[i][j]);
            if (nontemporal) _mm256_stream_ps(to + i * stride + 8 * j, acc[i][j]);
            else _mm256_storeu_ps(to + i * stride + 8 * j, acc[i][j]);
        }
}

static inline __attribute__((always_inline)) void any_tile(int64_t mr, const bool nontemporal, int64_t kc,
                                                           const float *a, const float *b, const float *c, float *to,
                                                           int64_t stride)
{
    switch (mr) {
    case 1: tile(1, nontemporal, kc, a, b, c, to, stride); break;
    case 2: tile(2, nontemporal, kc, a, b, c, to, stride); break;
    case 3: tile(3, nontemporal, kc, a, b, c, to, stride); break;
    case 4: tile(4, nontemporal, kc, a, b, c, to, stride); break;
    case 5: tile(5, nontemporal, kc, a, b, c, to, stride); break;
    default: tile(6, nontemporal, kc, a, b, c, to, stride); break;
    }
}

/* Lines of what is packed next, a share of them prefetched before each tile. */
typedef struct lines {
    const fmoe_prefetch_rows *of;
    int64_t at, all, share;
} lines;

static inline void prefetch_share(lines *l)
{
    enum { LINES = FMOE_NB * 4 / 64 }; /* of a row's 64 columns */
    for (const int64_t end = fmoe_min(l->all, l->at + l->share); l->at < end; l->at++)
        _mm_prefetch((const char *)l->of->rows[l->at / LINES] + l->of->offset + l->at % LINES * 64, _MM_HINT_T1);
}

void fmoe_wgrad_f32_avx2(int64_t m, int64_t kc, const void *left, const void *panel, const float *c, void *dst,
                         int64_t stride, int dtype, const fmoe_prefetch_rows *ahead)
{
    fmoe_store_block_fn *const store = dtype == FMOE_BF16 ? fmoe_store_block_bf16_avx2 : fmoe_store_block_f16_avx2;
    const int64_t element = (int64_t)fmoe_dtype_size(dtype), tiles = fmoe_ceil_div(m, NR) * 3 * (FMOE_NB / NR);
    const float *a = left, *const b = panel;
    float sums[FMOE_MR * FMOE_NB];
    lines l = {.of = ahead, .all = ahead ? ahead->n * (FMOE_NB * 4 / 64) : 0};
    l.share = fmoe_ceil_div(l.all, tiles);
    for (int64_t i = 0; i < m; i += NR, a += kc * NR) { /* a strip of 16 rows, in even parts: 6, 5, 5 */
        int64_t rows = fmoe_min(NR, m - i);
        const float *of_tile = a;
        for (int64_t parts = fmoe_ceil_div(rows, FMOE_MR); parts > 0; parts--) {
            const int64_t mr = fmoe_ceil_div(rows, parts);
            for (int64_t n = 0; n < FMOE_NB; n += NR) {
                const float *const before = c ? c + n : NULL;
                prefetch_share(&l);
                if (dtype == FMOE_F32) any_tile(mr, true, kc, of_tile, b + n * kc, before, (float *)dst + n, stride);
                else any_tile(mr, false, kc, of_tile, b + n * kc, before, sums + n, FMOE_NB);
            }
            if (dtype != FMOE_F32) store(dst, stride, sums, mr, FMOE_NB, true);
            rows -= mr;
            of_tile += mr;
            dst = (char *)dst + mr * stride * element;
            if (c) c += mr * FMOE_NB;
        }
    }
}
