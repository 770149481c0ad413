"""The layers of a stage, in a list of modules, and what is kept of the hidden states between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from srt.layers.ops import TORCH_OPS, Stream
from srt.utils.pipeline_stage import Stage

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch


def stage_layers(stage: Stage, make: Callable[[int], nn.Module]) -> nn.ModuleList:
    """Make the stage's layers. Each is named by its number in the whole model, as in the checkpoint, though the list begins at 0."""
    layers = nn.ModuleList()
    for layer_id in stage.layers:
        layers.add_module(str(layer_id), make(layer_id))
    return layers


def copy_received(batch: ForwardBatch) -> Tensor:
    """Return a copy of the hidden states from the stage before: the stream that enters a stage behind the first.

    Kernels of layers start before the ones before them have ended, and read at once what was written before the layers: lengths, tables,
    and keys of earlier steps. So the launch in front of the first layer must wait for all earlier ones, as that of an embedding does.
    """
    return batch.received * 1  # by a kernel, which a graph launches sooner than a copy


def note_input(layer: int, stream: Stream, batch: ForwardBatch) -> None:
    """Keep the stream before a layer for a head that drafts, if there is one and it reads this layer's input."""
    features = batch.token_to_kv_pool.features
    if features is not None and layer in features.taps:
        features.note(layer, TORCH_OPS.total(stream), batch.out_cache_loc)
