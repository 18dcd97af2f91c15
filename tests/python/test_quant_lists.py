# SPDX-License-Identifier: Apache-2.0
"""Quantised Linears of experts in a ModuleList, as transformers 4 and models with code of their own have them: bitsandbytes, GPTQ, AWQ,
compressed-tensors. They run as they came, with adapters, and state_dict gives the bytes that came."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedmoe
from fusedmoe.quant import QuantTensor
from fusedmoe.quant.linears import QuantLinear, weight_of

E, H, I, K = 4, 128, 64, 2
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(*s, bias=False) for s in ((H, I), (H, I), (I, H)))
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """The routing that Qwen3-MoE has in transformers 4."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.top_k = E, K
        self.gate, self.experts = nn.Linear(H, E, bias=False), nn.ModuleList([Mlp() for _ in range(E)])

    def forward(self, hidden_states):
        shape, x = hidden_states.shape, hidden_states.reshape(-1, H)
        logits = self.gate(x)
        p, ids = F.softmax(logits, -1, dtype=torch.float).topk(K)
        p, out = (p / p.sum(-1, keepdim=True)).to(x.dtype), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, slot = (ids == e).nonzero(as_tuple=True)
            if len(rows):  # bitsandbytes' own product of no rows divides by zero
                out.index_add_(0, rows, expert(x[rows]) * p[rows, slot, None])
        return out.view(shape), logits


def block(replace, dtype=torch.bfloat16):
    """A block with replace(linear) in the place of its experts' Linears; and a twin with the weights `weight(linear)` gives."""
    torch.manual_seed(0)
    model = nn.Sequential(Block()).to(dtype).requires_grad_(False).eval()
    for expert in model[0].experts:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(expert, name, replace(getattr(expert, name)))
    return model


def decoded(model, weight):
    """A copy with plain Linears that hold weight(linear)."""
    twin = nn.Sequential(Block()).to(next(model[0].gate.parameters()).dtype).requires_grad_(False).eval()
    twin[0].gate.load_state_dict(model[0].gate.state_dict())
    for mine, theirs in zip(twin[0].experts, model[0].experts):
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(mine, name).weight.data.copy_(weight(getattr(theirs, name)))
    return twin


@pytest.fixture
def never_decoded(monkeypatch):
    def refuse(self, *_):
        raise AssertionError("weights were decoded")

    return lambda: monkeypatch.setattr(QuantTensor, "dequantize", refuse), monkeypatch.undo


def run(model, x):
    out, _ = model(x)
    (dx,) = torch.autograd.grad(out.float().square().sum(), x)
    return out, dx


def check(model, weight, never_decoded, dtype=torch.bfloat16):
    """It runs fused, without decoding, with the bits of the layer on the weights that `weight` gives, and its state_dict is unchanged."""
    twin, before = decoded(model, weight), {n: t.clone() for n, t in model.state_dict().items()}
    fusedmoe.apply(model)
    fusedmoe.apply(twin)
    assert "fused" in fusedmoe.describe(model).splitlines()[0] and "12 matrices" in fusedmoe.describe(model)
    (row,) = fusedmoe.report(model)
    assert row.path == "fused" and row.dtype in ("nf4", "fp4", "int8", "int4", "fp8"), row
    never_decoded[0]()
    for T in (1, 20):
        x = torch.randn(1, T, H, generator=torch.Generator().manual_seed(T)).to(dtype).requires_grad_()
        for got, want in zip(run(model, x), run(twin, x)):
            assert torch.equal(got, want)
    never_decoded[1]()
    after = model.state_dict()
    assert before.keys() == after.keys(), before.keys() ^ after.keys()
    held = lambda t: (t.dtype, t.contiguous().view(torch.uint8).tolist())  # noqa: E731
    assert all(held(t) == held(after[name]) for name, t in before.items())


# ---- bitsandbytes ------------------------------------------------------------------------------------------------------
def _linear4(kind, nested):
    bnb = pytest.importorskip("bitsandbytes")

    def replace(linear):
        made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, False, torch.bfloat16, nested, kind)
        made.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type=kind, compress_statistics=nested, blocksize=64)
        return made.to("cpu")

    return replace, lambda linear: bnb.functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state)


@pytest.mark.parametrize("kind, nested", [("nf4", False), ("nf4", True), ("fp4", True)])
def test_four_bits_of_bitsandbytes(kind, nested, never_decoded):
    replace, weight = _linear4(kind, nested)
    check(block(replace), weight, never_decoded)


def test_four_bits_after_a_forward_of_their_own():
    """Which may lay the codes out anew for AVX512, and round the scales: what bitsandbytes computes with is what runs."""
    replace, _ = _linear4("nf4", False)
    model = block(replace)
    with torch.no_grad():
        model(torch.randn(1, 40, H).bfloat16())
    packed = getattr(model[0].experts[0].up_proj.weight.quant_state, "packing_format_for_cpu", False)
    functional = pytest.importorskip("bitsandbytes").functional

    def weight(linear):
        if not packed:
            return functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state)
        data, state = functional._convert_weight_packed_for_cpu_inverse(linear.weight.data, copy.copy(linear.weight.quant_state))
        state.absmax = state.absmax.t().float().contiguous().view(-1)
        return functional.dequantize_4bit(data, state)

    twin = decoded(model, weight)
    fusedmoe.apply(model), fusedmoe.apply(twin)
    assert [row.path for row in fusedmoe.report(model)] == ["fused"]
    x = torch.randn(1, 9, H).bfloat16()
    assert torch.equal(model(x)[0], twin(x)[0])


def test_eight_bits_of_bitsandbytes(never_decoded):
    bnb = pytest.importorskip("bitsandbytes")

    def replace(linear):
        made = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, False, has_fp16_weights=False)
        made.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
        return made.to("cpu")

    def weight(linear):
        scale = linear.weight.SCB if linear.weight.SCB is not None else linear.state.SCB
        return bnb.functional.int8_vectorwise_dequant(linear.weight.data, scale)

    check(block(replace), weight, never_decoded)


def test_adapters_on_linears_of_bitsandbytes(never_decoded):
    """QLoRA as most people have it: PEFT on Linear4bit. Loss and gradients are those on the decoded weights."""
    peft = pytest.importorskip("peft")
    replace, weight = _linear4("nf4", True)
    model = block(replace)
    config = peft.LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
    results = []
    for base in (model, decoded(model, weight)):
        torch.manual_seed(1)
        base = peft.get_peft_model(fusedmoe.apply(base), config)
        assert "LoRA in the kernels" in str(fusedmoe.report(base))
        x = torch.randn(1, 9, H, generator=torch.Generator().manual_seed(2)).bfloat16()
        never_decoded[0]()
        loss = base(x)[0].float().square().sum()
        loss.backward()
        never_decoded[1]()
        results.append((loss, {n: p.grad for n, p in base.named_parameters() if p.grad is not None}))
    (loss, grads), (want, wanted) = results
    assert torch.equal(loss, want) and len(grads) == len(wanted) == E * 6
    for got, expected in zip(grads.values(), wanted.values()):
        assert torch.equal(got, expected.to(got.dtype))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_of_transformers_4_with_bitsandbytes(bits, tmp_path, never_decoded):
    """Real loading: from_pretrained replaces the Linears of its experts. QuantConfig is refused by name."""
    transformers = pytest.importorskip("transformers")
    bnb = pytest.importorskip("bitsandbytes")
    if int(transformers.__version__.split(".")[0]) >= 5:
        pytest.skip("transformers 5 stacks its experts")
    with pytest.raises(NotImplementedError, match="fusedmoe.QuantConfig needs transformers 5, this is 4"):
        fusedmoe.QuantConfig("nf4")
    config = transformers.Qwen3MoeConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, head_dim=32, norm_topk_prob=True)  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    how = transformers.BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_quant_type="nf4",
                                          bnb_4bit_compute_dtype=torch.bfloat16, llm_int8_skip_modules=["gate", "lm_head"])  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how, torch_dtype=torch.bfloat16)
    assert isinstance(model.model.layers[0].mlp.experts[0].up_proj, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt))
    fusedmoe.apply(model)
    assert [row.path for row in fusedmoe.report(model)] == ["fused", "fused"], fusedmoe.report(model)
    tokens = torch.arange(12).view(2, 6)
    never_decoded[0]()
    with torch.no_grad():
        got = model(tokens).logits
    never_decoded[1]()
    with torch.no_grad():
        want = fusedmoe.unapply(model)(tokens).logits
    assert (got - want).float().norm() < 0.03 * want.float().norm()


@pytest.mark.parametrize("nested", [False, True])
def test_stacks_that_bitsandbytes_parametrized(nested, never_decoded):
    """bitsandbytes.nn.parametrize.replace_parameter_4bit on stacked experts: no call decodes them."""
    transformers = pytest.importorskip("transformers", minversion="5.6")
    P = pytest.importorskip("bitsandbytes.nn.parametrize")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, head_dim=32, dtype=torch.bfloat16)  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).bfloat16().eval()
    twin = copy.deepcopy(model)
    for layer, plain in zip(model.model.layers, twin.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            P.replace_parameter_4bit(layer.mlp.experts, name, compress_statistics=nested, quant_type="nf4", blocksize=64)
            getattr(plain.mlp.experts, name).data.copy_(getattr(layer.mlp.experts, name))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    fusedmoe.apply(model)
    fusedmoe.apply(twin)
    tokens = torch.arange(12).view(2, 6)
    never_decoded[0]()
    with torch.no_grad():
        got = model(tokens).logits
        assert torch.equal(got, twin(tokens).logits)
    assert "nf4" in fusedmoe.describe(model) and type(model.model.layers[0].mlp.experts).__name__ == "Qwen3MoeExperts"
    after = model.state_dict()
    assert before.keys() == after.keys(), before.keys() ^ after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    for layer in model.model.layers:
        layer.mlp.experts.gate_up_proj.codes.zero_()
    model.load_state_dict(before)
    with torch.no_grad():
        assert torch.equal(got, model(tokens).logits)


# ---- GPTQ, AWQ: the tensors laid out by their documented formats, the forward by the formula ---------------------------------
class Packed(nn.Module):
    """A Linear of GPTQ (order None) or AWQ; its forward unpacks and multiplies, by the formula w = s (q - z)."""

    def __init__(self, linear, order, g=32):
        super().__init__()
        w, self.order, self.g = linear.weight.data.float(), order, g
        self.in_features, self.out_features = linear.in_features, linear.out_features
        s = (w.unflatten(1, (-1, g)).abs().amax(-1) / 7).clamp(min=1e-6).half()
        z = torch.randint(5, 11, s.shape)
        q = (w / s.float().repeat_interleave(g, 1) + z.repeat_interleave(g, 1)).round().clamp(0, 15).long()
        pack = lambda t, dim, order: sum(t.select(dim, i) << 4 * j for j, i in enumerate(order))  # noqa: E731
        fit = lambda t: torch.where(t >= 2**31, t - 2**32, t).to(torch.int32)  # noqa: E731
        if order is None:
            self.register_buffer("qweight", fit(pack(q.t().unflatten(0, (-1, 8)), 1, range(8))))
            self.register_buffer("qzeros", fit(pack((z - 1).t().unflatten(1, (-1, 8)), 2, range(8))))
            self.register_buffer("g_idx", (torch.arange(w.shape[1]) // g).to(torch.int32))
        else:
            self.register_buffer("qweight", fit(pack(q.t().unflatten(1, (-1, 8)), 2, order)))
            self.register_buffer("qzeros", fit(pack(z.t().unflatten(1, (-1, 8)), 2, order)))
        self.register_buffer("scales", s.t().contiguous())

    def values(self):
        unpack = lambda t: torch.stack([(t >> 4 * j) & 15 for j in range(8)], -1)  # noqa: E731
        if self.order is None:
            q, z = unpack(self.qweight.t()).flatten(-2).t(), unpack(self.qzeros).flatten(-2) + 1
        else:
            back = [self.order.index(n) for n in range(8)]
            q, z = (unpack(t)[..., back].flatten(-2) for t in (self.qweight, self.qzeros))
        each = lambda t: t.repeat_interleave(self.g, 0)  # noqa: E731
        return ((q - each(z)).float() * each(self.scales).float()).t()

    def forward(self, x):
        return F.linear(x, self.values().to(x.dtype))


@pytest.mark.parametrize("order", [None, AWQ], ids=["gptq", "awq"])
def test_gptq_and_awq(order, never_decoded):
    torch.manual_seed(3)
    check(block(lambda linear: Packed(linear, order)), Packed.values, never_decoded)


@pytest.mark.parametrize("order", [None, AWQ], ids=["gptq", "awq"])
def test_taken_over_linears_load_train_and_are_put_back(order, never_decoded):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    model, other = (block(lambda linear: Packed(linear, order)) for _ in range(2))
    fusedmoe.apply(other)
    assert all(type(e.up_proj) is QuantLinear for e in other[0].experts)
    x = torch.randn(1, 9, H).bfloat16()
    other.load_state_dict(model.state_dict())
    fusedmoe.apply(model)
    assert torch.equal(model(x)[0], other(x)[0])
    one = model[0].experts[0].gate_proj
    assert torch.equal(one(x), F.linear(x, one.weight.dequantize()))  # by itself, too
    config = peft.LoraConfig(r=4, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(copy.deepcopy(model), config)
    never_decoded[0]()
    tuned(x)[0].float().square().sum().backward()
    never_decoded[1]()
    assert sum(p.grad is not None for p in tuned.parameters()) == E * 6
    with pytest.raises(NotImplementedError, match="fusedmoe.dequantize"):
        tuned.merge_and_unload()
    plain = fusedmoe.dequantize(copy.deepcopy(model))
    assert all(type(e.up_proj) is nn.Linear for e in plain[0].experts) and torch.equal(plain(x)[0], model(x)[0])


def test_a_linear_that_computes_something_else_is_left_alone():
    class Odd(Packed):
        def forward(self, x):
            return 2 * super().forward(x)

    model = fusedmoe.apply(block(lambda linear: Odd(linear, None)))
    assert type(model[0].experts[0].up_proj) is Odd and "own" in {row.path for row in fusedmoe.report(model)}


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_linears_of_gptqmodel(kind, never_decoded):
    """GPTQModel's own modules and their own decoding."""
    if kind == "gptq":
        cls = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    else:
        cls = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch_awq").AwqTorchLinear

    def replace(linear):
        packed = Packed(linear, None if kind == "gptq" else AWQ)
        made = cls(bits=4, group_size=32, sym=False, desc_act=False, in_features=linear.in_features, out_features=linear.out_features,
                   bias=False, register_buffers=True)  # fmt: skip
        for name, t in packed.state_dict().items():
            getattr(made, name).data = t.contiguous()
        if kind == "gptq":
            made.qzeros += 0x11111111  # GPTQModel converts to its second version as it loads
            made.qzero_format(2)
        return made.eval()

    def values(linear):
        if kind == "gptq":
            return linear.dequantize_weight().t()
        gemm = pytest.importorskip("gptqmodel.quantization.awq.utils.packing_utils").dequantize_gemm
        return gemm(linear.qweight, linear.qzeros, linear.scales, 4, 32).t()

    check(block(replace, torch.float16), values, never_decoded, torch.float16)


# ---- compressed-tensors ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scheme", ["W4A16", "FP8_DYNAMIC", "W8A16"])
def test_linears_of_compressed_tensors(scheme, never_decoded):
    """Modules that its own code compressed."""
    ct = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    made = ct.preset_name_to_scheme(scheme, ["Linear"])
    name = {"W4A16": "pack-quantized", "FP8_DYNAMIC": "float-quantized", "W8A16": "pack-quantized"}[scheme]
    made = made.model_copy(update=dict(format=name, input_activations=None))
    made.weights.group_size = 32 if made.weights.group_size else None
    compressor = compressors.BaseCompressor.get_value_from_registry(name)

    def replace(linear):
        w, g, largest = linear.weight.data.float(), made.weights.group_size, {"W4A16": 7, "W8A16": 127}.get(scheme, 448)
        scale = ((w.unflatten(1, (-1, g)) if g else w.unsqueeze(1)).abs().amax(-1) / largest).bfloat16()
        state = compressor.compress({"weight": linear.weight.data, "weight_scale": scale}, made)
        linear.quantization_scheme = made
        del linear.weight
        for key, t in state.items():
            linear.register_parameter(key, nn.Parameter(t, requires_grad=False))
        linear.forward = lambda x: F.linear(x, values(linear))  # as its hook does: decoded, then multiplied
        return linear

    def values(linear):
        return compressor.decompress({n: p.data for n, p in linear.named_parameters()}, made)["weight"]

    check(block(replace), values, never_decoded)


def test_what_is_read_follows_the_linear():
    replace, _ = _linear4("nf4", False)
    linear = replace(nn.Linear(64, 8, bias=False).bfloat16())
    first = weight_of(linear)
    assert weight_of(linear) is first and weight_of(copy.deepcopy(linear)) is not first
    linear.weight = replace(nn.Linear(64, 8, bias=False).bfloat16()).weight
    assert weight_of(linear) is not first
