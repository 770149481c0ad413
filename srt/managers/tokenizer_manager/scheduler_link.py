"""A frontend's socket to the scheduler, read by an event loop. It notices when the scheduler's end has gone."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from srt.protocol.codec import protocol_hash
from srt.protocol.host_messages import MeetingPoints
from srt.protocol.link_errors import LinkBroken
from srt.protocol.links import DealerLink, Endpoint, frontend_endpoint
from srt.protocol.messages import FromFrontend, FrontendHello, Message

_MESSAGES_PER_TURN = 32  # then the event loop's other tasks get a turn
_LAST_WORDS_MS = 200

logger = logging.getLogger(__name__)


class SchedulerLink:
    """The link to one generation of the scheduler.

    It calls `on_message` for every message in order, and `on_idle` when none is left for now. At its end it calls one of two, once:
    `on_lost` if the scheduler is gone, `on_broken` if the scheduler's messages cannot be relied upon.
    """

    def __init__(
        self,
        *,
        index: int,
        generation: int,
        endpoint: Endpoint,
        process: str = "",
        on_message: Callable[[Message], None],
        on_idle: Callable[[], None],
        on_lost: Callable[[], None],
        on_broken: Callable[[str], None],
    ) -> None:
        """Connect and say hello. Only the answer proves that a scheduler is there. Must run in the event loop's thread.

        process: a random text that all links of this process have in common.
        """
        self._on_message = on_message
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Random, so that a restarted frontend is not taken for its predecessor with the same index.
        identity = f"f{index}.{secrets.token_hex(4)}".encode()
        self._link = DealerLink(self._context, endpoint.path, generation, identity, endpoint.keys)
        self._monitor: Any = self._link.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._is_open = True
        self._is_turn_due = False
        self._fd, self._monitor_fd = int(self._link.socket.FD), int(self._monitor.FD)
        self._loop.add_reader(self._fd, self._read)
        self._loop.add_reader(self._monitor_fd, self._read_monitor)
        self.send(FrontendHello(index, protocol_hash(), process))
        self._read_monitor()

    @property
    def is_open(self) -> bool:
        return self._is_open

    def send(self, message: FromFrontend) -> None:
        """Queue the message. Does nothing after the end of the link."""
        if not self._is_open:
            return
        self._link.send(message)
        self._schedule_read()

    def close(self) -> None:
        """Close the link, waiting briefly for queued messages to leave. No callback is called any more."""
        self._end(_LAST_WORDS_MS)

    def drop(self) -> None:
        """Close the link and discard queued messages: the other end is gone."""
        self._end(0)

    def _schedule_read(self) -> None:
        """Schedule a read in the event loop's next turn: the socket's descriptor is edge-triggered, and a send may consume an edge."""
        if not self._is_turn_due:
            self._is_turn_due = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._is_turn_due = False
        if self._receive_messages(_MESSAGES_PER_TURN) == _MESSAGES_PER_TURN:
            self._schedule_read()
        elif self._is_open:
            self._on_idle()

    def _read_monitor(self) -> None:
        while self._is_open:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._receive_messages()  # messages that arrived before the end still count
                if self._is_open:
                    self._end(0)
                    self._on_lost()

    def _receive_messages(self, most: int | None = None) -> int:
        """Pass arrived messages, at most `most`, to `on_message`; return their number."""
        count = 0
        try:
            while self._is_open and count != most and (message := self._link.receive()) is not None:
                self._on_message(message)
                count += 1
        except LinkBroken as error:
            self._break(str(error))
        except Exception as error:  # a half-handled message leaves state that cannot be trusted
            logger.exception("A message from the scheduler could not be handled.")
            self._break(f"internal error: {type(error).__name__} {error}")
        return count

    def _break(self, reason: str) -> None:
        if self._is_open:
            logger.debug("The link to the scheduler is broken: %s.", reason)
            self._end(0)
            self._on_broken(reason)

    def _end(self, linger_ms: int) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._loop.remove_reader(self._fd)
        self._loop.remove_reader(self._monitor_fd)
        self._link.socket.disable_monitor()
        self._monitor.close(0)
        self._link.close(linger_ms)
        self._context.term()  # waits up to `linger_ms` for queued messages to leave


def connector(
    index: int, run_dir: str, generations: Sequence[int], meeting: MeetingPoints | None
) -> Callable[..., SchedulerLink]:
    """Return a function that links frontend `index` to the scheduler of a generation.

    Its arguments: the generation, the `address` that EngineReplaced gave, and the link's callbacks. `generations` are those of the
    start, whose addresses `meeting` has.
    """
    process = secrets.token_hex(8)
    first = {} if meeting is None else dict(zip(generations, meeting.frontends, strict=True))

    def connect(generation: int, address: str, **callbacks: Any) -> SchedulerLink:
        endpoint = frontend_endpoint(run_dir, generation, address or first.get(generation, ""), meeting)
        return SchedulerLink(index=index, generation=generation, endpoint=endpoint, process=process, **callbacks)

    return connect
