# SPDX-License-Identifier: Apache-2.0
"""Folders with an adapter, and what the base model's configuration says about its experts."""

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_INTERLEAVED = {"gpt_oss"}
_W_NAMES = {"mixtral", "minimax", "minimax_m2", "phimoe", "lfm2_moe", "kimi_linear"}  # as their checkpoints have them


@dataclass
class Facts:
    """What tensors alone do not say; None: not known."""

    experts: int | None = None
    hidden: int | None = None
    interleaved: bool | None = None  # gate and up: column by column, or one after the other
    w_names: bool = False  # w1, w3, w2 in the place of gate_proj, up_proj, down_proj

    @staticmethod
    def of(base: str | Path) -> "Facts":
        """From a configuration file, or a folder that has one."""
        path = Path(base)
        config = _json(path / "config.json" if path.is_dir() else path)
        text = config.get("text_config") or config
        names = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
        experts, hidden = next((text[n] for n in names if isinstance(text.get(n), int)), None), text.get("hidden_size")
        kind = text.get("model_type", config.get("model_type", ""))
        return Facts(experts, hidden if isinstance(hidden, int) else None, kind in _INTERLEAVED, kind in _W_NAMES)


@dataclass
class Adapter:
    """Tensors and configuration of a saved adapter."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]

    @property
    def rank(self) -> int:
        r = self.config.get("r")
        if not isinstance(r, int) or r < 1:
            raise ValueError(f"adapter_config.json: r is {r!r}, expected a positive integer")
        return r

    @property
    def scale(self) -> float:
        alpha = self.config.get("lora_alpha", self.rank)
        if not isinstance(alpha, (int, float)):
            raise ValueError(f"adapter_config.json: lora_alpha is {alpha!r}, expected a number")
        return alpha / (self.rank**0.5 if self.config.get("use_rslora") else self.rank)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except ValueError as problem:
        raise ValueError(f"{path}: no JSON ({problem})") from problem
    if not isinstance(found, dict):
        raise ValueError(f"{path}: {found!r:.60}, expected a dictionary")
    return found


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as problem:
        raise ValueError(f"{path}: no safetensors file ({problem})") from problem


def _shards(index: Path) -> dict[str, Tensor]:
    """The tensors of all files that an index names."""
    where, found = _json(index).get("weight_map"), dict[str, Tensor]()
    if not isinstance(where, dict):
        raise ValueError(f"{index}: weight_map is {where!r:.60}, expected the file of each tensor")
    for name in sorted({*where.values()}):
        found |= _safetensors(index.parent / Path(name).name)
    missing = sorted(where.keys() - found.keys())
    if missing:
        raise ValueError(f"{index}: {missing[0]} is not in {where[missing[0]]}")
    return found


def load(folder: str | Path) -> Adapter:
    """adapter_config.json with adapter_model.safetensors (or its shards and their index), or adapter_model.bin."""
    folder = Path(folder)
    if not (folder / "adapter_config.json").is_file():
        raise FileNotFoundError(f"{folder}: no adapter_config.json")
    config = _json(folder / "adapter_config.json")
    for name in ("use_dora", "lora_bias", "alora_invocation_tokens"):
        if config.get(name):
            raise NotImplementedError(f"{folder}: {name} is set: this is not plain LoRA")
    for name in ("rank_pattern", "alpha_pattern"):
        if config.get(name):
            raise NotImplementedError(f"{folder}: {name} is {config[name]}: one rank and one alpha for the whole adapter are known")
    targets = config.get("target_modules")
    if not isinstance(targets, (str, list, type(None))):
        raise ValueError(f"{folder}: target_modules is {targets!r:.60}, expected names or a pattern")
    if (folder / "adapter_model.safetensors").is_file():
        return Adapter(_safetensors(folder / "adapter_model.safetensors"), config)
    if (folder / "adapter_model.safetensors.index.json").is_file():
        return Adapter(_shards(folder / "adapter_model.safetensors.index.json"), config)
    if (folder / "adapter_model.bin").is_file():
        try:
            tensors = torch.load(folder / "adapter_model.bin", map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError) as problem:
            raise ValueError(f"{folder}/adapter_model.bin: no tensors ({problem!s:.120})") from problem
        return Adapter(tensors, config)
    raise FileNotFoundError(f"{folder}: neither adapter_model.safetensors nor adapter_model.bin")


def save(adapter: Adapter, folder: str | Path) -> None:
    """Into a folder that has no adapter yet."""
    from safetensors.torch import save_file

    folder = Path(folder)
    if (folder / "adapter_config.json").exists() or (folder / "adapter_model.safetensors").exists():
        raise FileExistsError(f"{folder}: has an adapter already")
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous().clone() for n, t in adapter.tensors.items()}, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(adapter.config, indent=2, sort_keys=True) + "\n")
