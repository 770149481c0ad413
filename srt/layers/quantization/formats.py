"""Give the linear layers of a model the weights that its checkpoint's formats call for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from srt.layers.linear import LinearLayer
from srt.layers.moe.experts import ExpertLayers
from srt.layers.moe.packed_experts import PackedExperts
from srt.layers.quantization.fp8_weight import Fp8Weight
from srt.layers.quantization.int8_weight import Int8Weight
from srt.layers.quantization.int_weight import IntWeight
from srt.layers.quantization.mxfp4_weight import Mxfp4Weight
from srt.layers.quantization.weight import LinearWeight, Place
from srt.utils.model_error import ModelError
from srt.utils.quantization import WeightFormat, WeightFormats


def use_formats(model: nn.Module, formats: WeightFormats) -> None:
    """Replace the weights of quantised layers. Called on a model whose parameters are not allocated yet.

    ModelError if merged layers are stored differently, or if a group of weights would be split over ranks.
    """
    if formats.is_plain:
        return
    for path, layer in model.named_modules():
        if isinstance(layer, LinearLayer):
            places = layer.places(path)
            form = _common_format(places, formats)
            if form is not None:
                layer.weight = new_weight(form, places)
        elif isinstance(layer, ExpertLayers):
            _pack_experts(layer, path, formats)


def formats_in(module: nn.Module, path: str, formats: WeightFormats) -> tuple[WeightFormat | None, ...]:
    """Return the formats of the linear layers and of the experts in the module at this path, in their order; () if all are plain."""
    if formats.is_plain:
        return ()
    places: list[Place] = []
    for name, layer in module.named_modules(prefix=path):
        if isinstance(layer, LinearLayer):
            places.append(layer.places(name)[0])
        elif isinstance(layer, ExpertLayers):
            places += [of_experts[0][0] for of_experts in layer.places(name)]
    return tuple(formats.format_of(at.path) for at in places)


def _pack_experts(layer: ExpertLayers, path: str, formats: WeightFormats) -> None:
    gate_up, down = layer.places(path)
    # The first expert tells for all: if another one is stored otherwise, its tensors do not fit.
    form = _common_format([*gate_up[0], *down[0]], formats)
    if form is None:
        return
    new = partial(new_weight, form)
    layer.pack(PackedExperts(gate_up, new), PackedExperts(down, new))


def _common_format(places: Sequence[Place], formats: WeightFormats) -> WeightFormat | None:
    first = formats.format_of(places[0].path)
    for at in places[1:]:
        if formats.format_of(at.path) != first:
            raise ModelError(
                f"The checkpoint stores {places[0].path} and {at.path} in different formats, but they are multiplied as one:"
                " quantise them alike."
            )
    return first


def new_weight(form: WeightFormat, places: Sequence[Place]) -> LinearWeight:
    """Return this rank's weight: the outputs of all places, or the part of one place's inputs."""
    by_outputs = places[0].dim == 0
    num_outputs = sum(at.size for at in places) if by_outputs else places[0].num_outputs
    num_inputs = places[0].num_inputs if by_outputs else places[0].size
    return _kind_of(form)(form, num_outputs, num_inputs, places)


def _kind_of(form: WeightFormat) -> type[Fp8Weight | Int8Weight | IntWeight | Mxfp4Weight]:
    match form.layout:
        case "mxfp4":
            return Mxfp4Weight
        case "int8":
            return Int8Weight
    if form.is_float:
        return Fp8Weight
    return Int8Weight if form.layout == "plain" else IntWeight
