"""The newest release of OpenAI's Python client; `make test` has more claims, of the release that it installs."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

MODEL = "tiny"


@pytest.fixture
def api(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", timeout=60)


def ask(question: str) -> dict[str, object]:
    return {"model": MODEL, "temperature": 0, "messages": [{"role": "user", "content": question}]}


def test_openai_lists_the_model(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).id == MODEL


def test_openai_chats(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(**ask("What is 12 + 30?"))
    assert answer.choices[0].message.content == "12 + 30 = 42"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_openai_streams_a_chat_that_equals_the_whole_one(api: openai.OpenAI) -> None:
    with api.chat.completions.stream(**ask("Sort: pear, fig, apple"), stream_options={"include_usage": True}) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert text == final.choices[0].message.content
    assert text == api.chat.completions.create(**ask("Sort: pear, fig, apple")).choices[0].message.content
    assert final.usage.completion_tokens > 0


def test_openai_completes_with_choices_logprobs_and_echo(api: openai.OpenAI) -> None:
    answer = api.completions.create(
        model=MODEL, prompt=["Once upon a time", "There was"], max_tokens=4, n=2, logprobs=2, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text.startswith("Once upon") for choice in answer.choices] == [True, True, False, False]
    for choice in answer.choices:
        assert choice.logprobs.token_logprobs[0] is None
        assert all(logprob <= 0 for logprob in choice.logprobs.token_logprobs[1:])


def test_openai_streams_a_completion(api: openai.OpenAI) -> None:
    wanted = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    chunks = list(api.completions.create(**wanted, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == api.completions.create(**wanted).choices[0].text


def test_openai_gets_a_response_and_streams_one_that_equals_it(api: openai.OpenAI) -> None:
    wanted = {"model": MODEL, "temperature": 0, "input": "What is 12 + 30?"}
    whole = api.responses.create(**wanted)
    assert (whole.status, whole.output_text) == ("completed", "12 + 30 = 42")
    with api.responses.stream(**wanted) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == whole.output_text


def test_openai_answers_the_call_of_a_response(api: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "name": "get_weather", "description": "Get the weather of a city."}
    asked = {"model": MODEL, "temperature": 0, "tools": [{**tool, "parameters": parameters}]}
    items: list[Any] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    response = api.responses.create(**asked, input=items)
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert call.name == "get_weather"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"weather": "sunny"}'}
    assert "sunny" in api.responses.create(**asked, input=[*items, *response.output, result]).output_text


def test_async_openai_runs_many_at_once(url: str) -> None:
    async def go() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", timeout=60) as api:

            async def one(number: int) -> str:
                stream = await api.chat.completions.create(**ask(f"What is {number} + 30?"), stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(one, range(11, 19)))

    assert asyncio.run(go()) == [f"{number} + 30 = {number + 30}" for number in range(11, 19)]


@pytest.mark.parametrize(
    ("more", "kind", "named"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"response_format": {"type": "yaml"}}, openai.BadRequestError, "response_format"),
        ({"extra_body": {"bogus": 1}}, openai.BadRequestError, "bogus"),
    ],
)
def test_openai_raises_its_own_errors_at_once(relay: Any, more: dict[str, object], kind: type, named: str) -> None:
    with openai.OpenAI(base_url=relay.url + "/v1", api_key="none", timeout=60) as api, pytest.raises(kind) as caught:
        api.chat.completions.create(**{**ask("Hello"), **more})
    assert named in str(caught.value)
    assert len(relay.seen) == 1


def test_openai_does_not_try_again_what_this_server_cannot_do(relay: Any) -> None:
    with openai.OpenAI(base_url=relay.url + "/v1", api_key="none", timeout=60) as api:
        with pytest.raises(openai.APIStatusError, match="embeddings"):
            api.embeddings.create(model=MODEL, input="Hello")
    assert relay.seen == [("/v1/embeddings", 501)]
