"""Serve prompts with one backend and decodes with another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from srt.layers.attention.base import (
    AttentionBackend,
    DecodeGraphs,
    DecodeReadings,
    DraftReadings,
    HostPlans,
    PromptGraphs,
)

if TYPE_CHECKING:
    from srt.layers.attention.attention_spec import AttentionLayer
    from srt.model_executor.forward_batch_info import ForwardBatch, PackedDecodes


class SplitBackend(AttentionBackend):
    """Sends extend rows to the prefill backend and decode rows to the decode backend; captured prompts may go to the latter too."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend, shares_prompts: bool = False) -> None:
        """With `shares_prompts`, the decode backend also serves prompts in steps that are captured with their attention."""
        self._prefill = prefill
        self._decode = decode
        self._shares_prompts = shares_prompts

    @property
    def decode_graphs(self) -> DecodeGraphs | None:
        return self._decode.decode_graphs

    @property
    def host_plans(self) -> HostPlans | None:
        return self._decode.host_plans

    @property
    def decode_readings(self) -> DecodeReadings | None:
        return self._decode.decode_readings

    @property
    def draft_readings(self) -> DraftReadings | None:
        return self._decode.draft_readings

    @property
    def packed_decodes(self) -> PackedDecodes | None:
        return self._decode.packed_decodes

    @property
    def prompt_graphs(self) -> PromptGraphs | None:
        return self._decode.prompt_graphs if self._shares_prompts else None

    def plan_extend(self, batch: ForwardBatch) -> None:
        self._prefill.plan_extend(batch)

    def plan_decode(self, batch: ForwardBatch) -> None:
        self._decode.plan_decode(batch)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        self._prefill.forward_extend(q, k, v, layer, batch, out)

    def forward_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        self._decode.forward_decode(q, layer, batch, out)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch) -> None:
        self._decode.write_kv(k, v, layer, batch)
