// SPDX-License-Identifier: Apache-2.0
// inst_dh.cu - compiles some of the fast general products; kernels.cu finds them.
#include "gemm_mma.cuh"

extern const MmaEntry mma_dh[];
const MmaEntry mma_dh[] = {{MMA_DH_N, FMOE_BF16, mma_kernel<MmaConfig<bf16, MMA_B_N, MMA_DGLU>>},
                           {MMA_DH_N, FMOE_F16, mma_kernel<MmaConfig<f16, MMA_B_N, MMA_DGLU>>},
                           {}};
