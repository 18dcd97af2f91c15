# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: I001
"""python -m fusedmoe.bench --device npu on the simulated NPU, and what apply(model, keep=...) keeps there."""

import json
import os
import subprocess
import sys

import npu  # before torch
import pytest
import torch

import fusedmoe
import rivals
from models import tiny


@pytest.mark.skipif(rivals.original() is None, reason="llamafactory 0.9.5 is not installed")
def test_bench(tmp_path):
    """Every implementation, the layer and a training step, with the simulator's launches."""
    file = tmp_path / "rows.json"
    sizes = "--T 24 --H 64 --I 32 --E 8 --k 2 --layers 1 --rounds 1 --vocab 64".split()
    call = ["--device", "npu", "--rival", "llamafactory", *sizes, "--json", str(file)]
    code = f"import npu, sys; from fusedmoe.bench import main; sys.exit(main({call!r}))"
    here = os.path.dirname(os.path.abspath(__file__))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=here, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    rows = json.loads(file.read_text())
    assert {(r["op"], r["pass"]) for r in rows} == {("experts", "fwd"), ("experts", "fwd+bwd"), ("model", "step")}
    launches = {(r["peer"].split()[0], r["pass"]): r["launches"] for r in rows if r["op"] == "experts" and "lean" not in r["peer"]}
    assert launches["fusedmoe", "fwd"] == 6 and launches["llamafactory", "fwd"] == 9 and launches["eager", "fwd"] > 20
    assert launches["fusedmoe", "fwd+bwd"] < launches["llamafactory", "fwd+bwd"] < launches["eager", "fwd+bwd"]
    assert all(r["ms"] > 0 and r["tokens_s"] > 0 and r["peak_mb"] > 0 for r in rows)
    kept = {r["peer"]: r["kept_mb"] for r in rows if r.get("kept_mb") is not None}
    assert kept["fusedmoe, lean"] < 0.6 * kept["fusedmoe"]
    assert "ascend: " in done.stdout and "tokens_s" in done.stdout


def test_keep():
    """What a model keeps for its backward: an option of apply, and the same bits whichever it is."""
    ids = torch.randint(0, 60, (2, 10), generator=torch.Generator().manual_seed(3)).npu()
    found = {}
    for keep in (None, "all", "lean", "nothing"):
        model = fusedmoe.apply(tiny("qwen3_moe").npu(), keep=keep)
        npu.drain()
        npu.reset()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        npu.drain()
        grads = [p.grad.cpu() for p in model.parameters()]
        found[keep] = npu.get("aclnnGroupedMatmulV5"), loss.item(), grads
    assert [found[keep][0] for keep in (None, "all", "lean", "nothing")] == [12, 12, 14, 16]
    for keep in ("all", "lean", "nothing"):
        assert found[keep][1] == found[None][1]
        assert all(torch.equal(a, b) for a, b in zip(found[keep][2], found[None][2], strict=True))
    with pytest.raises(ValueError, match="keep is 'less', expected one of all, lean, nothing"):
        fusedmoe.apply(tiny("qwen3_moe").npu(), keep="less")


def test_adapters_beside_lists():
    """f32 factors beside bf16 matrices of their own: no cast of them in torch, and gradients in f32."""
    g = torch.Generator().manual_seed(0)
    E, H, I, r, T = 4, 32, 16, 4, 12
    w = [(torch.randn(*s, generator=g) * s[1] ** -0.5).bfloat16() for s in [(I, H)] * 2 * E + [(H, I)] * E]
    factors = [torch.randn(*s, generator=g) / 4 for s in ((E, r, H), (E, 2 * I, r), (E, r, I), (E, H, r))]
    x, p, dout = torch.randn(T, H, generator=g).bfloat16(), torch.rand(T, 2, generator=g), torch.randn(T, H, generator=g).bfloat16()
    ids = torch.randint(0, E, (T, 2), generator=g)
    results = []
    for device in ("cpu", "npu"):
        mine = [t.detach().to(device).requires_grad_() for t in (x, p, *factors)]
        given = [t.to(device) for t in w]
        if device == "npu":
            npu.drain()
            npu.reset()
        out = fusedmoe.experts(mine[0], ids.to(device), mine[1], given, flags=fusedmoe.Flag.LIST, lora=(mine[2:4], mine[4:6]))
        out.backward(dout.to(device))
        results.append([out, *(t.grad for t in mine)])
    npu.drain()
    assert npu.get("aicpu") == 0
    assert all(t.dtype == torch.float32 for t in results[1][3:])
    for a, b in zip(*results, strict=True):
        a, b = a.detach().double().cpu(), b.detach().double().cpu()
        assert float((a - b).norm() / a.norm()) < 1.2e-2


@pytest.mark.parametrize("mixed", ["0", "1"])
def test_rounded_gradients_are_said_once(mixed):
    """Where CANN is not known to take f32 routing weights beside 16-bit tokens, the log says so, once."""
    code = (
        "import npu, torch, fusedmoe, rivals\n"
        "for dtype in (torch.float32, torch.bfloat16, torch.float16):\n"
        "    layer = rivals.Layer(8, 16, 8, 4, 2, dtype); rivals.forward_ours(layer).backward(layer.dout)\n"
    )
    here = os.path.dirname(os.path.abspath(__file__))
    call, environment = [sys.executable, "-W", "ignore", "-c", code], {**os.environ, "FMOE_ASCEND_MIXED": mixed}
    done = subprocess.run(call, capture_output=True, text=True, cwd=here, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("their gradients are rounded to 16 bits") == (1 if mixed == "0" else 0)
