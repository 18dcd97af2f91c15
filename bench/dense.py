# SPDX-License-Identifier: Apache-2.0
"""The CPU layer beside torch's dense matmul, in one run: python bench/dense.py [build/fusedmoe] [options of its bench].

The dense rate (square matrices, the best size) is taken before and after the layer, and the larger one counts; the layer
is timed by `fusedmoe bench --op experts` on the same threads. Shares are of the dense rate of the same dtype and threads."""

import argparse
import json
import subprocess
import tempfile
import time

import torch

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}


def dense_gflops(dtype: str, threads: int, n: int, seconds: float = 0.5) -> float:
    torch.set_num_threads(threads)
    a, b = (torch.randn(n, n).to(DTYPES[dtype]) for _ in range(2))
    times = []
    begin = time.perf_counter()
    while len(times) < 4 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - start)
    return 2e-9 * n**3 / sorted(times[1:])[len(times) // 2 - 1]


def layer_rows(cli: str, dtype: str, threads: int, rest: list[str]) -> list[dict]:
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        command = [cli, "bench", "--op", "experts", "--dtype", dtype, "--threads", str(threads), "--json", out.name, *rest]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.load(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cli", nargs="?", default="build/fusedmoe")
    parser.add_argument("--dtype", default="bf16", help="comma-separated")
    parser.add_argument("--threads", default=str(torch.get_num_threads()), help="comma-separated")
    parser.add_argument("--n", default="2048,4096", help="sizes of the dense product")
    options, rest = parser.parse_known_args()
    for dtype in options.dtype.split(","):
        for threads in map(int, options.threads.split(",")):
            sizes = [int(n) for n in options.n.split(",")]
            before = [dense_gflops(dtype, threads, n) for n in sizes]
            rows = layer_rows(options.cli, dtype, threads, rest or ["--T", "512"])
            after = [dense_gflops(dtype, threads, n) for n in sizes]
            dense = max(before + after)
            rates = ", ".join(f"{n}: {b:.0f} and {a:.0f}" for n, b, a in zip(sizes, before, after))
            print(f"torch {torch.__version__} dense {dtype}, {threads} threads, GF/s before and after: {rates}")
            for r in rows:
                print(
                    f"  {r['isa_or_arch']} T={r['T']:<5} {r['pass']:7} {r['ms']:9.2f} ms {r['gflops']:8.0f} GF/s"
                    f"  {100 * r['gflops'] / dense:5.1f} % of dense  {100 * r['share']:5.1f} % of the ceiling",
                    flush=True,
                )


if __name__ == "__main__":
    main()
