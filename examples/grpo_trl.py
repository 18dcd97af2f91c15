# SPDX-License-Identifier: Apache-2.0
"""TRL's GRPO with recorded routing: the trainer sends every token to the experts that `generate` sent it to. On a tiny model made here."""

import sys

try:
    import trl
except ImportError:
    sys.exit(print("trl is not installed", file=sys.stderr) or 77)
import datasets
import tokenizers
import torch
import transformers

import fusedmoe
from fusedmoe import routing


class ReplayTrainer(trl.GRPOTrainer):
    """Three methods of TRL 1.16, which are its own and may change: where it generates, what it keeps of that, and where it trains."""

    def _generate_single_turn(self, *args, **kwargs):
        with routing.record(self.model) as self.seen:
            return super()._generate_single_turn(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        out = super()._generate_and_score_completions(inputs)
        ids = self.seen.sequences(len(out["prompt_ids"]))
        missing = out["prompt_ids"].shape[1] + out["completion_ids"].shape[1] - ids.shape[1]  # 1: the last token of the longest
        out["routed"] = torch.cat((ids, ids.new_full((len(ids), missing, *ids.shape[2:]), -1)), 1)
        return out  # shuffled and split by TRL, as everything else in it

    def _compute_loss(self, model, inputs):
        with routing.record(model) as live, routing.replay(model, inputs["routed"]):
            loss = super()._compute_loss(model, inputs)
        known = inputs["routed"].flatten(0, 1)
        assert torch.equal(live.ids[known >= 0], known[known >= 0]), "the trainer went to the same experts"
        return loss


WORDS = ["<pad>", "<eos>", "<unk>", "one", "two", "three", "four", "cat", "dog", "sun", "hill"]
splitter = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
splitter.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=splitter, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
torch.manual_seed(0)
model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
    vocab_size=len(WORDS), hidden_size=32, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, num_experts=8, num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=1))  # fmt: skip
trainer = ReplayTrainer(
    model=fusedmoe.apply(model), processing_class=tokenizer,
    reward_funcs=lambda completions, **_: [float(c.count("cat")) for c in completions],
    train_dataset=datasets.Dataset.from_dict({"prompt": ["one two", "three", "four one dog", "sun hill"] * 4}),
    args=trl.GRPOConfig(output_dir="out", max_steps=4, logging_steps=1, learning_rate=1e-2, bf16=False, use_cpu=True, report_to=[],
                        save_strategy="no", per_device_train_batch_size=8, num_generations=4, max_completion_length=8,
                        gradient_accumulation_steps=2, gradient_checkpointing=True),
)  # fmt: skip
trainer.train()
print("every token went to the experts of its rollout")
