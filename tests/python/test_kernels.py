# SPDX-License-Identifier: Apache-2.0
"""The registry and the kernel classes: names, signatures, return types and errors of LLaMA-Factory's file, without its faults."""

import importlib.machinery
import logging
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common import V5, rel, step, tiny, worst
from fusedmoe import kernels
from fusedmoe.kernels import BaseKernel, DeviceType, Registry, register_kernel
from fusedmoe.kernels.ops.mlp.cpu_fused_moe import CpuFusedMoEKernel
from fusedmoe.kernels.ops.mlp.cuda_fused_moe import CudaFusedMoEKernel
from fusedmoe.kernels.ops.mlp.npu_fused_moe import (
    GmmFunction,
    HybridGmmFunction,
    NpuFusedMoEKernel,
    NpuMoeFused,
    Qwen3NpuMoeFused,
    kernel_moe_mapping,
)  # fmt: skip

T, H, I, E, k = 10, 12, 6, 5, 2
IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(2))


# ---- registry ------------------------------------------------------------------------------------------------------------


def test_every_kernel_registers_everywhere():
    found = kernels.scan_all_kernels()
    assert found is Registry.get_registered_kernels()
    assert {"npu_fused_moe", "cpu_fused_moe", "cuda_fused_moe", "fused_moe"} <= set(kernels.get_default_kernels())
    assert Registry.get("npu_fused_moe") is NpuFusedMoEKernel
    assert NpuFusedMoEKernel._kernel_id == "npu_fused_moe" and NpuFusedMoEKernel._device == DeviceType.NPU == "npu"
    assert NpuFusedMoEKernel.get_kernel_id() == "npu_fused_moe" and NpuFusedMoEKernel.get_device() == "npu"


def test_rules_of_registering():
    with pytest.raises(TypeError, match="must inherit from BaseKernel"):
        register_kernel(int)

    class Nameless(BaseKernel):
        @classmethod
        def apply(cls, **kwargs):
            return kwargs["model"]

    with pytest.raises(ValueError, match="Kernel ID"):
        register_kernel(Nameless)
    for cls in (NpuFusedMoEKernel, type("Other", (Nameless,), {"_kernel_id": "npu_fused_moe"})):
        with pytest.raises(ValueError, match="already registered"):
            register_kernel(cls)
    assert Registry.get("npu_fused_moe") is NpuFusedMoEKernel
    mine = type("Mine", (Nameless,), {"_kernel_id": "mine", "_device": DeviceType.NPU})
    try:
        assert register_kernel(mine) is mine
        assert kernels.apply_kernel("mine", model=1) == 1
    finally:
        Registry._kernels.pop("mine")


def test_order_of_checks(monkeypatch):
    for name in kernels.get_default_kernels():
        with pytest.raises(ValueError, match="HFModel instance is required"):
            kernels.apply_kernel(name)
        with pytest.raises(ValueError, match="HFModel instance is required"):
            kernels.apply_kernel(name, model=None)
    model = tiny("Qwen3Moe")
    with pytest.raises(RuntimeError, match="npu.*cpu.*torch_npu is not installed.*libascendcl.so not found"):
        NpuFusedMoEKernel.apply(model=model)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="cuda.*cpu"):
            CudaFusedMoEKernel.apply(model=model)
    with pytest.raises(ValueError, match="nope"):
        kernels.apply_kernel("nope", model=model)
    assert not NpuFusedMoEKernel.check_deps() and CpuFusedMoEKernel.check_deps()
    npu = types.SimpleNamespace(type="npu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *a, **k: npu)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="torch_npu is not installed.*libascendcl.so"):
        NpuFusedMoEKernel.apply(model=model)
    fake = types.ModuleType("torch_npu")
    fake.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    monkeypatch.setitem(sys.modules, "torch_npu", fake)
    with pytest.raises(RuntimeError, match="torch_npu is installed.*libascendcl.so"):
        NpuFusedMoEKernel.apply(model=model)
    monkeypatch.setattr(NpuFusedMoEKernel, "missing", lambda model=None: None)
    assert NpuFusedMoEKernel.apply(model=model, include_kernels="auto", config={}, require_logits=True) is model
    assert any("_fmoe_layer" in vars(m) or "forward" in vars(m) for m in model.modules())


def test_defaults():
    model = tiny("Qwen3Moe")
    for nothing in (None, False, ""):
        assert kernels.apply_default_kernels(model, nothing) is model
    assert not any("_fmoe_layer" in vars(m) for m in model.modules())
    with pytest.raises(ValueError, match="nope"):
        kernels.apply_default_kernels(model=model, include_kernels="fused_moe,nope")
    want = step(model, IDS)
    for kind in ("auto", True, "fused_moe, cpu_fused_moe"):
        assert kernels.apply_default_kernels(model=model, include_kernels=kind) is model
        assert worst(step(model, IDS), want) <= 1e-5


def test_apply_is_idempotent(caplog):
    model = tiny("Qwen3Moe")
    want = step(model, IDS)
    caplog.set_level(logging.INFO)
    for _ in range(3):
        kernels.apply_kernel("fused_moe", model=model)
    assert worst(step(model, IDS), want) <= 1e-5
    from fusedmoe import unapply

    assert worst(step(unapply(model), IDS), want) == 0.0


# ---- functions -------------------------------------------------------------------------------------------------------------


def test_gmm_is_a_loop_of_matmuls():
    x, w = torch.randn(11, 8, requires_grad=True), torch.randn(4, 8, 6, requires_grad=True)
    counts = torch.tensor([3, 0, 7, 1])
    want = torch.cat([a @ b for a, b in zip(x.split(counts.tolist()), w, strict=True)])
    got = GmmFunction.apply(x, w, counts)
    assert got.dtype == x.dtype and rel(got, want) < 1e-6
    assert torch.equal(GmmFunction.apply(x, w, counts.tolist()), got)
    dy = torch.randn_like(got)
    for a, b in zip(torch.autograd.grad(got, (x, w), dy), torch.autograd.grad(want, (x, w), dy), strict=True):
        assert rel(a, b) < 1e-6


def test_gmm_takes_what_torch_npu_refuses():
    counts = torch.tensor([3, 0, 7, 1])
    w = torch.randn(4, 8, 6)
    strided = torch.randn(11, 16)[:, ::2].requires_grad_()
    y = GmmFunction.apply(strided, w, counts)
    y.sum().backward()
    assert rel(y, GmmFunction.apply(strided.detach().contiguous(), w, counts)) == 0.0 and strided.grad is not None
    x = torch.randn(11, 8, requires_grad=True)
    wb = w.bfloat16().requires_grad_()
    y = GmmFunction.apply(x, wb, counts)  # f32 rows, bf16 weights
    y.sum().backward()
    assert y.dtype == torch.float32 and x.grad.dtype == torch.float32 and wb.grad.dtype == torch.bfloat16
    assert rel(y, GmmFunction.apply(x, w, counts)) < 1e-2
    many = torch.randn(300, 4, 3)
    y = HybridGmmFunction.apply(300, *torch.randn(300, 2, 4), *many)
    assert len(y) == 300
    assert GmmFunction.apply(torch.randn(0, 8), w, torch.zeros(4, dtype=torch.int64)).shape == (0, 6)


def test_frozen_weights_get_no_gradient(monkeypatch):
    from fusedmoe import autograd

    asked = []
    real = autograd.ops.grouped_matmul_backward
    monkeypatch.setattr(autograd.ops, "grouped_matmul_backward", lambda *a: asked.append(a[4]) or real(*a))
    x, w = torch.randn(5, 4, requires_grad=True), torch.randn(2, 4, 3)
    GmmFunction.apply(x, w, [2, 3]).sum().backward()
    assert asked == [1]


def test_hybrid_is_a_tuple_with_gradients_for_all():
    xs = [torch.randn(m, 8, requires_grad=True) for m in (3, 0, 5)]
    ws = [torch.randn(8, 6, requires_grad=True) for _ in xs]
    ys = HybridGmmFunction.apply(3, *xs, *ws)
    assert isinstance(ys, tuple) and [tuple(y.shape) for y in ys] == [(3, 6), (0, 6), (5, 6)]
    ys[0].sum().backward()  # two outputs nobody used
    assert all(t.grad is not None for t in (*xs, *ws))
    assert rel(ys[2], xs[2] @ ws[2]) < 1e-6 and float(ws[2].grad.abs().max()) == 0.0
    assert rel(ws[0].grad, xs[0].T @ torch.ones(3, 6)) < 1e-6
    ys[0].zero_()  # each is a tensor of its own, though they may lie one after the other
    assert rel(ys[2], xs[2] @ ws[2]) < 1e-6
    with pytest.raises(ValueError, match="as many"):
        HybridGmmFunction.apply(2, *xs, *ws)


class Stacked(nn.Module):
    """Experts as transformers v4 stacks them: [E,H,2I], [E,I,H]."""

    def __init__(self, act=F.silu):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, H, 2 * I) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(E, I, H) * 0.3)
        self.act_fn = act
        self.num_experts, self.hidden_size = E, H

    def loop(self, x, ids, p):
        out = torch.zeros_like(x)
        for j in range(ids.shape[1]):
            g, u = torch.einsum("th,thi->ti", x, self.gate_up_proj[ids[:, j]]).chunk(2, -1)
            out = out + p[:, j, None] * torch.einsum("ti,tih->th", self.act_fn(g) * u, self.down_proj[ids[:, j]])
        return out


@pytest.mark.parametrize("act", [F.silu, nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU(), lambda v: v * torch.sigmoid(v)])
def test_stacked_experts(act):
    module = Stacked(act)
    x = torch.randn(2, 5, H, requires_grad=True)
    ids, p = torch.randint(0, E, (T, k)), torch.rand(T, k, requires_grad=True)
    out = NpuMoeFused.npu_moe_experts_forward(module, x, p, ids)
    want = module.loop(x.view(T, H), ids, p).view(2, 5, H)
    assert out.shape == (2, 5, H) and rel(out, want) < 1e-5
    dy = torch.randn_like(out)
    wrt = (x, p, *module.parameters())
    for a, b in zip(torch.autograd.grad(out, wrt, dy), torch.autograd.grad(want, wrt, dy), strict=True):
        assert rel(a, b) < 1e-5
    v5 = types.SimpleNamespace(gate_up_proj=module.gate_up_proj.transpose(1, 2), down_proj=module.down_proj.transpose(1, 2), act_fn=act)
    flat = NpuMoeFused.npu_moe_experts_v5_forward(v5, x.view(T, H), ids, p)
    assert flat.shape == (T, H) and rel(flat, want.view(T, H)) < 1e-5


def test_stacked_experts_at_the_edges():
    module = Stacked()
    empty = NpuMoeFused.npu_moe_experts_forward(module, torch.randn(1, 0, H), torch.rand(0, k), torch.zeros(0, k, dtype=torch.long))
    assert empty.shape == (1, 0, H)
    x, p = torch.randn(1, 3, H), torch.rand(3, k, requires_grad=True)
    skipped = NpuMoeFused.npu_moe_experts_forward(module, x, p, torch.full((3, k), E))
    skipped.sum().backward()
    assert float(skipped.detach().abs().max()) == 0.0 and float(p.grad.abs().max()) == 0.0
    flat = NpuMoeFused.npu_moe_experts_forward(module, x[0], p, torch.zeros(3, k, dtype=torch.long))
    assert flat.shape == (3, H)  # two dimensions in, two out
    with pytest.raises(ValueError, match="None"):
        NpuMoeFused.npu_moe_experts_forward(Stacked(None), x, p, torch.zeros(3, k, dtype=torch.long))
    with pytest.raises(ValueError, match="not one of"):
        NpuMoeFused.npu_moe_experts_forward(Stacked(torch.tanh), x, p, torch.zeros(3, k, dtype=torch.long))


class Block(nn.Module):
    """A sparse block: a router and experts, stacked or in a list."""

    def __init__(self, experts, norm=True):
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts, self.top_k, self.num_experts, self.norm_topk_prob = experts, k, E, norm


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(H, I, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(I, H, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_sparse_block_returns_the_tensor_alone():
    block = Block(Stacked())
    x = torch.randn(2, 5, H)
    out = NpuMoeFused.npu_moe_sparse_block_forward(block, x)
    p, ids = block.gate(x.view(T, H)).softmax(-1).topk(k)
    want = block.experts.loop(x.view(T, H), ids, p / p.sum(-1, keepdim=True))
    assert isinstance(out, torch.Tensor) and out.shape == (2, 5, H) and rel(out.view(T, H), want) < 1e-5


@pytest.mark.parametrize("norm", [False, True])
def test_list_block_returns_states_and_logits(norm):
    block = Block(nn.ModuleList(Mlp() for _ in range(E)), norm)
    x = torch.randn(2, 5, H, requires_grad=True)
    out, logits = Qwen3NpuMoeFused.qwen3moe_sparse_moe_block_forward(block, x)
    flat = x.view(T, H)
    p, ids = block.gate(flat).softmax(-1).topk(k)
    p = p / p.sum(-1, keepdim=True) if norm else p
    want = torch.stack([sum(p[t, j] * block.experts[int(ids[t, j])](flat[t]) for j in range(k)) for t in range(T)])
    assert out.shape == (2, 5, H) and logits.shape == (T, E) and rel(out.view(T, H), want) < 1e-5
    wrt = [x, *block.parameters()]
    dy = torch.randn_like(want)
    got = torch.autograd.grad(out.view(T, H), wrt, dy)
    for a, b in zip(got, torch.autograd.grad(want, wrt, dy, allow_unused=True, materialize_grads=True), strict=True):
        assert rel(a, b) < 1e-5 or float(b.abs().max()) == float(a.abs().max()) == 0.0
    block.experts[1].up_proj = nn.Sequential(block.experts[1].up_proj)  # something wraps a Linear: never ignored
    with pytest.raises(ValueError, match="wrapped"):
        Qwen3NpuMoeFused.qwen3moe_sparse_moe_block_forward(block, x)


def test_mapping():
    assert set(kernel_moe_mapping) >= {"Qwen3MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"}
    functions = [f for patches in kernel_moe_mapping.values() for f in patches.values()]
    assert (NpuMoeFused.npu_moe_experts_v5_forward in functions) is V5
    assert issubclass(GmmFunction, torch.autograd.Function) and issubclass(HybridGmmFunction, torch.autograd.Function)
