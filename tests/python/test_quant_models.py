# SPDX-License-Identifier: Apache-2.0
"""``fusedmoe.quantize`` of models whose experts are not under transformers' common forward (Llama 4, LongCat-Flash, Step-3.7, DBRX,
JetMoE), and of experts in a ModuleList: the bits of the same model on decoded weights, adapters, saving and loading."""

import copy
import functools
import itertools

import pytest
import torch
from torch import nn

import fusedmoe
from fusedmoe.quant import FORMATS, QuantTensor
from fusedmoe.quant.linears import QuantLinear
from test_quant_lists import Block, E, H, Mlp

transformers = pytest.importorskip("transformers")
zoo = pytest.importorskip("zoo")
LLAMA4 = dict(intermediate_size_mlp=48, interleave_moe_layer_step=1, num_experts_per_tok=1)
# of each kind: its stacks, where adapters go, and whether the kernels compute those
KINDS = {
    "longcat_flash": (("gate_up_proj", "down_proj"), "mlp.experts", True),
    "step3p7": (("gate_up_proj", "down_proj"), "mlp.experts", True),
    "llama4": (("gate_up_proj", "down_proj"), "feed_forward.experts", True),
    "jetmoe": (("input_linear.weight", "output_linear.weight"), "mlp", False),
    "dbrx": (("w1", "v1", "w2"), "", False),
}
X = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(4)).bfloat16()


@functools.cache
def _plain(kind):
    if kind not in zoo.architectures():
        return None
    return zoo.tiny(kind, **(LLAMA4 if kind == "llama4" else {})).bfloat16().eval()


def plain(kind):
    """A tiny model in bfloat16."""
    return copy.deepcopy(_plain(kind)) if _plain(kind) is not None else pytest.skip(f"transformers has no {kind}")


def decoded(model):
    """The same on weights as the codes stand for them."""
    return fusedmoe.apply(fusedmoe.dequantize(copy.deepcopy(model)))


def stacks(model):
    return {n: p for n, p in model.named_parameters() if isinstance(p, QuantTensor)}


def run(model, x=X):
    """Output and dx."""
    x = x.clone().requires_grad_()
    out = model(inputs_embeds=x).last_hidden_state if hasattr(model, "get_input_embeddings") else model(x)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))  # the square sum behind a norm does not depend on x
    return out, torch.autograd.grad((out.float() * g).sum(), x)[0]


def same(a, b):
    assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.fixture
def never_decoded(monkeypatch):
    """On and off: decoding is an error. dims: of tensors of so many dimensions alone."""

    def on(*dims):
        def refuse(self, *_, own=QuantTensor.dequantize):
            if dims and self.dim() not in dims:
                return own(self, *_)
            raise AssertionError(f"{self!r} was decoded")

        monkeypatch.setattr(QuantTensor, "dequantize", refuse)

    return on, monkeypatch.undo


# ---- stacks --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind, format", [*((kind, "nf4") for kind in KINDS), *(("llama4", f) for f in FORMATS if f != "nf4"),
                                          ("dbrx", "fp8"), ("dbrx", "int8"), ("jetmoe", "mxfp4"), ("longcat_flash", "fp8")])  # fmt: skip
def test_a_model_has_the_bits_of_decoded_weights(kind, format, never_decoded):
    model, want = plain(kind), plain(kind)
    names = {n for n, _ in model.named_parameters() if n.endswith(KINDS[kind][0]) and "shared" not in n and "mlps" not in n}
    fusedmoe.quantize(model, format)
    held = stacks(model)
    assert held.keys() == names and not any(p.requires_grad for p in held.values())
    twin = decoded(model)
    path = "composed" if kind == "jetmoe" else "fused"
    assert {row.path for row in fusedmoe.report(model)} == {path} and all(row.dtype == format for row in fusedmoe.report(model))
    lines = fusedmoe.describe(model).splitlines()[:-1]
    assert len(lines) >= 2 and all(f" {format} [" in line and line.endswith(f"; {path}") for line in lines), lines
    never_decoded[0]()
    got = run(model)
    never_decoded[1]()
    same(got, run(twin))
    for (name, w), (other, own) in zip(twin.named_parameters(), want.named_parameters()):
        assert name == other and w.shape == own.shape and w.dtype == own.dtype
        error = (w - own).float().norm() / own.float().norm()
        assert (0.001 < error < 0.2) if name in names else torch.equal(w, own), (name, error)
    off = (got[0] - run(fusedmoe.apply(want))[0]).float().norm() / got[0].float().norm()
    assert 0 < off < 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_inference_mode_gives_the_same(kind):
    model = fusedmoe.quantize(plain(kind), "nf4").eval()
    with torch.no_grad():
        want = model(inputs_embeds=X).last_hidden_state
    with torch.inference_mode():
        assert torch.equal(model(inputs_embeds=X).last_hidden_state, want)


@pytest.mark.parametrize("kind", ["llama4", "dbrx", "jetmoe"])
def test_codes_lie_as_a_linear_layer_reads_them(kind):
    """Groups run along the inputs, whatever the layout of the parameter."""
    model, own = plain(kind), dict(plain(kind).named_parameters())
    for name, w in stacks(fusedmoe.quantize(model, "int8")).items():  # a scale a row
        E, outputs, inputs = w.codes.shape
        rows = own[name].unflatten(0, (E, -1)) if own[name].dim() == 2 else own[name]
        rows = rows.mT if w.transposed else rows
        assert rows.shape == (E, outputs, inputs) and torch.equal(w.scale[..., 0], rows.float().abs().amax(-1))
        assert w.transposed == (kind == "llama4" or name.endswith("w2"))


@pytest.mark.parametrize("kind", KINDS)
def test_their_own_forward_decodes_no_more_than_an_expert(kind, never_decoded):
    model = fusedmoe.quantize(plain(kind), "nf4")
    got = run(model)
    fusedmoe.unapply(model)
    if kind != "llama4":  # which multiplies all experts at once
        never_decoded[0](3)
    for a, b in zip(run(model), got):
        assert 0 < (a - b).float().norm() < 0.1 * b.float().norm() or torch.equal(a, b)


@pytest.mark.parametrize("kind", [kind for kind, (_, where, _) in KINDS.items() if where])
def test_adapters_train_as_on_decoded_weights(kind, never_decoded):
    peft = pytest.importorskip("peft")
    names, where, ours = KINDS[kind]
    config = dict(r=4, target_parameters=[f"{where}.{n}" for n in names], init_lora_weights=False)
    quantised, results = fusedmoe.quantize(plain(kind), "nf4"), []
    for base in (quantised, decoded(quantised)):
        torch.manual_seed(1)
        model = peft.get_peft_model(base, peft.LoraConfig(**config))
        assert ("LoRA in the kernels" in str(fusedmoe.report(model))) == ours
        factors = {n: p for n, p in model.named_parameters() if p.requires_grad}
        assert len(factors) == 8 and all("lora" in n for n in factors)
        optimizer, found = torch.optim.SGD(factors.values(), lr=0.1), []
        if ours:
            never_decoded[0]()
        for _ in range(2):
            x = X.clone().requires_grad_()
            loss = model(inputs_embeds=x).last_hidden_state.float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            found += [loss.detach(), x.grad, *(p.grad.clone() for p in factors.values())]
            optimizer.step()
        never_decoded[1]()
        assert all(t.any() for t in found)
        results.append([*found, *factors.values()])
    same(*results)


@pytest.mark.parametrize("kind", ["step3p7", "llama4", "jetmoe"])
def test_adapters_are_merged_and_quantised_again(kind):
    peft = pytest.importorskip("peft")
    names, where, _ = KINDS[kind]
    config = peft.LoraConfig(r=4, target_parameters=[f"{where}.{n}" for n in names], init_lora_weights=False)
    model = peft.get_peft_model(fusedmoe.quantize(plain(kind), "int8"), config).eval()
    want = run(model)[0]
    merged, errors = fusedmoe.merge_and_unload(model, requantize=True)
    assert len(errors) == 4 and all(0 < e.adapter < 0.1 for e in errors.values())
    assert not any("lora" in n for n, _ in merged.named_parameters()) and {*errors} <= {*stacks(merged)}
    assert (run(merged)[0] - want).float().norm() < 0.03 * want.float().norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_saved_and_found_again(kind, tmp_path, never_decoded):
    """As quantize made it; as QuantConfig makes it while it is loaded; and plain, put back."""
    plain(kind).save_pretrained(tmp_path / "plain")
    cls = type(_plain(kind))
    model = fusedmoe.quantize(cls.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16), "nf4")
    want, state = run(model), model.state_dict()
    assert all(type(t) is torch.Tensor for t in state.values())
    other = fusedmoe.quantize(cls.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16), "int8")  # of another format, which gives way
    other.load_state_dict(state)
    same(run(other), want)
    model.save_pretrained(tmp_path / "coded")
    loaded = cls.from_pretrained(tmp_path / "coded", dtype=torch.bfloat16)
    made = cls.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16, quantization_config=fusedmoe.QuantConfig("nf4"))
    never_decoded[0]()
    for found in (loaded, made):
        assert stacks(found).keys() == stacks(model).keys()
        same(run(found), want)
    never_decoded[1]()
    fusedmoe.dequantize(made).save_pretrained(tmp_path / "back")
    again = fusedmoe.apply(cls.from_pretrained(tmp_path / "back", dtype=torch.bfloat16))
    assert not stacks(again)
    same(run(again), want)


VIEWS = dict(
    turned=lambda t: t.mT, first=lambda t: t.transpose(0, 1), one=lambda t: t[1], row=lambda t: t[:, 1], some=lambda t: t[1:3],
    none=lambda t: t[2:2], steps=lambda t: t[::2], flat=lambda t: t.flatten(0, 1), line=lambda t: t.view(-1), data=lambda t: t.data,
    permuted=lambda t: t.permute(2, 0, 1), unbound=lambda t: t.unbind()[2], rows=lambda t: t.unbind(1)[2],
    narrow=lambda t: t.narrow(0, 1, 2), split=lambda t: t.split([1, 3])[1], columns=lambda t: t.chunk(2, -1)[1],
    more=lambda t: t[None].expand(2, -1, -1, -1), pairs=lambda t: t.unflatten(0, (2, 2)), chosen=lambda t: t[torch.tensor([3, 0])],
    clone=lambda t: t.clone(),
)  # fmt: skip


@pytest.mark.parametrize("made, used", itertools.product((False, True), repeat=2))
def test_views_in_inference_mode_and_outside(made, used):
    with torch.inference_mode(made):
        w = QuantTensor.from_weights(torch.randn(4, 8, 64).bfloat16(), "nf4")
    for name, view in VIEWS.items():
        with torch.inference_mode(used):
            got, want = view(w), view(w.dequantize())
            got = got.dequantize() if isinstance(got, QuantTensor) else got
        assert got.dtype == want.dtype and got.shape == want.shape and torch.equal(got, want), name
    with torch.inference_mode(used):
        wide = w.float()
        assert wide.dtype == torch.float32 and (made or isinstance(wide, QuantTensor))


def test_a_flat_stack_is_cut_between_experts():
    w = torch.randn(3, 8, 64).bfloat16()
    for turned in (False, True):
        stack = QuantTensor.from_weights(w.mT.contiguous() if turned else w, "nf4")
        stack = stack.turned() if turned else stack
        flat, want = stack.flat(), stack.dequantize().flatten(0, 1)
        kept = [flat, flat[8:16], flat.split(16)[1], flat.clone(), copy.deepcopy(flat), flat.view(-1, 8, 64), flat.view(3, 8, 64)[2]]
        values = [want, want[8:16], want[16:], want, want, want.view(3, 8, 64), want[16:]]
        for got, value in zip(kept, values, strict=True):
            assert isinstance(got, QuantTensor) and got.shape == value.shape and torch.equal(got.dequantize(), value)
        assert all(torch.equal(a.dequantize(), b) for a, b in zip(flat.view(3, 8, 64).unbind(), want.split(8), strict=True))
        for got, value in ((flat[4:12], want[4:12]), (flat[3], want[3]), (flat.t(), want.t()), (flat.split(12)[0], want[:12])):
            assert not isinstance(got, QuantTensor) and torch.equal(got, value)  # decoded for that


# ---- experts in a ModuleList -------------------------------------------------------------------------------------------------
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.norm, self.dense = Block(), nn.LayerNorm(H), nn.ModuleList([Mlp()])

    def forward(self, x):
        return x + self.mlp(self.norm(x))[0] + self.dense[0](x)


def listed(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(Layer(), Layer()).bfloat16().requires_grad_(False).eval()


LINEARS = dict(r=4, target_modules=r".*experts.*_proj", init_lora_weights=False)
TOKENS = torch.randn(2, 6, H, generator=torch.Generator().manual_seed(4)).bfloat16()


@pytest.mark.parametrize("format", FORMATS)
def test_linears_of_experts_in_lists(format, never_decoded):
    model = listed()
    fusedmoe.quantize(model, format)
    kinds = {n: type(m) for n, m in model.named_modules() if n.endswith("_proj")}
    assert all(kind is (QuantLinear if "experts" in n else nn.Linear) for n, kind in kinds.items()) and len(kinds) == 2 * 3 * (E + 1)
    assert all(row.path == "fused" and row.dtype == format for row in fusedmoe.report(model)) and len(fusedmoe.report(model)) == 2
    lines = fusedmoe.describe(model).splitlines()
    assert len(lines) == 3 and f"12 matrices {format}" in lines[0] and lines[0].endswith("fused")
    twin = decoded(model)
    assert all(type(m) is nn.Linear for n, m in twin.named_modules() if n.endswith("_proj"))
    never_decoded[0]()
    got = run(model, TOKENS)
    never_decoded[1]()
    same(got, run(twin, TOKENS))
    off = (got[0] - run(fusedmoe.apply(listed()), TOKENS)[0]).float().norm() / got[0].float().norm()
    assert 1e-5 < off < 0.1
    state = model.state_dict()
    assert all(type(t) is torch.Tensor for t in state.values()) and state["0.mlp.experts.1.up_proj.weight"].element_size() == 1
    other = fusedmoe.quantize(listed(7), "mxfp4" if format == "int4" else "int4")  # which gives way
    assert not torch.equal(run(other, TOKENS)[0], got[0])
    other.load_state_dict(state)
    same(run(other, TOKENS), got)


@pytest.mark.parametrize("first", ["quantize", "peft"])
def test_adapters_on_linears_in_lists(first, never_decoded):
    peft = pytest.importorskip("peft")
    results, base = [], fusedmoe.quantize(listed(), "nf4")
    for model in (base, decoded(base)):
        model = listed() if (late := first == "peft" and model is base) else model
        torch.manual_seed(1)
        if late:
            model = peft.get_peft_model(model, peft.LoraConfig(**LINEARS))
            fusedmoe.quantize(model, "nf4")
        else:
            model = peft.get_peft_model(model, peft.LoraConfig(**LINEARS))
        assert "LoRA in the kernels" in str(fusedmoe.report(model))
        never_decoded[0]()
        loss = model(TOKENS).float().square().mean()
        loss.backward()
        never_decoded[1]()
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        assert len(grads) == 2 * E * 6 and all(g.any() for g in grads)
        results.append([loss, *grads])
    same(*results)


@pytest.mark.parametrize("requantize", [False, True])
def test_adapters_in_lists_are_merged(requantize):
    peft = pytest.importorskip("peft")
    model = fusedmoe.quantize(listed(), "int8")
    before = model[0].mlp.experts[0].down_proj.weight
    model = peft.get_peft_model(model, peft.LoraConfig(**{**LINEARS, "target_modules": r".*experts.*(gate|up)_proj"})).eval()
    want = model(TOKENS)
    merged, errors = fusedmoe.merge_and_unload(model, requantize=requantize)
    kinds = {type(m) for n, m in merged.named_modules() if n.endswith("_proj") and "experts" in n}
    assert kinds == {QuantLinear if requantize else nn.Linear}
    assert len(errors) == (2 * E * 2 if requantize else 0) and all(0 < e.adapter < 0.1 for e in errors.values())
    assert {*errors} <= {*stacks(merged)}
    if requantize:  # what had no adapter is as it was
        assert torch.equal(merged[0].mlp.experts[0].down_proj.weight.codes, before.codes)
    assert (merged(TOKENS) - want).float().norm() < 0.01 * want.float().norm()


class ListConfig(transformers.PretrainedConfig):
    model_type = "fusedmoe-test-lists"


class ListModel(transformers.PreTrainedModel):
    """A model with code of its own, whose experts transformers does not stack."""

    config_class = ListConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.post_init()

    def forward(self, inputs_embeds):
        for layer in self.layers:
            inputs_embeds = layer(inputs_embeds)
        return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=inputs_embeds)


def test_a_model_with_lists_is_saved_and_found_again(tmp_path, never_decoded):
    if tuple(int(n) for n in transformers.__version__.split(".")[:2]) < (5, 6):
        pytest.skip("QuantConfig needs transformers 5.6")
    ListModel(ListConfig()).bfloat16().save_pretrained(tmp_path / "plain")
    load = functools.partial(ListModel.from_pretrained, dtype=torch.bfloat16)
    model = fusedmoe.quantize(load(tmp_path / "plain"), "nf4")
    want = run(model, TOKENS)
    model.save_pretrained(tmp_path / "coded")
    loaded, made = load(tmp_path / "coded"), load(tmp_path / "plain", quantization_config=fusedmoe.QuantConfig("nf4"))
    skipped = load(tmp_path / "plain", quantization_config=fusedmoe.QuantConfig("nf4", skip="layers.0."))
    never_decoded[0]()
    for found in (loaded, made):
        assert len(stacks(found)) == 2 * 3 * E and type(found.layers[0].dense[0].up_proj) is nn.Linear
        assert type(found.layers[1].mlp.experts[3].up_proj) is QuantLinear
        same(run(found, TOKENS), want)
    never_decoded[1]()
    assert len(stacks(skipped)) == 3 * E
    fusedmoe.dequantize(found).save_pretrained(tmp_path / "back")
    again = fusedmoe.apply(load(tmp_path / "back"))
    assert not stacks(again)
    same(run(again, TOKENS), want)


def test_what_a_linear_cannot_load_is_an_error():
    model = fusedmoe.quantize(listed(), "nf4")
    name, state = "0.mlp.experts.2.gate_proj.weight", model.state_dict()
    before = model[0].mlp.experts[2].gate_proj.weight.codes.clone()
    with pytest.raises(RuntimeError, match="Missing key.*gate_proj.weight"):
        model.load_state_dict({n: t for n, t in state.items() if n != name})
    with pytest.raises(RuntimeError, match=r"gate_proj.weight: its scale is \[1, 2\], expected \[64, 2\] for nf4"):
        model.load_state_dict({**state, f"{name}.scale": state[f"{name}.scale"][:1]})
    with pytest.raises(RuntimeError, match="gate_proj.weight: .quant does not say what its codes mean"):
        model.load_state_dict({n: t for n, t in state.items() if n != f"{name}.quant"})
    down = name.replace("gate", "down")
    with pytest.raises(RuntimeError, match=r"gate_proj.weight is \[128, 64\], expected \[64, 128\]"):
        model.load_state_dict({**state, **{n.replace("down", "gate"): t for n, t in state.items() if n.startswith(down)}})
    assert torch.equal(model[0].mlp.experts[2].gate_proj.weight.codes, before)


# ---- what cannot be done -------------------------------------------------------------------------------------------------------
def test_experts_that_fusedmoe_does_not_run_are_named(caplog):
    class Odd(Block):
        def forward(self, hidden_states):
            out, logits = super().forward(hidden_states)
            return 2 * out, logits

    class Biased(Block):
        def __init__(self):
            super().__init__()
            for expert in self.experts:
                expert.up_proj.bias = nn.Parameter(torch.ones(64))

    for cls in (Odd, Biased):
        model = nn.Sequential(cls()).bfloat16()
        with pytest.raises(ValueError, match="no experts that fusedmoe knows; it has Mlp, which it does not run"):
            fusedmoe.quantize(model, "nf4")
        assert not stacks(model) and all(type(m) is not QuantLinear for m in model.modules())
    both = nn.Sequential(Block(), Odd()).bfloat16()
    fusedmoe.quantize(both, "nf4")
    assert len(stacks(both)) == 3 * E and "Mlp: fusedmoe does not run it, so it is not quantised" in caplog.text
    with pytest.raises(ValueError, match="the model has no experts that fusedmoe knows$"):
        fusedmoe.quantize(nn.Linear(4, 4), "nf4")
    with pytest.raises(ValueError, match=r"is on meta, \[.*\]: there are no numbers in it"):
        fusedmoe.quantize(plain("dbrx").to("meta"), "nf4")
    with pytest.raises(ValueError, match=r"experts.0.gate_proj.weight is on meta, \[64, 128\]: there are no numbers in it"):
        fusedmoe.quantize(nn.Sequential(Block()).to("meta"), "nf4")
