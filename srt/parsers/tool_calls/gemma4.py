"""Gemma 4: `<|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>`: JSON with bare keys, and strings between quotes of their own."""

from __future__ import annotations

from srt.parsers.format import Format, NotThisForm, Steps
from srt.parsers.tools import quoted

_QUOTE = '<|"|>'
_MAX_DEPTH = 64


class Gemma4(Format):
    BEGINS = ("<|tool_call>",)

    def _part(self) -> Steps[None]:
        yield from self._expect("<|tool_call>")
        yield from self._expect("call:")
        name = yield from self._until("{")
        self._begin_call(name.strip())
        yield from self._object(0)
        self._has_arguments = True
        self._end_call()
        yield from self._skip("<tool_call|>")

    def _object(self, depth: int) -> Steps[None]:
        yield from self._expect("{")
        lead = "{"
        yield from self._space()
        while not (yield from self._accept("}")):
            if lead != "{":
                yield from self._expect(",")
                yield from self._space()
            key = yield from self._key()
            self._arguments(lead + quoted(key) + ": ")
            yield from self._value(depth)
            lead = ", "
            yield from self._space()
        self._arguments("{}" if lead == "{" else "}")

    def _array(self, depth: int) -> Steps[None]:
        yield from self._expect("[")
        lead = "["
        yield from self._space()
        while not (yield from self._accept("]")):
            if lead != "[":
                yield from self._expect(",")
                yield from self._space()
            self._arguments(lead)
            yield from self._value(depth)
            lead = ", "
            yield from self._space()
        self._arguments("[]" if lead == "[" else "]")

    def _key(self) -> Steps[str]:
        if (yield from self._accept(_QUOTE)):
            key = yield from self._until(_QUOTE)
            yield from self._expect(_QUOTE)
        else:
            key = (yield from self._until(":")).strip().strip('"')
        yield from self._space()
        yield from self._expect(":")
        yield from self._space()
        return key

    def _value(self, depth: int) -> Steps[None]:
        if depth == _MAX_DEPTH:
            raise NotThisForm
        first = yield from self._next()
        if first == "{":
            yield from self._object(depth + 1)
        elif first == "[":
            yield from self._array(depth + 1)
        elif (yield from self._accept(_QUOTE)):
            yield from self._string(_QUOTE)
        else:
            yield from self._json(self._arguments)
