// SPDX-License-Identifier: Apache-2.0
// inst_gather.cu - products of gathered rows: up with its activation, and the plain ones.
#include "gemm_rows.cuh"
#include "gemm_tokens.cuh"

template <class T> using UpGlu = Config<T, 128, 256, 4, A_GATHER, B_GLU, EPI_GLU>;
template <class T> using UpGluN = Config<T, 128, 256, 4, A_GATHER, B_GLU_N, EPI_GLU>;
template <class T> using UpPairs = Config<T, 128, 256, 4, A_GATHER, B_PAIRS_N, EPI_GLU>;
template <class T> using TokensUpSmooth = TokenConfig<T, W_GLU, true, TOK_SMOOTH>;
template <class T> using TokensUpGlu = TokenConfig<T, W_KMAJOR, true, TOK_GLU>;
template <class T> using TokensUpGluN = TokenConfig<T, W_NMAJOR, true, TOK_GLU>;
template <class T> using TokensUpAct = TokenConfig<T, W_KMAJOR, true, TOK_ACT>;
template <class T> using TokensGatherK = TokenConfig<T, W_KMAJOR, true, TOK_STORE>;
template <class T> using TokensGatherN = TokenConfig<T, W_NMAJOR, true, TOK_STORE>;

template <class T> static cudaError_t setup()
{
    cudaError_t e = sm90_setup_one<UpGlu<T>>();
    if (e == cudaSuccess) e = sm90_setup_one<UpGluN<T>>();
    if (e == cudaSuccess) e = sm90_setup_one<UpPairs<T>>();
    if (e == cudaSuccess) e = tokens_setup_one<TokensUpSmooth<T>>();
    if (e == cudaSuccess) e = tokens_setup_one<TokensUpGlu<T>>();
    if (e == cudaSuccess) e = tokens_setup_one<TokensUpGluN<T>>();
    if (e == cudaSuccess) e = tokens_setup_one<TokensUpAct<T>>();
    if (e == cudaSuccess) e = tokens_setup_one<TokensGatherK<T>>();
    return e == cudaSuccess ? tokens_setup_one<TokensGatherN<T>>() : e;
}

template <class T> static cudaError_t launch(Sm90Product product, Sm90Args &a, int sms, cudaStream_t s)
{
    if (product == SM90_UP_SMOOTH) return a.tokens ? tokens_launch_one<TokensUpSmooth<T>>(a, sms, s) : sm90_launch_one<UpGlu<T>>(a, sms, s);
    if (product == SM90_UP_GLU) return tokens_launch_one<TokensUpGlu<T>>(a, sms, s);
    if (product == SM90_UP_GLU_N) return a.tokens ? tokens_launch_one<TokensUpGluN<T>>(a, sms, s) : sm90_launch_one<UpGluN<T>>(a, sms, s);
    if (product == SM90_UP_PAIRS) return sm90_launch_one<UpPairs<T>>(a, sms, s);
    if (product == SM90_UP_ACT) return tokens_launch_one<TokensUpAct<T>>(a, sms, s);
    if (product == SM90_GATHER_K) return tokens_launch_one<TokensGatherK<T>>(a, sms, s);
    return tokens_launch_one<TokensGatherN<T>>(a, sms, s);
}

cudaError_t sm90_setup_gather()
{
    const cudaError_t e = setup<bf16>();
    return e == cudaSuccess ? setup<f16>() : e;
}

cudaError_t sm90_launch_gather(Sm90Product product, int dtype, Sm90Args &a, int sms, cudaStream_t s)
{
    return dtype == FMOE_BF16 ? launch<bf16>(product, a, sms, s) : launch<f16>(product, a, sms, s);
}
