"""Qwen3-Coder: `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, each value on lines of its own."""

from __future__ import annotations

from srt.parsers.argument_forms import Place
from srt.parsers.base_parser import Steps
from srt.parsers.forms import CallableTool, Node, const, sequence
from srt.parsers.tool_calls.markup import MarkupFormat


class Qwen3Coder(MarkupFormat):
    BEGINS = ("<tool_call>", "<function=")
    AROUND = (("<tool_call>",), ("</tool_call>",))
    CALL = ("<function=", ">", "</function>")
    ARGUMENT = ("<parameter=", "</parameter>")
    HAS_LINES = True
    BETWEEN = "\n"

    @classmethod
    def call_form(cls, tool: CallableTool) -> Node:
        return cls._call_form(f"<tool_call>\n<function={tool.name}>\n", tool, "</function>\n</tool_call>")

    @classmethod
    def _argument_form(cls, key: str, place: Place, is_string: bool) -> Node:
        return sequence(cls._value_form(f"<parameter={key}>", place, is_string), const("\n"))

    def _key(self, tool: str) -> Steps[tuple[str, bool]]:
        key = (yield from self._until(">")).strip()
        yield from self._expect(">")
        return key, self._tools.is_string(tool, key)
