// SPDX-License-Identifier: Apache-2.0
// inst_wgrad.cu - compiles some of the fast general products; kernels.cu finds them.
#include "gemm_mma.cuh"

extern const MmaEntry mma_wgrad[];
const MmaEntry mma_wgrad[] = {{MMA_WGRAD, FMOE_BF16, mma_kernel<MmaConfig<bf16, MMA_B_ROWS, MMA_STORE>>},
                              {MMA_WGRAD, FMOE_F16, mma_kernel<MmaConfig<f16, MMA_B_ROWS, MMA_STORE>>},
                              {}};
