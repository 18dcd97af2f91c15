# SPDX-License-Identifier: Apache-2.0
"""Memory, and times on a CUDA device: the meters of ``python -m fusedmoe.bench`` (the wheel brings this file) and bench/h200.py.

CUDA has three regimes. "idle": passes after a pause, when the card has its highest clock. "sustained": passes without a pause, at the power
limit, which costs everybody some 15 %. "graph", for up to 64 tokens: a CUDA graph of several forwards, each on a routing of its
own, so that weights come from memory and launches cost what they do in serving.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fusedmoe

GRAPH_BELOW = 65  # tokens
DRAWS = 16  # routings, and forwards in a graph


# ---- times on CUDA ------------------------------------------------------------------------------------------


def dense_passes(T: int, H: int, I: int, k: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Products of the same flops, with one matrix for all rows: no routing, no activation, no combine."""
    R = T * k

    def normal(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda", dtype=dtype) * scale

    x, g, h, a, w1, w2 = normal(R, H), normal(R, H), normal(R, 2 * I), normal(R, I), normal(2 * I, H, 0.02), normal(H, I, 0.02)

    def forward() -> None:
        x @ w1.t()
        a @ w2.t()

    def step() -> None:
        forward()
        g @ w2
        h @ w1
        g.t() @ a
        h.t() @ x

    return {"fwd": forward, "fwd+bwd": step}


def milliseconds(run: Callable[[], Any], regime: str = "idle") -> float:
    """Median of a pass: of 15 after 3 from idle, or of those between 0.3 and 1 s of work without a pause."""
    torch.cuda.synchronize()
    if regime == "idle":
        time.sleep(0.4)
    times: list[float] = []
    while not times or (regime == "sustained" and sum(times) < 1000):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(19)]
        events[0].record()
        for event in events[1:]:
            run()
            event.record()
        torch.cuda.synchronize()
        times += [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    warm = 3 if regime == "idle" else sum(total < 300 for total in itertools.accumulate(times))
    return statistics.median(times[warm:])


def graph_milliseconds(forward: Callable[[int], Any]) -> float:
    """Median of one of the forwards in a CUDA graph of DRAWS of them."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward(0)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        for draw in range(DRAWS):
            forward(draw)
    return milliseconds(graph.replay) / DRAWS


def cuda_times(
    passes: Mapping[str, Callable], names: Iterable[str], T: int, H: int, I: int, k: int, dtype: torch.dtype
) -> dict[tuple[str, str, str], list[float]]:
    """Milliseconds by (implementation, pass, regime). passes: "fwd" of a name and the number of a routing, "fwd+bwd" of a name."""
    if T < GRAPH_BELOW:
        return {(name, "fwd", "graph"): [graph_milliseconds(partial(passes["fwd"], name))] for name in names if name != "dense"}
    runs = {}
    for name in names:
        of_name = dense_passes(T, H, I, k, dtype) if name == "dense" else {what: partial(run, name) for what, run in passes.items()}
        runs.update({(name, what): of_name[what] for what in passes})
    # All that is timed from idle comes first: a pause does not give back what a second at the power limit took.
    return {(*key, regime): [milliseconds(run, regime)] for regime in ("idle", "sustained") for key, run in runs.items()}


# ---- memory -------------------------------------------------------------------------------------------------


def _resident(key: str) -> float:
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(key))


def peak_megabytes(step: Callable[[], Any], device: str) -> float | None:
    """Memory a step needs above what is there before it; None where the system does not tell. On a CPU it is made twice: the
    second finds the gradients' memory of the first in fusedmoe's cache, and its peak counts too."""
    if device != "cpu":
        torch.accelerator.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.accelerator.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    try:
        gc.collect()
        fusedmoe.empty_cache()
        ctypes.CDLL(None).malloc_trim(0)
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        step()
        step()
        return _resident("VmHWM") - before
    except (OSError, AttributeError):
        return None


def kept_megabytes(forward: Callable[[], Any], parameters: Iterable[torch.Tensor]) -> float:
    """What autograd keeps from forward to backward, parameters not counted."""
    own, kept = {p.untyped_storage().data_ptr() for p in parameters}, {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = forward()
    del out
    return sum(n for address, n in kept.items() if address not in own) / 2**20
