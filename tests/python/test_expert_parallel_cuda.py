# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism on CUDA tensors: two processes with gloo on one card, and one with nccl (which takes one rank a card).

As test_expert_parallel.py: each set of processes makes its checks and writes what it found.
``python test_expert_parallel_cuda.py folder rank ranks backend [check ...]`` in each process.
"""

import json
import os
import socket
import subprocess
import sys
import time
import traceback
from functools import partial

import pytest
import torch
import torch.distributed as dist

import fusedmoe
from common import V5, tiny
from fusedmoe import distributed
from test_expert_parallel import BATCH, STEPS, _batches, _draw, _grads

pytestmark = pytest.mark.skipif(not (V5 and torch.cuda.is_available()), reason="no CUDA device, or transformers v4")


def _experts(leaves, ids, flags, adapters, ep=None):
    x, p, *w = leaves
    if ep is None:
        return fusedmoe.experts(x, ids, p, w, "swiglu", flags, lora=adapters)
    return distributed.experts(x, ids, p, w, "swiglu", flags, 0.0, 0.0, adapters, ep=ep)


def _same(rank, T, ids, p, x, dout, w, lora, flags, placement, chunks, where, **options):
    """EP against one process, on the device: outputs and all gradients, bit for bit."""
    leaves = [t.cuda().requires_grad_() for t in (x, p, *w)]
    factors = [t.to("cuda", x.dtype).requires_grad_() for t in lora[0][:2]] if lora else []
    ids, dout = ids.cuda(), dout.cuda()
    out = _experts(leaves, ids, flags, [(*factors, lora[0][2]), None] if lora else [])
    want = _grads(out, dout, leaves + factors)
    ep = distributed.ExpertParallel(dist.group.WORLD, w[0].shape[0], placement, chunks=chunks, average=False, timeout=30, **options)
    mine = slice(sum(T[:rank]), sum(T[: rank + 1]))
    own = [t.detach()[mine].clone() for t in leaves[:2]] + [t.detach()[ep.local].clone() for t in leaves[2:]]
    own_factors = [t.detach()[ep.local].clone().requires_grad_() for t in factors]
    own = [t.requires_grad_() for t in own]
    got = _experts(own, ids[mine], flags, [(*own_factors, lora[0][2]), None] if lora else [], ep)
    assert torch.equal(got, out[mine]), (where, "out", float((got - out[mine]).abs().max()))
    for i, (a, b) in enumerate(zip(_grads(got, dout[mine], own + own_factors), want, strict=True)):
        b = b[mine] if i < 2 else b[ep.local]
        assert a is None and not b.numel() or torch.equal(a, b), (where, i, float((a - b).abs().max()))
    lean = distributed.ExpertParallel(dist.group.WORLD, w[0].shape[0], placement, mode="lean", timeout=30)
    with torch.no_grad():
        near = _experts(own, ids[mine], flags, [(*own_factors, lora[0][2]), None] if lora else [], lean)
    scale = float(out.detach().abs().max()) if out.numel() else 1.0
    assert not near.numel() or float((near - got).abs().max()) <= scale * (2e-5 if x.dtype == torch.float32 else 0.04), where
    return ep


def drawn_layers(rank, ranks, folder):
    for seed in range(40):
        T, ids, p, x, dout, w, lora, flags, placement, chunks = _draw(seed, ranks)
        _same(rank, T, ids, p, x, dout, w, lora, flags, placement, chunks, seed)


def large_layers(rank, ranks, folder):
    """The products of Hopper, with few and with many rows an expert."""
    for seed, (t, E, k) in enumerate([(96, 16, 4), (700, 8, 2), (2048, 8, 4), (40, 32, 8)]):
        randn = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
        T, H, I = [t + 7 * r for r in range(ranks)], 256, 192
        x, dout, p = randn(sum(T), H).bfloat16(), randn(sum(T), H).bfloat16(), randn(sum(T), k).sigmoid()
        w = [(0.1 * randn(E, 2 * I, H)).bfloat16(), (0.1 * randn(E, H, I)).bfloat16()]
        ids = torch.rand(sum(T), E, generator=torch.Generator().manual_seed(seed)).topk(k).indices
        for chunks in (1, 3):
            _same(rank, T, ids, p, x, dout, w, [], 0, None, chunks, (t, E, k, chunks))


def _train(model, rank, ranks, step):
    optimizer, losses, n = torch.optim.SGD(model.parameters(), lr=0.05), [], BATCH // ranks
    for ids in _batches()[:STEPS]:
        mine = ids[rank * n : (rank + 1) * n].cuda()
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


def training(rank, ranks, folder):
    for family in ("Qwen3Moe", "GptOss"):
        want = _train(fusedmoe.apply(tiny(family).cuda()), 0, 1, lambda m: None)
        model = fusedmoe.apply(tiny(family).cuda(), expert_parallel=dist.group.WORLD, timeout=60)
        got = _train(model, rank, ranks, distributed.sync_gradients)
        worst = max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
        assert worst < 2e-5 and want[-1] < want[0], (family, worst)
        whole = distributed.state_dict(model)
        assert whole.keys() == tiny(family).state_dict().keys()
        counts = distributed.load(model)
        assert all(sum(c["experts"]) == STEPS * BATCH * 8 * 2 for c in counts.values()), counts


def wrong_ids(rank, ranks, folder):
    ep = distributed.ExpertParallel(dist.group.WORLD, 4, timeout=20)
    w = [torch.randn(len(ep.local), 8, 6, device="cuda"), torch.randn(len(ep.local), 6, 4, device="cuda")]
    x, p, ids = torch.randn(3, 6, device="cuda"), torch.ones(3, 2, device="cuda"), torch.full((3, 2), 9 if rank == 1 else 1, device="cuda")
    with pytest.raises(IndexError if rank == 1 else RuntimeError, match="rank 1" if rank != 1 else r"rank 1 of .*ids\[0,0\] is 9"):
        distributed.experts(x, ids, p, w, "swiglu", ep=ep)
    assert bool(distributed.experts(x, ids.clamp(max=3), p, w, "swiglu", ep=ep).isfinite().all())


def _captured(mode, capacity, ranks):
    """Forward and backward in a graph, replayed on other tokens, beside the same without a graph."""
    T, E, k, H, I = 64, 8, 2, 128, 64
    g = torch.Generator().manual_seed(9)
    ep = distributed.ExpertParallel(dist.group.WORLD, E, capacity=capacity, mode=mode, average=False)
    w = [(0.1 * torch.randn(E, 2 * I, H, generator=g)).bfloat16().cuda(), (0.1 * torch.randn(E, H, I, generator=g)).bfloat16().cuda()]
    w = [t[ep.local].requires_grad_() for t in w]

    def tokens():
        return [torch.randn(T, H, generator=g).bfloat16().cuda(), torch.rand(T, k, generator=g).cuda(),
                torch.rand(T, E, generator=g).topk(k).indices.cuda(), torch.randn(T, H, generator=g).bfloat16().cuda()]  # fmt: skip

    def run(x, p, ids, dout, ep=ep):
        leaves = [x.detach().requires_grad_(), p.detach().requires_grad_(), *w]
        out = _experts(leaves, ids, 0, [], ep)
        return [out, *_grads(out, dout, leaves)]

    still = tokens()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(*still)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(*still)
        dropped = ep.dropped
    for _ in range(3):
        new = tokens()
        for to, t in zip(still, new, strict=True):
            to.copy_(t)
        graph.replay()
        torch.cuda.synchronize()
        got, lost = [t.clone() for t in result], int(dropped)
        want = run(*new)
        assert lost == int(ep.dropped) == (0 if capacity >= T else (T - capacity) * k), (lost, int(ep.dropped))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), mode
        if capacity >= T and mode == "exact":
            assert all(torch.equal(a, b) for a, b in zip(got, run(*new, ep=None), strict=True))


def captured(rank, ranks, folder):
    for mode in ("exact", "lean"):
        for capacity in (64, 40):
            _captured(mode, capacity, ranks)


CHECKS = {("gloo", 2): [drawn_layers, large_layers, training, wrong_ids], ("nccl", 1): [drawn_layers, large_layers, captured]}


def main(folder: str, rank: int, ranks: int, backend: str, *only: str) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(backend)
    found = {}
    try:
        for check in [c for c in CHECKS[backend, ranks] if not only or c.__name__ in only]:
            began = time.monotonic()
            try:
                check(rank, ranks, folder)
                found[check.__name__] = round(time.monotonic() - began, 2)
                print(check.__name__, found[check.__name__], flush=True)
            except BaseException:
                found[check.__name__] = traceback.format_exc()
                print(found[check.__name__], flush=True)
                break
            dist.barrier()
    finally:
        with open(f"{folder}/{backend}{rank}.json", "w") as f:
            json.dump(found, f)
    os._exit(0)


_found: dict[tuple, list[dict]] = {}


def _run(backend, ranks, folder):
    if (backend, ranks) in _found:
        return _found[backend, ranks]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = dict(os.environ, WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    every = [subprocess.Popen([sys.executable, __file__, str(folder), str(r), str(ranks), backend], env=dict(env, RANK=str(r)),
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for r in range(ranks)]  # fmt: skip
    try:
        texts = [p.communicate(timeout=240)[0] for p in every]
    finally:
        for p in every:
            p.kill()
            p.wait()
    files = [folder / f"{backend}{r}.json" for r in range(ranks)]
    assert all(f.exists() for f in files), "\n".join(texts)
    _found[backend, ranks] = [json.loads(f.read_text()) for f in files]
    return _found[backend, ranks]


@pytest.mark.parametrize(("backend", "ranks", "check"), [(*at, c.__name__) for at, checks in CHECKS.items() for c in checks])
def test_processes(tmp_path_factory, backend, ranks, check):
    for rank, one in enumerate(_run(backend, ranks, tmp_path_factory.getbasetemp())):
        assert check in one, f"rank {rank} did not get to it: {list(one.items())[-1]}"
        assert not isinstance(one[check], str), one[check]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
