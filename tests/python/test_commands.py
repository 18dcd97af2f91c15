# SPDX-License-Identifier: Apache-2.0
"""The benchmark and the example, as a user starts them."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

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
    defined = lambda *flags: "#define Py_LIMITED_API " in subprocess.run([*command, *flags], capture_output=True, text=True, check=True).stdout
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
    results = json.loads((tmp_path / "finetune.json").read_text())["results"]
    assert [r["name"] for r in results] == ["eager", "grouped_mm", "fusedmoe"]
