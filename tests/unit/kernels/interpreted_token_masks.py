"""Masks of tokens in Triton's interpreter, against their reference."""

from __future__ import annotations

import pytest
import torch

from srt.kernels.sampling.token_masks import BLOCK, apply_token_masks
from srt.layers.token_masks import apply_token_masks_reference


@pytest.mark.parametrize(
    ("num_columns", "vocab_size", "shard_start"), [(BLOCK + 100, BLOCK + 90, 0), (70, 130, 64), (33, 40, 31)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_logits_are_those_of_the_reference(
    num_columns: int, vocab_size: int, shard_start: int, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(num_columns)
    logits = torch.randn((5, num_columns), generator=random).to(dtype)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    words = torch.randint(-(1 << 31), 1 << 31, (3, -(-vocab_size // 32)), generator=random).to(torch.int32)
    words[0, 0], words[1] = -1, 0
    wanted = logits.clone()
    apply_token_masks_reference(wanted, rows, words, shard_start)
    apply_token_masks(logits, rows, words, shard_start)
    assert torch.equal(logits, wanted)
    assert torch.isinf(logits[0]).all() and torch.isfinite(logits[1]).all()
    assert not torch.isinf(logits[4]).all()
