"""A lean HTTP/1.1 client for tests that need a thousand connections, or that break them off at will."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit


class RawRequest:
    """One POST on a connection of its own. `disconnect` may be called at any moment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def post(cls, url: str, body: dict[str, Any]) -> RawRequest:
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        data = json.dumps(body).encode()
        head = f"POST {parts.path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        writer.write(head.encode() + b"Connection: close\r\n\r\n" + data)
        await writer.drain()
        return cls(reader, writer)

    async def status(self) -> int:
        """Read the response's head."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1])

    async def body(self) -> bytes:
        """All that comes until the server closes; chunk sizes of a chunked answer included."""
        return await self._reader.read()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream, up to [DONE]."""
        while line := await self._reader.readline():
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                yield json.loads(line[6:])

    def disconnect(self) -> None:
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()
