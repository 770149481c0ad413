"""Following one JSON value through a growing text, to know where it ends."""

from __future__ import annotations

import re

_SPACE = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_UNFINISHED_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_WORD = re.compile(r"[-+.0-9A-Za-z]+")
_LITERAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
_MAX_WORD = 400

# What may come next.
_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _COLON, _COMMA_OR_END = range(6)


class JsonScanner:
    """The state of one value. It accepts JSON, and mends what models get wrong: control characters and backslashes in strings that
    JSON wants escaped, and Python's True, False and None."""

    __slots__ = ("_in_key", "_in_string", "_next", "_open", "is_broken", "is_done")

    def __init__(self) -> None:
        self.is_done = False  # the value is complete
        self.is_broken = False  # the next character cannot follow
        self._next = _VALUE
        self._open: list[str] = []  # brackets that are not closed yet
        self._in_string = False
        self._in_key = False

    def scan(self, text: str, at: int, is_end: bool) -> tuple[int, str]:
        """Consume text from `at` on; return the position behind what was consumed, and that as JSON.

        It stops at the end of the value, at a character that cannot follow, and before what only the following text will decide.
        is_end: no text follows.
        """
        parts: list[str] = []
        while not (self.is_done or self.is_broken) and at < len(text):
            step = self._step_in_string(text, at) if self._in_string else self._step(text, at, is_end)
            if step is None:
                break
            at, part = step
            parts.append(part)
        return at, "".join(parts)

    def _step_in_string(self, text: str, at: int) -> tuple[int, str] | None:
        if plain := _PLAIN.match(text, at):
            return plain.end(), plain[0]
        if text[at] == '"':
            self._in_string = False
            if self._in_key:
                self._next = _COLON
            else:
                self._end_value()
            return at + 1, '"'
        if text[at] != "\\":
            return at + 1, f"\\u{ord(text[at]):04x}"
        if escape := _ESCAPE.match(text, at):
            return escape.end(), escape[0]
        if _UNFINISHED_ESCAPE.match(text, at):
            return None
        return at + 1, "\\\\"

    def _step(self, text: str, at: int, is_end: bool) -> tuple[int, str] | None:
        if space := _SPACE.match(text, at):
            return space.end(), space[0]
        sign, expected = text[at], self._next
        if sign == '"' and expected in (_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END):
            self._in_string, self._in_key = True, expected in (_KEY, _KEY_OR_END)
        elif sign in "{[" and expected in (_VALUE, _VALUE_OR_END):
            self._open.append(sign)
            self._next = _KEY_OR_END if sign == "{" else _VALUE_OR_END
        elif sign in "}]" and self._may_close(sign):
            self._open.pop()
            self._end_value()
        elif sign == "," and expected == _COMMA_OR_END:
            self._next = _KEY if self._open[-1] == "{" else _VALUE
        elif sign == ":" and expected == _COLON:
            self._next = _VALUE
        elif expected in (_VALUE, _VALUE_OR_END):
            return self._literal(text, at, is_end)
        else:
            self.is_broken = True
            return None
        return at + 1, sign

    def _may_close(self, sign: str) -> bool:
        if not self._open:
            return False
        if sign == "}":
            return self._open[-1] == "{" and self._next in (_KEY_OR_END, _COMMA_OR_END)
        return self._open[-1] == "[" and self._next in (_VALUE_OR_END, _COMMA_OR_END)

    def _literal(self, text: str, at: int, is_end: bool) -> tuple[int, str] | None:
        word = _WORD.match(text, at, at + _MAX_WORD)
        if word is None:
            self.is_broken = True
            return None
        if word.end() == len(text) and word.end() < at + _MAX_WORD and not is_end:
            return None
        written = _PYTHON_LITERALS.get(word[0], word[0])
        if not _LITERAL.fullmatch(written):
            self.is_broken = True
            return None
        self._end_value()
        return word.end(), written

    def _end_value(self) -> None:
        self._next = _COMMA_OR_END
        self.is_done = not self._open
