# SPDX-License-Identifier: Apache-2.0
"""QuantTensor: a stack of quantised weights that looks like the weights. The layer reads its codes; anything else that an operation does
with it is done with the weights, decoded for that operation alone."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .. import _core
from .formats import E2M1, E4M3, E4M3_SCALE, E8M0, FP4, HALVES, HIGH_FIRST, NF4, Format, by_name

_aten = torch.ops.aten


def _bytes(t: Tensor) -> Tensor:
    return t if t.dtype == torch.uint8 else t.view(torch.uint8)


class QuantTensor(Tensor):
    """[E,N,K] of a floating point dtype, held as codes and scales. Made by ``from_weights`` and the other ``from_`` functions."""

    codes: Tensor
    scale: Tensor
    scale2: Tensor | None
    format: Format

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, format: Format, shape: torch.Size, dtype: torch.dtype,
                scale2: Tensor | None = None) -> "QuantTensor":  # fmt: skip
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device, requires_grad=False)

    def __init__(self, codes: Tensor, scale: Tensor, format: Format, shape: torch.Size, dtype: torch.dtype, scale2: Tensor | None = None):
        self.codes, self.scale, self.scale2, self.format = _bytes(codes), scale, scale2, format

    # ---- making one -------------------------------------------------------------------------------------------------
    @classmethod
    def from_weights(cls, w: Tensor, format: str | Format) -> "QuantTensor":
        """Quantise a stack [E,N,K] of float32, bfloat16 or float16 on the CPU."""
        format = by_name(format) if isinstance(format, str) else format
        if w.dim() != 3 or not w.is_cpu:
            raise ValueError(f"quantize: the weights are {list(w.shape)} on {w.device}, expected a stack [E, N, K] on the CPU")
        E, N, K = w.shape
        codes = torch.empty((E, N, format.bytes_of(K)), dtype=torch.uint8)
        scale = torch.empty((E, *format.grid(N, K)), dtype=format.scale_dtype)
        scale2 = torch.tensor([format.scale2]) if format.scale2 else None
        made = cls(codes, scale, format, w.shape, w.dtype, scale2)
        _core.quantize(False, w.detach().contiguous(), codes, made.descriptor())
        return made

    @classmethod
    def from_fp8(cls, w: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.bfloat16,
                 block: tuple[int, int] = (128, 128)) -> "QuantTensor":  # fmt: skip
        """float8_e4m3fn [E,N,K] and the scales of its blocks (transformers' FP8Experts): [E, ceil(N/128), ceil(K/128)], or twice
        ceil(N/2/128) rows where the grid begins anew with the ups; or [E, N, 1], a scale a channel. No copy."""
        E, N, K = w.shape
        rows, cols = block
        if scale_inv.shape[1:] == (N, 1):
            rows, cols = 1, 0
        kind = E8M0 if scale_inv.dtype not in (torch.float32, torch.bfloat16, torch.float16) else 0
        scale_dtype = torch.uint8 if kind else scale_inv.dtype
        formats = [Format("fp8", E4M3, flags, rows, cols, kind, scale_dtype=scale_dtype) for flags in (0, HALVES)]
        fits = [f for f in formats if tuple(scale_inv.shape) == (E, *f.grid(N, K))]
        if not fits:
            raise ValueError(f"from_fp8: scale_inv is {list(scale_inv.shape)}, expected {[E, *formats[0].grid(N, K)]} for {[E, N, K]}")
        return cls(w.detach().contiguous(), _bytes(scale_inv.detach()) if kind else scale_inv.detach(), fits[0], w.shape, dtype)

    @classmethod
    def from_mxfp4(cls, blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> "QuantTensor":
        """gpt-oss' blocks [E,N,K/32,16] (or [E,N,K/2]) and scales [E,N,K/32]. No copy."""
        codes = blocks.detach().flatten(2)
        E, N, half = codes.shape
        if tuple(scales.shape) != (E, N, half // 16):
            raise ValueError(f"from_mxfp4: scales is {list(scales.shape)}, expected {[E, N, half // 16]}")
        return cls(codes, _bytes(scales.detach()), by_name("mxfp4"), torch.Size((E, N, 2 * half)), dtype)

    @classmethod
    def from_nvfp4(cls, codes: Tensor, scale: Tensor, scale2: Tensor, dtype: torch.dtype = torch.bfloat16) -> "QuantTensor":
        """codes [E,N,K/2], scales float8_e4m3fn [E,N,K/16], and what they are multiplied by, float32 [E] or [1]. No copy."""
        E, N, half = codes.shape
        format = Format("nvfp4", E2M1, 0, 1, 16, E4M3_SCALE, scale_dtype=torch.uint8)
        return cls(codes.detach(), _bytes(scale.detach()), format, torch.Size((E, N, 2 * half)), dtype, scale2.detach().reshape(-1).float())

    @classmethod
    def from_bitsandbytes(cls, data: Tensor, state: Any) -> "QuantTensor":
        """4-bit data of bitsandbytes and its QuantState, of a stack [E,N,K] whose rows are whole blocks. Codes are not copied; nested
        scales are decoded to float32."""
        shape, block = torch.Size(state.shape), state.blocksize
        if len(shape) != 3 or shape[2] % block:
            raise ValueError(f"from_bitsandbytes: the weights are {list(shape)} in blocks of {block}, expected [E, N, K], K a multiple")
        absmax = state.absmax
        if state.nested:
            from bitsandbytes.functional import dequantize_blockwise

            absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset
        code = {"nf4": NF4, "fp4": FP4}[state.quant_type]
        format = Format(state.quant_type, code, HIGH_FIRST, 1, block)
        E, N, K = shape
        codes = _bytes(data.detach()).reshape(E, N, K // 2)
        return cls(codes, absmax.detach().float().reshape(E, N, K // block), format, shape, state.dtype)

    # ---- what the library reads ---------------------------------------------------------------------------------------
    def descriptor(self) -> tuple:
        """fmoe_quant, as _core takes it."""
        f = self.format
        return f.code, f.flags, f.rows, f.cols, f.scale_type, f.zero, self.scale, None, self.scale2

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weights."""
        if not self.codes.is_cpu:
            raise NotImplementedError(f"dequantize: the codes are on {self.codes.device}; quantised weights are computed on the CPU")
        out = torch.empty(self.shape, dtype=dtype or self.dtype)
        if out.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return self.dequantize(torch.float32).to(out.dtype)
        _core.quantize(True, out, self.codes, self.descriptor())
        return out

    def nbytes_held(self) -> int:
        """Bytes of codes and scales."""
        return sum(t.nbytes for t in (self.codes, self.scale, self.scale2) if t is not None)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"QuantTensor({self.format.name}, {list(self.shape)}, {self.dtype}, {self.nbytes_held()} bytes)"

    def map(self, fn: Any, dtype: torch.dtype | None = None) -> "QuantTensor":
        """The same with fn applied to codes and scales."""
        parts = [None if t is None else fn(t) for t in (self.codes, self.scale, self.scale2)]
        return type(self)(parts[0], parts[1], self.format, self.shape, dtype or self.dtype, parts[2])

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _rebuild, (self.codes, self.scale, tuple(self.format), self.shape, self.dtype, self.scale2)

    def __deepcopy__(self, memo: dict) -> "QuantTensor":
        made = self.map(torch.clone)
        memo[id(self)] = made
        return torch.nn.Parameter(made, requires_grad=False) if isinstance(self, torch.nn.Parameter) else made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        kwargs, first = kwargs or {}, args[0] if args else None
        if isinstance(first, cls):
            if func in (_aten.detach.default, _aten.alias.default):
                return first.map(lambda t: t)
            if func is _aten.clone.default:
                return first.map(torch.clone)
            if func is _aten._to_copy.default:
                device = kwargs.get("device")
                return first.map(lambda t: t.to(device) if device is not None else t.clone(), kwargs.get("dtype"))
        decoded = lambda t: t.dequantize() if isinstance(t, cls) else t
        return func(*tree_map(decoded, args), **tree_map(decoded, kwargs))


def _rebuild(codes: Tensor, scale: Tensor, format: tuple, shape: torch.Size, dtype: torch.dtype, scale2: Tensor | None) -> QuantTensor:
    return QuantTensor(codes, scale, Format(*format), shape, dtype, scale2)
