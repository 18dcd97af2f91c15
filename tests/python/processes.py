# SPDX-License-Identifier: Apache-2.0
"""Checks that several processes make together over gloo: one set of them makes all checks, one after the other, and writes what it
found; the tests read it. In each process: ``python test_x.py folder rank ranks [check ...]`` (also the way to look at one by hand)."""

import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def serve(checks: list[Callable], folder: str, rank: int, ranks: int, *only: str, last: Callable | None = None) -> None:
    """What a process does. last: a check after which the group is of no use."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    try:
        for check in [c for c in checks if not only or c.__name__ in only]:
            began = time.monotonic()
            try:
                check(rank, ranks, folder)
                found[check.__name__] = round(time.monotonic() - began, 2)
            except BaseException:
                found[check.__name__] = traceback.format_exc()
                break  # the others may be waiting in a collective of this check
            if check is not last:
                dist.barrier()
    finally:
        with open(f"{folder}/{rank}.json", "w") as f:
            json.dump(found, f)
        if only:
            print(json.dumps(found, indent=1).replace("\\n", "\n"))
    os._exit(0)  # a group that met a deadline may wait in its destructor


def spawn(script: str, folder: Path, ranks: int, *only: str, **more: str) -> list[dict]:
    """What each of these processes found. more: of the environment."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = dict(os.environ, WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", **more)
    every = [subprocess.Popen([sys.executable, script, str(folder), str(r), str(ranks), *only], stdout=subprocess.PIPE, text=True,
                              env=dict(env, RANK=str(r), LOCAL_RANK=str(r)), stderr=subprocess.STDOUT) for r in range(ranks)]  # fmt: skip
    try:
        texts = [p.communicate(timeout=240)[0] for p in every]
    finally:
        for p in every:
            p.kill()
            p.wait()
    files = [folder / f"{r}.json" for r in range(ranks)]
    assert all(f.exists() for f in files), "\n".join(texts)
    return [json.loads(f.read_text()) for f in files]


def passed(found: list[dict], check: str) -> None:
    """Whether every process made this check."""
    for rank, one in enumerate(found):
        assert check in one, f"rank {rank} did not get to it: {list(one.items())[-1:]}"
        assert not isinstance(one[check], str), one[check]
