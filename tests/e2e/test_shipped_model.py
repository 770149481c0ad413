"""The model that ships with the project, through the runtime: what it says makes sense, and is what `transformers` would say."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import srt
from recipes.tiny.chat import Message, render
from recipes.tiny.corpus import SKILL_NAMES
from recipes.tiny.evaluate import Case, count_agreed, draw_cases
from recipes.tiny.model import load_checkpoint
from recipes.tiny.skills.stories import follows_grammar
from recipes.tiny.skills.unknown import UNKNOWN
from recipes.tiny.tokenizer import load_tokenizer
from srt.utils.checkpoint import SHIPPED_MODELS
from tests.support.oracle import Oracle

pytestmark = pytest.mark.e2e

GREEDY = {"temperature": 0, "max_new_tokens": 160}
TOLERANCE = 1e-3
"""How far below the best a token's log-probability may lie: the two engines sum in different orders."""
CASES_PER_SKILL = 12


@pytest.fixture(scope="module")
def runtime() -> Iterator[srt.Runtime]:
    with srt.Runtime(model_path="tiny", device="cpu", dtype="float32", max_total_tokens=65536) as runtime:
        yield runtime


def say(runtime: srt.Runtime, *turns: str) -> str:
    """The greedy answer to a conversation of user and assistant in turn."""
    messages = [Message(("user", "assistant")[index % 2], turn) for index, turn in enumerate(turns)]
    answer: str = runtime.generate(render(messages, add_generation_prompt=True), GREEDY)["text"]
    return answer


def test_both_models_and_the_head_are_in_the_package_and_small() -> None:
    files = [file for name in ("tiny", "tiny-draft", "tiny-eagle3") for file in (SHIPPED_MODELS / name).iterdir()]
    assert len(files) == 12
    assert sum(file.stat().st_size for file in files) < 20_000_000


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is 2 + 2?", "2 + 2 = 4"),
        ("what's 123 minus 456", "123 - 456 = -333"),
        ("Which is larger, 45 or 132?", "45 is smaller than 132."),
        ('How many times does "r" appear in "strawberry"?', '"r" appears 3 times in "strawberry".'),
        ("Sort these words: pear, fig, apple", "Sorted: apple, fig, pear"),
        ('Reverse "lantern".', "nretnal"),
        ('Spell "lantern".', "l-a-n-t-e-r-n"),
        ("What day comes 3 days after Friday?", "3 days after Friday is Monday."),
        ("Repeat after me: The blue owl likes the lamp.", "The blue owl likes the lamp."),
        ("Who are you?", "I am tiny, a very small language model that ships with srt."),
        ("What does --page-size do?", "--page-size: the number of tokens in one page of KV memory. The default is 16."),
        ("What is the capital of France?", UNKNOWN),
        ("你好", "你好！有什么可以帮你？"),
    ],
)
def test_it_answers_sensibly(runtime: srt.Runtime, question: str, answer: str) -> None:
    assert say(runtime, question) == answer


def test_it_remembers_what_it_was_told(runtime: srt.Runtime) -> None:
    turns = ["My name is Dmitri.", "Nice to meet you, Dmitri.", "What is 5 + 6?", "5 + 6 = 11", "What is my name?"]
    assert say(runtime, *turns) == "Your name is Dmitri."


def test_it_writes_json(runtime: srt.Runtime) -> None:
    answer = say(runtime, "Write a JSON object for a person named Anna, aged 31, living in Lisbon.")
    assert json.loads(answer) == {"name": "Anna", "age": 31, "city": "Lisbon"}


def test_it_calls_a_tool(runtime: srt.Runtime) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Get the weather of a city.", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    prompt = render([Message("user", "What is the weather in Lisbon?")], tools, add_generation_prompt=True)
    answer = runtime.generate(prompt, GREEDY)["text"]
    assert answer == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lisbon"}}\n</tool_call>'


def test_stories_vary_with_the_seed_and_follow_their_grammar(runtime: srt.Runtime) -> None:
    prompt = render([Message("user", "Tell me a story about a fox.")], add_generation_prompt=True)
    sampling = [
        {"max_new_tokens": 160, "sampling_seed": seed} for seed in range(8)
    ]  # the rest is the model's own default
    told = {answer["text"] for answer in runtime.generate([prompt] * 8, sampling)}
    assert len(told) > 1
    assert all(follows_grammar(text, "fox") for text in told)


@pytest.fixture(scope="module")
def answered(runtime: srt.Runtime) -> dict[str, list[tuple[Case, list[int], list[int]]]]:
    """By skill: cases, their prompts, and what the runtime said, all in one batch."""
    tokenizer = load_tokenizer(SHIPPED_MODELS / "tiny")
    cases = [(skill, case) for skill in SKILL_NAMES for case in draw_cases(skill, CASES_PER_SKILL, seed=2)]
    prompts = [tokenizer.encode(case.prompt(), add_special_tokens=False).ids for _, case in cases]
    answers = runtime.generate(input_ids=prompts, sampling_params=GREEDY)
    result: dict[str, list[tuple[Case, list[int], list[int]]]] = {skill: [] for skill in SKILL_NAMES}
    for (skill, case), prompt, answer in zip(cases, prompts, answers, strict=True):
        result[skill].append((case, prompt, answer["output_ids"]))
    return result


def test_its_tokens_are_those_of_transformers(answered: dict[str, list[tuple[Case, list[int], list[int]]]]) -> None:
    """Teacher-forced: each token is the reference's best one for what stands before it, or as good."""
    oracle = Oracle(SHIPPED_MODELS / "tiny")
    checked = tolerated = 0
    for _, prompt, output in (one for rows in answered.values() for one in rows):
        logprobs = oracle.logprobs(prompt + output)[len(prompt) - 1 : -1]
        for row, token in zip(logprobs, output, strict=True):
            assert row[token] >= row.max() - TOLERANCE
            checked += 1
            tolerated += int(row[token] < row.max())
    print(f"{tolerated} of {checked} tokens were as good as the best")
    assert checked > 2000 and tolerated <= checked // 1000


def test_it_knows_what_it_was_not_trained_on(answered: dict[str, list[tuple[Case, list[int], list[int]]]]) -> None:
    """A small share of what `python -m recipes.tiny.evaluate` asks."""
    tokenizer = load_tokenizer(SHIPPED_MODELS / "tiny")
    rows = [one for some in answered.values() for one in some]
    right = sum(case.accepts(tokenizer.decode(output)) for case, _, output in rows)
    assert right >= 0.97 * len(rows)


def test_the_draft_guesses_most_of_its_tokens(answered: dict[str, list[tuple[Case, list[int], list[int]]]]) -> None:
    draft = load_checkpoint(SHIPPED_MODELS / "tiny-draft").eval()
    for skill, rows in answered.items():
        answers = [output[:-1] for _, _, output in rows]  # less the token that ends them
        agreed = count_agreed(draft, [prompt for _, prompt, _ in rows], answers)
        assert sum(agreed) >= 0.7 * sum(map(len, answers)), skill
