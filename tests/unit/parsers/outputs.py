"""Outputs of models for tests of parsers: calls written in every format, and what random damage makes of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from srt.parsers.tools import Tools

Call = tuple[str, dict[str, Any]]

SCHEMAS: Mapping[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "factor": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "list": {"type": "array"},
            "more": {"$ref": "#/$defs/more"},
        },
        "$defs": {"more": {"type": "object"}},
    },
    "now": {"type": "object", "properties": {}},
}
TOOLS = Tools(SCHEMAS)
TEXTS = (
    "Berlin",
    "",
    'a "b" \\ c',
    "two\nlines",
    "日本 🎉",
    "<b> & </b>",
    "{x: [1]}",
    "it's",
    "a=1, b)",
    " space ",
    "5",
    "null",
)


def random_call(rng: random.Random) -> Call:
    if rng.random() < 0.2:
        return "now", {}
    values: dict[str, Any] = {
        "city": rng.choice(TEXTS),
        "days": rng.randint(-5, 10**6),
        "exact": rng.random() < 0.5,
        "factor": rng.choice((None, 0.5, 3, -1e30)),
        "list": rng.choice(([], [1, "x", [None]], [{"a": "b,]"}])),
        "more": rng.choice(({}, {"k": "v}", "l": {"m": [True, "t"]}})),
    }
    names = rng.sample(sorted(values), rng.randint(0, len(values)))
    return "get_weather", {name: values[name] for name in names}


def _object(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_object(*call)}\n</tool_call>" for call in calls)


def _llama3(calls: Sequence[Call]) -> str:
    return "; ".join(_object(*call).replace('"arguments"', '"parameters"') for call in calls)


def _mistral(calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS] [" + ", ".join(_object(*call) for call in calls) + "]"


def _mistral_v11(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def _pythonic(calls: Sequence[Call]) -> str:
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in a.items())})" for name, a in calls]
    return "[" + ", ".join(written) + "]"


def _deepseek_v3(calls: Sequence[Call]) -> str:
    one = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
    inner = "\n".join(one.format(name, json.dumps(arguments)) for name, arguments in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    one = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    inner = "".join(one.format(name, json.dumps(arguments)) for name, arguments in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def _bare(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _deepseek_v32(calls: Sequence[Call]) -> str:
    text = "<｜DSML｜function_calls>\n"
    for name, arguments in calls:
        text += f'<｜DSML｜invoke name="{name}">\n'
        for key, value in arguments.items():
            kind = str(isinstance(value, str)).lower()
            text += f'<｜DSML｜parameter name="{key}" string="{kind}">{_bare(value)}</｜DSML｜parameter>\n'
        text += "</｜DSML｜invoke>\n"
    return text + "</｜DSML｜function_calls>"


def _qwen3_coder(calls: Sequence[Call]) -> str:
    text = ""
    for name, arguments in calls:
        text += f"<tool_call>\n<function={name}>\n"
        text += "".join(f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in arguments.items())
        text += "</function>\n</tool_call>\n"
    return text


def _glm45(calls: Sequence[Call]) -> str:
    text = ""
    for name, arguments in calls:
        pairs = [
            f"<arg_key>{key}</arg_key>\n<arg_value>{_bare(value)}</arg_value>\n" for key, value in arguments.items()
        ]
        text += f"<tool_call>{name}\n{''.join(pairs)}</tool_call>\n"
    return text


def _glm47(calls: Sequence[Call]) -> str:
    return _glm45(calls).replace("\n<arg_", "<arg_").replace("\n</tool_call>", "</tool_call>")


def _kimi_k2(calls: Sequence[Call]) -> str:
    one = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    inner = "".join(one.format(name, index, json.dumps(arguments)) for index, (name, arguments) in enumerate(calls))
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _harmony(calls: Sequence[Call]) -> str:
    one = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
    return "<|start|>assistant".join(one.format(name, json.dumps(arguments)) for name, arguments in calls)


def _minimax_m2(calls: Sequence[Call]) -> str:
    text = "<minimax:tool_call>\n"
    for name, arguments in calls:
        text += f'<invoke name="{name}">\n'
        text += "".join(f'<parameter name="{key}">{_bare(value)}</parameter>\n' for key, value in arguments.items())
        text += "</invoke>\n"
    return text + "</minimax:tool_call>"


def _gemma_value(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{_gemma_value(member)}" for key, member in value.items()) + "}"
        case list():
            return "[" + ",".join(map(_gemma_value, value)) + "]"
        case _:
            return json.dumps(value)


def _gemma4(calls: Sequence[Call]) -> str:
    return "".join(f"<|tool_call>call:{name}{_gemma_value(arguments)}<tool_call|>" for name, arguments in calls)


# A name of each parser -> how its calls can be written.
WRITERS: Mapping[str, Sequence[Callable[[Sequence[Call]], str]]] = {
    "hermes": (_hermes,),
    "qwen3_coder": (_qwen3_coder,),
    "llama3": (_llama3, lambda calls: "<|python_tag|>" + _llama3(calls)),
    "mistral": (_mistral, _mistral_v11),
    "pythonic": (_pythonic, lambda calls: f"<|python_start|>{_pythonic(calls)}<|python_end|>"),
    "deepseekv3": (_deepseek_v3,),
    "deepseekv31": (_deepseek_v31,),
    "deepseekv32": (_deepseek_v32,),
    "glm45": (_glm45, _glm47),
    "kimi_k2": (_kimi_k2,),
    "gpt-oss": (_harmony,),
    "minimax-m2": (_minimax_m2,),
    "gemma4": (_gemma4,),
}
MARKERS = sorted(
    {
        piece
        for writers in WRITERS.values()
        for writer in writers
        for piece in writer([("now", {}), ("get_weather", {"city": "x", "days": 1})]).replace(">", ">\0").split("\0")
    }
    | {
        "<think>",
        "</think>",
        "◁think▷",
        "◁/think▷",
        "{",
        "}",
        '"',
        "\\",
        "\\u12",
        "\x00",
        "\x85",
        "[",
        "(",
        ")",
        ",",
        "\n",
    }
    | {
        "<|end|>",
        "<|channel|>analysis<|message|>",
        "<|start|>assistant",
        "[CALL_ID]",
        "'",
        "1e999",
        "-",
        "🎉",
        "get_weather",
    }
)


def random_output(rng: random.Random, parser: str) -> str:
    """Return valid calls with text around them, damaged, truncated, or nothing but markers."""
    if rng.random() < 0.2:
        return "".join(rng.choices(MARKERS, k=rng.randint(0, 30)))
    calls = [random_call(rng) for _ in range(rng.randint(1, 3))]
    text = rng.choice(("", "", "<think>\nwell\n</think>\n\n", "I look it up.\n\n")) + rng.choice(WRITERS[parser])(calls)
    text += rng.choice(("", "", " ", "\nDone."))
    for _ in range(rng.choice((0, 0, 1, 2, 5))):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice((*MARKERS, "")) + text[at + rng.randint(0, 3) :]
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.3 else text


def random_pieces(rng: random.Random, text: str) -> list[str]:
    """Return the text in pieces of random lengths, some of them empty."""
    pieces = []
    longest = rng.choice((1, 5, 20, 20, 60, 60))
    while text:
        count = rng.randint(0, longest)
        pieces.append(text[:count])
        text = text[count:]
    return pieces
