# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a model are stacks of experts, how they lie, and which modules with experts run on fusedmoe."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from .. import ops
from ..integrations import layers, seams
from .formats import HALVES, Format, by_name
from .linears import QuantLinear
from .tensor import QuantTensor

NAMES = "gate_up_proj", "up_proj", "down_proj"
_FLAT = "w1", "v1", "w2"  # DBRX: gates, ups and downs, each of all experts under one another


class Form(NamedTuple):
    """How a stack of E experts lies. turned: [E,in,out]; halves: its rows are gates, then ups; flat: it is [E*rows,columns]."""

    E: int
    turned: bool = False
    halves: bool = False
    flat: bool = False


def forms(module: nn.Module) -> dict[str, Form]:
    """The stacks of a module by name, known from its structure: also on meta, also quantised. {}: it has none, or none of ours."""
    own = {name: w for name, w in module._parameters.items() if w is not None}
    if layers.is_v5_experts(module):
        if layers.misfit(module):
            return {}
        layer, turned = layers.known(module) or layers.look_at(module), vars(module).get("is_transposed", False)
        concatenated = not layer.flags & ops.INTERLEAVED
        return {n: Form(len(own[n]), turned, n == "gate_up_proj" and concatenated) for n in NAMES if n in own}
    if any(w.dtype not in ops.DTYPES for w in own.values()):
        return {}
    if own.keys() == {"weight"} and own["weight"].dim() == 3 and seams.is_grouped_linear(module):
        inputs = getattr(module, "input_size", getattr(module, "in_features", None))
        E, a, b = own["weight"].shape
        return {"weight": Form(E, a == inputs != b)}
    if [*own] == [*_FLAT] and getattr(module, "moe_num_experts", 0):
        return {n: Form(module.moe_num_experts, n == "w2", flat=True) for n in _FLAT}
    both = [own[n] for n in ("gate_up_proj", "down_proj") if n in own]
    if [w.dim() for w in both] == [3, 3] and seams.takes_experts(module):
        (E, a, b), (downs, c, d) = (w.shape for w in both)
        turned = (b, a) == (2 * c, d)
        if turned or (a, b) == (2 * d, c):
            return {"gate_up_proj": Form(E, turned, True), "down_proj": Form(downs, turned)}
    return {}


def quantised(module: nn.Module, name: str, w: Tensor, format: str) -> QuantTensor:
    """A stack of a module's, quantised, which says that it is what it was: the codes of one that is stored [E,in,out] lie [E,out,in]."""
    own, form = by_name(format), forms(module)[name]
    w = w.detach().unflatten(0, (form.E, -1)) if form.flat else w.detach()
    rows = w.shape[2 if form.turned else 1]
    if form.halves and own.rows > 1 and rows // 2 % own.rows:
        own = own._replace(flags=own.flags | HALVES)
    made = QuantTensor.from_weights(w.transpose(1, 2) if form.turned else w, own)
    made = made.turned() if form.turned else made
    return made.flat() if form.flat else made


def bytes_a_weight(format: str) -> float:
    """Codes and scales of a large matrix."""
    f: Format = by_name(format)
    return f.bits / 8 + f.scale_dtype.itemsize / (max(f.rows, 1) * (f.cols or 2048))


def _reads(module: nn.Module, function: Any, options: dict) -> tuple[nn.Module, str]:
    """Whose weights a function of seams.py reads, and what it is: "fused" or "composed"; "" for what cannot be quantised."""
    if function is seams.grouped_linear_forward:
        return module, "composed"
    if function is seams.list_block_forward or options.get("read") is layers.list_weights:
        return module.get_submodule("experts"), "fused"
    if function is seams.scaled_input_forward:
        return seams.inner(module.get_submodule("experts")), "fused"
    if options.get("read") is seams._flat_weights:
        return module.get_submodule("mlp"), "fused"
    return module, "fused" if function is seams.given_forward else ""


def paths(model: nn.Module, asked: bool = False) -> dict[nn.Module, str]:
    """The modules that hold stacks, and the lists of experts, with what runs them: "fused", "composed", "own". asked: those that ``apply``
    would run, too; a module of each class is tried out for that. It does not: only those it has been called for, and transformers'."""
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        if layers.is_v5_experts(module):
            found[module] = (layers.known(module) or layers.look_at(module)).path
        elif (bound := seams.seam_of(module)) is not None:
            owner, path = _reads(module, bound.__func__, bound.options)
            if path and not (isinstance(owner, nn.ModuleList) and layers.list_weights(module) is None):
                found[owner] = path
    for module, _, seam in seams.candidates(model, False) if asked else ():
        if seam is not None:
            owner, path = _reads(module, *seam[1:])
            if path:
                found[owner] = path
    return found


def held(module: nn.Module) -> Iterator[tuple[str, QuantTensor]]:
    """The quantised stacks of a module."""
    if type(module) is not QuantLinear:
        yield from ((name, w) for name, w in [*module._parameters.items()] if isinstance(w, QuantTensor))
