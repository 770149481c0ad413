"""The operations of a decoder layer with our kernels; `ops.py` describes them. Importing this module imports Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from srt.kernels.build.hopper import runs_on
from srt.kernels.build.pdl import has_pdl, pdl_for
from srt.kernels.elementwise.prepare_latents import prepare_latents
from srt.kernels.elementwise.rms_norm import add_rms_norm, rms_norm
from srt.kernels.elementwise.rotary import angles, prepare_qkv
from srt.kernels.elementwise.silu_and_mul import gelu_tanh_and_mul, silu_and_mul
from srt.kernels.gemm.block_gemm import block_gemm, takes
from srt.kernels.gemm.fp8_gemm import WIDTH_UNIT, RoundedRows, multiply_rounded, norm_and_quantise
from srt.kernels.gemm.gated_gemm import PROMPTS, GatedGemm
from srt.kernels.gemm.gemv import GemvTiles, gemv, max_rows
from srt.kernels.gemm.packed_matrix import PackedMatrix
from srt.kernels.gemm.stream_arguments import Added
from srt.kernels.gemm.stream_gemm import (
    FEWEST_ROWS,
    PLAIN,
    SMALLEST,
    Ending,
    Heads,
    StreamGemm,
    StreamTiles,
    Weighted,
)
from srt.layers.attention.radix_attention import RadixAttention
from srt.layers.moe.expert_kernels import ExpertKernels
from srt.layers.moe.expert_ops import ExpertWeights, Router
from srt.layers.ops import Affine, LayerOps, Norm, Rotation, Routed, Stream

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch

_FEWEST_ADDED_ROWS: Final = 257
"""Fewest rows for which cuBLAS adds the residual at no cost. With fewer it splits the inner dimension, and the loss exceeds the gain of
the norm (measured on an H200)."""
_MOST_ADAPTED_ROWS: Final = 64
"""Most rows whose adapters' products `StreamGemm` adds."""
_MOST_RANK: Final = 64
_MOST_LOW: Final = 4096
"""Most numbers that it keeps of these products beside its ring, rows times their width."""


class KernelOps(LayerOps):
    """Chooses the fastest kernel for each product by the number of its rows, which are tokens of the step.

    - `gemv` takes one row, or up to three rows if the weights are small.
    - `stream_gemm` takes 2 rows and more on Hopper in bfloat16. Its limit is 64 rows for a product with nothing to fuse, 96 for gates and
      ups (64 if their weights are small), and 176 for other products. The limit is 256 for small weights, and for down projections that
      fill the device. `_most_rows` in stream_gemm.py decides on the limits.
    - `gated_gemm` takes gates and ups of more rows, and `block_gemm` those of 65 rows and more with weights of e4m3 by blocks.
    - cuBLAS takes the rest, such as products with a bias of several rows. Graphs of few decodes use cuBLASLt instead (decode_runner.py).
    """

    def __init__(self, device: torch.device) -> None:
        self.experts: ExpertKernels = ExpertKernels(device)
        self._has_pdl = has_pdl(device)
        self._stream_gemm = StreamGemm(device) if runs_on(device, SMALLEST) else None
        self._gated_gemm = GatedGemm(device) if runs_on(device, PROMPTS) else None

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        return rms_norm(rows, norm.weight, norm.eps, self._pdl(rows), norm.is_plus_one).view(x.shape)

    def norm_stream(self, stream: Stream, norm: Norm) -> tuple[Tensor, Tensor]:
        if stream.normed is not None:
            return super().norm_stream(stream, norm)
        if stream.delta is None or not _has_like_norms(stream, norm):
            return super().norm_stream(stream, norm)
        delta_weight, delta_eps = _delta_norm(stream)
        pdl = self._pdl(stream.hidden)
        return add_rms_norm(
            stream.hidden, stream.delta, norm.weight, norm.eps, pdl, norm.is_plus_one, delta_weight, delta_eps
        )

    def linear(self, x: Tensor, affine: Affine) -> Tensor:
        product, few = self._streamed(x, affine), _few(affine, x)
        if product is None and few is not None:
            return self._gemv(x, *few, affine.bias)
        return super().linear(x, affine) if product is None else product

    def project(self, x: Tensor, weight: Tensor) -> Tensor:
        gemm = self._stream_gemm
        tiles = None if gemm is None else gemm.tiles(x, weight, PLAIN)
        if gemm is not None and tiles is not None:
            return gemm.multiply(x, weight, tiles)
        return self._gemv(x, weight, None) if _is_few(weight, x) else super().project(x, weight)

    def project_into(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        if _is_few(weight, x):
            self._gemv(x, weight, None, out=out)
        else:
            super().project_into(x, weight, out)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul(gate_up, self._pdl(gate_up))

    def gelu_tanh_and_mul(self, gate_up: Tensor) -> Tensor:
        return gelu_tanh_and_mul(gate_up, self._pdl(gate_up))

    def gated_linear(self, x: Tensor, affine: Affine, is_gelu: bool = False) -> Tensor:
        few = _few(affine, x)
        if few is not None:
            return self._gemv(x, *few, affine.bias, is_gated=True, is_gelu=is_gelu)
        if is_gelu:
            return super().gated_linear(x, affine, is_gelu)
        product = self._gated(x, affine)
        if product is None:
            product = affine.weight.multiply_gated(x, affine.bias)
        return self.silu_and_mul(super().linear(x, affine)) if product is None else product

    def linear_of_norm(self, stream: Stream, norm: Norm, affine: Affine) -> tuple[Tensor, Tensor]:
        product = _in_halves(stream, affine)
        if product is not None:
            return product, stream.hidden
        few = _few(affine, stream.hidden)
        if few is not None and stream.delta_norm is None:  # a norm more would be read by each program
            return self._gemv_of_norm(stream, norm, *few, affine.bias)
        matrix = self._rounding(stream, norm, affine, PLAIN)
        if matrix is None:
            return super().linear_of_norm(stream, norm, affine)
        rounded, hidden = self._norm_and_round(stream, norm, matrix)
        if matrix.rounds_groups:
            return block_gemm(rounded, matrix.numbers, matrix.scales), hidden
        return multiply_rounded(rounded, matrix.numbers, matrix.scales, hidden.dtype), hidden

    def gated_linear_of_norm(
        self, stream: Stream, norm: Norm, affine: Affine, is_gelu: bool = False
    ) -> tuple[Tensor, Tensor]:
        product = None if is_gelu else self._gated_as_rows_arrive(stream, affine)
        if product is not None:
            return product, stream.hidden
        if stream.weighted is not None:
            assert stream.weighted.weight is norm.weight
            product = self._gated(stream.weighted, affine)
            if product is not None:
                return product, stream.hidden
        few = _few(affine, stream.hidden)
        if few is not None and stream.delta_norm is None:  # a norm more would be read by each program
            return self._gemv_of_norm(stream, norm, *few, affine.bias, is_gated=True, is_gelu=is_gelu)
        matrix = None if is_gelu else self._rounding(stream, norm, affine, Ending(is_gated=True))
        if matrix is None:
            return super().gated_linear_of_norm(stream, norm, affine, is_gelu)
        rounded, hidden = self._norm_and_round(stream, norm, matrix)
        if matrix.rounds_groups:
            return block_gemm(rounded, matrix.numbers, matrix.scales, is_gated=True), hidden
        tiles = None if self._gated_gemm is None else self._gated_gemm.tiles(hidden, matrix)
        if self._gated_gemm is not None and tiles is not None:
            return self._gated_gemm.multiply(rounded, matrix, tiles), hidden
        return self.silu_and_mul(multiply_rounded(rounded, matrix.numbers, matrix.scales, hidden.dtype)), hidden

    def linear_onto(self, hidden: Tensor, x: Tensor, affine: Affine, next_norm: Norm | None = None) -> Stream:
        stream = self._streamed_onto(hidden, x, affine, next_norm)
        if stream is not None:
            return stream
        matrix, few = affine.matrix, _few(affine, x)
        if few is not None:
            return Stream(self._gemv(x, *few, affine.bias, residual=hidden))
        if matrix is None or affine.bias is not None or len(x) < _FEWEST_ADDED_ROWS:
            return super().linear_onto(hidden, x, affine)
        return Stream(hidden.addmm_(x, matrix.t()))

    def route(self, stream: Stream, norm: Norm | None, router: Router) -> Routed:
        hidden, is_sum = stream.hidden, stream.delta is None and stream.normed is None
        if norm is None or norm.is_plus_one or not is_sum or not self.experts.can_route_rows(hidden):
            return super().route(stream, norm, router)
        normed, choice = self.experts.route_rows(hidden, router, norm.weight, norm.eps)
        return Routed(normed, hidden, choice)

    def experts_onto(self, routed: Routed, weights: ExpertWeights, next_norm: Norm | None = None) -> Stream:
        if next_norm is None or next_norm.is_plus_one:
            return super().experts_onto(routed, weights)
        formed = self.experts.multiply_and_norm(
            routed.hidden, routed.normed, routed.choice, weights, next_norm.weight, next_norm.eps
        )
        if formed is None:
            return super().experts_onto(routed, weights)
        return Stream(formed[1], normed=formed[0])

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
        memory, _ = batch.token_to_kv_pool.get_kv(layer.layer_id)
        if memory.dtype is not q.dtype or len(norm.weight) + 2 * rotation.cos.shape[-1] != latents.shape[1]:
            return False
        prepare_latents(
            q,
            layer.head_dim,
            latents,
            norm.weight,
            norm.eps,
            rotation.cos,
            rotation.sin,
            is_interleaved,
            batch.locations_of(layer.layer_id),
            memory,
            self._pdl(q),
        )
        return True

    def angles(self, positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
        return Rotation(*angles(positions, frequencies, factor, self._pdl(positions)))

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
        pool = batch.token_to_kv_pool
        k_buffer, v_buffer = pool.get_kv(layer.layer_id)
        ending = Ending(
            is_scaled=stream.weighted is not None,
            head_dim=layer.head_dim,
            has_head_norm=head_norms is not None,
            is_fp8=k_buffer.dtype is torch.float8_e4m3fn,
        )
        only_decodes = batch.num_decode_rows == len(stream.hidden)
        chosen = self._choose(stream.hidden, affine, ending) if only_decodes else None
        if chosen is None:
            return super().attend_stream(stream, norm, affine, head_norms, rotation, layer, batch)
        x: Tensor | Weighted
        if stream.weighted is None:
            x, hidden = self.norm_stream(stream, norm)
        else:
            assert stream.weighted.weight is norm.weight
            x, hidden = stream.weighted, stream.hidden
        heads = Heads(
            query_width=layer.num_heads * layer.head_dim,
            weights=None if head_norms is None else (head_norms[0].weight, head_norms[1].weight),
            eps=0.0 if head_norms is None else head_norms[0].eps,
            cos=rotation.cos,
            sin=rotation.sin,
            locations=batch.locations_of(layer.layer_id),
            k_buffer=k_buffer,
            v_buffer=v_buffer,
            k_scale=pool.k_scales[layer.layer_id],
            v_scale=pool.v_scales[layer.layer_id],
        )
        gemm, matrix, tiles, added_to = chosen
        queries = gemm.multiply_heads(x, matrix, tiles, heads, added_to(_rows(x)))
        return layer.attend_decodes(queries, batch), hidden

    def attend(
        self,
        qkv: Tensor,
        norms: tuple[Norm, Norm] | None,
        rotation: Rotation,
        layer: RadixAttention,
        batch: ForwardBatch,
    ) -> Tensor:
        pool, layer_id = batch.token_to_kv_pool, layer.layer_id
        weights, eps = (None, 0.0) if norms is None else ((norms[0].weight, norms[1].weight), norms[0].eps)
        is_plus_one = norms is not None and norms[0].is_plus_one
        packed = batch.attn_backend.packed_decodes
        is_usual = layer.softcap is None and layer.sinks is None
        if packed is not None and is_usual and batch.num_extend_rows == 0:
            attended = packed.decode_packed(qkv, weights, eps, rotation.cos, rotation.sin, layer, batch, is_plus_one)
            if attended is not None:
                return attended
        prepared = batch.attn_backend.place_of(qkv)
        prepare_qkv(
            qkv,
            layer.num_heads,
            weights,
            eps,
            rotation.cos,
            rotation.sin,
            batch.locations_of(layer_id),
            *pool.get_kv(layer_id),
            k_scale=pool.k_scales[layer_id],
            v_scale=pool.v_scales[layer_id],
            pdl=self._pdl(qkv),
            out=prepared,
            is_plus_one=is_plus_one,
        )
        return layer.attend(*layer.split_packed(prepared), batch)

    def _rounding(self, stream: Stream, norm: Norm, affine: Affine, ending: Ending) -> PackedMatrix | None:
        """Return the weight if its product rounds inputs to e4m3 behind the norm, and is not left to `StreamGemm`."""
        matrix, x, gemm = affine.streamed, stream.hidden, self._stream_gemm
        if not isinstance(matrix, PackedMatrix) or x.dtype is not torch.bfloat16 or len(x) < 2:
            return None
        if norm.is_plus_one or stream.normed is not None or stream.delta_norm is not None or not x.is_contiguous():
            return None
        if matrix.rounds_groups:
            return matrix if takes(x) else None
        if not matrix.rounds_inputs or any(size % WIDTH_UNIT for size in matrix.shape):
            return None
        return matrix if gemm is None or gemm.tiles(x, matrix, ending) is None else None

    def _norm_and_round(self, stream: Stream, norm: Norm, matrix: PackedMatrix) -> tuple[RoundedRows, Tensor]:
        pdl = self._pdl(stream.hidden)
        return norm_and_quantise(
            stream.hidden, stream.delta, norm.weight, norm.eps, has_groups=matrix.rounds_groups, pdl=pdl
        )

    def _pdl(self, rows: Tensor) -> int:
        return pdl_for(len(rows)) if self._has_pdl else 0

    def _gated(self, x: Tensor | Weighted, affine: Affine) -> Tensor | None:
        """Return the gated product; None if other kernels are faster."""
        is_scaled = isinstance(x, Weighted)
        product = self._streamed(x, affine, Ending(is_gated=True, is_scaled=is_scaled))
        gemm, matrix = self._gated_gemm, affine.streamed
        if product is not None or matrix is None:
            return product
        rows = _rows(x)
        if isinstance(matrix, PackedMatrix) and matrix.rounds_groups and not is_scaled and takes(rows):
            return block_gemm(rows, matrix.numbers, matrix.scales, is_gated=True)
        if gemm is None:
            return None
        tiles = gemm.tiles(rows, matrix)
        return None if tiles is None else gemm.multiply(x, matrix, tiles)

    def _gated_as_rows_arrive(self, stream: Stream, affine: Affine) -> Tensor | None:
        """Return the gated product of rows that two ranks divide, this rank's first; None without a kernel for it, or if none do."""
        x, division, matrix, gemm = stream.normed, stream.division, affine.streamed, self._gated_gemm
        if x is None or division is None or not isinstance(matrix, Tensor) or gemm is None:
            return None
        tiles = gemm.tiles(x, matrix)
        if tiles is None:
            return None
        return gemm.multiply(x, matrix, tiles, late=division.late_rows())

    def _streamed(self, x: Tensor | Weighted, affine: Affine, ending: Ending = PLAIN) -> Tensor | None:
        """Return the product by `StreamGemm`; None if other kernels are faster."""
        chosen = self._choose(_rows(x), affine, ending)
        if chosen is None:
            return None
        gemm, matrix, tiles, added_to = chosen
        return gemm.multiply(x, matrix, tiles, added=added_to(_rows(x)))

    def _choose(self, x: Tensor, affine: Affine, ending: Ending) -> _Chosen | None:
        """Return how `StreamGemm` computes this product, with what adapters add; None if other kernels are faster."""
        gemm, matrix = self._stream_gemm, affine.streamed
        added_to: Callable[[Tensor], Added | None] = _nothing
        if gemm is None:
            return None
        if matrix is None:
            changed = None if affine.bias is not None else affine.weight.changed
            if changed is None or not FEWEST_ROWS <= len(x) <= _MOST_ADAPTED_ROWS:
                return None
            if changed.rank > _MOST_RANK or StreamTiles.padded(len(x)) * changed.low > _MOST_LOW:
                return None
            matrix, added_to = changed.matrix, changed.added
            ending = replace(ending, rank=changed.rank, low=changed.low)
        tiles = gemm.tiles(x, matrix, ending)
        return None if tiles is None else _Chosen(gemm, matrix, tiles, added_to)

    def _streamed_onto(self, hidden: Tensor, x: Tensor, affine: Affine, next_norm: Norm | None) -> Stream | None:
        """Return the product added to `hidden` by `StreamGemm`; None if other kernels are faster."""
        chosen = self._choose(x, affine, Ending(has_residual=True, is_weighted=next_norm is not None))
        if chosen is None:
            return None
        gemm, matrix, tiles, added_to = chosen
        added = added_to(x)
        if next_norm is None:
            return Stream(gemm.multiply(x, matrix, tiles, hidden, added=added))
        norm = next_norm.weight, next_norm.eps
        product, weighted = gemm.multiply_weighted(x, matrix, tiles, hidden, *norm, added)
        return Stream(product, weighted=weighted)

    def _gemv(
        self,
        x: Tensor,
        weight: Tensor,
        scales: Tensor | None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        is_gated: bool = False,
        is_gelu: bool = False,
    ) -> Tensor:
        product, _ = gemv(
            x.contiguous(),
            weight,
            _gemv_tiles(weight, is_gated),
            scales=scales,
            bias=bias,
            is_gated=is_gated,
            is_gelu=is_gelu,
            residual=residual,
            out=out,
            pdl=bool(self._pdl(x)),
        )
        return product

    def _gemv_of_norm(
        self,
        stream: Stream,
        norm: Norm,
        weight: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
        is_gated: bool = False,
        is_gelu: bool = False,
    ) -> tuple[Tensor, Tensor]:
        delta_weight, delta_eps = _delta_norm(stream)
        return gemv(
            stream.hidden,
            weight,
            _gemv_tiles(weight, is_gated),
            scales=scales,
            bias=bias,
            delta=stream.delta,
            delta_weight=delta_weight,
            delta_eps=delta_eps,
            norm_weight=norm.weight,
            eps=norm.eps,
            is_plus_one=norm.is_plus_one,
            is_gated=is_gated,
            is_gelu=is_gelu,
            pdl=bool(self._pdl(stream.hidden)),
        )


class _Chosen(NamedTuple):
    """How a product is computed by `StreamGemm`."""

    gemm: StreamGemm
    matrix: Tensor | PackedMatrix
    tiles: StreamTiles
    added_to: Callable[[Tensor], Added | None]
    """Returns what adapters add to the products of these rows."""


def _in_halves(stream: Stream, affine: Affine) -> Tensor | None:
    """Return the product of a step whose rows two ranks divide, this rank's first; None if none do, or the weight is no plain matrix."""
    x, division, matrix = stream.normed, stream.division, affine.matrix
    if x is None or division is None or matrix is None:
        return None
    product = x.new_empty((len(x), len(matrix)))
    for rows in (division.own, division.others):
        if rows is division.others:
            division.await_others()
        if affine.bias is None:
            torch.mm(x[rows], matrix.t(), out=product[rows])
        else:
            torch.addmm(affine.bias, x[rows], matrix.t(), out=product[rows])
    return product


def _nothing(x: Tensor) -> None:
    """Add nothing to the products of these rows."""


def _rows(x: Tensor | Weighted) -> Tensor:
    return x.values if isinstance(x, Weighted) else x


def _has_like_norms(stream: Stream, norm: Norm) -> bool:
    """Return whether the factors of both norms, of the stream and of what is added to it, are weights or are 1 + weights."""
    return stream.delta_norm is None or stream.delta_norm.is_plus_one == norm.is_plus_one


def _delta_norm(stream: Stream) -> tuple[Tensor | None, float]:
    """Return weight and eps of the norm of what is added to the stream, if there is one."""
    return (None, 0.0) if stream.delta_norm is None else (stream.delta_norm.weight, stream.delta_norm.eps)


def _few(affine: Affine, x: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """Return the weight and the factors of its rows, if `gemv` is the kernel for this product."""
    matrix = affine.matrix
    if matrix is not None:
        return (matrix, None) if _is_few(matrix, x) else None
    return affine.weight.scaled_matrix if len(x) == 1 else None


def _is_few(weight: Tensor, x: Tensor) -> bool:
    return 0 < len(x) <= max_rows(weight)


def _gemv_tiles(weight: Tensor, is_gated: bool) -> GemvTiles:
    n, k = weight.shape
    return GemvTiles.choose(n, k, is_gated, weight.itemsize)
