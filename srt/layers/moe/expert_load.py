"""The load of experts since it was last read: how many experts a step takes, and how unevenly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from srt.layers.moe.experts import ExpertLayers


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """The load of one layer's experts, over all steps since the last reading. Rows that pad a graph count too: their experts are read."""

    num_steps: int
    distinct: float
    """Experts that some token of a step took, on average over the steps."""
    peak: float
    """Tokens of the busiest expert, as a multiple of the mean over all experts."""


@torch.inference_mode()
def pop_expert_loads(model: nn.Module) -> list[LayerLoad]:
    """Return the load of each layer with experts, and start anew. Waits for the device. Empty if no step ran, or there are no experts."""
    layers = [module for module in model.modules() if isinstance(module, ExpertLayers)]
    if not layers:
        return []
    rows = torch.stack([layer.load for layer in layers]).tolist()
    for layer in layers:
        layer.load.zero_()
    return [_load_of(*row) for row in rows if row[-1]]


def _load_of(*row: int) -> LayerLoad:
    *counts, distinct, num_steps = row
    return LayerLoad(num_steps, distinct / num_steps, max(counts) * len(counts) / sum(counts))
