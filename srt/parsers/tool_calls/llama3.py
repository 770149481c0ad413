"""Llama 3: `{"name": "f", "parameters": {"a": 1}}` as the whole answer, or behind `<|python_tag|>`; several are separated by `;`."""

from __future__ import annotations

from collections.abc import Sequence

from srt.parsers.base_parser import NotThisForm, Steps
from srt.parsers.forms import CallableTool, Node, either, regex
from srt.parsers.tool_calls.json_object import JsonObjectFormat, call_object


class Llama3(JsonObjectFormat):
    BEGINS = ("<|python_tag|>",)
    BETWEEN = "; "

    @classmethod
    def call_form(cls, tool: CallableTool) -> Node:
        return call_object(tool, key="parameters")

    @classmethod
    def free_form(cls, tools: Sequence[CallableTool], several: bool) -> Node:
        """Text that begins with `{` would be a call."""
        return either(cls.calls_form(tools, several), regex(r"\s*([^{\s](?s:.*))?", excludes=cls.BEGINS))

    def _opening(self) -> Steps[None]:
        yield from self._space()
        if (yield from self._next()) != "{":
            raise NotThisForm
        yield from self._objects()

    def _part(self) -> Steps[None]:
        yield from self._expect("<|python_tag|>")
        yield from self._space()
        yield from self._objects()

    def _objects(self) -> Steps[None]:
        yield from self._call_object()
        yield from self._space()
        while (yield from self._accept(";", ",")):
            yield from self._space()
            yield from self._call_object()
            yield from self._space()
        self._at = self._start
