# SPDX-License-Identifier: Apache-2.0
"""LLaMA-Factory's own function finds fusedmoe's kernels; without LLaMA-Factory the same names are in fusedmoe.kernels."""

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

try:
    from llamafactory.v1.plugins.model_plugins.kernels.interface import apply_kernel
except ImportError:
    from fusedmoe.kernels import apply_kernel

model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(
    vocab_size=1000, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, num_experts=16, num_experts_per_tok=4))  # fmt: skip
apply_kernel("fused_moe", model=model)  # in place; on an NPU "npu_fused_moe", LLaMA-Factory's own name

ids = torch.randint(1000, (2, 16))
loss = model(input_ids=ids, labels=ids).loss
loss.backward()
print("kernel from", apply_kernel.__module__, "- loss", loss.item())
