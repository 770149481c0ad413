"""Stop strings and stop expressions in a text that grows: what ends it, and how much of it may be shown before that is known.

The text stops at the first position at which any stop is complete; of several that are complete there, the longest. So the outcome
does not depend on how the text was cut into tokens.
"""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

from srt.sampling.parameter_checks import compile_stop_regex

# The standard library's own parser, so that lengths are read as `re` reads the expression; it has no public name.
expression_parser: Any = importlib.import_module("re._parser")

MAX_REGEX_MATCH = 256
"""Characters that a match of a stop expression may have. Fewer are held back where the expression cannot match as many."""


@dataclass(frozen=True, slots=True)
class StopFound:
    """`text[start:end]` of the text that was examined is the match of `stop`."""

    start: int
    end: int
    stop: str


class _Stop(Protocol):
    def find(self, text: str, first_new: int, context: int) -> StopFound | None: ...

    def hold_from(self, text: str, context: int) -> int: ...


class StopMatcher:
    """Feeds on pieces of one choice's text. What `push` and `finish` return, end to end, is the text without what follows a stop."""

    def __init__(self, strings: tuple[str, ...], expressions: tuple[str, ...], keep_match: bool) -> None:
        self._stops: list[_Stop] = [*map(_StopString, strings), *map(_StopExpression, expressions)]
        self._keep_match = keep_match
        # Not shown yet, behind `_context` characters that were: the longest part of them that an expression may look back on.
        self._text = ""
        self._context = 0

    def push(self, piece: str) -> tuple[str, str | None]:
        """(what may be shown now, the stop that was found). After a stop nothing may be pushed."""
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
        keep_from = max(0, hold - 1)  # one character behind, for `^` and `\b`
        self._text, self._context = text[keep_from:], hold - keep_from
        return shown, None

    def pass_over(self, piece: str) -> str:
        """Show a piece in which stops do not count."""
        if self._stops and piece:
            self._text, self._context = piece[-1], 1
        return piece

    def finish(self) -> str:
        """The text has ended without a stop: what was held back."""
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
        """Where the longest ending of the text begins that the stop begins with; the text's end if none does."""
        start = text.find(self._stop[0], max(context, len(text) - len(self._stop) + 1))
        while start >= 0:
            if self._stop.startswith(text[start:]):
                return start
            start = text.find(self._stop[0], start + 1)
        return len(text)


class _StopExpression:
    """The shortest beginning of the text in which the expression is found decides, so `$` is where the text ends so far."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._regex = compile_stop_regex(pattern)
        self._longest = longest_match(pattern)
        # Only what looks at the end of the text can be found in a beginning of it and not in the whole.
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
        left = max(0, start - 1)  # `^` and `\b` must see that there is a character
        match = self._regex.search(text[left:end], start - left)
        return None if match is None else StopFound(left + match.start(), left + match.end(), self._pattern)

    def hold_from(self, text: str, context: int) -> int:
        return max(context, len(text) - self._longest + 1)


def longest_match(pattern: str) -> int:
    """No match of this expression has more characters, unless it has more than MAX_REGEX_MATCH, which do not count."""
    if "{," in pattern:  # characters like any other to RE2, a repetition to Python's parser
        return MAX_REGEX_MATCH
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that Python may read a pattern differently one day
            widest: Any = expression_parser.parse(pattern).getwidth()[1]
    except Exception:  # syntax that only RE2 has
        return MAX_REGEX_MATCH
    return max(1, min(int(widest), MAX_REGEX_MATCH))
