# SPDX-License-Identifier: Apache-2.0
"""fused_moe, cpu_fused_moe, cuda_fused_moe: MoE layers of a Hugging Face model on fusedmoe, for the device the model is on."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from .... import ops
from ....integrations import transformers as hf
from ...base import BaseKernel, DeviceType, Registry, register_kernel


def device_type(model: Any) -> str:
    """The type of device a model's first parameter (or buffer) is on; without any, or without a model: "cpu"."""
    tensor = None if model is None else next(chain(model.parameters(), model.buffers()), None)
    return "cpu" if tensor is None else tensor.device.type


class MoEKernel(BaseKernel):
    """Puts fusedmoe under the MoE layers of a Hugging Face model."""

    listeners: dict[str, Callable[[Any], None]] = {}  # called with each model a kernel was applied to

    @classmethod
    def apply(cls, **kwargs: Any) -> Any:
        """Apply to ``model=`` and return it; ValueError without one, RuntimeError where something is missing."""
        model = hf.apply(cls._checked_model(kwargs), keep=kwargs.get("keep"))
        for listener in cls.listeners.values():
            listener(model)
        return model

    @classmethod
    def missing(cls, model: Any = None) -> str | None:
        problem, device = super().missing(model), cls._device.value
        if problem is None:
            try:  # a plan settles whether the backend is there and takes this device
                ops._plan(ops.EXPERTS, torch.bfloat16, torch.device(device, 0), 0, 64, 64, 2, k=1)
            except (RuntimeError, NotImplementedError) as error:
                problem = f"torch has {device}, but fusedmoe cannot use it: {error}"
        return problem


@register_kernel
class CpuFusedMoEKernel(MoEKernel):
    """For a model on the CPU."""

    _kernel_id = "cpu_fused_moe"

    @classmethod
    def missing(cls, model: Any = None) -> str | None:
        device = device_type(model)
        return None if device in ("cpu", "meta") else f"it needs a model on the cpu, this one is on {device}"


@register_kernel
class CudaFusedMoEKernel(MoEKernel):
    """For a machine with CUDA."""

    _kernel_id = "cuda_fused_moe"
    _device = DeviceType.CUDA


@register_kernel
class FusedMoEKernel(MoEKernel):
    """For whatever device the model is on."""

    _kernel_id = "fused_moe"

    @classmethod
    def missing(cls, model: Any = None) -> str | None:
        device = device_type(model)
        kernel = Registry.get(f"{'cpu' if device == 'meta' else device}_fused_moe")
        return f"there is no backend for {device}" if kernel is None else kernel.missing(model)
