"""/parse_function_call and /separate_reasoning: the server's parsers, for outputs that a client has as text."""

from __future__ import annotations

from typing import Any, ClassVar

from srt.entrypoints.answers import ParsedCall, ParsedCalls, SeparatedReasoning
from srt.entrypoints.exchange import Exchange
from srt.entrypoints.openai.tools import TOOL_SCHEMA, callable_tools, checked_tools
from srt.entrypoints.request_schema import RequestBody, bad_parameter, described
from srt.entrypoints.service import Service
from srt.parsers.events import CallArguments, CallBegin, Event, Reasoning, Text
from srt.parsers.output_parser import OPENED_BY_PROMPT, REASONING_PARSERS, TOOL_CALL_PARSERS, OutputParser
from srt.parsers.tools import Tools


class ParseCallsBody(RequestBody):
    """POST /parse_function_call."""

    FAMILY: ClassVar[str] = "parse_calls"

    text: str = described("The output of a model.", ...)
    tools: list[dict[str, Any]] = described("The tools that it may call.", [], items=TOOL_SCHEMA)
    tool_call_parser: str | None = described(
        "The form of the calls (default: the server's).", string={"enum": sorted(TOOL_CALL_PARSERS)}
    )


class SeparateReasoningBody(RequestBody):
    """POST /separate_reasoning."""

    FAMILY: ClassVar[str] = "separate_reasoning"

    text: str = described("The output of a model.", ...)
    reasoning_parser: str | None = described(
        "The form of the reasoning (default: the server's).", string={"enum": sorted(REASONING_PARSERS)}
    )


async def parse_function_call(exchange: Exchange, service: Service) -> None:
    """Find the calls of tools in a text."""
    body = ParseCallsBody.parse(await exchange.read_json())
    tools = checked_tools(body.tools)
    positions = {tool["function"]["name"]: position for position, tool in enumerate(tools)}
    name = _chosen("tool_call_parser", body.tool_call_parser, service.engine().model.tool_call_parser)
    if name not in TOOL_CALL_PARSERS:
        raise bad_parameter("tool_call_parser", f"must be one of {', '.join(sorted(TOOL_CALL_PARSERS))}")
    parts = OutputParser(name, None, callable_tools(tools), is_open=False).parse(body.text)
    calls: list[ParsedCall] = []
    for part in parts:
        if isinstance(part, CallBegin):
            calls.append({"name": part.name, "parameters": "", "tool_index": positions[part.name]})
        elif isinstance(part, CallArguments):
            calls[-1]["parameters"] += part.json
    answer: ParsedCalls = {"normal_text": _text(parts, Text), "calls": calls}
    await exchange.send_json(answer)


async def separate_reasoning(exchange: Exchange, service: Service) -> None:
    """Tell the reasoning of a text from what follows it."""
    body = SeparateReasoningBody.parse(await exchange.read_json())
    name = _chosen("reasoning_parser", body.reasoning_parser, service.engine().model.reasoning_parser)
    if name not in REASONING_PARSERS:
        raise bad_parameter("reasoning_parser", f"must be one of {', '.join(sorted(REASONING_PARSERS))}")
    parts = OutputParser(None, name, Tools({}), is_open=name in OPENED_BY_PROMPT).parse(body.text)
    answer: SeparatedReasoning = {"reasoning_text": _text(parts, Reasoning), "text": _text(parts, Text)}
    await exchange.send_json(answer)


def _chosen(field: str, given: str | None, default: str | None) -> str:
    if given is None and default is None:
        raise bad_parameter(field, "is required, because this server's model has no known form")
    return given or default or ""


def _text(parts: list[Event], kind: type[Text] | type[Reasoning]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))
