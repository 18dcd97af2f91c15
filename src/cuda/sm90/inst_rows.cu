// SPDX-License-Identifier: Apache-2.0
// inst_rows.cu - products of rows that lie in order: down, dx, and those of a grouped matmul.
#include "gemm_rows.cuh"
#include "gemm_tokens.cuh"

template <class T> using RowsK = Config<T, 128, 256, 4, A_ROWS, B_KMAJOR, EPI_STORE>;
template <class T> using RowsN = Config<T, 128, 256, 4, A_ROWS, B_NMAJOR, EPI_STORE>;

template <class T> using TokensRowsK = TokenConfig<T, W_KMAJOR, false, TOK_STORE>;
template <class T> using TokensRowsN = TokenConfig<T, W_NMAJOR, false, TOK_STORE>;

template <class T> static cudaError_t setup()
{
    cudaError_t e = sm90_setup_one<RowsK<T>>();
    if (e == cudaSuccess) e = tokens_setup_one<TokensRowsK<T>>();
    if (e == cudaSuccess) e = tokens_setup_one<TokensRowsN<T>>();
    return e == cudaSuccess ? sm90_setup_one<RowsN<T>>() : e;
}

template <class T> static cudaError_t launch(Sm90Product product, Sm90Args &a, int sms, cudaStream_t s)
{
    if (a.tokens) return product == SM90_ROWS_K ? tokens_launch_one<TokensRowsK<T>>(a, sms, s) : tokens_launch_one<TokensRowsN<T>>(a, sms, s);
    if (product == SM90_ROWS_K) return sm90_launch_one<RowsK<T>>(a, sms, s);
    return sm90_launch_one<RowsN<T>>(a, sms, s);
}

cudaError_t sm90_setup_rows()
{
    const cudaError_t e = setup<bf16>();
    return e == cudaSuccess ? setup<f16>() : e;
}

cudaError_t sm90_launch_rows(Sm90Product product, int dtype, Sm90Args &a, int sms, cudaStream_t s)
{
    return dtype == FMOE_BF16 ? launch<bf16>(product, a, sms, s) : launch<f16>(product, a, sms, s);
}
