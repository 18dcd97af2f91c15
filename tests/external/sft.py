# SPDX-License-Identifier: Apache-2.0
"""Five steps of TRL's SFTTrainer on a tiny Qwen3-MoE: fusedmoe's losses must be those of the model's own experts.

    python tests/external/sft.py        needs trl (and with it datasets, accelerate) and peft

All weights trained, and LoRA on attention and experts; LoRA on experts that QuantConfig("nf4") quantised while they were loaded, beside the
same with decoded experts. Ends with an error when losses are apart, or ours was not called.
"""

import collections
import sys
import tempfile

import datasets
import peft
import tokenizers
import torch
import transformers
import trl

import fusedmoe
from fusedmoe import ops
from fusedmoe.quant import operators

TEXTS = ["the cat sat on a mat and the dog ran in fog", "the sun shone over a hill while the cat sat", "a dog ran on the hill"] * 8
WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", *sorted({word for text in TEXTS for word in text.split()})]
LORA = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
CONFIG = dict(
    vocab_size=len(WORDS), hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def quantised(decoded: bool) -> torch.nn.Module:
    """The model with NF4 experts, as from_pretrained makes it; or with the weights that these stand for."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**CONFIG)).save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=fusedmoe.QuantConfig("nf4"))
    assert all(isinstance(p, fusedmoe.QuantTensor) for n, p in model.named_parameters() if ".experts." in n)
    return fusedmoe.apply(fusedmoe.dequantize(model)) if decoded else model


def losses(implementation: str, lora: bool, model: torch.nn.Module | None = None) -> list[float]:
    """The loss of each step."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    torch.manual_seed(0)
    if model is None:
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**CONFIG))
        model.set_experts_implementation(implementation)
    with tempfile.TemporaryDirectory() as folder:
        how = trl.SFTConfig(output_dir=folder, max_steps=5, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, bf16=False,
                            use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True)  # fmt: skip
        trainer = trl.SFTTrainer(model=model, args=how, train_dataset=datasets.Dataset.from_dict({"text": TEXTS}),
                                 processing_class=tokenizer, peft_config=peft.LoraConfig(**LORA) if lora else None)  # fmt: skip
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> int:
    calls, real = collections.Counter(), ops.call

    def counted(op, *args):
        if op is ops.experts_backward:
            calls["with adapters" if args[7] & ops.LORA1 and args[7] & ops.LORA2 else "without"] += 1
        elif op is operators.experts_coded_backward:
            calls["on codes"] += 1
        return real(op, *args)

    ops.call = counted
    print(f"trl {trl.__version__}, transformers {transformers.__version__}, peft {peft.__version__}, torch {torch.__version__}")
    bad = 0
    for lora in (False, True):
        own, calls_before = losses("grouped_mm", lora), dict(calls)
        ours = losses("fusedmoe", lora)
        apart = max(abs(float(a) - float(b)) for a, b in zip(own, ours, strict=True))
        new = {kind: n - calls_before.get(kind, 0) for kind, n in calls.items() if n != calls_before.get(kind, 0)}
        print(f"{'LoRA' if lora else 'all weights'}: losses {ours[0]} to {ours[-1]}, apart by {apart:.1e}; backward calls {new}")
        bad += apart > 1e-4 or new != {"with adapters" if lora else "without": 10}
    decoded, ours = (losses("fusedmoe", True, quantised(decoded)) for decoded in (True, False))
    print(f"LoRA on nf4: losses {ours[0]} to {ours[-1]}, decoded {decoded[0]} to {decoded[-1]}; backward calls {calls['on codes']}")
    return bad + (ours != decoded) + (calls["on codes"] != 10)


if __name__ == "__main__":
    sys.exit(main())
