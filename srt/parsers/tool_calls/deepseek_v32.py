"""DeepSeek V3.2: `<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter></｜DSML｜invoke>` between
`<｜DSML｜function_calls>` and its end. `string` says whether a value is a string or JSON."""

from __future__ import annotations

from srt.parsers.format import Steps
from srt.parsers.tool_calls.markup import MarkupFormat


class DeepSeekV32(MarkupFormat):
    BEGINS = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="')
    AROUND = (
        ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
        ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    )
    CALL = ('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>")
    ARGUMENT = ('<｜DSML｜parameter name="', "</｜DSML｜parameter>")

    def _key(self, tool: str) -> Steps[tuple[str, bool]]:
        key = yield from self._until('"')
        yield from self._expect('"')
        yield from self._space()
        kind = yield from self._expect('string="true">', 'string="false">', ">")
        return key, kind == 'string="true">' or (kind == ">" and self._tools.is_string(tool, key))
