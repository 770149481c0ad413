"""What the clients' tests share. They run in the clients' own environments, which hold nothing of `srt` or of its tests."""

from __future__ import annotations

import http.client
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import pytest


@pytest.fixture(scope="session")
def url() -> str:
    """The address of the server that `python -m tests.clients` started, without a slash at its end."""
    return os.environ["SRT_CLIENTS_URL"]


@pytest.fixture(scope="session")
def folder() -> Path:
    """The folder of the checkpoint that the server serves in float32."""
    return Path(os.environ["SRT_CLIENTS_MODEL"])


class Relay:
    """A server that passes whole requests on to ours, and notes their paths and the answers' status codes."""

    def __init__(self, target: str) -> None:
        self.seen: list[tuple[str, int]] = []
        host = urlsplit(target).netloc
        seen = self.seen

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                onward = http.client.HTTPConnection(host, timeout=60)
                onward.request("POST", self.path, body, {**self.headers, "Host": host})
                answer = onward.getresponse()
                content = answer.read()
                onward.close()
                seen.append((self.path, answer.status))
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *words: object) -> None:
                """Print nothing: a failing test shows what was seen."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def relay(url: str) -> Iterator[Relay]:
    relay = Relay(url)
    yield relay
    relay.close()
