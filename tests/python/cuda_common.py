# SPDX-License-Identifier: Apache-2.0
"""Layers on a CUDA device for test_cuda.py and test_cuda_models.py, and their specification: the C library's reference in double."""

import pytest
import torch

import fusedmoe
from common import V5
from fusedmoe import ops

needs_a_device = pytest.mark.skipif(not torch.cuda.is_available() or not V5, reason="needs a CUDA device and transformers v5")
BOUND = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # relative L2, the worst gradient of one token too
HOPPER, ODD = (512, 256, 8, 2), (72, 20, 5, 3)  # H, I, E, k: wgmma and TMA; sizes only the general kernels take


def layer(T, H, I, E, k, dtype=torch.bfloat16, seed=0, act=ops.SWIGLU, flags=0, device="cuda"):
    """x, ids, p and w of a layer as `flags` store it; the leaves require gradients."""
    g = torch.Generator().manual_seed(seed)
    normal = lambda *s: torch.randn(*s, generator=g) / s[-1] ** 0.5  # noqa: E731
    C = 2 * I if act < ops.SILU else I
    w = [normal(E, C, H), normal(E, H, I)] + ([normal(E, C), normal(E, H)] if flags & ops.BIAS else [])
    if flags & ops.TRANSPOSED:
        w[:2] = [t.transpose(1, 2).contiguous() for t in w[:2]]
    if flags & ops.LIST:
        w = [*w[0][:, :I], *w[0][:, I:], *w[1]]
    ids = torch.stack([torch.randperm(E, generator=g)[:k] for _ in range(T)]) if T else torch.zeros(0, k, dtype=torch.int64)
    if flags & ops.SKIP_E and T:
        ids[T // 2, 0] = E
    leaf = lambda t, d=dtype: t.to(device, d).clone().requires_grad_()  # noqa: E731
    return leaf(normal(T, H) * H**0.5), ids.to(device), leaf(torch.rand(T, k, generator=g), torch.float32), [leaf(t) for t in w]


def results(x, ids, p, w, act=ops.SWIGLU, flags=0, alpha=0.0, limit=0.0, lora=()):
    """The output and every gradient for a fixed dout; lora: a1, b1, a2, b2."""
    out = fusedmoe.experts(x, ids, p, w, act, flags, alpha, limit, (lora[:2], lora[2:]) if lora else ())
    dout = torch.sin(torch.arange(out.numel(), dtype=torch.float64)).view(out.shape).to(out.device, out.dtype)
    return (out, *torch.autograd.grad(out, (x, p, *w, *lora), dout))


def specification(x, ids, p, w, *how, lora=()):
    """The same in double on the CPU: the reference of the C library."""
    double = lambda t: t.detach().cpu().double().requires_grad_()  # noqa: E731
    return results(double(x), ids.cpu(), double(p), [double(t) for t in w], *how, lora=[double(t) for t in lora])


def exact_experts(x, ids, p, w1, w2):
    """The layer in double on the GPU, expert by expert: for sizes that the reference is too slow for."""
    out = torch.zeros_like(x)
    for e in range(w1.shape[0]):
        t, j = (ids == e).nonzero(as_tuple=True)
        gate, up = (x[t] @ w1[e].t()).chunk(2, -1)
        out = out.index_add(0, t, (torch.nn.functional.silu(gate) * up @ w2[e].t()) * p[t, j, None])
    return out
