# SPDX-License-Identifier: Apache-2.0
"""What training really does to a layer: autocast, checkpointing, compile, frozen weights, odd strides, empty batches."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusedmoe
from common import V5, rel, step, tiny, worst
from fusedmoe import autograd, ops

if not V5:
    pytest.skip("one version is enough", allow_module_level=True)

T, H, I, E, k = 24, 40, 20, 6, 2
IDS = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(2))


def layer(dtype=torch.float32):
    r = lambda *s: (torch.randn(*s) * 0.3).to(dtype).requires_grad_()  # noqa: E731
    return r(T, H), torch.randint(0, E, (T, k)), torch.rand(T, k).to(dtype).requires_grad_(), r(E, 2 * I, H), r(E, H, I)


@pytest.mark.parametrize("hidden", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_mixed_dtypes(hidden, weights, autocast):
    x, ids, p, w1, w2 = layer()
    want = fusedmoe.experts(x, ids, p, [w1, w2])
    exact = torch.autograd.grad(want.sum(), (x, p, w1, w2))
    x, p = x.detach().to(hidden).requires_grad_(), p.detach().requires_grad_()
    w1, w2 = (w.detach().to(weights).requires_grad_() for w in (w1, w2))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = fusedmoe.experts(x, ids, p, [w1, w2])
    assert out.dtype == hidden and rel(out, want) < 2e-2
    for a, b, t in zip(torch.autograd.grad(out.float().sum(), (x, p, w1, w2)), exact, (x, p, w1, w2), strict=True):
        assert a.dtype == t.dtype and rel(a, b) < 3e-2


def test_autocast_of_a_model():
    model = tiny("Qwen3Moe", num_experts_per_tok=8)
    with torch.autocast("cpu", torch.bfloat16):
        eager = step(model, IDS)
    exact = step(copy.deepcopy(model).double(), IDS)
    fusedmoe.apply(model)
    with torch.autocast("cpu", torch.bfloat16):
        ours = step(model, IDS)
    assert worst(ours, exact) <= 2 * worst(eager, exact)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    x, ids, p, w1, w2 = layer()
    f = lambda x, p, w1, w2: fusedmoe.experts(x, ids, p, [w1, w2])  # noqa: E731
    want = torch.autograd.grad(f(x, p, w1, w2).square().sum(), (x, p, w1, w2))
    out = checkpoint(f, x, p, w1, w2, use_reentrant=reentrant)
    out.square().sum().backward()
    assert all(torch.equal(t.grad, g) for t, g in zip((x, p, w1, w2), want, strict=True))


def test_recompute_gives_the_same_bits():
    x, ids, p, w1, w2 = layer()
    results = []
    for flags in (0, ops.RECOMPUTE):
        out = fusedmoe.experts(x, ids, p, [w1, w2], flags=flags)
        results.append((out, *torch.autograd.grad(out.square().sum(), (x, p, w1, w2))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flags", [0, ops.INTERLEAVED])
def test_a_kept_graph_keeps_what_was_saved(dtype, flags, monkeypatch):
    used_up = []
    real = ops.experts_backward
    monkeypatch.setattr(autograd.ops, "experts_backward", lambda *a: used_up.append(bool(a[7] & ops.REUSE_SAVED)) or real(*a))
    x, ids, p, w1, w2 = layer(dtype)
    loss = fusedmoe.experts(x, ids, p, [w1, w2], flags=flags).square().sum()
    first, second, last = (torch.autograd.grad(loss, (x, p, w1, w2), retain_graph=keep) for keep in (True, True, False))
    assert used_up == [False, False, True]
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(first, second, last, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("backend, dynamic", [("aot_eager", None), ("inductor", None), ("inductor", True)])  # True: every size is a symbol
@pytest.mark.parametrize("form", ["stacked", "list"])
def test_compile_forward_and_backward(backend, form, dynamic):
    torch._dynamo.reset()
    x, ids, p, w1, w2 = layer()
    w = [w1, w2] if form == "stacked" else [t.detach().clone().requires_grad_() for t in (*w1[:, :I], *w1[:, I:], *w2)]
    flags = 0 if form == "stacked" else ops.LIST
    f = lambda x, ids, p, *w: torch.tanh(fusedmoe.experts(x, ids, p, w, 0, flags)).sum()  # noqa: E731
    compiled = torch.compile(f, fullgraph=True, backend=backend, dynamic=dynamic)
    for n in (T, 9, 14):  # the second size makes T symbolic
        a = torch.autograd.grad(f(x[:n], ids[:n], p[:n], *w), (x, p, *w))
        b = torch.autograd.grad(compiled(x[:n], ids[:n], p[:n], *w), (x, p, *w))
        assert all(rel(u, v) < 1e-6 for u, v in zip(b, a, strict=True))
    with torch.no_grad():
        assert rel(compiled(x, ids, p, *w), f(x, ids, p, *w)) < 1e-6


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "DeepseekV3"])
@pytest.mark.parametrize("how, dynamic", [("apply", None), ("name", None), ("name", True)])  # True: floats are symbols
def test_compile_a_model(family, how, dynamic):
    torch._dynamo.reset()
    model = tiny(family)
    want = step(model, IDS)
    if how == "apply":
        fusedmoe.apply(model, routers=True)
    else:
        model.set_experts_implementation("fusedmoe")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    model.zero_grad()
    out = compiled(input_ids=IDS, labels=IDS)
    out.loss.backward()
    assert rel(out.logits, want[1]) < 1e-5
    for n, p in model.named_parameters():
        if p.grad is not None and "experts" in n:
            assert rel(p.grad, want[2][n]) < 1e-4


def test_forward_mode_and_vmap_are_refused():
    """The operator alone would lose the tangent and say nothing; of a batched tensor it would read an address that is none."""
    x, ids, p, w1, w2 = (t.detach() for t in layer())
    f = lambda x: fusedmoe.experts(x, ids, p, [w1, w2])  # noqa: E731
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="forward mode"):
            f(torch.autograd.forward_ad.make_dual(x, x))
        assert torch.equal(f(x), f(x.clone()))
    for use in (torch.vmap(f), torch.func.jacrev(f), lambda x: torch.func.jvp(f, (x,), (x,))):
        with pytest.raises(RuntimeError, match="Batching rule not implemented|autograd.Function with functorch"):
            use(x.expand(3, T, H))


def test_trace():
    x, ids, p, w1, w2 = (t.detach() for t in layer())
    f = lambda x, ids, p: fusedmoe.experts(x, ids, p, [w1, w2])  # noqa: E731
    traced = torch.jit.trace(f, (x[:5], ids[:5], p[:5]))
    assert torch.equal(traced(x, ids, p), f(x, ids, p))


def test_meta_tensors():
    tensors = [t.detach().to("meta").requires_grad_(t.is_floating_point()) for t in layer()]
    x, ids, p, w1, w2 = tensors
    out = fusedmoe.experts(x, ids, p, [w1, w2])
    out.sum().backward()
    assert out.is_meta and out.shape == x.shape and all(t.grad.is_meta and t.grad.shape == t.shape for t in (x, p, w1, w2))


def test_double_use_in_one_graph():
    x, ids, p, w1, w2 = layer()
    f = lambda: fusedmoe.experts(fusedmoe.experts(x, ids, p, [w1, w2]), ids.flip(0), p, [w1, w2])  # noqa: E731
    out = f()
    out.square().sum().backward()
    doubles = [t.detach().double().requires_grad_() for t in (x, p, w1, w2)]
    y = fusedmoe.experts(doubles[0], ids, doubles[1], doubles[2:])
    y = fusedmoe.experts(y, ids.flip(0), doubles[1], doubles[2:])
    grads = torch.autograd.grad(y.square().sum(), doubles)
    assert all(rel(t.grad, g) < 1e-5 for t, g in zip((x, p, w1, w2), grads, strict=True))


@pytest.mark.parametrize("form", ["stacked", "list"])
@pytest.mark.parametrize("frozen", ["x", "p", "up", "down", "weights", "all but p"])
def test_frozen_costs_nothing(form, frozen, monkeypatch):
    x, ids, p, w1, w2 = layer()
    off = {"x": [x], "p": [p], "up": [w1], "down": [w2], "weights": [w1, w2], "all but p": [x, w1, w2]}[frozen]
    for t in off:
        t.requires_grad_(False)
    w, flags = [w1, w2], 0
    if form == "list":
        pairs = [*((w1, t) for t in (*w1[:, :I], *w1[:, I:])), *((w2, t) for t in w2)]
        w, flags = [t.detach().requires_grad_(whole.requires_grad) for whole, t in pairs], ops.LIST
    asked = []
    real = ops.experts_backward
    monkeypatch.setattr(autograd.ops, "experts_backward", lambda *a: asked.append(a[-1]) or real(*a))
    fusedmoe.experts(x, ids, p, w, 0, flags).sum().backward()
    bits = [(x, 1), (p, 2), (w1, 4), (w2, 8)]
    assert asked == [sum(bit for t, bit in bits if t.requires_grad)]
    assert all((t.grad is not None) == t.requires_grad for t in (x, p, *w))


def test_nothing_is_saved_without_a_gradient(monkeypatch):
    x, ids, p, w1, w2 = layer()
    monkeypatch.setattr(autograd.ops, "experts_forward", None)
    with torch.no_grad():
        fusedmoe.experts(x, ids, p, [w1, w2])
    with torch.inference_mode():
        fusedmoe.experts(x, ids, p, [w1, w2])
    fusedmoe.experts(*(t.detach() for t in (x, ids, p)), [w1.detach(), w2.detach()])


def test_strides():
    x, ids, p, w1, w2 = (t.detach() for t in layer())
    want = fusedmoe.experts(x, ids, p, [w1, w2])
    wide = torch.zeros(T, 2 * H)
    wide[:, ::2] = x
    for variant in (wide[:, ::2], x.t().contiguous().t(), torch.cat([x, x], 1)[:, :H]):
        variant = variant.detach().requires_grad_()
        out = fusedmoe.experts(variant, ids.t().contiguous().t(), p.t().contiguous().t(), [w1, w2])
        assert torch.equal(out, want)
        out.sum().backward()
        assert variant.grad.shape == variant.shape
    turned = [w.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for w in (w1, w2)]
    out = fusedmoe.experts(x, ids.int(), p, turned)
    assert rel(out, want) < 1e-6
    out.sum().backward()
    assert turned[0].grad is not None


def test_no_tokens():
    x, ids, p, w1, w2 = layer()
    out = fusedmoe.experts(x[:0], ids[:0], p[:0], [w1, w2])
    out.sum().backward()
    assert out.shape == (0, H) and float(w1.grad.abs().max()) == 0.0 and float(w2.grad.abs().max()) == 0.0


def test_gradient_accumulation():
    x, ids, p, w1, w2 = layer()
    fusedmoe.experts(x, ids, p, [w1, w2]).sum().backward()
    whole = w1.grad.clone()
    w1.grad = w2.grad = None
    for part in (slice(0, 9), slice(9, T)):
        fusedmoe.experts(x[part], ids[part], p[part], [w1, w2]).sum().backward()
    assert rel(w1.grad, whole) < 1e-6


def test_a_changed_weight_is_an_error():
    x, ids, p, w1, w2 = layer()
    out = fusedmoe.experts(x, ids, p, [w1, w2])
    with torch.no_grad():
        w2.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_result_is_a_fresh_tensor():
    x, ids, p, w1, w2 = layer()
    out = fusedmoe.experts(x, ids, p, [w1, w2])
    out += 1  # what transformers 5.0 to 5.2 do with a shared expert
    out.sum().backward()


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_and_processes(threads):
    from concurrent.futures import ThreadPoolExecutor

    torch.set_num_threads(threads)
    x, ids, p, w1, w2 = (t.detach() for t in layer())
    want = fusedmoe.experts(x, ids, p, [w1, w2])
    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(lambda _: fusedmoe.experts(x, ids, p, [w1, w2]), range(40)):
            assert torch.equal(out, want)


def _child(queue, tensors):
    x, ids, p, w1, w2 = tensors
    queue.put(fusedmoe.experts(x, ids, p, [w1, w2]).sum().item())


def test_fork_after_use():
    import multiprocessing

    tensors = tuple(t.detach() for t in layer())
    want = fusedmoe.experts(*tensors[:3], list(tensors[3:])).sum().item()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=_child, args=(queue, tensors))
    process.start()
    assert queue.get() == want
    process.join()
