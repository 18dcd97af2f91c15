# SPDX-License-Identifier: Apache-2.0
"""Quantised experts in a model: made layer by layer, put back, saved and loaded, described."""

import json
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
from . import linears, origin
from .formats import HALVES, Format, by_name
from .tensor import QuantTensor

NAMES = "gate_up_proj", "up_proj", "down_proj"
_FP8_EXPERTS = torch.float8_e4m3fn, torch.int8  # what transformers' FP8Experts hold: FP8, or two codes of FP4 a byte
PARTS = "scale", "scale2", "zeros", "quant"  # beside the codes, in a state_dict


def can_be_quantised(module: nn.Module) -> bool:
    """Whether it is an experts module with stacked weights that the fused layer computes."""
    known = layers.is_v5_experts(module) and not layers.misfit(module)
    return known and (layers.known(module) or layers.look_at(module)).path == "fused"


def bytes_a_weight(format: str) -> float:
    """Codes and scales of a large matrix."""
    f = by_name(format)
    return f.bits / 8 + f.scale_dtype.itemsize / (max(f.rows, 1) * (f.cols or 2048))


def quantised(module: nn.Module, name: str, w: Tensor, format: str) -> QuantTensor:
    """A stack of a module's, quantised. It may be stored [E,in,out]: then its codes lie [E,out,in]."""
    own, turned = by_name(format), vars(module).get("is_transposed", False)
    rows = w.shape[2 if turned else 1]
    layer = layers.known(module) or layers.look_at(module)
    concatenated = name == "gate_up_proj" and not layer.flags & ops.INTERLEAVED
    if concatenated and own.rows > 1 and rows // 2 % own.rows:
        own = own._replace(flags=own.flags | HALVES)
    made = QuantTensor.from_weights(w.detach().transpose(1, 2) if turned else w.detach(), own)
    return made.turned() if turned else made


def _experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Experts modules with stacked weights that fusedmoe computes."""
    for name, module in model.named_modules():
        if layers.is_v5_experts(module) and not layers.misfit(module):
            yield name, module


def _stacks(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name in NAMES:
        w = module._parameters.get(name)
        if w is not None:
            yield name, w


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
        if any(isinstance(w, QuantTensor) for _, w in _stacks(module)):
            _watch(module)


def _held(w: Tensor) -> int:
    return w.nbytes_held() if isinstance(w, QuantTensor) else w.numel() * w.element_size()


def _kind(w: Tensor) -> str:
    return w.format.name if isinstance(w, QuantTensor) else str(w.dtype).removeprefix("torch.")


def _words(module: nn.Module) -> list[str]:
    """What the stacks of a module are."""
    return [f"{name} {_kind(w)} {list(w.shape)} {_held(w) / 2**20:.1f} MiB" for name, w in _stacks(module)]


def _runs_a_list(model: nn.Module, name: str) -> bool:
    """Whether the block of experts in a list is one of ours, and can read them."""
    from ..integrations.seams import seam_of  # which imports this package

    block = model.get_submodule(name.rpartition(".")[0])
    return seam_of(block) is not None and layers.list_weights(block) is not None


def _extra_repr(module: nn.Module) -> str:
    own = type(module).extra_repr(module)
    return ", ".join([*([own] if own else []), *_words(module), f"fusedmoe: {layers.layer_of(module).path}"])


def _module(op: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model is a {type(model).__name__} ({model!r:.60}), expected a torch.nn.Module")


def quantize(model: nn.Module, format: str = "nf4") -> nn.Module:
    """Turn the stacked experts of a model on the CPU or CUDA into quantised ones, one stack after another, and run them on fusedmoe.

    format: "nf4", "fp4" (bitsandbytes' bytes), "fp8" (blocks of 128 x 128), "mxfp4", "int8" (a scale a row), "int4" (groups of 128).
    They are frozen: train adapters. Returns the model. ``dequantize`` undoes it, up to the rounding.
    """
    from ..integrations.transformers import apply

    by_name(format)
    _module("quantize", model)
    found = list(_experts(model))
    if not found:
        others = sorted({type(m).__name__ for m in model.modules() if m._parameters.get("down_proj") is not None})
        has = f"; it has {', '.join(others)}, which are not under transformers' common forward" if others else ""
        raise ValueError(f"quantize: the model has no stacked experts that fusedmoe knows{has}")
    for name, module in found:
        if layers.look_at(module).path != "fused":
            why = layers.look_at(module).why
            raise NotImplementedError(f"quantize: {name} ({type(module).__name__}) is not computed in the fused layer: {why}")
        for of, w in _stacks(module):
            if w.is_meta:
                raise ValueError(f"quantize: {name}.{of} is on meta, {list(w.shape)}: there are no numbers in it")
            if not isinstance(w, QuantTensor):
                _put(module, of, quantised(module, of, w, format))
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
        plain = [(n, w) for n, w in _stacks(module) if not isinstance(w, QuantTensor)]
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
        for name, w in list(_stacks(module)):
            if isinstance(w, QuantTensor):
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


def _split(module: nn.Module, state: dict, prefix: str, _: Any) -> None:
    """gate_up_proj becomes its codes, gate_up_proj.scale its scales, gate_up_proj.quant what they mean; or what a checkpoint held."""
    for name, w in _stacks(module):
        if not isinstance(w, QuantTensor) or prefix + name not in state:
            continue
        if (where := _origin(module, name)) is not None:
            del state[prefix + name]
            state |= {prefix + key: t for key, t in where.write(w).items()}
            continue
        format = [*w.format[:7], str(w.format.scale_dtype), w.format.scale2]
        meaning = json.dumps({"format": format, "shape": list(w.shape), "dtype": str(w.dtype), "transposed": w.transposed})
        state[prefix + name] = w.codes
        state |= {f"{prefix}{name}.{part}": t for part, t in w.parts().items() if part != "codes"}
        state[f"{prefix}{name}.quant"] = torch.tensor(list(meaning.encode()), dtype=torch.uint8)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name.removeprefix("torch."))


def from_state(codes: Tensor, scale: Tensor | None = None, quant: Tensor | None = None, scale2: Tensor | None = None,
               zeros: Tensor | None = None) -> QuantTensor:  # fmt: skip
    """A stack, from what a state_dict holds of it. ValueError: its tensors are not those of one."""
    try:
        told = json.loads(bytes(quant.tolist()).decode()) if quant is not None else {}
        fields = *told["format"][:7], _dtype(told["format"][7]), *told["format"][8:]
        format, shape, dtype = Format._make(fields), torch.Size(told["shape"]), _dtype(told["dtype"])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as problem:
        raise ValueError(f".quant does not say what its codes mean ({type(problem).__name__}: {problem})") from problem
    transposed = told.get("transposed", False)
    E, N, K = (shape[0], shape[2], shape[1]) if transposed else shape
    want = {"codes": (E, N, format.bytes_of(K)), "scale": (E, *format.grid(N, K)), "zeros": (E, *format.grid(N, K))}
    for part, t in (("codes", codes), ("scale", scale), ("zeros", zeros)):
        if t is None and part != "zeros":
            raise ValueError(f"its {part} is missing")
        if t is not None and tuple(t.shape) != want[part]:
            raise ValueError(f"its {part} is {list(t.shape)}, expected {list(want[part])} for {format.name} {list(shape)}")
    assert scale is not None
    floats = (torch.float32, torch.bfloat16, torch.float16)
    for part, t, kinds in (("codes", codes, (torch.uint8,)), ("scale", scale, (torch.uint8,) if format.scale_type else floats)):
        if t.dtype not in kinds:
            raise ValueError(f"its {part} is {t.dtype}, expected {kinds[0]} for {format.name}")
    return QuantTensor(codes, scale, format, shape, dtype, scale2, zeros, transposed)


def _join(module: nn.Module, state: dict, prefix: str, metadata: Any = None, strict: bool = True, missing: Any = None,
          unexpected: Any = None, errors: list[str] | None = None) -> None:  # fmt: skip
    """What is wrong is an error of load_state_dict, and leaves the module as it is."""
    for name, w in list(_stacks(module)):
        key, where = prefix + name, _origin(module, name)
        if f"{key}.quant" in state:
            parts = {p: state.pop(f"{key}.{p}") for p in PARTS if f"{key}.{p}" in state}
            try:
                if key not in state:
                    raise ValueError("its codes are missing")
                made = from_state(state.pop(key), **parts)
                if made.shape != w.shape:
                    raise ValueError(f"it is quantised weights of {list(made.shape)}, the module has {list(w.shape)}")
            except ValueError as problem:
                if errors is None:
                    raise
                errors.append(f"{key}: {problem}")
                state[key] = w
                continue
            vars(module).get("_fmoe_origin", {}).pop(name, None)
        elif isinstance(where, origin.Beside) and isinstance(w, QuantTensor) and key in state and state[key].dtype == where.dtype:
            w.codes.view(where.dtype).copy_(state[key])
            state[key] = w
            continue
        elif where is None or isinstance(where, origin.Beside) or (made := where.take(state, prefix, w.dtype)) is None:
            continue
        if made.shape != w.shape:
            raise ValueError(f"load_state_dict: {key} is quantised weights of {list(made.shape)}, the module has {list(w.shape)}")
        module._parameters[name] = nn.Parameter(made.map(torch.clone), requires_grad=False)
        state[key] = module._parameters[name]  # what load_state_dict finds, and leaves alone


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
        stacks = [w for _, w in _stacks(module)] if hasattr(module, "_apply_gate") else []
        names = layers.list_names(module) if isinstance(module, nn.ModuleList) else None
        if stacks:
            lines.append(f"{name} ({type(module).__name__}): {', '.join(_words(module))}; {layers.look_at(module).path}")
        elif names:  # a Linear each
            stacks = linears.weights(module, names)
            kinds = Counter(_kind(w) for w in stacks)
            n = sum(_held(w) for w in stacks)
            path = "fused" if _runs_a_list(model, name) else "own"
            what = ", ".join(f"{k} matrices {kind}" for kind, k in kinds.items())
            lines.append(f"{name} (ModuleList): {what} {n / 2**20:.1f} MiB; {path}")
        held, plain = held + sum(_held(w) for w in stacks), plain + sum(w.numel() * w.element_size() for w in stacks)
    lines.append(f"{len(lines)} layers: {held / 2**20:.1f} MiB of experts, {plain / 2**20:.1f} as plain weights")
    return "\n".join(lines)
