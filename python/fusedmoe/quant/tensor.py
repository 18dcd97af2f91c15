# SPDX-License-Identifier: Apache-2.0
"""QuantTensor: a stack of quantised weights that looks like the weights. The layer reads its codes; anything else that an operation does
with it is done with the weights, decoded for that operation alone."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .. import _core
from .formats import E2M1, E4M3, E4M3_SCALE, E8M0, FP4, HALVES, HIGH_FIRST, NF4, S8, Format, by_name

_aten = torch.ops.aten
_FLOATS = torch.float32, torch.bfloat16, torch.float16
_AT_ONCE = 16  # experts that pass the CPU at a time, of a stack on a device where the library makes no codes


@cache
def _converts_on(device: torch.device) -> bool:
    """Whether the library makes and decodes codes there: the CPU, and CUDA where its backend is there. The bytes are the same."""
    if device.type != "cuda":
        return device.type == "cpu"
    codes, scale = (torch.empty(1, 1, n, dtype=t, device=device) for n, t in ((1, torch.uint8), (1, torch.float32)))
    try:
        _core.quantize(False, scale, codes, (S8, 0, 1, 0, 0, 0.0, scale.clone(), None, None))
    except RuntimeError:
        return False
    return True


def _bytes(t: Tensor) -> Tensor:
    return t if t.dtype == torch.uint8 else t.view(torch.uint8)


def _readable(t: Tensor | None) -> Any:
    """t, or a copy where the library could not read it: strides are unit in the last dimension, and no two elements in one place."""
    t = t if t is None else t.resolve_neg()
    if t is None or t.is_contiguous():
        return t
    extent, dims = 1, [(stride, n) for stride, n in zip(t.stride(), t.shape) if n != 1]
    if dims and (t.shape[-1] == 1 or t.stride(-1) == 1):
        for stride, n in sorted(dims):
            if stride < extent:
                break
            extent = stride * n
        else:
            return t
    return t.contiguous()


def _one_byte(op: str, name: str, t: Tensor, *known: str) -> None:
    """t is of bytes, or of a dtype of one byte that means what is read."""
    if t.dtype not in (torch.uint8, *(getattr(torch, k) for k in known if hasattr(torch, k))):
        raise TypeError(f"{op}: {name} is {str(t.dtype).removeprefix('torch.')}, expected {' or '.join((*known, 'uint8'))}")


class QuantTensor(Tensor):
    """[E,N,K] (or one matrix, [N,K]) of a floating point dtype, held as codes and scales; transposed: it says that it is [E,K,N]. One of E
    matrices may say that it is [E*N,K] (``flat``). Made by ``from_weights`` and the other ``from_`` functions. It cannot be written to:
    in-place operations are errors."""

    codes: Tensor
    scale: Tensor
    scale2: Tensor | None
    zeros: Tensor | None
    format: Format
    transposed: bool

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, format: Format, shape: torch.Size, dtype: torch.dtype, scale2: Tensor | None = None,
                zeros: Tensor | None = None, transposed: bool = False) -> "QuantTensor":  # fmt: skip
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device, requires_grad=False)

    def __init__(self, codes: Tensor, scale: Tensor, format: Format, shape: torch.Size, dtype: torch.dtype, scale2: Tensor | None = None,
                 zeros: Tensor | None = None, transposed: bool = False):  # fmt: skip
        self.codes, self.scale, self.scale2, self.zeros = _bytes(_readable(codes)), _readable(scale), _readable(scale2), _readable(zeros)
        self.format, self.transposed = format, transposed

    # ---- making one -------------------------------------------------------------------------------------------------
    @classmethod
    def from_weights(cls, w: Tensor, format: str | Format) -> "QuantTensor":
        """Quantise a stack [E,N,K] of float32, bfloat16 or float16."""
        format = by_name(format) if isinstance(format, str) else format
        if w.dim() != 3:
            raise ValueError(f"quantize: the weights are {list(w.shape)}, expected a stack [E, N, K]")
        E, N, K = w.shape
        codes = torch.empty((E, N, format.bytes_of(K)), dtype=torch.uint8, device=w.device)
        scale = torch.empty((E, *format.grid(N, K)), dtype=format.scale_dtype, device=w.device)
        scale2 = torch.tensor([format.scale2], device=w.device) if format.scale2 else None
        made = cls(codes, scale, format, w.shape, w.dtype, scale2)
        if _converts_on(w.device):
            _core.quantize(False, w.detach().resolve_neg().contiguous(), codes, made.descriptor())
            return made
        for e in range(0, E, _AT_ONCE):
            here, own = made.experts(e, e + _AT_ONCE), cls.from_weights(w.detach()[e : e + _AT_ONCE].cpu(), format)
            here.codes.copy_(own.codes)
            here.scale.copy_(own.scale)
        return made

    @classmethod
    def from_fp8(cls, w: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.bfloat16, block: tuple[int, int] = (128, 128),
                 halves: bool = False) -> "QuantTensor":  # fmt: skip
        """float8_e4m3fn [E,N,K] and the scales of its blocks (transformers' FP8Experts): [E, ceil(N/128), ceil(K/128)], or twice
        ceil(N/2/128) rows where the grid begins anew with the ups; or [E, N, 1], a scale a channel. No copy.
        halves: w is gates and ups of one grid each, where both forms have as many rows (N/2 = 96, say)."""
        _one_byte("from_fp8", "w", w, "float8_e4m3fn")
        kind = 0 if scale_inv.dtype in _FLOATS else E8M0
        if kind:
            _one_byte("from_fp8", "scale_inv", scale_inv, "float32", "bfloat16", "float16", "float8_e8m0fnu")
        if w.dim() != 3 or scale_inv.dim() != 3:
            raise ValueError(f"from_fp8: w is {list(w.shape)}, scale_inv {list(scale_inv.shape)}, expected [E, N, K] and a grid for each")
        E, N, K = w.shape
        rows, cols = block
        if scale_inv.shape[1:] == (N, 1):
            rows, cols = 1, 0
        scale_dtype = torch.uint8 if kind else scale_inv.dtype
        grids = (HALVES, 0) if halves and rows > 1 and N // 2 % rows and N % 2 == 0 else (0, HALVES)
        formats = [Format("fp8", E4M3, flags, rows, cols, kind, scale_dtype=scale_dtype) for flags in grids]
        fits = [f for f in formats if tuple(scale_inv.shape) == (E, *f.grid(N, K))]
        if not fits:
            want = [E, *formats[grids.index(0)].grid(N, K)]
            raise ValueError(f"from_fp8: scale_inv is {list(scale_inv.shape)}, expected {want} for {[E, N, K]}")
        found = fits[0]
        return cls(w.detach(), _bytes(scale_inv.detach()) if kind else scale_inv.detach(), found, w.shape, dtype)

    @classmethod
    def from_mxfp4(cls, blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> "QuantTensor":
        """gpt-oss' blocks [E,N,K/32,16] (or [E,N,K/2]) and scales [E,N,K/32]. No copy."""
        _one_byte("from_mxfp4", "blocks", blocks, "int8", "float4_e2m1fn_x2")
        _one_byte("from_mxfp4", "scales", scales, "float8_e8m0fnu")
        if blocks.dim() not in (3, 4) or (blocks.dim() == 4 and blocks.shape[3] != 16):
            raise ValueError(f"from_mxfp4: blocks is {list(blocks.shape)}, expected [E, N, K/32, 16] or [E, N, K/2]")
        codes = _bytes(_readable(blocks.detach())).flatten(2)
        E, N, half = codes.shape
        if tuple(scales.shape) != (E, N, half // 16) or half % 16:
            raise ValueError(f"from_mxfp4: scales is {list(scales.shape)}, expected {[E, N, half // 16]} for blocks {list(blocks.shape)}")
        return cls(codes, _bytes(scales.detach()), by_name("mxfp4"), torch.Size((E, N, 2 * half)), dtype)

    @classmethod
    def from_fp4(cls, codes: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.bfloat16) -> "QuantTensor":
        """E2M1 codes [E,N,K/2] of DeepSeek-V4 (transformers' FP8Experts with expert_dtype "fp4") and scales [E,N,K/32]: E8M0, or floating
        point. No copy."""
        _one_byte("from_fp4", "codes", codes, "int8", "float4_e2m1fn_x2")
        if codes.dim() != 3 or tuple(scale_inv.shape) != (*codes.shape[:2], -(-codes.shape[2] // 16)):
            given = f"codes is {list(codes.shape)}, scale_inv {list(scale_inv.shape)}"
            raise ValueError(f"from_fp4: {given}, expected [E, N, K/2] and [E, N, K/32]")
        if scale_inv.dtype not in _FLOATS:
            return cls.from_mxfp4(codes, scale_inv, dtype)
        format, (E, N, half) = Format("mxfp4", E2M1, 0, 1, 32, scale_dtype=scale_inv.dtype), codes.shape
        return cls(codes.detach(), scale_inv.detach(), format, torch.Size((E, N, 2 * half)), dtype)

    @classmethod
    def from_nvfp4(cls, codes: Tensor, scale: Tensor, scale2: Tensor, dtype: torch.dtype = torch.bfloat16) -> "QuantTensor":
        """codes [E,N,K/2], scales float8_e4m3fn [E,N,K/16], and what they are multiplied by, float32 [E] or [1]. No copy."""
        _one_byte("from_nvfp4", "codes", codes, "int8", "float4_e2m1fn_x2")
        _one_byte("from_nvfp4", "scale", scale, "float8_e4m3fn")
        if codes.dim() != 3:
            raise ValueError(f"from_nvfp4: codes is {list(codes.shape)}, expected [E, N, K/2]")
        E, N, half = codes.shape
        if tuple(scale.shape) != (E, N, -(-half // 8)):
            raise ValueError(f"from_nvfp4: scale is {list(scale.shape)}, expected {[E, N, -(-half // 8)]} for codes {[E, N, half]}")
        if scale2.numel() not in (1, E):
            raise ValueError(f"from_nvfp4: scale2 has {scale2.numel()} numbers, expected 1 or E = {E}")
        format = Format("nvfp4", E2M1, 0, 1, 16, E4M3_SCALE, scale_dtype=torch.uint8)
        return cls(codes.detach(), _bytes(scale.detach()), format, torch.Size((E, N, 2 * half)), dtype, scale2.detach().reshape(-1).float())

    @classmethod
    def from_bitsandbytes(cls, data: Tensor, state: Any) -> "QuantTensor":
        """4-bit data of bitsandbytes and its QuantState, of a stack [E,N,K] or a matrix. Codes are not copied; nested scales are decoded
        to float32. Where rows are no whole blocks, a scale is repeated for each piece of a row that one block has."""
        shape, block = torch.Size(state.shape), state.blocksize
        if len(shape) not in (2, 3) or shape[-1] % 2:
            raise ValueError(f"from_bitsandbytes: the weights are {list(shape)}, expected [E, N, K] or [N, K], K even")
        absmax = state.absmax
        if state.nested:
            from bitsandbytes.functional import dequantize_blockwise

            absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset
        absmax, piece = absmax.detach().float().reshape(-1), math.gcd(shape[-1], block)
        if piece < block:
            absmax = absmax.repeat_interleave(block // piece)[: shape.numel() // piece]
        code = {"nf4": NF4, "fp4": FP4}[state.quant_type]
        format = Format(state.quant_type, code, HIGH_FIRST, 1, piece)
        codes = _bytes(data.detach()).reshape(*shape[:-1], shape[-1] // 2)
        return cls(codes, absmax.reshape(*shape[:-1], shape[-1] // piece), format, shape, state.dtype)

    # ---- what the library reads ---------------------------------------------------------------------------------------
    def parts(self) -> dict[str, Tensor]:
        """Its tensors: codes, scale and those of scale2 and zeros that it has."""
        named = (("codes", self.codes), ("scale", self.scale), ("scale2", self.scale2), ("zeros", self.zeros))
        return {name: t for name, t in named if t is not None}

    def descriptor(self) -> tuple:
        """fmoe_quant of a stack, as _core takes it."""
        f, stack = self.format, (lambda t: t if t is None or self.codes.dim() == 3 else t.unsqueeze(0))
        return f.code, f.flags, f.rows, f.cols, f.scale_type, f.zero, stack(self.scale), stack(self.zeros), self.scale2

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weights."""
        dtype = dtype or self.dtype
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return self.dequantize(torch.float32).to(dtype)
        if not self.numel():  # a cut without experts
            return torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        if not _converts_on(self.codes.device):
            if self.dim() != 3:
                return self.map(Tensor.cpu).dequantize(dtype).to(self.codes.device)
            parts = [self.experts(e, e + _AT_ONCE).map(Tensor.cpu) for e in range(0, self.shape[0], _AT_ONCE)]
            return torch.cat([part.dequantize(dtype).to(self.codes.device) for part in parts])
        shape = (*self.codes.shape[:-1], self.numel() // self.codes.shape[:-1].numel())
        out, codes = torch.empty(shape, dtype=dtype, device=self.codes.device), self.codes
        _core.quantize(True, *((out, codes) if codes.dim() == 3 else (out.unsqueeze(0), codes.unsqueeze(0))), self.descriptor())
        return (out.mT.contiguous() if self.transposed else out).view(self.shape)

    def nbytes_held(self) -> int:
        """Bytes of codes and scales."""
        return sum(t.nbytes for t in self.parts().values())

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"QuantTensor({self.format.name}, {list(self.shape)}, {self.dtype}, {self.nbytes_held()} bytes)"

    def map(self, fn: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> "QuantTensor":
        """The same with fn applied to codes and scales."""
        return self._with({name: fn(t) for name, t in self.parts().items()}, self.shape, dtype)

    def _with(self, parts: dict[str, Tensor], shape: torch.Size, dtype: torch.dtype | None = None) -> "QuantTensor":
        more = parts.get("scale2"), parts.get("zeros"), self.transposed
        return QuantTensor(parts["codes"], parts["scale"], self.format, shape, dtype or self.dtype, *more)

    @property
    def is_flat(self) -> bool:
        """Whether it is a stack that says it is one matrix."""
        return self.dim() == 2 and self.codes.dim() == 3

    @property
    def rows(self) -> int:
        """How many of its first dimension are one expert's."""
        return self.shape[0] // len(self.codes) if self.is_flat and len(self.codes) else 1

    def experts(self, start: int, end: int) -> "QuantTensor":
        """Those of a stack from start to end, as views."""
        if self.dim() != 3 and not self.is_flat:
            raise ValueError(f"QuantTensor.experts: it is {list(self.shape)}, expected a stack [E, N, K]")
        E = len(self.codes)
        cut = {name: t if name == "scale2" and len(t) != E else t[start:end] for name, t in self.parts().items()}
        return self._with(cut, torch.Size((len(cut["codes"]) * self.rows, *self.shape[1:])))

    def expert(self, e: int) -> "QuantTensor":
        """One matrix of a stack [E,N,K], as a view."""
        E = len(self.codes)
        cut = {name: t[e] for name, t in self.parts().items() if name != "scale2"}
        if self.scale2 is not None:
            cut["scale2"] = self.scale2 if len(self.scale2) != E else self.scale2[e : e + 1]
        return self._with(cut, self.shape[1:])

    def flat(self) -> "QuantTensor":
        """A stack [E,N,K] that says that it is [E*N,K]; without a copy."""
        return self._with(self.parts(), torch.Size((self.shape[0] * self.shape[1], self.shape[2])))

    def chosen(self, experts: list[int]) -> "QuantTensor":
        """These of a stack, copied, each with a second scale of its own."""
        E, index = self.shape[0], torch.tensor(experts, dtype=torch.int64, device=self.codes.device)
        parts = {name: t.expand(E) if name == "scale2" and len(t) != E else t for name, t in self.parts().items()}
        return self._with({name: t[index] for name, t in parts.items()}, torch.Size((len(experts), *self.shape[1:])))

    def turned(self) -> "QuantTensor":
        """Its last two dimensions exchanged, without a copy."""
        made = self._with(self.parts(), torch.Size((*self.shape[:-2], self.shape[-1], self.shape[-2])))
        made.transposed = not self.transposed
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple:
        args = self.codes, self.scale, tuple(self.format), self.shape, self.dtype, self.scale2, self.zeros, self.transposed
        return _rebuild, args

    def __deepcopy__(self, memo: dict) -> "QuantTensor":
        made = self.map(torch.clone)
        memo[id(self)] = made
        return torch.nn.Parameter(made, requires_grad=False) if isinstance(self, torch.nn.Parameter) else made

    # FSDP2 (torch.distributed.fsdp.fully_shard): a rank holds the codes and scales of its experts, and gathers those of all
    def fsdp_pre_all_gather(self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any) -> tuple[tuple, Any]:
        """What is gathered, and what is known without."""
        if outer_size[0] // self.rows % mesh.size():
            E = outer_size[0] // self.rows
            raise NotImplementedError(f"fully_shard: {self!r} of {E} experts over {mesh.size()} ranks; expected a multiple")
        shared = self.scale2 if self.scale2 is not None and len(self.scale2) != len(self.codes) else None
        parts = {name: t for name, t in self.parts().items() if name != "scale2" or shared is None}
        return tuple(parts.values()), (list(parts), shared)

    def fsdp_post_all_gather(self, outputs: tuple[Tensor, ...], known: Any, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
        """All experts, as views of what was gathered; a second time, they are there already."""
        if out is not None:
            return None
        names, shared = known
        parts = dict(zip(names, outputs)) | ({"scale2": shared} if shared is not None else {})
        return self._with(parts, torch.Size((len(parts["codes"]) * self.rows, *self.shape[1:])), dtype), ()

    # What torch.compile reads it by
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [*self.parts()], (self.format, self.dtype, self.transposed)

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> "QuantTensor":
        format, dtype, transposed = meta
        return QuantTensor(parts["codes"], parts["scale"], format, size, dtype, parts.get("scale2"), parts.get("zeros"), transposed)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        kwargs, first = kwargs or {}, args[0] if args else None
        if torch.is_inference_mode_enabled() and isinstance(first, cls) and not first.is_inference() and func.is_view:
            with torch.inference_mode(False):  # a view of what is no inference tensor is none either
                return func(*args, **kwargs)
        if isinstance(first, cls):
            known = _KNOWN.get(func)
            made = known(first, *args[1:], **kwargs) if known else None
            if made is not None:
                return made
        if func._schema.is_mutable:
            _refuse_writes(func, args, kwargs)
        decoded = lambda t: t.dequantize() if isinstance(t, cls) else t
        return func(*tree_map(decoded, args), **tree_map(decoded, kwargs))


def _refuse_writes(func: Any, args: tuple, kwargs: dict) -> None:
    for i, declared in enumerate(func._schema.arguments):
        given = kwargs.get(declared.name, args[i] if i < len(args) else None)
        if isinstance(given, QuantTensor) and declared.alias_info is not None and declared.alias_info.is_write:
            raise NotImplementedError(f"{func}: {given!r} cannot be written to: quantised weights are frozen (fusedmoe.dequantize)")


# ---- operations that keep it quantised; None: this one does not ------------------------------------------------------------
def _to_copy(t: QuantTensor, **kwargs: Any) -> QuantTensor:
    device = kwargs.get("device")
    return t.map(lambda part: part.to(device) if device is not None else part.clone(), kwargs.get("dtype"))


def _copy(t: QuantTensor, source: Tensor, non_blocking: bool = False) -> QuantTensor | None:
    if not isinstance(source, QuantTensor):  # DistributedDataParallel sends every process the weights of the first
        return t if source.shape == t.shape and torch.equal(t.dequantize(), source.to(t.dtype)) else None
    if (t.format, t.shape, t.transposed) != (source.format, source.shape, source.transposed):
        return None
    for name, part in t.parts().items():
        part.copy_(source.parts()[name], non_blocking)
    return t


def _transpose(t: QuantTensor, a: int, b: int) -> QuantTensor | None:
    return t.turned() if not t.is_flat and {a % t.dim(), b % t.dim()} == {t.dim() - 2, t.dim() - 1} else None


def _by_expert(t: QuantTensor, dim: int, *at: int) -> bool:
    """Whether a cut of this dimension, here, is between experts."""
    return (t.dim() == 3 or t.is_flat) and not dim % t.dim() and not any(n % t.rows for n in at)


def _slice(t: QuantTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> QuantTensor | None:
    start, end, _ = slice(start, end).indices(t.shape[0])
    if not _by_expert(t, dim, start, end) or step != 1:
        return None
    return t.experts(start // t.rows, end // t.rows)


def _select(t: QuantTensor, dim: int, index: int) -> QuantTensor | None:
    return t.expert(range(len(t.codes))[index]) if t.dim() == 3 and not dim % 3 else None


def _unbind(t: QuantTensor, dim: int = 0) -> list[QuantTensor] | None:
    return [t.expert(e) for e in range(len(t.codes))] if t.dim() == 3 and not dim % 3 else None


def _empty_like(t: QuantTensor, **kwargs: Any) -> QuantTensor | None:
    same = kwargs.get("dtype") in (None, t.dtype)
    return t.map(lambda part: torch.empty_like(part, device=kwargs.get("device"))) if same else None


def _split(t: QuantTensor, size: int, dim: int = 0) -> list[QuantTensor] | None:
    if not _by_expert(t, dim, size):
        return None
    return [t.experts(at // t.rows, (at + size) // t.rows) for at in range(0, t.shape[0], size)]


def _new_zeros(t: QuantTensor, size: Any, **kwargs: Any) -> QuantTensor | None:
    """Of other numbers of experts; their scales are 0."""
    fits = _by_expert(t, 0, size[0]) and tuple(size[1:]) == tuple(t.shape[1:])
    if not fits or kwargs.get("dtype") not in (None, t.dtype):
        return None
    shared, E = t.scale2 is not None and len(t.scale2) != len(t.codes), size[0] // t.rows
    made = {name: part.new_zeros((E, *part.shape[1:]), device=kwargs.get("device")) for name, part in t.parts().items()}
    return t._with(made | ({"scale2": t.scale2} if shared else {}), torch.Size(size))


def _same_shape(t: QuantTensor, size: Any, *_: Any) -> QuantTensor | None:
    """Of view and as_strided; FSDP2 makes a line of it, which it does not read, and DBRX a stack of what is flat."""
    if tuple(size) in ((-1,), (t.numel(),)):
        return t._with(t.parts(), torch.Size((t.numel(),)))
    stack = len(t.codes), t.rows, t.shape[-1]
    if t.is_flat and len(size) == 3 and all(n in (-1, own) for n, own in zip(size, stack)):
        return t._with(t.parts(), torch.Size(stack))
    return t.map(lambda part: part) if tuple(size) == tuple(t.shape) else None


_KNOWN: dict[Any, Callable[..., Any]] = {
    _aten.split.Tensor: _split,
    _aten.new_zeros.default: _new_zeros,
    _aten.view.default: _same_shape,
    _aten.as_strided.default: _same_shape,
    _aten.detach.default: lambda t: t.map(lambda part: part),
    _aten.alias.default: lambda t: t.map(lambda part: part),
    _aten.clone.default: lambda t, **_: t.map(torch.clone),
    _aten.empty_like.default: _empty_like,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy,
    _aten.transpose.int: _transpose,
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.unbind.int: _unbind,
}


def _rebuild(codes: Tensor, scale: Tensor, format: tuple, shape: torch.Size, dtype: torch.dtype, *more: Any) -> QuantTensor:
    return QuantTensor(codes, scale, Format(*format), shape, dtype, *more)
