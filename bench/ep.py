# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism on this machine: python bench/ep.py [--ranks 1,2,4] [--csv FILE], or --cuda: what one rank costs on a card.

Processes with gloo, one thread each. For each number of ranks: a forward in one process without expert parallelism, then with it (exact,
lean), and what fusedmoe.distributed.forecast predicts from the rate of gloo measured in the same run. With two ranks also an
exchange that is delayed to half of the time of the products, with and without chunks: what overlapping hides.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import socket
import subprocess
import sys
import time
from functools import partial

import torch
import torch.distributed as dist

import fusedmoe
from fusedmoe import distributed
from fusedmoe.distributed import forecast
from fusedmoe.distributed.exchange import TorchExchange

T, H, I, E, K = 512, 1024, 512, 16, 4
LAYER = forecast.Layer(T, H, I, E, K)


class Delayed(TorchExchange):
    """A slower line: rows arrive no earlier than a line of so many seconds a byte would bring them, one exchange after the other."""

    per_byte, free = 0.0, 0.0

    def begin(self, send, send_rows, recv, recv_rows, row_bytes):
        request = super().begin(send, send_rows, recv, recv_rows, row_bytes)
        start = max(time.perf_counter(), self.free)
        self.free = start + self.per_byte * recv.nbytes
        return (*request, self.free)

    def wait(self, request, timeout_ms):
        super().wait(request, timeout_ms)
        if len(request) > 3:
            time.sleep(max(0.0, request[3] - time.perf_counter()))


def best(run, repeats: int = 15) -> float:
    """The fastest: on a machine that others use too, all that can be compared."""
    spent = []
    for _ in range(repeats + 1):
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()
        start = time.perf_counter()
        run()
        spent.append(time.perf_counter() - start)
    return min(spent[1:])


def line_of_gloo(ranks: int) -> forecast.Link:
    """Seconds of a message and of a byte, from two sizes of all-to-all."""
    small, large = torch.zeros(ranks * 64, dtype=torch.uint8), torch.zeros(ranks << 21, dtype=torch.uint8)
    a, b = (best(lambda t=t: dist.all_to_all_single(torch.empty_like(t), t)) for t in (small, large))
    sent = (ranks - 1) << 21
    return forecast.Link(sent / max(b - a, 1e-6) / 1e9, a / (ranks - 1), 1.0)


def child(rank: int, ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(rank)
    x, p = torch.randn(T, H, generator=g).bfloat16(), torch.rand(T, K, generator=g)
    ids = torch.rand(T, E, generator=g).topk(K).indices
    w = [(0.05 * torch.randn(E, 2 * I, H)).bfloat16(), (0.05 * torch.randn(E, H, I)).bfloat16()]
    rows = []

    def forward(ep):
        own = [t[ep.local] for t in w]
        with torch.no_grad():
            return lambda: distributed.experts(x, ids, p, own, "swiglu", ep=ep)

    plain = best(lambda: fusedmoe.experts(x, ids, p, w, "swiglu"))
    here = forecast.Machine(line_of_gloo(ranks), forecast.INFINIBAND, ranks, 6 * T * K * H * I / plain / 1e12) if ranks > 1 else None
    for mode in ("exact", "lean"):
        ep = distributed.ExpertParallel(dist.group.WORLD, E, mode=mode)
        run = forward(ep)
        with torch.no_grad():
            took = best(run)
        guess = forecast.forward(forecast.replace(LAYER, mode=mode), here, ranks)["total"] if here else plain
        sent = ep.stats["bytes_out"] + ep.stats["bytes_back"] if ranks > 1 else 0
        rows.append([ranks, mode, 1, "none", 1e3 * plain, 1e3 * took, 1e3 * guess, sent / 1e6])
    if ranks == 2:  # four times the tokens: a chunk should still fill the kernels
        x, p, ids = x.repeat(4, 1), p.repeat(4, 1), ids.repeat(4, 1)
        for chunks in (1, 4, 8):
            ep = distributed.ExpertParallel(dist.group.WORLD, E, mode="lean", chunks=chunks)
            ep.exchange = Delayed(dist.group.WORLD)
            run = forward(ep)
            with torch.no_grad():
                without = best(run)
                stats = ep.stats
                if chunks == 1:
                    alone, arrives = without, ranks * (stats["bytes_out"] + stats["bytes_back"])  # of this rank's own rows too
                ep.exchange.per_byte, delay = 0.5 * alone / arrives, 0.5 * alone
                took = best(run)
            expected = alone + delay if chunks == 1 else alone
            rows.append([ranks, "lean", chunks, f"{1e3 * delay:.1f} ms", 1e3 * without, 1e3 * took, 1e3 * expected, 0.0])
    if rank == 0:
        csv.writer(sys.stdout).writerows([[*r[:4], *(f"{v:.2f}" for v in r[4:])] for r in rows])
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def one_rank_on_cuda(tokens: int = 4096, blocks: int = 15, calls: int = 20) -> None:
    """Forward and backward of a layer of Qwen3-30B-A3B: plain, and over one rank; blocks in turns, medians of their milliseconds."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
    dist.init_process_group("nccl")
    layer = forecast.QWEN3_30B
    randn = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    x, dout = randn(tokens, layer.H).requires_grad_(), randn(tokens, layer.H)
    p = torch.rand(tokens, layer.k, device="cuda").requires_grad_()
    ids = torch.rand(tokens, layer.E, device="cuda").topk(layer.k).indices
    w = [(0.05 * randn(layer.E, a, b)).requires_grad_() for a, b in ((2 * layer.I, layer.H), (layer.H, layer.I))]
    one, last = (distributed.ExpertParallel(dist.group.WORLD, layer.E, **o) for o in ({}, {"placement": [[*range(layer.E)][::-1]]}))
    runs = {"plain": lambda: fusedmoe.experts(x, ids, p, w, "swiglu")}
    runs["one rank"] = lambda: distributed.experts(x, ids, p, w, "swiglu", ep=one)
    for mode in ("exact", "lean"):  # experts in another order: rows are packed, exchanged with oneself, and summed
        ep = last if mode == "exact" else distributed.ExpertParallel(dist.group.WORLD, layer.E, last.placement, mode=mode)
        runs[f"one rank, {mode} exchange"] = lambda ep=ep: distributed.experts(x, ids, p, w, "swiglu", ep=ep)
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for block in range(blocks + 1):
        for name, run in random.sample(sorted(runs.items()), len(runs)):  # none always after one that leaves the card cool
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                torch.autograd.grad(run(), [x, p, *w], dout)
            torch.cuda.synchronize()
            if block:
                spent[name].append(1e3 * (time.perf_counter() - start) / calls)
    plain = sorted(spent["plain"])[blocks // 2]
    print("run,ms,over_plain")
    for name, times in spent.items():
        print(f'"{name}",{sorted(times)[blocks // 2]:.4f},{sorted(times)[blocks // 2] / plain:.4f}')
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--csv")
    parser.add_argument("--cuda", action="store_true")
    arguments = parser.parse_args()
    if arguments.cuda:
        return one_rank_on_cuda()
    lines = ["ranks,mode,chunks,delay,before_ms,ms,predicted_ms,mbytes_sent"]
    for ranks in map(int, arguments.ranks.split(",")):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        env = dict(os.environ, WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
        every = [subprocess.Popen([sys.executable, __file__, "--child"], env=dict(env, RANK=str(r)), stdout=subprocess.PIPE, text=True)
                 for r in range(ranks)]  # fmt: skip
        lines += every[0].communicate()[0].splitlines()
        for process in every:
            process.wait()
    print("\n".join(lines))
    if arguments.csv:
        with open(arguments.csv, "w") as f:
            f.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        main()
