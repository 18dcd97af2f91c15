# SPDX-License-Identifier: Apache-2.0
"""Adapters on experts between layouts: round trips bit for bit, dW against PEFT's own and against code that knows no layout, and errors
that are planted and must be found. vLLM and SGLang are not installed here: their layouts are checked against formulas
(tests/external/vllm_lora.py asks vLLM itself)."""

import copy
import itertools
import json
import re
from importlib import metadata
from importlib.util import find_spec

import pytest
import torch

from common import V5, tiny
from fusedmoe import lora
from fusedmoe.lora.__main__ import main

OLD_PEFT = tuple(int(n) for n in metadata.version("peft").split(".")[:2]) < (0, 19) if find_spec("peft") else False
MODULE = "base_model.model.model.layers.{}.mlp.experts"
LAYOUTS = lora.LAYOUTS


def truth(E, r, H, I, parts, seed=0, shared=True):
    """Factors of gate, up, down: a [E,r,in], b [E,out,r]; gate and up with one A."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=g).bfloat16()
    a = draw(E, r, H)
    found = {"gate": (a, draw(E, I, r)), "up": (a if shared else draw(E, r, H), draw(E, I, r)), "down": (draw(E, r, I), draw(E, H, r))}
    return {n: f for n, f in found.items() if (n == "down" and "down" in parts) or (n != "down" and "gate_up" in parts)}


def stored(layout, factors, module, interleaved=False, names=("gate_proj", "up_proj", "down_proj")):
    """The tensors of a layout, written element by element from its definition."""
    out, fused = {}, {}
    if layout == "per-expert":
        for (part, (a, b)), e in itertools.product(factors.items(), range(len(next(iter(factors.values()))[0]))):
            name = names[("gate", "up", "down").index(part)]
            out[f"{module}.{e}.{name}.lora_A.weight"], out[f"{module}.{e}.{name}.lora_B.weight"] = a[e].clone(), b[e].clone()
        return out
    if "gate" in factors:
        (a, gate), (a2, up) = factors["gate"], factors["up"]
        E, I, r = gate.shape
        rows = torch.empty(E, 2 * I, r, dtype=gate.dtype)
        for i in range(I):
            rows[:, 2 * i if interleaved and layout != "sglang3d" else i] = gate[:, i]
            rows[:, 2 * i + 1 if interleaved and layout != "sglang3d" else I + i] = up[:, i]
        fused["gate_up"] = a if layout != "sglang3d" else torch.cat((a, a2), 1), rows
    if "down" in factors:
        fused["down"] = factors["down"]
    for part, (a, b) in fused.items():
        if layout == "sglang3d":
            out[f"{module}.{part}_proj.lora_A.weight"], out[f"{module}.{part}_proj.lora_B.weight"] = a, b
            continue
        E, r, n = a.shape
        A, B = torch.empty(E * r, n, dtype=a.dtype), torch.empty(b.shape[1], r * E, dtype=a.dtype)
        if layout == "peft-0.18":
            A, B = torch.empty(E * r, b.shape[1], dtype=a.dtype), torch.empty(n, r * E, dtype=a.dtype)
        for e, j in itertools.product(range(E), range(r)):
            first, second = (a[e, j], b[e, :, j]) if layout == "peft" else (b[e, :, j], a[e, j])
            A[e * r + j], B[:, j * E + e] = first, second
        inner = ".base_layer" if part == "gate_up" and "down" in fused else ""
        out[f"{module}{inner}.lora_A.weight"], out[f"{module}{inner}.lora_B.weight"] = A, B
    return out


def adapter(layout, E=5, r=3, H=8, I=6, parts=("gate_up", "down"), interleaved=False, layers=2, extra=True, **more):
    tensors = {}
    for i in range(layers):
        tensors |= stored(layout, truth(E, r, H, I, parts, i), MODULE.format(i), interleaved, **more)
    if extra:
        tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] = torch.ones(r, H)
        tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"] = torch.ones(H, r)
    return lora.Adapter(tensors, dict(peft_type="LORA", r=r, lora_alpha=6, target_modules=["q_proj"], target_parameters=None))


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(t, two[n]) and t.dtype == two[n].dtype for n, t in one.items())


def facts(**more):
    return lora.Facts(**{"interleaved": False, **more})


SIZES = [dict(E=5, r=3), dict(E=3, r=5), dict(E=4, r=4), dict(E=2, r=1, H=4, I=2), dict(E=6, r=2, H=12, I=6), dict(E=1, r=2)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("source, target", [*itertools.permutations(LAYOUTS, 2)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_layout_into_every_other(source, target, sizes, interleaved):
    given, want = (adapter(layout, interleaved=interleaved, **sizes) for layout in (source, target))
    known = facts(interleaved=interleaved, hidden=sizes.get("H", 8))
    made = lora.convert(given, target, known)
    assert equal(made.tensors, want.tensors), "as written from the definition"
    proof = lora.verify(given, made, known)
    assert not proof.problems and proof.worst < 1e-12 and proof.layers == 2
    assert bool(proof) or sizes["E"] == 1 or sizes.get("H") == 4
    assert equal(lora.convert(made, source, known).tensors, given.tensors), "and back"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("parts", [("gate_up",), ("down",)])
def test_one_parameter_alone(layout, parts):
    given = adapter(layout, parts=parts)
    given.config["target_parameters"] = [f"mlp.experts.{parts[0]}_proj"] if layout.startswith("peft") else None
    for target in LAYOUTS:
        made = lora.convert(given, target, facts(hidden=8))
        assert equal(made.tensors, adapter(target, parts=parts).tensors)
        assert lora.verify(given, made, facts(hidden=8))
    if layout.startswith("peft"):
        with pytest.raises(lora.LayoutError, match=r"before or after 0\.19, and names do not tell"):
            lora.convert(given, "per-expert", facts())
        said = lora.convert(given, "sglang3d", facts(), layout)
        assert equal(said.tensors, adapter("sglang3d", parts=parts).tensors)
        given.config["target_parameters"] = None
        with pytest.raises(lora.LayoutError, match="say which"):
            lora.convert(given, "per-expert", facts())


def test_peft_before_and_after_019_are_told_apart_by_sizes():
    """With both parameters there is one reading, whatever the sizes: also where H = 2I or H = I."""
    for H, I in ((8, 6), (8, 4), (6, 6), (4, 8)):
        for layout in ("peft", "peft-0.18"):
            got = lora.convert(adapter(layout, H=H, I=I), "per-expert", facts())
            assert equal(got.tensors, adapter("per-expert", H=H, I=I).tensors)


def broken(change, **more):
    def make():
        given = adapter("peft", **more)
        change(given)
        return given
    return make


def drop(given, key):
    del given.tensors[key]


def twice(given, stem):
    given.tensors[f"{stem}.other.weight"] = given.tensors[f"{stem}.weight"] + 1


def cast(given, key, dtype):
    given.tensors[key] = given.tensors[key].to(dtype)


@pytest.mark.parametrize("make, known, message", [
    (broken(lambda a: drop(a, MODULE.format(1) + ".lora_B.weight")), facts(), r"layers\.1\.mlp\.experts 0: lora_B is missing"),
    (broken(lambda a: None), facts(experts=4), r"15 rows of rank r = 3: expected 4 experts"),
    (broken(lambda a: a.config.update(r=4)), facts(), r"15 rows of rank r = 4: expected a whole number of experts"),
    (broken(lambda a: None), lora.Facts(), "gate and up are one weight here and two there"),
    (broken(lambda a: a.tensors.update(adapter("per-expert").tensors)), facts(), "in 2 layouts"),
    (broken(lambda a: a.config.update(r=0)), facts(), "r is 0, expected a positive integer"),
    (broken(lambda a: a.tensors.update({MODULE.format(0) + ".lora_B.weight": torch.ones(8, 12)})), facts(), r"\[12, 15\] rows and columns"),
    (broken(lambda a: a.tensors.update({MODULE.format(0) + ".lora_B.weight": torch.ones(7, 15)})), facts(), "no layer has such sizes"),
    (broken(lambda a: twice(a, MODULE.format(0) + ".lora_A")), facts(), r"lora_A.other.weight: given twice, under two names"),
    (broken(lambda a: cast(a, MODULE.format(0) + ".lora_A.weight", torch.int32)), facts(), "lora_A.weight: is int32, expected floating"),
    (broken(lambda a: cast(a, MODULE.format(0) + ".lora_A.weight", torch.cfloat)), facts(), "lora_A.weight: is complex64, expected"),
    (broken(lambda a: a.tensors.update({MODULE.format(0) + ".lora_A.weight": torch.ones(0, 6)})), facts(), r"is \[0, 6\], expected 2 dim"),
    (broken(lambda a: a.tensors.update({MODULE.format(0) + ".lora_A.weight": torch.ones(1, 15, 6)})), facts(), r"is \[1, 15, 6\], expec"),
])  # fmt: skip
def test_what_cannot_be_read_is_refused(make, known, message):
    with pytest.raises(ValueError, match=message):
        lora.convert(make(), "per-expert", known)


def test_what_cannot_be_written_is_refused():
    given = adapter("per-expert")
    for layout in ("peft", "peft-0.18"):
        other = copy.deepcopy(given)
        other.tensors[MODULE.format(1) + ".2.up_proj.lora_A.weight"] += 1
        with pytest.raises(lora.LayoutError, match=r"layers\.1\.mlp\.experts: gate and up have different A: .* rank 6, not r = 3"):
            lora.convert(other, layout, facts())
    assert equal(lora.convert(lora.convert(other, "sglang3d", facts()), "per-expert", facts()).tensors, other.tensors)
    for name, message in ((".3.gate_proj.lora_A.weight", "expert 3: lora_A is missing"), (".4.", "4 is missing")):
        other = copy.deepcopy(given)
        for key in [k for k in other.tensors if k.startswith(MODULE.format(0) + name)]:
            del other.tensors[key]
        with pytest.raises(lora.LayoutError, match=message):
            lora.convert(other, "peft", facts(experts=5))
    other = copy.deepcopy(given)
    for e in range(5):
        for of in "AB":
            del other.tensors[f"{MODULE.format(0)}.{e}.up_proj.lora_{of}.weight"]
    with pytest.raises(lora.LayoutError, match="gate has an adapter, and up has none"):
        lora.convert(other, "peft", facts())


def test_names_of_mixtral():
    given = adapter("per-expert", names=("w1", "w3", "w2"))
    made = lora.convert(given, "peft", facts())
    assert equal(made.tensors, adapter("peft").tensors)
    assert equal(lora.convert(made, "per-expert", facts(w_names=True)).tensors, given.tensors)


# ---- errors that verify must find -----------------------------------------------------------------------------------------
def permuted(made, layout):
    for name in [n for n in made.tensors if ".experts." in n and "lora_B" in n]:
        t = made.tensors[name]
        if layout == "per-expert":
            e = int(name.split(".experts.")[1].split(".")[0])
            made.tensors[name] = adapter(layout).tensors[name.replace(f"experts.{e}.", f"experts.{(e + 1) % 5}.")]
        elif layout == "sglang3d":
            made.tensors[name] = t.roll(1, 0)
        else:
            made.tensors[name] = t.view(len(t), -1, 5).roll(1, 2).reshape(t.shape)


def slow_experts(made, layout):
    """B as if the experts were slowest in it, too: PEFT's most common misreading."""
    for name in [n for n in made.tensors if ".experts." in n and "lora_B" in n]:
        t = made.tensors[name]
        if layout.startswith("peft"):
            made.tensors[name] = t.view(len(t), -1, 5).transpose(1, 2).reshape(t.shape)
        else:
            made.tensors[name] = t.transpose(-1, -2).reshape(t.shape)


def swapped_gates(made, layout):
    for name in [n for n in made.tensors if "layers.0" in n and "lora_B" in n and (".base_layer." in n or "gate_up_proj" in n)]:
        half = made.tensors[name].shape[-2] // 2
        made.tensors[name] = made.tensors[name].roll(half, -2)
    for e in range(5 if layout == "per-expert" else 0):
        keys = [f"{MODULE.format(0)}.{e}.{part}_proj.lora_B.weight" for part in ("gate", "up")]
        made.tensors[keys[0]], made.tensors[keys[1]] = made.tensors[keys[1]], made.tensors[keys[0]]


def one_number(made, layout):
    name = next(n for n in made.tensors if "layers.1" in n and "lora_B" in n)
    made.tensors[name] = made.tensors[name].contiguous().clone()
    made.tensors[name].view(-1)[7] *= 1.01


def dropped(made, layout):
    del made.tensors[next(n for n in made.tensors if "layers.1" in n and "lora_A" in n)]


def dropped_layer(made, layout):
    for name in [n for n in made.tensors if "layers.1" in n]:
        del made.tensors[name]


def useless(made, layout):
    made.tensors["base_model.model.model.layers.0.mlp.experts.extra"] = torch.ones(2)


def another_scale(made, layout):
    made.config["lora_alpha"] = 7


def attention(made, layout):
    made.tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] = torch.zeros(3, 8)


PLANTS = permuted, slow_experts, swapped_gates, one_number, dropped, dropped_layer, useless, another_scale, attention


@pytest.mark.parametrize("plant", PLANTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_planted_errors_are_found(layout, plant):
    given = adapter("peft" if layout != "peft" else "per-expert")
    made = lora.convert(given, layout, facts(hidden=8))
    assert lora.verify(given, made, facts(hidden=8))
    plant(made, layout)
    proof = lora.verify(given, made, facts(hidden=8))
    assert proof.problems and "NOT the same" in str(proof)


def test_an_adapter_that_proves_nothing():
    fresh = adapter("peft")
    for name in fresh.tensors:
        if "lora_B" in name:
            fresh.tensors[name] = torch.zeros_like(fresh.tensors[name])
    proof = lora.verify(fresh, lora.convert(fresh, "per-expert", facts()), facts())
    assert not proof and not proof.problems and "was not trained" in str(proof)
    same = adapter("per-expert")
    for name in same.tensors:
        same.tensors[name] = same.tensors[re.sub(r"experts\.\d", "experts.0", name)]
    proof = lora.verify(same, lora.convert(same, "peft", facts()), facts())
    assert not proof and "are all experts equal" in str(proof)


# ---- PEFT itself, and the command -------------------------------------------------------------------------------------------
@pytest.mark.skipif(not V5, reason="v4 has its experts in lists")
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
@pytest.mark.parametrize("which", [("gate_up_proj", "down_proj"), ("gate_up_proj",), ("down_proj",)], ids="+".join)
def test_an_adapter_that_peft_saved(family, which, tmp_path):
    """dW of every expert is what PEFT computes for its own model, and what is converted there and back is loaded by PEFT again."""
    peft = pytest.importorskip("peft")
    from peft.tuners.lora.layer import ParamWrapper

    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj"], target_parameters=[f"mlp.experts.{n}" for n in which],
                             init_lora_weights=False)  # fmt: skip
    sizes = dict(moe_intermediate_size=12, intermediate_size=12)  # with H = 2I and one parameter alone nobody could tell A from B
    model = peft.get_peft_model(tiny(family, **sizes), config)
    model.save_pretrained(tmp_path / "peft")
    base = tmp_path / "base"
    model.get_base_model().config.save_pretrained(base)
    known, own = lora.Facts.of(base), "peft-0.18" if family != "GptOss" and OLD_PEFT else "peft"
    assert known == lora.Facts(8, 32, family == "GptOss", False)
    given = lora.load(tmp_path / "peft")
    for target in ("per-expert", "sglang3d", own):
        assert main(["convert", str(tmp_path / "peft"), str(tmp_path / target / "out"), "--to", target, "--base", str(base)]) == 0
        assert main(["verify", str(tmp_path / "peft"), str(tmp_path / target / "out"), "--base", str(base)]) == 0
        there = lora.load(tmp_path / target / "out")
        back = lora.convert(there, own, known, target)
        assert equal(back.tensors, given.tensors)
    served = lora.load(tmp_path / "per-expert" / "out").tensors
    for name, module in model.named_modules():
        if not isinstance(module, ParamWrapper):
            continue
        dense = module.get_delta_weight("default")
        dense = dense.transpose(1, 2) if family == "GptOss" else dense  # [E, out, in]
        stem = name.replace(".base_layer", "")
        for e in range(8):
            names = ("down_proj",) if module.parameter_name == "down_proj" else ("gate_proj", "up_proj")
            rows = [served[f"{stem}.{e}.{n}.lora_B.weight"] @ served[f"{stem}.{e}.{n}.lora_A.weight"] * 5 / 3 for n in names]
            interleaved = len(rows) == 2 and family == "GptOss"
            want = torch.stack(rows, 1).flatten(0, 1) if interleaved else torch.cat(rows)
            assert torch.allclose(dense[e], want, atol=1e-6)
    other = peft.PeftModel.from_pretrained(tiny(family, **sizes), tmp_path / own / "out")
    ids = torch.arange(3, 20).view(1, -1)
    with torch.no_grad():
        assert torch.equal(other(ids).logits, model(ids).logits)


def test_command_line(tmp_path, capsys):
    given = adapter("peft-0.18", parts=("gate_up",))
    given.config["target_parameters"] = ["mlp.experts.gate_up_proj"]
    lora.save(given, tmp_path / "a")
    a, b, gates = str(tmp_path / "a"), str(tmp_path / "b"), ["--gates", "concatenated"]
    assert main(["convert", a, b, "--to", "per-expert"]) == 2
    assert "names do not tell" in capsys.readouterr().err and not (tmp_path / "b").exists()
    assert main(["convert", a, b, "--to", "per-expert", "--from", "peft-0.18", *gates]) == 0
    assert "experts permuted: found" in capsys.readouterr().out
    assert main(["verify", a, b, "--hidden", "8", *gates]) == 0
    assert main(["verify", a, b, "--from", "peft", *gates]) == 1, "read the wrong way"
    assert main(["convert", a, b, "--to", "peft", "--hidden", "8"]) == 2
    assert "has an adapter already" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "a"), str(tmp_path / "none")]) == 2
    config = json.loads((tmp_path / "b/adapter_config.json").read_text())
    assert config["target_modules"] == ["gate_proj", "q_proj", "up_proj"] and config["target_parameters"] is None
    (tmp_path / "a/adapter_config.json").write_text(json.dumps({**given.config, "use_dora": True}))
    assert main(["verify", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "not plain LoRA" in capsys.readouterr().err


def test_an_adapter_in_shards(tmp_path, capsys):
    from safetensors.torch import save_file

    given, folder = adapter("peft"), tmp_path / "a"
    lora.save(given, folder)
    (folder / "adapter_model.safetensors").unlink()
    names = sorted(given.tensors)
    parts = {"adapter_model-00001-of-00002.safetensors": names[:3], "adapter_model-00002-of-00002.safetensors": names[3:]}
    for file, of in parts.items():
        save_file({n: given.tensors[n].contiguous() for n in of}, folder / file)
    index = {"weight_map": {n: file for file, of in parts.items() for n in of}}
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps(index))
    assert equal(lora.load(folder).tensors, given.tensors)
    index["weight_map"]["more"] = "adapter_model-00002-of-00002.safetensors"
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["verify", str(folder), str(folder)]) == 2
    assert "more is not in adapter_model-00002-of-00002.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("file, content, message", [
    ("adapter_config.json", "{", "adapter_config.json: no JSON"), ("adapter_config.json", "[]", r"\[\], expected a dictionary"),
    ("adapter_model.safetensors", "xx", "adapter_model.safetensors: no safetensors file"),
    ("adapter_config.json", '{"r": 3, "lora_alpha": null}', "lora_alpha is None, expected a number"),
    ("adapter_config.json", '{"r": 3, "target_modules": 5}', "target_modules is 5, expected names or a pattern"),
])  # fmt: skip
def test_files_that_are_none(file, content, message, tmp_path, capsys):
    lora.save(adapter("peft"), tmp_path / "a")
    (tmp_path / "a" / file).write_text(content)
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "per-expert", "--gates", "concatenated"]) == 2
    assert re.search(message, capsys.readouterr().err) and not (tmp_path / "b").exists()


def test_counts_that_are_none(tmp_path, capsys):
    lora.save(adapter("peft"), tmp_path / "a")
    assert main(["verify", str(tmp_path / "a"), str(tmp_path / "a"), "--experts", "0"]) == 2
    assert "--experts is 0, expected at least 1" in capsys.readouterr().err
