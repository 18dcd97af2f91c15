# SPDX-License-Identifier: Apache-2.0
"""Does an installed wheel work? A layer forward and backward beside plain torch, with nothing but torch in the environment."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import fusedmoe

T, H, I, E, K = 33, 48, 40, 6, 2


def plain(x: Tensor, ids: Tensor, p: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The formula, one slot after the other."""
    out = torch.zeros_like(x)
    for j in range(K):
        gate, up = torch.einsum("th,tih->ti", x, w1[ids[:, j]]).chunk(2, dim=-1)
        out = out + p[:, j : j + 1] * torch.einsum("ti,thi->th", torch.nn.functional.silu(gate) * up, w2[ids[:, j]])
    return out


def main() -> int:
    assert Path(__file__).resolve().parents[1] / "python" not in Path(fusedmoe.__file__).resolve().parents, "the sources were imported"
    print(f"fusedmoe {fusedmoe.__version__} in {Path(fusedmoe.__file__).parent}, torch {torch.__version__}, level {fusedmoe.cpu_isa()}")
    torch.manual_seed(0)
    x, w1, w2 = torch.randn(T, H), torch.randn(E, 2 * I, H) / H**0.5, torch.randn(E, H, I) / I**0.5
    ids, p = fusedmoe.route(torch.randn(T, E), K, renormalize=True)
    given = [t.detach().requires_grad_() for t in (x, p, w1, w2)]
    ours: Callable[..., Tensor] = lambda x, p, *w: fusedmoe.experts(x, ids, p, w)
    theirs: Callable[..., Tensor] = lambda x, p, *w: plain(x, ids, p, *w)
    results = []
    for layer in (ours, theirs):
        out = layer(*given)
        results.append([out, *torch.autograd.grad(out, given, torch.ones_like(out))])
    worst = max(float((a - b).detach().norm() / b.detach().norm()) for a, b in zip(*results, strict=True))
    print(f"forward and backward differ from plain torch by {worst:.1e}")
    return worst > 1e-5


if __name__ == "__main__":
    sys.exit(main())
