/* SPDX-License-Identifier: Apache-2.0
 * check_kernels.h - the checks of single kernels (check_gemm.c, check_amx.c, check_rows.c). */
#ifndef FMOE_CHECK_KERNELS_H
#define FMOE_CHECK_KERNELS_H

#include "check.h"

typedef void check_draw_fn(const check_kernel *k, int64_t index);
typedef void check_bench_fn(const check_kernel *k, const fmoe_kernels *table, int64_t *items, double *flops);

check_draw_fn check_gemm, check_gemm_kmajor_few_rows, check_gemm_nmajor_inplace, check_wgrad, check_pack, check_load,
    check_store, check_round, check_store_block, check_act_block, check_act_backward, check_add_rows, check_axpy,
    check_dot, check_softmax, check_peak, check_pack_wgrad_left, check_pack_tiles, check_gemm_inplace, check_dequant,
    check_gemm_coded_few_rows;
check_bench_fn bench_gemm, bench_gemm_nmajor_inplace, bench_wgrad, bench_gemm_inplace, bench_pack, bench_convert,
    bench_round, bench_store_block, bench_act, bench_sum, bench_softmax, bench_dequant;

/* A sum over kc products as TDPBF16PS forms it, one rounding at a time (see src/cpu/amx.h). */
float check_amx_sum(int64_t kc, const uint16_t *a, const uint16_t *b);

/* The kernel's pointer in a table, as its own type. */
#define CHECK_KERNEL_FN(name, type, k, table)                                                                          \
    type *name;                                                                                                        \
    memcpy(&name, (const char *)(table) + (k)->offset, sizeof name)

/* The operands of a benchmark, once: memory that nobody has written is one page of zeros, many times over, and no cache
 * is used to that (gemm_f32_avx2: 61 % of the ceiling instead of 99). */
#define BENCH_FILL(array)                                                                                              \
    do {                                                                                                               \
        if (!*(const char *)(array)) memset(array, 0x3c, sizeof(array)); /* 0.0115 in f32 and in bf16 */               \
    } while (0)

#endif
