# SPDX-License-Identifier: Apache-2.0
"""fusedmoe in the place of LLaMA-Factory's own MoE kernels, in both forms its kernel interface has had.

0.9.4 and 0.9.5 keep classes in Registry and skip those of other devices; later ones keep them in KernelPlugin. In both the
entries of npu_fused_moe and cuda_fused_moe become ours, and fused_moe and cpu_fused_moe are added.
"""

import importlib
import logging
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from .. import kernels
from ..kernels.base import current_accelerator
from ..kernels.ops.mlp.fused_moe import MoEKernel
from .report import report

_PACKAGE = "llamafactory.v1.plugins.model_plugins.kernels"


class _Kernels(dict):
    """LLaMA-Factory's registry: every id can be asked for, "auto" sees those that fit this machine."""

    def keys(self) -> list[str]:  # type: ignore[override]
        return [name for name in dict.keys(self) if self[name].check_deps()]


_said: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


def _tell(model: Any) -> None:
    """One line in LLaMA-Factory's log, which shows INFO by default; "auto" applies more than one of our kernels."""
    logger, text = logging.getLogger(f"{_PACKAGE}.fusedmoe"), f"fusedmoe: {report(model).summary}"
    if _said.get(model) != text:
        _said[model] = text
        getattr(logger, "info_rank0", logger.info)(text)  # a method that LLaMA-Factory gives to every logger


def register() -> bool:
    """Put our kernels into the installed LLaMA-Factory; False without one that has kernels."""
    try:
        interface: Any = importlib.import_module(f"{_PACKAGE}.interface")
    except ImportError:
        return False
    ours = kernels.scan_all_kernels()
    MoEKernel.listeners["llamafactory"] = _tell
    if hasattr(interface, "default_kernels"):
        registry = importlib.import_module(f"{_PACKAGE}.registry").Registry
        registry._kernels = interface.default_kernels = _Kernels({**registry._kernels, **ours})
    else:
        plugins = importlib.import_module(f"{_PACKAGE}.base").KernelPlugin._registry
        plugins.update(ours)
        auto = getattr(interface, "_AUTO_KERNELS", None)
        if isinstance(auto, dict) and current_accelerator() in ("cpu", "cuda"):
            auto.setdefault(current_accelerator(), ("fused_moe",))
    for name in ("npu_fused_moe", "cuda_fused_moe"):  # the classes that were None on another device
        with suppress(Exception):
            setattr(importlib.import_module(f"{_PACKAGE}.ops.mlp.{name}"), ours[name].__name__, ours[name])
    return True
