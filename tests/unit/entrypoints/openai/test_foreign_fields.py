"""Fields of other servers in the OpenAI endpoints, over ASGI with a fake engine: a token is a character."""

from __future__ import annotations

from typing import Any

import pytest

from srt.managers.io_struct import GenerateInput
from tests.unit.entrypoints.fake_engine import CACHED_TOKENS, World
from tests.unit.entrypoints.sse import events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "abcd"},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
}
both = pytest.mark.parametrize("path", BODIES)


def ask(world: World, path: str, **more: Any) -> Any:
    return world.post(path, {**BODIES[path], **more})


def request_of(world: World) -> GenerateInput:
    return world.engine.handles[-1].request


# ---- Names


@both
def test_request_id_is_another_name_of_rid(path: str) -> None:
    world = World()
    for names in ({"request_id": "mine"}, {"request_id": "mine", "rid": "mine"}, {"rid": "mine", "request_id": None}):
        assert ask(world, path, **names).json()["id"] == "mine"
        assert request_of(world).rid == "mine"


@both
@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"request_id": "a", "rid": "b"}, "request_id and rid are two names of one parameter"),
        ({"request_id": ""}, "request_id must not be empty"),
        ({"request_id": "x" * 257}, "request_id may have at most 256 characters"),
    ],
)
def test_a_wrong_name_is_refused_as_the_client_wrote_it(path: str, names: dict[str, str], message: str) -> None:
    response = ask(World(), path, **names)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)
    assert response.json()["error"]["param"] == "request_id"


# ---- The prompt


@pytest.mark.parametrize(("path", "default"), [(COMPLETIONS, True), (CHAT, False)])
def test_special_tokens_are_added_where_they_are_asked_for(path: str, default: bool) -> None:
    world = World()
    for given, wanted in ((None, default), (True, True), (False, False)):
        assert ask(world, path, add_special_tokens=given).status_code == 200
        assert request_of(world).add_special_tokens is wanted


@both
def test_the_prompts_end_is_kept(path: str) -> None:
    world = World()
    for given in (None, 3, -1):
        assert ask(world, path, truncate_prompt_tokens=given).status_code == 200
        assert request_of(world).truncate_prompt_tokens == given


def test_of_a_prompt_that_is_cut_the_part_that_was_read_is_echoed() -> None:
    more = {"echo": True, "truncate_prompt_tokens": 3, "logprobs": 1}
    for prompt in ("abcdef", list(b"abcdef")):
        choice = ask(World(answer="!"), COMPLETIONS, prompt=prompt, **more).json()["choices"][0]
        assert choice["text"] == "def!"
        assert choice["logprobs"]["tokens"] == list("def!")
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]


@pytest.mark.parametrize(("given", "status"), [({"best_of": 2, "n": 2}, 200), ({"best_of": 2}, 400)])
def test_best_of_must_be_n(given: dict[str, int], status: int) -> None:
    response = ask(World(), COMPLETIONS, **given)
    assert response.status_code == status
    assert status == 200 or response.json()["error"]["param"] == "best_of"


# ---- What is told only where it was asked for


def test_without_being_asked_for_nothing_of_it_is_in_an_answer() -> None:
    for path in BODIES:
        assert "sglext" not in ask(World(), path).json()


# ---- Where cached tokens were


@both
def test_where_cached_tokens_were_is_told_in_sglext(path: str) -> None:
    more: dict[str, Any] = {"return_cached_tokens_details": True, "n": 2}
    details = {"cached_tokens_details": {"device": CACHED_TOKENS, "host": 0}}
    assert ask(World(), path, **more).json()["sglext"] == details
    *chunks, last = events(ask(World(), path, stream=True, **more))
    assert (last["choices"], last["sglext"]) == ([], details)
    assert not any("sglext" in chunk or "usage" in chunk for chunk in chunks)
    more |= {"stream": True, "stream_options": {"include_usage": True}}
    *_, last, usage = events(ask(World(), path, **more))
    assert (last["choices"], last["sglext"], last["usage"]) == ([], details, None)
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": CACHED_TOKENS}
