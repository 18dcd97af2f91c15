// SPDX-License-Identifier: Apache-2.0
// inst_up.cu - compiles some of the fast general products; kernels.cu finds them.
#include "gemm_mma.cuh"

extern const MmaEntry mma_up[];
const MmaEntry mma_up[] = {{MMA_UP_GLU_K, FMOE_BF16, mma_kernel<MmaConfig<bf16, MMA_B_GLU_K, MMA_GLU>>},
                           {MMA_UP_GLU_K, FMOE_F16, mma_kernel<MmaConfig<f16, MMA_B_GLU_K, MMA_GLU>>},
                           {MMA_UP_GLU_N, FMOE_BF16, mma_kernel<MmaConfig<bf16, MMA_B_GLU_N, MMA_GLU>>},
                           {MMA_UP_GLU_N, FMOE_F16, mma_kernel<MmaConfig<f16, MMA_B_GLU_N, MMA_GLU>>},
                           {}};
