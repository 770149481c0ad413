"""Anthropic's messages as those of a chat."""

from __future__ import annotations

import json
from typing import Any

import pytest

from srt.entrypoints.anthropic.blocks import chat_messages, refuse_open_call
from srt.entrypoints.openai.messages import MAX_CALLS, MAX_MESSAGES, plain_messages
from srt.managers.tokenizer_manager.api_types import RequestError


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def use(call_id: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "weather", "input": {"city": "Köln"}, **more}


def result(call_id: str = "c1", **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, **more}


def converted(*messages: dict[str, Any], system: Any = None) -> list[dict[str, Any]]:
    chat = chat_messages(system, list(messages))
    plain_messages(chat)  # which accepts them
    return chat


def test_texts_come_as_they_are_and_blocks_line_by_line() -> None:
    assert converted(user("hi")) == [user("hi")]
    assert converted(user([text("a"), text("b", cache_control={"type": "ephemeral"}, citations=None)])) == [
        user("a\nb")
    ]
    expected = [{"role": "system", "content": "Be\nkind."}, user("hi")]
    assert converted(user("hi"), system=[text("Be"), text("kind.")]) == expected
    assert converted(user("hi"), system="Be\nkind.") == expected


def test_messages_of_one_role_that_follow_each_other_are_one() -> None:
    messages = [user("a"), user([text("b")]), assistant("c"), assistant([text("d"), use()]), user([result()])]
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Köln"}'}}
    assert converted(*messages, system="s") == [
        {"role": "system", "content": "s"},
        user("a\nb"),
        {**assistant("c\nd"), "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": ""},
    ]
    assert converted({"role": "system", "content": "t"}, user("a"), system="s")[0]["content"] == "s\nt"


def test_reasoning_and_calls_that_are_sent_back_keep_their_places() -> None:
    answer = assistant(
        [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            text("I look."),
            use("c1", caller={"type": "direct"}, toolset_name=None),
            use("c2"),
        ]
    )
    results = user(
        [result("c2", content=[text("22"), text("sunny")]), result(content="no", is_error=True), text("So?")]
    )
    first, message, *tools, last = converted(user("hi"), answer, results)
    assert (first, last) == (user("hi"), user("So?"))
    assert (message["reasoning_content"], message["content"]) == ("hm", "I look.")
    assert [call["id"] for call in message["tool_calls"]] == ["c1", "c2"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Köln"}
    assert [(tool["tool_call_id"], tool["content"]) for tool in tools] == [("c2", "22\nsunny"), ("c1", "Error: no")]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"content": "bad", "is_error": True}, "Error: bad"),
        ({"content": "Error: bad", "is_error": True}, "Error: bad"),
        ({"is_error": True}, "Error"),
        ({"content": "fine", "is_error": False}, "fine"),
        ({"content": None, "is_error": None}, ""),
        ({"content": []}, ""),
    ],
)
def test_the_model_reads_that_a_tool_failed(fields: dict[str, Any], expected: str) -> None:
    assert converted(user("hi"), assistant([use()]), user([result(**fields)]))[-1]["content"] == expected


def test_a_call_without_a_result_cannot_be_the_end() -> None:
    with pytest.raises(RequestError, match="messages ends with a tool_use: a tool_result must follow it"):
        refuse_open_call(converted(user("hi"), assistant([use()])))
    refuse_open_call(converted(user("hi"), assistant("It is")))


IMAGE = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([user([IMAGE])], r"messages\[0\].content\[0\] is a block of type 'image': "),
        ([user([text("a"), {"type": "document"}])], r"messages\[0\].content\[1\] is a block of type 'document': "),
        ([user([use()])], r"messages\[0\].content\[0\] is a block of type 'tool_use': .* type text, tool_result\."),
        ([assistant([result()])], r"messages\[0\].content\[0\] is a block of type 'tool_result': "),
        ([{"role": "system", "content": [use()]}], r"messages\[0\].content\[0\] is a block of type 'tool_use': "),
        ([user([{"text": "a"}])], r"messages\[0\].content\[0\] is a block without a type: "),
        ([user([{"type": ["text"]}])], r"messages\[0\].content\[0\] is a block without a type: "),
        ([user(["a"])], r"messages\[0\].content\[0\] must be an object with a type, not a string"),
        ([user([])], r"messages\[0\].content must not be an empty list"),
        ([user(None)], r"messages\[0\].content is required"),
        ([user(7)], r"messages\[0\].content must be a string or a list of blocks"),
        ([user([text("a", bogus=1)])], r"messages\[0\].content\[0\].bogus is not a known field"),
        ([user([{"type": "text"}])], r"messages\[0\].content\[0\].text must be a string, not null"),
        ([user([text("a", citations=[{}])])], r"messages\[0\].content\[0\].citations is not supported yet"),
        ([{**user("a"), "name": "x"}], r"messages\[0\].name is not a known field"),
        ([{"role": "tool", "content": "a"}], r"messages\[0\].role must be one of user, assistant, system, not 'tool'"),
        ([assistant([use(), use()])], r"messages\[0\].content\[1\].id is that of an earlier tool_use"),
        ([assistant([use("")])], r"messages\[0\].content\[0\].id must not be empty"),
        ([assistant([{**use(), "input": "{}"}])], r"messages\[0\].content\[0\].input must be an object, not a string"),
        ([assistant([use(caller={"type": "code_execution_20250825"})])], r"content\[0\].caller is not supported"),
        ([user([result()])], r"content\[0\].tool_use_id is 'c1', which no tool_use before it has"),
        ([assistant([use()]), user([result(is_error="yes")])], r"content\[0\].is_error must be true or false"),
        (
            [assistant([use()]), user([result(content=[IMAGE])])],
            r"content\[0\].content\[0\] is a block of type 'image'",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_its_place(messages: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence) as caught:
        chat_messages(None, messages)
    assert (caught.value.status, caught.value.parameter) == (400, "messages")


def test_arguments_that_are_nested_too_deeply_are_refused() -> None:
    deep: Any = 1
    for _ in range(500):
        deep = {"a": deep}
    with pytest.raises(RequestError, match=r"content\[0\].input is nested too deeply"):
        chat_messages(None, [assistant([use(input=deep)])])


def test_many_texts_are_joined() -> None:
    """Joined one to the other, ten million characters would be copied for each, and the test would reach its time limit."""
    chat = chat_messages(None, [user([text("x" * 50)] * 100_000)] * 2)
    assert len(chat) == 1 and len(chat[0]["content"]) == 51 * 200_000 - 1


def test_many_calls_and_results_are_refused_before_all_are_read() -> None:
    calls = [use(str(number)) for number in range(MAX_CALLS + 1)]
    with pytest.raises(RequestError, match="messages may have at most 10000 blocks of type tool_use"):
        chat_messages(None, [assistant(calls)])
    with pytest.raises(RequestError, match="messages may have at most 10000 turns and blocks of type tool_result"):
        chat_messages(None, [assistant([use()]), user([result()] * MAX_MESSAGES)])
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [{"role": "assistant", "content": "", "tool_calls": [call] * MAX_CALLS}]
    assert len(plain_messages(chat)[0]["tool_calls"]) == MAX_CALLS
    with pytest.raises(RequestError, match="messages may have at most 10000 calls of tools, not 20000"):
        plain_messages(chat * 2)


def test_a_wrong_system_prompt_is_refused_by_its_name() -> None:
    for system, sentence in (([], "system must not be"), ([IMAGE], r"system\[0\] is a block of type 'image'")):
        with pytest.raises(RequestError, match=sentence):
            chat_messages(system, [user("hi")])
