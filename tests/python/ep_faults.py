# SPDX-License-Identifier: Apache-2.0
"""Faults of a rank over gloo, drawn anew in every run: it dies, is late, fails, announces what cannot be, or sends NaN, at some exchange of
a forward and a backward of two layers. Every other rank has an error that names itself and the phase, in time; none hangs.

    python tests/python/ep_faults.py [--runs 500] [--seed 1]

A run is three processes, forked from one that has torch and fusedmoe in memory. Ends with an error where a rank did not do as it must.
"""

import argparse
import json
import os
import random
import re
import signal
import socket
import sys
import time

import torch
import torch.distributed as dist

from fusedmoe import distributed
from fusedmoe.distributed.exchange import TorchExchange

RANKS, DEADLINE, SLACK, STUCK = 3, 1.0, 1.0, 30.0  # seconds
KINDS = "dies", "late", "fails", "lies", "nan", "none"
PHASE = re.compile(rf"rank (\d) of {RANKS}, (backward )?(count|dispatch|compute|combine): ")


class Faulty(TorchExchange):
    """Does as it is told, and what it is told at the exchange that it is told."""

    def __init__(self, group, kind, at, seed):
        super().__init__(group)
        self.kind, self.at, self.seed, self.made = kind, at, seed, 0

    def _before(self):
        self.made += 1
        if self.made != self.at:
            return False
        if self.kind == "dies":
            os._exit(9)
        if self.kind == "late":
            time.sleep(2 * DEADLINE)
        if self.kind == "fails":
            raise OSError("the line is cut")
        return True

    def counts(self, send, recv, timeout_ms):
        if self._before() and self.kind == "lies":
            told = memoryview(bytearray(send.tobytes())).cast("q")
            told[random.Random(self.seed).randrange(len(told))] = [-1, 1 << 62, -(1 << 63), 10**6][self.seed % 4]
            send = told.cast("B")
        super().counts(send, recv, timeout_ms)

    def begin(self, *arguments):
        self._before()
        return super().begin(*arguments)


def rank_of(rank, port, kind, at, who, seed, out):
    """What a process does; its last words are a line of JSON: what happened, how long the call took that failed, the error."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    dist.barrier()  # so that a fault does not meet the start of the others
    g = torch.Generator().manual_seed(seed)
    w = [torch.randn(7, 16, 12, generator=g), torch.randn(7, 12, 8, generator=g)]
    T = 5 * RANKS
    x, ids, p = torch.randn(T, 12, generator=g), torch.randint(7, (T, 2), generator=g), torch.rand(T, 2, generator=g)
    if kind == "nan":
        x[5 * who + 1] = float("nan")
    mine, began, said = slice(5 * rank, 5 * rank + 5), time.monotonic(), {"ok": True}
    try:
        exchange = Faulty(dist.group.WORLD, kind if rank == who else "none", at, seed)
        out_ = leaf = x[mine].clone().requires_grad_()
        for _ in range(2):
            ep = distributed.ExpertParallel(dist.group.WORLD, 7, mode=("exact", "lean")[seed % 2], chunks=1 + seed % 3, timeout=DEADLINE)
            ep.exchange = exchange
            began = time.monotonic()
            out_ = distributed.experts(out_, ids[mine], p[mine], [t[ep.local] for t in w], "swiglu", ep=ep)
        began = time.monotonic()
        out_.sum().backward()
        said["nan"] = [int(i) for i in out_.isnan().any(1).nonzero()] + [int(i) for i in leaf.grad.isnan().any(1).nonzero()]
        said["exchanges"] = exchange.made
    except Exception as problem:
        said = {"ok": False, "took": time.monotonic() - began, "error": f"{type(problem).__name__}: {problem}"}
    os.write(out, json.dumps({"rank": rank, **said}).encode() + b"\n")
    os._exit(0)


def run(seed):
    """One fault: its kind, what is wrong, the slowest error of a rank that is not at fault, and whether it had no effect."""
    draw = random.Random(seed)
    kind, who = draw.choice(KINDS), draw.randrange(RANKS)
    at = 1 if kind == "lies" else draw.randrange(1, 13)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    read, write = os.pipe()
    children = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            os.close(read)
            rank_of(rank, port, kind, at, who, seed, write)
        children.append(pid)
    os.close(write)
    began, stuck = time.monotonic(), []
    while children and time.monotonic() - began < STUCK:
        children = [pid for pid in children if os.waitpid(pid, os.WNOHANG)[0] == 0]
        time.sleep(0.005)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        stuck.append(pid)
    with os.fdopen(read) as lines:
        found = {one["rank"]: one for one in map(json.loads, lines)}
    what, slowest, spared = f"seed {seed}: rank {who} {kind} at exchange {at}", 0.0, set()
    wrong = [f"{what}: {len(stuck)} processes hang"] if stuck else []
    for rank in range(RANKS):
        one = found.get(rank)
        if one is None:
            if not (kind == "dies" and rank == who):
                wrong.append(f"{what}: rank {rank} said nothing")
        elif kind in ("none", "nan"):
            rows = {1} if kind == "nan" and rank == who else set()
            if not one["ok"] or set(one["nan"]) != rows:
                wrong.append(f"{what}: rank {rank}: {one}")
        elif one["ok"]:
            if len(found) < RANKS or not all(other["ok"] for other in found.values()):
                wrong.append(f"{what}: rank {rank} had no error")
            spared.add(seed)
        elif not PHASE.search(one["error"]) or int(PHASE.search(one["error"])[1]) != rank:
            wrong.append(f"{what}: rank {rank}: {one['error']}")
        elif rank != who:
            slowest = max(slowest, one["took"])
    return kind, wrong, slowest, bool(spared)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds, late, wrong, without = dict.fromkeys(KINDS, 0), [], [], 0
    for i in range(args.runs):
        kind, problems, slowest, spared = run(args.seed + i)
        kinds[kind] += 1
        without += spared
        late.append(slowest)
        wrong += problems
        for line in problems:
            print(line, flush=True)
    drawn, over = ", ".join(f"{n} {kind}" for kind, n in kinds.items()), sum(t > DEADLINE + SLACK for t in late)
    print(f"{args.runs} runs ({drawn}): {len(wrong)} wrong, {without} without effect; errors came within {max(late):.2f} s (deadline "
          f"{DEADLINE} s), {over} later than {DEADLINE + SLACK} s")  # fmt: skip
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
