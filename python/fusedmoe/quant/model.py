# SPDX-License-Identifier: Apache-2.0
"""Quantised experts in a model: made layer by layer, put back, saved and loaded, described."""

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..integrations import layers
from .formats import HALVES, Format, by_name
from .tensor import QuantTensor

_NAMES = "gate_up_proj", "up_proj", "down_proj"


def _experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Experts modules with stacked weights that fusedmoe computes."""
    for name, module in model.named_modules():
        if layers.is_v5_experts(module) and not layers.misfit(module):
            yield name, module


def _stacks(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name in _NAMES:
        w = module._parameters.get(name)
        if w is not None:
            yield name, w


def _put(module: nn.Module, name: str, w: Tensor) -> None:
    module._parameters[name] = nn.Parameter(w, requires_grad=False)
    if not vars(module).get("_fmoe_quant_hooks"):
        hooks = module.register_state_dict_post_hook(_split), module.register_load_state_dict_pre_hook(_join)
        vars(module)["_fmoe_quant_hooks"] = hooks
    vars(module).pop("_fmoe_layer", None)  # it is looked at again


def quantize(model: nn.Module, format: str = "nf4") -> nn.Module:
    """Turn the stacked experts of a model on the CPU into quantised ones, one stack after another, and run them on fusedmoe.

    format: "nf4", "fp4" (bitsandbytes' bytes), "fp8" (blocks of 128 x 128), "mxfp4", "int8" (a scale a row), "int4" (groups of 128).
    They are frozen: train adapters. Returns the model. ``dequantize`` undoes it, up to the rounding.
    """
    from ..integrations.transformers import apply

    chosen = by_name(format)
    found = list(_experts(model))
    for name, module in found:
        if vars(module).get("is_transposed", False):
            raise NotImplementedError(f"quantize: {name} ({type(module).__name__}) stores its weights [E, in, out]; expected [E, out, in]")
    if not found:
        raise ValueError("quantize: the model has no stacked experts that fusedmoe knows")
    for name, module in found:
        if layers.look_at(module).path != "fused":
            why = layers.look_at(module).why
            raise NotImplementedError(f"quantize: {name} ({type(module).__name__}) is not computed in the fused layer: {why}")
        for of, w in _stacks(module):
            if isinstance(w, QuantTensor):
                continue
            concatenated = of == "gate_up_proj" and vars(module).get("is_concatenated", True)
            halves = concatenated and chosen.rows > 1 and w.shape[1] // 2 % chosen.rows
            own = chosen._replace(flags=chosen.flags | HALVES) if halves else chosen
            _put(module, of, QuantTensor.from_weights(w.data, own))
    return apply(model)


def adopt(model: nn.Module) -> int:
    """Run what a model on the CPU already holds quantised: the experts of transformers' FP8Experts (float8_e4m3fn, in blocks or a scale a
    channel), whose codes and scales are read where they are. ``apply`` calls it. Returns how many modules."""
    found = 0
    for module in model.modules():
        if type(module).__name__ != "FP8Experts":
            continue
        stored = [(n, w) for n, w in _stacks(module) if w.dtype == torch.float8_e4m3fn and w.is_cpu and not isinstance(w, QuantTensor)]
        dtype = getattr(module.config, "dtype", None) or torch.bfloat16
        for name, w in stored:
            scale, block = module._parameters[f"{name}_scale_inv"], module.block_size or (0, 0)
            _put(module, name, QuantTensor.from_fp8(w.data, scale.data, dtype, tuple(block)))
            scale.requires_grad_(False)
        found += bool(stored)
    return found


def _as_it_came(module: nn.Module, name: str) -> bool:
    """The scales are parameters of the module's own."""
    return f"{name}_scale_inv" in module._parameters


def dequantize(model: nn.Module) -> nn.Module:
    """Put plain weights, as quantised ones stand for them, in their place."""
    for module in model.modules():
        for name, w in list(_stacks(module)):
            if isinstance(w, QuantTensor):
                module._parameters[name] = nn.Parameter(w.dequantize(), requires_grad=False)
        for hook in vars(module).pop("_fmoe_quant_hooks", ()):
            hook.remove()
            vars(module).pop("_fmoe_layer", None)
    return model


# ---- state_dict: plain tensors, so that safetensors can hold them ---------------------------------------------------------
_PARTS = "scale", "scale2", "quant"


def _split(module: nn.Module, state: dict, prefix: str, _: Any) -> None:
    """gate_up_proj becomes its codes, gate_up_proj.scale its scales, gate_up_proj.quant what they mean."""
    for name, w in _stacks(module):
        if not isinstance(w, QuantTensor) or prefix + name not in state:
            continue
        if _as_it_came(module, name):
            state[prefix + name] = w.codes.view(torch.float8_e4m3fn)
            continue
        format = [*w.format[:7], str(w.format.scale_dtype), w.format.scale2]
        meaning = json.dumps({"format": format, "shape": list(w.shape), "dtype": str(w.dtype)})
        state[prefix + name] = w.codes
        state[f"{prefix}{name}.scale"] = w.scale
        state[f"{prefix}{name}.quant"] = torch.tensor(list(meaning.encode()), dtype=torch.uint8)
        if w.scale2 is not None:
            state[f"{prefix}{name}.scale2"] = w.scale2


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name.removeprefix("torch."))


def from_state(codes: Tensor, scale: Tensor, quant: Tensor, scale2: Tensor | None = None) -> QuantTensor:
    """A stack, from what a state_dict holds of it."""
    told = json.loads(bytes(quant.tolist()).decode())
    fields = *told["format"][:7], _dtype(told["format"][7]), *told["format"][8:]
    return QuantTensor(codes, scale, Format._make(fields), torch.Size(told["shape"]), _dtype(told["dtype"]), scale2)


def _join(module: nn.Module, state: dict, prefix: str, *_: Any) -> None:
    for name, w in list(_stacks(module)):
        key = prefix + name
        if key in state and isinstance(w, QuantTensor) and _as_it_came(module, name) and state[key].dtype == torch.float8_e4m3fn:
            w.codes.view(torch.float8_e4m3fn).copy_(state[key])
            state[key] = w
        if f"{key}.quant" not in state:
            continue
        parts = {part: state.pop(f"{key}.{part}", None) for part in _PARTS}
        made = from_state(state.pop(key), parts["scale"], parts["quant"], parts["scale2"])
        if made.shape != w.shape:
            raise ValueError(f"load_state_dict: {key} is quantised weights of {list(made.shape)}, the module has {list(w.shape)}")
        module._parameters[name] = nn.Parameter(made.map(torch.clone), requires_grad=False)
        state[key] = module._parameters[name]  # what load_state_dict finds, and leaves alone
    return None


def load_hooks(model: nn.Module) -> nn.Module:
    """Let a model whose experts are plain load the state_dict of one whose experts are quantised."""
    for _, module in _experts(model):
        for name, w in _stacks(module):
            _put(module, name, w.data)
    return model


def describe(model: Any, *args: Any, **kwargs: Any) -> str:
    """What each experts layer of a model holds and what runs: a line a layer, and a last one with the sums. Or, of a tensor x and the
    sizes E, k, I of a layer: which kernels it will run, and why (``ops.describe``)."""
    if not isinstance(model, nn.Module):
        return ops.describe(model, *args, **kwargs)
    lines, held, plain = [], 0, 0
    for name, module in model.named_modules():
        stacks = list(_stacks(module))
        if not stacks or not hasattr(module, "_apply_gate"):
            continue
        words = []
        for of, w in stacks:
            n = w.nbytes_held() if isinstance(w, QuantTensor) else w.numel() * w.element_size()
            kind = w.format.name if isinstance(w, QuantTensor) else str(w.dtype).removeprefix("torch.")
            words.append(f"{of} {kind} {n / 2**20:.1f} MiB")
            held, plain = held + n, plain + w.numel() * w.element_size()
        lines.append(f"{name} ({type(module).__name__}): {', '.join(words)}; {layers.look_at(module).path}")
    lines.append(f"{len(lines)} layers: {held / 2**20:.1f} MiB of experts, {plain / 2**20:.1f} as plain weights")
    return "\n".join(lines)
