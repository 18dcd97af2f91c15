# SPDX-License-Identifier: Apache-2.0
"""Kernels that can be applied to a model: what one is, the registry, finding and applying. Names and rules follow LLaMA-Factory's."""

import importlib
import logging
import pkgutil
from abc import ABC, abstractmethod
from enum import Enum, unique
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("fusedmoe")


@unique
class DeviceType(str, Enum):
    """The kinds of device a kernel can be for."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"


def current_accelerator() -> str:
    """The type of the accelerator torch has found, "cpu" when there is none (torch may name one that it was merely built for)."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type


class BaseKernel(ABC):
    """A kernel: an id, the device it is for, and how it is applied to a model."""

    _kernel_id: str = ""
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
        found, needed = current_accelerator(), cls._device.value
        return None if needed in ("cpu", found) else f"it needs the accelerator {needed}, the one found is {found}"

    @classmethod
    def check_deps(cls) -> bool:
        """Whether the kernel can run on this machine."""
        return cls.missing() is None

    @classmethod
    def _checked_model(cls, kwargs: dict[str, Any]) -> Any:
        model = kwargs.get("model")
        if model is None:
            raise ValueError(f"HFModel instance is required for {cls.__name__}.")
        if problem := cls.missing(model):
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


def scan_all_kernels() -> dict[str, type[BaseKernel]]:
    """Import every module under ``ops`` (each registers its kernels) and return the registry {id: class}."""
    for module in pkgutil.walk_packages([str(Path(__file__).parent / "ops")], f"{__package__}.ops."):
        try:
            importlib.import_module(module.name)
        except Exception as problem:
            logger.warning("kernel module %s was not loaded: %s", module.name, problem)
    return Registry.get_registered_kernels()


def get_default_kernels() -> list[str]:
    """The ids of all registered kernels."""
    return list(scan_all_kernels())


def _kernel(kernel_id: str) -> type[BaseKernel]:
    kernels = scan_all_kernels()
    if kernel_id not in kernels:
        raise ValueError(f"Kernel {kernel_id} not found; there are {', '.join(kernels)}")
    return kernels[kernel_id]


def apply_kernel(kernel_id: str, **kwargs: Any) -> Any:
    """Apply one kernel to ``model=`` and return the model."""
    return _kernel(kernel_id).apply(**kwargs)


def apply_default_kernels(model: Any = None, include_kernels: str | bool | None = None, **kwargs: Any) -> Any:
    """Nothing for a falsy include_kernels, every kernel that fits this machine for "auto" or True, else a comma list."""
    if not include_kernels:
        return model
    if include_kernels is True or include_kernels == "auto":
        kernels = [kernel for kernel in scan_all_kernels().values() if kernel.missing(model) is None]
    else:
        kernels = [_kernel(name.strip()) for name in str(include_kernels).split(",") if name.strip()]
    for kernel in kernels:
        model = kernel.apply(model=model, **kwargs)
    return model
