"""The fast paths of layers for which there are fused kernels: pre-norm, one full rotation, a gated MLP with silu."""

from __future__ import annotations

from srt.utils.layer_spec import FastPath, LayerSpec


def fast_paths(layer: LayerSpec) -> tuple[FastPath, ...]:
    """Return "compiled" for every layer, and "resident" for those without biases and windows."""
    attention = layer.attention
    has_bias = attention.qkv_bias or attention.o_bias or layer.feed_forward.bias
    return ("compiled",) if has_bias or attention.window is not None else ("compiled", "resident")
