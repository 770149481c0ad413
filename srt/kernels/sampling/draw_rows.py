"""Parameters with which the rows of a step draw their next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DrawRows:
    """The sampling parameters of R rows."""

    temperatures: torch.Tensor  # [R] float32; 0 is greedy
    seeds: torch.Tensor  # [R] int64: the 64 bits
    positions: torch.Tensor  # [R] int64: index in its sequence of the token that the row draws
    thresholds: torch.Tensor | None = None  # [R] float32: smallest logit / T that may be drawn; -inf if greedy
