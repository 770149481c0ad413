"""The forms of calls that answers are held to: they allow what models write, and whatever they allow is read as calls that validate."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from srt.constrained.compile_process import try_constraint
from srt.constrained.constraint import tag_constraint
from srt.constrained.matcher import Grammars, Matcher
from srt.constrained.vocabulary import Vocabulary
from srt.entrypoints.openai.tool_choice import ToolChoice, demanded_calls, strict_calls
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.parsers.events import CallArguments, CallBegin, Event, Text
from srt.parsers.output_parser import OutputParser
from srt.parsers.tools import Tools
from srt.sampling.parameter_checks import ParameterError
from srt.utils.tokenizer import Tokenizer
from tests.support.random_schemas import SchemaGenerator, draw_answer
from tests.support.work import num_calls, peak_bytes
from tests.unit.parsers.outputs import SCHEMAS, WRITERS, Call, random_call

CLOSED = {name: {**schema, "additionalProperties": False} for name, schema in SCHEMAS.items()}
REQUIRED = ToolChoice("required")
ONE_CALL_ONLY = ("gpt-oss",)
NUM_CALLS = 40


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool(name, schema) for name, schema in CLOSED.items()]


def new_matcher(
    vocabulary: Vocabulary, parser: str, tools: Any = TOOLS, choice: ToolChoice = REQUIRED, several: bool = True
) -> Matcher:
    grammars = Grammars(vocabulary)
    constraint = tag_constraint("tools", demanded_calls(parser, tools, choice, several))
    grammars.compile("key", try_constraint(constraint, vocabulary))
    return grammars.matcher("key")


class Judge:
    """Says whether a form allows a text."""

    def __init__(self, vocabulary: Vocabulary, tokenizer: Tokenizer, *arguments: Any, **more: Any) -> None:
        self._matcher = new_matcher(vocabulary, *arguments, **more)
        self._tokenizer = tokenizer

    def allows(self, text: str) -> bool:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        num_accepted = self._matcher.accept_all(ids)
        is_allowed = num_accepted == len(ids) and self._matcher.may_end
        self._matcher.rollback(num_accepted)
        return is_allowed


def in_order(call: Call) -> Call:
    """The call with its arguments in the schema's order."""
    name, arguments = call
    return name, {key: arguments[key] for key in SCHEMAS[name]["properties"] if key in arguments}


def written(parser: str, writer: Any, calls: Sequence[Call]) -> str:
    """The calls as the form wants them: without line breaks behind the last one, and without what ends the answer."""
    text: str = writer(calls).rstrip("\n").removesuffix("<|call|>")
    if parser == "pythonic":  # whose form has values as JSON
        inner = [f"{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in a.items())})" for name, a in calls]
        text = "[" + ", ".join(inner) + "]"
    return text


def events_of(parser: str, tools: Any, text: str) -> list[Event]:
    described = Tools({one["function"]["name"]: one["function"].get("parameters") for one in tools})
    return OutputParser(parser, None, described, is_open=False).parse(text)


def calls_of(events: Sequence[Event]) -> list[tuple[str, Any]]:
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, CallBegin):
            calls.append([event.name, ""])
        elif isinstance(event, CallArguments):
            calls[-1][1] += event.json
    return [(name, json.loads(arguments)) for name, arguments in calls]


def is_writable(parser: str, call: Call) -> bool:
    """Whether the form writes the call as the tests' writers do: that of gemma4 has values without a schema as JSON."""
    return parser != "gemma4" or not (call[1].get("more") or call[1].get("list"))


@pytest.mark.parametrize("parser", WRITERS)
def test_calls_as_models_write_them_are_allowed(vocabulary: Vocabulary, tokenizer: Tokenizer, parser: str) -> None:
    rng = random.Random(parser)
    judge = Judge(vocabulary, tokenizer, parser)
    only_one = Judge(vocabulary, tokenizer, parser, several=False)
    most = 1 if parser in ONE_CALL_ONLY else 3
    for writer in WRITERS[parser]:
        if writer([("now", {})]).startswith(("<|python_tag|>", "<|python_start|>")):
            continue  # the form begins with the call itself
        for _ in range(NUM_CALLS):
            calls = [in_order(random_call(rng)) for _ in range(rng.randint(1, most))]
            if all(is_writable(parser, call) for call in calls):
                text = written(parser, writer, calls)
                assert judge.allows(text), text
                assert only_one.allows(text) is (len(calls) == 1), text


@pytest.mark.parametrize("parser", WRITERS)
def test_other_names_and_arguments_are_not(vocabulary: Vocabulary, tokenizer: Tokenizer, parser: str) -> None:
    judge = Judge(vocabulary, tokenizer, parser)
    named = Judge(vocabulary, tokenizer, parser, TOOLS, ToolChoice("named", "now"))
    writer = WRITERS[parser][0]
    right = written(parser, writer, [("get_weather", {"city": "Bonn", "days": 3})])
    assert judge.allows(right) and not named.allows(right)
    assert named.allows(written(parser, writer, [("now", {})]))
    wrong: list[Call] = [
        ("get_news", {"city": "Bonn", "days": 3}),
        ("get_weather", {"town": "Bonn", "days": 3}),
        ("get_weather", {"city": "Bonn", "days": "three"}),
        ("get_weather", {"city": "Bonn", "days": [3]}),
        ("get_weather", {"days": 3, "city": "Bonn"}),
        ("get_weather", {"city": "Bonn", "days": 3, "exact": None}),
    ]
    for call in wrong:
        assert not judge.allows(written(parser, writer, [call])), call
    for text in ("", "Hello.", right[:-1], right[1:], f"{right}!", f"Well: {right}"):
        assert not judge.allows(text), text


MARKUP = ("qwen3_coder", "glm45", "minimax-m2", "deepseekv32")
REFUSED: list[tuple[Sequence[str], Any, str]] = [
    (list(WRITERS), {"not": {}}, "tools[0].function.parameters has the keyword not at #/not"),
    (MARKUP, {"anyOf": [{}]}, "tools[0].function.parameters has the keyword anyOf, which cannot be enforced in this"),
    (MARKUP, {"properties": {"<": {}}}, "tools[0].function.parameters.properties has a name with other characters"),
    (("pythonic",), {"properties": {"1": {}}}, "tools[0].function.parameters.properties.1 has a name that is no name"),
    (
        MARKUP,
        {"properties": {"x": {"type": "string", "format": "uuid"}}},
        "tools[0].function.parameters.properties.x has the keyword format, which",
    ),
    (
        MARKUP,
        {"properties": {"x": {"type": "string", "pattern": "^a|b$"}}},
        "tools[0].function.parameters.properties.x has the pattern '^a|b$' with an anchor within it",
    ),
    (MARKUP, {"properties": {"x": {"$ref": "#"}}}, "tools[0].function.parameters refers to the whole schema, which"),
]


@pytest.mark.parametrize(("parsers", "parameters", "sentence"), REFUSED, ids=range(len(REFUSED)))
def test_what_a_form_cannot_enforce_is_refused_by_name(parsers: Sequence[str], parameters: Any, sentence: str) -> None:
    for parser in parsers:
        with pytest.raises(RequestError) as caught:
            demanded_calls(parser, [tool("f", parameters)], REQUIRED, True)
        assert caught.value.message.startswith(sentence) and caught.value.parameter == "tools"
    with pytest.raises(RequestError, match=r"^tools\[0\].function.name may have only letters"):
        demanded_calls("hermes", [tool("f(", parameters)], REQUIRED, True)


class FreeJudge(Judge):
    """Says whether an answer under `tool_choice: auto` is allowed, where get_weather alone is strict."""

    def __init__(self, vocabulary: Vocabulary, tokenizer: Tokenizer, parser: str, level: str = "auto") -> None:
        form = strict_calls(parser, TOOLS, {"get_weather"}, level, True)
        assert form is not None
        grammars = Grammars(vocabulary)
        grammars.compile("key", try_constraint(tag_constraint("tools", form), vocabulary))
        self._matcher = grammars.matcher("key")
        self._tokenizer = tokenizer


@pytest.mark.parametrize("parser", WRITERS)
def test_a_strict_tool_is_enforced_where_its_call_begins(
    vocabulary: Vocabulary, tokenizer: Tokenizer, parser: str
) -> None:
    judge, strictest = FreeJudge(vocabulary, tokenizer, parser), FreeJudge(vocabulary, tokenizer, parser, "parameter")
    writer = WRITERS[parser][0]
    final = "<|channel|>final<|message|>" if parser == "gpt-oss" else ""
    free = [f"{final}Hello, 3 < 5!", f"{final} Well "]
    right = written(parser, writer, [("get_weather", {"city": "Bonn", "days": 3})])
    loose = written(parser, writer, [("now", {"zone": 1})])
    unknown = written(parser, writer, [("get_news", {})])
    wrong = [
        written(parser, writer, [("get_weather", {"city": "Bonn", "days": [3]})]),
        written(parser, writer, [("get_weather", {"town": "Bonn"})]),
        unknown,
        right[:-1],
    ]
    for text in (*free, right, loose):
        assert judge.allows(text), text
    for text in wrong:
        assert not judge.allows(text), text
    assert strictest.allows(right) and not strictest.allows(loose)
    if parser not in ("llama3", "pythonic", "gpt-oss"):  # whose calls are the whole answer
        assert judge.allows(f"Well: {right}") and not judge.allows(f"Well: {wrong[0]}")


def test_no_form_is_enforced_unasked() -> None:
    assert strict_calls("hermes", TOOLS, (), "auto", True) is None
    assert strict_calls("hermes", TOOLS, (), "function", True) is not None


def random_junk(rng: random.Random, depth: int = 2) -> Any:
    """A value that need not be a JSON Schema, with the keywords that forms look at."""
    values: list[Any] = [
        None,
        True,
        False,
        0,
        -1,
        2.5,
        1 << 70,
        "",
        "a(b",
        "#",
        "#/$defs/a",
        "string",
        "object",
        [],
        {},
    ]
    if depth and rng.random() < 0.7:
        inner = [random_junk(rng, depth - 1) for _ in range(rng.randint(0, 3))]
        if rng.random() < 0.3:
            return inner
        keywords = "type properties required enum const anyOf oneOf allOf pattern minLength items $ref $defs".split()
        return dict(zip(rng.sample([*keywords, "additionalProperties", "a"], len(inner)), inner, strict=True))
    return rng.choice([*values, ["string", "null"], [1, "a"], ["a", "a"]])


@pytest.mark.parametrize("parser", WRITERS)
def test_junk_is_refused_or_compiles_to_something(parser: str) -> None:
    rng = random.Random(parser)
    num_forms = 0
    for _ in range(1000):
        schema: dict[str, Any] = {"type": "object", "properties": {"a": random_junk(rng), "b": random_junk(rng)}}
        more = random_junk(rng, 1)
        schema |= more if isinstance(more, dict) else {}
        try:
            tag_constraint("tools", demanded_calls(parser, [tool("f", schema)], REQUIRED, True))
        except (RequestError, ParameterError):
            continue
        num_forms += 1
    assert num_forms > 20


MANY = {
    f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}, "b": {"$ref": f"#/$defs/d{i + 1}"}}}
    for i in range(40)
}
HOSTILE: list[Any] = [
    {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**MANY, "d40": {"type": "string"}}},
    {
        "properties": {"a": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}, "r": {"$ref": "#/$defs/n"}}}},
    },
    {"properties": {"a": {"type": "string", "allOf": [{"anyOf": [{"pattern": f"{i}"} for i in range(9)]}] * 9}}},
    {"properties": {f"p{i}": {"$ref": "#/$defs/d"} for i in range(2000)}, "$defs": {"d": {"enum": ["x" * 9000, 1]}}},
    {"enum": ["x" * 300_000]},
    {
        "properties": {f"p{i}": {"type": "string", "$ref": "#/$defs/d"} for i in range(2000)},
        "$defs": {"d": {"type": "string", "enum": ["x" * 100_000]}},
    },
    {"properties": {"a": {"type": "string", "pattern": "[" + r"\w" * 40}}},
    {"properties": {"a": {"type": "string", "pattern": "[" * 60_000}}},
]


@pytest.mark.parametrize("schema", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "gemma4", "pythonic"])
def test_hostile_parameters_take_little_work(parser: str, schema: Any) -> None:
    """Forms are made between the steps of streams."""

    def ask() -> None:
        with contextlib.suppress(RequestError, ParameterError):
            tag_constraint("tools", demanded_calls(parser, [tool("f", schema)], REQUIRED, True))

    # Both are several times what the largest of them takes, and less than it takes without the limit on a form's bytes.
    assert num_calls(ask) < 500_000
    assert peak_bytes(ask) < 32e6


def random_tools(seed: int) -> list[dict[str, Any]]:
    tools = []
    for index in range(2):
        schema = SchemaGenerator(2 * seed + index).schema()
        definitions = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
        properties = {"a": schema, "b-2": {"type": "string", "maxLength": 8}, "c_": SchemaGenerator(seed + 7).schema()}
        if "$defs" in properties["c_"]:
            del properties["c_"]
        required = random.Random(seed).sample(sorted(properties), 2)
        parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        tools.append(tool(f"tool_{index}", {**parameters, **definitions}))
    return tools


@pytest.mark.parametrize("parser", WRITERS)
def test_whatever_a_form_allows_is_read_as_calls_that_validate(
    vocabulary: Vocabulary, tokenizer: Tokenizer, parser: str
) -> None:
    num_finished = 0
    for seed in range(24):
        tools = random_tools(seed)
        matcher = new_matcher(vocabulary, parser, tools, several=bool(seed % 2))
        drawn = draw_answer(matcher, random.Random(seed))
        assert drawn.error is None, drawn.error
        if not drawn.is_finished:
            continue
        num_finished += 1
        text = tokenizer.decode(drawn.ids, skip_special_tokens=False)
        events = events_of(parser, tools, text)
        assert not any(event.text.strip() for event in events if isinstance(event, Text)), text
        calls = calls_of(events)
        assert calls and (seed % 2 or len(calls) == 1)
        for name, arguments in calls:
            (schema,) = [one["function"]["parameters"] for one in tools if one["function"]["name"] == name]
            jsonschema.Draft202012Validator(schema).validate(arguments)
    assert num_finished >= 6
