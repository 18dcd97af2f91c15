# SPDX-License-Identifier: Apache-2.0
"""Which MoE layers of a model run on fusedmoe, and why the others do not. No layer of the model is run."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .. import checks
from . import layers, peft, seams
from . import transformers as hf
from .layers import Layer


class Row(NamedTuple):
    """One MoE layer. path: "fused", "composed" (grouped matmuls, the model's own operations between them) or "own" (its own forward)."""

    module: str
    cls: str
    path: str
    activation: str
    dtype: str
    device: str
    reason: str


class Report:
    """The rows, and as text a table of them with a summary as its last line."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    @property
    def summary(self) -> str:
        """One line: how many layers go which way; activation, dtype and device of those that are fused, the reasons for the others."""
        ways = {"fused": "fused", "composed": "composed", "own": "left alone"}
        counts = Counter((r.path, ", ".join(r[3:6]) if r.path == "fused" else f"{r.dtype}, {r.device}: {r.reason}") for r in self.rows)
        parts = sorted(counts.items(), key=lambda part: [*ways].index(part[0][0]))
        what = [" MoE layer" if n == 1 else " MoE layers" for _, n in parts[:1]] + [""] * len(parts)
        return "; ".join(f"{n}{kind} {ways[path]} ({why})" for ((path, why), n), kind in zip(parts, what)) or "no MoE layer"

    def __str__(self) -> str:
        lines = [Row("module", "class", "path", "activation", "dtype", "device", "reason"), *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join(["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines] + [self.summary])

    def __repr__(self) -> str:
        return f"<fusedmoe.report: {self.summary}>"

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)


def _row(name: str, module: nn.Module, path: str, act: int | None, reason: str, like: Tensor | None = None) -> Row:
    if like is None:  # the largest of its tensors
        like = max(chain(module.parameters(), module.buffers()), key=Tensor.numel, default=torch.empty(0, device="meta"))
    activation, dtype, device = layers.traits(act, like)
    return Row(name, type(module).__name__, path, "-" if path == "own" else activation, dtype, device, reason)


def _v5(name: str, module: nn.Module, adapters: str) -> Row:
    chosen, why, config = hf.chosen(module), layers.misfit(module), cast(Any, module.config)
    if why or not chosen:
        return _row(name, module, "own", None, why or f'its experts_implementation is "{config._experts_implementation}"')
    layer = layers.known(module) or layers.look_at(module)
    layer = layers.by_name(layer) if chosen == hf.COMPOSED else layer
    return _row(name, module, layer.path, layer.act, layer.why + adapters)


def _patched(name: str, module: nn.Module, bound: seams.Bound, adapters: str) -> Row:
    """Of a module with a function of ours, which calls the module's own forward where it cannot read the weights any more."""
    layer: Any = bound.options.get("layer")
    read = bound.options.get("read")
    if bound.__func__ is seams.list_block_forward:
        layer, read = Layer(bound.options["act"]), layers.list_weights
    elif bound.__func__ is seams.scaled_input_forward:
        read = lambda module: seams.scaled_experts(module, layer)
    w = read(module) if read else ((), ())
    if w is None:
        return _row(name, module, "own", None, seams.UNREAD)
    adapters = adapters or (peft.OURS if w[1] else "")
    reason = f"on six tokens it gave what its own forward gives{adapters}"
    return _row(name, module, layer.path, layer.act, reason, w[0][0] if w[0] else None)


def _why(module: nn.Module) -> str:
    """Why a module that is not ours is not."""
    foreign = any(p.dtype not in checks.DTYPES for p in module.parameters())
    return seams.left.get(module) or (layers.quantized(module) if foreign else "fusedmoe.apply was not called")


@torch.no_grad()
def report(model: nn.Module) -> Report:
    """How each MoE layer of a model is run, from what its modules are now: before or after ``apply``, on any device, also on meta."""
    modules, adapters = dict(model.named_modules()), peft.adapters(model)
    rows: dict[str, Row] = {}
    others: dict[str, tuple[nn.Module, str]] = {}
    for name, module in modules.items():
        bound = seams.seam_of(module)
        if seams.is_grouped_linear(module):  # two of them, and what is between them, make a layer
            parent = name.rpartition(".")[0]
            others[parent] = modules[parent], _why(module)
            if bound is not None:
                rows[parent] = _row(parent, modules[parent], "composed", None, f"grouped matmuls in the place of {type(module).__name__}")
        elif bound is not None:
            rows[name] = _patched(name, module, bound, adapters.get(module, ""))
        elif layers.is_v5_experts(module):
            rows[name] = _v5(name, module, adapters.get(module, ""))
        elif seams.is_moe(module):
            others[name] = module, _why(module)
    for name, (module, why) in others.items():  # the innermost, where nothing around them and nothing inside has a row
        near = (other == name or _inside(other, name) or _inside(name, other) for other in rows)
        if not any(near) and not any(_inside(other, name) for other in others):
            rows[name] = _row(name, module, "own", None, why)
    return Report([rows[name] for name in modules if name in rows])


def _inside(name: str, outer: str) -> bool:
    return name != outer and (not outer or name.startswith(outer + "."))
