# SPDX-License-Identifier: Apache-2.0
"""cuda_fused_moe."""

from .fused_moe import CudaFusedMoEKernel

__all__ = ["CudaFusedMoEKernel"]
