# SPDX-License-Identifier: Apache-2.0
"""Quantised experts on a CUDA device: the same bits as the layer on weights that were decoded on the CPU."""

import copy

import pytest
import torch

import fusedmoe
from cuda_common import HOPPER, ODD, layer, needs_a_device
from fusedmoe import Flag, ops
from fusedmoe.quant import FORMATS, QuantTensor

pytestmark = needs_a_device


def pairs(format, T, sizes, dtype=torch.bfloat16, flags=0, act=ops.SWIGLU):
    """x, ids, p, the weights quantised, and the same decoded; both on the device."""
    H, I, E, k = sizes
    x, ids, p, w = layer(T, H, I, E, k, dtype, act=act, flags=flags & ~(ops.TRANSPOSED | ops.LIST))
    coded = [QuantTensor.from_weights(t.detach().cpu(), format) for t in w[:2]]
    plain = [t.dequantize().cuda() for t in coded]
    coded = [t.map(torch.Tensor.cuda) for t in coded]
    return x, ids, p, coded + w[2:], plain + w[2:]


def factors(sizes, rank, dtype):
    H, I, E, _ = sizes
    g = torch.Generator().manual_seed(8)
    shapes = (E, rank, H), (E, 2 * I, rank), (E, rank, I), (E, H, rank)
    return [(torch.randn(s, generator=g) / s[-1] ** 0.5).to("cuda", dtype).requires_grad_() for s in shapes]


def results(x, ids, p, w, flags=0, act=ops.SWIGLU, lora=(), leaves=()):
    out = fusedmoe.experts(x, ids, p, w, act, flags, lora=(lora[:2], lora[2:]) if lora else ())
    return out, *torch.autograd.grad(out.float().square().sum(), [x, p, *leaves, *lora])


def same(got, want, exact=False):
    """Results, one by one. On Hopper, in bfloat16, the fused backward that decodes W2 itself keeps da in f32, where the one of plain
    weights rounds it to 11 bits of a row's largest: then elements of bfloat16 that come of it are a unit in their last place apart."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        apart = 0.0 if exact or i == 0 or got[0].dtype != torch.bfloat16 else 0.01
        assert torch.equal(a, b) or (a.float() - b.float()).norm() <= apart * b.float().norm()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("sizes", [HOPPER, ODD], ids=["hopper", "odd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("T", [40, 300])
def test_layer_and_gradients_are_those_on_decoded_weights(format, sizes, dtype, T):
    x, ids, p, coded, plain = pairs(format, T, sizes, dtype)
    for rank, kind in ((0, dtype), (16, dtype), (16, torch.float32)):
        lora = factors(sizes, rank, kind) if rank else []
        same(results(x, ids, p, coded, lora=lora), results(x, ids, p, plain, lora=lora), exact=sizes is ODD)


@pytest.mark.parametrize("flags", [ops.BIAS, ops.BIAS | ops.INTERLEAVED, ops.RECOMPUTE], ids=["bias", "interleaved", "recompute"])
def test_biases_and_orders_of_h(flags):
    for sizes in (HOPPER, ODD):
        x, ids, p, coded, plain = pairs("mxfp4", 100, sizes, flags=flags)
        same(*(results(x, ids, p, w, flags, leaves=w[2:]) for w in (coded, plain)))


def test_lists_and_stacks_that_are_turned():
    H, I, E, _ = HOPPER
    x, ids, p, (w1, w2), plain = pairs("nf4", 100, HOPPER)
    one = lambda t, e: QuantTensor(t.codes[e], t.scale[e], t.format, t.shape[1:], t.dtype)  # noqa: E731
    part = lambda t, a, b: QuantTensor(t.codes[a:b], t.scale[a:b], t.format, torch.Size((b - a, H)), t.dtype)  # noqa: E731
    ones = [one(w1, e) for e in range(E)]
    coded = [part(t, 0, I) for t in ones] + [part(t, I, 2 * I) for t in ones] + [one(w2, e) for e in range(E)]
    decoded = [*plain[0][:, :I], *plain[0][:, I:], *plain[1]]
    same(results(x, ids, p, coded, Flag.LIST), results(x, ids, p, decoded, Flag.LIST), exact=True)
    turned = [w1.turned(), w2.turned()]
    same(results(x, ids, p, turned, Flag.TRANSPOSED), results(x, ids, p, plain))


@pytest.mark.parametrize("T", [1, 3, 16, 500])
def test_inference_is_near_the_layer_on_decoded_weights(T):
    x, ids, p, coded, plain = pairs("nf4", T, HOPPER)
    with torch.no_grad():
        got, want = (fusedmoe.experts(x, ids, p, w).float() for w in (coded, plain))
    # A rounding to bfloat16 is 1.6e-3 in the norm. Of these eight are apart: both gates' weights, W2, rows, a and out of either: 4.5e-3.
    assert (got - want).norm() <= 6e-3 * want.norm()


@pytest.mark.parametrize("T", [1, 200])
def test_factors_in_float32_are_rounded_by_the_library(T):
    x, ids, p, w = layer(T, *HOPPER)
    wide = factors(HOPPER, 16, torch.float32)
    wide[1] = wide[1].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()  # stored by columns
    narrow = [t.detach().bfloat16().contiguous().requires_grad_() for t in wide]
    for got, want in zip(results(x, ids, p, w, lora=wide), results(x, ids, p, w, lora=narrow), strict=True):
        assert torch.equal(got, want) or (got.dtype != want.dtype and torch.equal(got.to(want.dtype), want))
    with torch.no_grad():
        both = [fusedmoe.experts(x, ids, p, w, lora=(f[:2], f[2:])) for f in (wide, narrow)]
    assert torch.equal(*both)


@pytest.mark.parametrize("format", FORMATS)
def test_codes_made_and_read_on_the_device_are_those_of_the_cpu(format):
    w = torch.randn(37, 24, 128).bfloat16()
    here, there = QuantTensor.from_weights(w, format), QuantTensor.from_weights(w.cuda(), format)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(here.parts().values(), there.parts().values(), strict=True))
    assert torch.equal(there.dequantize().cpu(), here.dequantize()) and there.dequantize().is_cuda


def test_a_quantised_weight_has_no_gradient():
    x, ids, p, coded, _ = pairs("nf4", 4, HOPPER)
    with pytest.raises(ValueError, match="quantised and requires a gradient"):
        fusedmoe.experts(x, ids, p, [coded[0].requires_grad_(), coded[1]])


def tiny():
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(vocab_size=64, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, head_dim=64, dtype=torch.bfloat16)  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).bfloat16().cuda()


def never(self, *_):
    raise AssertionError("a stack of weights was decoded")


def test_a_model_is_quantised_on_the_device_trains_and_generates(monkeypatch):
    peft = pytest.importorskip("peft")
    tokens, outcomes = torch.arange(24, device="cuda").view(2, 12), []
    for decoded in (False, True):
        model = fusedmoe.quantize(tiny(), "nf4")
        if decoded:
            model = fusedmoe.apply(fusedmoe.dequantize(model))
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_parameters=targets, init_lora_weights=False))
        with monkeypatch.context() as patch:
            if not decoded:
                patch.setattr(QuantTensor, "dequantize", never)
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            model.generate(input_ids=tokens[:, :4], max_new_tokens=4, min_new_tokens=4, do_sample=False)
        outcomes.append([loss, *[t.grad for t in model.parameters() if t.grad is not None]])
    for got, want in zip(*outcomes, strict=True):
        assert torch.equal(got, want)


def test_a_quantised_model_moves_to_the_device():
    model = fusedmoe.quantize(tiny().cpu(), "mxfp4")
    twin = copy.deepcopy(model).cuda()
    held = [t for n, t in twin.named_parameters() if "experts" in n]
    assert all(isinstance(t, QuantTensor) and t.codes.is_cuda for t in held)
    tokens = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert (twin(tokens.cuda()).logits.cpu() - model(tokens).logits).abs().max() < 0.1


def test_a_compiled_layer_reads_the_codes():
    x, ids, p, coded, _ = pairs("nf4", 60, HOPPER)
    lora = factors(HOPPER, 8, torch.bfloat16)
    run = lambda x, p: fusedmoe.experts(x, ids, p, coded, lora=(lora[:2], lora[2:]))  # noqa: E731
    both = []
    for f in (torch.compile(run), run):
        out = f(x, p)
        both.append((out, *torch.autograd.grad(out.float().sum(), (x, p, *lora))))
    for got, want in zip(*both, strict=True):
        assert torch.equal(got, want)
