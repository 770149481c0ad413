"""The form that an answer is held to: what the client says, the calls that it demands or may get, and the reasoning before them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from srt.constrained.constraint import Constraint, tag_constraint
from srt.constrained.structural_tag import TagRefusal, format_of
from srt.entrypoints.openai.schema import ChatBody
from srt.entrypoints.openai.tool_choice import ToolChoice, called_tools, demanded_calls, strict_calls
from srt.entrypoints.openai.tools import strict_names
from srt.entrypoints.request_schema import bad_parameter
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager
from srt.parsers.forms import ANY_TEXT, Node, either, regex, sequence, tag
from srt.parsers.output_parser import HARMONY, REASONING_PARSERS, TOOL_CALL_PARSERS, is_left_open
from srt.parsers.tool_calls.harmony import in_final_message
from srt.sampling.parameter_checks import ParameterError

_LINE_BREAKS = regex(r"\n{0,2}")  # models write them behind their reasoning


@dataclass(frozen=True, slots=True)
class AskedForm:
    """The form that a request demands of an answer. Reasoning before the answer is free."""

    constraint: Constraint | None  # by the client
    calls: Node | None  # the form of calls, or of an answer with calls
    source: str  # the field that refusals name


def answer_constraint(
    body: ChatBody,
    engine: TokenizerManager,
    tools: list[dict[str, Any]],
    choice: ToolChoice,
    prompt: str,
    continued: str | None,
) -> Constraint | None:
    """Return what the answer must look like; None: it is free. Raise RequestError (400) for what cannot be enforced.

    continued: the text at the prompt's end that the answer goes on with, if there is one.
    """
    asked = _asked(body, engine, tools, choice)
    if asked is None:
        return None
    parser = engine.model.reasoning_parser
    is_harmony = parser in HARMONY or engine.model.tool_call_parser in HARMONY
    try:
        if is_harmony and continued is None:
            return tag_constraint(asked.source, _node(asked, in_channels=True))
        if parser is None or is_harmony or _has_no_reasoning(parser, prompt, continued):
            return asked.constraint if asked.calls is None else tag_constraint(asked.source, _node(asked))
        node = sequence(_LINE_BREAKS, _node(asked))
        tags = REASONING_PARSERS[parser]
        if not is_left_open(parser, prompt, continued):  # the model opens it, or does not reason
            first = either(*(tag(begin, ANY_TEXT, end) for begin, end in tags))
            return tag_constraint(asked.source, either(_node(asked), sequence(first, node)))
        ends = [end for _, end in tags]
        end_ids = [engine.text.single_token(end) for end in ends]
        known = [token_id for token_id in end_ids if token_id is not None]
        if len(known) == len(ends):
            return dataclasses.replace(tag_constraint(asked.source, node), begins_after=tuple(known))
        return tag_constraint(asked.source, sequence({**tag("", ANY_TEXT, ""), "end": ends}, node))
    except ParameterError as error:
        raise bad_parameter(error.name, error.reason) from error


def _asked(
    body: ChatBody, engine: TokenizerManager, tools: list[dict[str, Any]], choice: ToolChoice
) -> AskedForm | None:
    given, parser = body.constraint(), engine.model.tool_call_parser
    source = "tools" if given is None else given.source
    if not tools or parser is None:
        return None if given is None else AskedForm(given, None, source)
    if choice.demands_calls:
        if given is not None:
            raise bad_parameter(given.source, "and a tool_choice that demands calls exclude each other")
        return AskedForm(None, demanded_calls(parser, tools, choice, body.parallel_tool_calls), source)
    strict, level = strict_names(body.tools), engine.model.tool_strict_level
    if given is None:
        calls = strict_calls(parser, tools, strict, level, body.parallel_tool_calls)
        return None if calls is None else AskedForm(None, calls, source)
    callables = called_tools(parser, tools, strict, level)
    return AskedForm(given, TOOL_CALL_PARSERS[parser].calls_form(callables, body.parallel_tool_calls), source)


def _has_no_reasoning(parser: str, prompt: str, continued: str | None) -> bool:
    """Return whether an answer to the prompt does not begin with reasoning: the prompt has ended it, or the text behind it."""
    if continued is not None:
        return not is_left_open(parser, prompt, continued)
    return prompt.rstrip().endswith(tuple(end for _, end in REASONING_PARSERS[parser]))


def _node(asked: AskedForm, in_channels: bool = False) -> Node:
    """Return the form as a part of a structural tag: what the client says, or calls. in_channels: in harmony's messages."""
    options = []
    if asked.constraint is not None:
        node = _node_of(asked.constraint)
        options.append(in_final_message(node) if in_channels else node)
    if asked.calls is not None:
        options.append(asked.calls)
    return either(*options)


def _node_of(constraint: Constraint) -> Node:
    try:
        return format_of(constraint.kind, constraint.content)
    except TagRefusal as refusal:
        raise ParameterError(constraint.source, str(refusal)) from refusal
