"""Paths, methods, keys, bodies: what is the same for every route."""

from __future__ import annotations

import gc
from typing import Any

import orjson
import pytest

from srt.entrypoints import exchange as exchange_module
from srt.entrypoints.native import UNSUPPORTED
from tests.unit.entrypoints.fake_engine import World

GENERATING = [
    ("/generate", {"text": "hi"}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
]


@pytest.mark.parametrize(("path", "body"), GENERATING)
def test_nothing_is_generated_while_starting_or_draining(path: str, body: dict[str, object]) -> None:
    starting, draining = World(ready=False), World()
    draining.service.drain()
    for world in (starting, draining):
        response = world.post(path, body)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert world.get("/health").status_code == 200
        assert world.get("/ready").status_code == 503
        assert world.get("/health_generate").status_code == 503


@pytest.mark.parametrize(("path", "body"), GENERATING)
def test_an_engine_that_is_away_is_a_503(path: str, body: dict[str, object]) -> None:
    world = World()
    world.engine.engine_died("it was killed")
    assert world.post(path, body).status_code == 503
    assert world.get("/ready").status_code == 503
    assert world.get("/health").status_code == 503


def test_a_ready_server_says_so() -> None:
    world = World()
    assert world.get("/ready").json() == {"status": "ready", "ready": True, "reason": None, "processes": {}}
    assert [world.get(path).status_code for path in ("/health", "/ping", "/health_generate")] == [200, 200, 200]


def test_health_generate_draws_one_token_under_its_own_label() -> None:
    world = World()
    world.get("/health_generate")
    (handle,) = world.engine.handles
    assert handle.rid.startswith("HEALTH_CHECK")
    assert handle.request.params.max_new_tokens == 1
    assert handle.request.urgent


def test_health_generate_is_a_503_after_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srt.entrypoints.health_probe.DEADLINE_S", 0.01)
    world = World()
    world.engine.script = lambda request: [None]
    assert world.get("/health_generate").status_code == 503
    assert world.engine.handles[0].was_aborted


def test_unknown_paths_and_methods_are_told_in_each_apis_shape() -> None:
    world = World()
    native, openai = world.get("/nowhere"), world.get("/v1/nowhere")
    assert (native.status_code, native.json()) == (
        404,
        {"error": {"message": "This server has no /nowhere: /openapi.json lists what it has."}},
    )
    assert openai.json()["error"]["code"] == "not_found"
    wrong = world.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST, OPTIONS")
    assert wrong.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("//v1/v1/completions//", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/v1/models/", "/v1/models"),
        ("/models/org/big", "/v1/models/org/big"),
        ("/v1/generate", "/generate"),
        ("/embeddings", "/v1/embeddings"),
        ("/metrics/", "/metrics"),
    ],
)
def test_a_path_that_differs_by_slashes_or_v1_is_hinted_at(asked: str, meant: str) -> None:
    response = World().call("POST", f"http://test{asked}", json={})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == f"This server has no {asked}; did you mean {meant}?"


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/v1/nowhere", "/v1/nowhere/", "/nowhere//"])
def test_a_path_that_is_like_none_is_not_guessed_at(path: str) -> None:
    assert (
        World().get(path).json()["error"]["message"] == f"This server has no {path}: /openapi.json lists what it has."
    )


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/v1/models/tiny", "GET, HEAD, OPTIONS"),
        ("/v1/completions", "POST, OPTIONS"),
        ("/generate", "POST, PUT, OPTIONS"),
        ("/flush_cache", "GET, POST, OPTIONS"),
    ],
)
def test_all_methods_that_are_answered_are_told(path: str, allowed: str) -> None:
    world = World()
    told, refused = world.call("OPTIONS", path), world.call("DELETE", path)
    assert (told.status_code, told.content, told.headers["allow"]) == (200, b"", allowed)
    assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
    assert refused.json()["error"]["message"] == f"{path} accepts {allowed}, not DELETE."
    assert world.call("HEAD", path).status_code == (200 if "HEAD" in allowed else 405)


@pytest.mark.parametrize("path", UNSUPPORTED)
def test_what_is_known_but_missing_is_a_501_that_names_it_and_what_to_use_and_is_not_retried(path: str) -> None:
    response = World().post(path, {})
    assert (response.status_code, response.headers["x-should-retry"]) == (501, "false")
    missing, _, instead = response.json()["error"]["message"].removeprefix(f"{path} is not supported: ").partition(": ")
    assert missing.startswith("this server ")
    assert instead


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer", "Basic secret", "secret", "Bearer \xff"])
def test_without_the_key_only_health_is_open(given: str | None) -> None:
    world = World(api_key="secret")
    headers = {} if given is None else {"authorization": given.encode("latin-1")}
    response = world.call("GET", "/v1/models", headers=headers)
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert world.call("GET", "/nowhere", headers=headers).status_code == 401
    assert world.call("GET", "/health", headers=headers).status_code == 200


def test_with_the_key_all_is_open() -> None:
    world = World(api_key="secret")
    assert world.get("/v1/models", headers={"authorization": "bearer secret"}).status_code == 200


def test_head_is_get() -> None:
    assert World().call("HEAD", "/health").status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "The body is empty"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b'{"text": "\xff"}', "not valid JSON"),
        (b'{"text": "\\ud800"}', "not valid JSON"),
        (b'{"text": NaN}', "not valid JSON"),
        (b'{"text": Infinity}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"text": ' + b"[" * 900 + b"]" * 900 + b"}", "must be"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"17", "must be a JSON object"),
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/abort_request"])
def test_a_body_that_is_no_json_object_is_a_400(path: str, body: bytes, message: str) -> None:
    response = World().call("POST", path, content=body)
    assert response.status_code == 400, response.text
    if b'"text"' not in body or path == "/generate" or message != "must be":
        assert message in response.json()["error"]["message"]


def test_a_body_that_begins_with_a_byte_order_mark_is_read_without_it() -> None:
    mark = b"\xef\xbb\xbf"
    assert World().call("POST", "/generate", content=mark + b'{"text": "hi"}').json()["text"] == "Hello!"
    assert "The body is empty" in World().call("POST", "/generate", content=mark).text
    assert World().call("POST", "/generate", content=mark + mark + b"{}").status_code == 400


def test_another_content_type_is_a_415() -> None:
    response = World().call("POST", "/generate", data={"text": "hi"})
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


def test_a_long_body_is_read_without_garbage_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of small lists would set off collections that take longer than the reading."""
    was_enabled: list[bool] = []

    class Watched:
        JSONDecodeError = orjson.JSONDecodeError
        dumps = staticmethod(orjson.dumps)

        @staticmethod
        def loads(body: bytes) -> Any:
            was_enabled.append(gc.isenabled())
            return orjson.loads(body)

    monkeypatch.setattr(exchange_module, "orjson", Watched)
    world = World()
    for body in (b'{"text": "hi"}', b"[[1]," * 100_000, b'{"text": "hi", "bogus": [' + b"[1]," * 100_000 + b"[1]]}"):
        world.call("POST", "/generate", content=body)
        assert gc.isenabled()
    assert was_enabled == [True, False, False]


@pytest.mark.parametrize("says_its_length", [True, False])
def test_a_body_that_is_too_large_is_a_413(monkeypatch: pytest.MonkeyPatch, says_its_length: bool) -> None:
    monkeypatch.setattr(exchange_module.Exchange.read_body, "__defaults__", (1 << 20,))
    body = b'{"text": "' + b"x" * (1 << 20) + b'"}'

    async def parts() -> object:
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    response = World().call("POST", "/v1/completions", content=body if says_its_length else parts())
    assert response.status_code == 413
    assert response.json()["error"]["message"] == "The body is larger than 1 MiB, the limit."
    assert response.headers["connection"] == "close"


def test_the_request_id_is_echoed_or_drawn() -> None:
    world = World()
    assert world.get("/nowhere", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert world.post("/generate", {"text": "a"}, headers={"x-request-id": "abc-2"}).headers["x-request-id"] == "abc-2"
    drawn = world.get("/health", headers={"x-request-id": "white space"}).headers["x-request-id"]
    assert drawn
    assert drawn != "white space"


def test_our_own_mistake_is_a_500_in_shape() -> None:
    world = World()

    def broken(request: object) -> list[object]:
        raise KeyError("inner detail")

    world.engine.script = broken  # type: ignore[assignment]
    response = world.post("/v1/completions", {"prompt": "a"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "inner detail" not in response.text


def test_streams_ask_not_to_be_buffered() -> None:
    headers = World().post("/generate", {"text": "a", "stream": True}).headers
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")
