"""Anthropic's messages, written as those of a chat."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import orjson

from srt.entrypoints.openai.messages import MAX_CALLS, MAX_MESSAGES
from srt.entrypoints.request_schema import bad_parameter
from srt.sampling.foreign_fields import EMPTY, Values, is_one_of
from srt.sampling.parameter_checks import kind_of, show

ROLES = ("user", "assistant", "system")
JOIN = "\n"  # between the texts of blocks that follow each other
_ANY: Mapping[str, str] = MappingProxyType({"description": "Accepted and ignored."})
_EMPTY: Mapping[str, Any] = MappingProxyType({"enum": [None, "", []], "description": "Must be empty, as in answers."})
_CALLER: Mapping[str, Any] = MappingProxyType(
    {
        "anyOf": [
            {"type": "null"},
            {
                "type": "object",
                "properties": {"type": {"const": "direct", "description": "The model itself."}},
                "required": ["type"],
                "additionalProperties": False,
            },
        ],
        "description": "Who made the call: the model itself.",
    }
)


def _block(kind: str, required: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"type": {"const": kind, "description": "The kind of block."}, **required, **others},
        "required": ["type", *required],
        "additionalProperties": False,
    }


TEXT_BLOCK_SCHEMA = _block(
    "text",
    {"text": {"type": "string", "description": "The text."}},
    cache_control=dict(_ANY),
    citations=dict(_EMPTY),
)
_RESULT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_BLOCK_SCHEMA}, {"type": "null"}],
    "description": "What the tool answered: a text, or a list of text blocks.",
}
_BLOCKS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "text": TEXT_BLOCK_SCHEMA,
        "tool_use": _block(
            "tool_use",
            {
                "id": {
                    "type": "string",
                    "minLength": 1,
                    "description": "The name by which a tool_result refers to the call.",
                },
                "name": {"type": "string", "description": "The tool's name."},
                "input": {"type": "object", "description": "Its arguments."},
            },
            cache_control=dict(_ANY),
            caller=dict(_CALLER),
            toolset_name=dict(_EMPTY),
        ),
        "tool_result": _block(
            "tool_result",
            {"tool_use_id": {"type": "string", "description": "The call that it answers, from a message before."}},
            content=_RESULT_SCHEMA,
            is_error={
                "type": ["boolean", "null"],
                "description": "The tool failed: the model reads `Error: ` in front of the content.",
            },
            cache_control=dict(_ANY),
            toolset_name=dict(_EMPTY),
        ),
        "thinking": _block(
            "thinking",
            {
                "thinking": {
                    "type": "string",
                    "description": "The reasoning; the chat template decides what it shows of it.",
                }
            },
            signature=dict(_ANY),
        ),
        "redacted_thinking": _block("redacted_thinking", {}, data=dict(_ANY)),
    }
)
_OF_ROLE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "user": ("text", "tool_result"),
        "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
        "system": ("text",),
    }
)


def _message_of(role: str) -> dict[str, Any]:
    """Return what is true of messages of a role alone: which blocks they have."""
    blocks = [_BLOCKS[kind] for kind in _OF_ROLE[role]]
    content = {
        "anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"anyOf": blocks}}],
        "description": f"A text, or a list of blocks: {', '.join(_OF_ROLE[role])}.",
    }
    properties = {"role": {"const": role, "description": "The role of the author."}, "content": content}
    return {"type": "object", "properties": properties}


# Fields of blocks that ask for something which is not there: the values that do not, and the refusal of others.
_OFF: Mapping[str, tuple[Values, str]] = MappingProxyType(
    {
        "citations": (EMPTY, "is not supported yet"),
        "toolset_name": (EMPTY, "is not supported yet"),
        "caller": ((*EMPTY, {"type": "direct"}), "is not supported: only the model itself (direct) calls tools here"),
    }
)
MESSAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "role": {"enum": list(ROLES), "description": "The role of the author."},
        "content": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}],
            "description": "A text, or a list of blocks: text, tool_use, tool_result, thinking, redacted_thinking.",
        },
    },
    "required": ["role", "content"],
    "additionalProperties": False,
    "anyOf": [_message_of(role) for role in ROLES],
}

Message = dict[str, Any]


def chat_messages(system: object, messages: list[dict[str, Any]]) -> list[Message]:
    """Return the conversation as a chat's messages; raise RequestError (400) with the place of an error.

    Messages of one role that follow each other are one, as Anthropic has it. Results of tools are messages of their own.
    """
    if not 1 <= len(messages) <= MAX_MESSAGES:
        reason = f"may have at most {MAX_MESSAGES} entries, not {len(messages)}" if messages else "must not be empty"
        raise bad_parameter("messages", reason)
    conversation = _Conversation()
    told = "" if system is None or system == "" else _text("system", system)
    if told:
        conversation.turn("system").texts.append(told)
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise bad_parameter(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {show(role)}")
        _check_fields(where, message, ("role", "content"))
        conversation.add_message(f"{where}.content", role, message.get("content"))
    return conversation.messages


def refuse_open_call(messages: list[Message]) -> None:
    """Raise RequestError (400) if the last message has a call, which only a result can follow."""
    if messages and messages[-1].get("tool_calls"):
        raise bad_parameter("messages", "ends with a tool_use: a tool_result must follow it")


class _Turn:
    """A message as it is gathered. Its texts are joined only once: a body may have hundreds of thousands of them."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[dict[str, Any]] = []

    def message(self) -> Message:
        message: Message = {"role": self.role, "content": _joined(self.texts)}
        if thoughts := _joined(self.thoughts):
            message["reasoning_content"] = thoughts
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class _Conversation:
    """A chat's messages as they are gathered."""

    def __init__(self) -> None:
        self._parts: list[_Turn | Message] = []  # results of tools are messages already
        self._names: dict[str, str] = {}  # of the tools that were called, by the calls' ids

    @property
    def messages(self) -> list[Message]:
        return [part.message() if isinstance(part, _Turn) else part for part in self._parts]

    def turn(self, role: str) -> _Turn:
        """Return the last message if it has this role, or a new one."""
        last = self._parts[-1] if self._parts else None
        if isinstance(last, _Turn) and last.role == role:
            return last
        new = _Turn(role)
        self._parts.append(new)
        return new

    def add_message(self, where: str, role: str, content: object) -> None:
        known = _OF_ROLE[role]
        for at, block in _blocks(where, content):
            match _checked_kind(at, block, known):
                case "text":
                    self.turn(role).texts.append(_string(at, block, "text"))
                case "thinking":
                    self.turn(role).thoughts.append(_string(at, block, "thinking"))
                case "redacted_thinking":  # only its author can read it
                    self.turn(role)
                case "tool_use":
                    if len(self._names) >= MAX_CALLS:
                        raise bad_parameter("messages", f"may have at most {MAX_CALLS} blocks of type tool_use")
                    self.turn(role).calls.append(self._call(at, block))
                case "tool_result":
                    if len(self._parts) >= MAX_MESSAGES:
                        raise bad_parameter(
                            "messages", f"may have at most {MAX_MESSAGES} turns and blocks of type tool_result"
                        )
                    self._parts.append(self._result(at, block))

    def _call(self, where: str, block: dict[str, Any]) -> dict[str, Any]:
        call_id, name = _string(where, block, "id"), _string(where, block, "name")
        given = block.get("input")
        if not call_id or call_id in self._names:
            reason = "is that of an earlier tool_use" if call_id else "must not be empty"
            raise bad_parameter(f"{where}.id", reason)
        if not isinstance(given, dict):
            raise bad_parameter(f"{where}.input", f"must be an object, not {kind_of(given)}")
        self._names[call_id] = name
        try:
            arguments = orjson.dumps(given).decode()
        except TypeError as error:
            raise bad_parameter(f"{where}.input", "is nested too deeply") from error
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _result(self, where: str, block: dict[str, Any]) -> Message:
        call_id, is_error = _string(where, block, "tool_use_id"), block.get("is_error")
        if call_id not in self._names:
            raise bad_parameter(f"{where}.tool_use_id", f"is {show(call_id)}, which no tool_use before it has")
        if is_error is not None and type(is_error) is not bool:
            raise bad_parameter(f"{where}.is_error", f"must be true or false, not {kind_of(is_error)}")
        content = block.get("content")
        text = "" if content is None or content == [] else _text(f"{where}.content", content)
        if is_error and not text.startswith("Error"):
            text = f"Error: {text}" if text else "Error"
        return {"role": "tool", "tool_call_id": call_id, "name": self._names[call_id], "content": text}


def _text(where: str, content: object) -> str:
    """Return a text that is given as such or as text blocks."""
    texts = []
    for at, block in _blocks(where, content):
        _checked_kind(at, block, ("text",))
        texts.append(_string(at, block, "text"))
    return _joined(texts)


def _joined(texts: list[str]) -> str:
    return JOIN.join([text for text in texts if text])


def _blocks(where: str, content: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the blocks of a content with their places."""
    if isinstance(content, str):
        yield where, {"type": "text", "text": content}
        return
    if content is None:
        raise bad_parameter(where, "is required")
    if not isinstance(content, list):
        raise bad_parameter(where, f"must be a string or a list of blocks, not {kind_of(content)}")
    if not content:
        raise bad_parameter(where, "must not be an empty list")
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            raise bad_parameter(f"{where}[{i}]", f"must be an object with a type, not {kind_of(block)}")
        yield f"{where}[{i}]", block


def _checked_kind(where: str, block: dict[str, Any], known: tuple[str, ...]) -> str:
    """Return the block's type; raise RequestError (400) if it is none of `known`, or if one of the block's fields is not known."""
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in known:
        what = f"of type {kind[:50]!r}" if isinstance(kind, str) else "without a type"
        raise bad_parameter(
            where, f"is a block {what}: supported in its place are only those of type {', '.join(known)}"
        )
    _check_fields(where, block, _BLOCKS[kind]["properties"])
    for name, (passing, reason) in _OFF.items():
        if name in block and not is_one_of(block[name], passing):
            raise bad_parameter(f"{where}.{name}", reason)
    return kind


def _check_fields(where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise bad_parameter(f"{where}.{name[:100]}", "is not a known field")


def _string(where: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad_parameter(
            f"{where}.{name}" if where.endswith("]") else where, f"must be a string, not {kind_of(value)}"
        )
    return value
