# SPDX-License-Identifier: Apache-2.0
"""Modules that transformers gives no interface to, patched by their structure: v4's blocks and v5's undecorated experts.

A seam is a function in the place of a module's forward (or of its method `moe`). It is put there after it has given what the
module's own gives on six random tokens.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import chain, product
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from .. import autograd, ops
from . import layers, routers, trials
from .layers import Layer, say_once
from .probes import isolated

Candidate = tuple[str, Callable, dict[str, Any], dict[str, Any]]  # where, function, its options, arguments to try it with
TOKENS = 6


class Bound:
    """A function bound to a module, in the place of its forward. Unlike a bound method it can be pickled."""

    def __init__(self, function: Callable, module: nn.Module, previous: Any = None, **options: Any) -> None:
        self.__func__, self.__self__, self.options = function, module, options
        self.previous = previous  # what an unpatch puts back; None: the class's own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs, **self.options)


UNREAD = "its experts are quantized, offloaded, or have a bias, a hook or an adapter that fusedmoe does not compute"
left: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # modules that keep their own forward, and why


def _refuse(module: nn.Module) -> None:
    if "_fmoe_ep" in vars(module):
        raise RuntimeError(f"{type(module).__name__}: {UNREAD}, and its own forward has this rank's experts only")
    say_once(f"{type(module).__name__}: {UNREAD}: it keeps its own forward")


def _leave(module: nn.Module, why: str, what: str = "it keeps its own forward") -> None:
    left[module] = why
    say_once(f"{type(module).__name__}: {why}: {what}")


def _random(like: Tensor, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), device="cpu").to(like.device, like.dtype)


@cache  # a model of v4 has ten thousands of modules, of a few classes
def _names(function: Callable) -> list[str]:
    return list(inspect.signature(function).parameters)[1:]


# ---- experts that are told ids and routing weights ------------------------------------------------------------------------

IDS = ("top_k_index", "router_indices", "topk_indices", "topk_ids", "top_experts")
SIZES = "expert_size", "tokens_per_expert", "num_tokens_per_expert"
WEIGHTS = ("top_k_weights", "routing_weights", "topk_weights", "topk_weight", "top_weights")


def _flat_weights(module: nn.Module) -> tuple[list[Tensor], tuple] | None:
    """DBRX: gates, ups and downs of all experts under one another, downs transposed."""
    m = module.mlp
    if list(m._parameters) != ["w1", "v1", "w2"] or layers.hooked(m):
        return None
    gate, up, down = (w.view(m.moe_num_experts, -1, w.shape[1]) for w in (m.w1, m.v1, m.w2))
    return [*gate, *up, *down.transpose(1, 2)], ()


def given_forward(self: nn.Module, *args: Any, names: list[str], scattered: bool, layer: Layer, read: Callable | None, slot: str,
                  lora: tuple = (), **kwargs: Any) -> Tensor:  # fmt: skip
    """names: the arguments in order, among them the hidden states (first), the ids and the routing weights, which may be scattered
    over all experts; read: what gives the list of weights."""
    given = {**dict(zip(names, args)), **kwargs}
    found = read(self) if read else (None, lora)
    if found is None:  # a quantizer, or an adapter that is not plain LoRA, came after us
        _refuse(self)
        return getattr(type(self), slot)(self, **given)
    ids, p = (next(given[n] for n in known if n in given) for known in (IDS, WEIGHTS))
    return layers.run(self, layer, given[names[0]], ids, p.gather(1, ids) if scattered else p, found[1], found[0])


def _given(module: nn.Module) -> Iterator[Candidate]:
    slot = "moe" if callable(getattr(type(module), "moe", None)) else "forward"
    names, read = _names(getattr(type(module), slot)), None
    if not set(IDS) & set(names) or not set(WEIGHTS) & set(names):
        return
    if "gate_up_proj" in module._parameters:
        if module.gate_up_proj.dtype not in ops.DTYPES:
            return _leave(module, layers.quantized(module))
        E, H, found = _stacked(module)
    else:
        read, owner = (layers.list_weights, module.experts[0]) if "experts" in module._modules else (_flat_weights, module.mlp)
        w, act = read(module), layers.gated_activation(owner)
        if w is None or act is None:
            return _leave(module, UNREAD)
        E, H = len(w[0]) // 3, w[0][0].shape[1]
        found = [Layer(act, ops.LIST | ops.SKIP_E, identity=read is layers.list_weights and len(module.experts) > E)]
    total = E + 2 * found[0].identity
    batch = _random(next(module.parameters()), 1, TOKENS, H) * 4
    ids = (torch.arange(2 * TOKENS, device=batch.device) % total).view(TOKENS, 2)
    few = _random(batch, TOKENS, 2).abs()
    many = few.new_zeros(TOKENS, total).scatter_(1, ids, few)  # over all experts, as v4's stacked ones want it
    for x, p, layer in product((batch[0], batch), (few, many), found):
        arguments = {n: x if n == names[0] else ids if n in IDS else p for n in names}
        yield slot, given_forward, dict(names=names, scattered=p is many, layer=layer, read=read, slot=slot), arguments


def _stacked(module: nn.Module) -> tuple[int, int, list[Layer]]:
    """E, H and what stacked experts may compute."""
    (total, a, b), (E, c, d) = module.gate_up_proj.shape, module.down_proj.shape
    flags, H = (ops.TRANSPOSED, a) if (b, a) == (2 * c, d) else (0, b)
    bias = module._parameters.get("gate_up_proj_bias") is not None
    base = Layer(None, flags | ops.SKIP_E | ops.BIAS * bias, bias=bias, identity=total > E)
    act = layers.gated_activation(module)
    if hasattr(module, "_apply_gate"):
        found = [layers.activation_by_result(module._apply_gate, True, int(c if flags else d), module) or (None, 0, 0.0, 0.0)]
    else:
        alpha, limit = (float(getattr(module, n, 0.0)) for n in ("alpha", "limit"))
        acts = (ops.SWIGLU_OAI, ops.SWIGLU_CLAMP) if act is None else (act,)
        found = [(act, interleaved, alpha, limit) for act in acts for interleaved in (0, ops.INTERLEAVED)]
    return E, H, [base._replace(act=act, flags=base.flags | more, alpha=alpha, limit=limit) for act, more, alpha, limit in found]


# ---- whole blocks -----------------------------------------------------------------------------------------------------------
def list_block_forward(self: nn.Module, *args: Any, act: int, pair: bool, gate: str, rule: dict, bias: str, **kwargs: Any) -> Any:
    """A block of v4 with softmax routing and its experts in a ModuleList: Qwen2-MoE, Qwen3-MoE, Mixtral, OLMoE and their like.
    What is given beside the hidden states (a mask) is not read: then it is the block's own forward that runs."""
    w = layers.list_weights(self) if len(args) + len(kwargs) == 1 else ([], ())
    if not w or not w[0]:
        if w is None:
            _refuse(self)
        return type(self).forward(self, *args, **kwargs)
    (hidden_states,) = *args, *kwargs.values()
    if self.training and getattr(self, "jitter_noise", 0):
        hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(1.0 - self.jitter_noise, 1.0 + self.jitter_noise)
    x, m = hidden_states.reshape(-1, hidden_states.shape[-1]), self._modules
    logits = m[gate](hidden_states.to(next(m[gate].parameters()).dtype)).flatten(0, -2)
    select = attrgetter(bias)(self).view(-1) if bias else None
    ids, p = autograd.route(logits, self.top_k, select_bias=select, **rule)
    out = layers.experts_of(self)(x, ids, p.to(x.dtype), w[0], act, ops.LIST | layers.kept_by(self), lora=w[1])
    shared = m.get("shared_expert") or m.get("shared_mlp") or m.get("shared_experts")
    if shared is not None:
        out = out + (torch.sigmoid(m["shared_expert_gate"](x)) * shared(x) if "shared_expert_gate" in m else shared(x))
    out = out.view(hidden_states.shape)
    return (out, logits) if pair else out


def inner(module: nn.Module) -> nn.Module:
    """What PEFT's wrappers of a module's parameters are around."""
    while type(module).__name__ == "ParamWrapper" and type(module).__module__.startswith("peft."):
        module = module.get_submodule("base_layer")
    return module


def scaled_experts(block: nn.Module, layer: Layer) -> tuple[list[Tensor], Sequence] | None:
    """W1 and W2 of Llama 4's experts, and their LoRA factors; None: a quantizer, or an adapter that is not plain LoRA, came after us."""
    from . import peft  # which imports this module

    outer = block.get_submodule("experts")
    own, lora = (base := inner(outer))._parameters, []
    if layers.hooked(outer) or layers.hooked(base):
        return None
    if base is not outer:
        names, (wrappers, _) = peft._names(layer), peft._unwrap(outer)
        if not peft._plain(wrappers, names):
            return None
        found = [wrappers.get(name, (None, "")) for name in names]
        lora = [peft._factors(wrapper, name, bool(layer.flags & ops.TRANSPOSED)) if wrapper and name else None for wrapper, name in found]
    up, down = own.get("gate_up_proj"), own.get("down_proj")
    return None if up is None or down is None else ([up, down], lora)


def scaled_input_forward(self: nn.Module, hidden_states: Tensor, *, layer: Layer) -> tuple[Tensor, Tensor]:
    """Llama 4: the score scales what the expert reads, not what it gives. Experts that were not chosen would read zeros."""
    found = scaled_experts(self, layer)
    if found is None:
        _refuse(self)
        return type(self).forward(self, hidden_states)
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores, logits = self.router(x)
    p, ids = scores.topk(self.top_k, dim=1)
    rows = (x[:, None] * p[..., None]).flatten(0, 1)
    out = layers.run(inner(self.experts), layer, rows, ids.view(-1, 1), rows.new_ones(len(rows), 1), found[1], found[0])
    return self.shared_expert(x) + out.view(*ids.shape, -1).sum(1), logits


def _block(module: nn.Module) -> Iterator[Candidate]:
    experts, gate = module._modules.get("experts"), next((n for n in ("gate", "router") if n in module._modules), None)
    names = _names(type(module).forward)
    if experts is None or gate is None or not hasattr(module, "top_k"):
        return
    if layers.list_names(experts):
        w, act = layers.list_weights(module), layers.gated_activation(experts[0])
        if w is None or act is None:
            return _leave(module, UNREAD)
        biases = [n for n in routers.per_expert(module, len(experts)) if not n.startswith((gate, "experts."))]
        rules = dict(score=ops.TOPK_SOFTMAX), dict(score=ops.SOFTMAX), dict(score=ops.SOFTMAX, renormalize=True)
        for rule, pair, bias in product(rules, (True, False), ("", *biases)):
            options = dict(act=act, pair=pair, gate=gate, rule=rule, bias=bias)
            yield "forward", list_block_forward, options, {names[0]: _random(w[0][0], 1, TOKENS, w[0][0].shape[1])}
    elif "gate_up_proj" in experts._parameters and len(_names(type(experts).forward)) == 1:
        _, H, found = _stacked(experts)
        for layer in found:
            yield "forward", scaled_input_forward, dict(layer=layer), {names[0]: _random(experts.down_proj, 1, TOKENS, H)}


# ---- one grouped matmul: ParallelExperts of JetMoE and of Granite before 5.13, Aria before 5.22 ----------------------------------
def grouped_linear_forward(self: nn.Module, *args: Any, transposed: bool, **kwargs: Any) -> Tensor:
    """Two arguments, under any names: rows sorted by expert, and how many each expert has."""
    inputs, sizes = *args, *kwargs.values()
    return autograd.GmmFunction.apply(inputs, self.weight.transpose(1, 2) if transposed else self.weight, sizes)


def is_grouped_linear(module: nn.Module) -> bool:
    """Whether it is one grouped matmul."""
    return list(module._parameters) == ["weight"] and _names(type(module).forward)[1:] in ([n] for n in SIZES)


def _grouped_linear(module: nn.Module) -> Iterator[Candidate]:
    names = _names(type(module).forward)
    if not is_grouped_linear(module) or module.weight.dim() != 3:
        return
    sizes = [TOKENS, *[0] * (len(module.weight) - 2), 2]
    for transposed in (True, False):
        x = _random(module.weight, sum(sizes), module.weight.shape[2 if transposed else 1])
        arguments = {names[0]: x, names[1]: sizes if names[1] == "expert_size" else torch.tensor(sizes)}
        yield "forward", grouped_linear_forward, dict(transposed=transposed), arguments


# ---- rows sorted by expert: GroupedExperts of DeepSpeed's AutoEP -----------------------------------------------------------------
SORTED = {"swiglu": ops.SWIGLU, "geglu_tanh": ops.GEGLU_TANH, "swiglu_clamped": ops.SWIGLU_CLAMP, "swiglu_oai": ops.SWIGLU_OAI}


def sorted_rows(x: Tensor, sizes: Tensor, w: Sequence[Tensor], act: int, alpha: float = 0.0, limit: float = 0.0, keep: int = 0) -> Tensor:
    """w (gates, ups, downs) on rows that are sorted by expert, sizes of them for each; what comes after them gives zeros."""
    ids = torch.searchsorted(sizes.cumsum(0), torch.arange(len(x), device=x.device), right=True)
    p = torch.ones_like(ids, dtype=torch.float32)
    return autograd.experts(x, ids.unsqueeze(1), p.unsqueeze(1), w, act, ops.LIST | ops.SKIP_E | keep, alpha, limit)


def sorted_rows_forward(self: nn.Module, x: Tensor, num_tokens_per_expert: Tensor, *, layer: Layer) -> Tensor:
    """w1, w3 [E,I,H] and w2 [E,H,I] of DeepSpeed."""
    w = [matrix for name in ("w1", "w3", "w2") for matrix in getattr(self, name).unbind()]
    return sorted_rows(x, num_tokens_per_expert, w, layer.act, layer.alpha, layer.limit, layers.kept_by(self))


def _sorted_rows(module: nn.Module) -> Iterator[Candidate]:
    names, act = _names(type(module).forward), SORTED.get(getattr(module, "activation", None))
    if names[1:] != ["num_tokens_per_expert"] or [*module._parameters] != ["w1", "w2", "w3"] or module.w1.dim() != 3:
        return
    if act is None or module.w1.dtype not in ops.DTYPES:
        return _leave(module, f"its activation is {module.activation!r}" if act is None else layers.quantized(module))
    alpha, limit = (float(getattr(module, f"activation_{n}")) for n in ("alpha", "limit"))
    layer = Layer(act, alpha=alpha if act == ops.SWIGLU_OAI else 0.0, limit=limit if "swiglu_" in module.activation else 0.0)
    sizes = torch.tensor([TOKENS, *[0] * (len(module.w1) - 2), 2], device=module.w1.device)[-len(module.w1) :]
    x = _random(module.w1, int(sizes.sum()), module.w1.shape[2]) * 4
    yield "forward", sorted_rows_forward, dict(layer=layer), {names[0]: x, names[1]: sizes}


def _told(module: nn.Module) -> bool:
    """Whether it is told which experts, or how many rows each of them has."""
    own = (getattr(type(module), slot, None) for slot in ("moe", "forward"))
    return any(name in (*IDS, *SIZES) for function in own if callable(function) for name in _names(function))


def takes_experts(module: nn.Module) -> bool:
    """Whether it may be a module of experts: it is told which, or, as Llama 4's, gets rows for all of them."""
    return _told(module) or len(_names(type(module).forward)) == 1


def is_moe(module: nn.Module) -> bool:
    """Whether it looks like a MoE layer, or a part of one, from outside."""
    return "experts" in module._modules or _told(module) or type(module).__name__.endswith(("MoE", "Moe"))


# ---- finding and putting ------------------------------------------------------------------------------------------------------
def _close(a: Any, b: Any) -> bool:
    a, b = (t if isinstance(t, tuple) else (t,) for t in (a, b))
    limits = [{torch.float64: 1e-9, torch.float32: 1e-4}.get(v.dtype, 3e-2) * v.double().norm() for v in b]
    near = (u.shape == v.shape and limit > 0 and (u.double() - v.double()).norm() <= limit for u, v, limit in zip(a, b, limits))
    return len(a) == len(b) and all(near)


def find(module: nn.Module, fuse_routers: bool = True, twin: bool = True) -> tuple[str, Callable, dict] | None:
    """Where to put which function with which options; None: not, or not provably, ours. twin: one may be asked in its place."""
    return isolated(partial(_find, module, fuse_routers, twin), module)


@torch.no_grad()
def _find(module: nn.Module, fuse_routers: bool, twin: bool) -> tuple[str, Callable, dict] | None:
    modes, tried, blank, refused = [(m, m.training) for m in module.modules()], False, False, ""
    module.eval()
    try:
        if not _told(module) and not ("experts" in module._modules and hasattr(module, "top_k")):
            return routers.find(module) if fuse_routers else None
        twin = twin and not any(hasattr(m, "_hf_hook") for m in module.modules())  # accelerate may bring weights to its own forward only
        away = twin and any(p.is_meta or isinstance(p, FakeTensor) or hasattr(p, "ds_shape") for p in module.parameters())  # ZeRO-3's parts
        forms = () if away else (_given, _block, _grouped_linear, _sorted_rows)
        for slot, function, options, arguments in chain.from_iterable(form(module) for form in forms):
            tried = True
            try:
                want = getattr(type(module), slot)(module, **arguments)
            except (RuntimeError, IndexError, ValueError) as problem:  # it wants these arguments in another shape
                refused = f" (its own forward on a probe: {type(problem).__name__}: {problem})"
                continue
            if _close(function(module, *arguments.values(), **options), want):
                problem = trials.differs(module, slot, function, options, arguments, TOKENS)
                if not problem:
                    return slot, function, options
                refused = f" ({problem})"
                continue
            blank = blank or not _close(want, want)  # zeros or NaN: FSDP's processes but the first have no weights yet
        if away or (blank and twin):
            asked = routers.random_twin(module)
            found = _find(asked, True, False)
            if asked in left:
                left[module] = left.pop(asked)
            return found
        if tried:
            _leave(module, f"it computes something that fusedmoe does not know{refused}", "it is left as it is")
    except Exception as problem:
        _leave(module, f"{type(problem).__name__}: {problem}", "it is left as it is")
    finally:
        for m, training in modes:
            m.training = training
    return None


_PLAIN = int, float, bool, str, FunctionType, BuiltinFunctionType


def _kind(module: nn.Module, whole: bool, known: dict[int, tuple]) -> tuple:
    """What modules that compute the same have in common: class and numbers; whole: functions and sizes too, and those of its parts."""
    kinds = _PLAIN if whole else _PLAIN[:4]
    own = {n: v for n, v in vars(module).items() if type(v) in kinds and n not in ("layer_idx", "training", "forward", "_old_forward")}
    key: tuple = type(module), *own.items()
    if not whole:
        return key
    if id(module) not in known:
        parts = [(n, _kind(m, True, known)) for n, m in module._modules.items() if m is not None]
        sizes = [(n, tuple(t.shape)) for n, t in module._parameters.items() if t is not None]
        listed = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        known[id(module)] = (*key, *sizes, frozenset(kind for _, kind in parts) if listed else tuple(parts))
    return known[id(module)]


def candidates(model: nn.Module, fuse_routers: bool) -> Iterator[tuple[nn.Module, nn.Module, tuple[str, Callable, dict] | None]]:
    """Every module that has no seam yet, the one of its kind that was tried out, and what ``find`` said of that."""
    found: dict[tuple, tuple] = {}
    parts: dict[int, tuple] = {}
    for module in list(model.modules()):
        if layers.is_v5_experts(module) or any(isinstance(v, Bound) for v in vars(module).values()):
            continue
        if (key := _kind(module, is_moe(module) or hasattr(module, "top_k"), parts)) not in found:
            found[key] = module, find(module, fuse_routers)
        yield module, *found[key]


def patch(model: nn.Module, fuse_routers: bool) -> bool:
    """Put seams into model. Whether it has any now, besides those of routers."""
    for module, first, seam in candidates(model, fuse_routers):
        if seam:
            _put(module, *seam)
        elif is_moe(module):
            left[module] = left.get(first, "its structure is not one that fusedmoe knows")
    return any(seam_of(module) for module in model.modules())


def seam_of(module: nn.Module) -> Bound | None:
    """The function of ours that a module has in the place of its forward; a router's is none of a MoE layer."""
    return next((v for v in vars(module).values() if isinstance(v, Bound) and v.__func__ is not routers.forward), None)


def _put(module: nn.Module, slot: str, function: Callable, options: dict) -> None:
    if slot == "forward" and "_old_forward" in vars(module):
        slot = "_old_forward"  # accelerate's hook is in forward, and calls this
    previous = vars(module).get(slot)
    if slot == "forward" and previous is not None and getattr(previous, "__func__", None) is not type(module).forward:
        return _leave(module, "it has a forward on the instance (tensor parallelism, a hook)", "fusedmoe leaves it alone")
    setattr(module, slot, Bound(function, module, previous, **options))
    left.pop(module, None)


def unpatch(model: nn.Module) -> None:
    """Take every seam out again."""
    for module in model.modules():
        vars(module).pop("_fmoe_layer", None)
        vars(module).pop("_fmoe_keep", None)
        for slot, bound in [*vars(module).items()]:
            if isinstance(bound, Bound):
                delattr(module, slot)
                if bound.previous is not None:
                    setattr(module, slot, bound.previous)
