"""The input of a response, a text or items, as the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from srt.entrypoints.openai.messages import MAX_MESSAGES
from srt.entrypoints.openai.responses.members import Members, Schema, checked_text
from srt.entrypoints.request_schema import bad_parameter
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.sampling.parameter_checks import kind_of, show

Message = dict[str, Any]

MAX_PARTS = 20_000  # of all items: they are read between the steps of streams, and many would hold these up
ROLES = ("user", "system", "developer", "assistant")
_STATUS: Schema = {"enum": ["in_progress", "completed", "incomplete"], "description": "Its status; any will do."}
_ID: Schema = {"type": "string", "description": "Its id; any will do."}
_CALL_ID: Schema = {"type": "string", "description": "The name of the call."}
_CALLER = ({"type": "direct"},)


def _part(kind: str, off: Mapping[str, tuple[Any, ...]]) -> Members:
    known = {
        "type": {"const": kind, "description": "The kind of part."},
        "text": {"type": "string", "description": "Its text."},
    }
    return Members(known, ("type", "text"), off)


_PARTS = {
    "input_text": _part("input_text", {"prompt_cache_breakpoint": ()}),
    "output_text": _part("output_text", {"annotations": ([],), "logprobs": ([],)}),
}
_REASONING_PARTS = {kind: _part(kind, {}) for kind in ("reasoning_text", "summary_text")}


def _parts_schema(parts: Mapping[str, Members], text: str) -> Schema:
    return {"type": "array", "items": {"anyOf": [part.schema() for part in parts.values()]}, "description": text}


def _kind(kind: str) -> Schema:
    return {"const": kind, "description": "The kind of item."}


_MESSAGE = Members(
    {
        "type": _kind("message"),
        "role": {"enum": list(ROLES), "description": "The author; developer means the same as system."},
        "content": {
            "anyOf": [{"type": "string"}, {**_parts_schema(_PARTS, "Parts."), "minItems": 1}],
            "description": "The text: no images, audio or files are supported.",
        },
        "id": _ID,
        "status": _STATUS,
    },
    ("role", "content"),
    {"phase": ()},
)
_CALL = Members(
    {
        "type": _kind("function_call"),
        "call_id": _CALL_ID,
        "name": {"type": "string", "description": "The tool's name."},
        "arguments": {"type": "string", "description": "Its arguments, as JSON."},
        "id": _ID,
        "status": _STATUS,
    },
    ("type", "call_id", "name", "arguments"),
    {"async": (False,), "caller": _CALLER, "namespace": ("",)},
)
_CALL_OUTPUT = Members(
    {
        "type": _kind("function_call_output"),
        "call_id": _CALL_ID,
        "output": {
            "anyOf": [{"type": "string"}, _parts_schema({"input_text": _PARTS["input_text"]}, "Parts.")],
            "description": "What the call returned.",
        },
        "id": _ID,
        "status": _STATUS,
    },
    ("type", "call_id", "output"),
    {"name": ("",), "caller": _CALLER, "namespace": ("",)},
)
_REASONING = Members(
    {
        "type": _kind("reasoning"),
        "content": _parts_schema({"": _REASONING_PARTS["reasoning_text"]}, "The reasoning."),
        "summary": _parts_schema({"": _REASONING_PARTS["summary_text"]}, "What is taken where there is no content."),
        "id": _ID,
        "status": _STATUS,
    },
    ("type",),
    {"encrypted_content": ("",)},
)
_ITEMS = {"message": _MESSAGE, "function_call": _CALL, "function_call_output": _CALL_OUTPUT, "reasoning": _REASONING}
ITEM_SCHEMA: Schema = {"anyOf": [members.schema() for members in _ITEMS.values()]}


def messages_of(given: str | Sequence[object]) -> list[Message]:
    """Return the chat that an input or an output is; raise RequestError (400) with the place of an error.

    The reasoning, text and calls of one answer become one message, as the model's chat template expects it.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise bad_parameter("input", "must not be empty")
    if len(given) > MAX_MESSAGES:
        raise bad_parameter("input", f"may have at most {MAX_MESSAGES} items, not {len(given)}")
    num_parts = sum(_num_parts(item) for item in given)
    if num_parts > MAX_PARTS:
        raise bad_parameter("input", f"may have at most {MAX_PARTS} parts in all items, not {num_parts}")
    chat = _Chat()
    for number, item in enumerate(given):
        chat.add(f"input[{number}]", item)
    return chat.messages


def check_calls_have_outputs(messages: Sequence[Message]) -> None:
    """Raise RequestError (400) if a call has no output behind it: a chat template would put the next answer in its place."""
    calls: dict[str, None] = {}
    for message in messages:
        calls |= {call["id"]: None for call in message.get("tool_calls", ())}
        calls.pop(message.get("tool_call_id", ""), None)
    for call_id in calls:
        what = "add a function_call_output with this call_id"
        raise RequestError(400, f"No tool output found for function call {call_id[:100]}: {what}.", "input")


def _num_parts(item: object) -> int:
    """Return how many parts an item has, whatever they are."""
    contents = [item.get(name) for name in ("content", "output", "summary")] if isinstance(item, dict) else []
    return sum(len(content) for content in contents if isinstance(content, list))


class _Chat:
    """The messages as they are gathered. A last message of the assistant takes up what belongs to the same answer."""

    def __init__(self) -> None:
        self._gathered: list[Message] = []  # with lists of texts for contents, which are joined only once

    @property
    def messages(self) -> list[Message]:
        return [{**message, "content": "".join(message["content"])} for message in self._gathered]

    def add(self, where: str, item: object) -> None:
        if not isinstance(item, dict):
            raise bad_parameter(where, f"must be an object, not {kind_of(item)}")
        kind = item.get("type")
        kind = "message" if kind is None and "role" in item else kind
        if not isinstance(kind, str) or kind not in _ITEMS:
            raise bad_parameter(f"{where}.type", f"must be one of {', '.join(_ITEMS)}, not {show(kind)}")
        members = _ITEMS[kind].check(where, item)
        _check_common(where, members)
        match kind:
            case "message":
                self._add_message(where, members)
            case "function_call":
                self._add_call(where, members)
            case "function_call_output":
                self._add_output(where, members)
            case _:
                self._add_reasoning(where, members)

    def _add_message(self, where: str, members: dict[str, Any]) -> None:
        role = members["role"]
        if role not in ROLES:
            raise bad_parameter(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {show(role)}")
        if members["content"] == []:
            raise bad_parameter(f"{where}.content", "must not be an empty list")
        text = _text(f"{where}.content", members["content"], _PARTS)
        last = self._gathered[-1] if self._gathered else None
        if role == "assistant" and last is not None and _takes_text(last):
            last["content"].append(text)
        else:
            self._gathered.append({"role": role, "content": [text]})

    def _add_call(self, where: str, members: dict[str, Any]) -> None:
        function = {name: checked_text(f"{where}.{name}", members[name]) for name in ("name", "arguments")}
        call = {"id": checked_text(f"{where}.call_id", members["call_id"]), "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _add_output(self, where: str, members: dict[str, Any]) -> None:
        call_id = checked_text(f"{where}.call_id", members["call_id"])
        text = _text(f"{where}.output", members["output"], {"input_text": _PARTS["input_text"]})
        self._gathered.append({"role": "tool", "tool_call_id": call_id, "content": [text]})

    def _add_reasoning(self, where: str, members: dict[str, Any]) -> None:
        texts = [
            _text(f"{where}.{name}", members.get(name, []), {kind: _REASONING_PARTS[kind]})
            for name, kind in (("content", "reasoning_text"), ("summary", "summary_text"))
        ]
        self._gathered.append({"role": "assistant", "content": [], "reasoning_content": texts[0] or texts[1]})

    def _assistant(self) -> Message:
        """Return the message of the assistant that a call belongs to."""
        if not self._gathered or self._gathered[-1]["role"] != "assistant":
            self._gathered.append({"role": "assistant", "content": []})
        return self._gathered[-1]


def _takes_text(message: Message) -> bool:
    """Return whether text of the assistant that follows belongs to this message: it has calls, or reasoning without text."""
    if message["role"] != "assistant":
        return False
    return "tool_calls" in message or ("reasoning_content" in message and not message["content"])


def _check_common(where: str, members: dict[str, Any]) -> None:
    if "id" in members:
        checked_text(f"{where}.id", members["id"])
    if members.get("status", "completed") not in _STATUS["enum"]:
        allowed = ", ".join(_STATUS["enum"])
        raise bad_parameter(f"{where}.status", f"must be one of {allowed}, not {show(members['status'])}")


def _text(where: str, value: object, parts: Mapping[str, Members]) -> str:
    """Return a text that is given as such or in parts of these kinds."""
    if isinstance(value, str) and not parts.keys() & _REASONING_PARTS.keys():
        return value
    if not isinstance(value, list):
        wanted = "a list" if parts.keys() & _REASONING_PARTS.keys() else "a string or a list"
        raise bad_parameter(where, f"must be {wanted} of text parts, not {kind_of(value)}")
    return "".join(_part_text(f"{where}[{number}]", part, parts) for number, part in enumerate(value))


def _part_text(where: str, part: object, parts: Mapping[str, Members]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or kind not in parts:
        reason = f"must be {' or '.join(parts)}, not {show(kind)}: no images, audio or files are supported"
        raise bad_parameter(f"{where}.type", reason)
    return checked_text(f"{where}.text", parts[kind].check(where, part)["text"])
