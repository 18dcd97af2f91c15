# SPDX-License-Identifier: Apache-2.0
"""The benchmark and the example, as a user starts them."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import fusedmoe
from common import V5

if not V5:
    pytest.skip("one version is enough", allow_module_level=True)
ROOT = Path(__file__).resolve().parents[2]


def test_dense_beside_the_layer():
    sizes = [f"--{name}={value}" for name, value in dict(T=5, H=32, I=16, E=4, k=2, n=32, pairs=1, threads=1).items()]
    done = subprocess.run([sys.executable, ROOT / "bench/dense.py", *sizes], capture_output=True, text=True)
    assert done.returncode == 0 and "bwd" in done.stdout, done.stderr


def test_gmm_beside_torch():
    sizes = [f"--{name}={value}" for name, value in dict(device="cpu", R=64, K=32, N=16, E=4, rounds=1).items()]
    done = subprocess.run([sys.executable, ROOT / "bench/gmm.py", *sizes], capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1 + 5 * 2, done.stderr


def test_layouts_beside_swiglu():
    sizes = [f"--{name}={value}" for name, value in dict(device="cpu", T=8, H=32, I=16, E=4, k=2, rank=2).items()]
    done = subprocess.run([sys.executable, ROOT / "bench/layouts.py", *sizes], capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 6 * 2, done.stderr


def test_decode_of_models():
    done = subprocess.run([sys.executable, ROOT / "bench/decode.py", "--models=DeepSeek-V2-Lite", "--T=1"], capture_output=True, text=True)
    if torch.cuda.is_available():
        assert done.returncode == 0 and len(done.stdout.splitlines()) == 3, done.stderr
    else:
        assert done.returncode == 2 and "no CUDA device" in done.stderr


def fusedmoe_program(*arguments, **environment):
    """`fusedmoe`, as the wheel installs it."""
    program = Path(sysconfig.get_path("scripts"), "fusedmoe")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


def test_the_report_has_what_a_bug_report_needs():
    import transformers

    from fusedmoe import _core

    module = subprocess.run([sys.executable, "-m", "fusedmoe"], capture_output=True, text=True, timeout=120)
    assert module.returncode == 0, module.stdout + module.stderr
    for title in ("versions", "machine", "devices", "cpu kernels", "backends", "autoload", "environment", "check"):
        assert f"\n{title}:\n" in f"\n{module.stdout}", title
    assert "FAILED" not in module.stdout and re.search(r"\n  ok      cpu     bf16  bound 1.0e-02:  out \d", module.stdout)
    program = fusedmoe_program("--json", FMOE_MAX_ISA="c", FMOE_POOL="0", CUDA_API_TOKEN="word")
    found = json.loads(program.stdout)
    assert program.returncode == 0 and found["check_seconds"] < 5, found
    assert found["versions"]["fusedmoe"] == found["versions"]["library"] == _core.version
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["transformers"] == transformers.__version__
    assert found["cpu kernels"]["chosen"] == "c" == found["cpu kernels"]["FMOE_MAX_ISA"] and "c " in found["cpu kernels"]["available"]
    assert list(found["backends"]) == ["cpu", "cuda", "ascend"] and all(found["backends"].values())
    assert found["environment"].items() >= {"FMOE_MAX_ISA": "c", "FMOE_POOL": "0", "CUDA_API_TOKEN": "(hidden)"}.items()
    assert found["autoload"]["active"] == "yes" and found["autoload"]['"fusedmoe"'] == "in ExpertsInterface"
    assert [(r["device"], r["dtype"]) for r in found["check"]][:2] == [("cpu", "f32"), ("cpu", "bf16")]
    assert all(r["ok"] and 0 < max(r["errors"].values()) <= r["bound"] for r in found["check"])
    assert {*found["check"][0]["errors"]} == {"out", "inference", "dx", "dp", "dw1", "dw2"}


def test_the_report_says_why_nothing_is_loaded():
    found = json.loads(fusedmoe_program("info", "--json", FMOE_AUTOLOAD="0").stdout)
    assert "check" not in found and found["autoload"]["active"] == "no: FMOE_AUTOLOAD=0" and found["autoload"]["FMOE_AUTOLOAD"] == "0"
    assert found["autoload"]['"fusedmoe"'].startswith("NOT in ExpertsInterface")
    found = json.loads(fusedmoe_program("info", "--json", TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout)
    assert found["autoload"]["active"] == "no: TORCH_DEVICE_BACKEND_AUTOLOAD=0"


def test_the_report_without_transformers(tmp_path):
    """A folder with everything that is installed here but transformers and PEFT."""
    for folder in {p for p in sys.path if "site-packages" in p}:
        for entry in Path(folder).iterdir():
            if not re.match(r"transformers|peft|.*\.pth$", entry.name) and not (tmp_path / entry.name).exists():
                (tmp_path / entry.name).symlink_to(entry)
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import runpy; runpy.run_module('fusedmoe', run_name='__main__')"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert re.search(r"transformers +not installed", done.stdout) and "transformers is not installed" in done.stdout
    assert "2 of 2 ok" in done.stdout or torch.cuda.is_available()


def test_the_check_fails_where_results_are_wrong(monkeypatch, capsys):
    from fusedmoe import diagnose

    right = diagnose.experts
    monkeypatch.setattr(diagnose, "experts", lambda *a: right(*a) * 1.02)
    assert diagnose.main(["check"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "check:" and sum(line.startswith("  FAILED  cpu") for line in lines) == 2 and "0 of " in lines[-1]

    def broken(*_):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(diagnose, "experts", broken)
    assert diagnose.main(["check", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["check"][0]["problem"] == "RuntimeError: no such kernel" and not found["check"][0]["ok"]
    monkeypatch.setattr(diagnose, "experts", lambda *a: right(*a) * float("nan"))
    assert diagnose.main(["check"]) == 1


def test_the_program_of_the_wheel():
    from fusedmoe import _core

    assert fusedmoe_program("--version").stdout == f"fusedmoe {_core.version}\n"
    assert fusedmoe_program("rubbish").returncode == 2
    for words in (["--help"], ["bench", "--help"]):
        shown = fusedmoe_program(*words)
        assert shown.returncode == 0 and "Exit status" in shown.stdout, shown.stderr


def test_bench_help_has_every_option():
    shown = fusedmoe_program("bench", "--help", COLUMNS="100").stdout
    options = "op arch device T H I E k dtype impl threads rounds forward-only json csv png".split()
    assert not [name for name in options if not re.search(rf"^  --{name}\b", shown, re.M)]
    assert re.search(r"^  share +GFLOP/s divided by a ceiling", shown, re.M) and re.search(r"^  roofline +CPU: the least time", shown, re.M)
    assert "milliseconds" in shown and "MiB" in shown and "default 64,512" in fusedmoe_program("bench", "--device", "cpu", "--help").stdout
    assert "default 16,4096,16384" in fusedmoe_program("bench", "--device", "cuda", "--help").stdout
    assert max(map(len, shown.splitlines())) <= 100


def test_bench(tmp_path, capsys):
    from fusedmoe import bench

    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "png")}
    shape = ["--T", "4,9", "--H", "32", "--I", "16", "--E", "4", "--k", "2", "--rounds", "1", "--dtype", "f32,bf16",
             "--device", "cpu"]  # fmt: skip
    assert bench.main([*shape, *(a for kind, f in files.items() for a in (f"--{kind}", str(f)))]) == 0
    rows = json.loads(files["json"].read_text())
    assert len(rows) == 2 * 2 * 3 * 2
    keys = "op pass backend isa_or_arch dtype T H I E k threads ms gflops ceiling_gflops share peer roofline_ms of_roofline".split()
    assert all(set(keys) <= set(r) and r["ms"] > 0 for r in rows)
    assert len(files["csv"].read_text().splitlines()) == len(rows) + 1 and files["png"].stat().st_size > 5000
    assert all(0 < r["roofline_ms"] < r["ms"] and r["stream_gbytes"] > 0 for r in rows)
    # 12 GFLOP at 3 GFLOP/s and 6 GB at 4 GB/s: 4 s; then 24 GFLOP, 8 s, beside 6 + 42 GB, 12 s
    assert bench.roofline_ms(12e9, 6e9, 42e9, 3, 4, "fwd") == 4000 and bench.roofline_ms(12e9, 6e9, 42e9, 3, 4, "fwd+bwd") == 16000
    assert "fusedmoe" in capsys.readouterr().out
    for arch in ("gpt_oss", "nemotron_h", "deepseek_v4"):
        assert bench.main(["--arch", arch, "--impl", "eager,fusedmoe", "--T", "5", "--H", "32", "--I", "16", "--E", "4", "--k", "2",
                           "--rounds", "1", "--dtype", "f32", "--device", "cpu", "--forward-only"]) == 0  # fmt: skip


def test_free_threaded_python_gets_an_extension_of_its_own():
    """It has no limited API: with that, its headers are an error."""
    compiler, headers = shutil.which("cc"), sysconfig.get_path("include")
    if not compiler or not Path(headers, "Python.h").exists():
        pytest.skip("no compiler, or no headers of Python")
    command = [compiler, "-E", "-dM", f"-I{headers}", f"-I{ROOT / 'include'}", str(ROOT / "python/core/module.c")]
    output = lambda *flags: subprocess.run([*command, *flags], capture_output=True, text=True, check=True).stdout
    defined = lambda *flags: "#define Py_LIMITED_API " in output(*flags)
    assert defined() and not defined("-DPy_GIL_DISABLED=1")


def test_finetune(tmp_path):
    command = [sys.executable, str(ROOT / "examples/finetune.py"), "--quick", "--H", "64", "--I", "32", "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "the same curve" in run.stdout and "tokens/s" in run.stdout
    page = (tmp_path / "finetune.html").read_text()
    assert not re.search(r"(src|href)=|url\(|@import|<script", page)  # nothing is loaded from elsewhere
    assert "prefers-color-scheme:dark" in page and "viewport" in page
    assert (tmp_path / "finetune.png").stat().st_size > 10000
    written = json.loads((tmp_path / "finetune.json").read_text())
    results, facts = written["results"], written["facts"]
    assert [r["name"] for r in results] == ["eager", "grouped_mm", "fusedmoe"]
    # Every step is in every run, once, and has one number: in the terminal, on the page, in the file.
    assert {len(r["losses"]) for r in results} == {6} and "6 steps" in facts["step"]
    assert re.search(r"^loss at step +1 +2 +3 +4 +5 +6$", run.stdout, re.M)
    assert re.findall(r"<th>step (\d+)</th>", page) == [*"123456"]
    assert f"<td>{results[2]['losses'][-1]:.5f}</td></tr></table>" in page
    assert facts["machine"].startswith(fusedmoe.info().splitlines()[1].removeprefix("cpu: ").split(", levels")[0])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", facts["date"]) and re.match(r"[0-9a-f]{7,}|unknown", facts["commit"])
    assert all(value in page for value in facts.values())
    assert written["busy"] == ("busy with other work" in run.stdout) == ("busy with other work" in page)


def test_the_page_of_finetune(monkeypatch, tmp_path):
    """Curves that lie on one another differ in line and marker too; a busy machine and a memory that was not measured are said."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import report

    results = [dict(name=n, label=n, losses=[5.0 - 0.1 * i for i in range(40)], tokens_per_second=9.0, peak_mb=None) for n in report.COLORS]
    run = dict(facts={"machine": "a <CPU>"}, busy=True, gap=1e-6, agree=True, results=results)
    page = report.page(run)
    assert report.BUSY_TEXT in page and report.BUSY_TEXT not in report.page({**run, "busy": False})
    assert "a &lt;CPU&gt;" in page and page.count("not measured") == 3 and "NOT THE SAME" in report.page({**run, "agree": False})
    lines = re.findall(r'<polyline class="curve (\w+)" stroke-width="([^"]*)" stroke-dasharray="([^"]*)"', page)
    assert [name for name, _, _ in lines] == [*report.COLORS] and len({dashes for _, _, dashes in lines}) == 3
    kinds = {name: {*re.findall(rf'<g class="mark {name}"><(\w+)', page)} for name in report.COLORS}
    assert kinds == {"eager": {"circle"}, "grouped_mm": {"rect"}, "fusedmoe": {"path"}}
    places = [{*re.findall(rf'translate\(([^)]*)\)"><g class="mark {name}">', page)} - {"30.0 10.0"} for name in report.COLORS]
    assert all(len(p) > 5 for p in places) and len(set.union(*places)) == sum(map(len, places))  # none hides another
    assert re.search(r'class="axis"[^>]*>step</text>', page) and re.search(r'class="axis"[^>]*>loss</text>', page)
    assert ".scroll{overflow-x:auto" in page and '<div class="scroll"' in page and report.shown_steps(40)[::6] == [1, 40]
    report.picture(run, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10000
