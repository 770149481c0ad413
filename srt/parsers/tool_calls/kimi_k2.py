"""Kimi K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>`; what stands before the arguments is
the call's id."""

from __future__ import annotations

from srt.parsers.base_parser import Steps
from srt.parsers.call_format import CallFormat
from srt.parsers.forms import CallableTool, Node, const, regex, sequence, tag

_CALLS_BEGIN, _CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL_BEGIN, _CALL_END, _ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"


class KimiK2(CallFormat):
    BEGINS = (_CALLS_BEGIN, _CALL_BEGIN)
    SECTION = (_CALLS_BEGIN, _CALLS_END)

    @classmethod
    def call_form(cls, tool: CallableTool) -> Node:
        inner = sequence(regex("0|[1-9][0-9]{0,3}"), const(_ARGUMENTS), tool.arguments)
        return tag(f"{_CALL_BEGIN}functions.{tool.name}:", inner, _CALL_END)

    def _part(self) -> Steps[None]:
        yield from self._accept(_CALLS_BEGIN)
        yield from self._space()
        yield from self._expect(_CALL_BEGIN)
        call_id = (yield from self._until(_ARGUMENTS)).strip()
        yield from self._expect(_ARGUMENTS)
        yield from self._space()
        yield from self._begin_json_call(call_id.removeprefix("functions.").rpartition(":")[0], call_id)
        yield from self._skip(_CALL_END)
        yield from self._skip(_CALLS_END)
