# SPDX-License-Identifier: Apache-2.0
"""fusedmoe under Hugging Face transformers.

v5: the name "fusedmoe" in ExpertsInterface, chosen with ``model.set_experts_implementation("fusedmoe")``,
``from_pretrained(..., experts_implementation="fusedmoe")`` or ``apply(model)``. v4: ``apply(model)`` patches MoE blocks by
their structure, after it has seen that the patched forward gives what the module's own gives.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import autograd, ops
from . import layers
from .layers import Layer, say_once

logger = logging.getLogger("fusedmoe")
NAME = "fusedmoe"


# ---- v5: ExpertsInterface -----------------------------------------------------------------------------------------------


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, lora: tuple = ()) -> Tensor:
    """The forward that transformers calls for every experts module whose implementation is "fusedmoe"."""
    layer = layers.layer_of(self)
    if layer.own:
        own = getattr(type(self).forward, "__wrapped__", None)
        if own is None:
            raise RuntimeError(f"{type(self).__name__} is not a layer that fusedmoe knows, and it has no forward of its own")
        return own(self, hidden_states, top_k_index, top_k_weights)
    return layers.run(self, layer, hidden_states, top_k_index, top_k_weights, lora)


def register(replace_default: bool = False) -> bool:
    """Put "fusedmoe" into transformers' ExpertsInterface. False where transformers (v4) has none.

    replace_default also puts it in the place of "grouped_mm" and "batched_mm", so that models use it without being told.
    """
    from . import peft  # which imports this module

    peft.register()
    try:
        from transformers.integrations import moe
    except ImportError:
        return False
    if not hasattr(moe, "ExpertsInterface"):
        return False
    for name in (NAME, *(("grouped_mm", "batched_mm") if replace_default else ())):
        moe.ExpertsInterface.register(name, experts_forward)
    fp8 = sys.modules.get("transformers.integrations.finegrained_fp8")  # a table of its own: such experts keep their forward
    if hasattr(fp8, "FP8ExpertsInterface"):
        fp8.FP8ExpertsInterface.register(NAME, experts_forward)
    modeling = sys.modules.get("transformers.modeling_utils")
    if hasattr(modeling, "PreTrainedModel"):
        _accept_name(modeling.PreTrainedModel)
    return True


def _accept_name(cls: type) -> None:
    """transformers 5.0 to 5.6 compare the name with a fixed list: let ours pass."""
    check = getattr(cls, "get_correct_experts_implementation", None)
    if check is None or getattr(check, "_fusedmoe", False):
        return
    from transformers import __version__

    if tuple(int(n) for n in __version__.split(".")[:2]) >= (5, 7):
        return

    def get_correct_experts_implementation(self: Any, requested_experts: str | None) -> str:
        return NAME if requested_experts == NAME else check(self, requested_experts)

    get_correct_experts_implementation._fusedmoe = True  # type: ignore[attr-defined]
    cls.get_correct_experts_implementation = get_correct_experts_implementation  # type: ignore[attr-defined]


def _is_v5_experts(module: nn.Module) -> bool:
    forward = type(module).forward
    return hasattr(forward, "__wrapped__") and hasattr(module, "_apply_gate") and hasattr(module, "config")


# ---- v4: blocks patched by structure --------------------------------------------------------------------------------------


class Bound:
    """A function bound to a module, in the place of its forward. Unlike a bound method it can be pickled."""

    def __init__(self, function: Callable, module: nn.Module, previous: Any = None, **options: Any) -> None:
        self.__func__ = function
        self.__self__ = module
        self.previous = previous  # what an unpatch puts back; None: the class's own
        self.options = options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs, **self.options)


def list_block_forward(self: nn.Module, hidden_states: Tensor, *, act: int, pair: bool) -> Any:
    """A sparse block whose experts are a ModuleList: Qwen2-MoE, Qwen3-MoE, Mixtral, OLMoE and their like."""
    w = layers.list_weights(self.experts, layers.list_names(self.experts))
    if w is None:  # a quantizer, or an adapter that is not plain LoRA, came after us
        _refuse(self)
        return type(self).forward(self, hidden_states)
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    if self.training and getattr(self, "jitter_noise", 0):
        x = x * torch.empty_like(x).uniform_(1.0 - self.jitter_noise, 1.0 + self.jitter_noise)
    logits = self.gate(x)
    renormalize = bool(getattr(self, "norm_topk_prob", True))
    ids, p = autograd.route(logits, self.top_k, renormalize=renormalize)
    out = autograd.experts(x, ids, p.to(x.dtype), w[0], act, ops.LIST, lora=w[1])
    shared = self._modules.get("shared_expert")
    if shared is not None:
        out = out + torch.sigmoid(self.shared_expert_gate(x)) * shared(x)
    out = out.view(hidden_states.shape)
    return (out, logits) if pair else out


def list_moe(self: nn.Module, hidden_states: Tensor, topk_indices: Tensor, topk_weights: Tensor, *, act: int) -> Tensor:
    """The method `moe` of DeepSeek's and GLM's blocks: routing is done, experts are a ModuleList."""
    w = layers.list_weights(self.experts, layers.list_names(self.experts))
    if w is None:
        _refuse(self)
        return type(self).moe(self, hidden_states, topk_indices, topk_weights)
    return autograd.experts(hidden_states, topk_indices, topk_weights, w[0], act, ops.LIST, lora=w[1])


def stacked_forward(self: nn.Module, hidden_states: Tensor, routing_weights: Tensor, router_indices: Tensor, *, layer: Layer,
                    lora: tuple = ()):  # fmt: skip
    """Stacked experts of v4 that take the weights first, scattered over all experts: Qwen3-VL-MoE."""
    return layers.run(self, layer, hidden_states, router_indices, routing_weights.gather(1, router_indices), lora)


def stacked_forward_ids_first(self: nn.Module, hidden_states: Tensor, router_indices: Tensor | None = None,
                              routing_weights: Tensor | None = None, *, layer: Layer, lora: tuple = ()):  # fmt: skip
    """Stacked experts of v4 that take the ids first: gpt-oss."""
    return stacked_forward(self, hidden_states, routing_weights, router_indices, layer=layer, lora=lora)


def _refuse(module: nn.Module) -> None:
    say_once(f"{type(module).__name__}: its experts' Linear layers are wrapped (an adapter), quantized, offloaded or have a bias: "
             "fusedmoe leaves it to its own forward")  # fmt: skip


def _close(a: Any, b: Any) -> bool:
    a, b = (t[0] if isinstance(t, tuple) else t for t in (a, b))
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(b.dtype, 3e-2)
    a, b = a.double().reshape(-1), b.double().reshape(-1)
    return a.shape == b.shape and bool(b.norm() > 0) and bool((a - b).norm() <= tolerance * b.norm())


def _probe(weight: Tensor, tokens: int, width: int) -> Tensor:
    g = torch.Generator().manual_seed(7)
    return torch.randn(1, tokens, width, generator=g).to(weight.device, weight.dtype)


def _try_list_block(module: nn.Module) -> tuple[str, Callable, dict] | None:
    names = layers.list_names(module._modules.get("experts"))  # type: ignore[arg-type]
    if names is None:
        return None
    w = layers.list_weights(module.experts, names)
    act = layers.gated_activation(module.experts[0])
    if w is None or act is None:
        _refuse(module)
        return None
    E, H = len(module.experts), w[0][0].shape[1]
    x = _probe(w[0][0], 6, H)
    if callable(getattr(type(module), "moe", None)):
        k = min(2, E)
        ids = torch.arange(6 * k, device=x.device).view(6, k) % E
        p = torch.rand(6, k, generator=torch.Generator().manual_seed(3)).to(x.device)
        if _close(list_moe(module, x[0], ids, p, act=act), type(module).moe(module, x[0], ids, p)):
            return "moe", list_moe, {"act": act}
    elif hasattr(module, "gate") and hasattr(module, "top_k"):
        want = type(module).forward(module, x)
        pair = isinstance(want, tuple)
        if _close(list_block_forward(module, x, act=act, pair=pair), want):
            return "forward", list_block_forward, {"act": act, "pair": pair}
    say_once(f"{type(module).__name__} routes or combines in a way that fusedmoe does not know: it is left as it is")
    return None


def _try_stacked(module: nn.Module) -> tuple[str, Callable, dict] | None:
    up, down = module._parameters.get("gate_up_proj"), module._parameters.get("down_proj")
    if up is None or down is None or up.dim() != 3 or down.dim() != 3 or up.dtype not in ops.DTYPES or _is_v5_experts(module):
        return None
    (E, a, b), (_, c, d) = up.shape, down.shape
    if (b, a) == (2 * c, d):
        flags, H = ops.TRANSPOSED, a
    elif (a, b) == (2 * d, c):
        flags, H = 0, b
    else:
        return None
    names = list(inspect.signature(type(module).forward).parameters)
    if names[1:4] == ["hidden_states", "routing_weights", "router_indices"]:
        function: Callable = stacked_forward
    elif names[1:4] == ["hidden_states", "router_indices", "routing_weights"]:
        function = stacked_forward_ids_first
    else:
        return None
    bias = module._parameters.get("gate_up_proj_bias") is not None
    x, k = _probe(up, 6, H) * 4, min(2, E)
    ids = torch.arange(6 * k, device=x.device).view(6, k) % E
    p = torch.zeros(6, E, device=x.device, dtype=x.dtype).scatter_(1, ids, torch.rand(6, k).to(x.device, x.dtype))
    want = type(module).forward(module, x, routing_weights=p, router_indices=ids)
    alpha, limit = (float(getattr(module, n, 0.0)) for n in ("alpha", "limit"))
    known = layers.gated_activation(module)
    acts = (ops.SWIGLU_OAI, ops.SWIGLU_CLAMP) if known is None else (known,)
    for act, interleaved in itertools.product(acts, (0, ops.INTERLEAVED)):
        layer = Layer(act, flags | interleaved | (ops.BIAS if bias else 0), alpha, limit, True, bias)
        if _close(stacked_forward(module, x, p, ids, layer=layer), want):
            return "forward", function, {"layer": layer}
    say_once(f"{type(module).__name__} computes something that fusedmoe does not know: it is left as it is")
    return None


@torch.no_grad()
def _recipe(module: nn.Module) -> tuple[str, Callable, dict] | None:
    """How to patch a v4 module, found by structure and proven on six tokens; None: not, or not provably, ours."""
    if not isinstance(module._modules.get("experts"), nn.ModuleList) and "gate_up_proj" not in module._parameters:
        return None
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        found = _try_list_block(module) or _try_stacked(module)
    except Exception as problem:
        say_once(f"{type(module).__name__} is left as it is: {problem}")
        found = None
    for m, training in modes:
        m.training = training
    return found


def _patch_v4(model: nn.Module) -> int:
    count, recipes = 0, {}
    for module in list(model.modules()):
        if any(isinstance(value, Bound) for value in vars(module).values()):
            count += 1
            continue
        if type(module) not in recipes:
            recipes[type(module)] = _recipe(module)
        if recipes[type(module)] is not None:
            slot, function, options = recipes[type(module)]
            if slot == "forward" and "_old_forward" in vars(module):
                slot = "_old_forward"  # accelerate's hook is in forward, and calls this
            setattr(module, slot, Bound(function, module, vars(module).get(slot), **options))
            count += 1
    return count


# ---- both -------------------------------------------------------------------------------------------------------------------


def _v5_configs(model: nn.Module) -> Iterator[Any]:
    seen: set[int] = set()
    for module in model.modules():
        if _is_v5_experts(module) and id(module.config) not in seen:
            seen.add(id(module.config))
            yield module.config


def apply(model: nn.Module) -> nn.Module:
    """Make every MoE layer of model run on fusedmoe. Returns the model; unknown ones are left alone, with a log line."""
    register()
    previous = []
    for config in _v5_configs(model):
        if config._experts_implementation != NAME:
            previous.append((config, config._experts_implementation))
            config._experts_implementation = NAME
    if previous:
        model._fmoe_previous = previous
    count = sum(not layers.look_at(m).own for m in model.modules() if _is_v5_experts(m)) + _patch_v4(model)
    config = getattr(model, "config", None)
    name = (getattr(config, "architectures", None) or [type(model).__name__])[0]
    if count:
        logger.info("%s: %d MoE layers run on fusedmoe", name, count)
    else:
        logger.warning("%s (%s): no MoE layer that fusedmoe knows; the model is unchanged", name, getattr(config, "model_type", "?"))
    return model


def unapply(model: nn.Module) -> nn.Module:
    """Undo apply."""
    for config, implementation in vars(model).pop("_fmoe_previous", ()):
        config._experts_implementation = implementation
    for module in model.modules():
        vars(module).pop("_fmoe_layer", None)
        for slot, bound in [*vars(module).items()]:
            if isinstance(bound, Bound):
                delattr(module, slot)
                if bound.previous is not None:
                    setattr(module, slot, bound.previous)
    return model
