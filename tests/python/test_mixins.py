# SPDX-License-Identifier: Apache-2.0
"""What transformers' own model tests ask of an experts implementation (tests/external runs those), for wheels without tests."""

import pytest
import torch
import transformers

import fusedmoe
from common import V5, rel, set_implementation, tiny

if not V5:
    pytest.skip("v4 has one implementation", allow_module_level=True)

FAMILIES = ["Qwen3Moe", "Qwen3VLMoe", "Mixtral", "DeepseekV3", "GptOss", "Glm4Moe", "Olmoe", "Qwen2Moe", "NemotronH"]
IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(4))
BATCH = dict(input_ids=IDS, attention_mask=torch.ones_like(IDS), labels=IDS)


def model_of(family: str, **extra):
    if not hasattr(transformers, family + "Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return tiny(family, **extra)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_eager_matches(family, dtype):
    """Weights of 0.08 and logits of order one: equal within a few roundings of the dtype, whichever implementation it is."""
    model = model_of(family).to(dtype).eval()
    results = {}
    for name in ("eager", "batched_mm", "grouped_mm", "fusedmoe"):
        set_implementation(model, name)
        with torch.no_grad():
            results[name] = model(input_ids=IDS).logits
    limit = 4 * torch.finfo(dtype).eps
    assert rel(results["fusedmoe"], results["eager"]) <= max(limit, 2 * rel(results["grouped_mm"], results["eager"]))


@pytest.mark.parametrize("family", FAMILIES)
def test_composed_matches_grouped_mm(family):
    """Where the model's own operations stand between the products, bfloat16 is rounded as grouped_mm rounds it; in gpt-oss always."""
    model, ids = model_of(family, num_experts_per_tok=4).bfloat16(), torch.randint(8, (400, 4), generator=torch.Generator().manual_seed(5))
    module = next(m for m in model.modules() if hasattr(m, "_apply_gate"))
    x, p = torch.randn(400, 32).bfloat16().requires_grad_(), torch.rand(400, 4).bfloat16().requires_grad_()
    found = {}
    for name in ("grouped_mm", "fusedmoe", "fusedmoe_composed"):
        set_implementation(model, name)
        out = module(x, ids, p)
        found[name] = (out, *torch.autograd.grad(out, (x, p, *module.parameters()), torch.ones_like(out)))
    own, fused, composed = found.values()
    differ = lambda a: float((a[0] != own[0]).float().mean())  # noqa: E731
    assert differ(composed) <= 1e-3  # another order of summation may turn a rounding, on another ISA
    assert differ(fused) <= 1e-3 if family == "GptOss" else differ(fused) > 0.1
    # torch sums the gradient of a bias in bfloat16
    assert all(rel(a, b) < 3e-2 for ours in (fused, composed) for a, b in zip(ours, own, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_composed_matches_eager_within_less_than_an_ulp(family):
    """transformers' own comparison: bfloat16, two experts a token, weights as they are initialised, 1e-4."""
    model = model_of(family).bfloat16().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.02) if p.dim() > 1 else None
    states = {}
    ours = ("fusedmoe_composed", *(("fusedmoe",) if family == "GptOss" else ()))
    for name in ("eager", "grouped_mm", *ours):
        set_implementation(model, name)
        with torch.no_grad():
            states[name] = model(input_ids=IDS, output_hidden_states=True).hidden_states
    for name in ("grouped_mm", *(("eager",) if family in ("GptOss", "Qwen3Moe", "NemotronH") else ())):  # grouped_mm passes there too
        for mine in ours:
            torch.testing.assert_close(states[mine], states[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_training(family, checkpointing):
    """Every parameter that eager gives a gradient gets one, with and without checkpointing, and twice the same."""
    model = model_of(family).train()
    if checkpointing and not model.supports_gradient_checkpointing:
        pytest.skip(f"{family} of transformers {transformers.__version__} says that it cannot be checkpointed")
    model(**BATCH).loss.backward()
    want = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    fusedmoe.apply(model, routers=True)
    if checkpointing:
        model.gradient_checkpointing_enable()
    for _ in range(2):
        model.zero_grad()
        model(**BATCH).loss.backward()
        got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        scale = max(float(g.norm()) for g in want.values())
        assert got.keys() == want.keys() and all((got[n] - g).norm() <= 1e-5 * max(float(g.norm()), 1e-2 * scale) for n, g in want.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_overfit(family):
    """One sequence, learned by heart, then generated."""
    model = fusedmoe.apply(model_of(family), routers=True).train()
    ids = torch.arange(3, 15)[None]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    start = dict(input_ids=ids[:, :4], attention_mask=torch.ones(1, 4, dtype=torch.long))
    assert torch.equal(model.eval().generate(**start, max_new_tokens=8, do_sample=False, eos_token_id=None), ids)


@pytest.mark.parametrize("how", [dict(), dict(num_beams=3), dict(use_cache=False), dict(cache_implementation="static")])
@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3", "GptOss"])
def test_generate(family, how):
    model = model_of(family).eval()
    arguments = dict(attention_mask=torch.ones_like(IDS), max_new_tokens=5, do_sample=False, eos_token_id=None, disable_compile=True, **how)
    want = model.generate(IDS, **arguments)
    assert torch.equal(fusedmoe.apply(model, routers=True).generate(IDS, **arguments), want)


@pytest.mark.parametrize("family", ["Mixtral", "Glm4Moe", "NemotronH"])
def test_compile_forward_fullgraph(family):
    """The others are in test_training.py."""
    torch._dynamo.reset()
    model = fusedmoe.apply(model_of(family), routers=True).eval()
    with torch.no_grad():
        want = model(input_ids=IDS, use_cache=False).logits
        assert rel(torch.compile(model, fullgraph=True, backend="aot_eager")(input_ids=IDS, use_cache=False).logits, want) < 1e-5
