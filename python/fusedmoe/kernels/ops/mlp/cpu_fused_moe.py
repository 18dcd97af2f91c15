# SPDX-License-Identifier: Apache-2.0
"""cpu_fused_moe."""

from .fused_moe import CpuFusedMoEKernel

__all__ = ["CpuFusedMoEKernel"]
