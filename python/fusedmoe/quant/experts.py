# SPDX-License-Identifier: Apache-2.0
"""The experts of a layer whose W1 or W2 is quantised: ``autograd.experts`` comes here where one of them is a QuantTensor.

Gradients of x, p, biases and adapters; a quantised weight has none.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .. import ops
from . import operators
from .tensor import QuantTensor


def is_quantised(w: Sequence[Any]) -> bool:
    """Whether a matrix of w, which may have hundreds, is quantised. Of a list, all gates and ups are or none, and all downs."""
    return isinstance(w[0], QuantTensor) or isinstance(w[-1], QuantTensor) or (len(w) > 1 and isinstance(w[1], QuantTensor))


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: tuple, scales: list[float], about: list[int], zeros: list[float], n: int, x: Tensor, ids: Tensor,
                p: Tensor, *tensors: Tensor) -> Tensor:  # fmt: skip
        w, parts = tensors[:n], tensors[n:]
        k = int(ids.shape[1])
        line = operators.experts_coded_saved(x.dtype, x.device, tuple(about), k, *layer) if is_compiling() else ()
        out, saved = ops.call(operators.experts_coded_forward, x, ids, p, w, parts, about, zeros, *layer, line, scales)
        ctx.save_for_backward(x, ids, p, saved, *tensors)
        ctx.layer = layer, scales, about, zeros, n
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple:
        x, ids, p, saved, *tensors = ctx.saved_tensors
        (layer, scales, about, zeros, n), given = ctx.layer, ctx.needs_input_grad
        w, parts = tensors[:n], tensors[n:]
        needs = [int(given[i]) for i in (5, 7, *range(8, 8 + n))]
        if ops.saved_is_ours(x):
            layer = layer[0], layer[1] | ops.REUSE_SAVED, *layer[2:]
        dout = dout.resolve_neg()
        grads = ops.call(operators.experts_coded_backward, x, ids, p, w, parts, about, zeros, saved, dout, *layer, needs, scales)
        dx, dp, *dw = ops.spread(grads, needs)
        dw = [g if g is None else g.to(t.dtype) for g, t in zip(dw, w, strict=True)]
        return None, None, None, None, None, dx, None, dp, *dw, *[None] * len(parts)


def _meaning(t: Any) -> list[int]:
    if not isinstance(t, QuantTensor):
        return [0] * operators.FIELDS
    f = t.format
    return [f.code, f.flags, f.rows, f.cols, f.scale_type, int(t.zeros is not None), int(t.scale2 is not None)]


def _read(group: Sequence[Any], at: int) -> list[Tensor]:
    """The tensors of scales of one stack, or of a list of matrices that mean the same."""
    first = group[0]
    if not isinstance(first, QuantTensor):
        return []
    for i, t in enumerate(group):
        if not isinstance(t, QuantTensor) or _meaning(t) != _meaning(first) or t.format.zero != first.format.zero:
            raise ValueError(f"experts: w[{at + i}] is {t!r:.90}, but w[{at}] {first!r}: matrices of a list have one format")
    return [getattr(t, of) for of in ("scale", "zeros", "scale2") for t in group if getattr(t, of) is not None]


def split(w: Sequence[Any], act: int, flags: int) -> tuple[list[Tensor], list[Tensor], list[int], list[float]]:
    """w with codes in the place of weights, and parts, the meanings and the zeros of ``operators``."""
    n = len(w) - (2 if flags & ops.LORA1 else 0) - (2 if flags & ops.LORA2 else 0)
    if flags & ops.LIST:
        each = n // (3 if act < ops.SILU else 2)
        starts = [n - 2 * each, n - each, *([0] if n > 2 * each else [])]
        groups = [w[i : i + each] for i in starts]
    else:
        starts, groups = [0, 1], [w[:1], w[1:2]]
    about, zeros, parts = [], [], []
    for at, group in zip(starts, groups, strict=True):
        about += _meaning(group[0])
        zeros.append(group[0].format.zero if isinstance(group[0], QuantTensor) else 0.0)
        parts += _read(group, at)
    missing = 3 - len(groups)
    codes = [t.codes if isinstance(t, QuantTensor) else t for t in w]
    return codes, parts, about + missing * operators.FIELDS * [0], zeros + missing * [0.0]


def upright(w: Sequence[Any], flags: int) -> tuple[list[Any], int]:
    """The weights of a layer that stores them [E,in,out], as [E,out,in], and its flags then. Quantised ones say which they are: their
    codes lie [E,out,in]."""
    for i, t in enumerate(w[:2]):
        if isinstance(t, QuantTensor) and not t.transposed:
            raise ValueError(f"experts: flags has TRANSPOSED, but w[{i}] holds its codes [E, out, in] and says {list(t.shape)}: t.turned()")
    return [t if isinstance(t, QuantTensor) else t.transpose(1, 2) for t in w[:2]] + [*w[2:]], flags & ~ops.TRANSPOSED


def experts(x: Tensor, ids: Tensor, p: Tensor, w: Sequence[Any], sizes: Sequence[int], act: int, flags: int, alpha: float, limit: float,
            scales: Sequence[float]) -> Tensor:  # fmt: skip
    """As ``autograd.experts``, whose arguments are ready: x in the dtype of the computation, w upright and with the factors of adapters;
    sizes: ops.layer_sizes(...)."""
    for i, t in enumerate(w):
        if isinstance(t, QuantTensor) and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"experts: w[{i}] is quantised and requires a gradient; it has none: train adapters")
    layer = act, flags, alpha, limit
    given, parts, about, zeros = split(w, act, flags)
    about = [*sizes, *about]
    tracked = [t for t in given if t.is_floating_point()]
    if torch.is_grad_enabled() and any([t.requires_grad for t in (x, p, *tracked)]):
        made: Tensor = _Experts.apply(layer, list(scales), about, zeros, len(given), x, ids, p, *given, *parts)
        return made
    out: Tensor = ops.call(operators.experts_coded, x, ids, p, given, parts, about, zeros, *layer, list(scales))
    return out
