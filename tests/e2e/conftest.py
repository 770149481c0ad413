"""The real server, started once for all tests that only talk to it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.browser import Browser
from tests.support.checkpoints import CheckpointFactory
from tests.support.server_process import ServerProcess

MODEL = "tiny-test"
ALIAS = "org/tiny-test"


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. `url` has no slash at its end."""

    url: str
    model: str
    process: ServerProcess

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120)


@pytest.fixture(scope="session")
def server(checkpoint: CheckpointFactory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two frontends, one rank, a random checkpoint. Whoever uses it leaves nothing running."""
    words = ["--model-path", str(checkpoint("qwen3")), "--served-model-name", MODEL, ALIAS, "--port", "0"]
    words += ["--device", "cpu", "--dtype", "float32", "--max-total-tokens", "32768", "--max-running-requests", "32"]
    words += ["--tokenizer-worker-num", "2", "--enable-cache-report", "--random-seed", "0"]
    tmp: Path = tmp_path_factory.mktemp("server")
    with ServerProcess("srt.launch_server", words, tmp) as process:
        yield Server(process.wait_ready(), MODEL, process)
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.lines


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="session")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The shipped model, as a newcomer serves it. Whoever uses it leaves nothing running."""
    words = ["--model-path", "tiny", "--port", "0", "--device", "cpu", "--max-total-tokens", "16384"]
    with ServerProcess("srt.launch_server", words, tmp_path_factory.mktemp("tiny-server")) as process:
        yield Server(process.wait_ready(), "tiny", process)
        process.send(signal.SIGTERM)
        assert process.wait() == 0, process.lines


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()
