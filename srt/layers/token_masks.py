"""Masks of tokens: which ids a row of a step may draw at all, as a grammar says. Other rows are not touched."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from srt.protocol.messages import Int32Array

MINUS_INF = float("-inf")
BITS = 32


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Masks of some rows of a step, on the device. Bit i of word w of a mask allows token 32 w + i."""

    rows: torch.Tensor  # [M] int32, indices of rows that sample, each once
    words: torch.Tensor  # [M, words] int32


class MaskBuffers:
    """Memory for the masks of a step: filled on the host, then copied to the device in the order of launches.

    The host may fill them again once the step that used them is done.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        num_words = -(-vocab_size // BITS)
        is_cuda = device.type == "cuda"
        self._rows = torch.zeros(max_rows, dtype=torch.int32, pin_memory=is_cuda)
        self._words = torch.zeros((max_rows, num_words), dtype=torch.int32, pin_memory=is_cuda)
        self._device_rows = torch.empty_like(self._rows, device=device) if is_cuda else self._rows
        self._device_words = torch.empty_like(self._words, device=device) if is_cuda else self._words
        self.words: Int32Array = self._words.numpy()  # [max_rows, words], for the host to fill

    def upload(self, rows: list[int]) -> TokenMasks:
        """Copy the first masks to the device: those of these rows."""
        count = len(rows)
        self._rows.numpy()[:count] = np.asarray(rows, np.int32)
        if self._device_words is not self._words:
            self._device_rows[:count].copy_(self._rows[:count], non_blocking=True)
            self._device_words[:count].copy_(self._words[:count], non_blocking=True)
        return TokenMasks(self._device_rows[:count], self._device_words[:count])


def apply_token_masks(logits: torch.Tensor, masks: TokenMasks, shard_start: int) -> None:
    """Set the logits [R, columns] of tokens that a row may not draw to -inf. Column 0 is token `shard_start`."""
    if logits.is_cuda:
        # Triton is not there on every host: it is imported where there is a GPU.
        from srt.kernels.sampling.token_masks import apply_token_masks as launch

        launch(logits, masks.rows, masks.words, shard_start)
    else:
        apply_token_masks_reference(logits, masks.rows, masks.words, shard_start)


def apply_token_masks_reference(
    logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor, shard_start: int
) -> None:
    """What the kernel does, in plain PyTorch. Tokens beyond the last word are not allowed."""
    tokens = torch.arange(shard_start, shard_start + logits.shape[1], device=logits.device)
    index = (tokens // BITS).clamp(max=words.shape[1] - 1)
    is_allowed = (words[:, index] >> (tokens % BITS)) & 1 == 1
    is_allowed &= tokens < words.shape[1] * BITS
    chosen = logits[rows.long()]
    logits[rows.long()] = chosen.masked_fill(~is_allowed, MINUS_INF)
