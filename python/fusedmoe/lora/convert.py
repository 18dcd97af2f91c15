# SPDX-License-Identifier: Apache-2.0
"""An adapter in another layout, and the configuration that goes with it."""

from .files import Adapter, Facts
from .layouts import LayoutError, read, write

_LEAVES = "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"


def convert(adapter: Adapter, to: str, facts: Facts, layout: str | None = None) -> Adapter:
    """The same adapter in the layout `to`; layout: the one it has, where sizes do not tell. No number is computed."""
    experts = read(adapter, facts, layout)
    if not experts.layers:
        raise LayoutError("the adapter has no factors of experts")
    tensors, config = write(experts, to, facts), dict(adapter.config)
    parts = {part for layer in experts.layers.values() for part in layer}
    fused = {"gate_up" if part in ("gate", "up") else part for part in parts}
    modules = config.get("target_modules")
    targets = {m for m in modules or () if m not in _LEAVES or any(f".{m}." in name for name in experts.others)}
    if to.startswith("peft"):
        block = {module.rsplit(".", 2)[-2] for module in experts.layers}
        config["target_parameters"] = sorted(f"{b}.experts.{part}_proj" for b in block for part in fused)
    else:
        config["target_parameters"] = None
        leaves: dict[str, tuple[str, ...]] = {"gate_up": ("gate_up_proj",), "down": ("down_proj",)}
        if to == "per-expert":
            names = ("w1", "w3", "w2") if facts.w_names else ("gate_proj", "up_proj", "down_proj")
            leaves = {"gate_up": names[:2], "down": names[2:]}
        targets |= {leaf for part in fused for leaf in leaves[part]}
    config["target_modules"] = modules if isinstance(modules, str) else sorted(targets)
    return Adapter(tensors, config)
