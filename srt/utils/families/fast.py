"""The fast paths of layers for which there are fused kernels: pre-norm, one full rotation, a gated MLP or experts with silu."""

from __future__ import annotations

from srt.utils.layer_spec import FastPath, FeedForward, LayerSpec


def fast_paths(layer: LayerSpec) -> tuple[FastPath, ...]:
    """Return "fused" for every layer, "compiled" for those without experts, and "resident" if they have no biases and windows either."""
    attention, feed_forward = layer.self_attention, layer.feed_forward
    if not isinstance(feed_forward, FeedForward):
        return ("fused",)
    has_bias = attention.qkv_bias or attention.o_bias or feed_forward.bias
    is_resident = not has_bias and attention.window is None
    return ("fused", "compiled", "resident") if is_resident else ("fused", "compiled")
