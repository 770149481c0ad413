"""Prompts by one backend, decodes by another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from srt.layers.attention.base import AnyRows, AttentionBackend, Reading

if TYPE_CHECKING:
    from srt.layers.attention.radix_attention import RadixAttention
    from srt.model_executor.forward_batch_info import ForwardBatch


class SplitBackend(AttentionBackend):
    """The extend rows of a mixed batch go to the first, its decode rows to the second, and both of a captured one if they may."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend, shares_prompts: bool = False) -> None:
        """`shares_prompts`: the second takes prompts too, where they are captured."""
        self._prefill = prefill
        self._decode = decode
        self.can_capture_prompts = shares_prompts and decode.can_capture_prompts
        self.plans_decodes_on_host = decode.plans_decodes_on_host
        self.can_capture_decodes = decode.can_capture_decodes

    def plan_extend(self, batch: ForwardBatch) -> None:
        self._prefill.plan_extend(batch)

    def plan_decode(self, batch: ForwardBatch) -> None:
        self._decode.plan_decode(batch)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        self._prefill.forward_extend(q, k, v, layer, batch, out)

    def forward_decode(self, q: torch.Tensor, layer: RadixAttention, batch: ForwardBatch, out: torch.Tensor) -> None:
        self._decode.forward_decode(q, layer, batch, out)

    def decode_packed(
        self,
        qkv: torch.Tensor,
        norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        layer: RadixAttention,
        batch: ForwardBatch,
    ) -> torch.Tensor | None:
        return self._decode.decode_packed(qkv, norm_weights, eps, cos, sin, layer, batch)

    def can_read(self, reading: Reading, num_rows: int) -> bool:
        return self._decode.can_read(reading, num_rows)

    def begin_decodes(self, batch: ForwardBatch, reading: Reading) -> None:
        self._decode.begin_decodes(batch, reading)

    def init_cuda_graph_state(self, max_bs: int) -> None:
        self._decode.init_cuda_graph_state(max_bs)

    def init_forward_metadata_capture_cuda_graph(self, batch: ForwardBatch) -> None:
        self._decode.init_forward_metadata_capture_cuda_graph(batch)

    def init_forward_metadata_replay_cuda_graph(self, batch: ForwardBatch) -> None:
        self._decode.init_forward_metadata_replay_cuda_graph(batch)

    def begin_any(self, rows: AnyRows, batch: ForwardBatch) -> None:
        self._decode.begin_any(rows, batch)

    def attend_any(
        self, q: torch.Tensor, rows: AnyRows, layer: RadixAttention, batch: ForwardBatch, out: torch.Tensor
    ) -> None:
        self._decode.attend_any(q, rows, layer, batch, out)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, batch: ForwardBatch) -> None:
        self._decode.write_kv(k, v, layer, batch)
