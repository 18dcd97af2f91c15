# SPDX-License-Identifier: Apache-2.0
"""Kernels that can be applied to a model, and the registry of them. Names and rules follow LLaMA-Factory's interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum, unique
from typing import Any

import torch


@unique
class DeviceType(str, Enum):
    """The kinds of device a kernel can be for."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"


def current_accelerator() -> str:
    """The type of the accelerator torch has found, "cpu" when there is none."""
    accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    if accelerator is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return accelerator.type


class BaseKernel(ABC):
    """A kernel: an id, the device it is for, and how it is applied to a model."""

    _kernel_id: Any = ""
    _device: DeviceType = DeviceType.CPU

    @classmethod
    def get_kernel_id(cls) -> str:
        """The name the kernel is registered under."""
        return cls._kernel_id

    @classmethod
    def get_device(cls) -> str:
        """The device type the kernel is for."""
        return cls._device

    @classmethod
    def missing(cls, model: Any = None) -> str | None:
        """What keeps this kernel from running here, in words; None: nothing."""
        found = current_accelerator()
        if cls._device != DeviceType.CPU and found != cls._device.value:
            return f"it needs the accelerator {cls._device.value}, the one found is {found}"
        return None

    @classmethod
    def check_deps(cls) -> bool:
        """Whether the kernel can run on this machine."""
        return cls.missing() is None

    @classmethod
    def _checked_model(cls, kwargs: dict[str, Any]) -> Any:
        model = kwargs.get("model")
        if model is None:
            raise ValueError(f"HFModel instance is required for {cls.__name__}.")
        problem = cls.missing(model)
        if problem:
            raise RuntimeError(f"{cls.__name__} ({cls._kernel_id}) cannot be applied: {problem}.")
        return model

    @classmethod
    @abstractmethod
    def apply(cls, **kwargs: Any) -> Any:
        """Apply the kernel to ``model=`` and return the model."""


class Registry:
    """All kernels, by id."""

    _kernels: dict[str, type[BaseKernel]] = {}

    @classmethod
    def register(cls, kernel_cls: type[BaseKernel]) -> type[BaseKernel]:
        """Class decorator. Every kernel registers on every machine; its apply says what is missing."""
        if not (isinstance(kernel_cls, type) and issubclass(kernel_cls, BaseKernel)):
            raise TypeError(f"Class {kernel_cls} must inherit from BaseKernel")
        kernel_id = kernel_cls.get_kernel_id()
        if not kernel_id:
            raise ValueError(f"Kernel ID (_kernel_id) is needed for {kernel_cls} to register")
        if kernel_id in cls._kernels:
            raise ValueError(f"{kernel_id} already registered! The registered kernel is {cls._kernels[kernel_id]}")
        cls._kernels[kernel_id] = kernel_cls
        return kernel_cls

    @classmethod
    def get(cls, kernel_id: str) -> type[BaseKernel] | None:
        """The kernel registered under this id."""
        return cls._kernels.get(kernel_id)

    @classmethod
    def get_registered_kernels(cls) -> dict[str, type[BaseKernel]]:
        """The live dictionary {id: class}."""
        return cls._kernels


register_kernel = Registry.register
