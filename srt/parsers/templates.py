"""Which parsers a model needs, told by the markers in its chat template."""

from __future__ import annotations

# The first row whose markers are all in the template counts.
_TOOL_CALLS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|start|>"), "gpt-oss"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("｜DSML｜",), "deepseekv32"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseekv3"),
    (("<｜tool▁calls▁begin｜>",), "deepseekv31"),
    (("<minimax:tool_call>",), "minimax-m2"),
    (("<arg_key>",), "glm45"),
    (("<function=",), "qwen3_coder"),
    (("<|tool_call>",), "gemma4"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>",), "hermes"),
    (("<|header_start|>", "[func_name"), "pythonic"),
    (("<|start_header_id|>", '"parameters": '), "llama3"),
)
_REASONING: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|start|>"), "gpt-oss"),
    (("◁think▷",), "kimi"),
    (("</think>", "<|tool_calls_section_begin|>"), "kimi"),
    (("</think>", "<minimax:tool_call>"), "minimax"),
    (("</think>", "<arg_key>"), "glm45"),
    (("</think>", "<｜Assistant｜>", "thinking"), "deepseek-v3"),
    (("</think>", "<｜Assistant｜>"), "deepseek-r1"),
    (("</think>",), "qwen3"),
)


def tool_call_parser_of(template: str) -> str | None:
    """Return the name of the parser for the form of calls in this template; None if it is not known."""
    return _first(_TOOL_CALLS, template)


def reasoning_parser_of(template: str) -> str | None:
    """Return the name of the parser for the reasoning that this template knows; None if there is none."""
    return _first(_REASONING, template)


def _first(rows: tuple[tuple[tuple[str, ...], str], ...], template: str) -> str | None:
    return next((name for markers, name in rows if all(marker in template for marker in markers)), None)
