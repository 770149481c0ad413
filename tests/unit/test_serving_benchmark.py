"""What the benchmark over HTTP sends."""

from __future__ import annotations

import json

from benchmarks.serving import Call, make_calls


def prompts(calls: list[Call]) -> list[list[int]]:
    return [json.loads(call.body)["input_ids"] for call in calls]


def test_a_seed_repeats_lengths_and_arrivals_and_no_prompt() -> None:
    first, again, other = (make_calls(20, 5.0, 100, 200, 0.6, seed) for seed in (0, 0, 1))
    assert [(call.at_s, call.new_tokens) for call in first] == [(call.at_s, call.new_tokens) for call in again]
    assert [len(prompt) for prompt in prompts(first)] == [len(prompt) for prompt in prompts(again)]
    assert [len(prompt) for prompt in prompts(first)] != [len(prompt) for prompt in prompts(other)]
    assert all(a[:16] != b[:16] for a, b in zip(prompts(first), prompts(again), strict=True)), "no page of 16 is cached"
