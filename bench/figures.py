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
import re
import sys
from pathlib import Path

from doc_charts import FIGURES, digest, draw, drawn_digest
from doc_tables import ROOT, TABLES

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
REGION = re.compile(r"<!-- (table|code): ([^\n]*?) -->\n.*?<!-- end -->", re.S)


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
