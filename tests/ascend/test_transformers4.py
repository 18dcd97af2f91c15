# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: I001
"""transformers 4.57.6 and LLaMA-Factory 0.9.4, as released, on the real torch_npu and the simulated NPU, beside fusedmoe.

Experts are lists of Linear layers here (Qwen3-MoE), or stacked [E,H,2I] and [E,I,H] (Qwen3-VL-MoE). Run by
tests/ascend/run_torch.sh, in the environment of test_torch_npu.py with these two packages in front.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import npu  # before torch
import pytest
import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import rivals
from fusedmoe.kernels import apply_kernel
from fusedmoe.kernels.ops.mlp.npu_fused_moe import NpuMoeFused, Qwen3NpuMoeFused
from models import tiny, trains_alike
from test_torch_npu import clean, distance  # noqa: F401  (clean: for every test here too)

THEIRS = rivals.original()


def test_versions():
    from importlib.metadata import version

    assert (transformers.__version__, version("llamafactory")) == ("4.57.6", "0.9.4")
    assert THEIRS is not None


def block(E: int, k: int, H: int, I: int, dtype: torch.dtype) -> Qwen3MoeSparseMoeBlock:
    """transformers' own block, on the NPU."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=k, norm_topk_prob=True
    )
    return Qwen3MoeSparseMoeBlock(config).to(dtype).npu()


def step(forward, module, x: torch.Tensor, dout: torch.Tensor) -> tuple[list[torch.Tensor], npu.Count, npu.Count]:
    """Results and counts of one forward and backward."""
    for t in (x, *module.parameters()):
        t.grad = None
    with npu.Count() as f:
        out, logits = forward(module, x)
    with npu.Count() as b:
        out.backward(dout)
    return [out.detach(), logits.detach(), x.grad, *(p.grad for p in module.parameters())], f, b


def check(got: list[torch.Tensor], want: list[torch.Tensor], bound: float) -> None:
    """Relative L2 distances; an expert without rows has zeros on both sides."""
    errors = [distance(a, b) for a, b in zip(got, want, strict=True) if float(b.float().cpu().norm()) > 1e-3]
    assert max(errors) < bound


@pytest.mark.parametrize(("dtype", "E"), [(torch.bfloat16, 8), (torch.bfloat16, 16), (torch.float16, 8)])
def test_qwen3_block(dtype, E):
    """Same results (they round twice more: silu and its product); their launches grow with E, ours do not.

    Not in float32: GroupedMatmul is documented to take lists of float32 matrices not at all, and theirs passes them.
    """
    module = block(E, 4, 64, 48, dtype)
    g = torch.Generator().manual_seed(1)
    x, dout = (torch.randn(1, 40, 64, generator=g).to(dtype).npu() for _ in range(2))
    x.requires_grad_()
    ours = Qwen3NpuMoeFused.qwen3moe_sparse_moe_block_forward
    step(ours, module, x, dout)  # the first call settles plans
    a, f, b = step(ours, module, x, dout)
    a = [t.clone() for t in a]
    c, tf, tb = step(THEIRS.Qwen3NpuMoeFused.qwen3moe_sparse_moe_block_forward, module, x, dout)
    assert (tf.launches, tb.launches) == (18 + 2 * E, 31 + 7 * E)
    assert (tf.syncs, tb.syncs, tf.copies + tb.copies) == (1, 3, 4)
    assert (f.launches, b.launches) == (13, 31), (f.trace, b.trace)
    assert (f.syncs + b.syncs, f.copies + b.copies, f.hidden + b.hidden) == (0, 0, 0)
    check(a, c, 8e-3 if dtype == torch.bfloat16 else 1e-3)


def test_bytes_of_the_list_block():
    """Qwen3-30B-A3B's ratios (H and I divided by 8), counted."""
    module = block(128, 8, 256, 96, torch.bfloat16)
    x, dout = (torch.ones(1, 64, 256).to(torch.bfloat16).npu() for _ in range(2))
    x.requires_grad_()
    counts = []
    for forward in (Qwen3NpuMoeFused, THEIRS.Qwen3NpuMoeFused):
        _, f, b = step(forward.qwen3moe_sparse_moe_block_forward, module, x, dout)
        counts.append(f.bytes + b.bytes)
    assert counts[0] <= 0.65 * counts[1], counts


def test_stacked_experts():
    """Weights stored [E,H,2I] and [E,I,H]: 7 launches either way in theirs, the same bits in ours."""
    torch.manual_seed(0)
    T, H, I, E, k = 40, 64, 48, 16, 4
    w1, w2, x = torch.randn(E, H, 2 * I) / 8, torch.randn(E, I, H) / 7, torch.randn(1, T, H)
    ids, p = torch.rand(T, E).topk(k).indices.npu(), torch.rand(T, k).bfloat16().npu().requires_grad_()
    w1, w2, x = (t.bfloat16().npu().requires_grad_() for t in (w1, w2, x))
    module = SimpleNamespace(hidden_size=H, num_experts=E, gate_up_proj=w1, down_proj=w2, act_fn=torch.nn.SiLU())
    dout = torch.ones(1, T, H).bfloat16().npu()
    results = []
    for cls in (NpuMoeFused, NpuMoeFused, THEIRS.NpuMoeFused):
        for t in (x, p, w1, w2):
            t.grad = None
        with npu.Count() as f:
            out = cls.npu_moe_experts_forward(module, x, p, ids)
        with npu.Count() as b:
            out.backward(dout)
        results.append(([out.detach(), *(t.grad.clone() for t in (x, p, w1, w2))], f.launches, b.launches))
    assert results[1][1:] == (6, 7) and results[2][1:] == (7, 7)
    same = [bool((a.cpu() == b.cpu()).all()) for a, b in zip(results[1][0], results[2][0], strict=True)]
    assert all(same)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_vl_moe"])
def test_training_step(kind):
    cpu = tiny(kind)
    dev = apply_kernel("npu_fused_moe", model=copy.deepcopy(cpu).npu())
    trains_alike(cpu, dev)


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_vl_moe"])
def test_their_entry_finds_ours(kind):
    """LLaMA-Factory 0.9.4's own apply_kernel puts fusedmoe under the model."""
    from llamafactory.v1.plugins.model_plugins.kernels.interface import apply_kernel as theirs

    model = tiny(kind).npu()
    theirs("npu_fused_moe", model=model)
    npu.reset()
    model(input_ids=torch.randint(0, 60, (2, 10)).npu())
    npu.drain()
    assert (npu.get("aclnnMoeInitRoutingV3"), npu.get("aclnnMoeTokenPermute")) == (2, 0)
