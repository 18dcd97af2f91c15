# SPDX-License-Identifier: Apache-2.0
"""Quantised experts: 4-bit and 8-bit weights that stay as they are, with forward, dx and adapters (docs/quantized.md).

``fusedmoe.quantize`` and ``fusedmoe.dequantize`` (of ``quant.model``) are for models, ``QuantTensor`` is a stack of weights."""

from .formats import FORMATS, Format
from .tensor import QuantTensor

__all__ = ["FORMATS", "Format", "QuantTensor"]
