"""The decoder operations that have kernels of their own on a GPU, in plain PyTorch: used on a CPU, and the reference for the kernels.

The residual stream is passed as a sum that is not yet added up, so that the addition can be fused with the next operation.
`kernel_ops.py` has the version with kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from srt.layers.attention.radix_attention import RadixAttention
from srt.layers.moe.expert_ops import TORCH_EXPERT_OPS, Choice, ExpertOps, ExpertWeights, Router
from srt.layers.quantization.weight import LinearWeight

if TYPE_CHECKING:
    from srt.distributed.row_division import RowDivision
    from srt.kernels.gemm.packed_matrix import PackedMatrix
    from srt.kernels.gemm.stream_gemm import Weighted
    from srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True, slots=True)
class Stream:
    """The residual stream of a step's tokens: `hidden` + `delta`, both [tokens, hidden_size]."""

    hidden: Tensor
    delta: Tensor | None = None
    delta_norm: Norm | None = None
    """A norm that is to be applied to `delta` before it is added."""
    weighted: Weighted | None = None
    """The sum multiplied by the next norm's weight, if the operation that formed the sum knew that norm; then there is no delta."""
    normed: Tensor | None = None
    """The sum after the next norm, under the same conditions."""
    division: RowDivision | None = None
    """Set if two ranks divide the step's rows. After a sum, `hidden` is then right in own rows only, and `normed` arrives in the others."""

    @property
    def total(self) -> Tensor:
        """The sum, added up. If `delta` is to be normed, `LayerOps.total` does that."""
        assert self.delta_norm is None, "delta is not normed yet"
        return self.hidden if self.delta is None else self.hidden + self.delta


@dataclass(frozen=True, slots=True)
class Norm:
    """Parameters of an RMSNorm, x / rms(x) * weight."""

    weight: Tensor
    eps: float
    is_plus_one: bool = False
    """The factor is 1 + weight, added in float32."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A step's tokens with the experts that the router chose for them."""

    normed: Tensor  # [tokens, hidden_size]: what the router and the experts read
    hidden: Tensor
    """The stream's sum."""
    choice: Choice


@dataclass(frozen=True, slots=True)
class Affine:
    """Parameters of a linear layer, x Wᵀ + b."""

    weight: LinearWeight
    bias: Tensor | None

    @property
    def matrix(self) -> Tensor | None:
        """The weight, if it is a plain matrix. Most fused kernels read only this; other weights multiply by themselves."""
        return self.weight.matrix

    @property
    def streamed(self) -> Tensor | PackedMatrix | None:
        """The weight as streamed products read it; None if they cannot, or if there is a bias."""
        matrix = self.weight.matrix
        return None if self.bias is not None else self.weight.packed_matrix if matrix is None else matrix


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary angles of a step's tokens, computed once and used by every layer."""

    cos: Tensor  # [tokens, 1, head_dim / 2] f32
    sin: Tensor


class LayerOps:
    """The operations of decoder layers, without state. A method that takes a stream also returns the stream's sum."""

    experts: ExpertOps = TORCH_EXPERT_OPS
    norms_while_summing: bool = True
    """Whether one kernel may sum over ranks and norm the sum. It adds the squares in another order than a norm by itself."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Return x / rms(x) * weight over the last dimension, with the root mean square in float32."""
        if norm.is_plus_one:
            return F.rms_norm(x.float(), norm.weight.shape, 1.0 + norm.weight.float(), norm.eps).to(x.dtype)
        return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)

    def norm_stream(self, stream: Stream, norm: Norm) -> tuple[Tensor, Tensor]:
        if stream.normed is not None:
            if stream.division is not None:
                stream.division.await_others()
            return stream.normed, stream.hidden
        hidden = self.total(stream)
        return self.norm(hidden, norm), hidden

    def total(self, stream: Stream) -> Tensor:
        """Return the stream's sum, added up."""
        if stream.delta is None or stream.delta_norm is None:
            return stream.total
        return stream.hidden + self.norm(stream.delta, stream.delta_norm)

    def linear(self, x: Tensor, affine: Affine) -> Tensor:
        return affine.weight.multiply(x, affine.bias)

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x Wᵀ for a plain matrix, such as that of an output layer."""
        return F.linear(x, weight)

    def project_into(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        torch.mm(x, weight.t(), out=out)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up for the two halves of the last dimension."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu(gate) * up for the two halves of the last dimension, by the approximation with tanh."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up

    def gated_linear(self, x: Tensor, affine: Affine, is_gelu: bool = False) -> Tensor:
        """Return `silu_and_mul`, or `gelu_tanh_and_mul`, of the product of x."""
        gate_up = self.linear(x, affine)
        return self.gelu_tanh_and_mul(gate_up) if is_gelu else self.silu_and_mul(gate_up)

    def linear_of_norm(self, stream: Stream, norm: Norm, affine: Affine) -> tuple[Tensor, Tensor]:
        normed, hidden = self.norm_stream(stream, norm)
        return self.linear(normed, affine), hidden

    def gated_linear_of_norm(
        self, stream: Stream, norm: Norm, affine: Affine, is_gelu: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return `gated_linear` of the normed stream."""
        normed, hidden = self.norm_stream(stream, norm)
        return self.gated_linear(normed, affine, is_gelu), hidden

    def linear_onto(self, hidden: Tensor, x: Tensor, affine: Affine, next_norm: Norm | None = None) -> Stream:
        """Return hidden + x Wᵀ + b, prepared for `next_norm` if given. May overwrite `hidden`."""
        return Stream(hidden, self.linear(x, affine))

    def route(self, stream: Stream, norm: Norm | None, router: Router) -> Routed:
        """Choose the experts of the normed stream's tokens; without a norm of the stream's."""
        if norm is None:
            hidden = stream.total
            return Routed(hidden, hidden, self.experts.route(hidden, router))
        normed, hidden = self.norm_stream(stream, norm)
        return Routed(normed, hidden, self.experts.route(normed, router))

    def experts_onto(self, routed: Routed, weights: ExpertWeights, next_norm: Norm | None = None) -> Stream:
        """Return the stream with the results of the chosen experts, prepared for `next_norm` if given."""
        return Stream(routed.hidden, self.experts.multiply(routed.normed, routed.choice, weights))

    def store_latents(
        self,
        q: Tensor,
        latents: Tensor,
        norm: Norm,
        rotation: Rotation,
        is_interleaved: bool,
        layer: RadixAttention,
        batch: ForwardBatch,
    ) -> bool:
        """Rotate the queries in place, and norm, rotate and store the latents (MLA), in one kernel. Return False if there is none.

        q is [tokens, heads * head_dim], latents are [tokens, latent_dim]; both come from a projection.
        """
        return False

    def angles(self, positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
        """Return the rotation for `positions` [tokens], with cosines and sines multiplied by the factor."""
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
        """Run `attend` on the product of the normed stream, and return the stream's sum as well."""
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
        """Return the attention output of packed rows (query heads, key heads, value heads); stores the new keys and values.

        Queries and keys are rotated, and normed first if `norms` is given. May overwrite `qkv`.
        """
        return layer(*self.split_qkv(qkv, norms, rotation, layer), batch)  # type: ignore[no-any-return]

    def split_qkv(
        self, qkv: Tensor, norms: tuple[Norm, Norm] | None, rotation: Rotation, layer: RadixAttention
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split packed rows into queries, keys and values; rotate queries and keys, and norm them first if `norms` is given."""
        q, k, v = layer.split_packed(qkv)
        q, k = q.unflatten(-1, (-1, layer.head_dim)), k.unflatten(-1, (-1, layer.head_dim))
        if norms is not None:
            q, k = self.norm(q, norms[0]), self.norm(k, norms[1])
        return rotate(q, rotation).flatten(1), rotate(k, rotation).flatten(1), v


TORCH_OPS: Final = LayerOps()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the heads of x [tokens, heads, head_dim] in float32, and return the same shape and dtype."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rotation.cos, rotation.sin
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
