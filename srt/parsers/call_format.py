"""The base of parsers of calls: each reads one form, and gives it as a structural tag that constrains an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from srt.parsers.base_parser import Format
from srt.parsers.forms import CallableTool, Node, calls, tag, text_with_calls


class CallFormat(Format, ABC):
    """A parser of calls. What an answer in one of its forms says, it reads as calls of these tools, with arguments that are valid."""

    SECTION: ClassVar[tuple[str, str]] = ("", "")  # what stands around all calls of an answer
    BETWEEN: ClassVar[str] = ""  # what stands between two calls

    @classmethod
    @abstractmethod
    def call_form(cls, tool: CallableTool) -> Node:
        """Return a tag for one call of this tool; raise FormRefusal if the form cannot be enforced."""

    @classmethod
    def calls_form(cls, tools: Sequence[CallableTool], several: bool) -> Node:
        """Return the form of an answer that is one call of one of these tools, or more if `several`. Raise FormRefusal."""
        begin, end = cls.SECTION
        inner = calls([cls.call_form(tool) for tool in tools], cls.BETWEEN, several)
        return tag(begin, inner, end) if begin else inner

    @classmethod
    def free_form(cls, tools: Sequence[CallableTool], several: bool) -> Node:
        """Return the form of an answer that is text, but follows the form of calls from where one begins. Raise FormRefusal."""
        tags = [cls.call_form(tool) for tool in tools]
        begin, end = cls.SECTION
        if begin:
            tags.append(tag(begin, calls(tags, cls.BETWEEN, several), end))
        return text_with_calls(tags, cls.BEGINS, several)
