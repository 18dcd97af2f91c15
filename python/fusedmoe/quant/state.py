# SPDX-License-Identifier: Apache-2.0
"""Quantised weights as plain tensors, so that a state_dict and safetensors can hold them: codes under the parameter's name, and ``.scale``,
``.scale2``, ``.zeros`` and ``.quant`` (what they mean, as JSON) beside it."""

import json

import torch
from torch import Tensor

from .formats import Format
from .tensor import QuantTensor

PARTS = "scale", "scale2", "zeros", "quant"  # beside the codes, in a state_dict
_FLOATS = torch.float32, torch.bfloat16, torch.float16


def write(name: str, w: QuantTensor) -> dict[str, Tensor]:
    """By name, what a state_dict holds of w."""
    format = [*w.format[:7], str(w.format.scale_dtype), w.format.scale2]
    meaning = json.dumps({"format": format, "shape": list(w.shape), "dtype": str(w.dtype), "transposed": w.transposed})
    beside = {f"{name}.{part}": t for part, t in w.parts().items() if part != "codes"}
    return {name: w.codes, **beside, f"{name}.quant": torch.tensor(list(meaning.encode()), dtype=torch.uint8)}


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name.removeprefix("torch."))


def read(codes: Tensor, scale: Tensor | None = None, quant: Tensor | None = None, scale2: Tensor | None = None,
         zeros: Tensor | None = None) -> QuantTensor:  # fmt: skip
    """The inverse. ValueError: these tensors are not those of quantised weights."""
    try:
        told = json.loads(bytes(quant.tolist()).decode()) if quant is not None else {}
        fields = *told["format"][:7], _dtype(told["format"][7]), *told["format"][8:]
        format, shape, dtype = Format._make(fields), torch.Size(told["shape"]), _dtype(told["dtype"])
        transposed = told.get("transposed", False)
        E = shape[0] if len(shape) == 3 else len(codes)
        N, K = shape[1:] if len(shape) == 3 else (shape[0] // E if codes.dim() == 3 else shape[0], shape[1])
        N, K = (K, N) if transposed else (N, K)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError) as problem:
        raise ValueError(f".quant does not say what its codes mean ({type(problem).__name__}: {problem})") from problem
    stack = (E,) if len(shape) == 3 or codes.dim() == 3 else ()
    want = {"codes": (*stack, N, format.bytes_of(K)), "scale": (*stack, *format.grid(N, K)), "zeros": (*stack, *format.grid(N, K))}
    for part, t in (("codes", codes), ("scale", scale), ("zeros", zeros)):
        if t is None and part != "zeros":
            raise ValueError(f"its {part} is missing")
        if t is not None and tuple(t.shape) != want[part]:
            raise ValueError(f"its {part} is {list(t.shape)}, expected {list(want[part])} for {format.name} {list(shape)}")
    assert scale is not None
    for part, t, kinds in (("codes", codes, (torch.uint8,)), ("scale", scale, (torch.uint8,) if format.scale_type else _FLOATS)):
        if t.dtype not in kinds:
            raise ValueError(f"its {part} is {t.dtype}, expected {kinds[0]} for {format.name}")
    return QuantTensor(codes, scale, format, shape, dtype, scale2, zeros, transposed)
