"""Counting the tokens of an output that are reasoning: those whose text begins within the reasoning, its tags included."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from srt.parsers.events import Event, Reasoning
from srt.utils.text_stream import TextStream


class ReasoningCount:
    """The count for one output as it grows."""

    def __init__(self, stream: TextStream) -> None:
        """Count tokens that `stream` decodes to the text that is parsed."""
        self._stream = stream
        self._starts: list[int] = []  # where each token begins in the text
        self._num_decoded = 0
        self._num_parsed = 0
        self._spans: list[tuple[int, int]] = []

    def add(self, ids: Sequence[int], events: Iterable[Event]) -> None:
        """Add tokens, and what the parser found in their text and in earlier text."""
        for token_id in ids:
            self._starts.append(self._num_decoded)
            self._num_decoded += len(self._stream.push(token_id))
        for event in events:
            begin, self._num_parsed = self._num_parsed, self._num_parsed + len(event.source)
            if isinstance(event, Reasoning):
                if self._spans and self._spans[-1][1] == begin:
                    begin = self._spans.pop()[0]
                self._spans.append((begin, self._num_parsed))

    @property
    def num_tokens(self) -> int:
        return sum(bisect_left(self._starts, end) - bisect_left(self._starts, begin) for begin, end in self._spans)
