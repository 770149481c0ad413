"""The layers of a stage, in a list of modules."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from srt.utils.pipeline_stage import Stage


def stage_layers(stage: Stage, make: Callable[[int], nn.Module]) -> nn.ModuleList:
    """Make the stage's layers. Each is named by its number in the whole model, as in the checkpoint, though the list begins at 0."""
    layers = nn.ModuleList()
    for layer_id in stage.layers:
        layers.add_module(str(layer_id), make(layer_id))
    return layers
