# SPDX-License-Identifier: Apache-2.0
"""LoRA on the experts with PEFT, trained by hand. The adapters are computed inside fusedmoe's kernels, W + BA is never made."""

import peft
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import fusedmoe

model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(
    vocab_size=1000, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, num_experts=16, num_experts_per_tok=4))  # fmt: skip

config = peft.LoraConfig(r=16, lora_alpha=32, target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
model = peft.get_peft_model(model, config)
fusedmoe.apply(model)  # before or after the adapters
model.print_trainable_parameters()

ids = torch.randint(1000, (4, 32))
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
for step in range(5):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  loss {loss.item():.4f}")
