# SPDX-License-Identifier: Apache-2.0
"""What a module computes is found out by running it on a probe, in the very first call: in whatever context that call is made, the answer
is the same, the layer runs as docs/models.md says, and nothing outside the probe changes."""

import copy
import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fusedmoe
from common import V5, rel, set_implementation, step, tiny, worst
from fusedmoe import ops
from fusedmoe.integrations import layers, seams

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/external"))
import table

VERSION = Version(transformers.__version__)
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning", "torch.jit.TracerWarning")]
IDS = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(2))


# ---- every context, every kind of probe ----------------------------------------------------------------------------------------


class Refuse(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func.__name__ == "__get__", f"{func} was seen by a function mode"  # a shape or a device may be read
        return func(*args, **(kwargs or {}))


class RefuseDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was seen by a dispatch mode")


def refuse(*_):
    raise AssertionError("a saved-tensor hook was called")


@contextmanager
def setting(set_, value, before):
    set_(value)
    try:
        yield
    finally:
        set_(before)


def within(context):
    def call(probe):
        with context():
            return probe()

    return call


def transformed(transform):
    """Under a transform of functorch, whose function is called with a tensor and gives a scalar."""

    def call(probe):
        found = []
        transform(lambda x: (found.append(probe()), x.sum())[1])
        return found[0]

    return call


def in_backward(probe):
    """Where a checkpointed forward is run again."""
    found, x = [], torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: found.append(probe()))
    y.sum().backward()
    return found[0]


def in_checkpoint(reentrant):
    def call(probe):
        found, x = [], torch.ones(3, requires_grad=True)
        checkpoint(lambda x: (found.append(probe()), x.sin().sum())[1], x, use_reentrant=reentrant).backward()
        assert len(found) == 2 and found[0] == found[1]
        return found[0]

    return call


def fake():
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode()


def flops():
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False)


def quietly(probe):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is slow
        with torch.autograd.detect_anomaly():
            return probe()


def in_a_thread(probe):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(probe).result()


ONES = torch.ones(3)
CONTEXTS = {
    "checkpoint": in_checkpoint(False),
    "reentrant checkpoint": in_checkpoint(True),
    "backward": in_backward,
    "saved-tensor hooks": within(lambda: saved_tensors_hooks(refuse, refuse)),
    "no saved-tensor hooks": within(lambda: disable_saved_tensors_hooks("not here")),
    "save_on_cpu": within(save_on_cpu),
    "function mode": within(Refuse),
    "dispatch mode": within(RefuseDispatch),
    "FakeTensorMode": within(fake),
    "FlopCounterMode": within(flops),
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "no_grad": within(torch.no_grad),
    "inference_mode": within(torch.inference_mode),
    "vmap": transformed(lambda f: torch.vmap(f)(ONES)),
    "grad": transformed(lambda f: torch.func.grad(f)(ONES)),
    "jvp": transformed(lambda f: torch.func.jvp(f, (ONES,), (ONES,))),
    "forward AD": within(forward_ad.dual_level),
    "float64": within(lambda: setting(torch.set_default_dtype, torch.float64, torch.float32)),
    "bfloat16": within(lambda: setting(torch.set_default_dtype, torch.bfloat16, torch.float32)),
    "meta": lambda probe: in_a_thread(lambda: (torch.set_default_device("meta"), probe())[1]),  # it is the thread's
    "device context": within(lambda: torch.device("meta")),
    "deterministic": within(lambda: setting(torch.use_deterministic_algorithms, True, False)),
    "anomaly": quietly,
    "jit.trace": transformed(lambda f: torch.jit.trace(f, ONES, check_trace=False)),
    "a thread": lambda probe: in_a_thread(probe),
}


def gpt_oss(h):
    gate, up = h[..., ::2].clamp(max=2.5), h[..., 1::2].clamp(-2.5, 2.5)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


class Limited(nn.Module):
    def __init__(self):
        super().__init__()
        self.limit = 2.5


class Router(nn.Module):
    """It makes tensors of whatever the defaults are, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.top_k, self.weight = 2, nn.Parameter(torch.randn(8, 16))

    def forward(self, hidden_states):
        logits = F.linear(hidden_states, self.weight) + torch.zeros(8) + 0 * torch.rand(8)
        p, ids = logits.float().softmax(-1).topk(self.top_k, dim=-1)
        return logits, p, ids


PROBES = {  # what is asked, and how
    "an activation": (Limited, lambda module: layers.activation_by_result(gpt_oss, True, 8, module)),
    "a router": (Router, seams.find),
    "a block": (lambda: table.build("llama4", "Llama4TextMoe"), seams.find),  # on its own weights, outside transformers' decorator
    "a layer": (lambda: table.build("gpt_oss", "GptOssExperts").requires_grad_(False), lambda module: layers.look_at(module)[:8]),
}


@cache
def asked(what):
    """A module that nobody has looked at, and the answer in no context at all."""
    build, ask = PROBES[what]
    module = build()
    return module, ask(copy.deepcopy(module))


@pytest.mark.parametrize("what", PROBES if V5 else [*PROBES][:3])
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_probe_in_a_context(context, what):
    module, want = asked(what)
    assert want is not None
    module, before = copy.deepcopy(module), (torch.get_rng_state(), torch.get_default_dtype())
    assert CONTEXTS[context](lambda: PROBES[what][1](module)) == want
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.get_default_dtype() == before[1]


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_a_block_without_numbers(kind):
    """Parameters that have a shape alone: a twin with random ones is asked."""
    from torch._subclasses import FakeTensorMode

    module, want = asked("a block")
    module, mode = copy.deepcopy(module), FakeTensorMode()
    for m in module.modules():
        for name, p in m._parameters.items():
            if p is not None:
                m._parameters[name] = nn.Parameter(mode.from_tensor(p.detach()) if kind == "fake" else p.detach().to("meta"))
    assert seams.find(module) == want


# ---- every layer, its very first call in a context ------------------------------------------------------------------------------


def promised():
    """(model, layer, path) of docs/models.md: the table of the installed version, or the newest of its major version, whose paths ("any")
    are no promise for an older one."""
    text = (ROOT / "docs/models.md").read_text()
    tables = {Version(v): part for v, part in re.findall(r"<!-- transformers (\S+) -->(.*?)<!-- end -->", text, re.S)}
    version = VERSION if VERSION in tables else max(v for v in tables if v.major == VERSION.major)
    found = re.findall(r"^\| (\w+) \| [\w ]+ \| (\w+) \| (fused|composed|left alone) \|", tables[version], re.M)
    return [(*row[:2], row[2] if version <= VERSION else "any") for row in found if hasattr(table._module(row[0], "modeling"), row[1])]


ROWS = promised()


WAYS = {"experts": "fused", "experts_forward": "fused", "grouped_matmul": "composed"}


def spied(monkeypatch):
    """Which way experts go from now on."""
    seen = set()
    for name, real in [(name, getattr(ops, name)) for name in WAYS]:
        monkeypatch.setattr(ops, name, lambda *args, name=name, real=real: seen.add(WAYS[name]) or real(*args))
    return seen


def run(call, module, given):
    """The output [T, ...], and where there are any the gradients of every input and parameter."""
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in given]
    results = call(module, *(t * 1 if t.requires_grad else t for t in leaves))  # some forwards write into what they are given
    out = results[0] if isinstance(results, tuple) else results
    out = out.reshape(-1, out.shape[-1])
    if not out.requires_grad:
        return [out]
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype))
    return [out.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in (*leaves, *module.parameters()) if t.requires_grad)]


def inside(context):
    def call(module, *args):
        with context():
            return module(*args)

    return call


graphs: list[str] = []  # the names of all operators


def keep(graph, _):
    graphs.extend(str(node.target) for part in graph.modules() if isinstance(part, torch.fx.GraphModule) for node in part.graph.nodes)
    return graph


def compiled(module, *args):
    torch._dynamo.reset()
    return torch.compile(module, backend=keep, fullgraph=True)(*args)


CALLS = {
    "checkpoint": lambda module, *args: checkpoint(module, *args, use_reentrant=False),
    "reentrant checkpoint": lambda module, *args: checkpoint(module, *args, use_reentrant=True),
    "save_on_cpu": inside(save_on_cpu),
    "inference_mode": inside(torch.inference_mode),
    "autocast": inside(lambda: torch.autocast("cpu", torch.bfloat16)),
    "compile": compiled,
}
COMPILED = {  # those whose activation only a probe knows, and one of every other kind
    "beam", "deepseek_v4", "glm5_next", "gpt_oss", "hy_v4", "minimax_m3_vl", "openai_privacy_filter", "qwen3_moe", "nemotron_h",
    "muse_spark", "llama4", "longcat_flash", "jetmoe",
}  # fmt: skip


@cache
def prepared(directory, name):
    """A layer, what it is given and what its own forward gives; None where that is broken."""
    module = table.build(directory, name)
    given = table.inputs(module)
    try:
        return module, given, run(nn.Module.__call__, copy.deepcopy(module), given)
    except RuntimeError:
        return None


COMPILES = V5 and Version(torch.__version__) >= Version("2.7")  # before, torch cannot trace transformers' models
CASES = [(c, *row) for c in CALLS for row in ROWS if c != "compile" or (COMPILES and row[0] in COMPILED)]  # all of them take a minute


@pytest.mark.parametrize("context, directory, name, path", CASES, ids=lambda value: value)
def test_the_first_call_of_a_layer(context, directory, name, path, monkeypatch):
    """By the name alone where there is an interface, so that nobody has looked at it; by apply in the same context where there is none."""
    if (ready := prepared(directory, name)) is None:
        pytest.skip(f"{name} of transformers {VERSION} fails by itself")
    module, given, want = ready
    module, own = (copy.deepcopy(module) for _ in range(2))
    named = [m for m in module.modules() if layers.is_v5_experts(m)]
    for m in named:
        m.config._experts_implementation = "fusedmoe"
    if not named:
        CALLS[context if context in ("inference_mode", "autocast") else "save_on_cpu"](fusedmoe.apply, module)
    if context == "autocast":
        try:
            want = run(CALLS[context], own, given)
        except RuntimeError:
            pytest.skip(f"{name} of transformers {VERSION} cannot be run under autocast")
    graphs.clear()
    seen = set() if context == "compile" else spied(monkeypatch)  # a graph calls operators, not what is in their place
    got = run(CALLS[context], module, given)
    if context == "autocast":
        apart = (got[0].double() - want[0].double()).norm(dim=1) / want[0].double().norm(dim=1).clamp_min(1e-30)
        assert int((apart > 0.04).sum()) <= 2  # two logits of a token that are equal in bfloat16 may be decided the other way
    else:
        assert rel(got[0], want[0]) < 2e-6 and (len(got) == 1 or max(table.distance(got, want)) < 2e-6)
    seen |= {way for op, way in WAYS.items() if f"fusedmoe.{op}.default" in graphs}
    assert path == "any" or seen == {path} - {"left alone"}
    assert {row.path for row in fusedmoe.report(module)} == (seen or {"own"})
    assert context == "compile" or all(seen == {"composed" if m._fmoe_layer.norm or m._fmoe_layer.act is None else "fused"} for m in named)


# ---- gpt-oss, whose activation only a probe knows, from the checkpoint to the gradients ------------------------------------------


@pytest.mark.skipif(not hasattr(transformers, "GptOssConfig"), reason="no gpt-oss")
@pytest.mark.parametrize("trained", ["all weights", "LoRA"])
@pytest.mark.parametrize("reentrant", [None, False, True])  # None: what the model takes if it is told nothing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointed_training_of_gpt_oss(dtype, reentrant, trained, tmp_path, monkeypatch, caplog):
    tiny("GptOss", num_experts_per_tok=8).to(dtype).save_pretrained(tmp_path)  # all experts: no choice that rounding could turn
    named = dict(experts_implementation="fusedmoe") if V5 else {}
    models = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, **more) for more in (named, {}, {})]
    if trained == "LoRA":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=4, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], target_modules=["q_proj"])
        models = [peft.get_peft_model(model, config) for model in models]
        for n, p in models[0].named_parameters():
            for other in models:
                if "lora_" in n:
                    other.get_parameter(n).data = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(n))).to(p.dtype) * 0.1
    ours, own, exact = models
    if not V5:
        fusedmoe.apply(ours)
    for model in (ours, own):
        how = {} if reentrant is None else dict(gradient_checkpointing_kwargs=dict(use_reentrant=reentrant))
        model.gradient_checkpointing_enable(**how)
        if trained == "LoRA":
            model.enable_input_require_grads()
    set_implementation(exact, "eager")  # grouped_mm takes no double
    seen = spied(monkeypatch)
    got = step(ours.train(), IDS)
    assert seen == {"fused"} and {row.path for row in fusedmoe.report(ours)} == {"fused"} and "not one of" not in caplog.text
    want, exact = step(own.train(), IDS), step(exact.double().train(), IDS)
    assert worst(got, exact) <= (1e-5 if dtype == torch.float32 else 1.5 * worst(want, exact))


# ---- what a probe cannot know ----------------------------------------------------------------------------------------------------

MIXTRAL = ("mixtral", "MixtralExperts")


@pytest.mark.skipif(not V5, reason="v5")
@pytest.mark.parametrize("error", [RuntimeError, ValueError, IndexError, AssertionError, NotImplementedError])
def test_a_probe_that_failed_is_said_and_not_remembered(error, caplog):
    """An activation may want a device, or more rows, than a probe has. The layer runs all the same."""
    module = table.build(*MIXTRAL)
    own, picky = type(module)._apply_gate, [True]

    class Picky(type(module)):
        def _apply_gate(self, h):
            if picky and len(h) == 48:
                raise error("not on such a thing")
            return own(self, h)

    module.__class__ = Picky
    given = table.inputs(module)
    want = run(nn.Module.__call__, module, given)
    module.config._experts_implementation = "fusedmoe"
    for _ in range(2):
        module.zero_grad()
        got = run(nn.Module.__call__, module, given)
        assert max(table.distance(got, want)) < 2e-6 and "_fmoe_layer" not in vars(module)
    (line,) = [r.getMessage() for r in caplog.records if "Picky" in r.getMessage()]
    assert f"{error.__name__}: not on such a thing" in line and "tried" in line
    picky.clear()
    module(*given)
    assert module._fmoe_layer.act == ops.SWIGLU


@pytest.mark.skipif(not V5, reason="v5")
@pytest.mark.parametrize("error", [KeyError, AttributeError, TypeError, ZeroDivisionError])
def test_an_error_that_no_probe_explains_is_raised(error):
    module = table.build(*MIXTRAL)

    class Broken(type(module)):
        def _apply_gate(self, h):
            raise error("of the model's own")

    module.__class__, module.config._experts_implementation = Broken, "fusedmoe"
    with pytest.raises(error, match="of the model's own"):
        module(*table.inputs(module))
    assert "_fmoe_layer" not in vars(module)


@pytest.mark.skipif(not V5, reason="v5")
@pytest.mark.parametrize("kind", ["parameter", "frozen", "buffer"])
def test_an_activation_with_numbers_of_its_own_is_never_a_constant(kind):
    """Its value is that of gpt-oss's today; it is learned, or loaded, tomorrow."""
    module = table.build("gpt_oss", "GptOssExperts")
    vars(module).pop("alpha")
    module.alpha = nn.Parameter(torch.tensor(1.702), kind == "parameter") if kind != "buffer" else nn.Buffer(torch.tensor(1.702))
    given = table.inputs(module)
    for value in (1.702, 1.1):
        module.alpha.data.fill_(value)
        results = []
        for name in ("eager", "fusedmoe"):
            module.config._experts_implementation = name
            module.zero_grad()
            results.append(run(nn.Module.__call__, module, given))
        assert max(table.distance(results[1], results[0])) < 2e-6 and module._fmoe_layer.act is None


def test_a_router_that_cannot_be_tried_is_left_as_it_is(caplog):
    class Picky(Router):
        def forward(self, hidden_states):
            raise ValueError("not these tokens")

    assert seams.find(Picky()) is None
    assert "Picky: ProbeError" in caplog.text and "ValueError: not these tokens" in caplog.text and "left as it is" in caplog.text


def test_probes_of_many_threads_leave_the_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: layers.activation_by_result(gpt_oss, True, 8, Limited()), range(32)))
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == [(ops.SWIGLU_OAI, ops.INTERLEAVED, 1.702, 2.5)] * 32


# ---- torch.compile ---------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not COMPILES, reason="v5, torch 2.7")
@pytest.mark.parametrize("dynamic", [None, True])
def test_layers_that_nobody_looked_at_share_one_graph(dynamic):
    torch._dynamo.reset()
    model = tiny("GptOss", num_hidden_layers=12)
    want = step(model, IDS)
    model.set_experts_implementation("fusedmoe")
    graphs.clear()
    for layer in model.model.layers:
        layer.mlp.compile(backend=keep, fullgraph=True, dynamic=dynamic)
    assert worst(step(model, IDS), want) < 1e-5
    assert graphs.count("fusedmoe.experts_forward.default") == 1 and not any("grouped" in name for name in graphs)


@pytest.mark.skipif(not COMPILES, reason="v5, torch 2.7")
def test_what_cannot_be_asked_while_tracing_is_composed():
    """A gate that reads more than numbers: the configuration, which a stand-in for the module has not."""
    module = table.build("gpt_oss", "GptOssExperts")
    own = type(module)._apply_gate

    class More(type(module)):
        def _apply_gate(self, h):
            return own(self, h) * self.config.factor

    module.__class__, module.config.factor = More, 1.0
    given = table.inputs(module)
    want = run(nn.Module.__call__, module, given)
    module.config._experts_implementation = "fusedmoe"
    graphs.clear()
    module.zero_grad()
    assert max(table.distance(run(compiled, module, given), want)) < 2e-6
    assert "fusedmoe.grouped_matmul.default" in graphs
