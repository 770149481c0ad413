"""How a checkpoint stores the weights of its linear layers: `quantization_config` of config.json, read without torch.

What is read here is complete: a setting that would change the weights and is not read is refused with its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from srt.utils.config_values import flag, mapping, names, positive_int, shown
from srt.utils.model_error import ModelError

Layout = Literal["plain", "fp8", "compressed", "gptq", "awq", "mxfp4", "int8"]
"""The names and shapes of a layer's tensors: "plain" is one matrix that is quantised while it is loaded."""
ScaleShape = Literal["tensor", "channel", "block", "group"]
Activations = Literal["none", "static", "token", "group"]

WHAT_WORKS: Final = (
    "choose a checkpoint in fp8, compressed-tensors (float-, int- or pack-quantized), gptq, awq or mxfp4, or the"
    " unquantised one, which --quantization fp8 or int8 quantises while it is loaded"
)
LEAST_GROUP: Final = 32
"""Fewest inputs that share a scale in 4-bit weights."""
FP8_BLOCK: Final = 128
MXFP4_GROUP: Final = 32
KV_SCHEME: Final = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
"""The only quantization of keys and values that is read: fp8 with one scale per layer in the checkpoint."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the weights of some linear layers are stored."""

    layout: Layout
    num_bits: int
    scales: ScaleShape
    """What shares a scale: a whole layer, an output, 128 × 128 weights, or `group_size` inputs of an output."""
    group_size: int | None = None
    """Inputs that share a scale if `scales` is "group"; None: all inputs."""
    is_float: bool = False
    """Whether weights are e4m3 numbers; else they are unsigned integers less a zero point, or those of MXFP4."""
    has_zeros: bool = False
    """Whether the checkpoint has a zero point for each scale."""
    zero_offset: int = 0
    """What is added to stored zero points."""
    has_order: bool = False
    """Whether the checkpoint says of each input which group it is in (GPTQ's act-order)."""
    activations: Activations = "none"
    """How inputs are quantised: not, by a scale in the checkpoint, or by the largest input of a token or of 128 inputs of a token."""


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Patterns for the paths of linear layers."""

    patterns: tuple[str, ...]

    def match(self, path: str) -> bool:
        return any(_matches(pattern, path) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The formats of a checkpoint's linear layers. A layer that none is for is stored unquantised."""

    method: str | None = None
    """`quant_method` of the checkpoint, or the value of --quantization. None: no layer is quantised."""
    ignored: LayerNames = LayerNames(())
    groups: tuple[tuple[LayerNames, WeightFormat], ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether all weights are stored unquantised and stay so."""
        return not self.groups

    def format_of(self, path: str) -> WeightFormat | None:
        """Return the format of the linear layer at `path`; None if it is not quantised."""
        if self.ignored.match(path):
            return None
        return next((form for targets, form in self.groups if targets.match(path)), None)


PLAIN_FORMATS: Final = WeightFormats()
QUANTIZING: Final[Mapping[str, WeightFormat]] = {
    "fp8": WeightFormat("plain", 8, "channel", is_float=True, activations="token"),
    "int8": WeightFormat("plain", 8, "channel"),
}
"""Values of --quantization that quantise a plain checkpoint, and what its weights become."""
QUANTIZATIONS: Final = (*QUANTIZING, "compressed-tensors", "gptq", "awq", "mxfp4")
"""Values of --quantization. Those that do not quantise are for the user to say what the checkpoint is."""
_EVERY: Final = LayerNames(("re:.*",))
_EXPERTS: Final = LayerNames((r"re:.*\.experts\.",))
_SHARED_GATES: Final = LayerNames((r"re:.*\.shared_expert_gate$",))
"""Layers of one output, which is a weight of the whole shared expert."""


def read_formats(raw: Mapping[str, Any], asked: str | None = None) -> WeightFormats:
    """Return the formats of a checkpoint with this config.json; `asked` is the value of --quantization.

    ModelError names what is not supported, and what works instead.
    """
    quantization = mapping(raw, "quantization_config")
    formats = _formats_of(quantization) if quantization else PLAIN_FORMATS
    _check_patterns(formats)
    if asked is None or asked == formats.method:
        return formats
    if not formats.is_plain:
        raise ModelError(
            f"--quantization {asked}: the checkpoint is quantised with {formats.method}; leave the option out."
        )
    if asked not in QUANTIZING:
        raise ModelError(
            f"--quantization {asked}: the checkpoint is not quantised, and only {' and '.join(QUANTIZING)} quantise while"
            f" weights are loaded: use --quantization fp8 or int8, or a checkpoint in {asked}."
        )
    return WeightFormats(asked, _SHARED_GATES, ((_EVERY, QUANTIZING[asked]),))


def _formats_of(quantization: Mapping[str, Any]) -> WeightFormats:
    method = quantization.get("quant_method", "")
    match method:
        case "compressed-tensors":
            return _compressed(quantization)
        case "fp8":
            form, ignored = _fp8(quantization), names(quantization, "modules_to_not_convert")
            ignored = ignored or names(quantization, "ignored_layers")
        case "gptq":
            return _gptq(quantization)
        case "mxfp4":
            # The experts of gpt-oss; `modules_to_not_convert` lists everything else.
            form = WeightFormat("mxfp4", 4, "group", MXFP4_GROUP)
            return WeightFormats(method, LayerNames(()), ((_EXPERTS, form),))
        case "awq":
            form, ignored = _awq(quantization), names(quantization, "modules_to_not_convert")
        case _:
            raise ModelError(f"config.json: quantization_config {shown(method)} is not supported: {WHAT_WORKS}.")
    return WeightFormats(method, LayerNames(tuple(f"in:{name}" for name in ignored)), ((_EVERY, form),))


def _fp8(quantization: Mapping[str, Any]) -> WeightFormat:
    """The layout of Qwen3-FP8 and DeepSeek, with blocks; or one scale a layer."""
    _only(quantization, "fmt", "e4m3")
    is_static = _one_of(quantization, "activation_scheme", ("dynamic", "static")) == "static"
    block = quantization.get("weight_block_size")
    if block is None:
        return WeightFormat("fp8", 8, "tensor", is_float=True, activations="static" if is_static else "token")
    _check_block(block, "weight_block_size")
    if is_static:
        raise _refused("activation_scheme", "static", "with weight_block_size, only 'dynamic'")
    return WeightFormat("fp8", 8, "block", is_float=True, activations="group")


def _gptq(quantization: Mapping[str, Any]) -> WeightFormats:
    num_bits = _bits(quantization, "bits")
    if flag(quantization, "lm_head"):
        raise _refused("lm_head", True, "because output layers are not quantised; choose a checkpoint without it")
    stored = _one_of({"checkpoint_format": "gptq", **quantization}, "checkpoint_format", ("gptq", "gptq_v2"))
    form = WeightFormat(
        "gptq",
        num_bits,
        "group",
        _group_size(quantization.get("group_size")),
        has_zeros=True,
        zero_offset=1 if stored == "gptq" else 0,
        has_order=True,  # the tensor is there whatever `desc_act` says
    )
    ignored = []
    for pattern, changes in mapping(quantization, "dynamic").items():
        if not pattern.startswith("-:"):
            raise _refused(
                "dynamic", {pattern: changes}, "only patterns that begin with '-:', whose layers stay as they are"
            )
        ignored.append(f"re:{pattern[2:]}")
    listed = quantization.get("modules_in_block_to_quantize")
    targets = _EVERY
    if listed is not None:
        flat = listed
        if isinstance(listed, list):
            flat = [one for part in listed for one in (part if isinstance(part, list) else [part])]
        stated = names({"modules_in_block_to_quantize": flat}, "modules_in_block_to_quantize")
        targets = LayerNames(tuple(f"in:{name}" for name in stated))
    return WeightFormats("gptq", LayerNames(tuple(ignored)), ((targets, form),))


def _awq(quantization: Mapping[str, Any]) -> WeightFormat:
    num_bits = _bits(quantization, "bits" if "bits" in quantization else "w_bit", (4,))
    version = str(quantization.get("version") or "gemm").lower()
    if version != "gemm":
        raise _refused("version", version, "only 'gemm'")
    if quantization.get("zero_point") is False:
        raise _refused("zero_point", False, "only true")
    group = quantization.get("group_size", quantization.get("q_group_size"))
    return WeightFormat("awq", num_bits, "group", _group_size(group), has_zeros=True)


def _compressed(quantization: Mapping[str, Any]) -> WeightFormats:
    """The layouts of llm-compressor. Without groups, only keys and values are quantised."""
    for part in ("sparsity_config", "transform_config"):
        content = mapping(quantization, part)
        is_dense = part == "sparsity_config" and content.get("format") == "dense"  # measured, weights unchanged
        if content and not is_dense:
            raise ModelError(f"config.json: {part} of quantization_config is not supported: {WHAT_WORKS}.")
    groups = []
    for name, group in mapping(quantization, "config_groups").items():
        if not isinstance(group, dict):
            raise ModelError(f"config.json: {name} in quantization_config must be an object, not {shown(group)}.")
        layout = group.get("format") or quantization.get("format")
        targets = LayerNames(tuple(_EVERY.patterns[0] if one == "Linear" else one for one in names(group, "targets")))
        groups.append((targets, _compressed_group(group, layout)))
    if not groups or mapping(quantization, "kv_cache_scheme"):
        _check_kv_scheme(mapping(quantization, "kv_cache_scheme"))
    # A layer that is named wins over those that are meant by their class.
    groups.sort(key=lambda group: group[0] == _EVERY)
    return WeightFormats(
        "compressed-tensors" if groups else None, LayerNames(tuple(names(quantization, "ignore"))), tuple(groups)
    )


def _compressed_group(group: Mapping[str, Any], layout: object) -> WeightFormat:
    weights, inputs = mapping(group, "weights"), mapping(group, "input_activations")
    if mapping(group, "output_activations"):
        raise _refused("output_activations", group["output_activations"], "in config_groups")
    match layout, weights.get("type"):
        case (("float-quantized" | "naive-quantized"), "float"):
            return _compressed_float(weights, inputs)
        case "pack-quantized", "int":
            return _compressed_int(weights, inputs)
        case "int-quantized", "int":
            return _compressed_int8(weights, inputs)
    raise ModelError(
        f"config.json: config_groups with format {shown(layout)} and weights of type {shown(weights.get('type'))} in"
        f" quantization_config are not supported: {WHAT_WORKS}."
    )


def _compressed_float(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> WeightFormat:
    _bits(weights, "num_bits", (8,))
    _only(weights, "symmetric", True)
    strategy = _one_of(weights, "strategy", ("tensor", "channel", "block"))
    form = WeightFormat("compressed", 8, "tensor", is_float=True)
    if strategy == "block":
        _check_block(weights.get("block_structure"), "block_structure")
        form = replace(form, scales="block")
    elif strategy == "channel":
        form = replace(form, scales="channel")
    if not inputs:
        return form
    _bits(inputs, "num_bits", (8,))
    _only(inputs, "type", "float")
    _only(inputs, "symmetric", True)
    match inputs.get("strategy"), bool(inputs.get("dynamic")):
        case "token", True:
            return replace(form, activations="token")
        case "tensor", False:
            return replace(form, activations="static")
        case "group", True if inputs.get("group_size") == FP8_BLOCK:
            return replace(form, activations="group")
    raise ModelError(
        f"config.json: input_activations {shown(dict(inputs))} in quantization_config are not supported, only strategy"
        f" 'token' or 'group' of {FP8_BLOCK} with dynamic true, and 'tensor' with dynamic false."
    )


def _compressed_int(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> WeightFormat:
    if inputs:
        raise _refused("input_activations", dict(inputs), "with packed integers, only null")
    num_bits = _bits(weights, "num_bits")
    strategy = _one_of(weights, "strategy", ("channel", "group"))
    order = weights.get("actorder")
    if order not in (None, False, True, "group", "weight", "static"):
        raise _refused("actorder", order, "only 'group', 'weight' and 'static'")
    return WeightFormat(
        "compressed",
        num_bits,
        "group",
        _group_size(weights.get("group_size")) if strategy == "group" else None,
        has_zeros=weights.get("symmetric") is False,
        has_order=order in (True, "group"),
    )


def _compressed_int8(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> WeightFormat:
    _bits(weights, "num_bits", (8,))
    _only(weights, "symmetric", True)
    _one_of(weights, "strategy", ("channel",))
    form = WeightFormat("int8", 8, "channel")
    if not inputs:
        return form
    _bits(inputs, "num_bits", (8,))
    _only(inputs, "type", "int")
    _only(inputs, "symmetric", True)
    if inputs.get("strategy") != "token" or not inputs.get("dynamic"):
        raise _refused(
            "input_activations", dict(inputs), "with 8-bit integers, only strategy 'token' with dynamic true"
        )
    return replace(form, activations="token")


def _check_kv_scheme(scheme: Mapping[str, Any]) -> None:
    for key, readable in KV_SCHEME.items():
        value = scheme.get(key)
        has_default = key not in ("type", "num_bits")
        if value != readable and not (value is None and has_default):
            raise ModelError(
                f"config.json: {key} {shown(value)} in kv_cache_scheme of quantization_config is not supported, only {readable!r}."
            )


def _check_block(block: object, key: str) -> None:
    if block != [FP8_BLOCK, FP8_BLOCK]:
        raise _refused(key, block, f"only [{FP8_BLOCK}, {FP8_BLOCK}]")


def _group_size(value: object) -> int | None:
    """Return the size of a group; None for -1, by which all inputs share a scale."""
    if value == -1:
        return None
    size = positive_int({"group_size": value}, "group_size")
    if size % LEAST_GROUP:
        raise _refused("group_size", size, f"only multiples of {LEAST_GROUP}, and -1")
    return size


def _bits(values: Mapping[str, Any], key: str, supported: Sequence[int] = (4, 8)) -> int:
    value = values.get(key)
    if not isinstance(value, int) or value not in supported:
        raise _refused(key, value, f"only {' and '.join(map(str, supported))}")
    return value


def _only(values: Mapping[str, Any], key: str, value: object) -> None:
    if values.get(key) not in (None, value):
        raise _refused(key, values[key], f"only {value!r}")


def _one_of(values: Mapping[str, Any], key: str, supported: Sequence[str]) -> str:
    value = values.get(key, supported[0])
    if value not in supported:
        raise _refused(key, value, f"only {', '.join(map(repr, supported))}")
    return str(value)


def _refused(key: str, value: object, instead: str) -> ModelError:
    return ModelError(f"config.json: {key} {shown(value)} in quantization_config is not supported, {instead}.")


def _check_patterns(formats: WeightFormats) -> None:
    for layer_names in (formats.ignored, *(targets for targets, _ in formats.groups)):
        for pattern in layer_names.patterns:
            try:
                re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
            except (re.error, OverflowError, RecursionError) as error:
                raise ModelError(
                    f"config.json: {shown(pattern)} in quantization_config is no regular expression: {error}."
                ) from error


def _matches(pattern: str, path: str) -> bool:
    """Return whether a pattern is for a path: "re:" an expression for its beginning, "in:" whole parts of it, else the path itself."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], path) is not None
    if pattern.startswith("in:"):
        return f".{pattern[3:]}." in f".{path}."
    return pattern == path
