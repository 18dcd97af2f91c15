# SPDX-License-Identifier: Apache-2.0
"""The layer with other activations, weights in other layouts, and adapters on them, beside SwiGLU as Hugging Face stores it.

    python bench/layouts.py [--device cuda] [--T 8192] [--H 2880] [--I 2880] [--E 32] [--k 4] [--rank 16]

Routing is given. A pass is forward, or forward and all gradients; with adapters W is frozen. On CUDA it is sustained running, on a CPU the
median of five.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from fusedmoe import experts, ops
from fusedmoe.meters import milliseconds

OSS = ops.TRANSPOSED | ops.INTERLEAVED | ops.BIAS
CASES = {  # activation, flags
    "SwiGLU": (ops.SWIGLU, 0),
    "SwiGLU, weights [in,out]": (ops.SWIGLU, ops.TRANSPOSED),
    "SwiGLU, clamped (DeepSeek-V4)": (ops.SWIGLU_CLAMP, 0),
    "GELU, tanh (Gemma 4)": (ops.GEGLU_TANH, 0),
    "GELU, erf": (ops.GEGLU, 0),
    "gpt-oss": (ops.SWIGLU_OAI, OSS),
}


def passes(T: int, H: int, I: int, E: int, k: int, rank: int, act: int, flags: int, device: str) -> list[Callable[[], object]]:
    """Forward, and forward and backward."""
    normal = lambda *size: torch.randn(*size, device=device, dtype=torch.bfloat16) * 0.02  # noqa: E731
    w = [normal(E, H, 2 * I), normal(E, I, H)] if flags & ops.TRANSPOSED else [normal(E, 2 * I, H), normal(E, H, I)]
    w += [normal(E, 2 * I), normal(E, H)] if flags & ops.BIAS else []
    factors = [normal(E, rank, H), normal(E, 2 * I, rank), normal(E, rank, I), normal(E, H, rank)] if rank else []
    lora = [(*factors[:2], 2.0), (*factors[2:], 2.0)] if rank else []
    x, p, ids = normal(T, H) * 50, torch.rand(T, k, device=device), torch.rand(T, E, device=device).topk(k).indices
    leaves = [t.requires_grad_() for t in (x, p, *(factors or w))]
    dout = normal(T, H)
    forward = lambda: experts(x, ids, p, w, act, flags, 1.702, 7.0, lora)  # noqa: E731
    return [torch.no_grad()(forward), lambda: torch.autograd.grad(forward(), leaves, dout)]


def clock(run: Callable[[], object], device: str) -> float:
    """Milliseconds."""
    if device == "cuda":
        return milliseconds(run, "sustained")
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, default in dict(T=8192, H=2880, I=2880, E=32, k=4, rank=16).items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default %(default)s")
    o = parser.parse_args()
    flops = 6 * o.T * o.k * o.H * o.I
    for rank in (0, o.rank):
        for name, (act, flags) in CASES.items():
            a, b = (clock(run, o.device) for run in passes(o.T, o.H, o.I, o.E, o.k, rank, act, flags, o.device))
            rates = f"{flops / a / 1e9:.3g} / {flops * (2 if rank else 3) / b / 1e9:.3g} TF/s"
            print(f"{name:30} rank {rank:3}  forward {a:8.3f}  forward + backward {b:8.3f} ms  {rates}", flush=True)


if __name__ == "__main__":
    main()
