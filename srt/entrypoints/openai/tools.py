"""Checks of the tools that a client describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from srt.entrypoints.request_schema import bad_parameter
from srt.parsers.tools import Tools
from srt.sampling.parameter_checks import kind_of, show

MAX_TOOLS, MAX_NAME = 1024, 256
_FUNCTION: Mapping[str, Any] = MappingProxyType(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": MAX_NAME, "description": "The tool's name."},
            "description": {"type": ["string", "null"], "description": "What it does."},
            "parameters": {"type": ["object", "null"], "description": "The JSON Schema of its arguments."},
            "strict": {"type": ["boolean", "null"], "description": "If true, the arguments of its calls are valid."},
        },
        "required": ["name"],
        "description": "The function, passed on to the chat template.",
    }
)
TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"const": "function", "description": "The kind of tool."},
        "function": dict(_FUNCTION),
    },
    "required": ["type", "function"],
}


def checked_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools for the chat template: as they came, without null members. RequestError (400) names what is wrong."""
    if len(tools) > MAX_TOOLS:
        raise bad_parameter("tools", f"may have at most {MAX_TOOLS} entries, not {len(tools)}")
    checked = [_checked(f"tools[{position}]", tool) for position, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in checked]
    for position, name in enumerate(names):
        if name in names[:position]:
            raise bad_parameter(f"tools[{position}].function.name", f"is {show(name)}, as that of an earlier tool")
    return checked


def strict_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return the names of the tools, as they came, that ask for valid arguments."""
    return frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict"))


def callable_tools(checked: Sequence[Mapping[str, Any]]) -> Tools:
    """Return the names and arguments of checked tools, for parsers."""
    return Tools({tool["function"]["name"]: tool["function"].get("parameters") for tool in checked})


def _checked(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad_parameter(f"{where}.type", f"must be function, not {show(tool.get('type'))}")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise bad_parameter(f"{where}.function", f"must be an object, not {kind_of(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME:
        raise bad_parameter(f"{where}.function.name", f"must be a string of 1 to {MAX_NAME} characters")
    for member, kind, word in (("description", str, "a string"), ("parameters", dict, "an object")):
        value = function.get(member)
        if value is not None and not isinstance(value, kind):
            raise bad_parameter(f"{where}.function.{member}", f"must be {word}, not {kind_of(value)}")
    strict = function.get("strict")
    if strict is not None and type(strict) is not bool:
        raise bad_parameter(f"{where}.function.strict", f"must be true or false, not {kind_of(strict)}")
    written = {key: value for key, value in function.items() if value is not None and key != "strict"}
    return {**tool, "function": written}
