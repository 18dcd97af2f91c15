# SPDX-License-Identifier: Apache-2.0
"""record and replay: what is asked of the routers of a model, while a context is open and in every recomputation of what ran in it.

A router has two hooks, which see what is asked in this thread. A checkpoint runs a layer a second time, in backward, when the context is
closed and other batches may have been through the model: so the function that is checkpointed carries what was asked when it first ran.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..autograd import onlooker
from . import formats
from .choice import Choice
from .sites import Site, routers, stacks

_now = threading.local()  # asked: the open records and replays; None: nobody can say


# ---- the hooks of a router ----------------------------------------------------------------------------------------------
def _in_backward() -> bool:
    return not is_compiling() and torch._C._current_graph_task_id() != -1


def _before(module: nn.Module, args: tuple) -> None:
    site, asked = module._fmoe_site, getattr(_now, "asked", None)
    if asked is None:
        if site.replayed and _in_backward():
            raise RuntimeError(f"routing: {site.name} was replayed, and is recomputed in backward by a checkpoint that does not know its "
                               "ids: use fusedmoe.routing.checkpoint there (transformers' own checkpointing needs nothing)")  # fmt: skip
        return
    rows, native, wanted = None, False, False
    for one in asked:
        if site.key in one.keys:
            wanted = True
            if one.rows:
                rows, native = one.rows[site.key], one.native
    if wanted and site.turn >= 0:
        onlooker.mode = mode = Choice(site.name, site.E, site.k, site.turn, site.groups, rows, native)
        mode.__enter__()


def _after(module: nn.Module, args: tuple, result: Any) -> None:
    mode, site = getattr(onlooker, "mode", None), module._fmoe_site
    if mode is not None and mode.name == site.name:
        onlooker.mode = None
        mode.__exit__(None, None, None)
    asked = getattr(_now, "asked", None)
    if not asked or result is None:
        return
    for one in asked:
        if site.key in one.keys:
            ids = mode.chosen if site.turn >= 0 else result[site.output]
            if ids is None:
                raise RuntimeError(f"routing: {site.name} chose no experts in this call, and did before")
            if not one.rows and not _in_backward():
                one.seen[site.key].append(ids)
            elif one.rows and site.turn < 0:
                formats.same_table(site, one.rows[site.key], ids)


def _install(model: nn.Module) -> dict[str, tuple[nn.Module, Site]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"routing: model is a {type(model).__name__} ({model!r:.60}), expected a torch.nn.Module")
    if any(isinstance(m, nn.DataParallel) for m in model.modules()):
        raise TypeError("routing: a model in DataParallel runs as copies of itself on parts of a batch; use DDP or FSDP")
    found = routers(model)
    if not found:
        raise ValueError(f"routing: {type(model).__name__} has no router that fusedmoe knows")
    for module, _ in found.values():
        if _before not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_before)
            module.register_forward_hook(_after, always_call=True)
    for module in model.modules():
        for name in ("_gradient_checkpointing_func", "checkpoint_fn"):  # transformers' and torch's CheckpointWrapper
            own = vars(module).get(name)
            if callable(own) and not isinstance(own, _Checkpoint):
                setattr(module, name, _Checkpoint(own))
    return found


def release(model: nn.Module) -> None:
    """Take everything out of a model that record and replay have put into it. What is checkpointed and pending cannot be recomputed."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in (_before, _after)]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
        for name in ("_fmoe_site", "_fmoe_site_key"):
            vars(module).pop(name, None)
        for name in ("_gradient_checkpointing_func", "checkpoint_fn"):
            own = vars(module).get(name)
            if isinstance(own, _Checkpoint):
                setattr(module, name, own.own)


# ---- checkpoints --------------------------------------------------------------------------------------------------------
class _Carried:
    """A function, and what is asked of the routers in it whenever it runs."""

    def __init__(self, function: Callable) -> None:
        self.function, self.asked = function, getattr(_now, "asked", None) or ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before, _now.asked = getattr(_now, "asked", None), self.asked
        try:
            return self.function(*args, **kwargs)
        finally:
            _now.asked = before


class _Checkpoint:
    """A checkpointing function around which functions are carried. A compiler recomputes inside its graph, where ids are inputs."""

    def __init__(self, own: Callable) -> None:
        self.own = own

    def __call__(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        return self.own(function if is_compiling() else _Carried(function), *args, **kwargs)


def checkpoint(function: Callable, *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """torch.utils.checkpoint.checkpoint, for code that calls it by itself: the recomputation uses the ids of the first run."""
    return _Checkpoint(torch.utils.checkpoint.checkpoint)(function, *args, use_reentrant=use_reentrant, **kwargs)


# ---- contexts -----------------------------------------------------------------------------------------------------------
class _Context:
    """What is asked of some routers."""

    def __init__(self, model: nn.Module) -> None:
        self.sites = [site for _, site in _install(model).values()]
        self.keys = {site.key: i for i, site in enumerate(self.sites)}
        depths = stacks(model, [site.name for site in self.sites])
        if len(depths) > 1:
            raise ValueError(f"routing: {type(model).__name__} has routers in {', '.join(map(repr, depths))}: give the one of these that "
                             "the ids are of, as model.get_submodule(...)")  # fmt: skip
        self.depth = next(iter(depths.values()))
        self.layers = [site.layer for site in self.sites]
        if len({*self.layers}) < len(self.layers):  # two routers in one decoder layer: one after the other
            self.layers, self.depth = [*range(len(self.sites))], len(self.sites)
        self.rows: dict[int, Tensor] = {}
        self.native = False
        self._outside: list[tuple | None] = []

    def __enter__(self) -> Any:
        asked = getattr(_now, "asked", None)
        self._outside.append(asked)
        _now.asked = (*(asked or ()), self)
        return self

    def __exit__(self, *_: Any) -> None:
        _now.asked = self._outside.pop()


class Record(_Context):
    """What every router chose, in each run of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        unknown = [f"{site.name}: {site.refused}" for site in self.sites if site.turn < 0 and site.output < 0]
        if unknown:
            raise ValueError(f"record: {'; '.join(unknown)}")
        self.seen: dict[int, list[Tensor]] = {site.key: [] for site in self.sites}

    @property
    def calls(self) -> list[Tensor]:
        """One tensor of ids [T, L, k] for each run of the model, -1 where a layer is dense."""
        counts = {len(rows) for rows in self.seen.values() if rows} or {0}  # one that never runs is as good as dense
        if len(counts) > 1:
            by_name = ", ".join(f"{site.name} {len(self.seen[site.key])}" for site in self.sites)
            raise RuntimeError(f"record: the routers did not run equally often: {by_name}")
        return [self._joined(n) for n in range(*counts)]

    def _joined(self, n: int) -> Tensor:
        ran = [(layer, site, self.seen[site.key][n]) for layer, site in zip(self.layers, self.sites) if self.seen[site.key]]
        first = ran[0][2]
        if any(len(t) != len(first) for _, _, t in ran):
            by_name = ", ".join(f"{site.name} {len(t)}" for _, site, t in ran)
            raise RuntimeError(f"record: the routers did not see equally many tokens: {by_name}")
        wide = torch.int16 if max(site.E for site in self.sites) < 1 << 15 else torch.int32
        ids = first.new_full((len(first), self.depth, max(site.k for site in self.sites)), -1, dtype=wide)
        for layer, _, t in ran:
            ids[:, layer, : t.shape[1]] = t
        return ids

    @property
    def ids(self) -> Tensor:
        """[T, L, k] of the one run of the model; -1 where a layer is dense."""
        calls = self.calls
        if len(calls) != 1:
            raise RuntimeError(f"record: the model ran {len(calls)} times: see `calls`, or `sequences(batch)` for what `generate` did")
        return calls[0]

    def sequences(self, batch: int) -> Tensor:
        """[B, S, L, k]: all runs of the model one after the other, each of so many sequences, as ``generate`` runs it: the prompts,
        then a token of each. The last token that was sampled has not been through the model, and has no row. Not of beam search, which
        exchanges sequences between runs."""
        calls = self.calls
        if not calls or batch < 1 or any(len(ids) % batch for ids in calls):
            raise ValueError(f"sequences: batch is {batch}, and the runs were of {[len(ids) for ids in calls]} tokens")
        return torch.cat([ids.view(batch, -1, *ids.shape[1:]) for ids in calls], 1)


class Replay(_Context):
    """The ids that each router is to choose."""

    def __init__(self, model: nn.Module, ids: Any, lengths: Any, mask: Any, missing: str) -> None:
        super().__init__(model)
        refused = [f"{site.name}: {site.refused}" for site in self.sites if site.refused]
        if refused:
            raise NotImplementedError(f"replay: {'; '.join(refused)}")
        if missing not in ("native", "error"):
            raise ValueError(f'replay: missing is {missing!r}, expected "native" or "error"')
        table, self.native = formats.table(formats.rows(ids, lengths, mask), self.sites, self.layers, self.depth, missing == "native")
        here = next((p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")), table.device)
        table = table.to(here)
        for site, layer in zip(self.sites, self.layers):
            self.rows[site.key] = table[:, layer, : site.k].contiguous()
            site.replayed = True


def record(model: nn.Module) -> Record:
    """A context in which the choices of every router of model are kept: ``ids`` [T, L, k], ``calls``, ``sequences``."""
    return Record(model)


def replay(model: nn.Module, ids: Any, lengths: Any = None, mask: Any = None, missing: str = "native") -> Replay:
    """A context in which every router of model chooses these experts, whatever its scores are; weights come from the live scores.

    ids: [T, L, k] for the T tokens of a batch, or [B, S, L, k]; integers of any kind, torch or numpy. L: the decoder's layers, or those
    with a router alone. A row of -1 is routed by the model itself. Or a list with [n, L, k] of each sequence: `lengths` has the tokens of
    each in a packed batch, `mask` [B, S] their places in a padded one, as lists, arrays or tensors. Rows that a sequence lacks at its end
    are rows of -1.
    missing: "native", or "error" where no row may be -1.

    What is checkpointed inside is recomputed with the same ids, also when the context is closed and others were open since.
    """
    return Replay(model, ids, lengths, mask, missing)
