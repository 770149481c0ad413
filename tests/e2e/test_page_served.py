"""The page as an operator serves it: over TLS, with an API key, by two frontends in front of one engine."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import psutil
import pytest

from tests.support.browser import Browser, BrowserError, Page
from tests.support.server_process import END_S, ROOT, ServerProcess

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("browser")]

CERTIFICATE = ROOT / "tests/support/localhost.pem"
CONNECTED = "document.querySelector('#health').textContent === 'connected'"
SETTLED = "document.querySelector('#stop').disabled && document.querySelector('.message.assistant .quiet')"
PROCESSES = "[...document.querySelectorAll('#processes li.well')].map((one) => one.firstChild.data.trim()).join()"


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    client: httpx.Client  # with the key; each request on a connection of its own, so that it comes to either frontend


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    words = ["--model-path", "tiny", "--device", "cpu", "--port", "0", "--max-total-tokens", "8192"]
    words += ["--tokenizer-worker-num", "2", "--api-key", "secret"]
    words += ["--ssl-certfile", str(CERTIFICATE), "--ssl-keyfile-password", "secret"]
    with ServerProcess("srt.launch_server", words, tmp_path_factory.mktemp("served")) as process:
        url = process.wait_ready().replace("127.0.0.1", "localhost")
        with httpx.Client(
            base_url=url,
            timeout=END_S,
            verify=ssl.create_default_context(cafile=CERTIFICATE),
            limits=httpx.Limits(max_keepalive_connections=0),
            headers={"authorization": "Bearer secret"},
        ) as client:
            yield Served(url, client)


def give_key(page: Page, key: str = "secret") -> None:
    page.wait("!document.querySelector('#key-panel').hidden && document.activeElement.id === 'key'")
    page.type(key)
    page.press("Enter")


def ask(page: Page, question: str) -> str:
    page.click("[name=temperature]")
    page.type("0")
    page.click("#text")
    page.type(question)
    page.press("Enter")
    page.wait(SETTLED)
    return str(page.run("document.querySelector('.message.assistant .words').textContent"))


def test_a_certificate_that_nobody_vouches_for_is_not_accepted_unasked(browser: Browser, served: Served) -> None:
    with browser.page("about:blank?") as page, pytest.raises(BrowserError):
        page.run(f"fetch({served.url + '/health'!r}, {{mode: 'no-cors'}})")


def test_over_tls_the_page_asks_for_the_key_and_then_answers(browser: Browser, served: Served) -> None:
    with browser.page(served.url, trusts_all=True) as page:
        assert page.run("location.protocol") == "https:"
        give_key(page, "wrong")
        give_key(page)
        page.wait(CONNECTED)
        assert ask(page, "What is 123 + 456?") == "123 + 456 = 579"
        assert page.run("isSecureContext")


@pytest.mark.parametrize(("index", "other"), [(0, 1), (1, 0)])
def test_either_frontend_shows_the_whole_engine(browser: Browser, served: Served, index: int, other: int) -> None:
    """Whichever of the two a browser has come to: while the other one stands still, it can be but this one."""
    processes = served.client.get("/health").json()["processes"]
    sleeper = psutil.Process(processes[f"frontend {other}"]["pid"])
    with browser.page("about:blank?", trusts_all=True) as page:
        sleeper.suspend()
        try:
            page.open(served.url)
            give_key(page)
            page.wait(f"document.querySelector('#facts').textContent.includes('of frontend {index}:')")
        finally:
            sleeper.resume()
        page.wait(f"{PROCESSES} === 'frontend 0,frontend 1,scheduler 0,supervisor,worker 0'")
        assert ask(page, "What is 123 + 456?") == "123 + 456 = 579"
