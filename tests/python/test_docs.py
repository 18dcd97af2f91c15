# SPDX-License-Identifier: Apache-2.0
"""The documents: numbers are those of bench/results, links lead somewhere, names exist, examples run."""

import importlib.util
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from common import V5

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(p for d in (".", "docs", "bench/results") for p in (ROOT / d).glob("**/*.md" if d == "docs" else "*.md"))
LONGEST = {"README.md": 130, "docs/benchmarks.md": 250, "docs/quickstart/*.md": 60}
SOURCES = ("include", "src", "python", "cli", "cmake", "tests", "bench", "examples", "CMakeLists.txt", "Makefile", "pyproject.toml")

if not V5:
    pytest.skip("one version is enough", allow_module_level=True)

sys.path.append(str(ROOT / "bench"))
import doc_tables  # noqa: E402
import figures  # noqa: E402


def name(path):
    return str(path.relative_to(ROOT))


@cache
def sources():
    """The text of everything that is not a document."""
    ends = {".c", ".h", ".cpp", ".cu", ".cuh", ".inc", ".py", ".sh", ".txt", ".cmake", ".toml", ".in", ".map", ".yml", ""}
    files = [
        f for s in SOURCES for f in ([ROOT / s] if (ROOT / s).is_file() else (ROOT / s).rglob("*")) if f.is_file() and f.suffix in ends
    ]
    return "\n".join(f.read_text(errors="replace") for f in files if f.name != "test_docs.py" and "__pycache__" not in f.parts)


def prose(text):
    """A page without generated regions, code and links' targets."""
    text = re.sub(r"<!-- (table|code): .*?<!-- end -->|^```.*?^```|<!--.*?-->|`[^`\n]*`", " ", text, flags=re.S | re.M)
    return re.sub(r"\]\([^)]*\)", "]", text)


# ---- numbers ----


def test_tables_and_charts_are_what_the_results_say():
    assert figures.stale() == []


def test_a_changed_result_is_found(monkeypatch):
    row = doc_tables.pick("cpu_lora", impl="fusedmoe")[0]
    monkeypatch.setitem(row, "ms_a_step", "1")
    assert "docs/benchmarks.md" in figures.stale() and "docs/charts/lora.svg" in figures.stale()


VERSIONED = "gcc|clang|cmake|CUDA|torch|transformers|PEFT|TRL|CANN|Python|oneDNN|OpenBLAS|SonicMoE|quack-kernels|Liger|Liger-Kernel|Zen|v4"
ALLOWED = [  # sizes, versions, names; a measurement is none of them
    r"\b[THIEKNRk]\s?=\s?[\d,]+( and \d+)?",
    rf"\b({VERSIONED}|capability)( \(?from)? #?[\d.]+(\.post\d)?(( to|,| and) [\d.]+)*",
    r"\b(rank|LoRA) (of )?\d+",
    r"pull request \d+ at \w+|\b[0-9a-f]{7,8}\b|#\d+",
    r"\d+ x \d+( x \d+)?|\b6 T k H I\b|\b[24]-bit\b|\b910B\b|\b910_93\b|\b950\b",
    r"\d+ million parameters|\b\d+ tokens a step|\b2 MiB, which|Apache-2\.0",
]


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_no_measured_number_is_written_by_hand(page):
    text = prose((ROOT / page).read_text())
    for pattern in ALLOWED:
        text = re.sub(pattern, " ", text, flags=re.M)
    assert re.findall(r"[^\n]{0,40}(?<![\w.-])\d[\d.,]*(?![\w-])[^\n]{0,20}", text) == []


def test_a_measured_number_in_prose_is_found(monkeypatch, tmp_path):
    (tmp_path / "README.md").write_text("With T = 512 and torch 2.13 it is 2.4 times as fast as before.\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    with pytest.raises(AssertionError, match="2.4 times"):
        test_no_measured_number_is_written_by_hand("README.md")


@pytest.mark.parametrize("pattern", LONGEST)
def test_pages_are_short(pattern):
    pages = list(ROOT.glob(pattern))
    assert pages
    assert {name(p): len(p.read_text().splitlines()) for p in pages if len(p.read_text().splitlines()) > LONGEST[pattern]} == {}


# ---- links ----


def anchors(path):
    """GitHub's: lower case, punctuation gone, spaces to hyphens."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h).replace("`", "").lower()).replace(" ", "-") for h in heads}


def broken_links(page):
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    assert list(broken_links(page)) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "a.md").write_text("# One two\n[x](a.md#one-two) [x](#one) [x](b.md) [x](https://example.org)\n")
    assert list(broken_links(tmp_path / "a.md")) == ["#one", "b.md"]


# ---- names ----


def unknown(page):
    """FMOE_ and fmoe_ names, options of our commands, and paths of the tree that a page has and the sources have not."""
    text, known = page.read_text(), sources()
    for word in set(re.findall(r"\b(?:FMOE|fmoe)_\w*[^\W_]\b(?![*{])", text)):
        if not re.search(rf"\b{word}\b", known):
            yield word
    commands = re.findall(r"(?:fusedmoe (?:bench|check|info)|fusedmoe\.bench|(?:bench|examples)/\w+\.py)([^\n|`]*)", text)
    for option in {o for line in commands for o in re.findall(r"--[A-Za-z][\w-]*", line)}:
        if f'"{option}"' not in known and f'"{option[2:]}"' not in known:
            yield option
    if page.name != "CHANGELOG.md":  # it also names what is gone
        for path in set(re.findall(r"`((?:src|include|python|cli|bench|tests|examples|docs|cmake)/[\w./-]*\w)`", text)):
            if not (ROOT / path).exists():
                yield path


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_names_exist(page):
    assert list(unknown(page)) == []


def test_an_unknown_name_is_found(tmp_path):
    page = tmp_path / "a.md"
    page.write_text(
        "`FMOE_MAX_ISA` `FMOE_NO_SUCH` fmoe_plan_create fmoe_nothing `src/api.c` `src/none.c` `fusedmoe bench --T 1 --no-such-option`\n"
    )
    assert set(unknown(page)) == {"FMOE_NO_SUCH", "fmoe_nothing", "src/none.c", "--no-such-option"}


def test_environment_variables_are_in_the_table():
    """Whatever a user can set, and nothing else."""
    files = [f for d in ("src", "python", "cli") for f in (ROOT / d).rglob("*.*") if f.suffix in (".c", ".py", ".cpp", ".cu")]
    read = {v for f in files for v in re.findall(r"(?:getenv|environ\.get)\(\"(FMOE_\w+)\"", f.read_text())}
    section = (ROOT / "docs/architecture.md").read_text().partition("## Environment variables")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(FMOE_\w+)` \|", section, re.M)) == read


def test_kernel_names_exist():
    from fusedmoe.kernels import get_default_kernels

    pages = "\n".join(p.read_text() for p in PAGES)
    said = set(re.findall(r"`((?:\w+_)?fused_moe)`", pages))
    assert said and said <= {"npu_fused_moe", "cuda_fused_moe", "cpu_fused_moe", "fused_moe"}
    assert said - {"cuda_fused_moe", "npu_fused_moe"} <= set(get_default_kernels())


# ---- examples ----


EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - {ROOT / "examples/finetune.py", ROOT / "examples/report.py"})


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda p: p.stem)
def test_examples_run(script, tmp_path):
    """As a stranger runs them: from another folder, nothing downloaded. 77 is a package that is not installed."""
    environment = dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PYTHONPATH="", TOKENIZERS_PARALLELISM="false")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode == 77:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


def test_every_example_is_in_a_quickstart():
    pages = "\n".join(p.read_text() for p in (ROOT / "docs/quickstart").glob("*.md"))
    assert [name(e) for e in EXAMPLES if name(e) not in pages] == []


# ---- the site ----


def test_the_site_has_every_page_and_function():
    spec = importlib.util.spec_from_file_location("fusedmoe_site", ROOT / "tools/site.py")
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    made = {*site.PAGES.values(), site.C_API}
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert listed == made | {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    functions = set(re.findall(r"FMOE_API [^;]*?(fmoe_\w+)\(", (ROOT / "include/fusedmoe.h").read_text()))
    assert len(functions) > 20 and {f for f in functions if f not in site.c_api()} == set()


def test_the_site_builds(tmp_path):
    """Without a warning: a link or an anchor that leads nowhere is one."""
    pytest.importorskip("material", reason="mkdocs-material is not installed: make docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "c-api/index.html").read_text()
    assert "fmoe_plan_create" in page and " ----" not in re.sub(r"<pre>.*?</pre>", "", page, flags=re.S)
