# SPDX-License-Identifier: Apache-2.0
"""The report on a Hopper card, in one run: fusedmoe through Python and through its C API beside transformers' grouped_mm,
batched_mm and eager loop and dense cuBLAS products of the same flops; both regimes, memory, decode. Writes results.json, table.md
and chart.png into --out.

    python bench/h200.py --out build/h200 --cuda-bench build/cuda_bench --library $PWD/build/libfusedmoe_cuda.so

Peers that are installed (SonicMoE, Liger-Kernel, ScatterMoE, LLaMA-Factory) are timed beside ours by peers.py, and who is missing
is said; --only-peers leaves the rest out, and writes peers.json and peers.md:

    python bench/h200.py --only-peers --peers fusedmoe,sonicmoe --layers q30:16384,mixtral:8192

--other NAME=PROGRAM times another implementation's program too: called as PROGRAM SHAPE T 0 chain, it prints lines that contain
"from idle" or "sustained", "forward" or "fwd+bwd", and a rate before "TF/s".
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import statistics
import subprocess
import sys
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import peers
import torch
import transformers

from fusedmoe import bench, meters
from fusedmoe.integrations import transformers as hf

SHAPES = {  # H, I, E, k
    "q30": ("Qwen3-30B-A3B", 2048, 768, 128, 8), "olmoe": ("OLMoE", 2048, 1024, 64, 8), "q235": ("Qwen3-235B", 4096, 1536, 128, 8),
    "mixtral": ("Mixtral", 4096, 14336, 8, 2), "dsv3": ("DeepSeek-V3/8", 7168, 2048, 32, 8),
    "gptoss": ("gpt-oss-20b sizes", 2880, 2880, 32, 4),
}  # fmt: skip
LAYERS = ["q30:4096", "q30:8192", "q30:16384", "q30:32768", "olmoe:16384", "q235:16384", "mixtral:8192", "dsv3:8192"]
DECODE = [1, 4, 8, 16, 32, 64]
PASSES = ("fwd", "fwd+bwd")
C_API = ("C", "C, routed", "C dense")  # with routing; ids and weights given; cuBLAS in that process


def shape_of(case: str) -> tuple[str, int, int, int, int, int]:
    """Title, T, H, I, E, k of "q30:4096"."""
    name, T = case.split(":")
    title, *sizes = SHAPES[name]
    return (f"{title}, {T}", int(T), *sizes)


def measure(case: str, names: list[str], backward: bool = True) -> list[dict[str, Any]]:
    """Rows of python -m fusedmoe.bench, with the case's name; what an implementation cannot do is a line, not a number."""
    _, T, H, I, E, k = shape_of(case)
    try:
        rows = bench.measure("qwen3_moe", T, H, I, E, k, "bf16", "cuda", names, 0, backward)
    except (RuntimeError, NotImplementedError) as problem:
        print(f"{case} {names}: {str(problem).splitlines()[0]}", flush=True)
        rows = []
    torch.cuda.empty_cache()
    for r in rows:
        r["case"] = case
        print(f"{case:14} {r['backend']:11} {r['pass']:8} {r['regime']:9} {r['ms']:9.4f} ms {r['gflops'] / 1e3:7.1f} TF/s "
              f"share {r['share'] or 0:.3f} peak {r['peak_mb']} kept {r['kept_mb']}", flush=True)  # fmt: skip
    return rows


def copy_bandwidth() -> float:
    """Bytes a second of a large copy on the device, read and written ones counted."""
    a = torch.randn(1 << 29, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / (meters.milliseconds(lambda: b.copy_(a)) * 1e-3)


def weight_bytes(case: str) -> float:
    """Bytes of the weights that the routings of bench.measure touch, on average."""
    _, T, H, I, E, k = shape_of(case)
    g = torch.Generator().manual_seed(0)
    torch.randn(T, H, generator=g)
    hits = [torch.randn(T, E, generator=g).topk(k).indices.unique().numel() for _ in range(meters.DRAWS)]
    return statistics.mean(hits) * 3 * H * I * 2


def run(command: list[str], **environment: str) -> str:
    """The output of a program, echoed."""
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    print(done.stdout + done.stderr, flush=True)
    return done.stdout


def c_rates(program: str, library: str, case: str) -> dict[str, list[float]]:
    """Rates by case, pass and regime, as C_API names them, from bench/cuda_bench.cu."""
    cublas = glob.glob(os.path.join(os.path.dirname(torch.__file__), "..", "nvidia", "**", "libcublas.so.*"), recursive=True)
    text = run([program, library, "layer", case], FMOE_BENCH_CUBLAS=cublas[0] if cublas else "")
    rates = {}
    for what, rest in re.findall(r"^layer \S+\s+(\S+)(.*)$", text, re.M):
        found = re.findall(r"(from idle|sustained) ours +[\d.]+ ms +([\d.]+) TF/s \(routed +([\d.]+)\)(?: dense +([\d.]+))?", rest)
        for regime, *of in found:
            rates[f"{case} {what} {regime.split()[-1]}"] = [float(rate or 0) for rate in of]
    return rates


def c_others(program: str, library: str) -> dict[str, Any]:
    """Microseconds of decode, and lines about memory, from bench/cuda_bench.cu."""
    decode = run([program, library, "decode", "q30", *map(str, DECODE)])
    return {
        "decode": {int(T): [float(us), float(ratio)] for T, us, ratio in re.findall(r"T (\d+): ([\d.]+) us.* ([\d.]+)x", decode)},
        "memory": run([program, library, "memory", "q30:16384"]).splitlines(),
    }  # fmt: skip


def other(program: str, case: str) -> dict[str, float]:
    """Rates by case, pass and regime of another implementation's program."""
    text = run([program, *case.split(":"), "0", "chain"])
    found = re.findall(r"(from idle|sustained) +(forward|fwd\+bwd) .*?([\d.]+) TF/s", text)
    return {f"{case} {'fwd' if what == 'forward' else what} {regime.split()[-1]}": float(rate) for regime, what, rate in found}


class Report:
    """The numbers, as tables and as a chart."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.rows = {(r["case"], r["backend"], r["pass"], r["regime"]): r for r in data["python"]}

    def rate(self, case: str, name: str, what: str, regime: str) -> float:
        """TF/s, 0 where there is none. name: one of C_API, an --other, or an implementation in Python."""
        key = f"{case} {what} {regime}"
        if name in C_API:
            return self.data.get("c", {}).get("rates", {}).get(key, [0, 0, 0])[C_API.index(name)]
        if name in self.data["others"]:
            return self.data["others"][name].get(key, 0)
        r = self.rows.get((case, name, what, regime))
        return r["gflops"] / 1e3 if r else 0

    def layers(self) -> list[str]:
        """TF/s in both regimes, and shares of dense."""
        names = ["fusedmoe", "grouped_mm", "dense", *(C_API if "c" in self.data else []), *self.data["others"]]
        lines = []
        for regime, words in (("sustained", "Sustained at the power limit"), ("idle", "From idle")):
            lines += [f"{words}, TF/s, forward / forward + backward:", ""]
            lines += ["| shape, T | " + " | ".join(names) + " | share, Python | share, C |", "|" + "---|" * (len(names) + 3)]
            for case in LAYERS:
                pair = {n: [self.rate(case, n, what, regime) for what in PASSES] for n in names}
                cells = [" / ".join(f"{v:.0f}" if v else "-" for v in pair[n]) for n in names]
                for ours, dense in (("fusedmoe", "dense"), ("C", "C dense")):
                    both = zip(pair.get(ours, ()), pair.get(dense, ()), strict=True)
                    cells.append(" / ".join(f"{100 * a / b:.0f}" for a, b in both if b) + " %")
                lines.append(f"| {shape_of(case)[0]} | " + " | ".join(cells) + " |")
            lines.append("")
        return lines

    def memory(self) -> list[str]:
        """MiB kept from forward to backward, and the peak of a step over the weights (their gradients are in it)."""
        names = ("fusedmoe", "recompute", "grouped_mm")
        lines = ["| shape, T | " + " | ".join(f"{n}: kept / peak" for n in names) + " |", "|---|---|---|---|"]
        for case in LAYERS:
            title, T, H, _, E, _ = shape_of(case)
            given = (2 * T * H * 2 + T * E * 4) / 2**20  # x, dout, logits: there before the step
            found = [self.rows.get((case, name, "fwd+bwd", "idle")) for name in names]
            cells = [f"{r['kept_mb']:.0f} / {r['peak_mb'] + given:.0f}" if r else "-" for r in found]
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
        return [*lines, "", *(f"    {line}" for line in self.data.get("c", {}).get("memory", [])), ""]

    def decode(self) -> list[str]:
        """Microseconds of a forward in a CUDA graph, and the ratio to reading the weights."""
        lines = ["| T | " + " | ".join(map(str, DECODE)) + " |", "|" + "---|" * (len(DECODE) + 1)]
        floor = {T: self.data["weights"][str(T)] / self.data["bandwidth"] * 1e6 for T in DECODE}
        for name in ("fusedmoe", "batched_mm", "grouped_mm"):
            times = [self.rows.get((f"q30:{T}", name, "fwd", "graph")) for T in DECODE]
            cells = [f"{r['ms'] * 1e3:.1f} ({r['ms'] * 1e3 / floor[T]:.2f})" if r else "-" for r, T in zip(times, DECODE, strict=True)]
            lines.append(f"| {name}, us (ratio) | " + " | ".join(cells) + " |")
        if "c" in self.data:
            cells = ["{:.1f} ({:.2f})".format(*self.data["c"]["decode"][T]) for T in DECODE]
            lines.append("| C API, us (ratio) | " + " | ".join(cells) + " |")
        return [*lines, ""]

    def chart(self, path: Path) -> None:
        """Rates of forward + backward, and decode."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.6), layout="constrained", width_ratios=(2.2, 1))
        label = {"grouped_mm": "transformers grouped_mm", "batched_mm": "transformers batched_mm", "dense": "dense cuBLAS, same flops"}
        colour = {"grouped_mm": "#7d8794", "batched_mm": "#b0b7c3", "fusedmoe": "#0a7d5a", "dense": "#e2b04a"}
        for i, name in enumerate(("grouped_mm", "fusedmoe", "dense")):
            values = [self.rate(case, name, "fwd+bwd", "sustained") for case in LAYERS]
            bars = left.bar([j + 0.27 * i for j in range(len(LAYERS))], values, 0.26, label=label.get(name, name), color=colour[name])
            left.bar_label(bars, fmt="%.0f", fontsize=7)
        left.set_xticks([j + 0.27 for j in range(len(LAYERS))], [shape_of(c)[0].replace(", ", "\nT=") for c in LAYERS], fontsize=8)
        left.set_ylabel("TF/s, forward + backward, sustained")
        for name in ("batched_mm", "grouped_mm", "fusedmoe"):
            found = [(T, self.rows.get((f"q30:{T}", name, "fwd", "graph"))) for T in DECODE]
            points = [(T, r["ms"] * 1e3) for T, r in found if r]
            if points:
                right.plot(*zip(*points, strict=True), marker="o", label=label.get(name, name), color=colour[name])
        floor = [self.data["weights"][str(T)] / self.data["bandwidth"] * 1e6 for T in DECODE]
        right.plot(DECODE, floor, "--", color=colour["dense"], label="reading the weights once")
        right.set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds a layer, in a CUDA graph")
        right.set_xticks(DECODE, map(str, DECODE))
        left.set_ylim(top=1.15 * left.get_ylim()[1])
        for axis, columns in ((left, 3), (right, 1)):
            axis.legend(fontsize=8, frameon=False, ncols=columns, loc="upper left")
            axis.spines[["top", "right"]].set_visible(False)
        figure.suptitle(f"{self.data['device']}, bf16, routing included, {self.data['date']}")
        figure.savefig(path, dpi=130)


def beside_peers(out: Path, names: list[str], cases: list[str], graphs: bool) -> list[str]:
    """peers.py on these cases; its rows go to peers.json after every case."""
    versions, missing = peers.installed(names)
    rows: list[dict[str, Any]] = []
    for case in cases:
        title, *sizes = shape_of(case)
        rows += peers.measure(title, tuple(sizes), list(versions), graphs=graphs)
        torch.cuda.empty_cache()
        (out / "peers.json").write_text(json.dumps({"versions": versions, "missing": missing, "rows": rows}, indent=1))
        print("\n".join(peers.report([r for r in rows if r["case"] == title], versions, missing)), flush=True)
    lines = peers.report(rows, versions, missing)
    (out / "peers.md").write_text("\n".join(lines))
    return lines


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/h200"))
    parser.add_argument("--cuda-bench", help="build/cuda_bench, for the C API")
    parser.add_argument("--library", help="absolute path of libfusedmoe_cuda.so, for --cuda-bench")
    parser.add_argument("--other", action="append", default=[], metavar="NAME=PROGRAM")
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--peers", default=",".join(peers.PEERS), help="whom peers.py times (default %(default)s)")
    parser.add_argument("--only-peers", action="store_true", help="nothing but that")
    parser.add_argument("--no-graphs", action="store_true", help="of peers: no CUDA graphs")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    LAYERS[:] = args.layers.split(",")
    args.out.mkdir(parents=True, exist_ok=True)
    hf.register()
    beside = partial(beside_peers, args.out, args.peers.split(","), LAYERS, not args.no_graphs)
    if args.only_peers:
        print("\n".join(beside()))
        return 0
    data: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__,
        "cuda": torch.version.cuda, "date": str(date.today()), "commit": args.commit, "bandwidth": copy_bandwidth(),
        "python": [], "others": {}, "weights": {str(T): weight_bytes(f"q30:{T}") for T in DECODE},
    }  # fmt: skip
    save = lambda: (args.out / "results.json").write_text(json.dumps(data, indent=1))  # noqa: E731
    for case in LAYERS:
        data["python"] += measure(case, ["grouped_mm", "fusedmoe", "dense", *(["recompute"] if case == "q30:16384" else [])])
        save()
    others = dict(o.split("=", 1) for o in args.other)
    for case in LAYERS:  # programs take turns, so that none has the card at its coolest
        if args.cuda_bench:
            data.setdefault("c", {"rates": {}})["rates"].update(c_rates(args.cuda_bench, args.library, case))
        for name, program in others.items():
            data["others"].setdefault(name, {}).update(other(program, case))
        save()
    if args.cuda_bench:
        data["c"].update(c_others(args.cuda_bench, args.library))
        save()
    for T in DECODE:
        for name in ("fusedmoe", "batched_mm", "grouped_mm"):
            data["python"] += measure(f"q30:{T}", [name], backward=False)
    data["python"] += measure("q30:512", ["grouped_mm", "fusedmoe", "dense", "eager"])
    save()
    report = Report(data)
    head = "{device}, CUDA {cuda}, torch {torch}, transformers {transformers}, {date}, commit {commit}".format(**data)
    lines = [f"{head}; copy bandwidth {data['bandwidth'] * 1e-12:.2f} TB/s", "", *report.layers(), *report.memory(), *report.decode()]
    lines += beside()
    (args.out / "table.md").write_text("\n".join(lines))
    print("\n".join(lines), flush=True)
    report.chart(args.out / "chart.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
