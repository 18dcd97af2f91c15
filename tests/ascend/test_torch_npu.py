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
from fusedmoe import _core, ops
from fusedmoe.kernels.ops.mlp.npu_fused_moe import NpuMoeFused
from models import tiny, trains_alike

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
    """Qwen3-30B-A3B's experts at their own size, T = 512, counted and not computed: launches and bytes beside theirs."""
    npu.put("count_only", 1)
    try:
        layer = rivals.Layer(512, 2048, 768, 128, 8, torch.bfloat16, fill=False)
        rivals.forward_ours(layer)  # the first call settles plans
        bytes_ = []
        for run, launches in ((rivals.forward_ours, (6, 7)), (rivals.forward_original, (9, 9))):
            layer.clear()
            with npu.Count() as forward:
                out = run(layer)
            with npu.Count() as backward:
                out.backward(layer.dout)
            assert (forward.launches, backward.launches) == launches
            bytes_.append(forward.bytes + backward.bytes)
        assert bytes_[0] <= 0.65 * bytes_[1], bytes_
        torch.npu.synchronize()
    finally:
        npu.put("count_only", 0)


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


def test_kernel_classes():
    """The stacked block of transformers 4 through its two functions, and the kernels that name no device."""
    from fusedmoe.kernels import apply_kernel

    torch.manual_seed(0)
    results = []
    for device in ("cpu", "npu"):
        g = torch.Generator().manual_seed(5)
        made = [torch.randn(*s, generator=g) / 6 for s in ((8, 32, 48), (8, 24, 32), (8, 32), (2, 6, 32))]
        w1, w2, gate, x = (t.to(device).requires_grad_() for t in made)
        experts = torch.nn.Module()
        experts.gate_up_proj, experts.down_proj, experts.act_fn = w1, w2, torch.nn.SiLU()
        block = torch.nn.Module()
        block.experts, block.top_k, block.gate = experts, 2, lambda t, gate=gate: t @ gate.T
        out = NpuMoeFused.npu_moe_sparse_block_forward(block, x)
        out.sum().backward()
        results.append([out, w1.grad, w2.grad, gate.grad, x.grad])
    errors = [distance(b, a) for a, b in zip(*results, strict=True)]
    assert max(errors) < 1e-5
    model = tiny("qwen3_moe").npu()
    assert apply_kernel("fused_moe", model=model) is model
    npu.reset()
    model(input_ids=torch.randint(0, 60, (2, 10)).npu())
    npu.drain()
    assert npu.get("aclnnMoeInitRoutingV3") == 2
    with pytest.raises(RuntimeError, match="needs a model on the cpu"):
        apply_kernel("cpu_fused_moe", model=model)


def test_adapters():
    """Low-rank adapters: composed of the other operations, and in order with torch_npu's queue all the same."""
    layer = rivals.Layer(24, 32, 16, 8, 2, torch.float32)
    g = torch.Generator().manual_seed(7)
    made = [torch.randn(*s, generator=g) / 4 for s in ((8, 4, 32), (8, 32, 4), (8, 4, 16), (8, 32, 4))]
    results = []
    for device in ("cpu", "npu"):
        x, p, w1, w2, a1, b1, a2, b2 = (
            t.detach().to(device).clone().requires_grad_() for t in (*(t.cpu() for t in layer.leaves()), *made)
        )
        npu.put("phase2_delay_us", 2000 if device == "npu" else 0)
        out = fusedmoe.experts(x + 0.25, layer.ids.to(device), p, [w1, w2], lora=((a1, b1), (a2, b2)))
        (out * 1.5).backward(layer.dout.to(device))
        results.append([out, *(t.grad for t in (x, p, w1, w2, a1, b1, a2, b2))])
    torch.npu.synchronize()
    npu.put("phase2_delay_us", 0)
    errors = [distance(b, a) for a, b in zip(*results, strict=True)]
    assert max(errors) < 1e-5, errors


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


def test_launches_go_through_the_queue():
    """By torch_npu's own thread; without its queue, or with the queue empty first, by ours."""
    layer = rivals.Layer(24, 32, 16, 8, 2, torch.bfloat16)
    rivals.forward_ours(layer)
    by_others = []
    for queue in (True, False):
        was = _core.use_queue(queue)
        assert was is True or not queue  # the symbol was found
        try:
            with npu.Count():
                rivals.forward_ours(layer)
            by_others.append((npu.get("launches"), npu.get("launches_elsewhere")))
        finally:
            _core.use_queue(True)
    assert by_others == [(6, 6), (6, 0)]


def test_another_device():
    """Tensors that are not on the current device: its queue is not used, results are the same."""
    layer, want = rivals.Layer(24, 32, 16, 8, 2, torch.bfloat16), None
    want = gradients(layer, rivals.forward_ours)
    with torch.npu.device(1):
        other = rivals.Layer(24, 32, 16, 8, 2, torch.bfloat16)
    assert other.x.device.index == 1 and torch.npu.current_device() == 0
    got = gradients(other, rivals.forward_ours)
    torch.npu.synchronize(1)
    same = [bool((a.cpu() == b.cpu()).all()) for a, b in zip(got, want, strict=True)]
    assert all(same)


QUEUE_CASE = """
import os, sys, hashlib
sys.path.insert(0, {here!r})
import npu, torch, torch_npu, rivals
from fusedmoe import _core
_core.use_queue({queue})
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


def run_case(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True)


def digest(mode: str, phase2: int, delay: int, queue: bool = True) -> str:
    run = run_case(QUEUE_CASE.format(here=HERE, phase2=phase2, delay=delay, queue=queue), TASK_QUEUE_ENABLE=mode)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.split("digest ")[1].strip()


def test_task_queue_modes():
    """Every mode of torch_npu's task queue, on time and late, through the queue and after draining it: the same bits."""
    on_time, late = (0, 0), (20000, 300)
    runs = [("1", *on_time), ("0", *late), ("1", *late), ("2", *late), ("1", *late, False), ("2", *late, False)]
    assert len({digest(*r) for r in runs}) == 1


LATE_ERROR = """
import sys, time
sys.path.insert(0, {here!r})
import npu, torch, torch_npu, rivals
layer = rivals.Layer(8, 16, 8, 4, 2, torch.float32)
rivals.forward_ours(layer)
torch.npu.synchronize()
npu.fail("aclnnSwiGlu", 1, 361001)
try:
    rivals.forward_ours(layer)
    for _ in range(50):  # whichever call comes first after the queue's thread has met the error
        torch.npu.synchronize()
        layer.x.detach().cpu()
        time.sleep(0.02)
except RuntimeError as error:
    print("said", "aclnnSwiGlu" in str(error))
print("left", *(npu.get("live_" + n) for n in ("tensors", "lists", "scalars", "arrays")), flush=True)
import os
os._exit(0)  # torch_npu's queue has stopped for good: its own operators end like this, too
"""


@pytest.mark.parametrize("mode", ["0", "1"])
def test_error_of_a_queued_launch(mode):
    """A launch that CANN refuses: at the call without the queue, soon after with it, and named.

    torch_npu's queue makes no further launch then, ours included, so what those hold is left in that mode.
    """
    run = run_case(LATE_ERROR.format(here=HERE), TASK_QUEUE_ENABLE=mode)
    assert "said True" in run.stdout, run.stdout + run.stderr[-2000:]
    if mode == "0":
        assert "left 0 0 0 0" in run.stdout, run.stdout


def test_split_libraries(tmp_path):
    """A CANN without libopapi.so: torch_npu finds libopapi_*.so in ASCEND_HOME_PATH, and ours goes on with them."""
    folder = os.path.normpath(os.path.join(npu.FOLDER, "..", "split"))
    os.symlink(folder, tmp_path / "lib64")
    for name in ("runtime", "compiler", "opp"):
        (tmp_path / name).mkdir()
    env = {"FMOE_SIM": folder, "ASCEND_HOME_PATH": str(tmp_path), "ASCEND_OPP_PATH": str(tmp_path / "opp")}
    code = QUEUE_CASE.format(here=HERE, phase2=0, delay=0, queue=True)
    run = run_case(code.replace('import npu, torch', 'import npu; os.environ.pop("FMOE_ASCEND_PATH"); import torch'), **env)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split("digest ")[1].strip() == digest("1", 0, 0)


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
    trains_alike(cpu, dev)


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


APPLY = """
import os, sys
sys.path.insert(0, {here!r})
import npu, torch, torch_npu
os.environ["FMOE_ASCEND_PATH"] = {path!r}
from fusedmoe.kernels import apply_kernel
try:
    apply_kernel("npu_fused_moe", model=torch.nn.Linear(2, 2).npu())
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("path", "said"),
    [("/nonexistent", ["libascendcl.so not found in FMOE_ASCEND_PATH /nonexistent"]),
     ("nogmm", ["aclnnSwiGluGrad", "aclnnGroupedMatmulV5 (nor V4)"])],
)  # fmt: skip
def test_apply_says_what_is_missing(path, said):
    """torch_npu is there, CANN is not, or lacks operators: known when the kernel is applied, not at the first forward."""
    path = os.path.normpath(os.path.join(npu.FOLDER, "..", path)) if path[0] != "/" else path
    run = run_case(APPLY.format(here=HERE, path=path))
    assert run.returncode == 0, run.stderr[-2000:]
    for text in ("NpuFusedMoEKernel (npu_fused_moe) cannot be applied", "torch_npu is installed", *said):
        assert text in run.stdout, run.stdout


BAD_ID = """
import sys
sys.path.insert(0, {here!r})
import npu, torch, torch_npu, rivals
npu.put("quiet", 1)
layer = rivals.Layer(8, 16, 8, 4, 2, torch.float32)
layer.ids[3, 1] = 77
try:
    rivals.forward_ours(layer)
    print("the call returns", flush=True)
    torch.npu.synchronize()
except (RuntimeError, IndexError) as error:
    print(type(error).__name__, "507015" in str(error), error, flush=True)
import os
os._exit(0)
"""


def test_bad_id():
    """Without a check an id out of range is the device's exception at the next synchronisation."""
    run = run_case(BAD_ID.format(here=HERE))
    assert "the call returns" in run.stdout and "RuntimeError True" in run.stdout, run.stdout + run.stderr[-2000:]
    run = run_case(BAD_ID.format(here=HERE), FMOE_ASCEND_CHECK="1")
    assert "IndexError" in run.stdout and "1 of 16 ids" in run.stdout, run.stdout + run.stderr[-2000:]
