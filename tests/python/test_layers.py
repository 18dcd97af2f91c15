# SPDX-License-Identifier: Apache-2.0
"""Every MoE layer of the installed transformers as docs/models.md has it, ours against its own; and nothing that is not there."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version

import fusedmoe
from common import V5, rel, step, tiny
from fusedmoe.integrations import layers, routers, seams

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/external"))
import table

VERSION = Version(transformers.__version__)
NEW = Version("5.13") <= VERSION  # routers return logits, weights and ids since then
CLASSES = table.classes()
LISTED = table.listed(ROOT / "docs/models.md")
TABLE = (ROOT / "docs/models.md").read_text().partition(f"<!-- transformers {VERSION} -->")[2].partition("<!-- end -->")[0]
if transformers.__version__ not in LISTED and Version("5.6") > VERSION:
    pytest.skip("some models' own forwards are wrong before 5.6 (HunYuan, Phi-MoE), or others", allow_module_level=True)
IDS = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("directory", CLASSES)
def test_every_layer(directory):
    for row in table.rows(directory, CLASSES[directory], half=False):
        assert max(row.get("f32", [0])) <= 2e-6, row
        assert row["experts"] != "left alone" or directory in table.NOTES, row
        plain = directory == "jamba" and Version("5.21") > VERSION  # a Linear, its softmax and choice in the block
        assert row["router"] == "fused" or directory in table.NOTES or plain or not NEW, row
        words = directory, " ".join(CLASSES[directory]), row["layer"], row["experts"], row["router"]
        assert not TABLE or f"| {' | '.join(words)} |" in TABLE, f"docs/models.md has it otherwise: {words}"


def test_every_class_was_looked_at():
    """A new release with a new class, or one more of them, fails here: run tests/external/table.py docs/models.md and read the row."""
    newest = max(LISTED, key=Version)
    if transformers.__version__ not in LISTED and Version(newest) > VERSION:
        pytest.skip(f"docs/models.md has no table for {transformers.__version__}")
    known = LISTED.get(transformers.__version__, LISTED[newest])
    assert {m: set(names) for m, names in CLASSES.items()} == known


@pytest.mark.skipif(not V5, reason="v5")
def test_every_flag_was_looked_at():
    from transformers.integrations import moe

    flags = {n for n in inspect.signature(moe.use_experts_implementation).parameters if n.startswith(("has_", "is_"))}
    assert flags and flags <= layers._FLAGS


OUTSIDE = {
    "llama4": "Llama4TextMoe", "step3p7": "Step3p7SparseMoeBlock", "longcat_flash": "LongcatFlashMoE", "dbrx": "DbrxFFN",
    "jetmoe": "JetMoeMoE", "granitemoe": "GraniteMoeMoE", "aria": "AriaTextMoELayer",
}  # fmt: skip


@pytest.mark.parametrize("directory", [d for d in OUTSIDE if d in CLASSES and not (d == "dbrx" and V5 and not NEW)])  # broken by itself
def test_models_outside_the_decorator(directory):
    row = table.measure(directory, OUTSIDE[directory])
    assert row["experts"] != "left alone" and max(row["f32"]) <= 2e-6
    assert all(ours <= 1.5 * own for ours, own in zip(row["bf16"], row["own"], strict=True)), row


@pytest.mark.parametrize("limit, act", [(None, "SWIGLU"), (0.7, "SWIGLU_CLAMP_OUT")])
def test_step3p7_limit_of_each_layer(limit, act):
    if "step3p7" not in CLASSES:
        pytest.skip("no step3p7")
    module = table.build("step3p7", "Step3p7Experts")
    module.limit = float("inf") if limit is None else limit
    want = table.run(module, table.inputs(module), torch.float32)
    fusedmoe.apply(module)
    assert vars(module)["forward"].options["layer"].act == getattr(fusedmoe.ops, act)
    assert max(table.distance(table.run(module, table.inputs(module), torch.float32), want)) < 1e-6


def test_layers_of_one_class_with_other_numbers_are_looked_at_one_by_one():
    blocks = torch.nn.ModuleList(table.build(*case) for case in [("mixtral", "MixtralSparseMoeBlock")] * 2)
    for m in blocks[1].modules():
        if hasattr(m, "top_k"):
            m.top_k = 3
    want = [table.run(b, table.inputs(b), torch.float32) for b in blocks]
    fusedmoe.apply(blocks, routers=True)
    for block, w in zip(blocks, want, strict=True):
        got = table.run(block, table.inputs(block), torch.float32)
        assert table.what(block) == ("fused", "fused") and max(table.distance(got, w)) < 1e-6


def test_a_forward_on_the_instance_is_left_alone(caplog):
    """Tensor parallelism puts its all-reduce there."""
    module = table.build("mixtral", "MixtralSparseMoeBlock")
    target = next(m for m in module.modules() if hasattr(m, "top_k") and seams.find(m))
    own = type(target).forward
    target.forward = lambda *args: own(target, *args)
    there = target.forward
    fusedmoe.apply(module, routers=True)
    assert target.forward is there and "leaves it alone" in caplog.text


# ---- routers: still called, still telling ------------------------------------------------------------------------------------

ROUTED = ["Qwen3Moe", "Qwen2Moe", "Mixtral", "Olmoe", "GptOss", *(["GraniteMoe", "JetMoe"] if NEW else [])]


@pytest.mark.parametrize("family", ROUTED)
def test_auxiliary_loss(family):
    model = tiny(family, output_router_logits=True, router_aux_loss_coef=0.7)
    want = step(model, IDS)
    plain = model(input_ids=IDS, labels=IDS)
    fusedmoe.apply(model, routers=True)
    got, ours = step(model, IDS), model(input_ids=IDS, labels=IDS)
    assert ours.aux_loss is not None and abs(ours.aux_loss.item() - plain.aux_loss.item()) < 1e-5
    assert max(rel(a, b) for a, b in zip(ours.router_logits, plain.router_logits, strict=True)) < 1e-5
    names = [n for n in want[2] if "gate." in n or "router" in n]
    assert names and max(rel(got[2][n], want[2][n]) for n in names) < 1e-4


@pytest.mark.skipif(not NEW, reason="5.13")
@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3"])
def test_hooks_on_the_router(family):
    model = fusedmoe.apply(tiny(family), routers=True)
    gates = [m for m in model.modules() if isinstance(vars(m).get("forward"), seams.Bound) and m.forward.__func__ is routers.forward]
    assert len(gates) == 2
    seen = []
    for gate in gates:
        gate.register_forward_hook(lambda module, args, out: seen.append(out))
    model(input_ids=IDS)
    assert len(seen) == 2 and all(logits.shape == (22, 8) and p.shape == ids.shape == (22, 2) for logits, p, ids in seen)


@pytest.mark.skipif(not V5, reason="v5")
def test_a_rule_of_its_own_keeps_the_router(caplog):
    model = tiny("Qwen3Moe")
    gate = model.model.layers[0].mlp.gate

    class Odd(type(gate)):
        def forward(self, hidden_states):
            logits, p, ids = super().forward(hidden_states)
            return logits, p.sqrt(), ids

    gate.__class__ = Odd
    fusedmoe.apply(model, routers=True)
    assert "forward" not in vars(gate) and "Odd: its routing rule" in caplog.text
    assert "forward" in vars(model.model.layers[1].mlp.gate)


@pytest.mark.skipif(not NEW, reason="5.13")
@pytest.mark.parametrize("defaults", [("meta", torch.float32), ("cpu", torch.bfloat16)], ids=str)
def test_routers_are_found_whatever_the_defaults_are(defaults):
    model = tiny("DeepseekV3")
    try:
        torch.set_default_device(defaults[0])
        torch.set_default_dtype(defaults[1])
        fusedmoe.apply(model, routers=True)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert sum(isinstance(vars(m).get("forward"), seams.Bound) for m in model.modules()) == 2


@pytest.mark.skipif(not NEW, reason="5.13")
def test_frozen_and_bfloat16_routers():
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny("DeepseekV3").to(dtype).requires_grad_(False)
        for n, p in model.named_parameters():
            p.requires_grad_("experts" in n)
        want = model(input_ids=IDS).logits
        fusedmoe.apply(model, routers=True)
        assert sum(isinstance(vars(m).get("forward"), seams.Bound) for m in model.modules()) == 2
        assert rel(model(input_ids=IDS).logits, want) < (1e-5 if dtype == torch.float32 else 0.05)
        model(input_ids=IDS, labels=IDS).loss.backward()


@pytest.mark.skipif(not NEW, reason="5.13")
def test_routers_stay_as_they_are_on_a_cpu_unless_asked():
    model = fusedmoe.apply(tiny("Qwen3Moe"))
    assert not any("forward" in vars(m) for m in model.modules())
