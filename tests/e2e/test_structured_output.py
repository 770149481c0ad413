"""Answers that must have a form, through the real server: every finished one has it, and neighbours draw as they would alone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.e2e.conftest import Server
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.e2e

TRIP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "by": {"enum": ["train", "ship"]},
    },
    "required": ["city", "days", "by"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "trip", "schema": TRIP, "strict": True}}
ASKED: Any = [{"role": "user", "content": "Plan a trip."}]


@pytest.fixture
def api(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tiny_server.url + "/v1", api_key="none") as client:
        yield client


def test_all_choices_of_a_chat_are_valid_whole_and_streamed(api: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "tiny", "messages": ASKED, "response_format": FORMAT, "n": 4, "seed": 5}
    request |= {"temperature": 1.0, "max_tokens": 120}
    answer = api.chat.completions.create(**request)
    texts = [choice.message.content or "" for choice in answer.choices]
    for choice, text in zip(answer.choices, texts, strict=True):
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(text), TRIP)
    streamed = [""] * 4
    for chunk in api.chat.completions.create(**request, stream=True):
        for part in chunk.choices:
            streamed[part.index] += part.delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize(
    ("path", "body", "pattern"),
    [
        ("/v1/completions", {"prompt": "It is ", "regex": "(yes|no), [0-9]{3}", "logprobs": 2}, "(yes|no), [0-9]{3}"),
        ("/v1/completions", {"prompt": "It is ", "structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
        (
            "/v1/completions",
            {"prompt": "It is ", "ebnf": 'root ::= ("a" | "b") ("a" | "b") "!"', "min_tokens": 9},
            "[ab]{2}!",
        ),
        ("/generate", {"text": "It is ", "sampling_params": {"regex": "[a-c]{4}", "min_new_tokens": 30}}, "[a-c]{4}"),
        ("/generate", {"text": "It is ", "sampling_params": {"json_schema": '{"const": 7}'}}, "7"),
    ],
)
def test_the_other_spellings_do_the_same(tiny_server: Server, path: str, body: dict[str, Any], pattern: str) -> None:
    if path == "/generate":
        body["sampling_params"] |= {"temperature": 1.0, "max_new_tokens": 40}
        answer = httpx.post(tiny_server.url + path, json=body, timeout=60).raise_for_status().json()
        text, reason = answer["text"], answer["meta_info"]["finish_reason"]["type"]
    else:
        body |= {"model": "tiny", "temperature": 1.0, "max_tokens": 40}
        answer = httpx.post(tiny_server.url + path, json=body, timeout=60).raise_for_status().json()
        text, reason = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
    assert re.fullmatch(pattern, text) and reason == "stop", (text, reason)


def test_an_answer_that_is_cut_off_says_so_and_is_a_beginning(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(model="tiny", messages=ASKED, response_format=FORMAT, max_tokens=4, seed=1)
    assert answer.choices[0].finish_reason == "length"
    assert re.match(r'\{\s*"ci', answer.choices[0].message.content or "")


def test_many_forms_at_once_leave_free_neighbours_as_they_are(tmp_path: Path) -> None:
    """In float32: bfloat16's sums depend on how many rows share a step."""
    free = {"text": "The sea ", "sampling_params": {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 24}}
    forms = [
        {"text": "Count ", "sampling_params": {"regex": f"{number}[0-9]{{8}}", "max_new_tokens": 30}}
        for number in range(20)
    ]
    words = ["--model-path", "tiny", "--port", "0", "--device", "cpu", "--dtype", "float32"]
    with ServerProcess("srt.launch_server", words, tmp_path) as server, ThreadPoolExecutor(24) as pool:
        url = server.wait_ready() + "/generate"

        def ask(body: dict[str, Any]) -> str:
            text: str = httpx.post(url, json=body, timeout=120).raise_for_status().json()["text"]
            return text

        alone = ask(free)
        texts = list(pool.map(ask, [*forms, *[free] * 4]))
    assert texts[20:] == [alone] * 4
    for number, text in enumerate(texts[:20]):
        assert re.fullmatch(f"{number}[0-9]{{8}}", text), text


def test_a_form_begins_behind_the_one_token_that_ends_the_reasoning(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    """The prompt opens the reasoning, and the tokenizer has its end as a special token, as Qwen3's and DeepSeek's have."""
    model = tmp_path / "model"
    shutil.copytree(qwen3_checkpoint, model)
    tokenizer = (model / "tokenizer.json").read_text().replace("<|im_start|>", "</think>")
    (model / "tokenizer.json").write_text(tokenizer)
    config = json.loads((model / "tokenizer_config.json").read_text())
    template = "{{ messages[0].content }}<think>\n"
    (model / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": template}).replace("<|im_start|>", "</think>")
    )
    (end,) = [one["id"] for one in json.loads(tokenizer)["added_tokens"] if one["content"] == "</think>"]
    words = ["--model-path", str(model), "--port", "0", "--device", "cpu", "--reasoning-parser", "deepseek-r1"]
    body = {"messages": ASKED, "regex": "[a-c]{4}", "max_tokens": 400, "n": 4, "logit_bias": {str(end): 8}}
    with ServerProcess("srt.launch_server", [*words, "--max-total-tokens", "4096"], tmp_path) as server:
        url = server.wait_ready() + "/v1/chat/completions"
        answer = httpx.post(url, json={**body, "temperature": 1.0, "seed": 3}, timeout=120).raise_for_status().json()
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop", choice
        assert re.fullmatch("[a-c]{4}", choice["message"]["content"].strip()), choice
    thoughts = [choice["message"].get("reasoning_content") for choice in answer["choices"]]
    assert any(thought and not re.fullmatch("[a-c]{4}", thought) for thought in thoughts), "reasoning is free"


@pytest.mark.parametrize(
    ("body", "parameter", "message"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}},
            "response_format",
            "uniqueItems",
        ),
        ({"regex": "("}, "regex", "regex cannot be compiled"),
        ({"regex": "a", "ebnf": "root ::= b"}, "ebnf", "two constraints"),
    ],
)
def test_what_cannot_be_held_to_is_refused_by_name(
    tiny_server: Server, body: dict[str, Any], parameter: str, message: str
) -> None:
    answer = httpx.post(tiny_server.url + "/v1/chat/completions", json={"messages": ASKED, **body}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, parameter) and message in error["message"]
