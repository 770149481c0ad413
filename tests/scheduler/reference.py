"""The model of the simulation: tokens and logprobs are a pure function of the request's tokens, so every answer is known beforehand.

The worker need not compute it: a slot that was admitted with the tokens of the reference goes on as the reference does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from srt.protocol.messages import Float32Array, Int32Array, SamplingSpec

UInt64Array = NDArray[np.uint64]
_LONGEST = 4096
_FACTOR = 0x9E3779B97F4A7C15
_POWERS: UInt64Array = np.multiply.accumulate(np.full(_LONGEST, _FACTOR, np.uint64))
_INVERSES: UInt64Array = np.multiply.accumulate(np.full(_LONGEST, pow(_FACTOR, -1, 1 << 64), np.uint64))
_NOT_FINITE_EVERY = 199


def prefix_hashes(ids: Int32Array, salt: str = "") -> UInt64Array:
    """Hash of the tokens up to and including each of `ids`, and of the cache salt: h' = factor * (h + token + 7), modulo 2 ** 64."""
    # A large number, so that no token after one salt looks like another token after another salt.
    before = np.uint64(17 + int.from_bytes(salt.encode()) * _FACTOR % (1 << 64))
    count = len(ids)
    return _POWERS[:count] * (
        before + np.cumsum((ids + 7).astype(np.uint64) * _INVERSES[:count], dtype=np.uint64) * np.uint64(_FACTOR)
    )


def is_any(flags: NDArray[np.bool_]) -> bool:
    """A third of what `flags.any()` costs."""
    return b"\1" in flags.tobytes()


def logprobs(hashes: UInt64Array) -> list[float]:
    """Of the tokens that end prefixes with these hashes."""
    values: list[float] = (-(hashes % np.uint64(100_000)).astype(np.float32) / np.float32(1000)).tolist()
    return values


def best_tokens(hashes: UInt64Array, count: int, vocab_size: int) -> tuple[Int32Array, Float32Array]:
    """The best tokens in the place of those that end these prefixes, `count` for each, and their logprobs."""
    ranks = np.arange(count, dtype=np.uint64)
    ids = (hashes[:, None] // np.uint64(11) + ranks * np.uint64(3)) % np.uint64(vocab_size)
    values = -(ranks + (hashes[:, None] % np.uint64(1000)).astype(np.float32) / np.float32(1000))
    return ids.astype(np.int32), values.astype(np.float32)


def logprobs_of(hashes: UInt64Array, ids: Int32Array) -> Float32Array:
    """Of each of these tokens in the place of each of those that end these prefixes."""
    mixed = hashes[:, None] ^ ((ids + 1).astype(np.uint64) * np.uint64(_FACTOR))
    return -(mixed % np.uint64(100_000)).astype(np.float32) / np.float32(1000)


def _draws(prompt_hash: np.uint64, choice: int, count: int) -> UInt64Array:
    """64 random bits for each output position."""
    x = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(choice * 7919)) * np.uint64(_FACTOR) + prompt_hash
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a choice gets that is never interrupted, and what the model would say if it went on behind that."""

    all_ids: Int32Array  # prompt, answer, and on to max_new_tokens
    ids: list[int]  # the answer
    reason: str
    matched: int
    error_at: int  # the first output index at which the model breaks down; -1: never


def answer(
    prompt: Int32Array, prompt_hash: np.uint64, choice: int, sampling: SamplingSpec, vocab_size: int, breaks_down: bool
) -> Answer:
    draws = _draws(prompt_hash, choice, sampling.max_new_tokens)
    ids = (draws % np.uint64(vocab_size)).astype(np.int32)
    end, reason, matched, error_at = len(ids), "length", -1, -1
    if len(sampling.stop_ids):
        _avoid(ids[: sampling.min_new_tokens], sampling.stop_ids, vocab_size)
        stops = np.flatnonzero((ids[:, None] == sampling.stop_ids).any(1))
        if len(stops):
            end, reason, matched = int(stops[0]) + 1, "stop", int(ids[stops[0]])
    if breaks_down:
        errors = np.flatnonzero((draws >> np.uint64(40)) % np.uint64(_NOT_FINITE_EVERY) == 0)
        error_at = int(errors[0]) if len(errors) else -1
        if 0 <= error_at < end:
            end, reason, matched = error_at, "error", -1
    return Answer(np.concatenate((prompt, ids)), ids[:end].tolist(), reason, matched, error_at)


def _avoid(ids: Int32Array, banned: Int32Array, vocab_size: int) -> None:
    """Move on to the next id, in place, where one is banned."""
    while is_any(bad := (ids[:, None] == banned).any(1)):
        ids[bad] = (ids[bad] + 1) % vocab_size
