# SPDX-License-Identifier: Apache-2.0
"""A tiny model of every architecture of the installed transformers that has experts, made from its configuration class."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import torch
import transformers
from torch import nn

from common import V5

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, head_dim=8, max_position_embeddings=64, num_experts=8, num_local_experts=8, n_routed_experts=8,
    moe_num_experts=8, num_experts_per_tok=2, num_experts_per_token=2, moe_topk=2, moe_k=2, top_k_experts=2, moe_top_k=2,
    norm_topk_prob=True, decoder_sparse_step=1, first_k_dense_replace=0, num_dense_layers=0, n_group=2, topk_group=1, num_expert_group=2,
    n_shared_experts=1, num_shared_experts=1, moe_num_shared_experts=1, kv_lora_rank=16, q_lora_rank=32, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=8, shared_expert_intermediate_size=24, moe_shared_expert_intermediate_size=16, index_n_heads=2,
    index_head_dim=16, index_topk=8, enable_moe_block=True, vocab_size_per_layer_input=16, hidden_size_per_layer_input=8,
    linear_conv_kernel_dim=2, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, mamba_expand=2, n_groups=1,
    attn_layer_offset=1, attn_layer_period=2, expert_layer_offset=0, expert_layer_period=1, moe_layer_start_index=0, moe_layer_interval=1,
    moe_layer_freq=1, moe_hidden_size=32, ffn_hidden_size=48, expert_ffn_hidden_size=16, zero_expert_num=3, num_layers=2, kv_channels=8,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, shared_intermediate_size=16, moe_latent_size=None, swiglu_limit=7.0, o_lora_rank=16,
    o_groups=2, mlp_layer_types=["sparse", "sparse"],
)  # fmt: skip
HYBRID = ["linear_attention", "full_attention"]
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
LINEAR = dict(layer_types=HYBRID, linear_head_dim=8, linear_num_heads=4)
INDEXER = dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=2)
TYPES: dict[str, dict] = dict(
    bailing_hybrid=dict(layer_types=HYBRID),
    dbrx=dict(d_model=32, n_heads=4, n_layers=2, attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8),
              ffn_config=dict(ffn_hidden_size=16, **(dict(hidden_size=32) if V5 else {}), moe_num_experts=8, moe_top_k=2)),
    deepseek_v4=dict(mlp_layer_types=["hash_moe", "moe"]),
    ernie4_5_vl_moe=dict(moe_intermediate_size=[16, 16], rope_parameters=MROPE),
    flint=dict(mlp_only_layers=[]),
    gemma4=dict(vocab_size_per_layer_input=64),
    glm4v_moe=dict(rope_parameters={**MROPE, "mrope_section": [1, 1, 0]}),
    glm5_next=dict(**LINEAR, index_kpool=2, qk_rope_head_dim=0),
    granitemoehybrid=dict(layer_types=["mamba", "attention"]),
    jamba=dict(use_mamba_kernels=False),
    kimi_linear=LINEAR,
    lfm2_moe=dict(layer_types=["full_attention", "conv"]),
    mimo_v2_flash=dict(num_key_value_heads=2, rope_parameters={f"{n}_attention": {**MROPE, "partial_rotary_factor": 0.5}
                                                               for n in ("full", "sliding")}),
    qwen3_5_moe=dict(layer_types=HYBRID),
    qwen3_next=dict(layer_types=HYBRID),
    qwen4_exp=dict(layer_types=HYBRID, **INDEXER),
    step3p7=dict(sliding_window=8),
    zaya=dict(num_experts_per_tok=1, layer_types=["hybrid", "hybrid"]),
)  # fmt: skip
LARGE = 5_000_000


def architectures() -> dict[str, str]:
    """Modeling files of transformers in which a class has experts and a top-k, by the name of their folder."""
    found = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        if re.search(r"self\.experts\b|ParallelExperts", text := path.read_text()) and "topk(" in text:
            found[path.parent.name] = f"transformers.models.{path.parent.name}.{path.stem}"
    return found


def _known(config: type, more: dict) -> dict:
    names = set(inspect.signature(config.__init__).parameters) | set(getattr(config, "attribute_map", ()))
    for base in config.__mro__:
        names |= set(vars(base).get("__annotations__", ()))
    return {n: v for n, v in {**SIZES, **more}.items() if n in names}


def tiny(kind: str, **more) -> nn.Module:
    """A base model with experts, of a few thousand parameters; LookupError: no class of this file can be made that small."""
    module = importlib.import_module(architectures()[kind])
    models = [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]
    models = [c for c in models if issubclass(c, transformers.PreTrainedModel) and getattr(c, "config_class", None)]
    problems = []
    for cls in sorted(models, key=lambda c: (not c.__name__.endswith("TextModel"), not c.__name__.endswith("Model"))):
        try:
            config = cls.config_class(**_known(cls.config_class, {**TYPES.get(kind, {}), **more}))
            if not V5 and kind in ("glm4v_moe", "qwen3_vl_moe", "qwen3_omni_moe"):
                config.rope_scaling = {**MROPE, "mrope_section": [1, 1, 0] if kind == "glm4v_moe" else [1, 1, 2]}
            with torch.device("meta"):
                sizes = {n: p.numel() for n, p in cls(config).named_parameters()}
        except Exception as problem:  # whatever a configuration class raises for one of the sizes
            problems.append(f"{cls.__name__}: {type(problem).__name__}: {problem}")
            continue
        if sum(sizes.values()) < LARGE and any("expert" in n or "moe" in n for n in sizes):
            torch.manual_seed(1)
            model = cls(config)
            for p in model.parameters():
                if p.dim() > 1:
                    nn.init.normal_(p, std=0.08)
            return model
        problems.append(f"{cls.__name__}: {sum(sizes.values())} parameters")
    raise LookupError("; ".join(problems))
