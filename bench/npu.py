# SPDX-License-Identifier: Apache-2.0
"""python -m fusedmoe.bench --device npu: the layer and a training step on an Ascend NPU, beside LLaMA-Factory's own kernel and
transformers' eager loop.

Implementations take turns inside every round; the median counts. Times end with a synchronisation of the device. Launches are counted where
CANN counts them, which is the simulator of tests/ascend_sim; on a chip that column is empty, and msprof shows them.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import importlib
import json
import statistics
import time
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from . import _core
from .integrations import transformers as hf
from .kernels import apply_kernel

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
FIELDS = ("op", "pass", "peer", "dtype", "T", "ms", "tokens_s", "peak_mb", "kept_mb", "launches", "syncs")


def rival() -> tuple[str, Callable] | None:
    """LLaMA-Factory's own forward of transformers 5 experts, under the name of its version; None: not installed."""
    try:
        theirs = importlib.import_module("llamafactory.v1.plugins.model_plugins.kernels.ops.mlp.npu_fused_moe")
        version = importlib.import_module("importlib.metadata").version("llamafactory")
    except ImportError:
        return None
    of_main = getattr(theirs, "NpuMoeFusedV5", None)
    forward = of_main.experts_forward if of_main else getattr(theirs.NpuMoeFused, "npu_moe_experts_v5_forward", None)
    return forward and (f"llamafactory {version}", forward)


class Counters:
    """The simulator's counters; on a chip there are none."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL(None)
            self.library.fmoe_sim_get.restype = ctypes.c_int64
        except AttributeError:
            self.library = None

    def of(self, run: Callable[[], Any]) -> tuple[int | None, int | None]:
        """Launches and synchronisations of a run."""
        if self.library is None:
            return None, None
        torch.npu.current_stream().npu_stream  # noqa: B018  (everything queued is submitted)
        self.library.fmoe_sim_reset()
        run()
        torch.npu.current_stream().npu_stream  # noqa: B018
        return self.library.fmoe_sim_get(b"launches"), self.library.fmoe_sim_get(b"syncs")


def _turns(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, taken in turns after one round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, run in runs.items():
            torch.npu.synchronize()
            begin = time.perf_counter()
            run()
            torch.npu.synchronize()
            if i:
                times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(t) for name, t in times.items()}


def _memory(run: Callable[[], Any]) -> float:
    """Megabytes that a run needs beyond what is there before it."""
    torch.npu.synchronize()
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    run()
    torch.npu.synchronize()
    return (torch.npu.max_memory_allocated() - before) / 1e6


def _patch(model: torch.nn.Module, peer: str, forward: Callable | None) -> torch.nn.Module:
    """The model with this implementation under its experts."""
    if peer == "eager":
        for module in model.modules():
            if hasattr(module, "config") and hasattr(module.config, "_experts_implementation"):
                module.config._experts_implementation = "eager"
    elif forward is not None:
        for module in model.modules():
            if hf.layers.is_v5_experts(module):
                module.forward = types.MethodType(forward, module)
    else:
        apply_kernel("npu_fused_moe", model=model, keep="lean" if "lean" in peer else "all")
    return model


def peers_of(args: argparse.Namespace) -> dict[str, Callable | None]:
    """Names, and the forward to put under the experts where it is neither ours nor transformers'."""
    found: dict[str, Callable | None] = {"fusedmoe": None, "fusedmoe, lean": None}
    if args.rival == "llamafactory":
        theirs = rival()
        if theirs is None:
            raise SystemExit("--rival llamafactory: it is not installed, or has no kernel for transformers 5 (0.9.5 and later have one)")
        found[theirs[0]] = theirs[1]
    return found if args.no_eager else {**found, "eager": None}


def _model(args: argparse.Namespace, dtype: torch.dtype, layers: int) -> torch.nn.Module:
    import transformers

    heads = max(1, args.H // 128)
    config = transformers.Qwen3MoeConfig(
        vocab_size=args.vocab, hidden_size=args.H, intermediate_size=args.H, moe_intermediate_size=args.I, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=args.H // heads, num_experts=args.E, num_experts_per_tok=args.k,
        norm_topk_prob=True, decoder_sparse_step=1, architectures=["Qwen3MoeForCausalLM"])  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config).to(dtype).npu()


def _row(args: argparse.Namespace, op: str, pass_: str, peer: str, dtype: str, ms: float, **more: Any) -> dict[str, Any]:
    row = dict(op=op, peer=peer, backend="ascend", dtype=dtype, T=args.T, H=args.H, I=args.I, E=args.E, k=args.k, ms=round(ms, 4),
               tokens_s=round(1e3 * args.T / ms) if ms else None)  # fmt: skip
    return {**row, "pass": pass_, **more}


def layer_rows(args: argparse.Namespace, dtype: str, count: Counters) -> list[dict[str, Any]]:
    """The experts layer alone: ids and routing weights given."""
    block = _model(args, DTYPES[dtype], 1).model.layers[0].mlp.experts
    g = torch.Generator().manual_seed(1)
    x, dout = (torch.randn(args.T, args.H, generator=g).to(DTYPES[dtype]).npu() for _ in range(2))
    ids = torch.rand(args.T, args.E, generator=g).topk(args.k, -1).indices.npu()
    p = torch.rand(args.T, args.k, generator=g).to(DTYPES[dtype]).npu().requires_grad_()
    x.requires_grad_()
    with torch.no_grad():
        for w in block.parameters():
            w.copy_((torch.randn(w.shape, generator=g) * w.shape[-1] ** -0.5).to(w.dtype))
    peers = peers_of(args)
    modules = {peer: _patch(copy.deepcopy(block), peer, forward) for peer, forward in peers.items()}
    outs: dict[str, torch.Tensor] = {}

    def forward(peer: str) -> torch.Tensor:
        outs[peer] = modules[peer](x, ids, p)
        return outs[peer]

    def step(peer: str) -> None:
        forward(peer).reshape(x.shape).backward(dout)
        for t in (x, p, *modules[peer].parameters()):
            t.grad = None

    rows = []
    for pass_, what in (("fwd", forward), ("fwd+bwd", step)):
        times = _turns({peer: partial(what, peer) for peer in peers}, args.rounds)
        for peer in peers:
            outs.clear()
            more: dict[str, Any] = dict(zip(("launches", "syncs"), count.of(partial(what, peer)), strict=True))
            outs.clear()
            more["peak_mb"] = round(_memory(partial(what, peer)), 2)
            if pass_ == "fwd":  # what is alive after it, less the result
                outs.clear()
                torch.npu.synchronize()
                before = torch.npu.memory_allocated()
                out = forward(peer)
                torch.npu.synchronize()
                more["kept_mb"] = round((torch.npu.memory_allocated() - before - out.numel() * out.element_size()) / 1e6, 2)
                del out
            rows.append(_row(args, "experts", pass_, peer, dtype, times[peer], **more))
    outs.clear()
    want = forward("eager" if "eager" in peers else "fusedmoe").detach().float()
    for peer in peers:
        error = ((forward(peer).detach().reshape(want.shape).float() - want).norm() / want.norm()).item()
        if not error < 3e-2:
            raise SystemExit(f"{peer} computes something else: a relative difference of {error:.2g}")
    return rows


def training_rows(args: argparse.Namespace, dtype: str, count: Counters) -> list[dict[str, Any]]:
    """A step of a Qwen3-MoE model of --layers layers: forward, backward, AdamW."""
    tokens = torch.randint(0, args.vocab, (1, args.T), generator=torch.Generator().manual_seed(2)).npu()
    peers = peers_of(args)
    models = {peer: _patch(_model(args, DTYPES[dtype], args.layers), peer, forward) for peer, forward in peers.items()}

    optimizers = {peer: torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False) for peer, model in models.items()}

    def step(peer: str) -> None:
        models[peer](input_ids=tokens, labels=tokens).loss.backward()
        optimizers[peer].step()
        optimizers[peer].zero_grad()

    times, rows = _turns({peer: partial(step, peer) for peer in peers}, args.rounds), []
    for peer in peers:
        launches, syncs = count.of(partial(step, peer))
        rows.append(_row(args, "model", "step", peer, dtype, times[peer], peak_mb=round(_memory(partial(step, peer)), 2), launches=launches,
                         syncs=syncs, layers=args.layers))  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [FIELDS, *([("-" if row.get(f) is None else str(row[f])) for f in FIELDS] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(FIELDS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m fusedmoe.bench --device npu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--device", default="npu", choices=["npu"])
    parser.add_argument("--rival", choices=["llamafactory"], help="LLaMA-Factory's own kernel, of the installed version, beside ours")
    parser.add_argument("--no-eager", action="store_true", help="without transformers' own loop, which takes long")
    for name, default, meaning in (
        ("T", 4096, "tokens"), ("H", 2048, "hidden size"), ("I", 768, "intermediate size"), ("E", 128, "experts"),
        ("k", 8, "experts a token"), ("layers", 2, "layers of the model; 0: no training step"), ("vocab", 1024, "words of the model"),
        ("rounds", 5, "rounds")):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{meaning} (default {default})")
    parser.add_argument("--dtype", default="bf16", metavar="TYPE,...", help="f32, bf16, f16 (default bf16)")
    parser.add_argument("--json", metavar="FILE", help="the rows as a list of objects, into this file")
    args = parser.parse_args(argv)
    unknown = [d for d in args.dtype.split(",") if d not in DTYPES]
    if unknown:
        parser.error(f"--dtype {unknown[0]}: expected f32, bf16 or f16")
    if not (hasattr(torch, "npu") and torch.npu.is_available()):
        parser.error("--device npu: torch sees no NPU (import torch_npu, and CANN's set_env.sh)")
    print(next(line for line in _core.info().splitlines() if line.startswith("ascend:")))
    count, rows = Counters(), []
    for dtype in args.dtype.split(","):
        rows += layer_rows(args, dtype, count)
        if args.layers:
            rows += training_rows(args, dtype, count)
    print(table(rows))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)
    return 0
