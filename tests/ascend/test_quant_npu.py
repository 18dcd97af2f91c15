# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: I001
"""Quantised experts from Python on the simulated NPU, with the real torch_npu: the bits of the layer on decoded weights.

Codes and scales are on the device; what decodes them there are launches, nothing waits and nothing is copied.
"""

from __future__ import annotations

import copy

import npu  # before torch
import pytest
import torch

import fusedmoe
from fusedmoe import Flag, ops
from fusedmoe.quant import FORMATS, QuantTensor
from models import train

SIZES = (64, 96, 4, 2)  # H, I, E, k


@pytest.fixture(autouse=True)
def clean():
    """No violation of CANN's rules, no descriptor or executor left, whatever a test does."""
    torch.npu.set_device(0)
    npu.forgive()
    yield
    torch.npu.synchronize()
    assert npu.violation() == ""
    assert [npu.get(f"live_{n}") for n in ("tensors", "lists", "scalars", "arrays", "executors")] == [0] * 5


def drawn(shape, dtype, scale=1.0, seed=1):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(dtype).npu()


def pairs(format, dtype=torch.bfloat16, T=20, flags=0):
    """x, ids, p, the weights quantised, and the same decoded; all on the device."""
    H, I, E, k = SIZES
    x, p = drawn((T, H), dtype).requires_grad_(), drawn((T, k), torch.float32, seed=2).requires_grad_()
    ids = torch.randint(0, E, (T, k), generator=torch.Generator().manual_seed(3)).npu()
    coded = [QuantTensor.from_weights(drawn(s, dtype, 0.2, 4), format) for s in ((E, 2 * I, H), (E, H, I))]
    biases = [drawn(s, dtype, seed=5).requires_grad_() for s in ((E, 2 * I), (E, H))] if flags & ops.BIAS else []
    return x, ids, p, coded + biases, [t.dequantize() for t in coded] + biases


def factors(rank, dtype):
    H, I, E, _ = SIZES
    shapes = (E, rank, H), (E, 2 * I, rank), (E, rank, I), (E, H, rank)
    return [drawn(s, dtype, s[-1] ** -0.5, 8).requires_grad_() for s in shapes]


def results(x, ids, p, w, flags=0, lora=(), leaves=()):
    adapters = (lora[:2], lora[2:]) if lora else ()
    out = fusedmoe.experts(x, ids, p, w, ops.SWIGLU, flags, lora=adapters)
    return out, *torch.autograd.grad(out.float().square().sum(), [x, p, *leaves, *lora])


def same(one, other):
    for got, want in zip(one, other, strict=True):
        assert got.device.type == "npu"
        assert torch.equal(got.cpu(), want.cpu())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_layer_and_gradients_are_those_on_decoded_weights(format, dtype):
    x, ids, p, coded, plain = pairs(format, dtype)
    assert all(t.device.type == "npu" for w in coded for t in w.parts().values())
    for rank, kind in ((0, dtype), (4, dtype), (4, torch.float32)):
        lora = factors(rank, kind) if rank else []
        same(results(x, ids, p, coded, lora=lora), results(x, ids, p, plain, lora=lora))


@pytest.mark.parametrize("flags", [ops.BIAS, ops.BIAS | ops.INTERLEAVED, ops.RECOMPUTE])
def test_biases_and_orders_of_h(flags):
    x, ids, p, coded, plain = pairs("mxfp4", flags=flags)
    same(*[results(x, ids, p, w, flags, leaves=w[2:]) for w in (coded, plain)])


def test_lists_and_stacks_that_are_turned():
    H, I, E, _ = SIZES
    x, ids, p, (w1, w2), plain = pairs("nf4")
    one = lambda t, e: QuantTensor(t.codes[e], t.scale[e], t.format, t.shape[1:], t.dtype)  # noqa: E731
    part = lambda t, a, b: QuantTensor(t.codes[a:b], t.scale[a:b], t.format, torch.Size((b - a, H)), t.dtype)  # noqa: E731
    ones = [one(w1, e) for e in range(E)]
    coded = [part(t, 0, I) for t in ones] + [part(t, I, 2 * I) for t in ones] + [one(w2, e) for e in range(E)]
    decoded = [*plain[0][:, :I], *plain[0][:, I:], *plain[1]]
    same(results(x, ids, p, coded, Flag.LIST), results(x, ids, p, decoded, Flag.LIST))
    turned = [w1.turned(), w2.turned()]
    same(results(x, ids, p, turned, Flag.TRANSPOSED), results(x, ids, p, plain))


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_waits_and_nothing_is_copied(format):
    x, ids, p, coded, _ = pairs(format)
    results(x, ids, p, coded)
    with npu.Count() as n:
        out = fusedmoe.experts(x, ids, p, coded)
        out.backward(out.detach())
    assert (n.syncs, n.copies, n.hidden) == (0, 0, 0)
    assert n.launches > 0


@pytest.mark.parametrize("format", FORMATS)
def test_codes_made_and_read_on_the_device_are_those_of_the_cpu(format):
    w = torch.randn(17, 24, 128).bfloat16()
    here, there = QuantTensor.from_weights(w, format), QuantTensor.from_weights(w.npu(), format)
    for a, b in zip(here.parts().values(), there.parts().values(), strict=True):
        assert torch.equal(a, b.cpu())
    assert torch.equal(there.dequantize().cpu(), here.dequantize())
    assert there.dequantize().device.type == "npu"


def test_a_quantised_weight_has_no_gradient():
    x, ids, p, coded, _ = pairs("nf4")
    with pytest.raises(ValueError, match="quantised and requires a gradient"):
        fusedmoe.experts(x, ids, p, [coded[0].requires_grad_(), coded[1]])


@pytest.mark.parametrize("turned", [False, True], ids=["in_out", "out_in"])
@pytest.mark.parametrize("format", FORMATS)
def test_grouped_matmul(format, turned):
    E, K, N = 5, 64, 96
    coded = QuantTensor.from_weights(drawn((E, N, K) if turned else (E, K, N), torch.bfloat16, 0.2), format)
    plain = coded.dequantize()
    both = (coded.turned(), plain.transpose(1, 2)) if turned else (coded, plain)
    x = drawn((40, K), torch.bfloat16).requires_grad_()
    rows = torch.tensor([0, 17, 3, 1, 15]).npu()
    outcomes = []
    for w in both:
        y = fusedmoe.grouped_matmul(x, w, rows)
        outcomes.append((y[:36], torch.autograd.grad(y[:36].float().square().sum(), x)[0][:36]))
    same(*outcomes)


# ---- models ----


def tiny():
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        moe_intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=64,
    )
    config._attn_implementation = "eager"
    return transformers.Qwen3MoeForCausalLM(config)


def never(self, *_):
    raise AssertionError("a stack of weights was decoded")


@pytest.mark.parametrize("format", ["nf4", "mxfp4", "fp8", "int8"])
def test_a_model_is_quantised_on_the_device_and_trains(monkeypatch, format):
    ids = torch.randint(0, 60, (2, 6), generator=torch.Generator().manual_seed(3)).npu()
    model = fusedmoe.quantize(tiny().npu(), format)
    held = [p for n, p in model.named_parameters() if "experts" in n]
    assert held and all(isinstance(p, QuantTensor) and p.codes.device.type == "npu" for p in held)
    assert format in fusedmoe.describe(model)
    plain = fusedmoe.apply(fusedmoe.dequantize(copy.deepcopy(model)))
    for name, p in plain.named_parameters():
        p.requires_grad_("experts" not in name)
    want = train(plain, ids)
    monkeypatch.setattr(QuantTensor, "dequantize", never)
    before = npu.get("aclnnMoeTokenUnpermuteGrad")
    assert train(model, ids) == want
    assert npu.get("aclnnMoeTokenUnpermuteGrad") > before, "the backend was not used"


@pytest.mark.parametrize("first", ["moved", "applied"])
def test_fp8_experts_of_transformers_are_run_as_they_came(first):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(hidden_size=256, moe_intermediate_size=128, num_experts=4, dtype=torch.bfloat16)
    experts = fp8.FP8Experts(config, block_size=(128, 128))
    for name, p in experts.named_parameters():
        drawn = torch.rand(p.shape) * 0.01 if "scale" in name else torch.randn(p.shape) * 50
        p.data = drawn if "scale" in name else drawn.to(torch.float8_e4m3fn)
    names = ("gate_up_proj", "down_proj")
    w = [QuantTensor.from_fp8(getattr(experts, n), getattr(experts, f"{n}_scale_inv")).dequantize() for n in names]
    model = torch.nn.ModuleList([experts])
    model = fusedmoe.apply(model.npu()) if first == "moved" else fusedmoe.apply(model).npu()
    assert isinstance(experts.gate_up_proj, QuantTensor)
    assert experts.gate_up_proj.codes.device.type == "npu"
    x = torch.randn(30, 256).bfloat16().npu().requires_grad_()
    ids, p = torch.randint(0, 4, (30, 2)).npu(), torch.rand(30, 2).npu()
    out, want = experts(x, ids, p), fusedmoe.experts(x, ids, p, [t.npu() for t in w])
    same((out, *torch.autograd.grad(out.float().sum(), x)), (want, *torch.autograd.grad(want.float().sum(), x)))


def test_a_quantised_model_moves_to_the_device():
    model = fusedmoe.quantize(tiny(), "mxfp4")
    twin = copy.deepcopy(model).npu()
    held = [p for n, p in twin.named_parameters() if "experts" in n]
    assert held and all(isinstance(p, QuantTensor) and p.codes.device.type == "npu" for p in held)
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        here, there = model(input_ids=ids).logits, twin(input_ids=ids.npu()).logits.cpu()
    assert (here - there).abs().max() < 1e-4 * here.abs().max()


def test_adapters_of_peft_on_a_quantised_model():
    peft = pytest.importorskip("peft")
    tokens, outcomes = torch.arange(24).view(2, 12).npu(), []
    for decoded in (False, True):
        model = fusedmoe.quantize(tiny().npu(), "nf4")
        if decoded:
            model = fusedmoe.apply(fusedmoe.dequantize(model))
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        torch.manual_seed(1)
        config = peft.LoraConfig(r=8, target_parameters=targets, init_lora_weights=False)
        model = peft.get_peft_model(model, config)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        outcomes.append([loss.detach(), *[t.grad for t in model.parameters() if t.grad is not None]])
    same(*outcomes)
