"""Fields that other servers define, through the real server: what they say is done."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.foreign_objects import whole_objects
from tests.unit.entrypoints.sse import events

pytestmark = pytest.mark.e2e

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
USER = {"role": "user", "content": PROMPT}


def complete(client: httpx.Client, **body: Any) -> Any:
    response = client.post("/v1/completions", json={"prompt": PROMPT, **GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def chat(client: httpx.Client, **body: Any) -> Any:
    response = client.post("/v1/chat/completions", json={"messages": [USER], **GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def native(client: httpx.Client, params: dict[str, Any], **body: Any) -> Any:
    greedy = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True, **params}
    response = client.post("/generate", json={"text": PROMPT, "sampling_params": greedy, **body})
    assert response.status_code == 200, response.text
    return response.json()


def tokenize(client: httpx.Client, text: str) -> list[int]:
    ids: list[int] = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return ids


def test_the_stop_stays_in_the_text_by_its_other_name(client: httpx.Client) -> None:
    text = complete(client)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:2]
    until = text[: text.index(stop) + len(stop)]
    kept = {"stop": stop, "include_stop_str_in_output": True}
    assert complete(client, **kept)["choices"][0]["text"] == until
    assert native(client, kept)["text"] == until
    said = chat(client)["choices"][0]["message"]["content"]
    kept["stop"] = said[1:3]
    assert chat(client, **kept)["choices"][0]["message"]["content"] == said[: said.index(said[1:3]) + 2]


def test_a_bad_word_is_not_generated(client: httpx.Client) -> None:
    ids = native(client, {"logit_bias": {"257": 100}})["output_ids"]
    assert set(ids) == set(tokenize(client, "the"))
    forbidden = {*tokenize(client, "the"), *tokenize(client, " the")}
    wanted = dict.fromkeys(map(str, forbidden), 100)
    more = {"logit_bias": wanted, "bad_words": ["the"]}
    ids = native(client, more)["output_ids"]
    assert len(ids) == 12
    assert not forbidden & set(ids)
    assert not complete(client, **more)["choices"][0]["text"].startswith(("the", " the"))
    assert not chat(client, **more)["choices"][0]["message"]["content"].startswith(("the", " the"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_a_bad_word_of_many_tokens_is_refused_by_name(client: httpx.Client, path: str) -> None:
    words = {"bad_words": ["hello"]}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": PROMPT, **words},
        "/v1/chat/completions": {"messages": [USER], **words},
        "/generate": {"text": PROMPT, "sampling_params": words},
    }
    response = client.post(path, json=bodies[path])
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("bad_words has 'hello', which is 3 tokens")


def test_the_prompts_end_is_what_the_model_reads(client: httpx.Client) -> None:
    ids = tokenize(client, PROMPT)
    end = complete(client, prompt=ids[-4:])["choices"][0]["text"]
    for prompt in (PROMPT, ids):
        cut = complete(client, prompt=prompt, truncate_prompt_tokens=4, echo=True)
        text = client.post("/detokenize", json={"tokens": ids[-4:]}).json()["text"] + end
        assert (cut["choices"][0]["text"], cut["usage"]["prompt_tokens"]) == (text, 4)
    answer = native(client, {}, truncate_prompt_tokens=4, return_prompt_token_ids=True)
    assert (answer["text"], answer["prompt_token_ids"]) == (end, ids[-4:])
    assert chat(client, truncate_prompt_tokens=4)["usage"]["prompt_tokens"] == 4
    long = complete(client, prompt=ids * 1000, truncate_prompt_tokens=-1)["usage"]
    assert (long["prompt_tokens"], long["completion_tokens"]) == (4096 - 12, 12)


def test_request_id_names_the_request(client: httpx.Client) -> None:
    assert complete(client, request_id="mine")["id"] == chat(client, request_id="mine", rid="mine")["id"] == "mine"


def test_a_prompts_logprobs_are_those_of_the_native_api(client: httpx.Client) -> None:
    more = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = native(client, {}, **more)["meta_info"]
    rows = list(zip(meta["input_token_logprobs"], meta["input_top_logprobs"], strict=True))
    completion = complete(client, prompt_logprobs=2, n=2)
    chatted = chat(client, prompt_logprobs=2, n=2, logprobs=True)
    assert len(chatted["prompt_logprobs"]) == chatted["usage"]["prompt_tokens"]
    for choice in completion["choices"]:
        assert len(choice["prompt_logprobs"]) == completion["usage"]["prompt_tokens"] == len(rows)
        first, *others = choice["prompt_logprobs"]
        assert first is None
        for position, (row, best) in zip(others, rows[1:], strict=True):
            wanted = {str(token): (pytest.approx(logprob, abs=1e-4), text) for logprob, token, text in (row, *best)}
            assert wanted == {token: (one["logprob"], one["decoded_token"]) for token, one in position.items()}
            ranks = {token: one["rank"] for token, one in position.items()}
            assert [ranks[str(token)] for _, token, _ in best] == [1, 2]
            assert ranks[str(row[1])] in (1, 2, None)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_those_of_the_native_api(client: httpx.Client, stream: bool) -> None:
    ids, prompt = native(client, {})["output_ids"], tokenize(client, PROMPT)
    body = {"prompt": PROMPT, **GREEDY, "return_token_ids": True, "stream": stream}
    response = client.post("/v1/completions", json=body)
    choices = [one["choices"][0] for one in (events(response) if stream else [response.json()])]
    assert [i for choice in choices for i in choice["token_ids"]] == ids
    assert [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice] == [prompt]


def test_where_cached_tokens_were_is_told_everywhere(client: httpx.Client) -> None:
    prompt = list(range(7, 7 + 100))
    asked = {"prompt": prompt, "cache_salt": "details", "return_cached_tokens_details": True}
    cold, warm = (complete(client, **asked)["sglext"]["cached_tokens_details"] for _ in range(2))
    assert (cold, warm) == ({"device": 0, "host": 0}, {"device": 96, "host": 0})
    more = {"return_cached_tokens_details": True, "cache_salt": "native details"}
    bodies = [{"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}, **more}] * 2
    cold, warm = (client.post("/generate", json=body).json()["meta_info"]["cached_tokens_details"] for body in bodies)
    assert (cold, warm) == (None, {"device": 96, "host": 0})
    chatted = [chat(client, cache_salt="chat details", return_cached_tokens_details=True) for _ in range(2)][1]
    cached = chatted["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert chatted["sglext"] == {"cached_tokens_details": {"device": cached, "host": 0}}


def test_an_object_that_is_sent_whole_gets_the_same_answer(client: httpx.Client) -> None:
    """Every field that another server defines is there, at its default."""
    text = complete(client)["choices"][0]["text"]
    for whole in whole_objects("completions"):
        assert complete(client, **{**whole, **GREEDY, "prompt": PROMPT})["choices"][0]["text"] == text
    said = chat(client)["choices"][0]["message"]
    for whole in whole_objects("chat"):
        assert chat(client, **{**whole, **GREEDY, "messages": [USER]})["choices"][0]["message"] == said
        for foreign in whole_objects("message"):
            messages = [{**foreign, **USER}]
            assert chat(client, **{**whole, **GREEDY, "messages": messages})["choices"][0]["message"] == said
    answer = native(client, {})["text"]
    for whole in whole_objects("native"):
        for params in whole_objects("sampling_params"):
            limits = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
            body = {**whole, "text": PROMPT, "sampling_params": {**params, **limits}}
            assert client.post("/generate", json=body).json()["text"] == answer
