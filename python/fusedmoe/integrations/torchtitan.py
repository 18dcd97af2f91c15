# SPDX-License-Identifier: Apache-2.0
"""For torchtitan (0.3), by its own override: ``--override.imports fusedmoe.integrations.torchtitan.routed_experts``.

Experts and dispatcher of a layer in one call of fusedmoe, with and without expert parallelism; the router, the shared experts, and how
weights are cut (EP, FSDP2) stay torchtitan's. ``...torchtitan.grouped_experts`` replaces the experts alone, behind any dispatcher of
theirs. Both compute in the dtype of the weights, or of autocast; torchtitan's own always in bf16.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from .. import ops
from ..autograd import experts
from ..distributed import ExpertParallel
from ..distributed import experts as over_ranks
from . import seams


def _weights(module: GroupedExperts) -> list[Tensor]:
    """Gates, ups and downs of this rank's experts."""
    stacks = module.w1_EFD, module.w3_EFD, module.w2_EDF
    return [w for t in stacks for w in (t.to_local() if isinstance(t, DTensor) else t).unbind()]


class FusedGroupedExperts(GroupedExperts):
    """Rows that are sorted by expert."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        return seams.sorted_rows(x_RD, num_tokens_per_expert_E, _weights(self), ops.SWIGLU)


class _Experts(GroupedExperts):
    """Tokens as they are, and where each goes: called as a module, so that FSDP's hooks see it."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x: Tensor, ids: Tensor, p: Tensor, ep: Any) -> Tensor:
        return (experts if ep is None else partial(over_ranks, ep=ep))(x, ids, p, _weights(self), ops.SWIGLU, ops.LIST)


class FusedRoutedExperts(RoutedExperts):
    """Dispatch, experts and combine: a token travels once to each rank that has experts of it, and its sum is one of float32."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        mode: str = "exact"  # and what follows: of fusedmoe.distributed.ExpertParallel
        chunks: int = 1
        timeout: float | None = None

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._options = dict(mode=config.mode, chunks=config.chunks, timeout=config.timeout)
        self._ep: ExpertParallel | None = None

    def forward(self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor) -> Tensor:
        x, ids, p = (t.reshape(-1, t.shape[-1]) for t in (x_BLD, topk_expert_ids_BLK, topk_scores_BLK))
        return self.inner_experts(x, ids, p, self._ep).view(x_BLD.shape)

    def parallelize(self, parallel_dims: Any) -> None:
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None:  # torchtitan divides the gradients of experts itself, after their sum
            self._ep = ExpertParallel(mesh, self.inner_experts.num_experts, average=False, **self._options)


@override(target=GroupedExperts.Config, description="fusedmoe's experts", exact=True)  # type: ignore[untyped-decorator]
def grouped_experts(config: GroupedExperts.Config) -> GroupedExperts.Config:
    return derive(config, FusedGroupedExperts.Config)


@override(target=RoutedExperts.Config, description="fusedmoe's experts and exchange", exact=True)  # type: ignore[untyped-decorator]
def routed_experts(config: RoutedExperts.Config, **options: Any) -> RoutedExperts.Config:
    inner, dispatcher = type(config.inner_experts), type(config.token_dispatcher)
    if inner is not GroupedExperts.Config:
        raise NotImplementedError(f"inner_experts is a {inner.__qualname__}: fusedmoe has the SwiGLU of GroupedExperts")
    if dispatcher not in (LocalTokenDispatcher.Config, AllToAllTokenDispatcher.Config):
        raise NotImplementedError(f"token_dispatcher is a {dispatcher.__qualname__}: override grouped_experts to keep it")
    return derive(config, FusedRoutedExperts.Config, inner_experts=derive(config.inner_experts, _Experts.Config), **options)
