# SPDX-License-Identifier: Apache-2.0
"""Where a stack came from: under which names and in which layout a checkpoint holds it, so that ``state_dict`` gives what came."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import foreign
from .foreign import Layout
from .tensor import QuantTensor


class PerExpert:
    """A Linear for each expert and each of names (gate_proj, up_proj): ``experts.0.gate_proj.weight_packed`` and so on."""

    def __init__(self, names: Sequence[str], hows: list[list[Layout]], block: Sequence[int], version: int) -> None:
        self.names, self.hows, self.block, self.version = list(names), hows, tuple(block), version

    def write(self, q: QuantTensor) -> dict[str, Tensor]:
        """By name, below the experts module."""
        cut = foreign.cut(q, self.hows)
        return {f"{e}.{name}.{key}": t for e, made in enumerate(cut) for name, part in zip(self.names, made) for key, t in part.items()}

    def take(self, state: dict[str, Tensor], prefix: str, dtype: torch.dtype) -> QuantTensor | None:
        """The stack, from a state_dict, which loses its tensors; None where they are not there."""
        matrices, hows = [], []
        for e in range(len(self.hows)):
            given = [{k.rpartition(".")[2]: state.pop(k) for k in [*state] if k.startswith(f"{prefix}{e}.{n}.")} for n in self.names]
            if not all(given):
                return None
            made = [foreign.read(t, dtype, self.block, self.version) for t in given]
            matrices.append([q for q, _ in made])
            hows.append([how for _, how in made])
        self.hows = hows
        return foreign.stack(matrices)


class Blocks:
    """gpt-oss: ``gate_up_proj_blocks`` [E,N,K/32,16] and ``gate_up_proj_scales``, of a parameter that says [E,K,N]."""

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, q: QuantTensor) -> dict[str, Tensor]:
        """As PerExpert's."""
        return {f"{self.name}_blocks": q.codes.unflatten(-1, (-1, 16)), f"{self.name}_scales": q.scale}

    def take(self, state: dict[str, Tensor], prefix: str, dtype: torch.dtype) -> QuantTensor | None:
        """As PerExpert's."""
        keys = f"{prefix}{self.name}_blocks", f"{prefix}{self.name}_scales"
        if not all(k in state for k in keys):
            return None
        blocks, scales = (state.pop(k) for k in keys)
        return QuantTensor.from_mxfp4(blocks, scales, dtype).turned()


class Beside:
    """transformers' FP8Experts: the codes are the parameter's own, its scales another parameter of the module."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
        self.name, self.dtype = name, dtype

    def write(self, q: QuantTensor) -> dict[str, Tensor]:
        """As PerExpert's."""
        return {self.name: q.codes.view(self.dtype)}


class Bitsandbytes:
    """``bitsandbytes.nn.parametrize.replace_parameter_4bit``: the codes under the parameter's name, its QuantState beside it."""

    def __init__(self, name: str, state: Any, shape: torch.Size) -> None:
        self.name, self.state, self.shape = name, state, shape

    def write(self, q: QuantTensor) -> dict[str, Tensor]:
        """As PerExpert's."""
        beside = self.state.as_dict(packed=True)
        return {self.name: q.codes.reshape(self.shape), **{f"{self.name}.{key}": t for key, t in beside.items()}}

    def take(self, state: dict[str, Tensor], prefix: str, dtype: torch.dtype) -> QuantTensor | None:
        """As PerExpert's."""
        from bitsandbytes.functional import QuantState

        key = prefix + self.name
        beside = {k.removeprefix(f"{key}."): state[k] for k in state if k.startswith(f"{key}.")}
        if key not in state or not beside:
            return None
        for k in beside:
            del state[f"{key}.{k}"]
        self.state = QuantState.from_dict(beside, device=torch.device("cpu"))
        return QuantTensor.from_bitsandbytes(state.pop(key), self.state)


Origin = PerExpert | Blocks | Beside | Bitsandbytes
