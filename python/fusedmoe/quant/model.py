# SPDX-License-Identifier: Apache-2.0
"""Quantised experts in a model: made layer by layer, put back, saved and loaded, described."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..integrations import layers
from ..integrations.log import say_once
from . import linears, origin, stacks, state
from .formats import by_name
from .stacks import NAMES
from .tensor import QuantTensor

_FP8_EXPERTS = torch.float8_e4m3fn, torch.int8  # what transformers' FP8Experts hold: FP8, or two codes of FP4 a byte


def _put(module: nn.Module, name: str, w: Tensor) -> None:
    module._parameters[name] = nn.Parameter(w, requires_grad=False)
    _watch(module)


def _watch(module: nn.Module) -> None:
    """Hooks for state_dict and load_state_dict, and words for print(model)."""
    if not vars(module).get("_fmoe_quant_hooks"):
        hooks = module.register_state_dict_post_hook(_split), module.register_load_state_dict_pre_hook(_join)
        vars(module).update(_fmoe_quant_hooks=hooks, extra_repr=partial(_extra_repr, module))
    vars(module).pop("_fmoe_layer", None)  # it is looked at again


def watch(model: nn.Module) -> None:
    """Let every module with quantised stacks give plain tensors to a state_dict, and say what it holds."""
    for module in model.modules():
        if any(stacks.held(module)):
            _watch(module)


def _held(w: Tensor) -> int:
    return w.nbytes_held() if isinstance(w, QuantTensor) else w.numel() * w.element_size()


def _kind(w: Tensor) -> str:
    return w.format.name if isinstance(w, QuantTensor) else str(w.dtype).removeprefix("torch.")


def _stacks(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Those of a module, plain or quantised."""
    known = NAMES if hasattr(module, "_apply_gate") else stacks.forms(module)
    return [(name, w) for name, w in module._parameters.items() if w is not None and (name in known or isinstance(w, QuantTensor))]


def _words(module: nn.Module) -> list[str]:
    """What the stacks of a module are."""
    return [f"{name} {_kind(w)} {list(w.shape)} {_held(w) / 2**20:.1f} MiB" for name, w in _stacks(module)]


def _extra_repr(module: nn.Module) -> str:
    own = type(module).extra_repr(module)
    path = [f"fusedmoe: {layers.layer_of(module).path}"] if layers.is_v5_experts(module) else []
    return ", ".join([*([own] if own else []), *_words(module), *path])


def _module(op: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model is a {type(model).__name__} ({model!r:.60}), expected a torch.nn.Module")


def _is_list(module: nn.Module, name: str) -> bool:
    return name.rpartition(".")[2] == "experts" and layers.list_names(module) is not None


def _is_foreign(module: nn.Module) -> bool:
    """Whether it looks like stacked experts that nothing is known of."""
    w = module._parameters.get("down_proj")
    return w is not None and w.dim() == 3


def _class(module: nn.Module) -> str:
    return type(module[0] if isinstance(module, nn.ModuleList) else module).__name__


def quantize(model: nn.Module, format: str = "nf4") -> nn.Module:
    """Turn the experts of a model on the CPU or CUDA into quantised ones, one stack or Linear after another, and run them on fusedmoe.

    format: "nf4", "fp4" (bitsandbytes' bytes), "fp8" (blocks of 128 x 128), "mxfp4", "int8" (a scale a row), "int4" (groups of 128).
    They are frozen: train adapters. Returns the model. ``dequantize`` undoes it, up to the rounding.
    """
    from ..integrations.transformers import apply

    by_name(format)
    _module("quantize", model)
    names = {module: name for name, module in model.named_modules()}
    experts = [name for module, name in names.items() if stacks.forms(module) or _is_list(module, name)]
    for name, w in model.named_parameters():
        if w.is_meta and name.startswith(tuple(f"{of}." for of in experts if of)):
            raise ValueError(f"quantize: {name} is on meta, {list(w.shape)}: there are no numbers in it")
    found = {module for module, path in stacks.paths(model, asked=True).items() if path != "own"}
    others = {_class(m) for m, name in names.items() if m not in found and (stacks.forms(m) or _is_list(m, name) or _is_foreign(m))}
    if not found:
        has = f"; it has {', '.join(sorted(others))}, which it does not run" if others else ""
        raise ValueError(f"quantize: the model has no experts that fusedmoe knows{has}")
    for other in sorted(others):
        say_once(f"{other}: fusedmoe does not run it, so it is not quantised")
    for module in names:  # in their order
        if module not in found:
            continue
        if isinstance(module, nn.ModuleList):
            linears.quantise(module, format)
        for of in stacks.forms(module):
            if (w := module._parameters[of]) is not None and not isinstance(w, QuantTensor):
                _put(module, of, stacks.quantised(module, of, w, format))
    if sys.modules.get("transformers.quantizers.auto") and hasattr(model, "save_pretrained"):
        from .loading import mark  # which imports transformers' quantizers

        mark(model, format=format)
    return apply(model)


def _read(w: Tensor) -> bool:
    """Whether codes on w's device are read there: on a CUDA device or an NPU where the library has its backend."""
    if w.device.type not in ("cuda", "npu"):
        return w.is_cpu
    E, N, K = w.shape
    try:
        ops.describe(torch.empty(1, K, dtype=torch.bfloat16, device=w.device), E, 1, N // 2 or 1)
    except RuntimeError:
        return False
    return True


def adopt(model: nn.Module) -> int:
    """Run what a model already holds quantised, as it is: transformers' FP8Experts (float8_e4m3fn, in blocks or a scale a
    channel, or FP4), stacks that ``bitsandbytes.nn.parametrize`` quantised, Linears of experts in lists. ``apply`` calls it. Returns how
    many modules."""
    found = linears.adopt(model)
    for module in model.modules():
        if hasattr(module, "_apply_gate") and "parametrizations" in module._modules:
            found += _unparametrized(module)
        if type(module).__name__ != "FP8Experts":
            continue
        plain = [(n, module._parameters[n]) for n in NAMES if module._parameters.get(n) is not None]
        plain = [(n, w) for n, w in plain if not isinstance(w, QuantTensor)]
        stored = [(n, w) for n, w in plain if w.dtype in _FP8_EXPERTS and _read(w)]
        dtype = getattr(module.config, "dtype", None) or torch.bfloat16
        for name, w in stored:
            scale, block = module._parameters[f"{name}_scale_inv"], module.block_size or (0, 0)
            if w.dtype == torch.int8:  # expert_dtype="fp4"
                made = QuantTensor.from_fp4(w.data, scale.data, dtype)
            else:
                made = QuantTensor.from_fp8(w.data, scale.data, dtype, tuple(block), name == "gate_up_proj")
            _put(module, name, made)
            vars(module).setdefault("_fmoe_origin", {})[name] = origin.Beside(name, w.dtype)
            scale.requires_grad_(False)
        found += bool(stored)
    return found


def _unparametrized(module: nn.Module) -> bool:
    """Stacks that bitsandbytes would decode whole in every call become QuantTensors of the same bytes."""
    held = {}
    for name in NAMES:
        given: Any = module.parametrizations._modules.get(name) or ()
        state = getattr(given[0], "quant_state", None) if len(given) == 1 else None
        if state is not None and len(state.shape) == 3 and not state.shape[2] % state.blocksize:
            held[name] = given.original, state
    for name, (data, state) in held.items():
        del module.parametrizations[name]
        vars(module).setdefault("_fmoe_origin", {})[name] = origin.Bitsandbytes(name, state, data.shape)
        _put(module, name, QuantTensor.from_bitsandbytes(data.data, state))
        for hooks in (module._state_dict_hooks, module._forward_hooks, module._forward_pre_hooks):
            own = [k for k, hook in hooks.items() if _of_parametrize(hook, name)]
            for k in own:
                del hooks[k]
                module._forward_hooks_always_called.pop(k, None)
    if held and not len(module.parametrizations):
        del module._modules["parametrizations"]
        module.__class__ = type(module).__bases__[0]  # as torch.nn.utils.parametrize.remove_parametrizations does
    return bool(held)


def _of_parametrize(hook: Any, name: str) -> bool:
    function = getattr(hook, "func", hook)
    keywords = getattr(hook, "keywords", {})
    return getattr(function, "__module__", "") == "bitsandbytes.nn.parametrize" and keywords.get("param_name", name) == name


def dequantize(model: nn.Module) -> nn.Module:
    """Put plain weights, as quantised ones stand for them, in their place."""
    _module("dequantize", model)
    linears.release(model)
    for module in model.modules():
        for name, w in list(stacks.held(module)):
            module._parameters[name] = nn.Parameter(w.dequantize(), requires_grad=False)
        own = vars(module)
        for hook in own.pop("_fmoe_quant_hooks", ()):
            hook.remove()
            for attribute in ("_fmoe_layer", "_fmoe_origin", "extra_repr"):
                own.pop(attribute, None)
    for inner in model.modules():
        if "_fmoe_conversions" in vars(inner):
            from .loading import unmark

            unmark(inner)
    return model


# ---- state_dict: plain tensors, so that safetensors can hold them ---------------------------------------------------------
_own_names = threading.local()


@contextmanager
def own_names(model: nn.Module) -> Iterator[None]:
    """While it is on, state_dict names stacks as ``quantize`` does, wherever they came from."""
    _own_names.now = True
    try:
        yield
    finally:
        _own_names.now = False


def _origin(module: nn.Module, name: str) -> origin.Origin | None:
    return None if getattr(_own_names, "now", False) else vars(module).get("_fmoe_origin", {}).get(name)


def _split(module: nn.Module, state_dict: dict, prefix: str, _: Any) -> None:
    """gate_up_proj becomes its codes, gate_up_proj.scale its scales, gate_up_proj.quant what they mean; or what a checkpoint held."""
    for name, w in stacks.held(module):
        if prefix + name not in state_dict:
            continue
        if (where := _origin(module, name)) is not None:
            del state_dict[prefix + name]
            state_dict |= {prefix + key: t for key, t in where.write(w).items()}
        else:
            state_dict |= state.write(prefix + name, w)


def _join(module: nn.Module, state_dict: dict, prefix: str, metadata: Any = None, strict: bool = True, missing: Any = None,
          unexpected: Any = None, errors: list[str] | None = None) -> None:  # fmt: skip
    """What is wrong is an error of load_state_dict, and leaves the module as it is."""
    for name, w in list(_stacks(module)):
        key, where = prefix + name, _origin(module, name)
        if f"{key}.quant" in state_dict:
            parts = {p: state_dict.pop(f"{key}.{p}") for p in state.PARTS if f"{key}.{p}" in state_dict}
            try:
                if key not in state_dict:
                    raise ValueError("its codes are missing")
                made = state.read(state_dict.pop(key), **parts)
                if made.shape != w.shape:
                    raise ValueError(f"it is quantised weights of {list(made.shape)}, the module has {list(w.shape)}")
            except ValueError as problem:
                if errors is None:
                    raise
                errors.append(f"{key}: {problem}")
                state_dict[key] = w
                continue
            vars(module).get("_fmoe_origin", {}).pop(name, None)
        elif isinstance(where, origin.Beside) and isinstance(w, QuantTensor) and key in state_dict and state_dict[key].dtype == where.dtype:
            w.codes.view(where.dtype).copy_(state_dict[key])
            state_dict[key] = w
            continue
        elif where is None or isinstance(where, origin.Beside) or (made := where.take(state_dict, prefix, w.dtype)) is None:
            continue
        if made.shape != w.shape:
            raise ValueError(f"load_state_dict: {key} is quantised weights of {list(made.shape)}, the module has {list(w.shape)}")
        module._parameters[name] = nn.Parameter(made.map(torch.clone), requires_grad=False)
        state_dict[key] = module._parameters[name]  # what load_state_dict finds, and leaves alone


def load_hooks(model: nn.Module) -> nn.Module:
    """Let a model whose experts are plain load the state_dict of one whose experts are quantised."""
    for module in model.modules():
        for name in stacks.forms(module):
            _put(module, name, module._parameters[name].data)
    return model


def describe(model: Any, *args: Any, **kwargs: Any) -> str:
    """What each experts layer of a model holds and what runs: a line a layer, and a last one with the sums. Or, of a tensor x and the
    sizes E, k, I of a layer: which kernels it will run, and why (``ops.describe``)."""
    if not isinstance(model, nn.Module):
        return ops.describe(model, *args, **kwargs)
    lines, bytes_held, plain, runs = [], 0, 0, stacks.paths(model)
    for name, module in model.named_modules():
        path, listed = runs.get(module, "own"), layers.list_names(module) if isinstance(module, nn.ModuleList) else None
        if listed and (path != "own" or _is_list(module, name)):  # a Linear each
            weights = linears.weights(module, listed)
            what = ", ".join(f"{k} matrices {kind}" for kind, k in Counter(_kind(w) for w in weights).items())
            lines.append(f"{name} (ModuleList): {what} {sum(map(_held, weights)) / 2**20:.1f} MiB; {path}")
        else:
            weights = [w for _, w in _stacks(module)]
            if not weights or type(module) is linears.QuantLinear:
                continue
            lines.append(f"{name} ({type(module).__name__}): {', '.join(_words(module))}; {path}")
        bytes_held, plain = bytes_held + sum(map(_held, weights)), plain + sum(w.numel() * w.element_size() for w in weights)
    lines.append(f"{len(lines)} layers: {bytes_held / 2**20:.1f} MiB of experts, {plain / 2**20:.1f} as plain weights")
    return "\n".join(lines)
