# SPDX-License-Identifier: Apache-2.0
"""The experts of a layer whose W1 or W2 is quantised: ``autograd.experts`` comes here where one of them is a QuantTensor.

Gradients of x, p, biases and adapters; a quantised weight has none. Eager only: torch.compile leaves the graph here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _core, ops
from .tensor import QuantTensor

QUANT = 1 << 9  # FMOE_QUANT


def is_quantised(w: Sequence[Any]) -> bool:
    return isinstance(w[0], QuantTensor) or (len(w) > 1 and isinstance(w[1], QuantTensor))


def _plan(x: Tensor, ids: Tensor, w: Sequence[Tensor], layer: tuple) -> int:
    act, flags, alpha, limit = layer
    sizes = ops.layer_sizes(w, act, flags, x.shape[-1])
    threads, k = torch.get_num_threads(), int(ids.shape[1])
    return ops._plan(ops.EXPERTS, x.dtype, x.device, threads, *sizes, k, 0, 0, 0, act, flags | QUANT, alpha, limit)


def _slots(w: Sequence[Tensor]) -> tuple[list[Tensor], list[tuple | None]]:
    """What _core takes for w: codes in the place of weights, and the descriptors of the two matrices."""
    descriptors = [t.descriptor() if isinstance(t, QuantTensor) else None for t in w[:2]]
    return [t.codes if isinstance(t, QuantTensor) else t for t in w], descriptors


def _forward(x: Tensor, ids: Tensor, p: Tensor, w: Sequence[Tensor], layer: tuple, scales: Sequence[float],
             save: bool) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    plan, (codes, quant) = _plan(x, ids, w, layer), _slots(w)
    out = ops._like(x)
    saved = ops._new(x, _core.saved_bytes(plan, x.shape[0])) if save else None
    last = *(scales or (None, None)), *quant
    _core.run(_core.EXPERTS_QUANT_FORWARD, plan, ops._form(*layer), None, x.shape[0], x, ids, p, codes, out, saved, *last)
    return out, saved


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: tuple, scales: Sequence[float], quantised: list, x: Tensor, ids: Tensor, p: Tensor,
                *w: Tensor | None) -> Tensor:  # fmt: skip
        full = [q if q is not None else t for q, t in zip(quantised + [None] * len(w), w)]
        out, saved = _forward(x, ids, p, full, layer, scales, True)
        ctx.save_for_backward(x, ids, p, saved, *w)
        ctx.layer, ctx.quantised = (layer, scales), quantised
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple:
        x, ids, p, saved, *w = ctx.saved_tensors
        (layer, scales), need = ctx.layer, ctx.needs_input_grad
        full = [q if q is not None else t for q, t in zip(ctx.quantised + [None] * len(w), w)]
        plan, (codes, quant) = _plan(x, ids, full, layer), _slots(full)
        dx = ops._like(x) if need[3] else None
        dp = ops._like(p) if need[5] else None
        matrices = lambda t: t.dim() == 3
        dw = [ops._grad(t, matrices(t)) if yes else None for t, yes in zip(w, need[6:], strict=True)]
        last = dout.contiguous(), dx, dp, dw, *(scales or (None, None)), *quant
        _core.run(_core.EXPERTS_QUANT_BACKWARD, plan, ops._form(*layer), None, x.shape[0], x, ids, p, codes, saved, *last)
        dw = [g if g is None else g.to(t.dtype) for g, t in zip(dw, w, strict=True)]
        return None, None, None, dx, None, dp, *dw


@torch.compiler.disable  # type: ignore[untyped-decorator]
def experts(x: Tensor, ids: Tensor, p: Tensor, w: Sequence[Tensor], act: int, flags: int, alpha: float, limit: float,
            scales: Sequence[float]) -> Tensor:  # fmt: skip
    """As ``autograd.experts``, whose arguments are ready: x in the dtype of the computation, w with the factors of adapters."""
    if flags & (ops.LIST | ops.TRANSPOSED):
        raise NotImplementedError("experts: quantised weights are stacks [E, out, in], not lists and not transposed")
    if not x.is_cpu:
        raise NotImplementedError(f"experts: x is on {x.device}; quantised weights are computed on the CPU")
    for i, t in enumerate(w[:2]):
        if t.requires_grad and isinstance(t, QuantTensor):
            raise ValueError(f"experts: w[{i}] is quantised and requires a gradient; it has none: train adapters")
    layer, rest = (act, flags & ~ops.WIDE_FACTORS, alpha, limit), w[2:]
    tracked = [t for t in w if not isinstance(t, QuantTensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, p, *tracked)):
        quantised = [t if isinstance(t, QuantTensor) else None for t in w[:2]]
        plain = [None if q is not None else t for q, t in zip(quantised, w[:2])]
        empty = x.new_empty(0)
        return _Experts.apply(layer, scales, quantised, x, ids, p, *[empty if t is None else t for t in plain], *rest)
    return _forward(x, ids, p, w, layer, scales, False)[0]
