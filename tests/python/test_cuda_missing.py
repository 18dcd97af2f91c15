# SPDX-License-Identifier: Apache-2.0
"""CUDA where it is not: no library, no driver, a driver that is too old; and the shapes of fake CUDA tensors. Needs no GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

import fusedmoe
from fusedmoe import _core, ops

ROOT = Path(__file__).resolve().parents[2]
TRY = """
import importlib.util, sys
core = importlib.util.module_from_spec(importlib.util.spec_from_file_location("_core", sys.argv[1]))  # torch would take seconds to load
cuda, cpu = eval(sys.argv[2])
try:
    core.plan(*cuda)
except RuntimeError as error:
    print(error)
print("the CPU works:", core.describe(core.plan(*cpu)))
"""


def plans(monkeypatch):
    """What _core.plan is called with for a small layer on either device."""
    seen = []
    monkeypatch.setattr(_core, "plan", lambda *args: seen.append(args))
    monkeypatch.setattr(ops, "_made", [])
    for device in ("cuda:0", "cpu"):
        ops._plan.__wrapped__(ops.EXPERTS, torch.bfloat16, torch.device(device), 1, H=64, I=64, E=2, k=1)
    monkeypatch.undo()
    return repr(seen)


def library():
    places = (Path(fusedmoe.__file__).parent, ROOT / "build/cuda", ROOT / "build")
    return next((p / "libfusedmoe_cuda.so" for p in places if (p / "libfusedmoe_cuda.so").exists()), None)


@pytest.fixture
def attempt(monkeypatch):
    """What a process says that asks for a plan on CUDA, and then for one on the CPU."""
    command = [sys.executable, "-c", TRY, _core.__file__, plans(monkeypatch)]

    def run(**environment):
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "the CPU works: " in done.stdout, done.stdout + done.stderr
        if "is not a CUDA backend of version" in done.stdout and environment["FMOE_CUDA_LIBRARY"] == str(library()):
            pytest.skip("the CUDA backend here is of an older build")
        return done.stdout

    return run


def test_no_library(attempt):
    assert "FMOE_ERR_BACKEND" in (text := attempt(FMOE_CUDA_LIBRARY="/nowhere/libfusedmoe_cuda.so")) and "/nowhere/" in text


def test_a_library_that_is_something_else(attempt):
    other = torch.__file__.replace("__init__.py", "lib/libtorch_global_deps.so")
    assert "is not a CUDA backend" in attempt(FMOE_CUDA_LIBRARY=other)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_no_driver(attempt):
    if library() is None:
        pytest.skip("the CUDA backend was not built here")
    assert "CUDA: no driver was found" in attempt(FMOE_CUDA_LIBRARY=str(library()))


def test_an_old_driver(tmp_path, attempt):
    if library() is None or shutil.which("cc") is None:
        pytest.skip("the CUDA backend was not built here, or there is no compiler")
    source = tmp_path / "driver.c"
    source.write_text("int cuDriverGetVersion(int *v) { *v = 11040; return 0; }\nint cuInit(unsigned f) { return f != 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(source)], check=True)
    text = attempt(FMOE_CUDA_LIBRARY=str(library()), LD_LIBRARY_PATH=str(tmp_path))
    assert "FMOE_ERR_BACKEND" in text and "the driver supports CUDA 11.4, this library was built with" in text


def test_fake_tensors_keep_device_and_shape():
    T, H, I, E, k = 7, 8, 4, 3, 2
    with FakeTensorMode():
        r = lambda *s, dtype=torch.bfloat16: torch.empty(*s, dtype=dtype, device="cuda")  # noqa: E731
        x, p, ids, w = r(T, H), r(T, k, dtype=torch.float32), r(T, k, dtype=torch.int64), [r(E, 2 * I, H), r(E, H, I)]
        how = (ops.SWIGLU, 0, 0.0, 0.0)
        out, saved = ops.experts_forward(x, ids, p, w, *how, (100, 10))
        found = [out, saved, ops.experts(x, ids, p, w, *how), *ops.experts_backward(x, ids, p, w, saved, out, *how, 15)]
        found += [*ops.route(r(T, E, dtype=torch.float32), [], k, (0,) * 6, 0.0, 1.0), *ops.permute(x, ids, E, 0)]
        found += [ops.grouped_matmul(x, r(E, H, I), [], r(E, dtype=torch.int64), 0), ops.activation(r(T, 2 * I), *how)]
    assert all(t.device.type == "cuda" for t in found)
    shapes = [(T, H), (100 + 10 * T,), (T, H), (T, H), (T, k), (E, 2 * I, H), (E, H, I), (T, k), (T, k), (T * k, H), (T * k,), (E,)]
    shapes += [(T, I), (T, I)]
    assert [tuple(t.shape) for t in found] == shapes
