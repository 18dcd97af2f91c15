# SPDX-License-Identifier: Apache-2.0
"""Whole models, patched against unpatched. Runs under every transformers version (see run_versions.sh)."""

import copy
import io
import pickle
import re

import pytest
import torch
import transformers

import fusedmoe
from common import FAMILIES, V5, set_implementation, step, tiny, train, worst
from fusedmoe import ops
from fusedmoe.kernels import apply_kernel

OLD = tuple(int(n) for n in transformers.__version__.split(".")[:2]) < (4, 57)  # these two fail there by themselves
IDS = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(2))
ALL = [f for f in (*FAMILIES, "Qwen3VLMoe") if hasattr(transformers, f + "Config") and not (f in ("Llama4", "JetMoe") and OLD)]


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("kernel", ["fused_moe", "cpu_fused_moe"])
def test_logits_and_gradients(family, kernel, caplog):
    model = tiny(family)
    want, keys = step(model, IDS), list(model.state_dict())
    assert apply_kernel(kernel, model=model) is model
    assert re.search(rf"{type(model).__name__}: {len(fusedmoe.report(model))} MoE layers? (fused|composed) \(", caplog.text)
    got = step(model, IDS)
    assert worst(got, want) <= 1e-5
    assert list(model.state_dict()) == keys
    fusedmoe.unapply(model)
    assert not any("fmoe" in name for m in model.modules() for name in vars(m))
    assert worst(step(model, IDS), want) == 0.0


@pytest.mark.parametrize("family", ["Qwen3Moe", "Qwen3VLMoe", "Mixtral"])
def test_bf16_is_no_worse_than_eager(family):
    if family not in ALL:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    every = dict(num_experts_per_tok=8)  # all experts for every token: no choice that rounding could turn
    exact = step(tiny(family, **every).double(), IDS)
    model = tiny(family, **every).bfloat16()
    eager = step(model, IDS)
    ours = step(fusedmoe.apply(model), IDS)
    assert worst(ours, exact) <= 2 * worst(eager, exact)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Qwen3VLMoe"])
def test_fifty_steps_of_training(family):
    if family not in ALL:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model = tiny(family)
    eager = train(model, 50)
    ours = train(fusedmoe.apply(model), 50)
    assert max(abs(a - b) for a, b in zip(eager, ours, strict=True)) < 1e-3
    assert min(eager[-10:]) < eager[0]


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_router_logits_reach_the_auxiliary_loss(family):
    model = tiny(family, output_router_logits=True)
    want = step(model, IDS)
    got = model(input_ids=IDS, labels=IDS)
    fusedmoe.apply(model)
    ours = model(input_ids=IDS, labels=IDS)
    assert abs(ours.aux_loss.item() - got.aux_loss.item()) < 1e-5
    assert worst(step(model, IDS), want) <= 1e-5


def test_vl_block_under_v4_keeps_its_pair():
    if "Qwen3VLMoe" not in ALL:
        pytest.skip("no Qwen3VLMoe")
    model = fusedmoe.apply(tiny("Qwen3VLMoe"))
    out = model(input_ids=IDS, output_router_logits=True)
    logits = getattr(out, "router_logits", None)
    assert logits is None or logits[0].shape[-1] == 8
    block = next(m for m in model.modules() if type(m).__name__ == "Qwen3VLMoeTextSparseMoeBlock")
    result = block(torch.randn(1, 3, 32))
    assert isinstance(result, tuple) is not V5


def test_copies_and_pickles():
    model = fusedmoe.apply(tiny("Qwen3Moe"))
    want = step(model, IDS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert worst(step(other, IDS), want) == 0.0
        for m in other.modules():
            bound = vars(m).get("forward")
            assert bound is None or bound.__self__ is m
        assert any("_fmoe_layer" in vars(m) or "forward" in vars(m) for m in other.modules())
        fusedmoe.unapply(other)
        assert worst(step(other, IDS), want) < 1e-5
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert worst(step(torch.load(file, weights_only=False), IDS), want) == 0.0


@pytest.mark.parametrize("keep", [None, "nothing"])
def test_same_bits(keep):
    """The plans of the layers have the flag, and on a CPU it changes nothing."""
    model = fusedmoe.apply(tiny("Qwen3Moe"), keep=keep)
    want = step(model, IDS)
    asked, plan = [], ops._plan

    def plans(op, *args, **kwargs):
        if op == ops.EXPERTS:
            asked.append(args[13])
        return plan(op, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_plan", plans)
        assert worst(step(fusedmoe.apply(model, keep=keep, same_bits=True), IDS), want) == 0.0
        assert asked and all(flags & ops.SAME_BITS for flags in asked)
        asked.clear()
        step(fusedmoe.apply(model, keep=keep), IDS)
        assert asked and not any(flags & ops.SAME_BITS for flags in asked)


def test_gradient_checkpointing():
    model = fusedmoe.apply(tiny("Qwen3Moe")).train()
    want = step(model, IDS)
    model.gradient_checkpointing_enable()
    assert worst(step(model, IDS), want) < 1e-6


def test_generate():
    model = tiny("Qwen3Moe").eval()
    want = model.generate(IDS[:1], max_new_tokens=8, do_sample=False)
    assert torch.equal(fusedmoe.apply(model).generate(IDS[:1], max_new_tokens=8, do_sample=False), want)


@pytest.mark.parametrize("state", ["nothing yet", "garbage", "in parts", "meta"])
@pytest.mark.parametrize("family", ALL)
def test_weights_that_come_after_apply(family, state):
    """When a model is patched, FSDP's processes but the first have memory in the place of weights, ZeRO-3's have parts of them."""
    model = tiny(family)
    want, own = step(model, IDS), [(m, dict(m._parameters)) for m in model.modules()]
    for m, parameters in own:
        for name, p in ((n, p) for n, p in parameters.items() if p is not None):
            shape, device = ((0,) if state == "in parts" else p.shape), "meta" if state == "meta" else "cpu"
            m._parameters[name] = torch.nn.Parameter(torch.full(shape, {"garbage": float("nan")}.get(state, 0.0), device=device))
            if state == "in parts":
                m._parameters[name].ds_shape = p.shape
    fusedmoe.apply(model, routers=True)
    late = fusedmoe.report(model)
    for m, parameters in own:
        m._parameters.update(parameters)
    assert worst(step(model, IDS), want) <= 1e-5
    ours = fusedmoe.report(fusedmoe.apply(tiny(family), routers=True))
    assert [row[:3] for row in late] == [row[:3] for row in ours] and {row.path for row in ours} <= {"fused", "composed"} and len(ours)


def test_an_architecture_without_experts_is_left_alone(caplog):
    config = transformers.LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                      num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    before = {n: dict(vars(m)) for n, m in model.named_modules()}
    assert apply_kernel("fused_moe", model=model) is model
    assert "LlamaForCausalLM" in caplog.text and "unchanged" in caplog.text
    assert all(dict(vars(m)).keys() == before[n].keys() for n, m in model.named_modules())


def test_architectures_may_be_none():
    model = tiny("Qwen3Moe")
    model.config.architectures = None
    want = step(model, IDS)
    assert worst(step(apply_kernel("fused_moe", model=model), IDS), want) <= 1e-5


def test_gelu_is_not_taken_for_silu():
    model = tiny("Qwen3Moe", hidden_act="gelu")
    want = step(model, IDS)
    assert worst(step(fusedmoe.apply(model), IDS), want) <= 1e-5


@pytest.mark.skipif(not V5, reason="v5")
def test_names_of_v5():
    from fusedmoe.integrations import transformers as hf

    assert hf.register()
    model = tiny("Qwen3Moe")
    want = step(model, IDS)
    model.set_experts_implementation("fusedmoe")
    assert worst(step(model, IDS), want) <= 1e-5
    if hasattr(model, "get_experts_implementation"):
        assert model.get_experts_implementation()[""] == "fusedmoe"
    config = copy.deepcopy(model.config)
    other = type(model)._from_config(config, experts_implementation="fusedmoe")
    assert other.config._experts_implementation == "fusedmoe"
    other.load_state_dict(model.state_dict())
    assert worst(step(other, IDS), want) <= 1e-5
    set_implementation(model, "eager")
    with pytest.raises((ValueError, KeyError)):
        model.set_experts_implementation("no such thing")
        step(model, IDS)


@pytest.mark.skipif(not V5, reason="v5")
def test_from_pretrained_and_saving(tmp_path):
    model = tiny("Qwen3Moe")
    want = step(model, IDS)
    fusedmoe.apply(model).save_pretrained(tmp_path)
    other = type(model).from_pretrained(tmp_path, experts_implementation="fusedmoe")
    assert other.config._experts_implementation == "fusedmoe"
    assert worst(step(other, IDS), want) <= 1e-5
    plain = type(model).from_pretrained(tmp_path)
    assert plain.config._experts_implementation != "fusedmoe"  # the choice is not written into the checkpoint
    assert worst(step(plain, IDS), want) <= 1e-5


@pytest.mark.skipif(not V5, reason="v5")
def test_v5_experts_are_not_patched():
    model = fusedmoe.apply(tiny("Qwen3Moe"))
    assert not any("forward" in vars(m) for m in model.modules() if hasattr(m, "_apply_gate"))


@pytest.mark.skipif(V5, reason="v4")
@pytest.mark.parametrize("late", [False, True])
def test_v4_adapters_are_never_ignored(late):
    peft = pytest.importorskip("peft")
    model = tiny("Qwen3Moe")
    lora = peft.LoraConfig(r=2, target_modules=["gate_proj", "up_proj", "down_proj"], init_lora_weights=False)
    if late:
        fusedmoe.apply(model)
    model = peft.get_peft_model(model, lora)
    reference = copy.deepcopy(model)
    fusedmoe.unapply(reference)
    want = step(reference, IDS)
    if not late:
        fusedmoe.apply(model)
    got = step(model, IDS)
    assert worst(got, want) <= 1e-5
    assert any(float(g.abs().max()) > 0 for n, g in got[2].items() if "lora" in n and "experts" in n)


class Quantized(torch.nn.Linear):
    """A weight in 8 bits and a scale, as quantizers put in the place of a Linear."""

    def __init__(self, linear):
        torch.nn.Module.__init__(self)
        self.scale = float(linear.weight.detach().abs().max()) / 127
        self.weight = torch.nn.Parameter((linear.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return x @ (self.weight * self.scale).T


@pytest.mark.skipif(V5, reason="v4")
@pytest.mark.parametrize("late", [False, True])
def test_v4_quantized_linears_are_their_own(late, caplog):
    model = tiny("Qwen3Moe")
    if late:
        fusedmoe.apply(model)
    expert = model.model.layers[0].mlp.experts[3]
    for name in ("gate_proj", "up_proj", "down_proj"):
        setattr(expert, name, Quantized(getattr(expert, name)))
    reference = fusedmoe.unapply(copy.deepcopy(model))
    if not late:
        fusedmoe.apply(model)
    with torch.no_grad():
        assert torch.allclose(model(IDS).logits, reference(IDS).logits, atol=1e-6)
    assert "Qwen3MoeSparseMoeBlock" in caplog.text and "quantized" in caplog.text


@pytest.mark.skipif(V5, reason="v4")
def test_v4_idle_experts_get_zero_gradients():
    model = fusedmoe.apply(tiny("Qwen3Moe"))
    ids = torch.full((1, 2), 5)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "experts" in n)


@pytest.mark.skipif(V5, reason="v4")
def test_v4_keeps_hooks_and_modes():
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny("Qwen3Moe").train()
    block = model.model.layers[0].mlp
    seen = []

    class Count(hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(module)
            return args, kwargs

    hooks.add_hook_to_module(block, Count())
    model.model.layers[1].mlp.gate.eval()
    want = step(model, IDS)
    fusedmoe.apply(model)
    assert block.training and not model.model.layers[1].mlp.gate.training
    assert worst(step(model, IDS), want) <= 1e-5 and len(seen) == 2
    assert worst(step(fusedmoe.unapply(model), IDS), want) == 0.0 and len(seen) == 3


@pytest.mark.skipif(V5, reason="v4")
def test_v4_what_cannot_be_proven_is_left_alone(caplog, monkeypatch):
    model = tiny("Qwen3Moe")
    block = type(model.model.layers[0].mlp)
    own = block.forward

    def forward(self, hidden_states):
        states, logits = own(self, hidden_states)
        return 2 * states, logits

    monkeypatch.setattr(block, "forward", forward)
    assert fusedmoe.apply(model) is model
    assert "left as it is" in caplog.text and "unchanged" in caplog.text
