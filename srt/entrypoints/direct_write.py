"""The short way from a stream to its socket: no coroutine, no task that wakes, one write for what one step brought."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "srt.direct_write"  # under this name a scope has its DirectWriter


class DirectWriter:
    """Writes parts of one response that has begun. The server's own `send` begins it, ends it, and waits where the socket is full."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_open(self) -> bool:
        """The response has begun, has not ended, and its socket takes more."""
        cycle = self._cycle
        return (
            cycle.response_started
            and not cycle.response_complete
            and not cycle.disconnected
            and not cycle.flow.write_paused
        )

    def write(self, part: bytes) -> None:
        """Only while it is open. `part` must not be empty: that would end a chunked body."""
        if self._cycle.chunked_encoding:
            part = b"%x\r\n%b\r\n" % (len(part), part)
        self._cycle.transport.write(part)
