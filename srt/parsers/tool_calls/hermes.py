"""Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>`."""

from __future__ import annotations

from srt.parsers.base_parser import Steps
from srt.parsers.forms import CallableTool, Node
from srt.parsers.tool_calls.json_object import JsonObjectFormat, call_object


class Hermes(JsonObjectFormat):
    BEGINS = ("<tool_call>",)
    BETWEEN = "\n"

    @classmethod
    def call_form(cls, tool: CallableTool) -> Node:
        return call_object(tool, ("<tool_call>\n", "\n</tool_call>"))

    def _part(self) -> Steps[None]:
        yield from self._expect("<tool_call>")
        yield from self._space()
        yield from self._call_object()
        yield from self._skip("</tool_call>")
