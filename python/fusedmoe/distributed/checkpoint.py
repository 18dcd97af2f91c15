# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint (DCP) of a model whose experts are spread over ranks: every rank writes and reads its own, and the files
know whole stacks, so that any number of ranks, with any map, or a program without ranks can load them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from .shards import Entry, entries, named


class ExpertShard(Tensor):
    """A stack [E,...] of which this rank has the experts ep.local, or, after FSDP2, a part of them; factors of adapters are stacks too,
    [E,rank,in] and [E,out,rank]. It is for DCP: no operation takes it."""

    whole: Tensor  # what it was made of
    part: Tensor
    chunks: dict[torch.Size, int]  # where a row of part lies in the stack

    @staticmethod
    def __new__(cls, t: Tensor, entry: Entry) -> "ExpertShard":
        rows, E = entry.stack(t, len(entry.ep.local)), entry.ep.num_experts
        return Tensor._make_wrapper_subclass(cls, (E, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)

    def __init__(self, t: Tensor, entry: Entry) -> None:
        rows, ep = entry.stack(t.detach(), len(entry.ep.local)), entry.ep
        self.whole = t
        offsets = [0] * rows.dim()
        if isinstance(rows, DTensor):
            (chunk,) = rows.__create_chunk_list__()
            rows, offsets = rows.to_local(), [*chunk.offsets]
        self.part = rows
        mine = ep.local[offsets[0] : offsets[0] + len(rows)] if self.part.numel() else []
        self.chunks = {torch.Size((e, *offsets[1:])): row for row, e in enumerate(mine)}

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        sizes = torch.Size((1, *self.part.shape[1:]))
        return [ChunkStorageMetadata(offsets=offsets, sizes=sizes) for offsets in self.chunks]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.part)
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD,
                          tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()))
                for chunk in self.__create_chunk_list__()]  # fmt: skip

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        row = self.chunks[index.offset]
        return self.part[row : row + 1]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ExpertShard({len(self.chunks)} of {list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of an ExpertShard: it is what torch.distributed.checkpoint saves and loads, and nothing else")


def sharded_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """{"model": ..., "optimizer": ...} for ``torch.distributed.checkpoint.save``, and for ``load``, which writes into the model.

    An optimizer is loaded with ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` underneath: call
    ``load_optimizer(model, optimizer, state["optimizer"])`` after ``load``.
    """
    spread = entries(model)
    own = named(model.state_dict(), spread, True)
    state: dict[str, Any] = {"model": {name: ExpertShard(t, spread[name]) if name in spread else t for name, t in own.items()}}
    if optimizer is not None:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        found = get_optimizer_state_dict(model, optimizer)
        shapes = {name: model.get_parameter(name).shape for name in spread}
        cut = lambda name, t: ExpertShard(t, spread[name]) if isinstance(t, Tensor) and t.shape == shapes[name] else t
        of = {name: {k: cut(name, t) for k, t in one.items()} if name in spread else one for name, one in found["state"].items()}
        state["optimizer"] = {**found, "state": of}
    return state


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Put into optimizer what ``torch.distributed.checkpoint.load`` has loaded into state."""
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    plain = lambda t: t.whole if isinstance(t, ExpertShard) else t
    of: Any = {name: {k: plain(t) for k, t in one.items()} for name, one in state["state"].items()}
    set_optimizer_state_dict(model, optimizer, {**state, "state": of})
