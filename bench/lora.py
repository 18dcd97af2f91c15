# SPDX-License-Identifier: Apache-2.0
"""LoRA on the experts of a Qwen3-MoE: a training step with PEFT's own computation and with fusedmoe, side by side.

    python bench/lora.py --table [1,4]      the table of docs/benchmarks.md, or some rows of it (all: some ten minutes on two cores)
    python bench/lora.py [--layers 2] [--H 1024] [--I 512] [--E 32] [--k 4] [--T 512] [--rank 16] [--dtype float32]
        [--checkpoint 0] [--device cpu]
    python bench/lora.py --layer --device cuda --H 2048 --I 768 --E 128 --k 8 --T 4096 --dtype bfloat16 [--steps 20]
    python bench/lora.py --whole --device cuda --T 4096 [--layers 48] [--steps 9]

Each way runs in a process of its own, on the same random model, adapters and batch. What is counted:

    ms/step       forward, backward and AdamW of the whole model, the median of the steps after the first
    of experts    that, less the same of "no experts": the model with experts that hand back their input
    process       the highest resident memory from the first step on, as the system counts it, less what the imports had taken
                  (--device cuda: the most that torch's allocator has handed out): frozen weights, adapters, the optimizer's
                  state, activations, and what a way makes besides
    steps         the same less what was resident before the first step: without the weights and the adapters
    floor         "no experts", and the adapters with their gradients and AdamW's two moments: what a way takes in the process
                  that makes nothing of its own

Ratios are to fusedmoe's. Losses must fall alike. --checkpoint 1: with gradient checkpointing.

--layer: experts alone on a GPU, forward and backward, adapters in the layer's dtype and in float32; "W + BA" makes that by torch and
multiplies by torch's grouped product, as PEFT does. The peak is what a step takes on top of what lay there before it.

--whole: Qwen3-30B-A3B in bfloat16, adapters on experts and attention, checkpointing. Beside the step, what the host spends in our
functions, a layer: the forward of PEFT's wrapper and of the experts; the backward; and what the backward's first look at a saved tensor
takes, which is where checkpointing computes the whole decoder layer again.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

WAYS = {"eager": "PEFT, eager", "grouped_mm": "PEFT, grouped_mm", "fusedmoe": "fusedmoe", "none": "no experts"}
SMALL, LARGE = dict(layers=4), dict(H=2048, I=768, E=128, k=8)  # LARGE: layers of Qwen3-30B-A3B
BF16 = dict(dtype="bfloat16")
LAYER = ["without", "fusedmoe", "fusedmoe, f32", "W + BA", "W + BA, f32"]  # ways of --layer
TABLE = [
    ("4 layers, H=1024 I=512 E=32 k=4, f32", dict(SMALL)),
    ("same, T = 2048", dict(SMALL, T=2048)),
    ("same, checkpointing", dict(SMALL, T=2048, checkpoint=1)),
    ("same layers, bf16, T = 512", dict(SMALL, **BF16)),
    ("same, T = 2048", dict(SMALL, **BF16, T=2048)),
    ("1 layer of Qwen3-30B-A3B, f32, T = 512", dict(LARGE, layers=1)),
    ("2 such layers, bf16, T = 512", dict(LARGE, layers=2, **BF16)),
    ("same, T = 2048", dict(LARGE, layers=2, **BF16, T=2048)),
    ("12 small layers, f32, T = 512", dict(layers=12)),
    ("same, bf16", dict(layers=12, **BF16)),
]


def resident(key: str = "VmRSS") -> float:
    """MiB; VmHWM: the highest so far."""
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(key))


def run(way: str, o: argparse.Namespace) -> None:
    """One way: a line of JSON."""
    import peft
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.integrations.moe import ExpertsInterface

    import fusedmoe

    device = torch.device(o.device)
    cuda = device.type == "cuda"  # memory is torch's then, not the process's
    imports = 0 if cuda else resident()
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    torch.set_default_device(device)
    torch.set_default_dtype(getattr(torch, o.dtype))
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=o.H, intermediate_size=o.I, moe_intermediate_size=o.I, num_hidden_layers=o.layers,
        num_attention_heads=8, num_key_value_heads=2, head_dim=o.H // 8, num_experts=o.E, num_experts_per_tok=o.k,
        norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=o.T)  # fmt: skip
    model = Qwen3MoeForCausalLM(config).requires_grad_(False)
    experts = [module for module in model.modules() if hasattr(module, "_apply_gate")]
    if way == "none":  # a parameter, so that gradients flow as far as they do with adapters
        ExpertsInterface.register(way, lambda self, x, ids, p: x + self.nothing)
        for module in experts:
            module.nothing = torch.nn.Parameter(torch.zeros(o.H))
    else:
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=o.rank, lora_alpha=2 * o.rank, target_parameters=names, target_modules=[]))
    for module in experts:
        module.config._experts_implementation = way
    if way == "fusedmoe":
        fusedmoe.apply(model)
    if o.checkpoint:
        model.enable_input_require_grads()
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    ids = torch.randint(512, (1, o.T), generator=torch.Generator(device).manual_seed(1))
    before, times, losses = torch.cuda.memory_allocated() / 2**20 if cuda else resident(), [], []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    for _ in range(o.steps):
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        losses.append(float(loss.detach()))
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else resident("VmHWM")
    print(json.dumps({"ms": 1e3 * statistics.median(times[1:]), "process": peak - imports, "steps": peak - before, "losses": losses,
                      "weights": sum(p.nbytes for p in model.parameters() if not p.requires_grad) / 2**20,
                      "adapters": sum(p.nbytes for p in trained) / 2**20, "peft": peft.__version__}))  # fmt: skip


def measure(ways: list[str], **options) -> dict[str, dict]:
    """What each way gave, by its title."""
    rows = {}
    for way in ways:
        arguments = [f"--{name}={value}" for name, value in options.items()]
        done = subprocess.run([sys.executable, __file__, "--way", way, *arguments], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            sys.exit(f"{WAYS[way]}: ended with {done.returncode}")
        rows[WAYS[way]] = json.loads(done.stdout.splitlines()[-1])
    rest = rows.get(WAYS["none"], {"ms": 0})["ms"]
    for title, row in rows.items():
        row["of experts"] = row["ms"] - rest if rest and title != WAYS["none"] else 0
    return rows


def apart(rows: dict[str, dict]) -> float:
    """The largest distance of a loss from fusedmoe's."""
    losses = [row["losses"] for title, row in rows.items() if title != WAYS["none"]]
    return max(abs(a - b) for other in losses for a, b in zip(other, rows["fusedmoe"]["losses"], strict=True))


def cells(rows: dict[str, dict]) -> dict[str, list[str]]:
    """Each way's numbers, with their ratios to fusedmoe's."""
    ours, found = rows["fusedmoe"], {}
    for title, row in rows.items():
        found[title] = []
        for key in ("ms", "of experts", "process", "steps"):
            ratio = f"{row[key] / ours[key]:.3g}x" if title.startswith("PEFT") and ours[key] > 0 else ""
            found[title] += [f"{row[key]:.0f}" if row[key] else "", ratio]
    return found


def layer(o: argparse.Namespace) -> None:
    """One layer of experts, W frozen: a line a way."""
    import torch
    from torch.nn import functional as F

    from fusedmoe.autograd import experts

    dtype, T, H, I, E, k, r = getattr(torch, o.dtype), o.T, o.H, o.I, o.E, o.k, o.rank
    torch.manual_seed(0)
    torch.set_default_device(o.device)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return (torch.randn(shape) * shape[-1] ** -0.5).to(dtype)

    w1, w2, x, dout = draw(E, 2 * I, H), draw(E, H, I), draw(T, H).requires_grad_(), draw(T, H)
    p, ids = torch.randn(T, E).softmax(-1).topk(k)
    p.requires_grad_()

    def merged(a1, b1, a2, b2):
        order = ids.flatten().argsort()
        tokens, ends = order // k, torch.bincount(ids.flatten(), minlength=E).cumsum(0).int()
        up, down = (w + torch.bmm(b, a).to(dtype) for w, b, a in ((w1, b1, a1), (w2, b2, a2)))
        gate, h = torch._grouped_mm(x[tokens], up.transpose(1, 2), offs=ends).chunk(2, -1)
        y = torch._grouped_mm(F.silu(gate) * h, down.transpose(1, 2), offs=ends)
        return torch.zeros_like(x).index_add_(0, tokens, y * p.flatten()[order, None].to(dtype))

    for title in LAYER:
        shapes, kind = ((E, r, H), (E, 2 * I, r), (E, r, I), (E, H, r)), torch.float32 if "f32" in title else dtype
        f = [draw(*shape, dtype=kind).requires_grad_() for shape in shapes if title != "without"]
        before, at = torch.cuda.memory_allocated(), [torch.cuda.Event(enable_timing=True) for _ in range(o.steps + 4)]
        for step, event in enumerate(at):  # no one waits between the steps; the first three are not counted
            event.record()
            if step == 3:
                torch.cuda.reset_peak_memory_stats()
            out = merged(*f) if title[0] == "W" else experts(x, ids, p, [w1, w2], lora=(f[:2], f[2:]) if f else ())
            torch.autograd.grad(out, [x, p, *f], dout)
            del out
        torch.cuda.synchronize()
        ms = statistics.median(a.elapsed_time(b) for a, b in zip(at[3:], at[4:]))
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        print(f"H={H} I={I} E={E} k={k} T={T} rank={r} {title:14} {ms:8.3f} ms {peak:8.0f} MiB", flush=True)


def whole(o: argparse.Namespace) -> None:
    """The whole model on a GPU, fusedmoe alone: a line of JSON."""
    import peft
    import torch
    from peft.tuners.lora import layer as peft_layer
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from fusedmoe import autograd

    host: dict[str, list[float]] = {}

    def timed(name, function):
        def inner(*args, **kwargs):
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            host.setdefault(name, []).append(time.perf_counter() - begin)
            return result

        return inner

    class Context:
        """ctx, the first look at its saved tensors timed."""

        def __init__(self, ctx):
            self.ctx, self.looked = ctx, 0.0

        def __getattr__(self, name):
            begin = time.perf_counter()
            found = getattr(self.ctx, name)
            if name == "saved_tensors":
                self.looked = time.perf_counter() - begin
            return found

    def backward(ctx, dout, own=autograd._Experts.backward):
        begin, ctx = time.perf_counter(), Context(ctx)
        grads = own(ctx, dout)
        host.setdefault("recomputing", []).append(ctx.looked)
        host.setdefault("backward", []).append(time.perf_counter() - begin - ctx.looked)
        return grads

    torch.manual_seed(0)
    torch.set_default_device(o.device)
    torch.set_default_dtype(torch.bfloat16)
    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=o.layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True)  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    attention, experts = ["q_proj", "k_proj", "v_proj", "o_proj"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = peft.LoraConfig(r=o.rank, lora_alpha=2 * o.rank, target_modules=attention, target_parameters=experts)
    model = peft.get_peft_model(model, lora)
    model.base_model.model.set_experts_implementation("fusedmoe")
    model.enable_input_require_grads()
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    ids, times = torch.randint(config.vocab_size, (1, o.T)), []
    autograd._Experts.backward = staticmethod(backward)
    peft_layer.ParamWrapper.forward = timed("forward of the wrapper", peft_layer.ParamWrapper.forward)
    autograd.experts = timed("forward of the experts", autograd.experts)
    for _ in range(o.steps):
        torch.cuda.synchronize()
        host.clear()
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    ms = {name: round(1e3 * statistics.median(took), 3) for name, took in host.items()}
    print(json.dumps({"ms": round(1e3 * statistics.median(times[2:]), 1), "loss": float(loss.detach()), "host ms a layer": ms,
                      "GiB": round(torch.cuda.max_memory_allocated() / 2**30, 1), "peft": peft.__version__}))  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = dict(layers=2, H=1024, I=512, E=32, k=4, T=512, rank=16, steps=3, threads=2, checkpoint=0)
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ways", default="grouped_mm,fusedmoe,none", help=f"which of {', '.join(WAYS)}, with a comma between")
    parser.add_argument("--table", nargs="?", const="", metavar="ROWS")
    parser.add_argument("--layer", action="store_true")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.layer or o.whole:
        (layer if o.layer else whole)(o)
        return 0
    if o.way:
        run(o.way, o)
        return 0
    ways, bad = o.ways.split(","), 0
    if o.table is None:
        shapes = [(" ".join(f"{name}={getattr(o, name)}" for name in (*defaults, "dtype", "device")), {})]
    else:
        shapes = [TABLE[int(i) - 1] for i in o.table.split(",")] if o.table else TABLE
        print("| model | way | ms a step | | of experts | | process, MiB | | steps, MiB | | losses apart |\n|" + 11 * "---|")
    for title, shape in shapes:
        rows = measure(ways, **{**{name: getattr(o, name) for name in (*defaults, "dtype", "device")}, **shape})
        far = apart(rows)
        bad += far > (1e-3 if {"dtype": o.dtype, **shape}["dtype"] == "float32" else 5e-2) * max(1, o.steps / 3)
        if o.table is None:
            ours = rows["fusedmoe"]
            print(f"{title}\nPEFT {ours['peft']}, weights {ours['weights']:.0f} MiB, adapters {ours['adapters']:.0f} MiB")
            print(f"{'':18}" + "".join(f"{name:>12} {'':6}" for name in ("ms/step", "of experts", "process", "steps")) + "last loss")
            for way, texts in cells(rows).items():
                numbers = "".join(f"{a:>12} {b:6}" for a, b in zip(texts[::2], texts[1::2], strict=True))
                print(f"{way:18}{numbers}{rows[way]['losses'][-1]:.5f}")
            if WAYS["none"] in rows:
                floor = rows[WAYS["none"]]["process"] + 4 * ours["adapters"]
                times = (f"{way} {row['process'] / floor:.2f}" for way, row in rows.items() if way != WAYS["none"])
                print(f"floor {floor:.0f} MiB: " + ", ".join(times))
            print(f"losses apart by at most {far:.1e}")
        else:
            for i, (way, texts) in enumerate(cells(rows).items()):
                print("| " + " | ".join(["" if i else title, way, *texts, "" if i else f"{far:.0e}"]) + " |", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
