"""The operations of a decoder layer that have kernels of their own on a GPU, as plain PyTorch: what runs on a CPU, and the reference.

The residual stream travels as a sum that is not yet formed, so that adding can be fused with whatever comes next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from srt.layers.attention.radix_attention import RadixAttention

if TYPE_CHECKING:
    from srt.kernels.gemm.stream_gemm import Weighted
    from srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream of a step's tokens: `hidden` + `delta`, both [tokens, hidden_size]."""

    hidden: Tensor
    delta: Tensor | None = None
    weighted: Weighted | None = None
    """The sum on its way to the norm that comes next, if who formed it was told which; there is no delta then."""
    normed: Tensor | None = None
    """The sum after that norm, likewise."""


@dataclass(frozen=True, slots=True)
class Norm:
    """What an RMSNorm is: x / rms(x) * weight."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Affine:
    """x Wᵀ + b."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of one step's tokens, computed once and used by every layer."""

    cos: Tensor  # [tokens, 1, head_dim / 2] f32
    sin: Tensor


class LayerOps:
    """Stateless. What takes a stream gives the formed sum back with its result."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """x / rms(x) * weight over the last dimension; the root mean square is taken in float32."""
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)

    def norm_stream(self, stream: Stream, norm: Norm) -> tuple[Tensor, Tensor]:
        if stream.normed is not None:
            return stream.normed, stream.hidden
        hidden = stream.hidden if stream.delta is None else stream.hidden + stream.delta
        return self.norm(hidden, norm), hidden

    def linear(self, x: Tensor, affine: Affine) -> Tensor:
        return F.linear(x, affine.weight, affine.bias)

    def linear_into(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        torch.mm(x, weight.t(), out=out)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up, for the two halves of the last dimension."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def linear_of_norm(self, stream: Stream, norm: Norm, affine: Affine) -> tuple[Tensor, Tensor]:
        normed, hidden = self.norm_stream(stream, norm)
        return self.linear(normed, affine), hidden

    def gated_linear_of_norm(self, stream: Stream, norm: Norm, affine: Affine) -> tuple[Tensor, Tensor]:
        """silu_and_mul of the product."""
        normed, hidden = self.norm_stream(stream, norm)
        return self.silu_and_mul(self.linear(normed, affine)), hidden

    def linear_onto(self, hidden: Tensor, x: Tensor, affine: Affine, next_norm: Norm | None = None) -> Stream:
        """hidden + x Wᵀ + b, which that norm is applied to next, if any. hidden may be overwritten."""
        return Stream(hidden, self.linear(x, affine))

    def angles(self, positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
        """Of `positions` [tokens]; cosines and sines are multiplied by the factor."""
        angles = positions.float()[:, None, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        if factor != 1.0:
            cos, sin = cos * factor, sin * factor
        return Rotation(cos, sin)

    def attend_stream(
        self,
        stream: Stream,
        norm: Norm,
        affine: Affine,
        head_norms: tuple[Norm, Norm] | None,
        rotation: Rotation,
        layer: RadixAttention,
        batch: ForwardBatch,
    ) -> tuple[Tensor, Tensor]:
        """`attend` for the packed rows that the product with the normed stream gives."""
        qkv, hidden = self.linear_of_norm(stream, norm, affine)
        return self.attend(qkv, head_norms, rotation, layer, batch), hidden

    def attend(
        self,
        qkv: Tensor,
        norms: tuple[Norm, Norm] | None,
        rotation: Rotation,
        layer: RadixAttention,
        batch: ForwardBatch,
    ) -> Tensor:
        """Attention of packed rows (query heads, key heads, value heads): the first two are normed, if at all, and rotated.

        The layer's memory then holds the new keys and values. qkv may be overwritten.
        """
        return layer(*self.split_qkv(qkv, norms, rotation, layer), batch)  # type: ignore[no-any-return]

    def split_qkv(
        self, qkv: Tensor, norms: tuple[Norm, Norm] | None, rotation: Rotation, layer: RadixAttention
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Packed rows as the queries, keys and values that attention takes: the first two are normed, if at all, and rotated."""
        q, k, v = layer.split_packed(qkv)
        q, k = q.unflatten(-1, (-1, layer.head_dim)), k.unflatten(-1, (-1, layer.head_dim))
        if norms is not None:
            q, k = self.norm(q, norms[0]), self.norm(k, norms[1])
        return rotate(q, rotation).flatten(1), rotate(k, rotation).flatten(1), v


TORCH_OPS: Final = LayerOps()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate heads: x [tokens, heads, head_dim] → the same shape and type. Computed in float32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rotation.cos, rotation.sin
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
