# SPDX-License-Identifier: Apache-2.0
"""The layer on quantised weights as torch operators: ``torch.ops.fusedmoe.experts_coded*``. They see plain tensors, codes and scales, so
that a compiled graph holds them.

``w`` is that of ``ops.experts`` with codes in the place of quantised weights. ``about`` and ``zeros`` say what codes mean: about begins
with H, I, E, rank1, rank2, and then has seven numbers for each of W1 (ups of a list), W2 and the gates of a list: code (0: it is not
quantised), flags, group_rows, group_cols, scale_type, and whether it has zeros and a second scale. ``parts`` are their tensors, in
this order: scale, zeros, scale2; of a list, each of all experts. ``zeros`` are their constant zero points.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .. import _core, ops
from ..ops import _define, _form, _grad, _like, _Many, _new, _Steps

QUANT = 1 << 9  # FMOE_QUANT
SIZES, FIELDS = 5, 7


def _plan(x: Tensor, ids: Tensor, about: Sequence[int], act: int, flags: int, alpha: float, limit: float) -> int:
    if ids.dim() != 2:
        raise ValueError(f"experts: ids is {list(ids.shape)}, expected [T, k], the experts of each token")
    layer = act, flags | QUANT, alpha, limit
    return ops._plan(ops.EXPERTS, x.dtype, x.device, ops.torch.get_num_threads(), *about[:SIZES], int(ids.shape[1]), 0, 0, 0, *layer)


def _descriptors(parts: _Many, about: Sequence[int], zeros: Sequence[float], flags: int) -> list[tuple | None]:
    """Of W1, W2 and the gates, as _core takes them."""
    found: list[tuple | None] = []
    E, rest = about[2], list(parts)
    for i, zero in enumerate(zeros):
        code, *meaning, has_zeros, has_scale2 = about[SIZES + i * FIELDS :][:FIELDS]
        tensors: list[Any] = []
        for there in (1, has_zeros, has_scale2):
            n = (E if flags & ops.LIST else 1) if code and there else 0
            taken, rest = rest[:n], rest[n:]
            tensors.append(taken if flags & ops.LIST and n else taken[0] if n else None)
        found.append((code, *meaning, zero, *tensors) if code else None)
    return found


_CODED = ("Tensor x, Tensor ids, Tensor p, Tensor[] w, Tensor[] parts, int[] about, float[] zeros, int act, int flags, float alpha, "
          "float limit")  # fmt: skip


@_define(_core.EXPERTS_QUANT_FORWARD, f"experts_coded({_CODED}, float[] scales=[]) -> Tensor")
def experts_coded(x: Tensor, ids: Tensor, p: Tensor, w: _Many, parts: _Many, about: Sequence[int], zeros: Sequence[float], act: int,
                  flags: int, alpha: float, limit: float, scales: Sequence[float] = ()) -> _Steps:  # fmt: skip
    """The layer without a gradient: nothing is saved."""
    out = _like(x)
    yield out
    last = *(scales or (None, None)), *_descriptors(parts, about, zeros, flags)
    yield _plan(x, ids, about, act, flags, alpha, limit), _form(act, flags), x.shape[0], x, ids, p, w, out, None, *last


def experts_coded_saved(dtype: Any, device: Any, about: tuple[int, ...], k: int, act: int, flags: int, alpha: float,
                        limit: float) -> tuple[int, int]:  # fmt: skip
    """As ``ops.experts_saved``."""
    return ops.experts_saved(dtype, device, about[:SIZES], k, act, flags | QUANT, alpha, limit)


experts_coded_saved._dynamo_marked_constant = True  # assume_constant_result without the compiler


@_define(_core.EXPERTS_QUANT_FORWARD, f"experts_coded_forward({_CODED}, int[] saved, float[] scales=[]) -> (Tensor, Tensor)")
def experts_coded_forward(x: Tensor, ids: Tensor, p: Tensor, w: _Many, parts: _Many, about: Sequence[int], zeros: Sequence[float],
                          act: int, flags: int, alpha: float, limit: float, saved: Sequence[int],
                          scales: Sequence[float] = ()) -> _Steps:  # fmt: skip
    """The layer, and the state its backward needs."""
    T, layer = x.shape[0], (act, flags, alpha, limit)
    plan = 0 if saved else _plan(x, ids, about, *layer)
    out, state = _like(x), _new(x, saved[0] + saved[1] * T if saved else _core.saved_bytes(plan, T))
    yield out, state
    if saved:
        plan = _plan(x, ids, about, *layer)
        _core.saved_bytes(plan, T, state)
    yield plan, _form(*layer), T, x, ids, p, w, out, state, *(scales or (None, None)), *_descriptors(parts, about, zeros, flags)


@_define(_core.EXPERTS_QUANT_BACKWARD, "experts_coded_backward(Tensor x, Tensor ids, Tensor p, Tensor[] w, Tensor[] parts, int[] about, "
         "float[] zeros, Tensor saved, Tensor dout, int act, int flags, float alpha, float limit, int[] needs, float[] scales=[]) "
         "-> Tensor[]")  # fmt: skip
def experts_coded_backward(x: Tensor, ids: Tensor, p: Tensor, w: _Many, parts: _Many, about: Sequence[int], zeros: Sequence[float],
                           saved: Tensor, dout: Tensor, act: int, flags: int, alpha: float, limit: float, needs: Sequence[int],
                           scales: Sequence[float] = ()) -> _Steps:  # fmt: skip
    """Gradients of x, p and w where needs has a 1, in this order."""
    grads = [_like(t) for t, yes in zip((x, p), needs, strict=False) if yes]
    n_factors = (2 if flags & ops.LORA1 else 0) + (2 if flags & ops.LORA2 else 0)
    for i, (t, yes) in enumerate(zip(w, needs[2:], strict=True)):
        wide = flags & ops.WIDE_FACTORS and i >= len(w) - n_factors
        if yes:
            grads.append(_grad(t, t.dim() == 3, ops.torch.float32 if wide else None))
    yield grads
    dx, dp, *dw = ops.spread(grads, needs)
    last = dx, dp, dw, *(scales or (None, None)), *_descriptors(parts, about, zeros, flags)
    yield _plan(x, ids, about, act, flags, alpha, limit), _form(act, flags), x.shape[0], x, ids, p, w, saved, dout, *last
