"""What a request demands of calls: the field `tool_choice`, and the form of calls that it asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from srt.constrained.constraint import check_nesting
from srt.constrained.json_schema import SchemaRefusal, convert
from srt.entrypoints.openai.tools import callable_tools
from srt.entrypoints.request_schema import bad_parameter
from srt.parsers.call_format import CallFormat
from srt.parsers.forms import CallableTool, FormRefusal, Node
from srt.parsers.output_parser import TOOL_CALL_PARSERS
from srt.parsers.tools import Tools
from srt.sampling.parameter_checks import ParameterError, kind_of, show

MAX_PARAMETERS_BYTES = 262_144
_NAME = re.compile(r"[\w.:/-]+")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls an answer must have."""

    kind: str  # none, auto, required or named
    name: str = ""  # of the tool, if the kind is named

    @property
    def demands_calls(self) -> bool:
        return self.kind in ("required", "named")


def read_tool_choice(given: str | dict[str, Any] | None, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Return the choice among checked tools; raise RequestError (400)."""
    if given is None:
        return ToolChoice("auto")
    if isinstance(given, str):
        if given not in ("none", "auto", "required"):
            raise bad_parameter("tool_choice", f"must be none, auto, required or an object, not {show(given)}")
        choice = ToolChoice(given)
    else:
        choice = ToolChoice("named", _name_of(given))
    if choice.demands_calls and not tools:
        raise bad_parameter(
            "tool_choice", f"({choice.name or choice.kind}) demands a call, but the request has no tools"
        )
    if choice.kind == "named" and choice.name not in [tool["function"]["name"] for tool in tools]:
        raise bad_parameter("tool_choice", f"names the tool {show(choice.name)}, which the request does not have")
    return choice


def _name_of(given: Mapping[str, Any]) -> str:
    if given.get("type") != "function":
        raise bad_parameter("tool_choice.type", f"must be function, not {show(given.get('type'))}")
    unknown = next((member for member in given if member not in ("type", "function")), None)
    if unknown is not None:
        raise bad_parameter(f"tool_choice.{unknown}", "is not a known field")
    function = given.get("function")
    if not isinstance(function, dict):
        raise bad_parameter("tool_choice.function", f"must be an object, not {kind_of(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise bad_parameter("tool_choice.function.name", "must be a string with the name of a tool")
    return name


def demanded_calls(parser: str, tools: Sequence[Mapping[str, Any]], choice: ToolChoice, several: bool) -> Node:
    """Return the form of an answer with the calls that `choice` demands; raise RequestError (400) if it cannot be enforced.

    A named tool is called once. several: an answer may have more than one call otherwise.
    """
    form = TOOL_CALL_PARSERS[parser]
    described = callable_tools(tools)
    _check_size(tools)
    callables = [
        _callable(form, index, tool["function"], described, is_strict=True)
        for index, tool in enumerate(tools)
        if choice.kind != "named" or tool["function"]["name"] == choice.name
    ]
    return form.calls_form(callables, several and choice.kind != "named")


def strict_calls(
    parser: str, tools: Sequence[Mapping[str, Any]], strict: Collection[str], level: str, several: bool
) -> Node | None:
    """Return the form of an answer that is free text until a call begins; None if calls are free, too.

    strict: names of the tools that ask for valid arguments. level: what the server enforces unasked, TOOL_STRICT_LEVELS.
    RequestError (400) if it cannot be enforced.
    """
    if level == "auto" and not strict:
        return None
    return TOOL_CALL_PARSERS[parser].free_form(called_tools(parser, tools, strict, level), several)


def called_tools(
    parser: str, tools: Sequence[Mapping[str, Any]], strict: Collection[str], level: str
) -> list[CallableTool]:
    """Return the tools, with the arguments of those that are to be valid; raise RequestError (400) as `strict_calls` does."""
    form = TOOL_CALL_PARSERS[parser]
    described = callable_tools(tools)
    functions = [tool["function"] for tool in tools]
    _check_size(tools)
    return [
        _callable(form, index, function, described, level == "parameter" or function["name"] in strict)
        for index, function in enumerate(functions)
    ]


def _check_size(tools: Sequence[Mapping[str, Any]]) -> None:
    """Refuse schemas that would take long to read: this happens between the steps of streams."""
    parameters = [tool["function"].get("parameters") for tool in tools]
    try:
        check_nesting("tools", parameters)
    except ParameterError as error:
        raise bad_parameter(error.name, error.reason) from error
    size = len(json.dumps(parameters))
    if size > MAX_PARAMETERS_BYTES:
        reason = f"may have at most {MAX_PARAMETERS_BYTES} bytes of parameters where calls are constrained, not {size}"
        raise bad_parameter("tools", reason)


def _callable(
    form: type[CallFormat], index: int, function: Mapping[str, Any], described: Tools, is_strict: bool
) -> CallableTool:
    """Return a tool whose calls have this form, with valid arguments if `is_strict`."""
    name = function["name"]
    if not _NAME.fullmatch(name):
        allowed = "letters, digits, `_`, `-`, `.`, `:` and `/`"
        reason = f"may have only {allowed} where calls are constrained, not {show(name)}"
        raise bad_parameter(f"tools[{index}].function.name", reason)
    if not is_strict:
        return CallableTool(name, None, described)
    tool = CallableTool(name, _parameters(index, function), described)
    try:
        form.call_form(tool)
    except FormRefusal as refusal:
        raise bad_parameter(f"tools[{index}].function.parameters{refusal.place}", str(refusal)) from refusal
    return tool


def _parameters(index: int, function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments' schema as the grammar library takes it."""
    where = f"tools[{index}].function.parameters"
    given = function.get("parameters")
    try:
        return {"type": "object"} if given is None else convert(given).schema
    except SchemaRefusal as refusal:
        raise bad_parameter(where, str(refusal)) from refusal
