"""The benchmark of drafts on a CPU counts what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cpu_drafts import Answers, Rates, num_decode_steps
from benchmarks.draft_prompts import edits, first_messages, quotes, read_entries


def test_rates_are_of_the_least_times_and_of_medians() -> None:
    answers = [
        Answers(11, [2.0, 4.0, 9.0], [1.0, 1.5, 3.0], [10, 5, 5]),
        Answers(21, [3.0, 5.0, 7.0], [2.5, 2.0, 4.0], [10, 10, 20]),
    ]
    rates = Rates.of(answers)
    assert rates.least == pytest.approx(32 / (2 + 3))
    assert rates.median == pytest.approx(32 / (4 + 5))
    assert rates.decoding == pytest.approx((10 + 20) / (1 + 1))
    assert rates.tokens_a_step == pytest.approx((3 * 10 + 3 * 20) / (20 + 40))
    beside = Rates(3.2, 16 / 9, 10.0, 1.0)
    assert rates.text(beside).split() == ["15", "1.50", "×", "6", "2.00", "×", "4", "2.00", "×", "1.50"]


@pytest.mark.parametrize(
    ("verified", "steps"),
    [
        ({}, 20),
        ({"spec_verify_ct": 4, "spec_accept_length": 2.5}, 4 + 10),
        ({"spec_verify_ct": 6, "spec_accept_length": 4.0}, 6),  # a draft may go on behind the end
    ],
)
def test_steps_are_those_that_verified_and_one_for_each_other_token(verified: dict[str, float], steps: int) -> None:
    assert num_decode_steps({"completion_tokens": 21, **verified}) == steps


def test_prompts_repeat_what_they_ask_for() -> None:
    assert all(len(text) > 200 for text in quotes())
    for text in edits():
        assert text.count(text.split("`")[1]) > 2


def test_conversations_are_read_up_to_where_a_file_is_cut_off(tmp_path: Path) -> None:
    entry = '{"conversations": [{"from": "human", "value": "%s"}]}'
    texts = [f"{number:02} {'word ' * 10}" for number in range(30)]
    file = tmp_path / "conversations.json"
    file.write_text("[" + ", ".join(entry % text for text in [*texts, "short"]) + ', {"conversations": [{"fr')
    assert len(list(read_entries(file.read_text()))) == 31
    chosen = list(first_messages(file))
    assert chosen == list(first_messages(file))
    assert len(set(chosen)) == 24 and set(chosen) <= set(texts)
