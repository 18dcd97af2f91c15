# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a small Qwen3-MoE three times at once: its own experts, transformers' grouped_mm, and fusedmoe.

The three models start from the same weights and see the same bytes (this project's own pages), step by step in turn, so that
their losses can be laid over one another and a busy machine slows all of them alike. Writes a chart (PNG) and a page (HTML).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

BUSY = hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1)
if BUSY:  # OpenMP's waiting threads would take the cores from whoever works on them
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import transformers
from tqdm import tqdm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils import logging as hf_logging

import fusedmoe
from fusedmoe.bench import peak_megabytes
from report import BUSY_TEXT, amount, page, picture, shown_steps

ROOT = Path(__file__).resolve().parent.parent
LABELS = {"eager": "own experts (eager)", "grouped_mm": "transformers grouped_mm", "fusedmoe": "fusedmoe"}


def corpus() -> torch.Tensor:
    """Bytes of the project's own text."""
    files = [ROOT / "include/fusedmoe.h", ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = b"\n".join(f.read_bytes() for f in files if f.exists())
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def commit() -> str:
    """Of the checkout this file is in, and whether it was changed."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty= with changes"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def make_model(args: argparse.Namespace, device: str, dtype: torch.dtype) -> Qwen3MoeForCausalLM:
    """About 4 layers of 32 experts, 4 of them for every token; random weights."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=args.H, intermediate_size=2 * args.H, moe_intermediate_size=args.I, num_hidden_layers=args.layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=args.H // 8, num_experts=args.E, num_experts_per_tok=args.k,
        norm_topk_prob=True, max_position_embeddings=args.length, use_cache=False,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).to(device, dtype).train()


class Run:
    """One model with its optimizer, its bar and what was measured of it."""

    def __init__(self, name: str, model: Qwen3MoeForCausalLM, steps: int, place: int) -> None:
        self.name, self.model = name, model
        if name == "fusedmoe":
            fusedmoe.apply(model)
        else:
            model.set_experts_implementation(name)
        # Rounding tips a routing decision now and then, in any implementation. A small eps would make full steps of the tiny
        # gradients of experts with a few tokens, and bring the losses 5e-3 apart in 40 steps; with this one it is 1e-4.
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01, eps=1e-4, fused=True)
        self.warmup = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=10)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.peak: float | None = None
        self.bar = tqdm(total=steps, desc=f"{LABELS[name]:24}", position=place, leave=True, disable=None, unit="step",
                        bar_format="{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}] {postfix}")  # fmt: skip

    def _train(self, batch: torch.Tensor) -> float:
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        self.optimizer.step()
        self.warmup.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def step(self, batch: torch.Tensor) -> None:
        """One optimizer step; the first two warm up and are not timed."""
        start = time.perf_counter()
        self.losses.append(self._train(batch))
        if len(self.losses) > 2:
            self.seconds.append(time.perf_counter() - start)
            rate = batch.numel() / statistics.median(self.seconds)
            self.bar.set_postfix_str(f"loss {self.losses[-1]:.4f}, {rate:,.0f} tokens/s")
        self.bar.update()

    def measure(self, batch: torch.Tensor, device: str) -> None:
        """The memory of a step, after all that count: a CPU's meter makes it twice, or not at all where the system does not tell."""
        self.peak = peak_megabytes(lambda: self._train(batch), device)

    def result(self, tokens: int) -> dict[str, Any]:
        """The numbers of the report."""
        rate = tokens / statistics.median(self.seconds)
        return {"name": self.name, "label": LABELS[self.name], "losses": self.losses, "tokens_per_second": rate, "peak_mb": self.peak}


def main() -> int:
    """Train, compare, draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("steps", 40), ("batch", 8), ("length", 128), ("layers", 4), ("H", 256), ("I", 256), ("E", 32), ("k", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=140, help="stop after that many, whatever the step")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "run", help="folder of chart, page and JSON")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that everything works")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.layers = 6, 2
    warnings.filterwarnings("ignore")
    hf_logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    base = make_model(args, device, dtype)
    millions = sum(p.numel() for p in base.parameters()) / 1e6
    print(f"Qwen3-MoE, {millions:.1f} M parameters: {args.layers} layers, H={args.H}, I={args.I}, {args.E} experts, top-{args.k}; "
          f"{args.batch} x {args.length} bytes a step, {str(dtype)[6:]} on {device}, {torch.get_num_threads()} thread(s)")  # fmt: skip
    line = fusedmoe.info().splitlines()[1]
    cpu = line.removeprefix("cpu: ").split(", levels")[0]
    print(line)
    data = corpus().to(device)
    runs = [Run(name, copy.deepcopy(base), args.steps, i) for i, name in enumerate(LABELS)]
    del base
    generator = torch.Generator().manual_seed(1)
    deadline = time.perf_counter() + args.seconds
    for i in range(args.steps):
        if time.perf_counter() > deadline and i > 3:
            args.steps = i
            break
        starts = torch.randint(0, len(data) - args.length, (args.batch,), generator=generator).tolist()
        batch = torch.stack([data[s : s + args.length] for s in starts])
        for run in runs[i % 3 :] + runs[: i % 3]:  # nobody is always first
            run.step(batch)
        if not sys.stderr.isatty() and (i + 1) % 10 == 0:
            print(f"step {i + 1:3}  " + "  ".join(f"{r.name} {r.losses[-1]:.4f}" for r in runs), flush=True)
    for run in runs:
        run.bar.close()
        run.measure(batch, device)
    if BUSY:
        print(BUSY_TEXT)

    tokens = args.batch * args.length
    results = [run.result(tokens) for run in runs]
    ours = results[-1]
    print("\nloss at step " + "".join(f"{s:>10}" for s in shown_steps(args.steps)))
    for r in results:
        print(f"{r['name']:13}" + "".join(f"{r['losses'][s - 1]:10.5f}" for s in shown_steps(args.steps)))
    print(f"\n{'':24} {'tokens/s':>10} {'peak MB of a step':>18}   fusedmoe is")
    for r in results:
        faster = ours["tokens_per_second"] / r["tokens_per_second"]
        text = "" if r is ours else f"{faster:.2f}x as fast"
        if r is not ours and r["peak_mb"] and ours["peak_mb"]:
            text += f", {ours['peak_mb'] / r['peak_mb']:.2f}x the memory"
        print(f"{r['label']:24} {r['tokens_per_second']:10,.0f} {amount(r['peak_mb']):>18}   {text}")
    theirs, gap = (max(abs(a - b) for a, b in zip(results[0]["losses"], r["losses"], strict=True)) for r in results[1:])
    agree = gap < (1e-3 if dtype == torch.float32 else 5e-2) or gap <= theirs
    print(f"\nlargest difference from the losses of the own experts over {args.steps} steps: fusedmoe {gap:.1e}, grouped_mm {theirs:.1e} "
          + ("(the same curve)" if agree else "(NOT THE SAME CURVE)"))  # fmt: skip

    args.out.mkdir(parents=True, exist_ok=True)
    card = f"{torch.cuda.get_device_name()}, " if device == "cuda" else ""
    facts = {
        "model": f"Qwen3-MoE, {millions:.1f} M parameters, {args.layers} layers, H={args.H}, I={args.I}, {args.E} experts, top-{args.k}",
        "step": f"{tokens} tokens, {str(dtype)[6:]}, AdamW; {args.steps} steps",
        "machine": f"{card}{cpu}, level {fusedmoe.cpu_isa()}, torch on {torch.get_num_threads()} threads",
        "software": f"fusedmoe {fusedmoe.__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    report = {"facts": facts, "busy": BUSY, "gap": gap, "agree": agree, "results": results}
    picture(report, args.out / "finetune.png")
    (args.out / "finetune.html").write_text(page(report))
    (args.out / "finetune.json").write_text(json.dumps(report, indent=1))
    shown = args.out.relative_to(Path.cwd()) if args.out.is_relative_to(Path.cwd()) else args.out
    print(f"chart {shown}/finetune.png, page {shown}/finetune.html")
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
