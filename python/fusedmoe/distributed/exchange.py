# SPDX-License-Identifier: Apache-2.0
"""The engine of expert parallelism over a torch.distributed process group: the trainer's own, no second communicator.

The library's buffers come as memoryviews and are sent as bytes: gloo refuses some dtypes.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def group_of(where: Any) -> dist.ProcessGroup:
    """The process group of a group, or of a DeviceMesh: its only dimension, or the one that is named "ep"."""
    if not hasattr(where, "mesh_dim_names") or not hasattr(where, "get_group"):
        if isinstance(where, dist.ProcessGroup):
            return where
        raise TypeError(f"expert_parallel is a {type(where).__name__}, expected a process group or a DeviceMesh")
    if where.ndim == 1:
        return where.get_group()
    if "ep" in (where.mesh_dim_names or ()):
        return where.get_group("ep")
    raise ValueError(f"expert_parallel is a DeviceMesh with the dimensions {where.mesh_dim_names}: give the one of the experts, mesh[name]")


def _tensor(buffer: memoryview, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(buffer, dtype=dtype) if buffer.nbytes else torch.empty(0, dtype=dtype)


class TorchExchange:
    """counts, begin, wait and abort, as core/ep.c calls them. What they raise becomes the library's error, with rank and phase."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)

    def counts(self, send: memoryview, recv: memoryview, timeout_ms: int) -> None:
        out, into = _tensor(send, torch.int64), _tensor(recv, torch.int64)
        self.wait((dist.all_to_all_single(into, out, group=self.group, async_op=True), out, into), timeout_ms)

    def begin(self, send: memoryview, send_rows: list[int], recv: memoryview, recv_rows: list[int], row_bytes: int) -> tuple:
        out, into = _tensor(send, torch.uint8), _tensor(recv, torch.uint8)
        sizes = [n * row_bytes for n in recv_rows], [n * row_bytes for n in send_rows]
        return dist.all_to_all_single(into, out, *sizes, group=self.group, async_op=True), out, into

    def wait(self, request: tuple, timeout_ms: int) -> None:
        work = request[0]
        if not work.wait(timedelta(milliseconds=timeout_ms)):
            raise TimeoutError(f"not every rank has come within {timeout_ms} ms")

    def abort(self, why: str) -> None:
        """A process group cannot be told: the others meet their deadline, or see this process end."""
