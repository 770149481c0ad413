"""uvicorn's HTTP/1.1 connection, extended with limits, refusals and fast writes that a serving engine needs."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import httptools
import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from srt.entrypoints.direct_write import EXTENSION, DirectWriter
from srt.entrypoints.http2_refusal import GREETING, PREFACE, Http2Refusal, farewell
from srt.server_args import ServerArgs

MAX_HEADER_BYTES = 64 << 10
MAX_BODY_PAUSE_S = 60.0  # between two parts of a body
LINGER_S = 2.0
MAX_HEADER_S = 20.0  # from the connection's beginning, or a request's first byte, to the end of its headers


class HttpProtocol(HttpToolsProtocol):
    """A client's connection. It extends uvicorn's in these ways:

    - When a client leaves, every request of the connection notices it, not only the last one that was pipelined.
    - Too large or too slow headers are refused, and so are bodies that stop coming.
    - Refusals, also of data that is not HTTP, have the JSON shape of every other error, and follow the answers to earlier requests.
    - Offers to switch the protocol (Java's client makes one) are ignored, as HTTP allows.
    - HTTP/1.0, which many proxies speak to their upstreams, gets streams without chunked encoding, and a kept connection if it asks.
    - HTTP/2 without negotiation is refused in HTTP/2.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open_cycles: list[RequestResponseCycle] = []
        self._header_bytes = 0  # parsed so far, in the current headers
        self._unfinished_bytes = 0  # received while headers were being read
        self._is_in_header = False
        self._is_refused = False
        self._opening: bytes | None = b""  # the first bytes, while they may be the preface of HTTP/2
        self._http2: Http2Refusal | None = None
        self._complaint = ""  # why the current headers are refused
        self._timer: asyncio.TimerHandle | None = None  # deadline of the headers or body being read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timer(MAX_HEADER_S, self.transport.close)  # without a request there is nothing to answer

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        if self._opening is not None:
            self._opening += data
            if PREFACE.startswith(self._opening[: len(PREFACE)]):
                self._hear_preface(self._opening)
                return
            data, self._opening = self._opening, None
        if self._http2 is not None:
            self._hear_http2(self._http2, data)
            return
        self._feed(data)
        if self._is_in_header and not self._is_refused:
            # The parser reports only complete headers, and would buffer an endless one.
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > MAX_HEADER_BYTES:
                self._refuse_greedy_header()

    def _hear_preface(self, opening: bytes) -> None:
        """Begin the HTTP/2 refusal once the whole preface has come."""
        if len(opening) < len(PREFACE):
            return
        self._opening, self._http2 = None, Http2Refusal()
        self.transport.write(GREETING)
        self._set_timer(LINGER_S, self._end_http2)
        self._hear_http2(self._http2, opening[len(PREFACE) :])

    def _hear_http2(self, refusal: Http2Refusal, data: bytes) -> None:
        answer = refusal.answer(data)
        if answer:
            self._write_last(answer)

    def _end_http2(self) -> None:
        self._write_last(farewell())

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser ends such a message with its headers, so a new parser reads it again without the offer.
                method = self.parser.get_method()
                if method == b"CONNECT":
                    self._refuse(b"405 Method Not Allowed", "CONNECT is not supported: this server is not a proxy.")
                    return
                head = _head_without_offer(method, self.url, self.parser.get_http_version(), self.headers)
                data = head + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return

    def on_message_begin(self) -> None:
        self._header_bytes = self._unfinished_bytes = 0
        self._is_in_header = True
        self._set_timer(MAX_HEADER_S, self._refuse_slow_header)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_header(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(name, value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_header = False
        if self.parser.should_upgrade():
            self._stop_timer()
            return
        self._complaint = _complaint(self.parser.get_http_version(), self.headers)
        if self._complaint:
            raise ValueError(self._complaint)  # the parser makes it an HttpParserError
        self._set_timer(MAX_BODY_PAUSE_S, self._refuse_slow_body)
        super().on_headers_complete()
        extensions: Any = {EXTENSION: DirectWriter(self.cycle)}
        self.scope["extensions"] = extensions
        if self.scope["http_version"] == "1.0":
            self.cycle.keep_alive = self.parser.should_keep_alive()
            self.cycle.send = _send_unchunked(self.cycle)  # type: ignore[method-assign, assignment]
        self._open_cycles = [cycle for cycle in self._open_cycles if not cycle.response_complete]
        self._open_cycles.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._set_timer(MAX_BODY_PAUSE_S, self._refuse_slow_body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._stop_timer()
        super().on_message_complete()
        self.cycle.more_body = False  # also of a request that was answered before its body came

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        for cycle in self._open_cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
            cycle.message_event.set()
        self._open_cycles = []

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser rejected, including too large headers."""
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse_greedy_header()
        else:
            self._refuse(b"400 Bad Request", self._complaint or msg)

    def _refuse_greedy_header(self) -> None:
        sentence = f"The headers are larger than {MAX_HEADER_BYTES >> 10} KiB, the limit."
        self._refuse(b"431 Request Header Fields Too Large", sentence)

    def _refuse_slow_header(self) -> None:
        self._refuse(b"408 Request Timeout", f"The headers were not complete within {MAX_HEADER_S:g} s.")

    def _refuse_slow_body(self) -> None:
        if self.flow.read_paused:  # this side has stopped reading: the client is not slow
            self._set_timer(MAX_BODY_PAUSE_S, self._refuse_slow_body)
        else:
            self._refuse(
                b"408 Request Timeout", f"The body was not complete, and no part of it came for {MAX_BODY_PAUSE_S:g} s."
            )

    def _refuse(self, status: bytes, sentence: str) -> None:
        """Answer and close. If earlier requests still lack their answers, just close behind those: a client would take the refusal for
        one of them."""
        self._is_refused = True
        self._stop_timer()
        refused = next((cycle for cycle in self._open_cycles if cycle.more_body), None)  # its headers were accepted
        owed = [cycle for cycle in self._open_cycles if cycle is not refused and not cycle.response_complete]
        if owed:
            owed[-1].keep_alive = False  # close the connection behind the last answer
        elif refused is not None and refused.response_started:
            self.transport.close()
        else:
            body = orjson.dumps({"error": {"message": sentence}})
            head = b"content-type: application/json\r\nconnection: close\r\nx-request-id: %b\r\ncontent-length: %d"
            head %= (uuid.uuid4().hex.encode(), len(body))
            self._write_last(b"HTTP/1.1 %b\r\n%b\r\n\r\n%b" % (status, head, body))

    def _write_last(self, answer: bytes) -> None:
        """Write and ignore further input, but close only after LINGER_S: a reset while the client still sends would lose the answer."""
        self._is_refused = True
        self.transport.write(answer)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_timer(LINGER_S, self.transport.close)

    def _set_timer(self, seconds: float, on_time: Callable[[], object]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, on_time)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _count_header(self, *parts: bytes) -> None:
        self._header_bytes += sum(map(len, parts))
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"headers of more than {MAX_HEADER_BYTES} bytes")  # the parser makes it an HttpParserError


def _head_without_offer(method: bytes, url: bytes, version: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    for name, value in headers:
        if name == b"connection":
            kept = [word for word in value.split(b",") if word.strip().lower() not in (b"upgrade", b"http2-settings")]
            value = b",".join(kept)
        if name not in (b"upgrade", b"http2-settings"):
            lines.append(b"%b: %b" % (name, value))
    return b"\r\n".join((*lines, b"", b""))


def _complaint(version: str, headers: list[tuple[bytes, bytes]]) -> str:
    """Return what is wrong with headers that the parser accepted; empty if they are valid."""
    if version not in ("1.0", "1.1"):
        return "The request line must end with HTTP/1.1 or HTTP/1.0."
    num_hosts = sum(name == b"host" for name, _ in headers)
    if version == "1.1" and num_hosts != 1:
        return f"An HTTP/1.1 request needs exactly one Host header, but this one has {num_hosts or 'none'}."
    return ""


def _send_unchunked(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """Return a `send` for HTTP/1.0, which has no chunked encoding: a body of unknown length ends with the connection.

    With a known length the connection is kept if the client asked for it, and the answer's headers say so.
    """
    send, is_endless = cycle.send, False

    async def send_unchunked(message: Any) -> None:
        nonlocal is_endless
        if message["type"] == "http.response.start":
            is_endless = all(name != b"content-length" for name, _ in message["headers"])
            if is_endless:
                cycle.chunked_encoding = False
                cycle.keep_alive = False
            elif cycle.keep_alive and all(name != b"connection" for name, _ in message["headers"]):
                message["headers"].append((b"connection", b"keep-alive"))
        elif is_endless:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_unchunked


def http_config(app: Any, args: ServerArgs) -> uvicorn.Config:
    """Return uvicorn's configuration: no logs, lifespan or signal handling, since the process around it handles these."""
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
        timeout_keep_alive=75,  # longer than clients keep idle connections, so that the client closes first
        backlog=2048,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        ssl_keyfile_password=args.ssl_keyfile_password,
    )
