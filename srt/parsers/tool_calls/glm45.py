"""GLM 4.5 to 4.7: `<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`, with or without line breaks between them."""

from __future__ import annotations

from srt.parsers.argument_forms import Place
from srt.parsers.base_parser import Steps
from srt.parsers.forms import CallableTool, Node, const, regex, sequence, tag
from srt.parsers.tool_calls.markup import MarkupFormat

_MAY_BREAK = regex(r"\n?")  # GLM 4.7 writes no line breaks


class Glm45(MarkupFormat):
    BEGINS = ("<tool_call>",)
    CALL = ("<tool_call>", "", "</tool_call>")
    ARGUMENT = ("<arg_key>", "</arg_value>")
    BETWEEN = "\n"

    @classmethod
    def call_form(cls, tool: CallableTool) -> Node:
        if tool.parameters is None:
            return tag(f"<tool_call>{tool.name}", regex(r"([\n<](?s:.*))?", excludes=["</tool_call>"]), "</tool_call>")
        return tag(f"<tool_call>{tool.name}", sequence(_MAY_BREAK, cls._members_form(tool)), "</tool_call>")

    @classmethod
    def _argument_form(cls, key: str, place: Place, is_string: bool) -> Node:
        value = cls._value_form("<arg_value>", place, is_string)
        return sequence(const(f"<arg_key>{key}</arg_key>"), _MAY_BREAK, value, _MAY_BREAK)

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
