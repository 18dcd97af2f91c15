# SPDX-License-Identifier: Apache-2.0
"""Kernels by name: ``apply_kernel("fused_moe", model=model)``."""

from .base import (
    BaseKernel,
    DeviceType,
    Registry,
    apply_default_kernels,
    apply_kernel,
    get_default_kernels,
    register_kernel,
    scan_all_kernels,
)  # fmt: skip

__all__ = [
    "BaseKernel", "DeviceType", "Registry", "apply_default_kernels", "apply_kernel", "get_default_kernels", "register_kernel",
    "scan_all_kernels",
]  # fmt: skip

scan_all_kernels()
