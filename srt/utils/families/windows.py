"""Layers that differ in nothing but their windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from srt.utils.layer_spec import FeedForward, LayerSpec, SelfAttention


def windowed_layers(
    attention: SelfAttention, feed_forward: FeedForward, windows: Sequence[int | None], **given: Any
) -> list[LayerSpec]:
    """Return a layer for each window; `given` are further fields of all of them."""
    return [LayerSpec(replace(attention, window=window), feed_forward, **given) for window in windows]
