"""The benchmark of drafts on a CPU counts what it says."""

from __future__ import annotations

import pytest

from benchmarks.cpu_drafts import Answers, Rates


def test_rates_are_of_the_least_times_and_of_medians() -> None:
    answers = [Answers(11, [2.0, 4.0, 9.0], [1.0, 1.5, 3.0]), Answers(21, [3.0, 5.0, 7.0], [2.5, 2.0, 4.0])]
    rates = Rates.of(answers)
    assert rates.least == pytest.approx(32 / (2 + 3))
    assert rates.median == pytest.approx(32 / (4 + 5))
    assert rates.decoding == pytest.approx((10 + 20) / (1 + 1))
    beside = Rates(3.2, 16 / 9, 10.0)
    assert rates.text(beside).split() == ["15", "1.50", "×", "6", "2.00", "×", "4", "2.00", "×"]
