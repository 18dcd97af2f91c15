/* SPDX-License-Identifier: Apache-2.0
 *
 * gemm_avx512.c - f32 products on AVX-512: 6 x 64 register tiles (tile_avx512.h), and the packing of panels.
 *
 * Per k: 4 loads of B, 6 broadcasts, 24 multiply-adds: the loads fit beside the multiply-adds on every AVX-512 core,
 * with B streaming from L2. Rows are split evenly over tiles (8 rows: 4 + 4, not 6 + 2). */
#include <immintrin.h>

#include "cpu/kernels/kernels.h"
#include "cpu/kernels/x86/pack_avx512.h"
#include "util.h"

/* One loader per storage type, 16 elements or the first n of them. */

static inline __m512 load16_f32(const void *p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }

static inline __m512 load16_bf16(const void *p, __mmask16 m)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
}

static inline __m512 load16_f16(const void *p, __mmask16 m) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, p)); }

/* ---- pieces of the next panel ---- */

#define PIECE_NMAJOR(type, element_bytes)                                                                              \
    _Pragma("GCC unroll 2") for (int part = 0; part < 2; part++)                                                       \
    {                                                                                                                  \
        const char *from = p + part * step, *other = piece_other(overlap) + part * step;                               \
        float *to = (float *)(void *)(piece_at(overlap) + part * PANEL_ROW);                                           \
        _mm512_storeu_ps(to, load16_##type(from, 0xffff));                                                             \
        _mm512_storeu_ps(to + 16, load16_##type(from + 16 * element_bytes, 0xffff));                                   \
        _mm512_storeu_ps(to + 32, load16_##type(other, 0xffff));                                                       \
        _mm512_storeu_ps(to + 48, load16_##type(other + 16 * element_bytes, 0xffff));                                  \
    }

#define DOT_UNITS(acc, a, b) _mm512_fmadd_ps(a, b, acc)
#include "cpu/kernels/x86/kmajor_avx512.h"
#include "cpu/kernels/x86/kmajor_few_rows_avx512.h"

/* Forms of a tile: one would have to hold all the addresses of these pieces in too few registers. KMAJOR: plus the type
 * of what is widened as it is packed. */
enum { PLAIN, WIDENING, KMAJOR };

static inline __attribute__((always_inline)) void tile_piece(const int form, fmoe_overlap *overlap)
{
    const char *p = overlap->pack.at;
    const int64_t step = overlap->pack.step;
    if (form == PLAIN) PIECE_NMAJOR(f32, 4)
    else if (overlap->dtype == FMOE_BF16) PIECE_NMAJOR(bf16, 2)
    else PIECE_NMAJOR(f16, 2)
    fmoe_walk_on(&overlap->pack);
}

enum { UNIT = 1 };

static inline __m512 tile_unit(const char *a, bool whole)
{
    (void)whole;
    return _mm512_set1_ps(*(const float *)(const void *)a);
}

#include "cpu/kernels/x86/tile_avx512.h"

static inline void nmajor_load(const char *w, int64_t step, bool whole, __m512 b[4])
{
    (void)step;
    (void)whole;
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) b[j] = _mm512_loadu_ps(w + 64 * j);
}

#include "cpu/kernels/x86/nmajor_inplace_avx512.h"
#include "cpu/kernels/x86/intel_avx512.h"

void fmoe_gemm_nmajor_inplace_f32_avx512(int64_t rows, int64_t kc, const void *const *a, const void *w, int64_t w_step,
                                         void *panel, float *c, int64_t ldc, int first, fmoe_overlap *overlap)
{
    if (nmajor_batched_pays(overlap, rows)) {
        nmajor_batched(rows, kc, a, w, w_step, panel, c, ldc, first, overlap);
        return;
    }
    const int64_t done = NAME(nmajor_first_tile)(rows, kc, a, w, w_step, panel, c, ldc, first, overlap);
    run_tiles(PLAIN, rows - done, kc, a + done, 4, panel, c + done * ldc, ldc, first, overlap, 1);
}

void fmoe_gemm_f32_avx512(int64_t rows, int64_t kc, const void *const *a, int64_t a_step, const void *panel, float *c,
                          int64_t ldc, int first, fmoe_overlap *overlap)
{
    if (overlap->pack.left == 0 || overlap->dtype == FMOE_F32) {
        run_tiles(PLAIN, rows, kc, a, a_step, panel, c, ldc, first, overlap, 1);
        while (overlap->pack.left > 0) tile_piece(PLAIN, overlap);
    } else {
        run_tiles(WIDENING, rows, kc, a, a_step, panel, c, ldc, first, overlap, 1);
        while (overlap->pack.left > 0) tile_piece(WIDENING, overlap);
    }
}

static inline __attribute__((always_inline)) void multiply_kmajor(const int widen, int64_t rows, int64_t kc,
                                                                  const void *const *a, const float *panel, float *c,
                                                                  int64_t ldc, int first, fmoe_overlap *overlap)
{
    if (overlap->batched && kc % (4 * BATCH) == 0)
        kmajor_batched(widen, rows, kc * 4, a, (const char *)panel, c, ldc, first, overlap);
    else run_tiles(KMAJOR + widen, rows, kc * 4, a, 4, panel, c, ldc, first, overlap, 1);
    while (overlap->pack.left > 0) kmajor_piece(widen, overlap);
}

void fmoe_gemm_kmajor_f32_avx512(int64_t rows, int64_t kc, const void *const *a, int64_t a_step, const void *panel,
                                 float *c, int64_t ldc, int first, fmoe_overlap *overlap)
{
    (void)a_step;
    if (overlap->pack.left == 0 || overlap->dtype == FMOE_F32)
        multiply_kmajor(0, rows, kc, a, panel, c, ldc, first, overlap);
    else if (overlap->dtype == FMOE_BF16) multiply_kmajor(FMOE_BF16, rows, kc, a, panel, c, ldc, first, overlap);
    else multiply_kmajor(FMOE_F16, rows, kc, a, panel, c, ldc, first, overlap);
}

/* ---- packing ---- */

void fmoe_gemm_kmajor_few_rows_f32_avx512(int64_t rows, int64_t kc, int64_t chunk, const void *const *a, const char *w,
                                          int64_t step, float *c, int64_t ldc, int first, fmoe_walk *prefetch)
{
    NAME(few_rows_multiply)(rows, kc * 4, chunk * 4, a, w, step, c, ldc, first, prefetch);
}

void fmoe_pack_kmajor_f32_avx512(void *panel, int64_t kc, int64_t col, const void *const *cols, int64_t n)
{
    kmajor_pack(panel, kc * 4, col, cols, n);
}

/* Four k of a column at a time. */
#define DEFINE_PACK_KMAJOR_WIDEN(type)                                                                                 \
    void fmoe_pack_kmajor_widen_##type##_avx512(void *panel, int64_t kc, int64_t col, const void *const *cols,         \
                                                int64_t n)                                                             \
    {                                                                                                                  \
        const int64_t steps = fmoe_ceil_div(kc, 4);                                                                    \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            char *to = (char *)panel + (col + j) / 16 * steps * KMAJOR_STEP + (col + j) % 16 * KBLOCK;                 \
            for (int64_t k = 0; k < steps; k++, to += KMAJOR_STEP) {                                                   \
                const __m512 x = load16_##type((const char *)cols[j] + 8 * k, first_n(fmoe_min(4, kc - 4 * k)));       \
                _mm_storeu_ps((float *)(void *)to, _mm512_castps512_ps128(x));                                         \
            }                                                                                                          \
        }                                                                                                              \
    }

DEFINE_PACK_KMAJOR_WIDEN(bf16)
DEFINE_PACK_KMAJOR_WIDEN(f16)

#define DEFINE_PACK(type, element_bytes)                                                                               \
    void fmoe_pack_nmajor_##type##_avx512(void *panel, int64_t kc, int64_t col, const void *const *rows, int64_t n)    \
    {                                                                                                                  \
        for (int64_t k = 0; k < kc; k++) {                                                                             \
            float *dst = (float *)panel + k * FMOE_NB + col;                                                           \
            if (k + PACK_AHEAD < kc) prefetch_row(rows[k + PACK_AHEAD], n *element_bytes);                             \
            prefetch_right(rows[k], n *element_bytes);                                                                 \
            for (int64_t j = 0; j < n; j += 16) {                                                                      \
                const __mmask16 m = first_n(n - j);                                                                    \
                _mm512_mask_storeu_ps(dst + j, m, load16_##type((const char *)rows[k] + j * element_bytes, m));        \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    void fmoe_pack_transposed_##type##_avx512(void *panel, int64_t kc, int64_t col, const void *const *cols,           \
                                              int64_t n)                                                               \
    {                                                                                                                  \
        for (int64_t j0 = 0; j0 < n; j0 += 16) {                                                                       \
            const int64_t nj = fmoe_min(16, n - j0);                                                                   \
            for (int64_t k0 = 0; k0 < kc; k0 += 16) {                                                                  \
                const __mmask16 m = first_n(kc - k0);                                                                  \
                __m512 r[16];                                                                                          \
                _Pragma("GCC unroll 16") for (int j = 0; j < 16; j++) r[j] =                                           \
                    j < nj ? load16_##type((const char *)cols[j0 + j] + k0 * element_bytes, m) : _mm512_setzero_ps();  \
                prefetch_cols(cols, j0, n, k0 *element_bytes, kc *element_bytes);                                      \
                transpose16(r);                                                                                        \
                float *dst = (float *)panel + k0 * FMOE_NB + col + j0;                                                 \
                const int64_t nk = fmoe_min(16, kc - k0);                                                              \
                const __mmask16 mj = first_n(nj);                                                                      \
                if (nk == 16) {                                                                                        \
                    _Pragma("GCC unroll 16") for (int k = 0; k < 16; k++)                                              \
                        _mm512_mask_storeu_ps(dst + k * FMOE_NB, mj, r[k]);                                            \
                } else {                                                                                               \
                    for (int64_t k = 0; k < nk; k++) _mm512_mask_storeu_ps(dst + k * FMOE_NB, mj, r[k]);               \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

DEFINE_PACK(f32, 4)
DEFINE_PACK(bf16, 2)
DEFINE_PACK(f16, 2)

/* 24 independent chains of multiply-adds: more than latency times ports on any AVX-512 core. */
double fmoe_peak_f32_avx512(int64_t rounds)
{
    __m512 acc[24];
    for (int i = 0; i < 24; i++) acc[i] = _mm512_set1_ps((float)i);
    __m512 x = _mm512_set1_ps(0.9999f), y = _mm512_set1_ps(1e-4f);
    for (int64_t r = 0; r < rounds; r++) {
        __asm__ volatile("" : "+v"(x), "+v"(y));
#pragma GCC unroll 24
        for (int i = 0; i < 24; i++) acc[i] = _mm512_fmadd_ps(acc[i], x, y);
    }
    for (int i = 1; i < 24; i++) acc[0] = _mm512_add_ps(acc[0], acc[i]);
    volatile float sink = _mm512_reduce_add_ps(acc[0]);
    (void)sink;
    return (double)rounds * 24 * 16 * 2;
}
