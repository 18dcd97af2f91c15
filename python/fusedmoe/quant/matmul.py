# SPDX-License-Identifier: Apache-2.0
"""The grouped matmul by quantised weights: ``autograd.grouped_matmul`` and ``GmmFunction`` come here where the weight is a QuantTensor.

As torch operators, ``torch.ops.fusedmoe.grouped_matmul_coded*``, it sees plain tensors: codes, and ``parts``: scale, and those of zeros
and scale2 that there are. ``about`` is E, K, N, code, flags, group_rows, group_cols, scale_type, and whether there are zeros and scale2.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _core, ops
from ..ops import _define, _Many, _plan_for, _Steps
from .operators import QUANT
from .tensor import QuantTensor

IN_OUT = 4  # FMOE_QUANT_IN_OUT
_CODED = "Tensor codes, Tensor[] parts, int[] about, float zero"


def _plan(x: Tensor, about: Sequence[int]) -> int:
    return _plan_for(ops.GMM, x, E=about[0], K=about[1], N=about[2], flags=QUANT)


def _descriptor(parts: _Many, about: Sequence[int], zero: float) -> tuple:
    scale, *rest = parts
    zeros = rest.pop(0) if about[8] else None
    return (*about[3:8], zero, scale, zeros, rest[0] if about[9] else None)


@_define(_core.GROUPED_MATMUL_QUANT_FORWARD, f"grouped_matmul_coded(Tensor x, {_CODED}, Tensor[] bias, Tensor sizes, int cumulative) "
         "-> Tensor")  # fmt: skip
def grouped_matmul_coded(x: Tensor, codes: Tensor, parts: _Many, about: Sequence[int], zero: float, bias: _Many, sizes: Tensor,
                         cumulative: int) -> _Steps:  # fmt: skip
    y = x.new_zeros((x.shape[0], about[2]))  # rows past the last group stay zero
    yield y
    yield _plan(x, about), 0, x.shape[0], x, codes, bias, sizes, y, cumulative, 0, _descriptor(parts, about, zero)


@_define(_core.GROUPED_MATMUL_QUANT_BACKWARD, f"grouped_matmul_coded_backward(Tensor dy, {_CODED}, Tensor sizes, int needs, "
         "int cumulative) -> Tensor[]")  # fmt: skip
def grouped_matmul_coded_backward(dy: Tensor, codes: Tensor, parts: _Many, about: Sequence[int], zero: float, sizes: Tensor, needs: int,
                                  cumulative: int) -> _Steps:  # fmt: skip
    """Gradients of x (needs & 1) and of the bias (needs & 4)."""
    wanted = needs & 1, needs & 4
    grads = [dy.new_empty((dy.shape[0], about[1]))] if wanted[0] else []
    grads += [dy.new_empty((about[0], about[2]))] if wanted[1] else []
    yield grads
    yield (_plan(dy, about), 0, dy.shape[0], codes, sizes, dy, *ops.spread(grads, wanted), cumulative, 0,
           _descriptor(parts, about, zero))  # fmt: skip


def forward(ctx: Any, x: Tensor, weight: QuantTensor, sizes: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """y in x's dtype. The backward needs codes and sizes alone."""
    if weight.requires_grad:
        raise ValueError("grouped_matmul: weight is quantised and requires a gradient; it has none")
    f, parts = weight.format, [t for t in (weight.scale, weight.zeros, weight.scale2) if t is not None]
    flags = f.flags if weight.transposed else f.flags | IN_OUT
    about = [*weight.shape, f.code, flags, f.rows, f.cols, f.scale_type, int(weight.zeros is not None), int(weight.scale2 is not None)]
    ctx.save_for_backward(sizes, weight.codes, *parts)
    ctx.coded = about, f.zero, dtype
    ctx.dtypes = x.dtype, None if bias is None else bias.dtype
    given = [] if bias is None else [bias.to(dtype)]
    y: Tensor = grouped_matmul_coded(x.to(dtype), weight.codes, parts, about, f.zero, given, sizes, 0)
    return y.to(x.dtype)


def backward(ctx: Any, dy: Tensor, x: bool, bias: bool) -> tuple[Tensor | None, Tensor | None]:
    """Those of x and bias that are wanted."""
    sizes, codes, *parts = ctx.saved_tensors
    about, zero, dtype = ctx.coded
    made = grouped_matmul_coded_backward(dy.to(dtype), codes, parts, about, zero, sizes, x + 4 * bias, 0)
    dx, db = ops.spread(made, (x, bias))
    return None if dx is None else dx.to(ctx.dtypes[0]), None if db is None else db.to(ctx.dtypes[1])
