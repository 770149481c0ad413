"""A smaller model that draws with the request's own noise meets the model's draw more often than one with noise of its own."""

from __future__ import annotations

import math

import numpy as np
import torch

from srt.kernels.sampling.draw_rows import DrawRows
from srt.layers.sampler import draw_from_shard

VOCAB = 40
NUM_DRAWS = 8000
SIGMAS = 5


def drawn(logits: np.ndarray, seed: int) -> np.ndarray:
    """The ids that the sampler draws at temperature 1 from these logits, at NUM_DRAWS positions of one request."""
    rows = torch.from_numpy(np.tile(logits.astype(np.float32), (NUM_DRAWS, 1)))
    temperatures, seeds = torch.ones(NUM_DRAWS), torch.full((NUM_DRAWS,), seed, dtype=torch.int64)
    ids, _ = draw_from_shard(rows, DrawRows(temperatures, seeds, torch.arange(NUM_DRAWS), None), 0, VOCAB)
    return ids.numpy()


def test_drafts_are_accepted_as_often_as_their_coupling_says() -> None:
    rng = np.random.default_rng(4)
    target = rng.normal(0, 2, VOCAB)
    for distance in (0.5, 1.0, 2.0):
        draft = target + rng.normal(0, distance, VOCAB)
        accepted = float((drawn(target, 7) == drawn(draft, 7)).mean())
        noise = rng.gumbel(size=(NUM_DRAWS, VOCAB))
        simulated = float(((target + noise).argmax(1) == (draft + noise).argmax(1)).mean())
        likely = [np.exp(logits) / np.exp(logits).sum() for logits in (target, draft)]
        independent = float(likely[0] @ likely[1])
        error = SIGMAS * math.sqrt(2 * simulated * (1 - simulated) / NUM_DRAWS)
        assert abs(accepted - simulated) < error
        assert accepted > independent + error
        assert accepted <= np.minimum(*likely).sum() + error  # no coupling can do better
        assert abs(float((drawn(target, 7) == drawn(draft, 8)).mean()) - independent) < error
