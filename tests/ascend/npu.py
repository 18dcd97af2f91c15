# SPDX-License-Identifier: Apache-2.0
"""The simulated NPU for Python: load it before torch, then read its counters.

FMOE_SIM names the folder with the simulator's libraries (tests/ascend_sim, built). Importing this module loads them, so
that the torch_npu which `import torch` brings along finds CANN's names; it must come before torch.
"""

from __future__ import annotations

import ctypes
import os
import sys

FOLDER = os.environ.get("FMOE_SIM", "")
_NAMES = ["ascendcl", "nnopbase", "opapi", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel"]
if not os.path.exists(os.path.join(FOLDER, "libopapi.so")):  # a CANN that has split it
    _NAMES[2:3] = ["opapi_math", "opapi_nn", "opapi_transformer"]

if "torch" in sys.modules:
    raise ImportError("import npu before torch: torch loads torch_npu, which needs the simulator's libraries")
if not os.path.exists(os.path.join(FOLDER, "libascendcl.so")):
    raise ImportError(f"FMOE_SIM={FOLDER!r} is not a folder with the simulator's libraries")
os.environ["FMOE_ASCEND_PATH"] = FOLDER
_libraries = [ctypes.CDLL(os.path.join(FOLDER, f"lib{n}.so"), mode=ctypes.RTLD_GLOBAL) for n in _NAMES]
_sim = _libraries[0]
_sim.fmoe_sim_get.restype = ctypes.c_int64
_sim.fmoe_sim_get.argtypes = [ctypes.c_char_p]
_sim.fmoe_sim_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
_sim.fmoe_sim_fail.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int]
_sim.fmoe_sim_trace.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
_sim.fmoe_sim_trace.restype = ctypes.c_size_t
_sim.fmoe_sim_violation_text.restype = ctypes.c_char_p

reset = _sim.fmoe_sim_reset
forgive = _sim.fmoe_sim_forgive


def get(counter: str) -> int:
    """A counter of the simulator (tests/ascend_sim/count.c lists them), or the calls of a function of CANN."""
    return _sim.fmoe_sim_get(counter.encode())


def put(switch: str, value: int) -> None:
    _sim.fmoe_sim_set(switch.encode(), value)


def fail(function: str, nth: int, code: int) -> None:
    """The nth call of a function from now on answers with an error; nth 0: none."""
    _sim.fmoe_sim_fail(function.encode(), nth, code)


def trace() -> list[str]:
    """The launches since reset(): operator, bytes read, bytes written."""
    text = ctypes.create_string_buffer(1 << 20)
    _sim.fmoe_sim_trace(text, len(text))
    return text.value.decode().splitlines()


def violation() -> str:
    return _sim.fmoe_sim_violation_text().decode() if get("violations") else ""


def drain() -> None:
    """Wait until torch_npu's task queue has submitted everything (asking for the stream does that), without a sync."""
    import torch

    torch.npu.current_stream().npu_stream  # noqa: B018


class Count:
    """with Count() as n: ...; n.launches, n.bytes, n.syncs, n.copies, n.trace of the block."""

    def __enter__(self) -> Count:
        drain()
        reset()
        return self

    def __exit__(self, *_: object) -> None:
        drain()
        self.launches, self.syncs = get("launches"), get("syncs")
        self.bytes = get("bytes_read") + get("bytes_written")
        self.copies = get("copies_h2d") + get("copies_d2h") + get("copies_d2d")
        self.hidden = get("hidden_copies")
        self.trace = trace()
