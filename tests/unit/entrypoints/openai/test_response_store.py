"""Stored responses: asked for, continued, deleted, generated in the background, and forgotten in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai.types.responses as theirs
import pytest

from srt.entrypoints.openai.responses.store import ResponseStore
from srt.managers.tokenizer_manager.api_types import RequestError
from tests.unit.entrypoints.fake_engine import World
from tests.unit.entrypoints.sse import named_events

PATH = "/v1/responses"
Client = httpx.AsyncClient


def new_world() -> World:
    return World(enable_response_store=True)


def run(world: World, work: Callable[[Client], Awaitable[None]]) -> None:
    """Run calls on one event loop, so that what runs in the background goes on between them."""

    async def go() -> None:
        transport = httpx.ASGITransport(app=world.app)
        async with Client(transport=transport, base_url="http://test") as client:
            await work(client)

    asyncio.run(go())


def stored(world: World) -> ResponseStore:
    assert world.service.responses is not None
    return world.service.responses


async def ended(client: Client, response_id: str) -> dict[str, Any]:
    """The response when it has ended."""
    for _ in range(1000):
        answer: dict[str, Any] = (await client.get(f"{PATH}/{response_id}")).json()
        if answer["status"] != "in_progress":
            return answer
        await asyncio.sleep(0)  # the client here never waits for a socket
    raise AssertionError("it never ends")


# ---- Without the option


def test_without_the_option_nothing_is_stored_and_every_route_says_why() -> None:
    world = World()
    answer = world.post(PATH, {"input": "hi", "store": True}).json()
    assert answer["store"] is False
    path = f"{PATH}/{answer['id']}"
    for method, where in (("GET", path), ("DELETE", path), ("POST", path + "/cancel")):
        response = world.call(method, where)
        assert response.status_code == 404
        assert "start it with --enable-response-store" in response.json()["error"]["message"]


# ---- With it


def test_a_stored_response_is_returned_as_it_was_and_can_be_deleted() -> None:
    world = new_world()
    answer = world.post(PATH, {"input": "hi"}).json()
    assert answer["store"] is True
    path = f"{PATH}/{answer['id']}"
    assert world.get(path).json() == world.get(path, params={"stream": "false"}).json() == answer
    refused = world.get(path, params={"stream": "true"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    deleted = world.call("DELETE", path)
    assert deleted.json() == {"id": answer["id"], "object": "response", "deleted": True}
    missing = [world.get(path), world.call("DELETE", path), world.call("POST", path + "/cancel")]
    assert {(one.status_code, one.json()["error"]["code"]) for one in missing} == {(404, "not_found")}
    assert (len(stored(world)), stored(world).num_bytes) == (0, 0)


def test_the_end_of_a_stream_is_stored_before_the_client_knows_of_it() -> None:
    world = new_world()
    last = named_events(world.post(PATH, {"input": "hi", "stream": True}))[-1][1]["response"]
    assert world.get(f"{PATH}/{last['id']}").json() == last


def test_what_is_not_to_be_stored_is_not() -> None:
    world = new_world()
    answer = world.post(PATH, {"input": "hi", "store": False}).json()
    assert (answer["store"], len(stored(world))) == (False, 0)


def test_a_conversation_goes_on_from_a_stored_response_without_its_instructions() -> None:
    world = new_world()
    first = world.post(PATH, {"input": "hi", "instructions": "Be brief."}).json()
    second = world.post(PATH, {"input": "more", "previous_response_id": first["id"]}).json()
    assert second["previous_response_id"] == first["id"]
    third = {"input": "last", "previous_response_id": second["id"], "instructions": "Be kind."}
    assert world.post(PATH, third).status_code == 200
    told = [(one["role"], one["content"]) for one in world.engine.rendered[0]]
    answer = ("assistant", "Hello!")
    assert told == [("system", "Be kind."), ("user", "hi"), answer, ("user", "more"), answer, ("user", "last")]


def test_an_unknown_response_cannot_be_continued() -> None:
    response = new_world().post(PATH, {"input": "hi", "previous_response_id": "resp_x"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "previous_response_id")
    assert error["code"] == "previous_response_not_found"


def test_an_id_is_stored_once() -> None:
    world = new_world()
    assert world.post(PATH, {"input": "hi", "request_id": "mine"}).status_code == 200
    again = world.post(PATH, {"input": "hi", "request_id": "mine"})
    assert (again.status_code, again.json()["error"]["param"]) == (400, "request_id")


def test_a_response_that_no_path_leads_to_is_not_stored() -> None:
    world = new_world()
    refused = world.post(PATH, {"input": "hi", "request_id": "a/cancel"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_id")
    assert world.post(PATH, {"input": "hi", "request_id": "a/cancel", "store": False}).status_code == 200


# ---- In the background


def test_a_response_in_the_background_is_answered_at_once_and_generated_behind_it() -> None:
    world = new_world()

    async def work(client: Client) -> None:
        begun = (await client.post(PATH, json={"input": "hi", "background": True})).json()
        assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
        theirs.Response.model_validate(begun)
        early = await client.post(PATH, json={"input": "more", "previous_response_id": begun["id"]})
        assert "the status in_progress, which cannot be continued" in early.json()["error"]["message"]
        answer = await ended(client, begun["id"])
        assert (answer["status"], answer["background"]) == ("completed", True)
        assert answer["output"][0]["content"][0]["text"] == "Hello!"
        late = await client.post(f"{PATH}/{begun['id']}/cancel")
        assert late.json() == answer

    run(world, work)


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_cancelling_or_deleting_ends_what_runs(method: str) -> None:
    world = new_world()
    world.engine.script = lambda request: [None]

    async def work(client: Client) -> None:
        begun = (await client.post(PATH, json={"input": "hi", "background": True})).json()
        path = f"{PATH}/{begun['id']}"
        answer = await client.request(method, path + ("/cancel" if method == "POST" else ""))
        assert answer.status_code == 200
        while not world.engine.handles[0].was_aborted:  # noqa: ASYNC110 - its task ends behind the answer
            await asyncio.sleep(0)
        left = await client.get(path)
        assert (left.json().get("status"), left.status_code) in (("cancelled", 200), (None, 404))
        assert (left.status_code == 200) == (method == "POST")

    run(world, work)


def test_only_what_runs_in_the_background_can_be_cancelled() -> None:
    world = new_world()
    answer = world.post(PATH, {"input": "hi"}).json()
    response = world.call("POST", f"{PATH}/{answer['id']}/cancel")
    assert response.status_code == 400
    assert "background: true" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RequestError(503, "The engine has ended."), "server_error"),
        (RequestError(429, "Full."), "rate_limit_exceeded"),
        (RequestError(400, "The input is wrong."), "invalid_prompt"),
    ],
)
def test_an_error_in_the_background_is_the_responses(error: RequestError, code: str) -> None:
    world = new_world()
    world.engine.script = lambda request: [error]

    async def work(client: Client) -> None:
        begun = (await client.post(PATH, json={"input": "hi", "background": True})).json()
        answer = await ended(client, begun["id"])
        theirs.Response.model_validate(answer)
        assert (answer["status"], answer["error"]) == ("failed", {"code": code, "message": error.message})

    run(world, work)


@pytest.mark.parametrize("fields", [{"stream": True}, {"store": False}])
def test_what_cannot_go_on_in_the_background_is_refused(fields: dict[str, Any]) -> None:
    response = new_world().post(PATH, {"input": "hi", "background": True, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "background")


# ---- Bounds


def response(response_id: str, **fields: Any) -> Any:
    return {"id": response_id, "status": "completed", "background": False, **fields}


def ids_in(store: ResponseStore, ids: str) -> str:
    """Those of the ids, a letter each, that are stored."""

    def is_stored(response_id: str) -> bool:
        try:
            store.get(response_id)
        except RequestError:
            return False
        return True

    return "".join(filter(is_stored, ids))


def test_the_oldest_responses_make_room() -> None:
    store = ResponseStore(max_responses=3)
    for name in "abcde":
        store.put(response(name), [])
    assert (len(store), ids_in(store, "abcde")) == (3, "cde")


def test_large_responses_leave_room_for_few() -> None:
    store = ResponseStore(max_bytes=3000)
    for name in "abcde":
        store.put(response(name), [{"role": "user", "content": "x" * 900}])
    assert ids_in(store, "abcde") == "cde"
    assert store.num_bytes <= 3000
    store.put(response("f"), [{"role": "user", "content": "x" * 5000}])
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_response_expires() -> None:
    now = 0.0
    store = ResponseStore(kept_s=10, clock=lambda: now)
    store.put(response("a"), [])
    now = 6.0
    store.put(response("b"), [])
    assert ids_in(store, "ab") == "ab"
    now = 10.0
    assert ids_in(store, "ab") == "b"
    with pytest.raises(RequestError, match="previous_response_id is not the id of a stored response: 'a'"):
        store.conversation("a")
    assert len(store) == 1


def test_what_runs_is_not_forgotten_and_is_bounded_by_itself() -> None:
    async def go() -> None:
        store = ResponseStore(max_responses=2)
        tasks = [asyncio.create_task(asyncio.sleep(60)) for _ in range(2)]
        for name, task in zip("ab", tasks, strict=True):
            store.check_new(name, in_background=True)
            store.put(response(name, status="in_progress", background=True), [], task)
        store.put(response("c"), [])
        assert ids_in(store, "abc") == "ab"
        with pytest.raises(RequestError, match="2 responses, the limit, are generated") as caught:
            store.check_new("d", in_background=True)
        assert caught.value.status == 429
        assert store.cancel("a")["status"] == "cancelled"
        store.check_new("d", in_background=True)
        store.delete("b")
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)

    asyncio.run(go())


def test_what_runs_is_bounded_in_bytes() -> None:
    async def go() -> None:
        store = ResponseStore(max_bytes=3000)
        task = asyncio.create_task(asyncio.sleep(60))
        store.check_new("a", in_background=True)
        store.put(response("a", status="in_progress", background=True), [{"role": "user", "content": "x" * 3000}], task)
        with pytest.raises(RequestError, match=r"generated in the background have 3[0-9]+ bytes") as caught:
            store.check_new("b", in_background=True)
        assert caught.value.status == 429
        store.check_new("b", in_background=False)
        store.delete("a")
        store.check_new("b", in_background=True)

    asyncio.run(go())
