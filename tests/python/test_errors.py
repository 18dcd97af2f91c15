# SPDX-License-Identifier: Apache-2.0
"""What Python says of wrong arguments: the argument by its Python name, and both values. Nothing is computed from nonsense."""

import inspect

import pytest
import torch

import fusedmoe
from fusedmoe import Activation, Flag, GmmFunction, HybridGmmFunction, Score, ops

T, H, I, E, K = 6, 8, 16, 4, 2
G = torch.Generator().manual_seed(0)
X, W1, W2 = torch.randn(T, H, generator=G), torch.randn(E, 2 * I, H, generator=G), torch.randn(E, H, I, generator=G)
IDS, P = torch.randint(E, (T, K), generator=G), torch.rand(T, K, generator=G)
ROUTER = torch.randn(E, H, generator=G)
META = torch.device("meta")
LORA = torch.randn(E, 2, H, generator=G), torch.randn(E, 2 * I, 2, generator=G)


def experts(x=X, ids=IDS, p=P, w=(W1, W2), *rest, **more):
    return fusedmoe.experts(x, ids, p, list(w) if isinstance(w, tuple) else w, *rest, **more)


def gmm(sizes):
    return fusedmoe.grouped_matmul(X, W1.mT, sizes)


CASES = {
    "numpy x": (lambda: experts(x=X.numpy()), TypeError, "experts: x is a numpy.ndarray, expected a torch.Tensor"),
    "numpy ids": (lambda: experts(ids=IDS.numpy()), TypeError, "experts: ids is a numpy.ndarray"),
    "numpy p": (lambda: experts(p=P.numpy()), TypeError, "experts: p is a numpy.ndarray"),
    "numpy w1": (lambda: experts(w=(W1.numpy(), W2)), TypeError, r"experts: w\[0\] is a numpy.ndarray"),
    "numpy w2": (lambda: experts(w=(W1, W2.numpy())), TypeError, r"experts: w\[1\] is a numpy.ndarray"),
    "list x": (lambda: experts(x=[[1.0]]), TypeError, "experts: x is a builtins.list"),
    "w=[w1]": (lambda: experts(w=[W1]), ValueError, r"experts: w has 1 tensors, expected \[w1, w2\]"),
    "w=[]": (lambda: experts(w=[]), ValueError, "experts: w has 0 tensors"),
    "w=w1": (lambda: experts(w=W1), TypeError, "experts: w is a torch.Tensor, expected a list"),
    "no bias": (lambda: experts(flags=Flag.BIAS), ValueError, "experts: w has 2 tensors, expected .*b1, b2"),
    "bias without flag": (lambda: experts(w=(W1, W2, W1[:, :, 0], W2[:, :, 0])), ValueError, "experts: w has 4 tensors, expected .*BIAS"),
    "transposed": (lambda: experts(w=(W1.mT, W2.mT)), ValueError, r"w\[0\] is \[4, 8, 32\], .* \[E, 2\*I, H\] with x's H = 8.*TRANSPOSED"),
    "not transposed": (lambda: experts(flags=Flag.TRANSPOSED), ValueError, r"w\[0\] is \[4, 32, 8\], expected \[E, H, 2\*I\].*without"),
    "narrow w2": (lambda: experts(w=(W1, W2[..., :-1])), ValueError, r"w\[1\] is \[4, 8, 15\], expected \[E, H, I\] = \[4, 8, 16\]"),
    "fewer experts in w2": (lambda: experts(w=(W1, W2[:3])), ValueError, r"w\[1\] is \[3, 8, 16\], expected .*\[4, 8, 16\]"),
    "flat w1": (lambda: experts(w=(W1[0], W2)), ValueError, r"w\[0\] is \[32, 8\], expected \[E, 2\*I, H\]"),
    "narrow x": (lambda: experts(x=X[:, 1:]), ValueError, r"w\[0\] is \[4, 32, 8\].*x's H = 7"),
    "list of five": (lambda: experts(w=[W2[0]] * 5, flags=Flag.LIST), ValueError, "w has 5 matrices, expected 3 for each expert"),
    "list, narrow": (lambda: experts(w=[*W1[:, :I], *W1[:, I:], *W2[..., 1:]], flags=Flag.LIST), ValueError, r"w\[11\] is \[8, 15\]"),
    "unknown act": (lambda: experts(act="swigl"), ValueError, "act is 'swigl', expected one of swiglu"),
    "number of no act": (lambda: experts(act=99), ValueError, "act is 99, expected one of"),
    "act of a type": (lambda: experts(act=1.0), TypeError, "act is 1.0, expected one of"),
    "act bool": (lambda: experts(act=True), ValueError, "act is True"),
    "flag of nobody": (lambda: experts(flags=1 << 20), ValueError, "flags 0x100000 has unknown bits 0x100000"),
    "flags at odds": (lambda: experts(flags=3 << 16), ValueError, "flags 0x30000 has LIST and TRANSPOSED"),
    "negative flags": (lambda: experts(flags=-1), ValueError, "flags -0x1 has unknown bits"),
    "flags in words": (lambda: experts(flags="BIAS"), TypeError, "flags is 'BIAS'"),
    "w on meta": (lambda: experts(w=(W1.to(META), W2.to(META))), ValueError, r"w\[0\] is on meta, x on cpu"),
    "w2 on meta": (lambda: experts(w=(W1, W2.to(META))), ValueError, r"w\[1\] is on the device meta"),
    "ids on meta": (lambda: experts(ids=IDS.to(META)), ValueError, "ids is on meta, x on cpu"),
    "x on meta": (lambda: experts(x=X.to(META)), ValueError, "is on cpu, x on meta"),
    "integers": (lambda: experts(x=X.long()), TypeError, "experts: x is torch.int64, expected one of float32"),
    "bool": (lambda: experts(x=X.bool()), TypeError, "experts: x is torch.bool"),
    "complex": (lambda: experts(x=X.cfloat()), TypeError, "experts: x is torch.complex64"),
    "integer p": (lambda: experts(p=P.long()), TypeError, "experts: p is torch.int64"),
    "integer w": (lambda: experts(w=(W1.long(), W2.long())), TypeError, r"experts: w\[0\] is torch.int64"),
    "integer w2": (lambda: experts(w=(W1, W2.long())), TypeError, r"experts: w\[1\] is torch.int64"),
    "float ids": (lambda: experts(ids=IDS.float()), TypeError, "experts: ids is torch.float32, expected integers"),
    "flat ids": (lambda: experts(ids=IDS[:, 0]), ValueError, r"experts: ids is \[6\], expected \[T, k\]"),
    "flat p": (lambda: experts(p=P[:, 0]), ValueError, "p has 1 dimensions, expected 2"),
    "short p": (lambda: experts(p=P[:-1]), ValueError, "p has T = 5 .*x has 6"),
    "id of no expert": (lambda: experts(ids=IDS + E), IndexError, r"ids\[0,0\] is"),
    "one adapter": (lambda: experts(lora=[(W1, W2)]), ValueError, "lora is 1 entries, expected two entries"),
    "half an adapter": (lambda: experts(lora=[(W1,), None]), ValueError, r"lora\[0\] is 1 entries"),
    "ranks": (lambda: experts(lora=[(torch.zeros(E, 3, H), torch.zeros(E, 2 * I, 4)), None]), ValueError, r"\[4, 3, 8\] and \[4, 32, 4\]"),
    "route, unknown keyword": (lambda: fusedmoe.route(X, 2, renormalise=True), TypeError, r"^route\(\)"),
    "route, numpy": (lambda: fusedmoe.route(X.numpy(), 2), TypeError, "route: logits is a numpy.ndarray"),
    "route, integers": (lambda: fusedmoe.route(X.long(), 2), TypeError, "route: logits is torch.int64"),
    "route, score": (lambda: fusedmoe.route(X, 2, score="max"), ValueError, "route: score is 'max', expected one of softmax"),
    "route, bias": (lambda: fusedmoe.route(X, 2, select_bias=IDS[:, 0]), TypeError, "route: select_bias is torch.int64"),
    "route, k": (lambda: fusedmoe.route(X, 20), ValueError, "k is 20, more than E = 8"),
    "block, unknown keyword": (lambda: fusedmoe.block(X, ROUTER, [W1, W2], 2, renormalise=True), TypeError, r"^block\(\)"),
    "block, router": (lambda: fusedmoe.block(X, ROUTER[:, 1:], [W1, W2], 2), ValueError, r"w_router is \[4, 7\], .* \[E, H\] = \[4, 8\]"),
    "block, flags": (lambda: fusedmoe.block(X, ROUTER, [W1, W2], 2, flags=1 << 20), ValueError, "block: flags 0x100000"),
    "permute": (lambda: fusedmoe.permute(X.long(), IDS, E), TypeError, "permute: x is torch.int64"),
    "permute, flags": (lambda: fusedmoe.permute(X, IDS, E, 1 << 20), ValueError, "permute: flags 0x100000"),
    "permute, other flags": (lambda: fusedmoe.permute(X, IDS, E, Flag.LIST), ValueError, "flags 0x10000 has unknown bits"),
    "unpermute": (lambda: fusedmoe.unpermute(X, IDS.flatten(), P.cfloat()), TypeError, "unpermute: p is torch.complex64"),
    "activation": (lambda: fusedmoe.activation(X.bool()), TypeError, "activation: h is torch.bool"),
    "activation, odd": (lambda: fusedmoe.activation(X[:, 1:]), ValueError, r"h is \[6, 7\], expected an even number"),
    "grouped matmul, sizes": (lambda: GmmFunction.apply(X, W1.mT, [1, 2]), ValueError, "group_list has the shape .2., weight has E = 4"),
    "grouped matmul, K": (lambda: GmmFunction.apply(X, W2.mT, [1, 2, 2, 1]), ValueError, r"x is \[6, 8\], weight is \[4, 16, 8\]"),
    "grouped matmul, numpy": (lambda: GmmFunction.apply(X.numpy(), W2.mT, [1]), TypeError, "x is a numpy.ndarray"),
    "grouped matmul, integers": (lambda: GmmFunction.apply(X.long(), W1.mT, [1, 2, 2, 1]), TypeError, "x is torch.int64"),
    "list of matmuls": (lambda: HybridGmmFunction.apply(1, X, W1[0].T.cfloat()), TypeError, r"args\[1\] is torch.complex64"),
    "operator, flags": (lambda: ops.experts(X, IDS, P, [W1, W2], 0, 1 << 22, 0.0, 0.0), ValueError, "flags 0x400000 has unknown bits"),
    "describe": (lambda: fusedmoe.describe(X, E, K, I, "gelo"), ValueError, "describe: act is 'gelo'"),
    "apply": (lambda: fusedmoe.apply("Qwen/Qwen3-30B-A3B"), TypeError, "apply: model is a str .*expected a torch.nn.Module"),
    "sparse x": (lambda: experts(x=X.to_sparse()), TypeError, "experts: x is torch.sparse_coo, expected a dense tensor"),
    "sparse w": (lambda: experts(w=(W1.to_sparse(), W2)), TypeError, r"experts: w\[0\] is torch.sparse_coo, expected a dense tensor"),
    "a hole": (lambda: experts(w=[*W1[:, :I], *W1[:, I:], *W2[:3], None], flags=Flag.LIST), TypeError, r"w\[11\] is a .*NoneType"),
    "no limit": (lambda: experts(act="swiglu_oai", limit=None), TypeError, "experts: limit is None, expected a number"),
    "alpha in words": (lambda: experts(act="swiglu_oai", alpha="a"), TypeError, "experts: alpha is 'a', expected a number"),
    "no lora scale": (lambda: experts(lora=[(*LORA, None), None]), TypeError, r"experts: lora\[0\]\[2\] is None, expected a number"),
    "a lora scale that is trained": (lambda: experts(lora=[(*LORA, torch.ones((), requires_grad=True)), None]), ValueError,
                                     r"lora\[0\]\[2\], the scale, is a tensor \[\], which requires a gradient; expected a number"),
    "halves of rows": (lambda: gmm([1.5, 2.5, 1, 1]), TypeError, "grouped_matmul: group_list is torch.float32, expected integers"),
    "rows in words": (lambda: gmm("1221"), TypeError, r"grouped_matmul: group_list is '1221', expected \[E\] integers"),
    "no rows said": (lambda: gmm(None), TypeError, r"grouped_matmul: group_list is None, expected \[E\] integers"),
    "hybrid count": (lambda: HybridGmmFunction.apply(1.0, X, W2[0]), TypeError, "num_experts is 1.0, expected an integer"),
    "route k = -1": (lambda: fusedmoe.route(X, -1), ValueError, "route: k is -1, expected at least 1"),
    "route k = 2.0": (lambda: fusedmoe.route(X, 2.0), TypeError, "route: k is 2.0, expected an integer"),
    "route a vector": (lambda: fusedmoe.route(X[0], 2), ValueError, r"route: logits is \[8\], expected \[T, E\]"),
    "route float ids": (lambda: fusedmoe.route(X, 2, ids=P), TypeError, "route: ids is torch.float32, expected integers"),
    "route in words": (lambda: fusedmoe.route(X, 2, renormalize="yes"), TypeError, "route: renormalize is 'yes', expected a number"),
    "permute E = -1": (lambda: fusedmoe.permute(X, IDS, -1), ValueError, "permute: E is -1, expected at least 1"),
    "permute E = 3.0": (lambda: fusedmoe.permute(X, IDS, 3.0), TypeError, "permute: E is 3.0, expected an integer"),
    "permute a vector": (lambda: fusedmoe.permute(X, IDS[:, 0], E), ValueError, r"permute: ids is \[6\], expected \[T, k\]"),
    "unpermute a vector": (lambda: fusedmoe.unpermute(X, IDS[:, 0], P[:, 0]), ValueError, r"unpermute: p is \[6\], expected \[T, k\]"),
    "unpermute nothing": (lambda: fusedmoe.unpermute(X, IDS[0, :0], P[:, :0]), ValueError, r"p is \[6, 0\], row_map has 0 rows, expected"),
    "activation of a vector": (lambda: fusedmoe.activation(X[0]), ValueError, r"activation: h is \[8\], expected \[R, columns\]"),
    "half a shared expert": (lambda: fusedmoe.block(X, ROUTER, [W1, W2], 2, shared=[W1[:1]]), ValueError,
                             r"block: shared is \[\[1, 32, 8\]\], expected \[1, 2\*S, H\] and \[1, H, S\]"),
}


@pytest.mark.parametrize("call, kind, text", CASES.values(), ids=CASES)
def test_wrong(call, kind, text):
    with pytest.raises(kind, match=text) as found:
        call()
    assert "frame #" not in str(found.value)  # no backtrace of C++


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_is_refused_that_is_right(device):
    x, ids, p, w = X.to(device), IDS.to(device), P.to(device), [W1.to(device), W2.to(device)]
    by_number = fusedmoe.experts(x, ids, p, w, ops.GEGLU)
    for act in ("geglu", "GEGLU", Activation.GEGLU):
        out = fusedmoe.experts(x, ids, p, tuple(w), act, Flag(0))
        assert out.shape == by_number.shape and (device == "meta" or torch.equal(out, by_number))
    assert fusedmoe.experts(x, ids.repeat(1, 3), p.repeat(1, 3), w).shape == (T, H)  # k = 6 > E = 4: equal ids add


def test_names_and_numbers():
    assert torch.equal(fusedmoe.route(X, 2, score="sigmoid")[1], fusedmoe.route(X, 2, score=Score.SIGMOID)[1])
    assert all(getattr(ops, member.name) == member for kind in (Activation, Score, Flag) for member in kind)


def test_signatures():
    """GmmFunction and HybridGmmFunction as LLaMA-Factory publishes them; keywords of public functions are their own."""
    names = lambda f: list(inspect.signature(f).parameters)  # noqa: E731
    assert names(GmmFunction.forward) == ["ctx", "x", "weight", "group_list"] and names(GmmFunction.backward) == ["ctx", "grad_output"]
    assert names(HybridGmmFunction.forward) == ["ctx", "num_experts", "args"]
    assert names(HybridGmmFunction.backward) == ["ctx", "grad_outputs"]
    assert inspect.signature(HybridGmmFunction.forward).parameters["args"].kind == inspect.Parameter.VAR_POSITIONAL
    for function in (fusedmoe.route, fusedmoe.block, fusedmoe.experts, fusedmoe.grouped_matmul):
        assert all(p.kind != inspect.Parameter.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    for name in fusedmoe.__all__:
        assert getattr(fusedmoe, name).__doc__, name


def test_plans_do_not_pile_up():
    """A new cap makes new plans and destroys the old ones, of which the library holds 16384 at most."""
    for level in ("c", None):
        fusedmoe.set_max_isa(level)
        experts()
    assert len(ops._made) == 1
    handle = ops._made[0]
    fusedmoe.set_max_isa(None)
    assert not ops._made
    with pytest.raises(RuntimeError, match="FMOE_ERR_HANDLE"):
        ops._core.describe(handle)
    experts()
