# SPDX-License-Identifier: Apache-2.0
"""Expert weights in huge pages: whose, when, and whose never."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import fusedmoe
from common import V5
from fusedmoe import _core, ops

MB = 1 << 20
T, H, I, E, k = 4, 512, 512, 4, 2  # W1 of 8 MB, W2 of 4: 3 to 4 and 1 to 2 huge pages

if not V5:
    pytest.skip("one version is enough", allow_module_level=True)


def in_huge_pages(*tensors):
    """MB, of all mappings in which the tensors are."""
    spans, inside, kilobytes = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors], False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "AnonHugePages:":
            kilobytes += inside * int(rest[0])
        elif not first.endswith(":"):
            begin, end = (int(n, 16) for n in first.split("-"))
            inside = any(begin < last and at < end for at, last in spans)
    return kilobytes // 1024


_alive: list[list[torch.Tensor]] = []  # memory that was seen before is not looked at again


def weights():
    _alive.append([torch.randn(E, 2 * I, H), torch.randn(E, H, I)])
    return list(_alive[-1])


def run(w, times, flags=0):
    x, ids, p = torch.ones(T, H), torch.zeros(T, k, dtype=torch.int64), torch.ones(T, k)
    return [fusedmoe.experts(x, ids, p, w, 0, flags) for _ in range(times)]


def moved(w, expected=0, flags=0):
    """MB that go into huge pages while w is run, seconds long if they are fewer than expected: a process has only so much time for it."""
    before, until = _core.huge_pages(), time.monotonic() + (5 if expected else 0.1)
    while (_core.huge_pages() - before) // MB < max(expected, 1) and time.monotonic() < until:
        run(w, 2, flags)
    return (_core.huge_pages() - before) // MB


@pytest.fixture(scope="module", autouse=True)
def _system():
    if moved(weights(), 8) < 8:
        pytest.skip("this system has no MADV_COLLAPSE, or does not tell whose a page is")
    yield
    _alive.clear()


def test_weights_that_are_run_again():
    w = weights()
    at, values = [t.data_ptr() for t in w], [t.clone() for t in w]
    before = _core.huge_pages()
    (first,) = run(w, 1)
    assert _core.huge_pages() == before
    assert 8 <= moved(w, 8) <= 12 and in_huge_pages(*w) >= 8
    assert [t.data_ptr() for t in w] == at and all(map(torch.equal, w, values)) and torch.equal(run(w, 1)[0], first)
    assert moved(w) == 0
    w[0].data = w[0].clone()  # other memory is another weight
    assert moved(w, 6) >= 6


def test_training_and_other_layouts():
    x, ids, p, w = torch.ones(T, H), torch.zeros(T, k, dtype=torch.int64), torch.ones(T, k), weights()
    before = _core.huge_pages()
    fusedmoe.experts(x, ids, p, [t.requires_grad_() for t in w]).sum().backward()  # the forward and the backward are two runs
    assert _core.huge_pages() > before
    turned, whole = [t.detach().transpose(1, 2).contiguous() for t in w], torch.zeros(E, 2, 2 * I, H)
    assert moved(turned, 8, ops.TRANSPOSED) >= 8
    assert moved([whole[:, 0], w[1].detach()], 12) >= 12  # a view: the memory from its first value to its last


@pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch's own allocator has the state")
def test_what_a_forward_saves():
    """Two states are alive at once, and the workspace: from the third call on all have memory that was there before."""
    T, I = 5000, 512
    tensors = torch.randn(T, 16), torch.arange(2 * T).view(T, 2) % 2, torch.ones(T, 2), [torch.randn(2, 2 * I, 16), torch.randn(2, 16, I)]
    tensors[0].requires_grad_()
    faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt  # noqa: E731
    for _ in range(4):
        before = faults()
        out = fusedmoe.experts(*tensors)
        new = faults() - before
    size = next(t.nbytes for t in out.grad_fn.saved_tensors if t.dtype == torch.uint8)
    assert size > 32 * MB and new < size / 4096 / 40


def test_switched_off():
    code = """
import torch, fusedmoe
w = torch.randn(4, 2048, 512), torch.randn(4, 512, 1024)
for _ in range(4):
    fusedmoe.experts(torch.ones(2, 512), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), w)
assert fusedmoe._core.huge_pages() == 0
"""
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "FMOE_HUGE_PAGES": "0", "FMOE_AUTOLOAD": "0"}, check=True, timeout=100)


@pytest.mark.parametrize("shared", [False, True])
def test_weights_in_a_file_stay_there(shared, tmp_path):
    path, flat = str(tmp_path / "weights"), torch.cat([t.flatten() for t in weights()])
    flat.numpy().tofile(path)
    flat = torch.from_file(path, shared=shared, size=flat.numel())
    assert moved([flat[: E * 2 * I * H].view(E, 2 * I, H), flat[E * 2 * I * H :].view(E, H, I)]) == 0
    assert moved([t.share_memory_() for t in weights()]) == 0


def test_what_a_fork_shares_stays_shared():
    """A copy in either process would take the memory twice."""
    w = weights()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.read(read, 1)
        os._exit(moved(w))
    here = moved(w)
    os.write(write, b"x")
    there = os.waitpid(child, 0)[1]
    assert here == 0 and there == 0
    assert moved(weights(), 8) >= 8
