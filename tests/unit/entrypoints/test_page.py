"""The page at /: its files, and the stream that its live view reads."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from srt.entrypoints.web_page import FILES, FOLDER
from srt.managers.tokenizer_manager.api_types import EngineDied
from srt.protocol.messages import Load
from tests.support.page_server import COUNTERS
from tests.unit.entrypoints.fake_engine import World


class Watcher:
    """A client of /page/stats; its end is in the test's hands."""

    def __init__(self, world: World, method: str = "GET", headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self.sent: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        world.engine.counters |= COUNTERS
        scope = {"type": "http", "method": method, "path": "/page/stats", "headers": headers, "query_string": b""}
        self.task = asyncio.create_task(world.app(scope, self._inbox.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        self._news.set()

    def leave(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    @property
    def events(self) -> list[Any]:
        blocks = b"".join(message.get("body", b"") for message in self.sent).split(b"\n\n")
        return [orjson.loads(block.removeprefix(b"data: ")) for block in blocks if block.startswith(b"data: ")]

    async def until(self, claim: Callable[[], bool]) -> None:
        while not claim():
            self._news.clear()
            await self._news.wait()


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("srt.entrypoints.live_feed.PERIOD_S", 0.001)


@pytest.mark.parametrize("path", FILES)
def test_the_files_are_served_as_what_they_are(path: str) -> None:
    response = World(api_key="secret", ready=False).get(path)
    assert response.status_code == 200
    name, kind = FILES[path]
    assert response.content == (FOLDER / name).read_bytes()
    assert response.headers["content-type"] == kind
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["content-security-policy"].startswith("default-src 'self';")


def test_every_file_of_the_folder_has_its_path() -> None:
    assert {name for name, _ in FILES.values()} == {path.name for path in FOLDER.iterdir()}


def test_the_page_needs_nothing_but_its_own_files() -> None:
    page = (FOLDER / "index.html").read_text("utf-8")
    assert set(re.findall(r'(?:src|href)="([^"]*)"', page)) == set(FILES) - {"/"}
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", page), (
        "the policy forbids what stands inline"
    )
    for name, _ in FILES.values():
        text = (FOLDER / name).read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert set(re.findall(r'from "([^"]*)"', text)) <= set(FILES)
        assert not re.search(r"https?://|innerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_every_field_of_the_page_has_a_label() -> None:
    page = (FOLDER / "index.html").read_text("utf-8")
    labelled = set(re.findall(r'<label for="(\w+)"', page))
    outside = re.sub(r"<label(?! for).*?</label>", "", page, flags=re.DOTALL)
    assert set(re.findall(r'<(?:input|textarea) id="(\w+)"', outside)) == labelled
    assert len(re.findall(r"<(?:input|textarea)", outside)) == len(labelled)


@pytest.mark.parametrize(
    "path",
    [
        "/page",
        "/page/",
        "/page/index.html",
        "/page/../app.py",
        "/page/%2e%2e/app.py",
        "/page//chat.js",
        "//page/chat.js",
    ],
)
def test_no_other_path_reaches_a_file(path: str) -> None:
    async def go() -> None:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
        await World().app(scope, receive, send)
        assert sent[0]["status"] == 404

    asyncio.run(go())


def test_the_page_is_only_read() -> None:
    response = World().post("/", {})
    assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
    assert World().call("HEAD", "/").headers["content-type"].startswith("text/html")


def test_the_stream_tells_the_counters_until_the_client_leaves() -> None:
    async def go() -> None:
        world = World()
        watcher = Watcher(world)
        await watcher.until(lambda: len(watcher.events) >= 3)
        watcher.leave()
        await watcher.task
        assert dict(watcher.sent[0]["headers"])[b"content-type"].startswith(b"text/event-stream")
        first, second = watcher.events[:2]
        assert first["health"] == "connected"
        assert (first["model"], first["num_running"], first["num_waiting"]) == ("tiny", 3, 2)
        assert first["memory"] == {"kv_running": 0.3, "kv_cached": 0.2, "kv_free": 0.5}
        assert first["points"] == []
        assert first["frontend"] == {"index": 0, "live_requests": 0}
        assert first["time"] < second["time"]

    asyncio.run(go())


def test_the_stream_ends_when_the_server_drains() -> None:
    async def go() -> None:
        world = World()
        watcher = Watcher(world)
        await watcher.until(lambda: len(watcher.events) >= 1)
        world.service.drain()
        await watcher.task
        assert watcher.sent[-1]["more_body"] is False
        assert watcher.events[-1]["health"] == "draining"

    asyncio.run(go())


def test_the_stream_begins_before_the_engine_and_survives_it() -> None:
    async def go() -> None:
        starting = World(ready=False)
        watcher = Watcher(starting)
        await watcher.until(lambda: len(watcher.events) >= 1)
        watcher.leave()
        await watcher.task
        assert (watcher.events[0]["health"], watcher.events[0]["engine"]) == ("starting", None)

        world = World()
        watcher = Watcher(world)
        await watcher.until(lambda: len(watcher.events) >= 1)
        world.engine.ready = False
        await watcher.until(lambda: watcher.events[-1]["health"] == "lost")
        watcher.leave()
        await watcher.task

    asyncio.run(go())


@pytest.mark.parametrize("is_dead", [True, False])
def test_an_engine_that_does_not_answer_is_told_as_that(is_dead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        world = World()

        async def get_states(is_own: bool) -> Any:
            if is_dead:
                raise EngineDied
            await asyncio.Event().wait()

        monkeypatch.setattr("srt.entrypoints.service.ANSWER_S", 0.01)
        monkeypatch.setattr(world.engine, "get_states", get_states)
        world.engine.load = Load(3, 4, 0, 10)
        watcher = Watcher(world)
        await watcher.until(lambda: len(watcher.events) >= 1)
        watcher.leave()
        await watcher.task
        event = watcher.events[0]
        assert (event["health"], event["num_running"], event["num_waiting"]) == ("not answering", 3, 4)
        assert event["engine"] is None

    asyncio.run(go())


def test_the_stream_needs_the_key_where_there_is_one() -> None:
    async def go() -> None:
        world = World(api_key="secret")
        refused = Watcher(world)
        await refused.task
        assert refused.sent[0]["status"] == 401
        allowed = Watcher(world, headers=((b"authorization", b"Bearer secret"),))
        await allowed.until(lambda: len(allowed.events) >= 1)
        allowed.leave()
        await allowed.task

    asyncio.run(go())


def test_head_of_the_stream_ends_at_once() -> None:
    async def go() -> None:
        watcher = Watcher(World(), "HEAD")
        await watcher.task
        assert (watcher.sent[0]["status"], watcher.sent[-1]["more_body"]) == (200, False)

    asyncio.run(go())
