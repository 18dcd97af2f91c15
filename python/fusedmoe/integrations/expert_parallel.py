# SPDX-License-Identifier: Apache-2.0
"""transformers' own expert parallelism with fusedmoe's exchange: ``DistributedConfig(ep_size=n, ep_implementation="fusedmoe")``.

transformers 5.23 and newer; with 5.22 ``experts_implementation="fusedmoe"`` is enough. Its plan cuts the experts and reaches them through
an EPImplementation; ours sends a token once to each rank that has experts of it, and has the sums of one process.
FMOE_EXPERT_PARALLEL=n in the environment does the same to a script that is not changed.
"""

import functools
import os
import sys
from functools import cache
from typing import Any

from torch import Tensor


@cache
def implementation() -> type:
    """The class, made where transformers has what it derives from."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from transformers.distributed.expert_parallel import AllToAllEP, EPImplementation

    from ..distributed import ExpertParallel
    from . import layers

    class FusedMoeEP(EPImplementation):
        """Ranks that share a batch (TP) send disjoint parts of it, and gather the results. Where the fused layer does not compute the
        experts, transformers' AllToAllEP carries the tokens."""

        def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
            super().__init__(experts, ep_mesh, tp_mesh)
            self.experts, self.theirs, layer = experts, None, layers.look_at(experts)
            if layer.path != "fused":
                layers.say_once(f"{type(experts).__name__}: {layer.why}: its tokens are carried by transformers' AllToAllEP")
                self.theirs = AllToAllEP(experts, ep_mesh, tp_mesh)
                return
            # The gradients of experts are sums over ranks, as in transformers' own implementations.
            vars(experts)["_fmoe_ep"] = ExpertParallel(ep_mesh, self.num_local_experts * ep_mesh.size(), average=False)

        def _part(self, t: Tensor) -> Tensor:
            whole = DTensor.from_local(t, self.tp_mesh, [Replicate()], run_check=False)
            return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()

        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            from .transformers import chosen

            if self.theirs is not None:
                return self.theirs(hidden_states, top_k_index, top_k_weights)
            if chosen(self.experts) is None:
                raise ValueError(f"{type(self.experts).__name__}: ep_implementation is fusedmoe, experts_implementation is "
                                 f"{self.experts.config._experts_implementation!r}: both are needed")  # fmt: skip
            if self.tp_mesh.size() == 1:
                return self.experts_forward(hidden_states, top_k_index, top_k_weights)
            mine = [self._part(t) for t in (hidden_states, top_k_index, top_k_weights)]
            out, shape = self.experts_forward(*mine), hidden_states.shape
            return DTensor.from_local(out.contiguous(), self.tp_mesh, [Shard(0)], shape=shape, stride=(shape[1], 1)).full_tensor()

    return FusedMoeEP


@cache
def _style() -> Any:
    """Of 5.22, which has no such table: its rule for experts that tokens are sent to, with ours in its place where fusedmoe is chosen."""
    from transformers.distributed.expert_parallel import EpDispatchExpertsParallel

    from ..distributed import ExpertParallel
    from . import layers
    from .transformers import chosen

    base: Any = EpDispatchExpertsParallel

    class FusedMoeStyle(base):
        def install_forward(self, module: Any, ep_mesh: Any, *, tp_mesh: Any = None) -> Any:
            own = module.forward
            super().install_forward(module, ep_mesh, tp_mesh=tp_mesh)
            theirs, layer = module.forward, layers.look_at(module)
            if layer.path != "fused":
                return module
            vars(module)["_fmoe_ep"] = ExpertParallel(ep_mesh, module.num_experts * ep_mesh.size(), average=False)

            def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
                if chosen(module) is None:
                    return theirs(hidden_states, top_k_index, top_k_weights)
                given, T = (hidden_states, top_k_index, top_k_weights), hidden_states.size(0)
                given, _ = self.transform_inputs_pre_forward(module, given, {}, ep_mesh, tp_mesh=tp_mesh)
                with self.context_around_forward(module, ep_mesh):
                    out = own(*given)
                return self.transform_output_post_forward(module, out, ep_mesh, tp_mesh=tp_mesh, num_tokens=T)

            module.forward = forward
            return module

    return FusedMoeStyle()


def _module() -> Any:
    """transformers' module, where it sends tokens to experts in a way that we know."""
    module = sys.modules.get("transformers.distributed.expert_parallel")
    return module if hasattr(module, "EPImplementationInterface") or hasattr(module, "EpDispatchExpertsParallel") else None


def register(name: str) -> None:
    """Put it into transformers' table, where there is one; else in the place of its rule."""
    module = _module()
    if hasattr(module, "EPImplementationInterface"):
        module.EPImplementationInterface.register(name, lambda *args: implementation()(*args))
    elif module is not None and "ep_dispatch_experts" in module.ALL_PARALLEL_STYLES:
        module.ALL_PARALLEL_STYLES.register("ep_dispatch_experts", _style())
    modeling = sys.modules.get("transformers.modeling_utils")
    if os.environ.get("FMOE_EXPERT_PARALLEL") and hasattr(modeling, "PreTrainedModel"):
        _spread_what_is_loaded(modeling.PreTrainedModel, name)


def _ranks() -> int:
    """How many processes share the experts: FMOE_EXPERT_PARALLEL, of WORLD_SIZE."""
    asked, world = os.environ["FMOE_EXPERT_PARALLEL"], int(os.environ.get("WORLD_SIZE", "1"))
    if not asked.isdigit() or not 0 < int(asked) <= world or world % int(asked):
        raise ValueError(f"FMOE_EXPERT_PARALLEL is {asked!r}, WORLD_SIZE {world}: expected a divisor of the number of processes")
    return int(asked)


def _spread_what_is_loaded(cls: Any, name: str) -> None:
    """from_pretrained of every model as if it had been given the configuration below: for scripts that cannot be changed."""
    own = cls.from_pretrained
    if hasattr(own, "_fmoe_own"):
        return

    def from_pretrained(model: type, *args: Any, **kwargs: Any) -> Any:
        n = _ranks()
        if n > 1 and kwargs.get("distributed_config") is None:
            if _module() is None:
                raise NotImplementedError("FMOE_EXPERT_PARALLEL needs transformers 5.22; else fusedmoe.apply(model, expert_parallel=...)")
            from transformers.distributed import DistributedConfig

            how = {"ep_implementation": name} if "ep_implementation" in DistributedConfig.__dataclass_fields__ else {}
            kwargs["distributed_config"] = DistributedConfig(fsdp_size=int(os.environ["WORLD_SIZE"]), ep_size=n, **how)
            kwargs["experts_implementation"] = kwargs.get("experts_implementation") or name
        return own.__func__(model, *args, **kwargs)

    from_pretrained._fmoe_own = own
    cls.from_pretrained = classmethod(functools.wraps(own.__func__)(from_pretrained))
