# SPDX-License-Identifier: Apache-2.0
"""A quantised matrix [N,K] as others lay it out (compressed-tensors, GPTQ, AWQ, FP8 of transformers), to a QuantTensor and back without
loss, and matrices joined to stacks [E,N,K].

``read`` knows a layout by the names, dtypes and shapes of a Linear's tensors. It copies codes where ours lie elsewhere (GPTQ, AWQ); of
the others it makes views.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _core
from .formats import E2M1, E4M3, E4M3_SCALE, E8M0, HALVES, S8, U4, Format
from .tensor import QuantTensor, _bytes

GPTQ, AWQ = 2, 3  # fmoe_repack
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FLOATS = torch.float32, torch.bfloat16, torch.float16


class UnknownLayout(ValueError):
    """Tensors of a quantised matrix that QuantTensor cannot hold; says why."""


class Layout(NamedTuple):
    """How a matrix was laid out: enough to write it again. rest: its tensors that say nothing about the weights, as they are."""

    kind: str
    scale_shape: tuple[int, ...]
    scale_dtype: torch.dtype
    zeros_dtype: torch.dtype | None
    offset: int  # GPTQ's first version stores zero points less 1
    rest: dict[str, Tensor]
    divisor: Tensor | None = None  # NVFP4: weight_global_scale


def _in_a_row(t: Tensor) -> Tensor:
    """[n], compact: contiguous() leaves a dimension of one any stride, and view(dtype) wants 1."""
    return t.contiguous().as_strided((t.numel(),), (1,))


def _nibbles(words: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """uint8 [..., 8n] of int32 [..., n]."""
    each = (words.unsqueeze(-1) >> (4 * torch.arange(8, dtype=torch.int32, device=words.device))) & 15
    out = torch.empty_like(each)
    out[..., list(order)] = each
    return out.flatten(-2).to(torch.uint8)


def _words(nibbles: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """The inverse of ``_nibbles``."""
    each = nibbles.to(torch.int64).unflatten(-1, (-1, 8))[..., list(order)]
    summed = (each << (4 * torch.arange(8, device=nibbles.device))).sum(-1)
    return torch.where(summed >= 2**31, summed - 2**32, summed).to(torch.int32)


def _group(K: int, columns: int) -> int:
    if columns == 1:
        return 0
    if K % columns:
        raise UnknownLayout(f"rows of {K} codes have {columns} scales, which are no whole groups")
    return K // columns


def read(given: dict[str, Tensor], dtype: torch.dtype, block: Sequence[int] = (128, 128),
         gptq_version: int = 1) -> tuple[QuantTensor, Layout]:  # fmt: skip
    """The matrix of a Linear's tensors, named as in its state_dict, and how it was laid out. block: of FP8 scales in two dimensions."""
    t = {name: value.detach() for name, value in given.items()}
    if "qweight" in t:
        return _read_gptq(t, dtype, gptq_version)
    if "weight_packed" in t:
        return _read_packed(t, dtype)
    scale_name = next((n for n in ("weight_scale_inv", "weight_scale", "SCB") if n in t), None)
    if scale_name is None or "weight" not in t:
        raise UnknownLayout(f"its tensors are {', '.join(sorted(t))}")
    return _read_plain(t, dtype, block, scale_name)


def decode(given: dict[str, Tensor], dtype: torch.dtype, gptq_version: int = 1) -> Tensor:
    """The weights of GPTQ's and AWQ's tensors, in any order of groups."""
    groups = given.get("g_idx")
    q, _ = read({name: t for name, t in given.items() if name != "g_idx"}, dtype, gptq_version=gptq_version)
    if groups is None:
        return q.dequantize()
    assert q.zeros is not None
    codes, at = torch.stack((q.codes & 15, q.codes >> 4), -1).flatten(-2), groups.long()
    return ((codes.float() - q.zeros.float()[:, at]) * q.scale.float()[:, at]).to(dtype)


def _read_gptq(t: dict[str, Tensor], dtype: torch.dtype, version: int) -> tuple[QuantTensor, Layout]:
    q, z, s = t.pop("qweight"), t.pop("qzeros"), t.pop("scales")
    groups, N = s.shape
    awq = q.shape[1] * 8 == N
    K = q.shape[0] * (1 if awq else 8)
    if q.dtype != torch.int32 or (not awq and q.shape[1] != N) or z.shape != (groups, N // 8) or K % groups or N % 8 or K % 2:
        raise UnknownLayout(f"qweight is {q.dtype} {list(q.shape)}, qzeros {list(z.shape)} beside scales {list(s.shape)}: not 4 bits")
    g = K // groups
    if "g_idx" in t and not torch.equal(t["g_idx"].long().cpu(), torch.arange(K) // g):
        raise UnknownLayout("its g_idx is not in order (desc_act): a row's groups are not contiguous")
    codes = torch.empty(N, K // 2, dtype=torch.uint8)
    _core.repack(AWQ if awq else GPTQ, False, N, K, q.cpu().contiguous(), codes)
    offset = 0 if awq or version != 1 else 1
    zeros = _nibbles(z, _AWQ_ORDER if awq else range(8)).t().contiguous() + offset
    how = Layout("awq" if awq else "gptq", tuple(s.shape), s.dtype, z.dtype, offset, t)
    return QuantTensor(codes.to(q.device), s.t().contiguous(), Format("int4", U4, 0, 1, g), torch.Size((N, K)), dtype, None, zeros), how


def _read_packed(t: dict[str, Tensor], dtype: torch.dtype) -> tuple[QuantTensor, Layout]:
    packed, s = t.pop("weight_packed"), t.pop("weight_scale")
    if packed.dtype == torch.uint8:  # FP4
        N, half = packed.shape
        divisor = t.pop("weight_global_scale", None)
        scale_type = E4M3_SCALE if s.dtype == torch.float8_e4m3fn else E8M0
        name = "nvfp4" if scale_type == E4M3_SCALE else "mxfp4"
        format = Format(name, E2M1, 0, 1, _group(2 * half, s.shape[1]), scale_type, scale_dtype=torch.uint8)
        scale2 = None if divisor is None else (1 / divisor.float()).reshape(1)
        how = Layout("fp4", tuple(s.shape), s.dtype, None, 0, t, divisor)
        return QuantTensor(packed, _bytes(s), format, torch.Size((N, 2 * half)), dtype, scale2), how
    shape = t.get("weight_shape")
    N, words = packed.shape
    K = int(shape[1]) if shape is not None and shape.numel() == 2 else 8 * words
    z, found = t.pop("weight_zero_point", None), t.get("weight_g_idx")
    if found is not None and found.numel() and bool((found.diff() < 0).any()):
        raise UnknownLayout("its weight_g_idx is not in order: a row's groups are not contiguous")
    bits = {-(-K // 8): 4, -(-K // 4): 8}.get(words, 0)
    if packed.dtype != torch.int32 or not bits or K <= 4 or s.dtype not in _FLOATS:
        raise UnknownLayout(f"weight_packed is {packed.dtype} {list(packed.shape)} of {K} weights a row: not 4 or 8 bits")
    codes = _in_a_row(packed).view(torch.uint8).view(N, -1)[:, : -(-K * bits // 8)]
    s2 = s.reshape(N, -1) if s.numel() != 1 else s.reshape(1, 1).expand(N, 1).contiguous()
    zeros = None if z is None else _zero_points(z, bits, s2.shape)
    if bits == 8:
        codes, format = codes ^ 0x80, Format("int8", S8, 0, 1, _group(K, s2.shape[1]), scale_dtype=s.dtype)
    else:
        format = Format("int4", U4, 0, 1, _group(K, s2.shape[1]), zero=0.0 if z is not None else 8.0, scale_dtype=s.dtype)
    how = Layout(f"packed{bits}", tuple(s.shape), s.dtype, None if z is None else z.dtype, 0, t)
    return QuantTensor(codes, s2, format, torch.Size((N, K)), dtype, None, zeros), how


def _zero_points(z: Tensor, bits: int, grid: Sequence[int]) -> Tensor:
    """Those of compressed-tensors beside codes as we hold them, 4 bits from 0 and 8 bits with a sign: packed along the rows, or, of a
    whole tensor, one number."""
    if z.dtype != torch.int32:
        one = (z.to(torch.int16) + 8).to(torch.uint8) if bits == 4 else z.float()
        return one.reshape(1, 1).expand(*grid).contiguous()
    words = z.t().contiguous()
    if bits == 4:
        return _nibbles(words).t()[: grid[0]].contiguous()
    return (_in_a_row(words).view(torch.uint8).view(len(words), -1).to(torch.int16) - 128).float().t()[: grid[0]].contiguous()


def _read_plain(t: dict[str, Tensor], dtype: torch.dtype, block: Sequence[int], scale_name: str) -> tuple[QuantTensor, Layout]:
    w, s, z = t.pop("weight"), t.pop(scale_name), t.pop("weight_zero_point", None)
    N, K = w.shape
    how = Layout(scale_name, tuple(s.shape), s.dtype, None if z is None else z.dtype, 0, t)
    scale2 = torch.tensor([1 / 127], device=w.device) if scale_name == "SCB" else None
    if scale_name == "SCB":
        s = s.reshape(N, 1)
    kind = 0 if s.dtype in _FLOATS else E8M0
    s2 = s.reshape(1, 1) if s.numel() == 1 else s.reshape(N, 1) if s.numel() == N else s
    if w.dtype == torch.int8 and kind:  # FP4 of DeepSeek-V4: two codes a byte
        format = Format("mxfp4", E2M1, 0, 1, _group(2 * K, s.shape[1]), E8M0, scale_dtype=torch.uint8)
        return QuantTensor(w, _bytes(s), format, torch.Size((N, 2 * K)), dtype), how
    if w.dtype not in (torch.int8, torch.float8_e4m3fn) or s2.dim() != 2:
        raise UnknownLayout(f"weight is {w.dtype}, {scale_name} {s.dtype} {list(s.shape)}")
    if s2.shape == (1, 1):
        rows = cols = 0
    elif s2.shape[0] == N:
        rows, cols = 1, _group(K, s2.shape[1])
    else:
        rows, cols = block
    code, name = (S8, "int8") if w.dtype == torch.int8 else (E4M3, "fp8")
    format = Format(name, code, 0, rows, cols, kind, scale_dtype=torch.uint8 if kind else s.dtype)
    if tuple(s2.shape) != format.grid(N, K):
        raise UnknownLayout(f"{scale_name} is {list(s.shape)}, expected {list(format.grid(N, K))} for blocks of {rows} x {cols}")
    zeros = None if z is None else z.reshape(s2.shape).float()
    return QuantTensor(w, _bytes(s2) if kind else s2, format, torch.Size((N, K)), dtype, scale2, zeros), how


def write(q: QuantTensor, how: Layout) -> dict[str, Tensor]:
    """The tensors that ``read`` was given: the same bytes, under the same names."""
    (N, K), out = q.shape, dict(how.rest)
    s = q.scale.view(how.scale_dtype) if q.scale.dtype == torch.uint8 and how.scale_dtype != torch.uint8 else q.scale
    if how.kind in ("gptq", "awq"):
        form, order = (GPTQ, range(8)) if how.kind == "gptq" else (AWQ, _AWQ_ORDER)
        words = torch.empty((K // 8, N) if how.kind == "gptq" else (K, N // 8), dtype=torch.int32)
        _core.repack(form, True, N, K, words, q.codes.cpu())
        assert q.zeros is not None
        z = _words((q.zeros - how.offset).t(), order).to(how.zeros_dtype)
        return {"qweight": words.to(q.codes.device), "qzeros": z, "scales": s.t().contiguous(), **out}
    if how.kind == "fp4":
        out = {"weight_packed": q.codes.contiguous(), "weight_scale": s.contiguous(), **out}
        return out if how.divisor is None else {**out, "weight_global_scale": how.divisor}
    if how.kind.startswith("packed"):
        bits = int(how.kind.removeprefix("packed"))
        held = torch.zeros((N, 4 * (-(-K * bits // 32))), dtype=torch.uint8, device=q.codes.device)
        held[:, : q.codes.shape[1]] = q.codes ^ 0x80 if bits == 8 else q.codes
        s = s.flatten()[: _count(how.scale_shape)].reshape(how.scale_shape)
        out = {"weight_packed": held.view(torch.int32), "weight_scale": s, **out}
        if q.zeros is not None:
            out["weight_zero_point"] = _packed_zero_points(q.zeros, bits, how.zeros_dtype)
        return out
    w = q.codes.view(torch.int8 if q.format.code != E4M3 else torch.float8_e4m3fn)
    out = {"weight": w.contiguous(), how.kind: s.reshape(how.scale_shape), **out}
    if q.zeros is not None:
        out["weight_zero_point"] = q.zeros.reshape(how.scale_shape).to(how.zeros_dtype)
    return out


def _packed_zero_points(zeros: Tensor, bits: int, dtype: torch.dtype | None) -> Tensor:
    """The inverse of ``_zero_points``."""
    if dtype != torch.int32:
        return (zeros[0].to(torch.int16) - (8 if bits == 4 else 0)).to(dtype)
    columns = zeros.t()
    if bits == 4:
        return _words(torch.nn.functional.pad(columns, (0, -zeros.shape[0] % 8)).contiguous()).t().contiguous()
    held = torch.nn.functional.pad((columns + 128).to(torch.uint8), (0, -zeros.shape[0] % 4)).contiguous()
    return _in_a_row(held).view(torch.int32).view(len(held), -1).t().contiguous()


def _count(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


# ---- stacks of them -----------------------------------------------------------------------------------------------------------
def stack(matrices: Sequence[Sequence[QuantTensor]]) -> QuantTensor:
    """[E, N, K] of the matrices of each expert (gate and up, or down), which come below one another."""
    first = matrices[0][0]
    for expert in matrices:
        for q in expert:
            if (q.format, q.shape, q.zeros is None) != (first.format, first.shape, first.zeros is None):
                raise UnknownLayout(f"experts are not held alike: {q!r} beside {first!r}")
    E, parts, (N, K), format = len(matrices), len(matrices[0]), first.shape, first.format
    if parts > 1 and (format.rows == 0 or N % format.rows):
        if parts != 2:
            raise UnknownLayout(f"{parts} grids of scales in a stack")
        format = format._replace(flags=format.flags | HALVES)
    scale2 = _second_scales(matrices)
    if first.scale2 is not None and scale2 is None:  # gate and up have one each: in the scales of their groups
        matrices, format = [[_folded(q) for q in expert] for expert in matrices], _without_second(format)
        first = matrices[0][0]
    made = {}
    for name in ("codes", "scale", "zeros"):
        if (like := getattr(first, name)) is not None:
            made[name] = torch.empty((E, parts * like.shape[0], like.shape[1]), dtype=like.dtype, device=like.device)
            for e, expert in enumerate(matrices):
                for i, q in enumerate(expert):
                    made[name][e, i * like.shape[0] : (i + 1) * like.shape[0]] = getattr(q, name)
    shape = torch.Size((E, parts * N, K))
    return QuantTensor(made["codes"], made["scale"], format, shape, first.dtype, scale2, made.get("zeros"))


def _second_scales(matrices: Sequence[Sequence[QuantTensor]]) -> Tensor | None:
    given = [[q.scale2 for q in expert] for expert in matrices]
    if given[0][0] is None or any(not torch.equal(expert[0], s) for expert in given for s in expert):
        return None
    joined = torch.cat([expert[0] for expert in given])
    return joined[:1].clone() if bool((joined == joined[0]).all()) else joined


def _without_second(format: Format) -> Format:
    return format._replace(scale_type=0, scale_dtype=torch.float32)


def _folded(q: QuantTensor) -> QuantTensor:
    assert q.scale2 is not None
    scale = q.scale.view(torch.float8_e4m3fn).float() if q.format.scale_type == E4M3_SCALE else q.scale.float()
    return QuantTensor(q.codes, scale * q.scale2, _without_second(q.format), q.shape, q.dtype, None, q.zeros)


def cut(q: QuantTensor, hows: Sequence[Sequence[Layout]]) -> list[list[dict[str, Tensor]]]:
    """The tensors of every matrix of a stack that ``stack`` made, of each expert and part."""
    E, N, K = q.shape
    parts = len(hows[0])
    rows, out = N // parts, []
    for e in range(E):
        expert = []
        for i, how in enumerate(hows[e]):
            piece = {n: t[e, i * (t.shape[1] // parts) : (i + 1) * (t.shape[1] // parts)] for n, t in q.parts().items() if n != "scale2"}
            format = q.format._replace(flags=q.format.flags & ~HALVES)
            if how.divisor is not None and q.scale2 is None:
                piece["scale"] = (piece["scale"] * how.divisor.float()).to(torch.float8_e4m3fn).view(torch.uint8)
            one = QuantTensor(piece["codes"], piece["scale"], format, torch.Size((rows, K)), q.dtype, None, piece.get("zeros"))
            expert.append(write(one, how))
        out.append(expert)
    return out

