// SPDX-License-Identifier: Apache-2.0
// inst_wgrad.cu - weight gradients: the contraction runs over the rows of an expert, one side gathered; or (grouped matmul) neither.
// 128 x 256 reads shared memory at its full rate, 256 x 128 would ask for 12 % more.
#include "gemm_rows.cuh"

template <class T, Epilogue EPI> using GatherA = Config<T, 128, 256, 4, A_T_GATHER, B_T, EPI>;
template <class T, Epilogue EPI> using GatherB = Config<T, 128, 256, 4, A_T, B_T_GATHER, EPI>;
template <class T, Epilogue EPI> using Rows = Config<T, 128, 256, 4, A_T, B_T, EPI>;

template <class T, Epilogue EPI> static cudaError_t setup()
{
    cudaError_t e = sm90_setup_one<GatherA<T, EPI>>();
    if (e == cudaSuccess) e = sm90_setup_one<GatherB<T, EPI>>();
    return e == cudaSuccess ? sm90_setup_one<Rows<T, EPI>>() : e;
}

template <class T, Epilogue EPI> static cudaError_t launch(Sm90Product product, Sm90Args &a, int sms, cudaStream_t s)
{
    if (product == SM90_WGRAD_GATHER_A) return sm90_launch_one<GatherA<T, EPI>>(a, sms, s);
    if (product == SM90_WGRAD_GATHER_B) return sm90_launch_one<GatherB<T, EPI>>(a, sms, s);
    return sm90_launch_one<Rows<T, EPI>>(a, sms, s);
}

cudaError_t sm90_setup_wgrad()
{
    cudaError_t e = setup<bf16, EPI_STORE>();
    if (e == cudaSuccess) e = setup<bf16, EPI_STORE_F32>();
    if (e == cudaSuccess) e = setup<f16, EPI_STORE>();
    return e == cudaSuccess ? setup<f16, EPI_STORE_F32>() : e;
}

cudaError_t sm90_launch_wgrad(Sm90Product product, int dtype, int f32, Sm90Args &a, int sms, cudaStream_t s)
{
    if (dtype == FMOE_BF16) return f32 ? launch<bf16, EPI_STORE_F32>(product, a, sms, s) : launch<bf16, EPI_STORE>(product, a, sms, s);
    return f32 ? launch<f16, EPI_STORE_F32>(product, a, sms, s) : launch<f16, EPI_STORE>(product, a, sms, s);
}
