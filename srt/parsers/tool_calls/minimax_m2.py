"""MiniMax M2: `<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>`."""

from __future__ import annotations

from srt.parsers.argument_forms import Place
from srt.parsers.base_parser import Steps
from srt.parsers.forms import CallableTool, Node, const, sequence
from srt.parsers.tool_calls.markup import MarkupFormat


class MiniMaxM2(MarkupFormat):
    BEGINS = ("<minimax:tool_call>", '<invoke name="')
    AROUND = (("<minimax:tool_call>",), ("</minimax:tool_call>",))
    CALL = ('<invoke name="', '">', "</invoke>")
    ARGUMENT = ('<parameter name="', "</parameter>")
    SECTION = ("<minimax:tool_call>\n", "</minimax:tool_call>")

    @classmethod
    def call_form(cls, tool: CallableTool) -> Node:
        return cls._call_form(f'<invoke name="{tool.name}">\n', tool, "</invoke>\n")

    @classmethod
    def _argument_form(cls, key: str, place: Place, is_string: bool) -> Node:
        return sequence(cls._value_form(f'<parameter name="{key}">', place, is_string), const("\n"))

    def _key(self, tool: str) -> Steps[tuple[str, bool]]:
        key = yield from self._until('">')
        yield from self._expect('">')
        return key, self._tools.is_string(tool, key)
