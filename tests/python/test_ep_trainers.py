# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism inside other trainers: transformers' Trainer, torchtitan, DeepSpeed's AutoEP. Each where it is installed."""

import json
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

import fusedmoe
import processes
from common import V5, tiny
from fusedmoe.integrations import expert_parallel, seams

pytestmark = pytest.mark.skipif(not V5, reason="transformers v4 has its experts in lists")
SEAM = V5 and bool(import_module("transformers.modeling_utils")) and expert_parallel._module() is not None
TITAN, DEEPSPEED = (bool(find_spec(name)) for name in ("torchtitan", "deepspeed"))


def _apart(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


# ---- transformers' Trainer --------------------------------------------------------------------------------------------------------


def trainer(rank, ranks, folder):
    """What a script does that knows nothing of us."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(f"{folder}/../model", experts_implementation="fusedmoe")
    assert sum("_fmoe_ep" in vars(m) for m in model.modules()) == (2 if ranks > 1 else 0)
    data = [{"input_ids": t, "labels": t} for t in torch.randint(3, 40, (32, 8), generator=torch.Generator().manual_seed(5))]
    how = TrainingArguments(output_dir=folder, max_steps=4, per_device_train_batch_size=4 // ranks, learning_rate=1e-2, logging_steps=1,
                            use_cpu=True, report_to=[], save_strategy="no", gradient_checkpointing=ranks > 1)  # fmt: skip
    made = Trainer(model=model, args=how, train_dataset=data)
    made.train()
    made.save_model(f"{folder}/final")
    if rank == 0:
        found = [[h["loss"], h["grad_norm"]] for h in made.state.log_history if "loss" in h]
        with open(f"{folder}/found.json", "w") as f:
            json.dump(found, f)


@pytest.mark.skipif(not SEAM or not find_spec("accelerate"), reason="transformers 5.22 and accelerate are not installed")
def test_trainer_with_a_flag_alone(tmp_path):
    """FMOE_EXPERT_PARALLEL: losses and gradient norms of one process, and a checkpoint of the same form."""
    from safetensors import safe_open

    tiny("Qwen3Moe").save_pretrained(tmp_path / "model")
    found, names = [], []
    for n in (1, 2):
        folder = tmp_path / str(n)
        processes.passed(processes.spawn(__file__, folder, n, "trainer", FMOE_EXPERT_PARALLEL=str(n)), "trainer")
        found.append(torch.tensor(json.loads((folder / "found.json").read_text())))
        with safe_open(folder / "final" / "model.safetensors", "pt") as file:
            names.append({k: file.get_slice(k).get_shape() for k in file.keys()})  # noqa: SIM118
    told = 2 if hasattr(expert_parallel._module(), "EPImplementationInterface") else 1  # 5.22's Trainer has another norm, with theirs too
    assert len(found[0]) == 4 and found[0][:, :told].allclose(found[1][:, :told], 1e-5) and names[0] == names[1]


def test_the_flag_must_divide(monkeypatch):
    for asked in ("3", "0", "two", "-1", "8"):
        monkeypatch.setenv("FMOE_EXPERT_PARALLEL", asked)
        monkeypatch.setenv("WORLD_SIZE", "4")
        with pytest.raises(ValueError, match=f"FMOE_EXPERT_PARALLEL is '{asked}', WORLD_SIZE 4"):
            expert_parallel._ranks()


# ---- torchtitan ---------------------------------------------------------------------------------------------------------------


def _titan(override=None, dims=None, **options):
    """A layer of torchtitan in bf16 with this override of ours, and its weights, cut up as dims say."""
    import spmd_types as spmd
    from torchtitan import config
    from torchtitan.models.common import moe, moe_sharding
    from torchtitan.models.common.config_utils import make_routed_experts_config
    from torchtitan.models.common.linear import Linear
    from torchtitan.protocols.module import Module

    names = {"w1_EFD": 1, "w2_EDF": 2, "w3_EFD": 1}
    routed = make_routed_experts_config(dim=24, hidden_dim=16, num_experts=8, top_k=3, comm_backend="standard", param_init={})
    router = moe.TokenChoiceTopKRouter.Config(num_experts=8, top_k=3, route_norm=True, gate=Linear.Config(in_features=24, out_features=8))
    layer = moe.MoE.Config(num_experts=8, routed_experts=routed, router=router, load_balance_coeff=None)
    if dims is not None:
        layout = {n: spmd.S(i) for n, i in names.items()}
        moe_sharding.set_moe_sharding_config(layer, enable_ep=True, enable_sp=False, expert_param_layout=layout)
    if override is not None:
        entry = f"fusedmoe.integrations.torchtitan.{override}", options
        assert len(config.apply_overrides(config.OverrideConfig(imports=[entry]), layer)) == 1
    module = layer.build()
    assert isinstance(module, Module)
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.3)
    module.bfloat16()
    if dims is not None:
        module.parallelize(dims)
    return module


def _titan_step(module, x, dout):
    x = x.clone().requires_grad_()
    out = module(x)
    out.backward(dout)
    return out.detach(), x.grad, [p.grad for p in module.routed_experts.inner_experts.parameters()]


def titan_experts(rank, ranks, folder):
    """Ours in the place of torchtitan's experts and dispatcher, over ranks: the bits of ours in one process, near theirs."""
    import torch.testing._internal.distributed.fake_pg  # the backend "fake" of torchtitan's dimensions of size one
    from torchtitan.distributed import parallel_dims, utils

    parallel_dims.device_type = "cpu"  # which torchtitan does not offer, but for this it is all that is wanted
    g = torch.Generator().manual_seed(3)
    x, dout = (torch.randn(ranks, 9, 24, generator=g, dtype=torch.bfloat16) for _ in range(2))
    theirs, one = _titan_step(_titan(), x, dout), _titan_step(_titan("routed_experts"), x, dout)
    mine, E = slice(rank, rank + 1), 8 // ranks
    own = slice(rank * E, (rank + 1) * E)
    ways = {None: {}, "grouped_experts": {}, "routed_experts": dict(chunks=2, timeout=60.0)}
    for name, backend in [*((name, "partial_dtensor") for name in ways), ("routed_experts", "spmd_types")]:
        utils.set_spmd_backend(backend)
        dims = parallel_dims.ParallelDims(1, ranks, cp=1, tp=1, pp=1, ep=ranks, world_size=ranks, spmd_backend=backend)
        dims.build_mesh()
        module = _titan(name, dims, **ways[name])
        out, dx, dw = _titan_step(module, x[mine], dout[mine])
        dw = [g.to_local() if hasattr(g, "to_local") else g for g in dw]
        assert dw[0].shape == (E, 16, 24)
        if name == "routed_experts":
            assert module.routed_experts._ep.stats["rows_out"] > 0
            assert torch.equal(out, one[0][mine]) and torch.equal(dx, one[1][mine])
            assert all(torch.equal(a, b[own]) for a, b in zip(dw, one[2], strict=True))
        pairs = [(out, theirs[0][mine]), (dx, theirs[1][mine]), *((a, b[own]) for a, b in zip(dw, theirs[2], strict=True))]
        assert all(_apart(a, b) < 0.02 for a, b in pairs), name


@pytest.mark.skipif(not TITAN, reason="torchtitan is not installed")
def test_titan_refuses_what_it_cannot_replace():
    from torchtitan.models.common import moe
    from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

    from fusedmoe.integrations import torchtitan

    wrong = moe.RoutedExperts.Config(inner_experts=GptOssGroupedExperts.Config(dim=8, hidden_dim=8, num_experts=2), token_dispatcher=None)
    with pytest.raises(NotImplementedError, match="inner_experts is a GptOssGroupedExperts.Config"):
        torchtitan.routed_experts(wrong)


# ---- DeepSpeed AutoEP -----------------------------------------------------------------------------------------------------------


def autoep(rank, ranks, folder):
    """A tiny Qwen3-MoE that AutoEP has spread over ranks: the losses of DeepSpeed's own experts."""
    import deepspeed
    from deepspeed.module_inject import auto_ep

    # DeepSpeed 0.19.8 cannot read the table of recorded outputs of transformers 5.23; nothing here records any.
    auto_ep.AutoEP._retarget_transformers_output_recorders = lambda *args: None
    losses = {}
    for ours in (False, True):
        spread = {"enabled": True, "autoep_size": ranks, "preset_model": "qwen3_moe", "use_grouped_mm": False}
        config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, "expert_parallel": spread}
        model = tiny("Qwen3Moe")
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), config=config)
        if ours:
            fusedmoe.apply(engine.module)
            rows = fusedmoe.report(engine.module)
            assert {r.cls for r in rows} == {"GroupedExperts"} and {r.path for r in rows} == {"fused"}, rows
        g, found = torch.Generator().manual_seed(5), []
        for _ in range(6):
            ids = torch.randint(3, 40, (2 * ranks, 8), generator=g)[2 * rank : 2 * rank + 2]
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            found.append(float(loss.detach()))
        losses[ours] = found
    assert all(abs(a - b) < 1e-5 * b for a, b in zip(losses[True], losses[False], strict=True)), losses


@pytest.mark.skipif(not DEEPSPEED, reason="deepspeed is not installed")
@pytest.mark.parametrize("activation", sorted(seams.SORTED))
def test_sorted_rows(activation):
    """DeepSpeed's experts, its loop over them beside ours: empty experts, rows that only pad, values and gradients."""
    from deepspeed.moe.ep_experts import GroupedExperts

    module = GroupedExperts(12, 10, 5, use_grouped_mm=False, activation=activation, activation_limit=1.5)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.5)
    for sizes in ([3, 0, 4, 1, 0], [0, 0, 0, 0, 6], [0] * 5):
        sizes = torch.tensor(sizes)
        x = torch.randn(int(sizes.sum()) + 2, 12, requires_grad=True)
        want = module(x, sizes)
        dout = torch.randn_like(want)
        grads = torch.autograd.grad(want, [x, *module.parameters()], dout)
        fusedmoe.apply(module)
        assert seams.seam_of(module)
        got = module(x, sizes)
        assert torch.allclose(got, want, 1e-5, 1e-5) and not got[int(sizes.sum()) :].any()
        for a, b in zip(torch.autograd.grad(got, [x, *module.parameters()], dout), grads, strict=True):
            assert torch.allclose(a, b, 1e-4, 1e-5)
        fusedmoe.unapply(module)
    module.activation = "tanh"
    fusedmoe.apply(module)
    assert seams.seam_of(module) is None


@pytest.mark.parametrize("check", [
    pytest.param(titan_experts, marks=pytest.mark.skipif(not TITAN, reason="torchtitan is not installed")),
    pytest.param(autoep, marks=pytest.mark.skipif(not DEEPSPEED, reason="deepspeed is not installed")),
])  # fmt: skip
def test_two_processes(tmp_path, check):
    processes.passed(processes.spawn(__file__, tmp_path, 2, check.__name__, DS_ACCELERATOR="cpu"), check.__name__)


if __name__ == "__main__":
    processes.serve([trainer, titan_experts, autoep], sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:])
