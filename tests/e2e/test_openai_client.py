"""The official Python client, against the real server: nothing in it had to be changed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.conftest import ALIAS, Server
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.e2e

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
ENDLESS: dict[str, Any] = {"ignore_eos": True}


@pytest.fixture
def api(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_models_are_listed(api: openai.OpenAI, server: Server) -> None:
    assert [model.id for model in api.models.list()] == [server.model, ALIAS]
    assert api.models.retrieve(ALIAS).id == ALIAS
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("gpt-4")


def test_a_completion(api: openai.OpenAI, server: Server) -> None:
    answer = api.completions.create(model=server.model, prompt="Hello", max_tokens=5, seed=1, extra_body=ENDLESS)
    assert (answer.object, answer.model, len(answer.choices)) == ("text_completion", server.model, 1)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.prompt_tokens_details is not None


def test_a_completion_of_many_prompts_with_choices_logprobs_and_echo(api: openai.OpenAI, server: Server) -> None:
    answer = api.completions.create(
        model=server.model, prompt=["Hello", "World"], max_tokens=3, n=2, logprobs=2, echo=True, extra_body=ENDLESS
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.token_logprobs is not None
        assert len(logprobs.tokens) == len(logprobs.token_logprobs)
        assert choice.text.startswith(("Hello", "World"))
        assert logprobs.token_logprobs[0] is None
        assert all(value <= 0 for value in logprobs.token_logprobs[1:])


def test_logprobs_of_characters_that_have_several_tokens(api: openai.OpenAI, server: Server) -> None:
    more = {**ENDLESS, "skip_special_tokens": False}
    answer = api.completions.create(
        model=server.model, prompt="日本語 🙂", max_tokens=20, seed=1, logprobs=5, echo=True, extra_body=more
    )
    text, logprobs = answer.choices[0].text, answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs and logprobs.text_offset
    rows = list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True))
    for token, logprob, top in rows[1:]:
        assert top[token] == logprob
        assert len(top) >= 5
    assert any(token.startswith("bytes:\\x") for token in logprobs.tokens)
    for token, at in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert token.startswith("bytes:\\x") or text.startswith(token, at)


def test_a_chat(api: openai.OpenAI, server: Server) -> None:
    answer = api.chat.completions.create(
        model=server.model,
        messages=[{"role": "system", "content": "Be brief."}, *HELLO],
        max_completion_tokens=6,
        n=2,
        seed=4,
        logprobs=True,
        top_logprobs=3,
        user="me",
        extra_body=ENDLESS,
    )
    assert answer.object == "chat.completion"
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.message.role == "assistant"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 6
        for token in choice.logprobs.content:
            assert len(token.top_logprobs) == 3
            assert token.top_logprobs[0].logprob >= token.logprob
    assert answer.choices[0].message.content != answer.choices[1].message.content


def test_a_seed_repeats_an_answer(api: openai.OpenAI, server: Server) -> None:
    answers = {
        api.chat.completions.create(model=server.model, messages=HELLO, max_tokens=16, seed=9, temperature=1.2)
        .choices[0]
        .message.content
        for _ in range(3)
    }
    assert len(answers) == 1


def test_a_streamed_chat_equals_the_whole_one(api: openai.OpenAI, server: Server) -> None:
    wanted: dict[str, Any] = {"model": server.model, "messages": HELLO, "max_tokens": 20, "seed": 2}
    whole = api.chat.completions.create(**wanted, extra_body=ENDLESS)
    pieces, reasons, usage = "", [], None
    for chunk in api.chat.completions.create(
        **wanted, stream=True, stream_options={"include_usage": True}, extra_body=ENDLESS
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces += choice.delta.content or ""
            reasons.append(choice.finish_reason)
    assert pieces == whole.choices[0].message.content
    assert [reason for reason in reasons if reason] == ["length"]
    assert usage is not None
    assert usage.completion_tokens == 20


def test_the_clients_own_stream_helper_understands_the_chunks(api: openai.OpenAI, server: Server) -> None:
    until = {**ENDLESS, "stop_regex": "(?s).....", "no_stop_trim": True}
    with api.chat.completions.stream(model=server.model, messages=HELLO, max_tokens=99, extra_body=until) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.get_final_completion().choices[0].message.content == text


def test_a_streamed_completion(api: openai.OpenAI, server: Server) -> None:
    stream = api.completions.create(model=server.model, prompt=[5, 6, 7], max_tokens=6, stream=True, extra_body=ENDLESS)
    reasons = [chunk.choices[0].finish_reason for chunk in stream]
    assert reasons[-1] == "length"


def test_a_stream_can_be_closed_early(api: openai.OpenAI, server: Server) -> None:
    stream = api.chat.completions.create(
        model=server.model, messages=HELLO, max_tokens=3000, stream=True, extra_body=ENDLESS
    )
    next(iter(stream))
    stream.close()
    with server.client() as client:
        assert client.post("/flush_cache", params={"timeout": 60}).status_code == 200


def test_the_async_client_runs_many_at_once(server: Server) -> None:
    async def go() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", timeout=60) as api:

            async def one(number: int) -> str:
                stream = await api.chat.completions.create(
                    model=server.model, messages=HELLO, max_tokens=10, seed=number % 4, stream=True, extra_body=ENDLESS
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*map(one, range(16)))

    answers = asyncio.run(go())
    assert all(answers[number] == answers[number % 4] for number in range(16))
    assert len(set(answers)) == 4


@pytest.mark.parametrize(
    ("more", "error", "parameter"),
    [
        ({"temperature": 2000}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"tools": [{"type": "function", "function": {}}]}, openai.BadRequestError, "tools"),
        ({"response_format": {"type": "yaml"}}, openai.BadRequestError, "response_format"),
        ({"extra_body": {"bogus": 1}}, openai.BadRequestError, "bogus"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_errors_are_the_clients_own_kinds(
    api: openai.OpenAI,
    server: Server,
    more: dict[str, Any],
    error: type[openai.APIStatusError],
    parameter: str,
    stream: bool,
) -> None:
    with pytest.raises(error) as caught:
        api.chat.completions.create(**{"model": server.model, "messages": HELLO, "stream": stream, **more})
    assert caught.value.param == parameter
    assert parameter in caught.value.message


def test_a_timeout_of_the_client_frees_the_request(api: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.APITimeoutError):
        api.with_options(timeout=0.05).chat.completions.create(
            model=server.model, messages=HELLO, max_tokens=3000, extra_body=ENDLESS
        )
    with server.client() as client:
        assert client.post("/flush_cache", params={"timeout": 60}).status_code == 200


def test_the_async_client_raises_and_times_out_alike(server: Server) -> None:
    async def go() -> None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as api:
            with pytest.raises(openai.BadRequestError, match="temperature"):
                await api.chat.completions.create(model=server.model, messages=HELLO, temperature=2000)
            with pytest.raises(openai.NotFoundError):
                await api.completions.create(model="gpt-4", prompt="Hello")
            with pytest.raises(openai.APITimeoutError):
                await api.with_options(timeout=0.05).completions.create(
                    model=server.model, prompt="Hello", max_tokens=3000, extra_body=ENDLESS
                )
            answer = await api.completions.create(
                model=server.model, prompt="Hello", max_tokens=2, n=3, logprobs=1, extra_body=ENDLESS
            )
            assert [choice.index for choice in answer.choices] == [0, 1, 2]
            assert all(choice.logprobs and len(choice.logprobs.tokens or []) == 2 for choice in answer.choices)

    asyncio.run(go())
    with server.client() as client:
        assert client.post("/flush_cache", params={"timeout": 60}).status_code == 200


def test_the_client_tries_again_when_the_queue_was_full(qwen3_checkpoint: Path, tmp_path: Path) -> None:
    """One runs, one waits, and the third is told to come again, which the client does by itself as soon as there is room."""
    words = ["--model-path", str(qwen3_checkpoint), "--served-model-name", "tiny", "--port", "0", "--device", "cpu"]
    words += ["--dtype", "float32", "--max-running-requests", "1", "--max-queued-requests", "1"]
    refusals: list[str] = []
    with ServerProcess("srt.launch_server", words, tmp_path) as process:
        url = process.wait_ready()

        def make_room(response: Any) -> None:
            if response.status_code == 429:
                refusals.append(response.headers["retry-after"])
                httpx.post(url + "/abort_request", json={"abort_all": True}, timeout=60).raise_for_status()

        with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60) as crowd:
            running = endless(crowd, "tiny")
            next(iter(running))
            waiting = threading.Thread(target=lambda: list(endless(crowd, "tiny")))
            waiting.start()
            while httpx.get(url + "/server_info", timeout=60).json()["internal_states"][0]["num_waiting"] == 0:
                pass
            http = openai.DefaultHttpxClient(event_hooks={"response": [make_room]})
            with openai.OpenAI(
                base_url=url + "/v1", api_key="none", max_retries=2, timeout=60, http_client=http
            ) as api:
                answer = api.completions.create(model="tiny", prompt="Hello", max_tokens=2, extra_body=ENDLESS)
                assert answer.choices[0].finish_reason == "length"
            waiting.join()
    assert len(refusals) >= 1
    assert all(int(seconds) >= 1 for seconds in refusals)


def endless(api: openai.OpenAI, model: str) -> openai.Stream[Any]:
    stream: Any = api.completions.create(model=model, prompt="Hi", max_tokens=3000, stream=True, extra_body=ENDLESS)
    return stream  # type: ignore[no-any-return]


def test_the_raw_response_has_a_request_id(api: openai.OpenAI) -> None:
    response = api.models.with_raw_response.list()
    assert response.headers["x-request-id"]


def test_what_is_missing_is_asked_for_once_and_named(server: Server) -> None:
    """A client with its own number of retries, as agent libraries make one."""
    asked: list[str] = []
    user = {"type": "function", "function": {"name": "User", "parameters": {"type": "object", "properties": {}}}}
    with (
        openai.DefaultHttpxClient(event_hooks={"request": [lambda request: asked.append(request.url.path)]}) as http,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", http_client=http) as client,
    ):
        with pytest.raises(openai.InternalServerError, match="use a server with an embedding") as missing:
            client.embeddings.create(model=server.model, input="Hello")
        with pytest.raises(openai.BadRequestError, match=r"tool_choice.type must be function") as refused:
            client.chat.completions.create(
                model=server.model, messages=HELLO, tools=[user], tool_choice={"type": "allowed_tools"}
            )  # type: ignore[call-overload]
    assert (missing.value.status_code, refused.value.param) == (501, "tool_choice")
    assert asked == ["/v1/embeddings", "/v1/chat/completions"]
