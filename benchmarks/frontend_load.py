"""Reads a thousand streams at next to no cost: raw sockets and epoll. What came is taken apart when all is over."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(slots=True)
class Stream:
    """One answer as it came: the bytes of each read, and when they were read."""

    parts: list[bytes] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def events(self) -> list[bytes]:
        """The events of the body, [DONE] included."""
        head, _, rest = b"".join(self.parts).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head[:200]
        body = bytearray()
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            body += rest[:length]
            rest = rest[length + 2 :]
        events = bytes(body).split(b"\n\n")
        assert events.pop() == b"", "the last event is cut"
        return events

    def num_events_before(self, time_s: float) -> int:
        return sum(part.count(b"data: ") for part, at_s in zip(self.parts, self.times_s, strict=True) if at_s <= time_s)

    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times_s, self.times_s[1:], strict=False)]


def text_of(events: list[bytes]) -> str:
    """What a stream of /v1/completions says, and that it ended as it should."""
    assert events[-1] == b"data: [DONE]", events[-1]
    return "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-1])


def read_all(
    url: str, path: str, bodies: list[bytes], patience_s: float, span_s: float, mark: Callable[[], None]
) -> list[Stream]:
    """POST all bodies at once, each on a connection of its own, and read their answers until the server closes. `mark` is called
    at the first byte of all, and `span_s` seconds later."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    poll = select.epoll()
    streams: dict[int, tuple[socket.socket, Stream]] = {}
    answers = []
    for body in bodies:
        connection = socket.create_connection((parts.hostname, parts.port))
        head = (
            f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        connection.sendall(head.encode() + b"connection: close\r\n\r\n" + body)
        connection.setblocking(False)
        stream = Stream()
        answers.append(stream)
        streams[connection.fileno()] = connection, stream
        poll.register(connection.fileno(), select.EPOLLIN)
    marks_s: list[float] = []
    deadline_s = time.monotonic() + patience_s
    while streams:
        ready = poll.poll(max(0.0, deadline_s - time.monotonic()))
        assert ready or time.monotonic() < deadline_s, f"{len(streams)} streams hang"
        now_s = time.monotonic()
        if (ready and len(marks_s) == 0) or (len(marks_s) == 1 and now_s >= marks_s[0] + span_s):
            marks_s.append(now_s)
            mark()
        for number, _ in ready:
            connection, stream = streams[number]
            part = connection.recv(1 << 16)
            if part:
                stream.parts.append(part)
                stream.times_s.append(now_s)
            else:
                poll.unregister(number)
                connection.close()
                del streams[number]
    poll.close()
    return answers
