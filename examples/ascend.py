# SPDX-License-Identifier: Apache-2.0
"""A model on an Ascend NPU; on a machine without one the same script runs on the CPU."""

import importlib.util

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import fusedmoe
from fusedmoe.kernels import apply_kernel

if importlib.util.find_spec("torch_npu"):
    import torch_npu  # noqa: F401  (brings the device "npu")
device = "npu" if hasattr(torch, "npu") and torch.npu.is_available() else "cpu"
print(fusedmoe.info())  # what this machine has: CANN, chip and operator versions, or what is missing

config = Qwen3MoeConfig(
    vocab_size=1000, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, num_experts=16, num_experts_per_tok=4)  # fmt: skip
model = AutoModelForCausalLM.from_config(config).to(device)
model = apply_kernel("npu_fused_moe" if device == "npu" else "fused_moe", model=model)

ids = torch.randint(1000, (2, 16), device=device)
loss = model(input_ids=ids, labels=ids).loss
loss.backward()
print("device", device, "loss", loss.item())
