"""Tools and reasoning in /v1/chat/completions over ASGI, with a fake engine whose tokens are characters."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.unit.entrypoints.fake_engine import World
from tests.unit.entrypoints.sse import events

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": None, "parameters": {"type": "object"}, "strict": False},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
THOUGHT = "<think>\nThe weather.\n</think>\n\n"


def new_world(answer: str, **facts: str | None) -> World:
    world = World()
    known = {"tool_call_parser": "hermes", "reasoning_parser": None, **facts}
    world.engine.model = dataclasses.replace(world.engine.model, **known)  # type: ignore[arg-type]
    world.engine.answer = answer
    return world


def ask(world: World, **fields: Any) -> Any:
    response = world.post(PATH, {"messages": [USER], "tools": [WEATHER], **fields})
    assert response.status_code == 200, response.text
    return response.json()


def streamed(world: World, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    response = world.post(PATH, {"messages": [USER], "tools": [WEATHER], "stream": True, **fields})
    assert response.status_code == 200, response.text
    return events(response)


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message and the finish reason that the chunks of a choice make."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        delta = choice["delta"]
        for field in ("content", "reasoning_content"):
            message[field] += delta.get(field, "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(message["tool_calls"])
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": "", "id": call["id"]})
            message["tool_calls"][call["index"]]["arguments"] += call["function"].get("arguments", "")
        message["finish_reason"] = choice["finish_reason"]
    return message


def test_a_call_is_returned_as_such() -> None:
    world = new_world(f"I look.\n{CALL}")
    (choice,) = ask(world)["choices"]
    call_id = choice["message"]["tool_calls"][0].pop("id")
    assert call_id.startswith("call_")
    assert choice["message"] == {
        "role": "assistant",
        "content": "I look.",
        "refusal": None,
        "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}],
    }
    assert choice["finish_reason"] == "tool_calls"
    function = {"name": "get_weather", "parameters": {"type": "object"}}
    assert world.engine.rendered[1] == [{"type": "function", "function": function}]


def test_a_stream_says_the_same() -> None:
    chunks = streamed(new_world(f"I look.\n{CALL}\n{CALL}"), n=2)
    for index in (0, 1):
        message = joined(chunks, index)
        assert message["content"] == "I look."
        assert [(call["name"], call["arguments"]) for call in message["tool_calls"]] == [
            ("get_weather", '{"city": "Köln"}')
        ] * 2
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        assert message["finish_reason"] == "tool_calls"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    begins = [delta for delta in deltas if "id" in delta.get("tool_calls", [{}])[0]]
    assert all(begin["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": ""} for begin in begins)


def test_content_is_null_beside_calls_alone_and_text_without_calls_is_untouched() -> None:
    assert ask(new_world(CALL))["choices"][0]["message"]["content"] is None
    (choice,) = ask(new_world(" Hello! \n"))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (" Hello! \n", "stop")
    assert "tool_calls" not in choice["message"]


def test_only_stop_becomes_tool_calls() -> None:
    world = new_world(CALL)
    (choice,) = ask(world, max_tokens=len(CALL) - 12)["choices"]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) in (("length", 1), ("tool_calls", 1))


def test_one_call_is_enough_without_parallel_calls() -> None:
    world = new_world(f"{CALL}\n{CALL}")
    assert len(ask(world, parallel_tool_calls=False)["choices"][0]["message"]["tool_calls"]) == 1
    assert len(joined(streamed(world, parallel_tool_calls=False))["tool_calls"]) == 1


NOW = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("fields", "names", "is_one"),
    [
        ({"tool_choice": "required"}, ["get_weather", "now"], False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["get_weather", "now"], True),
        ({"tool_choice": NAMED}, ["now"], True),
    ],
)
def test_demanded_calls_are_a_constraint(fields: dict[str, Any], names: list[str], is_one: bool) -> None:
    world = new_world(CALL)
    (choice,) = ask(world, tools=[WEATHER, NOW], **fields)["choices"]
    constraint = world.engine.handles[-1].request.params.constraint
    assert constraint is not None and constraint.kind == "structural_tag"
    form = json.loads(constraint.content)["format"]
    begins = [f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in names]
    assert [tag["begin"] for tag in form["tags"]] == begins
    assert (form["at_least_one"], form["stop_after_first"]) == (True, is_one)
    assert choice["finish_reason"] == "tool_calls"
    assert world.engine.rendered[1] is not None and len(world.engine.rendered[1]) == 2  # the prompt has all tools


def test_calls_that_may_be_made_are_no_constraint() -> None:
    world = new_world(CALL)
    ask(world, tool_choice="auto")
    assert world.engine.handles[-1].request.params.constraint is None


@pytest.mark.parametrize(
    ("level", "strict", "enforced"),
    [
        ("auto", True, {"now": {"type": "object"}, "get_weather": {"type": "object", "properties": {"x": {}}}}),
        ("function", False, {"now": {"type": "object"}, "get_weather": {"type": "object"}}),
        ("parameter", False, {"now": {"type": "object"}, "get_weather": {"type": "object", "properties": {"x": {}}}}),
    ],
)
def test_strict_tools_are_enforced_where_a_call_begins(level: str, strict: bool, enforced: dict[str, Any]) -> None:
    world = new_world(CALL)
    world.engine.model = dataclasses.replace(world.engine.model, tool_strict_level=level)
    parameters = {"type": "object", "properties": {"x": {}}}
    weather = {"type": "function", "function": {"name": "get_weather", "parameters": parameters, "strict": strict}}
    answer = ask(world, tools=[NOW, weather])
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    constraint = world.engine.handles[-1].request.params.constraint
    assert constraint is not None
    form = json.loads(constraint.content)["format"]
    assert (form["type"], form["triggers"]) == ("triggered_tags", ["<tool_call>"])
    schemas = {tag["begin"].split('"')[3]: tag["content"]["json_schema"] for tag in form["tags"]}
    assert schemas == enforced
    assert all("strict" not in tool["function"] for tool in world.engine.rendered[1] or [])


@pytest.mark.parametrize(
    ("fields", "parameter", "message"),
    [
        ({"regex": "a"}, "regex", "regex and a tool_choice that demands calls exclude each other"),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"not": {}}}}}}
                ]
            },
            "tools",
            "tools[0].function.parameters has the keyword not at #/properties/x/not",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"const": "x" * 70_000}}}]},
            "tools",
            "tools may have at most 65536 bytes, not 70",
        ),
    ],
)
def test_demanded_calls_that_cannot_be_enforced_are_refused(
    fields: dict[str, Any], parameter: str, message: str
) -> None:
    asked = {"messages": [USER], "tools": [WEATHER], "tool_choice": "required", **fields}
    response = new_world(CALL).post(PATH, asked)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, parameter)
    assert error["message"].startswith(message)


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": None}])
def test_without_tools_nothing_is_a_call(fields: dict[str, Any]) -> None:
    world = new_world(CALL)
    message = ask(world, **fields)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": CALL, "refusal": None}
    assert world.engine.rendered[1] is None


def test_a_conversation_with_calls_is_rendered() -> None:
    world = new_world("22 degrees.")
    function = {"name": "get_weather", "arguments": '{"city": "Köln"}'}
    history = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "reasoning": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "22"}]},
    ]
    assert ask(world, messages=history)["choices"][0]["message"]["content"] == "22 degrees."
    messages = world.engine.rendered[0]
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln"}}}
        ],
    }
    assert messages[2] == {"role": "tool", "content": "22", "tool_call_id": "c1"}


def test_ids_are_those_that_the_model_writes_or_that_its_template_takes() -> None:
    kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    world = new_world(kimi, tool_call_parser="kimi_k2")
    assert ask(world)["choices"][0]["message"]["tool_calls"][0]["id"] == "functions.get_weather:0"
    world = new_world("[TOOL_CALLS]get_weather{}", tool_call_parser="mistral")
    call_id = ask(world)["choices"][0]["message"]["tool_calls"][0]["id"]
    assert len(call_id) == 9 and call_id.isalnum()


def test_special_tokens_are_shown_to_a_parser_that_needs_them() -> None:
    world = new_world("Hello!")
    ask(world)
    world.engine.special_texts = {"<tool_call>"}
    ask(world)
    ask(world, tools=[])
    shown = [handle.request.params.skip_special_tokens for handle in world.engine.handles]
    assert shown == [True, False, True]


# ---- Reasoning


def test_reasoning_is_told_from_the_content_and_counted_in_tokens() -> None:
    world = new_world(THOUGHT + "Sunny.", reasoning_parser="qwen3")
    answer = ask(world)
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert (message["reasoning_content"], message["content"]) == ("The weather.", "Sunny.")
    num_tokens = len("<think>\nThe weather.\n</think>")  # a token is a character
    assert usage["reasoning_tokens"] == usage["completion_tokens_details"]["reasoning_tokens"] == num_tokens
    *chunks, last = streamed(world, stream_options={"include_usage": True})
    assert last["usage"]["reasoning_tokens"] == num_tokens
    told = joined(chunks)
    assert (told["reasoning_content"], told["content"], told["finish_reason"]) == ("The weather.", "Sunny.", "stop")


def test_reasoning_and_a_call_in_one_answer() -> None:
    world = new_world(THOUGHT + CALL, reasoning_parser="qwen3")
    message = ask(world)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("The weather.", None)
    told = joined(streamed(world))
    assert (told["reasoning_content"], told["content"], len(told["tool_calls"])) == ("The weather.", "", 1)


def test_no_reasoning_is_null() -> None:
    answer = ask(new_world("Sunny.", reasoning_parser="qwen3"))
    assert answer["choices"][0]["message"]["reasoning_content"] is None
    assert answer["usage"]["reasoning_tokens"] == 0


def test_reasoning_stays_in_the_content_if_it_is_not_to_be_separated() -> None:
    world = new_world(THOUGHT + "Sunny.", reasoning_parser="qwen3")
    message = ask(world, separate_reasoning=False)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": THOUGHT + "Sunny.", "refusal": None}


def test_reasoning_comes_at_once_if_it_is_not_to_be_streamed() -> None:
    world = new_world(THOUGHT + "Sunny.", reasoning_parser="qwen3")
    told = [
        chunk["choices"][0]["delta"]["reasoning_content"]
        for chunk in streamed(world, stream_reasoning=False)
        if "reasoning_content" in chunk["choices"][0]["delta"]
    ]
    assert told == ["The weather."]
    cut = streamed(new_world("<think>\nThe", reasoning_parser="qwen3"), stream_reasoning=False)
    assert joined(cut)["reasoning_content"] == "The"


def test_a_prompt_that_opens_the_reasoning_is_noticed() -> None:
    world = new_world("hm</think>\n\nSunny.", reasoning_parser="deepseek-r1")
    thinking = {"role": "assistant", "content": "<think>Well, "}
    fields: dict[str, Any] = {"messages": [USER, thinking], "continue_final_message": True}
    message = ask(world, **fields)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Sunny.")


def test_the_effort_is_a_variable_of_the_template() -> None:
    world = new_world("Sunny.")
    world.engine.template_variables = {"reasoning_effort"}
    ask(world, reasoning_effort="high")
    assert "{'reasoning_effort': 'high'}" in str(world.engine.handles[-1].request.text)
    world.engine.template_variables = {"enable_thinking"}
    ask(world, reasoning_effort="none")
    assert "{'enable_thinking': False}" in str(world.engine.handles[-1].request.text)


NAME_FORM: dict[str, Any] = {"tools": [], "regex": "[a-z]+"}
THOUGHT_FIRST: dict[str, Any] = {
    "messages": [USER, {"role": "assistant", "content": "<think>Well, "}],
    "continue_final_message": True,
}


def constraint_of(world: World) -> Any:
    constraint = world.engine.handles[-1].request.params.constraint
    assert constraint is not None
    return constraint


def test_a_form_begins_behind_the_token_that_ends_open_reasoning() -> None:
    world = new_world("hm</think>abc", reasoning_parser="qwen3")
    world.engine.single_tokens = {"</think>": 77}
    (choice,) = ask(world, **NAME_FORM, **THOUGHT_FIRST)["choices"]
    constraint = constraint_of(world)
    assert constraint.begins_after == (77,)
    elements = json.loads(constraint.content)["format"]["elements"]
    assert elements == [{"type": "regex", "pattern": "\\n{0,2}"}, {"type": "regex", "pattern": "[a-z]+"}]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "stop")
    ask(world, tool_choice="required", **THOUGHT_FIRST)
    assert constraint_of(world).begins_after == (77,)


def test_a_form_has_open_reasoning_before_it_where_its_end_is_no_token() -> None:
    world = new_world("hm</think>abc", reasoning_parser="qwen3")
    ask(world, **NAME_FORM, **THOUGHT_FIRST)
    first, rest = json.loads(constraint_of(world).content)["format"]["elements"]
    assert (first["content"], first["end"], rest["elements"][1]["pattern"]) == (
        {"type": "any_text"},
        ["</think>"],
        "[a-z]+",
    )
    assert constraint_of(world).begins_after == ()


def test_a_model_that_opens_its_reasoning_may_do_so_before_a_form() -> None:
    world = new_world(THOUGHT + "abc", reasoning_parser="qwen3")
    (choice,) = ask(world, **NAME_FORM)["choices"]
    plain, reasoned = json.loads(constraint_of(world).content)["format"]["elements"]
    assert plain == {"type": "regex", "pattern": "[a-z]+"}
    assert reasoned["elements"][0]["begin"] == "<think>"
    assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "stop")
    closed = {"role": "assistant", "content": "<think>Well.</think>"}
    ask(world, **NAME_FORM, messages=[USER, closed], continue_final_message=True)
    assert constraint_of(world).kind == "regex"


def test_an_answer_that_ends_in_its_reasoning_is_cut_off_from_its_form() -> None:
    world = new_world("hm", reasoning_parser="qwen3")
    (choice,) = ask(world, **NAME_FORM, **THOUGHT_FIRST)["choices"]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("length", None)
    assert joined(streamed(world, **NAME_FORM, **THOUGHT_FIRST))["finish_reason"] == "length"
    assert ask(world, tools=[], **THOUGHT_FIRST)["choices"][0]["finish_reason"] == "stop"  # no form, nothing to miss


def test_a_form_in_harmony_is_that_of_the_final_message() -> None:
    world = new_world("<|channel|>final<|message|>abc", tool_call_parser="gpt-oss", reasoning_parser="gpt-oss")
    (choice,) = ask(world, **NAME_FORM)["choices"]
    _, last = json.loads(constraint_of(world).content)["format"]["elements"]
    assert (last["begin"], last["content"]["pattern"]) == ("<|channel|>final<|message|>", "[a-z]+")
    assert choice["message"]["content"] == "abc"


def test_a_form_and_tools_are_two_kinds_of_answer() -> None:
    world = new_world(CALL)
    (choice,) = ask(world, regex="[a-z]+")["choices"]
    form, calls = json.loads(constraint_of(world).content)["format"]["elements"]
    assert form == {"type": "regex", "pattern": "[a-z]+"}
    assert [one["begin"] for one in calls["tags"]] == ['<tool_call>\n{"name": "get_weather", "arguments": ']
    assert choice["finish_reason"] == "tool_calls"


def test_harmony_is_read_by_its_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.get_weather <|constrain|>json<|message|>{"city": "Bonn"}'
    )
    world = new_world(text, tool_call_parser="gpt-oss", reasoning_parser="gpt-oss")
    (choice,) = ask(world)["choices"]
    assert choice["message"]["reasoning_content"] == "Look it up."
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Bonn"}
    assert choice["finish_reason"] == "tool_calls"


# ---- Beside them


def test_logprobs_and_ids_of_every_token_come_in_a_stream_with_calls() -> None:
    world = new_world(THOUGHT + CALL, reasoning_parser="qwen3")
    chunks = streamed(world, logprobs=True, return_token_ids=True)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [token_id for choice in choices for token_id in choice.get("token_ids", [])]
    assert "".join(map(chr, ids)).startswith(THOUGHT + CALL)
    tokens = [one["token"] for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
    assert "".join(tokens).startswith(THOUGHT + CALL) or not tokens
    assert joined(chunks)["tool_calls"][0]["arguments"] == '{"city": "Köln"}'
