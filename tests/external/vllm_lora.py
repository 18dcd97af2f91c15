# SPDX-License-Identifier: Apache-2.0
"""An adapter on experts, trained by PEFT, converted by fusedmoe.lora, loaded by vLLM: does it hold the dW that was trained?

    python tests/external/vllm_lora.py make FOLDER      with fusedmoe, transformers and peft
    python tests/external/vllm_lora.py serve FOLDER     with vllm (its CPU build will do)

`make` writes a tiny Qwen3-MoE, an adapter in PEFT's layout, the same one converted, and PEFT's own dW of every expert. `serve` starts vLLM,
has it load both, and reads dW from the buffers that its kernels use: of the converted adapter it must be PEFT's. What becomes of
the unconverted one is printed. (vLLM's CPU build cannot run adapters on experts: those kernels are Triton's. So no logits.)
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

RANK = 4


def make(folder: Path, layout: str) -> None:
    """The model, both adapters, and what PEFT computes with them."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=256,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2 if "gate.weight" in name else 0.08)
    model.save_pretrained(folder / "base")
    target = [f"layers.{i}.mlp.experts.{leaf}" for i in range(2) for leaf in ("gate_up_proj", "down_proj")]
    peft = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=8, target_modules=[], target_parameters=target)).eval()
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    peft.save_pretrained(folder / "trained")
    delta = {}
    for name, module in peft.named_modules():
        if getattr(module, "parameter_name", None) in ("gate_up_proj", "down_proj"):
            layer = next(part for part in name.split(".") if part.isdigit())
            delta[f"{layer}.{module.parameter_name}"] = module.get_delta_weight("default").detach().contiguous()
    save_file(delta, folder / "delta.safetensors")
    command = [sys.executable, "-m", "fusedmoe.lora", "convert", str(folder / "trained"), str(folder / "served"),
               "--to", layout, "--base", str(folder / "base")]  # fmt: skip
    subprocess.run(command, check=True)
    print(f"{folder}: base, trained, served ({layout}), delta.safetensors")


def buffers(worker) -> dict:
    """dW of every expert, as the factors in vLLM's first slot give it. Runs in vLLM's worker."""
    import torch

    found = {}
    for name, module in worker.model_runner.model.named_modules():
        if hasattr(module, "w13_lora_a_stacked"):
            layer = next(part for part in name.split(".") if part.isdigit())
            pairs = list(zip(module.w13_lora_a_stacked, module.w13_lora_b_stacked, strict=True))
            found[f"{layer}.gate_up_proj"] = torch.cat([b[0].float() @ a[0].float() for a, b in pairs], 1)
            found[f"{layer}.down_proj"] = module.w2_lora_b_stacked[0][0].float() @ module.w2_lora_a_stacked[0][0].float()
    return {n: t.tolist() for n, t in found.items()}


def serve(folder: Path) -> int:
    """0: vLLM holds PEFT's dW."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_ALLOW_INSECURE_SERIALIZATION="1", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import torch
    import vllm
    from safetensors.torch import load_file
    from vllm.lora.request import LoRARequest

    want = load_file(folder / "delta.safetensors")
    llm = vllm.LLM(
        str(folder / "base"), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=2,
        enable_lora=True, max_lora_rank=8, max_loras=1, disable_log_stats=True,
    )  # fmt: skip
    worst = {}
    for number, name in enumerate(("served", "trained"), 1):
        try:
            llm.llm_engine.add_lora(LoRARequest(name, number, str(folder / name)))
            got = {n: torch.tensor(v) for n, v in llm.collective_rpc(buffers)[0].items()}
            worst[name] = max(float((got[n] - t).norm() / t.norm()) for n, t in want.items())
        except Exception as problem:  # what vLLM says of an adapter that it does not take
            print(f"vllm {vllm.__version__}, {name}: refused: {str(problem).splitlines()[0][:200]}")
        else:
            print(f"vllm {vllm.__version__}, {name}: dW of {len(want)} stacks, relative difference at most {worst[name]:.1e}")
    return 0 if worst.get("served", 1) < 1e-6 else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("make", "serve"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layout", default="per-expert")
    args = parser.parse_args()
    if args.step == "serve":
        return serve(args.folder)
    make(args.folder, args.layout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
