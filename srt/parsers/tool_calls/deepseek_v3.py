"""DeepSeek V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>f`, the arguments in a block of Markdown, `<｜tool▁call▁end｜>`."""

from __future__ import annotations

from srt.parsers.base_parser import Steps
from srt.parsers.call_format import CallFormat
from srt.parsers.forms import CallableTool, Node, tag

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeekV3(CallFormat):
    BEGINS = (CALLS_BEGIN, CALL_BEGIN)
    SECTION = (CALLS_BEGIN, CALLS_END)
    BETWEEN = "\n"

    @classmethod
    def call_form(cls, tool: CallableTool) -> Node:
        begin = f"{CALL_BEGIN}function{SEPARATOR}{tool.name}\n```json\n"
        return tag(begin, tool.arguments, f"\n```{CALL_END}")

    def _part(self) -> Steps[None]:
        yield from self._accept(CALLS_BEGIN)
        yield from self._space()
        yield from self._expect(CALL_BEGIN)
        name = yield from self._name()
        yield from self._space()
        yield from self._begin_json_call(name)
        yield from self._skip("```")
        yield from self._skip(CALL_END)
        yield from self._skip(CALLS_END)

    def _name(self) -> Steps[str]:
        """Read the name and all that stands before the arguments."""
        yield from self._expect("function")
        yield from self._expect(SEPARATOR)
        name = yield from self._until("\n")
        yield from self._space()
        yield from self._expect("```json")
        return name.strip()
