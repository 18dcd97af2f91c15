# SPDX-License-Identifier: Apache-2.0
"""Quantised experts on a GPU beside the same layer in bfloat16.

    python bench/quant.py [--T 4096,16384] [--formats nf4,fp8,mxfp4] [--H 2048 --I 768 --E 128 --k 8 --rank 16] [--f32 1] [--blocks 7]
    python bench/quant.py --forward [--T 1,4,16]            inference: no adapters, nothing saved
    python bench/quant.py --whole nf4 --T 4096 [--layers 48] [--rank 16] [--f32 1] [--limit 24] [--new 8] [--chunk 256]

One layer of experts, frozen, forward and backward with adapters: ms of a step and what it takes in memory on top of what lay there.
Formats come in turns, a block of steps each; the median of the blocks. Codes are random: what they stand for takes no part in the time.

--whole: Qwen3-30B-A3B with random weights made on the card, experts quantised (or bf16), adapters by PEFT on experts and attention,
AdamW, checkpointing; then it generates --new tokens. --limit: the process may take so many GiB. --chunk: the loss so many tokens at a
time, as examples/finetune_4bit.py has it. A line of JSON.
"""

import argparse
import json
import statistics
import time

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from fusedmoe.autograd import experts
from fusedmoe.quant.formats import FORMATS
from fusedmoe.quant.tensor import QuantTensor


def coded(name: str, E: int, N: int, K: int) -> torch.Tensor:
    """A stack of random codes, or of random weights."""
    if name == "bf16":
        return (torch.randn(E, N, K) * K**-0.5).bfloat16()
    f = FORMATS[name]
    codes = torch.randint(0, 256, (E, N, f.bytes_of(K)), dtype=torch.uint8)
    if f.name == "fp8":
        codes &= 0xB7  # no NaN
    grid = (E, *f.grid(N, K))
    scale = torch.full(grid, 121, dtype=torch.uint8) if f.scale_type else torch.full(grid, K**-0.5 / (4 if f.bits == 4 else 64))
    scale2 = torch.tensor([f.scale2]) if f.scale2 else None
    return QuantTensor(codes, scale, f, torch.Size((E, N, K)), torch.bfloat16, scale2)


def block(run, w: list, steps: int) -> float:
    """ms of one of `steps` that no one waits between."""
    at = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    at[0].record()
    for _ in range(steps):
        run(w)
    at[1].record()
    torch.cuda.synchronize()
    return at[0].elapsed_time(at[1]) / steps


def whole(o: argparse.Namespace) -> None:
    import peft
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import fusedmoe

    if o.limit:
        torch.cuda.set_per_process_memory_fraction(o.limit * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=o.layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, dtype=torch.bfloat16)  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).bfloat16()
    torch.set_default_device("cuda")
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            if p.dim() == 3 and o.whole != "bf16":
                made = coded(o.whole, *p.shape)
            else:
                made = torch.ones(p.shape, dtype=torch.bfloat16)
                made = made if p.dim() == 1 else made.normal_(0, 0.02)
            module._parameters[name] = torch.nn.Parameter(made, requires_grad=False)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).cuda()
    fusedmoe.apply(model)
    attention, experts = ["q_proj", "k_proj", "v_proj", "o_proj"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = peft.LoraConfig(r=o.rank, lora_alpha=2 * o.rank, target_modules=attention, target_parameters=experts)
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=bool(o.f32))
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained if not o.f32 else ():
        p.data = p.data.bfloat16()
    weights = torch.cuda.memory_allocated() / 2**30
    model.enable_input_require_grads()
    model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids, times, losses = torch.randint(config.vocab_size, (1, int(o.T or 4096))), [], []

    def chunked() -> torch.Tensor:
        base = model.get_base_model()
        hidden, labels = base.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        part = lambda x, y: cross_entropy(base.lm_head(x).float(), y, reduction="sum")  # noqa: E731
        pieces = zip(hidden.split(o.chunk), labels.split(o.chunk), strict=True)
        return sum(checkpoint(part, x, y, use_reentrant=False) for x, y in pieces) / len(labels)

    for _ in range(o.blocks):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = chunked() if o.chunk else model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        losses.append(round(float(loss.detach()), 4))
    peak, reserved = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30
    model.eval().gradient_checkpointing_disable()
    with torch.no_grad():
        model.generate(input_ids=ids[:, :16], max_new_tokens=2, min_new_tokens=2, do_sample=False)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        told = model.generate(input_ids=ids[:, :16], max_new_tokens=o.new, min_new_tokens=o.new, do_sample=False)
        torch.cuda.synchronize()
    print(json.dumps({"experts": o.whole, "T": ids.shape[1], "rank": o.rank, "f32 adapters": bool(o.f32), "limit GiB": o.limit,
                      "reserved GiB": round(reserved, 2),
                      "ms": round(1e3 * statistics.median(times[2:]), 1), "GiB": round(peak, 2), "weights GiB": round(weights, 2),
                      "losses": losses[:3] + losses[-1:], "ms a new token": round(1e3 * (time.perf_counter() - begin) / o.new, 1),
                      "tokens": told[0, 16:24].tolist(), "peft": peft.__version__}), flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {
        "H": 2048,
        "I": 768,
        "E": 128,
        "k": 8,
        "rank": 16,
        "blocks": 7,
        "steps": 6,
        "f32": 1,
        "layers": 48,
        "limit": 0,
        "new": 8,
        "chunk": 0,
    }
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--T", default="")
    parser.add_argument("--formats", default="nf4,mxfp4,int4,fp8,int8")
    parser.add_argument("--forward", action="store_true")
    parser.add_argument("--whole", metavar="FORMAT")
    o = parser.parse_args()
    if o.whole:
        return whole(o)
    E, H, I, k, r = o.E, o.H, o.I, o.k, o.rank
    torch.manual_seed(0)
    torch.set_default_device("cuda")
    names = ["bf16", *o.formats.split(",")]
    weights = {name: [coded(name, E, 2 * I, H), coded(name, E, H, I)] for name in names}
    kind = torch.float32 if o.f32 else torch.bfloat16
    shapes = ((E, r, H), (E, 2 * I, r), (E, r, I), (E, H, r))
    factors = [(torch.randn(s) * s[-1] ** -0.5).to(kind).requires_grad_() for s in shapes]
    for T in [int(t) for t in (o.T or ("1,4,16,64,256,1024,4096" if o.forward else "4096,16384")).split(",")]:
        x, dout = (torch.randn(T, H).bfloat16() for _ in range(2))
        p, ids = torch.randn(T, E).softmax(-1).topk(k)

        def step(w, x=x, p=p, ids=ids, dout=dout):
            x, p = x.detach().requires_grad_(), p.detach().requires_grad_()
            out = experts(x, ids, p, w, lora=(factors[:2], factors[2:]))
            torch.autograd.grad(out, [x, p, *factors], dout)

        def forward(w, x=x, p=p, ids=ids):
            with torch.no_grad():
                experts(x, ids, p, w)

        run, times, peak = forward if o.forward else step, {name: [] for name in names}, {}
        for name in names:
            run(weights[name])
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            run(weights[name])
            torch.cuda.synchronize()
            peak[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
        steps = o.steps * (4 if T < 4096 else 1)
        for _ in range(o.blocks):
            for name in names:
                times[name].append(block(run, weights[name], steps))
        base = statistics.median(times["bf16"])
        for name in names:
            ms = statistics.median(times[name])
            more = peak[name] - peak["bf16"]
            print(f"T={T:6} {name:6} {ms * 1000:9.1f} us  {ms / base:6.3f} of bf16  {peak[name]:8.1f} MiB, {more:+.1f}", flush=True)


if __name__ == "__main__":
    main()
