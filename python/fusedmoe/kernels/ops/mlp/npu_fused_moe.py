# SPDX-License-Identifier: Apache-2.0
"""The classes of LLaMA-Factory's npu_fused_moe, with its names, argument orders and return types.

The functions compute on the device their tensors are on; only NpuFusedMoEKernel.apply asks for an NPU.
"""

from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from .... import _core, ops
from ....autograd import GmmFunction, HybridGmmFunction, experts, route
from ....integrations import layers
from ...base import DeviceType, register_kernel
from .fused_moe import MoEKernel

__all__ = ["GmmFunction", "HybridGmmFunction", "NpuFusedMoEKernel", "NpuMoeFused", "Qwen3NpuMoeFused", "kernel_moe_mapping"]


def _stacked_layer(module: nn.Module, transposed: bool) -> layers.Layer:
    """The Layer of stacked experts that carry no flags: [E,H,2I] and [E,I,H] (transposed), or v5's layout."""
    if "has_gate" in vars(module):
        return layers.layer_of(module)
    act = layers.gated_activation(module)
    if act is None:
        raise ValueError(f"{type(module).__name__}: the activation {getattr(module, 'act_fn', None)} is not one of fusedmoe's")
    return layers.Layer(act, ops.SKIP_E | (ops.TRANSPOSED if transposed else 0))


class NpuMoeFused:
    """Forwards of modules whose experts are stacked tensors."""

    @staticmethod
    def npu_moe_experts_forward(self: nn.Module, hidden_states: Tensor, routing_weights: Tensor, router_indices: Tensor) -> Tensor:
        """(B,S,H), weights (T,k), ids (T,k) -> (B,S,H); gate_up_proj [E,H,2I], down_proj [E,I,H]."""
        ids, p = (t.flatten(0, -2) for t in (router_indices, routing_weights))
        return layers.run(self, _stacked_layer(self, transposed=True), hidden_states, ids, p)

    @staticmethod
    def npu_moe_experts_v5_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T,H), ids (T,k), weights (T,k) -> (T,H); gate_up_proj [E,2I,H], down_proj [E,H,I]."""
        return layers.run(self, _stacked_layer(self, transposed=False), hidden_states, top_k_index, top_k_weights)

    @staticmethod
    def npu_moe_sparse_block_forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        """(B,S,H) -> (B,S,H), the tensor alone: softmax, top-k, renormalised, experts."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        ids, p = route(self.gate(x), self.top_k, renormalize=True)
        return NpuMoeFused.npu_moe_experts_forward(self.experts, hidden_states, p.to(x.dtype), ids)


class Qwen3NpuMoeFused:
    """Forwards of modules whose experts are Linear layers of their own."""

    @staticmethod
    def qwen3moe_sparse_moe_block_forward(self: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """(B,S,H) -> (states, router logits (T,E))."""
        w = layers.list_weights(self)
        act = None if w is None else layers.gated_activation(self.experts[0])
        if w is None or act is None:
            raise ValueError(f"{type(self).__name__}: the experts' Linear layers are wrapped, quantized or have a bias, or their "
                             "activation is unknown; reading their weights would give a wrong result")  # fmt: skip
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.gate(x)
        ids, p = route(logits, self.top_k, renormalize=bool(self.norm_topk_prob))
        return experts(x, ids, p.to(x.dtype), w[0], act, ops.LIST, lora=w[1]).view(hidden_states.shape), logits


# What the original would patch, for those who read it. NpuFusedMoEKernel goes by structure and patches more models.
kernel_moe_mapping: dict[str, dict[str, Callable]]
if find_spec("transformers") and version("transformers").startswith("4."):
    kernel_moe_mapping = {
        "Qwen3MoeForCausalLM": {"Qwen3MoeSparseMoeBlock": Qwen3NpuMoeFused.qwen3moe_sparse_moe_block_forward},
        "Qwen3VLMoeForConditionalGeneration": {"Qwen3VLMoeTextExperts": NpuMoeFused.npu_moe_experts_forward,
                                               "Qwen3VLMoeTextSparseMoeBlock": NpuMoeFused.npu_moe_sparse_block_forward},
    }  # fmt: skip
else:
    kernel_moe_mapping = {model: {experts: NpuMoeFused.npu_moe_experts_v5_forward} for model, experts in (
        ("Qwen3MoeForCausalLM", "Qwen3MoeExperts"), ("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeTextExperts"),
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeExperts"), ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeExperts"))}  # fmt: skip


@register_kernel
class NpuFusedMoEKernel(MoEKernel):
    """For a machine with an Ascend NPU."""

    _kernel_id = "npu_fused_moe"
    _device = DeviceType.NPU

    @classmethod
    def missing(cls, model: Any = None) -> str | None:
        if problem := super().missing(model):
            cann = next(line for line in _core.info().splitlines() if line.startswith("ascend"))
            problem += f". Found: torch_npu is {'' if find_spec('torch_npu') else 'not '}installed; {cann}"
        return problem
