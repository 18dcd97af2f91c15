# SPDX-License-Identifier: Apache-2.0
"""A proof that two adapters are the same: every tensor is accounted for, and the dense dW of every expert is equal.

What is compared is computed here from the tensors as they are stored, by the formula of their layout, and shares no code with the
conversion. The proof is then tried on adapters with a planted error, which it must find.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .files import Adapter, Facts
from .layouts import LayoutError, layout_of, readings

Deltas = dict[tuple[str, str], Tensor]  # (module, gate or up or down) -> [E, out, in]
TOLERANCE = 1e-6  # of the largest number of a dW; the factors are equal, and products in float64 differ by less than 1e-12


@dataclass
class Proof:
    """What was compared, and what is wrong."""

    layers: int = 0
    experts: int = 0
    worst: float = 0.0
    used: int = 0
    problems: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)  # why equal numbers prove nothing here
    controls: dict[str, bool] = field(default_factory=dict)  # a planted error, and whether it was found

    def __bool__(self) -> bool:
        return not self.problems and not self.doubts

    def __str__(self) -> str:
        head = f"{self.layers} layers, {self.experts} experts, {self.used} tensors used; dW differs by at most {self.worst:.1e}"
        planted = ", ".join(f"{name}: {'found' if yes else 'NOT FOUND'}" for name, yes in self.controls.items())
        lines = [head, f"planted errors: {planted}"] if planted else [head]
        lines += [f"WRONG: {problem}" for problem in self.problems] + [f"not proven: {doubt}" for doubt in self.doubts]
        return "\n".join([*lines, "the same" if self else "NOT the same" if self.problems else "equal, and not proven"])


def deltas(adapter: Adapter, facts: Facts, layout: str | None = None) -> tuple[Deltas, dict[str, Tensor], int]:
    """dW of each expert in float64, the tensors that are of no expert, and how many were used."""
    kind, found, each, used = layout_of(adapter.tensors), Deltas(), dict[tuple[str, str], dict[int, Tensor]](), 0
    tensors = {re.sub(r"(lora_[AB])\.\w+\.weight$", r"\1.weight", name): t for name, t in adapter.tensors.items()}
    known = readings(adapter, facts, layout) if kind == "flat" else {}  # which reading it is: all that is shared with the conversion
    for name, A in tensors.items():
        stem, end = name.removesuffix(".lora_A.weight"), ".lora_A.weight"
        prefix = re.match(r".*\bexperts\b", stem)
        if not name.endswith(end) or not prefix:
            continue
        if (B := tensors.get(stem + ".lora_B.weight")) is None:
            raise LayoutError(f"{stem}: lora_B is missing")
        A, B, rest, module = A.double(), B.double() * adapter.scale, stem[len(prefix[0]) :].strip("."), prefix[0]
        if kind == "flat":
            part, E = known[module].parts[rest.count("base_layer")], known[module].E
            formula = "ore,eri->eio" if known[module].old else "ore,eri->eoi"
            found[module, part] = torch.einsum(formula, B.reshape(-1, adapter.rank, E), A.reshape(E, adapter.rank, -1))
        elif kind == "sglang3d" and rest == "gate_up_proj":
            r, half = A.shape[1] // 2, B.shape[1] // 2
            found[module, "gate"], found[module, "up"] = B[:, :half] @ A[:, :r], B[:, half:] @ A[:, r:]
        elif kind == "sglang3d" and rest == "down_proj":
            found[module, "down"] = B @ A
        elif kind == "per-expert" and (match := re.fullmatch(r"(\d+)\.(\w+)", rest)):
            part = {"w1": "gate", "w3": "up", "w2": "down"}.get(match[2], match[2].removesuffix("_proj"))
            each.setdefault((module, part), {})[int(match[1])] = B @ A
        else:
            continue
        used += 2
    for (module, part), dense in each.items():
        E = facts.experts or max(max(d) for d in each.values()) + 1
        if sorted(dense) != [*range(E)]:
            raise LayoutError(f"{module}: {part}: experts {sorted(set(range(E)) ^ set(dense))} are missing, or too many")
        found[module, part] = torch.stack([dense[e] for e in range(E)])
    taken = {module for module, _ in found}
    return found, {n: t for n, t in tensors.items() if not any(n.startswith(f"{module}.") for module in taken)}, used


def _split(found: Deltas, facts: Facts) -> Deltas:
    """gate and up in the place of gate_up."""
    if facts.interleaved is None and any(part == "gate_up" for _, part in found):
        raise LayoutError("how gate and up are arranged is not known: --base, or --gates")
    out = Deltas()
    for (module, part), t in found.items():
        if part == "gate_up":
            half = t.shape[1] // 2
            out[module, "gate"] = t[:, 0::2] if facts.interleaved else t[:, :half]
            out[module, "up"] = t[:, 1::2] if facts.interleaved else t[:, half:]
        else:
            out[module, part] = t
    return out


def compare(one: Deltas, two: Deltas, proof: Proof) -> None:
    """Add to a proof what differs between dense deltas."""
    for key in one.keys() | two.keys():
        name = f"{key[0]}: {key[1]}"
        if key not in one or key not in two:
            proof.problems.append(f"{name}: only the {'first' if key in one else 'second'} adapter has it")
            continue
        a, b = one[key], two[key]
        if a.shape != b.shape:
            proof.problems.append(f"{name}: dW is {list(a.shape)} and {list(b.shape)}")
            continue
        error = (a - b).abs().amax((1, 2)) / a.abs().amax((1, 2)).clamp_min(1e-300)
        proof.worst = max(proof.worst, float(error.max()))
        if float(error.max()) > TOLERANCE or not bool(error.isfinite().all()):
            e = int(error.nan_to_num(torch.inf).argmax())
            proof.problems.append(f"{name}: dW of expert {e} differs by {float(error[e]):.1e} of its largest number")


def verify(trained: Adapter, served: Adapter, facts: Facts, layout: str | None = None, served_layout: str | None = None) -> Proof:
    """Whether two adapters, in whatever layouts, are the same. Truth of the result: they are."""
    proof = Proof()
    try:
        one, rest, _ = deltas(trained, facts, layout)
        two, kept, proof.used = deltas(served, facts, served_layout)
        if any("gate_up" in key for key in one) != any("gate_up" in key for key in two):
            one, two = _split(one, facts), _split(two, facts)
    except LayoutError as problem:
        proof.problems.append(str(problem))
        return proof
    proof.layers, proof.experts = len({module for module, _ in one}), max((len(t) for t in one.values()), default=0)
    compare(one, two, proof)
    if proof.used + len(kept) != len(served.tensors):
        proof.problems.append(f"{len(served.tensors) - proof.used - len(kept)} tensors of the second adapter are of no use")
    for name in rest.keys() | kept.keys():
        if name not in rest or name not in kept or not torch.equal(rest[name], kept[name]):
            proof.problems.append(f"{name}: not in both adapters, or not equal")
    silent = [f"{m}: {part}" for (m, part), t in one.items() if not bool(t.abs().amax((1, 2)).gt(0).all())]
    if silent:
        proof.doubts.append(f"{silent[0]}: dW of an expert is zero: an adapter that was not trained")
    plants: dict[str, Callable[[Tensor], Tensor]] = {"experts permuted": _permuted, "an expert lost": _lost, "transposed": _turned}
    for name, plant in plants.items():
        wrong = Proof()
        compare(one, {key: plant(t) for key, t in two.items()}, wrong)
        proof.controls[name] = bool(wrong.problems)
        if not wrong.problems:
            proof.doubts.append(f"{name}: it would not be seen in this adapter; are all experts equal?")
    return proof


def _permuted(t: Tensor) -> Tensor:
    return t.roll(1, 0)


def _lost(t: Tensor) -> Tensor:
    t = t.clone()
    t[-1] = 0
    return t


def _turned(t: Tensor) -> Tensor:
    return t.transpose(1, 2).reshape(t.shape)
