# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning with TRL, LoRA on the experts, on a tiny model and tokenizer that are made here."""

import sys

try:
    import trl
except ImportError:
    sys.exit(print("trl is not installed", file=sys.stderr) or 77)
import datasets
import peft
import tokenizers
import transformers

TEXTS = ["the cat sat on a mat", "the sun shone over a hill", "a dog ran on the hill"] * 8
words = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *sorted({w for t in TEXTS for w in t.split()})])}
splitter = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
splitter.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=splitter, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
    vocab_size=len(words), hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, num_experts=8, num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=1))  # fmt: skip
model.set_experts_implementation("fusedmoe")  # by name: model_init_kwargs={"experts_implementation": "fusedmoe"} in SFTConfig

trainer = trl.SFTTrainer(
    model=model, processing_class=tokenizer, train_dataset=datasets.Dataset.from_dict({"text": TEXTS}),
    peft_config=peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
    args=trl.SFTConfig(output_dir="out", max_steps=5, logging_steps=1, learning_rate=1e-2, bf16=False, use_cpu=True, report_to=[],
                       save_strategy="no"),
)  # fmt: skip
trainer.train()
