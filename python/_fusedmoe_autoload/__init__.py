# SPDX-License-Identifier: Apache-2.0
"""Loaded by torch in every process (entry point torch.backends): waits for transformers, PEFT and LLaMA-Factory.

It imports nothing but the standard library, and nothing that goes wrong in it can keep torch from being imported. When one
of the modules in WATCHED has been imported, fusedmoe registers itself there. FMOE_AUTOLOAD=0 turns it off.
"""

import importlib
import os
import sys
import warnings
from importlib.machinery import ModuleSpec
from typing import Any

WATCHED = {
    "transformers.integrations.moe": "fusedmoe.integrations.transformers",
    "transformers.integrations.finegrained_fp8": "fusedmoe.integrations.transformers",
    "transformers.modeling_utils": "fusedmoe.integrations.transformers",
    "peft.tuners.lora.layer": "fusedmoe.integrations.peft",
    "llamafactory.v1.plugins.model_plugins.kernels.interface": "fusedmoe.integrations.llamafactory",
}


def _register(name: str) -> None:
    try:
        importlib.import_module(WATCHED[name]).register()
    except Exception as problem:
        warnings.warn(f"fusedmoe did not register with {name}: {problem}", RuntimeWarning, stacklevel=2)


class _Finder:
    """A meta path finder that looks at WATCHED and leaves the finding to the others."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")] if name in WATCHED else []
        spec = next((spec for f in others if (spec := f.find_spec(name, path, target))), None)
        if spec is not None:
            spec.__class__ = _Spec
        return spec


class _Spec(ModuleSpec):
    """The spec of a module that is being imported: importlib ends by setting _initializing to False."""

    @property
    def _initializing(self) -> bool:
        return self.__dict__.get("_initializing", False)

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        if not value and self.name in sys.modules:
            _register(self.name)


def activate() -> None:
    """The entry point."""
    if os.environ.get("FMOE_AUTOLOAD", "1") == "0" or any(isinstance(f, _Finder) for f in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
    for name in [n for n in WATCHED if n in sys.modules]:
        spec = getattr(sys.modules[name], "__spec__", None)
        if getattr(spec, "_initializing", False):  # it is what imports torch
            spec.__class__ = _Spec  # type: ignore[union-attr]
        else:
            _register(name)
