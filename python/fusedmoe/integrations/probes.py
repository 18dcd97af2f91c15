# SPDX-License-Identifier: Apache-2.0
"""Running a model's own code on a few numbers, to find out what it computes, in whatever context somebody has put the model into."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import nn

Found = TypeVar("Found")
_inside = threading.local()
_one_at_a_time = threading.Lock()


class ProbeError(RuntimeError):
    """A module could not be run on a probe: nothing is known about what it computes."""


@contextmanager
def _float32() -> Iterator[None]:
    """The default dtype is the whole process's: it is set only where it is another one, and by one probe at a time."""
    with _one_at_a_time:
        before = torch.get_default_dtype()
        if before != torch.float32:
            torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            if before != torch.float32:
                torch.set_default_dtype(before)


def isolated(probe: Callable[[], Found], module: nn.Module | None = None) -> Found:
    """probe(), in a thread of its own and with torch's defaults. module: what it runs where it lies, on the caller's stream there.

    Saved-tensor hooks (checkpoint, save_on_cpu), function and dispatch modes, functorch's transforms, autocast, grad and inference mode,
    tracing and the default device are all thread-local in torch: a new thread has none of them. One by one they would take as many
    private switches, which change from release to release. A thread takes 0.1 ms, once a layer. What is left is the whole process's:
    the default dtype and the random numbers, which are put back.
    """
    if getattr(_inside, "now", False):
        return probe()
    here = next((p.device for p in module.parameters() if p.device.type not in ("cpu", "meta")), None) if module is not None else None
    device = None if here is None else torch.get_device_module(here)
    stream = None if device is None else device.current_stream(here)

    def alone() -> Found:
        _inside.now = True
        with ExitStack() as stack:
            stack.enter_context(torch.device("cpu"))  # a default of torch.set_default_tensor_type is not thread-local
            stack.enter_context(torch.random.fork_rng([] if here is None else [here], device_type="cuda" if here is None else here.type))
            if device is not None:
                stack.enter_context(device.stream(stream))
            return probe()

    with _float32(), ThreadPoolExecutor(1) as thread:
        return thread.submit(alone).result()
