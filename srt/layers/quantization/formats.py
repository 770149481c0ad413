"""Give the linear layers of a model the weights that its checkpoint's formats call for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from srt.layers.linear import LinearLayer
from srt.layers.quantization.fp8_weight import Fp8Weight
from srt.layers.quantization.int_weight import IntWeight
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
                layer.weight = _new_weight(form, layer.weight.shape, places)


def _common_format(places: Sequence[Place], formats: WeightFormats) -> WeightFormat | None:
    first = formats.format_of(places[0].path)
    for at in places[1:]:
        if formats.format_of(at.path) != first:
            raise ModelError(
                f"The checkpoint stores {places[0].path} and {at.path} in different formats, but they are multiplied as one:"
                " quantise them alike."
            )
    return first


def _new_weight(form: WeightFormat, shape: tuple[int, int], places: Sequence[Place]) -> LinearWeight:
    kind = Fp8Weight if form.is_float else IntWeight
    return kind(form, *shape, places)
