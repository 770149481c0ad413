"""Attention of a deterministic server on a CPU: one token at a time, over its request's positions in order.

Prompts and decodes run the same code, which reads all keys and values, those of the step included, from the KV memory. So a token's result
depends on its position and on what its request has stored, and on nothing else: not on chunks, pages, cached prefixes or other rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from srt.kernels.cpu.batch_invariant import BatchInvariantKernels
from srt.layers.attention.base import AttentionBackend

if TYPE_CHECKING:
    from srt.layers.attention.attention_spec import AttentionLayer
    from srt.model_executor.forward_batch_info import ForwardBatch


class BatchInvariantBackend(AttentionBackend):
    """Serves heads of equal keys and values in the model's own type, with or without windows."""

    def __init__(self, kernels: BatchInvariantKernels) -> None:
        self._kernels = kernels
        self._extend_slots = torch.empty(0, dtype=torch.int64)

    def plan_extend(self, batch: ForwardBatch) -> None:
        slots = batch.req_pool_indices[: batch.num_extend_rows]
        self._extend_slots = slots.repeat_interleave(batch.extend_seq_lens)

    def plan_decode(self, batch: ForwardBatch) -> None:
        pass  # a decode's slots and positions are those of the batch, which may be filled later

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        self._attend(q, self._extend_slots, batch.positions[: len(q)], layer, batch, out)

    def forward_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        slots, positions = batch.req_pool_indices[batch.num_extend_rows :], batch.positions[batch.num_extend_tokens :]
        self._attend(q, slots, positions, layer, batch, out)

    def _attend(
        self,
        q: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        pool, pages = batch.token_to_kv_pool, batch.page_table_of(layer.layer_id)
        kv = pool.get_kv(layer.layer_id)
        self._kernels.attend(q, slots, positions, pages, batch.req_to_token_pool.page_size, kv, layer, out)
