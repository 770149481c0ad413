"""The newest release of Anthropic's Python client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

MODEL = "tiny"
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class Verdict(BaseModel):
    ok: bool


@pytest.fixture
def api(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", timeout=60) as client:
        yield client


def ask(question: str) -> dict[str, Any]:
    # The client has no temperature any more, but sends what it is given.
    asked = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": question}]}
    return {**asked, "extra_body": {"temperature": 0}}


def test_anthropic_gets_a_message(api: anthropic.Anthropic) -> None:
    message = api.messages.create(**ask("What is 12 + 30?"), system="You are helpful.")
    assert [(block.type, block.text) for block in message.content] == [("text", "12 + 30 = 42")]
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", MODEL)
    assert message.usage.output_tokens > 0
    assert message._request_id


def test_anthropic_streams_a_message_that_equals_the_whole_one(api: anthropic.Anthropic) -> None:
    with api.messages.stream(**ask("Sort: pear, fig, apple")) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text
    assert text == api.messages.create(**ask("Sort: pear, fig, apple")).content[0].text
    assert (final.stop_reason, final.usage.output_tokens > 0) == ("end_turn", True)


def test_anthropic_calls_a_tool_and_reads_its_result(api: anthropic.Anthropic) -> None:
    asked = {**ask("What is the weather in Lisbon?"), "tools": [WEATHER]}
    message = api.messages.create(**asked)
    assert message.stop_reason == "tool_use"
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", {"city": "Lisbon"})
    with api.messages.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        (streamed,) = stream.get_final_message().content
    assert (streamed.name, streamed.input) == (call.name, call.input)
    assert {"message_start", "content_block_start", "input_json", "content_block_stop", "message_stop"} <= kinds
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"weather": "sunny", "temperature": 21}'}
    asked["messages"] += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    last = api.messages.create(**asked)
    assert last.stop_reason == "end_turn" and "21" in last.content[0].text


def test_anthropics_beta_client_gets_the_same(api: anthropic.Anthropic) -> None:
    message = api.beta.messages.create(**ask("What is 12 + 30?"), betas=["interleaved-thinking-2025-05-14"])
    assert message.content[0].text == "12 + 30 = 42"


def test_anthropic_parses_an_answer_into_a_model(api: anthropic.Anthropic) -> None:
    message = api.messages.parse(**ask("What is 12 + 30?"), output_format=Verdict)
    assert isinstance(message.parsed_output, Verdict)


def test_anthropic_counts_what_a_message_uses(api: anthropic.Anthropic) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "What is 12 + 30?"}], "tools": [WEATHER]}
    count = api.messages.count_tokens(**asked)
    usage = api.messages.create(**asked, max_tokens=5).usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_async_anthropic_runs_many_at_once(url: str) -> None:
    async def go() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", timeout=60) as api:

            async def one(number: int) -> str:
                async with api.messages.stream(**ask(f"What is {number} + 30?")) as stream:
                    return await stream.get_final_text()

            return await asyncio.gather(*map(one, range(11, 19)))

    assert asyncio.run(go()) == [f"{number} + 30 = {number + 30}" for number in range(11, 19)]


@pytest.mark.parametrize(
    ("more", "kind", "named"),
    [
        ({"model": "claude-opus"}, anthropic.NotFoundError, "claude-opus"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, anthropic.BadRequestError, "bash_20250124"),
        ({"extra_body": {"bogus": 1}}, anthropic.BadRequestError, "bogus"),
    ],
)
def test_anthropic_raises_its_own_errors_at_once(relay: Any, more: dict[str, Any], kind: type, named: str) -> None:
    with anthropic.Anthropic(base_url=relay.url, api_key="none", timeout=60) as api, pytest.raises(kind) as caught:
        api.messages.create(**{**ask("Hello"), **more})
    assert named in str(caught.value)
    assert caught.value.body["error"]["type"] == caught.value.type
    assert caught.value.request_id == caught.value.body["request_id"]
    assert len(relay.seen) == 1
