"""What formats share that write a call in tags: its name, and an element for each argument with the value as it is."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from srt.parsers.argument_forms import Place, object_members, root_of, text_until
from srt.parsers.base_parser import NotThisForm, Steps
from srt.parsers.call_format import CallFormat
from srt.parsers.forms import ANY_TEXT, CallableTool, Node, tag
from srt.parsers.tools import quoted

_MAX_VALUE = 1 << 24  # characters of a value that is not a string


class MarkupFormat(CallFormat):
    """The base of such formats: markers, and how the key of an argument is read."""

    AROUND: ClassVar[
        tuple[tuple[str, ...], tuple[str, ...]]
    ]  # what may stand before the first call, and behind the last one
    CALL: ClassVar[tuple[str, str, str]]  # before the name, behind it, and at the end of the call
    ARGUMENT: ClassVar[tuple[str, str]]  # before the key, and at the end of the value
    HAS_LINES: ClassVar[bool] = False  # a value stands on lines of its own

    @classmethod
    def _call_form(cls, begin: str, tool: CallableTool, end: str) -> Node:
        """Return a tag for a call: its arguments have each the form that `_argument_form` says, or are free up to the end."""
        if tool.parameters is None:
            return tag(begin, ANY_TEXT, end)
        return tag(begin, cls._members_form(tool), end)

    @classmethod
    def _members_form(cls, tool: CallableTool) -> Node:
        return object_members(root_of(tool), lambda key, place: cls._argument_form(key, place, tool.is_string(key)))

    @classmethod
    @abstractmethod
    def _argument_form(cls, key: str, place: Place, is_string: bool) -> Node:
        """Return the form of one argument. is_string: the parser takes its value as a text."""

    @classmethod
    def _value_form(cls, begin: str, place: Place, is_string: bool) -> Node:
        """Return a tag for a value, up to the end of its element."""
        line = "\n" if cls.HAS_LINES else ""
        end = cls.ARGUMENT[1]
        if is_string:
            return text_until(begin + line, place, (end, line + end))
        return tag(begin + line, place.as_json, line + end)

    def _part(self) -> Steps[None]:
        before, behind = self.AROUND
        call, behind_name, _ = self.CALL
        yield from self._accept(*before)
        yield from self._space()
        yield from self._expect(call)
        name = yield from self._until(behind_name)
        yield from self._expect(behind_name)
        self._begin_call(name.strip())
        yield from self._members(name.strip())
        self._end_call()
        yield from self._skip(*behind)

    def _members(self, tool: str) -> Steps[None]:
        """Read the arguments and the end of the call."""
        begin, end = self.ARGUMENT[0], self.CALL[2]
        lead = "{"
        yield from self._space()
        while (yield from self._expect(begin, end)) == begin:
            key, is_string = yield from self._key(tool)
            lead += quoted(key) + ": "
            if is_string:
                self._arguments(lead)
                yield from self._text_value()
            else:
                self._arguments(lead + (yield from self._typed_value(tool, key)))
            lead = ", "
            yield from self._space()
        self._arguments("{}" if lead == "{" else "}")
        self._has_arguments = True

    @abstractmethod
    def _key(self, tool: str) -> Steps[tuple[str, bool]]:
        """Read the key of an argument and what stands between it and its value; return it, and whether the value is a string."""

    def _text_value(self) -> Steps[None]:
        if self.HAS_LINES:
            yield from self._accept("\n")
        yield from self._string(*self._ends())

    def _typed_value(self, tool: str, key: str) -> Steps[str]:
        """Read a value and return it as JSON of its type."""
        if self.HAS_LINES:
            yield from self._accept("\n")
        text = yield from self._json_value()
        if not text:
            text = yield from self._until(*self._ends(), most=_MAX_VALUE)
            yield from self._expect(*self._ends())
        return self._tools.json_of(tool, key, text)

    def _json_value(self) -> Steps[str]:
        """Read a JSON value, in which the end's marker may be a part of a string, and the end; otherwise read nothing."""
        begin = self._at - self._start
        try:
            yield from self._space()
            yield from self._json()
            end = self._at - self._start
            yield from self._space()
            yield from self._expect(self.ARGUMENT[1])
        except NotThisForm:
            self._at = self._start + begin
            return ""
        return self._text[self._start + begin : self._start + end]

    def _ends(self) -> tuple[str, ...]:
        return ("\n" + self.ARGUMENT[1], self.ARGUMENT[1]) if self.HAS_LINES else (self.ARGUMENT[1],)
