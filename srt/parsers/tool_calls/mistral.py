"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]`, and since its 11th tokenizer `[TOOL_CALLS]f{"a": 1}`, where `[ARGS]` or
`[CALL_ID]id[ARGS]` may stand before the arguments."""

from __future__ import annotations

from srt.parsers.format import Steps
from srt.parsers.tool_calls.json_object import JsonObjectFormat


class Mistral(JsonObjectFormat):
    BEGINS = ("[TOOL_CALLS]",)

    def _part(self) -> Steps[None]:
        yield from self._expect("[TOOL_CALLS]")
        yield from self._space()
        if (yield from self._accept("[")):
            yield from self._list()
        else:
            yield from self._named()

    def _list(self) -> Steps[None]:
        yield from self._space()
        yield from self._call_object()
        yield from self._space()
        while (yield from self._accept(",")):
            yield from self._space()
            yield from self._call_object()
            yield from self._space()
        self._at = self._start
        yield from self._skip("]")

    def _named(self) -> Steps[None]:
        name = yield from self._until("[CALL_ID]", "[ARGS]", "{")
        call_id = ""
        if (yield from self._accept("[CALL_ID]")):
            call_id = (yield from self._until("[ARGS]", "{")).strip()
        yield from self._accept("[ARGS]")
        yield from self._space()
        yield from self._begin_json_call(name.strip(), call_id)
