# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model on fusedmoe: python huggingface.py [name or folder of a model]. Without one: a tiny random Qwen3-MoE."""

import sys

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import fusedmoe

if len(sys.argv) > 1:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
else:
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(
        vocab_size=1000, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, num_experts=16, num_experts_per_tok=4))  # fmt: skip

ids = torch.randint(1000, (1, 12))
before = model(input_ids=ids).logits
model = fusedmoe.apply(model)  # fusedmoe.unapply(model) puts everything back
after = model(input_ids=ids).logits
print("largest difference of the logits:", (after - before).abs().max().item())

print("generated:", model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 12:].tolist())

loss = model(input_ids=ids, labels=ids).loss  # and it trains
loss.backward()
print("loss:", loss.item())
