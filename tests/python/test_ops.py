# SPDX-License-Identifier: Apache-2.0
"""The operators: schema, fakes and tracing (opcheck), gradients in double (gradcheck), errors, both ways tensors cross."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.library import opcheck

import fusedmoe
from fusedmoe import GmmFunction, HybridGmmFunction, QuantTensor, _core, ops
from fusedmoe.quant import experts as quant_experts
from fusedmoe.quant import matmul, operators

T, H, I, E, k = 5, 6, 4, 3, 2
RULE = (0, 1, 0, 0, 0, 0)


def layer(dtype=torch.float32, act=ops.SWIGLU, T=T, seed=0, **kw):
    g = torch.Generator().manual_seed(seed)
    n = 2 * I if act < ops.SILU else I
    r = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64).to(dtype)  # noqa: E731
    x, w1, w2, p = r(T, H), r(E, n, H), r(E, H, I), r(T, k).abs()
    ids = torch.randint(0, E, (T, k), generator=g)
    return x, ids, p, w1, w2


def reference(x, ids, p, w1, w2, gate=torch.nn.functional.silu, b1=None, b2=None):
    """The layer as a loop over slots, in plain torch."""
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            if not 0 <= e < w1.shape[0]:
                continue
            g, u = (w1[e] @ x[t] + (0 if b1 is None else b1[e])).chunk(2)
            y = w2[e] @ (gate(g) * u) + (0 if b2 is None else b2[e])
            out = out.index_add(0, torch.tensor([t]), (p[t, j] * y)[None])
    return out


def all_ops():
    x, ids, p, w1, w2 = layer()
    logits, wr, h = torch.randn(T, E), torch.randn(E, H), torch.randn(T, 2 * I)
    plain = (0, 0, 0.0, 0.0)
    line = ops.experts_saved(x.dtype, x.device, ops.layer_sizes([w1, w2], *plain[:2]), k, *plain)
    _, saved = ops.experts_forward(x, ids, p, [w1, w2], *plain, line)
    xp, row_map, counts = ops.permute(x, ids, E, ops.SKIP_E)
    w = torch.randn(E, H, 4)
    y = ops.grouped_matmul(xp, w, [], counts, 0)
    lists = [xp[:3], xp[3:]], [w[0], w[1]]
    block = (x, wr, [], [], [w1, w2], [], [], k, *plain, RULE, 0.0, 1.0)
    out, lg, ids2, wt, bsaved = ops.block_forward(*block)
    shared = [torch.randn(1, 2 * I, H), torch.randn(1, H, I)]
    yield ops.experts, (x, ids, p, [w1, w2], *plain)
    yield ops.experts, (x, ids, p, [*w1[:, :I], *w1[:, I:], *w2], 0, ops.LIST, 0.0, 0.0)
    yield ops.experts_forward, (x, ids, p, [w1, w2], *plain, line)
    yield ops.experts_backward, (x, ids, p, [w1, w2], saved, x, *plain, 15)
    coded = [QuantTensor.from_weights(w, "int8") for w in (w1, w2)]  # which has a second scale
    codes, parts, about, zeros = quant_experts.split(coded, *plain[:2])
    given = x, ids, p, codes, parts, [*ops.layer_sizes(coded, *plain[:2], H), *about], zeros
    line = operators.experts_coded_saved(x.dtype, x.device, tuple(given[5]), k, *plain)
    _, csaved = operators.experts_coded_forward(*given, *plain, line)
    yield operators.experts_coded, (*given, *plain)
    yield operators.experts_coded_forward, (*given, *plain, line)
    yield operators.experts_coded_backward, (*given, csaved, x, *plain, [1, 1, 0, 0])
    yield ops.route, (logits, [], k, RULE, 0.0, 1.0)
    yield ops.route, (logits, [torch.randn(E)], k, RULE, 0.0, 1.0)
    yield ops.route_replay, (logits, ids, RULE, 0.0, 1.0)
    yield ops.route_backward, (logits, ids, p, RULE, 0.0, 1.0)
    yield ops.permute, (x, ids, E, ops.SKIP_E)
    yield ops.unpermute, (xp, row_map, [p], k)
    yield ops.unpermute, (xp, row_map, [], k)
    yield ops.unpermute_backward, (xp, row_map, [p], x, 3)
    yield ops.grouped_matmul, (xp, w, [], counts, 0)
    yield ops.grouped_matmul, (xp, w.transpose(1, 2).contiguous().transpose(1, 2), [torch.randn(E, 4)], counts.cumsum(0), 1)
    yield ops.grouped_matmul_backward, (xp, w, counts, y, 7, 0)
    yield ops.grouped_matmul_list, (*lists, [])
    yield ops.grouped_matmul_list_backward, (*lists, [y[:3], y[3:]], 3)
    grid = torch.rand(E, 1, 1)
    turned = torch.randint(0, 255, (E, 4, H), dtype=torch.uint8), [grid, grid.half()], [E, H, 4, 2, 0, 0, 0, 0, 1, 0], 0.0
    yield matmul.grouped_matmul_coded, (xp, *turned, [torch.randn(E, 4)], counts.cumsum(0), 1)
    yield matmul.grouped_matmul_coded_backward, (y, *turned, counts, 5, 0)
    yield ops.activation, (h, *plain)
    yield ops.activation_backward, (h, torch.randn(T, I), *plain)
    yield ops.block_forward, block
    yield ops.block_forward, (x, wr, [torch.randn(E)], [torch.randn(E)], [w1, w2], shared, [torch.randn(1, H)], k, 0,
                              ops.SHARED_GATE, 0.0, 0.0, RULE, 0.0, 1.0)  # fmt: skip
    yield ops.block_backward, (x, wr, [], [w1, w2], [], [], lg, ids2, wt, bsaved, out, [], k, *plain, RULE, 0.0, 1.0, [])


OPS = list(all_ops())


@pytest.mark.parametrize("op, args", OPS, ids=[f"{op.name().split('::')[1]}-{i}" for i, (op, _) in enumerate(OPS)])
def test_opcheck(op, args):
    opcheck(op, args)


def test_every_operator_was_checked():
    names = {n.split("::")[1] for n in torch._C._dispatch_get_all_op_names() if n.startswith("fusedmoe::")}
    assert names == {op.name().split("::")[1] for op, _ in OPS}


# ---- gradients, in double: f64 tensors run the specification itself ------------------------------------------------------

ACTS = ["SWIGLU", "GEGLU", "GEGLU_TANH", "REGLU", "SWIGLU_CLAMP", "SWIGLU_OAI", "SWIGLU_CLAMP_OUT", "SILU", "GELU", "GELU_TANH",
        "RELU", "RELU2"]  # fmt: skip


@pytest.mark.parametrize("act", ACTS)
def test_gradcheck_experts(act):
    code = getattr(ops, act)
    x, ids, p, w1, w2 = (t.requires_grad_() if t.is_floating_point() else t for t in layer(torch.float64, code))
    assert gradcheck(lambda x, p, w1, w2: fusedmoe.experts(x, ids, p, [w1, w2], code, 0, 1.3, 2.0), (x, p, w1, w2))


@pytest.mark.parametrize("flags", [ops.BIAS, ops.BIAS | ops.INTERLEAVED | ops.TRANSPOSED, ops.RECOMPUTE, ops.SKIP_E, ops.SKIP_NEG1])
def test_gradcheck_flags(flags):
    x, ids, p, w1, w2 = layer(torch.float64)
    if flags & ops.TRANSPOSED:
        w1, w2 = w1.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
    if flags & ops.SKIP_E:
        ids[1, 0] = ids[2, 0] = ids[2, 1] = E
    if flags & ops.SKIP_NEG1:
        ids[0, 1] = -1
    w = [w1, w2] + ([torch.randn(E, 2 * I).double(), torch.randn(E, H).double()] if flags & ops.BIAS else [])
    inputs = [t.requires_grad_() for t in (x, p, *w)]
    assert gradcheck(lambda x, p, *w: fusedmoe.experts(x, ids, p, w, 0, flags), inputs)


def test_gradcheck_list_form_and_its_agreement():
    x, ids, p, w1, w2 = layer(torch.float64)
    w = [t.clone().requires_grad_() for t in (*w1[:, :I], *w1[:, I:], *w2)]
    assert torch.equal(fusedmoe.experts(x, ids, p, w, 0, ops.LIST), fusedmoe.experts(x, ids, p, [w1, w2]))
    assert gradcheck(lambda x, p, *w: fusedmoe.experts(x, ids, p, w, 0, ops.LIST), (x.requires_grad_(), p.requires_grad_(), *w))


@pytest.mark.parametrize("score", range(4))
@pytest.mark.parametrize("renormalize", [False, True])
def test_gradcheck_route(score, renormalize):
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    ids, weights = fusedmoe.route(logits, 3, score=score, renormalize=renormalize, scale=2.5)
    assert gradcheck(lambda z: fusedmoe.route(z, 3, score=score, renormalize=renormalize, scale=2.5)[1], (logits,))
    if score == ops.SOFTMAX:
        want, order = logits.softmax(-1).topk(3)
        want = want / want.sum(-1, keepdim=True) if renormalize else want
        assert torch.equal(ids, order) and torch.allclose(weights, 2.5 * want)


@pytest.mark.parametrize("full", [False, True])
def test_gradcheck_block(full):
    x, _, _, w1, w2 = layer(torch.float64)
    r = lambda *s: torch.randn(*s, dtype=torch.float64)  # noqa: E731
    tensors = [x, r(E, H), w1, w2] + ([r(1, 2 * I, H), r(1, H, I), r(1, H), r(E)] if full else [])

    def run(x, w_router, w1, w2, s1=None, s2=None, gate=None, bias=None):
        more = dict(shared=[s1, s2], shared_gate=gate, b_router=bias, select_bias=torch.tensor([0.3, -0.2, 0.1])) if full else {}
        return fusedmoe.block(x, w_router, [w1, w2], k, score=ops.SIGMOID, renormalize=True, scale=1.5, **more)

    for outputs in (slice(0, 2), slice(0, 1), slice(1, 2)):  # out and logits, each of them alone
        assert gradcheck(lambda *t, o=outputs: run(*t)[o], [t.requires_grad_() for t in tensors])
    out, logits, ids, p = run(*tensors)
    want, again = fusedmoe.route(logits, k, score=ops.SIGMOID, renormalize=True, scale=1.5), fusedmoe.experts(x, ids, p, [w1, w2])
    assert full or (torch.equal(ids, want[0]) and torch.equal(p, want[1]) and torch.equal(out, again))


def test_gradcheck_permute_unpermute_activation():
    x, ids, p, *_ = layer(torch.float64)
    ids[1, 1] = E

    def there_and_back(x, p):
        rows, row_map, counts = fusedmoe.permute(x, ids, E)
        assert int(counts.sum()) == T * k - 1
        return fusedmoe.unpermute(rows, row_map, p)

    assert gradcheck(there_and_back, (x.requires_grad_(), p.requires_grad_()))
    h = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda h: fusedmoe.activation(h, ops.SWIGLU_OAI, ops.INTERLEAVED), (h,))


def test_gradcheck_gmm():
    r = lambda *s: torch.randn(*s, dtype=torch.float64, requires_grad=True)  # noqa: E731
    x, w = r(7, 4), r(3, 4, 5)
    for sizes in (torch.tensor([2, 0, 5]), [7, 0, 0]):
        assert gradcheck(lambda x, w: GmmFunction.apply(x, w, sizes), (x, w))  # noqa: B023
    assert gradcheck(lambda x, w: GmmFunction.apply(x, w.transpose(1, 2), [1, 5, 1]), (x, r(3, 5, 4)))
    assert gradcheck(lambda x, w, b: fusedmoe.grouped_matmul(x, w, [1, 5, 1], b), (x, w, r(3, 5)))
    assert gradcheck(lambda *t: HybridGmmFunction.apply(3, *t), (r(2, 4), r(0, 4), r(3, 4), r(4, 5), r(4, 5), r(4, 5)))
    assert gradcheck(lambda *t: HybridGmmFunction.apply(2, *t), (r(2, 4), r(3, 2), r(4, 5), r(2, 7)))  # shapes may differ


# ---- against plain torch, on drawn shapes ----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 40), st.integers(1, 70), st.integers(1, 40), st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**20),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.booleans(),
)  # fmt: skip
def test_experts_on_drawn_shapes(T, H, I, E, k, seed, dtype, sentinels):
    g = torch.Generator().manual_seed(seed)
    r = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64).to(dtype).requires_grad_()  # noqa: E731
    x, w1, w2 = r(T, H), r(E, 2 * I, H), r(E, H, I)
    p = r(T, k).detach().abs().requires_grad_()  # with signs, duplicates of an expert can cancel, and with them all digits
    ids = torch.randint(0, E + sentinels, (T, k), generator=g)
    dout = torch.randn(T, H, generator=g, dtype=torch.float64).to(dtype)
    out = fusedmoe.experts(x, ids, p, [w1, w2], 0, ops.SKIP_E)
    grads = torch.autograd.grad(out, (x, p, w1, w2), dout)
    exact = [t.detach().double().requires_grad_() for t in (x, p, w1, w2)]
    want = fusedmoe.experts(exact[0], ids, exact[1], exact[2:], 0, ops.SKIP_E)
    wants = torch.autograd.grad(want, exact, dout.double())
    bound = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for a, b in zip((out, *grads), (want, *wants), strict=True):
        assert a.shape == b.shape and a.isfinite().all()
        assert (a.double() - b).norm().item() <= bound * b.norm().item() + 1e-6


def test_specification_is_the_loop():
    x, ids, p, w1, w2 = layer(torch.float64)
    assert torch.allclose(fusedmoe.experts(x, ids, p, [w1, w2]), reference(x, ids, p, w1, w2), 1e-12, 1e-12)


# ---- how tensors cross, and what errors look like ------------------------------------------------------------------------


def test_without_the_exchange_table():
    x, ids, p, w1, w2 = layer()
    want = fusedmoe.experts(x, ids, p, [w1, w2])
    was = _core.use_exchange(False)
    try:
        assert torch.equal(fusedmoe.experts(x, ids, p, [w1, w2]), want)
        listed = fusedmoe.experts(x, ids, p, [*w1[:, :I], *w1[:, I:], *w2], 0, ops.LIST)
        with pytest.raises(TypeError, match="expected a tensor"):
            _core.run(_core.ACTIVATION_FORWARD, 1, 0, None, None, "no", "tensor")
    finally:
        _core.use_exchange(was)
    assert torch.equal(listed, want)


def test_layouts_are_made_to_fit():
    """Ids of any integer type and layout, rows with any stride, transposed weights: what the library reads is made in _core."""
    x, ids, p, w1, w2 = layer()
    want = fusedmoe.experts(x, ids, p, [w1, w2])
    turned = lambda t: t.t().contiguous().t()  # noqa: E731
    was = _core.use_exchange(True)
    try:
        for exchange in (True, False):
            _core.use_exchange(exchange)
            for other in (ids.int(), ids.short(), ids.to(torch.uint8), turned(ids), turned(ids.to(torch.int8))):
                assert torch.equal(fusedmoe.experts(turned(x), other, turned(p), [w1, w2]), want)
            stacks = [t.transpose(1, 2).contiguous() for t in (w1, w2)]
            assert torch.allclose(fusedmoe.experts(x, ids, p, stacks, 0, ops.TRANSPOSED), want, 1e-5, 1e-6)
            empty = turned(torch.randn(4, 6))[:0]
            assert fusedmoe.experts(empty, turned(ids)[:0], turned(p)[:0], [w1, w2]).shape == (0, H)
    finally:
        _core.use_exchange(was)
    plan = ops._experts_plan(x, ids, [w1, w2], 0, 0, 0.0, 0.0)
    run = lambda flags, w: _core.run(_core.EXPERTS_FORWARD, plan, flags, None, T, x, ids, p, w, torch.empty_like(x), *3 * [None])  # noqa: E731
    run(0, [w1, w2])
    with pytest.raises(ValueError, match="fewer weights"):
        run(ops.LORA1, [w1])
    with pytest.raises(TypeError, match="list of tensors"):
        run(0, w1)
    with pytest.raises(ValueError, match="w2 is NULL"):
        run(0, [w1])


def test_no_functorch_is_said():
    x, ids, p, w1, w2 = layer()
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: fusedmoe.experts(x, ids, p, [w1, w2]).sum())(x)


def test_errors_are_exceptions_with_both_numbers():
    x, ids, p, w1, w2 = layer()
    with pytest.raises(IndexError, match="FMOE_ERR_INDEX.*9"):
        fusedmoe.experts(x, torch.full_like(ids, 9), p, [w1, w2])
    with pytest.raises(ValueError, match=r"w\[0\] is \[3, 8, 6\].*x's H = 4"):
        fusedmoe.experts(x[:, :4].contiguous(), ids, p, [w1, w2])
    with pytest.raises(TypeError, match="int8"):
        fusedmoe.experts(x, ids, p, [w1.to(torch.int8), w2.to(torch.int8)])
    for wrong in (torch.float32, torch.bool):
        with pytest.raises(TypeError, match=f"ids is {wrong}, expected integers"):
            fusedmoe.experts(x, ids.to(wrong), p, [w1, w2])
    for wrong in (ids[:, 0], ids[:, :, None], ids[0, 0]):
        with pytest.raises(ValueError, match=re.escape(f"ids is {list(wrong.shape)}, expected [T, k]")):
            fusedmoe.experts(x, wrong, p, [w1, w2])
    assert torch.equal(fusedmoe.experts(x, ids.to(torch.uint8), p, [w1, w2]), fusedmoe.experts(x, ids, p, [w1, w2]))
    with pytest.raises(RuntimeError, match="FMOE_ERR_HANDLE"):
        _core.describe(1 << 40)
    with pytest.raises(RuntimeError, match="FMOE_ERR_HANDLE"):
        _core.run(_core.ACTIVATION_FORWARD, 12345 << 20, 0, None, None, x, x)
    with pytest.raises(TypeError, match="slots"):
        _core.run(_core.ACTIVATION_FORWARD, 1, 0, None, None)
    with pytest.raises(ValueError, match="no operation"):
        _core.run(99, 1, 0, None, None)
    with pytest.raises((ValueError, IndexError), match="FMOE_ERR"):
        GmmFunction.apply(torch.randn(3, 4), torch.randn(2, 4, 4), [9, 9])
    square = [torch.randn(4, 4) for _ in range(2)]
    with pytest.raises(ValueError, match="a list of 1 tensors beside one of 2"):  # and not the next argument's in its place
        ops.grouped_matmul_list_backward(square, square[:1], square, 1)
    with pytest.raises(ValueError, match="a list of 1 tensors beside one of 2"):
        ops.grouped_matmul_list(square, square[:1], [])


def test_no_second_derivative_is_said():
    x, ids, p, w1, w2 = layer()
    x.requires_grad_()
    out = fusedmoe.experts(x, ids, p, [w1, w2])
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_the_machine():
    assert "cpu" in fusedmoe.info() and fusedmoe.cpu_isa()
    text = fusedmoe.describe(torch.randn(1, 8), E=4, k=2, I=8)
    assert "f32" in text
    fusedmoe.set_max_isa("c")
    try:
        x, ids, p, w1, w2 = layer()
        low = fusedmoe.experts(x, ids, p, [w1, w2])
        assert fusedmoe.cpu_isa() == "c"
    finally:
        fusedmoe.set_max_isa(None)
    assert torch.allclose(low, fusedmoe.experts(x, ids, p, [w1, w2]), 1e-5, 1e-5)
    with pytest.raises(ValueError, match="FMOE_ERR_ARG"):
        fusedmoe.set_max_isa("nonsense")


@pytest.mark.parametrize("group_score", [0, 1])
def test_groups_of_experts_are_chosen_as_the_docstring_says(group_score):
    logits = torch.randn(200, 12, generator=torch.Generator().manual_seed(2))
    scores = logits.softmax(-1).view(200, 4, 3)
    by_sum, best = scores.topk(2, -1).values.sum(-1), scores.amax(-1)
    assert (by_sum.argmax(-1) != best.argmax(-1)).any()
    ids, _ = fusedmoe.route(logits, 2, groups=4, topk_groups=1, group_score=group_score)
    assert torch.equal(ids[:, 0] // 3, (best if group_score else by_sum).argmax(-1))


def test_negated_views_are_what_they_say():
    """A view of a tensor whose memory has the other sign, as the imaginary part of a conjugate is."""
    g = torch.Generator().manual_seed(6)
    turn = lambda t: torch._neg_view(-t.detach())  # noqa: E731
    x, ids, p = torch.randn(4, 8, generator=g), torch.randint(3, (4, 2), generator=g), torch.rand(4, 2, generator=g)
    w1, w2, a, b = (torch.randn(3, *s, generator=g) for s in ((10, 8), (8, 5), (2, 8), (10, 2)))
    want = fusedmoe.experts(x, ids, p, [w1, w2], lora=[(a, b), None])
    for w, *factors in ([turn(w1), w2], a, b), ([w1, turn(w2)], a, b), ([w1, w2], turn(a), b), ([w1, w2], a, turn(b)):
        assert torch.equal(fusedmoe.experts(x, ids, p, w, lora=[factors, None]), want)
    leaf, dout = x.clone().requires_grad_(), torch.randn(4, 8, generator=g)
    out = fusedmoe.experts(leaf, ids, p, [w1, w2])
    one, two = (torch.autograd.grad(out, leaf, d, retain_graph=True)[0] for d in (dout, turn(dout)))
    assert torch.equal(one, two)
    bias, logits = torch.randn(8, generator=g), x.clone().requires_grad_()
    got, wanted = fusedmoe.route(logits, 2, select_bias=turn(bias)), fusedmoe.route(logits, 2, select_bias=bias)
    assert torch.equal(got[0], wanted[0])
    d = torch.rand(4, 2, generator=g)
    one, two = (torch.autograd.grad(got[1], logits, t, retain_graph=True)[0] for t in (d, turn(d)))
    assert torch.equal(one, two)
    quantised = fusedmoe.quant.QuantTensor.from_weights(w1, "int8")
    assert torch.equal(fusedmoe.quant.QuantTensor.from_weights(turn(w1), "int8").dequantize(), quantised.dequantize())
    assert torch.equal(quantised.map(lambda t: turn(t) if t.is_floating_point() else t).dequantize(), quantised.dequantize())


def test_numbers_of_other_kinds_are_numbers():
    """numpy's integers and floats, and tensors of one, as torch's own functions take them."""
    x, logits, w = torch.randn(5, 8), torch.randn(5, 4), [torch.randn(4, 12, 8), torch.randn(4, 8, 6)]
    ids, p = fusedmoe.route(logits, 2, scale=2.0)
    for k, scale in ((np.int64(2), np.float32(2)), (torch.tensor(2), torch.tensor(2.0))):
        assert all(map(torch.equal, fusedmoe.route(logits, k, scale=scale), (ids, p)))
    want = fusedmoe.experts(x, ids, p, w, act="swiglu_oai", alpha=1.5, limit=7.0)
    for alpha in (np.float32(1.5), np.float64(1.5), np.array(1.5), torch.tensor(1.5)):
        assert torch.equal(fusedmoe.experts(x, ids, p, w, act="swiglu_oai", alpha=alpha, limit=np.int32(7)), want)
    for name, alpha in {"'1.5'": "1.5", "None": None, "1j": 1j, r"tensor\(\[0., 0.\]\)": torch.zeros(2)}.items():
        with pytest.raises(TypeError, match=f"experts: alpha is {name}, expected a number"):
            fusedmoe.experts(x, ids, p, w, act="swiglu_oai", alpha=alpha, limit=7.0)
    for k in (2.0, "2"):
        with pytest.raises(TypeError, match="route: k is .*, expected an integer"):
            fusedmoe.route(logits, k)
