"""/v1/messages and /v1/messages/count_tokens over ASGI, with a fake engine whose tokens are characters."""

from __future__ import annotations

import dataclasses
from typing import Any

import jsonschema_rs
import pytest
from msgspec.structs import replace

from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, Finish, GenerateInput, RequestError
from tests.unit.entrypoints.anthropic.named_events import accumulated, named_events
from tests.unit.entrypoints.fake_engine import CACHED_TOKENS, CONTEXT, World, choice_update, typing_out

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "hi"}
WEATHER = {"name": "get_weather", "description": "The weather.", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
THOUGHT = "<think>\nThe weather.\n</think>\n\n"


def new_world(answer: str = "Hello!", **facts: str | None) -> World:
    world = World(answer=answer)
    known = {"tool_call_parser": "hermes", "reasoning_parser": None, **facts}
    world.engine.model = dataclasses.replace(world.engine.model, **known)  # type: ignore[arg-type]
    return world


def ask(world: World, **fields: Any) -> Any:
    response = world.post(PATH, {"messages": [USER], "max_tokens": 200, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def streamed(world: World, **fields: Any) -> Any:
    response = world.post(PATH, {"messages": [USER], "max_tokens": 200, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return accumulated(named_events(response.text))


def refused(world: World, status: int = 400, path: str = PATH, **fields: Any) -> str:
    """The sentence of a refusal, whose shape is checked."""
    response = world.post(path, {"messages": [USER], "max_tokens": 200, **fields})
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    sentence: str = body["error"]["message"]
    return sentence


def same_but_ids(one: Any, other: Any) -> bool:
    def bare(message: Any) -> Any:
        content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
        return {**message, "id": "", "content": content}

    return bool(bare(one) == bare(other))


# ---- Answers


def test_a_text_is_answered_by_a_message() -> None:
    world = new_world()
    answer = ask(world, system="Be kind.", temperature=0.5, top_p=0.9, top_k=7, model="org/big")
    num_prompt = len("<system>Be kind.<user>hi<assistant>")
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "org/big",
        "content": [{"type": "text", "text": "Hello!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt - CACHED_TOKENS,
            "cache_read_input_tokens": CACHED_TOKENS,
            "cache_creation_input_tokens": 0,
            "output_tokens": 6,
        },
    }
    params = world.engine.handles[-1].request.params
    assert (params.temperature, params.top_p, params.top_k, params.max_new_tokens) == (0.5, 0.9, 7, 200)


@pytest.mark.parametrize("answer", ["Hello!", f"{THOUGHT}I look.\n{CALL}\n{CALL}", "", THOUGHT])
def test_a_stream_says_the_same_and_both_are_as_described(answer: str) -> None:
    world = new_world(answer, reasoning_parser="qwen3")
    document = world.get("/openapi.json").json()
    content = document["paths"][PATH]["post"]["responses"]["200"]["content"]
    whole = ask(world, tools=[WEATHER])
    jsonschema_rs.validator_for(content["application/json"]["schema"]).validate(whole)
    body = {"messages": [USER], "max_tokens": 200, "tools": [WEATHER], "stream": True}
    events = named_events(world.post(PATH, body).text)
    described = jsonschema_rs.validator_for(content["text/event-stream"]["x-event"])
    for one in events:
        described.validate(one)
    assert same_but_ids(accumulated(events), whole)


def test_a_call_is_a_block_with_its_arguments_as_an_object() -> None:
    world = new_world(f"{THOUGHT}I look.\n{CALL}", reasoning_parser="qwen3")
    answer = ask(world, tools=[WEATHER])
    thinking, text, call = answer["content"]
    assert thinking == {"type": "thinking", "thinking": "The weather.", "signature": ""}
    assert text == {"type": "text", "text": "I look."}
    assert call.pop("id").startswith("call_")
    assert call == {"type": "tool_use", "name": "get_weather", "input": {"city": "Köln"}}
    assert answer["stop_reason"] == "tool_use"
    assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": len(THOUGHT.rstrip())}
    function = {"name": "get_weather", "description": "The weather.", "parameters": {"type": "object"}}
    assert world.engine.rendered[1] == [{"type": "function", "function": function}]


def test_one_call_is_enough_where_no_more_are_wanted() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    for say in (ask, streamed):
        answer = say(new_world(f"{CALL}\n{CALL}"), tools=[WEATHER], tool_choice=choice)
        assert [block["type"] for block in answer["content"]] == ["tool_use"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_calls_that_are_demanded_are_a_constraint(choice: dict[str, Any]) -> None:
    world = new_world(CALL)
    answer = ask(world, tools=[WEATHER], tool_choice=choice)
    assert answer["stop_reason"] == "tool_use"
    constraint = world.engine.handles[-1].request.params.constraint
    assert constraint is not None and "get_weather" in constraint.content


def test_without_a_choice_of_tools_nothing_is_a_call() -> None:
    world = new_world(CALL)
    answer = ask(world, tools=[WEATHER], tool_choice={"type": "none"})
    assert (answer["content"], answer["stop_reason"]) == ([{"type": "text", "text": CALL}], "end_turn")
    assert world.engine.rendered[1] is None


def test_an_answer_that_is_too_long_says_whose_limit_it_was() -> None:
    for say in (ask, streamed):
        answer = say(new_world(), max_tokens=3)
        assert (answer["content"][0]["text"], answer["stop_reason"]) == ("Hel", "max_tokens")
        assert say(new_world(), max_tokens=0)["content"] == []

    def full(request: GenerateInput) -> list[list[ChoiceUpdate] | RequestError | None]:
        return [[replace(choice_update(request, "Hello", 4), finish=Finish("length", length=5))]]

    world = new_world()
    world.engine.script = full
    assert ask(world, max_tokens=CONTEXT * 2)["stop_reason"] == "model_context_window_exceeded"
    assert world.engine.handles[-1].request.params.may_shorten


def test_a_stop_sequence_is_named() -> None:
    def stopped(request: GenerateInput) -> list[list[ChoiceUpdate] | RequestError | None]:
        assert request.params.stop == ("##", "END")
        return [[replace(choice_update(request, "Hi", 1), finish=Finish("stop", matched="END"))]]

    for say in (ask, streamed):
        world = new_world()
        world.engine.script = stopped
        answer = say(world, stop_sequences=["##", "END"])
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")


def test_a_last_message_of_the_assistant_is_continued() -> None:
    world = new_world()
    ask(world, messages=[USER, {"role": "assistant", "content": "He"}])
    assert str(world.engine.handles[-1].request.text) == "<user>hi<assistant>He"


def test_the_id_is_a_name_by_which_the_request_can_be_aborted() -> None:
    world = new_world()
    assert ask(world)["id"] == world.engine.handles[-1].request.rid


# ---- Reasoning, effort and form


@pytest.mark.parametrize(
    ("thinking", "value"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, True),
        ({"type": "adaptive"}, True),
        ({"type": "disabled"}, False),
    ],
)
def test_the_switch_of_the_template_is_set(thinking: dict[str, Any], value: bool) -> None:
    world = new_world()
    world.engine.template_variables = {"enable_thinking"}
    ask(world, thinking=thinking)
    assert str({"enable_thinking": value}) in str(world.engine.handles[-1].request.text)


def test_without_a_switch_only_what_the_model_does_anyway_is_accepted() -> None:
    enabled, disabled = {"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}
    for parser, fine, wrong in ((None, disabled, enabled), ("deepseek-r1", enabled, disabled)):
        ask(new_world(reasoning_parser=parser), thinking=fine)
        ask(new_world(reasoning_parser=parser), thinking={"type": "adaptive"})
        sentence = refused(new_world(reasoning_parser=parser), thinking=wrong)
        assert sentence.startswith(f"thinking.type ({wrong['type']}) is not supported by this model")


def test_reasoning_can_be_left_out() -> None:
    world = new_world(THOUGHT + "Sunny.", reasoning_parser="qwen3")
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    for say in (ask, streamed):
        answer = say(world, thinking=thinking)
        assert answer["content"] == [{"type": "text", "text": "Sunny."}]
        assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def test_the_effort_is_a_variable_of_the_template() -> None:
    world = new_world()
    ask(world, output_config={"effort": "high"})
    assert str(world.engine.handles[-1].request.text).endswith("<assistant>")
    assert refused(world, output_config={"effort": "low"}).startswith("output_config.effort (low) is not supported")
    world.engine.template_variables = {"reasoning_effort"}
    ask(world, output_config={"effort": "high"})
    assert "{'reasoning_effort': 'high'}" in str(world.engine.handles[-1].request.text)


def test_the_form_of_the_answer_is_a_constraint() -> None:
    world = new_world()
    ask(world, output_config={"format": {"type": "json_schema", "schema": {"type": "integer"}}})
    constraint = world.engine.handles[-1].request.params.constraint
    assert constraint is not None and (constraint.kind, constraint.content) == ("json_schema", '{"type":"integer"}')


# ---- Counting


def test_the_count_is_that_of_the_prompt_that_a_message_has() -> None:
    fields = {"messages": [USER], "system": "Be kind.", "tools": [WEATHER], "tool_choice": {"type": "auto"}}
    world = new_world()
    answer = world.post(COUNT, fields)
    assert answer.status_code == 200 and world.engine.handles == []
    usage = ask(world, **fields)["usage"]
    assert answer.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_a_count_knows_no_fields_of_the_output() -> None:
    assert refused(new_world(), path=COUNT) == "max_tokens is not a known parameter."


# ---- Refusals


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_tokens": None}, "max_tokens is required."),
        ({"max_tokens": -1}, "max_tokens must be at least 0"),
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"stop_sequences": [""]}, "stop_sequences must not contain an empty string"),
        ({"stop_sequences": ["x"] * 40}, "stop_sequences may have at most 32 entries"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages has 5017 tokens"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": 7}]}]}, "messages[1].content[0].thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "a"}]}, "tools[0].type is 'web_search_20250305', but this server"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type is 'bash_20250124'"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema must be an object"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name must be a string"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name is 'get_weather', as that of an earlier tool"),
        ({"tools": [{**WEATHER, "bogus": 1}]}, "tools[0].bogus is not a known field"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading is not supported yet"),
        ({"tools": [{**WEATHER, "input_examples": [{}]}]}, "tools[0].input_examples is not supported yet"),
        ({"tools": [{**WEATHER, "eager_input_streaming": False}]}, "tools[0].eager_input_streaming is not supported"),
        ({"tool_choice": {"type": "robot"}}, "tool_choice.type must be one of auto, any, tool, none, not 'robot'"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name is not a known field"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name must be a string, not null"),
        ({"tool_choice": {"type": "any"}}, "tool_choice (any) demands a call, but the request has no tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice names the tool 'f', which"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice.disable_parallel_tool_use must"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type must be one of enabled, disabled, adaptive"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens must be an integer of at least 1024, not null"),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, "thinking.budget_tokens must be an integer"),
        ({"thinking": {"type": "disabled", "budget_tokens": 2000}}, "thinking.budget_tokens does not belong to"),
        ({"thinking": {"type": "adaptive", "display": "full"}}, "thinking.display must be summarized or omitted"),
        ({"thinking": {"type": "adaptive", "bogus": 1}}, "thinking.bogus is not a known field"),
        ({"output_config": {"effort": "none"}}, "output_config.effort must be one of low, medium, high, xhigh, max"),
        ({"output_config": {"task_budget": {"tokens": 5}}}, "output_config.task_budget is not supported yet"),
        ({"output_config": {"bogus": 1}}, "output_config.bogus is not a known field"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type must be json_schema"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema must be an object"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"a": "x" * 70000}}}}, "output_config.format.schema"),
        ({"container": "c"}, "container is not supported yet"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported yet"),
        ({"bogus": 1}, "bogus is not a known parameter"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_as_the_client_wrote_it(fields: dict[str, Any], sentence: str) -> None:
    world = new_world()
    assert refused(world, **fields).startswith(sentence)
    assert world.engine.handles == []


def test_what_asks_for_nothing_passes() -> None:
    cached = {"type": "ephemeral", "ttl": "1h"}
    tool = {**WEATHER, "type": "custom", "strict": False, "cache_control": cached, "allowed_callers": ["direct"]}
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    ask(
        new_world(),
        tools=[{**tool, "defer_loading": False, "input_examples": [], "eager_input_streaming": True}],
        metadata={"user_id": "me"},
        service_tier="auto",
        cache_control=cached,
        context_management={"edits": edits},
        speed="standard",
        container=None,
        stop_sequences=[],
        output_config={"effort": None, "format": None, "task_budget": None},
    )


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_types_also_within_a_stream(status: int, kind: str) -> None:
    world = new_world()
    world.engine.script = lambda request: [RequestError(status, "Too bad.")]
    answer = world.post(PATH, {"messages": [USER], "max_tokens": 5})
    assert (answer.status_code, answer.json()["error"]) == (status, {"type": kind, "message": "Too bad."})
    assert ("retry-after" in answer.headers) == (status in (429, 503))

    def fail_late(request: GenerateInput) -> list[list[ChoiceUpdate] | RequestError | None]:
        return [*typing_out(request, "Hello!")[:2], RequestError(status, "Too bad.")]

    world.engine.script = fail_late
    answer = world.post(PATH, {"messages": [USER], "max_tokens": 50, "stream": True})
    *_, last = named_events(answer.text)
    assert answer.status_code == 200
    assert last == {
        "type": "error",
        "error": {"type": kind, "message": "Too bad."},
        "request_id": answer.headers["request-id"],
    }


def test_an_aborted_message_ends_with_an_error_because_it_has_no_reason_for_it() -> None:
    def aborted(request: GenerateInput) -> list[list[ChoiceUpdate] | RequestError | None]:
        first, last = choice_update(request, "Hello!", 0), choice_update(request, "Hello!", 1)
        return [[first], [replace(last, finish=Finish("abort", message="It was aborted."))]]

    world = new_world()
    world.engine.script = aborted
    assert refused(world) == "It was aborted."
    events = named_events(world.post(PATH, {"messages": [USER], "max_tokens": 50, "stream": True}).text)
    assert [one["type"] for one in events][-2:] == ["content_block_delta", "error"]
    assert events[-2]["delta"]["text"] == "e"
    assert events[-1]["error"] == {"type": "invalid_request_error", "message": "It was aborted."}


def test_unknown_models_paths_and_methods_are_refused_in_anthropics_shape() -> None:
    world = new_world()
    assert "claude" in refused(world, 404, model="claude-opus")
    for method, path, status, kind in (
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
    ):
        answer = world.call(method, path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert world.post("/v1/message", {}).json()["error"]["code"] == "not_found"


def test_the_key_may_come_in_anthropics_header_on_these_routes_alone() -> None:
    world = World(api_key="user", admin_api_key="admin")
    body = {"messages": [USER], "max_tokens": 5}
    for headers in ({"x-api-key": "user"}, {"x-api-key": "admin"}, {"authorization": "Bearer user"}):
        assert world.post(PATH, body, headers=headers).status_code == 200
    for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": ""}):
        answer = world.post(PATH, body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert "x-api-key" in answer.json()["error"]["message"]
    assert world.get("/v1/models", headers={"x-api-key": "user"}).status_code == 401
