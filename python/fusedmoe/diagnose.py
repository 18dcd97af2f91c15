# SPDX-License-Identifier: Apache-2.0
"""A report on this installation to paste into a bug report (versions, machine, devices, backends, ...), and a self-check."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import _core
from .autograd import experts

PACKAGES = ("torch", "transformers", "peft", "llamafactory", "torch_npu", "triton", "numpy")
VARIABLES = re.compile(r"(FMOE|OMP|KMP|GOMP|MKL|CUDA|NVIDIA|ASCEND|NPU|TORCH|PYTORCH)_\w+|LD_(PRELOAD|LIBRARY_PATH)|HF_HUB_OFFLINE")
SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
BOUNDS = {"f32": 2e-6, "bf16": 1e-2}  # of the check: 16 and 1.3 machine epsilons. Sums are in f32; what is stored is rounded three times


# ---- what is there ------------------------------------------------------------------------------------------


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _is_there(package: str) -> bool:
    return _version(package) != "not installed"


def _or_problem(find: Callable[[], Any]) -> Any:
    """What find says; where it fails, how: a report is wanted most where something is broken."""
    try:
        return find()
    except Exception as problem:
        return f"FAILED: {type(problem).__name__}: {problem}"


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith(("model name", "Model")))
    return next(names, platform.processor() or platform.machine())


def _machine() -> dict[str, str]:
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}, {' '.join(platform.libc_ver()) or 'C library unknown'}",
        "cpu": f"{_cpu_name()}, {os.cpu_count()} cores, {len(os.sched_getaffinity(0))} of them for this process{load}",
        "threads of torch": str(torch.get_num_threads()),
    }


def _card(i: int) -> str:
    card = torch.cuda.get_device_properties(i)
    return f"{card.name}, compute capability {card.major}.{card.minor}, {card.total_memory / 2**30:.0f} GiB"


def _npus() -> dict[str, str]:
    npu = getattr(torch, "npu", None)
    if npu is None:
        return {"npu": "none: torch_npu is " + ("installed, torch has not loaded it" if _is_there("torch_npu") else "not installed")}
    if not npu.is_available():
        return {"npu": "none: torch_npu finds no NPU"}
    return {f"npu:{i}": npu.get_device_name(i) for i in range(npu.device_count())}


def _devices() -> dict[str, str]:
    found = {"cpu": _cpu_name()}
    if torch.cuda.is_available():
        found |= {f"cuda:{i}": _or_problem(lambda i=i: _card(i)) for i in range(torch.cuda.device_count())}
    else:
        found["cuda"] = "none: this torch is built without CUDA" if torch.version.cuda is None else "none: torch finds no device it can use"
    npus = _or_problem(_npus)
    return found | (npus if isinstance(npus, dict) else {"npu": npus})


def _backends() -> dict[str, str]:
    """The lines of info() that begin with a backend's name: what it has, or why it is not there."""
    return dict(line.split(": ", 1) for line in _core.info().splitlines() if re.match(r"\w+: ", line))


def _kernels() -> dict[str, str]:
    levels = re.search(r"levels ([^,]*)", _core.info())
    return {"available": levels[1] if levels else "?", "chosen": _core.cpu_isa(), "FMOE_MAX_ISA": os.environ.get("FMOE_MAX_ISA", "not set")}


def _registered() -> str:
    if not _is_there("transformers"):
        return "transformers is not installed"
    try:
        interface = import_module("transformers.integrations.moe").ExpertsInterface
    except (ImportError, AttributeError) as problem:
        return f"transformers has no ExpertsInterface, fusedmoe.apply(model) is the way ({problem})"
    there = "fusedmoe" in interface().valid_keys()
    return "in ExpertsInterface" if there else "NOT in ExpertsInterface; fusedmoe.apply(model) puts it there"


def _autoload() -> dict[str, str]:
    entries = [e for e in metadata.entry_points(group="torch.backends") if e.name == "fusedmoe"]
    finder = getattr(sys.modules.get("_fusedmoe_autoload"), "_Finder", ())
    active = any(isinstance(f, finder) for f in sys.meta_path)
    off = [f"{name}=0" for name in ("FMOE_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD") if os.environ.get(name) == "0"]
    why = off[0] if off else "torch did not call the entry point" if entries else "there is no entry point"
    return {
        "entry point": f"torch.backends: {entries[0].value}" if entries else "not installed",
        "active": "yes" if active else f"no: {why}",
        "FMOE_AUTOLOAD": os.environ.get("FMOE_AUTOLOAD", "not set"),
        '"fusedmoe"': _or_problem(_registered),
    }


def report() -> dict[str, dict[str, Any]]:
    """Everything but the check: sections of names and values."""
    python = f"{platform.python_version()} ({platform.python_implementation()})"
    own = {"fusedmoe": _version("fusedmoe"), "library": _core.version, "python": python}
    shown = [name for name in sorted(os.environ) if VARIABLES.fullmatch(name)]
    return {
        "versions": own | {name: _version(name) for name in PACKAGES},
        "machine": _machine(),
        "devices": _devices(),
        "cpu kernels": _kernels(),
        "backends": _backends(),
        "autoload": _autoload(),
        "environment": {name: "(hidden)" if SECRET.search(name) else os.environ[name] for name in shown},
    }


# ---- whether it computes right ------------------------------------------------------------------------------


def _plain(x: Tensor, ids: Tensor, p: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The layer, expert by expert, in torch."""
    out = torch.zeros_like(x)
    for e in range(len(w1)):
        token, slot = (ids == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ w1[e].t()).chunk(2, -1)
        out = out.index_add(0, token, p[token, slot, None] * (torch.nn.functional.silu(gate) * up @ w2[e].t()))
    return out


def _step(run: Callable[..., Tensor], ids: Tensor, dout: Tensor, leaves: Sequence[Tensor]) -> dict[str, Tensor]:
    """Forward and backward of run, and the forward alone, as inference calls it."""
    x, p, w1, w2 = leaves = [t.detach().requires_grad_() for t in leaves]
    out = run(x, ids, p, w1, w2)
    grads = torch.autograd.grad(out, leaves, dout)
    with torch.no_grad():
        inference = run(x, ids, p, w1, w2)
    return dict(zip(("out", "inference", "dx", "dp", "dw1", "dw2"), (out.detach(), inference, *grads), strict=True))


def _errors(device: str, dtype: torch.dtype) -> dict[str, float]:
    """||fusedmoe - torch in float64|| / ||torch in float64|| of every result, for a drawn layer; one of its experts has no token."""
    T, H, I, E, k = 96, 128, 64, 8, 2
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g).to(dtype)  # noqa: E731
    ids = torch.rand(T, E - 1, generator=g).topk(k).indices
    dout, leaves = draw(T, H), [draw(T, H), torch.rand(T, k, generator=g), draw(E, 2 * I, H) / H**0.5, draw(E, H, I) / I**0.5]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's threads wait busily: seconds on a machine that others use
    want = _step(_plain, ids, dout.double(), [t.double() for t in leaves])
    torch.set_num_threads(threads)
    ours = lambda x, ids, p, w1, w2: experts(x, ids, p, [w1, w2])  # noqa: E731
    got = _step(ours, ids.to(device), dout.to(device), [t.to(device) for t in leaves])
    return {name: ((got[name].cpu().double() - t).norm() / t.norm()).item() for name, t in want.items()}


def _check_one(device: str, name: str) -> dict[str, Any]:
    row = {"device": device, "dtype": name, "bound": BOUNDS[name]}
    try:
        errors = _errors(device, DTYPES[name])
    except Exception as problem:
        return {**row, "ok": False, "problem": f"{type(problem).__name__}: {problem}"}
    return {**row, "ok": all(error <= BOUNDS[name] for error in errors.values()), "errors": errors}


def check(devices: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each device and dtype."""
    for device in devices:
        for name in DTYPES:
            yield _check_one(device, name)


def _line(row: dict[str, Any]) -> str:
    end = row.get("problem") or "  ".join(f"{name} {error:.1e}" for name, error in row["errors"].items())
    return f"{'ok' if row['ok'] else 'FAILED':6}  {row['device']:7} {row['dtype']:4}  bound {row['bound']:.1e}:  {end}"


# ---- the command line ---------------------------------------------------------------------------------------

USAGE = """
  fusedmoe                 the report and the check
  fusedmoe info            the report alone
  fusedmoe check           the check alone, less than 5 seconds
  fusedmoe bench ...       time experts implementations side by side (`fusedmoe bench --help`)
  fusedmoe --version

The check runs a drawn experts layer (T=96, H=128, I=64, E=8, k=2), forward and backward, in f32 and
bf16 on every device that torch has, and a plain torch computation of the same in float64. An error
is ||ours - float64|| / ||float64|| of a result; the bound is 2e-6 in f32 and 1e-2 in bf16.
Exit status: 0; 1 when a check fails; 2 for a command line that cannot be read.
`python -m fusedmoe` is the same program. build/fusedmoe, which make builds from C, is another one:
its `check` holds every kernel of the CPU to a computation in double.
"""


def _print(sections: dict[str, dict[str, Any]]) -> None:
    for title, values in sections.items():
        print(f"{title}:")
        for name, value in values.items():
            print(f"  {name:17} {value}")
        if not values:
            print("  (none that matters is set)")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["bench"]:
        from .bench import main as bench

        return bench(argv[1:])
    parser = argparse.ArgumentParser("fusedmoe", description=__doc__, epilog=USAGE, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["info", "check"], help="both when left out; bench: see below")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument("--version", action="version", version=f"fusedmoe {_core.version}")
    args = parser.parse_args(argv)
    sections = report() if args.what != "check" else {}
    rows: list[dict[str, Any]] = []
    if not args.json:
        _print(sections)
    start = time.perf_counter()
    if args.what != "info":
        devices = [name for name in sections.get("devices", _devices()) if name == "cpu" or ":" in name]
        for row in check(devices):
            rows.append(row)
            if not args.json:
                print("\n".join((*(("check:",) if len(rows) == 1 else ()), f"  {_line(row)}")), flush=True)
    seconds = time.perf_counter() - start
    if args.json:
        print(json.dumps({**sections, **({"check": rows, "check_seconds": round(seconds, 2)} if rows else {})}, indent=1))
    elif rows:
        print(f"  {sum(row['ok'] for row in rows)} of {len(rows)} ok, {seconds:.1f} s")
    return 0 if all(row["ok"] for row in rows) else 1
