"""Direct writes of a stream's parts to its socket, without a coroutine or a task switch: one write for each step's tokens."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EXTENSION = "srt.direct_write"  # key of the DirectWriter in an ASGI scope's extensions


class DirectWriter:
    """A writer for parts of a response that has begun. The server's own `send` begins and ends it, and waits when the socket is full."""

    __slots__ = ("_cycle", "_flow")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow

    @property
    def is_open(self) -> bool:
        """True if the response has not ended and its socket accepts more. Only meaningful once the response has begun."""
        cycle = self._cycle
        return not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)

    def write(self, part: bytes) -> None:
        """Write a part; call it only while `is_open`. `part` must not be empty: that would end a chunked body."""
        cycle = self._cycle
        if cycle.chunked_encoding:
            part = b"%x\r\n%b\r\n" % (len(part), part)
        cycle.transport.write(part)
