"""What the parity tests send, and what must come back: prompts that share prefixes, and the tokens that `transformers` gives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from srt.protocol.messages import SamplingSpec
from tests.support.oracle import Expected, Oracle

FIRST_ORDINARY_ID = 16  # special tokens lie below


@dataclass(frozen=True, slots=True)
class Case:
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    expected: Expected


def greedy_cases(
    folder: Path, eos_ids: list[int], *, talkers: int, readers: int, seed: int, longest: int, most_new: int
) -> list[Case]:
    """Greedy requests that are fit for an exact comparison: first `talkers`, with short prompts and long answers, so that many rows
    share a step whatever the chunk size; then `readers`, with short answers to longer prompts, in groups that share a prefix."""
    oracle, rng, cases = Oracle(folder), np.random.default_rng(seed), list[Case]()
    while len(cases) < talkers:
        cases += _safe_cases(oracle, _tokens(rng, oracle, int(rng.integers(1, 7))), most_new, eos_ids)
    while len(cases) < talkers + readers:
        # The first group is long enough for several of the larger chunks, and begins with its longest, which finds nothing cached.
        is_first = len(cases) == talkers
        prefix = _tokens(rng, oracle, 2 * longest if is_first else int(rng.integers(longest // 2, longest)))
        for number in range(min(8, talkers + readers - len(cases))):
            num_shared = len(prefix) if number == 0 else int(rng.integers(len(prefix) // 2, len(prefix) + 1))
            prompt = prefix[:num_shared] + _tokens(rng, oracle, int(rng.integers(1, 9)))
            cases += _safe_cases(oracle, prompt, int(rng.integers(2, 1 + most_new // 3)), eos_ids)
    return cases


def _safe_cases(oracle: Oracle, prompt: list[int], max_new_tokens: int, eos_ids: list[int]) -> list[Case]:
    """One case, or none when a decision was close."""
    spec = SamplingSpec(max_new_tokens=max_new_tokens, temperature=0.0, stop_ids=np.asarray(sorted(eos_ids), np.int32))
    expected = oracle.expect(prompt, spec)
    return [Case(tuple(prompt), max_new_tokens, expected)] if expected.is_safe else []


def _tokens(rng: np.random.Generator, oracle: Oracle, count: int) -> list[int]:
    return [int(i) for i in rng.integers(FIRST_ORDINARY_ID, oracle.vocab_size, count)]


Answer = dict[str, Any]
Stream = Callable[[Case], AsyncIterator[Answer]]


async def send_at_random(cases: list[Case], stream: Stream, rng: np.random.Generator) -> list[Answer]:
    """All cases through `stream`, in waves whose moments are set by what has come back so far; the last update of each."""
    news, heard = asyncio.Condition(), 0

    async def one(case: Case) -> Answer:
        nonlocal heard
        last: Answer = {}
        async for last in stream(case):
            async with news:
                heard += 1
                news.notify_all()
        return last

    tasks: list[asyncio.Task[Answer]] = []
    while len(tasks) < len(cases):
        wave = cases[len(tasks) : len(tasks) + int(rng.integers(24, 41))]
        goal = heard + int(rng.integers(1, 9))  # a quick answer brings one update
        tasks += [asyncio.create_task(one(case)) for case in wave]
        async with news:
            while heard < goal and not any(task.done() and task.exception() for task in tasks):
                await news.wait()
    return list(await asyncio.gather(*tasks))
