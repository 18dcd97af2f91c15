# SPDX-License-Identifier: Apache-2.0
"""The CPU tables of docs/benchmarks.md, measured and written as Markdown.

    python bench/cpu_tables.py layer          the layer from C: ceilings, packed weights, pages, peers (some ten minutes)
    python bench/cpu_tables.py transformers   the layer from Python, beside transformers' implementations (some ten minutes)

The first needs build/fusedmoe alone, the second the package; both a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SMALL, QWEN3 = "H=1024 I=512 E=32 k=4", "H=2048 I=768 E=128 k=8"


def measured(*command: object) -> list[dict]:
    """The rows that a bench writes as JSON."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run([*map(str, command), "--json", file.name], check=True, stdout=sys.stderr)
        return json.loads(Path(file.name).read_text())


def table(header: str, rows: list[list[object]]) -> None:
    """One table of Markdown."""
    columns = header.split("; ")
    for row in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(map(str, row)) + " |")
    print(flush=True)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def layer(o: argparse.Namespace) -> None:
    """Shares of the ceiling, of a sweep over the same weights, and times of peers."""
    found: dict[tuple, dict] = {}
    for pages in ("small", "huge"):
        for what, T in (("fwd", "1,8,128,512,4096"), ("bwd", "128,512,4096"), ("fwd+bwd", "128,512,4096")):
            more = ("--packed", "--peers") if what == "fwd" else ()
            command = (o.bench, "bench", "--op", "experts", "--dtype", o.dtype, "--threads", o.threads, "--pages", pages, "--pass", what)
            for r in measured(*command, "--T", T, "--seconds", o.seconds, *more):
                found[pages, what, r["dtype"], r["T"], r["peer"] or ("packed" if r["packed"] else "plain")] = r

    def cells(what: str, dtype: str, T: int, ways: list[tuple[str, str]]) -> list[str]:
        return [percent(r["share"]) if (r := found.get((pages, what, dtype, T, way))) else "" for way, pages in ways]

    dtypes = o.dtype.split(",")
    first = found["small", "fwd", dtypes[0], 512, "plain"]
    print(f"{first['isa_or_arch']}, {first['threads']} threads; ceilings, GF/s:",
          ", ".join(f"{d} {found['small', 'fwd', d, 512, 'plain']['ceiling_gflops']:.0f}" for d in dtypes), end="\n\n")  # fmt: skip
    four = [("plain", "small"), ("plain", "huge"), ("packed", "small"), ("packed", "huge")]
    two = four[:2]
    passes = (("fwd", four), ("bwd", two), ("fwd+bwd", two))
    table(
        "dtype, T (rows an expert); forward: plain, small pages; plain, huge; packed, small; packed, huge; "
        "backward: small; huge; both: small; huge",
        [[f"{d}, {T} ({T // 8})", *(cell for what, ways in passes for cell in cells(what, d, T, ways))]
         for d in dtypes for T in (128, 512, 4096)],
    )  # fmt: skip
    table(
        "dtype, T; plain, small pages; plain, huge; packed, small; packed, huge",
        [[f"{d}, {T}", *(f"{r['gbytes_of_weights']:.1f}, {percent(r['sweep_share'])} of {r['sweep_gbytes']:.0f}"
                         for way, pages in four if (r := found[pages, "fwd", d, T, way]))] for d in dtypes for T in (1, 8)],
    )  # fmt: skip
    rows = []
    for d, T, pages in ((d, T, pages) for d in dtypes for T in (1, 8, 128, 512, 4096) for pages in ("small", "huge")):
        ways = {way: found.get((pages, "fwd", d, T, way)) for way in ("plain", "packed", "onednn", "openblas")}
        ratios = [f"{r['ratio']:.2f}, {r['ratio_packed']:.2f}" if (r := ways[peer]) else "" for peer in ("onednn", "openblas")]
        ms = [f"{r['ms']:.3g}" if r else "" for r in ways.values()]
        rows.append([f"{d}, {T}, {pages}", *ms[:3], ratios[0], ms[3], ratios[1]])
    table("dtype, T, pages; plain, ms; packed, ms; oneDNN, ms; plain, packed to it; OpenBLAS, ms; plain, packed to it", rows)


def transformers(o: argparse.Namespace) -> None:
    """Forward and forward + backward of both shapes beside the faster of eager and grouped_mm."""
    for shape, rounds in ((SMALL, 9), (QWEN3, 5)):
        print(shape + ":\n")
        sizes = [word for part in shape.split() for word in ("--" + part.split("=")[0], part.split("=")[1])]
        rows = []
        for dtype in o.dtype.split(","):
            for T in (1, 16, 64, 512):
                runs = 3 if (shape, T) == (SMALL, 512) else 1
                command = (sys.executable, "-m", "fusedmoe.bench", "--device", "cpu", "--impl", "eager,grouped_mm,fusedmoe",
                           "--threads", o.threads, *sizes, "--T", T, "--dtype", dtype, "--rounds", rounds)  # fmt: skip
                found = [{(r["backend"], r["pass"]): r for r in measured(*command)} for _ in range(runs)]
                row: list[object] = [f"{dtype}, {T}"]
                for what in ("fwd", "fwd+bwd"):
                    pairs = [(min(f["eager", what], f["grouped_mm", what], key=lambda r: r["ms"]), f["fusedmoe", what]) for f in found]
                    row.append("; ".join(f"{a['backend'][0]} {a['ms']:.3g}, {b['ms']:.3g}" for a, b in pairs) + " ms")
                    row.append(", ".join(f"{a['ms'] / b['ms']:.2f}" for a, b in pairs))
                    row.append(", ".join(f"{100 * b['of_roofline']:.0f}" for _, b in pairs) + " %")
                for key in ("peak_mb", "kept_mb"):
                    row.append(" / ".join(f"{found[0][name, 'fwd+bwd'][key] or 0:g}" for name in ("eager", "grouped_mm", "fusedmoe")))
                rows.append(row)
        times = "the faster of (e)ager and (g)rouped_mm, fusedmoe; ratio; of the roofline"
        table(f"dtype, T; forward: {times}; forward + backward: {times}; peak of a step: e, g, ours, MB; kept, MB", rows)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["layer", "transformers"])
    parser.add_argument("--dtype", default="bf16,f32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1, help="of each contender in each shape (default %(default)s)")
    parser.add_argument("--bench", default="build/fusedmoe", help="the command (default %(default)s)")
    o = parser.parse_args()
    (layer if o.what == "layer" else transformers)(o)
    return 0


if __name__ == "__main__":
    sys.exit(main())
