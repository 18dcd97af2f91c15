# SPDX-License-Identifier: Apache-2.0
"""Memory of results, saved states, gradients and workspaces that is used again from step to step.

Who gets it, how much is kept, threads, fork, the end of a process.
"""

import copy
import gc
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import fusedmoe
from common import V5
from fusedmoe import _core, ops

if not V5:
    pytest.skip("one version is enough", allow_module_level=True)
if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    pytest.skip(f"torch {torch.__version__} has no exchange table: its allocator has the results", allow_module_level=True)

MB = 1 << 20
T, H, I, E, k = 6, 256, 128, 8, 2  # gradients of 2 MB and 1 MB


elsewhere = 0  # bytes of gradients that other modules still hold


def pool():
    """Bytes in use, bytes that are kept, and the most of both since the last were given back."""
    live, free, peak = _core.pool()
    return live - elsewhere, free, peak - elsewhere


@pytest.fixture(autouse=True)
def _empty():
    global elsewhere
    was = _core.pool_from(MB)
    gc.collect()
    fusedmoe.empty_cache()
    elsewhere = _core.pool()[0]
    assert pool() == (0, 0, 0)
    yield
    gc.collect()
    fusedmoe.empty_cache()
    _core.pool_from(was)


def layer(dtype=torch.float32):
    r = lambda *s: (torch.randn(*s) * 0.3).to(dtype).requires_grad_()  # noqa: E731
    return r(T, H), torch.randint(0, E - 1, (T, k)), torch.rand(T, k), r(E, 2 * I, H), r(E, H, I)


def grads(x, ids, p, w1, w2, **kw):
    x.grad = w1.grad = w2.grad = None
    fusedmoe.experts(x, ids, p, [w1, w2], **kw).square().sum().backward()
    return w1.grad, w2.grad


def test_the_next_step_has_the_memory_of_the_last():
    tensors = layer()
    first = [(g.data_ptr(), g.clone()) for g in grads(*tensors)]
    live, workspace, peak = was = pool()
    assert live == 3 * MB and workspace < 2 * MB and live + workspace == peak  # AccumulateGrad took the tensors themselves: no copy
    for _ in range(3):
        again = grads(*tensors)
        assert sorted(g.data_ptr() for g in again) == sorted(at for at, _ in first)
        assert all(torch.equal(g, want) for g, (_, want) in zip(again, first, strict=True))
        del again
        assert pool() == was
    tensors[3].grad = tensors[4].grad = None
    assert pool() == (0, peak, peak)
    assert fusedmoe.empty_cache() == peak and pool() == (0, 0, 0) and fusedmoe.empty_cache() == 0


def test_results_and_what_is_saved_have_the_memory_of_the_last():
    """Of a heap whose end free() gives back to the system, they would be mapped anew in some processes and not in others."""
    _core.pool_from(1 << 16)
    x, ids, p, w1, w2 = layer()
    x, ids, p = (t.detach().repeat(100, 1).requires_grad_(t is x) for t in (x, ids, p))  # out 600 KB, h 1200 KB
    places = []
    for _ in range(3):
        out = fusedmoe.experts(x, ids, p, [w1, w2])
        assert out.nbytes + 4 * 1200 * 2 * I <= pool()[0] <= 1.2 * (out.nbytes + 4 * 1200 * 2 * I)
        out.sum().backward()
        places.append((out.data_ptr(), x.grad.data_ptr(), w1.grad.data_ptr(), sum(pool()[:2])))
        x.grad = w1.grad = w2.grad = out = None
        assert pool()[0] == 0
    assert places[0] == places[1] == places[2]
    with torch.no_grad():
        assert fusedmoe.experts(x, ids, p, [w1, w2]).data_ptr() and sum(pool()[:2]) == places[0][3]


def test_a_block_stays_mapped():
    _core.empty_like(torch.empty(4 * MB)).fill_(7)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    again = _core.empty_like(torch.empty(4 * MB))
    assert float(again.min()) == 7 and resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100


def test_what_was_in_the_memory_does_not_matter():
    tensors = layer()  # expert E - 1 has no row
    want = [g.clone() for g in grads(*tensors)]
    for t in tensors[3:]:
        t.grad.fill_(float("nan"))
    assert all(torch.equal(g, w) for g, w in zip(grads(*tensors), want, strict=True))


def test_every_operator_with_weights_uses_it():
    x, w = torch.randn(5, 256, requires_grad=True), torch.randn(4, 256, 256, requires_grad=True)
    fusedmoe.GmmFunction.apply(x, w, [1, 0, 4, 0]).sum().backward()
    assert pool()[0] == MB and w.grad[1].abs().max() == 0
    ws = [torch.randn(512, 512, requires_grad=True) for _ in range(2)]
    fusedmoe.HybridGmmFunction.apply(2, torch.randn(3, 512), torch.randn(0, 512), *ws)[0].sum().backward()
    assert pool()[0] == 3 * MB
    x, _, _, w1, w2 = layer()
    fusedmoe.block(x, torch.randn(E, H), [w1, w2], k)[0].sum().backward()
    assert pool()[0] == 6 * MB
    lists = [t.detach().repeat(16, 1).requires_grad_() for t in (*w1[:2, :I], *w1[:2, I:])]  # [2048, 256]: 2 MB
    downs = [torch.randn(H, 2048, requires_grad=True) for _ in range(2)]
    fusedmoe.experts(x, torch.zeros(T, 1, dtype=torch.int64), torch.ones(T, 1), [*lists, *downs], 0, ops.LIST).sum().backward()
    assert pool()[0] == 18 * MB


def test_what_is_not_for_it():
    assert _core.empty_like(torch.empty(MB // 4 - 1)) is None and _core.empty_like(torch.empty(MB // 4)) is not None
    assert _core.empty_like(torch.empty(2 * MB)[::2]) is None and _core.empty_like(torch.empty(1).expand(MB)) is None  # holes, overlap
    for shape, order in (((4, 256, 512), (0, 2, 1)), ((1, 1024, 512), (2, 0, 1)), ((8, 32, 32, 64), (3, 1, 0, 2))):
        like = torch.empty(shape, dtype=torch.bfloat16).permute(order)
        got = _core.empty_like(like)
        assert got.shape == like.shape and got.stride() == like.stride() and got.dtype == like.dtype
    with pytest.raises(TypeError, match="expected a tensor"):
        _core.empty_like("no tensor")
    got = _core.empty_like(torch.empty(1), MB + 1)
    assert got.dtype == torch.uint8 and got.shape == (MB + 1,) and _core.empty_like(torch.empty(1), MB - 1) is None
    for wrong in ((), (torch.empty(1), 1, 1), (torch.empty(1), "1"), (torch.empty(1), -MB)):
        with pytest.raises((TypeError, ValueError)):
            _core.empty_like(*wrong)
    off = "from fusedmoe import _core; import torch; assert _core.empty_like(torch.empty(1 << 20)) is None"
    subprocess.run([sys.executable, "-c", off], env=dict(os.environ, FMOE_POOL="0"), check=True)


def test_hardly_more_than_was_in_use_at_once():
    """An eighth: not all blocks of a step are in use at its peak, and those that are not shall stay."""
    a = [_core.empty_like(torch.empty(2 * MB)) for _ in range(4)]  # 32 MB
    del a
    assert pool() == (0, 32 * MB, 32 * MB)
    b = _core.empty_like(torch.empty(3 * MB))  # no block of 12 MB: the oldest goes
    assert pool() == (12 * MB, 24 * MB, 32 * MB)
    c = _core.empty_like(torch.empty(6 * MB))  # 24 MB: now 36 MB are in use
    assert pool() == (36 * MB, 0, 36 * MB)
    del b, c
    held = [_core.empty_like(torch.empty(n * MB // 4)) for n in (20, 9, 5, 24)]
    live, free, peak = pool()
    assert 58 * MB <= live <= 1.5 * 58 * MB and peak == live  # a block may be half as large again
    assert elsewhere + live + free <= 9 * (elsewhere + peak) / 8
    del held
    g = torch.Generator().manual_seed(0)
    held = []
    for _ in range(300):
        held.append(_core.empty_like(torch.empty(int(torch.randint(MB // 4, 2 * MB, (), generator=g)))))
        if len(held) > 5:
            del held[int(torch.randint(0, 6, (), generator=g))]
        live, free, peak = pool()
        assert elsewhere + live + free <= 9 * (elsewhere + peak) / 8 and peak <= 1.5 * 58 * MB


def test_a_batch_of_another_size_finds_the_block():
    at = lambda rows: _core.empty_like(torch.empty(rows, 1000)).data_ptr()  # noqa: E731
    first = at(1000)
    assert [at(1010), at(700)] == [first, first]
    small = _core.empty_like(torch.empty(600, 1000))
    assert small.data_ptr() and pool()[0] < 3 * MB  # of two fifths less it would be a waste: another block
    near = [_core.empty_like(torch.empty(rows, 1000)) for rows in (1400, 1200, 1300)]
    want = near[1].data_ptr()
    del near
    assert at(1150) == want  # the smallest that is large enough


def test_memory_that_stays_free_is_the_systems():
    """LazyFree: the kernel takes it when it needs it. Not in a training loop, whose steps follow one another in less than a second."""
    lazy = lambda: sum(map(int, re.findall(r"^LazyFree: *(\d+)", Path("/proc/self/smaps").read_text(), re.M))) // 1024
    t, other, before = _core.empty_like(torch.empty(16 * MB)).fill_(1), _core.empty_like(torch.empty(MB)), lazy()
    del t, other
    assert lazy() - before <= 2
    time.sleep(1.1)
    other = _core.empty_like(torch.empty(MB))  # any request does it
    assert lazy() - before >= 62
    t = _core.empty_like(torch.empty(16 * MB)).fill_(2)
    assert float(t.min()) == 2 and lazy() - before <= 2
    del t, other
    t = _core.empty_like(torch.empty(16 * MB))
    assert float(t.min()) == 2 and lazy() - before <= 2


def test_a_workspace_lies_where_a_gradient_will_be():
    """No page fault in a step, and no block beside the gradients but where all of them are in use."""
    T, H, I, E, k = 4096, 256, 512, 4, 2  # gradients of 4 and 2 MB, a workspace of more than those
    r = lambda *s: (torch.randn(*s) * 0.1).requires_grad_()  # noqa: E731
    tensors = r(T, H), torch.randint(0, E, (T, k)), torch.rand(T, k), r(E, 2 * I, H), r(E, H, I)
    want = [g.clone() for g in grads(*tensors)]
    plan = ops._plan(ops.EXPERTS, torch.float32, torch.device("cpu"), torch.get_num_threads(), H, I, E, k=k, flags=ops.REUSE_SAVED)
    workspace = _core.workspace_bytes(plan, 1, T)
    assert workspace >= 16 * MB
    least = workspace + _core.saved_bytes(plan, T)  # dx lies where the result was
    live, free, peak = pool()
    assert live == 10 * MB and live + free <= 9 * peak / 8 and least <= free <= 1.3 * least
    for _ in range(3):
        assert all(torch.equal(g, w) for g, w in zip(grads(*tensors), want, strict=True))
        assert sum(pool()[:2]) == live + free
    tensors[0].grad = tensors[3].grad = tensors[4].grad = None
    with torch.no_grad():
        fusedmoe.experts(*tensors[:3], list(tensors[3:]))
    assert pool()[:2] == (0, live + free)


def test_gradients_are_ordinary_tensors():
    tensors = x, ids, p, w1, w2 = layer()
    want = [g.clone() for g in grads(*tensors)]
    again = copy.deepcopy(w1), pickle.loads(pickle.dumps(w1.grad)), w1.grad.numpy(), torch.from_dlpack(w1.grad)
    assert torch.equal(again[0].grad, want[0]) and torch.equal(again[1], want[0])
    at = w1.grad.data_ptr()
    w1.grad = None
    assert (again[2] == want[0].numpy()).all() and torch.equal(again[3], want[0])
    assert _core.empty_like(w1).data_ptr() != at, "a view of the gradient holds its memory"
    del again
    fusedmoe.experts(x, ids, p, [w1, w2]).square().sum().backward()
    fusedmoe.experts(x, ids, p, [w1, w2]).square().sum().backward()  # accumulates, in place
    assert torch.equal(w1.grad, 2 * want[0])
    at = w1.grad.data_ptr()
    w1.grad.zero_()
    fusedmoe.experts(x, ids, p, [w1, w2]).square().sum().backward()
    assert w1.grad.data_ptr() == at and torch.equal(w1.grad, want[0])
    w1.grad.share_memory_()  # the storage moves, its block is free
    assert w1.grad.is_shared() and torch.equal(w1.grad, want[0])
    assert w1.grad.untyped_storage().nbytes() == 2 * MB
    torch.nn.utils.clip_grad_norm_([w1, w2], 1e-3)
    torch.optim.AdamW([w1, w2], foreach=False).step()
    torch.optim.AdamW([w1, w2], fused=True).step()
    assert w1.isfinite().all()


def test_a_result_as_out_and_resized():
    """Inside its storage like any tensor. Beyond it torch refuses, as with numpy's memory, and nothing is lost:
    the block is still one, with its values."""
    a, b = torch.randn(MB), torch.randn(MB)
    out = _core.empty_like(a)
    at = out.data_ptr()
    assert torch.add(a, b, out=out) is out and out.data_ptr() == at and torch.equal(out, a + b)
    torch.add(a[:10], b[:10], out=out.resize_(0))
    assert out.shape == (10,) and out.data_ptr() == at and torch.equal(out, a[:10] + b[:10])
    out.resize_(MB).copy_(a)
    whole = out.view(-1)  # torch leaves the new shape on what it could not resize
    grow = lambda t: t.resize_(MB + 1), lambda t: t.untyped_storage().resize_(0), lambda t: torch.add(torch.ones(MB + 2), 1, out=t)
    for beyond in grow:
        with pytest.raises(RuntimeError, match="not resizable"):
            beyond(out)
        assert whole.data_ptr() == at and whole.untyped_storage().nbytes() == 4 * MB and torch.equal(whole, a)
    assert pool()[:2] == (4 * MB, 0)
    del out, whole
    assert pool()[:2] == (0, 4 * MB)
    again = _core.empty_like(a)
    assert again.data_ptr() == at and again.shape == a.shape


def test_other_dtypes_and_frozen_weights():
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        x, ids, p, w1, w2 = layer(dtype)
        w2.requires_grad_(False)
        g, none = grads(x, ids, p, w1, w2)
        assert none is None and g.dtype == dtype and pool()[0] == g.nbytes
        del g, w1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    torch._dynamo.reset()
    tensors = layer()
    want = [g.clone() for g in grads(*tensors)]
    f = torch.compile(lambda x, ids, p, w1, w2: fusedmoe.experts(x, ids, p, [w1, w2]).square().sum(), fullgraph=True, backend=backend)
    for _ in range(3):
        tensors[3].grad = tensors[4].grad = None
        f(*tensors).backward()
        assert all(torch.equal(t.grad, g) for t, g in zip(tensors[3:], want, strict=True))
    assert 3 * MB <= sum(pool()[:2]) < 5 * MB  # gradients and a workspace


@pytest.mark.parametrize("what, flags", [("threads", ["-fsanitize=thread"]), ("forks", [])])
def test_threads_and_forks_without_the_interpreter(what, flags, tmp_path):
    """pool_threads.c: a tensor can be freed by a thread that does not hold the interpreter's lock."""
    cc, here = shutil.which("cc") or shutil.which("gcc"), Path(__file__).resolve().parent
    if not cc:
        pytest.skip("no C compiler")
    root, program = here.parents[1], tmp_path / what
    include = [f"-I{root / folder}" for folder in ("include", "python/core")]
    build = [cc, "-O1", "-g", "-pthread", *flags, *include, str(here / "pool_threads.c"), str(root / "python/core/pool.c")]
    subprocess.run([*build, "-o", str(program)], check=True)
    run = subprocess.run([str(program), *["forks"] * (what == "forks")], capture_output=True, text=True, timeout=100)
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("this compiler's thread sanitizer does not run on this kernel")
    assert run.returncode == 0, run.stdout + run.stderr[:4000]


def test_freed_in_another_thread():
    t = [_core.empty_like(torch.empty(MB))]
    thread = threading.Thread(target=t.clear)
    thread.start()
    thread.join()
    assert pool()[:2] == (0, 4 * MB)


def test_exit_with_live_tensors():
    code = """
import torch, threading, time, fusedmoe
from fusedmoe import _core
w = torch.nn.Parameter(torch.zeros(4, 512, 512))
w.grad = _core.empty_like(w).zero_()
held = [_core.empty_like(w) for _ in range(3)]
torch.held = held[0]
threading.Thread(target=lambda t: time.sleep(30), args=(held[1],), daemon=True).start()
"""
    run = subprocess.run([sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and "Fatal" not in run.stderr and "Error" not in run.stderr, run.stderr
