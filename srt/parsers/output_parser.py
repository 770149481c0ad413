"""The parser of a whole output: first its reasoning, then, in the text behind that, calls of tools."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from srt.parsers.base_parser import Format
from srt.parsers.call_format import CallFormat
from srt.parsers.events import Event, Text, merged
from srt.parsers.reasoning.think_tags import Tags, ThinkTags
from srt.parsers.tool_calls.deepseek_v3 import DeepSeekV3
from srt.parsers.tool_calls.deepseek_v31 import DeepSeekV31
from srt.parsers.tool_calls.deepseek_v32 import DeepSeekV32
from srt.parsers.tool_calls.gemma4 import Gemma4
from srt.parsers.tool_calls.glm45 import Glm45
from srt.parsers.tool_calls.harmony import Harmony
from srt.parsers.tool_calls.hermes import Hermes
from srt.parsers.tool_calls.kimi_k2 import KimiK2
from srt.parsers.tool_calls.llama3 import Llama3
from srt.parsers.tool_calls.minimax_m2 import MiniMaxM2
from srt.parsers.tool_calls.mistral import Mistral
from srt.parsers.tool_calls.pythonic import Pythonic
from srt.parsers.tool_calls.qwen3_coder import Qwen3Coder
from srt.parsers.tools import Tools

TOOL_CALL_PARSERS: Mapping[str, type[CallFormat]] = MappingProxyType(
    {
        "hermes": Hermes,
        **dict.fromkeys(("qwen", "qwen25"), Hermes),
        "qwen3_coder": Qwen3Coder,
        **dict.fromkeys(("llama3", "llama3_json"), Llama3),
        "mistral": Mistral,
        "pythonic": Pythonic,
        **dict.fromkeys(("deepseekv3", "deepseek_v3"), DeepSeekV3),
        **dict.fromkeys(("deepseekv31", "deepseek_v31"), DeepSeekV31),
        "deepseekv32": DeepSeekV32,
        **dict.fromkeys(("glm45", "glm47"), Glm45),
        "kimi_k2": KimiK2,
        **dict.fromkeys(("gpt-oss", "openai"), Harmony),
        **dict.fromkeys(("minimax-m2", "minimax_m2"), MiniMaxM2),
        "gemma4": Gemma4,
    }
)

_THINK: Tags = ("<think>", "</think>")
_KIMI: tuple[Tags, ...] = (_THINK, ("◁think▷", "◁/think▷"))
HARMONY = ("gpt-oss", "openai_gptoss", "openai")
# Their tags; harmony has none, as its parser reads channels.
REASONING_PARSERS: Mapping[str, tuple[Tags, ...]] = MappingProxyType(
    {
        "qwen3": (_THINK,),
        **dict.fromkeys(("deepseek-r1", "deepseek_r1"), (_THINK,)),
        "deepseek-v3": (_THINK,),
        "glm45": (_THINK,),
        "kimi": _KIMI,
        **dict.fromkeys(("gpt-oss", "openai_gptoss"), ()),
        "minimax": (_THINK,),
    }
)
# The templates of these models open the reasoning, so that their output lacks the first tag. This is for texts without their prompts;
# where there is a prompt, `is_left_open` looks at it.
OPENED_BY_PROMPT = frozenset(("deepseek-r1", "deepseek_r1", "minimax"))


class OutputParser:
    """A parser of one output. Feed it with `push`, and `finish` it once."""

    def __init__(self, tool_call_parser: str | None, reasoning_parser: str | None, tools: Tools, is_open: bool) -> None:
        """Parse calls and reasoning in the forms of these names, or neither.

        is_open: the output begins within the reasoning.
        """
        self._first: Format | None = None
        self._second: Format | None = None
        if tool_call_parser in HARMONY or reasoning_parser in HARMONY:
            self._second = Harmony(tools)
            return
        if reasoning_parser is not None:
            self._first = ThinkTags(REASONING_PARSERS[reasoning_parser], is_open)
        if tool_call_parser is not None:
            self._second = TOOL_CALL_PARSERS[tool_call_parser](tools)

    def push(self, piece: str) -> list[Event]:
        """Return the events that the text so far decides."""
        return self._behind_reasoning([Text(piece, piece)] if self._first is None else self._first.push(piece))

    def finish(self) -> list[Event]:
        """Return the last events: no text follows."""
        events = [] if self._first is None else self._behind_reasoning(self._first.finish())
        return events if self._second is None else events + self._second.finish()

    def parse(self, text: str) -> list[Event]:
        """Return the parts of a whole output."""
        return merged(self.push(text) + self.finish())

    def _behind_reasoning(self, events: list[Event]) -> list[Event]:
        if self._second is None:
            return events
        parsed: list[Event] = []
        for event in events:
            parsed += self._second.push(event.text) if isinstance(event, Text) else [event]
        return parsed


def markers_of(tool_call_parser: str | None, reasoning_parser: str | None) -> tuple[str, ...]:
    """Return the texts by which these parsers know calls and reasoning: an output without them has neither."""
    calls = () if tool_call_parser is None else TOOL_CALL_PARSERS[tool_call_parser].BEGINS
    if reasoning_parser in HARMONY:
        return (*calls, *Harmony.BEGINS)
    tags = () if reasoning_parser is None else REASONING_PARSERS[reasoning_parser]
    return (*calls, *(tag for pair in tags for tag in pair))


def is_left_open(reasoning_parser: str, prompt: str, continued: str | None = None) -> bool:
    """Return whether an answer to this prompt begins within the reasoning.

    continued: the text at the prompt's end that the answer goes on with, if there is one.
    """
    tags = REASONING_PARSERS[reasoning_parser]
    if continued is not None:
        return any(continued.rfind(begin) > continued.rfind(end) for begin, end in tags)
    return prompt.rstrip().endswith(tuple(begin for begin, _ in tags))
