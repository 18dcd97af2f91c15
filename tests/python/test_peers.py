# SPDX-License-Identifier: Apache-2.0
"""bench/peers.py, what of it needs no GPU: who is missing is named, who is there computes the same, turns rotate, tables are right."""

import sys
from pathlib import Path

import pytest
import torch

from common import V5

if not V5:
    pytest.skip("one version is enough", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import peers  # noqa: E402


@pytest.mark.parametrize("name", ["fusedmoe", "grouped_mm"])
def test_adapters_compute_the_layer(name):
    from fusedmoe.integrations import transformers as hf

    hf.register()
    layer = peers.draw(7, 16, 8, 5, 3, torch.float32, "cpu")
    one = peers.PEERS[name][2](layer)
    wanted = peers.exact(layer)
    assert (one.alone() - wanted[0]).norm() < 1e-5 * wanted[0].norm()
    out, dx, dp, dw1, dw2 = one.step(layer.dout)
    assert max(peers.errors((out, dx, dp, one.plain(dw1), dw2), wanted).values()) < 1e-5


def test_exact_is_the_gradient():
    layer = peers.draw(4, 6, 5, 3, 2, torch.float64, "cpu")
    x, p, w1, w2 = leaves = [t.double().requires_grad_() for t in (layer.x, layer.p, layer.w1, layer.w2)]
    out = 0
    for j in range(2):
        e = layer.ids[:, j]
        gate, up = torch.einsum("th,tih->ti", x, w1[e]).chunk(2, -1)
        out = out + p[:, j, None] * torch.einsum("ti,thi->th", torch.nn.functional.silu(gate) * up, w2[e])
    found = (out, *torch.autograd.grad(out, leaves, layer.dout))
    for a, b in zip(found, peers.exact(layer), strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-10, atol=1e-12)


def test_missing_peers_are_named(monkeypatch, tmp_path):
    (tmp_path / "broken_peer.py").write_text("raise RuntimeError('made for\\nanother driver')")
    monkeypatch.syspath_prepend(tmp_path)
    fake = {"nobody": ("no_such_module_here", "x", None), "broken": ("broken_peer", "x", None), "torch": ("torch", "torch", None)}
    monkeypatch.setattr(peers, "PEERS", fake)
    versions, missing = peers.installed(fake)
    assert versions == {"torch": torch.__version__}
    assert missing == {"nobody": "ModuleNotFoundError: No module named 'no_such_module_here'", "broken": "RuntimeError: made for"}
    assert "Missing: broken (RuntimeError: made for)." in peers.report([], versions, missing)


def test_turns_rotate():
    order, clock = [], {"a": 1.0, "b": 2.0, "c": 4.0}

    def timed(run):
        order.append(run())
        return [clock[order[-1]] + len(order)]

    found = peers.turns({n: lambda n=n: n for n in clock}, timed, 3)
    assert "".join(order) == "abcbcacab"
    assert found == {"a": 7.0, "b": 6.0, "c": 9.0}


def test_a_block_of_a_clock(monkeypatch):
    now = {"queued": 0.0, "done": 0.0}

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now["queued"]

        def synchronize(self):
            now["done"] = max(now["done"], self.at)

        def elapsed_time(self, other):
            assert max(self.at, other.at) <= now["done"], "an event that has not happened"
            return other.at - self.at

    def run():
        now["queued"] += 7.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: now.update(done=now["queued"]))
    assert set(peers.block(run)) == {7.0}
    assert peers.BLOCK <= now["queued"] < peers.BLOCK + 5 * 7
    assert peers.replays(run) == [7.0] * peers.REPLAYS


def test_the_cold_part_of_a_block_does_not_count():
    assert peers.warm([100.0, 29.0, 1.0, 50.0, 60.0]) == [50.0, 60.0]  # begin at 0, 100, 129, 130, 180 ms
    assert peers.warm([90.0, 20.0]) == [20.0]


def test_tables_from_numbers():
    rate = lambda impl, what, regime, v: {"case": "A, 8", "impl": impl, "pass": what, "regime": regime, "ms": 1.0, "tflops": v}
    rows = [rate("fusedmoe", "fwd", "held", 550.4), rate("fusedmoe", "fwd+bwd", "held", 500.0), rate("other", "fwd", "held", 500.0)]
    rows += [rate("dense", "fwd", "held", 700.0), rate("dense", "fwd+bwd", "held", 650.0), rate("fusedmoe", "fwd", "cuda graph", 1.0)]
    rows += [{"case": "A, 8", "impl": "fusedmoe", "tensor": "dx", "relative_l2": 0.0034}]
    rows += [{"case": "A, 8", "impl": "fusedmoe", "peak_mib": 192.04}, {"case": "A, 8", "impl": "third", "problem": "ValueError: no"}]
    text = peers.report(rows, {"fusedmoe": "1", "other": "2"}, {"gone": "ImportError: x"})
    assert text[0] == "Ran: fusedmoe 1, other 2."
    assert "Missing: gone (ImportError: x)." in text and "A, 8, third: ValueError: no." in text
    assert "| A, 8 | 550 / 500 | 500 / - | 700 / 650 | 1.101 / - |" in text
    assert "| A, 8 | 1 / - |" in text
    assert "| A, 8 | fusedmoe | - | 3.40e-03 | - | - | - |" in text
    assert "| A, 8 | 192.0 |" in text
