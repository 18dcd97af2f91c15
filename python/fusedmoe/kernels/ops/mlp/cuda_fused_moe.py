# SPDX-License-Identifier: Apache-2.0
from .fused_moe import CudaFusedMoEKernel as CudaFusedMoEKernel
