# SPDX-License-Identifier: Apache-2.0
"""GRPO on a tiny MoE model: a rollout whose routing is recorded, in bfloat16, and a trainer in float32 that replays it, or does not.

    python examples/grpo.py [--steps 6] [--csv kl.csv]

It prints the reward, the KL divergence of the trainer from the rollout (exact, over the vocabulary, a token) and the share of tokens and
layers in which the two chose other experts; last, a rollout in float32 without replay. In the place of `generate` there may be vLLM or
SGLang: routing.from_vllm, routing.from_sglang.
"""

import argparse
import copy
import csv

import torch
import transformers

import fusedmoe
from fusedmoe import routing

GROUP, PROMPTS, NEW = 8, 4, 24


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, moe_intermediate_size=64, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True, pad_token_id=0, bos_token_id=1,
        eos_token_id=None)  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    for name, p in model.named_parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.3 if "lm_head" in name else 0.15)
    return fusedmoe.apply(model)


def rollout(engine: torch.nn.Module, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [B, S], log-probabilities of the vocabulary for each new one, and the experts of each token [B, S, L, k]."""
    with routing.record(engine) as seen, torch.no_grad():
        out = engine.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=NEW, output_logits=True,
                              return_dict_in_generate=True)  # fmt: skip
    ids = seen.sequences(len(prompts))
    ids = torch.cat((ids, ids.new_full((len(ids), 1, *ids.shape[2:]), -1)), 1)  # the last token has not been through the engine
    return out.sequences, torch.stack(out.logits, 1).float().log_softmax(-1), ids


def train(dtype: str, replayed: bool, steps: int) -> list[dict]:
    model, rows = make().train(), []
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    g = torch.Generator().manual_seed(1)
    for step in range(steps):
        engine = fusedmoe.apply(copy.deepcopy(model).to(getattr(torch, dtype)).eval())
        engine.gradient_checkpointing_disable()
        torch.manual_seed(step)
        prompts = torch.randint(3, 64, (PROMPTS, 4), generator=g).repeat_interleave(GROUP, 0)
        tokens, old, ids = rollout(engine, prompts)
        new = tokens[:, prompts.shape[1] :]
        reward = (new % 2 == 0).float().mean(1)  # even numbers are good
        groups = reward.view(PROMPTS, GROUP)
        advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        known = ids if replayed else torch.full_like(ids, -1)  # rows of -1: the trainer routes by itself
        with routing.record(model) as seen, routing.replay(model, known):
            logits = model(input_ids=tokens, use_cache=False).logits[:, prompts.shape[1] - 1 : -1]
        live = logits.log_softmax(-1)
        pick = lambda t, new=new: t.gather(-1, new.unsqueeze(-1)).squeeze(-1)
        ratio = (pick(live) - pick(old)).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        optimizer.zero_grad()
        loss.backward()  # outside of the context, and what is checkpointed is recomputed with the same experts
        optimizer.step()
        before, after = (t.detach().double().log_softmax(-1) for t in (old, live))
        kl = float((before.exp() * (before - after)).sum(-1).mean())
        chosen = seen.ids.view(ids.shape)[:, :-1].sort(-1).values  # the model's one forward; recomputation is not recorded
        other = float((chosen != ids[:, :-1].sort(-1).values).any(-1).float().mean())
        way = dict(rollout=dtype, replay="yes" if replayed else "no", step=step)
        rows.append(dict(**way, reward=float(reward.mean()), kl=kl, other_experts=other))
        print("  ".join(f"{n} {v:.3g}" if isinstance(v, float) else f"{n} {v}" for n, v in rows[-1].items()))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--csv", help="write the numbers there")
    args = parser.parse_args()
    ways = [train(*way, args.steps) for way in (("bfloat16", False), ("bfloat16", True), ("float32", False))]
    native, replayed, same = (sum(row["kl"] for row in rows) / args.steps for rows in ways)
    print(f"KL between rollout and trainer, mean: {native:.2g} without replay, {replayed:.2g} with it; in one dtype, without: {same:.2g}")
    if args.csv:
        rows = [row for way in ways for row in way]
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows({n: f"{v:.4g}" if isinstance(v, float) else v for n, v in row.items()} for row in rows)


if __name__ == "__main__":
    main()
