"""Attention in plain PyTorch: the reference for all other backends, and fast enough to serve on a CPU.

Rows of one token (all decodes, and extends of one token) are padded to a few common lengths and computed together. Every longer chunk
is a call of its own, unless there is compiled code for it, which computes all chunks of a step in one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from srt.layers.attention.base import AttentionBackend

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from srt.kernels.cpu.prompt_attention import PromptAttention
    from srt.layers.attention.attention_spec import AttentionLayer
    from srt.model_executor.forward_batch_info import ForwardBatch

SHORTEST_PADDING = 64  # rows up to this long share a group: a further call costs more than the padding
MASKED_QUERIES = 512  # a chunk after a prefix is computed in pieces of this many queries, to keep masks small


@dataclass(frozen=True, slots=True)
class TokenGroup:
    """Rows of one token each, padded to one length. Padding repeats the first position that the row sees, so no row can see another's."""

    tokens: torch.Tensor | None  # [rows] int64: which tokens of q; None: all of them in order
    num_rows: int
    length: int  # positions of each row, padding included
    kv_index: (
        torch.Tensor
    )  # [rows * kv_heads * length] int64, indices into the memory viewed as [locations * kv_heads, head_dim]
    bias: torch.Tensor | None  # [rows, 1, 1, length] float32: 0, or -inf for padding


@dataclass(frozen=True, slots=True)
class _Piece:
    """Queries `begin` … `end - 1` of a chunk, which see the first `length` keys, causally or according to the mask."""

    begin: int
    end: int
    length: int
    mask: torch.Tensor | None  # [queries, length] bool; None: causal from position 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row of several tokens."""

    first: int  # index of its first token in q
    count: int
    length: int
    kv_index: torch.Tensor  # [kv_heads * length] int64
    pieces: list[_Piece]


class TorchNativeBackend(AttentionBackend):
    """Runs wherever PyTorch does, with any page size, head size and grouping of heads."""

    def __init__(self, prompts: PromptAttention | None = None) -> None:
        """`prompts` attends with rows of several tokens. Without it PyTorch does."""
        self._prompts = prompts
        self._chunks = np.empty((0, 4), np.int64)  # those rows, for `prompts`
        # By window, because layers of one model may have different ones. The first layer with a window makes its plan.
        self._decodes: dict[int | None, list[TokenGroup]] = {}
        self._extends: dict[int | None, tuple[list[TokenGroup], list[Chunk]]] = {}

    def plan_extend(self, batch: ForwardBatch) -> None:
        self._extends.clear()
        if self._prompts is not None:
            self._chunks = _chunks_of(batch)

    def plan_decode(self, batch: ForwardBatch) -> None:
        self._decodes.clear()

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        if layer.window not in self._extends:
            self._extends[layer.window] = plan_extends(batch, layer.window, self._prompts is None)
        groups, chunks = self._extends[layer.window]
        for group in groups:
            _attend_group(group, q, out, layer, batch)
        for chunk in chunks:
            _attend_chunk(chunk, q, out, layer, batch)
        if len(self._chunks) and self._prompts is not None:
            self._prompts.attend(q, self._chunks, layer, batch, out)

    def forward_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        if layer.window not in self._decodes:
            rows = np.arange(batch.num_extend_rows, batch.batch_size)
            self._decodes[layer.window] = group_rows(batch, rows, rows - batch.num_extend_rows, layer.window)
        for group in self._decodes[layer.window]:
            _attend_group(group, q, out, layer, batch)


def _chunks_of(batch: ForwardBatch) -> NDArray[np.int64]:
    """Return slot, first token, prefix and number of tokens of each row of several tokens."""
    counts = batch.extend_seq_lens_cpu
    slots, firsts = batch.req_pool_indices_cpu[: len(counts)], np.cumsum(counts) - counts
    columns = slots, firsts, batch.extend_prefix_lens_cpu, counts
    return np.ascontiguousarray(np.stack(columns, axis=1)[counts > 1], np.int64)


def plan_extends(
    batch: ForwardBatch, window: int | None, with_chunks: bool = True
) -> tuple[list[TokenGroup], list[Chunk]]:
    counts = batch.extend_seq_lens_cpu
    firsts = np.cumsum(counts) - counts
    short = np.flatnonzero(counts == 1)
    groups = group_rows(batch, short, firsts[short], window, len(short) == batch.num_extend_tokens)
    if not with_chunks:
        return groups, []
    return groups, [_plan_chunk(batch, int(row), int(firsts[row]), window) for row in np.flatnonzero(counts > 1)]


def group_rows(
    batch: ForwardBatch,
    rows: NDArray[np.int64],
    tokens: NDArray[np.int64],
    window: int | None,
    all_tokens: bool = True,
) -> list[TokenGroup]:
    """Group rows whose numbers of positions are within a factor of two. `tokens` are the indices of the rows' tokens in q."""
    if not len(rows):
        return []
    ends = batch.seq_lens_cpu[rows]
    starts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    doublings = np.ceil(np.log2(np.maximum(ends - starts, SHORTEST_PADDING)))
    kinds = np.unique(doublings)
    if len(kinds) == 1:
        return [_pad_rows(batch, window, rows, None if all_tokens else tokens, starts, ends)]
    members = [np.flatnonzero(doublings == kind) for kind in kinds]
    return [_pad_rows(batch, window, rows[m], tokens[m], starts[m], ends[m]) for m in members]


def _pad_rows(
    batch: ForwardBatch,
    window: int | None,
    rows: NDArray[np.int64],
    tokens: NDArray[np.int64] | None,
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
) -> TokenGroup:
    """Make a group of rows that see their positions `starts` … `ends - 1`."""
    device = batch.positions.device
    lengths = ends - starts
    length = int(lengths.max())
    row_index = torch.from_numpy(rows).to(device)
    positions = torch.arange(length, device=device).expand(len(rows), length)
    firsts = torch.from_numpy(starts).to(device).unsqueeze(1)
    if starts.any():
        positions = positions + firsts
    bias = None
    if lengths.min() != length:
        padding = positions >= batch.seq_lens[row_index].unsqueeze(1)
        positions = torch.where(padding, firsts, positions)
        bias = torch.zeros(padding.shape, device=device).masked_fill_(padding, float("-inf"))
        bias = bias.view(len(rows), 1, 1, length)
    slots = batch.req_pool_indices[row_index].unsqueeze(1)
    return TokenGroup(
        tokens=None if tokens is None else torch.from_numpy(tokens).to(device),
        num_rows=len(rows),
        length=length,
        kv_index=_kv_index(batch, window, slots, positions),
        bias=bias,
    )


def _plan_chunk(batch: ForwardBatch, row: int, first: int, window: int | None) -> Chunk:
    device = batch.positions.device
    count, prefix = int(batch.extend_seq_lens_cpu[row]), int(batch.extend_prefix_lens_cpu[row])
    start = 0 if window is None else max(0, prefix - window + 1)
    end = prefix + count
    keys = torch.arange(start, end, device=device).unsqueeze(0)
    kv_index = _kv_index(batch, window, batch.req_pool_indices[row].view(1, 1), keys)
    if prefix == 0 and (window is None or count <= window):
        return Chunk(first, count, end, kv_index, [_Piece(0, count, count, None)])
    pieces = []
    for begin in range(0, count, MASKED_QUERIES):
        stop = min(begin + MASKED_QUERIES, count)
        queries = torch.arange(prefix + begin, prefix + stop, device=device).unsqueeze(1)
        length = prefix + stop - start
        mask = keys[:, :length] <= queries
        if window is not None:
            mask &= keys[:, :length] > queries - window
        pieces.append(_Piece(begin, stop, length, mask))
    return Chunk(first, count, end - start, kv_index, pieces)


def _kv_index(batch: ForwardBatch, window: int | None, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return indices into the memory viewed as [locations * kv_heads, head_dim] for positions [rows, length], as [row, head, position].

    In this order one gather yields the layout that attention reads.
    """
    num_heads, tables = batch.token_to_kv_pool.num_heads, batch.req_to_token_pool
    locations = tables.locations(slots, positions, tables.group_of(window))
    heads = torch.arange(num_heads, device=locations.device).view(1, num_heads, 1)
    return (locations.unsqueeze(1) * num_heads + heads).view(-1)


def _gather(
    kv_index: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the keys and values at these indices, converted to `dtype`."""
    pool = batch.token_to_kv_pool
    k_buffer, v_buffer = (buffer.view(-1, layer.head_dim) for buffer in pool.get_kv(layer.layer_id))
    if pool.dtype == dtype:
        return k_buffer.index_select(0, kv_index), v_buffer.index_select(0, kv_index)
    keys, values = (b.view(torch.uint8).index_select(0, kv_index).view(pool.dtype) for b in (k_buffer, v_buffer))
    return pool.restore(layer.layer_id, keys, values, dtype)


def _attend_group(
    group: TokenGroup, q: torch.Tensor, out: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch
) -> None:
    keys, values = _gather(group.kv_index, layer, batch, q.dtype)
    kv_shape = (group.num_rows, layer.num_kv_heads, group.length, layer.head_dim)
    # The query heads of a KV head see the same keys, so they are passed to the kernel as several queries of one head.
    q_shape = (group.num_rows, layer.num_kv_heads, layer.num_heads // layer.num_kv_heads, layer.head_dim)
    queries = (q if group.tokens is None else q.index_select(0, group.tokens)).view(q_shape)
    keys, values = keys.view(kv_shape), values.view(kv_shape)
    if _is_special(layer):
        sinks = None if layer.sinks is None else layer.sinks.view(1, q_shape[1], q_shape[2], 1)
        attended = _special_attention(queries, keys, values, group.bias, layer, sinks)
    else:
        mask = None if group.bias is None else group.bias.to(q.dtype)
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=layer.scale)
    attended = attended.reshape(group.num_rows, layer.num_heads, layer.head_dim)
    if group.tokens is None:
        out.copy_(attended)
    else:
        out.index_copy_(0, group.tokens, attended)


def _attend_chunk(chunk: Chunk, q: torch.Tensor, out: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
    keys, values = _gather(chunk.kv_index, layer, batch, q.dtype)
    keys = keys.view(1, layer.num_kv_heads, chunk.length, layer.head_dim)
    values = values.view(1, layer.num_kv_heads, chunk.length, layer.head_dim)
    span = slice(chunk.first, chunk.first + chunk.count)
    queries = q[span].unsqueeze(0).transpose(1, 2)
    for piece in chunk.pieces:
        some, seen = queries[:, :, piece.begin : piece.end], slice(0, piece.length)
        if _is_special(layer):
            attended = _special_piece(some, keys[:, :, seen], values[:, :, seen], piece, layer)
        else:
            attended = scaled_dot_product_attention(
                some,
                keys[:, :, seen],
                values[:, :, seen],
                attn_mask=piece.mask,
                is_causal=piece.mask is None,
                scale=layer.scale,
                enable_gqa=True,
            )
        out[chunk.first + piece.begin : chunk.first + piece.end] = attended[0].transpose(0, 1)


def _is_special(layer: AttentionLayer) -> bool:
    """Return whether `scaled_dot_product_attention` cannot compute this layer's attention."""
    return layer.softcap is not None or layer.sinks is not None


def _special_piece(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, piece: _Piece, layer: AttentionLayer
) -> torch.Tensor:
    """Attend with some queries at a time, because all scores of a step's attention are in memory."""
    count, group = piece.end - piece.begin, queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    sinks = None if layer.sinks is None else layer.sinks.view(1, -1, 1, 1)
    parts = []
    for begin in range(0, count, MASKED_QUERIES):
        rows = slice(begin, min(begin + MASKED_QUERIES, count))
        if piece.mask is None:
            positions = torch.arange(piece.length, device=queries.device)
            seen = positions <= positions[rows].unsqueeze(1)
        else:
            seen = piece.mask[rows]
        bias = torch.zeros(seen.shape, device=queries.device).masked_fill_(~seen, float("-inf"))
        parts.append(_special_attention(queries[:, :, rows], keys, values, bias, layer, sinks))
    return torch.cat(parts, dim=2)


def _special_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    layer: AttentionLayer,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Do what `scaled_dot_product_attention` does, with the layer's cap of scores and its sinks. Weights are float32.

    A cap c replaces each scaled product s by c * tanh(s / c). The sinks have the shape of the scores but for dimensions of 1.
    """
    scores = (queries @ keys.transpose(-1, -2)).float() * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if bias is not None:
        scores = scores + bias
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        one_more = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, one_more), dim=-1).softmax(-1)[..., :-1]
    return weights.to(values.dtype) @ values
