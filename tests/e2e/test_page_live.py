"""The page's live view, in a real browser: figures that move with the load, and what it says when something is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from srt.entrypoints import live_feed, service
from tests.e2e.conftest import Server
from tests.support.browser import Browser, Page
from tests.support.page_server import COUNTERS, PageServer, page_server

pytestmark = pytest.mark.e2e

CONNECTED = "document.querySelector('#health').textContent === 'connected'"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[PageServer]:
    monkeypatch.setattr(live_feed, "PERIOD_S", 0.02)
    with page_server() as server:
        yield server


def health(words: str) -> str:
    return f"document.querySelector('#health').textContent === '{words}'"


def shown(name: str, words: str) -> str:
    return f"document.querySelector('#{name}').textContent === '{words}'"


def painted(page: Page) -> list[int]:
    """How many dots of each chart have a colour."""
    counts: list[int] = page.run(
        "[...document.querySelectorAll('canvas')].map((one) => one.getContext('2d').getImageData(0, 0, one.width || 1,"
        " one.height || 1).data.filter((part, at) => at % 4 === 3 && part > 0).length)"
    )
    return counts


def test_the_figures_move_with_the_load_and_come_to_rest(browser: Browser, tiny_server: Server) -> None:
    work = {"text": "Tell me a story", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    enough = threading.Event()

    def keep_busy() -> None:
        with tiny_server.client() as client:
            while not enough.is_set():
                assert client.post("/generate", json=work).status_code == 200

    with browser.page(tiny_server.url) as page, ThreadPoolExecutor(3) as pool:
        page.wait(CONNECTED)
        loads = [pool.submit(keep_busy) for _ in range(3)]
        try:
            page.wait(shown("running", "3"))
            page.wait("Number(document.querySelector('#decode').textContent) > 0")
            page.wait("parseFloat(document.querySelector('#kv_running').textContent) > 0")
            page.wait("document.querySelector('#step').textContent.endsWith(' ms')")
        finally:
            enough.set()
        for load in loads:
            load.result()
        page.wait(f"{shown('running', '0')} && {shown('decode', '0')}")
        page.wait("parseFloat(document.querySelector('#kv_cached').textContent) > 0")
        assert all(count > 0 for count in painted(page)), painted(page)
        names = "[...document.querySelectorAll('#processes li.well')].map((one) => one.firstChild.data.trim()).join()"
        page.wait(f"{names} === 'frontend 0,scheduler 0,supervisor,worker 0'")


def test_who_opens_the_page_sees_what_was_before(browser: Browser, tiny_server: Server) -> None:
    with tiny_server.client() as client:
        client.post("/generate", json={"text": "Hello", "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}})
    with browser.page(tiny_server.url) as page:
        page.wait(CONNECTED)
        page.wait("document.querySelector('canvas').getAttribute('aria-label').includes('at most')")
        assert painted(page)[0] > 0


def test_every_figure_is_the_one_that_the_engine_tells(browser: Browser, fake: PageServer) -> None:
    def work(**changes: int) -> dict[str, Any]:
        return {name: COUNTERS[name] + more for name, more in changes.items()}

    with browser.page(fake.url) as page:
        page.wait(f"{CONNECTED} && {shown('running', '3')} && {shown('waiting', '2')} && {shown('hits', '25 %')}")
        shares = [page.text(f"#{name}") for name in ("kv_running", "kv_cached", "kv_free")]
        assert shares == ["30 %", "20 %", "50 %"]
        widths = "['kv_running', 'kv_cached'].map((one) => document.querySelector(`#memory .${one}`).style.width)"
        assert page.run(widths) == ["30%", "20%"]
        label = page.run("document.querySelector('#memory').ariaLabel")
        assert label == "KV memory: 30 % running, 20 % cached, 50 % free, of 1600 tokens"
        more = work(num_steps=10, num_rows=50, num_prompt_rows=20, step_us=25_000)
        more |= work(
            num_generated_tokens=40, num_computed_prompt_tokens=500, num_prompt_tokens=1000, num_cached_tokens=500
        )
        fake.do(lambda: fake.world.engine.counters.update(more | {"num_running": 8, "num_waiting": 0}))
        page.wait(f"{shown('running', '8')} && {shown('waiting', '0')}")
        labels = "[...document.querySelectorAll('canvas')].map((one) => one.getAttribute('aria-label'))"
        page.wait(f"{labels}[3].includes('2.50 ms')")
        tokens, requests, rows, step, hits, memory = page.run(labels)
        assert "generated" in tokens and "prompt" in tokens
        assert requests == "Requests over the last 5 minutes: running 8 last, 8 at most; waiting 0 last, 2 at most"
        assert "that generate 3.0 last" in rows and "of prompts 2.0 last" in rows
        assert "mean 2.50 ms last, 2.50 ms at most" in step
        assert "of prompt tokens 50 % last" in hits
        assert "running 30 % last" in memory
        assert all(count > 0 for count in painted(page))


def test_nothing_is_followed_while_the_page_is_not_seen(browser: Browser, fake: PageServer) -> None:
    with browser.page(fake.url) as page:
        page.wait(CONNECTED)
        page.run(
            "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        fake.do(lambda: fake.world.engine.counters.update(num_running=9))
        fake.wait(lambda: not fake.num_open)
        assert page.text("#running") == "3"
        page.run("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
        page.wait(shown("running", "9"))


def test_a_server_that_goes_is_told_and_found_again_when_it_is_back(browser: Browser) -> None:
    with page_server() as first, browser.page(first.url) as page:
        page.wait(CONNECTED)
        first.close()
        page.wait(health("connection lost"))
        assert page.text("#trouble").endswith("Trying again every 2 seconds.")
        assert page.run("document.querySelector('#trouble').getAttribute('role')") == "alert"
        page.click("#text")
        page.type("Hello")
        page.press("Enter")
        page.wait("document.querySelector('#log .error')")
        assert page.text("#log .error") == "The server cannot be reached."
        with page_server(first.port):
            page.wait(f"{CONNECTED} && document.querySelector('#trouble').hidden")
            page.click("#send")
            page.wait("document.querySelector('.message.assistant .quiet')")


def test_an_engine_that_does_not_answer_is_told_as_that(
    browser: Browser, fake: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(is_own: bool) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(service, "ANSWER_S", 0.02)
    with browser.page(fake.url) as page:
        page.wait(CONNECTED)
        answering = fake.world.engine.get_states
        fake.do(lambda: setattr(fake.world.engine, "get_states", hang))
        page.wait(health("not answering"))
        assert "does not answer" in page.text("#trouble")
        fake.do(lambda: setattr(fake.world.engine, "get_states", answering))
        page.wait(f"{CONNECTED} && document.querySelector('#trouble').hidden")


def test_a_server_that_starts_or_drains_is_told_as_that(browser: Browser) -> None:
    with page_server(ready=False) as fake, browser.page(fake.url) as page:
        page.wait(health("starting"))
        page.click("#text")
        page.type("Hello")
        page.press("Enter")
        page.wait("document.querySelector('#log .error')")
        assert page.text("#log .error") == "The server is starting."


def test_a_worker_that_is_stopped_is_named(browser: Browser, tiny_server: Server) -> None:
    worker = next(child for child in tiny_server.process.children() if "srt.managers.tp_worker" in child.cmdline())
    with browser.page(tiny_server.url) as page:
        page.wait(CONNECTED)
        worker.send_signal(signal.SIGSTOP)
        try:
            page.wait("document.querySelector('#processes li.unwell')")
            assert "Worker 0 has given no sign of life" in page.text("#trouble")
            assert page.text("#health") == "stuck"
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):  # whoever waits too long may have replaced it
                worker.send_signal(signal.SIGCONT)
        page.wait(f"{CONNECTED} && !document.querySelector('#processes li.unwell')")
