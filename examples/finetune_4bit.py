# SPDX-License-Identifier: Apache-2.0
"""QLoRA of a MoE: its experts become NF4 while they are loaded, adapters train on them, and the result generates.

    python examples/finetune_4bit.py [Qwen/Qwen3-30B-A3B] [folder for the adapter]

Without a name: a small model of the same class, made on the spot, on any machine.
"""

import sys
import tempfile

import peft
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import fusedmoe

device, small = "cuda" if torch.cuda.is_available() else "cpu", len(sys.argv) < 2
folder = tempfile.mkdtemp() if small else ""
name, out = (folder, f"{folder}/adapter") if small else (sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "adapter")
if small:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(
        vocab_size=1000, hidden_size=256, moe_intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, num_experts=32, num_experts_per_tok=4), dtype=torch.bfloat16).save_pretrained(folder)  # fmt: skip

# Stack by stack: the model in 16 bits never exists. linears=BitsAndBytesConfig(load_in_4bit=True) has attention in 4 bits too.
model = AutoModelForCausalLM.from_pretrained(name, quantization_config=fusedmoe.QuantConfig("nf4"), dtype=torch.bfloat16, device_map=device)
print(fusedmoe.describe(model).splitlines()[-1])

model.gradient_checkpointing_enable({"use_reentrant": False})
model.enable_input_require_grads()
config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
                         target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])  # fmt: skip
model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)  # adapters in bfloat16
model.print_trainable_parameters()


def loss_of(ids: torch.Tensor, chunk: int = 256) -> torch.Tensor:
    """Of the next tokens. The logits of 2048 tokens take 1.2 GiB in float32, three times over: they are made a chunk at a time."""
    base = model.get_base_model()
    hidden, labels = base.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    part = lambda x, y: torch.nn.functional.cross_entropy(base.lm_head(x).float(), y, reduction="sum")  # noqa: E731
    return sum(checkpoint(part, x, y, use_reentrant=False) for x, y in zip(hidden.split(chunk), labels.split(chunk))) / len(labels)


tokens = torch.randint(model.config.vocab_size, (1, 2048 if not small else 256), device=device)  # yours come here
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
for step in range(5):
    loss = loss_of(tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  loss {loss.item():.4f}")
if device == "cuda":
    print(f"peak {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB")

model.save_pretrained(out)  # the adapter alone
model.eval()
print("generated:", model.generate(input_ids=tokens[:, :8], max_new_tokens=8, do_sample=False)[0, 8:].tolist())
