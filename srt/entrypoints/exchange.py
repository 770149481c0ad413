"""An HTTP request and its answer on bare ASGI, without a web framework that would slow down streams.

While a handler works on the answer, it notices when the client goes, and sends comments into a stream that has nothing to send.
"""

from __future__ import annotations

import asyncio
import gc
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

import orjson

from srt.entrypoints.direct_write import EXTENSION, DirectWriter
from srt.entrypoints.errors import error_body, is_anthropic, last_events
from srt.managers.tokenizer_manager.api_types import RequestError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]

MAX_BODY_BYTES = 16 << 20
SMALL_BODY_BYTES = 256 << 10  # while larger JSON is parsed, garbage collection is off
KEEP_ALIVE_S = 12.0  # of silence before a stream sends a comment: proxies give up after 30 to 60 s
RETRY_AFTER_S = 1
BOM = b"\xef\xbb\xbf"  # some editors and Windows tools put it before UTF-8

_JSON = (b"content-type", b"application/json")
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class ClientGone(Exception):
    """Raised when the client has closed the connection, so that no answer is needed."""


class Exchange:
    """An HTTP request, and the only writer of its answer."""

    __slots__ = (
        *("method", "path", "is_started", "is_stream", "request_id"),
        *("_scope", "_receive", "_send", "_keep_alive_s", "_wrote_at", "_direct", "_is_settled", "_id_headers"),
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, keep_alive_s: float = KEEP_ALIVE_S) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._scope = scope
        self._receive = receive
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._wrote_at = 0.0
        self._direct: DirectWriter | None = scope.get("extensions", {}).get(EXTENSION)
        self._is_settled = False  # the answer has begun, and all earlier writes have reached the socket
        self.is_started = False
        self.is_stream = False  # the answer will be a stream, begun or not
        given = self.header(b"x-request-id")
        request_id = given if given and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        self.request_id = request_id.decode("ascii")
        names = (b"x-request-id", b"request-id") if is_anthropic(self.path) else (b"x-request-id",)
        self._id_headers = [(name, request_id) for name in names]

    # ---- The request

    def header(self, name: bytes) -> bytes | None:
        """Return the first value of a header; `name` is in lower case."""
        return next((value for key, value in self._scope["headers"] if key == name), None)

    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self._scope["query_string"].decode("latin-1"), keep_blank_values=True))

    async def read_body(self, limit: int = MAX_BODY_BYTES) -> bytes:
        """Return the whole body; raise RequestError (413) as soon as it is known to be longer than `limit` bytes."""
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length[:20]) > limit:
            raise _too_large(limit)
        parts, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def read_json(self, if_empty: Any = None) -> Any:
        """Return the body's JSON value, or `if_empty` (if given) for an empty body; raise RequestError (400 or 415) for anything else.

        NaN, lone surrogates and deep nesting are not accepted as JSON.
        """
        kind = (self.header(b"content-type") or b"application/json").partition(b";")[0].strip().lower()
        body = (await self.read_body()).removeprefix(BOM)
        if kind != b"application/json" and not kind.endswith(b"+json"):
            raise RequestError(415, f"Content-Type must be application/json, not {_shown(kind)}.")
        encoding = (self.header(b"content-encoding") or b"identity").strip().lower()
        if encoding != b"identity":
            raise RequestError(
                415, f"Content-Encoding {_shown(encoding)} is not supported: send the body as plain JSON."
            )
        if not body:
            if if_empty is not None:
                return if_empty
            raise RequestError(400, "The body is empty, but must be a JSON object.")
        try:
            return _read_json(body)
        except orjson.JSONDecodeError as error:
            raise RequestError(400, f"The body is not valid JSON: {error}.") from error

    # ---- The answer

    async def send(self, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
        self.is_started = True
        head = [*headers, (b"content-length", str(len(body)).encode()), *self._id_headers]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def send_json(self, value: Any, status: int = 200, headers: Iterable[Header] = ()) -> None:
        await self.send(status, orjson.dumps(value), [_JSON, *headers])

    async def send_text(self, text: str, status: int = 200) -> None:
        await self.send(status, text.encode(), [(b"content-type", b"text/plain; charset=utf-8")])

    async def send_error(self, error: RequestError, headers: Iterable[Header] = ()) -> None:
        """Send the error as a response, or as an event if a stream has begun."""
        if self.is_started:
            await self.write(last_events(self.path, error, self.request_id))
            await self.end()
            return
        extra = list(headers)
        if error.status in (429, 503):
            extra.append((b"retry-after", str(error.retry_after_s or RETRY_AFTER_S).encode()))
        if error.status == 501:
            extra.append((b"x-should-retry", b"false"))  # OpenAI's clients try a 5xx three times
        if error.status == 413:
            extra.append((b"connection", b"close"))  # the rest of the body is not read
        await self.send_json(error_body(self.path, error, self.request_id), error.status, extra)

    async def write(self, data: bytes) -> None:
        """Send a part of a stream, beginning the stream if needed. Waits while the client's socket is full."""
        if not self.is_started:
            self.is_started = True
            head = [*_STREAM_HEADERS, *self._id_headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": head})
        self._wrote_at = time.monotonic()
        self._is_settled = False
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            self._is_settled = self._direct is not None

    @property
    def can_write_now(self) -> bool:
        """True if `write_now` may be called: all earlier writes have reached the socket, and it accepts more."""
        return self._is_settled and self._direct is not None and self._direct.is_open

    def write_now(self, data: bytes) -> None:
        """Send a part of a stream without waiting; call it only if `can_write_now`. `data` must not be empty."""
        assert self._direct is not None, "asked for where it cannot be"
        self._wrote_at = time.monotonic()
        self._direct.write(data)

    async def end(self) -> None:
        self.is_stream = False
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    # ---- The client

    async def run_while_connected(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end. If the client leaves earlier, cancel it and raise ClientGone. Read the body before this call."""
        task, watch = asyncio.create_task(work), asyncio.create_task(self._watch())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in (watch, task):
                one.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)
        if task.cancelled():
            raise ClientGone
        task.result()

    async def _watch(self) -> None:
        """Wait until the client has gone, and keep an idle stream alive until then."""
        self._wrote_at = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(self._wrote_at + self._keep_alive_s - time.monotonic()):
                    message = await self._receive()
            except TimeoutError:
                if time.monotonic() < self._wrote_at + self._keep_alive_s:
                    continue
                if self.is_stream:
                    await self.write(b": keep-alive\n\n")
                self._wrote_at = time.monotonic()
                continue
            if message["type"] == "http.disconnect":
                return


def _read_json(body: bytes) -> Any:
    """Parse JSON, with garbage collection off for a large body.

    A thread would not help: the parser holds the GIL, so the event loop would block all the same (0.05 s for 16 MiB of text, 0.25 s for
    token ids). Most time goes into collections that millions of small lists trigger: 1.9 s with them, 0.5 s without.
    """
    if len(body) <= SMALL_BODY_BYTES or not gc.isenabled():
        return orjson.loads(body)
    gc.disable()
    try:
        return orjson.loads(body)
    finally:
        gc.enable()


def _shown(header: bytes) -> str:
    return repr(header.decode("latin-1")[:80])


def _too_large(limit: int) -> RequestError:
    return RequestError(413, f"The body is larger than {limit >> 20} MiB, the limit.")
