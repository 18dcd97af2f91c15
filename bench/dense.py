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


def seconds(run: Callable[[], object], times: int = 3) -> float:
    """The median of a few, after one that is not counted: the other side has had the caches."""
    run()
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent)


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

    def batch(self, T: int) -> None:
        H, _, E, k = self.sizes
        dtype = self.w[0].dtype
        self.x, self.dout = random(T, H, dtype=dtype), random(T, H, dtype=dtype)
        self.ids = torch.rand(T, E).topk(k).indices
        self.p = torch.rand(T, k)
        self.out, self.dx, self.dp = torch.empty_like(self.x), torch.empty_like(self.x), torch.empty_like(self.p)

    def on(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.plan = ops._experts_plan(self.x, self.ids, self.w, ops.SWIGLU, 0, 0.0, 0.0)
        self.saved = torch.empty(_core.saved_bytes(self.plan, len(self.x)), dtype=torch.uint8)
        room = [_core.workspace_bytes(self.plan, backward, len(self.x)) for backward in (0, 1)]
        self.workspace = torch.zeros(max(room), dtype=torch.uint8)
        self.given = self.workspace, self.x, self.ids, self.p, *ops._slots(self.w, ops.SWIGLU, 0)

    def forward(self) -> None:
        _core.run(_core.EXPERTS_FORWARD, self.plan, 0, None, *self.given, self.out, self.saved)

    def backward(self) -> None:
        dw = ops._slots(self.dw, ops.SWIGLU, 0)
        _core.run(_core.EXPERTS_BACKWARD, self.plan, 0, None, *self.given, self.saved, self.dout, self.dx, self.dp, *dw)

    def gflop(self) -> float:
        H, I, _, k = self.sizes
        return 2e-9 * len(self.x) * k * 3 * H * I


def compare(layer: Layer, n: int, pairs: int) -> dict[str, list[tuple[float, float, float]]]:
    """For each pass, of every pair: GF/s of the dense product, of the layer, and their ratio."""
    a, b = (random(n, n, dtype=layer.w[0].dtype) for _ in range(2))
    found: dict[str, list[tuple[float, float, float]]] = {"fwd": [], "bwd": []}
    for _ in range(pairs):
        for name, run, flops in (("fwd", layer.forward, 1), ("bwd", layer.backward, 2)):
            dense = 2e-9 * n**3 / seconds(lambda: torch.mm(a, b))
            time.sleep(REST)
            ours = flops * layer.gflop() / seconds(run)
            found[name].append((dense, ours, ours / dense))
    return found


def main() -> None:
    numbers = lambda text: [int(n) for n in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--n", type=int, default=2048, help="size of the dense product")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=numbers, default=[torch.get_num_threads()])
    for name, default in zip("THIEk", ("512", 2048, 1408, 32, 4), strict=True):
        parser.add_argument(f"--{name}", type=numbers if name == "T" else int, default=default)
    o = parser.parse_args()
    layer = Layer(DTYPES[o.dtype], o.H, o.I, o.E, o.k)
    print(f"torch {torch.__version__}, level {_core.cpu_isa()}, {o.dtype}, H={o.H} I={o.I} E={o.E} k={o.k}, dense {o.n}, {o.pairs} pairs")
    print("threads    T  pass   dense GF/s  ours GF/s  median ms   best ms   ratio: lower quartile, median, upper, best")
    for T in o.T:
        layer.batch(T)
        for threads in o.threads:
            layer.on(threads)
            layer.forward()
            for name, pairs in compare(layer, o.n, o.pairs).items():
                dense, ours, ratio = zip(*pairs, strict=True)
                low, middle, high = statistics.quantiles(ratio, n=4) if len(ratio) > 1 else ratio * 3
                ms = [(1 if name == "fwd" else 2) * layer.gflop() / rate * 1e3 for rate in ours]
                print(
                    f"{threads:7} {T:4}  {name}  {statistics.median(dense):10.0f} {statistics.median(ours):10.0f} {statistics.median(ms):10.2f}"
                    f" {min(ms):9.2f}   {low:.2f} {middle:.2f} {high:.2f} {max(ratio):.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
