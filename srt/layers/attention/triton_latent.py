"""Attention over latents through our own kernel. Importing this module imports Triton: call `require_triton` first.

On a CPU the kernel runs in Triton's interpreter, which is for tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from srt.kernels.attention.latent_attention import (
    DECODE_PAIRS,
    LatentScratch,
    LatentTiles,
    PagedLatents,
    latent_decode,
    latent_extend,
    num_splits_of,
)
from srt.kernels.attention.stream_latents import (
    LatentDivision,
    clusters_at_once,
    stream_latents,
)
from srt.kernels.build.pdl import LATE, has_pdl, pdl_for
from srt.kernels.build.shared_memory import shared_bytes
from srt.kernels.gemm import head_products
from srt.layers.attention.attention_spec import AttentionLayer, AttentionSpec
from srt.layers.attention.base import AttentionBackend, DecodeGraphs
from srt.layers.attention.latent_layer import LatentLayer, latent_layer

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch

INTERPRETER_PROCESSORS: Final = 2  # used on a CPU in place of the device's number of multiprocessors


class TritonLatentBackend(AttentionBackend):
    """Absorbs decodes and chunks alike, with any page size. The plan of a decode step does not depend on lengths, so graphs capture it."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        assert spec.latents is not None, spec
        if device.type == "cuda":
            self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        else:
            self._num_processors = INTERPRETER_PROCESSORS
        self._scratch = LatentScratch.allocate(self._num_processors, spec.latents.rank, device)
        self._shared_bytes = shared_bytes(device)
        sizes = spec.latents.rank, spec.latents.dim
        self._at_once = clusters_at_once(device, spec.dtype, *sizes, spec.page_size)
        self._has_pdl = has_pdl(device)
        self._max_extend_len = 0

    @property
    def decode_graphs(self) -> DecodeGraphs:
        return self

    def init_cuda_graph_state(self, max_bs: int) -> None:
        """There is nothing to allocate: the scratch memory is enough for every number of rows."""

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> None:
        self.plan_decode(batch)

    def plan_extend(self, batch: ForwardBatch) -> None:
        self._max_extend_len = int(batch.extend_seq_lens_cpu.max())

    def plan_decode(self, batch: ForwardBatch) -> None:
        """Decodes need no plan: the kernel reads all lengths on the device."""

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor
    ) -> None:
        latents = latent_layer(layer)
        attended = q.new_zeros((len(q), latents.num_heads, latents.latent_rank))
        latent_extend(
            *latents.absorb_parts(q),
            _memory(latents, batch),
            batch.req_pool_indices[: batch.num_extend_rows],
            batch.extend_prefix_lens,
            batch.extend_seq_lens,
            batch.extend_start_loc,
            self._max_extend_len,
            latents.scale,
            attended,
            LatentTiles.choose(q.dtype, self._max_extend_len * latents.num_heads, self._shared_bytes),
        )
        latents.lift_into(attended, out)

    def forward_decode(self, q: Tensor, layer: AttentionLayer, batch: ForwardBatch, out: Tensor) -> None:
        latents, tables = latent_layer(layer), batch.req_to_token_pool
        attended = q.new_empty((len(q), latents.num_heads, latents.latent_rank))
        sizes = len(q), latents.num_heads, tables.max_pages * tables.page_size
        parts, memory = self._absorbed(q, latents), _memory(latents, batch)
        slots, lens = batch.req_pool_indices[batch.num_extend_rows :], batch.seq_lens[batch.num_extend_rows :]
        if self._at_once is not None:
            division = LatentDivision.of(*sizes, self._at_once)
            stream_latents(*parts, memory, slots, lens, latents.scale, attended, division, self._scratch)
        else:
            tiles = LatentTiles.choose(q.dtype, DECODE_PAIRS, self._shared_bytes)
            splits = num_splits_of(*sizes, self._num_processors)
            latent_decode(*parts, memory, slots, lens, latents.scale, attended, splits, self._scratch, tiles)
        if len(q) > head_products.MOST_ROWS:
            latents.lift_into(attended, out)
        else:
            _, values = latents.matrices
            head_products.head_products(attended, values, out, pdl_for(len(q)) if self._has_pdl else 0)

    def _absorbed(self, q: Tensor, layer: LatentLayer) -> tuple[Tensor, Tensor]:
        """Return the two parts of absorbed queries. When the next kernel starts, all that came before this product has ended."""
        if len(q) > head_products.MOST_ROWS:
            return layer.absorb_parts(q)
        plain, rotated = layer.split_queries(q)
        keys, _ = layer.matrices
        absorbed = q.new_empty((len(q), layer.num_heads, layer.latent_rank))
        head_products.head_products(plain, keys.transpose(1, 2), absorbed, LATE.value if self._has_pdl else 0)
        return absorbed, rotated


def _memory(layer: LatentLayer, batch: ForwardBatch) -> PagedLatents:
    latents, _ = batch.token_to_kv_pool.get_kv(layer.layer_id)
    return PagedLatents(
        latents, layer.latent_rank, batch.page_table_of(layer.layer_id), batch.req_to_token_pool.page_size
    )
