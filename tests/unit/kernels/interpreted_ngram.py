"""Drafts by repetition in Triton's interpreter, against those of the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from srt.kernels.sampling.ngram import BLOCK, draft_ngrams
from srt.model_executor.device_ngram import draft_ngrams_reference


@pytest.mark.parametrize(("least", "longest"), [(2, 12), (1, 3)])
def test_drafts_are_those_of_the_host(least: int, longest: int) -> None:
    rng, most_drafts = np.random.default_rng(longest), 5
    lengths = [1, 2, 3, 7, 30, 60, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 300]
    table = torch.from_numpy(rng.integers(0, 4, (len(lengths) + 1, 3 * BLOCK)).astype(np.int32))
    table[5] = torch.from_numpy(rng.permutation(3 * BLOCK).astype(np.int32))  # nothing occurs twice
    seq_lens = torch.tensor([*lengths, 0])
    slots = torch.from_numpy(rng.permutation(len(lengths)))
    most = torch.tensor([most_drafts, 3, 0, 1, 5, 5, 4, 5, 2, 5])
    wanted = table.clone()
    draft_ngrams_reference(slots, most, seq_lens, wanted, least, longest, most_drafts)
    assert not torch.equal(table, wanted)
    draft_ngrams(slots, most, seq_lens, table, least, longest, most_drafts)
    assert torch.equal(table, wanted)
