"""`Format`, the base of all parsers: it reads a growing text, and says what its parts are.

A format is written as if the whole text were there: its methods are generators that yield where they need more of it. They look only
at characters, never at where a piece of text ended, so the events do not depend on the pieces.

Three positions divide the text: what lies before `_start` has been returned in events; `_at` is where the parser reads; between them
is what was read and is not decided yet. `NotThisForm` says that the text cannot go on as the format wants it. Then

- a call that has not begun is text, its markers included; so is the call of a tool that was not offered (`_begin_call`);
- a call that has begun ends, for its name is told already, and what follows is text;
- if the text ends within a call's arguments, the rest of it is the end of the arguments, as it is written.

White space beside a call belongs to the call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import ClassVar, TypeVar

from srt.parsers.events import CallArguments, CallBegin, CallEnd, Event, Text
from srt.parsers.json_scanner import JsonScanner
from srt.parsers.tools import Tools, quoted

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
_SPACE = re.compile(r"\s*")
MAX_NAME = 256  # characters of a tool's name, an argument's or a header
_MAX_SPACE = 4096  # characters of white space within a call
_MAX_HELD = 1 << 16  # characters that may come before it is clear that a call has begun


class NotThisForm(Exception):
    """The text does not go on as the format wants it."""


class TextEnded(NotThisForm):
    """The text ends where the format wants more."""


class Format:
    """A parser of one text. Feed it with `push`, and `finish` it once."""

    BEGINS: ClassVar[tuple[str, ...]] = ()  # markers at which `_part` is tried

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._text = ""
        self._num_dropped = 0  # characters that came before `_text`
        self._start = 0
        self._at = 0
        self._is_end = False
        self._events: list[Event] = []
        self._num_calls = 0
        self._is_in_call = False
        self._has_arguments = False  # the arguments of the call are complete
        self._is_behind_call = False  # nothing but white space came since the last call
        self._steps = self._run()

    def push(self, piece: str) -> list[Event]:
        """Return the events that the text so far decides."""
        self._text = self._text[self._start :] + piece
        self._num_dropped += self._start
        self._at -= self._start
        self._start = 0
        return self._advance()

    def finish(self) -> list[Event]:
        """Return the last events: no text follows."""
        self._is_end = True
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    # ---- What the parts of the text are

    def _run(self) -> Steps[None]:
        yield from self._try(self._opening(), skipped=0)
        while (yield from self._text_before(self.BEGINS)):
            yield from self._try(self._part(), skipped=1)

    def _opening(self) -> Steps[None]:
        """Read what only the beginning of a text can have. Does nothing in most formats."""
        yield from ()

    def _part(self) -> Steps[None]:
        """Read a part that begins with one of BEGINS, which is what comes next. Never called where there are none."""
        yield from ()

    def _try(self, steps: Steps[None], skipped: int) -> Steps[None]:
        """Read a part of the text. If it has another form, go on behind what was returned, or `skipped` characters from its begin."""
        begin = self._num_dropped + self._at
        try:
            yield from steps
        except NotThisForm as error:
            if self._is_in_call:
                if isinstance(error, TextEnded) and not self._has_arguments:
                    self._at = len(self._text)
                    self._arguments(self._text[self._start :])
                self._at = self._start
                self._end_call()
            else:
                self._at = max(self._start, begin + skipped - self._num_dropped)

    def _text_before(self, markers: Sequence[str]) -> Steps[bool]:
        """Return the text before the first marker as text, and stop in front of it; False if the text ends without one."""
        pattern = re.compile("|".join(map(re.escape, markers)) or r"(?!)")
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                self._at = found.start()
                self._show(found.start(), keep_space=True)
                return True
            if self._is_end:
                self._at = len(self._text)
                self._show(self._at)
                return False
            self._at = max(self._at, len(self._text) - partial_marker(self._text, markers))
            self._show(self._at, keep_space=bool(markers))
            yield

    def _show(self, end: int, keep_space: bool = False) -> None:
        """Return the text up to `end` as text; with `keep_space` without the white space at its end, which may belong to a call."""
        source = self._text[self._start : end]
        text = source.lstrip() if self._is_behind_call else source
        if keep_space:
            text = text.rstrip()
            source = source[: source.rfind(text) + len(text)] if text else ""
        if source:
            self._is_behind_call = self._is_behind_call and not text
            self._events.append(Text(source, text))
            self._start += len(source)

    # ---- Calls

    def _begin_call(self, name: str, call_id: str = "") -> None:
        """Begin a call with what was read. NotThisForm if there is no such tool: then the model's call stays text."""
        if name not in self._tools:
            raise NotThisForm
        self._is_in_call, self._has_arguments = True, False
        self._events.append(CallBegin(self._take(), self._num_calls, name, call_id))

    def _arguments(self, json: str) -> None:
        """Return JSON that stands for what was read."""
        source = self._take()
        if source or json:
            self._events.append(CallArguments(source, self._num_calls, json))

    def _end_call(self) -> None:
        self._events.append(CallEnd(self._take(), self._num_calls))
        self._num_calls += 1
        self._is_in_call, self._is_behind_call = False, True

    def _take(self) -> str:
        """Return what was read and not returned yet."""
        source = self._text[self._start : self._at]
        self._start = self._at
        return source

    def _begin_json_call(self, name: str, call_id: str = "") -> Steps[None]:
        """Begin a call in front of its arguments, which must be a JSON object, and read them."""
        if (yield from self._next()) != "{":
            raise NotThisForm
        self._begin_call(name, call_id)
        yield from self._json_arguments()
        self._end_call()

    def _json_arguments(self) -> Steps[None]:
        """Read a JSON object as the arguments of the call."""
        yield from self._json(self._arguments)
        self._has_arguments = True

    def _json(self, use: Callable[[str], None] | None = None) -> Steps[str]:
        """Read a JSON value. Pass it to `use` piece by piece, or return it."""
        scanner, parts = JsonScanner(), list[str]()
        while True:
            self._at, piece = scanner.scan(self._text, self._at, self._is_end)
            if use is not None and piece:
                use(piece)
            parts.append(piece)
            if scanner.is_broken or (use is None and self._at - self._start > _MAX_HELD):
                raise NotThisForm
            if scanner.is_done:
                return "".join(parts)
            yield from self._wait()

    def _string(self, *ends: str, text_to_json: Callable[[str], str] = lambda text: quoted(text)[1:-1]) -> Steps[None]:
        """Read text up to one of `ends` as a string of the arguments, piece by piece."""
        self._arguments('"')
        yield from self._pieces(ends, lambda piece: self._arguments(text_to_json(piece)))
        self._arguments('"')

    # ---- Reading

    def _wait(self) -> Steps[None]:
        if self._is_end:
            raise TextEnded
        yield

    def _next(self) -> Steps[str]:
        """Return the next character without reading it."""
        while self._at >= len(self._text):
            yield from self._wait()
        return self._text[self._at]

    def _space(self) -> Steps[None]:
        """Read white space, if there is any."""
        begin = self._at - self._start
        while True:
            found = _SPACE.match(self._text, self._at)
            self._at = found.end() if found else self._at
            if self._at - self._start - begin > _MAX_SPACE:
                raise NotThisForm
            if self._at < len(self._text) or self._is_end:
                return
            yield

    def _accept(self, *markers: str) -> Steps[str]:
        """Read one of `markers` if one is next, and return it; empty if none is. No marker may begin with another."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, markers))]
            for marker in markers:
                if rest.startswith(marker):
                    self._at += len(marker)
                    return marker
            if self._is_end or not any(marker.startswith(rest) for marker in markers):
                return ""
            yield

    def _expect(self, *markers: str) -> Steps[str]:
        """Read one of `markers`, and return it."""
        found = yield from self._accept(*markers)
        if not found:
            rest = self._text[self._at :][:MAX_NAME]
            raise TextEnded if any(marker.startswith(rest) for marker in markers) else NotThisForm
        return found

    def _until(self, *markers: str, most: int = MAX_NAME) -> Steps[str]:
        """Read and return the text up to the first of `markers`, and stop in front of it."""
        pattern = re.compile("|".join(map(re.escape, markers)))
        begin = self._at - self._start
        while True:
            found = pattern.search(self._text, self._start + begin)
            end = found.start() if found else len(self._text) - partial_marker(self._text, markers)
            if end - self._start - begin > most:
                raise NotThisForm
            if found:
                self._at = end
                return self._text[self._start + begin : end]
            yield from self._wait()

    def _pieces(self, ends: Sequence[str], use: Callable[[str], None]) -> Steps[str]:
        """Pass the text up to the first of `ends` to `use` piece by piece. Read that end too, and return it."""
        pattern = re.compile("|".join(map(re.escape, ends)))
        while True:
            found = pattern.search(self._text, self._at)
            end = found.start() if found else len(self._text) - partial_marker(self._text, ends)
            piece = self._text[self._at : end]
            if piece:
                self._at = end
                use(piece)
            if found:
                self._at = found.end()
                return found[0]
            yield from self._wait()

    def _skip(self, *markers: str) -> Steps[bool]:
        """Read white space and then a marker that closes what has ended already; without it, read nothing."""
        try:
            yield from self._space()
            found = yield from self._accept(*markers)
        except NotThisForm:
            found = ""
        if not found:
            self._at = self._start
            return False
        self._events.append(Text(self._take(), ""))
        return True


def partial_marker(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that one of `markers` begins with, and is longer than."""
    longest = 0
    for marker in markers:
        at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while at >= 0 and len(text) - at > longest:
            if marker.startswith(text[at:]):
                longest = len(text) - at
                break
            at = text.find(marker[0], at + 1)
    return longest
