"""The load of experts since it was last read: how many experts a step takes, and how unevenly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from srt.layers.moe.experts import ExpertLayers

PERIOD_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """The load of one layer's experts, over all steps since the reading before. Rows that pad a graph count too: their experts are read."""

    num_steps: int
    distinct: float
    """Experts that some token of a step took, on average over the steps."""
    peak: float
    """Tokens of the busiest expert, as a multiple of the mean over all experts."""


class ExpertLoads:
    """Reads what a model's layers have counted since this object last read it."""

    def __init__(self, model: nn.Module) -> None:
        self._counted = [module for module in model.modules() if isinstance(module, ExpertLayers)]
        self._before = torch.zeros(0, dtype=torch.int64)
        self._coming: tuple[Tensor, torch.cuda.Event] | None = None
        self._next_s = float("-inf")

    def read(self) -> list[LayerLoad]:
        """Return the load of each layer with experts. Waits for the device. Empty if no step ran, or there are no experts."""
        return self._since_before(self._counts().cpu()) if self._counted else []

    def poll(self, now_s: float) -> list[LayerLoad]:
        """Return what `read` would have returned a moment ago, about once per PERIOD_S, and nothing otherwise. Never waits."""
        if self._coming is not None:
            counts, event = self._coming
            if not event.query():
                return []
            self._coming = None
            return self._since_before(counts)
        if now_s < self._next_s or not self._counted:
            return []
        self._next_s = now_s + PERIOD_S
        counts = self._counts()
        if not counts.is_cuda:
            return self._since_before(counts)
        fetched, event = torch.empty_like(counts, device="cpu", pin_memory=True), torch.cuda.Event()
        fetched.copy_(counts, non_blocking=True)
        event.record()
        self._coming = fetched, event
        return []

    @torch.inference_mode()
    def _counts(self) -> Tensor:
        return torch.stack([layer.load for layer in self._counted])

    def _since_before(self, counts: Tensor) -> list[LayerLoad]:
        since = counts - self._before if len(self._before) else counts
        self._before = counts
        return [_load_of(*row) for row in since.tolist() if row[-1]]


def _load_of(*row: int) -> LayerLoad:
    *counts, distinct, num_steps = row
    return LayerLoad(num_steps, distinct / num_steps, max(counts) * len(counts) / sum(counts))
