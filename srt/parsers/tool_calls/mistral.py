"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]`, and since its 11th tokenizer `[TOOL_CALLS]f{"a": 1}`, where `[ARGS]` or
`[CALL_ID]id[ARGS]` may stand before the arguments."""

from __future__ import annotations

from collections.abc import Sequence

from srt.parsers.base_parser import Steps
from srt.parsers.forms import CallableTool, Node, calls, either, regex, sequence, tag, text_with_calls
from srt.parsers.tool_calls.json_object import JsonObjectFormat, call_object


class Mistral(JsonObjectFormat):
    BEGINS = ("[TOOL_CALLS]",)

    @classmethod
    def call_form(cls, tool: CallableTool) -> Node:
        """Return the newer form: nothing tells which one the model knows, so that answers may have either."""
        return tag(f"[TOOL_CALLS]{tool.name}", sequence(regex(r"(\[ARGS\])?"), tool.arguments), "")

    @classmethod
    def _list_form(cls, tools: Sequence[CallableTool], several: bool) -> Node:
        inner = calls([call_object(tool) for tool in tools], ", ", several)
        return tag("[TOOL_CALLS]", sequence(regex(r" ?\["), inner), "]")

    @classmethod
    def calls_form(cls, tools: Sequence[CallableTool], several: bool) -> Node:
        return either(super().calls_form(tools, several), cls._list_form(tools, several))

    @classmethod
    def free_form(cls, tools: Sequence[CallableTool], several: bool) -> Node:
        tags = [*map(cls.call_form, tools), cls._list_form(tools, several)]
        return text_with_calls(tags, cls.BEGINS, several)

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
