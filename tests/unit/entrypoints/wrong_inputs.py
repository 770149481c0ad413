"""Parameter × wrong value × endpoint: a table that follows from the schemas, for the fake engine and for the real one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from srt.entrypoints.anthropic.schema import MessagesBody
from srt.entrypoints.native import AbortBody
from srt.entrypoints.native_shapes import GenerateBody
from srt.entrypoints.openai.responses.schema import ResponsesBody
from srt.entrypoints.openai.schema import SAMPLING_NAMES, ChatBody, CompletionBody, StreamOptions
from srt.entrypoints.request_schema import RequestBody
from srt.sampling.foreign_fields import is_one_of
from srt.sampling.sampling_params import SamplingParams

USER = {"role": "user", "content": "hi"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    path: str
    schema: type[RequestBody]
    valid: dict[str, Any]
    """A body that is answered 200 with a token or two."""


ENDPOINTS = [
    Endpoint("/generate", GenerateBody, {"text": "hi", "sampling_params": {"max_new_tokens": 1}}),
    Endpoint("/v1/completions", CompletionBody, {"prompt": "hi", "max_tokens": 1}),
    Endpoint("/v1/chat/completions", ChatBody, {"messages": [USER], "max_tokens": 1}),
    Endpoint("/v1/responses", ResponsesBody, {"input": "hi", "max_output_tokens": 1}),
    Endpoint("/abort_request", AbortBody, {"rid": "nobody"}),
    Endpoint("/v1/messages", MessagesBody, {"messages": [USER], "max_tokens": 1}),
]

# One of each kind of JSON. What a field's type does not allow is a case.
KINDS: list[Any] = [
    "word",
    7,
    1.5,
    True,
    {"a": "b"},
    [],
    ["word"],
    [7],
    [1.5],
    [True],
    [None],
    [{}],
    [[[]]],
    ["word", 7],
]

# Right in type, wrong in value; by the engine's name. Every parameter is here or in UNBOUNDED.
LONG_ID, HUGE = 1 << 40, 10**9
OUT_OF_RANGE: dict[str, list[Any]] = {
    "routed_dp_rank": [-1, 1, HUGE],
    "max_new_tokens": [-1, HUGE, 1 << 62],
    "min_new_tokens": [-1, HUGE, 1 << 62],
    "temperature": [-0.1, 1e9, 1e300],
    "top_k": [-2, -(1 << 62)],
    "top_p": [0, -0.5, 1.5],
    "min_p": [-0.1, 1.1],
    "frequency_penalty": [-2.1, 2.1],
    "presence_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, 2.1],
    "n": [0, -1, HUGE],
    "stop": ["", [""], ["x"] * 40, "x" * 5000],
    "stop_token_ids": [[-1], [HUGE], [LONG_ID], [0] * 300],
    "stop_regex": ["(", "", ["a"] * 40, "a" * 300],
    "logit_bias": [{"x": 1}, {"1": 101}, {"1": "x"}, {"1": None}, {"1": True}, {"-1": 1}, {str(HUGE): 1}, {"1.5": 1}],
    "bad_words": ["", [""], "x" * 5000, ["x"] * 200],
    "sampling_seed": [-(1 << 63) - 1, 1 << 64],
    "top_logprobs_num": [-1, 1000],
    "logprob_start_len": [-2, HUGE],
    "token_ids_logprob": [[-1], [HUGE], [LONG_ID], [1] * 200],
    "logprobs": [-1, 1000],
    "top_logprobs": [-1, 1000],
    "best_of": [0, 5],
    "rid": ["", "x" * 1000],
    "request_id": ["", "x" * 1000],
    "truncate_prompt_tokens": [0, -2],
    "prompt_logprobs": [-1, 1000],
    "priority": [1 << 63, -HUGE],
    "cache_salt": ["x" * 1000],
    "lora_path": ["x" * 1000],
    "extra_key": ["x" * 1000],
    "text": [
        *["", [], [""], "word " * 5000],
        {"format": {"type": "grammar"}},
        {"format": {}},
        {"format": "text"},
        {"format": {"type": "json_schema"}},
        {"format": {"type": "text", "name": "x"}},
        {"verbosity": "high"},
        {"bogus": 1},
    ],
    "input_ids": [[], [[]], [-1], [HUGE], [LONG_ID], [1 << 63], [1] * 5000],
    "prompt": ["", [], [""], [[]], [-1], [HUGE], [LONG_ID], [1 << 63], [1] * 5000, "word " * 5000],
    "messages": [
        [],
        [{}],
        [{"role": "robot", "content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "input_audio"}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "tool"}],
        [{"role": "function", "content": "hi"}],
        [{**USER, "tool_calls": [{}]}],
        [{**USER, "role": "assistant", "tool_calls": [{}]}],
        [{**USER, "bogus": 1}],
        [{"role": "user", "content": "word " * 5000}],
    ],
    "tools": [[{}], [{"type": "function"}], [{"type": "function", "function": {"name": "f", "strict": 1}}]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
    "stop_sequences": [[""], ["x"] * 40, ["x" * 5000]],
    "system": [[], [{}], [{"type": "image"}]],
    "thinking": [{}, {"type": "enabled"}, {"type": "enabled", "budget_tokens": 2000}],
    "output_config": [{"bogus": 1}, {"effort": "low"}, {"format": {"type": "text"}}],
    "reasoning_effort": ["", "a lot", "high"],
    "continue_final_message": [True],
    "stream_options": [{"include_usage": True}],
    "max_output_tokens": [-1, HUGE, 1 << 62],
    "input": [
        [],
        [{}],
        [{"role": "robot", "content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
        [{"role": "user", "content": [{"type": "input_text"}]}],
        [{"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": [{}]}]}],
        [{**USER, "bogus": 1}],
        [{**USER, "status": "done"}],
        [{"type": "item_reference", "id": "msg_1"}],
        [{"type": "computer_call"}],
        [{"type": "function_call", "call_id": "c", "name": "f"}],
        [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}],
        [{"type": "function_call_output", "output": "x"}],
        [{"type": "function_call_output", "call_id": "c", "output": 7}],
        [{"type": "reasoning", "encrypted_content": "x"}],
        [{"type": "reasoning", "content": "x"}],
        [{"role": "user", "content": "word " * 5000}],
        "word " * 5000,
    ],
    "previous_response_id": ["resp_1", "x" * 1000],
    "background": [True],
    "include": [["bogus"], ["message.output_text.logprobs"]],
    "metadata": [{"a": 7}, {"x" * 65: "y"}, {"a": "x" * 513}, {str(number): "" for number in range(17)}],
    "reasoning": [{"effort": "a lot"}, {"effort": 7}, {"summary": "auto"}, {"bogus": 1}],
}
UNBOUNDED = frozenset(
    # Refused as routed_dp_rank, of which it is another name.
    "data_parallel_rank"
    # Switches, and what is checked as a whole.
    " ignore_eos no_logs log_metrics skip_special_tokens spaces_between_special_tokens no_stop_trim"
    " include_stop_str_in_output add_special_tokens return_token_ids"
    " return_tokens_as_token_ids return_cached_tokens_details may_shorten stream return_logprob"
    " return_text_in_logprobs return_prompt_token_ids echo add_generation_prompt chat_template_kwargs sampling_params"
    " response_format json_schema regex ebnf structural_tag structured_outputs"
    " instructions store"
    " abort_all model parallel_tool_calls separate_reasoning stream_reasoning".split()
)
# What must be there for a value to be wrong by itself only.
NEEDED: dict[str, dict[str, Any]] = {
    "top_logprobs_num": {"return_logprob": True},
    "logprob_start_len": {"return_logprob": True},
    "token_ids_logprob": {"return_logprob": True},
    "top_logprobs": {"logprobs": True},
}


@dataclass(frozen=True, slots=True)
class Case:
    """A request that must be refused with this status, and a message that names this parameter."""

    endpoint: Endpoint
    parameter: str
    content: bytes
    status: int = 400

    @classmethod
    def of(cls, endpoint: Endpoint, parameter: str, body: dict[str, Any], status: int = 400) -> Case:
        return cls(endpoint, parameter, json.dumps(body).encode(), status)

    def __str__(self) -> str:
        return f"{self.endpoint.path} {self.content[:200]!r}"


def table() -> Iterator[Case]:
    for endpoint in ENDPOINTS:
        for name, known in endpoint.schema.model_fields.items():
            for value in wrong_kinds(known.annotation):
                yield Case.of(endpoint, name, with_value(endpoint, name, value))
            for value in OUT_OF_RANGE.get(SAMPLING_NAMES.get(name, name), []):
                if (endpoint.path, name, value) == ("/v1/messages", "max_tokens", HUGE):
                    continue  # it ends where the context does
                yield Case.of(endpoint, name, with_value(endpoint, name, value))
        for name, off_values in endpoint.schema.UNSUPPORTED.items():
            for value in ("word", 7, {"a": "b"}, [7]):
                if not is_one_of(value, off_values):
                    yield Case.of(endpoint, name, with_value(endpoint, name, value))
        for name in ("bogus", "Temperature", "", "a.b[0]", "x" * 5000):
            yield Case.of(endpoint, name[:100], {**endpoint.valid, name: 1})
        yield Case.of(endpoint, "nul", {**endpoint.valid, "nul\0": 1})
    yield from _sampling_params()
    yield from _stream_options()
    yield from _required()
    for endpoint in ENDPOINTS[1:3]:
        for name in ("gpt-4", "", "x" * 5000):
            yield Case.of(endpoint, "model", {**endpoint.valid, "model": name}, status=404)


def broken_bodies() -> list[bytes]:
    """What is no JSON object at all."""
    return [
        b"",
        b"{",
        b"}",
        b"null",
        b"[]",
        b"[{}]",
        b"7",
        b'"text"',
        b"nonsense",
        b"\x00",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b'{"text": "\xff"}',
        b'{"text": "\xed\xa0\x80"}',
        b'{"text": "\\ud800"}',
        b'{"text": "a" "b"}',
        b'{"text": NaN}',
        b'{"text": -Infinity}',
        b'{"text": 1e999}',
        b'{"text": 0x10}',
        b"{'text': 'a'}",
        b'{"text": "a",}',
        b'{"text": "a"} trailing',
        b"[" * 50_000,
        b'{"text":' * 5_000,
        b'{"a": ' + b"[" * 2_000 + b"]" * 2_000 + b"}",
    ]


def with_value(endpoint: Endpoint, name: str, value: Any) -> dict[str, Any]:
    needed = {other: one for other, one in NEEDED.get(name, {}).items() if other in endpoint.schema.model_fields}
    body = {**endpoint.valid, **needed, name: value}
    if name == "input_ids":
        body.pop("text", None)  # chat knows input_ids too
    if name == "max_completion_tokens":
        del body["max_tokens"]
    if name == "min_tokens":
        body.pop("max_tokens", None)
    return body


def wrong_kinds(annotation: Any) -> list[Any]:
    """Values of every kind that this type does not allow."""
    adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    return [value for value in KINDS if not _fits(adapter, value)]


def _fits(adapter: TypeAdapter[Any], value: Any) -> bool:
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


_SAMPLING_JSON: dict[Any, Any] = {
    "int": int,
    "int | None": int,
    "float": float,
    "bool": bool,
    "tuple[str, ...]": str | list[str],
    "tuple[int, ...]": int | list[int],
    "tuple[tuple[int, float], ...]": dict[str, Any],
}


def sampling_fields() -> dict[str, Any]:
    """Every sampling parameter of the native API with its JSON type."""
    own = [f for f in dataclasses.fields(SamplingParams) if f.name not in ("may_shorten", "constraint")]
    return {f.name: _SAMPLING_JSON[str(f.type)] for f in own}


def _sampling_params() -> Iterator[Case]:
    generate = ENDPOINTS[0]
    for name, annotation in sampling_fields().items():
        wrong = wrong_kinds(annotation) + OUT_OF_RANGE.get(name, [])
        for value in [value for value in wrong if name not in ("stop", "stop_regex", "stop_token_ids") or value != []]:
            yield Case.of(generate, name, {"text": "hi", "sampling_params": {name: value}})
    for name in ("bogus", "may_shorten", "max_tokens"):
        yield Case.of(generate, name, {"text": "hi", "sampling_params": {name: 1}})
    for name in ("structured_outputs", "beam_width", "custom_params", "watermark"):
        for value in ("word", 7, {"a": "b"}, [7]):
            yield Case.of(generate, name, {"text": "hi", "sampling_params": {name: value}})
    forms = {"regex": {"a": "b"}, "ebnf": {"a": "b"}, "json_schema": "word", "structural_tag": "word"}
    for name, wrong_form in forms.items():
        for value in (wrong_form, 7, [7]):
            yield Case.of(generate, name, {"text": "hi", "sampling_params": {name: value}})


def _stream_options() -> Iterator[Case]:
    for endpoint in ENDPOINTS[1:3]:
        for name, known in StreamOptions.model_fields.items():
            for value in wrong_kinds(known.annotation):
                yield Case.of(
                    endpoint,
                    f"stream_options.{name}",
                    {**endpoint.valid, "stream": True, "stream_options": {name: value}},
                )
        yield Case.of(
            endpoint, "stream_options.bogus", {**endpoint.valid, "stream": True, "stream_options": {"bogus": 1}}
        )


def _required() -> Iterator[Case]:
    """Left out, or null."""
    names = ("text", "prompt", "messages", "input", "rid", "max_tokens")
    for endpoint, name in zip(ENDPOINTS, names, strict=True):
        without = {key: value for key, value in endpoint.valid.items() if key != name}
        yield Case.of(endpoint, name, without)
        yield Case.of(endpoint, name, {**without, name: None})


def names_without_range() -> set[str]:
    """Parameters of which the table does not know what is out of range. There should be none."""
    names = set(sampling_fields())
    for endpoint in ENDPOINTS:
        names |= {SAMPLING_NAMES.get(name, name) for name in endpoint.schema.model_fields}
    return names - set(OUT_OF_RANGE) - UNBOUNDED
