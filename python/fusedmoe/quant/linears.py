# SPDX-License-Identifier: Apache-2.0
"""Quantised Linears of experts in a ModuleList: read where they are (bitsandbytes), taken over (GPTQ, AWQ, compressed-tensors), with the
bytes that came in ``state_dict``, or made of plain ones (``fusedmoe.quantize``)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..integrations.log import say_once
from . import foreign, state
from .foreign import Layout
from .formats import FP4, HIGH_FIRST, NF4, S8, Format
from .tensor import QuantTensor

_FLOATS = torch.float32, torch.bfloat16, torch.float16


# ---- bitsandbytes: read where they are ---------------------------------------------------------------------------------------
class _Held:
    """What was read of a Linear. It is nobody's state: a copy of the Linear reads its own."""

    def __init__(self, key: tuple = (), tensor: QuantTensor | None = None) -> None:
        self.key, self.tensor = key, tensor

    def __deepcopy__(self, memo: dict) -> "_Held":
        return _Held()

    def __reduce__(self) -> tuple:
        return _Held, ()


def _key(linear: Any) -> tuple:
    weight = linear.weight
    return id(weight), weight.data_ptr(), weight.dtype, id(getattr(weight, "quant_state", None))


def _four_bits(linear: Any) -> QuantTensor | None:
    state = linear.weight.quant_state
    if state is None or len(state.shape) != 2 or state.shape[1] % state.blocksize:
        return None
    if not getattr(state, "packing_format_for_cpu", False):
        return QuantTensor.from_bitsandbytes(linear.weight.data, state)
    (N, K), packed = state.shape, linear.weight.data.reshape(-1, 32)  # as its own forward for AVX512 left it: 32 rows side by side
    nibbles = torch.cat((packed & 15, packed >> 4), -1).view(N // 32, K // 2, 32, 2).transpose(1, 2).reshape(N, K // 2, 2)
    format = Format(state.quant_type, {"nf4": NF4, "fp4": FP4}[state.quant_type], HIGH_FIRST, 1, state.blocksize)
    codes, absmax = nibbles[..., 0] << 4 | nibbles[..., 1], state.absmax.t().float().contiguous()
    return QuantTensor(codes, absmax, format, state.shape, state.original_dtype)


def _eight_bits(linear: Any) -> QuantTensor | None:
    weight, state = linear.weight, linear.state
    absmax = weight.SCB if getattr(weight, "SCB", None) is not None else state.SCB
    if weight.dtype != torch.int8 or absmax is None or state.has_fp16_weights:
        return None
    (N, _), dtype = weight.shape, vars(linear).get("_fmoe_dtype", torch.bfloat16)
    scale2 = torch.tensor([1 / 127], device=weight.device)
    return QuantTensor(weight.data, absmax.detach().float().reshape(N, 1), Format("int8", S8), weight.shape, dtype, scale2)


_READERS = {"Linear4bit": _four_bits, "Linear8bitLt": _eight_bits}


def weight_of(linear: Any) -> QuantTensor | None:
    """The matrix of a quantised Linear that can be read where it is; None: it is none."""
    if type(linear) is QuantLinear:
        return linear._parameters["weight"]
    reader = _READERS.get(type(linear).__name__) if type(linear).__module__.startswith("bitsandbytes.") else None
    if reader is None or linear._parameters.get("bias") is not None:
        return None
    held = vars(linear).get("_fmoe_held")
    if held is None or held.key != _key(linear):
        held = vars(linear)["_fmoe_held"] = _Held(_key(linear), reader(linear))
    return held.tensor


# ---- GPTQ, AWQ, compressed-tensors: taken over; plain ones: quantised --------------------------------------------------------------------
class QuantLinear(nn.Linear):
    """A Linear whose weight is a QuantTensor. Its state_dict is that of the one whose place it took (how), or, where that was plain (None),
    has codes under the name of the weight, and scales beside it."""

    def __init__(self, weight: QuantTensor, how: Layout | None = None, version: int = 1) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight, self.how, self.version = nn.Parameter(weight, requires_grad=False), how, version
        self.register_parameter("bias", None)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.to(input.dtype) if input.dtype != self.weight.dtype else self.weight)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.weight.format.name}{f' as {self.how.kind}' if self.how else ''}"

    def _held(self) -> dict[str, Tensor]:
        return foreign.write(self.weight, self.how) if self.how else state.write("weight", self.weight)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        destination |= {prefix + name: t for name, t in self._held().items()}

    def _load_from_state_dict(self, state_dict: dict, prefix: str, local_metadata: Any, strict: bool, missing_keys: list,
                              unexpected_keys: list, error_msgs: list) -> None:  # fmt: skip
        how, q, given = self.how, None, {}
        if self.how is None or f"{prefix}weight.quant" in state_dict:  # of any of our formats
            parts = {part: state_dict[key].clone() for part in state.PARTS if (key := f"{prefix}weight.{part}") in state_dict}
            if f"{prefix}weight" not in state_dict:
                missing_keys.append(f"{prefix}weight")
                return
            try:
                how, q = None, state.read(state_dict[f"{prefix}weight"].clone(), **parts)
            except ValueError as problem:
                error_msgs.append(f"{prefix}weight: {problem}")
                return
        else:
            names = self._held()
            missing = [prefix + name for name in names if prefix + name not in state_dict]
            if missing:
                missing_keys += missing
                return
            given = {name: state_dict[prefix + name].clone() for name in names}
            q, how = foreign.read(given, self.weight.dtype, (self.weight.format.rows, self.weight.format.cols), self.version)
        if q.shape != self.weight.shape:
            error_msgs.append(f"{prefix}weight is {list(q.shape)}, expected {list(self.weight.shape)}")
            return
        self.weight, self.how = nn.Parameter(q, requires_grad=False), how


def _tensors(linear: nn.Module) -> dict[str, Tensor]:
    own = {**linear._parameters, **linear._buffers}
    return {name: t for name, t in own.items() if t is not None and not name.startswith(("wf_", "input_"))}


@torch.no_grad()
def _gives(linear: Any, q: QuantTensor) -> bool:
    """Whether a Linear's own forward gives what these weights give: its package may have laid its tensors out anew."""
    x = torch.randn(4, q.shape[1], generator=torch.Generator().manual_seed(3)).to(q.codes.device, q.dtype)
    try:
        own = linear(x).float()
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as problem:  # it does not run here, or not in this dtype
        say_once(f"{type(linear).__name__}: its own forward fails ({problem}), so its codes cannot be compared: it is left alone")
        return False
    want = x.float() @ q.dequantize(torch.float32).t()
    return bool((own - want).norm() <= 3e-2 * want.norm())


def taken(linear: nn.Module, dtype: torch.dtype, block: tuple[int, int] = (128, 128), check: bool = True) -> QuantLinear | None:
    """A QuantLinear in the place of another's quantised Linear; None: it is none, or not one that can be."""
    t = _tensors(linear)
    if not {"qweight", "weight_packed", "weight_scale", "weight_scale_inv"} & t.keys() or "bias" in t:
        return None
    for version in (2, 1):
        try:
            q, how = foreign.read(t, dtype, block, version)
        except (foreign.UnknownLayout, KeyError, IndexError) as problem:
            say_once(f"{type(linear).__name__}: its codes are not read ({problem!r}): it is left alone")
            return None
        if not check or _gives(linear, q):
            return QuantLinear(q, how, version)
        if how.kind != "gptq":
            break
    return None


def _lists(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, str, str]]]:
    from ..integrations.layers import list_names  # which imports this package

    for module in model.modules():
        names = list_names(module)
        if names:
            yield module, names


def weights(experts: nn.Module, names: tuple[str, str, str]) -> list[Tensor]:
    """What the Linears of experts hold, as far as it can be read."""
    from ..integrations.peft import look_through

    of = [e._modules for e in experts._modules.values() if e is not None and type(e) is not nn.Identity]
    inside = [getattr(m.get(name), "base_layer", None) or look_through(m.get(name))[0] for name in names for m in of]
    found = [weight_of(m) if type(m) is not nn.Linear else m._parameters.get("weight") for m in inside if m is not None]
    return [w for w in found if w is not None]


def plain_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of a model's weights that are not quantised."""
    config = getattr(model, "config", None)
    told = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if told in _FLOATS:
        return told
    return next((p.dtype for p in model.parameters() if p.dim() > 1 and type(p) is nn.Parameter and p.dtype in _FLOATS), torch.bfloat16)


def adopt(model: nn.Module) -> int:
    """Take over the Linears of experts in lists; the first expert of each list is compared with its own forward. Returns how many lists."""
    found, dtype = 0, None
    for experts, names in _lists(model):
        dtype, version = dtype or plain_dtype(model), {}
        of = [e._modules for e in experts if type(e) is not nn.Identity]
        for linear in (m.get(name) for m in of for name in names):
            if type(linear).__name__ == "Linear8bitLt":
                vars(linear)["_fmoe_dtype"] = dtype
            elif type(linear).__name__ == "Linear4bit":  # its own forward would round absmax to bfloat16, for good
                linear.support_avx512bf16_for_cpu = False
        for name in names:
            first = of[0].get(name)
            made = taken(first, dtype) if isinstance(first, nn.Module) else None
            if made is None:
                break
            version[name] = made.version
        if len(version) < len(names):
            continue
        for m in of:
            for name in names:
                q, how = foreign.read(_tensors(m[name]), dtype, gptq_version=version[name])
                m[name] = QuantLinear(q, how, version[name])
        found += 1
    return found


def quantise(experts: nn.Module, format: str) -> None:
    """Turn the plain Linears of a list of experts, also those inside PEFT's, into quantised ones."""
    from ..integrations.layers import list_names

    for expert in experts.children():
        for name in list_names(experts) or ():
            holder, key = expert, name
            while isinstance(inside := holder._modules.get(key), nn.Module) and "base_layer" in inside._modules:
                holder, key = inside, "base_layer"
            if type(inside) is nn.Linear:
                holder._modules[key] = QuantLinear(matrix(inside.weight, format)).train(inside.training)


def matrix(w: Tensor, format: str) -> QuantTensor:
    """A weight [N,K], quantised."""
    return QuantTensor.from_weights(w.detach().unsqueeze(0), format).expert(0)


def made_here(model: nn.Module) -> list[tuple[nn.Module, str, QuantTensor]]:
    """The Linears of experts in lists that ``fusedmoe.quantize`` made: the expert, the name in it, the weight."""
    found = []
    for experts, names in _lists(model):
        for expert, name in ((expert, name) for expert in experts.children() for name in names):
            inside = expert._modules.get(name)
            while isinstance(inside, nn.Module) and "base_layer" in inside._modules:
                inside = inside._modules["base_layer"]
            if type(inside) is QuantLinear and inside.how is None:
                found.append((expert, name, inside.weight))
    return found


def is_listed(model: nn.Module, path: str) -> bool:
    """Whether this is a Linear of an expert in a list, which can be quantised."""
    from ..integrations.layers import list_names

    *block, experts, _, name = ["", "", "", *path.split(".")]
    if experts != "experts" or type(linear := model.get_submodule(path)) is not nn.Linear or linear._parameters.get("bias") is not None:
        return False
    return name in (list_names(model.get_submodule(".".join((*filter(None, block), experts)))) or ())


def wrap(model: nn.Module) -> None:
    """Put a QuantLinear in the place of every Linear whose weight is quantised."""
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if type(child) is nn.Linear and isinstance(child.weight, QuantTensor):
                module._modules[name] = QuantLinear(child.weight).train(child.training)


def release(model: nn.Module) -> None:
    """Put plain Linears in the place of every QuantLinear."""
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if type(child) is QuantLinear:
                with torch.device("meta"):
                    plain = nn.Linear(child.in_features, child.out_features, bias=False)
                plain.weight = nn.Parameter(child.weight.dequantize(), requires_grad=False)
                module._modules[name] = plain.train(child.training)
