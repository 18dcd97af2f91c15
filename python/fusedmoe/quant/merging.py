# SPDX-License-Identifier: Apache-2.0
"""Adapters merged into quantised experts: W + BA is made of one stack at a time. It stays plain, or is quantised again, with its error."""

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..integrations.log import logger
from . import linears
from . import model as models
from .formats import E4M3_SCALE, LUT4, U4
from .tensor import QuantTensor


class MergeError(NamedTuple):
    """What quantising W + BA again costs: the norm of the difference, over that of W + BA and over that of BA."""

    weights: float
    adapter: float


_asked = threading.local()  # errors: a dict, while stacks are to be quantised again


def _again(w: QuantTensor, merged: Tensor) -> QuantTensor:
    """merged in the format of w."""
    format = w.format
    if format.scale_type == E4M3_SCALE or format.code == LUT4:
        raise NotImplementedError(f"merge_and_unload: {w!r} cannot be made again from weights; merge_and_unload(requantize=False) can")
    if w.zeros is not None:  # symmetric then
        format = format._replace(zero=8.0 if format.code == U4 else 0.0)
    if merged.dim() == 2:
        return _again(w, merged.unsqueeze(0)).expert(0)
    made = QuantTensor.from_weights(merged.transpose(1, 2) if w.transposed else merged, format._replace(scale_dtype=w.scale.dtype))
    return made.turned() if w.transposed else made


def _error(w: QuantTensor, whole: Tensor, made: QuantTensor) -> MergeError:
    """Of made, in the place of whole, which was w before."""
    again, before, whole = (t.unsqueeze(0) if t.dim() == 2 else t for t in (made.dequantize(), w.dequantize(), whole))
    difference = sum(float((a - b).float().norm()) ** 2 for a, b in zip(again, whole)) ** 0.5
    moved = sum(float((a - b).float().norm()) ** 2 for a, b in zip(before, whole)) ** 0.5
    size = sum(float(t.float().norm()) ** 2 for t in whole) ** 0.5
    return MergeError(difference / max(size, 1e-30), difference / max(moved, 1e-30))


def merged(wrapper: Any, merge: Any) -> None:
    """merge(), PEFT's own of a ParamWrapper, with the parameter decoded for it; and quantised again, if that is asked."""
    base, name = wrapper.get_base_layer(), wrapper.parameter_name
    w = base._parameters.get(name)
    if not isinstance(w, QuantTensor):
        return merge()
    base._parameters[name] = nn.Parameter(w.dequantize(), requires_grad=False)
    before = len(wrapper.merged_adapters)
    try:
        merge()
    except BaseException:
        base._parameters[name] = w
        raise
    if len(wrapper.merged_adapters) == before:  # there was nothing to merge
        base._parameters[name] = w
        return None
    vars(base).get("_fmoe_origin", {}).pop(name, None)
    errors = getattr(_asked, "errors", None)
    if errors is not None:
        whole = base._parameters[name].data
        made = _again(w, whole)
        errors[base, name] = _error(w, whole, made)
        base._parameters[name] = nn.Parameter(made, requires_grad=False)
    vars(base).pop("_fmoe_layer", None)
    return None


@torch.no_grad()
def merge_and_unload(model: Any, requantize: bool = False, **options: Any) -> tuple[nn.Module, dict[str, MergeError]]:
    """PEFT's ``merge_and_unload`` of a model with quantised experts: the model without adapters, and, by the name of each stack that was
    quantised again, the error of that. requantize: in the format it had, one stack after another; else the experts are plain then.

    An error of 1 over BA says that nothing of the adapter is left: serve the adapter beside the experts then."""
    errors: dict[Any, MergeError] = {}
    in_lists = linears.made_here(model) if requantize else []
    linears.release(model)  # those in lists are plain from here on
    _asked.errors = errors if requantize else None
    try:
        made = model.merge_and_unload(**options)
    finally:
        _asked.errors = None
    if not requantize:
        return models.dequantize(made), {}
    for expert, name, w in in_lists:
        whole = expert.get_submodule(name).get_parameter("weight").data
        same = torch.equal(whole, w.dequantize())
        linear = expert._modules[name] = linears.QuantLinear(w if same else _again(w, whole)).train(expert.training)
        if not same:
            errors[linear, "weight"] = _error(w, whole, linear.weight)
    quantizer = getattr(made, "hf_quantizer", None)
    if hasattr(quantizer, "decoded"):
        quantizer.decoded = True  # it is not the checkpoint that came any more
    names = {module: name for name, module in made.named_modules()}
    told = {f"{names[module]}.{name}": error for (module, name), error in errors.items()}
    if told:
        worst = max(told, key=lambda name: told[name].adapter)
        logger.info("merged and quantised again: %d stacks or matrices; worst is %s, off by %.2g of its weights and %.2g of its adapter",
                    len(told), worst, *told[worst])  # fmt: skip
    return made, told
