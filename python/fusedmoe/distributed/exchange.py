# SPDX-License-Identifier: Apache-2.0
"""The engine of expert parallelism over a torch.distributed process group: the trainer's own, no second communicator.

The library's buffers come as memoryviews and are sent as bytes: gloo refuses some dtypes. With nccl they stay on the device, and come
as (address, bytes).
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


class _Memory:
    """Bytes at an address of a CUDA device, as torch.as_tensor takes them."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class TorchExchange:
    """counts, begin, wait and abort, as core/ep.c calls them. What they raise becomes the library's error, with rank and phase."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.device = device or torch.device("cpu")
        # gloo takes memory of the host: the library copies rows of a device to it, and back
        backends = dist.get_backend_config(group).split(",")
        self.on_device = self.device.type == "cuda" and f"{self.device.type}:nccl" in backends
        if self.device.type == "npu" and not {"cpu:gloo", "cpu:mpi"} & {*backends}:
            raise NotImplementedError(f"expert parallelism on an NPU passes the host: the group has {','.join(backends)}, "
                                      "expected one for the CPU too (init_process_group('cpu:gloo,npu:hccl'))")  # fmt: skip
        self.memory: dict[int, Tensor] = {}

    def on(self, device: torch.device) -> "TorchExchange":
        """The same for tensors of a device."""
        return self if device == self.device else type(self)(self.group, device)

    def tensor(self, buffer: Any, dtype: torch.dtype = torch.uint8) -> Tensor:
        if isinstance(buffer, tuple):
            return torch.as_tensor(_Memory(*buffer), device=self.device) if buffer[1] else torch.empty(0, dtype=dtype, device=self.device)
        return torch.frombuffer(buffer, dtype=dtype) if buffer.nbytes else torch.empty(0, dtype=dtype)

    def counts(self, send: memoryview, recv: memoryview, timeout_ms: int) -> None:
        out, into = self.tensor(send, torch.int64), self.tensor(recv, torch.int64)
        if self.on_device:
            there = out.to(self.device)
            back = torch.empty_like(there)
            self.wait((dist.all_to_all_single(back, there, group=self.group, async_op=True), there, back), timeout_ms)
            into.copy_(back)
        else:
            self.wait((dist.all_to_all_single(into, out, group=self.group, async_op=True), out, into), timeout_ms)

    def begin(self, send: Any, send_rows: list[int], recv: Any, recv_rows: list[int], row_bytes: int) -> tuple:
        out, into = self.tensor(send), self.tensor(recv)
        sizes = [n * row_bytes for n in recv_rows], [n * row_bytes for n in send_rows]
        return dist.all_to_all_single(into, out, *sizes, group=self.group, async_op=True), out, into

    def wait(self, request: tuple, timeout_ms: int) -> None:
        work = request[0]
        if self.on_device:  # the stream waits; torch's own watchdog minds the deadline of the group
            work.wait()
        elif not work.wait(timedelta(milliseconds=timeout_ms)):
            raise TimeoutError(f"not every rank has come within {timeout_ms} ms")

    def abort(self, why: str) -> None:
        """A process group cannot be told: the others meet their deadline, or see this process end."""

    def device_alloc(self, nbytes: int) -> int:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self.memory[memory.data_ptr()] = memory
        return memory.data_ptr()

    def device_free(self, address: int) -> None:
        del self.memory[address]
