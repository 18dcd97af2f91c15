# SPDX-License-Identifier: Apache-2.0
"""Every MoE layer of the installed transformers: what fusedmoe makes of it, and how far it is from the model's own.

    python tests/external/table.py                   the table, as Markdown
    python tests/external/table.py docs/models.md    put it into the page, in the place of this version's

A layer is built from its model's own configuration class with small sizes: as a whole block, or as the experts alone where the
block wants more than hidden states.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import re
import sys
from pathlib import Path
from types import ModuleType

import torch
import transformers
from torch import Tensor, nn

import fusedmoe
from fusedmoe.integrations import layers, routers, seams

VERSION = transformers.__version__
V5 = int(VERSION.split(".")[0]) >= 5
MODELS = Path(transformers.__file__).parent / "models"
E, H, I, T = 8, 32, 12, 64
SIZES = dict(
    ffn_hidden_size=I, hidden_size=H, d_model=H, moe_hidden_size=H, intermediate_size=2 * I, moe_intermediate_size=I,
    expert_ffn_hidden_size=I, num_experts=E, num_local_experts=E, n_routed_experts=E, moe_num_experts=E, num_experts_per_tok=2, moe_topk=2,
    moe_top_k=2, moe_k=2, top_k=2, top_k_experts=2, shared_expert_intermediate_size=I, n_shared_experts=1, num_shared_experts=1,
    moe_num_shared_experts=1, shared_intermediate_size=I, zero_expert_num=3, kv_channels=8, num_key_value_heads=2,
    num_attention_heads=4, moe_latent_size=None, swiglu_limit=1.0, num_hidden_layers=2,
)  # fmt: skip
ARGUMENTS = dict(layer_idx=0, intermediate_size=I, hidden_size=H, ffn_hidden_size=I, moe_num_experts=E, ffn_act_fn={"name": "silu"},
                 swiglu_limit=1.0, num_experts=E, input_size=H, output_size=I)  # fmt: skip
SHARED = ("AriaSharedExpertsMLP", "InklingSharedExperts")  # run for every token: no routed experts
TWO_LAYERS = "two-layer experts with capacity and dropout inside"
NOTES = {
    "aria": "4.57: grouped matmuls under `AriaGroupedExpertsGemm`",
    "dbrx": "flat `w1`, `v1`, `w2`; the weights are divided by a p-norm of the model's choice",
    "deepseek_v4": "the hash router, which looks ids up, is its own",
    "diffusion_gemma": "the router's logits are probabilities",
    "doge": "experts are rows of an embedding, found by product keys",
    "gemma4": "the router's logits are probabilities",
    "gpt_oss": "4.57: the router gives scores over all experts",
    "inkling": "normalised together with the shared experts",
    "inkling2": "gate and up are softcapped: the model's own activation between the products",
    "jetmoe": "grouped matmuls under `JetMoeParallelExperts`, of the attention experts too; the router sorts by itself",
    "kolibri1": "the bias is added to the logits",
    "llama4": "the score scales the experts' input",
    "longcat_flash": "identity experts",
    "muse_spark": "a norm after each expert; logits times a factor",
    "nllb_moe": TWO_LAYERS,
    "openai_privacy_filter": "its own computes in float32 whatever the dtype",
    "phimoe": "SparseMixer: sampling and a gradient of its own in training",
    "step3p7": "clamped after the activation",
    "switch_transformers": TWO_LAYERS,
    "vitpose_backbone": "one linear layer a dataset, no router",
    "zaya": "an MLP with a carried state and a skip expert",
}
if not V5:
    NOTES["qwen3_vl_moe"] = "the block routes by itself"
    for kind in ("", "hybrid", "shared"):
        NOTES["granitemoe" + kind] = "grouped matmuls under `ParallelExperts`; the router sorts by itself"


# ---- what there is ------------------------------------------------------------------------------------------------------------


def classes() -> dict[str, dict[str, str]]:
    """model directory -> its MoE classes and their sources: named so, or with experts inside."""
    found = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        sources = dict(re.findall(r"^class (\w+)\(nn\.Module\w*\):\n(.*?)(?=^\S)", path.read_text() + "\n#", re.M | re.S))
        moe = {n: s for n, s in sources.items() if re.search(r"Experts?(?:GLU|Gemm|MLP)?$|(?:NaiveMoe|SparseMLP|CDMoE)$", n)
               or re.search(r"self\.(?:experts|input_linear) = (?!nn\.Linear)", s)}  # fmt: skip
        moe = {n: s for n, s in moe.items() if n not in SHARED and not re.search("Layer$|Mamba|SSM", n) or "MoELayer" in n}
        if any(re.search("xpert|M[oO][eE]|SparseMLP", n) for n in moe):
            found[path.parent.name] = moe
    return found


def _module(directory: str, kind: str) -> ModuleType | None:
    path = next((MODELS / directory).glob(f"{kind}_*.py"), None)
    return path and importlib.import_module(f"transformers.models.{directory}.{path.stem}")


def _configs(directory: str):
    """The model's configurations, made small."""
    module = _module(directory, "configuration")
    found = [(n, c) for n, c in vars(module).items() if n.endswith("Config") and getattr(c, "__module__", None) == module.__name__]
    for _, cls in sorted(found, key=lambda item: "Text" not in item[0]):
        config = cls()
        if any(hasattr(config, n) for n in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config")):
            yield _shrink(config)


def _shrink(config):
    for name, value in SIZES.items():
        try:
            old = getattr(config, name, None)
        except Exception:  # it varies from layer to layer (dots3), and is not read without one
            continue
        if hasattr(config, name) or name == "shared_expert_intermediate_size":
            setattr(config, name, [value] * len(old) if isinstance(old, list) else value)
    if hasattr(config, "ffn_config"):
        _shrink(config.ffn_config)
    if getattr(config, "n_group", 1) != 1:
        config.n_group, config.topk_group = 2, 1
    config._experts_implementation = "eager"
    return config


def build(directory: str, name: str) -> nn.Module:
    """A layer with random weights and biases, in float32; ValueError when it cannot be built like this."""
    cls, problem = getattr(_module(directory, "modeling"), name), None
    for config in _configs(directory):
        names = [n for n in inspect.signature(cls.__init__).parameters if n not in ("self", "args", "kwargs")]
        try:
            module = cls(**{n: ARGUMENTS.get(n, config) for n in names})
        except Exception as error:
            problem = error
            continue
        g = torch.Generator().manual_seed(1)
        for n, t in (*module.named_parameters(), *module.named_buffers()):
            if t.is_floating_point():
                t.data = torch.randn(t.shape, generator=g) * (0.3 if t.dim() > 1 else 0.1) + ("norm" in n)
        return module.float().eval()
    raise ValueError(f"{name}: {problem}")


def inputs(module: nn.Module) -> list[Tensor]:
    """What its forward takes; ValueError when that is more than hidden states, ids and routing weights."""
    parameters = [p for p in inspect.signature(type(module).forward).parameters.values() if p.name not in ("self", "kwargs")]
    g = torch.Generator().manual_seed(2)
    x = torch.randn(1, T, H, generator=g)
    if not any(p.name in seams.IDS for p in parameters):
        if sum(p.default is p.empty for p in parameters) > 1:
            raise ValueError("wants more than hidden states")
        return [x]
    ids = torch.rand(T, E + 3 * hasattr(module, "zero_expert_num"), generator=g).topk(2).indices
    p = torch.rand(T, 2, generator=g)
    p = p if V5 or "gate_up_proj" not in module._parameters else torch.zeros(T, E).scatter_(1, ids, p)
    return [x[0] if V5 and "mlp" not in module._modules else x, *(ids if q.name in seams.IDS else p for q in parameters[1:])]


# ---- how far apart ------------------------------------------------------------------------------------------------------------


def run(module: nn.Module, given: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The output [T, ...] and the gradients of every input and parameter."""
    leaves = [t.detach().to(dtype).requires_grad_() if t.is_floating_point() else t for t in given]
    results = module(*(t * 1 if t.requires_grad else t for t in leaves))  # some forwards write into what they are given
    out = results[0] if isinstance(results, tuple) else results
    out = out.reshape(-1, out.shape[-1])
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    wanted = [t for t in (*leaves, *module.parameters()) if t.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, dout, allow_unused=True, materialize_grads=True)]


def distance(got: list[Tensor], want: list[Tensor]) -> tuple[float, float]:
    """Relative L2 distance of the output, and of the worst gradient (against at least a thousandth of the largest)."""
    norms = [float(t.double().norm()) for t in want]
    floor = 1e-3 * max(norms[1:])
    far = [float((a.double() - b.double()).norm()) for a, b in zip(got, want, strict=True)]
    return far[0] / norms[0], max(d / max(n, floor) for d, n in zip(far[1:], norms[1:], strict=True))


def what(module: nn.Module) -> tuple[str, str]:
    """How the experts and the router of an applied module are run."""
    bounds = {b.__func__ for m in module.modules() for b in vars(m).values() if isinstance(b, seams.Bound)}
    found = [layers.look_at(m) for m in module.modules() if layers.is_v5_experts(m)]
    if any(not layer.own for layer in found):
        experts = "composed" if any(layer.norm or layer.act is None for layer in found) else "fused"
    elif bounds & {seams.given_forward, seams.list_block_forward, seams.scaled_input_forward}:
        experts = "fused"
    else:
        experts = "composed" if seams.grouped_linear_forward in bounds else "left alone"
    return experts, "fused" if bounds & {routers.forward, seams.list_block_forward} else "own"


def measure(directory: str, name: str, half: bool = True) -> dict:
    """One row. float32: distance from the model's own. half: distance in bfloat16 from float32, ours and the model's own."""
    try:
        module = build(directory, name)
        given = inputs(module)
        want = run(module, given, torch.float32)
    except Exception as problem:
        raise ValueError(f"{name} cannot be run alone: {problem}") from problem
    ours = fusedmoe.apply(copy.deepcopy(module), routers=True)
    experts, router = what(ours)
    if router == "own" and not any(n in module._modules for n in ("gate", "router")):
        router = _router_alone(directory)
    row = dict(layer=name, experts=experts, router=router, f32=distance(run(ours, given, torch.float32), want))
    if half:
        low = copy.deepcopy(module).bfloat16()
        exact = copy.deepcopy(low).float()
        for kept in _kept_in_float32(directory):
            if kept in low._modules:
                low._modules[kept].float()
        given = [t.bfloat16() if t.is_floating_point() else t for t in given]
        apart = (run(low, given, torch.bfloat16)[0].double() - run(exact, given, torch.float32)[0].double()).norm(dim=1)
        rows = apart.argsort()[: T // 2].sort().values  # where rounding does not turn the model's own choice of experts
        given = [t[:, rows] if t.dim() == 3 else t[rows] for t in given]
        want = run(exact, given, torch.float32)
        row["own"] = distance(run(low, given, torch.bfloat16), want)
        row["bf16"] = distance(run(fusedmoe.apply(low, routers=True), given, torch.bfloat16), want)
    return row


def _router_alone(directory: str) -> str:
    module = _module(directory, "modeling")
    for name in [n for n in vars(module) if re.search(r"(?:Router|Gate|Gating)$", n) and vars(module)[n].__module__ == module.__name__]:
        try:
            if seams.find(build(directory, name)):
                return "fused"
        except ValueError:
            continue
    return "own"


def _kept_in_float32(directory: str) -> set[str]:
    """Submodules that the model keeps in float32 whatever it is loaded in."""
    models, names = vars(_module(directory, "modeling")).values(), ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    return {part for m in models for name in names for n in getattr(m, name, None) or () for part in n.split(".")}  # "mlp.gate.weight"


def rows(directory: str, moe: dict[str, str], half: bool = True) -> list[dict]:
    """A row for each block of a model; for its experts alone where no block can be run."""
    blocks = [n for n, source in moe.items() if re.search(r"self\.(?:experts|input_linear) = ", source)]
    for names in (blocks, [n for n in moe if n not in blocks]):
        found = []
        for name in names:
            try:
                found.append(measure(directory, name, half))
            except ValueError:
                continue
        if found:
            return found
    return [dict(layer="-", experts="left alone", router="own")]


# ---- the page -----------------------------------------------------------------------------------------------------------------


def _pair(row: dict, key: str) -> str:
    return " | ".join(f"{v:.0e}" for v in row[key]) if key in row else "- | -"


def markdown() -> str:
    """The table of the installed version, between two marks."""
    lines = [f"<!-- transformers {VERSION} -->", "",
             "| model | classes | layer run | experts | router | f32 out | f32 grad | bf16 out | bf16 grad | own out | own grad | |",
             "|---|---|---|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    counts = {"fused": 0, "composed": 0, "left alone": 0}
    for directory, moe in classes().items():
        for row in rows(directory, moe):
            counts[row["experts"]] += 1
            numbers = " | ".join(_pair(row, key) for key in ("f32", "bf16", "own"))
            words = (directory, " ".join(moe), row["layer"], row["experts"], row["router"], numbers, NOTES.get(directory, ""))
            lines.append(f"| {' | '.join(words)} |")
    return "\n".join([*lines, "", f"{VERSION}: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()), "<!-- end -->"])


def listed(page: Path) -> dict[str, dict[str, set[str]]]:
    """version -> model -> classes, as the page has them."""
    parts = re.findall(r"<!-- transformers (\S+) -->(.*?)<!-- end -->", page.read_text(), re.S)
    return {
        version: {m: set(c.split()) for m, c in re.findall(r"^\| (\w+) \| ([\w ]+) \|", part, re.M) if m != "model"}
        for version, part in parts
    }


if __name__ == "__main__":
    logging.getLogger("fusedmoe").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    text = markdown()
    if len(sys.argv) == 1:
        print(text)
    else:
        page = Path(sys.argv[1])
        old = page.read_text()
        new = re.sub(rf"<!-- transformers {re.escape(VERSION)} -->.*?<!-- end -->", lambda _: text, old, flags=re.S)
        page.write_text(new if text in new else f"{old.rstrip()}\n\n{text}\n")
