# SPDX-License-Identifier: Apache-2.0
"""LoRA of PEFT on experts: what PEFT computes, without W + BA. Stacked parameters (both orientations) and Linear layers."""

import copy
import logging

import pytest
import torch

import fusedmoe
from common import V5, rel, step, tiny, train, worst
from fusedmoe import autograd, ops

peft = pytest.importorskip("peft")
RELEASE = tuple(int(n) for n in peft.__version__.split(".")[:2])
UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
IDS = torch.arange(2 * 16).view(2, 16) * 7 % 40 + 3


def adapted(model, alpha=24, names=("default",), **options):
    """The model with adapters on its experts whose B is not zero."""
    config = peft.LoraConfig(r=4, lora_alpha=alpha, **options)
    model = peft.get_peft_model(model, config)
    for name in names[1:]:
        model.add_adapter(name, config)
    g = torch.Generator().manual_seed(11)
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = torch.randn(p.shape, generator=g, dtype=p.dtype) * 0.2
    return model


def counted(monkeypatch):
    """How often adapters were computed by fusedmoe: (forward, backward)."""
    calls = [0, 0]

    def spy(op, *args):
        flags = {ops.experts: 5, ops.experts_forward: 5, ops.experts_backward: 7}.get(op)
        if flags:
            calls[op is ops.experts_backward] += bool(args[flags] & (ops.LORA1 | ops.LORA2))
        return real(op, *args)

    real = ops.call
    monkeypatch.setattr(ops, "call", spy)
    return calls


def both(model, calls=None):
    """A step of the adapted model on fusedmoe's experts, and on its own."""
    want = step(copy.deepcopy(model), IDS)
    fusedmoe.apply(model)
    if calls:
        calls[:] = 0, 0  # applying to v4 probes the layers
    return step(model, IDS), want


# ---- the layer itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("form", ["stacked", "transposed", "list", "interleaved"])
@pytest.mark.parametrize("scales", [(), (0.5, -2), (1e-60, 0.0)])
def test_layer_is_the_merged_layer(dtype, form, scales):
    T, H, I, E, k = 9, 6, 5, 4, 2
    flags = {"transposed": ops.TRANSPOSED, "list": ops.LIST, "interleaved": ops.INTERLEAVED}.get(form, 0)
    w1, w2, x = torch.randn(E, 2 * I, H, dtype=dtype), torch.randn(E, H, I, dtype=dtype), torch.randn(T, H, dtype=dtype)
    ids, p = torch.randint(E - 1, (T, k)), torch.rand(T, k, dtype=dtype)
    shapes = (E, 3, H), (E, 2 * I, 3), (E, 1, I), (E, H, 1)
    lora = [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]
    a1, b1, a2, b2 = lora

    def stored(up, down):
        if form == "list":
            return [*up[:, :I], *up[:, I:], *down]
        return [t.transpose(1, 2).contiguous() if form == "transposed" else t for t in (up, down)]

    s1, s2 = scales or (1.0, 1.0)
    out = fusedmoe.experts(x, ids, p, stored(w1, w2), flags=flags, lora=((a1, b1, *scales[:1]), (a2, b2, *scales[1:])))
    want = fusedmoe.experts(x, ids, p, stored(w1 + s1 * b1 @ a1, w2 + s2 * b2 @ a2), flags=flags)
    dout = torch.randn_like(out)
    bound = 1e-12 if dtype == torch.float64 else 2e-6
    assert rel(out, want) < bound
    for got, grad in zip(torch.autograd.grad(out, lora, dout), torch.autograd.grad(want, lora, dout), strict=True):
        assert rel(got, grad) < 2 * bound if grad.any() else not got.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_wide_factors_are_not_rounded(dtype):
    """PEFT keeps adapters in float32 beside weights of 16 bits: their gradients are those of the layer's dtype before rounding."""
    T, H, I, E, k, rank = 64, 48, 32, 4, 2, 8
    x, w = torch.randn(T, H, dtype=dtype), [torch.randn(s, dtype=dtype) / s[2] ** 0.5 for s in ((E, 2 * I, H), (E, H, I))]
    ids, p = torch.randint(E, (T, k)), torch.rand(T, k)
    narrow = [torch.randn(s, dtype=dtype) for s in ((E, rank, H), (E, 2 * I, rank), (E, rank, I), (E, H, rank))]

    def gradients(f):
        f = [t.detach().requires_grad_() for t in f]
        fusedmoe.experts(x, ids, p, w, lora=((*f[:2], 0.25), (*f[2:], 0.25))).sum().backward()
        return [t.grad for t in f]

    assert torch.equal(fusedmoe.experts(x, ids, p, w, lora=(narrow[:2], narrow[2:])),
                       fusedmoe.experts(x, ids, p, w, lora=([t.float() for t in narrow[:2]], narrow[2:])))  # fmt: skip
    for wide, short in zip(gradients([t.float() for t in narrow]), gradients(narrow), strict=True):
        assert wide.dtype == torch.float32 and short.dtype == dtype
        assert torch.equal(wide.to(dtype), short) and not torch.equal(wide, short.float())


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_with_scales(dynamic):
    """Sizes and scales that change: the same bits, and gradients in the dtype of the factors."""
    E, H, I, rank = 4, 16, 8, 4
    w = [torch.randn(E, 2 * I, H, dtype=torch.bfloat16), torch.randn(E, H, I, dtype=torch.bfloat16)]
    lora = [torch.randn(s, requires_grad=True) for s in ((E, rank, H), (E, 2 * I, rank), (E, rank, I), (E, H, rank))]

    def layer(x, ids, p, scale):
        return autograd.experts(x, ids, p, w, lora=((*lora[:2], scale), (*lora[2:], 0.5)))

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for T, scale in ((5, 0.25), (7, 2.0)):
        given = torch.randn(T, H, dtype=torch.bfloat16, requires_grad=True), torch.randint(E, (T, 2)), torch.rand(T, 2), scale
        outs = [f(*given) for f in (layer, compiled)]
        grads = [torch.autograd.grad(out.sum(), [given[0], *lora]) for out in outs]
        assert torch.equal(*outs)
        for ours, theirs in zip(*grads, strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_wide_gradients_of_narrow_factors():
    """What CUDA is asked for where factors were cast: float32 for the factors alone."""
    T, H, I, E, rank = 20, 16, 8, 3, 4
    w = [torch.randn(s, dtype=torch.bfloat16) for s in ((E, 2 * I, H), (E, H, I), (E, rank, I), (E, H, rank))]
    x, ids, p = torch.randn(T, H, dtype=torch.bfloat16), torch.randint(E, (T, 2)), torch.rand(T, 2)
    how = ops.SWIGLU, ops.LORA2, 0.0, 0.0
    _, saved = ops.experts_forward(x, ids, p, w, *how, [], [0.0, 1.5])
    short = ops.experts_backward(x, ids, p, w, saved, x, *how, 1 | 4 | 256 | 512, [0.0, 1.5])
    wide = ops.experts_backward(x, ids, p, w, saved, x, how[0], how[1] | ops.WIDE_FACTORS, *how[2:], 1 | 4 | 256 | 512, [0.0, 1.5])
    assert [t.dtype for t in wide] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(wide, short, strict=True))
    assert not torch.equal(wide[2], short[2].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_factors_are_those_rounded(dtype):
    T, H, I, E, k, rank = 7, 20, 9, 6, 2, 3
    x, w = torch.randn(T, H, dtype=dtype), [torch.randn(s, dtype=dtype) for s in ((E, 2 * I, H), (E, H, I))]
    ids, p = torch.randint(E - 2, (T, k)), torch.rand(T, k)
    wide = [torch.randn(s) for s in ((E, rank, H), (E, rank, 2 * I), (E, rank, I), (E, H, rank))]
    wide[1] = wide[1].transpose(1, 2)
    outs = []
    for f in (wide, [t.to(dtype) for t in wide]):
        f = [t.detach().requires_grad_() for t in f]
        outs.append([out := fusedmoe.experts(x, ids, p, w, lora=(f[:2], f[2:])), *torch.autograd.grad(out.sum(), f)])
    for a, b in zip(*outs, strict=True):
        assert torch.equal(a.to(dtype), b)


def test_gradcheck():
    x, ids = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch.randint(4, (5, 2))  # id 3 = E skips
    p = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    w = [torch.randn(3, 4, 3, dtype=torch.float64, requires_grad=True), torch.randn(3, 3, 2, dtype=torch.float64)]
    lora = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 2, 3), (3, 4, 2), (3, 1, 2), (3, 3, 1))]

    def layer(x, p, w1, a1, b1, a2, b2):
        return autograd.experts(x, ids, p, [w1, w[1]], flags=ops.SKIP_E, lora=((a1, b1), (a2, b2)))

    assert torch.autograd.gradcheck(layer, (x, p, w[0], *lora))


# ---- PEFT's ParamWrapper: stacked experts ---------------------------------------------------------------------------------

stacked = pytest.mark.skipif(not V5 or RELEASE < (0, 17), reason="stacked experts of transformers v5, target_parameters of PEFT 0.17")


@stacked
@pytest.mark.parametrize("targets", [(UP, DOWN), (UP,), (DOWN,)])
def test_stacked_as_peft(monkeypatch, targets):
    model = adapted(tiny("Qwen3Moe"), target_parameters=list(targets), target_modules=[])
    calls = counted(monkeypatch)
    got, want = both(model, calls)
    assert calls == [2, 2], "both layers through the kernels"
    assert rel(got[0], want[0]) < 1e-6 and worst(got, want) < 1e-5


@stacked
@pytest.mark.parametrize("family", ["GptOss", "Mixtral", "Qwen3VLMoe", "LongcatFlash"])
def test_stacked_families(monkeypatch, family):
    """Transposed with bias and interleaved; like Qwen; experts that hand back what they read, with a row of W1 and of its adapter each."""
    model = adapted(tiny(family), target_parameters=["experts.gate_up_proj", "experts.down_proj"], target_modules=[])
    calls = counted(monkeypatch)
    got, want = both(model, calls)
    count = sum(type(m).__name__ == "ParamWrapper" for m in model.modules()) // 2
    assert calls == [count, count] != [0, 0] and worst(got, want) < 3e-5


@stacked
def test_base_weights_trained_too(monkeypatch):
    model = adapted(tiny("Qwen3Moe"), target_parameters=[UP, DOWN], target_modules=[])
    for p in model.parameters():
        p.requires_grad_(True)
    got, want = both(model)
    assert worst(got, want) < 1e-5


@stacked
def test_merged_and_unmerged_and_disabled(monkeypatch):
    model = adapted(tiny("Qwen3Moe"), target_parameters=[UP, DOWN], target_modules=[])
    plain = tiny("Qwen3Moe")(IDS).logits
    fusedmoe.apply(model)
    calls = counted(monkeypatch)
    with torch.no_grad():
        loose = model(IDS).logits
        assert calls == [2, 0]
        with model.disable_adapter():
            assert rel(model(IDS).logits, plain) < 1e-5
        assert rel(loose, plain) > 1e-2, "the adapter does something"
        model.merge_adapter()
        merged = model(IDS).logits
        assert calls == [2, 0], "a merged adapter is in the weights"
        model.unmerge_adapter()
        again = model(IDS).logits
        assert rel(model.merge_and_unload()(IDS).logits, loose) < 1e-5
    assert rel(merged, loose) < 1e-5 and rel(again, loose) < 1e-5


@stacked
def test_scaling_is_pefts():
    model = adapted(tiny("Qwen3Moe"), target_parameters=[UP, DOWN], target_modules=[], use_rslora=True)
    got, want = both(model)
    assert worst(got, want) < 1e-5


@stacked
@pytest.mark.skipif(RELEASE < (0, 19), reason="PEFT before 0.19 has one adapter on parameters")
def test_several_adapters_are_pefts(monkeypatch, caplog):
    model = adapted(tiny("Qwen3Moe"), names=("default", "second"), target_parameters=[UP, DOWN], target_modules=[])
    calls = counted(monkeypatch)
    model.base_model.set_adapter(["default", "second"])
    with caplog.at_level(logging.WARNING, "fusedmoe"):
        got, want = both(model, calls)
    assert calls == [0, 0] and worst(got, want) < 1e-5
    assert "several adapters" in caplog.text


@pytest.mark.skipif(RELEASE < (0, 17), reason="target_parameters are PEFT 0.17's")
def test_an_adapter_for_each_sample_is_pefts():
    """Never the active one for all of them."""
    targets = dict(target_parameters=[UP, DOWN], target_modules=[]) if V5 else dict(target_modules=ALL)
    own = adapted(tiny("Qwen3Moe"), **targets).eval()
    for model in (own, fusedmoe.apply(copy.deepcopy(own))):
        with pytest.raises(ValueError, match="adapter batches|`adapter_names` should be"):
            model(input_ids=IDS, adapter_names=["default", "__base__"])


@stacked
def test_training_and_checkpointing(monkeypatch):
    model = adapted(tiny("Qwen3Moe"), target_parameters=[UP, DOWN], target_modules=[])
    want = train(model, 20, lr=0.05)
    fusedmoe.apply(model)
    got = train(model, 20, lr=0.05)
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) < 1e-4
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls = counted(monkeypatch)
    assert worst(step(model.train(), IDS), step(model.eval(), IDS)) < 1e-6
    assert calls[0] == 4 + 2 and calls[1] == 4


@stacked
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # PEFT keeps adapters in float32 beside bfloat16 weights
def test_no_copy_of_the_adapters_is_kept(dtype):
    model = fusedmoe.apply(adapted(tiny("Qwen3Moe").to(dtype), target_parameters=[UP, DOWN], target_modules=[]))
    own, copies = {p.untyped_storage().data_ptr() for p in model.parameters()}, []

    def pack(t):
        if t.dim() == 3 and t.shape[0] == 8 and 4 in t.shape[1:]:  # experts, rank
            copies.append(t.untyped_storage().data_ptr() not in own)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(IDS)
    assert copies == [False] * 8, "four factors of two layers, all of them parameters"


@stacked
def test_compiled():
    model = adapted(tiny("Qwen3Moe"), target_parameters=[UP, DOWN], target_modules=[])
    got, want = both(model)
    compiled = torch.compile(model, backend="aot_eager")
    assert worst(step(compiled, IDS), (*want[:2], {"_orig_mod." + n: g for n, g in want[2].items()})) < 1e-5


@stacked
def test_bf16():
    model = adapted(tiny("Qwen3Moe").bfloat16(), target_parameters=[UP, DOWN], target_modules=[])
    exact = step(copy.deepcopy(model).double(), IDS)
    got, want = both(model)
    assert rel(got[1], exact[1]) < 1.5 * rel(want[1], exact[1]) + 1e-3
    for name, grad in exact[2].items():
        if "experts" in name:
            assert rel(got[2][name], grad) < 2 * rel(want[2][name], grad) + 1e-2, name


# ---- PEFT's Linear: experts as modules of their own (v4) ------------------------------------------------------------------

separate = pytest.mark.skipif(V5, reason="separate Linears are transformers v4's")
ALL = [r"gate_proj", r"up_proj", r"down_proj"]


@separate
@pytest.mark.parametrize("alphas", [{}, {"up_proj": 40}], ids=["one scale", "scales"])
@pytest.mark.parametrize("targets", [ALL, ["down_proj"], ["gate_proj", "up_proj"]])
def test_linears_as_peft(monkeypatch, targets, alphas):
    model = adapted(tiny("Qwen3Moe"), target_modules=targets, alpha_pattern=alphas)
    calls = counted(monkeypatch)
    got, want = both(model, calls)
    assert calls == [2, 2] and worst(got, want) < 3e-5


@separate
def test_linears_patched_before_the_adapter(monkeypatch):
    want = step(adapted(tiny("Qwen3Moe"), target_modules=ALL), IDS)
    model = adapted(fusedmoe.apply(tiny("Qwen3Moe")), target_modules=ALL)
    calls = counted(monkeypatch)
    assert worst(step(model, IDS), want) < 3e-5 and calls == [2, 2]
    with torch.no_grad():
        loose = model(IDS).logits
        model.merge_adapter()
        assert rel(model(IDS).logits, loose) < 1e-5


@separate
def test_hooks_on_adapted_linears_run(monkeypatch):
    model = adapted(tiny("Qwen3Moe"), target_modules=ALL)
    fusedmoe.apply(model)
    experts = model.base_model.model.model.layers[0].mlp.experts
    handle = experts[0].gate_proj.register_forward_hook(lambda module, args, out: 0 * out)
    want = step(fusedmoe.unapply(copy.deepcopy(model)), IDS)
    calls = counted(monkeypatch)
    assert worst(step(model, IDS), want) < 3e-5 and calls == [1, 1]
    handle.remove()
    step(model, IDS)
    assert calls == [3, 3]


@separate
def test_stacked_of_v4(monkeypatch):
    model = adapted(tiny("Qwen3VLMoe"), target_parameters=["experts.gate_up_proj", "experts.down_proj"], target_modules=[])
    calls = counted(monkeypatch)
    got, want = both(model, calls)
    assert calls == [2, 2] and worst(got, want) < 3e-5


@separate
@pytest.mark.parametrize("options", [dict(lora_dropout=0.1), dict(use_dora=True), dict(target_modules=["gate_proj"])])
def test_linears_left_to_peft(monkeypatch, caplog, options):
    model = adapted(tiny("Qwen3Moe"), **{"target_modules": ALL, **options})
    calls = counted(monkeypatch)
    with caplog.at_level(logging.WARNING, "fusedmoe"):
        fusedmoe.apply(model)
        calls[:] = 0, 0
        step(model.train(), IDS)
    assert calls == [0, 0] and "Qwen3MoeSparseMoeBlock" in caplog.text and "own forward" in caplog.text
