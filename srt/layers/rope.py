"""Rotary position embedding: rotate-half layout, with the default, linear, llama3 and YaRN frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from srt.layers.ops import TORCH_OPS, LayerOps, Rotation, rotate
from srt.utils.rope_config import RopeConfig


class RotaryEmbedding(nn.Module):
    """Turns positions into angles in float32. Computed in each step: a table would cost 0.5 s of start-up per 100,000 positions."""

    frequencies: Tensor  # [rotated dimensions / 2] f32

    def __init__(self, config: RopeConfig, head_dim: int, ops: LayerOps = TORCH_OPS) -> None:
        super().__init__()
        self._ops = ops
        self.attention_factor = config.attention_factor
        # On the CPU even while the model is built on the meta device, because it is not read from a checkpoint.
        self.register_buffer("frequencies", compute_frequencies(config, head_dim), persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        """Return the rotation for `positions` [tokens]."""
        return self._ops.angles(positions, self.frequencies, self.attention_factor)


def compute_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Return the angle per position of each pair of rotated dimensions: [rotated dimensions / 2] f32 cpu.

    The order of operations is that of `transformers`, so that both round in the same way.
    """
    head_dim = config.rotary_dim(head_dim)
    powers = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    periods = config.theta**powers
    plain = 1.0 / periods
    match config.kind:
        case "default":
            return plain
        case "linear":
            return plain / config.factor
        case "llama3":
            return _llama3(plain, config)
        case "yarn":
            return _yarn(periods, config, head_dim)


def rotate_part(heads: Tensor, rotation: Rotation, is_interleaved: bool) -> Tensor:
    """Rotate the first elements of heads [tokens, heads, head_dim], as many as there are angles for, in float32.

    The two elements of a pair are neighbours if `is_interleaved`, else half of the rotated part apart.
    """
    width = 2 * rotation.cos.shape[-1]
    turned, kept = heads[..., :width], heads[..., width:]
    if is_interleaved:
        turned = torch.cat((turned[..., ::2], turned[..., 1::2]), dim=-1)
    turned = rotate(turned, rotation)
    if is_interleaved:
        turned = torch.stack(turned.chunk(2, dim=-1), dim=-1).flatten(-2)
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned


def _llama3(plain: Tensor, config: RopeConfig) -> Tensor:
    """Stretch slow dimensions by the factor, keep fast ones, and blend those between."""
    original, low, high = config.original_context_length, config.low_freq_factor, config.high_freq_factor
    wavelengths = 2 * math.pi / plain
    slow, fast = wavelengths > original / low, wavelengths < original / high
    stretched = torch.where(slow, plain / config.factor, plain)
    weight = (original / wavelengths - low) / (high - low)
    blended = (1 - weight) * stretched / config.factor + weight * stretched
    return torch.where(slow | fast, stretched, blended)


def _yarn(periods: Tensor, config: RopeConfig, head_dim: int) -> Tensor:
    """Keep dimensions that turn more than beta_fast times in the original context, stretch those below beta_slow, blend the others."""
    low = _dimension_of_turns(config.beta_fast, config, head_dim)
    high = _dimension_of_turns(config.beta_slow, config, head_dim)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp becomes a step
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (config.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _dimension_of_turns(turns: float, config: RopeConfig, head_dim: int) -> float:
    """Return the (fractional) dimension that turns `turns` times within the original context."""
    length = config.original_context_length / (turns * 2 * math.pi)
    return head_dim * math.log(length) / (2 * math.log(config.theta))
