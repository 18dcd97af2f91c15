# SPDX-License-Identifier: Apache-2.0
"""Other implementations of the layer beside ours on one GPU: those that are installed, by their public functions, in one process.

Ids and routing weights are given, the same to all (float32 to who takes it, else rounded to the weights' dtype), and sorting by
expert is in everybody's time. A forward has no gradients; a step has those of x, the routing weights, W1 and W2 by
torch.autograd.grad. bench/h200.py calls this; a peer is one function here, which makes its Pass of a Layer.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK, COLD = 400.0, 130.0  # ms of a block, and of its beginning that does not count: by then the card is at its power limit
ROUNDS, REPLAYS = 3, 12
GRADIENTS = ("dx", "dp", "dW1", "dW2")


class Layer(NamedTuple):
    """What every implementation gets, as Hugging Face stores it: W1 [E,2I,H], gates first, W2 [E,H,I]."""

    x: Tensor
    ids: Tensor
    p: Tensor
    w1: Tensor
    w2: Tensor
    dout: Tensor


class Pass(NamedTuple):
    """An implementation on a layer. leaves: x, p, W1, W2 as it has them; plain: a gradient of its W1 in our order."""

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    plain: Callable[[Tensor], Tensor] = lambda t: t

    def alone(self) -> Tensor:
        with torch.no_grad():
            return self.forward()

    def step(self, dout: Tensor) -> tuple[Tensor, ...]:
        out = self.forward()
        return (out, *torch.autograd.grad(out, self.leaves, dout))


def draw(T: int, H: int, I: int, E: int, k: int, dtype: torch.dtype, device: str, seed: int = 0) -> Layer:
    """Normal tokens, weights normal of 0.02, top-k of a softmax of normal logits."""
    g = torch.Generator(device).manual_seed(seed)
    normal = lambda *shape, scale=1.0: torch.randn(*shape, generator=g, device=device, dtype=dtype).mul_(scale)  # noqa: E731
    p, ids = torch.randn(T, E, generator=g, device=device).softmax(-1).topk(k)
    p = p / p.sum(-1, keepdim=True)
    return Layer(normal(T, H), ids, p, normal(E, 2 * I, H, scale=0.02), normal(E, H, I, scale=0.02), normal(T, H))


def _leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.detach().clone().requires_grad_() for t in tensors)


# ---- the implementations: one function each -----------------------------------------------------------------


def fusedmoe(layer: Layer) -> Pass:
    """Ours."""
    from fusedmoe import experts

    leaves = x, p, w1, w2 = _leaves(layer.x, layer.p, layer.w1, layer.w2)
    return Pass(lambda: experts(x, layer.ids, p, [w1, w2]), leaves)


def sonicmoe(layer: Layer) -> Pass:
    """SonicMoE, with the routing given, as transformers calls it. Rows of gate and up in turns, which is its own order."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs

    (T, k), (E, rows, H) = layer.ids.shape, layer.w1.shape
    turns = layer.w1.view(E, 2, rows // 2, H).transpose(1, 2).reshape(E, rows, H)
    leaves = x, p, w1, w2 = _leaves(layer.x, layer.p, turns, layer.w2)
    token = torch.arange(T, dtype=torch.int32, device=x.device).repeat_interleave(k)
    ids = layer.ids.flatten().int()

    def forward() -> Tensor:
        stream, inference = torch.cuda.current_stream().cuda_stream, not torch.is_grad_enabled()
        w = w1.permute(1, 2, 0), None, w2.permute(1, 2, 0), None
        out: Tensor = moe_general_routing_inputs(x, p.view(-1), token, ids, *w, E, stream, ActivationType.SWIGLU, inference)[0]
        return out

    return Pass(forward, leaves, lambda d: d.view(E, rows // 2, 2, H).transpose(1, 2).reshape(E, rows, H))


def liger(layer: Layer) -> Pass:
    """Liger-Kernel's fused MoE of Triton."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    leaves = x, p, w1, w2 = _leaves(layer.x, layer.p.to(layer.x.dtype), layer.w1, layer.w2)
    ids = layer.ids.int()
    return Pass(lambda: LigerFusedMoEFunction.apply(x, w1, w2, ids, p), leaves)


def scattermoe(layer: Layer) -> Pass:
    """ScatterMoE: its two products, the activation by torch between them."""
    from scattermoe import flatten_sort_count, parallel_linear

    leaves = x, p, w1, w2 = _leaves(layer.x, layer.p.to(layer.x.dtype), layer.w1, layer.w2)
    E, k = len(w1), layer.ids.shape[1]

    def forward() -> Tensor:
        order = flatten_sort_count(layer.ids, num_experts=E)
        gate, up = parallel_linear(x, w1.transpose(1, 2), k, *order, grouped_out=True).chunk(2, dim=-1)
        a = torch.nn.functional.silu(gate) * up
        out: Tensor = parallel_linear(a, w2.transpose(1, 2), 1, *order, grouped_in=True, gates=p)
        return out

    return Pass(forward, leaves)


def llamafactory(layer: Layer) -> Pass:
    """LLaMA-Factory's Triton kernel."""
    from llamafactory.v1.plugins.model_plugins.kernels.ops.mlp.cuda_fused_moe import TritonFusedMoeFunction

    leaves = x, p, w1, w2 = _leaves(layer.x, layer.p.to(layer.x.dtype), layer.w1, layer.w2)
    return Pass(lambda: TritonFusedMoeFunction.apply(len(w1), p, layer.ids, x, w1, w2), leaves)


def grouped_mm(layer: Layer) -> Pass:
    """transformers' experts on torch's grouped product."""
    from fusedmoe import bench

    E, rows, H = layer.w1.shape
    module = bench.build("qwen3_moe", H, rows // 2, E, layer.x.dtype, "meta")
    module.config._experts_implementation = "grouped_mm"
    x, p, w1, w2 = _leaves(layer.x, layer.p.to(layer.x.dtype), layer.w1, layer.w2)
    module.gate_up_proj, module.down_proj = torch.nn.Parameter(w1), torch.nn.Parameter(w2)
    return Pass(lambda: module(x, layer.ids, p), (x, p, module.gate_up_proj, module.down_proj))


# What must be importable, whose version is told, and the function.
PEERS: dict[str, tuple[str, str, Callable[[Layer], Pass]]] = {
    "fusedmoe": ("fusedmoe", "fusedmoe", fusedmoe),
    "sonicmoe": ("sonicmoe.functional", "sonic-moe", sonicmoe),
    "liger": ("liger_kernel.ops.fused_moe", "liger-kernel", liger),
    "scattermoe": ("scattermoe", "scattermoe", scattermoe),
    "llamafactory": ("llamafactory.v1.plugins.model_plugins.kernels.ops.mlp.cuda_fused_moe", "llamafactory", llamafactory),
    "grouped_mm": ("transformers", "transformers", grouped_mm),
}


def installed(names: Iterable[str] = PEERS) -> tuple[dict[str, str], dict[str, str]]:
    """Versions of those that can be imported, and why the others cannot."""
    versions, missing = {}, {}
    for name in names:
        module, package, _ = PEERS[name]
        try:
            importlib.import_module(module)
        except Exception as problem:  # a package for another torch or driver may raise anything
            missing[name] = f"{type(problem).__name__}: {str(problem).splitlines()[0] if str(problem) else module}"
            continue
        try:
            versions[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown version"
    return versions, missing


# ---- time ---------------------------------------------------------------------------------------------------


def block(run: Callable[[], Any]) -> list[float]:
    """Milliseconds of the passes of one block, the cold ones left out. At most four passes are queued."""
    events = [torch.cuda.Event(enable_timing=True)]
    events[0].record()
    spent = 0.0
    while spent < BLOCK:
        run()
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        if len(events) > 4:
            events[-4].synchronize()
            spent = events[0].elapsed_time(events[-4])
    torch.cuda.synchronize()
    return warm([a.elapsed_time(b) for a, b in itertools.pairwise(events)])


def warm(times: list[float]) -> list[float]:
    """Those that begin after the cold part of a block, or the last one."""
    return [t for t, end in zip(times, itertools.accumulate(times), strict=True) if end - t >= COLD] or times[-1:]


def turns(runs: Mapping[Any, Callable[[], Any]], timed: Callable[[Callable[[], Any]], list[float]], rounds: int) -> dict[Any, float]:
    """The median of each, after rounds of one block each; every round begins with the next one."""
    names, times = list(runs), {name: [] for name in runs}  # type: dict[Any, list[float]]
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            times[name] += timed(runs[name])
    return {name: statistics.median(found) for name, found in times.items()}


def replays(run: Callable[[], Any]) -> list[float]:
    """Milliseconds of replays of a CUDA graph, each on its own, after one that is not counted."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    run()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


def graph(run: Callable[[], Any]) -> Callable[[], Any]:
    """The replay of a pass that was captured."""
    side, captured = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(captured):
        kept = run()
    return lambda: (captured.replay(), kept)


# ---- errors -------------------------------------------------------------------------------------------------


def exact(layer: Layer) -> tuple[Tensor, ...]:
    """out, dx, dp, dW1, dW2 in double."""
    x, p, dout = layer.x.double(), layer.p.double(), layer.dout.double()
    out, dx, dp = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(p)
    dw1, dw2 = (torch.empty_like(w, dtype=torch.float64) for w in (layer.w1, layer.w2))
    for e in range(len(layer.w1)):
        t, j = (layer.ids == e).nonzero(as_tuple=True)
        w1, w2, q = layer.w1[e].double(), layer.w2[e].double(), p[t, j, None]
        gate, up = (x[t] @ w1.t()).chunk(2, dim=-1)
        s = torch.sigmoid(gate)
        a = gate * s * up
        y, d = a @ w2.t(), q * dout[t]
        out.index_add_(0, t, q * y)
        dp[t, j] = (y * dout[t]).sum(-1)
        dw2[e] = d.t() @ a
        da = d @ w2
        dh = torch.cat((da * up * (s + gate * s * (1 - s)), da * gate * s), dim=-1)
        dw1[e] = dh.t() @ x[t]
        dx.index_add_(0, t, dh @ w1)
    return out, dx, dp, dw1, dw2


def errors(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> dict[str, float]:
    """Relative L2 of out and the gradients."""
    far = ((a.double().sub_(b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True))
    return dict(zip(("out", *GRADIENTS), far, strict=True))


# ---- one case -----------------------------------------------------------------------------------------------


def measure(
    title: str, sizes: tuple[int, int, int, int, int], names: Sequence[str], dtype: torch.dtype = torch.bfloat16, graphs: bool = True,
    exactly: bool = True,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of TF/s ("held", "cuda graph"), of errors and of the peak of a forward, of those of names that can do this case."""
    from fusedmoe import meters

    T, H, I, _, k = sizes
    layer = draw(*sizes, dtype, "cuda")
    wanted = exact(layer) if exactly else ()
    rows: list[dict[str, Any]] = []
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    for name in names:
        try:
            one = PEERS[name][2](layer)
            found = one.step(layer.dout)
            if exactly:
                far = errors((*found[:3], one.plain(found[3]), found[4]), wanted)
                rows += ({"case": title, "impl": name, "tensor": tensor, "relative_l2": v} for tensor, v in far.items())
            del found
            one.alone()
            rows.append({"case": title, "impl": name, "peak_mib": meters.peak_megabytes(one.alone, "cuda")})
        except Exception as problem:  # another's error is a line of the report, not the end of it
            rows.append({"case": title, "impl": name, "problem": f"{type(problem).__name__}: {str(problem).splitlines()[0]}"})
            continue
        runs[name, "fwd"] = one.alone
        runs[name, "fwd+bwd"] = lambda one=one: one.step(layer.dout)
    del wanted
    ours = dict(runs)
    runs |= {("dense", what): run for what, run in meters.dense_passes(T, H, I, k, dtype).items()}

    def rates(regime: str, ms: Mapping[tuple[str, str], float]) -> None:
        for (name, what), t in ms.items():
            tflops = (18 if what == "fwd+bwd" else 6) * T * k * H * I / t / 1e9
            rows.append({"case": title, "impl": name, "pass": what, "regime": regime, "ms": t, "tflops": tflops})

    for what in ("fwd", "fwd+bwd"):
        rates("held", turns({key: run for key, run in runs.items() if key[1] == what}, block, ROUNDS))
    if graphs:
        captured = {}
        for key, run in ours.items():
            try:
                captured[key] = graph(run)
            except Exception as problem:  # some ask the device for a number
                rows.append({"case": title, "impl": key[0], "problem": f"no CUDA graph of {key[1]}: {str(problem).splitlines()[0]}"})
        for what in ("fwd", "fwd+bwd"):
            rates("cuda graph", turns({key: run for key, run in captured.items() if key[1] == what}, replays, 2 * ROUNDS))
    return rows


# ---- tables -------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)] + [""]


def _cell(form: str, *found: float | None) -> str:
    return " / ".join("-" if v is None else form.format(v) for v in found)


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _rates(rows: Sequence[Mapping[str, Any]], regime: str) -> list[str]:
    """TF/s of one regime, and ours to each of the others."""
    rate = {(r["case"], r["impl"], r["pass"]): r["tflops"] for r in rows if r.get("regime") == regime}
    cases, impls = (list(dict.fromkeys(key[n] for key in rate)) for n in (0, 1))
    others = [i for i in impls if i not in ("fusedmoe", "dense")]
    body = []
    for case in cases:
        of = {i: [rate.get((case, i, what)) for what in ("fwd", "fwd+bwd")] for i in impls}
        over = {i: map(_ratio, of.get("fusedmoe", (None, None)), of[i]) for i in others}
        body.append([case, *(_cell("{:.0f}", *of[i]) for i in impls), *(_cell("{:.3f}", *over[i]) for i in others)])
    return _table(["shape, T", *impls, *(f"to {i}" for i in others)], body)


def report(rows: Sequence[Mapping[str, Any]], versions: Mapping[str, str], missing: Mapping[str, str]) -> list[str]:
    """The tables, in Markdown, and who was missing and why."""
    lines = ["Ran: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".", ""]
    lines += [f"Missing: {name} ({why})." for name, why in missing.items()]
    lines += [f"{r['case']}, {r['impl']}: {r['problem']}." for r in rows if "problem" in r]
    for regime, words in (("held", "Blocks of 0.4 s in turns, at the power limit"), ("cuda graph", "CUDA graphs in turns")):
        if any(r.get("regime") == regime for r in rows):
            lines += ["", f"{words}, TF/s, forward / forward + backward:", "", *_rates(rows, regime)]
    far = {(r["case"], r["impl"], r["tensor"]): r["relative_l2"] for r in rows if "tensor" in r}
    if far:
        body = ([*key, *(_cell("{:.2e}", far.get((*key, t))) for t in ("out", *GRADIENTS))] for key in dict.fromkeys(k[:2] for k in far))
        lines += ["", "Relative L2 error against double:", "", *_table(["shape, T", "", "out", *GRADIENTS], body)]
    peak = {(r["case"], r["impl"]): r["peak_mib"] for r in rows if "peak_mib" in r}
    if peak:
        cases, impls = (list(dict.fromkeys(key[n] for key in peak)) for n in (0, 1))
        body = ([case, *(_cell("{:.1f}", peak.get((case, i))) for i in impls)] for case in cases)
        lines += ["", "Peak of a forward without gradients, MiB:", "", *_table(["shape, T", *impls], body)]
    return lines
