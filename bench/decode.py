# SPDX-License-Identifier: Apache-2.0
"""Few tokens through the experts of several models, on CUDA: microseconds a layer in a CUDA graph, routing given, and in brackets
the ratio to reading the weights that are touched at --bandwidth.

    python bench/decode.py [--models gpt-oss-20b,Mixtral] [--T 1,2,4,8,16,32,64] [--bandwidth 4.28e12] [--same-bits]
    python bench/decode.py --formats bf16,nf4,mxfp4,fp8 [--route] quantised experts; --route: routing is in the graph too
"""

from __future__ import annotations

import argparse
import statistics

import torch
from quant import coded

from fusedmoe import experts, ops, route

OSS = ops.TRANSPOSED | ops.INTERLEAVED | ops.BIAS
MODELS = {  # H, I, E, k, activation, how the weights are stored, rank of adapters if there are any
    "Qwen3-30B-A3B": (2048, 768, 128, 8, ops.SWIGLU, 0),
    "Qwen3-30B-A3B in lists": (2048, 768, 128, 8, ops.SWIGLU, ops.LIST),
    "Qwen3-30B-A3B with LoRA 16": (2048, 768, 128, 8, ops.SWIGLU, 0, 16),
    "Qwen3-30B-A3B in lists with LoRA 16": (2048, 768, 128, 8, ops.SWIGLU, ops.LIST, 16),
    "Nemotron 3 Nano": (2688, 1856, 128, 6, ops.RELU2, 0),
    "Nemotron 3 Nano in lists": (2688, 1856, 128, 6, ops.RELU2, ops.LIST),
    "DeepSeek-V2-Lite": (2048, 1408, 64, 6, ops.SWIGLU, 0),
    "GLM-4.5-Air": (4096, 1408, 128, 8, ops.SWIGLU, 0),
    "Mixtral": (4096, 14336, 8, 2, ops.SWIGLU, 0),
    "Qwen3-VL-30B-A3B in transformers v4": (2048, 768, 128, 8, ops.SWIGLU, ops.TRANSPOSED),
    "gpt-oss-20b": (2880, 2880, 32, 4, ops.SWIGLU_OAI, OSS),
    "gpt-oss-120b": (2880, 2880, 128, 4, ops.SWIGLU_OAI, OSS),
    "Llama 4 Scout": (5120, 8192, 16, 1, ops.SWIGLU, ops.TRANSPOSED),
}
CALLS = 8  # in a graph, each with other tokens and ids: no weights stay in the cache


def normal(*size: int) -> torch.Tensor:
    """Small numbers."""
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16) * 0.02


def weights(H: int, I: int, E: int, act: int, flags: int) -> list[torch.Tensor]:
    """The experts' weights as experts() takes them."""
    C = 2 * I if act < ops.SILU else I
    if flags & ops.LIST:  # memory is taken expert by expert, as a model's is
        parts = [[normal(I, H) for _ in range(C // I)] + [normal(H, I)] for _ in range(E)]
        return [t for part in zip(*parts) for t in part]
    w = [normal(E, H, C), normal(E, I, H)] if flags & ops.TRANSPOSED else [normal(E, C, H), normal(E, H, I)]
    return w + ([normal(E, C), normal(E, H)] if flags & ops.BIAS else [])


@torch.no_grad()
def clock(T: int, H: int, I: int, E: int, k: int, act: int, flags: int, w: list, lora: list, routed: bool = False) -> tuple[float, float]:
    """Microseconds of a call, and bytes of the weights it reads, on the average."""
    x, p = [normal(T, H) for _ in range(CALLS)], [torch.rand(T, k, device="cuda") for _ in range(CALLS)]
    logits = [torch.rand(T, E, device="cuda").bfloat16() for _ in range(CALLS)]
    ids = [route(t, k)[0] for t in logits]
    draw = lambda i: route(logits[i], k, renormalize=True) if routed else (ids[i], p[i])  # noqa: E731
    run = lambda: [experts(x[i], *draw(i), w, act, flags, 1.702, 7.0, lora) for i in range(CALLS)]  # noqa: E731
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (2 * CALLS))
    expert = (6 if act < ops.SILU else 4) * H * I + sum(2 * t[0].numel() for pair in lora for t in pair)
    return statistics.median(times), sum(len(i.unique()) for i in ids) / CALLS * expert


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--T", default="1,2,4,8,16,32,64")
    parser.add_argument("--bandwidth", type=float, default=4.28e12, help="bytes a second; the default is an H200's copy bandwidth")
    parser.add_argument("--same-bits", action="store_true", help="the kernels whose bits do not depend on the batch")
    parser.add_argument("--formats", default="", help="of experts [out,in], beside one another; bf16 is one of them")
    parser.add_argument("--route", action="store_true")
    o = parser.parse_args()
    tokens = [int(t) for t in o.T.split(",")]
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    print("| T |", " | ".join(map(str, tokens)), "|\n|---|" + "---|" * len(tokens))
    for name in o.models.split(","):
        H, I, E, k, act, flags, rank = (*MODELS[name], 0)[:7]
        flags |= ops.SAME_BITS if o.same_bits else 0
        torch.set_default_device("cuda")
        for format in o.formats.split(",") if o.formats else ():
            w = [coded(format, E, 2 * I, H), coded(format, E, H, I)]
            size = 1 if format == "bf16" else sum(t.codes.nbytes + t.scale.nbytes for t in w) / (6 * E * H * I)  # of those of bf16
            cells = [(us, size * n) for us, n in (clock(T, H, I, E, k, act, 0, w, [], o.route) for T in tokens)]
            print(f"| {name} {format} |", " | ".join(f"{us:.1f} ({us * 1e-6 * o.bandwidth / n:.2f})" for us, n in cells), "|", flush=True)
            del w
        if o.formats:
            continue
        w, C = weights(H, I, E, act, flags), 2 * I if act < ops.SILU else I
        lora = [(normal(E, rank, H), normal(E, C, rank)), (normal(E, rank, I), normal(E, H, rank))] if rank else []
        cells = [clock(T, H, I, E, k, act, flags, w, lora) for T in tokens]
        print(f"| {name} |", " | ".join(f"{us:.1f} ({us * 1e-6 * o.bandwidth / size:.2f})" for us, size in cells), "|", flush=True)
        del w, lora
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
