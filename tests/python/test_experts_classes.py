# SPDX-License-Identifier: Apache-2.0
"""Every experts class of the installed transformers (v5), ours against its own forward: outputs and every gradient."""

import importlib
import os
import random
import re
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch
import transformers

import fusedmoe
from common import V5, rel, tiny
from fusedmoe import ops
from fusedmoe.integrations import layers
from fusedmoe.integrations import transformers as hf

if not V5:
    pytest.skip("transformers v4 has no ExpertsInterface", allow_module_level=True)
hf.register()


def classes() -> list[type]:
    """All classes under @use_experts_implementation, read from the installed sources."""
    found = []
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        names = re.findall(r"@use_experts_implementation(?:\([^)]*\))?\s*\nclass (\w+)", path.read_text())
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}") if names else None
        found += [getattr(module, name) for name in names]
    return found


CLASSES = classes()
COMPOSED = {"Inkling2Experts"}  # softcapped SwiGLU
E, T, k = 8, 20, 3


def build(cls: type, **extra):
    # The limit is no bfloat16: at a clamp's border the gradient is torch's choice, 1 up to torch 2.13 and 0 in 2.15.
    sizes = dict(num_experts=E, num_local_experts=E, n_routed_experts=E, moe_num_experts=E, hidden_size=32, moe_hidden_size=32,
                 moe_intermediate_size=13, intermediate_size=13, hidden_act="silu", hidden_activation="gelu_pytorch_tanh",
                 mlp_hidden_act="relu2", swiglu_limit=1.003, swiglu_alpha=1.702, moe_latent_size=None, rms_norm_eps=1e-6,
                 post_norm_eps=1e-6, mlp_gate_softcap=1.3, mlp_up_softcap=0.9, _experts_implementation="eager")  # fmt: skip
    config = types.SimpleNamespace(**{**sizes, **extra})
    torch.manual_seed(0)
    try:
        module = cls(config)
    except TypeError:
        module = cls(config, intermediate_size=13)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return module


def inputs(module, tokens: int = T, dtype=torch.float32):
    """Duplicates in a row, and one expert that nobody asks for."""
    H = module.down_proj.shape[2 if getattr(module, "is_transposed", False) else 1]
    g = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, H, generator=g).to(dtype).requires_grad_()
    p = torch.rand(tokens, k, generator=g).to(dtype).requires_grad_()
    ids = torch.randint(0, E - 1, (tokens, k), generator=g)
    ids[::5] = ids[::5, :1]
    return x, ids, p


def run(module, name, x, ids, p):
    module.config._experts_implementation = name
    out = module(x, ids, p)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    return [out, *torch.autograd.grad(out, [x, p, *module.parameters()], dout, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_float32(cls):
    module = build(cls)
    x, ids, p = inputs(module)
    want, got, composed = (run(module, name, x, ids, p) for name in ("eager", "fusedmoe", "fusedmoe_composed"))
    assert max(rel(a, b) for ours in (got, composed) for a, b in zip(ours, want, strict=True)) <= 1e-5
    layer = layers.layer_of(module)
    assert not layer.own and (layer.act is None) == (cls.__name__ in COMPOSED)  # fused, or composed around the model's norm: never eager
    down = got[1 + 2 + [n for n, _ in module.named_parameters()].index("down_proj")]
    assert float(down[E - 1].abs().max()) == 0.0  # the idle expert


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_bfloat16(cls):
    module = build(cls)
    for p in module.parameters():
        p.data = p.data.bfloat16().float()
    x, ids, p = inputs(module)
    x, p = (t.detach().bfloat16() for t in (x, p))
    exact = run(module.double(), "eager", x.double().requires_grad_(), ids, p.double().requires_grad_())
    module.bfloat16()
    x, p = x.requires_grad_(), p.requires_grad_()
    want, got = (run(module, name, x, ids, p) for name in ("eager", "fusedmoe"))
    for a, b, c in zip(got, want, exact, strict=True):
        assert rel(a, c) <= 2 * rel(b, c)


@pytest.mark.parametrize("name", ["fusedmoe", "fusedmoe_composed"])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_no_tokens_and_sentinels(cls, name):
    module = build(cls)
    x, ids, p = inputs(module, 0)
    module.config._experts_implementation = name
    assert module(x, ids, p).shape == x.shape
    x, ids, p = inputs(module)
    ids[3] = ids[7, 1] = ids[-1] = E
    got = run(module, name, x, ids, p)
    kept = ids < E
    want = run(module, name, x, ids.clamp(max=E - 1), (p * kept).detach().requires_grad_())
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if i == 2:
            assert float(a[~kept].abs().max()) == 0.0
            a, b = a[kept], b[kept]
        assert a.isfinite().all() and rel(a, b) <= 1e-5


draw = random.Random(6)
DRAWS = [(draw.randint(1, 260), *sorted(draw.choices(range(1, 10), k=2), reverse=True)) for _ in range(9)]
BIASED = [c for c in CLASSES if build(c).has_bias and c.__name__ != "OpenAIPrivacyFilterExperts"]  # whose own computes in float32


@pytest.mark.parametrize("how", ["name", "activation"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(129, 2, 1), *DRAWS], ids=str)
@pytest.mark.parametrize("cls", BIASED, ids=lambda c: c.__name__)
def test_composed_layers_are_as_near_to_double_as_eager(cls, sizes, dtype, how):
    """The gradient of a bias is a sum over all rows of an expert: rounded once, not once a row."""
    tokens, experts, each = sizes
    if how == "activation":
        cls = type("Own", (cls,), dict(_apply_gate=lambda self, h: torch.nn.functional.mish(h[..., ::2]) * h[..., 1::2]))
    module = build(cls, num_experts=experts, num_local_experts=experts).to(dtype)
    x, g = inputs(module, tokens, dtype)[0], torch.Generator().manual_seed(3)
    ids = torch.rand(tokens, experts, generator=g).topk(each).indices
    p = torch.rand(tokens, each, generator=g).to(dtype).requires_grad_()
    own, ours = (run(module, name, x, ids, p) for name in ("eager", "fusedmoe_composed" if how == "name" else "fusedmoe"))
    exact = run(module.double(), "eager", x.detach().double().requires_grad_(), ids, p.detach().double().requires_grad_())
    names = ["out", "x", "p", *(name for name, _ in module.named_parameters())]
    far = {name: (rel(a, c), rel(b, c)) for name, a, b, c in zip(names, ours, own, exact, strict=True)}
    assert len(far) == 7 and all(a <= 1.05 * b for a, b in far.values()), far


def test_every_class_was_found():
    from transformers.integrations import moe

    marked = sum(path.read_text().count("\n@use_experts_implementation")
                 for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"))  # fmt: skip
    assert len(CLASSES) == marked > 20 and "fusedmoe" in moe.ALL_EXPERTS_FUNCTIONS


QWEN = next(c for c in CLASSES if c.__name__ == "Qwen3MoeExperts")


def test_unknown_flag_goes_to_its_own_forward(caplog):
    module = build(QWEN)
    x, ids, p = inputs(module)
    want = run(module, "eager", x, ids, p)
    run(module, "fusedmoe", x, ids, p)
    module.has_second_thoughts = True
    got = run(module, "fusedmoe", x, ids, p)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert "has_second_thoughts" in caplog.text and "QwenMoeExperts" not in caplog.text


def test_unknown_activation_is_the_models_own():
    module = build(QWEN)
    module.act_fn = torch.nn.Mish()
    x, ids, p = inputs(module)
    want, got = (run(module, name, x, ids, p) for name in ("eager", "fusedmoe"))
    assert layers.layer_of(module).act is None
    assert max(rel(a, b) for a, b in zip(got, want, strict=True)) <= 1e-5


def test_a_changed_activation_is_noticed():
    module = build(QWEN)
    x, ids, p = inputs(module)
    run(module, "fusedmoe", x, ids, p)
    for act in (torch.nn.GELU(), torch.nn.ReLU(), torch.nn.Mish()):
        module.act_fn = act
        want, got = (run(module, name, x, ids, p) for name in ("eager", "fusedmoe"))
        assert max(rel(a, b) for a, b in zip(got, want, strict=True)) <= 1e-5


def test_an_activation_is_known_by_its_result():
    class Mine(QWEN):
        def _apply_gate(self, h):
            g, u = h.chunk(2, dim=-1)
            return u.clamp(-3.0, 3.0) * torch.nn.functional.silu(g.clamp(max=3.0))

    module = build(Mine)
    module.swiglu_limit = 3.0
    x, ids, p = inputs(module)
    want, got = (run(module, name, x, ids, p) for name in ("batched_mm", "fusedmoe"))
    assert max(rel(a, b) for a, b in zip(got, want, strict=True)) <= 1e-5
    layer = layers.layer_of(module)
    assert (layer.act, layer.limit) == (ops.SWIGLU_CLAMP, 3.0)


def test_weights_that_are_computed():
    """PEFT shows the module W + dW, a tensor that is not a parameter."""
    from torch.nn.utils import parametrize

    class Plus(torch.nn.Module):
        def __init__(self, shape):
            super().__init__()
            self.delta = torch.nn.Parameter(torch.randn(shape) * 0.1)

        def forward(self, w):
            return w + self.delta

    module = build(QWEN)
    for name in ("gate_up_proj", "down_proj"):
        parametrize.register_parametrization(module, name, Plus(getattr(module, name).shape))
    x, ids, p = inputs(module)
    want, got, composed = (run(module, name, x, ids, p) for name in ("eager", "fusedmoe", "fusedmoe_composed"))
    assert max(rel(a, b) for ours in (got, composed) for a, b in zip(ours, want, strict=True)) <= 1e-5


def test_replace_default():
    from transformers.integrations.moe import ExpertsInterface

    before = dict(ExpertsInterface._global_mapping)
    try:
        hf.register(replace_default=True)
        assert ExpertsInterface._global_mapping["grouped_mm"] is hf.experts_forward
        module = build(QWEN)
        x, ids, p = inputs(module)
        assert rel(run(module, "batched_mm", x, ids, p)[0], run(module, "eager", x, ids, p)[0]) <= 1e-5
    finally:
        ExpertsInterface._global_mapping.clear()
        ExpertsInterface._global_mapping.update(before)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int8])  # uint8: two values of 4 bits
def test_quantized_experts_keep_their_own_forward(dtype, caplog):
    module = build(QWEN)
    x, ids, p = inputs(module)
    called = []

    class Quantized(QWEN):
        def forward(self, *args):
            return hf.experts_forward(self, *args)

        forward.__wrapped__ = lambda self, *args: called.append(args) or args[0]

    module.__class__ = Quantized
    for w in module.parameters():
        w.requires_grad_(False)
        w.data = w.data.to(dtype)
    assert module(x, ids, p) is x and called
    assert "Quantized" in caplog.text and "own forward" in caplog.text and str(dtype).removeprefix("torch.") in caplog.text


def test_our_name_is_in_the_table_of_fp8_experts():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(fp8, "FP8ExpertsInterface"):
        pytest.skip("this version has no table of its own for FP8")
    hf.register()
    assert fp8.FP8ExpertsInterface._global_mapping["fusedmoe"] is hf.experts_forward


def test_experts_in_a_form_that_is_not_ours_keep_what_was_chosen_for_them(caplog):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    model = tiny("Qwen3Moe")
    config = model.model.layers[0].mlp.experts.config
    try:
        for layer in model.model.layers:
            made = layer.mlp.experts = fp8.FP8Experts(config, block_size=(16, 16))
            for name in ("gate_up_proj", "down_proj"):
                made._parameters[name] = torch.nn.Parameter(getattr(made, name).data.view(torch.float8_e5m2), requires_grad=False)
    except (AttributeError, TypeError):
        pytest.skip("FP8Experts of this version is made another way")
    config._experts_implementation = "grouped_mm"
    model.config.quantization_config = {"quant_method": "fp8"}
    fusedmoe.apply(model)
    assert config._experts_implementation == "grouped_mm" and not any("forward" in vars(m) for m in model.modules())
    assert "float8_e5m2" in caplog.text and "FP8Experts" in caplog.text and "it is quantized" in caplog.text


def test_the_environment_can_replace_the_default():
    """FMOE_AUTOLOAD=replace: every process uses fusedmoe where it would have used grouped_mm."""
    if not any(e.name == "fusedmoe" for e in metadata.entry_points(group="torch.backends")):
        pytest.skip("fusedmoe is not installed here")
    code = "import torch; from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as f; print(f['grouped_mm'].__module__)"
    for value, want in (("1", "transformers.integrations.moe"), ("replace", "fusedmoe.integrations.transformers")):
        env = {**os.environ, "FMOE_AUTOLOAD": value}
        assert subprocess.check_output([sys.executable, "-c", code], text=True, env=env, cwd="/").strip() == want
