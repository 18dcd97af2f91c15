// SPDX-License-Identifier: Apache-2.0
// kernels.cuh - the table of Hopper kernels: one line each, for bf16 and for f16. Four lists, which inst_*.cu compile,
// a file each: one compiler takes minutes for all of them.
//
// Config is gemm_rows.cuh, rows on the M side: rows and columns of a tile, stages of the ring, where A and B come from,
// epilogue. TokenConfig is gemm_tokens.cuh, tokens on the N side, for few rows an expert: where the weights come from,
// whether rows are gathered, epilogue.
#pragma once
#include "gemm_rows.cuh"
#include "gemm_tokens.cuh"

// Gathered rows: up with its activation, and the plain products.
#define SM90_GATHER_KERNELS(X)                                                                                         \
    X(SM90_UP_SMOOTH, Config, 128, 256, 4, A_GATHER, B_GLU, EPI_GLU)                                                   \
    X(SM90_UP_GLU_N, Config, 128, 256, 4, A_GATHER, B_GLU_N, EPI_GLU)                                                  \
    X(SM90_UP_PAIRS, Config, 128, 256, 4, A_GATHER, B_PAIRS_N, EPI_GLU)                                                \
    X(SM90_UP_SMOOTH, TokenConfig, W_GLU, true, TOK_SMOOTH)                                                            \
    X(SM90_UP_GLU, TokenConfig, W_KMAJOR, true, TOK_GLU)                                                               \
    X(SM90_UP_GLU_N, TokenConfig, W_NMAJOR, true, TOK_GLU)                                                             \
    X(SM90_UP_ACT, TokenConfig, W_KMAJOR, true, TOK_ACT)                                                               \
    X(SM90_GATHER_K, TokenConfig, W_KMAJOR, true, TOK_STORE)                                                           \
    X(SM90_GATHER_N, TokenConfig, W_NMAJOR, true, TOK_STORE)

// Rows that lie in order: down, dx, and those of a grouped matmul.
#define SM90_ROWS_KERNELS(X)                                                                                           \
    X(SM90_ROWS_K, Config, 128, 256, 4, A_ROWS, B_KMAJOR, EPI_STORE)                                                   \
    X(SM90_ROWS_N, Config, 128, 256, 4, A_ROWS, B_NMAJOR, EPI_STORE)                                                   \
    X(SM90_ROWS_K, TokenConfig, W_KMAJOR, false, TOK_STORE)                                                            \
    X(SM90_ROWS_N, TokenConfig, W_NMAJOR, false, TOK_STORE)

// The fused backward: dout . W2, the slope of the activation, p*a and dp. 256 columns do not fit the registers of 512
// threads.
#define SM90_DH_KERNELS(X)                                                                                             \
    X(SM90_DH_192, Config, 128, 192, 4, A_GATHER, B_NMAJOR, EPI_DGLU)                                                  \
    X(SM90_DH_128, Config, 128, 128, 6, A_GATHER, B_NMAJOR, EPI_DGLU)                                                  \
    X(SM90_DH_192_K, Config, 128, 192, 4, A_GATHER, B_KMAJOR, EPI_DGLU)                                                \
    X(SM90_DH_128_K, Config, 128, 128, 6, A_GATHER, B_KMAJOR, EPI_DGLU)

// Weight gradients: the contraction runs over the rows of an expert, one side gathered; or (grouped matmul) neither.
// 128 x 256 reads shared memory at its full rate, 256 x 128 would ask for 12 % more.
#define SM90_WGRAD_KERNELS(X)                                                                                          \
    X(SM90_WGRAD_GATHER_A, Config, 128, 256, 4, A_T_GATHER, B_T, EPI_STORE)                                            \
    X(SM90_WGRAD_GATHER_B, Config, 128, 256, 4, A_T, B_T_GATHER, EPI_STORE)                                            \
    X(SM90_WGRAD_ROWS, Config, 128, 256, 4, A_T, B_T, EPI_STORE)                                                       \
    X(SM90_WGRAD_GATHER_A, Config, 128, 256, 4, A_T_GATHER, B_T, EPI_STORE_F32)                                        \
    X(SM90_WGRAD_GATHER_B, Config, 128, 256, 4, A_T, B_T_GATHER, EPI_STORE_F32)                                        \
    X(SM90_WGRAD_ROWS, Config, 128, 256, 4, A_T, B_T, EPI_STORE_F32)

template <class C> static Sm90Entry sm90_entry(Sm90Kernel kernel)
{
    static_assert(C::SMEM <= SM90_MAX_SMEM, "too much shared memory");
    Sm90Entry e = {
        kernel, std::is_same_v<typename C::T, bf16> ? FMOE_BF16 : FMOE_F16, C::F32, C::TOKENS, nullptr, C::THREADS,
        C::SMEM};
    if constexpr (C::TOKENS) e.function = tokens_sm90_kernel<C>;
    else {
        static_assert(C::B > B_GLU || C::BN / C::BOXES == (C::EPI_WG ? SM90_BOX_ACT : SM90_BOX),
                      "boxes of weights are not those of the maps");
        e.function = gemm_sm90_kernel<C>;
    }
    return e;
}

// Defines a part of the table: SM90_TABLE(sm90_rows, SM90_ROWS_KERNELS)
#define SM90_ENTRY_BF16(kernel, family, ...) sm90_entry<family<bf16, __VA_ARGS__>>(kernel),
#define SM90_ENTRY_F16(kernel, family, ...) sm90_entry<family<f16, __VA_ARGS__>>(kernel),
#define SM90_TABLE(name, list)                                                                                         \
    extern const Sm90Entry name[];                                                                                     \
    const Sm90Entry name[] = {list(SM90_ENTRY_BF16) list(SM90_ENTRY_F16) Sm90Entry{}}
