# SPDX-License-Identifier: Apache-2.0
"""The tables of the documentation, each made from bench/results/*.csv by a function of its name."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"
NAMES = {
    "fusedmoe": "fusedmoe",
    "fusedmoe-sm80": "fusedmoe, general kernels",
    "sonicmoe": "SonicMoE",
    "liger-1294": "Liger #1294",
    "liger-0.8.5": "Liger 0.8.5",
    "scattermoe": "ScatterMoE",
    "llamafactory": "LLaMA-Factory",
    "grouped_mm": "grouped_mm",
    "batched_mm": "batched_mm",
    "vllm-style": "vLLM's Triton kernel",
    "dense": "dense",
    "eager": "eager",
}
SHAPES = [
    ("Qwen3-30B-A3B", 4096),
    ("Qwen3-30B-A3B", 16384),
    ("Qwen3-30B-A3B", 32768),
    ("OLMoE", 16384),
    ("Qwen3-235B", 16384),
    ("Mixtral", 8192),
    ("DeepSeek-V3/8", 8192),
    ("gpt-oss-20b sizes", 8192),
]
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
    return f"{v:,.0f}" if v >= 100 else f"{v:.1f}" if v >= 10 else f"{v:.2f}" if v >= 1 else f"{v:.3g}"


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
    """TF/s at the power limit, the better of the two runs that all of them were in."""
    same = dict(regime="held", impl=impl, model=model, T=T) | {"pass": step}
    return max(v for run in ("peers A", "peers B") for v in values("h200_layers", "tflops", run=run, **same))


def five() -> list[tuple[str, str, float, float, str, str, float]]:
    """hardware, workload, ours, the best other, its name, unit, times as fast."""
    q30, lora = "Qwen3-30B-A3B", dict(task="LoRA, rank 16", tokens_a_step=16384)
    amx = dict(threads=16, dtype="bf16", T=512, impl="fusedmoe plain")
    ms = one("xeon_peers", "ms", **amx)
    middle = lambda column: median(values("cpu_grouped_mm_runs", column))
    rows = [
        (
            "NVIDIA H200",
            f"{q30} layer, T = 16384, forward + backward",
            held("fusedmoe", q30, 16384, "fwd+bwd"),
            held("sonicmoe", q30, 16384, "fwd+bwd"),
            "SonicMoE",
            "TF/s",
            0.0,
        ),
        (
            "NVIDIA H200",
            f"{q30}, all layers, LoRA of rank 16, training",
            one("h200_models", "tokens_s", impl="fusedmoe", **lora),
            one("h200_models", "tokens_s", impl="grouped_mm", **lora),
            "PEFT on grouped_mm",
            "tokens/s",
            0.0,
        ),
        (
            "NVIDIA H200",
            f"{q30} layer, one token, CUDA graph",
            one("h200_decode", "us", run="peers", impl="fusedmoe", T=1),
            one("h200_decode", "us", run="peers", impl="vllm-style", T=1),
            "vLLM's Triton kernel",
            "us",
            0.0,
        ),
        (
            "16 Xeon vCPUs with AMX",
            "layer H=2048 I=1408 E=32 k=4, T = 512, forward, bf16",
            ms,
            ms * one("xeon_peers", "times_onednn", **amx),
            "oneDNN 2.6, prepacked",
            "ms",
            0.0,
        ),
        (
            "2 Zen 4 cores",
            f"layer {SMALL}, T = 512, forward + backward, bf16",
            middle("fusedmoe_ms"),
            middle("grouped_mm_ms"),
            "grouped_mm",
            "ms",
            middle("ratio"),
        ),
    ]
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
    experts = constant("src/cuda", "kMaxExperts")
    return f"""\
- Sizes. CPU: any H, I, E, k and T, zero tokens included.
  CUDA: any H, I and T; at most {experts} experts, and routing only over what fits the shared memory of a block.
  Ascend: H, 2I, K and N up to {inner}, {groups} experts, k up to {topk}, T k up to {slots}.
  What is larger is refused with both numbers.
- Other NVIDIA cards than Hopper get general kernels. {general()}"""


def general() -> str:
    """The kernels that every card but Hopper gets, on the H200, beside Triton's best there, which was another run."""
    ratio, rate = [], []
    for r in pick("h200_general"):
        rate.append(float(r["tflops"]))
        same = {k: r[k] for k in ("model", "T", "pass")} | {"run": "peers A", "regime": "turns"}
        if pick("h200_layers", impl="llamafactory", **same):
            best = max(one("h200_layers", "tflops", impl=i, **same) for i in ("liger-0.8.5", "scattermoe", "llamafactory"))
            ratio.append(rate[-1] / best)
    return (
        f"On the H200, with the Hopper kernels off,\n  they reach {span(rate, '{:.0f}')} TF/s, {span(ratio, '{:.2f}')} of the best Triton "
        "kernel's rate there (another run).\n  They have run on no other card."
    )


# ---- H200 ----


def machines() -> str:
    return table(
        "machine | hardware | software",
        ([r["machine"], r["hardware"], r["software"]] for r in load("machines") if r["machine"] in ("h200", "zen4-2", "xeon-amx-16")),
    )


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


def h200_shares() -> str:
    """Ours in the newest run, as a share of dense there; SonicMoE's share in its own two."""
    rows = []
    for model, T in SHAPES:
        if not pick("h200_layers", run="peers.py", impl="fusedmoe", model=model, T=T):
            continue
        same = dict(regime="held", model=model, T=T)
        rate = lambda run, impl, p, same=same: one("h200_layers", "tflops", run=run, impl=impl, **same, **{"pass": p})
        share = lambda run, impl, p, of=rate: 100 * of(run, impl, p) / of(run, "dense", p)
        ours = [share("peers.py", "fusedmoe", p) for p in PASSES]
        theirs = [mean(share(run, "sonicmoe", p) for run in ("peers A", "peers B")) for p in PASSES]
        cell = lambda found, form="{:.1f}": " / ".join(form.format(v) for v in found)
        rates = [cell([rate("peers.py", i, p) for p in PASSES], "{:.0f}") for i in ("fusedmoe", "dense")]
        rows.append([f"{model}, {T}", *rates, cell(ours), cell(theirs), cell([a / b for a, b in zip(ours, theirs, strict=True)], "{:.2f}")])
    return table("shape, T | fusedmoe | dense | % of dense | SonicMoE, % of dense | ratio", rows)


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
        return (
            f"{len(short[unit]) - len(missed)} of {len(short[unit])} goals are reached, the others missed by up to {max(missed):.0f} {name}"
        )

    return (
        "Goals were set for this card, and held against one run (commit f92e785, routing included). "
        f"Sustained, as shares of dense: {said('% of dense', 'points')}. From idle, as rates: {said('TF/s', 'TF/s')}."
    )


def h200_memory() -> str:
    impls = PEERS
    cell = lambda i, m, T, c: f"{one('h200_memory', c, run='peers', impl=i, model=m, T=T):.0f}"
    rows = ([f"{m}, {T}", *(f"{cell(i, m, T, 'kept_mib')} / {cell(i, m, T, 'peak_mib')}" for i in impls)] for m, T in SHAPES)
    return table("shape, T | " + " | ".join(NAMES[i] for i in impls), rows) + "\n\n" + forward_memory()


def forward_memory() -> str:
    """Of the newest run that measured it: rows come in the order of time."""
    newest = {(r["model"], r["T"]): float(r["peak_mib"]) for r in pick("h200_forward_memory", impl="fusedmoe")}
    over = [mib / one("h200_forward_memory", "peak_mib", impl="sonicmoe", model=m, T=T) - 1 for (m, T), mib in newest.items()]
    return f"Peak memory of a forward without gradients: {100 * min(over):.1f} to {100 * max(over):.1f} % more than SonicMoE's."


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
        text = [
            f"{number(float(r['us']))}{' (' + r['of_reading'] + ')' if r['of_reading'] else ''}"
            for T in (1, 4, 16)
            for r in [cells[str(T)]]
        ]
        rows.append([model, *text])
    return table("experts, T | 1 | 4 | 16", rows)


def h200_lora() -> str:
    rows = []
    for r in pick("h200_lora", commit="057809a", run="lora.py --layer", impl="fusedmoe", factors="bf16"):
        same = dict(commit="057809a", run="lora.py --layer", model=r["model"], T=r["T"], rank=r["rank"])
        get = lambda impl, factors, column="ms", same=same: one("h200_lora", column, impl=impl, factors=factors, **same)
        ours, theirs = get("fusedmoe", "bf16"), get("W + BA", "bf16")
        rows.append(
            [
                f"{r['model']}, {r['T']}, {r['rank']}",
                number(get("no adapters", "")),
                number(ours),
                number(theirs),
                f"{theirs / ours:.1f}",
                f"{number(get('fusedmoe', 'f32'))}, {number(get('W + BA', 'f32'))}",
                f"{r['peak_mib']}, {get('W + BA', 'bf16', 'peak_mib'):.0f}",
            ]
        )
    return table(
        "model, T, rank | no adapters | fusedmoe | W + BA | times as fast | f32 factors: fusedmoe, W + BA | peak, MiB: fusedmoe, W + BA",
        rows,
    )


def h200_models() -> str:
    rows = []
    for r in pick("h200_models", impl="fusedmoe"):
        same = dict(model=r["model"], tokens_a_step=r["tokens_a_step"])
        other = {o["impl"]: o for o in pick("h200_models", **same)}
        cell = lambda impl, other=other: (
            f"{float(other[impl]['tokens_s']):,.0f}; {float(other[impl]['peak_mib']):,.0f}" if impl in other else ""
        )
        times = float(r["tokens_s"]) / float(other["grouped_mm"]["tokens_s"])
        rows.append(
            [f"{r['model']}, {r['task']}, {r['tokens_a_step']}", cell("eager"), cell("grouped_mm"), cell("fusedmoe"), f"{times:.2f}"]
        )
    return table("model, what is trained, tokens a step | eager | grouped_mm | fusedmoe | to grouped_mm", rows)


def h200_layouts() -> str:
    rows = []
    for r in pick("h200_layouts", commit="1ca01e7", **{"pass": "fwd"}):
        both = one("h200_layouts", "ms", commit="1ca01e7", model=r["model"], T=r["T"], layer=r["layer"], **{"pass": "fwd+bwd"})
        rows.append([f"{r['model']}, {r['T']}", r["layer"], f"{number(float(r['ms']))} / {number(both)}"])
    return table("model, T | layer | ms", rows)


def h200_gmm() -> str:
    impls = ("GmmFunction", "HybridGmmFunction", "torch grouped_mm", "loop of matmuls", "one dense product")
    cell = lambda R, i: pair(lambda p: number(one("h200_gmm", "ms", R=R, impl=i, **{"pass": p})))
    rows = ([str(R), *(cell(R, i) for i in impls)] for R in (131072, 16384))
    return table("rows | " + " | ".join(impls), rows)


def h200_errors() -> str:
    tensors = ("out", "dx", "dp", "dW1", "dW2")
    impls, same = dict.fromkeys(r["impl"] for r in load("h200_errors")), dict(model="Qwen3-30B-A3B", T=16384)
    rows = ([NAMES[i], *(pick("h200_errors", impl=i, tensor=t, **same)[-1]["relative_l2"] for t in tensors)] for i in impls)
    return table("| " + " | ".join(tensors), rows)


# ---- Zen 4 ----


def shares(dtype: str, rows: int, weights: str, pages: str, step: str, hour: str = "calm") -> list[float]:
    return [
        float(r["share_percent"])
        for r in pick("cpu_layer", dtype=dtype, rows_an_expert=rows, weights=weights, pages=pages, **{"pass": step})
        if r["hour"].startswith(hour)
    ]


def zen4_layer() -> str:
    columns = [
        ("packed", "huge", "fwd"),
        ("plain", "huge", "fwd"),
        ("plain", "small", "fwd"),
        ("plain", "huge", "bwd"),
        ("plain", "small", "bwd"),
    ]
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
            cell = lambda w, p, dtype=dtype, T=T: ", ".join(
                f"{r['gb_s']} ({float(r['share_percent']):.0f} %)" for r in pick("cpu_few_rows", dtype=dtype, T=T, weights=w, pages=p)
            )
            rows.append([f"{dtype}, {T}", cell("plain", "huge"), cell("packed", "huge"), cell("plain", "small")])
    return table("dtype, T | plain, huge pages | packed, huge | plain, small", rows)


def zen4_peers() -> str:
    rows = []
    for dtype in ("bf16", "f32"):
        for T in (1, 128, 512, 4096):
            same = dict(dtype=dtype, T=T, pages="huge")
            ms = [
                values("cpu_peers", "ms", hour="calm", impl=i, **same)
                for i in ("fusedmoe plain", "fusedmoe packed", "oneDNN packed", "OpenBLAS")
            ]
            times = lambda column, same=same: [
                v
                for hour in ("calm", "busy")
                for i in ("fusedmoe plain", "fusedmoe packed")
                for v in values("cpu_peers", column, hour=hour, impl=i, **same)
            ]
            blas = times("times_openblas")
            rows.append(
                [f"{dtype}, {T}", *(number(m[0]) if m else "-" for m in ms), span(times("times_onednn")), span(blas) if blas else "-"]
            )
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
    return (
        f"The row bf16, T = 512 was run {len(runs)} times on different days: {span(times)} times as fast, the median {median(times):.2f}; "
        f"{reached} of the {len(runs)} runs reached the goal of 2.5. It is `grouped_mm` that moves ({span(theirs, '{:.0f}')} ms), with the "
        f"memory that other tenants of the machine use; ours takes {span(ours, '{:.0f}')} ms."
    )


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
    rows = (
        [m, *(f"{one('finetune', 'tokens_s', machine=m, impl=i):,.0f}; {one('finetune', 'peak_mb', machine=m, impl=i):.0f}" for i in impls)]
        for m in ("zen4-2", "h200")
    )
    return table("machine | eager: tokens/s; MB of a step | grouped_mm | fusedmoe", rows)


def rl_kl() -> str:
    ways = (("bfloat16", "no"), ("bfloat16", "yes"), ("float32", "no"))
    rows = (
        [f"{dtype} | {replay}", f"{one('rl_kl', 'kl', rollout=dtype, replay=replay):.1e}",
         f"{100 * one('rl_kl', 'other_experts', rollout=dtype, replay=replay):.1f} %"]
        for dtype, replay in ways
    )  # fmt: skip
    return table("rollout | replay | KL a token, mean of the steps | tokens and layers with other experts", rows)


def ep() -> str:
    columns = ("ranks", "mode", "chunks", "delay", "before_ms", "ms", "predicted_ms")
    return table("ranks | mode | chunks | line delayed to | one process, ms | ms | forecast | MB sent",
                 ([r[c] for c in columns] + ["-" if r["delay"] != "none" else r["mbytes_sent"]] for r in load("ep")))  # fmt: skip


def cpu_turns() -> str:
    rows, passes = load("cpu_turns"), ("fwd", "bwd", "fwd+bwd")
    cell = {(r["dtype"], r["T"], r["pass"]): [r["other_ms"], r["ms"], f"{float(r['ms']) / float(r['other_ms']):.2f}"] for r in rows}
    shapes = dict.fromkeys((r["dtype"], r["T"]) for r in rows)
    head = "dtype, T | " + " | ".join(f"{p}, before | after | ratio" for p in passes)
    return table(head, ([f"{d}, {T}", *(v for p in passes for v in cell[d, T, p])] for d, T in shapes))


def loading() -> str:
    return table("way | peak | held", ([r["way"], *(r[c].replace("/", " and ") for c in ("peak", "held"))] for r in load("loading")))


def cpu_ggml() -> str:
    """The medians of all processes; ours beside the type of theirs that is nearest."""
    ms = lambda T, library, form: median(values("cpu_ggml", "ms", T=T, library=library, format=form))
    beside = dict(int4="q4_0", nf4="q4_k", mxfp4="mxfp4", int8="q8_0", bf16="bf16", fp8="")
    rows = []
    for ours, theirs in beside.items():
        times = [(ms(T, "fusedmoe", ours), ms(T, "ggml", theirs) if theirs else 0.0) for T in (1, 8, 512)]
        words = (f"{number(a)} / {number(b)} ({b / a:.2f})" if b else f"{number(a)} / -" for a, b in times)
        rows.append([f"{ours}, {theirs.upper() or 'none'}", *words])
    return table("fusedmoe, ggml | T = 1 | T = 8 | T = 512", rows)


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
    rows = (
        [name, *(number(v) for v in ms(step).values()), f"{ms(step)['1'] / ms(step)['16']:.1f}"]
        for step, name in (("fwd", "forward"), ("bwd", "backward"))
    )
    return table("ms, T = 4096 | 1 thread | 2 | 4 | 8 | 16 | 1 to 16", rows)


_ALL = (
    readme, limits, machines, h200_layers, h200_shares, h200_graph, h200_goals, h200_memory,
    h200_decode, h200_decode_models, h200_lora, h200_models, h200_layouts, h200_gmm, h200_errors,
    zen4_layer, zen4_few, zen4_peers, zen4_lora, finetune, rl_kl, loading, ep, cpu_turns, cpu_ggml,
    zen4_levels, xeon_dense, xeon_peers, xeon_threads,
)  # fmt: skip
TABLES: dict[str, Callable[[], str]] = {f.__name__: f for f in _ALL}
TABLES["zen4_transformers"] = lambda: beside("zen4-2", SMALL) + "\n\n" + zen4_runs()
TABLES["zen4_qwen3"] = lambda: beside("zen4-2", "Qwen3-30B-A3B")
TABLES["xeon_transformers"] = lambda: beside("xeon-amx-2", SMALL)
