"""Layers that differ in nothing but their windows, and in whether they rotate queries and keys."""

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


def rotated_where(layers: Sequence[LayerSpec], rotates: Sequence[bool]) -> list[LayerSpec]:
    """Return the layers without the rotation of those for which `rotates` is False."""
    return [
        layer if is_rotated else replace(layer, attention=replace(layer.self_attention, rope=None))
        for layer, is_rotated in zip(layers, rotates, strict=True)
    ]
