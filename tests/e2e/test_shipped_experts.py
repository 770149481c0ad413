"""The mixture of experts that ships with the project, through the runtime: its answers make sense, and are those of `transformers`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import srt
from recipes.tiny.chat import Message, render
from recipes.tiny.corpus import SKILL_NAMES
from recipes.tiny.evaluate import Case, draw_cases
from recipes.tiny.tokenizer import load_tokenizer
from srt.utils.checkpoint import SHIPPED_MODELS
from tests.support.oracle import Oracle

pytestmark = pytest.mark.e2e

FOLDER = SHIPPED_MODELS / "tiny-moe"
GREEDY = {"temperature": 0, "max_new_tokens": 160}
TOLERANCE = 1e-3
"""How far below the best a token's log-probability may lie: the two engines sum in different orders."""
CASES_PER_SKILL = 6
DRAFTERS = {"NGRAM": None, "STANDALONE": "tiny-draft"}


@pytest.fixture(scope="module")
def runtime() -> Iterator[srt.Runtime]:
    with srt.Runtime(model_path="tiny-moe", device="cpu", dtype="float32", max_total_tokens=65536) as runtime:
        yield runtime


def test_it_is_in_the_package_and_small() -> None:
    files = list(FOLDER.iterdir())
    assert len(files) == 5
    assert sum(file.stat().st_size for file in files) < 12_000_000


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is 2 + 2?", "2 + 2 = 4"),
        ("Sort these words: pear, fig, apple", "Sorted: apple, fig, pear"),
        ("Repeat after me: The blue owl likes the lamp.", "The blue owl likes the lamp."),
        ("Who are you?", "I am tiny, a very small language model that ships with srt."),
        ("你好", "你好！有什么可以帮你？"),
    ],
)
def test_it_answers_sensibly(runtime: srt.Runtime, question: str, answer: str) -> None:
    assert runtime.generate(render([Message("user", question)], add_generation_prompt=True), GREEDY)["text"] == answer


@pytest.fixture(scope="module")
def answered(runtime: srt.Runtime) -> list[tuple[Case, list[int], list[int]]]:
    """Cases of all skills, their prompts, and what the runtime said, all in one batch."""
    tokenizer = load_tokenizer(FOLDER)
    cases = [case for skill in SKILL_NAMES for case in draw_cases(skill, CASES_PER_SKILL, seed=2)]
    prompts = [tokenizer.encode(case.prompt(), add_special_tokens=False).ids for case in cases]
    answers = runtime.generate(input_ids=prompts, sampling_params=GREEDY)
    outputs = [answer["output_ids"] for answer in answers]
    return list(zip(cases, prompts, outputs, strict=True))


def test_its_tokens_are_those_of_transformers(answered: list[tuple[Case, list[int], list[int]]]) -> None:
    """Teacher-forced: each token is the reference's best one for what comes before it, or as good."""
    oracle, checked = Oracle(FOLDER), 0
    for _, prompt, output in answered[::3]:
        logprobs = oracle.logprobs(prompt + output)[len(prompt) - 1 : -1]
        for row, token in zip(logprobs, output, strict=True):
            assert row[token] >= row.max() - TOLERANCE
            checked += 1
    assert checked > 300


def test_it_knows_what_it_was_not_trained_on(answered: list[tuple[Case, list[int], list[int]]]) -> None:
    """A small share of what `python -m recipes.tiny.evaluate --model srt/assets/models/tiny-moe` asks."""
    tokenizer = load_tokenizer(FOLDER)
    right = sum(case.accepts(tokenizer.decode(output)) for case, _, output in answered)
    assert right >= 0.9 * len(answered)


@pytest.mark.parametrize("algorithm", DRAFTERS)
def test_ranks_that_divide_its_experts_answer_with_drafts_as_one_process(runtime: srt.Runtime, algorithm: str) -> None:
    texts = ["What is 12 + 30?", "Repeat abc abc abc abc", "Tell me a story about a fox. Tell me a story about a fox."]
    sampling = {"temperature": 0.8, "sampling_seed": 7, "max_new_tokens": 80, "ignore_eos": True}
    expected = [answer["output_ids"] for answer in runtime.generate(texts, sampling)]
    with srt.Runtime(
        model_path="tiny-moe",
        device="cpu",
        dtype="float32",
        max_total_tokens=8192,
        max_replacements=0,
        tp_size=2,
        ep_size=2,
        speculative_algorithm=algorithm,
        speculative_draft_model_path=DRAFTERS[algorithm],
    ) as divided:
        assert [answer["output_ids"] for answer in divided.generate(texts, sampling)] == expected
