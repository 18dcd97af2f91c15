// SPDX-License-Identifier: Apache-2.0
// inst_dh_k.cu - compiles some of the fast general products; kernels.cu finds them.
#include "gemm_mma.cuh"

extern const MmaEntry mma_dh_k[];
const MmaEntry mma_dh_k[] = {{MMA_DH_K, FMOE_BF16, mma_kernel<MmaConfig<bf16, MMA_B_K, MMA_DGLU>>},
                             {MMA_DH_K, FMOE_F16, mma_kernel<MmaConfig<f16, MMA_B_K, MMA_DGLU>>},
                             {}};
