# SPDX-License-Identifier: Apache-2.0
"""Fused Mixture-of-Experts layers for PyTorch. ``fusedmoe.apply(model)`` puts them under a Hugging Face model."""

import sys as _sys

from . import _core, autograd, ops, routing
from .autograd import GmmFunction, HybridGmmFunction, activation, block, experts, grouped_matmul, permute, route, unpermute
from .enums import Activation, Flag, Score
from .integrations.report import report
from .integrations.transformers import apply, unapply
from .integrations.transformers import register as _register
from .ops import set_max_isa
from .quant.merging import merge_and_unload
from .quant.model import dequantize, describe, quantize
from .quant.tensor import QuantTensor

__version__ = _core.version
info, cpu_isa, empty_cache = _core.info, _core.cpu_isa, _core.empty_cache

if "transformers.integrations.moe" in _sys.modules:
    _register()


def __getattr__(name: str) -> object:
    if name == "QuantConfig":  # which imports transformers
        from .integrations.transformers import quant_config

        return quant_config()
    raise AttributeError(f"module 'fusedmoe' has no attribute {name!r}")


__all__ = [
    "Activation", "Flag", "GmmFunction", "HybridGmmFunction", "QuantTensor", "Score", "activation", "apply", "autograd", "block",
    "cpu_isa", "dequantize", "describe", "empty_cache", "experts", "grouped_matmul", "info", "merge_and_unload", "ops", "permute",
    "quantize", "report", "route", "routing", "set_max_isa", "unapply", "unpermute",
]  # fmt: skip
