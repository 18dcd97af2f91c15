# SPDX-License-Identifier: Apache-2.0
"""Small models and the measures the tests share. Runs under transformers v4 and v5."""

from __future__ import annotations

import copy

import torch
import transformers

V5 = int(transformers.__version__.split(".")[0]) >= 5


def rel(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative L2 distance of a from b."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-30)) if b.numel() else 0.0


TEXT = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, num_experts=8, num_local_experts=8, num_experts_per_tok=2,
    decoder_sparse_step=1, norm_topk_prob=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MLA = dict(
    num_key_value_heads=4, first_k_dense_replace=0, n_routed_experts=8, n_group=2, topk_group=1, kv_lora_rank=16, q_lora_rank=32,
    qk_rope_head_dim=16, v_head_dim=32, qk_nope_head_dim=32, n_shared_experts=1,
)  # fmt: skip
FAMILIES = {
    "Qwen3Moe": {}, "Qwen2Moe": dict(shared_expert_intermediate_size=24), "Mixtral": {}, "Olmoe": {}, "GptOss": {},
    "DeepseekV3": dict(MLA, head_dim=16), "DeepseekV2": dict(MLA, head_dim=16, topk_method="greedy"),
    "Glm4Moe": dict(first_k_dense_replace=0, n_routed_experts=8, n_group=1, topk_group=1, n_shared_experts=1),
    "GraniteMoe": {}, "Aria": {}, "Llama4": dict(intermediate_size_mlp=48, interleave_moe_layer_step=1, num_experts_per_tok=1),
    "NemotronH": dict(n_routed_experts=8, n_shared_experts=1, n_group=1, topk_group=1, moe_shared_expert_intermediate_size=16,
                      layers_block_type=["attention", "moe"], mamba_num_heads=4, mamba_head_dim=16),
    "JetMoe": dict(num_layers=2, num_attention_heads=2, kv_channels=16, num_key_value_heads=1),
    "LongcatFlash": dict(MLA, head_dim=16, num_layers=2, ffn_hidden_size=48, expert_ffn_hidden_size=16, moe_topk=2, zero_expert_num=3),
}  # fmt: skip


def tiny(family: str, **extra):
    """A model of a family with a few thousand parameters, in float32, on its own experts."""
    torch.manual_seed(1)
    if family == "Qwen3VLMoe":
        text = dict(TEXT)
        text["rope_scaling" if not V5 else "rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
        vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, patch_size=4,
                      spatial_merge_size=1, temporal_patch_size=1, num_position_embeddings=16, deepstack_visual_indexes=[0])  # fmt: skip
        config = transformers.Qwen3VLMoeConfig(text_config={**text, **extra}, vision_config=vision)
        model = transformers.Qwen3VLMoeForConditionalGeneration(config)
    else:
        parts = {"Llama4": ("TextConfig", "ForCausalLM"), "Aria": ("TextConfig", "TextForCausalLM")}.get(family, ("Config", "ForCausalLM"))
        config, model = (getattr(transformers, family + part) for part in parts)
        model = model(config(**{**TEXT, **FAMILIES[family], **extra}))
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.08)
    if V5:
        set_implementation(model, "eager")
    return model


def set_implementation(model, name: str) -> None:
    """The same as set_experts_implementation, for every version and name."""
    for module in model.modules():
        if hasattr(module, "_apply_gate"):
            module.config._experts_implementation = name


def step(model, ids: torch.Tensor, **kwargs):
    """Loss, logits and every gradient (zeros where there is none) of one batch."""
    model.zero_grad(set_to_none=True)
    out = model(input_ids=ids, labels=ids, **kwargs)
    out.loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return out.loss.detach(), out.logits.detach(), grads


def worst(a, b) -> float:
    """The largest relative error of logits and gradients of two steps; a gradient counts against the largest of its kind."""
    scale = max(float(g.double().norm()) for g in b[2].values())
    grads = max(float((a[2][n].double() - g.double()).norm()) / max(float(g.double().norm()), 1e-3 * scale) for n, g in b[2].items())
    return max(rel(a[1], b[1]), grads)


def train(model, steps: int, lr: float = 1e-2) -> list[float]:
    """The loss curve of a copy of the model on a fixed stream of tokens."""
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    g = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(steps):
        ids = torch.randint(3, 40, (2, 16), generator=g)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
