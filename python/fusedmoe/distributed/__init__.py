# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism on torch.distributed: the experts of a layer on several processes, tokens travel.

``fusedmoe.apply(model, expert_parallel=group)`` is all that a model needs. docs/parallel.md has the whole of it.
"""

from typing import Any

from .experts import ExpertParallel, experts
from .gradients import clip_grad_norm_, sync_gradients, sync_replicas
from .shards import expert_parameters, load, load_state_dict, shard, state_dict

__all__ = ["ExpertParallel", "clip_grad_norm_", "expert_parameters", "experts", "load", "load_optimizer", "load_state_dict", "shard",
           "sharded_state_dict", "state_dict", "sync_gradients", "sync_replicas"]  # fmt: skip


def __getattr__(name: str) -> Any:  # torch.distributed.checkpoint takes long to import
    if name in ("load_optimizer", "sharded_state_dict"):
        from . import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
