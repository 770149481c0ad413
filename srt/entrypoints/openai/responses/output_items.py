"""The items of a response's output, and the events that tell of them, from the deltas of a chat's message."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Protocol

from srt.entrypoints.answers import ChatDelta, ToolCallDelta
from srt.entrypoints.openai.responses.response_types import (
    CallItem,
    ItemEvent,
    ItemStatus,
    MessageItem,
    OfCall,
    OfPart,
    OutputEvent,
    OutputItem,
    OutputText,
    PartEvent,
    ReasoningItem,
    ReasoningText,
)

NextNumber = Callable[[], int]


class OutputItems:
    """The output as it grows: finished items, and at most one that is still written. An item begins with its first character."""

    def __init__(self, next_number: NextNumber) -> None:
        """Count events with `next_number`, which the stream's other events share."""
        self.finished: list[OutputItem] = []
        self._next_number = next_number
        self._written: _Item | None = None

    def push(self, deltas: Iterable[ChatDelta]) -> list[OutputEvent]:
        """Add what a message grew by."""
        return [event for delta in deltas for event in self._events(delta)]

    def finish(self, status: ItemStatus) -> list[OutputEvent]:
        """End the item that is written, if there is one, with this status."""
        if self._written is None:
            return []
        events, item = self._written.end(status)
        self.finished.append(item)
        self._written = None
        return [*events, self._item_event(item, len(self.finished) - 1, is_new=False)]

    def _events(self, delta: ChatDelta) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        if text := delta.get("reasoning_content"):
            if not isinstance(self._written, _Reasoning):
                events += self._begin(_Reasoning)
            events += self._more(text)
        if text := delta.get("content"):
            if not isinstance(self._written, _Message):
                events += self._begin(_Message)
            events += self._more(text)
        for call in delta.get("tool_calls", []):
            events += self._call_events(call)
        return events

    def _call_events(self, call: ToolCallDelta) -> list[OutputEvent]:
        name, arguments = call["function"].get("name"), call["function"].get("arguments")
        events: list[OutputEvent] = []
        if name is not None:
            call_id = call["id"]
            events += self._begin(lambda number, index: _Call(number, index, call_id, name))
        return events + self._more(arguments) if arguments else events

    def _begin(self, make: Callable[[NextNumber, int], _Item]) -> list[OutputEvent]:
        events = self.finish("completed")
        index = len(self.finished)
        self._written = make(self._next_number, index)
        return [*events, self._item_event(self._written.empty(), index, is_new=True), *self._written.begin()]

    def _more(self, text: str) -> list[OutputEvent]:
        assert self._written is not None, "text of no item"
        return [self._written.more(text)]

    def _item_event(self, item: OutputItem, index: int, is_new: bool) -> ItemEvent:
        return {
            "type": "response.output_item.added" if is_new else "response.output_item.done",
            "sequence_number": self._next_number(),
            "output_index": index,
            "item": item,
        }


class _Item(Protocol):
    """An item that is being written."""

    def empty(self) -> OutputItem:
        """Return the item as it begins."""

    def begin(self) -> list[OutputEvent]:
        """Return the events between that of the empty item and the first delta."""

    def more(self, text: str) -> OutputEvent:
        """Add text that is not empty."""

    def end(self, status: ItemStatus) -> tuple[list[OutputEvent], OutputItem]:
        """Return the events between the last delta and that of the whole item, and the item."""


class _Part:
    """An item with an id and one part of text: the base of messages and reasoning."""

    PREFIX = ""

    def __init__(self, next_number: NextNumber, index: int) -> None:
        self.id = new_id(self.PREFIX)
        self._next_number = next_number
        self._index = index
        self._pieces: list[str] = []

    def _part_event(self, part: OutputText | ReasoningText, is_new: bool) -> PartEvent:
        return {
            "type": "response.content_part.added" if is_new else "response.content_part.done",
            **self._place(),
            "part": part,
        }

    def _place(self) -> OfPart:
        return {
            "sequence_number": self._next_number(),
            "output_index": self._index,
            "item_id": self.id,
            "content_index": 0,
        }


class _Message(_Part):
    PREFIX = "msg"

    def empty(self) -> MessageItem:
        return self._item("in_progress", [])

    def begin(self) -> list[OutputEvent]:
        return [self._part_event(self._part(""), is_new=True)]

    def more(self, text: str) -> OutputEvent:
        self._pieces.append(text)
        return {"type": "response.output_text.delta", **self._place(), "delta": text, "logprobs": []}

    def end(self, status: ItemStatus) -> tuple[list[OutputEvent], OutputItem]:
        text = "".join(self._pieces)
        done: OutputEvent = {"type": "response.output_text.done", **self._place(), "text": text, "logprobs": []}
        part = self._part(text)
        return [done, self._part_event(part, is_new=False)], self._item(status, [part])

    def _part(self, text: str) -> OutputText:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item(self, status: ItemStatus, content: list[OutputText]) -> MessageItem:
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class _Reasoning(_Part):
    PREFIX = "rs"

    def empty(self) -> ReasoningItem:
        return self._item("in_progress", [])

    def begin(self) -> list[OutputEvent]:
        return [self._part_event(self._part(""), is_new=True)]

    def more(self, text: str) -> OutputEvent:
        self._pieces.append(text)
        return {"type": "response.reasoning_text.delta", **self._place(), "delta": text}

    def end(self, status: ItemStatus) -> tuple[list[OutputEvent], OutputItem]:
        text = "".join(self._pieces)
        done: OutputEvent = {"type": "response.reasoning_text.done", **self._place(), "text": text}
        part = self._part(text)
        return [done, self._part_event(part, is_new=False)], self._item(status, [part])

    def _part(self, text: str) -> ReasoningText:
        return {"type": "reasoning_text", "text": text}

    def _item(self, status: ItemStatus, content: list[ReasoningText]) -> ReasoningItem:
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}


class _Call:
    def __init__(self, next_number: NextNumber, index: int, call_id: str, name: str) -> None:
        self.id = new_id("fc")
        self._next_number = next_number
        self._index = index
        self._call_id = call_id
        self._name = name
        self._pieces: list[str] = []

    def empty(self) -> CallItem:
        return self._item("in_progress", "")

    def begin(self) -> list[OutputEvent]:
        return []

    def more(self, text: str) -> OutputEvent:
        self._pieces.append(text)
        return {"type": "response.function_call_arguments.delta", **self._place(), "delta": text}

    def end(self, status: ItemStatus) -> tuple[list[OutputEvent], OutputItem]:
        arguments = "".join(self._pieces)
        done: OutputEvent = {
            "type": "response.function_call_arguments.done",
            **self._place(),
            "name": self._name,
            "arguments": arguments,
        }
        return [done], self._item(status, arguments)

    def _item(self, status: ItemStatus, arguments: str) -> CallItem:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": arguments,
        }

    def _place(self) -> OfCall:
        return {"sequence_number": self._next_number(), "output_index": self._index, "item_id": self.id}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
