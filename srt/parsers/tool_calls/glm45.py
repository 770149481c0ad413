"""GLM 4.5 to 4.7: `<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`, with or without line breaks between them."""

from __future__ import annotations

from srt.parsers.format import Steps
from srt.parsers.tool_calls.markup import MarkupFormat


class Glm45(MarkupFormat):
    BEGINS = ("<tool_call>",)
    CALL = ("<tool_call>", "", "</tool_call>")
    ARGUMENT = ("<arg_key>", "</arg_value>")

    def _part(self) -> Steps[None]:
        yield from self._expect("<tool_call>")
        yield from self._space()
        name = (yield from self._until("\n", "<arg_key>", "</tool_call>")).strip()
        self._begin_call(name)
        yield from self._members(name)
        self._end_call()

    def _key(self, tool: str) -> Steps[tuple[str, bool]]:
        key = (yield from self._until("</arg_key>")).strip()
        yield from self._expect("</arg_key>")
        yield from self._space()
        yield from self._expect("<arg_value>")
        return key, self._tools.is_string(tool, key)
