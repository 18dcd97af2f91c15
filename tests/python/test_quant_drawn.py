# SPDX-License-Identifier: Apache-2.0
"""Quantised weights as nobody lists them: drawn strides, blocks that rows do not divide, tensors of the wrong kind."""

import copy

import pytest
import torch

import fusedmoe
from fusedmoe.quant import FORMATS, QuantTensor, foreign
from fusedmoe.quant.formats import HALVES

E, N, K = 3, 32, 64


def stack(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul_(0.1).to(dtype)


STRIDES = {
    "every second": lambda t: torch.stack((t, t), -1).flatten(-2)[..., ::2],
    "columns first": lambda t: t.mT.contiguous().mT,
    "experts inside": lambda t: t.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "offset": lambda t: torch.cat((t.flatten()[:3], t.flatten()))[3:].view(t.shape),
    "wide rows": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("format", FORMATS)
def test_codes_and_scales_may_have_any_strides(format, strides):
    made, lay = QuantTensor.from_weights(stack(E, N, K), format), STRIDES[strides]
    other = made.map(lambda t: lay(t) if t.dim() == 3 else t)
    assert torch.equal(other.dequantize(), made.dequantize())
    down = QuantTensor.from_weights(stack(E, K, N // 2), format)
    x, ids, p = stack(5, K), torch.randint(E, (5, 2)), torch.rand(5, 2)
    assert torch.equal(fusedmoe.experts(x, ids, p, [other, down]), fusedmoe.experts(x, ids, p, [made, down]))


def test_one_scale_may_be_expanded():
    made = QuantTensor.from_weights(stack(E, N, K), "int8")
    made.scale.fill_(0.5)
    other = QuantTensor(made.codes, torch.tensor(0.5).expand(made.scale.shape), made.format, made.shape, made.dtype, made.scale2)
    assert torch.equal(other.dequantize(), made.dequantize())


@pytest.mark.parametrize("shape, block", [((3, 8, 96), 64), ((8, 32), 64), ((2, 4, 160), 128), ((5, 6), 64), ((2, 8, 64), 64)])
@pytest.mark.parametrize("nested", [False, True])
def test_blocks_of_bitsandbytes_that_do_not_end_with_a_row(shape, block, nested):
    """By hand: its own decoding on the CPU (0.50) takes the scale of another block there."""
    F = pytest.importorskip("bitsandbytes").functional
    data, state = F.quantize_4bit(stack(*shape, dtype=torch.float32), blocksize=block, quant_type="nf4", compress_statistics=nested)
    absmax = F.dequantize_blockwise(state.absmax, state.state2) + state.offset if nested else state.absmax
    codes = torch.stack((data.flatten() >> 4, data.flatten() & 15), -1).flatten().long()
    n = codes.numel()
    want = (state.code[codes] * absmax.repeat_interleave(block)[:n]).view(shape)
    assert torch.equal(QuantTensor.from_bitsandbytes(data, state).dequantize(), want)


def test_the_grid_of_gates_and_ups_where_both_have_as_many_rows():
    """I = 96: two rows of scales are one of the gates and one of the ups, as checkpoints that are joined have them."""
    w, scale = torch.randn(2, 192, 128).to(torch.float8_e4m3fn), torch.rand(2, 2, 1)
    made = QuantTensor.from_fp8(w, scale, torch.float32, halves=True)
    assert made.format.flags & HALVES and torch.equal(made.dequantize(), w.float() * scale.repeat_interleave(96, 1))
    plain = QuantTensor.from_fp8(w, scale, torch.float32)
    assert not plain.format.flags and torch.equal(plain.dequantize(), w.float() * scale.repeat_interleave(128, 1)[:, :192])
    assert not QuantTensor.from_fp8(w[:, :128], scale[:, :1], halves=True).format.flags


def test_experts_of_transformers_with_such_a_grid():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(fp8, "FP8Experts"):
        pytest.skip("transformers has no FP8Experts")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(hidden_size=128, moe_intermediate_size=96, num_experts=2, dtype=torch.float32)
    config._experts_implementation = "eager"
    experts = fp8.FP8Experts(config, block_size=(128, 128)).requires_grad_(False)
    for p in experts.parameters():
        p.data = torch.rand(p.shape).to(p.dtype)
    gate_up, scale = experts.gate_up_proj.data.float(), experts.gate_up_proj_scale_inv.data.clone()
    if scale.shape[1] != 2:
        pytest.skip("this transformers has another grid")
    fusedmoe.apply(torch.nn.Sequential(experts))
    assert torch.equal(experts.gate_up_proj.dequantize(), gate_up * scale.repeat_interleave(96, 1))


@pytest.mark.parametrize("scales", ["float", "ue8m0"])
def test_experts_of_transformers_in_fp4(scales):
    """expert_dtype "fp4", as DeepSeek-V4 has it: two codes a byte. They run as they are, and state_dict gives what came."""
    fp8, transformers = pytest.importorskip("transformers.integrations.finegrained_fp8"), pytest.importorskip("transformers")
    if not hasattr(fp8, "Fp8Dequantize") or not hasattr(fp8.Fp8Dequantize, "_unpack_fp4"):
        pytest.skip("transformers knows no experts in FP4")
    config = transformers.Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=32, num_experts=2, dtype=torch.bfloat16)
    config._experts_implementation = "eager"
    experts = fp8.FP8Experts(config, expert_dtype="fp4", scale_fmt=scales).requires_grad_(False)
    for p in experts.parameters():
        p.data = torch.randint(-128, 128, p.shape).to(torch.int8) if p.dtype == torch.int8 else torch.rand(p.shape).add(0.01).to(p.dtype)
    before, decode = {n: t.clone() for n, t in experts.state_dict().items()}, fp8.Fp8Dequantize(None)._dequantize_one
    want = {n: decode(before[n], before[f"{n}_scale_inv"], torch.bfloat16) for n in ("gate_up_proj", "down_proj")}
    fusedmoe.apply(torch.nn.Sequential(experts))
    x, ids, p = stack(4, 64), torch.randint(2, (4, 1)), torch.rand(4, 1)
    assert all(torch.equal(getattr(experts, n).dequantize(), w) for n, w in want.items())
    assert torch.equal(experts(x, ids, p), fusedmoe.experts(x, ids, p, [*want.values()], flags=fusedmoe.Flag.SKIP_E))
    after = experts.state_dict()
    assert before.keys() == after.keys() and all(before[n].dtype == after[n].dtype for n in before)
    assert all(torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8)) for n in before)
    experts.load_state_dict(before)
    with pytest.raises(ValueError, match=r"from_fp4: codes is \[2, 4, 16\], scale_inv \[2, 4, 3\], expected"):
        QuantTensor.from_fp4(torch.zeros(2, 4, 16, dtype=torch.int8), torch.ones(2, 4, 3))


CASES = {
    "E5M2": (lambda: QuantTensor.from_fp8(stack(2, 8, 8).to(torch.float8_e5m2), torch.rand(2, 1, 1)), TypeError,
             "from_fp8: w is float8_e5m2, expected float8_e4m3fn or uint8"),
    "float64 scales": (lambda: QuantTensor.from_fp8(stack(2, 8, 8).to(torch.float8_e4m3fn), torch.rand(2, 1, 1).double()), TypeError,
                       "from_fp8: scale_inv is float64, expected float32 or"),
    "a matrix": (lambda: QuantTensor.from_fp8(stack(8, 8).to(torch.float8_e4m3fn), torch.rand(1, 1)), ValueError,
                 r"from_fp8: w is \[8, 8\], scale_inv \[1, 1\], expected \[E, N, K\]"),
    "float blocks": (lambda: QuantTensor.from_mxfp4(torch.rand(2, 4, 2, 16), torch.zeros(2, 4, 2, dtype=torch.uint8)), TypeError,
                     "from_mxfp4: blocks is float32, expected int8 or"),
    "float scales": (lambda: QuantTensor.from_mxfp4(torch.zeros(2, 4, 2, 16, dtype=torch.uint8), torch.rand(2, 4, 2)), TypeError,
                     "from_mxfp4: scales is float32, expected float8_e8m0fnu or uint8"),
    "flat blocks": (lambda: QuantTensor.from_mxfp4(torch.zeros(4, 16).byte(), torch.zeros(4, 1).byte()), ValueError,
                    r"from_mxfp4: blocks is \[4, 16\], expected \[E, N, K/32, 16\]"),
    "fewer scales": (lambda: nvfp4(torch.ones(2, 4, 1), torch.ones(1)), ValueError, r"scale is \[2, 4, 1\], expected \[2, 4, 2\]"),
    "more scales": (lambda: nvfp4(torch.ones(2, 4, 2), torch.ones(3)), ValueError, "from_nvfp4: scale2 has 3 numbers, expected 1 or E = 2"),
    "odd rows": (lambda: QuantTensor.from_bitsandbytes(torch.zeros(8, 1), odd()), ValueError, r"the weights are \[3, 5\], .*K even"),
}  # fmt: skip


def nvfp4(scale, scale2):
    return QuantTensor.from_nvfp4(torch.zeros(2, 4, 16, dtype=torch.uint8), scale.to(torch.float8_e4m3fn), scale2)


def odd():
    return pytest.importorskip("bitsandbytes").functional.quantize_4bit(stack(3, 5, dtype=torch.float32), blocksize=64, quant_type="nf4")[1]


@pytest.mark.parametrize("case", CASES)
def test_wrong_tensors_are_named(case):
    call, kind, words = CASES[case]
    with pytest.raises(kind, match=words):
        call()


# ---- compressed-tensors ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy, K", [("group", 64), ("channel", 36), ("tensor", 100)])
@pytest.mark.parametrize("bits", [4, 8])
def test_asymmetric_codes_of_compressed_tensors(bits, strategy, K):
    """Zero points packed along the rows, and the one of a whole tensor, which is not packed."""
    ct = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    group = 32 if strategy == "group" else None
    args = ct.QuantizationArgs(num_bits=bits, type="int", strategy=strategy, group_size=group, symmetric=False)
    scheme = ct.QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")
    compressor, w, rows = compressors.BaseCompressor.get_value_from_registry("pack-quantized"), stack(21, K, dtype=torch.float32), 21
    grid = {"group": (rows, K // 32), "channel": (rows, 1), "tensor": (1,)}[strategy]
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    zero = torch.randint(low, high, grid).to(torch.int8)
    given = compressor.compress({"weight": w, "weight_scale": torch.full(grid, 0.6 / 2**bits), "weight_zero_point": zero}, scheme)
    want = compressor.decompress(copy.deepcopy(given), scheme)["weight"]
    made, how = foreign.read(dict(given), torch.float32)
    assert torch.equal(made.dequantize(), want)
    back = foreign.write(made, how)
    assert back.keys() == given.keys() and all(torch.equal(back[n], given[n]) and back[n].dtype == given[n].dtype for n in back)


def test_a_row_that_does_not_tell_its_bits():
    tensors = {"weight_packed": torch.ones(8, 1, dtype=torch.int32), "weight_scale": torch.ones(8, 1), "weight_shape": torch.tensor([8, 4])}
    with pytest.raises(foreign.UnknownLayout, match=r"\[8, 1\] of 4 weights a row: not 4 or 8 bits"):
        foreign.read(tensors, torch.float32)


# ---- flags of training ---------------------------------------------------------------------------------------------------
def test_requires_grad_matters_where_there_is_a_gradient_alone():
    w = [torch.nn.Parameter(QuantTensor.from_weights(stack(E, *s), "nf4")) for s in ((N, K), (K, N // 2))]
    x, ids, p = stack(4, K), torch.randint(E, (4, 2)), torch.rand(4, 2)
    assert all(t.requires_grad for t in w)
    with torch.no_grad():
        assert torch.equal(fusedmoe.experts(x, ids, p, w), fusedmoe.experts(x, ids, p, [t.detach() for t in w]))
    with pytest.raises(ValueError, match=r"w\[0\] is quantised and requires a gradient"):
        fusedmoe.experts(x, ids, p, w)


# ---- models: arguments, and what a state_dict may lack --------------------------------------------------------------------
@pytest.fixture
def saved(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.6")
    common = pytest.importorskip("common")
    model = common.tiny("Qwen3Moe").eval()
    model.save_pretrained(tmp_path / "plain")
    fusedmoe.quantize(model, "nf4").save_pretrained(tmp_path / "nf4")
    load = transformers.AutoModelForCausalLM.from_pretrained
    return model, lambda folder, **more: load(tmp_path / folder, **more)


def quantised(model):
    return {n for n, p in model.named_parameters() if isinstance(p, QuantTensor)}


def test_skip_is_a_word_or_several(saved):
    _, load = saved
    for skip, left in (("layers.0.", 2), (["layers.0."], 2), (("layers.0.", "layers.1."), 0), (None, 4)):
        assert len(quantised(load("plain", quantization_config=fusedmoe.QuantConfig("nf4", skip=skip)))) == left
    for wrong in (3, [0]):
        with pytest.raises(TypeError, match=r"QuantConfig: skip is \[[03]\], expected parts of names"):
            fusedmoe.QuantConfig("nf4", skip=wrong)
    for wrong in ("nf4", 4, fusedmoe.QuantConfig("nf4")):
        with pytest.raises(TypeError, match=f"QuantConfig: linears is a {type(wrong).__name__}, expected a config of transformers"):
            fusedmoe.QuantConfig("nf4", linears=wrong)


def test_a_saved_model_takes_the_dtype_that_is_asked(saved):
    model, load = saved
    assert {p.dtype for p in load("nf4").parameters()} == {torch.float32}
    other = load("nf4", dtype=torch.bfloat16)
    assert {p.dtype for p in other.parameters()} == {torch.bfloat16} and len(quantised(other)) == 4
    got, want = (m(torch.ones(1, 3).long()).logits for m in (other, copy.deepcopy(model).to(torch.bfloat16)))
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)


@pytest.mark.parametrize("part, change, message", [
    ("", None, "its codes are missing"), ("", lambda t: t[:1], r"its codes is \[1, 32, 16\], expected \[8, 32, 16\] for nf4"),
    ("", lambda t: t.float(), "its codes is torch.float32, expected torch.uint8"), (".scale", None, "its scale is missing"),
    (".scale", lambda t: t[..., :0], r"its scale is \[8, 32, 0\], expected \[8, 32, 1\]"),
    (".scale", lambda t: t.long(), "its scale is torch.int64"),
    (".quant", lambda t: t[:1], ".quant does not say what its codes mean"), (".quant", lambda t: t * 0, ".quant does not say"),
])  # fmt: skip
def test_a_state_dict_that_lacks_something(part, change, message, saved):
    model, _ = saved
    state, key = model.state_dict(), "model.layers.0.mlp.experts.gate_up_proj"
    if change is None:
        del state[key + part]
    else:
        state[key + part] = change(state[key + part])
    before = model(torch.ones(1, 3).long()).logits
    with pytest.raises(RuntimeError, match=f"{key}: {message}"):
        model.load_state_dict(state)
    assert torch.equal(model(torch.ones(1, 3).long()).logits, before)


def test_a_checkpoint_without_what_codes_mean(saved, tmp_path):
    from safetensors.torch import load_file, save_file

    file = tmp_path / "nf4/model.safetensors"
    state = load_file(file)
    del state["model.layers.0.mlp.experts.gate_up_proj.quant"]
    save_file(state, file, {"format": "pt"})
    with pytest.raises(RuntimeError):
        saved[1]("nf4")


def test_what_cannot_be_quantised_is_named(saved):
    for call in (fusedmoe.quantize, fusedmoe.dequantize):
        with pytest.raises(TypeError, match=rf"{call.__name__}: model is a str \('m'\), expected a torch.nn.Module"):
            call("m")
    _, load = saved
    with pytest.raises(ValueError, match=r"gate_up_proj is on meta, \[8, 32, 32\]: there are no numbers in it"):
        fusedmoe.quantize(load("plain").to("meta"))
