// SPDX-License-Identifier: Apache-2.0
// inst_dh.cu - the fused backward product: dout . W2, the slope of the activation, p*a and dp.
#include "gemm_rows.cuh"

// 256 columns do not fit the registers of 512 threads.
template <class T> using Dh192 = Config<T, 128, 192, 4, A_GATHER, B_NMAJOR, EPI_DGLU>;
template <class T> using Dh128 = Config<T, 128, 128, 6, A_GATHER, B_NMAJOR, EPI_DGLU>;
template <class T> using Dh192K = Config<T, 128, 192, 4, A_GATHER, B_KMAJOR, EPI_DGLU>;
template <class T> using Dh128K = Config<T, 128, 128, 6, A_GATHER, B_KMAJOR, EPI_DGLU>;

template <class T> static cudaError_t setup()
{
    cudaError_t e = sm90_setup_one<Dh192<T>>();
    if (e == cudaSuccess) e = sm90_setup_one<Dh128<T>>();
    if (e == cudaSuccess) e = sm90_setup_one<Dh192K<T>>();
    return e == cudaSuccess ? sm90_setup_one<Dh128K<T>>() : e;
}

template <class T> static cudaError_t launch(Sm90Product product, Sm90Args &a, int sms, cudaStream_t s)
{
    if (product == SM90_DH_192) return sm90_launch_one<Dh192<T>>(a, sms, s);
    if (product == SM90_DH_192_K) return sm90_launch_one<Dh192K<T>>(a, sms, s);
    if (product == SM90_DH_128_K) return sm90_launch_one<Dh128K<T>>(a, sms, s);
    return sm90_launch_one<Dh128<T>>(a, sms, s);
}

cudaError_t sm90_setup_dh()
{
    const cudaError_t e = setup<bf16>();
    return e == cudaSuccess ? setup<f16>() : e;
}

cudaError_t sm90_launch_dh(Sm90Product product, int dtype, Sm90Args &a, int sms, cudaStream_t s)
{
    return dtype == FMOE_BF16 ? launch<bf16>(product, a, sms, s) : launch<f16>(product, a, sms, s);
}
