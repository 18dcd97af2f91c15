# SPDX-License-Identifier: Apache-2.0
"""The routers of a model: where each chooses, out of how many experts, found by running a random copy of it on random tokens."""

import copy
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..integrations import layers, probes, seams
from ..integrations import routers as rules
from .choice import Choice, Seen, watching

TOKENS = 24  # of a probe: no number of experts, groups or choices is likely to be the same
_keys = itertools.count()


@dataclass(eq=False)
class Site:
    """One router. turn: which of its choices it is that counts; groups: which are of groups of experts; -1, with output: it chooses by
    no top-k, and that output are its ids. refused: why it cannot be replayed."""

    name: str
    E: int
    k: int
    turn: int
    groups: tuple[int, ...] = ()
    output: int = -1
    refused: str = ""
    layer: int = 0  # the decoder's index
    replayed: bool = False
    key: int = field(default_factory=_keys.__next__)

    def __deepcopy__(self, memo: dict) -> "Site":
        return copy.copy(self)

    def __copy__(self) -> "Site":
        new = object.__new__(Site)
        vars(new).update(vars(self), key=next(_keys))
        return new

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, key=next(_keys))


class _Reached(Exception):
    """A probe came as far as the experts."""


class _NoExperts(nn.Module):
    """In the place of experts: whatever is done with them ends the probe."""

    def _end(self, *_: Any) -> Any:
        raise _Reached

    forward = __getitem__ = __iter__ = __len__ = _end


def _told(module: nn.Module) -> bool:
    """Whether its forward is told which experts, or how many rows each has."""
    return any(name in (*seams.IDS, *seams.SIZES) for name in seams._names(type(module).forward))


def _experts(module: nn.Module) -> list[str]:
    """The names of those children that are a MoE layer's experts, and not a layer with a router of its own."""
    children = [(n, m) for n, m in module._modules.items() if m is not None]
    return [n for n, m in children if layers.is_v5_experts(m) or _told(m) or (n == "experts" and not _experts(m))]


def _twin(module: nn.Module) -> nn.Module:
    """A copy with random weights and without experts."""
    shallow = copy.copy(module)
    shallow._modules = {n: _NoExperts() if n in _experts(module) else m for n, m in module._modules.items()}
    shallow.__dict__ = {n: v for n, v in vars(shallow).items() if not isinstance(v, seams.Bound) or v.__func__ is rules.forward}
    for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
                 "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks"):  # fmt: skip
        shallow.__dict__[name] = type(vars(module)[name])()
    bound = vars(module).get("forward")
    twin = rules.random_twin(shallow).float()
    if isinstance(bound, seams.Bound):  # a function of ours, on this copy
        twin.forward = seams.Bound(bound.__func__, twin, **bound.options)
    for buffer in twin.buffers():
        if not buffer.is_floating_point() and buffer.dim() == 2:  # a table of token ids: rows that differ
            buffer.copy_(torch.arange(buffer.numel()).view(buffer.shape) % max(2, buffer.shape[1] + 1))
    return twin


def _arguments(module: nn.Module, width: int, g: torch.Generator) -> Iterator[tuple[Callable[[], list], dict]]:
    """Ways to call a module on random tokens: hidden states in two or three dimensions, and what else it must be given."""
    named = [*inspect.signature(type(module).forward).parameters.values()][2:]
    experts = max((p.shape[0] for p in module.parameters() if p.dim() == 2), default=1)
    tables = [b.shape[0] for b in module.buffers() if b.dim() == 2 and not b.is_floating_point()]
    tokens = torch.arange(TOKENS).view(1, -1) % min(tables, default=TOKENS)
    needed = [p.name for p in named if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    given = [tokens if n == "input_ids" else torch.randn(experts, generator=g) if n.endswith("bias") else None for n in needed]
    more = {p.name: tokens for p in named if p.name == "input_ids" and p.name not in needed}
    x = torch.randn(TOKENS, width, generator=g)
    for states in (x, x[None]):
        yield (lambda states=states: [states.clone(), *given]), more


def _flat(result: Any) -> list[Tensor]:
    return [t for t in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(t, Tensor)]


_PROBLEMS = RuntimeError, ValueError, IndexError, TypeError, AttributeError, AssertionError, KeyError, NotImplementedError


def _run(module: nn.Module, arguments: tuple, mode: Any) -> list[Tensor]:
    """The tensors a module returns; none where it has chosen and came to its experts."""
    args, more = arguments
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([]))
        torch.manual_seed(11)
        stack.enter_context(watching(mode))
        try:
            return _flat(module(*args(), **more))
        except _Reached:
            return []
        except _PROBLEMS:
            if getattr(mode, "calls", None):  # a function of ours, which read the experts first
                return []
            raise


def _probe(module: nn.Module) -> Site | None:
    """The Site of a module that chooses; None: it does not. ProbeError: it could not be run."""
    return probes.isolated(partial(_probed, module))


@torch.no_grad()
def _probed(module: nn.Module) -> Site | None:
    widths = sorted({int(getattr(p, "ds_shape", p.shape)[-1]) for p in _own(module) if len(getattr(p, "ds_shape", p.shape)) == 2})
    twin, problem = _twin(module).eval(), None
    for width in widths:
        for arguments in _arguments(twin, width, torch.Generator().manual_seed(6)):
            seen = Seen()
            try:
                results = _run(twin, arguments, seen)
            except _PROBLEMS as found:
                problem = problem or found
                continue
            if seen.calls and seen.ids[-1].numel() != TOKENS * seen.calls[-1][1]:
                continue  # of another width, and viewed as fewer tokens
            if seen.calls:
                return _site(twin, arguments, seen, results)
            ids = [i for i, t in enumerate(results) if t.dtype == torch.int64 and t.dim() == 2 and len(t) == TOKENS]
            return _tableless(twin, arguments, ids[0], results) if ids else None
    if problem is not None:
        raise probes.ProbeError(f"it could not be tried out ({type(problem).__name__}: {problem})") from problem
    return None


def _own(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, without those of experts."""
    yield from (p for p in module._parameters.values() if p is not None)
    for name, child in module._modules.items():
        if child is not None and name not in _experts(module):
            yield from _own(child)


def _site(twin: nn.Module, arguments: tuple, seen: Seen, results: list[Tensor]) -> Site:
    """Its last choice is the one of experts: with other ids the results are others, with the same ids they are the same bits."""
    E, k, _ = seen.calls[-1]
    turn, rows = len(seen.calls) - 1, seen.ids[-1].reshape(-1, k)
    groups = tuple(i for i, (n, _, dims) in enumerate(seen.calls[:-1]) if dims == 2 and n < E and E % n == 0)
    site = Site("", E, k, turn, groups)
    other = (rows + 1) % E
    same, changed = (_run(twin, arguments, Choice("", E, k, turn, groups, ids, False)) for ids in (rows, other))
    if len(same) != len(results) or len(changed) != len(results) or not all(map(torch.equal, same, results)):
        site.refused = "it does not compute from its choice what it would compute by itself"
    elif results and E > 1 and all(map(torch.equal, changed, results)):
        site.refused = "its choice changes nothing that it returns"
    return site


def _tableless(twin: nn.Module, arguments: tuple, output: int, results: list[Tensor]) -> Site:
    """A router without top-k. Its ids come from the tokens' numbers alone (a table), or it has a rule that nobody can follow."""
    (states, *given), more = arguments[0](), arguments[1]
    again = _run(twin, (lambda: [states.flip(-2) * 3, *given], more), Seen())
    table = "input_ids" in inspect.signature(type(twin).forward).parameters and torch.equal(again[output], results[output])
    E = max(int(p.shape[0]) for p in twin.parameters() if p.dim() == 2)
    site = Site("", E, int(results[output].shape[1]), -1, output=output)
    site.refused = "" if table else "it chooses by a rule of its own, not by a top-k of scores"
    return site


def _key(module: nn.Module) -> tuple:
    own = {n: v for n, v in vars(module).items() if type(v) in (int, float, bool, str) and n not in ("layer_idx", "training")}
    shapes = tuple(tuple(getattr(p, "ds_shape", p.shape)) for p in _own(module))
    bound = vars(module).get("forward")
    return type(module), shapes, getattr(bound, "__func__", None), *own.items()


def _of_layer(block: nn.Module, known: dict) -> tuple[str, Site] | None:
    """The router of a module that has experts: one of its children, the smallest first, or its own forward; its name there."""
    children = [(n, m) for n, m in block._modules.items() if m is not None and n not in _experts(block)]
    children.sort(key=lambda child: sum(p.numel() for p in child[1].parameters()))  # a shared expert need not be copied to be asked
    problems = []
    for name, module in (*children, ("", block)):
        if type(module) in (nn.ModuleList, nn.Linear) or not any(len(getattr(p, "ds_shape", p.shape)) == 2 for p in _own(module)):
            continue
        if (key := _key(module)) not in known:
            try:
                known[key] = _probe(module)
            except probes.ProbeError as failed:
                known[key] = failed
        found = known[key]
        if isinstance(found, Site):
            return name, copy.copy(found)
        if found is not None:
            problems.append((name, found))
    for name, problem in problems:
        if not name or "rout" in name or "gate" in name:
            return name, Site("", 0, 0, -1, refused=str(problem))
    return None


def routers(model: nn.Module) -> dict[str, tuple[nn.Module, Site]]:
    """The routers of a model by name, in the order of its modules, and how to replay each. Remembered on the routers."""
    found: dict[str, tuple[nn.Module, Site]] = {}
    known: dict[tuple, Any] = {}
    for name, block in model.named_modules():
        if not _experts(block) or _told(block):
            continue
        remembered = [n for n, m in (*block._modules.items(), ("", block)) if m is not None and _current(m)]
        if remembered:
            inner = remembered[0]
        else:
            inner, site = _of_layer(block, known) or ("", Site("", 0, 0, -1, refused="no choice of experts by a top-k was seen in it"))
            module = block._modules[inner] if inner else block
            module._fmoe_site, module._fmoe_site_key = site, _key(module)
        module = block._modules[inner] if inner else block
        site = module._fmoe_site
        site.name = ".".join(filter(None, (name, inner)))
        index = re.search(r"(?:^|\.)(\d+)(?:\.|$)", site.name)
        site.layer = int(index[1]) if index else 0
        found[site.name] = module, site
    return found


def _current(module: nn.Module) -> bool:
    return "_fmoe_site" in vars(module) and vars(module)["_fmoe_site_key"] == _key(module)


def stacks(model: nn.Module, names: Iterable[str]) -> dict[str, int]:
    """The lists of decoder layers that routers stand in, and how many layers each has."""
    prefixes = {re.split(r"(?:^|\.)\d+(?:\.|$)", f"{name}.", maxsplit=1)[0] for name in names}
    lists = {prefix: model.get_submodule(prefix) for prefix in sorted(prefixes) if not prefix.endswith(".")}
    return {prefix: len(m) if isinstance(m, (nn.ModuleList, nn.Sequential)) else 1 for prefix, m in lists.items()} or {"": 1}
