"""Attention through the Triton kernels. Importing this module imports Triton: ask `require_triton` first.

On a CPU the kernels run in Triton's interpreter, which is for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from srt.kernels.decode_attention import MAX_SPLITS, MIN_SPLIT_TOKENS, DecodeTiles, decode_attention
from srt.kernels.extend_attention import ExtendTiles, extend_attention
from srt.kernels.paged_kv import PagedKV
from srt.kernels.triton_support import require_triton
from srt.kernels.write_kv import write_kv
from srt.layers.attention.base import AttentionBackend

if TYPE_CHECKING:
    from srt.layers.attention.radix_attention import RadixAttention
    from srt.model_executor.forward_batch_info import ForwardBatch

PROGRAMS_PER_PROCESSOR: Final = 4  # so many programs hide each other's loads
INTERPRETER_PROCESSORS: Final = 2  # stands in for the device's count on a CPU, where splits gain nothing


@dataclass(frozen=True, slots=True)
class _ExtendRows:
    """What all layers of a step share for its extend rows."""

    req_pool_indices: torch.Tensor  # [E]
    max_extend_len: int
    tiles: ExtendTiles


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    """What all layers of a step share for its decode rows. Nothing in it depends on a length."""

    req_pool_indices: torch.Tensor  # [B - E]
    seq_lens: torch.Tensor  # [B - E]
    tiles: DecodeTiles


class TritonAttentionBackend(AttentionBackend):
    """Any page size, grouping of heads and head size up to 256; float32, float16 and bfloat16."""

    def __init__(self, device: torch.device) -> None:
        require_triton(device.type)
        if device.type == "cuda":
            self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        else:
            self._num_processors = INTERPRETER_PROCESSORS
        self._extend_rows: _ExtendRows | None = None
        self._decode_rows: _DecodeRows | None = None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        num_extends = batch.num_extend_rows
        kv_memory = batch.token_to_kv_pool.k_buffer[0]
        self._extend_rows = self._decode_rows = None
        if num_extends:
            self._extend_rows = _ExtendRows(
                batch.req_pool_indices[:num_extends],
                max_extend_len=int(batch.extend_seq_lens_cpu.max()),
                tiles=ExtendTiles.for_dtype(kv_memory.dtype),
            )
        if batch.num_decode_rows:
            max_context = batch.req_to_token_pool.max_pages * batch.req_to_token_pool.page_size
            num_splits = choose_num_splits(
                batch.num_decode_rows * kv_memory.shape[1], max_context, self._num_processors
            )
            self._decode_rows = _DecodeRows(
                batch.req_pool_indices[num_extends:],
                batch.seq_lens[num_extends:],
                tiles=DecodeTiles.for_dtype(kv_memory.dtype, num_splits),
            )

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, batch: ForwardBatch
    ) -> torch.Tensor:
        rows = self._extend_rows
        assert rows is not None, "extend rows in a batch that was announced without any"
        queries = q.view(-1, layer.num_heads, layer.head_dim)
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        extend_attention(
            queries,
            _paged_kv(layer, batch),
            rows.req_pool_indices,
            batch.extend_prefix_lens,
            batch.extend_seq_lens,
            batch.extend_start_loc,
            rows.max_extend_len,
            layer.scale,
            out,
            rows.tiles,
        )
        return out.view(q.shape)

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, batch: ForwardBatch
    ) -> torch.Tensor:
        rows = self._decode_rows
        assert rows is not None, "decode rows in a batch that was announced without any"
        queries = q.view(-1, layer.num_heads, layer.head_dim)
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
        decode_attention(
            queries, _paged_kv(layer, batch), rows.req_pool_indices, rows.seq_lens, layer.scale, out, rows.tiles
        )
        return out.view(q.shape)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, batch: ForwardBatch) -> None:
        shape = (-1, layer.num_kv_heads, layer.head_dim)
        write_kv(k.view(shape), v.view(shape), batch.out_cache_loc, *batch.token_to_kv_pool.get_kv(layer.layer_id))


def choose_num_splits(num_programs: int, max_context: int, num_processors: int) -> int:
    """Splits per (row, KV head): enough to fill the device, no more than the longest context can use.

    A function of the batch's size alone, so that a captured graph serves every step of that size.
    """
    wanted = -(-PROGRAMS_PER_PROCESSOR * num_processors // num_programs)
    useful = -(-max_context // MIN_SPLIT_TOKENS)
    return max(1, min(wanted, useful, MAX_SPLITS))


def _paged_kv(layer: RadixAttention, batch: ForwardBatch) -> PagedKV:
    k_buffer, v_buffer = batch.token_to_kv_pool.get_kv(layer.layer_id)
    return PagedKV(k_buffer, v_buffer, batch.req_to_token_pool.page_table, batch.req_to_token_pool.page_size)
