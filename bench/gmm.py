# SPDX-License-Identifier: Apache-2.0
"""Grouped matmul with gradients: GmmFunction and HybridGmmFunction beside torch's grouped_mm, a loop of matmuls, and one dense product.

    python bench/gmm.py [--device cuda] [--R 131072] [--K 2048] [--N 1536] [--E 128] [--dtype bf16] [--rounds 7]

x [R,K] times weight [E,K,N], rows grouped as random top-k routing groups them. The weight is stored as Hugging Face has it, [E,N,K], seen
transposed; --layout kn stores it as [E,K,N]. A pass is forward, or forward and both gradients, which are freed inside the time. On a CPU
all ways take turns and the median of the rounds counts; on CUDA it is sustained running (bench/meters.py).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from fusedmoe import GmmFunction, HybridGmmFunction
from fusedmoe.meters import milliseconds

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def ways(R: int, K: int, N: int, E: int, dtype: torch.dtype, device: str, layout: str) -> dict[str, tuple[Callable, list[torch.Tensor]]]:
    """Each way: a function of its leaves that gives the results, and the leaves."""
    g = torch.Generator().manual_seed(0)
    counts = torch.bincount(torch.randint(E, (R,), generator=g), minlength=E)
    leaf = lambda *s: (torch.randn(*s, generator=g) / s[-1] ** 0.5).to(device, dtype).requires_grad_()  # noqa: E731
    x, stored = leaf(R, K), leaf(E, N, K) if layout == "nk" else leaf(E, K, N)
    seen = (lambda w: w.transpose(-1, -2)) if layout == "nk" else (lambda w: w)
    rows, matrices = ([t.detach().requires_grad_() for t in ts] for ts in (x.detach().split(counts.tolist()), stored.detach()))
    on_device, ends = counts.to(device), counts.cumsum(0).to(device, torch.int32)
    torch_s = getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm)
    return {
        "GmmFunction": (lambda x, w: [GmmFunction.apply(x, seen(w), on_device)], [x, stored]),
        "torch grouped_mm": (lambda x, w: [torch_s(x, seen(w), offs=ends)], [x, stored]),
        "HybridGmmFunction": (lambda *t: HybridGmmFunction.apply(E, *t[:E], *map(seen, t[E:])), [*rows, *matrices]),
        "a loop of matmuls": (lambda *t: [a @ seen(w) for a, w in zip(t[:E], t[E:], strict=True)], [*rows, *matrices]),
        "dense": (lambda x, w: [x @ seen(w)], [x, stored.detach()[0].requires_grad_()]),
    }  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    cuda = parser.parse_known_args()[0].device == "cuda"
    for name, default in zip("RKNE", (131072, 2048, 1536, 128) if cuda else (2048, 1024, 1024, 32), strict=True):
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--layout", default="nk", choices=("nk", "kn"))
    parser.add_argument("--rounds", type=int, default=7)
    o = parser.parse_args()
    found = ways(o.R, o.K, o.N, o.E, DTYPES[o.dtype], o.device, o.layout)
    dy = torch.randn(o.R, o.N, device=o.device, dtype=DTYPES[o.dtype])  # in one piece, as behind torch.cat
    douts = {name: dy.split([len(y) for y in run(*leaves)]) for name, (run, leaves) in found.items()}

    def forward(name: str) -> None:
        with torch.no_grad():
            found[name][0](*found[name][1])

    def step(name: str) -> None:
        run, leaves = found[name]
        torch.autograd.grad(run(*leaves), leaves, douts[name])

    runs = {(name, what): run for name in found for what, run in (("forward", forward), ("forward + backward", step))}
    times: dict[tuple[str, str], list[float]] = {}
    for i in range(1 if cuda else o.rounds + 1):
        for (name, what), run in runs.items():
            start = time.perf_counter()
            ms = milliseconds(partial(run, name), "sustained") if cuda else run(name)
            if cuda or i:  # on a CPU the first round warms up
                times.setdefault((name, what), []).append(ms if cuda else (time.perf_counter() - start) * 1e3)
    print(f"x [{o.R},{o.K}], weight [{o.E},{o.K},{o.N}] stored {o.layout}, {o.dtype}, {o.device}, torch {torch.__version__}")
    for (name, what), ms in times.items():
        flops = 2 * o.R * o.K * o.N * (3 if "backward" in what else 1)
        best = statistics.median(times["GmmFunction", what])
        t = statistics.median(ms)
        print(f"{name:18} {what:18} {t:9.3f} ms {flops / t / 1e9:8.2f} TF/s  {t / best:6.2f} times GmmFunction's")


if __name__ == "__main__":
    main()
