"""Checks of a chat's messages, and their conversion to the plain form that a chat template reads."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import orjson

from srt.entrypoints.request_schema import bad_parameter
from srt.sampling.foreign_fields import EMPTY, ignored, is_one_of, refusal, schema_of, unsupported
from srt.sampling.parameter_checks import kind_of, show

# A role in the API -> its name in chat templates.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# The known fields of messages and parts. Below: fields of other servers, and fields of answers that clients send back unchanged.
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
PART_FIELDS = ("type", "text")
# Fields that only one role has.
_OF_ROLE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("tool_calls", "reasoning_content", "reasoning"), "assistant"),
        "tool_call_id": "tool",
    }
)
_UNSUPPORTED = unsupported("message", MESSAGE_FIELDS)
_IGNORED_IN_PARTS = ignored("text_part", PART_FIELDS)
_NOTHING = (*EMPTY, False)
MAX_MESSAGES = 10_000
MAX_CALLS = 10_000  # of tools, in all messages: they are read where all requests are, and many would hold these up
_PART_SCHEMA = {
    "type": "object",
    "description": "Only text parts are supported: no images, audio or files.",
    "properties": {
        "type": {"const": "text", "description": "The kind of part."},
        "text": {"type": "string", "description": "Its text."},
        **{name: {"description": "Accepted and ignored."} for name in sorted(_IGNORED_IN_PARTS)},
    },
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CALL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "The name by which a tool's message refers to the call."},
        "type": {"const": "function", "description": "The kind of call."},
        "index": {"type": "integer", "description": "Its place, as in a stream; ignored."},
        "function": {
            "type": "object",
            "description": "What was called.",
            "properties": {
                "name": {"type": "string", "description": "The tool's name."},
                "arguments": {"type": "string", "description": "Its arguments, as JSON."},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
MESSAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "role": {"enum": list(ROLES), "description": "The role of the author; developer means the same as system."},
        "content": {
            "anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _PART_SCHEMA}],
            "description": "The text of the message. It may be null beside tool_calls.",
        },
        "name": {"type": ["string", "null"], "description": "The author's name, for templates that show it."},
        "tool_calls": {
            "anyOf": [{"type": "array", "items": _CALL_SCHEMA}, {"type": "null"}],
            "description": "Calls of tools that an assistant's message made.",
        },
        "tool_call_id": {"type": ["string", "null"], "description": "The call that a tool's message answers."},
        "reasoning_content": {"type": ["string", "null"], "description": "The reasoning of an assistant's message."},
        "reasoning": {"type": ["string", "null"], "description": "Another name of reasoning_content."},
        **{
            name: {
                **schema_of(off_values),
                "description": "Not supported yet: only the empty values of answers are accepted.",
            }
            for name, off_values in _UNSUPPORTED.items()
        },
    },
    "required": ["role", "content"],
    "additionalProperties": False,
}


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with role, content as one string, and name if given; raise RequestError (400) with the place of an error."""
    if not messages:
        raise bad_parameter("messages", "must not be empty")
    if len(messages) > MAX_MESSAGES:
        raise bad_parameter("messages", f"may have at most {MAX_MESSAGES} entries, not {len(messages)}")
    given = [message.get("tool_calls") for message in messages]
    num_calls = sum(len(calls) for calls in given if isinstance(calls, list))
    if num_calls > MAX_CALLS:
        raise bad_parameter("messages", f"may have at most {MAX_CALLS} calls of tools, not {num_calls}")
    return [_plain(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _plain(where: str, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise bad_parameter(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {show(role)}")
    for name, value in message.items():
        if name in _UNSUPPORTED:
            if not is_one_of(value, _UNSUPPORTED[name]):
                raise bad_parameter(f"{where}.{name}", refusal("message", name))
        elif name not in MESSAGE_FIELDS:
            raise bad_parameter(f"{where}.{name[:100]}", "is not a known field")
        elif value and _OF_ROLE.get(name, role) != role:
            raise bad_parameter(f"{where}.{name}", f"belongs to messages of the role {_OF_ROLE[name]}, not {role}")
    calls = _calls(f"{where}.tool_calls", message.get("tool_calls"))
    content = message.get("content")
    plain: dict[str, Any] = {
        "role": ROLES[role],
        "content": "" if calls and content is None else _text(f"{where}.content", content),
    }
    plain |= {"tool_calls": calls} if calls else {}
    plain |= _words(where, message)
    author = message.get("name")
    if author is not None:
        if not isinstance(author, str):
            raise bad_parameter(f"{where}.name", f"must be a string, not {kind_of(author)}")
        plain["name"] = author
    return plain


def _words(where: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a message that are single strings."""
    words = {}
    for name in ("tool_call_id", "reasoning", "reasoning_content"):
        value = message.get(name)
        if is_one_of(value, _NOTHING):
            continue
        if not isinstance(value, str):
            raise bad_parameter(f"{where}.{name}", f"must be a string, not {kind_of(value)}")
        words["reasoning_content" if name == "reasoning" else name] = value
    return words


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Return a message's calls of tools, with their arguments as objects where they are such."""
    if is_one_of(calls, _NOTHING):
        return []
    if not isinstance(calls, list):
        raise bad_parameter(where, f"must be a list, not {kind_of(calls)}")
    return [_call(f"{where}[{i}]", call) for i, call in enumerate(calls)]


def _call(where: str, call: Any) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise bad_parameter(where, f"must be an object, not {kind_of(call)}")
    if call.get("type", "function") != "function":
        raise bad_parameter(f"{where}.type", f"must be function, not {show(call['type'])}")
    function = call.get("function")
    if not isinstance(function, dict):
        raise bad_parameter(f"{where}.function", f"must be an object, not {kind_of(function)}")
    for name, holder in (("id", call), ("function.name", function), ("function.arguments", function)):
        value = holder.get(name.rpartition(".")[2], None if holder is function else "")
        if not isinstance(value, str):
            raise bad_parameter(f"{where}.{name}", f"must be a string, not {kind_of(value)}")
    for known, holder in ((("id", "type", "index", "function"), call), (("name", "arguments"), function)):
        for name, value in holder.items():
            if name not in known and value is not None:
                raise bad_parameter(f"{where}.{name[:100]}", "is not a known field")
    plain = {"name": function["name"], "arguments": _arguments(function["arguments"])}
    return {"id": call.get("id", ""), "type": "function", "function": plain}


def _arguments(written: str) -> Any:
    """Return the object that these arguments are; the text itself if they are none, as of an answer that was cut off."""
    try:
        value = orjson.loads(written or "{}")
    except orjson.JSONDecodeError:
        return written
    return value if isinstance(value, dict) else written


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise bad_parameter(where, "is required")
    if not isinstance(content, list):
        raise bad_parameter(where, f"must be a string or a list of text parts, not {kind_of(content)}")
    if not content:
        raise bad_parameter(where, "must not be an empty list")
    return "".join(_part(f"{where}[{i}]", part) for i, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise bad_parameter(where, f"must be an object with a type, not {kind_of(part)}")
    kind = part.get("type")
    if kind != "text":
        what = f"of type {kind[:50]!r}" if isinstance(kind, str) else "without a type"
        raise bad_parameter(where, f"is a part {what}: only text parts are supported, no images, audio or files")
    for name in part:
        if name not in (*PART_FIELDS, *_IGNORED_IN_PARTS):
            raise bad_parameter(f"{where}.{name[:100]}", "is not a known field")
    if not isinstance(part.get("text"), str):
        raise bad_parameter(f"{where}.text", f"must be a string, not {kind_of(part.get('text'))}")
    text: str = part["text"]
    return text
