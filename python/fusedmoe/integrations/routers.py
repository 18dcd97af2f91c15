# SPDX-License-Identifier: Apache-2.0
"""Routers: one call of `route` for softmax or sigmoid, groups, top-k and normalisation.

A router is still a module that is called and returns what it returned, so router logits, auxiliary losses and hooks go on working. Its
rule is found by result: a copy of it with random weights and biases runs on random tokens, in training and not, and values and gradients
must be those of a rule that the C library has; dtypes and bits of the logits must be the same in bfloat16 and under autocast.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import autograd, ops
from .layers import logger
from .probes import ProbeError, isolated

TOKENS = 64
LOGITS, WEIGHTS, IDS = range(3)


def forward(self: nn.Module, hidden_states: Tensor, *given: Tensor, linear: str, exact: bool, autocast: bool, wide: bool, like: int,
            order: tuple[int, ...], bias: str, rule: dict[str, Any]) -> tuple[Tensor, ...]:  # fmt: skip
    """linear: who has the weight ("": the router); exact: the matmul is in float32; autocast: it may be turned down; wide: logits
    leave in float32; like: weights leave in the dtype of the logits, of the hidden states, or in float32; bias: what selects."""
    logits = _logits(self, hidden_states, linear, exact, autocast)
    ids, p = autograd.route(logits, select_bias=_select(self, given, bias), **rule)
    p = p if like == 2 else p.to((logits, hidden_states)[like].dtype)
    results = (logits.float() if wide else logits, p, ids)
    return tuple(results[kind] for kind in order)


def _logits(self: nn.Module, hidden_states: Tensor, linear: str, exact: bool, autocast: bool) -> Tensor:
    x, owner = hidden_states.reshape(-1, hidden_states.shape[-1]), self._modules[linear] if linear else self
    with nullcontext() if autocast else torch.autocast(x.device.type, enabled=False):
        w, b = owner.weight, owner._parameters.get("bias")
        if exact:
            return F.linear(x.float(), w.float(), None if b is None else b.float())
        return owner(x.to(w.dtype)) if linear else F.linear(x.to(w.dtype), w, b)


def _select(self: nn.Module, given: Sequence[Tensor], bias: str) -> Tensor | None:
    return given[0] if given else attrgetter(bias)(self).view(-1) if bias else None


def per_expert(module: nn.Module, E: int) -> list[str]:
    """Names of what a module has one number an expert of."""
    return [n for n, t in (*module.named_parameters(), *module.named_buffers()) if t.numel() == E]


def random_twin(module: nn.Module) -> nn.Module:
    """A copy on the CPU with random weights: the module's own may be elsewhere (meta, ZeRO-3's parts) or not loaded yet (FSDP)."""
    g = torch.Generator().manual_seed(4)
    memo: dict[int, Any] = {}
    for own in (*module.parameters(), *module.buffers()):
        t = torch.zeros(getattr(own, "ds_shape", own.shape), dtype=own.dtype, device="cpu")
        t = t.normal_(0, 0.3 if t.dim() < 2 else 2 * t.shape[-1] ** -0.5, generator=g) if t.is_floating_point() else t
        memo[id(own)] = nn.Parameter(t, t.is_floating_point()) if isinstance(own, nn.Parameter) else t
    for part in module.modules():  # no hooks: they are somebody's functions, and may be bound to what should not be copied
        memo.update((id(hooks), type(hooks)()) for name, hooks in vars(part).items() if name.endswith("_hooks"))
    return copy.deepcopy(module, memo)


def _rules(module: nn.Module, k: int) -> Iterator[dict[str, Any]]:
    numbers = {n: v for n, v in vars(module).items() if type(v) in (int, float)}
    groups, best = numbers.get("num_group", numbers.get("n_group", 0)), numbers.get("topk_group", 1)
    limits = [{}, *(dict(groups=groups, topk_groups=best, group_score=s, excluded_zero=z) for s in (0, 1) for z in (False, True))]
    scales = {1.0, 1.0 / k, *(float(v) for n, v in numbers.items() if "scal" in n)}
    scores = (ops.TOPK_SOFTMAX, ops.SOFTMAX, ops.SIGMOID, ops.SQRT_SOFTPLUS)  # the first is a renormalised softmax with k exponentials
    for score, renormalize, limit, scale in product(scores, (False, True), limits if groups > 1 else limits[:1], sorted(scales)):
        yield dict(k=k, score=score, renormalize=renormalize, eps=1e-20 if renormalize else 0.0, scale=scale, **limit)


def _step(call: Callable, twin: nn.Module, x: Tensor, given: list[Tensor], order: tuple[int, ...], training: bool) -> list[Tensor]:
    """Logits (if given), ids, weights in the order of the ids, and the gradients of x and the twin's parameters."""
    x, twin.training = x.detach().requires_grad_(), training
    results = dict(zip(order, call(twin, x, *given)))
    ids, by_id = results[IDS].sort(1)
    p = results[WEIGHTS].gather(1, by_id)
    loss = (p * torch.randn(p.shape, generator=torch.Generator().manual_seed(5), dtype=p.dtype)).sum()
    grads = torch.autograd.grad(loss, [x, *twin.parameters()], allow_unused=True, materialize_grads=True)
    return [results.get(LOGITS, p), p, ids, *grads]


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(u.dtype == v.dtype and u.shape == v.shape and (u - v).double().norm() <= 1e-4 * v.double().norm() for u, v in zip(a, b))


@torch.no_grad()
def _same_types(own: Callable, twin: nn.Module, half: nn.Module, x: Tensor, given: list[Tensor], options: dict) -> bool:
    for module, tokens, autocast in ((half, x.bfloat16(), False), (twin, x, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            a, b = own(module, tokens, *given), forward(module, tokens, *given, **options)
        if not all(u.dtype == v.dtype and (kind != LOGITS or torch.equal(u, v)) for kind, u, v in zip(options["order"], a, b)):
            return False
    return True


def _halved(own: Callable, twin: nn.Module, x: Tensor, given: list[Tensor]) -> nn.Module:
    """The router as it is in a model of bfloat16: in that, or in float32 where its own code needs it so (Inkling2)."""
    half = copy.deepcopy(twin).bfloat16()
    try:
        own(half, x.bfloat16(), *given)
    except RuntimeError:  # float32 tokens times bfloat16 weights
        return twin
    return half


def find(module: nn.Module) -> tuple[str, Callable, dict] | None:
    """The seam of a router whose rule the C library has; None: not a router, or one with a rule of its own."""
    return isolated(partial(_find, module), module)


@torch.enable_grad()
def _find(module: nn.Module) -> tuple[str, Callable, dict] | None:
    from . import trials  # which imports this module

    linears = [n for n, m in module._modules.items() if type(m) is nn.Linear]
    if not hasattr(module, "top_k") or "experts" in module._modules or ("weight" in module._parameters) + len(linears) != 1:
        return None
    own, linear = type(module).forward, linears[0] if linears else ""
    names = list(inspect.signature(own).parameters)[2:]
    twin, g = random_twin(module).float().requires_grad_(), torch.Generator().manual_seed(3)
    E, H = (twin._modules[linear] if linear else twin).weight.shape
    given = [torch.randn(E, generator=g, dtype=torch.float32) * 0.3 for n in names if n.endswith("bias")]
    for x in (torch.randn(*shape, generator=g, dtype=torch.float32) for shape in ((TOKENS, H), (1, TOKENS, H))):
        try:
            results = own(twin, x, *given)
            break
        except (RuntimeError, ValueError, IndexError) as problem:  # it wants another number of dimensions
            refused = problem
    else:
        raise ProbeError(f"its router could not be tried out ({type(refused).__name__}: {refused})") from refused
    results = results if isinstance(results, tuple) and all(isinstance(t, Tensor) for t in results) else ()
    order = tuple(IDS if not t.is_floating_point() else LOGITS if t.shape == (TOKENS, E) else WEIGHTS for t in results)
    if sorted(order) in ([LOGITS, WEIGHTS, IDS], [WEIGHTS, IDS]):
        k = results[order.index(IDS)].shape[1]
        want = [_step(own, twin, x, given, order, training) for training in (False, True)]
        half, logits = _halved(own, twin, x, given), _logits(twin, x, linear, True, True).detach()
        biases = [""] if given else ["", *(n for n in per_expert(twin, E) if n not in ("bias", linear + ".bias"))]
        for rule, bias in product(_rules(module, k), biases):
            ids, p = autograd.route(logits, select_bias=_select(twin, given, bias), **rule)
            ids, by_id = ids.sort(1)
            if not _same([p.gather(1, by_id), ids], want[0][1:3]):
                continue
            options = dict(linear=linear, exact=True, autocast=True, wide=False, like=2, order=order, bias=bias, rule=rule)
            ours = lambda twin, *args, options=options: forward(twin, *args, **options)  # noqa: E731
            same = all(_same(_step(ours, twin, x, given, order, training), w) for training, w in zip((False, True), want))
            if same and not trials.forgotten(twin, own, ours, [x, *given]) and _same(*(_step(f, twin, 3 * x, given, order, False)[:3]
                                                                                      for f in (ours, own))):  # fmt: skip
                for exact, autocast, wide, like in product((False, True), (True, False), (False, True), range(3)):
                    options |= dict(exact=exact, autocast=autocast, wide=wide, like=like)
                    if _same_types(own, twin, half, x, given, options):
                        here = next(module.parameters())
                        if not here.is_meta:  # a device may lack a rule: then this raises, and the router is left as it is
                            forward(twin.to(here), *(t.to(here) for t in (x, *given)), **options)
                        return "forward", forward, options
    logger.info("%s: its routing rule is not one of fusedmoe's; it stays as it is", type(module).__name__)
    return None
