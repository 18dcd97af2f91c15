# SPDX-License-Identifier: Apache-2.0
"""Every operation of the C library as a torch operator: ``torch.ops.fusedmoe.*``.

Each is functional (it allocates its results), has a fake kernel, and takes the description of the layer (activation,
flags) instead of a plan handle, so that a compiled graph can be cached on disk. Plans are made once per description.
Gradients are in ``fusedmoe.autograd``; the operators here are not differentiable by themselves.

Conventions: ``w`` is ``[w1, w2]`` or, with BIAS, ``[w1, w2, b1, b2]`` (stacked), or with LIST the gates, ups and downs of all
experts one after the other; then, with LORA1, the factors a1, b1 of W1's adapter, and with LORA2 those of W2's. ``scales`` are
those of both adapters, or none: 1. Optional tensors are lists of none or one; ``needs`` is a mask of the gradients to compute.

An operator is written as a generator. It yields its results, still empty: that is all its fake kernel is. Then it yields
its plan, the flags of the run, its rows and the slots of the C call.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import _core, checks
from .checks import DTYPES
from .enums import Activation, Flag, Score

# fmoe_op, fmoe_act, fmoe_score and the flags of fmoe_desc, as plain numbers
ROUTE, PERMUTE, GMM, ACTIVATION, EXPERTS, BLOCK = range(1, 7)
SWIGLU, GEGLU, GEGLU_TANH, REGLU, SWIGLU_CLAMP, SWIGLU_OAI, SWIGLU_CLAMP_OUT, SILU, GELU, GELU_TANH, RELU, RELU2 = map(int, Activation)
SOFTMAX, TOPK_SOFTMAX, SIGMOID, SQRT_SOFTPLUS = map(int, Score)
INTERLEAVED, BIAS, RECOMPUTE, SKIP_NEG1, SKIP_E, SHARED_GATE, ROUND_STEPS, REUSE_SAVED = map(int, list(Flag)[:8])
BORROW_DW1, KEEP_ALL, KEEP_LEAN, SAME_BITS, LIST, TRANSPOSED = map(int, list(Flag)[8:])
_REPLAY = 8  # of fmoe_run
LORA1, LORA2, _UNGATED, WIDE_FACTORS = (1 << bit for bit in range(18, 22))  # of _core. WIDE_FACTORS: their gradients are float32
_OWN = LIST | TRANSPOSED | LORA1 | LORA2 | WIDE_FACTORS  # flags that a plan does not see

_DEVICES = {"cpu": 1, "meta": 1, "cuda": 2}  # anything else is an Ascend NPU, torch's PrivateUse1

_lib = torch.library.Library("fusedmoe", "DEF")
_TAGS = torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order)  # torch 2.6
_impl: dict[Callable[..., Any], Callable[..., Any]] = {}
_Many = Sequence[Tensor]
_Steps = Iterator[Any]  # what an operator is written as


_made: list[int] = []  # the plans of _plan


@cache
def _say_rounding() -> None:
    """Once: gradients that an older CANN cannot give in float32."""
    if "rounded to 16 bits" in _core.info():
        logging.getLogger("fusedmoe").warning(
            "this CANN is not known to take float32 routing weights beside 16-bit tokens: their gradients are rounded to 16 bits; "
            "FMOE_ASCEND_MIXED=1 where it does (8.5 and later)")  # fmt: skip


@cache
def _plan(op: int, dtype: torch.dtype, device: torch.device, threads: int, H: int = 0, I: int = 0, E: int = 0, rank1: int = 0,
          rank2: int = 0, k: int = 0, K: int = 0, N: int = 0, shared_I: int = 0, act: int = 0, flags: int = 0, alpha: float = 0.0,
          limit: float = 0.0, rule: tuple[Any, ...] | None = None) -> int:  # fmt: skip
    if dtype not in DTYPES:
        raise TypeError(f"fusedmoe: dtype {dtype} is not supported")
    if device.type not in _DEVICES and dtype.itemsize == 2:
        _say_rounding()
    handle = _core.plan(op, DTYPES[dtype], _DEVICES.get(device.type, 12), device.index or 0, H, I, E, k, K, N, shared_I, rank1, rank2,
                      act, flags & ~_OWN if op in (EXPERTS, BLOCK) else flags, alpha, limit, rule, threads)  # fmt: skip
    _made.append(handle)
    return handle


def _plan_for(op: int, t: Tensor, *sizes: int, **more: Any) -> int:
    return _plan(op, t.dtype, t.device, torch.get_num_threads(), *sizes, **more)


@cache
def _saved_line(plan: int) -> tuple[int, int]:
    """c0, c1 with saved_bytes(T) <= c0 + c1 * T: a size that is right for symbolic T too."""
    big, slack = 1 << 20, 1 << 12  # the CUDA backend rounds each of its eight buffers up to 256 bytes, wherever T puts their ends
    rise = _core.saved_bytes(plan, 2 * big) - _core.saved_bytes(plan, big)
    c0 = max(_core.saved_bytes(plan, t) - rise * t // big for t in (*range(257), *range(big, big + 257)))
    return c0 and c0 + slack, -(-rise // big)


def set_max_isa(name: str | None) -> None:
    """Cap the CPU kernels of calls from now on ("c", "avx2", ...); None: no cap. Not while another thread computes."""
    _core.set_max_isa(name)
    _plan.cache_clear()
    _saved_line.cache_clear()
    while _made:
        _core.plan_destroy(_made.pop())


def describe(x: Tensor, E: int, k: int, I: int, act: int | str = SWIGLU, flags: int = 0) -> str:
    """Which kernels an experts layer of inputs like x [T,H], with E experts of size I and k a token, will run, and why."""
    act, flags = checks.code("describe", "act", Activation, act), checks.known_flags("describe", flags)
    return _core.describe(_plan_for(EXPERTS, x, x.shape[-1], I, E, k=k, act=act, flags=flags))


def _stream(device: torch.device) -> int | None:
    if device.type != "cuda" or hasattr(Tensor, "__dlpack_c_exchange_api__"):
        return None  # _core asks torch's exchange table, or torch_npu
    return torch.cuda.current_stream(device).cuda_stream


def _new(like: Tensor, *size: int) -> Tensor:
    """Memory for a tensor like this one, or for so many bytes: what is large and on the CPU has that of the step before (core/pool.c)."""
    again = _core.empty_like(like, *size) if type(like) in (Tensor, torch.nn.Parameter) and like.is_cpu else None
    return again if again is not None else like.new_empty(size, dtype=torch.uint8) if size else torch.empty_like(like)


def _like(t: Tensor) -> Tensor:
    return _new(t) if t.is_contiguous() else torch.empty_like(t, memory_format=torch.contiguous_format)


def _grad(w: Tensor, matrices: bool = True, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for the gradient of a weight (matrices) or a bias: with its strides, where the library can write those."""
    grad = torch.empty_like(w, dtype=dtype) if dtype else _new(w) if matrices else _like(w)
    fits = not matrices or any(n == 1 or stride == 1 for n, stride in zip(grad.shape[-2:], grad.stride()[-2:]))
    if fits and matrices and w.dim() > 1 and w.device.type not in _DEVICES:  # CANN's products write without holes
        fits = grad.is_contiguous() or grad.mT.is_contiguous()
    return grad if fits else torch.empty_like(w, dtype=dtype, memory_format=torch.contiguous_format)


def spread(grads: Sequence[Tensor], wanted: Sequence[Any]) -> list[Tensor | None]:
    """grads, with None in the place of those that nobody wants."""
    rest = iter(grads)
    return [next(rest) if yes else None for yes in wanted]


def _define(code: int, schema: str) -> Callable[[Callable[..., _Steps]], Callable[..., Any]]:
    """Make an operator of a generator (see above) that runs the C function of this code."""
    name, pass_ = schema.split("(", 1)[0], _core.passes[code]
    _lib.define(schema, tags=_TAGS)
    op: Callable[..., Any] = getattr(torch.ops.fusedmoe, name).default

    def register(steps: Callable[..., _Steps]) -> Callable[..., Any]:
        def impl(*args: Any) -> Any:
            results, (plan, flags, rows, *slots) = steps(*args)
            first = args[0] if isinstance(args[0], Tensor) else args[0][0]
            if first.is_cpu:
                _core.run(code, plan, flags, None, rows, *slots)
            else:
                workspace = first.new_empty(_core.workspace_bytes(plan, pass_, rows), dtype=torch.uint8)
                _core.run(code, plan, flags, _stream(first.device), workspace, *slots)
            return results

        _lib.impl(name, impl, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fusedmoe::{name}", lambda *args: next(steps(*args)), lib=_lib)
        _impl[op] = impl
        return op

    return register


def call(op: Callable[..., Any], *args: Any) -> Any:
    """op(*args) without the dispatcher (6 us), where no tracing, transform, tensor subclass or dispatch mode wants to see the operator."""
    c, x = torch._C, args[0]
    seen: int = torch.compiler.is_compiling() or c._are_functorch_transforms_active() or c._is_tracing()
    seen = seen or type(x) is not Tensor or x.is_meta or x.is_neg() or c._len_torch_dispatch_stack()
    return op(*args) if seen else _impl.get(op, op)(*args)


# ---- route ----------------------------------------------------------------------------------------------------------
def _weight_dtype(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


@_define(_core.ROUTE_FORWARD, "route(Tensor logits, Tensor[] select_bias, int k, int[] rule, float eps, float scale) -> (Tensor, Tensor)")
def route(logits: Tensor, select_bias: _Many, k: int, rule: Sequence[int], eps: float, scale: float) -> _Steps:
    T = logits.shape[0]
    ids, weights = logits.new_empty((T, k), dtype=torch.int64), logits.new_empty((T, k), dtype=_weight_dtype(logits))
    yield ids, weights
    yield _plan_for(ROUTE, logits, E=int(logits.shape[1]), k=k, rule=(*rule, eps, scale)), 0, T, logits, select_bias, ids, weights, None


@_define(_core.ROUTE_FORWARD, "route_replay(Tensor logits, Tensor ids, int[] rule, float eps, float scale) -> Tensor")
def route_replay(logits: Tensor, ids: Tensor, rule: Sequence[int], eps: float, scale: float) -> _Steps:
    weights = logits.new_empty(ids.shape, dtype=_weight_dtype(logits))
    yield weights
    plan = _plan_for(ROUTE, logits, E=int(logits.shape[1]), k=int(ids.shape[1]), rule=(*rule, eps, scale))
    yield plan, _REPLAY, logits.shape[0], logits, None, ids, weights, None


@_define(_core.ROUTE_BACKWARD, "route_backward(Tensor logits, Tensor ids, Tensor dweights, int[] rule, float eps, float scale) -> Tensor")
def route_backward(logits: Tensor, ids: Tensor, dweights: Tensor, rule: Sequence[int], eps: float, scale: float) -> _Steps:
    dlogits = _like(logits)
    yield dlogits
    plan = _plan_for(ROUTE, logits, E=int(logits.shape[1]), k=int(ids.shape[1]), rule=(*rule, eps, scale))
    yield plan, 0, logits.shape[0], logits, None, ids, dweights, dlogits


# ---- permute, unpermute ---------------------------------------------------------------------------------------------
@_define(_core.PERMUTE_FORWARD, "permute(Tensor x, Tensor ids, int E, int flags) -> (Tensor, Tensor, Tensor)")
def permute(x: Tensor, ids: Tensor, E: int, flags: int) -> _Steps:
    T, k = ids.shape
    xp, row_map = x.new_empty((T * k, x.shape[1])), x.new_empty((T * k,), dtype=torch.int32)
    counts = x.new_empty((E,), dtype=torch.int64)
    yield xp, row_map, counts
    yield _plan_for(PERMUTE, x, H=int(x.shape[1]), E=E, k=int(k), flags=flags), 0, T, x, ids, xp, row_map, counts


@_define(_core.UNPERMUTE_FORWARD, "unpermute(Tensor y, Tensor map, Tensor[] weights, int k) -> Tensor")
def unpermute(y: Tensor, row_map: Tensor, weights: _Many, k: int) -> _Steps:
    """Without weights it is also the backward of permute."""
    out = y.new_empty((row_map.shape[0] // k, y.shape[1]))
    yield out
    yield _plan_for(PERMUTE, y, H=int(y.shape[1]), E=1, k=k), 0, out.shape[0], y, row_map, weights, out


@_define(_core.UNPERMUTE_BACKWARD, "unpermute_backward(Tensor y, Tensor map, Tensor[] weights, Tensor dout, int needs) -> Tensor[]")
def unpermute_backward(y: Tensor, row_map: Tensor, weights: _Many, dout: Tensor, needs: int) -> _Steps:
    T, wanted = dout.shape[0], (needs & 1, needs & 2)
    grads = [_like(t) for t, yes in zip((y, *weights), wanted, strict=False) if yes]
    yield grads
    k = weights[0].shape[1] if weights else row_map.shape[0] // T if T else 1
    plan = _plan_for(PERMUTE, y, H=int(y.shape[1]), E=1, k=int(k))
    yield plan, 0, T, y, row_map, weights, dout, *spread(grads, wanted)


# ---- grouped matmul: one stack of weights, or one weight a group ------------------------------------------------------
@_define(_core.GROUPED_MATMUL_FORWARD, "grouped_matmul(Tensor x, Tensor w, Tensor[] bias, Tensor sizes, int cumulative) -> Tensor")
def grouped_matmul(x: Tensor, w: Tensor, bias: _Many, sizes: Tensor, cumulative: int) -> _Steps:
    y = x.new_zeros((x.shape[0], w.shape[2]))  # rows past the last group stay zero
    yield y
    yield _plan_for(GMM, x, **dict(zip("EKN", map(int, w.shape)))), 0, x.shape[0], x, w, bias, sizes, y, cumulative, 0


@_define(_core.GROUPED_MATMUL_BACKWARD, "grouped_matmul_backward(Tensor x, Tensor w, Tensor sizes, Tensor dy, int needs, "
         "int cumulative) -> Tensor[]")  # fmt: skip
def grouped_matmul_backward(x: Tensor, w: Tensor, sizes: Tensor, dy: Tensor, needs: int, cumulative: int) -> _Steps:
    wanted = needs & 1, needs & 2, needs & 4
    grads = ([_like(x)] if wanted[0] else []) + ([_grad(w)] if wanted[1] else [])
    grads += [w.new_empty((w.shape[0], w.shape[2]))] if wanted[2] else []
    yield grads
    yield _plan_for(GMM, x, **dict(zip("EKN", map(int, w.shape)))), 0, x.shape[0], x, w, sizes, dy, *spread(grads, wanted), cumulative, 0


def _rows(x: Sequence[Tensor], widths: Sequence[int]) -> list[Tensor]:
    """Rows of these widths for those of x: one tensor for all groups, which CUDA computes in one launch, where the widths are equal."""
    if any(n != widths[0] for n in widths):
        return [t.new_empty((t.shape[0], n)) for t, n in zip(x, widths, strict=True)]
    R, n = sum(t.shape[0] for t in x), widths[0]
    return [_new(x[0], R * n * x[0].element_size()).view(x[0].dtype).view(R, n)]


def cut(rows: Sequence[Tensor], x: Sequence[Tensor]) -> Sequence[Tensor]:
    """The rows of each group, from what an operator of lists gives for those of x."""
    return rows[0].unsafe_split_with_sizes([t.shape[0] for t in x]) if len(rows) == 1 else rows


def _in_a_row(x: Sequence[Tensor]) -> Sequence[Tensor]:
    """x, its groups one after the other: copied where CUDA would compute group by group without it."""
    ends = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in x if t.shape[0]] if x[0].is_cuda else []
    apart = any(a[1] != b[0] for a, b in zip(ends, ends[1:]))
    return cut([torch.cat([*x])], x) if apart and len({t.shape[1] for t in x}) == 1 else x


@_define(_core.GROUPED_MATMUL_FORWARD, "grouped_matmul_list(Tensor[] x, Tensor[] w, Tensor[] bias) -> Tensor[]")
def grouped_matmul_list(x: _Many, w: _Many, bias: _Many) -> _Steps:
    y = _rows(x, [u.shape[1] for u in w])
    yield y
    yield _plan_for(GMM, x[0], E=len(x)), 0, sum(t.shape[0] for t in x), _in_a_row(x), w, bias, None, cut(y, x), 0, 1


@_define(_core.GROUPED_MATMUL_BACKWARD, "grouped_matmul_list_backward(Tensor[] x, Tensor[] w, Tensor[] dy, int needs) -> Tensor[]")
def grouped_matmul_list_backward(x: _Many, w: _Many, dy: _Many, needs: int) -> _Steps:
    dx, dw = _rows(x, [t.shape[1] for t in x]) if needs & 1 else [], [_grad(t) for t in w if needs & 2]
    yield dw + dx
    slots = _in_a_row(x), w, None, _in_a_row(dy), cut(dx, x), dw, None, 0, 1
    yield _plan_for(GMM, x[0], E=len(x)), 0, sum(t.shape[0] for t in x), *slots


# ---- activation -----------------------------------------------------------------------------------------------------
@_define(_core.ACTIVATION_FORWARD, "activation(Tensor h, int act, int flags, float alpha, float limit) -> Tensor")
def activation(h: Tensor, act: int, flags: int, alpha: float, limit: float) -> _Steps:
    a = h.new_empty((h.shape[0], h.shape[1] // (2 if act < SILU else 1)))
    yield a
    yield _plan_for(ACTIVATION, h, I=int(a.shape[1]), act=act, flags=flags, alpha=alpha, limit=limit), 0, h.shape[0], h, a


@_define(_core.ACTIVATION_BACKWARD, "activation_backward(Tensor h, Tensor da, int act, int flags, float alpha, float limit) -> Tensor")
def activation_backward(h: Tensor, da: Tensor, act: int, flags: int, alpha: float, limit: float) -> _Steps:
    dh = _like(h)
    yield dh
    yield _plan_for(ACTIVATION, h, I=int(da.shape[1]), act=act, flags=flags, alpha=alpha, limit=limit), 0, h.shape[0], h, da, dh


# ---- experts --------------------------------------------------------------------------------------------------------
def _form(act: int, flags: int, *_: float) -> int:
    """What _core has to know of w."""
    return flags & -LIST | (0 if act < SILU else _UNGATED)


def layer_sizes(w: Sequence[Tensor], act: int, flags: int, H: int | None = None) -> tuple[int, int, int, int, int]:
    """H, I, E, rank1, rank2 of a layer, from its weights; H, where it is given, is that of x. ValueError where they do not fit."""
    n = len(w) - (2 if flags & LORA1 else 0) - (2 if flags & LORA2 else 0)
    rank1, rank2 = int(w[n].shape[1]) if flags & LORA1 else 0, int(w[-2].shape[1]) if flags & LORA2 else 0
    columns = 2 if act < SILU else 1
    if flags & LIST:
        E, first, last = n // (columns + 1), w[0].shape, w[n - 1].shape
        if len(first) == 2 and E * (columns + 1) == n and last == (first[1], first[0]) and (H is None or first[1] == H):
            return int(first[1]), int(first[0]), E, rank1, rank2
    elif n >= 2 and len(w[1].shape) == 3:
        E, a, b = w[1].shape
        a, b, up = (b, a, (E, b, columns * a)) if flags & TRANSPOSED else (a, b, (E, columns * b, a))
        if w[0].shape == up and (H is None or a == H):
            return int(a), int(b), int(E), rank1, rank2
    raise ValueError(checks.sizes_differ(w[:n], act, flags, H))


def needs_bits(w: Sequence[Any], act: int, flags: int) -> list[int]:
    """The bit of `needs` that asks for the gradient of each tensor in w; one bit for all gates and ups, one for all downs."""
    lora = ([64, 128] if flags & LORA1 else []) + ([256, 512] if flags & LORA2 else [])
    n = len(w) - len(lora)
    down = n // (3 if act < SILU else 2)
    return ([4] * (n - down) + [8] * down if flags & LIST else [4, 8, 16, 32][:n]) + lora


def _experts_plan(x: Tensor, ids: Tensor, w: _Many, *layer: Any) -> int:
    if ids.dim() != 2:
        raise ValueError(f"experts: ids is {list(ids.shape)}, expected [T, k], the experts of each token")
    sizes = layer_sizes(w, layer[0], layer[1], x.shape[-1])
    return _plan(EXPERTS, x.dtype, x.device, torch.get_num_threads(), *sizes, int(ids.shape[1]), 0, 0, 0, *layer)


_NO_SCALES = None, None
_LAYER = "Tensor x, Tensor ids, Tensor p, Tensor[] w, int act, int flags, float alpha, float limit"


@_define(_core.EXPERTS_FORWARD, f"experts({_LAYER}, float[] scales=[]) -> Tensor")
def experts(x: Tensor, ids: Tensor, p: Tensor, w: _Many, act: int, flags: int, alpha: float, limit: float,
            scales: Sequence[float] = ()) -> _Steps:  # fmt: skip
    """The layer without a gradient: nothing is saved."""
    out = _like(x)
    yield out
    plan = _experts_plan(x, ids, w, act, flags, alpha, limit)
    yield plan, _form(act, flags), x.shape[0], x, ids, p, w, out, None, *(scales or _NO_SCALES)


_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)  # retain_graph=True


def saved_is_ours(x: Tensor) -> bool:
    """In a backward: no second one will ask for what was saved, so it may be written over. A CUDA graph's backward is replayed."""
    return not (torch.compiler.is_compiling() or _keeps_graph() or (x.is_cuda and torch.cuda.is_current_stream_capturing()))


def experts_saved(dtype: torch.dtype, device: torch.device, sizes: tuple[int, ...], k: int, *layer: Any) -> tuple[int, int]:
    """c0, c1: experts_forward saves c0 + c1 * T bytes. An argument of it, so that a graph which torch.compile keeps on disk
    is not used with a library that saves something else. sizes: layer_sizes(...); layer: act, flags, alpha, limit."""
    return _saved_line(_plan(EXPERTS, dtype, device, torch.get_num_threads(), *sizes, k, 0, 0, 0, *layer))


experts_saved._dynamo_marked_constant = True  # type: ignore[attr-defined]  # assume_constant_result without the compiler


@_define(_core.EXPERTS_FORWARD, f"experts_forward({_LAYER}, int[] saved, float[] scales=[]) -> (Tensor, Tensor)")
def experts_forward(x: Tensor, ids: Tensor, p: Tensor, w: _Many, act: int, flags: int, alpha: float, limit: float, saved: Sequence[int],
                    scales: Sequence[float] = ()) -> _Steps:  # fmt: skip
    """The layer, and the state its backward needs. saved: experts_saved(...), or nothing outside a compiled graph."""
    T, layer = x.shape[0], (act, flags, alpha, limit)
    plan = 0 if saved else _experts_plan(x, ids, w, *layer)
    out, state = _like(x), _new(x, saved[0] + saved[1] * T if saved else _core.saved_bytes(plan, T))
    yield out, state
    if saved:
        plan = _experts_plan(x, ids, w, *layer)
        _core.saved_bytes(plan, T, state)
    yield plan, _form(*layer), T, x, ids, p, w, out, state, *(scales or _NO_SCALES)


@_define(_core.EXPERTS_BACKWARD, "experts_backward(Tensor x, Tensor ids, Tensor p, Tensor[] w, Tensor saved, Tensor dout, int act, "
         "int flags, float alpha, float limit, int needs, float[] scales=[]) -> Tensor[]")  # fmt: skip
def experts_backward(x: Tensor, ids: Tensor, p: Tensor, w: _Many, saved: Tensor, dout: Tensor, act: int, flags: int, alpha: float,
                     limit: float, needs: int, scales: Sequence[float] = ()) -> _Steps:  # fmt: skip
    """The gradients that `needs` asks for, in order: 1 x, 2 p, then those of w, by needs_bits."""
    wanted = [needs & bit for bit in (1, 2, *needs_bits(w, act, flags))]
    grads = [_like(t) for t, yes in zip((x, p), wanted, strict=False) if yes]
    own = [t for t, yes in zip(w, wanted[2:], strict=True) if yes]
    if flags & LIST and x.device.type not in _DEVICES:  # an NPU writes the gradients of a list at once where they are one stack
        E, lists = layer_sizes(w, act, flags)[2], [t for t in own if t.dim() == 2]
        grads += [g for t in lists[::E] for g in t.new_empty((E, *t.shape)).unbind()]
        own = own[len(lists) :]
    factors = sum(bit >= 64 for bit in wanted) if flags & WIDE_FACTORS else 0
    for i, t in enumerate(own):
        wide = i >= len(own) - factors
        grads.append(_grad(t, t.dim() == 3 or bool(flags & LIST), torch.float32 if wide else None))
    yield grads
    borrow = BORROW_DW1 if x.is_cuda and needs & 4 and not flags & LIST else 0  # new memory, of no use to anyone else before
    plan, (dx, dp, *dw) = _experts_plan(x, ids, w, act, flags | borrow, alpha, limit), spread(grads, wanted)
    yield plan, _form(act, flags), x.shape[0], x, ids, p, w, saved, dout, dx, dp, dw, *(scales or _NO_SCALES)


# ---- block: router matmul, route, experts, shared expert --------------------------------------------------------------
def _block_plan(x: Tensor, w: _Many, shared: _Many, k: int, act: int, flags: int, alpha: float, limit: float, rule: Sequence[int],
                eps: float, scale: float) -> int:  # fmt: skip
    shared_I = int(shared[1].shape[2]) if shared else 0
    return _plan_for(BLOCK, x, *layer_sizes(w, act, flags, x.shape[-1]), k=k, shared_I=shared_I, act=act, flags=flags, alpha=alpha,
                     limit=limit, rule=(*rule, eps, scale))  # fmt: skip


_RULE = "int k, int act, int flags, float alpha, float limit, int[] rule, float eps, float scale"


@_define(_core.BLOCK_FORWARD, "block_forward(Tensor x, Tensor w_router, Tensor[] b_router, Tensor[] select_bias, Tensor[] w, "
         f"Tensor[] shared, Tensor[] shared_gate, {_RULE}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")  # fmt: skip
def block_forward(x: Tensor, w_router: Tensor, b_router: _Many, select_bias: _Many, w: _Many, shared: _Many, shared_gate: _Many, k: int,
                  *layer: Any) -> _Steps:  # fmt: skip
    """out, logits, ids, weights, saved."""
    plan = _block_plan(x, w, shared, k, *layer)
    T, dtype, (c0, c1) = x.shape[0], _weight_dtype(x), _saved_line(plan)
    out, logits, saved = _like(x), x.new_empty((T, w_router.shape[0]), dtype=dtype), _new(x, c0 + c1 * T)
    ids, weights = x.new_empty((T, k), dtype=torch.int64), x.new_empty((T, k), dtype=dtype)
    yield out, logits, ids, weights, saved
    saved.zero_()
    yield plan, _form(*layer), T, x, w_router, b_router, select_bias, w, shared, shared_gate, logits, ids, weights, out, saved


@_define(_core.BLOCK_BACKWARD, "block_backward(Tensor x, Tensor w_router, Tensor[] select_bias, Tensor[] w, Tensor[] shared, "
         "Tensor[] shared_gate, Tensor logits, Tensor ids, Tensor weights, Tensor saved, Tensor dout, Tensor[] dlogits, "
         f"{_RULE}, Tensor[] b_router) -> Tensor[]")  # fmt: skip
def block_backward(x: Tensor, w_router: Tensor, select_bias: _Many, w: _Many, shared: _Many, shared_gate: _Many, logits: Tensor,
                   ids: Tensor, weights: Tensor, saved: Tensor, dout: Tensor, dlogits: _Many, k: int, act: int, flags: int, alpha: float,
                   limit: float, rule: Sequence[int], eps: float, scale: float, b_router: _Many) -> _Steps:  # fmt: skip
    """Gradients of x, w_router, b_router, w, shared and shared_gate, those that are given, in this order."""
    grads = [_like(x), _grad(w_router), *map(_like, b_router), *(_grad(t, t.dim() == 3) for t in (*w, *shared)), *map(_grad, shared_gate)]
    yield grads
    dx, dw_router, *rest = grads
    db_router, dw, dshared, dgate = ([rest.pop(0) for _ in given] for given in (b_router, w, shared, shared_gate))
    plan = _block_plan(x, w, shared, k, act, flags, alpha, limit, rule, eps, scale)
    yield (plan, _form(act, flags), x.shape[0], x, w_router, select_bias, w, shared, shared_gate, logits, ids, weights, saved, dout,
           dlogits, dx, dw_router, db_router, dw, dshared, dgate)  # fmt: skip
