"""Items of /v1/responses as messages of a chat, and back."""

from __future__ import annotations

from typing import Any

import pytest

from srt.entrypoints.openai.messages import plain_messages
from srt.entrypoints.openai.responses.input_items import check_calls_have_outputs, messages_of
from srt.managers.tokenizer_manager.api_types import RequestError

USER = {"role": "user", "content": "hi"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
SAID = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Well.", "annotations": [], "logprobs": None}],
}


def called(name: str) -> dict[str, Any]:
    return {"type": "function_call", "id": f"fc_{name}", "call_id": f"call_{name}", "name": name, "arguments": "{}"}


def in_chat(name: str) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}


def returned(name: str, output: Any = "7") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"call_{name}", "output": output}


ANSWERED = {"role": "tool", "tool_call_id": "call_f", "content": "7"}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [USER]),
        ([USER], [USER]),
        ([{"type": "message", "role": "system", "content": "Be."}, USER], [{"role": "system", "content": "Be."}, USER]),
        ([SAID], [{"role": "assistant", "content": "Well."}]),
        ([SAID, SAID], [{"role": "assistant", "content": "Well."}] * 2),
        ([THOUGHT, SAID], [{"role": "assistant", "content": "Well.", "reasoning_content": "Hm."}]),
        ([THOUGHT], [{"role": "assistant", "content": "", "reasoning_content": "Hm."}]),
        ([called("f")], [{"role": "assistant", "content": "", "tool_calls": [in_chat("f")]}]),
        (
            [THOUGHT, SAID, called("f"), called("g")],
            [
                {
                    "role": "assistant",
                    "content": "Well.",
                    "reasoning_content": "Hm.",
                    "tool_calls": [in_chat("f"), in_chat("g")],
                }
            ],
        ),
        ([called("f"), SAID], [{"role": "assistant", "content": "Well.", "tool_calls": [in_chat("f")]}]),
        (
            [called("f"), returned("f"), called("g")],
            [
                {"role": "assistant", "content": "", "tool_calls": [in_chat("f")]},
                ANSWERED,
                {"role": "assistant", "content": "", "tool_calls": [in_chat("g")]},
            ],
        ),
        (
            [called("f"), returned("f"), THOUGHT, SAID],
            [
                {"role": "assistant", "content": "", "tool_calls": [in_chat("f")]},
                ANSWERED,
                {"role": "assistant", "content": "Well.", "reasoning_content": "Hm."},
            ],
        ),
        ([returned("f", [{"type": "input_text", "text": "7"}])], [ANSWERED]),
        ([returned("f", [])], [{**ANSWERED, "content": ""}]),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "Short."}]}],
            [{"role": "assistant", "content": "", "reasoning_content": "Short."}],
        ),
        (
            [{**called("f"), "async": False, "namespace": None, "caller": {"type": "direct"}, "status": "completed"}],
            [{"role": "assistant", "content": "", "tool_calls": [in_chat("f")]}],
        ),
    ],
)
def test_items_are_messages(items: Any, messages: list[dict[str, Any]]) -> None:
    assert messages_of(items) == messages
    assert len(plain_messages(messages)) == len(messages)  # a chat takes them


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (7, "input[0] must be an object, not an integer"),
        ({}, "input[0].type must be one of message, function_call, function_call_output, reasoning, not None"),
        ({"type": "item_reference", "id": "x"}, "input[0].type must be one of message,"),
        ({"type": "web_search_call", "id": "x"}, "not 'web_search_call'"),
        ({"role": "tool", "content": "x"}, "input[0].role must be one of user, system, developer, assistant"),
        ({"role": "user"}, "input[0].content is required"),
        ({"role": "user", "content": None}, "input[0].content is required"),
        ({"role": "user", "content": []}, "input[0].content must not be an empty list"),
        ({"role": "user", "content": {}}, "input[0].content must be a string or a list of text parts, not an object"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "not 'input_image': no images"),
        ({"role": "user", "content": [{"type": "input_text", "text": 7}]}, "content[0].text must be a string"),
        ({"role": "user", "content": [{"type": "input_text", "text": "a", "x": 1}]}, "content[0].x is not a known"),
        ({**USER, "phase": "commentary"}, "input[0].phase is not supported yet"),
        ({**USER, "bogus": None}, "input[0].bogus is not a known field"),
        ({**USER, "status": "done"}, "input[0].status must be one of in_progress"),
        ({**called("f"), "arguments": {}}, "input[0].arguments must be a string, not an object"),
        ({**called("f"), "async": True}, "input[0].async is not supported yet"),
        ({**returned("f"), "call_id": None}, "input[0].call_id is required"),
        ({**returned("f"), "output": [{"type": "input_file"}]}, "input[0].output[0].type must be input_text"),
        ({**THOUGHT, "encrypted_content": "x"}, "input[0].encrypted_content is not supported yet"),
        ({**THOUGHT, "content": "Hm."}, "input[0].content must be a list"),
    ],
)
def test_a_wrong_item_is_refused_with_its_place(item: Any, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        messages_of([item])
    assert said in caught.value.message
    assert (caught.value.status, caught.value.parameter) == (400, "input")


def test_many_texts_behind_a_call_are_joined_once() -> None:
    """Joined one by one they would be copied 10,000 times: 75 GB."""
    items = [called("f"), *[{"role": "assistant", "content": "x" * 1500}] * 9999]
    (message,) = messages_of(items)
    assert len(message["content"]) == 9999 * 1500


PART = {"type": "input_text", "text": "a"}
MANY_PARTS = [{"role": "user", "content": [PART] * 10_000}, {**returned("f"), "output": [PART] * 10_001}]


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([], "input must not be empty"),
        ([USER] * 10_001, "at most 10000 items"),
        (MANY_PARTS, "at most 20000 parts in all items, not 20001"),
    ],
)
def test_too_few_and_too_many_items_are_refused(items: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        messages_of(items)


@pytest.mark.parametrize(
    ("items", "open_call"),
    [
        ([USER, called("f")], "f"),
        ([called("f"), USER], "f"),
        ([called("f"), called("g"), returned("f"), USER], "g"),
        ([called("f"), called("g"), returned("g")], "f"),
        ([returned("f"), called("f")], "f"),
        ([called("f"), returned("f"), called("f")], "f"),
    ],
)
def test_a_call_without_its_output_is_refused_by_its_name(items: Any, open_call: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_calls_have_outputs(messages_of(items))
    sentence = f"No tool output found for function call call_{open_call}: add a function_call_output with this call_id."
    assert (caught.value.status, caught.value.message, caught.value.parameter) == (400, sentence, "input")


@pytest.mark.parametrize(
    "items",
    [
        "hi",
        [returned("f")],
        [called("f"), returned("f"), USER],
        [called("f"), called("g"), returned("g"), returned("f")],
        [called("f"), USER, returned("f")],
        [called("f"), returned("f"), called("f"), returned("f")],
    ],
)
def test_calls_with_outputs_are_fine_in_any_order(items: Any) -> None:
    check_calls_have_outputs(messages_of(items))
