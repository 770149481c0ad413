"""A replica of the example of Ray Serve: an actor that owns a whole server on its node, and passes HTTP requests on to it."""

from __future__ import annotations

import select
from collections.abc import AsyncIterator

import aiohttp
from starlette.requests import Request
from starlette.responses import StreamingResponse

from srt.entrypoints.engine_process import EngineProcess
from srt.protocol.messages import Failed, ServerReady
from srt.server_args import ServerArgs
from srt.utils.errors import StartError

OF_ONE_CONNECTION = frozenset(("connection", "host", "keep-alive", "transfer-encoding", "content-length"))


class ServeReplica:
    """Owner of a server's supervisor, which ends with this actor."""

    def __init__(self, args: ServerArgs) -> None:
        """Start the server and wait until it is ready. StartError if it cannot start."""
        self._supervisor = EngineProcess(args, http=True)
        started = self._supervisor.wait_started()
        assert started is not None and started.url is not None
        self._url = started.url
        while not isinstance(message := self._supervisor.receive(), ServerReady):
            if isinstance(message, Failed):
                raise StartError(message.message)
            select.select([self._supervisor], [], [])
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, request: Request) -> StreamingResponse:
        """Pass a request on, and its answer back as it comes. A client that leaves ends the request."""
        if self._session is None:  # here, because a session belongs to the event loop that calls this method
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)
        url = f"{self._url}{request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
        headers = [(name, value) for name, value in request.headers.items() if name not in OF_ONE_CONNECTION]
        answer = await self._session.request(request.method, url, headers=headers, data=await request.body())
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in OF_ONE_CONNECTION}
        return StreamingResponse(_chunks(answer), answer.status, kept)

    def check_health(self) -> None:
        """Raise StartError when the server has ended; Ray Serve then replaces this actor."""
        while (message := self._supervisor.receive()) is not None:
            if isinstance(message, Failed):
                raise StartError(message.message)

    def __del__(self) -> None:
        """End the server when Ray Serve takes this replica away."""
        if hasattr(self, "_supervisor"):
            self._supervisor.stop()


async def _chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with answer:
        async for chunk in answer.content.iter_any():
            yield chunk
