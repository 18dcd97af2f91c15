# SPDX-License-Identifier: Apache-2.0
"""Finding and applying kernels."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

from .base import BaseKernel, Registry

logger = logging.getLogger("fusedmoe")


def scan_all_kernels() -> dict[str, type[BaseKernel]]:
    """Import every module under ``ops`` (each registers its kernels) and return the registry {id: class}."""
    here = Path(__file__).parent
    for path in sorted((here / "ops").rglob("*.py")):
        if path.name == "__init__.py":
            continue
        name = ".".join((__package__ or "", *path.relative_to(here).with_suffix("").parts))
        try:
            importlib.import_module(name)
        except Exception as problem:
            logger.warning("kernel module %s was not loaded: %s", name, problem)
    return Registry.get_registered_kernels()


def get_default_kernels() -> list[str]:
    """The ids of all registered kernels."""
    return list(scan_all_kernels())


def apply_kernel(kernel_id: str, **kwargs: Any) -> Any:
    """Apply one kernel to ``model=`` and return the model."""
    kernel = scan_all_kernels().get(kernel_id)
    if kernel is None:
        raise ValueError(f"Kernel {kernel_id} not found; there are {', '.join(get_default_kernels())}")
    return kernel.apply(**kwargs)


def apply_default_kernels(model: Any = None, include_kernels: str | bool | None = None, **kwargs: Any) -> Any:
    """Nothing for a falsy include_kernels, every kernel that fits this machine for "auto" or True, else a comma list."""
    if not include_kernels:
        return model
    kernels = scan_all_kernels()
    if include_kernels is True or include_kernels == "auto":
        names = [name for name, kernel in kernels.items() if kernel.missing(model) is None]
    else:
        names = [name.strip() for name in str(include_kernels).split(",") if name.strip()]
    for name in names:
        if name not in kernels:
            raise ValueError(f"Kernel {name} not found; there are {', '.join(kernels)}")
    for name in names:
        model = apply_kernel(name, model=model, **kwargs)
    return model
