# SPDX-License-Identifier: Apache-2.0
"""Ids as engines hand them out, and as a batch needs them: [T, L, k], a row of -1 where nothing is known."""

import base64
import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .sites import Site

_WHOLE = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}


def _plain(given: Any) -> Any:
    """An array as torch takes it: strides that are not negative, bytes in the machine's order."""
    if not hasattr(given, "__array_interface__"):
        return given
    import numpy

    array = numpy.asarray(given)
    return numpy.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))


def _made(given: Any, what: str) -> Tensor:
    """A tensor of integers, from whatever is one."""
    if isinstance(given, Tensor):
        t = given
    else:
        try:
            t = torch.as_tensor(_plain(given))
        except (TypeError, ValueError, RuntimeError) as problem:
            raise TypeError(f"{what} are {given!r:.60} ({type(given).__name__}), expected a tensor or an array of integers") from problem
    if t.is_meta:
        raise ValueError(f"{what} are on meta, {list(t.shape)}: there are no numbers in them")
    return t


def tensor(ids: Any, what: str = "replay: ids") -> Tensor:
    """ids as a tensor of a signed type: torch has few operations for uint16."""
    t = _made(ids, what)
    if t.dtype not in _WHOLE:
        raise TypeError(f"{what} are {str(t.dtype).removeprefix('torch.')}, expected integers")
    signed = {torch.uint8: torch.int16, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
    return t.to(signed.get(t.dtype, t.dtype))


def _array(data: Any, what: str) -> Any:
    """An array, or the base64 text or bytes of one: (bytes, or what was given)."""
    if isinstance(data, str):
        try:
            return base64.b64decode(data, validate=True)
        except ValueError as problem:
            raise ValueError(f"{what}: a text that is not base64 ({problem})") from problem
    return bytes(data) if isinstance(data, (bytes, bytearray, memoryview)) else data


def _ended(t: Tensor, tokens: int | None, what: str) -> Tensor:
    if t.dim() != 3:
        raise ValueError(f"{what}: {list(t.shape)}, expected three dimensions [tokens - 1, layers, k]")
    if tokens is None:
        return t
    if len(t) not in (tokens - 1, tokens):
        raise ValueError(f"{what}: {len(t)} rows, and the sequence has {tokens} tokens: expected {tokens - 1}")
    return torch.cat((t, t.new_full((tokens - len(t), *t.shape[1:]), -1)))


def from_vllm(data: Any, tokens: int | None = None) -> Tensor:
    """vLLM's ``CompletionOutput.routed_experts`` [tokens-1, L, k] (uint8, uint16 or int32), or the base64 of a .npy file that its server
    sends. tokens: prompt and completion; the last one, which was sampled and not run, gets a row of -1."""
    data = _array(data, "from_vllm")
    if isinstance(data, bytes):
        import numpy

        try:
            data = numpy.load(io.BytesIO(data), allow_pickle=False)
        except (ValueError, EOFError, OSError) as problem:
            raise ValueError(f"from_vllm: {len(data)} bytes that are no .npy file ({problem})") from problem
    return _ended(tensor(data, "from_vllm: ids"), tokens, "from_vllm")


def from_sglang(data: Any, layers: int, k: int, tokens: int | None = None) -> Tensor:
    """SGLang's ``meta_info["routed_experts"]``: int32 in a row, or their base64, of [tokens-1, layers, k]. tokens: as in from_vllm."""
    data = _array(data, "from_sglang")
    if type(layers) is not int or type(k) is not int or layers < 1 or k < 1:
        raise ValueError(f"from_sglang: layers is {layers!r} and k is {k!r}, expected whole numbers of at least 1")
    if isinstance(data, bytes):
        if len(data) % 4:
            raise ValueError(f"from_sglang: {len(data)} bytes are no whole number of int32")
        data = torch.frombuffer(bytearray(data), dtype=torch.int32) if data else torch.empty(0, dtype=torch.int32)
    t = tensor(data, "from_sglang: ids")
    if t.numel() % (layers * k) or (t.dim() == 3 and tuple(t.shape[1:]) != (layers, k)):
        raise ValueError(f"from_sglang: {list(t.shape)} numbers are no rows of layers = {layers} times k = {k}")
    return _ended(t.reshape(-1, layers, k), tokens, "from_sglang")


def place(sequences: Sequence[Any], lengths: Any = None, mask: Any = None) -> Tensor:
    """[T, L, k] of a batch from the rows [n, L, k] of its sequences. lengths: tokens of each, one after the other (packing). mask: [B, S],
    the places of each, wherever the padding is. A sequence may have fewer rows than tokens: those at its end become -1."""
    if (lengths is None) == (mask is None):
        raise ValueError("place: a list of sequences needs `lengths` (packed) or `mask` (padded), and not both")
    found = [tensor(t) for t in sequences]
    if mask is not None:
        mask = _made(mask, "place: mask")
        if mask.dim() != 2:
            raise ValueError(f"place: mask is {list(mask.shape)}, expected [B, S]")
        counts = mask.bool().sum(1).tolist()
    else:
        counts = (tensor(lengths, "place: lengths") if len(lengths) else torch.empty(0, dtype=torch.int64)).tolist()
    if len(found) != len(counts) or not found:
        raise ValueError(f"place: {len(found)} sequences, and {'lengths' if mask is None else 'mask'} is of {len(counts)}")
    for i, (t, n) in enumerate(zip(found, counts)):
        if t.dim() != 3 or t.shape[1:] != found[0].shape[1:]:
            raise ValueError(f"place: sequence {i} is {list(t.shape)}, expected [n, L, k] as the first, {list(found[0].shape)}")
        if len(t) > n:
            raise ValueError(f"place: sequence {i} has {len(t)} rows and {n} tokens")
    kind = max((t.dtype for t in found), key=lambda dtype: dtype.itemsize)
    rows = [torch.cat((t.to(kind), t.new_full((n - len(t), *t.shape[1:]), -1, dtype=kind))) for t, n in zip(found, counts)]
    if mask is None:
        return torch.cat(rows)
    ids = rows[0].new_full((mask.numel(), *rows[0].shape[1:]), -1)
    ids[mask.reshape(-1).bool().to(ids.device)] = torch.cat(rows)
    return ids


def rows(ids: Any, lengths: Any, mask: Any) -> Tensor:
    """[T, L, k] of what replay was given."""
    nested = isinstance(ids, (list, tuple)) and lengths is None and mask is None and not any(hasattr(t, "shape") for t in ids)
    if isinstance(ids, (list, tuple)) and not nested:
        return place(ids, lengths, mask)
    if lengths is not None or mask is not None:
        raise ValueError("replay: lengths and mask are for a list of sequences; ids are one tensor")
    t = tensor(ids)
    if t.dim() not in (3, 4):
        raise ValueError(f"replay: ids are {list(t.shape)}, expected [T, L, k] or [B, S, L, k]")
    return t.flatten(0, 1) if t.dim() == 4 else t


def table(ids: Tensor, sites: Sequence[Site], layers: Sequence[int], depth: int, native: bool) -> tuple[Tensor, bool]:
    """ids by decoder layer, checked, and whether a row is left to the model."""
    L, k = ids.shape[1:]
    if L not in (depth, len(sites)):
        raise ValueError(f"replay: ids are of {L} layers, and the model has {depth}, {len(sites)} of them with a router")
    order = list(layers if depth == L else range(L))
    most = max(site.k for site in sites)
    for site in sites:
        if k < site.k or k > most:
            raise ValueError(f"replay: ids have {k} columns, and layer {site.layer} ({site.name}) chooses {site.k} experts")
    any_native = False
    for at, site, layer in zip(order, sites, layers):
        any_native = _check(ids[:, at], site, layer, native) or any_native
    if depth == L:
        return ids, any_native
    wide = ids.new_full((len(ids), depth, k), -1)
    wide[:, list(layers)] = ids
    return wide, any_native


def _check(ids: Tensor, site: Site, layer: int, native: bool) -> bool:
    """Ids of one layer, or an error that names the first token that cannot be. Whether there is a row of -1."""
    own, rest = ids[:, : site.k], ids[:, site.k :]
    none = (own == -1).all(1)
    wrong = ((own < 0) | (own >= site.E)).any(1) & ~none
    ordered = own.sort(1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(1) & ~none & (site.turn >= 0)
    more = (rest != -1).any(1)
    found = torch.stack((wrong, twice, more, none)).any(1).tolist() if len(ids) else [False] * 4
    for bad, mask, what in zip(
        (found[0], found[1], found[2], found[3] and not native),
        (wrong, twice, more, none),
        (f"expected experts 0 to {site.E - 1}, or -1 in all {site.k} columns",
         "an expert twice; a row that is not known is -1, not padded",
         f"expected {site.k} experts and -1 in the other columns",
         'no ids, and missing="error"'),
    ):  # fmt: skip
        if bad:
            token = int(mask.nonzero()[0])
            raise ValueError(f"replay: layer {layer} ({site.name}), token {token}: ids {ids[token].tolist()}: {what}")
    return found[3]


def same_table(site: Site, want: Tensor, ids: Tensor) -> None:
    """A router with a table of token ids cannot be told others."""
    want = want.to(ids.device, ids.dtype)
    wrong = ((want.sort(1).values != ids.sort(1).values) & (want >= 0)).any(1)
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        raise ValueError(f"replay: layer {site.layer} ({site.name}), token {token}: ids {want[token].tolist()}, and its table of token ids "
                         f"has {ids[token].tolist()}")  # fmt: skip
