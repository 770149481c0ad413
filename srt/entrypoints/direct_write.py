"""The short way from a stream to its socket: no coroutine, no task that wakes, one write for what one step brought."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "srt.direct_write"  # under this name a scope has its DirectWriter


class DirectWriter:
    """Writes parts of one response that has begun. The server's own `send` begins it, ends it, and waits where the socket is full."""

    __slots__ = ("_cycle", "_flow")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow

    @property
    def is_open(self) -> bool:
        """The response, which has begun, has not ended, and its socket takes more."""
        cycle = self._cycle
        return not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)

    def write(self, part: bytes) -> None:
        """Only while it is open. `part` must not be empty: that would end a chunked body."""
        cycle = self._cycle
        if cycle.chunked_encoding:
            part = b"%x\r\n%b\r\n" % (len(part), part)
        cycle.transport.write(part)
