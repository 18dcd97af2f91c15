# SPDX-License-Identifier: Apache-2.0
"""The charts of the documentation: what each draws, from bench/results/*.csv, and how."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

from doc_tables import NAMES, PASSES, ROOT, SHAPES, SMALL, TS, held, one, pick, shares

CHARTS = ROOT / "docs/charts"
COLORS = {  # Okabe and Ito's, told apart by colour-blind readers
    "fusedmoe": "#0072B2",
    "sonicmoe": "#E69F00",
    "liger-1294": "#009E73",
    "liger-0.8.5": "#56B4E9",
    "grouped_mm": "#CC79A7",
    "dense": "#999999",
    "peft": "#D55E00",
    "W + BA": "#D55E00",
    "vllm-style": "#E69F00",
    "batched_mm": "#009E73",
}


def peers_data() -> Any:
    impls = ("fusedmoe", "sonicmoe", "liger-1294", "dense")
    return {p: {i: [held(i, m, T, p) for m, T in SHAPES] for i in impls} for p in PASSES}


def share_data() -> Any:
    lines = [("packed", "fwd"), ("plain", "fwd"), ("plain", "bwd")]
    return {
        d: {
            f"{w} {p} {hour}": [mean(shares(d, n, w, "huge", p, hour)) for n in (16, 64, 512)]
            for w, p in lines
            for hour in ("calm", "worst")
        }
        for d in ("bf16", "f32")
    }


def lora_data() -> Any:
    cpu = [
        [f"{r['model']}, {r['dtype']}, T = {r['T']}", float(pick("cpu_lora", impl="peft", **same)[0][c]) / float(r[c])]
        for c in ("ms_a_step", "steps_mib")
        for r in pick("cpu_lora", impl="fusedmoe", checkpointing="no")
        for same in [{k: r[k] for k in ("model", "dtype", "T", "checkpointing")}]
    ]
    gpu = [
        [
            f"{r['model']}, T = {r['T']}, rank {r['rank']}",
            float(r["ms"]),
            one(
                "h200_lora",
                "ms",
                commit="057809a",
                run="lora.py --layer",
                impl="W + BA",
                factors="bf16",
                model=r["model"],
                T=r["T"],
                rank=r["rank"],
            ),
        ]
        for r in pick("h200_lora", commit="057809a", run="lora.py --layer", impl="fusedmoe", factors="bf16")
    ]
    return {"cpu": cpu, "gpu": gpu}


def overview_data() -> Any:
    step = lambda impl: [
        one("cpu_transformers", "ms", machine="zen4-2", model=SMALL, dtype="bf16", T=T, impl=impl, **{"pass": "fwd+bwd"}) for T in TS
    ]
    big = [("Qwen3-30B-A3B", 16384), ("OLMoE", 16384), ("Qwen3-235B", 16384), ("Mixtral", 8192), ("DeepSeek-V3/8", 8192)]
    lora = {
        i: [one("h200_models", "tokens_s", task="LoRA, rank 16", tokens_a_step=t, impl=i) for t in (4096, 16384)]
        for i in ("fusedmoe", "grouped_mm")
    }
    return {
        "gpu": {i: [held(i, m, T, "fwd+bwd") for m, T in big] for i in ("fusedmoe", "sonicmoe", "liger-1294")},
        "names": [f"{m}\nT = {T}" for m, T in big],
        "cpu": {i: step(i) for i in ("fusedmoe", "grouped_mm")},
        "lora": lora,
    }


def style() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "svg.hashsalt": "fusedmoe",
            "svg.fonttype": "none",
            "font.family": "DejaVu Sans",
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.grid.axis": "y",
            "grid.color": "#dddddd",
            "axes.axisbelow": True,
            "figure.facecolor": "white",
            "axes.facecolor": "white",
            "savefig.facecolor": "white",
            "axes.titlesize": 11,
            "legend.frameon": False,
        }
    )
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
    looks = {
        "packed fwd": ("#0072B2", "o", "forward, packed weights"),
        "plain fwd": ("#E69F00", "s", "forward, plain weights"),
        "plain bwd": ("#009E73", "^", "backward"),
    }
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
    for offset, part, color, label in (
        (-0.2, d["cpu"][:half], "#0072B2", "time of a step"),
        (0.2, d["cpu"][half:], "#E69F00", "memory of the steps"),
    ):
        drawn = cpu.barh([i + offset for i in range(half)], [v for _, v in part], 0.38, color=color, label=label)
        cpu.bar_label(drawn, fmt="%.1f", fontsize=8, padding=2)
    cpu.set_yticks(range(half), names, fontsize=8.5)
    cpu.axvline(1, color="#444444", lw=1)
    cpu.set(xlabel="PEFT on grouped_mm, as a multiple of fusedmoe (more is better)", title="2 Zen 4 cores: a training step, rank 16")
    cpu.invert_yaxis()
    cpu.grid(axis="x", color="#dddddd")
    cpu.legend(loc="lower right")
    bars(
        gpu,
        [n.replace(", ", "\n") for n, *_ in d["gpu"]],
        {"fusedmoe": [a for _, a, _ in d["gpu"]], "W + BA": [b for *_, b in d["gpu"]]},
        "{:.3g}",
    )
    gpu.tick_params(axis="x", labelsize=7.5)
    gpu.set(ylabel="ms (less is better)", ylim=(0, 40), title="H200: forward + backward of a layer, bf16 factors")
    gpu.legend(loc="upper left", title="W + BA: as PEFT computes it")
    return figure


def forms_data() -> Any:
    """Title, what it is for, and rows of (column n, k): the order in memory is left to right, then the next row."""
    n, k = range(4), range(8)
    stored = [[(i, j) for j in k] for i in n]
    quads = [[(i, j) for i in n for j in k[at : at + 4]] for at in (0, 4)]
    return [
        ["stored [out, in]: k-major", ["Hugging Face's weights, in the forward:", "multiplied in place when rows are few"], stored],
        ["panel of a k-major matrix", ["four k of a column stay together, so nothing is transposed", ""], quads],
        [
            "panel of an n-major matrix",
            ["[in, out] weights, and the", "backward: neighbours of one k"],
            [[(i, j) for i in n] for j in k],
        ],
    ]


def draw_forms(plt: Any, d: Any) -> Any:
    tints = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.3), width_ratios=(8, 16, 5), layout="constrained")
    for axis, (title, why, rows) in zip(axes, d, strict=True):
        for y, row in enumerate(rows):
            for x, (n, k) in enumerate(row):
                axis.add_patch(plt.Rectangle((x, y), 0.94, 0.9, color=tints[n], alpha=0.35 + 0.07 * k))
                axis.text(x + 0.47, y + 0.45, f"n{n}\nk{k}", ha="center", va="center", fontsize=8, color="#111111")
        axis.set(xlim=(0, len(rows[0])), ylim=(8, -0.1))
        axis.set_title("\n".join([title, *why]), fontsize=10)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.grid(False)
        for side in ("left", "bottom"):
            axis.spines[side].set_visible(False)
    axes[1].text(0, 3.3, "prepacked: such panels one after another, made once", fontsize=11, color="#111111")
    names = [f"expert {e}, columns {c}, chunk {k}" for e, c, k in ((0, 0, 0), (0, 0, 1), (0, 64, 0), (0, 64, 1))]
    for i, text in enumerate([*names, "..."]):
        axes[1].add_patch(plt.Rectangle((i * 3.3, 3.9), 3.2, 1.4, color="#999999", alpha=0.3))
        axes[1].text(i * 3.3 + 1.6, 4.6, text.replace(", ", "\n"), ha="center", va="center", fontsize=8, color="#111111")
    axes[1].text(0, 6.3, "W1: expert by expert.  W2: by block of columns, the experts of each.", fontsize=9, color="#111111")
    return figure


def kl_data() -> Any:
    ways = {"bfloat16 rollout": ("bfloat16", "no"), "the same, routing replayed": ("bfloat16", "yes")}
    return {n: [float(r["kl"]) for r in pick("rl_kl", rollout=dtype, replay=replay)] for n, (dtype, replay) in ways.items()}


def draw_kl(plt: Any, d: Any) -> Any:
    figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
    for (name, values), color in zip(d.items(), ("#D55E00", "#0072B2"), strict=True):
        axis.plot(range(len(values)), values, color=color, label=name, lw=1.8)
    axis.set(yscale="log", xlabel="step", ylabel="KL(rollout || trainer), a token", title="GRPO on a tiny MoE model, trainer in float32")
    axis.grid(color="#dddddd")
    axis.legend()
    return figure


FIGURES = {
    "overview": (overview_data, draw_overview),
    "h200-peers": (peers_data, draw_peers),
    "cpu-share": (share_data, draw_share),
    "lora": (lora_data, draw_lora),
    "memory-forms": (forms_data, draw_forms),
    "rl-kl": (kl_data, draw_kl),
}


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
    text = path.read_text().replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")  # Verdana is as wide, and on most machines
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")
    if png:
        figure.savefig(png / f"{name}.png", dpi=80)
    plt.close(figure)
