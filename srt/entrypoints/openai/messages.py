"""Checks of a chat's messages, and their conversion to the plain form that a chat template reads."""

from __future__ import annotations

from typing import Any

from srt.entrypoints.request_schema import bad_parameter
from srt.sampling.foreign_fields import ignored, is_one_of, refusal, schema_of, unsupported
from srt.sampling.parameter_checks import kind_of, show

# A role in the API -> its name in chat templates.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
UNSUPPORTED_ROLES = frozenset(("tool", "function"))
# The known fields of messages and parts. Below: fields of other servers, and fields of answers that clients send back unchanged.
MESSAGE_FIELDS, PART_FIELDS = ("role", "content", "name"), ("type", "text")
_UNSUPPORTED = unsupported("message", MESSAGE_FIELDS)
_IGNORED_IN_PARTS = ignored("text_part", PART_FIELDS)
MAX_MESSAGES = 10_000
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
MESSAGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "role": {"enum": list(ROLES), "description": "The role of the author; developer means the same as system."},
        "content": {
            "anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _PART_SCHEMA}],
            "description": "The text of the message.",
        },
        "name": {"type": ["string", "null"], "description": "The author's name, for templates that show it."},
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
    return [_plain(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _plain(where: str, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if isinstance(role, str) and role in UNSUPPORTED_ROLES:
        raise bad_parameter(f"{where}.role", f"{role!r} is not supported yet: this server has no tools")
    if not isinstance(role, str) or role not in ROLES:
        raise bad_parameter(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {show(role)}")
    for name, value in message.items():
        if name in _UNSUPPORTED:
            if not is_one_of(value, _UNSUPPORTED[name]):
                raise bad_parameter(f"{where}.{name}", refusal("message", name))
        elif name not in MESSAGE_FIELDS:
            raise bad_parameter(f"{where}.{name[:100]}", "is not a known field")
    plain = {"role": ROLES[role], "content": _text(f"{where}.content", message.get("content"))}
    author = message.get("name")
    if author is not None:
        if not isinstance(author, str):
            raise bad_parameter(f"{where}.name", f"must be a string, not {kind_of(author)}")
        plain["name"] = author
    return plain


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
