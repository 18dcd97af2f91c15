# SPDX-License-Identifier: Apache-2.0
"""A model whose experts are spread over ranks: cutting them, putting them together again, and load."""

import json
import logging
import sys
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..integrations import layers, seams
from ..quant.tensor import QuantTensor
from .experts import ExpertParallel

_NAMES = [f"{name}{kind}" for name in ("gate_up_proj", "up_proj", "down_proj") for kind in ("", "_bias")]


def sharded(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertParallel]]:
    """Name, module and layout of every module whose experts are spread over ranks."""
    for name, module in model.named_modules():
        ep = vars(module).get("_fmoe_ep")
        if ep is not None:
            yield name, module, ep


def _why_not(module: nn.Module) -> str:
    """Why a module's experts cannot be spread; "" where they can."""
    if "_fmoe_ep" in vars(module):
        return "its experts are spread over ranks already"
    bound = seams.seam_of(module)
    if layers.list_names(module._modules.get("experts")):  # only where the block runs on fusedmoe
        ours = any(isinstance(vars(module).get(slot), seams.Bound) for slot in ("forward", "moe"))
        plain = not any(type(e) is nn.Identity for e in module.experts)
        return "" if ours and plain else seams.left.get(module, "it is not a block that fusedmoe runs")
    layer = bound.options["layer"] if bound else layers.look_at(module)
    if layer.own or layer.act is None or layer.norm or layer.identity:
        return layer.why or "it computes something between its experts that fusedmoe does not"
    return ""


def _holders(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that have experts: as stacks, or in a list of modules."""
    told = lambda m: (bound := seams.seam_of(m)) is not None and bound.__func__ is seams.given_forward and "down_proj" in m._parameters
    return [(name, m) for name, m in model.named_modules()
            if layers.is_v5_experts(m) or told(m) or layers.list_names(m._modules.get("experts"))]  # fmt: skip


def shard(model: nn.Module, group: Any, **options: Any) -> nn.Module:
    """Keep this rank's experts of every MoE layer, and have tokens travel. group, options: of ``ExpertParallel``.

    Every rank has the same model before it. Parameters on the meta device are cut there: load them afterwards, with
    ``load_state_dict``. Optimizers, FSDP and adapters come after it.
    """
    found = _holders(model)
    refused = [f"{name} ({type(m).__name__}): {why}" for name, m in found if (why := _why_not(m))]
    if refused or not found:
        raise NotImplementedError(f"expert_parallel: {'; '.join(refused[:3]) or 'no experts that fusedmoe can spread over ranks'}")
    for _, module in found:
        params = {n: p for n in _NAMES if (p := module._parameters.get(n)) is not None}
        ep = ExpertParallel(group, params["down_proj"].shape[0] if params else len(module.experts), **options)
        for n, p in params.items():
            if isinstance(p, QuantTensor):
                local = p.chosen(ep.local)
                if f"{n}_scale_inv" in module._parameters:  # transformers' FP8Experts
                    setattr(module, f"{n}_scale_inv", nn.Parameter(local.scale, requires_grad=False))
            else:
                local = p.detach()[torch.tensor(ep.local, dtype=torch.int64, device=p.device)]
            setattr(module, n, nn.Parameter(local, requires_grad=p.requires_grad))
        if not params:
            if not ep.local or ep.local != sorted(ep.local):
                raise NotImplementedError(f"expert_parallel: a rank has at least one expert of a list, in order; this one has {ep.local}")
            for e in set(range(ep.num_experts)) - {*ep.local}:
                module.experts[e] = nn.Identity()
        for attribute in ("_fmoe_layer", "_fmoe_origin"):  # it is looked at again, and saved as what it has now
            vars(module).pop(attribute, None)
        vars(module)["_fmoe_ep"] = ep
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, _OfExperts(model))
    layers.logger.log(logging.INFO, "expert parallelism: %d layers, experts %s of %d here", len(found), ep.local, ep.num_experts)
    return model


def wrappers(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertParallel]]:
    """Name and module of every wrapper that PEFT has put around a module of ``sharded``: its adapters are those of this rank's experts."""
    kind = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", ())
    for name, module in model.named_modules():
        if isinstance(module, kind):
            base = module
            while isinstance(base, kind):
                base = base.base_layer
            if "_fmoe_ep" in vars(base):
                yield name, module, vars(base)["_fmoe_ep"]


def expert_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that differ from rank to rank: ``fully_shard(module, ignored_params=expert_parameters(model))``."""
    found = {p for _, module, _ in sharded(model) for n in _NAMES if (p := module._parameters.get(n)) is not None}
    found |= {p for _, module, _ in sharded(model) if "experts" in module._modules for p in module.experts.parameters()}
    return found | {p for _, module, _ in wrappers(model) for of in (module.lora_A, module.lora_B) for p in of.parameters()}


class _OfExperts:
    """Names of the parameters of experts, as DDP sees them: those that the model has when DDP asks, under PEFT's name for it too."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)

    def __iter__(self) -> Iterator[str]:
        model = self.model()
        own = expert_parameters(model) if model is not None else set()
        for name, p in model.named_parameters() if own else ():
            if p in own:
                yield from (name, f"base_model.model.{name}")

    def __getstate__(self) -> dict:
        raise TypeError("a model whose experts are spread over ranks is saved by its state_dict")

    def __deepcopy__(self, memo: dict) -> "_OfExperts":
        return self


def _gathered(local: Tensor, ep: ExpertParallel) -> Tensor:
    whole = local.new_empty((ep.num_experts, *local.shape[1:]))
    group = ep.exchange.group
    for r, experts in enumerate(ep.placement):
        part = local.contiguous() if r == ep.rank else local.new_empty((len(experts), *local.shape[1:]))
        if experts:
            dist.broadcast(part, dist.get_global_rank(group, r), group=group)
            whole[torch.tensor(experts)] = part
    return whole


class Entry(NamedTuple):
    """A tensor of a state_dict that has a part for each expert of ep: a stack [E,...], or a factor of an adapter as PEFT has it, whose
    experts lie in its rows [E*rank, in] or, last, in its columns [out, rank*E]."""

    ep: ExpertParallel
    rows: bool = False
    columns: bool = False

    def stack(self, t: Tensor, experts: int) -> Tensor:
        """A view of t with the experts first."""
        if self.columns:
            return t.view(t.shape[0], -1, experts).permute(2, 0, 1)
        return t.view(experts, -1, t.shape[1]) if self.rows else t

    def flat(self, stack: Tensor) -> Tensor:
        """The inverse."""
        if self.columns:
            return stack.permute(1, 2, 0).flatten(1)
        return stack.flatten(0, 1) if self.rows else stack


def entries(model: nn.Module) -> dict[str, Entry]:
    """The tensors of model.state_dict() that have a part for each expert, lists of modules aside."""
    found = {}
    for name, module, ep in sharded(model):
        for n, p in module._parameters.items():
            if n.removesuffix("_scale_inv") in _NAMES and p is not None:
                parts = [f".{part}" for part in p.parts() if part != "codes"] if isinstance(p, QuantTensor) else []
                found.update({f"{name}.{n}{part}".removeprefix("."): Entry(ep) for part in ("", *parts)})
    for name, module, ep in wrappers(model):
        for adapter in module.lora_A:
            found[f"{name}.lora_A.{adapter}.weight"] = Entry(ep, rows=True)
            found[f"{name}.lora_B.{adapter}.weight"] = Entry(ep, columns=True)
    return found


def _listed(model: nn.Module, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts of lists, each from the first rank that has it; collective."""
    whole = {}
    for name, module, ep in sharded(model):
        if "experts" not in module._modules:
            continue
        start, group = f"{name}.experts." if name else "experts.", ep.exchange.group
        like = {key.removeprefix(f"{start}{ep.local[0]}."): t for key, t in own.items() if key.startswith(f"{start}{ep.local[0]}.")}
        for e in range(ep.num_experts):
            owner = next(r for r, on in enumerate(ep.placement) if e in on)
            for rest, t in like.items():
                part = own[f"{start}{e}.{rest}"].contiguous() if owner == ep.rank else torch.empty_like(t)
                dist.broadcast(part, dist.get_global_rank(group, owner), group=group)
                whole[f"{start}{e}.{rest}"] = part
    return whole


def _whole(t: Tensor, entry: Entry) -> Tensor:
    return entry.flat(_gathered(entry.stack(t, len(entry.ep.local)), entry.ep))


def _part(t: Tensor, entry: Entry) -> Tensor:
    return entry.flat(entry.stack(t, entry.ep.num_experts)[torch.tensor(entry.ep.local, dtype=torch.int64)])


def named(state: dict[str, Tensor], spread: dict[str, Entry], whole: bool) -> dict[str, Tensor]:
    """state, with what it tells of the shape of quantised stacks (quant/model.py) true for whole stacks, or for this rank's."""
    result = dict(state)
    for name, t in state.items():
        entry = spread.get(name.removesuffix(".quant")) if name.endswith(".quant") else None
        if entry is not None:
            told = json.loads(bytes(t.tolist()).decode())
            told["shape"][0] = entry.ep.num_experts if whole else len(entry.ep.local)
            result[name] = torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)
    return result


def state_dict(model: nn.Module) -> dict[str, Tensor]:
    """model.state_dict() with whole experts, on every rank (collective); parameters of FSDP are made whole too."""
    spread = entries(model)
    own = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in named(model.state_dict(), spread, True).items()}
    whole = {name: _whole(t, spread[name]) if name in spread else t for name, t in own.items()}
    return {**whole, **_listed(model, own)}


def load_state_dict(model: nn.Module, whole: dict[str, Tensor], assign: bool = False) -> None:
    """Load what ``state_dict`` gave, on any number of ranks: each takes the experts it has."""
    spread = entries(model)
    lists = tuple(f"{name}.experts." if name else "experts." for name, module, _ in sharded(model) if "experts" in module._modules)
    here = model.state_dict().keys()  # of a list, the experts of other ranks are not
    part = {name: _part(t, spread[name]) if name in spread else t
            for name, t in named(whole, spread, False).items() if name in here or not name.startswith(lists)}  # fmt: skip
    model.load_state_dict(part, assign=assign)


def load(model: nn.Module, reset: bool = False) -> dict[str, dict[str, list[int]]]:
    """Tokens that experts and ranks of each layer got since the start, or the last reset (collective): {layer: {"experts", "ranks"}}."""
    result = {}
    for name, _, ep in sharded(model):
        tokens = ep.tokens.clone()
        dist.all_reduce(tokens, group=ep.exchange.group)
        ranks = [0.0] * ep.ranks
        copies = [sum(e in on for on in ep.placement) for e in range(ep.num_experts)]
        for r, on in enumerate(ep.placement):
            ranks[r] = sum(int(tokens[e]) / copies[e] for e in on)
        result[name] = {"experts": tokens.tolist(), "ranks": [round(n) for n in ranks]}
        if reset:
            ep.tokens.zero_()
    return result
