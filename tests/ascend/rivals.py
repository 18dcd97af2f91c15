# SPDX-License-Identifier: Apache-2.0
"""The same experts layer on NPU tensors, by LLaMA-Factory's original kernel and by fusedmoe. Import npu first."""

from __future__ import annotations

from types import SimpleNamespace

import torch


def original():
    """LLaMA-Factory 0.9.5's own module, or None where it is not installed."""
    try:
        from llamafactory.v1.plugins.model_plugins.kernels.ops.mlp import npu_fused_moe
    except ImportError:
        return None
    return npu_fused_moe


class Layer:
    """Weights [E,2I,H] and [E,H,I], tokens, ids and routing weights, on the device; ids are int64, p in x's dtype."""

    def __init__(self, T: int, H: int, I: int, E: int, k: int, dtype: torch.dtype, seed: int = 0, fill: bool = True):
        self.sizes, self.dtype = (T, H, I, E, k), dtype
        g = torch.Generator().manual_seed(seed)
        ids = torch.rand(T, E, generator=g).topk(k, -1).indices
        if fill:
            x, dout = (torch.randn(T, H, generator=g) for _ in range(2))
            w1, w2 = torch.randn(E, 2 * I, H, generator=g) / H**0.5, torch.randn(E, H, I, generator=g) / I**0.5
            made = [t.to(dtype).npu() for t in (x, torch.rand(T, k, generator=g), w1, w2, dout)]
        else:  # only counted
            made = [
                torch.empty(s, dtype=dtype, device="npu") for s in ((T, H), (T, k), (E, 2 * I, H), (E, H, I), (T, H))
            ]
        self.x, self.p, self.w1, self.w2 = (t.requires_grad_() for t in made[:4])
        self.ids, self.dout = ids.npu(), made[4]

    def leaves(self) -> list[torch.Tensor]:
        return [self.x, self.p, self.w1, self.w2]

    def clear(self) -> None:
        for t in self.leaves():
            t.grad = None


def forward_original(layer: Layer) -> torch.Tensor:
    T, H, I, E, k = layer.sizes
    module = SimpleNamespace(hidden_dim=H, num_experts=E, gate_up_proj=layer.w1, down_proj=layer.w2)
    return original().NpuMoeFused.npu_moe_experts_v5_forward(module, layer.x, layer.ids, layer.p)


def forward_ours(layer: Layer) -> torch.Tensor:
    import fusedmoe

    return fusedmoe.experts(layer.x, layer.ids, layer.p, [layer.w1, layer.w2])


class Block(torch.nn.Module):
    """The Qwen3 block of transformers 4: a gate and a list of experts with three Linear layers each."""

    def __init__(self, H: int, I: int, E: int, k: int):
        super().__init__()
        self.gate = torch.nn.Linear(H, E, bias=False)
        self.top_k, self.norm_topk_prob, self.num_experts = k, True, E
        self.experts = torch.nn.ModuleList(Expert(H, I) for _ in range(E))


class Expert(torch.nn.Module):
    def __init__(self, H: int, I: int):
        super().__init__()
        self.gate_proj, self.up_proj = torch.nn.Linear(H, I, bias=False), torch.nn.Linear(H, I, bias=False)
        self.down_proj = torch.nn.Linear(I, H, bias=False)
        self.act_fn = torch.nn.SiLU()
