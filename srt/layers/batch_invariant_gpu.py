"""The kernels and layer operations of a deterministic server on a GPU; `batch_invariant_ops.py` says what they promise.

Importing this module imports Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from srt.kernels.elementwise.invariant_sums import sum_add_norm, sum_prepare_qkv
from srt.kernels.elementwise.rms_norm import add_rms_norm, rms_norm
from srt.kernels.elementwise.rotary import angles
from srt.kernels.elementwise.silu_and_mul import silu_and_mul
from srt.kernels.gemm.invariant_gemm import (
    can_be_gated,
    gated_product,
    invariant_parts,
    invariant_product,
    pdl_of,
)
from srt.kernels.gemm.invariant_hopper import HopperProducts
from srt.kernels.sampling.row_logprobs import largest, row_logprobs
from srt.layers.attention.radix_attention import RadixAttention
from srt.layers.ops import Affine, LayerOps, Norm, Rotation, Stream

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch


class GpuRowLogprobs:
    """Logprobs of rows, for the logits processor of a deterministic server."""

    def log_softmax(self, logits: Tensor) -> Tensor:
        return row_logprobs(logits)

    def largest(self, log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return largest(log_probs, count)


class BatchInvariantGpuOps(LayerOps):
    """The operations of layers with plain weights. None of them chooses another order of sums by the number of rows."""

    norms_while_summing = False  # only some numbers of rows could be normed so

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._hopper = HopperProducts.on(device)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return rms_norm(x, norm.weight, norm.eps, pdl_of(x))

    def norm_stream(self, stream: Stream, norm: Norm) -> tuple[Tensor, Tensor]:
        if stream.normed is not None or stream.delta is None or stream.delta_norm is not None:
            return super().norm_stream(stream, norm)
        return add_rms_norm(stream.hidden, stream.delta, norm.weight, norm.eps, pdl_of(stream.hidden))

    def linear(self, x: Tensor, affine: Affine) -> Tensor:
        product = None if affine.bias is not None else self._multiply(x, _matrix(affine))
        return invariant_product(x, _matrix(affine), affine.bias) if product is None else product

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        product = self._multiply(x, weight)
        return invariant_product(x, weight) if product is None else product

    def project_into(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        if self._hopper is not None and self._hopper.serves(weight) and out.dtype is x.dtype:
            self._hopper.multiply(x, weight, out=out)
        else:
            invariant_product(x, weight, out=out)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul(gate_up, pdl_of(gate_up))

    def gated_linear_of_norm(
        self, stream: Stream, norm: Norm, affine: Affine, is_gelu: bool = False
    ) -> tuple[Tensor, Tensor]:
        matrix = _matrix(affine)
        if is_gelu or affine.bias is not None or not can_be_gated(matrix):
            return super().gated_linear_of_norm(stream, norm, affine, is_gelu)
        normed, hidden = self.norm_stream(stream, norm)
        product = self._multiply(normed, matrix, is_gated=True)
        return gated_product(normed, matrix) if product is None else product, hidden

    def linear_onto(self, hidden: Tensor, x: Tensor, affine: Affine, next_norm: Norm | None = None) -> Stream:
        if next_norm is None:
            return super().linear_onto(hidden, x, affine)
        parts, pdl = self._parts(x, affine), pdl_of(x)
        normed, total = sum_add_norm(parts, affine.bias, hidden, next_norm.weight, next_norm.eps, pdl)
        return Stream(total, normed=normed)

    def angles(self, positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
        return Rotation(*angles(positions, frequencies, factor, pdl_of(positions)))

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
        normed, hidden = self.norm_stream(stream, norm)
        parts = self._parts(normed, affine)
        weights, eps = None, 0.0
        if head_norms is not None:
            weights, eps = (head_norms[0].weight, head_norms[1].weight), head_norms[0].eps
        prepared = batch.attn_backend.place_of(torch.empty(parts.shape[1:], dtype=normed.dtype, device=normed.device))
        sum_prepare_qkv(
            parts,
            affine.bias,
            layer.num_heads,
            weights,
            eps,
            rotation.cos,
            rotation.sin,
            batch.locations_of(layer.layer_id),
            *batch.token_to_kv_pool.get_kv(layer.layer_id),
            out=prepared,
            pdl=pdl_of(normed),
        )
        return layer.attend(*layer.split_packed(prepared), batch), hidden

    def _multiply(self, x: Tensor, matrix: Tensor, is_gated: bool = False) -> Tensor | None:
        """Return the product by the kernels for Hopper; None if they do not serve this matrix."""
        if self._hopper is None or not self._hopper.serves(matrix, is_gated):
            return None
        return self._hopper.multiply(x, matrix, is_gated)

    def _parts(self, x: Tensor, affine: Affine) -> Tensor:
        """Return the product as parts that are yet to be added, without its bias; for each matrix always of the same type."""
        product = None if affine.bias is not None else self._multiply(x, _matrix(affine))
        return invariant_parts(x, _matrix(affine)) if product is None else product[None]


def _matrix(affine: Affine) -> Tensor:
    matrix = affine.matrix
    assert matrix is not None, "quantised weights are refused at the start"
    return matrix
