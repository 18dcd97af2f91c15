# SPDX-License-Identifier: Apache-2.0
"""What an experts module computes, found out and never assumed.

An activation is known by its type, or by its result: run on a probe, value and gradient, beside every activation the C
library has. What stays unknown is called as the model wrote it, between two grouped matmuls.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .. import autograd, ops
from ..quant import linears
from ..quant.tensor import QuantTensor
from .log import _said as _said
from .log import logger as logger
from .log import say_once as say_once
from .probes import ProbeError, isolated


class Layer(NamedTuple):
    """How to run one experts module. act None: its own activation, composed; own True: its own forward."""

    act: int | None = None
    flags: int = ops.SKIP_E
    alpha: float = 0.0
    limit: float = 0.0
    gate: bool = True
    bias: bool = False
    norm: bool = False
    identity: bool = False  # experts from E on hand back what they read (LongCat-Flash)
    own: bool = False
    attributes: int = 0  # how many the module had when it was looked at; 0: this is not remembered
    watched: tuple[tuple[str, Any], ...] = ()  # what the activation was read from
    why: str = ""

    @property
    def path(self) -> str:
        return "own" if self.own else "composed" if self.norm or self.act is None else "fused"


# ---- activations ----------------------------------------------------------------------------------------------------

_GATED = {"silu": ops.SWIGLU, "gelu": ops.GEGLU, "gelu_tanh": ops.GEGLU_TANH, "relu": ops.REGLU}
_PLAIN = {"silu": ops.SILU, "gelu": ops.GELU, "gelu_tanh": ops.GELU_TANH, "relu": ops.RELU, "relu2": ops.RELU2}
_BY_TYPE = {
    "SiLU": "silu", "SiLUActivation": "silu", "silu": "silu", "GELUActivation": "gelu", "gelu": "gelu", "ReLU": "relu",
    "relu": "relu", "PytorchGELUTanh": "gelu_tanh", "GELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}  # fmt: skip
_OWNERS = ("torch.nn.modules.activation", "torch.nn.functional", "transformers.activations", "torch._C._nn")


def activation_name(fn: Any) -> str | None:
    """silu, gelu, gelu_tanh, relu or relu2, when fn is one of torch's or transformers' own."""
    kind = fn if callable(fn) and not isinstance(fn, nn.Module) else type(fn)
    if getattr(kind, "__module__", None) not in _OWNERS:
        return None
    if kind.__name__ == "GELU":
        return "gelu_tanh" if fn.approximate == "tanh" else "gelu"
    return _BY_TYPE.get(kind.__name__)


def _candidates(gate: bool, alphas: Sequence[float], limits: Sequence[float]) -> list[tuple[int, int, float, float]]:
    if not gate:
        return [(act, 0, 0.0, 0.0) for act in _PLAIN.values()]
    found = [(act, 0.0, 0.0) for act in _GATED.values()]
    for limit in limits:
        found += [(ops.SWIGLU_CLAMP, 0.0, limit), (ops.SWIGLU_CLAMP_OUT, 0.0, limit)]
        found += [(ops.SWIGLU_OAI, alpha, limit) for alpha in alphas]
    return [(act, flags, alpha, limit) for flags in (0, ops.INTERLEAVED) for act, alpha, limit in found]


class _Reads(TorchFunctionMode):
    """Sees whether an operation is given one of these tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.tensors, self.seen = {id(t) for t in tensors}, False

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.seen = self.seen or any(id(leaf) in self.tensors for leaf in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def activation_by_result(fn: Callable[[Tensor], Tensor], gate: bool, width: int, module: nn.Module) -> tuple | None:
    """(act, flags, alpha, limit) of the one activation whose value and gradient on a probe are fn's; None: no such one.
    ProbeError: fn could not be run on it."""
    return isolated(partial(_by_result, fn, gate, width, module))


@torch.enable_grad()
def _by_result(fn: Callable[[Tensor], Tensor], gate: bool, width: int, module: nn.Module) -> tuple | None:
    values = {name: float(v) for name, v in vars(module).items() if type(v) in (int, float) and 0 < v < 1e6}
    limits = {v for name, v in values.items() if "limit" in name} or {7.0}
    alphas = {v for name, v in values.items() if "alpha" in name} or {1.702}
    g = torch.Generator().manual_seed(1)
    scale = torch.tensor([0.5, 3.0, *(2.0 * v for v in limits)]).repeat_interleave(16)[:, None]
    h = (torch.randn(len(scale), 2 * width if gate else width, generator=g) * scale).requires_grad_()
    known = (*module.parameters(), *module.buffers()) if isinstance(module, nn.Module) else ()
    try:
        with _Reads(known) as reads:
            want = fn(h)
        if not isinstance(want, Tensor) or (want.dtype, want.shape, want.requires_grad) != (torch.float32, (len(scale), width), True):
            return None
        if reads.seen:  # a learned slope, say: it may have another value tomorrow, and a gradient
            return None
        (dwant,) = torch.autograd.grad(want.sum(), h)
    except (RuntimeError, ValueError, IndexError, AssertionError) as problem:  # what torch and models raise for a shape or a device
        raise ProbeError(f"its activation could not be tried out ({type(problem).__name__}: {problem})") from problem
    for candidate in _candidates(gate, sorted(alphas), sorted(limits)):
        got = ops.activation(h.detach(), *candidate)
        dgot = ops.activation_backward(h.detach(), torch.ones_like(got), *candidate)
        if torch.allclose(got, want, 1e-5, 1e-5) and torch.allclose(dgot, dwant, 1e-4, 1e-4):
            return candidate
    return None


_MODULES = {"silu": nn.SiLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh"), "relu": nn.ReLU()}


def _of_a_twin(cls: type[nn.Module], attributes: tuple[tuple[str, Any], ...], act: str | None, width: int) -> tuple | None:
    """activation_by_result of the _apply_gate of a module of this class with these attributes. torch.compile, while it traces, runs what
    is marked as a constant as it is. It is given constants alone: a module would tie the graph to itself, and every layer have its own."""
    twin = cls.__new__(cls)
    nn.Module.__init__(twin)
    vars(twin).update(attributes)
    if act is not None:
        twin.act_fn = _MODULES[act]
    try:
        return activation_by_result(twin._apply_gate, True, width, twin)
    except (ProbeError, AttributeError) as problem:  # it reads more than that
        logger.info("%s: %s; torch.compile has it called between two grouped matmuls", cls.__name__, problem)
        return None


_of_a_twin._dynamo_marked_constant = True  # torch.compiler.assume_constant_result without importing the compiler


# ---- experts modules with stacked weights -----------------------------------------------------------------------------

_FLAGS = {"has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm"}
_READ = ("act_fn", "alpha", "limit", "swiglu_alpha", "swiglu_limit")


def quantized(module: nn.Module) -> str:
    """Why a module keeps its own forward for what its weights are."""
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters()})
    return f"its weights are quantized or not stacked ({', '.join(kinds)})"


def _weights(module: nn.Module) -> list[Tensor]:
    names = "gate_up_proj" if vars(module).get("has_gate", True) else "up_proj", "down_proj"
    return [w for w in (getattr(module, name, None) for name in names) if w is not None]


def _shape(w: Tensor) -> Sequence[int]:
    return getattr(w, "ds_shape", w.shape)  # ZeRO-3 has it in parts


def misfit(module: nn.Module) -> str:
    """Why a transformers v5 experts module keeps its own forward; "" where it need not."""
    unknown = sorted(n for n in vars(module) if n.startswith(("has_", "is_")) and n not in _FLAGS)
    if unknown:
        return f"it has the flag {', '.join(unknown)}, which fusedmoe does not know"
    w = _weights(module)
    return "" if [len(_shape(t)) for t in w] == [3, 3] and w[0].dtype in ops.DTYPES else quantized(module)


def _probed(module: nn.Module, gate: bool, width: int) -> tuple | None:
    if not torch.compiler.is_compiling():
        return activation_by_result(module._apply_gate if gate else module.act_fn, gate, width, module)
    own, fn = vars(module), getattr(module, "act_fn", None)
    act = activation_name(fn)
    if not gate or "_apply_gate" in own or (fn is not None and act not in _MODULES):
        return None  # composed in this graph
    kinds = int, float, bool, str, type(None)
    named = [(n, v) for n, v in own.items() if not n.startswith("_") and n not in ("training", "layer_idx") and type(v) in kinds]
    return _of_a_twin(type(module), tuple((n, *autograd._fixed(v)) for n, v in named), act, width)


def look_at(module: nn.Module) -> Layer:
    """The Layer of a transformers v5 experts module, remembered on it."""
    own, name, why = vars(module), type(module).__name__, misfit(module)
    if why:
        say_once(f"{name}: {why}: it keeps its own forward")
        return Layer(own=True, why=why)
    gate = own.get("has_gate", True)
    bias, norm = own.get("has_bias", False), own.get("has_post_expert_norm", False)
    flags = ops.SKIP_E | (ops.TRANSPOSED if own.get("is_transposed", False) else 0) | (ops.BIAS if bias else 0)
    if name == "GptOssExperts":  # (up + 1) * glu does not vanish with small weights: transformers' tests see where it rounds
        flags |= ops.ROUND_STEPS
    watched = tuple((n, getattr(module, n)) for n in _READ if hasattr(module, n))
    layer = Layer(None, flags, 0.0, 0.0, gate, bias, norm, attributes=len(own) + ("_fmoe_layer" not in own), watched=watched)
    width = _shape(_weights(module)[1])[1 if flags & ops.TRANSPOSED else 2]
    default = getattr(getattr(type(module), "_apply_gate", None), "__name__", None) == "_default_apply_gate"
    act = activation_name(getattr(module, "act_fn", None)) if default or not gate else None
    if act in (_GATED if gate else _PLAIN):
        layer = layer._replace(act=(_GATED if gate else _PLAIN)[act], why="its activation is known by its type")
    else:
        try:
            found = _probed(module, gate, int(width))
        except ProbeError as problem:  # it is tried again in the next call
            say_once(f"{name}: {problem}; it is called between two grouped matmuls")
            return layer._replace(attributes=0, why=str(problem))
        layer = layer._replace(why=f"its activation is {'known by its result' if found else 'not one of ours'}")
        if found:
            layer = layer._replace(act=found[0], flags=flags | found[1], alpha=found[2], limit=found[3])
    if norm:
        layer = layer._replace(why="it has a norm after each expert")
    if not torch.compiler.is_compiling():
        module._fmoe_layer = layer
    return layer


def is_v5_experts(module: nn.Module) -> bool:
    """Whether transformers' decorator made this module's forward one that asks ExpertsInterface."""
    return hasattr(type(module).forward, "__wrapped__") and hasattr(module, "_apply_gate") and hasattr(module, "config")


def known(module: nn.Module) -> Layer | None:
    """The remembered Layer, unless the module has changed."""
    layer = vars(module).get("_fmoe_layer")
    if layer is None or torch.compiler.is_compiling():
        return layer
    same = len(vars(module)) == layer.attributes and all([getattr(module, n) is v for n, v in layer.watched])
    return layer if same else None


def by_name(layer: Layer) -> Layer:
    """The Layer of a module whose implementation is fusedmoe_composed."""
    return layer if layer.own else layer._replace(act=None, why="its experts_implementation asks for it")


def layer_of(module: nn.Module, composed: bool = False) -> Layer:
    """The Layer to run, looked at where it is not known. composed: the model's own activation, whatever it is."""
    layer = known(module)
    if layer is not None and not composed:
        return layer
    new, layer = layer is None, layer or look_at(module)
    layer = by_name(layer) if composed else layer
    if new and layer.attributes:  # the others have been said
        words = ", ".join(traits(layer.act, _weights(module)[0]))
        say_once(f"{type(module).__name__}: {layer.path} ({words}): {layer.why}", logging.INFO)
    return layer


_ACTS = {
    ops.SWIGLU: "SwiGLU", ops.GEGLU: "GeGLU", ops.GEGLU_TANH: "GeGLU-tanh", ops.REGLU: "ReGLU", ops.SWIGLU_CLAMP: "SwiGLU-clamp",
    ops.SWIGLU_OAI: "SwiGLU-OAI", ops.SWIGLU_CLAMP_OUT: "SwiGLU-clamp-out", ops.SILU: "SiLU", ops.GELU: "GELU",
    ops.GELU_TANH: "GELU-tanh", ops.RELU: "ReLU", ops.RELU2: "ReLU2", None: "own activation",
}  # fmt: skip
_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}


def traits(act: int | None, w: Tensor) -> tuple[str, str, str]:
    """An activation, and the dtype and the device of a weight, in words."""
    dtype = w.format.name if isinstance(w, QuantTensor) else _DTYPES.get(w.dtype) or str(w.dtype).removeprefix("torch.")
    return _ACTS[act], dtype, w.device.type


KEEP = {"all": ops.KEEP_ALL, "lean": ops.KEEP_LEAN, "nothing": ops.RECOMPUTE}


def kept_by(module: nn.Module) -> int:
    """The flags of apply(model, keep=..., same_bits=...) for this module: what its forward keeps, whether its bits depend on the batch."""
    return vars(module).get("_fmoe_keep", 0)


def experts_of(module: nn.Module) -> Callable:
    """``autograd.experts``, or, where the experts of the module are spread over ranks, the same with an exchange."""
    spread = vars(module).get("_fmoe_ep")
    if spread is None:
        return autograd.experts
    from ..distributed.experts import experts  # which is not imported where nothing is spread

    return partial(experts, ep=spread)


def run(module: nn.Module, layer: Layer, hidden_states: Tensor, ids: Tensor, p: Tensor, lora: Sequence = (),
        w: Sequence[Tensor] | None = None) -> Tensor:  # fmt: skip
    """The experts of module on hidden_states [..., H], ids and p [T,k] (or p [T,E]); lora as in ``autograd.experts``."""
    if w is None:
        up, down = (module.gate_up_proj if layer.gate else module.up_proj), module.down_proj
        w = [up[: len(down)] if layer.identity else up, down]
        if layer.bias:
            w += [module.gate_up_proj_bias if layer.gate else module.up_proj_bias, module.down_proj_bias]
    x = hidden_states if hidden_states.dim() == 2 else hidden_states.reshape(-1, hidden_states.shape[-1])
    if p.shape[1] != ids.shape[1]:  # scattered over all experts, as transformers 5.0 does
        p = p.gather(1, ids)
    kept = None
    if layer.identity:
        E = ops.layer_sizes(w, layer.act or 0, layer.flags)[2]
        kept, ids = x * (p * (ids >= E)).sum(1, keepdim=True).to(x.dtype), ids.clamp(max=E)
        lora = [factors and (*(t[:E] for t in factors[:2]), *factors[2:]) for factors in lora]
    if "_fmoe_ep" in vars(module) and (layer.act is None or layer.norm):
        raise NotImplementedError(f"{type(module).__name__}: its experts are spread over ranks, and {layer.why}")
    if layer.act is not None and not layer.norm:
        flags = layer.flags if x.is_cpu and w[0].dtype == torch.bfloat16 else layer.flags & ~ops.ROUND_STEPS
        if kept is None and x.device.type == "npu" and not (dist.is_initialized() and dist.get_world_size() > 1):
            flags &= ~ops.SKIP_E  # skip marks come from expert parallelism only, and cost ten more launches on an NPU
        out = experts_of(module)(x, ids, p, w, layer.act, flags | kept_by(module), layer.alpha, layer.limit, lora)
    else:
        out = _composed(module, layer, x, ids, p, w)
    out = out if kept is None else out + kept
    return out if hidden_states.dim() == 2 else out.view(hidden_states.shape)


def _composed(module: nn.Module, layer: Layer, x: Tensor, ids: Tensor, p: Tensor, w: list[Tensor]) -> Tensor:
    """Grouped matmuls, and between them the model's own operations: each value is rounded where the model's own code rounds it."""
    up, down, *bias = w
    if not layer.flags & ops.TRANSPOSED:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    b1, b2 = bias or (None, None)
    E, dtype = up.shape[0], autograd.compute_dtype(x, up)
    rows, row_map, counts = autograd.permute(x.to(dtype), ids, E)
    expert = ids.reshape(-1).sort().values.clamp(max=E - 1) if bias else None  # of each row

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = autograd.GmmFunction.apply(rows, weight, counts)
        if bias is None:
            return y
        wide = torch.promote_types(bias.dtype, torch.float32)  # indexing sums the gradient in the dtype of what is indexed
        return y + bias.to(wide)[expert].to(dtype)

    h = linear(rows, up, b1)
    y = linear(module._apply_gate(h) if layer.gate else module.act_fn(h), down, b2)
    if layer.norm:
        y = module.post_expert_norm(y)
    slots = autograd.unpermute(y, row_map, torch.ones_like(p).view(-1, 1))  # zeros where a slot is skipped
    return (slots.view(*p.shape, x.shape[1]) * p.unsqueeze(-1)).sum(1).to(x.dtype)


# ---- experts in a list of modules of their own (transformers v4) ---------------------------------------------------------

_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def list_names(experts: nn.Module) -> tuple[str, str, str] | None:
    """The names of gate, up and down when experts is a list of gated MLPs, else None."""
    listed = experts if isinstance(experts, nn.ModuleList) else ()
    first = next((e._modules for e in listed if type(e) is not nn.Identity), {})  # Identity: another rank's, or an expert that does nothing
    return next((names for names in _NAMES if all(n in first for n in names)), None)


def hooked(module: nn.Module) -> bool:
    """Whether somebody sees or changes what goes through it: a function of ours would not call it."""
    own = vars(module)
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return bool(hooks) or "forward" in own


def list_weights(block: nn.Module) -> tuple[list[Tensor], Sequence] | None:
    """gates, ups, downs of all experts of a block, and their LoRA factors as ``autograd.experts`` takes them; None where an expert has
    hooks, or a Linear is not plain: wrapped in something else than PEFT's LoRA, quantized in a way that is not read, with bias or hooks."""
    from . import peft  # which imports this module

    w, adapters = [], []
    listed = [e for e in block.experts._modules.values() if type(e) is not nn.Identity]
    if any([hooked(e) for e in listed]):
        return None
    modules = [e._modules for e in listed]
    for name in list_names(block.experts) or ("",):
        for m in modules:
            linear, adapter = peft.look_through(m.get(name))
            if linear is None or hooked(linear):
                return None
            weight = linear._parameters.get("weight") if type(linear) is nn.Linear else linears.weight_of(linear)
            if weight is None or linear._parameters.get("bias") is not None or weight.dtype not in ops.DTYPES:
                return None
            w.append(weight)
            adapters.append(adapter)
    lora = peft.stack(adapters) if any(adapters) else ()
    return None if lora is None or (lora and w[0].device.type == "npu") else (w, lora)  # which has adapters beside stacks only


def gated_activation(module: nn.Module) -> int | None:
    """The code of act(gate) * up for a module with act_fn; None: not one of ours."""
    fn = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    name = activation_name(fn)
    if name not in _GATED and callable(fn):
        found = activation_by_result(fn, False, 8, module)
        name = next((n for n, code in _PLAIN.items() if found and code == found[0]), None)
    return _GATED.get(name or "")
