# SPDX-License-Identifier: Apache-2.0
"""The experts of a layer over the ranks of a group, differentiable: what ``fusedmoe.experts`` is for one process."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _core, autograd, checks, ops
from ..enums import Activation
from ..quant import experts as quantised
from ..quant import operators
from .exchange import TorchExchange, group_of

MODES = {"exact": 0, "lean": 1}
DEVICES = {"cpu": 1, "cuda": 2, "npu": 12}  # fmoe_device_type
STATS = ("rows_out", "rows_in", "pairs_out", "pairs_in", "bytes_counts", "bytes_pairs", "bytes_out", "bytes_back", "dropped")


class ExpertParallel:
    """Where the experts of a layer are, and how their tokens travel.

    group: a process group, or a DeviceMesh (its only dimension, or the one named "ep"). num_experts: of all ranks together.
    placement: a list of experts for each rank; an expert on more than one rank is a replica, and each rank uses its own or one of the
    others. None: rank r has those from r*E/n to (r+1)*E/n.
    mode: "exact": the bits of one process; "lean": fewest bytes (include/fusedmoe_ep.h). chunks: pieces that overlap.
    capacity: rows a rank sends to another at most; 0: no limit. timeout: seconds of every exchange; None: ten minutes.
    average: gradients of experts are divided by the number of ranks, as DDP and FSDP average those of the other parameters.
    """

    def __init__(self, group: Any, num_experts: int, placement: Sequence[Sequence[int]] | None = None, mode: str = "exact",
                 chunks: int = 1, capacity: int = 0, timeout: float | None = None, average: bool = True) -> None:  # fmt: skip
        if mode not in MODES:
            raise ValueError(f"mode is {mode!r}, expected one of {list(MODES)}")
        self.exchange, self.num_experts, self.mode, self.chunks = TorchExchange(group_of(group)), num_experts, mode, chunks
        self.rank, self.ranks, self.average = self.exchange.rank, self.exchange.ranks, average
        if placement is not None and len(placement) != self.ranks:
            raise ValueError(f"placement has the experts of {len(placement)} ranks, the group has {self.ranks}")
        n = self.ranks
        self.placement = [[*map(int, on)] for on in placement or
                          [range(r * num_experts // n, (r + 1) * num_experts // n) for r in range(n)]]  # fmt: skip
        self.capacity, self.timeout_ms = capacity, 0 if timeout is None else max(1, int(1000 * timeout))
        self.layers: dict[tuple, Any] = {}
        self._counted, self._one = torch.zeros(num_experts + 2, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
        # On a device with a capacity: slots that the last call dropped, [1,1] there; elsewhere stats has the number.
        self.dropped: Tensor | None = None
        # What the last call moved to and from other ranks: rows, (token, expert) pairs, bytes; slots that were dropped.
        self.stats: dict[str, int] = {}

    @property
    def direct(self) -> bool:
        """One rank that has all experts in order: nothing travels."""
        return self.ranks == 1 and not self.capacity and self.local == [*range(self.num_experts)]

    @property
    def local(self) -> list[int]:
        """The experts of this rank, in the order of its weights."""
        return self.placement[self.rank]

    def layer(self, x: Tensor, sizes: tuple[int, ...], k: int, act: int, flags: int, alpha: float, limit: float) -> Any:
        key = x.dtype, x.device, sizes, k, act, flags, alpha, limit, torch.get_num_threads()
        if key not in self.layers:
            H, I, _, rank1, rank2 = sizes
            exchange = self.exchange.on(x.device)
            where = DEVICES[x.device.type], 0 if x.is_cpu else x.device.index or 0
            desc = (ops.EXPERTS, checks.DTYPES[x.dtype], *where, H, I, self.num_experts, k, 0, 0, 0, rank1, rank2, act, flags & ~ops._OWN,
                    alpha, limit, None, torch.get_num_threads())  # fmt: skip
            pairs = [(e, r) for r, on in enumerate(self.placement) for e in on]
            experts, ranks = ([*part] for part in zip(*pairs, strict=True))
            self.layers[key] = _core.ep_create(desc, exchange, self.rank, self.ranks, experts, ranks, MODES[self.mode], self.chunks,
                                               self.capacity, self.timeout_ms, exchange.on_device)  # fmt: skip
        return self.layers[key]

    def count(self, ids: Tensor) -> None:
        """Add to `tokens`. Skip marks are counted before and after the experts: nothing waits for a device."""
        if self._counted.device != ids.device:
            self._counted, self._one = self._counted.to(ids.device), self._one.to(ids.device)
        flat = ids.reshape(-1).clamp(-1, self.num_experts).add_(1)
        self._counted.scatter_add_(0, flat if flat.dtype == torch.int64 else flat.long(), self._one.expand(flat.numel()))

    @property
    def tokens(self) -> Tensor:
        """Slots of this rank's tokens, by expert, since the start or the last reset."""
        return self._counted[1:-1]

    def __getstate__(self) -> dict:
        raise TypeError("an ExpertParallel belongs to a running process group: save distributed.state_dict(model), and shard again")

    def __deepcopy__(self, memo: dict) -> "ExpertParallel":
        return self  # a copied model runs over the same ranks


class _Experts(torch.autograd.Function):
    """coded: sizes of the layer and what codes mean (quant/operators.py), where weights are quantised; None: they are not. Then the last
    tensors, from n on, are those of their scales."""

    @staticmethod
    def forward(ctx: Any, ep: ExpertParallel, layer: tuple, scales: list[float], coded: tuple | None, n: int, wanted: bool, x: Tensor,
                ids: Tensor, p: Tensor, *tensors: Tensor) -> Tensor:  # fmt: skip
        w, (act, flags) = tensors[:n], layer[:2]
        sizes = coded[0] if coded else ops.layer_sizes(w, act, flags, x.shape[1])
        plan = ep.layer(x, sizes, ids.shape[1], act, flags | (operators.QUANT if coded else 0), *layer[2:])
        ready, _ = autograd._ready(w, scales, x, flags)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        ep.dropped = None if x.is_cpu or not ep.capacity else torch.empty(1, 1, dtype=torch.int64, device=x.device)
        call = _core.ep_forward(plan, ops._form(act, flags), not wanted, x, ids, p, [*ready] if ep.local else None, out, ep.dropped,
                                *_scales(scales), _quants(coded, tensors[n:], flags))  # fmt: skip
        ep.stats = _core.ep_stats(call)
        if wanted:
            ctx.save_for_backward(x, ids, p, *tensors)
            ctx.state = ep, layer, scales, coded, n, call
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        autograd._no_second_derivative()
        x, ids, p, *tensors = ctx.saved_tensors
        ep, (act, flags, *_), scales, coded, n, call = ctx.state
        w, need = tensors[:n], ctx.needs_input_grad
        bits = ops.needs_bits(w, act, flags)
        asked = {bit for bit, yes in zip(bits, need[9 : 9 + n], strict=True) if yes}
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need[6] else None
        dp = torch.empty_like(p, memory_format=torch.contiguous_format) if need[8] else None
        ready, _ = autograd._ready(w, scales, x, flags)
        stacked = not flags & ops.LIST
        dw = [ops._grad(t, t.dim() == 3 or not stacked) if bit in asked else None for t, bit in zip(w, bits, strict=True)]
        _core.ep_backward(call, ops._form(act, flags), x, ids, p, [*ready] if ep.local else None, dout, dx, dp, dw if ep.local else None,
                          *_scales(scales), _quants(coded, tensors[n:], flags))  # fmt: skip
        ep.stats = _core.ep_stats(call)
        if ep.average and ep.ranks > 1:
            dw = [g if g is None else g.div_(ep.ranks) for g in dw]
        return *[None] * 6, dx, None, dp, *dw, *[None] * (len(tensors) - n)


def _scales(scales: list[float]) -> tuple[float, float]:
    return (scales[0], scales[1]) if scales else (0.0, 0.0)


def _quants(coded: tuple | None, parts: Sequence[Tensor], flags: int) -> tuple | None:
    if coded is None:
        return None
    sizes, about, zeros = coded
    return tuple(operators._descriptors(parts, [*sizes, *about], zeros, flags))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def experts(x: Tensor, ids: Tensor, p: Tensor, w: Sequence[Tensor], act: int | str = ops.SWIGLU, flags: int = 0, alpha: float = 0.0,
            limit: float = 0.0, lora: Sequence[Sequence | None] = (), *, ep: ExpertParallel) -> Tensor:  # fmt: skip
    """``fusedmoe.experts`` with w and lora of this rank's experts alone (ep.local), ids over all. Every rank calls it, also one without
    tokens. On the CPU, CUDA and NPUs. Quantised weights have the same format on every rank."""
    checks.experts(x, ids, p, w, act, flags)
    checks.dims("experts", x=(x, "T, H"), ids=(ids, "T, k"))
    if x.device.type not in DEVICES:
        raise NotImplementedError(f"experts: x is on {x.device}: expert parallelism runs on {', '.join(DEVICES)}")
    if ep.direct:
        out = autograd.experts(x, ids, p, w, act, flags, alpha, limit, lora)
        ep.count(ids)
        ep.stats = dict.fromkeys(STATS, 0)
        return out
    act, flags = checks.code("experts", "act", Activation, act), int(flags)
    dtype, is_coded, coded = autograd.compute_dtype(x, w[0]), quantised.is_quantised(w), None
    w = [t if quantised.is_quantised([t]) else t.resolve_neg().to(dtype) for t in w]
    w, scales, flags = autograd.with_adapters(w, lora, flags) if lora else (w, [], flags)
    xc, p, n, parts = x if x.dtype == dtype else x.to(dtype), autograd._fit_p(p, dtype), len(w), []
    if is_coded:
        sizes = ops.layer_sizes(w, act, flags, x.shape[-1])
        w, flags = quantised.upright(w, flags) if flags & ops.TRANSPOSED else (w, flags)
        w, parts, about, zeros = quantised.split(w, act, flags)
        coded = sizes, about, zeros
    ep.count(ids)
    wanted = torch.is_grad_enabled() and (xc.requires_grad or p.requires_grad or any(t.requires_grad for t in w))
    given = xc.resolve_neg().contiguous(), ids.contiguous(), p.contiguous(), *w, *parts
    out = _Experts.apply(ep, (act, flags, alpha, limit), scales, coded, n, wanted, *given)
    return out if out.dtype == x.dtype else out.to(x.dtype)
