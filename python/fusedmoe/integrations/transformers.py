# SPDX-License-Identifier: Apache-2.0
"""fusedmoe under Hugging Face transformers.

v5: the name "fusedmoe" in ExpertsInterface, chosen with ``model.set_experts_implementation("fusedmoe")``, ``from_pretrained(...,
experts_implementation="fusedmoe")`` or ``apply(model)``; and "fusedmoe_composed", which rounds where transformers' own grouped_mm does.
v4: ``apply(model)`` patches MoE blocks by their structure, after it has seen that the patched forward gives what the module's own gives.
"""

import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from .. import ops
from . import expert_parallel, layers, seams

NAME, COMPOSED = "fusedmoe", "fusedmoe_composed"


def experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, lora: tuple[Any, ...] = (),
                    composed: bool = False) -> Tensor:  # fmt: skip
    """The forward that transformers calls for every experts module whose implementation is "fusedmoe" or "fusedmoe_composed"."""
    layer = layers.layer_of(self, composed)
    if not layer.own:
        return layers.run(self, layer, hidden_states, top_k_index, top_k_weights, lora)
    own: Callable[..., Tensor] | None = getattr(type(self).forward, "__wrapped__", None)
    if own is None:
        raise RuntimeError(f"{type(self).__name__} is not a layer that fusedmoe knows, and it has no forward of its own")
    return own(self, hidden_states, top_k_index, top_k_weights)


_composed_forward = partial(experts_forward, composed=True)


def chosen(module: nn.Module) -> str | None:
    """Which implementation of ours an experts module of v5 is to call; None: another's, or its own forward."""
    moe = sys.modules.get("transformers.integrations.moe")
    function = moe and moe.ALL_EXPERTS_FUNCTIONS.get(cast(Any, module.config)._experts_implementation)
    return NAME if function is experts_forward else COMPOSED if function is _composed_forward else None


def register(replace_default: bool = False) -> bool:
    """Put "fusedmoe" into transformers' ExpertsInterface. False where transformers (v4) has none.

    replace_default (or FMOE_AUTOLOAD=replace in the environment) also puts it in the place of "grouped_mm" and "batched_mm",
    so that models use it without being told.
    """
    from . import peft  # which imports this module

    peft.register()
    replace_default = replace_default or os.environ.get("FMOE_AUTOLOAD") == "replace"
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError:
        return False
    for name in (NAME, *(("grouped_mm", "batched_mm") if replace_default else ())):
        ExpertsInterface.register(name, experts_forward)
    ExpertsInterface.register(COMPOSED, _composed_forward)
    fp8 = sys.modules.get("transformers.integrations.finegrained_fp8")  # a table of its own: such experts keep their forward
    if fp8 is not None and hasattr(fp8, "FP8ExpertsInterface"):
        fp8.FP8ExpertsInterface.register(NAME, experts_forward)
    expert_parallel.register(NAME)
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is not None and hasattr(modeling, "PreTrainedModel"):
        _accept_name(modeling.PreTrainedModel)
        with suppress(ImportError):  # transformers before 5.6
            quant_config()  # so that from_pretrained knows what save_pretrained wrote
    return True


def quant_config() -> type:
    """``fusedmoe.QuantConfig``, in transformers' tables from then on."""
    import transformers

    if int(transformers.__version__.split(".")[0]) < 5:
        raise NotImplementedError(f"fusedmoe.QuantConfig needs transformers 5, this is {transformers.__version__}, where experts are "
                                  "Linears: load them with BitsAndBytesConfig; fusedmoe.apply(model) runs them as they are")  # fmt: skip
    from ..quant.loading import QuantConfig

    return QuantConfig


def _accept_name(cls: type) -> None:
    """transformers 5.0 to 5.6 compare the name with a fixed list: let ours pass."""
    from transformers import __version__

    check = getattr(cls, "get_correct_experts_implementation", None)
    if check is None or check.__module__ == __name__ or tuple(int(n) for n in __version__.split(".")[:2]) >= (5, 7):
        return

    def get_correct_experts_implementation(self: Any, requested_experts: str | None) -> str:
        return requested_experts if requested_experts in (NAME, COMPOSED) else check(self, requested_experts)

    cls.get_correct_experts_implementation = get_correct_experts_implementation  # type: ignore[attr-defined]


def apply(model: nn.Module, routers: bool | None = None, keep: str | None = None, expert_parallel: Any = None,
          same_bits: bool = False, **options: Any) -> nn.Module:  # fmt: skip
    """Make every MoE layer of model run on fusedmoe. Returns the model; unknown ones are left alone, with a log line.

    routers: whether routers call `route`; None: on a device, where it saves launches, not on a CPU, where it is no faster.
    keep: what a layer keeps for its backward. "all" or "lean" (a quarter of it, four more launches), which is for an NPU; "nothing":
    x alone, on every device, and h is computed again; None: the device's own choice (an NPU: FMOE_ASCEND_KEEP, else all).
    same_bits: a token's bits are the same in any batch on CUDA too, where few tokens then take longer; a CPU always has it so.
    expert_parallel: a process group or DeviceMesh whose ranks share the experts; options: of ``fusedmoe.distributed.ExpertParallel``.
    """
    from ..quant.model import adopt  # which import this module
    from .report import report

    if not isinstance(model, nn.Module):
        raise TypeError(f"apply: model is a {type(model).__name__} ({model!r:.60}), expected a torch.nn.Module: load it first")
    if keep is not None and keep not in layers.KEEP:
        raise ValueError(f"apply: keep is {keep!r}, expected one of {', '.join(layers.KEEP)}, or None")
    register()
    adopt(model)
    if routers is None:
        routers = any(p.device.type not in ("cpu", "meta") for p in model.parameters())
    ours: list[Any] = [m for m in model.modules() if layers.is_v5_experts(m) and not layers.look_at(m).own]
    for config in {id(m.config): m.config for m in ours}.values():
        if config._experts_implementation != NAME:
            vars(model).setdefault("_fmoe_previous", []).append((config, config._experts_implementation))
            config._experts_implementation = NAME
    patched, found = seams.patch(model, routers), report(model)
    for module in [*ours, *(m for m in model.modules() if seams.seam_of(m))]:
        for part in (module, module._modules.get("experts")):  # Llama 4's block runs its experts
            if part is not None:
                vars(part).pop("_fmoe_keep", None)
                if keep is not None or same_bits:
                    part._fmoe_keep = (layers.KEEP[keep] if keep is not None else 0) | (ops.SAME_BITS if same_bits else 0)
    config = getattr(model, "config", None)
    name = (getattr(config, "architectures", None) or [type(model).__name__])[0]
    quantized = " (it is quantized)" if getattr(config, "quantization_config", None) else ""
    if ours or patched:
        layers.say_once(f"{name}{quantized}: {found.summary}", logging.INFO)
    else:
        seams.unpatch(model)
        kind, rows = getattr(config, "model_type", "?"), f": {found.summary}" if len(found) else ""
        layers.logger.warning("%s%s (%s): no MoE layer that fusedmoe knows; the model is unchanged%s", name, quantized, kind, rows)
    layers.logger.debug("%s\n%s", name, found)
    if options and expert_parallel is None:
        raise TypeError(f"apply: {', '.join(options)} without expert_parallel")
    if expert_parallel is not None:
        from ..distributed import shard  # which imports torch.distributed

        shard(model, expert_parallel, **options)
    return model


def unapply(model: nn.Module) -> nn.Module:
    """Undo ``apply``: every layer of model runs as it did before. Returns the model."""
    for config, implementation in vars(model).pop("_fmoe_previous", ()):
        config._experts_implementation = implementation
    seams.unpatch(model)
    for module in model.modules():
        seams.left.pop(module, None)
    return model
