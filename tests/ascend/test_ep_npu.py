# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: I001
"""Expert parallelism from Python on the simulated NPU, with the real torch_npu: two processes with gloo, whose rows pass
through the host, against one process. Each process has a device of its own.

``python test_ep_npu.py folder rank ranks check`` in each process.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys

import npu  # before torch
import pytest
import torch
import torch.distributed as dist

import fusedmoe
from fusedmoe import Flag, distributed
from fusedmoe.distributed.exchange import TorchExchange
from fusedmoe.quant import QuantTensor
from models import tiny

STEPS, BATCH = 4, 4


def _draw(seed: int, ranks: int):
    """A layer as a caller may have it, the same on every rank. No rank has one expert: that is another product."""
    r, g = random.Random(seed), torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(shape, generator=g)  # noqa: E731
    E, k, H, I = r.choice([4, 5, 8]), r.choice([1, 2, 3]), r.randrange(1, 70), r.randrange(1, 50)
    dtype, bias = r.choice([torch.float32, torch.bfloat16]), r.random() < 0.4
    T = [0 if r.random() < 0.2 else r.randrange(30) for _ in range(ranks)]
    total = sum(T)
    ids = torch.randint(E, (total, k), generator=g)
    ids[torch.rand(ids.shape, generator=g) < 0.1] = E  # skip marks
    w = [randn(E, 2 * I, H) * 0.2, randn(E, H, I) * 0.2] + ([randn(E, 2 * I), randn(E, H)] if bias else [])
    factors = [randn(E, 3, H) * 0.2, randn(E, 2 * I, 3) * 0.2] if r.random() < 0.3 else []
    placement = [[3, 1], [e for e in range(E) if e not in (1, 3)]] if r.random() < 0.5 else None
    x, dout, p = randn(total, H).to(dtype), randn(total, H).to(dtype), randn(total, k)
    flags = Flag.SKIP_E | (Flag.BIAS if bias else 0)
    weights = [t.to(dtype) for t in (*w, *factors)]
    return T, ids, p.to(r.choice([torch.float32, dtype])), x, dout, weights, len(w), flags, placement, r.choice([1, 1, 3])


def _run(leaves, ids, dout, n, flags, ep=None):
    x, p, *w = leaves
    lora = [(*w[n:], 0.5), None] if len(w) > n else []
    if ep is None:
        out = fusedmoe.experts(x, ids, p, w[:n], "swiglu", flags, lora=lora)
    else:
        out = distributed.experts(x, ids, p, w[:n], "swiglu", flags, 0.0, 0.0, lora, ep=ep)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout, allow_unused=True)]


def drawn_layers(rank: int, ranks: int) -> None:
    """Outputs and gradients of the exact mode, bit for bit; the lean one near."""
    for seed in range(12):
        T, ids, p, x, dout, w, n, flags, placement, chunks = _draw(seed, ranks)
        whole = [t.npu().requires_grad_() for t in (x, p, *w)]
        want = [t.cpu() for t in _run(whole, ids.npu(), dout.npu(), n, flags)]
        options = dict(average=False, timeout=60)
        ep = distributed.ExpertParallel(dist.group.WORLD, w[0].shape[0], placement, chunks=chunks, **options)
        mine = slice(sum(T[:rank]), sum(T[: rank + 1]))
        local = [*ep.local]
        leaves = [t.npu().requires_grad_() for t in (x[mine], p[mine], *(t[local] for t in w))]
        got = _run(leaves, ids[mine].npu(), dout[mine].npu(), n, flags, ep)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a.cpu(), b[mine] if i < 3 else b[local]), (seed, i)
        lean = distributed.ExpertParallel(dist.group.WORLD, w[0].shape[0], placement, mode="lean", **options)
        near = _run(leaves, ids[mine].npu(), dout[mine].npu(), n, flags, lean)[0].cpu().float()
        scale = float(want[0].float().abs().max()) if want[0].numel() else 1.0
        error = float((near - got[0].cpu().float()).abs().max()) if near.numel() else 0.0
        assert error <= scale * (2e-5 if x.dtype == torch.float32 else 0.04), (seed, error)


def quantised(rank: int, ranks: int) -> None:
    """Each rank has codes and scales of its experts."""
    E, H, I, T, k = 5, 64, 48, 20, 2
    g = torch.Generator().manual_seed(2)
    x, p, ids = torch.randn(T, H, generator=g), torch.rand(T, k, generator=g), torch.randint(E, (T, k), generator=g)
    w = [torch.randn(s, generator=g) * 0.2 for s in ((E, 2 * I, H), (E, H, I))]
    mine = slice(0, 13) if rank == 0 else slice(13, T)
    for format in ("nf4", "int8"):
        coded = [QuantTensor.from_weights(t.bfloat16(), format).map(torch.Tensor.npu) for t in w]
        results = []
        for part in (slice(0, T), mine):
            leaves = [t[part].npu().requires_grad_() for t in (x.bfloat16(), p)]
            ep = distributed.ExpertParallel(dist.group.WORLD, E, average=False, timeout=60)
            if part == mine:
                own = [t.chosen([*ep.local]) for t in coded]
                out = distributed.experts(leaves[0], ids[part].npu(), leaves[1], own, "swiglu", ep=ep)
            else:
                out = fusedmoe.experts(leaves[0], ids.npu(), leaves[1], coded, "swiglu")
            results.append([t.cpu() for t in (out, *torch.autograd.grad(out.float().square().sum(), leaves))])
        for want, got in zip(*results, strict=True):
            assert torch.equal(want[mine], got), format


def wrong_ids(rank: int, ranks: int) -> None:
    ep = distributed.ExpertParallel(dist.group.WORLD, 4, timeout=60)
    w = [torch.randn(2, 8, 6).npu(), torch.randn(2, 6, 4).npu()]
    x, p, ids = torch.randn(3, 6).npu(), torch.ones(3, 2).npu(), torch.full((3, 2), 9 if rank == 1 else 1)
    text = r"rank 1 of .*ids\[0,0\] is 9" if rank == 1 else "rank 1 could not begin"
    with pytest.raises(IndexError if rank == 1 else RuntimeError, match=text):
        distributed.experts(x, ids.npu(), p, w, "swiglu", ep=ep)
    out = distributed.experts(x, ids.clamp(max=3).npu(), p, w, "swiglu", ep=ep)
    assert bool(out.cpu().isfinite().all())


def _train(model, rank: int, ranks: int, step) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
    g, losses, n = torch.Generator().manual_seed(5), [], BATCH // ranks
    for _ in range(STEPS):
        ids = torch.randint(3, 60, (BATCH, 8), generator=g)[rank * n : (rank + 1) * n].npu()
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        step(model)
        optimizer.step()
        mean = loss.detach().cpu()
        if ranks > 1:
            dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
    return losses


def _mean_of_others(model) -> None:
    """What sync_gradients does, through the host: gloo has no device here."""
    own = {id(p) for p in distributed.expert_parameters(model)}
    for p in model.parameters():
        if p.grad is not None and id(p) not in own:
            mean = p.grad.cpu()
            dist.all_reduce(mean)
            p.grad.copy_(mean.npu() / dist.get_world_size())


def training(rank: int, ranks: int) -> None:
    want = _train(fusedmoe.apply(tiny("qwen3_moe").npu()), 0, 1, lambda model: None)
    model = fusedmoe.apply(tiny("qwen3_moe").npu(), expert_parallel=dist.group.WORLD, timeout=60)
    got = _train(model, rank, ranks, _mean_of_others)
    assert got == pytest.approx(want, rel=1e-5)


def main(folder: str, rank: int, ranks: int, check: str) -> None:
    torch.npu.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    globals()[check](rank, ranks)
    torch.npu.synchronize()
    assert npu.violation() == ""
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("check", ["drawn_layers", "quantised", "wrong_ids", "training"])
def test_two_processes(check, tmp_path):
    ranks = 2
    env = dict(os.environ, OMP_NUM_THREADS="1")
    lines = [[sys.executable, "-W", "ignore", __file__, str(tmp_path), str(r), str(ranks), check] for r in range(ranks)]
    running = [subprocess.Popen(c, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in lines]
    try:
        said = [p.communicate(timeout=300)[0] for p in running]
    finally:
        for p in running:
            p.kill()
    assert [p.returncode for p in running] == [0] * ranks, "\n".join(said)[-6000:]


def test_a_group_that_has_no_backend_for_the_host_is_refused(monkeypatch):
    for name, answer in (("get_rank", 0), ("get_world_size", 2), ("get_backend_config", "npu:hccl")):
        monkeypatch.setattr(dist, name, lambda group, answer=answer: answer)
    with pytest.raises(NotImplementedError, match="cpu:gloo,npu:hccl"):
        TorchExchange(None, torch.device("npu:0"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
