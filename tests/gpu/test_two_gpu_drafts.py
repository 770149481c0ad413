"""Drafts on two GPUs change no answer of the shipped model: they are those of one GPU without drafts."""

from __future__ import annotations

from typing import Any

import pytest

import srt
from tests.gpu.test_speculation import PROMPTS
from tests.gpu.test_tensor_parallel import num_graphs_left

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

OPTIONS: dict[str, Any] = {"model_path": "tiny", "dtype": "float32", "max_total_tokens": 8192, "max_replacements": 0}
"""A rank that ends would otherwise be replaced, and the answers would be the same."""
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0, "logit_bias": {"17": 100}, "max_new_tokens": 30, "ignore_eos": True},  # of one token
    {"temperature": 0, "max_new_tokens": 60},
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.5, "max_new_tokens": 60, "sampling_seed": 5},
    {"temperature": 1.0, "max_new_tokens": 40, "sampling_seed": 6, "n": 2},
]
DRAFTERS = {"NGRAM": None, "STANDALONE": "tiny-draft", "EAGLE3": "tiny-eagle3"}


def answers_of(runtime: srt.Runtime) -> list[dict[str, Any]]:
    """For each set of parameters one batch of all prompts, then one request that wants logprobs."""
    answers = [answer for given in PARAMETERS for answer in runtime.generate(PROMPTS, given)]
    return [*answers, runtime.generate(PROMPTS[0], PARAMETERS[1], return_logprob=True)]


def told(answer: dict[str, Any]) -> tuple[Any, ...]:
    meta = answer["meta_info"]
    return answer["output_ids"], meta["finish_reason"], meta["completion_tokens"]


@pytest.fixture(scope="module")
def expected() -> list[dict[str, Any]]:
    """The answers of one rank without drafts."""
    with srt.Runtime(**OPTIONS) as runtime:
        return answers_of(runtime)


@pytest.mark.parametrize("algorithm", DRAFTERS)
def test_answers_of_two_ranks_with_drafts_are_those_of_one_without(
    algorithm: str, expected: list[dict[str, Any]]
) -> None:
    drafts: dict[str, Any] = {"speculative_algorithm": algorithm, "speculative_draft_model_path": DRAFTERS[algorithm]}
    with srt.Runtime(**OPTIONS, **drafts, tp_size=2) as runtime:
        found = [answers_of(runtime)]
        while num_graphs_left(runtime):  # they are captured while nobody asks for anything else
            pass
        found.append(answers_of(runtime))
    for answers in found:
        assert [told(answer) for answer in answers] == [told(answer) for answer in expected]
        values, wanted = (
            [value for value, *_ in one[-1]["meta_info"]["output_token_logprobs"]] for one in (answers, expected)
        )
        assert values == pytest.approx(wanted, abs=1e-4)
    most = max(answer["meta_info"].get("spec_accept_length", 0.0) for answer in found[0])
    print(f"{algorithm}: up to {most:.2f} tokens a step")
    assert most > 1
