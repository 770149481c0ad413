"""Reasoning between two tags at the begin of an answer, `<think>…</think>`; the prompt may have opened it already."""

from __future__ import annotations

from srt.parsers.base_parser import Format, NotThisForm, Steps, TextEnded
from srt.parsers.events import Reasoning, Text
from srt.parsers.tools import Tools

Tags = tuple[str, str]


class ThinkTags(Format):
    """White space beside the tags belongs to them."""

    def __init__(self, tags: tuple[Tags, ...], is_open: bool) -> None:
        """Expect one of these pairs of tags. is_open: the answer begins within the reasoning."""
        super().__init__(Tools({}))
        self._tags = dict(tags)
        self._is_open = is_open

    def _opening(self) -> Steps[None]:
        yield from self._space()
        begin = yield from self._accept(*self._tags)
        if begin:
            yield from self._space()
            ends: tuple[str, ...] = (self._tags[begin],)
        elif self._is_open:
            ends = tuple(self._tags.values())
        else:
            raise NotThisForm
        self._tell("")
        yield from self._reasoning(ends)
        yield from self._space()
        self._events.append(Text(self._take(), ""))

    def _reasoning(self, ends: tuple[str, ...]) -> Steps[None]:
        """Read the reasoning up to its end. White space is held back, for it may be the last before the end."""

        def tell(_: str) -> None:
            end, source = self._at, self._text[self._start : self._at]
            text = source.rstrip()
            self._at = self._start + len(text)
            self._tell(text)
            self._at = end

        try:
            yield from self._pieces(ends, tell)
        except TextEnded:
            self._at = len(self._text)
            self._tell(self._text[self._start :])
            raise
        self._tell("")

    def _tell(self, text: str) -> None:
        source = self._take()
        if source:
            self._events.append(Reasoning(source, text))
