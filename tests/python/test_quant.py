# SPDX-License-Identifier: Apache-2.0
"""Quantised experts beside what others make of the same bytes: bitsandbytes, transformers, compressed-tensors, PEFT."""

import copy
import io

import pytest
import torch

import fusedmoe
from fusedmoe.quant import FORMATS, QuantTensor


def _bnb():
    return pytest.importorskip("bitsandbytes").functional


def weights(E=3, N=24, K=128, dtype=torch.bfloat16):
    return torch.randn(E, N, K, generator=torch.Generator().manual_seed(E + N + K)).mul_(0.1).to(dtype)


# ---- bytes and values ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_four_bits_are_those_of_bitsandbytes(kind, dtype):
    F, w = _bnb(), weights(dtype=dtype)
    w[0, 0, :64] = 0  # a block of zeros
    data, state = F.quantize_4bit(w, blocksize=64, quant_type=kind)
    ours = QuantTensor.from_weights(w, kind)
    assert torch.equal(ours.scale.flatten(), state.absmax)
    assert torch.equal(ours.codes.flatten(), data.flatten())
    assert torch.equal(ours.dequantize(), F.dequantize_4bit(data, state))
    assert torch.equal(QuantTensor.from_bitsandbytes(data, state).dequantize(), F.dequantize_4bit(data, state))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_nested_scales_of_bitsandbytes(kind):
    F, w = _bnb(), weights(4, 40, 256)
    data, state = F.quantize_4bit(w, blocksize=64, quant_type=kind, compress_statistics=True)
    assert state.nested and torch.equal(QuantTensor.from_bitsandbytes(data, state).dequantize(), F.dequantize_4bit(data, state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_int8_is_that_of_bitsandbytes(dtype):
    F, w = _bnb(), weights(2, 30, 70, dtype)
    ours = QuantTensor.from_weights(w, "int8")
    for e in range(2):
        codes, stats, _ = F.int8_vectorwise_quant(w[e].clone())
        assert torch.equal(ours.codes[e].view(torch.int8), codes) and torch.equal(ours.scale[e].flatten(), stats)
        assert torch.equal(ours.dequantize(torch.float32)[e], F.int8_vectorwise_dequant(codes, stats))


@pytest.mark.parametrize("N, K", [(256, 384), (128, 128)])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks_are_those_of_transformers(N, K, scale_dtype):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    w = torch.randn(2, N, K).to(torch.float8_e4m3fn)
    scale = (torch.rand(2, N // 128, K // 128) * 0.01).to(scale_dtype)
    want = fp8.Fp8Dequantize(None)._dequantize_one(w, scale, torch.bfloat16)
    assert torch.equal(QuantTensor.from_fp8(w, scale).dequantize(), want)


def test_fp8_per_channel_and_halves():
    w = torch.randn(2, 2 * 96, 200).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 192, 1)
    assert torch.equal(QuantTensor.from_fp8(w, scale).dequantize(torch.float32), w.float() * scale)
    scale = torch.rand(2, 2, 2)  # 192 rows: two grids of one row each, not one of two
    want = w.float() * scale.repeat_interleave(96, 1).repeat_interleave(128, 2)[..., :200]
    made = QuantTensor.from_weights(weights(2, 192, 200), FORMATS["fp8"]._replace(flags=2))
    assert made.scale.shape == (2, 2, 2)
    made = QuantTensor(w, scale, made.format, w.shape, torch.float32)
    assert torch.equal(made.dequantize(), want)
    with pytest.raises(ValueError, match=r"\[2, 3, 2\], expected \[2, 2, 2\]"):
        QuantTensor.from_fp8(w, torch.rand(2, 3, 2))


def test_mxfp4_is_that_of_transformers():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = torch.randint(0, 256, (2, 20, 3, 16), dtype=torch.uint8), torch.randint(110, 130, (2, 20, 3), dtype=torch.uint8)
    want = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)  # [E, K, N]
    assert torch.equal(QuantTensor.from_mxfp4(blocks, scales).dequantize().transpose(1, 2), want)


def test_nvfp4_is_that_of_the_formula():
    codes, scale = torch.randint(0, 256, (2, 6, 32), dtype=torch.uint8), (torch.rand(2, 6, 4) * 3).to(torch.float8_e4m3fn)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    values = table[torch.stack((codes & 15, codes >> 4), -1).long()].flatten(2)
    want = values * scale.float().repeat_interleave(16, 2) * torch.tensor([0.5, 0.25]).view(2, 1, 1)
    assert torch.equal(QuantTensor.from_nvfp4(codes, scale, torch.tensor([0.5, 0.25])).dequantize(torch.float32), want)


def test_int4_is_near_and_its_codes_those_of_compressed_tensors():
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    ours = QuantTensor.from_weights(weights(1, 16, 256), "int4")
    nibbles = torch.stack((ours.codes[0] & 15, ours.codes[0] >> 4), -1).flatten(1).to(torch.int8) - 8
    packed = helpers.pack_to_int32(nibbles, 4)
    assert torch.equal(packed.view(torch.uint8).view(16, 128), ours.codes[0])  # lowest bits first: the same bytes
    assert (ours.dequantize(torch.float32) - weights(1, 16, 256).float()).abs().max() < 0.1


# ---- the layer -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("T", [1, 40])
def test_the_layer_and_its_gradients_are_those_on_decoded_weights(format, T):
    E, H, I, k, r = 4, 128, 64, 2, 3
    g = torch.Generator().manual_seed(T)
    draw = lambda *shape: (torch.randn(shape, generator=g) * 0.1).bfloat16().requires_grad_()
    w1, w2 = (QuantTensor.from_weights(draw(*s).detach(), format) for s in ((E, 2 * I, H), (E, H, I)))
    ids = torch.randint(0, E, (T, k), generator=g)
    inputs = [draw(T, H), torch.rand(T, k, generator=g).requires_grad_(), draw(E, 2 * I), draw(E, H)]
    lora = [(draw(E, r, H), draw(E, 2 * I, r), 2.0), (draw(E, r, I).float().detach().requires_grad_(), draw(E, H, r), 0.5)]
    factors = [t for f in lora for t in f[:2]]
    results = []
    for w in ([w1, w2], [w1.dequantize(), w2.dequantize()]):
        x, p, b1, b2 = inputs
        out = fusedmoe.experts(x, ids, p, [*w, b1, b2], flags=fusedmoe.Flag.BIAS, lora=lora)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), [*inputs, *factors])])
        with torch.no_grad():
            results[-1].append(fusedmoe.experts(x, ids, p, [*w, b1, b2], flags=fusedmoe.Flag.BIAS, lora=lora))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_a_quantised_weight_has_no_gradient():
    w1, w2 = QuantTensor.from_weights(weights(2, 32, 64), "nf4"), QuantTensor.from_weights(weights(2, 64, 16), "nf4")
    x, ids, p = torch.randn(3, 64).bfloat16(), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with pytest.raises((ValueError, RuntimeError), match="quantised|gradient"):
        fusedmoe.experts(x, ids, p, [w1.requires_grad_(), w2])


# ---- models ----------------------------------------------------------------------------------------------------------
def tiny():
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, head_dim=32, dtype=torch.bfloat16)  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).bfloat16()


TOKENS = torch.arange(12).view(2, 6)


@pytest.fixture
def never_decoded(monkeypatch):
    """While it is on, decoding a whole stack is an error: what runs reads the codes."""

    def refuse(self, *_):
        raise AssertionError("a stack of weights was decoded")

    return lambda: monkeypatch.setattr(QuantTensor, "dequantize", refuse), monkeypatch.undo


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_is_quantised_described_and_put_back(format, never_decoded):
    model = tiny()
    bytes_before = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if "experts" in n)
    fusedmoe.quantize(model, format)
    held = [p for n, p in model.named_parameters() if "experts" in n]
    assert all(isinstance(p, QuantTensor) and isinstance(p, torch.nn.Parameter) and not p.requires_grad for p in held)
    assert sum(p.nbytes_held() for p in held) < bytes_before * 0.6
    with torch.no_grad():
        never_decoded[0]()
        got = model(TOKENS).logits
        assert format in fusedmoe.describe(model) and "fused" in fusedmoe.describe(model)
        never_decoded[1]()
        want = fusedmoe.dequantize(model)(TOKENS).logits
    assert not any(isinstance(p, QuantTensor) for p in model.parameters())
    assert torch.equal(got, want)


def test_a_quantised_model_is_saved_and_loaded():
    model = fusedmoe.quantize(tiny(), "nf4")
    state = model.state_dict()
    assert all(type(t) is torch.Tensor for t in state.values())
    assert state["model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.uint8
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    fresh = fusedmoe.quantize(tiny(), "int8")  # of another format, which gives way
    fresh.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(fresh(TOKENS).logits, model(TOKENS).logits)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(TOKENS).logits, model(TOKENS).logits)


def test_peft_trains_adapters_on_quantised_experts(never_decoded):
    peft = pytest.importorskip("peft")
    results = []
    for decoded in (False, True):
        model = fusedmoe.quantize(tiny(), "nf4")
        if decoded:
            model = fusedmoe.apply(fusedmoe.dequantize(model))
        config = peft.LoraConfig(r=4, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], init_lora_weights=False)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config)
        never_decoded[0]()
        loss = model(TOKENS, labels=TOKENS).loss
        loss.backward()
        never_decoded[1]()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert grads and all("lora" in n for n in grads)
        results.append((loss, grads))
    assert torch.equal(results[0][0], results[1][0])
    for name, grad in results[0][1].items():
        assert torch.equal(grad, results[1][1][name]), name


def _tuned(format="nf4"):
    peft = pytest.importorskip("peft")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_parameters=targets, init_lora_weights=False)
    return peft.get_peft_model(fusedmoe.quantize(tiny(), format), config).eval()


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("ours", [False, True])
def test_adapters_are_merged_into_decoded_weights(safe, ours):
    model = _tuned()
    with torch.no_grad():
        want = model(TOKENS).logits
        merged = fusedmoe.merge_and_unload(model, safe_merge=safe)[0] if ours else model.merge_and_unload(safe_merge=safe)
        assert not any("lora" in n or isinstance(p, QuantTensor) for n, p in merged.named_parameters())
        error = (merged(TOKENS).logits - want).float().norm() / want.float().norm()
    assert error < 0.02  # W + BA is rounded to bfloat16
    assert not ours or getattr(merged, "hf_quantizer", None) is None


@pytest.mark.parametrize("format", FORMATS)
def test_adapters_are_merged_and_quantised_again_with_the_error(format, tmp_path):
    model = _tuned(format=format)
    base = model.get_base_model().model.layers[0].mlp.experts
    w, delta = base.base_layer.base_layer.gate_up_proj.dequantize(), {}
    for wrapper in (base, base.base_layer):
        delta[wrapper.parameter_name] = wrapper.get_delta_weight("default")
    whole = (w + delta["gate_up_proj"]).float()
    merged, errors = fusedmoe.merge_and_unload(model, requantize=True)
    held = merged.model.layers[0].mlp.experts.gate_up_proj
    assert isinstance(held, QuantTensor) and held.format.name == format and len(errors) == 4
    assert not any("lora" in n for n, _ in merged.named_parameters())
    found = errors["model.layers.0.mlp.experts.gate_up_proj"]
    difference = (held.dequantize(torch.float32) - whole).norm()
    assert abs(found.weights - difference / whole.norm()) < 0.02 * found.weights + 1e-3
    assert abs(found.adapter - difference / (whole - w.float()).norm()) < 0.02 * found.adapter + 1e-2
    if hasattr(merged, "save_pretrained") and int(pytest.importorskip("transformers").__version__.split(".")[1]) >= 6:
        merged.save_pretrained(tmp_path)
        again = type(merged).from_pretrained(tmp_path, dtype=torch.bfloat16)
        held = again.model.layers[0].mlp.experts.gate_up_proj
        assert torch.equal(held.codes, merged.model.layers[0].mlp.experts.gate_up_proj.codes)


def test_a_merge_that_fails_changes_nothing():
    model = _tuned()
    before = {n: p for n, p in model.named_parameters() if isinstance(p, QuantTensor)}
    with torch.no_grad():
        want = model(TOKENS).logits
        for name, p in model.named_parameters():
            if "lora_A" in name and "layers.0." in name:
                kept = p.data.clone(), p
                p.data.fill_(float("nan"))
        with pytest.raises(ValueError, match="NaN"):
            fusedmoe.merge_and_unload(model, safe_merge=True, requantize=True)
        kept[1].data.copy_(kept[0])
    assert all(isinstance(p, QuantTensor) for n, p in model.named_parameters() if n in before and "layers.0." in n)
    assert want.isfinite().all()


@pytest.mark.parametrize("I", [128, 48])
def test_fp8_experts_of_transformers_are_run_as_they_came(I, never_decoded):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=I, num_experts=4, dtype=torch.bfloat16)
    experts = fp8.FP8Experts(config, block_size=(128, 128))
    for name, p in experts.named_parameters():
        p.data = torch.rand(p.shape) * 0.01 if "scale" in name else (torch.randn(p.shape) * 50).to(torch.float8_e4m3fn)
    before = {n: t.clone() for n, t in experts.state_dict().items()}
    w = [QuantTensor.from_fp8(getattr(experts, n), getattr(experts, f"{n}_scale_inv")).dequantize() for n in ("gate_up_proj", "down_proj")]
    x, ids, p = torch.randn(7, 256).bfloat16().requires_grad_(), torch.randint(0, 4, (7, 2)), torch.rand(7, 2)
    model = torch.nn.ModuleList([experts])
    fusedmoe.apply(model)
    never_decoded[0]()
    out = experts(x, ids, p)
    (dx,) = torch.autograd.grad(out.sum(), x)
    never_decoded[1]()
    want = fusedmoe.experts(x, ids, p, w)
    assert torch.equal(out, want) and torch.equal(dx, torch.autograd.grad(want.sum(), x)[0])
    after = experts.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) and before[n].dtype == after[n].dtype for n in before)
