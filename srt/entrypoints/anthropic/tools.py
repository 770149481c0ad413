"""Anthropic's tools, written as those of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from srt.entrypoints.openai.tools import MAX_NAME
from srt.entrypoints.request_schema import bad_parameter
from srt.sampling.foreign_fields import EMPTY, Values, is_one_of, schema_of
from srt.sampling.parameter_checks import kind_of, show

# The values that ask for nothing, of fields that are refused otherwise.
_OFF: Mapping[str, Values] = MappingProxyType(
    {
        "allowed_callers": (*EMPTY, ["direct"]),
        "defer_loading": (*EMPTY, False),
        "eager_input_streaming": (*EMPTY, True),  # arguments are streamed as they come
        "input_examples": EMPTY,
    }
)
_CHOICES: Mapping[str, str] = MappingProxyType({"auto": "auto", "any": "required", "none": "none"})
TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"enum": ["custom", None], "description": "The kind of tool: this server runs none itself."},
        "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME, "description": "The tool's name."},
        "description": {"type": ["string", "null"], "description": "What it does."},
        "input_schema": {"type": "object", "description": "The JSON Schema of its arguments."},
        "strict": {"type": ["boolean", "null"], "description": "If true, the arguments of its calls are valid."},
        "cache_control": {"description": "Accepted and ignored."},
        **{
            name: {**schema_of(values), "description": "Not supported yet: only values without effect are accepted."}
            for name, values in _OFF.items()
        },
    },
    "required": ["name", "input_schema"],
    "additionalProperties": False,
}
_CHOICE_FIELDS: dict[str, Any] = {
    "type": {
        "enum": ["auto", "any", "tool", "none"],
        "description": "auto: the model decides on calls; any: the answer is at least one call; tool: it is one call of the tool in"
        " `name`; none: the model is told of no tools.",
    },
    "name": {"type": "string", "description": "The tool to call, with the type tool."},
    "disable_parallel_tool_use": {
        "type": ["boolean", "null"],
        "description": "If true, an answer has one call at most.",
    },
}
TOOL_CHOICE_SCHEMA: dict[str, Any] = {
    "properties": _CHOICE_FIELDS,
    "required": ["type"],
    "additionalProperties": False,
}


def chat_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools as those of a chat; raise RequestError (400) for tools that a server would run, and for unknown fields."""
    return [_chat_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)]


def _chat_tool(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        reason = f"is {show(kind)}, but this server runs no tools: describe one of the type custom, and run it yourself"
        raise bad_parameter(f"{where}.type", reason)
    for name, value in tool.items():
        if name in _OFF:
            if not is_one_of(value, _OFF[name]):
                raise bad_parameter(f"{where}.{name}", "is not supported yet")
        elif name not in TOOL_SCHEMA["properties"]:
            raise bad_parameter(f"{where}.{name[:100]}", "is not a known field")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise bad_parameter(f"{where}.input_schema", f"must be an object, not {kind_of(schema)}")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": schema}}


def chat_tool_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat that ask for the same; raise RequestError (400) for a wrong choice."""
    kind = choice.get("type")
    known = ("type", "disable_parallel_tool_use", *(("name",) if kind == "tool" else ()))
    for member in choice:
        if member not in known:
            raise bad_parameter(f"tool_choice.{member[:100]}", "is not a known field")
    is_single = choice.get("disable_parallel_tool_use")
    if is_single is not None and type(is_single) is not bool:
        reason = f"must be true or false, not {kind_of(is_single)}"
        raise bad_parameter("tool_choice.disable_parallel_tool_use", reason)
    return {"tool_choice": _chosen(kind, choice.get("name")), "parallel_tool_calls": not is_single}


def _chosen(kind: object, name: object) -> Any:
    if isinstance(kind, str) and kind in _CHOICES:
        return _CHOICES[kind]
    if kind != "tool":
        raise bad_parameter("tool_choice.type", f"must be one of auto, any, tool, none, not {show(kind)}")
    if not isinstance(name, str):
        raise bad_parameter("tool_choice.name", f"must be a string, not {kind_of(name)}")
    return {"type": "function", "function": {"name": name}}
