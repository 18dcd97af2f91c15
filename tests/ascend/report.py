# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402, I001
"""Count LLaMA-Factory's npu_fused_moe and fusedmoe side by side on the simulated NPU, through the real torch_npu.

    FMOE_SIM=... python tests/ascend/report.py [docs/ascend.md]

Prints the tables; with a file, replaces what stands there between the two report marks. Layers are not computed, their
operators are only counted, so the sizes are those of the real model. FMOE_V4: a folder with transformers 4 and
LLaMA-Factory 0.9.4, for the block with lists of experts; theirs reads counts back, so that one is computed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import npu  # before torch
import torch
import torch_npu

import fusedmoe
import rivals
from fusedmoe import ops

BEGIN, END = "<!-- report: written by make ascend-report -->", "<!-- end of report -->"


def fresh(keep: str) -> None:
    os.environ["FMOE_ASCEND_KEEP"] = keep
    ops._plan.cache_clear()
    ops._saved_line.cache_clear()


def measure(forward, backward, leaves) -> dict:
    """One forward and one backward, after one of each: launches, bytes, syncs, and what is kept between them."""
    for last in (False, True):
        for t in leaves:
            t.grad = None
        npu.drain()
        before = torch.npu.memory_allocated()
        with npu.Count() as f:
            out = forward()
        kept = torch.npu.memory_allocated() - before - out.numel() * out.element_size()
        with npu.Count() as b:
            backward(out)
        del out
        if not last:
            torch.npu.synchronize()
    return {
        "fwd": f.launches,
        "bwd": b.launches,
        "syncs": f.syncs + b.syncs,
        "copies": f.copies + b.copies,
        "bytes": f.bytes + b.bytes,
        "kept": kept,
        "trace": (f.trace, b.trace),
    }


def row(name: str, r: dict, base: dict) -> str:
    share, memory = (100 * r[what] / base[what] for what in ("bytes", "kept"))
    return (
        f"| {name} | {r['fwd']} | {r['bwd']} | {r['syncs']} | {r['copies']} | {r['bytes'] / 1e6:.0f} MB ({share:.0f} %) "
        f"| {r['kept'] / 1e6:.1f} MB ({memory:.0f} %) |"
    )


def layer_table(T: int, H: int, I: int, E: int, k: int) -> list[str]:
    layer = rivals.Layer(T, H, I, E, k, torch.bfloat16, fill=False)
    rows = {}

    def run(forward):
        return measure(lambda: forward(layer), lambda out: out.backward(layer.dout), layer.leaves())

    if rivals.original() is not None:
        rows["LLaMA-Factory 0.9.5"] = run(rivals.forward_original)
    for keep, name in (("all", "fusedmoe"), ("lean", "fusedmoe, lean")):
        fresh(keep)
        rows[name] = run(rivals.forward_ours)
    fresh("all")
    base = rows.get("LLaMA-Factory 0.9.5")
    lines = [
        f"Experts layer, E={E} k={k} H={H} I={I}, bf16, T={T}, int64 ids:",
        "",
        "| | launches forward | backward | syncs | host copies | bytes moved, fwd + bwd | kept for backward |",
        "|---|---|---|---|---|---|---|",
    ]
    return lines + [row(name, r, base or r) for name, r in rows.items()]


def operators_table(T: int, H: int, I: int, E: int, k: int) -> list[str]:
    """The launches of both, by name."""
    layer = rivals.Layer(T, H, I, E, k, torch.bfloat16, fill=False)
    lines = ["| | forward | backward |", "|---|---|---|"]
    runs = [("fusedmoe", rivals.forward_ours)]
    if rivals.original() is not None:
        runs.insert(0, ("LLaMA-Factory 0.9.5", rivals.forward_original))
    for name, forward in runs:
        r = measure(lambda forward=forward: forward(layer), lambda out: out.backward(layer.dout), layer.leaves())
        cells = [", ".join(line.split()[0] for line in side) for side in r["trace"]]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return lines


def block_table(T: int, H: int, I: int, E: int, k: int) -> list[str]:
    """The Qwen3 block of transformers 4, a router and a list of E experts. Runs where transformers 4 is installed."""
    import transformers
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    from fusedmoe.kernels.ops.mlp.npu_fused_moe import Qwen3NpuMoeFused

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=k, norm_topk_prob=True
    )
    block = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16).npu()
    x = torch.randn(1, T, H).to(torch.bfloat16).npu().requires_grad_()
    dout = torch.ones(1, T, H).to(torch.bfloat16).npu()
    lines = [
        f"Whole block of transformers {transformers.__version__} (router and a list of {E} experts), k={k} H={H} I={I}, "
        f"bf16, T={T}:",
        "",
        "| | launches forward | backward | syncs | host copies | bytes moved, fwd + bwd | kept for backward |",
        "|---|---|---|---|---|---|---|",
    ]
    base = None
    theirs = rivals.original().Qwen3NpuMoeFused
    for name, kernel in ((f"LLaMA-Factory {version('llamafactory')}", theirs), ("fusedmoe", Qwen3NpuMoeFused)):
        r = measure(
            lambda kernel=kernel: kernel.qwen3moe_sparse_moe_block_forward(block, x)[0],
            lambda out: out.backward(dout),
            [x, *block.parameters()],
        )
        base = base or r
        lines.append(row(name, r, base))
    return lines


def main() -> None:
    torch.npu.set_device(0)
    if sys.argv[1:] == ["block"]:  # in the environment with transformers 4
        lines = block_table(64, 256, 96, 128, 8)
    else:
        npu.put("count_only", 1)
        lines = [
            f"torch {torch.__version__}, torch_npu {torch_npu.__version__}, fusedmoe {fusedmoe.__version__}, "
            "simulated CANN 9.1.0 on Ascend910B2.",
            "",
        ]
        for T, H, I in ((512, 2048, 768), (4096, 2048, 768), (64, 256, 96), (512, 256, 96)):
            lines += layer_table(T, H, I, 128, 8) + [""]
        lines += operators_table(512, 2048, 768, 128, 8) + [""]
        npu.put("count_only", 0)
        env = {**os.environ, "PYTHONPATH": os.environ["FMOE_V4"]}
        block = subprocess.run([sys.executable, __file__, "block"], env=env, stdout=subprocess.PIPE, text=True, check=True)
        text = block.stdout
        lines += text[text.index("Whole block") :].strip().splitlines()  # importing torch_npu prints warnings before it
    torch.npu.synchronize()
    if npu.violation():
        raise SystemExit(f"violation of CANN's rules: {npu.violation()}")
    text = "\n".join(lines)
    print(text)
    if len(sys.argv) > 1 and sys.argv[1] != "block":
        with open(sys.argv[1]) as f:
            page = f.read()
        between = re.escape(BEGIN) + ".*?" + re.escape(END)
        page, n = re.subn(between, lambda _: f"{BEGIN}\n{text}\n{END}", page, flags=re.S)
        if n != 1:
            raise SystemExit(f"{sys.argv[1]} has no place for the report")
        with open(sys.argv[1], "w") as f:
            f.write(page)


if __name__ == "__main__":
    main()
