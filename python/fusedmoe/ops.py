# SPDX-License-Identifier: Apache-2.0
"""Every operation of the C library as a torch operator: ``torch.ops.fusedmoe.*``.

Each is functional (it allocates its results), has a fake kernel, and takes the description of the layer (activation,
flags) instead of a plan handle, so that a compiled graph can be cached on disk. Plans are made once per description.
Gradients are in ``fusedmoe.autograd``; the operators here are not differentiable by themselves.

Conventions: ``w`` is ``[w1, w2]`` or ``[w1, w2, b1, b2]`` (stacked), or with LIST the gates, ups and downs of all experts
one after the other; optional tensors are lists of none or one; ``needs`` is a mask of the gradients to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import _core

# fmoe_op, fmoe_act, fmoe_score and the flags of fmoe_desc, as in fusedmoe.h
ROUTE, PERMUTE, GMM, ACTIVATION, EXPERTS, BLOCK = range(1, 7)
SWIGLU, GEGLU, GEGLU_TANH, REGLU, SWIGLU_CLAMP, SWIGLU_OAI, SWIGLU_CLAMP_OUT = range(7)
SILU, GELU, GELU_TANH, RELU, RELU2 = range(16, 21)
SOFTMAX, TOPK_SOFTMAX, SIGMOID, SQRT_SOFTPLUS = range(4)
INTERLEAVED, BIAS, RECOMPUTE, SKIP_NEG1, SKIP_E, SHARED_GATE = 1, 2, 4, 8, 16, 32
# flags of this module: how `w` is given
LIST, TRANSPOSED = 1 << 16, 1 << 17
_C_FLAGS = (1 << 16) - 1
_REPLAY = 8

DTYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}
_DEVICES = {"cpu": 1, "cuda": 2}  # anything else is an Ascend NPU, torch's PrivateUse1

_run = _core.run
_lib = torch.library.Library("fusedmoe", "DEF")
_names: list[str] = []  # in the order of definition, which is the order at the end of this file


@cache
def _plan(
    op: int, dtype: torch.dtype, device: torch.device, threads: int, H: int = 0, I: int = 0, E: int = 0, k: int = 0,
    K: int = 0, N: int = 0, shared_I: int = 0, act: int = 0, flags: int = 0, alpha: float = 0.0, limit: float = 0.0,
    rule: tuple | None = None,
) -> int:  # fmt: skip
    if dtype not in DTYPES:
        raise TypeError(f"fusedmoe: dtype {dtype} is not supported")
    kind = _DEVICES.get(device.type, 12)
    return _core.plan(op, DTYPES[dtype], kind, device.index or 0, H, I, E, k, K, N, shared_I, act, flags & _C_FLAGS,
                      alpha, limit, rule, threads)  # fmt: skip


@cache
def _saved_line(plan: int) -> tuple[int, int]:
    """c0, c1 with saved_bytes(T) <= c0 + c1 * T: a size that is right for symbolic T too."""
    big, slack = 1 << 20, 1 << 12  # the CUDA backend rounds each of its eight buffers up to 256 bytes, wherever T puts their ends
    rise = _core.saved_bytes(plan, 2 * big) - _core.saved_bytes(plan, big)
    c0 = max(_core.saved_bytes(plan, t) - rise * t // big for t in (*range(257), *range(big, big + 257)))
    return c0 and c0 + slack, -(-rise // big)


def set_max_isa(name: str | None) -> None:
    """Cap the CPU kernels of calls from now on ("c", "avx2", ...); None: no cap."""
    _core.set_max_isa(name)
    _plan.cache_clear()
    _saved_line.cache_clear()


def describe(x: Tensor, E: int, k: int, I: int, act: int = SWIGLU, flags: int = 0) -> str:
    """Which kernels an experts layer with inputs like x will run, and why."""
    plan = _plan(EXPERTS, x.dtype, x.device, torch.get_num_threads(), H=x.shape[-1], I=I, E=E, k=k, act=act, flags=flags)
    return _core.describe(plan)


def _stream(device: torch.device) -> int | None:
    if device.type == "cpu" or (device.type == "cuda" and hasattr(Tensor, "__dlpack_c_exchange_api__")):
        return None  # _core asks torch's exchange table
    stream = getattr(torch, device.type).current_stream(device)
    return stream.cuda_stream if device.type == "cuda" else stream.npu_stream


def _call(op: int, plan: int, pass_: int, T: int, device: torch.device, *slots: Any, flags: int = 0) -> None:
    n = _core.workspace_bytes(plan, pass_, T)
    workspace = torch.empty(n, dtype=torch.uint8, device=device) if n else None
    _run(op, plan, flags, _stream(device), workspace, *slots)


def _unit(t: Tensor) -> Tensor:
    """The C library reads activations with unit stride in the last dimension."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def _ids(t: Tensor) -> Tensor:
    if t.dtype not in (torch.int64, torch.int32):
        t = t.long()
    return t.contiguous()


def _like(t: Tensor) -> Tensor:
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _new(grads: list[Tensor]) -> list[Tensor]:
    for t in grads:
        if t.nbytes >= 1 << 22 and t.is_cpu:
            _core.advise(t)
    return grads


def _opt(ts: Sequence[Tensor]) -> Tensor | None:
    return ts[0] if ts else None


def _define(schema: str, fake: Callable) -> Callable[[Callable], Callable]:
    name = schema.split("(", 1)[0]
    _names.append(name)
    _lib.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))

    def register(fn: Callable) -> Callable:
        _lib.impl(name, fn, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fusedmoe::{name}", fake, lib=_lib)
        return fn

    return register


# ---- route ----------------------------------------------------------------------------------------------------------


def _weight_dtype(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _route_plan(logits: Tensor, k: int, rule: Sequence[int], eps: float, scale: float) -> int:
    return _plan(ROUTE, logits.dtype, logits.device, torch.get_num_threads(), E=int(logits.shape[1]), k=k,
                 rule=(*rule, eps, scale))  # fmt: skip


def _route_fake(logits, select_bias, k, rule, eps, scale):
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=_weight_dtype(logits))


@_define("route(Tensor logits, Tensor[] select_bias, int k, int[] rule, float eps, float scale) -> (Tensor, Tensor)",
         _route_fake)  # fmt: skip
def _route(logits, select_bias, k, rule, eps, scale):
    plan = _route_plan(logits, k, rule, eps, scale)
    ids, weights = _route_fake(logits, select_bias, k, rule, eps, scale)
    _call(_core.ROUTE_FORWARD, plan, 0, logits.shape[0], logits.device, _unit(logits), _opt(select_bias), ids, weights, None)
    return ids, weights


@_define("route_replay(Tensor logits, Tensor ids, int[] rule, float eps, float scale) -> Tensor",
         lambda logits, ids, rule, eps, scale: logits.new_empty(ids.shape, dtype=_weight_dtype(logits)))  # fmt: skip
def _route_replay(logits, ids, rule, eps, scale):
    plan = _route_plan(logits, int(ids.shape[1]), rule, eps, scale)
    weights = logits.new_empty(ids.shape, dtype=_weight_dtype(logits))
    _call(_core.ROUTE_FORWARD, plan, 0, logits.shape[0], logits.device, _unit(logits), None, _ids(ids), weights, None,
          flags=_REPLAY)  # fmt: skip
    return weights


@_define("route_backward(Tensor logits, Tensor ids, Tensor dweights, int[] rule, float eps, float scale) -> Tensor",
         lambda logits, ids, dweights, rule, eps, scale: _like(logits))  # fmt: skip
def _route_backward(logits, ids, dweights, rule, eps, scale):
    plan = _route_plan(logits, int(ids.shape[1]), rule, eps, scale)
    dlogits = _like(logits)
    _call(_core.ROUTE_BACKWARD, plan, 1, logits.shape[0], logits.device, _unit(logits), None, _ids(ids), _unit(dweights),
          dlogits)  # fmt: skip
    return dlogits


# ---- permute, unpermute ---------------------------------------------------------------------------------------------


def _permute_plan(t: Tensor, E: int, k: int, flags: int = 0) -> int:
    return _plan(PERMUTE, t.dtype, t.device, torch.get_num_threads(), H=int(t.shape[1]), E=E, k=k, flags=flags)


def _permute_fake(x, ids, E, flags):
    T, k = ids.shape
    return (x.new_empty((T * k, x.shape[1])), x.new_empty((T * k,), dtype=torch.int32),
            x.new_empty((E,), dtype=torch.int64))  # fmt: skip


@_define("permute(Tensor x, Tensor ids, int E, int flags) -> (Tensor, Tensor, Tensor)", _permute_fake)
def _permute(x, ids, E, flags):
    plan = _permute_plan(x, E, int(ids.shape[1]), flags)
    xp, row_map, counts = _permute_fake(x, ids, E, flags)
    _call(_core.PERMUTE_FORWARD, plan, 0, x.shape[0], x.device, _unit(x), _ids(ids), xp, row_map, counts)
    return xp, row_map, counts


def _from_rows(rows, row_map, k):
    return rows.new_empty((row_map.shape[0] // k, rows.shape[1]))


@_define("permute_backward(Tensor dxp, Tensor map, int k) -> Tensor", _from_rows)
def _permute_backward(dxp, row_map, k):
    plan = _permute_plan(dxp, 1, k)
    dx = _from_rows(dxp, row_map, k)
    _call(_core.PERMUTE_BACKWARD, plan, 1, dx.shape[0], dxp.device, dx, _unit(dxp), row_map)
    return dx


@_define("unpermute(Tensor y, Tensor map, Tensor[] weights, int k) -> Tensor",
         lambda y, row_map, weights, k: _from_rows(y, row_map, k))  # fmt: skip
def _unpermute(y, row_map, weights, k):
    plan = _permute_plan(y, 1, k)
    out = _from_rows(y, row_map, k)
    p = _opt(weights)
    _call(_core.UNPERMUTE_FORWARD, plan, 0, out.shape[0], y.device, _unit(y), row_map, p if p is None else _unit(p), out)
    return out


def _unpermute_backward_fake(y, row_map, weights, dout, needs):
    dy = [_like(y)] if needs & 1 else []
    return dy + ([_like(weights[0])] if needs & 2 else [])


@_define("unpermute_backward(Tensor y, Tensor map, Tensor[] weights, Tensor dout, int needs) -> Tensor[]",
         _unpermute_backward_fake)  # fmt: skip
def _unpermute_backward(y, row_map, weights, dout, needs):
    T = dout.shape[0]
    k = int(row_map.shape[0]) // T if T else 1
    grads = _unpermute_backward_fake(y, row_map, weights, dout, needs)
    p = _opt(weights)
    _call(_core.UNPERMUTE_BACKWARD, _permute_plan(y, 1, k), 1, T, y.device, _unit(y), row_map, p if p is None else _unit(p),
          _unit(dout), grads[0] if needs & 1 else None, grads[-1] if needs & 2 else None)  # fmt: skip
    return grads


# ---- grouped matmul: one stack of weights, or one weight a group ------------------------------------------------------


def _gmm_plan(x: Tensor, w: Tensor) -> int:
    E, K, N = (int(n) for n in w.shape)
    return _plan(GMM, x.dtype, x.device, torch.get_num_threads(), E=E, K=K, N=N)


@_define("grouped_matmul(Tensor x, Tensor w, Tensor[] bias, Tensor sizes, int cumulative) -> Tensor",
         lambda x, w, bias, sizes, cumulative: x.new_empty((x.shape[0], w.shape[2])))  # fmt: skip
def _gmm(x, w, bias, sizes, cumulative):
    y = x.new_zeros((x.shape[0], w.shape[2]))  # rows past the last group stay zero
    _call(_core.GMM_FORWARD, _gmm_plan(x, w), 0, x.shape[0], x.device, _unit(x), w, _opt(bias), _ids(sizes), y, cumulative, 0)
    return y


def _gmm_backward_fake(x, w, sizes, dy, needs, cumulative):
    grads = [_like(x)] if needs & 1 else []
    grads += [torch.empty_like(w)] if needs & 2 else []
    return grads + ([w.new_empty((w.shape[0], w.shape[2]))] if needs & 4 else [])


@_define("grouped_matmul_backward(Tensor x, Tensor w, Tensor sizes, Tensor dy, int needs, int cumulative) -> Tensor[]",
         _gmm_backward_fake)  # fmt: skip
def _gmm_backward(x, w, sizes, dy, needs, cumulative):
    grads = _new(_gmm_backward_fake(x, w, sizes, dy, needs, cumulative))
    out = iter(grads)
    dx, dw, db = (next(out) if needs & bit else None for bit in (1, 2, 4))
    _call(_core.GMM_BACKWARD, _gmm_plan(x, w), 1, x.shape[0], x.device, _unit(x), w, _ids(sizes), _unit(dy), dx, dw, db,
          cumulative, 0)  # fmt: skip
    return grads


def _list_plan(x: Sequence[Tensor]) -> tuple[int, int, torch.device]:
    plan = _plan(GMM, x[0].dtype, x[0].device, torch.get_num_threads(), E=len(x))
    return plan, sum(t.shape[0] for t in x), x[0].device


def _gmm_list_fake(x, w, bias):
    return [t.new_empty((t.shape[0], u.shape[1])) for t, u in zip(x, w, strict=True)]


@_define("grouped_matmul_list(Tensor[] x, Tensor[] w, Tensor[] bias) -> Tensor[]", _gmm_list_fake)
def _gmm_list(x, w, bias):
    plan, rows, device = _list_plan(x)
    y = _gmm_list_fake(x, w, bias)
    _call(_core.GMM_FORWARD, plan, 0, rows, device, [_unit(t) for t in x], w, bias or None, None, y, 0, 1)
    return y


def _gmm_list_backward_fake(x, w, dy, needs):
    grads = [_like(t) for t in x] if needs & 1 else []
    return grads + ([torch.empty_like(t) for t in w] if needs & 2 else [])


@_define("grouped_matmul_list_backward(Tensor[] x, Tensor[] w, Tensor[] dy, int needs) -> Tensor[]", _gmm_list_backward_fake)
def _gmm_list_backward(x, w, dy, needs):
    plan, rows, device = _list_plan(x)
    grads = _gmm_list_backward_fake(x, w, dy, needs)
    dx = grads[: len(x)] if needs & 1 else None
    dw = grads[-len(w) :] if needs & 2 else None
    _call(_core.GMM_BACKWARD, plan, 1, rows, device, [_unit(t) for t in x], w, None, [_unit(t) for t in dy], dx, dw, None, 0, 1)
    return grads


# ---- activation -----------------------------------------------------------------------------------------------------


def _act_plan(h: Tensor, act: int, flags: int, alpha: float, limit: float) -> int:
    width = int(h.shape[1]) // (2 if act < SILU else 1)
    return _plan(ACTIVATION, h.dtype, h.device, torch.get_num_threads(), I=width, act=act, flags=flags, alpha=alpha,
                 limit=limit)  # fmt: skip


def _act_fake(h, act, flags, alpha, limit):
    return h.new_empty((h.shape[0], h.shape[1] // (2 if act < SILU else 1)))


@_define("activation(Tensor h, int act, int flags, float alpha, float limit) -> Tensor", _act_fake)
def _activation(h, act, flags, alpha, limit):
    a = _act_fake(h, act, flags, alpha, limit)
    _call(_core.ACTIVATION_FORWARD, _act_plan(h, act, flags, alpha, limit), 0, h.shape[0], h.device, _unit(h), a)
    return a


@_define("activation_backward(Tensor h, Tensor da, int act, int flags, float alpha, float limit) -> Tensor",
         lambda h, da, act, flags, alpha, limit: _like(h))  # fmt: skip
def _activation_backward(h, da, act, flags, alpha, limit):
    dh = _like(h)
    plan = _act_plan(h, act, flags, alpha, limit)
    _call(_core.ACTIVATION_BACKWARD, plan, 1, h.shape[0], h.device, _unit(h), _unit(da), dh)
    return dh


# ---- experts --------------------------------------------------------------------------------------------------------


def layer_sizes(w: Sequence[Tensor], act: int, flags: int) -> tuple[int, int, int]:
    """H, I, E of a layer, from its weights."""
    if flags & LIST:
        I, H = w[0].shape
        return int(H), int(I), len(w) // (3 if act < SILU else 2)
    E, a, b = w[1].shape
    return (int(b), int(a), int(E)) if flags & TRANSPOSED else (int(a), int(b), int(E))


def _slots(w: Sequence[Tensor | None], act: int, flags: int) -> tuple:
    """The seven fields of fmoe_weights."""
    if flags & LIST:
        n = len(w) // (3 if act < SILU else 2)
        parts = [w[i : i + n] for i in range(0, len(w), n)]
        return (None, None, None, None, *([None] if act >= SILU else []), *(None if p[0] is None else p for p in parts))
    w1, w2, b1, b2 = w if len(w) == 4 else (*w, None, None)
    if flags & TRANSPOSED:
        w1, w2 = (t if t is None else t.transpose(1, 2) for t in (w1, w2))
    return w1, b1, w2, b2, None, None, None


def _experts_plan(x, ids, w, act, flags, alpha, limit) -> int:
    H, I, E = layer_sizes(w, act, flags)
    return _plan(EXPERTS, x.dtype, x.device, torch.get_num_threads(), H, I, E, int(ids.shape[1]), 0, 0, 0, act, flags, alpha,
                 limit)  # fmt: skip


_LAYER = "Tensor x, Tensor ids, Tensor p, Tensor[] w, int act, int flags, float alpha, float limit"


@_define(f"experts({_LAYER}) -> Tensor", lambda x, ids, p, w, act, flags, alpha, limit: _like(x))
def _experts(x, ids, p, w, act, flags, alpha, limit):
    """The layer without a gradient: nothing is saved."""
    plan = _experts_plan(x, ids, w, act, flags, alpha, limit)
    out = _like(x)
    _call(_core.EXPERTS_FORWARD, plan, 0, x.shape[0], x.device, _unit(x), _ids(ids), _unit(p), *_slots(w, act, flags), out, None)
    return out


def experts_saved(dtype: torch.dtype, device: torch.device, sizes: tuple[int, int, int], k: int, act: int, flags: int,
                  alpha: float, limit: float) -> tuple[int, int]:  # fmt: skip
    """c0, c1: experts_forward saves c0 + c1 * T bytes. An argument of it, so that a graph which torch.compile keeps on disk
    is not used with a library that saves something else."""
    plan = _plan(EXPERTS, dtype, device, torch.get_num_threads(), *sizes, k, 0, 0, 0, act, flags, alpha, limit)
    return _saved_line(plan)


experts_saved._dynamo_marked_constant = True  # torch.compiler.assume_constant_result without importing the compiler


def _saved(x: Tensor, c0: int, c1: int) -> Tensor:
    return torch.empty((c0 + c1 * x.shape[0],), dtype=torch.uint8, device=x.device)


@_define(f"experts_forward({_LAYER}, int[] saved) -> (Tensor, Tensor)",
         lambda x, ids, p, w, act, flags, alpha, limit, saved: (_like(x), _saved(x, *saved)))  # fmt: skip
def _experts_forward(x, ids, p, w, act, flags, alpha, limit, saved):
    """The layer, and the state its backward needs. saved: experts_saved(...)."""
    plan = _experts_plan(x, ids, w, act, flags, alpha, limit)
    out, saved = _like(x), _saved(x, *saved)
    _core.saved_bytes(plan, x.shape[0], saved)
    _call(_core.EXPERTS_FORWARD, plan, 0, x.shape[0], x.device, _unit(x), _ids(ids), _unit(p), *_slots(w, act, flags), out,
          saved)  # fmt: skip
    return out, saved


def _wanted(w: Sequence[Tensor], act: int, flags: int, needs: int) -> list[bool]:
    """Which tensors of w get a gradient. needs: 1 up (and gate), 2 down, 4 b1, 8 b2."""
    if flags & LIST:
        down = len(w) // (3 if act < SILU else 2)
        return [bool(needs & 1)] * (len(w) - down) + [bool(needs & 2)] * down
    return [bool(needs >> i & 1) for i in range(len(w))]


def _experts_backward_fake(x, ids, p, w, saved, dout, act, flags, alpha, limit, needs):
    grads = [_like(x)] if needs & 1 else []
    grads += [_like(p)] if needs & 2 else []
    return grads + [torch.empty_like(t) for t, yes in zip(w, _wanted(w, act, flags, needs >> 2), strict=True) if yes]


@_define("experts_backward(Tensor x, Tensor ids, Tensor p, Tensor[] w, Tensor saved, Tensor dout, int act, int flags, "
         "float alpha, float limit, int needs) -> Tensor[]", _experts_backward_fake)  # fmt: skip
def _experts_backward(x, ids, p, w, saved, dout, act, flags, alpha, limit, needs):
    """The gradients that `needs` asks for, in order: 1 x, 2 p, then w (4 up and gate, 8 down, 16 b1, 32 b2)."""
    plan = _experts_plan(x, ids, w, act, flags, alpha, limit)
    grads = _new(_experts_backward_fake(x, ids, p, w, saved, dout, act, flags, alpha, limit, needs))
    out = iter(grads)
    dx = next(out) if needs & 1 else None
    dp = next(out) if needs & 2 else None
    dw = [next(out) if yes else None for yes in _wanted(w, act, flags, needs >> 2)]
    _call(_core.EXPERTS_BACKWARD, plan, 1, x.shape[0], x.device, _unit(x), _ids(ids), _unit(p), *_slots(w, act, flags),
          saved if saved.numel() else None, _unit(dout), dx, dp, *_slots(dw, act, flags))  # fmt: skip
    return grads


# ---- block: router matmul, route, experts, shared expert --------------------------------------------------------------


def _block_plan(x, w, shared, k, act, flags, alpha, limit, rule, eps, scale) -> int:
    H, I, E = layer_sizes(w, act, flags)
    shared_I = int(shared[1].shape[2]) if shared else 0
    return _plan(BLOCK, x.dtype, x.device, torch.get_num_threads(), H, I, E, k, shared_I=shared_I, act=act, flags=flags,
                 alpha=alpha, limit=limit, rule=(*rule, eps, scale))  # fmt: skip


def _block_forward_fake(x, w_router, b_router, select_bias, w, shared, shared_gate, k, act, flags, alpha, limit, rule, eps, scale):
    plan = _block_plan(x, w, shared, k, act, flags, alpha, limit, rule, eps, scale)
    T, dtype = x.shape[0], _weight_dtype(x)
    return (_like(x), x.new_empty((T, w_router.shape[0]), dtype=dtype), x.new_empty((T, k), dtype=torch.int64),
            x.new_empty((T, k), dtype=dtype), _saved(x, *_saved_line(plan)))  # fmt: skip


_RULE = "int k, int act, int flags, float alpha, float limit, int[] rule, float eps, float scale"


@_define("block_forward(Tensor x, Tensor w_router, Tensor[] b_router, Tensor[] select_bias, Tensor[] w, Tensor[] shared, "
         f"Tensor[] shared_gate, {_RULE}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", _block_forward_fake)  # fmt: skip
def _block_forward(x, w_router, b_router, select_bias, w, shared, shared_gate, k, act, flags, alpha, limit, rule, eps, scale):
    """out, logits, ids, weights, saved."""
    args = (w, shared, k, act, flags, alpha, limit, rule, eps, scale)
    out, logits, ids, weights, _ = _block_forward_fake(x, w_router, b_router, select_bias, w, shared, shared_gate, *args[2:])
    plan = _block_plan(x, *args)
    saved = _saved(x, *_saved_line(plan)).zero_()
    shared_slots = _slots(shared, act, 0) if shared else (None,) * 7
    _call(_core.BLOCK_FORWARD, plan, 0, x.shape[0], x.device, _unit(x), w_router, _opt(b_router),
          _opt(select_bias), *_slots(w, act, flags), *shared_slots, _opt(shared_gate), logits, ids, weights, out, saved)  # fmt: skip
    return out, logits, ids, weights, saved


def _block_backward_fake(x, w_router, select_bias, w, shared, shared_gate, logits, ids, weights, saved, dout, dlogits,
                         k, act, flags, alpha, limit, rule, eps, scale, b_router):  # fmt: skip
    return [torch.empty_like(t) for t in (x, w_router, *b_router, *w, *shared, *shared_gate)]


@_define("block_backward(Tensor x, Tensor w_router, Tensor[] select_bias, Tensor[] w, Tensor[] shared, Tensor[] shared_gate, "
         "Tensor logits, Tensor ids, Tensor weights, Tensor saved, Tensor dout, Tensor[] dlogits, "
         f"{_RULE}, Tensor[] b_router) -> Tensor[]", _block_backward_fake)  # fmt: skip
def _block_backward(x, w_router, select_bias, w, shared, shared_gate, logits, ids, weights, saved, dout, dlogits,
                    k, act, flags, alpha, limit, rule, eps, scale, b_router):  # fmt: skip
    """Gradients of x, w_router, b_router, w, shared and shared_gate, those that are given, in this order."""
    plan = _block_plan(x, w, shared, k, act, flags, alpha, limit, rule, eps, scale)
    grads = [torch.empty_like(t) for t in (x, w_router, *b_router, *w, *shared, *shared_gate)]
    dx, dw_router, *rest = grads
    take = [[rest.pop(0) for _ in given] for given in (b_router, w, shared, shared_gate)]
    none = (None,) * 7
    _call(_core.BLOCK_BACKWARD, plan, 1, x.shape[0], x.device, _unit(x), w_router, _opt(select_bias), *_slots(w, act, flags),
          *(_slots(shared, act, 0) if shared else none), _opt(shared_gate), logits, ids, weights, saved, _unit(dout),
          _opt(dlogits), dx, dw_router, _opt(take[0]), *_slots(take[1], act, flags),
          *(_slots(take[2], act, 0) if shared else none), _opt(take[3]))  # fmt: skip
    return grads


(
    route, route_replay, route_backward, permute, permute_backward, unpermute, unpermute_backward, grouped_matmul, grouped_matmul_backward,
    grouped_matmul_list, grouped_matmul_list_backward, activation, activation_backward, experts, experts_forward, experts_backward,
    block_forward, block_backward,
) = (getattr(torch.ops.fusedmoe, name).default for name in _names)  # fmt: skip
