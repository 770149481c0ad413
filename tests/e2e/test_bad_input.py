"""The table of wrong inputs against the real server: each is refused by name, and a valid request is answered after each."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.conftest import Server
from tests.unit.entrypoints.wrong_inputs import ENDPOINTS, Case, Endpoint, broken_bodies, table

pytestmark = pytest.mark.e2e

NUM_CLIENTS = 12  # side by side, so that the valid requests in between share steps


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        yield client


async def check(client: httpx.AsyncClient, case: Case) -> str:
    """What is wrong with the server's answers; nothing, if all is well."""
    response = await client.post(case.endpoint.path, content=case.content)
    if response.status_code != case.status:
        return f"{case}: {response.status_code} {response.text[:300]}"
    error = response.json()["error"]
    if case.parameter not in error["message"]:
        return f"{case}: does not name {case.parameter}: {error}"
    if case.endpoint.path.startswith("/v1/messages"):
        if error.keys() != {"message", "type"}:
            return f"{case}: not in Anthropic's shape: {error}"
    elif case.endpoint.path.startswith("/v1/"):
        if error.keys() != {"message", "type", "param", "code"} or error["param"] is None:
            return f"{case}: not in OpenAI's shape: {error}"
    elif error.keys() != {"message"}:
        return f"{case}: not in the native shape: {error}"
    after = await client.post(case.endpoint.path, json=case.endpoint.valid)
    return "" if after.status_code == 200 else f"{case}: a valid request afterwards: {after.status_code} {after.text}"


async def check_all(server: Server, cases: Iterable[Case]) -> list[str]:
    waiting = iter(cases)
    problems: list[str] = []
    async with connected(server) as client:

        async def work() -> None:
            for case in waiting:  # shared: each case is taken by one
                if problem := await check(client, case):
                    problems.append(problem)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_CLIENTS):
                tasks.create_task(work())
    return problems


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_every_wrong_value_is_refused_by_name_and_harms_nobody(server: Server, endpoint: Endpoint) -> None:
    cases = [case for case in table() if case.endpoint is endpoint]
    assert asyncio.run(check_all(server, cases)) == []


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.path)
def test_bodies_that_are_no_object_are_refused_and_harm_nobody(server: Server, endpoint: Endpoint) -> None:
    with server.client() as client:
        for body in broken_bodies():
            response = client.post(endpoint.path, content=body)
            assert response.status_code == 400, (body[:100], response.text)
            assert response.json()["error"]["message"]
            assert client.post(endpoint.path, json=endpoint.valid).status_code == 200


def test_a_huge_body_is_refused_before_it_is_read(server: Server, client: httpx.Client) -> None:
    parts = urlsplit(server.url)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: 1099511627776\r\n\r\n{"
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(head)
        answer = b""
        while part := connection.recv(1 << 16):
            answer += part
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert client.get("/health").status_code == 200


def test_token_ids_up_to_the_vocabulary_are_taken(client: httpx.Client) -> None:
    size = client.get("/model_info").json()["vocab_size"]
    body = {"sampling_params": {"max_new_tokens": 1}}
    assert client.post("/generate", json={**body, "input_ids": [0, size - 1]}).status_code == 200
    response = client.post("/generate", json={**body, "input_ids": [0, size]})
    assert response.status_code == 400
    assert f"the token id {size}" in response.json()["error"]["message"]


def test_a_prompt_as_long_as_the_context_is_refused_with_the_figures(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={"prompt": [5] * 4096})
    assert response.status_code == 400
    assert "4096" in response.json()["error"]["message"]
    fits = client.post("/v1/completions", json={"prompt": [5] * 4095})
    assert fits.json()["choices"][0]["finish_reason"] == "length"
    assert fits.json()["usage"]["completion_tokens"] == 1


def test_numbers_that_no_computer_word_holds_are_refused(client: httpx.Client) -> None:
    for value in (10**30, -(10**30), 1 << 64):
        for body in (
            {"sampling_seed": value},
            {"max_new_tokens": value},
            {"stop_token_ids": [value]},
            {"top_k": value},
        ):
            content = json.dumps({"text": "hi", "sampling_params": body})
            assert client.post("/generate", content=content).status_code in (200, 400), content
    assert client.get("/health_generate").status_code == 200
