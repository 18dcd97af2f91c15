# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism over gloo: 2, 3 and 4 processes compute what one computes (processes.py)."""

import copy
import os
import random
import subprocess
import sys
import time
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fusedmoe
import processes
from common import V5, tiny
from fusedmoe import Flag, distributed
from fusedmoe.distributed import forecast

pytestmark = pytest.mark.skipif(not V5, reason="transformers v4 has its experts in lists")
FAMILIES = "Qwen3Moe", "Mixtral", "DeepseekV3", "GptOss"
STEPS, BATCH = 20, 12


# ---- drawn layers: every bit ------------------------------------------------------------------------------------------------


def _draw(seed: int, ranks: int):
    """A layer as a caller may have it, the same on every rank."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    E, k, H, I = r.choice([1, 3, 5, 8]), r.choice([1, 2, 3]), r.randrange(1, 70), r.randrange(1, 50)
    dtype, bias = r.choice([torch.float32, torch.bfloat16]), r.random() < 0.4
    T = [0 if r.random() < 0.2 else r.randrange(30) for _ in range(ranks)]
    total, randn = sum(T), partial(torch.randn, generator=g)
    ids = torch.randint(1 if r.random() < 0.2 else E, (total, k), generator=g)
    ids[torch.rand(ids.shape, generator=g) < 0.1] = E  # skip marks
    w = [randn(E, 2 * I, H) * 0.2, randn(E, H, I) * 0.2] + ([randn(E, 2 * I), randn(E, H)] if bias else [])
    lora = [(randn(E, 3, H) * 0.2, randn(E, 2 * I, 3) * 0.2, 0.5), None] if r.random() < 0.3 else []
    placement = None
    if r.random() < 0.5:
        placement = [[] for _ in range(ranks)]
        for e in r.sample(range(E), E):
            placement[r.randrange(ranks)].append(e)
    p, x, dout = randn(total, k), randn(total, H), randn(total, H)
    cast = [t.to(dtype) for t in (x, dout, *w)]
    flags = Flag.SKIP_E | (Flag.BIAS if bias else 0)
    return T, ids, p.to(r.choice([torch.float32, dtype])), cast[0], cast[1], cast[2:], lora, flags, placement, r.choice([1, 1, 3])


def _grads(out, dout, leaves):
    return torch.autograd.grad(out, leaves, dout, allow_unused=True)


def drawn_layers(rank, ranks, folder):
    """Outputs and gradients of the exact mode, bit for bit."""
    for seed in range(40):
        T, ids, p, x, dout, w, lora, flags, placement, chunks = _draw(seed, ranks)
        leaves = [t.clone().requires_grad_() for t in (x, p, *w)]
        factors = [t.clone().requires_grad_() for t in lora[0][:2]] if lora else []
        adapters = [(*factors, lora[0][2]), None] if lora else []
        out = fusedmoe.experts(leaves[0], ids, leaves[1], leaves[2:], "swiglu", flags, lora=adapters)
        want = _grads(out, dout, leaves + factors)
        ep = distributed.ExpertParallel(dist.group.WORLD, w[0].shape[0], placement, chunks=chunks, average=False, timeout=30)
        mine = slice(sum(T[:rank]), sum(T[: rank + 1]))
        own = [leaves[0][mine].detach(), leaves[1][mine].detach(), *(t[ep.local].detach() for t in leaves[2:])]
        own = [t.clone().requires_grad_() for t in own]
        own_factors = [t[ep.local].detach().clone().requires_grad_() for t in factors]
        adapters = [(*own_factors, lora[0][2]), None] if lora else []
        got = distributed.experts(own[0], ids[mine], own[1], own[2:], "swiglu", flags, 0.0, 0.0, adapters, ep=ep)
        assert torch.equal(got, out[mine]), (seed, "out")
        for i, (a, b) in enumerate(zip(_grads(got, dout[mine], own + own_factors), want, strict=True)):
            b = b[mine] if i < 2 else b[ep.local]
            assert a is None and not b.numel() or torch.equal(a, b), (seed, i)
        lean = distributed.ExpertParallel(dist.group.WORLD, w[0].shape[0], placement, mode="lean", timeout=30)
        with torch.no_grad():
            near = distributed.experts(own[0], ids[mine], own[1], own[2:], "swiglu", flags, 0.0, 0.0, adapters, ep=lean)
        scale = float(out.abs().max()) if out.numel() else 1.0
        assert not near.numel() or float((near - got).abs().max()) <= scale * (2e-5 if x.dtype == torch.float32 else 0.04), seed
        assert ep.stats["rows_out"] <= ep.stats["pairs_out"]


# ---- models -------------------------------------------------------------------------------------------------------------------


def _batches():
    g = torch.Generator().manual_seed(5)
    return [torch.randint(3, 40, (BATCH, 8), generator=g) for _ in range(STEPS)]


def _train(model, rank, ranks, step, steps=STEPS, optimizer=None):
    """The loss curve, mean over ranks, of this rank's part of the batches."""
    optimizer, losses, n = optimizer or torch.optim.SGD(model.parameters(), lr=0.05), [], BATCH // ranks
    for ids in _batches()[:steps]:
        mine = ids[rank * n : (rank + 1) * n]
        loss = model(input_ids=mine, labels=mine).loss
        optimizer.zero_grad()
        loss.backward()
        step(model)
        optimizer.step()
        mean = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
    return losses


def _near(got, want):
    worst = max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
    assert worst < 1e-6, worst
    assert len(want) < STEPS or want[-1] < want[0]


def _training(family, rank, ranks, folder):
    want = _train(fusedmoe.apply(tiny(family)), 0, 1, lambda m: None)
    model = fusedmoe.apply(tiny(family), expert_parallel=dist.group.WORLD, timeout=60)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters() if n.endswith("experts.down_proj")}
    assert shapes and all(s[0] == len(range(rank * 8 // ranks, (rank + 1) * 8 // ranks)) for s in shapes.values())
    _near(_train(model, rank, ranks, distributed.sync_gradients), want)
    counts = distributed.load(model)
    assert all(sum(c["experts"]) == sum(c["ranks"]) == STEPS * BATCH * 8 * 2 for c in counts.values()), counts


def training_qwen3(rank, ranks, folder):
    _training("Qwen3Moe", rank, ranks, folder)


def training_mixtral(rank, ranks, folder):
    _training("Mixtral", rank, ranks, folder)


def training_deepseek(rank, ranks, folder):
    _training("DeepseekV3", rank, ranks, folder)


def training_gpt_oss(rank, ranks, folder):
    _training("GptOss", rank, ranks, folder)


def checkpointed_chunks(rank, ranks, folder):
    """Gradient checkpointing, chunks, and the lean mode."""
    want = _train(fusedmoe.apply(tiny("Qwen3Moe")), 0, 1, lambda m: None, 5)
    model = fusedmoe.apply(tiny("Qwen3Moe"), expert_parallel=dist.group.WORLD, chunks=2, mode="lean")
    model.gradient_checkpointing_enable()
    _near(_train(model.train(), rank, ranks, distributed.sync_gradients, 5), want)


def with_ddp(rank, ranks, folder):
    """DDP averages what is not the experts'."""
    want = _train(fusedmoe.apply(tiny("Mixtral")), 0, 1, lambda m: None, 5)
    model = fusedmoe.apply(tiny("Mixtral"), expert_parallel=dist.group.WORLD)
    _near(_train(torch.nn.parallel.DistributedDataParallel(model), rank, ranks, lambda m: None, 5), want)


def with_fsdp2(rank, ranks, folder):
    """The other parameters in parts over all ranks, the experts whole where they are."""
    want = _train(fusedmoe.apply(tiny("Qwen3Moe")), 0, 1, lambda m: None, 5)
    model = fusedmoe.apply(tiny("Qwen3Moe"), expert_parallel=dist.group.WORLD)
    own = distributed.expert_parameters(model)
    for layer in model.model.layers:
        fully_shard(layer, ignored_params=own)
    fully_shard(model, ignored_params=own)
    _near(_train(model, rank, ranks, lambda m: None, 5), want)


def ep_times_fsdp2(rank, ranks, folder):
    """Two by two: experts over pairs of ranks, in parts over the other pairs; the rest in parts over all four."""
    want = _train(fusedmoe.apply(tiny("Qwen3Moe")), 0, 1, lambda m: None)
    mesh, whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep")), init_device_mesh("cpu", (4,))
    model = fusedmoe.apply(tiny("Qwen3Moe"), expert_parallel=mesh)
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["dp"])
        fully_shard(layer, mesh=whole)
    fully_shard(model, mesh=whole)
    _near(_train(model, rank, ranks, lambda m: None), want)
    saved = distributed.state_dict(model)
    assert saved["model.layers.0.mlp.experts.down_proj"].shape[0] == 8


def save(rank, ranks, folder):
    """Whole tensors, which any number of ranks loads."""
    model = fusedmoe.apply(tiny("GptOss"), expert_parallel=dist.group.WORLD)
    _train(model, rank, ranks, distributed.sync_gradients, 3)
    whole = distributed.state_dict(model)
    assert {n: t.shape for n, t in whole.items()} == {n: t.shape for n, t in tiny("GptOss").state_dict().items()}
    if rank == 0:
        torch.save(whole, f"{folder}/../whole.pt")
        ids = _batches()[0]
        one = fusedmoe.apply(tiny("GptOss"))
        one.load_state_dict(whole)
        torch.save(one(input_ids=ids).logits.detach(), f"{folder}/../logits.pt")


def save_shards(rank, ranks, folder):
    """DCP: every rank writes its experts, and what Adam knows of them; with FSDP2 a part of them."""
    model = fusedmoe.apply(tiny("GptOss"), expert_parallel=dist.group.WORLD)
    distributed.load_state_dict(model, torch.load(f"{folder}/../whole.pt"))
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    _train(model, rank, ranks, distributed.sync_gradients, 2, adam)
    dcp.save(distributed.sharded_state_dict(model, adam), checkpoint_id=f"{folder}/../shards")
    whole = {n: t.clone() for n, t in distributed.state_dict(model).items()}
    after = _train(model, rank, ranks, distributed.sync_gradients, 3, adam)
    if rank == 0:
        torch.save((whole, after), f"{folder}/../trained.pt")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = fusedmoe.apply(tiny("GptOss"), expert_parallel=mesh)
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=mesh["dp"])
    state = distributed.sharded_state_dict(model)
    dcp.load(state, checkpoint_id=f"{folder}/../shards")
    assert _equal(distributed.state_dict(model), whole)
    dcp.save(state, checkpoint_id=f"{folder}/../parts")


def _equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())


def restore(rank, ranks, folder):
    model = fusedmoe.apply(tiny("GptOss"), expert_parallel=dist.group.WORLD)
    distributed.load_state_dict(model, torch.load(f"{folder}/../whole.pt"))
    want = torch.load(f"{folder}/../logits.pt")
    with torch.no_grad():
        assert torch.equal(model(input_ids=_batches()[0]).logits, want)


def restore_shards(rank, ranks, folder):
    """On other numbers of ranks, with another map, and by a program that knows nothing of ranks; and training goes on."""
    whole, after = torch.load(f"{folder}/../trained.pt")
    for name in ("shards", "parts"):
        placement = [[e for e in range(7, -1, -1) if (e * e + 1) % ranks == r] for r in range(ranks)] if name == "parts" else None
        model = fusedmoe.apply(tiny("GptOss"), expert_parallel=dist.group.WORLD, placement=placement)
        state = distributed.sharded_state_dict(model)
        dcp.load(state, checkpoint_id=f"{folder}/../{name}")
        assert _equal(distributed.state_dict(model), whole)
    plain = tiny("GptOss")
    dcp.load({"model": plain.state_dict()}, checkpoint_id=f"{folder}/../shards")
    assert _equal(plain.state_dict(), whole)
    model = fusedmoe.apply(plain, expert_parallel=dist.group.WORLD)
    adam = torch.optim.Adam(model.parameters(), lr=0.5)
    state = distributed.sharded_state_dict(model, adam)
    dcp.load(state, checkpoint_id=f"{folder}/../shards")
    distributed.load_optimizer(model, adam, state["optimizer"])
    assert adam.param_groups[0]["lr"] == 0.01
    _near(_train(model, rank, ranks, distributed.sync_gradients, 3, adam), after)


class Mlp(nn.Module):
    def __init__(self, H=12, I=10):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(a, b, bias=False) for a, b in ((H, I), (H, I), (I, H)))
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Experts in a list, as transformers v4 has them."""

    def __init__(self, E=5, top_k=2):
        super().__init__()
        self.top_k, self.num_experts = top_k, E
        self.gate, self.experts = nn.Linear(12, E, bias=False), nn.ModuleList(Mlp() for _ in range(E))

    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.gate(x)
        p, ids = logits.float().softmax(-1).topk(self.top_k)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, slots = (ids == e).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(x[rows]) * p[rows, slots, None].to(x.dtype))
        return out.view(hidden_states.shape), logits


def listed_experts(rank, ranks, folder):
    """A list of modules: the others' are gone; outputs, gradients, saving and loading."""
    torch.manual_seed(4)
    one = nn.Sequential(Block())
    spread = copy.deepcopy(one)
    x = torch.randn(ranks, 7, 12)
    fusedmoe.apply(one)
    fusedmoe.apply(spread, expert_parallel=dist.group.WORLD, average=False)
    assert sum(isinstance(e, Mlp) for e in spread[0].experts) == len(spread[0]._fmoe_ep.local) < 5
    want, got = one(x)[0], spread(x[rank : rank + 1])[0]
    assert torch.equal(got, want[rank : rank + 1])
    want.square().sum().backward()
    got.square().sum().backward()
    for e in spread[0]._fmoe_ep.local:
        assert torch.equal(spread[0].experts[e].up_proj.weight.grad, one[0].experts[e].up_proj.weight.grad)
    whole = distributed.state_dict(spread)
    assert whole.keys() == one.state_dict().keys() and all(torch.equal(t, one.state_dict()[n]) for n, t in whole.items())
    other = {n: t + 1 for n, t in whole.items()}
    distributed.load_state_dict(spread, other)
    assert all(torch.equal(t, other[n]) for n, t in distributed.state_dict(spread).items())


def own_of_transformers(rank, ranks, folder):
    """transformers' plan with our exchange: loss and gradients as with its own."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if rank == 0:
        tiny("Qwen3Moe").save_pretrained(f"{folder}/model")
    dist.barrier()
    for sizes in (dict(tp_size=ranks, ep_size=ranks), dict(fsdp_size=ranks, ep_size=ranks)):
        ids, found = _batches()[0], {}
        mine = ids if "tp_size" in sizes else ids.chunk(ranks)[rank]
        for name in ("all_to_all", "fusedmoe"):
            config = DistributedConfig(**sizes, **({"ep_implementation": name} if TABLE else {}))
            how = "fusedmoe" if TABLE or name == "fusedmoe" else "eager"  # 5.22: it is the implementation that chooses
            model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", distributed_config=config, experts_implementation=how)
            assert not TABLE or (name == "fusedmoe") == any("_fmoe_ep" in vars(m) for m in model.modules())
            loss = model(input_ids=mine, labels=mine).loss
            loss.backward()
            carried = [m._fmoe_ep.stats for m in model.modules() if "_fmoe_ep" in vars(m)]
            assert bool(carried and all(carried)) == (name == "fusedmoe")
            found[name] = float(loss.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        (want, grads), (got, own) = found.values()
        assert abs(got - want) < 1e-6 * want and own.keys() == grads.keys()
        for n, g in grads.items():
            a, b = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (own[n], g))
            assert float((a - b).norm()) <= 1e-5 * float(b.norm()) + 1e-9, n


def lora_on_shards(rank, ranks, folder):
    """PEFT adapters of this rank's experts under DDP, which must leave them alone: losses and adapters of one process."""
    import peft

    config = peft.LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], target_modules=["q_proj"])
    torch.manual_seed(6)
    one = peft.get_peft_model(fusedmoe.apply(tiny("Qwen3Moe")), config)
    with torch.no_grad():
        for n, p in one.named_parameters():
            p.add_(torch.randn_like(p), alpha=0.1 if "lora_" in n else 0)
    model = fusedmoe.apply(tiny("Qwen3Moe"), expert_parallel=dist.group.WORLD)
    model = peft.get_peft_model(model, config)
    distributed.load_state_dict(model, one.state_dict())
    with torch.no_grad():
        for n, p in model.named_parameters():  # what DDP sends round from the first rank would be seen
            p.add_(float(rank) if "q_proj.lora_" in n else 0.0)
    replicated = torch.nn.parallel.DistributedDataParallel(model)
    want = _train(one, 0, 1, lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05), 4)
    _near(_train(replicated, rank, ranks, lambda m: distributed.clip_grad_norm_(model, 0.05), 4), want)
    whole, wanted = distributed.state_dict(model), one.state_dict()
    assert whole.keys() == wanted.keys()
    moved = [n for n, t in whole.items() if "lora_" in n and float((t - wanted[n]).abs().max()) > 1e-6]
    assert not moved, moved


def quantised(rank, ranks, folder):
    """Experts of every format, over ranks: outputs, and gradients of adapters, with the bits of one process; saved and loaded as whole."""
    for format in ("nf4", "fp8", "int8"):
        config = dict(hidden_size=128, moe_intermediate_size=128)
        one = fusedmoe.quantize(tiny("Qwen3Moe", **config), format)
        spread = fusedmoe.quantize(tiny("Qwen3Moe", **config), format)
        fusedmoe.apply(spread, expert_parallel=dist.group.WORLD, placement=[[3, 0, 6, 1, 4], [2, 7, 5]])
        mine = spread.model.layers[0].mlp.experts.down_proj
        assert isinstance(mine, fusedmoe.QuantTensor) and len(mine) == (5, 3)[rank]
        x = torch.randn(ranks, 6, 128, generator=torch.Generator().manual_seed(1))
        got, want = (m.model.layers[0].mlp(t.requires_grad_()) for m, t in ((spread, x[rank : rank + 1].clone()), (one, x)))
        assert torch.equal(got, want[rank : rank + 1]), format
        whole = distributed.state_dict(spread)
        scale2 = {n: t.expand(8) for n, t in one.state_dict().items() if n.endswith(".scale2")}  # one for each expert now
        assert _equal(whole, one.state_dict() | scale2), format
        other = fusedmoe.quantize(tiny("Qwen3Moe", **config), format)
        with torch.no_grad():
            for p in other.parameters():
                (p.codes if isinstance(p, fusedmoe.QuantTensor) else p).zero_()
        fusedmoe.apply(other, expert_parallel=dist.group.WORLD)
        distributed.load_state_dict(other, whole)
        dcp.save(distributed.sharded_state_dict(spread), checkpoint_id=f"{folder}/{format}")
        again = fusedmoe.apply(fusedmoe.quantize(tiny("Qwen3Moe", **config), format), expert_parallel=dist.group.WORLD)
        dcp.load(distributed.sharded_state_dict(again), checkpoint_id=f"{folder}/{format}")
        for model in (other, again):
            assert torch.equal(model.model.layers[0].mlp(x[rank : rank + 1]), got), format


def quantised_layers(rank, ranks, folder):
    """Every gradient of a quantised layer, with adapters: those of one process."""
    g, T, E, H, I = torch.Generator().manual_seed(8), 9, 5, 64, 32
    x, p, dout = (torch.randn(ranks * T, n, generator=g) for n in (H, 2, H))
    ids, w = torch.randint(E, (ranks * T, 2), generator=g), [torch.randn(E, 2 * I, H, generator=g), torch.randn(E, H, I, generator=g)]
    lora = [torch.randn(s, generator=g) * 0.2 for s in ((E, 3, H), (E, 2 * I, 3), (E, 2, I), (E, H, 2))]
    coded = [fusedmoe.QuantTensor.from_weights(w[0], "nf4"), fusedmoe.QuantTensor.from_weights(w[1], "int8")]
    ep, mine = distributed.ExpertParallel(dist.group.WORLD, E, chunks=2, average=False), slice(rank * T, (rank + 1) * T)
    leaves = [t.clone().requires_grad_() for t in (x, p, *lora)]
    own = [leaves[i].detach()[mine].clone() for i in (0, 1)] + [t.detach()[ep.local].clone() for t in leaves[2:]]
    own = [t.requires_grad_() for t in own]
    of = lambda t: [(*t[2:4], 0.5), (*t[4:6], 2.0)]
    want = fusedmoe.experts(leaves[0], ids, leaves[1], coded, "swiglu", lora=of(leaves))
    got = distributed.experts(own[0], ids[mine], own[1], [t.chosen(ep.local) for t in coded], "swiglu", lora=of(own), ep=ep)
    assert torch.equal(got, want[mine])
    for i, (a, b) in enumerate(zip(_grads(got, dout[mine], own), _grads(want, dout, leaves), strict=True)):
        assert torch.equal(a, b[mine] if i < 2 else b[ep.local]), i


def fp8_of_transformers(rank, ranks, folder):
    """FP8Experts, whose codes and scales are parameters of theirs."""
    fp8 = import_module("transformers.integrations.finegrained_fp8")
    config = transformers.Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=96, num_experts=5, dtype=torch.bfloat16)
    g = torch.Generator().manual_seed(3)
    one = nn.Sequential(fp8.FP8Experts(config, block_size=(32, 32)))
    for name, p in one.named_parameters():
        p.data = torch.rand(p.shape, generator=g) if "scale" in name else torch.randn(p.shape, generator=g).to(torch.float8_e4m3fn)
    spread = fusedmoe.apply(copy.deepcopy(one), expert_parallel=dist.group.WORLD)
    fusedmoe.apply(one)
    mine = slice(3 * rank, 3 * rank + 3)
    x, p = torch.randn(3 * ranks, 64, generator=g).bfloat16(), torch.rand(3 * ranks, 2, generator=g)
    ids = torch.randint(5, (3 * ranks, 2), generator=g)
    assert torch.equal(spread[0](x[mine], ids[mine], p[mine]), one[0](x, ids, p)[mine])
    whole = distributed.state_dict(spread)
    assert all(torch.equal(whole[f"0.{n}"].float(), getattr(one[0], n).float()) for n in ("gate_up_proj_scale_inv", "down_proj_scale_inv"))


def replicas(rank, ranks, folder):
    """An expert on two ranks trains as one: its gradients are summed, and the norm of all gradients counts it once."""
    clip = partial(torch.nn.utils.clip_grad_norm_, max_norm=0.5)
    norms = [], []
    want = _train(fusedmoe.apply(tiny("Mixtral")), 0, 1, lambda m: norms[0].append(float(clip(m.parameters()))), 4)
    placement = [[0, 1, 2, 3, 5], [5, 4, 6, 7, 0]]
    model = fusedmoe.apply(tiny("Mixtral"), expert_parallel=dist.group.WORLD, placement=placement)

    def step(m):
        distributed.sync_gradients(m)
        norms[1].append(float(distributed.clip_grad_norm_(m, 0.5)))

    _near(_train(model, rank, ranks, step, 4), want)
    assert torch.tensor(norms[0]).allclose(torch.tensor(norms[1]), 1e-5) and norms[0][0] > 0.5
    down = model.model.layers[0].mlp.experts.down_proj.detach()
    rows = down[[0, 4]] if rank == 0 else down[[4, 0]]  # of experts 0 and 5
    theirs = [torch.empty_like(rows) for _ in range(2)]
    dist.all_gather(theirs, rows.contiguous())
    assert torch.equal(*theirs)


# ---- what goes wrong ------------------------------------------------------------------------------------------------------------


def odd_arguments(rank, ranks, folder):
    """A rank without tokens whose gradient is one number expanded; negated views; arguments that are none, the same on every rank."""
    g = torch.Generator().manual_seed(4)
    x, ids, p = torch.randn(6, 9, generator=g), torch.randint(4, (6, 2), generator=g), torch.rand(6, 2, generator=g)
    w = [torch.randn(4, 14, 9, generator=g), torch.randn(4, 9, 7, generator=g)]
    leaves = [t.clone().requires_grad_() for t in (x, *w)]
    want = fusedmoe.experts(leaves[0], ids, p, leaves[1:])
    grads = torch.autograd.grad(want.sum(), leaves)
    ep = distributed.ExpertParallel(dist.group.WORLD, 4, average=False, timeout=10)
    mine = slice(0, 6) if rank == 0 else slice(0, 0)
    own = [t.clone().requires_grad_() for t in (x[mine], *(t[ep.local] for t in w))]
    out = distributed.experts(own[0], ids[mine], p[mine], own[1:], ep=ep)
    out.sum().backward()
    assert torch.equal(out, want[mine]) and torch.equal(own[0].grad, grads[0][mine])
    assert all(torch.equal(t.grad, whole[ep.local]) for t, whole in zip(own[1:], grads[1:], strict=True))
    turn = lambda t: torch._neg_view(-t.detach())  # noqa: E731
    assert torch.equal(distributed.experts(turn(own[0]), ids[mine], p[mine], [*map(turn, own[1:])], ep=ep), out)
    wrong = (dict(x=x.cfloat()), "x is torch.complex64"), (dict(x=x[0]), r"x is \[9\], expected \[T, H\]"), (dict(w=None), "w is a .*None")
    for change, message in (*wrong, (dict(ids=ids[:, 0]), r"ids is \[6\], expected \[T, k\]"), (dict(x=x.numpy()), "x is a numpy.ndarray")):
        given = dict(x=x, ids=ids, p=p, w=[t[ep.local] for t in w]) | change
        with pytest.raises((TypeError, ValueError), match=f"experts: {message}"):
            distributed.experts(**given, ep=ep)


def wrong_ids(rank, ranks, folder):
    """One rank's error is told to all, in time, and the next call works."""
    ep = distributed.ExpertParallel(dist.group.WORLD, 4, timeout=20)
    n = len(ep.local)
    w = [torch.randn(n, 8, 6), torch.randn(n, 6, 4)]
    ids = torch.full((3, 2), 9 if rank == 1 else 1)
    with pytest.raises(IndexError if rank == 1 else RuntimeError, match="rank 1" if rank != 1 else r"rank 1 of .*ids\[0,0\] is 9"):
        distributed.experts(torch.randn(3, 6), ids, torch.ones(3, 2), w, "swiglu", ep=ep)
    out = distributed.experts(torch.randn(3, 6), ids.clamp(max=3), torch.ones(3, 2), w, "swiglu", ep=ep)
    assert bool(out.isfinite().all())


def late_rank(rank, ranks, folder):
    """Last: gloo is of no use after a deadline."""
    ep = distributed.ExpertParallel(dist.group.WORLD, 4, timeout=0.5)
    n = len(ep.local)
    arguments = torch.randn(3, 6), torch.ones(3, 2, dtype=torch.int64), torch.ones(3, 2), [torch.randn(n, 8, 6), torch.randn(n, 6, 4)]
    if rank == 0:
        time.sleep(1.5)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank {rank} of {ranks}, count: "):
        distributed.experts(*arguments, "swiglu", ep=ep)
    assert time.monotonic() - began < 2


THEIRS = find_spec("transformers.distributed") and find_spec("transformers.distributed.expert_parallel")
THEIRS = import_module(THEIRS.name) if THEIRS else None
TABLE = hasattr(THEIRS, "EPImplementationInterface")
SEAM = [own_of_transformers] if TABLE or hasattr(THEIRS, "EpDispatchExpertsParallel") else []
FP8 = [fp8_of_transformers] if V5 and find_spec("transformers.integrations.finegrained_fp8") else []
MODELS = [training_qwen3, training_mixtral, training_deepseek, training_gpt_oss]
FULL = os.environ.get("FMOE_FULL", "0") != "0"  # make test-full
CHECKS = {
    4: [drawn_layers, *(MODELS if FULL else MODELS[:1]), ep_times_fsdp2, *([with_fsdp2] if FULL else []), checkpointed_chunks,
        save, save_shards],
    2: [drawn_layers, *MODELS, with_ddp, with_fsdp2, restore, restore_shards, lora_on_shards, quantised, quantised_layers, *FP8, replicas,
        *SEAM, odd_arguments, wrong_ids, late_rank],
    3: [drawn_layers, training_qwen3, listed_experts, restore, restore_shards],
    1: [restore, restore_shards],
}  # fmt: skip


_found: dict[int, list[dict]] = {}


def _run(ranks, tmp_path_factory):
    if ranks != 4:
        _run(4, tmp_path_factory)  # which saves what the others load
    if ranks not in _found:
        _found[ranks] = processes.spawn(__file__, tmp_path_factory.getbasetemp() / f"ep{ranks}", ranks)
    return _found[ranks]


@pytest.mark.parametrize(("ranks", "check"), [(n, c.__name__) for n, checks in CHECKS.items() for c in checks])
def test_processes(tmp_path_factory, ranks, check):
    processes.passed(_run(ranks, tmp_path_factory), check)


def test_faults_of_a_rank():
    """Some of those that ep_faults.py draws."""
    script, runs = Path(__file__).with_name("ep_faults.py"), "100" if FULL else "8"
    done = subprocess.run([sys.executable, script, "--runs", runs, "--seed", "7"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


# ---- the model of larger machines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_traffic_is_what_a_routing_gives(ranks):
    """Rows counted over drawn routings of Qwen3-30B-A3B, beside the formula."""
    layer = forecast.QWEN3_30B
    ids = torch.rand(4096, layer.E, generator=torch.Generator().manual_seed(3)).topk(layer.k).indices
    owner = torch.tensor([next(r for r in range(ranks) if e < (r + 1) * layer.E // ranks) for e in range(layer.E)])
    found = torch.zeros(4096, ranks, dtype=torch.bool).scatter_(1, owner[ids], True).sum() / 4096
    assert abs(float(found) / forecast.ranks_of_a_token(layer.E, layer.k, ranks) - 1) < 0.01
    exact, lean = (forecast.traffic(forecast.replace(layer, mode=mode), ranks) for mode in ("exact", "lean"))
    wide = forecast.traffic(forecast.replace(layer, back=4), ranks)  # as the CPU sends them back
    assert lean["out"] == lean["back"] == exact["out"] and lean["total"] < exact["total"] < lean["k_rows"] < wide["total"]
    assert ranks <= 8 or lean["total"] < lean["all_gather"]


def test_time_adds_up():
    for machine in (forecast.H200, forecast.ATLAS):
        one = forecast.forward(forecast.QWEN3_30B, machine, 8)
        assert one["hidden"] == 0 and one["total"] == pytest.approx(one["products"] + one["exchange"])
        cut = forecast.forward(forecast.replace(forecast.QWEN3_30B, chunks=4, mode="lean"), machine, 8)
        assert max(cut["products"], cut["exchange"] - 1e-3) < cut["total"] < cut["products"] + cut["exchange"] and 0.5 < cut["hidden"] < 1
    alone = forecast.forward(forecast.QWEN3_30B, forecast.H200, 1)
    assert alone["total"] == alone["products"] and alone["exchange"] == 0
    assert len(forecast.table().splitlines()) == 2 + 2 * 5 * 3


if __name__ == "__main__":
    processes.serve(CHECKS[int(sys.argv[3])], sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:], last=late_rank)
