# SPDX-License-Identifier: Apache-2.0
"""LoRA on the experts of a Qwen3-MoE: a training step with PEFT's own computation and with fusedmoe, side by side.

    python bench/lora.py [--layers 2] [--H 1024] [--I 512] [--E 32] [--k 4] [--T 512] [--rank 16] [--dtype float32] [--checkpoint 0]

Each way runs in a process of its own, on the same random model, adapters and batches: milliseconds a step (median), and memory as
the system counts it (resident, peak): of the whole process, without what Python and the imports take, and what the steps add to the
model and its adapters. Losses on one batch must fall alike. --checkpoint 1: with gradient checkpointing.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

WAYS = {"eager": "peft, eager", "grouped_mm": "peft, grouped_mm", "fusedmoe": "fusedmoe"}


def resident(key: str = "VmRSS") -> float:
    """MiB; VmHWM: the highest so far."""
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(key))


def run(way: str, o: argparse.Namespace) -> None:
    import peft
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import fusedmoe

    imports = resident()
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, o.dtype))
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=o.H, intermediate_size=o.I, moe_intermediate_size=o.I, num_hidden_layers=o.layers,
        num_attention_heads=8, num_key_value_heads=2, head_dim=o.H // 8, num_experts=o.E, num_experts_per_tok=o.k,
        norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=o.T)  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=o.rank, lora_alpha=2 * o.rank, target_parameters=names, target_modules=[]))
    if way == "fusedmoe":
        fusedmoe.apply(model)
    else:
        for module in model.modules():
            if hasattr(module, "_apply_gate"):
                module.config._experts_implementation = way
    if o.checkpoint:
        model.enable_input_require_grads()
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    ids = torch.randint(512, (1, o.T))
    before, times, losses = resident(), [], []
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    for _ in range(o.steps):
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
        losses.append(float(loss.detach()))
    peak = resident("VmHWM")
    print(json.dumps({"ms": 1e3 * statistics.median(times[1:]), "peak": peak, "own": peak - imports, "steps": peak - before,
                      "losses": losses, "weights": sum(p.nbytes for p in model.parameters() if not p.requires_grad) / 2**20,
                      "adapters": sum(p.nbytes for p in trained) / 2**20, "peft": peft.__version__}))  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(layers=2, H=1024, I=512, E=32, k=4, T=512, rank=16, steps=6, threads=2, checkpoint=0).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ways", default=",".join(WAYS), help="which of them, with a comma between")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.way:
        run(o.way, o)
        return 0
    rows = {}
    for way in o.ways.split(","):
        done = subprocess.run([sys.executable, *sys.argv, "--way", way], capture_output=True, text=True)
        if done.returncode:
            print(done.stderr)
            return 1
        rows[WAYS[way]] = json.loads(done.stdout.splitlines()[-1])
    ours = rows["fusedmoe"]
    print(" ".join(f"{key}={value}" for key, value in vars(o).items() if key not in ("ways", "way")))
    print(f"PEFT {ours['peft']}, weights {ours['weights']:.0f} MiB, adapters {ours['adapters']:.0f} MiB")
    columns = {"ms": "ms/step", "peak": "peak MiB", "own": "less imports", "steps": "of the steps"}
    print(f"{'':18}" + "".join(f"{title:>13} {'':7}" for title in columns.values()) + f"{'first loss':>11} {'last':>8}")
    for name, r in rows.items():
        values = "".join(f"{r[key]:13.0f} {r[key] / max(ours[key], 1):6.2f}x" for key in columns)
        print(f"{name:18}{values}{r['losses'][0]:11.5f} {r['losses'][-1]:8.5f}")
    apart = max(abs(a - b) for r in rows.values() for a, b in zip(r["losses"], ours["losses"], strict=True))
    print(f"losses apart by at most {apart:.1e}")
    return 0 if apart < (1e-3 if o.dtype == "float32" else 5e-2) else 1


if __name__ == "__main__":
    sys.exit(main())
