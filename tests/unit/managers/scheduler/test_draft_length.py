"""How many drafts the rows of a step may bring, on devices and texts of which the best number is known."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest

from srt.managers.scheduler.draft_length import DraftLength

Device = Callable[[int, int], float]  # µs of a step by rows and tokens a row


def _h200(num_rows: int, row_tokens: int) -> float:
    """An 8B model with a smaller one: weights and keys are read in any case, and from about 200 tokens on products take longer."""
    drafts = 0.0 if row_tokens == 1 else 500.0 * (row_tokens - 1) + 200
    return 4600.0 + 25 * num_rows + 20 * max(0, num_rows * row_tokens - 200) + drafts


class _Engine:
    """Plans steps with two in flight, each draft right with the same probability."""

    def __init__(
        self, most: int, device: Device, share: float, noise: float = 0.0, seed: int = 1, interruptions: float = 0.0
    ) -> None:
        self.length = DraftLength(most)
        self._device, self._share, self._noise = device, share, noise
        self._interruptions = interruptions  # in a ms of work, each of 10 ms on average
        self._rng = random.Random(seed)
        self._in_flight: deque[tuple[int, int, int, int]] = deque()
        self.chosen: list[int] = []

    def change_texts(self, share: float) -> None:
        self._share = share

    def run(self, num_rows: int, num_steps: int) -> float:
        """Return tokens per time, of these steps and this number of rows, by that of steps without drafts."""
        tokens, us, plain_us = 0, 0.0, 0.0
        for _ in range(num_steps):
            row_tokens = self.length.choose(num_rows)
            self.chosen.append(row_tokens)
            self.length.note_planned(num_rows, row_tokens)
            num_ids = sum(self._ids(row_tokens) for _ in range(num_rows))
            factor = 1 + self._noise * self._rng.random()
            step_us = self._device(num_rows, row_tokens) * factor
            step_us += self._waits_us(step_us)
            plain_us += self._device(num_rows, 1) * factor
            self._in_flight.append((num_rows, row_tokens, num_ids, int(step_us)))
            tokens, us = tokens + num_ids, us + step_us
            if len(self._in_flight) == 2:
                self.length.record(*self._in_flight.popleft())
        return tokens / us / (num_steps * num_rows / plain_us)

    def _waits_us(self, step_us: float) -> float:
        waits_us, left_us = 0.0, step_us
        while self._interruptions:
            left_us -= 1e3 * self._rng.expovariate(self._interruptions)
            if left_us < 0:
                break
            waits_us += self._rng.expovariate(1e-4)
        return waits_us

    def _ids(self, row_tokens: int) -> int:
        count = 1
        while count < row_tokens and self._rng.random() < self._share:
            count += 1
        return count


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("most", [2, 4, 5, 8])
def test_a_batch_of_256_never_loses_to_no_drafts(share: float, most: int) -> None:
    assert _Engine(most, _h200, share, noise=0.03).run(256, 512) >= 0.98


@pytest.mark.parametrize("share", [0.7, 0.9])
def test_few_rows_draft_where_drafts_are_right(share: float) -> None:
    engine = _Engine(4, _h200, share)
    engine.run(1, 200)
    assert engine.run(1, 1000) >= 0.97 * _mean(share, 4) * _h200(1, 1) / _h200(1, 4)


def test_few_rows_keep_good_drafts_where_times_vary() -> None:
    """Steps take up to three times as long as others, as on a busy machine."""
    for seed in range(8):
        engine = _Engine(5, _h200, 0.9, noise=2.0, seed=seed)
        assert engine.run(1, 400) >= 0.85 * _mean(0.9, 5) * _h200(1, 1) / _h200(1, 5)


def _cpu(num_rows: int, row_tokens: int) -> float:
    """The shipped model on two cores."""
    return 1000.0 + (300.0 + 180.0 * (row_tokens - 1) if row_tokens > 1 else 0.0)


@pytest.mark.parametrize("interruptions", [0.02, 0.05])
@pytest.mark.parametrize(("share", "chosen"), [(0.97, 5), (0.0, 1)])
def test_interruptions_decide_nothing(share: float, chosen: int, interruptions: float) -> None:
    """On a busy machine a step may wait for a core, the more often the longer it is, and for longer than it takes."""
    for seed in range(20):
        engine = _Engine(5, _cpu, share, interruptions=interruptions, seed=seed)
        engine.run(1, 600)
        assert engine.chosen.count(chosen) >= 0.9 * len(engine.chosen), seed


def test_each_number_of_rows_has_a_choice_of_its_own() -> None:
    engine = _Engine(4, _h200, 0.4)
    for num_rows in (1, 256, 1, 256):
        engine.run(num_rows, 60)
    del engine.chosen[:]
    engine.run(1, 50)
    engine.run(256, 50)
    assert engine.chosen[:50].count(4) >= 40
    assert engine.chosen[50:].count(1) >= 40


def test_drafts_come_back_when_texts_change() -> None:
    engine = _Engine(4, _h200, 0.0)
    engine.run(32, 200)
    assert engine.chosen[-1] == 1
    engine.change_texts(0.9)
    engine.run(32, 2000)
    assert engine.chosen[-40:].count(4) >= 30


def test_a_number_in_between_is_found() -> None:
    """Where each further token costs the same, and later drafts are seldom right, half of the drafts are best."""

    def device(num_rows: int, row_tokens: int) -> float:
        return 1000.0 + 180.0 * row_tokens

    engine = _Engine(8, device, 0.6)
    rates = {tokens: _mean(0.6, tokens) / device(64, tokens) for tokens in (8, 4, 1)}
    assert max(rates, key=rates.__getitem__) == 4
    engine.run(64, 600)
    assert engine.chosen[-100:].count(4) >= 80


def test_without_drafts_there_is_nothing_to_choose() -> None:
    engine = _Engine(1, _h200, 0.0)
    engine.run(16, 300)
    assert set(engine.chosen) == {1}
    assert DraftLength(4).choose(0) == 1


def _mean(share: float, row_tokens: int) -> float:
    return sum(share**place for place in range(row_tokens))
