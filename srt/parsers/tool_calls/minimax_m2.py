"""MiniMax M2: `<minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>`."""

from __future__ import annotations

from srt.parsers.format import Steps
from srt.parsers.tool_calls.markup import MarkupFormat


class MiniMaxM2(MarkupFormat):
    BEGINS = ("<minimax:tool_call>", '<invoke name="')
    AROUND = (("<minimax:tool_call>",), ("</minimax:tool_call>",))
    CALL = ('<invoke name="', '">', "</invoke>")
    ARGUMENT = ('<parameter name="', "</parameter>")

    def _key(self, tool: str) -> Steps[tuple[str, bool]]:
        key = yield from self._until('">')
        yield from self._expect('">')
        return key, self._tools.is_string(tool, key)
