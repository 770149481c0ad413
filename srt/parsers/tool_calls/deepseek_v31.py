"""DeepSeek V3.1: `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>`."""

from __future__ import annotations

from srt.parsers.format import Steps
from srt.parsers.tool_calls.deepseek_v3 import SEPARATOR, DeepSeekV3


class DeepSeekV31(DeepSeekV3):
    def _name(self) -> Steps[str]:
        name = yield from self._until(SEPARATOR)
        yield from self._expect(SEPARATOR)
        return name.strip()
