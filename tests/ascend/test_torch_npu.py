# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: I001
"""The real torch_npu on the simulated NPU: fusedmoe's operators, kernel classes and models, beside LLaMA-Factory's.

Run with FMOE_SIM set, in an environment that has torch_npu (tests/ascend/run_torch.sh makes one).
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import npu  # before torch
import pytest
import torch

import fusedmoe
import rivals
from fusedmoe import ops
from fusedmoe.kernels.ops.mlp.npu_fused_moe import NpuMoeFused

HERE = os.path.dirname(os.path.abspath(__file__))
UNIT = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
needs_original = pytest.mark.skipif(rivals.original() is None, reason="llamafactory 0.9.5 is not installed")


@pytest.fixture(autouse=True)
def clean():
    """No violation of CANN's rules, no descriptor or executor left, whatever a test does."""
    torch.npu.set_device(0)
    npu.forgive()
    yield
    torch.npu.synchronize()
    assert npu.violation() == ""
    assert [npu.get(f"live_{n}") for n in ("tensors", "lists", "scalars", "arrays", "executors")] == [0] * 5


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def gradients(layer: rivals.Layer, forward) -> list[torch.Tensor]:
    layer.clear()
    out = forward(layer)
    out.backward(layer.dout)
    return [out.detach(), *(t.grad.clone() for t in layer.leaves())]


def on_cpu(layer: rivals.Layer) -> list[torch.Tensor]:
    """fusedmoe's reference in double."""
    leaves = [t.detach().cpu().double().requires_grad_() for t in layer.leaves()]
    x, p, w1, w2 = leaves
    out = fusedmoe.experts(x, layer.ids.cpu(), p, [w1, w2])
    out.backward(layer.dout.cpu().double())
    return [out.detach(), *(t.grad for t in leaves)]


# ---- the layer ----


@pytest.mark.parametrize("dtype", list(UNIT))
@pytest.mark.parametrize("sizes", [(16, 32, 16, 8, 2), (1, 8, 8, 4, 1), (33, 48, 40, 130, 8)])
def test_layer(dtype, sizes):
    layer = rivals.Layer(*sizes, dtype)
    for got, want in zip(gradients(layer, rivals.forward_ours), on_cpu(layer), strict=True):
        assert distance(got, want) < 3 * UNIT[dtype]


@pytest.mark.parametrize(
    ("dtype", "forward", "gradient"),
    [(torch.float32, 2e-6, 2e-6), (torch.bfloat16, 4e-3, 6e-3), (torch.float16, 6e-4, 1e-3)],
)
def test_bounds(dtype, forward, gradient):
    """The relative L2 errors that docs/numerics.md promises for a whole layer."""
    layer = rivals.Layer(256, 512, 192, 32, 4, dtype)
    errors = [distance(a, b) for a, b in zip(gradients(layer, rivals.forward_ours), on_cpu(layer), strict=True)]
    assert errors[0] < forward
    assert max(errors[1:]) < gradient


@needs_original
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_as_the_original(dtype):
    layer = rivals.Layer(40, 64, 48, 16, 4, dtype)
    ours, theirs = gradients(layer, rivals.forward_ours), gradients(layer, rivals.forward_original)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.cpu(), b.cpu())  # the same operators on the same rows: the same bits


def test_launches():
    layer = rivals.Layer(64, 256, 96, 128, 8, torch.bfloat16)
    rivals.forward_ours(layer)  # the first call settles plans
    with npu.Count() as forward:
        out = rivals.forward_ours(layer)
    with npu.Count() as backward:
        out.backward(layer.dout)
    assert (forward.launches, forward.syncs, forward.copies, forward.hidden) == (6, 0, 0, 0), forward.trace
    assert (backward.launches, backward.syncs, backward.copies, backward.hidden) == (7, 0, 0, 0), backward.trace


def test_launches_of_the_kernel_class():
    """The class adds nothing to the layer: no skip marks where there is no expert parallelism."""
    layer = rivals.Layer(64, 256, 96, 128, 8, torch.bfloat16)
    module = torch.nn.Module()
    module.gate_up_proj, module.down_proj, module.act_fn = layer.w1, layer.w2, torch.nn.SiLU()
    call = NpuMoeFused.npu_moe_experts_v5_forward
    call(module, layer.x, layer.ids, layer.p)  # the first call settles plans
    with npu.Count() as forward:
        out = call(module, layer.x, layer.ids, layer.p)
    with npu.Count() as backward:
        out.backward(layer.dout)
    assert (forward.launches, backward.launches) == (6, 7), (forward.trace, backward.trace)


@needs_original
def test_fewer_than_the_original():
    layer = rivals.Layer(64, 256, 96, 128, 8, torch.bfloat16)
    with npu.Count() as forward:
        out = rivals.forward_original(layer)
    with npu.Count() as backward:
        out.backward(layer.dout)
    assert (forward.launches, backward.launches) == (9, 9)


def test_skip_marks():
    layer = rivals.Layer(20, 16, 8, 4, 2, torch.float32)
    ids = layer.ids.cpu()
    ids[::3, 0] = 4
    x, p, w1, w2 = (t.detach().cpu().clone().requires_grad_() for t in layer.leaves())
    want = fusedmoe.experts(x, ids, p, [w1, w2], flags=ops.SKIP_E)
    want.backward(layer.dout.cpu())
    got = fusedmoe.experts(layer.x, ids.npu(), layer.p, [layer.w1, layer.w2], flags=ops.SKIP_E)
    got.backward(layer.dout)
    assert distance(got, want) < 1e-5
    for a, b in zip(layer.leaves(), (x, p, w1, w2), strict=True):
        assert distance(a.grad, b.grad) < 1e-5
    assert not layer.p.grad.cpu()[::3, 0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lists(dtype):
    """The Qwen3 block of transformers 4, through the kernel class; gradients of idle experts are zero."""
    from fusedmoe.kernels.ops.mlp.npu_fused_moe import Qwen3NpuMoeFused

    torch.manual_seed(0)
    cpu = rivals.Block(32, 16, 8, 2).to(dtype)
    dev = copy.deepcopy(cpu).npu()
    x = torch.randn(2, 6, 32).to(dtype)
    a, la = Qwen3NpuMoeFused.qwen3moe_sparse_moe_block_forward(cpu, x)
    b, lb = Qwen3NpuMoeFused.qwen3moe_sparse_moe_block_forward(dev, x.npu())
    a.sum().backward()
    b.sum().backward()
    assert distance(lb, la) < UNIT[dtype] * 2
    assert distance(b, a) < UNIT[dtype] * 4
    for p, q in zip(cpu.parameters(), dev.parameters(), strict=True):
        assert q.grad is not None
        if p.grad is not None and p.grad.norm() > 1e-3:
            assert distance(q.grad, p.grad) < UNIT[dtype] * 8


def test_gmm_functions():
    torch.manual_seed(0)
    x, w = torch.randn(20, 16), torch.randn(5, 16, 24)
    sizes = torch.tensor([4, 0, 9, 7, 0])
    want, got = [], []
    for device, store in (("cpu", want), ("npu", got)):
        a, b = (t.detach().to(device).clone().requires_grad_() for t in (x, w))
        y = fusedmoe.GmmFunction.apply(a, b, sizes.to(device))
        y.square().sum().backward()
        store += [y, a.grad, b.grad]
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) < 1e-5
    want, got = [], []
    for device, store in (("cpu", want), ("npu", got)):
        xs = [t.detach().to(device).clone().requires_grad_() for t in x.split((3, 0, 5, 12))[:3]]
        ws = [t.detach().to(device).clone().requires_grad_() for t in w[:3]]
        ys = fusedmoe.HybridGmmFunction.apply(3, *xs, *ws)
        torch.cat(ys).square().sum().backward()
        store += [*ys, *(t.grad for t in (*xs, *ws))]
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) < 1e-5


@pytest.mark.parametrize("renormalize", [False, True])
def test_route(renormalize):
    logits = torch.randn(24, 16, generator=torch.Generator().manual_seed(1)) * 3
    results = []
    for device in ("cpu", "npu"):
        x = logits.detach().to(device).clone().requires_grad_()
        ids, p = fusedmoe.route(x, 4, renormalize=renormalize)
        (p * torch.arange(4, device=device)).sum().backward()
        results.append((ids, p, x.grad))
    assert torch.equal(results[0][0], results[1][0].cpu())
    assert distance(results[1][1], results[0][1]) < 1e-6
    assert distance(results[1][2], results[0][2]) < 1e-5


# ---- the task queue ----

QUEUE_CASE = """
import os, sys, hashlib
sys.path.insert(0, {here!r})
import npu, torch, torch_npu, rivals
layer = rivals.Layer(24, 32, 16, 8, 2, torch.bfloat16)
torch.npu.synchronize()
npu.put("phase2_delay_us", {phase2})
npu.put("delay_us", {delay})
digest = hashlib.sha256()
for i in range(3):
    layer.clear()
    with torch.no_grad():
        layer.x.add_(0.25)  # queued just before our launches
    out = rivals.forward_ours(layer)
    out = out * 1.5         # and just after
    out.backward(layer.dout)
    for t in (out.detach(), *(t.grad for t in layer.leaves())):
        digest.update(t.float().cpu().numpy().tobytes())
assert npu.violation() == "", npu.violation()
print("digest", digest.hexdigest())
"""


def digest(mode: str, phase2: int, delay: int) -> str:
    code = QUEUE_CASE.format(here=HERE, phase2=phase2, delay=delay)
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TASK_QUEUE_ENABLE": mode}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.split("digest ")[1].strip()


def test_task_queue_modes():
    """Every mode of torch_npu's task queue, on time and late: the same bits."""
    assert len({digest("1", 0, 0), digest("0", 0, 300), digest("1", 20000, 300), digest("2", 20000, 300)}) == 1


def test_other_stream():
    layer = rivals.Layer(24, 32, 16, 8, 2, torch.bfloat16)
    want = gradients(layer, rivals.forward_ours)
    torch.npu.synchronize()
    npu.put("delay_us", 500)
    try:
        stream = torch.npu.Stream()
        with torch.npu.stream(stream):
            got = gradients(layer, rivals.forward_ours)
        stream.synchronize()
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.cpu(), b.cpu())
    finally:
        npu.put("delay_us", 0)


# ---- whole models ----


def tiny(kind: str):
    import transformers

    torch.manual_seed(0)
    text = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
    )
    if kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**text, architectures=["Qwen3MoeForCausalLM"])
        config._attn_implementation = "eager"
        return transformers.Qwen3MoeForCausalLM(config)
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    vision = dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, deepstack_visual_indexes=[0]
    )
    config = transformers.Qwen3VLMoeConfig(
        text_config=text, vision_config=vision, architectures=["Qwen3VLMoeForConditionalGeneration"]
    )
    for c in (config, config.text_config, config.vision_config):
        c._attn_implementation = "eager"
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def train(model, ids: torch.Tensor, steps: int = 2) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("kind", "how"), [("qwen3_moe", "kernel"), ("qwen3_vl_moe", "kernel"), ("qwen3_moe", "implementation")]
)
def test_training_step(kind, how):
    cpu = tiny(kind)
    dev = copy.deepcopy(cpu).npu()
    if how == "kernel":
        from fusedmoe.kernels import apply_kernel

        dev = apply_kernel("npu_fused_moe", model=dev)
    else:
        fusedmoe.integrations.transformers.register()
        dev.set_experts_implementation("fusedmoe")
    ids = torch.randint(0, 60, (2, 10), generator=torch.Generator().manual_seed(3))
    want = train(cpu, ids)
    npu.reset()
    got = train(dev, ids.npu())
    assert npu.get("aclnnMoeInitRoutingV3") >= 4, "the backend was not used"
    assert got == pytest.approx(want, rel=1e-5)
    for p, q in zip(cpu.parameters(), dev.parameters(), strict=True):
        assert (p.detach() - q.detach().cpu()).abs().max() < 2e-5


@needs_original
def test_their_entry_finds_ours():
    """LLaMA-Factory's own apply_kernel puts fusedmoe under the model."""
    from llamafactory.v1.plugins.model_plugins.kernels.interface import apply_kernel

    model = tiny("qwen3_moe").npu()
    apply_kernel("npu_fused_moe", model=model)
    ids = torch.randint(0, 60, (2, 10)).npu()
    npu.reset()
    model(input_ids=ids)
    npu.drain()
    assert (npu.get("aclnnMoeInitRoutingV3"), npu.get("aclnnMoeTokenPermute")) == (2, 0)


# ---- errors ----


def test_error_of_a_launch():
    """A failing operator is an exception with CANN's text, at the call, and nothing is left behind."""
    layer = rivals.Layer(8, 16, 8, 4, 2, torch.float32)
    rivals.forward_ours(layer)
    torch.npu.synchronize()
    npu.fail("aclnnSwiGluGetWorkspaceSize", 1, 561002)
    with pytest.raises(RuntimeError, match="aclnnSwiGlu.*561002"):
        rivals.forward_ours(layer)
    npu.fail("", 0, 0)
    assert distance(gradients(layer, rivals.forward_ours)[0], on_cpu(layer)[0]) < 1e-5
