# SPDX-License-Identifier: Apache-2.0
"""Any strides for every argument of every public function, forward and backward: the bits of the contiguous call.

FMOE_STRIDE_CALLS sets how many calls are drawn for each function. Where there is a CUDA device, it is drawn too; on an NPU,
tests/ascend/test_strides_npu.py runs this file.
"""

import os
from math import prod
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import nn

import fusedmoe
from fusedmoe import Activation, Flag, GmmFunction, HybridGmmFunction, Score, ops
from fusedmoe.kernels.ops.mlp.npu_fused_moe import NpuMoeFused, Qwen3NpuMoeFused

CALLS = int(os.environ.get("FMOE_STRIDE_CALLS", "60"))
DEVICES = ["npu"] if hasattr(torch, "npu") and torch.npu.is_available() else ["cpu", *["cuda"] * torch.cuda.is_available()]
MLP = "gate_proj", "up_proj", "down_proj"
DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
# No shrinking: a call has some fifty draws, and the draws of the one that failed are printed.
drawn = settings(max_examples=CALLS, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), print_blob=True)


class Pair:
    """Tensors in twos: one contiguous, one with the same values and drawn strides."""

    def __init__(self, data, device, dtype):
        self.data, self.device, self.dtype = data, device, dtype
        self.generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31), label="seed"))

    def values(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def strided(self, values, dtype, name, leaf=True, matrix=False, expand=True):
        """(contiguous, strided) of these values. A dimension may be expanded: then its values are those of its first entry.

        A matrix that lies transposed is multiplied as it lies, and sums over k in another order than its copy would: beside it stands
        a compact one that lies transposed too."""
        draw, n = lambda strategy, what: self.data.draw(strategy, label=f"{name}: {what}"), values.dim()
        values = values.to(dtype)
        if not draw(st.booleans(), "drawn"):
            expanded, order, steps, pads = [False] * n, list(range(n)), [1] * n, [0] * n
        else:
            expanded = draw(st.lists(st.sampled_from([False, False, False, True]), min_size=n, max_size=n), "expanded")
            order = draw(st.permutations(range(n)), "order, from the outermost")
            steps = draw(st.lists(st.sampled_from([1, 1, 2, 3]), min_size=n, max_size=n), "steps")
            pads = draw(st.lists(st.sampled_from([0, 0, 1, 5]), min_size=n, max_size=n), "pads")
        offset = draw(st.sampled_from([0, 0, 1, 8]), "offset")
        strides, run = [0] * n, 1
        for d in reversed(order):
            if expanded[d] and expand and values.shape[d]:
                values = values.narrow(d, 0, 1).expand_as(values)
                continue
            strides[d] = run * steps[d]
            run *= max(1, (values.shape[d] + pads[d]) * steps[d])
        for d in range(n):
            if values.shape[d] == 1:
                strides[d] = draw(st.sampled_from([0, 1, 7, 1000, strides[d]]), f"stride of dimension {d}, which has one entry")
        last = sum((size - 1) * stride for size, stride in zip(values.shape, strides)) if prod(values.shape) else 0
        memory = torch.full((offset + last + 1,), -99 if not dtype.is_floating_point else float("nan"), dtype=dtype)
        plain = values.clone(memory_format=torch.contiguous_format)
        if plain.numel():
            index = torch.zeros(values.shape, dtype=torch.int64)
            for d, (size, stride) in enumerate(zip(values.shape, strides)):
                index += (torch.arange(size) * stride).view(*[-1 if i == d else 1 for i in range(n)])
            memory[offset + index] = plain
        odd = memory.to(self.device).as_strided(values.shape, strides, offset)
        plain = plain.to(self.device)
        if matrix and any(n > 1 and stride == 1 for n, stride in zip(values.shape[-2:-1], strides[-2:-1])) and strides[-1] != 1:
            sizes = sorted((stride, n) for n, stride in zip(values.shape, strides) if n > 1)
            if sizes[0][0] and all(a * n <= b for (a, n), (b, _) in zip(sizes, sizes[1:])) and values.shape[-1] > 1:
                plain = plain.mT.contiguous().mT
        assert torch.equal(plain.cpu(), odd.cpu())
        return tuple(t.detach().requires_grad_(leaf and dtype.is_floating_point) for t in (plain, odd))

    def tensor(self, name, *shape, dtype=None, leaf=True):
        return self.strided(self.values(*shape), dtype or self.dtype, name, leaf)

    def matrices(self, name, *shape, dtype=None):
        return self.strided(self.values(*shape), dtype or self.dtype, name, matrix=True)

    def integers(self, name, high, *shape):
        dtype = self.data.draw(st.sampled_from([torch.int64, torch.int32]), label=f"{name}: dtype")
        return self.strided(torch.randint(0, high, shape, generator=self.generator), dtype, name)

    def compare(self, function, *pairs):
        """function, which gives a tensor or a tuple, on both sides: results and gradients, bit for bit."""
        found = []
        douts = None
        for side in (0, 1):
            results = function(*[pair[side] for pair in pairs])
            results = [t for t in (results if isinstance(results, tuple) else (results,)) if isinstance(t, torch.Tensor)]
            smooth = [t for t in results if t.requires_grad]
            douts = douts or [self.tensor(f"gradient of result {i}", *t.shape, dtype=t.dtype, leaf=False) for i, t in enumerate(smooth)]
            leaves = [pair[side] for pair in pairs if pair[side].requires_grad]
            grads = torch.autograd.grad(smooth, leaves, [d[side] for d in douts], allow_unused=True) if smooth else ()
            found.append([*results, *grads])
        for a, b in zip(*found, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.shape == b.shape and a.dtype == b.dtype
                a, b = a.detach().cpu(), b.detach().cpu()
                assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)), (a - b).abs().max()


def begin(data, device):
    """A Pair and small sizes T, H, I, E, k, ones and zeros among them."""
    size = lambda *of: st.sampled_from(of)  # noqa: E731
    dtype = data.draw(st.sampled_from(DTYPES if device == "cpu" else DTYPES[:3]), label="dtype")
    values = size(0, 1, 3, 9), size(1, 5, 16), size(1, 4, 8), size(1, 2, 5), size(1, 2, 3)
    sizes = [data.draw(value, label=letter) for letter, value in zip("THIEk", values)]
    return Pair(data, device, dtype), *sizes


def routing_weights(pair, name, *shape):
    dtype = torch.float64 if pair.dtype == torch.float64 else pair.data.draw(st.sampled_from([torch.float32, pair.dtype]), label="p: dtype")
    return pair.tensor(name, *shape, dtype=dtype)


def parametrized(test):
    return pytest.mark.parametrize("device", DEVICES)(drawn(given(data=st.data())(test)))


@parametrized
def test_experts(device, data):
    pair, T, H, I, E, k = begin(data, device)
    act = data.draw(st.sampled_from(list(Activation)), label="act")
    form = data.draw(st.sampled_from([Flag(0), Flag.TRANSPOSED, Flag.BIAS, Flag.BIAS | Flag.TRANSPOSED, Flag.LIST]), label="form")
    rank = data.draw(st.sampled_from([0, 0, 1, 4]), label="rank")
    gated = act < ops.SILU
    C = 2 * I if gated else I
    if form & Flag.LIST:
        w = [pair.matrices(f"w[{i}]", *((H, I) if i >= (1 + gated) * E else (I, H))) for i in range((2 + gated) * E)]
    else:
        shapes = [(E, H, C), (E, I, H)] if form & Flag.TRANSPOSED else [(E, C, H), (E, H, I)]
        w = [pair.matrices(f"w[{i}]", *shape) for i, shape in enumerate(shapes + ([(E, C), (E, H)] if form & Flag.BIAS else []))]
    factors = torch.float32 if pair.dtype != torch.float64 and data.draw(st.booleans(), label="float32 factors") else pair.dtype
    shapes = [(E, rank, H), (E, C, rank), (E, rank, I), (E, H, rank)] if rank else []
    lora = [pair.matrices(f"lora[{i // 2}][{i % 2}]", *shape, dtype=factors) for i, shape in enumerate(shapes)]

    def run(x, ids, p, *rest):
        w, f = rest[: len(rest) - len(lora)], rest[len(rest) - len(lora) :]
        return fusedmoe.experts(x, ids, p, w, act, form, 1.5, 3.0, [(*f[:2], 0.5), f[2:]] if f else ())

    pair.compare(run, pair.tensor("x", T, H), pair.integers("ids", E, T, k), routing_weights(pair, "p", T, k), *w, *lora)


@parametrized
def test_block(device, data):
    pair, T, H, I, E, k = begin(data, device)
    k = min(k, E)
    form = data.draw(st.sampled_from([Flag(0), Flag.TRANSPOSED, Flag.BIAS]), label="form")
    shapes = [(E, H, 2 * I), (E, I, H)] if form & Flag.TRANSPOSED else [(E, 2 * I, H), (E, H, I)]
    w = [pair.matrices(f"w[{i}]", *shape) for i, shape in enumerate(shapes + ([(E, 2 * I), (E, H)] if form & Flag.BIAS else []))]
    shapes = [(1, 6, H), (1, H, 3)] + ([(1, 6), (1, H)] if form & Flag.BIAS else [])
    w += [pair.matrices(f"shared[{i}]", *shape) for i, shape in enumerate(shapes)]
    rest = [pair.tensor("b_router", E), pair.tensor("select_bias", E, dtype=torch.float32, leaf=False), pair.matrices("shared_gate", 1, H)]

    def run(x, w_router, b_router, select_bias, gate, *w):
        w, shared = w[: len(w) // 2], w[len(w) // 2 :]
        return fusedmoe.block(x, w_router, w, k, flags=form, shared=shared, shared_gate=gate, b_router=b_router, select_bias=select_bias)

    pair.compare(run, pair.tensor("x", T, H), pair.matrices("w_router", E, H), *rest, *w)


@parametrized
def test_route(device, data):
    pair, T, _, _, E, k = begin(data, device)
    score = data.draw(st.sampled_from(list(Score)), label="score")
    bias = [pair.tensor("select_bias", E, dtype=torch.float32, leaf=False)] * data.draw(st.booleans(), label="biased")
    run = lambda logits, *b: fusedmoe.route(logits, min(k, E), score=score, renormalize=True, select_bias=b[0] if b else None)  # noqa: E731
    pair.compare(run, pair.tensor("logits", T, E), *bias)
    rule = [int(score), 0, 0, 0, 0, 0]
    logits, ids = pair.tensor("logits", T, E, leaf=False), pair.integers("ids", E, T, min(k, E))
    pair.compare(lambda logits, ids: ops.route_replay(logits, ids, rule, 0.0, 1.0), logits, ids)


@parametrized
def test_permute_and_unpermute(device, data):
    pair, T, H, _, E, k = begin(data, device)
    pair.compare(lambda x, ids: fusedmoe.permute(x, ids, E), pair.tensor("x", T, H), pair.integers("ids", E, T, k))
    row_map = pair.strided(torch.randperm(T * k, generator=pair.generator), torch.int32, "row_map", expand=False)
    pair.compare(fusedmoe.unpermute, pair.tensor("y", T * k, H), row_map, routing_weights(pair, "p", T, k))


@parametrized
def test_activation(device, data):
    pair, T, _, I, _, _ = begin(data, device)
    act = data.draw(st.sampled_from(list(Activation)), label="act")
    pair.compare(lambda h: fusedmoe.activation(h, act, 0, 1.5, 3.0), pair.tensor("h", T, 2 * I if act < ops.SILU else I))


@parametrized
def test_grouped_matmul(device, data):
    pair, _, K, N, E, _ = begin(data, device)
    sizes = pair.integers("group_list", 4, E)
    counts = sizes[0].tolist()
    x, w = pair.tensor("x", sum(counts) + 2, K), pair.matrices("weight", E, K, N)
    if counts == sizes[1].tolist():
        pair.compare(GmmFunction.apply, x, w, sizes)
        pair.compare(fusedmoe.grouped_matmul, x, w, sizes, pair.tensor("bias", E, N))
        rows = [pair.tensor(f"args[{i}]", n, K) for i, n in enumerate(counts)]
        weights = [pair.matrices(f"args[{i + E}]", K, N) for i in range(E)]
        pair.compare(lambda *t: HybridGmmFunction.apply(E, *t), *rows, *weights)


@parametrized
def test_forwards_of_modules(device, data):
    """NpuMoeFused and Qwen3NpuMoeFused, on parameters and inputs with drawn strides."""
    pair, T, H, I, E, k = begin(data, device)
    k = min(k, E)
    stacked = lambda up, down: SimpleNamespace(gate_up_proj=up, down_proj=down, act_fn=nn.SiLU())  # noqa: E731
    x, ids, p = pair.tensor("hidden_states", 1, T, H), pair.integers("ids", E, T, k), pair.tensor("weights", T, k)
    up, down = pair.matrices("gate_up_proj", E, H, 2 * I), pair.matrices("down_proj", E, I, H)
    pair.compare(lambda x, ids, p, *w: NpuMoeFused.npu_moe_experts_forward(stacked(*w), x, p, ids), x, ids, p, up, down)
    block = lambda logits, experts, **more: SimpleNamespace(gate=lambda _: logits, top_k=k, experts=experts, **more)  # noqa: E731
    logits = pair.tensor("logits", T, E)
    sparse = NpuMoeFused.npu_moe_sparse_block_forward
    pair.compare(lambda x, logits, *w: sparse(block(logits, stacked(*w)), x), x, logits, up, down)
    linears = [pair.matrices(f"{name}[{e}]", *shape) for e in range(E) for name, shape in zip(MLP, ((I, H), (I, H), (H, I)))]

    def separate(x, logits, *w):
        experts = nn.ModuleList(nn.ModuleDict({n: nn.Linear(1, 1, bias=False) for n in MLP}) for _ in range(E))
        for i, t in enumerate(w):
            experts[i // 3][MLP[i % 3]]._parameters["weight"] = t
        experts[0].act_fn = nn.SiLU()
        return Qwen3NpuMoeFused.qwen3moe_sparse_moe_block_forward(block(logits, experts, norm_topk_prob=True), x)[0]

    pair.compare(separate, x, logits, *linears)
    v5 = pair.matrices("gate_up_proj of v5", E, 2 * I, H), pair.matrices("down_proj of v5", E, H, I)
    flat = pair.tensor("hidden_states of v5", T, H)
    pair.compare(lambda x, ids, p, *w: NpuMoeFused.npu_moe_experts_v5_forward(stacked(*w), x, ids, p), flat, ids, p, *v5)


def test_negated_views_are_not_read_as_they_lie():
    """The imaginary part of a conjugate is a view with a sign that its memory does not have."""
    x = torch.complex(torch.randn(5, 8), torch.randn(5, 8)).conj().imag
    ids, w = torch.randint(3, (5, 2)), [torch.randn(3, 8, 8), torch.randn(3, 8, 4)]
    assert x.is_neg()
    for p in (torch.rand(5, 2), torch.complex(torch.rand(5, 2), torch.rand(5, 2)).conj().imag):
        assert torch.equal(fusedmoe.experts(x, ids, p, w), fusedmoe.experts(x.clone(), ids, p.clone(), w))
        assert torch.equal(fusedmoe.activation(x), fusedmoe.activation(x.clone()))
