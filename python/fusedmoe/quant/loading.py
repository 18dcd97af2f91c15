# SPDX-License-Identifier: Apache-2.0
"""``from_pretrained(..., quantization_config=fusedmoe.QuantConfig("nf4"))``: experts are quantised as they are loaded, or kept as a
quantised checkpoint holds them. transformers calls a quantizer for one parameter at a time, after it has stacked the experts of a
checkpoint: of the model in 16 bits there is never more than one stack."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from . import keeping, linears, stacks, state
from . import model as models
from .formats import FORMATS, by_name

METHOD, STORED = "fusedmoe", "stored"
_FLOATS = torch.float32, torch.bfloat16, torch.float16


class QuantConfig(QuantizationConfigMixin):
    """How the stacked experts of a model are held, for ``from_pretrained(..., quantization_config=...)``.

    format: a name as ``fusedmoe.quantize`` takes it: 16-bit experts become that while they are loaded. None: a checkpoint that is
    quantised already (gpt-oss' MXFP4, FP8 in blocks, compressed-tensors, GPTQ, AWQ) keeps its experts as they are.
    linears: a config of transformers (``BitsAndBytesConfig``) for the other Linears; only with a format.
    skip: a part of the names of experts modules that stay as they are, or several.
    """

    def __init__(self, format: str | None = None, linears: Any = None, skip: str | Sequence[str] = (), **rest: Any) -> None:
        rest.pop("quant_method", None)
        if rest:
            raise TypeError(f"QuantConfig: unknown arguments {', '.join(rest)}")
        if format not in (None, STORED):
            by_name(format)
        if format is None and linears is not None:
            raise ValueError("QuantConfig: linears without a format; a checkpoint that is quantised already says how its Linears are held")
        skip = [skip] if isinstance(skip, str) else [*(skip or ())] if isinstance(skip, (Sequence, type(None))) else [skip]
        if not all(isinstance(word, str) for word in skip):
            raise TypeError(f"QuantConfig: skip is {skip}, expected parts of names")
        if not isinstance(linears, (dict, type(None))) and (not hasattr(linears, "quant_method") or isinstance(linears, QuantConfig)):
            raise TypeError(f"QuantConfig: linears is a {type(linears).__name__}, expected a config of transformers (BitsAndBytesConfig)")
        self.quant_method = METHOD
        self.format, self.skip = format, skip
        self.linears = auto.AutoQuantizationConfig.from_dict(linears) if isinstance(linears, dict) else linears
        self.stored: Any = None  # the config of a checkpoint that is quantised already
        self.own_form = False  # what is saved is not such a checkpoint any more: some of it was decoded

    def to_dict(self) -> dict[str, Any]:
        """What a saved config.json holds: where experts are as the checkpoint had them, its own."""
        if self.stored is not None and not self.own_form:
            return self.stored if isinstance(self.stored, dict) else self.stored.to_dict()
        linears = self.linears.to_dict() if self.linears is not None else None
        return {"quant_method": METHOD, "format": self.format or STORED, "skip": self.skip, "linears": linears}

    def get_loading_attributes(self) -> dict[str, Any]:
        """None: a config that was saved says everything."""
        return {}


class _Quantise(ConversionOps):
    """What transformers does with a parameter that needs quantising."""

    def __init__(self, quantizer: "Quantizer") -> None:
        self.hf_quantizer = quantizer

    def convert(self, input_dict: dict, full_layer_name: str = "", model: Any = None, **kwargs: Any) -> dict:  # type: ignore[override]
        made = {}
        for name, given in input_dict.items():
            value = given[0] if isinstance(given, list) else given
            found = self.hf_quantizer.stack_of(model, name)
            if found is None:
                inner = self.hf_quantizer.inner.get_quantize_ops()
                made |= inner.convert({name: given}, full_layer_name=full_layer_name, model=model, **kwargs)
                continue
            (module, leaf), format = found, self.hf_quantizer.config.format
            q = linears.matrix(value, format) if type(module) is nn.Linear else stacks.quantised(module, leaf, value, format)
            made[name] = nn.Parameter(q, requires_grad=False)
        return made


class _Join(ConversionOps):
    """A stack, from the tensors that ``save_pretrained`` wrote."""

    def __init__(self, quantizer: "Quantizer") -> None:
        self.hf_quantizer = quantizer  # by this attribute transformers knows to leave dtypes alone

    def convert(self, input_dict: dict, full_layer_name: str = "", model: Any = None, **kwargs: Any) -> dict:  # type: ignore[override]
        parts = {_part(pattern): given[0] if isinstance(given, list) else given for pattern, given in input_dict.items()}
        if [*parts] == ["codes"] and parts["codes"].is_floating_point():  # a stack that was skipped
            return {full_layer_name: parts["codes"]}
        try:
            made = state.read(parts.pop("codes", torch.empty(0, dtype=torch.uint8)), **parts)
        except ValueError as problem:
            raise ValueError(f"{full_layer_name}: {problem}") from problem
        module, _, leaf = full_layer_name.rpartition(".")
        like = model.get_submodule(module)._parameters[leaf].dtype if model is not None else made.dtype
        made = made.map(lambda t: t, like) if like in _FLOATS else made
        return {full_layer_name: nn.Parameter(made, requires_grad=False)}


def _part(pattern: str) -> str:
    last = pattern.removesuffix("$").rsplit(".", 1)[-1]
    return last if last in state.PARTS else "codes"


def _owner(path: str, name: str) -> tuple[str, str]:
    """A parameter's name in checkpoints, as a pattern, and in a model, from its module's name on."""
    owner = path.rsplit(".", 1)[-1]
    return rf"\.{owner}\.{name}", f".{owner}.{name}"


def _of_list(path: str) -> tuple[str, str]:
    """The same of the weight of a Linear of any expert in a list."""
    experts, _, name = path.split(".")[-3:]
    return rf"\.{experts}\.(\d+)\.{name}\.weight", rf".{experts}.\1.{name}.weight"


class Quantizer(HfQuantizer):
    """The quantizer of a QuantConfig. inner: that of the other Linears, or of the checkpoint as it is."""

    requires_calibration = False

    def __init__(self, quantization_config: QuantConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.config = quantization_config
        self.keeps = quantization_config.stored is not None
        if self.config.format in (None, STORED) and not self.keeps and not self.pre_quantized:
            raise ValueError(f"QuantConfig(): the checkpoint is not quantised; expected a format: {', '.join(FORMATS)}")
        self.names, self.decoded, self.block = stacks.NAMES, False, (128, 128)
        self._found: dict[str, tuple[str, ...]] = {}  # the names of a module's stacks
        self.inner: Any = None
        if self.keeps:
            if not hasattr(HfQuantizer, "serialized_names"):
                raise NotImplementedError(f"QuantConfig(): transformers is {transformers.__version__}, expected 5.23 or later")
            self.inner = keeping.inner_quantizer(self.config.stored)
            self.block = keeping.block_of(self.inner)
        elif self.config.linears is not None:
            self.inner = auto.AutoHfQuantizer.from_config(self.config.linears, pre_quantized=self.pre_quantized)

    # ---- which parameters ------------------------------------------------------------------------------------------------
    def stack_of(self, model: Any, name: str) -> tuple[nn.Module, str] | None:
        """The module and the name in it, where a parameter is a stack of ours, or of a Linear in a list of experts."""
        path, _, leaf = name.rpartition(".")
        if any(word in path for word in self.config.skip):
            return None
        module = model.get_submodule(path)
        if path not in self._found:
            self._found[path] = ("weight",) if linears.is_listed(model, path) else (*stacks.forms(module),)
        return (module, leaf) if leaf in self._found[path] else None

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return self.stack_of(model, param_name) is not None or self._inner("param_needs_quantization", False, model, param_name, **kwargs)

    def _inner(self, method: str, otherwise: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, method)(*args, **kwargs) if self.inner is not None else otherwise

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """For device_map="auto"."""
        if self.config.format and self.stack_of(model, param_name):
            return stacks.bytes_a_weight(self.config.format)
        return self._inner("param_element_size", param.element_size(), model, param_name, param)

    # ---- before, while and after loading -----------------------------------------------------------------------------------
    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("QuantConfig: device_map has 'disk'; quantised experts cannot be offloaded to it")
        self._inner("validate_environment", None, *args, **kwargs)

    def update_device_map(self, device_map: Any) -> Any:
        return self._inner("update_device_map", device_map, device_map)

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._inner("update_dtype", dtype, dtype)

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.owners = sorted({_owner(path, name) for path, m in model.named_modules() for name in stacks.forms(m)})
        self.owners += sorted({_of_list(path) for path, m in model.named_modules() if linears.is_listed(model, path)})
        if not self.owners:
            raise ValueError(f"QuantConfig: {type(model).__name__} has no stacked experts that fusedmoe knows")
        self._inner("_process_model_before_weight_loading", None, model, **kwargs)
        return model

    def get_quantize_ops(self) -> Any:
        return _Quantise(self)

    def update_weight_conversions(self, weight_conversions: list, model: Any = None) -> list:
        if self.keeps:
            return keeping.keep(self.inner.update_weight_conversions(weight_conversions, model), self)
        return self.get_weight_conversions() + list(weight_conversions)

    def get_weight_conversions(self) -> list:
        found = self._inner("get_weight_conversions", [])
        for source, target in self.owners if self.pre_quantized else ():
            sources = [rf"{source}{part}$" for part in ("", *(rf"\.{part}" for part in state.PARTS))]
            found = [WeightConverter(sources, target, [_Join(self)]), *found]
        return found

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self._inner("_process_model_after_weight_loading", None, model, **kwargs)
        linears.wrap(model)
        models.watch(model)
        mark(model, self)
        from ..integrations.transformers import apply

        return apply(model)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict | None, dict]:
        """For ``save_pretrained``: where something else was decoded, experts are written as ``quantize`` has them."""
        self.config.own_form = self.keeps and self.decoded
        if not self.config.own_form:
            return self._inner("get_state_dict_and_metadata", (None, {}), model) if not self.keeps else (None, {})
        with models.own_names(model):
            return model.state_dict(), {}

    # ---- what a model with such experts can do --------------------------------------------------------------------------------
    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return self.inner is None or self.keeps or self.inner.is_compileable

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        if self.inner is not None and not self.keeps:
            model = self.inner._dequantize(model, dtype)
        return models.dequantize(model)


def _undone(conversion: Any) -> bool:
    """Whether ``save_pretrained`` should not undo it: it makes stacks of experts, or a quantizer decodes by it."""
    operations = getattr(conversion, "operations", ())
    of_experts = any(t.rsplit(".", 1)[-1] in stacks.NAMES for t in conversion.target_patterns)
    return bool(operations) and (of_experts or any(getattr(op, "hf_quantizer", None) is not None for op in operations))


def mark(model: Any, quantizer: Quantizer | None = None, format: str | None = None) -> None:
    """Let ``save_pretrained`` write the experts of a model as they are, and a config by which they are found again."""
    if not hasattr(model, "save_pretrained") or getattr(model, "config", None) is None:
        return
    if quantizer is None:
        if getattr(model, "hf_quantizer", None) is not None:
            return  # another's, which sees to the rest of the model
        quantizer = Quantizer(QuantConfig(format), pre_quantized=True)
        model.hf_quantizer, model.config.quantization_config, model.is_quantized = quantizer, quantizer.config, True
        model.quantization_method = METHOD
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        conversions = [c for c in get_model_conversion_mapping(model, add_legacy=False) if type(c).__name__ != "PrefixChange"]
    if "_fmoe_conversions" not in vars(model):  # those that cut stacks into experts again are for plain ones
        model._fmoe_conversions = getattr(model, "_weight_conversions", None)
    model._weight_conversions = [c for c in conversions if not _undone(c)]


def unmark(model: Any) -> None:
    """Undo ``mark``: the experts are plain."""
    quantizer = getattr(model, "hf_quantizer", None)
    if "_fmoe_conversions" in vars(model):
        before = vars(model).pop("_fmoe_conversions")
        if before is None:
            vars(model).pop("_weight_conversions", None)
        else:
            quantizers = [c for c in before if any(getattr(op, "hf_quantizer", None) is not None for op in getattr(c, "operations", ()))]
            model._weight_conversions = [c for c in before if c not in quantizers] if not quantizers else None
    if isinstance(quantizer, Quantizer) and (quantizer.inner is None or quantizer.keeps):
        quantizer.remove_quantization_config(model)
        for module in model.modules():
            if hasattr(module, "config") and hasattr(module.config, "_is_quantized"):
                del module.config._is_quantized


def _merge(cls: type, quantization_config: Any, quantization_config_from_args: Any) -> Any:
    """AutoHfQuantizer.merge_quantization_configs: ours says what to do with a checkpoint of another's."""
    ours = quantization_config_from_args
    found = quantization_config if isinstance(quantization_config, dict) else quantization_config.to_dict()
    if not isinstance(ours, QuantConfig):
        return _merged(quantization_config, ours)
    if found.get("quant_method") == METHOD:
        if ours.format not in (None, found["format"]):
            raise ValueError(f"QuantConfig: the format is {ours.format!r}, but the checkpoint holds its experts as {found['format']!r}")
        return QuantConfig(**found)
    if ours.format is not None:
        raise ValueError(f"QuantConfig: the format is {ours.format!r}, but the checkpoint is quantised already "
                         f"({found.get('quant_method')}); QuantConfig() keeps its experts as they are")  # fmt: skip
    made = copy.copy(ours)
    made.stored = quantization_config
    return made


_merged: Any = None


def register() -> None:
    """Put QuantConfig into transformers' tables, once."""
    global _merged
    if METHOD in auto.AUTO_QUANTIZER_MAPPING:
        return
    auto.AUTO_QUANTIZER_MAPPING[METHOD] = Quantizer
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = QuantConfig
    _merged = auto.AutoHfQuantizer.merge_quantization_configs
    auto.AutoHfQuantizer.merge_quantization_configs = classmethod(_merge)


register()
