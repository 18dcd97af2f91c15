# SPDX-License-Identifier: Apache-2.0
"""pytest -p fmoe_plugin: transformers' own tests with fusedmoe in the place of grouped_mm and batched_mm.

FMOE_NAME says which of ours: fusedmoe, or fusedmoe_composed. It is put under both names before a test module imports them;
processes that a test spawns put fusedmoe there by themselves (FMOE_AUTOLOAD=replace). How often ours was called in this
process, and how often a module kept its own forward, is written to the file that FMOE_CALLS names.
"""

import json
import os
from pathlib import Path

os.environ["FMOE_AUTOLOAD"] = "replace"  # before torch is imported, and for every child

import torch
from transformers.integrations import moe

from fusedmoe.integrations import layers
from fusedmoe.integrations import transformers as hf

calls = {"ours": 0, "own forward": 0}
composed, uncounted = os.environ.get("FMOE_NAME") == hf.COMPOSED, hf.experts_forward


def experts_forward(self, *args, **kwargs):
    """fusedmoe's, counted."""
    if not torch.compiler.is_compiling():
        calls["own forward" if layers.layer_of(self).own else "ours"] += 1
    return uncounted(self, *args, **kwargs | {"composed": composed})


hf.experts_forward = experts_forward  # what register() gives to transformers, now and when more of it is imported
hf.register()
for name in ("grouped_mm", "batched_mm"):
    setattr(moe, f"{name}_experts_forward", experts_forward)  # a test wraps this name in a Mock


def pytest_sessionfinish():
    if "FMOE_CALLS" in os.environ:
        Path(os.environ["FMOE_CALLS"]).write_text(json.dumps(calls))
