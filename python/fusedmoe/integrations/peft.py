# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of PEFT on experts, computed in the grouped kernels: W + BA is never made.

Stacked experts: PEFT wraps the module once per target parameter (``lora.ParamWrapper``), makes W + BA of all experts before
each forward and the gradient of it after. `register` gives the wrapper a forward that hands the factors to fusedmoe instead.
Separate Linears (transformers v4): `look_through` and `stack` find the factors of PEFT's Linear layers.

What is not plain LoRA with one active adapter and no dropout stays PEFT's to compute, with one log line.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from . import layers, seams, transformers

Adapter = tuple[nn.Module, str] | None  # a LoRA layer and the name of its adapter
Factors = tuple[Tensor, Tensor, float] | None  # a [E,rank,in], b [E,out,rank], the scale


def _active(lora: nn.Module) -> str | None:
    """The adapter that a LoRA layer applies now, "" for none; None: PEFT should see to it."""
    if lora.merged or lora.disable_adapters:
        return None if lora.merged and lora.disable_adapters else ""  # both: PEFT unmerges first
    names = [name for name in lora.active_adapters if name in lora.lora_A]
    if len(names) != 1:
        return None if names else ""
    name, dropout = names[0], lora.lora_dropout[names[0]]
    special = lora.use_dora.get(name) or name in getattr(lora, "lora_variant", ()) or lora.lora_B[name].bias is not None
    return None if special or (dropout.training and getattr(dropout, "p", 0)) else name


def _factors(lora: nn.Module, name: str, transposed: bool) -> Factors:
    """Of a stacked parameter."""
    A, B, E = lora.lora_A[name].weight, lora.lora_B[name].weight, lora.num_experts
    a, b, scale = A.view(E, -1, A.shape[1]), B.view(B.shape[0], -1, E).permute(2, 0, 1), lora.scaling[name]
    # A belongs to the parameter's last dimension, or (always before PEFT 0.19) to the one before it
    last = getattr(lora, "_did_swap_in_out_features", False)
    return (a, b, scale) if last != transposed else (b.transpose(1, 2), a.transpose(1, 2), scale)


def _layer(base: nn.Module) -> layers.Layer | None:
    """The Layer of an experts module that runs on fusedmoe and can take adapters."""
    layer, bound = None, vars(base).get("forward")
    if isinstance(bound, seams.Bound):
        layer = bound.options.get("layer")
    elif hasattr(base, "_apply_gate") and hasattr(base, "config"):
        layer = layers.layer_of(base) if transformers.chosen(base) == transformers.NAME else None
    return layer if layer and not layer.own and not layer.norm and layer.act is not None else None


def _unwrap(wrapper: nn.Module) -> tuple[dict[str, tuple[nn.Module, str | None]], nn.Module]:
    """The wrappers of a module's parameters, which are nested, with what each applies now; and the module."""
    wrappers, base = {}, wrapper
    while isinstance(base, type(wrapper)):
        wrappers[base.parameter_name] = base, _active(base)
        base = base.base_layer
    return wrappers, base


def _plain(wrappers: dict[str, tuple[nn.Module, str | None]], names: tuple[str, str]) -> bool:
    """Whether the kernels can compute all of them."""
    return all(name is not None and lora.num_experts > 1 for lora, name in wrappers.values()) and wrappers.keys() <= {*names}


def _names(layer: layers.Layer) -> tuple[str, str]:
    return "gate_up_proj" if layer.gate else "up_proj", "down_proj"


OURS, PEFTS = "; LoRA in the kernels", "; PEFT computes the adapters"


def adapters(model: nn.Module) -> dict[nn.Module, str]:
    """Who computes the adapters of stacked experts, in words."""
    kind, found = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None), {}
    for wrapper in (m for m in model.modules() if kind is not None and isinstance(m, kind)):
        wrappers, base = _unwrap(wrapper)
        layer = _layer(base)  # the outermost wrapper comes first, and has all of them
        found.setdefault(base, OURS if layer and _plain(wrappers, _names(layer)) else PEFTS)
    return found


def _forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """ParamWrapper.forward."""
    wrappers, base = _unwrap(self)
    layer = _layer(base)
    if layer is None or "adapter_names" in kwargs:  # one for each sample, which PEFT refuses
        return self._fmoe_forward(x, *args, **kwargs)
    names = _names(layer)
    if not _plain(wrappers, names):
        layers.say_once(f"{type(base).__name__}: several adapters, or not plain LoRA: PEFT computes them")
        return self._fmoe_forward(x, *args, **kwargs)
    found = [wrappers.get(name, (None, "")) for name in names]
    lora = [_factors(wrapper, name, bool(layer.flags & layers.ops.TRANSPOSED)) if name else None for wrapper, name in found]
    return base(x, *args, **kwargs, lora=lora)


def _merge(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """ParamWrapper.merge, which adds to the parameter in place."""
    from ..quant.merging import merged  # which imports this module

    merged(self, lambda: self._fmoe_merge(*args, **kwargs))


def register() -> None:
    """Patch ParamWrapper, where PEFT (from 0.17 on) is imported."""
    wrapper = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
    if wrapper is not None and not hasattr(wrapper, "_fmoe_forward"):
        wrapper._fmoe_forward, wrapper.forward = wrapper.forward, _forward
        wrapper._fmoe_merge, wrapper.merge = wrapper.merge, _merge


_LINEARS = "Linear", "Linear4bit", "Linear8bitLt"  # the last two wrap those of bitsandbytes


def look_through(module: Any) -> tuple[Any, Adapter]:
    """The Linear inside PEFT's and its adapter, (module, None) where there is none; (None, None): PEFT should see to it."""
    if type(module).__name__ not in _LINEARS or not type(module).__module__.startswith("peft.tuners.lora."):
        return module, None
    name = None if getattr(module, "fan_in_fan_out", False) or module._forward_hooks or module._forward_pre_hooks else _active(module)
    return (None, None) if name is None else (module.base_layer, (module, name) if name else None)


def stack(adapters: list[Adapter]) -> list[Factors] | None:
    """The factors of W1 and W2 from the adapters of all gates, ups and downs; None where only some have one."""
    E, found = len(adapters) // 3, []
    for part in (adapters[: 2 * E], adapters[2 * E :]):
        ranks = {adapter[0].r[adapter[1]] if adapter else 0 for adapter in part}
        if len(ranks) > 1:
            return None
        if ranks == {0}:
            found.append(None)
            continue
        a, b = (torch.stack([getattr(lora, of)[name].weight for lora, name in part]) for of in ("lora_A", "lora_B"))
        scales = [lora.scaling[name] for lora, name in part]
        if len({*scales}) > 1:  # each has its own
            a, scales = a * a.new_tensor(scales).view(-1, 1, 1), [1.0]
        if len(part) > E:  # gate and up have an A each: one below the other, and their B on the diagonal
            a = torch.cat((a[:E], a[E:]), 1)
            b = torch.cat([nn.functional.pad(t, pad) for t, pad in ((b[:E], (0, *ranks)), (b[E:], (*ranks, 0)))], 1)
        found.append((a, b, scales[0]))
    return found
