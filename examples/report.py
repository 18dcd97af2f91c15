# SPDX-License-Identifier: Apache-2.0
"""The chart (PNG, by matplotlib) and the page (one HTML file, nothing loaded from elsewhere) of finetune.py.

The losses of the three runs lie on one another: line, marker and colour tell them apart, and markers stand at different steps.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

COLORS = {"eager": "#d9822b", "grouped_mm": "#6b7fd7", "fusedmoe": "#1a936f"}
WIDTHS, DASHES, MARKERS = (9, 4, 3), ("", "12 8", "0 7"), ("o", "s", "^")  # from the first run, at the bottom, to the last
BUSY_TEXT = "The machine was busy with other work: speeds say little."


def shown_steps(steps: int) -> list[int]:
    """The first, the last, and up to five between; the first step is 1 everywhere."""
    return sorted({1 + round(i * (steps - 1) / 6) for i in range(7)})


def _marked(steps: int, which: int) -> list[int]:
    """The steps at which a run's curve has a marker: about eight, each run at its own."""
    every = max(3, steps // 8)
    return list(range(1 + which * every // 3, steps + 1, every))


def amount(value: float | None, unit: str = "") -> str:
    """A number as the tables have it."""
    return "not measured" if value is None else f"{value:,.0f}{unit}"


def picture(run: dict[str, Any], path: Path) -> None:
    """Losses, tokens a second, and memory, in one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = run["results"]
    figure, (loss, speed, memory) = plt.subplots(1, 3, figsize=(12, 4.4), width_ratios=(2, 1, 1), layout="constrained")
    for i, (r, style, width) in enumerate(zip(results, ("-", "--", ":"), (5, 3, 2), strict=True)):
        steps = len(r["losses"])
        loss.plot(range(1, steps + 1), r["losses"], style, lw=width, color=COLORS[r["name"]], label=r["label"], marker=MARKERS[i],
                  markevery=[s - 1 for s in _marked(steps, i)], markersize=9, markeredgecolor="white", dash_capstyle="round")  # fmt: skip
    loss.set(xlabel="step", ylabel="loss", title="the same curve three times" if run["agree"] else "NOT the same curve")
    loss.legend(handlelength=4)
    names, colors = [r["name"] for r in results], [COLORS[r["name"]] for r in results]
    for axis, key, label in ((speed, "tokens_per_second", "tokens per second"), (memory, "peak_mb", "peak of a step, MB")):
        bars = axis.bar(names, [r[key] or 0 for r in results], color=colors)
        axis.bar_label(bars, [amount(r[key]) for r in results], fontsize=9)
        axis.set(xlabel="experts implementation", ylabel=label, title=label)
        axis.tick_params(axis="x", labelsize=8)
    for axis in (loss, speed, memory):
        axis.spines[["top", "right"]].set_visible(False)
    lines = [f"{name}: {value}" for name, value in run["facts"].items()]
    figure.suptitle("\n".join("     ".join(lines[i : i + 2]) for i in range(0, len(lines), 2)), fontsize=8)
    if run["busy"]:
        figure.supxlabel(BUSY_TEXT, fontsize=10, color="#b3261e")
    figure.savefig(path, dpi=150)


def _mark(which: int, x: float, y: float, name: str) -> str:
    """A circle, a square or a triangle around (x, y)."""
    shape = ('<circle r="6"/>', '<rect x="-5.5" y="-5.5" width="11" height="11"/>', '<path d="M0-7 6.5 5.5h-13z"/>')[which]
    return f'<g transform="translate({x:.1f} {y:.1f})"><g class="mark {name}">{shape}</g></g>'


def _stroke(which: int, name: str) -> str:
    return f'class="curve {name}" stroke-width="{WIDTHS[which]}" stroke-dasharray="{DASHES[which]}"'


def _curves(results: list[dict[str, Any]]) -> str:
    """An SVG of the losses; text and lines take their colours from the page."""
    width, height, left, right, bottom, top = 640, 360, 100, 14, 72, 14
    values = [v for r in results for v in r["losses"]]
    low, high = min(values), max(values)
    pad = 0.05 * (high - low or 1)
    low, high = low - pad, high + pad
    steps = len(results[0]["losses"])
    x = lambda step: left + (width - left - right) * (step - 1) / max(1, steps - 1)  # noqa: E731
    y = lambda v: top + (height - top - bottom) * (high - v) / (high - low)  # noqa: E731
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="loss of every step, three curves that lie on one another">']
    for i in range(5):
        v = low + (high - low) * i / 4
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{y(v) + 6:.1f}" text-anchor="end">{v:.2f}</text>')
    parts += [f'<text x="{x(s):.1f}" y="{height - bottom + 28}" text-anchor="middle">{s}</text>' for s in shown_steps(steps)]
    middle = (top + height - bottom) / 2
    parts.append(f'<text class="axis" x="{(left + width - right) / 2}" y="{height - 10}" text-anchor="middle">step</text>')
    parts.append(f'<text class="axis" transform="translate(22 {middle}) rotate(-90)" text-anchor="middle">loss</text>')
    for i, r in enumerate(results):
        points = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in enumerate(r["losses"], 1))
        parts.append(f'<polyline {_stroke(i, r["name"])} points="{points}"/>')
    for i, r in enumerate(results):
        parts += [_mark(i, x(s), y(r["losses"][s - 1]), r["name"]) for s in _marked(steps, i)]
    return "".join(parts) + "</svg>"


def _key(which: int, r: dict[str, Any]) -> str:
    line = f'<line {_stroke(which, r["name"])} x1="4" x2="56" y1="10" y2="10"/>{_mark(which, 30, 10, r["name"])}'
    return f'<span><svg viewBox="0 0 60 20">{line}</svg>{escape(r["label"])}</span>'


def _bars(results: list[dict[str, Any]], key: str, unit: str) -> str:
    most = max(r[key] or 0 for r in results) or 1
    rows = []
    for r in results:
        rows.append(f'<div class="row"><span>{escape(r["label"])}</span><div class="track"><div class="bar {r["name"]}" '
                    f'style="width:{100 * (r[key] or 0) / most:.1f}%"></div></div><b>{amount(r[key], unit)}</b></div>')  # fmt: skip
    return "".join(rows)


_STYLE = """
:root{--ink:#1c2430;--soft:#5b6676;--paper:#fbfbfd;--card:#fff;--line:#e3e6ec;--eager:#d9822b;--grouped_mm:#6b7fd7;--fusedmoe:#1a936f;
--warn:#8c1d18;--warnpaper:#fde9e7}
@media(prefers-color-scheme:dark){:root{--ink:#e8ebf0;--soft:#9aa5b5;--paper:#12161d;--card:#1b212b;--line:#2d3542;
--eager:#f0a35c;--grouped_mm:#93a4f2;--fusedmoe:#4cc9a0;--warn:#ffb4ab;--warnpaper:#3b1714}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1040px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.6rem;line-height:1.25;margin:.2em 0}
h2{font-size:1.05rem;margin:0 0 12px}
p{color:var(--soft);margin:.4em 0 1.2em}
p.busy{color:var(--warn);background:var(--warnpaper);border-radius:8px;padding:8px 12px;font-weight:600}
dl{display:grid;grid-template-columns:auto 1fr;gap:2px 14px;margin:12px 0 18px;font-size:.92rem}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
.grid2{display:grid;gap:16px;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:16px;min-width:0;margin-bottom:16px}
.grid2 .card{margin-bottom:0}
.plot svg{width:100%;max-width:800px;height:auto;display:block;margin:0 auto}
svg text{fill:var(--soft);font:13px system-ui,sans-serif}
svg text.axis{fill:var(--ink)}
.plot .mark{transform:scale(.8)}
@media(max-width:640px){.plot{margin:0 -8px}svg text{font-size:24px}.plot .mark{transform:scale(1.5)}}
svg .grid{stroke:var(--line)}
.curve{fill:none;stroke-linejoin:round;vector-effect:non-scaling-stroke}
.curve.eager{stroke-opacity:.5}.curve.fusedmoe{stroke-linecap:round}
.mark{stroke:var(--card);stroke-width:1.5}
.curve.eager{stroke:var(--eager)}.curve.grouped_mm{stroke:var(--grouped_mm)}.curve.fusedmoe{stroke:var(--fusedmoe)}
.mark.eager{fill:var(--eager)}.mark.grouped_mm{fill:var(--grouped_mm)}.mark.fusedmoe{fill:var(--fusedmoe)}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;margin-top:8px;font-size:.9rem}
.key svg{width:60px;height:20px;margin-right:8px;vertical-align:-5px}
.row{display:grid;grid-template-columns:1fr auto;gap:2px 12px;margin:10px 0;font-size:.95rem}
.track{grid-column:1/-1;grid-row:2;background:var(--line);border-radius:6px;height:14px;overflow:hidden}
.bar{height:100%;border-radius:6px}
.bar.eager{background:var(--eager)}.bar.grouped_mm{background:var(--grouped_mm)}.bar.fusedmoe{background:var(--fusedmoe)}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:8px}
table{border-collapse:separate;border-spacing:0;width:100%;font-variant-numeric:tabular-nums;font-size:.92rem}
td,th{padding:6px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
tr:last-child>*{border-bottom:0}
tr>:first-child{text-align:left;font-weight:600;position:sticky;left:0;background:var(--card);border-right:1px solid var(--line)}
"""


def page(run: dict[str, Any]) -> str:
    """A page that reads well wide and narrow, light and dark."""
    results = run["results"]
    ours, picked = results[-1], shown_steps(len(results[0]["losses"]))
    head = "".join(f"<th>step {s}</th>" for s in picked)
    cells = ["".join(f"<td>{r['losses'][s - 1]:.5f}</td>" for s in picked) for r in results]
    body = "".join(f"<tr><th>{escape(r['name'])}</th>{c}</tr>" for r, c in zip(results, cells, strict=True))
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in run["facts"].items())
    busy = f'<p class="busy">{BUSY_TEXT}</p>\n' if run["busy"] else ""
    rate = ours["tokens_per_second"]
    faster = " and ".join(f"{rate / r['tokens_per_second']:.2f}x as fast as {escape(r['label'])}" for r in results[:-1])
    differ = f"Over {len(ours['losses'])} steps the losses of the model's own experts and of fusedmoe differ by {run['gap']:.1e} at most"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark"><title>fusedmoe: one fine-tune, three ways</title><style>{_STYLE}</style></head>
<body><main>
<h1>One fine-tune, three ways</h1>
{busy}<p>fusedmoe is {faster}. {differ}{"" if run["agree"] else ": NOT THE SAME CURVE"}.</p>
<dl>{facts}</dl>
<section class="card"><h2>Loss of every step</h2><div class="plot">{_curves(results)}</div>
<div class="key">{"".join(_key(i, r) for i, r in enumerate(results))}</div></section>
<div class="grid2">
<section class="card"><h2>Tokens per second</h2>{_bars(results, "tokens_per_second", " tok/s")}</section>
<section class="card"><h2>Peak memory of a training step</h2>{_bars(results, "peak_mb", " MB")}</section>
</div>
<section class="card" style="margin-top:16px"><h2>Losses side by side</h2>
<div class="scroll" tabindex="0" role="region" aria-label="losses side by side">
<table><tr><th></th>{head}</tr>{body}</table></div></section>
</main></body></html>
"""
