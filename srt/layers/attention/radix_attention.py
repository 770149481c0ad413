"""The attention of one layer as models use it, without pages, backend or batch layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from srt.layers.attention.base import AttentionBackend
from srt.layers.weights import WeightedModule, WeightPiece

if TYPE_CHECKING:
    from srt.model_executor.forward_batch_info import ForwardBatch


class AttentionSinks(WeightedModule):
    """The sinks of this rank's heads."""

    def __init__(self, num_heads: int, first: int, total: int) -> None:
        """The rank has `num_heads` heads of `total`, from head `first` on."""
        super().__init__()
        self._first, self._total = first, total
        self.values = nn.Parameter(torch.empty(num_heads), requires_grad=False)

    def weight_pieces(self, path: str) -> Iterator[WeightPiece]:
        num_heads = len(self.values)
        yield WeightPiece(path, (self._total,), self, "values", 0, self._first, num_heads, 0)


class RadixAttention(nn.Module):
    """Causal attention over all positions of the batch's requests, shared prefixes included. Has no weights.

    Head counts are this rank's, after tensor-parallel sharding. With a `window`, a token sees only that many positions, its own included.
    A `softcap` c replaces each scaled product s by c * tanh(s / c). A sink is a score that takes its share of a head's softmax, and adds
    nothing to the result.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int,
        layer_id: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: AttentionSinks | None = None,
    ) -> None:
        super().__init__()
        assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.value_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self.layer_id = layer_id
        self.scale = scale
        self.window = window
        self.softcap = softcap
        self._sinks = sinks

    @property
    def sinks(self) -> torch.Tensor | None:
        """The score of each head's sink [heads], if heads have sinks."""
        return None if self._sinks is None else self._sinks.values

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Store k and v [tokens, kv_heads * head_dim], then attend with q [tokens, heads * head_dim]; the result has the shape of q."""
        return batch.attn_backend.forward(q, k, v, self, batch)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Attend for tokens whose rotated keys and values are stored already. k and v may be views of packed rows."""
        return batch.attn_backend.attend(q, k, v, self, batch)

    def attend_decodes(self, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Attend for a batch in which every row decodes and whose keys and values are stored already."""
        backend = batch.attn_backend
        assert isinstance(backend, AttentionBackend), "only an attention backend can run decode rows"
        out = torch.empty_like(q)
        heads = -1, self.num_heads, self.head_dim
        backend.forward_decode(q.view(heads), self, batch, out.view(heads))
        return out

    def split_packed(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split packed rows (query heads, key heads, value heads) into queries, keys and values."""
        kv_size = self.num_kv_heads * self.head_dim
        q, k, v = qkv.split((self.num_heads * self.head_dim, kv_size, kv_size), dim=-1)
        return q, k, v

    def split_kv_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """View [tokens, kv_heads * head_dim] as [tokens, kv_heads, head_dim]."""
        return rows.view(-1, self.num_kv_heads, self.head_dim)
