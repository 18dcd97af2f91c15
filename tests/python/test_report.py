# SPDX-License-Identifier: Apache-2.0
"""What fusedmoe says about a model: fusedmoe.report, the log, FMOE_LOG. Runs under transformers v4 and v5."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from torch import nn

import fusedmoe
from common import FAMILIES, V5, set_implementation, tiny
from fusedmoe import kernels, ops
from fusedmoe.integrations import log

HERE = Path(__file__).parent
IDS = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(2))
ALL = [f for f in (*FAMILIES, "Qwen3VLMoe") if hasattr(transformers, f + "Config")]
COMPILES = V5 and Version(torch.__version__) >= Version("2.7")  # before, torch cannot trace transformers' models
WAYS = {"fused": ("experts", "experts_forward"), "composed": ("grouped_matmul",)}


def spied(monkeypatch):
    """Which way experts go from now on, call by call."""
    seen = []
    for way, names in WAYS.items():
        for name, real in [(name, getattr(ops, name)) for name in names]:
            monkeypatch.setattr(ops, name, lambda *args, way=way, real=real: seen.append(way) or real(*args))
    return seen


def named(model, name="fusedmoe"):
    set_implementation(model, name)
    return model


def never(*_):
    raise AssertionError("a module was run")


# ---- rows ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_are_what_runs(family, device, monkeypatch):
    model = tiny(family)
    before = fusedmoe.report(model)
    assert {row.path for row in before} == {"own"} and "left alone" in before.summary
    fusedmoe.apply(model.to(device))
    with nn.modules.module.register_module_forward_pre_hook(never):
        report = fusedmoe.report(model)
    assert [row[:2] for row in report] == [row[:2] for row in before] and {row.device for row in report} == {device}
    for row in report:
        assert type(model.get_submodule(row.module)).__name__ == row.cls and row.dtype == "f32" and row.reason
    if device == "cpu":
        seen = spied(monkeypatch)
        with torch.no_grad():
            model(input_ids=IDS)
        each = {"fused": 1, "composed": 2}
        assert sorted(seen) == sorted(way for row in report for way in [row.path] * each[row.path])
    fusedmoe.unapply(model)
    assert [row[:4] for row in fusedmoe.report(model)] == [row[:4] for row in before]


def test_text():
    model = fusedmoe.apply(tiny("Qwen3Moe"))
    model.model.layers[1].bfloat16()
    report = fusedmoe.report(model)
    head, first, second, last = str(report).splitlines()
    assert last == report.summary == "1 MoE layer fused (SwiGLU, f32, cpu); 1 fused (SwiGLU, bf16, cpu)"
    assert repr(report) == f"<fusedmoe.report: {last}>"
    for name, value, other in zip(head.split()[1:], report.rows[0][1:], report.rows[1][1:], strict=True):
        at = head.index(name)
        assert first[at:].startswith(value) and second[at:].startswith(other) and first[at - 1] == second[at - 1] == " "
    assert first.startswith("model.layers.0.mlp") and len(report) == 2 and [*report] == report.rows


def test_a_model_without_experts():
    report = fusedmoe.report(nn.Sequential(nn.Linear(2, 2)))
    assert report.rows == [] and report.summary == "no MoE layer" and str(report).splitlines()[-1] == "no MoE layer"


@pytest.mark.skipif(not V5, reason="v5")
def test_reasons_of_v5():
    model = tiny("Qwen3Moe", num_hidden_layers=6)
    set_implementation(model, "grouped_mm")
    assert {row[2:4] + row[6:] for row in fusedmoe.report(model)} == {("own", "-", 'its experts_implementation is "grouped_mm"')}
    named(model)
    experts = [layer.mlp.experts for layer in model.model.layers]
    experts[1].act_fn = nn.Mish()
    experts[2].has_second_thoughts = True
    for p in experts[3].parameters():
        p.requires_grad_(False)
        p.data = p.data.to(torch.float8_e4m3fn)
    experts[4].config = copy.deepcopy(experts[4].config)
    experts[4].config._experts_implementation = "fusedmoe_composed"
    gate = dict(_apply_gate=lambda self, h: h.chunk(2, -1)[0].sigmoid() * h.chunk(2, -1)[0] * h.chunk(2, -1)[1])
    experts[5].__class__ = type("Own", (type(experts[5]),), gate)
    rows = fusedmoe.report(model).rows
    assert [row.path for row in rows] == ["fused", "composed", "own", "own", "composed", "fused"]
    assert [row.activation for row in rows] == ["SwiGLU", "own activation", "-", "-", "own activation", "SwiGLU"]
    words = "by its type", "not one of ours", "has_second_thoughts", "quantized", "asks for it", "by its result"
    assert all(word in row.reason for word, row in zip(words, rows, strict=True)) and rows[3].dtype == "float8_e4m3fn"


@pytest.mark.skipif(not V5, reason="v5")
def test_quantized_experts_of_v5():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    model = tiny("Qwen3Moe")
    config = model.model.layers[0].mlp.experts.config
    try:
        for layer in model.model.layers:
            layer.mlp.experts = fp8.FP8Experts(config, block_size=(16, 16))
    except (AttributeError, TypeError):
        pytest.skip("FP8Experts of this version is made another way")
    report = fusedmoe.report(model)
    assert {row.path for row in report} == {"own"} and all("float8" in row.reason for row in report) and len(report) == 2
    report = fusedmoe.report(fusedmoe.apply(model))
    assert {(row.path, row.dtype) for row in report} == {("fused", "fp8")} and len(report) == 2


class Quantized(nn.Linear):
    def __init__(self, linear):
        nn.Module.__init__(self)
        self.weight = nn.Parameter(linear.weight.detach().to(torch.int8), requires_grad=False)


@pytest.mark.skipif(V5, reason="v4")
@pytest.mark.parametrize("late", [False, True])
def test_quantized_linears_of_v4(late):
    model = tiny("Qwen3Moe", num_hidden_layers=3)
    if late:
        fusedmoe.apply(model)
    for expert in model.model.layers[1].mlp.experts:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(expert, name, Quantized(getattr(expert, name)))
    if not late:
        fusedmoe.apply(model)
    rows = fusedmoe.report(model).rows
    assert [row.path for row in rows] == (["fused", "own", "fused"] if late else [rows[0].path, "own", rows[2].path])
    assert "quantized" in rows[1].reason and rows[1].dtype == "int8"


def test_what_apply_refused_is_told_after_it(monkeypatch):
    """Also where nothing at all was patched, and the model is as it was."""
    model = tiny("Llama4") if V5 else tiny("Qwen3Moe")
    block = next(type(m) for m in model.modules() if "experts" in m._modules)
    own = block.forward

    def forward(self, hidden_states):
        states, logits = own(self, hidden_states)
        return 2 * states, logits

    monkeypatch.setattr(block, "forward", forward)
    assert all("apply was not called" in row.reason for row in fusedmoe.report(model))
    fusedmoe.apply(model)
    report = fusedmoe.report(model)
    assert len(report) == 2 and all(row.path == "own" and "does not know" in row.reason for row in report)
    assert all("apply was not called" in row.reason for row in fusedmoe.report(fusedmoe.unapply(model)))


@pytest.mark.parametrize("kind", ["plain", "dropout", "none"])
def test_adapters(kind):
    peft = pytest.importorskip("peft")
    how = dict(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], target_modules=["q_proj"])
    how = how if V5 else dict(target_modules=["gate_proj", "up_proj", "down_proj"])
    dropout = 0.1 if kind == "dropout" and not V5 else 0.0  # PEFT refuses it on stacked experts
    model = tiny("Qwen3Moe")
    if kind != "none":
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_dropout=dropout, **how))
        if kind == "dropout" and V5:
            if tuple(int(n) for n in peft.__version__.split(".")[:2]) < (0, 19):
                pytest.skip("PEFT allows one adapter on stacked experts")
            model.add_adapter("other", peft.LoraConfig(r=2, **how))
            model.base_model.set_adapter(["default", "other"])
    report = fusedmoe.report(fusedmoe.apply(model).train())
    assert len(report) == 2
    told = {row.reason.rpartition("; ")[2] for row in report}
    if kind == "plain":
        assert told == {"LoRA in the kernels"} and {row.path for row in report} == {"fused"}
    elif kind == "dropout":
        assert {row.path for row in report} == ({"fused"} if V5 else {"own"})
        assert all(("PEFT computes the adapters" if V5 else "an adapter that fusedmoe does not compute") in row.reason for row in report)
    else:
        assert not any("LoRA" in text or "PEFT" in text for text in told)


# ---- the log ---------------------------------------------------------------------------------------------------------------------


def lines(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "fusedmoe"]


@pytest.mark.parametrize("how", ["apply", "fused_moe", "auto"])
def test_apply_says_it_once(how, caplog):
    model = tiny("Qwen3Moe")
    call = {"apply": fusedmoe.apply, "fused_moe": lambda model: kernels.apply_kernel("fused_moe", model=model),
            "auto": lambda model: kernels.apply_default_kernels(model, "auto")}[how]  # fmt: skip
    for _ in range(2):
        call(model)
    model(input_ids=IDS)
    assert lines(caplog) == ["Qwen3MoeForCausalLM: 2 MoE layers fused (SwiGLU, f32, cpu)"]


@pytest.mark.skipif(not V5, reason="v5")
@pytest.mark.parametrize("how", ["eager", *(["compile"] if COMPILES else [])])
@pytest.mark.parametrize("name", ["fusedmoe", "fusedmoe_composed"])
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_the_first_forward_says_it_once(family, name, how, caplog):
    """Nobody has called apply."""
    torch._dynamo.reset()
    for model in (tiny(family), tiny(family)):
        named(model, name)
        call = torch.compile(model, backend="eager", fullgraph=True) if how == "compile" else model
        for _ in range(2):
            call(input_ids=IDS)
    act, known = {"Qwen3Moe": ("SwiGLU", "type"), "GptOss": ("SwiGLU-OAI", "result")}[family]
    fused = f"{family}Experts: fused ({act}, f32, cpu): its activation is known by its {known}"
    composed = f"{family}Experts: composed (own activation, f32, cpu): its experts_implementation asks for it"
    assert lines(caplog) == [fused if name == "fusedmoe" else composed]


@pytest.mark.skipif(not COMPILES, reason="v5, torch 2.7")
def test_a_layer_left_alone_is_said_while_it_is_traced(caplog):
    torch._dynamo.reset()
    model = named(tiny("Qwen3Moe"))
    for layer in model.model.layers:
        layer.mlp.experts.has_second_thoughts = True
    with torch.no_grad():
        torch.compile(model, backend="eager")(input_ids=IDS)
    (line,) = lines(caplog)
    assert "has_second_thoughts" in line and "own forward" in line


SCRIPT = """
import importlib.util, logging
{before}
spec = importlib.util.spec_from_file_location("log", {path!r})
log = importlib.util.module_from_spec(spec)
spec.loader.exec_module(log)
{after}
for level in (10, 20, 30, 40):
    for _ in range(2):
        log.say_once("line %d" % level, level)
print(len(logging.root.handlers), logging.root.level)
"""
HANDLERS = {
    "none": ("", ""),
    "before": ("logging.basicConfig(level='INFO')", ""),
    "after": ("", "logging.basicConfig(level='INFO')"),
    "its own before": ("logging.getLogger('fusedmoe').addHandler(logging.StreamHandler())", ""),
    "its own after": ("", "logging.getLogger('fusedmoe').addHandler(logging.StreamHandler())"),
    "too high": ("logging.basicConfig(); logging.root.handlers[0].setLevel('CRITICAL')", ""),
    "mute": ("logging.root.addHandler(logging.NullHandler())", ""),
}


def spoken(level, handlers="none"):
    """What a process with these handlers writes, torch left out."""
    before, after = HANDLERS[handlers]
    code = SCRIPT.format(path=log.__file__, before=before, after=after)
    env = {k: v for k, v in os.environ.items() if k != "FMOE_LOG"} | ({"FMOE_LOG": level} if level else {})
    done = subprocess.run([sys.executable, "-S", "-c", code], env=env, capture_output=True, text=True, check=True)
    touched = int("basicConfig" in before + after or "root" in before + after)
    assert done.stdout.split() == [str(touched), "20" if "level" in before + after else "30"]  # the root logger is the program's
    return done.stderr


@pytest.mark.parametrize("handlers", HANDLERS)
def test_a_line_is_shown_once_whoever_shows_it(handlers):
    said = spoken("info", handlers)
    assert [said.count(f"line {level}") for level in (10, 20, 30, 40)] == [0, 1, 1, 1]


def test_levels():
    for place, level in enumerate(("debug", "info", "warning", "ERROR")):
        assert [spoken(level).count(f"fusedmoe: line {n}") for n in (10, 20, 30, 40)] == [0] * place + [1] * (4 - place)
    assert [spoken("").count(f"line {n}") for n in (10, 20, 30, 40)] == [0, 0, 1, 1]  # Python's own rule
    assert "FMOE_LOG=loud is none of debug, info, warning, error" in spoken("loud")


@pytest.mark.skipif(not V5, reason="v5")
def test_a_program_that_never_names_fusedmoe_hears_of_it():
    """By the autoload and the name alone, as TRL and ms-swift do it."""
    code = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
from common import tiny
import torch
model = tiny("Qwen3Moe")
model.set_experts_implementation("fusedmoe")
model(input_ids=torch.arange(3, 9)[None])
"""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "FMOE_LOG": "info"}, capture_output=True, text=True, check=True)
    assert done.stderr.count("fusedmoe: Qwen3MoeExperts: fused (SwiGLU, f32, cpu)") == 1
