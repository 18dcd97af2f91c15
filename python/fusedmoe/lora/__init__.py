# SPDX-License-Identifier: Apache-2.0
"""Adapters on experts in the layouts of PEFT, vLLM and SGLang: converted without a rounding, and proven.

    python -m fusedmoe.lora convert trained/ served/ --to per-expert --base model/
    python -m fusedmoe.lora verify  trained/ served/ --base model/

Layouts of the factors of E experts, rank r, and dW = scale * B A of each:
    peft         A [E*r, in], experts slowest; B [out, r*E], experts fastest (PEFT from 0.19 on; before it for transposed weights)
    peft-0.18    the same with in and out exchanged: PEFT 0.17 and 0.18 on weights [E, out, in]. No name tells the two apart.
    per-expert   experts.<e>.{gate,up,down}_proj, A [r, in], B [out, r] (vLLM, SGLang, transformers v4)
    sglang3d     experts.{gate_up,down}_proj, A [E, r, in] (gate_up: [E, 2r, in], gate's above up's), B [E, out, r]
"""

from .convert import convert
from .files import Adapter, Facts, load, save
from .layouts import LAYOUTS, LayoutError, read, write
from .verify import Proof, verify

__all__ = ["LAYOUTS", "Adapter", "Facts", "LayoutError", "Proof", "convert", "load", "read", "save", "verify", "write"]
