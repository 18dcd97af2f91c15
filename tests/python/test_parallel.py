# SPDX-License-Identifier: Apache-2.0
"""Two processes with gloo on the CPU: loss and gradients of a parallel step are those of one process, and fusedmoe computed.

One pair of processes makes all checks, one after the other, and writes what it found; the tests read it. In each process:
``python test_parallel.py folder rank`` (also the way to look at a failure by hand).
"""

import importlib
import inspect
import json
import os
import socket
import subprocess
import sys
import traceback
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch

import fusedmoe
from common import V5, rel, step, tiny
from fusedmoe import _core, ops, routing

IDS = torch.arange(4 * 16).view(4, 16) * 7 % 40 + 3
SENTINEL = {"model.layers.*.mlp.gate": "ep_router", "model.layers.*.mlp.experts": "moe_tp_experts"}
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def _drift():
    """Experts that no router would choose, of every token of IDS in two layers."""
    g = torch.Generator().manual_seed(8)
    return torch.stack([torch.randperm(8, generator=g)[:2] for _ in range(2 * IDS.numel())]).view(*IDS.shape, 2, 2)


def _single(make, replayed=False):
    model = make()
    with routing.replay(model, _drift()) if replayed else nullcontext():
        return step(model, IDS)


def _whole(p):
    grad = torch.zeros_like(p) if p.grad is None else p.grad
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def _part(name, exact, like):
    """Of a gradient, what is this process's where a parameter is a plain shard, as in transformers 5.6."""
    cut = [d for d in range(exact.dim()) if exact.shape[d] != like.shape[d]]
    for d in cut:  # gate and up are cut each by itself
        halves = exact.chunk(2, d) if name.endswith("gate_up_proj") else (exact,)
        exact = torch.cat([half.chunk(2, d)[torch.distributed.get_rank()] for half in halves], d)
    return exact


def _compare(loss, named, want, grad_of=_whole) -> dict:
    """The largest relative error of the loss and of every gradient."""
    scale = max(float(g.norm()) for g in want[2].values())
    errors = {"loss": rel(loss, want[0])}
    for name, p in named:
        if p.requires_grad:
            grad = grad_of(p)
            exact = _part(name, want[2][name], grad)
            errors[name] = float((grad - exact).norm()) / max(float(exact.norm()), 1e-3 * scale)
    worst = max(errors, key=errors.get)
    return {"error": errors[worst], "worst": worst}


def _sharded(make, rank, replayed=False):
    """FSDP2: each process has half of every parameter and half of the batch."""
    from torch.distributed.fsdp import fully_shard

    want, model = _single(make, replayed), make()
    fusedmoe.apply(model)
    for module in model.modules():
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module)
    fully_shard(model)
    mine = slice(2 * rank, 2 * rank + 2)
    with routing.replay(model, _drift()[mine]) if replayed else nullcontext():
        loss = model(input_ids=IDS[mine], labels=IDS[mine]).loss
    loss.backward()
    torch.distributed.all_reduce(loss.data)
    return _compare(loss.detach() / 2, model.named_parameters(), want)


def fsdp2(rank, folder):
    return _sharded(lambda: tiny("Qwen3Moe"), rank)


def fsdp2_replay(rank, folder):
    """With recomputation, in a backward outside of the context."""

    def make():
        model = tiny("Qwen3Moe").train()
        model.gradient_checkpointing_enable()
        return model

    return _sharded(make, rank, replayed=True)


def fsdp2_lora(rank, folder):
    import peft

    def make():
        torch.manual_seed(3)
        model = peft.get_peft_model(tiny("Qwen3Moe"), peft.LoraConfig(r=4, target_parameters=TARGETS, target_modules=[]))
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.2
        return model

    return _sharded(make, rank)


def _loaded(folder, replayed=False, **plan):
    """transformers' own parallelism, from a checkpoint."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    want = _single(lambda: tiny("Qwen3Moe"), replayed)
    how = dict(distributed_config=DistributedConfig(**plan)) if PLANS else dict(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder, **how, experts_implementation="fusedmoe")
    with routing.replay(model, _drift()) if replayed else nullcontext():
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return _compare(loss.detach(), model.named_parameters(), want)


def _experts(implementation, **before):
    """Experts over both processes. From transformers 5.23 on an implementation is named, and an empty tp_plan refused."""
    from transformers.distributed import DistributedConfig

    named = "ep_implementation" in inspect.signature(DistributedConfig).parameters
    return dict(tp_size=2, ep_size=2, **(dict(ep_implementation=implementation) if named else dict(tp_plan={}, **before)))


def tensor_parallel(rank, folder):
    """Each process has half of the columns of every expert."""
    return _loaded(folder, tp_size=2)


def expert_parallel_sentinel(rank, folder):
    """Each process has half of the experts, sees all tokens, and skips those whose id is the mark."""
    return _loaded(folder, **_experts("all_reduce", ep_plan=SENTINEL))


def expert_parallel_sentinel_replay(rank, folder):
    """The ids are those of all experts, wherever these are."""
    return _loaded(folder, True, **_experts("all_reduce", ep_plan=SENTINEL))


def expert_parallel_dispatch(rank, folder):
    """Each process has half of the experts, and tokens travel."""
    return _loaded(folder, **_experts("all_to_all"))


def zero3(rank, folder, leaf=False):
    """DeepSpeed: each process has half of every parameter and half of the batch; hooks gather what a module owns."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad, set_z3_leaf_modules

    deepspeed.init_distributed(dist_backend="gloo")
    config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True,
              "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}  # fmt: skip
    want, model = _single(lambda: tiny("Qwen3Moe")), tiny("Qwen3Moe")
    deepspeed.zero.Init(module=model, config_dict_or_path=config)  # as from_pretrained gives it: no weight is whole when we look
    fusedmoe.apply(model)
    if leaf:  # gathered whole before the block runs, as transformers v4's separate Linears need it
        set_z3_leaf_modules(model, [type(model.model.layers[0].mlp)])
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)
    mine = IDS[2 * rank : 2 * rank + 2]
    loss = engine(input_ids=mine, labels=mine).loss
    engine.backward(loss)
    torch.distributed.all_reduce(loss.data)
    return _compare(loss.detach() / 2, engine.module.named_parameters(), want, safe_get_full_grad)


def zero3_leaf(rank, folder):
    return zero3(rank, folder, leaf=True)


CHECKS = [fsdp2, fsdp2_replay, fsdp2_lora, tensor_parallel] if V5 else []
PLANS = V5 and hasattr(importlib.import_module("transformers.distributed").DistributedConfig, "tp_size")
if PLANS:  # older releases have no expert parallelism for Qwen3-MoE
    CHECKS += [expert_parallel_sentinel, expert_parallel_sentinel_replay, expert_parallel_dispatch]
if find_spec("deepspeed"):  # not among the development requirements: docs/integrations.md has how it was run
    CHECKS += [zero3, zero3_leaf] if V5 else [zero3_leaf]


def main(folder: str, rank: int) -> None:
    torch.set_num_threads(1)
    _core.pool_from(1)
    torch.distributed.init_process_group("gloo")
    calls, real = [0], ops.call

    def spy(op, *args):
        calls[0] += op is ops.experts_backward
        return real(op, *args)

    ops.call = spy
    found = {}
    try:
        for check in CHECKS:
            calls[0] = 0
            try:
                found[check.__name__] = {**check(rank, folder), "calls": calls[0]}
            except Exception:
                found[check.__name__] = {"exception": traceback.format_exc()}
                break  # the other process may be waiting in a collective of this check
            torch.distributed.barrier()
    finally:
        with open(f"{folder}/{rank}.json", "w") as f:
            json.dump(found, f)
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    tiny("Qwen3Moe").save_pretrained(folder)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = dict(os.environ, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    both = [subprocess.Popen([sys.executable, __file__, str(folder), str(rank)], env=dict(env, RANK=str(rank), LOCAL_RANK=str(rank)),
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in (0, 1)]  # fmt: skip
    try:
        texts = [p.communicate(timeout=150)[0] for p in both]
    finally:
        for p in both:
            p.kill()
            p.wait()
    files = [folder / f"{rank}.json" for rank in (0, 1)]
    assert all(f.exists() for f in files), "\n".join(texts)
    return [json.loads(f.read_text()) for f in files]


@pytest.mark.parametrize("check", [c.__name__ for c in CHECKS])
def test_two_processes(found, check):
    for rank, one in enumerate(found):
        assert check in one, f"process {rank} did not get to it: {list(one.items())[-1]}"
        assert "exception" not in one[check], one[check].get("exception")
        assert one[check]["calls"] > 0, "fusedmoe did not compute"
        assert one[check]["error"] < 2e-5, one[check]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
