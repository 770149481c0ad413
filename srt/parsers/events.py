"""Events of a parser: the parts of an output, in order. Events of one kind that follow each other are pieces of one part."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """A part of the output. The sources of all events, end to end, are the output: no character is lost."""

    source: str  # the characters that the event stands for, markers and white space around them included


@dataclass(frozen=True, slots=True)
class Text(Event):
    """Text for the user; empty for white space and markers beside a call."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning(Event):
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin(Event):
    """A call of a tool begins. Its arguments follow, then its end."""

    index: int
    name: str
    id: str = ""  # the call's id, if the model writes one


@dataclass(frozen=True, slots=True)
class CallArguments(Event):
    """More of the arguments of the call that began last. All of them, end to end, are a JSON object, if the model wrote one."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class CallEnd(Event):
    """The call that began last ends."""

    index: int


def merged(events: Iterable[Event]) -> list[Event]:
    """Return the events with pieces of one part joined."""
    whole: list[Event] = []
    for event in events:
        last = whole[-1] if whole else None
        if isinstance(event, Text) and isinstance(last, Text):
            whole[-1] = Text(last.source + event.source, last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            whole[-1] = Reasoning(last.source + event.source, last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            whole[-1] = dataclasses.replace(event, source=last.source + event.source, json=last.json + event.json)
        else:
            whole.append(event)
    return whole
