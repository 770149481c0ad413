"""Refusals of what agents ask for and this server lacks. They name what the user set, for libraries send fields that users do not know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from srt.entrypoints.request_schema import bad_parameter

MAX_SHOWN = 200

_TOOLS = "is not supported yet: this server calls no functions here. Use tools in /v1/chat/completions"


def refuse_agent_fields(body: object, has_tools: bool = False) -> None:
    """Raise RequestError (400) for functions, and for tools and calls that are demanded where `has_tools` is false.

    Values that ask for nothing pass; malformed ones are left to the body's own checks.
    """
    if not isinstance(body, dict):
        return
    for field, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        if has_tools and field == "tools":
            continue
        given, chosen = body.get(field), body.get(choice)
        if given and isinstance(given, list):
            raise bad_parameter(field, _shown(map(_tool_name, given)) + _TOOLS)
        if chosen and chosen not in ("none", "auto") and isinstance(chosen, (str, dict)):
            raise bad_parameter(choice, _shown([_tool_name(chosen)]) + _TOOLS)


def _tool_name(tool: Any) -> str:
    """Return the name in a tool, a function or a choice of one; empty if there is none."""
    if isinstance(tool, str):
        return tool
    return _name(_part(tool, "function")) or _name(tool)


def _name(value: Any) -> str:
    name = _part(value, "name")
    return name if isinstance(name, str) else ""


def _part(value: Any, field: str) -> Any:
    return value.get(field) if isinstance(value, dict) else None


def _shown(names: Iterable[str]) -> str:
    """Return the non-empty names in parentheses, followed by a space; empty if there are none."""
    listed = ", ".join(name for name in names if name)
    return f"({listed[:MAX_SHOWN]}) " if listed else ""
