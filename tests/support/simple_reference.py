"""The model of small worlds: tokens and logprobs are a pure function of the tokens before them, so every answer is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from srt.protocol.messages import SamplingSpec

_PRIME = (1 << 61) - 1
_NOT_FINITE_EVERY = 199


def extend_hash(prefix: int, token: int) -> int:
    return (prefix * 1_000_003 + token + 7) % _PRIME


def prefix_hashes(ids: list[int], before: int = 17) -> list[int]:
    """Hash of the tokens up to and including each of `ids`."""
    hashes = []
    for token in ids:
        before = extend_hash(before, token)
        hashes.append(before)
    return hashes


def draw(prefix: int, seed: int, vocab_size: int, banned: frozenset[int]) -> int:
    """The token behind this prefix."""
    value = (prefix ^ seed) * 0x9E3779B97F4A7C15 % (1 << 64) >> 17
    token = value % vocab_size
    while token in banned:
        token = (token + 1) % vocab_size
    return token


def is_not_finite(prefix: int, seed: int) -> bool:
    """The model breaks down behind this prefix."""
    return (prefix ^ seed) % _NOT_FINITE_EVERY == 0


def logprob(prefix: int) -> float:
    """Of the token that ends this prefix."""
    return float(np.float32(-(prefix % 100_000) / 1000))


@dataclass(frozen=True, slots=True)
class Answer:
    ids: list[int]
    logprobs: list[float]
    reason: str
    matched: int


def answer(prompt: list[int], sampling: SamplingSpec, seed: int, vocab_size: int, breaks_down: bool) -> Answer:
    """What a request without interruptions gets."""
    stops = frozenset(sampling.stop_ids.tolist())
    prefix = prefix_hashes(prompt)[-1]
    ids: list[int] = []
    logprobs: list[float] = []
    while True:
        if breaks_down and is_not_finite(prefix, seed):
            return Answer(ids, logprobs, "error", -1)
        token = draw(prefix, seed, vocab_size, stops if len(ids) < sampling.min_new_tokens else frozenset())
        prefix = extend_hash(prefix, token)
        ids.append(token)
        logprobs.append(logprob(prefix))
        if token in stops:
            return Answer(ids, logprobs, "stop", token)
        if len(ids) == sampling.max_new_tokens:
            return Answer(ids, logprobs, "length", -1)
