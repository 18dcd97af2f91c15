# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism on torch.distributed: the experts of a layer on several processes, tokens travel.

``fusedmoe.apply(model, expert_parallel=group)`` is all that a model needs. docs/parallel.md has the whole of it.
"""

from .experts import ExpertParallel, experts
from .shards import expert_parameters, load, load_state_dict, shard, state_dict, sync_gradients

__all__ = ["ExpertParallel", "expert_parameters", "experts", "load", "load_state_dict", "shard", "state_dict", "sync_gradients"]
