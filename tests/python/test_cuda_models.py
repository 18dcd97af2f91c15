# SPDX-License-Identifier: Apache-2.0
"""CUDA: what training and serving do. Models, compilation, CUDA graphs, checkpointing, streams. Without a GPU: skipped, each counted."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusedmoe
from common import rel, step, tiny, worst
from cuda_common import BOUND, HOPPER, layer, needs_a_device, results
from fusedmoe import ops
from fusedmoe.integrations import routers
from fusedmoe.kernels import apply_kernel

pytestmark = needs_a_device
IDS = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kernel", ["fused_moe", "cuda_fused_moe", "name"])
def test_model(kernel):
    model = tiny("Qwen3Moe").cuda()
    want = step(model, IDS.cuda())
    if kernel == "name":
        model.set_experts_implementation("fusedmoe")
    else:
        assert apply_kernel(kernel, model=model) is model
    assert worst(step(model, IDS.cuda()), want) <= 2e-5
    with pytest.raises(RuntimeError, match="cuda"):
        apply_kernel("cpu_fused_moe", model=model)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "GptOss", "DeepseekV3"])
@pytest.mark.parametrize("how", ["bf16", "autocast"])
def test_a_model_in_bf16_is_no_worse_than_eager(family, how):
    every = dict(num_experts_per_tok=8, hidden_size=128, intermediate_size=128, moe_intermediate_size=64, topk_group=2)
    batches = [torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(seed)).cuda() for seed in range(2, 8)]
    model, reference = tiny(family, **every).cuda(), tiny(family, **every).double().cuda()
    exact = [step(reference, ids) for ids in batches]

    def error(model):
        """Of all batches: that of one, the worst of its gradients, is luck (ours of eager's 0.7 to 1.5)."""
        return sum(worst(step(model, ids), want) for ids, want in zip(batches, exact, strict=True))

    if how == "bf16":
        model = model.bfloat16()
    with torch.autocast("cuda", torch.bfloat16, enabled=how == "autocast"):
        eager = error(model)
        assert error(fusedmoe.apply(model)) <= 1.25 * eager


@pytest.mark.parametrize("family", ["Qwen3Moe", "Qwen2Moe", "Mixtral", "Olmoe", "GptOss", "DeepseekV3", "Glm4Moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_routers_call_route(family, dtype):
    """On a device apply() fuses routers: the experts chosen are the same, weights and gradients those of the router's own."""
    model = tiny(family).cuda().to(dtype)
    own, gates = copy.deepcopy(model), []
    fusedmoe.apply(model)
    for mine, other in zip(model.modules(), own.modules(), strict=True):
        if getattr(vars(mine).get("forward"), "__func__", None) is routers.forward:
            gates.append((mine, other))
    assert len(gates) == 2, "the routers of both layers"
    x = torch.randn(1000, 32, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(dtype)

    def run(gate, x):
        """ids, weights in their order, gradients."""
        gate.zero_grad()
        x = x.clone().requires_grad_()
        outs = gate(x)
        ids, by_id = next(t for t in outs if not t.is_floating_point()).sort(1)
        weights = next(t for t in outs if t.is_floating_point() and t.shape[1] == 2).gather(1, by_id)
        weights.float().square().sum().backward()
        return (ids, weights, x.grad, *(p.grad for p in gate.parameters() if p.grad is not None))

    for mine, other in gates:
        same = (run(mine, x)[0] == run(other, x)[0]).all(1)  # logits that are equal in bfloat16 leave the choice to torch.topk
        assert same.all() if dtype == torch.float32 else same.float().mean() > 0.95
        for a, b in zip(run(mine, x[same]), run(other, x[same]), strict=True):
            assert a.dtype == b.dtype and rel(a, b) < 4 * BOUND[dtype]  # gpt-oss takes its own softmax in bfloat16
    if dtype == torch.float32:
        assert worst(step(model, IDS.cuda()), step(own, IDS.cuda())) <= 3e-5


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_adapters_of_peft(monkeypatch, family):
    peft = pytest.importorskip("peft")
    names = ["experts.gate_up_proj", "experts.down_proj"]
    model = peft.get_peft_model(tiny(family), peft.LoraConfig(r=4, lora_alpha=24, target_parameters=names, target_modules=[]))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.2)  # zeros would hide it
    model = model.cuda()
    want = step(copy.deepcopy(model), IDS.cuda())
    fusedmoe.apply(model)
    real, adapters = ops.call, []
    monkeypatch.setattr(ops, "call", lambda op, *a: (adapters.append(a[7]) if op is ops.experts_backward else None, real(op, *a))[1])
    assert worst(step(model, IDS.cuda()), want) <= 3e-5
    assert len(adapters) == 2 and all(flags & ops.LORA1 and flags & ops.LORA2 for flags in adapters), "both layers, in the kernels"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend):
    torch._dynamo.reset()
    x, ids, p, w = layer(48, *HOPPER)
    f = lambda x, ids, p, *w: torch.tanh(fusedmoe.experts(x, ids, p, w).float()).sum()  # noqa: E731
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    for n in (48, 9, 14):  # the second size makes T symbolic
        a = torch.autograd.grad(f(x[:n], ids[:n], p[:n], *w), (x, p, *w))
        b = torch.autograd.grad(compiled(x[:n], ids[:n], p[:n], *w), (x, p, *w))
        assert all(rel(u, v) < 4e-3 for u, v in zip(b, a, strict=True))


def test_compile_a_model_with_cuda_graphs():
    torch._dynamo.reset()
    model = fusedmoe.apply(tiny("Qwen3Moe").cuda())
    want = step(model, IDS.cuda())
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad(set_to_none=True)
        out = compiled(input_ids=IDS.cuda(), labels=IDS.cuda())
        out.loss.backward()
    assert rel(out.logits, want[1]) < 1e-4
    for n, p in model.named_parameters():
        if "experts" in n:
            assert rel(p.grad, want[2][n]) < 1e-3


@pytest.mark.parametrize("T", [1, 40, 500])
@pytest.mark.parametrize("warm", [True, False])
def test_graph_of_a_forward(T, warm):
    sizes = (512, 256, 8 + 8 * warm + T % 7, 2)  # without a warm-up the plan is made during the capture
    x, ids, p, w = layer(T, *sizes)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        if warm:
            fusedmoe.experts(x, ids, p, w)
        with torch.cuda.graph(graph):
            out = fusedmoe.experts(x, ids, p, w)
        for seed in (1, 2):
            other = layer(T, *sizes, seed=seed)
            for old, new in zip((x, ids, p, *w), (*other[:3], *other[3]), strict=True):
                old.copy_(new)
            graph.replay()
            assert torch.equal(out, fusedmoe.experts(*other))


@pytest.mark.parametrize("flags", [0, ops.LIST, ops.RECOMPUTE])
def test_graph_of_forward_and_backward(flags):
    x, ids, p, w = layer(300, *HOPPER, flags=flags)
    dout = torch.randn_like(x)
    leaves = (x, p, *w)

    def work():
        out = fusedmoe.experts(x, ids, p, w, ops.SWIGLU, flags)
        return (out, *torch.autograd.grad(out, leaves, dout))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = work()
    for seed in (1, 2):
        other = layer(300, *HOPPER, seed=seed, flags=flags)
        with torch.no_grad():
            for old, new in zip((x, ids, p, *w), (*other[:3], *other[3]), strict=True):
                old.copy_(new)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(held, work(), strict=True))


def test_graphed_callable_of_a_training_step():
    module = torch.nn.Module()
    x, ids, p, (w1, w2) = layer(64, *HOPPER)
    module.w1, module.w2 = torch.nn.Parameter(w1.detach()), torch.nn.Parameter(w2.detach())
    module.forward = lambda x, p: fusedmoe.experts(x, ids, p, [module.w1, module.w2])
    want = module(x, p)
    wanted = torch.autograd.grad(want.float().square().sum(), (x, p, module.w1, module.w2))
    want = want.detach()  # torch cannot capture while an older graph holds the parameters' nodes
    graphed = torch.cuda.make_graphed_callables(module, (x.detach().clone().requires_grad_(), p.detach().clone().requires_grad_()))
    got = graphed(x, p)
    assert torch.equal(got, want)
    loss = got.float().square().sum()
    for _ in range(2):
        grads = torch.autograd.grad(loss, (x, p, module.w1, module.w2), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    x, ids, p, w = layer(100, *HOPPER)
    f = lambda x, p, *w: fusedmoe.experts(x, ids, p, w)  # noqa: E731
    want = torch.autograd.grad(f(x, p, *w).square().sum(), (x, p, *w))
    checkpoint(f, x, p, *w, use_reentrant=reentrant).square().sum().backward()
    assert all(torch.equal(t.grad, g) for t, g in zip((x, p, *w), want, strict=True))


def test_recompute_gives_the_same_bits():
    given = layer(200, *HOPPER)
    assert all(torch.equal(a, b) for a, b in zip(results(*given), results(*given, 0, ops.RECOMPUTE), strict=True))


def test_streams_do_not_disturb_one_another():
    given = [layer(700 + 50 * i, *HOPPER, seed=i) for i in range(3)]
    wanted = [results(*g) for g in given]
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()
    found = [[] for _ in given]
    for _ in range(8):
        for stream, g, all_of_it in zip(streams, given, found, strict=True):
            with torch.cuda.stream(stream):
                all_of_it.append(results(*g))
    torch.cuda.synchronize()
    for want, runs in zip(wanted, found, strict=True):
        assert all(torch.equal(a, b) for run in runs for a, b in zip(run, want, strict=True))


def test_saved_state_may_move():
    """Offloading hooks bring it back at another address."""
    x, ids, p, w = layer(300, *HOPPER)
    want = results(x, ids, p, w)
    held = []  # keeps the old addresses taken

    def pack(t):
        held.append(torch.empty(512 * (len(held) + 1), dtype=torch.uint8, device="cuda"))
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        got = results(x, ids, p, w)
    with torch.autograd.graph.save_on_cpu():
        back = results(x, ids, p, w)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(want, got, back, strict=True))


def test_a_thread_that_has_not_used_cuda():
    from concurrent.futures import ThreadPoolExecutor

    x, ids, p, w = (t.detach() if torch.is_tensor(t) else [u.detach() for u in t] for t in layer(4096, 1024, 512, 32, 4))
    how = (ops.SWIGLU, 0, 0.0, 0.0)
    line = ops.experts_saved(x.dtype, x.device, ops.layer_sizes(w, 0, 0), 4, *how)
    out, saved = ops.experts_forward(x, ids, p, w, *how, line)
    want = ops.experts_backward(x, ids, p, w, saved, x, *how, 15)
    with ThreadPoolExecutor(1) as pool:  # backward begins with a tensor map, not with a launch
        got = pool.submit(ops.experts_backward, x, ids, p, w, saved, x, *how, 15).result()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_training_follows_eager():
    model = tiny("Qwen3Moe").cuda()
    curves = []
    for m in (copy.deepcopy(model), fusedmoe.apply(model)):
        optimizer = torch.optim.SGD(m.parameters(), 0.3)  # Adam makes steps of gradients that are rounding alone
        curves.append([])
        for _ in range(20):
            optimizer.zero_grad()
            loss = m(input_ids=IDS.cuda(), labels=IDS.cuda()).loss
            loss.backward()
            optimizer.step()
            curves[-1].append(loss.item())
    assert max(abs(a - b) for a, b in zip(*curves, strict=True)) < 1e-3 and curves[1][-1] < curves[1][0]
