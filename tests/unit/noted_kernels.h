/* SPDX-License-Identifier: Apache-2.0
 *
 * noted_kernels.h - every pointer of a plan's kernel table is replaced by a function that notes its slot and goes on to
 * the kernel. No kernel is called but through the table. */
#ifndef FMOE_NOTED_KERNELS_H
#define FMOE_NOTED_KERNELS_H

#include <stdatomic.h>

#include "cpu/ops/ops.h"
#include "plan.h"

#define BIT(field) ((uint64_t)1 << FMOE_SLOT_##field)

static fmoe_kernels real;
static _Atomic uint64_t called;

#define ARGS_gemm                                                                                                      \
    (int64_t r, int64_t kc, const void *const *a, int64_t s, const void *p, float *c, int64_t l, int f, fmoe_overlap *o)
#define PASS_gemm (r, kc, a, s, p, c, l, f, o)
#define ARGS_gemm_kmajor_few_rows                                                                                      \
    (int64_t r, int64_t kc, int64_t n, const void *const *a, const char *w, int64_t s, float *c, int64_t l, int f,     \
     fmoe_walk *p)
#define PASS_gemm_kmajor_few_rows (r, kc, n, a, w, s, c, l, f, p)
#define ARGS_gemm_nmajor_inplace                                                                                       \
    (int64_t r, int64_t kc, const void *const *a, const void *w, int64_t s, void *p, float *c, int64_t l, int f,       \
     fmoe_overlap *o)
#define PASS_gemm_nmajor_inplace (r, kc, a, w, s, p, c, l, f, o)
#define ARGS_pack (void *p, int64_t kc, int64_t col, const void *const *a, int64_t n)
#define PASS_pack (p, kc, col, a, n)
#define ARGS_wgrad                                                                                                     \
    (int64_t m, int64_t kc, const void *l, const void *p, const float *c, void *d, int64_t s, int t,                   \
     const fmoe_prefetch_rows *a)
#define PASS_wgrad (m, kc, l, p, c, d, s, t, a)
#define ARGS_pack_wgrad_left (void *d, int64_t kc, const void *const *r, int64_t n)
#define PASS_pack_wgrad_left (d, kc, r, n)
#define ARGS_pack_tiles (void *t, int64_t K, const void *const *r, int64_t n)
#define PASS_pack_tiles (t, K, r, n)
#define ARGS_gemm_inplace                                                                                              \
    (int64_t r, int64_t K, const void *t, const void *w, int64_t s, int64_t n, float *c, int64_t l, const void *x)
#define PASS_gemm_inplace (r, K, t, w, s, n, c, l, x)
#define ARGS_load (float *d, const void *s, int64_t n)
#define PASS_load (d, s, n)
#define ARGS_store (void *d, const float *s, int64_t n)
#define PASS_store (d, s, n)
#define ARGS_round (float *x, const float *b, int64_t n)
#define PASS_round (x, b, n)
#define ARGS_store_block (void *d, int64_t s, const float *c, int64_t m, int64_t n, bool t)
#define PASS_store_block (d, s, c, m, n, t)
#define ARGS_act_block                                                                                                 \
    (const fmoe_act_params *p, const float *g, const float *u, int64_t m, int64_t n, void *a, int64_t s, int t)
#define PASS_act_block (p, g, u, m, n, a, s, t)
#define ARGS_act_backward (const fmoe_act_params *p, const fmoe_act_rows *r)
#define PASS_act_backward (p, r)
#define ARGS_add_rows (float *s, const int64_t *t, int64_t f, const float *p, const float *c, int64_t r, int64_t n)
#define PASS_add_rows (s, t, f, p, c, r, n)
#define ARGS_axpy (float *y, float s, const float *x, int64_t n)
#define PASS_axpy (y, s, x, n)
#define ARGS_dot (const float *x, const float *y, int64_t n)
#define PASS_dot (x, y, n)
#define ARGS_dequant                                                                                                   \
    (void *dst, int64_t apart, int dtype, const fmoe_coded *m, int64_t row, int64_t rows, int64_t k0, int64_t n)
#define PASS_dequant (dst, apart, dtype, m, row, rows, k0, n)
#define RETURN_dequant
#define RESULT_dequant void
#define ARGS_gemm_coded_few_rows                                                                                       \
    (int64_t rows, int64_t k0, int64_t kc, int64_t chunk, const void *const *a, const fmoe_coded *m, int64_t row,      \
     float *c, int64_t ldc, int first, const fmoe_coded *then, int64_t then_row)
#define PASS_gemm_coded_few_rows (rows, k0, kc, chunk, a, m, row, c, ldc, first, then, then_row)
#define RETURN_gemm_coded_few_rows
#define RESULT_gemm_coded_few_rows void
#define ARGS_softmax (double *x, int64_t n)
#define PASS_softmax (x, n)
#define ARGS_peak (int64_t n)
#define PASS_peak (n)
/* What comes before the call: the kernels of two types return something. */
#define RETURN_gemm
#define RESULT_gemm void
#define RETURN_gemm_kmajor_few_rows
#define RESULT_gemm_kmajor_few_rows void
#define RETURN_gemm_nmajor_inplace
#define RESULT_gemm_nmajor_inplace void
#define RETURN_pack
#define RESULT_pack void
#define RETURN_wgrad
#define RESULT_wgrad void
#define RETURN_pack_wgrad_left
#define RESULT_pack_wgrad_left void
#define RETURN_pack_tiles
#define RESULT_pack_tiles void
#define RETURN_gemm_inplace
#define RESULT_gemm_inplace void
#define RETURN_load
#define RESULT_load void
#define RETURN_store
#define RESULT_store void
#define RETURN_round
#define RESULT_round void
#define RETURN_store_block
#define RESULT_store_block void
#define RETURN_act_block
#define RESULT_act_block void
#define RETURN_act_backward
#define RESULT_act_backward void
#define RETURN_add_rows
#define RESULT_add_rows void
#define RETURN_axpy
#define RESULT_axpy void
#define RETURN_softmax
#define RESULT_softmax void
#define RETURN_dot return
#define RESULT_dot float
#define RETURN_peak return
#define RESULT_peak double

#define FMOE_KERNEL(level, type, field)
#define FMOE_KERNEL_FIELD(type, field)                                                                                 \
    static RESULT_##type noted_##field ARGS_##type                                                                     \
    {                                                                                                                  \
        atomic_fetch_or(&called, BIT(field));                                                                          \
        RETURN_##type real.field PASS_##type;                                                                          \
    }
#include "cpu/kernels/kernels.inc"

static void note_calls_of(const fmoe_plan_impl *p)
{
    for (int i = 0; i < PART_COUNT; i++)
        if (p->part[i]) note_calls_of(p->part[i]);
    if (!p->priv) return;
    fmoe_kernels *k = &((fmoe_cpu_plan *)p->priv)->k;
    real = *k;
#define FMOE_KERNEL(level, type, field)
#define FMOE_KERNEL_FIELD(type, field)                                                                                 \
    if (k->field) k->field = noted_##field;
#include "cpu/kernels/kernels.inc"
}

#endif
