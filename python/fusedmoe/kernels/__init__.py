# SPDX-License-Identifier: Apache-2.0
"""Kernels by name: ``apply_kernel("fused_moe", model=model)``."""

from .base import BaseKernel, DeviceType, Registry, apply_default_kernels, apply_kernel  # noqa: F401
from .base import get_default_kernels, register_kernel, scan_all_kernels  # noqa: F401

scan_all_kernels()
