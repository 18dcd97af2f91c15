# SPDX-License-Identifier: Apache-2.0
"""The one call of top-k by which a router chooses, seen or answered while the router's own code runs.

Routers differ in everything but this call: scores before it (softmax, sigmoid, a bias, groups), weights after it (renormalised, scaled).
So nothing of a rule is written down here. A call answered with other ids hands back their scores, from the live ones and with their
gradient. What fusedmoe's own routers call, `route`, is treated alike.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..autograd import onlooker

Function = Callable[..., Any]
Route = Callable[..., tuple[Tensor, Tensor]]


class TopK(NamedTuple):
    """What torch.topk returns."""

    values: Tensor
    indices: Tensor


def _read(scores: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *,
          out: Any = None) -> tuple[Tensor, int] | None:  # fmt: skip
    return (scores, k) if largest and dim in (-1, scores.dim() - 1) and out is None else None


def call_of(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, int] | None:
    """The scores and k of a torch function that chooses the largest along the last dimension; None: it does something else."""
    if func is not torch.topk and func is not Tensor.topk:
        return None
    if "input" in kwargs:
        args, kwargs = (kwargs["input"], *args), {n: v for n, v in kwargs.items() if n != "input"}
    return _read(*args, **kwargs)


class Seen(TorchFunctionMode):
    """Notes every choice: n, k and the number of dimensions of what was chosen from, and the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int, int]] = []
        self.ids: list[Tensor] = []

    def _note(self, scores: Tensor, k: int, ids: Tensor) -> None:
        self.calls.append((int(scores.shape[-1]), int(k), scores.dim()))
        self.ids.append(ids)

    def __torch_function__(self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result, call = func(*args, **(kwargs or {})), call_of(func, args, kwargs or {})
        if call is not None:
            self._note(*call, result[1])
        return result

    def route(self, own: Route, logits: Tensor, k: int, rule: dict[str, Any]) -> tuple[Tensor, Tensor]:
        result = own(logits, k, **rule)
        self._note(logits, k, result[0])
        return result


class Choice(TorchFunctionMode):
    """Answers the choice number `turn` of a router with these rows of ids ([T,k], -1: its own), and keeps what was chosen."""

    def __init__(self, name: str, E: int, k: int, turn: int, groups: tuple[int, ...], rows: Tensor | None, native: bool) -> None:
        super().__init__()
        self.name, self.E, self.k, self.turn, self.groups = name, E, k, turn, groups
        self.rows, self.native = rows, native  # native: some rows are -1
        self.calls = 0
        self.chosen: Tensor | None = None

    def __torch_function__(self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        call = call_of(func, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        (scores, k), now = call, self.calls
        self.calls += 1
        if now == self.turn:
            if self.rows is None or self.native:
                result = func(*args, **kwargs)
                own = result[1].reshape(-1, k)
            if self.rows is None:
                self.chosen = self._checked(scores, k, own)
                return result
            ids = self.chosen = self._checked(scores, k, own if self.native else None)
            ids = ids.view(*scores.shape[:-1], k)
            return TopK(scores.gather(-1, ids), ids)
        if now in self.groups and self.rows is not None:
            groups = self._open(scores, func(*args, **kwargs)[1] if self.native else None)
            return TopK(scores.gather(-1, groups), groups)
        return func(*args, **kwargs)

    def route(self, own: Route, logits: Tensor, k: int, rule: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The same for ``fusedmoe.route``."""
        now = self.calls
        self.calls += 1
        if now != self.turn:
            return own(logits, k, **rule)
        if self.rows is None:
            result = own(logits, k, **rule)
            self.chosen = self._checked(logits, k, result[0])
            return result
        self.chosen = self._checked(logits, k, own(logits, k, **rule)[0] if self.native else None)
        rule["ids"] = self.chosen
        return own(logits, k, **rule)

    def _checked(self, scores: Tensor, k: int, own: Tensor | None) -> Tensor:
        """The ids to choose [T,k]; own: what the router would choose."""
        if (scores.shape[-1], k) != (self.E, self.k):
            raise RuntimeError(f"routing: {self.name} chooses {k} of {scores.shape[-1]} experts, and chose {self.k} of {self.E} before")
        rows = self.rows
        if rows is None:
            assert own is not None
            return own
        T = scores.numel() // self.E
        if rows.shape[0] != T:
            raise ValueError(f"replay: {self.name} routes {T} tokens, and the ids are of {rows.shape[0]}: one row for every token of the "
                             "batch, padding too, or sequences with `lengths` or `mask`")  # fmt: skip
        ids = rows.to(scores.device, torch.int64)
        return ids if own is None else torch.where(ids < 0, own, ids)

    def _open(self, scores: Tensor, own: Tensor | None) -> Tensor:
        """The groups of experts that a token may choose from: those of its ids, or a score would be gathered where it was masked."""
        assert self.rows is not None
        groups = self.rows.to(scores.device, torch.int64) // (self.E // scores.shape[-1])
        if own is None:
            return groups
        native = groups[:, :1] < 0
        return torch.cat((torch.where(native, own[:, :1], groups), torch.where(native, own, groups[:, :1])), 1)


@contextmanager
def watching(mode: Seen | Choice) -> Iterator[None]:
    """A mode that sees torch's functions and ours."""
    before, onlooker.mode = getattr(onlooker, "mode", None), mode
    try:
        with mode:
            yield
    finally:
        onlooker.mode = before
