"""The parts of an assistant's message, told from the text that a model writes: content, reasoning, calls of tools."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from srt.entrypoints.answers import ChatDelta, ChatMessage, ToolCall
from srt.entrypoints.openai.reasoning_count import ReasoningCount
from srt.managers.tokenizer_manager.api_types import ChoiceUpdate, Finish
from srt.managers.tokenizer_manager.tokenizer_manager import TokenizerManager
from srt.parsers.events import CallArguments, CallBegin, Event, Reasoning, Text
from srt.parsers.output_parser import OutputParser
from srt.parsers.tools import Tools
from srt.sampling.sampling_params import SamplingParams

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class OutputForm:
    """How the outputs of a request are to be read."""

    tool_call_parser: str | None
    reasoning_parser: str | None
    tools: Tools
    is_open: bool  # an output begins within the reasoning
    separates_reasoning: bool = True  # False: reasoning is content, as it is written
    streams_reasoning: bool = True  # False: reasoning is told at its end
    parallel_calls: bool = True  # False: only the first call counts

    def new_parts(self, engine: TokenizerManager, params: SamplingParams) -> MessageParts:
        return MessageParts(self, engine, params)


class MessageParts:
    """The message of one choice, as it grows."""

    def __init__(self, form: OutputForm, engine: TokenizerManager, params: SamplingParams) -> None:
        self._form = form
        self._parser = OutputParser(form.tool_call_parser, form.reasoning_parser, form.tools, form.is_open)
        self._engine = engine
        self._params = params
        self._count: ReasoningCount | None = None
        self._held_reasoning = ""
        self._is_in_reasoning = form.is_open
        self.has_calls = False

    @property
    def counts_reasoning(self) -> bool:
        return self._form.reasoning_parser is not None

    def finish(self, finish: Finish) -> Finish:
        """Return why the message ended, once all of it was pushed. One that was to have a form, and ended before it, was cut off."""
        is_cut_off = self._is_in_reasoning and self._params.constraint is not None
        return replace(finish, kind="length", matched=None) if is_cut_off and finish.kind == "stop" else finish

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._count is None else self._count.num_tokens

    def push(self, update: ChoiceUpdate) -> list[ChatDelta]:
        """Return what an update adds to the message. The updates of a choice come in order, the last one with its finish."""
        events = self._parser.push(update.text)
        if update.finish is not None:
            events += self._parser.finish()
        if self.counts_reasoning:
            if self._count is None:
                self._count = ReasoningCount(self._engine.text.output_stream(self._params, update.prompt_ids))
            self._count.add(update.ids, events)
        deltas = [delta for event in events for delta in self._deltas(event)]
        return deltas + self._told_reasoning() if update.finish is not None else deltas

    def message(self, update: ChoiceUpdate) -> ChatMessage:
        """Return the whole message; `update` is all of the choice."""
        content, reasoning = "", ""
        calls: list[ToolCall] = []
        for delta in self.push(update):
            content += delta.get("content", "")
            reasoning += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", []):
                function = call["function"]
                if "name" in function:
                    called: ToolCall = {
                        "id": call.get("id", ""),
                        "type": "function",
                        "function": {"name": function["name"], "arguments": ""},
                    }
                    calls.append(called)
                calls[-1]["function"]["arguments"] += function.get("arguments", "")
        message: ChatMessage = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        if self.counts_reasoning and self._form.separates_reasoning:
            message["reasoning_content"] = reasoning or None
        if calls:
            message["tool_calls"] = calls
        return message

    def _deltas(self, event: Event) -> Sequence[ChatDelta]:
        self._is_in_reasoning = isinstance(event, Reasoning)
        if isinstance(event, Reasoning):
            return self._reasoning_deltas(event)
        told = (
            self._told_reasoning() if isinstance(event, CallBegin) or (isinstance(event, Text) and event.text) else []
        )
        match event:
            case Text(text=text):
                return [*told, {"content": text}] if text else told
            case CallBegin(index=index, name=name, id=call_id) if self._counts(index):
                self.has_calls = True
                function: ChatDelta = {
                    "tool_calls": [
                        {
                            "index": index,
                            "id": call_id or self._new_id(),
                            "type": "function",
                            "function": {"name": name, "arguments": ""},
                        }
                    ]
                }
                return [*told, function]
            case CallArguments(index=index, json=json) if json and self._counts(index):
                return [{"tool_calls": [{"index": index, "function": {"arguments": json}}]}]
        return told

    def _reasoning_deltas(self, event: Reasoning) -> Sequence[ChatDelta]:
        if not self._form.separates_reasoning:
            return [{"content": event.source}] if event.source else []
        if self._form.streams_reasoning:
            return [{"reasoning_content": event.text}] if event.text else []
        self._held_reasoning += event.text
        return []

    def _told_reasoning(self) -> list[ChatDelta]:
        held, self._held_reasoning = self._held_reasoning, ""
        return [{"reasoning_content": held}] if held else []

    def _counts(self, index: int) -> bool:
        return index == 0 or self._form.parallel_calls

    def _new_id(self) -> str:
        """Return a name for a call, of the kind that the model's template takes."""
        if self._form.tool_call_parser == "mistral":
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{uuid.uuid4().hex[:24]}"
