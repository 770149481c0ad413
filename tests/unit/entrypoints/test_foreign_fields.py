"""Fields of other servers: what asks for nothing passes, what asks for something is refused by name, on every endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from scripts import document_api
from srt.entrypoints.adapters import LoadAdapterBody, UnloadAdapterBody
from srt.entrypoints.anthropic.schema import CountTokensBody, MessagesBody
from srt.entrypoints.embeddings.bodies import DimensionsBody, EmbeddingsBody, RerankBody, ScoreBody
from srt.entrypoints.memory_loan import ReleaseBody, ResumeBody
from srt.entrypoints.native import AbortBody, ContinueBody, PauseBody
from srt.entrypoints.native_shapes import GenerateBody
from srt.entrypoints.openai.messages import MESSAGE_FIELDS, plain_messages
from srt.entrypoints.openai.responses.schema import ResponsesBody
from srt.entrypoints.openai.schema import ChatBody, CompletionBody, StreamOptions
from srt.entrypoints.operations import LoggingBody, NoBody
from srt.entrypoints.parsing import ParseCallsBody, SeparateReasoningBody
from srt.entrypoints.profiling import StartBody
from srt.entrypoints.request_schema import RequestBody
from srt.entrypoints.tokenizing import DetokenizeBody, TokenizeBody
from srt.entrypoints.weight_groups import DestroyGroupBody, InitGroupBody, ReceiveBody
from srt.entrypoints.weights import CheckBody, NamedBody, RenameBody, UpdateFromDiskBody
from srt.managers.tokenizer_manager.api_types import RequestError
from srt.sampling import foreign_fields
from srt.sampling.foreign_fields import is_one_of, schema_of
from srt.sampling.foreign_table import FIELDS
from srt.sampling.parameter_checks import ParameterError
from srt.sampling.sampling_params import CONSTRAINTS, PARAMETERS, UNSUPPORTED, SamplingParams
from tests.support.foreign_objects import whole_objects
from tests.unit.entrypoints.fake_engine import World

# Each body with what it needs to be valid.
BODIES: list[tuple[type[RequestBody], dict[str, Any]]] = [
    (GenerateBody, {"text": "hi"}),
    (CompletionBody, {"prompt": "hi"}),
    (ChatBody, {"messages": [{"role": "user", "content": "hi"}]}),
    (ResponsesBody, {"input": "hi"}),
    (StartBody, {}),
    (AbortBody, {"rid": "x"}),
    (PauseBody, {}),
    (ContinueBody, {}),
    (NoBody, {}),
    (LoadAdapterBody, {"lora_name": "a", "lora_path": "b"}),
    (UnloadAdapterBody, {"lora_name": "a"}),
    (UpdateFromDiskBody, {"model_path": "a"}),
    (RenameBody, {"new_version": "a"}),
    (CheckBody, {}),
    (InitGroupBody, {"master_address": "host", "master_port": 1, "rank_offset": 1, "world_size": 2}),
    (ReceiveBody, {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]}),
    (DestroyGroupBody, {}),
    (ReleaseBody, {}),
    (ResumeBody, {}),
    (NamedBody, {"name": "a"}),
    (LoggingBody, {}),
    (TokenizeBody, {"prompt": "hi"}),
    (DetokenizeBody, {"tokens": [1]}),
    (ParseCallsBody, {"text": "hi"}),
    (SeparateReasoningBody, {"text": "hi"}),
    (EmbeddingsBody, {"input": "hi"}),
    (DimensionsBody, {"text": "hi"}),
    (RerankBody, {"query": "hi", "documents": ["ho"]}),
    (ScoreBody, {"items": "hi", "label_token_ids": [1]}),
    (MessagesBody, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
    (CountTokensBody, {"messages": [{"role": "user", "content": "hi"}]}),
]
ASKING: list[Any] = [True, "word", 7, {"a": "b"}, [7], [True]]


def _fields() -> Iterator[Any]:
    for body, valid in BODIES:
        for name, off_values in body.UNSUPPORTED.items():
            yield pytest.param(body, valid, name, off_values, id=f"{body.FAMILY}-{name}")


@pytest.mark.parametrize(("body", "valid", "name", "off_values"), list(_fields()))
def test_a_foreign_field_passes_where_it_asks_for_nothing_and_is_refused_by_name_where_it_asks(
    body: type[RequestBody], valid: dict[str, Any], name: str, off_values: tuple[Any, ...]
) -> None:
    for value in (None, *off_values):
        assert body.parse({**valid, name: value}) == body.parse(valid)
    for value in ASKING:
        if not is_one_of(value, off_values):
            with pytest.raises(RequestError, match=rf"^{name} is ") as caught:
                body.parse({**valid, name: value})
            assert (caught.value.status, caught.value.parameter) == (400, name)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_so_does_a_foreign_sampling_parameter(name: str) -> None:
    for value in (None, *UNSUPPORTED[name]):
        assert SamplingParams.from_dict({name: value}) == SamplingParams.from_dict({})
    for value in ASKING:
        if not is_one_of(value, UNSUPPORTED[name]):
            with pytest.raises(ParameterError, match=rf"^{name} is ") as caught:
                SamplingParams.from_dict({name: value})
            assert caught.value.name == name


@pytest.mark.parametrize(("body", "valid"), BODIES, ids=lambda one: getattr(one, "FAMILY", ""))
def test_a_body_knows_the_fields_of_its_family_and_no_others(body: type[RequestBody], valid: dict[str, Any]) -> None:
    assert body.FAMILY in FIELDS
    assert set(FIELDS[body.FAMILY]) <= {*body.model_fields, *body.UNSUPPORTED, *body.MEANINGLESS}
    for name in body.MEANINGLESS:
        for value in (*ASKING, None, False, 0):
            assert body.parse({**valid, name: value}) == body.parse(valid)
    for name in ("bogus", "return_routed_expert", "Stream"):
        for value in (None, False, 1):
            with pytest.raises(RequestError, match=f"^{name} is not a known parameter"):
                body.parse({**valid, name: value})


def test_every_family_of_the_table_is_served() -> None:
    known = {body.FAMILY for body, _ in BODIES}
    assert known | {"sampling_params", "stream_options", "message", "text_part"} == set(FIELDS)
    assert set(FIELDS["sampling_params"]) <= {*PARAMETERS, *CONSTRAINTS, *UNSUPPORTED}
    assert set(FIELDS["stream_options"]) <= set(StreamOptions.model_fields)


@pytest.mark.parametrize(("body", "valid"), BODIES, ids=lambda one: getattr(one, "FAMILY", ""))
def test_an_object_that_is_sent_whole_passes(body: type[RequestBody], valid: dict[str, Any]) -> None:
    for whole in whole_objects(body.FAMILY):
        body.parse({**whole, **valid})


@pytest.mark.parametrize(
    ("path", "body", "valid"),
    [
        ("/generate", "native", {"text": "hi"}),
        ("/v1/completions", "completions", {"prompt": "hi"}),
        ("/v1/chat/completions", "chat", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", "responses", {"input": "hi"}),
        ("/tokenize", "tokenize", {"prompt": "hi"}),
        ("/detokenize", "detokenize", {"tokens": [1]}),
        ("/abort_request", "abort", {"rid": "x"}),
        ("/abort_request", "abort", {"rid": "", "abort_all": True}),  # as SGLang's class has it
        ("/pause_generation", "pause", {}),
        ("/continue_generation", "continue", {}),
        ("/freeze_gc", "freeze_gc", {}),
        ("/configure_logging", "logging", {}),
    ],
)
def test_an_object_that_is_sent_whole_is_answered(path: str, body: str, valid: dict[str, Any]) -> None:
    world = World()
    assert whole_objects(body)
    for whole in whole_objects(body):
        response = world.post(path, {**whole, **valid})
        assert response.status_code == 200, response.text
        for options in whole_objects("stream_options") if "stream_options" in whole else []:
            streamed = {**whole, **valid, "stream": True, "stream_options": options}
            assert world.post(path, streamed).status_code == 200


def test_a_message_may_have_the_fields_of_others_where_they_are_empty() -> None:
    message = {"role": "user", "content": "hi"}
    foreign = dict.fromkeys(FIELDS["message"].keys() - {"role", "content"})
    empty: list[Any] = ["", [], {}, False]
    assert plain_messages([{**foreign, **message}]) == [message]
    for name in foreign.keys() - {"name"}:
        for value in empty:
            assert plain_messages([{**message, name: value}]) == [message]
        for value in ASKING if name not in MESSAGE_FIELDS else ():
            with pytest.raises(RequestError, match=rf"messages\[0\].{name} is not supported yet"):
                plain_messages([{**message, name: value}])
    part = {"type": "text", "text": "hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
    assert plain_messages([{**message, "content": [part]}]) == [message]


def test_sampling_parameters_that_are_sent_whole_ask_for_the_defaults() -> None:
    world = World()
    for params in whole_objects("sampling_params"):
        response = world.post("/generate", {"text": "hi", "sampling_params": params})
        assert response.status_code == 200, response.text
    whole, *_ = whole_objects("sampling_params")
    assert SamplingParams.from_dict(whole) == SamplingParams.from_dict({"top_k": 1 << 30, "max_new_tokens": 128})


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("completions", "use_beam_search", True),
        ("chat", "include_reasoning", False),
        ("chat", "echo", True),
        ("chat", "thinking", False),
        ("chat", "thinking_token_budget", 0),
        ("chat", "web_search_options", {}),
        ("chat", "allowed_token_ids", []),
        ("chat", "bootstrap_room", 0),
        ("native", "max_thinking_tokens", 0),
        ("native", "return_flat_raw_top_logprobs_b64", True),
        ("native", "return_routed_experts", True),
        ("native", "disagg_prefill_dp_rank", 0),
        ("sampling_params", "detokenize", False),
        ("sampling_params", "max_tokens", 16),
        ("sampling_params", "logprobs", 0),
        ("profile", "req_type", 2),
    ],
)
def test_what_looks_like_nothing_but_asks_for_something_is_refused(family: str, name: str, value: Any) -> None:
    known = (
        UNSUPPORTED if family == "sampling_params" else {body.FAMILY: body for body, _ in BODIES}[family].UNSUPPORTED
    )
    assert not is_one_of(value, known[name])


@pytest.mark.parametrize(
    ("name", "value"), [("length_penalty", 1), ("length_penalty", 1.0), ("use_beam_search", False), ("echo", False)]
)
def test_numbers_are_compared_as_json_has_them(name: str, value: Any) -> None:
    assert is_one_of(value, ChatBody.UNSUPPORTED[name])
    assert not is_one_of(1, (True,))
    assert not is_one_of(False, (0,))


@pytest.mark.parametrize(
    ("body", "name", "value"),
    [
        (ChatBody, "vllm_xargs", {"x": None}),
        (GenerateBody, "video_data", [None, None]),
        (GenerateBody, "image_data", [None]),
    ],
)
def test_null_within_a_value_is_the_same_as_nothing(body: type[RequestBody], name: str, value: Any) -> None:
    assert is_one_of(value, body.UNSUPPORTED[name])
    others: list[Any] = [
        [None, {}],
        [[]],
        {"type": "json_object", "json_schema": None},
        {"type": "text", "json_schema": {}},
    ]
    for asking in others:
        assert not is_one_of(asking, body.UNSUPPORTED[name])


def test_the_description_allows_what_passes_and_nothing_else() -> None:
    values = [
        *ASKING,
        None,
        False,
        0,
        0.0,
        1,
        1.0,
        -1,
        "",
        [],
        {},
        "auto",
        [None],
        [None, None],
        [[]],
        [0],
        ["text"],
        ["text", None],
    ]
    values += [
        {"a": None},
        {"type": "text"},
        {"type": "text", "x": None},
        {"type": None},
        {"enabled": False},
        {"enabled": 0},
    ]
    known = {repr(off_values): off_values for body, _ in BODIES for off_values in body.UNSUPPORTED.values()}
    assert len(known) > 10
    for off_values in known.values():
        allows = jsonschema_rs.validator_for(schema_of(off_values))
        for value in values:
            assert allows.is_valid(value) == is_one_of(value, off_values), (off_values, value)


def test_the_page_says_of_every_foreign_field_what_becomes_of_it() -> None:
    tables = {family: rows for _, family, rows in document_api.foreign_tables()}
    assert tables.keys() == FIELDS.keys()
    for family, rows in tables.items():
        named = [name for names in rows.values() for name in names]
        assert set(named) >= set(FIELDS[family])
        assert len(named) == len(set(named))
    assert "use_beam_search" in tables["chat"]["passes if empty, `false`"]
    assert "include_reasoning" in tables["chat"]["passes if empty, `true`"]
    assert "user" in tables["chat"]["ignored"]


def test_a_refusal_says_what_the_parameter_is_called_here() -> None:
    with pytest.raises(ParameterError, match="max_tokens is called max_new_tokens here"):
        SamplingParams.from_dict({"max_tokens": 5})


def test_exceptions_are_of_fields_that_somebody_defines() -> None:
    known = {name for fields in FIELDS.values() for name in fields}
    assert known >= foreign_fields.NULL_ONLY
    assert known >= set(foreign_fields.ALSO)
    for family, name in (*foreign_fields.ALSO_IN, *foreign_fields.INSTEAD):
        assert name in FIELDS[family]
    for family, names in foreign_fields.IGNORED.items():
        assert names <= known
        assert family in FIELDS
    for family, names in foreign_fields.BESIDE.items():
        assert not names & set(FIELDS[family]), "the table has it by itself"
