"""Fields of other servers in the OpenAI endpoints, over ASGI with a fake engine: a token is a character."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from srt.managers.tokenizer_manager.api_types import GenerateInput
from tests.unit.entrypoints.fake_engine import CACHED_TOKENS, World, choice_update
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


# ---- Logprobs of the prompt

CHOSEN = {"logprob": -0.5, "rank": None}
BEST = {"65": {"logprob": -0.25, "rank": 1, "decoded_token": "A"}}


def test_each_choice_of_a_completion_has_the_prompts_logprobs_as_vllm_writes_them() -> None:
    answer = ask(World(), COMPLETIONS, prompt=["abA", "x"], n=2, prompt_logprobs=1).json()
    first, second, other, _ = answer["choices"]
    assert first["prompt_logprobs"] == [None, {"98": {**CHOSEN, "decoded_token": "b"}, **BEST}, BEST]
    assert second["prompt_logprobs"] == first["prompt_logprobs"]
    assert other["prompt_logprobs"] == [None]
    assert first["logprobs"] is None


def test_a_chat_has_the_prompts_logprobs_beside_its_choices() -> None:
    world = World()
    answer = ask(world, CHAT, prompt_logprobs=0).json()
    prompt = request_of(world).text or ""
    assert answer["prompt_logprobs"] == [
        None,
        *({str(ord(one)): {**CHOSEN, "decoded_token": one}} for one in prompt[1:]),
    ]
    assert "prompt_logprobs" not in answer["choices"][0]
    assert answer["choices"][0]["logprobs"] is None


def test_logprobs_of_prompt_and_output_have_each_as_many_likeliest_tokens_as_were_asked_for() -> None:
    for in_prompt, in_output in ((3, 1), (1, 3)):
        more = {"prompt_logprobs": in_prompt, "logprobs": in_output}
        choice = ask(World(), COMPLETIONS, **more).json()["choices"][0]
        assert choice["logprobs"]["tokens"] == list("Hello!")
        assert {len(best) for best in choice["logprobs"]["top_logprobs"]} == {in_output + 1}
        assert {len(best) for best in choice["prompt_logprobs"][1:]} == {in_prompt + 1}
        more = {"prompt_logprobs": in_prompt, "logprobs": True, "top_logprobs": in_output}
        answer = ask(World(), CHAT, **more).json()
        assert {len(one["top_logprobs"]) for one in answer["choices"][0]["logprobs"]["content"]} == {in_output}
        assert {len(best) for best in answer["prompt_logprobs"][1:]} == {in_prompt + 1}


def test_an_echo_has_logprobs_of_its_own() -> None:
    more = {"prompt": "abA", "echo": True, "logprobs": 0}
    alone, both = (
        ask(World(), COMPLETIONS, **more, **one).json()["choices"][0] for one in ({}, {"prompt_logprobs": 2})
    )
    assert both["logprobs"] == alone["logprobs"]
    assert both["logprobs"]["tokens"] == list("abAHello!")
    assert [best and len(best) for best in both["prompt_logprobs"]] == [None, 3, 2]


def test_without_being_asked_for_nothing_of_it_is_in_an_answer() -> None:
    for path in BODIES:
        answer = ask(World(), path).json()
        assert not {"prompt_logprobs", "prompt_token_ids", "sglext"} & answer.keys()
        assert not {"prompt_logprobs", "prompt_token_ids", "token_ids"} & answer["choices"][0].keys()


@both
@pytest.mark.parametrize(("value", "stream"), [(-1, False), (129, False), (1, True), (0, True)])
def test_prompt_logprobs_that_cannot_be_given_are_refused_by_name(path: str, value: int, stream: bool) -> None:
    response = ask(World(), path, prompt_logprobs=value, stream=stream)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("prompt_logprobs ")


# ---- Token ids


def test_a_completion_has_the_ids_of_prompt_and_output() -> None:
    for prompt in ("abcd", list(b"abcd")):
        choice = ask(World(answer="né"), COMPLETIONS, prompt=prompt, return_token_ids=True).json()["choices"][0]
        assert (choice["token_ids"], choice["prompt_token_ids"]) == ([110, 233], list(b"abcd"))


def test_a_chat_has_the_ids_of_the_prompt_beside_its_choices() -> None:
    answer = ask(World(answer="né"), CHAT, return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == [110, 233]
    assert answer["prompt_token_ids"] == list(b"<user>hi<assistant>")


@both
@pytest.mark.parametrize("more", [{}, {"logprobs": 1}])
def test_a_streams_ids_are_those_of_the_whole(path: str, more: dict[str, int]) -> None:
    more = {name: bool(value) if path == CHAT else value for name, value in more.items()}
    chunks = events(ask(World(answer="né!"), path, n=2, stream=True, return_token_ids=True, **more))
    ids: list[list[int]] = [[], []]
    prompts: list[list[int]] = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        ids[choice["index"]] += choice.get("token_ids", [])
        prompts += [part["prompt_token_ids"] for part in (chunk, choice) if "prompt_token_ids" in part]
    assert ids == [[110, 233, 33]] * 2
    assert prompts == [list(b"abcd" if path == COMPLETIONS else b"<user>hi<assistant>")] * 2


@both
def test_ids_without_text_are_streamed_too(path: str) -> None:
    world = World()
    world.engine.script = lambda request: [
        [replace(choice_update(request, "abc", 0), text="")],
        [choice_update(request, "abc", 1)],
        [replace(choice_update(request, "abc", 2), text="")],
    ]
    chunks = events(ask(world, path, stream=True, return_token_ids=True))
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == list(b"abc")


def test_tokens_are_written_as_ids_in_logprobs() -> None:
    more = {"return_tokens_as_token_ids": True, "echo": True, "logprobs": 1}
    logprobs = ask(World(answer="é"), COMPLETIONS, prompt="ab", **more).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97", "token_id:98", "token_id:233"]
    assert logprobs["top_logprobs"][1:] == [
        {"token_id:65": -0.25, "token_id:98": -0.5},
        {"token_id:65": -0.25, "token_id:233": -0.5},
    ]
    assert logprobs["text_offset"] == [0, 1, 2]
    more = {"return_tokens_as_token_ids": True, "logprobs": True, "top_logprobs": 1}
    (token,) = ask(World(answer="é"), CHAT, **more).json()["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("token_id:233", [0xC3, 0xA9])
    assert token["top_logprobs"][0]["token"] == "token_id:65"


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
