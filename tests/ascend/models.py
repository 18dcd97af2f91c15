# SPDX-License-Identifier: Apache-2.0
"""Tiny models of either transformers, and a few steps of training."""

from __future__ import annotations

import npu  # before torch
import pytest
import torch


def tiny(kind: str):
    import transformers

    torch.manual_seed(0)
    text = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
    )
    if kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**text, architectures=["Qwen3MoeForCausalLM"])
        config._attn_implementation = "eager"
        return transformers.Qwen3MoeForCausalLM(config)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    text["rope_parameters" if int(transformers.__version__[0]) >= 5 else "rope_scaling"] = rope
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, deepstack_visual_indexes=[0]
    )
    config = transformers.Qwen3VLMoeConfig(
        text_config=text, vision_config=vision, architectures=["Qwen3VLMoeForConditionalGeneration"]
    )
    for c in (config, config.text_config, config.vision_config):
        c._attn_implementation = "eager"
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def train(model, ids: torch.Tensor, steps: int = 2) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trains_alike(cpu, dev) -> None:
    """Two steps of a model on the CPU, and of its copy on the NPU by our backend."""
    ids = torch.randint(0, 60, (2, 10), generator=torch.Generator().manual_seed(3))
    want = train(cpu, ids)
    npu.reset()
    got = train(dev, ids.npu())
    assert npu.get("aclnnMoeInitRoutingV3") >= 4, "the backend was not used"
    assert got == pytest.approx(want, rel=1e-5)
    for p, q in zip(cpu.parameters(), dev.parameters(), strict=True):
        assert (p.detach() - q.detach().cpu()).abs().max() < 2e-5
