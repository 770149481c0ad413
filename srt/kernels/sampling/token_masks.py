"""Masks of tokens on the device, to the bit what `apply_token_masks_reference` of `srt.layers.token_masks` says."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from srt.kernels.build.jit import kernel

BLOCK: Final = 2048


@kernel(
    one_variant_for=(
        "logits_ptr", "rows_ptr", "words_ptr", "num_columns", "num_words", "shard_start", "row_stride", "words_stride",
    )
)  # fmt: skip
def apply_token_masks_kernel(
    logits_ptr: tl.tensor,  # [rows, columns]
    rows_ptr: tl.tensor,  # [masks] int32
    words_ptr: tl.tensor,  # [masks, words] int32
    num_columns: tl.tensor,
    num_words: tl.tensor,
    shard_start: tl.tensor,
    row_stride: tl.tensor,
    words_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Program (part, mask): writes -inf to the logits of a part of the row's tokens that the mask does not allow."""
    mask = tl.program_id(1).to(tl.int64)
    row = tl.load(rows_ptr + mask).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tokens = columns + shard_start
    index = tokens // 32
    words = tl.load(words_ptr + mask * words_stride + index, mask=index < num_words, other=0)
    is_allowed = ((words >> (tokens % 32)) & 1) == 1
    minus_inf = tl.full([BLOCK], float("-inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * row_stride + columns, minus_inf, mask=(columns < num_columns) & ~is_allowed)


def apply_token_masks(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor, shard_start: int) -> None:
    """Set the logits of tokens that a row may not draw to -inf, in place. It reads one bit a token, and writes what it forbids."""
    num_columns = logits.shape[1]
    grid = triton.cdiv(num_columns, BLOCK), len(rows)
    apply_token_masks_kernel[grid](
        logits, rows, words, num_columns, words.shape[1], shard_start, logits.stride(0), words.stride(0), BLOCK=BLOCK
    )
