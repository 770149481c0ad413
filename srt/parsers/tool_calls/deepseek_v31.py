"""DeepSeek V3.1: `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>`."""

from __future__ import annotations

from srt.parsers.base_parser import Steps
from srt.parsers.forms import CallableTool, Node, tag
from srt.parsers.tool_calls.deepseek_v3 import CALL_BEGIN, CALL_END, SEPARATOR, DeepSeekV3


class DeepSeekV31(DeepSeekV3):
    BETWEEN = ""

    @classmethod
    def call_form(cls, tool: CallableTool) -> Node:
        return tag(f"{CALL_BEGIN}{tool.name}{SEPARATOR}", tool.arguments, CALL_END)

    def _name(self) -> Steps[str]:
        name = yield from self._until(SEPARATOR)
        yield from self._expect(SEPARATOR)
        return name.strip()
