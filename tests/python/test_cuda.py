# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors through the same operators: values, gradients, sizes, memory, and what is said where something is missing.

Without a GPU the tests that need one are skipped, each counted; what a machine without one can prove is in test_cuda_missing.py.
"""

import copy
import time

import pytest
import torch

import fusedmoe
from common import rel
from cuda_common import BOUND, HOPPER, ODD, exact_experts, layer, needs_a_device, results, specification
from fusedmoe import GmmFunction, HybridGmmFunction, _core, ops
from fusedmoe.kernels.ops.mlp.npu_fused_moe import Qwen3NpuMoeFused

pytestmark = needs_a_device


# ---- values and gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("sizes", [HOPPER, ODD], ids=["hopper", "odd"])
@pytest.mark.parametrize("T", [1, 7, 300])
def test_layer_against_the_specification(dtype, sizes, T):
    given = layer(T, *sizes, dtype)
    wanted = specification(*given)
    for a, b in zip(results(*given), wanted, strict=True):
        assert rel(a, b.cuda()) < BOUND[dtype]
    with torch.no_grad():  # inference: other kernels for few tokens
        assert rel(fusedmoe.experts(*given), wanted[0].cuda()) < BOUND[dtype]


FORMS = {
    "transposed": (ops.SWIGLU, ops.TRANSPOSED), "list": (ops.SWIGLU, ops.LIST), "skipped slots": (ops.SWIGLU, ops.SKIP_E),
    "recompute": (ops.SWIGLU, ops.RECOMPUTE), "gpt-oss": (ops.SWIGLU_OAI, ops.BIAS | ops.INTERLEAVED | ops.TRANSPOSED),
    "gelu": (ops.GEGLU_TANH, 0), "ungated": (ops.RELU2, ops.BIAS),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [HOPPER, ODD], ids=["hopper", "odd"])
def test_forms(form, sizes):
    act, flags = FORMS[form]
    given = layer(100, *sizes, act=act, flags=flags)
    for a, b in zip(results(*given, act, flags), specification(*given, act, flags & ~ops.RECOMPUTE), strict=True):
        assert rel(a, b.cuda()) < 2 * BOUND[torch.bfloat16]


@pytest.mark.parametrize("form", ["recompute", "gpt-oss", "list", "gelu"])
@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("sizes", [HOPPER, ODD], ids=["hopper", "odd"])
@pytest.mark.parametrize("rank", [5, 24])  # of W2's: beside the product, and in it
def test_adapters(form, dtype, sizes, rank):
    (act, flags), (H, I, E, _) = FORMS[form], sizes
    given = layer(150, *sizes, dtype, act=act, flags=flags)
    g = torch.Generator().manual_seed(8)
    shapes = (E, 16, H), (E, 2 * I, 16), (E, rank, I), (E, H, rank)
    lora = [(torch.randn(s, generator=g) / s[-1] ** 0.5).to("cuda", dtype).requires_grad_() for s in shapes]
    wanted = specification(*given, act, flags & ~ops.RECOMPUTE, lora=lora)
    for a, b in zip(results(*given, act, flags, lora=lora), wanted, strict=True):
        assert rel(a, b.cuda()) < 2 * BOUND[dtype]
    with torch.no_grad():
        assert rel(fusedmoe.experts(*given, act, flags, lora=(lora[:2], lora[2:])), wanted[0].cuda()) < 2 * BOUND[dtype]


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", [(512, 256, 32, 4), (512, 192, 4, 2), ODD], ids=str)
def test_a_token_has_the_same_bits_in_any_batch(form, sizes, rank):
    (act, flags), (H, I, E, _) = FORMS[form], sizes
    flags |= ops.SAME_BITS
    x, ids, p, w = layer(1000, *sizes, act=act, flags=flags)
    g, C = torch.Generator().manual_seed(9), 2 * I if act < ops.SILU else I
    shapes = ((E, rank, H), (E, C, rank), (E, rank, I), (E, H, rank)) if rank else ()
    lora = [(torch.randn(s, generator=g) / s[-1] ** 0.5).to("cuda", x.dtype) for s in shapes]
    how = (w, act, flags, 0.0, 0.0, (lora[:2], lora[2:]) if lora else ())
    dout = torch.randn(1000, H, generator=g).to("cuda", x.dtype)

    def run(rows, x=x, w=how):
        """out and the gradients of x and p for those rows; out without anything saved."""
        mine = [t[rows].detach().requires_grad_() for t in (x, p)]
        with torch.no_grad():
            alone = fusedmoe.experts(mine[0], ids[rows], mine[1], *w)
        out = fusedmoe.experts(mine[0], ids[rows], mine[1], *w)
        return alone, out, *torch.autograd.grad(out, mine, dout[rows])

    whole = run(torch.arange(1000))
    assert torch.equal(*whole[:2])
    for T in (1, 2, 8, 16, 17, 32, 64, 256):
        rows = torch.randperm(1000, generator=g)[:T]
        for got, wanted in zip(run(rows), whole, strict=True):
            assert torch.equal(got, wanted[rows])
    if flags & (ops.LIST | ops.TRANSPOSED) or lora or H < 512:  # of few terms another order may well round to the same bits
        return
    order = torch.cat((torch.arange(16, H), torch.arange(16))).cuda()  # the control: another order of the sums over k
    turned = run(torch.arange(1000), x[:, order], ([w[0][..., order], *w[1:]], *how[1:]))
    assert not torch.equal(turned[0], whole[0])


class Mlp(torch.nn.Module):
    def __init__(self, H, I):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (torch.nn.Linear(*s, bias=False) for s in ((H, I), (H, I), (I, H)))
        self.act_fn = torch.nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(torch.nn.Module):
    """Experts as modules of their own, as transformers v4 has them."""

    def __init__(self, H, I, E, k):
        super().__init__()
        self.gate, self.experts = torch.nn.Linear(H, E, bias=False), torch.nn.ModuleList(Mlp(H, I) for _ in range(E))
        self.top_k, self.norm_topk_prob = k, True

    def forward(self, x):
        p, ids = self.gate(x).softmax(-1).topk(self.top_k)
        p = p / p.sum(-1, keepdim=True)
        return sum((p * (ids == e)).sum(-1, keepdim=True) * expert(x) for e, expert in enumerate(self.experts))


@pytest.mark.parametrize("scales", [(1.5,), (1.5, 0.5)], ids=["one scale", "scales"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_of_linears(dtype, scales):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
    exact = peft.inject_adapter_in_model(config, Block(*HOPPER)).double()
    for i, m in enumerate(m for m in exact.modules() if hasattr(m, "lora_B")):
        m.scaling["default"] = scales[i % len(scales)]
    ours = copy.deepcopy(exact).to("cuda", dtype)
    exact.load_state_dict(ours.state_dict())
    x = torch.randn(300, HOPPER[0]).to(dtype)
    x[:, : HOPPER[2]] = torch.rand(300, HOPPER[2]).argsort(-1).to(dtype)  # which are the logits: no rounding decides about an expert
    for model in exact, ours:
        model.gate.weight.data.zero_().fill_diagonal_(1)
    grads = []
    for model, inputs in ((exact, x.double()), (ours, x.cuda())):
        out = model(inputs) if model is exact else Qwen3NpuMoeFused.qwen3moe_sparse_moe_block_forward(model, inputs)[0]
        leaves = {name: t for name, t in model.named_parameters() if "lora" in name}
        grads.append([out, *torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))])
    assert len(grads[0]) == 1 + 6 * HOPPER[2]
    for a, b in zip(*grads, strict=True):
        assert rel(b, a.cuda()) < 4 * BOUND[dtype]


def _operators(device, dtype):
    """(name, function of leaves, leaves) of every operator that has a gradient."""
    g = torch.Generator().manual_seed(3)
    leaf = lambda *s: torch.randn(*s, generator=g).to(device, dtype).requires_grad_()  # noqa: E731
    T, H, I, E, k = 60, 24, 12, 6, 2
    ids = torch.stack([torch.randperm(E, generator=g)[:k] for _ in range(T)]).to(device)
    sizes = [30, 0, 55, 5, 10, 20]
    for score in (ops.SOFTMAX, ops.TOPK_SOFTMAX, ops.SIGMOID, ops.SQRT_SOFTPLUS):
        yield f"route {score}", lambda t, s=score: fusedmoe.route(t, k, score=s, renormalize=True, scale=2.0)[1], [leaf(T, E)]
    bias = torch.randn(E, generator=g).to(device)
    yield "groups", lambda t: fusedmoe.route(t, k, score=ops.SIGMOID, groups=3, topk_groups=2, select_bias=bias)[1], [leaf(T, E)]
    yield "permute", lambda x: fusedmoe.permute(x, ids, E)[0], [leaf(T, H)]
    row_map = fusedmoe.permute(torch.zeros(T, H, device=device, dtype=dtype), ids, E)[1]
    yield "unpermute", lambda y, p: fusedmoe.unpermute(y, row_map, p), [leaf(T * k, H), leaf(T, k)]
    yield "grouped matmul", lambda x, w, b: fusedmoe.grouped_matmul(x, w, sizes, b), [leaf(T * k, H), leaf(E, H, I), leaf(E, I)]
    lists = [leaf(m, H) for m in (3, 0, 9)] + [leaf(H, I) for _ in range(3)]
    yield "grouped matmul of lists", lambda *t: torch.cat(HybridGmmFunction.apply(3, *t)), lists
    for act in (ops.SWIGLU, ops.GEGLU, ops.GEGLU_TANH, ops.REGLU, ops.SWIGLU_CLAMP, ops.SWIGLU_OAI, ops.SWIGLU_CLAMP_OUT):
        yield f"activation {act}", lambda h, a=act: fusedmoe.activation(h, a, ops.INTERLEAVED, 1.5, 1.0), [leaf(T, 2 * I)]
    for act in (ops.SILU, ops.GELU, ops.GELU_TANH, ops.RELU, ops.RELU2):
        yield f"activation {act}", lambda h, a=act: fusedmoe.activation(h, a), [leaf(T, I)]


def test_every_operator_against_the_specification():
    for ours, reference in zip(_operators("cuda", torch.float32), _operators("cpu", torch.float64), strict=True):
        found = []
        for _, function, leaves in (ours, reference):
            out = function(*leaves)
            found.append((out, *torch.autograd.grad(out, leaves, torch.cos(torch.arange(out.numel()).view(out.shape)).to(out))))
        for a, b in zip(*found, strict=True):
            assert rel(a, b.cuda()) < 3e-6, ours[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_list_has_the_bits_of_a_stack_wherever_its_rows_are(dtype):
    g, sizes, K, N = torch.Generator("cuda").manual_seed(5), [70, 0, 130, 1, 64], 96, 160
    normal = lambda *s: torch.randn(*s, generator=g, device="cuda").to(dtype)  # noqa: E731
    x, stored, dy = normal(sum(sizes), K), normal(len(sizes), N, K), normal(sum(sizes), N)
    leaves = [x.clone().requires_grad_(), stored.clone().requires_grad_()]
    y = GmmFunction.apply(leaves[0], leaves[1].transpose(1, 2), sizes)
    want = [y, *torch.autograd.grad(y, leaves, dy)]
    for apart in (False, True):
        pieces = [list(t.split(sizes)) for t in (x, dy)] + [list(stored)]
        xs, dys, ws = ([t.clone() for t in ts] if apart else ts for ts in pieces)
        xs, ws = ([t.detach().requires_grad_() for t in ts] for ts in (xs, ws))
        ys = HybridGmmFunction.apply(len(sizes), *xs, *(w.T for w in ws))
        grads = torch.autograd.grad(ys, (*xs, *ws), dys)
        found = torch.cat(ys), torch.cat(grads[: len(sizes)]), torch.stack(grads[len(sizes) :])
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_block(dtype):
    T, H, I, E, k = 50, 128, 64, 8, 2
    g = torch.Generator().manual_seed(4)
    shapes = [(T, H), (E, H), (E, 2 * I, H), (E, H, I), (1, 2 * I, H), (1, H, I), (1, H)]
    x, wr, *w, gate = ((torch.randn(*s, generator=g) / s[-1] ** (0.5 if i else 0)).to(dtype) for i, s in enumerate(shapes))
    how = (k, ops.SWIGLU, ops.SHARED_GATE, 0.0, 0.0, (0, 1, 0, 0, 0, 0), 0.0, 1.0)
    found = []
    for to in (lambda t: t.cuda(), lambda t: t.double()):
        a, r, s, u, sg = to(x), to(wr), [to(t) for t in w[:2]], [to(t) for t in w[2:]], [to(gate)]
        out, logits, ids, p, saved = ops.block_forward(a, r, [], [], s, u, sg, *how)
        grads = ops.block_backward(a, r, [], s, u, sg, logits, ids, p, saved, to(x.cos()), [], *how, [])
        found.append((ids, out, logits, p, *grads))
    same = (found[0][0].cpu() == found[1][0]).all(1)  # rounded logits may choose another expert
    assert same.float().mean() > 0.95
    if same.all():
        for a, b in zip(found[0][1:], found[1][1:], strict=True):
            assert rel(a, b.cuda()) < 3 * BOUND[dtype]


@pytest.mark.parametrize("sizes", [HOPPER, ODD], ids=["hopper", "odd"])
def test_operators_are_what_torch_expects(sizes):
    x, ids, p, w = layer(30, *sizes, torch.float32)
    with torch.no_grad():
        line = ops.experts_saved(x.dtype, x.device, ops.layer_sizes(w, 0, 0), sizes[3], 0, 0, 0.0, 0.0)
        out, saved = ops.experts_forward(x, ids, p, w, 0, 0, 0.0, 0.0, line)
        utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(ops.experts, (x.detach(), ids, p.detach(), [t.detach() for t in w], 0, 0, 0.0, 0.0), test_utils=utils)
        back = (x.detach(), ids, p.detach(), [t.detach() for t in w], saved, out, 0, 0, 0.0, 0.0, 15)
        torch.library.opcheck(ops.experts_backward, back, test_utils=utils)


def test_errors_are_no_worse_than_those_of_grouped_mm(capsys):
    from fusedmoe import bench
    from fusedmoe.integrations.transformers import register

    register()
    T, H, I, E, k = 4096, 2048, 768, 128, 8
    module = bench.build("qwen3_moe", H, I, E, torch.bfloat16, "cuda")
    x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.rand(T, E, device="cuda").topk(k).indices
    p = torch.rand(T, k, device="cuda").bfloat16().requires_grad_()
    dout = torch.randn(T, H, device="cuda", dtype=torch.bfloat16)
    leaves = (x, p, module.gate_up_proj, module.down_proj)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    exact = exact_experts(doubles[0], ids, doubles[1], *doubles[2:])
    wanted = (exact, *torch.autograd.grad(exact, doubles, dout.double()))
    errors = {}
    for name in ("grouped_mm", "fusedmoe"):
        module.config._experts_implementation = name
        out = module(x, ids, p)
        errors[name] = [rel(a, b) for a, b in zip((out, *torch.autograd.grad(out, leaves, dout)), wanted, strict=True)]
    with capsys.disabled():
        print("\nrelative L2 against double, out dx dp dW1 dW2:", {n: [f"{e:.2e}" for e in v] for n, v in errors.items()})
    assert all(ours <= 1.02 * theirs for ours, theirs in zip(errors["fusedmoe"], errors["grouped_mm"], strict=True))


@pytest.mark.parametrize("T", [1, 16, 4096])
def test_twenty_runs_give_the_same_bits(T):
    given = layer(T, 1024, 512, 32, 4)
    first = results(*given)
    with torch.no_grad():
        inference = fusedmoe.experts(*given)
        for _ in range(20):
            assert torch.equal(fusedmoe.experts(*given), inference)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(results(*given), first, strict=True))


@pytest.mark.parametrize("T", [6, 200])
def test_nan_stays_with_its_token(T):
    x, ids, p, w = layer(T, *HOPPER)
    clean = results(x, ids, p, w)
    x.data[T // 2] = float("nan")
    dirty = results(x, ids, p, w)
    others = torch.arange(T, device="cuda") != T // 2
    assert dirty[0][T // 2].isnan().all()
    assert all(torch.equal(a[others], b[others]) for a, b in zip(dirty[:3], clean[:3], strict=True))
    with torch.no_grad():
        assert fusedmoe.experts(x, ids, p, w)[others].isfinite().all()


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_no_tokens():
    x, ids, p, w = layer(0, *HOPPER)
    out, *grads = results(x, ids, p, w)
    assert out.shape == (0, HOPPER[0]) and all(float(t.abs().max()) == 0.0 for t in grads[2:])


def test_the_saved_state_fits_every_number_of_tokens():
    for E, k in ((300, 1), (2000, 1), (64, 3)):
        x, ids, p, w = layer(1, 64, 8, E, k)
        for T in (1, 299, 300, 301, 1999, 2003, 6007):
            many = torch.randint(E, (T, k), device="cuda")
            fusedmoe.experts(x.expand(T, -1).contiguous(), many, p.expand(T, -1).contiguous(), w)


def test_two_hundred_thousand_tokens():
    T, H, I, E, k = 200_000, 2048, 768, 128, 8  # 1.6 M rows: 3.3e9 elements in one buffer
    g = torch.Generator("cuda").manual_seed(1)
    normal = lambda *s: torch.randn(*s, device="cuda", generator=g, dtype=torch.bfloat16)  # noqa: E731
    x, dout, w1, w2 = normal(T, H), normal(T, H), normal(E, 2 * I, H) * 0.02, normal(E, H, I) * 0.02
    ids, p = fusedmoe.route(torch.randn(T, E, device="cuda", generator=g), k, renormalize=True)
    leaves = [t.requires_grad_() for t in (x, p.detach(), w1, w2)]
    out = fusedmoe.experts(x, ids, leaves[1], [w1, w2])
    dx, dp, dw1, dw2 = torch.autograd.grad(out, leaves, dout)
    some = torch.tensor([0, 1, 77_777, 131_072, T - 2, T - 1], device="cuda")
    few = [x[some].detach().double().requires_grad_(), p[some].detach().double().requires_grad_()]
    exact = exact_experts(few[0], ids[some], few[1], w1.detach().double(), w2.detach().double())
    assert rel(out[some], exact) < 6e-3
    for a, b in zip((dx[some], dp[some]), torch.autograd.grad(exact, few, dout[some].double()), strict=True):
        assert rel(a, b) < 6e-3
    for e in (0, E - 1):  # one expert's gradients, from all its rows
        t, j = (ids == e).nonzero(as_tuple=True)
        pair = [w1[e : e + 1].detach().double().requires_grad_(), w2[e : e + 1].detach().double().requires_grad_()]
        part = exact_experts(x[t].detach().double(), torch.zeros(len(t), 1, device="cuda").long(), p[t, j, None].detach().double(), *pair)
        for a, b in zip((dw1[e : e + 1], dw2[e : e + 1]), torch.autograd.grad(part, pair, dout[t].double()), strict=True):
            assert rel(a, b) < 6e-3


def test_many_experts():
    given = layer(40, 64, 8, 3000, 32)
    for a, b in zip(results(*given), specification(*given), strict=True):
        assert rel(a, b.cuda()) < 6e-3
    with pytest.raises(NotImplementedError, match="E is 65536, at most 65535"):
        ops._plan(ops.EXPERTS, torch.bfloat16, torch.device("cuda", 0), 1, 64, 64, 65536, k=1)


# ---- promises -------------------------------------------------------------------------------------------------------


def test_no_synchronisation_and_no_memory_of_our_own():
    given = layer(2000, *HOPPER)
    results(*given)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    dout = torch.randn_like(given[0])
    torch.cuda._sleep(400_000_000)  # the device is busy for a fifth of a second
    event, start = torch.cuda.Event(), time.perf_counter()
    event.record()
    for _ in range(3):
        out = fusedmoe.experts(*given)
        torch.autograd.grad(out, (given[0], *given[3]), dout)
    assert not event.query(), f"six calls returned after {time.perf_counter() - start:.3f} s, when the device had ended all work"
    torch.cuda.synchronize()
    before, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    for _ in range(5):
        results(*given)
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == before and torch.cuda.memory_reserved() == reserved and before <= free


def test_a_kept_graph_keeps_what_was_saved():
    x, ids, p, w = layer(300, *HOPPER)
    out = fusedmoe.experts(x, ids, p, w)
    dout = torch.randn_like(out)
    first, *others = (torch.autograd.grad(out, (x, *w), dout, retain_graph=keep) for keep in (True, True, False))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_a_torch_without_the_exchange_table(monkeypatch):
    given = layer(50, *HOPPER)
    want = results(*given)
    monkeypatch.setattr(ops, "hasattr", lambda *_: False, raising=False)
    was = _core.use_exchange(False)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(results(*given), want, strict=True))
    finally:
        _core.use_exchange(was)


def test_frozen_weights_get_no_gradient():
    x, ids, p, w = layer(4096, 1024, 512, 32, 4)
    for t in w:
        t.requires_grad_(False)
    fusedmoe.experts(x, ids, p, w).sum().backward()
    assert x.grad is not None and all(t.grad is None for t in w)


def test_errors():
    x, ids, p, w = layer(9, *HOPPER)
    with pytest.raises(ValueError, match=r"w\[0\] is on cpu, x on cuda:0"):
        fusedmoe.experts(x, ids, p, [w[0].detach().cpu(), w[1]])
    with pytest.raises(RuntimeError, match="FMOE_ERR_DEVICE.*w2 is on device type 1"):
        fusedmoe.experts(x, ids, p, [w[0], w[1].detach().cpu()])
    with pytest.raises(RuntimeError, match="FMOE_ERR_BACKEND.*device 99 was asked for"):
        ops._plan(ops.EXPERTS, torch.bfloat16, torch.device("cuda", 99), 1, 64, 64, 2, k=1)
    with pytest.raises(NotImplementedError, match="f64.*CPU"):
        fusedmoe.experts(x.double(), ids, p.double(), [t.double() for t in w])
    with pytest.raises(ValueError, match="FMOE_ERR_SHAPE"):
        fusedmoe.experts(x, ids[:5], p, w)
    clean = fusedmoe.experts(x, ids, p, w)
    fusedmoe.experts(x, torch.full_like(ids, 77), p, w)  # found on the device, so said by the next call
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match="an earlier call on this plan met id 77"):
        fusedmoe.experts(x, ids, p, w)
    assert torch.equal(fusedmoe.experts(x, ids, p, w), clean)


def test_what_will_run_is_told():
    text = fusedmoe.describe(torch.empty(1, 2048, device="cuda", dtype=torch.bfloat16), E=128, k=8, I=768)
    assert "cuda: device 0" in text and "products: sm" in text
    assert "cuda: loaded" in fusedmoe.info()


def test_bench(tmp_path):
    import json

    from fusedmoe import bench

    sizes = ["--H", "256", "--I", "128", "--E", "8", "--k", "2", "--T", "16,128", "--device", "cuda", "--json", str(tmp_path / "out.json")]
    assert bench.main([*sizes, "--impl", "dense,fusedmoe"]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())
    assert {(r["backend"], r["regime"]) for r in rows} >= {("fusedmoe", "graph"), ("fusedmoe", "idle"), ("dense", "sustained")}
    assert all(r["ms"] > 0 for r in rows) and all(r["kept_mb"] > 0 for r in rows if r["pass"] != "fwd" and r["backend"] == "fusedmoe")


def test_kept_memory():
    from fusedmoe.meters import kept_megabytes

    x, ids, p, w = layer(4096, 1024, 512, 32, 4)
    rows, kept = 4096 * 4, {}
    for flags in (0, ops.RECOMPUTE):
        kept[flags] = kept_megabytes(lambda: fusedmoe.experts(x, ids, p, w, 0, flags), w) * 2**20  # noqa: B023
    small = x.nbytes + ids.nbytes + p.nbytes + 20 * (rows + 64 * 32) + 2**14  # x, routing, row map
    assert kept[ops.RECOMPUTE] <= small and kept[0] <= small + (rows + 64 * 32) * 2 * 512 * 2
