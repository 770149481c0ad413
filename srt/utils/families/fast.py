"""What the families have in common for whose layers there are fused kernels: pre-norm, one full rotation, a gated MLP with silu."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from srt.utils.layer_spec import FastPath, FeedForward, LayerSpec, SelfAttention


def windowed_layers(
    attention: SelfAttention, feed_forward: FeedForward, windows: Sequence[int | None]
) -> list[LayerSpec]:
    """Return layers that differ in nothing but their windows."""
    return [LayerSpec(dataclasses.replace(attention, window=window), feed_forward) for window in windows]


def fast_paths(layer: LayerSpec) -> tuple[FastPath, ...]:
    """Return "compiled" for every layer, and "resident" for those without biases and windows."""
    attention = layer.attention
    has_bias = attention.qkv_bias or attention.o_bias or layer.feed_forward.bias
    return ("compiled",) if has_bias or attention.window is not None else ("compiled", "resident")
