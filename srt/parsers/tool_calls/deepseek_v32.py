"""DeepSeek V3.2: `<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter></｜DSML｜invoke>` between
`<｜DSML｜function_calls>` and its end. `string` says whether a value is a string or JSON."""

from __future__ import annotations

from srt.parsers.argument_forms import Place
from srt.parsers.base_parser import Steps
from srt.parsers.forms import CallableTool, Node, const, sequence
from srt.parsers.tool_calls.markup import MarkupFormat


class DeepSeekV32(MarkupFormat):
    BEGINS = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="')
    AROUND = (
        ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    )
    CALL = ('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>")
    ARGUMENT = ('<｜DSML｜parameter name="', "</｜DSML｜parameter>")
    SECTION = ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>")

    @classmethod
    def call_form(cls, tool: CallableTool) -> Node:
        return cls._call_form(f'<｜DSML｜invoke name="{tool.name}">\n', tool, "</｜DSML｜invoke>\n")

    @classmethod
    def _argument_form(cls, key: str, place: Place, is_string: bool) -> Node:
        begin = f'<｜DSML｜parameter name="{key}" string="{str(is_string).lower()}">'
        return sequence(cls._value_form(begin, place, is_string), const("\n"))

    def _key(self, tool: str) -> Steps[tuple[str, bool]]:
        key = yield from self._until('"')
        yield from self._expect('"')
        yield from self._space()
        kind = yield from self._expect('string="true">', 'string="false">', ">")
        return key, kind == 'string="true">' or (kind == ">" and self._tools.is_string(tool, key))
