"""/openapi.json against the routes: it describes all of them, allows what they accept, and says what they answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest
from hypothesis import given, settings

from srt.entrypoints.app import ROUTES
from srt.entrypoints.native import UNSUPPORTED
from srt.entrypoints.openapi import OPERATIONS, WITH_PARAMETERS
from tests.unit.entrypoints.fake_engine import CONTEXT, VOCAB_SIZE, World
from tests.unit.entrypoints.sse import events
from tests.unit.entrypoints.test_any_json import bodies
from tests.unit.entrypoints.wrong_inputs import ENDPOINTS, Endpoint, table

USER = {"role": "user", "content": "hi"}


def description(world: World | None = None) -> dict[str, Any]:
    response = (world or World()).get("/openapi.json")
    assert response.status_code == 200
    document: dict[str, Any] = response.json()
    return document


def body_schema(document: dict[str, Any], path: str) -> dict[str, Any]:
    schema: dict[str, Any] = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return schema


def answer_schema(document: dict[str, Any], path: str, method: str = "post", kind: str = "application/json") -> Any:
    content = document["paths"][path][method]["responses"]["200"]["content"][kind]
    return content.get("x-event", content["schema"])


def test_every_route_is_described() -> None:
    handlers = {handler for path, methods in ROUTES.items() if path != "/openapi.json" for handler in methods.values()}
    assert handlers - set(OPERATIONS) == set()
    paths = description()["paths"]
    assert set(paths) == {*ROUTES, *UNSUPPORTED, *WITH_PARAMETERS}
    for path, methods in ROUTES.items():
        assert {method.lower() for method in methods} == set(paths[path])
        for operation in paths[path].values():
            assert operation["summary"], path
    for path in UNSUPPORTED:
        assert set(paths[path]["post"]["responses"]) == {"501", "401", "403"}


def test_it_tells_which_routes_need_a_key_and_that_foreign_pages_are_refused() -> None:
    world = World(api_key="user", ready=False)  # so that nothing waits for what the engine says
    for path, methods in description(World())["paths"].items():
        for method, operation in methods.items():
            status = world.call(method.upper(), path.replace("{", "").replace("}", "")).status_code
            assert ("401" in operation["responses"]) == (status == 401), path
            assert world.call(method.upper(), path, headers={"origin": "https://a.example"}).status_code == 403
            assert "403" in operation["responses"]


def test_every_field_is_described() -> None:
    def without_text(schema: Any, path: str) -> Iterator[str]:
        if isinstance(schema, list):
            for part in schema:
                yield from without_text(part, path)
        if not isinstance(schema, dict):
            return
        for name, part in schema.get("properties", {}).items():
            if not part.get("description"):
                yield f"{path}.{name}"
        for name, part in schema.items():
            yield from without_text(part, f"{path}.{name}")

    assert list(without_text(description(), "")) == []


def test_every_schema_is_one() -> None:
    document = description()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            contents = [one.get("content", {}) for one in operation["responses"].values()]
            for content in [*contents, operation.get("requestBody", {}).get("content", {})]:
                for kind in content.values():
                    schema = {**kind["schema"], "components": document["components"]}
                    jsonschema_rs.validator_for(schema)
                    assert jsonschema_rs.meta.is_valid(schema), (path, method)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_what_is_accepted_is_allowed_by_the_description(endpoint: Endpoint) -> None:
    world = World(answer="ab")
    allows = jsonschema_rs.validator_for(body_schema(description(world), endpoint.path))

    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(bodies(endpoint))
    def ask(body: Any) -> None:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=world.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.post(endpoint.path, content=json.dumps(body, ensure_ascii=True))

        if asyncio.run(go()).status_code == 200:
            assert allows.is_valid(body), body

    ask()
    assert allows.is_valid(endpoint.valid)


def test_most_of_what_is_refused_is_forbidden_by_the_description() -> None:
    """Not all: what depends on two fields, on the prompt's length or on the names that run cannot be written as a schema."""
    document = description()
    for endpoint in ENDPOINTS:
        allows = jsonschema_rs.validator_for(body_schema(document, endpoint.path))
        cases = [case for case in table() if case.endpoint is endpoint]
        allowed = [case for case in cases if allows.is_valid(json.loads(case.content))]
        assert len(allowed) <= 0.12 * len(cases), "\n".join(map(str, allowed))


def test_it_knows_the_model_that_is_served() -> None:
    completion = body_schema(description(), "/v1/completions")["properties"]
    assert completion["model"]["anyOf"][0]["enum"] == ["tiny", "org/big", "default"]
    assert completion["max_tokens"]["anyOf"][0]["maximum"] == CONTEXT
    ids = next(one for one in completion["prompt"]["anyOf"] if one.get("items", {}).get("type") == "integer")
    assert ids["items"]["maximum"] == VOCAB_SIZE - 1
    before = body_schema(description(World(ready=False)), "/v1/completions")["properties"]
    assert (
        "maximum"
        not in next(o for o in before["prompt"]["anyOf"] if o.get("items", {}).get("type") == "integer")["items"]
    )


BODIES = [
    ("/v1/completions", {"prompt": ["hi", "you"], "n": 2}),
    ("/v1/completions", {"prompt": "hi", "logprobs": 2, "echo": True, "max_tokens": 2}),
    ("/v1/completions", {"prompt": [5], "max_tokens": 0, "echo": True}),
    ("/v1/chat/completions", {"messages": [USER], "logprobs": True, "top_logprobs": 2, "n": 2}),
    ("/v1/chat/completions", {"messages": [USER], "max_tokens": 2}),
    ("/v1/completions", {"prompt": ["hi", "you"], "return_token_ids": True, "return_cached_tokens_details": True}),
    ("/v1/chat/completions", {"messages": [USER], "return_token_ids": True, "return_cached_tokens_details": True}),
    ("/generate", {"text": "hi", "return_prompt_token_ids": True}),
    (
        "/generate",
        {
            "text": ["hi", "you"],
            "sampling_params": {"n": 2, "max_new_tokens": 2},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 2,
            "token_ids_logprob": [7],
            "return_text_in_logprobs": True,
        },
    ),
    ("/tokenize", {"prompt": ["hi"]}),
    ("/tokenize", {"prompt": "hi"}),
    ("/detokenize", {"tokens": [[104]]}),
    ("/detokenize", {"tokens": [104]}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_answers_are_as_described(path: str, body: dict[str, Any]) -> None:
    world = World()
    document = description(world)
    jsonschema_rs.validator_for(answer_schema(document, path)).validate(world.post(path, body).json())
    if "tokenize" in path:
        return
    chunk = jsonschema_rs.validator_for(answer_schema(document, path, kind="text/event-stream"))
    options = {} if path == "/generate" else {"stream_options": {"include_usage": True}}
    for one in events(world.post(path, {**body, **options, "stream": True})):
        chunk.validate(one)


@pytest.mark.parametrize("endpoint", ENDPOINTS[1:3], ids=lambda endpoint: endpoint.path)
def test_a_prompts_logprobs_are_as_described(endpoint: Endpoint) -> None:
    world = World()
    described = jsonschema_rs.validator_for(answer_schema(description(world), endpoint.path))
    answer = world.post(endpoint.path, {**endpoint.valid, "prompt_logprobs": 1}).json()
    described.validate(answer)
    told = answer if "chat" in endpoint.path else answer["choices"][0]
    told["prompt_logprobs"][1] = {"7": {"logprob": "much"}}
    assert not described.is_valid(answer)


def test_models_and_errors_are_as_described() -> None:
    world = World()
    document = description(world)
    for path, described in (("/v1/models", "/v1/models"), ("/v1/models/org/big", "/v1/models/{model}")):
        jsonschema_rs.validator_for(answer_schema(document, described, "get")).validate(world.get(path).json())
    schemas = document["components"]["schemas"]
    for path, name in (("/v1/completions", "OpenAIError"), ("/generate", "Error"), ("/encode", "Error")):
        jsonschema_rs.validator_for(schemas[name]).validate(world.post(path, {"bogus": 1}).json())
