# SPDX-License-Identifier: Apache-2.0
"""LoRA on the experts of a Qwen3-MoE: a training step with PEFT's own computation and with fusedmoe, side by side.

    python bench/lora.py [--layers 2] [--H 1024] [--I 512] [--E 32] [--k 4] [--T 512] [--rank 16] [--dtype float32]

Each way runs in a process of its own, on the same random model, adapters and batches: milliseconds a step (median),
peak memory of the process, and what of it came after the model was made; losses on one batch must fall alike.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

WAYS = {"eager": "peft, eager", "grouped_mm": "peft, grouped_mm", "fusedmoe": "fusedmoe"}


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(way: str, o: argparse.Namespace) -> None:
    import peft
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import fusedmoe

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
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    ids = torch.randint(512, (1, o.T))
    before, times, losses = peak(), [], []
    for _ in range(o.steps):
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
        losses.append(float(loss.detach()))
    print(json.dumps({"ms": 1e3 * statistics.median(times[1:]), "peak": peak(), "steps": peak() - before, "losses": losses,
                      "weights": sum(p.nbytes for p in model.parameters()) / 2**20, "peft": peft.__version__}))  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(layers=2, H=1024, I=512, E=32, k=4, T=512, rank=16, steps=6, threads=2).items():
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
    print(f"layers={o.layers} H={o.H} I={o.I} E={o.E} k={o.k} T={o.T} rank={o.rank} {o.dtype} threads={o.threads}, "
          f"PEFT {ours['peft']}, weights {ours['weights']:.0f} MiB")  # fmt: skip
    print(f"{'':18} {'ms/step':>9} {'':>7} {'peak MiB':>9} {'':>7} {'of the steps':>13} {'':>7}  {'first loss':>10} {'last':>8}")
    for name, r in rows.items():
        print(f"{name:18} {r['ms']:9.0f} {r['ms'] / ours['ms']:6.2f}x {r['peak']:9.0f} {r['peak'] / ours['peak']:6.2f}x "
              f"{r['steps']:13.0f} {r['steps'] / max(ours['steps'], 1):6.2f}x  {r['losses'][0]:10.5f} {r['losses'][-1]:8.5f}")  # fmt: skip
    apart = max(abs(a - b) for r in rows.values() for a, b in zip(r["losses"], ours["losses"], strict=True))
    print(f"losses apart by at most {apart:.1e}")
    return 0 if apart < (1e-3 if o.dtype == "float32" else 5e-2) else 1


if __name__ == "__main__":
    sys.exit(main())
