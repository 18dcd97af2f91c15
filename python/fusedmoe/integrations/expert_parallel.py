# SPDX-License-Identifier: Apache-2.0
"""transformers' own expert parallelism with fusedmoe's exchange: ``DistributedConfig(ep_size=n, ep_implementation="fusedmoe")``.

transformers 5.23 and newer. Its plan cuts the experts and reaches them through an EPImplementation; ours sends a token once to each
rank that has experts of it, and has the sums of one process.
"""

import sys
from functools import cache
from typing import Any

from torch import Tensor


@cache
def implementation() -> type:
    """The class, made where transformers has what it derives from."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from transformers.distributed.expert_parallel import EPImplementation

    from ..distributed import ExpertParallel

    class FusedMoeEP(EPImplementation):
        """Ranks that share a batch (TP) send disjoint parts of it, and gather the results."""

        def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self.experts = experts
            # The gradients of experts are sums over ranks, as in transformers' own implementations.
            vars(experts)["_fmoe_ep"] = ExpertParallel(ep_mesh, self.num_local_experts * ep_mesh.size(), average=False)

        def _part(self, t: Tensor) -> Tensor:
            whole = DTensor.from_local(t, self.tp_mesh, [Replicate()], run_check=False)
            return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            from .transformers import chosen

            if chosen(self.experts) is None:
                raise ValueError(f"{type(self.experts).__name__}: ep_implementation is fusedmoe, experts_implementation is "
                                 f"{self.experts.config._experts_implementation!r}: both are needed")  # fmt: skip
            if self.tp_mesh.size() == 1:
                return self.experts_forward(hidden_states, top_k_index, top_k_weights)
            mine = [self._part(t) for t in (hidden_states, top_k_index, top_k_weights)]
            out, shape = self.experts_forward(*mine), hidden_states.shape
            return DTensor.from_local(out.contiguous(), self.tp_mesh, [Shard(0)], shape=shape, stride=(shape[1], 1)).full_tensor()

    return FusedMoeEP


def register(name: str) -> None:
    """Put it into transformers' table, where there is one."""
    module = sys.modules.get("transformers.distributed.expert_parallel")
    interface = getattr(module, "EPImplementationInterface", None)
    if interface is not None:
        interface.register(name, lambda *args: implementation()(*args))
