"""The Responses API through the real server, as OpenAI's client sees it. The shipped model answers, with a store."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from recipes.tiny.evaluate import draw_cases
from tests.e2e.conftest import Server
from tests.e2e.stored_fuzz import fuzz_stored
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.e2e

NUM_CALLS = 5
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}
SUM: dict[str, Any] = {**GREEDY, "input": "What is 12 + 30?"}
LONG: dict[str, Any] = {**GREEDY, "input": "Tell me a story.", "extra_body": {"ignore_eos": True}}


class Weather(pydantic.BaseModel):
    sunny: bool
    degrees: int = pydantic.Field(ge=0, le=40)


@pytest.fixture(scope="module")
def storing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    words = ["--model-path", "tiny", "--port", "0", "--device", "cpu", "--max-total-tokens", "16384"]
    tmp = tmp_path_factory.mktemp("responses")
    with ServerProcess("srt.launch_server", [*words, "--enable-response-store"], tmp) as process:
        yield Server(process.wait_ready(), "tiny", process)
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.lines


@pytest.fixture
def api(storing: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=storing.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def plain(items: Any) -> list[dict[str, Any]]:
    """Output items without what is drawn anew for each answer."""
    return [item.model_dump(exclude={"id", "call_id"}, exclude_none=True) for item in items]


def wait_idle(server: Server) -> None:
    """Wait until no request is left in the engine. Each look is a request of its own."""
    for _ in range(2_000):
        if not httpx.get(server.url + "/server_info", timeout=60).json()["frontend"]["live_requests"]:
            return
    raise AssertionError("a request still runs")


def test_a_text_is_answered_whole_and_streamed_alike(api: openai.OpenAI) -> None:
    whole = api.responses.create(**SUM)
    assert (whole.status, whole.output_text.count("42")) == ("completed", 1)
    assert whole.usage is not None and whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    with api.responses.stream(**SUM) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert plain(streamed.output) == plain(whole.output)


def test_the_answer_is_that_of_the_chat(api: openai.OpenAI) -> None:
    chat = api.chat.completions.create(**GREEDY, messages=[{"role": "user", "content": SUM["input"]}])
    assert api.responses.create(**SUM).output_text == chat.choices[0].message.content


def test_calls_are_answered_and_streamed_alike(api: openai.OpenAI) -> None:
    asked = 0
    for case in draw_cases("tools", 4 * NUM_CALLS, seed=5):
        if asked == NUM_CALLS or not case.exchange.answer.startswith("<tool_call>"):
            continue
        asked += 1
        items: list[Any] = [{"role": one.role, "content": one.content} for one in case.conversation.messages[:-1]]
        tools = [{"type": "function", **tool["function"]} for tool in case.conversation.tools]
        request: dict[str, Any] = {**GREEDY, "tools": tools, "max_output_tokens": 160}
        response = api.responses.create(**request, input=items)
        (call,) = [item for item in response.output if item.type == "function_call"]
        wanted = json.loads(case.exchange.answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert (call.name, json.loads(call.arguments)) == (wanted["name"], wanted["arguments"])
        with api.responses.stream(**request, input=items) as stream:
            assert plain(stream.get_final_response().output) == plain(response.output)
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"ok": true}'}
        loop = api.responses.create(**request, input=[*items, *response.output, result])
        assert loop.output_text
        stored = api.responses.create(**request, input=[result], previous_response_id=response.id)
        assert plain(stored.output) == plain(loop.output)
    assert asked == NUM_CALLS


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "set_timer"}])
def test_a_call_that_is_demanded_is_made(api: openai.OpenAI, choice: Any) -> None:
    parameters: Any = {"type": "object", "properties": {"minutes": {"enum": [5, 25]}}, "required": ["minutes"]}
    tool: Any = {"type": "function", "name": "set_timer", "parameters": {**parameters, "additionalProperties": False}}
    request: dict[str, Any] = {**GREEDY, "input": "Hello!", "tools": [tool], "tool_choice": choice}
    response = api.responses.create(**request, parallel_tool_calls=False)
    (call,) = response.output
    assert call.type == "function_call" and json.loads(call.arguments)["minutes"] in (5, 25)


def test_an_answer_has_the_form_that_was_asked_for(api: openai.OpenAI) -> None:
    for _ in range(3):
        response = api.responses.parse(model="tiny", input="How is the weather?", text_format=Weather)
        assert isinstance(response.output_parsed, Weather)


def test_an_answer_that_reaches_its_limit_is_incomplete(api: openai.OpenAI) -> None:
    response = api.responses.create(**LONG, max_output_tokens=5)
    assert (response.status, response.output[0].status) == ("incomplete", "incomplete")
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None and response.usage.output_tokens == 5
    last = list(api.responses.create(**LONG, max_output_tokens=5, stream=True))[-1]
    assert last.type == "response.incomplete"


def test_a_stored_response_is_found_continued_and_deleted(api: openai.OpenAI) -> None:
    first = api.responses.create(**SUM)
    assert api.responses.retrieve(first.id).model_dump() == first.model_dump()
    second = api.responses.create(**GREEDY, input="And 13 + 30?", previous_response_id=first.id)
    items: list[Any] = [{"role": "user", "content": SUM["input"]}, *first.output]
    items.append({"role": "user", "content": "And 13 + 30?"})
    assert second.output_text == api.responses.create(**GREEDY, input=items).output_text
    api.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        api.responses.create(**GREEDY, input="And?", previous_response_id=first.id)


def test_a_response_is_generated_in_the_background(api: openai.OpenAI, storing: Server) -> None:
    begun = api.responses.create(**SUM, background=True)
    assert begun.status == "in_progress"
    response = api.responses.retrieve(begun.id)
    while response.status == "in_progress":
        response = api.responses.retrieve(begun.id)
    assert response.output_text == api.responses.create(**SUM).output_text
    endless = api.responses.create(**LONG, background=True)
    assert api.responses.cancel(endless.id).status == "cancelled"
    wait_idle(storing)
    assert api.responses.retrieve(endless.id).status == "cancelled"


def test_stored_responses_are_what_their_clients_made_of_them(storing: Server) -> None:
    report = fuzz_stored(storing.url, num_cases=120, seed=3)
    print(report)
    assert report.failures == []
    assert report.statuses[200] > 40, "most cases are answered"


def test_a_client_that_leaves_ends_its_request(api: openai.OpenAI, storing: Server) -> None:
    stream = api.responses.create(**LONG, stream=True)
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    stream.close()
    wait_idle(storing)


def test_without_the_option_what_needs_a_store_names_it(tiny_server: Server) -> None:
    with openai.OpenAI(base_url=tiny_server.url + "/v1", api_key="none", max_retries=0) as client:
        response = client.responses.create(**SUM, store=True)
        assert response.model_extra == {"store": False}
        with pytest.raises(openai.BadRequestError, match="--enable-response-store"):
            client.responses.create(**SUM, previous_response_id=response.id)
        with pytest.raises(openai.BadRequestError, match="--enable-response-store"):
            client.responses.create(**SUM, background=True)
        with pytest.raises(openai.NotFoundError, match="--enable-response-store"):
            client.responses.retrieve(response.id)
