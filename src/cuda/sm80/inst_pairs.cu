// SPDX-License-Identifier: Apache-2.0
// inst_pairs.cu - compiles some of the fast general products; kernels.cu finds them.
#include "gemm_mma.cuh"

extern const MmaEntry mma_pairs[];
const MmaEntry mma_pairs[] = {{MMA_UP_PAIRS_K, FMOE_BF16, mma_kernel<MmaConfig<bf16, MMA_B_K, MMA_PAIRS>>},
                              {MMA_UP_PAIRS_K, FMOE_F16, mma_kernel<MmaConfig<f16, MMA_B_K, MMA_PAIRS>>},
                              {MMA_UP_PAIRS_N, FMOE_BF16, mma_kernel<MmaConfig<bf16, MMA_B_N, MMA_PAIRS>>},
                              {MMA_UP_PAIRS_N, FMOE_F16, mma_kernel<MmaConfig<f16, MMA_B_N, MMA_PAIRS>>},
                              {}};
