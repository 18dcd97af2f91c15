# SPDX-License-Identifier: Apache-2.0
"""Models loaded with fusedmoe.QuantConfig: quantised while they are loaded, or kept as their checkpoint holds them; saved and back."""

import copy
import json
from pathlib import Path

import pytest
import torch

import fusedmoe
from fusedmoe.quant import FORMATS, QuantTensor

transformers = pytest.importorskip("transformers", minversion="5.6")
TOKENS = torch.arange(12).view(2, 6)
SIZES = dict(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
             num_experts_per_tok=2, dtype=torch.bfloat16)  # fmt: skip


def qwen3(I=64, **more):
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(moe_intermediate_size=I, num_experts=4, **SIZES | more)
    return transformers.Qwen3MoeForCausalLM(config).bfloat16().eval()


def gpt_oss(**more):
    torch.manual_seed(0)
    config = transformers.GptOssConfig(intermediate_size=64, num_local_experts=4, **SIZES | more)
    model = transformers.GptOssForCausalLM(config).bfloat16().eval()
    for name, p in model.named_parameters():
        p.data.normal_(0, 0.1) if "experts" in name or "sinks" in name else None
    return model


def stacks(model):
    return {n: p for n, p in model.named_parameters() if n.endswith(("experts.gate_up_proj", "experts.down_proj"))}


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.fixture
def never_decoded(monkeypatch):
    """While it is on, decoding a whole stack is an error: what runs reads the codes."""

    def refuse(self, *_):
        raise AssertionError("a stack of weights was decoded")

    return lambda: monkeypatch.setattr(QuantTensor, "dequantize", refuse), monkeypatch.undo


# ---- quantised while loading -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [qwen3, gpt_oss])
@pytest.mark.parametrize("format", FORMATS)
def test_a_model_is_quantised_as_it_is_loaded_saved_and_found_again(make, format, tmp_path, never_decoded):
    """As fusedmoe.quantize of the same model does it, bit for bit, through two files."""
    model = make()
    model.save_pretrained(tmp_path / "plain")
    cls = type(model)
    want = fusedmoe.quantize(cls.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16), format)
    loaded = cls.from_pretrained(tmp_path / "plain", quantization_config=fusedmoe.QuantConfig(format), dtype=torch.bfloat16)
    for name, w in stacks(want).items():
        got = stacks(loaded)[name]
        assert isinstance(got, QuantTensor) and isinstance(got, torch.nn.Parameter) and not got.requires_grad
        assert got.format == w.format and got.transposed == w.transposed and got.shape == w.shape
        assert all(torch.equal(t, w.parts()[n]) for n, t in got.parts().items())
    never_decoded[0]()
    assert torch.equal(logits(loaded), logits(want))
    for i, source in enumerate((loaded, want)):
        source.save_pretrained(tmp_path / str(i))
        told = json.loads(Path(tmp_path, str(i), "config.json").read_text())["quantization_config"]
        assert told["quant_method"] == "fusedmoe" and told["format"] == format
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(i), dtype=torch.bfloat16)
        assert all(isinstance(p, QuantTensor) for p in stacks(again).values()) and torch.equal(logits(again), logits(want))
    again.save_pretrained(tmp_path / "third")
    third = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "third", dtype=torch.bfloat16)
    assert torch.equal(logits(third), logits(want))
    never_decoded[1]()
    plain = third.dequantize()
    assert not any(isinstance(p, QuantTensor) for p in plain.parameters()) and not hasattr(plain.config, "quantization_config")
    assert torch.equal(logits(plain), logits(want))
    plain.save_pretrained(tmp_path / "dequantised")
    assert torch.equal(logits(fusedmoe.apply(cls.from_pretrained(tmp_path / "dequantised", dtype=torch.bfloat16))), logits(want))


def test_what_it_prints():
    model = fusedmoe.quantize(qwen3(), "nf4")
    assert "gate_up_proj nf4 [4, 128, 64]" in str(model) and "fusedmoe: fused" in str(model)
    assert "gate_up_proj nf4 [4, 128, 64]" in fusedmoe.describe(model)
    assert "nf4" not in str(fusedmoe.dequantize(model))


def test_what_cannot_be_is_said(tmp_path):
    qwen3().save_pretrained(tmp_path / "plain")
    load = transformers.Qwen3MoeForCausalLM.from_pretrained
    with pytest.raises(ValueError, match="format is 'nf5', expected one of nf4"):
        fusedmoe.QuantConfig("nf5")
    with pytest.raises(ValueError, match="the checkpoint is not quantised; expected a format: nf4"):
        load(tmp_path / "plain", quantization_config=fusedmoe.QuantConfig())
    with pytest.raises(ValueError, match="linears without a format"):
        fusedmoe.QuantConfig(linears=transformers.BitsAndBytesConfig(load_in_4bit=True))
    load(tmp_path / "plain", quantization_config=fusedmoe.QuantConfig("nf4")).save_pretrained(tmp_path / "nf4")
    with pytest.raises(ValueError, match="the format is 'int8', but the checkpoint holds its experts as 'nf4'"):
        load(tmp_path / "nf4", quantization_config=fusedmoe.QuantConfig("int8"))
    torch.manual_seed(0)
    dense = transformers.Qwen3Config(**{k: v for k, v in SIZES.items() if "experts" not in k}, intermediate_size=64)
    transformers.Qwen3ForCausalLM(dense).save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no stacked experts"):
        transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=fusedmoe.QuantConfig("nf4"))


# ---- checkpoints that are quantised already --------------------------------------------------------------------------
def checkpoint(model, folder, config, quantise, which=".mlp.experts."):
    """The model saved, with quantise(weight) in the place of each Linear's weight whose name has `which`, and this quantization_config."""
    safetensors = pytest.importorskip("safetensors.torch")
    model.save_pretrained(folder)
    state = safetensors.load_file(folder / "model.safetensors")
    for name in [n for n in state if n.endswith("_proj.weight") and which in n]:
        made = quantise(state.pop(name))
        state |= {name.removesuffix("weight") + key: t.contiguous() for key, t in made.items()}
    safetensors.save_file(state, folder / "model.safetensors", {"format": "pt"})
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, "quantization_config": config}))
    return state


def same_files(a, b):
    safetensors = pytest.importorskip("safetensors.torch")
    a, b = (safetensors.load_file(folder / "model.safetensors") for folder in (a, b))
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for name, t in a.items():
        assert t.dtype == b[name].dtype and torch.equal(t.view(torch.uint8), b[name].view(torch.uint8)), name


def needs_5_23():
    if not hasattr(pytest.importorskip("transformers.quantizers.base").HfQuantizer, "serialized_names"):
        pytest.skip("transformers before 5.23: QuantConfig() is refused there")


def kept(model, folder):
    needs_5_23()
    loaded, info = type(model).from_pretrained(folder, quantization_config=fusedmoe.QuantConfig(), dtype=torch.bfloat16,
                                               output_loading_info=True)  # fmt: skip
    assert not any(info.get(n) for n in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    assert all(isinstance(p, QuantTensor) and not p.requires_grad for p in stacks(loaded).values())
    return loaded


def test_mxfp4_of_gpt_oss_is_kept(tmp_path, never_decoded):
    """Bit for bit what transformers' own decoding gives, and saved as the file that came."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = gpt_oss()
    model.save_pretrained(tmp_path / "came")
    state = safetensors.load_file(tmp_path / "came/model.safetensors")
    for name in [n for n in state if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        q = QuantTensor.from_weights(state.pop(name).transpose(1, 2), "mxfp4")
        state |= {f"{name}_blocks": q.codes.unflatten(-1, (-1, 16)).contiguous(), f"{name}_scales": q.scale}
    safetensors.save_file(state, tmp_path / "came/model.safetensors", {"format": "pt"})
    told = json.loads((tmp_path / "came/config.json").read_text())
    (tmp_path / "came/config.json").write_text(json.dumps({**told, "quantization_config": {"quant_method": "mxfp4"}}))
    decoded = transformers.Mxfp4Config(dequantize=True)
    want = type(model).from_pretrained(tmp_path / "came", quantization_config=decoded, dtype=torch.bfloat16)
    loaded = kept(model, tmp_path / "came")
    for name, p in stacks(want).items():
        assert torch.equal(p, stacks(loaded)[name].dequantize())
    never_decoded[0]()
    assert torch.equal(logits(loaded), logits(fusedmoe.apply(want)))
    loaded.save_pretrained(tmp_path / "saved")
    same_files(tmp_path / "came", tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    fresh = kept(model, tmp_path / "saved")
    for p in stacks(fresh).values():
        p.codes.zero_()
    fresh.load_state_dict(loaded.state_dict())
    assert torch.equal(logits(fresh), logits(loaded))


def _scales(w, group, largest):
    grouped = w.float().unflatten(-1, (-1, group)) if group else w.float().unsqueeze(-2)
    return (grouped.abs().amax(-1) / largest).clamp(min=1e-6)


def _compressed(kind):
    """How compressed-tensors writes a weight, its config, and how it decodes it: all of it its own code."""
    ct = pytest.importorskip("compressed_tensors")
    q = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    group, fp4 = dict(num_bits=4, group_size=32, strategy="group"), dict(num_bits=4, type="float")
    row, fp8 = dict(strategy="channel"), dict(num_bits=8, type="float")
    absmax = lambda w: w.float().abs().max().reshape(1)  # noqa: E731
    zeros = lambda w: torch.randint(-3, 3, (len(w), w.shape[1] // 32)).to(torch.int8)  # noqa: E731
    blocks = lambda w: w.float().unfold(0, 32, 32).unfold(1, 32, 32).abs().amax((-1, -2))  # noqa: E731
    nv = dict(strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
    format, args, make = {
        "int4": ("pack-quantized", group, lambda w: {"weight_scale": _scales(w, 32, 7.5).bfloat16()}),
        "int4 zeros": ("pack-quantized", dict(group, symmetric=False),
                       lambda w: {"weight_scale": _scales(w, 32, 7).bfloat16(), "weight_zero_point": zeros(w)}),
        "int4 channel": ("pack-quantized", dict(row, num_bits=4), lambda w: {"weight_scale": _scales(w, 0, 7.5).bfloat16()}),
        "int8 packed": ("pack-quantized", dict(row, num_bits=8), lambda w: {"weight_scale": _scales(w, 0, 127).bfloat16()}),
        "int8": ("int-quantized", dict(row, num_bits=8), lambda w: {"weight_scale": _scales(w, 0, 127).bfloat16()}),
        "fp8": ("float-quantized", fp8 | row, lambda w: {"weight_scale": _scales(w, 0, 448).bfloat16()}),
        "fp8 tensor": ("float-quantized", dict(fp8, strategy="tensor"), lambda w: {"weight_scale": (absmax(w) / 448).bfloat16()}),
        "fp8 block": ("float-quantized", dict(fp8, strategy="block", block_structure=[32, 32]),
                      lambda w: {"weight_scale": (blocks(w) / 448).bfloat16()}),
        "nvfp4": ("nvfp4-pack-quantized", fp4 | nv,
                  lambda w: {"weight_global_scale": 448 * 6 / absmax(w),
                             "weight_scale": (_scales(w, 16, 6) * 448 * 6 / absmax(w)).to(torch.float8_e4m3fn).float()}),
        "mxfp4": ("mxfp4-pack-quantized", dict(fp4, strategy="group", group_size=32, scale_dtype="torch.uint8"),
                  lambda w: {"weight_scale": _scales(w, 32, 6).log2().ceil().exp2()}),
    }[kind]  # fmt: skip
    scheme = q.QuantizationScheme(targets=["Linear"], weights=q.QuantizationArgs(**args), format=format)
    compressor = compressors.BaseCompressor.get_value_from_registry(format)
    config = q.QuantizationConfig(config_groups={"group_0": scheme}, format=format, quantization_status="compressed", ignore=["lm_head"])
    told = {**json.loads(config.model_dump_json(exclude_none=True)), "quant_method": "compressed-tensors"}
    assert ct.__version__
    return lambda w: compressor.compress({"weight": w, **make(w)}, scheme), told, lambda t: compressor.decompress(t, scheme)["weight"]


KINDS = "int4", "int4 zeros", "int4 channel", "int8 packed", "int8", "fp8", "fp8 tensor", "fp8 block", "nvfp4", "mxfp4"


@pytest.mark.parametrize("kind", KINDS)
def test_experts_of_compressed_tensors_are_kept(kind, tmp_path, never_decoded):
    """The values are compressed-tensors' own, bit for bit (NVFP4: within its rounding of scales), and the file is saved as it came."""
    compress, config, decompress = _compressed(kind)
    model = qwen3(I=32 if kind == "fp8 block" else 64)
    state = checkpoint(model, tmp_path / "came", {**config, "ignore": ["lm_head", "re:.*self_attn.*"]}, compress)
    loaded = kept(model, tmp_path / "came")
    for name, w in stacks(loaded).items():
        base, got = name.rsplit(".", 1)[0], w.dequantize()
        for e in range(4):
            for i, proj in enumerate(("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)):
                start = f"{base}.{e}.{proj}."
                want = decompress({k.removeprefix(start): t for k, t in state.items() if k.startswith(start)}).to(torch.bfloat16)
                part = got[e, i * len(want) : (i + 1) * len(want)]
                if kind == "nvfp4":
                    assert (part - want).float().norm() < 6e-3 * want.float().norm()
                else:
                    assert torch.equal(part, want), (name, e, proj)
    plain = fusedmoe.dequantize(copy.deepcopy(loaded))
    never_decoded[0]()
    assert torch.equal(logits(loaded), logits(plain))
    loaded.save_pretrained(tmp_path / "saved")
    same_files(tmp_path / "came", tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"
    assert torch.equal(logits(kept(model, tmp_path / "saved")), logits(loaded))
    fresh = kept(model, tmp_path / "came")
    for p in stacks(fresh).values():
        p.codes.zero_()
    fresh.load_state_dict(loaded.state_dict())
    assert torch.equal(logits(fresh), logits(loaded))


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_other_linears_of_such_a_checkpoint_are_decoded(kind, tmp_path):
    """What is saved then is ours, and says so; the values are those of transformers' own loading."""
    compress, config, _ = _compressed(kind)
    model = qwen3()
    checkpoint(model, tmp_path / "came", config, compress, "_proj")
    dequantize = transformers.CompressedTensorsConfig(dequantize=True)
    want = type(model).from_pretrained(tmp_path / "came", quantization_config=dequantize, dtype=torch.bfloat16)
    loaded = kept(model, tmp_path / "came")
    assert torch.equal(logits(loaded), logits(fusedmoe.apply(want)))
    assert any(".0.gate_proj." in n for n in loaded.state_dict())
    loaded.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]["quant_method"] == "fusedmoe"
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert all(isinstance(p, QuantTensor) for p in stacks(again).values()) and torch.equal(logits(again), logits(want))


@pytest.mark.parametrize("H, I", [(128, 128), (256, 64)])
def test_fp8_blocks_are_kept(H, I, tmp_path, never_decoded):
    """With I = 64 the grid of scales begins anew with the ups."""
    needs_5_23()

    def quantise(w):
        rows, cols = -(-w.shape[0] // 128), -(-w.shape[1] // 128)
        big = torch.nn.functional.pad(w.float(), (0, cols * 128 - w.shape[1], 0, rows * 128 - w.shape[0]))
        scale = big.unfold(0, 128, 128).unfold(1, 128, 128).abs().amax((-1, -2)) / 448
        each = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: w.shape[0], : w.shape[1]]
        return {"weight": (w.float() / each).to(torch.float8_e4m3fn), "weight_scale_inv": scale}

    model = qwen3(I=I, hidden_size=H)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    checkpoint(model, tmp_path / "came", config, quantise)
    own = transformers.FineGrainedFP8Config(dequantize=True)
    want = type(model).from_pretrained(tmp_path / "came", quantization_config=own, dtype=torch.bfloat16)
    loaded = kept(model, tmp_path / "came")
    for name, p in stacks(want).items():
        assert torch.equal(p, stacks(loaded)[name].dequantize()), name
    never_decoded[0]()
    assert torch.equal(logits(loaded), logits(fusedmoe.apply(want)))
    loaded.save_pretrained(tmp_path / "saved")
    same_files(tmp_path / "came", tmp_path / "saved")


def _gptq(w, order, g=32, v1=True):
    """By the formula: w = s (q - z), four bits; packed as GPTQ (order None) or AWQ do."""
    N, K = w.shape
    s = (w.float().unflatten(1, (-1, g)).abs().amax(-1) / 7).clamp(min=1e-6).half()
    z = torch.randint(5, 11, s.shape)
    q = (w.float() / s.float().repeat_interleave(g, 1) + z.repeat_interleave(g, 1)).round().clamp(0, 15).long()
    want = (q - z.repeat_interleave(g, 1)).half() * s.repeat_interleave(g, 1)
    pack = lambda t, dim, order: sum(t.select(dim, i) << 4 * j for j, i in enumerate(order))  # noqa: E731
    fit = lambda t: torch.where(t >= 2**31, t - 2**32, t).to(torch.int32)  # noqa: E731
    if order is None:
        qweight, qzeros = pack(q.t().unflatten(0, (-1, 8)), 1, range(8)), pack((z - int(v1)).t().unflatten(1, (-1, 8)), 2, range(8))
        more = {"g_idx": (torch.arange(K) // g).to(torch.int32)}
    else:
        qweight, qzeros = (pack(t.t().unflatten(1, (-1, 8)), 2, order) for t in (q, z))
        more = {}
    return {"qweight": fit(qweight), "qzeros": fit(qzeros), "scales": s.t(), **more}, want


AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


@pytest.mark.parametrize("which", [".mlp.experts.", "_proj"])
@pytest.mark.parametrize("method", ["gptq", "gptq_v2", "awq"])
def test_experts_of_gptq_and_awq_are_kept_without_their_packages(method, which, tmp_path):
    """Tensors laid out by their documented formats; the values are those of the formula in float16, rounded to the model's dtype."""
    model = qwen3()

    def quantise(w):
        made, want = _gptq(w, AWQ if method == "awq" else None, v1=method == "gptq")
        return {**made, "want": want}

    config = {"quant_method": method.split("_")[0], "bits": 4, "group_size": 32, "checkpoint_format": method, "desc_act": False}
    if method == "awq":
        config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    state = checkpoint(model, tmp_path / "came", config, quantise, which)
    want = {n.removesuffix("want"): state.pop(n) for n in [*state] if n.endswith(".want")}
    pytest.importorskip("safetensors.torch").save_file(state, tmp_path / "came/model.safetensors", {"format": "pt"})
    loaded = kept(model, tmp_path / "came")
    for name, w in stacks(loaded).items():
        base, got = name.rsplit(".", 1)[0], w.dequantize(torch.float16)
        for e in range(4):
            names = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            assert torch.equal(got[e], torch.cat([want[f"{base}.{e}.{n}."] for n in names]))
    if which == "_proj":
        for n in ("q_proj", "o_proj"):
            of = f"model.layers.1.self_attn.{n}."
            assert (loaded.get_parameter(of + "weight") - want[of].bfloat16()).abs().max() <= 2**-8 * want[of].abs().max()
        return
    loaded.save_pretrained(tmp_path / "saved")
    same_files(tmp_path / "came", tmp_path / "saved")
    assert torch.equal(logits(kept(model, tmp_path / "saved")), logits(loaded))


def test_groups_out_of_order_are_decoded_and_said(tmp_path, caplog):
    wanted = []

    def quantise(w):
        made, _ = _gptq(w, None)
        q, z = (torch.stack([(made[n] >> 4 * j) & 15 for j in range(8)], d).flatten(d - 1, d) for n, d in (("qweight", 1), ("qzeros", 2)))
        g = made["g_idx"].flip(0)
        wanted.append(((q - z[g.long()] - 1) * made["scales"].float()[g.long()]).t().bfloat16())
        return {**made, "g_idx": g}

    model = qwen3()
    checkpoint(model, tmp_path / "came", {"quant_method": "gptq", "bits": 4, "group_size": 32}, quantise)
    needs_5_23()
    loaded = type(model).from_pretrained(tmp_path / "came", quantization_config=fusedmoe.QuantConfig(), dtype=torch.bfloat16)
    assert not any(isinstance(p, QuantTensor) for p in loaded.parameters()) and "its g_idx is not in order" in caplog.text
    held = lambda w: w.detach().contiguous().view(torch.int16).numpy().tobytes()  # noqa: E731
    got = {held(w) for p in stacks(loaded).values() for w in (p.flatten(0, 1).split(64) if p.shape[1] == 128 else p)}
    assert got == {held(w) for w in wanted}
