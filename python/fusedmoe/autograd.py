# SPDX-License-Identifier: Apache-2.0
"""The differentiable layer: torch.autograd.Function around the operators of ``fusedmoe.ops``.

Only gradients that somebody asked for are computed; without any, the inference operators run and nothing is saved.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from . import checks, ops
from .enums import Activation, Score
from .quant import experts as quantised
from .quant import matmul as quantised_matmul
from .quant.tensor import QuantTensor


def compute_dtype(x: Tensor, w: Tensor) -> torch.dtype:
    """The dtype to compute in: autocast's where it is on, the weights' otherwise (as transformers does)."""
    kind = "cpu" if x.is_cpu else x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return w.dtype


def _no_second_derivative() -> None:
    if torch.is_grad_enabled() and not is_compiling():
        raise RuntimeError("fusedmoe has no second derivative: backward was called with create_graph=True")


def _fixed(*numbers: float) -> list[Any]:
    """The numbers; in a graph that is compiled with dynamic=True, where they are symbols, their values: what is in a set has one."""
    return [[*{n}][0] for n in numbers]


def _mask(wanted: Sequence[bool]) -> int:
    return sum(1 << i for i, yes in enumerate(wanted) if yes)


def _fit_p(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Routing weights are float32 or the dtype of the computation."""
    p = p.resolve_neg()
    return p if p.dtype == dtype or (p.dtype == torch.float32 and dtype != torch.float64) else p.to(dtype)


def _factor(t: Tensor, dtype: torch.dtype, unit: Sequence[int]) -> Tensor:
    """A factor of an adapter in this dtype, with unit stride in one of these dimensions: itself, or a copy that is one operation."""
    strides = t.stride()
    if t.dtype == dtype and any([strides[i] == 1 for i in unit]) and min(strides) > 0:
        return t
    shape = t.shape if unit[0] == 2 else t.transpose(1, 2).shape
    copy = torch.empty(shape, dtype=dtype, device=t.device)
    return (copy if unit[0] == 2 else copy.transpose(1, 2)).copy_(t)


def _ready(w: Sequence[Tensor], scales: list[float], x: Tensor, flags: int) -> tuple[Sequence[Tensor], list[Any]]:
    """w, its last tensors (the factors of adapters, if there are scales) as the C library reads them: on CUDA in the orientation of the
    weights. Copies, for one call only: autograd keeps what was given, which is the parameters themselves. And what operators take last."""
    if not scales:
        return w, []
    n, dtype, cpu = len(w) - (2 if flags & ops.LORA1 else 0) - (2 if flags & ops.LORA2 else 0), x.dtype, x.is_cpu
    unit = (2, 1) if cpu else (1,) if x.is_cuda and flags & ops.TRANSPOSED else (2,)
    wide = torch.float32 if dtype.itemsize == 2 else dtype  # which the library narrows itself
    return [*w[:n], *[_factor(t, wide if t.dtype == wide else dtype, unit) for t in w[n:]]], [scales]


_Layer = tuple[int, int, float, float]  # act, flags, alpha, limit


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: _Layer, scales: list[float], x: Tensor, ids: Tensor, p: Tensor, *w: Tensor) -> Tensor:
        out: Tensor
        sizes = _fixed(*ops.layer_sizes(w, *layer[:2]), ids.shape[1]) if is_compiling() else []
        line = ops.experts_saved(x.dtype, x.device, tuple(sizes[:-1]), sizes[-1], *layer) if sizes else ()
        ready, more = _ready(w, scales, x, layer[1])
        out, saved = ops.call(ops.experts_forward, x, ids, p, ready, *layer, line, *more)
        ctx.save_for_backward(x, ids, p, saved, *w)
        ctx.layer = layer, scales
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        _no_second_derivative()
        x, ids, p, saved, *w = ctx.saved_tensors
        need, (layer, scales) = ctx.needs_input_grad, ctx.layer
        if ops.saved_is_ours(x):
            layer = layer[0], layer[1] | ops.REUSE_SAVED, *layer[2:]
        bits = (1, 2, *ops.needs_bits(w, *layer[:2]))
        needs = sum({bit for bit, yes in zip(bits, (need[2], *need[4:]), strict=True) if yes})
        ready, more = _ready(w, scales, x, layer[1])
        grads = ops.call(ops.experts_backward, x, ids, p, ready, saved, dout.resolve_neg(), *layer, needs, *more)
        dx, dp, *dw = ops.spread(grads, [needs & bit for bit in bits])
        if scales:
            dw = [g if g is None else g.to(t.dtype) for g, t in zip(dw, w, strict=True)]
        return None, None, dx, None, dp, *dw


_record: Callable[..., Tensor] = super(torch.autograd.Function, _Experts).apply  # without 2 us for functorch's transforms


def with_adapters(w: Sequence[Tensor], lora: Sequence[Sequence[Any] | None], flags: int) -> tuple[list[Tensor], list[float], int]:
    """The weights and after them the factors (a, b[, scale]) of W1 and of W2; the two scales; flags that say which are there."""
    checks.adapters(lora)
    given, scales = [*w], [0.0, 0.0]
    for i, factors in enumerate(lora):
        if factors:
            a, b, scale = (*factors, 1.0)[:3]
            scale = float(scale) if isinstance(scale, Tensor) else scale
            if abs(scale) < 1e-30:  # 0 in the library's float, where it means 1
                b, scale = b * scale, 1.0
            given += [a.resolve_neg(), b.resolve_neg()]
            scales[i], flags = scale, flags | (ops.LORA1, ops.LORA2)[i]
    return given, scales, flags


def experts(x: Tensor, ids: Tensor, p: Tensor, w: Sequence[Tensor], act: int | str = ops.SWIGLU, flags: int = 0, alpha: float = 0.0,
            limit: float = 0.0, lora: Sequence[Sequence[Any] | None] = ()) -> Tensor:  # fmt: skip
    """The experts of a layer on routed tokens: sum over j of p[t,j] * (act(x[t] w1[e]^T) w2[e]^T), e = ids[t,j]. Differentiable.

    x: [T,H]. ids: [T,k] integers; equal ones of a token add, so k may exceed E. p: [T,k] routing weights.
    w: [w1, w2], w1 [E,2I,H] (gate, then up; [E,I,H] without a gate), w2 [E,H,I]; with Flag.BIAS also b1 [E,2I], b2 [E,H]; with
    Flag.TRANSPOSED w1 [E,H,2I], w2 [E,I,H]; with Flag.LIST the gates, ups [I,H] and downs [H,I] of all experts one after the other.
    act: an ``Activation``, or its name. alpha, limit: of the activations that have them.
    lora: for W1 and for W2, the factors a [E,rank,in] and b [E,out,rank] of a low-rank adapter, and its scale if it is not 1, or None.
    W + scale b a is never made.

    Tensors may have any strides. Computed in autocast's dtype where that is on, else in w's. Returns [T,H] in x's dtype.
    """
    compiling = is_compiling()
    if isinstance(act, str) or (not compiling and (type(act) is not int or type(flags) is not int)):  # type() of a constant is not traced
        act, flags = checks.code("experts", "act", Activation, act), checks.known_flags("experts", flags)
    if not checks.plain_experts(x, ids, p, w, act, flags):
        checks.experts(x, ids, p, w, act, flags)
    if not compiling and not type(alpha) is type(limit) is float:
        checks.numbers("experts", alpha=alpha, limit=limit)
        alpha, limit = float(alpha), float(limit)
    dtype = compute_dtype(x, w[0])
    coded = quantised.is_quantised(w)
    try:
        mixed = any([t.dtype != dtype for t in w]) if compiling else any([t.dtype != dtype or t.is_neg() for t in w])
    except AttributeError:
        mixed, coded = True, False  # the error is below
    if coded and mixed:
        w = [t if quantised.is_quantised([t]) else t.resolve_neg().to(dtype) for t in w]
    elif mixed:
        checks.floats("experts", **{f"w[{i}]": t for i, t in enumerate(w)})
        w = [t.resolve_neg().to(dtype) for t in w]
    w, scales, flags = with_adapters(w, lora, flags) if lora else (w, [], flags)
    if scales and dtype.itemsize == 2 and not x.is_cpu and any(t.dtype == torch.float32 for t in w):
        flags |= ops.WIDE_FACTORS
    xc, p = x if x.dtype == dtype else x.to(dtype), _fit_p(p, dtype)
    if coded:
        sizes = ops.layer_sizes(w, act, flags, x.shape[-1])
        w, flags = quantised.upright(w, int(flags)) if flags & ops.TRANSPOSED else (w, int(flags))
        made: Tensor = quantised.experts(xc, ids, p, _ready(w, scales, xc, flags)[0], sizes, int(act), flags, alpha, limit, scales)
        return made if made.dtype == x.dtype else made.to(x.dtype)
    wanted = torch.is_grad_enabled() and (xc.requires_grad or p.requires_grad or any([t.requires_grad for t in w]))
    if compiling:
        act, flags, alpha, limit, *scales = _fixed(int(act), int(flags), alpha, limit, *scales)
    if wanted or forward_ad._current_level >= 0:  # which torch refuses there, where the operator alone would drop the tangent
        plain = not compiling and not torch._C._are_functorch_transforms_active()
        out: Tensor = (_record if plain else _Experts.apply)((act, flags, alpha, limit), scales, xc, ids, p, *w)
    else:
        ready, more = _ready(w, scales, xc, flags)
        out = ops.call(ops.experts, xc, ids, p, ready, act, flags, alpha, limit, *more)
    return out if out.dtype == x.dtype else out.to(x.dtype)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, bias: Tensor | None, k: int, rule: tuple[int, ...], eps: float,
                scale: float) -> tuple[Tensor, Tensor]:  # fmt: skip
        ids, weights = ops.call(ops.route, logits, [] if bias is None else [bias], k, rule, eps, scale)
        ctx.save_for_backward(logits, ids)
        ctx.rule = rule, eps, scale
        ctx.mark_non_differentiable(ids)
        return ids, weights

    @staticmethod
    def backward(ctx: Any, _: Tensor, dweights: Tensor) -> tuple[Tensor | None, ...]:
        _no_second_derivative()
        return ops.call(ops.route_backward, *ctx.saved_tensors, dweights.resolve_neg(), *ctx.rule), None, None, None, None, None


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, rule: tuple[int, ...], eps: float, scale: float) -> Tensor:
        ctx.save_for_backward(logits, ids)
        ctx.rule = rule, eps, scale
        weights: Tensor = ops.call(ops.route_replay, logits, ids, rule, eps, scale)
        return weights

    @staticmethod
    def backward(ctx: Any, dweights: Tensor) -> tuple[Tensor | None, ...]:
        _no_second_derivative()
        return ops.call(ops.route_backward, *ctx.saved_tensors, dweights.resolve_neg(), *ctx.rule), None, None, None, None


def _select_bias(op: str, bias: Tensor | None, like: Tensor) -> Tensor | None:
    if bias is None:
        return None
    checks.floats(op, select_bias=bias)
    return bias.detach().resolve_neg().to(ops._weight_dtype(like))


onlooker = threading.local()  # mode: who sees or answers the calls of route in this thread (fusedmoe.routing)


def route(logits: Tensor, k: int, *, score: int | str = ops.SOFTMAX, renormalize: bool = False, select_bias: Tensor | None = None,
          groups: int = 0, topk_groups: int = 0, group_score: int = 0, excluded_zero: bool = False, eps: float = 0.0,
          scale: float = 1.0, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The k experts of each token: ids [T,k] int64 and weights [T,k] float32 (differentiable), from logits [T,E].

    score: a ``Score``, or its name: softmax over all, softmax over the chosen (topk_softmax), sigmoid, sqrt_softplus.
    renormalize: divide the weights of a token by their sum + eps. scale: multiply them, last.
    select_bias: [E], added to the scores for choosing alone. groups, topk_groups: choose groups of experts first, by the sum of their
    two best scores (group_score 0) or their best one (1); excluded_zero: the scores of the others count as 0, not as -inf.
    ids: [T,k], chosen before, by this model or another one: nothing is chosen, and the weights are those of these experts.
    """
    rule: dict[str, Any] = dict(score=score, renormalize=renormalize, select_bias=select_bias, groups=groups, topk_groups=topk_groups,
                                group_score=group_score, excluded_zero=excluded_zero, eps=eps, scale=scale, ids=ids)  # fmt: skip
    mode = getattr(onlooker, "mode", None)
    if mode is None:
        return _route(logits, k, **rule)
    result: tuple[Tensor, Tensor] = mode.route(_route, logits, k, rule)
    return result


def _route(logits: Tensor, k: int, score: int | str, renormalize: bool, select_bias: Tensor | None, groups: int, topk_groups: int,
           group_score: int, excluded_zero: bool, eps: float, scale: float, ids: Tensor | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    checks.floats("route", logits=logits)
    if not (isinstance(k, int) and k > 0 and logits.dim() == 2 and isinstance(eps, float) and isinstance(scale, float)):  # or 1 us
        checks.dims("route", logits=(logits, "T, E"))
        checks.whole("route", "k", k)
        checks.numbers("route", eps=eps, scale=scale)
    if not isinstance(renormalize, bool):
        checks.numbers("route", renormalize=renormalize)
    rule = checks.code("route", "score", Score, score), int(renormalize), group_score, groups, topk_groups, int(excluded_zero)
    if ids is not None:
        checks.integers("route", "ids", ids)
        if ids.shape != (logits.shape[0], k):
            raise ValueError(f"route: ids are {list(ids.shape)}, expected [T, k] = {[logits.shape[0], k]}")
        ids = ids.to(torch.int64)
        return ids, _Replay.apply(logits, ids, rule, float(eps), float(scale))  # type: ignore[no-untyped-call]
    bias = _select_bias("route", select_bias, logits)
    result: tuple[Tensor, Tensor] = _Route.apply(logits, bias, k, rule, float(eps), float(scale))  # type: ignore[no-untyped-call]
    return result


def _cut(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Sequence[Tensor]]:
    return [tensors[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(len(sizes))]


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: tuple[Any, ...], sizes: tuple[int, ...], x: Tensor, w_router: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        out, logits, ids, p, saved = ops.block_forward(x, w_router, *_cut(rest, sizes), *layer)
        ctx.save_for_backward(logits, ids, p, saved, x, w_router, *rest)
        ctx.mark_non_differentiable(ids, p)
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.sizes = layer, sizes
        return out, logits, ids, p

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlogits: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        _no_second_derivative()
        *state, x, w_router = ctx.saved_tensors[:6]
        b_router, *given = _cut(ctx.saved_tensors[6:], ctx.sizes)
        dout, aux = torch.zeros_like(x) if dout is None else dout, [] if dlogits is None else [dlogits]
        grads = ops.block_backward(x, w_router, *given, *state, dout, aux, *ctx.layer, b_router)
        before = 2 + len(b_router)
        return None, None, *grads[:before], *[None] * len(given[0]), *grads[before:]


def block(x: Tensor, w_router: Tensor, w: Sequence[Tensor], k: int, act: int | str = ops.SWIGLU, flags: int = 0, alpha: float = 0.0,
          limit: float = 0.0, *, shared: Sequence[Tensor] = (), shared_gate: Tensor | None = None, b_router: Tensor | None = None,
          score: int | str = ops.SOFTMAX, renormalize: bool = False, select_bias: Tensor | None = None, groups: int = 0,
          topk_groups: int = 0, group_score: int = 0, excluded_zero: bool = False, eps: float = 0.0,
          scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The whole MoE block of x [T,H]: out [T,H], router logits [T,E] (with a gradient too), ids [T,k], weights [T,k].

    w_router: [E,H]; b_router: [E]. w, act, flags, alpha, limit: as in ``experts``. score to scale: as in ``route``.
    shared: [w1 [1,2S,H], w2 [1,H,S]] of a shared expert, whose result is added; shared_gate: [1,H], of the sigmoid that scales it.
    All tensors are of x's dtype (select_bias [E]: any floating point one).
    """
    act, flags = checks.code("block", "act", Activation, act), checks.known_flags("block", flags)
    checks.floats("block", x=x, w_router=w_router)
    checks.weights("block", w, flags)
    H, _, E = ops.layer_sizes(w, act, flags, x.shape[-1])[:3]
    if w_router.shape != (E, H):
        raise ValueError(f"block: w_router is {list(w_router.shape)}, expected [E, H] = {[E, H]}")
    checks.whole("block", "k", k)
    if shared:
        checks.floats("block", **{f"shared[{i}]": t for i, t in enumerate(shared)})
        if len(shared) != (4 if flags & ops.BIAS else 2) or shared[0].dim() != 3 or shared[1].dim() != 3:
            want = "[1, 2*S, H] and [1, H, S]" + ", and their biases (flags has BIAS)" * bool(flags & ops.BIAS)
            raise ValueError(f"block: shared is {[list(t.shape) for t in shared]}, expected {want}")
    checks.numbers("block", alpha=alpha, limit=limit, renormalize=renormalize, eps=eps, scale=scale)
    rule = checks.code("block", "score", Score, score), int(renormalize), group_score, groups, topk_groups, int(excluded_zero)
    layer = k, act, flags | (0 if shared_gate is None else ops.SHARED_GATE), alpha, limit, rule, float(eps), float(scale)
    given: list[Sequence[Tensor]] = [[] if t is None else [t] for t in (b_router, _select_bias("block", select_bias, x))]
    given += [w, shared, [] if shared_gate is None else [shared_gate]]
    counts, tensors = tuple(len(ts) for ts in given), (t for ts in given for t in ts)
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _Block.apply(layer, counts, x, w_router, *tensors)  # type: ignore[no-untyped-call]
    return result


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, E: int, flags: int) -> tuple[Tensor, Tensor, Tensor]:
        xp, row_map, counts = ops.permute(x, ids, E, flags)
        ctx.save_for_backward(row_map)
        ctx.k = ids.shape[1]
        ctx.mark_non_differentiable(row_map, counts)
        return xp, row_map, counts

    @staticmethod
    def backward(ctx: Any, dxp: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        _no_second_derivative()
        return ops.unpermute(dxp, ctx.saved_tensors[0], [], ctx.k), None, None, None


def permute(x: Tensor, ids: Tensor, E: int, flags: int = ops.SKIP_E) -> tuple[Tensor, Tensor, Tensor]:
    """x [T,H] and ids [T,k] -> x's rows grouped by expert [T*k,H], the row of each slot [T*k] int32, the rows of each expert [E] int64.

    flags: which ids skip a slot (Flag.SKIP_E: E; Flag.SKIP_NEG1: -1); the row of such a slot is -1. Differentiable in x.
    """
    checks.floats("permute", x=x)
    checks.integers("permute", "ids", ids)
    checks.dims("permute", x=(x, "T, H"), ids=(ids, "T, k"))
    checks.whole("permute", "E", E)
    result: tuple[Tensor, Tensor, Tensor] = _Permute.apply(x, ids, E, checks.known_flags("permute", flags))  # type: ignore[no-untyped-call]
    return result


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, row_map: Tensor, p: Tensor) -> Tensor:
        ctx.save_for_backward(y, row_map, p)
        out: Tensor = ops.unpermute(y, row_map, [p], p.shape[1])
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        _no_second_derivative()
        y, row_map, p = ctx.saved_tensors
        wanted = ctx.needs_input_grad[::2]
        dy, dp = ops.spread(ops.unpermute_backward(y, row_map, [p], dout, _mask(wanted)), wanted)
        return dy, None, dp


def unpermute(y: Tensor, row_map: Tensor, p: Tensor) -> Tensor:
    """out[t] = sum over j of p[t,j] * y[row of slot (t,j)]: y [R,H], row_map [T*k] as ``permute`` gives it, p [T,k] -> [T,H].

    Slots that were skipped (row -1) add nothing. Differentiable in y and p.
    """
    checks.floats("unpermute", y=y, p=p)
    checks.integers("unpermute", "row_map", row_map)
    checks.dims("unpermute", y=(y, "R, H"), row_map=(row_map, "T*k"), p=(p, "T, k"))
    if row_map.shape[0] != p.numel() or not p.shape[1]:
        raise ValueError(f"unpermute: p is {list(p.shape)}, row_map has {row_map.shape[0]} rows, expected [T, k] and T*k")
    out: Tensor = _Unpermute.apply(y, row_map, _fit_p(p, y.dtype))  # type: ignore[no-untyped-call]
    return out


def _gmm_forward(ctx: Any, x: Tensor, weight: Tensor, group_list: Tensor | Sequence[int], bias: Tensor | None) -> Tensor:
    checks.floats("grouped_matmul", x=x, weight=weight, **({} if bias is None else {"bias": bias}))
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"grouped_matmul: x is {list(x.shape)}, weight is {list(weight.shape)}, expected [R, K] and [E, K, N]")
    group_list = checks.group_list(group_list, x.device)
    if group_list.shape != weight.shape[:1]:
        raise ValueError(f"grouped_matmul: group_list has the shape {list(group_list.shape)}, weight has E = {weight.shape[0]} groups")
    dtype = compute_dtype(x, weight)
    ctx.coded = None
    if isinstance(weight, QuantTensor):
        return quantised_matmul.forward(ctx, x, weight, group_list, bias, dtype)
    xc, wc = x.to(dtype), weight.to(dtype)
    ctx.save_for_backward(xc, wc, group_list)
    ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    y: Tensor = ops.grouped_matmul(xc, wc, [] if bias is None else [bias.to(dtype)], group_list, 0)
    return y.to(x.dtype)


def _gmm_backward(ctx: Any, dy: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
    _no_second_derivative()
    if ctx.coded:
        dx, db = quantised_matmul.backward(ctx, dy, wanted[0], wanted[2])
        return [dx, None, db]
    x, w, sizes = ctx.saved_tensors
    grads = ops.spread(ops.grouped_matmul_backward(x, w, sizes, dy.to(x.dtype), _mask(wanted), 0), wanted)
    return [g if g is None else g.to(d) for g, d in zip(grads, ctx.dtypes, strict=True)]


class GmmFunction(torch.autograd.Function):
    """apply(x, weight, group_list): ``grouped_matmul`` without a bias. x [R,K], weight [E,K,N], group_list [E] -> [R,N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group_list: Tensor | Sequence[int]) -> Tensor:
        return _gmm_forward(ctx, x, weight, group_list, None)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, _ = _gmm_backward(ctx, grad_output, (*ctx.needs_input_grad[:2], False))
        return dx, dw, None


class _BiasedGmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group_list: Tensor | Sequence[int], bias: Tensor) -> Tensor:
        return _gmm_forward(ctx, x, weight, group_list, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, db = _gmm_backward(ctx, dy, [ctx.needs_input_grad[i] for i in (0, 1, 3)])
        return dx, dw, None, db


def grouped_matmul(x: Tensor, weight: Tensor, group_list: Tensor | Sequence[int], bias: Tensor | None = None) -> Tensor:
    """y[r] = x[r] . weight[g] + bias[g], g the group of row r: x [R,K], weight [E,K,N] in any layout, bias [E,N] or None -> [R,N].

    group_list: [E], how many rows each group has, in their order; rows after the last group are 0. Differentiable, but for a weight
    that is a QuantTensor: codes [E,N,K] of a linear layer are passed as ``weight.turned()``.
    Computed in autocast's dtype where that is on, else in weight's. Returns x's dtype.
    """
    y: Tensor = GmmFunction.apply(x, weight, group_list) if bias is None else _BiasedGmm.apply(x, weight, group_list, bias)  # type: ignore[no-untyped-call]
    return y


class HybridGmmFunction(torch.autograd.Function):
    """apply(num_experts, *inputs, *weights): a tuple of x_i . weight_i, inputs [m_i,K], weights [K,N] -> [m_i,N]."""

    @staticmethod
    def forward(ctx: Any, num_experts: int, *args: Tensor) -> tuple[Tensor, ...]:
        checks.whole("HybridGmmFunction", "num_experts", num_experts, 0)
        xs, ws = args[:num_experts], args[num_experts:]
        if len(ws) != num_experts or not num_experts:
            raise ValueError(f"HybridGmmFunction: {num_experts} experts need as many inputs and weights, got {len(args)} tensors")
        checks.floats("HybridGmmFunction", **{f"args[{i}]": t for i, t in enumerate(args)})
        dtype = compute_dtype(xs[0], ws[0])
        cast = [t if t.dtype == dtype else t.to(dtype) for t in args]  # 0.7 us each otherwise
        ctx.save_for_backward(*cast)
        ctx.num_experts, ctx.dtypes = num_experts, [t.dtype for t in args]
        ys = ops.cut(ops.grouped_matmul_list(cast[:num_experts], cast[num_experts:], []), xs)
        return tuple(y if y.dtype == x.dtype else y.to(x.dtype) for y, x in zip(ys, xs, strict=True))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        _no_second_derivative()
        n, saved, need = ctx.num_experts, ctx.saved_tensors, ctx.needs_input_grad[1:]
        wanted = any(need[:n]), any(need[n:])
        dys = [dy.to(saved[0].dtype) for dy in grad_outputs]
        grads = ops.grouped_matmul_list_backward(saved[:n], saved[n:], dys, _mask(wanted))
        dw, dx = grads[: n * wanted[1]], ops.cut(grads[n * wanted[1] :], saved[:n])
        grads = ops.spread([*dx, *dw], [wanted[i >= n] for i in range(2 * n)])
        return None, *(g if g is None or g.dtype == d else g.to(d) for g, d in zip(grads, ctx.dtypes, strict=True))


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, act: int, flags: int, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(h)
        ctx.act = act, flags, alpha, limit
        a: Tensor = ops.activation(h, act, flags, alpha, limit)
        return a

    @staticmethod
    def backward(ctx: Any, da: Tensor) -> tuple[Tensor | None, ...]:
        _no_second_derivative()
        return ops.activation_backward(ctx.saved_tensors[0], da, *ctx.act), None, None, None, None


def activation(h: Tensor, act: int | str = ops.SWIGLU, flags: int = 0, alpha: float = 0.0, limit: float = 0.0) -> Tensor:
    """act(h): h [R,2I] (gate, then up; with Flag.INTERLEAVED in turns), or [R,I] for the ungated ones -> [R,I]. Differentiable.

    act: an ``Activation``, or its name. alpha, limit: of the activations that have them.
    """
    act, flags = checks.code("activation", "act", Activation, act), checks.known_flags("activation", flags)
    checks.floats("activation", h=h)
    checks.dims("activation", h=(h, "R, columns"))
    checks.numbers("activation", alpha=alpha, limit=limit)
    if act < ops.SILU and h.shape[-1] % 2:
        raise ValueError(f"activation: h is {list(h.shape)}, expected an even number of columns, gate and up")
    a: Tensor = _Activation.apply(h, act, flags, float(alpha), float(limit))  # type: ignore[no-untyped-call]
    return a
