# SPDX-License-Identifier: Apache-2.0
"""Every measured number of README.md and docs/benchmarks.md, and the tables of other pages, from bench/results/*.csv.

    python bench/figures.py            rewrite the marked regions and the charts (needs matplotlib)
    python bench/figures.py --check    say what differs, change nothing, exit 1 if something does

A region is what stands between <!-- table: name --> and <!-- end -->, or <!-- code: file --> for an example, whole or from one line to
another (<!-- code: file | first | last -->). A chart carries a digest of what it draws, so that an old one is found
without drawing it again.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, CHARTS = ROOT / "bench/results", ROOT / "docs/charts"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
REGION = re.compile(r"<!-- (table|code): ([^\n]*?) -->\n.*?<!-- end -->", re.S)
NAMES = {
    "fusedmoe": "fusedmoe", "fusedmoe-sm80": "fusedmoe, general kernels", "sonicmoe": "SonicMoE", "liger-1294": "Liger #1294",
    "liger-0.8.5": "Liger 0.8.5", "scattermoe": "ScatterMoE", "llamafactory": "LLaMA-Factory", "grouped_mm": "grouped_mm",
    "batched_mm": "batched_mm", "vllm-style": "vLLM's Triton kernel", "dense": "dense", "eager": "eager",
}  # fmt: skip
COLORS = {  # Okabe and Ito's, told apart by colour-blind readers
    "fusedmoe": "#0072B2", "sonicmoe": "#E69F00", "liger-1294": "#009E73", "liger-0.8.5": "#56B4E9", "grouped_mm": "#CC79A7",
    "dense": "#999999", "peft": "#D55E00", "W + BA": "#D55E00", "vllm-style": "#E69F00", "batched_mm": "#009E73",
}  # fmt: skip
SHAPES = [("Qwen3-30B-A3B", 4096), ("Qwen3-30B-A3B", 16384), ("Qwen3-30B-A3B", 32768), ("OLMoE", 16384), ("Qwen3-235B", 16384),
          ("Mixtral", 8192), ("DeepSeek-V3/8", 8192), ("gpt-oss-20b sizes", 8192)]  # fmt: skip
PASSES = ("fwd", "fwd+bwd")
SMALL, TS = "H=1024 I=512 E=32 k=4", (1, 16, 64, 512)

Row = dict[str, str]


# ---- reading ----


@cache
def load(name: str) -> list[Row]:
    with open(RESULTS / f"{name}.csv", newline="") as f:
        return list(csv.DictReader(f))


def pick(name: str, **want: Any) -> list[Row]:
    """The rows of a file that have these values, in its order."""
    return [r for r in load(name) if all(r[k] == str(v) for k, v in want.items())]


def values(name: str, column: str, **want: Any) -> list[float]:
    return [float(r[column]) for r in pick(name, **want) if r[column]]


def one(name: str, column: str, **want: Any) -> float:
    """The value of the one row there is, or the mean of those of several runs."""
    found = values(name, column, **want)
    if not found:
        raise KeyError(f"{name}.csv has no {column} for {want}")
    return mean(found)


def number(v: float) -> str:
    """Three digits, as many as the measurements have."""
    return f"{v:,.0f}" if v >= 100 else f"{v:.3g}" if v < 1 else f"{v:.3g}" if v >= 10 else f"{v:.2f}"


def span(found: Iterable[float], form: str = "{:.2f}") -> str:
    low, high = (form.format(f(list(found))) for f in (min, max))
    return low if low == high else f"{low} to {high}"


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    columns = head.split("|")
    lines = ["| " + " | ".join(c.strip() for c in columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(r) + " |" for r in rows])


def pair(of: Callable[[str], str]) -> str:
    """forward / forward + backward"""
    return " / ".join(of(p) for p in PASSES)


# ---- the README ----


def held(impl: str, model: str, T: int, step: str) -> float:
    """TF/s at the power limit, the better of two runs, for everybody."""
    return max(values("h200_layers", "tflops", regime="held", impl=impl, model=model, T=T, **{"pass": step}))


def five() -> list[tuple[str, str, float, float, str, str, float]]:
    """hardware, workload, ours, the best other, its name, unit, times as fast."""
    q30, lora = "Qwen3-30B-A3B", dict(task="LoRA, rank 16", tokens_a_step=16384)
    amx = dict(threads=16, dtype="bf16", T=512, impl="fusedmoe plain")
    ms = one("xeon_peers", "ms", **amx)
    middle = lambda column: median(values("cpu_grouped_mm_runs", column))
    rows = [
        ("NVIDIA H200", f"{q30} layer, T = 16384, forward + backward", held("fusedmoe", q30, 16384, "fwd+bwd"),
         held("sonicmoe", q30, 16384, "fwd+bwd"), "SonicMoE", "TF/s", 0.0),
        ("NVIDIA H200", f"{q30}, all layers, LoRA of rank 16, training", one("h200_models", "tokens_s", impl="fusedmoe", **lora),
         one("h200_models", "tokens_s", impl="grouped_mm", **lora), "PEFT on grouped_mm", "tokens/s", 0.0),
        ("NVIDIA H200", f"{q30} layer, one token, CUDA graph", one("h200_decode", "us", run="peers", impl="fusedmoe", T=1),
         one("h200_decode", "us", run="peers", impl="vllm-style", T=1), "vLLM's Triton kernel", "us", 0.0),
        ("16 Xeon cores with AMX", "layer H=2048 I=1408 E=32 k=4, T = 512, forward, bf16", ms, ms * one("xeon_peers", "times_onednn", **amx),
         "oneDNN 2.6, prepacked", "ms", 0.0),
        ("2 Zen 4 cores", f"layer {SMALL}, T = 512, forward + backward, bf16", middle("fusedmoe_ms"), middle("grouped_mm_ms"),
         "grouped_mm", "ms", middle("ratio")),
    ]  # fmt: skip
    times = lambda ours, other, unit: other / ours if unit in ("ms", "us") else ours / other
    return [(*r[:6], r[6] or times(r[2], r[3], r[5])) for r in rows]


def readme() -> str:
    rows = ((w, what, f"**{number(a)} {u}**", f"{number(b)} {u} ({n})", f"{t:.2f}") for w, what, a, b, n, u, t in five())
    return table("hardware | workload | fusedmoe | best other | times as fast", rows)


def constant(folder: str, name: str) -> str:
    """A limit, as the sources have it."""
    for path in sorted((ROOT / folder).rglob("*.c*")):
        if found := re.search(rf"\b{name} = (\d+)", path.read_text()):
            return f"{int(found[1]):,}"
    raise KeyError(f"{folder} has no {name}")


def limits() -> str:
    inner, groups, topk, slots = (constant("src/ascend", n) for n in ("MAX_INNER", "MAX_GROUPS", "MAX_TOPK", "MAX_ROWS"))
    return "\n".join((
        "- Sizes. CPU: any H, I, E, k and T, zero tokens included.",
        f"  CUDA: any H, I and T; at most {constant('src/cuda', 'kMaxExperts')} experts, and routing only over what fits the shared memory of a block.",
        f"  Ascend: H, 2I, K and N up to {inner}, {groups} experts, k up to {topk}, T k up to {slots}. What is larger is refused with both numbers.",
        f"- Other NVIDIA cards than Hopper get general kernels. {general()}",
    ))  # fmt: skip


def general() -> str:
    """The kernels that every card but Hopper gets, beside Triton's best and dense, on the H200."""
    slow, share = [], []
    for r in pick("h200_layers", impl="fusedmoe-sm80"):
        same = {k: r[k] for k in ("run", "regime", "model", "T", "pass")}
        best = max(one("h200_layers", "tflops", impl=i, **same) for i in ("liger-0.8.5", "scattermoe", "llamafactory"))
        slow.append(best / float(r["tflops"]))
        share.append(100 * float(r["tflops"]) / one("h200_layers", "tflops", impl="dense", **same))
    return (f"On the H200, with the Hopper kernels off, they reach {span(share, '{:.0f}')} % of a dense product's rate and take {span(slow, '{:.1f}')} "
            "times as long as the best Triton kernel there.")  # fmt: skip


# ---- H200 ----


def machines() -> str:
    return table("machine | hardware | software", ([r["machine"], r["hardware"], r["software"]] for r in load("machines") if r["machine"] in ("h200", "zen4-2", "xeon-amx-16")))


def shape_name(model: str, T: int) -> str:
    sizes = pick("h200_layers", model=model)[0]
    return f"{model} ({sizes['H']}, {sizes['I']}, {sizes['E']}, {sizes['k']}), {T}"


PEERS = ("fusedmoe", "sonicmoe", "liger-1294", "liger-0.8.5", "scattermoe", "llamafactory", "grouped_mm")


def h200_layers() -> str:
    rows = []
    for model, T in SHAPES:
        burst = dict(run="peers A", regime="turns", model=model, T=T)
        rate = {i: [held(i, model, T, p) for p in PASSES] for i in (*PEERS[:3], "dense")}
        rate |= {i: [one("h200_layers", "tflops", impl=i, **burst, **{"pass": p}) for p in PASSES] for i in PEERS[3:]}
        best = [max(rate[i][n] for i in PEERS[1:]) for n in (0, 1)]
        cell = lambda found, form="{:.0f}": " / ".join(form.format(v) for v in found)
        over = lambda other, ours=rate["fusedmoe"]: [a / b for a, b in zip(ours, other, strict=True)]
        share = [100 * v for v in over(rate["dense"])]
        rows.append([shape_name(model, T), *(cell(rate[i]) for i in (*PEERS, "dense")), cell(share), cell(over(best), "{:.2f}")])
    head = [NAMES[i] + (" \\*" if i in PEERS[3:] else "") for i in PEERS]
    return table("shape (H, I, E, k), T | " + " | ".join(head) + " | dense | % of dense | to the best other", rows)


def h200_graph() -> str:
    rate = lambda impl, T, p: one("h200_layers", "tflops", regime="cuda graph", impl=impl, T=T, **{"pass": p})
    rows = []
    for T in (1024, 2048, 4096, 8192):
        cells = (pair(lambda p, i=i, T=T: f"{rate(i, T, p):.0f}") for i in ("fusedmoe", "sonicmoe", "liger-1294"))
        best = pair(lambda p, T=T: f"{rate('fusedmoe', T, p) / max(rate(i, T, p) for i in ('sonicmoe', 'liger-1294')):.2f}")
        rows.append([str(T), *cells, best])
    return table("T | fusedmoe | SonicMoE | Liger #1294 | to the best other", rows)


def h200_goals() -> str:
    """How many of the goals set for the H200 are reached by the run that was made for them."""
    short: dict[str, list[float]] = {"% of dense": [], "TF/s": []}
    for g in load("h200_goals"):
        of = lambda impl, g=g: one("h200_layers", "tflops", run="h200.py", impl=impl, **{k: g[k] for k in ("regime", "model", "T", "pass")})
        got = of("fusedmoe") if g["unit"] == "TF/s" else 100 * of("fusedmoe") / of("dense")
        short[g["unit"]].append(float(g["goal"]) - got)
    def said(unit: str, name: str) -> str:
        missed = [s for s in short[unit] if s > 0.5]
        return f"{len(short[unit]) - len(missed)} of {len(short[unit])} goals are reached, the others missed by up to {max(missed):.0f} {name}"

    return ("Goals were set for this card, and held against one run (commit f92e785, routing included). "
            f"Sustained, as shares of dense: {said('% of dense', 'points')}. From idle, as rates: {said('TF/s', 'TF/s')}.")  # fmt: skip


def h200_memory() -> str:
    impls = PEERS
    cell = lambda i, m, T, c: f"{one('h200_memory', c, run='peers', impl=i, model=m, T=T):.0f}"
    rows = ([f"{m}, {T}", *(f"{cell(i, m, T, 'kept_mib')} / {cell(i, m, T, 'peak_mib')}" for i in impls)] for m, T in SHAPES)
    return table("shape, T | " + " | ".join(NAMES[i] for i in impls), rows) + "\n\n" + forward_memory()


def forward_memory() -> str:
    more = [(f"{r['model']}, T = {r['T']}", float(r["peak_mib"]) / one("h200_forward_memory", "peak_mib", impl="sonicmoe", model=r["model"], T=r["T"]))
            for r in pick("h200_forward_memory", impl="fusedmoe")]  # fmt: skip
    large = ", ".join(f"{v:.1f} times at {n}" for n, v in more if v > 1.1)
    rest = 100 * max(v - 1 for _, v in more if v <= 1.1)
    return f"The peak of a forward without gradients is {large} of SonicMoE's; elsewhere it is at most {rest:.0f} % more."


def h200_decode() -> str:
    Ts = (1, 4, 16, 64)
    rows = []
    for impl in ("fusedmoe", "vllm-style", "grouped_mm", "batched_mm"):
        found = [pick("h200_decode", run="peers", impl=impl, T=T)[0] for T in Ts]
        rows.append([NAMES[impl], *(f"{number(float(r['us']))} ({r['of_reading']})" for r in found)])
    return table("T | " + " | ".join(map(str, Ts)), rows)


def h200_decode_models() -> str:
    newest = [("b065be0", m) for m in ("DeepSeek-V2-Lite", "GLM-4.5-Air", "Mixtral", "gpt-oss-20b", "Llama 4 Scout")]
    newest += [("12e51de", m) for m in ("Qwen3-30B-A3B lists", "Qwen3-30B-A3B LoRA 16", "Nemotron 3 Nano")]
    rows = []
    for commit, model in newest:
        cells = {r["T"]: r for r in pick("h200_decode", commit=commit, model=model)}
        text = [f"{number(float(r['us']))}{' (' + r['of_reading'] + ')' if r['of_reading'] else ''}" for T in (1, 4, 16) for r in [cells[str(T)]]]
        rows.append([model, *text])
    return table("experts, T | 1 | 4 | 16", rows)


def h200_lora() -> str:
    rows = []
    for r in pick("h200_lora", commit="057809a", run="lora.py --layer", impl="fusedmoe", factors="bf16"):
        same = dict(commit="057809a", run="lora.py --layer", model=r["model"], T=r["T"], rank=r["rank"])
        get = lambda impl, factors, column="ms", same=same: one("h200_lora", column, impl=impl, factors=factors, **same)
        ours, theirs = get("fusedmoe", "bf16"), get("W + BA", "bf16")
        rows.append([f"{r['model']}, {r['T']}, {r['rank']}", number(get("no adapters", "")), number(ours), number(theirs), f"{theirs / ours:.1f}",
                     f"{number(get('fusedmoe', 'f32'))}, {number(get('W + BA', 'f32'))}", f"{r['peak_mib']}, {get('W + BA', 'bf16', 'peak_mib'):.0f}"])  # fmt: skip
    return table("model, T, rank | no adapters | fusedmoe | W + BA | times as fast | f32 factors: fusedmoe, W + BA | peak, MiB: fusedmoe, W + BA", rows)


def h200_models() -> str:
    rows = []
    for r in pick("h200_models", impl="fusedmoe"):
        same = dict(model=r["model"], tokens_a_step=r["tokens_a_step"])
        other = {o["impl"]: o for o in pick("h200_models", **same)}
        cell = lambda impl, other=other: f"{float(other[impl]['tokens_s']):,.0f}; {float(other[impl]['peak_mib']):,.0f}" if impl in other else ""
        times = float(r["tokens_s"]) / float(other["grouped_mm"]["tokens_s"])
        rows.append([f"{r['model']}, {r['task']}, {r['tokens_a_step']}", cell("eager"), cell("grouped_mm"), cell("fusedmoe"), f"{times:.2f}"])
    return table("model, what is trained, tokens a step | eager | grouped_mm | fusedmoe | to grouped_mm", rows)


def h200_layouts() -> str:
    rows = []
    for r in pick("h200_layouts", commit="1ca01e7", **{"pass": "fwd"}):
        both = one("h200_layouts", "ms", commit="1ca01e7", model=r["model"], T=r["T"], layer=r["layer"], **{"pass": "fwd+bwd"})
        rows.append([f"{r['model']}, {r['T']}", r["layer"], f"{number(float(r['ms']))} / {number(both)}"])
    return table("model, T | layer | ms", rows)


def h200_gmm() -> str:
    impls = ("GmmFunction", "HybridGmmFunction", "torch grouped_mm", "loop of matmuls", "one dense product")
    rows = ([str(R), *(pair(lambda p, i=i: number(one("h200_gmm", "ms", R=R, impl=i, **{"pass": p}))) for i in impls)] for R in (131072, 16384))  # noqa: B023
    return table("rows | " + " | ".join(impls), rows)


def h200_errors() -> str:
    tensors = ("out", "dx", "dp", "dW1", "dW2")
    impls = dict.fromkeys(r["impl"] for r in load("h200_errors"))
    rows = ([NAMES[i], *(pick("h200_errors", impl=i, tensor=t)[0]["relative_l2"] for t in tensors)] for i in impls)
    return table("| " + " | ".join(tensors), rows)


# ---- Zen 4 ----


def shares(dtype: str, rows: int, weights: str, pages: str, step: str, hour: str = "calm") -> list[float]:
    return [float(r["share_percent"]) for r in pick("cpu_layer", dtype=dtype, rows_an_expert=rows, weights=weights, pages=pages, **{"pass": step})
            if r["hour"].startswith(hour)]  # fmt: skip


def zen4_layer() -> str:
    columns = [("packed", "huge", "fwd"), ("plain", "huge", "fwd"), ("plain", "small", "fwd"), ("plain", "huge", "bwd"), ("plain", "small", "bwd")]
    rows = []
    for dtype in ("bf16", "f32"):
        for T, n in ((128, 16), (512, 64), (4096, 512)):
            worst = " / ".join(f"{shares(dtype, n, *c, 'worst')[0]:.0f}" for c in (columns[0], columns[3]))
            rows.append([f"{dtype}, {T} ({n})", *(f"{mean(shares(dtype, n, *c)):.0f}" for c in columns), worst])
    head = "dtype, T (rows an expert) | forward: packed, huge pages | plain, huge | plain, small | backward: huge | small"
    return table(head + " | worst hour: packed forward / backward", rows)


def zen4_few() -> str:
    rows = []
    for dtype in ("bf16", "f32"):
        for T in (1, 8):
            cell = lambda w, p, dtype=dtype, T=T: ", ".join(f"{r['gb_s']} ({float(r['share_percent']):.0f} %)" for r in pick("cpu_few_rows", dtype=dtype, T=T, weights=w, pages=p))
            rows.append([f"{dtype}, {T}", cell("plain", "huge"), cell("packed", "huge"), cell("plain", "small")])
    return table("dtype, T | plain, huge pages | packed, huge | plain, small", rows)


def zen4_peers() -> str:
    rows = []
    for dtype in ("bf16", "f32"):
        for T in (1, 128, 512, 4096):
            same = dict(dtype=dtype, T=T, pages="huge")
            ms = [values("cpu_peers", "ms", hour="calm", impl=i, **same) for i in ("fusedmoe plain", "fusedmoe packed", "oneDNN packed", "OpenBLAS")]
            times = lambda column, same=same: [v for hour in ("calm", "busy") for i in ("fusedmoe plain", "fusedmoe packed")
                                               for v in values("cpu_peers", column, hour=hour, impl=i, **same)]  # fmt: skip
            blas = times("times_openblas")
            rows.append([f"{dtype}, {T}", *(number(m[0]) if m else "-" for m in ms), span(times("times_onednn")), span(blas) if blas else "-"])
    return table("dtype, T | plain, ms | packed, ms | oneDNN, ms | OpenBLAS, ms | times as fast as oneDNN | as OpenBLAS", rows)


def beside(machine: str, model: str) -> str:
    """ms of the better of transformers' two and of ours, forward and forward + backward, and memory."""
    rows = []
    for dtype in ("bf16", "f32"):
        for T in TS:
            cells, memory = [], ""
            for step in PASSES:
                found = pick("cpu_transformers", machine=machine, model=model, dtype=dtype, T=T, **{"pass": step})
                ours = [r for r in found if r["impl"] == "fusedmoe"]
                other = [r for r in found if r["impl"] != "fusedmoe"]
                a, b = (mean(float(r["ms"]) for r in side) for side in (ours, other))
                cells += [f"{number(b)}, {number(a)}", f"{b / a:.1f}"]
                memory = f"{float(other[0]['peak_mb']):.0f}, {float(ours[0]['peak_mb']):.0f}" if ours[0]["peak_mb"] else memory
            rows.append([f"{dtype}, {T}", *cells, *([memory] if memory else [])])
    head = "dtype, T | forward: theirs, ours, ms | times | forward + backward: theirs, ours, ms | times"
    return table(head + (" | peak of a step: theirs, ours, MB" if len(rows[0]) > 5 else ""), rows)


def zen4_runs() -> str:
    runs = load("cpu_grouped_mm_runs")
    times, ours, theirs = ([float(r[c]) for r in runs] for c in ("ratio", "fusedmoe_ms", "grouped_mm_ms"))
    reached = sum(t >= 2.5 for t in times)
    return (f"The row bf16, T = 512 was run {len(runs)} times on different days: {span(times)} times as fast, the median {median(times):.2f}; {reached} of the "
            f"{len(runs)} runs reached the goal of 2.5. It is `grouped_mm` that moves ({span(theirs, '{:.0f}')} ms), with the memory that other tenants of the "
            f"machine use; ours takes {span(ours, '{:.0f}')} ms.")  # fmt: skip


def zen4_lora() -> str:
    rows = []
    for r in pick("cpu_lora", impl="fusedmoe"):
        if r["model"] == "8 small layers":  # between 4 and 12, as one would think
            continue
        same = {k: r[k] for k in ("model", "dtype", "T", "checkpointing")}
        p = pick("cpu_lora", impl="peft", **same)[0]
        both = lambda c, r=r, p=p: f"{float(p[c]):,.0f}, {float(r[c]):,.0f} ({float(p[c]) / float(r[c]):.1f})"
        name = f"{r['model']}, {r['dtype']}, {r['T']}" + (", checkpointing" if r["checkpointing"] == "yes" else "")
        rows.append([name, both("ms_a_step"), both("ms_experts"), both("steps_mib"), both("process_mib")])
    return table("model, dtype, T | ms a step: PEFT, ours (times) | ms of the experts | MiB of the steps | MiB of the process", rows)


def finetune() -> str:
    impls = ("eager", "grouped_mm", "fusedmoe")
    rows = ([m, *(f"{one('finetune', 'tokens_s', machine=m, impl=i):,.0f}; {one('finetune', 'peak_mb', machine=m, impl=i):.0f}" for i in impls)]
            for m in ("zen4-2", "h200"))  # fmt: skip
    return table("machine | eager: tokens/s; MB of a step | grouped_mm | fusedmoe", rows)


def zen4_levels() -> str:
    rows = []
    for level, dtype, step in dict.fromkeys((r["level"], r["dtype"], r["pass"]) for r in load("cpu_levels")):
        found = {r["rows_an_expert"]: r["share_percent"] for r in pick("cpu_levels", level=level, dtype=dtype, **{"pass": step})}
        rows.append([f"{level}, {dtype}, {'forward' if step == 'fwd' else 'backward'}", *(found.get(n, "-") for n in ("16", "64", "512"))])
    return table("level, dtype, pass | 16 rows an expert | 64 | 512", rows)


# ---- Xeon ----


def xeon_dense() -> str:
    rows = []
    for T, n in ((512, 64), (4096, 512)):
        for step, name in (("fwd", "forward"), ("bwd", "backward")):
            found = pick("xeon_dense", T=T, **{"pass": step})
            rates = [(float(r["fusedmoe_gflops"]), float(r["dense_gflops"])) for r in found if r["fusedmoe_gflops"]]
            ours, dense = (span([r[i] for r in rates], "{:.0f}") for i in (0, 1))
            rows.append([f"{T} ({n}), {name}", ours, dense, span([float(r["ratio"]) for r in found]), str(len(found))])
    return table("T (rows an expert), pass | fusedmoe, GF/s | torch's dense product, GF/s | ratio | machines", rows)


def xeon_peers() -> str:
    rows = []
    for r in pick("xeon_peers", T=1):
        found = [pick("xeon_peers", threads=r["threads"], dtype=r["dtype"], impl=r["impl"], T=T)[0] for T in (1, 8, 128, 512)]
        cells = [f"{x['ms']} ({x['times_onednn']}{', ' + x['times_openblas'] if x['times_openblas'] else ''})" for x in found]
        rows.append([f"{r['threads']}, {r['dtype']}, {r['impl'].split()[1]}", *cells])
    return table("threads, dtype, weights | T = 1 | 8 | 128 | 512", rows)


def xeon_threads() -> str:
    ms = lambda step: {r["threads"]: float(r["ms"]) for r in pick("xeon_threads", **{"pass": step})}
    rows = ([name, *(number(v) for v in ms(step).values()), f"{ms(step)['1'] / ms(step)['16']:.1f}"] for step, name in (("fwd", "forward"), ("bwd", "backward")))
    return table("ms, T = 4096 | 1 thread | 2 | 4 | 8 | 16 | 1 to 16", rows)


TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f for f in (
        readme, limits, machines, h200_layers, h200_graph, h200_goals, h200_memory, h200_decode, h200_decode_models,
        h200_lora, h200_models, h200_layouts, h200_gmm, h200_errors, zen4_layer, zen4_few, zen4_peers, zen4_lora, finetune, zen4_levels,
        xeon_dense, xeon_peers, xeon_threads)
}  # fmt: skip
TABLES["zen4_transformers"] = lambda: beside("zen4-2", SMALL) + "\n\n" + zen4_runs()
TABLES["zen4_qwen3"] = lambda: beside("zen4-2", "Qwen3-30B-A3B")
TABLES["xeon_transformers"] = lambda: beside("xeon-amx-2", SMALL)


# ---- charts: what is drawn, and how ----


def peers_data() -> Any:
    impls = ("fusedmoe", "sonicmoe", "liger-1294", "dense")
    return {p: {i: [held(i, m, T, p) for m, T in SHAPES] for i in impls} for p in PASSES}


def share_data() -> Any:
    lines = [("packed", "fwd"), ("plain", "fwd"), ("plain", "bwd")]
    return {d: {f"{w} {p} {hour}": [mean(shares(d, n, w, "huge", p, hour)) for n in (16, 64, 512)] for w, p in lines for hour in ("calm", "worst")}
            for d in ("bf16", "f32")}  # fmt: skip


def lora_data() -> Any:
    cpu = [[f"{r['model']}, {r['dtype']}, T = {r['T']}", float(pick("cpu_lora", impl="peft", **same)[0][c]) / float(r[c])]
           for c in ("ms_a_step", "steps_mib") for r in pick("cpu_lora", impl="fusedmoe", checkpointing="no")
           for same in [{k: r[k] for k in ("model", "dtype", "T", "checkpointing")}]]  # fmt: skip
    gpu = [[f"{r['model']}, T = {r['T']}, rank {r['rank']}", float(r["ms"]), one("h200_lora", "ms", commit="057809a", run="lora.py --layer",
            impl="W + BA", factors="bf16", model=r["model"], T=r["T"], rank=r["rank"])]
           for r in pick("h200_lora", commit="057809a", run="lora.py --layer", impl="fusedmoe", factors="bf16")]  # fmt: skip
    return {"cpu": cpu, "gpu": gpu}


def overview_data() -> Any:
    step = lambda impl: [one("cpu_transformers", "ms", machine="zen4-2", model=SMALL, dtype="bf16", T=T, impl=impl, **{"pass": "fwd+bwd"}) for T in TS]
    big = [("Qwen3-30B-A3B", 16384), ("OLMoE", 16384), ("Qwen3-235B", 16384), ("Mixtral", 8192), ("DeepSeek-V3/8", 8192)]
    lora = {i: [one("h200_models", "tokens_s", task="LoRA, rank 16", tokens_a_step=t, impl=i) for t in (4096, 16384)] for i in ("fusedmoe", "grouped_mm")}
    return {"gpu": {i: [held(i, m, T, "fwd+bwd") for m, T in big] for i in ("fusedmoe", "sonicmoe", "liger-1294")},
            "names": [f"{m}\nT = {T}" for m, T in big], "cpu": {i: step(i) for i in ("fusedmoe", "grouped_mm")}, "lora": lora}  # fmt: skip


def style() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({
        "svg.hashsalt": "fusedmoe", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 10,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y", "grid.color": "#dddddd", "axes.axisbelow": True,
        "figure.facecolor": "white", "axes.facecolor": "white", "savefig.facecolor": "white", "axes.titlesize": 11, "legend.frameon": False,
    })  # fmt: skip
    return plt


def bars(axis: Any, names: list[str], series: dict[str, list[float]], form: str = "{:.0f}", size: int = 8, labels: bool = True) -> None:
    width = 0.84 / len(series)
    for n, (impl, found) in enumerate(series.items()):
        at = [i + (n - (len(series) - 1) / 2) * width for i in range(len(names))]
        drawn = axis.bar(at, found, width * 0.94, color=COLORS[impl], label=NAMES.get(impl, impl))
        if labels:
            axis.bar_label(drawn, [form.format(v) for v in found], fontsize=size, padding=1)
    axis.set_xticks(range(len(names)), names, fontsize=8.5)


def draw_overview(plt: Any, d: Any) -> Any:
    figure, (gpu, lora, cpu) = plt.subplots(1, 3, figsize=(14, 4.4), width_ratios=(2.3, 1, 1.4), layout="constrained")
    bars(gpu, d["names"], d["gpu"])
    gpu.set(ylabel="TF/s (more is better)", ylim=(0, 760), title="NVIDIA H200 at its power limit:\na layer, forward + backward, bf16")
    gpu.legend(loc="upper left", ncols=3)
    bars(lora, ["4096\ntokens a step", "16384\ntokens a step"], d["lora"], "{:,.0f}")
    lora.set(ylabel="tokens/s (more is better)", ylim=(0, 12500), title="H200: Qwen3-30B-A3B,\ntraining with LoRA")
    lora.legend(loc="upper left")
    bars(cpu, [f"T = {T}" for T in TS], d["cpu"], "{:.3g}")
    cpu.set(ylabel="ms, log scale (less is better)", yscale="log", ylim=(1, 400), title="2 Zen 4 cores: a layer,\nforward + backward, bf16")
    cpu.legend(loc="upper left", ncols=2)
    return figure


def draw_peers(plt: Any, d: Any) -> Any:
    figure, axes = plt.subplots(2, 1, figsize=(11, 7.2), layout="constrained", sharex=True)
    for axis, step, title in zip(axes, PASSES, ("forward", "forward + backward"), strict=True):
        bars(axis, [f"{m}\nT = {T}" for m, T in SHAPES], d[step], size=7)
        axis.set(ylabel="TF/s (more is better)", ylim=(0, 800), title=f"One MoE layer, {title}, bf16, one H200 at its power limit")
    axes[0].legend(loc="upper left", ncols=4)
    return figure


def draw_share(plt: Any, d: Any) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    looks = {"packed fwd": ("#0072B2", "o", "forward, packed weights"), "plain fwd": ("#E69F00", "s", "forward, plain weights"),
             "plain bwd": ("#009E73", "^", "backward")}  # fmt: skip
    for axis, dtype in zip(axes, ("bf16", "f32"), strict=True):
        for name, found in d[dtype].items():
            key, hour = name.rsplit(" ", 1)
            color, mark, label = looks[key]
            calm = hour == "calm"
            axis.plot((16, 64, 512), found, "-" if calm else ":", color=color, marker=mark, label=label if calm else f"{label}, worst hour")
        axis.set(xscale="log", xlabel="rows an expert", title=f"{dtype}, H=2048 I=1408 E=32 k=4, huge pages", ylim=(40, 100))
        axis.set_xticks((16, 64, 512), ("16", "64", "512"), minor=False)
        axis.minorticks_off()
    axes[0].set_ylabel("% of the register-only ceiling")
    axes[1].legend(loc="lower right", fontsize=8)
    return figure


def draw_lora(plt: Any, d: Any) -> Any:
    figure, (cpu, gpu) = plt.subplots(1, 2, figsize=(14, 5), width_ratios=(1, 1.15), layout="constrained")
    half = len(d["cpu"]) // 2
    names = [n for n, _ in d["cpu"][:half]]
    for offset, part, color, label in ((-0.2, d["cpu"][:half], "#0072B2", "time of a step"), (0.2, d["cpu"][half:], "#E69F00", "memory of the steps")):
        drawn = cpu.barh([i + offset for i in range(half)], [v for _, v in part], 0.38, color=color, label=label)
        cpu.bar_label(drawn, fmt="%.1f", fontsize=8, padding=2)
    cpu.set_yticks(range(half), names, fontsize=8.5)
    cpu.axvline(1, color="#444444", lw=1)
    cpu.set(xlabel="PEFT on grouped_mm, as a multiple of fusedmoe (more is better)", title="2 Zen 4 cores: a training step, rank 16")
    cpu.invert_yaxis()
    cpu.grid(axis="x", color="#dddddd")
    cpu.legend(loc="lower right")
    bars(gpu, [n.replace(", ", "\n") for n, *_ in d["gpu"]], {"fusedmoe": [a for _, a, _ in d["gpu"]], "W + BA": [b for *_, b in d["gpu"]]}, "{:.3g}")
    gpu.tick_params(axis="x", labelsize=7.5)
    gpu.set(ylabel="ms (less is better)", ylim=(0, 40), title="H200: forward + backward of a layer, bf16 factors")
    gpu.legend(loc="upper left", title="W + BA: as PEFT computes it")
    return figure


FIGURES = {"overview": (overview_data, draw_overview), "h200-peers": (peers_data, draw_peers), "cpu-share": (share_data, draw_share),
           "lora": (lora_data, draw_lora)}  # fmt: skip


def digest(name: str) -> str:
    return hashlib.sha256(json.dumps(FIGURES[name][0]()).encode()).hexdigest()[:16]


def drawn_digest(name: str) -> str:
    """The digest inside the chart that is there."""
    path = CHARTS / f"{name}.svg"
    found = re.search(r"data ([0-9a-f]{16})", path.read_text()) if path.exists() else None
    return found[1] if found else ""


def draw(name: str, png: Path | None = None) -> None:
    plt = style()
    data, drawing = FIGURES[name]
    figure = drawing(plt, data())
    CHARTS.mkdir(exist_ok=True)
    path = CHARTS / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None, "Description": f"data {digest(name)}"})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    if png:
        figure.savefig(png / f"{name}.png", dpi=80)
    plt.close(figure)


# ---- putting it into the pages ----


def code(what: str) -> str:
    """An example, without its licence line; or of it the lines from one that has the first word to one that has the last."""
    path, *ends = (w.strip() for w in what.split("|"))
    lines = (ROOT / path).read_text().splitlines()
    if ends:
        first = next(i for i, line in enumerate(lines) if ends[0] in line)
        lines = lines[first : next(i for i in range(first, len(lines)) if ends[1] in lines[i]) + 1]
        indent = len(lines[0]) - len(lines[0].lstrip())
        lines = [line[indent:] for line in lines]
    lines = [line for line in lines if "SPDX-License" not in line]
    return "\n".join([f"```{'python' if path.endswith('.py') else 'c'}", *lines, "```"])


def rewritten(text: str) -> str:
    def region(m: re.Match[str]) -> str:
        if m[1] == "table" and m[2] not in TABLES:
            raise KeyError(f"no table {m[2]}: {', '.join(TABLES)}")
        return f"<!-- {m[1]}: {m[2]} -->\n{code(m[2]) if m[1] == 'code' else TABLES[m[2]]()}\n<!-- end -->"

    return REGION.sub(region, text)


def stale() -> list[str]:
    """Pages and charts that are not what the results say."""
    pages = [str(p.relative_to(ROOT)) for p in PAGES if rewritten(p.read_text()) != p.read_text()]
    return pages + [f"docs/charts/{n}.svg" for n in FIGURES if digest(n) != drawn_digest(n)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where something differs")
    parser.add_argument("--png", type=Path, help="a folder for PNG copies of the charts")
    args = parser.parse_args()
    if args.check:
        old = stale()
        print("\n".join(f"{name} is not what bench/results says: run python bench/figures.py" for name in old) or "all up to date")
        return bool(old)
    for page in PAGES:
        page.write_text(rewritten(page.read_text()))
    for name in FIGURES:
        draw(name, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
