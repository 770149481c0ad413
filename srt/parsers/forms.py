"""The forms of calls, as structural tags: what a constrained answer may look like so that a parser reads calls from it.

A node is a part of a structural tag's `format`, as `srt.constrained.structural_tag` describes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from srt.parsers.tools import Tools, quoted

Node = Mapping[str, Any]
_SIGNS = re.compile(r"[\\.+*?()|\[\]{}^$]")
ANY_TEXT: Node = {"type": "any_text"}


class FormRefusal(Exception):
    """Calls whose form cannot be enforced. The message is the rest of a sentence, behind the place in the tool's parameters."""

    def __init__(self, place: str, reason: str) -> None:
        """place: path within the parameters, such as `.properties.city`; empty for all of them."""
        super().__init__(reason)
        self.place = place


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that a constrained answer may call."""

    name: str
    # The JSON Schema of its arguments, as the grammar library takes it: all references lead to `$defs`. None: they are free, and the
    # form of the call alone counts.
    parameters: Mapping[str, Any] | None
    tools: Tools  # which the parser reads the calls with

    @property
    def arguments(self) -> Node:
        """The arguments as JSON."""
        return json_schema({"type": "object"} if self.parameters is None else self.parameters)

    def is_string(self, argument: str) -> bool:
        """Return whether the parser takes what is written for this argument as a text."""
        return self.tools.is_string(self.name, argument)

    @property
    def quoted_name(self) -> str:
        return quoted(self.name)


def escaped(text: str) -> str:
    """Return an expression that matches this text alone."""
    return _SIGNS.sub(r"\\\g<0>", text)


def const(text: str) -> Node:
    return {"type": "const_string", "value": text}


def regex(pattern: str | Sequence[str], excludes: Sequence[str] = ()) -> Node:
    return {"type": "regex", "pattern": pattern, **({"excludes": list(excludes)} if excludes else {})}


def json_schema(schema: Any) -> Node:
    return {"type": "json_schema", "json_schema": schema}


def tag(begin: str, content: Node, end: str) -> Node:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Node) -> Node:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Node) -> Node:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def optional(element: Node) -> Node:
    return members([element], [False])


def members(elements: Sequence[Node], required: Sequence[bool], separator: str = "") -> Node:
    """Return the elements in this order. Those that are not required may be left out."""
    return {"type": "members", "elements": list(elements), "required": list(required), "separator": separator}


def calls(tags: Sequence[Node], separator: str, several: bool) -> Node:
    """Return the form of one of these tags; of any number of them, but at least one, if `several`."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not several,
    }


def text_with_calls(tags: Sequence[Node], triggers: Sequence[str], several: bool) -> Node:
    """Return the form of free text in which each trigger begins one of these tags; nothing follows the first unless `several`."""
    return {
        "type": "triggered_tags",
        "triggers": [trigger for trigger in triggers if any(str(one["begin"]).startswith(trigger) for one in tags)],
        "tags": list(tags),
        "stop_after_first": not several,
    }


def compact(node: Node) -> str:
    """Return a node as JSON, in which equal nodes are equal."""
    return json.dumps(node, ensure_ascii=False, separators=(",", ":"))
