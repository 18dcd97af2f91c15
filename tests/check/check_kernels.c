/* SPDX-License-Identifier: Apache-2.0
 * check_kernels.c - which check belongs to which type of kernel. */
#include "check_kernels.h"

const check_kernel_case check_kernel_cases[] = {
    {"gemm", check_gemm, bench_gemm, 40},
    {"gemm_kmajor_few_rows", check_gemm_kmajor_few_rows, NULL, 40},
    {"gemm_coded_few_rows", check_gemm_coded_few_rows, NULL, 40},
    {"gemm_nmajor_inplace", check_gemm_nmajor_inplace, bench_gemm_nmajor_inplace, 40},
    {"wgrad", check_wgrad, bench_wgrad, 40},
    {"pack", check_pack, bench_pack, 30},
    {"pack_wgrad_left", check_pack_wgrad_left, NULL, 30},
    {"pack_tiles", check_pack_tiles, NULL, 30},
    {"gemm_inplace", check_gemm_inplace, bench_gemm_inplace, 40},
    {"dequant", check_dequant, bench_dequant, 35},
    {"load", check_load, bench_convert, 20},
    {"store", check_store, bench_convert, 20},
    {"round", check_round, bench_round, 20},
    {"store_block", check_store_block, bench_store_block, 30},
    {"act_block", check_act_block, bench_act, 48},
    {"act_backward", check_act_backward, bench_act, 48},
    {"add_rows", check_add_rows, bench_sum, 20},
    {"axpy", check_axpy, bench_sum, 20},
    {"dot", check_dot, bench_sum, 20},
    {"softmax", check_softmax, bench_softmax, 30},
    {"peak", check_peak, NULL, 1},
    {NULL, NULL, NULL, 0},
};
