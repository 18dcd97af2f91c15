# SPDX-License-Identifier: Apache-2.0
"""The chart (PNG, by matplotlib) and the page (one HTML file, nothing loaded from elsewhere) of finetune.py."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

COLORS = {"eager": "#d9822b", "grouped_mm": "#6b7fd7", "fusedmoe": "#1a936f"}


def picture(results: list[dict[str, Any]], setup: str, path: Path) -> None:
    """Losses, tokens a second, and memory, in one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (loss, speed, memory) = plt.subplots(1, 3, figsize=(12, 4), width_ratios=(2, 1, 1), layout="constrained")
    for r, style, width in zip(results, ("-", "--", ":"), (4, 2.5, 2), strict=False):
        loss.plot(range(1, len(r["losses"]) + 1), r["losses"], style, lw=width, color=COLORS[r["name"]], label=r["label"])
    loss.set(xlabel="step", ylabel="loss", title="the same curve three times")
    loss.legend()
    names = [r["name"] for r in results]
    colors = [COLORS[n] for n in names]
    speed.bar_label(speed.bar(names, [r["tokens_per_second"] for r in results], color=colors), fmt="%.0f")
    speed.set_title("tokens per second")
    memory.bar_label(memory.bar(names, [r["peak_mb"] or 0 for r in results], color=colors), fmt="%.0f")
    memory.set_title("peak MB of a step")
    for axis in (speed, memory):
        axis.tick_params(axis="x", labelsize=8)
    for axis in (loss, speed, memory):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(setup, fontsize=8)
    figure.savefig(path, dpi=150)


def _curves(results: list[dict[str, Any]]) -> str:
    """An SVG of the losses; text and lines take their colours from the page."""
    width, height, left, bottom, top = 640, 320, 60, 44, 16
    values = [v for r in results for v in r["losses"]]
    low, high = min(values), max(values)
    pad = 0.05 * (high - low or 1)
    low, high = low - pad, high + pad
    steps = len(results[0]["losses"])
    x = lambda i: left + (width - left - 10) * i / max(1, steps - 1)  # noqa: E731
    y = lambda v: top + (height - top - bottom) * (high - v) / (high - low)  # noqa: E731
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="loss of every step">']
    for i in range(5):
        v = low + (high - low) * i / 4
        parts.append(f'<line class="grid" x1="{left}" x2="{width - 10}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>')
        parts.append(f'<text x="{left - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{v:.2f}</text>')
    for i in range(0, steps, max(1, steps // 5)):
        parts.append(f'<text x="{x(i):.1f}" y="{height - 14}" text-anchor="middle">{i + 1}</text>')
    for r, wide, dash in zip(results, (6, 3.5, 1.8), ("", "10 6", ""), strict=False):
        points = " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(r["losses"]))
        parts.append(f'<polyline class="{r["name"]}" stroke-width="{wide}" stroke-dasharray="{dash}" points="{points}"/>')
    return "".join(parts) + "</svg>"


def _bars(results: list[dict[str, Any]], key: str, unit: str) -> str:
    most = max(r[key] or 0 for r in results) or 1
    rows = []
    for r in results:
        value = r[key] or 0
        rows.append(f'<div class="row"><span>{escape(r["label"])}</span><div class="track"><div class="bar {r["name"]}" '
                    f'style="width:{100 * value / most:.1f}%"></div></div><b>{value:,.0f} {unit}</b></div>')  # fmt: skip
    return "".join(rows)


_STYLE = """
:root{--ink:#1c2430;--soft:#5b6676;--paper:#fbfbfd;--card:#fff;--line:#e3e6ec;--eager:#d9822b;--grouped_mm:#6b7fd7;--fusedmoe:#1a936f}
@media(prefers-color-scheme:dark){:root{--ink:#e8ebf0;--soft:#9aa5b5;--paper:#12161d;--card:#1b212b;--line:#2d3542;
--eager:#f0a35c;--grouped_mm:#93a4f2;--fusedmoe:#4cc9a0}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1040px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.6rem;line-height:1.25;margin:.2em 0}
h2{font-size:1.05rem;margin:0 0 12px}
p{color:var(--soft);margin:.4em 0 1.2em}
.grid2{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:16px;min-width:0}
.wide{margin-bottom:16px}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font:12px system-ui,sans-serif}
@media(max-width:640px){svg text{font-size:22px}}
svg .grid{stroke:var(--line)}
polyline{fill:none;stroke-linejoin:round;stroke-linecap:round}
polyline.eager{stroke:var(--eager)}polyline.grouped_mm{stroke:var(--grouped_mm)}polyline.fusedmoe{stroke:var(--fusedmoe)}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;margin-top:8px;font-size:.9rem}
.key i{display:inline-block;width:14px;height:14px;border-radius:4px;margin-right:6px;vertical-align:-2px}
.row{display:grid;grid-template-columns:1fr auto;gap:2px 12px;margin:10px 0;font-size:.95rem}
.track{grid-column:1/-1;grid-row:2;background:var(--line);border-radius:6px;height:14px;overflow:hidden}
.bar{height:100%;border-radius:6px}
.eager{background:var(--eager)}.grouped_mm{background:var(--grouped_mm)}.fusedmoe{background:var(--fusedmoe)}
polyline.eager,polyline.grouped_mm,polyline.fusedmoe{background:none}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.92rem}
td,th{padding:6px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
td:first-child,th:first-child{text-align:left}
"""


def page(results: list[dict[str, Any]], setup: str, gap: float) -> str:
    """A page that reads well wide and narrow, light and dark."""
    ours, steps = results[-1], len(results[0]["losses"])
    picked = list(range(0, steps, max(1, steps // 6)))
    head = "".join(f"<th>step {i + 1}</th>" for i in picked)
    cells = ["".join(f"<td>{r['losses'][i]:.5f}</td>" for i in picked) for r in results]
    body = "".join(f"<tr><td>{escape(r['label'])}</td>{c}</tr>" for r, c in zip(results, cells, strict=True))
    key = "".join(f'<span><i class="{r["name"]}"></i>{escape(r["label"])}</span>' for r in results)
    rate = ours["tokens_per_second"]
    faster = " and ".join(f"{rate / r['tokens_per_second']:.2f}x as fast as {escape(r['label'])}" for r in results[:-1])
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark"><title>fusedmoe: one fine-tune, three ways</title><style>{_STYLE}</style></head>
<body><main>
<h1>One fine-tune, three ways</h1>
<p>{escape(setup)}</p>
<p>fusedmoe is {faster}. The losses of the model's own experts and of fusedmoe never differ by more than {gap:.1e}.</p>
<section class="card wide"><h2>Loss</h2>{_curves(results)}<div class="key">{key}</div></section>
<div class="grid2">
<section class="card"><h2>Tokens per second</h2>{_bars(results, "tokens_per_second", "tok/s")}</section>
<section class="card"><h2>Peak memory of a training step</h2>{_bars(results, "peak_mb", "MB")}</section>
</div>
<section class="card" style="margin-top:16px"><h2>Losses side by side</h2>
<div class="scroll"><table><tr><th></th>{head}</tr>{body}</table></div></section>
</main></body></html>
"""
