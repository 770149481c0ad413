"""uvicorn's HTTP/1.1 parser and connection, with three differences that a serving engine needs."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEADER_BYTES = 64 << 10
MAX_HEADER_S = 20.0  # from the connection, or from a request's first byte, to the end of its headers


class HttpProtocol(HttpToolsProtocol):
    """One connection.

    - A client that leaves is noticed by every request of the connection, not only by the last one that it pipelined.
    - Greedy headers are refused, and slow ones are not waited for.
    - What is no HTTP is answered in the shape of every other error.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open_cycles: list[RequestResponseCycle] = []
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(MAX_HEADER_S, self._refuse_slow_header)

    def on_message_begin(self) -> None:
        self._header_bytes = 0
        self._stop_header_timer()
        self._header_timer = self.loop.call_later(MAX_HEADER_S, self._refuse_slow_header)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_header(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(name, value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_header_timer()
        super().on_headers_complete()
        self._open_cycles = [cycle for cycle in self._open_cycles if not cycle.response_complete]
        self._open_cycles.append(self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        super().connection_lost(exc)
        for cycle in self._open_cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()
        self._open_cycles = []

    def send_400_response(self, msg: str) -> None:
        body = orjson.dumps({"error": {"message": msg}})
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
            % (len(body), body)
        )
        self.transport.close()

    def _refuse_slow_header(self) -> None:
        self.transport.close()

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _count_header(self, *parts: bytes) -> None:
        self._header_bytes += sum(map(len, parts))
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"headers of more than {MAX_HEADER_BYTES} bytes")  # the parser makes it an HttpParserError


def http_config(app: Any) -> uvicorn.Config:
    """Quiet, without lifespan and signals: the process around it takes care of both."""
    return uvicorn.Config(
        app,
        http=HttpProtocol,
        loop="none",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,  # longer than clients keep idle connections, so that they are the ones who close
        backlog=2048,
    )
