# SPDX-License-Identifier: Apache-2.0
"""The extension module of python/core: the C API for Python. Its errors are exceptions with the text of fmoe_last_error()."""

from typing import Any

from torch import Tensor

version: str
passes: tuple[int, ...]  # of each operation below: fmoe_pass
ROUTE_FORWARD: int
ROUTE_BACKWARD: int
PERMUTE_FORWARD: int
PERMUTE_BACKWARD: int
UNPERMUTE_FORWARD: int
UNPERMUTE_BACKWARD: int
GROUPED_MATMUL_FORWARD: int
GROUPED_MATMUL_BACKWARD: int
ACTIVATION_FORWARD: int
ACTIVATION_BACKWARD: int
EXPERTS_FORWARD: int
EXPERTS_BACKWARD: int
GROUPED_MATMUL_QUANT_FORWARD: int
GROUPED_MATMUL_QUANT_BACKWARD: int
EXPERTS_QUANT_FORWARD: int
EXPERTS_QUANT_BACKWARD: int
BLOCK_FORWARD: int
BLOCK_BACKWARD: int

# Plans are the library's handles. Positions only, as in C.
def plan(
    op: int, dtype: int, device: int, id: int, H: int, I: int, E: int, k: int, K: int, N: int, shared_I: int, rank1: int, rank2: int,
    act: int, flags: int, alpha: float, limit: float, rule: tuple[Any, ...] | None, threads: int, /,
) -> int: ...  # fmt: skip
def plan_destroy(plan: int, /) -> None: ...
def quantize(back: bool, w: Tensor, codes: Tensor, quant: tuple[Any, ...], /) -> None: ...
def repack(form: int, back: bool, N: int, K: int, foreign: Tensor, codes: Tensor, /) -> None: ...
def describe(plan: int, /) -> str: ...
def workspace_bytes(plan: int, pass_: int, T: int, /) -> int: ...
def saved_bytes(plan: int, T: int, tensor: Tensor = ..., /) -> int: ...

# stream: None asks torch. workspace: a tensor, or on the CPU the rows that it is for. A slot: a tensor, a list of them, a number, None.
def run(op: int, plan: int, flags: int, stream: int | None, workspace: Tensor | int, /, *slots: Any) -> None: ...
def info() -> str: ...
def cpu_isa() -> str: ...
def set_max_isa(name: str | None, /) -> None: ...
def ceiling(dtype: int, threads: int, /) -> tuple[float, float]: ...

# Memory that is used again (pool.c, pages.c), in bytes.
def empty_like(tensor: Tensor, bytes: int = ..., /) -> Tensor | None: ...
def empty_cache() -> int: ...
def pool() -> tuple[int, int, int]: ...
def pool_from(bytes: int, /) -> int: ...
def huge_pages() -> int: ...

# How tensors are read and launches made; for tests.
def use_exchange(on: bool, /) -> bool: ...
def use_queue(on: bool, /) -> bool: ...

# Expert parallelism: fusedmoe_ep.h. A layer and a call are capsules.
def ep_create(
    desc: tuple[Any, ...], engine: Any, rank: int, ranks: int, experts: Any, on_ranks: Any, mode: int, chunks: int, capacity: int,
    timeout_ms: int, on_device: bool, /,
) -> Any: ...  # fmt: skip
def ep_local(layer: Any, /) -> list[int]: ...
def ep_forward(
    layer: Any, form: int, inference: bool, x: Tensor, ids: Tensor, p: Tensor, w: Any, out: Tensor, dropped: Tensor | None,
    scale1: float, scale2: float, quants: tuple[Any, Any, Any] | None, /,
) -> Any: ...  # fmt: skip
def ep_backward(
    call: Any, form: int, x: Tensor, ids: Tensor, p: Tensor, w: Any, dout: Tensor, dx: Tensor | None, dp: Tensor | None, dw: Any,
    scale1: float, scale2: float, quants: tuple[Any, Any, Any] | None, /,
) -> None: ...  # fmt: skip
def ep_stats(call: Any, /) -> dict[str, int]: ...
