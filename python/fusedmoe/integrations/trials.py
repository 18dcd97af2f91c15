# SPDX-License-Identifier: Apache-2.0
"""Beside its own forward, on more than a few tokens: what a function of ours has to give before it takes a module's place.

Six tokens do not show noise or dropout (they are there in training alone), clamps (values are small), capacity (there is room for six),
a rule of routing where the router is still zero or all experts are equal, a parameter that is still zero, a detached weight, or a count
that a forward keeps. A block with its experts in a list is tried as a copy with random weights, whose experts have narrow Linears; other
modules as they are.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from . import layers, routers

TOKENS, WIDTH = 64, 5
_TRIALS = {"training": "in training", "more": "on 64 tokens", "large": "on 64 tokens of large values", "equal": "on many equal tokens"}
_INTERNAL = {*vars(nn.Module())}
_PROBLEMS = RuntimeError, ValueError, IndexError, TypeError, AttributeError, AssertionError, KeyError, NotImplementedError


def _narrow(module: nn.Module, names: tuple[str, str, str], H: int) -> nn.Module:
    """A copy of a block with random weights and experts of size WIDTH."""
    listed = module.get_submodule("experts")
    experts = copy.copy(listed)
    experts._modules = {}
    for key, expert in listed.named_children():
        own = copy.copy(expert)
        if type(own) is not nn.Identity:
            sizes = zip(names, ((H, WIDTH), (H, WIDTH), (WIDTH, H)))
            own._modules = {**expert._modules, **{name: nn.Linear(*size, bias=False) for name, size in sizes}}
        experts._modules[key] = own
    shallow = copy.copy(module)
    shallow._modules = {**module._modules, "experts": experts}
    return routers.random_twin(shallow).float().requires_grad_()


def _kept(module: nn.Module) -> dict[tuple[int, str], Any]:
    """What a forward may change or leave behind: attributes and buffers, of all parts."""
    found: dict[tuple[int, str], Any] = {}
    for i, part in enumerate(module.modules()):
        plain = ((n, v) for n, v in vars(part).items() if n not in _INTERNAL and not n.startswith("_fmoe"))
        for name, value in (*plain, *part._buffers.items()):
            held = isinstance(value, (list, dict, set))
            found[i, name] = value.detach().clone() if isinstance(value, Tensor) else copy.copy(value) if held else value
    return found


def _put_back(module: nn.Module, kept: dict[tuple[int, str], Any]) -> None:
    for i, part in enumerate(module.modules()):
        for name in [n for n, v in vars(part).items() if isinstance(v, Tensor) and (i, n) not in kept]:
            delattr(part, name)
        for name, value in (*vars(part).items(), *part._buffers.items()):
            before = kept.get((i, name))
            if isinstance(value, Tensor) and isinstance(before, Tensor) and value.shape == before.shape:
                value.detach().copy_(before)
            elif isinstance(value, list) and isinstance(before, list):
                value[:] = before
            elif isinstance(before, (int, float)) and type(before) is type(value) and name in vars(part) and name not in _INTERNAL:
                vars(part)[name] = before


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        a, b = a.cpu(), b.cpu()
        return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a.double(), b.double(), 1e-3, 1e-5, equal_nan=True)
    if isinstance(a, (list, dict, set)):
        return type(a) is type(b) and len(a) == len(b)
    return a == b if isinstance(a, (bool, int, float, str)) else isinstance(a, Tensor) == isinstance(b, Tensor)


def left_behind(before: dict[tuple[int, str], Any], own: dict[tuple[int, str], Any], ours: dict[tuple[int, str], Any]) -> str:
    """The name of what the module's own forward leaves in it and ours does not."""
    changed = [key for key in own.keys() | ours.keys() if key not in own or key not in ours or not _equal(own[key], ours[key])]
    changed = [key for key in changed if key not in before or key not in own or not _equal(before[key], own[key])]
    return min((name for _, name in changed), default="")


def _near(a: Tensor | None, b: Tensor | None, limit: float, least: float = 0.0) -> bool:
    if a is None or b is None:
        return all(t is None or not t.any() for t in (a, b))
    return a.shape == b.shape and float((a.double() - b.double()).norm()) <= limit * max(float(b.double().norm()), least)


def _step(call: Callable[..., Any], module: nn.Module, given: list[Any], inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Results, and the gradients of the inputs; on the CPU, as all that is done with them: a device may not have every operator."""
    torch.manual_seed(11)
    results = call(module, *given)
    results = [t for t in (results if isinstance(results, tuple) else (results,)) if isinstance(t, Tensor)]
    values = [t.detach().cpu() for t in results]
    g, live = torch.Generator().manual_seed(5), [t for t in results if t.requires_grad]
    if not live:
        return values, [None for _ in inputs]
    grads = torch.autograd.grad(live, inputs, [torch.randn(t.shape, generator=g).to(t) for t in live], allow_unused=True)
    pairs = ((g if g is None else g.cpu(), t.detach().cpu()) for g, t in zip(grads, inputs))
    return values, [g if g is None else g * (t != 0) for g, t in pairs]  # weights that are scattered: of what was chosen


def _rows(t: Tensor, few: int, how: str) -> Tensor:
    """An argument for more tokens: its dimension of `few` is repeated; hidden states and weights with other values."""
    given, t = t, t.detach().cpu()
    dim = next(i for i, n in enumerate(t.shape) if n == few)
    times = (4 if how == "equal" else 1) * TOKENS // few + 1
    many = torch.cat([t] * times, dim)
    signed = t.is_floating_point() and bool((t < 0).any())  # hidden states, not weights
    if signed and how == "equal":
        return many.narrow(dim, 0, 1).expand_as(many).clone().to(given.device)
    if t.is_floating_point() and t.shape[-1] > 1 and not (t == 0).any():  # not scattered
        other = torch.randn(many.shape, generator=torch.Generator().manual_seed(8)).to(many) * t.double().std().to(many)
        many = other * (3 if how == "large" else 1) if signed else other.abs()
    return many.to(given.device)


@torch.enable_grad()
def _tried(module: nn.Module, own: Callable[..., Any], ours: Callable[..., Any], arguments: dict[str, Any], few: int, twin: bool) -> str:
    dtype = next((t.dtype for t in arguments.values() if isinstance(t, Tensor) and t.is_floating_point()), torch.float32)
    limit = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 3e-2)
    before = _kept(module)
    for how, words in _TRIALS.items():
        module.train(how == "training")
        tensors = {n: isinstance(t, Tensor) and few in t.shape for n, t in arguments.items()}
        given = [_rows(t, few, how) if tensors[n] else t for n, t in arguments.items()]
        given = [t.detach().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t for t in given]
        inputs = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
        inputs += list(module.parameters()) if twin else []
        found = []
        for call in (own, ours):
            found.append((*_step(call, module, given, inputs), _kept(module)))
            _put_back(module, before)
        (a, da, own_left), (b, db, ours_left) = found
        if not all(torch.isfinite(t).all() for t in a):
            continue
        if len(a) != len(b) or not all(u.dtype == v.dtype and _near(v, u, limit, 1e-30) for u, v in zip(a, b)):
            return f"{words} it gives other values"
        least = 1e-3 * max([float(t.double().norm()) for t in da if t is not None], default=0.0)
        if not all(_near(v, u, 10 * limit, least) for u, v in zip(da, db)):
            return f"{words} it has other gradients"
        if name := left_behind(before, own_left, ours_left):
            return f"its own forward leaves {name!r} behind"
    return ""


@torch.enable_grad()
def forgotten(module: nn.Module, own: Callable[..., Any], ours: Callable[..., Any], given: list[Any]) -> str:
    """The name of what the module's own forward leaves in it in training, and ours does not."""
    before, kept, training = _kept(module), [], module.training
    for call in (own, ours):
        call(module.train(), *given)
        kept.append(_kept(module))
        _put_back(module, before)
    module.train(training)
    return left_behind(before, *kept)


def differs(module: nn.Module, slot: str, function: Callable[..., Any], options: dict[str, Any], arguments: dict[str, Any],
            few: int) -> str:  # fmt: skip
    """In what a function differs from the module's own, in words; "" where nothing was found. few: tokens of the arguments."""
    own: Callable[..., Any] = getattr(type(module), slot)
    ours = lambda module, *args: function(module, *args, **options)  # noqa: E731
    experts = module._modules.get("experts")
    names = layers.list_names(experts) if experts is not None else None
    if names is None:
        return _tried(module, own, ours, arguments, few, False)
    tried = None
    with suppress(*_PROBLEMS):  # what cannot be copied, or looks into the Linears of its experts
        H = next(t.shape[-1] for t in arguments.values() if isinstance(t, Tensor) and t.is_floating_point())
        twin = _narrow(module, names, int(H))
        plain = {n: t.detach().cpu().float() if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in arguments.items()}
        plain = {n: t.cpu() if isinstance(t, Tensor) else t for n, t in plain.items()}
        own(twin, *plain.values())
        tried = twin
    if tried is None:
        return _tried(module, own, ours, arguments, few, False)
    return _tried(tried, own, ours, plain, few, True)
