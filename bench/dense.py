# SPDX-License-Identifier: Apache-2.0
"""The CPU layer beside torch's dense matmul, in turns: python bench/dense.py [--T 512,4096] [--threads 1,16] [--pairs 15].

A pair is torch's product of square matrices and then a pass of the layer, on the same threads, within a fraction of a second:
on a shared machine only such ratios mean something. Printed are the medians, and of the ratio the quartiles too. Workspace
and gradients are the same memory every time, as from C.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from fusedmoe import _core, ops

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}
REST = 0.025  # seconds: threads of one side that wait for work in a loop are asleep by then


def seconds(run: Callable[[], object]) -> float:
    """The median of three, after one that is not counted, for the other side has had the caches; a long one counts at once."""
    spent = []
    for _ in range(4):
        start = time.perf_counter()
        run()
        spent.append(time.perf_counter() - start)
        if spent[0] > 0.2:
            return spent[0]
    return statistics.median(spent[1:])


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Small normal numbers; a large tensor repeats its first million, which takes a second less a gigabyte."""
    block = (0.05 * torch.randn(1 << 20)).to(dtype)
    out = torch.empty(shape, dtype=dtype)
    flat = out.view(-1)
    for i in range(0, flat.numel(), block.numel()):
        part = flat[i : i + block.numel()]
        part.copy_(block[: part.numel()])
    return out


class Layer:
    """An experts layer with everything it reads and writes."""

    def __init__(self, dtype: torch.dtype, H: int, I: int, E: int, k: int) -> None:
        self.sizes = H, I, E, k
        self.w = [random(E, 2 * I, H, dtype=dtype), random(E, H, I, dtype=dtype)]
        self.dw = [torch.empty_like(t) for t in self.w]
        self.workspace = torch.empty(0, dtype=torch.uint8)

    def batch(self, T: int) -> None:
        H, _, E, k = self.sizes
        dtype = self.w[0].dtype
        self.x, self.dout = random(T, H, dtype=dtype), random(T, H, dtype=dtype)
        self.ids = torch.rand(T, E).topk(k).indices
        self.p = torch.rand(T, k)
        self.out, self.dx, self.dp = torch.empty_like(self.x), torch.empty_like(self.x), torch.empty_like(self.p)
        self.saved = torch.empty((T * k, 2 * self.sizes[1]), dtype=dtype)  # h

    def on(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.plan = ops._experts_plan(self.x, self.ids, self.w, ops.SWIGLU, 0, 0.0, 0.0)
        room = max(_core.workspace_bytes(self.plan, backward, len(self.x)) for backward in (0, 1))
        if self.workspace.numel() < room:
            self.workspace = torch.zeros(room, dtype=torch.uint8)
        self.given = self.workspace, self.x, self.ids, self.p, self.w

    def forward(self) -> None:
        _core.run(_core.EXPERTS_FORWARD, self.plan, 0, None, *self.given, self.out, self.saved, None, None)

    def backward(self) -> None:
        _core.run(_core.EXPERTS_BACKWARD, self.plan, 0, None, *self.given, self.saved, self.dout, self.dx, self.dp, self.dw, None, None)

    def gflop(self) -> float:
        H, I, _, k = self.sizes
        return 2e-9 * len(self.x) * k * 3 * H * I


def pair(layer: Layer, threads: int, a: torch.Tensor, b: torch.Tensor) -> dict[str, tuple[float, float]]:
    """For each pass: GF/s of the dense product, and milliseconds of the layer."""
    layer.on(threads)
    found = {}
    for name, run in (("fwd", layer.forward), ("bwd", layer.backward)):
        dense = 2e-9 * len(a) ** 3 / seconds(lambda: torch.mm(a, b))
        time.sleep(REST)
        found[name] = dense, 1e3 * seconds(run)
    return found


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{middle:5.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--n", type=int, default=2048, help="size of the dense product")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=numbers, default=[torch.get_num_threads()], help="taken in turns in every round")
    for name, default in zip("THIEk", ("512", 2048, 1408, 32, 4), strict=True):
        parser.add_argument(f"--{name}", type=numbers if name == "T" else int, default=default)
    o = parser.parse_args()
    layer = Layer(DTYPES[o.dtype], o.H, o.I, o.E, o.k)
    a, b = (random(o.n, o.n, dtype=DTYPES[o.dtype]) for _ in range(2))
    print(f"torch {torch.__version__}, level {_core.cpu_isa()}, {o.dtype}, H={o.H} I={o.I} E={o.E} k={o.k}, dense {o.n}, {o.pairs} pairs")
    print("    T  threads  pass  dense GF/s  ours GF/s  median ms    best ms  ours to dense         times as fast as the first threads")
    for T in o.T:
        layer.batch(T)
        layer.on(o.threads[-1])
        layer.forward()
        rounds = [{threads: pair(layer, threads, a, b) for threads in o.threads} for _ in range(o.pairs)]
        for threads in o.threads:
            for name in ("fwd", "bwd"):
                gflop = layer.gflop() * (1 if name == "fwd" else 2)
                dense, ms = zip(*(r[threads][name] for r in rounds), strict=True)
                share = quartiles([gflop / t * 1e3 / d for d, t in zip(dense, ms, strict=True)])
                faster = quartiles([r[o.threads[0]][name][1] / t for r, t in zip(rounds, ms, strict=True)])
                middle = statistics.median(ms)
                rates = f"{statistics.median(dense):11.0f} {gflop / middle * 1e3:10.0f} {middle:10.2f} {min(ms):10.2f}"
                print(f"{T:5} {threads:8}  {name} {rates}  {share}  {faster}", flush=True)


if __name__ == "__main__":
    main()
