"""/v1/responses over ASGI, with a fake engine whose tokens are characters; every answer and event is read by OpenAI's own types."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema_rs
import openai.types.responses as theirs
import orjson
import pytest
from pydantic import TypeAdapter

from srt.entrypoints.answer_schemas import answer_schema
from srt.entrypoints.openai.chat import parse_call
from srt.entrypoints.openai.responses.answer import ResponseAnswer
from srt.entrypoints.openai.responses.response_types import Response, ResponseEvent
from srt.entrypoints.openai.responses.schema import ResponsesBody
from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, EngineDied, Finish, GenerateInput, RequestError
from tests.unit.entrypoints.fake_engine import World, choice_update
from tests.unit.entrypoints.sse import named_events

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "get_weather", "description": None, "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
THOUGHT = "<think>\nThe weather.\n</think>\n\n"
NESTED: dict[str, Any] = {}
for _ in range(300):
    NESTED = {"a": NESTED}
EVENT = TypeAdapter[Any](theirs.ResponseStreamEvent)
DESCRIBED, DESCRIBED_EVENT = (jsonschema_rs.validator_for(answer_schema(kind)) for kind in (Response, ResponseEvent))
# What differs between two answers to one request.
DRAWN = ("id", "created_at", "completed_at", "call_id")


def new_world(answer: str = "Hello!", **facts: str | None) -> World:
    world = World()
    known = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", **facts}
    world.engine.model = dataclasses.replace(world.engine.model, **known)  # type: ignore[arg-type]
    world.engine.answer = answer
    return world


def ask(world: World, **fields: Any) -> dict[str, Any]:
    response = world.post(PATH, {"input": "hi", "tools": [WEATHER], **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    theirs.Response.model_validate(answer, strict=True)
    DESCRIBED.validate(answer)
    return answer


def refusal(world: World, **fields: Any) -> tuple[str, str]:
    """The parameter and the sentence of a 400."""
    response = world.post(PATH, {"input": "hi", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert world.engine.handles == []
    return error["param"], error["message"]


def told_by(world: World, **fields: Any) -> list[tuple[str, Any]]:
    """Name and JSON of the events of a stream."""
    return named_events(world.post(PATH, {"input": "hi", "tools": [WEATHER], "stream": True, **fields}))


def streamed(world: World, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, checked for what holds of every stream."""
    told = told_by(world, **fields)
    for number, (name, event) in enumerate(told):
        assert (name, number) == (event["type"], event["sequence_number"])
        EVENT.validate_python(event)
        DESCRIBED_EVENT.validate(event)
    return [event for _, event in told]


def without_drawn(value: Any) -> Any:
    if isinstance(value, list):
        return [without_drawn(one) for one in value]
    if isinstance(value, dict):
        return {name: without_drawn(one) for name, one in value.items() if name not in DRAWN}
    return value


def replayed(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last response of a stream, after checking that its items are told by events in the right order."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert all(event["response"]["status"] == "in_progress" for event in events[:2])
    last: dict[str, Any] = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    inner = iter(events[2:-1])
    for index, item in enumerate(last["output"]):
        _check_item(index, item, inner)
    assert next(inner, None) is None
    return last


def _check_item(index: int, item: dict[str, Any], events: Iterator[dict[str, Any]]) -> None:
    added = next(events)
    empty: dict[str, Any] = {"content": []} if "content" in item else {"arguments": ""}
    assert added == {
        "type": "response.output_item.added",
        "sequence_number": added["sequence_number"],
        "output_index": index,
        "item": {**item, **empty, "status": "in_progress"},
    }
    kind, whole = "function_call_arguments", item.get("arguments", "")
    if "content" in item:
        (part,) = item["content"]
        kind, whole = part["type"], part["text"]
        begin = next(events)
        assert (begin["type"], begin["part"]) == ("response.content_part.added", {**part, "text": ""})
    deltas = ""
    while (event := next(events))["type"] == f"response.{kind}.delta":
        assert event["delta"]
        deltas += event["delta"]
        assert (event["item_id"], event["output_index"]) == (item["id"], index)
    assert event["type"] == f"response.{kind}.done"
    assert deltas == whole == event["arguments" if "arguments" in item else "text"]
    if "content" in item:
        end = next(events)
        assert (end["type"], end["part"]) == ("response.content_part.done", part)
    done = next(events)
    assert (done["type"], done["output_index"], done["item"]) == ("response.output_item.done", index, item)


def in_pieces(world: World, text: str, cuts: Sequence[int], kind: Any = "stop") -> None:
    """Let the engine say `text` in updates that end at these places."""

    def script(request: GenerateInput) -> list[list[ChoiceUpdate] | RequestError | None]:
        ends = [*cuts, len(text)]
        updates = []
        for begin, end in itertools.pairwise([0, *ends]):
            one = choice_update(request, text, end - 1)
            finish = Finish(kind) if end == len(text) else None
            piece = text[begin:end]
            ids = tuple(map(ord, piece))
            prompt_ids = tuple(map(ord, request.text or "")) if begin == 0 else ()
            fields = {"text": piece, "ids": ids, "finish": finish, "prompt_ids": prompt_ids}
            updates.append([ChoiceUpdate(**{**{name: getattr(one, name) for name in one.__struct_fields__}, **fields})])
        return list(updates)

    world.engine.script = script


# ---- Answers


def test_a_text_is_a_message() -> None:
    answer = ask(new_world(), tools=[], metadata={"a": "b"}, instructions="Be brief.", max_output_tokens=20)
    (item,) = answer["output"]
    assert item["content"] == [{"type": "output_text", "text": "Hello!", "annotations": [], "logprobs": []}]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert (answer["status"], answer["error"], answer["incomplete_details"]) == ("completed", None, None)
    assert answer["usage"] == {
        "input_tokens": len("<system>Be brief.<user>hi<assistant>"),
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len("<system>Be brief.<user>hi<assistant>") + 6,
    }
    echo = {"metadata": {"a": "b"}, "instructions": "Be brief.", "max_output_tokens": 20, "store": False}
    assert {name: answer[name] for name in echo} == echo
    assert answer["id"].startswith("resp_") and item["id"].startswith("msg_")


def test_reasoning_text_and_calls_are_items_in_the_order_in_which_they_were_written() -> None:
    answer = ask(new_world(f"{THOUGHT}I look.\n{CALL}\n{CALL}"))
    assert without_drawn(answer["output"]) == [
        {
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "The weather."}],
        },
        {
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        *[
            {
                "type": "function_call",
                "status": "completed",
                "name": "get_weather",
                "arguments": '{"city": "Köln"}',
            }
        ]
        * 2,
    ]
    ids = [item["id"] for item in answer["output"]] + [item["call_id"] for item in answer["output"][2:]]
    assert len(set(ids)) == len(ids)
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": len(THOUGHT.strip())}


ANSWERS = ["Hello!", f"{THOUGHT}Sunny.", f"I look.\n{CALL}\n{CALL}", f"{THOUGHT}{CALL}", "<think>\nWell", CALL[:-20]]


@pytest.mark.parametrize("text", ANSWERS, ids=range(len(ANSWERS)))
@pytest.mark.parametrize("kind", ["stop", "length"])
def test_a_stream_says_what_the_whole_answer_says_however_its_text_is_cut(text: str, kind: str) -> None:
    world = new_world()
    in_pieces(world, text, [], kind)
    whole = without_drawn(ask(world))
    assert whole["status"] == ("completed" if kind == "stop" else "incomplete")
    every = range(1, len(text))
    in_pieces(world, text, every, kind)
    assert without_drawn(replayed(streamed(world))) == whole
    for cuts in [*([at] for at in every), every[::3]]:
        in_pieces(world, text, cuts, kind)
        assert without_drawn(replayed([event for _, event in told_by(world)])) == whole


def test_one_call_is_enough_without_parallel_calls() -> None:
    world = new_world(f"{CALL}\n{CALL}")
    assert len(ask(world, parallel_tool_calls=False)["output"]) == 1
    assert len(replayed(streamed(world, parallel_tool_calls=False))["output"]) == 1


@pytest.mark.parametrize(
    ("cut", "statuses"),
    [
        (5, ["incomplete"]),
        (len(THOUGHT) + 3, ["completed", "incomplete"]),
        (len(THOUGHT) + len("I look.\n") + len(CALL) - 20, ["completed", "completed", "incomplete"]),
    ],
)
def test_an_answer_that_reaches_its_limit_is_incomplete_in_its_last_item(cut: int, statuses: list[str]) -> None:
    text = f"{THOUGHT}I look.\n{CALL}"
    answer = ask(new_world(text), max_output_tokens=cut)
    assert (answer["status"], answer["completed_at"]) == ("incomplete", None)
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in answer["output"]] == statuses
    assert replayed(streamed(new_world(text), max_output_tokens=cut))["status"] == "incomplete"


def test_nothing_said_is_no_item() -> None:
    answer = ask(new_world(), max_output_tokens=0)
    assert (answer["output"], answer["status"]) == ([], "incomplete")


def test_an_aborted_answer_has_failed() -> None:
    world = new_world()
    in_pieces(world, "Hello!", [2], "abort")
    for answer in (ask(world), replayed(streamed(world))):
        assert answer["error"] == {"code": "server_error", "message": "The request was aborted."}
        assert answer["output"][0]["status"] == "incomplete"


def test_an_error_amid_a_stream_ends_it_with_what_was_said_before() -> None:
    world = new_world()
    said: list[list[ChoiceUpdate] | RequestError | None] = []
    world.engine.script = lambda request: [[choice_update(request, "Hello!", 0)], EngineDied(), *said]
    answer = replayed(streamed(world))
    assert answer["error"] == {"code": "server_error", "message": "The engine has ended."}
    assert (answer["status"], answer["output"][0]["content"][0]["text"]) == ("failed", "H")
    assert world.post(PATH, {"input": "hi"}).status_code == 503


def test_a_stream_that_fails_before_its_first_token_is_whole_too() -> None:
    """A comment that keeps the connection alive has begun it."""
    world = new_world()
    call = parse_call({"messages": [{"role": "user", "content": "hi"}]}, world.service, "resp")
    ended: list[str] = []
    answer = ResponseAnswer(
        ResponsesBody.parse({"input": "hi"}),
        call,
        world.service.engine(),
        is_stored=False,
        on_end=lambda response: ended.append(response["status"]),
    )
    blocks = answer.failed_events(EngineDied()).decode().strip().split("\n\n")
    events = [orjson.loads(block.partition("data: ")[2]) for block in blocks]
    assert [event["sequence_number"] for event in events] == [0, 1, 2]
    assert (replayed(events)["status"], ended) == ("failed", ["failed"])


def test_an_error_before_a_stream_is_an_answer_with_its_status() -> None:
    world = new_world()
    world.engine.script = lambda request: [RequestError(429, "The queue is full.", retry_after_s=3)]
    response = world.post(PATH, {"input": "hi", "stream": True})
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")


# ---- Requests


def test_the_request_is_the_chat_that_it_means() -> None:
    world = new_world()
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    ]
    ask(world, input=items, instructions="Be brief.", temperature=0.5, top_p=0.25, seed=7, request_id="mine")
    messages, tools = world.engine.rendered
    assert [(one["role"], one["content"]) for one in messages] == [
        ("system", "Be brief."),
        ("system", "Be kind."),
        ("user", "ab"),
    ]
    assert tools == [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    (handle,) = world.engine.handles
    params = handle.request.params
    assert (params.temperature, params.top_p, params.sampling_seed) == (0.5, 0.25, 7)
    assert (handle.request.rid, params.max_new_tokens) == ("mine", None)


def test_a_tool_loop_sends_the_output_back_as_it_came() -> None:
    world = new_world(f"{THOUGHT}I look.\n{CALL}")
    output = ask(world)["output"]
    result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "22"}
    world.engine.answer = "22 degrees."
    answer = ask(world, input=[{"role": "user", "content": "hi"}, *output, result])
    assert answer["output"][0]["content"][0]["text"] == "22 degrees."
    call_id = output[2]["call_id"]
    function = {"name": "get_weather", "arguments": {"city": "Köln"}}
    assert world.engine.rendered[0] == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "The weather.",
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": "22"},
    ]


def test_the_form_and_the_effort_are_those_of_chats() -> None:
    world = new_world(reasoning_parser=None)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    answer = ask(world, tools=[], text={"format": form, "verbosity": "medium"})
    assert answer["text"] == {"format": form, "verbosity": "medium"}
    constraint = world.engine.handles[0].request.params.constraint
    assert constraint is not None and constraint.kind == "json_schema"
    ask(world, tools=[], text={"format": {"type": "json_object"}})
    assert world.engine.handles[1].request.params.constraint is not None
    ask(world, tools=[], text={"format": {"type": "text"}})
    assert world.engine.handles[2].request.params.constraint is None
    world.engine.template_variables = {"reasoning_effort"}
    assert ask(world, reasoning={"effort": "high", "summary": None})["reasoning"] == {"effort": "high", "summary": None}
    assert "{'reasoning_effort': 'high'}" in str(world.engine.handles[3].request.text)


def test_no_tool_is_told_of_without_a_choice() -> None:
    world = new_world(CALL)
    (item,) = ask(world, tool_choice="none")["output"]
    assert (item["type"], world.engine.rendered[1]) == ("message", None)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_call_that_is_demanded_is_the_chats(choice: Any) -> None:
    world = new_world(CALL, reasoning_parser=None)
    answer = ask(world, tool_choice=choice)
    assert (answer["tool_choice"], [item["type"] for item in answer["output"]]) == (choice, ["function_call"])
    assert world.engine.handles[0].request.params.constraint is not None


def test_values_that_ask_for_nothing_pass() -> None:
    nothing: dict[str, Any] = {
        "truncation": "disabled",
        "top_logprobs": 0,
        "include": ["reasoning.encrypted_content", "file_search_call.results"],
        "conversation": None,
        "prompt": None,
        "max_tool_calls": None,
        "service_tier": "auto",
        "user": "me",
        "background": False,
        "store": True,
        "stream_options": None,
        "reasoning": {"effort": None, "summary": None, "generate_summary": None},
    }
    assert ask(new_world(), **nothing)["store"] is False


@pytest.mark.parametrize(
    ("fields", "parameter", "said"),
    [
        ({"truncation": "auto"}, "truncation", "truncation is not supported yet"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs is not supported yet"),
        ({"conversation": "conv_1"}, "conversation", "conversation is not supported yet"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "prompt is not supported yet"),
        ({"include": ["message.output_text.logprobs"]}, "include", "include[0] (message.output_text.logprobs) is not"),
        ({"background": True}, "background", "background needs a server with --enable-response-store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "needs a server with --enable-response-store"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "may be given only with stream: true"),
        ({"reasoning": {"summary": "auto"}}, "reasoning", "reasoning.summary is not supported yet"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "reasoning.effort (high) is not supported by this model's"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type must be function, not 'web_search'"),
        ({"tools": [{**WEATHER, "name": ""}]}, "tools", "tools[0].name must be a string of 1 to"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "tools[1].name is 'get_weather', as that of an earlier tool"),
        ({"tools": [{**WEATHER, "parameters": 7}]}, "tools", "tools[0].parameters must be an object"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools", "tools[0].defer_loading is not supported yet"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "tool_choice.type must be function"),
        ({"tool_choice": "always"}, "tool_choice", "tool_choice must be none, auto, required or an object"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice (required) demands a call"),
        ({"tools": [{**WEATHER, "parameters": NESTED}]}, "tools", "tools is nested too deeply"),
        ({"text": {"format": {"type": "json_schema", "schema": NESTED}}}, "text", "text is nested too deeply"),
        ({"text": {"format": {"type": "json_schema", "name": 7, "schema": {}}}}, "text", "text.format.name must be"),
        ({"text": {"format": {"type": "json_schema", "strict": 7, "schema": {}}}}, "text", "text.format.strict must"),
        ({"text": {"verbosity": "low"}}, "text", "text.verbosity is not supported yet"),
        ({"text": {"format": {"type": "json_schema"}}}, "text", "text.format.schema is missing"),
        (
            {"text": {"format": {"type": "json_object"}}, "tools": [WEATHER], "tool_choice": "required"},
            "text",
            "text.format and a tool_choice that demands calls exclude each other",
        ),
        ({"max_output_tokens": -1}, "max_output_tokens", "max_output_tokens must be at least 0"),
        ({"input": "x" * 5000}, "input", "input has 5017 tokens"),
        ({"metadata": {"a": 1}}, "metadata", "metadata must have names of at most 64 characters"),
        ({"request_id": "x" * 1000}, "request_id", "request_id"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name_here(fields: dict[str, Any], parameter: str, said: str) -> None:
    param, message = refusal(new_world(), **fields)
    assert param == parameter
    assert said in message


def test_an_unknown_model_is_a_404() -> None:
    response = new_world().post(PATH, {"input": "hi", "model": "gpt-9"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
