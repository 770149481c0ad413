"""Qwen3-Coder: `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, each value on lines of its own."""

from __future__ import annotations

from srt.parsers.format import Steps
from srt.parsers.tool_calls.markup import MarkupFormat


class Qwen3Coder(MarkupFormat):
    BEGINS = ("<tool_call>", "<function=")
    AROUND = (("<tool_call>",), ("</tool_call>",))
    CALL = ("<function=", ">", "</function>")
    ARGUMENT = ("<parameter=", "</parameter>")
    HAS_LINES = True

    def _key(self, tool: str) -> Steps[tuple[str, bool]]:
        key = (yield from self._until(">")).strip()
        yield from self._expect(">")
        return key, self._tools.is_string(tool, key)
