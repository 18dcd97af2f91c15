# SPDX-License-Identifier: Apache-2.0
"""Reading and writing the layouts. Between them an adapter is, for each layer, the factors of gate, up and down of every expert.

All of it is copies and permutations of numbers: what is read and written again has the same bits.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .files import Adapter, Facts

LAYOUTS = "peft", "peft-0.18", "per-expert", "sglang3d"
Factors = tuple[Tensor, Tensor]  # a [E, r, in], b [E, out, r]
_NAMES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_FLAT = re.compile(r"(.*\bexperts)((?:\.base_layer)*)\.lora_([AB])(?:\.\w+)?\.weight")
_EACH = re.compile(r"(.*\bexperts)\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.lora_([AB])(?:\.\w+)?\.weight")
_DEEP = re.compile(r"(.*\bexperts)\.(gate_up_proj|down_proj)\.lora_([AB])(?:\.\w+)?\.weight")


class LayoutError(ValueError):
    """Tensors that are of no layout, or of more than one."""


@dataclass
class Experts:
    """The adapters of all experts, by the name of their module; other tensors are kept as they are."""

    layers: dict[str, dict[str, Factors]] = field(default_factory=dict)  # gate, up, down; gate_up: both with one A
    others: dict[str, Tensor] = field(default_factory=dict)


def layout_of(tensors: dict[str, Tensor]) -> str:
    """"flat" (PEFT, of either time), "per-expert" or "sglang3d"."""
    kinds = ("flat", _FLAT, 2), ("per-expert", _EACH, 2), ("sglang3d", _DEEP, 3)
    found = {kind for name, t in tensors.items() for kind, pattern, dims in kinds if pattern.fullmatch(name) and t.dim() == dims}
    wrong = [n for n, t in tensors.items() if not t.is_floating_point() and any(pattern.fullmatch(n) for _, pattern, _ in kinds)]
    if wrong:
        raise LayoutError(f"{wrong[0]}: is {str(tensors[wrong[0]].dtype).removeprefix('torch.')}, expected floating point numbers")
    if len(found) != 1:
        raise LayoutError(f"factors of experts are in {len(found)} layouts ({', '.join(sorted(found)) or 'none'}), expected one")
    return found.pop()


def read(adapter: Adapter, facts: Facts, layout: str | None = None) -> Experts:
    """layout: which it is, where it is known; PEFT's two are told apart by sizes, if sizes can."""
    kind = layout_of(adapter.tensors)
    if layout is not None and layout not in LAYOUTS:
        raise LayoutError(f"layout is {layout!r}, expected one of {', '.join(LAYOUTS)}")
    if layout is not None and (kind == "flat") != layout.startswith("peft") or (kind != "flat" and layout not in (None, kind)):
        raise LayoutError(f"the adapter is said to be {layout}, and its names are of {'peft' if kind == 'flat' else kind}")
    return {"flat": _read_flat, "per-expert": _read_each, "sglang3d": _read_deep}[kind](adapter, facts, layout)


def _once(pair: dict[str, Tensor], of: str, name: str, t: Tensor, dims: int) -> None:
    """Put a factor into its pair; a file with two adapters has it twice."""
    if of in pair:
        raise LayoutError(f"{name}: given twice, under two names")
    if t.dim() != dims or 0 in t.shape:
        raise LayoutError(f"{name}: is {list(t.shape)}, expected {dims} dimensions, none of them 0")
    pair[of] = t


def _pairs(found: Mapping[Any, dict[str, Tensor]], what: str) -> None:
    for key, pair in found.items():
        if set(pair) != {"A", "B"}:
            raise LayoutError(f"{what} {key}: lora_{'A' if 'B' in pair else 'B'} is missing")


def _count(rows: int, rank: int, facts: Facts, name: str) -> int:
    if rows % rank or (facts.experts is not None and rows != rank * facts.experts):
        want = f"{facts.experts} experts" if facts.experts is not None else "a whole number of experts"
        raise LayoutError(f"{name}: {rows} rows of rank r = {rank}: expected {want}")
    return rows // rank


# ---- PEFT ---------------------------------------------------------------------------------------------------------------
@dataclass
class Reading:
    """How PEFT's factors of one module are to be read: parts by the depth of their wrapper; old: in and out are exchanged."""

    parts: dict[int, str]
    old: bool
    E: int


def readings(adapter: Adapter, facts: Facts, layout: str | None) -> dict[str, Reading]:
    """Of each module with experts."""
    slots: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, t in adapter.tensors.items():
        if match := _FLAT.fullmatch(name):
            _once(slots.setdefault(match[1], {}).setdefault(match[2].count("base_layer"), {}), match[3], name, t, 2)
    found = {}
    for module, pairs in slots.items():
        _pairs(pairs, module)
        if sorted(pairs) not in ([0], [0, 1]):
            raise LayoutError(f"{module}: {len(pairs)} parameters have an adapter, expected gate_up_proj, down_proj or both")
        rows = {n for pair in pairs.values() for n in (pair["A"].shape[0], pair["B"].shape[1])}
        if len(rows) > 1:
            raise LayoutError(f"{module}: lora_A and lora_B have {sorted(rows)} rows and columns, expected E*r in all")
        E = _count(rows.pop(), adapter.rank, facts, module)
        widths = {depth: (pair["A"].shape[1], pair["B"].shape[0]) for depth, pair in pairs.items()}
        found[module] = Reading(*_roles(module, widths, adapter, facts, layout), E)
    return found


def _read_flat(adapter: Adapter, facts: Facts, layout: str | None) -> Experts:
    known, out = readings(adapter, facts, layout), Experts()
    factors: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, t in adapter.tensors.items():
        if match := _FLAT.fullmatch(name):
            factors.setdefault(match[1], {}).setdefault(known[match[1]].parts[match[2].count("base_layer")], {})[match[3]] = t
        else:
            out.others[name] = t
    for module, parts in factors.items():
        out.layers[module] = {part: _unflat(pair["A"], pair["B"], known[module].E, known[module].old) for part, pair in parts.items()}
    return out


def _unflat(A: Tensor, B: Tensor, E: int, old: bool) -> Factors:
    a, b = A.view(E, -1, A.shape[1]), B.view(B.shape[0], -1, E).permute(2, 0, 1)
    return (b.transpose(1, 2), a.transpose(1, 2)) if old else (a, b)


def _flat(a: Tensor, b: Tensor, old: bool) -> tuple[Tensor, Tensor]:
    a, b = (b.transpose(1, 2), a.transpose(1, 2)) if old else (a, b)
    return a.reshape(-1, a.shape[2]), b.permute(1, 2, 0).reshape(b.shape[1], -1)


def _roles(module: str, widths: dict[int, tuple[int, int]], adapter: Adapter, facts: Facts,
           layout: str | None) -> tuple[dict[int, str], bool]:  # fmt: skip
    """Which parameter each nested wrapper is of, and whether the factors are PEFT 0.18's: the one reading that the widths allow.
    widths: of lora_A and lora_B; gate_up: H and 2I, down: I and H, or exchanged."""
    named = [str(n).rsplit(".", 1)[-1] for n in adapter.config.get("target_parameters") or ()]
    only = named[0].removesuffix("_proj") if len(named) == 1 else None
    found = []
    for old in (False, True):
        for parts in ((("gate_up", 1), ("down", 0)), (("gate_up", 0), ("down", 1)), (("gate_up", 0),), (("down", 0),)):
            if {depth for _, depth in parts} != set(widths) or (layout is not None and old != (layout == "peft-0.18")):
                continue
            sizes = {part: widths[depth][::-1] if old else widths[depth] for part, depth in parts}
            H = sizes["gate_up"][0] if "gate_up" in sizes else sizes["down"][1]
            fits = "gate_up" not in sizes or sizes["gate_up"][1] % 2 == 0
            if len(sizes) == 2:
                fits = fits and sizes["down"][1] == H and sizes["gate_up"][1] == 2 * sizes["down"][0]
            elif only is not None:
                fits = fits and only in sizes
            if fits and facts.hidden in (None, H):
                found.append(({depth: part for part, depth in parts}, old))
    if len(found) != 1:
        what = " and ".join(f"[{a}, {b}]" for a, b in widths.values())
        say = "no layer has such sizes" if not found else (
            "they may be of PEFT before or after 0.19, and names do not tell: say which (--from), or the hidden size (--base, --hidden)")
        raise LayoutError(f"{module}: factors of widths {what}: {say}")
    return found[0]


# ---- one expert at a time, and SGLang's stacks --------------------------------------------------------------------------
def _read_each(adapter: Adapter, facts: Facts, layout: str | None) -> Experts:
    out, found = Experts(), dict[str, dict[str, dict[int, dict[str, Tensor]]]]()
    for name, t in adapter.tensors.items():
        match = _EACH.fullmatch(name)
        if match is None:
            out.others[name] = t
            continue
        pair = found.setdefault(match[1], {}).setdefault(_NAMES[match[3]], {}).setdefault(int(match[2]), {})
        _once(pair, match[4], name, t, 2)
    for module, parts in found.items():
        out.layers[module] = layer = {}
        E = facts.experts or 1 + max(e for each in parts.values() for e in each)
        for part, each in parts.items():
            missing = sorted(set(range(E)) - set(each)) or sorted(set(each) - set(range(E)))
            if missing:
                raise LayoutError(f"{module}: {part} of expert {missing[0]} {'is missing' if missing[0] < E else 'is one too many'}; "
                                  f"{E} experts")  # fmt: skip
            _pairs(each, f"{module}: {part} of expert")
            shapes = {(tuple(p["A"].shape), tuple(p["B"].shape)) for p in each.values()}
            if len(shapes) > 1 or any(a[0] != adapter.rank or b[1] != adapter.rank for a, b in shapes):
                raise LayoutError(f"{module}: {part}: factors {sorted(shapes)}, expected A [r, in] and B [out, r] with r = {adapter.rank}, "
                                  "the same for all experts")  # fmt: skip
            layer[part] = torch.stack([each[e]["A"] for e in range(E)]), torch.stack([each[e]["B"] for e in range(E)])
        _both(module, layer)
    return out


def _both(module: str, parts: dict[str, Factors]) -> None:
    for has, lacks in (("gate", "up"), ("up", "gate")):
        if has in parts and lacks not in parts:
            raise LayoutError(f"{module}: {has} has an adapter, and {lacks} has none")


def _read_deep(adapter: Adapter, facts: Facts, layout: str | None) -> Experts:
    out, found = Experts(), dict[str, dict[str, dict[str, Tensor]]]()
    for name, t in adapter.tensors.items():
        match = _DEEP.fullmatch(name)
        if match is None:
            out.others[name] = t
            continue
        _once(found.setdefault(match[1], {}).setdefault(match[2].removesuffix("_proj"), {}), match[3], name, t, 3)
    r = adapter.rank
    for module, parts in found.items():
        _pairs(parts, module)
        out.layers[module] = layer = {}
        for part, pair in parts.items():
            a, b, stacked = pair["A"], pair["B"], 2 if part == "gate_up" else 1
            E = facts.experts or len(a)
            if (len(a), a.shape[1], len(b), b.shape[2]) != (E, stacked * r, E, r) or b.shape[1] % stacked:
                raise LayoutError(f"{module}.{part}_proj: A {list(a.shape)} and B {list(b.shape)}, expected [{E}, {stacked * r}, in] and "
                                  f"[{E}, out, {r}]")  # fmt: skip
            if stacked == 1:
                layer[part] = a, b
            else:
                half = b.shape[1] // 2
                layer["gate"], layer["up"] = (a[:, :r], b[:, :half]), (a[:, r:], b[:, half:])
    return out


# ---- between fused and separate gates -----------------------------------------------------------------------------------
def _order(facts: Facts) -> bool:
    if facts.interleaved is None:
        raise LayoutError("gate and up are one weight here and two there: say how they are arranged (--base, or --gates interleaved for "
                          "gpt-oss and concatenated for others)")  # fmt: skip
    return facts.interleaved


def split(parts: dict[str, Factors], facts: Facts) -> dict[str, Factors]:
    """gate and up of gate_up: they share A, and B's rows are theirs."""
    if "gate_up" not in parts:
        return parts
    a, b = parts["gate_up"]
    rows = (b[:, ::2], b[:, 1::2]) if _order(facts) else b.chunk(2, 1)
    return {"gate": (a, rows[0]), "up": (a, rows[1]), **{n: f for n, f in parts.items() if n != "gate_up"}}


def fuse(module: str, parts: dict[str, Factors], facts: Facts) -> dict[str, Factors]:
    """gate_up of gate and up, where both have the same A."""
    if "gate" not in parts:
        return parts
    (a, gate), (other, up) = parts["gate"], parts["up"]
    if not torch.equal(a, other):
        raise LayoutError(f"{module}: gate and up have different A: one A for both would need rank {2 * a.shape[1]}, not r = {a.shape[1]}")
    b = torch.stack((gate, up), 2).flatten(1, 2) if _order(facts) else torch.cat((gate, up), 1)
    return {"gate_up": (a, b), **{n: f for n, f in parts.items() if n not in ("gate", "up")}}


def write(experts: Experts, layout: str, facts: Facts) -> dict[str, Tensor]:
    """The tensors of a layout."""
    if layout not in LAYOUTS:
        raise LayoutError(f"layout is {layout!r}, expected one of {', '.join(LAYOUTS)}")
    tensors = dict(experts.others)
    for module, given in experts.layers.items():
        if layout.startswith("peft"):
            parts = fuse(module, given, facts)
            for part, factors in parts.items():
                inner = ".base_layer" if part == "gate_up" and "down" in parts else ""
                for of, t in zip("AB", _flat(*factors, layout == "peft-0.18")):
                    tensors[f"{module}{inner}.lora_{of}.weight"] = t
            continue
        parts = split(given, facts)
        if layout == "per-expert":
            names = dict(gate="w1", up="w3", down="w2") if facts.w_names else dict(gate="gate_proj", up="up_proj", down="down_proj")
            for part, (a, b) in parts.items():
                for e in range(len(a)):
                    tensors[f"{module}.{e}.{names[part]}.lora_A.weight"], tensors[f"{module}.{e}.{names[part]}.lora_B.weight"] = a[e], b[e]
            continue
        stacks = {"down": parts["down"]} if "down" in parts else {}
        if "gate" in parts:
            (a, gate), (b, up) = parts["gate"], parts["up"]
            stacks["gate_up"] = torch.cat((a, b), 1), torch.cat((gate, up), 1)
        for part, factors in stacks.items():
            for of, t in zip("AB", factors):
                tensors[f"{module}.{part}_proj.lora_{of}.weight"] = t
    return tensors
