"""Parsers chosen by a chat template's markers."""

from __future__ import annotations

import json

import pytest

from srt.parsers.output_parser import REASONING_PARSERS, TOOL_CALL_PARSERS
from srt.parsers.templates import reasoning_parser_of, tool_call_parser_of
from srt.server_args import REASONING_PARSERS as REASONING_NAMES
from srt.server_args import TOOL_CALL_PARSERS as TOOL_CALL_NAMES
from srt.utils.checkpoint import SHIPPED_MODELS


def test_the_options_name_every_parser() -> None:
    assert sorted(TOOL_CALL_NAMES) == sorted(TOOL_CALL_PARSERS)
    assert sorted(REASONING_NAMES) == sorted(REASONING_PARSERS)


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("<|im_start|>{{ '<tool_call>' }} </think>", "hermes", "qwen3"),
        ("<tool_call>\n<function=example_function_name>\n<parameter=x>", "qwen3_coder", None),
        ("<|start|>assistant<|channel|>final<|message|>", "gpt-oss", "gpt-oss"),
        ("<｜Assistant｜></think> <｜tool▁calls▁begin｜> ```json", "deepseekv3", "deepseek-r1"),
        ("{% if not thinking %}<｜Assistant｜></think><｜tool▁calls▁begin｜>", "deepseekv31", "deepseek-v3"),
        ("<tool_call>{function-name}<arg_key>{k}</arg_key> </think>", "glm45", "glm45"),
        ("<|tool_calls_section_begin|>", "kimi_k2", None),
        ("<minimax:tool_call><invoke name=></think>", "minimax-m2", "minimax"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [", "mistral", None),
        ('<|start_header_id|> \'{"name": "\' \'"parameters": \'', "llama3", None),
        ("<|im_start|>", None, None),
    ],
)
def test_markers_tell_the_parsers(template: str, calls: str | None, reasoning: str | None) -> None:
    assert (tool_call_parser_of(template), reasoning_parser_of(template)) == (calls, reasoning)


def test_the_shipped_model_calls_tools_and_does_not_reason() -> None:
    template = json.loads((SHIPPED_MODELS / "tiny" / "tokenizer_config.json").read_text("utf-8"))["chat_template"]
    assert (tool_call_parser_of(template), reasoning_parser_of(template)) == ("hermes", None)
