"""Attention with a fault each, which tests of real attention must find."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from srt.layers.attention.attention_spec import AttentionLayer, AttentionSpec
from srt.layers.attention.base import AttentionBackend
from srt.layers.attention.triton_backend import TritonAttentionBackend
from srt.model_executor.forward_batch_info import ForwardBatch


class _InTwoSteps(TritonAttentionBackend):
    """Norm, rotation and the memory's writes first, as other backends have it: then every decode comes by here."""

    @property
    def packed_decodes(self) -> None:
        return None


class ShortByOne(_InTwoSteps):
    """Decodes without the newest position."""

    def forward_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        super().forward_decode(q, layer, replace(batch, seq_lens=batch.seq_lens - 1), out)


class LongByOne(_InTwoSteps):
    """Lets the tokens of a chunk see one position too many."""

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        wrong = replace(batch, extend_prefix_lens=batch.extend_prefix_lens + 1)
        super().forward_extend(q, k, v, layer, wrong, out)


class WrongPage(_InTwoSteps):
    """Reads a row's first page where its second is."""

    def forward_decode(self, q: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, out: torch.Tensor) -> None:
        tables = batch.req_to_token_pool
        right = tables.page_table.clone()
        tables.page_table[:, 1] = tables.page_table[:, 0]
        super().forward_decode(q, layer, batch, out)
        tables.page_table.copy_(right)


WRONG = (ShortByOne, LongByOne, WrongPage)


def wrongly_planned(spec: AttentionSpec, device: torch.device, wrong: str) -> AttentionBackend:
    """flashinfer's, for prompts and decodes, with one fault; with none if it is not named."""
    from srt.layers.attention import flashinfer_backend  # which is not there on every host

    class Planned(flashinfer_backend.FlashInferBackend):
        def plan_decode(self, batch: ForwardBatch) -> None:
            less = int(wrong == "short decodes")
            super().plan_decode(replace(batch, seq_lens_cpu=batch.seq_lens_cpu - less))

        def plan_extend(self, batch: ForwardBatch) -> None:
            more = int(wrong == "long prompts")
            super().plan_extend(replace(batch, extend_prefix_lens_cpu=batch.extend_prefix_lens_cpu + more))

        def _gather(
            self,
            batch: ForwardBatch,
            slots: torch.Tensor,
            rows: flashinfer_backend._PageRows,
            out: torch.Tensor,
            window: int | None,
            positions: NDArray[np.int64],
        ) -> None:
            super()._gather(batch, slots, rows, out, window, positions)
            if wrong == "wrong page":
                out[1] = out[0]

    return Planned(spec, device, "fa2")
