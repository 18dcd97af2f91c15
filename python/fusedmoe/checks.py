# SPDX-License-Identifier: Apache-2.0
"""Arguments of the public functions, where they come in: an error names the argument and both values.

The C library checks every call; here is what it cannot see (a number in the place of a tensor, integers where values are) and what
it could only name in its own words (sizes that Python reads from the weights).
"""

import operator
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from .enums import Activation, Flag

DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}  # fmoe_dtype
_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
_STRIDED = torch.strided
_ACTIVATIONS = frozenset(map(int, Activation))
_FLAGS, _LIST, _BIAS, _TRANSPOSED = (int(sum(Flag)), *map(int, (Flag.LIST, Flag.BIAS, Flag.TRANSPOSED)))  # members are slow


def floats(op: str, **tensors: Any) -> None:
    """Every argument is a tensor of a dtype that the library computes in."""
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            kind = type(t)
            raise TypeError(f"{op}: {name} is a {kind.__module__}.{kind.__qualname__}, expected a torch.Tensor")
        if t.dtype not in DTYPES:
            raise TypeError(f"{op}: {name} is {t.dtype}, expected one of {_NAMES}")
        if t.layout != torch.strided or t.is_nested:
            raise TypeError(f"{op}: {name} is {'nested' if t.is_nested else t.layout}, expected a dense tensor, {torch.strided}")


def integers(op: str, name: str, t: Any) -> None:
    """An argument of ids or sizes: a tensor of integers."""
    if not isinstance(t, Tensor):
        kind = type(t)
        raise TypeError(f"{op}: {name} is a {kind.__module__}.{kind.__qualname__}, expected a torch.Tensor of integers")
    if t.dtype.is_floating_point or t.dtype.is_complex or t.dtype == torch.bool:
        raise TypeError(f"{op}: {name} is {t.dtype}, expected integers")


def dims(op: str, **tensors: tuple[Tensor, str]) -> None:
    """Every tensor has as many dimensions as its form, "T, k", has."""
    for name, (t, form) in tensors.items():
        if t.dim() != form.count(",") + 1:
            raise ValueError(f"{op}: {name} is {list(t.shape)}, expected [{form}]")


def whole(op: str, name: str, value: Any, least: int = 1) -> None:
    """A count: an int, or what has an index, as numpy's integers do."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        if isinstance(value, bool) or not hasattr(type(value), "__index__"):
            raise TypeError(f"{op}: {name} is {value!r}, expected an integer")
        value = operator.index(value)
    if value < least:
        raise ValueError(f"{op}: {name} is {value}, expected at least {least}")


def numbers(op: str, **values: Any) -> None:
    """Numbers, of any kind: also numpy's, and tensors of one."""
    for name, value in values.items():
        if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            continue
        try:
            if isinstance(value, (str, bytes, complex)):
                raise TypeError
            float(value)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise TypeError(f"{op}: {name} is {value!r:.60}, expected a number") from problem


def group_list(given: Any, device: torch.device) -> Tensor:
    """Sizes of groups as a tensor: a list of integers, an array or a tensor."""
    if not isinstance(given, Tensor):
        if isinstance(given, (list, tuple)) and all([isinstance(n, (int, torch.SymInt)) and not isinstance(n, bool) for n in given]):
            return torch.tensor(given, dtype=torch.int64, device=device)  # also of numbers that torch.compile does not know yet
        try:
            made = torch.as_tensor(given, device=device)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise TypeError(f"grouped_matmul: group_list is {given!r:.60}, expected [E] integers") from problem
        integers("grouped_matmul", "group_list", made if made.numel() else made.to(torch.int64))
        return made.to(torch.int64)
    integers("grouped_matmul", "group_list", given)
    return given


def one_device(op: str, x: Tensor, **others: Tensor) -> None:
    """All are where x is."""
    for name, t in others.items():
        if t.device != x.device:
            raise ValueError(f"{op}: {name} is on {t.device}, x on {x.device}")


def code(op: str, name: str, kind: type[IntEnum], value: Any) -> int:
    """The number of a member of kind, given as itself, a number or a name."""
    found = kind.__members__.get(value.upper()) if isinstance(value, str) else value
    if found is None or isinstance(found, bool) or not isinstance(found, int) or found not in kind._value2member_map_:
        wanted = ", ".join(f"{m.lower()} ({int(v)})" for m, v in kind.__members__.items())
        raise (ValueError if isinstance(value, (int, str)) else TypeError)(f"{op}: {name} is {value!r}, expected one of {wanted}")
    return int(found)


def known_flags(op: str, value: Any) -> int:
    """Flags without a bit that nobody knows."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{op}: flags is {value!r}, expected a Flag or its number")
    flags = int(value)
    if flags & ~_FLAGS:
        raise ValueError(f"{op}: flags {flags:#x} has unknown bits {flags & ~_FLAGS:#x}, known are {_FLAGS:#x}")
    if flags & _LIST and flags & _TRANSPOSED:
        raise ValueError(f"{op}: flags {flags:#x} has LIST and TRANSPOSED: in a list, transpose each matrix (a view costs nothing)")
    return flags


def weights(op: str, w: Any, flags: int) -> None:
    """w is a list of tensors, as many as the flags say. Only the first is looked at: there may be hundreds."""
    if not isinstance(w, (list, tuple)):
        kind = type(w)
        raise TypeError(f"{op}: w is a {kind.__module__}.{kind.__qualname__}, expected a list of tensors, [w1, w2]")
    if not w or (not flags & _LIST and len(w) != (4 if flags & _BIAS else 2)):
        want = "[w1, w2, b1, b2] (flags has BIAS)" if flags & _BIAS else "[w1, w2], or [w1, w2, b1, b2] with flags=BIAS"
        raise ValueError(f"{op}: w has {len(w)} tensors, expected {want}")
    floats(op, **{f"w[{i}]": t for i, t in enumerate(w[:4])})


def plain_experts(x: Any, ids: Any, p: Any, w: Any, act: int, flags: int) -> bool:
    """Whether ``experts`` below has nothing to say: 1 us instead of 6, for a layer that takes 10."""
    try:
        given = x.dtype in DTYPES and p.dtype in DTYPES and w[0].dtype in DTYPES and x.device == ids.device == p.device == w[0].device
        given = given and x.layout == w[0].layout == _STRIDED
        number = 0 if flags & _LIST else 4 if flags & _BIAS else 2
        known = act in _ACTIVATIONS and not flags & ~_FLAGS and flags & (_LIST | _TRANSPOSED) != _LIST | _TRANSPOSED
        return given and known and type(w) in (list, tuple) and (not number or len(w) == number)
    except (AttributeError, IndexError, TypeError):
        return False


def experts(x: Any, ids: Any, p: Any, w: Any, act: Any, flags: Any) -> None:
    """The arguments of ``fusedmoe.experts``, one after the other."""
    code("experts", "act", Activation, act)
    known_flags("experts", flags)
    floats("experts", x=x, p=p)
    integers("experts", "ids", ids)
    weights("experts", w, flags)
    one_device("experts", x, ids=ids, p=p, **{"w[0]": w[0]})


def sizes_differ(w: Sequence[Tensor], act: int, flags: int, H: int | None) -> str:
    """Why the weights of a layer (without adapters) do not fit one another, or x with its H."""
    columns, n, with_x = 2 if act < Activation.SILU else 1, len(w), "" if H is None else f" with x's H = {H}"
    if flags & Flag.LIST:
        parts = columns + 1
        if not n or n % parts:
            return f"experts: w has {n} matrices, expected {parts} for each expert: {'gates, ' * (parts > 2)}ups and downs"
        first, last = list(w[0].shape), list(w[-1].shape)
        if len(first) != 2 or (H is not None and first[1] != H):
            return f"experts: w[0] is {first}, expected [I, H]{with_x}"
        return f"experts: w[{n - 1}] is {last}, expected [H, I] = {first[::-1]} beside w[0], {first}"
    if n < 2:
        return f"experts: w has {n} tensors, expected [w1, w2]"
    up, down, transposed = list(w[0].shape), list(w[1].shape), bool(flags & Flag.TRANSPOSED)
    out, into = (2, 1) if transposed else (1, 2)  # the dimensions of 2*I and of H
    if len(up) != 3 or (H is not None and up[into] != H) or up[out] % columns:
        form = f"[E, H, {'2*' * (columns - 1)}I]" if transposed else f"[E, {'2*' * (columns - 1)}I, H]"
        fits = len(up) == 3 and up[out] == H and up[into] % columns == 0
        hint = f"; stored the other way they need flags {'without' if transposed else 'with'} TRANSPOSED" if fits else ""
        return f"experts: w[0] is {up}, expected {form}{with_x}{hint}"
    I, H = up[out] // columns, up[into]
    form, want = ("[E, I, H]", [up[0], I, H]) if transposed else ("[E, H, I]", [up[0], H, I])
    return f"experts: w[1] is {down}, expected {form} = {want} beside w[0], {up}"


def adapters(lora: Any) -> None:
    """For W1 and for W2: (a, b), (a, b, scale) or None."""
    if not isinstance(lora, (list, tuple)) or len(lora) != 2:
        raise ValueError(f"experts: lora is {_brief(lora)}, expected two entries, of W1 and of W2: (a, b), (a, b, scale) or None")
    for i, factors in enumerate(lora):
        if factors is None or (isinstance(factors, (list, tuple)) and not factors):
            continue
        if not isinstance(factors, (list, tuple)) or len(factors) not in (2, 3):
            raise ValueError(f"experts: lora[{i}] is {_brief(factors)}, expected (a, b), (a, b, scale) or None")
        floats("experts", **{f"lora[{i}][{j}]": t for j, t in enumerate(factors[:2])})
        scale = factors[2] if len(factors) == 3 else 1.0
        if isinstance(scale, Tensor) and (scale.numel() != 1 or scale.requires_grad):
            trained = ", which requires a gradient" * scale.requires_grad
            raise ValueError(f"experts: lora[{i}][2], the scale, is a tensor {list(scale.shape)}{trained}; expected a number")
        if not isinstance(scale, Tensor):
            numbers("experts", **{f"lora[{i}][2]": scale})
        a, b = (list(t.shape) for t in factors[:2])
        if len(a) != 3 or len(b) != 3 or a[0] != b[0] or a[1] != b[2]:
            raise ValueError(f"experts: lora[{i}] has factors {a} and {b}, expected [E, rank, in] and [E, out, rank]")


def _brief(value: Any) -> str:
    return f"{len(value)} entries" if isinstance(value, (list, tuple)) else repr(type(value))
