# SPDX-License-Identifier: Apache-2.0
"""``QuantConfig()``: the experts of a checkpoint that is quantised already are loaded as they are, and everything else of it is decoded by
its own quantizer (of GPTQ and AWQ: by ours, so that their packages are not needed)."""

import copy
import re
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..integrations.log import say_once
from . import foreign, origin
from .tensor import QuantTensor

_DECODABLE = "mxfp4", "fp8", "mxfp8", "compressed-tensors"
_PLAIN_CHAINS = ["MergeModulelist"], ["MergeModulelist", "Concatenate"]


def _one(given: Any) -> Any:
    return given[0] if isinstance(given, list) else given


class _Decode(ConversionOps):
    """A Linear of GPTQ or AWQ, decoded; or those of a list of experts."""

    def __init__(self, quantizer: "Linears") -> None:
        self.hf_quantizer = quantizer

    def convert(self, input_dict: dict, full_layer_name: str = "", model: Any = None, **kwargs: Any) -> dict:  # type: ignore[override]
        dtype = model.get_parameter(full_layer_name).dtype
        if "qweight" in input_dict or "weight" in input_dict:  # of one Linear
            given = {name: _one(t) for name, t in input_dict.items()}
            if "weight" in given:
                return {full_layer_name: given["weight"].to(dtype)}
            return {full_layer_name: foreign.decode(given, dtype, self.hf_quantizer.version)}
        made = {}
        for name, of in by_projection(input_dict).items():
            matrices = (dict(zip(of, values)) for values in zip(*of.values()))
            made[f"{name}.weight"] = [foreign.decode(m, dtype, self.hf_quantizer.version) for m in matrices]
        return made


class Linears(HfQuantizer):
    """Reads GPTQ's and AWQ's Linears without their packages."""

    serialized_names = {"weight": ["weight", "qweight", "qzeros", "scales", "g_idx"]}

    def __init__(self, stored: dict[str, Any]) -> None:
        config = QuantizationConfigMixin(quant_method=stored["quant_method"])
        config.dequantize = True
        super().__init__(config, pre_quantized=True)
        self.version = 2 if stored.get("checkpoint_format") == "gptq_v2" else 1
        if stored.get("bits", 4) != 4 or stored.get("version", "gemm").lower() != "gemm":
            what = {n: stored[n] for n in ("bits", "version") if n in stored}
            raise NotImplementedError(f"QuantConfig(): the checkpoint is {stored['quant_method']} with {what}; expected 4 bits, gemm")

    def get_load_operations(self) -> dict[str, Any]:
        return {"dequantize": _Decode}

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


def inner_quantizer(stored: Any) -> HfQuantizer:
    """The quantizer that decodes what is not kept."""
    told = stored if isinstance(stored, dict) else stored.to_dict()
    method = getattr(told.get("quant_method"), "value", told.get("quant_method"))
    if method in ("gptq", "awq"):
        return Linears(told)
    if method not in _DECODABLE:
        known = ", ".join((*_DECODABLE, "gptq", "awq"))
        raise NotImplementedError(f"QuantConfig(): the checkpoint is quantised by {method!r}; fusedmoe keeps those of {known}")
    config = auto.AutoQuantizationConfig.from_dict(copy.deepcopy(told))
    config.dequantize = True
    return auto.AutoHfQuantizer.from_config(config, pre_quantized=True)


def by_projection(input_dict: dict[str, Any]) -> dict[str, dict[str, list]]:
    """``{"experts.*.gate_proj.weight_scale": [...]}`` as ``{"...experts.*.gate_proj": {"weight_scale": [...]}}``."""
    found: dict[str, dict[str, list]] = {}
    for pattern, given in input_dict.items():
        base, _, key = pattern.rpartition(".")
        found.setdefault(base, {})[key] = given
    return found


class _Keep(ConversionOps):
    """A stack of experts from its tensors as they come; where it cannot be, the operations that decode it."""

    def __init__(self, quantizer: Any, operations: list) -> None:
        self.hf_quantizer, self.operations = quantizer, operations

    def __deepcopy__(self, memo: dict) -> "_Keep":  # transformers copies a converter for each parameter
        return _Keep(self.hf_quantizer, self.operations)

    def convert(self, input_dict: dict, full_layer_name: str = "", model: Any = None, **kwargs: Any) -> dict:  # type: ignore[override]
        found = self.hf_quantizer.stack_of(model, full_layer_name)
        why = "it is not one that fusedmoe computes"
        if found is not None:
            try:
                module, leaf = found
                made, where = self._stack(input_dict, leaf, module._parameters[leaf].dtype)
                if made.shape != module._parameters[leaf].shape:
                    raise foreign.UnknownLayout(f"it is {list(made.shape)}, expected {list(module._parameters[leaf].shape)}")
                vars(module).setdefault("_fmoe_origin", {})[leaf] = where
                return {full_layer_name: nn.Parameter(made, requires_grad=False)}
            except foreign.UnknownLayout as problem:
                why = str(problem)
        say_once(f"{full_layer_name.rsplit('.', 1)[-1]} of {type(model).__name__} is decoded as it is loaded: {why}")
        self.hf_quantizer.decoded = True
        for op in self.operations:
            input_dict = op.convert(input_dict, full_layer_name=full_layer_name, model=model, **kwargs)
        return input_dict

    def _stack(self, given: dict[str, Any], leaf: str, dtype: torch.dtype) -> tuple[QuantTensor, origin.Origin]:
        if f"{leaf}_blocks" in given:
            made = QuantTensor.from_mxfp4(_one(given[f"{leaf}_blocks"]), _one(given[f"{leaf}_scales"]), dtype)
            return made.turned(), origin.Blocks(leaf)
        chain = [type(op).__name__ for op in self.operations[1:]]
        dims = [getattr(op, "dim", 0) for op in self.operations[1:]]
        if chain not in _PLAIN_CHAINS or dims != [0, 1][: len(dims)]:
            raise foreign.UnknownLayout(f"its experts are joined by {', '.join(chain)}")
        matrices, hows, block, version = [], [], self.hf_quantizer.block, getattr(self.hf_quantizer.inner, "version", 1)
        projections = by_projection(given)
        for values in zip(*(zip(*of.values()) for of in projections.values())):  # of each expert
            tensors = [dict(zip(of, each)) for of, each in zip(projections.values(), values)]
            made_of = [foreign.read(t, dtype, block, version) for t in tensors]
            matrices.append([q for q, _ in made_of])
            hows.append([how for _, how in made_of])
        names = [re.sub(r"^.*\*\.", "", base) for base in projections]
        return foreign.stack(matrices), origin.PerExpert(names, hows, block, version)


class _Decoded(ConversionOps):
    """An operation that decodes something else than experts, which is noted: what is saved then is not what came."""

    def __init__(self, quantizer: Any, operation: Any) -> None:
        self.hf_quantizer, self.operation = quantizer, operation

    def __deepcopy__(self, memo: dict) -> "_Decoded":
        return _Decoded(self.hf_quantizer, self.operation)

    def convert(self, input_dict: dict, **kwargs: Any) -> dict:  # type: ignore[override]
        self.hf_quantizer.decoded |= len(input_dict) > 1
        return self.operation.convert(input_dict, **kwargs)


def keep(conversions: list, quantizer: Any) -> list:
    """The conversions of the inner quantizer, with ours in the place of those that decode experts."""
    made = []
    for c in conversions:
        if isinstance(c, WeightConverter) and getattr(c.operations[0], "hf_quantizer", None) is quantizer.inner:
            experts = c.target_patterns[0].rsplit(".", 1)[-1] in quantizer.names
            ops = [_Keep(quantizer, c.operations)] if experts else [_Decoded(quantizer, c.operations[0]), *c.operations[1:]]
            c = c.copy(c._original_source_patterns, c._original_target_patterns, operations=ops)
        made.append(c)
    return made


def block_of(inner: Any) -> tuple[int, int]:
    """The blocks of FP8 scales that a quantizer's config names."""
    size = getattr(inner.quantization_config, "weight_block_size", None)
    compressor = getattr(inner, "compressor", None)
    for group in compressor.quantization_config.config_groups.values() if compressor is not None else ():
        size = size or getattr(group.weights, "block_structure", None)
    return tuple(size) if size else (128, 128)
