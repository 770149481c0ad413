"""Matching of stop strings and stop expressions in a growing text: where it ends, and how much of it may be shown already.

The text stops at the first position at which any stop is complete; of several that complete there, the longest wins. So the outcome
does not depend on how the text was cut into tokens.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

from srt.sampling.parameter_checks import compile_stop_regex

# The standard library's own parser, so that lengths are computed as `re` understands the expression; it has no public name.
expression_parser: Any = importlib.import_module("re._parser")

MAX_REGEX_MATCH = 256
"""Largest number of characters in a match of a stop expression. Less text is held back if the expression can only match less."""


@dataclass(frozen=True, slots=True)
class StopFound:
    """A match of `stop`: `text[start:end]` of the examined text."""

    start: int
    end: int
    stop: str


class _Stop(Protocol):
    def find(self, text: str, first_new: int, context: int) -> StopFound | None: ...

    def hold_from(self, text: str, context: int) -> int: ...


class StopMatcher:
    """Stop matching for one choice's text. The results of `push` and `finish`, end to end, are the text without what follows a stop."""

    def __init__(self, strings: tuple[str, ...], expressions: tuple[str, ...], keep_match: bool) -> None:
        self._stops: list[_Stop] = [*map(_StopString, strings), *map(_StopExpression, expressions)]
        self._keep_match = keep_match
        # The first `_context` characters were shown already and are kept for expressions that look back; the rest is held back.
        self._text = ""
        self._context = 0

    def push(self, piece: str) -> tuple[str, str | None]:
        """Add text; return (the text that may be shown now, the stop that was found or None). Push nothing after a stop."""
        if not self._stops or not piece:
            return piece, None
        first_new = len(self._text)
        text = self._text + piece
        found = self._first_found(text, first_new)
        if found is not None:
            shown = text[self._context : found.end if self._keep_match else found.start]
            self._text, self._context = "", 0
            return shown, found.stop
        hold = min(stop.hold_from(text, self._context) for stop in self._stops)
        shown = text[self._context : hold]
        keep_from = max(0, hold - 1)  # keep one shown character as context for `^` and `\b`
        self._text, self._context = text[keep_from:], hold - keep_from
        return shown, None

    def pass_over(self, piece: str) -> str:
        """Show a piece in which stops do not count."""
        if self._stops and piece:
            self._text, self._context = piece[-1], 1
        return piece

    def finish(self) -> str:
        """Return the text that was held back, when the text has ended without a stop."""
        rest = self._text[self._context :]
        self._text, self._context = "", 0
        return rest

    def _first_found(self, text: str, first_new: int) -> StopFound | None:
        found = [one for stop in self._stops if (one := stop.find(text, first_new, self._context)) is not None]
        return min(found, key=lambda one: (one.end, one.start), default=None)


class _StopString:
    def __init__(self, stop: str) -> None:
        self._stop = stop

    def find(self, text: str, first_new: int, context: int) -> StopFound | None:
        start = text.find(self._stop, context)
        return None if start < 0 else StopFound(start, start + len(self._stop), self._stop)

    def hold_from(self, text: str, context: int) -> int:
        """Return the start of the text's longest suffix that is a prefix of the stop; the text's end if there is none."""
        start = text.find(self._stop[0], max(context, len(text) - len(self._stop) + 1))
        while start >= 0:
            if self._stop.startswith(text[start:]):
                return start
            start = text.find(self._stop[0], start + 1)
        return len(text)


class _StopExpression:
    """A stop expression, searched in ever longer prefixes of the text: the first prefix with a match decides, and `$` matches at its
    end."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._regex = compile_stop_regex(pattern)
        self._longest = longest_match(pattern)
        # Only an expression that looks at the end of the text can match in a prefix and not in the whole text.
        self._looks_at_end = any(sign in pattern for sign in ("$", "\\b", "\\B", "\\z"))

    def find(self, text: str, first_new: int, context: int) -> StopFound | None:
        window = max(context, first_new + 1 - self._longest)
        if not self._looks_at_end and self._search(text, window, len(text)) is None:
            return None
        for end in range(first_new + 1, len(text) + 1):
            found = self._search(text, max(context, end - self._longest), end)
            if found is not None:
                return found
        return None

    def _search(self, text: str, start: int, end: int) -> StopFound | None:
        left = max(0, start - 1)  # include the character before, which `^` and `\b` depend on
        match = self._regex.search(text[left:end], start - left)
        return None if match is None else StopFound(left + match.start(), left + match.end(), self._pattern)

    def hold_from(self, text: str, context: int) -> int:
        return max(context, len(text) - self._longest + 1)


def longest_match(pattern: str) -> int:
    """Return the largest number of characters in a match of this expression, at most MAX_REGEX_MATCH: longer matches do not count."""
    if "{," in pattern:  # RE2 reads it as plain characters, Python's parser as a repetition
        return MAX_REGEX_MATCH
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns that a later version may read a pattern differently
            widest: Any = expression_parser.parse(pattern).getwidth()[1]
    except Exception:  # syntax that only RE2 has
        return MAX_REGEX_MATCH
    return max(1, min(int(widest), MAX_REGEX_MATCH))
