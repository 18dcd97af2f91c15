# SPDX-License-Identifier: Apache-2.0
"""Memory of loading a checkpoint with one tensor an expert into transformers v5's stacked experts, on the CPU, one process or two.

    python bench/loading.py [--layers 8] [--csv loading.csv]

Each way runs in processes of its own. `peak` is the largest anonymous memory of a process (of two: of each) beyond what it had before it
loaded, and `held` what it has when all is done, both as multiples of the checkpoint. Pages of the file itself are the page cache's.
ZeRO-3 is measured where DeepSpeed is installed (`pip install deepspeed`; here on its CPU accelerator, over gloo).
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from importlib.util import find_spec
from pathlib import Path

SIZES = dict(vocab_size=1024, hidden_size=512, moe_intermediate_size=384, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
             num_experts=64, num_experts_per_tok=8)  # fmt: skip


def anonymous() -> int:
    """Bytes."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) << 10


class Peak(threading.Thread):
    """The largest anonymous memory while it runs, looked at every two milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.most = anonymous()
        self.done = False

    def run(self) -> None:
        while not self.done:
            self.most = max(self.most, anonymous())
            time.sleep(0.002)


def _shard(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def plain(folder, **how):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16", experts_implementation="eager", **how)


def ours(folder):
    import fusedmoe

    return fusedmoe.apply(plain(folder))


def quantised(folder):
    """Experts become NF4 as they are loaded."""
    import fusedmoe

    return plain(folder, quantization_config=fusedmoe.QuantConfig("nf4"))


def every_process(folder):
    """Each process loads all of it, then FSDP2 cuts it up."""
    return _shard(ours(folder))


def first_process(folder):
    """The first process loads, the others have shapes alone; FSDP2 cuts empty models up, and the weights are sent layer by layer."""
    import torch
    import transformers
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    import fusedmoe

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = plain(folder).state_dict() if torch.distributed.get_rank() == 0 else {}
    _shard(fusedmoe.apply(model)).to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    set_model_state_dict(model, state, options=options)
    return model


def transformers_plan(folder):
    """transformers cuts up while it loads: each process reads what is its own."""
    from transformers.distributed import DistributedConfig

    import fusedmoe

    return fusedmoe.apply(plain(folder, distributed_config=DistributedConfig(fsdp_size=2)))


def expert_parallel(folder):
    """Whole experts, half of them in each process; the rest cut up."""
    import transformers
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(fsdp_size=2, ep_size=2, ep_implementation="fusedmoe")
    how = dict(dtype="bfloat16", experts_implementation="fusedmoe", distributed_config=config)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **how)
    assert "_fmoe_ep" in vars(model.model.layers[0].mlp.experts)
    return model


def _zero3(load, folder):
    """transformers sees the configuration and cuts up while it loads: the first process reads, one stacked tensor after the other."""
    from transformers.integrations import HfDeepSpeedConfig

    config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
    kept = HfDeepSpeedConfig(config)  # transformers has a weak reference to it
    model = load(folder)
    assert kept.is_zero3() and model.model.layers[0].mlp.experts.down_proj.ds_tensor is not None
    return model


def zero3_plain(folder):
    return _zero3(plain, folder)


def zero3_ours(folder):
    return _zero3(ours, folder)


WAYS = {
    "from_pretrained, eager": (1, plain),
    "from_pretrained, fusedmoe": (1, ours),
    'from_pretrained, QuantConfig("nf4")': (1, quantised),
    "2 processes, each loads, FSDP2": (2, every_process),
    "2 processes, the first loads, FSDP2": (2, first_process),
    "2 processes, DistributedConfig(fsdp_size=2)": (2, transformers_plan),
    "2 processes, DistributedConfig(fsdp_size=2, ep_size=2)": (2, expert_parallel),
    "2 processes, ZeRO-3, eager": (2, zero3_plain),
    "2 processes, ZeRO-3, fusedmoe": (2, zero3_ours),
}


def child(folder: str, way: str, out: str) -> None:
    import torch
    import transformers

    import fusedmoe

    processes, load = WAYS[way]
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    import torch.distributed.fsdp

    small = transformers.Qwen3MoeConfig(**{**SIZES, "hidden_size": 8, "moe_intermediate_size": 8, "vocab_size": 8}, num_hidden_layers=1)
    small = fusedmoe.apply(transformers.Qwen3MoeForCausalLM(small))  # what is imported late is no memory of loading
    with tempfile.TemporaryDirectory() as other:
        small.save_pretrained(other)
        (load if processes == 1 else plain)(other)
    if "ZeRO-3" in way:
        import deepspeed

        deepspeed.init_distributed("gloo")
    elif processes > 1:
        torch.distributed.init_process_group("gloo")
    peak = Peak()
    peak.start()
    model = load(folder)
    gc.collect()
    if processes > 1:
        torch.distributed.barrier()
    peak.done = True
    peak.join()
    rank = int(os.environ.get("RANK", "0"))
    Path(out, f"{rank}.json").write_text(json.dumps([peak.most - peak.before, anonymous() - peak.before]))
    del model
    if processes > 1:
        torch.distributed.destroy_process_group()


def measure(folder: str, way: str) -> list[list[int]]:
    processes = WAYS[way][0]
    with tempfile.TemporaryDirectory() as out, socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        s.close()
        env = dict(os.environ, WORLD_SIZE=str(processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), MALLOC_TRIM_THRESHOLD_="0",
                   DS_ACCELERATOR="cpu")  # fmt: skip
        command = [sys.executable, __file__, "--child", folder, way, out]
        running = [subprocess.Popen(command, env=dict(env, RANK=str(rank), LOCAL_RANK=str(rank))) for rank in range(processes)]
        if any(p.wait(timeout=300) for p in running):
            raise RuntimeError(f"{way}: a process failed")
        return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(processes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--csv")
    parser.add_argument("--only", default="", help="ways whose names have this in them")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(*args.child)
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        config = transformers.Qwen3MoeConfig(**SIZES, num_hidden_layers=args.layers, intermediate_size=512)
        torch.set_default_dtype(torch.bfloat16)
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
        size = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
        from safetensors import safe_open

        with safe_open(next(Path(folder).glob("*.safetensors")), "pt") as file:
            names = list(file.keys())
        assert any(".experts.0.gate_proj." in name for name in names), "one tensor an expert"
        rows = []
        for way in [w for w in WAYS if args.only in w]:
            if "ZeRO-3" in way and find_spec("deepspeed") is None:
                print(f"{way:54}  not measured: DeepSpeed is not installed")
                continue
            found = measure(folder, way)
            peaks, held = ("/".join(f"{one[i] / size:.2f}" for one in found) for i in (0, 1))
            rows.append(dict(way=way, checkpoint_mib=size >> 20, peak=peaks, held=held))
            print(f"{way:54}  peak {peaks:>10}  held {held:>10}  of {size >> 20} MiB")
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
