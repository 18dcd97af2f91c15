# SPDX-License-Identifier: Apache-2.0
"""python -m fusedmoe.bench: experts implementations of transformers side by side, on any architecture and shape.

A pass is routing and the layer. Implementations take turns inside every round, so that a busy machine slows all of them; the
median of the rounds counts. Each has weights of its own, as its users have them: fusedmoe moves those it runs into huge pages. On
CUDA each has three regimes instead, and "dense" is a peer: see meters.py.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import json
import re
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import _core, autograd, ops
from .integrations import layers
from .integrations import transformers as hf
from .meters import DRAWS, GRAPH_BELOW, cuda_times, kept_megabytes, peak_megabytes

COLUMNS = """
The table has a row for each dtype, shape, pass, regime and implementation:
  pass       fwd: routing and the layer; fwd+bwd: with the backward, gradients freed
  regime     turns: implementations take turns in every round (CPU). On CUDA: idle, after a pause,
             at the highest clock; sustained, without a pause, at the power limit; graph, up to 64
             tokens, a forward in a CUDA graph of several
  ms         median milliseconds of a pass
  GFLOP/s    1e9 multiplications and additions of the layer's products a second
  share      GFLOP/s divided by a ceiling: 1 is all of it. On a CPU the ceiling is a loop of
             multiply-adds on registers alone, measured in the same run on the same threads; on CUDA
             it is "dense", cuBLAS products of the same size, where that is among --impl
  roofline   CPU: the least time that arithmetic at the ceiling and the memory's read rate, measured
             too, leave to a pass, divided by its time: 1 is all that this machine can do. A forward
             reads the weights of experts that have tokens; a backward reads them again and writes
             the gradients of all
  peak MB    MiB that a step (fwd+bwd) needs beyond what is there before it
  kept MB    MiB that autograd keeps from forward to backward, parameters not counted
In --json and --csv a row has also best_ms, ceiling_gflops, stream_gbytes (the read rate, 1e9 bytes
a second) and roofline_ms; the column roofline is of_roofline there.
Exit status: 0; 1 where ARCH has no experts; 2 for a command line that cannot be read, or that this
machine cannot run.
"""
OURS = (hf.NAME, "recompute")  # "recompute" keeps x alone
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def experts_class(arch: str) -> type:
    """The first experts class of a transformers model directory ("qwen3_moe", "gpt_oss", ...)."""
    import transformers

    folder = Path(transformers.__file__).parent / "models" / arch
    for path in sorted(folder.glob("modeling_*.py")):
        found = re.search(r"@use_experts_implementation(?:\([^)]*\))?\s*\nclass (\w+)", path.read_text())
        if found:
            return getattr(importlib.import_module(f"transformers.models.{arch}.{path.stem}"), found[1])
    raise SystemExit(f"transformers {transformers.__version__} has no experts class in models/{arch}")


def build(arch: str, H: int, I: int, E: int, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """An experts module of that shape with random weights."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    config = types.SimpleNamespace(
        **dict.fromkeys(names, E), hidden_size=H, moe_hidden_size=H, moe_intermediate_size=I, intermediate_size=I,
        hidden_act="silu", hidden_activation="gelu_pytorch_tanh", mlp_hidden_act="relu2", swiglu_limit=7.0, swiglu_alpha=1.702,
        moe_latent_size=None, rms_norm_eps=1e-6, post_norm_eps=1e-6, _experts_implementation="eager",
    )  # fmt: skip
    with torch.device(device):
        module = experts_class(arch)(config)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.02)
    return module.to(device, dtype)


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def roofline_ms(flops: float, read: float, gradients: float, gflops: float, gbytes: float, what: str) -> float:
    """The least time of a pass, from a forward's flops, the bytes of weights it reads and of gradients the backward writes."""
    forward, backward = max(flops / gflops, read / gbytes), max(2 * flops / gflops, (read + gradients) / gbytes)
    return (forward if what == "fwd" else forward + backward) / 1e6


def measure(
    arch: str, T: int, H: int, I: int, E: int, k: int, dtype: str, device: str, implementations: Sequence[str], rounds: int,
    backward: bool = True,
) -> list[dict[str, Any]]:  # fmt: skip
    """One shape: a row for each implementation, pass and regime."""
    module = build(arch, H, I, E, DTYPES[dtype], device)
    forward_flops = 2 * T * k * H * I * (3 if getattr(module, "has_gate", True) else 2)
    weights = sum(p.nbytes for p in module.parameters())
    modules = {name: copy.deepcopy(module) for name in implementations if name != "dense"}
    del module
    g = torch.Generator().manual_seed(0)
    x = torch.randn(T, H, generator=g).to(device, DTYPES[dtype]).requires_grad_()
    logits = [torch.randn(T, E, generator=g).to(device).requires_grad_() for _ in range(DRAWS if T < GRAPH_BELOW else 1)]
    dout = torch.randn(T, H, generator=g).to(device, DTYPES[dtype])

    def routed(name: str, draw: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        if name in OURS:
            return autograd.route(logits[draw], k, renormalize=True)
        p, ids = logits[draw].softmax(-1).topk(k)
        return ids, (p / p.sum(-1, keepdim=True)).to(x.dtype)

    def experts(name: str, ids: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        of_name = modules[name]
        if name == "recompute":
            found = layers.layer_of(of_name)
            return layers.run(of_name, found._replace(flags=found.flags | ops.RECOMPUTE), x, ids, p)
        of_name.config._experts_implementation = name
        return of_name(x, ids, p)

    def layer(name: str, draw: int = 0) -> torch.Tensor:
        return experts(name, *routed(name, draw))

    def step(name: str) -> None:
        layer(name).backward(dout)
        modules[name].zero_grad(set_to_none=True)  # inside the time: everyone frees what it allocated
        x.grad = logits[0].grad = None

    passes: dict[str, Callable] = {"fwd": torch.no_grad()(layer), **({"fwd+bwd": step} if backward else {})}
    times: dict[tuple[str, str, str], list[float]] = {}
    peaks: dict[str, float | None] = {}
    kept: dict[str, float] = {}
    best = (0.0, 0.0)  # GFLOP/s, GB/s
    for i, name in itertools.product(range(1 if device == "cuda" else rounds + 1), implementations):
        if device == "cpu" and i == rounds // 2 and name == implementations[0]:  # amid the rounds: a shared machine changes
            best = _core.ceiling(ops.DTYPES[DTYPES[dtype]], torch.get_num_threads())
        for what, run in passes.items() if name != "dense" else ():
            _synchronize(device)
            start = time.perf_counter()
            run(name)
            _synchronize(device)
            if i:  # the first round warms up
                times.setdefault((name, what, "turns"), []).append((time.perf_counter() - start) * 1e3)
        if not i and backward and name != "dense":
            peaks[name] = peak_megabytes(partial(step, name), device)
            kept[name] = kept_megabytes(partial(experts, name, *routed(name)), modules[name].parameters())
    if device == "cuda":
        times = cuda_times(passes, implementations, T, H, I, k, DTYPES[dtype])
    threads = torch.get_num_threads()
    read = weights / E * logits[0].topk(k).indices.unique().numel()
    roofline = partial(roofline_ms, forward_flops, read, weights)
    rows = []
    for (name, what, regime), ms in times.items():
        flops = forward_flops * (3 if what == "fwd+bwd" else 1)
        gflops = flops / statistics.median(ms) / 1e6
        dense = times.get(("dense", what, regime))
        top = flops / dense[0] / 1e6 if dense else best[0] or None
        least = roofline(*best, what) if all(best) else None
        arch_name = _core.cpu_isa() if device == "cpu" else torch.cuda.get_device_name()
        rows.append({
            "op": "experts", "pass": what, "backend": name, "regime": regime, "isa_or_arch": arch_name, "dtype": dtype, "T": T, "H": H,
            "I": I, "E": E, "k": k, "threads": threads, "ms": round(statistics.median(ms), 4), "gflops": round(gflops, 2),
            "ceiling_gflops": top, "share": round(gflops / top, 3) if top else None, "stream_gbytes": best[1] or None,
            "roofline_ms": least and round(least, 4), "of_roofline": least and round(least / statistics.median(ms), 3),
            "peer": name not in OURS, "best_ms": round(min(ms), 4),
            "peak_mb": None if peaks.get(name) is None or what == "fwd" else round(peaks[name], 1),
            "kept_mb": round(kept[name], 1) if name in kept and what != "fwd" else None, "model": arch,
        })  # fmt: skip
    return rows


def chart(rows: list[dict[str, Any]], path: str) -> None:
    """Bars of milliseconds, one group a shape and pass."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = list(dict.fromkeys((r["dtype"], r["T"], r["pass"], r["regime"]) for r in rows))
    names = list(dict.fromkeys(r["backend"] for r in rows))
    figure, axis = plt.subplots(figsize=(max(6, 1.3 * len(groups)), 4), layout="constrained")
    for i, name in enumerate(names):
        ms = {(r["dtype"], r["T"], r["pass"], r["regime"]): r["ms"] for r in rows if r["backend"] == name}
        values = [ms.get(g, 0) for g in groups]
        bars = axis.bar([j + i * 0.8 / len(names) for j in range(len(groups))], values, 0.8 / len(names), label=name)
        axis.bar_label(bars, fmt="%.3g", fontsize=7)
    axis.set_xticks([j + 0.4 - 0.4 / len(names) for j in range(len(groups))], [f"{d} T={t}\n{p}\n{how}" for d, t, p, how in groups])
    axis.set_ylabel("milliseconds (median)")
    axis.set_yscale("log")
    r = rows[0]
    axis.set_title(f"{r['model']}: H={r['H']} I={r['I']} E={r['E']} k={r['k']}, {r['isa_or_arch']}, {r['threads']} threads")
    axis.legend()
    figure.savefig(path, dpi=150)


def _arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """The command line; what is left out depends on the device."""
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    words = lambda text: text.split(",")  # noqa: E731
    device = argparse.ArgumentParser(add_help=False)
    which = "cpu, cuda, or npu, which has options of its own: --device npu --help (default here: %(default)s)"
    device.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help=which)
    cuda = device.parse_known_args(argv)[0].device == "cuda"
    parser = argparse.ArgumentParser("python -m fusedmoe.bench", description="E" + __doc__.split("\n")[0].split(": e")[1], epilog=COLUMNS,
                                     parents=[device], formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--op", default="experts", choices=["experts"], help="what is timed: the experts layer, the only one")
    parser.add_argument("--arch", default="qwen3_moe", help="a model directory of transformers (default %(default)s)")
    shape = ("16,4096,16384", "2048", "768", "128", "8") if cuda else ("64,512", "1024", "512", "32", "4")
    meanings = "tokens", "hidden size", "intermediate size", "experts", "experts of every token"
    for name, default, meaning in zip("THIEk", shape, meanings, strict=True):
        parser.add_argument(f"--{name}", type=numbers, default=numbers(default), metavar="N,...", help=f"{meaning} (default {default})")
    dtypes, peers = ("bf16", "grouped_mm,dense,fusedmoe") if cuda else ("f32,bf16", "eager,grouped_mm,fusedmoe")
    parser.add_argument("--dtype", type=words, default=words(dtypes), metavar="TYPE,...", help=f"f32, bf16, f16 (default {dtypes})")
    known = "those of transformers (eager, grouped_mm, batched_mm, fusedmoe, ...); recompute: fusedmoe keeping x alone; dense: CUDA only"
    parser.add_argument("--impl", type=words, default=words(peers), metavar="NAME,...", help=f"{known} (default {peers})")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads (default 0: as many as torch has)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds on a CPU, after one to warm up (default %(default)s)")
    parser.add_argument("--forward-only", action="store_true", help="no backward")
    for name, what in (("json", "the rows, a JSON list"), ("csv", "the rows, with a header"), ("png", "a chart of the milliseconds")):
        parser.add_argument(f"--{name}", metavar="FILE", help=f"{what}, into this file")
    return parser.parse_args(argv), parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    given = sys.argv[1:] if argv is None else [*argv]
    if "--device=npu" in given or ("--device", "npu") in itertools.pairwise(given):
        from .npu import main as npu

        return npu(given)
    args, parser = _arguments(argv)
    if not hf.register():
        parser.error("transformers 5 or newer is needed")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    if args.threads:
        torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    line = "{:5} {:>6} {:>5} {:>5} {:>4} {:>2} {:8} {:9} {:12} {:>10} {:>9} {:>6} {:>9} {:>8} {:>8}"
    print(line.format(*"dtype T H I E k pass regime backend ms GFLOP/s share roofline".split(), "peak MB", "kept MB"))
    for dtype, T, H, I, E, k in itertools.product(args.dtype, args.T, args.H, args.I, args.E, args.k):
        new = measure(args.arch, T, H, I, E, k, dtype, args.device, args.impl, args.rounds, not args.forward_only)
        for r in sorted(new, key=lambda r: (r["pass"], r["regime"])):
            columns = (r[name] or "" for name in "pass regime backend ms gflops share of_roofline peak_mb kept_mb".split())
            print(line.format(dtype, T, H, I, E, k, *columns))
        rows += new
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))
    if args.csv:
        lines = [",".join("" if v is None else str(v) for v in line) for line in (rows[0], *(r.values() for r in rows))]
        Path(args.csv).write_text("\n".join(lines) + "\n")
    if args.png:
        chart(rows, args.png)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
