"""What a request's tokens must be: `transformers` for the logits, and the draw written out slowly in float64.

The tests' second opinion on model, cache, batching and sampler at once. It shares no code with the sampler that serves. A request is
only fit for an exact comparison when no decision on its way was close: `Expected.margin` is the smallest distance, over all positions,
between the best two candidates and between any token and a filter's boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from srt.protocol.messages import SamplingSpec

Float64Array = NDArray[np.float64]
SAFE_MARGIN = 1e-5


@dataclass(frozen=True, slots=True)
class Expected:
    ids: tuple[int, ...]
    margin: float
    stopped: bool  # by a stop id; otherwise by length

    @property
    def is_safe(self) -> bool:
        return self.margin >= SAFE_MARGIN


class Oracle:
    """One checkpoint in `transformers`, float32, one request at a time."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.vocab_size: int = self._model.config.vocab_size

    def expect(self, prompt_ids: list[int], spec: SamplingSpec, seed: int = 0) -> Expected:
        """The tokens that this request must get."""
        ids, cache, fed = list(prompt_ids), None, 0
        margin, stop_ids = np.inf, {int(i) for i in spec.stop_ids}
        while len(ids) < len(prompt_ids) + spec.max_new_tokens:
            logits, cache = self._next_logits(ids[fed:], cache)
            fed = len(ids)
            token, gap = draw(logits, ids, len(prompt_ids), spec, seed)
            margin = min(margin, gap)
            ids.append(token)
            if token in stop_ids:
                return Expected(tuple(ids[len(prompt_ids) :]), margin, stopped=True)
        return Expected(tuple(ids[len(prompt_ids) :]), margin, stopped=False)

    def logprobs(self, ids: list[int]) -> Float64Array:
        """[len(ids), vocabulary]: row i holds the model's log-probabilities of the token behind ids[: i + 1]."""
        with self._torch.inference_mode():
            logits = self._model(self._torch.tensor([ids])).logits[0].double()
            values: Float64Array = logits.log_softmax(-1).numpy()
        return values

    def _next_logits(self, new_ids: list[int], cache: Any) -> tuple[Float64Array, Any]:
        with self._torch.inference_mode():
            output = self._model(self._torch.tensor([new_ids]), past_key_values=cache, use_cache=True)
        return output.logits[0, -1].double().numpy(), output.past_key_values


def draw(logits: Float64Array, ids: list[int], prompt_len: int, spec: SamplingSpec, seed: int) -> tuple[int, float]:
    """The token drawn behind `ids`, and how close the closest decision was."""
    scores = _penalised(logits, ids, prompt_len, spec)
    scores[spec.bias_ids] += spec.bias_values
    if len(ids) - prompt_len < spec.min_new_tokens:
        scores[spec.stop_ids] = -np.inf
    if spec.temperature == 0:
        return _best(scores)
    scores = scores / spec.temperature
    scores, margin = _filtered(scores, spec)
    token, gap = _best(scores + gumbel_noise(seed, len(ids), len(scores)))
    return token, min(margin, gap)


def _penalised(logits: Float64Array, ids: list[int], prompt_len: int, spec: SamplingSpec) -> Float64Array:
    scores = logits.copy()
    seen = np.unique(ids)
    scores[seen] = np.where(
        scores[seen] > 0, scores[seen] / spec.repetition_penalty, scores[seen] * spec.repetition_penalty
    )
    counts = np.bincount(ids[prompt_len:], minlength=len(scores)) if len(ids) > prompt_len else np.zeros(len(scores))
    return scores - spec.frequency_penalty * counts - spec.presence_penalty * (counts > 0)


def _filtered(scores: Float64Array, spec: SamplingSpec) -> tuple[Float64Array, float]:
    """top_k, top_p, min_p, each on what the one before left; ties with a boundary stay."""
    margin = np.inf
    if 0 < spec.top_k < len(scores):
        boundary, below = np.sort(scores)[::-1][spec.top_k - 1 : spec.top_k + 1]
        margin = min(margin, boundary - below)
        scores = np.where(scores >= boundary, scores, -np.inf)
    if spec.top_p < 1:
        order = np.argsort(-scores, kind="stable")
        before = np.cumsum(_softmax(scores)[order]) - _softmax(scores)[order]
        boundary = scores[order[np.flatnonzero(before < spec.top_p)[-1]]]
        margin = min(margin, float(np.abs(before[1:] - spec.top_p).min()))
        scores = np.where(scores >= boundary, scores, -np.inf)
    if spec.min_p > 0:
        distance = scores - (scores.max() + np.log(spec.min_p))
        margin = min(margin, float(np.abs(distance[np.isfinite(distance)]).min()))
        scores = np.where(distance >= 0, scores, -np.inf)
    return scores, margin


def _best(scores: Float64Array) -> tuple[int, float]:
    second, first = np.sort(scores)[-2:]
    return int(scores.argmax()), float(first - second)


def _softmax(scores: Float64Array) -> Float64Array:
    weights: Float64Array = np.exp(scores - scores.max())
    shares: Float64Array = weights / weights.sum()
    return shares


def gumbel_noise(seed: int, position: int, vocab_size: int) -> Float64Array:
    """The noise of every token id at this position of the sequence: a pure function of its three arguments."""
    token_ids = np.arange(vocab_size, dtype=np.uint64)
    words = philox4x32(seed, token_ids // np.uint64(4), position)
    word = words[token_ids % np.uint64(4), np.arange(vocab_size)]
    uniform = (word.astype(np.float64) + 0.5) * 2.0**-32
    noise: Float64Array = -np.log(-np.log(uniform))
    return noise


def philox4x32(key: int, low: NDArray[np.uint64], high: int) -> NDArray[np.uint64]:
    """[4, n] 32-bit words of Philox4x32-10 with counters (low, high, 0, 0)."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    k0, k1 = np.uint64(key) & mask, np.uint64(key) >> shift
    c0, c1 = low & mask, np.full_like(low, high)
    c2, c3 = np.zeros_like(low), np.zeros_like(low)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ k0, p1 & mask, (p0 >> shift) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    return np.stack([c0, c1, c2, c3])
