# SPDX-License-Identifier: Apache-2.0
"""Gradients of a model whose experts are spread over ranks: the mean of the others, the sum of replicas, and the norm of all."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .experts import ExpertParallel
from .shards import entries, expert_parameters, sharded


def _grad(p: nn.Parameter) -> Tensor:
    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    return p.grad


def _by_expert(model: nn.Module) -> Iterator[tuple[ExpertParallel, dict[int, Tensor]]]:
    """For each trained parameter that experts have: the gradients of this rank's, by expert, as views."""
    for name, entry in entries(model).items():
        p, ep = model.get_parameter(name), entry.ep
        if p.requires_grad:
            grads = entry.stack(_grad(p), len(ep.local))
            yield ep, {e: grads[row] for row, e in enumerate(ep.local)}
    for _, module, ep in sharded(model):
        if "experts" in module._modules:
            for name, p in module.experts[ep.local[0]].named_parameters():
                if p.requires_grad:
                    yield ep, {e: _grad(module.experts[e].get_parameter(name)) for e in ep.local}


def _copies(ep: ExpertParallel) -> dict[int, int]:
    """Experts that are on more than one rank, and on how many."""
    counts = {e: sum(e in on for on in ep.placement) for e in range(ep.num_experts)}
    return {e: n for e, n in counts.items() if n > 1}


@torch.no_grad()
def sync_replicas(model: nn.Module) -> None:
    """Give every replica of an expert the sum of their gradients (collective): each has that of the tokens it saw. ``sync_gradients`` does
    it too; with DDP call this before the optimizer's step. Where no expert has replicas it does nothing."""
    if not any(_copies(ep) for _, _, ep in sharded(model)):
        return
    if any(hasattr(p, "device_mesh") for p in expert_parameters(model)):
        raise NotImplementedError("sync_replicas: FSDP has cut up the parameters of experts that have replicas")
    for ep, grads in _by_expert(model):
        copies = _copies(ep)
        if not copies:
            continue
        nothing = torch.zeros_like(next(iter(grads.values())))
        total = torch.stack([grads.get(e, nothing) for e in copies])
        dist.all_reduce(total, group=ep.exchange.group)
        for e, of_all in zip(copies, total, strict=True):
            if e in grads:
                grads[e].copy_(of_all)


@torch.no_grad()
def sync_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """The mean over ranks of the gradients of all parameters but the experts', where neither DDP nor FSDP does that; and
    ``sync_replicas``."""
    own, n = expert_parameters(model), dist.get_world_size(group)
    for p in model.parameters():
        if p not in own and p.requires_grad:
            dist.all_reduce(_grad(p), group=group)
            p.grad /= n
    sync_replicas(model)


def _norm(grads: list[Tensor], norm_type: float) -> Tensor:
    """Of tensors, some of which FSDP may have cut up, over different meshes."""
    by_mesh: dict[int, list[Tensor]] = {}
    for g in grads:
        by_mesh.setdefault(id(getattr(g, "device_mesh", None)), []).append(g)
    norms = [get_total_norm(some, norm_type) for some in by_mesh.values()]
    whole = [n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]
    return torch.linalg.vector_norm(torch.stack(whole), norm_type) if whole else torch.zeros(())


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` over the experts of all ranks (collective), when gradients are summed: the same norm everywhere.
    torch's own gives each rank another one, and the parameters that ranks share drift apart."""
    own = expert_parameters(model)
    params = [p for p in model.parameters() if p.grad is not None]
    total = _norm([p.grad for p in params if p not in own], norm_type)
    layouts = [ep for _, _, ep in sharded(model)]
    if layouts:
        mine = [p.grad for p in params if p in own]
        if any(map(_copies, layouts)):  # each of n replicas counts for an n-th
            share = lambda ep, e: _copies(ep).get(e, 1) ** (-1.0 / norm_type)
            mine = [g * share(ep, e) for ep, grads in _by_expert(model) for e, g in grads.items()]
        of_experts, infinite = _norm(mine, norm_type).to(total.device), norm_type == float("inf")
        part = of_experts if infinite else of_experts**norm_type
        dist.all_reduce(part, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=layouts[0].exchange.group)
        total = torch.maximum(total, part) if infinite else (total**norm_type + part) ** (1.0 / norm_type)
    by_mesh: dict[int, list[nn.Parameter]] = {}
    for p in params:
        by_mesh.setdefault(id(getattr(p.grad, "device_mesh", None)), []).append(p)
    for some in by_mesh.values():
        clip_grads_with_norm_(some, max_norm, total)
    return total
